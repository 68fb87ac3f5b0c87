"""The live view of a running engine: an observer of its events that draws, pauses and steps.

Used by `pagedcli trace` and `pagedcli generate`. It only looks: events that contradict each other end the view, not
the run.
"""

import io
import signal
import sys
import time
from contextlib import ExitStack, redirect_stderr
from types import TracebackType

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pagedcli.errors import TraceError
from pagedcli.events import EngineStarted, Event, StepFinished, StepScheduled
from pagedcli.inspection.fold import pool_fold
from pagedcli.inspection.keys import Keyboard
from pagedcli.inspection.moment import Moment
from pagedcli.inspection.view import MomentScreen, print_step_tables, print_summary

_REDRAW_S = 0.1
_DRAW_SHARE = 0.1  # of the time, at most, goes into drawing
SPEEDS = (0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 100.0, None)  # steps per second, None: as fast as it goes
KEYS = " q quit · space pause · . one step · + - speed "


class StepPrinter:
    """Prints each step (or one) as its forward pass sees the cache: as tables, or as one JSON object per line."""

    def __init__(
        self, console: Console, *, follow: str | None = None, only_step: int | None = None, as_json: bool = False
    ) -> None:
        self.moment = Moment(follow=follow)
        self.fold = pool_fold(self.moment)
        self.num_printed = 0
        self._console = console
        self._only_step = only_step
        self._as_json = as_json

    def on_event(self, event: Event) -> None:
        """Take in an event of the engine. Raises TraceError if it contradicts the ones before."""
        self.fold(event)
        self.show(event)

    def show(self, event: Event) -> None:
        """Print the step if this event, which the fold has, completes what its forward pass sees."""
        if isinstance(event, StepScheduled) and self._only_step in (None, event.step):
            self.num_printed += 1
            if self._as_json:
                self._console.file.write(msgspec.json.encode(self.moment.summary()).decode() + "\n")
            else:
                print_step_tables(self.moment, self._console)


class LiveView:
    """A context manager whose `on_event` is given to the engine as `emit`.

    On a terminal a full screen from the engine's start on, redrawn at most every 100 ms and never for more than a
    tenth of the time; space pauses, `.` makes one step, `q` is Ctrl-C. What others print to stderr meanwhile follows
    when the screen is left. Elsewhere a plain line every ten seconds and for each preemption.
    """

    def __init__(
        self, console: Console, *, title: str = "pagedcli trace", follow: str | None = None, paused: bool = False
    ) -> None:
        self.moment = Moment(follow=follow)
        self._fold = pool_fold(self.moment)
        self._console = console
        self._title = title
        self._paused = paused
        self._speed_index = len(SPEEDS) - 1
        self._keyboard = Keyboard()
        self._live: Live | None = None
        self._screen = ExitStack()
        self._held = io.StringIO()
        self._next_draw = 0.0
        self._last_step = 0.0
        self._damage: str | None = None

    def __enter__(self) -> "LiveView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._screen.close()
        sys.stderr.write(self._held.getvalue())
        if self.moment.state.engine is not None:
            print_summary(self.moment, self._console)
        if self._damage is not None:
            self._console.print(Text(f"the view ended early: {self._damage}", "bold red"))

    def on_event(self, event: Event) -> None:
        """Take in an event of the engine. While paused, this waits for a key."""
        if self._damage is not None:
            return
        try:
            self._fold(event)
        except TraceError as error:
            self._damage = error.message
            return
        if isinstance(event, EngineStarted) and self._console.is_terminal:
            self._open_screen()
        elif isinstance(event, StepScheduled):
            self._pace()
        elif isinstance(event, StepFinished) and self._live is None:
            self._print_line()

    def _open_screen(self) -> None:
        # the console keeps the terminal; others would print into the screen and be lost with it
        self._console.file = self._console.file
        self._screen.enter_context(redirect_stderr(self._held))
        self._screen.enter_context(self._keyboard)
        self._live = self._screen.enter_context(
            Live(console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        )

    # ------------------------------------------------------------------ a terminal

    def _pace(self) -> None:
        """Draw if it is time, obey the keys, and hold the engine while paused or faster than asked for."""
        if self._live is None:
            return
        while (key := self._keyboard.read()) is not None:
            self._obey(key)
        if self._paused:
            self._wait_for_step()
        else:
            self._hold_back()
            if time.monotonic() >= self._next_draw:
                self._draw()

    def _obey(self, key: str) -> None:
        if key == " ":
            self._paused = not self._paused
        elif key in "+=":
            self._speed_index = min(self._speed_index + 1, len(SPEEDS) - 1)
        elif key in "-_":
            self._speed_index = max(self._speed_index - 1, 0)
        elif key == "q":
            signal.raise_signal(signal.SIGINT)  # what Ctrl-C does: the run ends after this step, in order

    def _wait_for_step(self) -> None:
        self._draw()
        while self._paused:
            key = self._keyboard.read(3600.0)
            if key in (".", "n", "right"):
                break
            if key is not None:
                self._obey(key)
                self._draw()

    def _hold_back(self) -> None:
        speed = SPEEDS[self._speed_index]
        if speed is not None:
            due = self._last_step + 1 / speed
            while (left := due - time.monotonic()) > 0 and not self._paused:
                if time.monotonic() >= self._next_draw:
                    self._draw()
                if (key := self._keyboard.read(min(left, _REDRAW_S))) is not None:
                    self._obey(key)
                    due = self._last_step + 1 / (SPEEDS[self._speed_index] or 1e9)
        self._last_step = time.monotonic()

    def _draw(self) -> None:
        assert self._live is not None
        start = time.monotonic()
        speed = SPEEDS[self._speed_index]
        note = "PAUSED" if self._paused else "" if speed is None else f"{speed:g} steps/s"
        self._live.update(MomentScreen(self.moment, title=self._title, keys=KEYS, note=note), refresh=True)
        end = time.monotonic()
        self._next_draw = end + max(_REDRAW_S, (end - start) / _DRAW_SHARE)

    # ------------------------------------------------------------------ anything else

    def _print_line(self) -> None:
        state, now = self.moment.state, time.monotonic()
        assert state.step is not None
        if state.step.preemptions:
            for line in self.moment.last_words(100, of_step=state.step.step):
                if " preempt " in line:
                    self._console.print(Text(line), soft_wrap=True)
        if now >= self._next_draw:
            self._next_draw = now + 10
            self._console.print(Text(self.moment.line()), soft_wrap=True)
