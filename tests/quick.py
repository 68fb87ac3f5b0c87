"""Which cases of a parametrized test are quick."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but the quick ones are marked slow; a tuple has a value for each name."""
    chosen, slow = list(quick), pytest.mark.slow
    parts = ((case, case if isinstance(case, tuple) else (case,)) for case in cases)
    return [pytest.param(*part, marks=() if case in chosen else slow) for case, part in parts]
