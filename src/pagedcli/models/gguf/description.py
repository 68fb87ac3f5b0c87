"""The metadata of a GGUF file -> what its config.json would say, which models.reading makes a ModelSpec of, and how the
file's tensors differ from those of that model. Free of torch."""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagedcli.models.config_json import MOST_LAYERS
from pagedcli.models.gguf.header import Header
from pagedcli.models.gguf.quantization import GgufQuantization
from pagedcli.models.mixers.gated_delta import GatedDelta
from pagedcli.models.mlps import ExpertNames, Experts, Mlp
from pagedcli.models.spec import LayerSpec, ModelSpec
from pagedcli.models.tensors import TensorNames

# general.architecture -> model_type of transformers; _model_type has the exceptions
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitehybrid": "granitemoehybrid",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "smollm3": "smollm3",
    "gpt-oss": "gpt_oss",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "glm4": "glm4",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe",
    "glm4moe": "glm4_moe",
    "arcee": "arcee",
    "nemotron": "nemotron",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "command-r": "cohere",
    "cohere2": "cohere2",
    "seed_oss": "seed_oss",
}
# (general.architecture, what its metadata say) -> model_type
EXCEPTIONS = {
    ("llama", "expert_count"): "mixtral",
    ("olmo2", "attention.sliding_window"): "olmo3",
    ("mistral3", "attention.temperature_scale"): "ministral3",
}
# Rotary embedding there turns neighbouring elements, so the rows of q and k are stored in another order.
_REORDERED = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3", "arcee")
# A key head serves every n-th value head there, elsewhere n neighbours.
_TILED = ("qwen35", "qwen35moe")
# Tokens that end an answer, whatever the file calls them: files name one, and chats end with another.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>"),
    *("<|end_of_text|>", "<|return|>", "<|call|>", "<eos>", "<turn|>"),
)
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose scores are scaled by hidden_size / num_heads
_LARGEST_FACTORS = 2**16
_STILL = 1e29  # a frequency that is divided by so much does not turn


@dataclass(frozen=True, slots=True)
class Description:
    """A model as its file describes it."""

    model_type: str
    config: dict[str, Any]  # as config.json would have it


def describe(header: Header) -> Description:
    """What a file's config.json would say.

    Raises: ModelError for an architecture that is not read, or metadata of a wrong kind.
    """
    fields = _Fields(header)
    architecture = fields.text("general.architecture")
    if architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise header.error(f"general.architecture is {architecture!r:.40}; from GGUF files these run: {known}")
    fields.prefix = architecture
    special = [model_type for (name, key), model_type in EXCEPTIONS.items() if name == architecture and fields.get(key)]
    own = _own(fields)
    config = _common(fields, own) | _rope(fields) | own
    return Description(special[0] if special else FAMILIES[architecture], config)


def as_stored(spec: ModelSpec, header: Header) -> ModelSpec:
    """The spec of a file's model with names and orders of tensors that lead to the file's, and only its biases."""
    tensors = header.tensors
    fused_mlp = not any(".ffn_gate." in name for name in tensors) and len(spec.names.projections) == 2
    projections = ("gate_up_proj", "down_proj") if fused_mlp else TensorNames().projections

    def has(part: str) -> bool:
        return any(name.endswith(f".{part}.bias") for name in tensors)

    is_interleaved = any(name.endswith(".ssm_in.weight") for name in tensors)
    is_tiled = header.metadata["general.architecture"] in _TILED

    def stored(layer: LayerSpec) -> LayerSpec:
        mixer, mlp = layer.mixer, layer.mlp
        if layer.attention is not None:
            qkv_bias = has("attn_q") or has("attn_qkv")
            mixer = replace(layer.attention, qkv_bias=qkv_bias, out_bias=has("attn_output"))
        if isinstance(mixer, GatedDelta):
            mixer = replace(mixer, interleaved=is_interleaved, tiled=is_tiled)
        if isinstance(mlp, Mlp):
            mlp = replace(mlp, bias=has("ffn_down"))
        if isinstance(mlp, Experts):
            mlp = replace(mlp, names=ExpertNames())
        return replace(layer, mixer=mixer, mlp=mlp)

    return replace(
        spec,
        layers=tuple(map(stored, spec.layers)),
        names=TensorNames(recurrent=spec.names.recurrent, qkv=spec.names.qkv, projections=projections),
        norm=replace(spec.norm, offset=False),  # added to the stored weights
        quantization=quantization(header),
    )


