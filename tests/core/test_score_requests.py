"""Requests for scores in the real engine core over an executor that checks what each token sees: any cut of blocks,
pool, chunk, company, failure."""

from contextlib import suppress

import pytest
from harness.core import Simulation, finish, next_token, scored
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagedcli.core.scoring import TokenScore
from pagedcli.events import RequestWaiting
from pagedcli.trace.check import TraceChecker

TOKENS = st.integers(0, 2)
CONTEXTS = st.lists(TOKENS, min_size=1, max_size=9)
CONTINUATIONS = st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=1, max_size=4)


def expected(context, continuations):
    return [
        [scored([*context, *continuation[:place]], token) for place, token in enumerate(continuation)]
        for continuation in continuations
    ]


def found(output):
    return [score.tokens for score in output.scores]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_context", range(1, 9))
def test_each_token_is_computed_once_for_every_cut_of_blocks(num_context, size):
    context, continuations = list(range(num_context)), [[7], [8, 9], [7, 8, 9, 7, 8], [6] * 4]
    checker = TraceChecker()
    engine = Simulation(60, size, emit=checker, trace_tokens=True, max_num_seqs=2)
    hits = (num_context - 1) // size * size
    for turn, hit in enumerate((0, hits)):
        before = engine.stats.num_computed_tokens
        seq = engine.add(context, request_id=f"{turn}", continuations=continuations)
        assert seq.targets.num_fork_tokens == 1 + 4 + 3
        outputs = list(finish(engine).values())
        assert outputs[0].prompt_logprobs is None
        assert found(outputs[0]) == expected(context, continuations)
        assert outputs[0].num_cached_tokens == hit
        assert engine.stats.num_computed_tokens - before == num_context - hit + 1 + 4 + 3
    assert engine.block_manager.num_free_blocks == 60


def test_the_last_continuation_takes_the_partial_block_of_its_context():
    engine = Simulation(2)
    engine.add([1, 2, 3], continuations=[[1, 2], [3]])
    engine.run()
    assert engine.stats.num_computed_tokens == 3 + 1


def test_continuations_wait_for_a_slot_of_state():
    events = []
    engine = Simulation(64, 2, emit=events.append, num_state_slots=2)
    engine.add([1, 2, 3], continuations=[[1, 2], [3, 4], [5, 6]])
    engine.run()
    assert {event.reason for event in events if isinstance(event, RequestWaiting)} == {"state_slots"}


@settings(max_examples=75, deadline=None)
@given(
    requests=st.lists(st.tuples(CONTEXTS, CONTINUATIONS), min_size=1, max_size=6),
    size=st.integers(1, 5),
    changes=st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 4),
            "max_num_batched_tokens": st.integers(4, 20),
            "chunked_prefill_size": st.sampled_from([None, 1, 2, 5]),
            "enable_prefix_caching": st.booleans(),
            "runs_ahead": st.booleans(),
        }
    ),
)
def test_with_room_rows_compute_what_they_have_to(requests, size, changes):
    engine = Simulation(400, size, **changes)
    for place, (context, continuations) in enumerate(requests):
        engine.add(context, request_id=str(place), continuations=continuations)
    outputs, most = {}, 0
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    for place, (context, continuations) in enumerate(requests):
        output = outputs[str(place)]
        assert found(output) == expected(context, continuations)
        assert output.num_cached_tokens <= (len(context) - 1) // size * size
        most += len(context) - output.num_cached_tokens + sum(len(each) - 1 for each in continuations)
    assert engine.stats.num_computed_tokens == most


