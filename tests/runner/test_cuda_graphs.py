"""CUDA graphs but for the capture itself: buckets, padding and fixed buffers, with the body run eagerly on a CPU."""

import contextlib

import pytest
import torch
from harness.engine import ragged_prompts, run
from model_zoo import tiny_model

from pagedcli.attention.reference import ReferenceAttention
from pagedcli.config import EngineConfig
from pagedcli.models.reading import read_spec
from pagedcli.planning.features import bucket_sizes, why_no_graphs
from pagedcli.runner import cuda_graphs
from pagedcli.runner.cuda_graphs import DecodeGraphs
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 8, 17, 100, 256, 300, 512, 700])
def test_buckets_include_one_and_the_maximum_and_waste_little(max_num_seqs):
    sizes = bucket_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, min(max_num_seqs, 512))
    for num_seqs in range(1, sizes[-1] + 1):
        assert next(size for size in sizes if size >= num_seqs) < 2 * num_seqs + (num_seqs == 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("graphs"))


def make_engine(path, *, padded, sizes=None, **config):
    config = {"max_num_seqs": 7, "num_kvcache_blocks": 64, **config}
    engine = LLMEngine(EngineConfig(model=str(path), dtype="float32", device="cpu", **config))
    if padded:
        engine.runner.graphs = graphs_of(engine.runner, CountingGraphs, capture=False, sizes=sizes)
    return engine


def graphs_of(runner, kind=DecodeGraphs, **options):
    return kind(runner.model, runner.state, runner.parallel, max_model_len=runner.limits.max_model_len, **options)


class CountingGraphs(DecodeGraphs):
    """Remembers which buckets ran."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ran = []

    def run(self, step, sampling):
        self.ran.append((step.num_seqs, self.bucket_for(step.num_seqs).num_seqs))
        return super().run(step, sampling)


PARAMS = [
    SamplingParams(temperature=t, top_k=k, max_tokens=12 + i, seed=i, ignore_eos=True, repetition_penalty=r)
    for i, (t, k, r) in enumerate([(0, 0, 1), (1.0, 0, 1), (0.7, 9, 1), (0, 0, 1.2), (2.0, 0, 1)] * 2)
]


@pytest.mark.quick("sdpa-False")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_padded_decode_gives_the_same_tokens(model, backend, ahead):
    prompts, params = ragged_prompts(10), PARAMS
    config = {"attention_backend": backend, "async_scheduling": ahead}
    expected = run(make_engine(model, padded=False, **config), prompts, params)
    engine = make_engine(model, padded=True, **config)
    assert run(engine, prompts, params) == expected
    assert {(5, 7), (6, 7), (7, 7), (3, 4)} & set(engine.runner.graphs.ran)
    assert all(num_seqs <= bucket for num_seqs, bucket in engine.runner.graphs.ran)


@pytest.mark.parametrize("ahead", [False, True])
def test_samples_of_a_prompt_whose_last_piece_is_one_token(model, ahead):
    params = SamplingParams(n=3, temperature=1.0, max_tokens=5, seed=1, ignore_eos=True)
    config = {"chunked_prefill_size": 7, "async_scheduling": ahead}
    expected = run(make_engine(model, padded=False, **config), [list(range(5, 13))], params)
    assert run(make_engine(model, padded=True, **config), [list(range(5, 13))], params) == expected


def test_preemption_and_growth_reach_the_tables_of_the_device(model):
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 10
    prompts = ragged_prompts(10)
    expected = run(make_engine(model, padded=False), prompts, params)
    engine = make_engine(model, padded=True, num_kvcache_blocks=18, async_scheduling=True)
    assert run(engine, prompts, params) == expected
    assert engine.stats.num_preemptions > 0


def test_larger_steps_run_without_a_graph(model):
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 7
    expected = run(make_engine(model, padded=False), ragged_prompts(7), params)
    engine = make_engine(model, padded=True, sizes=[1, 2, 4])
    assert run(engine, ragged_prompts(7), params) == expected
    assert all(bucket <= 4 for _, bucket in engine.runner.graphs.ran)


def test_padding_rows_write_nothing_and_read_only_valid_blocks(model):
    engine = make_engine(model, padded=True, attention_backend="reference")
    engine.runner.kv_cache.fill_(float("nan"))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [[tokens]] = run(engine, [[5, 6, 7]], params)
    assert tokens == run(make_engine(model, padded=False), [[5, 6, 7]], params)[0][0]
    written = (~engine.runner.kv_cache[0, 0].isnan()).flatten(1).any(1)
    assert int(written.sum()) == 1


def test_fixed_buffers_are_the_same_memory_at_every_step(model):
    engine = make_engine(model, padded=True)
    bucket = engine.runner.graphs.bucket_for(3)
    places = [tensor.data_ptr() for tensor in bucket.inputs]
    run(engine, ragged_prompts(4), SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True))
    assert [tensor.data_ptr() for tensor in bucket.inputs] == places
    assert torch.equal(bucket.cu_q, torch.arange(5, dtype=torch.int32))


def test_steps_of_too_many_tokens_run_without_a_graph(model, monkeypatch):
    """Their sum counts: one long sequence among short ones keeps the graph."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5] * 20, [6, 7], [8, 9, 10]]
    expected = run(make_engine(model, padded=False), prompts, params)
    for most, num_steps in ((25 + 3 * 11, 11), (25 + 3 * 5, 5)):
        monkeypatch.setattr(cuda_graphs, "GRAPH_TOKENS", most)
        engine = make_engine(model, padded=True)
        assert run(engine, prompts, params) == expected
        assert len(engine.runner.graphs.ran) == num_steps


