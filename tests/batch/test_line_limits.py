"""One line never stalls the others: what would take seconds to minutes gives an error row."""

import json
import shutil
from datetime import datetime

import pytest
from effort import Effort
from harness.engine import Harness

from pagedcli.batch.columns import Columns
from pagedcli.batch.lines import MAX_LINE_BYTES, skip_line
from pagedcli.batch.parquet import ParquetSource
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.errors import ModelError, PagedcliError, RequestError, UsageError
from pagedcli.models.hub import resolve_model

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
GOOD = {"prompt": "Once upon a time", "max_tokens": 4}


@pytest.fixture(scope="module")
def harness():
    return Harness()


def large_schema(num_properties, num_objects=1):
    properties = {f"p{place}": {"type": "string"} for place in range(num_properties)}
    one = {"type": "object", "properties": properties}
    return one if num_objects == 1 else {"type": "array", "items": {"anyOf": [one] * num_objects}}


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ({"structured_outputs": {"choice": [f"choice number {i}" for i in range(50_000)]}}, "invalid_choice"),
        ({"structured_outputs": {"choice": ["x" * 2**21]}}, "invalid_choice"),
        ({"structured_outputs": {"json": large_schema(5_000)}}, "invalid_schema"),
        ({"structured_outputs": {"json": large_schema(1_900, 4)}}, "invalid_schema"),
        ({"structured_outputs": {"json": {"enum": ["x" * 2**21]}}}, "invalid_schema"),
        ({"regex": "a" * (2**20 + 1)}, "invalid_regex"),
        ({"structured_outputs": {"grammar": 'start: "' + "a" * 2**20 + '"'}}, "invalid_grammar"),
        ({"prompt": "a" * 15 * 2**20}, "context_length_exceeded"),
        ({"prompt": "word " * 3 * 2**20}, "context_length_exceeded"),
        ({"prompt": ["a"] * 100_000}, "invalid_request"),
        ({"prompt": None, "messages": [{"role": "user", "content": "a" * 15 * 2**20}]}, "context_length_exceeded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_line_that_would_stall_all_rows_gives_an_error_row(harness, line, code):
    with Effort() as spent:
        _, rows = harness.run([GOOD, GOOD | line, GOOD])
    assert [row["error"] and row["error"]["code"] for row in rows] == [None, code, None]
    assert spent.pieces < 250, "about ten; thousands without the limit"


def test_grammars_within_the_limits_compile(harness):
    lines = [
        GOOD | {"structured_outputs": {"choice": [f"choice number {i}" for i in range(900)]}, "max_tokens": 20},
        GOOD | {"structured_outputs": {"json": large_schema(200)}, "max_tokens": 20},
    ]
    _, rows = harness.run(lines)
    assert [row["error"] for row in rows] == [None, None]


@pytest.mark.slow_cases("words")
@pytest.mark.parametrize("text", ["a b " * 30_000, "🦊" * 9_000, " " * 40_000], ids=["words", "emoji", "spaces"])
def test_a_long_text_within_the_limit_is_tokenized_as_ever(harness, text):
    tokenizer = harness.tokenizer
    assert tokenizer.encode_within(text, 10**6) == tokenizer.encode(text)


@pytest.mark.long
def test_a_chat_template_that_explodes_is_refused(harness):
    loops = "{% for a in range(100000) %}" * 3 + "{% endfor %}" * 3
    huge = "{{ 'x' * 2**25 }}"
    for template, what in ((loops, "more than 5 s"), (huge, "over 16,777,216 characters")):
        with pytest.raises(UsageError, match=what):
            Tokenizer(harness.engine.model_path, chat_template=template)


def test_a_chat_template_that_is_none_is_refused(tmp_path):
    for path in resolve_model("builtin").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": 7}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ModelError, match=r"the chat_template of the tokenizer in .* is 7, not a template"):
        Tokenizer(tmp_path)


def test_input_without_a_line_end_comes_to_an_end():
    """As /dev/zero, which nobody means."""
    with open("/dev/zero", "rb") as zeros, pytest.raises(PagedcliError, match=r"no line end in 1\.0 MiB"):
        skip_line(zeros, most_bytes=2**20)


# ---------------------------------------------------------------------- Parquet


def table_lines(path, columns, **data):
    pq.write_table(pa.table(data), path)
    return list(ParquetSource(str(path), columns=columns))


def test_a_cell_over_16_mib_is_a_line_that_is_too_long(harness, tmp_path):
    lines = table_lines(tmp_path / "t.parquet", Columns(), prompt=["Hello", "x" * (MAX_LINE_BYTES + 1), "Bye"])
    assert [line.content is None for line in lines] == [False, True, False]
    _, rows = harness.run(iter(lines))
    assert [row["error"] and row["error"]["code"] for row in rows] == [None, "line_too_long", None]


def test_times_in_nanoseconds_are_ids(tmp_path):
    nanoseconds = pa.array([1, 1_700_000_000_000_000_001], pa.timestamp("ns"))
    lines = table_lines(tmp_path / "t.parquet", Columns(), prompt=["a", "b"], id=nanoseconds)
    assert [json.loads(line.content)["id"] for line in lines] == [
        "1970-01-01 00:00:00.000000001",
        "2023-11-14 22:13:20.000000001",
    ]
    whole = pa.array([datetime(2026, 1, 2)], pa.timestamp("ns"))
    lines = table_lines(tmp_path / "t.parquet", Columns(), prompt=["a"], id=whole)
    assert [json.loads(line.content)["id"] for line in lines] == ["2026-01-02T00:00:00"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([253402300800000000], pa.timestamp("us")),
        pa.array([3_000_000], pa.date32()),
        pa.array([1], pa.time64("ns")),
        pa.array([1], pa.duration("ns")),
    ],
    ids=lambda column: str(column.type),
)
def test_times_that_python_does_not_have_are_text(tmp_path, column):
    (line,) = table_lines(tmp_path / "t.parquet", Columns(), prompt=["a"], id=column)
    assert isinstance(json.loads(line.content)["id"], str)


