"""Rows as lines of a CSV table, one per sample. Used by batch.sinks.

Token counts and metrics of a row are on its first sample's line only: the sum of a column is the total of the run.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from pagedcli.batch.columns import METRICS, Columns


def csv_lines(rows: Callable[[], Iterable[bytes]], columns: Columns) -> Iterator[bytes]:
    """The header and the lines, with line ends. `rows` returns rows in batch.rows' format, also a second time."""
    kept = list(columns.keep)
    if columns.keep_all:
        names = (name for row in rows() for name in msgspec.json.decode(row, type=dict[str, msgspec.Raw]))
        kept = list(dict.fromkeys(name for name in names if name not in columns.reserved))
    text = io.StringIO()
    writer = csv.DictWriter(text, _header(columns, kept), lineterminator="\n")
    writer.writeheader()
    for row in rows():
        writer.writerows(_samples(msgspec.json.decode(row), columns.answer, kept))
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    yield text.getvalue().encode()  # the header of a table without rows


def _header(columns: Columns, kept: list[str]) -> list[str]:
    """JSON is what a cell of logprobs or token ids holds; `sample` is 0 to n - 1, and empty for an error."""
    counts = ["prompt_tokens", "cached_tokens", "completion_tokens", *(METRICS if columns.metrics else ())]
    answer = [
        "sample",
        columns.answer,
        "finish_reason",
        "stop_reason",
        "beam_score",
        *counts,
        "logprobs",
        "prompt_logprobs",
        "token_ids",
    ]
    return ["index", "id", *kept, *answer, "error_code", "error_message"]


def _samples(row: dict[str, Any], answer: str, kept: list[str]) -> list[dict[str, Any]]:
    """Cells by column. A missing cell is empty."""
    body = (row.get("response") or {}).get("body") or row
    cells = {"index": row.get("index"), "id": row["custom_id"] if "custom_id" in row else row["id"]}
    cells |= {name: _cell(row.get(name)) for name in kept}
    if row["error"] is not None:
        return [cells | {"error_code": row["error"]["code"], "error_message": row["error"]["message"]}]
    usage = body["usage"]
    counts = {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        **body.get("metrics", {}),
    }
    samples = body.get("choices") or body.get("outputs") or [body | {"index": 0}]
    return [
        cells
        | (counts if place == 0 else {})
        | {
            "sample": sample["index"],
            answer: _text(sample, answer),
            "finish_reason": sample["finish_reason"],
            "stop_reason": sample.get("stop_reason"),
            "beam_score": sample.get("beam_score"),
        }
        | {
            name: _json(sample[name])
            for name in ("logprobs", "prompt_logprobs", "token_ids")
            if sample.get(name) is not None
        }
        for place, sample in enumerate(samples)
    ]


def _text(sample: dict[str, Any], answer: str) -> Any:
    """The text of a chat's choice, of a completion's choice, or of a plain sample."""
    return sample["message"]["content"] if "message" in sample else sample.get(answer, sample.get("text"))


def _cell(value: Any) -> Any:
    """A copied value: text and numbers unchanged, everything else as JSON."""
    is_plain = value is None or (isinstance(value, str | int | float) and not isinstance(value, bool))
    return value if is_plain else _json(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
