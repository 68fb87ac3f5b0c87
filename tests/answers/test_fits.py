"""Does it fit: `profile-memory`, `plan` and `doctor -m` give one answer, here that of the engine."""

import json
import math
import shutil

import pytest
from cli_harness import pagedcli
from model_zoo import cached_model
from models_by_config import QWEN3_06B, QWEN3_30B_A3B

from pagedcli.answers.fits import cache_shape, fit_in_words, fits, largest_group
from pagedcli.config import EngineConfig
from pagedcli.models.hub import resolve_model
from pagedcli.models.reading import read_spec
from pagedcli.planning import machine
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import described_gpu, described_host
from pagedcli.runner import memory_profile
from pagedcli.runner.llm_engine import LLMEngine

GIB = 2**30
FIGURES = ("num_kvcache_blocks", "num_kvcache_tokens", "num_kvcache_blocks_reason", "block_size", "block_bytes")


def answers_of(model, tmp_path, *, expect=0):
    """What the three commands print for people, in one line each, and for programs."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [5, 6, 7], "max_tokens": 4}\n')
    commands = {
        "profile-memory": (("profile-memory", "-m", model), 2 * expect),
        "plan": (("plan", prompts, "-m", model, "--no-calibrate"), 0),
        "doctor": (("doctor", "-m", model), expect),
    }
    lines, figures = {}, {}
    for name, (command, code) in commands.items():
        screen = pagedcli(*command, expect=code).stdout
        [line] = [line for line in screen.splitlines() if "num_kvcache_blocks = " in line]
        lines[name] = line[line.index("num_kvcache_blocks = ") :]
        found = json.loads(pagedcli(*command, "--format", "json", expect=code).stdout)
        figures[name] = {key: found[key] for key in FIGURES}
    return lines, figures


@pytest.mark.quick("qwen3_5")
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "deepseek_v2"])
def test_three_commands_give_the_engines_pool(family, tmp_path, tmp_path_factory):
    """Plain layers, windows, recurrent states and latents."""
    path = shutil.copytree(cached_model(family, tmp_path_factory), tmp_path / "model")
    shutil.copy(resolve_model("builtin") / "tokenizer.json", path)
    lines, figures = answers_of(path, tmp_path)
    engine = LLMEngine(EngineConfig(model=str(path)))
    assert figures["profile-memory"] == figures["plan"] == figures["doctor"]
    assert figures["plan"]["num_kvcache_blocks"] == engine.plan.num_blocks
    assert figures["plan"]["block_bytes"] == engine.plan.block_bytes
    assert lines["profile-memory"] == lines["doctor"]
    assert lines["plan"].startswith(lines["doctor"])
    assert lines["doctor"].startswith(f"num_kvcache_blocks = {engine.plan.num_blocks:,} (")


SETTINGS = [
    {"dtype": "float16", "block_size": 32},
    {"kv_cache_memory": 2**20, "max_num_seqs": 8},
    {"attention_backend": "reference", "max_model_len": 100},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_plan_and_profile_memory_give_the_engines_pool_with_the_same_settings(settings, tmp_path, tmp_path_factory):
    path, prompts = cached_model("qwen3", tmp_path_factory), tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": [5, 6, 7]}\n')
    flags = [str(part) for name, value in settings.items() for part in ("--" + name.replace("_", "-"), value)]
    engine = LLMEngine(EngineConfig(model=str(path), device="cpu", **settings)).plan
    for command in (("plan", prompts), ("profile-memory",)):
        found = json.loads(pagedcli(*command, "-m", path, "--device", "cpu", *flags, "--format", "json").stdout)
        assert found["num_kvcache_blocks"] == engine.num_blocks
        assert found["block_bytes"] == engine.block_bytes
        assert found["num_kvcache_blocks_reason"] == engine.pool.reason
    assert (found["backend"], found["dtype"]) == (engine.backend, engine.dtype)


CARDS = {
    "80 GiB": described_gpu(80 * GIB, name="a card"),
    "16 GiB": described_gpu(16 * GIB, name="a card", capability=(8, 9)),
    "no GPU": described_host(48 * GIB),
}


@pytest.mark.quick("0.6B-16 GiB", "30B-16 GiB")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("model", [QWEN3_06B, QWEN3_30B_A3B], ids=["0.6B", "30B"])
def test_three_commands_give_one_answer_for_a_machine(model, card, tmp_path, monkeypatch, torch_cuda):
    for module in (machine, memory_profile):
        monkeypatch.setattr(module, "this_machine", lambda **_: CARDS[card])
    torch_cuda(get_device_name=lambda *_: "a card")
    (tmp_path / "config.json").write_text(json.dumps(model))
    expected = fits(decide(EngineConfig(model=str(tmp_path)), read_spec(tmp_path), CARDS[card]))
    does_fit = expected.num_kvcache_blocks > 0
    assert does_fit == (model is QWEN3_06B or card == "80 GiB")
    lines, figures = answers_of(tmp_path, tmp_path, expect=0 if does_fit else 1)
    assert figures["profile-memory"] == figures["plan"] == figures["doctor"]
    assert figures["plan"]["num_kvcache_blocks"] == expected.num_kvcache_blocks
    assert lines["profile-memory"] == lines["doctor"] == fit_in_words(expected)
    assert lines["plan"].startswith(fit_in_words(expected))


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2"])
def test_the_shape_of_the_cache_is_that_of_the_engines_tensor(family, tmp_path_factory):
    config = EngineConfig(
        model=str(cached_model(family, tmp_path_factory)), device="cpu", attention_backend="reference",
        num_kvcache_blocks=9,
    )  # fmt: skip
    engine = LLMEngine(config)
    fit = fits(decide(config, engine.spec, machine.this_machine()))
    kv_cache = engine.runner.kv_cache
    assert (fit.num_kvcache_blocks, fit.kv_cache_bytes) == (9, kv_cache.nbytes)
    shape = cache_shape(fit, largest_group(fit))
    assert math.prod(shape) == kv_cache.numel()
    assert shape[:3] == kv_cache.shape[:3]
