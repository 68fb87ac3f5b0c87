"""`plan -m A -m B`: one row for each model, the fastest first."""

import json

import pytest
from cli_harness import pagedcli
from model_zoo import tiny_model

from pagedcli.cli.plan_models import ModelRow, models_table
from pagedcli.config import load_config
from pagedcli.models.reading import read_spec
from pagedcli.planning import step_time
from pagedcli.planning.decide import decide, model_folder
from pagedcli.planning.machine import this_machine
from pagedcli.planning.step_time import StepTime, save_step_time

CLOCK = StepTime(
    prompts=((1, 0.01), (512, 0.5)), decodes=((1, 0.01), (64, 0.1)), attended_by_prompts_s=1e-6,
    attended_by_decodes_s=1e-6, row_s=0.001, text_token_s=1e-4, error=0.01,
)  # fmt: skip


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The built-in model, a slower one and a faster one, as calibrations say."""
    monkeypatch.setattr(step_time, "cache_folder", lambda: tmp_path / "times")
    builtin = model_folder(load_config(None, {}).config.engine)
    found = {"builtin": 1.0}
    for name, layers, factor in (("slower", 3, 5.0), ("faster", 1, 0.2)):
        folder = tiny_model("llama", tmp_path / name, num_hidden_layers=layers)
        for file in builtin.glob("tokenizer*"):
            (folder / file.name).write_bytes(file.read_bytes())
        found[str(folder)] = factor
    for name, factor in found.items():
        engine = load_config(None, {"engine.model": name}).config.engine
        key = decide(engine, read_spec(model_folder(engine)), this_machine(free_memory=True)).time_key
        save_step_time(key, CLOCK.scaled(factor), load_s=factor)
    return found


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": [5 + n % 90] * 30, "max_tokens": 5}) + "\n" for n in range(400)))
    return path


def flags_of(models):
    return [argument for name in models for argument in ("-m", name)]


def test_the_rows_are_those_of_plans_of_one_model_the_fastest_first(models, prompts):
    found = json.loads(pagedcli("plan", prompts, *flags_of(models), "--format", "json").stdout)
    rows = {row["model"]: row for row in found["models"]}
    assert list(rows) == sorted(models, key=models.get)
    assert found["fastest"] == next(iter(rows))
    for name, factor in models.items():
        alone = json.loads(pagedcli("plan", prompts, "-m", name, "--format", "json").stdout)
        for key in ("seconds", "seconds_low", "seconds_high", "tokens_per_s"):
            assert rows[name][key] == pytest.approx(alone["forecast"][key]), key
        assert rows[name]["load_s"] == factor
        pool_bytes = alone["num_kvcache_blocks"] * alone["block_bytes"]
        assert pool_bytes < rows[name]["memory_bytes"] < pool_bytes + 2**30
        assert (rows[name]["fits"], rows[name]["num_bad_rows"], rows[name]["reason"]) == (True, 0, None)
    shown = pagedcli("plan", prompts, *flags_of(models)).stdout
    assert shown.startswith(f"Fastest here: {found['fastest']}, ")


def test_models_that_do_not_run_come_last_with_the_reason_and_one_that_is_not_there_is_an_error(
    models, prompts, tmp_path
):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}')
    for file in model_folder(load_config(None, {}).config.engine).glob("tokenizer*"):
        (broken / file.name).write_bytes(file.read_bytes())
    given = ("plan", prompts, "-m", broken, "-m", "builtin", "--format", "json")
    rows = json.loads(pagedcli(*given).stdout)["models"]
    assert [(row["model"], row["fits"]) for row in rows] == [("builtin", True), (str(broken), False)]
    assert "hidden_size" in rows[1]["reason"]
    missing = pagedcli("plan", prompts, "-m", "builtin", "-m", tmp_path / "none", expect=2)
    assert str(tmp_path / "none") in missing.stderr.splitlines()[-2]


def test_what_several_models_do_not_go_with(models, prompts):
    several = flags_of(models)
    assert "take one model" in pagedcli("plan", prompts, *several, "--tune", expect=2).stderr
    assert "one after the other" in pagedcli("plan", "-", *several, stdin='{"prompt": "x"}\n', expect=2).stderr
    once = pagedcli("plan", prompts, "-m", "builtin", "-m", "builtin", "--format", "json").stdout
    assert "models" not in json.loads(once), "the same model twice is one model"


def test_a_sample_is_enough_for_long_files(models, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"prompt": [5 + n % 90] * 12, "max_tokens": 5}) + "\n" for n in range(20_000)))
    found = json.loads(pagedcli("plan", path, *flags_of(models), "--sample", "--format", "json").stdout)["models"]
    assert [row["model"] for row in found] == sorted(models, key=models.get)
    assert found[0]["tokens_per_s"] == pytest.approx(100_000 / found[0]["seconds"], rel=0.1)


def test_the_answer_says_when_times_overlap():
    rows = [
        ModelRow("a", True, seconds=9.0, seconds_low=8.0, seconds_high=10.0),
        ModelRow("b", True, seconds=10.5, seconds_low=9.5, seconds_high=12.0),
        ModelRow("c", True, seconds=20.0, seconds_low=19.0, seconds_high=22.0),
        ModelRow("d", False, reason="too large"),
    ]
    assert models_table(rows, "in").title == (
        "Fastest here: a, 9.0 s (8.0 s to 10 s) for in; not certain: the times of b overlap with it"
    )
    assert models_table(rows[2:], "in").title == "Fastest here: c, 20 s (19 s to 22 s) for in"
    rows.insert(3, ModelRow("e", True, reason="no calibration"))
    assert models_table(rows[2:], "in").title == "Fastest here: c, 20 s (19 s to 22 s) for in; no time is known of e"
    assert models_table(rows[4:], "in").title == "No time is known for in with any of these models"
