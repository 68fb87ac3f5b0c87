"""Observers of a running engine's events that print: the tables of each step, or plain lines.

Used by `pagedcli trace`, `replay` and `generate`.
"""

import time
from typing import Self

import msgspec
from rich.console import Console
from rich.text import Text

from pagedcli.errors import TraceError
from pagedcli.events import Event, StepFinished, StepScheduled
from pagedcli.printable import one_line, printable_json
from pagedcli.show.step_tables import print_step_tables, print_summary
from pagedcli.trace.dispatch import View
from pagedcli.trace.fold import pool_fold
from pagedcli.trace.state import PoolState
from pagedcli.views.moment import Moment
from pagedcli.views.names import NamedRequest


class StepPrinter:
    """Prints each step (or one) as its forward pass sees the cache: as tables, or as one JSON object per line.

    `views` fold the same events.
    """

    def __init__(
        self,
        console: Console,
        *views: View[PoolState],
        follow: NamedRequest | None = None,
        only_step: int | None = None,
        as_json: bool = False,
    ) -> None:
        self.moment = Moment(follow=follow)
        self.fold = pool_fold(self.moment, *views)
        self.num_printed = 0
        self._console = console
        self.only_step = only_step
        self._as_json = as_json

    def on_event(self, event: Event) -> None:
        """Handle an event of the engine. Raises TraceError if it contradicts earlier ones."""
        self.fold(event)
        self.show(event)

    def settled(self) -> PoolState:
        """The state after all events so far."""
        return self.moment.state

    def show(self, event: Event) -> None:
        """Print the step once this event completes what its forward pass sees."""
        if isinstance(event, StepScheduled) and self.only_step in (None, event.step):
            self.num_printed += 1
            if self._as_json:
                self._console.file.write(printable_json(msgspec.json.encode(self.moment.summary())).decode() + "\n")
            else:
                print_step_tables(self.moment, self._console)


class PlainView:
    """Prints a plain line for each preemption, one for the whole run every ten seconds, and a summary at the end.

    A context manager; pass its `on_event` to the engine as `emit`. It only observes: inconsistent events end the view,
    not the run. `views` fold the same events.
    """

    def __init__(self, console: Console, *views: View[PoolState], follow: NamedRequest | None = None) -> None:
        self.moment = Moment(follow=follow)
        self._fold = pool_fold(self.moment, *views)
        self._console = console
        self._next_line_s = 0.0
        self._damage: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        print_ending(self.moment, self._damage, self._console)

    def settled(self) -> PoolState | None:
        """The state after all events so far; None: they contradict each other."""
        return self.moment.state if self._damage is None else None

    def on_event(self, event: Event) -> None:
        if self._damage is not None:
            return
        try:
            self._fold(event)
        except TraceError as error:
            self._damage = error.message
            return
        if isinstance(event, StepFinished):
            self._print_lines()

    def _print_lines(self) -> None:
        state, now_s = self.moment.state, time.monotonic()
        assert state.step is not None
        if state.step.preemptions:
            for line in self.moment.last_words(100, of_step=state.step.step):
                if " preempt " in line:
                    self._console.print(Text(line), soft_wrap=True)
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + 10
            self._console.print(Text(self.moment.line()), soft_wrap=True)


def print_ending(moment: Moment, damage: str | None, console: Console) -> None:
    """Print the summary of a run that has started, and what ended its view early."""
    if moment.state.engine is not None:
        print_summary(moment, console)
    if damage is not None:
        console.print(Text(f"the view ended early: {one_line(damage)}", "bold red"))
