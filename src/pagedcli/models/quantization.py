"""How others quantized a checkpoint's linear layers: `quantization_config` of its config.json. Free of torch.

READABLE and REFUSED are what docs/models.md prints. The layers themselves are made by models.packed_formats.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from pagedcli.errors import ModelError
from pagedcli.models.config_json import convert

Layout = Literal["gptq", "awq", "pack-quantized", "int-quantized", "float8"]

# What is read: name -> what of it.
READABLE: Mapping[str, str] = {
    "compressed-tensors pack-quantized": "4 and 8 bits, in groups or per channel, symmetric or not, with act-order",
    "compressed-tensors int-quantized": "int8 weights, per channel or per tensor, symmetric or not",
    "compressed-tensors float-quantized": "FP8 e4m3, per tensor, per channel or in blocks",
    "gptq": "4 and 8 bits, in groups or per channel, act-order, zero points of gptq and of gptq_v2",
    "awq": "4 bits, in groups, GEMM order",
    "fp8": "FP8 e4m3, per tensor or in blocks",
    "fbgemm_fp8": "FP8 e4m3, per channel",
}
# What is known and not read: quant_method or compressed-tensors format -> what it is.
REFUSED: Mapping[str, str] = {
    "aqlm": "additive codebooks",
    "auto-round": "AutoRound's own packings",
    "bitnet": "1.58-bit weights",
    "bitsandbytes": "4-bit NormalFloat or LLM.int8()",
    "eetq": "int8 in the order of a GPU kernel",
    "exl2": "mixed bits in the order of a GPU kernel",
    "exl3": "trellis codes",
    "fp_quant": "MXFP4 or NVFP4 weights",
    "gguf": "GGUF inside a Hugging Face folder",
    "higgs": "vector quantization",
    "hqq": "half-quadratic quantization",
    "marlin": "weights in the order of a GPU kernel",
    "marlin-24": "2:4 sparse weights in the order of a GPU kernel",
    "modelopt": "FP8 or NVFP4 weights of ModelOpt",
    "mxfp4": "MXFP4 weights",
    "mxfp4-pack-quantized": "MXFP4 weights",
    "mxfp6-pack-quantized": "MXFP6 weights",
    "mxfp8-quantized": "MXFP8 weights",
    "nvfp4-pack-quantized": "NVFP4 weights",
    "mixed-precision": "several formats in one checkpoint",
    "quanto": "Quanto's own packings",
    "quark": "Quark's own packings",
    "quip": "codebooks with rotations",
    "sparse-24-bitmask": "2:4 sparse weights",
    "sparse-bitmask": "sparse weights",
    "spqr": "sparse outliers",
    "torchao": "torchao tensor subclasses",
    "vptq": "vector quantization",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How the linear layers of a checkpoint are stored: all those that `covers` names alike."""

    method: str  # quant_method, with the format of compressed-tensors
    layout: Layout
    bits: int  # of a weight
    group_size: int | None = None  # inputs that share a scale; None: all inputs of an output feature
    block: tuple[int, int] | None = None  # float8: outputs and inputs that share a scale
    per_tensor: bool = False  # one scale for a whole module
    symmetric: bool = True
    act_order: bool = False  # the inputs of a group are not neighbours
    zero_offset: int = 0  # added to stored zero points: 1 in checkpoints of the first GPTQ convention
    scale_name: str = "weight_scale"  # of a float8 or int8 module
    targets: tuple[str, ...] = ()  # the only modules; empty: all linear layers
    skipped: tuple[str, ...] = ()  # modules stored unquantized; "re:" begins a regular expression

    def covers(self, module: str) -> bool:
        """Whether a linear layer, by its name in the checkpoint, is stored quantized."""
        if self.targets and not any(_matches(pattern, module) for pattern in self.targets):
            return False
        return not any(_matches(pattern, module) for pattern in self.skipped)

    @property
    def description(self) -> str:
        """What a person should know, e.g. "gptq, 4 bits in groups of 128, act-order"."""
        if self.block is not None:
            scales = f"in blocks of {self.block[0]} x {self.block[1]}"
        elif self.group_size is not None:
            scales = f"in groups of {self.group_size}"
        else:
            scales = "per tensor" if self.per_tensor else "per channel"
        number = "FP8 e4m3" if self.layout == "float8" else f"{self.bits} bits"
        return f"{self.method}, {number} {scales}{', act-order' if self.act_order else ''}"


