"""Matrix products for GPUs with quantized weights, which stay packed in GPU memory: how kernels read them, and linear
layers; layers.triton_experts has those of experts.

Weights of 4 and 8 bits become numbers of the activations' dtype in registers; sums are float32. The twin is the
product with the `dequantized` weight in torch. Imported only where triton is installed.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pagedcli.attention.triton_kernels import to_fp8
from pagedcli.attention.triton_launch import power_of_2
from pagedcli.errors import ModelError
from pagedcli.layers.linear import Linear, OutputLinear
from pagedcli.layers.quantized import E2M1, CodedWeight, Weight

_CONVERTS_FLOAT8 = (8, 9)  # the first compute capability that does; others read the bits


@dataclass(frozen=True, slots=True)
class KernelWeight:
    """X weights [N, K] of one format: those of the experts of a layer, or of a linear layer."""

    form: Literal["floats", "float8", "codes4", "codes8", "e2m1"]
    num_out: int  # N
    num_in: int  # K
    group_size: int  # inputs that share a scale; at least K if all do
    numbers: Tensor  # [X, N, K]; codes, and those of e2m1: int32 words [X, ceil(K * bits / 32), N], lowest bits first
    scales: Tensor | None = None  # [X, groups, N]
    zeros: Tensor | None = None  # [X, groups, N], for codes: uint8 zero points, or float32 minima
    order: Tensor | None = None  # int32 [X, K]: the input of each of the K, if groups are not neighbours

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers, scales and zero points."""
        return sum(tensor.nbytes for tensor in (self.numbers, self.scales, self.zeros) if tensor is not None)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time values of a kernel that reads the weights."""
        return {"FORM": self.form, "N": self.num_out, "K": self.num_in, "GROUP": self.group_size}

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """numbers, scales and zeros, or what stands for those that the kernel does not read."""
        none = self.numbers
        return none, none if self.scales is None else self.scales, none if self.zeros is None else self.zeros


def kernel_weight(weights: list[Weight]) -> KernelWeight:
    """The weights, which must be alike, as one. Changes: empties the list from its end, which frees each weight once
    it is copied.

    Raises: ModelError if their formats or groups differ, or an FP8 weight is not a number.
    """
    whole: KernelWeight | None = None
    kept: dict[str, Tensor] = {}
    for place in range(len(weights) - 1, -1, -1):
        one = _of_one(weights.pop())
        tensors = {name: tensor for name in _TENSORS if (tensor := getattr(one, name)) is not None}
        if whole is None:
            whole = one
            kept = {name: tensor.new_empty((place + 1, *tensor.shape)) for name, tensor in tensors.items()}
        if one.constants != whole.constants or kept.keys() != tensors.keys():
            raise ModelError(
                "the experts of a layer are stored in different formats, which no kernel computes together",
                hint="use --device cpu, or the unquantized version of the model",
            )
        for name, tensor in tensors.items():
            kept[name][place] = tensor
    assert whole is not None, "there is a weight"
    return KernelWeight(whole.form, whole.num_out, whole.num_in, whole.group_size, **kept)


_TENSORS = ("numbers", "scales", "zeros", "order")


def _of_one(weight: Weight) -> KernelWeight:
    """What a kernel reads of one weight, without the dimension of experts."""
    if isinstance(weight, Tensor):
        num_out, num_in = weight.shape
        return KernelWeight("floats", num_out, num_in, num_in, weight)
    if weight.codes.dtype == torch.float8_e4m3fn:
        return _float8(weight)
    assert weight.levels in ((), E2M1), "no kernel reads other levels"
    weight, order = weight.in_order
    num_out, num_in = weight.codes.shape
    bits = 4 if weight.bits == 4 else 8
    zeros = weight.zeros if weight.minima is None else weight.minima  # what the kernel subtracts
    if isinstance(zeros, int):
        zeros = torch.full_like(weight.scales, zeros, dtype=torch.uint8)
    return KernelWeight(
        "e2m1" if weight.levels else "codes4" if bits == 4 else "codes8",
        num_out,
        num_in,
        _group_size(weight.group_size, num_in),
        numbers=_words(weight.codes.T, bits),
        scales=weight.scales.T,
        zeros=None if weight.levels else zeros.T,
        order=None if order is None else order.to(torch.int32),
    )


def _float8(weight: CodedWeight) -> KernelWeight:
    numbers, scales = weight.codes, weight.scales.T
    num_out, num_in = numbers.shape
    if not (numbers.is_cuda and torch.cuda.get_device_capability(numbers.device) >= _CONVERTS_FLOAT8):
        numbers, scales = numbers.view(torch.uint8), scales * 256
        if bool(((numbers & 127) == 127).any()):
            raise ModelError("an FP8 weight is not a number", hint="download the checkpoint again")
    return KernelWeight("float8", num_out, num_in, _group_size(weight.group_size, num_in), numbers, scales)


def _group_size(size: int, num_in: int) -> int:
    """Groups that a block of the kernels divides, if all inputs are in one."""
    return size if size < num_in else -(-num_in // 64) * 64


class TritonLinear:
    """y = x W^T + b of quantized weights. Keeps its own copy of them."""

    __slots__ = ("_bias", "_order", "_weight", "nbytes")
    gated = False

    def __init__(self, weight: CodedWeight, bias: Tensor | None = None) -> None:
        """Raises: ModelError if the groups of act-order weights are of different sizes, or FP8 weights no numbers."""
        self._weight, self._bias = kernel_weight([weight]), bias
        self._order = None if self._weight.order is None else self._weight.order[0].long()
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, in] -> [T, out], in the dtype of x."""
        x = x.contiguous() if self._order is None else x[:, self._order]
        if x.shape[0] >= UNPACKED_TOKENS:
            return F.linear(x, unpacked_weight(self._weight, x.dtype), self._bias)
        weight, num_tokens = self._weight, x.shape[0]
        out = x.new_empty((num_tokens, weight.num_out))
        if not num_tokens:
            return out
        constants, launch = linear_constants(weight, num_tokens, processors_of(x.device))
        num_splits = -(-weight.num_in // constants["LENGTH"])
        blocks = -(-weight.num_out // constants["BLOCK_N"]), -(-num_tokens // constants["BLOCK_T"])
        _launch(weight, self._bias, x, out, blocks, num_splits, constants, launch, whole=num_splits == 1)
        return out


class RoundingLinear:
    """y = x W^T + b of an FP8 weight with a scale per output. From FP8_TOKENS tokens on x is rounded to FP8, too, by a
    scale per token, for tensor cores."""

    __slots__ = ("_bias", "_linear", "_numbers", "_scales", "nbytes")
    gated = False

    def __init__(self, linear: TritonLinear) -> None:
        """`linear`: what few tokens are multiplied by, for which `serves` is true."""
        weight, self._linear, self._bias, self.nbytes = linear._weight, linear, linear._bias, linear.nbytes
        assert weight.scales is not None, "an FP8 weight has scales"
        self._numbers, self._scales = weight.numbers[0].T, weight.scales[0].float()

    @staticmethod
    def serves(linear: object) -> bool:
        """Whether torch multiplies FP8 by the weight as it is kept."""
        if not isinstance(linear, TritonLinear) or linear._weight.numbers.dtype != torch.float8_e4m3fn:
            return False
        weight = linear._weight
        return weight.group_size >= weight.num_in and weight.num_in % 16 == 0 and weight.num_out % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, in] -> [T, out]."""
        if x.shape[0] < FP8_TOKENS or (x.is_cuda and x.dtype != torch.bfloat16):  # CUDA gives no other type
            return self._linear(x)
        x, (num_tokens, width) = x.contiguous(), x.shape
        rounded, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), self._scales.new_empty(num_tokens, 1)
        round_rows_kernel[(num_tokens,)](x, rounded, scales, K=width, BLOCK=power_of_2(width), num_warps=8)
        options: dict[str, Any] = {
            "scale_a": scales,
            "scale_b": self._scales,
            "out_dtype": x.dtype,
            "use_fast_accum": True,
        }
        y = torch._scaled_mm(rounded, self._numbers, **options)
        return y if self._bias is None else y.add_(self._bias)


FP8_TOKENS = 16


class OneTileLinear:
    """y = x W^T + b in the same tiles for any number of tokens, so that the bits of a row do not depend on its company.
    Parts of the inputs are added in their order, in a program or by another kernel."""

    __slots__ = ("_bias", "_constants", "_dtype", "_weight", "nbytes")
    gated = False

    def __init__(self, weight: KernelWeight, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of the results; None: that of x."""
        self._weight, self._bias, self._dtype, self.nbytes = weight, bias, dtype, weight.nbytes
        constants, _ = linear_constants(weight, UNPACKED_TOKENS, processors_of(weight.numbers.device))
        self._constants = constants | {"BLOCK_K": min(64, constants["BLOCK_K"])}  # twice the inputs spill registers

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, in] -> [T, out]."""
        x, weight, num_tokens, constants = x.contiguous(), self._weight, x.shape[0], self._constants
        out = x.new_empty((num_tokens, weight.num_out), dtype=self._dtype)
        num_parts = -(-weight.num_in // constants["LENGTH"])
        blocks = -(-weight.num_out // constants["BLOCK_N"]), -(-num_tokens // constants["BLOCK_T"])
        whole = num_parts == 1 or blocks[1] >= _TILES_OF_WHOLE_SUMS
        if num_tokens:
            launch = {"num_warps": 4, "num_stages": 3}
            _launch(weight, self._bias, x, out, blocks, num_parts, constants, launch, whole=whole)
        return out


_TILES_OF_WHOLE_SUMS = 4  # tiles of tokens: so many programs need no split of the inputs


def _launch(
    weight: KernelWeight,
    bias: Tensor | None,
    x: Tensor,
    out: Tensor,
    blocks: tuple[int, int],
    num_parts: int,
    constants: dict[str, Any],
    launch: dict[str, int],
    *,
    whole: bool,
) -> None:
    """Run linear_kernel, and unless each program adds all parts of the inputs, sum_splits_kernel. Changes: out."""
    num_tokens, has_bias = x.shape[0], bias is not None
    given = x if bias is None else bias  # a kernel takes a pointer even where it reads no bias
    sums = out if whole else out.new_empty((num_parts, *out.shape), dtype=torch.float32)
    flags = {"BIAS": has_bias and whole, "WHOLE": whole, "PARTS": num_parts if whole else 1}
    grid = *blocks, 1 if whole else num_parts
    linear_kernel[grid](x, *weight.pointers, given, sums, num_tokens, **constants, **flags, **launch)
    if not whole:
        _, scales, _ = weight.pointers
        sizes = weight.constants | {"SPLITS": num_parts, "BIAS": has_bias, "BLOCK": _COLUMNS_PER_SUM}
        columns = -(-weight.num_out // _COLUMNS_PER_SUM)
        sum_splits_kernel[num_tokens, columns](sums, scales, given, out, num_tokens, **sizes, num_warps=4)


def weight_of(linear: object) -> tuple[KernelWeight, Tensor | None] | None:
    """The weight and bias of a linear layer; None if a kernel cannot multiply by the weight as it is kept."""
    if isinstance(linear, TritonLinear):
        return None if linear._order is not None else (linear._weight, linear._bias)
    if not isinstance(linear, Linear | OutputLinear) or linear.weight is None or not linear.weight.is_contiguous():
        return None
    num_out, num_in = linear.weight.shape
    return KernelWeight("floats", num_out, num_in, num_in, linear.weight), linear.bias


# From so many tokens on a weight is unpacked once per call and multiplied by cuBLAS. On an H200 256 tokens of a layer
# of 4,096 x 4,096 with 4 bits take 30 us so, and 68 where each 128 tokens unpack it again.
UNPACKED_TOKENS = 65
_PROGRAMS_PER_PROCESSOR = 4  # each has 2 to 3 KB of a weight under way, and a multiprocessor needs 10 to 25 KB
_LEAST_LENGTH = 512  # inputs of a program: fewer would not pay for writing and adding its sums
_COLUMNS_PER_SUM = 512


def linear_constants(
    weight: KernelWeight, num_tokens: int, num_processors: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """Compile-time values of linear_kernel and options of its launch: few tokens in narrow blocks, and parts of the
    inputs, for the processors.

    The parts do not depend on the tokens, so a token's result does not depend on its company.
    """
    block_t = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    in_groups = weight.form == "float8" and weight.group_size < weight.num_in
    block_k = next(size for size in (128, 64, 32) if not in_groups or size == 32 or weight.group_size % size == 0)
    num_blocks = -(-weight.num_out // 32)
    num_parts = -(-_PROGRAMS_PER_PROCESSOR * num_processors // num_blocks)  # of the inputs
    length = min(weight.num_in, max(_LEAST_LENGTH, -(-weight.num_in // num_parts)))
    length = -(-length // block_k) * block_k
    blocks = {"BLOCK_T": block_t, "BLOCK_N": 32 if block_t <= 32 else 64, "BLOCK_K": block_k, "LENGTH": length}
    # On an H200 64 tokens of 4-bit weights take 27 us with 4 stages; FP8 and small groups were not timed with 3.
    num_stages = 3 if weight.form in ("codes4", "codes8") and weight.group_size % block_k == 0 else 4
    return weight.constants | blocks, {"num_warps": 4, "num_stages": num_stages}


@functools.cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def unpacked_weight(weight: KernelWeight, dtype: torch.dtype) -> Tensor:
    """A linear layer's weight as numbers [N, K]."""
    num_out, num_in = weight.num_out, weight.num_in
    by_rows = weight.form == "float8"  # FP8 is stored [N, K]
    shape = (num_out, num_in) if by_rows else (num_in, num_out)
    out = torch.empty(shape, dtype=dtype, device=weight.numbers.device)
    grid = -(-num_out // 64), -(-num_in // 64)
    unpack_kernel[grid](*weight.pointers, out, **weight.constants, BLOCK_N=64, BLOCK_K=64, num_warps=4)
    return out if by_rows else out.T


def _words(codes: Tensor, bits: int) -> Tensor:
    """int32 words of codes along the first dimension. Shapes: codes uint8 [K, N] -> [ceil(K * bits / 32), N]."""
    per_word = 32 // bits
    padded = F.pad(codes, (0, 0, 0, -len(codes) % per_word)).view(-1, per_word, codes.shape[1])
    words = torch.zeros(padded[:, 0].shape, dtype=torch.int32, device=codes.device)
    for i in range(per_word):
        words |= padded[:, i].int() << i * bits
    return words


@triton.jit
def add_product(
    sums,  # [BLOCK_T, BLOCK_N]
    x,  # [BLOCK_T, BLOCK_K], 0 from K on
    start,  # first of the BLOCK_K inputs
    n,  # [1, BLOCK_N], rows of the weight
    in_rows,  # [1, BLOCK_N], which of them exist
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """sums + x W^T over BLOCK_K inputs. The weights are those of KernelWeight, [N, K] of one expert."""
    k = start + tl.arange(0, BLOCK_K)[:, None]
    inside = in_rows & (k < K)
    if FORM == "floats":
        weights = tl.load(numbers_ptr + n.to(tl.int64) * K + k, mask=inside, other=0.0)
        sums = tl.dot(x, weights, sums, input_precision="ieee")
    elif FORM == "float8":
        numbers = _float8_numbers(tl.load(numbers_ptr + n.to(tl.int64) * K + k, mask=inside, other=0.0))
        if GROUP >= K:  # scaled after the last input
            sums = tl.dot(x, numbers.to(x.dtype), sums, input_precision="ieee")
        else:
            # the last part of the inputs may have blocks after the last group
            scales = tl.load(scales_ptr + start // GROUP * N + n, mask=in_rows & (start < K), other=0.0)
            sums += tl.dot(x, numbers.to(x.dtype), input_precision="ieee") * scales
    else:
        weights = _numbers_of_codes(start, n, in_rows, numbers_ptr, scales_ptr, zeros_ptr, N, K, FORM, GROUP, BLOCK_K)
        sums = tl.dot(x, tl.reshape(weights, (BLOCK_K, BLOCK_N)).to(x.dtype), sums, input_precision="ieee")
    return sums


@triton.jit
def _float8_numbers(numbers):
    """e4m3 as numbers, or bits of e4m3 as numbers / 256."""
    if numbers.dtype == tl.uint8:  # A uint8 read as the high bits of a float16 is its value / 256.
        bits = numbers.to(tl.int16)
        numbers = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
    return numbers


@triton.jit
def _numbers_of_codes(
    start,
    n,
    in_rows,
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Weights in float32, [words, codes of a word, BLOCK_N]. A scale is loaded once per group, or once per word where a
    group is smaller than a block."""
    BITS: tl.constexpr = 8 if FORM == "codes8" else 4
    PER_WORD: tl.constexpr = 32 // BITS
    word = start // PER_WORD + tl.arange(0, BLOCK_K // PER_WORD)[:, None]
    inside = in_rows & (word * PER_WORD < K)
    words = tl.load(numbers_ptr + word * N + n, mask=inside, other=0)
    shifts = (tl.arange(0, PER_WORD) * BITS)[None, :, None]
    codes = (words[:, None, :] >> shifts) & ((1 << BITS) - 1)
    if GROUP % BLOCK_K == 0:  # all inputs of the block are in one group
        place, there = start // GROUP * N + n, in_rows & (start < K)
    else:
        place, there = word * PER_WORD // GROUP * N + n, inside
    scales = tl.load(scales_ptr + place, mask=there, other=0.0).to(tl.float32)
    if FORM == "e2m1":  # twice the number: a sign, two bits of exponent, one of mantissa
        exponent, mantissa = (codes >> 1) & 3, codes & 1
        size = tl.where(exponent == 0, mantissa, (2 + mantissa) << (exponent + (exponent == 0) - 1))
        whole = tl.where(codes > 7, -size, size)
    else:
        zeros = tl.load(zeros_ptr + place, mask=there, other=0)
        if zeros_ptr.dtype.element_ty == tl.float32:  # minima
            return codes.to(tl.float32) * scales[:, None, :] - zeros[:, None, :]
        whole = codes - zeros.to(tl.int32)[:, None, :]
    return whole.to(tl.float32) * scales[:, None, :]


@triton.jit
def scaled(sums, n, in_rows, scales_ptr, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr):
    """The sums of all inputs, times scales that are the same for all inputs."""
    if FORM == "float8" and GROUP >= K:
        sums *= tl.load(scales_ptr + n, mask=in_rows, other=0.0)
    return sums


@triton.jit(do_not_specialize=["num_tokens"])  # changes from step to step: each variant would be compiled in the run
def linear_kernel(
    x_ptr,  # [T, K]
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # [N]
    out_ptr,  # [T, N]; of parts float32 [parts, T, N]
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    LENGTH: tl.constexpr,  # inputs of a part
    PARTS: tl.constexpr,  # of each program, which adds them in their order
    WHOLE: tl.constexpr,  # they are all
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per BLOCK_T tokens, BLOCK_N output features and part of the inputs."""
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    split = tl.program_id(2)
    sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for part in range(PARTS):
        of_part = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        for step in range(0, LENGTH, BLOCK_K):
            start = (split + part) * LENGTH + step
            k = start + tl.arange(0, BLOCK_K)[None, :]
            x = tl.load(x_ptr + token.to(tl.int64) * K + k, mask=(token < num_tokens) & (k < K), other=0.0)
            of_part = add_product(
                of_part, x, start, n, n < N, numbers_ptr, scales_ptr, zeros_ptr, N, K, FORM, GROUP, BLOCK_N, BLOCK_K
            )
        sums += of_part
    if WHOLE:
        sums = scaled(sums, n, n < N, scales_ptr, K, FORM, GROUP)
        if BIAS:
            sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    row = split.to(tl.int64) * num_tokens + token
    tl.store(out_ptr + row * N + n, sums, mask=(token < num_tokens) & (n < N))


@triton.jit(do_not_specialize=["num_tokens"])
def sum_splits_kernel(
    parts_ptr,  # float32 [SPLITS, T, N]
    scales_ptr,
    bias_ptr,  # [N]
    out_ptr,  # [T, N]
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and BLOCK output features: the sum of its parts, in their order."""
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLITS):
        row = (token + part * num_tokens).to(tl.int64)
        total += tl.load(parts_ptr + row * N + n, mask=inside, other=0.0)
    total = scaled(total, n, inside, scales_ptr, K, FORM, GROUP)
    if BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * N + n, total, mask=inside)


@triton.jit
def round_rows_kernel(x_ptr, out_ptr, scales_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row [K]: e4m3 of the row / scale, and the scale."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / 448
    tl.store(out_ptr + row * K + column, to_fp8(x, 1 / scale), mask=column < K)
    tl.store(scales_ptr + row, scale)


@triton.jit
def unpack_kernel(
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,  # [N, K] for FP8, [K, N] for codes
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per BLOCK_N output features and BLOCK_K inputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    start = tl.program_id(1) * BLOCK_K
    k = start + tl.arange(0, BLOCK_K)[:, None]
    inside = (n < N) & (k < K)
    if FORM == "float8":
        place = n.to(tl.int64) * K + k
        numbers = _float8_numbers(tl.load(numbers_ptr + place, mask=inside, other=0.0)).to(tl.float32)
        numbers *= tl.load(scales_ptr + k // GROUP * N + n, mask=inside, other=0.0)
    else:
        place = k.to(tl.int64) * N + n
        codes = _numbers_of_codes(start, n, n < N, numbers_ptr, scales_ptr, zeros_ptr, N, K, FORM, GROUP, BLOCK_K)
        numbers = tl.reshape(codes, (BLOCK_K, BLOCK_N))
    tl.store(out_ptr + place, numbers, mask=inside)
