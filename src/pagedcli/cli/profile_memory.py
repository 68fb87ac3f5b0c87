"""`pagedcli profile-memory`: where memory goes, how many KV blocks fit, and what N requests need."""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pagedcli.cli.options import ENGINE_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.cli.prompt_scan import PROMPT_KEYS, prompt_model, scan_prompts
from pagedcli.config import LoadedConfig, load_config
from pagedcli.core.budget import MemoryTerms
from pagedcli.core.groups import group_size
from pagedcli.errors import ConfigError, UsageError
from pagedcli.planning.cards import CARDS
from pagedcli.planning.memory_report import (
    block_formula,
    concurrency_rows,
    group_rows,
    missing_memory,
    size_rows,
    target_rows,
    waterfall_rows,
)
from pagedcli.planning.prompt_survey import percentile
from pagedcli.printable import plural
from pagedcli.show.tables import Column, Format, Table, count, decimal, percent, print_tables, size
from pagedcli.show.terminal import say

if TYPE_CHECKING:
    from pagedcli.runner.memory_profile import Profile

_requests = partial(option, panel="Requests")
_described = partial(option, panel="Prediction for another machine (no GPU or weights needed)", metavar="BYTES")


@config_flags(*ENGINE_KEYS, *PROMPT_KEYS)
def profile_memory(
    *,
    prompts: Annotated[
        str | None, _requests(metavar="FILE", help="Also show the concurrency for this file's request lengths.")
    ] = None,
    target_concurrency: Annotated[
        int | None, _requests(metavar="N", min=1, help="Also show what N concurrent requests need.")
    ] = None,
    gpu: Annotated[str | None, _described(help="GPU model: " + ", ".join(CARDS) + ".", metavar="NAME")] = None,
    gpu_memory: Annotated[str | None, _described(help="Total memory of the GPU, e.g. 24GiB.")] = None,
    memory: Annotated[str | None, _described(help="Total memory of a machine without a GPU, e.g. 24GiB.")] = None,
    used: Annotated[str | None, _described(help="Memory in use by all processes, with the model loaded.")] = None,
    peak: Annotated[str | None, _described(help="Peak allocation of this process, in the largest step.")] = None,
    current: Annotated[str | None, _described(help="Allocation of this process with the model loaded.")] = None,
    config: ConfigFile = None,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Show where memory goes, how many KV blocks fit, and how many requests they serve.

    Loads the model, runs the largest step that the limits allow, and measures. With --gpu, --gpu-memory or --memory it
    predicts for another machine and needs only config.json, as it does here for a model that does not fit.

    \b
    Examples:
      pagedcli profile-memory
      pagedcli profile-memory -m Qwen/Qwen3-0.6B --prompts prompts.jsonl
      pagedcli profile-memory -m ./Qwen3-0.6B --gpu h200 --target-concurrency 512
      pagedcli profile-memory -m Qwen3-30B-A3B/config.json --quantization int4 --memory 24GiB
      pagedcli profile-memory -m ./Qwen3-0.6B --block-size 256 --gpu-memory 24GiB
               --used 3.69GiB --peak 1.58GiB --current 1.14GiB

    Exit codes: 0 success, 2 wrong usage or configuration, or no block fits.
    """  # fmt: skip
    from pagedcli.runner.memory_profile import profile_described, profile_here, read_described

    loaded = load_config(config, flags)
    engine = loaded.config.engine
    described = read_described(gpu, gpu_memory, memory, used=used, peak=peak, current=current)
    profile = profile_here(engine, say) if described is None else profile_described(engine, described)
    lengths, shared = {"model length": profile.plan.limits.max_model_len}, None
    if prompts is not None:
        lengths, shared = _lengths_of(loaded, prompts, lengths)
    tables = [_waterfall_table(profile), _concurrency_table(profile, lengths, shared)]
    if profile.plan.limits.tables.has_windows:
        tables.append(_group_table(profile, lengths))
    if target_concurrency is not None:
        tables.append(_target_table(profile, target_concurrency, lengths, shared or 0))
    if profile.fits:
        tables.append(_fit_table(profile))
    tables.append(_size_table(profile))
    print_tables(tables, format_, facts=_facts(profile, shared))
    if not profile.num_blocks:
        raise _no_blocks(profile)


def _no_blocks(profile: "Profile") -> ConfigError:
    """The error for a machine where no block fits, and what to change."""
    from pagedcli.planning.fitting import fitting_hint

    missing = missing_memory(profile.terms, profile.plan.block_bytes, profile.holders)
    message, hint = missing or (profile.reason, profile.hint)
    return ConfigError(message, hint=fitting_hint(profile.fits) if profile.fits else hint)


def _lengths_of(loaded: LoadedConfig, prompts: str, lengths: dict[str, int]) -> tuple[dict[str, int], int]:
    """Percentiles of the file's prompt and output lengths, and the prefix shared by half of the prompts."""
    scan = scan_prompts(loaded, prompts, *prompt_model(loaded, None))
    if scan.num_bad:
        say(f"{scan.num_bad:,} of {scan.num_rows:,} rows are invalid and ignored: see pagedcli plan")
    if not scan.plan.num_prompts:
        raise UsageError(f"{prompts} has no valid row", hint="see pagedcli plan")
    shares = {"file p50": 0.5, "file p95": 0.95, "file max": 1.0}
    found = {name: percentile(scan.plan.total_lengths, share) for name, share in shares.items()}
    return lengths | found, scan.plan.common_prefix_tokens()


def _labels(profile: "Profile") -> dict[str, tuple[str, str]]:
    terms, notes, step = profile.terms, profile.notes, profile.plan.limits.largest_step
    shape = f"largest step: {step.num_tokens:,} tokens in {step.num_seqs:,} sequences"
    labels = {
        "total": ("total", profile.device),
        "reserve": ("- kept free", f"1 - gpu_memory_utilization {profile.config.gpu_memory_utilization}"),
        "others": ("- other processes", notes.get("others", "")),
        "runtime": ("- runtime", notes.get("runtime", "")),
        "weights": ("- weights", "; ".join(filter(None, (_weights_dtype(profile), notes.get("weights"))))),
        "activations": ("- activation peak", "; ".join(filter(None, (shape, notes.get("activations"))))),
        "graphs": ("- CUDA graphs", notes.get("graphs", "")),
        "kv_cache": ("= room for KV", ""),
    }
    if not terms.reserve:
        del labels["reserve"]
    if not terms.graphs:
        del labels["graphs"]
    return labels


def _weights_dtype(profile: "Profile") -> str:
    dtype = profile.plan.dtype
    weights = profile.plan.weights
    return dtype if weights is None else f"{weights}, embedding and norms {dtype}"


def _waterfall_table(profile: "Profile") -> Table:
    rows = list(waterfall_rows(profile.measured, profile.predicted, _labels(profile)))
    pool_bytes = profile.num_blocks * profile.plan.block_bytes
    pool = {"term": "pool", "name": "KV cache", "difference": None, "note": profile.reason.partition(":")[0]}
    column = "predicted_bytes" if profile.measured is None else "measured_bytes"
    rows.append(pool | {"measured_bytes": None, "predicted_bytes": None} | {column: pool_bytes})
    if profile.measured_loading is not None:
        measured, predicted = profile.measured_loading, profile.predicted_loading
        rows.append(
            {
                "term": "loading_peak",
                "name": "while loading",
                "measured_bytes": measured,
                "predicted_bytes": predicted,
                "difference": None if predicted is None else predicted / measured - 1,
                "note": "peak of this process, including pages of the mapped checkpoint",
            }
        )
    columns = [Column("name", "memory")]
    if profile.measured is not None:
        columns.append(Column("measured_bytes", "measured", size))
    if profile.predicted is not None:
        columns.append(Column("predicted_bytes", "predicted" if profile.measured else "bytes", size))
    if profile.measured is not None and profile.predicted is not None:
        columns.append(Column("difference", "off by", percent))
    columns.append(Column("note", "what it is"))
    plan = profile.plan
    num_slots = profile.num_blocks // len(plan.groups) * plan.limits.block_size
    in_windows = ", and more where windows release blocks" if plan.limits.tables.has_windows else ""
    formula = block_formula(profile.sizes, plan.limits.block_size, plan.kv_dtype, num_layers=group_size(plan.groups))
    notes = [
        f"bytes/block = {formula}",
        f"{plural(profile.num_blocks, 'block')} of {size(plan.block_bytes)} = {plural(num_slots, 'token')}{in_windows}",
    ]
    num_ranks = profile.config.tensor_parallel_size
    title = f"Memory of {profile.config.model}" + (f", each of {num_ranks} ranks" if num_ranks > 1 else "")
    return Table("waterfall", title, columns, rows, notes)


def _concurrency_table(profile: "Profile", lengths: Mapping[str, int], shared: int | None) -> Table:
    tables = profile.plan.limits.tables
    rows = list(concurrency_rows(lengths, num_blocks=profile.num_blocks, tables=tables, shared_tokens=shared))
    columns = [
        Column("at", "requests of"),
        Column("num_tokens", "tokens", count),
        Column("num_blocks", "blocks", count),
        Column("max_concurrency", "at once", decimal),
    ]
    notes = [f"--max-num-seqs allows at most {profile.config.max_num_seqs:,} at once"]
    if shared:
        columns.append(Column("max_concurrency_shared", f"sharing {shared:,} tokens", decimal))
        notes.append(f"at least half of the rows share their first {shared:,} tokens; only full blocks are shared")
    elif shared == 0:
        notes.append("no prefix is shared by half of the rows")
    return Table("concurrency", f"Requests that {profile.num_blocks:,} blocks hold", columns, rows, notes)


def _group_table(profile: "Profile", lengths: Mapping[str, int]) -> Table:
    plan = profile.plan
    rows = list(
        group_rows(
            lengths,
            groups=plan.groups,
            tables=plan.limits.tables,
            block_bytes=plan.block_bytes,
            chunk=plan.limits.chunk_size,
        )
    )
    columns = [
        Column("at", "a sequence of"),
        Column("num_tokens", "tokens", count),
        Column("window", "window", lambda window: "none" if window is None else count(window)),
        Column("num_layers", "layers", count),
        Column("num_groups", "groups", count),
        Column("num_blocks", "blocks", count),
        Column("num_prefill_blocks", "in prefill", count),
        Column("kv_cache_bytes", "KV cache", size),
        Column("one_table_bytes", "without release", size),
    ]
    notes = [
        f"a block holds {plan.limits.block_size} tokens of {group_size(plan.groups)} layers; blocks: while it"
        f" generates; in prefill: at most, with chunks of {plan.limits.chunk_size:,} tokens",
        "without release: the same layers, if no block were released before the sequence ends",
    ]
    return Table("groups", "What one sequence holds, by window", columns, rows, notes)


def _target_table(profile: "Profile", num_requests: int, lengths: Mapping[str, int], shared: int) -> Table:
    rows = list(
        target_rows(
            num_requests,
            lengths,
            terms=profile.terms,
            tables=profile.plan.limits.tables,
            block_bytes=profile.plan.block_bytes,
            shared_tokens=shared,
        )
    )
    columns = [
        Column("at", "requests of"),
        Column("num_blocks", "blocks", count),
        Column("kv_cache_bytes", "KV cache", size),
        Column("device_bytes", "whole device", size),
        Column("utilization", "utilization", decimal),
        Column("fits", "fits"),
    ]
    notes = ["utilization: share of this device's memory, all else as above; above 1, the device is too small"]
    return Table("target", f"What {num_requests:,} concurrent requests need", columns, rows, notes)


def _fit_table(profile: "Profile") -> Table:
    rows = [
        {
            "flags": fit.flags or "as configured",
            "weight_format": fit.weight_format,
            "kv_dtype": fit.kv_dtype,
            "weights_bytes": fit.weights,
            "room_bytes": fit.room,
            "token_bytes": fit.token_bytes,
            "num_tokens": fit.num_tokens,
            "longest_request": fit.longest_request,
            "max_concurrency": fit.num_sequences,
        }
        for fit in profile.fits
    ]
    columns = [
        Column("flags", "with"),
        Column("weights_bytes", "weights", size),
        Column("room_bytes", "left for KV", lambda room: size(room) if room >= 0 else f"{size(-room)} too few"),
        Column("token_bytes", "KV per token", size),
        Column("longest_request", "longest request", count),
        Column("max_concurrency", "at model length", decimal),
    ]
    length = profile.plan.limits.max_model_len
    notes = [f"left for KV: all memory that nothing else needs; model length: {length:,} tokens"]
    return Table("fits", "What fits, by weight format and KV dtype", columns, rows, notes)


def _size_table(profile: "Profile") -> Table:
    pool_bytes = profile.num_blocks * profile.plan.block_bytes
    rows = list(size_rows(profile.sizes, pool_bytes, profile.plan.limits.max_model_len, groups=profile.plan.groups))
    columns = [
        Column("kv_dtype", "KV dtype"),
        Column("block_size", "block size", count),
        Column("block_bytes", "bytes/block", size),
        Column("num_kvcache_blocks", "blocks", count),
        Column("num_kvcache_tokens", "tokens", count),
        Column("max_concurrency", "at model length", decimal),
    ]
    notes = ["float16 equals bfloat16; --kv-cache-dtype supports the model's own dtype, fp8 on GPUs and int8 on CPUs"]
    return Table("sizes", f"The same {size(pool_bytes)} at other block sizes and KV dtypes", columns, rows, notes)


def _facts(profile: "Profile", shared: int | None) -> dict[str, Any]:
    terms, block_size = profile.terms, profile.config.block_size
    facts: dict[str, Any] = {
        "model": profile.config.model,
        "device": profile.device,
        "dtype": profile.plan.dtype,
        "quantization": profile.config.quantization,
        "kv_dtype": profile.plan.kv_dtype,
        "backend": profile.plan.backend,
        "measured": profile.measured is not None,
        "block_size": block_size,
        "block_bytes": profile.plan.block_bytes,
        "num_kvcache_blocks": profile.num_blocks,
        "num_kvcache_blocks_reason": profile.reason,
        "num_kvcache_tokens": profile.num_blocks // len(profile.plan.groups) * block_size,
        "kv_cache_bytes": profile.num_blocks * profile.plan.block_bytes,
        "max_model_len": profile.plan.limits.max_model_len,
        "activation_peak_tokens": profile.plan.limits.largest_step.num_tokens,
        "activation_peak_seqs": profile.plan.limits.largest_step.num_seqs,
    }
    facts |= {f"{field.name}_bytes": getattr(terms, field.name) for field in fields(MemoryTerms)}
    facts |= {"loading_peak_bytes": profile.measured_loading, "predicted_loading_peak_bytes": profile.predicted_loading}
    return facts | {"room_bytes": terms.kv_cache, "shared_prefix_tokens": shared}
