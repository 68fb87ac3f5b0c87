"""config.json -> ModelSpec: old and new files mean the same, and what cannot run is refused with the reason."""

import contextlib
import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import errors as hub_errors
from model_zoo import COMPOSED_FAMILIES, DATA_FAMILIES, LATENT_FAMILIES, NATIVE_FAMILIES, cached_model

from pagedcli.config import EngineConfig
from pagedcli.errors import MissingModelError, ModelError
from pagedcli.models.families.registry import FAMILIES
from pagedcli.models.formats import AS_STORED
from pagedcli.models.hub import resolve_model
from pagedcli.models.lengths import resolve_max_model_len
from pagedcli.models.parameters import decoder_parameters
from pagedcli.models.reading import read_spec
from pagedcli.models.rope import RopeSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
}


def write(path, config, generation=None):
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def spec_of(path, **fields):
    return read_spec(write(path, {**LLAMA, **fields}))


def refusal_of(path, **fields):
    with pytest.raises(ModelError) as caught:
        spec_of(path, **fields)
    return caught.value.message


COMPOSED = [
    family
    for family in (*COMPOSED_FAMILIES, *DATA_FAMILIES)
    # no one rope each, or key/value heads that do not divide 32 or have no default
    if family
    not in (
        "gemma3",
        "phi3-longrope",
        "olmo3",
        "mellum",
        "helium",
        "nemotron",
        *LATENT_FAMILIES,
        "cohere2_moe",
        "cohere2_moe-rms",
        "laguna",
        "laguna-elements",
    )
]


SIZES_OF_HEADS = {"num_attention_heads": 32, "hidden_size": 256}  # of 8 elements, of which some families rotate half


@pytest.mark.parametrize("family", [*NATIVE_FAMILIES, *COMPOSED])
def test_left_out_fields_mean_what_transformers_takes_them_for(family, tmp_path, tmp_path_factory):
    full = json.loads((cached_model(family, tmp_path_factory) / "config.json").read_text())
    needed = {"architectures", "model_type", *LLAMA}
    write(tmp_path, {key: value for key, value in full.items() if key in needed} | SIZES_OF_HEADS)
    ours, theirs = read_spec(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    sliding = getattr(theirs, "sliding_window", None) or None
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == head_dim
    assert max((mixer.window for mixer in ours.attentions if mixer.window), default=None) == sliding
    names = {meaning: name for name, meaning in FAMILIES[ours.model_type].config.renamed.items()}
    assert ours.norm.eps == getattr(theirs, names.get("rms_norm_eps", "rms_norm_eps"))
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.partial == theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    eos = [] if theirs.eos_token_id is None else theirs.eos_token_id
    assert list(ours.eos_token_ids) == (eos if isinstance(eos, list) else [eos])
    assert ours.bos_token_id == theirs.bos_token_id


def test_gemma_3_as_published_leaves_out_what_equals_a_default(tmp_path):
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    architectures = ["Gemma3ForConditionalGeneration"]
    spec = read_spec(write(tmp_path, {"architectures": architectures, "model_type": "gemma3", "text_config": text}))
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262208, 8, 4, 256)


BIASES = ("attention_bias", "attention_out_bias", "use_qkv_bias", "mlp_bias", "use_bias")
BIASED = [*NATIVE_FAMILIES, *COMPOSED_FAMILIES, *DATA_FAMILIES, "nemotron_h", "granite-hybrid", "lfm2"]
BIASED = [family for family in BIASED if "laguna" not in family]  # with biases it is refused


def biases(names):
    """The biases of linear layers among names of tensors, without the numbers of layers."""
    found = (re.fullmatch(r"(?:model|backbone)\.layers\.\d+\.(.*_proj)\.bias", name) for name in names)
    return {each[1] for each in found if each is not None and "experts" not in each[1]}


@pytest.mark.slow_cases(*(f"{family}-*" for family in DATA_FAMILIES))
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("family", BIASED)
def test_a_field_about_biases_means_what_transformers_takes_it_for(family, value, tmp_path, tmp_path_factory):
    config = json.loads((cached_model(family, tmp_path_factory) / "config.json").read_text())
    for field in BIASES:
        write(tmp_path, {**config, field: value})
        if FAMILIES[config["model_type"]].config.through_transformers({**config, field: value}):
            continue
        if value and field == "attention_bias" and config.get("q_lora_rank", 0) is None:
            continue  # refused, see test_a_family_config_that_cannot_be_is_refused_with_the_reason
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
        ours = decoder_parameters(read_spec(tmp_path), AS_STORED).values()
        names = {name for parameter in ours for name in parameter.shapes}
        assert biases(names) == biases(name for name, _ in theirs.named_parameters()), field


