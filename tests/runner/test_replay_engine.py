"""What the real engine records: every law holds, in order and one step ahead, and looking changes no token."""

import random
from contextlib import nullcontext

import pytest
from model_zoo import tiny_model

from pagedcli.config import EngineConfig
from pagedcli.errors import RequestError
from pagedcli.runner.llm_engine import LLMEngine
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
    engine_config = EngineConfig(model=str(model), dtype="float32", device="cpu", **config)
    engine = LLMEngine(engine_config, emit=emit, trace_tokens=trace_tokens)
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
    run(model, checker.apply, seed=seed, trace_tokens=True, async_scheduling=ahead, **config)
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
    config = EngineConfig(
        model=str(model), dtype="float32", device="cpu", num_kvcache_blocks=10, block_size=2, max_num_seqs=4
    )
    engine = LLMEngine(config, emit=pool_fold(moment))
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
