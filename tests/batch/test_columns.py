"""Columns of the user's choice: prompts, ids and answers under other names, columns copied into the rows."""

import csv
import io
import json

import pytest
from cli_harness import FAST, pagedcli, rows_of, write_rows
from harness.engine import Harness

from pagedcli.batch.columns import METRICS, Columns
from pagedcli.errors import UsageError

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def harness():
    return Harness()


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("value", [PROMPT, [PROMPT, "a second turn"], [{"role": "user", "content": PROMPT}], [5, 6, 7]])
def test_a_field_holds_the_prompt_as_text_turns_messages_or_token_ids(harness, value):
    named = Columns(prompt="question", id="qid")
    key = "messages" if isinstance(value[0], dict) else "prompt"
    first = value[0] if isinstance(value[0], str) and not isinstance(value, str) else value
    line = {"question": value, "qid": "q1", "prompt": 5, "answer": {"x": 1}, "max_tokens": 3}
    (found,) = harness.rows([line], columns=named)
    (expected,) = harness.rows([{key: first, "id": "q1", "max_tokens": 3}])
    assert found == expected
    assert found["usage"]["completion_tokens"] == 3, "the line's own parameters count"


def test_the_id_field_replaces_id_and_must_be_unique(harness):
    rows = harness.rows(
        [{"prompt": "a", "id": 1, "key": "x"}, {"prompt": "b", "id": 2, "key": "x"}], columns=Columns(id="key")
    )
    assert [(row["id"], row["error"] and row["error"]["code"]) for row in rows] == [("x", None), ("x", "duplicate_id")]


def test_the_output_field_renames_the_text_of_rows_samples_and_errors(harness):
    one, two, bad = harness.rows(
        [{"prompt": PROMPT}, {"prompt": PROMPT, "n": 2}, {"prompt": 5}], columns=Columns(answer="story")
    )
    assert "text" not in one
    assert one["story"]
    assert [sample["story"] for sample in two["outputs"]] == [one["story"]] * 2
    assert bad["story"] is None


# ---------------------------------------------------------------------- columns copied into the rows

LINES = [
    {"id": "a", "prompt": "The fox", "label": "x", "meta": {"k": [1, None]}},
    {"id": "b", "prompt": "Hello", "meta": 2.5},
    {"id": "c", "prompt": 5, "label": "z"},
]


def test_copied_columns_are_in_every_row_also_in_error_rows_and_null_where_absent(harness):
    rows = harness.rows(LINES, columns=Columns(keep=("label", "meta")))
    assert [(row["label"], row["meta"]) for row in rows] == [("x", {"k": [1, None]}), (None, 2.5), ("z", None)]
    assert list(rows[0])[:4] == ["index", "id", "label", "meta"]
    assert rows[2]["error"] is not None
    plain = harness.rows(LINES)
    assert [{name: row[name] for name in plain[0]} for row in rows] == plain, "nothing else changes"


def test_a_copied_column_is_no_unknown_field(harness):
    _, with_note = harness.run(LINES), harness.run(LINES)[0]
    assert with_note.ignored == {"label": 2, "meta": 2}
    result, _ = harness.run(LINES, columns=Columns(keep=("label",)))
    assert result.ignored == {"meta": 2}


def test_an_openai_row_has_copied_columns_outside_the_response(harness):
    line = {"custom_id": "o", "url": "/v1/completions", "body": {"prompt": "Hello"}, "label": 1}
    (row,) = harness.rows([line], columns=Columns(keep_all=True))
    assert row["label"] == 1
    assert row["body"] == line["body"]
    assert "label" not in row["response"]["body"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--keep", "lable"), "no row of the input has\nhint: did you mean 'label'"),
        (("--output-field", "usage"), "the output already has a column of that name"),
    ],
)
def test_a_collision_or_an_unknown_column_ends_the_run_before_it_begins(tmp_path, flags, message):
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b", "label": 1, "text": 2, "usage": 3}])
    both = write_rows(tmp_path / "both.jsonl", [{"prompt": "b", "text": 2, "input_text": 3}])
    assert "would have the same name" in pagedcli("generate", both, "--keep", "all", expect=2).stderr
    both.unlink()
    for command in (("generate", "-o", tmp_path / "out.jsonl", *FAST), ("plan",), ("trace", "--dump-kv", *FAST)):
        result = pagedcli(command[0], prompts, *command[1:], *flags, expect=2)
        assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_kept_column_that_rows_have_themselves_gets_another_name(tmp_path):
    line = {"id": "a", "prompt": "b", "text": 2, "usage": 3}
    (row,) = rows_of(pagedcli("generate", "-", "--keep", "all", *FAST, stdin=json.dumps(line) + "\n").stdout)
    assert (row["id"], row["input_text"], row["input_usage"], row["error"]) == ("a", 2, 3, None)
    made = pagedcli("generate", write_rows(tmp_path / "in.jsonl", [line]), "--keep", "text", *FAST)
    assert "note: the input's 'text' is kept as 'input_text', as rows have their own\n" in made.stderr
    assert rows_of(made.stdout)[0]["input_text"] == 2


