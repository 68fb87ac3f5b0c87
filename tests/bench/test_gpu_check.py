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
    results = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert all(result["ok"] and result["dry_run"] for result in results.values())
    assert (folder / "table.md").read_text() == done.stdout
    return results


def test_a_dry_run_checks_kernels_loops_and_memory(tmp_path):
    results = check_dry_run(tmp_path, "kernels", "graphs", "memory", "workload")
    assert set(results) == {"kernels", "graphs", "memory", "workload"}
    assert results["kernels"]["summary"].startswith("12 comparisons, 0 ")
    assert [row["loop"] for row in results["graphs"]["rows"]] == ["plain", "ahead", "graphs", "graphs, ahead"]
    assert results["graphs"]["rows"][3]["ahead"] > 0
    assert all(row["output tok/s"] > 0 for row in results["workload"]["rows"])


@pytest.mark.slow
def test_a_dry_run_of_every_stage(tmp_path):
    assert len(check_dry_run(tmp_path)) == 8


def test_a_stage_that_fails_or_takes_too_long_fails_the_check(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu_check as module

    monkeypatch.setitem(module.LIMITS, "ceilings", 0.01)
    slow = module.run_stage("ceilings", tmp_path, dry_run=True)
    assert not slow["ok"]
    assert "stopped at its limit of 0.01 s" in slow["problem"]
    assert json.loads((tmp_path / "ceilings.json").read_text()) == slow
    monkeypatch.setattr(module, "STAGES", tmp_path / "missing.py")
    monkeypatch.setitem(module.LIMITS, "ceilings", 30)
    broken = module.run_stage("ceilings", tmp_path, dry_run=True)
    assert not broken["ok"]
    assert "missing.py" in broken["problem"]
    assert "FAILED" in module.render([slow, broken])
    assert sum(module.LIMITS.values()) < 9 * 60
