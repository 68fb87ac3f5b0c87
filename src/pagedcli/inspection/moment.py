"""Everything a view shows of one moment of a run: the pool, the figures and the last events.

Used by the live view and by replay, so that they cannot disagree.
"""

from collections import deque

from pagedcli.events import (
    BlockCopied,
    BlockEvicted,
    Event,
    PrefixLookedUp,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    RequestRefused,
    SequenceForked,
)
from pagedcli.inspection.state import PoolState
from pagedcli.inspection.stats import RunStats
from pagedcli.inspection.words import describe, event_seq_ids, plural

_NOTABLE = (
    PrefixLookedUp,
    RequestPreempted,
    BlockEvicted,
    RequestFinished,
    RequestRefused,
    SequenceForked,
    BlockCopied,
)
_KEPT_EVENTS = 400


class Moment:
    """Folds events into a state, its statistics and a short memory of events.

    `follow` is a request id, or `seq:31` for one sequence: its blocks are marked and all its events kept.
    """

    def __init__(self, *, follow: str | None = None) -> None:
        self.state = PoolState()
        self.stats = RunStats()
        self.follow = follow
        self.follow_seq_ids: set[int] = set()
        self._events: deque[tuple[int | None, Event]] = deque(maxlen=_KEPT_EVENTS)

    def apply(self, event: Event) -> None:
        """Take in the next event. Raises TraceError if it is impossible now."""
        self.state.apply(event)
        self.stats.apply(event, self.state)
        if self.follow is None:
            if isinstance(event, _NOTABLE):
                self._events.append((self.state.step_number, event))
        else:
            self._follow(event)

    def _follow(self, event: Event) -> None:
        if isinstance(event, RequestAdded) and self.follow in (event.request_id, f"seq:{event.seq_id}"):
            self.follow_seq_ids.add(event.seq_id)
        if self.follow_seq_ids.intersection(event_seq_ids(event)):
            self._events.append((self.state.step_number, event))

    def followed_blocks(self) -> set[int]:
        """Blocks that the followed request holds."""
        seqs = (self.state.seqs.get(seq_id) for seq_id in self.follow_seq_ids)
        return {block_id for seq in seqs if seq is not None for block_id in seq.block_table}

    def copy(self) -> "Moment":
        """A snapshot that later events do not change."""
        other = Moment(follow=self.follow)
        other.state, other.stats = self.state.copy(), self.stats.copy()
        other.follow_seq_ids = self.follow_seq_ids.copy()
        other._events = self._events.copy()
        return other

    def last_words(self, most: int, *, of_step: int | None = None) -> list[str]:
        """The last events in words, oldest first; evictions of one step in one line."""
        engine = self.state.engine
        lines: list[str] = []
        evicted: list[int] = []
        entries = list(self._events)
        for place in range(len(entries) - 1, -1, -1):
            step, event = entries[place]
            if len(lines) >= most or (of_step is not None and step != of_step):
                break
            if isinstance(event, BlockEvicted) and self.follow is None:
                evicted.append(event.block_id)
                before = entries[place - 1] if place else (None, None)
                if not (before[0] == step and isinstance(before[1], BlockEvicted)):
                    ids = ", ".join(map(str, reversed(evicted[-6:]))) + (" ..." if len(evicted) > 6 else "")
                    lines.append(f"step {step} evict {plural(len(evicted), 'cached block')}: {ids}")
                    evicted.clear()
            elif engine is not None and (line := describe(event, step, engine)) is not None:
                lines.append(line)
        return lines[::-1]
