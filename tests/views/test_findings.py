"""What a run says in words: facts from the events and from the engine's counters agree, and the advice follows them."""

import json
import random
import shutil
from pathlib import Path

import pytest
from cli_harness import pagedcli
from model_zoo import tiny_model
from scripted import Simulation
from trace_harness import EventList, simulated

import pagedcli as package
from pagedcli.cli.summary import engine_facts
from pagedcli.core.groups import TableShape
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.file import TraceReader
from pagedcli.trace.fold import Fold, fold
from pagedcli.trace.state import PoolState
from pagedcli.views.findings import RunFacts, advice, finding_lines, story
from pagedcli.views.whole_run import WholeRun

DEMO = Path(package.__file__).parent / "assets" / "demo"


def facts_of(events):
    run = WholeRun()
    state = fold(EventList(events) if isinstance(events, list) else events, run)
    run.finish(state)
    return run, run.facts(state)


def simulation(prompts, *, num_blocks=64, block_size=16, **limits):
    """A run of these prompts, and its facts from the events."""
    run = WholeRun()
    folding = Fold(PoolState(), run)
    sim = Simulation(num_blocks, block_size, emit=folding, max_num_batched_tokens=4096, **limits)
    for prompt in prompts:
        sim.add(prompt, 4)
    sim.run()
    run.finish(folding.state)
    return sim, run.facts(folding.state)


def shared_prompts(num_shared, num_prompts=6, num_own=300):
    return [[1] * num_shared + [10 + n] * num_own for n in range(num_prompts)]


@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("num_shared", [15, 96, 240])
def test_counters_and_events_agree(block_size, num_shared):
    sim, facts = simulation(shared_prompts(num_shared), block_size=block_size, max_num_seqs=2)
    cache = sim.stats.cache
    assert cache.num_looked_up == facts.num_looked_up
    assert cache.num_ideal[block_size] == facts.num_ideal == 5 * (num_shared // block_size * block_size)
    assert cache.longest_shared == facts.longest_shared // 16 * 16 == num_shared // 16 * 16
    assert sim.stats.num_cached_tokens == facts.num_hit
    assert {
        size: ideal - facts.num_ideal for size, ideal in cache.num_ideal.items() if size < block_size
    } == facts.gains
    assert cache.waiting_ns.keys() == facts.waiting_s.keys()


@pytest.mark.parametrize("windows", [(20,), (24, None), (17, 17, None)])
@pytest.mark.parametrize("block_size", [4, 16])
def test_counters_and_events_agree_on_models_with_windows(windows, block_size):
    """Also where blocks are released while sequences run, evicted, and sequences preempted."""
    prompts = [[1 + n % 2] * 40 + [10 + n] * (3 * n) for n in range(10)]
    tables = TableShape(block_size, windows)
    for num_blocks in (tables.most_blocks(40 + 27 + 3, 16) + 3, 60 * len(windows)):
        limits = {"windows": windows, "chunked_prefill_size": 16, "max_num_seqs": 3, "max_model_len": 90}
        sim, facts = simulation(prompts, num_blocks=num_blocks, block_size=block_size, **limits)
        stats, cache = sim.stats, sim.stats.cache
        assert (cache.num_looked_up, stats.num_cached_tokens) == (facts.num_looked_up, facts.num_hit)
        assert (stats.num_preemptions, stats.num_recomputed_tokens) == (facts.num_preemptions, facts.num_recomputed)
        assert (stats.num_generated_tokens, stats.peak_used_blocks) == (facts.num_generated, facts.peak_used_blocks)
        assert facts.num_hit <= cache.num_ideal[block_size] == facts.num_ideal
        assert cache.longest_shared == facts.longest_shared // cache.unit * cache.unit
        assert cache.waiting_ns.keys() == facts.waiting_s.keys()
        assert facts.peak_waste >= cache.peak_waste > 0  # the counters sample


def test_summary_and_metrics_of_a_model_with_windows_are_those_of_its_trace(tmp_path):
    model = tiny_model("gemma3", tmp_path / "m", sliding_window=24, vocab_size=1024, num_hidden_layers=3,
                       sliding_window_pattern=3)  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, model)
    prompts, trace = tmp_path / "in.jsonl", tmp_path / "run.jsonl"
    rows = [{"prompt": [5 + n % 2] * 40 + [50 + n] * n, "max_tokens": 6} for n in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pagedcli(
        "generate", prompts, "-m", model, "-o", tmp_path / "out.jsonl", "--max-num-seqs", "3", "--block-size", "8",
        "--max-model-len", "64", "--num-gpu-blocks-override", "30", "--ignore-eos", "--record", trace,
        "--metrics", tmp_path / "run.prom", "--summary-json", tmp_path / "summary.json",
    )  # fmt: skip
    facts = facts_of(TraceReader(trace))[1]
    summary = json.loads((tmp_path / "summary.json").read_text())
    lines = [line.split() for line in (tmp_path / "run.prom").read_text().splitlines() if not line.startswith("#")]
    metrics = {name.removeprefix("pagedcli_"): float(value) for name, value in lines}
    for key, name, value in (
        ("prompt_tokens", "prompt_tokens_total", facts.num_looked_up),
        ("cached_tokens", "prompt_tokens_cached_total", facts.num_hit),
        ("generated_tokens", "generated_tokens_total", facts.num_generated),
        ("preemptions", "preemptions_total", facts.num_preemptions),
        ("kv_blocks_peak", "kv_blocks_peak", facts.peak_used_blocks),
        ("steps", "steps_total", facts.num_steps),
    ):
        assert summary[key] == metrics[name] == value, key
    assert facts.num_hit > 0
    assert metrics["kv_blocks_used"] == 0
    assert summary["cache"]["ideal_hit_rate"] == facts.num_ideal / facts.num_looked_up


def test_the_ceiling_says_of_how_many_tokens_it_is(monkeypatch):
    monkeypatch.setattr("pagedcli.core.cache_counters.MOST_KNOWN", 8)
    sim, _ = simulation(shared_prompts(240, num_own=16), max_num_seqs=1)
    facts = engine_facts(sim, is_reordered=False)
    assert facts.ideal_of == 8 * 16
    assert "(cache of the newest 128 tokens)" in dict(finding_lines(facts))["prefixes"]
    few, _ = simulation([[1] * 40] * 2, max_num_seqs=1)
    assert "(unlimited cache)" in dict(finding_lines(engine_facts(few, is_reordered=False)))["prefixes"]


@pytest.mark.parametrize("seed", range(4))
def test_ceiling_of_the_counters_on_random_prompts(seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(2)] * rng.randrange(1, 90) + [rng.randrange(3)] * 9 for _ in range(30)]
    sim, facts = simulation(prompts, num_blocks=300, max_num_seqs=1)
    assert sim.stats.cache.num_ideal[16] == facts.num_ideal == facts.num_hit  # nothing is evicted, none overlap


