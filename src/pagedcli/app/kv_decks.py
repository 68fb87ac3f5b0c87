"""A server's KV events, live or recorded, as decks of pictures of its prefix trees."""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

from pagedcli.app.deck import Recording, RunningDeck
from pagedcli.kvevents.branches import Branch, Shape, largest_branches
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.summary import cache_rows, churn_rows, facts, limits, lora_rows

_MOST_BRANCHES = 200
_MOST_TREES = 4
_INTERVAL_S = 0.25  # least time between two pictures
_DRAW_SHARE = 0.1  # largest share of the fold's time spent on pictures
_COUNTS = {"eviction": "num_removed", "miss": "num_tokens_again"}  # a message that raises it is such a place
Message = tuple[list[bytes], float | None, int]  # frames, seconds, source


@dataclass(frozen=True, slots=True)
class Picture:
    """What the screen shows of a state. Later messages do not change it, but for the blocks of its branches."""

    seconds: float  # watched so far
    facts: dict[str, Any]
    caches: list[dict[str, Any]]
    adapters: list[dict[str, Any]]
    churn: list[dict[str, Any]]
    branches: list[tuple[Branch, float]]  # with its share of the tokens of its tree
    notes: list[str]

    @classmethod
    def of(cls, state: KVState, seconds: float) -> "Picture":
        """The picture of a state, whose trees it walks."""
        trees = sorted(state.trees, key=lambda tree: -tree.num_resident)[:_MOST_TREES]
        branches: list[tuple[Branch, float]] = []
        for tree in trees:
            shape = Shape(tree)
            total = sum(shape.num_tokens[node.hash] for node in shape.roots) or 1
            most = _MOST_BRANCHES // len(trees)
            branches += [(branch, branch.num_tokens / total) for branch in largest_branches(shape, most)]
        churn = [row for row in churn_rows(state) if row["num_blocks"]]
        notes = [*reversed(state.notes), *limits(state)]
        return cls(seconds, facts(state), cache_rows(state), lora_rows(state), churn, branches, notes)


class AttachDeck(RunningDeck[Picture]):
    """A running server. `offer` belongs to the thread that folds its messages, all else to the screen's."""

    unit = "picture"
    closes_at_end = True

    def __init__(self) -> None:
        super().__init__(paused=False, speed=None)
        self.has_started.set()
        self._picture: Picture | None = None
        self._shown: Picture | None = None
        self._next_s = 0.0
        self._num_allowed = 0  # pictures while paused

    def offer(self, state: KVState, seconds: float) -> None:
        """Draw a picture if it is time."""
        start_s = time.monotonic()
        if start_s < self._next_s or self._picture is not self._shown:
            return
        self._picture = Picture.of(state, seconds)
        end_s = time.monotonic()
        self._next_s = end_s + max(_INTERVAL_S, (end_s - start_s) / _DRAW_SHARE)

    @property
    def moment(self) -> Picture | None:
        return self._shown

    @property
    def place(self) -> str:
        return "" if self._shown is None else f"{self._shown.seconds:,.0f} s"

    def poll(self) -> bool:
        if self._picture is self._shown or (self.paused and not self._num_allowed):
            return False
        self._num_allowed = max(0, self._num_allowed - 1)
        self._shown = self._picture
        return True

    def step(self, count: int) -> str:
        if count < 0:
            return self.no_way_back
        self.paused = True
        self._num_allowed += count
        return ""

    def go_to(self, number: int) -> str:
        return self.no_way_back

    def go_to_end(self, *, last: bool) -> str:
        self.paused = self.paused and not last
        return "" if last else self.no_way_back

    def jump(self, name: str, *, backward: bool) -> str:
        return "only a recording has places to jump to: see --record"


class CaptureDeck(Recording[Picture]):
    """A recording, message by message. Stepping back folds it again from the start."""

    unit = "message"

    def __init__(self, messages: Iterable[Message], sources: list[str]) -> None:
        super().__init__()
        self._messages = list(messages)
        self._sources = sources
        self._state = KVState(sources, keep_tokens=True)
        self._position = 0  # messages folded
        self._picture: Picture | None = None
        self._places: dict[str, list[int]] = {}  # of each kind, found at the first jump

    @property
    def position(self) -> int:
        return self._position

    @property
    def last(self) -> int:
        return len(self._messages)

    @property
    def moment(self) -> Picture:
        if self._picture is None:
            self._picture = Picture.of(self._state, self._state.time_s or 0.0)
        return self._picture

    @property
    def place(self) -> str:
        return f"message {self._position:,} of {self.last:,}"

    def go(self, position: int) -> None:
        if position < self._position:
            self._state, self._position = KVState(self._sources, keep_tokens=True), 0
        for frames, time_s, source in self._messages[self._position : position]:
            self._state.take(frames, time_s, source)
        self._position, self._picture = position, None

    def go_to(self, number: int) -> str:
        return f"there is no message {number:,}" if number > self.last else self.move_to(number)

    def jump(self, name: str, *, backward: bool) -> str:
        places = self._found(name)
        if backward:
            index = bisect_left(places, self._position) - 1
        else:
            index = bisect_right(places, self._position)
        if 0 <= index < len(places):
            return self.move_to(places[index])
        return f"no {'earlier' if backward else 'later'} {name}"

    def _found(self, name: str) -> list[int]:
        """The places right after a message with an eviction, or with blocks that were stored again."""
        if not self._places:
            state, before = KVState(self._sources), dict.fromkeys(_COUNTS, 0)
            self._places = {kind: [] for kind in _COUNTS}
            for position, (frames, time_s, source) in zip(count(1), self._messages, strict=False):
                state.take(frames, time_s, source)
                for kind, total in _COUNTS.items():
                    if (now := state.total(total)) > before[kind]:
                        self._places[kind].append(position)
                        before[kind] = now
        return self._places.get(name, [])
