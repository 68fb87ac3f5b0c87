"""The Triton kernels without a GPU: right through the interpreter, in launches that fit the card."""

import contextlib
from functools import partial
from pathlib import Path

import pytest
import torch
from attention_cases import make_batch
from interpreter import plain, run_interpreted

from pagedcli.attention.base import AttentionSpec
from pagedcli.errors import BackendError

pytest.importorskip("triton")
import triton
import triton.language as tl

from pagedcli.attention import triton_paged as paged
from pagedcli.attention.triton_launch import Launcher

TESTS = Path(__file__).parent


@pytest.mark.long
def test_conformance_through_the_interpreter():
    others = "x512 or 16x1x16 or 32x1x1 or 48x1x3 or negative or inside"
    chosen = f"triton and (not f16 or 16x2x2x8) and not (long_sequence and (300 or shape0)) and not ({others})"
    run_interpreted("-m", "not slow", "-k", chosen, TESTS / "test_attention_conformance.py", at_least=15)


@pytest.mark.slow
def test_all_of_conformance_through_the_interpreter():
    run_interpreted("-k", "triton", TESTS / "test_attention_conformance.py", at_least=30)


@pytest.mark.parametrize(
    ("dtype", "heads", "refused"),
    [
        (torch.bfloat16, (64, 1, 128), False),
        (torch.bfloat16, (64, 1, 256), True),
        (torch.float32, (64, 1, 128), True),
        (torch.float32, (64, 4, 512), False),
        (torch.bfloat16, (64, 2, 512), True),
    ],
)
def test_groups_that_no_small_card_has_shared_memory_for_are_refused(dtype, heads, refused):
    """On sm_86 they would compile and then fail at their first launch."""
    spec = AttentionSpec(torch.device("cuda", 0), dtype, 16, *heads, capability=(8, 6))
    with (
        pytest.raises(BackendError, match=f"{heads[0] // heads[1]} query heads")
        if refused
        else contextlib.nullcontext()
    ):
        paged.check(spec)


@pytest.fixture
def most_items_of_the_device(monkeypatch):
    """Lets lists of so many items be made on the device."""
    return partial(monkeypatch.setattr, paged, "DEVICE_LIST_ITEMS")


@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("totals", [[600, 20, 300], [1], [256, 257], [1, 512, 1, 511, 2000]])
def test_the_work_list_of_the_device_is_that_of_the_host(totals, window, most_items_of_the_device):
    """A captured graph makes its list on the device, for any lengths up to max_total."""
    backend = paged.TritonAttention(AttentionSpec(torch.device("cpu"), torch.float32, 16, 4, 2, 64))
    table = torch.zeros(len(totals), 200, dtype=torch.int32)
    batch = make_batch([(total, 1) for total in totals], table, [0] * len(totals), "cpu")
    batch.max_total, batch.window = 4096, window  # what a graph is captured for
    splits = [range(max(0, total - (window or total)) // paged.SPLIT, -(-total // paged.SPLIT)) for total in totals]
    backend.prepare(batch)
    device = batch.work
    most_items = sum(-(-total // paged.SPLIT) for total in totals)
    most_items_of_the_device(most_items)
    backend.prepare(batch)
    assert batch.work.capacity == min(device.capacity, most_items)  # bounded by the sum, not by the longest
    assert batch.work.item_seq[: batch.work.num_items].tolist() == device.item_seq[: device.num_items].tolist()
    most_items_of_the_device(0)
    backend.prepare(batch)
    host, num_items = batch.work, batch.work.num_items.item()
    assert num_items == sum(map(len, splits))
    assert device.num_items.item() == num_items
    for work in (device, host):  # each split of a sequence that has several gets a place of its own
        starts = zip(work.first_part.tolist(), splits, strict=True)
        places = [first + place for first, of_seq in starts for place in range(len(of_seq)) if len(of_seq) > 1]
        assert len(set(places)) == len(places)
        assert all(0 <= place < work.num_parts for place in places)
    assert device.item_seq[:num_items].tolist() == host.item_seq[:num_items].tolist()
    assert device.item_split[:num_items].tolist() == host.item_split[:num_items].tolist()
    assert device.item_split[:num_items].tolist() == [split for of_seq in splits for split in of_seq]
    assert device.capacity == len(totals) * {None: 16, 1: 1, 300: 3}[window]


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["other_ptr"])
def some_kernel(x_ptr, other_ptr, stride, count, factor, BLOCK: tl.constexpr, ADD: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place * stride, mask=place < count) * factor
    if ADD:
        x += tl.load(other_ptr + place)
    tl.store(x_ptr + place * stride, x)


@plain
def test_known_launches_have_the_kernel_and_the_arguments_of_tritons_own(monkeypatch):
    """Through a driver that is not there: launches that skip triton's look-up are its own."""
    from fake_driver import FakeDriver

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
