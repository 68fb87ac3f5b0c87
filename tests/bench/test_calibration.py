"""A calibration: which prompts it is made of, and what it finds on a clock of its own."""

import pytest

from pagedcli.batch.prompts import open_tokenizer
from pagedcli.bench.calibration import _fresh_byte_s, _Measurement, calibrate, calibration_config
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
    plan = decide(config, read_spec(model_folder(config)), this_machine())
    with LLMEngine(calibration_config(config, plan)) as engine:
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
    steps = [(StepWork(8, 1, num_chunks=1, num_first_used=first), 0.010 + first * 0.002) for first in (0, 1, 3)]
    measurement = _Measurement(engine, 1.0, lambda share: None)
    measurement.steps = {(0,): steps}
    [(_, seconds)] = measurement.typical(0.002)
    assert seconds == pytest.approx(0.010)
    times = iter([10**9, 3 * 10**9])
    monkeypatch.setattr(engine, "clock_ns", lambda: next(times))
    assert _fresh_byte_s(engine) == 2 / 2**27


def test_without_words_nothing_is_tokenized(engine):
    """A folder without a tokenizer took 0.2 ms for each token of a prompt: a text of no tokens, divided by one."""
    no_words = open_tokenizer(Config(), shape_folder("qwen3-0.6b"))
    builtin = open_tokenizer(Config(), model_folder(EngineConfig(model=BUILTIN_MODEL)))
    without, found = (calibrate(engine, tokenizer, budget_s=0.2) for tokenizer in (no_words, builtin))
    assert without.text_token_s == without.output_token_s == 0
    assert found.text_token_s > 0
    assert without.prompt_token_s < 1e-4
