"""`pagedcli verify` and `generate --verify`: equal runs have the same bits, and a difference is found where it is."""

import contextlib
import copy
import functools
import json
import math
import operator
import random
import re

import msgspec
import pytest
import torch
from cli_harness import FAST, pagedcli, rows_of, with_keys, write_rows
from harness.engine import DEFAULTS, Harness

from pagedcli.batch.compare import ComparedRow, RowSample, compare, pairs, read_rows, run_again
from pagedcli.batch.prompts import BatchOptions
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.score_comparison import LogitComparison, ScoreComparison
from pagedcli.config import Config
from pagedcli.core.engine_core import EngineCore
from pagedcli.errors import UsageError

FULL = (*FAST, "--output-token-ids", "--logprobs", "3", "--temperature", "1", "--dtype", "float32")
LINES = [
    {"id": "a", "prompt": "Once upon a time there was a fox. The fox"},
    {"id": "b", "prompt": "Once upon a time there was a fox. Lily", "n": 2},
    {"id": "c", "messages": [{"role": "user", "content": "Tell me a story."}]},
    {"id": "d", "prompt": 5},
    {"custom_id": "e", "url": "/v1/completions", "body": {"prompt": ["Hello", "Once"], "logprobs": 2}},
    {"id": "f", "prompt": "Once upon a time there was a fox. The fox", "max_tokens": 30, "prompt_logprobs": 1},
]