@pytest.mark.parametrize("interleaved", [True, False])
def test_latents_rotate_the_pairs_that_config_json_says(interleaved, tmp_path, tmp_path_factory):
    config = json.loads((cached_model("deepseek_v3", tmp_path_factory) / "config.json").read_text())
    write(tmp_path, {**config, "rope_interleave": interleaved})
    assert read_spec(tmp_path).rope.interleaved == interleaved


ROPE_FORMS = {
    "default": ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    "linear": (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ),
    "yarn": (
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 128},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    "llama3": (
        {
            "rope_theta": 5e5,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.parametrize("rope_type", ROPE_FORMS)
def test_old_and_new_config_give_the_same_spec(rope_type, tmp_path):
    old_rope, new_rope = ROPE_FORMS[rope_type]
    length = {"max_position_embeddings": 128}
    old = spec_of(tmp_path, **length, **{k: v for k, v in old_rope.items() if k not in length}, torch_dtype="bfloat16")
    new = spec_of(tmp_path, **length, rope_parameters=new_rope, dtype="bfloat16")
    assert old == new
    assert new.rope.type == rope_type
    assert new != new.with_mixers(lambda mixer: replace(mixer, rope=RopeSpec(theta=1.0)))


def test_yarn_reaches_its_factor_times_the_original_length(tmp_path):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert spec_of(tmp_path, max_position_embeddings=32768, rope_scaling=yarn).max_position_embeddings == 131072
    assert spec_of(tmp_path, max_position_embeddings=131072, rope_scaling=yarn).max_position_embeddings == 131072


def test_stop_ids_of_generation_config_come_first_and_are_merged(tmp_path):
    config = {**LLAMA, "eos_token_id": [7, 2]}
    assert read_spec(write(tmp_path, config)).eos_token_ids == (7, 2)
    assert read_spec(write(tmp_path, config, {"eos_token_id": [3, 2]})).eos_token_ids == (3, 2, 7)
    assert read_spec(write(tmp_path, {**LLAMA, "eos_token_id": None}, {"eos_token_id": 9})).eos_token_ids == (9,)


@pytest.mark.parametrize("is_listed", [True, False])  # in tokenizer_config.json or in tokenizer.json alone
def test_the_tokenizers_end_of_text_stops_too(tmp_path, is_listed):
    added = {"content": "<end>", "special": True}
    config = {"eos_token": added, "added_tokens_decoder": {"5": added} if is_listed else {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 5, **added}], "model": {}}))
    assert read_spec(write(tmp_path, {**LLAMA, "eos_token_id": 2})).eos_token_ids == (2, 5)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": 7}))  # damaged: the tokenizer says so
    assert read_spec(write(tmp_path, {**LLAMA, "eos_token_id": 2})).eos_token_ids == (2,)


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 32}, None),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4}, 32),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 5}, None),
        ({"use_sliding_window": True, "sliding_window": 32, "layer_types": ["full_attention"] * 5}, None),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
    ],
)
def test_qwen_slides_only_where_its_config_says(fields, window, tmp_path):
    windows = [mixer.window for mixer in spec_of(tmp_path, **QWEN2, **fields).attentions]
    assert windows == [None, None, None, None, window]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hidden_size": "64"}, r"Expected `int`, got `str` - at `$.hidden_size`"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_causal": False}, "LlamaForCausalLM attends to later ones"),
        ({"architectures": ["LlamaBidirectionalModel"]}, "LlamaBidirectionalModel attends to later ones"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification' is not a causal"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "needs 'high_freq_factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": None}, "has no model_type"),
    ],
)
def test_a_config_that_cannot_run_is_refused_with_the_reason(fields, reason, tmp_path):
    message = refusal_of(tmp_path, **fields)
    assert reason in message
    assert str(tmp_path) in message


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", [*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"])
def test_a_size_below_one_is_refused_by_name(name, value, tmp_path):
    assert f"{name} is {value}, but must be at least 1" in refusal_of(tmp_path, **{name: value})


