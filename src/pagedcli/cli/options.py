"""The flags, each defined once. A flag belongs to one key of the configuration and carries its name.

Used by every command that reads a configuration: `@config_flags(*ENGINE_KEYS)` adds the flags to a command, which
gets those that were given in `flags`.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pagedcli.config import Dtype, KvCacheDtype, LoadFormat, Quantization

PreemptionPolicy = Literal["last", "largest"]
Order = Literal["input", "completion"]
Reorder = Literal["none", "prefix"]

_SHORT = {"engine.model": "-m"}
_Spec = tuple[Any, str | None, str]  # type, what stands for the value in the help (None: its choices), help


def _flags(panel: str, section: str, **specs: _Spec) -> dict[str, Any]:
    """Flags of one help panel and configuration section: dotted key -> annotation for typer."""
    flags = {}
    for name, (type_, metavar, help_) in specs.items():
        long = "--" + name.replace("_", "-")
        names = [f"{long}/--no-{long[2:]}" if type_ is bool else long]
        if short := _SHORT.get(f"{section}.{name}"):
            names.insert(0, short)
        option = typer.Option(*names, help=help_, metavar=metavar, rich_help_panel=panel, show_default=False)
        flags[f"{section}.{name}"] = Annotated[type_ | None, option]
    return flags


FLAGS: dict[str, Any] = {
    **_flags(
        "Model",
        "engine",
        model=(str, "MODEL", "Model folder or hub id. Default: the built-in demo model."),
        revision=(str, "REV", "Revision of a hub model."),
        dtype=(Dtype, None, "Type of weights and activations. Default: as stored."),
        quantization=(Quantization, None, "int8: 8-bit linear layers on a CPU. Default: as stored."),
        load_format=(LoadFormat, None, "dummy: random weights from config.json alone."),
        trust_remote_code=(bool, None, "Run Python code that comes with the model. Default: no."),
        device=(str, "DEVICE", "auto, cpu, cuda, cuda:1, ..."),
        attention_backend=(str, "NAME", "auto, or one by name."),
        enforce_eager=(bool, None, "No CUDA graphs."),
        tensor_parallel_size=(int, "N", "GPUs to split the model over."),
    ),
    **_flags(
        "KV cache",
        "engine",
        block_size=(int, "N", "Tokens per KV block. Default: 16."),
        num_gpu_blocks_override=(int, "N", "Blocks in the pool, on any device."),
        kv_cache_dtype=(
            KvCacheDtype,
            None,
            "Type of the KV cache. fp8 on newer GPUs, int8 on CPUs. Default: as dtype.",
        ),
        kv_cache_memory=(str, "BYTES", "Memory for the KV cache, e.g. 4GiB."),
        gpu_memory_utilization=(float, "X", "Share of the card's memory to use. Default: 0.9."),
        enable_prefix_caching=(bool, None, "Share blocks of equal prefixes. Default: yes."),
    ),
    **_flags(
        "Batching",
        "engine",
        max_model_len=(int, "N", "Tokens of prompt and output together. Default: the model's."),
        max_num_seqs=(int, "N", "Sequences running at once. Default: 256."),
        max_num_batched_tokens=(
            int,
            "N",
            "Tokens computed per step. Default: 2048, on a CPU 512, and at least --max-num-seqs.",
        ),
        chunked_prefill_size=(int, "N", "Tokens of one prompt per step. Default: the whole step."),
        preemption_policy=(PreemptionPolicy, None, "Who gives way when blocks run out."),
        async_scheduling=(bool, None, "Launch a step before the last one's tokens are read. Default: on CUDA only."),
    ),
    **_flags(
        "Sampling",
        "sampling",
        max_tokens=(int, "N", "Tokens to generate. Default: 256, or fewer if no more fit."),
        min_tokens=(int, "N", "No stop before this many tokens."),
        temperature=(float, "X", "Default: 0, which is greedy."),
        top_p=(float, "X", "Smallest set of tokens with at least this probability."),
        top_k=(int, "N", "Only the k likeliest tokens. 0: all."),
        min_p=(float, "X", "Drop tokens below this share of the likeliest one."),
        presence_penalty=(float, "X", "Subtracted once for a token generated before."),
        frequency_penalty=(float, "X", "Subtracted for each time a token was generated."),
        repetition_penalty=(float, "X", "Makes tokens of prompt and output less likely. 1: off."),
        stop=(list[str], "TEXT", "Cut the text before this string (repeatable)."),
        stop_token_ids=(list[int], "ID", "Stop at this token (repeatable)."),
        include_stop_str_in_output=(bool, None, "Keep the stop string."),
        n=(int, "N", "Samples per prompt."),
        logprobs=(int, "N", "Log-probabilities of this many likeliest tokens."),
        regex=(str, "REGEX", "Only text that matches it as a whole."),
        ignore_eos=(bool, None, "Go on behind the end-of-sequence token."),
    ),
    **_flags(
        "Sampling",
        "engine",
        seed=(int, "N", "Seed of the run; each row draws from its own. Default: 0."),
    ),
    **_flags(
        "Rows",
        "run",
        system_prompt=(str, "TEXT", "Put before every chat that has none; makes text prompts chats."),
        chat_template=(str, "FILE", "Jinja file or text instead of the tokenizer's own."),
        output_token_ids=(bool, None, "Add token_ids to each row."),
        order=(Order, None, "Order of the rows. Default: input."),
        reorder=(Reorder, None, "prefix: serve rows that begin alike together. The output keeps its order."),
        limit=(int, "N", "Only the first rows of the input."),
        max_errors=(int, "N", "Stop after this many error rows; --resume continues."),
        strict=(bool, None, "Unknown fields make an error row instead of a note."),
    ),
}
# what a prediction depends on
PLAN_KEYS = tuple(
    f"engine.{name}"
    for name in (
        "model",
        "revision",
        "dtype",
        "quantization",
        "trust_remote_code",
        "device",
        "attention_backend",
        "enforce_eager",
        "block_size",
        "kv_cache_dtype",
        "num_gpu_blocks_override",
        "kv_cache_memory",
        "gpu_memory_utilization",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "tensor_parallel_size",
    )
)
ENGINE_KEYS = tuple(key for key in FLAGS if key.startswith("engine."))
SAMPLING_KEYS = tuple(key for key in FLAGS if key.startswith("sampling."))
RUN_KEYS = tuple(key for key in FLAGS if key.startswith("run."))

Flags = dict[str, Any]
ConfigFile = Annotated[
    Path | None,
    typer.Option("-C", "--config", help="YAML file; flags win over it.", metavar="FILE", show_default=False),
]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Show the effective configuration and where each value is from.")
]


def config_flags(*keys: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the flags of these configuration keys to a command. It needs a keyword `flags: Flags` for what was given."""
    names = {key: key.replace(".", "__") for key in keys}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command)
        own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=FLAGS[key])
            for key, name in names.items()
        ]

        @functools.wraps(command)
        def with_flags(*args: Any, **values: Any) -> Any:
            given = {key: values.pop(name, None) for key, name in names.items()}
            # typer gives an empty list for a repeatable flag that is absent
            flags = {key: value for key, value in given.items() if value is not None and value != []}
            return command(*args, flags=flags, **values)

        with_flags.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        return with_flags

    return decorate
