"""How the rows of logits of a step become tokens, as plain arrays.

Made by StepBuilder for the executor, which sends them to every rank with the step. Needs no torch and no device.
"""

import struct
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import xxhash

from pagedcli.core.beams import num_candidates
from pagedcli.core.sequence import Sequence, TokenMask

Ints = np.ndarray[tuple[int, ...], np.dtype[np.integer[Any]]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.floating[Any]]]

_is_greedy: Callable[[Sequence], bool] = attrgetter("is_greedy")


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Adjustments of logits before sampling, applied in the order of the fields. The executor keeps the tokens of each
    sequence that needs it, at the sequence's place, and adds those that it samples itself: a step that is launched
    before the last one is read needs no token from the host.

    A sequence with a draft has several rows, one after the other: each sees the guesses up to its own, and the token
    sampled from it is kept if these are right.
    """

    started: list[tuple[int, list[int], int]]  # place, its tokens, how many of these are the prompt: kept from now on
    repeated: Ints  # [P] int64, rows with a repetition penalty
    repeated_places: Ints  # [P] int64
    repeated_guesses: Ints  # [P] int64, the guess just before the row's token; -1: the first row of its sequence
    repetition: Floats  # [P] float32: divides logits of tokens in prompt and output, multiplies negative ones
    counted: Ints  # [Q] int64, rows with a frequency or presence penalty
    counted_places: Ints  # [Q] int64
    counted_guesses: Ints  # [Q] int64, as repeated_guesses
    frequency: Floats  # [Q] float32: subtracted per earlier generation
    presence: Floats  # [Q] float32: subtracted once
    biased: Ints  # [K] int64, rows
    biased_ids: Ints  # [K] int64
    bias: Floats  # [K] float32, added
    guided: list[tuple[int, TokenMask, list[int]]]  # row, allowed tokens, which of them end it too early
    banned: Ints  # [E] int64, rows
    banned_ids: Ints  # [E] int64, the end tokens of sequences below their minimum length

    @classmethod
    def of(cls, rows: list[tuple[int, Sequence, int]]) -> "LogitChanges | None":
        """For a token of each of these sequences, so many after its next one. None if there are none.

        Changes: num_kept_tokens of the sequences.
        """
        if not rows:
            return None
        started, guided, biased, banned = [], [], [], []
        for row, seq, ahead in rows:
            if seq.penalized and not ahead:
                if seq.is_beam or seq.num_kept_tokens != seq.num_tokens:  # another beam's tokens become a beam's own
                    assert not seq.num_pending_tokens, "a sequence starts with all its tokens on the host"
                    assert seq.row is not None, "a sampled sequence has a row"
                    started.append((seq.row, seq.token_ids.copy(), seq.num_prompt_tokens))
                seq.num_kept_tokens = seq.num_tokens + 1
            biased += [(row, token_id, bias) for token_id, bias in (seq.params.logit_bias or {}).items()]
            # requests may name any number; the executor knows which are in the vocabulary
            ends = (
                sorted(token_id for token_id in seq.end_token_ids if 0 <= token_id < 2**31)
                if _below_min_tokens(seq, ahead)
                else []
            )
            if seq.guide is not None:
                allowed = seq.draft.masks[ahead - 1] if seq.draft and ahead else seq.guide.allowed_tokens
                guided.append((row, allowed, ends))
            else:
                banned += [(row, token_id) for token_id in ends]
        repeated = [each for each in rows if each[1].params.repetition_penalty != 1]
        counted = [each for each in rows if each[1].params.frequency_penalty or each[1].params.presence_penalty]
        return cls(
            started=started,
            repeated=_integers(row for row, _, _ in repeated),
            repeated_places=_integers(seq.row for _, seq, _ in repeated),
            repeated_guesses=_guesses(repeated),
            repetition=_floats(seq.params.repetition_penalty for _, seq, _ in repeated),
            counted=_integers(row for row, _, _ in counted),
            counted_places=_integers(seq.row for _, seq, _ in counted),
            counted_guesses=_guesses(counted),
            frequency=_floats(seq.params.frequency_penalty for _, seq, _ in counted),
            presence=_floats(seq.params.presence_penalty for _, seq, _ in counted),
            biased=_integers(row for row, _, _ in biased),
            biased_ids=_integers(token_id for _, token_id, _ in biased),
            bias=_floats(bias for _, _, bias in biased),
            guided=guided,
            banned=_integers(row for row, _ in banned),
            banned_ids=_integers(token_id for _, token_id in banned),
        )


def _guesses(rows: list[tuple[int, Sequence, int]]) -> Ints:
    return _integers(seq.guesses[ahead - 1] if ahead else -1 for _, seq, ahead in rows)


def _integers(values: Iterable[Any]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def _floats(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float32)


class RowSampling(NamedTuple):
    """How one token is picked from each of R rows."""

    temperature: Floats  # [R] float32, 0: greedy
    uniform: Floats  # [R] float32 in [0, 1]
    top_k: Ints  # [R] int32, 0: all
    top_p: Floats  # [R] float32, 1: all
    min_p: Floats  # [R] float32, 0: all

    @classmethod
    def greedy(cls, num_rows: int) -> "RowSampling":
        """The likeliest token of each row."""
        zero, one = (np.full(num_rows, value, dtype=np.float32) for value in (0, 1))
        return cls(zero, zero.copy(), np.zeros(num_rows, dtype=np.int32), one, zero.copy())


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """How R rows of logits become tokens."""

    rows: RowSampling
    has_limits: bool  # whether a row has top-k, top-p or min-p
    changes: LogitChanges | None  # None: no row without beams needs any
    scored: Items[tuple[int, int]]  # rows with log-probabilities, and how many of the likeliest tokens; beams, too
    score_changes: LogitChanges | None  # changes of beams' log-probabilities; rows are numbered as in `scored`
    num_drawn: int  # rows that are not greedy
    logits_rows: Ints | None = None  # [R] int64, row of the logits for each token; None: its own

    @classmethod
    def of(cls, seqs: list[Sequence], logits_rows: list[int] | None = None) -> "SamplingInput":
        """For the next token of each sequence, after its pending ones. That of one that has ended is not read.

        A sequence that comes several times in a row has a draft: its further rows are for the tokens after that."""
        if logits_rows is None and all(map(_is_greedy, seqs)):
            return _greedy(len(seqs))
        rows = RowSampling.greedy(len(seqs))
        has_limits, changes, score_changes, scored, ahead = False, [], [], [], 0
        for row, seq in enumerate(seqs):
            if seq.is_greedy or seq.finish_reason is not None:
                continue
            ahead = ahead + 1 if row and seqs[row - 1] is seq else 0
            params = seq.params
            is_beam = params.beam_width is not None
            if is_beam:
                scored.append((row, max(num_candidates(seq), params.logprobs or 0)))
            elif params.logprobs is not None:
                scored.append((row, params.logprobs))
            if not (params.greedy or is_beam):
                rows.temperature[row] = params.temperature
                rows.uniform[row] = uniform(seq.seed, seq.sample_index, seq.num_tokens + ahead)
                if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                    has_limits = True
                    rows.top_k[row], rows.top_p[row] = max(params.top_k, 0), params.top_p
                    rows.min_p[row] = params.min_p
            if seq.penalized or params.logit_bias or seq.guide is not None or _below_min_tokens(seq, ahead):
                if is_beam:
                    score_changes.append((len(scored) - 1, seq, 0))
                else:
                    changes.append((row, seq, ahead))
        return cls(
            rows=rows,
            has_limits=has_limits,
            changes=LogitChanges.of(changes),
            scored=scored,
            score_changes=LogitChanges.of(score_changes),
            num_drawn=int(np.count_nonzero(rows.temperature)),
            logits_rows=None if logits_rows is None else np.array(logits_rows, dtype=np.int64),
        )

    @property
    def num_rows(self) -> int:
        """Number of tokens to sample."""
        return self.rows.temperature.shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether `rows` say everything."""
        return not (self.changes or self.scored) and self.logits_rows is None


@lru_cache(maxsize=4)  # steps in a row have as many rows, and nothing changes the arrays
def _greedy(num_rows: int) -> SamplingInput:
    """The likeliest token of each row."""
    return SamplingInput(RowSampling.greedy(num_rows), False, None, (), None, 0)


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of the arguments alone."""
    key = struct.pack("<qqq", seed, sample_index, position)
    return float(xxhash.xxh64_intdigest(key) >> 11) * 2.0**-53


def _below_min_tokens(seq: Sequence, ahead: int) -> bool:
    num_output = seq.num_tokens - seq.num_prompt_tokens  # including pending ones
    return num_output + ahead < seq.params.min_tokens and bool(seq.end_token_ids)
