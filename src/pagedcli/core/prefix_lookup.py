"""Finds the blocks that a sequence shares with earlier ones: what of it is cached, by chains of hashes.

The part of BlockManager between single blocks (block_pool.py) and the changes to a sequence's table; needs no torch.
"""

from dataclasses import dataclass

from pagedcli.core.block_pool import BlockPool, CacheUser
from pagedcli.core.eviction import NextUse
from pagedcli.core.groups import TableShape
from pagedcli.core.prefixes import TOKEN_BYTES, HashFunction, Prefix, hash_block, token_bytes
from pagedcli.events import Emit, Eviction, MissReason, PrefixLookedUp


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached part of a sequence: leading full spans, verified to be equal."""

    block_ids: tuple[int | None, ...]  # entries of the block table; None: no later token sees it
    num_free: int  # of these, blocks on the free list, which would leave it
    num_spans: int
    num_asked: int  # full spans of the sequence


class PrefixLookup(BlockPool):
    """A pool of blocks in which sequences find the content they have in common."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: tuple[int | None, ...] = (None,),
        enable_prefix_caching: bool = True,
        eviction: Eviction = "lru",
        emit: Emit | None = None,
        hash_function: HashFunction = hash_block,
    ) -> None:
        super().__init__(num_blocks, TableShape(block_size, windows), eviction=eviction, emit=emit)
        self.enable_prefix_caching = enable_prefix_caching
        self._hash_function = hash_function
        self._queue = self._policy if isinstance(self._policy, NextUse) and enable_prefix_caching else None

    def lookup(self, seq: CacheUser) -> PrefixHit:
        """The longest cached beginning of the sequence: in each group the blocks that later tokens see. May hash more
        of the sequence; changes nothing else."""
        num_asked = len(seq.token_ids) // self.block_size
        if not self.enable_prefix_caching:
            return PrefixHit((), 0, 0, num_asked)
        self._extend_prefixes(seq, num_asked)
        block_ids = self._seen_blocks(seq) if self.has_windows else self._leading_blocks(seq, 0)
        held = [block_id for block_id in block_ids if block_id is not None]
        num_free = sum(self.blocks[block_id].ref_count == 0 for block_id in held)
        return PrefixHit(tuple(block_ids), num_free, len(block_ids) // self.num_groups, num_asked)

    # ------------------------------------------------------------------ parts

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
        for index in range(first * self.num_groups, len(seq.prefixes)):
            block_id = self._find_shared(seq, index)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids[: len(block_ids) // self.num_groups * self.num_groups]

    def _seen_blocks(self, seq: CacheUser) -> list[int | None]:
        """The longest beginning of the sequence of whose blocks all that its later tokens see are cached."""
        groups, most = range(self.num_groups), len(seq.token_ids) - 1
        found: list[int | None] = []
        runs = [0] * self.num_groups  # of found blocks that end here
        num_spans, first = 0, runs
        for span in range(len(seq.prefixes) // self.num_groups):
            found += [self._find_shared(seq, span * self.num_groups + group) for group in groups]
            num_computed = min((span + 1) * self.block_size, most)
            kept = [self.shape.first_kept(group, num_computed) for group in groups]
            runs = [0 if found[group - self.num_groups] is None else runs[group] + 1 for group in groups]
            if all(runs[group] > span - kept[group] for group in groups):
                num_spans, first = span + 1, kept
            elif any(window is None and not runs[group] for group, window in enumerate(self.shape.windows)):
                break
        entries = ((span, group) for span in range(num_spans) for group in groups)
        return [found[span * self.num_groups + group] if span >= first[group] else None for span, group in entries]

    def _find_shared(self, seq: CacheUser, index: int) -> int | None:
        """The cached block of an entry of the table."""
        block = self._find(seq.prefixes[index])
        if block is None:
            return None
        assert block.prefix is not None
        self._share_prefix(seq, index, block.prefix)
        return block.block_id

    @staticmethod
    def _share_prefix(seq: CacheUser, index: int, prefix: Prefix) -> None:
        """Share one node per content: the next comparison is an identity check."""
        seq.prefixes[index] = prefix
        if index + 1 < len(seq.prefixes):
            seq.prefixes[index + 1].parent = prefix

    def _looked_up(self, seq: CacheUser, hit: PrefixHit, first: int, tokens_hit: int) -> PrefixLookedUp:
        """The record of a lookup of the spans from number `first` on."""
        end = first + hit.num_spans
        missed = hit.num_spans < hit.num_asked
        miss_reason: MissReason | None
        if not self.enable_prefix_caching:
            miss_reason = "caching_off"
        elif hit.num_asked == 0:
            miss_reason = "no_full_block"
        else:
            miss_reason = "no_match" if missed else None
        return PrefixLookedUp(
            seq_id=seq.seq_id,
            reason="continued" if seq.block_table else "resumed" if seq.num_preemptions else "new",
            num_tokens=len(seq.token_ids),
            blocks_asked=hit.num_asked,
            blocks_hit=hit.num_spans,
            tokens_hit=tokens_hit,
            first_miss=end if missed else None,
            missing_hash=seq.prefixes[end * self.num_groups].hash if missed and self.enable_prefix_caching else None,
            miss_reason=miss_reason,
            partial_tokens=self._partial_tokens(seq, end),
        )
