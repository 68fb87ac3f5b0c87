"""The fold: each event of a source is checked by the laws, applied to the state, then passed to the views.

Used by every command that reads events. To add a view, write a View (dispatch.py) and pass it to `fold`; to add a
source, write an EventSource.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from pagedcli.errors import TraceError
from pagedcli.events import Event
from pagedcli.trace.dispatch import Handler, View
from pagedcli.trace.laws import Laws, PoolLaws
from pagedcli.trace.slot_laws import SlotLaws
from pagedcli.trace.state import PoolState


class EventSource(Protocol):
    """Events in order: from a trace file, or published by another engine."""

    notes: list[str]  # harmless anomalies, complete after the last event

    def __iter__(self) -> Iterator[Event]: ...

    @property
    def place(self) -> str:
        """Location of the last event, for messages: `run.jsonl:12`."""


class EventList:
    """Events in memory as a source; a running engine takes it as `emit`."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.notes: list[str] = []
        self.events = list(events)
        self._number = 0

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def __iter__(self) -> Iterator[Event]:
        for number, event in enumerate(self.events, 1):
            self._number = number
            yield event

    @property
    def place(self) -> str:
        return f"event {self._number}"


class Fold:
    """An incremental fold. Call it with each event; a running engine takes it as `emit`. The state trusts the events:
    impossible ones are refused by the laws."""

    def __init__(self, state: PoolState, *views: View, laws: Laws | None = None) -> None:
        self.state = state
        self._views = views
        self._laws = laws
        self._handlers: dict[type[Event], tuple[Handler, ...]] = {}  # handlers of all views, filled as events come

    def __call__(self, event: Event) -> None:
        """Apply the next event. Raises TraceError if it breaks a law; only a law about the state after it has let the
        state change."""
        if self._laws is not None:
            self._laws.before(event, self.state)
        state = self.state
        state.apply(event)
        if self._laws is not None:
            self._laws.after(event, state)
        handlers = self._handlers.get(type(event))
        if handlers is None:
            handlers = tuple(each for view in self._views for each in view.handlers(type(event)))
            self._handlers[type(event)] = handlers
        for handle in handlers:
            handle(event, state)

    def steps(self, source: EventSource) -> Iterator[Event]:
        """Yield the events of a source, each after it was applied. A TraceError names its location."""
        for event in source:
            try:
                self(event)
            except TraceError as error:
                raise TraceError(f"{source.place}: {error.message}", hint=error.hint) from error
            yield event


def pool_fold(*views: View, keep_finished: bool = True) -> Fold:
    """A fold of our engine's events into the exact pool."""
    return Fold(PoolState(keep_finished=keep_finished), *views, laws=Laws(PoolLaws(), SlotLaws()))


def fold(source: EventSource, *views: View) -> PoolState:
    """Fold all events of our engine. Raises TraceError, with its location, for an impossible event."""
    folding = pool_fold(*views)
    for _ in folding.steps(source):
        pass
    return folding.state
