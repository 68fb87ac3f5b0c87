"""The ModelSpec of a family that is not native, from transformers' config classes. Used by models.reading."""

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig

from pagedcli.errors import ModelError
from pagedcli.models.config_json import stop_ids
from pagedcli.models.fallback_refusals import attention_chunk, layer_windows, refusal, refuse_by_config
from pagedcli.models.spec import ModelSpec


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

    return ModelSpec(
        model_type=config.model_type,
        architecture=architecture,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=first("intermediate_size", "ffn_dim", "n_inner") or 4 * text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=first("num_key_value_heads", "num_attention_heads"),
        head_dim=first("head_dim") or text.hidden_size // text.num_attention_heads,
        rms_norm_eps=first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") or 1e-5,
        rope=None,
        tie_word_embeddings=bool(first("tie_word_embeddings")),
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        hidden_act=str(first("hidden_act", "hidden_activation", "activation_function")),
        max_position_embeddings=text.max_position_embeddings,
        windows=layer_windows(text),
        attention_chunk=attention_chunk(text),
        eos_token_ids=stop_ids(path, first("eos_token_id")),
        bos_token_id=first("bos_token_id"),
        dtype=str(config.dtype or first("dtype") or "float32").removeprefix("torch."),
        soft_cap=first("attn_logit_softcapping"),
        is_fallback=True,
    )


def read_config(path: Path, trust_remote_code: bool) -> Any:
    """transformers' config of a folder. Raises: ModelError if this version does not know it."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelError(
            f"{path / 'config.json'}: transformers {transformers.__version__} cannot read it: {first_sentence(error)}",
            hint="check model_type; a newer transformers may know it; a folder with own code needs --trust-remote-code",
        ) from error


def first_sentence(error: BaseException) -> str:
    """The beginning of an error message of transformers, which can be a page long."""
    return str(error).strip().split("\n")[0].split(". ")[0]
