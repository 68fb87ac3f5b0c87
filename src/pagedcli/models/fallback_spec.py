"""The spec of a model that runs through transformers, from its config classes, and what the fallback refuses: by the
config before anything is loaded, then by the attention calls of the loaded model. Every refusal is a ModelError."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig

from pagedcli.attention.layer import AttentionLayer
from pagedcli.errors import ModelError
from pagedcli.models.base import length_refusal
from pagedcli.models.config_json import stop_ids
from pagedcli.models.mixers.attention import Attention
from pagedcli.models.mlps import Mlp
from pagedcli.models.spec import LayerSpec, ModelSpec
from pagedcli.models.tensors import NormStyle


def read_fallback_spec(path: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """The ModelSpec of a folder whose family is not native, from transformers' config classes.

    load_fallback confirms the sizes of the cache (layers, key/value heads, head size) on the loaded model.
    Raises: ModelError if transformers does not know the architecture, or the config shows that it cannot run here.
    """
    config = read_config(path, trust_remote_code)
    return spec_of(path, config, (config.architectures or [type(config).__name__])[0])


def spec_of(path: Path, config: Any, architecture: str) -> ModelSpec:
    """The ModelSpec of transformers' config. Raises: ModelError if it shows that the model cannot run here."""
    text = config.get_text_config(decoder=True)
    try:
        refuse_by_config(config, text, architecture)
        return _spec(path, config, text, architecture)
    except (AttributeError, RuntimeError) as error:  # a field that is missing, or that differs between layers
        raise refusal(architecture, f"has an unusual config ({first_sentence(error)})") from error


