"""`pagedcli profile-memory`: where memory goes, how many KV blocks fit, and what N requests need."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from pagedcli.cli.options import MEASURED_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.cli.prompt_scan import PROMPT_KEYS, prompt_model, scan_prompts
from pagedcli.config import LoadedConfig, load_config
from pagedcli.core.budget import ITEMSIZE, SCALE_BYTES, TERMS, Terms, blocks_for
from pagedcli.core.groups import TableShape, token_bytes
from pagedcli.core.prefixes import BLOCK_SIZES
from pagedcli.errors import ConfigError, PagedcliError, UsageError
from pagedcli.events import CacheGroup
from pagedcli.planning.cards import CARDS
from pagedcli.planning.prompt_survey import percentile
from pagedcli.printable import capitalized, plural
from pagedcli.records import Bytes, Share, Whole, percent, size
from pagedcli.show.tables import Format, Table, print_tables, table
from pagedcli.show.terminal import say
from pagedcli.views.cache_groups import group_lines, release_words

KV_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")  # float16 equals bfloat16
_PREDICTED = ("weights", "activations", "kv_cache")  # the other terms do not follow from the model's sizes

if TYPE_CHECKING:
    from pagedcli.runner.memory_profile import Described, Profile

_requests = partial(option, panel="Requests")
_ALL_HELP = "Show every table: measured against predicted, weight formats, KV dtypes, block sizes."
_described = partial(option, panel="Prediction for another machine (no GPU or weights needed)", metavar="BYTES")


@config_flags(*MEASURED_KEYS, *PROMPT_KEYS)
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
    others: Annotated[str | None, _described(help="Memory that other processes hold, without this model.")] = None,
    used: Annotated[str | None, _described(help="Memory in use by all processes, with this model loaded.")] = None,
    peak: Annotated[str | None, _described(help="Peak allocation of this process, in the largest step.")] = None,
    current: Annotated[str | None, _described(help="Allocation of this process with the model loaded.")] = None,
    all_: Annotated[bool, option("--all", help=_ALL_HELP)] = False,
    config: ConfigFile = None,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Show where memory goes, how many KV blocks fit, and how many requests they serve.

    Begins with how many blocks and sequences fit, and draws the memory as one bar; --all and other formats have every
    table.

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
    from pagedcli.planning.decide import fitting_hint
    from pagedcli.planning.decision import missing_memory
    from pagedcli.runner.memory_profile import profile_described, profile_here, read_described

    loaded = load_config(config, flags)
    engine = loaded.config.engine
    described = read_described(gpu, gpu_memory, memory, used=used, others=others, peak=peak, current=current)
    profile = profile_here(engine, say) if described is None else profile_described(engine, described)
    lengths, shared = {"model length": profile.plan.limits.max_model_len}, None
    if prompts is not None:
        lengths, shared = _lengths_of(loaded, prompts, lengths)
    is_short = format_ is Format.TABLE and not all_
    if is_short:
        tables = _short_tables(profile, lengths, shared)
    else:
        tables = _full_tables(profile, lengths, shared)
    story = _answer(profile, described) if is_short else []
    if target_concurrency is not None:
        needs = _needs(profile, target_concurrency, lengths, shared or 0)
        title = f"What {target_concurrency:,} concurrent requests need"
        columns = "at num_blocks kv_cache_bytes device_bytes utilization fits"
        tables.append(table(ServedNeed, "target", title, needs, columns))
        if is_short:
            story.insert(0, _need(profile, target_concurrency, needs[-1]))
    print_tables(tables, format_, facts=_facts(profile, shared), story=story)
    if not profile.pool.num_blocks:
        missing = missing_memory(profile.terms, profile.plan.block_bytes, profile.holders)
        message, hint = missing or (profile.pool.reason, profile.pool.hint)
        if profile.fits:
            hint = fitting_hint(profile.fits, is_here=described is None)
        raise ConfigError(message, hint=hint)


def _short_tables(profile: "Profile", lengths: dict[str, int], shared: int | None) -> list[Table]:
    """The bar's legend and, for a file, how many of its requests fit. Takes the model length, which the first sentence
    has, out of the lengths of a file."""
    tables = [_bar_table(profile)]
    if len(lengths) > 1:
        del lengths["model length"]
        at_once = _concurrency_table(profile, lengths, shared)
        tables.append(replace(at_once, notes=at_once.notes[:1]))
    if profile.fits and not profile.pool.num_blocks:
        tables.append(_fit_table(profile))
    return tables


def _full_tables(profile: "Profile", lengths: Mapping[str, int], shared: int | None) -> list[Table]:
    tables = [_waterfall_table(profile), _concurrency_table(profile, lengths, shared)]
    if len(profile.plan.limits.groups) > 1 or profile.plan.limits.tables.has_windows:
        tables.append(_group_table(profile, lengths))
    if profile.fits:
        tables.append(_fit_table(profile))
    return [*tables, _size_table(profile)]


def _lengths_of(loaded: LoadedConfig, prompts: str, lengths: dict[str, int]) -> tuple[dict[str, int], int]:
    """Percentiles of the file's prompt and output lengths, and the prefix shared by half of the prompts."""
    scan = scan_prompts(loaded, prompts, *prompt_model(loaded, None))
    if scan.num_bad:
        say(f"{scan.num_bad:,} of {plural(scan.num_rows, 'row')} are invalid and ignored: see pagedcli plan")
    if not scan.plan.num_prompts:
        raise UsageError(f"{prompts} has no valid row", hint="see pagedcli plan")
    shares = {"file p50": 0.5, "file p95": 0.95, "file max": 1.0}
    found = {name: percentile(scan.plan.total_lengths, share) for name, share in shares.items()}
    return lengths | found, scan.plan.common_prefix_tokens()


