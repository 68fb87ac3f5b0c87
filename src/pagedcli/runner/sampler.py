"""From logits to tokens. Each token is picked from the cumulative distribution by one uniform number, drawn from (seed,
sample index, position): neither the rest of the batch nor a resume changes a request's tokens.

Used by ModelRunner. Host and device never wait for each other here: tokens are read when they are needed.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from pagedcli.core.sampling_input import Ints, LogitChanges, SamplingInput
from pagedcli.core.scoring import TokenScore
from pagedcli.core.sequence import TokenLogprobs
from pagedcli.core.step_input import PromptLogprobs, PromptRows, StepTokens, TargetScores
from pagedcli.layers import sampling as kernels
from pagedcli.runner.device_state import Download, Upload

_ROWS = 64  # rows of prompt logits in memory at once
# 16 MB for 262,144 tokens: over 32 MB, memory would come from the system, which clears it, each time
_CPU_ROWS = 16


class PromptScores:
    """Log-probabilities of given tokens, and hidden states, being copied to the host."""

    def __init__(self, rows: PromptRows, states: Tensor, *scores: Tensor) -> None:
        """`states` [H, E]; `scores`, none without tokens: `chosen` [P]: of the tokens; `largest` [U]: the argmax of
        each row, empty if nobody asks for it; `values`, `ids` [U, K]: of its likeliest tokens."""
        self._rows = rows
        self._download = Download([states, *scores])

    def read(self) -> tuple[list[PromptLogprobs], list[TargetScores]]:
        """Wait for them."""
        states, *scored = self._download.wait()
        chosen, largest, values, ids = [tensor.tolist() for tensor in scored] or 4 * [[]]
        hidden = iter(states.numpy())
        token_ids, places = self._rows.token_ids.tolist(), self._rows.places.tolist()
        prompts: list[PromptLogprobs] = []
        targets: list[TargetScores] = []
        start = 0
        for piece in self._rows.pieces:
            if piece.pools:
                targets.append(TargetScores(piece.seq_id, piece.first, list(islice(hidden, piece.num_tokens))))
                continue
            given = range(start, start + piece.num_tokens)
            start += piece.num_tokens
            if piece.num_top is None:
                scores = [TokenScore(chosen[i], token_ids[i] == largest[places[i]]) for i in given]
                targets.append(TargetScores(piece.seq_id, piece.first, scores))
                continue
            tops = ((ids[place], values[place]) for place in places[given.start : given.stop])
            logprobs = [
                TokenLogprobs(token_ids[i], chosen[i], list(zip(*top, strict=True))[: piece.num_top])
                for i, top in zip(given, tops, strict=True)
            ]
            prompts.append(PromptLogprobs(piece.seq_id, piece.first, logprobs))
        return prompts, targets


class SampledTokens:
    """Tokens of a launched step, on the device and being copied to the host. A LaunchedStep."""

    def __init__(self, token_ids: Tensor, sampling: SamplingInput, logprobs: tuple[Tensor, ...] = ()) -> None:
        """`logprobs`: of the rows of sampling.scored, see _logprobs."""
        self.token_ids = token_ids  # [R] int64, on the device; INVALID where logits are NaN
        self._scored = sampling.scored
        self._download = Download([token_ids, *logprobs])
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
        token_ids, *logprobs = self._download.wait()
        tokens: list[int | None] = token_ids.tolist()
        found: dict[int, TokenLogprobs] = {}
        if logprobs:
            lists = (tensor.tolist() for tensor in logprobs)
            for (row, count), chosen, values, ids in zip(self._scored, *lists, strict=True):
                found[row] = TokenLogprobs(int(token_ids[row]), chosen, list(zip(ids, values, strict=True))[:count])
                if chosen != chosen:  # NaN among logits that a grammar masks
                    tokens[row] = None
        if kernels.INVALID in tokens:
            tokens = [None if token_id == kernels.INVALID else token_id for token_id in tokens]
        prompts, targets = ([], []) if self.prompt_scores is None else self.prompt_scores.read()
        return StepTokens(tokens, found, prompts, targets)


def sample_tokens(logits: Tensor, sampling: SamplingInput, upload: Upload, kept: "KeptTokens") -> SampledTokens:
    """The next tokens, on the device.

    Shapes:  logits [R, V], or any rows that sampling.logits_rows selects from; not modified.
    Changes: kept, to which the tokens of sequences with penalties are added.
    """
    if sampling.logits_rows is not None:
        logits = logits.index_select(0, upload([sampling.logits_rows])[0])
    original = logits
    if sampling.changes is not None:
        logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
        kept.change(logits, sampling.changes)
    if sampling.num_drawn:
        temperature, draws, *limits = upload(sampling.rows)
        kept_limits = kernels.SamplingLimits(*limits) if sampling.has_limits else None
        tokens = kernels.choose_tokens(logits, temperature, draws, kept_limits, num_drawn=sampling.num_drawn)
    else:
        tokens = kernels.likeliest_tokens(logits)
    if sampling.changes is not None:
        kept.add(tokens, sampling.changes)
    return SampledTokens(tokens, sampling, _logprobs(original, tokens, sampling, upload, kept))


def _logprobs(
    logits: Tensor, tokens: Tensor, sampling: SamplingInput, upload: Upload, kept: "KeptTokens"
) -> tuple[Tensor, ...]:
    """Log-probabilities of the rows of sampling.scored: [P] of the token, [P, K] of the likeliest, [P, K] their ids.
    Penalties, bias and minimum length change those of beams, not their logits, as in transformers' beam search."""
    if not sampling.scored:
        return ()
    [rows] = upload([np.array([row for row, _ in sampling.scored], dtype=np.int64)])
    logprobs = logits.index_select(0, rows).float().log_softmax(-1)
    if sampling.score_changes is not None:
        kept.change(logprobs, sampling.score_changes)
    values, ids = kernels.top_tokens(logprobs, max(count for _, count in sampling.scored))
    places = tokens.index_select(0, rows).clamp(min=0)[:, None]  # INVALID has none
    return logprobs.gather(1, places)[:, 0], values, ids


