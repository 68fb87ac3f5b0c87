"""The blocks of a pool: their ref counts, the prefix index, and the free list.

The part of BlockManager below sequences; needs no torch. A block is *partial* (being filled, no hash) or *full*
(hashed, shareable), and *free* exactly when its ref_count is 0. Free and still cached at once is normal.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

from pagedcli.core.eviction import EvictionPolicy, make_policy
from pagedcli.core.groups import TableShape
from pagedcli.core.prefixes import TOKEN_BYTES, Prefix, token_bytes
from pagedcli.events import BlockEvicted, Emit, Eviction


class CacheUser(Protocol):
    """What the block manager needs of a sequence. It changes block_table, prefixes, num_cached_tokens, writable_until
    and num_computed_tokens (in allocate), and only reads the rest."""

    seq_id: int
    token_ids: list[int]
    block_table: list[int | None]  # None: released, as no later token sees it
    prefixes: list[Prefix]  # of the full blocks hashed so far
    cache_salt: str | None
    num_computed_tokens: int  # leading tokens that need no more computing
    num_cached_tokens: int  # leading tokens whose K and V were found in the cache
    writable_until: int  # computing a token before this one takes no block and no copy; 0 where that is unknown
    num_preemptions: int


class Block:
    """A physical slot of S tokens."""

    __slots__ = ("block_id", "prefix", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.prefix: Prefix | None = None  # None while partial or empty

    @property
    def hash(self) -> int | None:
        """Chain hash of a full block, None while partial or empty."""
        return None if self.prefix is None else self.prefix.hash

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of a full block, empty while partial or empty."""
        return () if self.prefix is None else self.prefix.token_ids


