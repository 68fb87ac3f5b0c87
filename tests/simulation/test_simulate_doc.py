"""The figures in docs/simulate.md that take no long run: of the trace, of LRU and of the clairvoyant."""

import re
from pathlib import Path

import pytest
from conftest import shared_data
from pagedcli.simulation.sweep import Sweep

from pagedcli.core.eviction import POLICIES
from pagedcli.simulation.caches import PARTS, accesses_of
from pagedcli.simulation.formats import FORMATS, read_traces

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")
ROW = re.compile(r"^ *([\d,]+) +([\d.]+) % +(\S+) +([\d.]+) % +([\d.]+) % +([\d.]+) % +([\d.]+) % +[\d,]+ +\d+$", re.M)


def test_lru_and_the_clairvoyant_are_as_documented():
    trace = read_traces([str(shared_data("mooncake") / "conversation_trace.jsonl")])
    sweep = Sweep(trace, accesses_of(trace, 512))
    rows = ROW.findall(PAGE)
    assert len(rows) == 8
    for pool, share, policy, tokens, _, lru, best in rows:
        num_blocks = int(pool.replace(",", ""))
        assert policy in POLICIES
        assert f"{100 * num_blocks / sweep.accesses.num_unique:.1f}" == share
        assert f"{100 * sweep.curve.hits_at(num_blocks)[1] / sweep.curve.num_tokens:.1f}" == lru
        hits, total = sweep.best(num_blocks)
        assert f"{100 * hits / total:.1f}" == best
        assert float(tokens) <= float(best)
    assert f"{sweep.accesses.num_unique:,}" in PAGE


@pytest.mark.parametrize("name", [*FORMATS, *PARTS, *POLICIES])
def test_every_format_policy_and_part_is_on_the_page(name):
    assert {"policy": "eviction", "in_flight": "in flight"}.get(name, name) in PAGE.lower()
