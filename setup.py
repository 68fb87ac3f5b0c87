"""Builds the package. It exists for the links of the README on a package index, which has no docs folder.

The address of the repository stands in one place, `Repository` of `[project.urls]` in pyproject.toml. Where it is set,
relative links of the README become links into the repository at the tag of this version; else they stay as they are.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def with_absolute_links(readme: str, repository: str, version: str) -> str:
    """The README with `](docs/x.md)` as a link to the file, and `![...](docs/x.svg)` as one to the picture itself."""

    def absolute(match: re.Match[str]) -> str:
        is_picture, label, target = match.groups()
        view = "raw" if is_picture else "blob"
        return f"{is_picture}[{label}]({repository.rstrip('/')}/{view}/v{version}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)", absolute, readme)


def long_description() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    repository = project.get("urls", {}).get("Repository")
    return readme if repository is None else with_absolute_links(readme, repository, project["version"])


if __name__ == "__main__":
    setup(long_description=long_description(), long_description_content_type="text/markdown")
