"""What a step asks of the sampler, and which rows of it get logits: arrays that one can check by hand."""

import numpy as np
import pytest

from pagedcli.core.limits import Limits
from pagedcli.core.sampling_input import SamplingInput, uniform
from pagedcli.core.sequence import Draft, Sequence
from pagedcli.core.snapshots import HeldSlots
from pagedcli.core.step_input import StepBuilder, _input_ids, known_ids, prompt_rows
from pagedcli.core.steps import ScheduledStep
from pagedcli.sampling_params import SamplingParams


class Guide:
    allowed_tokens = b"\x0f"


def sequence(token_ids=(5, 6, 7), *, num_output=0, row=None, **params):
    names = ("sample_index", "guide", "eos_token_ids", "seed")
    given = {name: params.pop(name) for name in names if name in params}
    num_prompt = len(token_ids) - num_output
    seq = Sequence(9, "r", list(token_ids[:num_prompt]), SamplingParams(**params), max_new_tokens=20, **given)
    seq.token_ids += token_ids[num_prompt:]
    seq.row = row
    return seq


def test_greedy_rows_ask_for_nothing():
    found = SamplingInput.of([sequence(temperature=0), sequence(temperature=0)])
    assert found.num_rows == 2
    assert found.is_plain
    assert [each.tolist() for each in found.rows] == [[0, 0], [0, 0], [0, 0], [1, 1], [0, 0]]
    assert [each.dtype.name for each in found.rows] == ["float32", "float32", "int32", "float32", "float32"]
    assert (found.has_limits, found.changes, found.score_changes, found.scored) == (False, None, None, ())


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, (0, 1, 0)),
        ({"top_k": 4}, (4, 1, 0)),
        ({"top_k": 1}, (1, 1, 0)),
        ({"top_p": 0.5}, (0, 0.5, 0)),
        ({"min_p": 0.25}, (0, 1, 0.25)),
        ({"top_k": -1, "min_p": 0.5}, (0, 1, 0.5)),
    ],
)
def test_a_sampled_row_has_its_number_and_its_limits(limits, kept):
    seq = sequence(temperature=0.5, seed=3, sample_index=2, **limits)
    found = SamplingInput.of([sequence(temperature=0), seq, seq, sequence(temperature=0)])
    assert found.rows.temperature.tolist() == [0, 0.5, 0.5, 0]
    numbers = [0, uniform(3, 2, 3), uniform(3, 2, 4), 0]  # of the next token, and of the one after it
    assert found.rows.uniform.tolist() == np.array(numbers, dtype=np.float32).tolist()
    assert (found.rows.top_k[1], found.rows.top_p[1], found.rows.min_p[1]) == kept
    assert (found.rows.top_k[0], found.rows.top_p[3], found.rows.min_p[3]) == (0, 1, 0)
    assert found.has_limits == bool(limits)


def test_numbers_differ_by_seed_sample_and_place_alone():
    found = {uniform(seed, sample, place) for seed in range(3) for sample in range(3) for place in range(3)}
    assert len(found) == 27
    assert all(0 <= each < 1 for each in found)
    assert uniform(1, 2, 3) == uniform(1, 2, 3) == 0.5296917750727089
    numbers = [uniform(0, 0, place) for place in range(1000)]
    assert 0.45 < sum(numbers) / 1000 < 0.55
    assert max(numbers) > 0.99


def test_rows_that_ended_are_not_read():
    seq = sequence(temperature=1, logprobs=2)
    seq.finish_reason = "stop"
    assert SamplingInput.of([seq]).is_plain


def test_log_probabilities_are_asked_for_by_row():
    seqs = [sequence(temperature=0), sequence(temperature=0, logprobs=3), sequence(temperature=1, logprobs=0)]
    assert SamplingInput.of(seqs).scored == [(1, 3), (2, 0)]
    [(row, count)] = SamplingInput.of([sequence(temperature=0, beam_width=2, logprobs=50)]).scored
    assert (row, count) == (0, 50)
    [(_, few)] = SamplingInput.of([sequence(temperature=0, beam_width=2)]).scored
    assert few < 50
    for likeliest in ({"temperature": 1, "beam_width": 2}, {"temperature": 0, "logprobs": 1, "top_k": 3}):
        found = SamplingInput.of([sequence(**likeliest)])
        assert [each.tolist() for each in found.rows] == [[0], [0], [0], [1], [0]]
        assert not found.has_limits
        assert not found.is_plain
    assert not SamplingInput.of([sequence(temperature=0)], [0]).is_plain


