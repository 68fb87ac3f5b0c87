"""The output path: what may be overwritten there, and whether a run has finished it. Used by batch.job.

Next to OUT are OUT.partial, the journal of an unfinished run, and OUT.run.json, the record of a finished one.
"""

import gzip
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pagedcli.batch.fingerprint import HINT_OTHER_RUN, check_same_run
from pagedcli.batch.journal import JOURNAL_BEGINNING, Journal, has_rows, journal_path, read_header
from pagedcli.batch.lines import InputDigest, LineSource
from pagedcli.batch.run_record import RECORD_BEGINNING, LineDigest, RunRecord, read_record, record_path
from pagedcli.errors import UsageError
from pagedcli.files import check_new
from pagedcli.printable import plural


def is_csv(path: Path) -> bool:
    """Whether rows become lines of a table: out.csv, out.csv.gz."""
    return path.name.removesuffix(".gz").endswith(".csv")


def open_rows(path: Path) -> BinaryIO:
    """The lines of an output. Raises: OSError."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def output_files(path: Path) -> dict[str, Path]:
    """All files of a run that writes `path`, for files.check_distinct."""
    return {"the output": path, "the journal": journal_path(path), "the record of the run": record_path(path)}


def check_output(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Check the output path before anything expensive starts.

    Raises: UsageError if a file there would be lost.
    """
    partial = journal_path(path)
    if overwrite:
        return
    check_new("the journal of the run", partial, replaceable=JOURNAL_BEGINNING)
    check_new("the record of the run", record_path(path), replaceable=RECORD_BEGINNING)
    if resume:
        return
    if has_rows(partial):
        raise UsageError(
            f"{partial} contains the rows of a stopped run",
            hint="continue it with --resume, or start over with --overwrite",
        )
    check_new("the output", path, hint="use --overwrite, another name, or --resume if this is an output of this run")


def is_to_be_replaced(path: Path) -> bool:
    """Whether there is no output, or one that the stopped run was allowed to replace."""
    if not path.exists():
        return True
    header = read_header(journal_path(path))
    return header is not None and header.overwrite


def check_finished(
    path: Path, fingerprint: dict[str, str], lines: LineSource, *, order: str, limit: int | None
) -> RunRecord:
    """The record of the run that wrote `path`, if it had the same settings and input.

    Changes: reads `lines`; removes the journal of a run that was killed just after it had finished.
    Raises: UsageError that says what differs, or that the output has no record.
    """
    record = read_record(path)
    check_same_run(path, {**record.fingerprint, "order": record.order}, {**fingerprint, "order": order})
    if _digest_of(path) != record.digest:
        raise UsageError(
            f"{path} is not what its run wrote: another program has changed it", hint="use --overwrite, or another -o"
        )
    read = InputDigest()
    for line in lines:
        if limit is not None and line.index >= limit:
            break
        read.add(line)
    now, before = read.scan(), record.input
    if now != before:
        what = (
            f"{plural(before.num_rows, 'row')} -> {plural(now.num_rows, 'row')}"
            if now.num_rows != before.num_rows
            else "changed"
        )
        raise UsageError(f"{path} is of a run on another input; input: {what}", hint=HINT_OTHER_RUN)
    if read_header(journal_path(path)) is not None:
        journal_path(path).unlink()
    return record


def open_journal(path: Path, fingerprint: dict[str, str], *, resume: bool, overwrite: bool) -> Journal:
    """The journal of an output, a new one if there is nothing to resume. Raises: UsageError."""
    check_output(path, resume=resume, overwrite=overwrite)
    partial = journal_path(path)
    if resume and partial.exists():
        return Journal.resume(partial, fingerprint)
    return Journal.create(partial, fingerprint, overwrite=overwrite)


def _digest_of(path: Path) -> str | None:
    """None if the file is damaged."""
    digest = LineDigest()
    with suppress(OSError, EOFError, zlib.error), open_rows(path) as file:
        digest.read(file)
        return digest.hexdigest()
    return None
