"""The shortest time of a step: the same for a list of prompts and for the scheduler's steps, and exact for windows."""

from array import array
from dataclasses import replace

import pytest
from harness.core import plan_for
from model_zoo import tiny_model

from pagedcli.bench.throughput import shape_folder
from pagedcli.bench.workloads import random_draw, workload_floor
from pagedcli.models.footprint import footprint
from pagedcli.models.formats import AS_STORED
from pagedcli.models.reading import read_spec
from pagedcli.planning.cards import Roofline
from pagedcli.planning.floors import StepFloor
from pagedcli.planning.step_time import AttendedLayers
from pagedcli.simulation.requests import Request, Requests
from pagedcli.simulation.run import Schedule, simulate

MACHINE = Roofline(37e9, 464e9)


@pytest.fixture
def floor():
    spec = read_spec(shape_folder("qwen3-small"))
    return StepFloor.of(spec, footprint(spec, AS_STORED, "cpu", 2), MACHINE, kv_dtype="bfloat16")


def test_the_floor_of_a_list_of_prompts_is_that_of_the_simulated_run():
    spec = read_spec(shape_folder("qwen3-small"))
    weights = footprint(spec, AS_STORED, "cpu", 2)
    drawn = random_draw(12, 60, 20, range_ratio=0.5).workload("random")
    requests = [
        Request(str(n), None, len(prompt), num_output, token_ids=array("q", prompt))
        for n, (prompt, num_output) in enumerate(zip(drawn.prompts, drawn.output_lens, strict=True))
    ]
    workload = Requests(requests, format="prompts")
    plan = plan_for(workload, num_blocks=4096, block_size=1, max_num_seqs=12, max_num_batched_tokens=4096)
    floor = StepFloor.of(spec, weights, MACHINE, kv_dtype="bfloat16")

    def step_ns(work, _scheduler):
        queries = [(seq.num_computed_tokens, new) for seq, new in zip(work.seqs, work.num_new_tokens, strict=True)]
        return round(1e9 * floor.seconds(queries, len(queries)))

    simulated = simulate(workload, plan, Schedule(step_time=step_ns)).total_s
    assert simulated == pytest.approx(workload_floor(spec, weights, drawn, MACHINE), rel=0.01)


def test_layers_with_a_window_count_what_is_in_it(floor):
    """One kind of layer, with and without a window of 5: every query attends to at most 5 tokens, its own included."""
    [(_, token_bytes, pair_flops)] = floor.layers
    only_attention = replace(floor, roofline=Roofline(1e30, 1.0))  # time is the number of operations
    queries = [(3, 4), (0, 9), (20, 1)]

    def pairs(window):
        layers = ((AttendedLayers(window, 1.0), token_bytes, pair_flops),)
        seconds = [replace(only_attention, layers=each).seconds(queries, 0) for each in (layers, ())]
        return (seconds[0] - seconds[1]) / pair_flops

    for window in (None, 5):
        seen = [min(place + 1, window or 99) for start, num in queries for place in range(start, start + num)]
        assert pairs(window) == pytest.approx(sum(seen))


def test_layers_with_a_state_of_fixed_size_do_not_count_as_attending(tmp_path):
    spec = read_spec(tiny_model("qwen3_next", tmp_path / "model"))
    floor = StepFloor.of(spec, footprint(spec, AS_STORED, "cpu", 2), MACHINE, kv_dtype="bfloat16")
    [(_, token_bytes, _)] = floor.layers
    num_kv_heads, head_dim = spec.attentions[0].heads[1:]
    assert token_bytes == len(spec.attention_layers) * 2 * num_kv_heads * head_dim * 2
    assert len(spec.attention_layers) < len(spec.layers)


def test_each_layer_counts_its_own_query_heads(floor):
    spec, counts = read_spec(shape_folder("qwen3-small")), iter(range(1, 100))
    varied = spec.with_mixers(lambda mixer: replace(mixer, num_heads=next(counts) * mixer.num_kv_heads))
    numbers = [StepFloor.of(each, floor.weights, MACHINE, kv_dtype="bfloat16").layers[0][2] for each in (varied, spec)]
    heads = [sum(mixer.num_heads for mixer in each.attentions) for each in (varied, spec)]
    assert numbers[0] * heads[1] == numbers[1] * heads[0]
    assert heads[0] != heads[1]


def test_tokens_that_several_sequences_read_count_once_but_never_less_than_those_of_one(floor):
    bytes_only = replace(floor, roofline=Roofline(1.0, 1e30))
    [(_, token_bytes, _)] = floor.layers
    queries = [(100, 1), (100, 1)]
    apart, shared, more = (bytes_only.seconds(queries, 2, num_repeated=n) for n in (0, 100, 1000))
    assert apart - shared == pytest.approx(100 * token_bytes)
    assert shared - more == pytest.approx(token_bytes)
