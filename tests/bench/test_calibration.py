"""A calibration: which prompts it is made of, and what it finds on a clock of its own."""

from dataclasses import replace

import pytest

from pagedcli.batch.prompts import open_tokenizer
from pagedcli.bench.calibration import _confirmed, _Measurement, _Prompts, _usual, calibrate, calibration_config
from pagedcli.bench.throughput import shape_folder
from pagedcli.config import BUILTIN_MODEL, Config, EngineConfig
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide, model_folder
from pagedcli.planning.machine import this_machine
from pagedcli.planning.step_time import StepWork
from pagedcli.runner.llm_engine import LLMEngine


@pytest.fixture
def engine():
    config = EngineConfig(model=BUILTIN_MODEL, max_num_seqs=16, max_model_len=256, max_num_batched_tokens=64)
    decision = decide(config, read_spec(model_folder(config)), this_machine())
    with LLMEngine(calibration_config(decision)) as engine:
        yield engine


def test_all_prompts_of_a_calibration_differ(engine, monkeypatch):
    """Equal ones generate equal tokens, which the same experts compute: 16 sequences took as long as 8."""
    prompts, add = [], engine.add_request

    def record(request_id, token_ids, params):
        prompts.append((tuple(token_ids), params.max_tokens))
        return add(request_id, token_ids, params)

    monkeypatch.setattr(engine, "add_request", record)
    monkeypatch.setattr("pagedcli.bench.calibration.REPEATS", 0)
    calibrate(engine, budget_s=60)
    long = [tokens for tokens, _ in prompts if len(tokens) > 32]
    assert len(set(long)) == len(long)
    assert max(sum(tokens[:32] == other[:32] for other in long) for tokens in long) >= 16  # they share a beginning


def test_the_first_use_of_blocks_is_measured_apart_and_belongs_to_no_kind_of_step(engine, monkeypatch):
    measurement = _Measurement(engine, 1.0, lambda share: None)
    monkeypatch.setattr(engine, "clock_ns", iter(range(0, 10**12, 10**9)).__next__)
    measurement._provide(20)
    num_blocks = measurement._num_provided
    assert num_blocks >= 20
    assert measurement.first_use_s == 1.0 / num_blocks
    measurement._provide(20)  # they are there
    assert measurement._num_provided == num_blocks
    monkeypatch.undo()
    measurement._run(_Prompts((40,), 1))
    assert all(work.num_first_used == 0 for steps in measurement.steps.values() for work, _ in steps)
    assert 0 < engine.block_manager.pool.num_touched <= measurement._num_provided


def test_of_decodes_only_those_that_follow_their_like_count_and_the_end_of_sequences_counts_apart(engine):
    measurement = _Measurement(engine, 1.0, lambda share: None)
    measurement._run(_Prompts((4,) * 8, 6))  # a prompt step and 5 decodes: the first and the last one do not count
    [decodes] = [steps for steps in measurement.steps.values() if steps[0][0].is_decode]
    assert [work.num_tokens for work, _ in decodes] == [8] * 3
    [(_, seconds, number)] = measurement._ends
    assert number == 8
    measurement.steps = {
        kind: [(work, 0.5 * seconds) for work, _ in steps] for kind, steps in measurement.steps.items()
    }
    assert measurement.end_s == pytest.approx(0.5 * seconds / 8)


def test_a_calibration_of_tight_limits_ends():
    """More sequences than tokens of a step, and hardly room for one long sequence."""
    config = EngineConfig(model=BUILTIN_MODEL, max_num_seqs=64, max_model_len=48, max_num_batched_tokens=64)
    decision = decide(config, read_spec(model_folder(config)), this_machine())
    with LLMEngine(calibration_config(decision)) as engine:
        found = calibrate(engine, budget_s=2)
    assert min(seconds for _, seconds in (*found.prompts, *found.decodes)) > 0


def test_a_disturbed_step_does_not_count():
    work = StepWork(1, 1)
    assert _usual([(work, seconds) for seconds in (1.0, 1.5, 2.0, 9.0)]) == (work, 1.5)
    assert _usual([(work, 3.0), (work, 1.0)]) == (work, 1.0)


def test_without_words_nothing_is_tokenized(engine):
    """A folder without a tokenizer took 0.2 ms for each token of a prompt: a text of no tokens, divided by one."""
    no_words = open_tokenizer(Config(), shape_folder("qwen3-0.6b"))
    builtin = open_tokenizer(Config(), model_folder(EngineConfig(model=BUILTIN_MODEL)))
    without, found = (calibrate(engine, tokenizer, budget_s=0.2) for tokenizer in (no_words, builtin))
    assert without.text_token_s == 0 < found.text_token_s


def test_a_short_run_confirms_quick_steps_within_bounds(engine):
    tokenizer = open_tokenizer(Config(), model_folder(EngineConfig(model=BUILTIN_MODEL)))
    found = calibrate(engine, budget_s=0.2)
    hundredth = _confirmed(engine, tokenizer, found.scaled(0.01), 0.001)
    assert hundredth.decodes == found.scaled(0.01).scaled(1.5).decodes
    flat = replace(found, decodes=((1, 0.004), (2, 1.0)), prompts=((1, 1.0), (2, 1.0)))
    assert _confirmed(engine, tokenizer, flat, 200.0).prompts[0][1] == pytest.approx(1 / 1.5)
    slow = replace(found, decodes=((1, 0.006), (2, 0.006)))
    assert _confirmed(engine, tokenizer, slow, 1.0) is slow
