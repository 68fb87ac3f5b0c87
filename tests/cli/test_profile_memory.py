"""`pagedcli profile-memory`: a known machine from numbers alone, this machine by measuring, and both beside."""

import json
import re
import subprocess
import sys

import pytest
from model_zoo import tiny_model
from models_by_config import QWEN3_06B, QWEN3_30B_A3B
from typer.testing import CliRunner

from pagedcli.cli.main import app
from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError
from pagedcli.runner.llm_engine import LLMEngine

KNOWN = ("--gpu-memory", "23.48GiB", "--used", "3.69GiB", "--peak", "1.58GiB", "--current", "1.14GiB")
SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64")


@pytest.fixture
def qwen3(tmp_path):
    """A folder with config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    return tmp_path


def profile_memory(*arguments, expect=0):
    result = CliRunner().invoke(app, ["profile-memory", *map(str, arguments)])
    assert result.exit_code == expect, f"exit code {result.exit_code}\n{result.stderr}\n{result.stdout}"
    return result


def as_json(*arguments, expect=0):
    return json.loads(profile_memory(*arguments, "--format", "json", expect=expect).stdout)


def terms_of(found, column="measured_bytes"):
    return {row["term"]: row[column] for row in found["waterfall"]}


def test_a_model_too_large_says_what_would_fit(large):
    flags = ("-m", large, "--gpu-memory", "48GiB", "--max-model-len", "8192")
    hint = profile_memory(*flags, expect=2).stderr.partition("hint: ")[2]
    assert "a checkpoint in 4 bits, about 17." in hint
    found = re.search(r"--tensor-parallel-size 2: (\d+) sequences of 8,192 tokens; 4: [\d,]+ sequences; 8: ", hint)
    two = as_json(*flags, "--tensor-parallel-size", "2")
    assert int(found[1]) == int(two["max_concurrency"]) == int(two["concurrency"][0]["max_concurrency"])


def test_what_others_hold_is_not_counted_as_the_model(qwen3):
    gpu = ("-m", qwen3, "--gpu-memory", "80GiB")
    alone, beside = (as_json(*gpu, *flags) for flags in ((), ("--others", "45GiB")))
    used = as_json(*gpu, "--used", f"{45 * 2**30 + alone['weights_bytes']}")
    assert alone["num_kvcache_blocks"] > beside["num_kvcache_blocks"] > 0
    terms = terms_of(beside, "predicted_bytes")
    assert terms["others"] == 45 * 2**30 == terms_of(used, "predicted_bytes")["others"]
    assert terms["runtime"] == terms_of(alone, "predicted_bytes")["runtime"]
    assert beside["fits"][0]["room_bytes"] == terms["kv_cache"], "formats are compared beside them, too"
    assert "exclude each other" in profile_memory(*gpu, "--used", "1GiB", "--others", "1GiB", expect=2).stderr


def test_no_block_says_who_holds_the_memory_and_what_to_change(qwen3):
    result = profile_memory("-m", qwen3, "--gpu-memory", "4GiB", *KNOWN[2:], expect=2)
    assert " take 1.14 GiB, but only 1.05 GiB of memory are free" in result.stderr
    assert "hint: end other processes" in result.stderr
    assert result.stdout.startswith("num_kvcache_blocks = 0: ")
    assert re.search(r"^- other processes +2\.55 GiB ", result.stdout, re.MULTILINE)


@pytest.fixture
def large(tmp_path):
    """A folder with the config.json of a Qwen3-30B-A3B alone."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return tmp_path


def test_a_model_too_large_says_which_formats_fit(large):
    num_weights = 30_532_122_624  # as its model card counts
    found = as_json("-m", large, "--memory", "24GiB", expect=2)
    assert found["weights_bytes"] == 2 * num_weights
    assert found["num_kvcache_blocks"] == 0
    assert found["fits"][0]["flags"] == "as configured"
    rows = {row["flags"]: row for row in found["fits"]}
    int4 = rows["--quantization int4"]
    assert int4["weights_bytes"] == pytest.approx(num_weights * 18 / 32, rel=0.05)
    assert [rows[each]["longest_request_left_tokens"] for each in ("as configured", int4["flags"])] == [0, 40960]
    assert int4["token_bytes"] == 2 * 48 * 4 * 128 * 2
    cached_int8 = rows["--quantization int4 --kv-cache-dtype int8"]
    assert cached_int8["token_bytes"] == 2 * 48 * 4 * (128 + 4)
    assert cached_int8["max_concurrency_left"] > 1.9 * int4["max_concurrency_left"]
    chosen = as_json("-m", large / "config.json", "--quantization", "int4", "--memory", "24GiB")
    assert chosen["num_kvcache_blocks"] > 0
    assert chosen["fits"][0] == int4 | {"flags": "as configured"}


