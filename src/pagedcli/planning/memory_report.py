"""Memory reports: where it goes, how many blocks fit, how many requests they serve, and what N requests need.

Used by `pagedcli profile-memory` and `pagedcli plan`. Only arithmetic on measured or predicted numbers; rows have
plain keys, bytes and ratios.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from pagedcli.core.budget import ITEMSIZE, SCALE_BYTES, MemoryTerms, ModelSizes, blocks_for
from pagedcli.core.groups import CacheGroup, TableShape, group_size

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)  # tokens
KV_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")  # float16 equals bfloat16
Row = dict[str, Any]
_PREDICTED = ("weights", "activations", "kv_cache")  # the other terms do not follow from the model's sizes


def waterfall_rows(
    measured: MemoryTerms | None, predicted: MemoryTerms | None, labels: Mapping[str, tuple[str, str]]
) -> Iterator[Row]:
    """One row per term and the remainder. `labels` maps a term to its name and a note; terms without one are left out.

    Next to a measurement, only independent predictions are shown; `difference` is the ratio of both minus 1.
    """
    for term in [*(field.name for field in fields(MemoryTerms)), "kv_cache"]:
        if term not in labels:
            continue
        measured_bytes = None if measured is None else getattr(measured, term)
        is_given = measured is not None and term not in _PREDICTED
        predicted_bytes = None if predicted is None or is_given else getattr(predicted, term)
        name, note = labels[term]
        yield {
            "term": term,
            "name": name,
            "measured_bytes": measured_bytes,
            "predicted_bytes": predicted_bytes,
            "difference": predicted_bytes / measured_bytes - 1 if measured_bytes and predicted_bytes else None,
            "note": note,
        }


def block_formula(sizes: ModelSizes, block_size: int, kv_dtype: str, num_layers: int | None = None) -> str:
    """Bytes per block, of all layers or of so many, with the numbers filled in."""
    head = f"{sizes.head_dim} head_dim x {ITEMSIZE[kv_dtype]} bytes"
    if kv_dtype in SCALE_BYTES:
        head = f"({head} + {SCALE_BYTES[kv_dtype]} of scale)"
    return (
        f"2 (K and V) x {num_layers or sizes.num_layers} layers x {block_size} tokens x {sizes.num_kv_heads} kv_heads"
        f" x {head} = {sizes.block_bytes(block_size, kv_dtype, num_layers):,}"
    )


def size_rows(
    sizes: ModelSizes, kv_bytes: int, num_tokens: int, *, groups: Sequence[CacheGroup] | None = None
) -> Iterator[Row]:
    """What kv_bytes hold at every KV dtype and block size, and how many requests of num_tokens fit."""
    groups = groups or (CacheGroup(None, tuple(range(sizes.num_layers))),)
    for dtype in KV_DTYPES:
        for block_size in BLOCK_SIZES:
            block_bytes = sizes.block_bytes(block_size, dtype, group_size(groups))
            num_blocks = max(0, kv_bytes) // block_bytes
            yield {
                "kv_dtype": dtype,
                "block_size": block_size,
                "block_bytes": block_bytes,
                "num_kvcache_blocks": num_blocks,
                "num_kvcache_tokens": num_blocks // len(groups) * block_size,
                "max_concurrency": TableShape.of(block_size, groups).concurrency(num_blocks, num_tokens),
            }


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


def group_rows(
    lengths: Mapping[str, int], *, groups: Sequence[CacheGroup], tables: TableShape, block_bytes: int, chunk: int
) -> Iterator[Row]:
    """What a sequence of each length holds in the groups of each window while it generates, at most while its prompt is
    computed in chunks, and if no block were released before it ends."""
    for name, num_tokens in lengths.items():
        whole = blocks_for(num_tokens, tables.block_size)
        for window in dict.fromkeys(tables.windows):
            alike = [index for index, group in enumerate(groups) if group.window == window]
            num_blocks = sum(tables.most_in_group(index, num_tokens, 1) for index in alike)
            yield {
                "at": name,
                "num_tokens": num_tokens,
                "window": window,
                "num_layers": sum(len(groups[index].layers) for index in alike),
                "num_groups": len(alike),
                "num_blocks": num_blocks,
                "num_prefill_blocks": sum(tables.most_in_group(index, num_tokens, chunk) for index in alike),
                "kv_cache_bytes": num_blocks * block_bytes,
                "one_table_bytes": whole * len(alike) * block_bytes,
            }


def target_rows(
    num_requests: int,
    lengths: Mapping[str, int],
    *,
    terms: MemoryTerms,
    tables: TableShape,
    block_bytes: int,
    shared_tokens: int = 0,
) -> Iterator[Row]:
    """What num_requests concurrent requests need at each length: blocks, KV bytes, and the utilization of this device
    (above 1: too small). Shared tokens count once."""
    spent = terms.total - terms.reserve - terms.kv_cache
    for name, num_tokens in lengths.items():
        num_blocks = tables.blocks_for_requests(num_requests, num_tokens, shared_tokens=shared_tokens)
        kv_bytes = num_blocks * block_bytes
        yield {
            "at": name,
            "num_tokens": num_tokens,
            "num_blocks": num_blocks,
            "kv_cache_bytes": kv_bytes,
            "device_bytes": spent + kv_bytes,
            "utilization": (spent + kv_bytes) / terms.total,
            "fits": kv_bytes <= terms.kv_cache,
        }


def missing_memory(terms: MemoryTerms, block_bytes: int, holders: str = "") -> tuple[str, str] | None:
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


def _remedy(terms: MemoryTerms, missing: int, largest: str) -> str:
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
