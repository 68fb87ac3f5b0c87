"""From logits to tokens. One uniform number per token, drawn from (seed, sample index, position), picks from the
cumulative distribution, so a request's tokens depend neither on its neighbours nor on a resume.

The device never waits for the host here, nor the host for the device: what depends on sequences is put into a
SamplingBatch first, and the tokens are read when they are needed.
"""

import struct
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from pagedcli.engine.sequence import Sequence, TokenLogprobs
from pagedcli.engine.step_input import Bools, Floats, Ints
from pagedcli.engine.transfer import Download, Upload
from pagedcli.layers.sampling import choose_tokens, smallest_kept


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on its arguments alone."""
    key = struct.pack("<qqq", seed, sample_index, position)
    return float(xxhash.xxh64_intdigest(key) >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the rows of a step's logits become tokens."""

    seqs: list[Sequence]  # R, for what changes logits and for logprobs
    temperature: Floats  # [R] float32, 0: greedy
    uniform: Floats  # [R] float32 in [0, 1]
    limited: list[int]  # rows with top-k, top-p or min-p
    adjusted: list[int]  # rows whose logits are changed before the choice
    with_logprobs: list[int]  # rows
    logits_rows: Ints | None = None  # [R] row of the logits for each token; None: its own

    @classmethod
    def of(cls, seqs: list[Sequence], logits_rows: list[int] | None = None) -> "SamplingBatch":
        """The next token of each sequence, pending tokens counted."""
        temperature, draws = [0.0] * len(seqs), [0.0] * len(seqs)
        limited, adjusted, with_logprobs = [], [], []
        for row, seq in enumerate(seqs):
            if seq.is_greedy:
                continue
            params = seq.params
            if not params.greedy:
                temperature[row] = params.temperature
                draws[row] = uniform(seq.seed, seq.sample_index, seq.num_tokens)
                if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                    limited.append(row)
            if _adjusted(seq):
                adjusted.append(row)
            if params.logprobs is not None:
                with_logprobs.append(row)
        return cls(
            seqs=seqs,
            temperature=np.array(temperature, dtype=np.float32),
            uniform=np.array(draws, dtype=np.float32),
            limited=limited,
            adjusted=adjusted,
            with_logprobs=with_logprobs,
            logits_rows=None if logits_rows is None else np.array(logits_rows, dtype=np.int64),
        )

    @property
    def plain(self) -> bool:
        """Whether temperature and the uniform number are all that the choice needs."""
        return not (self.limited or self.adjusted or self.with_logprobs) and self.logits_rows is None


class SampledTokens:
    """Tokens of a launched step, on the device and on their way to the host."""

    def __init__(self, token_ids: Tensor, logprobs: "list[Tensor] | None" = None) -> None:
        self.token_ids = token_ids  # [R] int64, on the device
        self._download = Download([token_ids, *(logprobs or ())])

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def is_ready(self) -> bool:
        """Whether read returns at once."""
        return self._download.is_ready

    def read(self, sampling: SamplingBatch) -> list[int]:
        """The tokens, once they are there; appends to the logprobs of sequences that ask for them."""
        token_ids, *logprobs = self._download.wait()
        tokens: list[int] = token_ids.tolist()
        if logprobs:
            chosen, values, ids = (tensor.tolist() for tensor in logprobs)
            for place, row in enumerate(sampling.with_logprobs):
                seq = sampling.seqs[row]
                count = seq.params.logprobs or 0
                top = list(zip(ids[place][:count], values[place][:count], strict=True))
                if seq.finish_reason is None:
                    seq.logprobs.append(TokenLogprobs(tokens[row], chosen[place], top))
        return tokens


def sample(logits: Tensor, seqs: list[Sequence]) -> list[int]:
    """The next token of each sequence, waited for; appends to seq.logprobs where they are asked for.

    Shapes:  logits [B, V], row b belongs to seqs[b]. Not changed.
    """
    sampling = SamplingBatch.of(seqs)
    return sample_tokens(logits, sampling, Upload(logits.device)).read(sampling)


def sample_tokens(logits: Tensor, sampling: SamplingBatch, upload: Upload) -> SampledTokens:
    """The next tokens, on the device.

    Shapes:  logits [R, V], or any rows that sampling.logits_rows selects from. Not changed.
    """
    if sampling.logits_rows is not None:
        logits = logits.index_select(0, upload([sampling.logits_rows])[0])
    temperature, draws = upload([sampling.temperature, sampling.uniform])
    original = logits
    if sampling.adjusted:
        logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
        for row in sampling.adjusted:
            _adjust(logits[row], sampling.seqs[row], upload)
    num_drawn = int(np.count_nonzero(sampling.temperature))
    floor = _floors(logits, sampling, upload) if sampling.limited else None
    tokens = choose_tokens(logits, temperature, draws, floor, num_drawn=num_drawn)
    return SampledTokens(tokens, _logprobs(original, tokens, sampling, upload) if sampling.with_logprobs else None)


