"""The formats of checkpoints that others quantized: which tensors they store, and the linear layers made from them.

The numbers are kept as stored where a kernel computes with them, and otherwise widened to the model's dtype. Each
layout has one function that reads its packing; models.quantization reads what config.json says of it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pagedcli.attention.base import dtype_name
from pagedcli.core.plan import Kernels
from pagedcli.errors import ModelError
from pagedcli.layers.linear import Linear, LinearLayer
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.layers.quantized import E2M1, E2M1_ZERO, CodedWeight, Weight, chunk_columns, stacked, unpacked
from pagedcli.models.formats import (
    AS_STORED,
    DEVIATION,
    FLOAT8_DEVIATION,
    AsStored,
    LayerFormat,
    Modules,
    StoredTensor,
    WeightFormat,
    padded_rows,
)
from pagedcli.models.stored_quantization import Quantization, StoredQuantization
from pagedcli.native import load_library

_Stores = Callable[[StoredQuantization], tuple[StoredTensor, ...]]
_Reads = Callable[[Mapping[str, Tensor], StoredQuantization], CodedWeight]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output feature of each four bits of a word, lowest first


class CheckpointFormat(WeightFormat):
    """The formats of the layers of a quantized checkpoint."""

    def __init__(self, quantization: Quantization) -> None:
        self.name = quantization.description
        self._formats = tuple(Packed(stored) for stored in quantization.formats)

        self._has_cache_scales = quantization.has_cache_scales
        self._found: dict[str, Packed | AsStored] = {}  # by module

    @property
    def lm_head(self) -> LayerFormat:
        return self.of("lm_head")

    def of(self, module: str) -> "Packed | AsStored":
        if module not in self._found:
            covering = (each for each in self._formats if each.quantization.covers(module))
            self._found[module] = next(covering, AS_STORED)
        return self._found[module]

    def rounds_activations(self, kernels: Kernels, itemsize: int) -> bool:
        return kernels == "cpu" and any(each.kernel_refusal(kernels, itemsize) is None for each in self._formats)

    def note(self, dtype: torch.dtype, kernels: Kernels) -> str | None:
        formats = {each.name: each for each in self._formats}.values()
        notes = [each.note(dtype, kernels, alone=len(formats) == 1) for each in formats]
        unused = ["activations"] if any(each.quantization.layout == "nvfp4" for each in formats) else []
        unused += ["the KV cache"] if self._has_cache_scales else []
        return "; ".join([*notes, *([f"the scales of {' and '.join(unused)} are not used"] if unused else [])])


class CodedLayer(LayerFormat):
    """Linear layers of codes with scales: what is the same for every source."""

    def torch_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, kernels: Kernels = "torch"
    ) -> LinearLayer:
        weight, bias = self.weight(modules, dtype, kernels), _with_biases(modules, bias, dtype)
        if isinstance(weight, Tensor):
            return Linear(weight, bias)
        from pagedcli.layers.triton_products import TritonLinear  # only where triton is installed

        return TritonLinear(weight, bias)

    def native_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> NativeLinear:
        weight, bias = self.weight(modules, dtype, "cpu"), _with_biases(modules, bias, dtype)
        return NativeLinear(load_library(), weight, bias, gated=gated, dtype=dtype)


class Packed(CodedLayer):
    """Numbers of 4 or 8 bits with scales."""

    def __init__(self, quantization: StoredQuantization) -> None:
        self.quantization, self.name = quantization, quantization.description
        stores, self._read = LAYOUTS[quantization.layout]
        self.stored = stores(quantization)

    def note(self, dtype: torch.dtype, kernels: Kernels, *, alone: bool = True) -> str:
        """`alone`: the checkpoint has no other format."""
        name, (some, whose) = self.quantization.description, ("", "") if alone else ("some ", "their ")
        if (why := self.kernel_refusal(kernels, dtype.itemsize)) is not None:
            return f"{some}weights are {name}, widened to {dtype_name(dtype)} while loading: {why}"
        rounded = "are rounded to 8 bits in groups of 32" if kernels == "cpu" else "are not rounded"
        return f"{some}weights are {name}, kept so; {whose}activations {rounded}"

    def kernel_refusal(self, kernels: Kernels, itemsize: int) -> str | None:
        """Why the kernels do not compute with the numbers as they are; None if they do. `itemsize`: of activations."""
        is_float8, block = self.quantization.layout in ("float8", "mxfp8"), self.quantization.block
        size = self.quantization.group_size if block is None else block[1]
        if kernels == "torch":
            return "torch has no kernel for them"
        if is_float8 and kernels == "cpu":
            return "no CPU kernel reads FP8"
        if self.quantization.layout == "nvfp4" and kernels == "cpu" and itemsize == 4:
            return "CPU kernels round activations, which float32 must not be; bfloat16 keeps the weights as they are"
        multiple = 16 if self.quantization.layout == "nvfp4" else 32 if is_float8 or kernels == "cpu" else 8
        if size is not None and size % multiple:
            return f"groups of {size} have no kernel, only multiples of {multiple}"
        return None

    def kept_bytes(self, shape: tuple[int, ...], itemsize: int, kernels: Kernels, *, gated: bool = False) -> int:
        if self.kernel_refusal(kernels, itemsize) is not None:
            return AS_STORED.kept_bytes(shape, itemsize, kernels, gated=gated)
        (num_rows, num_columns), stored = shape, self.quantization
        if kernels == "cpu":
            return padded_rows(num_rows, kernels, gated=gated) * self._packed_row_bytes(num_columns)
        size, group_bytes = stored.group_size, {"mxfp4": 2, "nvfp4": 4, "mxfp8": 4}.get(stored.layout, 3)
        if stored.layout == "float8":
            size, group_bytes = stored.block[1] if stored.block else None, 4
        return num_rows * (num_columns * stored.bits // 8 + -(-num_columns // (size or num_columns)) * group_bytes)

    def _packed_row_bytes(self, num_columns: int) -> int:
        """Bytes of an output feature as NativeLinear packs it: see its _pack_codes."""
        stored = self.quantization
        if stored.layout == "nvfp4":
            return -(-num_columns // 16) * 9 + -(-num_columns // 256) * 4
        if stored.bits == 8 and stored.group_size is None and stored.symmetric:
            return -(-num_columns // 4) * 4 + 8  # 8: a scale and a sum
        chunk = chunk_columns(num_columns, stored.group_size)
        header = 2 if stored.layout == "mxfp4" else 3 if stored.bits == 4 else 5  # a scale, and mostly a zero point
        return -(-num_columns // chunk) * (chunk * stored.bits // 8 + header)

    def weight(self, modules: Modules, dtype: torch.dtype, kernels: Kernels) -> Weight:
        weight = stacked([self._read(tensors, self.quantization) for tensors in modules])
        return weight if self.kernel_refusal(kernels, dtype.itemsize) is None else weight.dequantized(dtype)


def _with_biases(modules: Modules, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias, or what GPTQ checkpoints store for modules that have none in their architecture."""
    stored = [tensors["bias"] for tensors in modules if "bias" in tensors]
    if bias is not None or not stored:
        return bias
    if len(stored) != len(modules):
        raise ModelError("only some modules of a linear layer have a bias", hint="download the checkpoint again")
    return torch.cat(stored).to(dtype)


