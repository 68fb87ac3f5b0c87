"""The engine core over a scripted executor, whose tokens come from what its cache holds: whatever the pool, the limits,
one step ahead, forks, grammars, aborts and steps that raise, every request gets the tokens that it gets alone."""

from contextlib import suppress
from copy import copy

import pytest
from harness.core import Oracle, Simulation, finish, likeliest, stop_at
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedcli.errors import RequestError
from pagedcli.events import DraftChecked
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.check import TraceChecker


class Digits:
    """A grammar over tokens 0 to 4: none may come twice in a row. Complete after `length` tokens."""

    def __init__(self, length):
        self.left, self.last = length, None

    @property
    def allowed_tokens(self):
        return bytes([0b11111 & ~(0 if self.last is None else 1 << self.last)])

    def accept(self, token_id):
        assert token_id != self.last, "the grammar does not allow this token"
        self.last, self.left = token_id, self.left - 1

    def copy(self):
        return copy(self)

    @classmethod
    def find_allowed(cls, guides):
        return [guide.left == 0 for guide in guides]


pytestmark = pytest.mark.usefixtures("prompts_wait_in_small_batches")

request = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=9),
        "max_tokens": st.integers(1, 6),
        "n": st.sampled_from([1, 1, 2, 3]),
        "beams": st.sampled_from([None, None, 1, 2, 3]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "guide": st.sampled_from([None, None, 2, 4]),
        "stop": st.sampled_from([None, None, 3]),
        "salt": st.sampled_from([None, None, "a"]),
        "penalty": st.sampled_from([1.0, 1.0, 1.5]),
    }
)
limits = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(8, 13),
        "max_num_batched_tokens": st.integers(1, 12),
        "max_num_seqs": st.integers(1, 5),
        "chunked_prefill_size": st.none() | st.integers(1, 7),
        "enable_prefix_caching": st.booleans(),
        "min_prefill_tokens": st.sampled_from([0, 0, 3, 12]),
        "preemption_policy": st.sampled_from(["last", "largest"]),
        "eviction": st.sampled_from(["lru", "fifo", "lfu", "prefix-lru", "next-use"]),
        "runs_ahead": st.booleans(),
        "block_size": st.sampled_from([1, 2, 2, 4]),
    }
)
states = st.fixed_dictionaries(
    {
        "num_state_slots": st.integers(1, 8),
        "checkpoints": st.sampled_from(["branches", "branches", "end", "3", "none"]),
    }
)
drafts = st.fixed_dictionaries(
    {"wrong": st.sampled_from([0.0, 0.3, 0.7, 1.0]), "ragged": st.booleans(), "seed": st.integers(0, 9)}
)
# what happens before a step: a request arrives, is aborted, or the step is made to fail
happenings = st.lists(st.sampled_from(["add", "add", "add", "", "", "abort", "launch", "read"]), max_size=40)


def add(sim, number, asked):
    if asked["beams"] is not None:
        params = SamplingParams(
            beam_width=asked["beams"], n=min(asked["n"], asked["beams"]), max_tokens=asked["max_tokens"],
            stop_token_ids=[asked["stop"] or 0], early_stopping=asked["temperature"] == 1,
            length_penalty=asked["penalty"],
        )  # fmt: skip
        sim.add(asked["prompt"], params=params, request_id=str(number), cache_salt=asked["salt"])
        return
    params = SamplingParams(
        n=asked["n"], max_tokens=asked["max_tokens"], temperature=asked["temperature"], seed=number,
        repetition_penalty=asked["penalty"],
    )  # fmt: skip
    sim.add(
        asked["prompt"],
        params=params,
        request_id=str(number),
        cache_salt=asked["salt"],
        make_guide=None if asked["guide"] is None else lambda: Digits(asked["guide"]),
        make_stop_checker=None if asked["stop"] is None else stop_at([asked["stop"]] * 2),
    )


def results(outputs):
    return {
        output.request_id: [(sample.token_ids, sample.finish_reason) for sample in output.samples] for output in outputs
    }


