"""The list of what `make test` leaves out names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "slow_cases.txt"


def test_every_case_is_of_a_test_that_is_there():
    names = LIST.read_text().splitlines()
    assert names == sorted(set(names))
    tests = {name.partition("[")[0] for name in names}
    assert len(tests) > 20
    for file, test in (name.removesuffix("::runTest").rsplit("::", 1) for name in tests):
        name = re.compile(rf"^ *(?:async )?def {test}\b|^{test} = ", re.M)  # a state machine has its test in a class
        assert name.search((ROOT / file.partition("::")[0]).read_text()), f"{file} has no {test}"
