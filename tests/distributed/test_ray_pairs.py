"""`generate --ray` and each capability that must not change rows: the rows of one process; see
tests/runner/test_capability_pairs.py, and for what is refused test_parts."""

import json
import sys
from importlib.util import find_spec

import pytest
from cli_harness import pagedcli
from ray_harness import FLAGS, finish, rows, start

if find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install 'pagedcli[ray]'", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")]

SHARED = "Once upon a time there was a little fox who lived in the woods. "
NEUTRAL = {
    "store": ("--prefix-store", "store"),
    "preemption": ("--num-kvcache-blocks", "40", "--block-size", "4"),
    "chunks": ("--chunked-prefill-size", "7"),
    "blocks of 1": ("--block-size", "1", "--num-kvcache-blocks", "1600"),
    "no cache": ("--no-enable-prefix-caching",),
    "a step ahead": ("-C", "ahead.yaml"),
    "next-use": ("--eviction", "next-use"),
    "speculation": ("--speculation", "ngram"),
    "int8 KV": ("--kv-cache-dtype", "int8"),
    "int8 weights": ("--quantization", "int8"),
    "two ranks": ("--tensor-parallel-size", "2"),
}


def write(folder):
    """Rows of every kind."""
    kinds = (
        {"max_tokens": 3},
        {"logprobs": 2},
        {"prompt_logprobs": 1, "logprobs": 1},
        {"n": 3, "temperature": 1.0},
        {"beam_width": 3, "n": 2},
        {"regex": "[a-z]{4,9}"},
        {"continuations": ["a dog", "the end"]},
    )
    lines = [fields | {"prompt": f"{SHARED}{place} {n}"} for n in range(4) for place, fields in enumerate(kinds)]
    (folder / "ahead.yaml").write_text("engine: {async_scheduling: true}")
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("name", NEUTRAL)
def test_two_workers_give_the_rows_of_one_process_whatever_they_use(name, tmp_path):
    write(tmp_path)
    flags = NEUTRAL[name]
    plain = flags if "int8" in name else ()
    pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "single.jsonl", *FLAGS, "--max-tokens", 8, *plain)
    finish(start(tmp_path, "--max-tokens", 8, *flags), tmp_path, expect=0)
    pagedcli("merge", tmp_path / "parts", "-o", tmp_path / "merged.jsonl")
    found, expected = (rows(tmp_path / f"{each}.jsonl") for each in ("merged", "single"))
    if name == "two ranks":  # which promise no bits
        found, expected = ([row.get("text") for row in each] for each in (found, expected))
    assert found == expected
