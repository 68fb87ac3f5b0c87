"""What a model is: config.json of a Hugging Face folder -> ModelSpec. Free of torch; the loader and the planner use it.

Only the families that our decoder runs are read here; any other goes to the explicit transformers fallback.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from pagedcli.errors import ModelError
from pagedcli.models.rope import RopeSpec, read_rope_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The facts of a model that planning and running need. Read once from its folder, never changed."""

    model_type: str  # family as transformers names it, e.g. "qwen3"
    architecture: str  # class name in config.json, e.g. "Qwen3ForCausalLM"
    vocab_size: int  # V, rows of the embedding table
    hidden_size: int  # E, width of the residual stream
    intermediate_size: int  # width of the gated MLP
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # G, key/value heads; divides H
    head_dim: int  # D; need not be hidden_size / num_heads
    rms_norm_eps: float  # added to the mean square
    rope: RopeSpec | None  # None: the fallback computes positions itself
    tie_word_embeddings: bool  # lm_head is the embedding table
    qkv_bias: bool  # this and the next three describe the native decoder; all False for the fallback
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_dim of q and k, before rope
    hidden_act: str  # activation of the MLP's gate
    max_position_embeddings: int  # tokens; the length the model was made for, or that yarn stretches it to
    sliding_window: int | None  # tokens a query of a sliding layer sees, itself included; None: no layer slides
    eos_token_ids: tuple[int, ...]  # those of generation_config.json first, then those only config.json has
    bos_token_id: int | None
    dtype: str  # dtype of the stored weights, e.g. "bfloat16"
    native: bool  # True: our decoder runs it; False: the transformers fallback does


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
# Beyond any model: a damaged or hostile file must not keep a loop busy for hours.
_LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2**12),
}
_LARGEST_JSON = 2**26  # bytes; the weight index of a model of 100,000 tensors has 2**23
NATIVE_MODEL_TYPES = frozenset(_FAMILIES)
_T = TypeVar("_T")
_Ids = int | list[int] | None
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
    eos_token_id: _Ids | msgspec.UnsetType = msgspec.UNSET
    bos_token_id: _OptionalInt = msgspec.UNSET
    dtype: str | None = None
    torch_dtype: str | None = None


class _GenerationJson(msgspec.Struct):
    eos_token_id: _Ids = None


def read_spec(path: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """The ModelSpec of a Hugging Face folder, from its config.json and generation_config.json.

    Raises: ModelError for a missing folder or file, broken JSON, a wrong type, or a value that we cannot run.
    """
    config = read_json(path / "config.json")
    check_supported(config, path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{path / 'config.json'} has no model_type", hint="use a Hugging Face model folder")
    family = _FAMILIES.get(model_type)
    if family is None:
        # AutoConfig knows the defaults of every other family; only this one import may load transformers
        from pagedcli.models.fallback_spec import read_fallback_spec

        return read_fallback_spec(path, trust_remote_code=trust_remote_code)
    return _native_spec(path, config, model_type, family)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. NaN and Infinity are accepted, as Hugging Face writes them.

    Raises: ModelError that names the file and, for broken JSON, the line and column.
    """
    if not path.parent.is_dir():
        raise ModelError(f"no model folder at {path.parent}", hint="check the path given with -m/--model")
    try:
        num_bytes = path.stat().st_size
        if num_bytes > _LARGEST_JSON:
            raise ModelError(f"{path} has {num_bytes:,} bytes, allowed: {_LARGEST_JSON:,}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}", hint="use a Hugging Face model folder (config.json, *.safetensors)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, a number of 5,000 digits
        raise ModelError(f"cannot read {path}: {error}", hint="download the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object", hint="download the file again")
    return content


def check_supported(config: dict[str, Any], path: Path) -> None:
    """Refuse what neither our decoder nor the fallback runs. Raises ModelError with the reason."""
    if config.get("quantization_config") is not None:
        quantization = config["quantization_config"]
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelError(
            f"{path} holds quantized weights (quantization_config: {method}), which are not supported",
            hint="use the float32, bfloat16 or float16 version of the model",
        )
    if config.get("is_encoder_decoder") is True:
        raise ModelError(f"{path} is an encoder-decoder model; only decoder-only language models run here")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"{path / 'config.json'}: architectures is {architectures!r}, not a list of names")
    text_config = config.get("text_config")
    for fields in (config, text_config if isinstance(text_config, dict) else {}):
        for name in _LARGEST.keys() & fields.keys():
            if isinstance(fields[name], int) and fields[name] > _LARGEST[name]:
                where = f"{path / 'config.json'}: {name}"
                raise ModelError(f"{where} is {fields[name]}, but must be at most {_LARGEST[name]:,}")


def stop_ids(path: Path, config_ids: _Ids) -> tuple[int, ...]:
    """End-of-sequence ids: those of generation_config.json first, then those that only config.json has."""
    generation_path = path / "generation_config.json"
    generation = _GenerationJson()
    if generation_path.is_file():
        generation = _convert(read_json(generation_path), _GenerationJson, generation_path)
    return tuple(dict.fromkeys(_as_list(generation.eos_token_id) + _as_list(config_ids)))


def _native_spec(path: Path, config: dict[str, Any], model_type: str, family: _Family) -> ModelSpec:
    where = path / "config.json"
    fields = _convert(config, _ConfigJson, where)
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
        native=True,
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


def _convert(content: dict[str, Any], kind: type[_T], where: Path) -> _T:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}", hint="compare the file with the original on the Hub") from error


def _default(value: _OptionalInt, default: int | None) -> int | None:
    return default if isinstance(value, msgspec.UnsetType) else value


def _as_list(ids: _Ids) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else ids
