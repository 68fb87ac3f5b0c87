"""Reads `quantization_config` of config.json; docs/models.md prints READABLE and REFUSED. Free of torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pagedcli.errors import ModelError
from pagedcli.models.checkpoint_files import convert, packed_modules, read_json
from pagedcli.models.formats import Layout
from pagedcli.models.stored_quantization import Quantization, StoredQuantization, name_pattern

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


def read_quantization(
    config: dict[str, Any], where: Path, *, tied: bool = False, body: str = "model"
) -> Quantization | None:
    """The quantization of a checkpoint by its config.json at `where`; None if it has none, or if its weights become
    plain numbers when they are read. `tied`: the output layer is the embedding table, which is never quantized. A
    module whose tensors are packed is quantized, also where config.json lists it as skipped; `body`: see todays_name.

    Raises: ModelError that names the method and the reason if its weights cannot be read.
    """
    content = config.get("quantization_config") or config.get("compression_config") or _of_model_optimizer(where)
    if content is None:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("quant_method"), str):
        raise ModelError(f"{where}: quantization_config has no quant_method", hint="download the file again")
    method = content["quant_method"]
    if method == "bitsandbytes":
        if content.get("load_in_4bit") is not True:
            raise refusal(where, method, "8 bits with outliers: LLM.int8()")
        return None
    if method not in READERS:
        raise refusal(where, method, REFUSED.get(method, "an unknown method"))
    has_cache_scales = any(content.get(name) for name in ("kv_cache_scheme", "kv_cache_quant_algo"))
    packed = packed_modules(where.parent, body)
    formats = tuple(replace(each, packed=packed) for each in READERS[method](content, where))
    quantization = Quantization(formats, has_cache_scales)
    for stored in quantization.formats:
        _check(stored, where)
    if tied or method not in _QUANTIZES_HEAD:
        if not tied and any("lm_head" in stored.targets for stored in quantization.formats):
            raise refusal(where, method, "its output layer is also quantized")
        head, kept = "lm_head", packed - {"lm_head"}
        formats = tuple(replace(each, skipped=(*each.skipped, head), packed=kept) for each in formats)
        return replace(quantization, formats=formats)
    return quantization


def becomes_plain(config: dict[str, Any]) -> str | None:
    """How weights are quantized that models.weights unpacks; None if none are."""
    content = config.get("quantization_config")
    is_one = isinstance(content, dict) and content.get("quant_method") == "bitsandbytes"
    return "bitsandbytes, 4 bits" if is_one else None


def refusal(where: Path, method: str, why: str) -> ModelError:
    """The error for quantized weights that are not read."""
    return ModelError(
        f"{where}: quantization_config {method!r} is not supported ({why})",
        hint=f"use the unquantized version of the model, or one of: {', '.join(READABLE)}",
    )


_QUANTIZES_HEAD = ("compressed-tensors", "modelopt")  # methods with a quantized output layer unless it is skipped


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


class _Changes(msgspec.Struct):
    """What differs in some layers; None: as in the others."""

    bits: int | None = None
    group_size: int | None = None
    desc_act: bool | None = None
    sym: bool | None = None
    data_type: str | None = None


def _gptq(content: dict[str, Any], where: Path) -> tuple[StoredQuantization, ...]:
    fields = convert(content, _Gptq, where)
    form = fields.checkpoint_format or fields.format or "gptq"
    if form not in ("gptq", "gptq_v2") or fields.is_marlin_format:
        raise refusal(where, "gptq", f"checkpoint_format {'marlin' if fields.is_marlin_format else form}")
    if fields.lm_head:
        raise refusal(where, "gptq", "its output layer is also quantized")
    if fields.pack_dtype != "int32":
        raise refusal(where, "gptq", f"pack_dtype {fields.pack_dtype}")
    base = StoredQuantization(
        method="gptq",
        layout="gptq",
        bits=fields.bits,
        group_size=_group_size(fields.group_size),
        symmetric=fields.sym,
        act_order=fields.desc_act,
        zero_offset=1 if form == "gptq" else 0,
        targets=_names(fields.modules_in_block_to_quantize),
    )
    changed: list[tuple[str, StoredQuantization | None]] = []
    for pattern, settings in (fields.dynamic or {}).items():
        is_skipped = pattern.startswith("-:")
        regex = "re:" + pattern.removeprefix("-:").removeprefix("+:")
        changed.append((regex, None if is_skipped else _changed(base, settings, where)))
    return _by_pattern(changed, base)


def _changed(base: StoredQuantization, settings: dict[str, Any], where: Path) -> StoredQuantization:
    """The format of layers with settings of their own."""
    fields = convert(settings, _Changes, where)
    if fields.data_type not in (None, "int"):
        raise refusal(where, base.method, f"{fields.data_type} weights in some layers")
    return replace(
        base,
        bits=base.bits if fields.bits is None else fields.bits,
        group_size=base.group_size if fields.group_size is None else _group_size(fields.group_size),
        symmetric=base.symmetric if fields.sym is None else fields.sym,
        act_order=base.act_order if fields.desc_act is None else fields.desc_act,
    )


def _by_pattern(
    changed: Sequence[tuple[str, StoredQuantization | None]], base: StoredQuantization
) -> tuple[StoredQuantization, ...]:
    """The formats of layers that the first of these patterns names, None: unquantized, and `base` for all others."""
    formats, skipped = [], base.skipped
    for pattern, layers in changed:
        if layers is None:
            skipped += (pattern,)
        else:
            formats.append(replace(layers, targets=(pattern,), skipped=skipped))
    return (*formats, replace(base, skipped=skipped))


class _Awq(msgspec.Struct):
    bits: int
    group_size: int = -1
    zero_point: bool = True
    version: str | None = None
    format: str | None = None
    modules_to_not_convert: list[str] | None = None


def _awq(content: dict[str, Any], where: Path) -> tuple[StoredQuantization, ...]:
    if "w_bit" in content or "q_group_size" in content:
        content = {"bits": content.get("w_bit"), "group_size": content.get("q_group_size", -1), **content}
    fields = convert(content, _Awq, where)
    version = (fields.version or fields.format or "gemm").lower()
    if version != "gemm":
        raise refusal(where, "awq", f"version {version}")
    if not fields.zero_point:
        raise refusal(where, "awq", "no zero points")
    stored = StoredQuantization(
        method="awq",
        layout="awq",
        bits=fields.bits,
        group_size=_group_size(fields.group_size),
        symmetric=False,
        skipped=tuple(fields.modules_to_not_convert or ()),
    )
    return (stored,)


class _AutoRound(msgspec.Struct):
    bits: int
    group_size: int = -1
    sym: bool = True
    data_type: str = "int"
    act_bits: int | None = None
    packing_format: str | None = None
    backend: str | None = None
    block_name_to_quantize: list[str | list[str]] | str | None = None
    to_quant_block_names: list[str | list[str]] | str | None = None
    quant_block_list: list[str | list[str]] | None = None
    modules_to_not_convert: list[str] | None = None
    modules_in_block_to_quantize: list[list[str] | str] | None = None
    dynamic: dict[str, dict[str, Any]] | None = None
    extra_config: dict[str, dict[str, Any]] | None = None


def _auto_round(content: dict[str, Any], where: Path) -> tuple[StoredQuantization, ...]:
    fields, name = convert(content, _AutoRound, where), "auto-round"
    backend = fields.backend if fields.backend != "auto" else None
    form = fields.packing_format or backend or "auto_round:auto_gptq"
    if form not in AUTO_ROUND:
        raise refusal(where, name, f"packing_format {form}")
    if fields.data_type != "int" or (fields.act_bits or 16) < 16:
        raise refusal(where, name, f"{fields.data_type} weights with {fields.act_bits or 16}-bit activations")
    if fields.modules_in_block_to_quantize or fields.dynamic:
        raise refusal(where, name, "layers named as by GPTQ")
    layout, zero_offset = AUTO_ROUND[form]
    base = StoredQuantization(
        method=f"{name} {form}",
        layout=layout,
        bits=fields.bits,
        group_size=_group_size(fields.group_size),
        symmetric=fields.sym and layout == "gptq",
        zero_offset=zero_offset,
        skipped=tuple(fields.modules_to_not_convert or ()),
    )
    blocks = _names(fields.quant_block_list or fields.block_name_to_quantize or fields.to_quant_block_names)
    changed: list[tuple[str, StoredQuantization | None]] = []
    for layer, settings in (fields.extra_config or {}).items():
        pattern = layer if not set(layer) & set("*^$|()[]?+\\") else f"re:{'' if layer[0] == '^' else '.*'}{layer}"
        is_kept = settings.get("bits", fields.bits) in (16, 32)
        changed.append((pattern, None if is_kept else _changed(base, settings, where)))
    return _by_pattern(changed, replace(base, targets=blocks))


def _names(blocks: Sequence[str | list[str]] | str | None) -> tuple[str, ...]:
    """Names of blocks of layers: a list, lists within it, or a text with commas."""
    if isinstance(blocks, str):
        blocks = [*blocks.split(",")]
    return tuple(name.strip() for each in blocks or () for name in ([each] if isinstance(each, str) else each))


class _Fp8(msgspec.Struct):
    fmt: str = "e4m3"
    weight_block_size: tuple[int, ...] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    scale_fmt: str | None = None


def _fp8(content: dict[str, Any], where: Path) -> tuple[StoredQuantization, ...]:
    fields, method = convert(content, _Fp8, where), content["quant_method"]
    if fields.fmt not in ("e4m3", "float8_e4m3fn"):
        raise refusal(where, method, f"fmt {fields.fmt}")
    if fields.scale_fmt not in (None, "float"):
        raise refusal(where, method, f"scale_fmt {fields.scale_fmt}")
    stored = StoredQuantization(
        method=method,
        layout="float8",
        bits=8,
        block=fields.weight_block_size,
        per_tensor=fields.weight_block_size is None and method == "fp8",
        # transformers names it so whatever the size of blocks, which it always writes
        scale_name="weight_scale_inv" if "weight_block_size" in content else "weight_scale",
        skipped=(*(fields.modules_to_not_convert or ()), *(fields.ignored_layers or ())),
    )
    return (stored,)


def _mxfp4(content: dict[str, Any], where: Path) -> tuple[StoredQuantization, ...]:
    """Source: gpt-oss, of which the experts are quantized, whatever modules_to_not_convert lists besides."""
    return (
        StoredQuantization(
            method="mxfp4", layout="mxfp4", bits=4, group_size=32, scale_name="scales", targets=("experts",)
        ),
    )


class _Algorithm(msgspec.Struct):
    """ModelOpt's format of a layer, or of all."""

    quant_algo: str | None = None
    group_size: int | None = None


