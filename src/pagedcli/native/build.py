"""Loads the native library: the one that the wheel brought along for this processor, else one that is built from the
sources in this folder, once per machine.

A build takes seconds and is reported to the logger "pagedcli" before and after, which the command line shows. Its
library lives in the user's cache directory under a name that hashes sources, compiler, flags and processor, so an
update of any of them triggers a new build, and different machines can share a home directory.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pagedcli.errors import BackendError
from pagedcli.files import is_ours_alone
from pagedcli.native import prebuilt
from pagedcli.native.paths import NAMES, bf16_path, int8_path, path_notes
from pagedcli.native.prebuilt import SOURCE_DIR, Installed, source_digest
from pagedcli.native.processor import processor_features, processor_flags

BUILD_TIMEOUT_S = 300
# "build": the sources are compiled although the wheel brought a library along. A target's name: its library is loaded.
NATIVE = "PAGEDCLI_NATIVE"
# Set and not empty: kernels for tile registers (AMX) run in plain C++, slowly, on any processor. For tests.
EMULATE_TILES = "PAGEDCLI_EMULATE_TILES"
_SCRATCH = "building-"  # folders of builds, with all their temporary files
_TEMPORARY = "pagedcli-native-"  # a folder of one process, where the cache folder cannot be written
log = logging.getLogger("pagedcli")


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library and where it comes from."""

    functions: ctypes.CDLL  # calls release the GIL
    notes: tuple[str, ...]
    target: str | None = None  # name of a library that was installed, see prebuilt.TARGETS
    why: str = ""  # why it is this one, in words

    @property
    def origin(self) -> str:
        """Where it comes from and why, in words."""
        source = "compiled on this machine" if self.target is None else f"{self.target}, installed with the package"
        return f"{source} ({self.why})" if self.why else source


@dataclass(frozen=True, slots=True)
class Compiler:
    """A command that compiles C++, and a text that identifies the compiler's version."""

    command: tuple[str, ...]
    identity: str


def load_library() -> NativeLibrary:
    """The native library: the installed one, else built if this machine has not built it yet (seconds, once).

    Raises: BackendError if there is neither, with the compiler's last error line. Both results are cached.
    """
    outcome = _outcome()
    if isinstance(outcome, BackendError):
        raise BackendError(outcome.message, hint=outcome.hint)
    return outcome


def loaded_library() -> NativeLibrary | None:
    """The native library if it is already loaded in this process; never builds."""
    outcome = _outcome() if _outcome.cache_info().currsize else None
    return outcome if isinstance(outcome, NativeLibrary) else None


@functools.cache
def _outcome() -> NativeLibrary | BackendError:
    found: Installed | str = ""
    try:
        found = _installed()
        target, why = (None, found) if isinstance(found, str) else (found.name, found.why)
        path, notes = _built() if isinstance(found, str) else (found.path, ())
        try:
            functions = ctypes.CDLL(str(path))
        finally:
            if path.parent.name.startswith(_TEMPORARY):
                shutil.rmtree(path.parent, ignore_errors=True)  # a loaded library needs no name
    except BackendError as error:
        return error
    except OSError as error:
        is_installed = isinstance(found, Installed)
        hint = f"{NATIVE}=build compiles the kernels on this machine" if is_installed else None
        return BackendError(f"the native library cannot be loaded: {error}", hint=hint)
    functions.native_read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    functions.native_read_all.restype = ctypes.c_double
    return NativeLibrary(functions, notes + path_notes(functions), target, why)


def _installed() -> Installed | str:
    """The wheel's library for this processor, or the one that is asked for; in words why the sources are compiled."""
    asked, names = os.environ.get(NATIVE, ""), [each.name for each in prebuilt.for_this_system()]
    if asked not in ("", "build", *names):
        hint = f"{NATIVE}=build compiles the kernels here, or name a library ({', '.join(names)}), or unset it"
        raise BackendError(f"{NATIVE} is {asked!r}", hint=hint)
    if os.environ.get(EMULATE_TILES):
        return f"{EMULATE_TILES} is set"
    return f"{NATIVE}=build" if asked == "build" else prebuilt.library(asked or None)


def _built() -> tuple[Path, tuple[str, ...]]:
    """The library that this machine has compiled, or compiles now."""
    compiler = find_compiler()
    directory, notes = cache_directory()
    path = directory / f"kernels-{build_key(compiler)}.so"
    try:
        if not is_whole(path):
            notes += (_build_alone(compiler, path, is_kept=not notes),)
    except BaseException:
        if notes:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    return path, notes


