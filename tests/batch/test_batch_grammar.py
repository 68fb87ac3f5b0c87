"""Structured output: what a grammar allows is all that a model can write, whatever else happens to the request."""

import json
import re

import jsonschema
import pytest
from conftest import shared_data
from harness.core import EveryGuess
from harness.engine import Harness
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli import SamplingParams
from pagedcli.batch.grammar import Grammars
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import EngineConfig
from pagedcli.core.drafts import NgramDrafter
from pagedcli.models.hub import model_folder

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def nested(depth):
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


def hot(prompt="Once upon a time", **fields):
    return {"prompt": prompt, "temperature": 1.0, "max_tokens": 110, **fields}


def texts(row):
    return [row["text"]] if "text" in row else [sample["text"] for sample in row["outputs"]]


@pytest.fixture(scope="module")
def small():
    """A pool in which four such requests cannot end together."""
    return Harness(num_kvcache_blocks=40, max_num_seqs=6)


def test_rows_of_a_schema_parse_and_validate_also_when_preempted(small):
    lines = [hot(f"Story {i}:", response_format=schema_format(PERSON), n=2) for i in range(7)]
    result, rows = small.run(lines)
    assert result.stats.facts.num_preemptions > 0
    written = [text for row in rows for text in texts(row)]
    for text in written:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(written)) > 7, "samples differ"
    reasons = {sample["finish_reason"] for row in rows for sample in row["outputs"]}
    assert reasons == {"stop"}


@pytest.mark.bits
def test_preemption_and_neighbours_never_change_guided_rows(small):
    lines = [hot(f"Story {i}:", response_format=schema_format(PERSON), n=1 + i % 2) for i in range(4)]
    crowded = small.rows([*lines, *(hot(f"Free {i}") for i in range(4))])[: len(lines)]
    assert crowded == Harness(max_num_seqs=1).rows(lines)


def test_penalties_limits_and_logprobs_go_together_with_a_grammar(small):
    fields = {"presence_penalty": 2, "repetition_penalty": 1e6, "top_p": 0.5, "top_k": 3, "logprobs": 2}
    fields |= {"logit_bias": {str(token_id): -1e6 for token_id in range(300)}}
    [row] = small.rows([hot(response_format=schema_format(PERSON), **fields)])
    jsonschema.validate(json.loads(row["text"]), PERSON)


def test_a_regex_is_matched_as_a_whole(small):
    patterns = [r"a/b\n//c", r"[A-Z][a-z]{2,8}", r"\d{3}-\d{4}", r"(yes|no|perhaps)", r"^ab$", "", r"[äöü☃]{3}"]
    patterns.append(" two words")
    rows = small.rows([hot(regex=pattern) for pattern in patterns])
    for pattern, row in zip(patterns, rows, strict=True):
        assert re.fullmatch(pattern, row["text"]), (pattern, row["text"])
        assert row["finish_reason"] == "stop"


def test_an_end_is_possible_only_where_the_grammar_accepts(small):
    favour_the_end = {"logit_bias": {"0": 1e6, "2": 1e6}}
    rows = small.rows([hot(regex="a{3,20}", **favour_the_end), hot(regex="a{3,20}", min_tokens=15, **favour_the_end)])
    assert rows[0]["text"] == "aaa"
    assert len(rows[1]["text"]) >= 15, "min_tokens keeps the end away while the grammar allows more"


def test_a_complete_text_ends_although_min_tokens_wants_more(small):
    [row] = small.rows([hot(regex="abc", min_tokens=50)])
    assert (row["text"], row["finish_reason"]) == ("abc", "stop")


def test_vllms_names_are_known(small):
    rows = small.rows([hot(guided_regex="[ab]"), hot(guided_json={"enum": [5]}), hot(guided_json='{"enum": [6]}')])
    assert rows[0]["text"] in "ab"
    assert [row["text"] for row in rows[1:]] == ["5", "6"]
    structures = [{"choice": ["7"]}, {"grammar": 'start: "8"'}, {"json": {"enum": [9]}}]
    rows = small.rows([hot(guided_choice=["6"]), *(hot(structured_outputs=structure) for structure in structures)])
    assert [row["text"] for row in rows] == ["6", "7", "8", "9"]


def test_a_line_replaces_the_grammar_of_the_run(small):
    defaults = SamplingParams(temperature=0.0, max_tokens=8, regex="[xy]")
    free = {"prompt": "Hello", "response_format": {"type": "text"}}
    rows = small.rows([{"prompt": "Hello"}, free, {"prompt": "a", "regex": "z"}], defaults=defaults)
    assert rows[0]["text"] in "xy"
    assert rows[1]["text"] == small.rows([{"prompt": "Hello"}])[0]["text"]
    assert rows[2]["text"] == "z"


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"regex": "(ab"}, "invalid_regex", "unclosed group"),
        ({"regex": r"(?=a)"}, "invalid_regex", "look-around"),
        ({"response_format": schema_format({"type": "nope"})}, "invalid_schema", "nope"),
        ({"response_format": schema_format({"not": {}})}, "invalid_schema", "not"),
        ({"response_format": schema_format({"$ref": "https://example.com/a.json"})}, "invalid_schema", "example.com"),
        ({"response_format": schema_format({"enum": []})}, "invalid_schema", "Unsatisfiable"),
        ({"guided_json": "{"}, "invalid_schema", "EOF"),
        ({"response_format": schema_format(nested(300))}, "invalid_schema", ""),
        ({"guided_json": 5}, "invalid_parameter", "structured_outputs.json"),
        ({"guided_grammar": "start: ("}, "invalid_grammar", "grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_parameter", "exactly one"),
        ({"structured_outputs": {"choice": []}}, "invalid_parameter", "non-empty"),
        ({"response_format": {"type": "yaml"}}, "invalid_parameter", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "invalid_parameter", "schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "invalid_parameter", "no field 'schema'"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "invalid_parameter", "regex"),
        ({"regex": "a", "ignore_eos": True}, "invalid_parameter", "ignore_eos"),
    ],
)
def test_a_bad_grammar_is_an_error_row_and_its_neighbours_are_served(small, fields, code, said):
    rows = small.rows([{"prompt": "a", **fields}, {"prompt": "a", "regex": "b"}])
    assert rows[0]["error"]["code"] == code
    assert said in rows[0]["error"]["message"]
    assert rows[1]["text"] == "b"