# ---------------------------------------------------------------------- the answer and the bar

_BAR_CELLS = 72
_SHARE_IN_4_BITS = 0.3  # bytes of weights of 4 bits with their scales and an embedding of 16, over those of 16 bits
_MARKS = {"reserve": ".", "others": "o", "runtime": "r", "weights": "W", "activations": "a", "graphs": "g"}


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a device's memory in the bar."""

    mark: str
    name: Annotated[str, "memory"]
    num_bytes: Annotated[Bytes, "bytes"]
    share: Annotated[Share, "share"]  # share of the device
    note: Annotated[str, "what it is"]


def bar_parts(profile: "Profile") -> list[BarPart]:
    """What takes the device's memory, and what is left of it. Without the parts that take nothing."""
    terms, pool, limits = profile.terms, profile.pool, profile.plan.limits
    found = {
        (_MARKS[term], name.removeprefix("- "), note): getattr(terms, term)
        for term, (name, note) in _labels(profile).items()
        if term in _MARKS
    }
    states = pool.state_bytes(limits)
    found["S", "recurrent state", f"{plural(pool.num_state_slots or 0, 'slot')}"] = states
    kv_bytes = pool.num_blocks * profile.plan.block_bytes
    found["K", "KV cache", pool.reason.partition(":")[0]] = kv_bytes
    found[" ", "left", ""] = terms.kv_cache - states - kv_bytes
    return [
        BarPart(mark, name, num_bytes, num_bytes / terms.total, note)
        for (mark, name, note), num_bytes in found.items()
        if num_bytes > 0
    ]


def memory_bar(parts: Sequence[BarPart], num_cells: int, device_bytes: int | None = None) -> str:
    """The parts in their order, each by its mark as often as it is large, and at least once; | where the device ends,
    if they are larger."""
    total = sum(part.num_bytes for part in parts)
    cells = [max(1, round(part.num_bytes / total * num_cells)) for part in parts]
    cells[cells.index(max(cells))] += num_cells - sum(cells)  # what rounding has changed
    bar = "".join(part.mark * count for part, count in zip(parts, cells, strict=True))
    if device_bytes is not None and device_bytes < total:
        end = round(device_bytes / total * num_cells)
        bar = f"{bar[:end]}|{bar[end + 1 :]}"
    return f"[{bar}]"


