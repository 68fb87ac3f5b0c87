"""Rows with questions: the probabilities of transformers, the same bits in any company, and each shared token once."""

import csv
import json
import math

import pytest
import torch
from cli_harness import FAST, pagedcli, rows_of, write_rows
from conftest import shared_data
from harness.engine import BUILTIN, Harness, transformers_logits

from pagedcli.batch.columns import Columns
from pagedcli.batch.decisions import Question, cells_of, option_tokens
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.cli.verify import EXIT_DIFFERENT
from pagedcli.config import RunConfig
from pagedcli.errors import RequestError

STATE = "Once upon a time there was a little dog who liked to play in the park."
TOPIC = {"question": "What is it about?", "options": ["a dog", "a cat", "rain"]}
LEVEL = {"question": "How happy is it?", "levels": [1, 2, 5]}
TRUE = {"question": "Is it true?", "yes_no": True}
QUESTIONS = {"topic": TOPIC, "happy": LEVEL, "true": TRUE}
SUMMED, MEAN = ({"topic": TOPIC | {"score": score}} for score in ("sum", "per_token"))
ROWS = [
    {"id": "plain", "prompt": STATE},
    {"id": "chat", "messages": [{"role": "user", "content": STATE}]},
    {"id": "sum", "prompt": STATE, "questions": SUMMED},
    {"id": "mean", "messages": [{"role": "user", "content": [{"type": "text", "text": STATE}]}], "questions": MEAN},
    {"id": "judge", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
    {"id": "tokens", "prompt": [5, 6, 7]},
]


@pytest.fixture(scope="module")
def harness():
    return Harness(num_kvcache_blocks=400)


@pytest.fixture(scope="module")
def answers(harness):
    rows = harness.rows(ROWS, questions=QUESTIONS, shifts="all")
    assert [(row["text"], row["finish_reason"], row["error"]) for row in rows] == [(None, "decision", None)] * len(ROWS)
    return {row["id"]: row["answers"] for row in rows}


def expected(tokenizer, options, order, *, chat=False, score="letter"):
    """Log-probabilities of the options in their own order, asked in another one, by transformers."""
    shown = [options[place] for place in order]
    marks = ["A.", "B.", "C."] if score == "letter" else ["-"] * 3
    text = "\n".join([f"{STATE}\n\n{TOPIC['question']}", *(f"{m} {o}" for m, o in zip(marks, shown, strict=True))])
    ends = ["A", "B", "C"] if score == "letter" else shown
    if chat:
        context = tokenizer.encode_chat([{"role": "user", "content": text}])
        pairs = [context + tokenizer.encode(end, add_special_tokens=False) for end in ends]
    else:
        context = tokenizer.encode(f"{text}\nAnswer:")
        pairs = [tokenizer.encode(f"{text}\nAnswer: {end}") for end in ends]
    found = dict.fromkeys(order, 0.0)
    for place, ids, logits in zip(order, pairs, transformers_logits(BUILTIN, pairs), strict=True):
        logprobs = logits.double().log_softmax(-1)
        tokens = [float(logprobs[i - 1, ids[i]]) for i in range(len(context), len(ids))]
        found[place] = sum(tokens) / (len(tokens) if score == "per_token" else 1)
    return torch.tensor([found[place] for place in sorted(found)], dtype=torch.float64).log_softmax(-1)


@pytest.mark.long
@pytest.mark.parametrize(("name", "chat", "score"), [
    ("plain", False, "letter"), ("chat", True, "letter"), ("sum", False, "sum"), ("mean", True, "per_token"),
])  # fmt: skip
def test_probabilities_are_those_of_transformers(harness, answers, name, chat, score):
    orders = [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    by_order = [expected(harness.tokenizer, TOPIC["options"], order, chat=chat, score=score) for order in orders]
    [one] = harness.rows([row for row in ROWS if row["id"] == name], questions=QUESTIONS)
    for answer, wanted in ((answers[name]["topic"], sum(by_order) / 3), (one["answers"]["topic"], by_order[0])):
        assert list(answer["probabilities"]) == TOPIC["options"]
        assert list(answer["probabilities"].values()) == pytest.approx(wanted.softmax(-1).tolist(), abs=1e-4)
        assert answer["confidence"] == answer["probabilities"][answer["choice"]]


def test_levels_have_a_mean_and_yes_or_no_has_two_options(answers):
    happy, true = answers["plain"]["happy"], answers["plain"]["true"]
    mean = sum(float(level) * share for level, share in happy["probabilities"].items())
    assert happy["expected_level"] == pytest.approx(mean)
    assert list(true["probabilities"]) == ["yes", "no"]
    assert Question.of("x", {"question": "?", "levels": ["low", "high"]}).levels == (1, 2)


@pytest.mark.bits
def test_answers_have_the_same_bits_alone_and_in_a_tiny_pool(harness, answers):
    tight = Harness(num_kvcache_blocks=60, max_num_seqs=2, max_num_batched_tokens=7)
    for row in ROWS:
        for each in (harness, tight):
            [alone] = each.rows([row], questions=QUESTIONS, shifts="all")
            assert alone["answers"] == answers[row["id"]]
    crowd = tight.rows(ROWS[::-1], questions=QUESTIONS, shifts="all")
    assert {row["id"]: row["answers"] for row in crowd} == answers


@pytest.mark.parametrize("shifts", ["one", "all"])
def test_what_questions_and_orders_share_is_computed_once(shifts):
    harness, size = Harness(), 4
    _, [row] = harness.run([ROWS[0]], questions=QUESTIONS, shifts=shifts)
    seen, computed, total = [], 0, 0
    for name, question in QUESTIONS.items():
        for asked in Question.of(name, question).asked(RunConfig(shifts=shifts)):
            ids = harness.tokenizer.encode(f"{STATE}{asked.plain_text} A")[:-1]  # with the space before the letter
            blocks = [tuple(ids[: end + size]) for end in range(0, len(ids) - 1, size) if end + size < len(ids)]
            computed += len(ids) - size * sum(block in seen for block in blocks)
            total += len(ids)
            seen += blocks
    assert row["usage"]["prompt_tokens"] == total
    assert total - row["usage"]["prompt_tokens_details"]["cached_tokens"] == computed < total


@pytest.mark.parametrize(("fields", "what"), [
    ({"optoins": ["a", "b"]}, "did you mean 'options'?"),
    ({"options": ["a"]}, "1 option, allowed: 2 to 26"),
    ({"levels": list(range(27))}, "27 options, allowed: 2 to 26"),
    ({"options": ["a", "b", "a"]}, "an option twice"),
    ({"options": ["a", " "]}, "an empty one"),
    ({"options": ["a", "b"], "yes_no": True}, "options and yes_no"),
    ({}, "none of them"),
    ({"options": [True, False]}, "YAML reads yes and no"),
    ({"yes_no": True, "score": "words"}, "Invalid enum value 'words'"),
])  # fmt: skip
def test_a_question_that_cannot_be_asked_is_an_error_row(harness, fields, what):
    bad, good = harness.rows(
        [{"prompt": STATE, "questions": {"q": each}} for each in ({"question": "?"} | fields, TRUE)]
    )
    assert bad["error"]["code"] == "invalid_question"
    assert what in bad["error"]["message"]
    assert good["error"] is None


def test_what_does_not_go_with_questions_is_an_error_row(harness):
    own = {"prompt": STATE, "questions": {"q": TRUE}}
    lines = [own | {"n": 2}, own | {"continuations": ["a"]}, own | {"prompt": ["a", "b"]}, own | {"answers": 1}]
    rows = harness.rows(lines, columns=Columns(keep=("answers",)))
    codes = ["invalid_parameter", "invalid_parameter", "invalid_request", "reserved_column"]
    assert [row["error"]["code"] for row in rows] == codes


def test_a_letter_must_be_one_token_and_options_must_differ():
    tokenizer = Tokenizer(shared_data("stories260k"))
    with pytest.raises(RequestError, match="letters are not one token each"):
        option_tokens(tokenizer, ("A", "B"), are_letters=True, is_chat=False)
    with pytest.raises(RequestError, match="have the same tokens"):
        option_tokens(tokenizer, ("yes", "yes"), are_letters=False, is_chat=True)


# ---------------------------------------------------------------------- files and commands


@pytest.mark.long
def test_tables_resume_and_recordings_have_the_same_answers(tmp_path):
    rows, questions = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "questions.yaml"
    questions.write_text('topic: {question: "What is it about?", options: [a dog, a cat, rain]}\n')
    flags = ("--questions", f"@{questions}", "--shifts", "all", *FAST[2:], "--block-size", "4", "--deduplicate")
    out, run = tmp_path / "o.jsonl", tmp_path / "run.jsonl"
    pagedcli("generate", rows, "-o", out, *flags, "--record", run, "--record-tokens", "--verify", "2")
    pagedcli("generate", rows, "-o", out, *flags, "--resume")
    assert "run.questions" in pagedcli("generate", rows, "-o", out, "--resume", expect=2).stderr
    pagedcli("trace", run, "--check")
    wanted = [cells_of(row["answers"]) for row in rows_of(out)]
    pagedcli("generate", rows, "-o", tmp_path / "o.csv", *flags)
    with (tmp_path / "o.csv").open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0])[-4:] == ["topic", "topic.a dog", "topic.a cat", "topic.rain"]
    assert [{name: row[name] for name in wanted[0]} for row in table] == [
        {name: str(value) for name, value in row.items()} for row in wanted
    ]
    assert json.loads(pagedcli("plan", rows, *flags[:4], "--format", "json").stdout)["scores"]["num_rows"] == len(ROWS)
    pq = pytest.importorskip("pyarrow.parquet")
    pagedcli("generate", rows, "-o", tmp_path / "o.parquet", *flags)
    found = pq.read_table(tmp_path / "o.parquet").to_pylist()
    assert [{name: row[name] for name in wanted[0]} for row in found] == wanted
    pagedcli("generate", tmp_path / "o.parquet", "--field", "topic", "-o", tmp_path / "p.parquet", *flags)
    again = pq.read_table(tmp_path / "p.parquet").to_pylist()
    assert [row["input_topic"] for row in again] == [row["topic"] for row in found]


