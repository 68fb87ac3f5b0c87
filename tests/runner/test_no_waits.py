"""On a GPU no step waits for the device, uploads from memory that is not pinned, or captures what a graph cannot hold:
every family, kind of sampling and kind of weights, with kernels that are launched but not run (see pretend_cuda)."""

import pytest
from harness.core import finish
from harness.engine import FirstEight, ragged_prompts
from interpreter import interpreted
from model_zoo import GEMMA4_FAMILIES, tiny_model
from quantized_zoo import FORMATS, mxfp4_twins, quantized_twins

from pagedcli.config import EngineConfig
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

pytest.importorskip("triton")

FAMILIES = ("qwen3", "llama-untied", "gemma2", "gemma3", "phi3-longrope", "olmo2", "granite", "smollm3")
QUICK = ("qwen3", "gemma3", "cohere", "phi3-longrope", "qwen2-moe", "gemma4-26b")
FAMILIES += (
    "hunyuan",
    "starcoder2",
    "cohere",
    "glm4-moe",
    "qwen3-moe",
    "qwen2-moe",
    "mixtral",
    "olmoe",
    *GEMMA4_FAMILIES,
    "laguna",
)
HYBRIDS = (
    "qwen3_5",
    "qwen3_5-moe",
    "qwen3_next",
    "kimi_linear",
    "lfm2",
    "lfm2-bias",
    "lfm2-moe",
    "bamba",
    "granite-hybrid",
)
# windows shorter than the prompts, several groups of layers
WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
SIZES = {"gemma2": WINDOWS, "gemma3": WINDOWS}
SIZES["laguna"] = {**WINDOWS, "num_hidden_layers": 2, "num_attention_heads_per_layer": [8, 4]}
SIZES |= {family: {**WINDOWS, "num_hidden_layers": 2} for family in GEMMA4_FAMILIES}
SIZES["gemma4-e2b"] = {
    **WINDOWS, "num_hidden_layers": 3, "layer_types": [*WINDOWS["layer_types"], "full_attention"],
    "num_kv_shared_layers": 1,
}  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.9, max_tokens=4, ignore_eos=True, seed=3),
    SamplingParams(temperature=1.1, max_tokens=3, ignore_eos=True, seed=4, top_k=7, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, repetition_penalty=1.3, logit_bias={7: 2.0}),
    SamplingParams(temperature=0.8, max_tokens=3, ignore_eos=True, seed=5, logprobs=2, min_p=0.1, n=2),
    SamplingParams(temperature=0, max_tokens=4, min_tokens=3, presence_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=3, beam_width=2),
    SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, ignore_eos=True),
]


def check(gpu, path, prompts=None, **config):
    """All kinds of requests at once, twice: the second time from the prefix cache."""
    from pretend_cuda import what_is_new

    config = {"max_num_seqs": 5, "num_kvcache_blocks": 60, "max_model_len": 64, "dtype": "float32", **config}
    engine = LLMEngine(EngineConfig(model=str(path), device="cuda", **config))
    assert engine.plan.backend == "triton"
    del gpu.waits[:]
    replays, launches, compiled = gpu.replays, gpu.launches, set(gpu.variants)
    for number, prompt in enumerate(2 * (prompts or ragged_prompts(len(PARAMS)))):
        engine.add_request(str(number), prompt, PARAMS[number % len(PARAMS)])
    engine.add_request("guided", [5, 6, 7], PARAMS[0], make_guide=FirstEight)
    outputs = list(finish(engine).values())
    assert len(outputs) == 2 * len(PARAMS) + 1
    assert not any(output.error for output in outputs)
    assert not gpu.waits, "a step waits for the device"
    assert not what_is_new(gpu.variants, compiled), "a kernel is compiled in the middle of a run"
    return engine, gpu.replays - replays, gpu.launches - launches


@pytest.mark.slow_cases("qwen2-moe", "gemma4-26b")
@interpreted
@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_step_of_every_family(family, tmp_path, idle_gpu):
    sizes = SIZES.get(family, {})
    engine, replays, launches = check(idle_gpu, tiny_model(family, tmp_path / "model", **sizes))
    assert replays > 0
    assert launches > 0
    assert engine.runner.state.num_groups == (2 if sizes else 1)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4-26b", "qwen3-moe", "gpt_oss", "deepseek_v3", *HYBRIDS])
def test_a_step_in_the_type_that_gpus_compute_in(family, tmp_path, idle_gpu):
    """Tiles differ from those of float32."""
    path = tiny_model(family, tmp_path / "model", max_position_embeddings=1024, **SIZES.get(family, {}))
    states = {"num_state_slots": 12, "checkpoints": "end"} if family in HYBRIDS else {}
    prompts = [[7 + number] * length for number, length in enumerate((3, 20, 40, 90, 170, 300, 520, 640))]
    limits = {"max_model_len": 700, "num_kvcache_blocks": 400, "chunked_prefill_size": 300}
    check(idle_gpu, path, prompts, dtype="bfloat16", **limits, **states)


@interpreted
@pytest.mark.parametrize("config", [{"enforce_eager": True}, {"async_scheduling": False}], ids=str)
def test_without_graphs_or_in_order(config, tmp_path, idle_gpu):
    check(idle_gpu, tiny_model("qwen3", tmp_path / "model"), **config)


@interpreted
@pytest.mark.parametrize("family", ["qwen2-moe", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [700, pytest.param(300, marks=pytest.mark.slow)])
def test_prompts_of_several_tiles_and_splits(family, chunk, tmp_path, idle_gpu):
    prompts = [[7 + number] * length for number, length in enumerate((3, 20, 40, 90, 170, 300, 520, 640))]
    path = tiny_model(family, tmp_path / "model", max_position_embeddings=1024, **SIZES.get(family, {}))
    check(idle_gpu, path, prompts, max_model_len=700, num_kvcache_blocks=400, chunked_prefill_size=chunk)


@interpreted
@pytest.mark.slow
def test_packed_weights_of_long_prompts(tmp_path, idle_gpu):
    model = tiny_model("qwen3", tmp_path / "model", intermediate_size=128, max_position_embeddings=1024)
    packed, _ = quantized_twins(model, tmp_path, *FORMATS["awq"])
    prompts = [[7 + number] * length for number, length in enumerate((3, 20, 40, 90, 170, 300, 520, 640))]
    check(idle_gpu, packed, prompts, max_model_len=700, num_kvcache_blocks=400)


@interpreted
def test_an_fp8_cache(tmp_path, idle_gpu):
    check(idle_gpu, tiny_model("gemma3", tmp_path / "model", **WINDOWS), kv_cache_dtype="fp8")


@pytest.mark.quick("awq", "fp8-block")
@interpreted
@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "pack-int4", "fp8-block", "nvfp4"])
def test_packed_weights(name, tmp_path, idle_gpu):
    model = tiny_model("qwen3", tmp_path / "model", intermediate_size=128, num_hidden_layers=1)
    packed, _ = quantized_twins(model, tmp_path, *FORMATS[name])
    engine, replays, _ = check(idle_gpu, packed)
    assert replays > 0
    assert engine.plan.no_graphs is None


@interpreted
def test_mxfp4_experts(tmp_path, idle_gpu):
    _, packed = mxfp4_twins(tmp_path)
    check(idle_gpu, packed)
