"""Reads `quantization_config` of a checkpoint's config.json. Free of torch."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pagedcli.errors import ModelError
from pagedcli.models.checkpoint_files import packed_modules
from pagedcli.models.config_json import convert, read_json
from pagedcli.models.stored_quantization import (
    AUTO_ROUND,
    READABLE,
    REFUSED,
    Layout,
    Quantization,
    StoredQuantization,
    name_pattern,
)


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
        for pattern in (*stored.targets, *stored.skipped):
            _check_pattern(pattern, where)
    if tied or method not in _QUANTIZES_HEAD:
        if not tied and any("lm_head" in stored.targets for stored in quantization.formats):
            raise refusal(where, method, "its output layer is quantized, too")
        head, kept = "lm_head", packed - {"lm_head"}
        formats = tuple(replace(each, skipped=(*each.skipped, head), packed=kept) for each in formats)
        return replace(quantization, formats=formats)
    return quantization


def becomes_plain(config: dict[str, Any]) -> str | None:
    """How weights are quantized that models.bitsandbytes unpacks; None if none are."""
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
        raise refusal(where, "gptq", "its output layer is quantized, too")
    if fields.pack_dtype != "int32":
        raise refusal(where, "gptq", f"pack_dtype {fields.pack_dtype}")
    blocks = fields.modules_in_block_to_quantize or []
    base = StoredQuantization(
        method="gptq",
        layout="gptq",
        bits=_bits(fields.bits, (4, 8), where, "gptq"),
        group_size=_group_size(fields.group_size, where, "gptq"),
        symmetric=fields.sym,
        act_order=fields.desc_act,
        zero_offset=1 if form == "gptq" else 0,
        targets=tuple(name for block in blocks for name in ([block] if isinstance(block, str) else block)),
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
    layers = replace(
        base,
        symmetric=base.symmetric if fields.sym is None else fields.sym,
        act_order=base.act_order if fields.desc_act is None else fields.desc_act,
    )
    if fields.bits is not None:
        layers = replace(layers, bits=_bits(fields.bits, (4, 8) if base.layout == "gptq" else (4,), where, base.method))
    if fields.group_size is not None:
        layers = replace(layers, group_size=_group_size(fields.group_size, where, base.method))
    return layers


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
        bits=_bits(fields.bits, (4,), where, "awq"),
        group_size=_group_size(fields.group_size, where, "awq"),
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
        bits=_bits(fields.bits, (4, 8) if layout == "gptq" else (4,), where, name),
        group_size=_group_size(fields.group_size, where, name),
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


def _names(blocks: list[str | list[str]] | str | None) -> tuple[str, ...]:
    """Names of blocks of layers: a list, lists within it, or a text with commas."""
    if isinstance(blocks, str):
        blocks = [*blocks.split(",")]
    return tuple(name.strip() for each in blocks or () for name in ([each] if isinstance(each, str) else each))


class _Fp8(msgspec.Struct):
    fmt: str = "e4m3"
    weight_block_size: list[int] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    scale_fmt: str | None = None


def _fp8(content: dict[str, Any], where: Path) -> tuple[StoredQuantization, ...]:
    fields, method = convert(content, _Fp8, where), content["quant_method"]
    if fields.fmt not in ("e4m3", "float8_e4m3fn"):
        raise refusal(where, method, f"fmt {fields.fmt}")
    if fields.scale_fmt not in (None, "float"):
        raise refusal(where, method, f"scale_fmt {fields.scale_fmt}")
    block = _block(fields.weight_block_size, where, method)
    stored = StoredQuantization(
        method=method,
        layout="float8",
        bits=8,
        block=block,
        per_tensor=block is None and method == "fp8",
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
    """Of thousands of named layers, those of one format are one entry."""
    fields = convert(content, _ModelOpt, where)
    skipped = tuple(map(_wildcards, (*(fields.ignore or ()), *(fields.exclude_modules or ()))))
    if (fields.quant_algo or "").upper() != "MIXED_PRECISION":
        return (_modelopt_layers(fields, (), skipped, where),)
    names: dict[StoredQuantization, list[str]] = {}
    for name, each in (fields.quantized_layers or {}).items():
        names.setdefault(_modelopt_layers(each, (), skipped, where), []).append(_wildcards(name))
    if not names:
        raise refusal(where, "modelopt", "MIXED_PRECISION without quantized_layers")
    return tuple(replace(stored, targets=tuple(targets)) for stored, targets in names.items())


def _modelopt_layers(
    fields: _Algorithm, targets: tuple[str, ...], skipped: tuple[str, ...], where: Path
) -> StoredQuantization:
    layout: Layout
    algorithm = (fields.quant_algo or "").upper()
    if algorithm in ("NVFP4", "W4A16_NVFP4") and fields.group_size in (None, 16):
        layout, bits, group_size = "nvfp4", 4, 16
    elif algorithm == "MXFP8" and fields.group_size in (None, 32):
        layout, bits, group_size = "mxfp8", 8, 32
    elif algorithm == "FP8":
        layout, bits, group_size = "float8", 8, None
    else:
        groups = "" if fields.group_size is None else f" in groups of {fields.group_size}"
        raise refusal(where, "modelopt", f"quant_algo {fields.quant_algo}{groups}")
    return StoredQuantization(
        method="modelopt",
        layout=layout,
        bits=bits,
        group_size=group_size,
        per_tensor=layout == "float8",
        targets=targets,
        skipped=skipped,
    )


def _wildcards(name: str) -> str:
    """A pattern in which * is any text, as a regular expression; other names as they are."""
    return f"re:{re.escape(name).replace(chr(92) + '*', '.*')}(\\.|$)" if "*" in name else name


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
    form = group.format or fields.format
    method = f"compressed-tensors {form}"
    if form in REFUSED:
        raise refusal(where, method, REFUSED[form])
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
    elif weights.type == "float" and form == "mxfp4-pack-quantized" and group_size == 32:
        layout, bits, strategies = "mxfp4", (4,), ("group",)
    elif weights.type == "float" and form == "mxfp8-quantized" and group_size == 32:
        layout, bits, strategies = "mxfp8", (8,), ("group",)
    elif weights.type == "float" and form == "nvfp4-pack-quantized" and group_size == 16:
        layout, bits, strategies = "nvfp4", (4,), ("tensor_group", "group")
    elif weights.type == "float" and form in ("float-quantized", "naive-quantized"):
        layout, bits, strategies = "float8", (8,), ("channel", "tensor", "block")
    else:
        raise refusal(where, method, f"{weights.num_bits}-bit {weights.type} weights in this format")
    if strategy not in strategies:
        raise refusal(where, method, f"strategy {strategy}")
    if layout in ("float8", "mxfp8", "nvfp4") and not weights.symmetric:
        raise refusal(where, method, "floating-point weights with zero points")
    return StoredQuantization(
        method=method,
        layout=layout,
        bits=_bits(weights.num_bits, bits, where, method),
        group_size=group_size if strategy in ("group", "tensor_group") else None,
        block=_block(weights.block_structure, where, method) if strategy == "block" else None,
        per_tensor=strategy == "tensor",
        symmetric=weights.symmetric,
        act_order=weights.actorder in ("group", "dynamic", True),
        targets=targets,
        skipped=skipped,
    )


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


def _check_pattern(pattern: str, where: Path) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        name_pattern(pattern[3:])
    except ValueError as error:
        raise ModelError(
            f"{where}: quantization_config has a pattern that is not supported: {pattern!r}: {error}",
            hint="patterns are those of RE2: without look-around and back-references",
        ) from error
