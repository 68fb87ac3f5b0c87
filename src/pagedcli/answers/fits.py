"""Does it fit: how much memory a model takes, how many blocks are left, how many sequences these hold, what is missing.

Printed by `profile-memory`, `plan` and `doctor -m`. Computes from what planning decided and what was measured; runs and
prints nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from pagedcli import planning
from pagedcli.core.budget import ITEMSIZE, SCALE_BYTES, Terms, blocks_for
from pagedcli.core.groups import TableShape, token_bytes
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan, Pool
from pagedcli.errors import PagedcliError, address_space
from pagedcli.events import CacheGroup
from pagedcli.printable import byte_text, capitalized, id_ranges, percent_text, plural
from pagedcli.records import Bytes, Share, Whole, computed, size

NOT_PREDICTED = "transformers runs its layers; neither memory nor time is predicted"
_SHARE_IN_4_BITS = 0.3  # bytes of weights of 4 bits with their scales and an embedding of 16, over those of 16 bits


def _room(num_bytes: int) -> str:
    return size(num_bytes) if num_bytes >= 0 else f"{size(-num_bytes)} too few"


class Fit:
    """What a machine holds of a model in one weight format and KV dtype, predicted or measured. With tensor parallelism
    bytes are those of one rank. `left`: with a pool of all memory that is left for the cache."""

    flags: Annotated[str, "with"]  # what differs from the configuration
    model: str = computed(lambda fit: fit.plan.model)
    device: str
    dtype: str = computed(lambda fit: fit.plan.dtype)
    weight_format: str = computed(lambda fit: fit.plan.weights or fit.plan.dtype)
    kv_dtype: str = computed(lambda fit: fit.plan.kv_dtype)
    backend: str = computed(lambda fit: fit.plan.backend)
    measured: bool = computed(lambda fit: bool(fit.terms.measured))
    num_kvcache_blocks: int = computed(lambda fit: fit.pool.num_blocks)
    num_kvcache_blocks_reason: str = computed(lambda fit: fit.pool.reason)
    num_kvcache_tokens: int = computed(  # tokens that no window has passed
        lambda fit: fit.pool.num_blocks // fit.tables.num_groups * fit.tables.block_size
    )
    block_size: int = computed(lambda fit: fit.limits.block_size)  # tokens
    block_bytes: Bytes = computed(lambda fit: fit.plan.block_bytes)
    token_bytes: Annotated[Bytes, "KV per token"] = computed(lambda fit: fit.plan.token_bytes)  # until windows pass it
    kv_cache_bytes: Bytes = computed(lambda fit: fit.pool.num_blocks * fit.plan.block_bytes)
    max_model_len: Annotated[int, "model length, tokens"] = computed(lambda fit: fit.limits.max_model_len)
    # requests of max_model_len tokens at once, not rounded
    max_concurrency: Annotated[Whole, "requests in the pool"] = computed(lambda fit: fit.held(fit.pool.num_blocks))
    longest_request_tokens: int = computed(lambda fit: fit.longest(fit.pool.num_blocks))
    room_bytes: Annotated[int, "left for KV", _room] = computed(lambda fit: fit.terms.kv_cache)
    missing_bytes: int = computed(lambda fit: max(0, fit.plan.block_bytes - fit.terms.kv_cache))  # 0: a block fits
    num_blocks_left: int
    max_concurrency_left: Annotated[Whole, "requests at model length"] = computed(
        lambda fit: fit.held(fit.num_blocks_left)
    )
    longest_request_left_tokens: Annotated[int, "longest request, tokens"] = computed(
        lambda fit: fit.longest(fit.num_blocks_left)
    )
    left_setting: str | None  # the flag for a pool of all that is left; None: the pool takes it already
    num_state_slots: int | None = computed(lambda fit: fit.pool.num_state_slots)
    state_slot_bytes: Bytes = computed(lambda fit: fit.limits.state_bytes)
    state_bytes: Bytes = computed(lambda fit: fit.pool.state_bytes(fit.limits))
    activation_peak_tokens: int = computed(lambda fit: fit.limits.largest_step.num_tokens)
    activation_peak_seqs: Annotated[int, "largest step, sequences"] = computed(
        lambda fit: fit.limits.largest_step.num_seqs
    )
    total_bytes: Bytes = computed(lambda fit: fit.terms.total)
    weights_bytes: Annotated[Bytes, "weights"] = computed(lambda fit: fit.terms.weights)
    loading_peak_bytes: int | None  # measured peak of this process while loading; None: not on a CPU
    predicted_loading_peak_bytes: int | None

    def __init__(
        self,
        decision: "planning.decision.Decision",
        terms: Terms,
        pool: Pool,
        *,
        flags: str = "as configured",
        device: str | None = None,
        forecast: Terms | None = None,
        notes: Mapping[str, str] | None = None,
        known: Mapping[str, Any] | None = None,
        loading_peaks: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """`device`: name of a described one. `forecast`: predicted terms, next to measured ones. `notes`: term -> what
        is said of it. `known`: terms that hold for other formats of the model, too; None: others are not predicted."""
        self.decision, self.terms, self.pool, self.flags = decision, terms, pool, flags
        self.plan: Plan = decision.plan
        self.limits: Limits = decision.plan.limits
        self.tables: TableShape = decision.plan.limits.tables
        self.device = device or decision.plan.device
        self.forecast, self.notes, self.known = forecast, notes or {}, known
        self.loading_peak_bytes, self.predicted_loading_peak_bytes = loading_peaks
        states = pool.state_bytes(self.limits)
        self.num_blocks_left = max(0, terms.kv_cache - states) // self.plan.block_bytes
        hundredths = terms.kv_cache * 100 // 2**30
        is_more = (hundredths * 2**30 // 100 - states) // self.plan.block_bytes > pool.num_blocks
        self.left_setting = f"--kv-cache-memory {hundredths / 100:.2f}GiB" if is_more else None

    def held(self, num_blocks: int) -> float:
        """Sequences of the model's length that this number of blocks holds at once, not rounded."""
        return self.tables.concurrency(num_blocks, self.max_model_len)

    def longest(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that this number of blocks holds."""
        return self.tables.longest(num_blocks, self.limits.chunk_size, self.max_model_len)


def fits(decision: "planning.decision.Decision", *, flags: str = "as configured", **known: Any) -> Fit:
    """What the machine holds of a model, predicted; not for one that runs through transformers. `known`: terms that are
    not to be predicted."""
    terms = replace(decision.terms, **known)
    return Fit(decision, terms, decision.pool_within(terms), flags=flags, known=known)


# ---------------------------------------------------------------------- in words


def fit_in_words(fit: Fit) -> str:
    """`num_kvcache_blocks = 9,940 (17.0 GiB; 16 tokens, 1.75 MiB each): 3 sequences of 40,960 tokens at once.`"""
    num_blocks, length = fit.num_kvcache_blocks, plural(fit.max_model_len, "token")
    if not num_blocks:
        reason, missing = fit.num_kvcache_blocks_reason, fit.missing_bytes
        weights = f"weights take {size(fit.weights_bytes)} of {size(fit.total_bytes)}"
        return f"num_kvcache_blocks = 0: {f'{size(missing)} short, {weights}' if missing else reason}."
    blocks = f"{byte_text(fit.kv_cache_bytes)}; {plural(fit.block_size, 'token')}, {size(fit.block_bytes)} each"
    sequences = int(fit.max_concurrency)
    text = f"num_kvcache_blocks = {num_blocks:,} ({blocks}): {plural(sequences, 'sequence')} of {length} at once"
    if not sequences:
        return f"{text}, the longest that fits has {plural(fit.longest_request_tokens, 'token')}."
    bounds = {"--max-num-seqs": fit.limits.max_num_seqs, "--num-state-slots": fit.num_state_slots or sequences}
    flag = min(bounds, key=bounds.__getitem__)
    return f"{text} ({flag} allows {bounds[flag]:,})." if bounds[flag] < sequences else f"{text}."


def groups_and_states(fit: Fit) -> str | None:
    """What groups of layers, windows and recurrent states change, in a sentence; None: the model has none."""
    parts, num_groups = [], fit.tables.num_groups
    if num_groups > 1:
        tokens = plural(fit.num_kvcache_tokens, "token")
        parts.append(f"{num_groups} groups of layers share the blocks, which hold {tokens} in all of them")
    held, whole = fit.tables.most_blocks(fit.max_model_len, 1), fit.tables.num_entries(fit.max_model_len)
    if held < whole:
        share, length = percent_text(1 - held / whole), f"{fit.max_model_len:,} tokens"
        parts.append(
            f"windows release {share} of the blocks of a sequence of {length}, which holds {held:,} instead of"
            f" {whole:,}"
        )
    if fit.limits.has_states:
        slots = f"{plural(fit.num_state_slots or 0, 'slot')} of {size(fit.state_slot_bytes)}"
        parts.append(f"{slots} hold recurrent state, one for each running sequence and each snapshot")
    return f"{capitalized('; '.join(parts))}." if parts else None


def left_in_words(fit: Fit) -> str | None:
    """What a pool of all memory that is left would hold; None: the pool takes it, or there is none."""
    if fit.left_setting is None or not fit.num_kvcache_blocks:
        return None
    more = f"{plural(fit.num_blocks_left, 'block')}, {plural(int(fit.max_concurrency_left), 'sequence')} at once"
    return f"{fit.left_setting} uses all the memory that is left: {more}."


def would_fit(fit: Fit) -> str:
    """What to change so that a model fits that does not: its format, more of these GPUs, or a checkpoint in 4 bits."""
    parts, ranks, formats = [], list[str](), other_formats(fit)
    weights = fit.weights_bytes * _SHARE_IN_4_BITS
    if (other := next((each for each in formats if each.num_kvcache_blocks), None)) is not None:
        tokens = plural(other.num_kvcache_tokens, "token")
        parts.append(f"{other.flags}, with {size(other.weights_bytes)} of weights and room for {tokens}")
    elif fit.plan.weights is None and fit.dtype != "float32" and fit.room_bytes + fit.weights_bytes > weights:
        parts.append(f"a checkpoint in 4 bits, about {size(round(weights))} of weights")
    for num_ranks, more in _on_more_gpus(fit):
        if sequences := int(more.max_concurrency):
            of = "" if ranks else f" of {plural(fit.max_model_len, 'token')}"
            ranks.append(f"{num_ranks}: {plural(sequences, 'sequence')}{of}")
    if ranks:
        parts.append(f"--tensor-parallel-size {'; '.join(ranks)}")
    if parts:
        return f"what would fit: {', or '.join(parts)}"
    smallest = min((fit, *formats), key=lambda each: each.weights_bytes)
    hint = f"nothing fits: even {smallest.weight_format} weights take {size(smallest.weights_bytes)}"
    if fit.decision.machine.is_here and (space := address_space()) is not None:
        hint += f"; ulimit -v {size(space[0])} leaves {size(space[1])} of address space: raise it"
    return hint


# ---------------------------------------------------------------------- what else could be chosen


def other_formats(fit: Fit) -> list[Fit]:
    """The other weight formats and KV dtypes that run on the machine, the largest first."""
    if fit.known is None:
        return []
    found = {(fit.weight_format, fit.kv_dtype): fit}
    for flags, decision in planning.decide.formats_of(fit.decision):
        other = fits(decision, flags=flags, **fit.known)
        found.setdefault((other.weight_format, other.kv_dtype), other)
    return sorted(list(found.values())[1:], key=lambda each: (-each.weights_bytes, -each.token_bytes))


def _on_more_gpus(fit: Fit) -> Iterator[tuple[int, Fit]]:
    """The model over 2, 4 and 8 of its GPU, as far as its heads can be divided."""
    config, machine = fit.decision.config, fit.decision.machine
    gpu = machine.gpu(fit.plan.device)
    if gpu is None or fit.known is None:
        return
    for num_ranks in (2, 4, 8):
        if num_ranks > config.tensor_parallel_size:
            parallel = msgspec.structs.replace(config, tensor_parallel_size=num_ranks, device="cuda:0")
            gpus = replace(machine, gpus=(gpu,) * num_ranks, is_here=False)
            with suppress(PagedcliError):
                yield num_ranks, fits(planning.decide.decide(parallel, fit.decision.spec, gpus), **fit.known)


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


def waterfall(fit: Fit) -> Iterator[MemoryTerm]:
    """From the device's memory to the room for the cache, and what the pool takes of it."""

    def row(term: str, name: str, note: str, measured: int | None, predicted: int | None) -> MemoryTerm:
        off = predicted / measured - 1 if measured and predicted else None
        return MemoryTerm(term, name, measured, predicted, off, note)

    terms, notes, step = fit.terms, fit.notes, fit.limits.largest_step
    shape = f"largest step: {plural(step.num_tokens, 'token')} in {plural(step.num_seqs, 'sequence')}"
    dtype = fit.dtype if fit.plan.weights is None else f"{fit.plan.weights}, embedding and norms {fit.dtype}"
    for term, name, said in (
        ("total", "total", fit.device),
        ("reserve", "- kept free", f"1 - gpu_memory_utilization {fit.decision.config.gpu_memory_utilization}"),
        ("others", "- other processes", ""),
        ("runtime", "- runtime", ""),
        ("weights", "- weights", dtype),
        ("activations", "- activation peak", shape),
        ("graphs", "- CUDA graphs", ""),
        ("kv_cache", "= room for KV", ""),
    ):
        num_bytes, note = getattr(terms, term), "; ".join(filter(None, (said, notes.get(term))))
        if not num_bytes and term in ("reserve", "graphs"):
            continue
        if term in terms.measured or (term == "kv_cache" and fit.measured):
            # the other terms do not follow from the model's sizes
            is_predicted = fit.forecast is not None and term in ("weights", "activations", "kv_cache")
            yield row(term, name, note, num_bytes, getattr(fit.forecast, term) if is_predicted else None)
        else:
            yield row(term, name, note, None, num_bytes)
    kept = [("pool", "KV cache", fit.num_kvcache_blocks_reason.partition(":")[0], fit.kv_cache_bytes)]
    if fit.limits.has_states:
        slots = f"{plural(fit.num_state_slots or 0, 'slot')}, --num-state-slots: by default 2 * max_num_seqs in at most"
        kept.append(("states", "recurrent state", f"{slots} half of the memory for the cache", fit.state_bytes))
    for term, name, note, num_bytes in kept:
        yield row(term, name, note, *((num_bytes, None) if fit.measured else (None, num_bytes)))
    if (peak := fit.loading_peak_bytes) is not None:
        note = "peak of this process, including pages of the mapped checkpoint"
        yield row("loading_peak", "while loading", note, peak, fit.predicted_loading_peak_bytes)


def budget_formula(fit: Fit) -> str:
    """nano-vllm's budget for the cache, with the numbers filled in."""
    terms, share = fit.terms, fit.decision.config.gpu_memory_utilization
    total = ("total x utilization", f"{size(terms.total)} x {share}") if terms.reserve else ("total", size(terms.total))
    graphs = (" - graphs", f" - {size(terms.graphs)}") if terms.graphs else ("", "")
    words = f"{total[0]} - used - (peak - current){graphs[0]}"
    return f"{words} = {total[1]} - {size(terms.used)} - {size(terms.activations)}{graphs[1]} = {size(terms.kv_cache)}"


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


def cache_shape(fit: Fit, group: CacheGroup) -> tuple[int, ...]:
    """[2, L, N, S, G, D] of the cache tensor as a group of layers sees it: K and V, its layers, blocks, tokens of a
    block, KV heads, their size. The first is 1 where V is a part of K. Backends order the elements of a block as they
    like."""
    assert group.heads is not None, "the group names its heads"
    kept = 2 if group.value_dim is None else 1
    return (kept, len(group.layers), fit.num_kvcache_blocks, fit.block_size, *group.heads)


def cache_tensors(fit: Fit) -> Iterator[str]:
    """The dimensions of the cache tensor in words; one text for each shape in which groups of layers see it."""
    shapes = dict[tuple[int, ...], list[int]]()
    for number, group in enumerate(fit.limits.groups):
        shapes.setdefault(cache_shape(fit, group), []).append(number)
    for (kept, *sizes), numbers in shapes.items():
        of = f" for group{'s' if len(numbers) > 1 else ''} {id_ranges(numbers)}" if len(shapes) > 1 else ""
        words = zip(sizes, ("layer", "block", "token", "KV head", "dim"), strict=True)
        parts = [f"{kept} ({'K, V' if kept > 1 else 'K, V in it'})", *(plural(count, word) for count, word in words)]
        yield f"KV cache tensor{of}: {' x '.join(parts)}, {fit.kv_dtype}"


def largest_group(fit: Fit) -> CacheGroup:
    """The group of layers that sets the bytes of a block."""
    return max(fit.limits.groups, key=lambda group: group.token_bytes or 0)


# ---------------------------------------------------------------------- requests of other lengths


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Requests of a length that a pool serves at once."""

    at: Annotated[str, "requests of"]
    num_tokens: int
    num_blocks: int
    max_concurrency: Annotated[Whole, "requests at once"]
    max_concurrency_shared: Annotated[Whole, "requests that share"] | UnsetType = UNSET  # requests with a common prefix
    # requests at once in a pool of all that is left
    max_concurrency_left: Annotated[Whole, "requests in all that is left"] | UnsetType = UNSET


def concurrency_rows(fit: Fit, lengths: Mapping[str, int], shared_tokens: int | None) -> Iterator[AtOnce]:
    """What the pool serves at each length. `shared_tokens`: tokens that all requests share; None: not known."""
    tables, num_blocks = fit.tables, fit.num_kvcache_blocks
    for name, length in lengths.items():
        yield AtOnce(
            name,
            length,
            tables.most_blocks(length, 1),
            tables.concurrency(num_blocks, length),
            UNSET if shared_tokens is None else tables.concurrency(num_blocks, length, shared_tokens=shared_tokens),
            UNSET if fit.num_blocks_left <= num_blocks else tables.concurrency(fit.num_blocks_left, length),
        )


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
    fit: Fit, num_requests: int, lengths: Mapping[str, int], shared_tokens: int = 0
) -> Iterator[ServedNeed]:
    """What num_requests concurrent requests need at each length."""
    terms = fit.terms
    for name, num_tokens in lengths.items():
        num_blocks = fit.tables.blocks_for_requests(num_requests, num_tokens, shared_tokens=shared_tokens)
        kv_bytes = num_blocks * fit.block_bytes + num_requests * fit.state_slot_bytes
        device_bytes = terms.used + terms.activations + terms.graphs + kv_bytes
        share, is_enough = device_bytes / terms.total, kv_bytes <= terms.kv_cache
        yield ServedNeed(name, num_tokens, num_blocks, kv_bytes, device_bytes, share, is_enough)


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


def group_rows(lengths: Mapping[str, int], limits: Limits, block_bytes: int) -> Iterator[Held]:
    """What a sequence of each length holds, by kind of layers. The groups are sized."""
    tables = limits.tables
    for name, num_tokens in lengths.items():
        for window, heads in dict.fromkeys((group.window, group.heads) for group in limits.groups):
            alike = {
                i: group for i, group in enumerate(limits.groups) if (group.window, group.heads) == (window, heads)
            }
            held = {index: tables.most_in_group(index, num_tokens, 1) for index in alike}
            num_blocks, (num_kv_heads, head_dim) = sum(held.values()), heads or (None, None)
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
                num_prefill_blocks=sum(tables.most_in_group(index, num_tokens, limits.chunk_size) for index in alike),
                kv_cache_bytes=num_blocks * block_bytes,
                unused_bytes=num_blocks * block_bytes - used,
                one_table_bytes=blocks_for(num_tokens, tables.block_size) * len(alike) * block_bytes,
            )
