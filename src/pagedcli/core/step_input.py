"""A scheduled step as plain arrays: everything a rank needs to run it, small enough to send to other processes.

Built by StepBuilder on the rank that schedules, read by every ModelRunner. Needs no torch and no device.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedcli.core.limits import Limits
from pagedcli.core.prompt_rows import PromptRows, prompt_rows
from pagedcli.core.scheduler import ScheduledStep
from pagedcli.core.sequence import Sequence

Ints = np.ndarray[tuple[int, ...], np.dtype[np.integer[Any]]]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.floating[Any]]]


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
    prompt_rows: PromptRows | None = None  # which of the rows with logits score a prompt

    @property
    def num_seqs(self) -> int:
        return self.num_tokens.shape[0]

    @property
    def pure_decode(self) -> bool:
        """Whether every sequence has one new token and every row gets logits, as CUDA graphs require."""
        return self.max_new == 1 and self.logits_rows is None and not self.copies


class StepBuilder:
    """Builds step inputs from persistent block tables; only changed entries are written and sent."""

    def __init__(self, limits: Limits) -> None:
        self.block_size = limits.block_size
        self._groups = np.arange(len(limits.windows))[:, None]
        self._tables = np.zeros(table_dimensions(limits), dtype=np.int32)
        self._one_each = np.arange(len(self._tables) + 1, dtype=np.int32)  # cu_q of sequences with one new token each

    def build(self, work: ScheduledStep, source_rows: dict[int, int] | None = None) -> tuple[StepInput, list[Sequence]]:
        """The input of a step, and the sequences that get a token, in the order of its logits.

        `source_rows`: seq_id -> row of the step in flight, for tokens not read yet.
        """
        if work.is_decode:
            return self._decode(work, source_rows), work.seqs
        seqs = work.seqs
        table_index, table_values = self._sync_tables(work.changed)
        rows = np.array([seq.row for seq in seqs], dtype=np.int64)
        computed = np.array([seq.num_computed_tokens for seq in seqs], dtype=np.int64)
        cached = np.array([seq.num_cached_tokens for seq in seqs], dtype=np.int64)
        new = np.array(work.num_new_tokens, dtype=np.int64)
        total = computed + new
        cu_q = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
        num_tokens = int(cu_q[-1])
        positions = np.arange(num_tokens) + np.repeat(computed - cu_q[:-1], new)
        slots = self._slots(np.repeat(rows, new), positions)
        slots[:, positions < np.repeat(cached, new)] = -1  # already in shared blocks
        ends = zip(seqs, total.tolist(), strict=True)
        sampled = [row for row, (seq, end) in enumerate(ends) if end == seq.num_tokens]
        logits_rows = None if len(sampled) == num_tokens else cu_q[1:][sampled].astype(np.int64) - 1
        scored = None
        if logits_rows is not None:
            scored = prompt_rows(seqs, computed, new, cu_q[:-1], logits_rows)
        step = StepInput(
            input_ids=_input_ids(work),
            source_rows=_source_rows(seqs, cu_q, num_tokens, source_rows),
            positions=positions,
            slots=slots,
            cu_q=cu_q,
            num_tokens=total.astype(np.int32),
            table_rows=rows,
            table_index=table_index,
            table_values=table_values,
            logits_rows=logits_rows if scored is None else scored[0],
            copies=tuple(work.copies),
            max_new=int(new.max()),
            max_total=int(total.max()),
            prompt_rows=None if scored is None else scored[1],
        )
        return step, [seqs[row] for row in sampled]

    def _decode(self, work: ScheduledStep, source_rows: dict[int, int] | None) -> StepInput:
        """A step of most decodes, with little work on the host: after each step the processor's caches hold the model,
        and the first use of anything, an array operation included, takes 10 to 60 us."""
        seqs = work.seqs
        table_index, table_values = self._sync_tables(work.changed)
        rows = np.array([seq.row for seq in seqs], dtype=np.int64)
        positions = np.array([seq.num_computed_tokens for seq in seqs], dtype=np.int64)
        cu_q = self._one_each[: len(seqs) + 1]
        num_tokens = positions.astype(np.int32)
        num_tokens += 1
        return StepInput(
            input_ids=np.array([0 if seq.num_pending_tokens else seq.token_ids[-1] for seq in seqs], dtype=np.int64),
            source_rows=_source_rows(seqs, cu_q, len(seqs), source_rows),
            positions=positions,
            slots=self._slots(rows, positions),
            cu_q=cu_q,
            num_tokens=num_tokens,
            table_rows=rows,
            table_index=table_index,
            table_values=table_values,
            logits_rows=None,
            copies=tuple(work.copies),
            max_new=1,
            max_total=int(num_tokens.max()),
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


def known_ids(entries: list[int | None]) -> list[int]:
    """Block ids for entries of a block table that end with a block. Where no token looks is the next block: some
    backends read whole tiles and mask what a window hides, so that slots there must have been written."""
    ids: list[int] = []
    for block_id in reversed(entries):
        ids.append(ids[-1] if block_id is None else block_id)
    return ids[::-1]


def table_dimensions(limits: Limits) -> tuple[int, int]:
    """Rows and columns of the block tables of all running sequences."""
    return limits.max_num_seqs, limits.tables.num_entries(limits.max_model_len)


def _input_ids(work: ScheduledStep) -> Ints:
    """[T] int64, 0 for pending tokens."""
    ids: list[int] = []
    for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
        chunk = seq.token_ids[seq.num_computed_tokens : seq.num_computed_tokens + num_new]
        ids += chunk or [0]  # only the single token of a decode can be pending
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
