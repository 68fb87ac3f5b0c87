"""From logits to tokens. Each token is picked from the cumulative distribution by one uniform number, drawn from (seed,
sample index, position): neither the rest of the batch nor a resume changes a request's tokens.

Used by ModelRunner. Host and device never wait for each other here: tokens are read when they are needed.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pagedcli.core.beams import Candidates
from pagedcli.core.sequence import TokenLogprobs
from pagedcli.core.step_input import PromptLogprobs, PromptRows, SamplingInput, StepTokens
from pagedcli.layers.sampling import INVALID, Limits, choose_tokens, top_tokens
from pagedcli.runner.device_state import Download, Upload
from pagedcli.runner.logit_changes import KeptTokens

_ROWS = 64  # rows of prompt logits in memory at once


class PromptScores:
    """Log-probabilities of prompt tokens, being copied to the host."""

    def __init__(self, rows: PromptRows, chosen: Tensor, values: Tensor, ids: Tensor) -> None:
        self._pieces = rows.pieces
        self._download = Download([chosen, values, ids, torch.from_numpy(rows.token_ids)])

    def read(self) -> list[PromptLogprobs]:
        """Wait for them."""
        chosen, values, ids, token_ids = (tensor.tolist() for tensor in self._download.wait())
        found, start = [], 0
        for piece in self._pieces:
            logprobs = [
                TokenLogprobs(token_ids[i], chosen[i], list(zip(ids[i], values[i], strict=True))[: piece.num_top])
                for i in range(start, start + piece.num_tokens)
            ]
            found.append(PromptLogprobs(piece.seq_id, piece.first, logprobs))
            start += piece.num_tokens
        return found


class SampledTokens:
    """Tokens of a launched step, on the device and being copied to the host. A LaunchedStep."""

    def __init__(
        self,
        token_ids: Tensor,
        sampling: SamplingInput,
        logprobs: tuple[Tensor, ...] = (),
        candidates: tuple[Tensor, ...] = (),
    ) -> None:
        """`logprobs`, `candidates`: of the rows that request them, as _logprobs and _candidates return them."""
        self.token_ids = token_ids  # [R] int64, on the device; INVALID where logits are NaN
        self._sampling = sampling
        self._num_logprobs = len(logprobs)
        self._download = Download([token_ids, *logprobs, *candidates])
        self.prompt_scores: PromptScores | None = None  # scores of the prompts in the same step

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def is_ready(self) -> bool:
        """Whether read returns at once."""
        return self._download.is_ready

    def read(self) -> StepTokens:
        """Wait for the tokens."""
        token_ids, *more = self._download.wait()
        logprobs, candidates = more[: self._num_logprobs], more[self._num_logprobs :]
        tokens: list[int | None] = token_ids.tolist()
        found: dict[int, TokenLogprobs] = {}
        if logprobs:
            chosen, values, ids = (tensor.tolist() for tensor in logprobs)
            sampling = self._sampling
            for place, (row, count) in enumerate(zip(sampling.with_logprobs, sampling.num_logprobs, strict=True)):
                top = list(zip(ids[place][:count], values[place][:count], strict=True))
                found[row] = TokenLogprobs(int(token_ids[row]), chosen[place], top)
                if chosen[place] != chosen[place]:  # NaN among logits that a grammar masks
                    tokens[row] = None
        if INVALID in tokens:
            tokens = [None if token_id == INVALID else token_id for token_id in tokens]
        prompt_logprobs = () if self.prompt_scores is None else self.prompt_scores.read()
        return StepTokens(tokens, found, prompt_logprobs, self._read_candidates(candidates))

    def _read_candidates(self, tensors: list[Tensor]) -> dict[int, Candidates]:
        if not tensors:
            return {}
        values, ids = (tensor.tolist() for tensor in tensors)
        rows = zip(self._sampling.beams, self._sampling.num_candidates, values, ids, strict=True)
        return {row: list(zip(ids[:count], values[:count], strict=True)) for row, count, values, ids in rows}


def sample_tokens(logits: Tensor, sampling: SamplingInput, upload: Upload, kept: KeptTokens) -> SampledTokens:
    """The next tokens, on the device.

    Shapes:  logits [R, V], or any rows that sampling.logits_rows selects from; not modified.
    Changes: kept, to which the tokens of sequences with penalties are added.
    """
    if sampling.logits_rows is not None:
        logits = logits.index_select(0, upload([sampling.logits_rows])[0])
    temperature, draws, *limits = upload(sampling.rows)
    original = logits
    if sampling.changes is not None:
        logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
        kept.change(logits, sampling.changes)
    num_drawn = int(np.count_nonzero(sampling.rows.temperature))
    tokens = choose_tokens(
        logits, temperature, draws, Limits(*limits) if sampling.has_limits else None, num_drawn=num_drawn
    )
    if sampling.changes is not None:
        kept.add(tokens, sampling.changes)
    logprobs = _logprobs(original, tokens, sampling, upload) if sampling.with_logprobs else ()
    candidates = _candidates(original, sampling, upload, kept) if sampling.beams else ()
    return SampledTokens(tokens, sampling, logprobs, candidates)


def _logprobs(logits: Tensor, tokens: Tensor, sampling: SamplingInput, upload: Upload) -> tuple[Tensor, ...]:
    """Log-probabilities for rows that request them: [P] of the token, [P, K] of the likeliest, [P, K] their ids."""
    [rows] = upload([np.array(sampling.with_logprobs, dtype=np.int64)])
    logprobs = logits.index_select(0, rows).float().log_softmax(-1)
    values, ids = top_tokens(logprobs, max(sampling.num_logprobs))
    places = tokens.index_select(0, rows).clamp(min=0)[:, None]  # INVALID has none
    return logprobs.gather(1, places)[:, 0], values, ids


def _candidates(logits: Tensor, sampling: SamplingInput, upload: Upload, kept: KeptTokens) -> tuple[Tensor, ...]:
    """The next tokens of beams: log-probabilities [P, K], likeliest first, and ids [P, K]. Penalties, bias and minimum
    length change log-probabilities, not logits, as in transformers' beam search."""
    [rows] = upload([np.array(sampling.beams, dtype=np.int64)])
    logprobs = logits.index_select(0, rows).float().log_softmax(-1)
    if sampling.beam_changes is not None:
        kept.change(logprobs, sampling.beam_changes)
    return top_tokens(logprobs, max(sampling.num_candidates))


def score_prompts(
    hidden: Tensor, compute_logits: Callable[[Tensor], Tensor], rows: PromptRows, upload: Upload
) -> PromptScores:
    """Log-probabilities of the prompt tokens that follow.

    Shapes:  hidden [R + P, E], of all rows that get logits.
    """
    places, token_ids = upload([rows.scored, rows.token_ids])
    hidden = hidden.index_select(0, places)
    num_top = max(piece.num_top for piece in rows.pieces)
    parts = []
    for start in range(0, hidden.shape[0], _ROWS):
        logprobs = compute_logits(hidden[start : start + _ROWS]).float().log_softmax(-1)
        own = logprobs.gather(1, token_ids[start : start + _ROWS, None])[:, 0]
        parts.append((own, *top_tokens(logprobs, num_top)))
    return PromptScores(rows, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
