"""Every kernel of well-known models, as the decoder launches it, compiles for every supported GPU within its limits."""

import os
import re
import subprocess
import sys

import pytest
from triton_compile import MOST_SPILLS, SHARED_LIMIT

pytest.importorskip("triton")
from triton_launches import launches_of

BASE = {
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 1,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
# a window within the 1,024 tokens of the launches: one as long hides nothing and is left out
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def sizes(vocabulary, hidden, intermediate, heads, kv_heads, head_dim):
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def model(architecture, model_type, *numbers, **more):
    return {**BASE, "architectures": [architecture], "model_type": model_type, **sizes(*numbers), **more}


def packed(bits, group_size, **more):
    quantization = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, "sym": True}
    return {"quantization_config": {**quantization, **more}}


GEMMA3 = ("Gemma3ForCausalLM", "gemma3_text")
GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
LLAMA = ("LlamaForCausalLM", "llama", 128256, 4096, 14336, 32, 8, 128)
GPT_OSS = ("GptOssForCausalLM", "gpt_oss", 201088, 2880, 2880, 64, 8, 64)
QWEN3_30B = ("Qwen3MoeForCausalLM", "qwen3_moe", 151936, 2048, 6144, 32, 4, 128)
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
MIXED = ["linear_attention", "full_attention"]
DELTA = {
    "num_hidden_layers": 2, "layer_types": MIXED, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
DELTA_EXPERTS = {**DELTA, **EXPERTS, "linear_num_value_heads": 32, "num_experts": 16, "num_experts_per_tok": 4}
MAMBA = {
    "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "num_hidden_layers": 2,
}  # fmt: skip
GRANITE4 = {**MAMBA, "mamba_n_heads": 48, "mamba_d_state": 128, "layer_types": MIXED, "num_local_experts": 0}
KIMI = {
    "num_hidden_layers": 2, "layer_types": MIXED, "num_experts": 16, "num_experts_per_token": 8,
    "linear_attn_config": {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "first_k_dense_replace": 1, "num_shared_experts": 1, "routed_scaling_factor": 2.446,
}  # fmt: skip
HYBRIDS = {
    "qwen3.5-0.8b": model("Qwen3_5ForCausalLM", "qwen3_5_text", 248320, 1024, 3584, 8, 2, 256, **DELTA),
    "qwen3-next": model(
        "Qwen3NextForCausalLM", "qwen3_next", 151936, 2048, 5120, 16, 2, 256, **DELTA_EXPERTS,
        shared_expert_intermediate_size=512,
    ),
    "bamba-9b": model(
        "BambaForCausalLM", "bamba", 128256, 4096, 14336, 32, 8, 128, **MAMBA, attn_layer_indices=[1]
    ),
    "granite-4-h-micro": model(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", 100352, 1536, 4096, 12, 4, 128, **GRANITE4,
        shared_intermediate_size=4096,
    ),
    "kimi-linear": model(
        "KimiLinearForCausalLM", "kimi_linear", 163840, 2304, 9216, 32, 32, 72, **KIMI, moe_intermediate_size=1024,
    ),
    "lfm2-1.2b": model(
        "Lfm2ForCausalLM", "lfm2", 65536, 2048, 12288, 32, 8, 64, num_hidden_layers=2, full_attn_idxs=[1]
    ),
}  # fmt: skip
MODELS = {
    "qwen3-0.6b": model("Qwen3ForCausalLM", "qwen3", 151936, 1024, 3072, 16, 8, 128, tie_word_embeddings=True),
    "qwen3-8b": model("Qwen3ForCausalLM", "qwen3", 151936, 4096, 12288, 32, 8, 128),
    "qwen2.5-0.5b": model("Qwen2ForCausalLM", "qwen2", 151936, 896, 4864, 14, 2, 64),
    "llama-3-8b": model(*LLAMA),
    "gemma-3-1b": model(*GEMMA3, 262144, 1152, 6912, 4, 1, 256, **LAYERS, **GELU, query_pre_attn_scalar=256),
    "gemma-3-27b": model(*GEMMA3, 262144, 5376, 21504, 32, 16, 128, **LAYERS, **GELU, query_pre_attn_scalar=168),
    "gemma-2-9b": model(
        "Gemma2ForCausalLM", "gemma2", 256000, 3584, 14336, 16, 8, 256, **LAYERS, **GELU, **GEMMA2,
        query_pre_attn_scalar=256,
    ),
    "phi-3-mini": model("Phi3ForCausalLM", "phi3", 32064, 3072, 8192, 32, 32, 96),
    "qwen3-30b-a3b": model(*QWEN3_30B, **EXPERTS),
    "mixtral": model(
        "MixtralForCausalLM", "mixtral", 32000, 4096, 14336, 32, 8, 128, num_local_experts=8, num_experts_per_tok=2
    ),
    "gpt-oss-20b": model(*GPT_OSS, **LAYERS, num_local_experts=32, num_experts_per_tok=4),
    "gpt-oss-20b mxfp4": model(
        *GPT_OSS, **LAYERS, num_local_experts=32, num_experts_per_tok=4, quantization_config={"quant_method": "mxfp4"}
    ),
    "llama-3-8b gptq 128": model(*LLAMA, **packed(4, 128)),
    "llama-3-8b gptq 64": model(*LLAMA, **packed(4, 64)),
    "llama-3-8b gptq 32": model(*LLAMA, **packed(4, 32)),
    "llama-3-8b gptq channel": model(*LLAMA, **packed(4, -1)),
    "llama-3-8b gptq 8 bits": model(*LLAMA, **packed(8, 128)),
    "qwen3-30b-a3b gptq": model(*QWEN3_30B, **EXPERTS, **packed(4, 128)),
    "llama-3-8b awq": model(*LLAMA, **packed(4, 128, quant_method="awq", version="gemm", zero_point=True)),
}  # fmt: skip
HEADS = {**LAYERS, **GELU, "global_head_dim": 512}
KEYS_AS_VALUES = {**HEADS, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
GEMMA4 = {
    "gemma-4-e2b": model(
        "Gemma4ForCausalLM", "gemma4_text", 262144, 1536, 6144, 8, 1, 256,
        **{**HEADS, "num_hidden_layers": 3, "layer_types": [*LAYERS["layer_types"], "full_attention"]},
        hidden_size_per_layer_input=256, num_kv_shared_layers=1, use_double_wide_mlp=True,
    ),
    "gemma-4-12b": model(
        "Gemma4UnifiedForCausalLM", "gemma4_unified_text", 262144, 3840, 15360, 16, 8, 256, **KEYS_AS_VALUES,
        num_global_key_value_heads=1,
    ),
    "gemma-4-26b-a4b": model(
        "Gemma4ForCausalLM", "gemma4_text", 262144, 2816, 2112, 16, 8, 256, **KEYS_AS_VALUES,
        num_global_key_value_heads=2, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma-4-31b": model(
        "Gemma4ForCausalLM", "gemma4_text", 262144, 5376, 21504, 32, 16, 256, **KEYS_AS_VALUES,
        num_global_key_value_heads=4,
    ),
}  # fmt: skip
# decode of one, few and many sequences, over one split and several; prompts with decodes among them
STEPS = [[(300, 1)], [(300, 1)] * 3, [(20, 1)] * 40, [(1000, 1)] * 300, [(500, 500), (300, 1), (40, 3)]]
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
WITH_FP8 = [(8, 9), (9, 0), (10, 0), (12, 0)]
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
CHANNELS = {"quantization_config": {"quant_method": "fbgemm_fp8"}}
FP8_MODELS = {
    "llama-3-8b fp8": model(*LLAMA, **CHANNELS),
    "qwen3-30b-a3b fp8": model(*QWEN3_30B, **EXPERTS, **FP8),
}


TUNED = "3.7."  # the version whose registers the tiles were chosen for
# Side by side on a multiprocessor, at least; 16 for kernels that are not named.
LEAST_WARPS = {
    "decode_kernel": 4, "linear_kernel": 4, "chunk_kernel": 8, "prefill_kernel": 8, "step_kernel": 8,
    "product_kernel": 4, "experts_kernel": 8, "combine_kernel": 12, "inverse_kernel": 12,
}  # fmt: skip
SPILLS_ELSEWHERE = 32  # bytes of other versions: 3.6 and 3.9 spill up to 24 of the limits and of experts in FP8


def check_fits(kernel, name, capability, spills=0):
    from triton import __version__

    elsewhere = 0 if __version__.startswith(TUNED) else SPILLS_ELSEWHERE
    spills = max(spills, elsewhere, MOST_SPILLS.get((kernel.name, capability), 0))
    assert kernel.shared_bytes <= SHARED_LIMIT[capability], f"{name} outgrows shared memory"
    assert kernel.spilled_bytes <= spills, f"{name} spills"
    if kernel.name == "decode_kernel" and "bf16" in str(
        name
    ):  # it lives from wide loads in flight, with no look-up among them
        assert set(kernel.copy_widths()) == {16}, f"{name} has narrow copies"
    few = kernel.warps_side_by_side(capability) < LEAST_WARPS.get(kernel.name, 16)
    assert not few, f"{name} leaves a multiprocessor with few warps"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "capability", "num_warps", "found"),
    [
        ("none", 100, 8, None),
        ("few warps", 80, 1, "spills"),
        ("many stages", 86, 8, "outgrows"),
        ("alone", 86, 8, "few warps"),
    ],
)
def test_a_kernel_that_does_not_fit_is_found(fault, capability, num_warps, found, tmp_path):
    import triton
    import triton.language as tl
    from triton_compile import Compiled

    @triton.jit
    def multiply_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, K: tl.constexpr):
        at, k = tl.arange(0, BLOCK), tl.arange(0, K)
        sums = tl.zeros((BLOCK, BLOCK), tl.float32)
        for step in range(16):
            x = tl.load(x_ptr + at[:, None] * 1024 + step * K + k[None, :])
            y = tl.load(x_ptr + at[None, :] * 1024 + step * K + k[:, None])
            sums = tl.dot(x, y, sums)
        tl.store(out_ptr + at[:, None] * BLOCK + at[None, :], sums)

    types, sizes = {"x_ptr": "*bf16", "out_ptr": "*fp32"}, {"BLOCK": 128, "K": 64}
    stages = 5 if fault == "many stages" else 2
    kernel = Compiled(multiply_kernel, types, sizes, capability, num_warps, tmp_path, stages)
    if found is None:
        check_fits(kernel, fault, capability)
    else:
        with pytest.raises(AssertionError, match=found):
            check_fits(kernel, fault, capability)


