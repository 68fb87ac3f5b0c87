"""Chat templates are programs of others: one that would take all memory or never end gives an error."""

import re
import time
from datetime import datetime

import psutil
import pytest
from harness.engine import original
from quick import slow_but

from pagedcli.batch import chat_template
from pagedcli.batch.chat_template import ChatRenderer
from pagedcli.batch.requests import read_messages
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.errors import RequestError, UsageError
from pagedcli.models.hub import resolve_model

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

CHATML = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{% for message in messages %}{{ '<|im_start|>' + message['role'] +
'\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}{% endif %}"""
MACRO = """{% macro shown(message) %}{{ message.role }}: {{ message.content }}
{% endmacro %}{% for message in messages %}{{ shown(message) }}{% endfor %}{{ eos_token }}"""


def repeated(body, shown="{{ ns.x }}", first="'a'"):
    """A template that does something 60 times to the variable ns.x."""
    return f"{{% set ns = namespace(x={first}) %}}{{% for n in range(60) %}}{body}{{% endfor %}}{shown}"


BOMBS = {
    "repeated text": "{{ 'a' * 10**10 }}",
    "a repeated list": "{{ ([0] * 10**10) | length }}",
    "a power": "{{ (7 ** (10 ** 10)) % 2 }}",
    "a format": "{{ '%10000000000d' % 1 }}",
    "a format method": "{{ '{:10000000000}'.format(1) }}",
    "a format filter": "{{ '%010000000000d' | format(1) }}",
    "centred text": "{{ 'a' | center(10**10) }}",
    "a wide indentation": "{{ messages | tojson(indent=10**10) }}",
    "joined lists": "{{ (range(100000) | list | join('a' * 10**6)) | length }}",
    "many bytes": "{{ (1).to_bytes(10**10, 'big') | length }}",
    "doubled text": repeated("{% set ns.x = ns.x + ns.x %}"),
    "text doubled by ~": repeated("{% set ns.x = ns.x ~ ns.x %}"),
    "replaced text": repeated("{% set ns.x = ns.x | replace('a', 'aa') %}"),
    "a list of itself": repeated("{% set ns.x = [ns.x, ns.x] %}"),
    "escapes of escapes": repeated("{% set ns.x = ns.x | tojson %}"),
    "lists in texts": repeated("{% set ns.x = ns.x.split('b') ~ '' %}"),
    "pieces of itself": repeated("{% for p in ns.x.split('b') %}{% set ns.x = ns.x + p %}{% endfor %}"),
    "lists that are compared": repeated(
        "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}", "{{ ns.x == ns.y }}", "'a', y='b'.lower()"
    ).replace("'b'.lower()", "'aa'[1:]"),
    "a doubling macro": "{% macro d(n) %}{% if n %}{{ d(n - 1) }}{{ d(n - 1) }}{% endif %}{% endmacro %}{{ d(60) }}",
    "nested loops": "{% for a in range(100000) %}" * 3 + "{% endfor %}" * 3,
    "a large range": "{% for a in range(10**9) %}{% endfor %}",
}


@pytest.fixture(scope="module")
def tokenizer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "MAX_RENDER_BYTES", 2**27)  # sooner reached
        yield Tokenizer(resolve_model("builtin"))


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return ChatRenderer(original(tokenizer), most_s=0.5)


@pytest.mark.slow_cases("replaced text", "lists in texts", "a doubling macro")
@pytest.mark.parametrize("template", slow_but([*BOMBS.values()][::3], BOMBS.values()), ids=BOMBS)
def test_a_template_that_multiplies_text_is_an_error_of_the_row(renderer, template):
    with pytest.raises(RequestError) as raised:
        renderer.render(CHAT, {"chat_template": template})
    assert raised.value.code == "chat_template_error"


def test_a_template_that_exceeds_a_limit_with_any_chat_is_tried_once(renderer):
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(RequestError, match=r"more than 0\.5 s, even for a one-word chat"):
            renderer.render(CHAT, {"chat_template": BOMBS["nested loops"] + "once"})
        seconds.append(time.monotonic() - started)
    assert seconds[0] > 0.5 > max(seconds[1:])


def test_a_chat_that_exceeds_a_limit_leaves_the_others_as_they_are(tokenizer):
    arguments = {"chat_template": "{{ messages[0].content * (messages[1].content | int(1)) }}"}
    for content, text in (("2", "abab"), (str(10**10), None), ("3", "ababab")):
        chat = [{"role": "system", "content": "ab"}, {"role": "user", "content": content}]
        if text is not None:
            assert tokenizer.render_chat(chat, arguments) == text
            continue
        with pytest.raises(RequestError, match=r"needs more than 128 MiB of memory$"):
            tokenizer.render_chat(chat, arguments)


def test_output_is_bounded(tokenizer):
    chat = [{"role": "user", "content": "a" * 2**23}]
    with pytest.raises(RequestError, match="made over 16,777,216 characters"):
        tokenizer.render_chat(chat, {"chat_template": "{{ messages[0].content * 3 }}"})
    with pytest.raises(RequestError, match="made over 16,777,216 characters"):
        tokenizer.render_chat(chat * 3, {})


def test_the_built_in_template_is_rendered_in_this_process(tokenizer):
    before = psutil.Process().children()
    assert "hi" in ChatRenderer(original(tokenizer)).render(CHAT, {})
    assert set(psutil.Process().children()) <= set(before)


@pytest.mark.parametrize("template", [CHATML, MACRO, "{{ messages[1].content }}{{ messages[0]['\\ud800'] }}"])
@pytest.mark.parametrize(
    "more", [{}, {"tools": TOOLS}, {"continue_final_message": True, "add_generation_prompt": False}]
)
def test_the_second_process_renders_the_same_text(tokenizer, template, more):
    arguments = {"add_generation_prompt": True, "chat_template": template, **more}
    chat = [{**CHAT[0], "\ud800": "\udfff"}, *CHAT[1:]]
    expected = original(tokenizer).apply_chat_template(chat, tokenize=False, **arguments)
    assert tokenizer.render_chat(chat, arguments) == expected


def test_a_killed_template_process_is_replaced(tokenizer):
    arguments = {"chat_template": MACRO}
    text = tokenizer.render_chat(CHAT, arguments)
    tokenizer._renderer._apart._process.kill()
    with pytest.raises(RequestError, match="the process that renders the chat template died"):
        tokenizer.render_chat(CHAT, arguments)
    assert tokenizer.render_chat(CHAT, arguments) == text


def test_a_long_chat_is_rendered_in_the_second_process(tokenizer):
    chat = [{"role": "user", "content": "é" * 2**22}]
    assert tokenizer.render_chat(chat, {"chat_template": "{{ messages[0].content * 2 }}"}) == "é" * 2**23


def test_a_chat_that_cannot_be_sent_leaves_nothing_in_the_pipe(tokenizer):
    nested: object = "end"
    for _ in range(800):  # beyond what pickle takes, found after the long text
        nested = [nested]
    arguments = {"chat_template": MACRO}
    chat = [{"role": "user", "content": "SECRET" * 2**14, "more": nested}]
    with pytest.raises(RequestError, match="nested too deeply"):
        tokenizer.render_chat(chat, arguments)
    for content in ("second", "third"):
        empty = {"role": "user", "content": ""}, {"role": "user", "content": ""}  # pickle refers to the first one's
        text = tokenizer.render_chat([*empty, {"role": "user", "content": content}], arguments)
        assert text.startswith(f"user: \nuser: \nuser: {content}\n")


def test_an_interrupted_request_ends_the_process(tokenizer, monkeypatch):
    def interrupted(reads):
        raise KeyboardInterrupt

    arguments = {"chat_template": MACRO}
    tokenizer.render_chat(CHAT, arguments)
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "_read_frame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokenizer.render_chat(CHAT, arguments)
    text = tokenizer.render_chat([{"role": "user", "content": "next"}], arguments)
    assert text.startswith("user: next\n")  # not the answer to the interrupted one


NULL = """{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}
{{ '<call>' + c.function.arguments }}{% endfor %}{% else %}{{ m.role + ':' + m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (NULL, 'user:Q<call>{"a": 1}'),  # asks for null, and wants JSON
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "Q;;"),  # would write None
        ("{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}", "<Q><>"),  # wants text
        ("{{ messages[1].tool_calls[0].function.arguments.a }}", "1"),  # wants an object
    ],
)
def test_a_call_without_content_is_passed_on_as_the_template_takes_it(tokenizer, template, expected):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = read_messages(
        [{"role": "user", "content": "Q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    )
    assert tokenizer.render_chat(chat, {"chat_template": template}).replace("\n", "") == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", "onetwo"),  # takes parts
        ("{{ messages[0].content + '' }}", "one\ntwo"),  # fails with a list
        ("{{ messages[0].content }}", "one\ntwo"),  # would write the list
        ("{{ messages[0].content | tojson }}", '"one\\ntwo"'),
        ("{{ messages[0].content[0].text }}", ""),  # would leave out the second
    ],
)
def test_text_parts_are_passed_on_as_the_template_takes_them(tokenizer, template, expected):
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    chat = read_messages([{"role": "user", "content": parts}])
    assert tokenizer.render_chat(chat, {"chat_template": template}) == (expected or "one")


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        ("{{ messages[0].content }", "line 1: unexpected '}'"),
        ("a\n{% for m in messages %}{{ m.content | no_such_filter }}{% endfor %}", "line 2: No filter named"),
        ("{% generate %}", "line 1: Encountered unknown tag 'generate'"),
        (BOMBS["repeated text"], "MiB of memory, even for a one-word chat"),
    ],
)
def test_a_template_that_no_chat_can_use_is_refused_before_the_run(template, wrong):
    with pytest.raises(UsageError, match=f"^--chat-template: .*{re.escape(wrong)}"):
        Tokenizer(resolve_model("builtin"), chat_template=template)


def test_a_template_that_takes_other_chats_is_accepted():
    Tokenizer(resolve_model("builtin"), chat_template="{{ raise_exception('no system message') }}")


def test_a_template_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "t.jinja").write_bytes(b"{{ messages }}\xff")
    with pytest.raises(UsageError, match=r"t\.jinja: it is not UTF-8: invalid start byte at byte 14"):
        Tokenizer(resolve_model("builtin"), chat_template=str(tmp_path / "t.jinja"))


@pytest.mark.parametrize("template", ["{{ strftime_now('%d %b %Y') }}", "{{ strftime_now('%d %b %Y') * 1 }}"])
def test_templates_see_the_clock_of_the_run(template):
    tokenizer = Tokenizer(resolve_model("builtin"), chat_template=template)
    tokenizer.stop_clock(datetime(2001, 2, 3))
    assert tokenizer.render_chat(CHAT) == "03 Feb 2001"


def test_a_tokenizer_with_a_rendering_of_its_own_keeps_it():
    hf = original(Tokenizer(resolve_model("builtin")))
    own = {"apply_chat_template": lambda self, messages, **more: f"own {messages[0]['content']}"}
    hf.__class__ = type("Own", (type(hf),), own)
    assert ChatRenderer(hf).render(CHAT, {"chat_template": CHATML}) == "own Be brief."
