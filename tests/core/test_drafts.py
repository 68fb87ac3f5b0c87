"""Guessed tokens: whatever they are, every sequence gets the tokens that it gets without. They take what is left."""

import random

import pytest
from harness.core import EventList, EveryGuess, Oracle, Simulation, stop_at
from test_core import same_pool

from pagedcli.core.drafts import MOST_DECODES, STEPS_UNTIL_NEW_COUNT, Drafting, NgramDrafter, within_grammar
from pagedcli.core.limits import MOST_DRAFTED
from pagedcli.core.sequence import Draft, Sequence
from pagedcli.core.snapshots import HeldSlots
from pagedcli.events import BlockEvicted, BlocksFilled, DraftChecked, RequestPreempted, TokensDrafted
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.check import TraceChecker
from pagedcli.trace.fold import fold
from pagedcli.views.whole_run import Findings, WholeRun, finding_lines
from pagedcli.views.words import sequence_story, with_steps

ROOMY = {"max_num_batched_tokens": 128, "max_num_seqs": 64}


def fill(sim, *, num_requests=10, seed=0):
    """Greedy and sampled requests with shared beginnings, several samples, stop strings, salts and minimum lengths."""
    rng = random.Random(seed)
    for number in range(num_requests):
        prompt = [9] * rng.randrange(6) + [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        params = SamplingParams(
            n=1 + (number % 4 == 3), max_tokens=rng.randint(1, 24), temperature=number % 2, seed=number,
            min_tokens=rng.choice([0, 5]) if number % 3 == 0 else 0, stop_token_ids=[4] if number % 3 == 0 else None,
        )  # fmt: skip
        sim.add(
            prompt, params=params, request_id=str(number), cache_salt="a" if number % 5 == 0 else None,
            make_stop_checker=stop_at([3, 3]) if number % 4 == 1 else None,
        )  # fmt: skip
    return sim


def answers(sim):
    return {(seq.request_id, seq.sample_index): seq.output_token_ids for seq in sim.seqs}


@pytest.fixture(scope="module")
def plain():
    return answers(fill(Simulation(400, **ROOMY)).run())


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_of_right_guesses_all_are_accepted_and_of_wrong_ones_none(plain, wrong):
    """In any pool and under any limits see test_core."""
    sim = fill(Simulation(400, drafter=Oracle(plain, wrong=wrong), **ROOMY)).run()
    assert answers(sim) == plain
    stats = sim.stats
    assert stats.num_drafted_tokens > 50
    num_ends = len(plain)  # the token that ends a sequence is sampled after a guess, and none of its own
    assert wrong or stats.num_drafted_tokens - num_ends <= stats.num_accepted_tokens
    assert wrong < 1 or not stats.num_accepted_tokens


@pytest.mark.parametrize("chunk", [None, 2])
def test_drafts_leave_rows_of_logits_for_samples_that_start_in_their_step(chunk):
    def run(drafter=None):
        limits = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "chunked_prefill_size": chunk}
        sim = Simulation(400, drafter=drafter, **limits)
        for number in range(9):
            sim.add([number % 3, 1], 30, request_id=str(number))
        for _ in range(3):
            sim.step()
        sim.add([2, 1, 2, 1, 2], 9, n=3, request_id="several")
        return sim.run()

    plain = run()
    sim = run(Oracle(answers(plain)))
    assert answers(sim) == answers(plain)
    assert sim.stats.num_drafted_tokens > 50
    assert max(sim.executor.num_sampled) == sim.limits.most_sampled == 12


def test_right_drafts_save_their_steps():
    plain = Simulation(40)
    plain.add([1, 2, 3], 19, request_id="0")
    plain.run()
    sim = Simulation(40, drafter=Oracle(answers(plain)), max_num_batched_tokens=64)
    sim.add([1, 2, 3], 19, request_id="0")
    sim.run()
    assert sim.executor.steps == [[3], [9], [9]]  # 1 token of the prompt's step, then twice a token and 8 guesses
    assert plain.stats.num_steps == 19


