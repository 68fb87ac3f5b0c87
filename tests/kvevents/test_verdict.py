"""The verdict on a cache from its events."""

import json

from cli_harness import pagedcli
from conftest import shared_data
from kv_event_harness import message, removed, stored

from pagedcli.kvevents.capture import CaptureWriter
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.tree import LargerCache, curve
from pagedcli.kvevents.verdict import verdict


def judged(*messages, keep_tokens=False, decode=None):
    watchers = []

    def watch():
        watchers.append(LargerCache())
        return watchers[-1]

    state = KVState(watch=watch, keep_tokens=keep_tokens)
    for number, events in enumerate(messages):
        state.take(message(number, *events), float(number))
    return [each.verdict for each in verdict(state, curve(watchers), decode)]


def test_what_was_evicted_and_stored_again_is_counted_with_the_blocks_that_would_have_kept_it():
    first, second = judged([stored(1, 2, 3, 4)], [removed(4), removed(3)], [stored(3, 4, parent=2)])
    assert first == (
        "33.3 % of the stored blocks (2 of 6) had been evicted before; 2 more blocks would have kept at least 2 of"
        " these."
    )
    assert "to change: give the cache more memory (vLLM: --gpu-memory-utilization" in second


def test_answers_that_are_generated_again_are_counted_apart():
    first, second = judged([stored(1, 2)], [removed(2)], [stored(2, parent=1)])
    assert first == (
        "No block of a prompt was stored again after an eviction; 1 block came back alone, as answers do that are"
        " generated again: a cache saves none of these."
    )
    assert second.endswith("to change: nothing that these events show.")


def test_what_a_larger_cache_would_have_kept_is_said_of_prompts_alone():
    """Two blocks of a prompt come back, and one by itself: the last block of an answer."""
    first, _ = judged(
        [stored(1, 2, 3, 4)], [removed(4), removed(3), removed(2)], [stored(2, 3, parent=1)], [stored(4, parent=3)]
    )
    assert first == (
        "28.6 % of the stored blocks (2 of 7) had been evicted before; 2 more blocks would have kept at least 2 of"
        " these; 1 more block came back alone, as answers do that are generated again: a cache saves none of these."
    )


def test_a_block_after_one_that_came_back_in_the_same_message_is_no_answer():
    again = [stored(3, parent=2), stored(4, parent=3)]
    first, _ = judged([stored(1, 2, 3, 4)], [removed(4), removed(3)], again)
    assert first == (
        "33.3 % of the stored blocks (2 of 6) had been evicted before; 2 more blocks would have kept at least 2 of"
        " these."
    )


def test_a_block_that_came_back_alone_after_the_cache_was_cleared_was_not_evicted():
    first, _ = judged([stored(1, 2)], [{"type": "AllBlocksCleared"}], [stored(1)], [stored(2, parent=1)])
    assert first == "No block of a prompt was stored again after an eviction."


def test_where_prompts_part_is_said_by_hash_or_text():
    events = [stored(1, tokens=[5, 6, 7, 8], block_size=4), stored(2, tokens=[5, 6, 9, 9], block_size=4)]
    assert "Prompts part at token 2, inside a block: block " in judged(events, keep_tokens=True)[1]
    as_text = judged(events, keep_tokens=True, decode=lambda ids: "".join(chr(96 + each) for each in ids))[1]
    assert "'efgh' and 'efii'" in as_text
    assert as_text.endswith("put what differs between prompts after what they share, or use smaller blocks.")
    forks = judged([stored(1, 2), stored(3, parent=2), stored(4, parent=2)])[1]
    assert "part after 2 blocks into 2 ways" in forks


def test_an_empty_stream_is_not_judged():
    assert judged() == ["No block was stored, so there is nothing to judge."]


def test_the_commands_end_in_the_verdict(tmp_path):
    path = tmp_path / "events.jsonl.zst"
    with CaptureWriter(path, ["tcp://host:1"], tokens=True) as writer:
        for number, events in enumerate(([stored(1, 2, 3)], [removed(3), removed(2)], [stored(2, 3, parent=1)])):
            writer.write(message(number, *events), float(number))
    for command in ("explain", "attach"):
        document = json.loads(pagedcli(command, path, "--format", "json").stdout)
        assert list(document)[-1] == "verdict"
        assert document["verdict"][0]["verdict"].startswith("40.0 % of the stored blocks (2 of 5)")
    pagedcli("report", path, "-o", tmp_path / "page.html")
    assert "40.0 % of the stored blocks" in (tmp_path / "page.html").read_text()


def test_the_verdict_on_events_of_a_real_server():
    path = shared_data("vllm_events") / "events.jsonl"
    document = json.loads(pagedcli("explain", path, "--format", "json").stdout)
    first, second = (row["verdict"] for row in document["verdict"])
    assert ("stored again after an eviction" in first) or ("had been evicted before" in first)
    assert "to change: " in second
