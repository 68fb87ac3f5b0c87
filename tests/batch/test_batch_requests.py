"""Lines of a batch file: what is read, what is refused and with which code."""

import gzip
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.batch.columns import Columns
from pagedcli.batch.lines import MAX_LINE_BYTES, Line, LineSource
from pagedcli.batch.requests import BatchRow, RequestParser, decode_line
from pagedcli.config import RunConfig
from pagedcli.errors import PagedcliError, RequestError
from pagedcli.sampling_params import SamplingParams

CHAT = "/v1/chat/completions"
DEFAULTS = SamplingParams(temperature=0.0, max_tokens=256)


def parse(line, *, defaults=DEFAULTS, strict=False, parser=None):
    document = decode_line(line if isinstance(line, bytes) else line.encode())
    [prompt] = prompts_of(document, parser or RequestParser(defaults, RunConfig(strict=strict)))
    return prompt


def prompts_of(document, parser):
    row = BatchRow(Line(0, 1, b"", 0))
    if (wrong := row.read_head(document, Columns())) is not None:
        raise wrong
    parser.parse(document, row)
    return row.prompts


def chat_line(body='{"messages": [{"role": "user", "content": "hi"}]}', url="/v1/chat/completions"):
    return f'{{"custom_id": "a", "method": "POST", "url": "{url}", "body": {body}}}'


# ---------------------------------------------------------------------- the reader


def test_blank_lines_count_as_lines_but_are_no_rows(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"b": 2}\r\n{"c": 3}')
    read = [(line.index, line.number, line.content) for line in LineSource(str(path))]
    assert read == [(0, 1, b'{"a": 1}'), (1, 4, b'{"b": 2}'), (2, 5, b'{"c": 3}')]


def test_a_line_over_the_limit_is_skipped_and_costs_as_much_as_one_within_it(tmp_path):
    path, most = tmp_path / "in.jsonl", MAX_LINE_BYTES
    with path.open("wb") as file:
        for num_bytes in (most, 5 * most, 5):
            file.write(b"x" * num_bytes + b"\n")
        file.write(b"x" * (most + 1))
    tracemalloc.start()
    try:
        read = [line.content and len(line.content) for line in LineSource(str(path))]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read == [most, None, 5, None]
    assert peak < 5 * most


def test_gzip_and_plain_files_have_the_same_rows_and_digest(tmp_path):
    content = b'{"prompt": "a"}\n\n{"prompt": "b"}\n'
    plain, packed = tmp_path / "in.jsonl", tmp_path / "in.jsonl.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    assert list(LineSource(str(plain))) == list(LineSource(str(packed)))
    assert LineSource(str(plain)).scan() == LineSource(str(packed)).scan()
    assert LineSource(str(plain)).scan()[0].num_rows == 2


def test_a_cut_off_gzip_file_says_where_it_is_damaged(tmp_path):
    path = tmp_path / "in.jsonl.gz"
    packed = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % i for i in range(5000)))
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(PagedcliError, match=r"is damaged after line \d+"):
        list(LineSource(str(path)))


# ---------------------------------------------------------------------- a file that changes while it is read


def numbered(*numbers):
    return "".join(f'{{"prompt": "row {number}"}}\n' for number in numbers)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (numbered(0, 1, 9), "line 3 (row 2) is not the one"),
        (numbered(0, 1, 3), "line 3 (row 2) is not the one"),
        (numbered(0, 1), "it had 4 rows and now ends after 2"),
        ("", "it had 4 rows and now ends after 0"),
    ],
)
def test_a_file_that_is_cut_or_rewritten_while_it_is_read_is_an_error_that_says_where(tmp_path, changed, said):
    path = tmp_path / "in.jsonl"
    path.write_text(numbered(0, 1, 2, 3))
    source = LineSource(str(path))
    source.scan()
    path.write_text(changed)
    with pytest.raises(PagedcliError) as stopped:
        list(source)
    assert said in stopped.value.message
    assert stopped.value.exit_code == 1


