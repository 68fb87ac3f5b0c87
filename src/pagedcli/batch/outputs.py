"""Reads the rows of outputs as JSON: JSON Lines, also of OpenAI and vLLM, and the CSV and Parquet tables of `generate`.

Used by batch.compare and batch.repeats.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pagedcli.batch.delimited import delimited_format
from pagedcli.batch.embeddings import EMBEDDING
from pagedcli.batch.journal import open_rows
from pagedcli.batch.lines import MAX_LINE_BYTES
from pagedcli.batch.parquet import is_parquet, require_pyarrow, rows_of_table

_JSON_CELLS = frozenset(
    ("index", "sample", "prompt_tokens", "beam_score", "logprobs", "prompt_logprobs", "token_ids", "tool_calls")
) | {"scores", "best", EMBEDDING}


def output_rows(path: Path) -> Iterator[bytes]:
    """The rows in the order of the file. Raises: UsageError, OSError, EOFError, zlib.error, csv.Error,
    UnicodeDecodeError."""
    if is_parquet(path):
        require_pyarrow()
        yield from _joined(map(_of_table, rows_of_table(path)))
    elif delimited_format(path.name) == "csv":
        yield from _joined(_csv_rows(path))
    else:
        with open_rows(path) as file:
            yield from file


def _joined(lines: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """The rows of a table, which may have a line for each sample."""
    samples: list[dict[str, Any]] = []
    for line in lines:
        if samples and ("outputs" in line or not line.get("sample")):
            yield _row(samples)
            samples = []
        samples.append(line)
    if samples:
        yield _row(samples)


def _row(samples: list[dict[str, Any]]) -> bytes:
    several = {"outputs": [line | {"index": line["sample"]} for line in samples]} if len(samples) > 1 else {}
    return msgspec.json.encode({"id": None} | samples[0] | several)


def _of_table(line: dict[str, Any]) -> dict[str, Any]:
    """A line of a Parquet table, or one of its samples, with the fields of a row."""
    found = {name: value for name, value in line.items() if name not in ("logprobs", "prompt_logprobs")}
    found |= {"logprobs": line.get("token_logprobs"), "prompt_logprobs": line.get("prompt_token_logprobs")}
    if line.get("tool_calls"):
        found["tool_calls"] = msgspec.json.decode(line["tool_calls"])
    if "outputs" in line:
        found["outputs"] = [*map(_of_table, line["outputs"] or ())]
    return found


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with open_rows(path) as file:
        for cells in csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", newline="")):
            line: dict[str, Any] = {
                name: cell if name not in _JSON_CELLS else msgspec.json.decode(cell or "null")
                for name, cell in cells.items()
                if isinstance(cell, str)
            }
            yield line | {
                "id": line.get("id") or None,
                "stop_reason": line.get("stop_reason") or None,
                "reasoning_content": line.get("reasoning_content") or None,
                "usage": {"prompt_tokens": line.get("prompt_tokens")},
                "error": {"code": line["error_code"]} if line.get("error_code") else None,
            }
