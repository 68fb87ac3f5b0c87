"""What a run says in words: facts from the events and from the engine's counters agree, and say why."""

import json
import random
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from cli_harness import pagedcli
from harness.core import EventList, Simulation, run_at_random, simulated
from msgspec.structs import replace

import pagedcli as package
from pagedcli.core.facts import RunFacts
from pagedcli.events import (
    MISS_WORDS,
    SNAPSHOT_WORDS,
    WAITING_WORDS,
    MissReason,
    PrefixLookedUp,
    SnapshotReason,
    WaitingReason,
)
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.dispatch import View
from pagedcli.trace.files import TraceReader, TraceWriter
from pagedcli.trace.fold import Fold, fold
from pagedcli.trace.state import PoolState
from pagedcli.views.stats import memory_use
from pagedcli.views.whole_run import Findings, WholeRun, costs, finding_lines, story

DEMO = Path(package.__file__).parent / "assets" / "demo"


def findings_of(events):
    run = WholeRun()
    state = fold(EventList(events) if isinstance(events, list) else events, run)
    run.finish(state)
    return run, run.findings(state)


def simulation(prompts, *, num_blocks=64, block_size=16, params=None, as_recorded=lambda event: event, **limits):
    """A run of these prompts, and its findings from the events as they were recorded."""
    run = WholeRun()
    folding = Fold(PoolState(), run)
    limits = {"max_num_batched_tokens": 4096, **limits}
    sim = Simulation(num_blocks, block_size, emit=lambda event: folding(as_recorded(event)), **limits)
    for prompt in prompts:
        sim.add(prompt, 4, params=params)
    sim.run()
    run.finish(folding.state)
    return sim, run.findings(folding.state)


def shared_prompts(num_shared, num_prompts=6, num_own=300):
    return [[1] * num_shared + [10 + n] * num_own for n in range(num_prompts)]


PROMPTS = [[1 + n % 2] * 40 + [10 + n] * (3 * n) for n in range(10)]
RUNS = {
    "plain": {"num_blocks": 64},
    "small blocks": {"num_blocks": 200, "block_size": 4},
    "large blocks": {"num_blocks": 20, "block_size": 256},
    "blocks of 24": {"num_blocks": 40, "block_size": 24},
    "preempted": {"num_blocks": 27, "block_size": 4, "max_num_seqs": 4},
    "evicted": {"num_blocks": 10, "block_size": 8, "max_num_seqs": 1},
    "chunked": {"num_blocks": 30, "block_size": 8, "chunked_prefill_size": 5, "max_num_batched_tokens": 12},
    "beams": {"num_blocks": 90, "block_size": 4, "params": SamplingParams(beam_width=3, max_tokens=6)},
    "beams preempted": {"num_blocks": 36, "block_size": 4, "params": SamplingParams(beam_width=2, max_tokens=9)},
    "samples": {"num_blocks": 60, "block_size": 8, "params": SamplingParams(n=3, max_tokens=5)},
    "samples preempted": {"num_blocks": 26, "block_size": 4, "params": SamplingParams(n=3, max_tokens=9)},
    "windows": {"num_blocks": 60, "block_size": 4, "windows": (20,), "max_model_len": 90, "chunked_prefill_size": 16},
    "groups": {"num_blocks": 66, "block_size": 4, "windows": (24, None), "max_model_len": 90,
               "chunked_prefill_size": 16},
    "caching off": {"num_blocks": 64, "enable_prefix_caching": False},
    "one ahead": {"num_blocks": 27, "block_size": 4, "runs_ahead": True},
    "no room": {"num_blocks": 64, "max_num_seqs": 2},
    "states": {"num_blocks": 64, "block_size": 4, "num_state_slots": 9, "checkpoints": "8"},
    "states preempted": {"num_blocks": 27, "block_size": 4, "num_state_slots": 5, "max_num_seqs": 4},
    "states ahead": {"num_blocks": 40, "block_size": 4, "num_state_slots": 5, "checkpoints": "8", "runs_ahead": True},
}  # fmt: skip


def assert_equal_facts(counted, of_events):
    for each in fields(RunFacts):
        value, expected = getattr(counted, each.name), getattr(of_events, each.name)
        assert value == (pytest.approx(expected) if isinstance(value, float) else expected), each.name


