"""The form of an output row: one reader for all who take rows apart, and the writers of JSON Lines and CSV.

Used by batch.sinks, which writes a file of rows, and by whoever compares, merges, tabulates or simulates rows. Parquet
is in batch.parquet. A row is encoded by batch.rows.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from pagedcli.batch.columns import METRICS, Columns, OutputKind
from pagedcli.batch.journal import LineDigest

Rows = Callable[[], Iterable[tuple[int, bytes]]]  # each row's index and JSON, also a second time
# what Row.of raises for something else than a row
NOT_A_ROW = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError)


def why_not_a_row(error: Exception) -> str:
    """What is wrong with a line. `error`: one of NOT_A_ROW."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


class Sample(msgspec.Struct, frozen=True):
    """One answer of a row: a plain row with a single one, an element of its outputs, or an OpenAI choice."""

    index: int  # place in the row
    text: str | None  # None: the row has no field of that name
    reasoning: str | None  # None: none is marked, or it was left out
    finish_reason: str | None
    stop_reason: Any
    beam_score: float | None
    token_ids: list[int] | None
    logprobs: Any  # a list of positions, in a choice within an object
    prompt_logprobs: Any

    @classmethod
    def of(cls, fields: dict[str, Any], answer: str) -> "Sample":
        text = fields["message"]["content"] if "message" in fields else fields.get(answer)
        reasoning = fields.get("message", fields).get("reasoning_content")
        names = ("stop_reason", "beam_score", "token_ids", "logprobs", "prompt_logprobs")
        others = (fields.get(name) for name in names)
        return cls(fields.get("index", 0), text, reasoning, fields["finish_reason"], *others)


class Row(msgspec.Struct, frozen=True):
    """A row, plain or in OpenAI's form."""

    fields: dict[str, Any]  # all fields of the row, copied columns included
    id: str | int | None
    index: int | None  # index of the line in the input; OpenAI's rows have none of their own
    error: dict[str, Any] | None
    usage: dict[str, Any] | None
    metrics: dict[str, Any] | None
    samples: list[Sample]  # none in an error row

    @classmethod
    def of(cls, content: bytes, answer: str = "text", index: int | None = None) -> "Row":
        """`answer`: the field of plain rows with the text; `index`: that of the row, if known. Raises: one of
        NOT_A_ROW."""
        fields = msgspec.json.decode(content, type=dict[str, Any])
        body = (fields.get("response") or {}).get("body") or fields
        samples = [] if fields["error"] is not None else body.get("choices") or body.get("outputs") or [body]
        return cls(
            fields,
            fields["custom_id"] if "response" in fields else fields["id"],
            fields.get("index", index),
            fields["error"],
            body.get("usage"),
            body.get("metrics"),
            [Sample.of(sample, "text" if "response" in fields else answer) for sample in samples],
        )


class RowStatus(msgspec.Struct, frozen=True, gc=False):
    """Id and error of a row, decoded without the rest."""

    id: str | int | None = None
    custom_id: str | int | None = None
    error: dict[str, Any] | None = None

    @property
    def row_id(self) -> str | int | None:
        return self.custom_id if self.custom_id is not None else self.id


def reasoning_of(rows: Rows) -> frozenset[str]:
    """The columns about reasoning that some row has; tables of other runs have none of them."""
    found = set()
    for _, row in rows():
        if _REASONING_TOKENS in row and (each := Row.of(row)).usage and "completion_tokens_details" in each.usage:
            found.add("reasoning_tokens")
            found.update("reasoning_content" for sample in each.samples if sample.reasoning is not None)
            if len(found) == 2:
                break
    return frozenset(found)


_REASONING_TOKENS = b'"reasoning_tokens":'


def kind_of(path: Path | None) -> OutputKind:
    """What the name of an output says it is; stdout (None) is JSON Lines."""
    if path is None or path.suffix == ".parquet":
        return "jsonl" if path is None else "parquet"
    return "csv" if path.name.removesuffix(".gz").endswith(".csv") else "jsonl"


