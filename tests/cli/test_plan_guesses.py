"""What `plan` says about guessing tokens ahead."""

from dataclasses import replace

import pytest
from mtp_models import model_with_head

from pagedcli.cli.plan_guesses import guess_note
from pagedcli.config import EngineConfig
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide, model_folder
from pagedcli.planning.head_gain import HeadGuesses
from pagedcli.planning.machine import this_machine
from pagedcli.planning.step_time import StepTime
from pagedcli.simulation.forecast import Forecast

FLAT = StepTime(
    prompts=((1, 0.01), (512, 0.5)), decodes=((1, 0.01), (64, 0.02)), attended_by_prompts_s=0, attended_by_decodes_s=0
)
STEEP = replace(FLAT, decodes=((1, 0.01), (2, 0.015), (64, 0.3)))


def note(step_time=FLAT, *, knows_answers=True, seconds=(6.0, 2.0), of_head=None, **config):
    config = EngineConfig(device="cpu", **config)
    decision = decide(config, read_spec(model_folder(config)), this_machine())
    counts = dict.fromkeys(Forecast.__dataclass_fields__, 0)
    off, auto = (Forecast(**{**counts, "seconds": each}) for each in seconds)
    return guess_note(
        decision, step_time, auto if config.speculation == "auto" else off, knows_answers=knows_answers,
        forecast=lambda plan: {"off": off, "auto": auto}[plan.speculation], of_head=of_head,
    )  # fmt: skip


@pytest.mark.parametrize("speculation", ["off", "ngram", "auto"])
def test_with_the_answers_of_a_run_it_says_what_guesses_save(speculation):
    assert note(speculation=speculation) == "--speculation auto: 2.0 s, 3.00 times as fast, by these answers"


@pytest.mark.parametrize("speculation", ["off", "mtp"])
def test_with_the_guesses_of_a_head_in_a_run_it_says_what_they_save(speculation, tmp_path):
    config = EngineConfig(
        model=str(model_with_head("glm4-moe", tmp_path / "model")), device="cpu", speculation=speculation
    )
    decision = decide(config, read_spec(model_folder(config)), this_machine())
    counts, gains = dict.fromkeys(Forecast.__dataclass_fields__, 0), []

    def forecast(plan, *, decode_gain=None):
        assert plan.speculation == "off"
        gains.append(decode_gain and decode_gain(1))
        return Forecast(**{**counts, "seconds": 6.0 if decode_gain is None else 4.0})

    of_head = HeadGuesses("run.json", 80, 60)
    found = guess_note(decision, FLAT, forecast(replace(decision.expected_plan, speculation="off")),
                       knows_answers=False, forecast=forecast, of_head=of_head)  # fmt: skip
    share = "if 75.0 % of the head's guesses are right as in run.json"
    assert found == f"--speculation auto: 4.0 s, 1.50 times as fast, {share}"
    assert gains[1] > 1.1
    assert note(of_head=of_head) == "--guesses run.json: the model has no MTP head that --speculation auto would use"


def test_where_rows_are_dear_it_says_so():
    assert note(STEEP) == "three rows take 1.96 times as long as one: --speculation auto guesses no tokens here"


def test_it_says_nothing_where_nothing_is_known():
    assert note(knows_answers=False) is None
    assert note(None) is None
    assert note(attention_backend="sdpa") is None


def test_where_bits_are_not_promised_it_says_why_if_it_was_asked_for():
    assert note(attention_backend="sdpa", speculation="auto").startswith(
        "speculation: off, as no equal bits are promised"
    )