@pytest.mark.parametrize("wrong", [0.0, 0.5, 1.0])
def test_blocks_are_hashed_with_right_tokens_only_and_those_of_wrong_guesses_are_free(plain, wrong):
    hashes = []
    for drafter in (None, Oracle(plain, wrong=wrong)):
        events = []
        fill(Simulation(400, 2, emit=events.append, drafter=drafter, **ROOMY)).run()
        hashes.append({each for event in events if isinstance(event, BlocksFilled) for each in event.hashes})
    assert hashes[0] == hashes[1]
    checked = [event for event in events if isinstance(event, DraftChecked) and event.num_drafted == MOST_DRAFTED]
    assert checked
    assert all(event.block_ids for event in checked if event.num_accepted < MOST_DRAFTED - 2)


@pytest.mark.parametrize("states", [{}, {"num_state_slots": 4}], ids=["", "states"])
def test_drafts_take_only_empty_blocks_and_what_the_step_leaves_of_its_tokens(states):
    known = answers(fill(Simulation(400, **ROOMY), num_requests=20).run())
    events = []
    limits = {"max_num_batched_tokens": 7, "max_num_seqs": 4, "chunked_prefill_size": 5}
    sim = Simulation(18, emit=events.append, trace_tokens=True, drafter=Oracle(known), **limits, **states)
    checker = TraceChecker()
    fill(sim, num_requests=20).run()
    assert answers(sim) == known
    assert all(sum(new) <= 7 and max(new) <= 5 for new in sim.executor.steps)
    counts = [sum(isinstance(event, kind) for event in events) for kind in (RequestPreempted, BlockEvicted)]
    assert min(counts) > 0
    drafted = 0
    for event in events:
        checker(event)
        drafted = drafted or isinstance(event, TokensDrafted)
    assert drafted


def test_tokens_after_the_end_are_dropped_with_their_log_probabilities():
    known, stop = list(range(3, 23)), 8
    params = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[stop], logprobs=0)
    oracle = Oracle({("0", 0): known})
    sim = Simulation(40, drafter=oracle, choose=lambda context, draw: len(context), **ROOMY)
    seq = sim.add([1, 2, 3], params=params, request_id="0")
    sim.run()
    end = known.index(stop) + 1
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == (known[:end], "stop", stop)
    assert [each.token_id for each in seq.logprobs] == known[:end]
    assert sim.num_discarded_tokens > 0


@pytest.mark.parametrize("drafter", [None, Oracle({("0", 0): [1] * 9})], ids=["off", "on"])
def test_where_the_logits_are_no_numbers_the_tokens_before_count_and_the_trace_is_lawful(drafter):
    checker = TraceChecker()
    choose = lambda context, draw: None if len(context) > 6 else 1  # noqa: E731
    sim = Simulation(40, emit=checker, trace_tokens=True, drafter=drafter, choose=choose, **ROOMY)
    seq = sim.add([1, 2, 3], 9, request_id="0")
    sim.run()
    assert (seq.finish_reason, seq.output_token_ids) == ("error", [1] * 4)
    same_pool(sim, checker.state)


def test_beams_are_not_guessed():
    sim = Simulation(100, drafter=Oracle({(str(i), 0): [1] * 9 for i in range(4)}), **ROOMY)
    sim.add([1, 2], request_id="1", params=SamplingParams(max_tokens=6, beam_width=2, n=1, temperature=0))
    sim.run()
    assert sim.stats.num_drafted_tokens == 0
    told = dict(finding_lines(Findings(sim.stats)))["speculation"]
    assert told == "0 of 0 draft tokens accepted; none for 2 sequences with beam search"


class Pattern:
    """A grammar of digits of which each may be any of some: 0 is followed by 1 and 2, say. Counts its calls."""

    def __init__(self, *places, after=()):
        self.places, self.taken = places, list(after)

    @property
    def allowed_tokens(self):
        return bytes([sum(1 << token for token in self.places[len(self.taken)])])

    def accept(self, token_id):
        assert self.allowed_tokens[0] >> token_id & 1, "the grammar does not allow this token"
        self.taken.append(token_id)

    def copy(self):
        return Pattern(*self.places, after=self.taken)

    @classmethod
    def find_allowed(cls, guides):
        return [len(guide.taken) == len(guide.places) for guide in guides]


