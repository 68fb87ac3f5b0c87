"""Groups of layers that share blocks, and how many blocks a sequence holds in each: arithmetic only.

Layers with the same window, and as many key/value heads of the same size, form groups of about equal bytes, so that a
block of any group takes the same memory and all groups share one pool. A *span* is block_size consecutive tokens of a
sequence; it has one block per group. A block table lists them span by span: entry `span * num_groups + group`. With one
group that is an ordinary block table. A block that no later token sees is released, and its entry becomes None.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from pagedcli.core.budget import block_bytes, blocks_for
from pagedcli.events import CacheGroup

HeadShape = tuple[int, int]  # G key/value heads of D elements


def cache_groups(
    windows: Sequence[int | None], heads: Sequence[HeadShape | None] = (), keeps: Sequence[bool] = ()
) -> tuple[CacheGroup, ...]:
    """The groups of a model whose layers have these windows and heads, those that see everything last; their bytes are
    not known yet. `keeps`: whether each layer has K and V of its own; by default all have.

    Layers of one kind have window and heads in common. A block has room for the kind that takes least, or for the
    largest if they are about equal: few groups keep tables short, small ones leave little of a block unused. It holds
    whole layers of every kind.
    """
    kinds = dict(enumerate(zip(windows, heads or [None] * len(windows), strict=True)))
    kinds = {i: kind for i, kind in kinds.items() if not keeps or keeps[i]}
    counts = Counter(kinds.values())
    totals = [count * _elements(kind[1]) for kind, count in counts.items()]
    largest_layer = max(_elements(heads) for _, heads in counts)
    least, most = min(totals), max(totals)
    # of a block, in elements of a token's K; at least a whole layer of every kind
    room = most if most < 1.25 * least else blocks_for(least, largest_layer) * largest_layer
    groups = []
    for window, of_layer in sorted(counts, key=_order):
        layers = [i for i, kind in kinds.items() if kind == (window, of_layer)]
        num_groups = blocks_for(len(layers), room // _elements(of_layer))
        groups += [CacheGroup(window, tuple(layers[i::num_groups]), of_layer) for i in range(num_groups)]
    return tuple(groups)


def _elements(heads: HeadShape | None) -> int:
    """Elements of a token's K in a layer; 1 where all layers have the same."""
    return 1 if heads is None else heads[0] * heads[1]


def _order(kind: tuple[int | None, HeadShape | None]) -> tuple[float, HeadShape]:
    window, heads = kind
    return float("inf") if window is None else window, heads or (0, 0)


def sized(groups: Sequence[CacheGroup], *, heads: HeadShape, kv_dtype: str) -> tuple[CacheGroup, ...]:
    """The groups with their bytes. `heads`: of the groups that name none."""
    named = [group if group.heads else replace(group, heads=heads) for group in groups]
    return tuple(replace(group, token_bytes=token_bytes(group, kv_dtype)) for group in named)


def token_bytes(group: CacheGroup, kv_dtype: str) -> int:
    """Bytes of a token's K and V in all layers of a group that names its heads."""
    assert group.heads is not None, "the group names its heads"
    num_kv_heads, head_dim = group.heads
    of_both = block_bytes(
        num_layers=len(group.layers), block_size=1, num_kv_heads=num_kv_heads, head_dim=head_dim, kv_dtype=kv_dtype
    )
    return of_both if group.value_dim is None else of_both // 2


def page_bytes(groups: Sequence[CacheGroup], block_size: int) -> int:
    """Bytes of a block: the most that one of these sized groups takes."""
    return max(group.used_bytes(block_size) or 0 for group in groups)


