"""Sampling parameters of a step as plain arrays: everything that the sampler needs from the sequences.

Built by EngineCore at each launch; the sampler turns it into tensors. Needs no torch.
"""

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from pagedcli.core.beams import num_candidates
from pagedcli.core.sequence import Sequence
from pagedcli.core.step_input import Floats, Ints


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of the arguments alone."""
    key = struct.pack("<qqq", seed, sample_index, position)
    return float(xxhash.xxh64_intdigest(key) >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class LogitChange:
    """Adjustments of one row of logits before sampling, applied in the order of the fields."""

    row: int
    seen_token_ids: list[int]  # of prompt and output, for the repetition penalty
    repetition_penalty: float  # divides, or multiplies if negative; 1: none
    output_counts: dict[int, int]  # generated token id -> times, for the next two
    frequency_penalty: float  # subtracted per earlier generation
    presence_penalty: float  # subtracted once
    bias: dict[int, float]  # token id -> added
    allowed: bytes | None  # a bit per token id, lowest bit first: what the grammar allows; None: no grammar
    end_token_ids: list[int]  # forbidden until the minimum length, unless a grammar allows nothing else

    @classmethod
    def of(cls, row: int, seq: Sequence) -> "LogitChange":
        params = seq.params
        repeats = params.repetition_penalty != 1
        return cls(
            row=row,
            seen_token_ids=sorted(set(seq.token_ids)) if repeats else [],
            repetition_penalty=params.repetition_penalty,
            output_counts=dict(seq.output_counts) if params.frequency_penalty or params.presence_penalty else {},
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            bias=params.logit_bias or {},
            allowed=None if seq.guide is None else seq.guide.allowed_tokens,
            end_token_ids=sorted(seq.end_token_ids) if _below_min_tokens(seq) else [],
        )


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """How R rows of logits become tokens."""

    temperature: Floats  # [R] float32, 0: greedy
    uniform: Floats  # [R] float32 in [0, 1]
    limited: list[int]  # K rows with top-k, top-p or min-p
    top_k: Ints  # [K] int64, 0: all
    top_p: Floats  # [K] float32
    min_p: Floats  # [K] float32
    changes: list[LogitChange]
    with_logprobs: list[int]  # rows
    num_logprobs: list[int]  # for each of these, how many of the likeliest tokens
    beams: list[int]  # rows
    num_candidates: list[int]  # for each of these, how many next tokens
    logits_rows: Ints | None = None  # [R] int64, row of the logits for each token; None: its own

    @classmethod
    def of(cls, seqs: list[Sequence], logits_rows: list[int] | None = None) -> "SamplingInput":
        """For the next token of each sequence, after its pending ones."""
        temperature, draws = (np.zeros(len(seqs), dtype=np.float32) for _ in range(2))
        limited, changes, with_logprobs, beams = [], [], [], []
        for row, seq in enumerate(seqs):
            if seq.is_greedy:
                continue
            params = seq.params
            if seq.is_beam:
                beams.append(row)
            elif not params.greedy:
                temperature[row] = params.temperature
                draws[row] = uniform(seq.seed, seq.sample_index, seq.num_tokens)
                if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                    limited.append(row)
            if seq.penalized or params.logit_bias or seq.guide is not None or _below_min_tokens(seq):
                changes.append(LogitChange.of(row, seq))
            if params.logprobs is not None and not seq.is_beam:
                with_logprobs.append(row)
        return cls(
            temperature=temperature,
            uniform=draws,
            limited=limited,
            top_k=np.array([max(seqs[row].params.top_k, 0) for row in limited], dtype=np.int64),
            top_p=np.array([seqs[row].params.top_p for row in limited], dtype=np.float32),
            min_p=np.array([seqs[row].params.min_p for row in limited], dtype=np.float32),
            changes=changes,
            with_logprobs=with_logprobs,
            num_logprobs=[seqs[row].params.logprobs or 0 for row in with_logprobs],
            beams=beams,
            num_candidates=[max(num_candidates(seqs[row]), seqs[row].params.logprobs or 0) for row in beams],
            logits_rows=None if logits_rows is None else np.array(logits_rows, dtype=np.int64),
        )

    @property
    def num_rows(self) -> int:
        """Number of tokens to sample."""
        return self.temperature.shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether sampling needs only temperature and the uniform number."""
        return not (self.limited or self.changes or self.with_logprobs or self.beams) and self.logits_rows is None


def _below_min_tokens(seq: Sequence) -> bool:
    num_output = seq.num_tokens - seq.num_prompt_tokens  # including pending ones
    return num_output < seq.params.min_tokens and bool(seq.end_token_ids)
