"""`pagedcli doctor`: passes on a sound machine, and fails where the cache or a backend gives wrong answers."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from cli_harness import pagedcli
from model_zoo import LATENT_FAMILIES, cached_model, tiny_model

from pagedcli.answers.fits import NOT_PREDICTED
from pagedcli.attention.reference import ReferenceAttention
from pagedcli.config import EngineConfig
from pagedcli.core.block_manager import BlockManager
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import this_machine
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.show.plan_tables import engine_table


def doctor(*arguments, expect=0):
    return pagedcli("doctor", "--device", "cpu", *arguments, expect=expect)


def checks(result):
    return {row["check"]: row for row in json.loads(result.stdout)["self_test"]}


def test_a_sound_machine_passes_every_check():
    result = doctor("--format", "json")
    found = json.loads(result.stdout)
    assert found["passed"]
    assert found["device"] == "cpu"
    rows = checks(result)
    available = [row["backend"] for row in found["backends"] if row["available"]]
    assert list(rows)[3:] == [f"attention {name}" for name in available]
    assert "reference" in available
    assert all(row["reason"] for row in found["backends"] if not row["available"])
    assert "12 of 12 right" in rows["look-ups through prefix hits"]["detail"]
    assert "preemptions" in rows["look-ups through preemption"]["detail"]
    assert all(row["seconds"] > 0 for row in rows.values())
    version = {row["what"]: row["version"] for row in found["versions"]}["torch"]
    assert version.partition("+")[0] == torch.__version__.partition("+")[0]  # packages need not name their CUDA
    assert found["devices"][0]["total_bytes"] > found["devices"][0]["free_bytes"] > 0
    assert "weight_cache" in found
    assert "cpu works, " in result.stderr
    assert doctor().stdout.startswith("cpu works, with attention backend ")


@pytest.mark.long
def test_a_model_is_judged_by_its_config_alone(tmp_path):
    """The numbers are those of its two layers and two tables."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64}
    config |= {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = json.loads(doctor("-m", str(tmp_path), "--format", "json").stdout)
    facts = {row["what"]: row["value"] for row in found["model"]}
    assert found["fits"]
    assert facts["runs as"].startswith("LlamaForCausalLM, decoder 'native")
    layers = 2 * (64 * (64 + 64) + 64 * 64 + 3 * 64 * 96 + 2 * 64)
    assert facts["parameters"].startswith(f"{(2 * 320 * 64 + layers + 64) / 1e6:.3g} million")
    assert facts["cache"] == f"{2 * 2 * 2 * 16 * 4} B per token"
    assert "tokens/s for one sequence" in facts["speed"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4000, "hidden_size": 2**14}))
    found = json.loads(doctor("-m", str(tmp_path), "--format", "json", expect=1).stdout)
    assert not found["fits"]
    assert found["missing_bytes"] > found["weights_bytes"] - found["total_bytes"] > 0


def facts_of(path):
    """What doctor says of a model by its configuration alone, and the notes on its weights."""
    found = json.loads(doctor("-m", str(path), "--format", "json").stdout)
    assert found["fits"]
    return {row["what"]: row["value"] for row in found["model"]}, [
        row["value"] for row in found["engine"] if row["what"] == "note"
    ]


