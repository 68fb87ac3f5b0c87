"""What to change about a run: the promised run is the one that the advised flags give, nothing that was tried is
better, and every command gives the same answer."""

import json
import random
import re
from array import array
from dataclasses import replace

import msgspec
import pytest
from cli_harness import pagedcli

from pagedcli.answers.time import time as forecast
from pagedcli.cli.tuning import time_in_turns
from pagedcli.config import load_config
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.planning.step_time import StepTime
from pagedcli.simulation.advice import (
    LEAST_TIMED_S,
    WORTH_SAYING,
    Advice,
    advise,
    recorded_advice,
    recorded_plan,
    tune,
)
from pagedcli.simulation.requests import Request, Requests
from pagedcli.simulation.settings import KINDS, Setting, Subject, flags_of
from pagedcli.simulation.sources import read_recorded_run
from pagedcli.simulation.tables import advice_table
from pagedcli.simulation.turns import Turns
from pagedcli.verdicts import paragraph


def subject(prompts, *, num_output=4, block_bytes=0, device="cpu", **limits):
    requests = [
        Request(str(n), None, len(ids), num_output, token_ids=array("q", ids), max_new_tokens=num_output)
        for n, ids in enumerate(prompts)
    ]
    limits = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 512, **limits}
    plan = Plan(limits=Limits(**limits), model="m", device=device, block_bytes=block_bytes)
    return Subject(Requests(requests, format="prompts"), plan)


def own(n, num):
    return [1000 + n] * num


def best(found):
    return found.best[0].setting.text if found.best else None


def promised(trial):
    run = trial.forecast
    return run.num_cached_tokens, run.num_preemptions, run.num_recomputed_tokens, run.peak_used_blocks


BEFORE = (2.0, 2.1, 2.2, 2.1) * 2
FASTER = Turns(BEFORE, (1.4, 1.5, 1.6, 1.5) * 2)
UNSURE = Turns(BEFORE, (1.8, 2.2, 2.0, 2.05) * 2)


def slower(factor):
    """A machine that is slower by this factor than that of STEP_TIME."""
    knots = {
        name: tuple((number, factor * seconds) for number, seconds in getattr(STEP_TIME, name))
        for name in ("prompts", "decodes")
    }
    return replace(STEP_TIME, **knots)


def slow(given):
    """The subject with steps that take so long that runs are compared by time."""
    return replace(given, step_time=slower(20))


def tuned(given, turns=FASTER, fixed=()):
    """What tuning finds on a machine where runs in turns come out like this, and what was timed."""
    asked = []

    def time_in_turns(before, after, budget_s):
        asked.append((dict(before), dict(after), budget_s))
        return turns

    base = forecast(given.workload, given.plan, given.step_time)
    return tune(given, time_in_turns, base=base, fixed=frozenset(fixed), budget_s=60.0), asked


def test_what_changes_the_speed_of_steps_is_tuned_only_where_runs_in_turns_are_faster_beyond_doubt():
    given = slow(subject([[1] * 24 + own(n, 9) for n in range(16)], num_blocks=200))
    assert not any(trial.setting.kind.is_timed for trial in advise(given).trials)
    found, asked = tuned(given)
    assert found.timed.setting.kind.is_timed
    assert (found.turns, found.changes) == (FASTER, asked[0][1])
    assert len({next(iter(after)) for _, after, _ in asked}) == 2, "two kinds of settings"
    assert sum(budget_s for _, _, budget_s in asked) == 60.0
    for turns in (UNSURE, Turns(FASTER.after_s, FASTER.before_s), None):  # not sure, slower, or not to be timed
        found, asked = tuned(given, turns)
        assert len(asked) == 2
        assert (found.timed, found.changes) == (None, {})
    assert tuned(given, fixed=[kind.key for kind in KINDS])[1] == [], "what is given stays"


def test_what_is_timed_comes_after_the_best_change_that_the_simulator_is_sure_of():
    prompts = [[1] * 64 + own(n, 40) for n in range(16)]
    given = slow(subject(prompts, enable_prefix_caching=False, num_blocks=200))
    found, asked = tuned(given)
    exact = {"engine.enable_prefix_caching": True}
    assert found.exact.setting.changes == exact
    assert all(before == exact == {key: after[key] for key in exact} for before, after, _ in asked)
    assert found.changes == {**exact, **found.timed.setting.changes}


