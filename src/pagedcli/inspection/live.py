"""The live view of a running engine: an observer of its events that draws, pauses and steps.

Used by `pagedcli trace` and `pagedcli generate`. It only observes: inconsistent events end the view, not the run.
"""

import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from types import FrameType, TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pagedcli.errors import TraceError
from pagedcli.events import EngineStarted, Event, StepFinished, StepScheduled
from pagedcli.inspection.fold import pool_fold
from pagedcli.inspection.keys import Keyboard
from pagedcli.inspection.moment import Moment
from pagedcli.inspection.names import NamedRequest
from pagedcli.inspection.view import MomentScreen, print_step_tables, print_summary
from pagedcli.printable import one_line, printable_json

_REDRAW_S = 0.1
_DRAW_SHARE = 0.1  # largest share of the time spent drawing
SPEEDS = (0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 100.0, None)  # steps per second, None: full speed
KEYS = " q quit · space pause · . one step · + - speed "


class StepPrinter:
    """Prints each step (or one) as its forward pass sees the cache: as tables, or as one JSON object per line."""

    def __init__(
        self,
        console: Console,
        *,
        follow: NamedRequest | None = None,
        only_step: int | None = None,
        as_json: bool = False,
    ) -> None:
        self.moment = Moment(follow=follow)
        self.fold = pool_fold(self.moment)
        self.num_printed = 0
        self._console = console
        self.only_step = only_step
        self._as_json = as_json

    def on_event(self, event: Event) -> None:
        """Handle an event of the engine. Raises TraceError if it contradicts earlier ones."""
        self.fold(event)
        self.show(event)

    def show(self, event: Event) -> None:
        """Print the step once this event completes what its forward pass sees."""
        if isinstance(event, StepScheduled) and self.only_step in (None, event.step):
            self.num_printed += 1
            if self._as_json:
                self._console.file.write(printable_json(msgspec.json.encode(self.moment.summary())).decode() + "\n")
            else:
                print_step_tables(self.moment, self._console)


class LiveView:
    """A context manager; pass its `on_event` to the engine as `emit`.

    On a terminal it draws a full screen from engine start, at most every 100 ms and for at most a tenth of the time;
    space pauses, `.` runs one step, `q` acts as Ctrl-C. Other output to stderr is held back until the screen closes.
    Without a keyboard it never pauses; without a terminal it prints a plain line every ten seconds and for each
    preemption.
    """

    def __init__(
        self,
        console: Console,
        *,
        title: str = "pagedcli trace",
        follow: NamedRequest | None = None,
        paused: bool = False,
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
        self._is_ending = False  # the user has quit: no more pausing

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
            self._console.print(Text(f"the view ended early: {one_line(self._damage)}", "bold red"))

    def on_event(self, event: Event) -> None:
        """Handle an event of the engine. Blocks while paused."""
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
        # only the console may write to the terminal: other output would garble the screen and be lost
        self._console.file = self._console.file
        self._screen.enter_context(redirect_stderr(self._held))
        self._screen.enter_context(self._keyboard)
        self._paused = self._paused and self._keyboard.available  # otherwise nothing could end the pause
        self._live = self._screen.enter_context(
            Live(console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        )

    # ------------------------------------------------------------------ a terminal

    def _pace(self) -> None:
        """Draw if it is time, handle keys, and hold the engine while paused or above the chosen speed."""
        if self._live is None:
            return
        while (key := self._keyboard.read()) is not None:
            self._obey(key)
        with self._noticing_signals():
            if self._paused:
                self._wait_for_step()
            else:
                self._hold_back()
        if not self._paused and time.monotonic() >= self._next_draw:
            self._draw()

    @contextmanager
    def _noticing_signals(self) -> Iterator[None]:
        """Make a signal that requests an orderly stop (it sets a flag and returns) also end the waiting."""
        if threading.current_thread() is not threading.main_thread():  # Python delivers signals only there
            yield
            return

        def handler_before(number: int, before: Any) -> Callable[[int, FrameType | None], None]:
            def on_signal(_: int, frame: FrameType | None) -> None:
                self._is_ending = True
                if callable(before):
                    before(number, frame)

            return on_signal

        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: before for number, before in handlers.items() if callable(before)}
        for number, before in handlers.items():
            signal.signal(number, handler_before(number, before))
        try:
            yield
        finally:
            for number, before in handlers.items():
                signal.signal(number, before)

    def _obey(self, key: str) -> None:
        if key == " ":
            self._paused = not self._paused
        elif key in "+=":
            self._speed_index = min(self._speed_index + 1, len(SPEEDS) - 1)
        elif key in "-_":
            self._speed_index = max(self._speed_index - 1, 0)
        elif key == "q":
            self._is_ending = True
            signal.raise_signal(signal.SIGINT)  # like Ctrl-C: an orderly stop after this step

    def _wait_for_step(self) -> None:
        self._draw()
        while self._paused and not self._is_ending:
            key = self._keyboard.read(_REDRAW_S)
            if key in (".", "n", "right"):
                return
            if key is not None:
                self._obey(key)
                self._draw()

    def _hold_back(self) -> None:
        while not (self._paused or self._is_ending):
            speed = SPEEDS[self._speed_index]
            left = 0.0 if speed is None else self._last_step + 1 / speed - time.monotonic()
            if left <= 0:
                break
            if time.monotonic() >= self._next_draw:
                self._draw()
            if (key := self._keyboard.read(min(left, _REDRAW_S))) is not None:
                self._obey(key)
        self._last_step = time.monotonic()

    def _draw(self) -> None:
        assert self._live is not None
        start = time.monotonic()
        speed = SPEEDS[self._speed_index]
        note = "PAUSED" if self._paused else "" if speed is None else f"{speed:g} steps/s"
        self._live.update(MomentScreen(self.moment, title=self._title, keys=KEYS, note=note), refresh=True)
        end = time.monotonic()
        self._next_draw = end + max(_REDRAW_S, (end - start) / _DRAW_SHARE)

    # ------------------------------------------------------------------ without a terminal

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
