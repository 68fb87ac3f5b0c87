"""A batch job: combines the files, the fingerprint and the engine of one run. Does not use the terminal.

Used by cli.session, which reports progress. The methods are the steps, in order; each may reject the job.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from pagedcli import runner
from pagedcli.batch.columns import Columns, kind_of, notes_of
from pagedcli.batch.compare import RowDifference, RowSample, run_again
from pagedcli.batch.delimited import CsvLines
from pagedcli.batch.fingerprint import input_fingerprint, kernel_fingerprint, run_fingerprint, run_key
from pagedcli.batch.journal import (
    RunRecord,
    check_finished,
    check_output,
    earlier_output,
    is_to_be_replaced,
    open_journal,
    output_files,
)
from pagedcli.batch.lines import InputScan, LineSource
from pagedcli.batch.parquet import ParquetRows, ParquetSource, require_pyarrow
from pagedcli.batch.prompts import BatchOptions, KeptColumns, batch_options, check_defaults, open_source, open_tokenizer
from pagedcli.batch.repeats import KnownRows
from pagedcli.batch.requests import BatchRow, RowPrompt
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import FileSink, JsonLines, Sink, StreamSink
from pagedcli.batch.stats import BatchStats
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.buckets import is_url
from pagedcli.config import LoadedConfig
from pagedcli.errors import UsageError
from pagedcli.files import METRICS, SUMMARY, TRACE, check_distinct, check_new, is_stream
from pagedcli.models.hub import model_folder
from pagedcli.models.reading import read_spec


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, and where to write the rows."""

    loaded: LoadedConfig
    input_name: str  # a path, or '-' for stdin
    output: Path | None  # None: stdout
    is_text: bool = False  # whether the input is one prompt, whose answer a terminal shows as text
    resume: bool = False
    overwrite: bool = False
    shard: tuple[int, int] = (0, 1)  # (i, n): the rows whose index % n is i
    metrics: Path | None = None  # counters for Prometheus, rewritten during the run
    summary_json: Path | None = None  # the run's last lines for machines
    record: Path | None = None  # the trace
    num_verified: int = 0  # rows to generate again at the end
    reuse: tuple[Path, ...] = ()  # earlier outputs, whose rows are taken over
    others: Mapping[str, Path] = field(default_factory=dict)  # more files that are written: what each is -> its path
    watch: Callable[[BatchStats], None] = lambda stats: None  # receives the counts of the run, which change

    @property
    def output_file(self) -> Path | None:
        """The output, if it is a regular file: it appears at the end, complete."""
        return None if self.output is None or is_stream(self.output) else self.output

    @property
    def columns(self) -> Columns:
        """The columns of input and output. Raises: UsageError if names collide."""
        return Columns.of(self.loaded.config.run, kind=kind_of(self.output))

    @property
    def shard_name(self) -> str:
        return f"{self.shard[0] + 1}/{self.shard[1]}"

    @property
    def read_files(self) -> dict[str, Path]:
        """The files that the run reads, for files.check_distinct."""
        config, sources = self.loaded.config, self.loaded.sources.values()
        named = {"the model": config.engine.model, "--chat-template": config.run.chat_template}
        named["the configuration"] = next((source for source in sources if not source.startswith("--")), None)
        named |= {f"--reuse {path}": str(path) for path in self.reuse}
        files = {what: Path(name) for what, name in named.items() if name is not None and "\n" not in name}
        return input_files(self.input_name) | {what: path for what, path in files.items() if _is_file(path)}

    def check_files(self) -> None:
        """Raises: UsageError if a file would be destroyed, or if the flags about files contradict each other."""
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite exclude each other")
        if self.resume and self.output_file is None:
            raise UsageError("--resume needs an output file: give one with -o")
        if self.output is not None and (self.output.is_dir() or not self.output.name):
            raise UsageError(f"the output is {self.output}, which is a folder", hint="-o takes the name of a file")
        reads = self.read_files
        others = {"--metrics": self.metrics, "--summary-json": self.summary_json, "--record": self.record}
        others |= self.others
        outputs = {"the output": self.output} if self.output_file is None else output_files(self.output_file)
        check_distinct(reads, {**outputs, **others})
        if self.output_file is not None:
            if self.shard[1] > 1 and kind_of(self.output_file) == "csv":
                raise UsageError("a shard is written as JSONL, which merge reads", hint="-o shard.jsonl")
            check_output(self.output_file, resume=self.resume, overwrite=self.overwrite)
        check_new("--metrics", self.metrics, kind=METRICS, overwrite=True)
        check_new("--summary-json", self.summary_json, kind=SUMMARY, overwrite=self.overwrite or self.resume)
        check_new("--record", self.record, kind=TRACE, overwrite=self.overwrite or self.resume)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a template as text, too long for a name
        return False


def input_files(input_name: str) -> dict[str, Path]:
    """For files.check_distinct."""
    path = Path(input_name)
    if path.is_dir():
        return {f"the input file {each.name}": each for each in path.iterdir()}
    return {} if input_name == "-" or is_url(input_name) else {"the input": path}