def score_prompts(
    hidden: Tensor, compute_logits: Callable[[Tensor], Tensor], rows: PromptRows, upload: Upload
) -> PromptScores:
    """Log-probabilities of given tokens, each row computed once, however many it predicts; and wanted hidden states.

    Shapes:  hidden [rows, E], of all rows that get logits.
    """
    scored, places, token_ids, pooled = upload([rows.scored, rows.places, rows.token_ids, rows.pooled])
    states, hidden = hidden.index_select(0, pooled).float(), hidden.index_select(0, scored)
    num_rows = _ROWS if hidden.is_cuda else _CPU_ROWS
    parts = []
    for start in range(0, hidden.shape[0], num_rows):
        logits = compute_logits(hidden[start : start + num_rows])
        logprobs = logits.float().log_softmax(-1)
        tokens = slice(*np.searchsorted(rows.places, [start, start + num_rows]).tolist())
        own = logprobs[places[tokens] - start, token_ids[tokens]]
        largest = kernels.likeliest_tokens(logits) if rows.has_targets else token_ids[:0]
        parts.append((own, largest, *kernels.top_tokens(logprobs, rows.num_top)))
    return PromptScores(rows, states, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


# ---------------------------------------------------------------------- changes of logits


class KeptTokens:
    """Which tokens each running sequence with a penalty has, and how often it generated them, on the device. The tables
    are made when the first such sequence starts."""

    def __init__(self, num_places: int, upload: Upload) -> None:
        self._num_places = num_places  # running sequences
        self._upload = upload
        self._seen: Tensor | None = None  # [places, V] uint8: 1 for tokens of prompt and output
        self._counts: Tensor | None = None  # [places, V] int32: of the output

    def change(self, scores: Tensor, changes: LogitChanges) -> None:
        """Apply the changes to scores [R, V], float32 and contiguous, in place."""
        vocab_size = scores.shape[1]
        self._start(changes, vocab_size)
        # users may name stop tokens outside the vocabulary
        inside = (changes.banned_ids >= 0) & (changes.banned_ids < vocab_size)
        arrays = [
            changes.repeated,
            changes.repeated_places,
            changes.repetition,
            changes.counted,
            changes.counted_places,
            changes.frequency,
            changes.presence,
            changes.biased * vocab_size + changes.biased_ids,
            changes.bias,
            np.array([row for row, _, _ in changes.guided], dtype=np.int64),
            _allowed_words(changes, vocab_size),
            (changes.banned * vocab_size + changes.banned_ids)[inside],
        ]
        uploaded = self._upload(arrays)
        repeated, counted, (biased, bias, guided, words, banned) = uploaded[:3], uploaded[3:7], uploaded[7:]
        if repeated[0].shape[0]:
            assert self._seen is not None, "its sequence has started"
            penalize = partial(kernels.penalize_repeated, scores, self._seen)
            self._penalize(penalize, self._seen, repeated, changes.repeated_guesses, counts=False)
        if counted[0].shape[0]:
            assert self._counts is not None, "its sequence has started"
            penalize = partial(kernels.penalize_counted, scores, self._counts)
            self._penalize(penalize, self._counts, counted, changes.counted_guesses, counts=True)
        flat = scores.view(-1)
        if biased.shape[0]:
            flat.index_copy_(0, biased, flat.index_select(0, biased) + bias)
        if guided.shape[0]:
            kernels.mask_tokens(scores, guided, words)
        if banned.shape[0]:
            flat.index_fill_(0, banned, float("-inf"))

    def _penalize(
        self, penalize: Callable[..., None], table: Tensor, of_rows: list[Tensor], guesses: Ints, *, counts: bool
    ) -> None:
        """Apply a penalty to rows, `of_rows` being its further arguments. A row after guesses sees them in the table:
        for these, the first rows of all sequences are penalized at once, then the second ones, and so on."""
        if not (guesses >= 0).any():
            penalize(*of_rows)
            return
        guessed, after = self._upload([guesses, np.flatnonzero(guesses >= 0)])
        places, flat, depths = of_rows[1], table.view(-1), _depths(guesses)
        at = places[after] * table.shape[1] + guessed[after]
        before = flat[at]
        for depth in range(int(depths.max()) + 1):
            [now] = self._upload([np.flatnonzero(depths == depth)])
            if depth:
                _add_one(table, places[now], guessed[now], counts=counts)
            penalize(*(each[now] for each in of_rows))
        flat[at] = before

    def add(self, tokens: Tensor, changes: LogitChanges) -> None:
        """Keep the tokens [R] that were sampled after these changes, but those after a wrong guess. INVALID, which ends
        its sequence, counts as 0."""
        if not changes.repeated.shape[0] and not changes.counted.shape[0]:
            return
        seen, seen_places, counted, counted_places = self._upload(
            [changes.repeated, changes.repeated_places, changes.counted, changes.counted_places]
        )
        if self._seen is not None and seen.shape[0]:
            kept = self._kept(seen_places, tokens.index_select(0, seen), changes.repeated_guesses)
            _add_one(self._seen, *kept, counts=False)
        if self._counts is not None and counted.shape[0]:
            kept = self._kept(counted_places, tokens.index_select(0, counted), changes.counted_guesses)
            _add_one(self._counts, *kept, counts=True)

    def _kept(self, places: Tensor, tokens: Tensor, guesses: Ints) -> tuple[Tensor, Tensor]:
        """The places and tokens of the rows before which all guesses are right."""
        if not (guesses >= 0).any():
            return places, tokens
        guessed, first = self._upload([guesses, np.arange(len(guesses)) - _depths(guesses)])
        is_wrong = torch.zeros_like(tokens)
        is_wrong[1:] = (guessed[1:] >= 0) & (guessed[1:] != tokens[:-1])
        num_wrong = is_wrong.cumsum(0)
        is_kept = num_wrong == num_wrong[first]
        return places[is_kept], tokens[is_kept]

    def _start(self, changes: LogitChanges, vocab_size: int) -> None:
        """Keep the tokens of sequences that have just started, in place of those of earlier sequences."""
        if not changes.started:
            return
        device = self._upload.device
        repeated, counted = set(changes.repeated_places.tolist()), set(changes.counted_places.tolist())
        if repeated and self._seen is None:
            self._seen = torch.zeros((self._num_places, vocab_size), dtype=torch.uint8, device=device)
        if counted and self._counts is None:
            self._counts = torch.zeros((self._num_places, vocab_size), dtype=torch.int32, device=device)
        tables = ((self._seen, repeated, False), (self._counts, counted, True))
        for table, places, counts in tables:
            started = [(place, ids[start * counts :]) for place, ids, start in changes.started if place in places]
            if table is None or not started:
                continue
            own = _integers([place for place, _ in started])
            ids = _integers(list(chain.from_iterable(ids for _, ids in started)))
            of_ids = np.repeat(own, [len(ids) for _, ids in started])
            cleared, at, token_ids = self._upload([own, of_ids, ids])
            table.index_fill_(0, cleared, 0)
            _add_one(table, at, token_ids, counts=counts)


def _depths(guesses: Ints) -> Ints:
    """How many guesses come before each row: -1 5 6 -1 -1 7 -> 0 1 2 0 0 1."""
    rows = np.arange(len(guesses))
    depths: Ints = rows - np.maximum.accumulate(np.where(guesses < 0, rows, 0))
    return depths


def _add_one(table: Tensor, places: Tensor, token_ids: Tensor, *, counts: bool) -> None:
    """Count tokens at their places, or mark them."""
    flat = places * table.shape[1] + token_ids.clamp(min=0)
    if counts:
        table.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=table.dtype))
    else:
        table.view(-1).index_fill_(0, flat, 1)


def _integers(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _allowed_words(changes: LogitChanges, vocab_size: int) -> Ints:
    """[G, V / 32] int32: a bit per token, lowest first. Where a grammar allows only end tokens, it overrides the
    minimum length."""
    words = np.zeros((len(changes.guided), -(-vocab_size // 32)), dtype=np.int32)
    for found, (_, bits, end_token_ids) in zip(words.view(np.uint8), changes.guided, strict=True):
        allowed = np.frombuffer(bits, dtype=np.uint8, count=min(len(bits), -(-vocab_size // 8)))
        found[: len(allowed)] = allowed
        if vocab_size % 8:
            found[vocab_size // 8] &= (1 << vocab_size % 8) - 1
        if end_token_ids:
            longer = found.copy()
            for token_id in end_token_ids:
                if 0 <= token_id < vocab_size:
                    longer[token_id // 8] &= ~np.uint8(1 << token_id % 8)
            if longer.any():
                found[:] = longer
    return words
