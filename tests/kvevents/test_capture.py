"""Recordings: what is read is what was written, and prompts stay out unless they are asked for."""

import json

import msgspec
import pytest
from kv_event_harness import CLEARED, message, read_lookups, record, removed, stored

from pagedcli.answers.why import divergence_text
from pagedcli.errors import TraceError, UsageError
from pagedcli.kvevents.capture import CaptureReader, is_capture
from pagedcli.kvevents.fold import KVState
from pagedcli.show.kv_tables import facts

SECRETS = [424242, "salt-of-a-customer", "session-of-a-customer", 0xABCDEF0123456789]
MESSAGES = [
    message(0, stored(SECRETS[3], 2, tokens=[SECRETS[0], 2, 3, 4], extra_keys=[["salt-of-a-customer"], None])),
    message(1, stored(3, parent=2, tokens=[7, 8], session_id=SECRETS[2]), removed(2), {"type": "New", "x": SECRETS[1]}),
    message(2, ["BlockStored", [2], SECRETS[3], [3, 4], 2, None, "GPU", None, None, 0], ["New", SECRETS[1]], CLEARED),
    [b"kv", (3).to_bytes(8, "big"), b"\xc1" + b"salt-of-a-customer"],
]


def state_of(rows, **options):
    state = KVState(["x"], **options)
    for frames, time_s, source in rows:
        state.take(frames, time_s, source)
    return state


@pytest.mark.parametrize("name", ["events.jsonl", "events.jsonl.zst"])
def test_with_tokens_the_frames_come_back_as_they_were(tmp_path, name):
    path = record(tmp_path / name, MESSAGES, tokens=True)
    reader = CaptureReader(path)
    assert [(frames, time_s) for frames, time_s, _ in reader] == [(m, float(t)) for t, m in enumerate(MESSAGES)]
    assert reader.sources == ["tcp://host:1"]
    assert is_capture(path)


def test_without_tokens_every_count_is_the_same(tmp_path):
    live = state_of((frames, float(time_s), 0) for time_s, frames in enumerate(MESSAGES))
    recorded = state_of(CaptureReader(record(tmp_path / "events.jsonl", MESSAGES, tokens=False)))
    expected, found = facts(live), facts(recorded)
    assert {**expected, "notes": len(expected["notes"])} == {**found, "notes": len(found["notes"])}


def test_without_tokens_nothing_private_is_in_the_file(tmp_path):
    frames = [
        b"".join(f for f in frames)
        for frames, _, _ in CaptureReader(record(tmp_path / "e.jsonl", MESSAGES, tokens=False))
    ]
    everything = b"".join(frames)
    for secret in SECRETS:
        encoded = secret.encode() if isinstance(secret, str) else msgspec.msgpack.encode(secret)
        assert encoded not in everything, secret


def test_without_tokens_topics_are_told_apart_and_not_named(tmp_path):
    topics = [b"customer-1", b"customer-2", b"customer-1", b""]
    messages = [message(number, stored(number), topic=topic) for number, topic in enumerate(topics)]
    messages += [
        [b"customer-3", b"customer-4", *message(9, stored(9), topic=b"customer-5")],
        [b"customer-6", b"customer-number", b"\xc1"], [b"customer-7"] * 9,
    ]  # fmt: skip
    path = record(tmp_path / "e.jsonl", messages, tokens=False)
    assert not [frames for frames, _, _ in CaptureReader(path) if b"customer" in b"".join(frames)]
    live, recorded = (
        state_of((frames, 0.0, 0) for frames in rows) for rows in (messages, (r[0] for r in CaptureReader(path)))
    )
    assert len(recorded.publishers) == len(live.publishers) == 4
    assert (recorded.num_malformed, recorded.num_batches) == (live.num_malformed, live.num_batches) == (2, 5)


