"""The groups of layers: what the layers of each take of a block, how many blocks they have, and the words for them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Annotated

from pagedcli.events import CacheGroup, EngineStarted
from pagedcli.printable import byte_text, id_ranges, plural
from pagedcli.records import Means, size
from pagedcli.trace.state import PoolState


@dataclass(frozen=True, slots=True)
class GroupUse:
    """A group of layers and its blocks. None: not known, as in simulations without a model."""

    group: Annotated[int, Means("number of the group of layers, from 0")]
    window: Annotated[
        int | None,
        "window, tokens",
        Means("tokens that a query sees in these layers, itself included; null: all before it"),
    ]
    layers: Annotated[list[int], id_ranges, Means("the layers, numbered from 0 among those that attend")]
    num_kv_heads: Annotated[int | None, "KV heads", Means("key/value heads of each layer")]
    head_dim: Annotated[int | None, "numbers per head", Means("size of a head")]
    used_bytes: Annotated[int | None, "of a block", byte_text, Means("bytes of a block that the layers take")]
    used_blocks: Annotated[int, "blocks in use", Means("blocks in use that hold K and V of these layers")]
    cached_blocks: Annotated[int, "cached blocks", Means("cached blocks that do")]
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


def group_lines(groups: Sequence[CacheGroup], *, block_size: int, block_bytes: int) -> Iterator[str]:
    """`groups 0-3: 4 layers each, window 512, 1 KV head of 256, 12.00 KiB of 16.00 KiB used`, those alike together."""
    for numbers in alike(groups):
        many = "s" if len(numbers) > 1 else ""
        shape = _shape_words(groups[numbers[0]], block_size=block_size, block_bytes=block_bytes, shown=size)
        yield f"group{many} {id_ranges(numbers)}: {', '.join([*layers_words(groups, numbers), *shape])}"


def alike(groups: Sequence[CacheGroup]) -> Iterable[list[int]]:
    """The numbers of the groups that have the same window, heads and number of layers."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, group in enumerate(groups):
        kinds.setdefault((group.window, group.heads, len(group.layers)), []).append(number)
    return kinds.values()


def layers_words(groups: Sequence[CacheGroup], numbers: Sequence[int]) -> list[str]:
    """How many layers each of these groups has, which are alike; nothing if it is not known."""
    num_layers = len(groups[numbers[0]].layers)
    return [f"{plural(num_layers, 'layer')}{' each' if len(numbers) > 1 else ''}"] if num_layers else []


def window_words(group: CacheGroup) -> str:
    """`window 512`."""
    return "no window" if group.window is None else f"window {group.window:,}"


def group_words(engine: EngineStarted, number: int) -> str:
    """`group 4: layers 1 7 13, window 512, 1 KV head of 256, 12.0 KiB of 16.0 KiB used`."""
    group = engine.groups[number]
    layers = [f"layer{'' if len(group.layers) == 1 else 's'} {id_ranges(group.layers)}"] if group.layers else []
    shape = _shape_words(group, block_size=engine.block_size, block_bytes=engine.block_bytes, shown=byte_text)
    return f"group {number}: {', '.join([*layers, *shape])}"


def _shape_words(
    group: CacheGroup, *, block_size: int, block_bytes: int, shown: Callable[[float], str]
) -> Iterator[str]:
    """What the layers have in common, as far as it is known, with bytes as they are shown around it."""
    yield window_words(group)
    if group.heads is not None and group.value_dim is not None:
        yield f"latent {group.heads[1]} per token and layer"
    elif group.heads is not None:
        yield f"{plural(group.heads[0], 'KV head')} of {group.heads[1]}"
    used_bytes = group.used_bytes(block_size)
    if used_bytes is not None:
        yield f"{shown(used_bytes)} of {shown(block_bytes)} used"
