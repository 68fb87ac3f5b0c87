"""The language models of checkpoints that see images, as published: old names, others' tensors, FP8 of Ministral 3."""

import json

import pytest
import torch
import transformers
from harness.engine import assert_same_logits, loaded, logits_of, ragged_sequences
from model_zoo import BASE, cached_model, nested, tiny_model
from quantized_zoo import float8, quantized_twins
from safetensors.torch import load_file, save_file

from pagedcli.errors import ConfigError, ModelError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.reading import read_spec
from pagedcli.models.rope_tables import query_scales
from pagedcli.models.sharding import shard_spec

SEQUENCES, _ = ragged_sequences()
OTHERS = {"vision_tower.patch.weight": torch.zeros(2), "multi_modal_projector.linear_1.weight": torch.zeros(3)}


def as_published(path, target, architecture, **options):
    """As its publisher names it, who stores every tensor of the language model below one name."""
    names = architecture.lower(), f"{architecture}ForConditionalGeneration"
    options |= {"others": OTHERS, "rename": "language_model.{}".format, "vision_config": {}}
    return nested(path, target, *names, **options)


@pytest.mark.parametrize(
    ("family", "architecture"), [("gemma3", "Gemma3"), ("mistral", "Mistral3"), ("ministral3", "Mistral3")]
)
def test_the_language_model_is_read_under_its_published_names(family, architecture, tmp_path, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    whole = as_published(path, tmp_path / "whole", architecture)
    model, _ = loaded(whole, "cpu")
    [note] = model.notes
    assert note.startswith("2 tensors of the checkpoint are not read")
    assert_same_logits(logits_of(whole), logits_of(path), atol=0)


_TEXT = BASE | {"num_hidden_layers": 3}
_SECTIONS = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
}
_DEEP = {**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_MIXED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
# model_type -> (beginning of transformers' classes, fields of the language model, of what sees, of the whole)
VISION = {
    "qwen3_vl": ("Qwen3VL", {"head_dim": 32, "rope_parameters": _SECTIONS}, _DEEP, {}),
    "qwen3_vl_moe": ("Qwen3VLMoe", {"head_dim": 32, "rope_parameters": _SECTIONS, **_MIXED}, _DEEP, {}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}},
        {**_VISION, "fullatt_block_indexes": [0]},
        {},
    ),
    "muse_glimmer": (
        "MuseGlimmer",
        {"head_dim": 32, "sliding_window": 24, "num_hidden_layers": 5},
        {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "patch_size": 4},
        {"out_hidden_size": 128, "projector_hidden_size": 32},
    ),
}


@torch.inference_mode()
def vision_model(model_type, path):
    """A checkpoint that sees images, and transformers' logits of text."""
    name, text, vision, whole = VISION[model_type]
    config = getattr(transformers, f"{name}Config")(text_config={**_TEXT, **text}, vision_config=vision, **whole)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return [model(input_ids=torch.tensor([each])).logits[0] for each in SEQUENCES]


@pytest.mark.quick("qwen3_vl", "qwen2_5_vl")
@pytest.mark.parametrize("model_type", VISION)
def test_text_of_models_that_see_gives_transformers_logits(model_type, tmp_path):
    expected = vision_model(model_type, tmp_path)
    model, _ = loaded(tmp_path, "cpu")
    assert any("tensors of the checkpoint are not read" in note for note in model.notes)
    for backend in ("cpu", "reference"):
        assert_same_logits(logits_of(tmp_path, backend), expected)


def test_qwen2_5_vl_is_read_as_published(tmp_path):
    """Fields of text next to those of what sees, and old names of tensors."""
    expected = vision_model("qwen2_5_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {
        **text,
        **config,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
    }
    (tmp_path / "config.json").write_text(json.dumps(flat))
    tensors = load_file(tmp_path / "model.safetensors")
    olds = {"model.language_model.": "model.", "model.visual.": "visual."}

    def old(name):
        begin = next((each for each in olds if name.startswith(each)), "")
        return olds.get(begin, "") + name.removeprefix(begin)

    save_file({old(name): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert_same_logits(logits_of(tmp_path), expected)


def test_how_stacked_experts_lie_is_told_by_their_shapes(tmp_path):
    """[experts, in, out], as Qwen3-VL's publisher writes them, or [experts, out, in]."""
    expected = vision_model("qwen3_vl_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = []
    for _ in range(2):
        shapes.append(tensors["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape)
        assert_same_logits(logits_of(tmp_path), expected)
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
        save_file(tensors, tmp_path / "model.safetensors")
    assert sorted(shapes) == [(8, 64, 80), (8, 80, 64)]


def test_a_language_model_of_a_family_without_a_decoder_is_refused(tmp_path, tmp_path_factory):
    path = cached_model("mistral", tmp_path_factory)
    whole = as_published(path, tmp_path / "whole", "Mistral3")
    config = json.loads((whole / "config.json").read_text())
    config["text_config"]["model_type"] = "opt"
    (whole / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="text_config is of model_type 'opt'"):
        read_spec(whole)


def test_fp8_as_ministral_3_is_published(tmp_path, tmp_path_factory):
    """One scale for each weight and, of no use here, one for its activations."""

    def quantize(weight, generator):
        stored, widened = float8("tensor")[0](weight, generator)
        renamed = {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]}
        return renamed | {"activation_scale": stored["input_scale"]}, widened

    content = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    packed, plain = quantized_twins(cached_model("ministral3", tmp_path_factory), tmp_path, quantize, content)
    whole = as_published(packed, tmp_path / "w", "Mistral3", moved=["quantization_config"])
    assert_same_logits(logits_of(whole, "reference"), logits_of(plain, "reference"))


def test_queries_grow_in_steps_beyond_the_original_length_and_not_at_all_before(tmp_path_factory):
    rope = read_spec(cached_model("ministral3", tmp_path_factory)).rope
    assert (rope.query_growth, rope.original_max_position_embeddings) == (0.5, 32)
    assert query_scales(rope, 32, dtype=torch.float32) is None
    scales = query_scales(rope, 100, dtype=torch.float32)
    expected = 1 + 0.5 * torch.tensor([1.0, 2.0, 3.0, 4.0]).log()
    torch.testing.assert_close(scales, expected.repeat_interleave(32)[:100])


def test_a_pattern_of_letters_says_which_layers_slide(tmp_path, tmp_path_factory):
    """As EXAONE 4 writes it; the last layer never slides, and rotary embedding is only where one does."""
    config = json.loads((cached_model("exaone4", tmp_path_factory) / "config.json").read_text())
    config |= {"sliding_window_pattern": "LLLG", "num_hidden_layers": 6, "sliding_window": 16}
    del config["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    assert [mixer.window for mixer in spec.attentions] == [16, 16, 16, None, 16, None]
    assert [mixer.rope is not None for mixer in spec.attentions] == [True, True, True, False, True, False]


def test_stacked_projections_are_not_split(tmp_path):
    with pytest.raises(ConfigError, match="stacks its projections"):
        shard_spec(read_spec(tiny_model("glm", tmp_path)), ParallelContext(0, 2))