class ScoreMachine(RuleBasedStateMachine):
    """Requests with and without continuations, aborts and failed steps, in a pool that is too small for all of them."""

    changes = {}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.checker = TraceChecker()
        self.engine = Simulation(7, 2, emit=self.checker, trace_tokens=True, max_num_seqs=3, **self.changes)
        self.open = {}
        self.number = 0

    def name(self):
        self.number += 1
        return f"r{self.number}"

    @rule(context=CONTEXTS, continuations=CONTINUATIONS)
    def score(self, context, continuations):
        name = self.name()
        self.engine.add(context[:8], request_id=name, continuations=continuations)
        self.open[name] = context[:8], continuations

    @rule(context=CONTEXTS, n=st.integers(1, 2))
    def generate(self, context, n):
        name = self.name()
        self.engine.add(context, request_id=name, n=n)
        self.open[name] = context, None

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            with suppress(RuntimeError):  # of a step that was made to fail: one step ahead, a later one notices
                for output in self.engine.step() if self.engine.has_unfinished_requests() else ():
                    self.end(output)

    @rule(read=st.booleans())
    def fail(self, read):
        if not self.engine.scheduler.has_unfinished:
            return
        self.engine.executor.fail_read, self.engine.executor.fail_launch = read, not read
        self.step(2)
        self.engine.executor.fail_read = self.engine.executor.fail_launch = False

    @rule(data=st.data())
    def abort(self, data):
        if self.open:
            name = data.draw(st.sampled_from(sorted(self.open)))
            self.engine.abort(name)
            del self.open[name]

    def end(self, output):
        context, continuations = self.open.pop(output.request_id)
        if continuations is not None:
            assert found(output) == expected(context, continuations)
            return
        tokens = list(context)
        for token in output.samples[0].token_ids:
            assert token == next_token(tokens, 0)
            tokens.append(token)

    @invariant()
    def holds(self):
        scheduler = self.engine.scheduler
        self.engine.cache.check([*scheduler.running, *scheduler.contexts])
        assert all(context.forks for context in scheduler.contexts)

    def teardown(self):
        steps = 0
        while self.engine.has_unfinished_requests():
            self.step(1)
            steps += 1
            assert steps < 500, "the scheduler makes no progress"
        assert not self.open
        num_recomputed = self.checker.state.num_recomputed_tokens
        assert self.engine.stats.num_recomputed_tokens == num_recomputed or self.engine.runs_ahead
        assert self.engine.block_manager.num_free_blocks == 7
        assert self.engine.stats.num_sequences == len(self.engine.seqs)
        self.engine.check_nothing_is_left()
        assert not self.engine.scheduler.contexts


class AheadMachine(ScoreMachine):
    changes = {"runs_ahead": True}  # noqa: RUF012


class StateMachine(ScoreMachine):
    changes = {"num_state_slots": 4, "state_bytes": 4}  # noqa: RUF012


class WindowMachine(ScoreMachine):
    changes = {"windows": (3,)}  # noqa: RUF012

    def end(self, output):  # what a window hides does not count
        context, continuations = self.open.pop(output.request_id)
        if continuations is not None:
            assert found(output) == [
                [scored([*context, *each[:place]][-3:], token) for place, token in enumerate(each)]
                for each in continuations
            ]


def test_a_continuation_whose_scores_are_unread_is_not_preempted():
    """Its end would come between the reason why it waits and the report of the step."""
    checker = TraceChecker()
    engine = Simulation(7, 2, emit=checker, trace_tokens=True, max_num_seqs=3, runs_ahead=True)
    outputs = []
    for name, context in (("a", [0]), ("b", [0]), ("long", [0] * 9)):
        engine.add(context, request_id=name)
    engine.abort("a")
    engine.abort("b")
    outputs += [*engine.step(), *engine.step()]
    engine.add([0], request_id="short")
    engine.add([0], request_id="scored", continuations=[[0]])
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert sorted(output.request_id for output in outputs) == ["long", "scored", "short"]


def test_a_context_that_has_its_scores_when_the_next_step_fails_ends():
    """The failed step makes it wait, although nothing of it is left to compute."""
    machine = AheadMachine()
    machine.score([0], [[0], [0, 0]])
    machine.fail(read=False)
    machine.generate([0], 2)
    machine.fail(read=False)
    machine.holds()
    machine.teardown()


for machine in (ScoreMachine, AheadMachine, StateMachine, WindowMachine):
    machine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestScores, TestAhead = ScoreMachine.TestCase, AheadMachine.TestCase
TestStates, TestWindows = StateMachine.TestCase, WindowMachine.TestCase


def test_a_score_that_is_no_number_ends_its_row_with_an_error_and_no_other():
    def bad(context, token):
        return TokenScore(float("nan") if context[0] == 9 else -1.0, False)

    sim = Simulation(60, max_num_batched_tokens=64)
    sim.executor.score = bad
    sim.add([9, 1, 2], request_id="bad", continuations=[[1, 2], [3], [4, 1]])
    sim.add([1, 2], request_id="good", continuations=[[1, 2], [3]])
    found = {}
    while sim.has_unfinished_requests():
        assert sim.stats.num_steps < 100, "it never ends"
        found |= {output.request_id: output for output in sim.step()}
    assert found["bad"].error.code == "invalid_logits"
    assert found["good"].error is None
    assert [len(score.tokens) for score in found["good"].scores] == [2, 1]
    assert sim.block_manager.num_free_blocks == 60