def test_rows_that_are_added_while_a_file_is_read_are_left_for_another_run(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(numbered(0, 1))
    source = LineSource(str(path))
    source.scan()
    path.write_text(numbered(0, 1, 2))
    assert [line.index for line in source] == [0, 1]
    assert source.has_grown


# ---------------------------------------------------------------------- good lines


def test_a_line_overrides_sampling_by_name_and_by_openai_alias():
    prompt = parse(
        '{"prompt": "hi", "max_completion_tokens": 3, "temperature": 1, "stop": ["a"], "n": 2, "top_k": null}'
    )
    assert prompt.params == SamplingParams(temperature=1.0, max_tokens=3, stop=["a"], n=2)
    assert not prompt.lowers_max_tokens


def test_logit_bias_keys_are_token_ids_written_as_strings():
    assert parse('{"prompt": "hi", "logit_bias": {"5": -100}}').params.logit_bias == {5: -100.0}


@pytest.mark.parametrize(
    ("body", "url", "expected"),
    [
        ('{"messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 3}', CHAT, 3),
        ('{"messages": [{"role": "user", "content": "x"}], "logprobs": true}', CHAT, 0),
        ('{"messages": [{"role": "user", "content": "x"}], "logprobs": false}', CHAT, None),
        ('{"prompt": "x", "logprobs": 2}', "/v1/completions", 2),
    ],
)  # fmt: skip
def test_openai_logprobs_become_one_number(body, url, expected):
    assert parse(chat_line(body, url)).params.logprobs == expected


def test_messages_keep_their_fields_and_developer_is_system():
    line = """{"messages": [{"role": "developer", "content": "s", "weight": 0, "name": null},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}"""
    parts = [{"type": "text", "text": text} for text in "ab"]
    developer = {"role": "system", "content": "s", "weight": 0}
    assert parse(line).messages == [developer, {"role": "user", "content": parts}]


def test_completions_take_a_list_of_one_prompt():
    assert parse(chat_line('{"prompt": ["x"]}', "/v1/completions")).text == "x"
    assert parse(chat_line('{"prompt": [[1, 2]]}', "/v1/completions")).token_ids == [1, 2]


def test_min_tokens_above_the_default_max_tokens_raises_it():
    assert parse('{"prompt": "x", "min_tokens": 300}').params.max_tokens == 300


def test_fields_without_effect_are_counted_and_with_strict_refused():
    parser = RequestParser(DEFAULTS, RunConfig())
    for _ in range(3):
        parse('{"prompt": "x", "colour": 1, "user": "u", "id": 4}', parser=parser)
    assert parser.ignored == {"colour": 3}
    with pytest.raises(RequestError, match="colour") as refused:
        parse('{"prompt": "x", "colour": 1}', strict=True)
    assert refused.value.code == "unknown_field"


# ---------------------------------------------------------------------- bad lines


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json"),
        (b'{"prompt": "x", "prompt": "y"}', "invalid_request"),
        (b'{"prompt": "x", "\\u0070rompt": "y"}', "invalid_request"),
        (b"null", "invalid_request"),
        (b"[1]", "invalid_request"),
        (b"5", "invalid_request"),
        (b'{"prompt": "\xff"}', "invalid_utf8"),
        (b'{"prompt": "\\ud800 alone"}', "invalid_json"),
        (b'{"prompt": "x", "temperature": NaN}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"{}", "invalid_request"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "x"}]}', "invalid_request"),
        (b'{"prompt": 5}', "invalid_request"),
        (b'{"prompt": ["a", 5]}', "invalid_request"),
        (b'{"prompt": [1.5]}', "invalid_request"),
        (b'{"prompt": {}}', "invalid_request"),
        (b'{"prompt": "x", "id": 1.5}', "invalid_request"),
        (b'{"prompt": "x", "id": {}}', "invalid_request"),
        (b'{"prompt": "x", "cache_salt": 5}', "invalid_request"),
        (b'{"prompt": "x", "temperature": "hot"}', "invalid_parameter"),
        (b'{"prompt": "x", "temperature": -1}', "invalid_parameter"),
        (b'{"prompt": "x", "temperature": 1e999}', "invalid_json"),
        (b'{"prompt": "x", "top_p": 0}', "invalid_parameter"),
        (b'{"prompt": "x", "top_k": 1180591620717411303424}', "invalid_parameter"),
        (b'{"prompt": "x", "temperature": 1e300}', "invalid_parameter"),
        (b'{"prompt": "x", "repetition_penalty": 1e-300}', "invalid_parameter"),
        (b'{"prompt": "x", "logit_bias": {"5": 1e99}}', "invalid_parameter"),
        (b'{"prompt": "x", "max_tokens": 0}', "invalid_parameter"),
        (b'{"prompt": "x", "max_tokens": true}', "invalid_parameter"),
        (b'{"prompt": "x", "n": 100000000}', "invalid_parameter"),
        (b'{"prompt": "x", "seed": 99999999999999999999999}', "invalid_parameter"),
        (b'{"prompt": "x", "stop": 5}', "invalid_parameter"),
        (b'{"prompt": "x", "stop": [""]}', "invalid_parameter"),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', "invalid_parameter"),
        (b'{"prompt": "x", "top_logprobs": 1}', "invalid_parameter"),
        (b'{"prompt": "x", "echo": true}', "unsupported_parameter"),
        (b'{"messages": []}', "invalid_messages"),
        (b'{"messages": "hi"}', "invalid_messages"),
        (b'{"messages": [5]}', "invalid_messages"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', "invalid_messages"),
        (b'{"messages": [{"role": "user"}]}', "invalid_messages"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}', "invalid_messages"),
        (b'{"custom_id": "a", "url": "/v1/moderations", "body": {"input": "x"}}', "unsupported_endpoint"),
        (b'{"custom_id": "a", "url": ["x"], "body": {}}', "unsupported_endpoint"),
        (b'{"custom_id": "a", "url": "/v1/completions"}', "invalid_request"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": 5}', "invalid_request"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"messages": []}}', "invalid_messages"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"max_tokens": 5}}', "invalid_request"),
        (b'{"custom_id": "a", "url": "/v1/chat/completions", "body": {"prompt": "x"}}', "invalid_request"),
        (b'{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {"prompt": "x"}}', "invalid_request"),
        (b'{"url": "/v1/completions", "body": {"prompt": "x"}}', "invalid_request"),
    ],
)  # fmt: skip
def test_a_bad_line_is_refused_with_a_code(line, code):
    with pytest.raises(RequestError) as refused:
        parse(line)
    assert refused.value.code == code
    assert refused.value.message


def test_a_line_that_was_too_long_to_read_is_refused():
    with pytest.raises(RequestError) as refused:
        decode_line(None)
    assert refused.value.code == "line_too_long"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_NAMES = st.sampled_from(
    ["prompt", "messages", "id", "custom_id", "url", "method", "body", "max_tokens", "temperature", "n", "stop", "seed",
     "logprobs", "top_logprobs", "logit_bias", "stop_token_ids", "role", "content", "type", "tools", "model"]
)  # fmt: skip
_OBJECTS = st.recursive(
    st.dictionaries(_NAMES, _VALUES | st.lists(st.dictionaries(_NAMES, _VALUES, max_size=3), max_size=2), max_size=6),
    lambda inner: st.dictionaries(_NAMES, _VALUES | inner, max_size=5),
    max_leaves=3,
)


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(_OBJECTS)
def test_any_json_object_is_a_request_or_a_refusal_never_a_crash(document):
    try:
        prompts = prompts_of(document, RequestParser(DEFAULTS, RunConfig()))
    except RequestError:
        return
    assert prompts


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_a_refusal_never_a_crash(content):
    with suppress(RequestError):
        assert isinstance(decode_line(content), dict)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"messages": [], "tool_choice": "required"}', "is not supported; leave it out, or use none or auto"),
        (b'{"prompt": "x", "stop": ""}', "stop is '', allowed: non-empty strings"),
        (b'{"custom_id": "a", "body": {}}', "a batch line needs a 'url': /v1/chat/completions, /v1/completions"),
        (b'{"messages": [{"content": "x"}]}', "messages[0] has no role, known: system"),
    ],
)
def test_a_message_says_what_is_wrong(line, said):
    with pytest.raises(RequestError) as refused:
        parse(line)
    assert said in refused.value.message