@pytest.mark.long
def test_the_answer_under_another_name_frees_the_name_text(tmp_path):
    prompts = write_rows(tmp_path / "in.jsonl", [{"text": "The fox", "label": 1}])
    names = ("--field", "text", "--output-field", "answer", "--keep", "all")
    (row,) = rows_of(pagedcli("generate", prompts, *names, *FAST).stdout)
    assert row["text"] == "The fox"
    assert row["answer"]
    plan = json.loads(pagedcli("plan", prompts, *names, "--format", "json").stdout)
    assert plan["num_valid_rows"] == 1


def test_a_table_has_the_copied_columns_as_cells(tmp_path):
    prompts = write_rows(tmp_path / "in.jsonl", [{**line, "choices": ["a", "b"]} for line in LINES])
    for keep in ("label,meta", "all"):
        pagedcli("generate", prompts, "-o", tmp_path / "out.csv", "--keep", keep, "--overwrite", *FAST, expect=3)
        rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
        assert [(row["label"], row["meta"]) for row in rows] == [("x", '{"k":[1,null]}'), ("", "2.5"), ("z", "")]
        assert ("prompt" in rows[0]) == (keep == "all")


def test_a_table_has_the_index_of_every_row_in_either_order(tmp_path):
    openai = [
        {"custom_id": name, "url": "/v1/completions", "body": {"prompt": PROMPT, "n": n}}
        for name, n in (("a", 1), ("b", 2), ("c", -1))
    ]
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": PROMPT}, *openai])
    for order in ("input", "completion"):
        out = tmp_path / f"{order}.csv"
        pagedcli("generate", prompts, "-o", out, "--order", order, *FAST, expect=3)
        rows = list(csv.DictReader(io.StringIO(out.read_text())))
        assert sorted((row["index"], row["id"]) for row in rows) == [
            *(("0", ""), ("1", "a"), ("2", "b"), ("2", "b"), ("3", "c")),
        ]
    pq = pytest.importorskip("pyarrow.parquet")
    pagedcli("generate", prompts, "-o", tmp_path / "out.parquet", *FAST, expect=3)
    assert pq.read_table(tmp_path / "out.parquet")["index"].to_pylist() == [0, 1, 2, 3]


# ---------------------------------------------------------------------- Parquet


def test_copied_columns_of_json_lines_get_a_type_in_parquet(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    lines = [{"prompt": "a", "n_": 1, "x": 1, "m": "t", "z": None}]
    lines.append({"prompt": "b", "n_": None, "x": 1.5, "m": {"k": 1}})
    prompts = write_rows(tmp_path / "in.jsonl", lines)
    pagedcli("generate", prompts, "-o", tmp_path / "out.parquet", "--keep", "all", "--output-field", "story", *FAST)
    table = pq.read_table(tmp_path / "out.parquet")
    assert [str(table.schema.field(name).type) for name in ("n_", "x", "m", "z")] == (
        ["int64", "double", "string", "null"]
    )
    assert table["m"].to_pylist() == ["t", '{"k":1}']
    assert all(table["story"].to_pylist())


def test_parquet_carries_only_the_columns_asked_for(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"question": ["The fox"], "big": ["x"], "label": pa.array([3], pa.int8()), "text": ["mine"]})
    pq.write_table(table, tmp_path / "in.parquet")
    run = ("generate", tmp_path / "in.parquet", "--field", "question", *FAST)
    assert "'text' is kept as 'input_text'" in pagedcli(*run, "-o", tmp_path / "out.parquet").stderr
    assert pq.read_table(tmp_path / "out.parquet")["input_text"].to_pylist() == ["mine"]
    pagedcli(*run, "-o", tmp_path / "out.parquet", "--keep", "label", "--overwrite")
    out = pq.read_table(tmp_path / "out.parquet")
    assert out.column_names[:2] == ["label", "text"]
    assert out["label"].type == pa.int8()
    (row,) = rows_of(pagedcli(*run, "--keep", "label,big").stdout)
    assert (row["label"], row["big"]) == (3, "x")


# ---------------------------------------------------------------------- several prompts in one line


def test_several_prompts_give_the_samples_of_as_many_lines(harness):
    prompts = ["The fox", "Hello", "Lily and Ben"]
    settings = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 6}
    (row,) = harness.rows([{"prompt": prompts, **settings}])
    alone = harness.rows([{"prompt": prompt, **settings} for prompt in prompts])
    texts = [sample["text"] for each in alone for sample in each["outputs"]]
    assert [sample["text"] for sample in row["outputs"]] == texts
    assert [sample["index"] for sample in row["outputs"]] == list(range(6))
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert row["usage"][name] == sum(each["usage"][name] for each in alone)


