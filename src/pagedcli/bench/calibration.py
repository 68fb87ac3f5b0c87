"""Measures the time of steps on this machine: a few real ones of each kind, within seconds, made into a StepTime.

Used by `plan` and `bench`. Steps are those of the engine core, so that scheduling and sampling count.
"""

import copy
import io
import json
import random
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from statistics import mean, median

import msgspec

from pagedcli.batch.lines import Line
from pagedcli.batch.prompts import BatchOptions, Prompts, open_tokenizer
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import StreamSink
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.bench.spread import BusyWatch
from pagedcli.config import Config, EngineConfig
from pagedcli.core.steps import ScheduledStep
from pagedcli.errors import PagedcliError
from pagedcli.models.hub import weight_files
from pagedcli.native.system import HUGE_PAGE
from pagedcli.planning.decide import model_folder
from pagedcli.planning.decision import Decision
from pagedcli.planning.step_time import (
    StepTime,
    StepWork,
    attended_layers,
    load_step_time,
    made_of,
    save_step_time,
    why_not_kept,
)
from pagedcli.printable import plural
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

BUDGET_S = 10.0
LONG_CONTEXT = 2048  # tokens of the sequences that show what attention takes
NUM_LONG = 4  # sequences of a quarter of that, at least
MOST_BYTES = 2**30  # bytes of the KV cache for these, at most
NUM_SHARING = 64  # sequences that begin with the prompt of that length
REPEATS, QUICK = 10, 0.1  # times that prompts are served again, if that takes at most this share of the budget
ALIKE = 64  # tokens of context that make no difference to a decode
_SHORT = 4  # tokens of prompts whose decodes are measured
_FEW, _MANY, _QUICK_S = 4, 20, 0.005  # tokens that are generated: many, as in a run, if a step takes at most so long
_NUM_ROWS, _ROW_TEXT = 32, "It was a bright cold day in April, and the clocks were striking thirteen. "
_MOST_STEPS, _STEPS_S = 32, 0.3  # tokens of each row, and seconds of its steps, in a run that measures rows
_MANY_IDS, _ID = 512, 7  # tokens of a row of token ids, and each of them
_MOST_IDS = 64  # tokens of prompts and of answers of a run that confirms the measurement
_SHARE_OF_RUN = 0.1  # share of the budget for that run
_MOST_SCALED = 1.5  # times the measured times, at most, in that run
_TIMES = 5  # repetitions of what is done outside of steps
_LOOK_S = 0.25  # pause for other work before a disturbed calibration is measured again
_SHARE_OF_ONE = 0.05  # share of the budget for decodes of one sequence
_DISTURBED = 2.0  # times the median of its kind: of a step while the machine did something else
_FEWER = 8  # times fewer sequences with long contexts
_SEVERAL = 4  # sequences that end together, at least, to show what the end of one takes
_SHARE_OF_KNOTS = 0.6  # share of the budget for steps without much attention


