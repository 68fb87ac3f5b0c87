"""docs/look-inside.md: its commands print what it shows, and it names every cause."""

import re
import shlex
from pathlib import Path

import pytest
from cli_harness import pagedcli
from test_tutorial import pattern

from pagedcli.simulation.difference import CAUSES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "look-inside.md").read_text(encoding="utf-8")


def test_the_example_is_what_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"<!-- file: (\S+) -->\n```json\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(content)
    (console,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    commands = re.findall(r"^\$ pagedcli ([^\n]+)\n(.*?)(?=^\$|\Z)", console, re.DOTALL | re.MULTILINE)
    assert [command.split()[0] for command, _ in commands] == ["generate", "generate", "diff"]
    for command, shown in commands:
        printed = pagedcli(*shlex.split(command), columns=140)
        found = printed.stdout if command.startswith("diff") else printed.output
        assert pattern(shown).fullmatch(found), found


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_is_on_the_page(cause):
    assert f"| {CAUSES[cause]} | `{cause}` |" in PAGE
