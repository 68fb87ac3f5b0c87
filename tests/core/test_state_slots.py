"""Slots of recurrent state and their snapshots, over an executor whose states are the tokens that they have seen (see
test_core for whole runs in any pool and under any limits)."""

import random
from contextlib import suppress

import pytest
from harness.core import EventList, Oracle, Simulation, make_seq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.cache import make_cache
from pagedcli.core.limits import Limits
from pagedcli.core.snapshots import SnapshotPlan, SnapshotPolicy
from pagedcli.errors import ConfigError
from pagedcli.events import CheckpointDropped, CheckpointLookedUp, CheckpointMade, DraftChecked, RequestWaiting
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.fold import fold
from pagedcli.views.whole_run import WholeRun, finding_lines
from pagedcli.views.words import sequence_story, with_steps


def run_case(policy, *, shift, num_prompts=64, num_shared=1500, num_slots=72):
    """Prompts that share their beginning, after `shift` tokens that they share, too, and then differ. Returns the
    engine and the tokens that the best possible cache would leave to compute."""
    rng = random.Random(0)
    shared = [rng.randrange(1000) for _ in range(shift + num_shared)]
    prompts = [[*shared, 1000 + i, *(rng.randrange(1000) for _ in range(99))] for i in range(num_prompts)]
    limits = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "num_state_slots": num_slots, "checkpoints": policy}
    sim = Simulation(8000, 16, check=False, **limits)
    for prompt in prompts:
        sim.add(prompt, 1)
    sim.run()
    return sim, sum(map(len, prompts)) - (num_prompts - 1) * ((shift + num_shared) // 16 * 16)


@pytest.mark.quick("0")
@pytest.mark.parametrize("shift", [0, 100])
def test_with_a_snapshot_where_prompts_branch_the_shared_blocks_are_computed_once(shift):
    sim, least = run_case("branches", shift=shift)
    assert sim.stats.num_computed_tokens == least
    assert sim.cache.states.num_made == 1
    at_the_end, _ = run_case("end", shift=shift)
    assert at_the_end.stats.num_computed_tokens == 64 * (1600 + shift)
    assert at_the_end.stats.num_cached_tokens == 0
    without, _ = run_case("none", shift=shift)
    assert without.stats.num_computed_tokens == 64 * (1600 + shift)


def test_one_slot_more_than_the_sequences_keeps_the_snapshot():
    sim, least = run_case("branches", shift=0, num_prompts=6, num_slots=7)
    assert sim.stats.num_computed_tokens == least


def test_branches_are_found_at_each_depth_and_none_where_nobody_waits():
    def prompts():
        yield from ([1] * 8 + [second] * 8 + [end] * 3 for second in (2, 3) for end in (4, 5))

    events = []
    sim = Simulation(64, 4, emit=events.append, max_num_batched_tokens=64, num_state_slots=8, max_num_seqs=4)
    for prompt in prompts():
        sim.add(prompt, 1)
    sim.run()
    made = [(event.seq_id, event.num_tokens, event.reason) for event in events if isinstance(event, CheckpointMade)]
    assert made == [(0, 8, "branch"), (0, 16, "branch"), (2, 16, "branch")]
    assert sim.stats.num_computed_tokens == 8 + 2 * 8 + 4 * 3
    looked_up = [event for event in events if isinstance(event, CheckpointLookedUp)]
    assert [event.checkpoint_tokens for event in looked_up] == [0, 16, 8, 16]
    alone = Simulation(64, 4, emit=events.append, num_state_slots=8)
    alone.add([1] * 30)
    alone.run()
    assert alone.cache.states.num_made == 0  # nobody else will read one


def test_the_snapshot_vetoes_blocks_that_attention_has():
    events = []
    sim = Simulation(64, 4, emit=events.append, max_num_batched_tokens=64, num_state_slots=4, checkpoints="8")
    sim.add([1] * 15 + [2], 1)
    sim.run()
    sim.add([1] * 15 + [3], 1)
    sim.run()
    lookup = [event for event in events if isinstance(event, CheckpointLookedUp)][-1]
    assert (lookup.cached_tokens, lookup.checkpoint_tokens) == (12, 8)
    assert sim.seqs[1].facts.num_cached_tokens == 8


def test_a_request_without_a_slot_waits_and_says_so():
    events = []
    sim = Simulation(64, emit=events.append, num_state_slots=1)
    sim.add([1, 2, 3], 3)
    sim.add([4, 5], 3)
    sim.run()
    assert {event.reason for event in events if isinstance(event, RequestWaiting)} == {"state_slots"}


@pytest.mark.parametrize(("num_state_slots", "n"), [(3, 4), (2, 2)])  # the last one needs no other slot
def test_samples_share_the_state_of_their_prompt_and_more_than_fit_preempt_each_other(num_state_slots, n):
    sim = Simulation(64, num_state_slots=num_state_slots, max_num_batched_tokens=64)
    sim.add([1, 2, 3], 6, n=n)
    sim.run()
    assert (sim.stats.num_preemptions > 0) == (n > num_state_slots)
    assert len({tuple(seq.token_ids) for seq in sim.seqs}) == 1  # greedy


def test_a_preempted_sequence_restarts_from_its_last_snapshot():
    sim = Simulation(64, 2, num_state_slots=6, checkpoints="4", max_num_batched_tokens=64)
    seq = sim.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 6)
    for _ in range(3):
        sim.step()
    sim.executor.fail_launch = True
    with suppress(RuntimeError):
        sim.step()
    sim.run()
    assert seq.facts.num_recomputed_tokens == seq.facts.most_computed_tokens - 8


