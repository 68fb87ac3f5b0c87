"""The sampler against plain definitions: distribution, penalties, independence of neighbours, and that its parameters
reach the limits, whose every case is in layers/test_triton_sampling."""

import pytest
import torch
from conftest import forget_library

from pagedcli.core.sampling_input import SamplingInput
from pagedcli.core.sequence import Draft, Sequence
from pagedcli.errors import ParameterError
from pagedcli.layers import sampling
from pagedcli.native import load_library
from pagedcli.runner.device_state import Upload
from pagedcli.runner.sampler import KeptTokens, sample_tokens
from pagedcli.sampling_params import SamplingParams

VOCAB = 40


def make_seq(prompt=(1, 2), output=(), *, seed=0, sample_index=0, eos=(), **params):
    given = {"seed": seed, "sample_index": sample_index, "eos_token_ids": frozenset(eos)}
    seq = Sequence(0, "r", list(prompt), SamplingParams(max_tokens=100, **params), max_new_tokens=100, **given)
    for token in output:
        seq.append_token(token)
    return seq


UPLOAD = Upload(torch.device("cpu"))


def read(logits, seqs):
    for row, seq in enumerate(seqs):
        seq.row = len(seqs) - 1 - row
    return sample_tokens(logits, SamplingInput.of(seqs), UPLOAD, KeptTokens(len(seqs), UPLOAD)).read()


def changed(logits, seq):
    """The logits of one row as they are sampled from."""
    scores, seq.row = logits[None].clone(), 0
    KeptTokens(1, UPLOAD).change(scores, SamplingInput.of([seq]).changes)
    return scores[0]


def sample(logits, seqs):
    """The next token of each sequence."""
    return read(logits, seqs).token_ids


@pytest.fixture
def logits():
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def test_repetition_penalty_as_transformers_does(logits):
    from transformers import RepetitionPenaltyLogitsProcessor

    ids = torch.tensor([[3, 4, 5, 7]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits[None].clone())
    seq = make_seq((3, 4), (5, 7), repetition_penalty=1.7, temperature=0, logprobs=0)
    torch.testing.assert_close(changed(logits, seq), expected[0])


def test_presence_and_frequency_penalties_count_the_output_only(logits):
    seq = make_seq((3, 3), (5, 5, 7), presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.clone()
    expected[5] -= 0.5 + 2 * 0.25
    expected[7] -= 0.5 + 0.25
    torch.testing.assert_close(changed(logits, seq), expected)


@pytest.mark.parametrize(
    "penalties",
    [{"repetition_penalty": 1.7}, {"frequency_penalty": 0.3, "presence_penalty": 0.1}, {"repetition_penalty": 0.9,
     "frequency_penalty": -0.7}],
    ids=["repetition", "counts", "both"],
)  # fmt: skip
def test_each_row_of_a_draft_counts_the_guesses_before_it_and_wrong_ones_leave_no_count(penalties):
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    other, seq, last = (make_seq((3, 4), (5, 7, token), **penalties) for token in (6, 7, 8))
    other.row, seq.row, last.row, seq.draft = 2, 0, 1, Draft([5, 9, 9], "answers")
    tables = KeptTokens(3, UPLOAD)

    def check(rows):
        changes, scores = SamplingInput.of([seq for seq, _ in rows]).changes, logits[: len(rows)].clone()
        tables.change(scores, changes)
        for found, row, (each, guesses) in zip(scores, logits, rows, strict=False):
            alone = make_seq((3, 4), (*each.output_token_ids, *guesses), **penalties)
            assert torch.equal(found, changed(row, alone))
        return changes

    changes = check([(other, ()), (seq, ()), (seq, (5,)), (seq, (5, 9)), (seq, (5, 9, 9)), (last, ())])
    tables.add(torch.tensor([7, 5, 9, 3, 9, 11]), changes)  # 3 instead of the second 9: what follows it is dropped
    for each, tokens in ((other, [7]), (seq, [5, 9, 3]), (last, [11])):
        each.token_ids += tokens
    seq.draft, seq.num_kept_tokens = None, seq.num_kept_tokens + 2
    assert check([(last, ()), (seq, ()), (other, ())]).started == []


def test_logit_bias_can_force_and_forbid_tokens(logits):
    best, second = logits.topk(2).indices.tolist()
    assert sample(logits[None], [make_seq(temperature=0, logit_bias={7: 100.0})]) == [7]
    assert sample(logits[None], [make_seq(temperature=0, logit_bias={best: -100.0})]) == [second]


def test_min_tokens_forbids_the_end_until_reached(logits):
    best = int(logits.argmax())
    second = int(logits.topk(2).indices[1])
    assert sample(logits[None], [make_seq(temperature=0, min_tokens=2, eos=[best])]) == [second]
    assert sample(logits[None], [make_seq(output=(0, 0), temperature=0, min_tokens=2, eos=[best])]) == [best]
    assert sample(logits[None], [make_seq(temperature=0, min_tokens=2, stop_token_ids=[best])]) == [second]


def test_logprobs_are_those_of_the_unchanged_logits(logits):
    seq = make_seq(temperature=0.7, logprobs=3, logit_bias={5: 100.0})
    tokens = read(logits[None], [seq])
    assert tokens.token_ids == [5]
    expected = logits.log_softmax(-1)
    assert tokens.logprobs[0].logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert [token for token, _ in tokens.logprobs[0].top] == logits.topk(3).indices.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_and_dtype_conversion_change_nothing(logits, dtype):
    batch = torch.stack([logits, logits * 0.5, logits * 2]).to(dtype)
    original = batch.clone()
    kinds = [{"temperature": 0.0}, {"top_p": 0.9, "seed": 5}, {"top_k": 4, "frequency_penalty": 1.0, "seed": 6}]
    alone = [sample(batch[i : i + 1], [make_seq(output=(3,), **kind)])[0] for i, kind in enumerate(kinds)]
    assert sample(batch, [make_seq(output=(3,), **kind) for kind in kinds]) == alone
    assert torch.equal(batch, original)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2},
        {"n": 0},
        {"max_tokens": 0},
        {"min_tokens": 20},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"stop": [""]},
        {"logit_bias": {1: float("inf")}},
        {"logprobs": -1},
        {"temperature": 1e300},
        {"logit_bias": {1: 1e99}},
        {"top_k": 2**70},
        {"n": 10**9},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"seed": 2**63},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        SamplingParams(**wrong)


# ---------------------------------------------------------------------- ties


@pytest.mark.parametrize("native", [True, False])
def test_a_longer_list_of_tokens_begins_with_the_shorter_one(native):
    load_library() if native else forget_library()
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(40, 700, generator=generator) * 2).bfloat16().float()  # a hundred different values
    logits[0] = -3.0
    logits[1, 5:] = float("-inf")
    scores = logits.log_softmax(-1)
    values, tokens = sampling.top_tokens(scores, 700)
    expected = scores.sort(dim=-1, descending=True, stable=True)  # stable: ties by token id
    assert torch.equal(values, expected.values)
    assert torch.equal(tokens, expected.indices)
    for count in (0, 1, 5, 33, 64):
        shorter = sampling.top_tokens(scores, count)
        assert torch.equal(shorter[0], values[:, :count])
        assert torch.equal(shorter[1], tokens[:, :count])
