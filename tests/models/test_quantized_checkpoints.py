"""Checkpoints that others quantized: the same logits as from their dequantized weights."""

import json

import pytest
import torch
from harness.engine import loaded, logits_of, make_engine, planned_and_made, ragged_prompts, run
from model_zoo import nested, tiny_model
from quantized_zoo import (
    FORMATS,
    auto_round,
    awq,
    compressed,
    float8,
    gptq,
    modelopt_mixed,
    mxfp8,
    nvfp4,
    pack_quantized,
    quantized_twins,
)
from safetensors.torch import load_file, save_file

from pagedcli.errors import ConfigError, ModelError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.formats import AS_STORED
from pagedcli.models.loading import weight_format
from pagedcli.models.parameters import decoder_parameters
from pagedcli.models.reading import read_spec
from pagedcli.models.sharding import shard_parameters, shard_spec
from pagedcli.models.tensors import linear_formats, take_linear
from pagedcli.models.weights import CheckpointWeights
from pagedcli.sampling_params import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("plain") / "model", intermediate_size=128, num_hidden_layers=2)


@pytest.fixture(scope="session", params=FORMATS)
def twins(request, plain_model, tmp_path_factory):
    return quantized_twins(plain_model, tmp_path_factory.mktemp(request.param), *FORMATS[request.param])


def joined_logits(path, backend="cpu"):
    return torch.cat(logits_of(path, backend, chunk=None))


def test_the_reference_gives_the_logits_of_the_dequantized_weights(twins):
    packed, plain = (joined_logits(path, "reference") for path in twins)
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-5)


def config_of(tmp_path, quantization):
    config = {"model_type": "qwen3", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return tmp_path


GPTQ, AWQ, FP8 = gptq()[1], awq()[1], float8("tensor")[1]
PACKED = pack_quantized()[1]
SCHEME = PACKED["config_groups"]["group_0"]
AUTO_ROUND = auto_round()[1]
MODELOPT = nvfp4()[1]
MIXED = {
    **MODELOPT,
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.*.self_attn.o_proj": {"quant_algo": "FP8"},
    },
}


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported (8 bits with outliers"),
        ({"quant_method": "gguf"}, "GGUF inside"),
        ({"quant_method": "of tomorrow"}, "an unknown method"),
        ({"bits": 4}, "has no quant_method"),
        ([4], "has no quant_method"),
        ({**GPTQ, "bits": 3}, "3-bit weights"),
        ({**GPTQ, "bits": "4"}, "Expected `int`, got `str` - at `$.bits`"),
        ({**GPTQ, "group_size": 0}, "group_size 0"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({**GPTQ, "lm_head": True}, "its output layer is also quantized"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 3}}}, "3-bit weights"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": "8"}}}, "Expected `int | null`, got `str`"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, "has a pattern that is not supported: 're:('"),
        ({**AWQ, "version": "gemv"}, "version gemv"),
        ({**AWQ, "bits": 8}, "8-bit weights"),
        ({**AWQ, "zero_point": False}, "no zero points"),
        ({**FP8, "fmt": "e5m2"}, "fmt e5m2"),
        ({**FP8, "weight_block_size": [128]}, "blocks of [128]"),
        ({**PACKED, "format": "mxfp6-pack-quantized"}, "MXFP6 weights"),
        ({**PACKED, "format": "marlin-24"}, "2:4 sparse weights in the order of a GPU kernel"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights, sparse-24-bitmask"),
        ({**PACKED, "transform_config": {"config_groups": {"R1": {}}}}, "rotated weights"),
        ({**PACKED, "config_groups": {}}, "no config_groups"),
        (
            {**PACKED, "config_groups": {"a": SCHEME, "b": {**SCHEME, "format": "mxfp6-pack-quantized"}}},
            "MXFP6 weights",
        ),
        ({**PACKED, "format": "mixed-precision"}, "4-bit int weights in this format"),
        ({**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"}, "packing_format auto_round:llm_compressor"),
        ({**AUTO_ROUND, "backend": "gptq:marlin", "packing_format": None}, "packing_format gptq:marlin"),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "mx_fp weights"),
        ({**AUTO_ROUND, "act_bits": 8}, "int weights with 8-bit activations"),
        ({**AUTO_ROUND, "bits": 2}, "2-bit weights"),
        ({**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 4}}}, "its output layer is also quantized"),
        (
            {**AUTO_ROUND, "extra_config": {"model.layers.0.mlp.up_proj": {"data_type": "fp"}}},
            "fp weights in some layers",
        ),
        ({**AUTO_ROUND, "dynamic": {"-:.*": {}}}, "layers named as by GPTQ"),
        ({**PACKED, "config_groups": {"a": {**SCHEME, "weights": None}}}, "only activations are quantized"),
        ({**PACKED, "format": "int-quantized"}, "strategy group"),
        ({**PACKED, "format": "nvfp4-pack-quantized"}, "4-bit int weights in this format"),
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ"),
        ({**MODELOPT, "group_size": 32}, "quant_algo NVFP4 in groups of 32"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION without quantized_layers"),
        ({**PACKED, "format": "float-quantized"}, "4-bit int weights in this format"),
    ],
)
def test_what_is_not_read_is_refused_by_name_from_the_config_alone(quantization, reason, tmp_path):
    with pytest.raises(ModelError) as caught:
        read_spec(config_of(tmp_path, quantization))
    assert reason in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_a_family_without_a_native_decoder_and_a_second_quantization_are_refused(tmp_path):
    path = config_of(tmp_path, GPTQ)
    with pytest.raises(ConfigError, match="quantized already: gptq, 4 bits in groups of 32"):
        loaded(path, "reference", quantization="int4")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ModelError, match="gpt2 runs through transformers"):
        read_spec(path)


