"""What explain and simulate say about snapshots of recurrent state."""

import json
import random

from cli_harness import pagedcli
from harness.core import EventList, Oracle, Simulation, write

from pagedcli.answers.why import why_it_ended
from pagedcli.views.explain import explain_trace, totals_of


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
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [*shared, 100 + i, *(rng.randrange(3, 90) for _ in range(25))]} for i in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--pool", "200", "--num-state-slots", "12", "--max-num-seqs", "4", "--checkpoints", "end")
    found = json.loads(pagedcli("simulate", prompts, *flags, "--format", "json").stdout)
    assert found["pools"][0]["num_cached_tokens"] == 0
    assert found["cures"][0]["flags"] == ["--checkpoints", "branches"]
    assert found["ideal_hit_rate"] == 11 * 64 / found["num_prompt_tokens"] == found["cures"][0]["hit_rate_after"]
