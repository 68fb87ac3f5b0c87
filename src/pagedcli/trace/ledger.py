"""Each block's owners and cached content, and the order of free blocks: columns of N entries.

The block part of PoolState (state.py); mirrors the ledgers of kvcache.BlockManager without its tokens.
"""

from collections import Counter, OrderedDict


class BlockLedger:
    """Per block: ref_counts, hashes, parent_hashes (of the chain before a full block), filler_seq_ids.

    A block is in use (ref_count > 0), cached (free and full) or empty (free, no content).
    """

    def __init__(self) -> None:
        self.reset_blocks(0)

    def reset_blocks(self, num_blocks: int) -> None:
        """Make all blocks empty."""
        self.ref_counts = [0] * num_blocks
        self.hashes: list[int | None] = [None] * num_blocks
        self.parent_hashes: list[int | None] = [None] * num_blocks
        self.filler_seq_ids: list[int | None] = [None] * num_blocks
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # oldest first
        self.num_cached_blocks = 0  # free and full
        self.num_full_blocks = 0  # in use or cached
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
        """Mark a block in use as full: lookups find it by its hash, unless they already find a duplicate."""
        self.hashes[block_id] = block_hash
        self.parent_hashes[block_id] = parent_hash
        self.filler_seq_ids[block_id] = seq_id
        self.hash_to_block_id.setdefault(block_hash, block_id)
        self.num_full_blocks += 1

    def evict(self, block_id: int, block_hash: int) -> None:
        """Drop a cached block's content; a duplicate with the same content keeps its own entry."""
        if self.hash_to_block_id.get(block_hash) == block_id:
            del self.hash_to_block_id[block_hash]
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
        self.hash_to_block_id = {block_hash: block_id for block_hash, block_id in found if block_id in cached}

    def _copy_ledger(self, other: "BlockLedger") -> None:
        for name in ("ref_counts", "hashes", "parent_hashes", "filler_seq_ids", "hash_to_block_id", "free_block_ids"):
            setattr(other, name, getattr(self, name).copy())
