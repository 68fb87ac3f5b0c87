"""A model whose layers differ, traced to a file and replayed: each block's group and the table of groups are those of
the tables that the engine computed with, at every step."""

from collections import Counter

import pytest
from harness.engine import ragged_prompts
from model_zoo import tiny_model

from pagedcli.config import EngineConfig
from pagedcli.events import BlockCopied, StepScheduled
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams
from pagedcli.show.step_tables import group_table
from pagedcli.trace.check import check_trace
from pagedcli.trace.files import TraceReader, TraceWriter
from pagedcli.views.cache_groups import group_of
from pagedcli.views.moment import Replay

BLOCK_SIZE, NUM_BLOCKS = 4, 96


class Watched:
    """What an engine's tables hold at each step, and which blocks the layers of each group write."""

    def __init__(self, path, writer, **config):
        self._writer = writer
        self._config = EngineConfig(model=str(path), dtype="float32", device="cpu", **config)
        self.engine = LLMEngine(self._config, emit=self._on_event)
        self._launch, self.engine.executor.launch = self.engine.executor.launch, self._watch
        self.tables, self.written = {}, {}  # by step: of each sequence; of each group
        self._step = None

    def _on_event(self, event):
        self._writer(event)
        if isinstance(event, StepScheduled):
            self._step = event.step
            self.tables[event.step] = [list(seq.block_table) for seq in self.engine.scheduler.running]

    def _watch(self, step, sampling):
        self.written[self._step] = [
            {slot // BLOCK_SIZE for slot in slots if slot >= 0} for slots in step.slots.tolist()
        ]
        return self._launch(step, sampling)

    def run(self, prompts, params):
        for number, prompt in enumerate(prompts):
            self.engine.add_request(f"{number} of {len(prompts)}", prompt, params)
        while self.engine.has_unfinished_requests():
            self.engine.step()


@pytest.fixture(scope="module", params=["gemma4-e2b", "gemma4-26b"])
def traced(request, tmp_path_factory):
    """The watched engine and the trace that it wrote."""
    folder = tmp_path_factory.mktemp(request.param)
    path, trace = tiny_model(request.param, folder / "model", sliding_window=10), folder / "run.jsonl.zst"
    limits = {"max_num_seqs": 6, "max_model_len": 160, "chunked_prefill_size": 7, "async_scheduling": False}
    with TraceWriter(trace) as writer:
        watched = Watched(path, writer, num_kvcache_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **limits)
        params = SamplingParams(temperature=1, seed=0, n=2, max_tokens=30, ignore_eos=True)
        prompts = ragged_prompts()
        watched.run(prompts[:3], params)  # with room for their second samples, which fork
        watched.run(prompts[3:], params)
    assert watched.engine.stats.num_preemptions > 0
    assert watched.engine.stats.num_cached_tokens > 0
    assert any(isinstance(event, BlockCopied) for event in TraceReader(trace))
    return watched, trace


@pytest.mark.quick("gemma4-e2b")
def test_the_groups_of_a_trace_are_those_of_the_model(traced):
    watched, trace = traced
    state = check_trace(TraceReader(trace)).state
    assert state.started.groups == watched.engine.plan.limits.groups
    spec = watched.engine.spec
    kept = [number for number, layer in enumerate(spec.attention_layers) if layer.source is None]
    assert sorted(layer for group in state.started.groups for layer in group.layers) == kept
    for group in state.started.groups:
        assert {spec.attentions[layer].heads.kept for layer in group.layers} == {group.heads}
        assert {spec.attentions[layer].window for layer in group.layers} == {group.window}
    assert len({group.heads for group in state.started.groups}) > 1


@pytest.mark.quick("gemma4-e2b")
def test_blocks_and_tables_agree_with_the_engine_at_every_step(traced):
    watched, trace = traced
    replay, num_groups, seen = Replay(TraceReader(trace)), len(watched.engine.plan.limits.groups), 0
    for stop, step in enumerate(replay.steps):
        state = replay.go(stop).state
        tables, written = ([], []) if step is None else (watched.tables[step], watched.written[step])
        places = [(place, block_id) for table in tables for place, block_id in enumerate(table)]
        of_engine = {block_id: place % num_groups for place, block_id in places if block_id is not None}
        for group, block_ids in enumerate(written):
            assert all(of_engine[block_id] == group for block_id in block_ids)
            seen += len(block_ids)
        in_use = {block_id for block_id, count in enumerate(state.ref_counts) if count}
        assert in_use == of_engine.keys()
        assert {block_id: group_of(state, block_id) for block_id in in_use} == of_engine
        rows = group_table(state).rows
        assert [row["used_blocks"] for row in rows] == [Counter(of_engine.values())[g] for g in range(num_groups)]
        assert sum(row["cached_blocks"] for row in rows) == state.num_cached_blocks
    assert seen > 100