def read_quantization(config: dict[str, Any], where: Path) -> StoredQuantization | None:
    """The quantization of a checkpoint by its config.json at `where`; None if it has none. A tied output layer is never
    quantized.

    Raises: ModelError that names the method and the reason if its weights cannot be read.
    """
    content = config.get("quantization_config") or config.get("compression_config")
    if content is None:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("quant_method"), str):
        raise ModelError(f"{where}: quantization_config has no quant_method", hint="download the file again")
    method = content["quant_method"]
    if method not in _READERS:
        raise refusal(where, method, REFUSED.get(method, "an unknown method"))
    stored = _READERS[method](content, where)
    for pattern in (*stored.targets, *stored.skipped):
        _check_pattern(pattern, where)
    if method == "compressed-tensors" and not config.get("tie_word_embeddings") and stored.covers("lm_head"):
        raise refusal(where, method, "its output layer is quantized, too")
    return stored


def refusal(where: Path, method: str, why: str) -> ModelError:
    """The error for quantized weights that are not read."""
    return ModelError(
        f"{where}: quantization_config {method!r} is not supported ({why})",
        hint=f"use the unquantized version of the model, or one of: {', '.join(READABLE)}",
    )


# ---------------------------------------------------------------------- one method each


class _Gptq(msgspec.Struct):
    bits: int
    group_size: int = -1
    desc_act: bool = False
    sym: bool = True
    lm_head: bool = False
    checkpoint_format: str | None = None
    format: str | None = None
    is_marlin_format: bool = False
    pack_dtype: str = "int32"
    dynamic: dict[str, dict[str, Any]] | None = None
    modules_in_block_to_quantize: list[list[str] | str] | None = None


def _gptq(content: dict[str, Any], where: Path) -> StoredQuantization:
    fields = convert(content, _Gptq, where)
    form = fields.checkpoint_format or fields.format or "gptq"
    if form not in ("gptq", "gptq_v2") or fields.is_marlin_format:
        raise refusal(where, "gptq", f"checkpoint_format {'marlin' if fields.is_marlin_format else form}")
    if fields.lm_head:
        raise refusal(where, "gptq", "its output layer is quantized, too")
    if fields.pack_dtype != "int32":
        raise refusal(where, "gptq", f"pack_dtype {fields.pack_dtype}")
    skipped = []
    for pattern, changes in (fields.dynamic or {}).items():
        if not pattern.startswith("-:") and changes:
            raise refusal(where, "gptq", f"other settings for {pattern}")
        skipped += [f"re:{pattern[2:]}"] if pattern.startswith("-:") else []
    blocks = fields.modules_in_block_to_quantize or []
    targets = [name for block in blocks for name in ([block] if isinstance(block, str) else block)]
    return StoredQuantization(
        method="gptq",
        layout="gptq",
        bits=_bits(fields.bits, (4, 8), where, "gptq"),
        group_size=_group_size(fields.group_size, where, "gptq"),
        symmetric=fields.sym,
        act_order=fields.desc_act,
        zero_offset=1 if form == "gptq" else 0,
        targets=tuple(targets),
        skipped=tuple(skipped),
    )


class _Awq(msgspec.Struct):
    bits: int
    group_size: int = -1
    zero_point: bool = True
    version: str | None = None
    format: str | None = None
    modules_to_not_convert: list[str] | None = None


def _awq(content: dict[str, Any], where: Path) -> StoredQuantization:
    if "w_bit" in content or "q_group_size" in content:
        content = {"bits": content.get("w_bit"), "group_size": content.get("q_group_size", -1), **content}
    fields = convert(content, _Awq, where)
    version = (fields.version or fields.format or "gemm").lower()
    if version != "gemm":
        raise refusal(where, "awq", f"version {version}")
    if not fields.zero_point:
        raise refusal(where, "awq", "no zero points")
    return StoredQuantization(
        method="awq",
        layout="awq",
        bits=_bits(fields.bits, (4,), where, "awq"),
        group_size=_group_size(fields.group_size, where, "awq"),
        symmetric=False,
        skipped=tuple(fields.modules_to_not_convert or ()),
    )


class _Fp8(msgspec.Struct):
    fmt: str = "e4m3"
    weight_block_size: list[int] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    scale_fmt: str | None = None


def _fp8(content: dict[str, Any], where: Path) -> StoredQuantization:
    fields, method = convert(content, _Fp8, where), content["quant_method"]
    if fields.fmt not in ("e4m3", "float8_e4m3fn"):
        raise refusal(where, method, f"fmt {fields.fmt}")
    if fields.kv_cache_scheme is not None:
        raise refusal(where, method, "scales of a quantized KV cache")
    if fields.scale_fmt not in (None, "float"):
        raise refusal(where, method, f"scale_fmt {fields.scale_fmt}")
    block = _block(fields.weight_block_size, where, method)
    return StoredQuantization(
        method=method,
        layout="float8",
        bits=8,
        block=block,
        per_tensor=block is None and method == "fp8",
        scale_name="weight_scale_inv" if block is not None else "weight_scale",
        skipped=(*(fields.modules_to_not_convert or ()), *(fields.ignored_layers or ())),
    )