def test_a_beam_search_needs_twice_its_width_in_slots():
    sim = Simulation(64, num_state_slots=4)
    sim.add([1, 2, 3], params=SamplingParams(beam_width=2, max_tokens=6))
    sim.run()
    assert sim.stats.num_preemptions == 0


@pytest.mark.parametrize("wrong", ["", "0", "-3", "ends", "1.5"])
def test_a_policy_that_does_not_exist_is_refused(wrong):
    with pytest.raises(ConfigError, match="must be branches, end, none or a number of tokens"):
        Simulation(8, num_state_slots=1, checkpoints=wrong)


def guessed(wrong, **limits):
    """A sequence whose next tokens an oracle guesses, and its events."""
    answer, events = None, []
    for _ in range(2):
        events.clear()
        drafter = None if answer is None else Oracle({("0", 0): answer}, wrong=wrong)
        sim = Simulation(64, emit=events.append, drafter=drafter, max_num_batched_tokens=64, **limits)
        sim.add([1, 2, 3], 60, request_id="0")
        sim.run()
        answer = sim.seqs[0].output_token_ids
    return sim.stats, events


@pytest.mark.parametrize(("num_state_slots", "again"), [(2, 0), (1, 8)])
def test_right_guesses_are_computed_once_where_a_slot_is_empty(num_state_slots, again):
    stats, events = guessed(0, num_state_slots=num_state_slots)
    checked = [event for event in events if isinstance(event, DraftChecked)]
    assert [event.num_again for event in checked[:-1]] == [again] * 6
    assert stats.num_again_tokens == 6 * again
    assert stats.num_computed_tokens == 3 + 59 + 6 * again


@pytest.mark.parametrize("num_state_slots", [1, 2])
def test_views_count_what_is_computed_once_more_and_say_so(num_state_slots):
    stats, events = guessed(0.3, num_state_slots=num_state_slots)
    run = WholeRun()
    state = fold(EventList(events), run)
    facts = run.findings(state).facts
    assert facts.num_again_tokens == stats.num_again_tokens > 0
    assert facts.num_computed_tokens == stats.num_computed_tokens
    words = f"; {facts.num_again_tokens} tokens computed once more for the recurrent state"
    assert dict(finding_lines(run.findings(state)))["speculation"].endswith(words)
    story = [words for _, words in sequence_story(0, with_steps(events), state)]
    slots = [words for words in story if "state slot" in words]
    assert [words.rstrip(" 01,") for words in slots] == ["take state slot", "release state slots"]