def is_whole(path: Path) -> bool:
    """Whether a library is there as it was built: loading a truncated one would end the process."""
    try:
        if not (path.is_file() and _digest_file(path).is_file()):  # reading a pipe would wait for ever
            return False
        return _digest_file(path).read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def find_compiler() -> Compiler:
    """$CXX, else the first of c++, g++, clang++ on the path, else the compiler inside the package `ziglang`.

    Raises: BackendError if there is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    if named and shutil.which(named[0]) is None:
        raise BackendError(f"the C++ compiler of $CXX does not exist: {named[0]}", hint="correct or unset CXX")
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(command[0])
        if found is not None:
            real = Path(found).resolve()
            about = real.stat()
            return Compiler((found, *command[1:]), f"{real} {about.st_size} {about.st_mtime_ns} {command[1:]}")
    if importlib.util.find_spec("ziglang") is not None:
        version = importlib.metadata.version("ziglang")
        # -P: a ziglang.py in the current folder must not run
        return Compiler((sys.executable, "-P", "-m", "ziglang", "c++"), f"ziglang {version}")
    raise BackendError(
        "no C++ compiler found (tried $CXX, c++, g++, clang++, ziglang)",
        hint="install g++ or clang++, or: pip install 'pagedcli[native]'",
    )


# masking relies on infinities: no fast-math
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-w")


def compile_flags() -> tuple[str, ...]:
    """The flags of every build on this machine."""
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    emulated = ("-DEMULATE_TILES", "-O1") if os.environ.get(EMULATE_TILES) else ()  # compiled in half the time
    return (*FLAGS, native, *emulated)


def build_key(compiler: Compiler) -> str:
    """Twenty hexadecimal digits that identify everything that affects the built library."""
    return _key(compiler.identity, *compile_flags())


def library_key() -> str:
    """Identify the library that load_library would load, without loading or building it.

    Raises: BackendError if there is neither an installed library nor a compiler.
    """
    installed = _installed()
    return build_key(find_compiler()) if isinstance(installed, str) else _key(installed.name)


def _key(*parts: str) -> str:
    whole = "\0".join((*parts, source_digest(), platform.machine(), processor_features()))
    return hashlib.sha256(whole.encode()).hexdigest()[:20]


def cache_directory() -> tuple[Path, tuple[str, ...]]:
    """A directory that only this user can write to, as code is loaded from it, and notes about it.

    Raises: BackendError if it belongs to another user or others can write to it.
    """
    fallback = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    directory = Path(os.environ.get("XDG_CACHE_HOME") or fallback) / "pagedcli" / "native"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        note = f"{directory} is not writable: the native kernels are built again in each process"
        return Path(tempfile.mkdtemp(prefix=_TEMPORARY)), (note,)
    if not is_ours_alone(directory):
        raise BackendError(
            f"{directory} can be written by others, and code is loaded from it",
            hint=f"chmod 700 {directory}, or set XDG_CACHE_HOME",
        )
    return directory, ()


def _build_alone(compiler: Compiler, path: Path, *, is_kept: bool) -> str:
    """build, in one process at a time. Also removes what killed builds left. Returns the note."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: two builds at once are only slower
            fcntl.flock(folder, fcntl.LOCK_EX)
        if is_whole(path):
            return "another process compiled the native CPU kernels meanwhile"
        for left in path.parent.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        return build(compiler, path, is_kept=is_kept)
    finally:
        os.close(folder)


def build(compiler: Compiler, path: Path, *, is_kept: bool = True) -> str:
    """Compile the sources to `path`, atomically, with its digest next to it. Returns the time it took, in words.

    Raises: BackendError with the compiler's first error line.
    """
    how_often = "once on this machine" if is_kept else "again in each process: the cache folder is not writable"
    command = " ".join(compiler.command)
    log.info("compiling the native CPU kernels with %s, 10 to 40 seconds, %s", command, how_often)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_SCRATCH) as scratch:
        library = compile_sources(compiler, compile_flags(), Path(scratch) / path.name)
        digest = _digest_file(library)
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        for made in (library, digest):
            with made.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(made, path.parent / made.name)
    seconds = time.monotonic() - started
    log.info("compiled the native CPU kernels in %.1f s", seconds)
    return f"compiled the native CPU kernels in {seconds:.1f} s ({f'kept in {path.parent}' if is_kept else 'not kept'})"


def compile_sources(
    compiler: Compiler, flags: tuple[str, ...], library: Path, *, timeout_s: int = BUILD_TIMEOUT_S
) -> Path:
    """Compile the sources in parallel, in the library's folder; returns the library.

    Raises: BackendError with the compiler's first error line, or if one of its processes takes longer than timeout_s.
    """
    folder = library.parent
    sources = sorted(SOURCE_DIR.glob("*.cpp"), key=lambda source: -source.stat().st_size)  # the slowest first
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    jobs = [[*flags, "-c", str(source), "-o", made] for source, made in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: _run_compiler(compiler, job, folder, timeout_s), jobs))
    _run_compiler(compiler, [*flags, "-shared", *objects, "-o", str(library)], folder, timeout_s)
    return library


def _run_compiler(compiler: Compiler, arguments: list[str], scratch: Path, timeout_s: int) -> None:
    command = [*compiler.command, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"the C++ compiler failed: {error}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if "error" in line] or lines[-1:]
        raise BackendError(f"the C++ compiler {compiler.command[0]} failed: {errors[0]}")


def instructions(library: NativeLibrary) -> str:
    """What the bits of a result depend on besides the input, e.g. "bfloat16 tiles, int8 tiles, avx512f, avx512-bf16
    library". Compilers fuse other multiplications and additions, so a library that was compiled here is named apart."""
    vectors = next((name for name in ("avx512f", "avx2") if name in processor_flags()), platform.machine())
    parts = [NAMES[bf16_path(library.functions)], NAMES[int8_path(library.functions)], vectors]
    return ", ".join([*parts, f"{library.target} library"] if library.target else parts)