def test_waste_of_the_counters_is_that_of_the_events():
    sim, facts = simulation([[n] * 40 for n in range(4)], max_num_seqs=4)
    assert sim.stats.cache.peak_waste == pytest.approx((3 * 16 - 40) / 48)  # in the first step, which is sampled
    assert facts.peak_waste == pytest.approx((3 * 16 - 40) / 48)


def test_block_size_is_advised_where_smaller_blocks_would_be_shared():
    _, facts = simulation(shared_prompts(240), block_size=256, max_num_seqs=1)
    assert facts.num_ideal == 0
    assert facts.gains == {16: 5 * 240, 32: 5 * 224, 64: 5 * 192, 128: 5 * 128}
    assert advice(facts).setting == "--block-size"
    assert "--block-size 32 instead of 256 would find up to 1,120 tokens" in advice(facts).text  # 0.9 of the best gain
    assert dict(finding_lines(facts))["prefixes"].startswith("longest shared 240 tokens = 0 blocks of 256; found 0.0 %")


def test_the_counters_also_see_what_prompts_below_a_block_share():
    sim, facts = simulation(shared_prompts(240, num_own=10), block_size=256, max_num_seqs=1)
    assert facts.longest_shared == 0  # no block was ever full, so the events do not show it
    assert sim.stats.cache.longest_shared == 240
    assert sim.stats.cache.num_ideal == {16: 5 * 240, 32: 5 * 224, 64: 5 * 192, 128: 5 * 128, 256: 0}


def test_a_larger_pool_is_advised_after_preemptions_and_the_pool_it_names_is_enough():
    prompts = [[n] * 40 for n in range(6)]
    sim, facts = simulation(prompts, num_blocks=7, max_num_seqs=4, block_size=8)
    preempted = facts_of(simulated(num_blocks=12, num_requests=40))[1]
    assert preempted.num_recomputed
    assert advice(preempted).setting in ("--num-gpu-blocks-override", "--reorder")
    enough = preempted.num_enough_blocks
    assert facts_of(simulated(num_blocks=enough, num_requests=40))[1].num_preemptions == 0
    assert sim.stats.num_preemptions == facts.num_preemptions


def test_order_is_advised_where_content_was_evicted_before_its_next_use():
    prompts = [[1 + n % 3] * 64 + [50 + n] * 8 for n in range(12)]
    _, facts = simulation(prompts, num_blocks=8, max_num_seqs=1)
    assert facts.num_evicted
    assert advice(facts).setting == "--reorder"
    _, in_order = simulation(sorted(prompts), num_blocks=8, max_num_seqs=1)
    assert in_order.num_evicted == 0
    assert in_order.num_hit == facts.num_hit + facts.num_evicted  # as promised
    assert advice(in_order).setting != "--reorder"


def test_a_sequence_limit_is_advised_only_where_the_pool_has_room():
    prompts = [[n] * 20 for n in range(12)]
    _, facts = simulation(prompts, num_blocks=64, max_num_seqs=1)
    assert advice(facts).setting == "--max-num-seqs"
    _, full = simulation(prompts, num_blocks=2, max_num_seqs=1)
    assert advice(full).setting is None


def test_without_prefix_caching_the_advice_is_to_turn_it_on():
    _, facts = simulation(shared_prompts(64), enable_prefix_caching=False)
    assert advice(facts).setting == "--enable-prefix-caching"
    assert "prefixes" not in dict(finding_lines(facts))
    assert story(facts)[1] == "Prefix caching was off."


def test_the_story_is_three_sentences_also_of_an_empty_run():
    assert len(story(RunFacts(block_size=16, num_blocks=4, max_num_seqs=2))) == 3
    for sentence in story(facts_of(simulated())[1]):
        assert sentence[0].isupper() or sentence[0].isdigit()
        assert sentence.endswith(".")


def test_the_parts_of_a_requests_time_add_up():
    run, facts = facts_of(simulated())
    assert sum(row.num_output for row in run.requests) == facts.num_generated
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
    assert sim.stats.cache.peak_waste == pytest.approx((16 - 4) / 16)
