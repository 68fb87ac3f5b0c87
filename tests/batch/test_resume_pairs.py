"""A run that stops in the middle and is resumed gives the rows of one in peace, whatever the two halves use: rows of
every kind, each capability that must not change rows; see tests/runner/test_capability_pairs.py."""

import pytest
from cli_harness import write_rows
from harness.engine import comparable_rows

from pagedcli.batch.job import Job
from pagedcli.batch.journal import journal_path
from pagedcli.cli.session import run_job
from pagedcli.config import load_config

pytestmark = pytest.mark.usefixtures("own_digests")
FLAGS = {
    "engine.dtype": "float32",
    "engine.max_num_seqs": 4,
    "engine.block_size": 4,
    "engine.num_kvcache_blocks": 300,
    "sampling.max_tokens": 8,
    "sampling.temperature": 0.0,
    "sampling.ignore_eos": True,
}
SHARED = "Once upon a time there was a little fox who lived in the woods. "
LINES = [
    fields | {"prompt": f"{SHARED}{place} {number}"}
    for number in range(3)
    for place, fields in enumerate(
        (
            {"max_tokens": 3},
            {"logprobs": 2},
            {"prompt_logprobs": 1, "logprobs": 1},
            {"n": 3, "temperature": 1.0},
            {"beam_width": 3, "n": 2},
            {"regex": "[a-z]{4,9}", "ignore_eos": False},
            {"continuations": ["a dog", "the end"]},
        )
    )
]
LINES += LINES[:3]  # equal rows, for what computes them once
NEUTRAL = {
    "store": {"engine.prefix_store": "store"},
    "preemption": {"engine.num_kvcache_blocks": 40},
    "chunks": {"engine.chunked_prefill_size": 7},
    "blocks of 1": {"engine.block_size": 1, "engine.num_kvcache_blocks": 1200},
    "no cache": {"engine.enable_prefix_caching": False},
    "a step ahead": {"engine.async_scheduling": True},
    "next-use": {"engine.eviction": "next-use"},
    "speculation": {"engine.speculation": "ngram"},
    "prefix order": {"run.reorder": "prefix"},
    "equal rows once": {"run.deduplicate": True},
    "recording": {},
    "int8 KV": {"engine.kv_cache_dtype": "int8"},
    "int8 weights": {"engine.quantization": "int8"},
}
CHANGES_ROWS = ("int8 KV", "int8 weights")


def run(folder, flags, *, name="out.jsonl", num_steps=None, record=False, resume=False):
    steps = iter(range(num_steps or 10**6))
    job = Job(
        load_config(None, FLAGS | flags), str(folder / "in.jsonl"), folder / name, resume=resume,
        record=folder / f"{name}.{resume}.trace.jsonl" if record else None,
    )  # fmt: skip
    return run_job(job, stop_requested=lambda: num_steps is not None and next(steps, None) is None)


@pytest.fixture(scope="module")
def in_peace(tmp_path_factory):
    """The rows of a run that nothing disturbs, by what changes them."""
    made = {}

    def get(name):
        name = name if name in CHANGES_ROWS else "plain"
        if name not in made:
            folder = tmp_path_factory.mktemp("peace")
            write_rows(folder / "in.jsonl", LINES)
            assert run(folder, NEUTRAL.get(name, {})) == 0
            made[name] = comparable_rows(folder / "out.jsonl")
        return made[name]

    return get


@pytest.mark.quick("store-both", "speculation-first", "equal rows once-both")
@pytest.mark.parametrize("half", ["first", "second", "both"])
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_resumed_run_has_the_rows_of_one_in_peace_whatever_its_halves_use(in_peace, name, half, tmp_path):
    write_rows(tmp_path / "in.jsonl", LINES)
    flags = dict(NEUTRAL[name])
    if name == "store":
        flags["engine.prefix_store"] = str(tmp_path / "store")
    plain = {key: value for key, value in flags.items() if name in CHANGES_ROWS}
    first, second = (flags if half in (each, "both") else plain for each in ("first", "second"))
    assert run(tmp_path, first, num_steps=12, record=name == "recording") == 130
    kept = journal_path(tmp_path / "out.jsonl").read_text().count("\n") - 1
    assert 0 < kept < len(LINES)
    assert run(tmp_path, second, resume=True, record=name == "recording") == 0
    assert comparable_rows(tmp_path / "out.jsonl") == in_peace(name)