def test_captured_buckets_are_replayed_with_the_inputs_of_the_step(model, monkeypatch):
    """With a graph that runs its body again where CUDA would replay it."""
    captured, body = [], []

    class Graph:
        def replay(self):
            self.again()

        def pool(self):
            return "pool"

    @contextlib.contextmanager
    def graph(which, pool, stream):
        captured.append(pool)
        body.clear()
        yield
        bucket, hidden = body[-1]

        def again():
            num_drawn = int(bucket.inputs.temperature.count_nonzero())
            hidden.copy_(run_body(graphs, bucket, [graphs._max_model_len] * bucket.num_seqs, num_drawn))

        which.again = again

    run_body = DecodeGraphs._body

    def remember(self, bucket, num_tokens_host, num_drawn):
        hidden = run_body(self, bucket, num_tokens_host, 0)
        body.append((bucket, hidden))
        return hidden

    for name, value in (("CUDAGraph", Graph), ("graph", graph), ("synchronize", lambda _: None), ("Stream", str)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(DecodeGraphs, "_body", remember)
    config = {"attention_backend": "reference", "async_scheduling": True}
    engine = make_engine(model, padded=False, **config)
    graphs = engine.runner.graphs = graphs_of(engine.runner, capture=True)
    assert captured == [None, "pool", "pool", "pool"], "all graphs share the memory of the first, the largest"
    expected = run(make_engine(model, padded=False, attention_backend="reference"), ragged_prompts(10), PARAMS)
    assert run(engine, ragged_prompts(10), PARAMS) == expected


def test_why_there_are_no_graphs_is_told(model):
    plan = make_engine(model, padded=False).plan
    assert (plan.graph_sizes, plan.no_graphs) == ((), "cpu has none")
    spec, cuda = read_spec(model), torch.device("cuda")
    config = EngineConfig(model=str(model))
    assert "enforce_eager" in why_no_graphs(EngineConfig(enforce_eager=True), spec, cuda, ReferenceAttention)
    assert "reference needs lengths on the host" in why_no_graphs(config, spec, cuda, ReferenceAttention)
