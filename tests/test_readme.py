"""What the README and the architecture page say is there: commands, folders, flags and files."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagedcli.cli.main import COMMANDS, app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_command_is_named_and_every_named_command_exists():
    named = set(re.findall(r"(?<!from )pagedcli ([a-z][a-z-]+)", README))
    assert set(COMMANDS) <= named
    assert named <= set(COMMANDS)


def test_every_folder_of_the_package_is_in_the_map():
    for folder in (ROOT / "src" / "pagedcli").iterdir():
        if (folder / "__init__.py").exists() and folder.name != "assets":
            assert f"{folder.name}/ " in ARCHITECTURE, f"{folder.name} is missing from the map"


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?:docs|configs|examples|scripts)/[\w./-]+\w", README + ARCHITECTURE)))
)
def test_every_file_named_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("line", sorted(set(re.findall(r"^(?:\$ )?pagedcli ([^#\n]+)", README, re.MULTILINE))))
def test_every_flag_of_an_example_exists(line):
    words = shlex.split(line)
    help_text = CliRunner().invoke(app, [words[0], "--help", "all"]).output
    for flag in (word for word in words[1:] if word.startswith("-") and word != "-"):
        assert re.search(rf"(?<!\S){flag}\b", help_text), f"{flag} is not a flag of pagedcli {words[0]}"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", ARCHITECTURE))))
def test_every_module_of_the_architecture_page_exists(path):
    assert (ROOT / "src" / "pagedcli" / path).exists() or (ROOT / path).exists()


def test_a_run_shows_the_block_tables_ref_counts_and_hits_that_the_readme_shows(tmp_path, monkeypatch):
    [(command, shown)] = re.findall(r"^\$ (pagedcli generate \S+ .*--dump-kv)\n(.*?)```", README, re.M | re.S)
    monkeypatch.chdir(ROOT)
    words = [str(tmp_path / "out.jsonl") if word == "out.jsonl" else word for word in shlex.split(command)[1:]]
    printed = CliRunner(env={"COLUMNS": "115"}).invoke(app, words, catch_exceptions=False).stdout
    for line in shown.splitlines():
        assert line == "..." or line.rstrip() in [each.rstrip() for each in printed.splitlines()], line
    assert "Prefix hits" in printed
