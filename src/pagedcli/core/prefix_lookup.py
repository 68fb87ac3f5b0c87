"""Which blocks of a pool have the beginning of a sequence: the chain of its hashes, and what lookups find by it.

Used by BlockManager, which gives sequences these blocks; needs neither torch nor the engine.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from msgspec import UNSET

import pagedcli.events as ev
from pagedcli.core.block_pool import BlockPool
from pagedcli.core.groups import TableShape
from pagedcli.core.prefixes import TOKEN_BYTES, HashFunction, Prefix, token_bytes

ELSEWHERE = -1  # stands for the block of an entry whose content can be brought into the pool


class CacheUser(Protocol):
    """What the block manager needs of a sequence. It changes block_table, prefixes, num_cached_tokens,
    num_writable_tokens and num_computed_tokens (in allocate), and only reads the rest."""

    seq_id: int
    token_ids: list[int]
    block_table: list[int | None]  # None: released, as no later token sees it
    prefixes: list[Prefix]  # one per full block hashed so far
    cache_salt: str | None
    num_computed_tokens: int  # leading tokens that need no more computing
    num_cached_tokens: int  # leading tokens whose K and V were found in the cache
    num_writable_tokens: int  # leading tokens that can be computed without a new block or a copy; 0: not known
    num_preemptions: int

    @property
    def num_context_tokens(self) -> int | None:
        """Tokens of the context: lookups end before the last of them; None: before the sequence's last one."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached part of a sequence: leading full spans, verified to be equal."""

    block_ids: tuple[int | None, ...]  # entries of the block table; None: no later token sees it
    num_free: int  # how many of them are on the free list, which they would leave
    num_spans: int
    num_asked: int  # full spans of the sequence
    num_cached_spans: int  # leading ones that the blocks alone allow
    vetoed_by: str | None = None  # "state" where the recurrent state allows fewer than the blocks
    num_disk_tokens: int | None = None  # computed tokens that were read from a prefix store for it; None: none is used

    @property
    def num_held(self) -> int:
        """How many of them other sequences hold."""
        return len(self.block_ids) - self.block_ids.count(None) - self.num_free

    def num_memory_tokens(self, block_size: int) -> int:
        """Tokens of the full blocks that were in memory before any was read for it."""
        return (self.num_spans * block_size - (self.num_disk_tokens or 0)) // block_size * block_size


