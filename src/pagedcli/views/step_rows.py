"""The pool of each step as rows of tables: steps, sequences, blocks, lookups; for models with several groups of layers,
groups; for those with recurrent state, slots. A view; writes no files.

Used by --dump-kv FILE. Every column is declared here, with its type and meaning; files and docs follow.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any, Literal

import pagedcli.events as ev
from pagedcli.errors import UsageError
from pagedcli.trace.dispatch import View
from pagedcli.trace.state import PoolState, SeqState
from pagedcli.views.cache_groups import group_uses
from pagedcli.views.state_slots import state_slots
from pagedcli.views.stats import ROLLING_STEPS, RunStats

Row = tuple[Any, ...]
Write = Callable[[str, Iterable[Row]], None]  # the name of a table, and rows of it


@dataclass(frozen=True, slots=True)
class StepChoice:
    """Which steps to show: from `first` to `last` (None: the end), and of these every n-th."""

    first: int = 0
    last: int | None = None
    every: int = 1

    @classmethod
    def parse(cls, text: str | None, every: int = 1) -> "StepChoice":
        """`100-120`, `100-` or `100`; None: all. Raises: UsageError."""
        if text is None:
            return cls(every=every)
        first, dash, last = text.partition("-")
        if not first.isdecimal() or not (last.isdecimal() or last == "") or int(last or first) < int(first):
            raise UsageError(f"--steps is {text!r}, but must be A-B", hint="for example 100-120, 100- or 100")
        end = int(last) if last else None if dash else int(first)
        return cls(int(first), end, every)

    def has(self, step: int) -> bool:
        """Whether it is in the range."""
        return self.first <= step and (self.last is None or step <= self.last)

    def shows(self, step: int) -> bool:
        return self.has(step) and (step - self.first) % self.every == 0

    def is_over(self, step: int) -> bool:
        """Whether no later step is in the range."""
        return self.last is not None and step >= self.last


@dataclass(frozen=True, slots=True)
class DataColumn:
    """A column of a table. An absent value is null, and empty in CSV."""

    name: str
    type: Literal["int", "float", "text", "bool", "ints", "texts"]
    meaning: str


def _columns(*rows: tuple[str, Any, str]) -> tuple[DataColumn, ...]:
    return tuple(DataColumn(*row) for row in rows)


_STEP = ("step", "int", "number of the step, from 0")
_IDS = (
    ("seq_id", "int", "number of the sequence, from 0"),
    ("request_id", "text", "the request's number: the row's index, or index/prompt"),
    ("row_id", "text", "the id that the row has in the input"),
)
_RECENT = f"the same, over the last {ROLLING_STEPS} steps"
TABLES: dict[str, tuple[DataColumn, ...]] = {
    "steps": _columns(
        _STEP,
        ("start_ms", "float", "when it began, in milliseconds after the first step of the run, without paused time"),
        ("num_running", "int", "sequences that hold blocks"),
        ("num_waiting", "int", "sequences that wait, preempted ones included"),
        ("num_finished", "int", "sequences that have finished so far"),
        ("num_new_tokens", "int", "tokens that the step computes"),
        ("num_blocks", "int", "blocks of the pool = in use + cached + empty"),
        ("used_blocks", "int", "blocks in use: at least one sequence holds them"),
        ("shared_blocks", "int", "of these, held by more than one sequence"),
        ("cached_blocks", "int", "blocks that nobody holds, but whose content can still be found"),
        ("empty_blocks", "int", "blocks without content; they have no row in blocks"),
        ("unfilled_slots", "int", "slots of blocks in use that hold no token"),
        ("num_preemptions", "int", "sequences that the step has preempted"),
        ("num_evictions", "int", "cached blocks that the step has evicted"),
        ("waiting_seq_id", "int", "the first waiting sequence, if the scheduler said why it waits"),
        (
            "waiting_reason",
            "text",
            "why: max_num_seqs, token_budget, free_blocks, preemption, min_prefill_tokens, state_slots or checkpoint",
        ),
        ("hit_rate", "float", "tokens found / tokens looked up, 0 to 1, by first lookups of requests since the start"),
        ("block_hit_rate", "float", "full blocks found / full blocks looked up, by the same lookups"),
        ("recent_hit_rate", "float", _RECENT.replace("the same", "hit_rate")),
        ("recent_block_hit_rate", "float", _RECENT.replace("the same", "block_hit_rate")),
        (
            "own_hit_rate",
            "float",
            "tokens found / looked up by requests that ran before (preempted, or more samples)",
        ),
        ("own_block_hit_rate", "float", "full blocks found / looked up by the same lookups"),
    ),
    "sequences": _columns(
        _STEP,
        *_IDS,
        ("sample_index", "int", "which sample of its request, from 0"),
        ("status", "text", "prefill, decode, waiting or preempted"),
        ("num_prompt_tokens", "int", "tokens of the prompt"),
        ("num_output_tokens", "int", "tokens generated before this step"),
        ("max_new_tokens", "int", "tokens that it may generate"),
        ("num_computed_tokens", "int", "tokens in the cache after this step"),
        ("num_new_tokens", "int", "tokens that this step computes"),
        ("num_cached_tokens", "int", "tokens that its last prefix lookup found"),
        ("num_preemptions", "int", "how often it has been preempted"),
        ("num_waited_steps", "int", "steps in which it has waited"),
        ("num_blocks", "int", "blocks that it holds"),
        ("block_table", "ints", "its blocks in order; null: released, no later token sees it (sliding windows)"),
        ("ref_counts", "ints", "how many sequences hold each block of the table"),
        ("waiting_reason", "text", "why it was not scheduled, if the scheduler said so"),
    ),
    "blocks": _columns(
        _STEP,
        ("block_id", "int", "number of the block, from 0"),
        ("state", "text", "in_use or cached"),
        ("ref_count", "int", "sequences that hold it; 0: cached"),
        ("num_tokens", "int", "slots that hold a token after this step"),
        ("hash", "text", "its content and all before it, 16 hexadecimal digits; null: partial, not yet findable"),
        ("group", "int", "the group of layers whose K and V it holds, from 0"),
        ("seq_ids", "ints", "the sequences that hold it"),
        ("requests", "texts", "what they are called: the row's id, else the request's number"),
    ),
    "lookups": _columns(
        ("step", "int", "the step that looked up"),
        *_IDS,
        ("reason", "text", "new, resumed (after a preemption) or continued (a chunked prompt found more)"),
        ("own", "bool", "whether its request ran before, so that it finds the request's own blocks"),
        ("num_tokens", "int", "tokens of the sequence"),
        ("blocks_asked", "int", "full blocks looked up"),
        ("blocks_hit", "int", "of these, found"),
        ("tokens_hit", "int", "tokens that need no computing"),
        ("first_miss", "int", "place in the block table of the first full block not found, from 0"),
        ("missing_hash", "text", "its hash"),
        ("miss_reason", "text", "caching_off, no_full_block or no_match; null: every full block was found"),
        ("partial_tokens", "int", "tokens after the last hit that a cached block begins with, too"),
        ("shared_tokens", "int", "tokens that an earlier sequence begins with, too, cached or not; null: not counted"),
    ),
    "groups": _columns(
        _STEP,
        ("group", "int", "number of the group of layers, from 0"),
        ("window", "int", "tokens that a query sees in these layers, itself included; null: all before it"),
        ("layers", "ints", "the layers, numbered from 0 among those that attend"),
        ("num_kv_heads", "int", "key/value heads of each layer"),
        ("head_dim", "int", "size of a head"),
        ("used_bytes", "int", "bytes of a block that the layers take"),
        ("used_blocks", "int", "blocks in use that hold K and V of these layers"),
        ("cached_blocks", "int", "cached blocks that do"),
        ("unused_bytes", "int", "bytes of the blocks in use that the layers leave"),
    ),
    "slots": _columns(
        _STEP,
        ("slot_id", "int", "number of the slot of recurrent state, from 0"),
        ("kind", "text", "state (of sequences alone) or checkpoint (lookups find it, too)"),
        ("ref_count", "int", "sequences that hold it; 0: an idle checkpoint"),
        ("seq_ids", "ints", "the sequences that hold it"),
        ("num_tokens", "int", "tokens before the state, after this step"),
        ("made_by", "int", "of a checkpoint: the sequence that computed it"),
        ("reason", "text", "of a checkpoint, why there: branch, interval or end"),
        ("made_step", "int", "of a checkpoint: the step that computed it"),
        ("hash", "text", "of a checkpoint: the blocks before it, 16 hexadecimal digits"),
    ),
}


class StepRows(View[PoolState]):
    """Writes the chosen steps, each as its forward pass sees the pool. Of `lookups`, every one in the range of steps is
    written, whatever `every` says: they are events, not states."""

    def __init__(self, write: Write, chosen: StepChoice) -> None:
        self._write = write
        self._chosen = chosen
        self._stats = RunStats()
        self._first_ns: int | None = None
        self.num_steps = 0  # written

    def handlers(self, event_type: type[ev.Event]) -> list[Any]:
        return [*self._stats.handlers(event_type), *super().handlers(event_type)]

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        for table in TABLES:  # each exists even if nothing follows
            if table != "slots" and (table != "groups" or state.num_groups > 1):
                self._write(table, ())

    def on_state_slots_made(self, event: ev.StateSlotsMade, state: PoolState) -> None:
        self._write("slots", ())

    def on_step_started(self, event: ev.StepStarted, state: PoolState) -> None:
        if self._first_ns is None:
            self._first_ns = event.time_ns

    def on_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        step = state.step_number
        if step is not None and self._chosen.has(step):
            self._write("lookups", [_lookup_row(step, event, state.seqs[event.seq_id])])

    def on_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        if not self._chosen.shows(event.step):
            return
        self.num_steps += 1
        self._write("steps", [self._step_row(event, state)])
        self._write("sequences", _sequence_rows(event, state))
        self._write("blocks", _block_rows(event.step, state))
        if state.num_groups > 1:
            self._write("groups", [(event.step, *astuple(use)) for use in group_uses(state)])
        if state.slots is not None:
            self._write("slots", _slot_rows(event.step, state))

    def _step_row(self, event: ev.StepScheduled, state: PoolState) -> Row:
        step, run, recent = state.step, self._stats.run, self._stats.rolling
        assert step is not None, "it was scheduled"
        assert self._first_ns is not None, "it has started"
        waiting = step.waiting
        return (
            event.step, (step.start_ns - self._first_ns) / 1e6,
            state.num_running, len(state.seqs) - state.num_running, state.num_finished, sum(event.num_new_tokens),
            state.num_blocks, state.num_used_blocks, state.num_shared_blocks, state.num_cached_blocks,
            state.num_empty_blocks, state.num_unfilled_slots(), len(step.preemptions), step.num_evicted,
            None if waiting is None else waiting.seq_id, None if waiting is None else waiting.reason,
            run.from_others.token_rate, run.from_others.block_rate,
            recent.from_others.token_rate, recent.from_others.block_rate,
            run.own.token_rate, run.own.block_rate,
        )  # fmt: skip


def _sequence_rows(event: ev.StepScheduled, state: PoolState) -> Iterator[Row]:
    waiting = None if state.step is None else state.step.waiting
    new_tokens = dict(zip(event.seq_ids, event.num_new_tokens, strict=True))
    for seq in state.seqs.values():
        reason = waiting.reason if waiting is not None and waiting.seq_id == seq.seq_id else None
        ref_counts = [None if block_id is None else state.ref_counts[block_id] for block_id in seq.block_table]
        yield (
            event.step, seq.seq_id, seq.request_id, seq.row_id, seq.sample_index, seq.status, seq.num_prompt_tokens,
            seq.num_output_tokens, seq.max_new_tokens, seq.num_computed_tokens, new_tokens.get(seq.seq_id, 0),
            seq.num_cached_tokens, seq.num_preemptions, seq.num_steps_waited(event.step), len(seq.held_block_ids),
            seq.block_table.copy(), ref_counts, reason,
        )  # fmt: skip


def _block_rows(step: int, state: PoolState) -> Iterator[Row]:
    owners = block_owners(state)
    for block_id, ref_count in enumerate(state.ref_counts):
        block_hash = state.hashes[block_id]
        if not ref_count and block_hash is None:
            continue
        held = owners.get(block_id, [])
        num_tokens = max((tokens_in_block(seq, place, state) for seq, place in held), default=state.block_size)
        yield (
            step, block_id, "in_use" if ref_count else "cached", ref_count, num_tokens, hash_text(block_hash),
            state.block_groups[block_id], [seq.seq_id for seq, _ in held], [seq.label for seq, _ in held],
        )  # fmt: skip


def _slot_rows(step: int, state: PoolState) -> Iterator[Row]:
    for slot in state_slots(state):
        yield (
            step, slot.slot_id, slot.kind, slot.ref_count, list(slot.seq_ids), slot.num_tokens, slot.made_by,
            slot.reason, slot.made_step, hash_text(slot.hash),
        )  # fmt: skip


def block_owners(state: PoolState) -> dict[int, list[tuple[SeqState, int]]]:
    """Block in use -> the sequences that hold it, each with the place of the block in its table."""
    owners: dict[int, list[tuple[SeqState, int]]] = {}
    for seq in state.seqs.values():
        for place, block_id in enumerate(seq.block_table):
            if block_id is not None:
                owners.setdefault(block_id, []).append((seq, place))
    return owners


def tokens_in_block(seq: SeqState, place: int, state: PoolState) -> int:
    """How many tokens of a sequence the block at a place of its table holds."""
    first = place // state.num_groups * state.block_size
    return min(max(seq.num_computed_tokens - first, 0), state.block_size)


def hash_text(block_hash: int | None) -> str | None:
    """A hash as everything shows it: 16 hexadecimal digits."""
    return None if block_hash is None else f"{block_hash:016x}"


def _lookup_row(step: int, event: ev.PrefixLookedUp, seq: SeqState) -> Row:
    return (
        step, seq.seq_id, seq.request_id, seq.row_id, event.reason, seq.repeats, event.num_tokens, event.blocks_asked,
        event.blocks_hit, event.tokens_hit, event.first_miss, hash_text(event.missing_hash), event.miss_reason,
        event.partial_tokens, event.shared_tokens,
    )  # fmt: skip
