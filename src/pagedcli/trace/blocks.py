"""The blocks of a pool, rebuilt from the engine's events: part of PoolState."""

from collections import Counter, OrderedDict


class BlockLedger:
    """Per block: ref_counts, hashes, parent_hashes (of the chain before a full block), filler_seq_ids, and the group of
    layers that block_groups names: the one that wrote it last.

    A block is in use (ref_count > 0), cached (free and full) or empty (free, no content).
    """

    finds_copies = True  # whether lookups find a copy of evicted content; not in traces of schema 3

    def __init__(self) -> None:
        self.reset_blocks(0)

    def reset_blocks(self, num_blocks: int) -> None:
        """Make all blocks empty."""
        self.ref_counts = [0] * num_blocks
        self.hashes: list[int | None] = [None] * num_blocks
        self.parent_hashes: list[int | None] = [None] * num_blocks
        self.filler_seq_ids: list[int | None] = [None] * num_blocks
        self.block_groups = [0] * num_blocks
        self.hash_to_block_id: dict[int, int] = {}
        self.copies: dict[int, dict[int, None]] = {}  # hash -> full blocks that lookups do not find, first filled first
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # oldest first
        self.num_cached_blocks = 0  # free and full
        self.num_full_blocks = 0  # in use and cached ones together
        self.num_shared_blocks = 0  # ref_count 2 or more
        self.num_shared_partial_blocks = 0
        self.num_references = 0  # sum of the ref_counts

    @property
    def num_blocks(self) -> int:
        return len(self.ref_counts)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_block_ids)

    @property
    def num_used_blocks(self) -> int:
        return len(self.ref_counts) - len(self.free_block_ids)

    @property
    def num_empty_blocks(self) -> int:
        return len(self.free_block_ids) - self.num_cached_blocks

    @property
    def num_blocks_saved(self) -> int:
        """How many more blocks would be in use without sharing."""
        return self.num_references - self.num_used_blocks

    def ref_count_histogram(self) -> dict[int, int]:
        """ref_count -> number of blocks in use, ascending."""
        histogram = Counter(self.ref_counts)
        del histogram[0]
        return dict(sorted(histogram.items()))

    # ------------------------------------------------------------------ changes

    def hold(self, block_id: int) -> None:
        """Add an owner."""
        count = self.ref_counts[block_id]
        if count == 0:
            del self.free_block_ids[block_id]
            self.num_cached_blocks -= self.hashes[block_id] is not None
        if count == 1:
            self.num_shared_blocks += 1
            self.num_shared_partial_blocks += self.hashes[block_id] is None
        self.ref_counts[block_id] = count + 1
        self.num_references += 1

    def let_go(self, block_id: int) -> bool:
        """Remove an owner. A block without owners joins the free list: at its back if cached, else at its front.
        Returns whether it did."""
        count = self.ref_counts[block_id] - 1
        self.ref_counts[block_id] = count
        self.num_references -= 1
        if count:
            if count == 1:
                self.num_shared_blocks -= 1
                self.num_shared_partial_blocks -= self.hashes[block_id] is None
            return False
        self.free_block_ids[block_id] = None
        if self.hashes[block_id] is None:
            self.free_block_ids.move_to_end(block_id, last=False)
        else:
            self.num_cached_blocks += 1
        return True

    def mark_full(self, block_id: int, block_hash: int, parent_hash: int | None, seq_id: int) -> None:
        """Mark a block in use as full: lookups find it by its hash, unless they already find another."""
        self.hashes[block_id] = block_hash
        self.parent_hashes[block_id] = parent_hash
        self.filler_seq_ids[block_id] = seq_id
        self._index(block_id, block_hash)
        self.num_full_blocks += 1

    def _index(self, block_id: int, block_hash: int) -> None:
        if self.hash_to_block_id.setdefault(block_hash, block_id) != block_id:
            self.copies.setdefault(block_hash, {})[block_id] = None

    def evict(self, block_id: int, block_hash: int) -> None:
        """Drop a cached block's content. If lookups found it, they find the first of its copies from now on."""
        copies = self.copies.get(block_hash, {})
        if self.hash_to_block_id.get(block_hash) != block_id:
            copies.pop(block_id, None)
        elif copies and self.finds_copies:
            self.hash_to_block_id[block_hash] = next(iter(copies))
            del copies[self.hash_to_block_id[block_hash]]
        else:
            del self.hash_to_block_id[block_hash]
        if block_hash in self.copies and not copies:
            del self.copies[block_hash]
        self.hashes[block_id] = self.parent_hashes[block_id] = self.filler_seq_ids[block_id] = None
        self.num_cached_blocks -= 1
        self.num_full_blocks -= 1

    def free_all(self, cached_block_ids: tuple[int, ...]) -> None:
        """Free all blocks; only these keep their content. They are free in this order, after the empty ones."""
        cached = set(cached_block_ids)
        empty = [block_id for block_id in range(self.num_blocks) if block_id not in cached]
        for block_id in empty:
            self.hashes[block_id] = self.parent_hashes[block_id] = self.filler_seq_ids[block_id] = None
        self.ref_counts = [0] * self.num_blocks
        self.free_block_ids = OrderedDict.fromkeys([*empty, *cached_block_ids])
        self.num_cached_blocks = self.num_full_blocks = len(cached_block_ids)
        self.num_shared_blocks = self.num_shared_partial_blocks = self.num_references = 0
        found = self.hash_to_block_id.items()
        self.hash_to_block_id, self.copies = {each: block_id for each, block_id in found if block_id in cached}, {}
        for block_id in cached_block_ids:
            block_hash = self.hashes[block_id]
            if block_hash is not None and (self.finds_copies or block_hash in self.hash_to_block_id):
                self._index(block_id, block_hash)

    def _copy_ledger(self, other: "BlockLedger") -> None:
        other.copies = {block_hash: copies.copy() for block_hash, copies in self.copies.items()}
        per_block = "ref_counts", "hashes", "parent_hashes", "filler_seq_ids", "block_groups"
        for name in (*per_block, "hash_to_block_id", "free_block_ids"):
            setattr(other, name, getattr(self, name).copy())
