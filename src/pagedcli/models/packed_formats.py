"""The tensors of checkpoints that others quantized, and their packing: of each layout one function that names what is
stored, and one that reads it. models.quantization reads what config.json says of it.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from pagedcli.errors import ModelError
from pagedcli.layers.quantized import E2M1, E2M1_ZERO, CodedWeight, bit_fields, unpacked
from pagedcli.models.formats import DEVIATION, FLOAT8_DEVIATION, Packing, StoredTensor

_Stores: TypeAlias = "Callable[[Packing], tuple[StoredTensor, ...]]"
_Reads: TypeAlias = "Callable[[Mapping[str, Tensor], Packing], CodedWeight]"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output feature of each four bits of a word, lowest first


# ---------------------------------------------------------------------- what is stored


def _gptq_tensors(q: Packing) -> tuple[StoredTensor, ...]:
    per_word = 32 // q.bits
    zero = (1 << q.bits - 1) - q.zero_offset
    return (
        StoredTensor("qweight", "int32", out_dim=1, in_dim=0, in_per=per_word, init="bits"),
        StoredTensor("qzeros", "int32", 1, 0, per_word, q.group_size, init=_repeated(zero, q.bits)),
        _scales("scales", q, out_dim=1),
        StoredTensor("g_idx", "int32", None, 0, optional=not q.act_order),
        StoredTensor("bias", in_dim=None, optional=True),
    )


def _awq_tensors(q: Packing) -> tuple[StoredTensor, ...]:
    return (
        StoredTensor("qweight", "int32", out_dim=1, in_dim=0, out_per=8, init="bits"),
        StoredTensor("qzeros", "int32", 1, 0, 8, q.group_size, init=_repeated(8, 4)),
        _scales("scales", q, out_dim=1),
    )


def _pack_quantized_tensors(q: Packing) -> tuple[StoredTensor, ...]:
    per_word = 32 // q.bits
    zeros = _repeated(1 << q.bits - 1, q.bits)
    return (
        StoredTensor("weight_packed", "int32", in_per=per_word, init="bits"),
        _scales("weight_scale", q),
        StoredTensor("weight_zero_point", "int32", 0, 1, per_word, q.group_size, optional=q.symmetric, init=zeros),
        StoredTensor("weight_g_idx", "int32", None, 0, optional=not q.act_order),
    )


def _int_quantized_tensors(q: Packing) -> tuple[StoredTensor, ...]:
    return (
        StoredTensor("weight", "int8", init="bits"),
        _scales("weight_scale", q),
        StoredTensor("weight_zero_point", "int8", 0, 1, None if q.per_tensor else 1, None, optional=q.symmetric),
    )


def _mxfp4_tensors(q: Packing) -> tuple[StoredTensor, ...]:
    return (
        StoredTensor(_MXFP4_NUMBERS[q.scale_name], "uint8", in_per=2, init="bits"),
        StoredTensor(q.scale_name, "uint8", in_per=32, init=120.0),
    )


def _nvfp4_tensors(q: Packing) -> tuple[StoredTensor, ...]:
    numbers, scale = _NVFP4_NAMES[q.method]
    of_module = DEVIATION / E2M1_DEVIATION
    return (
        StoredTensor(numbers, "uint8", in_per=2, init="bits"),
        StoredTensor("weight_scale", "float8_e4m3fn", in_per=16, init=1.0),
        StoredTensor(scale, None, 0, 1, None, None, False, init=of_module if q.method == "modelopt" else 1 / of_module),
    )


# method -> names of the numbers and of the module's scale, which compressed-tensors stores as its reciprocal
_NVFP4_NAMES = {
    "modelopt": ("weight", "weight_scale_2"),
    "compressed-tensors nvfp4-pack-quantized": ("weight_packed", "weight_global_scale"),
}
_LARGEST_STEP = 128.0  # largest step of kernels that store it times 2^120
E2M1_DEVIATION = 2.93  # standard deviation of numbers of random bits
_MXFP4_NUMBERS = {"scales": "blocks", "weight_scale": "weight_packed"}


def _scales(suffix: str, q: Packing, *, out_dim: int = 0) -> StoredTensor:
    """Kept as stored: rounding them would be a second quantization."""
    out_per, in_per = q.block or (None if q.per_tensor else 1, q.group_size)
    # deviation of the numbers that dummies are made of
    spread = FLOAT8_DEVIATION if q.layout == "float8" else (4**q.bits / 12) ** 0.5
    return StoredTensor(suffix, None, out_dim, 1 - out_dim, out_per, in_per, converts=False, init=DEVIATION / spread)


def _repeated(number: int, bits: int) -> float:
    """An int32 of equal small numbers."""
    word = sum(number << shift for shift in range(0, 32, bits))
    return word - (1 << 32) if word >> 31 else word


# ---------------------------------------------------------------------- their packings


def _read_gptq(tensors: Mapping[str, Tensor], q: Packing) -> CodedWeight:
    words, scales = tensors["qweight"], tensors["scales"].T
    num_in, num_out = words.shape[0] * 32 // q.bits, words.shape[1]
    # added to whole words, as what was subtracted: a zero point of 0 borrowed from its neighbour
    zeros = unpacked(tensors["qzeros"] + int(_repeated(q.zero_offset, q.bits)), q.bits, 1, num_out).T
    groups = tensors["g_idx"].long() if "g_idx" in tensors else None
    codes = unpacked(words, q.bits, 0, num_in).T
    return _weight(codes, scales, zeros, q, groups)


def _read_awq(tensors: Mapping[str, Tensor], q: Packing) -> CodedWeight:
    def in_order(words: Tensor) -> Tensor:
        found = unpacked(words, 4, 1, words.shape[1] * 8).reshape(len(words), -1, 8)
        numbers = torch.empty_like(found)
        numbers[:, :, list(_AWQ_ORDER)] = found
        return numbers.flatten(1).T

    return _weight(in_order(tensors["qweight"]), tensors["scales"].T, in_order(tensors["qzeros"]), q)


def _read_pack_quantized(tensors: Mapping[str, Tensor], q: Packing) -> CodedWeight:
    words, scales = tensors["weight_packed"], tensors["weight_scale"]
    group, codes = tensors.get("weight_g_idx"), unpacked(words, q.bits, 1, words.shape[1] * 32 // q.bits)
    zeros = None
    if not q.symmetric:
        zeros = unpacked(tensors["weight_zero_point"], q.bits, 0, len(words))
    return _weight(codes, scales, zeros, q, None if group is None else group.long())


def _read_int_quantized(tensors: Mapping[str, Tensor], q: Packing) -> CodedWeight:
    codes = tensors["weight"].view(torch.uint8) ^ 128  # -128 ... 127 to 0 ... 255
    scales = tensors["weight_scale"].expand(len(codes), 1)
    zeros = None if q.symmetric else tensors["weight_zero_point"].expand(len(codes), 1).view(torch.uint8) ^ 128
    return _weight(codes, scales, zeros, q)


def _read_float8(tensors: Mapping[str, Tensor], q: Packing) -> CodedWeight:
    numbers, scales = tensors["weight"], tensors[q.scale_name].float()
    if q.block is not None:
        scales = scales.repeat_interleave(q.block[0], 0)[: len(numbers)]
    group_size = q.block[1] if q.block is not None else numbers.shape[1]
    return CodedWeight(numbers, 8, scales.expand(len(numbers), -1), 0, group_size)


def _read_mxfp4(tensors: Mapping[str, Tensor], q: Packing) -> CodedWeight:
    """Source: OCP Microscaling Formats (MX) Specification 1.0: e2m1, low bits first, times 2^(exponent - 127)."""
    codes = bit_fields(tensors[_MXFP4_NUMBERS[q.scale_name]], 4, 1)
    # bfloat16 holds every power of 2 exactly; half of it, as the levels are doubled
    scales = (_powers_of_2(tensors[q.scale_name]) / 2).to(torch.bfloat16)
    return CodedWeight(codes, 4, scales, E2M1_ZERO, 32, levels=E2M1)


def _powers_of_2(exponents: Tensor) -> Tensor:
    """e8m0 as float32."""
    if int(exponents.max()) == 255:
        raise ModelError("a scale of MXFP4 or MXFP8 weights is NaN", hint="download the checkpoint again")
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127)


def _read_nvfp4(tensors: Mapping[str, Tensor], q: Packing) -> CodedWeight:
    """Source: compressed-tensors' NVFP4PackedCompressor: e2m1, low bits first, times an e4m3 number of 16 inputs and a
    number of the module."""
    numbers, scale = _NVFP4_NAMES[q.method]
    scales, of_module = tensors["weight_scale"].float(), tensors[scale].float()
    if not bool((scales >= 0).all()):
        raise ModelError("a scale of NVFP4 weights is negative or not a number", hint="download the checkpoint again")
    if q.method == "modelopt":
        scales, step = scales * of_module, of_module / 2
    else:
        scales, step = scales / of_module, 0.5 / of_module
    if not bool((step.abs() < _LARGEST_STEP).all()):
        raise ModelError("a scale of NVFP4 weights is too large", hint="download the checkpoint again")
    codes = bit_fields(tensors[numbers], 4, 1)
    steps = step.flatten().expand(len(codes), -(-codes.shape[1] // 256))
    # half of the scales, as the levels are doubled
    return CodedWeight(codes, 4, scales / 2, E2M1_ZERO, 16, levels=E2M1, steps=steps, factors=tensors["weight_scale"])


def _weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, q: Packing, groups: Tensor | None = None
) -> CodedWeight:
    if zeros is None:
        zeros = torch.full(scales.shape, 1 << q.bits - 1, device=scales.device)
    groups = None if groups is None else groups - groups.min()  # a rank's part begins with a later one
    if groups is not None and int(groups.max()) >= scales.shape[1]:
        raise ModelError(f"an input of quantized weights is in a group that is not one of the {scales.shape[1]}")
    return CodedWeight(codes, q.bits, scales, zeros.to(torch.uint8), q.group_size or codes.shape[1], groups)


_E4M3 = StoredTensor("weight", "float8_e4m3fn")
# layout -> the tensors that it stores, and their packing
LAYOUTS: "dict[str, tuple[_Stores, _Reads]]" = {
    "gptq": (_gptq_tensors, _read_gptq),
    "awq": (_awq_tensors, _read_awq),
    "pack-quantized": (_pack_quantized_tensors, _read_pack_quantized),
    "int-quantized": (_int_quantized_tensors, _read_int_quantized),
    "float8": (lambda q: (_E4M3, _scales(q.scale_name, q)), _read_float8),
    "mxfp4": (_mxfp4_tensors, _read_mxfp4),
    "mxfp8": (  # as MXFP4, with e4m3
        lambda q: (_E4M3, StoredTensor("weight_scale", "uint8", in_per=32, init=115.0)),
        lambda tensors, q: CodedWeight(tensors["weight"], 8, _powers_of_2(tensors["weight_scale"]), 0, 32),
    ),
    "nvfp4": (_nvfp4_tensors, _read_nvfp4),
}
