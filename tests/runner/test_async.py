"""One step ahead gives what the plain loop gives: tokens, reasons, logprobs, and events that fold to the same pool."""

import pytest
from bit_settings import by_default
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import tiny_model

from pagedcli.config import EngineConfig
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.check import TraceChecker

SMALL = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("async"), **SMALL)


def stop_at(text):
    """A checker of a 'stop string' of token ids."""

    def make():
        seen = []

        def check(token_id):
            seen.append(token_id)
            return "stop" if seen[-len(text) :] == text else None

        return check

    return make


def run(path, requests, *, ahead, arrivals=None, **config):
    """All samples' results by (request, index), and the engine; the pool is compared with its events at every step."""
    checker = TraceChecker()
    engine = LLMEngine(
        EngineConfig(model=str(path), dtype="float32", device="cpu", async_scheduling=ahead, **config),
        emit=checker.apply,
        trace_tokens=True,
    )
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


@pytest.mark.long
@pytest.mark.bits
@settings(max_examples=50, deadline=None)
@given(
    requests=st.lists(request, min_size=1, max_size=7),
    num_blocks=st.integers(9, 14),
    max_num_seqs=st.integers(1, 5),
    chunk=st.none() | st.integers(1, 5),
    caching=st.booleans(),
    policy=st.sampled_from(["last", "largest"]),
    arrivals=st.integers(1, 7),
)
def test_one_step_ahead_gives_the_tokens_of_the_plain_loop(
    model, requests, num_blocks, max_num_seqs, chunk, caching, policy, arrivals
):
    config = {
        "num_kvcache_blocks": num_blocks,
        "block_size": 2,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 12,
        "chunked_prefill_size": chunk,
        "enable_prefix_caching": caching,
        "preemption_policy": policy,
    }
    plain, _ = run(model, requests, ahead=False, **config)
    ahead, _ = run(model, requests, ahead=True, arrivals=arrivals, **config)
    for key, (token_ids, ending, logprobs) in plain.items():
        assert ahead[key][:2] == (token_ids, ending)
        assert [p[0] for p in ahead[key][2]] == [p[0] for p in logprobs]
        assert [p[1] for p in ahead[key][2]] == pytest.approx([p[1] for p in logprobs], abs=1e-4)


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def test_steps_are_launched_before_the_last_tokens_are_read(model):
    requests = [([3, 4, 5], GREEDY, None)] * 3
    _, plain = run(model, requests, ahead=False, max_num_seqs=4)
    _, ahead = run(model, requests, ahead=True, max_num_seqs=4)
    assert plain.num_steps_ahead == 0
    assert ahead.num_steps_ahead == 19
    assert ahead.num_discarded_tokens == 0
    assert ahead.stats.num_generated_tokens == plain.stats.num_generated_tokens == 60


@pytest.mark.bits
def test_penalties_change_no_order_of_steps_and_see_the_tokens_that_the_host_has_not_read(model):
    kinds = [{"repetition_penalty": 1.2}, {"frequency_penalty": 1.5, "presence_penalty": -1.0}, {"temperature": 0.9}]
    kinds += [{"repetition_penalty": 0.8, "frequency_penalty": 2.0, "n": 2, "temperature": 1.1, "seed": 3}]
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **kind}) for kind in kinds]
    requests = [([3, 4 + row], each, None) for row, each in enumerate(params)] * 2
    expected, _ = run(model, requests, ahead=False, max_num_seqs=4)
    found, engine = run(model, requests, ahead=True, max_num_seqs=4)
    assert found == expected
    assert by_default(engine.num_steps_ahead > 30)
    few, engine = run(model, requests, ahead=True, max_num_seqs=4, num_kvcache_blocks=6)
    assert few == expected
    assert by_default(engine.stats.num_preemptions > 0)