class BlockPool:
    """Owns all blocks, the map from hash to block, the free list and the used set.

    The free list has empty blocks first, then cached ones, least recently used first. A fresh block is its first one;
    but a policy other than lru chooses among the cached ones itself.
    Every operation is O(1) per block with lru. `emit` receives an event after each eviction; with None no event is
    built.
    """

    def __init__(self, num_blocks: int, shape: TableShape, *, eviction: Eviction, emit: Emit | None) -> None:
        block_size = shape.block_size
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.shape = shape
        self.block_size = block_size
        self.num_groups = shape.num_groups
        self.has_windows = shape.has_windows
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.used_block_ids: set[int] = set()
        self._policy: EvictionPolicy | None = make_policy(eviction)  # None: lru
        self.num_evictions = 0
        self._emit = emit
        # full blocks by the hash of their predecessor; kept only for the partial_tokens of events
        self._followers: dict[int | None, dict[int, None]] = {}
        # blocks marked full in this step and in unread steps before it: perhaps not written yet
        self._filled_now: list[int] = []
        self._filled_before: list[int] = []
        self._unknown: list[CacheUser] = []  # whose last block will be full, once its last token is known

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_block_ids)

    # ------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        """Blocks marked full from now on belong to the next step."""
        self._filled_before += self._filled_now
        self._filled_now = []

    def confirm_filled(self, *, this_step: bool) -> None:
        """The device has run the earlier steps, or also this one: the blocks that they filled are written."""
        self._filled_before.clear()
        if this_step:
            self._filled_now.clear()

    def recover(self, seqs: Iterable[CacheUser]) -> tuple[int, ...]:
        """Free all blocks after a step that raised, and drop those that may be unwritten from the prefix index.

        Returns the blocks that are still cached, as on the free list; the empty ones precede them there, by id.
        Everything is rebuilt from the blocks, as the step may have raised in the middle of a change. The sequences
        of `seqs` had blocks, and keep their block tables.
        """
        for block_id in (*self._filled_before, *self._filled_now):
            self.blocks[block_id].prefix = None
        self._filled_before, self._filled_now, self._unknown = [], [], []
        held = (block_id for seq in seqs for block_id in reversed(seq.block_table) if block_id is not None)
        order = dict.fromkeys([*self.free_block_ids, *held, *range(self.num_blocks)])
        cached = tuple(block_id for block_id in order if self.blocks[block_id].prefix is not None)
        empty = [block.block_id for block in self.blocks if block.prefix is None]
        for block in self.blocks:
            block.ref_count = 0
        self.used_block_ids = set()
        self.free_block_ids = OrderedDict.fromkeys([*empty, *cached])
        found = self.hash_to_block_id.items()
        self.hash_to_block_id = {each: block_id for each, block_id in found if self.blocks[block_id].hash == each}
        self._followers = {}
        if self._policy is not None:
            self._policy.clear()
        for block_id in cached:
            block = self.blocks[block_id]
            self._follow(block)
            if self._policy is not None:
                if (found_prefix := self._findable_prefix(block)) is not None:
                    self._policy.filled(found_prefix)
                self._policy.freed(block_id, found_prefix)
        return cached

    # ------------------------------------------------------------------ one block

    def _find(self, prefix: Prefix) -> Block | None:
        block_id = self.hash_to_block_id.get(prefix.hash)
        if block_id is None:
            return None
        block = self.blocks[block_id]
        assert block.prefix is not None
        return block if block.prefix.same_as(prefix) else None

    def _index(self, block: Block) -> None:
        """Add a full block to the index, unless a block of equal content is there already."""
        prefix = block.prefix
        assert prefix is not None
        found = self.hash_to_block_id.setdefault(prefix.hash, block.block_id)
        if self._policy is not None and found == block.block_id:
            self._policy.filled(prefix)
        self._follow(block)

    def _follow(self, block: Block) -> None:
        if self._emit is not None and block.prefix is not None:
            parent = None if block.prefix.parent is None else block.prefix.parent.hash
            self._followers.setdefault(parent, {})[block.block_id] = None

    def _findable_prefix(self, block: Block) -> Prefix | None:
        """The content of a full block, None if lookups find another block of equal content."""
        prefix = block.prefix
        return prefix if prefix is not None and self.hash_to_block_id.get(prefix.hash) == block.block_id else None

    def _take_free(self) -> int:
        """An empty block, or else the cached one to evict, which is evicted."""
        if self._policy is None or self.blocks[next(iter(self.free_block_ids))].prefix is None:
            block_id, _ = self.free_block_ids.popitem(last=False)
        else:
            block_id = self._policy.choose()
            del self.free_block_ids[block_id]
        block = self.blocks[block_id]
        if block.prefix is not None:
            self._evict(block)
        block.ref_count = 1
        self.used_block_ids.add(block_id)
        return block_id

    def _evict(self, block: Block) -> None:
        self.num_evictions += 1
        prefix = block.prefix
        assert prefix is not None
        # the entry may belong to another block of equal content
        if self.hash_to_block_id.get(prefix.hash) == block.block_id:
            del self.hash_to_block_id[prefix.hash]
        block.prefix = None
        if self._emit is not None:
            parent = None if prefix.parent is None else prefix.parent.hash
            followers = self._followers[parent]
            del followers[block.block_id]
            if not followers:
                del self._followers[parent]
            self._emit(BlockEvicted(block.block_id, prefix.hash))

    def _release(self, block_id: int) -> bool:
        """Decrement the ref count. True if the block became free."""
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count:
            return False
        self.used_block_ids.remove(block_id)
        self.free_block_ids[block_id] = None
        if block.prefix is None:
            self.free_block_ids.move_to_end(block_id, last=False)  # empty blocks are reused before cached ones
        elif self._policy is not None:
            self._policy.freed(block_id, self._findable_prefix(block))
        return True

    def _partial_tokens(self, seq: CacheUser, num_hit: int) -> int:
        """How many tokens after num_hit spans match some cached block after the same prefix."""
        if num_hit:
            parent: int | None = seq.prefixes[num_hit * self.num_groups - 1].hash
        else:
            parent = None if seq.cache_salt is None else Prefix.salt(seq.cache_salt).hash
        start = num_hit * self.block_size
        wanted = token_bytes(seq.token_ids[start : start + self.block_size])
        longest = 0  # bytes
        for block_id in self._followers.get(parent, ()):
            prefix = self.blocks[block_id].prefix
            assert prefix is not None
            # a longer match needs an equal next token: most candidates fail here
            while longest < len(wanted) and prefix.tokens.startswith(wanted[: longest + TOKEN_BYTES]):
                longest += TOKEN_BYTES
        return longest // TOKEN_BYTES

    # ------------------------------------------------------------------ invariants

    def check(self, seqs: list[CacheUser] | None = None) -> None:
        """Verify every invariant; given the sequences, also that their tables explain every ref_count."""
        free, used = set(self.free_block_ids), self.used_block_ids
        assert not free & used, f"blocks both free and used: {sorted(free & used)}"
        assert len(free) + len(used) == self.num_blocks, "a block is neither free nor used"
        for block in self.blocks:
            name = f"block {block.block_id}"
            assert (block.ref_count == 0) == (block.block_id in free), f"{name}: ref_count and free list disagree"
            assert block.ref_count >= 0, f"{name}: ref_count {block.ref_count}"
            assert block.prefix is None or len(block.token_ids) == self.block_size, "a hashed block is not full"
        for hash_value, block_id in self.hash_to_block_id.items():
            assert self.blocks[block_id].hash == hash_value, f"hash map points to block {block_id} of another hash"
        in_order = [self.blocks[block_id].prefix is not None for block_id in self.free_block_ids]
        assert all(a <= b for a, b in pairwise(in_order)), "a cached block goes before an empty one"
        if self._policy is not None:
            cached = {block_id for block_id in free if self.blocks[block_id].prefix is not None}
            assert self._policy.block_ids() == cached, "the policy has other blocks than the free cached ones"
        if seqs is not None:
            self._check_tables(seqs)

    def _check_tables(self, seqs: list[CacheUser]) -> None:
        owners = [0] * self.num_blocks
        for seq in seqs:
            held = [block_id for block_id in seq.block_table if block_id is not None]
            assert len(set(held)) == len(held), f"seq {seq.seq_id}: a block twice in its table"
            num_computed = seq.num_computed_tokens
            next_span = num_computed // self.block_size if num_computed < seq.writable_until else None
            for index, block_id in enumerate(seq.block_table):
                span, group = divmod(index, self.num_groups)
                if block_id is None:
                    needed = self.shape.first_kept(group, seq.num_computed_tokens)
                    assert span < needed, f"seq {seq.seq_id}: block {span} of group {group} was released too early"
                    continue
                owners[block_id] += 1
                prefix = self.blocks[block_id].prefix
                tokens = tuple(seq.token_ids[span * self.block_size : (span + 1) * self.block_size])
                assert prefix is None or prefix.token_ids == tokens, f"seq {seq.seq_id}: other tokens in {block_id}"
                own = span != next_span or prefix is not None or self.blocks[block_id].ref_count == 1
                assert own, f"seq {seq.seq_id}: block {block_id} is shared, but writable_until {seq.writable_until}"
        for block, count in zip(self.blocks, owners, strict=True):
            assert block.ref_count == count, f"block {block.block_id}: ref_count {block.ref_count}, {count} owners"
