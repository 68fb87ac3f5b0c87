"""A layer of a dense model in five kernels, for steps of few tokens on GPUs, which take as long as weights are read:
norm, projection, rotary embedding and store; attention; projection and residual; norm and gated MLP; its second half
and residual.

One kernel computes all of these products. Its programs share the inputs of a product in parts of fixed sizes; the last
one to finish a block of outputs adds the parts in their order, so the bits of a row are the same alone and among up to
ROWS. Imported only where triton is installed.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcli.attention.triton_launch import Launcher, power_of_2, starts_early
from pagedcli.layers.triton_layers import gated, places_in_head, store_heads
from pagedcli.layers.triton_products import KernelWeight, add_product, processors_of, scaled

ROWS = 16  # of the smallest tl.dot: the most tokens of a step
PROGRAMS_PER_PROCESSOR = 2
_STAGE_NUMBERS = 2**13  # of a weight, in one of the stages of the loads; the least that a program takes


class Heads(NamedTuple):
    """Where heads go, see triton_layers.rotate_and_store: anything for what the constants leave out."""

    norm: Tensor
    table: Tensor
    query_scales: Tensor
    positions: Tensor
    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor
    eps: float
    k_inverse: float
    v_inverse: float


class Product:
    """y = norm(x) W^T + b, and what a layer does with y: "gated" out = activation(gate) * up, "add" out += y, or
    "heads": q, k normed and rotated, k and v into the cache."""

    __slots__ = ("_arguments", "_constants", "_grid", "_launch", "_norm", "_of_cache", "_options", "_scratch", "width")

    def __init__(
        self,
        weight: KernelWeight,
        bias: Tensor | None,
        *,
        scratch: "Scratch",
        finish: Literal["heads", "gated", "add"],
        norm: tuple[Tensor, float] | None = None,
        **constants: Any,
    ) -> None:
        """`norm`: weight [K] and eps of the residual stream's; `constants`: of the finish, see product_kernel."""
        self._norm, self._scratch, self._launch = norm, scratch, Launcher()
        num_processors = processors_of(weight.numbers.device)
        sizes, num_blocks = product_constants(weight, finish, constants.get("D", 0), num_processors)
        scratch.reserve(num_blocks * sizes["SPLITS"] * sizes["BLOCK_N"], num_blocks)
        self.width = weight.num_out // (2 if finish == "gated" else 1)
        dependent = starts_early(weight.numbers.device)
        flags = {"FINISH": finish, "BIAS": bias is not None, "NORM": norm is not None, "DEPENDENT": dependent}
        self._constants = {**_OF_FINISH, **weight.constants, **sizes, **flags, **constants}
        self._of_cache: dict[tuple[torch.dtype, int], dict[str, Any]] = {}
        self._arguments = *weight.pointers, weight.numbers if bias is None else bias
        self._grid = num_blocks * sizes["SPLITS"], 1, 1
        num_bytes = sizes["BLOCK_N"] * sizes["BLOCK_K"] * (weight.numbers.itemsize if weight.form == "floats" else 2)
        num_stages = 4 if num_bytes <= 2 * _STAGE_NUMBERS else 2
        self._options = {"num_warps": 4, "num_stages": num_stages} | ({"launch_pdl": True} if dependent else {})

    def __call__(self, x: Tensor, out: Tensor, heads: Heads | None = None) -> Tensor:
        """Shapes: x [T, K], T <= ROWS; out [T, width], of heads q [T, H, D]; returns out. Changes: out; the cache."""
        constants, scratch = self._constants, self._scratch
        weight, eps = (x, 0.0) if self._norm is None else self._norm
        if heads is None:
            heads = Heads(out, out, out, out, out, out, out, 0.0, 1.0, 1.0)
        else:
            constants = self._with_cache(heads.k_cache)
        arguments = x, weight, *self._arguments, out, scratch.parts, scratch.squares, scratch.counters, *heads, eps
        self._launch(product_kernel, self._grid, (*arguments, x.shape[0]), constants, **self._options)
        return out

    def _with_cache(self, cache: Tensor) -> dict[str, Any]:
        key = cache.dtype, cache.stride(0)
        if key not in self._of_cache:
            sizes = {"S": cache.shape[2], "BLOCK_STRIDE": cache.stride(0), "FP8": cache.dtype == torch.float8_e4m3fn}
            self._of_cache[key] = self._constants | sizes
        return self._of_cache[key]


