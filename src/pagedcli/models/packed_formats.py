"""The formats of checkpoints that others quantized: which tensors they store, and the linear layers made from them.

Whole numbers (GPTQ, AWQ, compressed-tensors) stay whole numbers; FP8 is widened to the model's dtype. One function per
layout knows its packing; see models.quantization for what config.json says of it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pagedcli.attention.base import dtype_name
from pagedcli.errors import ModelError
from pagedcli.layers.linear import Linear, LinearLayer
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.layers.quantized import QuantizedWeight, unpacked
from pagedcli.models.formats import AS_STORED, DEVIATION, FLOAT8_DEVIATION, Kernels, Modules, StoredTensor, WeightFormat
from pagedcli.models.quantization import Layout, StoredQuantization
from pagedcli.native import load_library

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output feature of each four bits of a word, lowest first


def packed_format(quantization: StoredQuantization) -> "Packed | Widened":
    """The format of a checkpoint's linear layers."""
    return Widened(quantization) if quantization.layout == "float8" else Packed(quantization)


class _Stored:
    """What both formats have in common."""

    stacks = False
    keeps_rows = True

    def __init__(self, quantization: StoredQuantization) -> None:
        self.quantization = quantization
        self.name = quantization.description
        self.stored = _TENSORS[quantization.layout](quantization)

    @property
    def lm_head(self) -> WeightFormat:
        return AS_STORED

    def covers(self, module: str) -> bool:
        return self.quantization.covers(module)

    def torch_refusal(self) -> str | None:
        return None


class Widened(_Stored):
    """FP8 weights, widened to the model's dtype while they are loaded."""

    def note(self, dtype: torch.dtype, kernels: Kernels) -> str | None:
        return f"weights are {self.name}, widened to {dtype_name(dtype)} while loading; activations are not rounded"

    def kernel_refusal(self, kernels: Kernels) -> str | None:
        """See Packed.kernel_refusal."""
        return "no kernel reads FP8 weights"

    def kept_bytes(self, out_features: int, in_features: int, itemsize: int, kernels: Kernels) -> int:
        """Bytes of a layer's weight in memory; itemsize is that of the model's dtype."""
        return out_features * in_features * itemsize

    def torch_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, kernels: Kernels = "torch"
    ) -> LinearLayer:
        return Linear(self._weight(modules, dtype), bias)

    def native_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> NativeLinear:
        return NativeLinear(load_library(), self._weight(modules, dtype), bias, gated=gated)

    def _weight(self, modules: Modules, dtype: torch.dtype) -> Tensor:
        scale_name, block = self.quantization.scale_name, self.quantization.block
        parts = []
        for tensors in modules:
            weight, scales = tensors["weight"], tensors[scale_name].float()
            if block is not None:
                scales = scales.repeat_interleave(block[0], 0)[: weight.shape[0]]
                scales = scales.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
            parts.append((weight.float() * scales).to(dtype))
        return torch.cat(parts)