def _bar_table(profile: "Profile") -> Table:
    parts, plan = bar_parts(profile), profile.plan
    how = "as measured" if profile.terms.measured else "as predicted"
    num_ranks = profile.config.tensor_parallel_size
    ranks = f", each of {num_ranks} ranks" if num_ranks > 1 else ""
    title = f"Memory of {profile.config.model}{ranks}, {how}: {size(profile.terms.total)} of {profile.device}"
    largest = max(plan.limits.groups, key=lambda group: group.token_bytes or 0)
    notes = [f"bytes/block = {block_formula(largest, plan.limits.block_size, plan.kv_dtype)}"]
    return table(BarPart, "memory", title, parts, notes=notes)


def _answer(profile: "Profile", described: "Described | None") -> list[str]:
    """How many blocks fit, the tokens and the sequences of the model's length that they hold, or what would fit, and
    the bar."""
    pool, limits = profile.pool, profile.plan.limits
    bar = memory_bar(
        bar_parts(profile), max(len(_MARKS) + 3, min(_BAR_CELLS, get_terminal_size().columns - 2)), profile.terms.total
    )
    if not pool.num_blocks:
        none = f"No KV block fits: {size(max(0, profile.terms.kv_cache))} is left for the cache."
        would_fit = [] if described is None else _what_would_fit(profile, described)
        return [none, *would_fit, "", bar, *(["| is where the device ends"] if "|" in bar else [])]
    num_tokens, length = limits.tables.num_tokens(pool.num_blocks), limits.max_model_len
    text = (
        f"{plural(pool.num_blocks, 'KV block')} fit, {size(pool.num_blocks * profile.plan.block_bytes)}:"
        f" {plural(num_tokens, 'token')}, enough for {_at_once(profile, pool.num_blocks)}"
    )
    if not int(limits.tables.concurrency(pool.num_blocks, length)):
        longest = limits.tables.longest(pool.num_blocks, limits.chunk_size, length)
        text += f": the longest that fits has {plural(longest, 'token')}"
    if released := release_words(limits.tables, length):
        text += f". {capitalized(released)}"
    if (left := _left_setting(profile)) is not None:
        most = _all_blocks(profile)
        held = f"{_at_once(profile, most)}, in {plural(most, 'block')}"
        text += f". All the memory that is left would hold {held}: {left}"
    return [f"{text}.", "", bar]


def _what_would_fit(profile: "Profile", described: "Described") -> list[str]:
    """How many requests more of these GPUs would hold, and whether weights of 4 bits would fit into one, in a
    sentence."""
    from pagedcli.runner.memory_profile import profile_described

    found: list[str] = []
    for num_ranks in (2, 4, 8) if described.capability is not None else ():
        if num_ranks <= profile.config.tensor_parallel_size:
            continue
        with suppress(PagedcliError):  # the heads of the model cannot be divided so
            other = profile_described(
                msgspec.structs.replace(profile.config, tensor_parallel_size=num_ranks), described
            )
            limits = other.plan.limits
            held = int(limits.tables.concurrency(other.pool.num_blocks, limits.max_model_len))
            of = f" of {plural(limits.max_model_len, 'token')}" if not found else ""
            found += [f"{num_ranks}: {plural(held, 'request')}{of}" if of else f"{num_ranks}: {held:,}"] if held else []
    parts = [f"--tensor-parallel-size {'; '.join(found)}"] if found else []
    terms, weights = profile.terms, profile.terms.weights * _SHARE_IN_4_BITS
    if profile.plan.weights is None and profile.plan.dtype != "float32" and terms.kv_cache + terms.weights > weights:
        parts.append(f"a checkpoint in 4 bits, about {size(round(weights))} of weights")
    return [f"What would fit: {', or '.join(parts)}."] if parts else []


