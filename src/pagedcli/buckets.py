"""Files and folders by URL (s3://, gs://, hf:// and all others that fsspec knows), and folders of this machine alike.

Used wherever a path may be a URL. Credentials are found as each service's own tools find them. fsspec comes with torch,
the file systems with the extra `cloud`.
"""

import hashlib
import io
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import cache_home, whole_file
from pagedcli.printable import byte_text, show_as

_log = logging.getLogger("pagedcli")
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)  # no single letter, which is a drive
_READ_BYTES = 2**20
_LARGE_BYTES = 2**26  # copying such a file takes seconds, and is announced
_VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "mtime")  # what the services call it
_NO_BUCKET = "bucket does not exist"
_PROBLEMS = {  # what a service's error says, in lower case -> the next action
    "credentials": "log in as for the service's own tools (AWS_PROFILE, gcloud auth, hf auth login)",
    _NO_BUCKET: "create the bucket, or correct its name",
    r"forbidden|denied|unauthorized|\b40[13]\b": (
        "these credentials may not do this: check them, and the bucket's policy"
    ),
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
        if _NO_BUCKET not in str(error):
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
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints the errors that it raises, with tracebacks
    try:
        return cast(tuple[Any, str], fsspec.url_to_fs(url, use_listings_cache=False))
    except ImportError as error:
        raise UsageError(f"{url} needs a package: {error}", hint="pip install 'pagedcli[cloud]'") from error
    except ValueError as error:
        raise UsageError(
            f"{url}: fsspec knows no {kind}:// ({error})", hint="s3://, gs:// and hf:// are known"
        ) from error


def num_bytes(name: str) -> int:
    """The size of a file, of all that is below a folder, or of all that a pattern names. Raises: PagedcliError."""
    files, path = file_system(name if is_url(name) else f"file://{os.path.abspath(name)}")
    with reaching(name, "read"):
        return sum(files.du(each) for each in files.glob(path) or [path])


def open_url(url: str, *, at_random: bool = False) -> BinaryIO:
    """The content of a file, streamed. `at_random`: read here and there, not from its beginning to its end.

    Raises: UsageError if there is none; PagedcliError, also while it is read.
    """
    files, path = file_system(url)
    try:
        with reaching(url, "read"):
            file = _Stream(url, files.open(path, "rb", cache_type="none" if at_random else "readahead"))
    except FileNotFoundError as error:
        raise UsageError(f"there is no {url}") from error
    return cast(BinaryIO, file) if at_random else io.BufferedReader(file, _READ_BYTES)


class _Stream(io.RawIOBase):
    """A file of fsspec, whose errors say what cannot be read."""

    def __init__(self, url: str, file: BinaryIO) -> None:
        self._url, self._file = url, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        with reaching(self._url, "read"):
            content = self._file.read(len(view))
        view[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


def files_of(url: str) -> list[str] | None:
    """The URLs of the files in a folder, or of those that a pattern like s3://b/in/*.parquet matches, sorted; None: it
    is neither. Raises: UsageError for a pattern that matches none."""
    files, path = file_system(url)
    is_pattern = re.search(r"[*?\[]", path) is not None
    with reaching(url, "read"):
        if not is_pattern and not files.isdir(path):
            return None
        found = files.glob(path if is_pattern else f"{path.rstrip('/')}/*")
    if is_pattern and not found:
        raise UsageError(f"no file matches {url}")
    return [files.unstrip_protocol(name) for name in sorted(found)]


def copied_once(url: str, wanted: Callable[[str], bool]) -> Path:
    """A folder in the user's cache with the files of a bucket's folder that are wanted by name; they are copied again
    only where a size or a version has changed. It is empty if there are none."""
    bucket = Folder(url)
    found = bucket.files()
    folder = cached(url, *(f"{name} {about}" for name, about in sorted(found.items())))
    show_as(str(folder), url)
    bucket.fetch_all({name: size for name, (size, _) in found.items() if wanted(name)}, folder)
    return folder


def cached(*identity: str) -> Path:
    """The folder in the user's cache for what has this identity; made if there is none."""
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()
    folder = cache_home() / "buckets" / digest[:24]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


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

    def files(self, prefix: str = "") -> dict[str, tuple[int, str]]:
        """All files whose names begin so, with their bytes and their version, which differs where the content may."""
        with suppress(FileNotFoundError), reaching(f"{self.url_of(prefix)}*", "list"):
            self._files.invalidate_cache()
            found = self._files.find(self._path, detail=True, **({"prefix": prefix} if prefix else {}))
            named = {path[len(self._path) + 1 :]: about for path, about in found.items()}
            return {
                name: (about["size"], str(next((about[each] for each in _VERSIONS if each in about), "")))
                for name, about in named.items()
                if name and name.startswith(prefix)
            }
        return {}

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
        """Remove a file, or all that is below a folder; nothing happens if there is none."""
        with reaching(self.url_of(name), "remove"), suppress(FileNotFoundError):
            self._files.rm(self._at(name), recursive=True)

    def copy(self, name: str, to: str) -> None:
        """Copy a file within the folder, where a store can without sending it."""
        if self._is_local:
            self.send(Path(self._at(name)), to)
        else:
            with reaching(self.url_of(name), "copy"):
                self._files.cp_file(self._at(name), self._at(to))

    def age_s(self, name: str) -> float:
        """Seconds since a file was written, if the clocks of the store and of this machine agree."""
        with reaching(self.url_of(name), "read"):
            return time.time() - float(self._files.modified(self._at(name)).timestamp())

    def fetch(self, name: str, path: Path, num_bytes: int | None = None) -> None:
        """Copy a file, or only its first bytes, to this machine."""
        with (
            reaching(self.url_of(name), "read"),
            self._files.open(self._at(name), "rb") as file,
            whole_file(path, overwrite=True, durable=False) as to,
        ):
            if num_bytes is None:
                shutil.copyfileobj(file, to, _READ_BYTES)
            else:
                to.write(file.read(num_bytes))

    def fetch_all(self, sizes: Mapping[str, int], folder: Path) -> None:
        """Copy files, of these bytes each, unless they are there."""
        for name, size in sizes.items():
            if not (folder / name).exists():
                if size >= _LARGE_BYTES:
                    _log.info("copying %s (%s)", self.url_of(name), byte_text(size))
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                self.fetch(name, folder / name)

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
