"""When `auto` lets the model's head guess: where its guesses pay for its time, and hardly ever where they do not."""

import random
from functools import partial

import pytest
from oracle import Oracle
from test_drafting import Clock, steep, two_passes

from pagedcli.core.drafting import GuessesThatPay, Room, _HeadTimes
from pagedcli.core.drafts import HeadDrafter
from pagedcli.core.sequence import Sequence
from pagedcli.sampling_params import SamplingParams

MS = 1_000_000


def cheap(num_seqs, depth):
    """A head of a large model, in ms."""
    return depth * (1.5 + 0.05 * num_seqs)


def dear(num_seqs, depth):
    """A head of a small model with a large vocabulary."""
    return depth * (12 + 0.3 * num_seqs)


class Run:
    """Sequences whose answers are ones, from the first token to the last, several at once; before each a prompt that
    takes `prompt_ms` without the head. `right`: how often a token that the head guesses is right, by the place of its
    step in the run; `texts`: how often one from texts is."""

    def __init__(self, cost, head_cost, right, *, num_seqs=1, length=240, num_rounds=1, prompt_ms=0.0, texts=0.0,
                 has_head=True, guesses=True, seed=0):  # fmt: skip
        self.clock, self.random = Clock(), random.Random(seed)
        self.cost, self.head_cost, self.right = cost, head_cost, right
        self.num_steps = self.num_head_steps = self.num_right = 0
        self.head_steps = []
        answers = {(str(i), 0): [1] * length for i in range(num_seqs * num_rounds)} if texts else {}
        head = HeadDrafter(one_more=False) if has_head else None
        drafting = GuessesThatPay(Oracle(answers, wrong=1 - texts), clock_ns=self.clock, head=head)
        self.drafting = drafting if guesses else None
        for first in range(0, num_seqs * num_rounds, num_seqs):
            seqs = [self.sequence(i, length) for i in range(first, first + num_seqs)]
            for seq in seqs if prompt_ms else ():
                self.prompt(seq, prompt_ms)
            while seqs:
                self.step(seqs)
                seqs = [seq for seq in seqs if seq.finish_reason is None]
        self.seconds = self.clock.now_ns / 1e9

    def sequence(self, seq_id, length):
        seq = Sequence(seq_id, str(seq_id), [1], SamplingParams(max_tokens=length), max_new_tokens=length)
        seq.token_ids.append(1)
        seq.num_computed_tokens = 1
        return seq

    def prompt(self, seq, took_ms):
        head_ns, drafting = 0, self.drafting
        if drafting is not None:
            assert drafting.choose([seq], Room(512, chunk_size=512, only_decodes=False)) == []
            if (counts := drafting.ahead([seq], lambda: [0])) is not None:
                assert counts == [0]
                head_ns = round(MS * took_ms / 24)
        took_ns = round(MS * took_ms) + 2 * head_ns
        self.clock.now_ns += took_ns
        if drafting is not None:
            drafting.step_took(took_ns, head_ns)

    def step(self, seqs):
        drafting, clock, chosen, counts = self.drafting, self.clock, [], None
        start_ns = clock.now_ns
        if drafting is not None:
            chosen = drafting.choose(seqs, Room(512, chunk_size=512))
            head = drafting.head
            most = partial(list, map(head.num_ahead, seqs)) if head is not None else None
            counts = drafting.ahead(seqs, most) if head is not None else None
        num_drafted = sum(len(draft.token_ids) for _, draft in chosen)
        clock.now_ns += round(MS * self.cost(len(seqs) + num_drafted))
        head_ns = 0
        if counts is not None:
            head_ns = round(MS * self.head_cost(len(seqs), max(1, *counts, 1)))
            clock.now_ns += head_ns
            self.num_head_steps += 1
            self.head_steps.append(self.num_steps)
        self.num_steps += 1
        for place, draft in chosen:
            num_right = next((i for i, token in enumerate(draft.token_ids) if token != 1), len(draft.token_ids))
            seqs[place].token_ids += [1] * num_right
            self.num_right += num_right
            drafting.checked(seqs[place], draft.source, len(draft.token_ids), num_right)
        for place, seq in enumerate(seqs):
            seq.token_ids.append(1)
            seq.num_computed_tokens = len(seq.token_ids) - 1
            seq.ahead = () if counts is None else [int(self.guesses_right()) for _ in range(counts[place])]
            assert seq.num_output_tokens <= seq.max_new_tokens
            if seq.num_output_tokens == seq.max_new_tokens:
                seq.finish_reason = "length"
                if drafting is not None:
                    drafting.ended(seq)
        if drafting is not None:
            drafting.step_took(clock.now_ns - start_ns, head_ns)

    def guesses_right(self):
        right = self.right(self.num_steps) if callable(self.right) else self.right
        return self.random.random() < right


