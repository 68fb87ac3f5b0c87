"""What to change about a run: the promised run is the one that the advised flags give, nothing that was tried is
better, and every command gives the same answer."""

import json
import random
import re
from array import array
from dataclasses import replace

import pytest
from cli_harness import pagedcli

from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.planning.step_time import Calibrations, StepTime
from pagedcli.simulation.advice import WORTH_SAYING, Advice, OtherKV, Subject, advise, recorded_advice, tune
from pagedcli.simulation.requests import TraceRequest, Workload
from pagedcli.simulation.tables import advice_table


def subject(prompts, *, num_output=4, block_bytes=0, device="cpu", **limits):
    requests = [
        TraceRequest(str(n), None, len(ids), num_output, token_ids=array("q", ids), max_new_tokens=num_output)
        for n, ids in enumerate(prompts)
    ]
    limits = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 512, **limits}
    plan = Plan(limits=Limits(**limits), model="m", device=device, block_bytes=block_bytes)
    return Subject(Workload(requests, format="prompts"), plan)


def own(n, num):
    return [1000 + n] * num


def best(found):
    return found.best[0].setting.text if found.best else None


def promised(trial):
    run = trial.forecast
    return run.num_cached_tokens, run.num_preemptions, run.num_recomputed_tokens, run.peak_used_blocks


def test_smaller_blocks_are_advised_where_more_would_be_shared_and_the_larger_of_two_that_share_as_much():
    assert best(advise(subject([[1] * 24 + own(n, 9) for n in range(16)], num_blocks=200))) == "--block-size 8"
    assert (
        best(advise(subject([[1] * 240 + own(n, 9) for n in range(16)], num_blocks=512, block_size=256)))
        == "--block-size 16"
    )
    assert best(advise(subject([[1] * 24 + own(n, 9) for n in range(16)], device="cuda:0"))) is None, "no kernels for 8"


def test_the_blocks_of_a_small_pool_are_part_of_the_advice_on_their_size():
    found = advise(subject([[1] * 24 + own(n, 9) for n in range(40)], num_blocks=12))
    settings = [trial.setting.text for trial in found.trials if trial.setting.kind == "block size"]
    assert settings == ["--block-size 8 --num-gpu-blocks-override 24"]


def test_the_advised_pool_is_the_smallest_that_is_as_good():
    prompts = [own(n % 12, 64) + own(50 + n, 8) for n in range(48)]
    given = subject(prompts, num_blocks=24, max_num_seqs=1, block_bytes=2**20)
    pools = [trial for trial in advise(given).trials if trial.setting.kind == "pool"]
    [(flag, number)] = pools[0].setting.flags
    assert flag == "--num-gpu-blocks-override"
    assert f"costs {int(number) - 24:.1f} MiB of memory" in " ".join(
        Advice(advise(given).base, tuple(pools)).sentences()
    )
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
    assert in_order.sentences()[0].startswith("nothing: none of ")


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
        plan = replace(given.plan, limits=trial.setting.limits)
        again = advise(replace(given, plan=plan, reorder=trial.setting.reorder)).base
        assert promised(trial) == promised(replace(trial, forecast=again)), trial.setting.text


def test_trials_end_when_their_time_is_over():
    given = subject([[1] * 24 + own(n, 9) for n in range(400)], num_blocks=30)
    assert advise(given, budget_s=0.0).sentences() == [
        "not known: trying other settings takes over 0.0 s; pagedcli explain takes up to 30 s"
    ]


def test_where_no_request_fits_no_setting_saves_anything():
    for timed in (None, TIMED):
        found = advise(replace(subject([own(n, 64) for n in range(4)], num_blocks=1), timed=timed))
        assert not found.best
        assert found.sentences() == ["not known: no request fits into the pool of 1 block"]


STEP_TIME = StepTime(
    prompts=((1, 0.010), (512, 0.10), (2048, 0.40)),
    decodes=((1, 0.010), (256, 0.050)),
    attended_by_prompts_s=0.0,
    attended_by_decodes_s=0.0,
)


