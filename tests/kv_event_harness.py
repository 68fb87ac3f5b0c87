"""Messages as vLLM sends them, from short descriptions."""

import msgspec

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
