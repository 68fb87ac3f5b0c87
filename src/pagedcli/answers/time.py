"""How long a run takes: its requests through the real scheduler, each step as long as it takes on this machine.

Counts are those of the run wherever output lengths are known. Used by `plan`, `simulate` and cures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import hypot

import numpy as np

from pagedcli.batch.run import PrefixWindow
from pagedcli.core.plan import Plan
from pagedcli.core.scheduler import Scheduler
from pagedcli.core.steps import ScheduledStep
from pagedcli.planning.step_time import StepTime, StepWork
from pagedcli.printable import expected_text
from pagedcli.simulation.requests import Request, Requests, work_of
from pagedcli.simulation.run import RunResult, Schedule, simulate

MOST_SIMULATED = 2**20  # work that is simulated of a file, see requests.work_of: some 5 seconds
MOST_IN_FULL = 2**18  # work that each trial of another setting simulates in full: about a second
SAMPLED = 2**17  # work that it simulates of a file with more
PARTS = ("prompts", "generation", "attention", "rows")
_FEWEST_PARTS, _MOST_PARTS = 4, 16  # parts of a sample; their differences say how far off it may be
_RANGE, _RANGE_S = 0.3, 0.1  # share of the time, and seconds, by which 18 of 20 runs differ at most


@dataclass(frozen=True, slots=True)
class Forecast:
    """A predicted run. Tokens unless another unit is named; of a whole file, if `share` of it was simulated."""

    num_requests: int  # served ones: prompts, not samples
    num_refused: int  # requests
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int  # sequences
    num_steps: int  # steps
    peak_used_blocks: int  # blocks
    seconds: float | None = None  # the whole run without loading; None: no step time was given
    first_row_s: float | None = None  # seconds until the first row is complete
    parts: dict[str, float] = field(default_factory=dict)  # seconds, see PARTS
    share: float = 1.0  # share of the work that was simulated; the rest is assumed to be like it
    sample_error: float = 0.0  # share of the time by which that may be off, in 19 of 20 files
    fewer_s: float = 0.0  # seconds that hits save at most, besides, if the rest hits more than was simulated
    more_s: float = 0.0  # seconds that they cost, if it hits no more than that

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that are found in the cache."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second."""
        return None if not self.seconds else self.num_generated_tokens / self.seconds

    @property
    def low(self) -> float | None:
        """The least seconds that are likely."""
        if self.seconds is None:
            return None
        least_s, by_sample = self.seconds - self.fewer_s, self.sample_error / (1 + self.sample_error)
        return max(0.0, least_s - hypot(least_s * _RANGE / (1 + _RANGE) + _RANGE_S, least_s * by_sample))

    @property
    def high(self) -> float | None:
        """The most seconds that are likely."""
        if self.seconds is None:
            return None
        most_s = self.seconds + self.more_s
        return most_s + hypot(most_s * _RANGE + _RANGE_S, most_s * self.sample_error)

    @property
    def in_words(self) -> str | None:
        """The time with its range; None: no step time was given."""
        if self.seconds is None or self.low is None or self.high is None:
            return None
        return expected_text(self.seconds, self.low, self.high)


def time(
    requests: Requests,
    plan: Plan,
    step_time: StepTime | None = None,
    *,
    reorder: str = "none",
    read_ahead: int | None = None,
    observe: Callable[[int], None] | None = None,
    left_out: float = 0.0,
    arrivals: Schedule | None = None,
) -> Forecast:
    """Simulate the requests of a batch run, all there from the start unless `arrivals` says when they come, on an
    engine with this plan.

    `reorder` and `read_ahead` are those of the run. `observe` receives the number of finished requests after each
    step. `left_out`: work of requests like these that the run has among them (see requests.work_of).
    """
    ordered = in_prefix_order(requests.requests) if reorder == "prefix" else requests.requests
    simulated = sum(map(work_of, ordered))
    share = simulated / (simulated + left_out) if left_out else 1.0
    timer = None if step_time is None else _Timer(step_time)
    schedule = arrivals or Schedule(step_time=timer, read_ahead=read_ahead)
    run = simulate(replace(requests, requests=ordered), plan, schedule, observe=observe)
    found = counts_of(run, share)
    if timer is None or step_time is None:
        return found
    num_rows, num_tokens = run.num_requests - run.num_refused, int(run.prompt_tokens[run.served()].sum())
    rows_s = num_rows * step_time.row_s + num_tokens * step_time.prompt_token_s
    return replace(
        found,
        seconds=(run.total_s + rows_s) / share,
        first_row_s=run.first_s + rows_s / max(1, num_rows),
        parts={name: each / share for name, each in {**timer.parts, "rows": rows_s}.items()},
        sample_error=_sample_error(run, ordered, share),
    )


