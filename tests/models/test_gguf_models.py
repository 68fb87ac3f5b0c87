"""Models from GGUF files: every family, against the same numbers in a Hugging Face folder."""

import math
import re
import shutil

import numpy as np
import pytest
from gguf_conversions import converted
from gguf_files import gguf, gguf_twins, random_blocks, split
from harness.engine import make_engine, ragged_prompts, run
from model_zoo import cached_model, tiny_model
from safetensors import numpy
from safetensors.torch import load_file, save_file

from pagedcli.errors import MissingModelError, ModelError
from pagedcli.models.gguf.types import TYPES
from pagedcli.models.hub import resolve_model
from pagedcli.models.reading import read_spec
from pagedcli.sampling_params import SamplingParams

FAMILIES = (
    *("llama", "llama-untied", "llama-linear", "llama3", "llama-yarn", "mistral", "qwen2", "qwen3", "phi3"),
    *("phi3-longrope", "olmo2", "granite", "smollm3", "gemma2", "gemma3"),
    *("qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "gpt_oss", "lfm2", "lfm2-bias", "lfm2-moe"),
)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
# What files do not say is always so: every fourth layer has no rotary embedding, and every layer has experts.
IN_FILES = {
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "qwen3-moe": {"mlp_only_layers": []},
    "gpt_oss": {"rope_parameters": {**YARN, "truncate": False}},
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def check_tokens(source, path, **options):
    prompts = ragged_prompts(4)
    assert run(make_engine(path, **options), prompts, PARAMS) == run(make_engine(source, **options), prompts, PARAMS)


@pytest.mark.slow_cases("qwen3-moe", "qwen2-moe")
@pytest.mark.bits
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_tokens_of_the_folder_it_was_made_from(family, tmp_path_factory, tmp_path):
    source = cached_model(family, tmp_path_factory)
    if family in IN_FILES:
        source = tiny_model(family, tmp_path / "source", **IN_FILES[family])
    path, plain = gguf_twins(source, tmp_path)
    check_tokens(plain, path)


QUANTIZED = [kind.name for kind in TYPES.values() if not kind.is_float]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 320}


@pytest.mark.parametrize("kind", ["F16", "BF16", *QUANTIZED])
def test_widened_weights_give_the_tokens_of_their_numbers(kind, tmp_path):
    """Every linear layer, the embedding and the output layer in one type; in float32 without the CPU kernels."""
    path, plain = gguf_twins(tiny_model("llama", tmp_path / "source", **WIDE), tmp_path, type_of=lambda name: kind)
    check_tokens(plain, path, attention_backend="sdpa")


@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
def test_numbers_multiply_whole_weights_of_nvfp4(backend, tmp_path):
    """As of a converted ModelOpt checkpoint: of q but not of k and v, and one for each expert."""
    scales = {"attn_q": [0.7], "ffn_gate_exps": np.linspace(0.5, 2, 8), "ffn_up_exps": np.linspace(1, 0.4, 8)}
    scales["ffn_down_exps"] = np.linspace(0.6, 1.7, 8)

    def extra(writer):
        writer.add_tensor("output.scale", np.array([1.3], np.float32))
        for name, values in scales.items():
            writer.add_tensor(f"blk.0.{name}.scale", np.array(values, np.float32))
            writer.add_tensor(f"blk.0.{name}.input_scale", np.array([3.0], np.float32))

    sizes = {**WIDE, "mlp_only_layers": [], "head_dim": 64, "moe_intermediate_size": 64}
    source = tiny_model("qwen3-moe", tmp_path / "source", **sizes)
    path, plain = gguf_twins(source, tmp_path, type_of=lambda name: "F32" if "inp" in name else "NVFP4", extra=extra)
    prompts = ragged_prompts(3)
    unscaled = run(make_engine(plain, attention_backend=backend), prompts, PARAMS)
    tensors = load_file(plain / "model.safetensors")
    for i in range(8):
        for part in ("gate", "up", "down"):
            name = f"ffn_{part}_exps"
            tensors[f"model.layers.0.mlp.experts.{i}.{part}_proj.weight"] *= float(np.float32(scales[name][i]))
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 0.7
    tensors["lm_head.weight"] *= float(np.float32(1.3))
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    engine = make_engine(path, attention_backend=backend)
    found, expected = run(engine, prompts, PARAMS), run(make_engine(plain, attention_backend=backend), prompts, PARAMS)
    assert expected != unscaled
    if backend == "sdpa":
        assert found == expected
        return
    assert any(note.endswith("the scales of activations are not used") for note in engine.model.notes)
    # activations are rounded: most tokens are the same
    same = [a == b for ours, theirs in zip(found, expected, strict=True) for a, b in zip(*ours, *theirs, strict=True)]
    assert sum(same) > len(same) / 2


def test_a_folder_and_a_file_of_any_name_are_found(tmp_path_factory, tmp_path):
    path, _ = gguf_twins(cached_model("llama", tmp_path_factory), tmp_path / "model")
    alone = tmp_path / "alone"
    alone.mkdir()
    blob = alone / "sha256-00aa"  # as Ollama names it
    shutil.copy(path, blob)
    assert resolve_model(str(blob)) == blob
    shutil.copy(path, alone / "model.gguf")
    assert resolve_model(str(alone)) == alone / "model.gguf"
    shutil.copy(path, alone / "other.gguf")
    with pytest.raises(MissingModelError, match="several models"):
        resolve_model(str(alone))
    blob.write_text("no model")
    with pytest.raises(MissingModelError, match="is a file"):
        resolve_model(str(blob))


def test_a_split_model_is_read_as_one(tmp_path_factory, tmp_path):
    path, plain = gguf_twins(cached_model("llama", tmp_path_factory), tmp_path)
    parts = split(path, tmp_path / "parts", 3)
    assert resolve_model(str(parts[0].parent)) == parts[0]
    check_tokens(plain, parts[1])
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"00003-of-00003.gguf is missing"):
        read_spec(parts[0])


