"""Sampling against a definition written out in float64: what the limits keep, how often each token is drawn, ties, and
logits that are no numbers; in torch, by the native kernels, and by Triton kernels through the interpreter."""

import itertools

import pytest
import torch
from conftest import forget_library
from interpreter import INTERPRETED, interpreted, noise, plain

from pagedcli.layers import sampling
from pagedcli.layers.sampling import SamplingLimits
from pagedcli.native import load_library

pytest.importorskip("triton")
from pagedcli.layers import triton_sampling

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["triton"] if INTERPRETED else ["torch", "native"])
def implementation(request):
    if request.param == "native":
        load_library()
    else:
        forget_library()
    return request.param


each_implementation = pytest.mark.usefixtures("implementation")


def slow(*cases):
    """For pytest.mark.parametrize."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def limits_of(*rows):
    """From (top_k, top_p, min_p) of each row."""
    top_k, top_p, min_p = zip(*rows, strict=True)
    return SamplingLimits(torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p))


def one(values, row):
    return type(values)(*(value[row : row + 1] for value in values))


def choose(logits, temperature, uniform, limits=None):
    """By the implementation that this process tests."""
    if INTERPRETED:
        return triton_sampling.choose_tokens(logits, temperature, uniform, limits)
    num_drawn = int(temperature.count_nonzero())
    return sampling.choose_tokens(logits, temperature, uniform, limits, num_drawn=num_drawn)


def smallest_kept(logits, temperature, limits):
    if INTERPRETED:
        return triton_sampling.smallest_kept(logits, temperature, limits)
    return sampling.floors(logits, temperature, limits)


def defined(logits, temperature, top_k, top_p, min_p):
    """The smallest kept logit of one row [V], and the share of the probability above it: the definition, in float64."""
    row = logits.double()
    probs = (row / temperature).softmax(-1)
    order = row.sort(descending=True, stable=True).indices.tolist()
    kept = [token for token in order if probs[token] >= min_p * probs[order[0]]]
    kept = kept[: int(top_k)] if top_k else kept
    total = sum(float(probs[token]) for token in (kept if top_k or min_p else order))
    smallest, above, shares = row[order[0]], 0.0, []
    for value, group in itertools.groupby(kept, key=lambda token: float(row[token])):
        shares.append(above / total)
        if above < top_p * total or top_p == 1:
            smallest = value
        above += sum(float(probs[token]) for token in group)
    return float(smallest), shares


ROWS = [
    (0, 0.5, 0.0), (0, 0.95, 0.0), (0, 0.001, 0.0), (0, 1e-30, 0.0), (0, 0.9999, 0.0), (1, 1.0, 0.0), (2, 1.0, 0.0),
    (20, 0.95, 0.0), (50, 0.8, 0.02), (10**9, 1.0, 0.0), (10**9, 0.7, 0.0), (0, 1.0, 0.1), (0, 1.0, 1.0),
    (0, 0.9, 0.05), (7, 0.6, 1.0), (3, 1e-6, 0.0), (0, 1.0, 1e-6), (40, 1.0, 0.3),
]  # fmt: skip


@pytest.mark.slow_cases("triton-torch.bfloat16-1100-0.01")
@each_implementation
@pytest.mark.parametrize(
    ("dtype", "vocab_size", "spread"),
    [
        (torch.float32, 5, 12.0), (torch.float16, 1, 1.0), (torch.float32, 300, 12.0), (torch.bfloat16, 1100, 0.01),
        *slow((torch.float32, 2500, 0.01), (torch.float16, 300, 1.0), (torch.bfloat16, 2500, 1.0)),
    ],
    ids=str,
)  # fmt: skip
def test_limits_keep_what_is_defined_alone_and_in_a_crowd(vocab_size, spread, dtype):
    logits = noise(len(ROWS), vocab_size, dtype=dtype, scale=spread)
    temperature = torch.linspace(0.3, 2.0, len(ROWS))
    limits = limits_of(*ROWS)
    found = smallest_kept(logits, temperature, limits)
    for row, (top_k, top_p, min_p) in enumerate(ROWS):
        expected, shares = defined(logits[row], float(temperature[row]), top_k, top_p, min_p)
        kept, right = (int((logits[row].float() >= floor).sum()) for floor in (found[row], expected))
        if kept != right:  # allowed only where a share is the limit, up to the rounding of sums in float32
            assert top_p < 1, (row, kept, right)
            assert min(abs(share - top_p) for share in shares) < 2e-6, (row, kept, right)
    for row in range(0, len(ROWS), 4):
        alone = smallest_kept(logits[row : row + 1], temperature[row : row + 1], one(limits, row))
        assert torch.equal(alone[0], found[row])


@each_implementation
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32, torch.float16)], ids=str)
def test_ties_at_the_border_are_all_kept_and_top_k_counts_k_of_them(dtype):
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 0.0, -0.0, float("-inf")]]).to(dtype)
    # of 1 + 3 ties top-k 2 counts e^3 + e^2 = 27.5, of which 0.73 is the largest alone, and all of them 42.2
    for (top_k, top_p), smallest in {
        (2, 1.0): 2, (4, 1.0): 2, (5, 1.0): 0, (7, 1.0): float("-inf"), (2, 0.73): 3, (2, 0.74): 2, (0, 0.43): 3,
        (0, 0.5): 2, (4, 0.47): 3, (4, 0.48): 2, (6, 0.96): 0,
    }.items():  # fmt: skip
        assert float(smallest_kept(logits, torch.ones(1), limits_of((top_k, top_p, 0.0)))) == smallest, (top_k, top_p)
    uniform = torch.linspace(0, 1, 12)
    drawn = choose(logits.expand(12, -1).contiguous(), torch.ones(12), uniform, limits_of(*[(2, 1.0, 0.0)] * 12))
    assert sorted(set(drawn.tolist())) == [0, 1, 2, 3]


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float16, torch.bfloat16)], ids=str)
def test_equal_rows_are_kept_whole_and_drawn_evenly(dtype):
    logits = torch.full((1, 3000), -2.5, dtype=dtype)
    floors = smallest_kept(logits.expand(len(ROWS), -1).contiguous(), torch.ones(len(ROWS)), limits_of(*ROWS))
    assert (floors <= -2.5).all()
    uniform = (torch.arange(10) + 0.5) / 10
    tokens = choose(logits.expand(10, -1).contiguous(), torch.ones(10), uniform, limits_of(*[(3, 0.1, 0.5)] * 10))
    assert (tokens - uniform * 3000).abs().max() <= 1.5


@each_implementation
def test_the_whole_range_of_float32_is_searched():
    logits = torch.tensor([[3e38, 1e38, 5.0, 1e-30, 1e-42, 0.0, -1e-42, -1e-30, -7.0, -3e38]])
    for top_k in range(1, 11):
        assert float(smallest_kept(logits, torch.ones(1), limits_of((top_k, 1.0, 0.0)))) == float(logits[0, top_k - 1])


@each_implementation
def test_more_candidates_than_are_copied_are_searched_where_they_are():
    logits = 1 + noise(1, 30000, scale=1e-3)
    found = smallest_kept(logits, torch.ones(1), limits_of((25000, 1.0, 0.0)))
    assert torch.equal(found, logits.topk(25000).values[:, -1])
    floor = float(smallest_kept(logits, torch.ones(1), limits_of((0, 0.75, 0.0))))
    probs = logits.double().softmax(-1)
    assert abs(float(probs[logits > floor].sum()) - 0.75) < 5e-5


# ---------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (5, torch.float32),
        (4097, torch.bfloat16),
        *slow(*((size, dtype) for size in (1, 5, 4096, 4097, 10000) for dtype in DTYPES)),
    ],
    ids=str,
)
def test_choice_equals_its_twin(vocab_size, dtype, implementation):
    if implementation == "torch":
        pytest.skip("the twin itself")
    rows = 12
    logits = noise(rows, vocab_size, dtype=dtype, scale=3.0)
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.5] * 3)
    uniform = torch.tensor([0.0, 0.999999, 1.0, *torch.rand(9, generator=torch.Generator().manual_seed(1)).tolist()])
    limits = limits_of(*[(0, 1.0, 0.0), (20, 0.9, 0.0), (0, 0.9, 0.05)] * 4)
    for given in (None, limits):
        if implementation == "native":
            load_library()
        ours = choose(logits, temperature, uniform, given)
        forget_library()
        expected = sampling.choose_tokens(logits, temperature, uniform, given, num_drawn=9)
        assert ours[temperature == 0].tolist() == expected[temperature == 0].tolist()
        for row in range(rows):
            if ours[row] != expected[row]:  # allowed only where the target lies on the border, up to float32 rounding
                scores = logits[row].double() / temperature[row].double()
                if given is not None:
                    floor, _ = defined(logits[row], float(temperature[row]), *(float(limit[row]) for limit in given))
                    scores = scores.masked_fill(logits[row] < floor, float("-inf"))
                cumulative = scores.softmax(-1).cumsum(-1)
                border = cumulative[min(ours[row], expected[row])]
                assert abs(border - uniform[row]) < 1e-5, row
        for i in range(0, rows, 5):
            alone = [x[i : i + 1] for x in (logits, temperature, uniform)]
            assert choose(*alone, given and one(given, i)).tolist() == [int(ours[i])]


@each_implementation
def test_choice_keeps_to_the_limits_and_takes_the_first_of_equals():
    logits = torch.zeros(3, 9000)
    logits[:, [17, 5000, 8999]] = 1.0
    limits = limits_of((3, 1.0, 0.0), (1, 0.5, 0.0), (0, 1.0, 0.0))
    for u, expected in ((0.0, 17), (0.4, 5000), (0.9, 8999), (1.0, 8999)):
        assert choose(logits, torch.ones(3), torch.full((3,), u), limits)[:2].tolist() == [expected] * 2
    assert choose(logits, torch.zeros(3), torch.ones(3), limits).tolist() == [17] * 3
    logits[0] = float("-inf")
    logits[0, 8000] = -1e30
    assert int(choose(logits, torch.ones(3), torch.zeros(3))[0]) == 8000


LIMITED = [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.2), (4, 0.9, 0.1)]


@each_implementation
@pytest.mark.parametrize("row", [LIMITED[4], *slow(*((row,) for row in LIMITED[:4]))], ids=str)
def test_rows_that_are_not_numbers_get_the_invalid_token_and_their_neighbours_their_own(row):
    good = noise(2, 5000, scale=3.0)
    bad = [good[:1].clone() for _ in range(5)]
    bad[0][:, 7] = float("nan")
    bad[1][:, 4500] = float("nan")  # in the second chunk
    bad[2][:, 4999] = float("inf")
    bad[3][:] = float("-inf")
    bad[4][:] = float("nan")
    logits = torch.cat([*bad, good]).repeat_interleave(2, 0)
    temperature = torch.tensor([0.0, 0.8]).repeat(7)
    uniform = torch.linspace(0.1, 0.9, 14)
    tokens = choose(logits, temperature, uniform, limits_of(*[row] * 14))
    assert (tokens[:10] == sampling.INVALID).all()
    assert (tokens[10:] >= 0).all()
    assert torch.equal(tokens[10:], choose(logits[10:], temperature[10:], uniform[10:], limits_of(*[row] * 4)))


def chi_square(rows, num_draws):
    """That so many draws of each of these rows follow the float64 definition: no statistic in 10,000 is as large."""
    logits = noise(30, dtype=torch.bfloat16, scale=1.5)
    logits[20:] = logits[4]  # ties
    for seed, (temperature, row) in enumerate(rows):
        uniform = torch.rand(num_draws, generator=torch.Generator().manual_seed(seed))
        temperatures = torch.full((num_draws,), temperature)
        tokens = choose(logits.expand(num_draws, -1).contiguous(), temperatures, uniform, limits_of(*[row] * num_draws))
        floor, _ = defined(logits, temperature, *row)
        kept = logits.double() >= floor
        expected = (logits.double() / temperature).masked_fill(~kept, float("-inf")).softmax(-1)
        counts = torch.bincount(tokens, minlength=30)
        assert not counts[~kept].any()
        expected, counts = expected[kept] * num_draws, counts[kept]
        statistic = float(((counts - expected) ** 2 / expected).sum())
        freedom = len(counts) - 1
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 8, (row, statistic, freedom)


KINDS = [
    (0.7, (0, 1.0, 0.0)),
    (0.8, (12, 1.0, 0.0)),
    (1.0, (0, 0.9, 0.0)),
    (1.5, (0, 1.0, 0.1)),
    (1.1, (25, 0.8, 0.01)),
]


@each_implementation
@plain
def test_a_hundred_thousand_draws_follow_the_definition():
    chi_square(KINDS, 100_000 // len(KINDS))


@interpreted
@pytest.mark.slow
def test_three_thousand_draws_of_the_kernels_follow_the_definition():
    chi_square(KINDS, 600)  # of each of five kinds: the interpreter takes 30 ms for one


# ---------------------------------------------------------------------- changes of logits


@interpreted
@pytest.mark.parametrize("vocab_size", [5, 5000])
def test_changes_have_the_bits_of_their_twins(vocab_size):
    generator = torch.Generator().manual_seed(3)
    scores = noise(4, vocab_size, scale=5.0)
    rows, places = torch.tensor([3, 0, 1]), torch.tensor([5, 0, 2])
    first, second = torch.tensor([1.3, 0.7, 1.0]), torch.tensor([0.1, -0.3, 0.0])
    seen = torch.randint(2, (6, vocab_size), generator=generator).to(torch.uint8)
    counts = torch.randint(-5, 900, (6, vocab_size), generator=generator).clamp(min=0).int()
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator).int()
    expected, ours = scores.clone(), scores.clone()
    sampling.penalize_repeated(expected, seen, rows, places, first)
    triton_sampling.penalize(ours, seen, rows, places, first, first)
    assert torch.equal(ours, expected)
    sampling.penalize_counted(expected, counts, rows, places, first, second)
    triton_sampling.penalize(ours, counts, rows, places, first, second)
    assert torch.equal(ours, expected)
    sampling.mask_tokens(expected, rows, words)
    triton_sampling.mask_tokens(ours, rows, words)
    assert torch.equal(ours, expected)
    assert torch.equal(ours[2], scores[2])
    bits = [(int(words[0, token // 32]) >> token % 32) & 1 for token in range(vocab_size)]
    assert (ours[3] > float("-inf")).int().tolist() == bits
