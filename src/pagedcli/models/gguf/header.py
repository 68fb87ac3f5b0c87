"""The header of a GGUF file: its metadata, by name and kind, and where its tensors are. Free of torch.

A file is not trusted: what it says of sizes and offsets is compared with its length before anything is allocated.
"""

import math
import mmap
import re
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pagedcli.errors import MissingModelError, ModelError, shortage
from pagedcli.models.checkpoint_files import MOST_LAYERS
from pagedcli.models.gguf.types import REFUSED, TYPES, GgmlType

MAGIC = b"GGUF"
_HINT = "download the file again"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LEAST_ALIGNMENT = 8  # bytes; the specification says so, and no number is longer
# More than any model has: a hostile header must not take gigabytes, or minutes.
_MOST_BYTES, _MOST_VALUES, _MOST_TENSORS, _MOST_KEYS, _MOST_DIMS, _MOST_FILES = 2**27, 2**22, 2**16, 2**16, 4, 1000
_LARGEST_FACTORS = 2**16
_SETTLED_S = 10  # a file that changed since may change again within the resolution of its time
_LENGTH = struct.Struct("<Q")  # bytes of a string
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]  # outermost dimension first, as torch has it
    file: Path
    offset: int  # bytes from the file's beginning
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a model's file, or all parts of a split one, says before the tensors' bytes."""

    path: Path  # the file, of a split one the first
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def files(self) -> list[Path]:
        return sorted({tensor.file for tensor in self.tensors.values()} | {self.path})

    def error(self, what: str, hint: str | None = None) -> ModelError:
        return ModelError(f"{self.path}: {what}", hint=hint)


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, whatever its name: Ollama's have no suffix."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def find_gguf(folder: Path) -> Path | None:
    """The one model in a folder of GGUF files, of a split one the first file; None if there is none.

    Raises: MissingModelError if there are several.
    """
    names = sorted(path.name for path in folder.glob("*.gguf") if not path.name.startswith("mmproj"))
    firsts = [name for name in names if (part := _SPLIT.fullmatch(name)) is None or int(part[2]) == 1]
    if len(firsts) > 1:
        shown = ", ".join(firsts[:8]) + (", ..." if len(firsts) > 8 else "")
        raise MissingModelError(f"{folder} has several models: {shown}", hint=f"use --model {folder / firsts[0]}")
    return folder / (firsts or names)[0] if names else None


def read_header(path: Path) -> Header:
    """The header of a GGUF file, with those of the other parts if it is split.

    Raises: ModelError for a damaged file, a missing part, or a type of numbers that is not read.
    """
    metadata, tensors = _read_file(path)
    count = metadata.get("split.count", 0)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MOST_FILES:
        raise ModelError(f"{path}: split.count is {count!r:.40}", hint=_HINT)
    if count < 2:
        return Header(path, metadata, tensors)
    part = _SPLIT.fullmatch(path.name)
    if part is None or int(part[3]) != count:
        raise ModelError(
            f"{path} is one of {count} files, which its name does not say", hint=f"name it ...-00001-of-{count:05}.gguf"
        )
    files = [path.with_name(f"{part[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if int(part[2]) != 1:
        metadata, tensors = _read_file(files[0])
    for file in files[1:]:
        _, found = _read_file(file)
        if repeated := sorted(tensors.keys() & found.keys()):
            raise ModelError(f"{file}: tensor {repeated[0]!r} is also in another file", hint=_HINT)
        tensors = tensors | found
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(f"{files[0]}: {expected!r:.40} tensors are expected, there are {len(tensors)}", hint=_HINT)
    return Header(files[0], metadata, tensors)


def check_regular(path: Path) -> None:
    """Refuse a missing file, a folder, a device, and a FIFO, which would block whoever opens it. Raises: ModelError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ModelError(f"{path} is missing", hint="download all files of the model") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint=_HINT) from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a device or socket"
        raise ModelError(f"{path} is {what}, not a file", hint="remove it, or download the model again")


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    check_regular(path)
    about = path.stat()
    if time.time() - about.st_mtime < _SETTLED_S:
        return _read_new(path, ())
    return _read_once(path, (about.st_size, about.st_mtime_ns, about.st_ino, about.st_dev))


