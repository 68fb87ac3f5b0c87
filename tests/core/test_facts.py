"""The counts of a run, by hand: lookups, steps, waste, parts of a run added up; times of a request."""

import pytest
from harness.core import Simulation, finish

from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import Limits
from pagedcli.core.prefixes import SeenPrefixes
from pagedcli.core.steps import FORWARD, SAMPLE, SCHEDULE, StepClock, TimedEmit
from pagedcli.sampling_params import SamplingParams


def counted(**changes):
    """A step with 8 new tokens, 3 blocks of 4 in use of which 3 slots are empty, and 2 sequences that wait 60 ns."""
    facts = RunFacts(block_size=4, num_blocks=10, max_num_seqs=3)
    given = {"num_new_tokens": 8, "num_used_blocks": 3, "num_unfilled_slots": 3, "num_waiting": 2} | changes
    facts.count_scheduled(**given, num_used_state_slots=5)
    facts.count_step(blocked="free_blocks", num_used_blocks=2, schedule_ns=10, forward_ns=30, sample_ns=20)
    return facts


def test_a_run_begins_with_nothing():
    facts = RunFacts()
    counts = {name: getattr(facts, name) for name in RunFacts.__slots__}
    limits = {"block_size": 16, "prefix_caching": True}
    assert all(
        counts[name] == (limits.get(name) or 0) for name in counts if counts[name] is not None and counts[name] != {}
    )
    assert (facts.mean_waste, facts.peak_waste, facts.ideal_of) == (None, None, None)
    assert (facts.hit_rate, facts.seconds_per_token, facts.steps_ns, facts.waiting_s) == (0, 0, 0, {})


def test_lookups():
    facts = RunFacts(block_size=4)
    facts.count_lookup(10, 2, 4, 7)
    assert (facts.num_prompt_tokens, facts.num_cached_tokens, facts.hit_rate) == (10, 4, 0.4)
    assert (facts.longest_shared, facts.num_partial_tokens, facts.num_ideal) == (7, 3, 4)
    facts.count_lookup(8, 2, 7, 8)  # all of it is shared, and its last token is computed
    assert (facts.num_prompt_tokens, facts.num_cached_tokens) == (18, 11)
    assert (facts.longest_shared, facts.num_partial_tokens, facts.num_ideal) == (8, 3, 4 + 7)
    facts.count_lookup(30, 1, 0, 13)  # of 3 shared blocks it asks for one
    assert (facts.longest_shared, facts.num_partial_tokens, facts.num_ideal) == (13, 4, 11 + 4)
    facts.count_lookup(5, 1, 0, None)
    assert (facts.num_prompt_tokens, facts.longest_shared, facts.num_ideal) == (53, 13, 15)


def test_the_ceiling_counts_what_was_read_from_disk():
    facts = RunFacts(block_size=4)
    facts.count_lookup(10, 2, 8, 4)  # of 8 tokens found another prompt has 4
    assert facts.num_ideal_tokens == 8
    facts.count_lookup(10, 2, 0, 8)  # and here memory had lost what one has
    assert facts.num_ideal_tokens == 8 + 8


def test_steps_and_waste():
    facts = counted()
    assert (facts.num_computed_tokens, facts.num_used_blocks, facts.peak_used_blocks) == (8, 2, 3)
    assert (facts.waste_sum, facts.num_waste_steps, facts.mean_waste, facts.peak_waste) == (0.25, 1, 0.25, 0.25)
    assert (facts.num_steps, facts.steps_ns, facts.seconds_per_token) == (1, 60, pytest.approx(30e-9 / 8))
    assert facts.waiting_s == {"free_blocks": pytest.approx(120e-9)}
    assert facts.peak_used_state_slots == 5
    facts.count_scheduled(num_new_tokens=1, num_used_blocks=1, num_unfilled_slots=2, num_waiting=0)
    assert (facts.num_computed_tokens, facts.peak_used_blocks, facts.peak_used_state_slots) == (9, 3, 5)
    assert (facts.mean_waste, facts.peak_waste) == (0.375, 0.5)
    facts.count_scheduled(num_new_tokens=0, num_used_blocks=0, num_unfilled_slots=0, num_waiting=0)
    assert (facts.num_waste_steps, facts.mean_waste) == (2, 0.375)
    facts.count_step(blocked=None, num_used_blocks=0, schedule_ns=1, forward_ns=2, sample_ns=3)
    assert (facts.num_steps, facts.schedule_ns, facts.forward_ns, facts.sample_ns) == (2, 11, 32, 23)
    assert facts.waiting_ns == {"free_blocks": 120}
    facts.num_used_blocks = 4
    facts.count_failed_step()
    assert (facts.num_steps, facts.num_failed_steps, facts.num_used_blocks) == (3, 1, 0)


