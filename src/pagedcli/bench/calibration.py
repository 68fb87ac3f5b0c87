"""Measures the time of steps on this machine: a few real ones of each kind, within seconds, made into a StepTime.

Used by `plan`. Steps are those of the engine core, so that scheduling and sampling count.
"""

import io
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import mean, median

import msgspec

from pagedcli import planning, runner
from pagedcli.batch.lines import Line
from pagedcli.batch.prompts import BatchOptions, open_tokenizer
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import StreamSink
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.bench.spread import BusyWatch
from pagedcli.config import Config, EngineConfig
from pagedcli.core.steps import ScheduledStep
from pagedcli.errors import PagedcliError
from pagedcli.models.hub import model_folder, weight_files
from pagedcli.planning.step_time import (
    StepTime,
    StepWork,
    attended_layers,
    load_step_time,
    made_of,
    save_step_time,
    why_not_kept,
)
from pagedcli.printable import percent_text, plural
from pagedcli.sampling_params import SamplingParams

BUDGET_S = 10.0
LONG_CONTEXT = 2048  # tokens of the sequences that show what attention takes
NUM_LONG = 4  # sequences of a quarter of that, at least
MOST_BYTES = 2**30  # bytes of the KV cache for these, at most
MOST_TAKEN = 0.2  # share of all cores that other work takes: measurements with more are not kept
REPEATS, QUICK = 10, 0.1  # times that prompts are served again, if that takes at most this share of the budget
ALIKE = 64  # tokens of context that make no difference to a decode
_SHORT = 4  # tokens of prompts whose decodes are measured
_FEW, _MANY, _QUICK_S = 4, 20, 0.005  # tokens that are generated: many, as in a run, if a step takes at most so long
_NUM_ROWS, _ROW_TEXT = 32, "It was a bright cold day in April, and the clocks were striking thirteen. "
_LONGER = 8  # times the text of a row, in the rows that show what a token of a prompt takes
_TIMES, _MOST_ROWS_S = 3, 2.0  # runs of these rows, and seconds of the first one
_SHARE_OF_ONE = 0.05  # share of the budget for decodes of one sequence
_DISTURBED = 2.0  # times the median of its kind: of a step while the machine did something else
_FEWER = 8  # times fewer sequences with long contexts
_SHARE_OF_KNOTS = 0.6  # share of the budget for steps without much attention


