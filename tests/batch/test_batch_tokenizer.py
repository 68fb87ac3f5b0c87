"""Text in and out: output text is exact, also where tokens split characters and stop strings cross token borders."""

import json
import shutil

import pytest
from conftest import shared_data
from harness.engine import original, with_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pagedcli.batch.tokenizer import IncrementalDetokenizer, StopCheckers, StopStringChecker, Tokenizer, text_after
from pagedcli.config import EngineConfig
from pagedcli.errors import ModelError, RequestError, UsageError
from pagedcli.models.hub import model_folder
from pagedcli.sampling_params import SamplingParams

CHAT = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def demo():
    """Byte-level BPE, with a chat template."""
    return Tokenizer(model_folder(EngineConfig()))


@pytest.fixture(scope="module")
def stories():
    """SentencePiece style with byte fallback, without a chat template."""
    return Tokenizer(shared_data("stories260k"))


@pytest.fixture(params=["demo", "stories"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def body(tokenizer, text):
    """The tokens of a text without the special ones before it."""
    return original(tokenizer).encode(text, add_special_tokens=False)


def fed(checker, token_ids):
    """What a checker says to each token until it stops."""
    for num_tokens, token_id in enumerate(token_ids, 1):
        stop = checker(token_id)
        if stop is not None:
            return stop, num_tokens
    return None, len(token_ids)


# ---------------------------------------------------------------------- text


@pytest.mark.parametrize("text", ["Once upon a time", " two  spaces ", "caf\u00e9 \u6f22\u5b57 \U0001f642", "a\nb"])
def test_prompt_and_output_text_join_without_a_seam(tokenizer, text):
    ids = tokenizer.encode("Lily said: " + text)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        prompt_text = tokenizer.decode(ids[:cut])
        added = tokenizer.decode_output(ids[:cut], ids[cut:])
        assert (prompt_text.rstrip("\ufffd") if "\ufffd" in prompt_text else prompt_text) + added == whole


@settings(max_examples=75, deadline=None)
@given(text=st.text(min_size=1, max_size=20), prompt=st.sampled_from(["Once", "a b", "\u00e9"]))
def test_the_pieces_add_up_to_the_whole_text(demo, text, prompt):
    prompt_ids, ids = demo.encode(prompt), body(demo, text)
    detokenizer = IncrementalDetokenizer(demo, prompt_ids)
    # a text that ends with U+FFFD itself looks unfinished until the next character comes
    assert "".join(map(detokenizer.add, [*ids, *body(demo, "x")])) == demo.decode_output(prompt_ids, ids) + "x"


def test_a_character_split_over_tokens_is_held_back_until_it_is_whole(tokenizer):
    ids = body(tokenizer, "\U0001f642")
    assert len(ids) >= 4, "this tokenizer spells the emoji in bytes"
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("a"))
    pieces = [detokenizer.add(token_id) for token_id in ids]
    assert "".join(pieces).strip() == "\U0001f642"
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_of_the_prompt_is_completed_by_the_output(demo):
    ids = body(demo, "\u00e9")
    assert len(ids) == 2
    assert demo.decode_output([*demo.encode("caf"), ids[0]], [ids[1]]) == "\u00e9"
    assert text_after("ab\ufffd", "ab\ufffdx") == "x", "what was never completed belongs to the prompt"


def test_the_bytes_of_a_token_are_exact(demo, stories):
    emoji = "\U0001f642"
    for tokenizer in (demo, stories):
        assert b"".join(map(tokenizer.token_bytes, body(tokenizer, emoji))).strip() == emoji.encode()
        assert b"".join(map(tokenizer.token_bytes, body(tokenizer, "a b"))).strip() == b"a b"
    assert stories.token_text(stories.encode(" upon")[-1]) == " upon"
    assert demo.token_text(10**6) == ""


# ---------------------------------------------------------------------- stop strings


ADDED = ["<｜tool▁calls▁begin｜>", "▁", "<0x4G>", "<0x41>", "<think>", "漢", " two  spaces "]


@pytest.mark.parametrize("special", [False, True])
def test_the_bytes_of_an_added_token_are_those_of_its_text(tmp_path, special):
    tokenizer = Tokenizer(with_tokens(tmp_path, ADDED, special=special))
    ids = [tokenizer.token_id(token) for token in ADDED]
    assert [tokenizer.token_bytes(i) for i in ids] == [token.encode() for token in ADDED]
    assert [tokenizer.decode([i], skip_special_tokens=False) for i in ids] == ADDED
    vocabulary = tokenizer.all_token_bytes(max(ids) + 1)
    assert [vocabulary[i] for i in ids] == [token.encode() for token in ADDED]


def test_a_token_that_looks_like_a_byte_but_is_none_is_a_text(stories, tmp_path):
    shutil.copytree(stories.folder, tmp_path, dirs_exist_ok=True)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken("<0x4G>", normalized=False), AddedToken("x▁y", normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.token_text(tokenizer.token_id(token)) for token in ("<0x4G>", "<0x41>", "x▁y")] == [
        "<0x4G>",
        "A",
        "x y",
    ]


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BOMBS = {
    "normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 40},
    "decoder": {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [DOUBLING] * 20}] * 2},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 5000,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {},
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_makes_short_texts_endless_is_refused(tmp_path, demo, name):
    shutil.copytree(demo.folder, tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields | {name: BOMBS[name]}))
    with pytest.raises(ModelError, match=rf"the {name} of the tokenizer in .* times as long, allowed: 1000"):
        Tokenizer(tmp_path)


