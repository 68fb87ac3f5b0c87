"""Parquet tables: read as JSONL lines, written as typed columns after those of the input.

Used by batch.prompts and batch.sinks; loads pyarrow only when a Parquet file is named. Memory is bounded by the largest
row group.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from pagedcli.batch import decisions
from pagedcli.batch.columns import DISK, METRICS, SCORES, Columns
from pagedcli.batch.embeddings import EMBEDDING
from pagedcli.batch.journal import digest_of
from pagedcli.batch.lines import MAX_LINE_BYTES, Line, LineSource
from pagedcli.batch.requests import line_of, used_columns
from pagedcli.batch.rows import NumberedRows, WrittenRow, decided_of, marked_of
from pagedcli.buckets import is_url, open_url
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.later import parquet as pq
from pagedcli.later import pyarrow as pa

_READ_ROWS = 1024  # converted to Python at a time
_ROW_GROUP_ROWS = 16_384
_ROW_GROUP_BYTES = 64 * 2**20  # uncompressed bytes of the carried columns
ANSWER_COLUMNS = (
    *("text", "finish_reason", "stop_reason", "beam_score", "usage", "error", "token_ids", "outputs"),
    *("token_logprobs", "prompt_token_logprobs"),
)

_Group = tuple[list[Any], list[str]]  # columns and their names


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def require_pyarrow() -> None:
    """Raises: UsageError if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        hint = "pip install 'pagedcli[parquet]'"
        raise UsageError("Parquet needs pyarrow, which is not installed", hint=hint) from error


class ParquetSource(LineSource):
    """The rows of Parquet files as plain lines, from the columns that a line may have, without nulls.

    Columns are named as the fields of a JSONL line, or chosen by `columns`; a `body` column (a struct, or JSON in a
    string) is merged into the line. Other columns are not read.
    """

    def __init__(self, name: str, paths: list[str] | None = None, columns: Columns | None = None) -> None:
        require_pyarrow()
        self._chosen = columns = columns or Columns()
        self.name = name
        self._paths = paths or [name]
        schemas = [_schema_of(path) for path in self._paths]
        self.schema: Any = schemas[0]  # pyarrow.Schema
        for path, schema in zip(self._paths, schemas, strict=True):
            if not schema.equals(self.schema):
                raise UsageError(f"{path} and {self._paths[0]} have different columns")
        self.names = self.schema.names
        self.columns = used_columns(name, self.names, columns)

    def _lines(self) -> Iterator[Line]:
        index = 0
        for batch in self.batches(self.columns):
            for document in lines_of(batch, self._chosen):
                content = msgspec.json.encode(document)
                is_good = len(content) <= MAX_LINE_BYTES
                digest = xxhash.xxh64_intdigest(content if is_good else b"")
                yield Line(index, index + 1, content if is_good else None, digest)
                index += 1

    def batches(self, columns: list[str] | None = None) -> Iterator[Any]:
        """pyarrow.RecordBatch, with all columns by default. Raises: PagedcliError if the file is damaged."""
        for path in self._paths:
            yield from _batches(path, columns)


