"""CUDA graphs but for the capture itself: buckets, padding and fixed buffers, with the body run eagerly on a CPU."""

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


def test_preemption_and_growth_reach_the_tables_of_the_device_and_larger_steps_run_without_a_graph(model):
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 10
    prompts = ragged_prompts(10)
    expected = run(make_engine(model, padded=False), prompts, params)
    engine = make_engine(model, padded=True, sizes=[1, 2, 4], num_kvcache_blocks=18, async_scheduling=True)
    assert run(engine, prompts, params) == expected
    assert engine.stats.num_preemptions > 0
    assert {bucket for _, bucket in engine.runner.graphs.ran} == {1, 2, 4}


def test_padding_rows_write_nothing_and_read_only_valid_blocks(model):
    engine = make_engine(model, padded=True, attention_backend="reference")
    engine.runner.kv_cache.fill_(float("nan"))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [[tokens]] = run(engine, [[5, 6, 7]], params)
    assert tokens == run(make_engine(model, padded=False), [[5, 6, 7]], params)[0][0]
    written = (~engine.runner.kv_cache[0, 0].isnan()).flatten(1).any(1)
    assert int(written.sum()) == 1


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


def test_why_there_are_no_graphs_is_told(model):
    plan = make_engine(model, padded=False).plan
    assert (plan.graph_sizes, plan.no_graphs) == ((), "cpu has none")
    spec, cuda = read_spec(model), torch.device("cuda")
    config = EngineConfig(model=str(model))
    assert "enforce_eager" in why_no_graphs(EngineConfig(enforce_eager=True), spec, cuda, ReferenceAttention)
    assert "reference needs lengths on the host" in why_no_graphs(config, spec, cuda, ReferenceAttention)
