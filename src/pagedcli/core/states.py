"""Recurrent state as a kind of cache: slots for the states of sequences, which checkpoints of them to keep, and which
prefixes continue from one.

Used by core.cache, which has the protocol; needs neither torch nor the engine. A layer with recurrent state keeps no K
and V of its tokens but a state of fixed size, which each step replaces. A *slot* holds that of one sequence, over all
such layers.

A step reads one slot of a sequence and writes one; usually they are the same. A slot that others may still read is
never written: one with a *checkpoint*, the state after a whole number of blocks, or one that a fork shares. The
sequence then takes a fresh slot, reads the old one and writes the new one in the same step, so nothing is copied:

    step                 1        2          3          4
    tokens of sequence a 0-63     64-127     128        129
    reads, writes        -, 0     0, 1       1, 1       1, 1      slot 0 keeps the state after 64 tokens
    tokens of sequence b                     64-99      100
    reads, writes                            0, 2       2, 2      it has the same first 64 tokens

Both slots are held until the step has been launched; what is written later cannot overtake it.

A step that checks guesses takes a fresh slot, too, if one is empty. If all were right, the sequence continues from it;
otherwise it keeps the old one, and its next step computes the tokens since then once more, before any guess:

    step                  5              6               7
    tokens of sequence a  130, 131-133?  134, 135-137?   134-135 again, 136    of 135-137 only 135 was right
    reads, writes         1, 3           3, 1            3, 3
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, get_args

import pagedcli.events as ev
from pagedcli.core.block_manager import BlockManager, CacheUser, PrefixHit
from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import Limits
from pagedcli.core.prefixes import Prefix
from pagedcli.errors import ConfigError
from pagedcli.printable import plural

if TYPE_CHECKING:
    from pagedcli.core.store import PrefixStore

PolicyName = Literal["branches", "end", "none"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)  # a number of tokens is one, too


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Where checkpoints are made while a prompt is computed."""

    kind: PolicyName | Literal["every"]
    interval: int = 0  # tokens, of `every`

    @classmethod
    def named(cls, name: str) -> "CheckpointPolicy":
        """The policy of a configuration's value. Raises: ConfigError."""
        for kind in POLICIES:
            if name == kind:
                return cls(kind)
        if name.isdecimal() and int(name) > 0:
            return cls("every", int(name))
        raise ConfigError(
            f"checkpoints is {name!r}, must be branches, end, none or a number of tokens",
            hint="branches: where waiting prompts differ; end: at the end of each prompt; 512: every 512 tokens",
        )

    @property
    def text(self) -> str:
        """In words."""
        texts = {"branches": "where waiting prompts branch", "end": "at the end of each prompt", "none": "none"}
        return f"every {plural(self.interval, 'token')}" if self.kind == "every" else texts[self.kind]

    @property
    def reason(self) -> ev.CheckpointReason:
        return "branch" if self.kind == "branches" else "interval" if self.kind == "every" else "end"


