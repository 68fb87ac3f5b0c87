"""Which request a person means: by the user's own id, by its number, or one sequence as `seq:31`.

Used by --follow and --request. The user's own id takes precedence over a request number.
"""

import difflib
from collections.abc import Iterable

from pagedcli.errors import TraceError, UsageError
from pagedcli.events import Event, RequestAdded, RequestRefused
from pagedcli.trace.fold import EventSource

_MOST_NAMES = 20_000  # compared with an unknown one
_MOST_SHOWN = 3


class NamedRequest:
    """The sequences of the request that a name means, as far as the events seen so far tell."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seq_ids: set[int] = set()
        self._precedence = 0  # the rank of what was found
        self._refused: RequestRefused | None = None
        self._known: dict[str, None] = {}

    def see(self, event: Event) -> None:
        """Take in the next event; only added and refused requests matter."""
        if not isinstance(event, RequestAdded | RequestRefused):
            return
        if len(self._known) < _MOST_NAMES:
            self._known[event.request_id if event.row_id is None else event.row_id] = None
        if isinstance(event, RequestRefused):
            if self.name in (event.row_id, event.request_id):
                self._refused = event
            return
        numbers = (event.request_id, event.request_id.partition("/")[0])  # the second prompt of row 4 is 4/1
        named = (self.name == f"seq:{event.seq_id}", self.name in numbers, self.name == event.row_id)
        precedence = max(place * is_named for place, is_named in enumerate(named, 1))
        if precedence > self._precedence:
            self._precedence = precedence
            self.seq_ids.clear()
        if precedence and precedence == self._precedence:
            self.seq_ids.add(event.seq_id)

    def check(self, where: str) -> None:
        """Raises: UsageError, with the nearest names, if no sequence was found. `where`: `run.jsonl`, `this run`."""
        if self.seq_ids:
            return
        if self._refused is not None:
            raise UsageError(f"request {self.name!r} of {where} was refused: {self._refused.message}")
        raise unknown_request(self.name, self._known, where)


def find_request(source: EventSource, name: str, where: str) -> NamedRequest:
    """The request of a recorded run. Raises: UsageError, with the nearest names, if there is none;
    TraceError if the source is not a trace."""
    found, event = NamedRequest(name), None
    try:
        for event in source:
            found.see(event)
    except TraceError:
        if event is None:  # not a trace: a damaged one can be shown up to its damage
            raise
    found.check(where)
    return found


def unknown_request(name: str, known: Iterable[str], where: str) -> UsageError:
    """The error for a name that means nothing, with the nearest of the known names."""
    names = list(known)
    parts = [each for each in names if name.lower() in each.lower()]
    nearest = (parts + difflib.get_close_matches(name, names, n=_MOST_SHOWN))[:_MOST_SHOWN]
    shown = ", ".join(dict.fromkeys(nearest or names[:_MOST_SHOWN]))
    hint = "name a request by its id or number, or one sequence as seq:31"
    if names:
        hint = f"{'nearest' if nearest else 'the first ones'}: {shown}; one sequence is named as seq:31"
    return UsageError(f"there is no request {name!r} in {where}", hint=hint)