class SlotMachine(RuleBasedStateMachine):
    """Any order of arrivals, admissions, growth, forks, releases, steps and failures of a manager of blocks and slots.
    What a slot holds is modelled by the tokens that its state has seen."""

    seqs = Bundle("seqs")

    @initialize(num_slots=st.integers(1, 5), policy=st.sampled_from(["branches", "end", "4", "none"]))
    def start(self, num_slots, policy):
        limits = Limits(block_size=2, num_state_slots=num_slots, checkpoints=policy)
        self.manager = make_cache(9, limits)
        self.slots = self.manager.states
        self.live, self.waiting, self.next_id = [], [], 0
        self.content = [None] * num_slots
        self.in_step = set()  # slots that the step of now reads or writes

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def arrive(self, tokens):
        self.next_id += 1
        seq = make_seq(tokens, self.next_id)
        seq.num_prompt_tokens, seq.state = len(tokens), None
        self.manager.expect(seq)
        self.waiting.append(seq)

    @precondition(lambda self: self.waiting)
    @rule(target=seqs, chunk=st.integers(1, 9))
    def admit(self, chunk):
        seq, manager = self.waiting[0], self.manager
        hit = manager.lookup(seq)
        num_computed = manager.blocks.num_computed_after(seq, hit)
        assert num_computed == hit.num_spans * 2 <= hit.num_cached_spans * 2
        new = manager.next_chunk(seq, num_computed, min(chunk, len(seq.token_ids) - num_computed))
        if manager.blocks.can_allocate(seq, hit, new) and self.slots.why_wait(seq, hit) is None:
            manager.allocate(seq, hit, new)
            self.live.append(self.waiting.pop(0))
            self.compute(seq, new)
        return seq

    @rule(seq=seqs, token=st.integers(0, 1), chunk=st.integers(1, 4))
    def grow(self, seq, token, chunk):
        if seq not in self.live or seq.seq_id in self.scheduled():
            return
        if seq.num_computed_tokens == len(seq.token_ids):
            seq.token_ids.append(token)
        manager = self.manager
        new = min(chunk, len(seq.token_ids) - seq.num_computed_tokens)
        new = manager.next_chunk(seq, seq.num_computed_tokens, new)
        if manager.blocks.can_append(seq, new) and self.slots.can_grow([seq]):
            manager.grow(seq, new)
            self.compute(seq, new)

    def scheduled(self):
        return {seq_id for seq_id, _ in self.in_step}

    def compute(self, seq, new):
        """Read, compute, write: nobody else of this step may use the slot that is written."""
        held = seq.state
        before = () if held.read is None else self.content[held.read]
        assert before == tuple(seq.token_ids[: seq.num_computed_tokens])
        others = {slot_id for seq_id, slots in self.in_step if seq_id != seq.seq_id for slot_id in slots}
        assert held.write not in others
        self.in_step.add((seq.seq_id, (held.read, held.write)))
        seq.num_computed_tokens += new
        self.content[held.write] = tuple(seq.token_ids[: seq.num_computed_tokens])

    @rule(parent=seqs)
    def fork(self, parent):
        if parent in self.live and parent.num_computed_tokens == len(parent.token_ids):
            self.next_id += 1
            child = make_seq(parent.token_ids, self.next_id)
            child.num_prompt_tokens, child.state = parent.num_prompt_tokens, None
            self.manager.fork(parent, child)
            self.live.append(child)

    @rule(seq=consumes(seqs))
    def release(self, seq):
        if seq in self.live and seq.seq_id not in self.scheduled():
            self.manager.release(seq)
            self.live.remove(seq)

    @rule(seq=seqs)
    def leave_the_queue(self, seq):
        if seq in self.waiting:
            self.manager.forget(seq)
            self.waiting.remove(seq)

    @rule()
    def next_step(self):
        self.manager.confirm(latest=True)
        self.manager.begin_step()
        self.in_step = set()

    @rule()
    def fail(self):
        self.manager.recover(self.live)
        for seq in self.live:
            seq.block_table, seq.num_computed_tokens, seq.state = [], 0, None
        self.waiting = self.live + self.waiting
        self.live, self.in_step = [], set()
        for seq in self.waiting:
            self.manager.expect(seq)
        self.content = [None if slot.prefix is None else old for slot, old in
                        zip(self.slots.slots, self.content, strict=True)]  # fmt: skip

    @invariant()
    def holds(self):
        if hasattr(self, "manager"):
            self.manager.check(self.live)
            for slot in self.slots.slots:
                if slot.prefix is not None:
                    tokens, prefix = [], slot.prefix
                    while prefix is not None:
                        tokens[:0], prefix = prefix.token_ids, prefix.parent
                    assert self.content[slot.slot_id] == tuple(tokens)


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_snapshots_that_are_made_dropped_and_read_are_counted():
    events = []
    sim = Simulation(200, 4, emit=events.append, num_state_slots=4, checkpoints="4", max_num_seqs=2)
    for number in range(8):
        sim.add([number % 3] * 13 + [number], 3)
    sim.run()
    num_made, num_dropped, lookups = (
        [event for event in events if isinstance(event, kind)]
        for kind in (CheckpointMade, CheckpointDropped, CheckpointLookedUp)
    )
    facts = sim.stats
    assert facts.num_snapshots == len(num_made) > 5
    assert facts.num_dropped_snapshots == len(num_dropped) > 2
    assert facts.num_snapshot_hits == sum(event.checkpoint_tokens > 0 for event in lookups) > 0