def test_less_time_for_as_many_computed_tokens_is_no_advice():
    """What a calibration says of steps of other sizes is not exact, as the counts are."""
    found = advise(slow(random_subject(3)))
    for trial in found.trials:
        fewer = trial.forecast.num_computed_tokens <= 0.99 * found.base.num_computed_tokens
        assert trial.is_certain == (fewer or trial.gain <= 0)
    assert all(trial.is_certain for trial in found.best)
    unsure = [row for row in found.rows() if row["cost"] == "only timing tells"]
    assert len(unsure) == sum(not trial.is_certain for trial in found.trials)
    assert all(row["saved"] is row["seconds"] is None for row in unsure)


def test_a_run_under_two_seconds_is_not_compared_by_time():
    given = slow(subject([[1] * 24 + own(n, 9) for n in range(16)], num_blocks=200))
    seconds = advise(given).base.seconds
    assert seconds > LEAST_TIMED_S
    fast = replace(given, step_time=slower(20 * 0.9 * LEAST_TIMED_S / seconds))
    assert not advise(fast).by_time
    found, asked = tuned(fast)
    assert (found.by_time, found.timed, asked) == (False, None, [])


[BLOCK_SIZES] = [kind for kind in KINDS if kind.name == "block size"]


def test_smaller_blocks_are_tried_where_the_kernels_have_them():
    prompts = [[1] * 240 + own(n, 9) for n in range(16)]
    for device, sizes in (("cpu", [32, 16, 8]), ("cuda:0", [32, 16])):
        given = subject(prompts, num_blocks=512, block_size=64, device=device)
        assert BLOCK_SIZES.values(given, advise(given).base) == sizes


def test_the_blocks_of_a_small_pool_are_part_of_the_advice_on_their_size():
    given = subject([[1] * 24 + own(n, 9) for n in range(40)], num_blocks=12)
    assert Setting.of(BLOCK_SIZES, given, 8).text == "--block-size 8 --num-gpu-blocks-override 24"


def test_the_advised_pool_is_the_smallest_that_is_as_good():
    prompts = [own(n % 12, 64) + own(50 + n, 8) for n in range(48)]
    given = subject(prompts, num_blocks=24, max_num_seqs=1, block_bytes=2**20)
    pools = [trial for trial in advise(given).trials if trial.setting.kind.name == "pool"]
    [flag, number] = flags_of(pools[0].setting.changes)
    assert flag == "--num-gpu-blocks-override"
    assert f"costs {int(number) - 24:.1f} MiB of memory" in Advice(advise(given).base, tuple(pools)).text()
    for num_blocks, is_enough in ((int(number), True), (int(number) - 4, False)):
        limits = replace(given.limits, num_blocks=num_blocks)
        again = advise(replace(given, plan=replace(given.plan, limits=limits)))
        assert (again.base.num_computed_tokens <= pools[0].forecast.num_computed_tokens) == is_enough
    assert int(number) < 4 * 24


def test_the_order_is_advised_before_a_larger_pool_that_gains_as_much():
    prompts = [own(n % 6, 64) + own(50 + n, 8) for n in range(48)]
    found = advise(subject(prompts, num_blocks=12, max_num_seqs=1))
    assert best(found) == "--reorder prefix"
    in_order = advise(subject(sorted(prompts), num_blocks=12, max_num_seqs=1))
    assert in_order.base.num_cached_tokens == found.best[0].forecast.num_cached_tokens, "as promised"
    assert best(in_order) is None
    assert in_order.text().startswith("Nothing to change (")


def test_what_was_not_looked_at_is_said_with_the_settings_and_where_nothing_is_to_change():
    prompts = [own(n % 6, 64) + own(50 + n, 8) for n in range(48)]
    left = "where 9 prompts part that were not drawn"
    for given in (prompts, sorted(prompts)):
        advice = advise(subject(given, num_blocks=12, max_num_seqs=1))
        *_, last = advice.verdicts(not_looked_at=left)
        assert f"Not looked at: {left}" in last.text()
    assert left not in advice.text()