def test_changes_of_logits_name_their_rows_places_and_tokens():
    seqs = [
        sequence(temperature=0),
        sequence((5, 6, 7, 8), num_output=1, temperature=0, row=4, repetition_penalty=1.5),
        sequence(temperature=0, row=3, frequency_penalty=0.5),
        sequence(temperature=0, row=2, presence_penalty=0.25),
        sequence(temperature=0, logit_bias={3: 1.5, 4: -2.0}),
        sequence(temperature=0, min_tokens=1, stop_token_ids=[9, 4], eos_token_ids=frozenset([0, 2, 2**31, -1])),
        sequence(temperature=0, min_tokens=1, stop_token_ids=[7], guide=Guide()),
        sequence((5, 6, 7), num_output=1, temperature=0, min_tokens=1, stop_token_ids=[9]),
    ]
    found = SamplingInput.of(seqs).changes
    assert found.started == [(4, [5, 6, 7, 8], 3), (3, [5, 6, 7], 3), (2, [5, 6, 7], 3)]
    assert (found.repeated.tolist(), found.repeated_places.tolist(), found.repetition.tolist()) == ([1], [4], [1.5])
    assert (found.counted.tolist(), found.counted_places.tolist()) == ([2, 3], [3, 2])
    assert (found.frequency.tolist(), found.presence.tolist()) == ([0.5, 0], [0, 0.25])
    assert (found.biased.tolist(), found.biased_ids.tolist(), found.bias.tolist()) == ([4, 4], [3, 4], [1.5, -2.0])
    assert (found.banned.tolist(), found.banned_ids.tolist()) == ([5, 5, 5, 5], [0, 2, 4, 9])
    assert found.guided == [(6, b"\x0f", [7])]
    assert not SamplingInput.of(seqs[-1:]).changes
    assert [seq.num_kept_tokens for seq in seqs] == [0, 5, 4, 4, 0, 0, 0, 0]
    for seq in seqs:
        seq.token_ids.append(5)
    assert SamplingInput.of(seqs).changes.started == []  # the executor has added the token that it has sampled
    for seq in (*seqs, seqs[1]):
        seq.token_ids.append(5)
    assert SamplingInput.of(seqs).changes.started == [(4, [5, 6, 7, 8, 5, 5, 5], 3)]


def test_ends_are_banned_until_the_minimum_counting_guesses():
    seq = sequence((5, 6, 7), num_output=1, temperature=0, min_tokens=3, stop_token_ids=[9], logprobs=0)
    found = SamplingInput.of([seq] * 4)
    assert (found.changes.banned.tolist(), found.changes.banned_ids.tolist()) == ([0, 1], [9, 9])


def test_changes_of_beams_are_numbered_by_scored_rows():
    beam = {"temperature": 0, "beam_width": 2, "repetition_penalty": 1.5}
    seqs = [sequence(temperature=0), sequence(temperature=0, logprobs=1), sequence(row=1, **beam)]
    found = SamplingInput.of(seqs)
    assert found.changes is None
    assert (found.score_changes.repeated.tolist(), found.score_changes.repeated_places.tolist()) == ([1], [1])
    assert SamplingInput.of(seqs).score_changes.started == [(1, [5, 6, 7], 3)]  # another beam's tokens may be its own


def test_released_entries_get_the_next_block():
    assert known_ids([None, None, 4, 7]) == [4, 4, 4, 7]
    assert known_ids([None, 4, None, 7]) == [4, 4, 7, 7]
    assert known_ids([3]) == [3]
    assert known_ids([]) == []


def test_input_ids_are_those_after_the_computed_ones_with_drafts_and_without_pending_ones():
    chunk, drafted, pending = sequence((1, 2, 3, 4, 5)), sequence((6, 7, 8)), sequence((9,))
    chunk.num_computed_tokens, drafted.num_computed_tokens, pending.num_computed_tokens = 1, 2, 1
    drafted.draft = Draft([20, 21], "answers")
    work = ScheduledStep(seqs=[chunk, drafted, pending], num_new_tokens=[2, 3, 1])
    assert _input_ids(work).tolist() == [2, 3, 8, 20, 21, 0]


def test_what_is_in_the_cache_is_not_written_again():
    behind, cached = sequence((1, 2, 3, 4, 5), row=0), sequence((6, 7), row=1)
    behind.block_table, behind.num_computed_tokens = [4, 5, 6], 4
    behind.state, cached.state = HeldSlots(write=0, num_behind=2), HeldSlots(write=1)
    cached.block_table, cached.num_computed_tokens, cached.num_cached_tokens = [3], 1, 2
    work = ScheduledStep([behind, cached], [1, 1], changed=[behind, cached], num_behind=2)
    step, sampled = StepBuilder(Limits(block_size=2, max_num_seqs=2, max_model_len=8)).build(work)
    assert (step.input_ids.tolist(), step.positions.tolist()) == ([3, 4, 5, 7], [2, 3, 4, 1])
    assert (step.slots.tolist(), step.num_tokens.tolist()) == ([[-1, -1, 12, -1]], [5, 2])
    assert (step.logits_rows.tolist(), sampled) == ([2, 3], [behind, cached])


@pytest.mark.parametrize(
    ("done", "count", "rows", "token_ids"),
    [(0, 3, [0, 1, 2], [2, 3, 4]), (3, 2, [0], [5]), (0, 5, [0, 1, 2, 3], [2, 3, 4, 5]), (4, 1, None, None)],
)
def test_each_prompt_token_but_the_first_is_scored_at_the_row_of_the_one_before(done, count, rows, token_ids):
    other, seq = sequence((7, 8)), sequence((1, 2, 3, 4, 5), prompt_logprobs=2)
    further = sequence((1, 2, 3, 4, 5), prompt_logprobs=2, sample_index=1)
    arrays = [np.array(each) for each in ([0, done, 0], [2, count, 5], [0, 2, 2 + count])]
    sampled = np.array([1, 1 + count])
    found = prompt_rows([other, seq, further], *arrays, sampled)
    if rows is None:
        assert found is None
        return
    both, scored = found
    wanted = [2 + row for row in rows]
    assert both.tolist() == sorted({1, 1 + count, *wanted})
    assert both[scored.sampled].tolist() == [1, 1 + count]
    assert both[scored.scored][scored.places].tolist() == wanted
    assert scored.token_ids.tolist() == token_ids
    [piece] = scored.pieces
    assert (piece.seq_id, piece.first, piece.num_tokens, piece.num_top) == (9, done + 1, len(rows), 2)
    assert scored.num_top == 2
