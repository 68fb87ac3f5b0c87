"""What to change about a run: what is promised is the run with the flags or the changed prompts, nothing that was tried
is better, and every command says the same."""

import json
import random
import re
from array import array
from dataclasses import replace

import planted_prompts as planted
import pytest
from cli_harness import pagedcli

from pagedcli.answers.cures import LEAST_TIMED_S, WORTH_SAYING, Trials, cures, tune
from pagedcli.answers.settings import KINDS, Setting, Subject
from pagedcli.answers.time import time as forecast
from pagedcli.answers.turns import Turns
from pagedcli.cli.cures import told_of_recording
from pagedcli.cli.plan_tune import time_in_turns
from pagedcli.config import load_config
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.models.hub import model_folder
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import this_machine
from pagedcli.planning.prompt_sample import PromptSample
from pagedcli.planning.step_time import StepTime, save_step_time
from pagedcli.simulation.requests import Request, Requests
from pagedcli.simulation.run import recorded_plan
from pagedcli.simulation.sources import read_recorded_run


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


BEFORE = (2.0, 2.1, 2.2, 2.1) * 2
FASTER = Turns(BEFORE, (1.4, 1.5, 1.6, 1.5) * 2)
UNSURE = Turns(BEFORE, (1.8, 2.2, 2.0, 2.05) * 2)


def slow(given):
    """The subject with steps that take so long that runs are compared by time."""
    return replace(given, step_time=step_time(20))


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
    found, asked = tuned(given)
    assert found.timed.kind.is_timed
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
    assert found.changes == {**exact, **found.timed.changes}


[BLOCK_SIZES] = [kind for kind in KINDS if kind.name == "block size"]


def test_smaller_blocks_are_tried_where_the_kernels_have_them():
    prompts = [[1] * 240 + own(n, 9) for n in range(16)]
    for device, sizes in (("cpu", [32, 16, 8]), ("cuda:0", [32, 16])):
        given = subject(prompts, num_blocks=512, block_size=64, device=device)
        assert BLOCK_SIZES.values(given, Trials(given).as_it_is) == sizes


def test_the_blocks_of_a_small_pool_are_part_of_the_advice_on_their_size():
    given = subject([[1] * 24 + own(n, 9) for n in range(40)], num_blocks=12)
    assert Setting.of(BLOCK_SIZES, given, 8).text == "--block-size 8 --num-kvcache-blocks 24"


def random_subject(seed):
    rng = random.Random(seed)
    heads = [own(k, rng.randrange(4, 60)) for k in range(rng.randrange(1, 6))]
    prompts = [rng.choice(heads) + [rng.randrange(90) for _ in range(rng.randrange(1, 40))] for _ in range(20)]
    return subject(
        prompts, num_output=rng.randrange(1, 30), num_blocks=rng.choice((12, 20, 40, 400)),
        max_num_seqs=rng.randrange(1, 12), block_size=rng.choice((16, 32)),
    )  # fmt: skip


def tried(given):
    """All settings that change no step, and the runs with them."""
    trials = Trials(given)
    trials.explore([kind for kind in KINDS if not kind.is_timed])
    return trials


def test_the_pool_is_the_smallest_that_is_as_good():
    prompts = [own(n % 12, 64) + own(50 + n, 8) for n in range(48)]
    given = subject(prompts, num_blocks=24, max_num_seqs=1, block_bytes=2**20)
    [pool] = [trial for trial in tried(given).tried if trial.setting.kind.name == "pool"]
    number = pool.setting.changes["engine.num_kvcache_blocks"]
    assert pool.setting.cost == f"it takes {number - 24:.1f} MiB more memory"
    for num_blocks, is_enough in ((number, True), (number - 4, False)):
        limits = replace(given.limits, num_blocks=num_blocks)
        again = Trials(replace(given, plan=replace(given.plan, limits=limits))).as_it_is
        assert (again.num_computed_tokens <= pool.run.num_computed_tokens) == is_enough
    assert number < 4 * 24