def calibration_config(decision: "planning.decision.Decision") -> EngineConfig:
    """The configuration with a pool for the measured steps, whatever pool was asked for, and without guesses, which
    would change what steps compute."""
    limits = decision.plan.limits
    longest = min(LONG_CONTEXT, limits.max_model_len)
    tables = limits.tables
    num_blocks = limits.max_num_seqs * tables.num_entries(_SHORT + _MANY) + 2 * tables.num_entries(longest)
    many_long = limits.max_num_seqs * tables.num_entries(longest // NUM_LONG + _MANY)
    num_blocks += min(many_long, MOST_BYTES // decision.plan.block_bytes)
    return msgspec.structs.replace(
        decision.config, num_kvcache_blocks=num_blocks, kv_cache_memory=None, eviction="lru", speculation="off"
    )


def step_time_here(
    decision: "planning.decision.Decision",
    *,
    may_calibrate: bool,
    say: Callable[[str], None] = lambda text: None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> tuple[StepTime | None, str]:
    """The time of the engine's steps on this machine: as measured before, or measured now, and kept unless other work
    disturbed it. And where it comes from, or why there is none."""
    config, key = decision.config, decision.time_key
    where = f"{key.processor}, {plural(key.threads, 'thread')}" if key.threads else key.processor
    source = f"measured on this machine ({where})"
    if (found := load_step_time(key)) is not None:
        return found, source
    if not may_calibrate:
        return None, "no calibration of this model on this machine: plan without --no-calibrate makes one"
    folder = model_folder(config, weights=False)
    if config.load_format != "dummy" and not weight_files(folder):
        return None, f"{folder} has no weights, and times are measured with the model loaded"
    lost = why_not_kept()
    often = "once for machine and model" if lost is None else f"each time, as {lost} (set XDG_CACHE_HOME)"
    say(f"calibrating: loads {config.model} and times steps for up to {BUDGET_S:.0f} s; {often}")
    watch = BusyWatch()
    try:
        with runner.LLMEngine(calibration_config(decision)) as engine:
            found = calibrate(engine, open_tokenizer(Config(engine=config), folder), on_progress=on_progress)
    except PagedcliError as error:
        return None, f"no calibration: {error.message}"
    busy = watch.read()
    if busy is not None and (taken := busy.others + busy.steal) > MOST_TAKEN:
        say(f"the calibration is not kept, as other work took {percent_text(taken)} of this machine")
        return found, f"{source} while other work took {percent_text(taken)} of it: the next plan measures again"
    save_step_time(key, found)
    return found, source


def calibrate(
    engine: "runner.LLMEngine",
    tokenizer: Tokenizer | None = None,
    *,
    budget_s: float | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> StepTime:
    """Measure an idle engine, by its clock. `tokenizer`: also measure what rows take outside of steps. `on_progress`
    receives the share of the budget that is used."""
    measurement = _Measurement(engine, BUDGET_S if budget_s is None else budget_s, on_progress)
    measurement.run_steps()
    found = made_of(measurement.typical(), attended_layers(engine.plan.limits.groups))
    return found if tokenizer is None else _with_host_time(engine, tokenizer, found)


StepKind = tuple[int, ...]
"""Steps that take the same time but for a few tokens of context."""


def _kind(work: StepWork) -> StepKind:
    context = int(work.attended / work.num_tokens // ALIKE if work.is_decode else work.attended)
    return work.num_tokens, work.num_sampled, work.num_chunks, context


def _usual(steps: list[tuple[StepWork, float]]) -> tuple[StepWork, float]:
    """The mean of steps of one kind, but for those that take over twice as long as the median."""
    work, middle_s = sorted(steps, key=lambda step: step[1])[(len(steps) - 1) // 2]
    return work, mean(seconds for _, seconds in steps if seconds <= _DISTURBED * middle_s)


@dataclass(slots=True)
class _Measurement:
    engine: "runner.LLMEngine"
    budget_s: float
    on_progress: Callable[[float], None]
    steps: dict[StepKind, list[tuple[StepWork, float]]] = field(default_factory=dict)
    _took_s: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict)  # arguments of _run -> seconds
    _started: float = field(default_factory=time.perf_counter)
    _draw: random.Random = field(default_factory=lambda: random.Random(0))
    _num_requests: int = 0
    _first_s: float = 0.0  # fastest decode before the measurement

    def typical(self) -> list[tuple[StepWork, float]]:
        """One step of each kind."""
        return [_usual(steps) for steps in self.steps.values()]

    @property
    def _used(self) -> float:
        """Share of the budget."""
        return (time.perf_counter() - self._started) / self.budget_s

    def run_steps(self) -> None:
        """Each kind of step once, as far as the budget allows; then again and again the quick ones, so that what else
        the machine does for a moment falls on few steps of many kinds."""
        limits = self.engine.limits
        most_tokens = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
        self._run((_SHORT,), 4)  # threads, libraries and kernels start
        self._first_s = min(seconds for steps in self.steps.values() for work, seconds in steps if work.is_decode)
        self.steps.clear()
        self._took_s.clear()
        self._started = time.perf_counter()
        # small ones first: they are what most steps of a run are
        for number in _doublings(min(2, most_tokens), most_tokens):
            if number > 2 and self._last(prompts=True) > self._left(_SHARE_OF_KNOTS):
                break
            self._run((number,), 1)
        for number in _doublings(1, min(limits.max_num_seqs, limits.max_num_batched_tokens)):
            if number > 1 and (_FEW - 1) * self._last(prompts=False) > self._left(_SHARE_OF_KNOTS):
                break
            share = _SHARE_OF_ONE if number == 1 else 0.0
            num_tokens = self._num_decodes(self._last(prompts=False) or self._first_s, share)
            self._run((min(_SHORT, max(1, most_tokens // number)),) * number, num_tokens)
        self._measure_attention(most_tokens)
        self._repeat()

    def _measure_attention(self, most_tokens: int) -> None:
        """Long prompts, in chunks, and decodes after them, each as long as the budget allows."""
        limits = self.engine.limits
        largest = max(work.num_tokens for work, _ in self.typical())
        second = max(seconds for work, seconds in self.typical() if work.num_tokens == largest) / largest
        num_tokens = max(6, self._num_decodes(self._first_s))
        longest = min(LONG_CONTEXT, limits.max_model_len - num_tokens - 2, int(0.3 * self._left(1.0) / second))
        longest -= longest % most_tokens if longest > most_tokens else 0  # the last chunk is as large as the others
        if longest > 2 * _SHORT:
            self._run((longest,), num_tokens)
        if (each := longest // NUM_LONG) > 2 * _SHORT:
            decodes_s = num_tokens * self._last(prompts=False)
            most = max(NUM_LONG, int((0.3 * self._left(1.0) - decodes_s) / (each * second)))

            def together(number: int) -> int:
                """Tokens that each generates until the last one has joined the others, and some more."""
                num_steps = each * number / max(1, most_tokens - number // 2)  # the others generate meanwhile
                return min(ceil(num_steps) + num_tokens, limits.max_model_len - each)

            measured = {work.num_tokens for work, _ in self.typical() if work.is_decode}
            fitting = {
                number
                for number in measured
                if NUM_LONG <= number <= most
                and number * limits.tables.num_entries(each + together(number)) <= self.engine.plan.num_blocks
            }
            # a few, whose keys and values the processor may hold in its caches, and many
            for number in sorted(fitting & {max(fitting), max(fitting) // _FEWER}) if fitting else ():
                self._run((each,) * number, together(number))

    def _repeat(self) -> None:
        for _ in range(REPEATS):
            for (lengths, num_tokens), took_s in list(self._took_s.items()):
                if took_s < min(QUICK * self.budget_s, self._left(1.0)):
                    self._run(lengths, num_tokens)

    def _num_decodes(self, step_s: float, share: float = 0.0) -> int:
        """Tokens to generate in steps of so many seconds: many of quick ones, and of slow ones as many as take this
        share of the budget. The first decodes after a prompt are the slowest."""
        if step_s <= min(_QUICK_S, 1e-3 * self.budget_s):
            return _MANY
        return max(_FEW, min(_MANY, int(share * self.budget_s / step_s)))

    def _last(self, *, prompts: bool) -> float:
        """Seconds of the largest step so far."""
        found = [(work.num_tokens, s) for work, s in self.typical() if prompts or work.is_decode]
        return max(found)[1] if found else 0.0

    def _left(self, share: float) -> float:
        """Seconds until this share of the budget is used."""
        return (share - self._used) * self.budget_s

    def _run(self, lengths: tuple[int, ...], num_tokens: int) -> None:
        """Generate this number of tokens for each of some random prompts together, and time every step."""
        before, num_decodes = time.perf_counter(), 0  # sequences of the step before, if it was a decode
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for length in lengths:
            self._num_requests += 1
            tokens = [self._draw.randrange(self.engine.spec.vocab_size) for _ in range(length)]
            self.engine.add_request(str(self._num_requests), tokens, params)
        for work, seconds in timed_steps(self.engine):
            # a decode after another step is slower: caches, tables and the end of sequences
            if not work.is_decode or work.num_tokens == num_decodes:
                self.steps.setdefault(_kind(work), []).append((work, seconds))
            num_decodes = work.num_tokens if work.is_decode else 0
        self._took_s[lengths, num_tokens] = time.perf_counter() - before
        self.on_progress(min(1.0, self._used))


def timed_steps(engine: "runner.LLMEngine") -> Iterator[tuple[StepWork, float]]:
    """Run an engine until it is idle: the work and the seconds of each step, as the engine counts them."""
    layers, works, observed_ns = attended_layers(engine.plan.limits.groups), list[StepWork](), 0

    def observe(work: ScheduledStep) -> None:
        nonlocal observed_ns
        started_ns = engine.clock_ns()
        works.append(StepWork.of(work, engine.scheduler, layers))
        observed_ns += engine.clock_ns() - started_ns

    engine.observe_work = observe
    try:
        while engine.has_unfinished_requests():
            before_ns, observed_ns = engine.stats.steps_ns, 0
            engine.step()
            seconds = 1e-9 * (engine.stats.steps_ns - before_ns - observed_ns)
            if works:
                yield works.pop(), seconds
            works.clear()
    finally:
        engine.observe_work = None


def _doublings(first: int, last: int) -> list[int]:
    sizes = [first]
    while sizes[-1] * 2 < last:
        sizes.append(sizes[-1] * 2)
    return [*sizes, last] if last > sizes[-1] else sizes


# ---------------------------------------------------------------------- outside of steps


def _with_host_time(engine: "runner.LLMEngine", tokenizer: Tokenizer, found: StepTime) -> StepTime:
    """Measure what rows take next to the steps, by small batch runs of short and of long texts without the time of
    their steps."""
    num_tokens = len(tokenizer.encode(_ROW_TEXT))
    most, each_s = found.prompts[-1]
    rows_s = _NUM_ROWS * num_tokens * each_s / most  # seconds of their prompts
    longer = min(
        _LONGER, engine.limits.max_model_len // (2 * num_tokens + 2), int(_MOST_ROWS_S / (rows_s or _MOST_ROWS_S))
    )
    if longer < 2:  # next to such steps rows take no time
        return found
    few_s, many_s = (
        median(_outside_of_steps(engine, tokenizer, _ROW_TEXT * times) for _ in range(_TIMES)) for times in (1, longer)
    )
    token_s = max(0.0, many_s - few_s) / ((longer - 1) * num_tokens)
    return replace(found, prompt_token_s=token_s, row_s=max(0.0, few_s - num_tokens * token_s))


def _outside_of_steps(engine: "runner.LLMEngine", tokenizer: Tokenizer, text: str) -> float:
    """Seconds of a row in a batch run, without those of its steps."""
    rows = (json.dumps({"prompt": f"{index} {text}"}).encode() for index in range(_NUM_ROWS))
    lines = [Line(index, index + 1, row, index) for index, row in enumerate(rows)]
    options = BatchOptions(Config(sampling=SamplingParams(max_tokens=_FEW, temperature=0, ignore_eos=True)))
    writer = RowWriter(tokenizer, "model", "calibration", 0)
    run = BatchRun(engine, tokenizer, lines, StreamSink(io.BytesIO(), order="completion"), writer, options)
    started_ns, steps_ns = engine.clock_ns(), engine.stats.steps_ns
    run.run()
    return 1e-9 * (engine.clock_ns() - started_ns - engine.stats.steps_ns + steps_ns) / _NUM_ROWS
