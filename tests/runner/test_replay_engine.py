"""What the real engine records: every law holds, in order and one step ahead, and looking changes no token. One
step ahead gives what the plain loop gives: tokens, reasons, log-probabilities."""

import random
from contextlib import nullcontext

import pytest
from bit_settings import by_default
from harness.core import stop_at
from harness.engine import make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import tiny_model

from pagedcli.errors import RequestError
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.check import TraceChecker, check_trace
from pagedcli.trace.files import TraceReader, TraceWriter
from pagedcli.trace.fold import pool_fold
from pagedcli.views.moment import Moment

SMALL = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("replay"), **SMALL)


def run(model, emit, *, seed=0, trace_tokens=False, **config):
    """A random workload with shared prefixes, forks, salts, aborts and requests that cannot be. Returns its tokens."""
    rng = random.Random(seed)
    config = {"num_kvcache_blocks": 12, "block_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 12, **config}
    engine = make_engine(model, emit=emit, trace_tokens=trace_tokens, **config)
    tokens, waiting = {}, list(range(24))
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.randrange(3)):
            if waiting:
                add(engine, waiting.pop(0), rng)
        if rng.random() < 0.05:
            engine.abort(str(rng.randrange(24)))
        for output in engine.step():
            tokens[output.request_id] = [sample.token_ids for sample in output.samples]
    engine.step()  # an idle step: what a step ahead still held is read
    return tokens


def add(engine, number, rng):
    prompt = [3] * rng.randrange(7) + [rng.randrange(3, 6) for _ in range(rng.randrange(1, 5))]
    max_tokens = 40 if number % 11 == 10 else rng.randrange(1, 9)
    params = SamplingParams(temperature=1.0, seed=number, max_tokens=max_tokens, n=rng.choice([1, 1, 2]))
    too_long = len(prompt) + max_tokens - 1 > engine.plan.num_blocks * engine.limits.block_size
    with pytest.raises(RequestError) if too_long else nullcontext():
        engine.add_request(str(number), prompt, params, cache_salt="a" if number % 5 == 0 else None)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"chunked_prefill_size": 3},
        {"enable_prefix_caching": False},
        {"preemption_policy": "largest", "num_kvcache_blocks": 9},
        {"num_kvcache_blocks": 64, "block_size": 4},
    ],
    ids=str,
)
def test_every_law_holds_for_the_real_engine(model, config, seed, ahead):
    checker = TraceChecker()
    run(model, checker, seed=seed, trace_tokens=True, async_scheduling=ahead, **config)
    result = checker.result(())
    assert result.notes == ()
    assert result.state.num_used_blocks == 0
    assert len(result.state.refused) == (0 if config.get("num_kvcache_blocks") == 64 else 2)


@pytest.mark.bits
@pytest.mark.parametrize("ahead", [False, True])
def test_looking_changes_no_token(model, tmp_path, ahead):
    path = tmp_path / "run.jsonl.zst"
    plain = run(model, None, async_scheduling=ahead)
    with TraceWriter(path) as writer:
        assert run(model, writer, trace_tokens=True, async_scheduling=ahead) == plain
    check_trace(TraceReader(path))


def test_the_figures_of_the_fold_are_those_of_the_engine(model):
    moment = Moment()
    engine = make_engine(model, emit=pool_fold(moment), num_kvcache_blocks=10, block_size=2, max_num_seqs=4)
    for number in range(8):
        engine.add_request(str(number), [3, 4, 5, 3 + number % 3], SamplingParams(temperature=0, max_tokens=9))
    while engine.has_unfinished_requests():
        engine.step()
    stats, figures = engine.stats, moment.stats.facts
    assert figures.num_preemptions == stats.num_preemptions > 0
    assert figures.num_generated_tokens == stats.num_generated_tokens
    assert figures.peak_used_blocks == stats.peak_used_blocks
    assert figures.num_steps == stats.num_steps
    assert len(moment.state.finished) == 8


# ---------------------------------------------------------------------- one step ahead


