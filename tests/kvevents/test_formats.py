"""Every format from bytes written out field by field, and bytes that are none."""

import random
import struct
from array import array

import pytest
from kv_event_harness import message, state_of, stored

from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.formats import decode_batch
from pagedcli.kvevents.redact import Redactor
from pagedcli.kvevents.tree import History, Node
from pagedcli.kvevents.wire import (
    END_OF_REPLAY,
    MAX_PAYLOAD_BYTES,
    Cleared,
    Created,
    Frames,
    Moved,
    Placed,
    Removed,
    Stored,
    WireError,
    split_frames,
)

TS = b"\xcb" + struct.pack(">d", 1795265169.5)  # float 64
NIL = b"\xc0"
TWO_BLOCKS = {
    "hashes": [1, 2], "parent": 7, "block_size": 2, "token_ids": array("q", [10, 11, 12, 300]), "medium": "GPU",
    "group": "0", "lora": "sql",
}  # fmt: skip


def text(value):
    return bytes([0xA0 + len(value)]) + value.encode()  # fixstr


MAP_STORED = (
    b"\x8f"  # a map of 15 fields
    + text("type") + text("BlockStored")
    + text("block_hashes") + b"\x92\x01\x02"
    + text("parent_block_hash") + b"\x07"
    + text("token_ids") + b"\x94\x0a\x0b\x0c\xcd\x01\x2c"  # 10, 11, 12, 300
    + text("block_size") + b"\x02"
    + text("lora_id") + b"\x05"
    + text("medium") + text("GPU")
    + text("lora_name") + text("sql")
    + text("extra_keys") + b"\x92" + NIL + b"\x91" + text("salt")
    + text("group_idx") + b"\x00"
    + text("kv_cache_spec_kind") + text("sliding_window")
    + text("kv_cache_spec_sliding_window") + b"\xcd\x04\x00"  # 1024
    + text("locality") + text("LOCAL")
    + text("ownership") + text("OWNED")
    + text("session_id") + text("s-17")
)  # fmt: skip
ARRAY_STORED = (
    b"\x9f"  # an array of 15 values: the type, then the fields in their order
    + text("BlockStored")
    + b"\x92\x01\x02"  # block_hashes
    + b"\x07"  # parent_block_hash
    + b"\x94\x0a\x0b\x0c\xcd\x01\x2c"  # token_ids
    + b"\x02"  # block_size
    + b"\x05"  # lora_id
    + text("GPU")  # medium
    + text("sql")  # lora_name
    + b"\x92" + NIL + b"\x91" + text("salt")  # extra_keys
    + b"\x00"  # group_idx
    + text("sliding_window")  # kv_cache_spec_kind
    + b"\xcd\x04\x00"  # kv_cache_spec_sliding_window
    + text("LOCAL")
    + text("OWNED")
    + text("s-17")  # session_id
)  # fmt: skip
EXTRA = {
    "extra_keys": [None, ["salt"]], "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 1024,
    "locality": "LOCAL", "ownership": "OWNED", "session_id": "s-17",
}  # fmt: skip


def batch_of(*events, rank=b"\x03"):
    return decode_batch(b"\x93" + TS + bytes([0x90 + len(events)]) + b"".join(events) + rank)


@pytest.mark.parametrize("event", [MAP_STORED, ARRAY_STORED], ids=["map", "array"])
def test_vllms_forms_with_every_field(event):
    batch = batch_of(event)
    assert batch.events == [Stored(**TWO_BLOCKS, extra=EXTRA)]
    assert (batch.time_s, batch.rank, batch.unknown_fields) == (1795265169.5, 3, [])


def test_a_batch_may_be_a_map_itself():
    payload = (
        b"\x83" + text("ts") + TS + text("events") + b"\x91" + MAP_STORED + text("data_parallel_rank") + b"\x03"
    )  # fmt: skip
    assert decode_batch(payload) == batch_of(MAP_STORED)


def test_the_oldest_array_form_is_read_with_five_fields_and_without_a_rank():
    event = b"\x96" + text("BlockStored") + b"\x91\x01" + NIL + b"\x92\x0a\x0b" + b"\x02" + NIL
    batch = decode_batch(b"\x92" + TS + b"\x91" + event)
    assert batch.events == [Stored([1], None, 2, array("q", [10, 11]), "GPU", None, None, {})]
    assert batch.rank is None


def test_hashes_may_be_bytes():
    digest = bytes(range(32))
    event = b"\x92" + text("BlockRemoved") + b"\x91\xc4\x20" + digest
    assert batch_of(event).events == [Removed([digest], None, None, {})]


