"""Rows with given continuations: what is scored, what is refused, and the same answers however the run goes."""

import csv
import io
import json

import pytest
from cli_harness import FAST, pagedcli, write_rows
from conftest import shared_data
from harness.engine import Harness

from pagedcli.batch.columns import Columns
from pagedcli.batch.score_comparison import interval
from pagedcli.batch.scoring import ScoreRequest
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.cli.verify import EXIT_DIFFERENT
from pagedcli.sampling_params import SamplingParams

STORY = "Once upon a time there was"
ROWS = [
    {"id": "a", "prompt": STORY + " ", "continuations": ["a dog", "a cat", "xyz"], "target": 1},
    {"id": "b", "messages": [{"role": "user", "content": "Hi"}], "continuations": [" yes", " no"]},
    {"id": "c", "prompt": [5, 6, 7], "continuations": [[1, 2], [3]], "score_tokens": True, "target": 1},
    {"id": "d", "text": STORY, "logprobs_from": 0, "score_tokens": True},
    {"id": "e", "text": STORY, "logprobs_from": 2, "score_tokens": True},
    {"id": "f", "prompt": "Once upon", "max_tokens": 3},
]


@pytest.fixture(scope="module")
def harness():
    return Harness()


def test_a_row_has_scores_and_the_best_and_generates_nothing(harness):
    row, *_ = harness.rows(ROWS)
    assert (row["text"], row["finish_reason"], row["error"]) == (None, "score", None)
    assert row["usage"]["completion_tokens"] == 0
    assert row["usage"]["prompt_tokens"] == len(harness.tokenizer.encode(STORY))
    assert [list(score) for score in row["scores"]] == [
        ["index", "logprob", "num_tokens", "num_bytes", "is_greedy"]
    ] * 3
    assert [score["num_bytes"] for score in row["scores"]] == [5, 5, 3]
    logprobs = [score["logprob"] for score in row["scores"]]
    assert row["best"]["logprob"] == logprobs.index(max(logprobs))
    per_byte = [score["logprob"] / score["num_bytes"] for score in row["scores"]]
    assert row["best"]["per_byte"] == per_byte.index(max(per_byte))


@pytest.mark.parametrize("text", ["Once upon a time", " two  spaces", "caf\u00e9 \u6f22"])
@pytest.mark.parametrize("name", ["builtin", "stories260k"])
def test_a_text_scored_from_its_beginning_counts_its_bytes(harness, name, text):
    tokenizer = harness.tokenizer if name == "builtin" else Tokenizer(shared_data(name))
    num_special = len(tokenizer.encode(text)) - len(tokenizer.encode(text, add_special_tokens=False))
    for start in {0, num_special}:
        scored = ScoreRequest(None, start).tokens(tokenizer, text, 100, is_chat=False)
        assert scored.num_bytes == [len(text.encode())]
    last = ScoreRequest(None, len(tokenizer.encode(text)) - 1).tokens(tokenizer, text, 100, is_chat=False)
    assert last.num_bytes[0] < len(text.encode())


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**32, 2**63, 2**70])
def test_ids_outside_the_vocabulary_are_error_rows_wherever_a_line_has_them(harness, token_id):
    lines = [
        {"prompt": "Hi", "continuations": [[token_id]]},
        {"prompt": [5, token_id], "continuations": [[1]]},
        {"prompt": [5, token_id], "continuations": ["a"]},
        {"prompt": [5, token_id, 6], "logprobs_from": 0},
        {"prompt": [5, token_id, 6], "logprobs_from": 1},
        {"prompt": [5, token_id], "stop": "x"},
        {"prompt": [5, token_id], "regex": "a"},
        {"prompt": [5, token_id], "prompt_logprobs": 0},
        {"prompt": [[5], [token_id]]},
        {"prompt": "Hi", "logit_bias": {str(token_id): 1.0}},
    ]
    assert [row["error"]["code"] for row in harness.rows(lines)] == ["invalid_token_id"] * len(lines)


