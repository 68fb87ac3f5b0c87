"""One sequence: its tokens, its blocks, and how it ended. Used by core, scheduler and sampler; needs no torch."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol, Self

from pagedcli.core.prefixes import Prefix
from pagedcli.core.scoring import Targets
from pagedcli.core.snapshots import HeldSlots
from pagedcli.events import DraftSource, FinishReason
from pagedcli.sampling_params import SamplingParams

StopChecker = Callable[[int], str | None]
"""Receives each new token id of one sample; returns the stop string that its text now contains, or None."""


TokenMask = bytes | memoryview
"""One bit per token id, lowest bit first."""


class Guide(Protocol):
    """Follows a grammar along the tokens of one sample. Its state depends on these tokens alone, so preemption does not
    affect it. All guides of an engine are of one class."""

    @property
    def allowed_tokens(self) -> TokenMask:
        """Which tokens may come next. At least one bit is set."""

    def accept(self, token_id: int) -> None:
        """Accept the next token."""

    def copy(self) -> Self:
        """Another one in the same state: what it accepts, this one has not seen."""

    @classmethod
    def find_allowed(cls, guides: Items[Self]) -> list[bool]:
        """Find the allowed tokens of guides that have accepted one, all at once. Returns whether each text is complete:
        only an end token could follow."""


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Draft(NamedTuple):
    """Guesses of a sequence's next tokens, which a step checks that is not read."""

    token_ids: list[int]  # one or more
    source: DraftSource
    masks: Items[TokenMask] = ()  # tokens that a guide allows after each guess


@dataclass(slots=True, eq=False)
class ScoredPart(Targets):
    """What a sequence scores, and the sequences that share its context."""

    context: "Sequence | None" = None  # the sequence with computed tokens from which it forks as it starts
    forks: "list[Sequence]" = field(default_factory=list)  # sequences whose context it is


