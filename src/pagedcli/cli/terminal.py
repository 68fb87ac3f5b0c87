"""Messages on stderr, and safe JSON on a terminal."""

import os
import sys
from typing import BinaryIO

from pagedcli.printable import printable, printable_json


def is_interactive(*, with_stdout: bool = True) -> bool:
    """Whether an application may take the terminal: keys come from stdin, and it draws on stderr."""
    streams = [sys.stdin, sys.stderr, *([sys.stdout] if with_stdout else [])]
    plain = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
    return not plain and all(stream is not None and stream.isatty() for stream in streams)


def say(text: str = "") -> None:
    """Print a line on stderr, where everything but data goes."""
    print(printable(text), file=sys.stderr, flush=True)


class TerminalJson:
    """JSON lines for a terminal, with control characters escaped."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, line: bytes) -> int:
        return self._stream.write(printable_json(line))

    def flush(self) -> None:
        self._stream.flush()