def test_what_a_grammar_forces_is_guessed_by_itself():
    places = [{0, 1}, {2}, {3}, {4}, {0, 1, 2}, {3}, {3}]
    found = []
    for drafter in (None, Oracle({})):
        sim = Simulation(40, drafter=drafter, max_num_batched_tokens=64)
        seq = sim.add([1, 2, 3], 19, request_id="0", make_guide=lambda: Pattern(*places))
        sim.run()
        found.append((seq.token_ids, seq.finish_reason, seq.guide.taken))
    assert found[0] == found[1]
    # 2 3 4 after the prompt's step, then a 3; the last 3 completes the text and is sampled in any case
    assert sim.executor.steps == [[3], [4], [2]]
    assert (sim.stats.num_drafted_tokens, sim.stats.num_accepted_tokens) == (4, 4)


@pytest.mark.parametrize(
    ("guesses", "draft"),
    [
        ([0, 2, 1], [0, 2, 1, 3]),  # as the grammar, and what it forces after them
        ([0, 3], [0, 2]),  # the grammar forces another token
        ([3], []),  # not allowed
        ([], []),
        ([0, 2, 1, 3, 1, 4], [0, 2, 1, 3, 1]),  # the text is complete after the last one
        ([1, 2, 9], [1, 2]),  # no such token
    ],
)
def test_guesses_end_where_a_grammar_forbids_them(guesses, draft):
    guide = Pattern({0, 1}, {2}, {0, 1}, {3}, {1, 2}, {3, 4})
    seq = Sequence(0, "0", [1], SamplingParams(), max_new_tokens=99, guide=guide)
    found = within_grammar(Oracle({("0", 0): guesses}).draft(seq, 8), seq, 8)
    assert found is None if not draft else found[:2] == (draft, "answers")
    masks = () if found is None else found.masks
    assert [bits[0] for bits in masks] == [0b100, 0b11, 0b1000, 0b110, 0b11000][: len(draft)]
    assert not guide.taken


def test_an_end_token_is_no_guess():
    guide, ends = Pattern({0, 1}, {2, 3}, {1}), frozenset([3])
    seq = Sequence(0, "0", [1], SamplingParams(), max_new_tokens=99, guide=guide, eos_token_ids=ends)
    assert within_grammar(Oracle({("0", 0): [0, 3]}).draft(seq, 8), seq, 8)[:2] == ([0], "answers")


def test_a_token_that_a_grammar_leaves_no_choice_about_is_its_guess():
    seq = Sequence(0, "0", [1], SamplingParams(), max_new_tokens=99, guide=Pattern({2}, {0, 1}, {3}))
    assert within_grammar(NgramDrafter().draft(seq, 8), seq, 8)[:2] == ([2], "grammar")


def test_the_views_count_what_the_engine_counts(plain):
    events = []
    sim = Simulation(400, 4, emit=events.append, trace_tokens=True, drafter=Oracle(plain, wrong=0.3), **ROOMY)
    fill(sim).run()
    run = WholeRun()
    state = fold(EventList(events), run)
    facts = run.findings(state).facts
    names = ("num_drafted_tokens", "num_accepted_tokens", "num_generated_tokens", "num_computed_tokens", "waste_sum")
    assert {name: getattr(facts, name) for name in names} == {name: getattr(sim.stats, name) for name in names}
    num_drafted, num_right = facts.num_drafted_tokens, facts.num_accepted_tokens
    right = f"{num_right} of {num_drafted} draft tokens accepted: {num_right} of {num_drafted} from finished answers"
    assert ("speculation", right) in finding_lines(run.findings(state))
    assert sum(run.series.columns["sampled"]) == sim.stats.num_generated_tokens
    longest = max(sim.seqs, key=lambda seq: len(seq.token_ids))
    story = sequence_story(longest.seq_id, with_steps(events), state)
    assert sum("draft token" in words for _, words in story) == 1
    assert not any("compute 9 tokens" in words for _, words in story)


