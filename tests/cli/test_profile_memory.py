"""`pagedcli profile-memory`: a known machine from numbers alone, this machine by measuring, and both beside."""

import json
import re
import subprocess
import sys

import pytest
from cli_harness import pagedcli
from model_zoo import tiny_model
from models_by_config import QWEN3_06B, QWEN3_30B_A3B

from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError
from pagedcli.runner.llm_engine import LLMEngine

SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64")


def described(folder, config=QWEN3_06B):
    """The folder with a config.json alone."""
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def profile_memory(*arguments, expect=0):
    return pagedcli("profile-memory", *arguments, expect=expect)


def as_json(*arguments, expect=0):
    return json.loads(profile_memory(*arguments, "--format", "json", expect=expect).stdout)


def terms_of(found, column="measured_bytes"):
    return {row["term"]: row[column] for row in found["waterfall"]}


def test_a_model_too_large_is_refused_before_it_is_loaded(tmp_path):
    large = described(tmp_path, QWEN3_30B_A3B | {"num_hidden_layers": 4000})  # more than any memory holds
    (large / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"the weights of .* take 4\.\d\d TiB, but only"):
        LLMEngine(EngineConfig(model=str(large), device="cpu"))
    (large / "rows.jsonl").write_text('{"prompt": [1, 2, 3]}')
    plan = pagedcli("plan", "-m", large, "--device", "cpu", large / "rows.jsonl")
    assert re.search(r"num_kvcache_blocks = 0: 4\.\d\d TiB short", plan.stdout)


def test_a_folder_without_weights_is_predicted_for_this_machine(tmp_path):
    found = as_json("-m", described(tmp_path), "--device", "cpu", *SMALL)
    assert not found["measured"]
    assert found["weights_bytes"] == 2 * 596_049_920
    assert "has no weights: predicting" in profile_memory("-m", tmp_path, "--device", "cpu", *SMALL).stderr


# ---------------------------------------------------------------------- measured


def test_this_machine_is_measured_beside_the_prediction(tmp_path):
    path = tiny_model("qwen3", tmp_path / "m")
    config = EngineConfig(model=str(path), device="cpu", max_num_seqs=4, max_num_batched_tokens=64)
    engine = LLMEngine(config)
    found = as_json("-m", path, "--device", "cpu", *SMALL)
    assert found["measured"]
    assert found["num_kvcache_blocks"] == engine.plan.num_blocks
    assert found["block_bytes"] == engine.plan.block_bytes
    assert found["weights_bytes"] == engine.plan.weight_bytes
    assert (found["activation_peak_tokens"], found["activation_peak_seqs"]) == (64, 4)
    measured, predicted = terms_of(found), terms_of(found, "predicted_bytes")
    assert (
        measured["total"] - sum(measured[k] for k in ("others", "runtime", "weights", "activations"))
        == measured["kv_cache"]
    )
    assert predicted["weights"] == measured["weights"]
    assert measured["runtime"] > 50 * 2**20  # an interpreter with torch
    assert predicted["activations"] > 0
    assert predicted["others"] is None