FUSED = ("qwen3-0.6b", "qwen3-8b", "qwen2.5-0.5b", "llama-3-8b awq", "llama-3-8b gptq 32")
OVER_FP8 = ("qwen3-0.6b", "qwen3-8b", "gemma-3-1b", "gemma-3-27b", "phi-3-mini", *GEMMA4)
CASES = [(name, capability, "auto") for name in (*MODELS, *HYBRIDS, *GEMMA4) for capability in CAPABILITIES]
CASES += [(name, capability, "auto") for name in FP8_MODELS for capability in WITH_FP8]
CASES += [(name, capability, "kernels fused") for name in FUSED for capability in CAPABILITIES]
CASES += [("qwen3-0.6b", capability, "kernels invariant") for capability in CAPABILITIES]
CASES += [("llama-3-8b fp8", capability, "kernels fp8") for capability in WITH_FP8]
CASES += [(name, capability, "fp8") for name in OVER_FP8 for capability in WITH_FP8]


@pytest.mark.quick("qwen3-0.6b-(9, 0)-auto")
@pytest.mark.parametrize(("name", "capability", "what"), CASES, ids=lambda value: str(value))
def test_every_kernel_of_a_model_compiles_within_the_card(name, capability, what, tmp_path, monkeypatch):
    config = (MODELS | FP8_MODELS | HYBRIDS | GEMMA4)[name]
    key, kernels = what.partition(" ")[::2]
    options = {"gpu_kernels": kernels} if kernels else {"kv_cache_dtype": key}
    options |= {"capability": capability, "steps": STEPS}
    number = capability[0] * 10 + capability[1]
    for launch in launches_of(config, tmp_path / "model", monkeypatch, **options):
        # windows with soft caps in one tile, and groups of 8, cost ptxas a few values of a prefill kernel; a scale for
        # all inputs costs two of a product's on 10.0, in tiles of 128 rows, and FP8 two of the experts' on 9.0
        known = {"prefill_kernel": 96, "linear_kernel": 8 * (number == 100), "experts_kernel": 8 * (number == 90)}
        spills = known.get(launch.function.__name__, 0)
        kernel = launch.compiled(number, tmp_path)
        check_fits(kernel, launch, number, spills)
        if "griddepcontrol.wait" in kernel.ptx:  # what the kernel before computes is not read before it has ended
            assert not re.search(
                r"ld\.|cp\.async", re.sub(r"ld\.param", "", kernel.ptx.partition("griddepcontrol.wait")[0])
            )


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_other_versions_of_triton_compile_every_kernel(version, tmp_path):
    """The one of torch 2.11 and the newest; torch need not be the one that asks for it."""
    folder = tmp_path / "triton"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"triton=={version}"]
    if subprocess.run(install, check=False).returncode:
        pytest.skip(f"triton {version} cannot be installed here")
    paths = os.pathsep.join([str(folder), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    named = f"import triton; assert triton.__version__ == '{version}', triton.__version__"
    subprocess.run([sys.executable, "-c", named], env=environment, check=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "slow", "-k", SUBSET, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 40


# a model of every kind, on sm_80 to sm_120
SUBSET = "compiles_within and (qwen3-0.6b or qwen3-30b-a3b or awq or qwen3.5-0.8b or gpt-oss or bamba or gemma-4-26b)"


@pytest.mark.quick("qwen3.5-0.8b-*")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma-2-9b", {"rotate_and_store_kernel", "prefill_kernel", "decode_kernel", "combine_kernel"}),
        (
            "qwen3-30b-a3b",
            {
                "route_kernel",
                "align_kernel",
                "experts_kernel",
                "sum_kernel",
                "sum_parts_kernel",
                "rotate_and_store_kernel",
                "add_rms_norm_kernel",
            },
        ),
        ("llama-3-8b gptq 128", {"linear_kernel", "gated_kernel", "sample_rows_kernel"}),
        ("qwen3.5-0.8b", {"conv_kernel", "step_kernel", "inverse_kernel", "chunk_kernel", "norm_then_gate_kernel"}),
        ("gemma-4-26b-a4b", {"rotate_and_store_kernel", "route_kernel", "experts_kernel", "decode_kernel"}),
        ("kimi-linear", {"conv_kernel", "step_kernel", "inverse_kernel", "chunk_kernel", "norm_then_gate_kernel"}),
        ("bamba-9b", {"conv_kernel", "conv_state_kernel", "step_kernel", "chunk_kernel", "gate_then_norm_kernel"}),
    ],
)
def test_real_sizes_are_launched_on_the_device_within_the_limits_of_a_grid(name, expected, tmp_path, monkeypatch):
    config = (MODELS | HYBRIDS | GEMMA4)[name]
    launches = launches_of(config, tmp_path / "model", monkeypatch, capability=(9, 0), steps=STEPS)
    assert expected <= {launch.function.__name__ for launch in launches}
    windowed = {
        dict(launch.constants)["WINDOWED"] for launch in launches if launch.function.__name__ == "decode_kernel"
    }
    assert windowed == ({True, False} if "sliding_window" in config else {False})
    assert all(
        type_name in ("*bf16", "*fp8e4nv") for launch in launches for key, type_name in launch.types if "cache" in key
    )