def calibration_config(decision: Decision) -> EngineConfig:
    """The configuration with a pool for the measured steps, whatever pool was asked for, and without guesses, which
    would change what steps compute."""
    limits = decision.plan.limits
    longest = min(LONG_CONTEXT, limits.max_model_len)
    tables = limits.tables
    num_blocks = limits.max_num_seqs * tables.num_entries(_SHORT + _MANY) + 2 * tables.num_entries(longest)
    many_long = limits.max_num_seqs * tables.num_entries(longest // NUM_LONG + _MANY)
    num_blocks += min(many_long, MOST_BYTES // decision.plan.block_bytes)
    return msgspec.structs.replace(
        decision.config, num_gpu_blocks_override=num_blocks, kv_cache_memory=None, eviction="lru", speculation="off"
    )


def step_time_here(
    decision: Decision,
    *,
    may_calibrate: bool,
    say: Callable[[str], None] = lambda text: None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> tuple[StepTime | None, str]:
    """The time of the engine's steps on this machine: as measured before, or measured now and kept. And where it comes
    from, or why there is none."""
    config, key = decision.config, decision.time_key
    where = f"{key.processor}, {plural(key.threads, 'thread')}" if key.threads else key.processor
    found = load_step_time(key)
    if found is not None and not (found.disturbed and may_calibrate and _is_quiet()):
        runs = f" and {plural(found.num_runs, 'run')}" if found.num_runs else ""
        return found, f"measured on this machine ({where}) by a calibration{runs}"
    if not may_calibrate:
        return None, "no calibration of this model on this machine: plan without --no-calibrate makes one"
    folder = model_folder(config, weights=False)
    if config.load_format != "dummy" and not weight_files(folder):
        return None, f"{folder} has no weights, and times are measured with the model loaded"
    lost = why_not_kept()
    often = "once for machine and model" if lost is None else f"each time, as {lost} (set XDG_CACHE_HOME)"
    say(f"calibrating: loads {config.model} and times steps for up to {BUDGET_S:.0f} s; {often}")
    try:
        with LLMEngine(calibration_config(decision)) as engine:
            found = calibrate(engine, open_tokenizer(Config(engine=config), folder), on_progress=on_progress)
    except PagedcliError as error:
        return None, f"no calibration: {error.message}"
    save_step_time(key, found)
    return found, f"measured on this machine ({where}) by a calibration"


def _is_quiet() -> bool:
    """Whether this machine does little else at the moment."""
    watch = BusyWatch()
    time.sleep(_LOOK_S)
    busy = watch.read()
    return busy is None or not busy.disturbs


def calibrate(
    engine: LLMEngine,
    tokenizer: Tokenizer | None = None,
    *,
    budget_s: float | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> StepTime:
    """Measure an idle engine, by its clock. `tokenizer`: also measure what rows take outside of steps. `on_progress`
    receives the share of the budget that is used."""
    watch = BusyWatch()
    budget_s = BUDGET_S if budget_s is None else budget_s
    measurement = _Measurement(engine, budget_s, on_progress)
    measurement.run_steps()
    found = made_of(measurement.typical(), attended_layers(engine.plan.limits.groups))
    found = replace(found, first_use_s=measurement.first_use_s, row_s=measurement.end_s)
    if tokenizer is not None:
        found = _with_host_time(engine, tokenizer, found)
        found = _confirmed(engine, tokenizer, found, _SHARE_OF_RUN * budget_s)
    busy = watch.read()
    if busy is None or not busy.disturbs:
        return found
    return replace(found, disturbed=busy.others + busy.steal)


Kind = tuple[int, ...]
"""Steps that take the same time but for a few tokens of context."""


def _kind(work: StepWork) -> Kind:
    contexts = (work.attended_by_decodes / work.num_tokens // ALIKE, work.distinct / work.num_tokens // ALIKE)
    counts = (work.num_tokens, work.num_sampled, work.num_chunks)
    return (*counts, int(work.attended_by_prompts), *map(int, contexts))


def _usual(steps: list[tuple[StepWork, float]]) -> tuple[StepWork, float]:
    """The mean of steps of one kind, but for those that take over twice as long as the median."""
    work, middle_s = sorted(steps, key=lambda step: step[1])[(len(steps) - 1) // 2]
    return work, mean(seconds for _, seconds in steps if seconds <= _DISTURBED * middle_s)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts that are served together."""

    lengths: tuple[int, ...]  # tokens
    num_tokens: int  # tokens that each generates
    alike: bool = False  # whether prompts equal the longest one before up to their last tokens


@dataclass(slots=True)
class _Measurement:
    engine: LLMEngine
    budget_s: float
    on_progress: Callable[[float], None]
    steps: dict[Kind, list[tuple[StepWork, float]]] = field(default_factory=dict)
    _took_s: dict[_Prompts, float] = field(default_factory=dict)
    _started: float = field(default_factory=time.perf_counter)
    _draw: random.Random = field(default_factory=lambda: random.Random(0))
    _num_requests: int = 0
    _first_s: float = 0.0  # fastest decode before the measurement
    _longest: list[int] = field(default_factory=list)  # token ids of the longest prompt so far, of equal ones the last
    _ends: list[tuple[Kind, float, int]] = field(default_factory=list)  # steps in which all sequences of a run end
    _num_provided: int = 0  # blocks, the first ones, whose memory the system has provided
    _provided_s: float = 0.0  # seconds that providing them took

    def typical(self) -> list[tuple[StepWork, float]]:
        """One step of each kind."""
        return [_usual(steps) for steps in self.steps.values()]

    @property
    def end_s(self) -> float:
        """Seconds for each sequence that ends with a step."""
        found = [(seconds - _usual(self.steps[kind])[1]) / number for kind, seconds, number in self._ends]
        return max(0.0, median(found)) if found else 0.0

    @property
    def first_use_s(self) -> float:
        """Seconds for each block that is used for the first time."""
        return self._provided_s / max(1, self._num_provided)

    @property
    def _used(self) -> float:
        """Share of the budget."""
        return (time.perf_counter() - self._started) / self.budget_s

    def run_steps(self) -> None:
        """Each kind of step once, as far as the budget allows; then again and again the quick ones, so that what else
        the machine does for a moment falls on few steps of many kinds."""
        limits = self.engine.limits
        most_tokens = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
        self._run(_Prompts((_SHORT,), 4))  # threads, libraries and kernels start
        self._first_s = min(seconds for steps in self.steps.values() for work, seconds in steps if work.is_decode)
        self.steps.clear()
        self._ends.clear()
        self._took_s.clear()
        self._started = time.perf_counter()
        # small ones first: they are what most steps of a run are
        for number in _doublings(min(2, most_tokens), most_tokens):
            if number > 2 and self._last(prompts=True) > self._left(_SHARE_OF_KNOTS):
                break
            self._run(_Prompts((number,), 1))
        for number in _doublings(1, min(limits.max_num_seqs, limits.max_num_batched_tokens)):
            if number > 1 and (_FEW - 1) * self._last(prompts=False) > self._left(_SHARE_OF_KNOTS):
                break
            share = _SHARE_OF_ONE if number == 1 else 0.0
            num_tokens = self._num_decodes(self._last(prompts=False) or self._first_s, share)
            self._run(_Prompts((min(_SHORT, max(1, most_tokens // number)),) * number, num_tokens))
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
            self._run(_Prompts((longest,), num_tokens))
        each_s = second * (limits.block_size + num_tokens)  # a sequence computes what is not a full block, and decodes
        most = min(NUM_SHARING, int(0.3 * self._left(1.0) / each_s))
        sizes = [work.num_tokens for work, _ in self.typical() if work.is_decode and 1 < work.num_tokens <= most]
        if longest > 2 * _SHORT and sizes and self._shares:
            self._run(_Prompts((longest,) * max(sizes), num_tokens, alike=True))
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
                self._run(_Prompts((each,) * number, together(number)))

    def _repeat(self) -> None:
        for _ in range(REPEATS):
            for prompts, took_s in list(self._took_s.items()):
                if took_s < min(QUICK * self.budget_s, self._left(1.0)):
                    self._run(prompts)

    def _num_decodes(self, step_s: float, share: float = 0.0) -> int:
        """Tokens to generate in steps of so many seconds: many of quick ones, and of slow ones as many as take this
        share of the budget. The first decodes after a prompt are the slowest."""
        if step_s <= min(_QUICK_S, 1e-3 * self.budget_s):
            return _MANY
        return max(_FEW, min(_MANY, int(share * self.budget_s / step_s)))

    @property
    def _shares(self) -> bool:
        """Whether a prompt finds the beginning of another one in the cache, wherever they part."""
        return self.engine.block_manager.enable_prefix_caching and not self.engine.limits.num_state_slots

    def _last(self, *, prompts: bool) -> float:
        """Seconds of the largest step so far."""
        found = [(work.num_tokens, s) for work, s in self.typical() if prompts or work.is_decode]
        return max(found)[1] if found else 0.0

    def _left(self, share: float) -> float:
        """Seconds until this share of the budget is used."""
        return (share - self._used) * self.budget_s

    def _run(self, prompts: _Prompts) -> None:
        """Generate for random prompts of these lengths, and time every step."""
        engine, before = self.engine, time.perf_counter()
        self._add(prompts)
        most_tokens = [length + prompts.num_tokens for length in prompts.lengths]
        self._provide(sum(map(engine.limits.tables.num_entries, most_tokens)))
        num_decodes = 0  # sequences of the step before, if it was a decode
        last: tuple[Kind, float, int] | None = None  # (kind, seconds, sequences), if it is a decode as the one before
        for work, seconds in timed_steps(engine):
            # a decode after another step is slower: caches, tables and the end of sequences
            if work.is_decode and work.num_tokens != num_decodes:
                num_decodes, last = work.num_tokens, None
                continue
            kind = _kind(work)
            self.steps.setdefault(kind, []).append((replace(work, num_first_used=0), seconds))
            num_decodes, last = (work.num_tokens, (kind, seconds, num_decodes)) if work.is_decode else (0, None)
        if last is not None and num_decodes >= _SEVERAL and len(self.steps[last[0]]) > 1:
            self._ends.append(last)
            self.steps[last[0]].pop()
        self._took_s[prompts] = time.perf_counter() - before
        self.on_progress(min(1.0, self._used))

    def _add(self, prompts: _Prompts) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=prompts.num_tokens, ignore_eos=True)
        for length in prompts.lengths:
            self._num_requests += 1
            same = self._longest[: length - _SHORT] if prompts.alike else []
            vocab_size = self.engine.spec.vocab_size
            tokens = same + [self._draw.randrange(vocab_size) for _ in range(length - len(same))]
            if not prompts.alike and length >= len(self._longest):
                self._longest = tokens
            self.engine.add_request(str(self._num_requests), tokens, params)

    def _provide(self, num_blocks: int) -> None:
        """Touch the pages of so many more blocks, so that page faults are timed here and not in a step."""
        engine, first = self.engine, self._num_provided
        if not engine.plan.on_cpu:
            return
        cache = engine.runner.kv_cache
        each_page = max(1, HUGE_PAGE // cache[0, 0, 0].nbytes)  # blocks
        last = -(-(engine.block_manager.pool.num_touched + num_blocks) // each_page) * each_page
        self._num_provided = min(max(first, last), cache.shape[2])
        started_ns = engine.clock_ns()
        cache[:, :, first : self._num_provided].zero_()
        self._provided_s += 1e-9 * (engine.clock_ns() - started_ns)


def timed_steps(engine: LLMEngine) -> Iterator[tuple[StepWork, float]]:
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


def _with_host_time(engine: LLMEngine, tokenizer: Tokenizer, found: StepTime) -> StepTime:
    """Measure what rows take next to the steps, by a text, by prompts of token ids, and by small batch runs without the
    time of their steps."""
    text = _ROW_TEXT * 8
    ids = tokenizer.encode(text)
    encode_s = _typical_s(lambda: tokenizer.encode(text), engine.clock_ns)
    found = replace(
        found,
        prompt_token_s=_prompt_token_s(engine, tokenizer, found),
        text_token_s=encode_s / len(ids) if ids else 0.0,  # a tokenizer of no words has none
    )
    most = min(_MOST_STEPS, max(4, int(_STEPS_S / found.decodes[0][1])), engine.limits.max_model_len // 2)
    texts = [f"{index} {_ROW_TEXT}" for index in range(_NUM_ROWS)]
    few_s, rows_s = (
        median(_outside_of_steps(engine, tokenizer, found, texts, number) for _ in range(_TIMES)) / _NUM_ROWS
        for number in (2, most)
    )
    token_s = max(0.0, rows_s - few_s) / max(1, most - 2)
    return replace(found, output_token_s=token_s, row_s=found.row_s + max(0.0, rows_s - most * token_s))


def _prompt_token_s(engine: LLMEngine, tokenizer: Tokenizer, known: StepTime) -> float:
    """Seconds to read, submit and look up a token of a prompt whose tokens are in the cache, but for the last one."""
    size, most = engine.limits.block_size, min(_MANY_IDS, engine.limits.max_model_len - 2)
    num_ids = 1 + max(0, most - 1) // size * size
    serve = partial(_serve, engine, tokenizer)
    serve(num_ids)
    one_s, many_s = (_typical_s(partial(serve, number), engine.clock_ns) for number in (1, num_ids))
    attention_s = known.split(StepWork(1, 1, attended_by_decodes=num_ids, distinct=num_ids))["attention"]
    return max(0.0, many_s - one_s - attention_s) / max(1, num_ids - 1)


def _serve(engine: LLMEngine, tokenizer: Tokenizer, num_ids: int) -> None:
    """Read a row of so many token ids, and generate a token for it."""
    lines = [_line(0, {"prompt": [_ID] * num_ids})]
    options = BatchOptions(Config(sampling=SamplingParams(max_tokens=1, temperature=0)))
    for row in Prompts(lines, tokenizer, options, engine.limits):
        assert row is not None, "lines do not wait"
        engine.add_request("calibration", row.prompts[0].token_ids, row.prompts[0].params)
    while engine.has_unfinished_requests():
        engine.step()


def _line(index: int, row: dict[str, object]) -> Line:
    return Line(index, index + 1, json.dumps(row).encode(), index)


def _confirmed(engine: LLMEngine, tokenizer: Tokenizer, found: StepTime, seconds: float) -> StepTime:
    """The same times scaled to a short batch run, in which sequences start, end and sample in the same steps and rows
    are read and written between them: what that takes is much only next to quick steps."""
    if found.decodes[0][1] > _QUICK_S:
        return found
    draw, vocab_size = random.Random(0), engine.spec.vocab_size
    most = min(_MOST_IDS, engine.limits.max_model_len // 2)
    largest, steps_s = found.decodes[-1]
    each_s = most * (found.prompts[-1][1] / found.prompts[-1][0] + steps_s / largest)
    rows = [
        {
            "prompt": [draw.randrange(vocab_size) for _ in range(draw.randint(1, most))],
            "max_tokens": draw.randint(1, most),
            "temperature": index % 2,
        }
        for index in range(max(1, int(2 * seconds / each_s)))
    ]
    lines = [_line(index, row) for index, row in enumerate(rows)]
    works = list[StepWork]()
    engine.observe_work = lambda work: works.append(StepWork.of(work, engine.scheduler, found.layers))
    before, run_s = copy.copy(engine.stats), _batch_run_s(engine, tokenizer, lines, most)
    engine.observe_work = None
    num_prompt = engine.stats.num_prompt_tokens - before.num_prompt_tokens
    num_output = engine.stats.num_generated_tokens - before.num_generated_tokens
    predicted_s = sum(map(found.seconds, works)) + found.host_s(len(lines), num_prompt, num_output)
    return found.scaled(min(max(run_s / predicted_s, 1 / _MOST_SCALED), _MOST_SCALED))


def _typical_s(call: Callable[[], object], clock_ns: Callable[[], int]) -> float:
    """The median of some calls."""
    seconds = []
    for _ in range(_TIMES):
        started_ns = clock_ns()
        call()
        seconds.append(1e-9 * (clock_ns() - started_ns))
    return median(seconds)


def _outside_of_steps(
    engine: LLMEngine, tokenizer: Tokenizer, known: StepTime, texts: Items[str], num_tokens: int
) -> float:
    """Seconds of a batch run without those of its steps, and without what is known of the rest."""
    lines = [_line(index, {"prompt": text}) for index, text in enumerate(texts)]
    before = copy.copy(engine.stats)
    elapsed_s = _batch_run_s(engine, tokenizer, lines, num_tokens)
    num_prompt = engine.stats.num_prompt_tokens - before.num_prompt_tokens
    steps_s = 1e-9 * (engine.stats.steps_ns - before.steps_ns)
    return elapsed_s - steps_s - num_prompt * (known.prompt_token_s + known.text_token_s)


def _batch_run_s(engine: LLMEngine, tokenizer: Tokenizer, lines: list[Line], max_tokens: int) -> float:
    options = BatchOptions(Config(sampling=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)))
    rows = RowWriter(tokenizer, "model", "calibration", 0)
    run = BatchRun(engine, tokenizer, lines, StreamSink(io.BytesIO(), order="completion"), rows, options)
    started_ns = engine.clock_ns()
    run.run()
    return 1e-9 * (engine.clock_ns() - started_ns)