def _need(profile: "Profile", num_requests: int, need: "ServedNeed") -> str:
    """What so many of the longest requests need at once, in a sentence."""
    whole, cache, weights, total = map(
        size, (need.device_bytes, need.kv_cache_bytes, profile.terms.weights, profile.terms.total)
    )
    return (
        f"{plural(num_requests, 'request')} of {need.num_tokens:,} tokens at once need {whole}, with {cache} of KV"
        f" cache and {weights} of weights: {total} {'is' if need.fits else 'is not'} enough."
    )


def _at_once(profile: "Profile", num_blocks: int) -> str:
    """How many sequences of the model's length so many blocks hold, and what allows fewer to run."""
    limits = profile.plan.limits
    held = int(limits.tables.concurrency(num_blocks, limits.max_model_len))
    bounds = {"--max-num-seqs": profile.config.max_num_seqs, "--num-state-slots": profile.pool.num_state_slots}
    flag, most = min(((flag, most) for flag, most in bounds.items() if most is not None), key=lambda each: each[1])
    allowed = f" ({flag} allows {most:,})" if most < held else ""
    return f"{plural(held, 'sequence')} of {plural(limits.max_model_len, 'token')} at once{allowed}"


# ---------------------------------------------------------------------- where it goes


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """A term of the device's memory. Next to a measurement, only independent predictions are shown."""

    term: str
    name: Annotated[str, "memory"]
    measured_bytes: Annotated[Bytes | None, "measured"]
    predicted_bytes: Annotated[Bytes | None, "predicted"]
    difference: Annotated[Share | None, "off by"]  # ratio of both minus 1
    note: Annotated[str, "what it is"]

    @classmethod
    def of(cls, term: str, name: str, note: str, measured: int | None, predicted: int | None) -> "MemoryTerm":
        return cls(term, name, measured, predicted, predicted / measured - 1 if measured and predicted else None, note)


def waterfall_rows(terms: Terms, forecast: Terms | None, labels: Mapping[str, tuple[str, str]]) -> Iterator[MemoryTerm]:
    """One row per term that `labels` maps to its name and a note."""
    for term, label in labels.items():
        num_bytes = getattr(terms, term)
        if term in terms.measured or (term == "kv_cache" and terms.measured):
            is_predicted = forecast is not None and term in _PREDICTED
            yield MemoryTerm.of(term, *label, num_bytes, getattr(forecast, term) if is_predicted else None)
        else:
            yield MemoryTerm.of(term, *label, None, num_bytes)


def _labels(profile: "Profile") -> dict[str, tuple[str, str]]:
    terms, notes, plan = profile.terms, profile.notes, profile.plan
    step = plan.limits.largest_step
    shape = f"largest step: {plural(step.num_tokens, 'token')} in {plural(step.num_seqs, 'sequence')}"
    dtype = plan.dtype if plan.weights is None else f"{plan.weights}, embedding and norms {plan.dtype}"
    labels = {
        "total": ("total", profile.device),
        "reserve": ("- kept free", f"1 - gpu_memory_utilization {profile.config.gpu_memory_utilization}"),
        "others": ("- other processes", notes.get("others", "")),
        "runtime": ("- runtime", notes.get("runtime", "")),
        "weights": ("- weights", "; ".join(filter(None, (dtype, notes.get("weights"))))),
        "activations": ("- activation peak", "; ".join(filter(None, (shape, notes.get("activations"))))),
        "graphs": ("- CUDA graphs", notes.get("graphs", "")),
        "kv_cache": ("= room for KV", ""),
    }
    return {term: label for term, label in labels.items() if term not in ("reserve", "graphs") or getattr(terms, term)}