def _read_new(path: Path, state: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """What a file says. `state`: what changes with it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).read()
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise shortage(error, f"mapping {path}") or ModelError(f"cannot read {path}: {error}", hint=_HINT) from error


_read_once = lru_cache(maxsize=_MOST_FILES)(_read_new)  # a vocabulary takes a quarter of a second


class _Reader:
    """Reads one header from its beginning on."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._size = path, content, len(content)
        self._place = 0
        self._values_left = _MOST_VALUES

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._content[:4] != MAGIC:
            raise self._error("it does not begin as a GGUF file does")
        self._place = 4
        version = self._scalar("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "big-endian" if swapped in (2, 3) else f"of version {version}"
            raise self._error(f"it is {what}; versions 2 and 3, little-endian, are read", "convert the model again")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        if num_tensors > _MOST_TENSORS:
            raise self._error(f"it says that it has {num_tensors:,} tensors, allowed: {_MOST_TENSORS:,}")
        if num_keys > _MOST_KEYS:
            raise self._error(f"it says that it has {num_keys:,} keys, allowed: {_MOST_KEYS:,}")
        metadata = self._metadata(num_keys)
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < _LEAST_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r:.40}, not a power of two from {_LEAST_ALIGNMENT} on")
        start = -(-self._place // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, number, shape, offset in found:
            if name in tensors:
                raise self._error(f"it has two tensors {name!r:.80}")
            if offset % alignment:
                raise self._error(f"tensor {name!r:.80} begins at {offset:,}, not at a multiple of {alignment:,}")
            tensors[name] = self._placed(name, number, shape, start + offset)
        return metadata, tensors

    def _metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise self._error(f"it has two values of {key!r:.80}")
            metadata[key] = self._value(self._scalar("I"), key)
        return metadata

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._error(f"{key!r:.80} has a value of type {kind}, which GGUF does not define")
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind not in _SCALARS and kind != _STRING:
            raise self._error(f"{key!r:.80} is an array of type {kind}; only arrays of numbers and strings are read")
        self._values_left -= min(count, _MOST_VALUES + 1)
        if self._values_left < 0:
            raise self._error(f"{key!r:.80} has {count:,} values; at most {_MOST_VALUES:,} of all arrays are read")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        form = f"<{count}{_SCALARS[kind]}"
        place = self._take(struct.calcsize(form))
        return list(struct.unpack_from(form, self._content, place))

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, num_dims = self._string(), self._scalar("I")
        if not 1 <= num_dims <= _MOST_DIMS:
            raise self._error(f"tensor {name!r:.80} has {num_dims} dimensions, allowed: 1 to {_MOST_DIMS}")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))
        number = self._scalar("I")
        return name, number, shape[::-1], self._scalar("Q")

    def _placed(self, name: str, number: int, shape: tuple[int, ...], offset: int) -> TensorInfo:
        if number not in TYPES:
            if number not in REFUSED:
                raise self._error(f"tensor {name!r:.80} has type {number}, which is unknown")
            known, what = REFUSED[number]
            raise self._error(
                f"tensor {name!r:.80} is {known} ({what}), which is not read", "use a Q4_K_M or Q8_0 file"
            )
        kind = TYPES[number]
        if shape[-1] % kind.block:
            raise self._error(
                f"rows of {shape[-1]:,} numbers of tensor {name!r:.80} are not whole blocks of {kind.name}"
            )
        num_bytes = math.prod(shape) // kind.block * kind.num_bytes
        if 0 in shape or offset + num_bytes > self._size:
            raise self._error(
                f"tensor {name!r:.80} should have {num_bytes:,} bytes from {offset:,} on; the file has {self._size:,}"
            )
        return TensorInfo(name, kind, shape, self._path, offset, num_bytes)

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self._content, self._take(struct.calcsize("<" + form)))
        return value

    def _string(self) -> str:
        (num_bytes,) = _LENGTH.unpack_from(self._content, self._take(_LENGTH.size))
        place = self._take(num_bytes)
        return self._content[place : place + num_bytes].decode("utf-8", errors="replace")

    def _take(self, num_bytes: int) -> int:
        """The place of the next bytes, which are passed."""
        place = self._place
        self._place += num_bytes
        if self._place > self._size:
            raise self._error("it is cut short, or its header is damaged")
        if self._place > _MOST_BYTES:
            raise self._error(f"its header has more than {_MOST_BYTES:,} bytes")
        return place

    def _error(self, what: str, hint: str = _HINT) -> ModelError:
        return ModelError(f"{self._path}: {what}", hint=hint)


