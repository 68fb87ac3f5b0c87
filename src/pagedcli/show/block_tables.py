"""The tables of one block of a recorded run: at a step, or through the whole run."""

from dataclasses import replace
from typing import Any

from pagedcli.printable import one_line, plural
from pagedcli.records import hash_text
from pagedcli.show.tables import Table, table
from pagedcli.trace.state import PoolState
from pagedcli.trace.tokens import Decode
from pagedcli.views.block_life import BlockLife, HeldContent, Tenure
from pagedcli.views.cache_groups import group_of, group_words
from pagedcli.views.rows import block_slots, num_tokens_of
from pagedcli.views.words import when


def block_tables(life: BlockLife, state: PoolState, facts: dict[str, Any], decode: Decode | None) -> list[Table]:
    """Who held the block until now, and its contents. `facts`: see block_facts."""
    group = "group" if state.num_groups > 1 else ""
    groups = dict.fromkeys([*(each.group for each in life.tenures), facts["group"]])
    notes = [*_notes(facts), *(group_words(state.started, each) for each in groups if group and each is not None)]
    holders = f"seq_id label place {group} since until how end"
    contents = f"hash {group} since until evicted_for seq_id label num_reuses text"
    found = [replace(each, text=_text(each.token_ids, decode)) for each in life.contents]
    return [
        table(Tenure, "holders", _title(facts), life.tenures, holders, notes=notes),
        table(HeldContent, "contents", "What it contained", found, contents),
    ]


def block_facts(life: BlockLife, state: PoolState, decode: Decode | None) -> dict[str, Any]:
    """What the block is at this moment."""
    block_id = life.block_id
    ref_count, block_hash = state.ref_counts[block_id], state.hashes[block_id]
    num_tokens = num_tokens_of(block_id, [(state.seqs[each.seq_id], each.place) for each in life.owners], state)
    token_ids = life.token_ids(state)
    return {
        "block_id": block_id, "step": state.step_number, "group": group_of(state, block_id),
        "state": "in use" if ref_count else "cached" if block_hash is not None else "empty", "ref_count": ref_count,
        "num_tokens": num_tokens, "slots": block_slots(block_id, num_tokens, state), "block_size": state.block_size,
        "hash": hash_text(block_hash), "token_ids": token_ids, "text": _text(token_ids, decode),
    }  # fmt: skip


def _title(facts: dict[str, Any]) -> str:
    shared = f"ref count {facts['ref_count']}, {facts['num_tokens']} of {plural(facts['block_size'], 'token')}"
    if facts["slots"]:
        shared += f" in slots {facts['slots']}"
    content = "partial" if facts["hash"] is None else f"content {facts['hash']}"
    what = facts["state"] if facts["state"] == "empty" else f"{facts['state']}, {shared}, {content}"
    return f"Block {facts['block_id']} {when(facts['step'])}: {what}"


def _notes(facts: dict[str, Any]) -> list[str]:
    if facts["text"] is not None:
        return [f'text: "{one_line(facts["text"])}"']
    return [] if facts["token_ids"] is None else [f"token ids: {list(facts['token_ids'])}"]


def _text(token_ids: tuple[int, ...] | None, decode: Decode | None) -> str | None:
    return None if token_ids is None or decode is None else decode(token_ids)