def quantization(header: Header) -> GgufQuantization | None:
    """The types of the file's tensors; None if all are floating point."""
    if all(tensor.type.is_float for tensor in header.tensors.values()):
        return None
    types = {name: tensor.type.name for name, tensor in header.tensors.items()}
    sizes = {name: math.prod(tensor.shape) for name, tensor in header.tensors.items()}
    return GgufQuantization(types, sizes)


def num_layers(header: Header) -> int:
    """Layers of the model, without those that only predict further tokens."""
    return _Fields(header).of_architecture().layers()


def halved_groups(header: Header, name: str) -> int:
    """How often the two halves of a tensor's rows alternate."""
    return _Fields(header).of_architecture().number("ssm.group_count") if ".ssm_ba." in name else 1


def reordered_heads(header: Header, name: str) -> int | None:
    """Heads whose rows a tensor of q or k stores in another order; None if it does not."""
    fields = _Fields(header).of_architecture()
    architecture = fields.prefix
    part = name.rpartition(".")[0].rpartition(".")[2]
    if architecture not in _REORDERED or part not in ("attn_q", "attn_k"):
        return None
    heads = fields.number("attention.head_count")
    return heads if part == "attn_q" else fields.kv_heads(heads)


class _Fields:
    """Metadata with checked kinds, under the architecture's name."""

    def __init__(self, header: Header) -> None:
        self.header, self.prefix = header, ""

    def of_architecture(self) -> "_Fields":
        self.prefix = self.text("general.architecture")
        return self

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def layers(self) -> int:
        found = self.number("block_count") - self.number("nextn_predict_layers", 0)
        if not 1 <= found <= MOST_LAYERS:
            raise self.header.error(f"{self.prefix}.block_count: {found:,} layers, allowed: 1 to {MOST_LAYERS:,}")
        return found

    def with_tensor(self, name: str) -> list[bool]:
        """Whether each layer has a tensor."""
        return [self.has(f"blk.{i}.{name}") for i in range(self.layers())]

    def get(self, name: str) -> Any:
        return self.header.metadata.get(f"{self.prefix}.{name}")

    def text(self, name: str) -> str:
        value = self.header.metadata.get(name)
        if not isinstance(value, str):
            raise self.header.error(f"{name} is {value!r:.40}, not a text")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; a list of one for each layer must have equal ones."""
        value = self.get(name)
        if value is None:
            value = default
        if isinstance(value, list) and value and len(set(map(repr, value))) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool):
            what = "missing" if value is None else f"{value!r:.40}, not one whole number"
            raise self.header.error(f"{self.prefix}.{name} is {what}")
        return value

    def of_layers(self, name: str, kinds: list[str] | None = None, kind: str | None = None) -> list[int]:
        """Whole numbers of the layers, or those of one kind of them."""
        value, layers = self.get(name), self.layers()
        values = value if isinstance(value, list) else [value] * layers
        if len(values) < layers or any(type(each) is not int or each < 1 for each in values):
            raise self.header.error(f"{self.prefix}.{name} is {value!r:.40}, not a whole number for each layer")
        return [each for i, each in enumerate(values[:layers]) if kinds is None or kinds[i] == kind]

    def kv_heads(self, default: int) -> int:
        """The heads of K and V in layers that attend; other layers of the list have none."""
        value = self.get("attention.head_count_kv")
        attending = [each for each in value if each != 0] if isinstance(value, list) else None
        if not attending or len(set(map(repr, attending))) > 1 or not isinstance(attending[0], int):
            return self.number("attention.head_count_kv", default)
        return attending[0]

    def head_dim(self) -> int:
        width = self.number("embedding_length")
        return self.number("attention.key_length", width // max(1, self.number("attention.head_count")))

    def rotated(self) -> float:
        """The part of each head that is rotated."""
        head_dim = self.head_dim()
        return self.number("rope.dimension_count", head_dim) / max(1, head_dim)

    def real(self, name: str, default: float | None = None) -> float | None:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.header.error(f"{self.prefix}.{name} is {value!r:.40}, not a finite number")
        return _shortest(value)


def _shortest(value: float) -> float:
    """The decimal number that a float32 was: 1e-06 instead of 9.999999974752427e-07."""
    shown = f"{value:.7g}"
    return float(shown) if struct.pack("f", float(shown)) == struct.pack("f", value) else float(value)


def _common(fields: _Fields, own: Mapping[str, Any]) -> dict[str, Any]:
    """What all architectures call the same. `own`: what this one calls otherwise, and is not read again."""
    header = fields.header
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise header.error("it has no token_embd.weight", "use a file of a language model")
    heads = fields.number("attention.head_count")
    head_dim = fields.head_dim()
    if fields.number("attention.value_length", head_dim) != head_dim:
        raise header.error("its keys and values have different sizes, which is not supported")
    config: dict[str, Any] = {
        "vocab_size": table.shape[0],
        "hidden_size": fields.number("embedding_length"),
        "intermediate_size": own.get("intermediate_size")
        or fields.number("feed_forward_length", fields.get("expert_feed_forward_length")),
        "num_hidden_layers": fields.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("num_key_value_heads") or fields.kv_heads(heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": fields.number("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(header),
        "dtype": _dtype(header, fields.prefix),
    }
    if num_experts := fields.number("expert_count", 0):
        config |= {
            "num_experts": num_experts,
            "num_local_experts": num_experts,
            "num_experts_per_tok": fields.number("expert_used_count"),
            "moe_intermediate_size": fields.number("expert_feed_forward_length", config["intermediate_size"]),
        }
    return config


def _dtype(header: Header, architecture: str) -> str:
    """The dtype to compute in by default: that of most numbers, bfloat16 for quantized ones. Gemma's activations do not
    fit into float16."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + math.prod(tensor.shape)
    names = {"F32": "float32", "F16": "bfloat16" if architecture.startswith("gemma") else "float16"}
    return names.get(max(sizes, key=lambda name: sizes[name]), "bfloat16")