PLAIN = {"index": 0, "id": None, "text": "5", "finish_reason": "stop", "usage": {"prompt_tokens": 1}, "error": None}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A folder with an input and its output."""
    folder = tmp_path_factory.mktemp("outputs")
    write_rows(folder / "in.jsonl", LINES)
    pagedcli("generate", folder / "in.jsonl", "-o", folder / "out.jsonl", *FULL, expect=3)
    return folder


def verify(a, b, *flags, expect):
    return json.loads(pagedcli("verify", a, b, *flags, "--format", "json", expect=expect).stdout)


# ---------------------------------------------------------------------- equal runs


@pytest.mark.bits
def test_any_number_of_threads_gives_the_same_bits(outputs, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        pagedcli("generate", outputs / "in.jsonl", "-o", tmp_path / "b.jsonl", *FULL, expect=3)
    finally:
        torch.set_num_threads(before)
    assert verify(outputs / "out.jsonl", tmp_path / "b.jsonl", expect=0)["num_different"] == 0


def test_rows_in_another_order_match_by_id_and_not_by_place(outputs, tmp_path):
    rows = rows_of(outputs / "out.jsonl")
    other = write_rows(tmp_path / "b.jsonl", rows[::-1])
    assert verify(outputs / "out.jsonl", other, expect=0)["num_equal"] == 6
    assert verify(outputs / "out.jsonl", other, "--by-order", expect=1)["num_equal"] == 0


# ---------------------------------------------------------------------- differences


def changed(outputs, tmp_path, change):
    rows = rows_of(outputs / "out.jsonl")
    change(rows)
    return verify(outputs / "out.jsonl", write_rows(tmp_path / "b.jsonl", rows), expect=1)


def test_another_token_is_found_at_its_place_with_both_texts(outputs, tmp_path):
    def change(rows):
        rows[5]["token_ids"][4] += 1
        rows[5]["text"] = rows[5]["text"][:9] + "XY" + rows[5]["text"][11:]

    found = changed(outputs, tmp_path, change)
    (row,) = found["differences"]
    assert (row["label"], row["kind"], row["token"], row["character"]) == ("id 'f'", "tokens", 4, 9)
    text = rows_of(outputs / "out.jsonl")[5]["text"]
    assert row["a"].startswith(f"{text[:9]}|{text[9:20]}")
    assert row["b"].startswith(f"{text[:9]}|XY")


def test_the_first_line_says_how_many_rows_differ_and_where_the_first_one_does(outputs, tmp_path):
    def first_line(rows, expect):
        other = write_rows(tmp_path / "b.jsonl", rows)
        return pagedcli("verify", outputs / "out.jsonl", other, expect=expect).stdout.splitlines()[0]

    rows = rows_of(outputs / "out.jsonl")
    assert first_line(rows, 0) == "6 of 6 rows are equal (compared: token ids, log-probabilities)."
    rows[5]["token_ids"][4] += 1
    assert first_line(rows, 1).startswith("1 of 6 rows differs; first id 'f' at token 4: different tokens (")
    del rows[2]
    assert first_line(rows, 1).startswith("2 of 6 rows differ; first id 'f' at token 4: different tokens (")


def test_tokens_that_end_early_part_at_their_end(outputs, tmp_path):
    (row,) = changed(outputs, tmp_path, lambda rows: rows[1]["outputs"][1]["token_ids"].pop())["differences"]
    assert (row["sample"], row["token"]) == (1, 3)
    assert row["b"].endswith("| end")


def test_the_last_bit_of_a_logprob_counts_unless_tolerated(outputs, tmp_path):
    def change(rows):
        position = rows[0]["logprobs"][2]["top_logprobs"][1]
        position["logprob"] = math.nextafter(position["logprob"], 0)

    found = changed(outputs, tmp_path, change)
    (row,) = found["differences"]
    assert (row["kind"], row["token"]) == ("logprobs", 2)
    assert 0 < found["largest_logprob_difference"] < 1e-6
    assert verify(outputs / "out.jsonl", tmp_path / "b.jsonl", "--tolerance", "0.001", expect=0)["num_different"] == 0


def test_other_listed_tokens_with_the_same_logprobs_are_found(outputs, tmp_path):
    def change(rows):
        first, second = rows[0]["logprobs"][2]["top_logprobs"][1:]
        for field in ("token", "bytes"):
            first[field], second[field] = second[field], first[field]

    (row,) = changed(outputs, tmp_path, change)["differences"]
    assert (row["kind"], row["token"], row["logprob_delta"]) == ("logprobs", 2, 0)
    tokens = [each["token"] for each in rows_of(outputs / "out.jsonl")[0]["logprobs"][2]["top_logprobs"]]
    assert row["a"] == str(tokens)
    assert row["b"] == str([tokens[0], tokens[2], tokens[1]])
    assert verify(outputs / "out.jsonl", tmp_path / "b.jsonl", "--tolerance", "0.001", expect=0)["num_different"] == 0


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda rows: rows.pop(2), "missing"),
        (lambda rows: rows.append({**rows[0], "id": "new"}), "missing"),
        (lambda rows: rows[0].update(finish_reason="stop"), "ending"),
        (lambda rows: rows[3]["error"].update(code="other"), "error"),
        (lambda rows: rows[1]["outputs"].pop(), "samples"),
        (lambda rows: rows[0]["usage"].update(prompt_tokens=1), "prompt"),
        (lambda rows: rows[5]["prompt_logprobs"][3].update(logprob=0.5), "prompt_logprobs"),
        (lambda rows: rows[4]["response"]["body"]["choices"][1].update(text="x"), "text"),
    ],
)
def test_everything_else_that_differs_is_named(outputs, tmp_path, change, kind):
    (row,) = changed(outputs, tmp_path, change)["differences"]
    assert row["kind"] == kind


def test_without_token_ids_texts_are_compared_and_the_command_says_so(prompts, tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (a, b):
        pagedcli("generate", prompts, "-o", path, *FAST, "--output-field", "story")
    said = pagedcli("verify", a, b, "--output-field", "story").stdout
    assert said.startswith("3 of 3 rows are equal (compared: texts).\n")
    assert "texts were compared, not token ids" in said
    assert "no log-probabilities were compared" in said
    said = pagedcli("verify", a, b, expect=2).stderr
    assert "is not a row of an output: it has no field 'text' (see --output-field)" in said


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("no json\n", "JSON is malformed"),
        ("5\n", "Expected `object`, got `int`"),
        ('{"id": 1}\n', "the field 'error' is missing"),
        ('{"id": 1, "error": null, "finish_reason": "stop"}\n', "the field 'usage' is missing"),
        (json.dumps(PLAIN | {"text": 5}), "$.samples[0].text"),
        (json.dumps(PLAIN | {"token_ids": [2**63]}), "$.samples[0].token_ids"),
    ],
)
def test_what_is_no_output_is_refused_with_the_line_and_the_reason(outputs, tmp_path, content, why):
    (tmp_path / "b.jsonl").write_text((outputs / "out.jsonl").read_text() + content)
    said = " ".join(pagedcli("verify", outputs / "out.jsonl", tmp_path / "b.jsonl", expect=2).stderr.split())
    assert "line 7 of" in said
    assert "is not a row of an output: " in said
    assert why in said


def places(value, path=()):
    """The paths of all values in JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@pytest.mark.long  # hundreds of files