def alone(number, asked, **changes):
    """What a request gets with the pool to itself."""
    sim = Simulation(200, max_num_batched_tokens=100, **changes)
    add(sim, number, asked)
    outputs = list(finish(sim).values())
    return results(outputs)


def oracle(expected, **drafts):
    """A drafter that knows the results."""
    return Oracle(
        {(each, i): ids for each, of_each in expected.items() for i, (ids, _) in enumerate(of_each)}, **drafts
    )


plain = {"n": 1, "beams": None, "temperature": 0, "guide": None, "stop": None, "salt": None, "penalty": 1.0}
roomy = {
    "num_blocks": 8, "max_num_batched_tokens": 11, "max_num_seqs": 2, "chunked_prefill_size": None,
    "enable_prefix_caching": False, "preemption_policy": "last", "eviction": "lru", "runs_ahead": False,
    "block_size": 2,
}  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(request, min_size=1, max_size=7), limits=limits, states=st.just({}) | states,
    windows=st.sampled_from([(None,), (None,), (3, None), (5,), (6, 9)]), happenings=happenings,
    drafts=st.none() | drafts,
)  # fmt: skip
@example(  # one token of a beam is recomputed alone, which is not yet its last
    requests=[
        {**plain, "prompt": [0, 0, 0], "max_tokens": 5, "beams": 2},
        {**plain, "prompt": [0], "max_tokens": 1},
    ],
    limits=roomy,
    states={},
    windows=(None,),
    happenings=["add", "add", "add", "add", "launch"],
    drafts=None,
)
@example(  # preempted beams compute their prompt again, each in blocks of its own
    requests=[
        {**plain, "prompt": [0, 0], "max_tokens": 1},
        {**plain, "prompt": [0] * 9, "max_tokens": 3},
        {**plain, "prompt": [0] * 5, "max_tokens": 5, "beams": 2, "stop": 3},
    ],
    limits={**roomy, "max_num_batched_tokens": 3, "max_num_seqs": 3, "enable_prefix_caching": True},
    states={"num_state_slots": 4, "checkpoints": "branches"},
    windows=(None,),
    happenings=[],
    drafts=None,
)
def test_every_request_gets_the_tokens_that_it_gets_alone(requests, limits, states, windows, happenings, drafts):
    checker, expected = TraceChecker(), {}

    def emit(event):
        assert states or getattr(event, "block_ids", True) or isinstance(event, DraftChecked), "it is about no block"
        checker(event)

    for number, asked in enumerate(requests):
        expected |= alone(number, asked, windows=windows)
    drafter = None if drafts is None else oracle(expected, **drafts)
    num_blocks = limits["num_blocks"] * len(windows) * (2 if limits["block_size"] == 1 else 1)
    limits = {**limits, **states, "windows": windows, "num_blocks": num_blocks}
    limits["runs_ahead"] &= drafter is None
    sim = Simulation(emit=emit, trace_tokens=True, drafter=drafter, **limits)

    def same():
        same_pool(sim, checker.state)
        assert len(sim.scheduler.running) <= sim.limits.max_num_seqs
        if states:
            same_slots(sim, checker.state)

    got, gone = play(sim, requests, happenings, after_step=same)
    assert sim.block_manager.num_free_blocks == num_blocks
    assert got == {number: expected[number] for number in got}
    assert got.keys() | gone == {str(number) for number in range(len(requests))}
    num_recomputed = checker.result(()).state.num_recomputed_tokens
    assert sim.stats.num_recomputed_tokens == num_recomputed or (
        limits["runs_ahead"] and sim.stats.num_recomputed_tokens > num_recomputed  # of sequences that had ended, too
    )
    assert sim.stats.num_drafted_tokens >= sim.stats.num_accepted_tokens
    assert all(0 < sum(new) <= limits["max_num_batched_tokens"] for new in sim.executor.steps)
    assert all(max(new) <= (limits["chunked_prefill_size"] or sum(new)) for new in sim.executor.steps) or drafter
    assert all(each <= sim.limits.most_sampled for each in sim.executor.num_sampled)
    sim.check_nothing_is_left()
    if states:
        plan = sim.cache.states.plan
        assert (sim.cache.states.num_held, len(plan._num_waiting), len(plan._coming)) == (0, 0, 0)


