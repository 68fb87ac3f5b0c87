"""Files and folders by URL (s3://, gs://, hf:// and all others that fsspec knows), and folders of this machine alike.

Used wherever a path may be a URL. Credentials are found as each service's own tools find them. fsspec comes with torch,
the file systems with the extra `cloud`.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import whole_file

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)  # no single letter, which is a drive
_PROBLEMS = {  # what a service's error says, in lower case -> the next action
    "credentials": "log in as for the service's own tools (AWS_PROFILE, gcloud auth, hf auth login)",
    "bucket does not exist": "create the bucket, or correct its name",
    "forbidden|denied|unauthorized|401|403": "these credentials may not do this: check them, and the bucket's policy",
    "connect|resolve|timed? ?out": "check the network, and AWS_ENDPOINT_URL if it is set; then run the command again",
}


def is_url(name: object) -> bool:
    return _URL.match(str(name)) is not None


@contextmanager
def reaching(url: str, what: str) -> Iterator[None]:
    """Within this context any error of a service becomes one that says what cannot be done: 'read', 'write'. A missing
    file and one that must not exist stay what they are. Raises: PagedcliError."""
    try:
        yield
    except (PagedcliError, FileExistsError):
        raise
    except FileNotFoundError as error:
        if "bucket" not in str(error):
            raise
        raise PagedcliError(f"cannot {what} {url}: {error}", hint=_hint_of(error)) from error
    except Exception as error:  # services raise errors of their own
        raise PagedcliError(f"cannot {what} {url}: {error or type(error).__name__}", hint=_hint_of(error)) from error


def _hint_of(error: Exception) -> str | None:
    said = f"{type(error).__name__} {error}".lower()
    return next((hint for pattern, hint in _PROBLEMS.items() if re.search(pattern, said)), None)


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it. Raises: UsageError if it is of an unknown kind, or its
    package is not installed."""
    import fsspec  # type: ignore[import-untyped]

    kind = url.partition("://")[0]
    try:
        return cast(tuple[Any, str], fsspec.url_to_fs(url, use_listings_cache=False))
    except ImportError as error:
        raise UsageError(f"{url} needs a package: {error}", hint="pip install 'pagedcli[cloud]'") from error
    except ValueError as error:
        raise UsageError(
            f"{url}: fsspec knows no {kind}:// ({error})", hint="s3://, gs:// and hf:// are known"
        ) from error


def open_url(url: str) -> BinaryIO:
    """The content of a file, streamed. Raises: PagedcliError; FileNotFoundError."""
    files, path = file_system(url)
    with reaching(url, "read"):
        return cast(BinaryIO, files.open(path, "rb"))


class Folder:
    """A folder of small and large files, each of which appears whole: of this machine, or in a bucket.

    Names are relative, with '/' between levels. Raises, in every method: PagedcliError; FileNotFoundError for a file
    that is not there.
    """

    def __init__(self, url: str | Path) -> None:
        self.url = str(url).rstrip("/") or "/"
        self._is_local = not is_url(self.url)
        self._files, self._path = (
            file_system(self.url) if not self._is_local else file_system(f"file://{os.path.abspath(url)}")
        )

    def __str__(self) -> str:
        return self.url

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def names(self, below: str = "") -> list[str]:
        """All files in the folder or in one below it, sorted, those of subfolders too; none if it does not exist."""
        where = f"{self._path}/{below}".rstrip("/")
        with reaching(self.url_of(below), "list"):
            self._files.invalidate_cache()
            with suppress(FileNotFoundError):
                found = sorted(name[len(self._path) + 1 :] for name in self._files.find(where))
                return [name for name in found if not name.rpartition("/")[2].startswith(".")]  # not yet complete
        return []

    def read(self, name: str) -> bytes:
        with reaching(self.url_of(name), "read"):
            return cast(bytes, self._files.cat_file(self._at(name)))

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it."""
        with reaching(self.url_of(name), "write"):
            if self._is_local:
                with whole_file(self._local(name), overwrite=True) as file:
                    file.write(content)
            else:
                self._files.pipe_file(self._at(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that does not exist. Returns whether it did not: of all that create it at once, one gets True.

        `content` must be the caller's alone, because a repeated request may find its own first attempt.
        """
        with reaching(self.url_of(name), "create"):
            try:
                if self._is_local:
                    self._create_local(self._local(name), content)
                else:
                    self._files.pipe_file(self._at(name), content, mode="create")
            except FileExistsError:
                with suppress(FileNotFoundError):
                    return self.read(name) == content
                return False
            return True

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""
        with reaching(self.url_of(name), "remove"), suppress(FileNotFoundError):
            self._files.rm_file(self._at(name))

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file to this machine."""
        with (
            reaching(self.url_of(name), "read"),
            self._files.open(self._at(name), "rb") as file,
            whole_file(path, overwrite=True, durable=False) as to,
        ):
            shutil.copyfileobj(file, to)

    def send(self, path: Path, name: str) -> None:
        """Copy a file of this machine into the folder."""
        with reaching(self.url_of(name), "write"):
            if self._is_local:
                with whole_file(self._local(name), overwrite=True) as to, path.open("rb") as file:
                    shutil.copyfileobj(file, to)
            else:
                self._files.put_file(str(path), self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _local(self, name: str) -> Path:
        path = Path(self._at(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @staticmethod
    def _create_local(path: Path, content: bytes) -> None:
        """A link to a complete file, because a name that is opened exclusively is visible while it is still empty."""
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        hidden.write_bytes(content)
        try:
            os.link(hidden, path)
        finally:
            hidden.unlink()