class _ModelOpt(_Algorithm):
    ignore: list[str] | None = None  # name of the list in config.json
    exclude_modules: list[str] | None = None  # name of the list in hf_quant_config.json
    quantized_layers: dict[str, _Algorithm] | None = None


def _of_model_optimizer(where: Path) -> dict[str, Any] | None:
    """What hf_quant_config.json next to config.json says, as ModelOpt wrote it at first."""
    path = where.with_name("hf_quant_config.json")
    if not path.is_file():
        return None
    content = read_json(path).get("quantization")
    if not isinstance(content, dict):
        raise ModelError(f"{path} has no object 'quantization'", hint="download the file again")
    return {**content, "quant_method": "modelopt"}


def _modelopt(content: dict[str, Any], where: Path) -> tuple[StoredQuantization, ...]:
    """The formats of a ModelOpt checkpoint: of thousands of named layers, those of one format are one entry."""
    fields = convert(content, _ModelOpt, where)
    skipped = tuple(map(_wildcards, (*(fields.ignore or ()), *(fields.exclude_modules or ()))))
    if (fields.quant_algo or "").upper() != "MIXED_PRECISION":
        return (_modelopt_layers(fields, skipped, where),)
    names: dict[StoredQuantization, list[str]] = {}
    for name, each in (fields.quantized_layers or {}).items():
        names.setdefault(_modelopt_layers(each, skipped, where), []).append(_wildcards(name))
    if not names:
        raise refusal(where, "modelopt", "MIXED_PRECISION without quantized_layers")
    return tuple(replace(stored, targets=tuple(targets)) for stored, targets in names.items())