def test_media_in_small_letters_are_the_same_media():
    event = b"\x94" + text("BlockRemoved") + b"\x91\x01" + text("gpu") + b"\x01"
    assert batch_of(event).events == [Removed([1], "GPU", "1", {})]


def test_cleared_in_both_forms():
    assert batch_of(b"\x91" + text("AllBlocksCleared")).events == [Cleared(None)]
    assert batch_of(b"\x81" + text("type") + text("AllBlocksCleared")).events == [Cleared(None)]


def test_unknown_fields_and_types_are_counted_and_the_rest_is_read():
    removed = (
        b"\x83" + text("type") + text("BlockRemoved") + text("block_hashes") + b"\x91\x01" + text("colour") + b"\x05"
    )
    batch = batch_of(b"\x92" + text("BlockBorrowed") + b"\x01", removed, b"\x97" + text("BlockRemoved")
                     + b"\x91\x02" + NIL * 5, b"\x98" + text("BlockRemoved") + b"\x91\x03" + NIL * 6)  # fmt: skip
    assert [event.hashes for event in batch.events] == [[1], [2], [3]]
    assert batch.unknown_types == ["BlockBorrowed"]
    assert batch.unknown_fields == ["BlockRemoved.colour", "BlockRemoved[7]"]


TRT = b"""[
 {"event_id": 0, "window_size": 256, "data": {"type": "created", "num_blocks_per_cache_level": [101, 20]}},
 {"event_id": 1, "window_size": 256, "attention_dp_rank": 2, "hash_algo": "v1", "data": {
   "type": "stored", "parent_hash": null, "blocks": [
     {"type": "stored_block", "block_hash": 4203099703668305365, "cache_level": 0, "priority": 35, "lora_id": 9,
      "mm_keys": [], "cache_salt": null,
      "tokens": [{"type": "unique_token", "token_id": 5, "token_extra_id": 0}, {"token_id": 6}]},
     {"type": "stored_block", "block_hash": "ff00", "cache_level": 1, "priority": 35, "tokens": [{"token_id": 7}]}]}},
 {"event_id": 2, "window_size": 256, "data": {"type": "updated", "block_hash": "ff00",
   "cache_level": {"type": "event_diff", "new_value": 0, "old_value": 1}, "priority": null}},
 {"event_id": 3, "window_size": 256, "data": {"type": "updated", "block_hash": 1, "priority": {"new_value": 1}}},
 {"event_id": 4, "window_size": 256, "data": {"type": "removed", "block_hashes": [4203099703668305365]}},
 {"event_id": 5, "layer_group_id": 1, "data": {"type": "removed", "block_hashes": ["ff00"]}}]"""


def test_tensorrt_llm_json_with_every_event():
    batch = decode_batch(TRT)
    group = "window 256"
    first, second = 4203099703668305365, "ff00"
    assert batch.events == [
        Created({"GPU": 101, "CPU": 20}, group),
        Stored([first], None, 2, array("q", [5, 6]), "GPU", group, "id 9", {"priority": 35}),
        Stored([second], first, 1, array("q", [7]), "CPU", group, None, {"priority": 35}),
        Moved(second, group, "CPU", "GPU"),
        Removed([first], None, group, {}),
        Removed([second], None, "1", {}),
    ]
    # two ranks in one message number their events each on their own
    assert (batch.event_ids, batch.rank, batch.num_malformed, batch.unknown_types) == (None, None, 0, [])


def test_tensorrt_llm_one_event_per_message():
    one = b'{"event_id": 9, "data": {"type": "removed", "block_hashes": [-5]}}'
    batch = decode_batch(one)
    assert batch.events == [Removed([-5], None, None, {})]
    assert batch.event_ids == (9, 9)


def test_mooncake_store_with_every_event():
    replicas = b"\x92\x92" + text("memory") + text("tcp://a:6000") + b"\x92" + text("local_disk") + text("/d/1")
    stored = (
        b"\x98"  # an array of 8 values
        + text("BlockStoreEvent")
        + text("key_1")  # mooncake_key
        + replicas
        + text("llama2-7b")  # model_name
        + b"\xcd\x02\x00"  # block_size in bytes, 512
        + text("0x41")  # block_hash
        + text("")  # parent_block_hash: empty is absent
        + b"\x93\x01\x02\x03"  # token_ids
    )
    updated = b"\x93" + text("BlockUpdateEvent") + text("key_1") + b"\x90"
    batch = decode_batch(b"\x92" + TS + b"\x93" + stored + updated + b"\x91" + text("RemoveAllEvent"))
    media = ("MEMORY", "LOCAL_DISK")
    assert batch.events == [
        Placed("key_1", media, "0x41", None, 3, array("q", [1, 2, 3]), "llama2-7b"),
        Placed("key_1", ()),
        Cleared(None),
    ]


