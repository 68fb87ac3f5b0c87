"""`generate --verify N`: generates some rows of a finished run again, each alone and with nothing in the prefix cache.

Used by batch.job. The engine is the one of the run.
"""

import io
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from pagedcli.batch.compare import Difference, compare, row_of
from pagedcli.batch.intake import BatchOptions
from pagedcli.batch.lines import Line
from pagedcli.batch.rows import Answer, RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import StreamSink
from pagedcli.batch.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagedcli.runner.llm_engine import LLMEngine


class RowSample:
    """Some finished rows of a run, each equally likely; always the same ones for the same order of completion."""

    def __init__(self, num_wanted: int) -> None:
        self.rows: list[tuple[Line, list[Answer]]] = []
        self._num_wanted = num_wanted
        self._num_seen = 0
        self._random = Random(0)

    def add(self, line: Line, answers: list[Answer]) -> None:
        self._num_seen += 1
        if len(self.rows) < self._num_wanted:
            self.rows.append((line, answers))
        elif (place := self._random.randrange(self._num_seen)) < self._num_wanted:
            self.rows[place] = (line, answers)


def run_again(
    engine: "LLMEngine", tokenizer: Tokenizer, rows: RowWriter, options: BatchOptions, sample: RowSample
) -> list[Difference]:
    """Generate the rows of a sample again, one after the other. Returns the first difference of each that has one."""
    differences = []
    for line, answers in sample.rows:
        again = RowSample(1)
        name, sink = f"again-{line.index}", StreamSink(io.BytesIO(), order="completion")
        alone = replace(options, limit=None, max_errors=None, shard=(0, 1), reorder="none", check_ids=False, apart=name)
        BatchRun(engine, tokenizer, [line], sink, rows, alone, observe_row=again.add).run()
        label = f"row {line.index}"
        if not again.rows:
            differences.append(Difference(label, "error", a="no error", b="an error"))
        elif (difference := compare(row_of(label, answers), row_of(label, again.rows[0][1]))) is not None:
            differences.append(difference)
    return differences
