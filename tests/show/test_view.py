"""What the views print: complete at every size, the same without colour, and safe for a terminal."""

import io

import pytest
from harness.core import Simulation
from rich.console import Console

from pagedcli.events import RequestAdded, RequestRefused, StepFinished
from pagedcli.show.panels import PlainView, block_ids_text
from pagedcli.show.step_tables import print_step_tables
from pagedcli.trace.fold import pool_fold
from pagedcli.trace.state import PoolState
from pagedcli.views.moment import Moment
from pagedcli.views.words import describe


def console(width=80, height=24, **options):
    return Console(file=io.StringIO(), width=width, height=height, _environ={}, **options)


def printed(made):
    return made.file.getvalue()


@pytest.mark.parametrize(
    ("table", "ref_counts", "text"),
    [
        ([], [], ""),
        ([3], [0, 0, 0, 1], "3"),
        ([0, 1, 2, 3], [2, 2, 1, 1], "0×2 1×2 2 3"),
        ([0, 1, 2, 3, 5], [2, 2, 2, 1, 0, 1], "0-2×2 3 5"),
        ([5, 3, 4, 0], [1, 0, 0, 1, 1, 1], "5 3 4 0"),
    ],
)
def test_block_tables_in_short(table, ref_counts, text):
    state = PoolState()
    state.ref_counts = ref_counts
    assert block_ids_text(state, table) == text


@pytest.mark.parametrize("width", range(8, 60, 3))
def test_a_cut_block_table_says_how_many_blocks_are_left_out(width):
    state = PoolState()
    state.ref_counts = [1] * 200
    table = [*range(0, 60, 2), *range(100, 120)]
    text = block_ids_text(state, table, width)
    assert len(text) <= width
    left_out = sum(int(part.strip("…")) for part in text.split() if "…" in part)
    shown = [part for part in text.split() if "…" not in part]
    num_shown = sum(int(p.split("-")[1]) - int(p.split("-")[0]) + 1 if "-" in p else 1 for p in shown)
    assert left_out + num_shown == len(table)


def test_text_from_requests_cannot_steer_the_terminal():
    moment = Moment()
    sim = Simulation(8, 2, emit=pool_fold(moment))
    sim.add([1, 2, 3], 2)
    evil = "\x1b[2J\x1b]0;owned\x07\u202e"
    moment.state.seqs[0].request_id = evil
    out = console(120, 40)
    print_step_tables(moment, out, out.width)
    assert "\x1b" not in printed(out)
    assert "\u202e" not in printed(out)
    moment.state.seqs[0].row_id = evil
    for event in (RequestRefused(evil, "c", evil, evil), RequestAdded(0, evil, 0, 1, 1, False, row_id=evil)):
        assert "\x1b" not in describe(event, 1, moment.state)


def test_events_that_contradict_each_other_end_the_view_not_the_run():
    out = console(100)
    with PlainView(out) as view:
        sim = Simulation(8, 2, emit=view.on_event)
        sim.add([1, 2, 3], 4)
        sim.step()
        view.on_event(StepFinished(77, 1, 0, 0, 0, 0))
        sim.run()
    assert "the view ended early: step_finished: step 77" in printed(out)
