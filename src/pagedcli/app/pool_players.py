"""A recorded run and a running engine, as players of moments of the block pool."""

import math
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import cast

from pagedcli.app.player import SPEEDS, Player, Recording, RunningPlayer
from pagedcli.errors import TraceError, UsageError
from pagedcli.events import EngineStarted, Event, StepScheduled
from pagedcli.show.terminal import HeldClock
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import EventList, EventSource, pool_fold
from pagedcli.trace.seq_state import SeqState
from pagedcli.trace.state import PoolState
from pagedcli.views.moment import Landmark, Moment, Replay, landmark
from pagedcli.views.names import NamedRequest
from pagedcli.views.stats import StepSeries
from pagedcli.views.whole_run import WholeRun
from pagedcli.views.words import StepEvent, with_steps

_MOST_UNFOLDED = 20_000  # events
_INTERVAL_S, _MOST_S = 0.1, 2.0  # least time between two moments, and how far a slow screen may stretch it
_MOST_WAIT_S = 0.5  # each look at the run takes a core from its kernels for a moment
_FINISHED = "FINISHED, q closes"
_DRAW_SHARE = 0.01  # largest share of the time that the screen's thread may take


class PoolPlayer(Player[Moment]):
    """A player that also has the events of which stories are told."""

    series: StepSeries  # the pool at each step so far

    @abstractmethod
    def events(self) -> Iterable[StepEvent]:
        """All events that are known, with their steps."""

    @abstractmethod
    def all_seqs(self) -> list[SeqState]:
        """All sequences that are known; of a recorded run those of later steps, too."""


class ReplayPlayer(Recording[Moment], PoolPlayer):
    """All stops of a trace. `at_end` is said at the last one."""

    def __init__(self, replay: Replay, *, start: int = 0, at_end: str = "END") -> None:
        super().__init__()
        self.replay = replay
        self.series = replay.series
        self._at_end = at_end
        self.move_to(start)

    def events(self) -> Iterable[StepEvent]:
        return self.replay.events()

    def all_seqs(self) -> list[SeqState]:
        return self.replay.seqs

    @property
    def moment(self) -> Moment:
        return self.replay.moment

    @property
    def position(self) -> int:
        return self.replay.position

    @property
    def last(self) -> int:
        return self.replay.last_stop

    def go(self, position: int) -> None:
        self.replay.go(position)

    @property
    def place(self) -> str:
        replay = self.replay
        if replay.damage is not None and replay.position == replay.last_stop:
            return f"DAMAGED AFTER THIS: {replay.damage}"
        at_end = replay.steps[replay.position] is None
        return self._at_end if at_end else f"{replay.position + 1:,} of {replay.last_stop + 1:,}"

    def go_to(self, number: int) -> str:
        stop = self.replay.stop_of_step(number)
        return f"there is no step {number:,}" if stop is None else self.move_to(stop)

    def landmarks(self, name: str) -> list[int]:
        return self.replay.landmarks[cast(Landmark, name)]


class KeptEvents(EventList):
    """Events of a finished run as a source. It ends early once nobody needs it."""

    def __init__(self, events: Iterable[Event], is_needed: Callable[[], bool]) -> None:
        super().__init__(events)
        self._is_needed = is_needed

    def __iter__(self) -> Iterator[Event]:
        return takewhile(lambda _: self._is_needed(), super().__iter__())