class OpenJob:
    """A job with its input open, after Job.check_files. Raises: UsageError if the input cannot be read."""

    def __init__(self, job: Job) -> None:
        self.job = job
        columns = job.columns
        self.lines = open_source(job.input_name, columns)
        self._format = _row_format(job, self.lines, columns)
        self._columns = self._format.row_columns if isinstance(self._format, ParquetRows) else columns
        self._kept = KeptColumns(self.lines, columns, in_rows=self._columns.copies)
        deduplicate = job.loaded.config.run.deduplicate
        self._known = KnownRows(keeps_own=deduplicate) if deduplicate or job.reuse else None
        self.sample = RowSample(job.num_verified)
        self.earlier: Path | None = None  # the output of an earlier run with the same prompts and model, if known
        self._num_rows: int | None = None  # rows of the output; None: unknown
        self._read: InputScan | None = None  # the rows up to the limit, if they have been read
        self._tokenizer: Tokenizer | None = None
        self._fingerprint: dict[str, str] = {}

    @property
    def notes(self) -> list[str]:
        """What to say of the input and of earlier outputs, after open_sink."""
        carried = self._format.carried_as if isinstance(self._format, ParquetRows) else {}
        return [*self._kept.notes, *notes_of(carried, carried), *([] if self._known is None else self._known.notes)]

    @property
    def can_reuse(self) -> bool:
        """Whether an earlier output has rows under the same settings, after open_sink."""
        return self._known is not None and self._known.has_earlier

    def finished(self) -> RunRecord | None:
        """The record of the run, if it is being resumed and already complete. Raises: UsageError."""
        job, config = self.job, self.job.loaded.config
        if not job.resume or job.output_file is None or is_to_be_replaced(job.output_file):
            return None
        return check_finished(
            job.output_file, self._fingerprint, self.lines, order=config.run.order, limit=config.run.limit
        )

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "load_tokenizer comes first"
        return self._tokenizer

    def load_tokenizer(self) -> None:
        config = self.job.loaded.config
        folder = model_folder(config.engine)
        # a broken config.json is refused as such, before transformers blames the tokenizer
        read_spec(folder, trust_remote_code=config.engine.trust_remote_code)
        self._tokenizer = open_tokenizer(config, folder)
        check_defaults(config.sampling)
        self._fingerprint = run_fingerprint(config, folder, self._tokenizer, shard=self.job.shard_name)

    def open_sink(self, stdout: BinaryIO) -> Sink:
        """The sink of the rows: a file or stream is opened; without one it is `stdout`."""
        job = self.job
        scans = self.lines.scan(job.loaded.config.run.limit, observe=self._kept.add)
        self._kept.check()
        if scans is not None:
            self._read = scans[1]
            self._num_rows = len(range(job.shard[0], self._read.num_rows, job.shard[1]))
        if self._known is not None and job.reuse:
            settings = self._fingerprint | kernel_fingerprint(job.loaded.config.engine)
            for path in job.reuse:
                self._known.add_output(path, settings, to_parquet=isinstance(self._format, ParquetRows))
        self._fingerprint |= input_fingerprint(scans and scans[0])
        order = job.loaded.config.run.order
        if job.output_file is None:
            stream = stdout if job.output is None else job.output.open("wb")
            return StreamSink(stream, order=order, first_index=job.shard[0], step=job.shard[1])
        assert self._tokenizer is not None, "load_tokenizer comes first"
        if self._read is not None and not job.resume:
            self.earlier = earlier_output(job.output_file, self._read, self._fingerprint)
        fingerprint = self._fingerprint | kernel_fingerprint(job.loaded.config.engine)
        journal = open_journal(job.output_file, fingerprint, resume=job.resume, overwrite=job.overwrite)
        return FileSink(job.output_file, journal, order=order, rows_format=self._format)

    def start(
        self,
        engine: "runner.LLMEngine",
        sink: Sink,
        *,
        observe: Callable[[BatchStats], None],
        observe_row: Callable[[BatchRow, list[RowPrompt]], None],
        stop_requested: Callable[[], bool],
        start_ns: int | None = None,
    ) -> BatchRun:
        """The run, after load_tokenizer and open_sink."""
        header = sink.journal.header if isinstance(sink, FileSink) else None
        tokenizer, rows = self._writer(int(time.time()) if header is None else header.created_s)
        tokenizer.stop_clock(datetime.now() if header is None else header.clock)

        def observe_answers(row: BatchRow, answers: list[RowPrompt]) -> None:
            observe_row(row, answers)
            self.sample.add(row, answers)

        return BatchRun(
            engine,
            tokenizer,
            self.lines,
            sink,
            rows,
            self._options,
            num_rows=self._num_rows,
            read=self._read,
            known=self._known,
            observe=observe,
            observe_row=observe_answers,
            stop_requested=stop_requested,
            start_ns=start_ns,
        )

    def verify(self, engine: "runner.LLMEngine") -> list[RowDifference]:
        """Generate some rows again, each alone. Returns the differences."""
        return run_again(engine, *self._writer(0), self._options, self.sample)

    @property
    def _options(self) -> BatchOptions:
        return batch_options(self.job.loaded, self._columns, shard=self.job.shard)

    def _writer(self, created_s: int) -> tuple[Tokenizer, RowWriter]:
        model = self.job.loaded.config.engine.model
        return self.tokenizer, RowWriter(self.tokenizer, model, run_key(self._fingerprint), created_s, self._columns)


def _row_format(job: Job, lines: LineSource, columns: Columns) -> JsonLines | CsvLines | ParquetRows:
    """The writer of the output. Raises: UsageError for settings that a table does not support."""
    if columns.kind != "parquet":
        return CsvLines(columns) if columns.kind == "csv" else JsonLines()
    require_pyarrow()
    run = job.loaded.config.run
    if job.shard[1] > 1:
        raise UsageError("a shard is written as JSONL, which merge reads", hint="-o shard.jsonl")
    if run.order == "completion":
        raise UsageError("a Parquet output is in the order of the input", hint="leave out --order completion")
    return ParquetRows(lines if isinstance(lines, ParquetSource) else None, columns, by_sample=run.sample_rows)