def test_without_tokens_prompts_still_diverge_where_they_do(tmp_path):
    twins = [message(0, stored(1, tokens=[1, 2, 3, 4], block_size=4), stored(2, tokens=[1, 2, 3, 9], block_size=4),
                     stored(3, parent=1, tokens=[1, 2, 3, 9], block_size=4))]  # fmt: skip
    path = record(tmp_path / "e.jsonl", twins, tokens=False)
    state = state_of(CaptureReader(path), keep_tokens=True)
    _, second = read_lookups(CaptureReader(path)).lookups()
    assert (second.divergence.num_shared_tokens, second.reason) == (3, "shorter_than_block")
    assert divergence_text(second.divergence, None) == "first divergence at token 3 from request 0"
    ids = {tuple(node.tokens[i : i + 8] for i in range(0, 32, 8)) for node in state.trees[0].nodes.values()}
    assert len({block[0] for block in ids}) == 2  # the same token after another parent is another digest


def test_tensorrt_llm_events_keep_their_shape_without_tokens(tmp_path):
    event = {
        "event_id": 3, "window_size": 8, "data": {"type": "stored", "parent_hash": None, "blocks": [
            {"block_hash": 5, "cache_level": 0, "tokens": [{"token_id": SECRETS[0]}, {"token_id": 2}]}]},
    }  # fmt: skip
    path = record(tmp_path / "e.jsonl", [[json.dumps([event]).encode()]], tokens=False)
    ((frames, _, _),) = CaptureReader(path)
    assert str(SECRETS[0]).encode() not in frames[0]
    (tree,) = state_of(CaptureReader(path)).trees
    assert [node.num_tokens for node in tree.resident()] == [2]


def test_a_file_of_tensorrt_llm_events_is_read_line_by_line(tmp_path):
    path = tmp_path / "trt.jsonl"
    path.write_text(
        '{"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [4]}}\n'
        '[{"event_id": 1, "data": {"type": "stored", "parent_hash": null, "blocks": '
        '[{"block_hash": 1, "tokens": [{"token_id": 5}]}]}}]\n'
    )
    assert is_capture(path)
    assert facts(state_of(CaptureReader(path)))["num_unique_blocks"] == 1


def test_a_recording_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path):
    path = record(tmp_path / "e.jsonl", MESSAGES, tokens=True)
    path.write_bytes(path.read_bytes()[:-20])
    reader = CaptureReader(path)
    assert len(list(reader)) == len(MESSAGES) - 1
    assert "cut off" in reader.notes[0]


def test_what_is_no_recording_is_refused(tmp_path):
    for name, content, error in [
        ("a.jsonl", b"", TraceError), ("b.jsonl", b'{"event": "engine_started"}\n', TraceError),
        ("c.jsonl", b'{"kv_events": 99, "pagedcli_version": "9", "time_s": 0, "sources": [], "tokens": 1}', TraceError),
        ("d.txt", b"{}", UsageError),
    ]:  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(error):
            CaptureReader(tmp_path / name)
    path = tmp_path / "e.jsonl"
    path.write_text('{"t": 0, "frames": ["AA=="]}\n{"t": 0, "frames": ["not base64!"]}\n')
    with pytest.raises(TraceError, match=r"e\.jsonl:2"):
        list(CaptureReader(path))


@pytest.mark.parametrize(
    "line",
    [
        b'{"t": 0, "frames": ["\xe1A=="]}',
        b'{"event_id": 1, "data": {"type": "\xd6"}}',
        b'{"t": 0, "frames": ' + b"[" * 100_000,
        b'{"event_id": ' + b"[" * 100_000,
    ],
    ids=["message", "event", "nested message", "nested event"],
)
def test_bytes_that_are_no_json_are_damage_wherever_they_are(line, tmp_path):
    path = tmp_path / "e.jsonl"
    for content, place in ((b'{"t": 0, "frames": ["AA=="]}\n' + line + b"\n", 2), (line + b"\n", 1)):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=rf"e\.jsonl:{place}: "):
            list(CaptureReader(path))
    path.write_bytes(b'{"kv_events": 1, "pagedcli_version": "\xe1", "time_s": 0, "sources": [], "tokens": true}\n')
    with pytest.raises(TraceError, match=r"e\.jsonl:1: not a recording"):
        CaptureReader(path)
