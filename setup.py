"""Builds the package. It exists for two things that pyproject.toml cannot say.

The links of the README on a package index, which has no docs folder: the address of the repository stands in one place,
`Repository` of `[project.urls]` in pyproject.toml. Where it is set, relative links of the README become links into the
repository at the tag of this version; else they stay as they are.

The kernels of a wheel for one platform: with $PAGEDCLI_LIBRARIES, a folder of libraries made by
scripts/build_libraries.py, and $PAGEDCLI_WHEEL_PLATFORM, its tag. `make wheels` sets both. Without them the wheel is
pure Python, and the kernels are compiled on first use.
"""

import os
import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

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
    if repository is None:
        return readme
    package = (ROOT / "src" / "pagedcli" / "__init__.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"', package, re.MULTILINE)
    return with_absolute_links(readme, repository, version)


class BuildWithLibraries(build_py):
    """The package's files, with the libraries of $PAGEDCLI_LIBRARIES next to the kernels' sources."""

    def run(self) -> None:
        super().run()
        libraries = os.environ.get("PAGEDCLI_LIBRARIES")
        if libraries is not None and not self.editable_mode:
            shutil.copytree(libraries, Path(self.build_lib) / "pagedcli" / "native" / "libraries", dirs_exist_ok=True)


if __name__ == "__main__":
    platform = os.environ.get("PAGEDCLI_WHEEL_PLATFORM")
    setup(
        long_description=long_description(),
        long_description_content_type="text/markdown",
        cmdclass={"build_py": BuildWithLibraries},
        options={} if platform is None else {"bdist_wheel": {"plat_name": platform}},
    )