@dataclass(frozen=True, slots=True)
class TableShape:
    """The block tables of a model: what they hold of a sequence, and how much."""

    block_size: int  # tokens
    windows: tuple[int | None, ...] = (None,)  # one per group

    @classmethod
    def of(cls, block_size: int, groups: Sequence[CacheGroup]) -> "TableShape":
        return cls(block_size, tuple(group.window for group in groups))

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        return self.windows.count(None) < len(self.windows)

    def num_entries(self, num_tokens: int) -> int:
        """Entries in the block table of a sequence of this length, released ones included."""
        return blocks_for(num_tokens, self.block_size) * self.num_groups

    def first_kept(self, group: int, num_computed: int) -> int:
        """The first span whose block the tokens from number num_computed on need. The span before the current one is
        always kept: its hash is part of the next."""
        window = self.windows[group]
        if window is None:
            return 0
        return max(0, num_computed + 1 - self._reach(window)) // self.block_size

    def most_in_group(self, group: int, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence holds in a group at once while it grows to so many tokens, at most `chunk` per
        step."""
        whole, window = blocks_for(num_tokens, self.block_size), self.windows[group]
        return whole if window is None else min(whole, self._most_in_window(window, chunk))

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """most_in_group of all groups together."""
        if not self.has_windows:  # as for nearly every model, and each row asks
            return blocks_for(num_tokens, self.block_size) * self.num_groups
        return sum(self.most_in_group(group, num_tokens, chunk) for group in range(self.num_groups))

    def most_in_windows(self, chunk: int) -> int:
        """Most blocks that a sequence of any length holds at once in the groups with a window."""
        return sum(self._most_in_window(window, chunk) for window in self.windows if window is not None)

    def blocks_of_request(
        self, num_prompt: int, num_tokens: int, num_seqs: int, *, chunk: int, shares_prompt: bool = True
    ) -> int:
        """Most blocks that the sequences of a request hold at once while each grows to num_tokens. Several sequences
        share the full blocks of their prompt, to their end in layers without a window, if prefixes are cached."""
        num_shared = self.prompt_blocks(num_prompt) if shares_prompt else 0
        return num_seqs * self.most_blocks(num_tokens, chunk) - (num_seqs - 1) * num_shared

    def prompt_blocks(self, num_prompt: int) -> int:
        """Full blocks of a prompt in layers without a window."""
        return num_prompt // self.block_size * self.windows.count(None)

    def concurrency(self, num_blocks: int, num_tokens: int, *, shared_tokens: int = 0) -> float:
        """Requests that generate up to num_tokens tokens each and fit into a pool at once, if all share their first
        shared_tokens tokens.

        Only whole blocks are shared, so shared_tokens counts rounded down to blocks; what windows show is counted as if
        nothing of it were shared. Not rounded: 4.61 is four requests and 61 % of the blocks of a fifth. Without sharing
        it is vLLM's "maximum concurrency".
        """
        shared = self._num_shared(num_tokens, shared_tokens)
        return max(0.0, (num_blocks - shared) / (self.most_blocks(num_tokens, 1) - shared))

    def blocks_for_requests(self, num_requests: int, num_tokens: int, *, shared_tokens: int = 0) -> int:
        """The inverse of concurrency: blocks that num_requests such requests need at once."""
        shared = self._num_shared(num_tokens, shared_tokens)
        return shared + num_requests * (self.most_blocks(num_tokens, 1) - shared)

    def _num_shared(self, num_tokens: int, shared_tokens: int) -> int:
        return self.prompt_blocks(min(shared_tokens, num_tokens - 1))

    def longest(self, num_blocks: int, chunk: int, limit: int) -> int:
        """Most tokens, up to `limit`, of a sequence that never holds more than this number of blocks."""
        return _longest(self, num_blocks, chunk, limit)

    def _most_in_window(self, window: int, chunk: int) -> int:
        return (self._reach(window) + chunk - 3) // self.block_size + 2

    def _reach(self, window: int) -> int:
        """Tokens before and including the current one whose blocks are kept."""
        return max(window, self.block_size + 1)


@lru_cache(maxsize=64)  # the same for every row of a run
def _longest(tables: TableShape, num_blocks: int, chunk: int, limit: int) -> int:
    low, high = 0, blocks_for(limit, tables.block_size)  # spans
    while low < high:
        middle = (low + high + 1) // 2
        fits = tables.most_blocks(middle * tables.block_size, chunk) <= num_blocks
        low, high = (middle, high) if fits else (low, middle - 1)
    return min(limit, low * tables.block_size)
