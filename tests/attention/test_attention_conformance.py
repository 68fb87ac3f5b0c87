"""Every attention backend of the registry computes the same function as float64 mathematics.

Triton's kernels run here on a GPU, or on a CPU where TRITON_INTERPRET=1 is set (tests/test_triton.py sees to that).
"""

import copy
import os
from dataclasses import replace

import pytest
import torch
from attention_cases import (
    INT8_TOLERANCE,
    SHARED_LENGTHS,
    TOLERANCE,
    Case,
    check_shared_rows,
    fill_cache,
    held_key,
    run,
    shared_blocks,
    whole_steps,
    worst_error,
)

from pagedcli.attention.select import REGISTRY, select_backend
from pagedcli.errors import BackendError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
# All that this device type could have; through the interpreter, which is slow, Triton alone.
FLOATS = ["triton"] if INTERPRETED else [entry.name for entry in REGISTRY if DEVICE in entry.auto_devices]
INT8 = "cpu-int8"  # the native kernels over an int8 cache: exact for what it holds
NAMES = [*FLOATS, INT8] if "cpu" in FLOATS else FLOATS
F32, F16, BF16, I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8

# (tokens in the cache, new tokens): decode, chunks and whole prompts at the edges of pages, tiles, splits.
DECODE = [(1, 1), (16, 1), (257, 1), (513, 1), (2, 1), (15, 1), (17, 1), (255, 1), (256, 1), (700, 1)]
CHUNKS = [(33, 2), (130, 5), (77, 64), (257, 64), (520, 9), (600, 40)]
PROMPTS = [(3, 3), (16, 16), (33, 33), (49, 49), (145, 145)]
RAGGED = [(1, 1), (300, 1), (20, 20), (130, 5), (16, 16), (17, 1), (258, 3), (90, 33), (5, 5), (64, 1)]
# block size, key/value heads, group, head size
SHAPES = [
    (1, 2, 2, 8),
    (1, 1, 4, 64),
    (3, 2, 3, 20),
    (3, 1, 3, 7),
    (24, 1, 2, 1),
    (8, 2, 1, 32),
    (16, 1, 1, 64),
    (16, 2, 2, 128),
    (16, 3, 5, 64),
    (16, 1, 16, 128),
    (16, 2, 8, 96),
    (20, 1, 4, 80),
    (16, 1, 4, 256),
    (16, 1, 2, 512),
    (48, 2, 2, 64),
    (256, 2, 4, 8),
    (256, 1, 8, 128),
    (256, 2, 1, 96),
    (256, 1, 2, 256),
]
INTERPRETED_SHAPES = [(16, 2, 2, 8), (16, 1, 16, 64), (48, 1, 3, 96), (256, 2, 2, 128), (32, 1, 1, 256)]
INTERPRETED_SHAPES += [(16, 1, 1, 512)]
INTERPRETED_RAGGED = [(1, 1), (17, 1), (258, 3), (20, 20), (60, 33)]


def backend_for(name, case):
    """The backend, or a skip with the reason why it cannot run here."""
    try:
        selection = select_backend(
            name.removesuffix("-int8"),
            device=torch.device(case.device),
            dtype=case.dtype,
            kv_dtype=case.kv_dtype,
            block_size=case.block_size,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            layers=[case.layer],
        )
    except BackendError as error:
        pytest.skip(error.message)
    return selection.backend


def make_case(name, lengths, shape, dtype, seed=0, **changes):
    block_size, num_kv_heads, group, head_dim = shape
    changes |= {"kv_dtype": I8} if name == INT8 else {}
    case = Case(lengths, block_size, num_kv_heads * group, num_kv_heads, head_dim, dtype, DEVICE, seed, **changes)
    if name == INT8:
        case.v = whole_steps(case.v)
        case.k = case.k if case.value_dim is None else case.v
        case.share()
    return case


