"""The families that our decoder runs: their config.json -> ModelSpec. Free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from pagedcli.errors import ModelError
from pagedcli.models.config_json import Ids, convert, stop_ids
from pagedcli.models.rope import read_rope_spec
from pagedcli.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class _Family:
    """How a native family differs from Llama. The defaults are those of its transformers config class, because
    config.json leaves out what equals them."""

    architecture: str
    num_kv_heads: int | None  # None: as many as query heads
    head_dim: int | None  # None: hidden_size / num_heads
    max_position_embeddings: int
    special_ids: tuple[int | None, int | None]  # bos, eos
    sliding: Literal["never", "all", "by layer"]
    qkv_bias: bool | None = None  # None: attention_bias of config.json
    out_bias: bool | None = None  # None: attention_bias of config.json
    mlp_bias: bool | None = False  # None: mlp_bias of config.json
    qk_norm: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", None, None, 2048, (1, 2), "never", mlp_bias=None),
    "mistral": _Family("MistralForCausalLM", 8, None, 131072, (1, 2), "all", qkv_bias=False, out_bias=False),
    "qwen2": _Family("Qwen2ForCausalLM", 32, None, 32768, (None, None), "by layer", qkv_bias=True, out_bias=False),
    "qwen3": _Family("Qwen3ForCausalLM", 32, 128, 32768, (None, None), "by layer", qk_norm=True),
}
NATIVE_MODEL_TYPES = frozenset(_FAMILIES)
_OptionalInt = int | msgspec.UnsetType | None  # null and absent differ


class _ConfigJson(msgspec.Struct):
    """The fields of config.json that the native families use. UNSET where the file may leave them out."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: _OptionalInt = msgspec.UNSET
    head_dim: _OptionalInt = msgspec.UNSET
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: int | None = None
    use_sliding_window: bool = False
    sliding_window: _OptionalInt = msgspec.UNSET
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    eos_token_id: Ids | msgspec.UnsetType = msgspec.UNSET
    bos_token_id: _OptionalInt = msgspec.UNSET
    dtype: str | None = None
    torch_dtype: str | None = None


def native_spec(path: Path, config: dict[str, Any], model_type: str) -> ModelSpec:
    """The ModelSpec of a native family.

    Raises: ModelError for a wrong type in config.json, or a value that we cannot run.
    """
    family = _FAMILIES[model_type]
    where = path / "config.json"
    fields = convert(config, _ConfigJson, where)
    architectures = config.get("architectures") or [family.architecture]
    if architectures[0] != family.architecture:
        raise ModelError(
            f"{where}: architecture {architectures[0]!r} is not a causal language model",
            hint=f"model_type {model_type!r} runs as {family.architecture}",
        )
    if fields.hidden_act not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {fields.hidden_act!r} is not supported for {model_type} (only 'silu')")
    num_heads = fields.num_attention_heads
    num_kv_heads = _default(fields.num_key_value_heads, family.num_kv_heads) or num_heads
    head_dim = _default(fields.head_dim, family.head_dim) or fields.hidden_size // num_heads
    _check_sizes(fields, num_kv_heads, head_dim, where)
    max_positions = fields.max_position_embeddings or family.max_position_embeddings
    rope = read_rope_spec(config, max_positions, where)
    default_bos, default_eos = family.special_ids
    eos = default_eos if isinstance(fields.eos_token_id, msgspec.UnsetType) else fields.eos_token_id
    return ModelSpec(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.rms_norm_eps,
        rope=rope,
        tie_word_embeddings=fields.tie_word_embeddings,
        qkv_bias=fields.attention_bias if family.qkv_bias is None else family.qkv_bias,
        attention_out_bias=fields.attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=fields.mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        hidden_act=fields.hidden_act,
        max_position_embeddings=max(max_positions, rope.stretched_length),
        sliding_window=_sliding_window(fields, family),
        eos_token_ids=stop_ids(path, eos),
        bos_token_id=_default(fields.bos_token_id, default_bos),
        dtype=(fields.dtype or fields.torch_dtype or "float32").removeprefix("torch."),
    )


def _sliding_window(fields: _ConfigJson, family: _Family) -> int | None:
    """The window in tokens, or None when no layer uses it (Qwen: only layers from max_window_layers on slide)."""
    window = _default(fields.sliding_window, 4096)
    if family.sliding == "never" or window is None:
        return None
    if family.sliding == "all":
        return window
    if not fields.use_sliding_window:
        return None
    if fields.layer_types is not None:
        return window if "sliding_attention" in fields.layer_types else None
    return window if fields.max_window_layers < fields.num_hidden_layers else None


def _check_sizes(fields: _ConfigJson, num_kv_heads: int, head_dim: int, where: Path) -> None:
    sizes = {
        "vocab_size": fields.vocab_size,
        "hidden_size": fields.hidden_size,
        "intermediate_size": fields.intermediate_size,
        "num_hidden_layers": fields.num_hidden_layers,
        "num_attention_heads": fields.num_attention_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ModelError(f"{where}: {name} is {value}, but must be at least 1")
    if fields.num_attention_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {fields.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim {head_dim} is odd, but rotary embedding turns pairs of elements")


def _default(value: _OptionalInt, default: int | None) -> int | None:
    return default if isinstance(value, msgspec.UnsetType) else value
