"""The Triton kernels of layers with a state, without a GPU: equal to their torch twins through the interpreter."""

import itertools

import pytest
import torch
from interpreter import interpreted, noise

from pagedcli.layers.recurrent import StateStep
from pagedcli.models import recurrent_blocks
from pagedcli.models.blocks import ForwardStep
from pagedcli.models.mixers.recurrent import GatedDelta, KimiDelta, Mamba2, ShortConv
from pagedcli.models.recurrent_blocks import BODIES

pytest.importorskip("triton")
CPU = torch.device("cpu")
WIDTH, NUM_SLOTS = 24, 6
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
DELTA = {"num_key_heads": 2, "num_heads": 4, "key_dim": 16, "value_dim": 24, "kernel": 4}
MAMBA = {
    "num_heads": 4, "value_dim": 16, "num_key_heads": 2, "key_dim": 24, "kernel": 4, "conv_bias": True,
    "proj_bias": False, "limits": (0.01, 3.0), "norm_group": 32,
}  # fmt: skip
SHAPES = {
    "gated delta": GatedDelta(**DELTA),
    "gated delta, interleaved": GatedDelta(**DELTA, interleaved=True),
    "gated delta, tiled": GatedDelta(**DELTA, tiled=True),
    "gated delta, wide": GatedDelta(**{**DELTA, "num_heads": 2, "value_dim": 40, "kernel": 3}),
    "gated delta, small": GatedDelta(num_key_heads=1, num_heads=2, key_dim=8, value_dim=12, kernel=2),
    "kimi delta": KimiDelta(num_heads=3, num_key_heads=3, key_dim=24, value_dim=24, kernel=4),
    "kimi delta, small": KimiDelta(num_heads=2, num_key_heads=2, key_dim=8, value_dim=8, kernel=3),
    "mamba": Mamba2(**MAMBA),
    "mamba, no bias": Mamba2(
        **{**MAMBA, "num_heads": 2, "num_key_heads": 1, "conv_bias": False, "norm_group": 32, "kernel": 2}
    ),
    "short convolution": ShortConv(channels=WIDTH, kernel=3, bias=False),
    "short convolution, bias": ShortConv(channels=WIDTH, kernel=3, bias=True),
}
# of each sequence: tokens before the step, new ones, slot that is read (-1: none) and written
STEPS = {
    "decode": [(5, 1, 0, 0), (63, 1, 2, 1), (0, 1, -1, 3), (200, 1, 4, 4)],
    "one": [(5, 1, 0, 3)],
    "prompts": [(0, 40, -1, 0), (30, 70, 1, 1), (0, 2, -1, 3), (64, 3, 2, 4)],
    "mixed": [(9, 1, 0, 0), (0, 33, -1, 1), (31, 1, 3, 2), (7, 26, 4, 4), (0, 1, -1, 5)],
}


class Parts:
    """The parts of one layer, by the ends of their keys."""

    eps, device = 1e-6, CPU

    def __init__(self, **parts):
        self.parts = parts

    def small(self, key):
        return self.parts.get(key.removeprefix("layer."))

    linear = plain_linear = needed = small

    def conv(self, key):
        return self.parts["conv"]

    def decay(self, key):
        return self.parts["decay"]


def body(shape, dtype):
    """A layer with random weights."""

    def linear(rows, columns, seed):
        weight = noise(rows, columns, dtype=dtype, seed=seed, scale=columns**-0.5)
        return lambda x: (x[:, None] * weight).sum(-1)  # each row alone

    parts = {"conv": noise(shape.kernel, shape.channels, seed=3, scale=0.5), "out": linear(WIDTH, shape.inner, 2)}
    if shape.bias if isinstance(shape, ShortConv) else isinstance(shape, Mamba2) and shape.conv_bias:
        parts["conv_bias"] = noise(shape.channels, seed=4)
    if isinstance(shape, ShortConv):
        parts["inner"] = linear(3 * WIDTH, WIDTH, 1)
    else:
        heads = shape.num_heads
        parts |= {"decay": -noise(heads, seed=5).exp(), "step_bias": noise(heads, seed=6)}
    if isinstance(shape, Mamba2):
        parts["inner"] = linear(shape.inner + shape.channels + heads, WIDTH, 1)
        parts |= {"skip": noise(heads, seed=8), "gated_norm": noise(shape.inner, dtype=dtype, seed=7)}
    if isinstance(shape, GatedDelta):
        parts |= {"inner": linear(shape.channels + shape.inner, WIDTH, 1), "gates": linear(2 * heads, WIDTH, 9)}
        parts["gated_norm"] = noise(shape.value_dim, dtype=dtype, seed=7)
    if isinstance(shape, KimiDelta):
        size, inner = shape.key_dim, shape.inner
        parts |= {"decay_down": linear(size, WIDTH, 10), "decay_up": linear(inner, size, 11)}
        parts |= {"shares_down": linear(size, WIDTH, 12), "shares_up": linear(inner, size, 13)}
        parts |= {"inner": linear(3 * inner, WIDTH, 1), "gates": linear(heads, WIDTH, 9)}
        parts |= {"step_bias": noise(inner, seed=6), "gated_norm": noise(size, dtype=dtype, seed=7)}
    return BODIES[type(shape)](Parts(**parts), shape, 0, "layer")


def pools_of(shape, dtype):
    """Of NUM_SLOTS slots and the spare one, full of noise."""
    return [
        noise(NUM_SLOTS + 1, *each.shape, dtype=dtype if each.dtype is None else torch.float32, seed=20 + i)
        for i, each in enumerate(shape.state)
    ]