class Packed(_Stored):
    """Whole numbers of 4 or 8 bits with scales, and zero points or not."""

    def note(self, dtype: torch.dtype, kernels: Kernels) -> str | None:
        if (why := self.kernel_refusal(kernels)) is not None:
            return f"weights are {self.name}, widened to {dtype_name(dtype)} while loading: {why}"
        rounded = "activations are rounded to 8 bits per token" if kernels == "cpu" else "activations are not rounded"
        return f"weights are {self.name}, kept so; {rounded}"

    def kernel_refusal(self, kernels: Kernels) -> str | None:
        """Why the kernels do not compute with the numbers as they are; None if they do."""
        size = self.quantization.group_size
        if kernels == "cpu" and size is not None and size % 32:
            return f"groups of {size} have no kernel, only multiples of 32"
        return "torch has no kernel for them" if kernels == "torch" else None

    def kept_bytes(self, out_features: int, in_features: int, itemsize: int, kernels: Kernels) -> int:
        """Bytes of a layer's weight in memory; itemsize is that of the model's dtype."""
        if self.kernel_refusal(kernels) is not None:
            return out_features * in_features * itemsize
        groups = -(-in_features // (self.quantization.group_size or in_features))
        return out_features * (in_features * self.quantization.bits // 8 + groups * 3)

    def torch_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, kernels: Kernels = "torch"
    ) -> LinearLayer:
        weight, bias = self._weight(modules), _with_biases(modules, bias, dtype)
        if kernels == "triton":
            from pagedcli.layers.triton_codes import CodesLinear  # only where triton is installed

            return CodesLinear(weight, bias)
        return Linear(weight.dequantized(dtype), bias)

    def native_linear(
        self, modules: Modules, bias: Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> NativeLinear:
        weight, bias = self._weight(modules), _with_biases(modules, bias, dtype)
        numbers = weight if self.kernel_refusal("cpu") is None else weight.dequantized(dtype)
        return NativeLinear(load_library(), numbers, bias, gated=gated, dtype=dtype)

    def _weight(self, modules: Modules) -> QuantizedWeight:
        read = _READERS[self.quantization.layout]
        return QuantizedWeight.stacked([read(tensors, self.quantization) for tensors in modules])


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
        StoredTensor("qweight", torch.int32, out_dim=1, in_dim=0, in_per=per_word, init="bits"),
        StoredTensor("qzeros", torch.int32, 1, 0, per_word, q.group_size, init=_repeated(zero, q.bits)),
        _scales("scales", q, out_dim=1),
        StoredTensor("g_idx", torch.int32, None, 0, optional=not q.act_order),
        StoredTensor("bias", in_dim=None, optional=True),
    )


def _awq_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
    return (
        StoredTensor("qweight", torch.int32, out_dim=1, in_dim=0, out_per=8, init="bits"),
        StoredTensor("qzeros", torch.int32, 1, 0, 8, q.group_size, init=_repeated(8, 4)),
        _scales("scales", q, out_dim=1),
    )


def _pack_quantized_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
    per_word = 32 // q.bits
    zeros = _repeated(1 << q.bits - 1, q.bits)
    return (
        StoredTensor("weight_packed", torch.int32, in_per=per_word, init="bits"),
        _scales("weight_scale", q),
        StoredTensor("weight_zero_point", torch.int32, 0, 1, per_word, q.group_size, optional=q.symmetric, init=zeros),
        StoredTensor("weight_g_idx", torch.int32, None, 0, optional=not q.act_order),
    )


def _int_quantized_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
    return (
        StoredTensor("weight", torch.int8, init="bits"),
        _scales("weight_scale", q),
        StoredTensor("weight_zero_point", torch.int8, 0, 1, None if q.per_tensor else 1, None, optional=q.symmetric),
    )


def _float8_tensors(q: StoredQuantization) -> tuple[StoredTensor, ...]:
    return (StoredTensor("weight", torch.float8_e4m3fn), _scales(q.scale_name, q))


def _scales(suffix: str, q: StoredQuantization, *, out_dim: int = 0) -> StoredTensor:
    """Kept as stored: rounding them would be a second quantization."""
    out_per, in_per = q.block or (None if q.per_tensor else 1, q.group_size)
    spread = (
        FLOAT8_DEVIATION if q.layout == "float8" else (4**q.bits / 12) ** 0.5
    )  # of the numbers that dummies are made of
    return StoredTensor(suffix, None, out_dim, 1 - out_dim, out_per, in_per, converts=False, init=DEVIATION / spread)


def _repeated(number: int, bits: int) -> float:
    """An int32 of equal small numbers."""
    word = sum(number << shift for shift in range(0, 32, bits))
    return word - (1 << 32) if word >> 31 else word


_TENSORS: Mapping[Layout, Callable[[StoredQuantization], tuple[StoredTensor, ...]]] = {
    "gptq": _gptq_tensors,
    "awq": _awq_tensors,
    "pack-quantized": _pack_quantized_tensors,
    "int-quantized": _int_quantized_tensors,
    "float8": _float8_tensors,
}


# ---------------------------------------------------------------------- their packings


def _read_gptq(tensors: Mapping[str, Tensor], q: StoredQuantization) -> QuantizedWeight:
    words, scales = tensors["qweight"], tensors["scales"].T
    num_in, num_out = words.shape[0] * 32 // q.bits, words.shape[1]
    # added to whole words, as what was subtracted: a zero point of 0 borrowed from its neighbour
    zeros = unpacked(tensors["qzeros"] + int(_repeated(q.zero_offset, q.bits)), q.bits, 1, num_out).T
    groups = tensors["g_idx"].long() if "g_idx" in tensors else None
    codes = unpacked(words, q.bits, 0, num_in).T
    return _weight(codes, scales, zeros, q, groups)


def _read_awq(tensors: Mapping[str, Tensor], q: StoredQuantization) -> QuantizedWeight:
    def in_order(words: Tensor) -> Tensor:
        found = unpacked(words, 4, 1, words.shape[1] * 8).reshape(len(words), -1, 8)
        numbers = torch.empty_like(found)
        numbers[:, :, list(_AWQ_ORDER)] = found
        return numbers.flatten(1).T

    return _weight(in_order(tensors["qweight"]), tensors["scales"].T, in_order(tensors["qzeros"]), q)


def _read_pack_quantized(tensors: Mapping[str, Tensor], q: StoredQuantization) -> QuantizedWeight:
    words, scales = tensors["weight_packed"], tensors["weight_scale"]
    group, codes = tensors.get("weight_g_idx"), unpacked(words, q.bits, 1, words.shape[1] * 32 // q.bits)
    zeros = None
    if not q.symmetric:
        zeros = unpacked(tensors["weight_zero_point"], q.bits, 0, len(words))
    return _weight(codes, scales, zeros, q, None if group is None else group.long())


def _read_int_quantized(tensors: Mapping[str, Tensor], q: StoredQuantization) -> QuantizedWeight:
    codes = tensors["weight"].view(torch.uint8) ^ 128  # -128 ... 127 to 0 ... 255
    scales = tensors["weight_scale"].expand(len(codes), 1)
    zeros = None if q.symmetric else tensors["weight_zero_point"].expand(len(codes), 1).view(torch.uint8) ^ 128
    return _weight(codes, scales, zeros, q)


def _weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, q: StoredQuantization, groups: Tensor | None = None
) -> QuantizedWeight:
    if zeros is None:
        zeros = torch.full(scales.shape, 1 << q.bits - 1, device=scales.device)
    groups = None if groups is None else groups - groups.min()  # a rank's part begins with a later one
    if groups is not None and int(groups.max()) >= scales.shape[1]:
        raise ModelError(f"an input of quantized weights is in a group that is not one of the {scales.shape[1]}")
    return QuantizedWeight(codes, q.bits, scales, zeros.to(torch.uint8), q.group_size or codes.shape[1], groups)


_READERS: Mapping[Layout, Callable[[Mapping[str, Tensor], StoredQuantization], QuantizedWeight]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "pack-quantized": _read_pack_quantized,
    "int-quantized": _read_int_quantized,
}
