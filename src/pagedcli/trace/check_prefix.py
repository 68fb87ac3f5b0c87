"""The laws of the prefix cache: lookups, hits and hashes. The part of check.py that follows tokens and chains."""

from pagedcli.core.prefixes import SeenPrefixes, compute_hash, num_equal
from pagedcli.events import BlockEvicted, BlocksFilled, BlocksReused, PrefixLookedUp
from pagedcli.trace.dispatch import View
from pagedcli.trace.laws import refuse
from pagedcli.trace.records import SeqState
from pagedcli.trace.state import PoolState


class PrefixLaws(View[PoolState]):
    """Methods `before_...` run before the event is applied to the state, `on_...` after it."""

    def _forget_prefixes(self) -> None:
        self._lookups: dict[int, PrefixLookedUp] = {}  # the latest of each running sequence
        self._chains: dict[int, list[int]] = {}  # hashes of the full blocks of live sequences, where tokens are known
        self._followers: dict[int | None, dict[int, None]] = {}  # full blocks by the hash of the chain before them
        self._token_ids: dict[int, list[int]] = {}  # of live sequences, where recorded
        self._block_tokens: dict[int, tuple[int, ...]] = {}  # of full blocks, where recorded
        self._seen: SeenPrefixes | None = SeenPrefixes()  # None: not all of them are known

    def _chain(self, seq: SeqState, state: PoolState) -> list[int] | None:
        """Hashes of the full blocks of a sequence, in the order of its block table. None without recorded tokens or
        with a salt (never recorded)."""
        token_ids = self._token_ids.get(seq.seq_id)
        if token_ids is None or seq.salted:
            return None
        chain = self._chains.setdefault(seq.seq_id, [])
        size, num_groups = state.block_size, state.num_groups
        for start in range(len(chain) // num_groups * size, len(token_ids) // size * size, size):
            for _ in range(num_groups):
                chain.append(compute_hash(token_ids[start : start + size], chain[-1] if chain else None))
        return chain

    def before_prefix_looked_up(self, event: PrefixLookedUp, state: PoolState) -> None:
        seq, engine = state.seqs.get(event.seq_id), state.started
        if seq is None:
            return  # the fold reports it
        if event.num_tokens != seq.num_tokens:
            refuse(event, f"seq {seq.seq_id} has {seq.num_tokens} tokens, not {event.num_tokens}")
        if event.reason != "continued" and (event.reason == "resumed") != (seq.num_preemptions > 0):
            refuse(event, f"{event.reason}, but seq {seq.seq_id} was preempted {seq.num_preemptions} times")
        first = seq.num_computed_tokens // engine.block_size if event.reason == "continued" else 0
        if event.first_miss != (first + event.blocks_hit if event.blocks_hit < event.blocks_asked else None):
            refuse(
                event, f"hit {event.blocks_hit} of {event.blocks_asked} blocks, but first miss is {event.first_miss}"
            )
        missed = "no_match" if event.blocks_hit < event.blocks_asked else None
        full = missed if event.blocks_asked else "no_full_block"
        expected = full if engine.enable_prefix_caching else "caching_off"
        if event.miss_reason != expected:
            refuse(event, f"miss reason {event.miss_reason}, where it is {expected}")
        if not engine.enable_prefix_caching and event.blocks_hit:
            refuse(event, "a hit without prefix caching")
        if (event.missing_hash is not None) != (event.miss_reason == "no_match"):
            refuse(event, f"miss reason {event.miss_reason} with missing hash {event.missing_hash}")
        if not 0 <= event.partial_tokens <= engine.block_size:
            refuse(event, f"{event.partial_tokens} partial tokens in a block of {engine.block_size}")
        self._check_prefix(event, seq, first + event.blocks_hit, state)
        if event.reason == "new" and not seq.sample_index:
            self._check_shared(event, seq, state)
        self._lookups[event.seq_id] = event

    def _check_shared(self, event: PrefixLookedUp, seq: SeqState, state: PoolState) -> None:
        """Check how many tokens earlier sequences share: exactly where all tokens are recorded and there is no salt."""
        token_ids = self._token_ids.get(event.seq_id)
        if token_ids is None or seq.salted:
            self._seen = None if token_ids is None else self._seen
            expected = None
        else:
            expected = None if self._seen is None else self._seen.add(token_ids)
        found, least = event.shared_tokens, event.blocks_hit * state.block_size
        if found is None:
            return
        if expected is not None:
            expected = max(expected, least)
        if found != expected if expected is not None else not least <= found <= event.num_tokens:
            refuse(event, f"{found} tokens shared with earlier sequences, where {expected or least} are")

    def _check_prefix(self, event: PrefixLookedUp, seq: SeqState, end: int, state: PoolState) -> None:
        """Check the block after the last hit against the tokens, where they are recorded."""
        chain, size, index = self._chain(seq, state), state.block_size, end * state.num_groups
        if chain is None:
            return
        if event.missing_hash is not None and event.missing_hash != chain[index]:
            refuse(event, f"block {end} of seq {seq.seq_id} has hash {chain[index]}")
        wanted = self._token_ids[seq.seq_id][end * size : (end + 1) * size]
        followers = self._followers.get(chain[index - 1] if end else None, ())
        longest = max((num_equal(wanted, self._block_tokens[block_id]) for block_id in followers), default=0)
        if event.partial_tokens != longest:
            refuse(event, f"{longest} further tokens match a cached block, not {event.partial_tokens}")

    def before_blocks_reused(self, event: BlocksReused, state: PoolState) -> None:
        token_ids, size = self._token_ids.get(event.seq_id), state.block_size
        seq = state.seqs.get(event.seq_id)
        if token_ids is None or seq is None:
            return
        for index, block_id in enumerate(event.block_ids, len(seq.block_table)):
            held, span = None if block_id is None else self._block_tokens.get(block_id), index // state.num_groups
            if held is not None and held != tuple(token_ids[span * size : (span + 1) * size]):
                refuse(event, f"block {block_id} holds other tokens than seq {event.seq_id} at block {span}")

    def on_blocks_filled(self, event: BlocksFilled, state: PoolState) -> None:
        size = state.block_size
        if not state.started.enable_prefix_caching:
            refuse(event, "a block was hashed without prefix caching")
        if not event.block_ids:
            refuse(event, "no blocks")
        first = state.seqs[event.seq_id].block_table.index(event.block_ids[0])
        token_ids, lookup = self._token_ids.get(event.seq_id), self._lookups.get(event.seq_id)
        for index, block_id in enumerate(event.block_ids, first):
            if token_ids is not None:
                span = index // state.num_groups
                tokens = tuple(token_ids[span * size : (span + 1) * size])
                self._block_tokens[block_id] = tokens
                parent_hash = state.parent_hashes[block_id]
                if index or not state.seqs[event.seq_id].salted:
                    self._followers.setdefault(parent_hash, {})[block_id] = None
                    if compute_hash(tokens, parent_hash) != state.hashes[block_id]:
                        refuse(event, f"the tokens of block {block_id} have another hash")
            missed = None if lookup is None or lookup.first_miss is None else lookup.first_miss * state.num_groups
            if lookup is not None and index == missed and state.hashes[block_id] != lookup.missing_hash:
                refuse(event, f"block {block_id} was looked up under hash {lookup.missing_hash}")

    def before_block_evicted(self, event: BlockEvicted, state: PoolState) -> None:
        followers = self._followers.get(state.parent_hashes[event.block_id])
        if followers is not None:
            followers.pop(event.block_id, None)