# ---------------------------------------------------------------------- what is stored


def _gptq_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
    per_word = 32 // q.bits
    zero = (1 << q.bits - 1) - q.zero_offset
    return (
        StoredTensor("qweight", "int32", out_dim=1, in_dim=0, in_per=per_word, init="bits"),
        StoredTensor("qzeros", "int32", 1, 0, per_word, q.group_size, init=_repeated(zero, q.bits)),
        _scales("scales", q, out_dim=1),
        StoredTensor("g_idx", "int32", None, 0, optional=not q.act_order),
        StoredTensor("bias", in_dim=None, optional=True),
    )


def _awq_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
    return (
        StoredTensor("qweight", "int32", out_dim=1, in_dim=0, out_per=8, init="bits"),
        StoredTensor("qzeros", "int32", 1, 0, 8, q.group_size, init=_repeated(8, 4)),
        _scales("scales", q, out_dim=1),
    )


def _pack_quantized_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
    per_word = 32 // q.bits
    zeros = _repeated(1 << q.bits - 1, q.bits)
    return (
        StoredTensor("weight_packed", "int32", in_per=per_word, init="bits"),
        _scales("weight_scale", q),
        StoredTensor("weight_zero_point", "int32", 0, 1, per_word, q.group_size, optional=q.symmetric, init=zeros),
        StoredTensor("weight_g_idx", "int32", None, 0, optional=not q.act_order),
    )