@pytest.mark.machine
def test_activations_of_a_small_model_count_what_the_allocator_keeps(tmp_path):
    """Logits below 32 MiB come from glibc's heap, which keeps what the sampler has freed: a quarter of the peak."""
    path = tiny_model("qwen3", tmp_path / "m", vocab_size=32000)
    arguments = ["-m", path, "--device", "cpu", "--max-model-len", 512, "--max-num-seqs", 256, "--format", "json"]
    program = "from pagedcli.cli.main import run; run()"
    command = [sys.executable, "-c", program, "profile-memory", *map(str, arguments)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    measured, predicted = terms_of(found), terms_of(found, "predicted_bytes")
    if measured["activations"] is None:
        pytest.skip("this system does not report a process's peak")
    assert predicted["activations"] == pytest.approx(measured["activations"], rel=0.15)


def test_as_configured_means_the_same_in_every_table(tmp_path):
    found = as_json("-m", described(tmp_path), "--device", "cpu", "--kv-cache-memory", "1GiB", "--memory", "24GiB")
    [at_once] = [row["max_concurrency"] for row in found["concurrency"] if row["at"] == "model length"]
    own = found["fits"][0]
    assert own["flags"] == "as configured"
    assert found["max_concurrency"] == own["max_concurrency"] == at_once
    assert found["max_concurrency_left"] == own["max_concurrency_left"] > 10 * at_once


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [(), ("--quantization", "int8")], ids=["as stored", "int8"])
def test_the_prediction_is_near_what_a_fresh_process_measures(quantization, tmp_path):
    path = tiny_model("qwen3", tmp_path / "m", vocab_size=32768, hidden_size=512, intermediate_size=2048)
    program = "from pagedcli.cli.main import run; run()"
    arguments = ["-m", path, "--device", "cpu", "--max-num-seqs", 32, "--format", "json", *quantization]
    command = [sys.executable, "-c", program, "profile-memory", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if quantization and "native CPU kernels" in done.stderr and done.returncode:
        pytest.skip("the native kernels cannot be built here")
    found = json.loads(done.stdout)
    if found["loading_peak_bytes"] is None:
        pytest.skip("this system does not report a process's peak")
    measured, predicted = terms_of(found), terms_of(found, "predicted_bytes")
    assert predicted["weights"] == pytest.approx(measured["weights"], rel=0.02)
    assert predicted["activations"] == pytest.approx(measured["activations"], rel=0.5)
    assert predicted["loading_peak"] == pytest.approx(measured["loading_peak"], rel=0.25)
    assert 100 * 2**20 < measured["runtime"] < 400 * 2**20  # the mapped checkpoint is no part of it
    note = next(row["note"] for row in found["waterfall"] if row["term"] == "weights")
    assert note.startswith("int8, embedding and norms float32" if quantization else "float32")


@pytest.mark.parametrize("machine", [("--memory", "24GiB", "--quantization", "int4"), ("--gpu", "h200")])
def test_the_setting_for_what_is_left_gives_what_it_promises(tmp_path, machine):
    flags = ("-m", described(tmp_path, QWEN3_30B_A3B), "--max-model-len", "8192", *machine)
    found = as_json(*flags)
    if "--gpu" in machine:  # its pool takes everything
        assert found["left_setting"] is None
        return
    used = as_json(*flags, *found["left_setting"].split())
    assert used["left_setting"] is None
    assert int(used["max_concurrency"]) == int(found["max_concurrency_left"]) > int(found["max_concurrency"])
    assert f"\n{found['left_setting']} uses all the memory that is left: " in profile_memory(*flags).stdout


def test_windows_are_said_in_the_second_line(tmp_path):
    """A token takes 512 bytes in each of three layers with a window of 64 and one without. Of its 80 blocks in each a
    sequence of 1,280 tokens holds 5 where there is a window."""
    layer_types = [*3 * ["sliding_attention"], "full_attention"]
    path = tiny_model(
        "gemma3", tmp_path / "model", num_hidden_layers=4, sliding_window=64, layer_types=layer_types,
        max_position_embeddings=1280,
    )  # fmt: skip
    found = as_json("-m", path, "--memory", "24GiB")
    num_tokens = found["num_kvcache_blocks"] // 4 * 16
    words = (
        f"4 groups of layers share the blocks, which hold {num_tokens:,} tokens in all of them; windows release 70.3 %"
        " of the blocks of a sequence of 1,280 tokens, which holds 95 instead of 320."
    )
    assert found["num_kvcache_tokens"] == num_tokens
    assert profile_memory("-m", path, "--memory", "24GiB").stdout.splitlines()[1] == words
    judged = pagedcli("doctor", "-m", path, "--device", "cpu", "--format", "json")
    said = {fact["what"]: fact["value"] for fact in json.loads(judged.stdout)["model"]}
    assert said["blocks"].partition("; ")[2] == words.partition("; ")[2]
    assert said["cache"] == "2.00 KiB per token, 512 B once windows have passed it"
