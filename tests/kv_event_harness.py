"""Messages as vLLM sends them, from short descriptions; recordings of them, and what their fold gives."""

import msgspec

from pagedcli.kvevents.capture import CaptureWriter
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.lookups import Lookups


def stored(*hashes, parent=None, tokens=None, block_size=2, **fields):
    """A BlockStored event; without tokens each block holds its hash, twice."""
    if tokens is None:
        tokens = [token for block_hash in hashes for token in [block_hash] * block_size]
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": list(tokens),
        "block_size": block_size, "lora_id": None, "medium": "GPU", "lora_name": None, **fields,
    }  # fmt: skip


def removed(*hashes, medium="GPU", **fields):
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, **fields}


CLEARED = {"type": "AllBlocksCleared"}


def message(seq, *events, time_s=None, topic=b"kv"):
    """The three frames of a batch; by default sent at second `seq` of the publisher's clock."""
    payload = msgspec.msgpack.encode([float(seq) if time_s is None else time_s, list(events), 0])
    return [topic, seq.to_bytes(8, "big"), payload]


def read_lookups(reader):
    """The requests of a recording, in the order in which they began to store blocks."""
    found = Lookups(has_ids=reader.has_tokens)
    state = KVState(reader.sources, observe=found.take)
    for frames, time_s, source in reader:
        state.take(frames, time_s, source)
    return found


def numbered(batches):
    """A message of each list of events, a second apart."""
    return [message(number, *events) for number, events in enumerate(batches)]


def record(path, messages, *, tokens=True):
    """A recording of messages that came a second apart. Returns its path."""
    with CaptureWriter(path, ["tcp://host:1"], tokens=tokens) as writer:
        for time_s, frames in enumerate(messages):
            writer.write(frames, float(time_s))
    return path


def state_of(*messages, **options):
    state = KVState(["tcp://host:1"], **options)
    for time_s, frames in enumerate(messages):
        state.take(frames, float(time_s))
    return state
