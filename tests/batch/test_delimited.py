"""CSV and TSV as input: the rows are those of the same lines as JSONL."""

import csv
import gzip
import io
import json

import pytest
from cli_harness import FAST, pagedcli, rows_of

from pagedcli.batch.columns import Columns
from pagedcli.batch.delimited import DelimitedSource
from pagedcli.batch.lines import MAX_LINE_BYTES
from pagedcli.batch.prompts import open_source
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.line_files import zstd

ROWS = [
    {"id": "007", "prompt": "The fox", "max_tokens": 2, "label": "x"},
    {"id": "b", "prompt": 'Two\nlines, a comma and "quotes"', "temperature": 0.5, "seed": 7, "label": "1.50"},
    {"id": "c", "prompt": "42", "stop": "9", "ignore_eos": True, "label": ""},
]
NAMES = ("id", "prompt", "max_tokens", "temperature", "seed", "stop", "ignore_eos", "label")


def table(rows=ROWS, delimiter=",", names=NAMES):
    text = io.StringIO()
    writer = csv.DictWriter(text, names, delimiter=delimiter, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def written(path, content):
    opened = {".gz": gzip.compress, ".zst": zstd.compress}.get(path.suffix, bytes)
    path.write_bytes(opened(content))
    return path


def lines_of(path, columns=None, kind="csv"):
    return list(DelimitedSource(str(path), columns or Columns(), kind))


@pytest.fixture
def jsonl(tmp_path):
    return written(tmp_path / "in.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in ROWS))


@pytest.mark.parametrize("name", ["in.CSV", "in.tsv", "in.csv.gz", "in.tsv.zst"])
@pytest.mark.parametrize("flags", [(), ("--keep", "label"), ("--deduplicate",), ("--shard", "2/2"), ("--limit", "2")])
def test_the_rows_are_those_of_jsonl(tmp_path, jsonl, name, flags):
    content = table(delimiter="\t" if "tsv" in name else ",")
    path = written(tmp_path / name, b"\xef\xbb\xbf" + content)
    of_table, of_lines = (pagedcli("generate", source, *FAST, *flags).stdout for source in (path, jsonl))
    assert of_table == of_lines
    assert of_table


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_table_comes_through_a_pipe_too(jsonl, kind):
    content = table(delimiter="\t" if kind == "tsv" else ",").decode()
    made = pagedcli("generate", "-", "--input-format", kind, "--keep", "label", *FAST, stdin=content)
    assert made.stdout == pagedcli("generate", jsonl, "--keep", "label", *FAST).stdout


@pytest.mark.long
def test_other_commands_read_tables(tmp_path, jsonl):
    path = written(tmp_path / "in.csv", table())
    for command in (("trace", "--dump-kv", *FAST), ("simulate", "--pool", "64")):
        pagedcli(command[0], path, *command[1:])
    flags = ("--no-calibrate", "--format", "json")
    plan, of_lines = (json.loads(pagedcli("plan", each, *flags).stdout) for each in (path, jsonl))
    assert (plan["num_valid_rows"], plan["num_prompt_tokens"]) == (3, of_lines["num_prompt_tokens"])


def test_a_stopped_run_resumes_and_its_shards_merge(tmp_path, jsonl):
    bad = written(tmp_path / "in.csv", table([*ROWS, {"prompt": "x", "max_tokens": -1}, {"prompt": "The end"}]))
    run = ("generate", bad, "-o", tmp_path / "out.jsonl", *FAST)
    pagedcli(*run, "--max-errors", 1, expect=1)
    pagedcli(*run, "--resume", expect=3)
    assert [row["index"] for row in rows_of(tmp_path / "out.jsonl")] == list(range(5))
    shards = [tmp_path / f"{place}.jsonl" for place in (1, 2)]
    for place, shard in enumerate(shards, 1):
        pagedcli("generate", bad, "--shard", f"{place}/2", "-o", shard, *FAST, expect=0 if place == 1 else 3)
    pagedcli("merge", *shards, "-o", tmp_path / "merged.jsonl", expect=3)
    assert "merged into JSONL" in pagedcli("merge", *shards, "-o", tmp_path / "merged.csv", expect=2).stderr
    whole, merged = (rows_of(tmp_path / name) for name in ("out.jsonl", "merged.jsonl"))
    assert [row["text"] for row in merged] == [row["text"] for row in whole]
    pagedcli(*run, "--input-format", "jsonl", "--resume", expect=2)


def test_chosen_columns_and_cells_of_json(tmp_path):
    messages = json.dumps([{"role": "user", "content": "Hi"}])
    path = written(tmp_path / "in.csv", table([{"q": "Hello", "qid": "1", "n": 2}], names=("q", "qid", "n")))
    (row,) = rows_of(pagedcli("generate", path, "--field", "q", "--id-field", "qid", *FAST).stdout)
    assert (row["id"], len(row["outputs"])) == ("1", 2)
    path = written(
        tmp_path / "chats.csv", table([{"messages": messages}, {"prompt": "A"}], names=("messages", "prompt"))
    )
    assert [json.loads(line.content) for line in lines_of(path)] == [
        {"messages": json.loads(messages)},
        {"prompt": "A"},
    ]


def test_a_line_keeps_its_number_in_the_file(tmp_path):
    path = written(tmp_path / "in.csv", b'prompt,id\n"a\nb",1\n\nc,2,too many\n"un\xff",3\nd\n')
    assert [(line.number, line.index) for line in lines_of(path)] == [(2, 0), (5, 1), (6, 2), (7, 3)]
    made = pagedcli("generate", path, "--keep", "all", *FAST, expect=3)
    assert {*rows_of(made.stdout)[1]} == {"index", "id", "prompt", "text", "finish_reason", "usage", "error"}
    errors = [(row["id"], row["error"]) for row in rows_of(made.stdout) if row["error"]]
    assert [(row_id, error["code"], error["line"]) for row_id, error in errors] == [
        *(("2", "invalid_row", 5), (None, "invalid_utf8", 6)),
    ]
    assert (
        errors[0][1]["message"]
        == "the row has 3 cells, but the header 2 columns: a cell with the separator needs quotes"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no header"),
        (b"\n\n", "has no header"),
        (b"The fox\nHello\n", "has no column 'prompt', 'messages' or 'body'; its columns: The fox"),
        (b"prompt,prompt\na,b\n", "two columns with the name 'prompt'"),
        ("prompt\na\n".encode("utf-16"), "is UTF-16"),
        (b'prompt\n"a\nb\n', "row that begins in line 2 has a quote that is never closed"),
        (b"prompt\n" + b"a" * (MAX_LINE_BYTES + 1), "over 16 MiB"),
    ],
)
def test_what_is_no_table_is_refused_with_its_place(tmp_path, content, message):
    path = written(tmp_path / "in.csv", content)
    with pytest.raises(PagedcliError) as refused:
        lines_of(path)
    assert message in refused.value.message
    assert isinstance(refused.value, UsageError) == ("line 2" not in message and "MiB" not in message)
    pagedcli("generate", path, *FAST, expect=refused.value.exit_code)


def test_a_table_is_read_row_by_row(tmp_path):
    path = written(tmp_path / "in.csv", b"prompt\n" + b"a\n" * 5 + b'"open')
    rows = iter(DelimitedSource(str(path), Columns(), "csv"))
    assert [next(rows).index for _ in range(5)] == list(range(5))
    with pytest.raises(PagedcliError, match="never closed"):
        next(rows)


def test_a_folder_has_tables_of_one_kind(tmp_path):
    for name in ("b.csv", "a.tsv"):
        written(tmp_path / name, b"prompt\n" + name.encode() + b"\n")
    rows = rows_of(pagedcli("generate", tmp_path, "--keep", "all", *FAST).stdout)
    assert [(row["index"], row["prompt"]) for row in rows] == [(0, "a.tsv"), (1, "b.csv")]
    written(tmp_path / "c.jsonl", b"{}\n")
    assert "JSONL and CSV" in pagedcli("generate", tmp_path, *FAST, expect=2).stderr


@pytest.mark.parametrize("name", ["2.jsonl.zst", "2.JSONL", "2.ndjson.gz"])
def test_a_folder_is_read_in_whole(tmp_path, name):
    lines = [b'{"prompt": "x"}', b'{"prompt": "y"}']
    for path, line in zip((tmp_path / "1.jsonl", tmp_path / name), lines, strict=True):
        written(path, line + b"\n")
    assert [row.content for row in open_source(str(tmp_path))] == lines
