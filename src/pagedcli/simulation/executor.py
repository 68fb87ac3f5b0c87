"""The engine core without a model: it schedules as ever, its executor computes nothing, and its clock is virtual."""

from array import array
from collections.abc import Callable

import numpy as np

from pagedcli.core.engine_core import EngineCore
from pagedcli.core.plan import Plan
from pagedcli.core.scheduler import ScheduledStep, Scheduler
from pagedcli.core.sequence import Sequence
from pagedcli.core.step_input import SamplingInput, StepInput, StepTokens
from pagedcli.events import Emit
from pagedcli.sampling_params import SamplingParams
from pagedcli.simulation.requests import TraceRequest, early_ends, largest_output, synthetic_prefixes

StepTime = Callable[[ScheduledStep, Scheduler], int]
"""Nanoseconds that a scheduled step takes."""

STEP_NS = 10**9  # of a step without a step time: the seconds of such a run are steps
FIRST_UNKNOWN = 2**40  # tokens that are not known have numbers from here on: above every vocabulary

_NONE = np.zeros(0, dtype=np.int32)
_NO_SAMPLING = SamplingInput.of([])
_NO_INPUT = StepInput(_NONE, None, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, None, (), 0, 0)


class VirtualClock:
    """The clock of a simulation: it advances by the time of each step."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class NoExecutor:
    """Computes nothing. Sampled tokens are those of an earlier run where they are known, and otherwise a new number
    each, so no generated block equals another."""

    def __init__(self) -> None:
        self.seqs: list[Sequence] = []  # those that get a token in the next step
        self.outputs: dict[str, list[array[int]]] = {}  # request id -> tokens of each sample
        self._next_token = FIRST_UNKNOWN

    def launch(self, step: StepInput, sampling: SamplingInput) -> "DoneStep":
        first, self._next_token = self._next_token, self._next_token + len(self.seqs)
        if not self.outputs:
            return DoneStep(range(first, self._next_token))
        return DoneStep([self._token(seq, fresh) for fresh, seq in enumerate(self.seqs, first)])

    def _token(self, seq: Sequence, fresh: int) -> int:
        samples = self.outputs.get(seq.request_id)
        if samples is None or seq.num_output_tokens >= len(samples[seq.sample_index]):
            return fresh
        return samples[seq.sample_index][seq.num_output_tokens]


class TimingBuilder:
    """A builder of no arrays, as no executor reads them: advances the clock by the time of the step."""

    def __init__(
        self, scheduler: Scheduler, executor: NoExecutor, clock: VirtualClock, step_time: StepTime | None
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._step_time = step_time

    def build(self, work: ScheduledStep, source_rows: dict[int, int] | None = None) -> tuple[StepInput, list[Sequence]]:
        self._clock.now_ns += STEP_NS if self._step_time is None else self._step_time(work, self._scheduler)
        pairs = zip(work.seqs, work.num_new_tokens, strict=True)
        return _NO_INPUT, [seq for seq, num_new in pairs if seq.num_computed_tokens + num_new == len(seq.token_ids)]

    def sampling(self, seqs: list[Sequence], logits_rows: list[int] | None) -> SamplingInput:
        self._executor.seqs = seqs
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
        self, plan: Plan, hash_size: int | None, *, step_time: StepTime | None = None, emit: Emit | None = None
    ) -> None:
        self.clock = VirtualClock()
        self.no_executor = NoExecutor()
        self._hash_size = hash_size
        super().__init__(
            plan,
            self.no_executor,
            emit=emit,
            clock_ns=self.clock,
            knows_tokens=False,
            make_builder=lambda scheduler: TimingBuilder(scheduler, self.no_executor, self.clock, step_time),
        )

    def add(self, request: TraceRequest) -> None:
        """Queue a request. Raises: RequestError if it can never be served."""
        make_prefixes = None
        if request.token_ids is None:
            tables = self.limits.tables
            prefixes = synthetic_prefixes(request, self._hash_size, tables.block_size, tables.num_groups)
            make_prefixes = prefixes.copy
            token_ids = [0] * request.num_prompt_tokens  # only their number matters
        else:
            token_ids = request.token_ids.tolist()
        params = SamplingParams(
            n=request.num_samples, max_tokens=largest_output(request), temperature=0, ignore_eos=True, seed=0
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