class CheckpointPlan:
    """The prefix tree of the waiting requests, by the hashes of their blocks, and the checkpoints that are coming.

    Three waiting prompts of blocks `A B C`, `A B D` and `A E`, each with a rest of less than a block:

        block                   A    A B    A B C    A B D    A E
        requests that begin so  3    2      1        1        1

    Once the first is computed, two wait. Of its blocks A is in both, A B in one and A B C in none: prompts branch off
    after A and after A B, and each of these checkpoints has a reader.
    """

    def __init__(self, policy: CheckpointPolicy, block_size: int, num_groups: int) -> None:
        self.policy = policy
        self._block_size = block_size
        self._num_groups = num_groups
        self._num_waiting: Counter[int] = Counter()  # hash of blocks -> waiting requests that begin with them
        self._counted: dict[int, list[int]] = {}  # seq_id -> hashes counted for it
        self._coming: Counter[int] = Counter()  # hashes of checkpoints that running sequences will make
        self._stops: dict[int, list[int]] = {}  # seq_id -> hashes of these, nearest first

    # ------------------------------------------------------------------ the queue

    def expect(self, seq: CacheUser) -> None:
        """A sequence waits: it can continue from any boundary of blocks before its last token."""
        hashes = [self.prefix(seq, span).hash for span in range(1, self.last_readable(seq) + 1)]
        self._counted[seq.seq_id] = hashes
        self._num_waiting.update(hashes)

    def forget(self, seq: CacheUser) -> None:
        """A sequence waits no longer, if it did."""
        for each in self._counted.pop(seq.seq_id, ()):
            _count_down(self._num_waiting, each)

    def is_expected(self, block_hash: int) -> bool:
        """Whether a waiting request begins with these blocks."""
        return block_hash in self._num_waiting

    def clear(self) -> None:
        """Forget the queue and what is coming."""
        self._num_waiting.clear()
        self._counted.clear()
        self._coming.clear()
        self._stops.clear()

    # ------------------------------------------------------------------ where to stop

    def prefix(self, seq: CacheUser, span: int) -> Prefix:
        """The first `span` blocks of a sequence."""
        return seq.prefixes[span * self._num_groups - 1]

    def last_readable(self, seq: CacheUser) -> int:
        """The most blocks that the sequence can continue after: its last token, or that of its context, is always
        computed."""
        return ((seq.num_context_tokens or len(seq.token_ids)) - 1) // self._block_size

    def stops(self, seq: CacheUser, first: int) -> list[int]:
        """After how many blocks, more than `first`, the sequence makes a checkpoint, ascending."""
        size, interval = self._block_size, self.policy.interval
        if self.policy.kind == "branches":
            return self._branches(seq, first)
        end = (seq.num_context_tokens or seq.num_prompt_tokens) // size
        if self.policy.kind == "end":
            return [end] if end > first else []
        if self.policy.kind == "every":
            spans = (tokens // size for tokens in range(interval, end * size + 1, interval))
            return sorted({span for span in spans if span > first})
        return []

    def _branches(self, seq: CacheUser, first: int) -> list[int]:
        """Where waiting sequences, other than this one, leave its blocks."""
        own, found = len(self._counted.get(seq.seq_id, ())), []
        before = 0
        for span in range(first + 1, len(seq.token_ids) // self._block_size + 1):
            others = self._num_waiting[self.prefix(seq, span).hash] - (span <= own)
            if others < before:
                found.append(span - 1)
            before = others
            if not others:
                return found
        return [*found, len(seq.token_ids) // self._block_size] if before else found

    # ------------------------------------------------------------------ what is coming

    def announce(self, seq: CacheUser, spans: list[int]) -> None:
        """A running sequence will make these checkpoints, and no others."""
        self.withdraw(seq)
        if spans:
            hashes = self._stops[seq.seq_id] = [self.prefix(seq, span).hash for span in spans]
            self._coming.update(hashes)

    def withdraw(self, seq: CacheUser) -> None:
        """A sequence makes no more checkpoints."""
        for each in self._stops.pop(seq.seq_id, ()):
            _count_down(self._coming, each)

    def passed(self, seq: CacheUser, span: int) -> None:
        """The step that made a sequence's checkpoint after so many blocks has been launched."""
        stops, block_hash = self._stops.get(seq.seq_id, []), self.prefix(seq, span).hash
        if block_hash in stops:
            stops.remove(block_hash)
            _count_down(self._coming, block_hash)
            if not stops:
                del self._stops[seq.seq_id]

    def is_stop(self, seq: CacheUser, span: int) -> bool:
        """Whether the sequence makes a checkpoint after so many blocks."""
        stops = self._stops.get(seq.seq_id)
        return stops is not None and self.prefix(seq, span).hash in stops

    def is_coming(self, seq: CacheUser, first: int) -> bool:
        """Whether a running sequence will make a checkpoint of more than `first` blocks that this one can read."""
        if not self._coming:
            return False
        spans = range(first + 1, self.last_readable(seq) + 1)
        return any(self.prefix(seq, span).hash in self._coming for span in spans)


def _count_down(counts: Counter[int], key: int) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


# ---------------------------------------------------------------------- slots


@dataclass(slots=True, eq=False)
class StateSlot:
    """A place for one state."""

    slot_id: int
    ref_count: int = 0  # sequences that hold it
    prefix: Prefix | None = None  # tokens before a checkpoint; None: there is none


class StateKind:
    """Owns all slots and the map from prefix to checkpoint.

    A slot is *empty* (held by no sequence, no checkpoint), *idle* (a checkpoint that no sequence holds) or held. A
    fresh slot is the empty one that was released first; without any, the idle checkpoint that was released first is
    dropped, those that no known request will read before the others.
    """

    name = "state"

    def __init__(self, limits: Limits, num_groups: int, emit: ev.Emit | None) -> None:
        assert limits.num_state_slots, "a model with recurrent state has slots"
        policy = CheckpointPolicy.named(limits.checkpoints if limits.enable_prefix_caching else "none")
        self.plan = CheckpointPlan(policy, limits.block_size, num_groups)
        self.slots = [StateSlot(slot_id) for slot_id in range(limits.num_state_slots)]
        self.num_made = self.num_dropped = self.num_read = 0  # checkpoints
        self._empty = deque(range(limits.num_state_slots))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._index: dict[int, int] = {}  # hash of a checkpoint's prefix -> slot
        # checkpoints made in this step, which no sequence of it may read, and in unread steps: perhaps not written yet
        self._made_now: list[int] = []
        self._made_before: list[int] = []
        self._kept: list[tuple[CacheUser, int]] = []  # sequences whose step of now makes a checkpoint, after which span
        self._moved: list[CacheUser] = []  # their last steps read another slot than they write
        self._block_size = limits.block_size
        self._emit = emit

    @classmethod
    def is_needed(cls, limits: Limits) -> bool:
        return limits.has_states

    @classmethod
    def make(cls, limits: Limits, blocks: BlockManager, emit: ev.Emit | None) -> Self:
        return cls(limits, blocks.num_groups, emit)

    @classmethod
    def bytes(cls, limits: Limits) -> int:
        return (limits.num_state_slots or 0) * limits.state_bytes

    # ------------------------------------------------------------------ questions

    @property
    def num_available(self) -> int:
        """Slots that can be taken."""
        return len(self._empty) + len(self._idle)

    @property
    def num_held(self) -> int:
        return len(self.slots) - self.num_available

    def boundaries(self, seq: CacheUser, most: int) -> list[int]:
        spans = range(1, min(most, self.plan.last_readable(seq)) + 1)
        return [span for span in spans if self._find_written(seq, span) is not None]

    def why_wait(self, seq: CacheUser, hit: PrefixHit) -> ev.WaitingReason | None:
        if self.plan.is_coming(seq, hit.num_spans):
            return "checkpoint"
        return None if self.num_available else "state_slots"

    def can_grow(self, seqs: Sequence[CacheUser]) -> bool:
        if len(seqs) > 1:
            return sum(not self._writes_in_place(seq) for seq in seqs) <= self.num_available
        latest = seqs[0].state_write
        return self.num_available > 0 or (latest is not None and self.slots[latest].ref_count == 1)

    def can_fork(self, parent: CacheUser, *, is_last: bool) -> bool:
        return self.num_available > 0 or (is_last and self.can_grow([parent]))

    def next_stop(self, seq: CacheUser, num_computed: int, num_new_tokens: int) -> int:
        """The step ends at the first checkpoint to make."""
        size = self._block_size
        if self.plan.policy.kind == "none":
            return num_new_tokens
        stops = self.plan.stops(seq, num_computed // size)
        spans = [span for span in stops if self._find(self.plan.prefix(seq, span)) is None]
        self.plan.announce(seq, spans)
        return min(num_new_tokens, spans[0] * size - num_computed) if spans else num_new_tokens

    def _find(self, prefix: Prefix) -> int | None:
        """The slot with the state after these tokens, also where a step of now writes it."""
        slot_id = self._index.get(prefix.hash)
        if slot_id is None:
            return None
        found = self.slots[slot_id].prefix
        return slot_id if found is not None and found.same_as(prefix) else None

    def _find_written(self, seq: CacheUser, span: int) -> int | None:
        """The slot with the state after so many spans, if a step that is scheduled now can read it."""
        slot_id = self._find(self.plan.prefix(seq, span))
        return None if slot_id in self._made_now else slot_id

    def _writes_in_place(self, seq: CacheUser) -> bool:
        """Whether the sequence's next step may write the slot that it reads: nobody else will read it."""
        if seq.state_write is None:
            return False
        slot = self.slots[seq.state_write]
        return slot.ref_count == 1 and slot.prefix is None

    # ------------------------------------------------------------------ the queue

    def expect(self, seq: CacheUser) -> None:
        if self.plan.policy.kind != "none":
            self.plan.expect(seq)

    def forget(self, seq: CacheUser) -> None:
        self.plan.forget(seq)

    # ------------------------------------------------------------------ the store

    def stored(self, seq: CacheUser, most: int, store: "PrefixStore") -> list[int]:
        spans = range(1, min(most, self.plan.last_readable(seq)) + 1)
        found = store.found_states(seq, {span: self.plan.prefix(seq, span) for span in spans})
        return [span for span in found if self._find(self.plan.prefix(seq, span)) is None]

    def restore(self, seq: CacheUser, num_spans: int, store: "PrefixStore") -> bool:
        prefix = self.plan.prefix(seq, num_spans)
        if self._find(prefix) is not None:
            return True
        content = store.read_state(prefix)
        if content is None:
            return False
        assert self.num_available, "ask why_wait first"
        slot = self.slots[self._take()]
        slot.ref_count, slot.prefix = 0, prefix
        self._idle[slot.slot_id] = None
        self._index[prefix.hash] = slot.slot_id
        store.place_state(slot.slot_id, content)
        if self._emit is not None:
            num_tokens = num_spans * self._block_size
            self._emit(ev.CheckpointRestored(seq.seq_id, slot.slot_id, prefix.hash, num_tokens))
        return True

    def offer(self, seq: CacheUser, hit: PrefixHit, store: "PrefixStore") -> None:
        slot_id = self._find(self.plan.prefix(seq, hit.num_spans)) if hit.num_spans else None
        if slot_id is not None:
            prefix = self.slots[slot_id].prefix
            assert prefix is not None, "it was found by its prefix"
            store.offer_state(seq, hit.num_spans, prefix, slot_id, self._is_written)

    def _is_written(self, slot_id: int, prefix: Prefix) -> bool:
        """Whether a slot has the state after these tokens, and the step that computed it has run."""
        is_pending = slot_id in self._made_now or slot_id in self._made_before
        return self.slots[slot_id].prefix is prefix and not is_pending

    # ------------------------------------------------------------------ changes

    def allocate(self, seq: CacheUser, hit: PrefixHit) -> None:
        assert seq.state_write is None, "a sequence starts from one state"
        slot_id = self._find_written(seq, hit.num_spans) if hit.num_spans else None
        if slot_id is not None:
            self._hold(slot_id)
            self.num_read += 1
            seq.state_write = slot_id
        if self._emit is not None:
            cached, computed = hit.num_cached_spans * self._block_size, hit.num_spans * self._block_size
            self._emit(ev.CheckpointLookedUp(seq.seq_id, cached, computed, slot_id))

    def grow(self, seq: CacheUser, num_new_tokens: int) -> None:
        self._advance(seq)
        num_tokens = seq.num_computed_tokens + num_new_tokens
        span, rest = divmod(num_tokens, self._block_size)
        if not rest and self.plan.is_stop(seq, span):
            self._keep(seq, self.plan.prefix(seq, span), num_tokens)
            self._kept.append((seq, span))

    def _advance(self, seq: CacheUser) -> None:
        """Choose the slots that the sequence's next step reads and writes.

        If no slot is left but the sequence is the only one that holds its checkpoint, it drops that and continues in
        place.
        """
        latest = seq.state_write
        if latest is not None and not self.num_available and self.slots[latest].prefix is not None:
            assert self.slots[latest].ref_count == 1, "ask can_grow first"
            self._drop(self.slots[latest])
        if self._writes_in_place(seq):
            seq.state_read = latest
            return
        seq.state_read, seq.state_write = latest, self._take()
        self._moved.append(seq)
        if self._emit is not None:
            self._emit(ev.StateSlotTaken(seq.seq_id, seq.state_write))

    def _keep(self, seq: CacheUser, prefix: Prefix, num_tokens: int) -> None:
        """Make a checkpoint of what the sequence's scheduled step writes, the state after its first num_tokens tokens,
        unless there is one."""
        assert seq.state_write is not None, "a scheduled sequence writes a slot"
        if prefix.hash in self._index:
            return
        slot = self.slots[seq.state_write]
        slot.prefix = prefix
        self._index[prefix.hash] = slot.slot_id
        self._made_now.append(slot.slot_id)
        self.num_made += 1
        if self._emit is not None:
            reason = self.plan.policy.reason
            self._emit(ev.CheckpointMade(seq.seq_id, slot.slot_id, prefix.hash, num_tokens, reason))

    def fork(self, parent: CacheUser, child: CacheUser) -> None:
        assert child.state_write is None, "a forked sequence has no state yet"
        if parent.state_write is not None:
            self._hold(parent.state_write)
        child.state_write = parent.state_write

    def add_draft(self, seq: CacheUser) -> None:
        if seq.state_read != seq.state_write or seq.num_behind_tokens or not self._empty:
            return  # the state that it writes sees no guess, so that it is the next one in any case
        seq.state_write, seq.state_sees_draft = self._take(), True
        self._moved.append(seq)
        if self._emit is not None:
            self._emit(ev.StateSlotTaken(seq.seq_id, seq.state_write))

    def take_draft(self, seq: CacheUser, num_drafted: int, num_accepted: int) -> int:
        if not seq.state_sees_draft:
            return num_accepted
        seq.state_sees_draft = False
        if num_accepted == num_drafted:
            return 0
        assert seq.state_write is not None, "it was taken for the draft"
        taken, seq.state_write = seq.state_write, seq.state_read
        self._release(seq.seq_id, (taken,))
        return num_accepted + 1

    def release(self, seq: CacheUser) -> None:
        self.plan.withdraw(seq)
        held = tuple(dict.fromkeys(each for each in (seq.state_read, seq.state_write) if each is not None))
        seq.state_read = seq.state_write = None
        seq.state_sees_draft = False
        self._release(seq.seq_id, held)

    # ------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        """What the step before read can be written, and what it wrote can be read."""
        moved, self._moved = self._moved, []
        for seq in moved:
            read, seq.state_read = seq.state_read, seq.state_write
            if read is not None and read != seq.state_write:
                self._release(seq.seq_id, (read,))
        self._made_before += self._made_now
        self._made_now = []
        kept, self._kept = self._kept, []
        for seq, span in kept:
            self.plan.passed(seq, span)

    def confirm(self, *, latest: bool) -> None:
        self._made_before.clear()
        if latest:
            self._made_now.clear()

    def recover(self) -> None:
        """The sequences forget their slots on their own."""
        self.plan.clear()
        self._kept = []
        for slot_id in (*self._made_before, *self._made_now):
            self.slots[slot_id].prefix = None
        order = dict.fromkeys([*self._idle, *range(len(self.slots))])
        kept = [slot_id for slot_id in order if self.slots[slot_id].prefix is not None]
        for slot in self.slots:
            slot.ref_count = 0
        self._made_before, self._made_now, self._moved = [], [], []
        self._idle = OrderedDict.fromkeys(kept)
        self._empty = deque(slot.slot_id for slot in self.slots if slot.prefix is None)
        self._index = {prefix.hash: slot_id for slot_id in kept if (prefix := self.slots[slot_id].prefix) is not None}
        if self._emit is not None:
            self._emit(ev.StatesRecovered(tuple(kept)))

    def count(self, facts: RunFacts) -> None:
        facts.peak_used_state_slots = max(facts.peak_used_state_slots, self.num_held)
        facts.num_checkpoints, facts.num_dropped_checkpoints = self.num_made, self.num_dropped
        facts.num_checkpoint_hits = self.num_read

    # ------------------------------------------------------------------ one slot

    def _hold(self, slot_id: int) -> None:
        slot = self.slots[slot_id]
        if not slot.ref_count:
            del self._idle[slot_id]
        slot.ref_count += 1

    def _release(self, seq_id: int, slot_ids: tuple[int, ...]) -> None:
        for slot_id in slot_ids:
            slot = self.slots[slot_id]
            slot.ref_count -= 1
            if not slot.ref_count and slot.prefix is None:
                self._empty.append(slot_id)
            elif not slot.ref_count:
                self._idle[slot_id] = None
        if self._emit is not None and slot_ids:
            self._emit(ev.StateSlotsReleased(seq_id, slot_ids))

    def _take(self) -> int:
        if not self._empty:
            oldest = next(iter(self._idle))
            unread = (slot_id for slot_id in self._idle if not self.plan.is_expected(self._hash(slot_id)))
            self._drop(self.slots[next(unread, oldest)])
        slot_id = self._empty.popleft()
        self.slots[slot_id].ref_count = 1
        return slot_id

    def _drop(self, slot: StateSlot) -> None:
        """Drop a checkpoint, of an idle slot or of one that its only holder will write."""
        block_hash = self._hash(slot.slot_id)
        del self._index[block_hash]
        slot.prefix = None
        self.num_dropped += 1
        if not slot.ref_count:
            del self._idle[slot.slot_id]
            self._empty.append(slot.slot_id)
        for made in (self._made_now, self._made_before):
            if slot.slot_id in made:
                made.remove(slot.slot_id)
        if self._emit is not None:
            self._emit(ev.CheckpointDropped(slot.slot_id, block_hash))

    def _hash(self, slot_id: int) -> int:
        prefix = self.slots[slot_id].prefix
        assert prefix is not None, "a checkpoint has a prefix"
        return prefix.hash

    # ------------------------------------------------------------------ invariants

    def check(self, seqs: list[CacheUser] | None) -> None:
        empty, idle = set(self._empty), set(self._idle)
        assert len(empty) == len(self._empty), "a slot is empty twice"
        assert not empty & idle, f"slots both empty and idle: {sorted(empty & idle)}"
        for slot in self.slots:
            name, has_checkpoint = f"slot {slot.slot_id}", slot.prefix is not None
            assert slot.ref_count >= 0, f"{name}: ref_count {slot.ref_count}"
            assert (slot.slot_id in idle) == (slot.ref_count == 0 and has_checkpoint), f"{name}: is it idle?"
            assert (slot.slot_id in empty) == (slot.ref_count == 0 and not has_checkpoint), f"{name}: is it empty?"
            found = self._index.get(slot.prefix.hash) if slot.prefix is not None else slot.slot_id
            assert found == slot.slot_id, f"{name}: its checkpoint is not found"
        assert len(self._index) == sum(slot.prefix is not None for slot in self.slots), (
            "the index has other checkpoints"
        )
        if seqs is not None:
            self._check_holders(seqs)

    def _check_holders(self, seqs: list[CacheUser]) -> None:
        owners = [0] * len(self.slots)
        for seq in seqs:
            for slot_id in {seq.state_read, seq.state_write} - {None}:
                assert slot_id is not None
                owners[slot_id] += 1
        for slot, count in zip(self.slots, owners, strict=True):
            assert slot.ref_count == count, f"slot {slot.slot_id}: ref_count {slot.ref_count}, {count} owners"