@pytest.mark.parametrize("limits", RUNS.values(), ids=RUNS)
def test_every_fact_that_the_engine_counts_is_that_of_its_events(limits):
    sim, found = simulation(PROMPTS, **limits)
    assert_equal_facts(sim.stats, found.facts)
    assert sim.stats.num_steps
    assert sim.stats.peak_waste
    if limits.get("enable_prefix_caching", True):
        assert sim.stats.longest_shared == found.facts.longest_shared >= 40
        assert sim.stats.num_ideal_tokens >= sim.stats.num_cached_tokens


def test_the_runs_of_the_test_before_are_what_their_names_say():
    stats = {name: simulation(PROMPTS, **limits)[0].stats for name, limits in RUNS.items()}
    assert all(facts.num_preemptions for name, facts in stats.items() if "preempted" in name)
    assert stats["evicted"].num_evictions
    assert stats["states"].num_snapshot_hits
    assert stats["states ahead"].num_dropped_snapshots
    assert stats["states preempted"].peak_used_state_slots
    assert stats["one ahead"].num_preemptions
    assert stats["no room"].waiting_ns["max_num_seqs"]
    assert {reason for facts in stats.values() for reason in facts.waiting_ns} >= {"free_blocks", "max_num_seqs"}


@pytest.mark.parametrize("states", [{}, {"num_state_slots": 5, "checkpoints": "4"}], ids=["", "states"])
@pytest.mark.parametrize("fails", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_facts_of_random_runs(fails, seed, states):
    rng, run = random.Random(seed), WholeRun()
    folding = Fold(PoolState(), run)
    sim = Simulation(14, 2, emit=folding, max_num_batched_tokens=7, chunked_prefill_size=5, **states)
    run_at_random(sim, rng, 30, fails)
    run.finish(folding.state)
    assert (sim.stats.num_failed_steps > 0) == (fails > 0)
    assert_equal_facts(sim.stats, run.findings(folding.state).facts)
    found = costs(run.requests)
    assert sum(each.num_recomputed for each in found) == sim.stats.num_recomputed_tokens
    assert sum(each.num_computed for each in found) == sim.stats.num_computed_tokens or fails
    firsts = [seq for seq in folding.state.all_seqs() if not seq.sample_index]
    assert sum(each.num_prompt for each in found) == sum(seq.num_prompt_tokens for seq in firsts)
    assert found == sorted(found, key=lambda each: -each.num_computed)


def test_facts_of_a_resumed_run_are_those_of_its_parts(tmp_path):
    counted = None
    for part in range(2):
        with TraceWriter(tmp_path / "run.jsonl", resume=bool(part)) as writer:
            sim = Simulation(20, 4, emit=writer, max_num_batched_tokens=4096)
            for prompt in PROMPTS[5 * part : 5 * part + 5]:
                sim.add(prompt, 4)
            while sim.has_unfinished_requests() and (part or sim.stats.num_steps < 7):
                sim.step()
        if counted is None:
            counted = sim.stats
        else:
            counted.add(sim.stats, same_pool=True)
    assert_equal_facts(counted, findings_of(TraceReader(tmp_path / "run.jsonl"))[1].facts)


@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("num_shared", [15, 28, 96, 240])
def test_shared_prefixes_are_counted_to_the_token(block_size, num_shared):
    sim, found = simulation(shared_prompts(num_shared), block_size=block_size, max_num_seqs=2)
    assert sim.stats.longest_shared == num_shared
    assert sim.stats.num_ideal == 5 * (num_shared // block_size * block_size)
    assert sim.stats.num_partial_tokens == 5 * (num_shared % block_size)
    assert found.lost() == (
        [(5 * (num_shared % block_size), "shared in partial blocks")]
        * (num_shared % 16 > 0 or num_shared % block_size > 0)
    )


@pytest.mark.parametrize("limits", RUNS.values(), ids=RUNS)
def test_a_trace_without_shared_tokens_shows_nearly_as_much(limits):
    """Older traces: what their blocks show, which is less where no block was ever full."""

    def as_recorded(event):
        return replace(event, shared_tokens=None) if isinstance(event, PrefixLookedUp) else event

    sim, found = simulation(PROMPTS, as_recorded=as_recorded, **limits)
    assert found.facts.num_ideal_tokens == sim.stats.num_ideal_tokens
    assert found.facts.longest_shared <= sim.stats.longest_shared


def test_the_ceiling_says_of_how_many_tokens_it_is():
    sim, _ = simulation(shared_prompts(240, num_own=16), max_num_seqs=1)
    sim.stats.ideal_of = 128
    assert "(cache of the newest 128 tokens)" in dict(finding_lines(Findings(sim.stats)))["prefixes"]
    few, _ = simulation([[1] * 40] * 2, max_num_seqs=1)
    assert few.stats.ideal_of is None
    assert "(unlimited cache)" in dict(finding_lines(Findings(few.stats)))["prefixes"]


def test_waste_is_the_mean_of_what_the_tables_of_the_steps_show():
    shares = []

    class Steps(View):
        def on_step_scheduled(self, event, state):
            shares.append(memory_use(state).unfilled_share)

    folding = Fold(PoolState(), Steps())
    sim = Simulation(64, 16, emit=folding, max_num_batched_tokens=4096)
    for number in range(4):
        sim.add([number] * 40, 20 * number + 1)
    sim.run()
    assert sim.stats.peak_waste == max(shares)
    assert sim.stats.mean_waste == pytest.approx(sum(shares) / len(shares))
    assert shares[0] == pytest.approx((3 * 16 - 40) / 48)


def test_what_prompts_below_a_block_share_is_seen():
    sim, found = simulation(shared_prompts(240, num_own=10), block_size=256, max_num_seqs=1)
    assert found.facts.longest_shared == 240  # although no block was ever full
    assert sim.stats.num_ideal == 0


def test_without_prefix_caching_nothing_is_said_about_prefixes():
    _, found = simulation(shared_prompts(64), enable_prefix_caching=False)
    assert "prefixes" not in dict(finding_lines(found))


def test_the_story_is_a_sentence_also_of_an_empty_run():
    empty = Findings(RunFacts(block_size=16, num_blocks=4, max_num_seqs=2))
    for found in (empty, findings_of(simulated())[1]):
        assert re.fullmatch(r"[\d,]+ sequences? .*\.", story(found, 1.0))


def test_the_parts_of_a_requests_time_add_up():
    run, found = findings_of(simulated())
    assert sum(row.num_output for row in run.requests) == found.facts.num_generated_tokens
    for row in run.requests:
        assert row.total_s == pytest.approx(run.time_at(row.last_step + 1) - run.time_at(row.first_step))
        waited = row.seconds["waiting"] + row.seconds["preempted"]
        assert sum(row.waited_for.values()) <= waited + 1e-12
        assert row.ttft_s is not None
        assert row.ttft_s <= row.total_s + 1e-12
        assert row.why()


def test_an_unfilled_block_that_beams_share_counts_once():
    sim = Simulation(20, 16)
    sim.add([1, 2, 3, 4], params=SamplingParams(beam_width=2, max_tokens=8))
    sim.step()
    assert sim.stats.peak_waste == pytest.approx((16 - 4) / 16)


def test_all_commands_show_the_same_figures_of_a_run(tmp_path):
    prompts, flags = tmp_path / "in.jsonl", ("--num-kvcache-blocks", "30", "--max-num-seqs", "4")
    rows = [{"prompt": [5] * 28 + [50 + n] * (3 * n + 1), "max_tokens": 6} for n in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    to = ("-o", tmp_path / "a.jsonl", "--record", tmp_path / "run.jsonl", "--all")
    said = pagedcli("generate", prompts, *flags, *to).stderr
    found = dict(line.split(maxsplit=1) for line in said.splitlines() if line.startswith("  "))
    traced = pagedcli("trace", prompts, *flags, "--dump-kv", "--format", "json")
    steps = [json.loads(line) for line in traced.stdout.splitlines()]
    [cache] = [line for line in said.splitlines() if line.startswith("KV cache: at most")]
    assert cache in traced.stderr
    shares = [step["memory"]["unfilled_share"] for step in steps if step["memory"]["used_blocks"]]
    mean, peak = 100 * sum(shares) / len(shares), 100 * max(shares)
    assert f"{mean:.1f} % of the slots in use held no token (mean of the steps; peak {peak:.1f} %)" in found["waste"]
    assert "longest shared 28 tokens" in found["prefixes"]
    assert "longest shared prefix: 28 tokens" in pagedcli("explain", tmp_path / "run.jsonl").stdout
    assert "longest shared prefix: 28 tokens" in pagedcli("plan", prompts, "--all", *flags).stdout


def test_every_reason_to_wait_has_words():
    for words, reasons in (
        (WAITING_WORDS, WaitingReason), (SNAPSHOT_WORDS, SnapshotReason), (MISS_WORDS, MissReason)
    ):  # fmt: skip
        assert words.keys() == set(get_args(reasons))
