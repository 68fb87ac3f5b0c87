"""Which instructions the native kernels multiply with (see paths.h), for notes, `doctor`, `bench` and tests."""

import ctypes
import enum
from collections.abc import Iterator
from contextlib import contextmanager


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


def bf16_path(library: ctypes.CDLL) -> Path:
    """How bfloat16 is multiplied where the shape fills tiles."""
    return Path(library.native_bf16_path())


def int8_path(library: ctypes.CDLL) -> Path:
    """How int8 weights are multiplied where the shape fills tiles."""
    return Path(library.native_int8_path())


def path_notes(library: ctypes.CDLL) -> tuple[str, ...]:
    """What a person should know: the processor has tile registers, and the system does not let us use them."""
    if not library.native_has_tiles() or library.native_may_use_tiles():
        return ()
    used = NAMES[bf16_path(library)]
    return (
        f"the system refuses the tile registers (AMX) of this processor: bfloat16 uses {used}, several times slower",
    )


@contextmanager
def avoiding(library: ctypes.CDLL, *paths: Path) -> Iterator[None]:
    """Do as if this processor did not have these paths, in all threads."""
    for path in paths:
        library.native_avoid_path(ctypes.c_int64(path), 1)
    try:
        yield
    finally:
        for path in paths:
            library.native_avoid_path(ctypes.c_int64(path), 0)
