"""Everything a screen shows of one moment of a run, and time travel through a trace: the moment of any step.

Shared by the application and the printed tables, so they cannot disagree. Independent of the terminal.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args

import msgspec

import pagedcli.events as ev
from pagedcli.errors import TraceError
from pagedcli.printable import plural
from pagedcli.trace.dispatch import Handler, View
from pagedcli.trace.fold import EventSource, Fold, pool_fold
from pagedcli.trace.seq_state import SeqState
from pagedcli.trace.state import PoolState
from pagedcli.views.cache_groups import group_uses
from pagedcli.views.names import NamedRequest
from pagedcli.views.rows import LookupRow, Now, SequenceRow, values_of
from pagedcli.views.state_slots import slot_counts, state_slots
from pagedcli.views.stats import ROLLING_STEPS, LookupHits, RunStats, StepSeries, memory_use, pool_counts
from pagedcli.views.words import describe, event_seq_ids

_NOTABLE = (
    ev.PrefixLookedUp, ev.RequestPreempted, ev.BlockEvicted, ev.RequestFinished, ev.RequestRefused, ev.SequenceForked,
    ev.BlockCopied, ev.StepFailed, ev.CheckpointLookedUp, ev.CheckpointMade, ev.CheckpointDropped,
    ev.CheckpointRestored,
)  # fmt: skip
_KEPT_EVENTS = 400
_KEPT_STEPS = 240  # the length of the trends


class Moment(View):
    """A state, its statistics and a short memory of events.

    The blocks of the request to `follow` are highlighted, and all its events kept.
    """

    def __init__(self, *, follow: NamedRequest | None = None) -> None:
        self.state = PoolState()  # replaced by that of the fold when the engine starts
        self.stats = RunStats()
        self.follow = follow
        self.pool_trend: deque[float] = deque(maxlen=_KEPT_STEPS)  # per step the share of blocks in use
        self.hit_trend: deque[float] = deque(maxlen=_KEPT_STEPS)  # per step the rolling hit rate in tokens
        self._events: deque[tuple[int | None, ev.Event]] = deque(maxlen=_KEPT_EVENTS)
        self.num_remembered = 0  # events so far, forgotten ones included
        self._num_unsaid = 0  # events since new_words

    def handlers(self, event_type: type[ev.Event]) -> list[Handler]:
        own = super().handlers(event_type)
        if self.follow is not None or event_type in _NOTABLE:
            own.append(self._remember)
        return [*self.stats.handlers(event_type), *own]

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        self.state = state

    def on_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        self.pool_trend.append(state.num_used_blocks / state.num_blocks)
        self.hit_trend.append(self.stats.rolling.from_others.token_rate or 0.0)

    def _remember(self, event: ev.Event, state: PoolState) -> None:
        if self.follow is None:
            self._keep(event)
        else:
            self.follow.see(event)
            if self.follow.seq_ids.intersection(event_seq_ids(event)):
                self._keep(event)

    @property
    def follow_seq_ids(self) -> set[int]:
        return set() if self.follow is None else self.follow.seq_ids

    def _keep(self, event: ev.Event) -> None:
        self._events.append((self.state.step_number, event))
        self.num_remembered += 1
        self._num_unsaid += 1

    def followed_blocks(self) -> set[int]:
        seqs = (self.state.seqs.get(seq_id) for seq_id in self.follow_seq_ids)
        return {block_id for seq in seqs if seq is not None for block_id in seq.held_block_ids}

    def copy(self) -> "Moment":
        """A snapshot that later events do not change."""
        other = Moment(follow=self.follow)
        other.state, other.stats = self.state.copy(), self.stats.copy()
        other._events, other.num_remembered = self._events.copy(), self.num_remembered
        other.pool_trend, other.hit_trend = self.pool_trend.copy(), self.hit_trend.copy()
        return other

    def last_words(self, most: int, *, of_step: int | None = None, with_lookups: bool = True) -> list[str]:
        """The last events as text, oldest first; the evictions of a step share a line."""
        entries = [
            (step, event)
            for step, event in self._events
            if of_step in (None, step) and (with_lookups or not isinstance(event, ev.PrefixLookedUp))
        ]
        return self._in_words(entries[-4 * most :])[-most:]

    def new_words(self) -> list[str]:
        """The events since the last call as text. Call it at least every few hundred events."""
        num_new, self._num_unsaid = self._num_unsaid, 0
        return self._in_words(list(self._events)[-num_new:]) if num_new else []

    def _in_words(self, entries: list[tuple[int | None, ev.Event]]) -> list[str]:
        lines: list[str] = []
        evicted: list[int] = []
        for place, (step, event) in enumerate(entries):
            if isinstance(event, ev.BlockEvicted) and self.follow is None:
                evicted.append(event.block_id)
                after = entries[place + 1] if place + 1 < len(entries) else (None, None)
                if after[0] == step and isinstance(after[1], ev.BlockEvicted):
                    continue
                ids = ", ".join(map(str, evicted[:6])) + (" ..." if len(evicted) > 6 else "")
                lines.append(f"step {step} evict {plural(len(evicted), 'cached block')}: {ids}")
                evicted.clear()
            elif (line := describe(event, step, self.state)) is not None:
                lines.append(line)
        return lines

    def line(self) -> str:
        state, rate = self.state, self.stats.tokens_per_s
        counts = pool_counts(state)
        stalled = f" ({num_stalled} stalled)" if (num_stalled := state.num_stalled) else ""
        return (
            f"step {'-' if state.step is None else state.step.step}: {state.num_running} running{stalled}, "
            f"{len(state.waiting())} waiting, {state.num_finished} finished; blocks {counts['in_use']:,} in use "
            f"({counts['shared']:,} shared) + {counts['cached']:,} cached + {counts['empty']:,} empty"
            + ("" if rate is None else f"; {rate:,.0f} tok/s")
        )

    def summary(self) -> dict[str, Any]:
        """The moment with plain keys, for `--format json`. Rates are between 0 and 1, or None without lookups."""
        state, stats, facts = self.state, self.stats, self.stats.facts
        step, now = state.step, Now(state)
        return {
            "step": state.step_number,
            "blocks": pool_counts(state),
            "ref_count_histogram": {str(ref): count for ref, count in state.ref_count_histogram().items()},
            "sequences": [values_of(SequenceRow(seq, now), "json") for seq in state.running() + state.waiting()],
            "lookups": [
                msgspec.to_builtins(each) | values_of(LookupRow(each, state.seq(each.seq_id)), "json")
                for each in ([] if step is None else step.lookups)
            ],
            "groups": [asdict(use) for use in group_uses(state)],
            **_slots_summary(state),
            "hit_rates": {
                "run": _rates(stats.run), f"last_{ROLLING_STEPS}_steps": _rates(stats.rolling),
            },
            "memory": asdict(memory_use(state)),
            "num_finished": state.num_finished,
            "num_failed_steps": facts.num_failed_steps,
            "num_preemptions": facts.num_preemptions,
            "num_dropped_tokens": stats.num_dropped_tokens,
            "num_recomputed_tokens": facts.num_recomputed_tokens,
            "num_computed_tokens": facts.num_computed_tokens,
            "num_generated_tokens": facts.num_generated_tokens,
            "num_duplicate_blocks": stats.num_duplicate_blocks,
            "peak_used_blocks": facts.peak_used_blocks,
            "events": self.last_words(1000, of_step=state.step_number),
        }  # fmt: skip


def _slots_summary(state: PoolState) -> dict[str, Any]:
    """The slots of recurrent state; nothing for a model without it."""
    counts = slot_counts(state)
    return {} if counts is None else {"state_slots": counts | {"slots": [asdict(each) for each in state_slots(state)]}}


def _rates(hits: LookupHits) -> dict[str, Any]:
    return {
        name: {**asdict(counts), "token_rate": counts.token_rate, "block_rate": counts.block_rate}
        for name, counts in (("from_others", hits.from_others), ("own", hits.own))
    }


Landmark = Literal["preemption", "eviction", "miss", "failure"]
_LANDMARKS: dict[type[ev.Event], Landmark] = {
    ev.RequestPreempted: "preemption", ev.BlockEvicted: "eviction", ev.StepFailed: "failure",
}  # fmt: skip
StepEvents = Iterator[tuple[int | None, ev.Event]]  # each event with its step, or the step before it


def landmark(event: ev.Event) -> Landmark | None:
    """The kind of place to jump to that an event makes its step; of a failed step, the one after it."""
    if isinstance(event, ev.PrefixLookedUp):
        return "miss" if event.miss_reason == "no_match" else None
    return _LANDMARKS.get(type(event))


def next_place(places: Sequence[int], position: int, *, backward: bool) -> int | None:
    """The first of some places, which rise, after a position, or the last one before it."""
    index = bisect_left(places, position) - 1 if backward else bisect_right(places, position)
    return places[index] if 0 <= index < len(places) else None


class Replay:
    """All stops of a trace. The events stay encoded; snapshots of the fold make stepping back cheap.

    A trace that breaks a law can be viewed up to that point; `damage` then says what is wrong.
    Raises: TraceError if not even one step is valid; UsageError if the source cannot be read.
    """

    def __init__(
        self, source: EventSource, *, follow: NamedRequest | None = None, snapshot_bytes: int = 100 << 20
    ) -> None:
        self.steps: list[int | None] = []  # per stop the step, None: the end
        self.damage: str | None = None
        self._encode = msgspec.json.Encoder().encode
        self._decoder: msgspec.json.Decoder[ev.AnyEvent] = msgspec.json.Decoder(ev.AnyEvent)
        self._chunks: list[bytes] = []  # per stop the events that lead to it from the one before
        self.landmarks: dict[Landmark, list[int]] = {name: [] for name in get_args(Landmark)}  # stops, rising
        self.position = -1  # index of the stop of `moment`
        self.moment = Moment(follow=follow)
        self.series = StepSeries()
        self.seqs: list[SeqState] = []  # all sequences of the run, as they were at its end
        self._snapshots: dict[int, Moment] = {-1: self.moment.copy()}  # the snapshots by stop
        self._most_bytes = snapshot_bytes  # roughly the bytes of all snapshots
        self._interval = 32  # stops between snapshots
        self._read(source)

    def _read(self, source: EventSource) -> None:
        lines: list[bytes] = []
        try:
            for event in pool_fold(self.moment, self.series).steps(source):
                lines.append(self._encode(event))
                self._note_landmark(event)
                if isinstance(event, ev.StepScheduled | ev.StepFailed) and self.steps[-1:] != [event.step]:
                    self._add_stop(event.step, lines)
                    lines.clear()
        except TraceError as error:
            if not self.steps:
                raise
            self.damage = error.message
        else:
            self._add_stop(None, lines)
        self.seqs = self.moment.state.all_seqs()
        for stops in self.landmarks.values():
            del stops[bisect_right(stops, self.last_stop) :]  # The damaged part leads to no stop.
        if self.damage is not None:
            self.position, self.moment = -1, self._snapshots[-1].copy()

    def _add_stop(self, step: int | None, lines: list[bytes]) -> None:
        """Keep what was read up to a stop, and a snapshot of some stops: of fewer where they take too much memory."""
        self.position = len(self.steps)
        self.steps.append(step)
        self._chunks.append(b"\n".join(lines))
        if self.position % self._interval == 0:
            self._snapshots[self.position] = self.moment.copy()
            state = self.moment.state
            snapshot_bytes = 20_000 + 130 * state.num_blocks + 100 * len(state.finished) + 1000 * len(state.seqs)
            if len(self._snapshots) * snapshot_bytes > self._most_bytes:
                self._interval *= 2
                kept = (stop for stop in self._snapshots if stop < 0 or stop % self._interval == 0)
                self._snapshots = {stop: self._snapshots[stop] for stop in kept}

    def _note_landmark(self, event: ev.Event) -> None:
        stop, name = len(self.steps), landmark(event)
        if name is not None and self.landmarks[name][-1:] != [stop]:
            self.landmarks[name].append(stop)

    # ------------------------------------------------------------------ navigation

    @property
    def last_stop(self) -> int:
        return len(self.steps) - 1

    def go(self, stop: int) -> Moment:
        """Show a stop, clamped to the first and last."""
        stop = min(max(stop, 0), self.last_stop)
        nearest = stop - stop % self._interval
        nearest = nearest if nearest in self._snapshots else -1
        if not nearest <= self.position <= stop:
            self.position, self.moment = nearest, self._snapshots[nearest].copy()
        again = Fold(self.moment.state, self.moment)  # the laws have seen these events
        while self.position < stop:
            self.position += 1
            for line in self._chunks[self.position].splitlines():
                again(self._decoder.decode(line))
        return self.moment

    def stop_of_step(self, step: int) -> int | None:
        """The stop of a step, None if the trace has no such step."""
        first = self.steps[0]
        stop = step - first if first is not None else -1  # steps are numbered without gaps
        return stop if 0 <= stop < len(self.steps) and self.steps[stop] == step else None

    def events(self) -> StepEvents:
        step: int | None = None
        for chunk in self._chunks:
            for line in chunk.splitlines():
                event = self._decoder.decode(line)
                if isinstance(event, ev.StepStarted):
                    step = event.step
                yield step, event
