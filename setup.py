"""Builds the package. It exists for three things that pyproject.toml cannot say.

The links of the README on a package index, which has no docs folder: the address of the repository stands in one place,
`Repository` of `[project.urls]` in pyproject.toml. Where it is set, relative links of the README become links into the
repository at the tag of this version; else they stay as they are.

The kernels of a wheel for one platform: with $PAGEDCLI_LIBRARIES, a folder of libraries made by
scripts/build_libraries.py, and $PAGEDCLI_WHEEL_PLATFORM, its tag. `make wheels` sets both. Without them the wheel is
pure Python, and the kernels are compiled on first use.

An sdist of the same bytes whenever it is made: with $SOURCE_DATE_EPOCH, as setuptools does it for wheels alone.
"""

import gzip
import os
import re
import shutil
import tarfile
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

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


def write_archive(path: Path, folder: Path, *, made_s: int) -> None:
    """The folder as a .tar.gz that depends on names, contents and modes only. `made_s`: seconds since 1970."""

    def without_traces(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = made_s, 0, 0, "", ""
        return entry

    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=made_s) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        archive.add(folder, folder.name, filter=without_traces)


class ReproducibleSdist(sdist):
    """The sdist, dated by $SOURCE_DATE_EPOCH where that is set."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **owner):  # type: ignore[no-untyped-def]
        made_s = os.environ.get("SOURCE_DATE_EPOCH")
        if made_s is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, **owner)
        path = Path(f"{base_name}.tar.gz")
        write_archive(path, Path(base_dir), made_s=int(made_s))
        return str(path)


if __name__ == "__main__":
    platform = os.environ.get("PAGEDCLI_WHEEL_PLATFORM")
    setup(
        long_description=long_description(),
        long_description_content_type="text/markdown",
        cmdclass={"build_py": BuildWithLibraries, "sdist": ReproducibleSdist},
        options={} if platform is None else {"bdist_wheel": {"plat_name": platform}},
    )