@pytest.mark.parametrize("family", ["qwen2", "smollm3", "granite_swa", "qwen2-moe", "lfm2", "bamba", "granite-hybrid"])
def test_every_number_of_a_family_may_be_zero_in_a_file_without_a_crash(family, tmp_path, tmp_path_factory):
    full = json.loads((cached_model(family, tmp_path_factory) / "config.json").read_text())
    numbers = [name for name, value in full.items() if type(value) in (int, float)]
    for name, value in [*((name, 0) for name in numbers), ("time_step_limit", [0]), ("hidden_size", 3)]:
        write(tmp_path, full | {name: value})
        with contextlib.suppress(ModelError):
            read_spec(tmp_path)
    assert "num_attention_heads" in numbers


def test_a_missing_or_broken_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no model folder at .*absent"):
        read_spec(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama",')
    with pytest.raises(ModelError, match=r"cannot read .*config\.json.*line 1 column"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds no JSON object"):
        read_spec(tmp_path)


@pytest.fixture
def hub(monkeypatch):
    """Lets a function take the place of downloads."""
    return partial(monkeypatch.setattr, huggingface_hub, "snapshot_download")


@pytest.mark.parametrize("model", ["/absent/folder", "./absent", "~/absent-folder", "a/b/c", "folder/"])
def test_what_can_only_be_a_path_is_never_looked_up_on_the_hub(model, hub):
    hub(lambda *args, **kwargs: pytest.fail("asked the Hub"))
    with pytest.raises(ModelError, match="no model folder at"):
        resolve_model(model)


def test_a_name_like_that_of_a_gguf_file_is_no_id_of_the_hub(tmp_path):
    with pytest.raises(MissingModelError, match=r"model.gguf does not exist"):
        resolve_model("model.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(MissingModelError, match=r"empty.gguf does not begin as a GGUF file does"):
        resolve_model(str(tmp_path / "empty.gguf"))


def test_a_file_is_not_a_model(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelError, match="is a file") as caught:
        resolve_model(str(file))
    assert str(tmp_path) in caught.value.hint


HUB_FAILURES = {
    "cannot be reached": hub_errors.LocalEntryNotFoundError,
    "no such model on the Hub": hub_errors.RepositoryNotFoundError,
    "is gated": hub_errors.GatedRepoError,
    "has no revision 'v9'": hub_errors.RevisionNotFoundError,
    "the download of": hub_errors.HfHubHTTPError,
    "not a valid Hub id": hub_errors.HFValidationError,
}


@pytest.mark.parametrize("reason", HUB_FAILURES)
def test_each_failure_of_the_hub_has_its_own_message(reason, hub):
    def download(*args, **kwargs):
        # __init__ of the HTTP ones wants the server's response, which differs between versions of the hub client
        raise HUB_FAILURES[reason].__new__(HUB_FAILURES[reason], "reason")

    hub(download)
    with pytest.raises(ModelError, match=reason) as caught:
        resolve_model("owner/absent", revision="v9")
    assert "owner/absent" in caught.value.message


def test_the_hub_is_asked_for_weights_and_text_but_not_for_other_formats(hub, tmp_path):
    asked = {}

    def download(model, **options):
        asked.update(options, model=model)
        return str(tmp_path)

    hub(download)
    assert resolve_model("owner/model", revision="main") == tmp_path
    assert (asked["model"], asked["revision"]) == ("owner/model", "main")
    names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.model",
        "chat_template.jinja",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.onnx",
    ]
    wanted = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(wanted) == names[:4]


# ---------------------------------------------------------------------- hostile folders


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be at most 4,096"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer is 1000000000"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"architectures": 5}, "architectures is 5, not a list of names"),
        ({"architectures": [5]}, "architectures is [5], not a list of names"),
        ({"model_type": "gpt2", "n_positions": -1}, "does not specify max_position_embeddings, or not as a positive"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor is 0.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}, "factor is inf"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": -1}}, "is -1"),
        ({"rope_scaling": 5}, "rope_scaling"),
    ],
)
def test_a_hostile_config_is_refused_at_once(fields, reason, tmp_path):
    assert reason in refusal_of(tmp_path, **fields)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"model_type": "\xff\xfe"}', "codec can't decode"),
        (b"[" * 100_000, "recursion"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "limit"),
        (b" " * (2**26 + 1), "67,108,865 bytes"),
    ],
)
def test_a_config_that_is_not_json_is_refused(content, reason, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        read_spec(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "is a FIFO, not a file"),
        (Path.mkdir, "is a folder, not a file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device or socket"),
        (lambda path: path.symlink_to(path.parent / "absent"), "is missing"),
    ],
    ids=["FIFO", "folder", "link loop", "device", "dangling link"],
)
def test_what_is_no_file_is_refused_before_it_is_opened(make, reason, name, tmp_path):
    make(tmp_path / name)
    with pytest.raises(ModelError, match=reason) as caught:
        resolve_model(str(tmp_path))
    assert name in caught.value.message


