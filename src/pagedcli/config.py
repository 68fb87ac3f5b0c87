"""What the user asked: frozen, typed, validated. Precedence: default < YAML file < flag.

Used by cli, batch and engine; needs no torch. What a machine does about it: engine.decide and engine.engine_plan.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import yaml

from pagedcli.errors import ConfigError, ParameterError
from pagedcli.sampling_params import SamplingParams

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
Quantization = Literal["int8"]
BUILTIN_MODEL = "builtin"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine: model, memory and limits. Field names are the flags of vLLM and nano-vllm."""

    model: str = BUILTIN_MODEL  # folder, hub id, or 'builtin'
    revision: str | None = None  # of a hub model
    dtype: Dtype = "auto"  # of weights and activations; auto: as stored
    quantization: Quantization | None = None  # of linear layers while loading; int8: on CPUs, activations per token
    load_format: LoadFormat = "auto"  # dummy: random weights from config.json alone
    trust_remote_code: bool = False
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    attention_backend: str = "auto"
    block_size: int = 16  # tokens per KV block
    num_gpu_blocks_override: int | None = None  # blocks in the pool, on any device
    kv_cache_dtype: KvCacheDtype = "auto"  # auto: as the activations; fp8: e4m3, on GPUs that have it; int8: on CPUs
    kv_cache_memory: int | None = None  # bytes for the KV cache, on any device
    gpu_memory_utilization: float = 0.9  # share of the card's memory that this process may use
    max_model_len: int | None = None  # tokens, prompt and output; None: the model's own
    max_num_seqs: int = 256  # sequences running at once
    max_num_batched_tokens: int | None = None  # tokens per step; None: 2048, on a CPU 512, or max_num_seqs
    chunked_prefill_size: int | None = None  # tokens of one prompt per step; None: the whole budget
    enable_prefix_caching: bool = True
    preemption_policy: Literal["last", "largest"] = "last"
    async_scheduling: bool | None = None  # launch a step before the last one's tokens are read; None: on CUDA only
    enforce_eager: bool = False  # no CUDA graphs
    tensor_parallel_size: int = 1
    seed: int = 0  # of requests that bring none, and of dummy weights

    def __post_init__(self) -> None:
        def at_least_one(*names: str) -> None:
            for name in names:
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise ParameterError(f"{name} is {value}, but must be at least 1")

        at_least_one("block_size", "num_gpu_blocks_override", "kv_cache_memory", "max_model_len", "max_num_seqs")
        at_least_one("max_num_batched_tokens", "chunked_prefill_size", "tensor_parallel_size")
        if not 0 < self.gpu_memory_utilization <= 1:
            share = self.gpu_memory_utilization
            raise ParameterError(f"gpu_memory_utilization is {share}, allowed: above 0 and at most 1")


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The batch run: files and manners."""

    system_prompt: str | None = None  # put before every chat that has none, and makes plain prompts chats
    chat_template: str | None = None  # a Jinja file or text instead of the tokenizer's own
    output_token_ids: bool = False
    order: Literal["input", "completion"] = "input"
    reorder: Literal["none", "prefix"] = "none"  # prefix: start requests that begin alike one after the other
    limit: int | None = None  # rows
    max_errors: int | None = None  # stop after this many error rows of one invocation
    strict: bool = False  # an unknown field in a line is an error row, not a note at the end

    def __post_init__(self) -> None:
        for name in ("limit", "max_errors"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ParameterError(f"{name} is {value}, but must be at least 1")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole configuration file."""

    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    sampling: SamplingParams = msgspec.field(default_factory=lambda: SamplingParams(temperature=0.0, max_tokens=256))
    run: RunConfig = msgspec.field(default_factory=RunConfig)


class LoadedConfig(msgspec.Struct, frozen=True):
    """A configuration and, for every value that is not a default, where it came from."""

    config: Config
    sources: dict[str, str]  # "engine.block_size" -> "run.yaml" or "--block-size"


def load_config(path: Path | None = None, flags: Mapping[str, Any] | None = None) -> LoadedConfig:
    """The effective configuration. `flags` maps dotted names ('engine.block_size') to values; None means not given.

    Raises: ConfigError naming the file, the key (with the nearest known one) or the value.
    """
    document = _read_yaml(path) if path is not None else {}
    sources = {key: str(path) for key in _leaf_keys(document)}
    for key, value in (flags or {}).items():
        if value is not None:
            section, name = key.split(".")
            document.setdefault(section, {})[name] = value
            sources[key] = "--" + name.replace("_", "-")
    engine = document.get("engine", {})
    if isinstance(engine.get("kv_cache_memory"), str):
        engine["kv_cache_memory"] = parse_bytes(engine["kv_cache_memory"])
    defaults = msgspec.to_builtins(Config().sampling)
    document["sampling"] = {**defaults, **document.get("sampling", {})}
    try:
        config = msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        where = f"{path}: " if path is not None else ""
        raise ConfigError(f"{where}{error}", hint=_nearest_key(str(error))) from error
    return LoadedConfig(config, sources)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    document = {} if document is None else document
    if not isinstance(document, dict) or not all(isinstance(v, dict | None) for v in document.values()):
        raise ConfigError(
            f"{path} must hold sections with keys, for example 'engine:' with 'block_size: 16' below it",
            hint="sections: " + ", ".join(Config.__struct_fields__),
        )
    return {section: values or {} for section, values in document.items()}


def _leaf_keys(document: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"{section}.{name}" for section, values in document.items() for name in values]


def _nearest_key(message: str) -> str | None:
    """For an unknown key: the known key most like it."""
    if "unknown field" not in message:
        return None
    unknown = message.split("`")[1]
    sections = {f.name: f.type for f in msgspec.structs.fields(Config)}
    known = {name: name for name in sections}
    known |= {name: f"{section}.{name}" for section, struct in sections.items() for name in struct.__struct_fields__}
    nearest = difflib.get_close_matches(unknown, known, n=1, cutoff=0.5)
    return f"did you mean {known[nearest[0]]}?" if nearest else f"known keys: {', '.join(sorted(known.values()))}"


_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_BYTES |= {unit: 2**power for power, units in {10: "K KIB", 20: "M MIB", 30: "G GIB"}.items() for unit in units.split()}


def parse_bytes(text: str) -> int:
    """Bytes of '4GiB', '500MB', '4G' (binary) or '4294967296'. Raises: ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _BYTES:
        raise ConfigError(f"cannot read {text!r} as a number of bytes", hint="for example 4GiB, 500MB or 4294967296")
    return int(float(match[1]) * _BYTES[match[2].upper()])


def dtype_names() -> tuple[str, ...]:
    """The values of --dtype."""
    return get_args(Dtype)
