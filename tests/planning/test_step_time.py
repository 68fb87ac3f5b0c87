"""The model of a step's time: what it is made of, what it predicts, and the file that keeps it."""

import os
from dataclasses import replace

import pytest
from harness.core import Simulation

from pagedcli.core.groups import cache_groups
from pagedcli.planning.step_time import (
    AttendedLayers,
    StepTime,
    StepWork,
    TimeKey,
    attended_layers,
    between,
    load_step_time,
    made_of,
    save_step_time,
    step_time_named,
)

KEY = TimeKey(
    version="1", processor="p", threads=2, device="cpu", model="m", weights="None 1", dtype="bfloat16",
    kv_dtype="bfloat16", backend="cpu", decoder="native", block_size=16,
)  # fmt: skip
TRUE = StepTime(
    prompts=((1, 1.0), (8, 2.0), (64, 9.0)), decodes=((1, 1.0), (8, 3.0)), attended_s=0.001, read_s=0.002,
)  # fmt: skip


def work_of_step(*, lengths, num_steps=0, **limits):
    """The work of the step after so many, of prompts of these lengths that generate 8 tokens each."""
    found = []
    run = Simulation(64, 4, max_num_seqs=8, **limits)
    run.observe_work = lambda work: found.append(StepWork.of(work, run.scheduler))
    for length in lengths:
        run.add(range(length), 8)
    for _ in range(num_steps + 1):
        run.step()
    return found[-1]


def test_work_counts_tokens_chunks_and_what_they_attend_to():
    work = work_of_step(lengths=[5, 1], max_num_batched_tokens=4)
    assert work == StepWork(4, 0, num_chunks=1, attended=1 + 2 + 3 + 4)
    work = work_of_step(lengths=[5, 3], num_steps=1, max_num_batched_tokens=16)
    assert work == StepWork(2, 2, attended=6 + 4, read=6 + 4)
    assert work.is_decode


def test_a_shared_prefix_is_attended_to_by_each_but_read_once():
    run, found = Simulation(64, 4, max_num_batched_tokens=64), []
    run.observe_work = lambda work: found.append(StepWork.of(work, run.scheduler))
    for last in (1, 2, 3):
        run.add([*range(16), last], 5)
        run.step()
    run.step()
    assert (found[-1].attended, found[-1].read) == (20 + 19 + 18, (4 + 3) * 4)


@pytest.mark.parametrize(("start", "new"), [(0, 5), (2, 1), (3, 9), (20, 4)])
def test_a_window_hides_earlier_tokens(start, new):
    seen = [min(position + 1, 6) for position in range(start, start + new)]
    layers = AttendedLayers(6, 0.5)
    assert layers.attended(start, new) == 0.5 * sum(seen)
    assert layers.read(start, new) == 0.5 * len(
        {p - back for p in range(start, start + new) for back in range(6) if p >= back}
    )


def test_layers_are_weighted_by_their_number():
    layers = attended_layers(cache_groups([4, 4, None, 4, 4, None]))
    assert {(each.window, each.share) for each in layers} == {(4, 4 / 6), (None, 2 / 6)}


def test_between_knots_time_grows_evenly_and_after_the_last_as_since_half_its_number():
    knots = ((2, 1.0), (4, 3.0), (8, 5.0))
    assert [between(knots, number) for number in (2, 3, 4, 6, 8, 12)] == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]
    assert between((*knots, (9, 5.0)), 14) == pytest.approx(5.0 + 5 * (5.0 - 3.0) / (9 - 4))


def test_a_slow_step_by_chance_makes_no_larger_step_shorter():
    """A prompt of 128 tokens took 580 ms and one of 177 took 420 on a busy machine: 512 tokens were below zero."""
    works = [StepWork(number, 1, num_chunks=1, attended=number) for number in (64, 128, 177)]
    steps = [(StepWork(1, 1), 0.034), *zip(works, (0.145, 0.580, 0.420), strict=True)]
    found = made_of(steps, TRUE.layers)
    assert dict(found.prompts)[128] == dict(found.prompts)[177] == pytest.approx(0.5)
    assert found.seconds(StepWork(512, 1, num_chunks=1)) > 1.0


def test_a_mixed_step_pays_for_its_tokens_and_for_each_that_is_sampled():
    work = StepWork(64, 8, num_chunks=3, attended=100)
    assert TRUE.seconds(work) == pytest.approx(9.0 + (3.0 - 2.0) + 0.1)
    assert TRUE.seconds(replace(work, attended=101, read=1)) == pytest.approx(TRUE.seconds(work) + 0.003)


def test_what_any_step_with_a_prompt_takes_is_paid_once():
    """Steps of the built-in model with 57 sequences and 7 short prompts were a quarter too short."""
    time = replace(TRUE, prompts=((1, 1.0), (2, 2.0), (64, 2.0)), decodes=((1, 1.0), (2, 1.0), (64, 1.5)))
    many, few = (time.seconds(StepWork(128, num_seqs, num_chunks=2)) for num_seqs in (64, 2))
    assert many - few == pytest.approx(1.5 - 2.0 + (2.0 - 1.0))


def test_a_record_is_found_again_from_the_steps_that_it_predicts():
    works = [StepWork(n, 1, num_chunks=1, attended=a) for n, a in ((8, 36), (64, 2080), (64, 9000))]
    works += [StepWork(n, n, attended=a, read=a) for n, a in ((1, 0), (1, 900), (8, 0), (8, 1800))]
    found = made_of([(work, TRUE.seconds(work)) for work in works], TRUE.layers)
    for name in ("prompts", "decodes"):
        assert getattr(found, name) == tuple((n, pytest.approx(s, rel=0.05)) for n, s in getattr(TRUE, name)), name
    for name in ("attended_s", "read_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name


@pytest.mark.usefixtures("step_times")
def test_a_calibration_is_kept_for_its_machine_model_and_format_and_found_by_the_name_that_a_trace_records():
    assert load_step_time(KEY) is None
    save_step_time(KEY, TRUE)
    assert load_step_time(KEY) == step_time_named(KEY.file_name) == TRUE
    for name in ("absent.json", "../" + KEY.file_name + "x", "", "a\0b"):
        assert step_time_named(name) is None
    for name in ("processor", "model", "weights", "dtype", "kv_dtype", "version"):
        assert load_step_time(replace(KEY, **{name: "other"})) is None
    assert load_step_time(replace(KEY, threads=3)) is None


def test_a_pipe_is_no_calibration_and_is_replaced_by_one(step_times):
    step_times.mkdir()
    os.mkfifo(step_times / KEY.file_name)
    assert load_step_time(KEY) is None
    save_step_time(KEY, TRUE)
    assert load_step_time(KEY) == TRUE


def test_a_broken_file_is_no_calibration(step_times):
    save_step_time(KEY, TRUE)
    [path] = step_times.iterdir()
    path.write_bytes(path.read_bytes()[:50])
    assert load_step_time(KEY) is None