def _batches(path: str | Path, columns: list[str] | None = None) -> Iterator[Any]:
    try:
        with _open_parquet(path) as file:
            yield from file.iter_batches(_READ_ROWS, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise PagedcliError(f"{path} is damaged: {error}") from error


def _open_parquet(path: str | Path) -> Any:
    try:
        # what is read of a bucket is requested in few, large pieces
        return (
            pq.ParquetFile(open_url(str(path), at_random=True), pre_buffer=True)
            if is_url(path)
            else pq.ParquetFile(path)
        )
    except OSError as error:
        raise UsageError(f"cannot read the prompts {path}: {error.strerror or error}") from error
    except pa.ArrowException as error:
        hint = "--input-format jsonl or csv reads text from a file of any name"
        raise UsageError(f"{path} is not a Parquet file: {error}", hint=hint) from error


def _schema_of(path: str) -> Any:
    with _open_parquet(path) as file:
        return file.schema_arrow


def lines_of(batch: Any, columns: Columns) -> Iterator[dict[str, Any]]:
    """The lines of a record batch or a table whose columns a line may have."""
    return (line_of(row, columns) for row in _rows_of(batch))


def rows_of_table(path: Path) -> Iterator[dict[str, Any]]:
    """The values of each row of a file by column. Raises: UsageError, PagedcliError."""
    return (row for batch in _batches(path) for row in _rows_of(batch))


def _rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    for row in zip(*(_values(name, batch.column(name)) for name in names), strict=True):
        yield dict(zip(names, row, strict=True))


def _values(name: str, column: Any) -> list[Any]:
    """A column as Python values; times that Python does not have (nanoseconds, the year 10000) as text.

    Raises: UsageError if a nested column has such times.
    """
    type_, wrong = _in_microseconds(column.type), (pa.ArrowException, ValueError, OverflowError)
    values: list[Any]
    try:
        values = (column.cast(type_) if type_ != column.type else column).to_pylist()
    except wrong as error:
        if not pa.types.is_temporal(type_):
            raise UsageError(f"the column {name!r} of type {type_} cannot be read: {error}") from error
        values = column.cast(pa.string()).to_pylist()
    return values


def _in_microseconds(type_: Any) -> Any:
    """The type with microseconds for nanoseconds, which to_pylist reads with pandas only, and then as its objects."""
    if getattr(type_, "unit", "") == "ns":
        coarse = pa.time64("us") if pa.types.is_time(type_) else pa.duration("us")
        return pa.timestamp("us", type_.tz) if pa.types.is_timestamp(type_) else coarse
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in type_])
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_in_microseconds(type_.value_type)))
    return type_


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """Writes the rows of a run as a table: the columns of `carried`, then those of the answer."""

    carried: ParquetSource | None = None  # None: the rows' index, id and copied columns
    columns: Columns = field(default_factory=Columns)
    marked: frozenset[str] | None = None  # columns about reasoning and calls, in every part; None: as the rows have
    by_sample: bool = False  # whether each sample has a row of its own

    @property
    def carried_names(self) -> list[str]:
        """The columns of the input that the output has."""
        names: list[str] = [] if self.carried is None else self.carried.schema.names
        return [name for name in names if not self.columns.keep or name in self.columns.keep]

    @property
    def row_columns(self) -> Columns:
        """The columns of the rows: a table carries those of its input itself."""
        return self.columns if self.carried is None else replace(self.columns, keep=(), keep_all=False)

    @property
    def carried_as(self) -> dict[str, str]:
        """The columns of the input that the output has, each with its name there: another one where answers have it."""
        names = self.carried_names
        may_score = SCORES if {"continuations", "logprobs_from"} & set(names) else frozenset[str]()
        may_score |= {EMBEDDING} if "embed" in names else frozenset()
        found = answer_schema(self.columns, self.columns.marked | may_score).names
        taken = {"sample", *found, *self.columns.decided}
        return {name: f"input_{name}" if name in taken else name for name in names}

    def write(self, file: BinaryIO, rows: NumberedRows) -> str:
        """Write `rows()` for the first rows of `carried` and in its order; see sinks.RowFormat."""
        marked = marked_of(rows, self.columns) if self.marked is None else self.marked
        decided = decided_of(rows, self.columns)
        answer = self._schema(marked, decided)
        if EMBEDDING in marked and self.marked is None:  # all parts of a run have the same columns
            samples = (each for _, row in rows() for each in WrittenRow.of(row, self.columns.answer).samples)
            sizes = {len(each.embedding) for each in samples if each.embedding is not None}
            vector = pa.field(EMBEDDING, pa.list_(pa.float32(), sizes.pop() if len(sizes) == 1 else -1))
            answer = answer.set(answer.get_field_index(EMBEDDING), vector)
        if self.carried is None:
            groups = self._own_groups(rows, marked | {decisions.ANSWERS} if decided else marked, answer)
        else:
            groups = self._carried_groups(self.carried, iter(rows()), answer)
        writer = None
        for columns, names in groups:
            table = pa.Table.from_arrays(columns, names=names)
            if writer is None:
                writer = pq.ParquetWriter(file, table.schema, compression="zstd")
            writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
        assert writer is not None, "there is at least an empty group"
        writer.close()
        file.seek(0)
        return digest_of(file)

    def _own_groups(self, rows: NumberedRows, marked: frozenset[str], answer: Any) -> Iterator[_Group]:
        """The rows' index, id and copied columns before the answer; one empty group if there are no rows."""
        own = [("index", pa.int64()), ("id", pa.string())]
        kept = _kept_schema((row for _, row in rows()), self.columns, marked)
        schema = pa.schema([*own, *kept, *answer])
        left, num_groups = iter(rows()), 0
        while (some := list(islice(left, _ROW_GROUP_ROWS))) or not num_groups:
            yield columns_of([line for lines in self._cells(some) for line in lines], schema), schema.names
            num_groups += 1

    def _schema(self, marked: frozenset[str], decided: dict[str, type]) -> Any:
        types = ((name, pa.string() if kind is str else pa.float64()) for name, kind in decided.items())
        found = pa.schema([*answer_schema(self.columns, marked), *types])
        if not self.by_sample:
            return found
        return pa.schema([("sample", pa.int32()), *(each for each in found if each.name != "outputs")])

    def _cells(self, rows: Iterable[tuple[int, bytes]]) -> list[list[dict[str, Any]]]:
        """The lines of each row. With several, `usage` and `metrics` are on the first one."""
        answer = self.columns.answer
        found = [cells_of(WrittenRow.of(row, answer, index), answer) for index, row in rows]
        if not self.by_sample:
            return [[cells] for cells in found]
        rest = {"usage": None, "metrics": None}
        return [
            [
                cells | (rest if place else {}) | sample | {"sample": place, "index": cells["index"]}
                for place, sample in enumerate(cells.get("outputs") or [{}])
            ]
            for cells in found
        ]

    def _carried_groups(
        self, carried: ParquetSource, rows: Iterator[tuple[int, bytes]], answer: Any
    ) -> Iterator[_Group]:
        names = self.carried_names
        schema = pa.schema([carried.schema.field(name) for name in names])
        waiting: list[Any] = []
        for batch in carried.batches(names):
            waiting.append(batch)
            num_rows, num_bytes = sum(each.num_rows for each in waiting), sum(each.nbytes for each in waiting)
            if num_rows >= _ROW_GROUP_ROWS or num_bytes >= _ROW_GROUP_BYTES:
                yield self._joined(pa.Table.from_batches(waiting), rows, answer)
                waiting = []
        yield self._joined(pa.Table.from_batches(waiting, schema), rows, answer)

    def _joined(self, carried: Any, rows: Iterator[tuple[int, bytes]], schema: Any) -> _Group:
        answers = self._cells(islice(rows, carried.num_rows))
        carried = carried.slice(0, len(answers))  # --limit: only the first rows have an answer
        if self.by_sample:
            carried = carried.take(pa.array([place for place, lines in enumerate(answers) for _ in lines], pa.int64()))
        names = [f"input_{name}" if name in schema.names else name for name in self.carried_as.values()]
        columns = columns_of([line for lines in answers for line in lines], schema)
        return [*carried.columns, *columns], [*names, *schema.names]


