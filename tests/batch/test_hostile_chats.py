"""Chats that nobody would write: each becomes a row or an error row, and has nothing of another one's text."""

import json
import random
import re

import pytest
from harness.engine import Harness

from pagedcli.batch.tokenizer import Tokenizer

ALL_FIELDS = """{% macro shown(m) %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}
{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{% for k, v in m.items() %}{{ k }}={{ v | string }}
{% endfor %}{% endmacro %}{% for m in messages %}{{ shown(m) }}{% endfor %}"""
PARTS = """{% macro text(c) %}{% if c is string %}{{ c }}{% elif c is iterable and c is not mapping %}
{% for part in c %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}
{% for m in messages %}{{ m.role + text(m.content) + (m.reasoning_content or '') }}{% endfor %}"""
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"


def nested(depth, inner, rng):
    """JSON text that is nested so deeply that Python's own writer fails."""
    opens = [rng.choice(["[", '{"k":']) for _ in range(depth)]
    return "".join(opens) + inner + "".join("]" if each == "[" else "}" for each in reversed(opens))


def hostile_chat(rng, mark):
    """The JSON text of a chat; every text in it has this mark and no other."""
    values = [
        *("null", "true", "0", "-1", "1e308", "123456789012345678901234567890", "[]", "{}", '""', "[[]]", '[""]'),
        *(r'"\ud800"', r'"\ud83d\ude00"', r'"\u0000"', '"assistant"', '{"type":"text"}', '{"role":"user"}'),
        json.dumps(f"{mark} "),
        json.dumps(f"{mark} é世\u2028 " * rng.choice((1, 300, 9000))),
        json.dumps("{{ 7 * 7 }}{% raw %}</s><|im_end|>" + mark),
        json.dumps([{"type": "text", "text": f"{mark} one"}, {"type": "text", "text": f"{mark} two"}]),
        json.dumps([{"type": "text", "text": mark, "text2": mark}, {"type": "image_url", "image_url": mark}]),
        nested(rng.choice((5, 300, 480, 600, 700, 965, 1500)), json.dumps(mark), rng),
    ]
    functions = [
        *("null", "[]", "7", json.dumps({"name": mark, "arguments": "{" + mark}), json.dumps({"name": [mark]})),
        json.dumps({"name": "f", "arguments": json.dumps({"a": mark})}),
        json.dumps({"name": "f", "arguments": {"a": [mark, None, 1.5]}}),
        '{"name":"f","arguments":' + nested(rng.choice((300, 600, 965)), json.dumps(mark), rng) + "}",
    ]
    calls = [
        "[" + ",".join('{"id":"1","type":"function","function":' + rng.choice(functions) + "}" for _ in range(2)) + "]",
        *("null", "{}", "[null]", "[[]]", json.dumps(mark), '[{"function":null}]', '[{"id":"' + mark + '"}]'),
    ]
    names = ("name", "tool_call_id", "reasoning", "thinking", "reasoning_content", "weight", "items", "", "role2")
    messages = []
    for _ in range(rng.choice((1, 1, 2, 5))):
        role = json.dumps(rng.choice(("user", "assistant", "system", "tool", "developer")))
        role = rng.choice(values) if rng.random() < 0.05 else role
        content = rng.choice((json.dumps(f"{mark} text"), json.dumps(f"{mark} " * 9000)))
        content = rng.choice((*values, "null")) if rng.random() < 0.2 else content
        fields = [("role", role), ("content", content)]
        fields += [(name, rng.choice(values)) for name in rng.sample(names, rng.randrange(4))]
        fields += [("tool_calls", rng.choice(calls))] * rng.randrange(2)
        rng.shuffle(fields)
        messages.append("{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in fields) + "}")
    if rng.random() < 0.3:  # Python has the empty text once, so pickle refers to the first one
        messages = [*['{"role":"user","content":""}'] * 5, f'{{"role":"user","content":"{mark}"}}']
    chat = "[" + ",".join(messages) + "]"
    if rng.random() < 0.2:  # long, then too deep for pickle
        function = '{"name":"f","arguments":' + nested(rng.randrange(600, 966), json.dumps(mark), rng) + "}"
        call = '{"id":"1","type":"function","function":' + function + "}"
        texts = [json.dumps(f"{mark} " * rng.randrange(9000, 20_000)) for _ in range(2)]
        first, last = (f'{{"role":"assistant","content":{text}' for text in texts)
        return f'[{first}}},{last},"tool_calls":[{call}]}}]'
    return rng.choice(values) if rng.random() < 0.05 else chat


@pytest.mark.long
@pytest.mark.parametrize("template", [ALL_FIELDS, PARTS, PLAIN], ids=["all fields", "parts", "plain"])
def test_hostile_chats_become_rows_or_error_rows_without_text_of_others(template):
    harness, rng = Harness(), random.Random(7)
    texts = []

    class Recording(Tokenizer):
        def render_chat(self, *given):
            texts.append(super().render_chat(*given))
            return texts[-1]

    harness.tokenizer = Recording(harness.engine.model_path, chat_template=template)
    lines = [
        f'{{"id":{place},"max_tokens":1,"messages":{hostile_chat(rng, f"mark{place:03}")}}}'.encode()
        for place in range(100)
    ]
    _, rows = harness.run(lines)
    assert [row["index"] for row in rows] == [*range(100)]
    codes = {row["error"]["code"] for row in rows if row["error"] is not None}
    known = {"chat_template_error", "context_length_exceeded", "invalid_messages", "invalid_json", "kv_cache_exceeded"}
    assert codes <= known | {"invalid_request"}, codes
    marks = [set(re.findall(r"mark\d{3}", text)) for text in texts]
    assert len(texts) > 20
    assert all(len(each) <= 1 for each in marks)
    shown = [mark for each in marks for mark in each]
    assert len(shown) == len(set(shown)), "a text of one row is in another"
    assert shown == sorted(shown)
