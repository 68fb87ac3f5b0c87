"""The figures in docs/predict.md that take no long run: of the trace and of the clairvoyant."""

import re
from pathlib import Path

import pytest
from conftest import shared_data

from pagedcli.core.eviction import POLICIES
from pagedcli.simulation.caches import accesses_of, best_hits
from pagedcli.simulation.formats import FORMATS, read_traces

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "predict.md").read_text(encoding="utf-8")
ROW = re.compile(r"^ *([\d,]+) +([\d.]+) % +(\S+) +([\d.]+) % +([\d.]+) % +([\d.]+) % +[\d,]+ +\d+$", re.M)


def test_the_table_of_the_sweep_has_the_bounds_of_the_trace():
    trace = read_traces([str(shared_data("mooncake") / "conversation_trace.jsonl")])
    accesses = accesses_of(trace, 512)
    rows, bounds = ROW.findall(PAGE), {}
    assert len(rows) == 8
    for pool, share, policy, tokens, _, best in rows:
        num_blocks = int(pool.replace(",", ""))
        if num_blocks not in bounds:
            bounds[num_blocks] = best_hits(accesses, num_blocks)
        hits, total = bounds[num_blocks]
        assert policy in POLICIES
        assert f"{100 * num_blocks / accesses.num_unique:.1f}" == share
        assert f"{100 * hits / total:.1f}" == best
        assert float(tokens) <= float(best)
    assert f"{accesses.num_unique:,}" in PAGE


@pytest.mark.parametrize("name", [*FORMATS, *POLICIES])
def test_every_format_and_policy_is_on_the_page(name):
    assert name in PAGE.lower()
