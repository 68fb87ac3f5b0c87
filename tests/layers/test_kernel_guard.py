"""No kernel accesses memory out of bounds, and no two programs of a launch race: the kernels' own tests once more under
kernel_guard, which planted faults must trip."""

from pathlib import Path

import pytest
import torch
from interpreter import interpreted, plain, run_interpreted

pytest.importorskip("triton")
TESTS = Path(__file__).parents[1]
# of kernels against their twins: ragged batches, windows, padded rows, odd sizes
GUARDED = {
    "attention/test_attention_conformance.py": ("-m", "not slow", "-k", "triton"),
    "layers/test_triton_layers.py": ("-m", "not slow"),
    "layers/test_triton_experts.py": ("-m", "not slow"),
    "layers/test_triton_weights.py": ("-m", "not slow"),
    "layers/test_triton_sampling.py": ("-m", "not slow", "-k", "not hundred_thousand"),
    "layers/test_triton_recurrent.py": ("-k", "twin"),
}


@plain
@pytest.mark.slow
@pytest.mark.parametrize("name", GUARDED)
def test_no_kernel_leaves_its_tensors_or_races(name):
    run_interpreted(*GUARDED[name], TESTS / name, at_least=8, PAGEDCLI_KERNEL_GUARD="1")


@interpreted
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("none", None),
        ("no mask", "out of bounds"),
        ("one before", "out of bounds"),
        ("same output", "stored by two programs"),
        ("neighbour's input", "loaded by one program and stored by another"),
    ],
)
def test_a_planted_fault_is_found(fault, found, monkeypatch):
    import triton
    import triton.language as tl
    from kernel_guard import Guard

    @triton.jit
    def add_one(x_ptr, out_ptr, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        if FAULT == "no mask":
            mask = at < n + 1
        if FAULT == "one before":
            x = tl.load(x_ptr + at - 1, mask=mask)
        else:
            x = tl.load(x_ptr + at, mask=mask)
        if FAULT == "same output":
            tl.store(out_ptr + at % BLOCK, x + 1, mask=mask)
        elif FAULT == "neighbour's input":
            tl.store(x_ptr + (at + BLOCK) % n, x + 1, mask=mask)
        else:
            tl.store(out_ptr + at, x + 1, mask=mask)

    guard = Guard().install(monkeypatch)
    numbers = torch.arange(24.0)
    x, out = numbers[1:13], torch.zeros(12)  # with room around x that is not the kernel's

    def launch():
        add_one[(4,)](x, out, x.shape[0], FAULT=fault, BLOCK=4)

    if found is None:
        launch()
        assert torch.equal(out, numbers[1:13] + 1)
    else:
        with pytest.raises(Exception, match=found):
            launch()
    assert guard.num_launches == 1
