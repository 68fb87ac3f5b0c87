"""The metadata of a GGUF file -> what its config.json would say, which models.reading makes a ModelSpec of.
Free of torch."""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedcli.models.gguf.header import Header
from pagedcli.models.gguf.quantization import GgufQuantization

# general.architecture -> model_type of transformers, if there are no experts
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "smollm3": "smollm3",
    "gpt-oss": "gpt_oss",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
}
# Rotary embedding there turns neighbouring elements, so the rows of q and k are stored in another order.
_REORDERED = ("llama", "granite", "smollm3")
# Tokens that end an answer, whatever the file calls them: files name one, and chats end with another.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>"),
    *("<|end_of_text|>", "<|return|>", "<|call|>", "<eos>"),
)
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose scores are scaled by hidden_size / num_heads
_LARGEST_FACTORS = 2**16


@dataclass(frozen=True, slots=True)
class Description:
    """A model as its file describes it."""

    model_type: str
    config: dict[str, Any]  # as config.json would have it
    traits: dict[str, Any]  # fields of ModelSpec that differ from what the config leads to


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
    model_type = "mixtral" if architecture == "llama" and fields.number("expert_count", 0) else FAMILIES[architecture]
    config = _common(fields) | _rope(fields) | (_OWN[architecture](fields) if architecture in _OWN else {})
    traits = {
        "qkv_bias": fields.has("blk.0.attn_q.bias") or fields.has("blk.0.attn_qkv.bias"),
        "attention_out_bias": fields.has("blk.0.attn_output.bias"),
        "mlp_bias": fields.has("blk.0.ffn_down.bias"),
        "norm_offset": False,  # added to the stored weights
        "quantization": quantization(header),
    }
    return Description(model_type, config, traits)


def quantization(header: Header) -> GgufQuantization | None:
    """The types of the file's tensors; None if all are floating point."""
    if all(tensor.type.is_float for tensor in header.tensors.values()):
        return None
    types = {name: tensor.type.name for name, tensor in header.tensors.items()}
    sizes = {name: math.prod(tensor.shape) for name, tensor in header.tensors.items()}
    return GgufQuantization(types, sizes)


def reordered_heads(header: Header, name: str) -> int | None:
    """Heads whose rows a tensor of q or k stores in another order; None if it does not."""
    fields = _Fields(header)
    architecture = fields.prefix = fields.text("general.architecture")
    part = name.rpartition(".")[0].rpartition(".")[2]
    if architecture not in _REORDERED or part not in ("attn_q", "attn_k"):
        return None
    heads = fields.number("attention.head_count")
    return heads if part == "attn_q" else fields.number("attention.head_count_kv", heads)


class _Fields:
    """Metadata with checked kinds, under the architecture's name."""

    def __init__(self, header: Header) -> None:
        self.header, self.prefix = header, ""

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

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

    def kv_heads(self, default: int) -> int:
        """Those of layers that attend; others of the list have none."""
        value = self.get("attention.head_count_kv")
        attending = [each for each in value if each != 0] if isinstance(value, list) else None
        if not attending or len(set(map(repr, attending))) > 1 or not isinstance(attending[0], int):
            return self.number("attention.head_count_kv", default)
        return attending[0]

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


