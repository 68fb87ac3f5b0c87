"""`generate`, `plan` and `profile-memory` on Parquet files: the rows of JSONL, also of a resumed run."""

import json

import pytest
from cli_harness import FAST, pagedcli, rows_of

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'pagedcli[parquet]'")
import pyarrow.parquet as pq  # noqa: E402

ROWS = [
    {"id": f"r{i}", "prompt": f"Story number {i}: Once upon", "n": 2 if i % 5 == 0 else None, "label": i * 1.5}
    | {"temperature": 1.0 if i % 2 else 0.0, "logprobs": 1 if i == 3 else None, "max_tokens": -4 if i == 7 else None}
    for i in range(24)
]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=5)
    return path


@pytest.fixture
def jsonl_rows(tmp_path):
    """The answers to the same rows as JSONL."""
    lines = [{name: value for name, value in row.items() if value is not None and name != "label"} for row in ROWS]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "expected.jsonl", *FAST, expect=3)
    return rows_of(tmp_path / "expected.jsonl")


def without_nulls(value):
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None and item != []}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def answers(path):
    """The rows of an output table as those of a JSONL output, without null fields."""
    columns = ("id", "text", "finish_reason", "usage", "error", "outputs", "token_logprobs")
    return [without_nulls({name: row[name] for name in columns}) for row in pq.read_table(path).to_pylist()]


def expected(rows):
    cells = [{"token_logprobs" if name == "logprobs" else name: row[name] for name in row} for row in rows]
    return [without_nulls({name: row[name] for name in row if name != "index"}) for row in cells]


def test_tables_and_jsonl_have_the_same_answers_whatever_they_are_made_of(table, jsonl_rows, tmp_path):
    for name, path in (("jsonl", tmp_path / "in.jsonl"), ("table", table)):
        pagedcli("generate", path, "-o", tmp_path / f"{name}.parquet", *FAST, expect=3)
        assert answers(tmp_path / f"{name}.parquet") == expected(jsonl_rows)
    pagedcli("generate", table, "-o", tmp_path / "out.jsonl", *FAST, expect=3)
    assert rows_of(tmp_path / "out.jsonl") == jsonl_rows
    assert pq.read_table(tmp_path / "jsonl.parquet")["index"].to_pylist() == list(range(24))
    carried = pq.read_table(table)
    assert pq.read_table(tmp_path / "table.parquet").select(carried.column_names).equals(carried)


def test_a_folder_is_read_in_the_order_of_its_names(table, jsonl_rows, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(3):
        pq.write_table(pq.read_table(table).slice(8 * part, 8), folder / f"part-{part}.parquet")
    pagedcli("generate", folder, "-o", tmp_path / "out.parquet", *FAST, expect=3)
    assert answers(tmp_path / "out.parquet") == expected(jsonl_rows)
    for part in folder.iterdir():
        part.unlink()
    lines = (tmp_path / "in.jsonl").read_text().splitlines(keepends=True)
    (folder / "a.jsonl").write_text("\n" + "".join(lines[:9]))
    (folder / "b.jsonl").write_text("".join(lines[9:]))
    pagedcli("generate", folder, "-o", tmp_path / "out.jsonl", *FAST, expect=3)
    rows = rows_of(tmp_path / "out.jsonl")
    assert rows[7]["error"].pop("line") == 9, "lines are counted across files, blank ones included"
    jsonl_rows[7]["error"].pop("line")
    assert rows == jsonl_rows


def test_the_first_rows_and_shards_of_a_table(table, jsonl_rows, tmp_path):
    pagedcli("generate", table, "-o", tmp_path / "out.parquet", "--limit", 6, *FAST)
    assert answers(tmp_path / "out.parquet") == expected(jsonl_rows[:6])
    for shard, code in ((1, 0), (2, 3)):
        pagedcli("generate", table, "-o", tmp_path / f"{shard}.jsonl", "--shard", f"{shard}/2", *FAST, expect=code)
    pagedcli("merge", tmp_path / "1.jsonl", tmp_path / "2.jsonl", "-o", tmp_path / "out.jsonl", expect=3)
    assert rows_of(tmp_path / "out.jsonl") == jsonl_rows
    said = pagedcli("generate", table, "-o", tmp_path / "s.parquet", "--shard", "1/2", *FAST, expect=2).stderr
    assert "JSONL" in said


def test_a_stopped_run_is_resumed_to_the_same_table(table, jsonl_rows, tmp_path):
    run = ("generate", table, "-o", tmp_path / "out.parquet", *FAST)
    pagedcli(*run, "--max-errors", 1, expect=1)
    assert not (tmp_path / "out.parquet").exists()
    pagedcli(*run, "--resume", expect=3)
    assert answers(tmp_path / "out.parquet") == expected(jsonl_rows)