def test_where_nothing_fits_the_smallest_format_is_named(large):
    result = profile_memory("-m", large, "--memory", "8GiB", expect=2)
    assert "nothing fits: even int4 weights take 16.6" in result.stderr


def test_a_model_too_large_is_refused_before_it_is_loaded(large):
    config = large / "config.json"  # more layers than any memory holds
    config.write_text(json.dumps(QWEN3_30B_A3B | {"num_hidden_layers": 4000}))
    (large / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"the weights of .* take 4\.\d\d TiB, but only"):
        LLMEngine(EngineConfig(model=str(large), device="cpu"))
    (large / "rows.jsonl").write_text('{"prompt": [1, 2, 3]}')
    plan = CliRunner().invoke(app, ["plan", "-m", str(large), "--device", "cpu", str(large / "rows.jsonl")])
    assert re.search(r"num_kvcache_blocks = 0: 4\.\d\d TiB short", plan.stdout)


def test_a_folder_without_weights_is_predicted_for_this_machine(qwen3):
    found = as_json("-m", qwen3, "--device", "cpu", *SMALL)
    assert not found["measured"]
    assert found["weights_bytes"] == 2 * 596_049_920
    assert "has no weights: predicting" in profile_memory("-m", qwen3, "--device", "cpu", *SMALL).stderr


def test_a_pool_given_by_flag_wins_over_the_described_machine(qwen3):
    assert as_json("-m", qwen3, "--gpu", "h200", "--num-kvcache-blocks", 7)["num_kvcache_blocks"] == 7
    assert as_json("-m", qwen3, "--gpu", "t4", "--kv-cache-memory", "1GiB")["num_kvcache_blocks"] == 2**30 // 1_835_008


def test_the_kv_dtype_changes_blocks_and_nothing_else(qwen3):
    plain, fp8 = (as_json("-m", qwen3, "--gpu", "h200", "--kv-cache-dtype", name) for name in ("auto", "fp8"))
    assert (plain["kv_dtype"], fp8["kv_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert (fp8["dtype"], fp8["weights_bytes"]) == (plain["dtype"], plain["weights_bytes"])
    assert fp8["block_bytes"] * 2 == plain["block_bytes"]
    assert fp8["num_kvcache_blocks"] == fp8["kv_cache_bytes"] // fp8["block_bytes"] >= 2 * plain["num_kvcache_blocks"]
    refusal = profile_memory("-m", qwen3, "--gpu", "h200", "--kv-cache-dtype", "int8", expect=2).stderr
    assert "int8 needs a CPU" in refusal
    assert "--kv-cache-dtype fp8" in refusal


def test_tensor_parallel_ranks_share_weights_and_blocks(qwen3):
    alone, shared = (as_json("-m", qwen3, "--gpu", "h200", "--tensor-parallel-size", size) for size in (1, 4))
    assert shared["block_bytes"] == alone["block_bytes"] // 4
    assert shared["weights_bytes"] == pytest.approx(alone["weights_bytes"] / 4, rel=0.01)
    assert shared["num_kvcache_blocks"] > 4 * alone["num_kvcache_blocks"]
    assert "one CPU process" in profile_memory("--device", "cpu", "--tensor-parallel-size", 2, expect=2).stderr


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


def test_as_configured_means_the_same_in_every_table(qwen3):
    found = as_json("-m", qwen3, "--device", "cpu", "--kv-cache-memory", "1GiB", "--memory", "24GiB")
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


def test_an_int8_cache_is_counted_with_its_scales(tmp_path):
    path = tiny_model("qwen3", tmp_path / "m")
    arguments = ("-m", path, "--device", "cpu", "--kv-cache-memory", "1MiB", "--kv-cache-dtype", "int8", *SMALL)
    found = as_json(*arguments)
    assert (found["dtype"], found["kv_dtype"]) == ("float32", "int8")
    assert found["block_bytes"] == 2 * 2 * 16 * 2 * (32 + 4)
    assert found["num_kvcache_blocks"] == 2**20 // found["block_bytes"]
    formula = "2 (K and V) x 2 layers x 16 tokens x 2 kv_heads x (32 head_dim x 1 bytes + 4 of scale) = 4,608"
    assert formula in profile_memory(*arguments, "--format", "md").stdout


def test_a_prompt_file_gives_lengths_and_sharing(tmp_path):
    shared = list(range(3, 35))  # 32 tokens: two blocks
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": shared + [100 + i] * (4 * (i + 1)), "max_tokens": 12} for i in range(10)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": 5}]))
    arguments = ("--device", "cpu", "--num-kvcache-blocks", 62, "--prompts", prompts, "--target-concurrency", 20)
    result = profile_memory(*arguments, *SMALL, "--format", "json")
    assert "1 of 11 rows are invalid" in result.stderr
    found = json.loads(result.stdout)
    assert found["num_kvcache_blocks"] == 62
    assert found["shared_prefix_tokens"] == 32
    rows = {row["at"]: row for row in found["concurrency"]}
    assert [rows[f"file {name}"]["num_tokens"] for name in ("p50", "p95", "max")] == [64, 84, 84]
    assert rows["file p50"]["max_concurrency"] == 62 / 4
    assert rows["file p50"]["max_concurrency_shared"] == (62 - 2) / (4 - 2)
    target = {row["at"]: row for row in found["target"]}
    assert target["file p50"]["num_blocks"] == 2 + 20 * 2