def results_of(path, requests, *, ahead, arrivals=None, **config):
    """All samples' results by (request, index), and the engine; the pool is compared with its events at every step."""
    checker = TraceChecker()
    engine = make_engine(path, emit=checker, trace_tokens=True, async_scheduling=ahead, **config)
    state = checker.state
    waiting = list(enumerate(requests))
    results = {}
    for _ in range(3000):
        for _ in range(arrivals or len(requests)):
            if waiting:
                number, (prompt, params, stop) = waiting.pop(0)
                make = stop_at(stop) if stop else None
                engine.add_request(str(number), prompt, params, make_stop_checker=make)
        for output in engine.step():
            for sample in output.samples:
                logprobs = [(p.token_id, p.logprob, p.top) for p in sample.logprobs or ()]
                ending = (sample.finish_reason, sample.stop_reason)
                results[int(output.request_id), sample.index] = (sample.token_ids, ending, logprobs)
        engine.block_manager.check(engine.scheduler.running)
        assert state.ref_counts == [block.ref_count for block in engine.block_manager.blocks]
        assert state.hashes == [block.hash for block in engine.block_manager.blocks]
        assert list(state.free_block_ids) == list(engine.block_manager.free_block_ids)
        if not waiting and not engine.has_unfinished_requests():
            break
    assert engine.block_manager.num_free_blocks == engine.plan.num_blocks
    assert len(results) == sum(params.n for _, params, _ in requests)
    return results, engine


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 1.0, 2.0]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    seed=st.integers(0, 3),
    stop_token_ids=st.none() | st.lists(st.integers(3, 11), max_size=3),
    ignore_eos=st.booleans(),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logprobs=st.sampled_from([None, None, 2]),
    top_k=st.sampled_from([0, 0, 5]),
)
# few different tokens, so that prefixes are shared
request = st.tuples(
    st.lists(st.integers(3, 4), min_size=1, max_size=9),
    params,
    st.none() | st.lists(st.integers(3, 11), min_size=2, max_size=2),
)
configs = st.fixed_dictionaries(
    {
        "num_kvcache_blocks": st.integers(9, 14),
        "block_size": st.just(2),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.just(12),
        "chunked_prefill_size": st.none() | st.integers(1, 5),
        "enable_prefix_caching": st.booleans(),
        "preemption_policy": st.sampled_from(["last", "largest"]),
    }
)


@pytest.mark.long
@pytest.mark.bits
@settings(max_examples=50, deadline=None)
@given(requests=st.lists(request, min_size=1, max_size=7), config=configs, arrivals=st.integers(1, 7))
def test_one_step_ahead_gives_the_tokens_of_the_plain_loop(model, requests, config, arrivals):
    plain, _ = results_of(model, requests, ahead=False, **config)
    ahead, _ = results_of(model, requests, ahead=True, arrivals=arrivals, **config)
    for key, (token_ids, ending, logprobs) in plain.items():
        assert ahead[key][:2] == (token_ids, ending)
        assert [p[0] for p in ahead[key][2]] == [p[0] for p in logprobs]
        assert [p[1] for p in ahead[key][2]] == pytest.approx([p[1] for p in logprobs], abs=1e-4)


@pytest.mark.bits
def test_penalties_change_no_order_of_steps_and_see_the_tokens_that_the_host_has_not_read(model):
    kinds = [{"repetition_penalty": 1.2}, {"frequency_penalty": 1.5, "presence_penalty": -1.0}, {"temperature": 0.9}]
    kinds += [{"repetition_penalty": 0.8, "frequency_penalty": 2.0, "n": 2, "temperature": 1.1, "seed": 3}]
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **kind}) for kind in kinds]
    requests = [([3, 4 + row], each, None) for row, each in enumerate(params)] * 2
    expected, _ = results_of(model, requests, ahead=False, max_num_seqs=4)
    found, engine = results_of(model, requests, ahead=True, max_num_seqs=4)
    assert found == expected
    assert by_default(engine.num_steps_ahead > 30)
    few, engine = results_of(model, requests, ahead=True, max_num_seqs=4, num_kvcache_blocks=6)
    assert few == expected
    assert by_default(engine.stats.num_preemptions > 0)
