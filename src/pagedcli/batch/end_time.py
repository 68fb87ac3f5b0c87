"""When a run ends: the tokens that are left of it, at the rate of the last minute.

Used by cli.session and bench; needs no torch. The requests in the engine are known with their lengths; rows that have
not been read are assumed to be like them. Of a calibration serves what a token of a prompt takes next to a generated
one: a run begins with more of its prompts than of its outputs.
"""

from collections import deque
from typing import NamedTuple

from pagedcli.batch.stats import BatchStats
from pagedcli.core.engine_core import EngineCore
from pagedcli.core.sequence import Sequence
from pagedcli.core.steps import ScheduledStep
from pagedcli.planning.step_time import StepTime, StepWork

_FIRST_S = 5.0  # seconds before the first prediction: the first steps are not like the others
_RATE_S = 60  # seconds over which the rate is taken
_FIRST_STEPS, _EVERY = 64, 8  # these steps are compared with the calibration, then one of so many
_RATE_DOUBT = 0.1  # share by which the rate of the rest differs from that of the last minute in 19 of 20 runs
_LEAST_S = 0.5  # seconds of compared steps that say something about the calibration


class _Mark(NamedTuple):
    """What a run had done at a time. Tokens, but for the steps."""

    elapsed_s: float = 0.0
    num_prompt: int = 0
    num_generated: int = 0
    num_steps: int = 0


class EndTime:
    """Watches a run, and predicts how long the rest of it takes. `step_time`: the calibration that its steps are
    compared with, if there is one."""

    def __init__(self, engine: EngineCore, step_time: StepTime | None) -> None:
        self._engine = engine
        self._known = step_time
        self._num_seen = 0  # steps
        self._expected_s: float | None = None  # calibrated time of the running step, if it is compared
        self._steps_ns = 0
        self._compared_s, self._predicted_s = 0.0, 0.0  # all compared steps
        self._marks: deque[_Mark] = deque([_Mark()], maxlen=_RATE_S)
        self._end_s: float | None = None
        self._range_s = 0.0, 0.0  # the earliest and the latest end that are likely
        # time of the first prediction, the whole run that it predicts, and its shortest and longest likely time
        self.first: tuple[float, float, float, float] | None = None

    def observe_work(self, work: ScheduledStep) -> None:
        """A step is about to be launched."""
        self._num_seen += 1
        if self._known is not None and (self._num_seen <= _FIRST_STEPS or self._num_seen % _EVERY == 0):
            self._expected_s = self._known.seconds(StepWork.of(work, self._engine.scheduler, self._known.layers))

    def update(self, stats: BatchStats) -> None:
        """A step has ended."""
        facts = stats.facts
        if self._expected_s is not None:
            self._compared_s += 1e-9 * (facts.steps_ns - self._steps_ns)
            self._predicted_s += self._expected_s
            self._expected_s = None
        self._steps_ns = facts.steps_ns
        if stats.elapsed_s < self._marks[-1].elapsed_s + 1:
            return
        before = self._marks[0]
        now = _Mark(stats.elapsed_s, facts.num_computed_given, facts.num_generated_tokens, facts.num_steps)
        self._marks.append(now)
        done = self._work(now.num_prompt - before.num_prompt, now.num_generated - before.num_generated)
        if stats.num_rows is not None and stats.elapsed_s >= _FIRST_S and done > 0:
            took_s, num_stopped = now.elapsed_s - before.elapsed_s, stats.num_stopped

            def left_s(num_stopped: float) -> float:
                prompts, generated, longest = _left(self._engine, stats, num_stopped)
                # few sequences are left in the end, and each still takes a step for a token
                least_s = longest * took_s / (now.num_steps - before.num_steps)
                return max(self._work(prompts, generated) * took_s / done, least_s)

            self._end_s = stats.elapsed_s + left_s(num_stopped)
            # so many would have stopped at the ends of the rate's 95 % interval; none has: up to three
            few, many = num_stopped + 2 - 2 * (num_stopped + 1) ** 0.5, num_stopped + 2 + 2 * (num_stopped + 1) ** 0.5
            low_s, high_s = left_s(many) * (1 - _RATE_DOUBT), left_s(max(0.0, few)) * (1 + _RATE_DOUBT)
            self._range_s = stats.elapsed_s + low_s, stats.elapsed_s + high_s
            self.first = self.first or (stats.elapsed_s, self._end_s, *self._range_s)

    def _work(self, num_prompt: float, num_generated: float) -> float:
        """Calibrated seconds for so many tokens, at today's number of sequences; the tokens if nothing is known."""
        if self._known is None:
            return num_prompt + num_generated
        most, running = self._engine.limits.max_num_batched_tokens, self._engine.scheduler.running
        num_seqs, context = max(1, len(running)), sum(seq.num_tokens for seq in running)
        prompts_s = self._known.seconds(StepWork(most, 1, num_chunks=1))
        decodes_s = self._known.seconds(StepWork(num_seqs, num_seqs, attended_by_decodes=context, distinct=context))
        return num_prompt * prompts_s / most + num_generated * decodes_s / num_seqs

    @property
    def ratio(self) -> float | None:
        """Time of the run's steps over that of the calibration; None: there is none, or too little has run."""
        return self._compared_s / self._predicted_s if self._compared_s >= _LEAST_S and self._predicted_s else None

    def left_s(self, stats: BatchStats) -> float | None:
        """Seconds until the end of the run; None: not known (yet)."""
        return None if self._end_s is None else max(0.0, self._end_s - stats.elapsed_s)

    def left_range_s(self, stats: BatchStats) -> tuple[float, float] | None:
        """The fewest and the most seconds until the end that are likely; None: not known (yet)."""
        low_s, high_s = (max(0.0, each - stats.elapsed_s) for each in self._range_s)
        return None if self._end_s is None else (low_s, high_s)


