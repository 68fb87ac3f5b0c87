"""The blocks of a pool: which are free, and in which of them lookups find which content.

Used by BlockManager, which knows the sequences; needs neither torch nor the engine. A block is *partial* (being filled,
no hash) or *full* (hashed, shareable), and *free* exactly when its ref_count is 0. Free and still cached at once is
normal.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile

from pagedcli.core.eviction import make_policy
from pagedcli.core.prefixes import TOKEN_BYTES, Prefix, token_bytes
from pagedcli.events import BlockEvicted, Emit


@dataclass(slots=True, eq=False)
class Block:
    """A physical slot of S tokens."""

    block_id: int
    ref_count: int = 0
    prefix: Prefix | None = None  # None while partial or empty

    @property
    def hash(self) -> int | None:
        """Chain hash of a full block, None while partial or empty."""
        return None if self.prefix is None else self.prefix.hash

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of a full block, empty while partial or empty."""
        return () if self.prefix is None else self.prefix.token_ids


class BlockPool:
    """Owns all blocks, the index from hash to block, and the free list.

    The free list has empty blocks first, then cached ones, least recently used first. A fresh block is its first one,
    except that copies, which no lookup finds, go before the other cached ones. A policy other than lru chooses among
    the cached ones itself. Every operation is O(1) per block (eviction other than lru: O(log n)).

    Content that is in the pool is found: of several blocks with the same hash the index has one, and the next one when
    that is evicted.
    """

    def __init__(self, num_blocks: int, *, eviction: str = "lru", emit: Emit | None = None) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.num_evictions = 0
        self.num_touched = 0  # blocks that have been used: the first ones
        self.policy = make_policy(eviction)  # None: lru
        # hash -> full blocks that are not in the index, first filled first
        self._copies: dict[int, dict[int, None]] = {}
        self._free_copies: dict[int, None] = {}  # free ones of these, in order of release; lru only
        # full blocks by the hash of their predecessor; kept only for the partial_tokens of events
        self._followers: dict[int | None, dict[int, None]] = {}
        self._emit = emit

    # ------------------------------------------------------------------ questions

    def find(self, prefix: Prefix) -> Block | None:
        """The block with this content that lookups find."""
        block_id = self.hash_to_block_id.get(prefix.hash)
        if block_id is None:
            return None
        block = self.blocks[block_id]
        assert block.prefix is not None, "the index has full blocks"
        return block if block.prefix.same_as(prefix) else None

    def num_free(self, block_ids: Iterable[int | None]) -> int:
        """How many of these blocks are on the free list."""
        return sum(block_id is not None and self.blocks[block_id].ref_count == 0 for block_id in block_ids)

    def num_empty(self, most: int) -> int:
        """How many of the next `most` blocks can be taken without an eviction."""
        is_empty = (self.blocks[block_id].prefix is None for block_id in islice(self.free_block_ids, most))
        return sum(takewhile(bool, is_empty))

    def num_takeable(self, kept: Collection[int]) -> int:
        """How many blocks can be taken before one of `kept`. With a policy other than lru only empty ones: it chooses
        the others as they are taken."""
        is_next = takewhile(
            lambda block_id: block_id not in kept and (self.policy is None or self.blocks[block_id].prefix is None),
            self.free_block_ids,
        )
        return sum(1 for _ in is_next)

    def partial_tokens(self, parent_hash: int | None, token_ids: list[int]) -> int:
        """How many of these tokens some full block after this chain begins with."""
        wanted, longest = token_bytes(token_ids), 0  # bytes
        for block_id in self._followers.get(parent_hash, ()):
            prefix = self.blocks[block_id].prefix
            assert prefix is not None, "a follower is full"
            # a longer match needs an equal next token: most candidates fail here
            while longest < len(wanted) and prefix.tokens.startswith(wanted[: longest + TOKEN_BYTES]):
                longest += TOKEN_BYTES
        return longest // TOKEN_BYTES

    def _is_found(self, block: Block) -> bool:
        return block.prefix is not None and self.hash_to_block_id.get(block.prefix.hash) == block.block_id

    # ------------------------------------------------------------------ changes

    def take(self, for_seq_id: int) -> int:
        """Take an empty block for a sequence, or else evict a cached one."""
        block_id = next(iter(self.free_block_ids))
        if self.blocks[block_id].prefix is not None:
            if self.policy is not None:
                block_id = self.policy.choose()
            elif self._free_copies:
                block_id = next(iter(self._free_copies))
                del self._free_copies[block_id]
        del self.free_block_ids[block_id]
        block = self.blocks[block_id]
        if block.prefix is not None:
            self._evict(block, for_seq_id)
        block.ref_count = 1
        self.num_touched = max(self.num_touched, block_id + 1)
        return block_id

    def claim(self, block_id: int) -> None:
        """Add an owner to a full block, which was free or in use."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free_block_ids[block_id]
        if self.policy is not None:
            self.policy.hit(block_id)
        block.ref_count += 1

    def release(self, block_id: int) -> bool:
        """Remove an owner. Returns whether the block became free."""
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count:
            return False
        self.free_block_ids[block_id] = None
        if block.prefix is None:
            self.free_block_ids.move_to_end(block_id, last=False)  # empty blocks are reused before cached ones
        else:
            self._freed_full(block)
        return True

    def fill(self, block: Block, prefix: Prefix) -> None:
        """Mark a partial block full: lookups find it, unless they find one with the same hash already."""
        block.prefix = prefix
        found = self.hash_to_block_id.setdefault(prefix.hash, block.block_id)
        if found != block.block_id:
            self._copies.setdefault(prefix.hash, {})[block.block_id] = None
        elif self.policy is not None:
            self.policy.filled(prefix)
        if self._emit is not None:
            parent = None if prefix.parent is None else prefix.parent.hash
            self._followers.setdefault(parent, {})[block.block_id] = None

    def recover(self, unwritten: Iterable[int], held: Iterable[int]) -> tuple[int, ...]:
        """Free all blocks; the unwritten ones lose their content. Returns those that are still cached, as on the free
        list: the free ones in their order, then those that were held. Everything is rebuilt from the blocks."""
        for block_id in unwritten:
            self.blocks[block_id].prefix = None
        order = dict.fromkeys([*self.free_block_ids, *held, *range(len(self.blocks))])
        cached = tuple(block_id for block_id in order if self.blocks[block_id].prefix is not None)
        for block in self.blocks:
            block.ref_count = 0
        self.free_block_ids.clear()
        self.free_block_ids.update((block.block_id, None) for block in self.blocks if block.prefix is None)
        self.free_block_ids.update((block_id, None) for block_id in cached)
        for block_hash, block_id in list(self.hash_to_block_id.items()):
            if self.blocks[block_id].hash != block_hash:
                del self.hash_to_block_id[block_hash]
        self._copies, self._followers, self._free_copies = {}, {}, {}
        if self.policy is not None:
            self.policy.clear()
        for block_id in cached:
            block, prefix = self.blocks[block_id], self.blocks[block_id].prefix
            assert prefix is not None, "a cached block is full"
            self.fill(block, prefix)
            self._freed_full(block)
        return cached

    # ------------------------------------------------------------------ one block

    def _evict(self, block: Block, for_seq_id: int) -> None:
        self.num_evictions += 1
        prefix, block.prefix = block.prefix, None
        assert prefix is not None, "only cached blocks are evicted"
        copies = self._copies.get(prefix.hash, {})
        if self.hash_to_block_id[prefix.hash] != block.block_id:
            del copies[block.block_id]
        elif copies:  # all in use, as free ones are evicted first
            found = self.blocks[next(iter(copies))]
            del copies[found.block_id]
            self.hash_to_block_id[prefix.hash] = found.block_id
            if self.policy is not None and found.prefix is not None:
                self.policy.filled(found.prefix)
        else:
            del self.hash_to_block_id[prefix.hash]
        if prefix.hash in self._copies and not copies:
            del self._copies[prefix.hash]
        if self._emit is not None:
            parent = None if prefix.parent is None else prefix.parent.hash
            followers = self._followers[parent]
            del followers[block.block_id]
            if not followers:
                del self._followers[parent]
            self._emit(BlockEvicted(block.block_id, prefix.hash, for_seq_id))

    def _freed_full(self, block: Block) -> None:
        """The last owner of a full block released it."""
        prefix = block.prefix if self._is_found(block) else None
        if self.policy is not None:
            self.policy.freed(block.block_id, prefix)
        elif prefix is None:
            self._free_copies[block.block_id] = None

    # ------------------------------------------------------------------ invariants

    def check(self, block_size: int) -> None:
        """Verify every invariant."""
        free = self.free_block_ids
        for name, block in ((f"block {block.block_id}", block) for block in self.blocks):
            is_right = block.ref_count == 0 if block.block_id in free else block.ref_count > 0
            assert is_right, f"{name}: free list and ref_count {block.ref_count} disagree"
            full = len(block.token_ids) == block_size and block.block_id < self.num_touched
            assert block.prefix is None or full, f"{name} has a hash, but is not full or was never used"
            if block.prefix is not None:  # what is in the pool is found, or another content of the same hash
                is_listed = block.block_id in self._copies.get(block.prefix.hash, ()) or self._is_found(block)
                assert block.prefix.hash in self.hash_to_block_id, f"{name}: its content is not found"
                assert is_listed, f"{name} is neither in the index nor a copy"
        for hash_value, block_id in self.hash_to_block_id.items():
            assert self.blocks[block_id].hash == hash_value, f"hash map points to block {block_id} of another hash"
        copies = {block_id: block_hash for block_hash, ids in self._copies.items() for block_id in ids}
        assert all(self._copies.values()), "no copies are listed of a hash"
        for block_id, block_hash in copies.items():
            assert self.blocks[block_id].hash == block_hash, f"block {block_id} is listed as a copy of another hash"
            assert not self._is_found(self.blocks[block_id]), f"block {block_id} is found and listed as a copy"
        in_order = [self.blocks[block_id].prefix is not None for block_id in free]
        assert all(a <= b for a, b in pairwise(in_order)), "a cached block goes before an empty one"
        cached = {block_id for block_id in free if self.blocks[block_id].prefix is not None}
        if self.policy is not None:
            assert self.policy.block_ids() == cached, "the policy has other blocks than the free cached ones"
        else:
            assert self._free_copies.keys() == cached & copies.keys(), "the free copies are others"