def test_prefix_caching_is_advised_where_it_is_off_and_prompts_share():
    prompts = [[1] * 64 + own(n, 4) for n in range(8)]
    assert best(advise(subject(prompts, enable_prefix_caching=False, max_num_seqs=1))) == "--enable-prefix-caching"
    assert best(advise(subject([own(n, 64) for n in range(8)], enable_prefix_caching=False))) is None


def random_subject(seed):
    rng = random.Random(seed)
    heads = [own(k, rng.randrange(4, 60)) for k in range(rng.randrange(1, 6))]
    prompts = [rng.choice(heads) + [rng.randrange(90) for _ in range(rng.randrange(1, 40))] for _ in range(20)]
    return subject(
        prompts, num_output=rng.randrange(1, 30), num_blocks=rng.choice((12, 20, 40, 400)),
        max_num_seqs=rng.randrange(1, 12), block_size=rng.choice((16, 32)),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_nothing_that_was_tried_is_better_than_what_is_advised_and_every_row_is_a_run_of_its_flags(seed):
    given = random_subject(seed)
    found = advise(given)
    gains = [round(trial.gain, 3) for trial in found.trials]
    assert gains == sorted(gains, reverse=True)
    if found.best:
        assert round(found.best[0].gain, 3) == gains[0] >= WORTH_SAYING
    else:
        assert not gains or gains[0] < WORTH_SAYING + 0.001
    for trial in found.trials:
        again = advise(trial.setting.subject).base
        assert promised(trial) == promised(replace(trial, forecast=again)), trial.setting.text


def test_trials_end_when_their_time_is_over():
    given = subject([[1] * 24 + own(n, 9) for n in range(400)], num_blocks=30)
    assert advise(given, budget_s=0.0).text() == (
        "Whether other settings are better is not known (trying other settings takes over 0.0 s; pagedcli explain takes"
        " up to 30 s)."
    )


def test_where_no_request_fits_no_setting_saves_anything():
    for step_time in (None, STEP_TIME):
        found = advise(replace(subject([own(n, 64) for n in range(4)], num_blocks=1), step_time=step_time))
        assert not found.best
        assert found.text() == (
            "Whether other settings are better is not known (no request fits into the pool of 1 block)."
        )


STEP_TIME = StepTime(
    prompts=((1, 0.010), (512, 0.10), (2048, 0.40)),
    decodes=((1, 0.010), (256, 0.050)),
    attended_s=0.0,
    read_s=0.0,
)


# ---------------------------------------------------------------------- the commands

FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module", autouse=True)
def _no_times(tmp_path_factory):
    """Whether another test has calibrated the built-in model decides nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("no-times")
        patch.setattr("pagedcli.planning.step_time.cache_folder", lambda: folder / "step-times")
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A file, its recording with tokens, and what generate said."""
    folder = tmp_path_factory.mktemp("advice")
    rng = random.Random(3)
    heads = [" ".join(rng.choice(["cat", "dog", "sun", "sea", "red", "old"]) for _ in range(40)) for _ in range(6)]
    rows = [{"prompt": f"{heads[n % 6]} {n}", "max_tokens": 5, "ignore_eos": True} for n in range(30)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = pagedcli(
        "generate", folder / "in.jsonl", "-o", folder / "out.jsonl",
        "--record", folder / "run.jsonl", "--record-tokens",
        "--summary-json", folder / "summary.json", "--output-token-ids", "--num-gpu-blocks-override", "16", *FLAGS,
        columns=1000,
    )  # fmt: skip
    return folder, shown.stderr.splitlines()[-2]


def test_all_commands_give_the_same_answer(runs):
    folder, said = runs
    found = recorded_advice(folder / "run.jsonl")
    first_lines = paragraph(found.verdicts())
    assert found.best
    assert said == first_lines[0]
    document = json.loads((folder / "summary.json").read_text())
    assert document["verdicts"] == msgspec.to_builtins(found.verdicts())
    summary = document["cache"]
    assert summary["advice"] == found.text()
    assert summary["advised_flag"] == found.flag
    explained = pagedcli("explain", folder / "run.jsonl", "--format", "json", columns=1000).stdout
    assert json.loads(explained)["advised"] == summary["advised"]
    explained = pagedcli("explain", folder / "run.jsonl", columns=1000).stdout
    assert explained.splitlines()[: len(first_lines)] == first_lines
    pagedcli("report", folder / "run.jsonl", "-o", folder / "page.html")
    said = json.loads(re.search(r'"verdicts":(\[.*?\]),"', (folder / "page.html").read_text())[1])
    assert said[: len(first_lines)] == first_lines


def test_a_run_with_the_advised_flags_does_what_was_promised(runs):
    folder, _ = runs
    for number, trial in enumerate(recorded_advice(folder / "run.jsonl").best):
        flags = flags_of(trial.setting.changes)
        pool = () if "--num-gpu-blocks-override" in flags else ("--num-gpu-blocks-override", "16")
        pagedcli(
            "generate", folder / "in.jsonl", "-o", folder / f"{number}.jsonl", "--summary-json",
            folder / f"{number}.json", *FLAGS, *pool, *flags,
        )  # fmt: skip
        summary = json.loads((folder / f"{number}.json").read_text())
        names = ("cached_tokens", "preemptions", "recomputed_tokens", "kv_blocks_peak", "computed_tokens")
        assert tuple(summary[name] for name in names) == (*promised(trial), trial.forecast.num_computed_tokens)


def test_without_recorded_tokens_it_is_said_what_cannot_be_tried(runs, tmp_path):
    folder, _ = runs
    pagedcli("generate", folder / "in.jsonl", "-o", "/dev/null", "--record", tmp_path / "run.jsonl", *FLAGS)
    found = recorded_advice(tmp_path / "run.jsonl")
    assert "another order, which needs the tokens (--record-tokens)" in found.not_tried
    assert {trial.setting.kind.name for trial in found.trials} <= {"pool", "policy", "preemption"}


def test_the_table_has_the_run_as_it_is_and_every_trial():
    found = advise(subject([[1] * 24 + own(n, 9) for n in range(40)]))
    table = advice_table(found)
    assert [row["setting"] for row in table.rows] == ["as it is", *(each.setting.text for each in found.trials)]
    assert advice_table(Advice(not_tried="no request was served")).rows == []


def test_plan_gives_the_same_answer_and_its_own_recommendation_is_that(runs):
    folder, _ = runs
    arguments = ("plan", folder / "in.jsonl", "--no-calibrate", "--num-gpu-blocks-override", "16", *FLAGS)
    found = recorded_advice(folder / "run.jsonl")
    lengths = ("--outputs", folder / "out.jsonl")
    planned = json.loads(pagedcli(*arguments, *lengths, "--format", "json").stdout)
    assert planned["advised"] == json.loads((folder / "summary.json").read_text())["cache"]["advised"]
    assert planned["recommended_block_size"] == 16
    first_lines = paragraph(found.verdicts())
    assert pagedcli(*arguments, *lengths, columns=1000).stdout.splitlines()[: len(first_lines)] == first_lines


def as_json(*arguments):
    return json.loads(pagedcli(*arguments, "--format", "json").stdout)


def test_simulate_gives_the_same_answer_for_the_recording_and_for_the_file(runs):
    folder, _ = runs
    expected = recorded_advice(folder / "run.jsonl")
    limits = ("--pool", "16", *FLAGS)
    for found in (
        as_json("simulate", folder / "run.jsonl"),
        as_json("simulate", folder / "in.jsonl", "--outputs", folder / "out.jsonl", *limits),
    ):
        assert found["advice"] == expected.text()
        assert found["advised_flag"] == expected.flag
        assert [row["setting"] for row in found["settings_tried"]] == [row["setting"] for row in expected.rows()]


def test_where_steps_have_been_timed_all_commands_compare_by_time_and_agree(runs, tmp_path, monkeypatch):
    folder, _ = runs
    monkeypatch.setattr("pagedcli.planning.step_time.cache_folder", lambda: tmp_path / "times")
    monkeypatch.setattr("pagedcli.bench.calibration.calibrate", lambda *_, **__: slower(20))
    pool = ("--num-gpu-blocks-override", "16")
    lengths = ("--outputs", folder / "out.jsonl")
    as_json("plan", folder / "in.jsonl", *pool, *FLAGS, *lengths)
    trace = tmp_path / "run.jsonl"
    said = pagedcli(
        "generate", folder / "in.jsonl", "-o", tmp_path / "out.jsonl", "--record", trace, "--record-tokens",
        "--summary-json", tmp_path / "summary.json", *pool, *FLAGS, columns=1000,
    ).stderr  # fmt: skip
    expected = json.loads((tmp_path / "summary.json").read_text())["cache"]
    assert "less time" in expected["advice"]
    assert expected["advice"].startswith(said.splitlines()[-2])
    others = {
        "plan": as_json("plan", folder / "in.jsonl", "--no-calibrate", *pool, *FLAGS, *lengths),
        "explain": as_json("explain", trace),
        "simulate": as_json("simulate", folder / "in.jsonl", *lengths, "--pool", "16", *FLAGS),
        "simulate the recording": as_json("simulate", trace),
    }
    for name, found in others.items():
        assert found["advised"] == expected["advised"], name
    tried = [{row["setting"] for row in others[name]["settings_tried"]} for name in ("plan", "explain")]
    assert tried[0] == tried[1]
    (tmp_path / "times").rename(tmp_path / "elsewhere")  # as on another machine
    assert "to compute (" in as_json("explain", trace)["advice"]


def test_generate_takes_the_settings_that_plan_tune_prints(runs, tmp_path, monkeypatch):
    folder, _ = runs
    monkeypatch.setattr("pagedcli.bench.calibration.step_time_here", lambda *_, **__: (slower(20), "a test"))
    monkeypatch.setattr("pagedcli.cli.tuning.time_in_turns", lambda *_: FASTER)
    arguments = ("plan", folder / "in.jsonl", *FLAGS, "--tune")
    printed = pagedcli(*arguments).stdout
    (tmp_path / "tuned.yaml").write_text(printed)
    assert re.search("^# 28.6 % less time .timed in turns. with --(block-size|chunked)", printed, re.MULTILINE)
    assert "max_num_seqs" not in printed, "it was given"
    out = tmp_path / "out.jsonl"
    pagedcli("generate", folder / "in.jsonl", "-o", out, "-C", tmp_path / "tuned.yaml", "--output-token-ids", *FLAGS)
    assert [json.loads(row)["token_ids"] for row in out.read_text().splitlines()] == [
        json.loads(row)["token_ids"] for row in (folder / "out.jsonl").read_text().splitlines()
    ]
    assert "--tune times steps" in pagedcli(*arguments, "--no-calibrate", expect=2).stderr


def test_runs_in_turns_are_runs_of_the_first_rows_with_each_setting(runs, capsys):
    folder, _ = runs
    loaded = load_config(None, {"engine.max_num_seqs": 4, "engine.num_gpu_blocks_override": 16})
    workload, state = read_recorded_run(folder / "run.jsonl")
    given = Subject(workload, recorded_plan(state))
    before, changes = {"run.reorder": "prefix"}, {"engine.block_size": 8, "engine.num_gpu_blocks_override": 32}
    turns = time_in_turns(loaded, given, 3.0, before, {**before, **changes}, 20.0)
    assert len(turns.before_s) == len(turns.after_s) >= 1
    assert all(seconds > 0 for seconds in (*turns.before_s, *turns.after_s))
    said = capsys.readouterr().err
    assert re.search("and the settings of before in turns, on [1-9][0-9]* prompts", said)
    assert f"--block-size 8 --num-gpu-blocks-override 32: {turns.text}, by {len(turns.after_s)} passes each" in said
    assert time_in_turns(loaded, given, 3.0, {}, {"engine.kv_cache_dtype": "fp8"}, 1.0) is None
    assert "not timed: kv_cache_dtype fp8 needs a CUDA GPU" in capsys.readouterr().err