def _ends(header: Header) -> list[int]:
    """Ids of tokens that end an answer: the named ones first."""
    metadata = header.metadata
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    found: list[int] = []
    if isinstance(tokens, list) and isinstance(types, list):
        found = [i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == 3 and token in _ENDS]
    ids = [each for each in (*named, *found) if isinstance(each, int) and not isinstance(each, bool)]
    return list(dict.fromkeys(ids))


def _rope(fields: _Fields) -> dict[str, Any]:
    theta = fields.real("rope.freq_base", 10000.0)
    kind, factor = fields.get("rope.scaling.type"), fields.real("rope.scaling.factor")
    config: dict[str, Any] = {"rope_theta": theta}
    if kind == "linear" and factor is not None and factor != 1:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and factor is not None:
        names = {
            "original_max_position_embeddings": fields.get("rope.scaling.original_context_length"),
            "attention_factor": fields.real("rope.scaling.yarn_attn_factor"),
            "beta_fast": fields.real("rope.scaling.yarn_beta_fast"),
            "beta_slow": fields.real("rope.scaling.yarn_beta_slow"),
        }
        given = {name: value for name, value in names.items() if value is not None}
        config["rope_scaling"] = {"rope_type": "yarn", "factor": factor, **given}
    elif kind not in (None, "none", "linear", "longrope"):
        raise fields.header.error(f"{fields.prefix}.rope.scaling.type is {kind!r:.40}, which is not supported")
    return config


def _gemma(fields: _Fields) -> dict[str, Any]:
    heads, width = max(1, fields.number("attention.head_count")), fields.number("embedding_length")
    is_largest = fields.layers() == _GEMMA_27B[fields.prefix]
    config: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if is_largest else fields.head_dim(),
        "final_logit_softcapping": fields.real("final_logit_softcapping"),
    }
    if fields.prefix == "gemma2":
        config["attn_logit_softcapping"] = fields.real("attn_logit_softcapping")
        return config | _windows(fields, 2)
    return config | {"rope_local_base_freq": fields.real("rope.freq_base_swa", 10000.0)} | _windows(fields, 6)


