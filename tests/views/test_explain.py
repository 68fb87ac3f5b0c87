"""Each prefix lookup gets the reason that a person can check by hand, and totals add up; also of recurrent state."""

import json
import random

import pytest
from cli_harness import pagedcli, write_rows
from harness.core import EventList, Oracle, Simulation, write

from pagedcli.answers.why import Reasons, divergence_text, lookup_story, why_it_ended
from pagedcli.events import BlockEvicted, PrefixLookedUp, to_all
from pagedcli.trace.fold import pool_fold
from pagedcli.views.explain import Explainer, explain_trace, longest_shared_prefix, totals_of


class Explained:
    """A simulation whose events are explained."""

    def __init__(self, num_blocks=100, block_size=4, **limits):
        self.explainer, self.check = Explainer(), lambda event: None  # which sees each event once it is folded
        folding = pool_fold(self.explainer)
        limits = {"max_num_batched_tokens": 1000, "max_num_seqs": 8, "trace_tokens": True, **limits}
        emit = to_all(folding, lambda event: self.check(event))
        self.sim = Simulation(num_blocks, block_size, emit=emit, **limits)

    def run(self, *prompts, max_new_tokens=1, cache_salt=None):
        """Each prompt alone, one after the other. Returns their lookups."""
        done = len(self.explainer.lookups)
        for prompt in prompts:
            self.sim.add(prompt, max_new_tokens, cache_salt=cache_salt)
            self.sim.run()
        self.explainer.finish()
        return self.explainer.lookups[done:]


def salts(lookups):
    return Reasons("", lookups, 4).salts()


A, B, C, D = ([letter] * 4 for letter in range(4))


ENDS = [
    # prompts, one after the other; of the last one: the reason, tokens hit, why the lookup ended
    ([A + B, C + D], "no_shared_prefix", 0, "no cached block matches the start of this prompt"),
    ([A + B, [0, 0, 0, 9, *B]], "shorter_than_block", 0,
     "the shared prefix is shorter than a block: 3 more tokens shared, a block is 4"),
    ([A + B + C, A + B + [2, 2, 9, 9] + D], "not_seen_before", 8,
     "the next block had never been computed before: 2 more tokens shared, a block is 4"),
    ([A + B, A + B], "all_hit", 7,
     "every full block was cached; the last token is always computed: its logits give the next token"),
    ([A + B, A + B + [5]], "all_hit", 8, "every full block was cached"),
    ([[1, 2, 3]], "no_full_block", 0, None),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "reason", "tokens_hit", "why"), ENDS)
def test_a_lookup_ends_for_a_reason(prompts, reason, tokens_hit, why):
    *_, last = Explained().run(*prompts)
    assert (last.reason, last.event.tokens_hit) == (reason, tokens_hit)
    assert why in (None, why_it_ended(last))


def test_caching_off():
    explained = Explained(enable_prefix_caching=False)
    _, second = explained.run(A + B, A + B)
    assert second.reason == "caching_off"
    totals = totals_of(explained.explainer.lookups, own=False)
    assert (totals.caching_off, totals.hit, totals.num_tokens) == (16, 0, 16)


def crowd(seed, *, num_blocks, one_by_one=False, block_size=2):
    """A workload with shared heads, salts, samples and preemptions."""
    rng = random.Random(seed)
    explained = Explained(num_blocks, block_size, max_num_batched_tokens=9, max_num_seqs=4)
    claims = Claims(explained)
    heads = [[rng.randrange(4) for _ in range(rng.randrange(1, 9))] for _ in range(5)]
    for number in range(40):
        prompt = rng.choice(heads) + [rng.randrange(4) for _ in range(rng.randrange(0, 5))]
        salt = rng.choice([None, None, None, "a", "b"])
        explained.sim.add(prompt, rng.randrange(1, 6), n=1 + (number % 6 == 5), cache_salt=salt)
        if one_by_one:
            explained.sim.run()
    explained.sim.run()
    explained.explainer.finish()
    return explained, claims