@pytest.mark.parametrize("other", [5, "x", None, [], {"a": 5}])
def test_any_value_of_another_kind_is_compared_or_refused_by_its_line(tmp_path, other):
    """Each value of a row with everything, one at a time, on either side."""
    top = {"token": "b", "logprob": -2.5, "bytes": [98], "token_id": 2}
    token = {"token": "a", "logprob": -1.5, "bytes": [97], "token_id": 1, "top_logprobs": [top]}
    completion = {"text_offset": [0], "token_logprobs": [-1.5], "tokens": ["a"], "top_logprobs": [{"a": -1.5}]}
    sample = {"text": "a", "reasoning_content": "b", "finish_reason": "stop", "stop_reason": None, "token_ids": [5]}
    sample |= {"logprobs": [token], "prompt_logprobs": [None, token], "tool_calls": [{"name": "f", "arguments": {}}]}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    score = {"index": 0, "logprob": -1.0, "num_tokens": 1, "num_bytes": 1, "is_greedy": True}
    best = {"logprob": 0, "per_token": 0, "per_byte": None}
    rows = [
        {"index": 0, "id": "a", **sample, "usage": usage, "error": None},
        {"index": 0, "id": None, "outputs": [{"index": 0, **sample}], "usage": usage, "error": None},
        {"index": 0, "id": 5, "text": None, "finish_reason": "score", "scores": [score], "best": best, "target": 0,
         "usage": usage, "error": None},
        {"index": 0, "id": None, "text": None, "finish_reason": None, "usage": None, "error": {"code": "a"}},
        {"id": "b", "custom_id": "a", "response": {"status_code": 200, "body": {"choices": [
            {"index": 0, "text": "a", "finish_reason": "stop", "logprobs": completion}], "usage": usage}},
            "error": None},
        {"id": "b", "custom_id": "a", "response": {"status_code": 200, "body": {"choices": [
            {"index": 0, "message": {"content": "a"}, "finish_reason": "stop", "logprobs": {"content": [token]}}],
            "usage": usage}}, "error": None},
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_bytes(msgspec.json.encode(rows[0]) + b"\n")
    for row in rows:
        for path in places(row):
            changed = copy.deepcopy({"row": row})
            *outer, last = ("row", *path)
            functools.reduce(operator.getitem, outer, changed)[last] = other
            for name, content in (("a.jsonl", row), ("b.jsonl", changed["row"])):
                (tmp_path / name).write_bytes(msgspec.json.encode(content) + b"\n")
            scores, logits = ScoreComparison(), LogitComparison()
            with contextlib.suppress(UsageError):
                for a, b in pairs(read_rows(tmp_path / "a.jsonl"), read_rows(tmp_path / "b.jsonl")):
                    if a is not None and b is not None:
                        compare(a, b)
                        compare(b, a)
                        for x, y in zip(a.samples, b.samples, strict=False):
                            logits.add(*((z.prompt_token_ids, [v for v, _ in z.prompt_logprobs]) for z in (x, y)))
                        if None not in (a.scores, b.scores) and len(a.scores.scores) == len(b.scores.scores):
                            scores.add(a.scores, b.scores)


def test_what_is_no_file_of_rows_is_refused(outputs, tmp_path):
    assert "not a file of rows" in pagedcli("verify", outputs, outputs / "out.jsonl", expect=2).stderr
    missing = tmp_path / "b.jsonl"
    assert f"there is no {missing}" in pagedcli("verify", outputs / "out.jsonl", missing, expect=2).stderr


def test_tables_of_a_run_are_equal_to_its_rows_and_several_files_are_compared_with_the_first(outputs, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [row | {"label": "5"} for row in rows_of(outputs / "out.jsonl")]
    rows[0]["text"] = " 5\n"
    write_rows(tmp_path / "b.jsonl", rows)
    files = [outputs / "out.jsonl", *(tmp_path / name for name in ("b.jsonl", "out.csv", "out.parquet"))]
    for path in files[2:]:
        pagedcli("generate", outputs / "in.jsonl", "-o", path, *FULL, expect=3)
    found = json.loads(pagedcli("verify", *files, "--keep", "label", "--format", "json", expect=1).stdout)["files"]
    assert [each["equal"] for each in found] == [None, 5, 6, 6]
    assert [each["answers_differ"] for each in found] == [None, 1, 0, 0]
    assert [each["right"] for each in found] == [0, 1 / 6, None, None]
    by_sample = tmp_path / "samples.parquet"
    flags = (*FULL, *with_keys(tmp_path, run__sample_rows=True))
    pagedcli("generate", outputs / "in.jsonl", "-o", by_sample, *flags, expect=3)
    assert verify(files[0], by_sample, expect=0)["num_equal"] == 6
    assert pq.read_table(by_sample)["sample"].to_pylist() == [0, 0, 1, 0, 0, 0, 1, 0]


def test_batch_outputs_of_openai_and_vllm_are_compared(tmp_path):
    choice = {"index": 0, "message": {"role": "assistant", "content": "5"}, "logprobs": None, "finish_reason": "stop"}
    theirs = choice | {"message": choice["message"] | {"tool_calls": [], "reasoning": None}, "stop_reason": None}
    theirs |= {"token_ids": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": None}
    failed = {"message": "no", "type": "BadRequestError", "code": 400}
    openai, vllm = (
        [
            {"custom_id": "a", "response": {"status_code": 200, "body": {"choices": [each], "usage": usage}}},
            {"custom_id": "b", "response": {"status_code": 400, "body": body}, "error": error},
        ]
        for each, body, error in ((choice, {"error": failed}, None), (theirs, None, {"error": failed}))
    )
    names = "ours.jsonl", "openai.jsonl", "vllm.jsonl"
    failed_row = {"id": "b", "text": None, "finish_reason": None, "usage": None, "error": {"code": 400}}
    files = [[PLAIN | {"id": "a"}, failed_row], *([{"error": None} | row for row in rows] for rows in (openai, vllm))]
    paths = [write_rows(tmp_path / name, rows) for name, rows in zip(names, files, strict=True)]
    assert "b.jsonl" not in pagedcli("verify", *paths, expect=0).stdout


def test_every_row_gets_its_partner_or_none_whatever_the_order():
    a, b = ([ComparedRow(key, str(key), None, 1, []) for key in keys] for keys in ([0, 1, 2, 2, 3], [2, 3, 4, 2, 0]))
    found = [(x and x.key, y and y.key) for x, y in pairs(a, b)]
    assert sorted(found, key=str) == sorted([(0, 0), (2, 2), (2, 2), (3, 3), (1, None), (None, 4)], key=str)


def test_rows_without_ids_match_by_their_index(tmp_path):
    rows = [PLAIN | {"index": i, "text": str(i)} for i in range(3)]
    a, b = write_rows(tmp_path / "a", rows), write_rows(tmp_path / "b", rows[::-1])
    assert [compare(*pair) for pair in pairs(read_rows(a), read_rows(b))] == [None] * 3


# ---------------------------------------------------------------------- generate --verify


@pytest.mark.bits
def test_rows_of_a_crowd_are_the_same_bits_when_generated_again_alone(outputs, tmp_path):
    run = ("generate", outputs / "in.jsonl", "-o", tmp_path / "b.jsonl", *FULL, "--num-kvcache-blocks", "6")
    said = pagedcli(*run, "--verify", "3", expect=3).stderr
    assert "verify: 3 rows generated again, each alone and without cached blocks: the same bits" in said
    assert verify(outputs / "out.jsonl", tmp_path / "b.jsonl", expect=0)["num_rows"] == 6


def test_a_row_that_changes_when_alone_fails_the_run_with_the_place(prompts, tmp_path, monkeypatch):
    add = EngineCore.add_request

    def biased(engine, request_id, ids, params, **options):
        add(engine, request_id, ids[:-1] if request_id == "again-1" else ids, params, **options)

    monkeypatch.setattr(EngineCore, "add_request", biased)
    run = ("generate", prompts, "-o", tmp_path / "out.jsonl", *FAST)
    said = pagedcli(*run, "--verify", "9", expect=1).stderr
    assert "verify: row 1 differs (prompt)" in said
    assert "verify: 1 of 3 rows differ when generated alone" in said
    assert len(rows_of(tmp_path / "out.jsonl")) == 3, "the rows are kept"


def test_rows_generated_again_find_nothing_in_the_cache():
    harness, sample = Harness(), RowSample(2)
    prompt = {"prompt": "Once upon a time there was a fox. The fox"}
    harness.run([prompt, prompt, prompt], run={"observe_row": sample.add})
    assert any(answers[0].output.num_cached_tokens for _, answers in sample.rows)
    before = harness.engine.stats.num_cached_tokens
    rows = RowWriter(harness.tokenizer, "demo", "key", 1)
    assert run_again(harness.engine, harness.tokenizer, rows, BatchOptions(Config(sampling=DEFAULTS)), sample) == []
    assert harness.engine.stats.num_cached_tokens == before


# ---------------------------------------------------------------------- log-probabilities of prompts


def prompt_row(id_, positions):
    """A row with, per position of its prompt, the probabilities of tokens by id, the prompt's own first."""

    def token(token_id, probability):
        return {"token": "?", "bytes": [63], "token_id": token_id, "logprob": math.log(probability)}

    found = [
        token(*next(iter(each.items())))
        | {"top_logprobs": [token(*pair) for pair in sorted(each.items(), key=lambda pair: -pair[1])[:2]]}
        for each in positions
    ]
    return PLAIN | {"id": id_, "prompt_logprobs": [None, *found], "usage": {"prompt_tokens": len(found) + 1}}


def compared_logits(tmp_path, a, b):
    paths = [write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", a), ("b", b))]
    found = verify(*paths, "--logits", expect=0)
    return found, {each["measure"]: each for each in found["logits"]}


def test_kl_and_perplexities_of_prompts_are_those_computed_by_hand(tmp_path):
    a = prompt_row("a", [{7: 0.5, 8: 0.25}, {3: 0.125, 4: 0.5, 5: 0.25}])
    b = prompt_row("a", [{7: 0.25, 8: 0.5}, {3: 0.25, 4: 0.5, 6: 0.125}])
    found, measures = compared_logits(tmp_path, [a, prompt_row("x", [{1: 0.5}])], [b, prompt_row("x", [{2: 0.5}])])
    first = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    second = 0.125 * math.log(0.5) + 0.375 * math.log(0.375 / 0.25)  # 5 and 6 are in one file only
    assert measures["mean KL divergence, nats"]["value"] == pytest.approx((first + second) / 2)
    assert measures["99th percentile of it"]["value"] == pytest.approx(max(first, second))
    assert measures["same likeliest token"]["value"] == 0.5
    assert measures["perplexity of A"]["value"] == pytest.approx(4)
    assert measures["perplexity, B / A"]["value"] == pytest.approx(1)
    assert measures["perplexity, B / A"]["interval"] is None
    assert (found["num_prompts"], found["num_tokens"], found["num_left_out"]) == (1, 2, 1)


def test_the_first_line_says_what_b_costs_and_how_certain_that_is(tmp_path):
    rng = random.Random(0)
    shares = [[rng.uniform(0.3, 0.5) for _ in range(40)] for _ in range(20)]
    a = [prompt_row(str(i), [{1: share} for share in row]) for i, row in enumerate(shares)]
    b = [prompt_row(str(i), [{1: share * rng.uniform(0.8, 1)} for share in row]) for i, row in enumerate(shares)]
    _, measures = compared_logits(tmp_path, a, b)
    low, high = measures["perplexity, B / A"]["interval"]
    assert low < 1.11 < high < low + 0.02
    first = pagedcli("verify", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--logits", expect=0).stdout
    assert re.match(
        r"B's perplexity is 11\.\d\d % above A's \(95 %: \+10\.\d\d % to \+1\d\.\d\d %\); the likeliest", first
    )
    same = pagedcli("verify", tmp_path / "a.jsonl", tmp_path / "a.jsonl", "--logits", expect=0).stdout
    assert "so maybe the same" in same


def test_outputs_without_log_probabilities_of_prompts_are_refused(outputs, tmp_path):
    rows = [row for row in rows_of(outputs / "out.jsonl") if "prompt_logprobs" not in row]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert "--prompt-logprobs 100" in pagedcli("verify", path, path, "--logits", expect=2).stderr