def _waterfall_table(profile: "Profile") -> Table:
    plan, pool, limits = profile.plan, profile.pool, profile.plan.limits
    rows = list(waterfall_rows(profile.terms, profile.forecast, _labels(profile)))
    is_measured = bool(profile.terms.measured)
    kept = {("pool", "KV cache", pool.reason.partition(":")[0]): pool.num_blocks * plan.block_bytes}
    if limits.has_states:
        note = f"{plural(pool.num_state_slots or 0, 'slot')}, for running sequences and checkpoints"
        kept["states", "recurrent state", note] = pool.state_bytes(limits)
    for label, num_bytes in kept.items():
        rows.append(MemoryTerm.of(*label, num_bytes if is_measured else None, None if is_measured else num_bytes))
    if (peak := profile.measured_loading) is not None:
        note = "peak of this process, including pages of the mapped checkpoint"
        rows.append(MemoryTerm.of("loading_peak", "while loading", note, peak, profile.predicted_loading))
    columns = "name predicted_bytes note"
    if is_measured:
        predicted = "predicted_bytes difference" if profile.forecast is not None else ""
        columns = f"name measured_bytes {predicted} note"
    num_slots = limits.tables.num_tokens(pool.num_blocks)
    in_windows = ", and more where windows release blocks" if limits.tables.has_windows else ""
    largest = max(limits.groups, key=lambda group: group.token_bytes or 0)
    notes = [
        f"bytes/block = {block_formula(largest, limits.block_size, plan.kv_dtype)}",
        f"{plural(pool.num_blocks, 'block')} of {size(plan.block_bytes)} = {plural(num_slots, 'token')}{in_windows}",
    ]
    if limits.has_states:
        num_tokens = limits.state_bytes * limits.block_size // (plan.block_bytes * len(limits.groups))
        notes += [
            f"a running sequence takes a slot of {size(limits.state_bytes)} of recurrent state, and so does each"
            f" checkpoint: as much as the K and V of {plural(num_tokens, 'token')}",
            "slots: --num-state-slots, by default 2 * max_num_seqs in at most half of the memory for the cache",
        ]
    num_ranks = profile.config.tensor_parallel_size
    title = f"Memory of {profile.config.model}" + (f", each of {num_ranks} ranks" if num_ranks > 1 else "")
    headers = {} if is_measured else {"predicted_bytes": "bytes"}
    return table(MemoryTerm, "waterfall", title, rows, columns, headers=headers, notes=notes)


def block_formula(group: CacheGroup, block_size: int, kv_dtype: str) -> str:
    """Bytes per block of a group that names its heads, with the numbers filled in."""
    assert group.heads is not None, "the group names its heads"
    num_kv_heads, head_dim = group.heads
    head = f"{head_dim} head_dim x {ITEMSIZE[kv_dtype]} bytes"
    if kv_dtype in SCALE_BYTES:
        head = f"({head} + {SCALE_BYTES[kv_dtype]} of scale)"
    kept, of_heads = "2 (K and V) x ", f"{num_kv_heads} kv_heads x {head}"
    if group.value_dim is not None:
        kept, of_heads = "", head.replace("head_dim", "latent per token and layer")
    layers = f"{kept}{plural(len(group.layers), 'layer')} x {plural(block_size, 'token')}"
    return f"{layers} x {of_heads} = {token_bytes(group, kv_dtype) * block_size:,}"


