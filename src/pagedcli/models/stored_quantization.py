"""How a quantized checkpoint stores its linear layers. Free of torch until a weight is read.

models.quantization makes it of config.json, models.packed_formats has the tensors.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from pagedcli import layers, models
from pagedcli.core.budget import ITEMSIZE
from pagedcli.core.plan import Kernels
from pagedcli.later import torch
from pagedcli.models.formats import AS_STORED, LayerFormat, Packing, StoredTensor, WeightFormat, kernels_note

_LONGEST_PATTERN = 2000  # characters
_LARGEST_PATTERN = 2**23  # bytes, compiled


@dataclass(frozen=True, slots=True)
class _Names:
    """What names modules: whole parts of their names, in a run, and regular expressions."""

    parts: frozenset[str]
    expressions: tuple[str, ...]

    @classmethod
    def of(cls, patterns: tuple[str, ...]) -> "_Names":
        expressions = tuple(each[3:] for each in patterns if each.startswith("re:"))
        return cls(frozenset(each.strip(".") for each in patterns if not each.startswith("re:")), expressions)

    def cover(self, module: str) -> bool:
        """Looked up by every run of its parts: a checkpoint may name each of thousands of experts."""
        parts = module.split(".")
        runs = (".".join(parts[i:end]) for i, end in combinations(range(len(parts) + 1), 2))
        if self.parts and any(run in self.parts for run in runs):
            return True
        return any(name_pattern(each).match(module) is not None for each in self.expressions)


@dataclass(frozen=True, kw_only=True)
class StoredQuantization(Packing, LayerFormat):
    """The format of those linear layers of a checkpoint that `covers` names."""

    targets: tuple[str, ...] = ()  # the only modules; empty: all linear layers
    skipped: tuple[str, ...] = ()  # modules stored unquantized; "re:" begins a regular expression
    packed: frozenset[str] = frozenset()  # modules stored quantized, also where `skipped` names them

    @functools.cached_property
    def _named(self) -> tuple[_Names, _Names]:
        return _Names.of(self.targets), _Names.of(self.skipped)

    def covers(self, module: str) -> bool:
        """Whether a linear layer, by its name in the checkpoint, is stored quantized."""
        targets, skipped = self._named
        return (not self.targets or targets.cover(module)) and (module in self.packed or not skipped.cover(module))

    @functools.cached_property
    def name(self) -> str:
        """What a person should know, e.g. "gptq, 4 bits in groups of 128, act-order"."""
        if self.block is not None:
            scales = f"in blocks of {self.block[0]} x {self.block[1]}"
        elif self.group_size is not None:
            scales = f"in groups of {self.group_size}"
        else:
            scales = "per tensor" if self.per_tensor else "per channel"
        number = {"float8": "FP8 e4m3", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}.get(
            self.layout, f"{self.bits} bits"
        )
        return f"{self.method}, {number} {scales}{', act-order' if self.act_order else ''}"

    @functools.cached_property
    def stored(self) -> tuple[StoredTensor, ...]:
        return models.packed_formats.LAYOUTS[self.layout][0](self)

    def read(self, module: "Mapping[str, torch.Tensor]") -> "layers.quantized.CodedWeight":
        return models.packed_formats.LAYOUTS[self.layout][1](module, self)

    def why_widened(self, kernels: Kernels, itemsize: int) -> str | None:
        is_float8 = self.layout in ("float8", "mxfp8")
        size = self.group_size if self.block is None else self.block[1]
        if kernels == "torch":
            return "torch has no kernel for them"
        if is_float8 and kernels == "cpu":
            return "no CPU kernel reads FP8"
        if self.layout == "nvfp4" and kernels == "cpu" and itemsize == 4:
            return "CPU kernels round activations, which float32 must not be; bfloat16 keeps the weights as they are"
        multiple = 16 if self.layout == "nvfp4" else 32 if is_float8 or kernels == "cpu" else 8
        if size is not None and size % multiple:
            return f"groups of {size} have no kernel, only multiples of {multiple}"
        return None

    def row_bytes(self, num_columns: int, itemsize: int, kernels: Kernels) -> int:
        """The bytes of a row; on a CPU as NativeLinear._pack_codes packs it."""
        if kernels != "cpu":
            size, group_bytes = self.group_size, {"mxfp4": 2, "nvfp4": 4, "mxfp8": 4}.get(self.layout, 3)
            if self.layout == "float8":
                size, group_bytes = self.block[1] if self.block else None, 4
            return num_columns * self.bits // 8 + -(-num_columns // (size or num_columns)) * group_bytes
        if self.layout == "nvfp4":
            return -(-num_columns // 16) * 9 + -(-num_columns // 256) * 4
        if self.bits == 8 and self.group_size is None and self.symmetric:
            return -(-num_columns // 4) * 4 + 8  # 8: a scale and a sum
        chunk = layers.quantized.chunk_columns(num_columns, self.group_size)
        header = 2 if self.layout == "mxfp4" else 3 if self.bits == 4 else 5  # a scale, and mostly a zero point
        return -(-num_columns // chunk) * (chunk * self.bits // 8 + header)


@dataclass(frozen=True)
class Quantization(WeightFormat):
    """How a checkpoint is quantized: a linear layer has the first format that covers it; without one it is not
    quantized."""

    formats: tuple[StoredQuantization, ...]
    has_cache_scales: bool = False  # whether it has scales for a KV cache of 8 bits, which are not used
    _found: dict[str, LayerFormat] = field(default_factory=dict, init=False, repr=False, compare=False)  # by module

    @functools.cached_property
    def name(self) -> str:
        """What a person should know of each format."""
        return "; ".join(dict.fromkeys(stored.name for stored in self.formats))

    @property
    def act_order(self) -> bool:
        return any(stored.act_order for stored in self.formats)

    @functools.cached_property
    def lm_head(self) -> LayerFormat:
        return self.of("lm_head")

    def of(self, module: str) -> LayerFormat:
        if module not in self._found:
            self._found[module] = next((each for each in self.formats if each.covers(module)), AS_STORED)
        return self._found[module]

    def rounds_activations(self, kernels: Kernels, itemsize: int) -> bool:
        return kernels == "cpu" and any(each.why_widened(kernels, itemsize) is None for each in self.formats)

    def note(self, dtype: str, kernels: Kernels) -> str:
        formats = {each.name: each.why_widened(kernels, ITEMSIZE[dtype]) for each in self.formats}
        notes = [kernels_note(name, dtype, kernels, why, alone=len(formats) == 1) for name, why in formats.items()]
        unused = ["activations"] if any(each.layout == "nvfp4" for each in self.formats) else []
        unused += ["the KV cache"] if self.has_cache_scales else []
        return "; ".join([*notes, *([f"the scales of {' and '.join(unused)} are not used"] if unused else [])])


@functools.cache
def name_pattern(pattern: str) -> Any:
    """A regular expression that matches from a name's beginning on, in time linear in the name: patterns come from a
    checkpoint, and Python's own `re` takes for ever for some.

    Raises: ValueError that says what is not supported.
    """
    import re2  # imported here: few checkpoints have patterns

    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"longer than {_LONGEST_PATTERN:,} characters")
    options = re2.Options()
    options.log_errors, options.max_mem = False, _LARGEST_PATTERN
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        what = error.args[0]
        raise ValueError(what.decode(errors="replace") if isinstance(what, bytes) else str(what)) from error
