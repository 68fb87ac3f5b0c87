"""When a run ends: what is left of it, with the time of steps on this machine, corrected by the steps that have run.

Used by cli.session; needs no torch. The requests in the engine are known with their lengths; rows that have not been
read are assumed to be like them.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from pagedcli.batch.stats import BatchStats
from pagedcli.core.engine_core import EngineCore
from pagedcli.core.scheduler import ScheduledStep
from pagedcli.core.sequence import Sequence
from pagedcli.planning.step_time import AttendedLayers, StepTime, StepWork

FIRST_S = 5.0  # seconds before the first prediction: the first steps are not like the others
_FIRST_STEPS, _EVERY = 64, 8  # these steps are compared with their predictions, then one of so many
_MOST_STEPS = 512  # compared, the newest ones
_LEAST_S = 0.5  # compared, from which something is learned
_LEAST_STEPS = 16  # fewest steps to fit a time of steps to
_NEWEST_STEPS = 64  # newest steps, by which a calibration is corrected
_MOST_SEQS = 1000  # sequences that are run down one by one; more are assumed to be like these
_SHARE = 200  # a prediction may take the 200th part of the time until the next one
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class _Left:
    """What a sequence has to do. Tokens."""

    num_prompt: float  # uncached prompt tokens
    num_output: float
    num_context: float  # tokens in the cache when its prompt is computed


class EndTime:
    """Watches a run, and predicts how long the rest of it takes. `step_time` None: this machine is not calibrated, and
    the time of steps is learned from those of the run."""

    def __init__(self, engine: EngineCore, step_time: StepTime | None, layers: tuple[AttendedLayers, ...]) -> None:
        self._engine = engine
        self._known = step_time
        self._layers = layers if step_time is None else step_time.layers
        self._num_seen = 0
        self._work: StepWork | None = None  # work of the running step
        self._steps_ns = 0  # time of all steps so far
        self._steps: deque[tuple[StepWork, float]] = deque(maxlen=_MOST_STEPS)
        self._compared_s, self._expected_s = 0.0, 0.0  # all compared steps: measured, predicted
        self._left_s: float | None = None
        self._left_at_s = 0.0  # elapsed time of the run at that prediction
        self._next_s = FIRST_S
        self.first: tuple[float, float] | None = None  # when the first prediction was made, and of the whole run

    def observe_work(self, work: ScheduledStep) -> None:
        """A step is about to be launched."""
        self._num_seen += 1
        if self._num_seen <= _FIRST_STEPS or self._num_seen % _EVERY == 0:
            self._work = StepWork.of(work, self._engine.scheduler, self._layers)

    def update(self, stats: BatchStats) -> None:
        """A step has ended."""
        steps_ns = stats.facts.steps_ns
        if self._work is not None:
            self._compare(self._work, 1e-9 * (steps_ns - self._steps_ns))
            self._work = None
        self._steps_ns = steps_ns
        if stats.elapsed_s >= self._next_s:
            self._predict(stats)

    def _compare(self, work: StepWork, seconds: float) -> None:
        self._steps.append((work, seconds))
        if self._known is not None:
            self._compared_s += seconds
            self._expected_s += self._known.seconds(work)

    @property
    def ratio(self) -> float | None:
        """Time of the run's steps over that of the calibration; None: there is none, or too little has run."""
        return self._compared_s / self._expected_s if self._compared_s >= _LEAST_S and self._expected_s else None

    def left_s(self, stats: BatchStats) -> float | None:
        """Seconds until the end of the run; None: not known (yet)."""
        if self._left_s is None:
            return None
        return max(0.0, self._left_s - (stats.elapsed_s - self._left_at_s))

    def _predict(self, stats: BatchStats) -> None:
        clock_ns = self._engine.clock_ns
        started_ns = clock_ns()
        step_time = self._step_time()
        if step_time is not None and stats.num_rows is not None:
            outside = stats.elapsed_s / max(1e-9, 1e-9 * self._steps_ns)  # rows take time, too
            self._left_s, self._left_at_s = outside * self._steps_left_s(stats, step_time), stats.elapsed_s
            self.first = self.first or (stats.elapsed_s, stats.elapsed_s + self._left_s)
        took_s = 1e-9 * (clock_ns() - started_ns)
        self._next_s = stats.elapsed_s + max(_AGAIN_S, _SHARE * took_s)

    def _step_time(self) -> StepTime | None:
        """The time of steps: as calibrated, corrected by the newest steps, or made of these alone."""
        if self._known is None:
            return _fitted(self._steps) if len(self._steps) >= _LEAST_STEPS else None
        newest = list(self._steps)[-_NEWEST_STEPS:]
        expected = sum(self._known.seconds(work) for work, _ in newest)
        return self._known.scaled(sum(seconds for _, seconds in newest) / expected) if expected else self._known

    def _steps_left_s(self, stats: BatchStats, step_time: StepTime) -> float:
        limits, facts, scheduler = self._engine.limits, stats.facts, self._engine.scheduler
        hazard = stats.num_stopped / max(1, facts.num_generated_tokens)
        running = [_left_of(seq, seq.num_computed_tokens, 0.0, hazard) for seq in scheduler.running]
        waiting = [part for seq in scheduler.waiting for part in _waiting(seq, facts.hit_rate, hazard)]
        num_started = max(
            1, stats.num_done - stats.num_failed - stats.num_deduplicated + self._engine.num_unfinished_requests
        )
        num_unread = max(0, (stats.num_rows or 0) - stats.num_finished - self._engine.num_unfinished_requests)
        known = sum(part.num_output for part in running + waiting)
        like = _Left(
            (facts.num_computed_tokens - facts.num_generated_tokens + sum(part.num_prompt for part in waiting))
            / num_started,
            (facts.num_generated_tokens + known) / num_started,
            (facts.num_prompt_tokens + sum(part.num_context for part in waiting)) / num_started,
        )
        simulated = min(num_unread, max(0, _MOST_SEQS - len(running) - len(waiting)))
        whole = like.num_context + like.num_output
        fitting = (limits.num_blocks or 1) * limits.block_size / max(1.0, whole - like.num_output / 2)
        slots = max(1, len(running), min(limits.max_num_seqs, int(fitting)))
        queue = [*waiting, *[like] * simulated]
        found_s, middle_s = _run_down(running, queue, slots, limits.max_num_batched_tokens, step_time)
        return found_s + (num_unread - simulated) * middle_s