class Claims:
    """Checks with the real pool, at the moment of each lookup, what is said of it."""

    def __init__(self, explained):
        self.explained = explained
        self.num_checked = dict.fromkeys(("different_salt", "unfindable", "evicted"), 0)
        explained.check = self.check

    def check(self, event):
        if not isinstance(event, PrefixLookedUp) or event.reason == "continued":
            return
        manager, lookup = self.explained.sim.block_manager, self.explained.explainer.lookups[-1]
        reason = lookup.reason
        if reason not in self.num_checked:
            return
        self.num_checked[reason] += 1
        size = manager.block_size
        seq = self.explained.sim.seqs[lookup.seq_id]
        wanted = tuple(seq.token_ids[: (event.first_miss + 1) * size])
        cached = {chain(manager.blocks[block_id].prefix) for block_id in manager.hash_to_block_id.values()}
        same_hash = any(block.hash == event.missing_hash for block in manager.blocks)
        if reason == "different_salt":
            assert wanted in cached
            assert not same_hash
        else:
            assert event.missing_hash not in manager.hash_to_block_id
            assert same_hash == (reason == "unfindable")


def chain(prefix):
    """All tokens up to the end of a block, without the salt."""
    tokens = []
    while prefix is not None:
        tokens[:0] = prefix.token_ids
        prefix = prefix.parent
    return tuple(tokens[2:] if tokens[0] == -1 else tokens)  # a salt of one letter is -1 and that letter


@pytest.mark.quick("False-30")
@pytest.mark.parametrize("num_blocks", [9, 14, 30])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_is_said_of_a_miss_is_so_in_the_pool(num_blocks, one_by_one):
    num_checked = [crowd(seed, num_blocks=num_blocks, one_by_one=one_by_one)[1].num_checked for seed in range(12)]
    for reason in ("different_salt", "evicted") if num_blocks < 30 else ("different_salt",):
        assert sum(counts[reason] for counts in num_checked) > 5


@pytest.mark.quick("30")
@pytest.mark.parametrize("num_blocks", [9, 14, 30])
def test_parts_of_parts_fit_and_a_finished_run_leaves_nothing_unknown(num_blocks):
    for seed in range(12):
        explainer = crowd(seed, num_blocks=num_blocks)[0].explainer
        for own in (False, True):
            totals = totals_of(explainer.lookups, own=own)
            assert totals.first_seen_shared <= totals.first_seen
            assert totals.last_block_shared <= totals.last_block
            assert totals.not_known == 0
            assert totals.reasons["not_known"] == 0


def test_an_eviction_names_the_request_that_needed_the_block():
    """The same is found in older traces, whose evictions name nobody: who takes the block next needed it."""
    named, unnamed, events = Explainer(), Explainer(), []
    into_named, into_unnamed = pool_fold(named), pool_fold(unnamed)

    def emit(event):
        events.append(event)
        into_named(event)
        is_eviction = isinstance(event, BlockEvicted)
        into_unnamed(BlockEvicted(event.block_id, event.hash) if is_eviction else event)

    sim = Simulation(4, 4, emit=emit, max_num_batched_tokens=1000, max_num_seqs=8, trace_tokens=True)
    for prompt in (A + B, C + D, [5] * 8, A + B):
        sim.add(prompt, 1)
        sim.run()
    named.finish()
    third, again = named.lookups[2:]
    assert again.reason == "evicted"
    assert again.evicted_for == third.label == unnamed.lookups[-1].evicted_for
    assert again.wanted_step == again.step
    assert [event.for_seq_id for event in events if isinstance(event, BlockEvicted)][:2] == [third.seq_id] * 2
    told = lookup_story(again)
    assert f"was evicted at step {again.evicted_step} to make room for request {third.label}" in told
    assert "1 more block would have kept it" in told
    assert again.num_evicted == 2
    assert f"evicted at step {again.evicted_step}; keeping it would take at least " in why_it_ended(again)


@pytest.mark.parametrize("seed", range(12))
def test_a_pool_that_is_larger_by_fewer_blocks_does_not_hit(seed):
    """Requests one after the other: with one block fewer than the least that is named, the lookup misses as well."""
    rng = random.Random(seed)
    heads = [[rng.randrange(50) for _ in range(4 * rng.randrange(1, 5))] for _ in range(6)]
    prompts = [rng.choice(heads) + [rng.randrange(50) for _ in range(rng.randrange(1, 9))] for _ in range(30)]
    lookups = Explained(num_blocks=9).run(*prompts)
    evicted = [(place, lookup) for place, lookup in enumerate(lookups) if lookup.reason == "evicted"]
    assert evicted
    for place, lookup in evicted:
        assert lookup.num_more_blocks is not None
        fewer = Explained(num_blocks=9 + lookup.num_more_blocks - 1).run(*prompts)[place]
        assert fewer.event.blocks_hit <= lookup.event.blocks_hit


