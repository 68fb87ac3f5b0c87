"""Whole batch runs on the built-in model: one row per line, whatever the line; the same rows, whatever the pool."""

import gc
import random
import threading

import msgspec
import pytest
from bit_settings import by_default
from harness.engine import Harness, without_run_dependent_fields

from pagedcli.batch.lines import Line, LineSource
from pagedcli.batch.run import PrefixWindow
from pagedcli.errors import PagedcliError

PROMPTS = ["Once upon a time", "The fox lives", "Q: What does the bear eat?\nA:", "Hello", "Lily and Ben"]


@pytest.fixture(scope="module")
def harness():
    return Harness()


class SlowSource(LineSource):
    """Lines that come one by one, as from a pipe."""

    def __init__(self, lines):
        self.name, self.is_live, self._come = "slow", True, lines

    def _lines(self):
        return self._come


def plain(prompt, **fields):
    return {"prompt": prompt, **fields}


def openai(body, url="/v1/chat/completions", custom_id="a"):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def user(text):
    return [{"role": "user", "content": text}]


# ---------------------------------------------------------------------- one row per line


def test_plain_rows_have_the_documented_fields(harness):
    _, (row,) = harness.run([plain("Once upon a time", id="x", cache_salt="of its own")])
    assert list(row) == ["index", "id", "text", "finish_reason", "usage", "error"]
    assert (row["index"], row["id"], row["error"]) == (0, "x", None)
    assert row["usage"] == {
        "prompt_tokens": len(harness.tokenizer.encode("Once upon a time")),
        "completion_tokens": 8,
        "total_tokens": len(harness.tokenizer.encode("Once upon a time")) + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_bad_line_is_an_error_row_and_its_neighbours_are_served(harness):
    result, rows = harness.run([plain("a"), b"{bad", b"", plain("b"), plain("c", temperature=-1)])
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert [row["error"] and (row["error"]["code"], row["error"]["line"]) for row in rows] == [
        None,
        ("invalid_json", 2),
        None,
        ("invalid_parameter", 5),
    ]
    assert rows[1]["text"] is None
    assert (result.stats.num_done, result.stats.num_failed) == (4, 2)
    assert result.stats.error_codes == {"invalid_json": 1, "invalid_parameter": 1}


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (plain([]), "empty_prompt"),
        (plain(""), "empty_prompt"),
        (plain([10**6]), "invalid_token_id"),
        (plain([-1]), "invalid_token_id"),
        (plain([5] * 5000), "context_length_exceeded"),
        (plain([5] * 900), "kv_cache_exceeded"),  # the pool holds 800 tokens
        (plain([5] * 100, max_tokens=750), "kv_cache_exceeded"),
        (plain("a", logit_bias={"99999": 1.0}), "invalid_token_id"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_engine_cannot_serve_is_an_error_row(harness, line, code):
    bad, good = harness.rows([line, plain("Hello")])
    assert bad["error"]["code"] == code
    assert good["error"] is None


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.bits
def test_pool_size_and_neighbours_never_change_the_rows(harness):
    lines = [plain(prompt, temperature=1, max_tokens=20, n=2, id=prompt) for prompt in PROMPTS]
    rows = harness.rows(lines, output_token_ids=True)
    tight = Harness(num_kvcache_blocks=12)
    result, tight_rows = tight.run(lines, output_token_ids=True)
    assert by_default(result.stats.facts.num_preemptions > 0), "the pool is too large to test anything"
    assert [without_run_dependent_fields(row) for row in tight_rows] == rows
    assert Harness(max_num_seqs=1, enable_prefix_caching=False).rows(lines, output_token_ids=True) == rows


@pytest.mark.bits
def test_seeds_belong_to_rows_not_to_their_order_of_arrival(harness):
    lines = [plain("Once upon a time", temperature=1.0, max_tokens=12) for _ in range(6)]
    rows = harness.rows(lines)
    assert len({row["text"] for row in rows}) > 1, "rows draw from seeds of their own"
    assert harness.rows(lines) == rows
    assert harness.rows(lines, seed=1) != rows
    assert harness.rows(lines, limit=3) == rows[:3]


# ---------------------------------------------------------------------- sampling per line


def test_a_stop_string_cuts_the_text(harness):
    (whole,) = harness.rows([plain("Once upon a time")])
    text = whole["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut, kept = harness.rows(
        [plain("Once upon a time", stop=[stop]), plain("Once upon a time", stop=stop, include_stop_str_in_output=True)]
    )
    assert cut["text"] == text[: text.index(stop)]
    assert kept["text"] == cut["text"] + stop
    assert cut["finish_reason"] == "stop"


def test_logprobs_of_the_sampled_token_are_in_the_row(harness):
    (row,) = harness.rows([plain("Once upon", logprobs=2, max_tokens=3)], output_token_ids=True)
    assert len(row["logprobs"]) == 3
    for position in row["logprobs"]:
        assert len(position["top_logprobs"]) == 2
        assert position["logprob"] == position["top_logprobs"][0]["logprob"] <= 0, "greedy takes the likeliest"
        assert bytes(position["bytes"]).decode("utf-8", errors="replace") == position["token"]
    assert "".join(position["token"] for position in row["logprobs"]) == row["text"]


def test_a_line_brings_variables_for_the_template_but_no_template(harness):
    def row(**variables):
        return harness.rows([{"messages": user("Hello!"), "chat_template_kwargs": variables}])[0]

    assert row(enable_thinking=False)["error"] is None
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for name, value in {"chat_template": endless, "return_dict": True, "tokenize": True}.items():
        assert row(**{name: value})["error"]["code"] == "unsupported_parameter"


def test_a_line_continues_the_answer_that_its_messages_begin(harness):
    messages = [*user("Tell me a story."), {"role": "assistant", "content": "Once upon a"}]
    ends = {"continue_final_message": True, "add_generation_prompt": False}
    token_ids = harness.tokenizer.encode_chat(messages, ends)
    assert harness.tokenizer.decode(token_ids).endswith("Once upon a")
    chat = {"messages": messages, **ends}
    continued, in_batch, by_ids = harness.rows(
        [chat, openai(chat, "/v1/chat/completions", "b"), {"prompt": token_ids}], output_token_ids=True
    )
    choice = in_batch["response"]["body"]["choices"][0]
    assert continued["token_ids"] == choice["token_ids"] == by_ids["token_ids"]
    assert continued["usage"]["prompt_tokens"] == len(token_ids)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": user("Hi"), "continue_final_message": True}, "needs 'add_generation_prompt': false"),
        ({"prompt": "Hi", "add_generation_prompt": False}, "'add_generation_prompt' needs 'messages'"),
        ({"messages": user("Hi"), "continue_final_message": 1}, "continue_final_message must be true or false"),
    ],
)
def test_how_a_chat_ends_is_checked(harness, fields, words):
    (row,) = harness.rows([fields])
    assert row["error"]["code"] == "invalid_request"
    assert words in row["error"]["message"]