def test_a_stop_string_is_found_across_token_borders(tokenizer):
    prompt, output = tokenizer.encode("Once"), body(tokenizer, "upon a time there was a dog")
    text = tokenizer.decode_output(prompt, output)
    for start in range(len(text) - 4):
        stop = text[start : start + 4]
        checkers = StopCheckers(tokenizer, prompt, SamplingParams(stop=stop))
        checker = checkers()
        found, num_tokens = fed(checker, output)
        assert found == stop
        assert checkers.text(0, output[:num_tokens]) == text[: text.index(stop)]
        assert stop not in tokenizer.decode_output(prompt, output[: num_tokens - 1]), "it stopped as early as possible"


def test_the_first_of_several_stop_strings_wins_and_at_one_place_the_longer(tokenizer):
    prompt, output = tokenizer.encode("Once"), body(tokenizer, "upon a time")
    text = tokenizer.decode_output(prompt, output)
    checker = StopStringChecker(tokenizer, prompt, SamplingParams(stop=["ime", "time", "on"]))
    assert fed(checker, output)[0] == "on"
    assert checker.text == text[: text.index("on")]


def test_a_stop_string_that_ends_within_min_tokens_does_not_count(demo):
    prompt, output = demo.encode("a"), body(demo, " Ben Ben Ben")
    num_first = next(n for n in range(1, len(output)) if "Ben" in demo.decode(output[:n]))
    checker = StopStringChecker(demo, prompt, SamplingParams(stop="Ben", min_tokens=num_first))
    assert fed(checker, output)[0] == "Ben"
    assert checker.text == " Ben "


# ---------------------------------------------------------------------- chat


def test_texts_tokenized_together_are_those_tokenized_alone(tokenizer):
    texts = ["one", "", "two words", "two words ", "é ü ✓ 漢字", "<|endoftext|>", "a" * 5000, "\n\n tab\t"]
    for adds in (True, False):
        alone = [tokenizer.encode(text, add_special_tokens=adds) for text in texts]
        assert tokenizer.encode_all(texts, 10_000, add_special_tokens=adds) == alone


def test_a_long_text_is_refused_among_short_ones(demo):
    first, second, third = demo.encode_all(["short", "word " * 20_000, "short"], 16)
    assert first == third == demo.encode("short")
    assert isinstance(second, RequestError)
    assert second.code == "context_length_exceeded"


def test_a_chat_becomes_a_prompt_that_waits_for_the_answer(demo):
    text = demo.decode(demo.encode_chat(CHAT), skip_special_tokens=False)
    assert text == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_chat_template_messages_are_refused(stories):
    with pytest.raises(RequestError) as refused:
        stories.encode_chat(CHAT)
    assert refused.value.code == "no_chat_template"


def test_a_given_template_replaces_the_tokenizers_own(tmp_path):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template, encoding="utf-8")
    for source in (template, str(tmp_path / "chat.jinja")):
        tokenizer = Tokenizer(model_folder(EngineConfig()), chat_template=source)
        assert tokenizer.decode(tokenizer.encode_chat(CHAT)) == "[user] Hello!"
    with pytest.raises(UsageError, match="cannot read the chat template"):
        Tokenizer(model_folder(EngineConfig()), chat_template=str(tmp_path / "none.jinja"))


def test_a_template_that_refuses_the_messages_gives_its_reason():
    template = "{% if true %}{{ raise_exception('only users here') }}{% endif %}"
    tokenizer = Tokenizer(model_folder(EngineConfig()), chat_template=template)
    with pytest.raises(RequestError, match="only users here") as refused:
        tokenizer.encode_chat(CHAT)
    assert refused.value.code == "chat_template_error"


FAILING = ["{{ 1 / 0 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ 'a'.b.c }}", "{{ range(10**9) }}"]


@pytest.mark.parametrize("template", [*FAILING, "{{ ''.__class__.__mro__ }}"])  # it cannot reach Python
def test_a_template_that_fails_refuses_its_row_and_nothing_else(template):
    tokenizer = Tokenizer(model_folder(EngineConfig()), chat_template=template)
    with pytest.raises(RequestError) as refused:
        tokenizer.encode_chat(CHAT)
    assert refused.value.code == "chat_template_error"


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="no usable tokenizer"):
        Tokenizer(tmp_path)
