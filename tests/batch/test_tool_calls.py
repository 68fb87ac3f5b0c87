"""Tool calls as data: found by the tokens of the chat format, in every form of output."""

import csv
import json
import random
from datetime import date

import openai.types.chat
import pytest
from cli_harness import pagedcli, rows_of, with_keys, write_rows
from conftest import shared_data
from harness.engine import BUILTIN, chain_model, row_of, with_tokens
from transformers import AutoTokenizer
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from pagedcli.batch.stats import Endings
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.batch.tool_calls import ChannelCalls, find_tool_format

NUMBERS = {"days": {"type": "integer"}, "scale": {"type": "number"}, "dry": {"type": "boolean"}}
PROPERTIES = {"city": {"type": "string"}, "extra": {"anyOf": [{"type": "object"}, {"type": "null"}]}, **NUMBERS}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]

TAGS = ("<tool_call>", "</tool_call>")
GLM = (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>')
MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
LLAMA = ("<|python_tag|>", "<|eom_id|>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>")
PARIS = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}
NOW = {"name": "now", "arguments": {}}
JSON = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
HEADER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"

CALLS = [
    # tokens, output, text outside, calls
    (TAGS, f"<tool_call>\n{JSON}\n</tool_call>", "", [PARIS]),  # Qwen 2.5 and 3, Hermes
    (TAGS, f'Let me look.\n<tool_call>\n{JSON}\n</tool_call>\n<tool_call>{{"name":"now"}}</tool_call> So.',
     "Let me look.\nSo.", [PARIS, NOW]),
    (TAGS, '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"}</tool_call>', "",
     [PARIS]),
    (TAGS, "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
     "</function>\n</tool_call>", "", [PARIS]),  # Qwen3-Coder, Qwen3.5
    (TAGS, "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [NOW]),
    (TAGS, "<tool_call><function=weather>\n<parameter=city>\n 2\n\n</parameter>\n<parameter=dry>\nTrue\n</parameter>\n"
     '<parameter=extra>\n{"a": [1]}\n</parameter><parameter=other>\n7\n</parameter></function></tool_call>', "",
     [{"name": "weather", "arguments": {"city": " 2\n", "dry": True, "extra": {"a": [1]}, "other": "7"}}]),
    (GLM, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>2</arg_value>\n</tool_call>", "", [PARIS]),  # GLM-4.5 and later
    (GLM, "Now?\n<tool_call>now\n</tool_call>", "Now?", [NOW]),
    (GEMMA, 'Hm.<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>', "Hm.", [PARIS]),
    (GEMMA, '<|tool_call>call:weather{city:<|"|>a: "b", {c}\\<|"|>,extra:{on:true,l:[1.5,<|"|>x<|"|>,null]}}'
     "<tool_call|><|tool_call>call:now{}<tool_call|>", "",
     [{"name": "weather", "arguments": {"city": 'a: "b", {c}\\', "extra": {"on": True, "l": [1.5, "x", None]}}}, NOW]),
    (GEMMA, "<|tool_call>call:f{a:None,b:[True,False,null],c:['a, b','it\\'s \"x\"'],d:\"q\"}<tool_call|>", "",
     [{"name": "f", "arguments": {"a": None, "b": [True, False, None], "c": ["a, b", "it's \"x\""], "d": "q"}}]),
    (MISTRAL, f'Yes.[TOOL_CALLS][{JSON}, {{"name": "now", "arguments": {{}}, "id": "abcdefghi"}}]', "Yes.",
     [PARIS, NOW]),
    (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[CALL_ID]abc123xyz[ARGS]{}', "",
     [PARIS, NOW]),
    (MISTRAL[:1], '[TOOL_CALLS]weather{"city": "Paris", "days": 2}', "", [PARIS]),
    (LLAMA, '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 2}}; {"name": "now"}<|eom_id|>',
     "", [PARIS, NOW]),
    (LLAMA, '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}', "", [PARIS]),
    (LLAMA, '[weather(city="Paris", days=2), now()]', "", [PARIS, NOW]),
    (LLAMA, '<|python_tag|>brave_search.call(query="rain")', "",
     [{"name": "brave_search", "arguments": {"query": "rain"}}]),
    (LLAMA, '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', None),  # an answer, not a call
    (LLAMA, '{"Paris": [2]}', '{"Paris": [2]}', None),
    (LLAMA, "now (it rains)", "now (it rains)", None),
    (HARMONY, "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
     f'{HEADER}{{"city":"Paris","days":2}}<|call|>', "", [PARIS]),
    (HARMONY, "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
     f'<|end|><|start|>assistant{HEADER}{{"city":"Paris","days":2}}<|call|>', "I look.", [PARIS]),  # a preamble
    (HARMONY, '<|channel|>analysis to=functions.weather <|constrain|>json<|message|>{"city":"Paris","days":2}<|call|>',
     "", [PARIS]),
    (HARMONY, "<|channel|>commentary to=assistant<|message|>{}<|end|>", "{}", None),  # a result, not a call
    (HARMONY, "<|channel|>final<|message|>So.<|end|><|start|>assistant to=functions.now"
     "<|channel|>commentary<|message|>", "So.", [NOW]),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer_with(tmp_path_factory):
    known = {}

    def tokenizer(tokens, special=True):
        if (tokens, special) not in known:
            folder = tmp_path_factory.mktemp("tokens")
            known[tokens, special] = Tokenizer(with_tokens(folder, list(tokens), special=special))
        return known[tokens, special]

    return tokenizer


@pytest.mark.parametrize("special", [True, False])  # special tokens are not in the text
@pytest.mark.parametrize(("tokens", "output", "text", "calls"), CALLS)
def test_calls_become_data_and_the_text_is_what_stands_outside(tokenizer_with, tokens, output, text, calls, special):
    if not special and output.endswith("<|eom_id|>"):
        output = output.removesuffix("<|eom_id|>")
    row = row_of(tokenizer_with(tokens, special), "Hi\n<|start|>assistant", output, tools=TOOLS)
    assert (row["text"], row.get("tool_calls")) == (text, calls)
    assert row["finish_reason"] == "stop"


BROKEN = [
    (TAGS, '<tool_call>{"name": "weather", "arguments": {"city": </tool_call>', "truncated"),
    (TAGS, f"<tool_call>{JSON}", "the call has no end"),
    (TAGS, "<tool_call>{}</tool_call>", "a JSON value without a name"),
    (TAGS, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "the arguments are not an object"),
    (TAGS, "<tool_call><function=f><parameter=a>1</function></tool_call>", "is not an argument"),
    (TAGS, "<tool_call><function=f></tool_call>", "neither JSON nor a name with arguments"),
    (TAGS, "<tool_call>two words</tool_call>", "neither JSON nor a name with arguments"),
    (GEMMA, "<|tool_call>weather{}<tool_call|>", "not of the form call:NAME{...}"),
    (GEMMA, "<|tool_call>call:f{a:b c}<tool_call|>", "JSON is malformed"),
    (MISTRAL, "[TOOL_CALLS][1]", "a JSON value without a name"),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a"', "truncated"),
    (LLAMA, "<|python_tag|>import os", "neither JSON nor calls with named arguments"),
    (LLAMA, "<|python_tag|>f(1)", "neither JSON nor calls with named arguments"),
    (LLAMA, "<|python_tag|>f(a=1j)", "not a JSON value"),
    (LLAMA, "<|python_tag|>f(a={[]: 1})", "not a JSON value"),
    (LLAMA, "<|python_tag|>f(a={(1, 2): 3})", "not a JSON value"),
    (LLAMA, "<|python_tag|>f(a=1, a=2)", "two of one name"),
    (LLAMA, "<|python_tag|>f(a=" + "-" * 9999 + "1)", ""),
    (TAGS, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', "the call has no end"),
    (TAGS, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "truncated"),
    (GEMMA, "<|tool_call>call:f{a:'b}<tool_call|>", "truncated"),
    (LLAMA, "<|python_tag|>f(" + "(" * 9999, ""),
    (TAGS, '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 99999 + "</tool_call>", ""),
    (HARMONY, f"{HEADER}(1)<|call|>", "JSON is malformed"),
]


def test_rows_with_tools_are_counted_by_whether_they_have_a_call(tokenizer_with):
    ended, tokenizer = Endings(), tokenizer_with(TAGS)
    for output, tools, shape in (
        (f"<tool_call>{JSON}</tool_call>", TOOLS, "chat.completion"),
        ("No.", TOOLS, "plain"),
        ("No.", None, "plain"),
    ):
        row_of(tokenizer, "Hi\n<|start|>assistant", output, tools=tools, shape=shape, ended=ended)
    assert ended.tool_rows == {True: 1, False: 1}
    assert ended.reasons == {"tool_calls": 1, "stop": 2}


@pytest.mark.slow_cases("tokens22-*")
@pytest.mark.parametrize(("tokens", "output", "reason"), BROKEN)
def test_what_is_no_call_stays_as_text_with_the_reason(tokenizer_with, tokens, output, reason):
    tokenizer = tokenizer_with(tokens)
    (call,) = row_of(tokenizer, "Hi\n<|start|>assistant", output, tools=TOOLS)["tool_calls"]
    assert set(call) == {"text", "error"}
    assert reason in call["error"]
    assert call["error"]
    assert call["text"]
    assert call["text"] in output
    choice = row_of(tokenizer, "Hi\n<|start|>assistant", output, tools=TOOLS, shape="chat.completion")
    (told,) = choice["response"]["body"]["choices"][0]["message"]["tool_calls"]
    assert (told["function"], told["error"]) == ({"name": "", "arguments": call["text"]}, call["error"])


VALUES = [
    *("", " ", "Paris", "a 'b' \"c\"", "back\\slash \\n", "two\nlines", "\n\nends\n", "\ttab", "café 世界 🙂"),
    *("5", "true"),
    *("null", "None", '{"a": 1}', "[1]", "it's; {", "a:b,c", "</tool_call>", "x <tool_call> y </tool_call> z"),
    *("it ends </tool_call>\n</tool_call>", "<tool_call|>", "[TOOL_CALLS]f[ARGS]{}", "[ARGS]", "<|python_tag|>"),
    *("</parameter>", "a</arg_value>b", "</function>", "<think>", 0, -5, 12345678901234567890, 1.5, -2e-07, 1e30, True),
    *(False, None, [], {}, [1, "a", None, True], ["a, b", "c"]),
    {"b": {"c": [1, {"d": "e </tool_call> f"}]}, "x y": "it's"},
]
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
SCHEMAS = {kind: {"type": name} for kind, name in KINDS.items()}
SCHEMAS[type(None)] = {"anyOf": [{"type": "object"}, {"type": "null"}]}
TEMPLATES = [
    *((TAGS, name) for name in ("MiMo-VL", "Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Reka-Edge")),
    *((TAGS, name) for name in ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "ibm-granite-granite-4.0")),
    *((TAGS, name) for name in ("ibm-granite-granite-4.1", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Coder")),
    *((TAGS, name) for name in ("StepFun3.5-Flash", "stepfun-ai-Step-3.5-Flash")),
    *((GLM, "GLM-4.6"), (GEMMA, "google-gemma-4-31B-it-interleaved")),
    *((MISTRAL, name) for name in ("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407")),
    (MISTRAL, "mistralai-Ministral-3-14B-Reasoning-2512"),
    (MISTRAL, "unsloth-mistral-Devstral-Small-2507"),
    *((LLAMA, name) for name in ("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct")),
]  # fmt: skip


def rendered_call(hf, template, tokens, arguments, tools):
    """A call as a published template writes it, without what stands around it."""
    chat = [{"role": "user", "content": "Hi"}]
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chats = (chat, [*chat, {"role": "assistant", "content": "", "tool_calls": [call]}])
    before, text = (hf.apply_chat_template(each, chat_template=template, tools=tools, tokenize=False) for each in chats)
    if tokens == LLAMA:
        return text[text.rindex('{"name": "f"') :].removesuffix("<|eot_id|>")
    text = text[next(i for i in range(len(text)) if not before.startswith(text[: i + 1])) :]
    text = text[text.index(tokens[0]) :]
    return text.removesuffix(hf.eos_token) if tokens == MISTRAL else text[: text.rindex(tokens[1])] + tokens[1]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("tokens", "name"), TEMPLATES)
def test_calls_that_published_templates_write_are_read_back(tokenizer_with, tokens, name, special):
    template = (shared_data("templates") / f"{name}.jinja").read_text()
    tokenizer = tokenizer_with(tokens, special)
    hf = AutoTokenizer.from_pretrained(tokenizer.folder)
    for value in VALUES:
        schema = {"type": "object", "properties": {"value": SCHEMAS[type(value)] | {"description": "any"}}}
        tools = [{"type": "function", "function": {"name": "f", "description": "none", "parameters": schema}}]
        output = rendered_call(hf, template, tokens, {"value": value}, tools)
        row = row_of(tokenizer, "Hi\n", output, tools=tools)
        assert (row["text"], row["tool_calls"]) == ("", [{"name": "f", "arguments": {"value": value}}]), output


AMBIGUOUS = [
    # what a template writes without quotes: the same text as of another call
    ("Qwen3-Coder", TAGS, "a\n</parameter>\n<parameter=b>\nc", "two arguments"),
    ("Qwen3-Coder", TAGS, "a\n</parameter>\n</function>\n</tool_call>", "a call that ends there"),
    ("GLM-4.6", GLM, "a</arg_value>\n</tool_call>", "a call that ends there"),
    ("google-gemma-4-31B-it-interleaved", GEMMA, 'a<|"|>,b:<|"|>c', "two arguments"),
]


@pytest.mark.parametrize(("name", "tokens", "value", "reading"), AMBIGUOUS)
def test_what_a_template_cannot_tell_apart_gives_a_row_all_the_same(tokenizer_with, name, tokens, value, reading):
    template = (shared_data("templates") / f"{name}.jinja").read_text()
    tokenizer = tokenizer_with(tokens)
    tools = [{"type": "function", "function": {"name": "f", "description": "none", "parameters": {"type": "object"}}}]
    hf = AutoTokenizer.from_pretrained(tokenizer.folder)
    call = row_of(tokenizer, "Hi\n", rendered_call(hf, template, tokens, {"v": value}, tools), tools=tools)[
        "tool_calls"
    ][0]
    assert ("b" in call["arguments"]) == (reading == "two arguments")
    assert call["arguments"]["v"] == "a"


PLACE = {"type": "object"}
SCHEMA = {
    "$defs": {"Place": PLACE, "Level": {"type": "integer"}, "Again": {"$ref": "#/$defs/Place"}, "a/b": PLACE,
              "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]}},
    "allOf": [{"properties": {"inherited": {"type": "integer"}}}],
}  # fmt: skip
TYPED = [
    # a parameter's schema, its text, the argument
    ({"$ref": "#/$defs/Place"}, '{"zip": "1"}', {"zip": "1"}),
    ({"$ref": "#/$defs/Again"}, '{"zip": "1"}', {"zip": "1"}),
    ({"$ref": "#/$defs/a~1b"}, '{"zip": "1"}', {"zip": "1"}),
    ({"$ref": "#/$defs/Level"}, "2", 2),
    ({"$ref": "#/$defs/Loop"}, "2", 2),
    ({"$ref": "#/$defs/Nothing"}, "2", "2"),
    ({"$ref": "elsewhere.json#/a"}, "2", "2"),
    ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, "None", None),
    ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, '{"zip": "1"}', {"zip": "1"}),
    ({"allOf": [{"$ref": "#/$defs/Place"}]}, '{"zip": "1"}', {"zip": "1"}),
    ({"type": ["string", "integer"], "allOf": [{"type": "string"}]}, "2", "2"),
    ({"type": "number", "allOf": [{"type": "integer"}]}, "2", 2),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": ["1", "2"]}, "2", "2"),
    ({"const": True}, "true", True),
    ({"type": "integer"}, "2.0", 2.0),
    ({"type": "integer"}, "2.5", "2.5"),
    ({"enum": [date(2020, 1, 1)], "allOf": [{"$ref": "#"}] * 3}, "2", "2"),  # a date as YAML reads it
    ({"const": date(2020, 1, 1)}, "2", "2"),
    ({"type": 5, "anyOf": 5, "enum": "2", "$ref": 2}, "2", "2"),
    (None, "2", "2"),
]


@pytest.mark.parametrize(("schema", "text", "argument"), TYPED)
def test_arguments_have_the_types_that_the_schema_names_anywhere(tokenizer_with, schema, text, argument):
    parameters = SCHEMA | {"properties": {"p": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    inner = f"<parameter=p>{text}</parameter><parameter=inherited>3</parameter>"
    output = f"<tool_call><function=f>{inner}</function></tool_call>"
    (call,) = row_of(tokenizer_with(TAGS), "Hi\n", output, tools=tools)["tool_calls"]
    assert call["arguments"] == {"p": argument, "inherited": 3}
    assert type(call["arguments"]["p"]) is type(argument)


def test_a_schema_whose_references_multiply_takes_no_time(tokenizer_with):
    schemas = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)}
    parameters = {"$defs": schemas, "properties": {"p": {"$ref": "#/$defs/0"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    output = "<tool_call><function=f><parameter=p>2</parameter></function></tool_call>"
    (call,) = row_of(tokenizer_with(TAGS), "Hi\n", output, tools=tools)["tool_calls"]
    assert call["arguments"] == {"p": "2"}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "gemma4"])
def test_the_calls_are_those_that_transformers_reads(tokenizer_with, kind):
    template = next(each for types, each in _RESPONSE_TEMPLATE_FALLBACKS.items() if kind in types)
    wanted = {"qwen3": TAGS, "qwen3_5": TAGS, "gemma4": GEMMA}[kind]
    opening = {"qwen3": "{", "qwen3_5": "<function=weather", "gemma4": "call:weather"}[kind]
    outputs = [each[1] for each in CALLS if each[0] == wanted and opening in each[1][:60].replace('{"name":"now"', "")]
    outputs = [each for each in outputs if "other" not in each and '"{' not in each and " 2\n" not in each]
    assert outputs
    for output in outputs:
        reference = parse_response(output, template, prefix="", tools=TOOLS)
        row = row_of(tokenizer_with(wanted), "Hi\n", output, tools=TOOLS)
        functions = [call["function"] for call in reference["tool_calls"]]
        assert row["tool_calls"] == [{"name": f["name"], "arguments": f.get("arguments", {})} for f in functions]


def test_an_openai_row_has_openais_calls(tokenizer_with):
    output = f'Look.<tool_call>{JSON}</tool_call><tool_call>{{"name": "now"}}</tool_call>'
    row = row_of(tokenizer_with(TAGS), "Hi\n", output, JSON, tools=TOOLS, shape="chat.completion")
    first, second = openai.types.chat.ChatCompletion.model_validate(row["response"]["body"], strict=True).choices
    assert (first.finish_reason, first.message.content) == ("tool_calls", "Look.")
    calls = first.message.tool_calls
    assert [(each.function.name, json.loads(each.function.arguments)) for each in calls] == [
        ("weather", PARIS["arguments"]),
        ("now", {}),
    ]
    assert len({each.id for each in calls}) == 2
    assert (second.finish_reason, second.message.tool_calls, second.message.content) == ("stop", None, JSON)
    only = row_of(tokenizer_with(TAGS), "Hi\n", f"<tool_call>{JSON}</tool_call>", tools=TOOLS, shape="chat.completion")
    assert only["response"]["body"]["choices"][0]["message"]["content"] is None


def test_nothing_is_read_without_tools_or_marks_or_outside_a_chat(tokenizer_with):
    output = f"<tool_call>{JSON}</tool_call>"
    tokenizer = tokenizer_with(TAGS, False)
    for given in ({"tools": None}, {"tools": []}, {"tools": TOOLS, "has_marks": False}):
        assert row_of(tokenizer, "Hi\n", output, **given)["text"] == output
    left = row_of(tokenizer, "Hi\n", output, tools=TOOLS, parse_tool_calls=False)
    assert (left["text"], left.get("tool_calls")) == (output, None)
    assert row_of(Tokenizer(BUILTIN), "Hi\n", output, tools=TOOLS)["text"] == output
    assert find_tool_format(Tokenizer(BUILTIN)) is None


def test_calls_follow_reasoning_and_a_stop_string_cuts_the_text(tokenizer_with):
    tokenizer = tokenizer_with(("<think>", "</think>", *TAGS), False)
    output = f"<think>\n<tool_call>no</tool_call>\n</think>\n\nWell.\n<tool_call>\n{JSON}\n</tool_call>"
    row = row_of(tokenizer, "Hi\n", output, tools=TOOLS)
    assert row["reasoning_content"] == "<tool_call>no</tool_call>"
    assert (row["text"], row["tool_calls"]) == ("Well.", [PARIS])
    cut = row_of(tokenizer, "Hi\n", f"Oh <tool_call>{JSON}</tool_call> and more", tools=TOOLS, stop=" mo")
    assert (cut["text"], cut["tool_calls"]) == ("Oh\nand", [PARIS])


def test_a_call_ends_an_open_reasoning_of_a_row_with_tools(tokenizer_with):
    tokenizer = tokenizer_with(("<think>", "</think>", *TAGS), False)
    call = f"<tool_call>\n{JSON}\n</tool_call>"
    for prompt, output in (("Hi<think>\n", f"Hm.\n{call} So."), ("Hi\n", f"<think>Hm.\n{call} So.")):
        row = row_of(tokenizer, prompt, output, tools=TOOLS)
        assert (row["reasoning_content"], row["text"], row["tool_calls"]) == ("Hm.", "So.", [PARIS])
        none = row_of(tokenizer, prompt, output)
        assert (none["reasoning_content"], none["text"]) == (f"Hm.\n{call} So.", "")


def test_harmony_needs_its_channels(tokenizer_with):
    assert isinstance(find_tool_format(tokenizer_with(HARMONY)), ChannelCalls)
    row = row_of(tokenizer_with(HARMONY), "Hi<|start|>assistant", f"{HEADER}{{}}<|call|>", tools=None)
    assert row["text"].startswith("commentary to=functions.weather")


# ---------------------------------------------------------------------- a model that calls

TEMPLATE = "{% if tools %}Tools{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}Look"
CHAT = [{"role": "user", "content": "Rain?"}]
LINES = [
    {"id": "chat", "messages": CHAT, "tools": TOOLS},
    {"id": "bare", "messages": CHAT},
    {"custom_id": "openai", "method": "POST", "url": "/v1/chat/completions",
     "body": {"messages": CHAT, "tools": TOOLS, "n": 2}},
    {"id": "short", "messages": CHAT, "tools": TOOLS, "max_tokens": 2},
    {"id": "none", "messages": CHAT, "tools": TOOLS, "tool_choice": "none"},
]  # fmt: skip
FLAGS = ("--max-tokens", "8", "--num-kvcache-blocks", "128", "--dtype", "float32")


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A model that answers each prompt, which ends with a word of its own, with a call."""
    folder = with_tokens(tmp_path_factory.mktemp("caller"), ["Look", *TAGS, JSON], template=TEMPLATE)
    return chain_model(folder, ["Look", TAGS[0], JSON, TAGS[1]])


@pytest.fixture(scope="module")
def arguments(caller, tmp_path_factory):
    return ("generate", write_rows(tmp_path_factory.mktemp("rows") / "in.jsonl", LINES), "-m", caller, *FLAGS)


def test_rows_of_a_model_that_calls(arguments):
    chat, bare, api, short, none = rows_of(pagedcli(*arguments).stdout)
    whole = f"<tool_call>{JSON}</tool_call>"
    assert (chat["text"], chat["tool_calls"], chat["finish_reason"]) == ("", [PARIS], "stop")
    assert (bare["text"], "tool_calls" in bare) == (whole, False)
    assert (none["text"], "tool_calls" in none) == (whole, False)
    assert [choice["finish_reason"] for choice in api["response"]["body"]["choices"]] == ["tool_calls"] * 2
    assert (short["tool_calls"][0]["error"], short["finish_reason"]) == ("the call has no end", "length")
    again = rows_of(pagedcli(*arguments, "--tools", json.dumps(TOOLS)).stdout)
    assert again[1]["tool_calls"] == [PARIS]


def test_tables_have_a_column_for_calls_only_if_a_row_has_them(arguments, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("out.csv", "out.parquet"):
        pagedcli(*arguments, "-o", tmp_path / name)
        pagedcli(*arguments, "-o", tmp_path / f"no-{name}", *with_keys(tmp_path, run__parse_tool_calls=False))
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [json.loads(line["tool_calls"] or "[]") for line in table[:2]] == [[PARIS], []]
    first, second, two, *_ = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert (json.loads(first["tool_calls"]), second["tool_calls"]) == ([PARIS], None)
    assert [json.loads(each["tool_calls"])[0]["function"]["name"] for each in two["outputs"]] == ["weather"] * 2
    assert "tool_calls" not in (tmp_path / "no-out.csv").read_text().partition("\n")[0]
    assert "tool_calls" not in parquet.read_table(tmp_path / "no-out.parquet").column_names


def test_templates_get_the_arguments_of_earlier_calls_as_objects(arguments, caller, tmp_path):
    def messages(given):
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": given}}
        return [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]

    objects, texts = messages({"city": "Paris"}), messages('{"city": "Paris"}')
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in (objects, texts)))
    (tmp_path / "t.jinja").write_text("{{ messages[-1].tool_calls[0].function.arguments | tojson }}Look")
    rows = rows_of(pagedcli("generate", tmp_path / "in.jsonl", *arguments[2:], "--chat-template", tmp_path / "t.jinja",
                            "--reorder", "none").stdout)  # fmt: skip
    counts = [row["usage"]["prompt_tokens"] for row in rows]
    assert counts == [len(Tokenizer(caller).encode('{"city": "Paris"}Look', add_special_tokens=False))] * 2


def test_compared_files_differ_where_a_call_does(arguments, tmp_path):
    pagedcli(*arguments, "-o", tmp_path / "a.jsonl")
    pagedcli(*arguments, "-o", tmp_path / "b.jsonl", "--verify", "3")
    pagedcli("verify", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    changed = (tmp_path / "b.jsonl").read_text().replace('"city":"Paris"', '"city":"Parma"', 1)
    (tmp_path / "b.jsonl").write_text(changed)
    said = pagedcli("verify", tmp_path / "a.jsonl", tmp_path / "b.jsonl", expect=1)
    assert "Par|is" in said.stdout + said.stderr


def test_rows_with_other_tools_are_not_equal(arguments, caller, tmp_path):
    other = [{"type": "function", "function": {"name": "now"}}]
    write_rows(tmp_path / "in.jsonl", [{"messages": CHAT, "tools": tools} for tools in (TOOLS, TOOLS, other)])
    (tmp_path / "t.jinja").write_text("{% if tools %}Rain{% endif %}Look")
    said = pagedcli("generate", tmp_path / "in.jsonl", *arguments[2:], "--chat-template", tmp_path / "t.jinja",
                    "--deduplicate", "--all").stderr  # fmt: skip
    assert "1 row with the answers of an equal one" in said


def mutated(text, others, choose):
    """A text cut short, with a piece twice, out or replaced by one of another text, or wholly within another."""
    start, end = sorted(choose.randrange(len(text) + 1) for _ in range(2))
    other = choose.choice(others)
    piece = other[choose.randrange(len(other)) :]
    kinds = [text[:end], text[:end] + text[start:], text[:start] + text[end:], text[:start] + piece + text[end:]]
    return choose.choice([*kinds, text[:start] + other + text[start:]])


def test_300_mutated_calls_give_rows(tokenizer_with):
    choose, outputs = random.Random(60), [(tokens, output) for tokens, output, *_ in CALLS]
    for _ in range(300):
        tokens, output = choose.choice(outputs)
        others = [text for kind, text in outputs if kind == tokens]
        for _ in range(choose.randint(1, 3)):
            output = mutated(output, others, choose) or output
        row = row_of(tokenizer_with(tokens, choose.random() < 0.5), "Hi\n<|start|>assistant", output, tools=TOOLS)
        assert tokens not in (TAGS, GEMMA) or tokens[0] not in row["text"], output
        for call in row.get("tool_calls", ()):
            assert set(call) in ({"name", "arguments"}, {"text", "error"}), output
            assert isinstance(call.get("arguments", {}), dict), output


@pytest.mark.parametrize(
    ("tokens", "piece"),
    [
        (TAGS, "<tool_call>"),
        (TAGS, "<tool_call></tool_call>"),
        (TAGS, '<tool_call>{"a": "</tool_call>'),
        (TAGS, "<tool_call><function=f><parameter=a>"),
        (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>"),
        (GEMMA, "<|tool_call>call:f{'\\'a:<tool_call|>"),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": "'),
        (LLAMA, "<|python_tag|>f(a=("),
        (HARMONY, HEADER),
    ],
)
def test_an_output_of_nothing_but_marks_gives_a_row(tokenizer_with, tokens, piece):
    tokenizer = tokenizer_with(tokens)
    row = row_of(tokenizer, "Hi\n<|start|>assistant", piece * (2000 // len(tokenizer.encode(piece))), tools=TOOLS)
    assert row["error"] is None
