"""From logits to tokens. One uniform number per token, drawn from (seed, sample index, position), picks from the
cumulative distribution, so a request's tokens depend neither on its neighbours nor on a resume.
"""

import struct

import torch
import xxhash
from torch import Tensor

from pagedcli.engine.sequence import Sequence, TokenLogprobs

NUM_LIKELIEST = 1024  # top-p is first tried on this many tokens, as sorting a whole vocabulary is slow


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on its arguments alone."""
    key = struct.pack("<qqq", seed, sample_index, position)
    return float(xxhash.xxh64_intdigest(key) >> 11) * 2.0**-53


def sample(logits: Tensor, seqs: list[Sequence]) -> list[int]:
    """The next token of each sequence; appends to seq.logprobs where they are asked for.

    Shapes:  logits [B, V], row b belongs to seqs[b]. Not changed.
    """
    plain = [not _adjusted(seq) for seq in seqs]
    if all(plain) and all(seq.params.greedy and seq.params.logprobs is None for seq in seqs):
        return logits.argmax(-1).tolist()
    scores = logits.float()
    if scores is logits and not all(plain):
        scores = logits.clone()
    logprobs = {b: scores[b].log_softmax(-1) for b, seq in enumerate(seqs) if seq.params.logprobs is not None}
    for b, seq in enumerate(seqs):
        if not plain[b]:
            _adjust(scores[b], seq)
    token_ids = scores.argmax(-1).tolist()
    drawn = [b for b, seq in enumerate(seqs) if not seq.params.greedy]
    if drawn:
        rows = scores if len(drawn) == len(seqs) else scores[drawn]
        for b, token_id in zip(drawn, _draw(rows, [seqs[b] for b in drawn]), strict=True):
            token_ids[b] = token_id
    for b, row in logprobs.items():
        seqs[b].logprobs.append(_token_logprobs(row, token_ids[b], seqs[b].params.logprobs or 0))
    return token_ids


def _adjusted(seq: Sequence) -> bool:
    """Whether the sequence's logits are changed before the choice."""
    params = seq.params
    return params.penalized or bool(params.logit_bias) or _below_min_tokens(seq)


def _below_min_tokens(seq: Sequence) -> bool:
    return seq.num_output_tokens < seq.params.min_tokens and bool(seq.eos_token_ids or seq.stop_token_ids)


def _adjust(scores: Tensor, seq: Sequence) -> None:
    """Penalties, bias and minimum length, in place on one row [V]."""
    params = seq.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(seq.token_ids)), device=scores.device)
        values = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if seq.output_counts and (params.frequency_penalty or params.presence_penalty):
        ids = torch.tensor(list(seq.output_counts), device=scores.device)
        counts = torch.tensor(list(seq.output_counts.values()), device=scores.device, dtype=scores.dtype)
        scores[ids] -= counts * params.frequency_penalty + params.presence_penalty
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        scores[ids] += torch.tensor(list(params.logit_bias.values()), device=scores.device, dtype=scores.dtype)
    if _below_min_tokens(seq):
        scores[torch.tensor(sorted(seq.eos_token_ids | seq.stop_token_ids), device=scores.device)] = float("-inf")


def _draw(scores: Tensor, seqs: list[Sequence]) -> list[int]:
    """One token per row [B, V] by inverse transform sampling over the kept tokens, in vocabulary order."""
    device = scores.device
    temperature = torch.tensor([seq.params.temperature for seq in seqs], device=device)
    probs = (scores / temperature[:, None]).softmax(-1)
    limited = [b for b, seq in enumerate(seqs) if _limited(seq, scores.shape[1])]
    if limited:
        floor = torch.zeros(len(seqs), device=device)
        for b in limited:
            floor[b] = _smallest_kept(probs[b], seqs[b])
        probs = probs.masked_fill(probs < floor[:, None], 0.0)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1]
    draws = [uniform(seq.seed, seq.sample_index, len(seq.token_ids)) for seq in seqs]
    target = torch.tensor(draws, device=device) * total
    # rounding may lift the target to the total, past every token with a probability
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].tolist()


def _limited(seq: Sequence, vocab_size: int) -> bool:
    params = seq.params
    return params.min_p > 0 or 0 < params.top_k < vocab_size or params.top_p < 1


def _smallest_kept(probs: Tensor, seq: Sequence) -> Tensor:
    """The smallest probability that min-p, then top-k, then top-p keep; ties at the border are all kept."""
    params = seq.params
    floor = probs.max() * params.min_p
    vocab_size = probs.shape[0]
    top_k = params.top_k if 0 < params.top_k < vocab_size else None
    if top_k is None and params.top_p == 1:
        return floor
    for count in (top_k,) if top_k is not None else (min(NUM_LIKELIEST, vocab_size), vocab_size):
        assert count is not None
        likeliest = probs.topk(count).values
        kept = likeliest[likeliest >= floor]
        if params.top_p == 1:
            return torch.maximum(floor, kept[-1])
        # top-p is a share of what the earlier filters left
        mass = kept.sum() if count == top_k or params.min_p > 0 else probs.sum()
        before = kept.cumsum(-1) - kept
        inside = kept[before < params.top_p * mass]
        if count in (top_k, vocab_size) or inside.shape[0] < kept.shape[0] or kept.shape[0] < count:
            return torch.maximum(floor, inside[-1])
    raise AssertionError("the whole vocabulary always suffices")


def _token_logprobs(logprobs: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    top = logprobs.topk(num_top) if num_top else None
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top is not None else []
    return TokenLogprobs(token_id, float(logprobs[token_id]), pairs)