def step_of(sequences, pools):
    counts = [new for _, new, _, _ in sequences]
    starts, totals = [0, *itertools.accumulate(counts)], [before + new for before, new, _, _ in sequences]
    reads, writes = ([each[place] for each in sequences] for place in (2, 3))
    numbers = (torch.tensor(each, dtype=torch.int32) for each in (reads, writes, starts, totals))
    step = StateStep(*numbers, max(counts), starts, totals)
    return ForwardStep(torch.zeros(starts[-1], dtype=torch.int64), [], step, [pools])


def run_layer(layer, x, sequences, pools, monkeypatch, *, fused):
    from pagedcli.layers import triton_recurrent

    monkeypatch.setattr(recurrent_blocks, "triton_kernels", lambda _: triton_recurrent if fused else None)
    return layer(x, step_of(sequences, pools))


def check_equality(name, sequences, monkeypatch, dtype=torch.float32):
    """Results and states of a step: those of the torch twin."""
    shape = SHAPES[name]
    layer, x = body(shape, dtype), noise(sum(new for _, new, _, _ in sequences), WIDTH, dtype=dtype, seed=30)
    pools, ours = pools_of(shape, dtype), pools_of(shape, dtype)
    expected = run_layer(layer, x, sequences, pools, monkeypatch, fused=False)
    result = run_layer(layer, x, sequences, ours, monkeypatch, fused=True)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(result, expected, **tolerance)
    for mine, theirs in zip(ours, pools, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


@interpreted
@pytest.mark.parametrize("name", ["gated delta, small", "kimi delta, small", "mamba, no bias", "short convolution"])
def test_a_layer_equals_its_twin(name, monkeypatch):
    check_equality(name, [(5, 1, 0, 0), (14, 4, 1, 2)], monkeypatch)


IN_FLOAT16 = ("gated delta, interleaved", "kimi delta", "mamba", "short convolution")


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        *((name, kind, torch.float32) for name in SHAPES for kind in STEPS),
        *((name, "mixed", torch.float16) for name in IN_FLOAT16),
    ],
)
def test_every_layer_equals_its_twin(name, kind, dtype, monkeypatch):
    check_equality(name, STEPS[kind], monkeypatch, dtype)


def run_in_steps(name, steps, monkeypatch):
    """The results of the last sequence of each step, joined, and its last state. Each: tokens before, new, company."""
    shape = SHAPES[name]
    layer, pools = body(shape, torch.float32), pools_of(shape, torch.float32)
    x, other, results = noise(50, WIDTH, seed=30), noise(9, WIDTH, seed=31), []
    for before, new, company in steps:
        others = [(20, 9, 1, 2)] if company else []
        rows = torch.cat([other[: 9 * len(others)], x[before : before + new]])
        sequences = [*others, (before, new, 0 if before else -1, 0)]
        results.append(run_layer(layer, rows, sequences, pools, monkeypatch, fused=True)[-new:])
    return torch.cat(results), [pool[0] for pool in pools]


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated delta", "kimi delta", "mamba"])
def test_cuts_between_chunks_and_company_change_no_bit(name, monkeypatch):
    whole, states = run_in_steps(name, [(0, 36, False), (36, 1, False)], monkeypatch)
    parts, ends = run_in_steps(name, [(0, 16, False), (16, 20, True), (36, 1, True)], monkeypatch)
    assert torch.equal(whole, parts)
    assert all(map(torch.equal, states, ends))


@interpreted
def test_rows_of_padding_leave_all_slots_as_they_are(monkeypatch):
    for name in ("gated delta, small", "kimi delta, small", "mamba, no bias", "short convolution"):
        shape = SHAPES[name]
        pools, before = pools_of(shape, torch.float32), pools_of(shape, torch.float32)
        x, padding = noise(3, WIDTH, seed=30), (0, 1, -1, NUM_SLOTS)
        result = run_layer(
            body(shape, torch.float32), x, [(5, 1, 0, 3), padding, padding], pools, monkeypatch, fused=True
        )
        assert result.isfinite().all()
        for pool, old in zip(pools, before, strict=True):
            changed = (pool != old).flatten(1).any(1)
            assert changed.nonzero().flatten().tolist() == [3]


def check_prompt(layer, x, monkeypatch, atol, rtol):
    """A prompt of 40 tokens gives the results and the state of the torch twin."""
    pools = pools_of(layer.shape, torch.float32)
    ours = [pool.clone() for pool in pools]
    expected = run_layer(layer, x, [(0, 40, -1, 0)], pools, monkeypatch, fused=False)
    result = run_layer(layer, x, [(0, 40, -1, 0)], ours, monkeypatch, fused=True)
    torch.testing.assert_close(result, expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(ours[1], pools[1], atol=atol, rtol=rtol)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated delta", "kimi delta"])
def test_keys_that_are_all_alike_are_corrected_as_exactly(name, monkeypatch):
    """The inverse of a chunk then has small entries, where powers of its matrix have huge ones."""
    layer = body(SHAPES[name], torch.float32)
    layer.decay = layer.decay * 1e-4
    check_prompt(layer, noise(1, WIDTH, seed=30).expand(40, -1).contiguous(), monkeypatch, 1e-5, 1e-4)


@interpreted
@pytest.mark.slow
def test_channels_that_forget_at_once_overflow_nowhere(monkeypatch):
    """Divided by what is kept within a chunk, e^-1000, keys would be infinite."""
    layer = body(SHAPES["kimi delta"], torch.float32)
    layer.decay[1], layer.step_bias[:24:2] = -100.0, -20.0
    check_prompt(layer, noise(40, WIDTH, seed=30), monkeypatch, 2e-5, 2e-5)
