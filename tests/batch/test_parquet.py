"""Parquet in and out: the same rows as JSONL, typed columns, other columns untouched, bounded memory."""

import json

import pytest

from pagedcli.batch.columns import Columns
from pagedcli.batch.parquet import ParquetRows, ParquetSource, answer_schema
from pagedcli.errors import PagedcliError, UsageError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'pagedcli[parquet]'")
import pyarrow.parquet as pq  # noqa: E402


def documents(source):
    return [json.loads(line.content) for line in source]


def table_of(rows, path):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return ParquetSource(str(path))


def answer(index, **fields):
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    row = {"index": index, "id": None, "text": f"t{index}", "finish_reason": "stop", "usage": usage, "error": None}
    return json.dumps(row | fields).encode()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"prompt": [1, 2, 3]}], [{"prompt": [1, 2, 3]}]),
        ([{"prompt": "a", "max_tokens": None, "label": "x"}, {"prompt": "b", "max_tokens": 3, "label": None}],
         [{"prompt": "a"}, {"prompt": "b", "max_tokens": 3}]),  # other columns are not read
        ([{"prompt": "a", "max_tokens": 3.0}, {"prompt": "b", "max_tokens": float("nan")}],  # as pandas makes them
         [{"prompt": "a", "max_tokens": 3}, {"prompt": "b"}]),
    ],
)  # fmt: skip
def test_cells_are_fields_and_nulls_are_absent(tmp_path, rows, expected):
    assert documents(table_of(rows, tmp_path / "in.parquet")) == expected


@pytest.mark.parametrize("as_text", [False, True], ids=["struct", "json"])
def test_messages_and_a_body_may_be_structs_or_json(tmp_path, as_text):
    messages = [{"role": "user", "content": "hello", "name": None}, {"role": "system", "content": "x", "name": "n"}]
    body = {"messages": messages, "max_tokens": 5}
    rows = [{"custom_id": "a", "body": json.dumps(body) if as_text else body}]
    [line] = documents(table_of(rows, tmp_path / "in.parquet"))
    assert line["custom_id"] == "a"
    assert line["max_tokens"] == 5
    assert [message["role"] for message in line["messages"]] == ["user", "system"]


def test_what_cannot_be_read_is_said_before_anything_starts(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        ParquetSource(str(tmp_path / "none.parquet"))
    (tmp_path / "text.parquet").write_text("prompt")
    with pytest.raises(UsageError, match="not a Parquet file"):
        ParquetSource(str(tmp_path / "text.parquet"))
    with pytest.raises(UsageError, match=r"no column 'prompt'.*: question"):
        table_of([{"question": "x"}], tmp_path / "in.parquet")


def test_a_damaged_row_group_ends_the_run_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "in.parquet"
    table_of([{"prompt": f"prompt number {i}"} for i in range(500)], path)
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 200] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(PagedcliError, match="is damaged"):
        list(ParquetSource(str(path)))


def test_other_columns_are_carried_along_with_their_types(tmp_path):
    label = pa.array([{"a": 1}, None, {"a": 3}], pa.struct([("a", pa.int8())]))
    table = pa.table({"label": label, "prompt": ["x", "y", "z"], "day": pa.array([1, 2, None], pa.date32())})
    pq.write_table(table, tmp_path / "in.parquet")
    with (tmp_path / "out.parquet").open("w+b") as file:
        ParquetRows(ParquetSource(str(tmp_path / "in.parquet"))).write(file, lambda: enumerate(map(answer, range(3))))
    out = pq.read_table(tmp_path / "out.parquet")
    assert out.select(table.column_names).equals(table)
    assert out["text"].to_pylist() == ["t0", "t1", "t2"]
    assert out["usage"].to_pylist()[0]["total_tokens"] == 3


def test_the_error_column_is_typed_where_no_row_failed(tmp_path):
    with (tmp_path / "out.parquet").open("w+b") as file:
        ParquetRows().write(file, lambda: enumerate([answer(0), answer(1)]))
    out = pq.read_table(tmp_path / "out.parquet")
    assert out["error"].null_count == 2
    assert out.schema.field("error").type == answer_schema().field("error").type
    assert pa.types.is_struct(out.schema.field("error").type)


def test_all_parts_of_a_row_have_a_column(tmp_path):
    position = {"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": []}
    samples = [{"index": i, "text": "s", "finish_reason": "length", "token_ids": [i]} for i in range(2)]
    error = {"code": "invalid_json", "message": "not JSON", "line": 4}
    rows = [
        answer(0, token_ids=[5, 6], logprobs=[position]),
        json.dumps({"index": 1, "id": 5, "outputs": samples, "usage": None, "error": None}).encode(),
        answer(2, text=None, finish_reason=None, usage=None, error=error),
    ]
    with (tmp_path / "out.parquet").open("w+b") as file:
        ParquetRows(columns=Columns(token_ids=True)).write(file, lambda: enumerate(rows))
    out = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert out[0]["token_ids"] == [5, 6]
    assert out[0]["token_logprobs"] == [position]
    assert [sample["token_ids"] for sample in out[1]["outputs"]] == [[0], [1]]
    assert out[2]["error"] == error


@pytest.mark.parametrize("num_rows", [0, 1, 20_000])
def test_any_number_of_rows_is_written_in_row_groups(tmp_path, num_rows):
    table = pa.table({"prompt": pa.array([str(i) for i in range(num_rows)], pa.string())})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=700)
    with (tmp_path / "out.parquet").open("w+b") as file:
        rows = [answer(i, text=str(i)) for i in range(num_rows)]
        ParquetRows(ParquetSource(str(tmp_path / "in.parquet"))).write(file, lambda: enumerate(rows))
    out = pq.ParquetFile(tmp_path / "out.parquet")
    assert out.read()["text"].to_pylist() == out.read()["prompt"].to_pylist()
    assert max((out.metadata.row_group(i).num_rows for i in range(out.num_row_groups)), default=0) <= 2**14