def test_a_model_that_claims_a_million_positions_or_more_gets_a_bounded_table(tmp_path):
    spec = spec_of(tmp_path, max_position_embeddings=10**12)
    assert resolve_max_model_len(EngineConfig(), spec) == 2**20
    assert resolve_max_model_len(EngineConfig(max_model_len=2**21), spec) == 2**21


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("granite", {"logits_scaling": 0.0}, "logits_scaling is 0.0, but must be positive"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, but there are 2 layers"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3", {"rope_parameters": {"full_attention": 3}}, "full_attention is 3, not an object"),
        ("smollm3", {"no_rope_layers": [0, 0]}, "no_rope_layers does not say"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9 and num_experts 8"),
        ("qwen3-moe", {"num_local_experts": 2**30}, "num_experts 1073741824"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, which is not supported"),
        ("glm4_moe_lite", {"attention_bias": True, "q_lora_rank": None}, "attention_bias is true and q_lora_rank null"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 0.3}}, "partial_rotary_factor 0.3 rotates 9 of 32"),
        ("vaultgemma", {"head_dim": 15}, "transformers"),
        ("lfm3", {"attention_bias": True}, "attention_bias and use_attention_gate are true"),
        # 8 experts, of which a token goes to 3; a group is judged by its two best
        *(
            (
                "deepseek_v3",
                {"n_group": groups, "topk_group": kept},
                f"n_group is {groups} and topk_group {kept}, which do",
            )
            for groups, kept in [(3, 1), (4, 5), (4, 1), (8, 4)]
        ),
        ("laguna", {"num_attention_heads_per_layer": [4, 8, 6]}, "_per_layer is [4, 8, 6], not a multiple of"),
        ("laguna", {"num_attention_heads_per_layer": [4, 8, 5, 8]}, "num_key_value_heads 2 for each of 4 layers"),
        ("laguna", {"attention_bias": True}, "attention_bias is True, which is not supported"),
        ("laguna", {"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping is 30.0"),
        ("gemma4-e2b", {"num_kv_shared_layers": 5}, "not all of the last 5 layers"),
        ("gemma4-e2b", {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input is 100"),
        ("gemma4-e2b", {"per_layer_config": {"2": {"num_key_value_heads": 3}}}, "3 key/value heads of size 32"),
        ("gemma4-e2b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("gemma4-e2b", {"use_bidirectional_attention": ["vision"]}, "use_bidirectional_attention is ['vision']"),
        ("gemma4-e2b", {"enable_moe_block": True}, "num_experts is None"),
        ("qwen3_5", {"linear_conv_kernel_dim": 9}, "2 to 8 inputs, whole groups"),
        ("qwen3_5", {"linear_num_key_heads": 3}, "2 to 8 inputs, whole groups"),
        ("qwen3_5", {"layer_types": ["full_attention"] * 3 + ["hyena"]}, "layer_types lists 'hyena'"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, "no layer of layer_types attends"),
        ("lfm2", {"conv_L_cache": 1}, "2 to 8 inputs, whole groups"),
    ],
)
def test_a_family_config_that_cannot_be_is_refused_with_the_reason(family, fields, reason, tmp_path, tmp_path_factory):
    full = json.loads((cached_model(family, tmp_path_factory) / "config.json").read_text())
    write(tmp_path, full | fields)
    with pytest.raises(ModelError) as caught:
        read_spec(tmp_path)
    assert reason in caught.value.message
