"""What an application shows and how its keys move it: the contract between screens and recordings or running engines.

Nothing here draws.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from pagedcli.views.moment import next_place

M = TypeVar("M")

SPEEDS = (0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 100.0, None)  # steps per second, None: full speed


class Player(ABC, Generic[M]):
    """A source of moments with play, pause and speed. A method that cannot do what its key asks for returns why."""

    unit = "step"  # what one press of `.` advances by
    closes_at_end = False  # the screen, without a key

    def __init__(self, *, paused: bool, speed: float | None) -> None:
        self.paused = paused
        self._speed_index = SPEEDS.index(speed)

    @property
    @abstractmethod
    def moment(self) -> M | None:
        """What to show; None: nothing yet. It does not change until `poll`."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it is, for the head line."""

    @property
    def is_at_end(self) -> bool:
        """Whether nothing follows what is shown."""
        return False

    @property
    def wait_s(self) -> float:
        """Until the next `poll`."""
        return 0.1

    @property
    def speed(self) -> float | None:
        """Steps per second, None: full speed."""
        return SPEEDS[self._speed_index]

    @abstractmethod
    def poll(self) -> bool:
        """Called several times per second. Whether `moment` is another one."""

    def toggle_pause(self) -> str:
        self.paused = not self.paused
        return ""

    def faster(self, by: int) -> None:
        """The next speed, or with -1 the one before."""
        self._speed_index = max(0, min(self._speed_index + by, len(SPEEDS) - 1))

    @abstractmethod
    def step(self, count: int) -> str:
        """Move by some steps, back if negative, and pause."""

    @abstractmethod
    def go_to(self, number: int) -> str:
        """Move to a step by its number."""

    @abstractmethod
    def go_to_end(self, *, last: bool) -> str:
        """Move to the first or the last step."""

    @abstractmethod
    def jump(self, name: str, *, backward: bool) -> str:
        """Move to the next or previous preemption, eviction or miss."""


class RunningPlayer(Player[M]):
    """A player of something that runs in another thread."""

    no_way_back = "what runs cannot go back: record it with --record, then use pagedcli trace"
    moment: M | None = None

    def __init__(self, *, paused: bool, speed: float | None) -> None:
        super().__init__(paused=paused, speed=speed)
        self.has_started = threading.Event()
        self.screen_is_open = threading.Event()
        self.has_ended = False
        self.stop_requested = False

    def request_stop(self) -> None:
        """End it soon; the second time, at once."""
        self.stop_requested = True

    def release(self) -> None:
        """Nobody watches any more: it must not wait for keys."""
        self.screen_is_open.set()

    def finish(self) -> None:
        """It has ended. Called by its thread."""
        self.has_ended = True
        self.has_started.set()


class Recording(Player[M]):
    """A player that can move to any of its places, 0 to `last`."""

    def __init__(self) -> None:
        super().__init__(paused=True, speed=5.0)
        self._shown = -1
        self._target = 0.0  # fractional while playing
        self._last_poll = time.monotonic()

    @property
    @abstractmethod
    def position(self) -> int:
        """Number of the current stop, from 0."""

    @property
    @abstractmethod
    def last(self) -> int:
        """Number of the last stop."""

    @abstractmethod
    def go(self, position: int) -> None:
        """Move there; between 0 and `last`."""

    @property
    def is_at_end(self) -> bool:
        return self.position == self.last

    def poll(self) -> bool:
        now = time.monotonic()
        if not self.paused:
            speed = self.speed if self.speed is not None else max(200.0, self.last / 5)
            self._target = min(self.last, self._target + speed * (now - self._last_poll))
            self.paused = self._target >= self.last
        self._last_poll = now
        if int(self._target) != self.position:
            self.go(int(self._target))
        is_new, self._shown = self.position != self._shown, self.position
        return is_new

    def toggle_pause(self) -> str:
        if self.paused and self.position == self.last:
            return "this is the end"
        return super().toggle_pause()

    def move_to(self, position: int) -> str:
        """Go to a place, as far as there is one, and pause."""
        self.paused = True
        self._target = max(0, min(position, self.last))
        return "this is the end" if position > self.last else "this is the beginning" if position < 0 else ""

    @abstractmethod
    def landmarks(self, name: str) -> Sequence[int]:
        """The places of a kind, rising."""

    def jump(self, name: str, *, backward: bool) -> str:
        place = next_place(self.landmarks(name), self.position, backward=backward)
        return f"no {'earlier' if backward else 'later'} {name}" if place is None else self.move_to(place)

    def step(self, count: int) -> str:
        return self.move_to(int(self._target) + count)

    def go_to_end(self, *, last: bool) -> str:
        return self.move_to(self.last if last else 0)