def test_what_two_sequences_compute_at_the_same_time_is_taken_over_block_by_block():
    """Chunks of one block: each computes what the other has not, the first A and C, the second B."""
    explained = Explained(max_num_batched_tokens=8, chunked_prefill_size=4)
    explained.sim.add(A + B + C + [1], 1)
    explained.sim.add(A + B + C + [2], 1)
    explained.sim.run()
    explained.explainer.finish()
    first, second = explained.explainer.lookups
    assert (first.reason, first.late_tokens_hit) == ("no_shared_prefix", 4)
    assert (second.reason, second.event.tokens_hit, second.late_tokens_hit) == ("not_seen_before", 4, 4)
    assert "4 tokens were reused later from another sequence" in why_it_ended(second)
    totals = totals_of(explained.explainer.lookups, own=False)
    assert (totals.hit, totals.late_hit, totals.first_seen, totals.last_block, totals.ideal) == (4, 8, 12, 2, 12)


def test_tokens_computed_twice_at_the_same_time_are_lost_in_flight():
    """Chunks of half a block: both compute the first half of A, then the second takes over the whole of it."""
    explained = Explained(max_num_batched_tokens=4, chunked_prefill_size=2)
    explained.sim.add([*A, 1], 1)
    explained.sim.add([*A, 2], 1)
    explained.sim.run()
    explained.explainer.finish()
    _, second = explained.explainer.lookups
    assert (second.reason, second.event.blocks_hit, second.late_tokens_hit) == ("in_flight", 0, 2)
    totals = totals_of(explained.explainer.lookups, own=False)
    assert (totals.hit, totals.late_hit, totals.in_flight, totals.first_seen, totals.ideal) == (0, 2, 2, 4, 4)


def test_totals_add_up_and_the_ceiling_is_the_unlimited_cache():
    rng = random.Random(2)
    heads = [[rng.randrange(9) for _ in range(rng.randrange(4, 30))] for _ in range(5)]
    prompts = [rng.choice(heads) + [rng.randrange(9) for _ in range(rng.randrange(1, 9))] for _ in range(60)]
    small, large = Explained(num_blocks=12), Explained(num_blocks=10_000)
    small.run(*prompts)
    large.run(*prompts)
    totals, unlimited = totals_of(small.explainer.lookups, own=False), totals_of(large.explainer.lookups, own=False)
    parts = ("hit", "late_hit", "evicted", "in_flight", "first_seen", "last_block", "last_token", "not_known")
    assert sum(getattr(totals, part) for part in parts) == totals.num_tokens
    assert totals.evicted > 0
    assert unlimited.evicted == 0
    assert totals.ideal == unlimited.ideal == unlimited.hit


def test_the_longest_shared_prefix_is_seen_without_tokens():
    """240 shared tokens are 15 blocks of 16, and none of 256: the reason for 0 % hits."""
    explained = Explained(num_blocks=10, block_size=256, trace_tokens=False)
    shared = [3] * 240
    explained.run(shared + [1] * 60, shared + [2] * 60)
    assert longest_shared_prefix(explained.explainer.lookups) == 240
    assert totals_of(explained.explainer.lookups, own=False).hit == 0


def test_divergence_in_words():
    explained = Explained(num_blocks=100)
    explained.run([1, 2, 3, 4, 5, 6], [7, 7])
    (lookup,) = explained.run([1, 2, 3, 9, 5])
    assert lookup.divergence is not None
    assert lookup.divergence.num_shared_tokens == 3
    text = divergence_text(lookup.divergence, lambda ids: " ".join(map(str, ids)))
    assert text.startswith('first divergence at token 3: earlier "1 2 3 4 5 6')
    assert text.endswith('(request request-0) vs prompt "1 2 3 9 5"')
    assert "[1, 2, 3, 9, 5]" in divergence_text(lookup.divergence, None)
    (ended,) = explained.run([1, 2])
    assert ended.divergence is not None
    assert divergence_text(ended.divergence, None).endswith("vs prompt [1, 2] (its end)")


def test_divergence_is_from_the_most_similar_of_all_earlier_sequences():
    rng = random.Random(4)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 12))] for _ in range(60)]
    explained = Explained(num_blocks=1000)
    lookups = explained.run(*prompts)
    seqs = explained.sim.seqs
    for place, lookup in enumerate(lookups[1:], 1):
        earlier = [seq.token_ids for seq in seqs[:place]]
        expected = max(shared(prompts[place], other) for other in earlier)
        assert lookup.divergence is not None
        assert lookup.divergence.num_shared_tokens == expected


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_further_sample_that_finds_its_prompt_cached_hits_its_own_request():
    """The sequence limit keeps the second sample from being forked: it waits and looks up what the first computed."""
    explained = Explained(max_num_seqs=1)
    explained.sim.add(A + B + [1], 2, n=2)
    explained.sim.run()
    explained.explainer.finish()
    first, own = totals_of(explained.explainer.lookups, own=False), totals_of(explained.explainer.lookups, own=True)
    assert (first.num_lookups, first.hit) == (1, 0)
    assert (own.num_lookups, own.hit) == (1, 8)


