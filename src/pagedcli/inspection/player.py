"""The screen of `pagedcli replay`: play, step forward and back, jump. Used only by the command."""

import time

from rich.console import Console
from rich.live import Live

from pagedcli.inspection.keys import Keyboard
from pagedcli.inspection.live import SPEEDS
from pagedcli.inspection.replay import Landmark, Replay
from pagedcli.inspection.view import MomentScreen

KEYS = " q quit · ←→ step · ↑↓ 10 · space play · + - speed · p/e/m next preemption/eviction/miss, P/E/M last · 12⏎ go "
_JUMPS = {"left": -1, "right": 1, ",": -1, ".": 1, "up": -10, "down": 10, "pageup": -100, "pagedown": 100}
_LANDMARKS: dict[str, Landmark] = {"p": "preemption", "e": "eviction", "m": "miss"}
_REDRAW_S = 0.1


class Player:
    """Shows a Replay on a terminal until `q`."""

    def __init__(self, replay: Replay, console: Console, *, stop: int = 0, title: str = "pagedcli replay") -> None:
        self._replay = replay
        self._console = console
        self._title = title
        self._stop = stop
        self._playing = False
        self._speed_index = SPEEDS.index(5.0)
        self._typed = ""  # digits of the step to go to
        self._said = ""

    def run(self) -> None:
        """Return when the user quits."""
        with Keyboard() as keyboard, Live(console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                started = time.monotonic()
                moment = self._replay.go(self._stop)
                self._stop = self._replay.position
                live.update(MomentScreen(moment, title=self._title, keys=KEYS, note=self._note()), refresh=True)
                key = keyboard.read(self._pause_s(started))
                if key == "q":
                    return
                if key is not None:
                    self._obey(key)
                elif self._playing:
                    self._play_on()

    def _pause_s(self, started: float) -> float:
        if not self._playing:
            return 3600.0
        return max(0.0, started + max(_REDRAW_S, 1 / (SPEEDS[self._speed_index] or 1e9)) - time.monotonic())

    def _play_on(self) -> None:
        """Advance as many steps as the speed requires between two redraws."""
        speed = SPEEDS[self._speed_index]
        self._stop += max(1, round(speed * _REDRAW_S)) if speed is not None else max(1, self._replay.last_stop // 100)
        self._playing = self._stop < self._replay.last_stop

    def _obey(self, key: str) -> None:
        self._said = ""
        if key.isdigit():
            self._typed += key
            return
        if key == "\x7f":  # backspace
            self._typed = self._typed[:-1]
            return
        typed, self._typed = self._typed, ""
        if key == " ":
            self._playing = not self._playing
        elif key in ("+", "="):
            self._speed_index = min(self._speed_index + 1, len(SPEEDS) - 1)
        elif key in ("-", "_"):
            self._speed_index = max(self._speed_index - 1, 0)
        elif key in _JUMPS:
            self._stop += _JUMPS[key]
        elif key in ("home", "end"):
            self._stop = 0 if key == "home" else self._replay.last_stop
        elif key.lower() in _LANDMARKS:
            name = _LANDMARKS[key.lower()]
            found = self._replay.next_landmark(name, backward=key.isupper())
            self._said = "" if found is not None else f"no {'earlier' if key.isupper() else 'later'} {name}"
            self._stop = self._stop if found is None else found
        elif key in ("\n", "\r", "g") and typed:
            found = self._replay.stop_of_step(int(typed))
            self._said = "" if found is not None else f"there is no step {typed}"
            self._stop = self._stop if found is None else found

    def _note(self) -> str:
        replay = self._replay
        speed = SPEEDS[self._speed_index]
        parts = [
            f"{replay.position + 1}/{replay.last_stop + 1}" if replay.steps[replay.position] is not None else "END"
        ]
        if self._playing:
            parts.append("playing" + ("" if speed is None else f" {speed:g} steps/s"))
        if self._typed:
            parts.append(f"go to step {self._typed}")
        if replay.damage is not None and replay.position == replay.last_stop:
            parts.append(f"DAMAGED AFTER THIS: {replay.damage}")
        return "  ".join([*parts, self._said])
