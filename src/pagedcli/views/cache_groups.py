"""The groups of layers of a moment: what the layers of each take of a block, and how many blocks they have."""

from collections import Counter
from dataclasses import dataclass
from itertools import compress
from typing import Annotated

from pagedcli.printable import byte_text, id_ranges
from pagedcli.records import Means
from pagedcli.trace.state import PoolState


@dataclass(frozen=True, slots=True)
class GroupUse:
    """A group of layers and its blocks. None: not known, as in simulations without a model."""

    group: Annotated[int, Means("number of the group of layers, from 0")]
    window: Annotated[
        int | None, Means("tokens that a query sees in these layers, itself included; null: all before it")
    ]
    layers: Annotated[list[int], id_ranges, Means("the layers, numbered from 0 among those that attend")]
    num_kv_heads: Annotated[int | None, "KV heads", Means("key/value heads of each layer")]
    head_dim: Annotated[int | None, "of size", Means("size of a head")]
    used_bytes: Annotated[int | None, "of a block", byte_text, Means("bytes of a block that the layers take")]
    used_blocks: Annotated[int, "in use", Means("blocks in use that hold K and V of these layers")]
    cached_blocks: Annotated[int, "cached", Means("cached blocks that do")]
    unused_bytes: Annotated[int | None, "unused", byte_text, Means("bytes of the blocks in use that the layers leave")]


def group_uses(state: PoolState) -> list[GroupUse]:
    """The groups in order. The blocks of all of them are those of the pool in use, and the cached ones."""
    engine, of_block, hashes = state.started, state.block_groups, state.hashes
    num_used = Counter(compress(of_block, state.ref_counts))
    num_cached = Counter(of_block[block_id] for block_id in state.free_block_ids if hashes[block_id] is not None)
    found = []
    for number, group in enumerate(engine.groups):
        used_bytes, (num_kv_heads, head_dim) = group.used_bytes(engine.block_size), group.heads or (None, None)
        found.append(
            GroupUse(
                group=number,
                window=group.window,
                layers=list(group.layers),
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                used_bytes=used_bytes,
                used_blocks=num_used[number],
                cached_blocks=num_cached[number],
                unused_bytes=None if used_bytes is None else num_used[number] * (engine.block_bytes - used_bytes),
            )
        )
    return found


def group_of(state: PoolState, block_id: int) -> int | None:
    """The group whose K and V a block holds; None: it is empty."""
    is_empty = not state.ref_counts[block_id] and state.hashes[block_id] is None
    return None if is_empty else state.block_groups[block_id]