@pytest.mark.bits
def test_scores_are_those_of_prompt_logprobs(harness):
    rows = {row["id"]: row for row in harness.rows(ROWS)}
    encode, special = harness.tokenizer.encode, harness.tokenizer.start_token_id
    whole = encode(STORY)
    expected = {
        "c": [([5, 6, 7], [1, 2]), ([5, 6, 7], [3])],
        "d": [([special], encode(STORY, add_special_tokens=False))],
        "e": [(whole[:2], whole[2:])],
    }
    for name, pairs in expected.items():
        for score, (context, continuation) in zip(rows[name]["scores"], pairs, strict=True):
            [plain] = harness.rows([{"prompt": context + continuation, "prompt_logprobs": 0, "max_tokens": 1}])
            assert score["token_ids"] == continuation
            assert score["logprobs"] == [each["logprob"] for each in plain["prompt_logprobs"][len(context) :]]
            assert score["logprob"] == pytest.approx(sum(score["logprobs"]), abs=1e-9)


def test_chats_are_the_context_whole(harness):
    _, row, *_ = harness.rows(ROWS)
    context = harness.tokenizer.encode_chat(ROWS[1]["messages"])
    continuations = [harness.tokenizer.encode(text, add_special_tokens=False) for text in (" yes", " no")]
    [same] = harness.rows([{"prompt": context, "continuations": continuations}])
    assert [score["logprob"] for score in row["scores"]] == [score["logprob"] for score in same["scores"]]
    assert row["usage"]["prompt_tokens"] == len(context)


def test_a_tie_goes_to_the_first(harness):
    [row] = harness.rows([{"prompt": "Once", "continuations": [" upon", " upon"]}])
    assert row["best"] == {"logprob": 0, "per_token": 0, "per_byte": 0}


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ({"prompt": "", "continuations": ["a"]}, "empty_prompt"),
        ({"prompt": "Once", "continuations": []}, "empty_continuation"),
        ({"prompt": "Once", "continuations": ["a", ""]}, "empty_continuation"),
        ({"prompt": [5], "continuations": [[6], []]}, "empty_continuation"),
        ({"prompt": "Once", "continuations": ["a", [1]]}, "invalid_request"),
        ({"prompt": "Once", "continuations": "a"}, "invalid_request"),
        ({"prompt": ["a", "b"], "continuations": ["c"]}, "invalid_request"),
        ({"continuations": ["c"]}, "invalid_request"),
        ({"prompt": "Once", "score_tokens": True}, "invalid_request"),
        (
            {"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "Once", "continuations": ["a"]}},
            "unsupported_parameter",
        ),
        ({"prompt": [5] * 300, "continuations": [[6] * 3000]}, "context_length_exceeded"),
        ({"prompt": "Once upon a time " * 20_000, "continuations": ["a"]}, "context_length_exceeded"),
        ({"text": "Once", "logprobs_from": 9}, "empty_continuation"),
        ({"text": "Once", "logprobs_from": -1}, "invalid_parameter"),
        ({"text": "Once", "logprobs_from": 0, "continuations": ["a"]}, "invalid_request"),
        *(
            ({"prompt": "Once", "continuations": ["a"], **fields}, "invalid_parameter")
            for fields in ({"n": 2}, {"max_tokens": 1}, {"stop": ["x"]}, {"regex": "a+"}, {"beam_width": 2})
        ),
    ],
)
def test_what_cannot_be_scored_is_an_error_row(harness, line, code):
    bad, good = harness.rows([line, ROWS[2]])
    assert bad["error"]["code"] == code
    assert good["error"] is None


def test_columns_that_scores_need_cannot_be_kept(harness):
    lines = [ROWS[0] | {"best": 1}]
    [row] = harness.rows(lines, columns=Columns(keep=("best",)))
    assert row["error"]["code"] == "reserved_column"
    [row] = harness.rows([{"prompt": "Once", "best": 1, "max_tokens": 1}], columns=Columns(keep=("best",)))
    assert (row["best"], row["error"]) == (1, None)


# ---------------------------------------------------------------------- files and commands


@pytest.fixture
def questions(tmp_path):
    return write_rows(tmp_path / "questions.jsonl", ROWS)


def generate(questions, out, *flags):
    pagedcli("generate", str(questions), "-o", str(out), "--dtype", "float32", *FAST[2:], *flags)
    return out


