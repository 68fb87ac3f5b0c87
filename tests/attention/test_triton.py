"""The Triton kernels without a GPU: right through the interpreter, and compiled for two GPUs without waste.

The interpreter must be chosen before triton is imported, so the conformance test runs in a process of its own.
"""

import contextlib
import os
import re
from pathlib import Path

import pytest
import torch
from interpreter import run_interpreted
from triton_compile import NAMES, SHARED_LIMIT, Compiled, kernel_constants

pytest.importorskip("triton")

TESTS = Path(__file__).parent


@pytest.mark.long
def test_conformance_through_the_interpreter():
    others = "x512 or 16x1x16 or 32x1x1 or 48x1x3 or negative or inside"
    chosen = f"triton and (not f16 or 16x2x2x8) and not (long_sequence and (300 or shape0)) and not ({others})"
    run_interpreted("-m", "not slow", "-k", chosen, TESTS / "test_attention_conformance.py", at_least=15)


@pytest.mark.slow
def test_all_of_conformance_through_the_interpreter():
    run_interpreted("-k", "triton", TESTS / "test_attention_conformance.py", at_least=30)


CASES = [(torch.bfloat16, 64, 2, 16), (torch.bfloat16, 128, 2, 16), (torch.bfloat16, 128, 8, 256)]
CASES += [(torch.bfloat16, 256, 4, 16), (torch.float32, 128, 2, 16)]
SLOW_CASES = [
    (dtype, head_dim, group, block_size)
    for dtype in NAMES
    for head_dim in (8, 32, 64, 80, 96, 128, 256, 512)
    for group in (1, 2, 5, 16)
    for block_size in (16, 48, 256)
    if (dtype, head_dim, group, block_size) not in CASES
]


def compile_kernels(dtype, head_dim, group, block_size, capability, tmp_path, **options):
    from pagedcli.attention import triton_kernels as kernels
    from pagedcli.attention import triton_paged as paged

    decode, prefill, types, constants = kernel_constants(dtype, head_dim, group, block_size, capability, **options)
    decode_types = {
        **types,
        **dict.fromkeys(("partial_ptr", "partial_stat_ptr"), "*fp32"),
        **dict.fromkeys(("first_part_ptr", "item_split_ptr", "num_items_ptr"), "*i32"),
    }
    decode_constants = {
        **constants,
        "ROWS": max(paged.MIN_ROWS, 1 << (group - 1).bit_length()),
        "SPLIT": paged.SPLIT,
        "PAGES": paged.pages_per_split(block_size),
        "BLOCK_N": decode.block_n,
        "STAGES": decode.num_stages,
    }
    warps = paged.decode_warps(decode, decode_constants["ROWS"], constants["BLOCK_D"])
    prefill_constants = {
        **constants,
        "BLOCK_M": max(prefill.block_m, 1 << (group - 1).bit_length()),
        "TOKENS": prefill.block_m // group,
        "BLOCK_N": prefill.block_n,
        "STAGES": prefill.num_stages,
    }
    return (
        Compiled(kernels.decode_kernel, decode_types, decode_constants, capability, warps, tmp_path),
        Compiled(
            kernels.prefill_kernel,
            {**types, "item_token_ptr": "*i32"},
            prefill_constants,
            capability,
            prefill.num_warps,
            tmp_path,
        ),
    )


def check_kernels(dtype, head_dim, group, block_size, capability, tmp_path, *, windowed=False):
    decode, prefill = compile_kernels(dtype, head_dim, group, block_size, capability, tmp_path, windowed=windowed)
    for kernel in (decode, prefill):
        # ptxas spills a few values of some float32 kernels and of heads of 8, which only toys have, although two
        # thirds of the registers are left
        spared = 96 if head_dim < 32 else 16 if dtype == torch.float32 else 0
        assert kernel.spilled_bytes <= spared, f"{kernel.n_regs} registers"
        assert kernel.shared_bytes <= SHARED_LIMIT[capability]
    # Decode lives from loads in flight: programs must fit a multiprocessor side by side, K and V must come by wide
    # asynchronous copies, and no table look-up may be among them.
    programs = 2 if capability == 80 or head_dim > 128 else 3
    if dtype != torch.float32:
        assert programs * (decode.shared_bytes + 1024) <= SHARED_LIMIT[capability] + 1024
        assert programs * -(-decode.n_regs // 8) * 8 * 128 <= 65536
    assert decode.copy_widths()
    assert set(decode.copy_widths()) == {16}
    # Prefill looks up its pages one tile ahead: no look-up among the copies, and all stages hold tiles of K and V.
    assert set(prefill.copy_widths()) == {16} or head_dim < 64  # a small tile has less than 16 bytes per thread
    assert prefill.rings()
    assert dtype == torch.float32 or min(prefill.rings()) >= 2


@pytest.mark.quick("80-case0")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("capability", "case"),
    [
        *((80, CASES[1]), (90, CASES[3])),
        *(pytest.param(other, case, marks=pytest.mark.slow) for other in (80, 90) for case in CASES),
    ],
)
def test_kernels_compile_without_spills(case, capability, tmp_path):
    dtype, head_dim, group, block_size = case
    check_kernels(dtype, head_dim, group, block_size, capability, tmp_path)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_with_a_window_compile_without_spills(capability, tmp_path):
    check_kernels(torch.bfloat16, 256, 2, 16, capability, tmp_path, windowed=True)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dtype", "head_dim", "group", "block_size"), SLOW_CASES)
