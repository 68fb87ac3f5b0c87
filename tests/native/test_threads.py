"""The number of threads follows the affinity mask and the quota of a container."""

import os
import subprocess
import sys

import pytest
import torch

from pagedcli.native.system import limit_threads, usable_cores

ALL = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000", ALL), ("100000 100000", 1), ("50000 100000", 1), ("9900000 100000", ALL)]
)
def test_a_quota_limits_the_cores(tmp_path, text, expected):
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert usable_cores(tmp_path) == expected
    assert usable_cores(tmp_path / "absent") == ALL


def test_a_quota_of_cgroup_version_1(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, expected in (("-1", ALL), ("100000", 1)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
        assert usable_cores(tmp_path) == expected


def test_threads_are_lowered_and_never_raised():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(ALL + 5)
        limit_threads()
        assert torch.get_num_threads() <= ALL
        torch.set_num_threads(1)
        limit_threads()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_of_torch_sleep_soon_unless_the_user_says_otherwise(given, expected):
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import pagedcli, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    result = subprocess.run([sys.executable, "-c", code], env=env | given, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected
