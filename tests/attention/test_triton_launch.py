"""Launches that skip triton's look-up are its own: the same compiled kernel, grid and arguments, through a driver that
is not there (tests/fake_driver.py)."""

import pytest
import torch
from interpreter import plain

pytest.importorskip("triton")
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["other_ptr"])
def some_kernel(x_ptr, other_ptr, stride, count, factor, BLOCK: tl.constexpr, ADD: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place * stride, mask=place < count) * factor
    if ADD:
        x += tl.load(other_ptr + place)
    tl.store(x_ptr + place * stride, x)


@plain
def test_known_launches_have_the_kernel_and_the_arguments_of_tritons_own(monkeypatch):
    from fake_driver import FakeDriver

    from pagedcli.attention.triton_launch import Launcher

    driver, launch = FakeDriver().install(monkeypatch), Launcher()
    memory, other = torch.zeros(64), torch.zeros(64)
    all_constants = {"BLOCK": 16, "ADD": True}, {"BLOCK": 16, "ADD": False}
    for constants in all_constants:
        for x, stride, count in (
            (memory, 16, 16),
            (memory[1:], 16, 3),
            (memory, 1, 1),
            (memory, 6, 32),
            (memory, 16, 1),
        ):
            arguments = x, other[count % 2 :], stride, count, 0.5
            for _ in range(2):
                launch(some_kernel, (3, 1, 1), arguments, constants, num_warps=1)
            some_kernel[(3,)](*arguments, **constants, num_warps=1)
            ours, again, theirs = driver.launches
            assert ours == again == theirs
            driver.launches.clear()
    assert len(launch._known) == 2 * 4
