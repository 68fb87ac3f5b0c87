"""Tests in Triton's interpreter, which must be chosen before triton is imported: they run in a process of their own."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")
plain = pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")


def noise(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def run_interpreted(*arguments, at_least, **variables):
    """Run tests there, by pytest's arguments and environment variables: all pass, and so many at least.

    Returns the tests passed by the last two parts of their file's path."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rp", *map(str, arguments)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    told = "\n".join(line for line in done.stdout.splitlines() if not line.startswith("PASSED"))
    assert done.returncode == 0, told[-8000:]
    passed = Counter("/".join(Path(file).parts[-2:]) for file in re.findall(r"^PASSED (.+?)::", done.stdout, re.M))
    assert passed.total() >= at_least, told[-2000:]
    return passed