def _common(fields: _Fields) -> dict[str, Any]:
    header = fields.header
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise header.error("it has no token_embd.weight", "use a file of a language model")
    heads = fields.number("attention.head_count")
    head_dim = fields.number("attention.key_length", table.shape[1] // max(1, heads))
    if fields.number("attention.value_length", head_dim) != head_dim:
        raise header.error("its keys and values have different sizes, which is not supported")
    config: dict[str, Any] = {
        "vocab_size": table.shape[0],
        "hidden_size": fields.number("embedding_length"),
        "intermediate_size": fields.number("feed_forward_length"),
        "num_hidden_layers": fields.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.kv_heads(heads),
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
    layers, width = fields.number("block_count"), fields.number("embedding_length")
    heads = max(1, fields.number("attention.head_count"))
    head_dim = fields.number("attention.key_length", width // heads)
    is_largest = layers == _GEMMA_27B[fields.prefix]
    config: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if is_largest else head_dim,
        "final_logit_softcapping": fields.real("final_logit_softcapping"),
    }
    if fields.prefix == "gemma2":
        config["attn_logit_softcapping"] = fields.real("attn_logit_softcapping")
        return config | _windows(fields, 2)
    return config | {"rope_local_base_freq": fields.real("rope.freq_base_swa", 10000.0)} | _windows(fields, 6)


def _windows(fields: _Fields, default: int) -> dict[str, Any]:
    """Which layers have a sliding window: every one but the last of each `default` layers, or as listed."""
    layers, window = fields.number("block_count"), fields.number("attention.sliding_window", 0)
    pattern = fields.get("attention.sliding_window_pattern")
    if pattern is None:
        pattern = default
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        slides = [bool(pattern) and (i + 1) % pattern != 0 for i in range(min(layers, 2**12))]
    elif isinstance(pattern, list) and len(pattern) >= layers:
        slides = [bool(each) for each in pattern[:layers]]
    else:
        raise fields.header.error(f"{fields.prefix}.attention.sliding_window_pattern is {pattern!r:.40}")
    kinds = ["sliding_attention" if each and window else "full_attention" for each in slides]
    return {"sliding_window": window or None, "layer_types": kinds}


def _phi3(fields: _Fields) -> dict[str, Any]:
    heads = max(1, fields.number("attention.head_count"))
    head_dim = fields.number("attention.key_length", fields.number("embedding_length") // heads)
    rotated = fields.number("rope.dimension_count", head_dim)
    original = fields.number("rope.scaling.original_context_length", fields.number("context_length"))
    config: dict[str, Any] = {
        "sliding_window": fields.number("attention.sliding_window", 0) or None,
        "partial_rotary_factor": rotated / max(1, head_dim),
        "original_max_position_embeddings": original,
    }
    short, long = (_factors(fields.header, f"rope_factors_{name}.weight") for name in ("short", "long"))
    if short and long:
        factor = fields.real("rope.scaling.attn_factor")
        given = {} if factor is None else {"attention_factor": factor}
        config["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long, **given}
    return config


def _granite(fields: _Fields) -> dict[str, Any]:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: value for name, key in names.items() if (value := fields.real(key)) is not None}


def _olmo2(fields: _Fields) -> dict[str, Any]:
    if fields.get("attention.sliding_window"):
        raise fields.header.error("it is an OLMo 3 model with sliding windows, which is not supported")
    return {}


def _gpt_oss(fields: _Fields) -> dict[str, Any]:
    """What its configuration says of YaRN's limits, files do not."""
    scaling = _rope(fields).get("rope_scaling")
    return _windows(fields, 2) | ({"rope_scaling": scaling | {"truncate": False}} if scaling else {})


def _lfm2(fields: _Fields) -> dict[str, Any]:
    """Layers without heads of K and V are convolutions."""
    layers, kv_heads = fields.number("block_count"), fields.get("attention.head_count_kv")
    counts = kv_heads if isinstance(kv_heads, list) else [kv_heads] * min(layers, 2**12)
    convolves = [count == 0 for count in counts]
    first = convolves.index(True) if True in convolves else 0
    config: dict[str, Any] = {
        "layer_types": ["conv" if each else "full_attention" for each in convolves],
        "conv_L_cache": fields.number("shortconv.l_cache"),
        "conv_bias": fields.has(f"blk.{first}.shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }
    if fields.prefix == "lfm2moe":
        config |= {
            "num_dense_layers": fields.number("leading_dense_block_count", 0),
            "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in fields.header.tensors),
            "routed_scaling_factor": fields.real("expert_weights_scale", 1.0),
        }
    return config


_OWN: Mapping[str, Callable[[_Fields], dict[str, Any]]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "qwen3moe": lambda _: {"norm_topk_prob": True},
    "qwen2moe": lambda fields: {
        "shared_expert_intermediate_size": fields.number("expert_shared_feed_forward_length"),
        "qkv_bias": True,
    },
    "smollm3": lambda _: {"no_rope_layer_interval": 4},
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
}


def frequency_factors(header: Header) -> tuple[float, ...]:
    """What each rotary frequency is divided by (Llama 3.1 and later); empty if nothing."""
    return tuple(_factors(header, "rope_freqs.weight"))


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
