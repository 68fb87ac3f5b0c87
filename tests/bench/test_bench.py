"""`pagedcli bench`: workloads that equal the published ones, a floor that equals the published one, and its tables."""

import functools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from pagedcli.bench.rates import MachineRates, measure_rates
from pagedcli.bench.spread import Busy, BusyWatch, EarlierRow, Spread, compared_rows
from pagedcli.bench.throughput import bench_notes, shape_folder, workload_config
from pagedcli.bench.workloads import PRESETS, preset_workload, random_draw, within, workload_floor
from pagedcli.cli.bench import BenchProgress
from pagedcli.cli.main import app
from pagedcli.config import load_config
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.errors import UsageError
from pagedcli.models.footprint import footprint
from pagedcli.models.formats import AS_STORED
from pagedcli.models.reading import read_spec
from pagedcli.planning.cards import Roofline

# seconds on 37 GB/s and 464 GFLOP/s: the table of the machine on which the peers were measured
PUBLISHED_FLOOR = {"W1": 16.0, "W2": 26.0, "W3": 17.1, "W4": 6.1, "W5": 2.3, "W6": 42.0, "W7": 2.65}


@pytest.mark.parametrize("name", PUBLISHED_FLOOR)
def test_floor_equals_the_published_one(name):
    workload = preset_workload(name)
    spec = read_spec(shape_folder(workload.shape))
    floor = workload_floor(spec, footprint(spec, AS_STORED, "cpu", 2), workload, Roofline(37e9, 464e9))
    assert floor == pytest.approx(PUBLISHED_FLOOR[name], rel=0.01)


def test_presets_repeat_and_a_salt_changes_tokens_only():
    for name in PRESETS:
        first, again, other = preset_workload(name), preset_workload(name), preset_workload(name, salt=1)
        assert first == again
        assert list(map(len, first.prompts)) == list(map(len, other.prompts))
        assert first.output_lens == other.output_lens
        assert (first.prompts != other.prompts) or name == "nano-vllm"


def test_mixed_preset_has_the_lengths_of_the_peers_script():
    lengths = random.Random(0)
    workload = preset_workload("W2")
    assert [len(prompt) for prompt in workload.prompts] == [lengths.randint(25, 256) for _ in range(32)]
    assert workload.output_lens == [lengths.randint(25, 256) for _ in range(32)]


def test_random_workload_keeps_its_bounds_and_shares_its_prefix():
    workload = random_draw(20, 100, 10, range_ratio=0.5, prefix_len=7, seed=3).workload("random")
    assert {tuple(prompt[:7]) for prompt in workload.prompts} == {tuple(workload.prompts[0][:7])}
    assert all(57 <= len(prompt) <= 107 for prompt in workload.prompts)
    assert all(5 <= n <= 10 for n in workload.output_lens)
    assert workload.prefix_caching
    assert workload != random_draw(20, 100, 10, range_ratio=0.5, prefix_len=7, seed=4).workload("random")


@pytest.mark.parametrize("wrong", [{"range_ratio": 0}, {"range_ratio": 1.5}, {"num_prompts": 0}, {"prefix_len": -1}])
def test_wrong_workloads_are_usage_errors(wrong):
    with pytest.raises(UsageError):
        random_draw(**{"num_prompts": 1, "input_len": 1, "output_len": 1, **wrong})
    with pytest.raises(UsageError, match="no preset"):
        preset_workload("W9")


def bench(*arguments):
    result = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout


SMALL = ("-m", str(shape_folder("qwen3-small")), "--load-format", "dummy")


