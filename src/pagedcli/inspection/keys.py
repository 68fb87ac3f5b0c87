"""Single key presses from a terminal, without waiting for Enter. Used by the live view and by replay."""

import os
import select
import sys
from types import TracebackType

from pagedcli.interrupt import as_exceptions

try:
    import termios
    import tty
except ImportError:  # no POSIX terminal: the view works without keys
    HAVE_TERMIOS = False
else:
    HAVE_TERMIOS = True

_SEQUENCES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "[H": "home", "[F": "end", "[1~": "home", "[4~": "end",
    "OC": "right", "OD": "left", "OH": "home", "OF": "end", "[5~": "pageup", "[6~": "pagedown",
}  # fmt: skip


class Keyboard:
    """Puts the terminal of stdin into single-key mode while it is open. Ctrl-C raises KeyboardInterrupt.

    Without a terminal (a pipe, a file) `read` always returns None.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._pending = ""
        self._interrupts = as_exceptions()

    def __enter__(self) -> "Keyboard":
        self._interrupts.__enter__()
        if HAVE_TERMIOS and sys.stdin is not None and sys.stdin.isatty():
            self._fd = sys.stdin.fileno()
            self._saved = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)
            self._fd = None
        self._interrupts.__exit__(None, None, None)

    @property
    def available(self) -> bool:
        return self._fd is not None

    def read(self, timeout_s: float = 0.0) -> str | None:
        """The next key: a character, or `left`, `right`, `home`, `end` ...; None if none came in time."""
        if self._fd is None:
            return None
        if not self._pending and select.select([self._fd], [], [], timeout_s)[0]:
            self._pending += os.read(self._fd, 64).decode(errors="replace")
        if not self._pending:
            return None
        if self._pending[0] == "\x1b":
            for sequence, name in _SEQUENCES.items():
                if self._pending[1:].startswith(sequence):
                    self._pending = self._pending[1 + len(sequence) :]
                    return name
        key, self._pending = self._pending[0], self._pending[1:]
        return key