def check_exact(result, case, times=1):
    """The result is attention over what the cache holds, to the rounding of its type."""
    tolerance, held = TOLERANCE, copy.copy(case)
    if case.kv_dtype == I8:
        tolerance, held.k = INT8_TOLERANCE, case.k if case.value_dim else held_key(case.k)
    assert worst_error(result, held.expected()) < times * tolerance[case.dtype]


def shapes_for(name):
    return INTERPRETED_SHAPES if INTERPRETED else SHAPES


def each_shape(name):
    return [pytest.param(name, shape, id=f"{name}-{'x'.join(map(str, shape))}") for shape in shapes_for(name)]


ALL_SHAPES = [param for name in NAMES for param in each_shape(name)]


@pytest.mark.slow_cases("triton-16x2x2x8-f32", "triton-256x2x2x128-f32")
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize(("name", "shape"), ALL_SHAPES)
def test_ragged_step_is_exact_attention(name, shape, dtype):
    if INTERPRETED and dtype is BF16 and shape is not INTERPRETED_SHAPES[0]:
        pytest.skip("the interpreter computes bfloat16 in float32: one shape shows the conversions")
    case = make_case(name, INTERPRETED_RAGGED if INTERPRETED else RAGGED, shape, dtype)
    result = run(backend_for(name, case), case)
    assert result.dtype == dtype
    is_worst = (name, shape, dtype) == ("cpu-int8", (48, 2, 2, 64), F16)  # off by 6.2e-3, all others by less than 5e-3
    check_exact(result, case, times=1.5 if is_worst else 1)


# block size, query heads, K, V: the latents of DeepSeek and of MiniCPM3, sizes that fill no vector, small ones
LATENTS = [(16, 16, 576, 512), (32, 20, 288, 256), (3, 5, 52, 40), (16, 5, 80, 64)]


@pytest.mark.slow_cases("triton-80-f32")
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("sizes", LATENTS, ids=["576", "288", "52", "80"])
@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_a_part_of_the_keys(name, sizes, dtype):
    if INTERPRETED and sizes is not LATENTS[-1]:
        pytest.skip("the interpreter is slow")
    block_size, num_heads, head_dim, value_dim = sizes
    lengths = INTERPRETED_RAGGED if INTERPRETED else RAGGED
    case = make_case(name, lengths, (block_size, 1, num_heads, head_dim), dtype, value_dim=value_dim)
    backend = backend_for(name, case)
    result = run(backend, case)
    assert result.shape[1:] == (num_heads, value_dim)
    check_exact(result, case)
    if backend.capabilities.batch_invariant:
        check_alone(backend, case, result)


def check_alone(backend, case, crowd):
    """Each sequence alone has the bits of the crowd."""
    start = 0
    for b, (_, new) in enumerate(case.lengths):
        assert torch.equal(run(backend, case, only=[b]), crowd[start : start + new]), f"sequence {b} alone"
        start += new


@pytest.mark.parametrize("name", FLOATS)
def test_blocks_that_lie_apart_give_the_bits_of_those_that_follow_each_other(name):
    lengths = [(40, 1), (20, 18)] if INTERPRETED else [(290, 1), (40, 30)]
    case = make_case(name, lengths, (16, 2, 2, 16), F32, num_others=3)
    backend = backend_for(name, case)
    if not backend.capabilities.strided_blocks:
        pytest.skip(f"{name} does not take them")
    assert torch.equal(run(backend, case), run(backend, replace(case, num_others=0)))


@pytest.mark.parametrize("lengths", [DECODE, CHUNKS, PROMPTS], ids=["decode", "chunks", "prompts"])
@pytest.mark.parametrize("name", NAMES)
def test_uniform_step_is_exact_attention(name, lengths):
    if INTERPRETED:
        lengths = lengths[:3]
    case = make_case(name, lengths, (16, 2, 2, 64), F32, seed=1)
    check_exact(run(backend_for(name, case), case), case)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", FLOATS)
