"""`generate --queue`: one worker of a run that any number of machines share. `--status`: what is left of the run."""

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec

from pagedcli import distributed
from pagedcli.batch.fingerprint import run_fingerprint
from pagedcli.batch.job import Job
from pagedcli.batch.prompts import open_tokenizer
from pagedcli.batch.run import BatchResult, Outcome
from pagedcli.batch.stats import BatchStats
from pagedcli.buckets import Folder, num_bytes
from pagedcli.cli.cluster import Work, WorkerRuns, report
from pagedcli.cli.session import StopRequest, exit_code
from pagedcli.cli.summary import say_model
from pagedcli.distributed.driver import prepare
from pagedcli.distributed.leases import BEATS, LEASE_S
from pagedcli.distributed.parts import PARTS_AT_ONCE, PartFolder
from pagedcli.errors import EXIT_BAD_ROWS, UsageError
from pagedcli.files import SUMMARY, check_distinct, check_new
from pagedcli.line_files import COPIES
from pagedcli.models.hub import model_folder
from pagedcli.printable import duration_text, plural
from pagedcli.records import Seconds
from pagedcli.show.progress import progress_view
from pagedcli.show.tables import Format, print_tables, table
from pagedcli.show.terminal import say

_POLL_S = 1.0


def run_queue_job(job: Job, output: str, url: str, num_workers: int, work: Work) -> int:
    """Work on a queue until its run is complete, and return the exit code. Raises: PagedcliError for fatal errors."""
    if job.overwrite:
        raise UsageError("a queue or a bucket of parts cannot be combined with --overwrite", hint="use new folders")
    check_distinct(job.read_files, {"--summary-json": job.summary_json})
    check_new("--summary-json", job.summary_json, kind=SUMMARY, overwrite=job.resume)
    say_model(job.loaded.config.engine.model)
    ignored: dict[str, int] = {}
    with TemporaryDirectory(prefix=COPIES) as local:

        def cut() -> PartFolder:
            say("cutting the input into parts for all workers")
            ignored.update(prepare(job, parts := PartFolder(Path(local)), num_workers))
            return parts

        queue = distributed.queue.join(Folder(url), output, _asked(job), Path(local), cut)
        rows = f"{plural(sum(queue.manifest.num_rows), 'row')} in {plural(queue.manifest.num_parts, 'part')}"
        say(f"{rows}, {len(queue.left):,} to do")
        outcome, stats, runs = work(queue, job, Path(local))
        if outcome == "complete":
            queue.clear()
            say(f"all {rows} are done")
    job.watch(stats)
    report(job, result := BatchResult(outcome, stats, ignored), str(queue.output), runs)
    return exit_code(result) or (EXIT_BAD_ROWS if queue.count()[1] else 0)


def _asked(job: Job) -> dict[str, str]:
    """The settings of a run, and its input, which only one worker reads."""
    config, name = job.loaded.config, job.input_name.rstrip("/").rpartition("/")[2]
    model, size = model_folder(config.engine), plural(num_bytes(job.input_name), "byte")
    settings = run_fingerprint(config, model, open_tokenizer(config, model), shard="1/1")
    return settings | {"input": f"{name} of {size}", "limit": str(config.run.limit)}


def work_here(queue: "distributed.queue.Queue", job: Job, local: Path) -> tuple[Outcome, BatchStats, WorkerRuns]:
    """Make part after part until all are done or this worker is to stop. Returns the counters of this worker."""
    if not queue.left:
        return "complete", BatchStats(), {}
    worker, most_errors = distributed.worker.Worker(local, job.loaded), job.loaded.config.run.max_errors
    stop = StopRequest(rows_are_kept=lambda: True)
    outcome: Outcome = "complete"
    with (
        progress_view(quiet_terminal=False, time_left=lambda stats: None) as view,
        stop.listening(),
        queue.leases.renewed(),
        ThreadPoolExecutor(PARTS_AT_ONCE) as pool,
    ):
        running = {pool.submit(queue.run_all, worker) for _ in range(PARTS_AT_ONCE)}
        try:
            while running and outcome == "complete":
                done, running = wait(running, _POLL_S, FIRST_COMPLETED)
                for each in done:
                    each.result()
                own, (num_done, num_failed) = worker.stats, queue.count()
                num_others = max(num_done - own.num_done, 0)
                view.update(replace(own, num_rows=sum(queue.manifest.num_rows), num_resumed=num_others))
                if stop.requested:
                    outcome = "interrupted"
                elif most_errors is not None and max(own.num_failed, num_failed) >= most_errors:
                    outcome = "too_many_errors"
        finally:
            worker.stop()
    return "out_of_time" if outcome == "complete" and queue.left else outcome, worker.stats, {}


class HeldPart(msgspec.Struct, frozen=True):
    """A part that a worker has taken."""

    part: str  # its number
    worker: str  # host:process
    num_done: Annotated[int, "rows done"]
    num_rows: Annotated[int, "of rows"]
    held_s: Annotated[Seconds, "held for"]
    silent_s: Annotated[Seconds, "last beat"]


def show_queue(url: str, format_: Format) -> None:
    """Print what is left of a run, who works on it and how long it takes. Raises: UsageError if there is no queue."""
    if (terms := distributed.queue.read_terms(folder := Folder(url))) is None:
        raise UsageError(f"there is no queue in {url}, or its input is still being cut")
    queue, manifest, held = distributed.queue.Queue(folder, terms), terms.manifest, []
    queue.update()
    newest = queue.leases.newest()
    for part in queue.left:
        file = newest.get(distributed.queue.lease_name(part))
        if file is not None and not (holder := queue.leases.holder(file)).is_given_back:
            worker, held_s = holder.worker.rpartition(":")[0], holder.beat * LEASE_S / BEATS
            silent_s = max(folder.age_s(file), 0.0)
            held.append(HeldPart(str(part), worker, holder.num_rows, manifest.num_rows[part], held_s, silent_s))
    alive = [each for each in held if each.silent_s < LEASE_S]
    (num_done, num_failed), num_rows = queue.count(), sum(manifest.num_rows)
    per_s = sum(each.num_done / each.held_s for each in alive if each.held_s)
    left_s = (num_rows - num_done - sum(each.num_done for each in alive)) / per_s if per_s else None
    said = f"{len(queue.records):,} of {plural(manifest.num_parts, 'part')} are done"
    said += f" ({num_done:,} of {plural(num_rows, 'row')}, {num_failed:,} failed)"
    if queue.left:
        workers = plural(len({each.worker for each in alive}), "worker")
        said += f"; {len(alive):,} are with {workers}, {len(queue.left) - len(alive):,} are free"
    said += "" if left_s is None else f"; about {duration_text(left_s)} left"
    facts: dict[str, object] = {
        "parts": manifest.num_parts,
        "parts_left": len(queue.left),
        "rows": num_rows,
        "rows_done": num_done,
    }
    facts |= {"rows_failed": num_failed, "left_s": left_s}
    print_tables([table(HeldPart, "held", "Parts that workers have", held)], format_, facts=facts, story=[f"{said}."])
