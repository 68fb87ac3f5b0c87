"""Time travel through a trace file: the moment of any step. Independent of the terminal.

A stop is the moment right after a step was scheduled, which is what its forward pass sees, or after it failed before
that; the last stop is the end.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Literal

import msgspec

import pagedcli.events as ev
from pagedcli.errors import TraceError
from pagedcli.trace.fold import EventSource, Fold, pool_fold
from pagedcli.views.moment import Moment
from pagedcli.views.names import NamedRequest

Landmark = Literal["preemption", "eviction", "miss"]
StepEvents = Iterator[tuple[int | None, ev.Event]]  # each event with its step, or the step before it
_SNAPSHOT_BYTES = 100 << 20  # of all snapshots together, roughly


def landmark(event: ev.Event) -> Landmark | None:
    """The kind of place to jump to that an event makes its step."""
    if isinstance(event, ev.RequestPreempted):
        return "preemption"
    if isinstance(event, ev.BlockEvicted):
        return "eviction"
    if isinstance(event, ev.PrefixLookedUp) and event.miss_reason == "no_match":
        return "miss"
    return None


class Replay:
    """All stops of a trace. The events stay encoded; snapshots of the fold make stepping back cheap.

    A trace that breaks a law can be viewed up to that point; `damage` then says what is wrong.
    Raises: TraceError if not even one step is valid; UsageError if the source cannot be read.
    """

    def __init__(self, source: EventSource, *, follow: NamedRequest | None = None) -> None:
        self.steps: list[int | None] = []  # per stop the step, None: the end
        self.damage: str | None = None
        self._encode = msgspec.json.Encoder().encode
        self._decoder: msgspec.json.Decoder[ev.AnyEvent] = msgspec.json.Decoder(ev.AnyEvent)
        self._chunks: list[bytes] = []  # per stop the events that lead to it from the one before
        self._landmarks: dict[Landmark, list[int]] = {"preemption": [], "eviction": [], "miss": []}  # stops, rising
        self._position = -1
        self._moment = Moment(follow=follow)
        self._snapshots: dict[int, Moment] = {-1: self._moment.copy()}  # by stop
        self._interval = 32  # stops between snapshots
        self._read(source)

    def _read(self, source: EventSource) -> None:
        lines: list[bytes] = []
        try:
            for event in pool_fold(self._moment).steps(source):
                lines.append(self._encode(event))
                self._note_landmark(event)
                if isinstance(event, ev.StepScheduled | ev.StepFailed) and self.steps[-1:] != [event.step]:
                    self._add_stop(event.step, lines)
                    lines.clear()
        except TraceError as error:
            if not self.steps:
                raise
            self.damage = error.message
            self._position, self._moment = -1, self._snapshots[-1].copy()
        else:
            self._add_stop(None, lines)

    def _add_stop(self, step: int | None, lines: list[bytes]) -> None:
        self._position = len(self.steps)
        self.steps.append(step)
        self._chunks.append(b"\n".join(lines))
        if self._position % self._interval == 0:
            self._snapshots[self._position] = self._moment.copy()
            state = self._moment.state
            snapshot_bytes = 20_000 + 130 * state.num_blocks + 100 * len(state.finished) + 1000 * len(state.seqs)
            if len(self._snapshots) * snapshot_bytes > _SNAPSHOT_BYTES:
                self._interval *= 2
                kept = (stop for stop in self._snapshots if stop < 0 or stop % self._interval == 0)
                self._snapshots = {stop: self._snapshots[stop] for stop in kept}

    def _note_landmark(self, event: ev.Event) -> None:
        name = landmark(event)
        if name is None:
            return
        stops = self._landmarks[name]
        if not stops or stops[-1] != len(self.steps):
            stops.append(len(self.steps))

    # ------------------------------------------------------------------ navigation

    @property
    def position(self) -> int:
        """The stop that `moment` shows."""
        return self._position

    @property
    def last_stop(self) -> int:
        return len(self.steps) - 1

    @property
    def moment(self) -> Moment:
        return self._moment

    def go(self, stop: int) -> Moment:
        """Show a stop, clamped to the first and last."""
        stop = min(max(stop, 0), self.last_stop)
        nearest = stop - stop % self._interval
        nearest = nearest if nearest in self._snapshots else -1
        if not nearest <= self._position <= stop:
            self._position, self._moment = nearest, self._snapshots[nearest].copy()
        again = Fold(self._moment.state, self._moment)  # the laws have seen these events
        while self._position < stop:
            self._position += 1
            for line in self._chunks[self._position].splitlines():
                again(self._decoder.decode(line))
        return self._moment

    def stop_of_step(self, step: int) -> int | None:
        """The stop of a step, None if the trace has no such step."""
        first = self.steps[0]
        stop = step - first if first is not None else -1  # steps are numbered without gaps
        return stop if 0 <= stop < len(self.steps) and self.steps[stop] == step else None

    def next_landmark(self, name: Landmark, *, backward: bool = False) -> int | None:
        """The next (or previous) stop with a preemption, an eviction or a prefix miss."""
        stops = self._landmarks[name]
        if backward:
            place = bisect_left(stops, self._position) - 1
            return stops[place] if place >= 0 else None
        place = bisect_right(stops, self._position)
        return stops[place] if place < len(stops) and stops[place] <= self.last_stop else None

    def events(self, containing: bytes = b"") -> StepEvents:
        """All events of the trace, or of the stops whose encoded events contain some bytes."""
        step: int | None = None
        for stop, chunk in enumerate(self._chunks):
            if containing in chunk:
                for line in chunk.splitlines():
                    event = self._decoder.decode(line)
                    if isinstance(event, ev.StepStarted):
                        step = event.step
                    yield step, event
            step = self.steps[stop]
