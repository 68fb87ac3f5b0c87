"""What `pagedcli` says of itself."""

import re

from cli_harness import pagedcli

import pagedcli as package
from pagedcli.cli.main import COMMANDS


def test_a_report_of_a_bug_names_versions_and_kernels():
    result = pagedcli("--version", "--verbose")
    first, *lines = result.stdout.splitlines()
    assert first == f"pagedcli {package.__version__}"
    found = dict(re.split(r" {1,}", line, maxsplit=1) for line in lines)
    assert list(found) == [
        "Python", "system", "processor", "kernels",
        "torch", "triton", "transformers", "tokenizers", "safetensors", "llguidance",
    ]  # fmt: skip
    assert all(found.values())


def test_the_help_has_the_commands_in_six_groups():
    shown = pagedcli("--help").stdout
    for name, (group, line) in COMMANDS.items():
        assert f"\n  {name} " in shown.split(f"\n{group}:")[1]
        assert line in shown
    assert len({group for group, _ in COMMANDS.values()}) == 6
