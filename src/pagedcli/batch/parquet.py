"""Parquet tables: read as JSONL lines, written as typed columns after those of the input.

Used by batch.sources and batch.sinks; loads pyarrow only when a Parquet file is named. Memory is bounded by the largest
row group.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from pagedcli.batch.lines import Line, LineSource
from pagedcli.batch.requests import LINE_FIELDS
from pagedcli.errors import PagedcliError, UsageError

_READ_ROWS = 1024  # converted to Python at a time
_ROW_GROUP_ROWS = 16_384
_ROW_GROUP_BYTES = 64 * 2**20  # of the columns carried along, uncompressed
_JSON_FIELDS = ("messages", "body", "response_format", "chat_template_kwargs", "logit_bias")  # may be JSON in a string
ANSWER_COLUMNS = ("text", "finish_reason", "usage", "error", "token_ids", "outputs", "token_logprobs")


def is_parquet(path: Path) -> bool:
    """Whether a file is a Parquet table by its name."""
    return path.suffix == ".parquet"


def require_pyarrow() -> None:
    """Raises: UsageError if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow, which is not installed", hint="pip install 'pagedcli[parquet]'") from (
            error
        )


class ParquetSource(LineSource):
    """The rows of Parquet files as plain lines, from the columns that a line may have, without nulls.

    Columns are named as the fields of a JSONL line; a `body` column (a struct, or JSON in a string) is merged into
    the line. Other columns are not read.
    """

    def __init__(self, name: str, paths: list[Path] | None = None) -> None:
        require_pyarrow()
        self.name = name
        self._paths = [Path(name)] if paths is None else paths
        schemas = [_schema_of(path) for path in self._paths]
        self.schema: Any = schemas[0]  # pyarrow.Schema
        for path, schema in zip(self._paths, schemas, strict=True):
            if not schema.equals(self.schema):
                raise UsageError(f"{path} and {self._paths[0]} have different columns")
        names = self.schema.names
        self.columns = [column for column in names if column in LINE_FIELDS]
        if not {"prompt", "messages", "body"} & set(self.columns):
            raise UsageError(
                f"{name} has no column 'prompt', 'messages' or 'body'; its columns: {', '.join(names)}",
                hint="rename the column that holds the prompts",
            )

    def _lines(self) -> Iterator[Line]:
        index = 0
        for batch in self.batches(self.columns):
            for document in lines_of(batch):
                content = msgspec.json.encode(document)
                yield Line(index, index + 1, content, xxhash.xxh64_intdigest(content))
                index += 1

    def batches(self, columns: list[str] | None = None) -> Iterator[Any]:
        """pyarrow.RecordBatch, with all columns by default. Raises: PagedcliError if the file is damaged."""
        import pyarrow as pa

        for path in self._paths:
            try:
                with _open_parquet(path) as file:
                    yield from file.iter_batches(_READ_ROWS, columns=columns)
            except (pa.ArrowException, OSError) as error:
                raise PagedcliError(f"{path} is damaged: {error}") from error

    def check_answer_columns(self) -> None:
        """Raises: UsageError if a column has the name of an output column."""
        taken = [name for name in self.schema.names if name in ANSWER_COLUMNS]
        if taken:
            raise UsageError(
                f"{self.name} has a column {taken[0]!r}, which the output adds", hint="rename it, or write JSONL"
            )


