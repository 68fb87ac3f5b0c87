"""Snapshots of recurrent state: while a prompt is computed, after which of its blocks one is made.

Used by core.states, which has the slots; needs neither torch nor the engine.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import pagedcli.events as ev
from pagedcli.core.prefix_lookup import CacheUser
from pagedcli.core.prefixes import Prefix
from pagedcli.errors import ConfigError
from pagedcli.printable import plural


@dataclass(slots=True, eq=False)
class HeldSlots:
    """The slots of recurrent state that a sequence holds: see core.states."""

    read: int | None = None  # slot that its last scheduled step starts from; None: from zero
    write: int | None = None  # slot of its state after that step; None: no step has been scheduled
    sees_draft: bool = False  # whether `write` has seen the draft; `read` is kept until that is checked
    # the last computed tokens, which its state has not seen, as they were guessed or came with wrong guesses: the next
    # step computes them once more. Their K and V are in the cache
    num_behind: int = 0


class StateUser(CacheUser, Protocol):
    """A sequence of a model with recurrent state. StatePool changes `state`, and only reads the rest."""

    num_prompt_tokens: int
    state: HeldSlots | None  # None: it does not run


PolicyName = Literal["branches", "end", "none"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)  # a number of tokens is one, too


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Where snapshots are made while a prompt is computed."""

    kind: PolicyName | Literal["every"]
    interval: int = 0  # tokens, of `every`

    @classmethod
    def named(cls, name: str) -> "SnapshotPolicy":
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
    def reason(self) -> ev.SnapshotReason:
        return "branch" if self.kind == "branches" else "interval" if self.kind == "every" else "end"


class SnapshotPlan:
    """The prefix tree of the waiting requests, by the hashes of their blocks, and the snapshots that are coming.

    Three waiting prompts of blocks `A B C`, `A B D` and `A E`, each with a rest of less than a block:

        block                   A    A B    A B C    A B D    A E
        requests that begin so  3    2      1        1        1

    Once the first is computed, two wait. Of its blocks A is in both, A B in one and A B C in none: prompts branch off
    after A and after A B, and each of these snapshots has a reader.
    """

    def __init__(self, policy: SnapshotPolicy, block_size: int, num_groups: int) -> None:
        self.policy = policy
        self._block_size = block_size
        self._num_groups = num_groups
        self._num_waiting: Counter[int] = Counter()  # hash of blocks -> waiting requests that begin with them
        self._counted: dict[int, list[int]] = {}  # seq_id -> hashes counted for it
        self._coming: Counter[int] = Counter()  # hashes of snapshots that running sequences will make
        self._stops: dict[int, list[int]] = {}  # seq_id -> hashes of these, nearest first

    # ------------------------------------------------------------------ the queue

    def expect(self, seq: StateUser) -> None:
        """A sequence waits: it can continue from any boundary of blocks before its last token."""
        hashes = [self.prefix(seq, span).hash for span in range(1, self.last_readable(seq) + 1)]
        self._counted[seq.seq_id] = hashes
        self._num_waiting.update(hashes)

    def forget(self, seq: StateUser) -> None:
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

    def prefix(self, seq: StateUser, span: int) -> Prefix:
        """The first `span` blocks of a sequence."""
        return seq.prefixes[span * self._num_groups - 1]

    def last_readable(self, seq: StateUser) -> int:
        """The most blocks that the sequence can continue after: its last token, or that of its context, is always
        computed."""
        return ((seq.num_context_tokens or len(seq.token_ids)) - 1) // self._block_size

    def stops(self, seq: StateUser, first: int) -> list[int]:
        """After how many blocks, more than `first`, the sequence makes a snapshot, ascending."""
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

    def _branches(self, seq: StateUser, first: int) -> list[int]:
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

    def announce(self, seq: StateUser, spans: list[int]) -> None:
        """A running sequence will make these snapshots, and no others."""
        self.withdraw(seq)
        if spans:
            hashes = self._stops[seq.seq_id] = [self.prefix(seq, span).hash for span in spans]
            self._coming.update(hashes)

    def withdraw(self, seq: StateUser) -> None:
        """A sequence makes no more snapshots."""
        for each in self._stops.pop(seq.seq_id, ()):
            _count_down(self._coming, each)

    def passed(self, seq: StateUser, span: int) -> None:
        """Note that the step that makes a sequence's snapshot after this number of blocks was launched."""
        stops, block_hash = self._stops.get(seq.seq_id, []), self.prefix(seq, span).hash
        if block_hash in stops:
            stops.remove(block_hash)
            _count_down(self._coming, block_hash)
            if not stops:
                del self._stops[seq.seq_id]

    def is_stop(self, seq: StateUser, span: int) -> bool:
        """Whether the sequence makes a snapshot after this number of blocks."""
        stops = self._stops.get(seq.seq_id)
        return stops is not None and self.prefix(seq, span).hash in stops

    def is_coming(self, seq: StateUser, first: int) -> bool:
        """Whether a running sequence will make a snapshot of more than `first` blocks that this one can read."""
        if not self._coming:
            return False
        spans = range(first + 1, self.last_readable(seq) + 1)
        return any(self.prefix(seq, span).hash in self._coming for span in spans)


def _count_down(counts: Counter[int], key: int) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
