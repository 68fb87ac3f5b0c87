"""Arguments of the Python interface: prompts of token ids, and the keywords of vLLM and nano-vllm, as fields of
EngineConfig or refused by name.

Used by llm and distributed.generator; needs no torch.
"""

import difflib
import operator
from collections.abc import Mapping
from typing import Any

import msgspec

from pagedcli.config import BYTE_KEYS, OLD_POOL, EngineConfig, parse_bytes, refuse_removed
from pagedcli.errors import ConfigError

_ALIASES = {
    "kvcache_block_size": "block_size",  # nano-vllm
    OLD_POOL: "num_kvcache_blocks",  # vLLM
    "kv_cache_memory_bytes": "kv_cache_memory",  # vLLM
}
# vLLM's keywords without effect here: name -> values that are accepted; empty: any
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "disable_log_stats": (),
    "swap_space": (),
    "max_logprobs": (),
    "tokenizer_mode": ("auto",),
    "enable_chunked_prefill": (True,),
    "skip_tokenizer_init": (False,),
}
# vLLM's keywords of generate and chat that would change the output: name -> why there is no such thing
_UNSUPPORTED = {
    "lora_request": "there are no LoRA adapters",
    "prompt_adapter_request": "there are no prompt adapters",
    "guided_options_request": "use SamplingParams(structured_outputs=...)",
    "priority": "requests start in order",
    "tokenization_kwargs": "tokenize yourself and pass prompt_token_ids",
    "mm_processor_kwargs": "there is no multimodal input",
}


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """An EngineConfig from keywords. Raises: TypeError, ConfigError."""
    known = EngineConfig.__struct_fields__
    values: dict[str, Any] = {"model": model}
    for name, value in options.items():
        key = _ALIASES.get(name, name)
        if name in _WITHOUT_EFFECT:
            accepted = _WITHOUT_EFFECT[name]
            if accepted and value not in (None, *accepted):
                raise TypeError(f"LLM() supports {name}={accepted[0]!r} only, given: {value!r}")
            continue
        if key not in known:
            nearest = difflib.get_close_matches(name, [*known, *_ALIASES], n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
            raise TypeError(f"LLM() got an unexpected keyword argument {name!r}; {hint}")
        if value is not None and not (key == "num_kvcache_blocks" and value == -1):  # nano-vllm: automatic
            refuse_removed(EngineConfig, key, value, name)
            values[key] = parse_bytes(value) if key in BYTE_KEYS and isinstance(value, str) else value
    try:
        return msgspec.convert(values, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def refuse_unsupported(method: str, options: Mapping[str, Any]) -> None:
    """Raises: TypeError that names a keyword that would have an effect in vLLM, or that no one knows."""
    for name, value in options.items():
        if name not in _UNSUPPORTED:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        if value not in (None, False, 0, {}):
            raise TypeError(f"{method}() does not support {name!r}: {_UNSUPPORTED[name]}")


def token_ids_of(prompt: Any) -> list[int]:
    """The token ids of a prompt that is not text. Raises: TypeError, ValueError."""
    if isinstance(prompt, bytes | bytearray) or not hasattr(prompt, "__iter__"):
        raise TypeError(f"a prompt is text or token ids, not {type(prompt).__name__}")
    if (num_dimensions := getattr(prompt, "ndim", 1)) != 1:
        raise ValueError(f"the token ids of a prompt have one dimension, this array has {num_dimensions}")
    token_ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    try:
        return [_token_id(token_id) for token_id in token_ids]
    except TypeError as error:
        wrong = next(each for each in token_ids if not hasattr(each, "__index__") or isinstance(each, bool))
        raise TypeError(f"a token id is a whole number, not {wrong!r}") from error


def _token_id(given: Any) -> int:
    if isinstance(given, bool):
        raise TypeError
    return operator.index(given)
