"""The kernels' own tests in Triton's interpreter: the quick ones of all files in one process (one import of torch)."""

import re
from pathlib import Path

import pytest
from interpreter import plain, run_interpreted

pytest.importorskip("triton")
TESTS = Path(__file__).parents[1]
# Of each file at least so many tests pass, not slow and slow.
PASSES = {
    "attention/test_pretend_cuda.py": (9, 2),
    "layers/test_kernel_guard.py": (4, 0),
    "layers/test_triton_experts.py": (13, 4),
    "layers/test_triton_gguf.py": (11, 0),
    "layers/test_triton_layers.py": (40, 7),
    "layers/test_triton_recurrent.py": (5, 50),
    "layers/test_triton_sampling.py": (13, 25),
    "layers/test_triton_weights.py": (20, 0),
    "runner/test_decode_counts.py": (3, 0),
    "runner/test_no_waits.py": (14, 40),
    "runner/test_pretended_models.py": (1, 140),
}


WHOLE_ENGINES = {  # most of the time, and less of what is found
    "attention/test_pretend_cuda.py",
    "runner/test_decode_counts.py",
    "runner/test_no_waits.py",
    "runner/test_pretended_models.py",
}
KERNELS = PASSES.keys() - WHOLE_ENGINES


@plain
def test_quick_tests_of_kernels():
    passed = run_interpreted("-m", "not slow", *(TESTS / name for name in sorted(KERNELS)), at_least=100)
    assert too_few(passed, KERNELS) == {}


@plain
@pytest.mark.long
def test_quick_tests_of_whole_engines():
    passed = run_interpreted("-m", "not slow", *(TESTS / name for name in sorted(WHOLE_ENGINES)), at_least=25)
    assert too_few(passed, WHOLE_ENGINES) == {}


def too_few(passed, names):
    return {name: passed[name] for name in names if passed[name] < PASSES[name][0]}


@plain
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, slow) in PASSES.items() if slow])
def test_slow_tests(name):
    run_interpreted("-m", "slow", TESTS / name, at_least=PASSES[name][1])


def test_no_file_is_forgotten():
    """Files that start a process of their own are not in the list."""
    marked = {path for path in TESTS.glob("*/test_*.py") if re.search(r"^@interpreted$", path.read_text(), re.M)}
    own = {path for path in marked if "run_interpreted(__file__" in path.read_text()}
    assert {str(path.relative_to(TESTS)) for path in marked - own} == PASSES.keys()
