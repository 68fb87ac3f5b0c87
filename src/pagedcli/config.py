"""The user's configuration: frozen, typed, validated. Precedence: default < YAML file < flag.

Used by cli, batch and engine; needs no torch. How it is carried out on a machine: planning.decide, core.plan.
"""

import difflib
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from pagedcli.config_keys import check_ranges, flag_name, from_json, from_yaml, key, keys_of
from pagedcli.errors import ConfigError, ParameterError
from pagedcli.events import Eviction, Speculation
from pagedcli.files import read_whole
from pagedcli.sampling_params import SamplingParams

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]
GpuKernels = Literal["auto", "fused", "invariant", "fp8"]
PoolingChoice = Literal["auto", "last", "mean"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
PreemptionPolicy = Literal["last", "largest"]
InputFormat = Literal["auto", "jsonl", "csv", "tsv"]
Order = Literal["input", "completion"]
Reorder = Literal["none", "prefix"]
BUILTIN_MODEL = "builtin"
_MOST_YAML_BYTES = 2**20
_MOST_FILE_BYTES = 2**24  # largest @FILE: as much as a line of input may have
_model, _cache, _batching, _rows = (partial(key, panel) for panel in ("Model", "KV cache", "Batching", "Rows"))


# affects_rows=False: the value changes how fast and where tokens are computed, but not which. For `revision` and
# `trust_remote_code`: the model's files are in the fingerprint themselves.


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine: model, memory and limits. Field names are the flags of vLLM and nano-vllm.

    Raises: ParameterError (also a ValueError) naming the field, the value and the allowed range.
    """

    model: Annotated[str, _model("Model folder, hub id, or builtin: the demo model", metavar="MODEL")] = BUILTIN_MODEL
    revision: Annotated[
        str | None, _model("Branch, tag or commit of a hub model", affects_rows=False, has_flag=False)
    ] = None
    adapter: Annotated[
        str | None, _model("LoRA adapter, a folder or hub id, to merge into the weights", metavar="ADAPTER")
    ] = None
    dtype: Annotated[Dtype, _model("Type of weights and activations; auto: as in the checkpoint")] = "auto"
    quantization: Annotated[
        str | None,
        _model(
            "Quantize linear layers and round activations to int8, CPU only",
            default="as in the checkpoint",
            names_in="pagedcli.models.formats:FORMATS",
        ),
    ] = None
    load_format: Annotated[LoadFormat, _model("dummy: random weights; needs only config.json")] = "auto"
    weight_cache: Annotated[
        bool,
        _model(
            "Keep packed weights that take more than 2 s to load for the next start, CPU only",
            affects_rows=False,
            has_flag=False,
        ),
    ] = True
    weight_cache_size: Annotated[
        int | None,
        _model(
            "Maximum size of all packed weights kept, e.g. 50GB",
            default="20GB, or less to leave a tenth of the disk free",
            at_least=1,
            affects_rows=False,
            has_flag=False,
        ),
    ] = None
    trust_remote_code: Annotated[bool, _model("Run Python code that comes with the model", affects_rows=False)] = False
    pooling: Annotated[
        PoolingChoice,
        _model("Token states that make a vector: last, or the mean of all; auto: by the checkpoint", has_flag=False),
    ] = "auto"
    device: Annotated[str, _model("auto, cpu, cuda, cuda:1, ...", metavar="DEVICE", affects_rows=False)] = "auto"
    attention_backend: Annotated[
        str, _model("Attention backend; auto: the fastest one available", metavar="NAME", affects_rows=False)
    ] = "auto"
    gpu_kernels: Annotated[
        GpuKernels,
        _model(
            "Kernels on a GPU; fused: five per layer for up to 16 tokens; invariant: a row has the same bits in any"
            " batch; fp8: inputs of FP8 weights are rounded to FP8, too",
            has_flag=False,
        ),
    ] = "auto"
    enforce_eager: Annotated[bool, _model("Disable CUDA graphs", affects_rows=False)] = False
    tensor_parallel_size: Annotated[
        int, _model("Number of GPUs to split the model across", at_least=1, affects_rows=False)
    ] = 1

    block_size: Annotated[int, _cache("Tokens per KV block", at_least=1, at_most=2**20, affects_rows=False)] = 16
    num_kvcache_blocks: Annotated[
        int | None,
        _cache(
            "Number of KV blocks",
            default="as many as fit; on a CPU max_num_seqs x max_model_len, at most 4GiB",
            at_least=1,
            affects_rows=False,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        _cache("Type of the KV cache; auto: same as activations; fp8: GPUs with compute capability 8.9+; int8: CPUs"),
    ] = "auto"
    kv_cache_memory: Annotated[
        int | None,
        _cache(
            "Memory for the KV cache, on any device, e.g. 4GiB",
            metavar="BYTES",
            default="by gpu_memory_utilization; up to 4GiB on a CPU",
            at_least=1,
            affects_rows=False,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, _cache("Fraction of GPU memory to use", above=0, at_most=1, affects_rows=False)
    ] = 0.9
    enable_prefix_caching: Annotated[bool, _cache("Reuse the KV blocks of shared prefixes", affects_rows=False)] = True
    eviction: Annotated[
        Eviction,
        _cache(
            "Which cached block to evict first; next-use: the one whose next use by a waiting request is furthest away",
            names_in="pagedcli.core.eviction:POLICIES",
            affects_rows=False,
        ),
    ] = "lru"
    prefix_store: Annotated[
        str | None,
        _cache(
            "Folder in which to keep KV blocks of shared prefixes for later runs, CPU only",
            metavar="DIR",
            default="none",
            affects_rows=False,
        ),
    ] = None
    prefix_store_size: Annotated[
        int | None,
        _cache(
            "Maximum size of the prefix store, e.g. 20GiB",
            metavar="BYTES",
            default="whatever leaves a tenth of the disk free",
            at_least=1,
            affects_rows=False,
        ),
    ] = None
    prefix_store_days: Annotated[
        float | None,
        _cache(
            "Remove files from the prefix store after this many days without use",
            default="no limit",
            above=0,
            affects_rows=False,
            has_flag=False,
        ),
    ] = None
    checkpoints: Annotated[
        str,
        _cache(
            "Where to snapshot recurrent state for prefix reuse: branches (where waiting prompts diverge), end (of each"
            " prompt), every N tokens (e.g. 512), or none",
            metavar="WHERE",
            affects_rows=False,
        ),
    ] = "branches"
    num_state_slots: Annotated[
        int | None,
        _cache(
            "Number of slots for recurrent state, shared by running sequences and snapshots",
            default="2 * max_num_seqs, using at most half of the memory",
            at_least=1,
            at_most=2**23,
            affects_rows=False,
        ),
    ] = None

    max_model_len: Annotated[
        int | None,
        _batching("Maximum tokens per request, prompt plus output", default="the model's own limit", at_least=1),
    ] = None
    max_num_seqs: Annotated[
        int, _batching("Maximum number of running sequences", at_least=1, at_most=2**20, affects_rows=False)
    ] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        _batching(
            "Maximum tokens per step",
            default="16384 on a GPU of 70 GiB or more, 8192 on others, 512 on a CPU; at least max_num_seqs",
            at_least=1,
            affects_rows=False,
        ),
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        _batching(
            "Maximum tokens of one prompt to prefill per step",
            default="as many as fit in the step",
            at_least=1,
            affects_rows=False,
        ),
    ] = None
    min_prefill_tokens: Annotated[
        int | None,
        _batching(
            "Hold back new prompts until this many tokens can be prefilled together, at most 32 steps; 0: never",
            default="1024 with CUDA graphs, otherwise 0",
            at_least=0,
            affects_rows=False,
            has_flag=False,
        ),
    ] = None
    preemption_policy: Annotated[
        PreemptionPolicy,
        _batching("Which sequence to preempt when blocks run out; last: the newest", affects_rows=False),
    ] = "last"
    async_scheduling: Annotated[
        bool | None,
        _batching(
            "Launch each step before reading the previous step's tokens",
            default="on CUDA only",
            affects_rows=False,
            has_flag=False,
        ),
    ] = None
    speculation: Annotated[
        Speculation,
        _batching(
            "Speculative decoding, CPU only; ngram: propose tokens from the row's text and finished answers",
            metavar="[off|ngram]",
            removed=("mtp", "auto"),
            affects_rows=False,
        ),
    ] = "off"

    seed: Annotated[int, key("Sampling", "Random seed, also of dummy weights; each row derives its own from it")] = 0

    def __post_init__(self) -> None:
        check_ranges(self)


# keys of earlier versions -> the value that asks for nothing, and what to say of others
_REMOVED = {
    "prefix_store_key": (None, "a prefix store is no longer encrypted, its folder has mode 700"),
    "prefix_store_read": ("always", "a prefix store is always read"),
}
OLD_POOL = "num_gpu_blocks_override"  # vLLM's name of num_kvcache_blocks, read in files, flags and keywords
BYTE_KEYS = frozenset(("kv_cache_memory", "prefix_store_size", "weight_cache_size"))  # may be text with a unit


class TemplateMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a chat whose content names columns of the line in braces."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The batch run: chats, rows and errors."""

    system_prompt: Annotated[
        str | None, _rows("System prompt for chats that have none", metavar="TEXT|@FILE", reads="text")
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        _rows(
            "Tools in OpenAI's format, for chats that list none; turns text prompts into chats",
            metavar="JSON|@FILE",
            reads="json",
        ),
    ] = None
    chat_template: Annotated[
        str | None, _rows("Chat template: Jinja file or text", metavar="FILE", default="the tokenizer's own")
    ] = None
    input_format: Annotated[
        InputFormat, _rows("Input format, e.g. for stdin; auto: by the file name", affects_rows=False)
    ] = "auto"
    field: Annotated[
        str | None, _rows("Input field that holds the prompt", metavar="NAME", default="prompt or messages")
    ] = None
    template: Annotated[
        str | None,
        _rows(
            "Build each prompt from the line's columns: 'Translate {text} to {lang}'; {{ and }} for braces",
            metavar="TEXT|@FILE",
            reads="text",
        ),
    ] = None
    messages: Annotated[
        list[TemplateMessage] | None,
        _rows(
            "Build each chat from the line's columns: a list of role and content, written as in template",
            has_flag=False,
        ),
    ] = None
    id_field: Annotated[str | None, _rows("Input field that holds the row's id", metavar="NAME", default="id")] = None
    questions: Annotated[
        dict[str, Any] | None,
        _rows(
            "Ask these questions with options about each row instead of generating, e.g. @questions.yaml",
            metavar="YAML|@FILE",
            reads="yaml",
        ),
    ] = None
    shifts: Annotated[
        Literal["one", "all"], _rows("Orders of a question's options; all: the mean of all cyclic ones")
    ] = "one"
    calibration: Annotated[
        dict[str, float] | None,
        _rows(
            "Temperature of each question's probabilities, as verify --calibrate writes them; it changes no choice",
            metavar="FILE",
            reads="file",
        ),
    ] = None
    embed: Annotated[bool, _rows("Return a vector for each row's prompt instead of generating")] = False
    instruction: Annotated[
        str | None, _rows("Text before each one to embed, or its name in the checkpoint", metavar="TEXT|NAME")
    ] = None
    dimensions: Annotated[
        int | None, _rows("Elements of each vector to keep before it is normalized", default="all", at_least=1)
    ] = None
    output_field: Annotated[str, _rows("Output field for the generated text", metavar="NAME")] = "text"
    keep: Annotated[
        str | None, _rows("Input columns to copy to the output: names separated by commas, or all", metavar="NAMES")
    ] = None
    output_token_ids: Annotated[bool, _rows("Add token_ids to each output row")] = False
    output_metrics: Annotated[
        bool, _rows("Add metrics to each output row: queue time, TTFT, TPOT, total time, preemptions")
    ] = False
    keep_reasoning: Annotated[
        bool, _rows("Return marked reasoning as reasoning_content instead of dropping it", has_flag=False)
    ] = True
    parse_tool_calls: Annotated[
        bool, _rows("Return tool calls as tool_calls instead of leaving them in the text", has_flag=False)
    ] = True
    sample_rows: Annotated[
        bool, _rows("Give each of n samples a row of its own in Parquet, as in CSV", affects_rows=False, has_flag=False)
    ] = False
    order: Annotated[Order, _rows("Order of the output rows", affects_rows=False)] = "input"
    reorder: Annotated[
        Reorder,
        _rows("prefix: process rows that share a prefix together; output order is unchanged", affects_rows=False),
    ] = "none"
    read_ahead: Annotated[
        int | None,
        _rows(
            "Prompt tokens to read ahead for eviction next-use and snapshots at branches; a row counts as at least 128",
            default="8 times the pool with either (at most 4194304), otherwise 2 * max_num_seqs rows",
            at_least=0,
            affects_rows=False,
            has_flag=False,
        ),
    ] = None
    deduplicate: Annotated[
        bool, _rows("Compute identical rows only once, if they are greedy or have a seed", affects_rows=False)
    ] = False
    limit: Annotated[int | None, _rows("Read only the first N rows of the input", at_least=1, affects_rows=False)] = (
        None
    )
    max_errors: Annotated[
        int | None, _rows("Stop after this many error rows; --resume continues", at_least=1, affects_rows=False)
    ] = None
    max_time: Annotated[
        float | None,
        _rows(
            "Start no row after this time, e.g. 1h30m or 6h; rows in flight finish, --resume continues",
            metavar="TIME",
            default="no limit",
            above=0,
            affects_rows=False,
        ),
    ] = None
    strict: Annotated[bool, _rows("Reject rows with unknown fields instead of only reporting them")] = False

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.tools is not None and (problem := tools_problem(self.tools)) is not None:
            raise ParameterError(problem)


def tools_problem(tools: object) -> str | None:
    """What is wrong with a list of tools in OpenAI's form. None: nothing."""
    if not isinstance(tools, list):
        return "tools must be a list"
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f'tools[{place}] must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}'
    return None


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
    """The effective configuration. `flags` maps dotted names ('engine.block_size') to values; None: not given.

    Raises: ConfigError naming the file, the key (with the nearest known one) or the value.
    """
    document = _read_yaml(path) if path is not None else {}
    for name, (nothing, instead) in _REMOVED.items():
        if document.get("engine", {}).pop(name, nothing) != nothing:
            raise ConfigError(f"{path}: engine.{name} was removed, leave it out: {instead}")
    if OLD_POOL in document.get("engine", {}):
        document["engine"].setdefault("num_kvcache_blocks", document["engine"].pop(OLD_POOL))
    sources = {key: str(path) for key in _leaf_keys(document)}
    for dotted, value in (flags or {}).items():
        if value is not None:
            section, name = dotted.split(".")
            document.setdefault(section, {})[name] = value
            sources[dotted] = flag_name(dotted)
    engine = document.get("engine", {})
    for name in engine.keys() & BYTE_KEYS:
        if isinstance(engine[name], str):
            engine[name] = parse_bytes(engine[name])
    if isinstance(max_time := document.get("run", {}).get("max_time"), str):
        document["run"]["max_time"] = parse_seconds(max_time)
    for dotted in _leaf_keys(document):
        _read_value(document, dotted, sources[dotted])
    if type(engine.get("checkpoints")) is int:
        engine["checkpoints"] = str(engine["checkpoints"])
    defaults = msgspec.to_builtins(Config().sampling)
    document["sampling"] = {**defaults, **document.get("sampling", {})}
    try:
        config = msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        where = f"{path}: " if path is not None else ""
        raise ConfigError(f"{where}{in_words(str(error))}", hint=_nearest_key(str(error))) from error
    return LoadedConfig(config, sources)


def _read_value(document: dict[str, Any], dotted: str, source: str) -> None:
    """Replace @FILE by the content of the file where the key says so, and JSON text by its value."""
    section, name = dotted.split(".", 1)
    value, reads = document[section][name], None
    shown = source if source.startswith("--") else f"{source}: {dotted}"
    if section in Config.__struct_fields__:
        struct: type[msgspec.Struct] = type(getattr(Config(), section))
        if name in struct.__struct_fields__:
            refuse_removed(struct, name, value, shown)
            reads = keys_of(struct)[name][1].reads
    if reads is None or not isinstance(value, str):
        _check_unicode(value, shown)
        return
    place = shown
    if reads == "file" or value.startswith("@"):
        file = value.removeprefix("@")
        place = f"{shown}: {file}"
        try:
            value = read_whole(Path(file), _MOST_FILE_BYTES).decode("utf-8-sig")
        except OSError as error:
            hint = None if reads == "file" else "@ is followed by a file"
            raise ConfigError(f"{place}: cannot be read: {error.strerror}", hint=hint) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place} is not UTF-8: {error.reason} at byte {error.start}") from error
    read = from_yaml if reads == "yaml" else from_json
    document[section][name] = value.removesuffix("\n") if reads == "text" else read(value, place)
    _check_unicode(document[section][name], place)
    if dotted == "sampling.response_format":
        document[section][name] = _response_format(document[section][name], place)
    if dotted == "run.tools" and (problem := tools_problem(document[section][name])) is not None:
        raise ConfigError(f"{place}: {problem}")


