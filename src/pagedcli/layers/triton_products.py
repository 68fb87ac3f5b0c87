"""Matrix products for GPUs: linear layers of quantized weights, which stay packed in GPU memory, and a mixture of
experts, all experts of a layer in two launches, each expert's rows together.

Weights of 4 and 8 bits become numbers of the activations' dtype in registers; sums are float32. The twins are the
product with the `dequantized` weight in torch, and layers.basic.weighted_sum. Nothing here waits for the device, so a
CUDA graph can hold it. Imported only where triton is installed.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedcli.errors import ModelError
from pagedcli.layers.basic import by_expert, summed
from pagedcli.layers.quantized import Float8Weight, QuantizedWeight, Weight

_CONVERTS_FLOAT8 = (8, 9)  # the first compute capability that does; others read the bits


@dataclass(frozen=True, slots=True)
class KernelWeight:
    """X weights [N, K] of one format: those of the experts of a layer, or of a linear layer."""

    form: Literal["floats", "float8", "codes4", "codes8"]
    num_out: int  # N
    num_in: int  # K
    group_size: int  # inputs that share a scale; at least K if all do
    numbers: Tensor  # [X, N, K]; codes: int32 words [X, ceil(K * bits / 32), N], lowest bits first
    scales: Tensor | None = None  # [X, groups, N]
    zeros: Tensor | None = None  # uint8 [X, groups, N], of codes
    order: Tensor | None = None  # int32 [X, K]: the input of each of the K, if groups are not neighbours

    @property
    def nbytes(self) -> int:
        """Of the numbers, scales and zero points."""
        return sum(tensor.nbytes for tensor in (self.numbers, self.scales, self.zeros) if tensor is not None)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time values of the"""
        return {"FORM": self.form, "N": self.num_out, "K": self.num_in, "GROUP": self.group_size}

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """numbers, scales and zeros, or what stands for those that the kernel does not read."""
        none = self.numbers
        return none, none if self.scales is None else self.scales, none if self.zeros is None else self.zeros