def with_hits_of_all(found: Forecast, *, ideal_of_sample: float, ideal_of_all: float) -> Forecast:
    """The forecast of a sample, where fewer earlier prompts begin as each does than among all rows. `ideal_*`: their
    hit rates with an unlimited cache. All rows are taken to reach as much of theirs as the sample does of its own."""
    low, most = found.hit_rate, max(ideal_of_all, found.hit_rate)
    likely = min(most, max(low, ideal_of_all * low / ideal_of_sample if ideal_of_sample else ideal_of_all))
    prompts_s = found.parts.get("prompts", 0.0)

    def computed_s(rate: float) -> float:
        """What the computed tokens of the prompts take at a hit rate."""
        return prompts_s * (1 - rate) / max(1 - low, 1e-9)

    saved_s, more = prompts_s - computed_s(likely), round((likely - low) * found.num_prompt_tokens)
    return replace(
        found,
        num_cached_tokens=found.num_cached_tokens + more,
        num_computed_tokens=found.num_computed_tokens - more,
        seconds=None if found.seconds is None else found.seconds - saved_s,
        parts=found.parts | ({"prompts": computed_s(likely)} if found.parts else {}),
        fewer_s=computed_s(likely) - computed_s(most),
        more_s=saved_s,
    )


def _sample_error(run: RunResult, requests: Sequence[Request], share: float) -> float:
    """How far the whole may be from a sample with this share of its work: by the time that each part of the sample took
    for its work, from when its first requests started to when those of the next part did."""
    served = np.flatnonzero(run.served())
    if share == 1.0 or len(served) < 2 * _FEWEST_PARTS or not run.total_s:
        return 0.0
    at_once = min(run.plan.limits.max_num_seqs, len(served) // (2 * _FEWEST_PARTS))  # these start together
    num = min(_MOST_PARTS, max(_FEWEST_PARTS, len(served) // (2 * at_once)))
    starts = np.arange(num + 1) * (len(served) - at_once) // num
    all_work = np.array([work_of(request) for request in requests])[served]
    work = np.add.reduceat(all_work, starts)[:-1]
    times = np.diff([np.asarray(run.waited_s)[served[start : start + at_once]].mean() for start in starts])
    if not times.sum():  # all parts started at once: their differences say nothing
        return 0.0
    off = times - times.sum() / work.sum() * work
    quantile = 2 + 4 / (num - 1)  # nearly that of Student's distribution
    return float(quantile * np.sqrt(num / (num - 1) * (off**2).sum() * (1 - share)) / times.sum())


def counts_of(run: RunResult, share: float = 1.0) -> Forecast:
    """The counts of a simulated run with this share of the work, without times."""
    facts = run.facts

    def whole(count: int) -> int:
        return round(count / share)

    return Forecast(
        num_requests=whole(run.num_requests - run.num_refused),
        num_refused=whole(run.num_refused),
        num_prompt_tokens=whole(int(run.prompt_tokens[run.served()].sum())),
        num_cached_tokens=whole(run.hit_tokens()[0]),
        num_generated_tokens=whole(facts.num_generated_tokens),
        num_computed_tokens=whole(facts.num_computed_tokens),
        num_recomputed_tokens=whole(facts.num_recomputed_tokens),
        num_preemptions=whole(facts.num_preemptions),
        num_steps=whole(facts.num_steps),
        peak_used_blocks=facts.peak_used_blocks,
        share=share,
    )


class _Timer:
    """A step time that also sums up what the time is for."""

    def __init__(self, step_time: StepTime) -> None:
        self._step_time = step_time
        self.parts = dict.fromkeys(PARTS, 0.0)

    def __call__(self, work: ScheduledStep, scheduler: Scheduler) -> int:
        parts = self._step_time.split(StepWork.of(work, scheduler, self._step_time.layers))
        for name, seconds in parts.items():
            self.parts[name] += seconds
        return round(1e9 * sum(parts.values()))


# ---------------------------------------------------------------------- the order of a run


def in_prefix_order(requests: Sequence[Request]) -> list[Request]:
    """The requests of a prompt file in the order in which `--reorder prefix` starts them."""
    rows: dict[str, list[Request]] = {}
    for request in requests:
        rows.setdefault(request.request_id.partition("/")[0], []).append(request)
    window: PrefixWindow[list[Request]] = PrefixWindow()
    ordered: list[Request] = []
    for prompts in rows.values():
        window.add(prompts, [prompt.token_ids for prompt in prompts], prompts[0].cache_salt)
        if window.full:
            ordered += _taken(window)
    return ordered + _taken(window)


def _taken(window: PrefixWindow[list[Request]]) -> list[Request]:
    found: list[Request] = []
    while (prompts := window.take(partial=True)) is not None:
        found += prompts
    return found
