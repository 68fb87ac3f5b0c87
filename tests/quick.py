"""Which cases of a parametrized test are quick."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but the quick ones are marked slow."""
    chosen = list(quick)
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]
