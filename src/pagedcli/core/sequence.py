"""One sequence: its tokens, its blocks, and how it ended. Used by core, scheduler and sampler; needs no torch."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from enum import Enum, auto
from typing import Protocol

from pagedcli.core.prefixes import Prefix
from pagedcli.events import FinishReason
from pagedcli.sampling_params import SamplingParams

StopChecker = Callable[[int], str | None]
"""Receives each new token id of one sample; returns the stop string that its text now contains, or None."""


class Guide(Protocol):
    """Follows a grammar along the tokens of one sample. Its state depends on these tokens alone, so preemption does not
    affect it."""

    @property
    def allowed_tokens(self) -> bytes:
        """One bit per token id, lowest bit first: whether it may come next. At least one bit is set."""
        ...

    def accept(self, token_id: int) -> bool:
        """Accept the next token. Returns whether the text is complete: only an end token could follow."""
        ...


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Tokens of one sample of one request. A request with n > 1 is n sequences."""

    state_read: int | None  # slot of recurrent state that its last scheduled step starts from; None: from zero
    state_write: int | None  # slot of its state after that step

    __slots__ = (
        "admitted_s",
        "arrived_s",
        "block_table",
        "cache_salt",
        "candidates",
        "depends_on_tokens",
        "end_token_ids",
        "eos_token_ids",
        "finish_reason",
        "finished_s",
        "first_token_s",
        "group",
        "guide",
        "has_group",
        "is_beam",
        "is_greedy",
        "logprobs",
        "max_new_tokens",
        "max_num_tokens",
        "most_computed_tokens",
        "num_cached_prompt_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_kept_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "num_writable_tokens",
        "params",
        "penalized",
        "prefixes",
        "prompt_logprobs",
        "request_id",
        "row",
        "row_id",
        "sample_index",
        "seed",
        "seq_id",
        "state_read",
        "state_write",
        "status",
        "stop_checker",
        "stop_reason",
        "stop_token_ids",
        "synced_blocks",
        "token_ids",
        "total_logprob",
        "watched",
    )

    def __init__(
        self,
        seq_id: int,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_new_tokens: int,
        seed: int = 0,
        sample_index: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        cache_salt: str | None = None,
        stop_checker: StopChecker | None = None,
        guide: Guide | None = None,
        prefixes: list[Prefix] | None = None,
        arrived_s: float = 0.0,
        row_id: str | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.request_id = request_id
        self.row_id = row_id  # the user's own, for the events
        self.sample_index = sample_index
        self.params = params
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.cache_salt = cache_salt
        self.stop_checker, self.guide = stop_checker, guide
        self.eos_token_ids = eos_token_ids  # tokens that end this sequence; empty with ignore_eos
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids  # needed at each step, so computed once
        self.max_num_tokens = len(prompt_token_ids) + max_new_tokens
        self.penalized = params.penalized
        self.is_beam = self.has_group = params.beam_width is not None
        changed = self.penalized or params.logit_bias or params.min_tokens or guide is not None
        # whether the next token is the likeliest one, with nothing to adjust or to report
        self.is_greedy = params.greedy and params.logprobs is None and not changed and not self.is_beam
        # sampling the next token needs the ids of all earlier ones on the host; for penalties, the executor keeps them
        self.depends_on_tokens = guide is not None
        self.watched = self.depends_on_tokens or stop_checker is not None  # every token has to be looked at

        self.token_ids = list(prompt_token_ids)  # prompt and output
        self.num_prompt_tokens = len(prompt_token_ids)
        self.logprobs: list[TokenLogprobs] = []  # one per output token, if requested
        self.prompt_logprobs: list[TokenLogprobs | None] = []  # per prompt token, None for the first; if requested
        self.group: list[Sequence] | None = None  # computed in the same steps, this one among them
        self.candidates: Items[tuple[int, float]] = ()  # next tokens and their log-probabilities, likeliest first
        self.total_logprob = 0.0  # output tokens only

        self.block_table: list[int | None] = []  # see core.groups; None: released, as no later token sees it
        self.prefixes = prefixes or []
        self.num_pending_tokens = 0  # sampled by launched steps, not yet read from the device
        self.num_computed_tokens = 0  # leading tokens that need no more computing
        self.num_cached_tokens = 0  # leading tokens found in the cache at the last admission
        self.num_cached_prompt_tokens = 0  # prompt tokens cached at the first admission
        self.num_writable_tokens = 0  # see core.block_manager.CacheUser
        self.state_read = self.state_write = None
        self.row: int | None = None  # row of the runner's persistent block tables; None: not running
        self.synced_blocks = 0  # leading entries of block_table that are in that row
        self.num_kept_tokens = 0  # tokens that the executor keeps for penalties, with the one being sampled

        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None  # the stop token or string
        self.num_preemptions = 0
        self.most_computed_tokens = 0  # the most before any preemption
        self.num_recomputed_tokens = 0  # computed, dropped by a preemption and computed again
        self.arrived_s = arrived_s  # perf_counter times
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None

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
    def ends_when_read(self) -> bool:
        """Whether a pending token reaches the sequence's length limit."""
        return self.num_pending_tokens > 0 and self.num_tokens >= self.max_num_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def drop_computed(self) -> None:
        """Reset to not computed, as the blocks are released: everything is recomputed on the next admission."""
        self.most_computed_tokens = max(self.most_computed_tokens, self.num_computed_tokens)
        self.num_preemptions += 1
        self.num_computed_tokens = self.num_cached_tokens = self.num_pending_tokens = 0
        self.status = SequenceStatus.WAITING

    def count_recomputed(self, num_new_tokens: int) -> int:
        """How many of the next tokens had been computed before a preemption; adds them to the count."""
        end = min(self.num_computed_tokens + num_new_tokens, self.most_computed_tokens)
        count = max(0, end - self.num_computed_tokens)
        self.num_recomputed_tokens += count
        return count

    def add_prompt_logprobs(self, first: int, logprobs: "list[TokenLogprobs]") -> None:
        """Log-probabilities of the prompt tokens from position `first` on; those of recomputed ones are the same."""
        if not self.prompt_logprobs:
            self.prompt_logprobs = [None] * self.num_prompt_tokens
        self.prompt_logprobs[first : first + len(logprobs)] = logprobs

    def continue_from(self, parent: "Sequence") -> None:
        """Take the tokens of another beam of the same request."""
        self.token_ids = parent.token_ids.copy()
        self.logprobs = parent.logprobs.copy()

    def append_beam_token(self, token_id: int, total_logprob: float) -> None:
        """Append the token that the beam search chose."""
        self.token_ids.append(token_id)
        self.total_logprob = total_logprob

    def append_token(self, token_id: int) -> None:
        """Append a sampled token; sets finish_reason if it ends the sequence."""
        self.token_ids.append(token_id)
        if not (self.watched or token_id in self.end_token_ids or len(self.token_ids) >= self.max_num_tokens):
            return
        num_output = self.num_output_tokens
        if num_output > self.params.min_tokens:
            if token_id in self.eos_token_ids:
                self.finish_reason = "stop"
            elif token_id in self.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token_id
        if self.finish_reason is None and self.stop_checker is not None:
            stop = self.stop_checker(token_id)
            if stop is not None and num_output > self.params.min_tokens:
                self.finish_reason, self.stop_reason = "stop", stop
        if self.finish_reason is None and self.guide is not None and self.guide.accept(token_id):
            self.finish_reason = "stop"
        if self.finish_reason is None and num_output >= self.max_new_tokens:
            self.finish_reason = "length"


class TokenLogprobs:
    """Log-probabilities at one position: of the sampled token and of the likeliest ones."""

    __slots__ = ("logprob", "token_id", "top")

    def __init__(self, token_id: int, logprob: float, top: list[tuple[int, float]]) -> None:
        self.token_id = token_id
        self.logprob = logprob
        self.top = top  # (token id, logprob), likeliest first