# ---------------------------------------------------------------------- how many requests


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Requests of a length that a pool serves at once."""

    at: Annotated[str, "requests of"]
    num_tokens: int
    num_blocks: int
    max_concurrency: Annotated[Whole, "requests at once"]
    max_concurrency_shared: Annotated[Whole, "requests that share"] | UnsetType = UNSET  # requests with a common prefix
    # in a pool of all that is left
    max_concurrency_left: Annotated[Whole, "requests in all that is left"] | UnsetType = UNSET


def concurrency_rows(
    lengths: Mapping[str, int],
    *,
    num_blocks: int,
    tables: TableShape,
    shared_tokens: int | None = None,
    num_left: int | None = None,
) -> Iterator[AtOnce]:
    """What a pool serves at each length. `num_left`: blocks of a pool that takes all memory left for the cache."""
    for name, length in lengths.items():
        shared, left = (
            UNSET
            if num_tokens is None or blocks is None
            else tables.concurrency(blocks, length, shared_tokens=num_tokens)
            for num_tokens, blocks in ((shared_tokens, num_blocks), (0, num_left))
        )
        plain = tables.concurrency(num_blocks, length)
        yield AtOnce(name, length, tables.most_blocks(length, 1), plain, shared, left)


def _all_blocks(profile: "Profile") -> int:
    """Blocks of a pool that takes all memory left for the cache."""
    room = profile.terms.kv_cache - profile.pool.state_bytes(profile.plan.limits)
    return max(0, room) // profile.plan.block_bytes


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
    num_blocks = profile.pool.num_blocks
    rows = concurrency_rows(
        lengths,
        num_blocks=num_blocks,
        tables=profile.plan.limits.tables,
        shared_tokens=shared,
        num_left=None if _left_setting(profile) is None else _all_blocks(profile),
    )
    longest = max(num_tokens for name, num_tokens in lengths.items() if len(lengths) == 1 or name != "model length")
    notes = [in_a_sentence(profile, longest)]
    columns = "at num_tokens num_blocks max_concurrency max_concurrency_left"
    if shared:
        columns = columns.replace("_left", "_shared max_concurrency_left")
        notes.append(f"at least half of the rows share their first {shared:,} tokens; only full blocks are shared")
    elif shared == 0:
        notes.append("no prefix is shared by half of the rows")
    notes.append(f"--max-num-seqs allows at most {profile.config.max_num_seqs:,} at once")
    if profile.pool.num_state_slots is not None:
        notes.append(f"slots of recurrent state allow at most {profile.pool.num_state_slots:,} at once")
    title = f"Requests that fit into the pool as configured, {plural(num_blocks, 'block')}"
    headers = {"max_concurrency_shared": f"requests sharing {plural(shared, 'token')}"} if shared else {}
    return table(AtOnce, "concurrency", title, rows, columns, headers=headers, notes=notes)


@dataclass(frozen=True, slots=True)
class Held:
    """What a sequence of a length holds in the groups of one kind of layers."""

    at: Annotated[str, "sequence of"]
    num_tokens: int
    window: Annotated[int | None, "window, tokens"]
    num_kv_heads: Annotated[int | None, "KV heads"]
    head_dim: Annotated[int | None, "numbers per head"]
    num_layers: int
    num_groups: int
    num_blocks: int  # while it generates
    num_prefill_blocks: Annotated[int, "blocks in prefill"]  # the most while its prompt is computed in chunks
    kv_cache_bytes: Annotated[Bytes, "KV cache"]
    unused_bytes: Annotated[Bytes, "unused"]
    one_table_bytes: Annotated[Bytes, "if kept"]  # bytes if no block were released before it ends


def group_rows(
    lengths: Mapping[str, int], *, groups: Sequence[CacheGroup], tables: TableShape, block_bytes: int, chunk: int
) -> Iterator[Held]:
    """What a sequence of each length holds, by kind of layers. The groups are sized."""
    for name, num_tokens in lengths.items():
        whole = blocks_for(num_tokens, tables.block_size)
        for window, heads in dict.fromkeys((group.window, group.heads) for group in groups):
            alike = {i: group for i, group in enumerate(groups) if (group.window, group.heads) == (window, heads)}
            held = {index: tables.most_in_group(index, num_tokens, 1) for index in alike}
            num_kv_heads, head_dim = heads or (None, None)
            num_blocks = sum(held.values())
            used = sum(held[index] * (group.used_bytes(tables.block_size) or 0) for index, group in alike.items())
            yield Held(
                name,
                num_tokens,
                window,
                num_kv_heads,
                head_dim,
                num_layers=sum(len(group.layers) for group in alike.values()),
                num_groups=len(alike),
                num_blocks=num_blocks,
                num_prefill_blocks=sum(tables.most_in_group(index, num_tokens, chunk) for index in alike),
                kv_cache_bytes=num_blocks * block_bytes,
                unused_bytes=num_blocks * block_bytes - used,
                one_table_bytes=whole * len(alike) * block_bytes,
            )


def _group_table(profile: "Profile", lengths: Mapping[str, int]) -> Table:
    limits, block_bytes = profile.plan.limits, profile.plan.block_bytes
    groups, tables = limits.groups, limits.tables
    rows = list(group_rows(lengths, groups=groups, tables=tables, block_bytes=block_bytes, chunk=limits.chunk_size))
    longest = [row for row in rows if row.num_tokens == limits.max_model_len]
    unused = sum(row.unused_bytes for row in longest) / sum(row.kv_cache_bytes for row in longest)
    notes = [
        f"a block holds {limits.block_size} tokens of the layers of a group; blocks: while it generates; in prefill: at"
        f" most, with chunks of {plural(limits.chunk_size, 'token')}",
        f"unused: what the layers leave of these blocks, {percent(unused)} of the KV cache of a sequence of"
        f" {plural(limits.max_model_len, 'token')}",
        "if kept: the same layers, if no block were released before the sequence ends",
        *group_lines(limits.groups, block_size=limits.block_size, block_bytes=block_bytes),
    ]
    if num_shared := sum(layer.source is not None for layer in profile.spec.attention_layers):
        notes.append(f"without blocks: {plural(num_shared, 'layer')} sharing the K and V of an earlier layer")
    return table(Held, "groups", "What one sequence holds, by window and heads", rows, notes=notes)


@dataclass(frozen=True, slots=True)
class ServedNeed:
    """What concurrent requests of a length need. Shared tokens count once."""

    at: Annotated[str, "requests of"]
    num_tokens: int
    num_blocks: int
    kv_cache_bytes: Annotated[Bytes, "KV cache"]  # recurrent state included
    device_bytes: Annotated[Bytes, "whole device"]
    utilization: Annotated[Share, "of this device"]  # a share; above 1: it is too small
    fits: bool


def target_rows(
    num_requests: int,
    lengths: Mapping[str, int],
    *,
    terms: Terms,
    tables: TableShape,
    block_bytes: int,
    shared_tokens: int = 0,
    state_bytes: int = 0,
) -> Iterator[ServedNeed]:
    """What num_requests concurrent requests need at each length."""
    spent = terms.used + terms.activations + terms.graphs
    for name, num_tokens in lengths.items():
        num_blocks = tables.blocks_for_requests(num_requests, num_tokens, shared_tokens=shared_tokens)
        kv_bytes = num_blocks * block_bytes + num_requests * state_bytes
        device_bytes, fits = spent + kv_bytes, kv_bytes <= terms.kv_cache
        yield ServedNeed(name, num_tokens, num_blocks, kv_bytes, device_bytes, device_bytes / terms.total, fits)


def _needs(profile: "Profile", num_requests: int, lengths: Mapping[str, int], shared: int) -> list[ServedNeed]:
    limits, block_bytes = profile.plan.limits, profile.plan.block_bytes
    each = {"block_bytes": block_bytes, "shared_tokens": shared, "state_bytes": limits.state_bytes}
    return list(target_rows(num_requests, lengths, terms=profile.terms, tables=limits.tables, **each))


# ---------------------------------------------------------------------- what else could be chosen


def _fit_table(profile: "Profile") -> Table:
    from pagedcli.planning.decision import Fit

    notes = [
        "for a pool of all memory that is left (--kv-cache-memory, by default the most on a GPU); as configured: with"
        " the weight format and KV dtype of this configuration",
        f"at model length: requests of {plural(profile.plan.limits.max_model_len, 'token')} at once",
    ]
    columns = "flags weights_bytes room_bytes token_bytes longest_request max_concurrency"
    title = "What fits into all that is left, by weight format and KV dtype"
    return table(Fit, "fits", title, profile.fits, columns, notes=notes)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What some memory holds at a KV dtype and block size, and how many requests of the model's length."""

    kv_dtype: Annotated[str, "KV dtype"]
    block_size: int
    block_bytes: Annotated[Bytes, "bytes/block"]
    num_kvcache_blocks: Annotated[int, "blocks"]
    num_kvcache_tokens: Annotated[int, "tokens"]
    max_concurrency: Annotated[Whole, "requests at model length"]


