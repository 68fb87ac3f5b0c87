"""Rows as lines of a CSV table, one per sample. Used by batch.sinks.

Token counts of a request are on its first sample's line only: the sum of a column is the total of the run.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

COLUMNS = (
    "index",  # of plain rows
    "id",
    "sample",  # 0 to n - 1; empty for an error
    "text",
    "finish_reason",
    "prompt_tokens",  # from here on: of the whole request, on its first line
    "cached_tokens",
    "completion_tokens",
    "logprobs",  # JSON, as in a row of JSONL
    "token_ids",  # JSON
    "error_code",
    "error_message",
)


def csv_lines(rows: Iterable[bytes]) -> Iterator[bytes]:
    """The header and the lines, with line ends, of rows as batch.rows writes them."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerows(_samples(msgspec.json.decode(row)))
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    yield text.getvalue().encode()  # the header of a table without rows


def _samples(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells by column. A missing cell is empty."""
    body = (row.get("response") or {}).get("body") or row
    cells = {"index": row.get("index"), "id": row["custom_id"] if "custom_id" in row else row["id"]}
    if row["error"] is not None:
        return [cells | {"error_code": row["error"]["code"], "error_message": row["error"]["message"]}]
    usage = body["usage"]
    tokens = {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }
    samples = body.get("choices") or body.get("outputs") or [body | {"index": 0}]
    return [
        cells
        | (tokens if place == 0 else {})
        | {
            "sample": sample["index"],
            "text": sample["message"]["content"] if "message" in sample else sample["text"],
            "finish_reason": sample["finish_reason"],
        }
        | {name: _json(sample[name]) for name in ("logprobs", "token_ids") if sample.get(name) is not None}
        for place, sample in enumerate(samples)
    ]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
