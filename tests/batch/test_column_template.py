"""Templates over columns: rows are those of the same prompts and chats written out, from every kind of file."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_harness import FAST, pagedcli, rows_of

from pagedcli.batch.columns import Columns
from pagedcli.batch.requests import request_of
from pagedcli.config import RunConfig, TemplateMessage
from pagedcli.errors import UsageError

TEMPLATE = "Translate {text} to {lang}: {{{text}}}, {n}."
ROWS = [
    {"id": "a", "text": "the fox", "lang": "French", "n": "1e3"},
    {"id": "b", "text": 'two\nlines, "{lang}"', "lang": "", "n": "007"},
    {"id": "c", "text": "{{", "lang": "Greek", "n": "null"},
]
PROMPTS = [
    "Translate the fox to French: {the fox}, 1e3.",
    'Translate two\nlines, "{lang}" to : {two\nlines, "{lang}"}, 007.',
    "Translate {{ to Greek: {{{}, null.",
]
WRITTEN_OUT = [{"id": row["id"], "prompt": prompt} for row, prompt in zip(ROWS, PROMPTS, strict=True)]
MESSAGES = [{"role": "system", "content": "In {lang}, {{briefly}}"}, {"role": "user", "content": "{text}"}]


def template_of(**run):
    return Columns.of(RunConfig(**run)).template


def written(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def generated(path, *flags, expect=0):
    return rows_of(pagedcli("generate", path, *flags, *FAST, expect=expect).stdout)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_the_rows_are_those_of_the_prompts_written_out(tmp_path, kind):
    found = generated(written(tmp_path / f"in.{kind}", ROWS), "--template", TEMPLATE)
    assert found == generated(written(tmp_path / "out.jsonl", WRITTEN_OUT))
    assert len({row["usage"]["prompt_tokens"] for row in found}) > 1


def test_a_template_of_messages_makes_chats(tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps({"run": {"messages": MESSAGES}}))
    template = ("--chat-template", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    chats = [
        {"id": row["id"], "messages": [{**MESSAGES[0], "content": f"In {row['lang']}, {{briefly}}"}]} for row in ROWS
    ]
    for chat, row in zip(chats, ROWS, strict=True):
        chat["messages"].append({"role": "user", "content": row["text"]})
    rows = [{name: row[name] for name in ("id", "text", "lang")} for row in ROWS]
    found = generated(written(tmp_path / "in.csv", rows), "-C", tmp_path / "run.yaml", *template)
    assert found == generated(written(tmp_path / "out.jsonl", chats), *template)


def test_other_fields_of_a_line_are_parameters_or_data():
    columns = Columns.of(RunConfig(template="{n} of {body}"))
    line = {"n": 3, "body": "a letter", "prompt": "no", "messages": 5, "temperature": 0.5, "id": "x"}
    assert request_of(line, columns) == {"temperature": 0.5, "prompt": "3 of a letter"}


def test_what_is_not_text_is_written_as_json():
    line = {"a": 1, "b": 0.5, "c": True, "d": ["é", {"x": None}], "e": ""}
    assert template_of(template="{a} {b} {c} {d} {e}|").fill(line) == {"prompt": '1 0.5 true ["é",{"x":null}] |'}


def test_a_missing_column_gives_an_error_row_and_the_others_run(tmp_path):
    lines = [ROWS[0], {"id": "b", "text": "x", "lang": None, "n": "1"}, ROWS[2]]
    found = generated(written(tmp_path / "in.jsonl", lines), "--template", TEMPLATE, expect=3)
    assert [row["error"] and row["error"]["code"] for row in found] == [None, "missing_column", None]
    assert found[1]["id"] == "b"
    assert "needs the column 'lang', which this line lacks" in found[1]["error"]["message"]
    whole = generated(written(tmp_path / "all.jsonl", ROWS), "--template", TEMPLATE)
    assert [found[0]["text"], found[2]["text"]] == [whole[0]["text"], whole[2]["text"]]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_without_a_column_is_refused_before_the_run(tmp_path, kind):
    path = written(tmp_path / f"in.{kind}", [{"text": "x", "langs": "y"}])
    refused = pagedcli("generate", path, "--template", TEMPLATE, *FAST, expect=2)
    assert "has no column 'lang'; its columns: text, langs" in refused.stderr


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"template": "{text} {"}, "a single '{'"),
        ({"template": "} {text}"}, "a single '}'"),
        ({"template": "{text} {}"}, "braces without a name"),
        ({"template": "{{text}}"}, "--template names no column"),
        ({"template": ""}, "--template names no column"),
        ({"messages": []}, "run.messages names no column"),
        ({"messages": [TemplateMessage(role="user", content="{a")]}, "run.messages has a single '{'"),
        ({"template": "{a}", "field": "b"}, "--field and --template"),
        ({"template": "{a}", "messages": [TemplateMessage(role="user", content="{a}")]}, "both make the prompts"),
    ],
)
def test_what_is_no_template_is_refused(run, message):
    with pytest.raises(UsageError, match=message):
        template_of(**run)


def test_messages_of_another_form_are_refused_with_their_place(tmp_path):
    (tmp_path / "run.yaml").write_text("run:\n  messages: [{role: narrator, content: '{text}'}]\n")
    path = written(tmp_path / "in.jsonl", ROWS)
    refused = pagedcli("generate", path, "-C", tmp_path / "run.yaml", expect=2)
    assert "narrator" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_plan_and_trace_take_the_template(tmp_path):
    path, out = written(tmp_path / "in.csv", ROWS), written(tmp_path / "out.jsonl", WRITTEN_OUT)

    def lengths(source, *flags):
        printed = pagedcli("plan", source, "--no-calibrate", "--format", "json", *flags, *FAST).stdout
        return json.loads(printed)["lengths"]

    assert lengths(path, "--template", TEMPLATE) == lengths(out)
    pagedcli("trace", path, "--template", TEMPLATE, "-o", tmp_path / "a.jsonl", *FAST)
    pagedcli("trace", out, "-o", tmp_path / "b.jsonl", *FAST)
    assert rows_of(tmp_path / "a.jsonl") == rows_of(tmp_path / "b.jsonl")