def _left_of(seq: Sequence, num_computed: int, hit_rate: float, hazard: float) -> _Left:
    num_prompt = max(0, seq.num_prompt_tokens - num_computed) * (1 - hit_rate)
    limit = seq.max_new_tokens - seq.num_output_tokens
    return _Left(num_prompt, _expected(limit, hazard), seq.num_tokens)


def _waiting(seq: Sequence, hit_rate: float, hazard: float) -> Iterator[_Left]:
    """What a waiting sequence and the samples of its prompt have to do."""
    first = _left_of(seq, 0, hit_rate, hazard)
    yield first
    if not seq.num_output_tokens and not seq.is_beam:
        yield from [_Left(0.0, first.num_output, first.num_context)] * (seq.params.n - 1)


def _expected(limit: int, hazard: float) -> float:
    """Tokens that a sequence generates within a limit, if it ends by itself after each with this probability."""
    return max(1.0, float(limit) if hazard <= 0 else (1 - (1 - hazard) ** limit) / hazard)


def _run_down(
    running: Iterable[_Left], queue: list[_Left], num_slots: int, num_tokens: int, step_time: StepTime
) -> tuple[float, float]:
    """Seconds until all of these have ended, so many at a time, and the seconds that each of the queue added while all
    slots were taken. Prompts are computed in steps of `num_tokens`."""
    prompt_s = step_time.seconds(StepWork(num_tokens, 1, num_chunks=1)) / num_tokens
    ends: list[tuple[float, float]] = []  # (step in which a sequence ends, its context less that step's number)
    seconds = step = context = 0.0

    def start(part: _Left) -> float:
        nonlocal context
        heapq.heappush(ends, (step + part.num_output, part.num_context - step))
        context += part.num_context - step
        attended = part.num_prompt * (part.num_context - part.num_prompt / 2)
        return part.num_prompt * prompt_s + attended * step_time.attended_by_prompts_s

    for part in running:
        seconds += start(part)
    before_queue_s = seconds
    waiting = deque(queue)
    full_s = before_queue_s
    while ends or waiting:
        while waiting and len(ends) < num_slots:
            seconds += start(waiting.popleft())
        end, own = heapq.heappop(ends)
        steps, num_seqs = max(0.0, end - step), len(ends) + 1
        attended = context + num_seqs * (step + steps / 2)
        work = StepWork(num_seqs, num_seqs, attended_by_decodes=attended, distinct=attended)
        seconds += steps * step_time.seconds(work)
        step, context = max(step, end), context - own
        if waiting:
            full_s = seconds
    return seconds, (full_s - before_queue_s) / max(1, len(queue))


def _fitted(steps: Iterable[tuple[StepWork, float]]) -> StepTime:
    """A time of steps that grows evenly with tokens and context: the best plane through the steps of a run, or if they
    are too much alike for one, the mean step."""
    table = np.array([[1.0, work.num_tokens, work.attended_by_decodes, seconds] for work, seconds in steps])
    first, token_s, attended_s = np.linalg.lstsq(table[:, :-1], table[:, -1], rcond=1e-6)[0].tolist()
    if min(first + token_s, token_s, attended_s) < 0:
        first, token_s, attended_s = float(table[:, -1].mean()), 0.0, 0.0
    knots = ((1, first + token_s), (2, first + 2 * token_s))
    return StepTime(prompts=knots, decodes=knots, attended_by_prompts_s=0.0, attended_by_decodes_s=attended_s)