@pytest.mark.parametrize("same_pool", [True, False])
def test_parts_of_a_run_are_added(same_pool):
    facts, other = counted(), counted(num_used_blocks=6, num_waiting=1)
    facts.longest_shared, other.longest_shared, other.num_state_slots = 5, 3, 7
    other.waiting_ns["max_num_seqs"], other.num_undrafted = 4, 2
    facts.add(other, same_pool=same_pool)
    assert (facts.block_size, facts.max_num_seqs) == (4, 3)
    assert (facts.num_blocks, facts.peak_used_blocks) == ((10, 6) if same_pool else (20, 9))
    assert (facts.num_used_blocks, facts._num_waiting) == ((2, 1) if same_pool else (4, 3))
    assert (facts.num_state_slots, facts.peak_used_state_slots) == ((7, 5) if same_pool else (7, 10))
    assert (facts.num_steps, facts.num_computed_tokens, facts.longest_shared) == (2, 16, 5)
    assert (facts.num_waste_steps, facts.peak_waste, facts.ideal_of) == (2, 0.25, None)
    assert facts.waiting_ns == {"free_blocks": 180, "max_num_seqs": 4}
    assert facts.num_undrafted == 2
    facts.add(RunFacts(), same_pool=same_pool)  # of an engine that has not started: it has no limits
    assert (facts.block_size, facts.max_num_seqs, facts.prefix_caching) == (4, 3, True)


def test_facts_of_an_engine_begin_with_its_limits():
    facts = RunFacts.of(Limits(block_size=4, num_blocks=9, max_num_seqs=3, num_state_slots=5))
    assert (facts.block_size, facts.num_blocks, facts.max_num_seqs, facts.num_state_slots) == (4, 9, 3, 5)
    assert facts.prefix_caching
    facts = RunFacts.of(Limits(enable_prefix_caching=False))
    assert (facts.num_blocks, facts.num_state_slots, facts.prefix_caching) == (0, 0, False)


def test_time_of_a_step_is_that_of_its_phases_without_observers():
    now_ns = 5

    def pass_ns(num_ns):
        nonlocal now_ns
        now_ns += num_ns

    observers = TimedEmit(pass_ns, lambda: now_ns)
    observers(1000)  # before the step
    clock = StepClock(lambda: now_ns, observers)
    for phase, num_ns in [(SCHEDULE, 10), (FORWARD, 20), (SAMPLE, 40), (FORWARD, 80)]:
        pass_ns(7)
        observers(300)
        with clock.phase(phase):
            pass_ns(num_ns)
            observers(100)
    assert (clock.phases_ns, clock.observer_ns) == ([10, 100, 40], 4 * 400)
    unobserved = StepClock(lambda: now_ns, None)
    with unobserved.phase(SAMPLE):
        pass_ns(30)
    assert (unobserved.phases_ns, unobserved.observer_ns) == ([0, 0, 30], 0)


@pytest.mark.parametrize("ahead", [False, True])
def test_times_of_a_request_follow_each_other(ahead):
    sim = Simulation(60, max_num_seqs=1, max_num_batched_tokens=64, runs_ahead=ahead)
    sim.add([1, 2, 3], 1, request_id="one")
    sim.add([1, 2, 3], 5, request_id="five")
    found = {name: output.metrics for name, output in finish(sim).items()}
    one, five = found["one"], found["five"]
    assert 0 < one.queued_s < one.ttft_s == one.total_s
    assert one.tpot_s is None
    assert one.total_s < five.queued_s < five.ttft_s < five.total_s
    assert five.tpot_s == pytest.approx((five.total_s - five.ttft_s) / 4)
    assert (five.num_preemptions, five.num_recomputed_tokens) == (0, 0)
    sim.add([1, 2, 3], request_id="scored", continuations=[[1, 2], [2, 1, 3]])
    scored = finish(sim)["scored"].metrics
    assert scored.ttft_s < scored.total_s  # its context has its scores before the continuations have theirs
    assert sim.stats.ideal_of is None


def test_facts_say_of_how_many_tokens_the_ideal_is_known(monkeypatch):
    monkeypatch.setattr("pagedcli.core.engine_core.SeenPrefixes", lambda: SeenPrefixes(8))
    sim = Simulation(60)
    for number in range(4):
        sim.add([number] * 6, 1)
    finish(sim)
    assert sim.stats.ideal_of == 8


def test_preemptions_of_a_request_are_those_of_all_its_samples():
    sim = Simulation(9, max_num_batched_tokens=64, max_num_seqs=6, enable_prefix_caching=False)
    sim.add([1, 2, 3], 9, n=3, request_id="several")
    found = finish(sim)["several"].metrics
    assert found.num_preemptions == sum(seq.num_preemptions for seq in sim.seqs) > 0
    assert found.num_recomputed_tokens == sum(seq.facts.num_recomputed_tokens for seq in sim.seqs) > 0


def test_steps_ahead_count_no_token_of_a_sequence_that_had_ended():
    def computed(ahead):
        sim = Simulation(60, runs_ahead=ahead, max_num_batched_tokens=64)
        for number in range(3):
            sim.add([number, 1, 2], params=SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[0, 3]))
        finish(sim)
        return sim.stats.num_computed_tokens, sim.num_discarded_tokens

    plain, ahead = computed(False), computed(True)
    assert ahead[1] > plain[1] == 0
    assert ahead[0] == plain[0]