def _left(engine: EngineCore, stats: BatchStats, num_stopped: float) -> tuple[float, float, float]:
    """(tokens of prompts that are left to compute, tokens to generate, those of the longest sequence), if so many
    sequences have stopped by themselves so far."""
    facts, scheduler = stats.facts, engine.scheduler
    share = min(1.0, num_stopped / max(1, facts.num_generated_tokens))

    def outputs(seq: Sequence) -> float:
        """The tokens that it is expected to generate, if it can end by itself after each of them."""
        if seq.targets is not None:
            return 0.0
        limit = seq.max_new_tokens - seq.num_output_tokens
        stop_share = share if seq.end_token_ids or seq.stop_checker is not None else 0.0
        return max(1.0, (1 - (1 - stop_share) ** limit) / stop_share if stop_share else limit)

    prompts = generated = 0.0
    for seq in scheduler.running:
        prompts += max(0, seq.num_prompt_tokens - seq.num_computed_tokens) + _num_to_fork(seq)
        generated += outputs(seq)
    for seq in scheduler.waiting:
        num_known = seq.num_prompt_tokens * facts.hit_rate if seq.context is None else seq.context.num_prompt_tokens
        prompts += seq.num_prompt_tokens - num_known + _num_to_fork(seq)
        generated += outputs(seq) * (1 if seq.num_output_tokens or seq.is_beam else seq.params.n)
    num_unfinished = engine.num_unfinished_requests
    num_started = max(1, stats.num_done - stats.num_failed - stats.num_deduplicated + num_unfinished)
    unread = max(0, (stats.num_rows or 0) - stats.num_finished - num_unfinished) / num_started
    prompts += unread * (facts.num_computed_given + prompts)
    generated += unread * (facts.num_generated_tokens + generated)
    return prompts, generated, max(map(outputs, scheduler.running), default=0.0)


def _num_to_fork(seq: Sequence) -> int:
    """The tokens of continuations that will fork from a context."""
    return 0 if seq.targets is None or seq.forks else seq.targets.num_fork_tokens
