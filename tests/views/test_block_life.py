"""Who held a block, what it contained, and its story: always what the fold of the events says."""

import json

import pytest
from cli_harness import pagedcli
from harness.core import EventList, Simulation, simulated, write

from pagedcli.events import StepScheduled
from pagedcli.records import hash_text
from pagedcli.trace.fold import pool_fold
from pagedcli.views.block_life import BlockLife
from pagedcli.views.cache_groups import group_of
from pagedcli.views.rows import block_owners


@pytest.mark.parametrize(("num_blocks", "windows"), [(14, (None,)), (20, (4, None))])
@pytest.mark.parametrize("seed", range(6))
def test_owners_contents_and_groups_are_those_of_the_pool_at_every_step(seed, num_blocks, windows):
    lives = [BlockLife(block_id) for block_id in range(num_blocks)]
    folding = pool_fold(*lives)
    fails = 0.1 * (seed % 2)
    events = simulated(num_blocks=num_blocks, seed=seed, caching=seed != 3, fails=fails, windows=windows)
    for event in folding.steps(EventList(events)):
        if not isinstance(event, StepScheduled):
            continue
        state = folding.state
        owners = block_owners(state)
        for life in lives:
            expected = {(seq.seq_id, place) for seq, place in owners.get(life.block_id, [])}
            assert {(each.seq_id, each.place) for each in life.owners} == expected
            block_hash = state.hashes[life.block_id]
            kept = life.contents[-1] if life.contents and life.contents[-1].until is None else None
            assert (None if kept is None else kept.hash) == hash_text(block_hash)
            held = {each.group for each in [*life.owners, *([] if kept is None else [kept])]}
            assert held == ({group_of(state, life.block_id)} - {None})
    assert any(each.end == "preempted" for life in lives for each in life.tenures)
    assert all(each.until is not None for life in lives for each in life.tenures)


def test_the_tokens_of_a_block_are_those_of_its_sequence():
    lives = [BlockLife(block_id) for block_id in range(20)]
    folding, checked = pool_fold(*lives), 0
    sim = Simulation(20, 2, emit=folding, trace_tokens=True, max_num_seqs=3)
    for number in range(6):
        sim.add([7, 7, 7, 7, number, 3, number], 6, n=1 + number % 2)
    while sim.has_unfinished_requests():
        sim.step()
        state = folding.state
        tokens = {seq.seq_id: seq.token_ids for seq in sim.seqs}
        for block_id, held in block_owners(state).items():
            seq, place = held[0]
            found = lives[block_id].token_ids(state)
            num_tokens = len(found)
            assert list(found) == tokens[seq.seq_id][2 * place : 2 * place + num_tokens]
            checked += num_tokens
    assert checked > 100


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write(tmp_path_factory.mktemp("block") / "run.jsonl", simulated())


def run(*arguments):
    return pagedcli(*arguments, columns=120)


def held(document):
    """Those that hold the block at the end of what is told."""
    return [each for each in document["holders"] if each["until"] is None]


def test_replay_and_explain_tell_the_same_life(trace):
    whole = json.loads(run("explain", trace, "--block", "3", "--format", "json").stdout)
    for step in (2, 9, 15):
        now = json.loads(run("trace", trace, "--block", "3", "--step", step, "--format", "json").stdout)
        contents = [each["hash"] for each in now["contents"]]
        assert contents == [each["hash"] for each in whole["contents"]][: len(contents)]
        owners = [
            (each["seq_id"], each["since"])
            for each in whole["holders"]
            if each["since"] <= step and (each["until"] is None or each["until"] > step)
        ]
        holders = held(now)
        assert set(owners) <= {(each["seq_id"], each["since"]) for each in holders}
        assert len(holders) == now["ref_count"]
    assert run("explain", trace, "--block", "3", "--format", "csv").stdout.startswith("seq_id,label,place,since,until")
    assert "### What it contained" in run("trace", trace, "--block", "3", "--format", "md").stdout


def test_a_block_names_the_group_of_layers_in_each_of_its_lives(tmp_path):
    """A sequence takes blocks of both groups in turn: block 3 is in place 3 at first, of layers that see everything."""
    path = write(tmp_path / "run.jsonl", simulated(num_blocks=28, windows=(4, None)))
    words = "group {}: layer {}, {}, 1 KV head of 1, 8 B of 8 B used"
    narrow, wide = words.format(0, 0, "window 4"), words.format(1, 1, "no window")
    now = run("trace", path, "--block", "3", "--step", "0").stdout
    assert wide in now
    life = run("explain", path, "--block", "3").stdout
    assert narrow in life
    assert wide in life
    whole = json.loads(run("explain", path, "--block", "3", "--format", "json").stdout)
    for kind in ("holders", "contents"):
        assert {each["group"] for each in whole[kind]} == {0, 1}
    assert all(each["place"] % 2 == each["group"] for each in whole["holders"] if each["how"] == "allocated")
    first = json.loads(run("trace", path, "--block", "3", "--step", "0", "--format", "json").stdout)
    assert (first["group"], [each["group"] for each in held(first)]) == (1, [1])
    assert run("explain", path, "--block", "3", "--format", "csv").stdout.startswith("seq_id,label,place,group,since")
    empty = json.loads(run("trace", path, "--block", "27", "--step", "0", "--format", "json").stdout)
    assert (empty["state"], empty["group"]) == ("empty", None)