# ---------------------------------------------------------------------- which steps guess


def decoding(seq_id=0, *, num_output=1, most=20):
    seq = Sequence(seq_id, str(seq_id), [1], SamplingParams(max_tokens=most), max_new_tokens=most)
    seq.token_ids += [1] * num_output
    seq.num_computed_tokens = num_output
    return seq


def test_a_guess_leaves_room_for_the_token_of_the_step():
    def drafted(seq, chunk_size):
        chosen = EveryGuess(Oracle({("0", 0): [1] * 20})).choose(0, [seq], 99, chunk_size)
        return sum(len(draft.token_ids) for _, draft in chosen)

    assert [drafted(decoding(num_output=each), 99) for each in (1, 11, 12, 18, 19)] == [8, 8, 7, 1, 0]
    assert drafted(decoding(), 5) == 4
    behind = decoding()
    behind.state = HeldSlots(num_behind=2)
    assert drafted(behind, 5) == 2


def test_guesses_are_cut_to_the_budget_of_the_step():
    drafting = EveryGuess(Oracle({(str(i), 0): [1] * 20 for i in range(3)}))
    for budget, counts in [(20, [8, 8, 4]), (16, [8, 8]), (3, [3]), (0, []), (-2, [])]:
        chosen = drafting.choose(0, [decoding(i) for i in range(3)], budget, 99)
        assert [(place, len(draft.token_ids)) for place, draft in chosen] == list(enumerate(counts))


def test_few_sequences_guess_while_half_of_the_last_guesses_were_right_and_anew_after_a_while():
    drafting, seq = Drafting(Oracle({("0", 0): [1] * 20})), decoding()
    assert [drafting.is_due(0, each) for each in (1, MOST_DECODES, MOST_DECODES + 1)] == [True, True, False]
    found = []
    for num_right in (8, 8, 7, *[0] * 8, 1, 1):  # of 8 guesses: those after a wrong one do not count
        assert drafting.choose(4, [seq], 8, 99)
        drafting.checked(seq, 8, num_right)
        found.append(drafting.is_due(5, 1))
    assert found == [True] * 13  # 23 right ones and 9 wrong ones, then 21 of the last 32
    for num_right in [0] * 6:
        drafting.checked(seq, 8, num_right)
        found.append(drafting.is_due(5, 1))
    assert found[13:] == [True] * 5 + [False]  # 16, then 15 of 32
    again = 4 + STEPS_UNTIL_NEW_COUNT
    assert [drafting.is_due(each, 1) for each in (again, again + 1)] == [False, True]
    drafting.choose(again + 1, [seq], 8, 99)
    drafting.checked(seq, 8, 0)
    assert drafting.is_due(again + 2, 1)


# ---------------------------------------------------------------------- from the text


def sequence(token_ids, *, num_prompt=1, seq_id=0, salt=None):
    seq = Sequence(
        seq_id, str(seq_id), token_ids[:num_prompt], SamplingParams(max_tokens=99), max_new_tokens=99, cache_salt=salt
    )
    seq.token_ids += token_ids[num_prompt:]
    return seq


def guessed(drafter, seq, most):
    draft = drafter.draft(seq, most)
    return [] if draft is None else draft.token_ids


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 7, 8, 1, 2], [7, 8, 1, 2]),
        ([5, 5, 5], [5, 5, 5, 5]),  # the text repeats itself
        ([1, 2, 3, 4, 9, 2, 3, 4, 8, 1, 2, 3, 4], [9, 2, 3, 4]),  # a run of four decides before one of two
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_a_draft_is_what_followed_the_last_tokens_before(text, draft):
    drafter, seq = NgramDrafter(), sequence(text)
    drafter.checked(seq, 7)
    assert guessed(drafter, seq, 4) == draft