def prompt(letters, seq_id=0, *, num_context=None, num_groups=1):
    """A sequence of blocks of two equal tokens, and one token more."""
    seq = make_seq([ord(letter) for letter in letters for _ in range(2)] + [0], seq_id)
    seq.num_prompt_tokens, seq.num_context_tokens = len(seq.token_ids), num_context
    BlockManager(9, 2, windows=(None,) * num_groups).extend_prefixes(seq)
    return seq


@pytest.mark.parametrize("num_groups", [1, 2])
def test_prompts_branch_where_those_that_wait_leave_them(num_groups):
    plan = SnapshotPlan(SnapshotPolicy.named("branches"), 2, num_groups)
    first, *others = (
        prompt(letters, seq_id, num_groups=num_groups) for seq_id, letters in enumerate(("ABC", "ABD", "AE"))
    )
    assert plan.stops(first, 0) == []
    for waiting in (first, *others):
        plan.expect(waiting)
    assert [plan.stops(first, begin) for begin in range(4)] == [[1, 2], [2], [], []]
    assert [plan.is_expected(plan.prefix(first, span).hash) for span in (1, 2, 3)] == [True] * 3
    plan.forget(first)
    assert [plan.is_expected(plan.prefix(first, span).hash) for span in (1, 2, 3)] == [True, True, False]
    assert plan.stops(first, 0) == [1, 2]
    plan.announce(first, [1, 2])
    assert [[plan.is_coming(each, begin) for begin in (0, 1, 2)] for each in others] == [
        [True, True, False], [True, False, False],
    ]  # fmt: skip
    assert [plan.is_stop(first, span) for span in (1, 2, 3)] == [True, True, False]
    plan.passed(first, 1)
    assert [plan.is_coming(each, 0) for each in others] == [True, False]
    plan.announce(others[1], [1])
    plan.withdraw(first)
    assert [plan.is_coming(each, 0) for each in others] == [True, True]
    plan.passed(others[1], 1)
    assert not plan._coming
    for waiting in others:
        plan.forget(waiting)
    assert not plan._num_waiting
    again = prompt("ABCD", 7, num_groups=num_groups)
    plan.expect(again)
    assert plan.stops(first, 0) == [3]  # all of its blocks


def test_snapshots_at_the_end_and_at_intervals_are_before_the_last_token():
    end, every = (SnapshotPlan(SnapshotPolicy.named(name), 2, 1) for name in ("end", "3"))
    seq, context = prompt("ABCDE"), prompt("ABCDE", num_context=7)
    assert [end.stops(seq, first) for first in (0, 4, 5)] == [[5], [5], []]
    # after 3, 6 and 9 tokens
    assert [every.stops(seq, first) for first in (0, 1, 3, 4)] == [[1, 3, 4], [3, 4], [4], []]
    assert every.stops(prompt("ABCD"), 0) == [1, 3]  # 9 is after the last full block
    assert [end.stops(context, 0), every.stops(context, 0)] == [[3], [1, 3]]
    assert [end.last_readable(each) for each in (seq, context, prompt("", num_context=3))] == [5, 3, 1]
    seq.token_ids.pop()
    assert end.last_readable(seq) == 4  # the last token is computed
    policies = [SnapshotPolicy.named(name) for name in ("branches", "end", "3")]
    assert [each.reason for each in policies] == ["branch", "end", "interval"]
