"""A mixture of experts for GPUs, in five launches: routing, sorting the choices by expert, two products in which each
expert's rows lie together, and the sum of each token's results. A product of few rows is two launches: parts of the
inputs side by side, and their sums.

The twins are layers.basic.route and ExpertLoop, including rounding and which of equal scores is picked. Nothing here
waits for the device, so a CUDA graph can hold it. Imported only where triton is installed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedcli.attention.triton_launch import power_of_2
from pagedcli.layers.basic import route as route_in_torch
from pagedcli.layers.kinds import Routing
from pagedcli.layers.quantized import Weight
from pagedcli.layers.triton_layers import LOG2E, gated
from pagedcli.layers.triton_products import KernelWeight, add_product, kernel_weight, processors_of, scaled

_CHOICES_PER_LOOP = 1024
_COLUMNS_PER_SUM = 1024
_MOST_PARTS = 4  # most parts that the inputs are cut into
_LENGTH_MULTIPLE = 128  # Tile.inputs are multiples of it
_LEAST_LENGTH = 512  # inputs of a part: fewer would not pay for writing and adding its sums
_PROGRAMS_PER_PROCESSOR = 2  # programs side by side; where there would be fewer, the inputs are cut


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of experts_kernel computes at a time."""

    rows: int
    columns: int
    inputs: int  # per step of the loop
    num_warps: int