@pytest.mark.long
def test_throughput_says_how_far_from_the_floor_it_is():
    lengths = ("--num-prompts", "3", "--input-len", "8", "--output-len", "4", "--repeat", "2")
    document = json.loads(bench(*SMALL, *lengths, "--format", "json"))
    [row] = document["throughput"]
    assert len(row["all_wall_s"]) == 2
    assert row["wall_s"] == pytest.approx(sum(row["all_wall_s"]) / 2)
    rates = sorted(12 / seconds for seconds in row["all_wall_s"])
    assert row["spread"]["output_tokens_per_s"] == pytest.approx(
        {"min": rates[0], "median": sum(rates) / 2, "max": rates[1]}
    )
    assert row["output_tokens_per_s"] == row["spread"]["output_tokens_per_s"]["median"]
    assert row["share_of_floor"] is None or 0 < row["share_of_floor"] <= 1
    assert row["machine"]["read_bytes_per_s"] > 1e9


@pytest.fixture
def measured_once(monkeypatch):
    """The machine's rates are measured once for all tests that do not look at them."""
    monkeypatch.setattr("pagedcli.bench.throughput.measure_rates", _rates)


_rates = functools.cache(measure_rates)


def test_the_builtin_model_is_measured_where_it_is_named():
    """It was taken for no model at all: 64 sequences of "builtin" took minutes, in the shape of a 0.6B model."""
    workload = random_draw(2, 8, 4).workload("random")
    assert workload_config(load_config(None, {"engine.model": "builtin"}), workload).model == "builtin"
    unnamed = workload_config(load_config(), workload)
    assert (Path(unnamed.model).name, unnamed.load_format) == (workload.shape, "dummy")


def test_cache_gives_the_same_tokens_without_it():
    flags = ("-m", "builtin", "--lengths", "17,34", "--output-len", "5", "--repeat", "2")
    document = json.loads(bench("cache", *flags, "--format", "json"))
    rows = document["cache"]
    assert document["same_tokens"]
    assert [row["tokens_computed"] for row in rows] == [16, sum(range(12, 17)), 33, sum(range(29, 34))]
    assert [row["formula_s"] is None for row in rows] == [True, False] * 2
    # of five prompts of 12 to 16 tokens; attention of few tokens is nothing
    assert rows[1]["formula_s"] * 1e3 == pytest.approx(rows[0]["ttft_ms"] * sum(range(12, 17)) / 12, rel=0.1)
    said, *_, curve = bench("cache", *flags).split("\n\n")
    assert re.match(r"Without a KV cache the last 5 of 34 tokens take [\d.]+ times as long \([\d.]+ \+- [\d.]+ s", said)
    assert ":" in curve.splitlines()[1]
    assert "#" in curve.splitlines()[6]


@pytest.mark.parametrize("lengths", ["128,", "16,64"])
def test_lengths_that_cannot_be_generated_are_refused(lengths):
    result = CliRunner().invoke(app, ["bench", "cache", "--lengths", lengths])
    assert (result.exit_code, "--lengths" in result.stderr) == (2, True)


