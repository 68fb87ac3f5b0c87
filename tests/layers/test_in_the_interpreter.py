"""The kernels' own tests in Triton's interpreter: the quick ones of all files in one process (one import of torch)."""

import re
from pathlib import Path

import pytest
from interpreter import plain, run_interpreted

pytest.importorskip("triton")
TESTS = Path(__file__).parents[1]
# most of the time, and less of what is found
WHOLE_ENGINES = {"attention/test_pretend_cuda.py", "runner/test_pretended_models.py"}
KERNELS = {"layers/test_kernel_guard.py"}
KERNELS |= {
    f"layers/test_triton_{name}.py" for name in ("experts", "layers", "recurrent", "sampling", "stream", "weights")
}

WITH_SLOW_TESTS = WHOLE_ENGINES | {
    f"layers/test_triton_{name}.py" for name in ("experts", "recurrent", "sampling", "stream")
}


@plain
@pytest.mark.parametrize(
    ("names", "at_least"),
    [(KERNELS, 90), pytest.param(WHOLE_ENGINES, 20, marks=pytest.mark.long)],
    ids=["kernels", "whole engines"],
)
def test_quick_tests(names, at_least):
    assert (
        run_interpreted("-m", "not slow", *(TESTS / name for name in sorted(names)), at_least=at_least).keys() == names
    )


@plain
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WITH_SLOW_TESTS))
def test_slow_tests(name):
    run_interpreted("-m", "slow", TESTS / name, at_least=1)


def test_no_file_is_forgotten():
    """Files that start a process of their own are not in the list."""
    marked = {path for path in TESTS.glob("*/test_*.py") if re.search(r"^@interpreted$", path.read_text(), re.M)}
    own = {path for path in marked if "run_interpreted(__file__" in path.read_text()}
    assert {str(path.relative_to(TESTS)) for path in marked - own} == KERNELS | WHOLE_ENGINES