class PrefixLookup:
    """Lookups in a pool. They change nothing but that more of a sequence is hashed."""

    def __init__(
        self, pool: BlockPool, tables: TableShape, *, enable_prefix_caching: bool, hash_function: HashFunction
    ) -> None:
        self.pool = pool
        self.tables = tables
        self.block_size = tables.block_size
        self.num_groups = tables.num_groups
        self.has_windows = tables.has_windows
        self.enable_prefix_caching = enable_prefix_caching
        self._hash_function = hash_function
        self._elsewhere: Collection[int] = ()  # entries of the table of a lookup whose content can be brought here

    def num_computed_after(self, seq: CacheUser, hit: PrefixHit) -> int:
        """Tokens that the hit saves. The last token is always computed: its logits give the next token."""
        return min(hit.num_spans * self.block_size, len(seq.token_ids) - 1)

    def lookup(self, seq: CacheUser) -> PrefixHit:
        """The longest cached beginning of the sequence: in each group the blocks that later tokens see. May hash more
        of the sequence; changes nothing else."""
        num_asked = self._num_asked(seq)
        if not self.enable_prefix_caching:
            return PrefixHit((), 0, 0, num_asked, 0)
        self._extend_prefixes(seq, num_asked)
        return self._hit(self._cached_beginning(seq), num_asked)

    def _cached_beginning(self, seq: CacheUser, ends: Collection[int] | None = None) -> list[int | None]:
        """The blocks of the longest cached beginning of the sequence, of one of `ends` spans; None: of any number."""
        if self.has_windows:
            return self._seen_blocks(seq, ends)
        found = self._leading_blocks(seq, 0)
        if ends is None:
            return found
        return found[: max((end for end in ends if end * self.num_groups <= len(found)), default=0) * self.num_groups]

    def missing_entries(
        self, seq: CacheUser, elsewhere: Collection[int], ends: Collection[int] | None = None
    ) -> tuple[list[int], int]:
        """Entries of the table that would have to be brought here for the longest beginning that is cached here or
        `elsewhere`, as far as blocks can be taken for them without losing others of it, and its number of spans, one of
        `ends`; None: any."""
        self._elsewhere = elsewhere
        entries = self._cached_beginning(seq, ends)
        self._elsewhere = ()
        missing = [index for index, block_id in enumerate(entries) if block_id == ELSEWHERE]
        num_takeable = self.pool.num_takeable({block_id for block_id in entries if block_id is not None})
        if len(missing) <= num_takeable:
            return missing, len(entries) // self.num_groups
        if self.has_windows:
            return [], 0
        num_kept = num_takeable // self.num_groups * self.num_groups
        end = missing[num_kept] // self.num_groups  # before it all is here
        if ends is None:
            return missing[:num_kept], end
        return self.missing_entries(seq, elsewhere, [each for each in ends if each <= end])

    def _num_asked(self, seq: CacheUser) -> int:
        """Full spans that a lookup of the sequence may find: those of a context end before its last token, which is
        computed and written."""
        if seq.num_context_tokens is None:
            return len(seq.token_ids) // self.block_size
        return (seq.num_context_tokens - 1) // self.block_size

    def shortened(self, seq: CacheUser, hit: PrefixHit, ends: Collection[int]) -> PrefixHit:
        """The longest part of a hit of one of these numbers of spans. With windows later tokens see other blocks."""
        block_ids: Sequence[int | None] = hit.block_ids[: max(ends) * self.num_groups]
        if self.has_windows and len(block_ids) < len(hit.block_ids):
            block_ids = self._seen_blocks(seq, ends)
        return replace(self._hit(block_ids, hit.num_asked), num_cached_spans=hit.num_spans)

    def _hit(self, block_ids: Sequence[int | None], num_asked: int) -> PrefixHit:
        num_spans = len(block_ids) // self.num_groups
        return PrefixHit(tuple(block_ids), self.pool.num_free(block_ids), num_spans, num_asked, num_spans)

    def extend_prefixes(self, seq: CacheUser) -> None:
        """Hash all full spans of a sequence."""
        self._extend_prefixes(seq, len(seq.token_ids) // self.block_size)

    def _extend_prefixes(self, seq: CacheUser, num_full_spans: int) -> None:
        """A chain with a link per entry of the table, so that the blocks of a span differ from group to group."""
        prefixes = seq.prefixes
        first = len(prefixes) // self.num_groups
        if first >= num_full_spans:
            return
        tokens = token_bytes(seq.token_ids[first * self.block_size : num_full_spans * self.block_size])
        if prefixes:
            parent: Prefix | None = prefixes[-1]
        else:
            parent = None if seq.cache_salt is None else Prefix.salt(seq.cache_salt)
        num_bytes = self.block_size * TOKEN_BYTES
        for start in range(0, len(tokens), num_bytes):
            of_span = tokens[start : start + num_bytes]
            for _ in range(self.num_groups):
                parent = Prefix(of_span, parent, self._hash_function)
                prefixes.append(parent)

    def _leading_blocks(self, seq: CacheUser, first: int) -> list[int | None]:
        """The cached blocks equal to the sequence's full spans from number `first` on, up to the first miss."""
        block_ids: list[int | None] = []
        for index in range(first * self.num_groups, self._num_asked(seq) * self.num_groups):
            block_id = self._cached_block_id(seq, index)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids[: len(block_ids) // self.num_groups * self.num_groups]

    def _seen_blocks(self, seq: CacheUser, ends: Collection[int] | None) -> list[int | None]:
        """The blocks of the longest beginning of the sequence after which all that later tokens see is cached. It has
        one of `ends` spans; None: any number.

        With blocks of 2 tokens and a window of 4 (x: cached) the hit is 4 spans, and the table [None, None, 2, 3]:

            span                            0  1  2  3  4
            cached                          .  x  x  x  .
            cached in a row up to here      0  1  2  3  0
            first span that is still seen   0  0  1  2  3    after this span: so many in a row are enough:
            needed in a row                 1  2  2  2  2
        """
        groups, most = range(self.num_groups), len(seq.token_ids) - 1
        found: list[int | None] = []  # entries of the table, None: not cached
        in_a_row = [0] * self.num_groups
        num_spans, first_seen = 0, list[int]()  # the hit so far
        for span in range(self._num_asked(seq)):
            found += [self._cached_block_id(seq, span * self.num_groups + group) for group in groups]
            in_a_row = [0 if found[span * self.num_groups + group] is None else in_a_row[group] + 1 for group in groups]
            num_computed = min((span + 1) * self.block_size, most)
            seen_from = [self.tables.first_kept(group, num_computed) for group in groups]
            if all(in_a_row[group] > span - seen_from[group] for group in groups):
                if ends is None or span + 1 in ends:
                    num_spans, first_seen = span + 1, seen_from
            elif any(window is None and not in_a_row[group] for group, window in enumerate(self.tables.windows)):
                break
        entries = ((span, group) for span in range(num_spans) for group in groups)
        return [found[span * self.num_groups + group] if span >= first_seen[group] else None for span, group in entries]

    def _cached_block_id(self, seq: CacheUser, index: int) -> int | None:
        """The cached block of an entry of the table; ELSEWHERE if its content can be brought here."""
        block = self.pool.find(seq.prefixes[index])
        if block is None:
            return ELSEWHERE if index in self._elsewhere else None
        assert block.prefix is not None
        self._share_prefix(seq, index, block.prefix)
        return block.block_id

    @staticmethod
    def _share_prefix(seq: CacheUser, index: int, prefix: Prefix) -> None:
        """Share one node per content: the next comparison is an identity check."""
        seq.prefixes[index] = prefix
        if index + 1 < len(seq.prefixes):
            seq.prefixes[index + 1].parent = prefix

    def _looked_up(
        self,
        seq: CacheUser,
        hit: PrefixHit,
        first: int,
        tokens_hit: int,
        *,
        num_fresh: int = 0,
        num_shared_tokens: int | None = None,
    ) -> ev.PrefixLookedUp:
        """The record of a lookup of the spans from number `first` on, with `num_fresh` blocks for what follows. The
        hash that it names is that of the first group whose block is missing; of one that is not, if something else
        ends the hit."""
        end = first + hit.num_spans
        missed = hit.num_spans < hit.num_asked
        next_span = seq.prefixes[end * self.num_groups : (end + 1) * self.num_groups] if missed else []
        missing = next((prefix for prefix in next_span if self.pool.find(prefix) is None), None)
        miss_reason: ev.MissReason | None
        if not self.enable_prefix_caching:
            miss_reason = "caching_off"
        elif hit.num_asked == 0:
            miss_reason = "no_full_block"
        else:
            miss_reason = "no_match" if missed else None
        return ev.PrefixLookedUp(
            seq_id=seq.seq_id,
            reason="continued" if seq.block_table else "resumed" if seq.num_preemptions else "new",
            num_tokens=len(seq.token_ids),
            blocks_asked=hit.num_asked,
            blocks_hit=hit.num_spans,
            tokens_hit=tokens_hit,
            first_miss=end if missed else None,
            missing_hash=(missing or next_span[0]).hash if miss_reason == "no_match" else None,
            miss_reason=miss_reason,
            partial_tokens=self._partial_tokens(seq, end),
            shared_tokens=num_shared_tokens,
            vetoed_by=UNSET if hit.vetoed_by is None else hit.vetoed_by,
            disk_tokens=UNSET if hit.num_disk_tokens is None else hit.num_disk_tokens,
            blocks_shared=hit.num_held,
            blocks_revived=hit.num_free,
            blocks_fresh=num_fresh,
        )

    def _partial_tokens(self, seq: CacheUser, num_hit: int) -> int:
        """How many tokens after num_hit spans match some cached block after the same prefix."""
        if num_hit:
            parent: int | None = seq.prefixes[num_hit * self.num_groups - 1].hash
        else:
            parent = None if seq.cache_salt is None else Prefix.salt(seq.cache_salt).hash
        start = num_hit * self.block_size
        return self.pool.partial_tokens(parent, seq.token_ids[start : start + self.block_size])