def test_large_scores_do_not_overflow(name, dtype):
    """Scores of some thousands: only a softmax that subtracts its running maximum survives, in any order of tiles."""
    case = make_case(name, [(290, 1), (70, 30)], (16, 1, 2, 64), dtype)
    case.q, case.k = case.q * 16, case.k * 16
    check_exact(run(backend_for(name, case), case), case, times=10)


LAYERS = {
    "window of 1": {"window": 1},
    "window inside a tile": {"window": 13},
    "window over blocks": {"window": 100},
    "soft cap": {"soft_cap": 1.5},
    "both": {"window": 40, "soft_cap": 0.5},
    "negative scale": {"scale": -0.3},
    "large scale": {"scale": 2.0},
    "sinks": {"sinks": True},
    "sinks and a window": {"sinks": True, "window": 13},
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
# a tie of K that is rounded the other way counts more with larger scores
@pytest.mark.parametrize(("name", "asked"), [(n, a) for n in NAMES for a in LAYERS if n != INT8 or "scale" not in a])
def test_what_a_layer_asks_for_is_computed_or_refused(name, asked, dtype):
    case = make_case(name, INTERPRETED_RAGGED if INTERPRETED else RAGGED, (16, 2, 2, 64), dtype)
    case.layer = replace(case.layer, **LAYERS[asked])
    check_exact(run(backend_for(name, case), case), case, times=4)


@pytest.mark.slow_cases("triton-257-shape1-f32")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("window", "shape"), [(2, (16, 2, 2, 64)), (257, (48, 1, 4, 128)), (300, (256, 1, 2, 64))])
@pytest.mark.parametrize("name", NAMES)
def test_only_the_window_is_read_of_a_long_sequence(name, window, shape, dtype):
    """Blocks before the window are not in the table any more. Splits and tiles begin where the window does, and a
    sequence alone still gives the bits of the crowd."""
    lengths = [(600, 1), (330, 3)] if INTERPRETED else [(1100, 1), (513, 2), (700, 64), (300, 300), (257, 1), (40, 1)]
    case = make_case(name, lengths, shape, dtype)
    case.layer = replace(case.layer, window=window)
    backend = backend_for(name, case)
    crowd = run(backend, case)
    check_exact(crowd, case, times=2)
    if backend.capabilities.batch_invariant:
        assert torch.equal(run(backend, case, only=[1]), crowd[lengths[0][1] :][: lengths[1][1]])


@pytest.mark.slow_cases("triton-f32")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_sequence_alone_and_in_a_crowd_gives_the_same_bits(name, dtype):
    lengths = [(300, 1), (60, 33)] if INTERPRETED else [(300, 1), (90, 33), (600, 2), (40, 40)]
    case = make_case(name, lengths, (16, 1, 2, 64), dtype)
    backend = backend_for(name, case)
    if not backend.capabilities.batch_invariant:
        pytest.skip(f"{name} does not promise it")
    check_alone(backend, case, run(backend, case))


