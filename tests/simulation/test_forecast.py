"""A forecast has the counts of the run, and its time is the sum of the steps' times."""

import json

import pytest
from cli_harness import pagedcli, rows_of

from pagedcli.batch.prompts import open_prompts
from pagedcli.config import load_config
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide, model_folder
from pagedcli.planning.machine import this_machine
from pagedcli.planning.step_time import StepTime
from pagedcli.simulation.forecast import MOST_SIMULATED, forecast, in_prefix_order
from pagedcli.simulation.sources import PromptRequests, read_prompts

CLOCK = StepTime(
    prompts=((1, 0.01), (512, 0.5)), decodes=((1, 0.01), (64, 0.1)), attended_by_prompts_s=1e-6,
    attended_by_decodes_s=1e-6, row_s=0.001, text_token_s=1e-4, first_use_s=1e-3,
)  # fmt: skip


def file_of(path, num_rows, *, n=1):
    stories = ("Once upon a time there was a fox in the forest", "The code of Mirano is 4821.", "Hello")
    rows = [
        {"prompt": f"{stories[index % 3]} {'and so on ' * (index % 7)}{index % 5}", "max_tokens": 1 + index * 7 % 24,
         "ignore_eos": True, "n": n if index % 4 == 0 else 1, "temperature": float(n > 1)}
        for index in range(num_rows)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def predicted(path, flags, *, most_tokens=MOST_SIMULATED):
    """The forecast of `generate` with these flags, decided as the command does."""
    loaded = load_config(None, flags)
    folder = model_folder(loaded.config.engine)
    spec = read_spec(folder)
    plan = decide(loaded.config.engine, spec, this_machine()).expected_plan
    requests = PromptRequests(str(path), most_tokens=most_tokens)
    for row, max_tokens in open_prompts(loaded, str(path), folder, plan.limits).admitted():
        requests.add(row, max_tokens)
    reorder = loaded.config.run.reorder
    return forecast(requests.finish(), plan, CLOCK, reorder=reorder, left_out=requests.left_out)


POOLS = [  # flags, samples of some rows, least preemptions
    ({}, 1, 0),
    ({"engine.num_gpu_blocks_override": 7, "engine.max_num_seqs": 6}, 1, 10),
    ({"engine.num_gpu_blocks_override": 30, "engine.block_size": 4, "engine.max_num_batched_tokens": 40}, 1, 0),
    ({"engine.num_gpu_blocks_override": 8, "run.reorder": "prefix", "engine.max_num_seqs": 8}, 1, 5),
    ({"engine.num_gpu_blocks_override": 11, "engine.max_num_seqs": 5, "engine.eviction": "next-use"}, 2, 1),
    ({"engine.num_gpu_blocks_override": 24, "engine.enable_prefix_caching": False}, 2, 1),
]


@pytest.mark.parametrize(("flags", "n", "least"), POOLS)
def test_counts_are_those_of_the_run(tmp_path, flags, n, least):
    path, summary = file_of(tmp_path / "prompts.jsonl", 60, n=n), tmp_path / "summary.json"
    arguments = []
    for name, value in flags.items():
        flag = name.split(".")[1].replace("_", "-")
        arguments += [f"--no-{flag}"] if value is False else [f"--{flag}", value]
    pagedcli("generate", path, "-o", tmp_path / "out.jsonl", "--summary-json", summary, *arguments)
    run, found = json.loads(summary.read_text()), predicted(path, flags)
    assert len(rows_of(tmp_path / "out.jsonl")) == found.num_requests == 60
    expected = {
        "num_preemptions": run["preemptions"], "num_cached_tokens": run["cached_tokens"],
        "num_prompt_tokens": run["prompt_tokens"], "num_generated_tokens": run["generated_tokens"],
        "num_computed_tokens": run["computed_tokens"], "num_recomputed_tokens": run["recomputed_tokens"],
        "peak_used_blocks": run["kv_blocks_peak"], "num_steps": run["steps"],
    }  # fmt: skip
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.num_preemptions >= least


def test_time_is_what_its_parts_take(tmp_path):
    found = predicted(file_of(tmp_path / "prompts.jsonl", 20), {})
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.parts["memory"] >= found.peak_used_blocks * CLOCK.first_use_s
    assert 0 < found.first_row_s < found.seconds
    assert found.tokens_per_s == pytest.approx(found.num_generated_tokens / found.seconds)


def test_only_texts_take_the_time_of_a_tokenizer(tmp_path):
    """Rows of token ids were predicted to be tokenized: five times their real time, next to a fast model."""
    path, found = tmp_path / "prompts.jsonl", []
    for prompt in ("Once upon a time there was a fox", [5] * 40):
        path.write_text(json.dumps({"prompt": prompt, "max_tokens": 3, "ignore_eos": True}) + "\n")
        found.append(predicted(path, {}))
    text, ids = (each.parts["rows"] for each in found)
    assert text - ids == pytest.approx(CLOCK.text_token_s * found[0].num_prompt_tokens)


def test_of_much_work_the_beginning_is_simulated(tmp_path):
    path = file_of(tmp_path / "prompts.jsonl", 240)
    whole, part = predicted(path, {}), predicted(path, {}, most_tokens=1500)
    assert whole.share == 1.0
    assert part.share < 0.8
    assert part.num_generated_tokens == pytest.approx(whole.num_generated_tokens, rel=0.1)


def test_a_slower_machine_takes_longer_by_the_same_factor(tmp_path):
    path = file_of(tmp_path / "prompts.jsonl", 10)
    before = predicted(path, {})
    assert CLOCK.scaled(2.0).host_s(3, 4) == pytest.approx(2 * CLOCK.host_s(3, 4))
    assert before.num_refused == 0


def test_equal_prompts_start_in_the_order_of_the_run(tmp_path):
    """`--reorder prefix` starts the last of several equal prompts first."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("b", "a", "b", "a")))
    loaded = load_config(None, {})
    folder = model_folder(loaded.config.engine)
    plan = decide(loaded.config.engine, read_spec(folder), this_machine()).expected_plan
    workload = read_prompts(str(path), open_prompts(loaded, str(path), folder, plan.limits))
    assert [request.request_id for request in in_prefix_order(workload.requests)] == ["3", "1", "2", "0"]