class LivePlayer(RunningPlayer[Moment], PoolPlayer):
    """A running engine. `on_event` and `finish` belong to the engine's thread, all else to the screen's.

    The engine's thread leaves a copy of the moment when the screen asks for one, and waits here while paused or above
    the chosen speed; `clock_ns`, the engine's clock, stands still meanwhile. It folds events only when a moment is due,
    many at once: folding each one between two kernels, with cold caches, took three times as long. The view only
    observes: events that contradict each other end it, not the run. `whole_run` folds the same events.

    When the run has ended, `read_back` reads it from the events that were kept, or of a longer run from the trace that
    was `recorded`, and `past` is then a player that moves both ways. The newest `kept_events` take roughly 150 MB.
    """

    def __init__(
        self,
        whole_run: WholeRun | None = None,
        *,
        follow: NamedRequest | None = None,
        paused: bool = False,
        recorded: Path | None = None,
        kept_events: int = 500_000,
    ) -> None:
        super().__init__(paused=paused, speed=None)
        whole_run = WholeRun() if whole_run is None else whole_run
        self.series = whole_run.series
        self.past: ReplayPlayer | None = None
        self._recorded = recorded
        self._num_events = 0  # events so far, forgotten ones included
        self._is_read_back = False
        self.live = Moment(follow=follow)  # the engine thread's own, as of the last event that was folded
        self.clock_ns = HeldClock()
        self.damage: str | None = None
        self._abort = False
        self.is_released = False
        self._fold = pool_fold(self.live, whole_run)
        self._unfolded: list[Event] = []
        self._events: deque[Event] = deque(maxlen=kept_events)
        self._changed = threading.Condition()  # the user wants something else
        self._steps_allowed = 0  # while paused
        self._goal: int | Landmark | None = None  # pause there
        self._goal_reached = False
        self._last_step_s = 0.0
        self._moment: Moment | None = None
        self._due_s = 0.0  # time at which the screen wants the next moment
        self._shown_s = self._shown_cpu_s = 0.0  # time of that, and the processor time of the screen's thread by then

    # ------------------------------------------------------------------ the engine's thread

    def on_event(self, event: Event) -> None:
        """Handle an event of the engine. Raises KeyboardInterrupt if the user wants it to stop now."""
        if self._abort:
            raise KeyboardInterrupt
        self._unfolded.append(event)
        if self._goal is not None and landmark(event) == self._goal:
            self._goal_reached = True
        kind = type(event)
        if kind is StepScheduled:
            self._at_step(cast(StepScheduled, event).step)
        elif kind is EngineStarted:
            self._catch_up()
            self._moment = self.live.copy()  # the empty pool: the first screen is laid out before the run begins
            self.has_started.set()
            with self.clock_ns.held():
                self.screen_is_open.wait()  # what is printed from now on must not fall between two screens

    def settled(self) -> PoolState | None:
        """The state after all events so far; None: they contradict each other."""
        self._catch_up()
        return self.live.state if self.damage is None else None

    def _catch_up(self) -> None:
        events, self._unfolded = self._unfolded, []
        if self.damage is None:
            try:
                for event in events:
                    self._fold(event)
            except TraceError as error:
                self.damage = error.message
            else:
                self._events.extend(events)
                self._num_events += len(events)

    def _at_step(self, step: int) -> None:
        goal = self._goal
        if self._goal_reached or (isinstance(goal, int) and step >= goal):
            self._goal, self._goal_reached, self.paused = None, False, True
        with self._changed:
            if time.monotonic() >= self._due_s:
                self._leave_moment()
            elif len(self._unfolded) >= _MOST_UNFOLDED:
                self._catch_up()
            with self.clock_ns.held():
                self._wait_for_turn()
        self._last_step_s = time.monotonic()

    def _wait_for_turn(self) -> None:
        """Return when the user lets the step run: by its key, the speed or the end of the pause."""
        while not self.stop_requested:
            if not self.paused:
                pause_s = 0.0 if self.speed is None else self._last_step_s + 1 / self.speed - time.monotonic()
                if pause_s <= 0 or self._goal is not None:
                    return
                self._changed.wait(pause_s)
            elif self._steps_allowed:
                self._steps_allowed -= 1
                return
            else:
                if self._unfolded:
                    self._leave_moment()
                self._changed.wait()

    def _leave_moment(self) -> None:
        self._catch_up()
        self._moment, self._due_s = self.live.copy(), math.inf

    def finish(self) -> None:
        self._catch_up()
        self._moment = self.live
        super().finish()

    # ------------------------------------------------------------------ the screen's thread

    @property
    def place(self) -> str:
        if self.damage is not None:
            return f"THE VIEW ENDED EARLY: {self.damage}"
        if self.has_ended:
            return _FINISHED + ("; reading it to go back ..." if self._is_read_back else "")
        if self.stop_requested:
            return "STOPPING after this step, q again: at once"
        if self._goal is not None:
            return f"TO THE NEXT {self._goal.upper()}" if isinstance(self._goal, str) else f"TO STEP {self._goal:,}"
        return ""

    def poll(self) -> bool:
        moment, now_s, cpu_s = self._moment, time.monotonic(), time.thread_time()
        is_new = moment is not self.moment
        if is_new:
            self.moment, self._shown_s, self._shown_cpu_s = moment, now_s, cpu_s
        elif self._due_s == math.inf:
            drawing_s = (cpu_s - self._shown_cpu_s) / _DRAW_SHARE if self._is_at_full_speed else 0.0
            self._due_s = self._shown_s + max(_INTERVAL_S, min(_MOST_S, drawing_s))
        return is_new

    @property
    def _is_at_full_speed(self) -> bool:
        """Else the engine has time to spare."""
        return self.speed is None and not self.paused and not self.has_ended

    @property
    def wait_s(self) -> float:
        left_s = self._due_s - time.monotonic()
        return (
            min(_MOST_WAIT_S, max(_INTERVAL_S, left_s)) if self._is_at_full_speed and left_s < _MOST_S else _INTERVAL_S
        )

    def toggle_pause(self) -> str:
        return self._change(not self.paused)

    def step(self, count: int) -> str:
        return self._why_no_way_back if count < 0 else self._change(True, num_steps=count)

    def go_to(self, number: int) -> str:
        step = self.live.state.step_number
        return self._why_no_way_back if step is not None and number <= step else self._change(False, goal=number)

    def go_to_end(self, *, last: bool) -> str:
        return self._change(False) if last else self._why_no_way_back

    def jump(self, name: str, *, backward: bool) -> str:
        return self._why_no_way_back if backward else self._change(False, goal=cast(Landmark, name))

    def faster(self, by: int) -> None:
        super().faster(by)
        self._change(self.paused)

    def _change(self, paused: bool, *, num_steps: int = 0, goal: int | Landmark | None = None) -> str:
        if self.has_ended:
            return "the run has ended"
        with self._changed:
            self.paused, self._goal, self._goal_reached = paused, goal, False
            self._steps_allowed = self._steps_allowed + num_steps if paused else 0
            self._changed.notify()
        return ""

    def request_stop(self) -> None:
        """End the run after this step; the second time, at once."""
        with self._changed:
            self._abort, self.stop_requested = self.stop_requested, True
            self._changed.notify()

    def release(self) -> None:
        """Nobody watches any more: the run continues at full speed."""
        self._speed_index = len(SPEEDS) - 1
        self._change(False)
        self.is_released = True
        super().release()

    def events(self) -> Iterable[StepEvent]:
        return with_steps(self._events.copy())

    def all_seqs(self) -> list[SeqState]:
        return [] if self.moment is None else self.moment.state.all_seqs()

    # ------------------------------------------------------------------ after the run

    @property
    def _why_no_way_back(self) -> str:
        if not self.has_ended:
            return self.no_way_back
        return "reading the run ..." if self._is_read_back else "this run is too long to keep: record it with --record"

    def read_back(self) -> None:
        """Begin to read the finished run, in a thread, if all of its events are at hand."""
        source = self._source()
        if source is not None and self.damage is None:
            self._is_read_back = True
            threading.Thread(target=self._read_back, args=(source,), name="read back", daemon=True).start()

    def _source(self) -> EventSource | None:
        if 0 < self._num_events == len(self._events):
            return KeptEvents(self._events, lambda: not self.is_released)
        return None if self._recorded is None or not self._recorded.exists() else TraceReader(self._recorded)

    def _read_back(self, source: EventSource) -> None:
        follow = self.live.follow
        try:
            replay = Replay(source, follow=None if follow is None else NamedRequest(follow.name))
        except (TraceError, UsageError) as error:
            self.damage = error.message
        else:
            self.past = ReplayPlayer(replay, start=replay.last_stop, at_end=_FINISHED)
