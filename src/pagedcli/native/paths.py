"""The instruction sets that the native kernels use (see paths.h), for notes, `doctor`, `bench` and tests."""

import ctypes
import enum
import timeit
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial


class Path(enum.IntEnum):
    """enum Path"""

    FMA = 0
    BF16_DOT = 1
    BF16_TILES = 2
    INT8_VECTOR = 3
    INT8_TILES = 4


NAMES = {
    Path.FMA: "float32 multiply-adds",
    Path.BF16_DOT: "bfloat16 dot products",
    Path.BF16_TILES: "bfloat16 tiles",
    Path.INT8_VECTOR: "int8 dot products",
    Path.INT8_TILES: "int8 tiles",
}
BF16_PATHS = (Path.FMA, Path.BF16_DOT, Path.BF16_TILES)  # paths with products of bfloat16
INT8_PATHS = (Path.INT8_VECTOR, Path.INT8_TILES)


def bf16_path(library: ctypes.CDLL) -> Path:
    """The path for bfloat16 products if the shape fills tiles."""
    return Path(library.native_bf16_path())


def int8_path(library: ctypes.CDLL) -> Path:
    """The path for int8 weights if the shape fills tiles."""
    return Path(library.native_int8_path())


def path_notes(library: ctypes.CDLL) -> tuple[str, ...]:
    """A note for the user if the processor has tile registers but the system does not permit their use."""
    if not library.native_has_tiles() or library.native_may_use_tiles():
        return ()
    used = NAMES[bf16_path(library)]
    return (
        f"the system refuses the tile registers (AMX) of this processor: bfloat16 uses {used}, several times slower",
    )


@dataclass(frozen=True, slots=True)
class PathPeak:
    """The peak of a path, with operands in registers."""

    path: Path
    flop_per_s: float  # two operations per multiply-add, all threads


def measure_peaks(library: ctypes.CDLL, paths: Iterable[Path], threads: int) -> list[PathPeak]:
    """The peaks of those `paths` that this processor has, fastest first. Takes about 10 ms per path. The maximum of
    many samples, because other work on the machine can only lower a sample."""
    run = library.native_path_rounds
    run.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    run.restype = ctypes.c_int64
    out = (ctypes.c_float * threads)()
    peaks = []
    for path in paths:
        operations = run(path, 1, threads, out)
        if not operations:
            continue
        count = max(1, 40_000_000 // operations)  # some 0.1 ms
        seconds = min(timeit.repeat(partial(run, path, count, threads, out), number=1, repeat=60))
        peaks.append(PathPeak(path, operations * count * threads / seconds))
    return sorted(peaks, key=lambda peak: -peak.flop_per_s)
