"""One simulated run: a workload through the real scheduler and block manager at one pool size, on a virtual clock.

The engine core is the real one; its executor computes nothing.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from pagedcli.batch.run import InWork
from pagedcli.core.engine_core import EngineCore
from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.core.requests import FinishedRequest
from pagedcli.core.sampling_input import SamplingInput
from pagedcli.core.scheduler import Scheduler
from pagedcli.core.sequence import Sequence
from pagedcli.core.step_input import StepInput, StepTokens
from pagedcli.core.steps import ScheduledStep
from pagedcli.errors import RequestError
from pagedcli.events import Emit
from pagedcli.sampling_params import SamplingParams
from pagedcli.simulation.caches import Bools, Ints, num_warmup
from pagedcli.simulation.requests import Request, Requests, early_ends, largest_output, synthetic_prefixes
from pagedcli.trace.state import PoolState

StepClock = Callable[[ScheduledStep, Scheduler], int]
"""Nanoseconds that a scheduled step takes."""

STEP_NS = 10**9  # duration of a step without a step time: the seconds of such a run are steps
FIRST_UNKNOWN = 2**40  # tokens that are not known have numbers from here on: above every vocabulary

_NONE = np.zeros(0, dtype=np.int32)
_NO_SAMPLING = SamplingInput.of([])
_NO_INPUT = StepInput(_NONE, None, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, None, (), 0, 0)


class NoExecutor:
    """Computes nothing. Sampled tokens are those of an earlier run where they are known, and otherwise a new number
    each, so no generated block equals another."""

    def __init__(self) -> None:
        self.seqs: list[Sequence] = []  # sequences that get a token in the next step
        self.outputs: dict[str, list[array[int]]] = {}  # request id -> tokens of each sample
        self._next_token = FIRST_UNKNOWN

    def launch(self, step: StepInput, sampling: SamplingInput) -> "DoneStep":
        first, self._next_token = self._next_token, self._next_token + len(self.seqs)
        if not self.outputs:
            return DoneStep(range(first, self._next_token))
        return DoneStep([self._token(fresh) for fresh in range(first, self._next_token)])

    def launch_model(self, step: StepInput) -> "Callable[[SamplingInput], DoneStep]":
        return partial(self.launch, step)

    def _token(self, fresh: int) -> int:
        """The token of a row; `fresh`: its number, if it is not known."""
        row = fresh - self._next_token  # place from the end
        seq, place = self.seqs[row], 0
        while seq.draft and -row < len(self.seqs) and self.seqs[row - 1] is seq:  # its draft comes before it
            row, place = row - 1, place + 1
        samples, place = self.outputs.get(seq.request_id), seq.num_output_tokens + place
        return fresh if samples is None or place >= len(samples[seq.sample_index]) else samples[seq.sample_index][place]


class TimingBuilder:
    """A builder of no arrays, as no executor reads them: advances the clock by the time of the step."""

    def __init__(self, core: "SimulatedCore", scheduler: Scheduler, step_time: StepClock | None) -> None:
        self._core, self._scheduler, self._step_time = core, scheduler, step_time

    def build(self, work: ScheduledStep, source_rows: dict[int, int] | None = None) -> tuple[StepInput, list[Sequence]]:
        self._core.now_ns += STEP_NS if self._step_time is None else self._step_time(work, self._scheduler)
        pairs = zip(work.seqs, work.num_new_tokens, strict=True)
        rows = ((seq, seq.num_logits(seq.num_computed_tokens + num_new)) for seq, num_new in pairs)
        return _NO_INPUT, [seq for seq, num_rows in rows if seq.targets is None for _ in range(num_rows)]

    def sampling(self, seqs: list[Sequence], logits_rows: list[int] | None) -> SamplingInput:
        self._core.no_executor.seqs = seqs
        return _NO_SAMPLING


class DoneStep:
    """A launched step: there is nothing to wait for."""

    def __init__(self, token_ids: "range | list[int]") -> None:
        self._token_ids = token_ids

    def read(self) -> StepTokens:
        return StepTokens(self._token_ids)


class SimulatedCore(EngineCore):
    """EngineCore over a NoExecutor. Requests end after their output length."""

    def __init__(
        self, plan: Plan, hash_size: int | None, *, step_time: StepClock | None = None, emit: Emit | None = None
    ) -> None:
        self.now_ns = 0  # advances by the time of each step
        self.no_executor = NoExecutor()
        self._hash_size = hash_size
        super().__init__(
            plan,
            self.no_executor,
            emit=emit,
            clock_ns=lambda: self.now_ns,
            knows_tokens=False,
            make_builder=lambda scheduler: TimingBuilder(self, scheduler, step_time),
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises: RequestError if it can never be served."""
        make_prefixes = None
        if request.token_ids is None:
            tables = self.limits.tables
            prefixes = synthetic_prefixes(request, self._hash_size, tables.block_size, tables.num_groups)
            make_prefixes = prefixes.copy
            token_ids = [0] * request.num_context_tokens  # only their number matters
        else:
            token_ids = request.token_ids[: request.num_context_tokens].tolist()
        params = SamplingParams(
            n=request.num_samples,
            max_tokens=largest_output(request),
            temperature=1.0 if request.is_random else 0.0,
            ignore_eos=True,
            seed=0,
        )
        ends = early_ends(request)
        ends_of_samples = iter(ends)
        make_stop_checker = (lambda: _EndsAt(next(ends_of_samples))) if any(ends) else None
        self.add_request(
            request.request_id,
            token_ids,
            params,
            cache_salt=request.cache_salt,
            make_stop_checker=make_stop_checker,
            make_prefixes=make_prefixes,
            continuations=request.continuations,
        )
        if request.output_ids is not None:
            self.no_executor.outputs[request.request_id] = request.output_ids


