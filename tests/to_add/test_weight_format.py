"""To add a weight format, touch its entry in models/formats.py and its kernels: choices, help and tables follow.

The fake format is packed as int8 is, under another name. It is registered in a process of its own, before any command
is imported, and nowhere else.
"""

import json
import subprocess
import sys

import pytest

from pagedcli.errors import BackendError
from pagedcli.native import load_library

pytestmark = pytest.mark.long

PROGRAM = """
import json, sys
from pagedcli.models.formats import FORMATS, Rounded
FORMATS["fake8"] = Rounded("fake8", packing="int8", block=(32, 33))
from typer.testing import CliRunner
from pagedcli.cli.main import app

found = {}
for name, arguments in json.load(sys.stdin).items():
    result = CliRunner().invoke(app, arguments)
    found[name] = [result.exit_code, result.stdout, result.stderr + repr(result.exception)]
print(json.dumps(found))
"""
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 12000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every command printed in a process with the fake format."""
    try:
        load_library()
    except BackendError as error:
        pytest.skip(f"no native kernels here: {error.message}")
    folder = tmp_path_factory.mktemp("fake")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "prompts.jsonl").write_text('{"id": "a", "prompt": [5, 6, 7], "max_tokens": 4}\n')
    (folder / "run.yaml").write_text("engine: {quantization: fake8}")
    small = ["--device", "cpu", "--quantization", "fake8", "--num-kvcache-blocks", "8"]
    dummy = ["-m", str(folder), "--load-format", "dummy", "--quantization", "fake8"]
    lengths = ["--num-prompts", "1", "--input-len", "4", "--output-len", "2", "--repeat", "1"]
    prompts, described = str(folder / "prompts.jsonl"), ["profile-memory", "-m", str(folder), "--memory", "8GiB"]
    with_help = ("generate", "profile-memory", "plan", "bench")
    int8 = ["int8" if each == "fake8" else each for each in small]
    commands = {
        **{f"help {name}": [name, "--help", "all"] for name in with_help},
        "generate": ["generate", prompts, *small, "-o", str(folder / "fake8.jsonl"), "--output-token-ids"],
        "int8": ["generate", prompts, *int8, "-o", str(folder / "int8.jsonl"), "--output-token-ids"],
        "config": ["generate", "--show-config", "-C", str(folder / "run.yaml")],
        "unknown": ["generate", prompts, "--quantization", "fake9"],
        "plan": ["plan", prompts, *small, "--format", "json"],
        "profile": [*described, "--format", "json"],
        "table": [*described, "--all"],
        "measured": ["profile-memory", *dummy, "--max-num-seqs", "2", "--max-model-len", "64", "--format", "json"],
        "throughput": ["bench", *dummy, *lengths, "--format", "json"],
        "doctor": ["doctor", "--device", "cpu", "--format", "json"],
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(commands), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    rows = {name: json.loads((folder / f"{name}.jsonl").read_text()) for name in ("fake8", "int8")}
    return printed, rows


@pytest.mark.long
def test_every_command_runs_and_offers_it(found):
    printed, _ = found
    for name, (code, stdout, stderr) in printed.items():
        assert code == (2 if name == "unknown" else 0), f"{name}: {stdout}\n{stderr}"
        if name.startswith("help"):
            assert "int4|fake8" in "".join(stdout.split())
    assert "'int8', 'int4', 'fake8'" in printed["unknown"][2]
    assert "fake8" in printed["config"][1]


def test_its_rows_are_those_of_the_format_it_is_made_of(found):
    _, rows = found
    assert rows["fake8"]["token_ids"] == rows["int8"]["token_ids"]


def test_tables_count_its_bytes(found):
    printed, _ = found
    fits = {row["flags"]: row for row in json.loads(printed["profile"][1])["fits"]}
    assert fits["--quantization fake8"]["weights_bytes"] == fits["--quantization int8"]["weights_bytes"]
    assert "--quantization fake8" in printed["table"][1]
    measured = json.loads(printed["measured"][1])
    [weights] = [row for row in measured["waterfall"] if row["term"] == "weights"]
    assert weights["note"].startswith("fake8, embedding and norms bfloat16")
    assert weights["predicted_bytes"] == pytest.approx(weights["measured_bytes"], rel=0.02)
