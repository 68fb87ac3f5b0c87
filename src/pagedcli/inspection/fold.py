"""The one fold: events of any source in; the laws check them, the state changes, the views look at it.

Used by every command that looks at events. To add a view, write a View (dispatch.py) and give it to `fold`; to add a
source, write an EventSource, with a state of its own if it knows less than our engine.
"""

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from pagedcli.errors import TraceError
from pagedcli.events import Event
from pagedcli.inspection.dispatch import View
from pagedcli.inspection.laws import PoolLaws
from pagedcli.inspection.state import PoolState


class EventSource(Protocol):
    """Events in their order: a trace file, or what another engine publishes."""

    notes: list[str]  # what was odd but harmless, complete after the last event

    def __iter__(self) -> Iterator[Event]: ...

    @property
    def place(self) -> str:
        """Where the event given last stands, for messages: `run.jsonl:12`."""
        ...


class EventList:
    """Events in memory as a source."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.notes: list[str] = []
        self._events = events
        self._number = 0

    def __iter__(self) -> Iterator[Event]:
        for number, event in enumerate(self._events, 1):
            self._number = number
            yield event

    @property
    def place(self) -> str:
        return f"event {self._number}"


class State(Protocol):
    """What the events say of a cache. It trusts them: what cannot be is found by laws."""

    def apply(self, event: Event) -> None: ...


S = TypeVar("S", bound=State)
S_contra = TypeVar("S_contra", contravariant=True)


class Laws(Protocol[S_contra]):
    """Refuses events that are impossible in the state they meet."""

    def check(self, event: Event, state: S_contra) -> None:
        """Raises TraceError. Called before the state has the event."""
        ...


class Fold(Generic[S]):
    """A fold under way. Call it with each event: it is what a running engine takes as `emit`."""

    def __init__(self, state: S, *views: View[S], laws: Laws[S] | None = None) -> None:
        self.state = state
        self._views = views
        self._laws = laws

    def __call__(self, event: Event) -> None:
        """Take in the next event. Raises TraceError if it breaks a law; the state is then as before it."""
        if self._laws is not None:
            self._laws.check(event, self.state)
        self.state.apply(event)
        for view in self._views:
            view.apply(event, self.state)

    def steps(self, source: EventSource) -> Iterator[Event]:
        """The events of a source, each after the fold has taken it in. A TraceError names its place."""
        for event in source:
            try:
                self(event)
            except TraceError as error:
                raise TraceError(f"{source.place}: {error.message}", hint=error.hint) from error
            yield event


def pool_fold(*views: View[PoolState]) -> Fold[PoolState]:
    """A fold of the events of our engine into the exact pool."""
    return Fold(PoolState(), *views, laws=PoolLaws())


def fold(source: EventSource, *views: View[PoolState]) -> PoolState:
    """Fold all events of our engine. Raises TraceError, with the place, for an event that no pool could make."""
    folding = pool_fold(*views)
    for _ in folding.steps(source):
        pass
    return folding.state
