"""The engine core without a model: it schedules as ever, its executor computes nothing, and its clock is virtual."""

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedcli.core.engine_core import EngineCore
from pagedcli.core.executor import StepTokens
from pagedcli.core.plan import Plan
from pagedcli.core.prefixes import Prefix
from pagedcli.core.sampling_input import SamplingInput
from pagedcli.core.scheduler import ScheduledStep, Scheduler
from pagedcli.core.sequence import Sequence
from pagedcli.core.step_input import StepBuilder, StepInput
from pagedcli.events import Emit
from pagedcli.sampling_params import SamplingParams
from pagedcli.simulation.requests import TraceRequest, early_ends, largest_output, synthetic_prefixes

StepTime = Callable[[ScheduledStep, Scheduler], int]
"""Nanoseconds that a scheduled step takes."""

STEP_NS = 10**9  # of a step without a step time: the seconds of such a run are steps
FIRST_UNKNOWN = 2**40  # tokens that are not known have numbers from here on: above every vocabulary

_NONE = np.zeros(0, dtype=np.int32)
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


class TimingBuilder(StepBuilder):
    """Takes the place of the arrays that no executor reads: advances the clock by the time of the step."""

    def __init__(self, clock: VirtualClock, scheduler: Scheduler, step_time: StepTime | None) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._step_time = step_time

    def build(self, work: ScheduledStep, source_rows: dict[int, int] | None = None) -> tuple[StepInput, list[Sequence]]:
        self._clock.now_ns += STEP_NS if self._step_time is None else self._step_time(work, self._scheduler)
        pairs = zip(work.seqs, work.num_new_tokens, strict=True)
        return _NO_INPUT, [seq for seq, num_new in pairs if seq.num_computed_tokens + num_new == len(seq.token_ids)]


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
        self._prefixes: list[Prefix] = []  # of the request that is being added
        super().__init__(plan, self.no_executor, emit=emit, clock_ns=self.clock)
        self._builder = TimingBuilder(self.clock, self.scheduler, step_time)

    def add(self, request: TraceRequest) -> None:
        """Queue a request. Raises: RequestError if it can never be served."""
        if request.token_ids is None:
            tables = self.limits.tables
            self._prefixes = synthetic_prefixes(request, self._hash_size, tables.block_size, tables.num_groups)
            token_ids = [0] * request.num_prompt_tokens  # only their number matters
        else:
            self._prefixes = []
            token_ids = request.token_ids.tolist()
        params = SamplingParams(
            n=request.num_samples, max_tokens=largest_output(request), temperature=0, ignore_eos=True, seed=0
        )
        ends = early_ends(request)
        ends_of_samples = iter(ends)
        make_stop_checker = (lambda: _EndsAt(next(ends_of_samples))) if any(ends) else None
        self.add_request(
            request.request_id, token_ids, params, cache_salt=request.cache_salt, make_stop_checker=make_stop_checker
        )
        if request.output_ids is not None:
            self.no_executor.outputs[request.request_id] = request.output_ids

    def _new_sequence(self, request_id: str, token_ids: list[int], params: SamplingParams, **fields: Any) -> Sequence:
        seq = super()._new_sequence(request_id, token_ids, params, **fields)
        seq.prefixes = self._prefixes.copy()
        return seq

    def _fork(self, sampled: list[Sequence]) -> tuple[list[Sequence], list[int] | None]:
        seqs, rows = super()._fork(sampled)
        self.no_executor.seqs = seqs
        return seqs, rows


class _EndsAt:
    """A stop checker that ends a sample after that many tokens; None: never."""

    def __init__(self, num_tokens: int | None) -> None:
        self._num_left = num_tokens or 0

    def __call__(self, token_id: int) -> str | None:
        self._num_left -= 1
        return "" if self._num_left == 0 else None
