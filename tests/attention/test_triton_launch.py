"""Launches that skip triton's look-up are its own: the same compiled kernel, grid and arguments, through a driver that
is not there (tests/fake_driver.py)."""

from types import SimpleNamespace

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


H100 = SimpleNamespace(
    multi_processor_count=10, shared_memory_per_multiprocessor=228 * 1024, max_threads_per_multi_processor=2048
)
A100 = SimpleNamespace(shared_memory_per_multiprocessor=164 * 1024, max_threads_per_multi_processor=2048)
L4 = SimpleNamespace(shared_memory_per_multiprocessor=100 * 1024, max_threads_per_multi_processor=1536)


@pytest.mark.parametrize(
    ("card", "registers", "shared", "warps", "expected"),
    [
        (H100, 151, 71680, 4, 3),
        (H100, 198, 74752, 4, 2),  # heads of 256
        (A100, 152, 71680, 4, 2),
        (L4, 118, 71680, 4, 1),
        (L4, 16, 0, 16, 3),
        (H100, 255, 2**18, 8, 1),
    ],
)
def test_programs_side_by_side_are_those_that_registers_shared_memory_and_threads_hold(
    card, registers, shared, warps, expected
):
    from pagedcli.attention.triton_launch import programs_per_processor

    compiled = SimpleNamespace(n_regs=registers, metadata=SimpleNamespace(shared=shared, num_warps=warps))
    assert programs_per_processor(compiled, card) == expected


@plain
def test_decoding_is_shared_by_the_programs_that_run_side_by_side(monkeypatch):
    """More would wait until these have ended, and then run alone."""
    from attention_cases import make_batch
    from fake_driver import FakeDriver

    from pagedcli.attention.base import AttentionSpec
    from pagedcli.attention.layer import AttentionLayer
    from pagedcli.attention.triton_paged import TritonAttention

    driver = FakeDriver(registers=198).install(monkeypatch)
    backend = TritonAttention(AttentionSpec(torch.device("cpu"), torch.bfloat16, 16, 2, 1, 16))
    backend._properties = H100
    layer, batch = AttentionLayer(scale=0.1), make_batch([(40, 1)], torch.zeros(1, 3, dtype=torch.int32), [-1], "cpu")
    kv = tuple(torch.zeros(backend.kv_shape(3, 16, 1, 16), dtype=torch.bfloat16) for _ in "kv")
    for _ in range(2):
        backend.attend(torch.zeros(1, 2, 16, dtype=torch.bfloat16), kv, batch, layer)
    assert [grid[0] for _, grid, _ in driver.launches] == [30, 20]
