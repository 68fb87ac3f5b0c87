"""`generate --ray`: one batch run on a Ray cluster, with the messages, signals and exit codes of a single run."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pagedcli import distributed
from pagedcli.batch.job import Job
from pagedcli.batch.run import BatchResult, Outcome
from pagedcli.batch.stats import BatchStats, total
from pagedcli.cli.session import StopRequest, exit_code
from pagedcli.cli.summary import resume_command, say_model, say_odd, say_summary, write_summary
from pagedcli.config import EngineConfig
from pagedcli.distributed.driver import Counts, RowCounter, prepare
from pagedcli.distributed.parts import PartFolder
from pagedcli.errors import UsageError
from pagedcli.files import SUMMARY, check_distinct, check_new
from pagedcli.later import torch
from pagedcli.native.system import usable_cores
from pagedcli.printable import plural
from pagedcli.show.progress import progress_view
from pagedcli.show.terminal import say

_POLL_S = 1.0
WorkerRuns = dict[str, dict[str, BatchStats]]  # of each worker and its processes
Work = Callable[["distributed.queue.Queue", Job, Path], tuple[Outcome, BatchStats, WorkerRuns]]


def parse_workers(text: str) -> tuple[int, int]:
    """'2-8', at least 2 and at most 8 workers: (2, 8). Raises: UsageError."""
    least, _, most = text.partition("-")
    if least.isdecimal() and (most or least).isdecimal() and 1 <= int(least) <= int(most or least):
        return int(least), int(most or least)
    raise UsageError(f"--workers is {text!r}, but must be N or A-B, from 1 on", hint="for example --workers 2-8")


def run_cluster_job(job: Job, output: Path, address: str | None, workers: tuple[int, int]) -> int:
    """Run a job to its end and return the exit code. `output` is the folder of parts, `address` that of a cluster;
    None: a local one. `workers`: how many at least and at most. Raises: PagedcliError for fatal errors."""
    if job.resume and job.overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    folder = PartFolder(output)
    check_distinct(job.read_files, {"--summary-json": job.summary_json})
    folder.check(resume=job.resume, overwrite=job.overwrite)
    check_new("--summary-json", job.summary_json, kind=SUMMARY, overwrite=job.overwrite or job.resume)
    _import_ray(address)
    say_model(job.loaded.config.engine.model)
    start_s, was_cut = time.perf_counter(), job.resume and folder.is_cut
    ignored = prepare(job, folder, workers[1])
    if not was_cut:
        say(f"read, tokenized and grouped by prefix in {time.perf_counter() - start_s:,.1f} s")
    missing = folder.missing()
    num_rows = sum(folder.manifest.num_rows)
    say(f"{plural(num_rows, 'row')} in {plural(folder.manifest.num_parts, 'part')}, {len(missing):,} to do")
    max_errors = job.loaded.config.run.max_errors
    counter = RowCounter(folder)
    progress = Counts(num_rows, num_resumed=counter.count(), max_errors=max_errors)
    job.watch(progress.stats)
    outcome: Outcome = "complete"
    if missing:
        outcome = _work(job, output.resolve(), missing, _pool(job, address, *workers), address, progress, counter.count)
    if outcome == "complete" and folder.missing():
        outcome = "out_of_time"
    if outcome == "complete":
        folder.remove_work()
        progress.count_parts(folder)
    else:
        progress.count_rows(counter.count())
    job.watch(progress.stats)  # by now another record
    result = BatchResult(outcome, progress.stats, ignored)
    report(job, result, str(output), progress.runs)
    return exit_code(result)


def report(job: Job, result: BatchResult, output: str, runs: WorkerRuns) -> None:
    """Print how a run in parts went, and what comes next."""
    say_summary(result)
    say_odd(result, job.loaded.config.run)
    _say_workers(runs)
    if job.summary_json is not None:
        write_summary(job.summary_json, result)
    if result.outcome == "complete":
        say(f"parts: {output}; one file: pagedcli merge {output} -o OUT")
    else:
        say(f"continue with: {resume_command(sys.argv[1:])}")


def queue_workers(url: str, address: str | None, workers: tuple[int, int]) -> Work:
    """How the workers of a cluster do the parts of a queue; see run_cluster_job. Raises: UsageError without Ray."""
    _import_ray(address)

    def work(queue: "distributed.queue.Queue", job: Job, local: Path) -> "tuple[Outcome, BatchStats, WorkerRuns]":
        def count() -> int:
            queue.update()
            return queue.count()[0]

        num_before, max_errors = queue.count()[0], job.loaded.config.run.max_errors
        progress = Counts(sum(queue.manifest.num_rows), num_resumed=num_before, max_errors=max_errors)
        outcome: Outcome = "complete"
        if queue.left:
            outcome = _work(job, url, queue.left, _pool(job, address, *workers), address, progress, count)
        progress.count_rows(count())
        progress.stats.num_resumed_failed = max(queue.count()[1] - progress.stats.num_failed, 0)
        return "out_of_time" if queue.left and outcome == "complete" else outcome, progress.stats, progress.runs

    return work


def _import_ray(address: str | None) -> None:
    """Raises: UsageError if it is not installed."""
    # read when ray is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise a thread that still waits for parts when the run is stopped starts another cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^")  # matches all: Ray's notes on dead workers go to stdout
    if address is None:  # the name is historical: it restricts a local cluster to the loopback interface
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        _ = distributed.ray_job
    except ModuleNotFoundError as error:
        raise UsageError("--ray needs Ray, which is not installed", hint="pip install 'pagedcli[ray]'") from error


def _work(
    job: Job,
    folder: Path | str,
    missing: list[int],
    pool: "distributed.ray_job.WorkerPool",
    address: str | None,
    progress: Counts,
    count: Callable[[], int],
) -> Outcome:
    """Do the missing parts of a folder or queue. `count` returns the rows that are done."""
    each = f"{plural(pool.num_cpus, 'core')} and {plural(pool.num_gpus, 'GPU')}"
    least = "" if pool.least == pool.most else f"{pool.least} to "
    say(f"starting {least}{plural(pool.most, 'worker')} with {each} each")
    with distributed.ray_job.cluster(address, pool):
        return _watch(distributed.ray_job.RayRun(folder, job.loaded, missing, pool), progress, count)


def _watch(run: "distributed.ray_job.RayRun", progress: Counts, count: Callable[[], int]) -> Outcome:
    stop = StopRequest(rows_are_kept=lambda: True)
    with progress_view(quiet_terminal=False) as view, stop.listening():
        run.start()
        while not run.wait(_POLL_S) and not stop.requested and not progress.has_too_many_errors:
            progress.update(run.runs)
            progress.count_rows(count())
            view.update(progress.stats)
    progress.update(run.runs)
    if progress.has_too_many_errors:
        return "too_many_errors"
    return "interrupted" if stop.requested else "complete"


def _say_workers(runs: WorkerRuns) -> None:
    for number, processes in enumerate(runs.values(), 1):
        stats = total(processes.values())
        seconds = max(sum(each.elapsed_s for each in processes.values()), 1e-9)
        rows, per_s = plural(stats.num_done, "row"), stats.facts.num_generated_tokens / seconds
        restarts = f", restarted {plural(len(processes) - 1, 'time')}" if len(processes) > 1 else ""
        say(
            f"  worker {number:<5} {rows}, {per_s:,.0f} tok/s"
            f" generated, {100 * stats.facts.hit_rate:.1f} % cached{restarts}"
        )


def _pool(job: Job, address: str | None, least: int, most: int) -> "distributed.ray_job.WorkerPool":
    cores = usable_cores() if address is None else 1
    num_gpus = _num_gpus(job.loaded.config.engine)
    return distributed.ray_job.WorkerPool(least, most, max(1, cores // most), num_gpus)


def _num_gpus(engine: EngineConfig) -> int:
    """GPUs that each worker requests from the cluster."""
    if engine.device == "auto":
        return engine.tensor_parallel_size if torch.cuda.is_available() else 0
    return 0 if engine.device == "cpu" else engine.tensor_parallel_size