# ---------------------------------------------------------------------- tensors that are split, joined or reordered

CONVERTED = (
    *("qwen3_5", "qwen3_5-moe", "qwen3_next", "granite-hybrid", "granite-hybrid-moe"),
    *("gemma4-e2b", "gemma4-26b", "gemma4-31b", "ministral3", "glm4"),
    *("deepseek_v3", "deepseek_v2-direct", "nemotron_h-moe", "apertus", "kimi_linear", "falcon_h1", "hunyuan"),
)
OF_DATA = (
    "granitemoe",
    "granitemoeshared",
    "exaone4",
    "exaone4-global",
    "ernie4_5",
    "seed_oss",
    "olmo3",
    "gemma",
    "nemotron",
)
OF_DATA += ("deepseek_v2", "glm4_moe_lite", "nemotron_h", "qwen3", "qwen2")
OF_DATA += ("arcee", "stablelm", "stablelm-parallel", "starcoder2", "cohere", "cohere2", "ernie4_5-moe", "glm4-moe")
OF_DATA += ("phimoe", "minicpm3", "falcon_h1-norm", "hunyuan_v1_moe")
THREE_VALUES = {"linear_num_value_heads": 6}  # of a key head: two orders of 2 x 2 heads would be the same backwards
GROWING = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
STRETCHED = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256}
STRETCHED |= {"short_factor": [1.0, 1.5, 2.0, 3.0] * 2, "long_factor": [2.0, 3.0, 4.0, 5.0] * 2}
STRETCHED |= dict.fromkeys(("short_mscale", "long_mscale"), math.sqrt(1 + 1 / 8))  # 512 of 256: as files always have it
OVERRIDES = dict.fromkeys(("qwen3_5", "qwen3_5-moe", "qwen3_next"), THREE_VALUES) | {
    "deepseek_v3": {"rope_parameters": GROWING | {"mscale": 0.9, "mscale_all_dim": 0.9}, "n_group": 4, "topk_group": 2},
    "deepseek_v2-direct": {"rope_parameters": GROWING | {"mscale": 0.9, "mscale_all_dim": 0.9}},
    "phimoe": {"rope_parameters": STRETCHED, "router_jitter_noise": 0.01},
    "minicpm3": {"scale_emb": 12, "dim_model_base": 256, "v_head_dim": 16},
    "kimi_linear": {"linear_num_heads": 4},  # files name one number for both kinds of layers
    "ministral3": {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}},
}