def _modelopt_layers(fields: _Algorithm, skipped: tuple[str, ...], where: Path) -> StoredQuantization:
    layout, bits, size = _ALGORITHMS.get((fields.quant_algo or "").upper(), (None, 0, None))
    if layout is None or (size is not None and fields.group_size not in (None, size)):
        groups = "" if fields.group_size is None else f" in groups of {fields.group_size}"
        raise refusal(where, "modelopt", f"quant_algo {fields.quant_algo}{groups}")
    is_whole = layout == "float8"
    return StoredQuantization(
        method="modelopt", layout=layout, bits=bits, group_size=size, per_tensor=is_whole, skipped=skipped
    )


# quant_algo -> layout, bits and size of groups
_ALGORITHMS: dict[str, tuple[Layout, int, int | None]] = {
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), ("nvfp4", 4, 16)),
    "MXFP8": ("mxfp8", 8, 32),
    "FP8": ("float8", 8, None),
}


def _wildcards(name: str) -> str:
    """A pattern in which * is any text, as a regular expression; other names as they are."""
    return f"re:{re.escape(name).replace(chr(92) + '*', '.*')}(\\.|$)" if "*" in name else name


class _CtWeights(msgspec.Struct):
    num_bits: int
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[int, ...] | None = None
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
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def _compressed_tensors(content: dict[str, Any], where: Path) -> tuple[StoredQuantization, ...]:
    fields = convert(content, _CompressedTensors, where)
    name, sparsity = "compressed-tensors", (fields.sparsity_config or {}).get("format", "dense")
    if sparsity != "dense":
        raise refusal(where, name, f"sparse weights, {sparsity}")
    if (fields.transform_config or {}).get("config_groups"):
        raise refusal(where, name, "rotated weights")
    formats = [_ct_group(group, fields, where) for group in fields.config_groups.values()]
    if not formats:
        raise refusal(where, name, "no config_groups")
    return tuple(sorted(formats, key=lambda stored: not stored.targets))  # names of layers before those of classes


