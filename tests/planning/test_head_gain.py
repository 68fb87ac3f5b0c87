"""What the head of a model is expected to save, by an earlier run's guesses."""

import pytest

from pagedcli.errors import UsageError
from pagedcli.models.footprint import Footprint, Weights
from pagedcli.planning.head_gain import HeadGuesses, head_gain, read_head_guesses
from pagedcli.planning.step_time import StepTime

# steps of 1 to 4 tokens take 10 ms, of 8 already 20; a head reads a tenth of the layers, and the output layer
KNOTS = ((1, 0.01), (4, 0.01), (8, 0.02), (64, 0.16))
STEPS = StepTime(prompts=KNOTS, decodes=KNOTS, attended_by_prompts_s=0.0, attended_by_decodes_s=0.0)
NONE = Weights()
SIZES = Footprint(
    layers=Weights(parameters=900, num_bytes=900), experts=NONE, vectors=NONE, embedding=NONE,
    head=Weights(parameters=100, num_bytes=100),
)  # fmt: skip


def gain(num_seqs, right, *, most=64):
    return head_gain(SIZES, 10, STEPS, right, most)(num_seqs)


def test_gains_are_by_hand_those_of_the_best_number_of_guesses():
    head = (900 / 10 + 100) / 1000  # of a step, for each further token
    assert gain(1, 1.0) == pytest.approx(4 / (1 + 3 * head))  # four tokens in a step of 10 ms
    assert gain(1, 0.5) == pytest.approx((1 + 0.5 + 0.25) / (1 + 2 * head))  # a third guess would take more
    assert gain(4, 1.0) == 1.0  # eight tokens take twice as long, and the head on top
    assert gain(1, 0.1) == 1.0  # less than 3 % would be won


def test_guesses_have_room_only_for_what_a_step_samples():
    assert gain(1, 1.0, most=2) == pytest.approx(2 / 1.19)
    assert gain(1, 1.0, most=1) == 1.0


def test_right_guesses_are_read_from_a_summary(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"rows": 3, "guesses": {"mtp": {"drafted": 80, "accepted": 60}}}')
    assert read_head_guesses(path) == HeadGuesses("run.json", 80, 60)
    assert read_head_guesses(path).share == 0.75


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no summary of a run"),
        ('{"rows": 3}', "has no guesses of an MTP head"),
        ('{"guesses": {"answers": {"drafted": 3, "accepted": 1}}}', "has no guesses of an MTP head"),
        ('{"guesses": {"mtp": {"drafted": 0, "accepted": 0}}}', "has no guesses of an MTP head"),
        ('{"guesses": {"mtp": {"drafted": 1, "accepted": 2}}}', "has no guesses of an MTP head"),
        (None, "cannot be read"),
    ],
)
def test_a_summary_without_guesses_of_a_head_is_refused(text, why, tmp_path):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=why):
        read_head_guesses(path)