def _kept_schema(rows: Iterable[bytes], columns: Columns, marked: frozenset[str]) -> Any:
    """Name and type of each copied column, from all rows. A column with values of several types becomes text."""
    types: dict[str, Any] = dict.fromkeys(columns.kept_names(()).values(), pa.null())
    rows = iter(rows)
    while columns.copies and (some := [msgspec.json.decode(row) for row in islice(rows, _READ_ROWS)]):
        for name in dict.fromkeys(name for row in some for name in row if name not in columns.reserved | marked):
            try:
                found = pa.schema([(name, pa.array([row.get(name) for row in some]).type)])
                known = pa.schema([(name, types.get(name, pa.null()))])
                types[name] = pa.unify_schemas([known, found], promote_options="permissive").field(name).type
            except pa.ArrowException:
                types[name] = pa.string()
    return pa.schema(list(types.items()))


def answer_schema(columns: Columns | None = None, marked: frozenset[str] = frozenset()) -> Any:
    """The columns of an answer, with these that only some runs have. All are typed, even if no row has a value."""
    columns = columns or Columns()
    token_ids = [("token_ids", pa.list_(pa.int32()))] if columns.token_ids else []
    numbers = [(name, pa.float64() if name.endswith("_s") else pa.int64()) for name in METRICS]
    metrics = [("metrics", pa.struct(numbers))] if columns.metrics else []
    token = [("token", pa.string()), ("logprob", pa.float64()), ("bytes", pa.list_(pa.uint8()))]
    position, prompt_position = (
        pa.struct([*fields, ("top_logprobs", pa.list_(pa.struct(fields)))])
        for fields in (token, [*token, ("token_id", pa.int32())])
    )
    sample = [(columns.answer, pa.string()), ("finish_reason", pa.string()), ("stop_reason", pa.string())]
    if "tool_calls" in marked:
        sample.insert(1, ("tool_calls", pa.string()))  # JSON: arguments are of any type
    if "reasoning_content" in marked:
        sample.insert(1, ("reasoning_content", pa.string()))
    sample += [("beam_score", pa.float64()), *token_ids]
    sample += [(EMBEDDING, pa.list_(pa.float32()))] if EMBEDDING in marked else []
    # `logprobs` and `prompt_logprobs` are how many the row asks for
    sample += [("token_logprobs", pa.list_(position)), ("prompt_token_logprobs", pa.list_(prompt_position))]
    usage = [(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    found = ["cached_tokens", *sorted(DISK & marked)]
    usage.append(("prompt_tokens_details", pa.struct([(name, pa.int64()) for name in found])))
    score = pa.struct(
        [
            *((name, pa.int32()) for name in ("index", "num_tokens", "num_bytes")),
            *(("logprob", pa.float64()), ("is_greedy", pa.bool_())),
            *(("token_ids", pa.list_(pa.int32())), ("logprobs", pa.list_(pa.float64()))),
        ]
    )
    best = [(name, pa.int32()) for name in ("logprob", "per_token", "per_byte")]
    if "reasoning_tokens" in marked:
        usage.append(("completion_tokens_details", pa.struct([("reasoning_tokens", pa.int64())])))
    return pa.schema(
        [
            *sample,
            ("outputs", pa.list_(pa.struct([("index", pa.int32()), *sample]))),  # replaces text where n > 1
            ("usage", pa.struct(usage)),
            *metrics,
            *([("scores", pa.list_(score)), ("best", pa.struct(best))] if "scores" in marked else ()),
            ("error", pa.struct([("code", pa.string()), ("message", pa.string()), ("line", pa.int64())])),
        ]
    )


def columns_of(answers: list[dict[str, Any]], schema: Any) -> list[Any]:
    """pyarrow arrays of the fields of a schema."""
    return [pa.array([_as_text(answer.get(each.name), each.type) for answer in answers], each.type) for each in schema]


def _as_text(value: Any, type_: Any) -> Any:
    """A value of a column of strings as a string."""
    if value is None or isinstance(value, str) or str(type_) != "string":
        return value
    return msgspec.json.encode(value).decode()


def cells_of(row: WrittenRow, answer: str = "text") -> dict[str, Any]:
    """The cells of a row by column. The completions endpoint's logprobs differ in form and are left out."""
    samples = []
    for sample in row.samples:
        cells = sample.cells(answer)
        if sample.stop_reason is not None:
            cells["stop_reason"] = str(sample.stop_reason)
        if sample.tool_calls is not None:
            cells["tool_calls"] = msgspec.json.encode(sample.tool_calls).decode()
        logprobs = sample.logprobs
        cells["token_logprobs"] = logprobs.get("content") if isinstance(logprobs, dict) else logprobs
        cells["prompt_token_logprobs"] = sample.prompt_logprobs
        samples.append(cells)
    own = {"id": row.id, "usage": row.usage, "metrics": row.metrics, **decisions.cells_of(row.answers)}
    return row.fields | own | (samples[0] if len(samples) == 1 else {"outputs": samples or None}) | {"index": row.index}