def test_a_grammar_that_fails_on_the_way_is_an_error_row(small, monkeypatch):
    monkeypatch.setattr("pagedcli.batch.grammar._MAX_LEXER_STATES", 100)
    rows = small.rows([hot(regex="(?s:.{0,40}x){20}", n=2), {"prompt": "a"}])
    assert rows[0]["error"]["code"] == "grammar_too_complex"
    assert rows[1]["error"] is None


def test_one_step_ahead_waits_for_what_a_grammar_says():
    lines = [hot(f"Story {i}:", response_format=schema_format(PERSON), n=1 + i % 2) for i in range(3)]
    lines += [hot(f"Free {i}", max_tokens=120, ignore_eos=True) for i in range(2)]
    ahead = Harness(async_scheduling=True)
    in_order = Harness(async_scheduling=False)
    free = Harness(async_scheduling=True)
    assert ahead.rows(lines) == in_order.rows(lines)
    free.rows(lines[3:])
    assert ahead.engine.num_steps_ahead >= free.engine.num_steps_ahead


@pytest.mark.long
def test_guesses_never_change_guided_rows_and_what_a_schema_forces_is_guessed():
    lines = [hot(f"Story {i}:", response_format=schema_format(PERSON), n=1 + i % 2, logprobs=2) for i in range(4)]
    lines += [hot(regex=r"(abc|abd){9}", stop="bdabda"), hot("Free", presence_penalty=1.0, repetition_penalty=1.2)]
    lines[2] |= {"frequency_penalty": 0.8, "min_tokens": 60}
    plain, guessing = Harness(), Harness(speculation="ngram")
    guessing.engine.scheduler.drafting = EveryGuess(NgramDrafter())  # many guesses of hot rows are wrong
    assert guessing.rows(lines) == plain.rows(lines)
    facts = guessing.engine.stats
    assert facts.num_accepted_tokens > 50
    assert facts.num_steps < 0.9 * plain.engine.stats.num_steps


# ---------------------------------------------------------------------- the vocabulary


def random_walk(vocabulary, params, data):
    """Bytes of tokens drawn among those allowed, until the text is complete."""
    grammars, vocab_size, tokenizer = vocabulary
    guide = grammars.guides(params)()
    written = b""
    for _ in range(200):
        bits = int.from_bytes(guide.allowed_tokens, "little")
        token_id = data.draw(st.sampled_from([token_id for token_id in range(vocab_size) if bits >> token_id & 1]))
        guide.accept(token_id)
        [complete] = guide.find_allowed([guide])
        assert guide.error is None
        if token_id in tokenizer.special_token_ids:
            return written
        written += tokenizer.token_bytes(token_id)
        if complete:
            return written
    return None


@pytest.fixture(scope="module", params=["demo", "stories260k"])
def vocabulary(request):
    """A byte-level vocabulary and one of SentencePiece, whose encoder puts a space before every text."""
    folder = model_folder(EngineConfig()) if request.param == "demo" else shared_data("stories260k")
    vocab_size = 1030 if request.param == "demo" else 512  # more than the tokenizer has: a padded embedding
    tokenizer = Tokenizer(folder)
    end = tokenizer.eos_token_id
    return Grammars(tokenizer, end_token_ids=[end], vocab_size=vocab_size), vocab_size, tokenizer


SCHEMAS = [
    PERSON,
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "null"}},
    {"anyOf": [{"type": "integer", "multipleOf": 5, "maximum": 100}, {"const": {"a": [None]}}]},
    {"type": "string", "pattern": "^[a-z]{2}$"},
    {"type": "string", "format": "date"},
    {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 1}}, "$ref": "#/$defs/t"},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
]


@pytest.mark.quick("stories260k")
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_path_through_a_grammar_is_what_the_grammar_says(vocabulary, data):
    pattern = data.draw(st.sampled_from([r"[a-c]{1,4}x?", r"\d{2}-\d{2}", r"( the| a)? cat", r"abcdefgh", r"ä|☃|\t"]))
    written = random_walk(vocabulary, SamplingParams(regex=pattern), data)
    assert re.fullmatch(pattern, written.decode())


@pytest.mark.quick("stories260k")
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_path_through_a_schema_validates(vocabulary, data):
    schema = data.draw(st.sampled_from(SCHEMAS))
    written = random_walk(vocabulary, SamplingParams(response_format=schema_format(schema)), data)
    if written is not None:  # a walk may also be too long to end
        jsonschema.validate(json.loads(written), schema, cls=jsonschema.Draft202012Validator)
