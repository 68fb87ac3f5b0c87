"""Messages on stderr, and safe JSON on a terminal."""

import sys
from typing import BinaryIO

from pagedcli.printable import printable, printable_json


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