def test_what_a_preempted_sequence_lost_is_named_and_what_only_part_of_a_block_shares_is_not_lost():
    explained = Explained(num_blocks=7, block_size=2, max_num_seqs=3)
    for index in range(3):
        explained.sim.add([0, 0, 0, 10 * index, 5], 6)
    explained.sim.run()
    explained.explainer.finish()
    lookups = explained.explainer.lookups
    first = [lookup for lookup in lookups if not lookup.own]
    assert [lookup.num_shared_tokens for lookup in first] == [0, 3, 3]
    assert [lookup.num_lost_tokens() - (lookup.num_evicted + lookup.num_in_flight) * 2 for lookup in first] == [0, 0, 0]
    assert any(lookup.own and lookup.num_lost_tokens() for lookup in lookups)


def test_each_salt_has_a_hit_rate_of_its_own():
    explained = Explained()
    explained.run(A + B + C, cache_salt="first")
    explained.run(A + B + C, A + B + C, cache_salt="second")
    explained.run(A + B + D)
    rows = {row.salt: (row.num_lookups, row.num_tokens, row.tokens_hit) for row in salts(explained.explainer.lookups)}
    assert rows == {"1": (1, 12, 0), "2": (2, 24, 11), "none": (1, 12, 0)}
    assert next(row.salt for row in salts(explained.explainer.lookups)) == "2"
    assert salts(Explained().run(A + B, A + B)) == []


def vetoed_events():
    """Two prompts of 30 tokens that share 26; snapshots after every 16 tokens, in blocks of 4."""
    events = []
    sim = Simulation(64, 4, emit=events.append, max_num_batched_tokens=64, num_state_slots=4, checkpoints="16")
    for last in (1, 2):
        sim.add([7] * 26 + [last] * 4, 1)
        sim.run()
    return events


def test_explain_counts_what_guesses_make_a_state_compute_once_more(tmp_path):
    """The only slot is that of the sequence, so its state sees no guess: of each eight all are right."""
    answer, events = None, []
    for _ in range(2):
        events.clear()
        drafter = None if answer is None else Oracle({("0", 0): answer})
        sim = Simulation(64, emit=events.append, drafter=drafter, max_num_batched_tokens=64, num_state_slots=1)
        sim.add([1, 2, 3], 20, request_id="0")
        sim.run()
        answer = sim.seqs[0].output_token_ids
    told = " ".join(pagedcli("explain", write(tmp_path / "run.jsonl", events)).stdout.split())
    assert "16 of 16 draft tokens accepted; 16 tokens computed once more for the recurrent state." in told


def test_a_lookup_names_the_snapshot_that_vetoed_cached_blocks():
    explainer, state = explain_trace(EventList(vetoed_events()))
    first, second = explainer.lookups
    assert first.reason == "no_shared_prefix"
    assert second.reason == "no_snapshot"
    assert why_it_ended(second) == (
        "24 tokens of K and V are cached, but a snapshot of the state is needed: the last one is at 16"
    )
    totals = totals_of(explainer.lookups, own=False)
    assert (totals.hit, totals.vetoed, totals.evicted) == (16, 8, 0)
    assert totals.ideal == 24
    snapshot = state.slots.snapshots[state.slots.index[next(iter(state.slots.index))]]
    assert (snapshot.num_tokens, snapshot.seq_id, snapshot.reason) == (16, 0, "interval")


def test_simulate_tries_the_snapshot_policies(tmp_path):
    rng = random.Random(0)
    shared = list(range(3, 73))
    rows = [{"prompt": [*shared, 100 + i, *(rng.randrange(3, 90) for _ in range(25))]} for i in range(12)]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    flags = ("--pool", "200", "--num-state-slots", "12", "--max-num-seqs", "4", "--checkpoints", "end")
    found = json.loads(pagedcli("simulate", prompts, *flags, "--format", "json").stdout)
    assert found["pools"][0]["num_cached_tokens"] == 0
    assert found["cures"][0]["flags"] == ["--checkpoints", "branches"]
    assert found["ideal_hit_rate"] == 11 * 64 / found["num_prompt_tokens"] == found["cures"][0]["hit_rate_after"]
