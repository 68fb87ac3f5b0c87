"""The list of cases that `make test` leaves out names tests that are there, and each of them has a quick case."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "slow_cases.txt"


def test_every_case_is_of_a_parametrized_test_that_is_there():
    names = LIST.read_text().splitlines()
    assert names == sorted(set(names))
    tests = {name.partition("[")[0] for name in names if name.endswith("]")}
    assert len(tests) > 20
    for file, test in (name.rsplit("::", 1) for name in tests):
        assert re.search(rf"^ *def {test}\b", (ROOT / file).read_text(), re.M), f"{file} has no {test}"