TIMED = Calibrations(STEP_TIME, {8: STEP_TIME})


def test_smaller_blocks_are_compared_by_the_time_of_their_own_steps():
    prompts = [[1] * 24 + own(n, 9) for n in range(24)]
    slower = STEP_TIME.scaled(1.5)
    for timed, expected in ((TIMED, True), (Calibrations(STEP_TIME, {8: slower}), False)):
        found = advise(replace(subject(prompts, num_blocks=2000), timed=timed))
        [trial] = [each for each in found.trials if each.setting.kind == "block size"]
        assert (trial.gain > 0) == expected
        assert "timed" not in (found.not_tried or "")
    found = advise(replace(subject(prompts, num_blocks=2000), timed=Calibrations(STEP_TIME, {})))
    assert "block size" not in {trial.setting.kind for trial in found.trials}
    assert found.not_tried == "--block-size 8, whose steps have not been timed (pagedcli plan does)"
    alone = replace(subject([own(n, 33) for n in range(24)], num_blocks=2000), timed=Calibrations(STEP_TIME, {}))
    assert advise(alone).not_tried is None, "smaller blocks would save nothing if they were as fast"


def test_with_the_time_of_steps_limits_are_tried_too_and_tuning_combines_changes():
    prompts = [[1] * 24 + own(n, 9) for n in range(24)]
    given = replace(subject(prompts, num_output=8, num_blocks=2000), timed=TIMED)
    found = advise(given)
    assert {"sequences", "step tokens", "chunk"} <= {trial.setting.kind for trial in found.trials}
    assert best(found) == "--max-num-seqs 8"
    tuned = tune(given)
    assert tuned.changes["--block-size"] == "8"
    assert int(tuned.changes["--max-num-seqs"]) >= 16
    assert tuned.gain > found.best[0].gain
    assert "--max-num-seqs" not in tune(given, fixed=frozenset(["--max-num-seqs"])).changes


def test_a_smaller_kv_cache_is_tried_only_where_it_is_allowed_and_its_steps_are_timed_too():
    """Twelve conversations of 64 tokens do not fit into 24 blocks, but into twice as many."""
    prompts = [own(n % 12, 64) + own(50 + n, 8) for n in range(48)]
    given = subject(prompts, num_blocks=26, max_num_seqs=1, block_bytes=1024)
    assert "KV dtype" not in {trial.setting.kind for trial in advise(given).trials}
    other = OtherKV("int8", 512, None)
    [found] = [each for each in advise(replace(given, other_kv=other)).trials if each.setting.kind == "KV dtype"]
    assert found.setting.text == "--kv-cache-dtype int8 --num-gpu-blocks-override 52"
    assert found.setting.cost == "other rounding: some tokens may differ"
    limits = replace(given.limits, num_blocks=52)
    assert found.forecast == advise(replace(given, plan=replace(given.plan, limits=limits))).base
    untimed = advise(replace(given, other_kv=other, timed=TIMED))
    assert "KV dtype" not in {trial.setting.kind for trial in untimed.trials}
    assert "--kv-cache-dtype int8, whose steps have not been timed" in untimed.not_tried


def test_tuning_gives_the_blocks_of_the_settings_that_it_ends_with():
    """Smaller blocks, then a smaller type of K and V: four times the blocks, in the same memory."""
    prompts = [[1] * 24 + own(n % 12, 41) + own(50 + n, 3) for n in range(30)]
    given = subject(prompts, num_output=2, num_blocks=13, max_num_seqs=2, block_bytes=1024)
    given = replace(given, other_kv=OtherKV("int8", 512, None))
    tuned = tune(given, fixed=frozenset(["--max-num-seqs", "--max-num-batched-tokens", "--reorder"]))
    assert (tuned.changes["--kv-cache-dtype"], tuned.changes["--block-size"]) == ("int8", "8")
    assert tuned.changes["--num-gpu-blocks-override"] == str(13 * 2 * 2)
    limits = replace(
        given.limits, num_blocks=52, block_size=8, eviction=tuned.changes.get("--eviction", "lru"),
        preemption_policy=tuned.changes.get("--preemption-policy", "last"),
    )  # fmt: skip
    assert tuned.found == advise(replace(given, plan=replace(given.plan, limits=limits))).base


