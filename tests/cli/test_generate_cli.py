"""`pagedcli generate` as a person meets it: messages, exit codes, files, streams."""

import json
import shutil
from pathlib import Path

import pytest
from cli_harness import FAST, PROMPTS, pagedcli, rows_of

from pagedcli.batch.fingerprint import run_fingerprint
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import Config, EngineConfig
from pagedcli.models.hub import model_folder

# ---------------------------------------------------------------------- good runs


def test_the_summary_counts_the_tokens_of_the_rows(prompts, out, tmp_path):
    summary = tmp_path / "summary.json"
    done = pagedcli(
        "generate", prompts, "-o", out, *FAST, "--n", 2, "--temperature", 1, "--summary-json", summary, columns=200
    )
    tokens = sum(row["usage"]["completion_tokens"] for row in rows_of(out))
    told = json.loads(summary.read_text())
    assert told["row_tokens"] == tokens > 0
    assert told["finish_reasons"] == {"length": 6}
    assert "none failed, 6 of 6 answers stopped at max_tokens 4: " in done.stderr


# ---------------------------------------------------------------------- what goes wrong


def test_other_weights_of_the_same_shapes_are_another_model(tmp_path):
    """A later checkpoint: no name, size or header differs."""

    def digest():
        return run_fingerprint(Config(), model, Tokenizer(model), shard="1/1")["model files"]

    model = tmp_path / "model"
    shutil.copytree(model_folder(EngineConfig()), model)
    before = digest()
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1000] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert digest() != before
    with (model / "large.safetensors").open("wb") as file:
        file.truncate(2**30)
    before = digest()
    with (model / "large.safetensors").open("r+b") as file:
        file.seek(2**29)
        file.write(b"x" * 2**25)
    assert digest() != before


def test_stdin_resumes_if_it_brings_the_same_lines(out):
    pagedcli("generate", "-", "-o", out, *FAST, "--max-errors", 1, stdin="no\n" + PROMPTS, expect=1)
    changed = pagedcli("generate", "-", "-o", out, *FAST, "--resume", stdin="yes\n" + PROMPTS, expect=2)
    assert "the input has changed" in changed.stderr
    pagedcli("generate", "-", "-o", out, *FAST, "--resume", stdin="no\n" + PROMPTS, expect=3)
    assert [row["index"] for row in rows_of(out)] == [0, 1, 2, 3]


def test_a_bug_is_one_line_and_a_traceback_only_on_demand(prompts, monkeypatch):
    monkeypatch.setattr("pagedcli.cli.generate.run_job", lambda *_, **__: {}["bug"])
    result = pagedcli("generate", prompts, expect=1)
    assert "error: KeyError: 'bug'" in result.stderr
    assert "PAGEDCLI_DEBUG=1" in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("PAGEDCLI_DEBUG", "1")
    with pytest.raises(KeyError):
        pagedcli("generate", prompts)


def test_nothing_from_the_input_steers_the_terminal(tmp_path):
    evil = tmp_path / "evil.jsonl"
    evil.write_text(json.dumps({"prompt": "a", "\x1b[2J\u202ekey": 1, "id": "\x1b[31m\x9b2J"}) + "\n")
    result = pagedcli("generate", evil, *FAST)
    for stream in (result.stderr, result.stdout):
        assert "\x1b" not in stream
    assert "\u202e" not in result.stderr
    assert rows_of(result.stdout)[0]["id"] == "\x1b[31m\x9b2J"


# ---------------------------------------------------------------------- looking inside


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"model_type": "llama", "hidden_size": "x"}', "hidden_size"),
        (b'{"model_type": "llama", "num_hidden_layers": 1000000000}', "num_hidden_layers"),
        (b'{"model_type": "llama\xff"}', "config.json"),
    ],
)
def test_a_broken_config_of_a_model_is_not_blamed_on_its_tokenizer(prompts, tmp_path, content, reason):
    folder = shutil.copytree(model_folder(EngineConfig()), tmp_path / "model")
    (folder / "config.json").write_bytes(content)
    result = pagedcli("generate", prompts, "-m", folder, expect=1)
    assert reason in result.stderr
    assert "tokenizer" not in result.stderr


@pytest.mark.parametrize("name", ["default", "laptop", "look-inside"])
def test_the_shipped_configurations_run_with_the_built_in_model(prompts, out, name):
    config = Path(__file__).resolve().parents[2] / "configs" / f"{name}.yaml"
    pagedcli("generate", prompts, "-o", out, "-C", config, "--max-tokens", 2)
    assert [row["error"] for row in rows_of(out)] == [None] * 3