def play(sim, requests, happenings, *, after_step):
    """Add the requests and step until all have ended, with what happens in between. Returns the tokens of those that
    have an output, and the ids of those that were refused or aborted."""
    outputs, gone, number = [], set(), 0
    happenings = iter(happenings)
    while number < len(requests) or sim.has_unfinished_requests():
        what = next(happenings, "add")
        if what == "add" and number < len(requests):
            try:
                add(sim, number, requests[number])
            except RequestError:  # more beams than the pool or the limits allow
                assert requests[number]["beams"] is not None
                gone.add(str(number))
            number += 1
        elif what == "abort" and number:
            gone.add(str(number - 1))
            sim.abort(str(number - 1))
        sim.executor.fail_launch, sim.executor.fail_read = what == "launch", what == "read"
        with suppress(RuntimeError):
            outputs += sim.step()
        assert sim.stats.num_steps < 3000, "no progress"
        after_step()
    sim.step()  # what a step ahead still held is read
    return results(outputs), gone


def same_pool(sim, state):
    manager = sim.block_manager
    assert state.ref_counts == [block.ref_count for block in manager.blocks]
    assert state.hashes == [block.hash for block in manager.blocks]
    assert list(state.free_block_ids) == list(manager.free_block_ids)
    assert state.hash_to_block_id == manager.hash_to_block_id
    queue = manager._queue
    if queue is not None:  # next-use knows who waits, and nobody else
        assert queue._waiting.keys() == {seq.seq_id for seq in sim.scheduler.waiting}
        assert bool(queue._uses) <= bool(queue._waiting)
        places = [queue._waiting[seq.seq_id][0] for seq in sim.scheduler.waiting]
        assert places == sorted(places)


def same_slots(sim, state):
    manager, slots = sim.cache.states, state.slots
    assert slots.ref_counts == [slot.ref_count for slot in manager.slots]
    hashes = [None if slot.prefix is None else slot.prefix.hash for slot in manager.slots]
    assert [None if each is None else each.hash for each in slots.snapshots] == hashes
    assert list(slots.empty) == list(manager._empty)
    assert list(slots.idle) == list(manager._idle)
    assert slots.index == manager._index
    held = {
        seq.seq_id: {seq.state.read, seq.state.write} - {None}
        for seq in sim.scheduler.running
        if seq.state.write is not None
    }
    assert {seq_id: set(slot_ids) for seq_id, slot_ids in slots.held.items()} == held


def tokens_of(prompt):
    """Prompt and output of a greedy request that is alone."""
    sim = Simulation(40)
    seq = sim.add(prompt)
    sim.run()
    return seq.token_ids


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fails", ["fail_launch", "fail_read"])
def test_a_block_of_a_step_that_raised_is_not_found_again(fails, ahead):
    sim = Simulation(20, runs_ahead=ahead, max_num_batched_tokens=64)
    prompt = [1, 2, 3, 4, 5]
    sim.add(prompt, request_id="a")
    setattr(sim.executor, fails, True)
    with pytest.raises(RuntimeError, match="failed"):
        sim.run()
    assert sim.block_manager.hash_to_block_id == {}
    sim.abort("a")
    again = sim.add(prompt)
    sim.run()
    assert again.facts.num_cached_tokens == 0
    assert again.token_ids == tokens_of(prompt)


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_of_steps_that_were_read_stay_cached_when_a_later_step_raises(ahead):
    sim = Simulation(20, runs_ahead=ahead, max_num_batched_tokens=64)
    first = sim.add([1, 2, 3, 4, 5], 6)
    for _ in range(1 + ahead):
        sim.step()
    sim.executor.fail_launch = True
    with pytest.raises(RuntimeError, match="launch failed"):
        sim.step()
    assert len(sim.block_manager.hash_to_block_id) == 2
    assert sim.scheduler.waiting[0] is first
    sim.run()
    assert first.num_output_tokens == 6
    # of 6 tokens, or one step ahead 7, those of failed steps included; two blocks were found
    assert first.facts.num_recomputed_tokens == 2 + ahead