def test_the_order_comes_before_a_larger_pool_that_gains_as_much_and_nothing_is_said_where_nothing_helps():
    prompts = [own(n % 6, 64) + own(50 + n, 8) for n in range(48)]
    first = cures(subject(prompts, num_blocks=12, max_num_seqs=1))[0]
    assert (first.kind, first.flags) == ("order", ["--reorder", "prefix"])
    assert first.text.startswith("With --reorder prefix, hits rise from 0.0 % to ")
    in_order = subject(sorted(prompts), num_blocks=12, max_num_seqs=1)
    assert Trials(in_order).as_it_is.hit_rate == first.hit_rate_after, "as promised"
    assert cures(in_order) == []


def test_prefix_caching_is_a_cure_where_it_is_off_and_prompts_share():
    prompts = [[1] * 64 + own(n, 4) for n in range(8)]
    [found] = cures(subject(prompts, enable_prefix_caching=False, max_num_seqs=1))
    assert found.flags == ["--enable-prefix-caching"]
    assert cures(subject([own(n, 64) for n in range(8)], enable_prefix_caching=False)) == []


@pytest.mark.parametrize("seed", range(5))
def test_nothing_that_was_tried_is_better_than_the_cure_and_every_figure_is_a_run_of_its_flags(seed):
    given = random_subject(seed)
    trials = tried(given)
    found = [each for each in cures(given) if each.kind in {kind.name for kind in KINDS if not kind.is_timed}]
    sure = [round(trial.gain, 3) for trial in trials.best()]
    assert bool(found) == bool(sure)
    if found:
        assert round(found[0].saved_tokens_share, 3) == max(sure) >= WORTH_SAYING
    for trial in trials.tried:
        again = Trials(trial.setting.subject).as_it_is
        assert again == trial.run, trial.setting.text


def test_time_is_told_of_runs_of_two_seconds_or_more():
    prompts = [own(n % 6, 64) + own(50 + n, 8) for n in range(48)]
    given = subject(prompts, num_blocks=12, max_num_seqs=1)
    [found, *_] = cures(replace(given, step_time=step_time(20)))
    assert found.saved_seconds > LEAST_TIMED_S
    assert "are saved" in found.text
    [found, *_] = cures(replace(given, step_time=step_time(0.01)))
    assert found.saved_seconds is None


def test_trials_end_when_their_time_is_over_and_nothing_is_said_of_them():
    assert cures(subject([[1] * 24 + own(n, 9) for n in range(400)], num_blocks=30), budget_s=0.0) == []


def test_where_no_request_fits_there_is_no_cure():
    for step_time in (None, STEP_TIME):
        assert cures(replace(subject([own(n, 64) for n in range(4)], num_blocks=1), step_time=step_time)) == []


def test_hits_after_a_change_of_the_prompts_are_those_of_the_changed_run():
    shared = list(range(500, 600))
    prompts = [[n, n + 1, *shared, *own(n, 20)] for n in range(24)]
    given = subject(prompts, num_blocks=400)
    [found] = [each for each in cures(given) if each.kind == "move"]
    moved = subject([[*shared, n, n + 1, *own(n, 20)] for n in range(24)], num_blocks=400)
    assert found.hit_rate == 0.0
    assert found.hit_rate_after == pytest.approx(Trials(moved).as_it_is.hit_rate, abs=0.02)
    assert "Moving the text there behind the 100 equal tokens after it, in the same message, raises hits" in found.text
    small = cures(replace(given, plan=subject(prompts, num_blocks=11, max_num_seqs=1).plan))
    assert all(each.hit_rate_after - each.hit_rate >= WORTH_SAYING for each in small), "as far as the pool has room"


def test_one_salt_is_a_cure_of_its_own():
    prompts = [[*range(500, 600), *own(n, 20)] for n in range(24)]
    given = subject(prompts, num_blocks=400)
    for n, request in enumerate(given.workload.requests):
        request.cache_salt = f"user {n}"
    [found] = cures(given)
    assert found.kind == "one salt"
    assert found.hit_rate_after == Trials(subject(prompts, num_blocks=400)).as_it_is.hit_rate
    assert "23 of 24 prompts begin with 96 equal tokens, but with another cache_salt." in found.text