def _open_parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except OSError as error:
        raise UsageError(f"cannot read the prompts {path}: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise UsageError(f"{path} is not a Parquet file: {error}") from error


def _schema_of(path: Path) -> Any:
    with _open_parquet(path) as file:
        return file.schema_arrow


def lines_of(batch: Any) -> Iterator[dict[str, Any]]:
    """The lines of a record batch or a table whose columns a line may have."""
    for row in batch.to_pylist():
        yield _line(row)


def _line(row: dict[str, Any]) -> dict[str, Any]:
    line = {name: _plain(name, value) for name, value in row.items() if value is not None and value == value}
    body = line.pop("body", None)
    return line | body if isinstance(body, dict) else line


def _plain(name: str, value: Any) -> Any:
    """A cell as a JSON value: structs without nulls, maps as objects, JSON text decoded."""
    if name in _JSON_FIELDS and isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value  # the request parser reports the error
    if isinstance(value, dict):
        return {key: _plain("", item) for key, item in value.items() if item is not None or key == "content"}
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) and len(item) == 2 for item in value):  # a map
            return {str(key): _plain("", item) for key, item in value}
        return [_plain("", item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, float) and value.is_integer():  # pandas stores integers with nulls as floats
        return int(value)
    return value


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """Writes the rows of a run as a table: the columns of `carried`, then those of the answer."""

    carried: ParquetSource | None = None  # None: the rows' index and id
    output_token_ids: bool = False

    def write(self, file: BinaryIO, rows: Iterable[bytes]) -> None:
        """Write `rows`, in batch.rows' format, for the first rows of `carried` and in its order."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows, writer = iter(rows), None
        for columns, names in self._groups(rows):
            table = pa.Table.from_arrays(columns, names=names)
            if writer is None:
                writer = pq.ParquetWriter(file, table.schema, compression="zstd")
            writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
        assert writer is not None, "there is at least an empty group"
        writer.close()

    def _groups(self, rows: Iterator[bytes]) -> Iterator[tuple[list[Any], list[str]]]:
        """Columns and names per row group; one empty group if there are no rows."""
        import pyarrow as pa

        schema = answer_schema(output_token_ids=self.output_token_ids)
        if self.carried is None:
            head = pa.schema([("index", pa.int64()), ("id", pa.string())])
            num_groups = 0
            while (some := list(islice(rows, _ROW_GROUP_ROWS))) or not num_groups:
                answers = [answer_of(msgspec.json.decode(row)) for row in some]
                yield columns_of(answers, [*head, *schema]), [*head.names, *schema.names]
                num_groups += 1
            return
        waiting: list[Any] = []
        for batch in self.carried.batches():
            waiting.append(batch)
            num_rows, num_bytes = sum(each.num_rows for each in waiting), sum(each.nbytes for each in waiting)
            if num_rows >= _ROW_GROUP_ROWS or num_bytes >= _ROW_GROUP_BYTES:
                yield self._joined(pa.Table.from_batches(waiting), rows)
                waiting = []
        yield self._joined(pa.Table.from_batches(waiting, self.carried.schema), rows)

    def _joined(self, carried: Any, rows: Iterator[bytes]) -> tuple[list[Any], list[str]]:
        schema = answer_schema(output_token_ids=self.output_token_ids)
        answers = [answer_of(msgspec.json.decode(row)) for row in islice(rows, carried.num_rows)]
        carried = carried.slice(0, len(answers))  # --limit: only the first rows have an answer
        return [*carried.columns, *columns_of(answers, list(schema))], [*carried.column_names, *schema.names]


def answer_schema(*, output_token_ids: bool = False) -> Any:
    """The columns of an answer. All are typed, even if no row has a value."""
    import pyarrow as pa

    token_ids = [("token_ids", pa.list_(pa.int32()))] if output_token_ids else []
    alternative = pa.struct([("token", pa.string()), ("logprob", pa.float64()), ("bytes", pa.list_(pa.uint8()))])
    position = pa.struct([*alternative, ("top_logprobs", pa.list_(alternative))])
    sample = [("text", pa.string()), ("finish_reason", pa.string()), *token_ids]
    sample.append(("token_logprobs", pa.list_(position)))  # `logprobs` is how many the row asks for
    usage = [(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    usage.append(("prompt_tokens_details", pa.struct([("cached_tokens", pa.int64())])))
    return pa.schema(
        [
            *sample,
            ("outputs", pa.list_(pa.struct([("index", pa.int32()), *sample]))),  # with n > 1, instead of text
            ("usage", pa.struct(usage)),
            ("error", pa.struct([("code", pa.string()), ("message", pa.string()), ("line", pa.int64())])),
        ]
    )


def columns_of(answers: list[dict[str, Any]], fields: list[Any]) -> list[Any]:
    """pyarrow arrays of the fields."""
    import pyarrow as pa

    return [pa.array([answer.get(field.name) for answer in answers], field.type) for field in fields]


def answer_of(row: dict[str, Any]) -> dict[str, Any]:
    """The cells of a row in batch.rows' format, plain or OpenAI."""
    if "response" not in row:
        answer = row | {"id": None if row["id"] is None else str(row["id"])}
        samples = [_sample(sample) for sample in row.get("outputs", [row])]
    else:
        body = (row["response"] or {}).get("body", {"choices": []})
        answer = {"id": row["custom_id"], "error": row["error"], "usage": body.get("usage")}
        samples = [_sample(choice) for choice in body["choices"]]
    return answer | (samples[0] if len(samples) == 1 else {"outputs": samples or None}) | {"index": row.get("index")}


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample of a plain row, or a choice. The completions endpoint's logprobs differ in form and are left out."""
    logprobs = sample.get("logprobs")
    return {
        "index": sample["index"],
        "text": sample["message"]["content"] if "message" in sample else sample["text"],
        "finish_reason": sample["finish_reason"],
        "token_ids": sample.get("token_ids"),
        "token_logprobs": logprobs.get("content") if isinstance(logprobs, dict) else logprobs,
    }
