"""gpu_check.py says that there is no GPU, and its stages' logic runs at tiny size on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"


def gpu_check(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_2(tmp_path):
    done = gpu_check("--out", tmp_path / "results")
    assert done.returncode == 2
    assert "no CUDA GPU" in done.stderr
    assert not (tmp_path / "results").exists()


def test_an_unknown_stage_is_named():
    done = gpu_check("--dry-run-cpu", "kernel")
    assert done.returncode == 2
    assert "'kernel'" in done.stderr


def check_dry_run(folder, *stages):
    done = gpu_check("--dry-run-cpu", "--out", folder, *stages)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["stage"]: result for result in json.loads((folder / "results.json").read_text())}
    assert all(result["ok"] and result["dry_run"] for result in results.values())
    assert done.stdout == (folder / "table.md").read_text()
    assert {path.name for path in folder.iterdir()} == {"results.json", "table.md"}
    return results


@pytest.mark.slow
def test_a_dry_run_checks_kernels_loops_and_memory(tmp_path):
    results = check_dry_run(tmp_path, "kernels", "graphs", "memory", "workload")
    assert list(results) == ["kernels", "graphs", "memory", "workload"]
    assert results["kernels"]["summary"].endswith(" comparisons, 0 out of tolerance")
    assert [row["loop"] for row in results["graphs"]["rows"]] == ["plain", "ahead", "graphs", "graphs, ahead"]
    assert results["graphs"]["rows"][3]["ahead"] > 0
    assert all(row["output tok/s"] > 0 for row in results["workload"]["rows"])


@pytest.mark.slow
@pytest.mark.parametrize(("group", "num_stages"), [("correctness", 14), ("speed", 6)])
def test_a_dry_run_of_every_stage(group, num_stages, tmp_path):
    assert len(check_dry_run(tmp_path, group)) == num_stages


def test_a_stage_that_is_stopped_keeps_its_rows(tmp_path, module):
    import gpu_common

    path = tmp_path / "rows.jsonl"
    assert module.read_rows(path) == {"rows": []}
    rows = gpu_common.Rows(path)
    rows.append({"us": 1.0})
    rows.append({"us": 2.0})
    with path.open("a") as file:
        file.write('{"us": 3')
    assert module.read_rows(path) == {"rows": [{"us": 1.0}, {"us": 2.0}]}
    path.unlink()
    rows.append({"us": 4.0})
    rows.write({"verdict": {"ok": True, "summary": "all", "rows": rows[:2]}})
    assert module.read_rows(path) == {"ok": True, "summary": "all", "rows": [{"us": 1.0}, {"us": 2.0}]}


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu_check as module

    return module


def test_a_stage_that_fails_or_takes_too_long_loses_only_its_own_results(tmp_path, monkeypatch, module):
    monkeypatch.setitem(module.LIMITS, "ceilings", 0.01)
    slow = module.run_stage("ceilings", tmp_path, seconds=60, dry_run=True)
    assert not slow["ok"]
    assert "stopped at its limit of 0.01 s" in slow["problem"]
    monkeypatch.setattr(module, "STAGES", tmp_path / "missing.py")
    broken = module.run_stage("graphs", tmp_path, seconds=60, dry_run=True)
    assert not broken["ok"]
    assert "missing.py" in broken["problem"]
    assert "missing.py" in (tmp_path / "graphs.stderr.txt").read_text()
    late = module.run_stage("graphs", tmp_path, seconds=3, dry_run=True)
    assert late["problem"] == "not run: no time was left"
    assert module.render([slow, broken, late]).count("FAILED") == 3
