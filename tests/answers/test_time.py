"""A forecast has the counts of the run, and its time is the sum of the steps' times."""

import json
import random

import pytest
from cli_harness import pagedcli, write_rows

from pagedcli.answers.time import MOST_SIMULATED, in_prefix_order, time, with_hits_of_all
from pagedcli.batch.prompts import limits_without_pool, open_prompts
from pagedcli.config import load_config
from pagedcli.models.hub import model_folder
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import this_machine
from pagedcli.planning.step_time import StepTime
from pagedcli.simulation.caches import accesses_of, ideal_hit_rate
from pagedcli.simulation.requests import work_of
from pagedcli.simulation.sources import PromptRequests, read_outputs, read_prompts

CLOCK = StepTime(
    prompts=((1, 0.01), (512, 0.5)), decodes=((1, 0.01), (64, 0.1)), attended_s=1e-6, read_s=0.0,
    row_s=0.001, prompt_token_s=1e-5,
)  # fmt: skip


def file_of(path, num_rows, *, n=1):
    stories = ("Once upon a time there was a fox in the forest", "The code of Mirano is 4821.", "Hello")
    rows = [
        {"prompt": f"{stories[index % 3]} {'and so on ' * (index % 7)}{index % 5}", "max_tokens": 1 + index * 7 % 24,
         "ignore_eos": True, "n": n if index % 4 == 0 else 1, "temperature": float(n > 1)}
        for index in range(num_rows)
    ]  # fmt: skip
    return write_rows(path, rows)


def predicted(path, flags, *, most_tokens=MOST_SIMULATED, outputs=None, expected_tokens=None):
    """The forecast of `generate` with these flags, decided as the command does."""
    loaded = load_config(None, flags)
    folder = model_folder(loaded.config.engine)
    spec = read_spec(folder)
    plan = decide(loaded.config.engine, spec, this_machine()).expected_plan
    requests = PromptRequests(str(path), outputs, expected_tokens=expected_tokens, most_tokens=most_tokens)
    for row, max_tokens in open_prompts(loaded, str(path), folder, plan.limits).admitted():
        requests.add(row, max_tokens)
    reorder = loaded.config.run.reorder
    found = time(requests.finish(), plan, CLOCK, reorder=reorder, left_out=requests.left_out)
    if not requests.left_out:
        return found
    whole = PromptRequests(str(path))
    for row, max_tokens in open_prompts(loaded, str(path), folder, plan.limits).admitted():
        whole.add(row, max_tokens)
    ideals = (ideal_hit_rate(accesses_of(each.workload, plan.limits.block_size)) for each in (requests, whole))
    return with_hits_of_all(found, ideal_of_sample=next(ideals), ideal_of_all=next(ideals))


def test_the_outputs_that_are_expected_count_for_the_rows_that_are_not_simulated_too(tmp_path):
    """Rows may generate 200 tokens and are expected to generate two: time is that of two for all of them."""
    rows = [{"prompt": f"row {n}: and a fox", "max_tokens": 200, "ignore_eos": True} for n in range(600)]
    found = predicted(write_rows(tmp_path / "in.jsonl", rows), {}, most_tokens=100, expected_tokens=2)
    assert found.share < 0.2
    assert found.num_requests == pytest.approx(600, abs=30)
    assert found.num_generated_tokens == pytest.approx(1200, abs=60)


def test_with_the_answers_of_a_run_guesses_are_those_of_the_run(tmp_path):
    path, out, summary = file_of(tmp_path / "prompts.jsonl", 30), tmp_path / "out.jsonl", tmp_path / "summary.json"
    flags = {"engine.speculation": "ngram", "engine.max_num_seqs": 3}
    arguments = ["--speculation", "ngram", "--max-num-seqs", 3, "--output-token-ids", "--summary-json", summary]
    pagedcli("generate", path, "-o", out, *arguments)
    run, found = json.loads(summary.read_text()), predicted(path, flags, outputs=read_outputs(str(out)))
    assert (found.num_steps, found.num_computed_tokens) == (run["steps"], run["computed_tokens"])
    assert run["accepted_tokens"] > 0
    slower = predicted(path, {**flags, "engine.speculation": "off"}, outputs=read_outputs(str(out)))
    assert slower.num_steps > found.num_steps