def size_rows(groups: Sequence[CacheGroup], kv_bytes: int, num_tokens: int) -> Iterator[PoolSize]:
    """What kv_bytes hold at every KV dtype and block size, and how many requests of num_tokens fit. The groups name
    their heads."""
    for dtype in KV_DTYPES:
        most = max(token_bytes(group, dtype) for group in groups)
        for block_size in BLOCK_SIZES:
            num_blocks = max(0, kv_bytes) // (most * block_size)
            tables = TableShape.of(block_size, groups)
            held, at_once = tables.num_tokens(num_blocks), tables.concurrency(num_blocks, num_tokens)
            yield PoolSize(dtype, block_size, most * block_size, num_blocks, held, at_once)


def _size_table(profile: "Profile") -> Table:
    pool_bytes = profile.pool.num_blocks * profile.plan.block_bytes
    rows = size_rows(profile.plan.limits.groups, pool_bytes, profile.plan.limits.max_model_len)
    notes = ["float16 equals bfloat16; --kv-cache-dtype supports the model's own dtype, fp8 on GPUs and int8 on CPUs"]
    title = f"The same {size(pool_bytes)} at other block sizes and KV dtypes"
    return table(PoolSize, "sizes", title, rows, notes=notes)


# ---------------------------------------------------------------------- the rest


