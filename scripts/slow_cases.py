"""Choose the tests that `make test` leaves out: python scripts/slow_cases.py [--seconds 0.2] [MEASURED]

Runs the quick tests with two workers, measures the processor time of each (its processes included), and writes
tests/slow_cases.txt: of each parametrized test all cases that take --seconds or more, but its cheapest one (of those in
Triton's interpreter, which show what no processor runs, six times as long), which `make test-all` runs, and all tests
without parameters that take seven times as long, except those of the core, which CI runs by `make test-long`. MEASURED,
a file of an earlier run: nothing is run. What is on the list stays on it.
"""

import argparse
import functools
import os
import resource
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONG = 7  # times --seconds
LIST = ROOT / "tests" / "slow_cases.txt"
MEASURED = "PAGEDCLI_MEASURED_CASES"  # where a worker writes


def processor_s() -> float:
    """Of this process and its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before_s = processor_s()
    result = yield
    if item.get_closest_marker("slow") is None:
        with open(os.environ[MEASURED], "a") as file:
            file.write(f"{processor_s() - before_s:.3f}\t{item.nodeid}\n")
    return result


def chosen(lines: list[str], least_s: float) -> set[str]:
    """The cases that are slow while another one of the same test is not, or less so, and the tests that are long."""
    longest: dict[str, float] = {}  # what is skipped here may run in the interpreter's process
    for seconds, name in (line.split("\t") for line in lines):
        longest[name] = max(float(seconds), longest.get(name, 0.0))
    cases = defaultdict(list)
    for name, seconds in longest.items():
        cases[name.partition("[")[0]].append((seconds, name))
    slow = {
        name
        for test, each in cases.items()
        for seconds, name in sorted(each)[1:]
        if seconds >= least_s * (6 if is_interpreted(test.partition("::")[0]) else 1)
    }
    long = {test for test, each in cases.items() if each[0][1] == test and each[0][0] >= LONG * least_s}
    return slow | {
        test for test in long if not is_interpreted(test.partition("::")[0]) and not test.startswith("tests/core/")
    }


@functools.cache
def is_interpreted(file: str) -> bool:
    """Whether tests of a file run in Triton's interpreter."""
    text = (ROOT / file).read_text()
    return file.endswith("_conformance.py") or "@interpreted" in text or "run_interpreted(" in text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=0.2)
    arguments = parser.parse_args()
    measured = arguments.measured or ROOT / "build" / "measured_cases.txt"
    if arguments.measured is None:
        measured.parent.mkdir(exist_ok=True)
        measured.unlink(missing_ok=True)
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        marks = "not slow and not machine and not tools"
        command = [sys.executable, "-m", "pytest", "-p", "slow_cases", "-n", "2", "--dist", "worksteal", "-m", marks]
        subprocess.run(command, cwd=ROOT, env={**os.environ, MEASURED: str(measured), "PYTHONPATH": paths}, check=False)
    found = chosen(measured.read_text().splitlines(), arguments.seconds)
    kept = set(LIST.read_text().splitlines()) if LIST.exists() else set()
    LIST.write_text("".join(f"{name}\n" for name in sorted(found | kept)))
    print(f"{len(found)} cases, {len(found - kept)} of them new, in {LIST.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