@pytest.mark.parametrize(
    ("quantization", "quantized", "not_quantized"),
    [
        (AWQ, "model.layers.0.mlp.gate_proj", "lm_head"),
        (MODELOPT, "model.layers.0.mlp.gate_proj", "model.visual.blocks.0.mlp"),
        ({**MODELOPT, "ignore": ["lm_head", "*.1.mlp*"]}, "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"),
        (
            {**MODELOPT, "ignore": ["lm_head", "*.o_proj"]},
            "model.layers.0.o_proj_norm",
            "model.layers.1.self_attn.o_proj",
        ),
        (MIXED, "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"),
        (MIXED, "model.layers.1.self_attn.o_proj", "model.layers.0.mlp.down_proj"),
        ({**AWQ, "modules_to_not_convert": ["mlp.gate"]}, "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.gate"),
        (
            {**PACKED, "ignore": ["lm_head", "re:.*down_proj"]},
            "model.layers.0.mlp.up_proj",
            "model.layers.0.mlp.down_proj",
        ),
        ({**GPTQ, "dynamic": {"-:.*layers\\.0.*": {}}}, "model.layers.1.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        (
            {**GPTQ, "modules_in_block_to_quantize": [["mlp.up_proj"]]},
            "model.layers.1.mlp.up_proj",
            "model.layers.1.mlp",
        ),
        (
            {**AUTO_ROUND, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"}}},
            "model.layers.1.mlp.up_proj",
            "model.layers.0.mlp.up_proj",
        ),
        (
            {**AUTO_ROUND, "extra_config": {".*o_proj.*": {"bits": 16}}},
            "model.layers.0.mlp.up_proj",
            "model.layers.0.self_attn.o_proj",
        ),
    ],
)
def test_modules_that_the_config_names_are_read_unquantized(quantization, quantized, not_quantized, tmp_path):
    stored = read_spec(config_of(tmp_path, quantization)).quantization
    assert stored.of(quantized) is not AS_STORED
    assert stored.of(not_quantized) is AS_STORED


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_named_layer_has_its_own_group_before_that_of_all_linear_layers(order, tmp_path):
    groups = {
        "a": SCHEME,
        "b": {**SCHEME, "targets": ["re:.*down_proj"], "weights": {**SCHEME["weights"], "num_bits": 8}},
    }
    config = {**PACKED, "config_groups": {name: groups[name] for name in order}}
    stored = read_spec(config_of(tmp_path, config)).quantization
    assert stored.of("model.layers.0.mlp.down_proj").bits == 8
    assert stored.of("model.layers.0.mlp.up_proj").bits == 4
    assert stored.of("lm_head") is AS_STORED


def test_the_first_pattern_of_gptq_that_names_a_layer_decides(tmp_path):
    dynamic = {r"+:.*\.0\..*down.*": {"bits": 8}, "-:.*down.*": {}, ".*up.*": {"group_size": 64}}
    stored = read_spec(config_of(tmp_path, {**GPTQ, "dynamic": dynamic})).quantization
    assert stored.of("model.layers.0.mlp.down_proj").bits == 8
    assert stored.of("model.layers.1.mlp.down_proj") is AS_STORED
    assert stored.of("model.layers.1.mlp.up_proj").group_size == 64
    assert stored.of("model.layers.1.mlp.gate_proj").group_size == 32


def leave_unquantized(part, twins, source):
    """Gives the twins, of which the first is the packed one, the weights of `source` in all modules of this name."""
    for path in twins:
        tensors = {name: each for name, each in load_file(path / "model.safetensors").items() if part not in name}
        tensors |= {name: each for name, each in load_file(source / "model.safetensors").items() if part in name}
        save_file(tensors, path / "model.safetensors")
    config = json.loads((twins[0] / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", f"re:.*{part}"]
    (twins[0] / "config.json").write_text(json.dumps(config))


def test_a_layer_of_which_only_a_part_is_quantized_is_refused(plain_model, tmp_path):
    packed, _ = quantized_twins(plain_model, tmp_path, *pack_quantized())
    leave_unquantized("k_proj", (packed,), plain_model)
    with pytest.raises(ModelError, match=r"q_proj, .*v_proj are stored in different formats"):
        loaded(packed, "reference")


def test_layers_left_out_of_the_quantization_keep_their_weights(plain_model, tmp_path):
    packed, plain = quantized_twins(plain_model, tmp_path, *pack_quantized())
    leave_unquantized("down_proj", (packed, plain), plain_model)
    torch.testing.assert_close(*(joined_logits(path, "reference") for path in (packed, plain)))


@pytest.mark.parametrize("by_compressed_tensors", [False, True])
def test_an_output_layer_that_is_packed_although_the_config_skips_it_is_read_as_stored(
    by_compressed_tensors, plain_model, tmp_path
):
    quantize, content = nvfp4(by_compressed_tensors=by_compressed_tensors)
    assert "lm_head" in content["ignore"]
    packed, plain = quantized_twins(plain_model, tmp_path, {"lm_head": quantize, "": quantize}, content)
    torch.testing.assert_close(*(joined_logits(path, "reference") for path in (packed, plain)))


def test_layers_of_modelopt_may_have_different_formats(tmp_path):
    nvfp4_layers, float8_layers = read_spec(config_of(tmp_path, MIXED)).quantization.formats
    assert (nvfp4_layers.layout, nvfp4_layers.group_size) == ("nvfp4", 16)
    assert (float8_layers.layout, float8_layers.per_tensor) == ("float8", True)


@pytest.mark.parametrize(("algorithm", "quantize"), [("FP8", float8("tensor")[0]), ("MXFP8", mxfp8()[0])])
def test_all_layers_of_modelopt_in_eight_bits(algorithm, quantize, plain_model, tmp_path):
    content = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    packed, plain = quantized_twins(plain_model, tmp_path, quantize, content)
    torch.testing.assert_close(*(joined_logits(path, "reference") for path in (packed, plain)))


def test_modelopt_says_its_format_in_a_file_of_its_own_too(plain_model, tmp_path):
    packed, plain = quantized_twins(plain_model, tmp_path, *nvfp4())
    config = json.loads((packed / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(config))
    content = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": quantization["ignore"]}
    (packed / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": content}))
    torch.testing.assert_close(*(joined_logits(path, "reference") for path in (packed, plain)))


def test_experts_in_nvfp4_are_kept_so_whatever_the_company(tmp_path):
    source = tiny_model("qwen3-moe", tmp_path / "model", moe_intermediate_size=48)
    quantize, content = nvfp4()
    content = {**content, "ignore": [*content["ignore"], "*.mlp.gate"]}
    packed, plain = quantized_twins(source, tmp_path, quantize, content)
    prompts, params = ragged_prompts(4), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine = make_engine(packed, dtype="bfloat16")
    assert engine.plan.in_one_call
    assert engine.model.weight_bytes < 0.7 * make_engine(plain, dtype="bfloat16").model.weight_bytes
    tokens = run(engine, prompts, params)
    alone = make_engine(packed, dtype="bfloat16", chunked_prefill_size=7, max_num_seqs=1, enable_prefix_caching=False)
    assert run(alone, prompts, params) == tokens
    exact = [make_engine(path, attention_backend=name) for path in (packed, plain) for name in ("cpu", "sdpa")]
    assert "widened to float32" in exact[0].model.notes[0], "float32 is not rounded"
    assert "the scales of activations and the KV cache are not used" in exact[0].model.notes[0]
    of_all = [run(each, prompts, params) for each in exact]
    assert of_all.count(of_all[0]) == len(of_all)


def as_published(path, target):
    """A checkpoint that sees images, too, with scales of the KV cache and an MTP head that is not quantized."""
    content = json.loads((path / "config.json").read_text())["quantization_config"]
    old, new = "model.", "model.language_model."
    layers = {name.replace(old, new, 1): each for name, each in content["quantized_layers"].items()}
    others = {f"{new}layers.1.self_attn.{part}_scale": torch.tensor(0.5) for part in "kv"}
    return nested(
        path, target, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", moved=["quantization_config"],
        quantization_config={**content, "quantized_layers": layers}, others=others | {"mtp.fc.weight": torch.zeros(3)},
    )  # fmt: skip


def test_a_mixed_checkpoint_of_modelopt_is_read_as_published(tmp_path):
    """Experts and output layer in NVFP4 by the name of all experts of a layer, projections of attention in FP8."""
    sizes = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
    source = tiny_model("qwen3_5-moe", tmp_path / "model", **sizes)
    parts = [*(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.experts", "mlp.shared_expert"]
    parts += [f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "out_proj")]
    packed, plain = quantized_twins(
        source, tmp_path, *modelopt_mixed([f"model.layers.{i}.{part}" for i in range(4) for part in parts])
    )
    whole = as_published(packed, tmp_path / "whole")
    prompts, params = ragged_prompts(3), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    exact = [run(make_engine(path, attention_backend="reference"), prompts, params) for path in (whole, plain)]
    assert exact[0] == exact[1]
    engine = make_engine(whole, dtype="bfloat16")
    notes = " ".join(engine.model.notes)
    assert "some weights are modelopt, NVFP4 in groups of 16, kept so; their activations are rounded" in notes
    assert "some weights are modelopt, FP8 e4m3 per tensor, widened to bfloat16 while loading: no CPU kernel" in notes
    assert notes.count("the scales of activations and the KV cache are not used") == 1
    assert "1 tensor of the checkpoint is not read" in notes
    assert engine.model._lm_head.nbytes == 320 * (64 // 2 + 64 // 16 + 4), "packed, in 4.5 bits and a step per feature"
    tokens = run(engine, prompts, params)
    alone = make_engine(whole, dtype="bfloat16", chunked_prefill_size=7, max_num_seqs=1, enable_prefix_caching=False)
    assert run(alone, prompts, params) == tokens


@pytest.mark.parametrize("change", [{"weight_scale": -1.0}, {"weight_scale": float("nan")}, {"weight_scale_2": 1e9}])
def test_scales_of_nvfp4_that_cannot_be_are_refused(change, plain_model, tmp_path):
    packed, _ = quantized_twins(plain_model, tmp_path, *nvfp4())
    tensors = load_file(packed / "model.safetensors")
    [(suffix, value)] = change.items()
    name = next(each for each in tensors if each.endswith(f".{suffix}"))
    tensors[name] = torch.full_like(tensors[name].float(), value).to(tensors[name].dtype)
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="a scale of NVFP4 weights is"):
        loaded(packed, "reference")


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "int8", "fp8-block", "nvfp4", "nvfp4-modelopt"])
def test_dummy_weights_of_every_format_are_noise_of_the_usual_size(name, plain_model, tmp_path):
    packed, _ = quantized_twins(plain_model, tmp_path, *FORMATS[name])
    (packed / "model.safetensors").unlink()
    model, _ = loaded(packed, "reference", load_format="dummy")
    weight = model._branches[1].body.down(torch.eye(128))
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_native_decoder_differs_from_the_reference_by_the_rounding_of_activations(twins, library):
    packed, plain = twins
    exact, ours = joined_logits(packed, "reference"), joined_logits(packed)
    error = (ours - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    name = packed.parent.name
    is_rounded = any(form in name for form in ("int", "gptq", "awq", "mixed")) and "bias" not in name
    is_widened = not is_rounded or "mixed-fp8" in name
    assert error < (0.05 if is_rounded else 1e-5)
    model, _ = loaded(packed)
    [note] = model.notes
    assert ("activations are rounded to 8 bits in groups of 32" in note) == is_rounded
    assert ("widened to float32" in note) == is_widened
    share = model.weight_bytes / loaded(plain)[0].weight_bytes
    assert share < (0.7 if is_widened else 0.5) or not is_rounded


@pytest.mark.parametrize(
    ("form", "arguments"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "strategy": "channel", "type": "float"}),
        ("float-quantized", {"num_bits": 8, "strategy": "block", "type": "float", "block_structure": [32, 32]}),
    ],
    ids=str,
)
def test_bytes_made_by_compressed_tensors_are_the_weights_that_it_reads_from_them(
    form, arguments, plain_model, tmp_path
):
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    assert library is not None
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)

    def quantize(weight, _generator):
        if args.strategy == "block":
            parts = weight.view(weight.shape[0] // 32, 32, weight.shape[1] // 32, 32).transpose(1, 2).flatten(2)
        else:
            parts = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(dict(stored), scheme)["weight"].float()

    config = compressed(form, args.model_dump(mode="json"))
    packed, plain = quantized_twins(plain_model, tmp_path, quantize, config)
    torch.testing.assert_close(*(joined_logits(path, "reference") for path in (packed, plain)))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_plan_counts_the_weights_as_the_engine_keeps_them(twins, backend):
    decision, engine = planned_and_made(twins[0], attention_backend=backend)
    assert decision.terms.weights == pytest.approx(engine.plan.weight_bytes, rel=0.05)
    assert decision.plan.notes[-1] in engine.model.notes


def layer_weights(path, parallel):
    """Every linear layer of a rank's part of the first layer, dequantized."""
    spec = read_spec(path)
    stored = weight_format(None, spec)
    shard_spec(spec, parallel)
    parameters = shard_parameters(decoder_parameters(spec, stored), spec, parallel)
    options = {"ignored": frozenset(), "dtype": torch.float32, "device": CPU}
    tensors = CheckpointWeights(path).load(parameters, **options)
    formats = linear_formats(parameters)
    made = {}
    for name, num_in in {"out": 128, "down": 128, "qkv": 64, "gate_up": 64}.items():
        layer_format = formats[f"layers.0.{name}"]
        modules = take_linear(tensors, f"layers.0.{name}", layer_format)
        inputs = torch.eye(num_in // (parallel.size if name in ("out", "down") else 1))
        made[name] = layer_format.linear(modules, None, torch.float32, "torch")(inputs).T
    if "lm_head" in formats:
        modules = take_linear(tensors, "lm_head", formats["lm_head"])
        made["lm_head"] = formats["lm_head"].linear(modules, None, torch.float32, "torch")(torch.eye(64)).T
    return made


def test_ranks_of_a_parallel_group_have_the_parts_of_packed_weights(twins):
    packed, _ = twins
    whole = layer_weights(packed, ParallelContext())
    if "act-order" in packed.parent.name:
        with pytest.raises(ConfigError, match="whose groups are not neighbours"):
            layer_weights(packed, ParallelContext(0, 2))
        return
    first, second = (layer_weights(packed, ParallelContext(rank, 2)) for rank in (0, 1))
    for name in ("out", "down"):
        assert torch.equal(torch.cat([first[name], second[name]], 1), whole[name])
    assert ("lm_head" in whole) == ("by-name" in packed.parent.name)
    if "lm_head" in whole:
        assert torch.equal(torch.cat([first["lm_head"], second["lm_head"]]), whole["lm_head"])
    for name, sizes in {"qkv": (64, 32, 32), "gate_up": (64, 64)}.items():
        parts = zip(first[name].split(sizes), second[name].split(sizes), strict=True)
        assert torch.equal(torch.cat([part for pair in parts for part in pair]), whole[name])


def test_a_split_within_a_group_is_refused(plain_model, tmp_path):
    packed, _ = quantized_twins(plain_model, tmp_path, *pack_quantized(4, 128))
    with pytest.raises(ConfigError, match="groups of 128 that 'weight_scale' holds"):
        layer_weights(packed, ParallelContext(0, 2))


@pytest.mark.slow_cases("qwen2-moe")
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe", "mixtral"])
def test_experts_of_packed_weights_give_the_logits_of_the_dequantized_ones(family, tmp_path, library):
    sizes = {"intermediate_size": 64} if family == "mixtral" else {"moe_intermediate_size": 64}
    shared = {"shared_expert_intermediate_size": 64} if family == "qwen2-moe" else {}
    source = tiny_model(family, tmp_path / "model", head_dim=32, **sizes, **shared)
    packed, plain = quantized_twins(source, tmp_path, *pack_quantized())
    exact = joined_logits(plain, "reference")
    torch.testing.assert_close(joined_logits(packed, "reference"), exact, atol=1e-4, rtol=1e-4)
    assert joined_logits(packed).shape == exact.shape


def test_experts_of_different_bits_are_computed_together_on_a_cpu(tmp_path, library):
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64}
    source = tiny_model("qwen3-moe", tmp_path / "model", head_dim=32, **sizes)
    wide = {f"experts.0.{name}_proj": gptq(8)[0] for name in ("gate", "up", "down")}
    config = {**GPTQ, "dynamic": {r"+:.*experts\.0\..*": {"bits": 8}}}
    packed, plain = quantized_twins(source, tmp_path, {**wide, "": gptq()[0]}, config)
    exact, ours = joined_logits(plain, "reference"), joined_logits(packed)
    assert (ours - exact).norm() < 0.05 * exact.norm()
