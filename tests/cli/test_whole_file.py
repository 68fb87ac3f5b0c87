"""Settings for a whole file, from text or a file: --system, --response-format, --tools. A row's own take precedence."""

import json

import pytest
from cli_harness import pagedcli, rows_of, write_rows

FAST = ("--max-tokens", "6", "--num-kvcache-blocks", "64", "--max-num-seqs", "4")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
OTHERS = [{"type": "function", "function": {"name": "another_tool_with_a_long_name"}}]
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA, indent=1))
    (tmp_path / "system.txt").write_text("You are a pirate.\n")
    (tmp_path / "tools.jinja").write_text(TEMPLATE)
    return tmp_path


def num_prompt_tokens(*arguments):
    shown = json.loads(pagedcli("plan", *arguments, "--max-tokens", "1", "--no-calibrate", "--format", "json").stdout)
    return shown["num_prompt_tokens"]


def test_a_system_prompt_from_a_file_is_the_text_in_it_and_part_of_the_fingerprint(folder):
    write_rows(folder / "in.jsonl", [{"messages": USER}, {"prompt": "Hi"}])
    write_rows(
        folder / "written.jsonl", [{"messages": [{"role": "system", "content": "You are a pirate."}, *USER]}] * 2
    )
    pagedcli("generate", "in.jsonl", "-o", "file.jsonl", "--system", "@system.txt", *FAST)
    pagedcli("generate", "in.jsonl", "-o", "text.jsonl", "--system-prompt", "You are a pirate.", *FAST)
    pagedcli("generate", "written.jsonl", "-o", "written_out.jsonl", *FAST)
    assert rows_of(folder / "file.jsonl") == rows_of(folder / "text.jsonl") == rows_of(folder / "written_out.jsonl")
    pagedcli("generate", "in.jsonl", "-o", "file.jsonl", "--system", "You are a pirate.", "--resume", *FAST)
    (folder / "system.txt").write_text("You are a parrot.")
    refused = pagedcli("generate", "in.jsonl", "-o", "file.jsonl", "--system", "@system.txt", "--resume", expect=2)
    assert "system_prompt: changed" in refused.stderr


@pytest.mark.long
def test_tools_are_shown_to_chats_without_their_own(folder):
    template = ("--chat-template", "tools.jinja")

    def tokens(*lines, tools=True):
        write_rows(folder / "in.jsonl", lines)
        return num_prompt_tokens("in.jsonl", *template, *(("--tools", "@tools.json") if tools else ()))

    bare = tokens({"messages": USER}, tools=False)
    shown = tokens({"messages": USER})
    assert shown > bare + 20
    assert shown == tokens({"messages": USER, "tools": TOOLS}, tools=False) == tokens({"prompt": "Hi"})
    assert tokens({"messages": USER, "tools": OTHERS}) == tokens({"messages": USER, "tools": OTHERS}, tools=False)
    assert tokens({"messages": USER, "tools": OTHERS}) != shown
    assert tokens({"messages": USER, "tool_choice": "none"}) == tokens({"messages": USER, "tools": []}) == bare


def test_a_schema_holds_for_rows_without_their_own_grammar(folder):
    wrapped = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    (folder / "openai.json").write_text(json.dumps(wrapped))
    write_rows(folder / "in.jsonl", [{"prompt": "Hi"}, {"prompt": "Hi", "regex": "[0-9]{2}"}])
    write_rows(
        folder / "own.jsonl", [{"prompt": "Hi", "response_format": wrapped}, {"prompt": "Hi", "regex": "[0-9]{2}"}]
    )
    expected = pagedcli("generate", "own.jsonl", "--max-tokens", "20").stdout
    for given in ("@schema.json", "@openai.json", json.dumps(SCHEMA)):
        assert pagedcli("generate", "in.jsonl", "--response-format", given, "--max-tokens", "20").stdout == expected
    assert json.loads(rows_of(expected)[0]["text"]) == {"a": 1}
    assert len(rows_of(expected)[1]["text"]) == 2


def test_the_configuration_file_takes_them_too(folder):
    (folder / "run.yaml").write_text(
        'run:\n  system_prompt: "@system.txt"\n  tools: "@tools.json"\nsampling:\n'
        "  response_format: {type: json_object}\n"
    )
    shown = json.loads(pagedcli("generate", "x", "-C", "run.yaml", "--show-config", "--format", "json").stdout)
    assert shown["config"]["run"]["system_prompt"] == "You are a pirate."
    assert shown["config"]["run"]["tools"] == TOOLS
    assert shown["config"]["sampling"]["response_format"] == {"type": "json_object"}


def test_a_rows_own_tools_that_cannot_be_shown_are_an_error_row(folder):
    others = [{"messages": USER, "tools": [1]}, {"prompt": "Hi", "tools": TOOLS}]
    write_rows(folder / "in.jsonl", [{"messages": USER, "tools": TOOLS}, *others])
    rows = rows_of(pagedcli("generate", "in.jsonl", *FAST, expect=3).stdout)
    assert [row["error"]["code"] for row in rows] == ["unsupported_parameter", "invalid_request", "invalid_request"]


def test_plan_and_simulate_leave_out_what_generate_does_not_compute(folder):
    draws = [{"prompt": "Story", "temperature": 1, "seed": seed} for seed in (1, 1, None, None)]
    write_rows(folder / "in.jsonl", draws)  # two of them draw the same
    flags = ("--deduplicate", "--no-calibrate", "--format", "json")
    shown = json.loads(pagedcli("plan", "in.jsonl", *flags).stdout)
    assert {"what": "with the answers of an earlier one, left out", "rows": 1} in shown["rows"]
    write_rows(folder / "in.jsonl", [{"prompt": f"Story {i % 3}"} for i in range(9)])
    shown = json.loads(pagedcli("plan", "in.jsonl", *flags).stdout)
    assert {"what": "with the answers of an earlier one, left out", "rows": 6} in shown["rows"]
    simulated = json.loads(pagedcli("simulate", "in.jsonl", "--deduplicate", "--pool", "64", "--format", "json").stdout)
    assert simulated["num_requests"] == 3
    done = pagedcli(
        "generate", "in.jsonl", "-o", "out.jsonl", "--deduplicate", "--summary-json", "s.json", "--all", *FAST
    )
    assert "  deduplicated 6 rows with the answers of an equal one: 36 tokens not generated again" in done.stderr
    assert json.loads((folder / "s.json").read_text())["rows_deduplicated"] == 6