def _ct_group(group: _CtGroup, fields: _CompressedTensors, where: Path) -> StoredQuantization:
    """The format of one group of layers."""
    form, weights = group.format or fields.format, group.weights
    method = f"compressed-tensors {form}"
    if form in REFUSED:
        raise refusal(where, method, REFUSED[form])
    if weights is None:
        raise refusal(where, method, "only activations are quantized")
    if group.output_activations is not None:
        raise refusal(where, method, "quantized outputs")
    group_size = _group_size(weights.group_size or -1)
    strategy = weights.strategy or ("tensor" if weights.group_size is None else "group" if group_size else "channel")
    layout, only_size, strategies = _CT_LAYOUTS.get((weights.type, form), (None, None, ()))
    if layout is None or only_size not in (None, group_size):
        raise refusal(where, method, f"{weights.num_bits}-bit {weights.type} weights in this format")
    if strategy not in strategies:
        raise refusal(where, method, f"strategy {strategy}")
    if layout in ("float8", "mxfp8", "nvfp4") and not weights.symmetric:
        raise refusal(where, method, "floating-point weights with zero points")
    return StoredQuantization(
        method=method,
        layout=layout,
        bits=weights.num_bits,
        group_size=group_size if strategy in ("group", "tensor_group") else None,
        block=weights.block_structure if strategy == "block" else None,
        per_tensor=strategy == "tensor",
        symmetric=weights.symmetric,
        act_order=weights.actorder in ("group", "dynamic", True),
        targets=() if "Linear" in group.targets else tuple(group.targets),
        skipped=tuple(fields.ignore or ()),
    )


# type of the weights and format -> layout, its only size of groups if it has one, and strategies
_CT_LAYOUTS: dict[tuple[str, str], tuple[Layout, int | None, tuple[str, ...]]] = {
    ("int", "pack-quantized"): ("pack-quantized", None, ("group", "channel")),
    ("int", "int-quantized"): ("int-quantized", None, ("channel", "tensor")),
    ("int", "naive-quantized"): ("int-quantized", None, ("channel", "tensor")),
    ("float", "mxfp4-pack-quantized"): ("mxfp4", 32, ("group",)),
    ("float", "mxfp8-quantized"): ("mxfp8", 32, ("group",)),
    ("float", "nvfp4-pack-quantized"): ("nvfp4", 16, ("tensor_group", "group")),
    ("float", "float-quantized"): ("float8", None, ("channel", "tensor", "block")),
    ("float", "naive-quantized"): ("float8", None, ("channel", "tensor", "block")),
}
# quant_method -> what its part of config.json says
READERS: dict[str, Callable[[dict[str, Any], Path], tuple[StoredQuantization, ...]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
}


def _group_size(size: int) -> int | None:
    return None if size == -1 else size


_BITS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("gptq", "pack-quantized"), (4, 8)),
    **dict.fromkeys(("awq", "mxfp4", "nvfp4"), (4,)),
    **dict.fromkeys(("int-quantized", "float8", "mxfp8"), (8,)),
}


def _check(stored: StoredQuantization, where: Path) -> None:
    """Raises: ModelError for numbers that no layout has, and for patterns that are not supported."""
    if stored.bits not in _BITS.get(stored.layout, (stored.bits,)):
        raise refusal(where, stored.method, f"{stored.bits}-bit weights")
    if stored.group_size is not None and not 1 <= stored.group_size <= _MOST_FEATURES:
        raise refusal(where, stored.method, f"group_size {stored.group_size}")
    if stored.block is not None and not (
        len(stored.block) == 2 and all(1 <= size <= _MOST_FEATURES for size in stored.block)
    ):
        raise refusal(where, stored.method, f"blocks of {[*stored.block]}")
    for pattern in (*stored.targets, *stored.skipped):
        try:
            if pattern.startswith("re:"):
                name_pattern(pattern[3:])
        except ValueError as error:
            raise ModelError(
                f"{where}: quantization_config has a pattern that is not supported: {pattern!r}: {error}",
                hint="patterns are those of RE2: without look-around and back-references",
            ) from error


_MOST_FEATURES = 2**20
