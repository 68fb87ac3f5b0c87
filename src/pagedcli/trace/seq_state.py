"""A sequence and a step, as the events tell of them: parts of the rebuilt pool (state.py)."""

import copy
from dataclasses import dataclass, field
from typing import Literal

from pagedcli.events import DraftSource, PrefixLookedUp, RequestPreempted, RequestWaiting

Stage = Literal["waiting", "prefill", "decode", "stalled", "preempted", "finished"]


@dataclass(slots=True, eq=False)
class SharedCounts:
    """Counts that sequences share while each decodes one token per step: one addition counts for all of them.

    Three sequences with 5, 9 and 30 computed tokens share counts that stand at 100: they keep -95, -91 and -70 of their
    own, and when the shared ones become 101, all three have one token more.
    """

    num_computed: int = 0
    num_output: int = 0


_ALONE = SharedCounts()  # never counts: a sequence with these has counts of its own


@dataclass(slots=True)
class SeqState:
    """A sequence, according to the events. Counts are tokens unless named otherwise."""

    seq_id: int
    request_id: str
    sample_index: int
    num_prompt_tokens: int
    max_new_tokens: int
    salted: bool
    added_step: int | None  # the last step before it was added, None: added before the first
    queue_place: int  # waiting ones are served from the lowest on
    status: Stage = "waiting"
    block_table: list[int | None] = field(default_factory=list)  # None: no later token sees it
    num_cached_tokens: int = 0  # hit by the last lookup
    num_found_tokens: int = 0  # up to the last block that a lookup found: computing one of these writes no slot
    num_preemptions: int = 0
    num_drafted_tokens: int = 0  # guessed ones that the current step computes
    draft_source: DraftSource = "own_text"  # source of these guesses; without any, of the last ones
    num_guesses: int = 0  # guessed tokens that have been checked
    num_right_guesses: int = 0  # the right ones among them
    num_recomputed_tokens: int = 0  # computed, dropped by a preemption, and computed again
    most_computed_tokens: int = 0  # the most before any preemption
    waiting_since_step: int | None = 0  # None while it runs
    num_waited_steps: int = 0  # earlier waits, without the current one
    admitted_step: int | None = None
    first_token_step: int | None = None
    finished_step: int | None = None
    finish_reason: str | None = None
    beam_width: int | None = None  # None: no beam search
    row_id: str | None = None  # the user's own id
    num_context_tokens: int | None = None  # tokens before those that it scores; None: it generates
    _shared: SharedCounts = _ALONE
    _num_computed: int = 0  # own part, see SharedCounts
    _num_output: int = 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens in the cache after the current step."""
        return self._num_computed + self._shared.num_computed

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        self._num_computed = value - self._shared.num_computed

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return self._num_output + self._shared.num_output

    @num_output_tokens.setter
    def num_output_tokens(self, value: int) -> None:
        self._num_output = value - self._shared.num_output

    def count_with(self, shared: SharedCounts = _ALONE) -> None:
        """Share counts with other sequences from now on, or with none."""
        num_computed, num_output, self._shared = self.num_computed_tokens, self.num_output_tokens, shared
        self.num_computed_tokens, self.num_output_tokens = num_computed, num_output

    @property
    def label(self) -> str:
        """What a person calls its request: the user's own id, else the request id (in a batch run the row's index)."""
        return self.request_id if self.row_id is None else self.row_id

    @property
    def held_block_ids(self) -> list[int]:
        """The blocks that the sequence holds, in the order of its block table."""
        return [block_id for block_id in self.block_table if block_id is not None]

    @property
    def num_passed_blocks(self) -> int:
        """Blocks that it released, or never took, because no later token sees them."""
        return self.block_table.count(None)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self._num_output + self._shared.num_output

    @property
    def num_rows(self) -> int:
        """Sequences that may run because this one does: the first of a beam search needs room for all."""
        is_first = self.sample_index == 0 and self.num_output_tokens == 0
        return self.beam_width if self.beam_width is not None and is_first else 1

    @property
    def running(self) -> bool:
        return self.status in ("prefill", "decode")

    @property
    def keeps_context(self) -> bool:
        """Whether it is a computed context, which keeps its blocks for continuations and runs no more."""
        return self.num_context_tokens == self.num_computed_tokens == self.num_tokens

    def num_asked(self, block_size: int, num_tokens: int) -> int:
        """Full spans that a lookup of so many tokens may find: those of a context end before its last token."""
        if self.num_context_tokens is None:
            return num_tokens // block_size
        return min(num_tokens, self.num_context_tokens - 1) // block_size

    @property
    def repeats(self) -> bool:
        """Whether its request's prompt was computed before, by itself before a preemption or by an earlier sample: its
        prefix hits are then the request's own blocks."""
        return self.num_preemptions > 0 or self.sample_index > 0

    def place_of(self, block_ids: tuple[int, ...]) -> int:
        """Index in the block table of the first of some neighbours; filled ones are near its end.

        Raises: ValueError if it is not there.
        """
        table, first = self.block_table, block_ids[0]
        near_end = max(0, len(table) - len(block_ids) - 4)
        return table.index(first, near_end) if first in table[near_end:] else table.index(first)

    def num_steps_waited(self, step: int | None) -> int:
        """Steps in which it waited for admission or after a preemption, up to and including the current step."""
        current = 0 if self.waiting_since_step is None or step is None else max(0, step + 1 - self.waiting_since_step)
        return self.num_waited_steps + current

    def admit(self, step: int | None) -> None:
        """End its wait, if it waits, in this step."""
        if self.waiting_since_step is not None and step is not None:
            self.num_waited_steps += max(0, step - self.waiting_since_step)
        self.waiting_since_step = None

    def preempt(self, queue_place: int, step: int | None) -> None:
        """Return to waiting and drop what was computed."""
        self.status = "preempted"
        self.waiting_since_step = step
        self.queue_place = queue_place
        self.num_preemptions += 1
        self.most_computed_tokens = max(self.most_computed_tokens, self.num_computed_tokens)
        self.num_computed_tokens = self.num_drafted_tokens = 0

    def copy(self) -> "SeqState":
        """A copy that shares nothing that changes."""
        other = copy.copy(self)
        other.block_table = self.block_table.copy()
        other.count_with()
        return other


@dataclass(slots=True)
class StepRecord:
    """One step: what it computed, what happened in it, and the pool at its end."""

    step: int
    start_ns: int  # monotonic clock
    end_ns: int | None = None  # None while it runs
    schedule_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    observer_ns: int = 0
    scheduled: bool = False  # a step can fail before
    seq_ids: tuple[int, ...] = ()
    num_new_tokens: tuple[int, ...] = ()  # per sequence of seq_ids
    num_waiting: int = 0
    num_sampled: int = 0
    num_drafted: int = 0  # guessed tokens that it computes
    num_evicted: int = 0  # blocks
    lookups: list[PrefixLookedUp] = field(default_factory=list)
    preemptions: list[RequestPreempted] = field(default_factory=list)
    waiting: RequestWaiting | None = None

    @property
    def new_tokens(self) -> dict[int, int]:
        """Sequence -> the tokens that the step computes of it."""
        return dict(zip(self.seq_ids, self.num_new_tokens, strict=True))

    @property
    def busy_ns(self) -> int:
        """The step's duration without observers, 0 while it runs."""
        return 0 if self.end_ns is None else max(0, self.end_ns - self.start_ns - self.observer_ns)

    def copy(self) -> "StepRecord":
        other = copy.copy(self)
        other.lookups = self.lookups.copy()
        other.preemptions = self.preemptions.copy()
        return other
