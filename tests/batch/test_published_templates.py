"""Chats of many kinds, rendered with published templates as transformers renders them."""

import json

import pytest
from conftest import SHARED, shared_data

from pagedcli.batch import chat_template
from pagedcli.batch.requests import read_messages
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.errors import RequestError
from pagedcli.models.hub import resolve_model

QUESTION, ANSWER, AGAIN = (
    {"role": role, "content": text}
    for role, text in (("user", "What is 6 x 7?"), ("assistant", "It is 42."), ("user", "And 7 x 7?"))
)
PARTS = [{"type": "text", "text": "Part one."}, {"type": "text", "text": "Part two."}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "A"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": PARAMETERS}}


def call(call_id="call12345"):
    return {"id": call_id, "type": "function", "function": {"name": "look_up", "arguments": '{"a": "seven"}'}}


def called(content, *more):
    """A conversation with a call, or several, and their results."""
    calls = [call(), *more]
    results = [
        {"role": "tool", "tool_call_id": each["id"], "name": "look_up", "content": f"result {place}"}
        for place, each in enumerate(calls)
    ]
    return [QUESTION, {"role": "assistant", "content": content, "tool_calls": calls}, *results]


def reasoned(name):
    return [QUESTION, {**ANSWER, name: "Six times seven."}, AGAIN]


CHATS = {
    "plain": [QUESTION],
    "system": [{"role": "system", "content": "Be brief."}, QUESTION],
    "turns": [QUESTION, ANSWER, AGAIN],
    "parts": [{"role": "user", "content": PARTS}],
    "parts of all": [{"role": "system", "content": PARTS}, {"role": "user", "content": PARTS}, ANSWER, AGAIN],
    "calls, null": called(None),
    "calls, empty": called(""),
    "calls, text": called("I look."),
    "two results": called("I look.", call("call67890")),
    "reasoning_content": reasoned("reasoning_content"),
    "reasoning": reasoned("reasoning"),
    "thinking": reasoned("thinking"),
    "unknown fields": [{**QUESTION, "weight": 1, "cache_control": {"type": "x"}, "name": "Ann", "audio": None}],
    "not ASCII": [{"role": "user", "content": "Grüße, 世界 \U0001f30d\u2028 'quoted' \"twice\" <b>&amp;"}],
    "empty": [{"role": "user", "content": ""}],
}
TEMPLATES = sorted(path.name for path in (SHARED / "templates").glob("*.jinja")) or [None]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(resolve_model("builtin"))


def changed(chat, *, text=False, objects=True):
    """The chat with contents as texts, and arguments as objects."""
    made = []
    for message in chat:
        content = message["content"]
        if text:
            content = "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
        calls = [
            {**each, "function": {**each["function"], "arguments": json.loads(each["function"]["arguments"])}}
            for each in message.get("tool_calls", ())
        ]
        made.append({**message, "content": content, **({"tool_calls": calls} if calls and objects else {})})
    return made


def rendered(tokenizer, chat, arguments):
    """What transformers renders; None: it raises."""
    try:
        return tokenizer._hf.apply_chat_template(chat, tokenize=False, **arguments)
    except Exception:
        return None


def shows_all(text, chat):
    """Whether the template takes the chat in this form: its parts are text there, all of them, and calls are there."""
    parts = [part for message in chat if isinstance(message["content"], list) for part in message["content"]]
    return text is not None and all(part["text"] in text and repr(part)[1:-1] not in text for part in parts)


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_of_all_kinds_become_what_transformers_makes_of_them(tokenizer, monkeypatch, name):
    template = shared_data("templates" if name is None else f"templates/{name}").read_text()
    monkeypatch.setattr(chat_template, "is_plain", lambda template: True)  # all in this process
    wrong = []
    for kind, chat in CHATS.items():
        for more in ({"add_generation_prompt": True}, {"add_generation_prompt": False}, {"continue_final_message": True}):
            arguments = {"chat_template": template, "add_generation_prompt": False, **more}
            if any("tool_calls" in message for message in chat):
                arguments["tools"] = [TOOL]
            # a template that does not take lists, or no objects, gets texts; null is then empty
            expected = None
            for form in [changed(chat), changed(chat, objects=False), changed(chat, text=True), changed(chat, text=True, objects=False)]:
                text = rendered(tokenizer, form, arguments)
                if shows_all(text, form):
                    expected = text
                    break
            try:
                found = tokenizer.render_chat(read_messages(chat), arguments)
            except RequestError:
                found = None
            if found != expected:
                wrong.append((kind, more, expected, found))
    assert not wrong, wrong[0]
