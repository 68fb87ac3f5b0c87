"""A step as plain arrays: what a rank needs to run it and to sample its tokens, small enough to send to a process.

Built by StepBuilder on the rank that schedules, read by every Executor: ModelRunner runs a model on one device,
WorkerGroup on several; a simulation computes nothing. Needs no torch and no device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from pagedcli.core.limits import Limits
from pagedcli.core.sampling_input import Ints, SamplingInput
from pagedcli.core.sequence import Sequence, TokenLogprobs
from pagedcli.core.snapshots import HeldSlots
from pagedcli.core.steps import ScheduledStep

_state: Callable[[Sequence], HeldSlots] = attrgetter("state")


# ---------------------------------------------------------------------- what goes in


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Tokens of one sequence to score in a step."""

    seq_id: int
    first: int  # position of the first of these tokens, or its index among the targets of the sequence
    num_tokens: int
    num_top: int | None  # likeliest tokens at each position; None: the tokens are targets
    pools: bool = False  # their hidden states are wanted instead, and they are not among the P tokens


@dataclass(frozen=True, slots=True)
class PromptRows:
    """P given tokens to score, among the rows of a step that get logits."""

    sampled: Ints  # [R] int64, which of these rows get a token
    scored: Ints  # [U] int64, which of them predict a given token, ascending
    pooled: Ints  # [H] int64, which of them have wanted hidden states
    places: Ints  # [P] int64, for each token which of the U rows predicts it, ascending
    token_ids: Ints  # [P] int64
    pieces: tuple[PromptPiece, ...]  # the P tokens, in order, and those that are pooled

    @property
    def num_top(self) -> int:
        """Likeliest tokens of each row."""
        return max((piece.num_top or 0 for piece in self.pieces), default=0)

    @property
    def has_targets(self) -> bool:
        """Whether it matters which tokens have the largest logits."""
        return any(piece.num_top is None for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: T new tokens of B sequences, of which R rows get logits."""

    input_ids: Ints  # [T] int64, 0 where the id is still on the device
    source_rows: Ints | None  # [T] int64, row of the last launched step that sampled this token; -1: it is in input_ids
    positions: Ints  # [T] int64
    slots: Ints  # [groups, T] int32, -1: K and V are in the cache already
    cu_q: Ints  # [B+1] int32
    num_tokens: Ints  # [B] int32, tokens in the cache after this step
    table_rows: Ints  # [B] int64, each sequence's row of the persistent block tables
    table_index: Ints  # [K] int64, flat indices into those tables that changed since the last step
    table_values: Ints  # [K] int32, the block ids there now
    logits_rows: Ints | None  # [R] int64, which of the T rows get logits; None: all
    copies: tuple[tuple[int, int], ...]  # (source, copy) blocks, copied first and in this order
    max_new: int
    max_total: int
    prompt_rows: PromptRows | None = None  # rows of logits that score a prompt
    # slots of recurrent state; None: the model has none
    state_reads: Ints | None = None  # [B] int32, slot of each sequence's state before the step; -1: it starts from zero
    state_writes: Ints | None = None  # [B] int32, slot of its state after the step; no other sequence uses it then
    # [B] int32, number of rows up to the last one of each sequence that its state sees: no guess. None: all of them
    state_ends: Ints | None = None

    @property
    def num_seqs(self) -> int:
        return self.num_tokens.shape[0]

    @property
    def pure_decode(self) -> bool:
        """Whether every sequence has one new token and every row gets logits, as CUDA graphs require."""
        return self.max_new == 1 and self.logits_rows is None and not self.copies


# ---------------------------------------------------------------------- what comes out


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of one prompt."""

    seq_id: int
    first: int  # position of the first token
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class TargetScores:
    """Scores of consecutive targets of one sequence."""

    seq_id: int
    first: int  # index of the first one
    scores: list[Any]  # TokenScore, or hidden states [E] float32


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of one step, on the host."""

    token_ids: Items[int | None]  # [R]; None: the row's logits are NaN
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # row -> logprobs, if requested, and of beams
    prompt_logprobs: Items[PromptLogprobs] = ()
    target_scores: Items[TargetScores] = ()


class TokensToRead(Protocol):
    """The tokens of a step that may still be running."""

    def read(self) -> StepTokens:
        """Wait for the tokens."""


class Executor(Protocol):
    """Runs steps in the order in which they are launched."""

    def launch(self, step: StepInput, sampling: SamplingInput) -> TokensToRead:
        """Start a step without waiting for its tokens. Where `step.source_rows` says so, its input ids are the tokens
        of the step launched before, which may not have been read."""

    def launch_model(self, step: StepInput) -> Callable[[SamplingInput], TokensToRead]:
        """Start a step whose sampling needs tokens that have not been read. Returns what samples it, which is called
        before the next step is launched, or never."""


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device whose tokens have not been read."""

    seqs: list[Sequence]  # the sequence of each row of tokens
    tokens: TokensToRead | None  # None: `sample` picks them
    scored: dict[int, Sequence]  # seq_id -> a sequence with given tokens to score in this step
    computed: list[Sequence]  # sequences with targets of which it computes the last token
    drafted: list[Sequence]  # sequences whose draft it checks: they have further rows
    has_beams: bool  # the next step depends on which beams are kept
    sample: Callable[[SamplingInput], TokensToRead] | None = None

    def rows_that_count(self, token_ids: Items[int | None]) -> Iterable[tuple[int, Sequence, int | None]]:
        """Each row with its sequence and token, but those after a wrong guess."""
        rows = zip(range(len(self.seqs)), self.seqs, token_ids, strict=True)
        return self._up_to_wrong_guesses(rows) if self.drafted else rows

    def _up_to_wrong_guesses(
        self, rows: Iterable[tuple[int, Sequence, int | None]]
    ) -> Iterator[tuple[int, Sequence, int | None]]:
        """With the draft 5 6 7 a sequence has four rows. If they say 5 6 9 2, the token of the last one was drawn as if
        7 had come before, not 9: the sequence gets 5 6 9."""
        place, is_right = 0, True  # the row's place in the draft, whether all guesses before it were right
        for row, seq, token_id in rows:
            if not row or self.seqs[row - 1] is not seq:
                place, is_right = 0, True
            if is_right:
                yield row, seq, token_id
                is_right = place < len(seq.guesses) and token_id == seq.guesses[place]
            place += 1

    @property
    def rows(self) -> dict[int, int]:
        """seq_id -> row of the tokens."""
        return {seq.seq_id: row for row, seq in enumerate(self.seqs)}


# ---------------------------------------------------------------------- building


class Builder(Protocol):
    """Turns a scheduled step into the inputs of an executor."""

    def build(self, work: ScheduledStep, source_rows: dict[int, int] | None = None) -> tuple[StepInput, list[Sequence]]:
        """The input of a step, and the sequence of each row of its logits: one with a draft has 1 + so many rows.

        `source_rows`: seq_id -> row of the step in flight, for tokens not read yet.
        """

    def sampling(self, seqs: list[Sequence], logits_rows: list[int] | None) -> SamplingInput:
        """How the sequences get their tokens, forks included. `logits_rows`: the row of each; None: its own."""


class StepBuilder:
    """Builds step inputs from persistent block tables; only changed entries are written and sent."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.block_size = limits.block_size
        self._groups = np.arange(len(limits.groups))[:, None]
        self._tables = np.zeros(limits.table_dimensions, dtype=np.int32)
        self._one_each = np.arange(len(self._tables) + 1, dtype=np.int32)  # cu_q of sequences with one new token each
        self._no_changes = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)  # changes of tables
        self._last: tuple[list[Sequence], StepInput] | None = None  # the last step and its sequences, if all decoded

    def build(self, work: ScheduledStep, source_rows: dict[int, int] | None = None) -> tuple[StepInput, list[Sequence]]:
        seqs = work.seqs
        before, self._last = self._before(work), None
        table_index, table_values = self._sync_tables(work.changed) if work.changed else self._no_changes
        state_reads, state_writes = _state_slots(seqs)
        of_seqs: dict[str, Any] = {
            "table_index": table_index,
            "table_values": table_values,
            "copies": tuple(work.copies),
            "state_reads": state_reads,
            "state_writes": state_writes,
        }
        if work.is_decode:
            step = self._decode(work, before, source_rows, of_seqs)
            self._last = seqs, step
            return step, seqs
        rows = np.array([seq.row for seq in seqs], dtype=np.int64)
        computed = np.array([seq.num_computed_tokens for seq in seqs], dtype=np.int64)
        cached = np.array([seq.num_cached_tokens for seq in seqs], dtype=np.int64)
        new = np.array(work.num_new_tokens, dtype=np.int64)
        if work.num_behind:
            behind = np.array([seq.num_behind_tokens for seq in seqs], dtype=np.int64)
            cached = np.where(behind > 0, computed, cached)
            computed, new = computed - behind, new + behind
        total = computed + new
        cu_q = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
        num_tokens = int(cu_q[-1])
        positions = np.arange(num_tokens) + np.repeat(computed - cu_q[:-1], new)
        slots = self._slots(np.repeat(rows, new), positions)
        slots[:, positions < np.repeat(cached, new)] = -1  # already in shared blocks
        sampled: list[Sequence] = []
        wanted: list[int] = []
        for seq, end, end_row in zip(seqs, total.tolist(), cu_q[1:].tolist(), strict=True):
            num_rows = 0 if seq.targets is not None else seq.num_logits(end)
            sampled += [seq] * num_rows
            wanted += range(end_row - num_rows, end_row)
        logits_rows = None if len(wanted) == num_tokens else np.array(wanted, dtype=np.int64)
        scored = None
        if logits_rows is not None:
            scored = prompt_rows(seqs, computed, new, cu_q[:-1], logits_rows)
        step = StepInput(
            **of_seqs,
            table_rows=rows,
            input_ids=_input_ids(work),
            source_rows=_source_rows(seqs, cu_q, num_tokens, source_rows),
            positions=positions,
            slots=slots,
            cu_q=cu_q,
            num_tokens=total.astype(np.int32),
            logits_rows=logits_rows if scored is None else scored[0],
            max_new=int(new.max()),
            max_total=int(total.max()),
            prompt_rows=None if scored is None else scored[1],
            state_ends=cu_q[1:] - _num_unseen(seqs) if work.drafted and state_writes is not None else None,
        )
        return step, sampled

    def sampling(self, seqs: list[Sequence], logits_rows: list[int] | None) -> SamplingInput:
        return SamplingInput.of(seqs, logits_rows)

    def _before(self, work: ScheduledStep) -> StepInput | None:
        """The step before, if each of its sequences decoded and is in this step, with one token more."""
        if self._last is None or self._last[0] != work.seqs:
            return None
        # one that has just started, after a step that failed, is in any row and at any place
        return self._last[1] if all(seq.synced_blocks for seq in work.changed) else None

    def _decode(
        self, work: ScheduledStep, before: StepInput | None, source_rows: dict[int, int] | None, of_seqs: dict[str, Any]
    ) -> StepInput:
        """A step of most decodes, with little work on the host: after each step the processor's caches hold the model,
        and the first use of anything, an array operation included, takes 10 to 60 us. `before`: see _before."""
        seqs = work.seqs
        rows: Ints
        positions: Ints
        if before is None:
            rows = np.array([seq.row for seq in seqs], dtype=np.int64)
            positions = np.array([seq.num_computed_tokens for seq in seqs], dtype=np.int64)
        else:
            rows, positions = before.table_rows, before.positions + 1
        cu_q = self._one_each[: len(seqs) + 1]
        num_tokens = positions.astype(np.int32)
        num_tokens += 1
        return StepInput(
            **of_seqs,
            table_rows=rows,
            input_ids=np.array([0 if seq.num_pending_tokens else seq.token_ids[-1] for seq in seqs], dtype=np.int64),
            source_rows=_source_rows(seqs, cu_q, len(seqs), source_rows),
            positions=positions,
            slots=self._slots(rows, positions) if before is None or work.changed else before.slots + 1,
            cu_q=cu_q,
            num_tokens=num_tokens,
            logits_rows=None,
            max_new=1,
            max_total=int(num_tokens.max()) if before is None else before.max_total + 1,
        )

    def _slots(self, rows: Ints, positions: Ints) -> Ints:
        """[groups, T] int32, where K and V of tokens go."""
        spans = positions // self.block_size
        slots: Ints = self._tables[rows, spans * len(self._groups) + self._groups]
        slots *= self.block_size
        slots += (positions - spans * self.block_size).astype(np.int32)
        return slots

    def _sync_tables(self, seqs: list[Sequence]) -> tuple[Ints, Ints]:
        """Update the persistent rows; returns the indices and values of changed entries."""
        width = self._tables.shape[1]
        index: list[int] = []
        values: list[int] = []
        for seq in seqs:
            first, end = seq.synced_blocks, len(seq.block_table)
            if first < end:
                assert seq.row is not None, "a scheduled sequence has a row"
                values += known_ids(seq.block_table[first:])
                index += range(seq.row * width + first, seq.row * width + end)
                seq.synced_blocks = end
        flat_index, flat_values = np.array(index, dtype=np.int64), np.array(values, dtype=np.int32)
        self._tables.reshape(-1)[flat_index] = flat_values
        return flat_index, flat_values


def _state_slots(seqs: list[Sequence]) -> tuple[Ints | None, Ints | None]:
    """The slots of recurrent state that each sequence reads and writes."""
    if seqs[0].state is None:
        return None, None
    held = list(map(_state, seqs))
    reads = np.array([-1 if (slot_id := each.read) is None else slot_id for each in held], dtype=np.int32)
    return reads, np.array([each.write for each in held], dtype=np.int32)


def _num_unseen(seqs: list[Sequence]) -> Ints:
    """The guesses that are not for the state of each sequence."""
    sees_all = (seq.state is not None and seq.state.sees_draft for seq in seqs)
    return np.array([0 if sees else len(seq.guesses) for seq, sees in zip(seqs, sees_all, strict=True)], dtype=np.int32)


def known_ids(entries: list[int | None]) -> list[int]:
    """Block ids for the entries of a block table, of which the last one is a block. A released entry gets the id of the
    next block: backends that read whole tiles read the tokens that a window hides, too, before they mask them, and must
    find written slots there. [None, None, 4, 7] -> [4, 4, 4, 7]."""
    ids: list[int] = []
    for block_id in reversed(entries):
        ids.append(ids[-1] if block_id is None else block_id)
    return ids[::-1]


def _input_ids(work: ScheduledStep) -> Ints:
    """[T] int64, 0 for pending tokens."""
    ids: list[int] = []
    for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
        first, end = seq.num_computed_tokens, seq.num_computed_tokens + num_new
        if work.num_behind:
            first -= seq.num_behind_tokens
        ids += [*seq.token_ids[first:end], *seq.guesses] or [0]  # only the single token of a decode can be pending
    return np.array(ids, dtype=np.int64)


def _source_rows(seqs: list[Sequence], cu_q: Ints, num_tokens: int, rows: dict[int, int] | None) -> Ints | None:
    if rows is None:
        return None
    pending = [b for b, seq in enumerate(seqs) if seq.num_pending_tokens]
    if not pending:
        return None
    source = np.full(num_tokens, -1, dtype=np.int64)
    source[cu_q[1:][pending] - 1] = [rows[seqs[b].seq_id] for b in pending]
    return source


def prompt_rows(
    seqs: list[Sequence], computed: Ints, new: Ints, starts: Ints, sampled: Ints
) -> tuple[Ints, PromptRows] | None:
    """The rows of a step that get logits, ascending, and what to score there. None if there is nothing.

    `computed`, `new`: tokens per sequence before the step and in it. `starts`: first row of each sequence. `sampled`:
    rows that get a token, ascending.
    """
    pieces: list[PromptPiece] = []
    rows, pooled = list[int](), list[int]()
    token_ids: list[int] = []
    for seq, start, done, count in zip(seqs, starts.tolist(), computed.tolist(), new.tolist(), strict=True):
        if seq.targets is not None:
            first, positions = seq.targets.wanted(done, done + count)
            num_top, given = None, seq.targets.token_ids
        else:
            num_top, given = seq.params.prompt_logprobs, seq.token_ids
            end = done if num_top is None or seq.sample_index else min(done + count, seq.num_prompt_tokens - 1)
            first, positions = done + 1, list(range(done, end))
        if positions:
            pools = seq.targets is not None and seq.targets.pools
            pieces.append(PromptPiece(seq.seq_id, first, len(positions), num_top, pools))
            (pooled if pools else rows).extend(start + position - done for position in positions)
            token_ids += [] if pools else given[first : first + len(positions)]
    if not pieces:
        return None
    scored, places = np.unique(np.array(rows, dtype=np.int64), return_inverse=True)
    states, ids = np.array(pooled, dtype=np.int64), np.array(token_ids, dtype=np.int64)
    wanted = np.union1d(np.union1d(sampled, scored), states).astype(np.int64)
    place = wanted.searchsorted
    return wanted, PromptRows(place(sampled), place(scored), place(states), places, ids, tuple(pieces))
