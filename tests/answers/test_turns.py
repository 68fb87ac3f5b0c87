"""Runs in turns: what planted times say for sure, whatever the noise."""

import random
from dataclasses import replace

import pytest

from pagedcli.answers.turns import Turns, in_turns, pass_s


def machine(saving, *, seed, noise=0.02, load=None):
    """A machine on which a pass takes a second, or less by `saving` with the other settings. `load`: how long another
    program takes a core and how long it leaves it, in seconds; a pass takes twice as long meanwhile."""
    draw, now_s = random.Random(seed), 0.0

    def serve(which, number):
        nonlocal now_s
        seconds = (1 - saving * which) * draw.lognormvariate(0, noise)
        if load is not None and now_s % sum(load) < load[0]:
            seconds *= 2
        now_s += seconds
        return seconds

    return serve


def test_a_clear_saving_is_sure_after_few_passes_and_no_saving_never_is():
    found = in_turns(machine(0.2, seed=1), 600)
    assert found.is_sure
    assert len(found.before_s) == 8
    low, high = found.interval
    assert 0.1 < low < 0.2 < high < 0.3
    assert found.text == f"between {100 * low:.1f} % and {100 * high:.1f} % faster"
    slower = in_turns(machine(-0.2, seed=1), 600)
    assert not slower.is_sure
    assert slower.is_decided
    assert slower.text.endswith(" slower")


def test_what_is_not_decided_is_measured_until_the_time_is_over():
    found = in_turns(machine(0.01, seed=2, noise=0.3), 100)
    assert not found.is_decided
    assert 80 < sum(found.before_s) + sum(found.after_s) < 100
    low, high = found.interval
    assert found.text == f"not certain: between {100 * high:.1f} % faster and {-100 * low:.1f} % slower"
    short = in_turns(machine(0.5, seed=2), 10)
    assert not short.is_sure, "four pairs say nothing, however far apart they are"
    assert short.text == "not certain: too few passes"
    assert len(in_turns(lambda which, number: pass_s(60), 60).before_s) >= 8


@pytest.mark.parametrize("load", [None, (0.7, 1.9), (5.0, 3.0), (40.0, 40.0)])
@pytest.mark.parametrize("saving", [-0.1, 0.0, 0.1])
def test_sure_advice_is_right_in_19_of_20_measurements_with_another_program_on_and_off(saving, load):
    """What is not faster is called so in at most one of 20 measurements, what is slower never."""
    found = [in_turns(machine(saving, seed=seed, load=load), 60) for seed in range(100)]
    num_sure = sum(each.is_sure for each in found)
    if saving > 0 and load in (None, (40.0, 40.0)):
        assert num_sure >= 60
    elif saving <= 0:
        assert num_sure <= (5 if saving == 0 else 0)
    holds = sum(low <= saving <= high for low, high in (each.interval for each in found))
    assert holds >= 95


def test_a_single_pass_that_another_program_slowed_changes_no_interval():
    calm = Turns((1.0,) * 12, (0.8,) * 12)
    burst = replace(calm, after_s=(*calm.after_s[:11], 9.0))
    assert calm.interval == pytest.approx((0.2, 0.2)) == burst.interval
    assert burst.is_sure