class _EndsAt:
    """A stop checker that ends a sample after that many tokens; None: never."""

    def __init__(self, num_tokens: int | None) -> None:
        self._num_left = num_tokens or 0

    def __call__(self, token_id: int) -> str | None:
        self._num_left -= 1
        return "" if self._num_left == 0 else None


VOCAB_SIZE = 2**62  # synthetic tokens are numbers of any size
_NOT_SERVED = -1


@dataclass(frozen=True, slots=True)
class Schedule:
    """How requests arrive, and how long steps take."""

    speed: float | None = None  # requests arrive by their times, this many times as fast; None: all at once
    step_time: StepClock | None = None  # None: time is counted in steps
    read_ahead: int | None = None  # prompt tokens in work, as in batch.run; None: see read_ahead


@dataclass(slots=True)
class RunResult:
    """What a run did. Arrays have one item per request, in order of arrival; -1 where it was refused."""

    plan: Plan
    prompt_tokens: Ints
    cached_tokens: "array[int]"  # cached tokens of each prompt, when it was first computed
    waited_s: "array[float]"  # seconds from arrival to its first computed step; steps where these have no time
    facts: RunFacts
    num_requests: int = 0
    num_refused: int = 0
    refusals: dict[str, str] = field(default_factory=dict)  # code -> the first message
    total_s: float = 0.0  # virtual seconds
    first_s: float = 0.0  # the end of the first request

    def served(self, warmup: float = 0.0) -> Bools:
        """[R] the requests that count."""
        found: Bools = np.asarray(self.cached_tokens) != _NOT_SERVED
        found[: num_warmup(self.num_requests, warmup)] = False
        return found

    def hit_tokens(self, warmup: float = 0.0) -> tuple[int, int]:
        """(tokens that hit, tokens of the prompts)."""
        served = self.served(warmup)
        return int(np.asarray(self.cached_tokens)[served].sum()), int(self.prompt_tokens[served].sum())

    def hit_blocks(self, warmup: float = 0.0) -> tuple[int, int]:
        """(full blocks that hit, full blocks of the prompts)."""
        served, size = self.served(warmup), self.plan.limits.block_size
        cached = np.asarray(self.cached_tokens)[served]
        # a prompt that hits in whole computes its last token
        return int((-(-cached // size)).sum()), int((self.prompt_tokens[served] // size).sum())


def simulate(
    workload: Requests,
    plan: Plan,
    schedule: Schedule | None = None,
    *,
    emit: Emit | None = None,
    observe: Callable[[int], None] | None = None,
) -> RunResult:
    """Run a workload to its end. `observe` receives the number of finished requests after each step."""
    schedule = schedule or Schedule()
    core = SimulatedCore(plan, workload.hash_size, step_time=schedule.step_time, emit=emit)
    driver = _Driver(core, workload, schedule)
    while driver.feed():
        if core.has_unfinished_requests():
            for output in core.step():
                driver.finish(output)
        if observe is not None:
            observe(driver.num_done)
    driver.result.total_s = core.now_ns / STEP_NS
    return driver.result


class _Driver:
    """Feeds the core as a batch run does: twice max_num_seqs requests are unfinished at a time, or more for read_ahead.
    As the queue is first come, first served, a request that is added later than it arrives starts no later."""

    def __init__(self, core: SimulatedCore, workload: Requests, schedule: Schedule) -> None:
        num = len(workload.requests)
        self.num_done = 0
        self._core = core
        self._requests = workload.requests
        self._speed = schedule.speed
        self._work = InWork(core.limits, schedule.read_ahead)
        self._next = 0
        prompt_tokens = np.array([request.num_prompt_tokens for request in workload.requests], dtype=np.int64)
        missing, waited_s = array("q", [_NOT_SERVED]) * num, array("d", [_NOT_SERVED]) * num
        self.result = RunResult(core.plan, prompt_tokens, missing, waited_s, core.stats, num)
        self._index: dict[str, int] = {}  # id of an unfinished request -> its number
        self._added_ns: dict[str, int] = {}

    def feed(self) -> bool:
        """Add requests that have arrived. False at the end of the run."""
        core = self._core
        for request in self._requests[self._next : self._next + core.limits.max_in_work]:  # as many as a run per step
            if not self._work.has_room:
                break
            arrival_ns = self._arrival_ns(request)
            if arrival_ns > core.now_ns:
                if core.has_unfinished_requests():
                    break
                core.now_ns = arrival_ns  # nothing to do until then
            self._add(request)
        return core.has_unfinished_requests() or self._next < len(self._requests)

    def _arrival_ns(self, request: Request) -> int:
        if self._speed is None or request.arrival_s is None:
            return 0
        return round(request.arrival_s / self._speed * 1e9)

    def _add(self, request: Request) -> None:
        try:
            self._core.add(request)
        except RequestError as error:
            self.result.num_refused += 1
            self.result.refusals.setdefault(error.code, error.message)
            self.num_done += 1
        else:
            self._index[request.request_id] = self._next
            self._added_ns[request.request_id] = self._core.now_ns
            self._work.count(request.num_prompt_tokens)
        self._next += 1

    def finish(self, output: FinishedRequest) -> None:
        if not self.result.first_s:
            self.result.first_s = self._core.now_ns / STEP_NS
        index = self._index.pop(output.request_id)
        self._work.count(self._requests[index].num_prompt_tokens, -1)
        admitted_ns = self._added_ns.pop(output.request_id) + round(output.metrics.queued_s * 1e9)
        self.result.cached_tokens[index] = output.num_cached_tokens
        self.result.waited_s[index] = (admitted_ns - self._arrival_ns(self._requests[index])) / STEP_NS
        self.num_done += 1


def recorded_plan(state: PoolState) -> Plan:
    """The engine of a recorded run."""
    started, slots = state.started, state.slots
    limits = Limits.of(started)
    if slots is not None:
        limits = replace(
            limits, num_state_slots=slots.num_slots, state_bytes=slots.slot_bytes, checkpoints=slots.policy
        )
    return Plan(limits=limits, model=started.model, device=started.device, block_bytes=started.block_bytes)
