"""The real model: `pagedcli generate` reproduces the published greedy text, whatever the pool and the neighbours."""

import json

import pytest
from conftest import shared_data
from quick import slow_but
from typer.testing import CliRunner

from pagedcli.cli.main import app

NUM_TOKENS = 256
OTHERS = [f"One day, {name} went to the {place}." for name in ("Lily", "Tom", "Ben", "Mia") for place in "abcdefgh"][
    :31
]


@pytest.fixture(scope="module")
def model():
    return shared_data("stories260k")


@pytest.fixture(scope="module")
def published(model):
    return (model / "expected_greedy_256_tokens.txt").read_text(encoding="utf-8")


def generate(tmp_path, model, prompts, *arguments):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    flags = ["-m", str(model), "--dtype", "float32", "--max-tokens", str(NUM_TOKENS), "--output-token-ids", *arguments]
    result = CliRunner().invoke(app, ["generate", str(path), *flags])
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()], result.stderr


@pytest.mark.slow_cases("large-1-256")
@pytest.mark.bits
# 256 new tokens need 256 slots: BOS and all but the last one
@pytest.mark.parametrize(("block_size", "barely_enough"), [(1, 256), (16, 16), (256, 1)])
@pytest.mark.parametrize("pool", ["large", "barely"])
def test_the_published_text_at_every_block_and_pool_size(tmp_path, model, published, block_size, barely_enough, pool):
    flags = ["--block-size", str(block_size)]
    if pool == "barely":
        flags += ["--num-kvcache-blocks", str(barely_enough)]
    (row,), _ = generate(tmp_path, model, [[1]], *flags)
    assert row["text"] == published
    assert len(row["token_ids"]) == NUM_TOKENS


@pytest.mark.long
@pytest.mark.bits
@pytest.mark.parametrize("place", slow_but((17,), (0, 17, 31)))
def test_the_published_text_among_31_other_prompts(tmp_path, model, published, place):
    prompts = [*OTHERS[:place], [1], *OTHERS[place:]]
    # a pool for a few of them: the others make it wait, and preempt it
    rows, said = generate(tmp_path, model, prompts, "--num-kvcache-blocks", "40")
    assert len(rows) == 32
    assert rows[place]["text"] == published
    assert "preemptions  0" not in said, "the pool is too large to test anything"
