"""A simulation makes the same decisions as the engine: the same events, block id for block id."""

import json
from array import array

import msgspec
import pytest
from cli_harness import pagedcli
from harness.core import Simulation, scripted_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.core.eviction import POLICIES
from pagedcli.core.groups import TableShape
from pagedcli.events import EngineStarted, PrefixLookedUp, StepFinished, StepStarted
from pagedcli.sampling_params import SamplingParams
from pagedcli.simulation.requests import Request, Requests
from pagedcli.simulation.run import simulate
from pagedcli.simulation.sources import read_recorded_run
from pagedcli.trace.files import TraceReader, TraceWriter


def decisions(events):
    """The events without times and what follows from token ids, which a simulation does not know everywhere."""
    found = []
    for event in events:
        if isinstance(event, EngineStarted):
            continue
        if isinstance(event, StepStarted | StepFinished):
            found.append((type(event).__name__, event.step))
        elif isinstance(event, PrefixLookedUp):
            found.append(msgspec.structs.replace(event, shared_tokens=None))
        elif getattr(event, "token_ids", None) is not None:
            found.append(msgspec.structs.replace(event, token_ids=None))
        else:
            found.append(event)
    return found


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(lambda tail: [7] * (len(tail) % 4) + tail)
requests = st.tuples(prompts, st.integers(1, 7), st.sampled_from([1, 1, 2]), st.sampled_from([None, None, "salt"]))


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(requests, min_size=1, max_size=8),
    num_blocks=st.integers(5, 14),
    block_size=st.integers(1, 3),
    limits=st.fixed_dictionaries({
        "max_num_batched_tokens": st.integers(2, 9),
        "chunked_prefill_size": st.sampled_from([None, 2, 5]),
        "preemption_policy": st.sampled_from(["last", "largest"]),
        "eviction": st.sampled_from(list(POLICIES)),
        "windows": st.sampled_from([(None,), (None,), (4,), (3, None), (2, 5, None)]),
    }),
)  # fmt: skip
def test_a_simulation_has_the_events_of_the_run(rows, num_blocks, block_size, limits):
    tables, most_new = TableShape(block_size, limits["windows"]), limits["max_num_batched_tokens"]
    num_blocks *= len(tables.windows)
    expected, got = [], []
    run = Simulation(num_blocks, block_size, emit=expected.append, **limits)
    workload, outputs = Requests(), {}
    for index, (prompt, max_tokens, num_samples, salt) in enumerate(rows):
        chunk = limits["chunked_prefill_size"] or most_new
        if tables.most_blocks(len(prompt) + max_tokens - 1, chunk) > num_blocks:
            continue
        run.add(prompt, max_tokens, n=num_samples, cache_salt=salt, request_id=str(index))
        workload.requests.append(
            Request(
                str(index), None, len(prompt), max_tokens, token_ids=array("q", prompt), max_new_tokens=max_tokens,
                num_samples=num_samples, cache_salt=salt,
            )
        )  # fmt: skip
    while run.has_unfinished_requests():
        for output in run.step():
            outputs[output.request_id] = [array("q", sample.token_ids) for sample in output.samples]
    for request in workload.requests:
        request.output_ids = outputs[request.request_id]
    if workload.requests:
        simulate(workload, scripted_plan(num_blocks, block_size, **limits), emit=got.append)
        assert decisions(got) == decisions(expected)


def _rows(num_rows):
    for index in range(num_rows):
        story = ("Once upon a time there was a fox", "The code of Mirano is 4821.", "Hello")[index % 3]
        yield {"prompt": f"{story} {'and so on ' * (index % 7)}{index % 50}", "max_tokens": 1 + index % 6}


@pytest.mark.long
@pytest.mark.quick("300-next-use")
@pytest.mark.parametrize(("num_rows", "eviction"), [(1000, "lru"), (300, "next-use")])
def test_a_simulated_prompt_file_has_the_events_of_generate(tmp_path, num_rows, eviction):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in _rows(num_rows)))
    pool = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--block-size", "8", "--max-model-len", "128")
    pagedcli(
        "generate", prompts, "-o", out, "--num-kvcache-blocks", "30", "--output-token-ids", *pool,
        "--record", tmp_path / "run.jsonl", "--eviction", eviction,
    )  # fmt: skip
    pagedcli(
        "simulate", prompts, "--pool", "30", "--outputs", out, *pool, "--record", tmp_path / "simulated.jsonl",
        "--policy", eviction,
    )  # fmt: skip
    expected = decisions(TraceReader(tmp_path / "run.jsonl"))
    assert any(type(event).__name__ == "BlockEvicted" for event in expected)
    assert decisions(TraceReader(tmp_path / "simulated.jsonl")) == expected


def test_a_recorded_run_is_simulated_as_it_was(tmp_path):
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "run.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in _rows(12)))
    pagedcli(
        "generate", prompts, "-o", tmp_path / "out.jsonl", "--num-kvcache-blocks", "18", "--max-num-seqs", "4",
        "--record", trace, "--record-tokens",
    )  # fmt: skip
    workload, state = read_recorded_run(trace)
    engine = state.started
    got = []
    plan = scripted_plan(
        engine.num_blocks, engine.block_size, max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens, max_model_len=engine.max_model_len,
    )  # fmt: skip
    simulate(workload, plan, emit=got.append)
    assert decisions(got) == decisions(TraceReader(trace))


@pytest.mark.parametrize("windows", [(5,), (4, None), (3, 3, None)])
@pytest.mark.parametrize("tokens", [True, False])
def test_a_recorded_run_with_windows_is_simulated_as_it_was(tmp_path, windows, tokens):
    """With tokens event by event; without, the outputs are unknown, and the prompts hit as they did."""
    trace, cached, got = tmp_path / "run.jsonl", [], []
    limits = {"windows": windows, "max_num_batched_tokens": 6, "max_num_seqs": 6, "max_model_len": 64}
    with TraceWriter(trace) as writer:
        run = Simulation(24 * len(windows), 4, emit=writer, trace_tokens=tokens, **limits)
        for index in range(12):
            prompt = [7] * 13 + [index % 3] * (index % 5 + 9) + [100 + index]  # no output is in a later prompt
            run.add(prompt, 2 + index % 3, n=1 + (index == 5), request_id=str(index))
        while run.has_unfinished_requests():
            cached += [(int(output.request_id), output.num_cached_tokens) for output in run.step()]
    workload, state = read_recorded_run(trace)
    engine = state.started
    assert engine.windows == windows
    plan = scripted_plan(engine.num_blocks, 4, **limits)
    result = simulate(workload, plan, emit=got.append)
    assert list(result.cached_tokens) == [num for _, num in sorted(cached)]
    assert sum(result.cached_tokens) > 0
    if tokens:
        assert decisions(got) == decisions(TraceReader(trace))


def test_beam_searches_of_a_recorded_run_are_left_out(tmp_path):
    with TraceWriter(tmp_path / "run.jsonl") as writer:
        run = Simulation(64, 4, emit=writer, trace_tokens=True)
        run.add([1, 2, 3], params=SamplingParams(beam_width=3, n=2, max_tokens=4, temperature=0))
        run.add([1, 2, 3, 4], 3)
        run.run()
    workload, _ = read_recorded_run(tmp_path / "run.jsonl")
    assert [request.num_prompt_tokens for request in workload.requests] == [4]
    assert "1 beam search, which simulate does not model: left out" in workload.notes
