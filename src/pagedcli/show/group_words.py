"""The groups of layers in words and as a table: for a block, the pool of a step, profile-memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from pagedcli.events import CacheGroup, EngineStarted
from pagedcli.printable import byte_text, id_ranges, plural
from pagedcli.records import size
from pagedcli.show.tables import Table, table
from pagedcli.trace.state import PoolState
from pagedcli.views.cache_groups import GroupUse, group_of, group_uses


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


def block_group_words(state: PoolState, block_id: int) -> str | None:
    """group_words of what a block holds; None: it is empty."""
    number = group_of(state, block_id)
    return None if number is None else group_words(state.started, number)


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
    if group.heads is not None:
        yield f"{plural(group.heads[0], 'KV head')} of {group.heads[1]}"
    used_bytes = group.used_bytes(block_size)
    if used_bytes is not None:
        yield f"{shown(used_bytes)} of {shown(block_bytes)} used"


def group_table(state: PoolState) -> Table:
    """What each group takes of a block, and its blocks; no rows if there is one, as all blocks are alike."""
    uses = group_uses(state)
    columns = "group window num_kv_heads head_dim used_bytes used_blocks cached_blocks unused_bytes layers"
    return table(GroupUse, "groups", "Groups of layers", uses if len(uses) > 1 else [], columns)
