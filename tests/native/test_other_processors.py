"""The kernels on processors that this machine has not: cross-compiled, and run by an emulator."""

import shutil
import subprocess
from pathlib import Path

import pytest

from pagedcli.native.build import SOURCE_DIR

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER} here"),
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here (package qemu-user)"),
]


@pytest.mark.parametrize("target", ["armv8-a", "armv8.2-a+dotprod", "armv8.6-a+bf16+i8mm"])
def test_arm_computes_what_plain_loops_compute(target, tmp_path):
    sources = [Path(__file__).with_name("kernel_check.cpp"), *sorted(SOURCE_DIR.glob("*.cpp"))]
    flags = ["-std=c++17", "-O2", f"-march={target}", "-static", "-pthread", "-fno-math-errno", "-w", f"-I{SOURCE_DIR}"]
    program = tmp_path / "check"
    subprocess.run([COMPILER, *flags, *map(str, sources), "-o", str(program)], check=True, timeout=600)
    command = [EMULATOR, "-cpu", "max", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    assert ("bf16 path 1" in done.stdout) == ("bf16" in target), done.stdout