def _facts(profile: "Profile", shared: int | None) -> dict[str, Any]:
    config, plan, pool, limits = profile.config, profile.plan, profile.pool, profile.plan.limits
    facts: dict[str, Any] = {
        "model": config.model,
        "device": profile.device,
        "dtype": plan.dtype,
        "quantization": config.quantization,
        "kv_dtype": plan.kv_dtype,
        "backend": plan.backend,
        "measured": bool(profile.terms.measured),
        "block_size": config.block_size,
        "block_bytes": plan.block_bytes,
        "num_kvcache_blocks": pool.num_blocks,
        "num_kvcache_blocks_reason": pool.reason,
        "num_kvcache_tokens": limits.tables.num_tokens(pool.num_blocks),
        "kv_cache_bytes": pool.num_blocks * plan.block_bytes,
        "max_model_len": limits.max_model_len,
        "activation_peak_tokens": limits.largest_step.num_tokens,
        "activation_peak_seqs": limits.largest_step.num_seqs,
    }
    if limits.has_states:
        facts |= {
            "num_state_slots": pool.num_state_slots,
            "state_slot_bytes": limits.state_bytes,
            "state_bytes": pool.state_bytes(limits),
            "checkpoints": limits.checkpoints,
        }
    facts |= {f"{name}_bytes": getattr(profile.terms, name) for name in TERMS}
    facts |= {"loading_peak_bytes": profile.measured_loading, "predicted_loading_peak_bytes": profile.predicted_loading}
    facts |= {"serves": in_a_sentence(profile, limits.max_model_len), "left_setting": _left_setting(profile)}
    return facts | {"room_bytes": profile.terms.kv_cache, "shared_prefix_tokens": shared}