def depends_on_tokens(seq: Sequence) -> bool:
    """Whether the next logits cannot be sampled before all earlier tokens are known on the host."""
    return seq.penalized or seq.guide is not None


def _floors(logits: Tensor, sampling: SamplingBatch, upload: Upload) -> Tensor:
    """[R] float32: the smallest logit that the limits of each row keep, -inf where there are none."""
    all_params = [sampling.seqs[row].params for row in sampling.limited]
    top_k = [max(params.top_k, 0) for params in all_params]
    top_p, min_p = [params.top_p for params in all_params], [params.min_p for params in all_params]
    rows, k, p, m, temperature = upload(
        [
            np.array(sampling.limited, dtype=np.int64),
            np.array(top_k, dtype=np.int64),
            np.array(top_p, dtype=np.float32),
            np.array(min_p, dtype=np.float32),
            sampling.temperature[sampling.limited],
        ]
    )
    most_k = max(top_k) if min(top_k) > 0 else None
    only_min_p = not any(top_k) and min(top_p) == 1
    kept = smallest_kept(logits.index_select(0, rows), temperature, k, p, m, most_k=most_k, only_min_p=only_min_p)
    floor = torch.full((len(sampling.seqs),), float("-inf"), device=logits.device)
    return floor.index_copy_(0, rows, kept)


def _adjusted(seq: Sequence) -> bool:
    """Whether the sequence's logits are changed before the choice."""
    params = seq.params
    return seq.penalized or bool(params.logit_bias) or _below_min_tokens(seq) or seq.guide is not None


def _below_min_tokens(seq: Sequence) -> bool:
    num_output = seq.num_tokens - seq.num_prompt_tokens  # also those not read yet
    return num_output < seq.params.min_tokens and bool(seq.eos_token_ids or seq.stop_token_ids)


def _adjust(scores: Tensor, seq: Sequence, upload: Upload | None = None) -> None:
    """Penalties, bias, minimum length and grammar, in place on one row [V]."""
    params = seq.params
    upload = upload or Upload(scores.device)

    def integers(values: list[int]) -> Tensor:
        return upload([np.array(values, dtype=np.int64)])[0]

    if params.repetition_penalty != 1:
        seen = integers(sorted(set(seq.token_ids)))
        values = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if seq.output_counts and (params.frequency_penalty or params.presence_penalty):
        counts = integers(list(seq.output_counts.values())).to(scores.dtype)
        scores[integers(list(seq.output_counts))] -= counts * params.frequency_penalty + params.presence_penalty
    if params.logit_bias:
        [bias] = upload([np.array(list(params.logit_bias.values()), dtype=np.float32)])
        scores[integers(list(params.logit_bias))] += bias.to(scores.dtype)
    if seq.guide is not None:
        [allowed] = upload([_allowed_tokens(seq, seq.guide.allowed_tokens, scores.shape[0])])
        scores.masked_fill_(~allowed, float("-inf"))
    elif _below_min_tokens(seq):
        scores.index_fill_(0, integers(_end_tokens(seq, scores.shape[0])), float("-inf"))


def _end_tokens(seq: Sequence, vocab_size: int) -> list[int]:
    """The tokens that would end the sequence; users may name stop tokens that the vocabulary does not have."""
    return sorted(token_id for token_id in seq.eos_token_ids | seq.stop_token_ids if 0 <= token_id < vocab_size)


def _allowed_tokens(seq: Sequence, bits: bytes, vocab_size: int) -> Bools:
    """[V] whether the grammar allows a token; where it allows only an end, the minimum length has to give way."""
    allowed = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=vocab_size, bitorder="little").astype(np.bool_)
    if _below_min_tokens(seq):
        longer = allowed.copy()
        longer[_end_tokens(seq, vocab_size)] = False
        return longer if longer.any() else allowed
    return allowed


def _logprobs(logits: Tensor, tokens: Tensor, sampling: SamplingBatch, upload: Upload) -> list[Tensor]:
    """Of the unchanged logits, for rows that ask: [P] of the token, [P, K] of the likeliest, [P, K] their ids."""
    [rows] = upload([np.array(sampling.with_logprobs, dtype=np.int64)])
    logprobs = logits.index_select(0, rows).float().log_softmax(-1)
    most = max(sampling.seqs[row].params.logprobs or 0 for row in sampling.with_logprobs)
    top = logprobs.topk(min(most, logprobs.shape[1]))
    chosen = logprobs.gather(1, tokens.index_select(0, rows)[:, None])[:, 0]
    return [chosen, top.values, top.indices]
