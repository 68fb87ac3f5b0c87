"""One place decides: the engine and every command that predicts it name the same backend, dtypes, blocks and limits."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cli_harness import pagedcli
from model_zoo import cached_model, tiny_model

from pagedcli.config import EngineConfig
from pagedcli.errors import BackendError, ConfigError
from pagedcli.models.reading import read_spec
from pagedcli.planning import machine
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import Gpu, Machine, described_gpu
from pagedcli.runner.llm_engine import LLMEngine

GIB = 2**30
NO_COMPILER = {"cpu": "no C++ compiler found"}


def gpu_machine(capability=(9, 0), gib=80, num_gpus=1):
    return described_gpu(gib * GIB, name="H100", capability=capability, num_gpus=num_gpus)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """A tiny model whose weights are bfloat16."""
    return replace(read_spec(cached_model("qwen3", tmp_path_factory)), dtype="bfloat16")


def test_an_engine_without_a_compiler_says_why_the_native_backend_is_not_used(tmp_path, no_compiler):
    there = replace(machine.this_machine(), missing={"cpu": no_compiler})
    config = EngineConfig(model=str(tiny_model("qwen3", tmp_path / "m")), device="cpu", num_kvcache_blocks=8)
    engine, decided = LLMEngine(config).plan, decide(config, read_spec(tmp_path / "m"), there).plan
    assert engine.refused == decided.refused == (f"cpu: {no_compiler}",)
    assert (engine.backend, engine.limits) == (decided.backend, replace(decided.limits, num_blocks=8))


@pytest.mark.parametrize(
    ("config", "gpu", "expected"),
    [
        ({}, gpu_machine(), ("triton", "bfloat16", "bfloat16")),
        ({"kv_cache_dtype": "fp8"}, gpu_machine((8, 9), 24), ("triton", "bfloat16", "float8_e4m3fn")),
        ({"dtype": "float16"}, gpu_machine((7, 5), 15), ("sdpa", "float16", "float16")),
        ({"block_size": 8}, gpu_machine(), ("flash", "bfloat16", "bfloat16")),
        ({"block_size": 8}, gpu_machine((8, 0)), ("sdpa", "bfloat16", "bfloat16")),
        ({"device": "cuda:1", "tensor_parallel_size": 2}, gpu_machine(num_gpus=3), ("triton", "bfloat16", "bfloat16")),
        ({"device": "cpu"}, gpu_machine(), ("cpu", "bfloat16", "bfloat16")),
    ],
)
def test_a_described_gpu_is_decided_for_without_one(config, gpu, expected, spec):
    pytest.importorskip("triton")
    decided = decide(EngineConfig(**config), spec, gpu).plan
    assert (decided.backend, decided.dtype, decided.kv_dtype) == expected
    found = decide(EngineConfig(**config), spec, gpu).pool
    assert found is not None
    assert found.num_blocks > 0
    if not decided.on_cpu:
        terms = decide(EngineConfig(**config), spec, gpu).terms
        assert (terms.graphs > 0) == (decided.backend == "triton")


@pytest.mark.parametrize(
    ("config", "there", "words"),
    [
        ({"device": "cpu:1"}, Machine(total_bytes=GIB, available_bytes=GIB), "CPUs are not numbered"),
        ({"device": "cuda"}, Machine(total_bytes=GIB, available_bytes=GIB), "sees no CUDA GPU"),
        ({"device": "cuda:2"}, gpu_machine(num_gpus=2), "there are 2 GPUs"),
        ({"tensor_parallel_size": 2}, gpu_machine(), "needs GPU 1"),
        ({"kv_cache_dtype": "fp8"}, gpu_machine((8, 0)), "H100 has 8.0"),
        ({"kv_cache_dtype": "int8"}, gpu_machine(), "int8 needs a CPU"),
        ({"attention_backend": "cpu", "device": "cpu"}, replace(gpu_machine(), missing=NO_COMPILER), "no C.. compiler"),
        ({"attention_backend": "triton"}, gpu_machine((7, 5)), "compute capability 8.0"),
        ({"eviction": "fifo", "enable_prefix_caching": False}, gpu_machine(), "there is nothing to evict"),
        ({"quantization": "int8"}, gpu_machine(), "no decoder runs Qwen3ForCausalLM with weights int8"),
        ({"quantization": "int8", "device": "cpu"}, replace(gpu_machine(), missing=NO_COMPILER), "no decoder runs"),
    ],
)
def test_what_a_machine_cannot_run_is_refused_before_anything_is_loaded(config, there, words, spec):
    with pytest.raises((ConfigError, BackendError), match=words):
        decide(EngineConfig(**config), spec, there)


def test_an_engine_creates_no_context_on_gpus_that_it_does_not_use(torch_cuda):
    card = SimpleNamespace(name="a", total_memory=GIB, major=9, minor=0)
    asked = []
    torch_cuda(
        is_available=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: 0,
        get_device_properties=lambda index: card,
        mem_get_info=lambda index: (asked.append(index), (GIB // 4, GIB))[1],  # creates a context
    )
    assert [gpu.capability for gpu in machine.this_machine().gpus] == [(9, 0), (9, 0)]
    assert asked == []
    assert [gpu.free_bytes for gpu in machine.this_machine(free_memory=True).gpus] == [GIB // 4] * 2


def test_the_number_that_cuda_means_is_the_current_gpu(spec):
    gpu = Gpu(name="a", total_bytes=GIB, free_bytes=GIB, capability=(8, 0))
    there = Machine(total_bytes=GIB, available_bytes=GIB, gpus=(gpu, gpu), current_gpu=1, is_here=False)
    assert decide(EngineConfig(device="cuda"), spec, there).plan.device == "cuda:1"


def test_plan_refuses_quantized_weights_where_generate_does(tmp_path):
    path = tiny_model("qwen3", tmp_path / "m")
    (tmp_path / "in.jsonl").write_text('{"prompt": [5, 6, 7]}\n')
    flags = ["-m", path, "--quantization", "int8", "--attention-backend", "sdpa", "--device", "cpu"]
    said = {name: pagedcli(name, tmp_path / "in.jsonl", *flags, expect=2).stderr for name in ("generate", "plan")}
    assert "no decoder runs Qwen3ForCausalLM with weights int8" in said["plan"]
    assert said["plan"] in said["generate"]


@pytest.mark.parametrize("there", [gpu_machine(gib=1), replace(gpu_machine(), gpus=(), available_bytes=GIB)])
def test_a_length_whose_tables_alone_exceed_the_memory_is_refused(there, spec):
    endless = replace(spec, max_position_embeddings=2**40)
    assert decide(EngineConfig(), endless, there).plan.limits.max_model_len == 2**20
    with pytest.raises(ConfigError, match="max_model_len is 1099511627776: its tables"):
        decide(EngineConfig(max_model_len=2**40), endless, there)


def test_models_with_recurrent_state_need_triton_on_a_gpu(tmp_path_factory, monkeypatch):
    spec = read_spec(cached_model("qwen3_5", tmp_path_factory))
    for device in ("cpu", "cuda"):
        plan = decide(EngineConfig(device=device), spec, gpu_machine()).plan
        assert plan.limits.state_bytes == spec.state_bytes(4)
    assert plan.graph_sizes
    monkeypatch.setattr("pagedcli.planning.features.fused_layers", lambda: None)
    assert decide(EngineConfig(), spec, gpu_machine()).plan == plan, "a described machine has all software"
    here = replace(gpu_machine(), is_here=True)
    with pytest.raises(ConfigError, match="recurrent state, whose kernels on cuda:0 need Triton"):
        decide(EngineConfig(attention_backend="reference"), spec, here)


# (driver, CUDA of torch, CUDA_VISIBLE_DEVICES, whether there are device files) -> what is said
UNSEEN = {
    ("535.104.05", "13.0", None, True): r"CUDA 13.0, which needs driver 580; pip install .* torch .*whl/cu126",
    ("580.65.06", None, None, True): r"CPU-only build; pip install --force-reinstall torch .*whl/cu130 brings one",
    ("535.104.05", None, None, True): r"CPU-only build; pip install .*whl/cu126 brings one for this driver",
    ("470.57.02", "12.6", None, True): r"built for CUDA 12.6, which needs driver 525; install a newer driver$",
    ("580.65.06", "13.0", "", True): r"CUDA_VISIBLE_DEVICES='' hides all GPUs from .*; unset it",
    ("580.65.06", "13.0", None, False): r"there is no .*/nvidia0 here; a container .* --gpus all$",
    ("580.65.06", "13.0", None, True): r"built for CUDA 13.0, says: Torch not compiled with CUDA enabled$",
}


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA says something else")
@pytest.mark.parametrize("given", UNSEEN, ids=str)
def test_a_gpu_that_torch_does_not_see_is_named_with_the_way_to_it(given, spec, tmp_path, monkeypatch):
    driver, cuda, visible, has_devices = given
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if has_devices:
        (tmp_path / "nvidia0").touch()
    about, here = tmp_path / "version", (tmp_path / "version", tmp_path)
    assert machine.unseen_gpu(*here) is None, "no driver is loaded"
    about.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Sat Aug 19 01:15:15 UTC 2023\n")
    reason = machine.unseen_gpu(*here)
    assert reason.startswith(f"an NVIDIA driver ({driver}) is loaded, but ")
    assert re.search(UNSEEN[given], reason)
    here = Machine(total_bytes=GIB, available_bytes=GIB, unseen_gpu=reason)
    assert decide(EngineConfig(max_num_batched_tokens=64), spec, here).plan.refused[0] == f"GPU: {reason}"
    refused = decide(EngineConfig(max_num_batched_tokens=64, device="cpu"), spec, here).plan.refused
    assert not any(reason in each for each in refused)
    with pytest.raises(ConfigError, match="sees no CUDA GPU") as error:
        decide(EngineConfig(device="cuda"), spec, here)
    assert error.value.hint == reason


def test_ranks_on_different_gpus_run_the_same_steps(spec):
    large, small = gpu_machine(gib=80).gpus[0], gpu_machine(gib=24).gpus[0]
    described = replace(gpu_machine(), gpus=(large, small))
    config = EngineConfig(tensor_parallel_size=2)
    tokens = [decide(config, spec, described, rank=rank).plan.limits.max_num_batched_tokens for rank in (0, 1)]
    alone = decide(EngineConfig(), spec, replace(gpu_machine(), gpus=(small,))).plan.limits
    assert tokens == [alone.max_num_batched_tokens] * 2
    assert decide(EngineConfig(), spec, described).plan.limits.max_num_batched_tokens > tokens[0]


def test_the_pool_of_a_small_model_on_a_large_gpu_is_bounded(spec):
    pool = decide(EngineConfig(max_num_seqs=8), spec, gpu_machine()).pool
    assert pool.num_blocks == 4 * 8 * -(-spec.max_position_embeddings // 16)
    assert pool.reason == "max_num_seqs x max_model_len x 4, for the prefix cache"
    assert (
        decide(EngineConfig(max_num_seqs=8, kv_cache_memory=GIB), spec, gpu_machine()).pool.num_blocks > pool.num_blocks
    )