def gain(cost, head_cost, right, **options):
    """The speed with `auto` over that without guesses, and the run."""
    run = Run(cost, head_cost, right, **options)
    return Run(cost, head_cost, right, guesses=False, **options).seconds / run.seconds, run


@pytest.mark.parametrize("num_seqs", [1, 4, 32])
@pytest.mark.parametrize("right", [0, 0.3, 0.6])
@pytest.mark.parametrize("head_cost", [cheap, dear])
def test_it_never_loses(head_cost, right, num_seqs):
    assert gain(steep, head_cost, right, num_seqs=num_seqs)[0] >= 0.985


@pytest.mark.parametrize(("head_cost", "right", "num_seqs", "least"), [
    (cheap, 0.9, 1, 2.0), (cheap, 0.7, 1, 1.3), (cheap, 0.9, 4, 1.2), (dear, 0.9, 1, 1.1),
])  # fmt: skip
def test_right_guesses_make_it_faster(head_cost, right, num_seqs, least):
    faster, found = gain(steep, head_cost, right, num_seqs=num_seqs)
    assert faster >= least
    assert found.num_head_steps > found.num_steps / 3


def test_several_rows_get_a_guess_each_although_one_guess_would_not_pay():
    faster, found = gain(two_passes, dear, 0.9, num_seqs=8)
    assert faster >= 1.25
    assert found.num_head_steps > found.num_steps / 3


@pytest.mark.parametrize(("head_cost", "right", "num_seqs"), [(cheap, 0.0, 1), (dear, 0.5, 4), (cheap, 0.5, 32)])
def test_where_it_does_not_pay_it_is_tried_rarely(head_cost, right, num_seqs):
    found = gain(steep, head_cost, right, num_seqs=num_seqs)[1]
    assert 0 < found.num_head_steps < 0.08 * found.num_steps


def test_once_its_guesses_have_become_right_it_stays_on():
    found = gain(two_passes, cheap, lambda step: 0.8 * (step >= 1500), length=3000)[1]
    assert sum(step < 1500 for step in found.head_steps) < 0.08 * 1500
    assert sum(1500 <= step < 1700 for step in found.head_steps) > 140


@pytest.mark.parametrize("prompt_ms", [100, 8000])
@pytest.mark.parametrize("right", [0.0, 0.9])
def test_the_time_that_it_takes_of_prompts_counts(right, prompt_ms):
    faster, found = gain(two_passes, dear, right, length=10, num_rounds=40, prompt_ms=prompt_ms)
    assert faster >= 0.99
    assert found.num_right or not right


@pytest.mark.parametrize("texts", [0.5, 0.95])
@pytest.mark.parametrize("right", [0.0, 0.8])
def test_texts_and_the_head_together_are_as_fast_as_the_better_of_both(texts, right):
    options = {"length": 600, "texts": texts}
    of_texts = gain(two_passes, cheap, right, has_head=False, **options)[0]
    of_head = gain(two_passes, cheap, right, length=600)[0]
    assert gain(two_passes, cheap, right, **options)[0] >= 0.98 * max(of_texts, min(of_head, 2.2))


def test_before_it_has_run_and_between_cases_its_time_is_estimated():
    times = _HeadTimes()
    assert times.of(2, 3, 100) == 75  # a quarter of a step for each token
    times.add(2, 2, 40)
    assert [times.of(2, depth, 100) for depth in (1, 2, 4)] == [40, 40, 80]
    times.add(9, 1, 30)
    assert [times.of(num_seqs, 1, 100) for num_seqs in (4, 8, 20)] == [40, 30, 30]
    for took_ns in (10, 10, 90):
        times.add(9, 1, took_ns)
    assert times.of(9, 1, 100) == 10