@pytest.mark.slow_cases("cpu-(16, 2, 2, 64)-*", "cpu-int8-(16, 2, 2, 64)-*")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [(16, 2, 2, 64), (256, 1, 8, 32), (8, 2, 1, 20)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_shared_blocks_are_exact_attention_and_the_bits_of_sequences_alone(name, shape, dtype):
    if INTERPRETED:
        pytest.skip("the interpreter is slow, and Triton's kernels do not look at what sequences share")
    case = make_case(name, SHARED_LENGTHS, shape, dtype, shared=shared_blocks(shape[0]))
    backend = backend_for(name, case)
    crowd = run(backend, case)
    check_exact(crowd, case)
    if backend.capabilities.batch_invariant:
        check_shared_rows(lambda **only: run(backend, case, **only), crowd)


@pytest.mark.parametrize("name", NAMES)
def test_slot_minus_one_writes_nothing(name):
    case = make_case(name, [(20, 20)], (16, 1, 2, 64), F32)
    backend = backend_for(name, case)
    shape = backend.kv_shape(3, 16, 1, 64)
    k_cache, v_cache = (torch.full(shape, 7, dtype=case.kv_dtype or F32, device=DEVICE) for _ in range(2))
    backend.write(
        case.k, case.v, (k_cache, v_cache), torch.full((20,), -1, dtype=torch.int32, device=DEVICE), case.layer
    )
    assert bool((k_cache == 7).all())
    assert bool((v_cache == 7).all())


@pytest.mark.parametrize("block_size", [16] if INTERPRETED else [16, 5])
@pytest.mark.parametrize("name", NAMES)
def test_copying_a_block_copies_its_tokens(name, block_size):
    """And its scales: copy-on-write copies whole blocks with cache[dst] = cache[src], in whatever layout."""
    case = make_case(name, [(20, 1)], (block_size, 2, 2, 64), F32)
    backend = backend_for(name, case)
    k_cache, v_cache, batch = fill_cache(backend, case)
    used = -(-20 // block_size)
    free = next(b for b in range(k_cache.shape[0]) if b not in batch.block_table[0, :used].tolist())
    old = int(batch.block_table[0, used - 1])
    for cache in (k_cache, v_cache):
        cache[free] = cache[old]
        cache[old] = float("nan") if cache.is_floating_point() else -1
    batch.block_table[0, used - 1] = free
    batch.work = None
    backend.prepare(batch)
    check_exact(backend.attend(case.q[19:], (k_cache, v_cache), batch, case.layer), case)


@pytest.mark.parametrize("name", FLOATS)
def test_cache_of_more_than_2_31_elements(name):
    """Blocks at the far end of a cache whose offsets need 64 bits. Memory is reserved, only a few pages are touched."""
    case = make_case(name, [(40, 1), (20, 20)], (16, 2, 2, 64), F16)
    backend = backend_for(name, case)
    k_small, v_small, batch = fill_cache(backend, case)
    num_blocks = 2**31 // (16 * 2 * 64) + k_small.shape[0]
    try:
        caches = [torch.empty(backend.kv_shape(num_blocks, 16, 2, 64), dtype=F16, device=DEVICE) for _ in range(2)]
    except RuntimeError as error:
        pytest.skip(f"cannot reserve 8 GiB: {error}")
    base = num_blocks - k_small.shape[0]
    for cache, small in zip(caches, (k_small, v_small), strict=True):
        cache[base:] = small
    batch.block_table[:, :3] += base
    backend.prepare(batch)
    q = torch.cat([case.of_sequence(case.q, 0)[39:], case.of_sequence(case.q, 1)])
    far = torch.tensor([int(batch.block_table[0, 2]) * 16 + 7], dtype=torch.int32, device=DEVICE)  # position 39
    k, v = (case.of_sequence(x, 0)[39:] for x in (case.k, case.v))
    backend.write(k, v, tuple(caches), far, case.layer)
    check_exact(backend.attend(q, tuple(caches), batch, case.layer), case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "reference"])
def test_random_steps_are_exact_attention(name, dtype, seed):
    random = torch.Generator().manual_seed(seed)

    def pick(low, high):
        return int(torch.randint(low, high + 1, (), generator=random))

    totals = [pick(1, 1500 if not INTERPRETED else 300) for _ in range(pick(1, 12))]
    lengths = [(n, 1 if pick(0, 1) else pick(1, min(n, 200))) for n in totals]
    shapes = shapes_for(name)
    case = make_case(name, lengths, shapes[pick(0, len(shapes) - 1)], dtype, seed)
    check_exact(run(backend_for(name, case), case), case)


def test_poison_is_seen():
    """The test's own teeth: a backend that reads one token too far must fail it."""
    case = make_case("reference", [(17, 1)], (16, 1, 1, 64), F32)
    backend = backend_for("reference", case)
    k_cache, v_cache, batch = fill_cache(backend, case)
    longer = replace(batch, num_tokens=batch.num_tokens + 1)
    result = backend.attend(case.q[16:], (k_cache, v_cache), longer, case.layer)
    assert worst_error(result, case.expected()) == float("inf")
