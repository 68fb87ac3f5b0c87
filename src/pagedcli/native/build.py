"""Finds a C++ compiler, builds the sources in this folder once per machine and loads the result.

A build takes seconds and is reported to the logger "pagedcli" before and after, which the command line shows.

The library lives in the user's cache directory under a name that hashes sources, compiler, flags and processor, so an
update of any of them triggers a new build, and different machines can share a home directory.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pagedcli.errors import BackendError
from pagedcli.native.paths import NAMES, bf16_path, int8_path, path_notes

SOURCE_DIR = Path(__file__).parent
BUILD_TIMEOUT_S = 300
# Set and not empty: kernels for tile registers (AMX) run in plain C++, slowly, on any processor. For tests.
EMULATE_TILES = "PAGEDCLI_EMULATE_TILES"
_SCRATCH = "building-"  # folders of builds, with all their temporary files
log = logging.getLogger("pagedcli")


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library and how it was built."""

    functions: ctypes.CDLL  # calls release the GIL
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compiler:
    """A command that compiles C++, and a text that identifies the compiler's version."""

    command: tuple[str, ...]
    identity: str


def load_library() -> NativeLibrary:
    """The native library, built if this machine has not built it yet (seconds, once).

    Raises: BackendError if there is no compiler or it fails, with its last error line. Both results are cached.
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
    try:
        compiler = find_compiler()
        directory, notes = cache_directory()
        is_kept = not notes
        try:
            path = directory / f"kernels-{build_key(compiler)}.so"
            if not is_whole(path):
                notes += (_build_alone(compiler, path, is_kept=is_kept),)
            functions = ctypes.CDLL(str(path))
        finally:
            if not is_kept:
                shutil.rmtree(directory, ignore_errors=True)  # a loaded library needs no name
    except BackendError as error:
        return error
    except OSError as error:
        return BackendError(f"the native library cannot be loaded: {error}")
    functions.native_read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    functions.native_read_all.restype = ctypes.c_double
    return NativeLibrary(functions, notes + path_notes(functions))


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
    if sys.platform == "win32":
        raise BackendError("native kernels are built on Linux and macOS only")
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
        hint="install g++ or clang++, or: pip install ziglang",
    )


def compile_flags() -> tuple[str, ...]:
    """The flags of every build: for this processor, without fast-math (masking relies on infinities)."""
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    emulated = ("-DEMULATE_TILES",) if os.environ.get(EMULATE_TILES) else ()
    return ("-std=c++17", "-O3", native, "-fPIC", "-pthread", "-fno-math-errno", "-w", *emulated)


def build_key(compiler: Compiler) -> str:
    """Twenty hexadecimal digits that identify everything that affects the built library."""
    digest = hashlib.sha256()
    for part in (compiler.identity, *compile_flags(), platform.machine(), _processor_features()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCE_DIR.glob("*.[ch]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


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
        return Path(tempfile.mkdtemp(prefix="pagedcli-native-")), (note,)
    about = directory.stat()
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BackendError(
            f"{directory} can be written by others, and code is loaded from it",
            hint=f"chmod 700 {directory}, or set XDG_CACHE_HOME",
        )
    return directory, ()


def _build_alone(compiler: Compiler, path: Path, *, is_kept: bool) -> str:
    """build, in one process at a time. Also removes what killed builds left. Returns the note."""
    import fcntl  # not on Windows

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
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix=_SCRATCH) as scratch,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        folder = Path(scratch)
        sources = sorted(SOURCE_DIR.glob("*.cpp"), key=lambda source: -source.stat().st_size)  # the slowest first
        objects = [str(folder / f"{source.stem}.o") for source in sources]
        jobs = [["-c", str(source), "-o", made] for source, made in zip(sources, objects, strict=True)]
        list(pool.map(lambda job: _run_compiler(compiler, job, folder), jobs))
        library = folder / path.name
        _run_compiler(compiler, ["-shared", *objects, "-o", str(library)], folder)
        digest = _digest_file(library)
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        for made in (library, digest):
            with made.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(made, path.parent / made.name)
    seconds = time.monotonic() - started
    log.info("compiled the native CPU kernels in %.1f s", seconds)
    return f"compiled the native CPU kernels in {seconds:.1f} s ({f'kept in {path.parent}' if is_kept else 'not kept'})"


def _run_compiler(compiler: Compiler, arguments: list[str], scratch: Path) -> None:
    command = [*compiler.command, *compile_flags(), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"the C++ compiler failed: {error}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if "error" in line] or lines[-1:]
        raise BackendError(f"the C++ compiler {compiler.command[0]} failed: {errors[0]}")


def processor_flags() -> frozenset[str]:
    """The processor's features by the system's names for them; empty if the system reports none."""
    lines = [line for line in _processor_features().splitlines() if line.startswith(("flags", "Features"))]
    return frozenset(lines[0].split(":", 1)[1].split()) if lines else frozenset()


def instructions(library: NativeLibrary) -> str:
    """What the bits of a result depend on besides the input, e.g. "bfloat16 tiles, int8 tiles, avx512f"."""
    vectors = next((name for name in ("avx512f", "avx2") if name in processor_flags()), platform.machine())
    return f"{NAMES[bf16_path(library.functions)]}, {NAMES[int8_path(library.functions)]}, {vectors}"


def _processor_features() -> str:
    """What determines -march=native, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    found = {line.split(":", 1)[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(found[name] for name in names if name in found)
