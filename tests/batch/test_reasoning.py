"""Reasoning apart from the answer: found by the tokens of the chat format, in every form of output."""

import csv
import json

import pytest
from cli_harness import pagedcli, rows_of, with_keys
from harness.engine import BUILTIN, chain_model, row_of, with_tokens

from pagedcli.batch.parquet import ParquetRows
from pagedcli.batch.reasoning import find_format
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.tokenizer import Tokenizer

HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
BEGUN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def think(tmp_path_factory):
    return Tokenizer(with_tokens(tmp_path_factory.mktemp("think"), ["<think>", "</think>"]))


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    return Tokenizer(with_tokens(tmp_path_factory.mktemp("harmony"), HARMONY, special=True))


def parts(row):
    return row.get("reasoning_content"), row["text"]


THINKS = [
    # prompt, output, reasoning, answer
    ("Hi\n", "<think>\nTwo and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    ("Hi\n", "\n<think>Two</think>Four </think>", "Two", "Four </think>"),
    ("Hi<think>\n", "Two and two.\n</think>\n\nFour.", "Two and two.", "Four."),  # the template has begun it
    ("Hi<think>\n", "Two and", "Two and", ""),  # cut off by max_tokens
    ("Hi\n", "<think>Two", "Two", ""),
    ("Hi\n", "<think>\n\n</think>\n\nFour.", "", "Four."),
    ("Hi<think>\n\n</think>\n\n", "Four.", None, "Four."),  # the template has left it out
    ("Hi\n", "Two and two.\n</think>\n\nFour. </think>", "Two and two.", "Four. </think>"),  # no mark begins it
    ("Is <think> a mark?\n", "Yes\n", None, "Yes\n"),
    ("Hi\n", "It <think>s.</think>", None, "It <think>s.</think>"),
    ("Hi\n", "\nFour <think>.", None, "\nFour <think>."),
]


@pytest.mark.parametrize(("prompt", "output", "reasoning", "answer"), THINKS)
def test_reasoning_between_brackets(think, prompt, output, reasoning, answer):
    row = row_of(think, prompt, output)
    assert parts(row) == (reasoning, answer)
    assert ("completion_tokens_details" in row["usage"]) == (reasoning is not None)


@pytest.mark.parametrize(
    ("marks", "output"),
    [
        (["[THINK]", "[/THINK]"], "[THINK]Two[/THINK]Four."),
        (["<seed:think>", "</seed:think>"], "<seed:think>Two</seed:think>Four."),
        (["<|channel>", "<channel|>"], "<|channel>thought\nTwo<channel|>Four."),
    ],
)
@pytest.mark.parametrize("special", [False, True])  # special tokens are not in the text
def test_other_brackets(marks, output, special, tmp_path):
    tokenizer = Tokenizer(with_tokens(tmp_path, marks, special=special))
    assert parts(row_of(tokenizer, "Hi\n", output)) == ("Two", "Four.")


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALLS = "<|channel|>commentary to=functions.f<|message|>(1)<|call|>"
CHANNELS = [
    (f"Hi{NEXT}", f"{ANALYSIS}Two{NEXT}{FINAL}Four.<|return|>", "Two", "Four."),
    (f"Hi{NEXT}", f"{FINAL}Four.<|return|>", "", "Four."),
    (f"Hi{NEXT}", f"{ANALYSIS}Two and", "Two and", ""),
    (f"Hi{NEXT}", "<|channel|>analysis", "", ""),
    (f"Hi{NEXT}{ANALYSIS}", f"Two{NEXT}{FINAL}Four.<|return|>", "Two", "Four."),
    (f"Hi{NEXT}", f"{ANALYSIS}One{NEXT}{ANALYSIS}Two{NEXT}{FINAL}Four.", "One\nTwo", "Four."),
    (f"Hi{NEXT}", f"{ANALYSIS}Look{NEXT}{CALLS}", "Look", "commentary to=functions.f(1)"),
    (f"Hi{NEXT}", "Four.", None, "Four."),
]


@pytest.mark.parametrize(("prompt", "output", "reasoning", "answer"), CHANNELS)
def test_reasoning_in_a_channel_of_its_own(harmony, prompt, output, reasoning, answer):
    assert parts(row_of(harmony, prompt, output)) == (reasoning, answer)


@pytest.mark.parametrize(("stop", "reasoning", "answer"), [("o a", "Tw", ""), ("ur", "Two and two.", "Fo")])
def test_a_stop_string_cuts_the_part_that_it_ends(think, harmony, stop, reasoning, answer):
    brackets = "<think>\nTwo and two.\n</think>\n\nFour."
    channels = f"{ANALYSIS}Two and two.<|end|><|start|>assistant{FINAL}Four.<|return|>"
    assert parts(row_of(think, "Hi\n", brackets, stop=stop)) == (reasoning, answer)
    assert parts(row_of(harmony, "<|start|>assistant", channels, stop=stop)) == (reasoning, answer)


def test_each_sample_has_its_own_and_usage_counts_all(think):
    row = row_of(think, "Hi\n", "<think>Two</think>Four.", "Five.", "<think>Three</think>Six.")
    assert [parts(sample) for sample in row["outputs"]] == [("Two", "Four."), (None, "Five."), ("Three", "Six.")]
    expected = sum(len(think.encode(text)) for text in ("Two", "Three"))
    assert row["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    dropped = row_of(think, "Hi\n", "<think>Two</think>Four.", keep_reasoning=False)
    assert parts(dropped) == (None, "Four.")
    assert dropped["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(think.encode("Two"))}


def test_without_marks_in_the_vocabulary_or_outside_a_chat_nothing_changes(think, harmony):
    assert find_format(Tokenizer(BUILTIN)) is None
    text = "<think>Two</think>Four."
    assert parts(row_of(think, "Hi\n", text, has_marks=False)) == (None, text)
    assert parts(row_of(Tokenizer(BUILTIN), "Hi\n", text)) == (None, text)
    assert parts(row_of(harmony, "Hi\n", text)) == (None, text)


# ---------------------------------------------------------------------- a model that reasons

REASONING, ANSWER = ("Two", " and", " more"), ("Four", " cats")
NUM_REASONING = sum(len(Tokenizer(BUILTIN).encode(word)) for word in REASONING)


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory):
    """A model whose next token depends on the last one alone: <think>, three words, </think>, two words, the end."""
    folder = with_tokens(tmp_path_factory.mktemp("reasoner"), ["<think>", "</think>"], template=BEGUN + "<think>")
    return chain_model(folder, ["<think>", *REASONING, "</think>", *ANSWER])


CHAT = [{"role": "user", "content": "How many cats?"}]
LINES = [
    {"id": "chat", "messages": CHAT},
    {"id": "raw", "prompt": "How many cats?<think>"},
    {"custom_id": "openai", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT, "n": 2}},
    {"id": "short", "messages": CHAT, "max_tokens": NUM_REASONING - 1},
    {"id": "stop", "messages": CHAT, "stop": "ur"},
    {"id": "special", "messages": CHAT, "skip_special_tokens": False},
    {"id": "grammar", "messages": CHAT, "regex": "Four cats"},
]
FLAGS = ("--max-tokens", "16", "--num-kvcache-blocks", "64", "--dtype", "float32")
WHOLE = "".join((*REASONING, "</think>", *ANSWER))


@pytest.fixture(scope="module")
def generated(reasoner, tmp_path_factory):
    """The rows of LINES, and the arguments that made them."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    arguments = ("generate", folder / "in.jsonl", "-m", reasoner, *FLAGS)
    pagedcli(*arguments, "-o", folder / "out.jsonl")
    return rows_of(folder / "out.jsonl"), arguments, folder


def test_rows_of_a_model_that_reasons(generated):
    chat, raw, openai, short, stop, special, grammar = generated[0]
    reasoning, answer = "".join(REASONING), "".join(ANSWER)
    assert parts(chat) == (reasoning, answer)
    assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == NUM_REASONING
    assert parts(raw) == (None, WHOLE)
    assert "completion_tokens_details" not in raw["usage"]
    body = openai["response"]["body"]
    messages = [choice["message"] for choice in body["choices"]]
    expected = {"role": "assistant", "content": answer, "reasoning_content": reasoning, "refusal": None}
    assert messages == [expected, expected]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * NUM_REASONING
    assert (short["text"], short["finish_reason"]) == ("", "length")
    assert reasoning.startswith(short["reasoning_content"])
    assert short["usage"]["completion_tokens_details"]["reasoning_tokens"] == NUM_REASONING - 1
    assert (*parts(stop), stop["stop_reason"]) == (reasoning, "Fo", "ur")
    assert parts(special)[0] is None
    assert special["text"].startswith(WHOLE)
    assert parts(grammar) == (None, "Four cats")


def test_dropped_reasoning_changes_nothing_else(generated, tmp_path):
    rows, arguments, _ = generated
    pagedcli(*arguments, "-o", tmp_path / "out.jsonl", *with_keys(tmp_path, run__keep_reasoning=False))
    for kept, dropped in zip(rows, rows_of(tmp_path / "out.jsonl"), strict=True):
        if "response" in kept:
            for choice in kept["response"]["body"]["choices"]:
                del choice["message"]["reasoning_content"]
            kept, dropped = kept["response"]["body"]["choices"], dropped["response"]["body"]["choices"]
        else:
            kept = {name: value for name, value in kept.items() if name != "reasoning_content"}
        assert dropped == kept


def test_tables_have_columns_for_it_only_if_a_row_has_it(generated, tmp_path):
    rows, arguments, _ = generated
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("out.csv", "out.parquet"):
        pagedcli(*arguments, "-o", tmp_path / name)
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert (table[0]["reasoning_content"], table[0]["text"]) == parts(rows[0])
    assert [line["reasoning_tokens"] for line in table[:3]] == [str(NUM_REASONING), "", str(2 * NUM_REASONING)]
    first, _, two, *_ = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert parts(first) == parts(rows[0])
    assert [parts(sample) for sample in two["outputs"]] == [parts(rows[0])] * 2
    assert first["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_REASONING}
    (tmp_path / "raw.jsonl").write_text(json.dumps(LINES[1]) + "\n")
    for name in ("raw.csv", "raw.parquet"):
        pagedcli("generate", tmp_path / "raw.jsonl", *arguments[2:], "-o", tmp_path / name)
    assert "reasoning" not in (tmp_path / "raw.csv").read_text().partition("\n")[0]
    names = parquet.read_table(tmp_path / "raw.parquet").column_names
    assert "reasoning_content" not in names


def test_compared_files_differ_where_it_does(generated, tmp_path):
    _, _, folder = generated
    changed = (folder / "out.jsonl").read_text().replace("Two and more", "Two and mere", 1)
    (tmp_path / "changed.jsonl").write_text(changed)
    said = pagedcli("verify", folder / "out.jsonl", tmp_path / "changed.jsonl", expect=1)
    assert "m|ere" in said.stdout + said.stderr


def test_equal_rows_share_answers_but_only_chats_have_reasoning(reasoner, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [LINES[0], LINES[1]] * 2)
                                       .replace('"id": "chat", ', "").replace('"id": "raw", ', ""))  # fmt: skip
    pagedcli("generate", tmp_path / "in.jsonl", "-m", reasoner, *FLAGS, "-o", tmp_path / "o.jsonl", "--deduplicate")
    assert [parts(row) for row in rows_of(tmp_path / "o.jsonl")] == [("Two and more", "Four cats"), (None, WHOLE)] * 2


def test_a_kept_column_of_that_name_gets_another_unless_reasoning_is_dropped(reasoner, tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": CHAT, "reasoning_content": "mine"}) + "\n")
    arguments = ("generate", tmp_path / "in.jsonl", "-m", reasoner, *FLAGS, "--keep", "reasoning_content")
    pagedcli(*arguments, "-o", tmp_path / "a.jsonl")
    assert rows_of(tmp_path / "a.jsonl")[0]["input_reasoning_content"] == "mine"
    pagedcli(*arguments, "-o", tmp_path / "b.jsonl", *with_keys(tmp_path, run__keep_reasoning=False))
    assert rows_of(tmp_path / "b.jsonl")[0]["reasoning_content"] == "mine"


def test_parts_of_a_distributed_run_have_the_same_columns_whichever_rows_they_have(think, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    writer = RowWriter(think, "m", "key", 1)
    rows = [json.dumps(row_of(think, "Hi\n", output)).encode() for output in ("<think>Two</think>Four.", "Four.")]
    schemas = []
    for place, row in enumerate(rows):
        with (tmp_path / f"{place}.parquet").open("w+b") as file:
            ParquetRows(marked=writer.marked_columns).write(file, lambda row=row: [(0, row)])
        schemas.append(parquet.read_schema(tmp_path / f"{place}.parquet"))
    assert schemas[0] == schemas[1]
    assert "reasoning_content" in schemas[0].names
    assert RowWriter(Tokenizer(BUILTIN), "m", "key", 1).marked_columns == frozenset()
