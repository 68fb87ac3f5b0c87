"""The first answer of `plan`: what a few rows from all over a long file let expect of it, before the rest is read."""

from dataclasses import dataclass, replace
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING

from pagedcli.batch.line_sample import About, LineSample
from pagedcli.cli.prompt_scan import PromptScan, scan_prompts
from pagedcli.config import LoadedConfig
from pagedcli.printable import expected_text, percent_text, plural

if TYPE_CHECKING:
    from pagedcli.models.spec import ModelSpec
    from pagedcli.planning.decision import Decision
    from pagedcli.simulation.sources import PromptRequests


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """What a sample lets expect of a file."""

    scan: PromptScan  # survey of the sample
    rows: About
    prompt_tokens: About
    hit_rate: float | None = None  # lower bound, as more rows have more beginnings in common; None: there is no engine
    seconds: About | None = None  # time of the run; None: there is no calibration

    @property
    def in_words(self) -> str:
        """The answer in a sentence."""
        found = [f"about {_count(self.rows)} rows", f"{_count(self.prompt_tokens)} prompt tokens"]
        if self.hit_rate is not None:
            found.append(f"at least {percent_text(self.hit_rate)} of them found in the cache")
        if self.scan.num_bad:
            found.append(f"{percent_text(self.scan.num_bad / self.scan.num_rows)} of the rows bad")
        if self.seconds is not None:
            found[0] = f"{expected_text(self.seconds.value, self.seconds.low, self.seconds.high)} for {found[0]}"
        return f"{', '.join(found)}; from {plural(self.scan.num_rows, 'row')} spread over the file"


def first_answer(
    loaded: LoadedConfig,
    sample: LineSample,
    folder: Path,
    spec: "ModelSpec | None",
    decision: "Decision | None",
    requests: "PromptRequests",
) -> FirstAnswer | None:
    """What the sample lets expect. `requests` is empty, and receives those of the sample; `decision`: the engine, if a
    block fits. None: no row of the sample is valid."""
    from pagedcli.answers.time import time
    from pagedcli.planning.step_time import load_step_time
    from pagedcli.simulation.requests import work_of

    limits = None if decision is None else decision.expected_plan.limits
    scan = scan_prompts(loaded, "", folder, spec, limits=limits, requests=requests, lines=sample)
    if not requests.workload.requests:
        return None
    prompt_tokens, work = ([0.0] * scan.num_rows for _ in range(2))
    for request in requests.workload.requests:
        row = int(request.request_id.partition("/")[0])
        prompt_tokens[row] += request.num_prompt_tokens
        work[row] += work_of(request)
    rows = sample.about([1.0] * scan.num_rows)
    answer = FirstAnswer(scan, rows, sample.about(prompt_tokens))
    if decision is None:
        return answer
    step_time, all_work = load_step_time(decision.time_key), sample.about(work)
    left_out = all_work.value - sum(work)
    read_ahead = loaded.config.run.read_ahead
    found = time(
        requests.workload,
        decision.expected_plan,
        step_time,
        reorder=loaded.config.run.reorder,
        read_ahead=read_ahead,
        left_out=left_out,
    )
    seconds = None
    if found.seconds is not None and found.low is not None and found.high is not None:
        seconds = _with_both(found.seconds, found.low, found.high, all_work)
    return replace(answer, hit_rate=found.hit_rate, seconds=seconds)


def _with_both(seconds: float, low: float, high: float, work: About) -> About:
    """A time with the doubts of the time of steps (`low` and `high`) and of the sample (`work`)."""
    by_sample = (work.high - work.value) / work.value
    down, up = hypot(1 - low / seconds, by_sample), hypot(high / seconds - 1, by_sample)
    return About(seconds, seconds * max(0.0, 1 - down), seconds * (1 + up))


def _count(about: About) -> str:
    """A number to three digits: a sample does not know more."""
    return f"{float(f'{about.value:.3g}'):,.0f}"
