"""Whole models on a pretended GPU, whose kernels run in triton's interpreter, answer what the CPU reference answers:
every kind of layers and backend with whatever a row may ask, and every format of weights. No step waits for the device,
uploads from memory that is not pinned, or compiles a kernel.
"""

from itertools import product

import fake_flash
import pytest
from gguf_files import gguf_twins
from harness.engine import FirstEight, outputs_of, ragged_prompts, run
from interpreter import interpreted
from model_zoo import GEMMA4_FAMILIES, tiny_model
from quantized_zoo import FORMATS, mxfp4_twins, quantized_twins
from quick import slow_but

from pagedcli.config import EngineConfig
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

pytest.importorskip("triton")

PROMPTS = [[5 + i % 300 for i in range(length)] for length in (9, 14)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


FORCED = {"max_tokens": 3, "ignore_eos": True}
REQUESTS = [
    SamplingParams(temperature=0, **FORCED),
    SamplingParams(temperature=0.9, seed=3, **FORCED),
    SamplingParams(temperature=1.1, seed=4, top_k=9, top_p=0.9, **FORCED),
    SamplingParams(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={7: 2.0}, min_tokens=3, max_tokens=3
    ),
    SamplingParams(temperature=0.8, seed=5, logprobs=2, min_p=0.1, n=2, **FORCED),
    SamplingParams(temperature=0, max_tokens=3, beam_width=2),
    SamplingParams(temperature=0, prompt_logprobs=2, **FORCED),
]
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SHARED = {**WINDOWS, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
KINDS = {
    "dense": ("qwen3", {}),
    "windows": ("gemma3", WINDOWS),
    "experts": ("qwen3-moe", {}),
    "shared K/V": ("gemma4-e2b", {"num_hidden_layers": 3, "num_kv_shared_layers": 1, **SHARED}),
    "recurrent": ("qwen3_5", {}),
    "convolution": ("lfm2", {}),
    "kimi delta": ("kimi_linear", {}),
    "latent": ("deepseek_v3", {}),
    "sinks": ("gpt_oss", {}),
    "two head sizes": ("gemma4-26b", {**WINDOWS, "num_hidden_layers": 2}),
    "soft caps": ("gemma2", WINDOWS),
    "multipliers": ("granite", {}),
    "long rotations": ("phi3-longrope", {}),
    "layers without rotation": ("smollm3", {}),
    "heads by layer": ("laguna", {**WINDOWS, "num_hidden_layers": 2, "num_attention_heads_per_layer": [8, 4]}),
}
PAIRS = [*product(KINDS, ("triton",)), *product([*KINDS][:9], ("sdpa", "reference"))]
# the others have sinks, latents or heads of several kinds, which flash refuses
PAIRS += list(product(("dense", "windows", "experts", "recurrent", "convolution"), fake_flash.MODULES))


def make_engine(path, gpu=None, **config):
    """On the pretended GPU, or with the reference on the CPU. Steps that measure and compile compute nothing there."""
    config = {"max_num_seqs": 2, "num_kvcache_blocks": 24, "max_model_len": 64, "dtype": "float32", **config}
    config = {"max_num_batched_tokens": 32, **config}
    if gpu is None:
        return LLMEngine(EngineConfig(model=str(path), device="cpu", attention_backend="reference", **config))
    runs_kernels, gpu.runs_kernels = gpu.runs_kernels, False
    engine = LLMEngine(EngineConfig(model=str(path), device="cuda", **config))
    gpu.runs_kernels = runs_kernels
    del gpu.waits[:]
    return engine


def tokens(path, gpu=None, **config):
    engine = make_engine(path, gpu, **config)
    found = run(engine, PROMPTS, PARAMS)
    check_no_waits(engine, gpu)
    return found


def check_no_waits(engine, gpu):
    if gpu is not None and engine.plan.backend == "triton":
        assert gpu.waits == [], "a step waits for the device"


def answers(path, gpu=None, **config):
    """What a model says to every kind of request: tokens and log-probabilities."""
    engine = make_engine(path, gpu, **{"max_num_seqs": 4, "num_kvcache_blocks": 60, **config})
    replays = gpu.replays if gpu else 0
    found = answers_of(engine, PROMPTS)
    check_no_waits(engine, gpu)
    if gpu is not None and engine.plan.backend == "triton":
        assert (gpu.replays > replays) == (not config.get("enforce_eager"))
    return found


def answers_of(engine, prompts):
    for number, params in enumerate(REQUESTS):
        engine.add_request(str(number), prompts[number % len(prompts)], params)
    engine.add_request("guided", [5, 6, 7], REQUESTS[0], make_guide=FirstEight)
    engine.add_request("scored", prompts[0], REQUESTS[0], continuations=[[9, 8], [4, 3, 2]])
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert not output.error
            chosen = [(sample.token_ids, sample.logprobs) for sample in output.samples]
            found[output.request_id] = leaves((chosen, output.prompt_logprobs, output.scores))
    assert len(found) == len(REQUESTS) + 2
    return found


def leaves(value):
    """The numbers in it."""
    if hasattr(value, "__slots__"):
        value = [getattr(value, name) for name in value.__slots__]
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, list | tuple) else [value]


def options_of(backend, monkeypatch):
    """How an engine takes a backend, which is installed for the test."""
    if backend not in fake_flash.MODULES:
        return {"attention_backend": backend}
    fake_flash.install(monkeypatch, backend)
    return {"attention_backend": "flash", "dtype": "float16", "block_size": 256 if backend == "flash2" else 16}


@interpreted
@pytest.mark.parametrize(("kind", "backend"), slow_but([("dense", "triton")], PAIRS))
def test_all_that_a_row_may_ask(kind, backend, tmp_path, gpu, monkeypatch):
    family, sizes = KINDS[kind]
    path, options = tiny_model(family, tmp_path / "model", **sizes), options_of(backend, monkeypatch)
    found = answers(path, gpu, **options)
    expected = answers(path, **{name: value for name, value in options.items() if name != "attention_backend"})
    allowed = 3e-2 if "dtype" in options else 2e-3
    assert found == {name: pytest.approx(numbers, abs=allowed) for name, numbers in expected.items()}


@interpreted
def test_fused_kernels_give_the_same_tokens_in_five_launches_per_layer(tmp_path, gpu):
    path = tiny_model("qwen3", tmp_path / "model")
    engine = make_engine(path, gpu, gpu_kernels="fused")
    assert run(engine, PROMPTS, PARAMS) == tokens(path)
    check_no_waits(engine, gpu)
    graph = engine.runner.graphs.bucket_for(1).graph
    kernels = [operands[0].fn.__name__ for func, operands, _, _ in graph.operations if func.__name__ == "launch"]
    assert kernels.count("product_kernel") == 4 * engine.model.spec.num_layers
    assert kernels.count("decode_kernel") == engine.model.spec.num_layers
    assert len(kernels) == 5 * engine.model.spec.num_layers + 5, "and the last norm and four of sampling"


@interpreted
def test_invariant_kernels_give_the_same_bits_in_any_company(tmp_path, gpu):
    path = tiny_model("qwen3", tmp_path / "model", num_hidden_layers=1)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, ignore_eos=True)

    def found(prompts, **options):
        engine = make_engine(path, gpu, gpu_kernels="invariant", **options)
        samples = [output.samples[0] for output in outputs_of(engine, prompts, params)]
        return [leaves((sample.token_ids, sample.logprobs)) for sample in samples]

    together = found(PROMPTS)
    assert [*found(PROMPTS[:1]), *found(PROMPTS[1:], chunked_prefill_size=5)] == together
    assert [each[:2] for each in together] == [leaves(each) for each in run(make_engine(path), PROMPTS, params)]


