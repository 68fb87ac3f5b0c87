"""The first answer of `plan`: what a few rows from all over a long file let expect of it, before the rest is read."""

from dataclasses import dataclass, fields, replace
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedcli.batch.line_sample import About, LineSample
from pagedcli.cli.partings import part_verdicts
from pagedcli.cli.prompt_scan import PromptScan, scan_prompts
from pagedcli.config import EngineConfig, LoadedConfig
from pagedcli.printable import capitalized, expected_text, percent_text, plural
from pagedcli.show.tables import Fact, Format, print_tables, table

if TYPE_CHECKING:
    from pagedcli.models.spec import ModelSpec
    from pagedcli.planning.decision import Decision
    from pagedcli.simulation.sources import PromptRequests


NO_TIME = "no time: the first plan without --sample measures this machine"


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """What a sample lets expect of a file."""

    scan: PromptScan  # survey of the sample
    rows: About
    prompt_tokens: About
    generated_tokens: About
    hit_rate: float | None = None  # lower bound, as more rows have more beginnings in common; None: there is no engine
    seconds: About | None = None  # time of the run; None: there is no calibration
    decision: "Decision | None" = None
    refusal: str | None = None  # why there is no engine

    @property
    def in_words(self) -> str:
        """The answer in a sentence."""
        found = [f"about {_count(self.rows)} rows", f"{_count(self.prompt_tokens)} prompt tokens"]
        if self.hit_rate is not None:
            found.append(f"at least {percent_text(self.hit_rate)} of them found in the cache")
        if self.scan.num_bad:
            found.append(f"{percent_text(self.scan.num_bad / self.scan.num_rows)} of the rows bad")
        if self.seconds is not None:
            found[0] = f"{_time(self.seconds)} for {found[0]}"
        return f"{', '.join(found)}; from {plural(self.scan.num_rows, 'row')} spread over the file"

    @property
    def run(self) -> dict[str, Any]:
        """The expected run, as forecast_row has it."""
        if self.seconds is None:
            return dict.fromkeys(("seconds", "seconds_low", "seconds_high", "tokens_per_s")) | {"time_source": NO_TIME}
        seconds = {"seconds": self.seconds.value, "seconds_low": self.seconds.low, "seconds_high": self.seconds.high}
        return seconds | {"tokens_per_s": self.generated_tokens.value / max(self.seconds.value, 1e-9)}

    @property
    def facts(self) -> dict[str, Any]:
        """For JSON. Times are in seconds."""
        found = {"num_sampled_rows": self.scan.num_rows, "sampled_bad_row_codes": dict(self.scan.bad_codes)}
        for name in ("rows", "prompt_tokens", "generated_tokens", "seconds"):
            about: About | None = getattr(self, name)
            found[name] = None if about is None else {each.name: getattr(about, each.name) for each in fields(about)}
        return found | {"hit_rate_at_least": self.hit_rate}

    def print(self, format_: Format, engine: EngineConfig) -> None:
        """Write it to stdout, as all that is asked for."""
        rows = []
        if self.seconds is not None:
            rows.append(Fact("time", _time(self.seconds)))
        for what, about in (
            ("rows", self.rows),
            ("prompt tokens", self.prompt_tokens),
            ("tokens to generate", self.generated_tokens),
        ):
            rows.append(Fact(what, f"{_count(about)} ({_count_of(about.low)} to {_count_of(about.high)})"))
        if self.hit_rate is not None:
            rows.append(Fact("prompt tokens found in the cache", f"at least {percent_text(self.hit_rate)}"))
        rows.append(Fact("bad rows", percent_text(self.scan.num_bad / self.scan.num_rows)))
        notes = [f"bad row in the sample: {row['message']}" for row in self.scan.bad_rows[:1]]
        if self.seconds is None and self.hit_rate is not None:
            notes.append(NO_TIME)
        title = f"From {self.scan.num_rows:,} of about {_count(self.rows)} rows"
        tables = [] if format_ is Format.JSON else [table(Fact, "sample", title, rows, notes=notes)]
        drawn = replace(self.scan.drawn, num_seen=round(self.rows.value))
        verdicts = part_verdicts(drawn, engine, self.scan.tokenizer)
        in_short = [f"{capitalized(self.in_words)}."]
        print_tables(tables, format_, facts={"sample": self.facts}, verdicts=verdicts, in_short=in_short)


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
    from pagedcli.planning.step_time import load_step_time
    from pagedcli.simulation.forecast import forecast
    from pagedcli.simulation.forecast_tables import time_range
    from pagedcli.simulation.requests import largest_output, work_of

    limits = None if decision is None else decision.expected_plan.limits
    scan = scan_prompts(loaded, "", folder, spec, limits=limits, requests=requests, lines=sample)
    if not requests.workload.requests:
        return None
    prompt_tokens, generated, work = ([0.0] * scan.num_rows for _ in range(3))
    for request in requests.workload.requests:
        row = int(request.request_id.partition("/")[0])
        prompt_tokens[row] += request.num_prompt_tokens
        generated[row] += request.num_samples * min(request.num_output_tokens or 1, largest_output(request))
        work[row] += work_of(request)
    rows = sample.about([1.0] * scan.num_rows)
    answer = FirstAnswer(scan, rows, sample.about(prompt_tokens), sample.about(generated))
    if decision is None:
        return answer
    step_time, all_work = load_step_time(decision.time_key), sample.about(work)
    left_out = all_work.value - sum(work)
    read_ahead = loaded.config.run.read_ahead
    found = forecast(
        requests.workload,
        decision.expected_plan,
        step_time,
        reorder=loaded.config.run.reorder,
        read_ahead=read_ahead,
        left_out=left_out,
    )
    low, high = time_range(found, step_time)
    seconds = None
    if found.seconds is not None and low is not None and high is not None:
        seconds = _with_both(found.seconds, low, high, all_work)
    return replace(answer, hit_rate=found.hit_rate, seconds=seconds)


def _with_both(seconds: float, low: float, high: float, work: About) -> About:
    """A time with the doubts of the time of steps (`low` and `high`) and of the sample (`work`)."""
    by_sample = (work.high - work.value) / work.value
    down, up = hypot(1 - low / seconds, by_sample), hypot(high / seconds - 1, by_sample)
    return About(seconds, seconds * max(0.0, 1 - down), seconds * (1 + up))


def _time(about: About) -> str:
    return expected_text(about.value, about.low, about.high)


def _count(about: About) -> str:
    return _count_of(about.value)


def _count_of(value: float) -> str:
    """A number to three digits: a sample does not know more."""
    return f"{float(f'{value:.3g}'):,.0f}"