# ---------------------------------------------------------------------- chat and OpenAI


def test_an_openai_row_with_an_error_has_openais_fields(harness):
    _, (chat, error) = harness.run([openai({"messages": user("Hi")}), openai({"messages": []}, custom_id="c")])
    assert list(chat) == list(error) == ["id", "custom_id", "response", "error"]
    assert (chat["response"]["status_code"], error["response"]) == (200, None)
    assert (error["error"]["code"], error["error"]["line"], error["custom_id"]) == ("invalid_messages", 2, "c")


# ---------------------------------------------------------------------- stopping


@pytest.mark.parametrize(("reorder", "most"), [("none", 2 * 4), ("prefix", 10 + 10 + 2 * 4)])
def test_a_run_takes_only_as_many_lines_as_the_engine_or_a_window_needs(harness, monkeypatch, reorder, most):
    monkeypatch.setattr("pagedcli.batch.run.PrefixWindow", lambda: PrefixWindow(max_rows=10))
    num_taken = most_ahead = 0

    def lines():
        nonlocal num_taken
        for index in range(300):
            num_taken += 1
            yield Line(index, index + 1, msgspec.json.encode(plain([5, 6 + index], max_tokens=2)), 0)

    def observe(stats):
        nonlocal most_ahead
        most_ahead = max(most_ahead, num_taken - stats.num_done)

    result, rows = harness.run(lines(), reorder=reorder, run={"observe": observe})
    assert len(rows) == result.stats.num_done == 300
    assert 0 < most_ahead <= most


def test_a_stop_request_ends_the_run_after_the_step_with_its_rows(harness):
    steps = 0

    def stop():
        nonlocal steps
        steps += 1
        return steps > 10

    result, rows = harness.run([plain(prompt, max_tokens=4) for prompt in PROMPTS * 10], run={"stop_requested": stop})
    assert result.outcome == "interrupted"
    assert 0 < len(rows) < 50
    harness.abort_all()


def test_the_garbage_collector_looks_only_through_what_a_run_has_made(harness):
    frozen = []

    def observe(stats):
        frozen.append(gc.get_freeze_count())

    gc.unfreeze()  # a run of another test in this process may not have ended
    harness.run([plain([5, 6])], run={"observe": observe})
    assert min(frozen) > 10_000
    assert gc.get_freeze_count() == 0


