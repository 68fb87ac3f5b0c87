"""What a decode step asks of a GPU is what docs/lab/performance.md says: kernels, operations of torch, uploads."""

import re
from pathlib import Path

import pytest
from harness.engine import FirstEight
from interpreter import interpreted
from model_zoo import tiny_model

from pagedcli.config import EngineConfig
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

pytest.importorskip("triton")
DOC = (Path(__file__).parents[2] / "docs/lab/performance.md").read_text()
NUM_ROWS = 4
KINDS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "repetition penalty": {"temperature": 0.7, "repetition_penalty": 1.05, "top_p": 0.8, "top_k": 20},
    "presence and frequency penalty": {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit bias": {"temperature": 0, "logit_bias": {7: 2.0}},
    "min tokens": {"temperature": 0, "min_tokens": 30, "ignore_eos": False},
    "grammar": {"temperature": 0},
}


def counts_of_a_step(gpu, path, kind="greedy", *, num_rows=NUM_ROWS, **options):
    """Kernels, operations, uploads and steps ahead of one decode step of so many such requests."""
    config = {"max_num_seqs": num_rows, "num_kvcache_blocks": 90, "max_model_len": 128}
    engine = LLMEngine(EngineConfig(model=str(path), device="cuda", **{"dtype": "float32", **config, **options}))
    options = {"ignore_eos": True, "max_tokens": 30, "seed": 1, **KINDS[kind]}
    for number in range(num_rows):
        make = FirstEight if kind == "grammar" else None
        engine.add_request(str(number), [5 + number, 6, 7], SamplingParams(**options), make_guide=make)
    for _ in range(6):
        engine.step()
    before, ahead = gpu.counts.copy(), engine.num_steps_ahead
    engine.step()
    found = gpu.counts - before
    return {**{name: found[name] for name in ("kernels", "operations", "uploads")},
            "ahead": engine.num_steps_ahead - ahead}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("counts"), num_hidden_layers=2)


def documented(title):
    """The table of requests under a heading: {first column: the last number of each other column}."""
    table = DOC.split(f"## {title}\n")[1].split("\n| requests ")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \|(.+)\|$", table, re.M)[1:]
    return {name: [re.findall(r"[\d.]+|yes|no", cell)[-1] for cell in cells.split("|")] for name, cells in rows}


@interpreted
def test_the_counts_of_every_kind_of_request(model, idle_gpu):
    table = documented("What a decode step asks of a GPU")
    assert table.keys() == KINDS.keys()
    for kind, expected in table.items():
        found = counts_of_a_step(idle_gpu, model, kind)
        counts = [str(found[name]) for name in ("kernels", "operations", "uploads")]
        assert [*counts, "yes" if found["ahead"] else "no"] == expected, kind


@interpreted
@pytest.mark.parametrize("kind", ["repetition penalty", "logit bias", "grammar"])
def test_more_rows_ask_for_no_more(model, idle_gpu, kind):
    few, many = (counts_of_a_step(idle_gpu, model, kind, num_rows=rows) for rows in (2, 7))
    assert few == many