def test_a_file_without_a_prompt_to_serve_is_refused_with_the_first_reason(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("nothing\n")
    result = CliRunner().invoke(app, ["bench", "reservation", str(tmp_path / "prompts.jsonl")])
    assert result.exit_code == 2
    assert "error: there is no prompt to serve: line 1: not JSON" in result.stderr


def test_pages_hold_more_than_reserved_pieces_and_sharing_adds_to_that(tmp_path):
    common = {"max_tokens": 16, "ignore_eos": True}
    prompts = [{"prompt": [9] * 40 + [10 + n] * 8, "n": 1 + n % 2, **common} for n in range(6)]
    lines = [*map(json.dumps, prompts), '{"prompt": "a", "beam_width": 2}']
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    pool = ("--num-kvcache-blocks", "16", "--max-model-len", "128")
    command = ["bench", "reservation", str(tmp_path / "prompts.jsonl"), *pool]
    result = CliRunner().invoke(app, [*command, "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 3, result.stderr
    document = json.loads(result.stdout)
    model, own, unshared, paged = document["caches"]
    # pieces of 8 blocks and of 4, pages of up to 4, and of one or two when two are shared: all nine samples fit
    assert (model["at_once"], own["at_once"], paged["at_once"]) == (2, 4, 9)
    assert 4 <= unshared["at_once"] < 9
    assert [row["external"] for row in (model, own)] == [0, 0]
    assert model["internal"] == pytest.approx(1 - 63 / 128), "48 tokens and 15 of 16"
    assert own["internal"] == pytest.approx(1 / 64)
    for row in (model, own, unshared):
        assert sum(row[name] for name in ("tokens", "reserved", "internal", "external")) == pytest.approx(1)
    assert document["num_failed"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_a_model_with_a_small_vocabulary_can_be_measured(tmp_path):
    """Ids of workloads are drawn below 10,000."""
    config = json.loads((shape_folder("qwen3-small") / "config.json").read_text()) | {"vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    small = ("-m", str(tmp_path), "--load-format", "dummy", "--dtype", "float32", "--format", "json")
    assert json.loads(bench("cache", *small, "--lengths", "15", "--output-len", "3", "--repeat", "1"))["same_tokens"]
    lengths = ("--input-len", "12", "--output-len", "3", "--num-prompts", "2")
    assert json.loads(bench(*small, *lengths, "--repeat", "1"))["throughput"]


def test_ids_within_the_vocabulary_stay_and_others_wrap_around():
    assert within([5, 10, 9_999], 10_000) == [5, 10, 9_999]
    assert within([5, 10, 299, 300, 9_999], 300) == [5, 10, 299, 10, 10 + 9_989 % 290]
    assert within([5, 10_000], 3) == [2, 2]


def test_the_better_of_two_measurements_of_a_machine_counts():
    first, second = MachineRates(2, 50e9, 900e9, 800e9, "FMA"), MachineRates(2, 70e9, 880e9, 950e9, "FMA")
    assert first.best(second) == second.best(first) == MachineRates(2, 70e9, 900e9, 950e9, "FMA")


def test_a_product_that_beats_the_registers_is_the_limit():
    """Vector multiply-adds are measured in registers; tiles can exceed them, and then they are the floor."""
    assert MachineRates(2, 50e9, 344e9, 1096e9, "AMX").limits.flop_per_s == 1096e9


# ---------------------------------------------------------------------- what disturbs, what changed

SHORT = (*SMALL, "--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--repeat", "2")


@pytest.mark.long
@pytest.mark.usefixtures("measured_once")
def test_an_earlier_file_is_compared_figure_by_figure(tmp_path):
    (tmp_path / "before.json").write_text(bench(*SHORT, "--format", "json"))
    found = json.loads(bench(*SHORT, "--compare", str(tmp_path / "before.json"), "--format", "json"))
    figures = {row["figure"]: row for row in found["compared"]}
    assert {"wall_s", "output_tokens_per_s", "ttft_ms", "tpot_ms"} <= set(figures)
    before = json.loads((tmp_path / "before.json").read_text())["throughput"][0]
    assert figures["wall_s"]["before"] == before["wall_s"]
    assert figures["wall_s"]["now"] == found["throughput"][0]["wall_s"]
    first = bench(*SHORT).splitlines()[0]
    assert re.match(r"random: [\d,]+ tokens/s \([\d,]+ to [\d,]+ in 2 passes\)", first)


def measured(workload="W", **figures):
    return EarlierRow(workload, {name: Spread.of(values) for name, values in figures.items()})


def test_a_change_counts_only_where_the_passes_do_not_overlap():
    before = measured(wall_s=[4.0, 4.2, 4.4], output_tokens_per_s=[90.0, 100.0, 110.0], ttft_ms=[10.0], tpot_ms=[None])
    now = measured(wall_s=[4.3, 4.5, 4.6], output_tokens_per_s=[120.0, 130.0, 140.0], ttft_ms=[20.0], tpot_ms=[1.0])
    rows = {row.figure: row for row in compared_rows([before], [now])}
    assert rows["wall_s"].verdict == "within the spread"
    assert (rows["output_tokens_per_s"].verdict, rows["output_tokens_per_s"].change) == (
        "better",
        pytest.approx(0.3),
    )
    assert rows["ttft_ms"].verdict == "worse"
    assert "tpot_ms" not in rows, "not measured before"
    assert compared_rows([measured("other", wall_s=[1.0])], [now]) == []
    assert compared_rows([replace(before, num_tokens=80)], [replace(now, num_tokens=96)]) == [], "other requests"


@pytest.mark.parametrize("content", ["no json", "{}", '{"throughput": [{"workload": "W1"}]}'])
def test_a_file_that_is_no_measurement_is_refused_before_measuring(tmp_path, content):
    (tmp_path / "before.json").write_text(content)
    for path in (tmp_path / "before.json", tmp_path / "none.json"):
        result = CliRunner().invoke(app, ["bench", *SHORT, "--compare", str(path)])
        assert result.exit_code == 2
        assert str(path) in result.stderr


def test_other_work_is_what_all_cores_did_without_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    stat = tmp_path / "stat"
    stat.write_text("cpu  1000 0 0 9000 0 0 0 0 0 0\ncpu0 ...\n")
    watch = BusyWatch()
    stat.write_text("cpu  1300 0 100 9550 0 0 0 50 0 0\n")  # 10 s of all cores: 4 s busy, 0.5 s withheld
    busy = watch.read()
    assert busy.steal == pytest.approx(0.05)
    assert busy.others == pytest.approx(0.4, abs=0.05), "this process has used almost nothing since"
    assert busy.disturbs
    assert not Busy(others=0.01, steal=0.0).disturbs
    assert BusyWatch().read() is None, "no time has passed"


def test_a_busy_machine_and_an_impossible_share_are_said():
    plan = Plan(limits=Limits(), model="m")
    values = {"machine": MachineRates(1, 1e9, 1e9, 1e9, ""), "share_of_floor": None}
    row = SimpleNamespace(busy=Busy(others=0.5, steal=0.01), **values)
    *_, busy, share = bench_notes(plan, [row])
    assert "other processes used 50% of its processor time, the hypervisor withheld 1%" in busy
    assert "The share of the limits is left out" in share
    assert len(bench_notes(plan, [SimpleNamespace(busy=None, **values | {"share_of_floor": 0.9})])) == 2


@pytest.mark.usefixtures("measured_once")
@pytest.mark.slow
def test_passes_are_shown_as_they_end_and_by_default_fit_a_minute(monkeypatch, capsys):
    lengths = ("--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--format", "json")
    result = CliRunner().invoke(app, ["bench", *SMALL, *lengths], catch_exceptions=False)
    assert len(json.loads(result.stdout)["throughput"][0]["all_wall_s"]) == 3
    assert len([line for line in result.stderr.splitlines() if "out tok/s, TTFT " in line]) == 3
    monkeypatch.setattr("pagedcli.cli.bench._MINUTE_S", 0.0)
    result = CliRunner().invoke(app, ["bench", *SMALL, *lengths], catch_exceptions=False)
    assert len(json.loads(result.stdout)["throughput"][0]["all_wall_s"]) == 1


def test_the_remaining_time_is_that_of_all_workloads(monkeypatch, capsys):
    """After a load of 96 s the first 3 % of the tokens were followed by "about 3,063 s left"."""
    clock = iter([100.0, 196.0, 211.0])
    monkeypatch.setattr("pagedcli.show.terminal.time.monotonic", lambda: next(clock))
    progress = BenchProgress("W5", before=0.25, part=0.5)
    for share in (0.0, 0.1):
        progress(share)
    assert capsys.readouterr().err == f"W5: 30%, {15 / 0.05 * 0.7 // 60:.0f} min {15 / 0.05 * 0.7 % 60:.0f} s left\n"