def test_finished_answers_are_drafted_from_unless_a_salt_keeps_them_apart():
    drafter = NgramDrafter()
    for seq_id, salt, token in ((0, None, 10), (1, "a", 20)):
        seq = sequence([1, token, token + 1, token + 2, token + 3], seq_id=seq_id, salt=salt)
        seq.finish_reason = "stop"
        drafter.ended(seq)
    assert drafter.draft(sequence([5, 10, 11], seq_id=2), 2) == Draft([12, 13], "answers")
    assert guessed(drafter, sequence([5, 20, 21], seq_id=3), 2) == []
    assert guessed(drafter, sequence([5, 10, 11], seq_id=4, salt="b"), 2) == []


def answered(drafter, *answers):
    for number, answer in enumerate(answers):
        seq = sequence(answer, seq_id=100 + number)
        seq.finish_reason = "length"
        drafter.ended(seq)


def drafted(drafter, *runs, most=2):
    return [guessed(drafter, sequence([99, *run], seq_id=7), most) for run in runs]


def test_the_newest_answers_are_remembered_and_one_that_is_longer_than_all():
    drafter = NgramDrafter(most_remembered=10)
    answered(drafter, list(range(50, 66)))
    assert drafted(drafter, (50, 51)) == [[52, 53]]
    drafter = NgramDrafter(most_remembered=10)
    answered(drafter, [1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34])
    assert drafted(drafter, (1, 2), (11, 12), (21, 22), (31, 32)) == [[], [], [23, 24], [33, 34]]
    assert (drafter._num_unread, len(drafter._unread)) == (0, 0)


def test_a_draft_is_one_token_longer_than_what_was_right_of_the_last_one():
    drafter, seq = NgramDrafter(), sequence([5] * 9)
    lengths = []
    for num_accepted in (3, 4, 5, 6, 7, 8, 0, 0, 1):
        lengths.append(len(guessed(drafter, seq, MOST_DRAFTED)))
        drafter.checked(seq, num_accepted)
    assert lengths == [3, 4, 5, 6, 7, 8, 8, 1, 1]


def test_a_draft_grows_with_its_text():
    drafter, seq = NgramDrafter(), sequence([1, 2, 3])
    assert guessed(drafter, seq, 3) == []
    seq.token_ids += [1, 2]
    assert drafter.draft(seq, 3) == Draft([3, 1, 2], "own_text")


def test_blocks_that_no_later_token_sees_are_room_for_guesses():
    known = Simulation(9, 4, windows=(7,), **ROOMY)
    known.add(range(9), 9)
    oracle = Oracle(answers(known.run()))
    sim = Simulation(5, 4, windows=(7,), drafter=oracle, enable_prefix_caching=False, **ROOMY)
    seq, draft = sim.add(range(9), 9), oracle.draft
    sim.add(range(6), 3, request_id="has the other two blocks")
    oracle.draft = lambda seq, most: draft(seq, most) if seq.num_computed_tokens == 10 else None
    for _ in range(3):
        sim.step()
    assert sim.executor.steps == [[9, 6], [1, 1], [1 + 5, 1]]  # the third sees nothing of the first block
    assert seq.num_computed_tokens == 16


def test_the_tokens_that_penalties_look_at_are_sent_once_however_many_guesses_were_right():
    def run(**options):
        sim = Simulation(40, **ROOMY, **options)
        sim.add([1, 2], params=SamplingParams(max_tokens=20, temperature=0, repetition_penalty=1.5))
        sample = sim.executor._sample
        sim.executor._sample = lambda contexts, scores, sampling: (
            started.extend(token_ids.copy() for _, token_ids, _ in sampling.changes.started)
            or sample(contexts, scores, sampling)
        )
        return sim.run()

    started = []
    oracle = Oracle(answers(run()), wrong=0.3)
    sim = run(drafter=oracle)
    assert sim.stats.num_accepted_tokens > 3
    assert started == [[1, 2], [1, 2]]  # in the run without guesses, and in that with them