LOOPS = [
    ("dense", {"async_scheduling": False, "enforce_eager": True, "chunked_prefill_size": 9}),
    ("dense", {"attention_backend": "sdpa", "num_kvcache_blocks": 9}),
    ("dense", {"chunked_prefill_size": 8}),  # the last piece of a prompt that two samples share is one token: a graph
    ("recurrent", {"num_state_slots": 10, "chunked_prefill_size": 9}),
    ("shared K/V", {"num_kvcache_blocks": 14, "enforce_eager": True}),  # preempted
    *((kind, {"dtype": "float16"}) for kind in [*KINDS][:7]),  # latents: a draw between two tokens
]


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), LOOPS, ids=str)
def test_all_that_a_row_may_ask_in_other_loops_pools_and_half_precision(kind, options, tmp_path, gpu):
    family, sizes = KINDS[kind]
    path = tiny_model(family, tmp_path / "model", **sizes)
    expected, allowed = (answers(path, dtype="float16"), 3e-2) if "dtype" in options else (answers(path), 2e-3)
    assert answers(path, gpu, **options) == {name: pytest.approx(each, abs=allowed) for name, each in expected.items()}


@interpreted
@pytest.mark.parametrize(("name", "backend"), slow_but([("awq", "triton")], product(FORMATS, ("triton", "sdpa"))))
def test_every_format_of_checkpoints(name, backend, tmp_path, gpu):
    model = tiny_model("qwen3", tmp_path / "model", intermediate_size=128, num_hidden_layers=1)
    packed, plain = quantized_twins(model, tmp_path, *FORMATS[name])
    engine = make_engine(packed, gpu, attention_backend=backend)
    assert run(engine, PROMPTS, PARAMS) == tokens(plain)
    check_no_waits(engine, gpu)
    assert name != "awq" or any("kept so; activations are not rounded" in note for note in engine.model.notes)


GGUF = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
GGUF += ("IQ4_NL", "IQ4_XS", "MXFP4", "Q4_K and Q6_K")


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("kind", GGUF)
def test_every_type_of_gguf_files(kind, tmp_path, gpu):
    kinds = kind.split(" and ")
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    source = tiny_model("qwen3", tmp_path / "source", **wide)
    path, plain = gguf_twins(source, tmp_path, type_of=lambda name: kinds[-1 if "ffn_down" in name else 0])
    assert tokens(path, gpu) == tokens(plain)