@pytest.mark.long
def test_tables_have_the_scores(questions, tmp_path):
    rows = [json.loads(line) for line in generate(questions, tmp_path / "o.jsonl").read_text().splitlines()]
    table = list(csv.DictReader(io.StringIO(generate(questions, tmp_path / "o.csv").read_text())))
    assert [json.loads(line["scores"] or "null") for line in table] == [row.get("scores") for row in rows]
    pq = pytest.importorskip("pyarrow.parquet")
    for flags in ((), ("--keep", "all", "--output-field", "answer")):
        found = pq.read_table(generate(questions, tmp_path / "o.parquet", "--overwrite", *flags)).to_pylist()
        assert [row["best"] and dict(row["best"]) for row in found] == [row.get("best") for row in rows]
        logprobs = [[score["logprob"] for score in row["scores"] or ()] for row in found]
        assert logprobs == [[score["logprob"] for score in row.get("scores", ())] for row in rows]


def test_a_resumed_run_has_the_same_rows_and_verify_finds_them_equal(questions, tmp_path):
    whole = generate(questions, tmp_path / "whole.jsonl", "--verify", "6")
    again = generate(questions, tmp_path / "again.jsonl", "--reorder", "prefix")
    pagedcli("verify", str(whole), str(again))


@pytest.mark.long
def test_equal_rows_are_computed_once(questions, tmp_path):
    moved = {"id": "g", "prompt": STORY, "continuations": [" a dog", " a cat", " xyz"]}  # equal tokens, other texts
    with questions.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in (ROWS[0] | {"id": "h"}, moved))
    plain = generate(questions, tmp_path / "plain.jsonl")
    equal = tmp_path / "equal.jsonl"
    result = pagedcli("generate", questions, "-o", equal, "--dtype", "float32", *FAST[2:], "--deduplicate", "--all")
    assert "  deduplicated 1 row" in result.stderr
    pagedcli("verify", plain, equal)
    scores = {row["id"]: row.get("scores") for row in map(json.loads, equal.open())}
    assert scores["h"] == scores["a"]
    assert [each["num_bytes"] for each in scores["g"]] == [6, 6, 4]


def test_verify_counts_flips_and_right_answers(questions, tmp_path):
    a = generate(questions, tmp_path / "a.jsonl", "--keep", "target")
    b = tmp_path / "b.jsonl"
    rows = [json.loads(line) for line in a.read_text().splitlines()]
    for row in rows:
        if row["id"] == "a":
            row["scores"][2]["logprob"] += 100
            row["best"] = dict.fromkeys(row["best"], 2)
    b.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = json.loads(pagedcli("verify", str(a), str(b), "--format", "json", expect=EXIT_DIFFERENT).stdout)
    num_scores = sum(len(row.get("scores", ())) for row in rows)
    assert found["largest_score_difference"] == pytest.approx(100)
    assert found["mean_score_difference"] == pytest.approx(100 / num_scores)
    right = {row["id"]: row["best"]["logprob"] == row["target"] for row in map(json.loads, a.open()) if "best" in row}
    first = found["answers"][0]
    assert (first["flipped"], first["with_target"]) == (1, 2)
    assert first["right_a"] == (right["a"] + right["c"]) / 2
    assert first["right_b"] == right["c"] / 2
    [difference] = found["differences"]
    assert (difference["kind"], difference["sample"]) == ("scores", 2)


def test_the_interval_is_wilsons():
    low, high = interval(8, 10)
    assert (low, high) == (pytest.approx(0.4901625), pytest.approx(0.9433178))
    assert interval(0, 5)[0] == 0
    assert interval(5, 5)[1] == 1


def test_plan_tells_the_tokens_with_and_without_sharing(questions):
    scores = json.loads(pagedcli("plan", str(questions), "--format", "json").stdout)["scores"]
    assert (scores["num_rows"], scores["num_continuations"]) == (5, 9)
    assert scores["tokens_alone"] > scores["tokens_by_row"] >= scores["tokens_shared"]


@pytest.mark.long
def test_a_recording_is_lawful_and_explained(questions, tmp_path):
    run = tmp_path / "run.jsonl"
    generate(questions, tmp_path / "o.jsonl", "--record", str(run), "--record-tokens", "--block-size", "4")
    pagedcli("trace", str(run), "--check")
    pagedcli("explain", str(run))


def test_file_wide_sampling_has_no_effect_on_scores(harness):
    defaults = SamplingParams(temperature=1.0, n=3, stop=["a"], logprobs=2, repetition_penalty=2.0)
    short = [ROWS[0], ROWS[2]]
    assert harness.rows(short, defaults=defaults) == harness.rows(short)
