"""Conditions and searches mean what they say: compared with plain Python on all sequences of a run."""

import pytest
from harness.core import EventList, simulated

from pagedcli.errors import UsageError
from pagedcli.events import RequestPreempted
from pagedcli.trace.fold import fold
from pagedcli.views.conditions import fields, parse
from pagedcli.views.moment import Replay
from pagedcli.views.rows import Now, SequenceRow
from pagedcli.views.search import find


@pytest.fixture(scope="module")
def replay():
    return Replay(EventList(simulated()))


@pytest.fixture(scope="module")
def rows(replay):
    state = replay.go(STEP).state
    return [SequenceRow(seq, Now(state)) for seq in (*state.seqs.values(), *state.finished.values())]


STEP = 20
CASES = {
    "waited>10": lambda seq: seq.num_steps_waited(STEP) > 10,
    "tokens>=5 blocks=0": lambda seq: seq.num_tokens >= 5 and not seq.held_block_ids,
    "state=running": lambda seq: seq.running,
    "state!=waiting": lambda seq: seq.status != "waiting",
    "state=running | waited>15": lambda seq: seq.running or seq.num_steps_waited(STEP) > 15,
    "!state=finished out<2": lambda seq: seq.status != "finished" and seq.num_output_tokens < 2,
    "preempted>0|request=request-3": lambda seq: seq.num_preemptions > 0 or seq.label == "request-3",
    "request-1": lambda seq: "request-1" in seq.label,
    "FINISHED seq<=8": lambda seq: seq.status == "finished" and seq.seq_id <= 8,
    "end=length": lambda seq: seq.finish_reason == "length",
    "[/x]": lambda seq: False,
}


@pytest.mark.parametrize("text", CASES)
def test_a_condition_holds_where_python_says_so(rows, text):
    holds = parse(text)
    assert [holds(row) for row in rows] == [CASES[text](row.seq) for row in rows]


def test_every_field_can_be_asked(rows):
    for name, field in fields().items():
        values = [getattr(row, field.key) or ("" if field.kind == "text" else 0) for row in rows]
        for value in set(values):
            holds = parse(f"{name}={value}")
            assert [holds(row) for row in rows] == [each == value for each in values]


@pytest.mark.parametrize(
    ("text", "words"),
    [("wait>3", "no field 'wait'"), ("tokens>many", "compared with a number"), ("state>waiting", "compare it by =")],
)
def test_what_a_condition_cannot_mean_is_said(text, words):
    with pytest.raises(UsageError, match=words):
        parse(text)


def search(replay, text):
    return find(text, replay.events(), replay.moment.state, replay.seqs)


def test_a_search_finds_sequences_blocks_and_events(replay):
    events = [event for _, event in replay.events()]
    hits = search(replay, "preempt")
    assert len(hits) == sum(isinstance(event, RequestPreempted) for event in events) > 0
    assert all(hit.kind == "event" and hit.words.startswith("preempt seq ") for hit in hits)
    assert [hit.key for hit in search(replay, "request-1") if hit.kind == "seq"] == [
        seq.seq_id for seq in replay.seqs if seq.label == "request-1"
    ], "request-1 is not request-10"
    replay.go(20)
    content = next(each for each in replay.moment.state.hashes if each is not None)
    found = [hit for hit in search(replay, f"{content:016x}") if hit.kind == "block"]
    assert [replay.moment.state.hashes[hit.key] for hit in found] == [content] * len(found)
    assert found
    block = search(replay, "block 3")
    assert block[0].kind == "block"
    assert block[0].key == 3
    assert {hit.kind for hit in block[1:]} == {"event"}
    assert search(replay, "block 99") == search(replay, "nothing like that") == []


def test_a_replay_knows_the_series_and_the_sequences_of_the_whole_run(replay):
    state = fold(EventList(simulated()))
    assert [seq.seq_id for seq in replay.seqs] == sorted([*state.seqs, *state.finished])
    for stop in range(0, replay.last_stop, 7):
        pool, columns = replay.go(stop).state, replay.series.columns
        assert (columns["used"][stop], columns["cached"][stop]) == (pool.num_used_blocks, pool.num_cached_blocks)