@interpreted
@pytest.mark.parametrize(
    ("family", "backend"),
    slow_but([("olmo2", "sdpa")], product(("olmo2", "olmoe", "gemma4-31b"), ("sdpa", "reference"))),
)
def test_heads_normed_outside_of_a_fused_store(family, backend, tmp_path, gpu):
    """q and k are strided views of the fused projection, and triton's norm reads rows one after the other."""
    sizes = {"num_hidden_layers": 2}
    if family == "gemma4-31b":
        sizes |= {"layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 1}
        sizes |= {"num_global_key_value_heads": 1}
    path = tiny_model(family, tmp_path / "model", **sizes)
    expected = tokens(path)
    assert tokens(path, gpu, attention_backend=backend) == expected


@interpreted
@pytest.mark.slow
def test_mxfp4_experts(tmp_path, gpu):
    plain, packed = mxfp4_twins(tmp_path)
    assert tokens(packed, gpu) == tokens(plain)


# ---------------------------------------------------------------------- kernels that are launched but not run

FAMILIES = ("qwen3", "llama-untied", "gemma2", "gemma3", "phi3-longrope", "olmo2", "granite", "smollm3", "hunyuan")
FAMILIES += ("starcoder2", "cohere", "glm4-moe", "qwen3-moe", "qwen2-moe", "mixtral", "olmoe", *GEMMA4_FAMILIES)
FAMILIES += ("laguna",)
HYBRIDS = ("qwen3_5", "qwen3_5-moe", "qwen3_next", "kimi_linear", "lfm2", "lfm2-bias", "lfm2-moe", "bamba")
HYBRIDS += ("granite-hybrid",)
IN_BFLOAT16 = ("qwen3", "gemma3", "gemma4-26b", "qwen3-moe", "gpt_oss", "deepseek_v3", *HYBRIDS)
# windows shorter than the prompts, several groups of layers
WIDER = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
SIZES = {"gemma2": WIDER, "gemma3": WIDER}
SIZES["laguna"] = {**WIDER, "num_hidden_layers": 2, "num_attention_heads_per_layer": [8, 4]}
SIZES |= {family: {**WIDER, "num_hidden_layers": 2} for family in GEMMA4_FAMILIES}
SIZES["gemma4-e2b"] = KINDS["shared K/V"][1] | {"sliding_window": 20}
LONG_PROMPTS = [[7 + number] * length for number, length in enumerate((3, 20, 40, 90, 170, 300, 520, 640))]
LONG = {"max_model_len": 700, "num_kvcache_blocks": 400}


def check_idle(gpu, path, prompts=None, **config):
    """Every kind of request at once, twice: the second time from the prefix cache."""
    from pretend_cuda import what_is_new

    limits = {"max_num_seqs": 5, "num_kvcache_blocks": 60, "max_num_batched_tokens": None}
    engine = make_engine(path, gpu, **{**limits, **config})
    replays, compiled = gpu.replays, set(gpu.variants)
    assert compiled
    for _ in range(2):
        answers_of(engine, prompts or ragged_prompts(len(REQUESTS)))
    check_no_waits(engine, gpu)
    assert not what_is_new(gpu.variants, compiled), "a kernel is compiled in the middle of a run"
    assert (gpu.replays > replays) == (not config.get("enforce_eager"))
    return engine


@interpreted
@pytest.mark.parametrize("family", slow_but(["qwen3", "gemma3", "cohere", "phi3-longrope"], FAMILIES))
def test_a_step_of_every_family(family, tmp_path, idle_gpu):
    sizes = SIZES.get(family, {})
    engine = check_idle(idle_gpu, tiny_model(family, tmp_path / "model", **sizes))
    assert engine.runner.state.num_groups == (2 if sizes else 1)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("family", IN_BFLOAT16)
def test_a_step_in_the_type_that_gpus_compute_in(family, tmp_path, idle_gpu):
    """Tiles differ from those of float32."""
    path = tiny_model(family, tmp_path / "model", max_position_embeddings=1024, **SIZES.get(family, {}))
    states = {"num_state_slots": 12, "checkpoints": "end"} if family in HYBRIDS else {}
    check_idle(idle_gpu, path, LONG_PROMPTS, dtype="bfloat16", chunked_prefill_size=300, **LONG, **states)


@interpreted
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3", {"enforce_eager": True}),
        ("qwen3", {"async_scheduling": False}),
        ("gemma3", {"kv_cache_dtype": "fp8"}),
        ("qwen2-moe", {"chunked_prefill_size": 700, **LONG}),
        pytest.param("gemma3", {"chunked_prefill_size": 300, **LONG}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_without_graphs_in_order_with_an_fp8_cache_or_of_several_tiles(family, config, tmp_path, idle_gpu):
    path = tiny_model(family, tmp_path / "model", max_position_embeddings=1024, **SIZES.get(family, {}))
    check_idle(idle_gpu, path, LONG_PROMPTS if "max_model_len" in config else None, **config)
