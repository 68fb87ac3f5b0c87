"""Text that is safe to print: nothing from a prompt, a path or a model may steer the terminal."""

import re
import sys
from typing import BinaryIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_CONTROL_BYTES = re.compile(rb"\x7f|\xc2[\x80-\x9f]|\xe2\x80[\x8e\x8f\xaa-\xae]|\xe2\x81[\xa6-\xa9]")


def printable(text: str) -> str:
    """The text with control characters, and those that reverse its direction, shown as escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(text: str = "") -> None:
    """A line on stderr, where everything goes that is not data."""
    print(printable(text), file=sys.stderr, flush=True)


class TerminalJson:
    """JSON lines for a terminal. JSON escapes the control characters below space itself; this does the others."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, line: bytes) -> int:
        return self._stream.write(_CONTROL_BYTES.sub(_json_escape, line))

    def flush(self) -> None:
        self._stream.flush()


def _json_escape(match: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(match[0].decode())
