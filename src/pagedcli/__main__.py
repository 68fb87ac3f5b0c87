"""The console script, and `python -m pagedcli`."""

import os
import sys
from contextlib import suppress
from io import TextIOWrapper

from pagedcli import process


def _open_closed_streams() -> None:
    """Put something in the place of a closed stdin, stdout or stderr; otherwise the next file that is opened takes it.

    Messages for a closed stderr are dropped. Reading the closed stdin and writing to the closed stdout fail, with a
    message and exit code 1 (see cli.main), as rows must not get lost silently.
    """
    for number, (name, mode) in enumerate((("stdin", os.O_WRONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY))):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, mode), number)
                setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def _show_what_stdout_can() -> None:
    """Print ? for characters that the locale has not; rows of JSON are bytes."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def run() -> None:
    """Run the command line. Ctrl-C gets its handler before anything else is imported."""
    process.end_on_interrupt()
    _open_closed_streams()
    _show_what_stdout_can()
    from pagedcli.cli.main import run as run_command

    run_command()


if __name__ == "__main__":
    run()