def _int_quantized_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
    return (
        StoredTensor("weight", "int8", init="bits"),
        _scales("weight_scale", q),
        StoredTensor("weight_zero_point", "int8", 0, 1, None if q.per_tensor else 1, None, optional=q.symmetric),
    )


def _float8_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
    return (StoredTensor("weight", "float8_e4m3fn"), _scales(q.scale_name, q))


def _mxfp4_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
    return (
        StoredTensor(_MXFP4_NUMBERS[q.scale_name], "uint8", in_per=2, init="bits"),
        StoredTensor(q.scale_name, "uint8", in_per=32, init=120.0),
    )


def _mxfp8_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
    return (StoredTensor("weight", "float8_e4m3fn"), StoredTensor("weight_scale", "uint8", in_per=32, init=115.0))


def _nvfp4_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
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


def _scales(suffix: str, q: StoredQuantization, *, out_dim: int = 0) -> StoredTensor:
    """Kept as stored: rounding them would be a second quantization."""
    out_per, in_per = q.block or (None if q.per_tensor else 1, q.group_size)
    spread = (
        FLOAT8_DEVIATION if q.layout == "float8" else (4**q.bits / 12) ** 0.5
    )  # deviation of the numbers that dummies are made of
    return StoredTensor(suffix, None, out_dim, 1 - out_dim, out_per, in_per, converts=False, init=DEVIATION / spread)


def _repeated(number: int, bits: int) -> float:
    """An int32 of equal small numbers."""
    word = sum(number << shift for shift in range(0, 32, bits))
    return word - (1 << 32) if word >> 31 else word


# ---------------------------------------------------------------------- their packings


def _read_gptq(tensors: Mapping[str, Tensor], q: StoredQuantization) -> CodedWeight:
    words, scales = tensors["qweight"], tensors["scales"].T
    num_in, num_out = words.shape[0] * 32 // q.bits, words.shape[1]
    # added to whole words, as what was subtracted: a zero point of 0 borrowed from its neighbour
    zeros = unpacked(tensors["qzeros"] + int(_repeated(q.zero_offset, q.bits)), q.bits, 1, num_out).T
    groups = tensors["g_idx"].long() if "g_idx" in tensors else None
    codes = unpacked(words, q.bits, 0, num_in).T
    return _weight(codes, scales, zeros, q, groups)


def _read_awq(tensors: Mapping[str, Tensor], q: StoredQuantization) -> CodedWeight:
    def in_order(words: Tensor) -> Tensor:
        found = unpacked(words, 4, 1, words.shape[1] * 8).reshape(len(words), -1, 8)
        numbers = torch.empty_like(found)
        numbers[:, :, list(_AWQ_ORDER)] = found
        return numbers.flatten(1).T

    return _weight(in_order(tensors["qweight"]), tensors["scales"].T, in_order(tensors["qzeros"]), q)


