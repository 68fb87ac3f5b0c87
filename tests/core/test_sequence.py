"""A sequence begins with nothing computed, and tells what it has."""

from dataclasses import fields

from pagedcli.core.sequence import Sequence, SequenceStatus
from pagedcli.sampling_params import SamplingParams


def test_a_new_sequence_has_nothing_yet():
    seq = Sequence(3, "r", [5, 6, 7], SamplingParams(temperature=0, stop_token_ids=[9]), max_new_tokens=4)
    counts = [name for name in Sequence.__slots__ if name.startswith("num_") and name != "num_prompt_tokens"]
    assert len(counts) >= 6
    assert {name: getattr(seq, name) for name in counts} == dict.fromkeys(counts, 0)
    assert (seq.num_behind_tokens, seq.synced_blocks, seq.sample_index, seq.seed) == (0, 0, 0, 0)
    assert (seq.facts.most_computed_tokens, seq.facts.num_recomputed_tokens, seq.facts.arrived_s) == (0, 0, 0.0)
    assert (seq.num_prompt_tokens, seq.unwatched_end, seq.num_tokens, seq.num_output_tokens) == (3, 7, 3, 0)
    assert (seq.num_context_tokens, seq.facts.num_disk_tokens, seq.row, seq.state, seq.draft) == (None,) * 5
    lists = (seq.block_table, seq.prefixes, seq.guesses, seq.forks, seq.logprobs, seq.facts.prompt_logprobs)
    assert not any(lists)
    assert seq.status is SequenceStatus.WAITING
    assert (seq.is_private, seq.is_beam, seq.penalized) == (False,) * 3
    assert seq.is_greedy
    assert seq.end_token_ids == {9}


def test_a_sequence_is_tokens_blocks_and_status():
    """What only some sequences have is a part of its own."""
    assert len(fields(Sequence)) <= 36


def test_only_rows_that_take_the_likeliest_token_as_it_is_are_greedy():
    for params in (
        {"temperature": 1.0}, {"logprobs": 0}, {"repetition_penalty": 1.5}, {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {"min_tokens": 1}, {"beam_width": 2},
    ):  # fmt: skip
        seq = Sequence(3, "r", [5], SamplingParams(**{"temperature": 0, **params}), max_new_tokens=4)
        assert not seq.is_greedy, params
    seq = Sequence(3, "r", [5], SamplingParams(temperature=0), max_new_tokens=4, guide=object())
    assert not seq.is_greedy
    assert seq.unwatched_end == 0


def test_samples_come_with_the_end_of_the_prompt_of_the_first_one():
    def sequence(sample_index=0, **params):
        return Sequence(3, "r", [5, 6], SamplingParams(**params), max_new_tokens=4, sample_index=sample_index)

    first = sequence(n=3)
    given = (first, sequence(1, n=3), sequence(), sequence(n=2, beam_width=2))
    assert [each.num_coming_samples for each in given] == [2, 0, 0, 0]
    first.token_ids.append(7)
    assert first.num_coming_samples == 0
