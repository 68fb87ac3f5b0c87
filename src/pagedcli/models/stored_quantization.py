"""How a quantized checkpoint stores its linear layers, and the formats that are read. Free of torch.

READABLE and REFUSED are what docs/models.md prints. models.quantization reads config.json, models.packed_formats makes
the layers.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

Layout = Literal["gptq", "awq", "pack-quantized", "int-quantized", "float8", "mxfp4", "mxfp8", "nvfp4"]
_LONGEST_PATTERN = 2000  # characters
_LARGEST_PATTERN = 2**23  # bytes, compiled

# What is read: name -> what of it.
READABLE: Mapping[str, str] = {
    "compressed-tensors pack-quantized": "4 and 8 bits, in groups or per channel, symmetric or not, with act-order",
    "compressed-tensors int-quantized": "int8 weights, per channel or per tensor, symmetric or not",
    "compressed-tensors float-quantized": "FP8 e4m3, per tensor, per channel or in blocks",
    "compressed-tensors mxfp4-pack-quantized": "MXFP4: e2m1 in groups of 32 that share a power of 2",
    "compressed-tensors mxfp8-quantized": "MXFP8: e4m3 in groups of 32 that share a power of 2",
    "compressed-tensors nvfp4-pack-quantized": "NVFP4: e2m1 in groups of 16 that share an e4m3 number",
    "compressed-tensors mixed-precision": "groups of layers, each in one of these formats",
    "gptq": "4 and 8 bits, in groups or per channel, act-order, gptq and gptq_v2; single layers with other bits",
    "awq": "4 bits, in groups, GEMM order",
    "auto-round": "4 and 8 bits in a layout of GPTQ, 4 bits in that of AWQ; single layers with other bits",
    "bitsandbytes": "4 bits, NF4 and FP4, with and without double quantization, widened while they are read",
    "fp8": "FP8 e4m3, per tensor or in blocks",
    "fbgemm_fp8": "FP8 e4m3, per channel",
    "modelopt": "NVFP4; MXFP8; FP8 e4m3, per tensor; single layers in one of these or in none",
    "mxfp4": "MXFP4 experts: e2m1 in groups of 32 that share a power of 2",
}
# packing_format of AutoRound -> the layout that it equals, and what is added to stored zero points.
AUTO_ROUND: Mapping[str, tuple[Layout, int]] = {
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round": ("gptq", 0),
    "auto_round:gptqmodel": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0),
}
# What is known and not read: quant_method or compressed-tensors format -> what it is.
REFUSED: Mapping[str, str] = {
    "aqlm": "additive codebooks",
    "bitnet": "1.58-bit weights",
    "bitsandbytes int8": "LLM.int8(): 8 bits with outliers",
    "eetq": "int8 in the order of a GPU kernel",
    "exl2": "mixed bits in the order of a GPU kernel",
    "exl3": "trellis codes",
    "fp_quant": "MXFP4 or NVFP4 weights",
    "gguf": "GGUF inside a Hugging Face folder",
    "higgs": "vector quantization",
    "hqq": "half-quadratic quantization",
    "marlin": "weights in the order of a GPU kernel",
    "marlin-24": "2:4 sparse weights in the order of a GPU kernel",
    "mxfp6-pack-quantized": "MXFP6 weights",
    "quanto": "Quanto's own packings",
    "quark": "Quark's own packings",
    "quip": "codebooks with rotations",
    "sparse-24-bitmask": "2:4 sparse weights",
    "sparse-bitmask": "sparse weights",
    "spqr": "sparse outliers",
    "torchao": "torchao tensor subclasses",
    "vptq": "vector quantization",
}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How linear layers of a checkpoint are stored: those that `covers` names."""

    method: str  # quant_method, with the format of compressed-tensors
    layout: Layout
    bits: int  # bits per weight
    group_size: int | None = None  # inputs that share a scale; None: all inputs of an output feature
    block: tuple[int, int] | None = None  # float8: outputs and inputs that share a scale
    per_tensor: bool = False  # one scale for a whole module
    symmetric: bool = True
    act_order: bool = False  # the inputs of a group are not neighbours
    zero_offset: int = 0  # number added to stored zero points: 1 in checkpoints of the first GPTQ convention
    scale_name: str = "weight_scale"  # name of the scales of a float8 or int8 module
    targets: tuple[str, ...] = ()  # the only modules; empty: all linear layers
    skipped: tuple[str, ...] = ()  # modules stored unquantized; "re:" begins a regular expression
    packed: frozenset[str] = frozenset()  # modules stored quantized, also where `skipped` names them
    _named: tuple[_Names, _Names] = field(init=False, repr=False, compare=False)  # targets and skipped

    def __post_init__(self) -> None:
        object.__setattr__(self, "_named", (_Names.of(self.targets), _Names.of(self.skipped)))

    def covers(self, module: str) -> bool:
        """Whether a linear layer, by its name in the checkpoint, is stored quantized."""
        targets, skipped = self._named
        return (not self.targets or targets.cover(module)) and (module in self.packed or not skipped.cover(module))

    @property
    def description(self) -> str:
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


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint is quantized: a linear layer has the first format that covers it; without one it is not
    quantized."""

    formats: tuple[StoredQuantization, ...]
    has_cache_scales: bool = False  # whether it has scales for a KV cache of 8 bits, which are not used

    @property
    def method(self) -> str:
        """quant_method, with the format of compressed-tensors."""
        return self.formats[0].method

    @property
    def description(self) -> str:
        """What a person should know of each format."""
        return "; ".join(dict.fromkeys(stored.description for stored in self.formats))

    @property
    def act_order(self) -> bool:
        """Whether some layer groups inputs that are not neighbours."""
        return any(stored.act_order for stored in self.formats)

    def covers(self, module: str) -> bool:
        """Whether a linear layer, by its name in the checkpoint, is stored quantized."""
        return any(stored.covers(module) for stored in self.formats)


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