@dataclass(slots=True, eq=False)
class SequenceFacts:
    """What only events and the metrics of a request say of a sequence. Times are those of perf_counter."""

    row_id: str | None = None  # the user's own
    arrived_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_cached_tokens: int = 0  # prompt tokens cached at its first admission, if it is the first of a request
    num_disk_tokens: int | None = None  # the part read from the prefix store; None: it uses none
    most_computed_tokens: int = 0  # the most before any preemption
    num_recomputed_tokens: int = 0  # computed, dropped by a preemption and computed again
    # one per prompt token, None for the first; if requested
    prompt_logprobs: "list[TokenLogprobs | None]" = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Tokens of one sample of one request. A request with n > 1 is n sequences.

    What only some sequences have is a part that only its own functions touch: targets (core.scoring), a group of beams
    (core.beams), a draft (core.drafts) and slots of recurrent state (core.states).
    """

    seq_id: int
    request_id: str
    token_ids: list[int]  # prompt, then output; the list that is given is copied
    params: SamplingParams
    _: KW_ONLY
    max_new_tokens: int
    seed: int = 0
    sample_index: int = 0
    eos_token_ids: frozenset[int] = frozenset()  # tokens that end this sequence; empty with ignore_eos
    cache_salt: str | None = None
    stop_checker: StopChecker | None = None
    guide: Guide | None = None
    prefixes: list[Prefix] = field(default_factory=list)  # one per full block hashed so far
    targets: ScoredPart | None = None  # tokens to score; such a sequence generates nothing
    is_private: bool = False  # the prefix store neither has nor gets its blocks
    facts: SequenceFacts = field(default_factory=SequenceFacts)

    # constants, which every step needs
    num_prompt_tokens: int = field(init=False)
    unwatched_end: int = field(init=False)  # tokens up to which only end tokens matter; 0: each has to be looked at
    end_token_ids: frozenset[int] = field(init=False)  # eos_token_ids and the stop tokens of the request
    penalized: bool = field(init=False)
    is_greedy: bool = field(init=False)  # the next token is the likeliest one, with nothing to adjust or to report

    logprobs: "list[TokenLogprobs]" = field(default_factory=list)  # one per output token, if requested
    group: "list[Sequence] | None" = None  # beams that are computed in the same steps, this one among them
    draft: Draft | None = None
    state: HeldSlots | None = None  # None: the model has no recurrent state, or the sequence does not run
    block_table: list[int | None] = field(default_factory=list)  # see core.groups; None: no later token sees it
    num_pending_tokens: int = 0  # sampled by launched steps, not yet read from the device
    num_computed_tokens: int = 0  # leading tokens that need no more computing
    num_cached_tokens: int = 0  # leading tokens found in the cache at the last admission
    num_writable_tokens: int = 0  # see core.prefix_lookup.CacheUser
    row: int | None = None  # row of the runner's persistent block tables; None: not running
    synced_blocks: int = 0  # leading entries of block_table that are in that row
    num_kept_tokens: int = 0  # tokens that the executor keeps for penalties, with the one being sampled

    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        params, self.token_ids = self.params, list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        is_watched = self.guide is not None or self.stop_checker is not None
        self.unwatched_end = 0 if is_watched else self.num_prompt_tokens + self.max_new_tokens
        self.end_token_ids = self.eos_token_ids.union(params.stop_token_ids or ())
        self.penalized = params.penalized
        changed = self.penalized or params.logit_bias or params.min_tokens or self.guide is not None
        self.is_greedy = params.greedy and params.logprobs is None and not changed and not self.is_beam

    @property
    def is_beam(self) -> bool:
        return self.params.beam_width is not None

    @property
    def num_context_tokens(self) -> int | None:
        """See core.prefix_lookup.CacheUser."""
        return None if self.targets is None else self.targets.num_context_tokens

    @property
    def context(self) -> "Sequence | None":
        """The sequence with computed tokens from which it forks as it starts."""
        return None if self.targets is None else self.targets.context

    @property
    def forks(self) -> "list[Sequence]":
        """Sequences whose context it is."""
        return [] if self.targets is None else self.targets.forks

    @property
    def guesses(self) -> Items[int]:
        """The tokens of its draft."""
        return () if self.draft is None else self.draft.token_ids

    @property
    def num_behind_tokens(self) -> int:
        """The last computed tokens, which the next step computes once more: see core.snapshots.HeldSlots."""
        return 0 if self.state is None else self.state.num_behind

    @property
    def num_tokens(self) -> int:
        """Prompt and output, including pending tokens."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens whose ids the host has read."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_rows(self) -> int:
        """Sequences that may run because this one does: a group needs room for all of it at once."""
        return self.params.beam_width or 1 if self.group is None else 1

    @property
    def is_unread(self) -> bool:
        """Whether a step in flight samples its next token or computes the last of its given ones."""
        return self.num_pending_tokens > 0 or self.num_computed_tokens == self.num_tokens

    @property
    def can_draft(self) -> bool:
        """Whether its next tokens can be guessed and checked in the step that computes its last one."""
        decodes = self.num_computed_tokens == len(self.token_ids) - 1 >= self.num_prompt_tokens
        return decodes and not self.is_beam and self.targets is None and not self.num_pending_tokens

    @property
    def num_coming_samples(self) -> int:
        """Samples that fork from it in the step that computes the end of its prompt."""
        is_first = self.sample_index == 0 and len(self.token_ids) == self.num_prompt_tokens
        return self.params.n - 1 if is_first and not self.is_beam else 0

    def num_logits(self, end: int) -> int:
        """Rows of logits that its tokens are sampled from, where a step computes its tokens up to `end`: one, and one
        for each guess."""
        num_drafted = 0 if self.draft is None else len(self.draft.token_ids)
        return 1 + num_drafted if end == self.num_tokens + num_drafted else 0

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def drop_computed(self) -> None:
        """Reset to not computed, as the blocks are released: everything is recomputed on the next admission."""
        self.facts.most_computed_tokens = max(self.facts.most_computed_tokens, self.num_computed_tokens)
        self.num_preemptions += 1
        self.draft = None
        self.num_computed_tokens = self.num_cached_tokens = self.num_pending_tokens = 0
        self.status = SequenceStatus.WAITING

    def drop_forks(self) -> "list[Sequence]":
        """No sequence forks from this one any more. Returns those that have to compute its tokens again."""
        if self.targets is None:
            return []
        forks, self.targets.forks = self.targets.forks, []
        for seq in forks:
            assert seq.targets is not None, "a continuation is scored"
            seq.targets.context = None
        waiting = [seq for seq in forks if seq.status is SequenceStatus.WAITING]
        for seq in waiting:
            seq.facts.most_computed_tokens = max(seq.facts.most_computed_tokens, self.num_tokens)
        return waiting

    def count_recomputed(self, num_new_tokens: int) -> int:
        """How many of the next tokens had been computed before a preemption; adds them to the count."""
        end = min(self.num_computed_tokens + num_new_tokens, self.facts.most_computed_tokens)
        count = max(0, end - self.num_computed_tokens)
        self.facts.num_recomputed_tokens += count
        return count

    def add_prompt_logprobs(self, first: int, logprobs: "list[TokenLogprobs]") -> None:
        """Log-probabilities of the prompt tokens from position `first` on; those of recomputed ones are the same."""
        if not self.facts.prompt_logprobs:
            self.facts.prompt_logprobs = [None] * self.num_prompt_tokens
        self.facts.prompt_logprobs[first : first + len(logprobs)] = logprobs

    def append_token(self, token_id: int) -> None:
        """Append a sampled token; sets finish_reason if it ends the sequence. Guide.find_allowed says whether it
        completes the text of a grammar."""
        self.token_ids.append(token_id)
        if len(self.token_ids) < self.unwatched_end and token_id not in self.end_token_ids:
            return
        num_output = self.num_output_tokens
        if num_output > self.params.min_tokens:
            if token_id in self.eos_token_ids:
                self.finish_reason = "stop"
            elif token_id in self.end_token_ids:
                self.finish_reason, self.stop_reason = "stop", token_id
        if self.finish_reason is None and self.stop_checker is not None:
            stop = self.stop_checker(token_id)
            if stop is not None and num_output > self.params.min_tokens:
                self.finish_reason, self.stop_reason = "stop", stop
        if self.finish_reason is None and self.guide is not None:
            self.guide.accept(token_id)
        if self.finish_reason is None and num_output >= self.max_new_tokens:
            self.finish_reason = "length"


@dataclass(slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities at one position: of the sampled token and of the likeliest ones."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One of the n samples of a request."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None  # the stop token or string that ended it
    logprobs: list[TokenLogprobs] | None  # one per token, if requested
    score: float | None = None  # beams only: sum of log-probabilities / length ** length_penalty

    @classmethod
    def of(cls, seq: Sequence) -> "SampleOutput":
        assert seq.finish_reason is not None, "only finished samples have an output"
        logprobs = seq.logprobs if seq.params.logprobs is not None else None
        return cls(seq.sample_index, seq.output_token_ids, seq.finish_reason, seq.stop_reason, logprobs)
