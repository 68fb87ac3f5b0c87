"""To add a configuration key, touch its field and its consumer: flag, help, YAML and fingerprint follow from the field.

The fake key here is declared in a subclass of RunConfig, and nowhere else.
"""

import importlib
from typing import Annotated

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from pagedcli import config as config_module
from pagedcli.batch.fingerprint import check_same_run, run_fingerprint
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.cli import options
from pagedcli.config import Config, EngineConfig, RunConfig, load_config
from pagedcli.config_keys import key, keys_of
from pagedcli.errors import ConfigError, UsageError
from pagedcli.models.hub import resolve_model


class FakeRun(RunConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run with two new keys; the author of `flavour` has said nothing about the fingerprint."""

    flavour: Annotated[str, key("Rows", "Flavour of the rows", metavar="NAME")] = "plain"
    pace: Annotated[int, key("Rows", "How fast rows are read", affects_rows=False, at_least=1)] = 1


class FakeConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: FakeRun = msgspec.field(default_factory=FakeRun)


@pytest.fixture
def fake_keys(monkeypatch):
    monkeypatch.setattr(config_module, "Config", FakeConfig)
    importlib.reload(options)  # makes the flags of `Config`
    yield options
    monkeypatch.undo()
    importlib.reload(options)


@pytest.fixture(scope="module")
def folder():
    return resolve_model("builtin")


def fingerprint(folder, config):
    return run_fingerprint(config, folder, Tokenizer(folder), shard="1/1")


def test_a_new_key_changes_the_fingerprint_by_itself(folder, tmp_path):
    before = fingerprint(folder, FakeConfig())
    now = fingerprint(folder, FakeConfig(run=FakeRun(flavour="sweet")))
    assert before != now
    with pytest.raises(UsageError, match=r"run\.flavour: absent -> sweet"):
        check_same_run(tmp_path, before, now)


def test_a_key_that_does_not_affect_rows_leaves_the_fingerprint(folder):
    assert fingerprint(folder, FakeConfig(run=FakeRun(pace=7))) == fingerprint(folder, FakeConfig())


def test_a_new_key_at_its_default_resumes_journals_from_before_it(folder):
    assert fingerprint(folder, FakeConfig()) == fingerprint(folder, Config())


def test_a_new_key_has_a_flag_with_help_and_a_place_in_the_yaml_file(fake_keys, tmp_path):
    app, seen = typer.Typer(), {}

    @app.command()
    @fake_keys.config_flags("run.flavour", "run.pace")
    def command(*, flags: fake_keys.Flags) -> None:
        seen.update(flags)

    result = CliRunner().invoke(app, ["--help"])
    assert "--flavour NAME" in " ".join(result.output.split()).replace("│", " "), result.output
    assert CliRunner().invoke(app, ["--flavour", "sweet", "--pace", "3"]).exit_code == 0
    assert seen == {"run.flavour": "sweet", "run.pace": 3}
    assert load_config(None, seen).config.run.flavour == "sweet"
    path = tmp_path / "run.yaml"
    path.write_text("run:\n  flavour: sour\n")
    assert load_config(path).config.run.flavour == "sour"
    path.write_text("run:\n  flavor: sour\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert "flavour" in raised.value.hint


def test_every_key_of_today_is_in_the_fingerprint_or_declared_neutral(folder):
    """Another value of each key that affects rows gives another fingerprint; another value of the others does not."""
    other = {bool: True, int: 3, float: 0.5, str: "x"}
    base = fingerprint(folder, Config())
    for section, struct in (("engine", EngineConfig), ("run", RunConfig)):
        for name, (type_, declared) in keys_of(struct).items():
            default = getattr(struct(), name)
            value = next(
                (
                    each
                    for kind, each in other.items()
                    if kind.__name__ in str(type_) and each != default and isinstance(each, kind)
                ),
                "x",
            )
            if name == "eviction":
                value = "lfu"
            elif isinstance(default, bool):
                value = not default
            elif declared.names:
                value = next(each for each in declared.names if each != default)
            elif "Literal" in str(type_):
                value = next(each for each in str_literals(type_) if each != default)
            if name == "tools":
                value = [{"type": "function", "function": {"name": "x"}}]
            if name in ("chat_template", "model", "adapter"):  # these are files
                continue
            changed = Config(**{section: struct(**{name: value})})
            assert (fingerprint(folder, changed) != base) == declared.affects_rows, (section, name, value)


def str_literals(type_):
    from typing import get_args

    return [each for part in (type_, *get_args(type_)) for each in get_args(part) if isinstance(each, str)]