def _windows(fields: _Fields, default: int) -> dict[str, Any]:
    """Which layers have a sliding window: every one but the last of each `default` layers, or as listed."""
    layers, window = fields.layers(), fields.number("attention.sliding_window", 0)
    pattern = fields.get("attention.sliding_window_pattern")
    if pattern is None:
        pattern = default
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        slides = [bool(pattern) and (i + 1) % pattern != 0 for i in range(layers)]
    elif isinstance(pattern, list) and len(pattern) >= layers:
        slides = [bool(each) for each in pattern[:layers]]
    else:
        raise fields.header.error(f"{fields.prefix}.attention.sliding_window_pattern is {pattern!r:.40}")
    kinds = ["sliding_attention" if each and window else "full_attention" for each in slides]
    return {"sliding_window": window or None, "layer_types": kinds}


def _phi3(fields: _Fields) -> dict[str, Any]:
    original = fields.number("rope.scaling.original_context_length", fields.number("context_length"))
    config: dict[str, Any] = {
        "sliding_window": fields.number("attention.sliding_window", 0) or None,
        "partial_rotary_factor": fields.rotated(),
        "original_max_position_embeddings": original,
    }
    short, long = (_factors(fields.header, f"rope_factors_{name}.weight") for name in ("short", "long"))
    if short and long:
        factor = fields.real("rope.scaling.attn_factor")
        given = {} if factor is None else {"attention_factor": factor}
        config["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long, **given}
    return config


def _granite_hybrid(fields: _Fields) -> dict[str, Any]:
    heads, inner = fields.number("ssm.time_step_rank"), fields.number("ssm.inner_size")
    attends = fields.with_tensor("attn_q.weight")
    first = attends.index(False) if False in attends else 0
    return {
        "layer_types": ["attention" if each else "mamba" for each in attends],
        "shared_intermediate_size": fields.number(
            "expert_shared_feed_forward_length", fields.get("feed_forward_length")
        ),
        "position_embedding_type": "rope" if fields.get("rope.scaling.finetuned") else None,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // max(1, heads),
        "mamba_conv_bias": fields.has(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": fields.has(f"blk.{first}.ssm_in.bias"),
    }


def _gated_delta(fields: _Fields) -> dict[str, Any]:
    heads, inner = fields.number("ssm.time_step_rank"), fields.number("ssm.inner_size")
    config = {
        "layer_types": [
            "full_attention" if each else "linear_attention" for each in fields.with_tensor("attn_q.weight")
        ],
        "linear_value_head_dim": inner // max(1, heads),
        "linear_num_value_heads": heads,
    }
    if fields.prefix != "qwen35":
        shared = fields.get("expert_feed_forward_length")
        config |= {
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": fields.number("expert_shared_feed_forward_length", shared),
        }
    return config


def _gemma4(fields: _Fields) -> dict[str, Any]:
    """Heads, widths and rotary embeddings that differ by layer."""
    windows, table = _windows(fields, 6), fields.header.tensors.get("per_layer_token_embd.weight")
    kinds = windows["layer_types"]
    own = len(kinds) - fields.number("attention.shared_kv_layers", 0)
    full = [i for i, kind in enumerate(kinds[: max(0, own)]) if kind == "full_attention"]
    kv_heads = {kind: fields.of_layers("attention.head_count_kv", kinds, kind)[0] for kind in kinds}
    widths = fields.of_layers("feed_forward_length")
    turned = sum(factor < _STILL for factor in _factors(fields.header, "rope_freqs.weight"))
    head_dim = fields.number("attention.key_length")
    return {
        **windows,
        "head_dim": fields.number("attention.key_length_swa"),
        "global_head_dim": head_dim,
        "num_key_value_heads": kv_heads.get("sliding_attention", kv_heads.get("full_attention")),
        "num_global_key_value_heads": kv_heads.get("full_attention"),
        "attention_k_eq_v": bool(full) and not fields.has(f"blk.{full[0]}.attn_v.weight"),
        "num_kv_shared_layers": fields.number("attention.shared_kv_layers", 0),
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "hidden_size_per_layer_input": fields.number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "enable_moe_block": fields.number("expert_count", 0) > 0,
        "final_logit_softcapping": fields.real("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": fields.real("rope.freq_base", 1e6),
                "partial_rotary_factor": 2 * turned / max(1, head_dim) or 1.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": fields.real("rope.freq_base_swa", 1e4)},
        },
    }


def _olmo(fields: _Fields) -> dict[str, Any]:
    """OLMo 3 has windows, whose rotary embedding is never stretched."""
    if not fields.get("attention.sliding_window"):
        return {}
    theta = fields.real("rope.freq_base", 10000.0)
    return _windows(fields, 4) | {"rope_local_base_freq": fields.real("rope.freq_base_swa", theta)}


def _mistral3(fields: _Fields) -> dict[str, Any]:
    """Ministral 3 where queries grow with their position, otherwise Mistral."""
    growth = fields.real("attention.temperature_scale")
    rope = _rope(fields)
    if not growth:
        return {"sliding_window": None}
    scaling = rope.get("rope_scaling")
    if scaling is None:
        raise fields.header.error("it has attention.temperature_scale, but no rope.scaling")
    mscale = fields.real("rope.scaling.yarn_log_multiplier", 1.0)
    return {
        "sliding_window": None,
        "rope_scaling": scaling | {"mscale": mscale, "mscale_all_dim": mscale, "llama_4_scaling_beta": growth},
    }


def _gpt_oss(fields: _Fields) -> dict[str, Any]:
    """What its configuration says of YaRN's limits, files do not."""
    scaling = _rope(fields).get("rope_scaling")
    return _windows(fields, 2) | ({"rope_scaling": scaling | {"truncate": False}} if scaling else {})


def _lfm2(fields: _Fields) -> dict[str, Any]:
    """Layers without heads of K and V are convolutions."""
    kv_heads = fields.get("attention.head_count_kv")
    counts = kv_heads if isinstance(kv_heads, list) else [kv_heads] * fields.layers()
    convolves = [count == 0 for count in counts]
    first = convolves.index(True) if True in convolves else 0
    config: dict[str, Any] = {
        "layer_types": ["conv" if each else "full_attention" for each in convolves],
        "conv_bias": fields.has(f"blk.{first}.shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }
    if fields.prefix == "lfm2moe":
        config["use_expert_bias"] = any(name.endswith(".exp_probs_b.bias") for name in fields.header.tensors)
    return config


# config.json's key <- metadata key and its default, whose type is the value's. `int` instead of a default: a file must
# have the key; `float`: without it config.json's own default holds.
_Keys = Mapping[str, tuple[str, int | float | type]]
_GRANITE: _Keys = {
    "attention_multiplier": ("attention.scale", float),
    "embedding_multiplier": ("embedding_scale", float),
    "residual_multiplier": ("residual_scale", float),
    "logits_scaling": ("logit_scale", float),
}
_LAYER_NORM: _Keys = {"rms_norm_eps": ("attention.layer_norm_epsilon", 1e-5)}
_GATED_DELTA: _Keys = {
    "linear_conv_kernel_dim": ("ssm.conv_kernel", int),
    "linear_key_head_dim": ("ssm.state_size", int),
    "linear_num_key_heads": ("ssm.group_count", int),
}
_LFM2: _Keys = {"conv_L_cache": ("shortconv.l_cache", int)}
_COHERE: _Keys = {**_LAYER_NORM, "logit_scale": ("logit_scale", 1.0)}
_EXPERTS: _Keys = {
    "num_dense_layers": ("leading_dense_block_count", 0),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
}
_KEYS: Mapping[str, _Keys] = {
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, "shared_intermediate_size": ("expert_shared_feed_forward_length", 0)},
    "granitehybrid": {
        **_GRANITE,
        "num_local_experts": ("expert_count", 0),
        "mamba_n_groups": ("ssm.group_count", int),
        "mamba_d_state": ("ssm.state_size", int),
        "mamba_d_conv": ("ssm.conv_kernel", int),
    },
    "qwen2moe": {"shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int)},
    "lfm2": _LFM2,
    "lfm2moe": {**_LFM2, **_EXPERTS},
    "qwen3next": _GATED_DELTA,
    "qwen35": _GATED_DELTA,
    "qwen35moe": _GATED_DELTA,
    "ernie4_5-moe": {
        "moe_layer_start_index": ("leading_dense_block_count", 0),
        "moe_layer_interval": ("interleave_moe_layer_step", 1),
        "n_shared_experts": ("expert_shared_count", 0),
    },
    "glm4moe": {**_EXPERTS, "n_shared_experts": ("expert_shared_count", 0)},
    "nemotron": _LAYER_NORM,
    "stablelm": _LAYER_NORM,
    # files do not name the window, which all published models have
    "starcoder2": {**_LAYER_NORM, "sliding_window": ("attention.sliding_window", 4096)},
    "command-r": _COHERE,
    "cohere2": _COHERE,
}
_ROTATES_PART = ("qwen3next", "qwen35", "qwen35moe", "glm4", "glm4moe", "nemotron", "stablelm")
# What is the same in all files of an architecture.
_CONSTANTS: Mapping[str, dict[str, Any]] = {
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "qwen3moe": {"norm_topk_prob": True},
    "qwen2moe": {"qkv_bias": True},
    "smollm3": {"no_rope_layer_interval": 4},
}
# What is computed from several values, or from the tensors.
_COMPUTED: Mapping[str, Callable[[_Fields], dict[str, Any]]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma4": _gemma4,
    "phi3": _phi3,
    "granitehybrid": _granite_hybrid,
    "olmo2": _olmo,
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "qwen3next": _gated_delta,
    "qwen35": _gated_delta,
    "qwen35moe": _gated_delta,
    "mistral3": _mistral3,
    "exaone4": lambda fields: _windows(fields, 4),
    "cohere2": lambda fields: _windows(fields, 4),
    "glm4moe": lambda fields: {
        "norm_topk_prob": fields.get("expert_weights_norm") is not False,
        "use_qk_norm": fields.has("blk.0.attn_q_norm.weight"),
    },
    "stablelm": lambda fields: {"use_parallel_residual": not fields.has("blk.0.ffn_norm.weight")},
}


def _own(fields: _Fields) -> dict[str, Any]:
    """What the file's architecture has that others do not, or calls otherwise."""
    architecture = fields.prefix
    config = dict(_CONSTANTS.get(architecture, {}))
    for key, (name, default) in _KEYS.get(architecture, {}).items():
        read = fields.real if default is float or isinstance(default, float) else fields.number
        value = read(name) if isinstance(default, type) else read(name, default)  # type: ignore[arg-type]  # its type
        if value is not None:
            config[key] = value
    if architecture in _ROTATES_PART:
        config["partial_rotary_factor"] = fields.rotated()
    return config | (_COMPUTED[architecture](fields) if architecture in _COMPUTED else {})


def frequency_factors(header: Header) -> tuple[float, ...]:
    """What each rotary frequency is divided by (Llama 3.1 and later); empty if nothing. Gemma 4's say which turn."""
    factors = _factors(header, "rope_freqs.weight")
    return () if any(factor >= _STILL for factor in factors) else tuple(factors)


def _factors(header: Header, name: str) -> list[float]:
    tensor = header.tensors.get(name)
    if tensor is None:
        return []
    if tensor.type.name != "F32" or math.prod(tensor.shape) > _LARGEST_FACTORS:
        raise header.error(f"tensor {name!r} has no plain numbers")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        factors = list(struct.unpack(f"<{math.prod(tensor.shape)}f", file.read(tensor.num_bytes)))
    if not all(0 < factor < math.inf for factor in factors):
        raise header.error(f"tensor {name!r} has factors that are not positive and finite")
    return factors
