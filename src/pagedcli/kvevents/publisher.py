"""Publishes our engine's events in vLLM's format: changes of the prefix index, one batch per step that changed it.

A view of the fold, so it needs no access to the engine. Duplicates of a block that are not in the index are not
published, as no lookup finds them. The engine must report token ids (trace_tokens).
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

import pagedcli.events as ev
from pagedcli.trace.state import PoolState
from pagedcli.trace.tokens import TokenView

Send = Callable[[bytes], None]


class KVEventPublisher(TokenView):
    """Calls `send` with the payload of each batch: [time, events as maps, data-parallel rank]."""

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send
        self._encoder = msgspec.msgpack.Encoder()
        self._events: list[dict[str, Any]] = []
        self._published: dict[int, int] = {}  # hash -> group of layers

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        super().on_engine_started(event, state)
        self._published.clear()
        self._events = [{"type": "AllBlocksCleared"}]
        self._flush()

    def on_blocks_filled(self, event: ev.BlocksFilled, state: PoolState) -> None:
        table, num_groups = state.seqs[event.seq_id].block_table, state.num_groups
        first = table.index(event.block_ids[0])
        for index, (block_id, block_hash) in enumerate(zip(event.block_ids, event.hashes, strict=True), first):
            if block_hash not in self._published and state.hash_to_block_id.get(block_hash) == block_id:
                before = table[index - num_groups] if index >= num_groups else None  # the group's block before it
                self._stored(event.seq_id, index, block_hash, None if before is None else state.hashes[before], state)

    def on_blocks_restored(self, event: ev.BlocksRestored, state: PoolState) -> None:
        num_groups = state.num_groups
        for index, _, block_hash, _ in event.blocks:
            if block_hash not in self._published:
                parent = event.hashes[index - num_groups] if index >= num_groups else None
                self._stored(event.seq_id, index, block_hash, parent, state)

    def on_block_evicted(self, event: ev.BlockEvicted, state: PoolState) -> None:
        if event.hash in self._published and event.hash not in state.hash_to_block_id:
            self._removed(event.hash)

    def on_step_finished(self, event: ev.StepFinished, state: PoolState) -> None:
        self._flush()

    def on_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        for block_hash in sorted(self._published.keys() - state.hash_to_block_id.keys()):
            self._removed(block_hash)
        self._flush()

    def _stored(self, seq_id: int, index: int, block_hash: int, parent: int | None, state: PoolState) -> None:
        span, group = divmod(index, state.num_groups)
        self._published[block_hash] = group
        tokens = self._token_ids[seq_id][span * state.block_size : (span + 1) * state.block_size]
        last = self._events[-1] if self._events else None
        if last is not None and last["type"] == "BlockStored" and last["block_hashes"][-1] == parent:
            last["block_hashes"].append(block_hash)
            last["token_ids"] += tokens
            return
        window = state.started.groups[group].window
        kind = {"kv_cache_spec_kind": "full_attention"} if window is None else {
            "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": window
        }  # fmt: skip
        self._events.append(
            {
                "type": "BlockStored", "block_hashes": [block_hash], "parent_block_hash": parent, "token_ids": tokens,
                "block_size": state.block_size, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": group,
                **kind,
            }
        )  # fmt: skip

    def _removed(self, block_hash: int) -> None:
        group = self._published.pop(block_hash)
        last = self._events[-1] if self._events else None
        if last is not None and last["type"] == "BlockRemoved" and last["group_idx"] == group:
            last["block_hashes"].append(block_hash)
        else:
            removed = {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": "GPU", "group_idx": group}
            self._events.append(removed)

    def _flush(self) -> None:
        if self._events:
            self._send(self._encoder.encode([time.time(), self._events, 0]))
            self._events = []