def test_a_nested_time_in_nanoseconds_is_refused_by_name(tmp_path):
    column = pa.array([{"at": 1}], pa.struct([("at", pa.timestamp("ns"))]))
    with pytest.raises(UsageError, match="the column 'id' of type struct"):
        table_lines(tmp_path / "t.parquet", Columns(), prompt=["a"], id=column)
    whole = pa.array([[{"at": 1000}]], pa.list_(pa.struct([("at", pa.timestamp("ns"))])))
    (line,) = table_lines(tmp_path / "t.parquet", Columns(keep_all=True), prompt=["a"], meta=whole)
    assert json.loads(line.content)["meta"] == [{"at": "1970-01-01T00:00:00.000001"}]


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "t.parquet"
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array([1]), pa.array([2])], names=["prompt", "x", "x"])
    pq.write_table(table, path)
    with pytest.raises(UsageError, match="two columns with the name 'x'"):
        ParquetSource(str(path), columns=Columns())


def test_a_text_on_which_the_tokenizer_fails_gives_an_error_row(tmp_path):
    harness, folder = Harness(), tmp_path / "model"
    shutil.copytree(harness.engine.model_path, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    harness.tokenizer = Tokenizer(folder)
    _, rows = harness.run([{"prompt": "a" * 40 + "!"}, {"prompt": [5, 6]}])
    assert rows[0]["error"]["code"] == "tokenizer_error"
    assert "Onig" in rows[0]["error"]["message"], "a panic of the library"
    assert rows[1]["error"] is None
    found = harness.tokenizer.encode_all(["b", "a" * 40 + "!", "c"], 512)
    assert [isinstance(each, RequestError) for each in found] == [False, True, False]