@pytest.mark.parametrize("machine", [("--memory", "24GiB", "--quantization", "int4"), ("--gpu", "h200")])
def test_the_setting_for_what_is_left_gives_what_it_promises(large, machine):
    flags = ("-m", large, "--max-model-len", "8192", *machine)
    found = as_json(*flags)
    if "--gpu" in machine:  # its pool takes everything
        assert found["left_setting"] is None
        return
    used = as_json(*flags, *found["left_setting"].split())
    assert used["left_setting"] is None
    assert int(used["max_concurrency"]) == int(found["max_concurrency_left"]) > int(found["max_concurrency"])
    assert f"\n{found['left_setting']} uses all the memory that is left: " in profile_memory(*flags).stdout


def test_notes_about_groups_write_bytes_and_shares_as_the_tables_do(tmp_path):
    """A block of 16 KiB has room for four layers with heads of 32, of which groups have three and two, and for two with
    heads of 64. A sequence holds five, five and ten blocks."""
    sliding, full = "sliding_attention", "full_attention"
    layers = {"layer_types": [sliding, sliding, full, sliding, sliding, full, sliding, sliding]}
    path = tiny_model(
        "gemma4-e2b", tmp_path / "model", num_hidden_layers=8, num_kv_shared_layers=1, sliding_window=64, **layers
    )
    screen = profile_memory("-m", path, "--block-size", 16, "--max-model-len", 160, "--memory", "1GiB", "--all")
    screen = screen.stdout.partition("\n")[2]
    for line in (
        "group 0: 3 layers, window 64, 1 KV head of 32, 12.00 KiB of 16.00 KiB used",
        "group 1: 2 layers, window 64, 1 KV head of 32, 8.00 KiB of 16.00 KiB used",
        "group 2: 2 layers, no window, 1 KV head of 64, 16.00 KiB of 16.00 KiB used",
        "without blocks: 1 layer sharing the K and V of an earlier layer",
        "unused: what the layers leave of these blocks, 18.8 % of the KV cache of a sequence of 160 tokens",
    ):
        assert f"\n{line}\n" in screen
    assert re.findall(r"\S*\d\.\d [KMG]iB", screen) == []


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
    judged = CliRunner().invoke(app, ["doctor", "-m", str(path), "--device", "cpu", "--format", "json"])
    said = {fact["what"]: fact["value"] for fact in json.loads(judged.stdout)["model"]}
    assert said["blocks"].partition("; ")[2] == words.partition("; ")[2]
    assert said["cache"] == "2.00 KiB per token, 512 B once windows have passed it"
