"""Run a command as a person would: arguments in, exit code and streams out."""

import io
import json
import sys

import pytest
from typer.testing import CliRunner

from pagedcli.cli.main import app

PROMPTS = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("Once upon a time", "The fox", "Hello"))
FAST = ("--max-tokens", "4", "--num-kvcache-blocks", "64", "--max-num-seqs", "4")


class Terminal(io.StringIO):
    """What stands on a terminal."""

    def isatty(self):
        return True


def pagedcli(*arguments, stdin=None, expect=0, columns=80):
    result = invoke(*arguments, stdin=stdin, columns=columns)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == expect, f"exit code {result.exit_code}\n{result.stderr}\n{result.stdout}"
    return result


def invoke(*arguments, stdin=None, columns=80):
    """The result of a command, which is also that of this process."""
    words = [str(argument) for argument in arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pagedcli", *words])
        return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, words, input=stdin)


def with_keys(folder, **keys):
    """The flags for a configuration file in the folder with these keys, each as section__name."""
    sections = {}
    for key, value in keys.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    path = folder / f"{'-'.join(keys)}.yaml"
    path.write_text(json.dumps(sections))  # JSON is YAML
    return "-C", path


def write_rows(path, rows):
    """A file of these rows, or of lines as they are. Returns its path."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows_of(path_or_text):
    text = path_or_text if isinstance(path_or_text, str) else path_or_text.read_text()
    return [json.loads(line) for line in text.splitlines()]