def test_verify_judges_answers_and_fits_temperatures(tmp_path):
    shares = [0.9, 0.9, 0.9, 0.6, 0.6]  # of the first option, which is right in three rows

    def written(name, changed=0):
        rows = []
        for index, share in enumerate(shares):
            both = {"a": 1 - share, "b": share} if index < changed else {"a": share, "b": 1 - share}
            answer = {"choice": max(both, key=both.get), "confidence": max(both.values()), "probabilities": both}
            ended = {"finish_reason": "decision", "usage": {"prompt_tokens": 3}, "error": None}
            right = "ab"[index in (2, 4)]
            rows.append({"index": index, "id": None, "text": None, "target": right, "answers": {"q": answer}, **ended})
        return write_rows(tmp_path / name, rows)

    a, b, cal = written("a.jsonl"), written("b.jsonl", 1), tmp_path / "cal.json"
    found = json.loads(pagedcli("verify", a, b, "--format", "json", expect=EXIT_DIFFERENT).stdout)
    first, second = found["questions"]
    assert (first["right"], second["right"], second["flipped"], first["flipped"]) == (0.6, 0.4, 1, None)
    assert first["brier"] == pytest.approx(2 * (2 * 0.01 + 0.81 + 0.16 + 0.36) / 5)
    assert first["calibration_error"] == pytest.approx((0.7 + 0.2) / 5)
    low, high = first["error_interval"]
    assert low < first["calibration_error"] < high
    assert [each["kind"] for each in found["differences"]] == ["answers"]
    pagedcli("verify", a, "--calibrate", cal)
    scale = json.loads(cal.read_text())["q"]
    grid = [0.5 + step / 100 for step in range(1900)]
    loss = [
        sum(math.log1p((1 / p - 1) ** (s / t)) for p, s in zip(shares, (1, 1, -1, 1, -1), strict=True)) for t in grid
    ]
    assert scale == pytest.approx(grid[loss.index(min(loss))], abs=0.02)
    assert "already exists" in pagedcli("verify", a, "--calibrate", cal, expect=2).stderr


def test_a_temperature_changes_probabilities_and_no_choice(harness, answers):
    rows = harness.rows(ROWS, questions=QUESTIONS, shifts="all", calibration={"topic": 2.0})
    for row in rows:
        old, new = answers[row["id"]], row["answers"]
        assert {name: each["choice"] for name, each in new.items()} == {name: e["choice"] for name, e in old.items()}
        assert {name: new[name] == old[name] for name in new} == {name: name != "topic" for name in new}
        roots = [share**0.5 for share in old["topic"]["probabilities"].values()]
        wanted = [root / sum(roots) for root in roots]
        assert list(new["topic"]["probabilities"].values()) == pytest.approx(wanted)
