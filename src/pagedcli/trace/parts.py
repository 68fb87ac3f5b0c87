"""The names of a trace: `run.jsonl`, `run.part2.jsonl` of a resumed run, `run.recording.jsonl` while it is written.

Used by the writer and the reader of trace files.
"""

from pathlib import Path

from pagedcli.errors import UsageError

_SUFFIXES = (".jsonl.zst", ".jsonl")


def part_path(path: Path, number: int) -> Path:
    """Path of the n-th part, from 1: `run.jsonl`, `run.part2.jsonl` ..."""
    name, suffix = _split(path)
    return path if number == 1 else path.with_name(f"{name}.part{number}{suffix}")


def recording_path(path: Path) -> Path:
    """The name of a part while it is written; a killed run leaves its incomplete trace under it."""
    name, suffix = _split(path)
    return path.with_name(f"{name}.recording{suffix}")


def parts(path: Path) -> list[Path]:
    """The existing parts, in order; an unfinished one under the name it had while it was written."""
    found: list[Path] = []
    while True:
        part = part_path(path, len(found) + 1)
        existing = [name for name in (part, recording_path(part)) if name.exists()]
        if not existing:
            return found
        found.append(existing[0])


def _split(path: Path) -> tuple[str, str]:
    for suffix in _SUFFIXES:
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix), suffix
    raise UsageError(f"{path} is not named like a trace", hint="a trace file ends in .jsonl or .jsonl.zst")
