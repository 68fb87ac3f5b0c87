"""A calibration: which prompts it is made of, and what it finds on a clock of its own."""

import pytest

from pagedcli.batch.prompts import open_tokenizer
from pagedcli.bench.calibration import calibrate, calibration_config
from pagedcli.bench.throughput import shape_folder
from pagedcli.config import BUILTIN_MODEL, Config, EngineConfig
from pagedcli.events import RequestAdded
from pagedcli.models.hub import model_folder
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import this_machine
from pagedcli.runner.llm_engine import LLMEngine


def made(emit=None, **limits):
    """The engine of a calibration."""
    config = EngineConfig(model=BUILTIN_MODEL, max_num_batched_tokens=64, **limits)
    return LLMEngine(
        calibration_config(decide(config, read_spec(model_folder(config)), this_machine())),
        emit=emit,
        trace_tokens=True,
    )


@pytest.fixture
def engine():
    with made(max_num_seqs=16, max_model_len=256) as engine:
        yield engine


def test_all_prompts_of_a_calibration_differ(monkeypatch):
    """Equal ones generate equal tokens, which the same experts compute: 16 sequences took as long as 8."""
    events = []
    monkeypatch.setattr("pagedcli.bench.calibration.REPEATS", 0)
    with made(events.append, max_num_seqs=16, max_model_len=256) as engine:
        calibrate(engine, budget_s=60)
    prompts = [event.token_ids for event in events if isinstance(event, RequestAdded)]
    long = [tokens for tokens in prompts if len(tokens) > 32]
    assert long
    assert len(set(long)) == len(long)


@pytest.mark.long
def test_a_calibration_of_tight_limits_ends():
    """More sequences than tokens of a step, and hardly room for one long sequence."""
    with made(max_num_seqs=64, max_model_len=48) as engine:
        found = calibrate(engine, budget_s=2)
    assert min(seconds for _, seconds in (*found.prompts, *found.decodes)) > 0


@pytest.mark.machine
def test_without_words_nothing_is_tokenized(engine):
    """A folder without a tokenizer took 0.2 ms for each token of a prompt: a text of no tokens, divided by one."""
    no_words = open_tokenizer(Config(), shape_folder("qwen3-0.6b"))
    builtin = open_tokenizer(Config(), model_folder(EngineConfig(model=BUILTIN_MODEL)))
    without, found = (calibrate(engine, tokenizer, budget_s=0.2) for tokenizer in (no_words, builtin))
    assert without.prompt_token_s == 0 < found.prompt_token_s