def _spec(path: Path, config: Any, text: Any, architecture: str) -> ModelSpec:
    def first(*names: str) -> Any:
        """The first of these fields that is set."""
        return next((value for name in names if (value := getattr(text, name, None)) is not None), None)

    inner = first("intermediate_size", "ffn_dim", "n_inner") or 4 * text.hidden_size
    width, num_layers = max(inner) if isinstance(inner, list) else inner, text.num_hidden_layers
    mixer = Attention(
        num_heads=text.num_attention_heads,
        num_kv_heads=first("num_key_value_heads", "num_attention_heads"),
        head_dim=first("head_dim") or text.hidden_size // text.num_attention_heads,
        soft_cap=first("attn_logit_softcapping"),
    )
    windows, sources = layer_windows(text) or (None,) * num_layers, kv_sources(text) or (None,) * num_layers
    activation = str(first("hidden_act", "hidden_activation", "activation_function"))
    mlp, seen = Mlp(width=width, activation=activation), enumerate(zip(windows, sources, strict=True))
    layers = (LayerSpec(mixer=replace(mixer, window=w, source=s), mlp=mlp, number=i) for i, (w, s) in seen)
    return ModelSpec(
        model_type=config.model_type,
        architecture=architecture,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=width,
        layers=tuple(layers),
        norm=NormStyle(eps=first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") or 1e-5),
        tie_word_embeddings=bool(first("tie_word_embeddings")),
        max_position_embeddings=text.max_position_embeddings,
        attention_chunk=attention_chunk(text),
        eos_token_ids=stop_ids(path, first("eos_token_id"), vocab_size=text.vocab_size),
        bos_token_id=first("bos_token_id"),
        dtype=str(config.dtype or first("dtype") or "float32").removeprefix("torch."),
        is_fallback=True,
    )


# Models that see and hear, which are loaded without what only that needs: their text runs as a model of its own, whose
# tensors lie in `model.language_model`.
_TEXT_ALONE = frozenset({"gemma3n"})
NESTED_TEXT = {r"^model\.language_model\.": "model."}


def read_config(path: Path, trust_remote_code: bool) -> Any:
    """transformers' config of a folder. Raises: ModelError if this version does not know it."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError, StrictDataclassError) as error:
        raise ModelError(
            f"{path / 'config.json'}: transformers {transformers.__version__} cannot read it: {first_sentence(error)}",
            hint="check model_type; a newer transformers may know it; a folder with own code needs --trust-remote-code",
        ) from error
    return text_alone(config)


def text_alone(config: Any) -> Any:
    """The config of the language model, of those whose text runs alone."""
    if config.model_type not in _TEXT_ALONE:
        return config
    text = config.text_config
    text.dtype = text.dtype or config.dtype
    return text


def first_sentence(error: BaseException) -> str:
    """The beginning of an error message of transformers, which can be a page long."""
    return str(error).strip().split("\n")[0].split(". ")[0]


_ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})
# arguments of an attention call that change its result and that no backend supports -> what the model does
_UNKNOWN_TO_BACKENDS = {
    "s_aux": "uses attention sinks (s_aux)",
    "position_bias": "adds a position bias to its attention scores",
}


def refusal(architecture: str, reason: str) -> ModelError:
    """The error of every refusal except those of length."""
    return ModelError(
        f"{architecture} cannot run over the paged cache: it {reason}",
        hint="use a decoder model such as Llama, Mistral, Qwen3, Gemma 3, Phi-3, OLMo2, Granite, SmolLM3 or Mixtral",
    )


def refuse_by_config(config: Any, text: Any, architecture: str) -> None:
    """Refuse what the config shows. `text` is the config of the language model within `config`."""
    other_layers = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if config.is_encoder_decoder:
        raise refusal(architecture, "is an encoder-decoder model")
    if not isinstance(getattr(text, "num_attention_heads", None), int):
        raise refusal(architecture, "has no attention heads, or not the same number in every layer")
    if other_layers:
        raise refusal(architecture, f"has layers that are not plain attention ({', '.join(other_layers)})")
    if getattr(text, "kv_lora_rank", None) is not None:
        raise refusal(architecture, "compresses keys and values (multi-head latent attention)")
    sources = kv_sources(text)
    if any(source is None for source in sources[len(sources) - (getattr(text, "num_kv_shared_layers", 0) or 0) :]):
        raise refusal(architecture, "reads keys and values of another model")
    max_positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(max_positions, int) or max_positions < 1:
        raise refusal(architecture, "does not specify max_position_embeddings, or not as a positive number")


def layer_windows(text: Any) -> tuple[int | None, ...]:
    """The window of each layer in tokens; empty when none has one. AttentionTrace.confirm holds the model to it."""
    window, unused = getattr(text, "sliding_window", None), getattr(text, "use_sliding_window", None) is False
    layer_types = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    slides = [bool(window) and not unused and kind == "sliding_attention" for kind in layer_types]
    return tuple(window if each else None for each in slides) if any(slides) else ()


def kv_sources(text: Any) -> tuple[int | None, ...]:
    """Per layer an earlier one whose K and V it reads, the last one of its kind; empty: none does."""
    num_shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if not num_shared:
        return ()
    num_layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * num_layers
    own = range(max(0, num_layers - num_shared))
    last_own = {kinds[i]: i for i in own}
    return tuple(None if i in own else last_own.get(kinds[i]) for i in range(num_layers))


def attention_chunk(text: Any) -> int | None:
    """The chunk in tokens within which some layer attends; None: there is no such layer."""
    chunk: int | None = getattr(text, "attention_chunk_size", None)
    layer_types = getattr(text, "layer_types", None)
    return chunk if layer_types is None or "chunked_attention" in layer_types else None


def refuse_length(text: Any, spec: ModelSpec, max_model_len: int) -> None:
    """Refuse lengths in tokens at which the rope angles of one sequence begin to depend on its neighbours."""
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in by_layer_type or [rope]:
        rope_type = str(parameters.get("rope_type"))
        limit = {
            "dynamic": spec.max_position_embeddings,
            "longrope": parameters.get("original_max_position_embeddings"),
        }.get(rope_type)
        if limit is not None and max_model_len > limit:
            raise length_refusal(spec.architecture, limit, rope_type, max_model_len)


class AttentionTrace:
    """Replaces PagedStep for one forward: records each attention call and refuses what no backend supports."""

    def __init__(self, architecture: str, max_model_len: int) -> None:
        self._architecture = architecture
        self._max_model_len = max_model_len
        self._heads: dict[int, tuple[int, int, int]] = {}  # layer -> (H, G, D)
        self._layers: dict[int, AttentionLayer] = {}

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, **kwargs: Any
    ) -> Tensor:
        """Arguments and result shape of PagedStep.attend; the result is zero."""
        self._refuse_by_arguments(module, kwargs)
        if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
            sizes = f"query {q.shape[-1]}, key {k.shape[-1]}, value {v.shape[-1]}"
            raise refusal(self._architecture, f"has heads of different sizes ({sizes})")
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self._heads:
            raise refusal(self._architecture, "does not number its attention layers, or attends twice in one")
        self._heads[layer] = (q.shape[1], k.shape[1], q.shape[-1])
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        window = kwargs.get("sliding_window")
        if window is not None and window >= self._max_model_len:
            window = None
        self._layers[layer] = AttentionLayer(scale=scale, window=window, soft_cap=kwargs.get("softcap"))
        return torch.zeros_like(q).transpose(1, 2)

    def confirm(self, spec: ModelSpec) -> tuple[AttentionLayer, ...]:
        """The layers' requirements. Raises ModelError unless every layer attended, with the heads that the backend and
        the cache expect."""
        if not self._heads:
            raise refusal(self._architecture, "does not call transformers' attention interface")
        if sorted(self._heads) != list(range(spec.num_layers)):
            raise refusal(self._architecture, f"attends in {len(self._heads)} of its {spec.num_layers} layers only")
        expected = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if others := sorted(set(self._heads.values()) - {expected}):
            numbers = "{} query heads and {} key/value heads of size {}"
            raise refusal(
                self._architecture,
                f"has layers with {numbers.format(*others[0])}, where its config says {numbers.format(*expected)}",
            )
        sources = [layer.source for layer in spec.attention_layers]
        layers = tuple(replace(self._layers[i], source=source) for i, source in enumerate(sources))
        if [layer.window for layer in layers] != [layer.window for layer in spec.attention_layers]:
            raise refusal(self._architecture, "asks for other windows in its layers than its config says")
        return layers

    def _refuse_by_arguments(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        for name, reason in _UNKNOWN_TO_BACKENDS.items():
            if kwargs.get(name) is not None:
                raise refusal(self._architecture, reason)
        if kwargs.get("attention_mask") is not None:
            raise refusal(self._architecture, "makes an attention mask of its own")
        if kwargs.get("dropout"):
            raise refusal(self._architecture, "drops attention weights at random")
        if False in (kwargs.get("is_causal"), getattr(module, "is_causal", None)):
            raise refusal(self._architecture, "attends to later tokens, too")
