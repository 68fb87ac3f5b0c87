"""docs/tutorial.md: its commands, run in order in an empty folder, print what it shows."""

import re
import shlex
from pathlib import Path

import pytest
from cli_harness import pagedcli

DOCUMENT = (Path(__file__).resolve().parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILES = re.findall(r"<!-- file: (\S+) -->\n```json\n(.*?)```", DOCUMENT, re.DOTALL)
BLOCKS = re.findall(r"```console\n\$ pagedcli ([^\n]+)\n(.*?)```", DOCUMENT, re.DOTALL)


def pattern(shown):
    """A line `...` is any number of lines, and ... within a line any text."""
    lines = [
        r"(?:[^\n]*\n)*?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r" *\n"
        for line in shown.splitlines()
    ]
    return re.compile("".join(lines))


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The output of each command."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name, content in FILES:
        (folder / name).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {command: pagedcli(*shlex.split(command), columns=120).output for command, _ in BLOCKS}


def test_twelve_commands_lead_to_the_answer():
    assert len(BLOCKS) == 12
    assert [name for name, _ in FILES] == ["ask.jsonl", "late.jsonl"]


@pytest.mark.slow_cases("generate ask.jsonl -o out.jsonl --max-to*", "plan ask.jsonl --all")
@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command[:40] for command, _ in BLOCKS])
def test_a_command_prints_what_the_tutorial_shows(printed, command, shown):
    assert pattern(shown).fullmatch(printed[command]), f"pagedcli {command} printed\n{printed[command]}\nnot\n{shown}"
