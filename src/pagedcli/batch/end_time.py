"""When a run ends: the tokens that are left of it, at the rate of the last minute.

Used by cli.session; needs no torch. The requests in the engine are known with their lengths; rows that have not been
read are assumed to be like them.
"""

from collections import deque
from typing import NamedTuple

from pagedcli.batch.stats import BatchStats
from pagedcli.core.engine_core import EngineCore
from pagedcli.core.sequence import Sequence

_FIRST_S = 5.0  # seconds before the first prediction: the first steps are not like the others
_RATE_S = 60  # seconds over which the rate is taken


class _Mark(NamedTuple):
    """What a run had done at a time."""

    elapsed_s: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0


class EndTime:
    """Watches a run, and predicts how long the rest of it takes."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._marks: deque[_Mark] = deque([_Mark()], maxlen=_RATE_S)
        self._end_s: float | None = None

    def update(self, stats: BatchStats) -> None:
        """A step has ended."""
        if stats.elapsed_s < self._marks[-1].elapsed_s + 1:
            return
        facts, before = stats.facts, self._marks[0]
        now = _Mark(stats.elapsed_s, facts.num_computed_given + facts.num_generated_tokens, facts.num_steps)
        self._marks.append(now)
        if stats.num_rows is not None and stats.elapsed_s >= _FIRST_S and now.num_tokens > before.num_tokens:
            num_tokens, longest = _left(self._engine, stats)
            took_s = now.elapsed_s - before.elapsed_s
            # few sequences are left in the end, and each still takes a step for a token
            least_s = longest * took_s / (now.num_steps - before.num_steps)
            self._end_s = stats.elapsed_s + max(num_tokens * took_s / (now.num_tokens - before.num_tokens), least_s)

    def left_s(self, stats: BatchStats) -> float | None:
        """Seconds until the end of the run; None: not known (yet)."""
        return None if self._end_s is None else max(0.0, self._end_s - stats.elapsed_s)


def _left(engine: EngineCore, stats: BatchStats) -> tuple[float, float]:
    """(tokens that are left to compute or generate, those that the longest sequence will generate), if sequences stop
    by themselves as often as so far."""
    facts, scheduler = stats.facts, engine.scheduler
    share = min(1.0, stats.num_stopped / max(1, facts.num_generated_tokens))

    def outputs(seq: Sequence) -> float:
        """The tokens that it is expected to generate, if it can end by itself after each of them."""
        if seq.targets is not None:
            return 0.0
        limit = seq.max_new_tokens - seq.num_output_tokens
        stop_share = share if seq.end_token_ids or seq.stop_checker is not None else 0.0
        return max(1.0, (1 - (1 - stop_share) ** limit) / stop_share if stop_share else limit)

    tokens = 0.0
    for seq in scheduler.running:
        tokens += max(0, seq.num_prompt_tokens - seq.num_computed_tokens) + _num_to_fork(seq) + outputs(seq)
    for seq in scheduler.waiting:
        num_known = seq.num_prompt_tokens * facts.hit_rate if seq.context is None else seq.context.num_prompt_tokens
        tokens += seq.num_prompt_tokens - num_known + _num_to_fork(seq)
        tokens += outputs(seq) * (1 if seq.num_output_tokens or seq.is_beam else seq.params.n)
    num_unfinished = engine.num_unfinished_requests
    num_without = stats.num_failed + stats.num_deduplicated + stats.num_reused
    num_started = max(1, stats.num_done - num_without + num_unfinished)
    unread = max(0, (stats.num_rows or 0) - stats.num_finished - num_unfinished) / num_started
    done = facts.num_computed_given + facts.num_generated_tokens
    return tokens + unread * (done + tokens), max(map(outputs, scheduler.running), default=0.0)


def _num_to_fork(seq: Sequence) -> int:
    """The tokens of continuations that will fork from a context."""
    return 0 if seq.targets is None or seq.forks else seq.targets.num_fork_tokens