def test_several_prompts_of_token_ids_in_an_openai_line_are_its_choices(harness):
    ids = [harness.tokenizer.encode(text) for text in ("The fox", "Hello")]
    (row,) = harness.rows([{"custom_id": "o", "url": "/v1/completions", "body": {"prompt": ids}}])
    alone = harness.rows([{"prompt": each} for each in ids])
    choices = row["response"]["body"]["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, alone[0]["text"]), (1, alone[1]["text"])]


def test_equal_prompts_of_one_line_draw_different_samples_and_the_same_ones_again(harness):
    line = {"prompt": [PROMPT] * 4, "temperature": 1.0, "max_tokens": 12}
    (row,) = harness.rows([line])
    assert len({sample["text"] for sample in row["outputs"]}) > 1
    assert harness.rows([line]) == [row]


def test_one_prompt_that_cannot_be_served_fails_its_line_alone(harness):
    bad, good = harness.rows([{"prompt": [[5], [10**6], [6]]}, {"prompt": "Hello"}])
    assert bad["error"]["code"] == "invalid_token_id"
    assert bad["error"]["message"].startswith("prompt 2 of 3: ")
    assert good["error"] is None
    assert not harness.engine.has_unfinished_requests()


@pytest.mark.parametrize("reorder", ["none", "prefix"])
def test_many_lines_of_many_prompts_are_all_written(harness, reorder):
    lines = [{"prompt": [[i, 7], [i, 8], [i]], "max_tokens": 2} for i in range(5, 25)]
    rows = harness.rows(lines, reorder=reorder)
    assert [len(row["outputs"]) for row in rows] == [3] * 20
    assert rows == harness.rows(lines)


# ---------------------------------------------------------------------- how a sample stopped, how long a row took


def test_a_row_that_may_stop_names_the_string_or_token_that_stopped_it(harness):
    (free,) = harness.rows([{"prompt": PROMPT}], output_token_ids=True)
    word, token = free["text"].split()[1], free["token_ids"][2]
    lines = [{"prompt": PROMPT, "stop": [word]}, {"prompt": PROMPT, "stop_token_ids": [token]}]
    lines.append({"prompt": PROMPT, "stop": ["never seen"]})
    lines.append({"custom_id": "c", "url": "/v1/completions", "body": {"prompt": PROMPT, "stop": word}})
    by_string, by_token, not_stopped, openai = harness.rows(lines)
    assert (by_string["finish_reason"], by_string["stop_reason"]) == ("stop", word)
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", token)
    assert (not_stopped["finish_reason"], not_stopped["stop_reason"]) == ("length", None)
    assert openai["response"]["body"]["choices"][0]["stop_reason"] == word
    assert "stop_reason" not in free


def test_metrics_are_the_latency_of_each_row(harness, tmp_path):
    plain, two, bad = harness.run(
        [{"prompt": PROMPT}, {"prompt": ["a", "b"]}, {"prompt": 5}], columns=Columns(metrics=True)
    )[1]
    for row in (plain, two):
        metrics = row["metrics"]
        assert tuple(metrics) == METRICS
        assert 0 <= metrics["queued_s"] <= metrics["ttft_s"] <= metrics["latency_s"]
        assert metrics["preemptions"] == metrics["recomputed_tokens"] == 0
    assert "metrics" not in bad
    prompts = write_rows(tmp_path / "in.jsonl", LINES[:1])
    made = pagedcli("generate", prompts, "-o", tmp_path / "out.csv", "--output-metrics", *FAST)
    assert made.exit_code == 0
    (cells,) = csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text()))
    assert float(cells["latency_s"]) >= float(cells["ttft_s"]) > 0


def test_names_of_columns_are_checked_where_a_run_is_configured():
    from pagedcli.config import RunConfig

    with pytest.raises(UsageError, match="already has a column"):
        Columns.of(RunConfig(output_field="sample"), kind="csv")
    assert Columns.of(RunConfig(output_field="sample")).answer == "sample"
    assert Columns.of(RunConfig(keep=" a, b ,")).keep == ("a", "b")


# ---------------------------------------------------------------------- beams


def test_tables_have_the_scores_of_beams_that_rows_have(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = [
        {"prompt": PROMPT, "beam_width": 3, "n": 2, "max_tokens": 3},
        {"prompt": PROMPT, "beam_width": 2, "max_tokens": 3},
        {"prompt": PROMPT, "max_tokens": 2},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": PROMPT, "num_beams": 2, "max_tokens": 3}},
    ]
    prompts = write_rows(tmp_path / "in.jsonl", lines)
    for kind in ("jsonl", "csv", "parquet"):
        pagedcli("generate", prompts, "-o", tmp_path / f"out.{kind}", *FAST)
    two, one, plain, openai = rows_of(tmp_path / "out.jsonl")
    scores = [sample["beam_score"] for sample in [*two["outputs"], one, *openai["response"]["body"]["choices"]]]
    assert all(score < 0 for score in scores)
    assert "beam_score" not in plain
    cells = [line["beam_score"] for line in csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text()))]
    assert [float(cell) for cell in cells if cell] == scores
    assert cells[3] == ""
    table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [sample["beam_score"] for sample in table[0]["outputs"]] == scores[:2]
    assert [row["beam_score"] for row in table] == [None, scores[2], None, scores[3]]