def test_a_sample_of_prompts_is_judged_by_the_prompts_that_were_drawn():
    case = planted.drawn(planted.clock, 60, 1)
    drawn = PromptSample(most_rows=40)
    for text in case.file.texts:
        drawn.add(list(text.encode()))
    found = cures(None, prompts=drawn, block_size=16)[0]
    assert "raises hits of the drawn prompts in an unlimited cache from " in found.text
    assert found.saved_tokens_share is None


def step_time(times=1):
    """Steps that take so many times as long as on a fast machine."""
    return StepTime(
        prompts=((1, times * 0.010), (512, times * 0.10), (2048, times * 0.40)),
        decodes=((1, times * 0.010), (256, times * 0.050)),
        attended_s=0.0,
        read_s=0.0,
    )


STEP_TIME = step_time()


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
    """A file, its recording with tokens, and what generate said on stderr."""
    folder = tmp_path_factory.mktemp("cures")
    rng = random.Random(3)
    heads = [" ".join(rng.choice(["cat", "dog", "sun", "sea", "red", "old"]) for _ in range(40)) for _ in range(6)]
    rows = [{"prompt": f"{heads[n % 6]} {n}", "max_tokens": 5, "ignore_eos": True} for n in range(30)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = pagedcli(
        "generate", folder / "in.jsonl", "-o", folder / "out.jsonl",
        "--record", folder / "run.jsonl", "--record-tokens",
        "--summary-json", folder / "summary.json", "--output-token-ids", "--num-kvcache-blocks", "16", *FLAGS,
        columns=1000,
    )  # fmt: skip
    return folder, shown.stderr.splitlines()


def as_json(*arguments):
    return json.loads(pagedcli(*arguments, "--format", "json").stdout)


def test_all_commands_say_the_same(runs):
    folder, shown = runs
    found = json.loads((folder / "summary.json").read_text())["cures"]
    assert {each["kind"] for each in found} == {"order", "pool"}
    said = [each["text"] for each in found]
    assert said == told_of_recording(folder / "run.jsonl")
    assert [line in said for line in shown].count(True) == 1
    lengths, limits = ("--outputs", folder / "out.jsonl"), ("--num-kvcache-blocks", "16", *FLAGS)
    assert as_json("explain", folder / "run.jsonl")["cures"] == found
    assert as_json("plan", folder / "in.jsonl", "--no-calibrate", *lengths, *limits)["cures"] == found
    for command in (
        ("simulate", folder / "run.jsonl"),
        ("simulate", folder / "in.jsonl", *lengths, "--pool", "16", *FLAGS),
    ):
        assert as_json(*command)["cures"] == [each for each in found if each["kind"] != "pool"]
    explained = pagedcli("explain", folder / "run.jsonl", columns=1000).stdout.splitlines()
    assert explained[1 : 1 + len(said)] == said
    pagedcli("explain", folder / "run.jsonl", "-o", folder / "page.html")
    assert json.loads(re.search(r'"verdicts":(\[.*?\]),"', (folder / "page.html").read_text())[1]) == said


def test_a_run_with_the_flags_of_a_cure_does_what_was_promised(runs):
    folder, _ = runs
    for number, cure in enumerate(as_json("explain", folder / "run.jsonl")["cures"]):
        pool = () if "--num-kvcache-blocks" in cure["flags"] else ("--num-kvcache-blocks", "16")
        pagedcli(
            "generate", folder / "in.jsonl", "-o", folder / f"{number}.jsonl", "--summary-json",
            folder / f"{number}.json", *FLAGS, *pool, *cure["flags"],
        )  # fmt: skip
        summary = json.loads((folder / f"{number}.json").read_text())
        assert summary["cached_tokens"] / summary["prompt_tokens"] == pytest.approx(cure["hit_rate_after"])


def test_without_recorded_tokens_no_order_is_tried(runs, tmp_path):
    folder, _ = runs
    pagedcli("generate", folder / "in.jsonl", "-o", "/dev/null", "--record", tmp_path / "run.jsonl", *FLAGS)
    assert {each["kind"] for each in as_json("explain", tmp_path / "run.jsonl")["cures"]} <= {
        "pool", "policy", "preemption",
    }  # fmt: skip


def test_generate_takes_the_settings_that_plan_tune_prints(runs, tmp_path, step_times, monkeypatch):
    folder, _ = runs
    engine = load_config(None, {"engine.max_num_seqs": 4, "engine.max_num_batched_tokens": 64}).config.engine
    save_step_time(decide(engine, read_spec(model_folder(engine)), this_machine()).time_key, step_time(20))
    monkeypatch.setattr("pagedcli.cli.plan_tune.time_in_turns", lambda *_: FASTER)
    arguments = ("plan", folder / "in.jsonl", *FLAGS, "--tune")
    told = pagedcli(*arguments)
    assert "calibrating" not in told.stderr
    printed = told.stdout
    (tmp_path / "tuned.yaml").write_text(printed)
    assert re.search("^# 28.6 % less time .timed in turns. with --(block-size|chunked)", printed, re.MULTILINE)
    assert "max_num_seqs" not in printed, "it was given"
    out = tmp_path / "out.jsonl"
    pagedcli("generate", folder / "in.jsonl", "-o", out, "-C", tmp_path / "tuned.yaml", "--output-token-ids", *FLAGS)
    assert [json.loads(row)["token_ids"] for row in out.read_text().splitlines()] == [
        json.loads(row)["token_ids"] for row in (folder / "out.jsonl").read_text().splitlines()
    ]
    assert "--tune times steps" in pagedcli(*arguments, "--no-calibrate", expect=2).stderr


@pytest.mark.long
def test_runs_in_turns_are_runs_of_the_first_rows_with_each_setting(runs, capsys):
    folder, _ = runs
    loaded = load_config(None, {"engine.max_num_seqs": 4, "engine.num_kvcache_blocks": 16})
    workload, state = read_recorded_run(folder / "run.jsonl")
    given = Subject(workload, recorded_plan(state))
    before, changes = {"run.reorder": "prefix"}, {"engine.block_size": 8, "engine.num_kvcache_blocks": 32}
    turns = time_in_turns(loaded, given, 3.0, before, {**before, **changes}, 20.0)
    assert len(turns.before_s) == len(turns.after_s) >= 1
    assert all(seconds > 0 for seconds in (*turns.before_s, *turns.after_s))
    said = capsys.readouterr().err
    assert re.search("and the current settings in turns, on [1-9][0-9]* prompts", said)
    assert f"--block-size 8 --num-kvcache-blocks 32: {turns.text}, by {len(turns.after_s)} passes each" in said
    assert time_in_turns(loaded, given, 3.0, {}, {"engine.kv_cache_dtype": "fp8"}, 1.0) is None
    assert "not timed: kv_cache_dtype fp8 needs a CUDA GPU" in capsys.readouterr().err


def test_without_prefix_caching_all_say_what_it_would_give_where_prompts_diverge(tmp_path):
    path, trace = tmp_path / "clock.jsonl", tmp_path / "run.jsonl"
    library, rows = planted.words(random.Random(1), 120), []
    for number in range(20):
        texts = {"system": f"It is {9 + number % 13}:{10 + number}:10. {library}", "user": f"Where is book {number}?"}
        rows.append({"messages": [{"role": role, "content": text} for role, text in texts.items()]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = ("--record", trace, "--record-tokens", "-o", tmp_path / "out.jsonl", "--no-enable-prefix-caching")
    said = pagedcli("generate", path, "--max-tokens", "1", *kept).stderr.splitlines()[-2]
    assert re.match(r"19 of 20 prompts diverge at .*\. With --enable-prefix-caching, moving the time behind the ", said)
    assert told_of_recording(trace)[0] == said
    explained = pagedcli("explain", trace).stdout.splitlines()
    assert explained[0].startswith("Prefix caching was off: all of ")
    assert explained[1] == said
    planned = pagedcli("plan", path, "--no-calibrate", "--max-tokens", "1", "--no-enable-prefix-caching").stdout
    assert planned.splitlines()[1] == said
    story = pagedcli("explain", trace, "--request", "7").stdout
    assert "without a prefix lookup, as prefix caching is off" in story
    assert "divergence" not in story