def refuse_removed(struct: type[msgspec.Struct], name: str, value: Any, shown: str) -> None:
    """Raises: ConfigError for a value that earlier versions had."""
    type_, declared = keys_of(struct)[name]
    if value in declared.removed:
        raise ConfigError(f"{shown} {value}: removed; use {' or '.join(get_args(type_))}")


def _check_unicode(value: Any, place: str) -> None:
    """Raises: ConfigError for half a character, as \\ud800 in JSON or a byte that is not UTF-8 in an argument."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ConfigError(f"{place} is not UTF-8: it has {half!r}, which is not a character") from error


def _response_format(value: Any, place: str) -> dict[str, Any]:
    """OpenAI's response_format; a JSON schema becomes one."""
    if not isinstance(value, dict):
        raise ConfigError(f"{place} must hold a JSON object: a schema, or OpenAI's response_format")
    is_openai = value.get("type") in ("text", "json_object", "json_schema")
    return value if is_openai else {"type": "json_schema", "json_schema": {"schema": value}}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = read_whole(path, _MOST_YAML_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    document = from_yaml(text, str(path))
    document = {} if document is None else document
    if not isinstance(document, dict) or not all(
        isinstance(document.get(section), dict | None) for section in Config.__struct_fields__
    ):
        raise ConfigError(
            f"{path} must hold sections with keys, for example 'engine:' with 'block_size: 16' below it",
            hint="sections: " + ", ".join(Config.__struct_fields__),
        )
    return {section: values if isinstance(values, dict) else {} for section, values in document.items()}


def _leaf_keys(document: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"{section}.{name}" for section, values in document.items() for name in values]


_KINDS = {"int": "a whole number", "str": "text", "float": "a number", "bool": "true or false", "null": "null"}
_KINDS |= {"array": "a list", "object": "a mapping", "date": "a date", "datetime": "a date with a time"}


def in_words(message: str, whole: str = "the file") -> str:
    """A decoder's message in the words of a user: `Expected `int`, got `str` - at `$.engine.seed``. `whole`: what a
    message without a place is about."""
    what, _, place = message.partition(" - at ")
    name = place.rpartition("`$")[2].strip("`.") or whole
    if "`key`" in place:
        return f"a key of {name} is of the wrong type"
    if match := re.fullmatch("Expected `(.+)`, got `(.+)`", what):
        wanted = " or ".join(_KINDS.get(kind, kind) for kind in match[1].split(" | "))
        given = "a fraction" if match[2] == "float" else _KINDS.get(match[2], match[2])
        return f"{name} must be {wanted}, not {given}"
    if match := re.fullmatch("Object contains unknown field `(.*)`", what):
        return f"unknown key {match[1]!r} in {name}"
    if match := re.fullmatch("Invalid enum value (.*)", what):
        section, _, key_name = name.partition(".")
        struct: type[msgspec.Struct] = type(getattr(Config(), section))
        declared = keys_of(struct).get(key_name)
        type_ = "" if declared is None else str(declared[0])
        known = re.findall(r"'([^']*)'", type_) + ["true", "false"] * ("bool" in type_)
        return f"{name} is {match[1]}" + (f", known: {', '.join(known)}" if known else "")
    return what


def _nearest_key(message: str) -> str | None:
    """A hint for an unknown key: the closest known one."""
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


_SECONDS = {"": 1, "S": 1, "M": 60, "MIN": 60, "H": 3600, "D": 86400}


def parse_bytes(text: str) -> int:
    """Bytes of '4GiB', '500MB', '4G' (binary) or '4294967296'. Raises: ConfigError."""
    return int(_parse(text, _BYTES, "a number of bytes", "4GiB, 500MB or 4294967296"))


def parse_seconds(text: str) -> float:
    """Seconds of '6h', '1h30m', '1.5d' or '45'. Raises: ConfigError."""
    parts = re.findall(r"\s*[\d.]+\s*[A-Za-z]+\s*", text)
    if not parts or "".join(parts) != text:
        parts = [text]
    return sum(_parse(part, _SECONDS, "a time", "6h, 1h30m or 45s") for part in parts)


def _parse(text: str, units: Mapping[str, int], what: str, examples: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in units:
        raise ConfigError(f"cannot read {text!r} as {what}", hint=f"for example {examples}")
    return float(match[1]) * units[match[2].upper()]
