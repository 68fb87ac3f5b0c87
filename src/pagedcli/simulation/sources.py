"""Opens the input of `simulate`: traces of others, prompt files, recorded runs, KV events, found by their content."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from pagedcli.errors import UsageError
from pagedcli.events import EngineStarted
from pagedcli.kvevents.capture import is_capture_line
from pagedcli.simulation.formats import FORMATS, find_format, read_traces
from pagedcli.simulation.reading import TraceLines
from pagedcli.simulation.recorded import read_kv_events, read_recorded_run
from pagedcli.simulation.requests import Workload

_LINES_TRIED = 20  # the first ones may be broken
FORMAT_NAMES = (*FORMATS, "prompts", "pagedcli", "kv-events")


def read_workload(
    names: Sequence[str],
    read_prompts: Callable[[str], Workload],
    *,
    format_name: str | None = None,
    hash_size: int | None = None,
) -> tuple[Workload, EngineStarted | None]:
    """The requests of the files, and for a recorded run the engine that served them.

    Raises: UsageError or TraceError.
    """
    if format_name is not None and format_name not in FORMAT_NAMES:
        raise UsageError(f"unknown trace format {format_name!r}", hint=f"known: {', '.join(FORMAT_NAMES)}")
    found = format_name or _format_of(names[0])
    if found in FORMATS:
        return read_traces(names, found, hash_size), None
    if len(names) > 1:
        raise UsageError(f"{found}: one file at a time, got {len(names)}")
    if found == "pagedcli":
        return read_recorded_run(Path(names[0]))
    return (read_kv_events(Path(names[0])) if found == "kv-events" else read_prompts(names[0])), None


def _format_of(name: str) -> str:
    """The format of a file, by its first lines. What is no known trace is read as prompts, which has its own errors."""
    if name == "-" or Path(name).is_dir() or name.endswith((".parquet", ".csv")):
        return "prompts"
    for line in islice(TraceLines(name), _LINES_TRIED):
        line = line.strip().removeprefix(b"\xef\xbb\xbf")
        try:
            document = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(document, dict) and document.get("event") == "engine_started":
            return "pagedcli"
        if is_capture_line(line):
            return "kv-events"
        if (found := find_format(document)) is not None:
            return found
    return "prompts"