@pytest.mark.slow_cases("qwen3_5-moe", "qwen3_next", "gemma4-26b", "deepseek_v2-direct")
@pytest.mark.parametrize("family", [*CONVERTED, *(pytest.param(each, marks=pytest.mark.slow) for each in OF_DATA)])
def test_a_file_whose_tensors_are_split_or_reordered_gives_the_tokens_of_its_folder(family, tmp_path_factory, tmp_path):
    source = cached_model(family, tmp_path_factory)
    if family in OVERRIDES:
        source = tiny_model(family, tmp_path / "source", **OVERRIDES[family])
    check_tokens(source, converted(source, tmp_path / "model.gguf"))


@pytest.mark.quick("qwen3_5")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_value_heads_are_in_order_without_the_cpu_kernels(family, tmp_path):
    source = tiny_model(family, tmp_path / "source", **THREE_VALUES)
    path = converted(source, tmp_path / "model.gguf")
    check_tokens(source, path, attention_backend="sdpa")
    tiled = {layer.mixer.tiled for layer in read_spec(path).layers if layer.mixer.state}
    assert tiled == {family == "qwen3_5"}


@pytest.mark.quick("cpu")
@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
def test_quantized_tensors_are_split_and_reordered_as_blocks(backend, tmp_path):
    """Rounded in the folder, so that rounding again for the file changes nothing."""

    def rounded(values):
        return gguf.dequantize(gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)

    linear = re.compile(r"(in_proj_\w+|out_proj|[qkvo]_proj|gate_proj|up_proj|down_proj)\.weight$")
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "moe_intermediate_size": 64}
    source = tiny_model("qwen3_5-moe", tmp_path / "source", **THREE_VALUES, **sizes)
    shutil.copytree(source, tmp_path / "rounded")
    values = numpy.load_file(source / "model.safetensors")
    rounds = {name for name, each in values.items() if linear.search(name) and each.shape[-1] % 32 == 0}
    twins = {name: rounded(each) if name in rounds else each for name, each in values.items()}
    numpy.save_file(twins, tmp_path / "rounded" / "model.safetensors", metadata={"format": "pt"})
    quantized = ("attn_", "ssm_out", "ssm_alpha", "ssm_beta", "_exps", "ffn_gate_shexp", "ffn_up_shexp")

    def type_of(name):
        return "Q8_0" if any(part in name for part in quantized) and "norm" not in name else "F32"

    path = converted(tmp_path / "rounded", tmp_path / "model.gguf", type_of=type_of)
    if backend == "sdpa":
        check_tokens(tmp_path / "rounded", path, attention_backend=backend)
        return
    assert "apart from gates of states, widened" in make_engine(path, attention_backend=backend).model.notes[0]


def test_layers_that_only_predict_further_tokens_are_not_read(tmp_path_factory, tmp_path):
    def with_prediction(tensors, writer):
        layers = 4
        writer.add_nextn_predict_layers(1)
        tensors |= {f"blk.{layers}.nextn.eh_proj.weight": tensors["output_norm.weight"][None].repeat(2, 0)}
        tensors |= {f"blk.{layers}.attn_norm.weight": tensors["blk.0.attn_norm.weight"]}
        writer.kv_data[0]["qwen35.block_count"].value = layers + 1

    source = cached_model("qwen3_5", tmp_path_factory)
    path = converted(source, tmp_path / "model.gguf", change=with_prediction)
    check_tokens(source, path)
    skipped = "2 tensors of the file are not read, as they predict further tokens: blk.4.*"
    assert skipped in make_engine(path).model.notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, writer: writer.add_moe_latent_size(16), "moe_latent_size is 16, which is not supported"),
        (
            lambda tensors, writer: [tensors.pop(name) for name in list(tensors) if not name.startswith("token")],
            "it has only layers that predict further tokens",
        ),
    ],
)
def test_experts_of_a_narrower_vector_and_a_head_alone_are_refused(change, message, tmp_path_factory, tmp_path):
    def changed(tensors, writer):
        writer.add_nextn_predict_layers(1)
        change(tensors, writer)

    source = cached_model("nemotron_h-moe", tmp_path_factory)
    with pytest.raises(ModelError, match=message):
        read_spec(converted(source, tmp_path / "model.gguf", change=changed))


