"""What requests may generate, and which can never be served: at the borders of every limit."""

import pytest

from pagedcli.core.admission import admit, admit_scores, room_for
from pagedcli.core.groups import CacheGroup
from pagedcli.core.limits import Limits
from pagedcli.errors import RequestError
from pagedcli.sampling_params import SamplingParams

WINDOWED = tuple(CacheGroup(window, (layer,), (1, 1), 4) for layer, window in enumerate((8, None)))


def limits(**changes):
    known = {"max_model_len": 40, "max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": 4, "vocab_size": 100}
    return Limits(**known | changes)


def refused(ask, *args, **params):
    """The code of the refusal, and what it says; None: there is none."""
    try:
        ask(*args, *([SamplingParams(**{"max_tokens": 1, **params})] if ask is admit else []))
    except RequestError as error:
        return f"{error.code}: {error.message}"
    return None


@pytest.mark.parametrize(
    ("changes", "num_prompt", "width", "most"),
    [
        ({}, 9, 1, 31),
        ({}, 39, 1, 1),
        ({"num_blocks": 4}, 9, 1, 8),  # 16 tokens are written: the last one is not
        ({"num_blocks": 6}, 9, 2, 8),  # two blocks of the prompt are shared, each beam has two of its own
        ({"num_blocks": 6, "enable_prefix_caching": False}, 9, 2, 4),
        ({"num_blocks": 6, "num_state_slots": 9}, 9, 2, 4),  # states are not shared after a preemption
        ({"num_blocks": 12, "groups": WINDOWED}, 9, 2, 4),  # nor what a window shows
        ({"num_blocks": 7}, 9, 2, 8),
        ({"num_blocks": 8, "max_model_len": 14}, 9, 2, 5),
    ],
)
def test_a_request_may_generate_what_fits_and_not_a_token_more(changes, num_prompt, width, most):
    given, prompt = limits(**changes), [1] * num_prompt
    beams = {"beam_width": width} if width > 1 else {}
    assert room_for(given, num_prompt, width) == most
    assert admit(given, prompt, SamplingParams(max_tokens=None, **beams)) == most
    assert admit(given, prompt, SamplingParams(max_tokens=most, **beams)) == most
    code = "kv_cache_exceeded" if "num_blocks" in changes and "max_model_len" not in changes else "context_length"
    assert refused(admit, given, prompt, max_tokens=most + 1, **beams).startswith(code)


def test_a_prompt_that_leaves_no_room_is_refused():
    assert refused(admit, limits(), []) == "empty_prompt: the prompt has no tokens"
    told = "context_length_exceeded: 40 prompt tokens and 1 to generate are over the model length of 40"
    assert refused(admit, limits(), [1] * 40) == told
    told = "kv_cache_exceeded: needs 5 blocks of 4 tokens, the pool has 4"
    assert refused(admit, limits(num_blocks=4), [1] * 17) == told


@pytest.mark.parametrize("vocab_size", [100, None])
def test_token_ids_are_those_of_the_vocabulary(vocab_size):
    given, known = limits(vocab_size=vocab_size), " (0 to 99)" if vocab_size else ""
    assert refused(admit, given, [0, 99], logit_bias={0: 1.0, 99: -1.0}) is None
    wrong = f"invalid_token_id: token id -1 is not in the vocabulary{known}"
    assert refused(admit, given, [3, -1, -2]) == refused(admit_scores, given, [3], [[4], [5, -1]]) == wrong
    assert refused(admit_scores, given, [3, -1], [[4]]) == wrong
    wrong = f"invalid_token_id: token id 100 is not in the vocabulary{known}" if vocab_size else None
    assert refused(admit, given, [3, 100, 101]) == wrong
    wrong = "invalid_token_id: logit_bias names 100, which is not in the vocabulary" if vocab_size else None
    assert refused(admit, given, [3], logit_bias={3: 1.0, 100: 1.0}) == wrong


def test_the_longest_continuation_has_to_fit_without_its_last_token():
    assert refused(admit_scores, limits(), [1], [[1], []]) == "empty_continuation: continuation 1 has no tokens"
    assert refused(admit_scores, limits(), [1] * 36, [[1], [1] * 5, [1]]) is None
    told = "context_length_exceeded: 36 context tokens and 6 of continuation 1 are over the model length of 40 and 1"
    assert refused(admit_scores, limits(), [1] * 36, [[1], [1] * 6, [1]]) == told
    assert refused(admit_scores, limits(num_blocks=3), [1] * 9, [[1], [1] * 4]) is None
    told = "kv_cache_exceeded: needs 4 blocks of 4 tokens, the pool has 3"
    assert refused(admit_scores, limits(num_blocks=3), [1] * 9, [[1], [1] * 5]) == told


def test_beams_have_to_fit_into_a_step_the_slots_and_the_vocabulary():
    assert refused(admit, limits(), [1], beam_width=4) is None
    told = "invalid_parameter: beam_width is 5, but max_num_seqs is 4"
    assert refused(admit, limits(), [1], beam_width=5) == told
    assert refused(admit, limits(max_num_batched_tokens=3), [1], beam_width=3) is None
    told = "invalid_parameter: beam_width is 4, but max_num_batched_tokens is 3"
    assert refused(admit, limits(max_num_batched_tokens=3), [1], beam_width=4) == told
    assert refused(admit, limits(num_state_slots=4), [1], beam_width=2) is None
    assert refused(admit, limits(num_state_slots=1), [1], beam_width=1) is None
    told = "invalid_parameter: beam_width is 3, which needs 6 slots of recurrent state; there are 5"
    assert refused(admit, limits(num_state_slots=5), [1], beam_width=3) == told
    # each of two beams goes on with one of three tokens, of which two may be ends
    assert refused(admit, limits(vocab_size=6), [1], beam_width=2, stop_token_ids=[2]) is None
    told = "invalid_parameter: beam_width is 2, for a vocabulary of 5 tokens"
    assert refused(admit, limits(vocab_size=5), [1], beam_width=2, stop_token_ids=[2]) == told


def test_limits_say_what_has_to_fit():
    assert limits().table_dimensions == (4, 10)
    assert (limits().most_sampled, limits(max_num_seqs=12).most_sampled) == (9, 12)
    assert (limits().max_in_work, limits().chunk_size, limits(chunked_prefill_size=5).chunk_size) == (8, 8, 5)
    plain, stateful = limits(), limits(state_bytes=8)
    assert (plain.has_states, stateful.has_states, limits(num_state_slots=1).has_states) == (False, True, True)
    for given, slots in ((plain, (None, None, 7)), (stateful, (3, 1, 7))):
        made = [given.with_pool(9, 3), given.with_pool(9), given.with_pool(9, num_state_slots=7)]
        assert tuple(each.num_state_slots for each in made) == slots
        assert [(each.num_blocks, each.max_num_seqs) for each in made] == [(9, 3), (9, 4), (9, 4)]