def test_every_kernel_compiles_without_spills(dtype, head_dim, group, block_size, capability, tmp_path):
    check_kernels(dtype, head_dim, group, block_size, capability, tmp_path)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "sizes",
    [(576, 512, 16), *(pytest.param(each, marks=pytest.mark.slow) for each in [(576, 512, 20), (288, 256, 40)])],
)
@pytest.mark.parametrize(
    "capability", [*(pytest.param(each, marks=pytest.mark.slow) for each in (80, 86, 89, 100)), 90]
)
def test_kernels_of_latents_compile_within_the_limits(capability, sizes, tmp_path):
    head_dim, value_dim, group = sizes
    kernels = compile_kernels(torch.bfloat16, head_dim, group, 16, capability, tmp_path, value_dim=value_dim)
    for name, kernel in zip(("decode", "prefill"), kernels, strict=True):
        print(name, capability, sizes, kernel.shared_bytes, kernel.spilled_bytes, kernel.n_regs)
        assert kernel.shared_bytes <= SHARED_LIMIT[capability], name
        assert kernel.spilled_bytes <= (24 if name == "prefill" else 0), name  # a few values of 20 heads


@pytest.mark.quick("80")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", [80, 90])
def test_store_and_combine_compile(capability, tmp_path):
    from pagedcli.attention import triton_kernels as kernels

    data = dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16")
    types = {
        **data,
        "slots_ptr": "*i32",
        "k_stride": "i32",
        "v_stride": "i32",
        "k_inverse": "fp32",
        "v_inverse": "fp32",
    }
    constants = {"G": 8, "S": 16, "D": 128, "BLOCK_STRIDE": 2**14, "BLOCK_G": 8, "BLOCK_D": 128, "FP8": False}
    store = Compiled(kernels.store_kvcache_kernel, types, constants, capability, 4, tmp_path)
    types = {"partial_ptr": "*fp32", "partial_stat_ptr": "*fp32", "out_ptr": "*bf16", "sinks_ptr": "*fp32"}
    types |= dict.fromkeys(("first_part_ptr", "cu_q_ptr", "num_tokens_ptr"), "*i32") | {"window": "i32"}
    constants = {"H": 16, "G": 8, "DV": 128, "ROWS": 16, "SPLIT": 256, "BLOCK_D": 128, "WINDOWED": True, "SINKS": True}
    combine = Compiled(kernels.combine_kernel, types, constants, capability, 4, tmp_path)
    assert store.spilled_bytes == combine.spilled_bytes == 0
    assert re.search(r"st\.global\.v4", store.ptx), "K and V are stored 16 bytes at a time"


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
    from pagedcli.attention import triton_paged as paged
    from pagedcli.attention.base import AttentionSpec
    from pagedcli.errors import BackendError

    spec = AttentionSpec(torch.device("cuda", 0), dtype, 16, *heads, capability=(8, 6))
    with (
        pytest.raises(BackendError, match=f"{heads[0] // heads[1]} query heads")
        if refused
        else contextlib.nullcontext()
    ):
        paged.check(spec)


@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("totals", [[600, 20, 300], [1], [256, 257], [1, 512, 1, 511, 2000]])
def test_the_work_list_of_the_device_is_that_of_the_host(totals, window, monkeypatch):
    """A captured graph makes its list on the device, for any lengths up to max_total."""
    from attention_cases import make_batch

    from pagedcli.attention import triton_paged as paged
    from pagedcli.attention.base import AttentionSpec

    backend = paged.TritonAttention(AttentionSpec(torch.device("cpu"), torch.float32, 16, 4, 2, 64))
    table = torch.zeros(len(totals), 200, dtype=torch.int32)
    batch = make_batch([(total, 1) for total in totals], table, [0] * len(totals), "cpu")
    batch.max_total, batch.window = 4096, window  # what a graph is captured for
    splits = [range(max(0, total - (window or total)) // paged.SPLIT, -(-total // paged.SPLIT)) for total in totals]
    backend.prepare(batch)
    device = batch.work
    most_items = sum(-(-total // paged.SPLIT) for total in totals)
    monkeypatch.setattr(paged, "DEVICE_LIST_ITEMS", most_items)
    backend.prepare(batch)
    assert batch.work.capacity == min(device.capacity, most_items)  # bounded by the sum, not by the longest
    assert batch.work.item_seq[: batch.work.num_items].tolist() == device.item_seq[: device.num_items].tolist()
    monkeypatch.setattr(paged, "DEVICE_LIST_ITEMS", 0)
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


@pytest.mark.parametrize("block_size", [16, 32, 48, 80, 128, 240, 256, 272, 512])
def test_pages_per_split_always_suffices(block_size):
    from pagedcli.attention.triton_paged import SPLIT, pages_per_split

    touched = max((start + SPLIT - 1) // block_size - start // block_size + 1 for start in range(0, 64 * SPLIT, SPLIT))
    pages = pages_per_split(block_size)
    assert pages >= touched
    assert pages & (pages - 1) == 0, "tl.arange wants a power of two"