class RowFormat(Protocol):
    """Writes all rows of a run into a file."""

    def write(self, file: BinaryIO, rows: Rows, digest: LineDigest) -> None:
        """Changes: `digest` receives what is written. Raises: OSError."""


class JsonLines:
    """Rows as they are."""

    def write(self, file: BinaryIO, rows: Rows, digest: LineDigest) -> None:
        file.writelines(digest.passing(row + b"\n" for _, row in rows()))


@dataclass(frozen=True, slots=True)
class CsvLines:
    """Rows as lines of a CSV table, one per sample.

    Token counts and metrics of a row are on its first sample's line only: the sum of a column is the total of the run.
    """

    columns: Columns
    reasoning: frozenset[str] | None = None  # columns about it; None: those that the rows have

    def write(self, file: BinaryIO, rows: Rows, digest: LineDigest) -> None:
        file.writelines(digest.passing(self._lines(rows)))

    def _lines(self, rows: Rows) -> Iterator[bytes]:
        """The header and the lines, with line ends."""
        kept = list(self.columns.keep)
        if self.columns.keep_all:
            names = (name for _, row in rows() for name in msgspec.json.decode(row, type=dict[str, msgspec.Raw]))
            kept = list(dict.fromkeys(name for name in names if name not in self.columns.reserved))
        text = io.StringIO()
        header = self._header(kept, reasoning_of(rows) if self.reasoning is None else self.reasoning)
        writer = csv.DictWriter(text, header, lineterminator="\n")
        writer.writeheader()
        for index, row in rows():
            writer.writerows(self._cells(Row.of(row, self.columns.answer, index), kept))
            yield text.getvalue().encode()
            text.seek(0)
            text.truncate()
        yield text.getvalue().encode()  # the header of a table without rows

    def _header(self, kept: list[str], reasoning: frozenset[str]) -> list[str]:
        """JSON is what a cell of logprobs or token ids holds; `sample` is 0 to n - 1, and empty for an error."""
        counts = ["prompt_tokens", "cached_tokens", "completion_tokens", *(METRICS if self.columns.metrics else ())]
        answer = ["sample", self.columns.answer, "finish_reason", "stop_reason", "beam_score", *counts]
        lists = ["logprobs", "prompt_logprobs", "token_ids"]
        return ["index", "id", *kept, *answer, *lists, "error_code", "error_message", *sorted(reasoning)]

    def _cells(self, row: Row, kept: list[str]) -> list[dict[str, Any]]:
        """Cells by column, for each sample. A missing cell is empty."""
        cells = {"index": row.index, "id": row.id} | {name: _cell(row.fields.get(name)) for name in kept}
        if row.error is not None:
            return [cells | {"error_code": row.error["code"], "error_message": row.error["message"]}]
        assert row.usage is not None, "a good row has counts"
        counts = {
            "prompt_tokens": row.usage["prompt_tokens"],
            "cached_tokens": row.usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": row.usage["completion_tokens"],
            **row.usage.get("completion_tokens_details", {}),
            **(row.metrics or {}),
        }
        return [
            cells | (counts if place == 0 else {}) | self._sample_cells(place, sample)
            for place, sample in enumerate(row.samples)
        ]

    def _sample_cells(self, place: int, sample: Sample) -> dict[str, Any]:
        lists = {name: getattr(sample, name) for name in ("logprobs", "prompt_logprobs", "token_ids")}
        return {
            "sample": place,
            self.columns.answer: sample.text,
            **({} if sample.reasoning is None else {"reasoning_content": sample.reasoning}),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "beam_score": sample.beam_score,
            **{name: _json(value) for name, value in lists.items() if value is not None},
        }


def _cell(value: Any) -> Any:
    """A copied value: text and numbers unchanged, everything else as JSON."""
    is_plain = value is None or (isinstance(value, str | int | float) and not isinstance(value, bool))
    return value if is_plain else _json(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