def test_a_stop_checker_that_raises_ends_its_own_request_and_no_other():
    def broken():
        def check(token_id):
            raise ValueError("broken checker")

        return check

    sim = Simulation(40, max_num_batched_tokens=64)
    sim.add([1, 2], request_id="before")
    sim.add([1, 2, 3], request_id="broken", make_stop_checker=broken, n=2)
    sim.add([1, 2, 3, 4], request_id="after")
    with pytest.raises(ValueError, match="broken checker"):
        sim.step()
    outputs = list(finish(sim).values())
    by_id = {output.request_id: output for output in outputs}
    assert by_id["broken"].error.code == "callback_failed"
    assert {sample.finish_reason for sample in by_id["broken"].samples} == {"error"}
    for request_id, prompt in (("before", [1, 2]), ("after", [1, 2, 3, 4])):
        assert by_id[request_id].error is None
        assert prompt + by_id[request_id].samples[0].token_ids == tokens_of(prompt)


def observed(ahead, fails_at=None, **options):
    """The results of requests of all kinds where the observer raises at one event, and how many events it saw. With
    `failed_step` that one fails, too."""
    failed_step = options.pop("failed_step", None)
    seen = []

    def emit(event):
        assert fails_at not in seen, "it is not called again"
        seen.append(len(seen))
        if fails_at in seen:
            raise OSError("disk full")

    sim = Simulation(16, emit=emit, runs_ahead=ahead, max_num_batched_tokens=12, max_num_seqs=5, **options)
    sim.add([1, 2, 3], 4, request_id="several", n=2)
    sim.add([1, 2, 3, 4, 1], request_id="scored", continuations=[[1, 2], [3], [4, 0, 1]])
    sim.add([1, 2, 4], request_id="beams", params=SamplingParams(beam_width=2, n=2, max_tokens=4))
    sim.add([2, 2, 2, 2], 5, request_id="guided", make_guide=lambda: Digits(4))
    num_added, outputs, num_raised, num_failed = len(seen), [], 0, 0
    while sim.has_unfinished_requests():
        assert sim.stats.num_steps < 100, "no progress"
        sim.executor.fail_launch = sim.stats.num_steps == failed_step
        try:
            outputs += sim.step()
        except OSError:
            num_raised += 1
        except RuntimeError:
            num_failed += 1
    assert num_raised == (fails_at is not None)
    assert num_failed <= (failed_step is not None)
    assert sim.stats.num_failed_steps == num_raised + num_failed
    assert sim.block_manager.num_free_blocks == 16
    return results(outputs) | {output.request_id: output.scores for output in outputs if output.scores}, num_added, seen


@pytest.mark.parametrize("ahead", [False, True])
def test_an_observer_that_raises_at_any_event_changes_no_result_and_is_not_called_again(ahead):
    expected, num_added, seen = observed(ahead)
    for number in seen[num_added:]:
        assert observed(ahead, number)[0] == expected, number


def test_an_observer_that_raises_after_a_failed_step_changes_no_result():
    options = {"failed_step": 1, "num_state_slots": 12}
    expected, num_added, seen = observed(False, **options)
    for number in seen[num_added : num_added + 40]:  # those of the first three steps
        assert observed(False, number, **options)[0] == expected, number