class GroupedExperts:
    """Gated MLPs of equal sizes with a router. Keeps its own copy of their weights, in the format in which they are."""

    def __init__(
        self,
        gate_up: list[Weight],
        down: list[Weight],
        routing: Routing,
        *,
        activation: str,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
        router_bias: Tensor | None = None,
        expert_scales: Tensor | None = None,
    ) -> None:
        """`activation` is one of layers.basic.ACTIVATIONS; both lists are emptied.

        Shapes: of each expert gate_up [2I, E], gate first, and down [E, I]; biases [X, 2I] and [X, E] or None each;
                router_bias, expert_scales [X] float32, see layers.basic.route.
        Raises: ModelError if the formats of gate_up differ, or those of down.
        """
        self._gate_up, self._down = kernel_weight(gate_up), kernel_weight(down)
        self._gate_up_bias, self._down_bias = biases
        self._routing, self._router_bias, self._expert_scales, self._activation = (
            routing,
            router_bias,
            expert_scales,
            activation,
        )
        self.nbytes = self._gate_up.nbytes + self._down.nbytes

    def __call__(self, x: Tensor, logits: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        """Arguments and result of layers.basic.ExpertLoop."""
        x, num_tokens = x.contiguous(), x.shape[0]
        num_experts, num_picked = self._down.numbers.shape[0], self._routing.num_per_token
        out = x.new_empty((num_tokens, self._down.num_out))
        if not num_tokens:
            return out
        weights, chosen = route(logits, self._routing, self._router_bias, self._expert_scales)
        num_rows = num_tokens * num_picked
        starts, rows, places = (chosen.new_empty(size) for size in (num_experts + 1, num_rows, num_rows))
        factors = weights.new_empty(num_rows)
        align_kernel[(num_experts,)](
            chosen, weights, starts, rows, factors, places, num_rows,
            X=num_experts, K=num_picked, BLOCK=_CHOICES_PER_LOOP, num_warps=4,
        )  # fmt: skip
        inner = self._product(x, self._gate_up, self._gate_up_bias, starts, rows, None)
        results = self._product(inner, self._down, self._down_bias, starts, rows, factors)
        block = min(_COLUMNS_PER_SUM, power_of_2(out.shape[1]))
        sum_kernel[(num_tokens, -(-out.shape[1] // block))](
            results, places, out if shared is None else shared.contiguous(), out if gate is None else gate, out,
            K=num_picked, E=out.shape[1], SHARED=shared is not None, SCALED=gate is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return out

    def _product(
        self, x: Tensor, weight: KernelWeight, bias: Tensor | None, starts: Tensor, rows: Tensor, factors: Tensor | None
    ) -> Tensor:
        """activation(gate) * up of the rows of x; with factors a plain product, times these."""
        is_gated = factors is None
        num_rows, num_experts = rows.shape[0], weight.numbers.shape[0]
        tile = expert_tile(weight, num_rows, x.dtype, is_gated=is_gated)
        out = x.new_empty((num_rows, weight.num_out // 2 if is_gated else weight.num_out))
        num_blocks = -(-out.shape[1] // tile.columns)
        num_tokens, num_picked = num_rows // self._routing.num_per_token, self._routing.num_per_token
        num_parts = parts_of_inputs(weight, num_tokens, num_picked * num_blocks, processors_of(x.device))
        constants = experts_constants(weight, tile, self._activation if is_gated else None, num_parts)
        num_tiles = min(num_rows, num_experts) + num_rows // tile.rows  # upper bound
        order = rows if weight.order is None else weight.order
        optional, has_bias = (x if bias is None else bias, x if factors is None else factors), bias is not None
        sums = out if num_parts == 1 else out.new_empty((num_parts, num_rows, weight.num_out), dtype=torch.float32)
        launch = {"BIAS": has_bias, "num_warps": tile.num_warps, "num_stages": 3}
        experts_kernel[(num_blocks, num_tiles, num_parts)](
            x, *weight.pointers, *optional, order, rows, starts, sums, num_rows, **constants, **launch
        )
        if num_parts > 1:
            _, scales, _ = weight.pointers
            wanted = ("ACTIVATION", "X", "BLOCK_X", "N", "K", "FORM", "GROUP")
            sizes = {name: constants[name] for name in wanted} | {"PARTS": num_parts, "BLOCK": _COLUMNS_PER_SUM}
            sum_parts_kernel[(num_rows, -(-out.shape[1] // _COLUMNS_PER_SUM))](
                sums, scales, *optional, starts, out, num_rows, **sizes, BIAS=has_bias, num_warps=4
            )
        return out


def route(
    logits: Tensor, routing: Routing, router_bias: Tensor | None = None, expert_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """layers.basic.route, the experts of a token ascending and int32."""
    if routing.nearness:
        of_order, order = route_in_torch(logits, routing)
        order, places = order.sort(dim=-1)
        return of_order.gather(1, places), order.int()
    num_groups, num_kept, num_best = routing.groups or (0, 0, 0)
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty((num_tokens, routing.num_per_token))
    chosen = torch.empty(weights.shape, dtype=torch.int32, device=logits.device)
    route_kernel[(num_tokens,)](
        logits.contiguous(), logits if router_bias is None else router_bias,
        logits if expert_scales is None else expert_scales, weights, chosen, routing.scale, routing.least_sum,
        X=num_experts, K=routing.num_per_token, BLOCK_X=power_of_2(num_experts), num_warps=1, SIGMOID=routing.sigmoid,
        BIASED=router_bias is not None, RENORMALIZE=routing.renormalize, SCALES=expert_scales is not None,
        GROUPS=num_groups, KEPT=num_kept, BEST=num_best, BLOCK_G=power_of_2(max(1, num_groups)),
    )  # fmt: skip
    return weights, chosen


def expert_tile(weight: KernelWeight, num_rows: int, dtype: torch.dtype, *, is_gated: bool) -> Tile:
    """As many rows as an expert has on average, within what a product takes: prompts in large tiles, which read weights
    less often."""
    mean = num_rows // weight.numbers.shape[0]
    if mean >= 64 and dtype.itemsize == 2:
        return Tile(128, 64 if is_gated else 128, 64 if weight.group_size % 64 == 0 else 32, 8)
    if mean >= 16 or dtype.itemsize == 4:
        # 256 tokens of 128 experts on an H200: 328 us with 64 inputs per step, 506 with 32; packed ones spill registers
        inputs = 64 if weight.form == "floats" and dtype.itemsize == 2 else 32
        return Tile(16 if mean < 16 else 32 if mean < 32 else 64, 64, inputs, 4)
    # few programs, each of which waits for its weights: more of them are under way
    in_groups = weight.form == "float8" and weight.group_size < weight.num_in
    wanted = 128 if weight.form in ("codes4", "e2m1") else 64
    return Tile(16, 64, next(size for size in (wanted, 32) if not in_groups or weight.group_size % size == 0), 4)


def parts_of_inputs(weight: KernelWeight, num_tokens: int, num_programs: int, num_processors: int) -> int:
    """Into how many parts the inputs of a product are cut, so that few tokens keep all processors busy. `num_programs`:
    of one token.

    The most tokens are a power of two and far from where tiles change: loading compiles kernels at powers of two.
    """
    most = min(_PROGRAMS_PER_PROCESSOR * num_processors // num_programs, weight.numbers.shape[0] // 4)
    if not most or num_tokens > 1 << most.bit_length() - 1:
        return 1
    return max(1, min(_MOST_PARTS, weight.num_in // _LEAST_LENGTH))


def experts_constants(weight: KernelWeight, tile: Tile, activation: str | None, num_parts: int = 1) -> dict[str, Any]:
    """Compile-time values of experts_kernel."""
    num_experts = weight.numbers.shape[0]
    length = -(-weight.num_in // num_parts // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    flags = {"ACTIVATION": activation, "ORDERED": weight.order is not None, "WHOLE": num_parts == 1, "LENGTH": length}
    sizes = {"X": num_experts, "NUMBERS": weight.numbers[0].numel(), "BLOCK_X": power_of_2(num_experts)}
    blocks = {"BLOCK_T": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.inputs}
    return weight.constants | flags | sizes | blocks


@triton.jit
def route_kernel(
    logits_ptr,  # [T, X]
    router_bias_ptr,  # [X] float32, with BIASED
    expert_scales_ptr,  # [X] float32, with SCALES: multiply the scores
    weights_ptr,  # [T, K]
    experts_ptr,  # [T, K] int32
    factor,
    least_sum,
    X: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_X: tl.constexpr,
    GROUPS: tl.constexpr,  # equal groups of neighbours, 0: none
    KEPT: tl.constexpr,  # groups from which experts are picked: those with the largest sums
    BEST: tl.constexpr,  # number of a group's scores that count
    BLOCK_G: tl.constexpr,
):
    """One program per token: the experts with the largest scores, of equals the first, and their weights."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_X)
    inside = expert < X
    dtype = weights_ptr.dtype.element_ty
    logits = tl.load(logits_ptr + token * X + expert, mask=inside, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = (1.0 / (1.0 + tl.exp2(-logits * LOG2E))).to(dtype).to(tl.float32)
    else:
        powers = tl.exp2((logits - tl.max(logits, 0)) * LOG2E)
        scores = powers / tl.sum(powers, 0)
    wanted = scores
    if BIASED:
        wanted += tl.load(router_bias_ptr + expert, mask=inside, other=0.0)
    # numbers for all experts and none else, so that K of them are found whatever the logits are
    wanted = tl.where(wanted != wanted, float("inf"), wanted)
    wanted = tl.where(inside, tl.maximum(wanted, -3e38), -float("inf"))
    if GROUPS > 0:
        kept = _in_best_groups(wanted, expert, inside, X, GROUPS, KEPT, BEST, BLOCK_X, BLOCK_G)
        wanted = tl.where(kept | (expert >= X), wanted, -3.2e38)
    picked = tl.zeros((BLOCK_X,), tl.int32)
    for _ in range(K):
        first = tl.min(tl.where(wanted == tl.max(wanted, 0), expert, BLOCK_X), 0)
        picked += (expert == first).to(tl.int32)
        wanted = tl.where(expert == first, -float("inf"), wanted)
    if RENORMALIZE:
        scores /= tl.sum(tl.where(picked > 0, scores, 0.0), 0) + least_sum
    if SCALES:
        scores *= tl.load(expert_scales_ptr + expert, mask=inside, other=0.0)
    place = token * K + tl.cumsum(picked, 0) - 1
    tl.store(weights_ptr + place, (scores * factor).to(dtype), mask=picked > 0)
    tl.store(experts_ptr + place, expert, mask=picked > 0)


@triton.jit
def _in_best_groups(
    wanted,
    expert,
    inside,
    X: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Which experts are in the KEPT groups with the largest sums of their BEST scores, of equals the first."""
    group = tl.arange(0, BLOCK_G)
    mine = (expert[None, :] // (X // GROUPS) == group[:, None]) & inside[None, :]
    left = tl.where(mine, wanted[None, :], -float("inf"))
    best = tl.zeros((BLOCK_G,), tl.float32)
    for _ in range(BEST):
        largest = tl.max(left, 1)
        best += largest
        first = tl.min(tl.where(left == largest[:, None], expert[None, :], BLOCK_X), 1)
        left = tl.where(expert[None, :] == first[:, None], -float("inf"), left)
    best = tl.where(group < GROUPS, tl.maximum(best, -3e38), -float("inf"))
    kept = tl.zeros((BLOCK_G,), tl.int32)
    for _ in range(KEPT):
        first = tl.min(tl.where(best == tl.max(best, 0), group, BLOCK_G), 0)
        kept += (group == first).to(tl.int32)
        best = tl.where(group == first, -float("inf"), best)
    return tl.sum(mine.to(tl.int32) * kept[:, None], 0) > 0


@triton.jit(do_not_specialize=["num_choices"])  # changes from step to step
def align_kernel(
    chosen_ptr,  # [T, K] int32
    weights_ptr,  # [T, K]
    starts_ptr,  # [X + 1] int32: first row of each expert, and the number of all
    rows_ptr,  # [T * K] int32: token of each row
    factors_ptr,  # [T * K]: weight of each row
    places_ptr,  # [T, K] int32: row of each choice
    num_choices,
    X: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per expert: its choices get the rows after those of the experts before it, in their order."""
    expert = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_choices, BLOCK):
        choice = start + offset
        before += (tl.load(chosen_ptr + choice, mask=choice < num_choices, other=X) < expert).to(tl.int32)
    first = tl.sum(before, 0)
    tl.store(starts_ptr + expert, first)
    if expert == X - 1:
        tl.store(starts_ptr + X, num_choices)
    for start in range(0, num_choices, BLOCK):
        choice = start + offset
        mine = tl.load(chosen_ptr + choice, mask=choice < num_choices, other=X) == expert
        row = first + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(rows_ptr + row, choice // K, mask=mine)
        tl.store(factors_ptr + row, tl.load(weights_ptr + choice, mask=mine, other=0.0), mask=mine)
        tl.store(places_ptr + choice, row, mask=mine)
        first += tl.sum(mine.to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_results"])  # changes from step to step
def experts_kernel(
    x_ptr,  # [*, K]
    numbers_ptr,  # numbers of each expert after another; with ACTIVATION gate, then up
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # [X, N], with BIAS
    factors_ptr,  # [R], multiplies each result; not with ACTIVATION
    order_ptr,  # [X, K]: with ORDERED, which column of x is each input
    rows_ptr,  # [R] int32, row of x for each result, with ACTIVATION; else they are the same
    starts_ptr,  # [X + 1] int32, first result of each expert
    out_ptr,  # [R, N], or with ACTIVATION [R, N / 2]; unless WHOLE sums of parts, float32 [parts, R, N]
    num_results,
    X: tl.constexpr,
    N: tl.constexpr,  # rows of an expert's weight
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    NUMBERS: tl.constexpr,  # elements of an expert
    LENGTH: tl.constexpr,  # inputs of a part
    WHOLE: tl.constexpr,  # one program adds all inputs
    ACTIVATION: tl.constexpr,  # name of the gate's activation in layers.basic.ACTIVATIONS; None: there is no gate
    BIAS: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of BLOCK_T results of one expert, BLOCK_N outputs and part of the inputs; the results are
    sorted by expert."""
    OUT: tl.constexpr = N if ACTIVATION is None else N // 2
    expert, result = _tile_place(starts_ptr, tl.program_id(1), X, BLOCK_X, BLOCK_T)
    if expert >= X:
        return
    inside = result < tl.load(starts_ptr + expert + 1)
    row = (result if ACTIVATION is None else tl.load(rows_ptr + result, mask=inside, other=0)).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    in_rows = n < OUT
    expert = expert.to(tl.int64)
    numbers = numbers_ptr + expert * NUMBERS
    groups_of_expert = expert * ((K + GROUP - 1) // GROUP * N)
    scales, zeros = scales_ptr + groups_of_expert, zeros_ptr + groups_of_expert
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    gate = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    first, end = 0, K
    if not WHOLE:
        first = tl.program_id(2) * LENGTH
        end = tl.minimum(first + LENGTH, K)
    for start in range(first, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        column = tl.load(order_ptr + expert * K + k, mask=k < K, other=0) if ORDERED else k
        x = tl.load(x_ptr + row * K + column, mask=inside & (k < K), other=0.0)
        if ACTIVATION is not None:
            gate = add_product(gate, x, start, n, in_rows, numbers, scales, zeros, N, K, FORM, GROUP, BLOCK_N, BLOCK_K)
        total = add_product(
            total, x, start, n + N - OUT, in_rows, numbers, scales, zeros, N, K, FORM, GROUP, BLOCK_N, BLOCK_K
        )
    if WHOLE:
        factor = tl.load(factors_ptr + result, mask=inside, other=0.0).to(tl.float32) if ACTIVATION is None else 1.0
        dtype = out_ptr.dtype.element_ty
        bias = bias_ptr + expert * N
        total = _finished(total, gate, n, in_rows, factor, scales, bias, dtype, N, K, FORM, GROUP, ACTIVATION, BIAS)
        tl.store(out_ptr + result.to(tl.int64) * OUT + n, total, mask=inside & in_rows)
    else:
        out = out_ptr + (tl.program_id(2).to(tl.int64) * num_results + result) * N + n
        tl.store(out + N - OUT, total, mask=inside & in_rows)
        if ACTIVATION is not None:
            tl.store(out, gate, mask=inside & in_rows)


@triton.jit
def _tile_place(starts_ptr, tile, X: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_T: tl.constexpr):
    """The expert of a tile, X after the last tile, and its results [BLOCK_T, 1]."""
    index = tl.arange(0, BLOCK_X)
    begins = tl.load(starts_ptr + index, mask=index < X, other=0)
    tiles = (tl.load(starts_ptr + index + 1, mask=index < X, other=0) - begins + BLOCK_T - 1) // BLOCK_T
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)  # the first one whose tiles do not end before
    first_tile = tl.sum(tl.where(index < expert, tiles, 0), 0)
    expert = tl.minimum(expert, X)  # the block may have more places
    return expert, tl.load(starts_ptr + expert) + (tile - first_tile) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]


@triton.jit
def _finished(
    total,
    gate,  # not read without ACTIVATION
    n,
    in_rows,
    factor,  # not read with ACTIVATION
    scales_ptr,  # scales of the expert, as the next
    bias_ptr,
    dtype: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Results of the sums of all inputs, for outputs n."""
    UP: tl.constexpr = 0 if ACTIVATION is None else N // 2
    total = scaled(total, n + UP, in_rows, scales_ptr, K, FORM, GROUP)
    if BIAS:
        total += tl.load(bias_ptr + n + UP, mask=in_rows, other=0.0).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if ACTIVATION is None:
        return total * factor
    gate = scaled(gate, n, in_rows, scales_ptr, K, FORM, GROUP)
    if BIAS:
        gate += tl.load(bias_ptr + n, mask=in_rows, other=0.0).to(tl.float32)
    return gated(gate.to(dtype).to(tl.float32), total, dtype, ACTIVATION)


@triton.jit(do_not_specialize=["num_results"])
def sum_parts_kernel(
    parts_ptr,  # float32 [PARTS, R, N]
    scales_ptr,
    bias_ptr,  # as of experts_kernel, and the next
    factors_ptr,
    starts_ptr,
    out_ptr,
    num_results,
    X: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per result and BLOCK outputs: the sum of its parts, in their order."""
    OUT: tl.constexpr = N if ACTIVATION is None else N // 2
    result = tl.program_id(0)
    index = tl.arange(0, BLOCK_X)
    ends = tl.load(starts_ptr + index + 1, mask=index < X, other=num_results)
    expert = tl.sum((ends <= result).to(tl.int32), 0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_rows = n < OUT
    total, gate = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        parts = parts_ptr + (result + part * num_results).to(tl.int64) * N + n
        total += tl.load(parts + N - OUT, mask=in_rows, other=0.0)
        if ACTIVATION is not None:
            gate += tl.load(parts, mask=in_rows, other=0.0)
    factor = tl.load(factors_ptr + result).to(tl.float32) if ACTIVATION is None else 1.0
    scales = scales_ptr + expert * ((K + GROUP - 1) // GROUP * N)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    bias = bias_ptr + expert * N
    total = _finished(total, gate, n, in_rows, factor, scales, bias, dtype, N, K, FORM, GROUP, ACTIVATION, BIAS)
    tl.store(out_ptr + result.to(tl.int64) * OUT + n, total, mask=in_rows)


@triton.jit
def sum_kernel(
    results_ptr,  # [T * K, E]
    places_ptr,  # [T, K] int32: row of each choice
    shared_ptr,  # [T, E], with SHARED: is added
    gate_ptr,  # [T, 1], with SCALED: its sigmoid multiplies what is shared
    out_ptr,  # [T, E]
    K: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and BLOCK columns: the sum of its results, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < E
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(places_ptr + token * K + k).to(tl.int64)
        total += tl.load(results_ptr + row * E + column, mask=inside, other=0.0).to(tl.float32)
        total = total.to(dtype).to(tl.float32)
    if SHARED:
        shared = tl.load(shared_ptr + token * E + column, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            gate = tl.load(gate_ptr + token).to(tl.float32)
            shared = ((1.0 / (1.0 + tl.exp2(-gate * LOG2E))).to(dtype).to(tl.float32) * shared).to(dtype).to(tl.float32)
        total += shared
    tl.store(out_ptr + token * E + column, total, mask=inside)