def test_frames_are_told_apart():
    seq, payload = (7).to_bytes(8, "big"), b"\x92"
    assert split_frames([b"kv", seq, payload]) == Frames(b"kv", 7, payload)
    assert split_frames([b"", seq, payload]) == Frames(b"", 7, payload)  # a replay of four frames, as a dealer sees it
    assert split_frames([b"", b"kv", seq, payload]) == Frames(b"kv", 7, payload)  # and of five
    assert split_frames([payload]) == Frames(b"", None, payload)
    assert split_frames([b"", b"\xff" * 8, b""]).seq == END_OF_REPLAY


@pytest.mark.parametrize("frames", [
    [], [b"x"] * 7, [b"kv", b"1234", b"\x92"], [b"t" * 300, bytes(8), b"\x92"], [bytes(MAX_PAYLOAD_BYTES + 1)],
])  # fmt: skip
def test_impossible_frames_are_refused(frames):
    with pytest.raises(WireError):
        split_frames(frames)


@pytest.mark.parametrize("payload", [
    b"", b"\xc1", b"{", b"[1", b"\x91" * 100_000, b"[" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\x93" + NIL, b"\x80", b"\x93\xa1x\x90\xc0", b"\x92" + NIL + b"\x80", b"\x92\xcb\x7f\xf0" + bytes(6) + b"\x90",
])  # fmt: skip
def test_impossible_payloads_are_refused(payload):
    with pytest.raises(WireError):
        decode_batch(payload)


@pytest.mark.parametrize("event", [
    b"\x01", b"\x90", b"\x91\x01", text("BlockStored"), b"\x91" + text("BlockStored"),
    b"\x92" + text("BlockRemoved") + b"\x91\xcb" + bytes(8), b"\x92" + text("BlockRemoved") + b"\x91\xc3",
    b"\x96" + text("BlockStored") + b"\x91\x01" + NIL + b"\x91\x01" + b"\x00" + NIL,
    b"\x92" + text("BlockRemoved") + b"\x91\xc5\x02\x00" + bytes(512),
])  # fmt: skip
def test_one_malformed_event_does_not_hide_the_others(event):
    batch = batch_of(MAP_STORED, event, ARRAY_STORED)
    assert len(batch.events) == 2
    assert batch.num_malformed == 1


def fuzzed(rng, seeds):
    """A seed with bytes changed, cut out, repeated or put in."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randrange(1, 6)):
        place, kind = rng.randrange(len(data) + 1), rng.randrange(4)
        if kind == 0 and place < len(data):
            data[place] = rng.randrange(256)
        elif kind == 1:
            del data[place : place + rng.randrange(1, 9)]
        elif kind == 2:
            data[place:place] = data[place : place + rng.randrange(1, 40)]
        else:
            data[place:place] = rng.randbytes(rng.randrange(1, 6))
    return bytes(data)


def test_10_000_fuzzed_frames_never_raise_and_keep_little():
    rng = random.Random(16)
    seeds = [b"\x93" + TS + b"\x92" + MAP_STORED + ARRAY_STORED + b"\x00", TRT, b"\x92" + TS + b"\x90"]
    state, redactor = KVState(["fuzz"], keep_tokens=True, max_blocks=100), Redactor()
    for number in range(10_000):
        frames = [b"kv", number.to_bytes(8, "big"), fuzzed(rng, seeds)]
        if number % 3 == 0:
            frames[rng.randrange(3)] = rng.randbytes(rng.randrange(12))
        state.take(frames, float(number))
        redactor.redacted(frames)
    assert state.num_messages == 10_000
    assert state.num_malformed > 1_000
    assert state.num_events > 500
    assert sum(len(tree.nodes) for tree in state.trees) <= 100
    for counter in (state.unknown_types, state.unknown_fields, state.field_values):
        assert len(counter) <= 256
    assert len(state.publishers) <= 256


def test_tokens_are_kept_only_as_far_as_they_fit():
    history, home = History(max_blocks=2, max_token_bytes=16), {}
    nodes = [Node(home, place, None, 1, None) for place in range(3)]
    for node in nodes:
        history.keep_tokens(node, b"12345678")
    assert [node.tokens is not None for node in nodes] == [True, True, False]


def test_cache_groups_beyond_the_limit_are_said():
    state = state_of(*(message(group, stored(group, group_idx=group)) for group in range(70)))
    assert len(state.trees) == 64
    assert state.num_malformed == 6
    assert "too many cache groups" in state.notes[-1]


def test_a_tree_never_holds_more_blocks_than_its_limit():
    (tree,) = state_of(*(message(number, stored(number)) for number in range(100)), max_blocks=10).trees
    assert (len(tree.nodes), tree.num_refused) == (10, 90)