@pytest.mark.parametrize("ahead", [False, True])
def test_logits_that_are_no_numbers_end_one_request_with_an_error(ahead):
    def choose(context, draw):
        return None if context[0] == 9 and len(context) > 4 else sum(context) % 5

    sim = Simulation(40, choose=choose, runs_ahead=ahead, max_num_batched_tokens=64)
    sim.add([9, 1, 2], 6, request_id="bad", n=2)
    sim.add([1, 2, 3], 6, request_id="good")
    outputs = list(finish(sim).values())
    bad, good = sorted(outputs, key=lambda output: output.request_id)
    assert bad.error.code == "invalid_logits"
    assert [(len(sample.token_ids), sample.finish_reason) for sample in bad.samples] == [(2, "error")] * 2
    assert good.error is None
    assert len(good.samples[0].token_ids) == 6


def beam_search(prompt, width, max_tokens, ends, *, length_penalty, early_stopping):
    """The best outputs by the textbook, with their scores: no blocks, no steps."""
    running, finished = [(0.0, [])], []
    for length in range(1, max_tokens + 1):
        best = sorted(
            ((total + logprob, [*output, token]) for total, output in running for token, logprob in
             likeliest([*prompt, *output])),
            reverse=True,
        )  # fmt: skip
        ended = [each for each in best[:width] if each[1][-1] in ends or length == max_tokens]
        finished += [(total / length**length_penalty, output) for total, output in ended]
        finished = sorted(finished, reverse=True)[:width]
        running = [each for each in best if each[1][-1] not in ends][:width]
        if len(finished) == width:
            best_length = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or running[0][0] / best_length**length_penalty <= finished[-1][0]:
                break
    return finished


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty"), [(True, 0.5), (False, 1.0), ("never", 1.0), ("never", 0)]
)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_are_those_of_the_textbook(width, early_stopping, length_penalty):
    given = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    for seed in range(20):
        prompt, stops = [seed, seed % 3, 7], [(seed + 3 * number) % 10 for number in range(1 + seed % 3)]
        eos = {(seed + 3) % 10, 9} if seed % 2 else set()
        sim = Simulation(60, max_num_batched_tokens=64, eos_token_ids=frozenset(eos))
        sim.add(prompt, params=SamplingParams(beam_width=width, n=width, max_tokens=6, stop_token_ids=stops, **given))
        outputs = list(finish(sim).values())
        wanted, samples = beam_search(prompt, width, 6, {*stops, *eos}, **given), outputs[0].samples
        assert [sample.token_ids for sample in samples] == [output for _, output in wanted]
        assert [sample.score for sample in samples] == pytest.approx([score for score, _ in wanted])
        assert [sample.index for sample in samples] == list(range(width))
        for sample in samples:
            last = sample.token_ids[-1]
            assert sample.finish_reason == ("stop" if last in {*stops, *eos} else "length")
            assert sample.stop_reason == (last if last in {*stops} - eos else None)


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_samples_start_in_the_step_before_which_another_sequence_ends_early(num_steps):
    def run(ahead):
        sim = Simulation(60, runs_ahead=ahead, max_num_batched_tokens=64)
        for number in range(3):
            sim.add([number, 1, 2], params=SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[0, 3]))
        for _ in range(num_steps):
            sim.step()
        sim.add([4, 1, 4, 1, 4], n=2)
        sim.run()
        return sorted((seq.request_id, seq.token_ids) for seq in sim.seqs)

    assert run(True) == run(False)


def test_a_grammar_keeps_no_row_from_running_ahead_and_all_are_followed_at_once():
    followed = []

    class Counted(Digits):
        @classmethod
        def find_allowed(cls, guides):
            followed.append(len(guides))
            return super().find_allowed(guides)

    def run(ahead, num_guided):
        sim = Simulation(60, runs_ahead=ahead, max_num_batched_tokens=64)
        for row in range(3):
            sim.add([row], 8, make_guide=(lambda: Counted(6)) if row < num_guided else None)
        sim.run()
        return [seq.token_ids for seq in sim.seqs], sim

    plain, free = run(True, 0)
    assert free.num_steps_ahead == 7
    found, guided = run(True, 2)
    assert found == run(False, 2)[0]
    assert found[2] == plain[2]
    assert [len(tokens) for tokens in found] == [7, 7, 9]
    assert guided.num_steps_ahead == free.num_steps_ahead
    assert followed == [2] * 12