class Scratch:
    """What the programs of a product tell each other, for all products of a model: their kernels run one after the
    other."""

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty(0, device=device)  # [programs, ROWS, BLOCK_N]: sums of a part of the inputs
        self.squares = torch.empty(0, device=device)  # [programs, ROWS]: sums of the squares of these inputs
        self.counters = torch.zeros(
            0, dtype=torch.int32, device=device
        )  # of programs that have come; 0 between kernels

    def reserve(self, num_columns: int, num_blocks: int) -> None:
        """Room for a product, before the first one runs. `num_columns`: of all programs."""
        if self.parts.numel() < ROWS * num_columns:
            self.parts = self.parts.new_empty(ROWS * num_columns)
            self.squares = self.squares.new_empty(ROWS * num_columns)
        if self.counters.numel() < num_blocks:
            self.counters = self.counters.new_zeros(num_blocks)


def product_constants(
    weight: KernelWeight, finish: str, head_dim: int, num_processors: int
) -> tuple[dict[str, int], int]:
    """Sizes of the tiles of product_kernel, which do not depend on the tokens, and its number of blocks of outputs."""
    block_n = max(16, power_of_2(head_dim)) if finish == "heads" else 32
    if weight.num_out >= 128 * num_processors and finish != "heads":
        block_n = 64
    outputs = head_dim if finish == "heads" else block_n
    num_blocks = -(-weight.num_out // outputs)
    in_groups = weight.form == "float8" and weight.group_size < weight.num_in
    sizes = (size for size in (256, 128, 64) if not (in_groups and weight.group_size % size))
    block_k = next((size for size in sizes if size * block_n <= _STAGE_NUMBERS), 64 if not in_groups else 32)
    num_parts = -(-PROGRAMS_PER_PROCESSOR * num_processors // num_blocks)  # of the inputs
    length = min(weight.num_in, max(_STAGE_NUMBERS // block_n, -(-weight.num_in // num_parts)))
    length = -(-length // block_k) * block_k
    splits = -(-weight.num_in // length)
    return {"BLOCK_N": block_n, "BLOCK_K": block_k, "LENGTH": length, "SPLITS": splits}, num_blocks


# Constants that only one finish reads.
_OF_FINISH: dict[str, Any] = {
    "ACTIVATION": "silu", "H": 1, "G": 0, "S": 1, "D": 2, "BLOCK_STRIDE": 1, "NORM_HEADS": False, "ROTATED": 0,
    "INTERLEAVED": False, "SCALED": False, "FP8": False,
}  # fmt: skip


@triton.jit
def _fetch(numbers_ptr, n, inside, split, K: tl.constexpr, LENGTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Ask the L2 cache for a part of rows n of a weight [N, K]."""
    LINE: tl.constexpr = 1024 // numbers_ptr.dtype.element_ty.primitive_bitwidth  # numbers of 128 bytes
    for step in range(0, LENGTH, BLOCK_K):
        k = split * LENGTH + step + tl.arange(0, tl.cdiv(BLOCK_K, LINE))[:, None] * LINE
        at = numbers_ptr + tl.where(inside, n, 0).to(tl.int64) * K + tl.minimum(k, K - 1)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def product_kernel(
    x_ptr,  # [T, K]
    norm_ptr,  # [K]
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # [N]
    out_ptr,
    parts_ptr,  # see Scratch
    squares_ptr,
    counters_ptr,
    head_norm_ptr,  # this and the next nine: see rotate_and_store_kernel
    table_ptr,
    query_scales_ptr,
    positions_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    head_eps,
    k_inverse,
    v_inverse,
    eps,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    LENGTH: tl.constexpr,  # inputs of a part
    SPLITS: tl.constexpr,  # parts
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FINISH: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    DEPENDENT: tl.constexpr,  # started early: the weight is fetched while the kernel before still runs
    ACTIVATION: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    NORM_HEADS: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
):
    """One program per block of outputs and part of the inputs. A norm multiplies the inputs by its weight alone; the
    root of their mean square divides the sums."""
    block, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    token = tl.arange(0, 16)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    live = token < num_tokens
    n = block * BLOCK_N + column
    inside = n < N
    if FINISH == "heads":  # an element and its partner, next to each other
        here, there = places_in_head(column // 2, block < H + G, D, ROTATED, INTERLEAVED)
        n = block * D + tl.where(column % 2 == 0, here, there)
        inside = column < D
    elif FINISH == "gated":  # gate and up
        n = n // 2 + (column % 2) * (N // 2)
    if DEPENDENT:
        if FORM == "floats" or FORM == "float8":
            _fetch(numbers_ptr, n, inside, split, K, LENGTH, BLOCK_K)
        gdc_wait()
        gdc_launch_dependents()

    sums = tl.zeros((16, BLOCK_N), dtype=tl.float32)
    squares = tl.zeros((16,), dtype=tl.float32)
    for step in range(0, LENGTH, BLOCK_K):
        start = split * LENGTH + step
        k = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_ptr + token * K + k, mask=live & (k < K), other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            x = (wide * tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)).to(x.dtype)
        sums = add_product(
            sums, x, start, n, inside, numbers_ptr, scales_ptr, zeros_ptr, N, K, FORM, GROUP, BLOCK_N, BLOCK_K
        )

    ends = True
    square = squares[:, None]
    if SPLITS > 1:
        row = tl.program_id(0) * 16 + token
        tl.store(parts_ptr + row * BLOCK_N + column, sums, mask=live)
        tl.store(squares_ptr + row, square, mask=live)
        tl.debug_barrier()  # all threads have stored before one of them says so
        ends = tl.atomic_add(counters_ptr + block, 1) == SPLITS - 1
    if ends:
        if SPLITS > 1:
            sums = tl.zeros_like(sums)
            square = tl.zeros_like(square)
            for part in range(SPLITS):
                row = (block * SPLITS + part) * 16 + token
                sums += tl.load(parts_ptr + row * BLOCK_N + column, mask=live, other=0.0)
                square += tl.load(squares_ptr + row, mask=live, other=0.0)
            tl.store(counters_ptr + block, 0)
        sums = scaled(sums, n, inside, scales_ptr, K, FORM, GROUP)
        if NORM:
            sums *= 1.0 / tl.sqrt(square / K + eps)
        if BIAS:
            sums += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
        if FINISH == "add":
            at = out_ptr + token * N + n
            sums += tl.load(at, mask=live & inside, other=0.0).to(tl.float32)
            tl.store(at, sums, mask=live & inside)
        else:
            first, second = tl.split(tl.reshape(sums, (16, BLOCK_N // 2, 2)))
            pair = tl.arange(0, BLOCK_N // 2)[None, :]
            if FINISH == "gated":
                dtype: tl.constexpr = out_ptr.dtype.element_ty
                first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
                at = block * (BLOCK_N // 2) + pair
                result = gated(first, second, dtype, ACTIVATION)
                tl.store(out_ptr + token * (N // 2) + at, result, mask=live & (at < N // 2))
            else:
                mean = 1.0
                if NORM_HEADS:
                    mean = (tl.sum(first * first, 1, keep_dims=True) + tl.sum(second * second, 1, keep_dims=True)) / D
                store_heads(
                    first, second, mean, token, live, block, pair, live & (pair < D // 2), head_norm_ptr, table_ptr,
                    query_scales_ptr, positions_ptr, slots_ptr, out_ptr, k_cache_ptr, v_cache_ptr, head_eps, k_inverse,
                    v_inverse, H, G, S, D, BLOCK_STRIDE, NORM_HEADS, False, ROTATED, INTERLEAVED, SCALED, FP8,
                )  # fmt: skip
