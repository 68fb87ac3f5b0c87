"""Measures the time of steps on this machine: a few real ones of each kind, within seconds, made into a StepTime.

Used by `plan` and `bench`. Steps are those of the engine core, so that scheduling and sampling count.
"""

import copy
import io
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import msgspec

from pagedcli.batch.lines import Line
from pagedcli.batch.prompts import BatchOptions, open_tokenizer
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import StreamSink
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.bench.rates import timed_seconds
from pagedcli.config import Config, EngineConfig
from pagedcli.core.plan import Plan
from pagedcli.errors import PagedcliError
from pagedcli.models.hub import weight_files
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.decide import model_folder
from pagedcli.planning.expected import time_key
from pagedcli.planning.step_time import (
    StepTime,
    StepWork,
    attended_layers,
    load_step_time,
    made_of,
    save_step_time,
)
from pagedcli.printable import plural
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

BUDGET_S = 10.0
LONG_CONTEXT = 2048  # tokens of the sequences that show what attention takes
NUM_LONG = 4  # sequences of a quarter of that
NUM_SHARING = 16  # sequences with one prompt of that length
REPEATS, QUICK_S = 5, 0.2  # steps of one kind, if one takes at most so long
RANDOM = 32  # sequences whose tokens are drawn
ALIKE = 64  # tokens of context that make no difference to a decode
_SHORT = 4  # tokens of prompts whose decodes are measured
_NUM_ROWS, _ROW_TEXT = 32, "It was a bright cold day in April, and the clocks were striking thirteen. "
_SHARE_OF_KNOTS = 0.6  # of the budget, for steps without much attention


def calibration_config(config: EngineConfig, plan: Plan) -> EngineConfig:
    """The configuration with a pool for the measured steps, whatever pool was asked for."""
    limits = plan.limits
    longest = min(LONG_CONTEXT, limits.max_model_len)
    tables = limits.tables
    num_blocks = limits.max_num_seqs * tables.num_entries(4 * _SHORT) + 2 * tables.num_entries(longest)
    return msgspec.structs.replace(config, num_gpu_blocks_override=num_blocks, kv_cache_memory=None, eviction="lru")