class _CtWeights(msgspec.Struct):
    num_bits: int
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | None = None
    actorder: str | bool | None = None


class _CtGroup(msgspec.Struct):
    targets: list[str]
    weights: _CtWeights | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class _CompressedTensors(msgspec.Struct):
    config_groups: dict[str, _CtGroup]
    format: str = "dense"
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def _compressed_tensors(content: dict[str, Any], where: Path) -> StoredQuantization:
    fields = convert(content, _CompressedTensors, where)
    name = "compressed-tensors"
    groups = list(fields.config_groups.values())
    if len(groups) != 1:
        raise refusal(where, name, f"{len(groups)} groups of layers with settings of their own")
    group = groups[0]
    form = group.format or fields.format
    method, sparsity = f"{name} {form}", (fields.sparsity_config or {}).get("format", "dense")
    if form in REFUSED:
        raise refusal(where, method, REFUSED[form])
    if fields.kv_cache_scheme is not None:
        raise refusal(where, method, "scales of a quantized KV cache")
    if sparsity != "dense":
        raise refusal(where, method, f"sparse weights, {sparsity}")
    if (fields.transform_config or {}).get("config_groups"):
        raise refusal(where, method, "rotated weights")
    if group.weights is None:
        raise refusal(where, method, "only activations are quantized")
    if group.output_activations is not None:
        raise refusal(where, method, "quantized outputs")
    targets = tuple(target for target in group.targets if target != "Linear")
    if targets and len(targets) < len(group.targets):
        targets = ()
    return _ct_weights(group.weights, method, targets, tuple(fields.ignore or ()), where)


def _ct_weights(
    weights: _CtWeights, method: str, targets: tuple[str, ...], skipped: tuple[str, ...], where: Path
) -> StoredQuantization:
    form = method.split(" ")[1]
    group_size = _group_size(weights.group_size or -1, where, method)
    strategy = weights.strategy or ("tensor" if weights.group_size is None else "group" if group_size else "channel")
    layout: Layout
    bits: tuple[int, ...]
    strategies: tuple[str, ...]
    if weights.type == "int" and form == "pack-quantized":
        layout, bits, strategies = "pack-quantized", (4, 8), ("group", "channel")
    elif weights.type == "int" and form in ("int-quantized", "naive-quantized"):
        layout, bits, strategies = "int-quantized", (8,), ("channel", "tensor")
    elif weights.type == "float" and form in ("float-quantized", "naive-quantized"):
        layout, bits, strategies = "float8", (8,), ("channel", "tensor", "block")
    else:
        raise refusal(where, method, f"{weights.num_bits}-bit {weights.type} weights in this format")
    if strategy not in strategies:
        raise refusal(where, method, f"strategy {strategy}")
    if layout == "float8" and not weights.symmetric:
        raise refusal(where, method, "floating-point weights with zero points")
    return StoredQuantization(
        method=method,
        layout=layout,
        bits=_bits(weights.num_bits, bits, where, method),
        group_size=group_size if strategy == "group" else None,
        block=_block(weights.block_structure, where, method) if strategy == "block" else None,
        per_tensor=strategy == "tensor",
        symmetric=weights.symmetric,
        act_order=weights.actorder in ("group", "dynamic", True),
        targets=targets,
        skipped=skipped,
    )


_READERS: Mapping[str, Callable[[dict[str, Any], Path], StoredQuantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
}


# ---------------------------------------------------------------------- one value each


def _bits(bits: int, allowed: tuple[int, ...], where: Path, method: str) -> int:
    if bits not in allowed:
        raise refusal(where, method, f"{bits}-bit weights")
    return bits


def _group_size(size: int, where: Path, method: str) -> int | None:
    if size != -1 and not 1 <= size <= 2**20:
        raise refusal(where, method, f"group_size {size}")
    return None if size == -1 else size


def _block(sizes: list[int] | None, where: Path, method: str) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if len(sizes) != 2 or not all(1 <= size <= 2**20 for size in sizes):
        raise refusal(where, method, f"blocks of {sizes}")
    return sizes[0], sizes[1]


def _matches(pattern: str, module: str) -> bool:
    """A regular expression from the name's beginning, or a run of whole parts of the name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern.strip('.')}." in f".{module}."


def _check_pattern(pattern: str, where: Path) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        re.compile(pattern[3:])
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"{where}: quantization_config has a pattern that is none: {pattern!r}: {error}") from error