def test_time_is_what_its_parts_take(tmp_path):
    found = predicted(file_of(tmp_path / "prompts.jsonl", 20), {})
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.low < found.seconds < found.high
    assert 0 < found.first_row_s < found.seconds
    assert found.tokens_per_s == pytest.approx(found.num_generated_tokens / found.seconds)


def test_rows_and_long_prompts_take_time_outside_of_steps(tmp_path):
    """2,192 rows of 840 token ids took 28 % longer than predicted: rows took the same time, whatever their length."""
    path, found = tmp_path / "prompts.jsonl", []
    for num_prompt in (40, 90):
        row = {"prompt": [5] * num_prompt, "max_tokens": 3, "ignore_eos": True}
        path.write_text(json.dumps(row) + "\n")
        found.append(predicted(path, {}).parts["rows"])
    assert found == [pytest.approx(CLOCK.row_s + num_prompt * CLOCK.prompt_token_s) for num_prompt in (40, 90)]


@pytest.mark.quick("alike")
@pytest.mark.parametrize("kind", ["longer and longer", "at random", "alike"])
def test_the_time_of_a_sampled_file_lies_in_its_interval(kind, tmp_path):
    """Rows that are like those at the beginning only at the beginning: the first rows would tell little."""
    rng = random.Random(kind)
    lengths = {
        "longer and longer": [4 + n // 20 for n in range(3000)],
        "at random": [rng.choice([4, 250]) for _ in range(3000)],
        "alike": [40] * 3000,
    }[kind]
    rows = ({"prompt": [5 + n % 90] * length, "max_tokens": 2 + length // 40} for n, length in enumerate(lengths))
    path = write_rows(tmp_path / "prompts.jsonl", rows)
    few = {"engine.max_num_seqs": 16}
    whole, part = predicted(path, few), predicted(path, few, most_tokens=20_000)
    assert 0.1 < part.share < 0.5
    assert 0.0 < part.sample_error < 0.5
    low, high = part.low, part.high
    assert low <= whole.seconds <= high < 6 * low


def test_the_kept_part_of_a_file_is_spread_over_it_and_bounded(tmp_path):
    path = write_rows(tmp_path / "prompts.jsonl", [{"prompt": [5] * 8, "max_tokens": 4}] * 20_000)
    loaded = load_config(None, {})
    folder = model_folder(loaded.config.engine)
    limits = limits_without_pool(loaded.config.engine, read_spec(folder))
    requests, most = PromptRequests(str(path), most_tokens=50_000), 0
    for row, max_tokens in open_prompts(loaded, str(path), folder, limits).admitted():
        requests.add(row, max_tokens)
        most = max(most, len(requests.workload.requests))
    each = work_of(requests.workload.requests[0])
    kept = [int(request.request_id) for request in requests.workload.requests]
    assert most * each <= 50_000 + each
    assert 25_000 - 64 * each <= requests.work == len(kept) * each
    assert requests.work + requests.left_out == pytest.approx(20_000 * each)
    assert kept[-1] > 18_000
    part, left_out = requests.part(10_000)
    assert 5_000 - 64 * each <= sum(map(work_of, part.requests)) <= 10_000
    assert sum(map(work_of, part.requests)) + left_out == pytest.approx(20_000 * each)
    assert int(part.requests[-1].request_id) > 15_000


def test_equal_prompts_start_in_the_order_of_the_run(tmp_path):
    """`--reorder prefix` starts the last of several equal prompts first."""
    path = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in "baba"])
    loaded = load_config(None, {})
    folder = model_folder(loaded.config.engine)
    plan = decide(loaded.config.engine, read_spec(folder), this_machine()).expected_plan
    workload = read_prompts(str(path), open_prompts(loaded, str(path), folder, plan.limits))
    assert [request.request_id for request in in_prefix_order(workload.requests)] == ["3", "1", "2", "0"]
