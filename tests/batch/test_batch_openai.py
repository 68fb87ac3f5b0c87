"""OpenAI's batch files run as they are, and what comes out is what the openai package expects."""

import json

from cli_harness import pagedcli, rows_of
from openai.types import Completion
from openai.types.chat import ChatCompletion

# https://platform.openai.com/docs/guides/batch, "Preparing your batch file"
DOCUMENTED = """\
{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-3.5-turbo-0125", \
"messages": [{"role": "system", "content": "You are a helpful assistant."},{"role": "user", "content": \
"Hello world!"}],"max_tokens": 1000}}
{"custom_id": "request-2", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-3.5-turbo-0125", \
"messages": [{"role": "system", "content": "You are an unhelpful assistant."},{"role": "user", "content": \
"Hello world!"}],"max_tokens": 1000}}
"""
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
EVERY_CHAT_OPTION = {
    "model": "any",
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "Hello!"}]},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Go on."},
    ],
    "max_completion_tokens": 24, "temperature": 0.9, "top_p": 0.9, "n": 2, "seed": 7, "stop": ["zzz"],
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"50": -100}, "logprobs": True, "top_logprobs": 3,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    "stream": False, "user": "u", "metadata": {"k": "v"}, "store": False, "service_tier": "auto", "tools": [],
    "tool_choice": "none",
}  # fmt: skip
EVERY_COMPLETION_OPTION = {
    "model": "any", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 1, "top_p": 0.8, "n": 2,
    "best_of": 1, "echo": False, "seed": 1, "stop": ".", "logprobs": 2, "presence_penalty": 0, "frequency_penalty": 0,
    "logit_bias": {}, "suffix": None, "stream": False, "user": "u",
}  # fmt: skip


def run(tmp_path, text, *flags):
    (tmp_path / "in.jsonl").write_text(text)
    result = pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *flags)
    return rows_of(tmp_path / "out.jsonl"), result.stderr


def check(row, type_):
    """Exactly OpenAI's fields around a body that its own types take, and give back, unchanged."""
    assert list(row) == ["id", "custom_id", "response", "error"]
    assert list(row["response"]) == ["status_code", "request_id", "body"]
    body = row["response"]["body"]
    assert type_.model_validate(body, strict=True).model_dump(exclude_unset=True) == body
    return body


def test_openais_documented_example_runs_unchanged(tmp_path):
    rows, said = run(tmp_path, DOCUMENTED)
    assert [row["custom_id"] for row in rows] == ["request-1", "request-2"]
    for row in rows:
        check(row, ChatCompletion)
    assert "no effect" not in said


def test_every_option_is_honoured_or_asks_for_nothing(tmp_path):
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": EVERY_CHAT_OPTION},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": EVERY_COMPLETION_OPTION},
    ]
    rows, said = run(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "--strict")
    chat, completion = check(rows[0], ChatCompletion), check(rows[1], Completion)
    assert len(chat["choices"]) == len(completion["choices"]) == 2
    for choice in chat["choices"]:
        assert json.loads(choice["message"]["content"])["a"] in (1, 2)
        assert all(len(position["top_logprobs"]) == 3 for position in choice["logprobs"]["content"])
    assert "no effect" not in said
