"""gpu_check.py says that there is no GPU, and its stages' logic runs at tiny size on a CPU."""

import json
import os
import subprocess
import sys
import time
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


def test_a_stage_that_is_stopped_keeps_its_rows(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu_check as module
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


def stage_that(module, monkeypatch, tmp_path, program):
    """The result of a stage that is this program."""
    script = tmp_path / "stage.py"
    script.write_text("import json, os, subprocess, sys, time\nfrom pathlib import Path\n" + program)
    monkeypatch.setattr(module, "STAGES", script)
    return module.run_stage("graphs", tmp_path, seconds=60, dry_run=True)


def test_a_stage_that_aborts_leaves_its_stack(tmp_path, monkeypatch, module):
    result = stage_that(module, monkeypatch, tmp_path, "os.abort()\n")
    assert "Fatal Python error: Aborted" in result["problem"]
    assert "stage.py" in (tmp_path / "graphs.stderr.txt").read_text()


@pytest.mark.long
def test_a_stopped_stage_leaves_no_children(tmp_path, monkeypatch, module):
    monkeypatch.setitem(module.LIMITS, "graphs", 5)
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    program = f"child = {child}\nPath('{tmp_path}/pid').write_text(str(child.pid))\ntime.sleep(600)\n"
    result = stage_that(module, monkeypatch, tmp_path, program)
    assert "stopped at its limit" in result["problem"]
    pid = int((tmp_path / "pid").read_text())
    status, end = Path(f"/proc/{pid}/status"), time.monotonic() + 10  # on a busy machine the signal takes its time
    while (is_left := status.exists() and "State:\tZ" not in status.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_left


def test_after_a_cuda_error_the_other_cases_run_in_processes_of_their_own(tmp_path, monkeypatch, module):
    program = """
part = int(sys.argv[sys.argv.index("--part") + 1][0]) if "--part" in sys.argv else None
cases = range(module) if part is None else [part]
with open(sys.argv[2], "w") as file:
    for case in cases:
        poisoned = case == 2 or (part is None and case > 2)
        row = {"case": case, "problem": "CUDA error: an illegal memory access"} if poisoned else {"case": case}
        file.write(json.dumps(row) + chr(10))
    rows = []
"""
    program = program.replace("range(module)", f"range({module.NUM_PARTS})")
    result = stage_that(module, monkeypatch, tmp_path, program)
    assert not result["ok"]
    assert result["problem"] == "a CUDA error"
    again = result["rows"][module.NUM_PARTS :]
    assert [row["case"] for row in again if "problem" not in row] == [0, 1, 3, 4, 5]


def test_the_first_part_of_a_model_that_differs_is_named(module, tmp_path):
    from gpu_engines import engine_of, first_difference
    from model_zoo import tiny_model

    path = tiny_model("olmo2", tmp_path / "model", num_hidden_layers=2)
    plain = {"enforce_eager": True, "enable_prefix_caching": False}
    right, same, wrong = (engine_of(path, "cpu", **plain) for _ in range(3))
    assert first_difference(right, same, [5, 6, 7]).startswith("no branch")
    branch = wrong.model._late_branches[0]
    branch.body = lambda x, step, body=branch.body: 1.01 * body(x, step)
    found = first_difference(right, wrong, [5, 6, 7])
    assert found == f"branch {len(wrong.model._branches)}, MlpBody [1, 64]: relative error 1e-02"