def test_rows_of_a_slow_source_do_not_wait_for_its_next_line(harness):
    finished = threading.Event()

    def lines():
        yield Line(0, 1, msgspec.json.encode(plain("Hello")), 0)
        assert finished.wait(30), "the row of the first line never came"
        yield Line(1, 2, msgspec.json.encode(plain("Hello")), 0)

    def observe(stats):
        if stats.num_done:
            finished.set()

    _, rows = harness.run(SlowSource(lines()), run={"observe": observe})
    assert [row["index"] for row in rows] == [0, 1]


def test_a_run_that_waits_for_lines_can_be_stopped(harness):
    never = threading.Event()

    def lines():
        never.wait(60)
        yield from ()

    asked = []
    result, _ = harness.run(SlowSource(lines()), run={"stop_requested": lambda: asked.append(1) or len(asked) > 3})
    never.set()
    assert result.outcome == "interrupted"


def test_what_goes_wrong_in_a_slow_source_is_raised(harness):
    def lines():
        yield Line(0, 1, msgspec.json.encode(plain("Hello")), 0)
        raise PagedcliError("stdin is damaged")

    with pytest.raises(PagedcliError, match="stdin is damaged"):
        harness.run(SlowSource(lines()))
    harness.abort_all()


def mutated_lines(rng, count):
    """Good lines of all shapes with bytes changed, cut, doubled or put in."""
    good = [
        msgspec.json.encode(line)
        for line in (
            plain("Hello", max_tokens=1, stop=["a"], temperature=0.5),
            plain([5, 6], n=2, logprobs=1, max_tokens=1),
            {"messages": user("Hi"), "max_tokens": 1, "logit_bias": {"5": 1.0}},
            openai({"messages": user("Hi"), "max_tokens": 1, "top_logprobs": 1, "logprobs": True}, custom_id="NUMBER"),
            openai({"prompt": "Hi", "max_tokens": 1}, "/v1/completions", "NUMBER"),
        )
    ]
    pieces = [*b'" { } [ ] , : null 1e9 -1 \\u0000 true'.split(), b"\xff", b"\xc3", b"\r"]
    for number in range(count):
        line = bytearray(rng.choice(good).replace(b"NUMBER", b"%d" % number))
        for _ in range(rng.randint(0, 3)):
            place, roll = rng.randrange(len(line) + 1), rng.random()
            if roll < 0.3:
                line[place : place + 1] = bytes([rng.randrange(256)])
            elif roll < 0.6:
                line[place:place] = rng.choice(pieces)
            elif roll < 0.8:
                del line[place : place + rng.randint(1, 10)]
            else:
                line += line[place : place + 20]
        yield bytes(line).replace(b"\n", b" ")


@pytest.mark.long
def test_five_thousand_fuzzed_lines_give_one_row_each():
    lines = list(mutated_lines(random.Random(0), 5_000))
    num_rows = sum(bool(line.strip()) for line in lines)
    result, rows = Harness(max_num_seqs=64).run(lines)
    assert result.outcome == "complete"
    assert len(rows) == result.stats.num_done == num_rows
    plain_rows = [row["index"] for row in rows if "index" in row]
    assert plain_rows == sorted(set(plain_rows))
    assert 0 < result.stats.num_failed < num_rows


def test_of_listed_tokens_of_equal_text_the_likeliest_stays(harness):
    fields = {"prompt": [200], "logprobs": 100, "max_tokens": 3}  # half a character, which many tokens continue
    row, completion = harness.rows([plain(**fields), openai({"model": "m", **fields}, "/v1/completions", "b")])
    found = completion["response"]["body"]["choices"][0]["logprobs"]["top_logprobs"]
    listed = [[(top["token"], top["logprob"]) for top in each["top_logprobs"]] for each in row["logprobs"]]
    assert any(len(dict(tops)) < len(tops) for tops in listed)
    assert found == [
        {text: max(value for other, value in tops if other == text) for text, _ in tops} for tops in listed
    ]
    assert [list(each.values()) for each in found] == [sorted(each.values(), reverse=True) for each in found]


def test_extreme_but_allowed_numbers_do_not_end_the_run(harness):
    extremes = [
        {"temperature": 1e6},
        {"temperature": 1e-300},
        {"repetition_penalty": 1e6, "temperature": 1e-4},
        {"repetition_penalty": 1e-6},
        {"logit_bias": {"5": 1e6, "6": 1e6}, "temperature": 1e-4},
        {"logit_bias": {str(token_id): -1e6 for token_id in range(1024)}, "temperature": 1.0},
        {"top_p": 1e-300, "temperature": 1.0},
        {"min_p": 1.0, "top_k": 2**31 - 1, "temperature": 1.0},
        {"seed": -(2**63), "temperature": 1.0},
        {"stop_token_ids": [2**80, -5]},
        {"stop_token_ids": [2**80, -5, 5000], "min_tokens": 4},
    ]
    rows = harness.rows([plain("Hello", **fields) for fields in extremes])
    assert [row["error"] for row in rows] == [None] * len(extremes)
