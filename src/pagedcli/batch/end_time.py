"""When a run ends: the tokens that are left of it, at the rate of the last minute.

Used by cli.session and bench; needs no torch. The requests in the engine are known with their lengths; rows that have
not been read are assumed to be like them.
"""

from collections import deque

from pagedcli.batch.stats import BatchStats
from pagedcli.core.engine_core import EngineCore
from pagedcli.core.scheduler import ScheduledStep
from pagedcli.core.sequence import Sequence
from pagedcli.planning.step_time import StepTime, StepWork

_FIRST_S = 5.0  # seconds before the first prediction: the first steps are not like the others
_RATE_S = 60  # seconds over which the rate is taken
_FIRST_STEPS, _EVERY = 64, 8  # these steps are compared with the calibration, then one of so many
_LEAST_S = 0.5  # seconds of compared steps that say something about the calibration


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
        self._marks: deque[tuple[float, int, int]] = deque([(0.0, 0, 0)], maxlen=_RATE_S)  # second, tokens, steps
        self._end_s: float | None = None
        self.first: tuple[float, float] | None = None  # when the first prediction was made, and of the whole run

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
        if stats.elapsed_s < self._marks[-1][0] + 1:
            return
        before_s, num_tokens, num_steps = self._marks[0]
        self._marks.append((stats.elapsed_s, facts.num_computed_tokens, facts.num_steps))
        if stats.num_rows is not None and stats.elapsed_s >= _FIRST_S and facts.num_computed_tokens > num_tokens:
            took_s, tokens, longest = stats.elapsed_s - before_s, *_left(self._engine, stats)
            token_s, step_s = took_s / (facts.num_computed_tokens - num_tokens), took_s / (facts.num_steps - num_steps)
            # few sequences are left in the end, and each still takes a step for a token
            self._end_s = stats.elapsed_s + max(tokens * token_s, longest * step_s)
            self.first = self.first or (stats.elapsed_s, self._end_s)

    @property
    def ratio(self) -> float | None:
        """Time of the run's steps over that of the calibration; None: there is none, or too little has run."""
        return self._compared_s / self._predicted_s if self._compared_s >= _LEAST_S and self._predicted_s else None

    def left_s(self, stats: BatchStats) -> float | None:
        """Seconds until the end of the run; None: not known (yet)."""
        return None if self._end_s is None else max(0.0, self._end_s - stats.elapsed_s)


def _left(engine: EngineCore, stats: BatchStats) -> tuple[float, float]:
    """(tokens that are left to compute, those of the longest sequence)."""
    facts, scheduler = stats.facts, engine.scheduler
    stop_share = stats.num_stopped / max(1, facts.num_generated_tokens)

    def outputs(seq: Sequence) -> float:
        """The tokens that it is expected to generate, if it can end by itself after each of them."""
        limit = seq.max_new_tokens - seq.num_output_tokens
        return max(1.0, (1 - (1 - stop_share) ** limit) / stop_share if stop_share else limit)

    num_tokens = 0.0
    for seq in scheduler.running:
        num_tokens += max(0, seq.num_prompt_tokens - seq.num_computed_tokens) + outputs(seq)
    for seq in scheduler.waiting:
        num_samples = 1 if seq.num_output_tokens or seq.is_beam else seq.params.n
        num_tokens += seq.num_prompt_tokens * (1 - facts.hit_rate) + num_samples * outputs(seq)
    num_unfinished = engine.num_unfinished_requests
    num_started = stats.num_done - stats.num_failed - stats.num_deduplicated + num_unfinished
    num_unread = max(0, (stats.num_rows or 0) - stats.num_finished - num_unfinished)
    each = (facts.num_computed_tokens + num_tokens) / max(1, num_started)
    return num_tokens + num_unread * each, max(map(outputs, scheduler.running), default=0.0)