def step_time_here(
    config: EngineConfig,
    spec: ModelSpec,
    plan: Plan,
    *,
    may_calibrate: bool,
    say: Callable[[str], None] = lambda text: None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> tuple[StepTime | None, str]:
    """The time of the plan's steps on this machine: as measured before, or measured now and kept. And where it comes
    from, or why there is none."""
    key = time_key(config, spec, plan)
    where = f"{key.processor}, {plural(key.threads, 'thread')}" if key.threads else key.processor
    if (found := load_step_time(key)) is not None:
        runs = f" and {plural(found.num_runs, 'run')}" if found.num_runs else ""
        return found, f"measured on this machine ({where}) by a calibration{runs}"
    if not may_calibrate:
        return None, "no calibration of this model on this machine: plan without --no-calibrate makes one"
    folder = model_folder(config, weights=False)
    if config.load_format != "dummy" and not weight_files(folder):
        return None, f"{folder} has no weights, and times are measured with the model loaded"
    say(f"calibrating: loads {config.model} and times steps for up to {BUDGET_S:.0f} s; once for machine and model")
    try:
        with LLMEngine(calibration_config(config, plan)) as engine:
            found = calibrate(engine, open_tokenizer(Config(engine=config), folder), on_progress=on_progress)
    except PagedcliError as error:
        return None, f"no calibration: {error.message}"
    save_step_time(key, found)
    return found, f"measured on this machine ({where}) by a calibration"


def calibrate(
    engine: LLMEngine,
    tokenizer: Tokenizer | None = None,
    *,
    budget_s: float | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> StepTime:
    """Measure an idle engine, by its clock. `tokenizer`: also measure what rows take outside of steps. `on_progress`
    receives the share of the budget that is used."""
    measurement = _Measurement(engine, BUDGET_S if budget_s is None else budget_s, on_progress)
    measurement.run_steps()
    found = made_of(measurement.typical(), attended_layers(engine.plan.groups))
    return found if tokenizer is None else _with_host_time(engine, tokenizer, found)


Kind = tuple[int, ...]
"""Steps that take the same time but for a few tokens of context."""


def _kind(work: StepWork) -> Kind:
    contexts = (work.attended_by_decodes / work.num_tokens // ALIKE, work.distinct / work.num_tokens // ALIKE)
    counts = (work.num_tokens, work.num_sampled, work.num_random, work.num_chunks)
    return (*counts, int(work.attended_by_prompts), *map(int, contexts))


@dataclass(slots=True)
class _Measurement:
    engine: LLMEngine
    budget_s: float
    on_progress: Callable[[float], None]
    steps: dict[Kind, list[tuple[StepWork, float]]] = field(default_factory=dict)
    _started: float = field(default_factory=time.perf_counter)
    _draw: random.Random = field(default_factory=lambda: random.Random(0))
    _num_requests: int = 0

    def typical(self) -> list[tuple[StepWork, float]]:
        """The median of the steps of each kind, of two middle ones the faster."""
        return [sorted(steps, key=lambda step: step[1])[(len(steps) - 1) // 2] for steps in self.steps.values()]

    @property
    def _used(self) -> float:
        """Share of the budget."""
        return (time.perf_counter() - self._started) / self.budget_s

    def run_steps(self) -> None:
        limits = self.engine.limits
        most_tokens = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
        self._run([_SHORT], 2)  # threads, libraries and kernels start
        self.steps.clear()
        self._started = time.perf_counter()
        for number in _doublings(1, most_tokens):  # small ones first: they are what most steps of a run are
            if number > 1 and self._last(prompts=True) > self._left(_SHARE_OF_KNOTS):
                break
            self._repeat([number], 1)
        for number in _doublings(1, min(limits.max_num_seqs, limits.max_num_batched_tokens)):
            if number > 1 and 3 * self._last(prompts=False) > self._left(_SHARE_OF_KNOTS):
                break
            self._repeat([min(_SHORT, max(1, most_tokens // number))] * number, 4)
        self._measure_attention(most_tokens)
        for number in sorted({1, min(RANDOM, limits.max_num_seqs)}):
            self._repeat([_SHORT] * number, 4, temperature=1.0)

    def _measure_attention(self, most_tokens: int) -> None:
        """Long prompts, in chunks, and decodes after them, each as long as the budget allows."""
        limits = self.engine.limits
        largest = max(work.num_tokens for work, _ in self.typical())
        second = max(seconds for work, seconds in self.typical() if work.num_tokens == largest) / largest
        longest = min(LONG_CONTEXT, limits.max_model_len - 8, int(0.3 * self._left(1.0) / second))
        longest -= longest % most_tokens if longest > most_tokens else 0  # the last chunk is as large as the others
        if longest > 2 * _SHORT:
            self._run([longest], 6)
        if (each := longest // NUM_LONG) > 2 * _SHORT and limits.max_num_seqs >= NUM_LONG:
            self._run([each] * NUM_LONG, 6)
            self._run([each] * NUM_SHARING, 6, alike=True)

    def _last(self, *, prompts: bool) -> float:
        """Seconds of the largest step so far."""
        found = [(work.num_tokens, s) for work, s in self.typical() if prompts or work.is_decode]
        return max(found)[1] if found else 0.0

    def _left(self, share: float) -> float:
        """Seconds until this share of the budget is used."""
        return (share - self._used) * self.budget_s

    def _repeat(self, lengths: list[int], num_tokens: int, temperature: float = 0.0) -> None:
        for _ in range(REPEATS):
            before = time.perf_counter()
            self._run(lengths, num_tokens, temperature=temperature)
            if time.perf_counter() - before > QUICK_S * num_tokens or self._used > _SHARE_OF_KNOTS:
                break

    def _run(self, lengths: list[int], num_tokens: int, *, temperature: float = 0.0, alike: bool = False) -> None:
        """Generate for random prompts of these lengths, and time every step. `alike`: prompts are equal up to their
        last tokens."""
        engine = self.engine
        params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=0)
        tokens: list[int] = []
        for length in lengths:
            self._num_requests += 1
            if not (alike and tokens):
                tokens = [self._draw.randrange(engine.spec.vocab_size) for _ in range(length)]
            engine.add_request(str(self._num_requests), tokens, params)
        for work, seconds in timed_steps(engine):
            self.steps.setdefault(_kind(work), []).append((work, seconds))
        self.on_progress(min(1.0, self._used))


def timed_steps(engine: LLMEngine) -> Iterator[tuple[StepWork, float]]:
    """Run an engine until it is idle: the work and the seconds of each step."""
    layers, works = attended_layers(engine.plan.groups), list[StepWork]()
    engine.observe_work = lambda work: works.append(StepWork.of(work, engine.scheduler, layers))
    try:
        while engine.has_unfinished_requests():
            before_ns = engine.clock_ns()
            engine.step()
            seconds = 1e-9 * (engine.clock_ns() - before_ns)
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


def _with_host_time(engine: LLMEngine, tokenizer: Tokenizer, found: StepTime) -> StepTime:
    """Measure what rows take next to the steps: a small batch run, without the time of its steps."""
    text = _ROW_TEXT * 8
    ids = tokenizer.encode(text)
    encode_s = timed_seconds(lambda: tokenizer.encode(text), min_calls=3, min_seconds=0).min
    decode_s = timed_seconds(lambda: tokenizer.decode(ids, skip_special_tokens=True), min_calls=3, min_seconds=0).min
    contents = [json.dumps({"prompt": f"{index} {_ROW_TEXT}"}).encode() for index in range(_NUM_ROWS)]
    lines = [Line(index, index + 1, content, index) for index, content in enumerate(contents)]
    options = BatchOptions(defaults=SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    sink = StreamSink(io.BytesIO(), order="completion")
    rows = RowWriter(tokenizer, "model", "calibration", 0)
    run = BatchRun(engine, tokenizer, lines, sink, rows, options)
    before = copy.copy(engine.stats)
    started_ns = engine.clock_ns()
    run.run()
    elapsed_s = 1e-9 * (engine.clock_ns() - started_ns - engine.stats.steps_ns + before.steps_ns)
    num_prompt = engine.stats.num_prompt_tokens - before.num_prompt_tokens
    num_output = engine.stats.num_generated_tokens - before.num_generated_tokens
    each = 1 / max(1, len(ids))  # a folder without a tokenizer has one of no words
    found = replace(found, prompt_token_s=encode_s * each, output_token_s=decode_s * each)
    row_s = (elapsed_s - found.host_s(0, num_prompt, num_output)) / _NUM_ROWS
    return replace(found, row_s=max(0.0, row_s))