def test_experts_whose_gate_and_up_are_one_tensor_are_read_as_halves(tmp_path_factory, tmp_path):
    def joined(tensors, writer):
        for i in range(4):
            parts = [tensors.pop(f"blk.{i}.ffn_{kind}_exps.weight") for kind in ("gate", "up")]
            tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)

    source = cached_model("qwen3_next", tmp_path_factory)
    check_tokens(source, converted(source, tmp_path / "model.gguf", change=joined))


def test_factors_of_gemma_4s_router_are_no_scale_of_experts_of_nvfp4(tmp_path):
    """Both would be called ffn_down_exps.scale."""
    kind, source = gguf.GGMLQuantizationType.NVFP4, tmp_path / "source"
    tiny_model("gemma4-26b", source, moe_intermediate_size=64)
    shutil.copytree(source, tmp_path / "plain")
    numbers = numpy.load_file(source / "model.safetensors")

    def packed(tensors, writer):
        num_experts, rows, columns = tensors.pop("blk.0.ffn_down_exps.weight").shape
        raw = random_blocks(kind, num_experts * rows, columns, np.random.default_rng(0)).reshape(num_experts, rows, -1)
        writer.add_tensor("blk.0.ffn_down_exps.weight", raw, raw_dtype=kind)
        numbers["model.layers.0.experts.down_proj"] = gguf.dequantize(raw, kind)
        assert np.ptp(tensors["blk.0.ffn_down_exps.scale"]) > 0.1

    path = converted(source, tmp_path / "model.gguf", change=packed)
    assert numbers.keys() == numpy.load_file(source / "model.safetensors").keys()
    numpy.save_file(numbers, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    check_tokens(tmp_path / "plain", path, attention_backend="reference", dtype="float32")


@pytest.mark.parametrize("numbers", [None, [0.5], "many", [0.5, float("nan")]])
def test_numbers_of_activations_that_are_not_those_of_all_layers_are_refused(numbers, tmp_path_factory, tmp_path):
    def damaged(tensors, writer):
        if numbers is None:
            del writer.kv_data[0]["xielu.beta"]
        elif numbers == "many":
            writer.kv_data[0]["xielu.beta"] = gguf.GGUFValue(numbers, gguf.GGUFValueType.STRING)
        else:
            writer.kv_data[0]["xielu.beta"].value = numbers

    path = converted(cached_model("apertus", tmp_path_factory), tmp_path / "model.gguf", change=damaged)
    with pytest.raises(ModelError, match=r"xielu\.beta is .*, not a finite number for each layer"):
        make_engine(path)


@pytest.mark.parametrize(
    ("family", "tensor", "message"),
    [
        ("qwen3_5", "blk.0.ssm_a", "not below 0"),
        ("qwen3_next", "blk.0.ssm_ba.weight", "rows, which its metadata do not lead to"),
        ("gemma4-31b", "blk.0.layer_output_scale.weight", "missing"),
    ],
)
def test_tensors_that_cannot_be_are_refused(family, tensor, message, tmp_path_factory, tmp_path):
    def damaged(tensors, writer):
        if message == "missing":
            del tensors[tensor]
        else:
            tensors[tensor] = -tensors[tensor] if tensor.endswith("ssm_a") else tensors[tensor][:-1]

    path = converted(cached_model(family, tmp_path_factory), tmp_path / "model.gguf", change=damaged)
    with pytest.raises(ModelError, match=message):
        make_engine(path)
