"""The kernels on processors that this machine does not have: compiled for them, and run natively or by an emulator."""

import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagedcli.native.prebuilt import SOURCE_DIR, TARGETS
from pagedcli.native.processor import processor_flags

ARM_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
pytestmark = pytest.mark.slow


def check(compiler: str | list[str], flags: list[str], tmp_path: Path, *emulator: str) -> str:
    """Runs kernel_check.cpp, built with these flags. Returns what it printed."""
    sources = [Path(__file__).with_name("kernel_check.cpp"), *sorted(SOURCE_DIR.glob("*.cpp"))]
    common = ["-std=c++17", "-O2", "-pthread", "-fno-math-errno", "-w", f"-I{SOURCE_DIR}"]
    program = tmp_path / "check"
    command = [compiler] if isinstance(compiler, str) else compiler
    subprocess.run([*command, *common, *flags, *map(str, sources), "-o", str(program)], check=True, timeout=600)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.skipif(shutil.which(ARM_COMPILER) is None, reason=f"no {ARM_COMPILER} here")
@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here (package qemu-user)")
@pytest.mark.parametrize("target", ["armv8-a", "armv8.2-a+dotprod", "armv8.6-a+bf16+i8mm"])
def test_arm_computes_what_plain_loops_compute(target, tmp_path):
    printed = check(ARM_COMPILER, [f"-march={target}", "-static"], tmp_path, EMULATOR, "-cpu", "max")
    assert ("bf16 path 1" in printed) == ("bf16" in target), printed


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86-64 processor")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        (["-march=x86-64"], "sse2"),
        (["-march=haswell"], "avx2"),
        (["-march=haswell", "-mavxvnni"], "avx_vnni"),
        (["-march=skylake-avx512"], "avx512bw"),  # no VNNI, no bf16
        (["-march=skylake-avx512", "-DEMULATE_TILES"], "avx512bw"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_older_x86_computes_what_plain_loops_compute(flags, needs, tmp_path):
    if needs not in processor_flags():
        pytest.skip(f"this processor has no {needs}")
    check("g++", flags, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed")
@pytest.mark.parametrize("target", [each for each in TARGETS if each.system == "linux"], ids=lambda each: each.name)
def test_every_installed_library_computes_what_plain_loops_compute(target, tmp_path):
    """The compiler and flags of the wheels."""
    emulator = []
    if target.machine != platform.machine():
        if shutil.which(f"qemu-{target.machine}") is None:
            pytest.skip(f"no qemu-{target.machine} here (package qemu-user)")
        emulator = [f"qemu-{target.machine}", "-cpu", "max"]
    elif missing := set(target.needs) - processor_flags():
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    flags = ["-target", f"{target.machine}-linux-musl", f"-mcpu={target.cpu}", "-static"]
    check([sys.executable, "-P", "-m", "ziglang", "c++"], flags, tmp_path, *emulator)