def _read_pack_quantized(tensors: Mapping[str, Tensor], q: StoredQuantization) -> CodedWeight:
    words, scales = tensors["weight_packed"], tensors["weight_scale"]
    group, codes = tensors.get("weight_g_idx"), unpacked(words, q.bits, 1, words.shape[1] * 32 // q.bits)
    zeros = None
    if not q.symmetric:
        zeros = unpacked(tensors["weight_zero_point"], q.bits, 0, len(words))
    return _weight(codes, scales, zeros, q, None if group is None else group.long())


def _read_int_quantized(tensors: Mapping[str, Tensor], q: StoredQuantization) -> CodedWeight:
    codes = tensors["weight"].view(torch.uint8) ^ 128  # -128 ... 127 to 0 ... 255
    scales = tensors["weight_scale"].expand(len(codes), 1)
    zeros = None if q.symmetric else tensors["weight_zero_point"].expand(len(codes), 1).view(torch.uint8) ^ 128
    return _weight(codes, scales, zeros, q)


def _read_float8(tensors: Mapping[str, Tensor], q: StoredQuantization) -> CodedWeight:
    numbers, scales = tensors["weight"], tensors[q.scale_name].float()
    if q.block is not None:
        scales = scales.repeat_interleave(q.block[0], 0)[: len(numbers)]
    group_size = q.block[1] if q.block is not None else numbers.shape[1]
    return CodedWeight(numbers, 8, scales.expand(len(numbers), -1), 0, group_size)


def _read_mxfp4(tensors: Mapping[str, Tensor], q: StoredQuantization) -> CodedWeight:
    """Source: OCP Microscaling Formats (MX) Specification 1.0: e2m1, low bits first, times 2^(exponent - 127)."""
    codes = _pairs(tensors[_MXFP4_NUMBERS[q.scale_name]])
    # bfloat16 holds every power of 2 exactly; half of it, as the levels are doubled
    scales = (_powers_of_2(tensors[q.scale_name]) / 2).to(torch.bfloat16)
    return CodedWeight(codes, 4, scales, E2M1_ZERO, 32, levels=E2M1)


def _read_mxfp8(tensors: Mapping[str, Tensor], q: StoredQuantization) -> CodedWeight:
    """Source: as _read_mxfp4, with e4m3."""
    return CodedWeight(tensors["weight"], 8, _powers_of_2(tensors["weight_scale"]), 0, 32)


def _powers_of_2(exponents: Tensor) -> Tensor:
    """e8m0 as float32."""
    if int(exponents.max()) == 255:
        raise ModelError("a scale of MXFP4 or MXFP8 weights is NaN", hint="download the checkpoint again")
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127)


def _read_nvfp4(tensors: Mapping[str, Tensor], q: StoredQuantization) -> CodedWeight:
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
    codes = _pairs(tensors[numbers])
    steps = step.flatten().expand(len(codes), -(-codes.shape[1] // 256))
    # half of the scales, as the levels are doubled
    return CodedWeight(codes, 4, scales / 2, E2M1_ZERO, 16, levels=E2M1, steps=steps, factors=tensors["weight_scale"])


def _pairs(numbers: Tensor) -> Tensor:
    """The two codes of each byte, low bits first."""
    return torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)


def _weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, q: StoredQuantization, groups: Tensor | None = None
) -> CodedWeight:
    if zeros is None:
        zeros = torch.full(scales.shape, 1 << q.bits - 1, device=scales.device)
    groups = None if groups is None else groups - groups.min()  # a rank's part begins with a later one
    if groups is not None and int(groups.max()) >= scales.shape[1]:
        raise ModelError(f"an input of quantized weights is in a group that is not one of the {scales.shape[1]}")
    return CodedWeight(codes, q.bits, scales, zeros.to(torch.uint8), q.group_size or codes.shape[1], groups)


# layout -> the tensors that it stores, and their packing
LAYOUTS: dict[str, tuple[_Stores, _Reads]] = {
    "gptq": (_gptq_tensors, _read_gptq),
    "awq": (_awq_tensors, _read_awq),
    "pack-quantized": (_pack_quantized_tensors, _read_pack_quantized),
    "int-quantized": (_int_quantized_tensors, _read_int_quantized),
    "float8": (_float8_tensors, _read_float8),
    "mxfp4": (_mxfp4_tensors, _read_mxfp4),
    "mxfp8": (_mxfp8_tensors, _read_mxfp8),
    "nvfp4": (_nvfp4_tensors, _read_nvfp4),
}
