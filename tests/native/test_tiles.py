"""Kernels for tile registers (AMX), emulated in plain C++: right, invariant, in the layout of every other path."""

import ctypes
import subprocess
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from attention_cases import TOLERANCE, Case, run, worst_error
from conftest import forget_library, needs_compiler
from harness.engine import logits_of, transformers_logits
from model_zoo import tiny_model
from quantized_zoo import random_weight

from pagedcli.attention import cpu
from pagedcli.attention.base import AttentionSpec
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.native import NativeLibrary, build, load_library
from pagedcli.native.paths import Path, bf16_path, int8_path, path_notes

BF16 = torch.bfloat16
CPU = torch.device("cpu")
pytestmark = needs_compiler


@pytest.fixture(scope="module", autouse=True)
def emulated():
    """The library of this module's processes, with emulated tiles. Built once and kept, like the usual one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(build.EMULATE_TILES, "1")
        forget_library()
        yield load_library()
    forget_library()


@contextmanager
def avoiding(library: ctypes.CDLL, *paths: Path):
    """Pretend that this processor lacks these paths, in all threads."""
    for path in paths:
        library.native_avoid_path(ctypes.c_int64(path), 1)
    try:
        yield
    finally:
        for path in paths:
            library.native_avoid_path(ctypes.c_int64(path), 0)


def attention(case, library: NativeLibrary):
    spec = AttentionSpec(CPU, BF16, case.block_size, case.num_heads, case.num_kv_heads, case.head_dim)
    return run(cpu.CpuAttention(spec, library), case)


@pytest.mark.long
def test_emulated_tiles_are_the_path_of_both_types(emulated):
    assert (bf16_path(emulated.functions), int8_path(emulated.functions)) == (Path.BF16_TILES, Path.INT8_TILES)


def test_refused_permission_is_announced_and_leaves_the_usual_path(emulated):
    assert path_notes(emulated.functions) == ()
    with avoiding(emulated.functions, Path.BF16_TILES):
        assert bf16_path(emulated.functions) in (Path.BF16_DOT, Path.FMA)
        [note] = path_notes(emulated.functions)
        assert "refuses the tile registers" in note


# 32 tokens of V per product where blocks are a multiple of 32 or packed, else 16; 96 has an odd number of 32s
@pytest.mark.slow_cases("32-16-128")
@pytest.mark.parametrize(
    ("block_size", "group", "head_dim"), [(16, 2, 64), (32, 16, 128), (48, 5, 96), (3, 1, 32), (256, 3, 64)]
)
def test_attention_is_exact(emulated, block_size, group, head_dim):
    lengths = [(1, 1), (300, 1), (20, 20), (17, 1), (130, 5), (600, 40), (273, 33), (49, 2)]
    case = Case(lengths, block_size, 2 * group, 2, head_dim, BF16)
    tiles = attention(case, emulated)
    assert worst_error(tiles, case.expected()) < TOLERANCE[BF16]
    with avoiding(emulated.functions, Path.BF16_TILES):
        assert not torch.equal(attention(case, emulated), tiles), "sums in another order: both paths were really taken"


def test_head_size_that_does_not_fill_tiles_takes_the_usual_path(emulated):
    case = Case([(70, 70), (33, 1)], 16, 4, 2, 80, BF16)
    tiles = attention(case, emulated)
    with avoiding(emulated.functions, Path.BF16_TILES):
        assert torch.equal(attention(case, emulated), tiles)


@pytest.mark.parametrize("block_size", [16, 32])
def test_threads_and_chunks_never_change_a_bit_of_attention(emulated, block_size):
    results = []
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            for new in (70, 1, 7):
                results.append(attention(Case([(600, new)], block_size, 4, 2, 64, BF16), emulated)[-1])
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(results[0], result) for result in results)


# sums of V run over pairs of 16 tokens counted from position 0, wherever the blocks are cut and the window begins
@pytest.mark.parametrize("window", [None, 1, 13, 40, 100, 300])
def test_block_sizes_chunks_and_company_never_change_a_bit_of_attention(emulated, window):
    lengths = [(600, 70), (17, 17), (33, 1), (300, 7), (288, 1), (1, 1)]

    def results(block_size):
        case = Case(lengths, block_size, 4, 2, 64, BF16)
        case.layer = replace(case.layer, window=window)
        spec = AttentionSpec(CPU, BF16, block_size, 4, 2, 64)
        backend = cpu.CpuAttention(spec, emulated)
        crowd = run(backend, case)
        for new in (1, 9):
            alone = Case([(600, new)], block_size, 4, 2, 64, BF16)
            alone.q, alone.k, alone.v = (case.of_sequence(x, 0) for x in (case.q, case.k, case.v))
            alone.layer = case.layer
            assert torch.equal(run(backend, alone), crowd[70 - new : 70]), new
        return crowd

    expected = results(16)
    for block_size in (1, 3, 32, 48, 256):
        assert torch.equal(results(block_size), expected), block_size


def test_products_that_the_mask_hides_are_not_computed(emulated):
    case = Case([(512, 512)], 16, 2, 1, 64, BF16)
    counts = (ctypes.c_int64 * 4)()  # configurations, loads, stores and products since the last call
    emulated.functions.native_tile_counts(counts)
    attention(case, emulated)
    emulated.functions.native_tile_counts(counts)
    products = counts[3]
    # of 16 rows and 16 keys: 64 / 32 steps of scores; of 16 rows and 32 keys: 64 / 16 columns of values
    whole = 64 * 32 * 2 + 64 * 16 * 4
    assert products < 0.56 * whole, "half of all, and the ends of what some rows of a pass see"


# parts of 64 and of 256 query rows: the second is the end of a long context
@pytest.mark.parametrize("window", [None, 300])
def test_rows_that_share_a_reading_never_change_a_bit(emulated, window):
    def last(num_new):
        case = Case([(2100, num_new)], 32, 2, 1, 32, BF16)
        case.layer = replace(case.layer, window=window)
        return run(cpu.CpuAttention(AttentionSpec(CPU, BF16, 32, 2, 1, 32), emulated), case)[-5:]

    assert torch.equal(last(700), last(5))


def linear_inputs(tokens=100, rows=70, columns=352):
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(n, columns, generator=generator).to(BF16) for n in (tokens, rows)]


@pytest.mark.parametrize("gated", [False, True])
def test_linear_is_right_to_rounding(emulated, gated):
    x, weight = linear_inputs()
    exact = x.double() @ weight.double().T
    if gated:
        gate, up = exact.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
    ours = NativeLinear(emulated, weight, gated=gated)(x)
    torch.testing.assert_close(ours.double(), exact, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("path", [Path.BF16_TILES, None], ids=["tiles", "vectors"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_size_of_the_cache_changes_no_bit(emulated, quantization, path):
    x, weight = linear_inputs(tokens=300, columns=1024)
    linear = NativeLinear(emulated, weight, quantization=quantization)
    with avoiding(emulated.functions, *(() if path else (Path.BF16_TILES, Path.INT8_TILES))):
        results = []
        for num_bytes in (1 << 12, 1 << 20, 1 << 26, 0):  # as if each core had such an L2 cache; 0: its own
            emulated.functions.native_pretend_l2_bytes(ctypes.c_int64(num_bytes))
            results.append(linear(x))
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("columns", [64, 320, 1024])
@pytest.mark.parametrize("tokens", [1, 7, 20, 100])
def test_tiles_equal_the_vector_path_to_the_bit(emulated, tokens, columns, quantization):
    x, weight = linear_inputs(tokens, columns=columns)
    linear = NativeLinear(emulated, weight, quantization=quantization)
    tiles = linear(x)
    with avoiding(emulated.functions, Path.INT8_TILES):
        assert torch.equal(linear(x), tiles)


# groups of one block of 32 columns, of two, of four, and of five
@pytest.mark.parametrize("group_size", [32, 64, 128, 160])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [6, 20, 70])
def test_tiles_give_a_checkpoints_groups_the_bits_of_the_vector_path(emulated, tokens, bits, group_size):
    weight = random_weight(70, 480, bits=bits, group_size=group_size)
    linear = NativeLinear(emulated, weight, dtype=torch.float32)
    x = torch.randn(tokens, 480, generator=torch.Generator().manual_seed(tokens))
    tiles = linear(x)
    with avoiding(emulated.functions, Path.INT8_TILES):
        assert torch.equal(linear(x), tiles)


# Steps of more than 32 tokens keep activations in the order of tiles between layers, others row by row: 110 tokens,
# which end in the middle of 16, against chunks of 7. Odd numbers of tiles, norms after layers, gates, biases.
@pytest.mark.parametrize(
    ("family", "sizes", "quantization"),
    [
        ("qwen3", {"hidden_size": 96, "intermediate_size": 160}, None),
        ("qwen3", {"hidden_size": 64, "intermediate_size": 80}, None),
        ("olmo2", {"hidden_size": 64, "intermediate_size": 128}, "int8"),
        ("gemma3", {"hidden_size": 64, "intermediate_size": 192}, "int4"),
        ("qwen2", {"hidden_size": 128, "intermediate_size": 96}, "int8"),
        ("qwen3_5", {"hidden_size": 64}, None),
        ("qwen3-moe", {"hidden_size": 64, "moe_intermediate_size": 64}, None),
    ],
)
def test_chunks_change_no_bit_and_logits_are_as_close_to_float32_as_those_of_transformers(
    emulated, family, sizes, quantization, tmp_path
):
    path = tiny_model(family, tmp_path, head_dim=32, **sizes)
    options = {"block_size": 16, "dtype": BF16, "quantization": quantization}
    whole, chunked = (logits_of(path, chunk=chunk, **options) for chunk in (None, 7))
    assert all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))
    exact, theirs = (torch.cat(transformers_logits(path, dtype=dtype)) for dtype in (torch.float32, BF16))
    errors = [(logits.float() - exact).pow(2).mean().sqrt() for logits in (torch.cat(whole), theirs)]
    assert 0 < errors[0] < (1.2 * errors[1] if quantization is None else exact.std())


@pytest.mark.slow
def test_tile_instructions_assemble(tmp_path):
    compiler = build.find_compiler()
    target = tmp_path / "tiles.o"
    flags = ("-std=c++17", "-O1", "-march=sapphirerapids", "-fPIC", "-w", "-c", "-o", str(target))
    command = [*compiler.command, *flags, str(build.SOURCE_DIR / "linear_groups.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "bad value" in done.stderr or "unknown target CPU" in done.stderr:
        pytest.skip("the compiler is older than these processors")
    assert done.returncode == 0, done.stderr
    assert b"\xc4\xe2\x4a\x5e\xc4" in target.read_bytes(), "tdpbsud tmm0, tmm4, tmm6"
