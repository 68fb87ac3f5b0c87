"""`pagedcli profile-memory`: where memory goes, how many KV blocks fit, and what N requests need."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pagedcli.cli.options import ENGINE_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.cli.prompt_scan import PROMPT_KEYS, prompt_model, scan_prompts
from pagedcli.config import LoadedConfig, load_config
from pagedcli.core.budget import ITEMSIZE, SCALE_BYTES, TERMS, Terms, blocks_for
from pagedcli.core.groups import TableShape, token_bytes
from pagedcli.core.prefixes import BLOCK_SIZES
from pagedcli.errors import ConfigError, UsageError
from pagedcli.events import CacheGroup
from pagedcli.planning.cards import CARDS
from pagedcli.planning.prompt_survey import percentile
from pagedcli.printable import plural
from pagedcli.show.group_words import group_lines
from pagedcli.show.tables import Column, Format, Table, count, decimal, percent, print_tables, size
from pagedcli.show.terminal import say

KV_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")  # float16 equals bfloat16
_PREDICTED = ("weights", "activations", "kv_cache")  # the other terms do not follow from the model's sizes
Row = dict[str, Any]

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
    if len(profile.plan.limits.groups) > 1 or profile.plan.limits.tables.has_windows:
        tables.append(_group_table(profile, lengths))
    if target_concurrency is not None:
        tables.append(_target_table(profile, target_concurrency, lengths, shared or 0))
    if profile.fits:
        tables.append(_fit_table(profile))
    tables.append(_size_table(profile))
    print_tables(tables, format_, facts=_facts(profile, shared))
    if not profile.pool.num_blocks:
        raise _no_blocks(profile)


def _no_blocks(profile: "Profile") -> ConfigError:
    """The error for a machine where no block fits, and what to change."""
    from pagedcli.planning.memory import fitting_hint

    missing = missing_memory(profile.terms, profile.plan.block_bytes, profile.holders)
    message, hint = missing or (profile.pool.reason, profile.pool.hint)
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
    shape = f"largest step: {plural(step.num_tokens, 'token')} in {plural(step.num_seqs, 'sequence')}"
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


# ---------------------------------------------------------------------- where it goes


def waterfall_rows(terms: Terms, forecast: Terms | None, labels: Mapping[str, tuple[str, str]]) -> Iterator[Row]:
    """One row per term and the remainder. `labels` maps a term to its name and a note; terms without one are left out.

    Next to a measurement, only independent predictions are shown; `difference` is the ratio of both minus 1.
    """
    for term in (*TERMS, "kv_cache"):
        if term not in labels:
            continue
        is_measured = term in terms.measured or (term == "kv_cache" and bool(terms.measured))
        measured = getattr(terms, term) if is_measured else None
        predicted = None if is_measured else getattr(terms, term)
        if is_measured and forecast is not None and term in _PREDICTED:
            predicted = getattr(forecast, term)
        name, note = labels[term]
        yield {
            "term": term,
            "name": name,
            "measured_bytes": measured,
            "predicted_bytes": predicted,
            "difference": predicted / measured - 1 if measured and predicted else None,
            "note": note,
        }


def _waterfall_table(profile: "Profile") -> Table:
    rows = list(waterfall_rows(profile.terms, profile.forecast, _labels(profile)))
    plan, pool = profile.plan, profile.pool
    is_measured = bool(profile.terms.measured)
    column = "measured_bytes" if is_measured else "predicted_bytes"
    row = {"term": "pool", "name": "KV cache", "difference": None, "note": pool.reason.partition(":")[0]}
    values = {"measured_bytes": None, "predicted_bytes": None, column: pool.num_blocks * plan.block_bytes}
    rows.append(row | values)
    limits = plan.limits
    if limits.has_states:
        note = f"{plural(pool.num_state_slots or 0, 'slot')}, for running sequences and checkpoints"
        row = {"term": "states", "name": "recurrent state", "difference": None, "note": note}
        values = {"measured_bytes": None, "predicted_bytes": None, column: pool.state_bytes(limits)}
        rows.append(row | values)
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
    if is_measured:
        columns.append(Column("measured_bytes", "measured", size))
    if not is_measured or profile.forecast is not None:
        columns.append(Column("predicted_bytes", "predicted" if is_measured else "bytes", size))
    if is_measured and profile.forecast is not None:
        columns.append(Column("difference", "off by", percent))
    columns.append(Column("note", "what it is"))
    num_slots = pool.num_blocks // len(plan.limits.groups) * plan.limits.block_size
    in_windows = ", and more where windows release blocks" if plan.limits.tables.has_windows else ""
    largest = max(plan.limits.groups, key=lambda group: group.token_bytes or 0)
    notes = [
        f"bytes/block = {block_formula(largest, plan.limits.block_size, plan.kv_dtype)}",
        f"{plural(pool.num_blocks, 'block')} of {size(plan.block_bytes)} = {plural(num_slots, 'token')}{in_windows}",
    ]
    if limits.has_states:
        notes += [
            f"a running sequence takes a slot of {size(limits.state_bytes)} of recurrent state, and so does each"
            f" checkpoint: as much as the K and V of {_tokens_of_state(profile):,} tokens",
            "slots: --num-state-slots, by default 2 * max_num_seqs in at most half of the memory for the cache",
        ]
    num_ranks = profile.config.tensor_parallel_size
    title = f"Memory of {profile.config.model}" + (f", each of {num_ranks} ranks" if num_ranks > 1 else "")
    return Table("waterfall", title, columns, rows, notes)


def _tokens_of_state(profile: "Profile") -> int:
    """Tokens whose K and V take as much memory as one state."""
    limits = profile.plan.limits
    return limits.state_bytes * limits.block_size // (profile.plan.block_bytes * len(profile.plan.limits.groups))


def block_formula(group: CacheGroup, block_size: int, kv_dtype: str) -> str:
    """Bytes per block of a group that names its heads, with the numbers filled in."""
    assert group.heads is not None, "the group names its heads"
    num_kv_heads, head_dim = group.heads
    head = f"{head_dim} head_dim x {ITEMSIZE[kv_dtype]} bytes"
    if kv_dtype in SCALE_BYTES:
        head = f"({head} + {SCALE_BYTES[kv_dtype]} of scale)"
    return (
        f"2 (K and V) x {len(group.layers)} layers x {block_size} tokens x {num_kv_heads} kv_heads"
        f" x {head} = {token_bytes(group, kv_dtype) * block_size:,}"
    )


# ---------------------------------------------------------------------- how many requests


def concurrency_rows(
    lengths: Mapping[str, int], *, num_blocks: int, tables: TableShape, shared_tokens: int | None = None
) -> Iterator[Row]:
    """How many requests of each length the pool serves at once, with and without a shared prefix."""
    for name, num_tokens in lengths.items():
        row: Row = {
            "at": name,
            "num_tokens": num_tokens,
            "num_blocks": tables.most_blocks(num_tokens, 1),
            "max_concurrency": tables.concurrency(num_blocks, num_tokens),
        }
        if shared_tokens is not None:
            row["max_concurrency_shared"] = tables.concurrency(num_blocks, num_tokens, shared_tokens=shared_tokens)
        yield row


def _all_blocks(profile: "Profile") -> int:
    """Blocks of a pool that takes all memory left for the cache."""
    room = profile.terms.kv_cache - profile.pool.state_bytes(profile.plan.limits)
    return max(0, room) // profile.plan.block_bytes


def _whole(requests: float) -> str:
    """Requests that are served at once: whole ones."""
    return f"{int(requests):,}"


def in_a_sentence(profile: "Profile", num_tokens: int) -> str:
    """How many requests of this length the machine serves, and the setting for it."""
    tables, config = profile.plan.limits.tables, profile.config
    device, total = profile.device.removesuffix(", described by flags"), size(profile.terms.total)
    device = "this machine" if device == "cpu" else device
    most, now = (
        min(int(tables.concurrency(num_blocks, num_tokens)), config.max_num_seqs)
        for num_blocks in (_all_blocks(profile), profile.pool.num_blocks)
    )
    text = f"{device} with {total} serves {plural(most, 'request')} of {num_tokens:,} tokens at once with this model"
    if not most:
        longest = tables.longest(_all_blocks(profile), profile.plan.limits.chunk_size, num_tokens)
        return f"{text}: the longest that fits has {plural(longest, 'token')}"
    pool_bytes, left = profile.pool.num_blocks * profile.plan.block_bytes, _left_setting(profile)
    if most <= now or left is None:
        return text
    return f"{text}; as configured, with a pool of {size(pool_bytes)}, {now:,}: {left} uses what is left"


def _left_setting(profile: "Profile") -> str | None:
    """The flag for a pool of all memory that is left; None: the pool takes it already."""
    if _all_blocks(profile) <= profile.pool.num_blocks:
        return None
    return f"--kv-cache-memory {profile.terms.kv_cache // (2**30 // 100) / 100:.2f}GiB"


def _concurrency_table(profile: "Profile", lengths: Mapping[str, int], shared: int | None) -> Table:
    tables, left = profile.plan.limits.tables, _all_blocks(profile)
    rows = list(concurrency_rows(lengths, num_blocks=profile.pool.num_blocks, tables=tables, shared_tokens=shared))
    columns = [
        Column("at", "requests of"),
        Column("num_tokens", "tokens", count),
        Column("num_blocks", "blocks", count),
        Column("max_concurrency", "at once", _whole),
    ]
    longest = max(num_tokens for name, num_tokens in lengths.items() if len(lengths) == 1 or name != "model length")
    notes = [in_a_sentence(profile, longest)]
    if shared:
        columns.append(Column("max_concurrency_shared", f"sharing {shared:,} tokens", _whole))
        notes.append(f"at least half of the rows share their first {shared:,} tokens; only full blocks are shared")
    elif shared == 0:
        notes.append("no prefix is shared by half of the rows")
    if _left_setting(profile) is not None:
        columns.append(Column("max_concurrency_left", "in all that is left", _whole))
        for row in rows:
            row["max_concurrency_left"] = tables.concurrency(left, row["num_tokens"])
    notes.append(f"--max-num-seqs allows at most {profile.config.max_num_seqs:,} at once")
    if profile.pool.num_state_slots is not None:
        notes.append(f"slots of recurrent state allow at most {profile.pool.num_state_slots:,} at once")
    return Table(
        "concurrency",
        f"Requests that fit into the pool as configured, {plural(profile.pool.num_blocks, 'block')}",
        columns,
        rows,
        notes,
    )


def group_rows(
    lengths: Mapping[str, int], *, groups: Sequence[CacheGroup], tables: TableShape, block_bytes: int, chunk: int
) -> Iterator[Row]:
    """What a sequence of each length holds in the groups of each kind of layers while it generates, at most while its
    prompt is computed in chunks, and if no block were released before it ends. The groups are sized."""
    for name, num_tokens in lengths.items():
        whole = blocks_for(num_tokens, tables.block_size)
        for window, heads in dict.fromkeys((group.window, group.heads) for group in groups):
            alike = {i: group for i, group in enumerate(groups) if (group.window, group.heads) == (window, heads)}
            held = {index: tables.most_in_group(index, num_tokens, 1) for index in alike}
            num_kv_heads, head_dim = heads or (None, None)
            num_blocks = sum(held.values())
            used = sum(held[index] * (group.used_bytes(tables.block_size) or 0) for index, group in alike.items())
            yield {
                "at": name,
                "num_tokens": num_tokens,
                "window": window,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "num_layers": sum(len(group.layers) for group in alike.values()),
                "num_groups": len(alike),
                "num_blocks": num_blocks,
                "num_prefill_blocks": sum(tables.most_in_group(index, num_tokens, chunk) for index in alike),
                "kv_cache_bytes": num_blocks * block_bytes,
                "unused_bytes": num_blocks * block_bytes - used,
                "one_table_bytes": whole * len(alike) * block_bytes,
            }


def _group_notes(profile: "Profile", rows: Sequence[Row]) -> Iterator[str]:
    """What the columns mean, how full the blocks of each group are, and which layers have none."""
    limits = profile.plan.limits
    yield (
        f"a block holds {limits.block_size} tokens of the layers of a group; blocks: while it generates; in prefill: at"
        f" most, with chunks of {limits.chunk_size:,} tokens"
    )
    longest = [row for row in rows if row["num_tokens"] == limits.max_model_len]
    unused, held = (sum(row[name] for row in longest) for name in ("unused_bytes", "kv_cache_bytes"))
    yield (
        f"unused: what the layers leave of these blocks, {percent(unused / held)} of the KV cache of a sequence of"
        f" {limits.max_model_len:,} tokens"
    )
    yield "if kept: the same layers, if no block were released before the sequence ends"
    yield from group_lines(limits.groups, block_size=limits.block_size, block_bytes=profile.plan.block_bytes)
    if num_shared := sum(layer.source is not None for layer in profile.spec.attention_layers):
        yield f"without blocks: {plural(num_shared, 'layer')} sharing the K and V of an earlier layer"


def _group_table(profile: "Profile", lengths: Mapping[str, int]) -> Table:
    limits = profile.plan.limits
    rows = list(
        group_rows(
            lengths,
            groups=limits.groups,
            tables=limits.tables,
            block_bytes=profile.plan.block_bytes,
            chunk=limits.chunk_size,
        )
    )
    columns = [
        Column("at", "sequence of"),
        Column("num_tokens", "tokens", count),
        Column("window", "window", count),
        Column("num_kv_heads", "KV heads", count),
        Column("head_dim", "of size", count),
        Column("num_layers", "layers", count),
        Column("num_groups", "groups", count),
        Column("num_blocks", "blocks", count),
        Column("num_prefill_blocks", "in prefill", count),
        Column("kv_cache_bytes", "KV cache", size),
        Column("unused_bytes", "unused", size),
        Column("one_table_bytes", "if kept", size),
    ]
    notes = list(_group_notes(profile, rows))
    return Table("groups", "What one sequence holds, by window and heads", columns, rows, notes)


def target_rows(
    num_requests: int,
    lengths: Mapping[str, int],
    *,
    terms: Terms,
    tables: TableShape,
    block_bytes: int,
    shared_tokens: int = 0,
    state_bytes: int = 0,
) -> Iterator[Row]:
    """What num_requests concurrent requests need at each length: blocks, KV bytes with those of recurrent state, and
    the utilization of this device (above 1: too small). Shared tokens count once."""
    spent = terms.used + terms.activations + terms.graphs
    for name, num_tokens in lengths.items():
        num_blocks = tables.blocks_for_requests(num_requests, num_tokens, shared_tokens=shared_tokens)
        kv_bytes = num_blocks * block_bytes + num_requests * state_bytes
        yield {
            "at": name,
            "num_tokens": num_tokens,
            "num_blocks": num_blocks,
            "kv_cache_bytes": kv_bytes,
            "device_bytes": spent + kv_bytes,
            "utilization": (spent + kv_bytes) / terms.total,
            "fits": kv_bytes <= terms.kv_cache,
        }


def _target_table(profile: "Profile", num_requests: int, lengths: Mapping[str, int], shared: int) -> Table:
    rows = list(
        target_rows(
            num_requests,
            lengths,
            terms=profile.terms,
            tables=profile.plan.limits.tables,
            block_bytes=profile.plan.block_bytes,
            shared_tokens=shared,
            state_bytes=profile.plan.limits.state_bytes,
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


# ---------------------------------------------------------------------- what else could be chosen


def _fit_table(profile: "Profile") -> Table:
    rows = [
        {
            "flags": fit.flags or "as configured",
            "weight_format": fit.weight_format,
            "kv_dtype": fit.plan.kv_dtype,
            "weights_bytes": fit.terms.weights,
            "room_bytes": fit.terms.kv_cache,
            "token_bytes": fit.token_bytes,
            "num_tokens": fit.num_tokens,
            "longest_request": fit.longest_request,
            "max_concurrency": fit.max_concurrency,
            "pool_concurrency": fit.pool_concurrency,
        }
        for fit in profile.fits
    ]
    columns = [
        Column("flags", "with"),
        Column("weights_bytes", "weights", size),
        Column("room_bytes", "left for KV", lambda room: size(room) if room >= 0 else f"{size(-room)} too few"),
        Column("token_bytes", "KV per token", size),
        Column("longest_request", "longest request", count),
        Column("max_concurrency", "at model length", _whole),
    ]
    length = profile.plan.limits.max_model_len
    notes = [
        "for a pool of all memory that is left (--kv-cache-memory, by default the most on a GPU); as configured: with"
        " the weight format and KV dtype of this configuration",
        f"at model length: requests of {plural(length, 'token')} at once",
    ]
    return Table("fits", "What fits into all that is left, by weight format and KV dtype", columns, rows, notes)


def size_rows(groups: Sequence[CacheGroup], kv_bytes: int, num_tokens: int) -> Iterator[Row]:
    """What kv_bytes hold at every KV dtype and block size, and how many requests of num_tokens fit. The groups name
    their heads."""
    for dtype in KV_DTYPES:
        most = max(token_bytes(group, dtype) for group in groups)
        for block_size in BLOCK_SIZES:
            num_bytes = most * block_size
            num_blocks = max(0, kv_bytes) // num_bytes
            yield {
                "kv_dtype": dtype,
                "block_size": block_size,
                "block_bytes": num_bytes,
                "num_kvcache_blocks": num_blocks,
                "num_kvcache_tokens": num_blocks // len(groups) * block_size,
                "max_concurrency": TableShape.of(block_size, groups).concurrency(num_blocks, num_tokens),
            }


def _size_table(profile: "Profile") -> Table:
    pool_bytes = profile.pool.num_blocks * profile.plan.block_bytes
    rows = list(size_rows(profile.plan.limits.groups, pool_bytes, profile.plan.limits.max_model_len))
    columns = [
        Column("kv_dtype", "KV dtype"),
        Column("block_size", "block size", count),
        Column("block_bytes", "bytes/block", size),
        Column("num_kvcache_blocks", "blocks", count),
        Column("num_kvcache_tokens", "tokens", count),
        Column("max_concurrency", "at model length", _whole),
    ]
    notes = ["float16 equals bfloat16; --kv-cache-dtype supports the model's own dtype, fp8 on GPUs and int8 on CPUs"]
    return Table("sizes", f"The same {size(pool_bytes)} at other block sizes and KV dtypes", columns, rows, notes)


# ---------------------------------------------------------------------- the rest


def missing_memory(terms: Terms, block_bytes: int, holders: str = "") -> tuple[str, str] | None:
    """Message and hint for a device where no block fits: what uses the memory, how much is missing, what to change."""
    if terms.kv_cache >= block_bytes:
        return None
    held = {
        "other processes": terms.others,
        "kept free by gpu_memory_utilization": terms.reserve,
        "weights": terms.weights,
        "activations of the largest step": terms.activations,
        "runtime": terms.runtime,
        "CUDA graphs": terms.graphs,
    }
    ordered = sorted(((num_bytes, name) for name, num_bytes in held.items() if num_bytes > 0), reverse=True)
    parts = ", ".join(f"{name} {num_bytes / 2**30:.2f} GiB" for num_bytes, name in ordered)
    missing = block_bytes - terms.kv_cache
    message = (
        f"no KV block fits: one needs {block_bytes / 2**20:.2f} MiB, {missing / 2**20:,.2f} MiB are missing; "
        f"{terms.total / 2**30:.2f} GiB are used by: {parts}"
    )
    if holders:
        message += f" (other processes: {holders})"
    return message, _remedy(terms, missing, ordered[0][1])


def _remedy(terms: Terms, missing: int, largest: str) -> str:
    """What to change, the most effective first."""
    ways = []
    if largest == "other processes" or terms.others >= missing:
        ways.append("end other processes on the device")
    if terms.reserve > missing:
        needed = (terms.total - terms.reserve + missing) / terms.total
        ways.append(f"--gpu-memory-utilization {min(1.0, needed + 0.005):.2f} or more")
    if terms.activations > missing:
        ways.append("a lower --max-num-batched-tokens (activations)")
    if terms.graphs > missing:
        ways.append("--enforce-eager (no CUDA graphs)")
    if not ways:
        ways.append("a larger device, a smaller model or a narrower --dtype")
    return ", or ".join(ways)


def _facts(profile: "Profile", shared: int | None) -> dict[str, Any]:
    terms, block_size = profile.terms, profile.config.block_size
    facts: dict[str, Any] = {
        "model": profile.config.model,
        "device": profile.device,
        "dtype": profile.plan.dtype,
        "quantization": profile.config.quantization,
        "kv_dtype": profile.plan.kv_dtype,
        "backend": profile.plan.backend,
        "measured": bool(profile.terms.measured),
        "block_size": block_size,
        "block_bytes": profile.plan.block_bytes,
        "num_kvcache_blocks": profile.pool.num_blocks,
        "num_kvcache_blocks_reason": profile.pool.reason,
        "num_kvcache_tokens": profile.pool.num_blocks // len(profile.plan.limits.groups) * block_size,
        "kv_cache_bytes": profile.pool.num_blocks * profile.plan.block_bytes,
        "max_model_len": profile.plan.limits.max_model_len,
        "activation_peak_tokens": profile.plan.limits.largest_step.num_tokens,
        "activation_peak_seqs": profile.plan.limits.largest_step.num_seqs,
    }
    limits = profile.plan.limits
    if limits.has_states:
        facts |= {
            "num_state_slots": profile.pool.num_state_slots,
            "state_slot_bytes": limits.state_bytes,
            "state_bytes": profile.pool.state_bytes(limits),
            "checkpoints": limits.checkpoints,
        }
    facts |= {f"{name}_bytes": getattr(terms, name) for name in TERMS}
    facts |= {"loading_peak_bytes": profile.measured_loading, "predicted_loading_peak_bytes": profile.predicted_loading}
    facts["serves"] = in_a_sentence(profile, limits.max_model_len)
    facts["left_setting"] = _left_setting(profile)
    return facts | {"room_bytes": terms.kv_cache, "shared_prefix_tokens": shared}