def kernel_weight(weights: list[Weight]) -> KernelWeight:
    """A copy of the weights, which must be alike. Changes: the list, which is emptied, each weight once it is copied.

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
    """One weight, without the first dimension."""
    if isinstance(weight, Tensor):
        num_out, num_in = weight.shape
        return KernelWeight("floats", num_out, num_in, num_in, weight)
    if isinstance(weight, Float8Weight):
        return _float8(weight)
    weight, order = weight.in_order
    num_out, num_in = weight.codes.shape
    return KernelWeight(
        "codes4" if weight.bits == 4 else "codes8",
        num_out,
        num_in,
        _group_size(weight.group_size, num_in),
        numbers=_words(weight.codes.T, weight.bits),
        scales=weight.scales.T,
        zeros=weight.zeros.T,
        order=None if order is None else order.to(torch.int32),
    )


def _float8(weight: Float8Weight) -> KernelWeight:
    numbers, scales = weight.numbers, weight.scales.T
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

    def __init__(self, weight: QuantizedWeight | Float8Weight, bias: Tensor | None = None) -> None:
        """Raises: ModelError if the groups of act-order weights are of different sizes, or FP8 weights no numbers."""
        self._weight, self._bias = kernel_weight([weight]), bias
        self._order = None if self._weight.order is None else self._weight.order[0].long()
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, in] -> [T, out], in the dtype of x."""
        x = x.contiguous() if self._order is None else x[:, self._order]
        weight, num_tokens = self._weight, x.shape[0]
        out = x.new_empty((num_tokens, weight.num_out))
        if num_tokens:
            constants = linear_constants(weight, num_tokens)
            grid = (-(-weight.num_out // constants["BLOCK_N"]), -(-num_tokens // constants["BLOCK_T"]))
            bias = x if self._bias is None else self._bias
            arguments = (x, *weight.pointers, bias, out, num_tokens)
            has_bias = self._bias is not None
            linear_kernel[grid](*arguments, **constants, BIAS=has_bias, num_warps=4, num_stages=3)
        return out


def linear_constants(weight: KernelWeight, num_tokens: int) -> dict[str, Any]:
    """Compile-time values of linear_kernel: few tokens in narrow blocks, so that all processors have work."""
    block_t = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    block_k = 64 if weight.group_size % 64 == 0 else 32  # all of one group, where groups allow it
    return weight.constants | {"BLOCK_T": block_t, "BLOCK_N": 32 if block_t == 16 else 64, "BLOCK_K": block_k}


def _words(codes: Tensor, bits: int) -> Tensor:
    """int32 words of codes along the first dimension. Shapes: codes uint8 [K, N] -> [ceil(K * bits / 32), N]."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % per_word)).view(-1, per_word, codes.shape[1])
    words = torch.zeros(padded[:, 0].shape, dtype=torch.int32, device=codes.device)
    for i in range(per_word):
        words |= padded[:, i].int() << i * bits
    return words


class GroupedExperts:
    """Gated MLPs with silu, of equal sizes. Keeps its own copy of their weights, in the format in which they are."""

    __slots__ = ("_down", "_gate_up", "nbytes")

    def __init__(self, gate_up: list[Weight], down: list[Weight]) -> None:
        """Shapes: gate_up [2I, E], gate first, and down [E, I] of each expert. Both lists are emptied.

        Raises: ModelError if the formats of gate_up differ, or those of down.
        """
        self._gate_up, self._down = kernel_weight(gate_up), kernel_weight(down)
        self.nbytes = self._gate_up.nbytes + self._down.nbytes

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Arguments and result of layers.basic.weighted_sum."""
        num_experts, num_picked = self._down.numbers.shape[0], chosen.shape[1]
        chosen, weights, order = by_expert(chosen, weights)
        block_t = _block_t(order.shape[0], num_experts)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order))
        starts, tiles = _firsts(counts), _firsts((counts + block_t - 1) // block_t)
        num_tiles = min(order.shape[0], num_experts) + order.shape[0] // block_t  # at most so many
        plan = (starts, tiles, num_tiles, block_t)
        inner = _product(x, self._gate_up, (order // num_picked).int(), None, *plan)
        rows = torch.arange(order.shape[0], dtype=torch.int32, device=x.device)
        results = _product(inner, self._down, rows, weights.flatten()[order], *plan)
        return summed(results, order, num_picked)


def experts_constants(weight: KernelWeight, block_t: int, *, gated: bool) -> dict[str, Any]:
    """Compile-time values of experts_kernel."""
    num_experts = weight.numbers.shape[0]
    flags = {"GATED": gated, "ORDERED": weight.order is not None}
    sizes = {"X": num_experts, "NUMBERS": weight.numbers[0].numel(), "BLOCK_X": 1 << num_experts.bit_length()}
    # with 64 inputs per step some variants spill registers
    return weight.constants | flags | sizes | {"BLOCK_T": block_t, "BLOCK_N": 64, "BLOCK_K": 32}


def _product(
    x: Tensor,
    weight: KernelWeight,
    rows: Tensor,
    factor: Tensor | None,
    starts: Tensor,
    tiles: Tensor,
    num_tiles: int,
    block_t: int,
) -> Tensor:
    """The rows of x times their experts' weights, times `factor`; without it silu(gate) * up."""
    gated = factor is None
    num_out = weight.num_out // 2 if gated else weight.num_out
    out = x.new_empty((rows.shape[0], num_out))
    constants = experts_constants(weight, block_t, gated=gated)
    grid = (-(-num_out // constants["BLOCK_N"]), num_tiles)
    if rows.shape[0]:
        order = rows if weight.order is None else weight.order
        arguments = (x, *weight.pointers, order, rows, x if factor is None else factor, starts, tiles, out)
        experts_kernel[grid](*arguments, **constants, num_warps=4, num_stages=3)
    return out


def _block_t(num_results: int, num_experts: int) -> int:
    """Results per tile: as many as an expert has on average, within what a product takes."""
    mean = num_results // num_experts
    return 16 if mean <= 16 else 32 if mean <= 32 else 64


def _firsts(counts: Tensor) -> Tensor:
    """[X + 1] int32: the sum of the counts before each expert, and of all."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_product(
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
        numbers = tl.load(numbers_ptr + n.to(tl.int64) * K + k, mask=inside, other=0.0)
        if numbers.dtype == tl.uint8:  # e4m3 in the bits of float16 is its value / 256
            bits = numbers.to(tl.int16)
            numbers = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
        if GROUP >= K:  # scaled after the last input
            sums = tl.dot(x, numbers.to(x.dtype), sums, input_precision="ieee")
        else:
            scales = tl.load(scales_ptr + start // GROUP * N + n, mask=in_rows, other=0.0)
            sums += tl.dot(x, numbers.to(x.dtype), input_precision="ieee") * scales
    else:
        BITS: tl.constexpr = 4 if FORM == "codes4" else 8
        PER_WORD: tl.constexpr = 32 // BITS
        row = start // PER_WORD + tl.arange(0, BLOCK_K // PER_WORD)[:, None]
        words = tl.load(numbers_ptr + row * N + n, mask=in_rows & (row * PER_WORD < K), other=0)
        shifts = (tl.arange(0, PER_WORD) * BITS)[None, :, None]
        codes = tl.reshape((words[:, None, :] >> shifts) & ((1 << BITS) - 1), (BLOCK_K, BLOCK_N))
        if GROUP % BLOCK_K == 0:  # all inputs of the block are in one group
            place, there = start // GROUP * N + n, in_rows
        else:
            place, there = k // GROUP * N + n, inside
        zeros = tl.load(zeros_ptr + place, mask=there, other=0).to(tl.int32)
        scales = tl.load(scales_ptr + place, mask=there, other=0.0).to(tl.float32)
        weights = ((codes - zeros).to(tl.float32) * scales).to(x.dtype)
        sums = tl.dot(x, weights, sums, input_precision="ieee")
    return sums


@triton.jit
def _scaled(sums, n, in_rows, scales_ptr, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr):
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
    out_ptr,  # [T, N]
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per BLOCK_T tokens and BLOCK_N output features."""
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_ptr + token.to(tl.int64) * K + k, mask=(token < num_tokens) & (k < K), other=0.0)
        sums = _add_product(
            sums, x, start, n, n < N, numbers_ptr, scales_ptr, zeros_ptr, N, K, FORM, GROUP, BLOCK_N, BLOCK_K
        )
    sums = _scaled(sums, n, n < N, scales_ptr, K, FORM, GROUP)
    if BIAS:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * N + n, sums, mask=(token < num_tokens) & (n < N))


@triton.jit
def experts_kernel(
    x_ptr,  # [*, K]
    numbers_ptr,  # those of each expert after another; with GATED gate, then up
    scales_ptr,
    zeros_ptr,
    order_ptr,  # [X, K]: with ORDERED, which column of x is each input
    rows_ptr,  # [R] int32, row of x for each result
    factor_ptr,  # [R], multiplies each result; not with GATED
    starts_ptr,  # [X + 1] int32, first result of each expert
    tiles_ptr,  # [X + 1] int32, first tile of each expert
    out_ptr,  # [R, N], or with GATED [R, N / 2]
    X: tl.constexpr,
    N: tl.constexpr,  # rows of an expert's weight
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    NUMBERS: tl.constexpr,  # elements of an expert
    GATED: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK_X: tl.constexpr,  # at least X + 1
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of BLOCK_T results of one expert and BLOCK_N outputs; the results are sorted by expert."""
    OUT: tl.constexpr = N // 2 if GATED else N
    tile = tl.program_id(1)
    index = tl.arange(0, BLOCK_X)
    firsts = tl.load(tiles_ptr + index, mask=index <= X, other=2147483647)
    expert = tl.sum((firsts <= tile).to(tl.int32), 0) - 1  # the last one whose tiles have begun
    if expert >= X:
        return
    first = tl.load(starts_ptr + expert) + (tile - tl.load(tiles_ptr + expert)) * BLOCK_T
    end = tl.load(starts_ptr + expert + 1)
    result = first + tl.arange(0, BLOCK_T)[:, None]
    inside = result < end
    row = tl.load(rows_ptr + result, mask=inside, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    in_rows = n < OUT
    expert = expert.to(tl.int64)
    numbers = numbers_ptr + expert * NUMBERS
    groups_of_expert = expert * ((K + GROUP - 1) // GROUP * N)
    scales, zeros = scales_ptr + groups_of_expert, zeros_ptr + groups_of_expert
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    gate = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        column = tl.load(order_ptr + expert * K + k, mask=k < K, other=0) if ORDERED else k
        x = tl.load(x_ptr + row * K + column, mask=inside & (k < K), other=0.0)
        if GATED:
            gate = _add_product(gate, x, start, n, in_rows, numbers, scales, zeros, N, K, FORM, GROUP, BLOCK_N, BLOCK_K)
        total = _add_product(
            total, x, start, n + N - OUT, in_rows, numbers, scales, zeros, N, K, FORM, GROUP, BLOCK_N, BLOCK_K
        )
    dtype = out_ptr.dtype.element_ty
    total = _scaled(total, n + N - OUT, in_rows, scales, K, FORM, GROUP).to(dtype).to(tl.float32)
    if GATED:
        gate = _scaled(gate, n, in_rows, scales, K, FORM, GROUP).to(dtype).to(tl.float32)
        total *= (gate / (1.0 + tl.exp2(-gate * LOG2E))).to(dtype).to(tl.float32)
    else:
        total *= tl.load(factor_ptr + result, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + result.to(tl.int64) * OUT + n, total, mask=inside & in_rows)
