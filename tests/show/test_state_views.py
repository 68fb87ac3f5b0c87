"""What the tables, the data, the pages and the stories of a run say about slots and snapshots of recurrent state."""

import io
import json

import pytest
from harness.core import EventList, Simulation

import pagedcli.events as ev
from pagedcli.show.data_files import DataFiles
from pagedcli.show.panels import work_lines
from pagedcli.show.perfetto import export_perfetto
from pagedcli.show.step_tables import step_tables
from pagedcli.trace.fold import fold, pool_fold
from pagedcli.views.explain import explain_trace
from pagedcli.views.moment import Moment
from pagedcli.views.state_slots import slot_counts, slots_line, slots_of, state_slots
from pagedcli.views.step_choice import StepChoice
from pagedcli.views.step_rows import StepRows

SHARED = [7] * 26


def branching_events(num_prompts=2):
    """Prompts that share 26 tokens, computed in chunks of 16 with a snapshot at 16, in blocks of 4."""
    events = []
    sim = Simulation(64, 4, emit=events.append, max_num_batched_tokens=16, num_state_slots=4, checkpoints="16")
    for last in range(1, num_prompts + 1):
        sim.add([*SHARED, *[last] * 4], 3)
        sim.run()
    return events


@pytest.fixture(scope="module")
def events():
    return branching_events()


def moments(events):
    """Each moment after a step was scheduled."""
    moment, kept = Moment(), []
    for event in pool_fold(moment).steps(events):
        if isinstance(event, ev.StepScheduled):
            kept.append(moment.copy())
    return kept


def test_slots_add_up_at_every_step_and_name_their_tokens(events):
    seen = set()
    for moment in moments(events):
        state, counts = moment.state, slot_counts(moment.state)
        assert counts["in_use"] + counts["idle"] + counts["empty"] == counts["total"] == 4
        slots = list(state_slots(state))
        assert len(slots) == counts["in_use"] + counts["idle"]
        assert sum(slot.kind == "snapshot" for slot in slots) == counts["snapshots"]
        for slot in slots:
            assert slot.ref_count == len(slot.seq_ids)
            seen.add((slot.kind, slot.num_tokens, slot.reason))
        [seq] = state.running()
        held = state.slots.held[seq.seq_id]
        assert slots_of(state, seq).startswith(f"slot {held[-1]}")
        if len(held) == 2:
            assert "continues from the snapshot at 16 tokens" in slots_of(state, seq)
    assert ("snapshot", 16, "interval") in seen
    assert {tokens for kind, tokens, _ in seen if kind == "state"} >= {30, 31, 32}


def test_tables_json_and_figures_show_the_slots(events):
    *_, moment = moments(events)
    [table] = [table for table in step_tables(moment) if table.key == "state_slots"]
    assert [row["kind"] for row in table.rows].count("idle snapshot") == 1
    assert any(row["made"] == "step 0 by seq 0: the interval of --checkpoints" for row in table.rows)
    summary = moment.summary()["state_slots"]
    assert summary["total"] == 4
    assert len(summary["slots"]) == len(table.rows)
    assert slots_line(moment.state) in work_lines(moment).plain


def test_the_data_has_a_table_of_slots_only_with_recurrent_state(events, tmp_path):
    for name, given in (("with", events), ("without", [e for e in events if not is_of_slots(e)])):
        files = DataFiles(tmp_path / f"{name}.jsonl")
        fold(given, StepRows(files.write, StepChoice()))
        files.close()
    assert not (tmp_path / "without.slots.jsonl").exists()
    rows = [json.loads(line) for line in (tmp_path / "with.slots.jsonl").read_text().splitlines()]
    expected = [
        (moment.state.step_number, slot.slot_id, slot.num_tokens, list(slot.seq_ids))
        for moment in moments(events)
        for slot in state_slots(moment.state)
    ]
    assert [(row["step"], row["slot_id"], row["num_tokens"], row["seq_ids"]) for row in rows] == expected


def is_of_slots(event):
    return isinstance(
        event,
        ev.StateSlotsMade | ev.CheckpointLookedUp | ev.StateSlotTaken | ev.StateSlotsReleased | ev.CheckpointMade,
    )


def test_explain_counts_the_use_of_each_snapshot():
    explainer, _ = explain_trace(EventList(branching_events(num_prompts=4)))
    first, *others = explainer.snapshots
    assert (first.seq_id, first.num_tokens, first.num_hits, first.tokens_hit) == (0, 16, 3, 48)
    assert all(use.num_hits == 0 for use in others)


def test_a_snapshot_that_made_room_is_known_as_dropped():
    events = []
    sim = Simulation(64, 4, emit=events.append, max_num_batched_tokens=16, num_state_slots=2, checkpoints="16")
    for token in (1, 2, 3):
        sim.add([token] * 30, 3)
        sim.run()
    explainer, _ = explain_trace(EventList(events))
    assert [use.dropped_step is not None for use in explainer.snapshots] == [True, True, False]
    assert [use.seq_id for use in explainer.snapshots] == [0, 1, 2]


def test_perfetto_counts_the_slots(events):
    export_perfetto(EventList(events), file := io.BytesIO())
    counters = [each for each in json.loads(file.getvalue())["traceEvents"] if each["name"] == "state slots"]
    assert all(set(each["args"]) == {"in use", "idle snapshots", "empty"} for each in counters)
    assert {sum(each["args"].values()) for each in counters} == {4}