# ---------------------------------------------------------------------- the commands

FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module", autouse=True)
def _no_times(tmp_path_factory):
    """Whether another test has calibrated the built-in model decides nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("no-times")
        patch.setattr("pagedcli.planning.step_time.cache_folder", lambda: folder)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A file, its recording with tokens, and what generate said."""
    folder = tmp_path_factory.mktemp("advice")
    rng = random.Random(3)
    heads = [" ".join(rng.choice(["cat", "dog", "sun", "sea", "red", "old"]) for _ in range(n)) for n in (9, 14)]
    rows = [{"prompt": f"{heads[n % 2]} {n}", "max_tokens": 5, "ignore_eos": True} for n in range(30)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = pagedcli(
        "generate", folder / "in.jsonl", "-o", folder / "out.jsonl",
        "--record", folder / "run.jsonl", "--record-tokens",
        "--summary-json", folder / "summary.json", "--output-token-ids", "--num-gpu-blocks-override", "16", *FLAGS,
        columns=1000,
    )  # fmt: skip
    return folder, shown.stderr


def test_all_commands_give_the_same_answer(runs):
    folder, said = runs
    found = recorded_advice(folder / "run.jsonl")
    assert found.best
    assert re.findall(r"^  (?:to change|or) +(.*)$", said, re.MULTILINE) == found.sentences()
    summary = json.loads((folder / "summary.json").read_text())["cache"]
    assert summary["advice"] == "; or ".join(found.sentences())
    assert summary["advised_flag"] == found.flag
    explained = pagedcli("explain", folder / "run.jsonl", "--format", "json", columns=1000).stdout
    assert json.loads(explained)["advised"] == summary["advised"]
    assert found.sentences()[0] in pagedcli("explain", folder / "run.jsonl", columns=1000).stdout
    pagedcli("report", folder / "run.jsonl", "-o", folder / "page.html")
    story = json.loads(re.search(r'"story":(\[.*?\]),"', (folder / "page.html").read_text())[1])
    assert story[2] == f"To change: {'; or '.join(found.sentences())}."


def test_a_run_with_the_advised_flags_does_what_was_promised(runs):
    folder, _ = runs
    for number, trial in enumerate(recorded_advice(folder / "run.jsonl").best):
        flags = [text for pair in trial.setting.flags for text in pair if text]
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
    assert "smaller blocks and another order, which need the tokens (--record-tokens)" in found.not_tried
    assert {trial.setting.kind for trial in found.trials} <= {"pool", "policy", "preemption"}


def test_the_table_has_the_run_as_it_is_and_every_trial():
    found = advise(subject([[1] * 24 + own(n, 9) for n in range(40)]))
    table = advice_table(found)
    assert [row["setting"] for row in table.rows] == ["as it is", *(each.setting.text for each in found.trials)]
    assert table.notes[0] == f"to change: {found.sentences()[0]}"
    assert advice_table(Advice(not_tried="no request was served")).rows == []


def test_plan_gives_the_same_answer_and_its_own_recommendation_is_that(runs):
    folder, _ = runs
    arguments = ("plan", folder / "in.jsonl", "--no-calibrate", "--num-gpu-blocks-override", "16", *FLAGS)
    found = recorded_advice(folder / "run.jsonl")
    lengths = ("--outputs", folder / "out.jsonl")
    planned = json.loads(pagedcli(*arguments, *lengths, "--format", "json").stdout)
    assert planned["advice"] == "; or ".join(found.sentences())
    flags = {flag: value for trial in found.best for flag, value in trial.setting.flags}
    assert planned["recommended_block_size"] == int(flags.get("--block-size", 16))
    assert found.sentences()[0] in pagedcli(*arguments, *lengths, columns=1000).stdout


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
        assert found["advice"] == "; or ".join(expected.sentences())
        assert found["advised_flag"] == expected.flag
        assert [row["setting"] for row in found["settings_tried"]] == [row["setting"] for row in expected.rows()]


def test_where_steps_have_been_timed_all_commands_compare_by_time_and_agree(runs, tmp_path, monkeypatch):
    folder, _ = runs
    monkeypatch.setattr("pagedcli.planning.step_time.cache_folder", lambda: tmp_path / "times")
    monkeypatch.setattr("pagedcli.bench.calibration.calibrate", lambda *_, **__: STEP_TIME)
    pool = ("--num-gpu-blocks-override", "16")
    lengths = ("--outputs", folder / "out.jsonl")
    first = as_json("plan", folder / "in.jsonl", *pool, *FLAGS, *lengths)
    trace = tmp_path / "run.jsonl"
    said = pagedcli(
        "generate", folder / "in.jsonl", "-o", tmp_path / "out.jsonl", "--record", trace, "--record-tokens",
        "--summary-json", tmp_path / "summary.json", *pool, *FLAGS, columns=1000,
    ).stderr  # fmt: skip
    expected = json.loads((tmp_path / "summary.json").read_text())["cache"]
    assert "less time" in expected["advice"]
    assert f"to change    {expected['advice'].split('; or ')[0]}" in said
    others = {
        "plan": as_json("plan", folder / "in.jsonl", *pool, *FLAGS, *lengths),
        "explain": as_json("explain", trace),
        "simulate": as_json("simulate", folder / "in.jsonl", *lengths, "--pool", "16", *FLAGS),
        "simulate the recording": as_json("simulate", trace),
    }
    for name, found in others.items():
        assert found["advised"] == expected["advised"], name
    assert {row["setting"] for row in first["settings_tried"]} == {
        row["setting"] for row in others["explain"]["settings_tried"]
    }
    (tmp_path / "times").rename(tmp_path / "elsewhere")  # as on another machine
    assert "to compute (" in as_json("explain", trace)["advice"]


def test_generate_runs_with_the_settings_that_plan_tune_prints(runs, tmp_path, monkeypatch):
    folder, _ = runs
    monkeypatch.setattr("pagedcli.bench.calibration.step_time_here", lambda *_, **__: (STEP_TIME, "a test"))
    rows = (folder / "out.jsonl").read_text().splitlines()
    printed = pagedcli("plan", folder / "in.jsonl", "--tune", *FLAGS)
    (tmp_path / "tuned.yaml").write_text(printed.stdout)
    assert "less time expected" in printed.stderr
    assert "max_num_seqs" not in printed.stdout, "it was given"
    out = tmp_path / "out.jsonl"
    tuned = pagedcli("generate", folder / "in.jsonl", "-o", out, "--tune", "--output-token-ids", *FLAGS)
    assert printed.stdout.strip() in tuned.stderr
    assert [json.loads(row)["token_ids"] for row in out.read_text().splitlines()] == [
        json.loads(row)["token_ids"] for row in rows
    ]
    pagedcli("generate", folder / "in.jsonl", "-o", tmp_path / "b.jsonl", "-C", tmp_path / "tuned.yaml", *FLAGS)
    small = pagedcli("plan", folder / "in.jsonl", "--tune", "--allow-kv-dtype", *FLAGS)
    assert ("kv_cache_dtype: int8" in small.stdout) == ("some tokens may differ" in small.stderr)
    refused = pagedcli("generate", folder / "in.jsonl", "--allow-kv-dtype", expect=2)
    assert "--allow-kv-dtype needs --tune" in refused.stderr
    assert "write it into a file first" in pagedcli("generate", "-", "--tune", stdin="{}", expect=2).stderr
