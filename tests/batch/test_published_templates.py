"""Chats of many kinds, rendered with published templates as transformers renders them."""

import json
import re

import pytest
from conftest import SHARED, shared_data
from harness.engine import original
from transformers.utils.chat_template_utils import render_jinja_template

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


def forms(chat):
    """The chat as it is, with arguments as objects or as texts; and the same with one text per message."""
    for is_text in (False, True):
        for has_objects in (True, False):
            form = json.loads(json.dumps(chat))
            for message in form:
                if is_text and isinstance(message["content"], list):
                    message["content"] = "\n".join(part["text"] for part in message["content"])
                if is_text and message["content"] is None:
                    message["content"] = ""
                for each in message.get("tool_calls", ()) if has_objects else ():
                    each["function"]["arguments"] = json.loads(each["function"]["arguments"])
            yield form


def expected_text(tokenizer, chat, arguments):
    """What transformers renders of the first form that it takes; null as in Jinja where a template asks for it. None:
    it takes none."""
    parts = [part["text"] for message in chat if isinstance(message["content"], list) for part in message["content"]]
    for form in forms(chat):
        try:
            if re.search(r"content'\] is (not )?none", arguments["chat_template"]):
                special = original(tokenizer).special_tokens_map
                [text], _ = render_jinja_template([form], **special, **arguments)
            else:
                text = original(tokenizer).apply_chat_template(form, tokenize=False, **arguments)
        except Exception:
            continue
        if all(part in text for part in parts) and not re.search(r"""['"]type['"]: ['"]text['"]""", text):
            return text
    return None


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_of_all_kinds_become_what_transformers_makes_of_them(tokenizer, name):
    template = shared_data("templates" if name is None else f"templates/{name}").read_text()
    wrong = []
    for kind, chat in CHATS.items():
        for more in ({"add_generation_prompt": True}, {}, {"continue_final_message": True}):
            arguments = {"chat_template": template, "add_generation_prompt": False, **more}
            if any("tool_calls" in message for message in chat):
                arguments["tools"] = [TOOL]
            expected = expected_text(tokenizer, chat, arguments)
            try:
                found = tokenizer.render_chat(read_messages(chat), arguments)
            except RequestError:
                found = None
            if found != expected:
                wrong.append((kind, more, expected, found))
    assert not wrong, wrong[0]
