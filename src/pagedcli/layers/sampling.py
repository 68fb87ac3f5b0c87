"""Sampling from logits: the definition, in plain torch, and where it runs on a CPU, the native kernels. These and those
for GPUs (triton_sampling) are tested against it. Tokens are drawn by inverse transform sampling in vocabulary order.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedcli import layers
from pagedcli.layers.basic import fused_layers
from pagedcli.native import loaded_library
from pagedcli.native.structs import DTYPE_CODES, bind

INVALID = -1  # the token of a row whose logits contain NaN or +inf, or only -inf
_ROWS = 32  # rows with 64-bit numbers in memory at once
NUM_LIKELIEST = 1024  # tokens that top-p is first tried on: sorting a whole vocabulary is slow on a CPU


class SamplingLimits(NamedTuple):
    """Which tokens of each row may be drawn. Greedy rows ignore them."""

    top_k: Tensor  # [R] int32, 0: all
    top_p: Tensor  # [R] float32, 1: all
    min_p: Tensor  # [R] float32, 0: all


def choose_tokens(
    logits: Tensor, temperature: Tensor, uniform: Tensor, limits: SamplingLimits | None = None, *, num_drawn: int
) -> Tensor:
    """One token per row: the argmax if the temperature is 0, else sampled from the softmax over the kept tokens.

    Shapes:  logits [R, V], any floating dtype; temperature, uniform [R] float32, uniform in [0, 1]; limits: None if no
             row has any; num_drawn: rows with a temperature, known on the host; returns [R] int64, INVALID for invalid
             logits.
    """
    if num_drawn == 0:
        return likeliest_tokens(logits)
    if logits.is_cuda and fused_layers():
        return layers.triton_sampling.choose_tokens(logits, temperature, uniform, limits)
    floor = None if limits is None else floors(logits, temperature, limits)
    if (native := _kernels(logits)) is not None:
        tokens, temperature = torch.empty(logits.shape[0], dtype=torch.int64), temperature.float().contiguous()
        _run(native.sampling_draw, logits, temperature, uniform.float().contiguous(), floor, tokens)
        return tokens
    if num_drawn == logits.shape[0]:
        return draw_tokens(logits, temperature, uniform, floor)
    tokens = likeliest_tokens(logits)
    drawn = temperature.nonzero().flatten()
    rows = (x if x is None else x[drawn] for x in (logits, temperature, uniform, floor))
    return tokens.index_copy_(0, drawn, draw_tokens(*rows))  # type: ignore[arg-type]


def _kernels(logits: Tensor) -> Any:
    """The native library's functions, if it is loaded and these logits are on a CPU as it reads them."""
    library = loaded_library()
    if library is None or logits.is_cuda or logits.dtype not in DTYPE_CODES or not logits.is_contiguous():
        return None
    return bind(library.functions)


def _run(kernel: Any, logits: Tensor, *arguments: Tensor | None) -> None:
    """Call a native kernel."""
    pointers = (None if each is None else each.data_ptr() for each in arguments)
    kernel(DTYPE_CODES[logits.dtype], logits.data_ptr(), *logits.shape, *pointers, torch.get_num_threads())


def floors(logits: Tensor, temperature: Tensor, limits: SamplingLimits) -> Tensor:
    """The smallest logit that the limits of each row keep, [R] float32; -inf where there are none."""
    if (native := _kernels(logits)) is not None:
        found, top_k = torch.empty(logits.shape[0]), limits.top_k.int().contiguous()
        temperature, top_p, min_p = (each.float().contiguous() for each in (temperature, limits.top_p, limits.min_p))
        _run(native.sampling_floors, logits, temperature, top_k, top_p, min_p, found)
        return found
    limited = (limits.top_k > 0) | (limits.top_p < 1) | (limits.min_p > 0)
    rows = (limited & (temperature > 0)).nonzero().flatten()
    floor = torch.full((logits.shape[0],), float("-inf"), device=logits.device)
    if not rows.shape[0]:
        return floor
    kept = smallest_kept(
        logits.index_select(0, rows), temperature[rows], SamplingLimits(*(limit[rows] for limit in limits))
    )
    return floor.index_copy_(0, rows, kept)


