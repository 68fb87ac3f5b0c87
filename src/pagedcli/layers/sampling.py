"""Sampling from logits in plain torch, without synchronizing with the device. Faster kernels are tested against this
definition: inverse transform sampling in vocabulary order.
"""

import torch
from torch import Tensor

from pagedcli.layers.basic import fused_layers
from pagedcli.native import loaded_library
from pagedcli.native.structs import DTYPE_CODES, bind

INVALID = -1  # in place of a token if a row's logits contain NaN or +inf, or only -inf
_ROWS = 32  # whose 64-bit numbers are in memory at once
NUM_LIKELIEST = 1024  # on a CPU top-p is first tried on this many tokens: sorting a whole vocabulary is slow


def choose_tokens(
    logits: Tensor, temperature: Tensor, uniform: Tensor, floor: Tensor | None = None, *, num_drawn: int
) -> Tensor:
    """One token per row: the argmax if the temperature is 0, else sampled from the softmax over the kept tokens.

    Shapes:  logits [R, V], any floating dtype; temperature, uniform [R] float32, uniform in [0, 1]; floor [R] float32
             or None: tokens with a smaller logit are dropped; num_drawn: rows with a temperature, known on the host;
             returns [R] int64, INVALID for invalid logits.
    """
    if num_drawn == 0:
        return likeliest_tokens(logits)
    if logits.is_cuda and fused_layers():
        from pagedcli.layers.triton_layers import choose_tokens as choose_tokens_in_one_pass

        return choose_tokens_in_one_pass(logits, temperature, uniform, floor)
    if num_drawn == logits.shape[0]:
        return draw_tokens(logits, temperature, uniform, floor)
    tokens = likeliest_tokens(logits)
    drawn = temperature.nonzero().flatten()
    rows = (x if x is None else x[drawn] for x in (logits, temperature, uniform, floor))
    return tokens.index_copy_(0, drawn, draw_tokens(*rows))  # type: ignore[arg-type]


def likeliest_tokens(logits: Tensor) -> Tensor:
    """The argmax of each row, the first one if tied. Shapes: logits [R, V] -> [R] int64, INVALID for invalid logits.

    torch's argmax of 32 x 151,936 bfloat16 logits takes 16 ms on one Zen 5 core, its max 2.9, the native loop 0.6.
    """
    if logits.is_cuda:
        tokens = logits.argmax(-1)  # for a row with NaN its index: torch treats NaN as the maximum
        largest = logits.gather(-1, tokens[:, None])[:, 0]
        return tokens.where(largest.isfinite(), INVALID)
    library = loaded_library()
    if library is None or logits.dtype not in DTYPE_CODES or not logits.is_contiguous():
        largest, tokens = logits.max(-1)
        return tokens.where(largest.isfinite(), INVALID)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    bind(library.functions).decoder_argmax(
        DTYPE_CODES[logits.dtype], logits.data_ptr(), *logits.shape, tokens.data_ptr(), torch.get_num_threads()
    )
    return tokens


def top_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row and their tokens, largest first, ties by token id: a longer list begins
    with the shorter one. (torch.topk orders ties by `count`, here the largest of a step's rows.)

    Shapes: scores [R, V] float32 -> [R, K] float32 and [R, K] int64, K at most V.
    """
    num_rows, vocab_size = scores.shape
    count = min(count, vocab_size)
    library = loaded_library()
    if scores.is_cuda or library is None or count == 0:
        starts = range(0, max(num_rows, 1), _ROWS)
        found = [_top_tokens(scores[start : start + _ROWS], count) for start in starts]
        values, tokens = (torch.cat(parts) for parts in zip(*found, strict=True))
        return values, tokens
    scores = scores.contiguous()
    values, tokens = torch.empty((num_rows, count)), torch.empty((num_rows, count), dtype=torch.int64)
    bind(library.functions).decoder_top(
        scores.data_ptr(), num_rows, vocab_size, count, values.data_ptr(), tokens.data_ptr(), torch.get_num_threads()
    )
    return values, tokens


def _top_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """By one 64-bit number per token: the float's bits in an order that integers share, then V - 1 - the token id."""
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


def smallest_kept(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    most_k: int | None,
    only_min_p: bool,
) -> Tensor:
    """The smallest logit that min-p, then top-k, then top-p keep; ties at the border are all kept.

    Shapes:  logits [R, V]; the others [R], top_k int64 (0: all); returns [R] float32. On the host: most_k is the
             largest top_k if every row has one; only_min_p: no row uses top-k or top-p.
    """
    scores = logits.float()
    # a ratio of probabilities is a difference of logits; log 0 keeps all
    floor = scores.max(-1).values + temperature * min_p.log()
    if only_min_p:
        return floor
    scaled = scores / temperature[:, None]
    log_mass = scaled.amax(-1) - scaled.log_softmax(-1).amax(-1)  # torch cuts the sum of a single row among threads
    vocab_size = logits.shape[1]
    count = min(most_k or vocab_size, vocab_size)
    if count == vocab_size > NUM_LIKELIEST and not logits.is_cuda:
        likeliest = scores.topk(NUM_LIKELIEST).values
        kept, sufficed = _kept_of_likeliest(likeliest, floor, log_mass, temperature, top_k, top_p, min_p)
        if bool(sufficed.all()):  # no synchronization on a CPU
            return kept
    likeliest = scores.topk(count).values if count < vocab_size else scores.sort(descending=True).values
    return _kept_of_likeliest(likeliest, floor, log_mass, temperature, top_k, top_p, min_p)[0]


def _kept_of_likeliest(
    likeliest: Tensor,
    floor: Tensor,
    log_mass: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor]:
    """smallest_kept from the largest logits [R, C] in descending order; and [R] whether these C sufficed."""
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