@pytest.mark.slow
def test_what_becomes_of_quantized_weights_and_what_is_not_predicted_is_told(tmp_path, tmp_path_factory):
    config = json.loads((cached_model("qwen3", tmp_path_factory) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts, notes = facts_of(tmp_path)
    assert notes == ["weights are bitsandbytes, 4 bits, widened to float32 while loading"]
    assert facts["parameters"].endswith("million")
    shutil.copy(cached_model("gpt2", tmp_path_factory) / "config.json", tmp_path)
    facts, _ = facts_of(tmp_path)
    assert facts["memory"] == NOT_PREDICTED
    assert facts["cache"] == f"{2 * 2 * 64 * 4 / 1024:.2f} KiB per token"
    (tmp_path / "in.jsonl").write_text('{"prompt": [5, 6, 7]}')
    assert f"no forecast: {NOT_PREDICTED}" in pagedcli("plan", tmp_path / "in.jsonl", "-m", tmp_path).stderr


ASKED = [*LATENT_FAMILIES, "kimi_linear", "nemotron_h-moe", "lfm3", "laguna", "olmo_hybrid", "falcon_h1", "cohere2_moe"]
ASKED += ["exaone_moe", "hunyuan_v1_moe", "hy_v3", "minimax_m2", "solar_open", "apertus", "phimoe"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ASKED)
def test_every_family_that_people_ask_for_is_judged_by_its_config_alone(family, tmp_path, tmp_path_factory):
    shutil.copy(cached_model(family, tmp_path_factory) / "config.json", tmp_path)
    facts, _ = facts_of(tmp_path)
    assert facts["runs as"].endswith("decoder 'native in one call'")
    assert facts.keys() >= {"parameters", "weights", "cache", "speed"}


def test_a_wrong_cache_fails_the_look_ups(monkeypatch):
    """Only the first cached block is given out, again and again. (Swapped ones do no harm: K knows its position.)"""
    sound = BlockManager.lookup

    def lookup(self, seq):
        hit = sound(self, seq)
        return replace(hit, block_ids=hit.block_ids[:1] * len(hit.block_ids))

    monkeypatch.setattr(BlockManager, "lookup", lookup)
    result = doctor("--format", "json", expect=1)
    rows = checks(result)
    assert not rows["look-ups through prefix hits"]["passed"]
    assert "answers are wrong" in rows["look-ups through prefix hits"]["detail"]
    assert rows["look-ups through preemption"]["passed"]  # runs without prefix caching
    assert "checks failed on cpu: look-ups through prefix hits" in result.stderr


class ShiftedAttention(ReferenceAttention):
    """Gives every token the result of the one before it."""

    name = "shifted"

    def attend(self, q, kv, batch, layer):
        return super().attend(q, kv, batch, layer).roll(1, dims=0)


class BrokenAttention(ReferenceAttention):
    name = "broken"

    def attend(self, q, kv, batch, layer):
        raise RuntimeError("the driver has gone\nand more")


@pytest.mark.long
@pytest.mark.quick("BrokenAttention-RuntimeError: the driver")
@pytest.mark.parametrize(
    ("backend", "words"),
    [(ShiftedAttention, "differs from the reference"), (BrokenAttention, "RuntimeError: the driver")],
)
def test_a_wrong_backend_fails_alone(add_backend, backend, words):
    add_backend(backend.name, load=lambda spec: backend())
    result = doctor("--format", "json", expect=1)
    rows = checks(result)
    assert [name for name, row in rows.items() if not row["passed"]] == [f"attention {backend.name}"]
    assert rows[f"attention {backend.name}"]["detail"].startswith(words)
    assert "\n" not in rows[f"attention {backend.name}"]["detail"]


def test_graphs_scales_and_notes_of_a_plan_are_told():
    plan = Plan(
        limits=Limits(), model="m", backend="triton", refused=("cpu: no compiler",), dtype="bfloat16",
        kv_dtype="float8_e4m3fn", kv_scales=(0.25, 0.5), graph_sizes=(1, 2, 4), notes=("slow",),
    )  # fmt: skip
    assert [tuple(row.values()) for row in engine_table("here", plan).rows] == [
        ("attention", "triton"),
        ("not used", "cpu: no compiler"),
        ("dtype", "bfloat16"),
        ("KV cache", "float8_e4m3fn"),
        ("KV scales", "K 0.25, V 0.5"),
        ("CUDA graphs", "batch sizes 1, 2, 4"),
        ("note", "slow"),
    ]


def test_weights_that_could_not_be_packed_are_told_before_and_after_loading(tmp_path):
    config = EngineConfig(
        model=str(tiny_model("qwen3", tmp_path / "model")), dtype="float16", device="cpu",
        attention_backend="sdpa", num_kvcache_blocks=4,
    )  # fmt: skip
    engine = LLMEngine(config)
    expected = decide(config, engine.spec, this_machine()).plan
    assert expected.notes == ("linear layers are slow here: oneDNN cannot pack float16 weights",)
    assert engine_table("", expected) == engine_table("", engine.plan)