def likeliest_tokens(logits: Tensor) -> Tensor:
    """The argmax of each row, the first one if tied. Shapes: logits [R, V] -> [R] int64, INVALID for invalid logits.

    torch's argmax of 32 x 151,936 bfloat16 logits takes 16 ms on one Zen 5 core, its max 2.9, the native loop 0.6.
    """
    if logits.is_cuda:
        tokens = logits.argmax(-1)  # torch treats NaN as the maximum: a row with NaN gives its index.
        largest = logits.gather(-1, tokens[:, None])[:, 0]
        return tokens.where(largest.isfinite(), INVALID)
    if (native := _kernels(logits)) is None:
        largest, tokens = logits.max(-1)
        return tokens.where(largest.isfinite(), INVALID)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    _run(native.sampling_argmax, logits, tokens)
    return tokens


def top_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row and their tokens, largest first, ties by token id: a longer list begins
    with the shorter one. (torch.topk orders ties by `count`, here the largest of a step's rows.)

    Shapes: scores [R, V] float32 -> [R, K] float32 and [R, K] int64, K at most V.
    """
    num_rows, vocab_size = scores.shape
    count = min(count, vocab_size)
    scores = scores.contiguous()
    if count == 0 or (native := _kernels(scores)) is None:
        starts = range(0, max(num_rows, 1), _ROWS)
        found = [_top_tokens(scores[start : start + _ROWS], count) for start in starts]
        values, tokens = (torch.cat(parts) for parts in zip(*found, strict=True))
        return values, tokens
    values, tokens = torch.empty((num_rows, count)), torch.empty((num_rows, count), dtype=torch.int64)
    native.sampling_top(
        scores.data_ptr(), num_rows, vocab_size, count, values.data_ptr(), tokens.data_ptr(), torch.get_num_threads()
    )
    return values, tokens


def _top_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """top_tokens by one 64-bit number per token: the float's bits in an order that integers share, then V - 1 - id."""
    last = scores.shape[1] - 1
    bits = scores.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    numbers = (ordered.long() << 32) + torch.arange(last, -1, -1, device=scores.device)
    tokens = last - (numbers.topk(count).values & 0xFFFFFFFF)
    return scores.gather(1, tokens), tokens


def draw_tokens(logits: Tensor, temperature: Tensor, uniform: Tensor, floor: Tensor | None = None) -> Tensor:
    """choose_tokens for rows with a temperature above 0."""
    scores = logits.float()
    if floor is not None:
        scores = scores.masked_fill(scores < floor[:, None], float("-inf"))
    cumulative = (scores / temperature[:, None]).softmax(-1).cumsum(-1)
    total = cumulative[:, -1]
    # rounding can raise the target to the total, past the last token with a nonzero probability
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return tokens.where(total.isfinite(), INVALID)  # a softmax over NaN or +inf is NaN


def smallest_kept(logits: Tensor, temperature: Tensor, limits: SamplingLimits) -> Tensor:
    """The smallest logit that min-p, then top-k, then top-p keep; ties at the border are all kept.

    min-p keeps tokens with a probability of at least `min_p` times the largest. Top-k keeps a logit if fewer than
    `top_k` tokens have a larger one. Top-p keeps a logit if the tokens with a larger one have less than `top_p` of
    the probability of all tokens that min-p keeps and top-k counts, which are `top_k` even with ties.

    Shapes:  logits [R, V]; the others [R], temperature above 0; returns [R] float32.
    """
    top_k, top_p, min_p = limits
    scores = logits.float()
    # a ratio of probabilities is a difference of logits; log 0 keeps all
    floor = scores.max(-1).values + temperature * min_p.log()
    if not bool(((top_k > 0) | (top_p < 1)).any()):
        return floor
    log_mass = _log_mass(scores / temperature[:, None])
    vocab_size = logits.shape[1]
    count = min(int(top_k.max()), vocab_size) if bool(top_k.all()) else vocab_size
    if count == vocab_size > NUM_LIKELIEST and not logits.is_cuda:
        likeliest = scores.topk(NUM_LIKELIEST).values
        kept, sufficed = _kept_of_likeliest(likeliest, floor, log_mass, temperature, limits)
        if bool(sufficed.all()):  # no synchronization on a CPU
            return kept
    likeliest = scores.topk(count).values if count < vocab_size else scores.sort(descending=True).values
    del scores  # what follows takes most memory
    return _kept_of_likeliest(likeliest, floor, log_mass, temperature, limits)[0]


def _log_mass(scaled: Tensor) -> Tensor:
    """The logarithm of the sum of the exponentials of each row. Shapes: [R, V] -> [R]."""
    return scaled.amax(-1) - scaled.log_softmax(-1).amax(-1)  # torch cuts the sum of a single row among threads


def _kept_of_likeliest(
    likeliest: Tensor, floor: Tensor, log_mass: Tensor, temperature: Tensor, limits: SamplingLimits
) -> tuple[Tensor, Tensor]:
    """smallest_kept from the largest logits [R, C] in descending order; and [R] whether these C sufficed."""
    top_k, top_p, min_p = limits
    num_likeliest = likeliest.shape[1]
    rank = torch.arange(num_likeliest, device=likeliest.device)
    inside = (likeliest >= floor[:, None]) & ((rank < top_k[:, None]) | (top_k == 0)[:, None])
    weights = (likeliest / temperature[:, None] - log_mass[:, None]).exp() * inside
    # top-p is relative to the total that earlier filters kept
    up_to = weights.cumsum(-1)  # token by token, so that C, which depends on the other rows, never changes a bit
    mass = torch.where((top_k == 0) & (min_p == 0), 1.0, up_to[:, -1])
    before = up_to - weights
    # always keep the argmax, even if float32 rounds top-p to 0
    kept = inside & ((before < (top_p * mass)[:, None]) | (top_p == 1)[:, None] | (rank == 0))
    smallest = likeliest.masked_fill(~kept, float("inf")).amin(-1)
    reaches_on = torch.where(min_p > 0, inside[:, -1], kept[:, -1]) & (top_k == 0)
    smallest = torch.where((top_p == 1) & (top_k == 0), floor, smallest)
    return smallest, ~reaches_on & (top_k <= num_likeliest)


# ---------------------------------------------------------------------- changes of logits, in place


def penalize_repeated(scores: Tensor, seen: Tensor, rows: Tensor, places: Tensor, penalty: Tensor) -> None:
    """Divide positive scores of seen tokens by the penalty, and multiply negative ones.

    Shapes:  scores [R, V] float32, contiguous; seen [places, V] uint8; rows, places [P] int64; penalty [P] float32.
    """
    if scores.is_cuda and fused_layers():
        layers.triton_sampling.penalize(scores, seen, rows, places, penalty, penalty)
        return
    found, tokens = _marked(seen, places)
    at = rows[found] * scores.shape[1] + tokens
    flat, penalty = scores.view(-1), penalty[found]
    values = flat[at]
    flat[at] = torch.where(values > 0, values / penalty, values * penalty)


def penalize_counted(
    scores: Tensor, counts: Tensor, rows: Tensor, places: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Subtract from the scores of generated tokens `frequency` per generation, and `presence` once.

    Shapes:  scores [R, V] float32, contiguous; counts [places, V] int32; rows, places [Q] int64; the others [Q]
             float32.
    """
    if scores.is_cuda and fused_layers():
        layers.triton_sampling.penalize(scores, counts, rows, places, frequency, presence)
        return
    found, tokens = _marked(counts, places)
    at = rows[found] * scores.shape[1] + tokens
    scores.view(-1)[at] -= counts[places[found], tokens].to(scores.dtype) * frequency[found] + presence[found]


def _marked(table: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries of some rows are not 0: which of these rows, and the column. On a CPU, numpy finds them in a fifth
    of torch's time."""
    if table.is_cuda:
        found, columns = table.index_select(0, places).nonzero(as_tuple=True)
        return found, columns
    of_row = [torch.from_numpy(np.flatnonzero(table[place].numpy() != 0)) for place in places.tolist()]
    lengths = torch.tensor([len(found) for found in of_row])
    return torch.arange(len(of_row)).repeat_interleave(lengths), torch.cat(of_row)


def mask_tokens(scores: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set the scores of tokens without a bit to -inf. Shapes: scores [R, V] float32; rows [G] int64; words [G, V / 32]
    int32, lowest bit first."""
    if scores.is_cuda and fused_layers():
        layers.triton_sampling.mask_tokens(scores, rows, words)
        return
    shifts = torch.arange(8, dtype=torch.uint8, device=scores.device)
    allowed = (words.view(torch.uint8)[:, :, None] >> shifts) & 1
    masked = scores.index_select(0, rows).masked_fill_(allowed.flatten(1)[:, : scores.shape[1]] == 0, float("-inf"))
    scores.index_copy_(0, rows, masked)
