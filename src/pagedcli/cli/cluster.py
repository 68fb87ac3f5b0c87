"""`generate --ray`: one batch run on a Ray cluster, with the messages, signals and exit codes of a single run."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pagedcli.batch.columns import Columns
from pagedcli.batch.fingerprint import check_same_run, input_fingerprint, run_fingerprint
from pagedcli.batch.job import Job
from pagedcli.batch.journal import journal_path, read_record
from pagedcli.batch.parquet import ParquetRows, ParquetSource
from pagedcli.batch.prompts import KeptColumns, Prompts, batch_options, limits_without_pool, open_source, open_tokenizer
from pagedcli.batch.run import BatchResult, Outcome
from pagedcli.batch.stats import BatchStats, total
from pagedcli.cli.session import StopRequest, exit_code
from pagedcli.cli.summary import resume_command, say_model, say_odd, say_summary, write_summary
from pagedcli.config import EngineConfig
from pagedcli.distributed.parts import PartFolder, weigh_rows
from pagedcli.errors import UsageError
from pagedcli.files import SUMMARY, check_distinct, check_new
from pagedcli.later import torch
from pagedcli.models.hub import model_folder
from pagedcli.models.reading import read_spec
from pagedcli.printable import plural
from pagedcli.show.progress import progress_view
from pagedcli.show.terminal import say

if TYPE_CHECKING:
    from pagedcli.distributed.ray_job import RayRun, WorkerPool

_POLL_S = 1.0


def run_cluster_job(job: Job, output: Path, address: str | None, num_workers: int) -> int:
    """Run a job to its end and return the exit code. `output` is the folder of parts, `address` that of a cluster;
    None: a local one. Raises: PagedcliError for fatal errors."""
    if job.resume and job.overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    folder = PartFolder(output)
    check_distinct(job.read_files, {"--summary-json": job.summary_json})
    folder.check(resume=job.resume, overwrite=job.overwrite)
    check_new("--summary-json", job.summary_json, kind=SUMMARY, overwrite=job.overwrite or job.resume)
    # read when ray is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise a thread that still waits for parts when the run is stopped starts another cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^")  # matches all: Ray's notes on dead workers go to stdout
    if address is None:  # the name is historical: it restricts a local cluster to the loopback interface
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        from pagedcli.distributed.ray_job import RayRun, cluster
    except ModuleNotFoundError as error:
        raise UsageError("--ray needs Ray, which is not installed", hint="pip install 'pagedcli[ray]'") from error

    say_model(job.loaded.config.engine.model)
    ignored = _prepare(job, folder, num_workers)
    missing = folder.missing()
    num_rows = sum(folder.manifest.num_rows)
    say(f"{plural(num_rows, 'row')} in {plural(folder.manifest.num_parts, 'part')}, {len(missing):,} to do")
    max_errors = job.loaded.config.run.max_errors
    counter = _RowCounter(folder)
    progress = _Progress(num_rows, num_resumed=counter.count(), max_errors=max_errors)
    job.watch(progress.stats)
    outcome: Outcome = "complete"
    if missing:
        pool = _pool(job, address, num_workers)
        each = f"{plural(pool.num_cpus, 'core')} and {plural(pool.num_gpus, 'GPU')}"
        say(f"starting {plural(pool.num_workers, 'worker')} with {each} each")
        with cluster(address, pool):
            outcome = _work(RayRun(output.resolve(), job.loaded, missing, pool), progress, counter)
    if outcome == "complete":
        folder.remove_work()
        progress.count_parts(folder)
    else:
        progress.count_rows(counter.count())
    job.watch(progress.stats)  # by now another record
    result = BatchResult(outcome, progress.stats, ignored)
    say_summary(result)
    say_odd(result)
    progress.say_workers()
    if job.summary_json is not None:
        write_summary(job.summary_json, result)
    if result.outcome == "complete":
        say(f"parts: {output}; one file: pagedcli merge {output} -o OUT")
    else:
        say(f"continue with: {resume_command(sys.argv[1:])}")
    return exit_code(result)


def _prepare(job: Job, folder: PartFolder, num_workers: int) -> dict[str, int]:
    """Split the input into parts, or check that existing parts belong to this run. Returns ignored fields."""
    config = job.loaded.config
    columns = Columns.of(config.run)
    lines = open_source(job.input_name, columns)
    if lines.is_live:
        raise UsageError("--ray needs a file or folder as input, because it reads it more than once")
    kept = KeptColumns(lines, columns, in_rows=not isinstance(lines, ParquetSource))
    if isinstance(lines, ParquetSource):
        ParquetRows(lines, columns).check()
    model = model_folder(config.engine)
    tokenizer = open_tokenizer(config, model)
    scans = lines.scan(config.run.limit, observe=kept.add)
    assert scans is not None, "not live"
    kept.check()
    scan, read = scans
    fingerprint = run_fingerprint(config, model, tokenizer, shard="1/1") | input_fingerprint(scan)
    if job.resume and folder.is_cut:
        check_same_run(folder.path, folder.manifest.fingerprint, fingerprint)
        if sum(folder.manifest.num_rows) != read.num_rows:
            raise UsageError(f"{folder.path} belongs to a run with a different --limit")
        return {}
    folder.clear()
    options = batch_options(job.loaded, columns)
    start_s = time.perf_counter()
    limits = limits_without_pool(config.engine, read_spec(model, trust_remote_code=config.engine.trust_remote_code))
    weighed = weigh_rows(Prompts(lines, tokenizer, options, limits), config.engine.block_size)
    parts, costs = weighed.parts(num_workers)
    folder.cut(lines, parts, costs, weighed.duplicates, fingerprint)
    say(f"read, tokenized and grouped by prefix in {time.perf_counter() - start_s:,.1f} s")
    return weighed.ignored


def _work(run: "RayRun", progress: "_Progress", counter: "_RowCounter") -> Outcome:
    stop = StopRequest(rows_are_kept=lambda: True)
    with progress_view(quiet_terminal=False) as view, stop.listening():
        run.start()
        while not run.wait(_POLL_S) and not stop.requested and not progress.has_too_many_errors:
            progress.update(run.runs)
            progress.count_rows(counter.count())
            view.update(progress.stats)
    progress.update(run.runs)
    if progress.has_too_many_errors:
        return "too_many_errors"
    return "interrupted" if stop.requested else "complete"


class _Progress:
    """The counters of all workers, after the parts that they have done; rows also of the parts that they are doing."""

    def __init__(self, num_rows: int, *, num_resumed: int, max_errors: int | None) -> None:
        self._start_s = time.perf_counter()
        self._max_errors = max_errors
        self._num_rows = num_rows
        self._num_resumed = num_resumed
        self._runs: dict[str, dict[str, BatchStats]] = {}
        self.stats = BatchStats(num_rows=num_rows, num_resumed=num_resumed)

    @property
    def has_too_many_errors(self) -> bool:
        return self._max_errors is not None and self.stats.num_failed >= self._max_errors

    def update(self, runs: dict[str, dict[str, BatchStats]]) -> None:
        self._runs = runs
        self.stats = total(stats for processes in runs.values() for stats in processes.values())
        self.stats.num_rows, self.stats.num_resumed = self._num_rows, self._num_resumed
        self.stats.elapsed_s = time.perf_counter() - self._start_s

    def count_parts(self, folder: PartFolder) -> None:
        """Rows and failures from the records of the parts: workers that died cannot have counted all of theirs."""
        records = [read_record(folder.part(part)) for part in range(folder.manifest.num_parts)]
        self.stats.num_done = max(self._num_rows - self.stats.num_resumed, 0)
        num_failed = sum(record.num_failed_rows for record in records)
        self.stats.num_failed = min(self.stats.num_failed, num_failed)
        self.stats.num_resumed_failed = num_failed - self.stats.num_failed

    def count_rows(self, num_kept: int) -> None:
        """The rows that are in parts and journals by now."""
        self.stats.num_done = num_kept - self.stats.num_resumed

    def say_workers(self) -> None:
        for number, runs in enumerate(self._runs.values(), 1):
            stats = total(runs.values())
            seconds = max(sum(each.elapsed_s for each in runs.values()), 1e-9)
            rows, per_s = plural(stats.num_done, "row"), stats.facts.num_generated_tokens / seconds
            restarts = f", restarted {plural(len(runs) - 1, 'time')}" if len(runs) > 1 else ""
            say(
                f"  worker {number:<5} {rows}, {per_s:,.0f} tok/s"
                f" generated, {100 * stats.facts.hit_rate:.1f} % cached{restarts}"
            )


class _RowCounter:
    """Counts the rows in finished parts and in journals, of which it reads each byte once."""

    def __init__(self, folder: PartFolder) -> None:
        self._folder = folder
        self._num_rows = list(folder.manifest.num_rows)
        self._ends = dict.fromkeys(folder.missing(), 0)  # unfinished part -> bytes of its journal that were read
        for part in self._ends:
            self._num_rows[part] = -1  # the first line is the header

    def count(self) -> int:
        """The rows by now."""
        for part, end in list(self._ends.items()):
            if self._folder.is_done(part):
                self._num_rows[part] = self._folder.manifest.num_rows[part]
                del self._ends[part]
                continue
            with suppress(FileNotFoundError), journal_path(self._folder.part(part)).open("rb") as file:
                file.seek(end)
                content = file.read()
                self._num_rows[part] += content.count(b"\n")
                self._ends[part] = end + len(content)
        return sum(max(0, number) for number in self._num_rows)


def _pool(job: Job, address: str | None, num_workers: int) -> "WorkerPool":
    from pagedcli.distributed.ray_job import WorkerPool
    from pagedcli.native.system import usable_cores

    cores = usable_cores() if address is None else 1
    return WorkerPool(num_workers, max(1, cores // num_workers), _num_gpus(job.loaded.config.engine))


def _num_gpus(engine: EngineConfig) -> int:
    """GPUs that each worker requests from the cluster."""
    if engine.device == "auto":
        return engine.tensor_parallel_size if torch.cuda.is_available() else 0
    return 0 if engine.device == "cpu" else engine.tensor_parallel_size
