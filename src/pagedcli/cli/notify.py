"""`generate --notify CMD`: a command at the end of a run, however it ends, with the run's counts in its environment."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer

from pagedcli.batch.stats import BatchStats
from pagedcli.errors import PagedcliError
from pagedcli.printable import one_line
from pagedcli.process import EXIT_INTERRUPTED
from pagedcli.show.terminal import say

_STDERR = 2  # stdout has the rows


@dataclass(slots=True)
class Ending:
    """How a run ends, as far as it is known."""

    stats: BatchStats | None = None  # None: no row was read
    exit_code: int = 1
    error: str = ""

    def observe(self, stats: BatchStats) -> None:
        """The run has these counts, which change while it goes on."""
        self.stats = stats

    def variables(self, input_name: str, output: str, seconds: float) -> dict[str, str]:
        """What the command finds in its environment."""
        stats = self.stats or BatchStats()
        found = {
            "EXIT_CODE": self.exit_code,
            "ROWS": stats.num_finished,
            "FAILED_ROWS": stats.num_finished_failed,
            "PROMPT_TOKENS": stats.facts.num_prompt_tokens,
            "CACHED_TOKENS": stats.facts.num_cached_tokens,
            "GENERATED_TOKENS": stats.facts.num_generated_tokens,
            "SECONDS": f"{seconds:.1f}",
            "INPUT": input_name,
            "OUTPUT": output,
            "ERROR": one_line(self.error),
        }
        return {f"PAGEDCLI_{name}": str(value).replace("\0", "") for name, value in found.items()}


@contextmanager
def notifying(command: str | None, input_name: str, output: str) -> Iterator[Ending]:
    """Run a shell command after this context, also if it ends with an error or Ctrl-C. If the command fails that is a
    warning: what the run has written and its exit code stay."""
    ending, start_s = Ending(), time.monotonic()
    try:
        yield ending
    except PagedcliError as error:
        ending.exit_code, ending.error = error.exit_code, error.message
        raise
    except KeyboardInterrupt:
        ending.exit_code, ending.error = EXIT_INTERRUPTED, "interrupted"
        raise
    except typer.Exit as end:
        ending.exit_code = end.exit_code
        raise
    except Exception as error:
        ending.error = f"{type(error).__name__}: {error}"
        raise
    finally:
        if command is not None:
            _run(command, ending.variables(input_name, output, time.monotonic() - start_s))


def _run(command: str, variables: dict[str, str]) -> None:
    try:
        environment = os.environ | variables
        done = subprocess.run(command, shell=True, env=environment, stdin=subprocess.DEVNULL, stdout=_STDERR)
    except KeyboardInterrupt:
        say("warning: --notify was interrupted")
    except (OSError, ValueError) as error:
        say(f"warning: --notify cannot run its command: {error}")
    else:
        if done.returncode:
            say(f"warning: --notify: the command ended with exit code {done.returncode}")
