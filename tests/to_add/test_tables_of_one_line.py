"""To add a command, a view, marks of reasoning, a format of tool calls or a setting that a cure changes: one line in
the table that the architecture page names, and what it stands for."""

import sys
from array import array
from types import ModuleType

import pytest
from cli_harness import pagedcli
from harness.core import Simulation

import pagedcli.answers.settings as settings
import pagedcli.batch.reasoning as reasoning
import pagedcli.batch.tool_calls as tool_calls
import pagedcli.cli.main as main
from pagedcli.answers.cures import Trials
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.simulation.requests import Request, Requests
from pagedcli.trace.dispatch import View
from pagedcli.trace.fold import pool_fold


class Tokens:
    """A tokenizer of which only the numbers of some tokens matter."""

    def __init__(self, *names):
        self.token_id = {name: 100 + place for place, name in enumerate(names)}.get

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


def test_a_command(monkeypatch):
    def shout(word: str) -> None:
        """Say a word."""
        print(word.upper())

    module = ModuleType("pagedcli.cli.shout")
    module.shout = shout
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(main.COMMANDS, "shout", ("Learn", "Say a word, loudly."))
    assert "Say a word, loudly." in pagedcli("--help").stdout
    assert pagedcli("shout", "hi").stdout == "HI\n"
    assert "Did you mean 'shout'?" in pagedcli("shuot", expect=2).stderr


def test_a_view_of_a_run():
    class Tokens(View):
        """Counts what each sequence generates."""

        def __init__(self):
            self.counts = {}

        def on_tokens_sampled(self, event, state):
            for seq_id in event.seq_ids:
                self.counts[seq_id] = self.counts.get(seq_id, 0) + 1

    view = Tokens()
    sim = Simulation(20, 2, emit=pool_fold(view), max_num_seqs=3)
    for number in range(3):
        sim.add([number] * 4, number + 1)
    sim.run()
    assert view.counts == {0: 1, 1: 2, 2: 3}
    with pytest.raises(TypeError, match="handles events that do not exist: on_nothing"):
        type("Wrong", (View,), {"on_nothing": lambda self, event, state: None})


def test_marks_of_reasoning(monkeypatch):
    tokenizer = Tokens("<muse>", "</muse>")
    assert reasoning.find_format(tokenizer) is None
    monkeypatch.setattr(reasoning, "_MARKS", (*reasoning._MARKS, ("<muse>", "</muse>", "")))
    found = reasoning.find_format(tokenizer)
    assert isinstance(found, reasoning.Brackets)
    assert found.start == 100


def test_a_format_of_tool_calls(monkeypatch):
    def read(tokenizer, token_ids, tools):
        name, _, argument = tokenizer.decode(token_ids).partition("=")
        return [tool_calls.ToolCall(name, {"value": argument})]

    tokenizer = Tokens("<do>", "</do>")
    assert tool_calls.find_tool_format(tokenizer) is None
    monkeypatch.setattr(tool_calls, "_MARKS", (*tool_calls._MARKS, ("<do>", "</do>", read, len)))
    output = [*b"so ", 100, *b"go=on", 101, *b"."]
    outside, calls = tool_calls.find_tool_format(tokenizer).find([], output, [(0, len(output))], [])
    assert outside == [(0, 3), (10, 11)]
    assert [(call.name, call.arguments) for call in calls] == [("go", {"value": "on"})]


def test_a_setting_that_a_cure_changes():
    kind = settings.Knob("held prompts", "engine.min_prefill_tokens", lambda subject, found: [7], cost="latency")
    requests = [Request(str(n), None, 24, 4, token_ids=array("q", [n] * 24), max_new_tokens=4) for n in range(12)]
    limits = Limits(num_blocks=20, max_num_seqs=4, max_num_batched_tokens=64)
    trials = Trials(settings.Subject(Requests(requests, format="prompts"), Plan(limits=limits, model="m")))
    trials.explore([kind])
    tried = [trial.setting for trial in trials.tried]
    assert [setting.changes for setting in tried] == [{"engine.min_prefill_tokens": 7}]
    assert "--min-prefill-tokens 7" in " ".join(settings.flags_of(tried[0].changes))