class Metadata:
    """Metadata with checked kinds, under the architecture's name."""

    def __init__(self, header: Header) -> None:
        architecture = header.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise header.error(f"general.architecture is {architecture!r:.40}, not a text")
        self.header, self.prefix = header, architecture

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def layers(self) -> int:
        found = self.number("block_count") - self.number("nextn_predict_layers", 0)
        if not 1 <= found <= MOST_LAYERS:
            raise self.header.error(f"{self.prefix}.block_count: {found:,} layers, allowed: 1 to {MOST_LAYERS:,}")
        return found

    def with_tensor(self, name: str) -> list[bool]:
        """Whether each layer has a tensor."""
        return [self.has(f"blk.{i}.{name}") for i in range(self.layers())]

    def get(self, name: str) -> Any:
        return self.header.metadata.get(f"{self.prefix}.{name}")

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; a list of one for each layer must have equal ones."""
        value = self.get(name)
        if value is None:
            value = default
        if isinstance(value, list) and value and len(set(map(repr, value))) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool):
            what = "missing" if value is None else f"{value!r:.40}, not one whole number"
            raise self.header.error(f"{self.prefix}.{name} is {what}")
        return value

    def of_layers(self, name: str, kinds: list[str] | None = None, kind: str | None = None) -> list[int]:
        """Whole numbers of the layers, or those of one kind of them."""
        value, layers = self.get(name), self.layers()
        values = value if isinstance(value, list) else [value] * layers
        if len(values) < layers or any(type(each) is not int or each < 1 for each in values):
            raise self.header.error(f"{self.prefix}.{name} is {value!r:.40}, not a whole number for each layer")
        return [each for i, each in enumerate(values[:layers]) if kinds is None or kinds[i] == kind]

    def kv_heads(self, default: int) -> int:
        """The heads of K and V in layers that attend; other layers of the list have none."""
        value = self.get("attention.head_count_kv")
        attending = [each for each in value if each != 0] if isinstance(value, list) else None
        if not attending or len(set(map(repr, attending))) > 1 or not isinstance(attending[0], int):
            return self.number("attention.head_count_kv", default)
        return attending[0]

    def head_dim(self) -> int:
        width = self.number("embedding_length")
        return self.number("attention.key_length", width // max(1, self.number("attention.head_count")))

    def rotated(self) -> float:
        """The part of each head that is rotated."""
        head_dim = self.head_dim()
        return self.number("rope.dimension_count", head_dim) / max(1, head_dim)

    def real(self, name: str, default: float | None = None) -> float | None:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.header.error(f"{self.prefix}.{name} is {value!r:.40}, not a finite number")
        return _shortest(value)

    def factors(self, name: str) -> list[float]:
        """The numbers of a small tensor; empty if the file lacks it."""
        tensor = self.header.tensors.get(name)
        if tensor is None:
            return []
        if tensor.type.name != "F32" or math.prod(tensor.shape) > _LARGEST_FACTORS:
            raise self.header.error(f"tensor {name!r} has no plain numbers")
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            found = list(struct.unpack(f"<{math.prod(tensor.shape)}f", file.read(tensor.num_bytes)))
        if not all(0 < factor < math.inf for factor in found):
            raise self.header.error(f"tensor {name!r} has factors that are not positive and finite")
        return found


def _shortest(value: float) -> float:
    """The decimal number that a float32 was: 1e-06 instead of 9.999999974752427e-07."""
    shown = f"{value:.7g}"
    return float(shown) if struct.pack("f", float(shown)) == struct.pack("f", value) else float(value)
