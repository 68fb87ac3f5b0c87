"""What one decode step asks of a GPU, counted on the pretended one: kernels, operations of torch, and uploads."""

from engine_harness import FirstEight

from pagedcli.config import EngineConfig
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

NUM_ROWS = 4
KINDS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "repetition penalty": {"temperature": 0.7, "repetition_penalty": 1.05, "top_p": 0.8, "top_k": 20},
    "presence and frequency penalty": {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit bias": {"temperature": 0, "logit_bias": {7: 2.0}},
    "min tokens": {"temperature": 0, "min_tokens": 30, "ignore_eos": False},
    "grammar": {"temperature": 0},
}


# as docs/lab/performance.md names them -> (family of model_zoo, what differs from it)
FAMILIES = {
    "Llama, Mistral": ("llama", {}),
    "Qwen3": ("qwen3", {}),
    "Gemma 2": ("gemma2", {}),
    "Gemma 3": ("gemma3", {}),
    "OLMo2": ("olmo2", {}),
    "Phi-3": ("phi3", {}),
    "Phi-4-mini": ("phi3-longrope", {}),
    "Granite": ("granite", {}),
    "Qwen3-MoE": ("qwen3-moe", {"mlp_only_layers": []}),
    "Qwen2-MoE": ("qwen2-moe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "DeepSeek-V3": ("deepseek_v3", {"first_k_dense_replace": 0}),
    "Gemma 4 12B, 31B": ("gemma4-31b", {}),
    "Gemma 4 E2B, E4B": ("gemma4-e2b", {"num_kv_shared_layers": 0}),
    "Gemma 4 26B-A4B": ("gemma4-26b", {}),
}


def counts_of_a_family(gpu, make_model, name):
    """Kernels and operations of one layer and those of the rest of a step, as text, and uploads of the step."""
    family, given = FAMILIES[name]
    one, two = (
        counts_of_a_step(
            gpu, make_model(family, num_hidden_layers=layers, **options), enforce_eager=True, dtype="bfloat16"
        )
        for layers in (1, 2)
        for options in [given | ({"layer_types": ["full_attention"] * layers} if "gemma4" in family else {})]
    )
    layer = {name: two[name] - one[name] for name in ("kernels", "operations")}
    rest = [one[name] - layer[name] for name in layer]
    return [*(str(number) for number in (*layer.values(), *rest)), str(one["uploads"])]


def counts_of_a_step(gpu, path, kind="greedy", *, num_rows=NUM_ROWS, **options):
    """Kernels, operations, uploads and steps ahead of one decode step of so many such requests."""
    config = {"max_num_seqs": num_rows, "num_kvcache_blocks": 90, "max_model_len": 128}
    engine = LLMEngine(EngineConfig(model=str(path), device="cuda", **{"dtype": "float32", **config, **options}))
    options = {"ignore_eos": True, "max_tokens": 30, "seed": 1, **KINDS[kind]}
    for number in range(num_rows):
        make = FirstEight if kind == "grammar" else None
        engine.add_request(str(number), [5 + number, 6, 7], SamplingParams(**options), make_guide=make)
    for _ in range(6):
        engine.step()
    before, ahead = gpu.counts.copy(), engine.num_steps_ahead
    engine.step()
    found = gpu.counts - before
    return {**{name: found[name] for name in ("kernels", "operations", "uploads")},
            "ahead": engine.num_steps_ahead - ahead}  # fmt: skip
