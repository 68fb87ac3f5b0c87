"""One block of a recorded run: `replay --block N --step S` at a step, `explain --block N` through the whole run."""

from pathlib import Path
from typing import Any

from pagedcli.cli.decoder import Decode, recorded_decoder
from pagedcli.errors import UsageError
from pagedcli.events import StepScheduled
from pagedcli.printable import one_line
from pagedcli.show.group_words import group_words
from pagedcli.show.tables import Column, Format, Row, Table, count, print_tables
from pagedcli.show.terminal import say
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import pool_fold
from pagedcli.trace.state import PoolState
from pagedcli.views.block_life import BlockLife
from pagedcli.views.cache_groups import group_of
from pagedcli.views.step_rows import hash_text, tokens_in_block

_WHO = (Column("seq_id", "seq", count), Column("label", "request"), Column("place", "place in table", count))
_STORY = (Column("step", "step", count), Column("what", "what"))


def replay_block(trace: Path, block_id: int, step: int | None, format_: Format) -> None:
    """Print the block at a step, as its forward pass sees the cache; None: at the end."""
    life, state = _lived(trace, block_id, step)
    decode = recorded_decoder(trace, None)
    facts = _facts(life, state, decode)
    rows = []
    for tenure in life.owners:
        seq = state.seqs[tenure.seq_id]
        first = tenure.place // state.num_groups * state.block_size
        last = first + tokens_in_block(seq, tenure.place, state) - 1
        rows.append(
            {
                "seq_id": tenure.seq_id, "label": tenure.label, "status": seq.status, "place": tenure.place,
                "group": tenure.group, "first_token": first, "last_token": last, "tokens": f"{first}-{last}",
                "since": tenure.since, "how": tenure.how,
            }
        )  # fmt: skip
    columns = [
        *_WHO, Column("status", "state"), Column("tokens", "its tokens", str), Column("since", "since step", count),
        Column("how", "how it got it"),
    ]  # fmt: skip
    owners = Table("owners", _title(facts), columns, rows, [*_group_notes(state, facts), *_notes(facts)])
    story = Table("story", f"Story of block {block_id}", _STORY, _story(life))
    print_tables([owners, story], format_, facts=facts)


def explain_block(trace: Path, block_id: int, tokenizer: str | None, format_: Format) -> None:
    """Print who held the block through the run, its contents and its story."""
    life, state = _lived(trace, block_id, None)
    decode = recorded_decoder(trace, tokenizer)
    holders = [
        {
            "seq_id": each.seq_id, "label": each.label, "place": each.place, "group": each.group, "since": each.since,
            "until": each.until, "how": each.how, "end": each.end,
        }
        for each in life.tenures
    ]  # fmt: skip
    contents = [
        {
            "hash": hash_text(each.hash), "group": each.group, "since": each.since, "until": each.until,
            "seq_id": each.seq_id, "label": each.label, "num_reuses": each.num_reuses, "token_ids": each.token_ids,
            "text": _text(each.token_ids, decode),
        }
        for each in life.contents
    ]  # fmt: skip
    since, until = Column("since", "from step", count), Column("until", "to step", count)
    group = [Column("group", "group", count)] if state.num_groups > 1 else []
    by_holder = [*_WHO, *group, since, until, Column("how", "how it got it"), Column("end", "how it ended")]
    by_content = [
        Column("hash", "content"), *group, since, until, Column("seq_id", "filled by seq", count),
        Column("label", "request"), Column("num_reuses", "found again", count), Column("text", "text"),
    ]  # fmt: skip
    facts = _facts(life, state, decode)
    tables = [
        Table("holders", f"Who held block {block_id}", by_holder, holders, _group_notes(state, *holders)),
        Table("contents", f"What block {block_id} contained", by_content, contents),
        Table("story", f"Story of block {block_id}", _STORY, _story(life)),
    ]
    print_tables(tables[:1] if format_ is Format.CSV else tables, format_, facts=facts)


def _lived(trace: Path, block_id: int, step: int | None) -> tuple[BlockLife, PoolState]:
    """The block's life up to a step. Raises: UsageError if there is no such block or step."""
    reader, life = TraceReader(trace), BlockLife(block_id)
    folding = pool_fold(life)
    for event in folding.steps(reader):
        state = folding.state
        if block_id >= state.num_blocks:
            raise UsageError(f"there is no block {block_id}: {trace} has blocks 0 to {state.num_blocks - 1}")
        if isinstance(event, StepScheduled) and event.step == step:
            return life, state
    for note in reader.notes:
        say(f"note: {note}")
    if step is not None:
        raise UsageError(f"{trace} has no step {step}: the last one is {folding.state.step_number}")
    return life, folding.state


def _facts(life: BlockLife, state: PoolState, decode: Decode | None) -> dict[str, Any]:
    block_id = life.block_id
    ref_count, block_hash = state.ref_counts[block_id], state.hashes[block_id]
    num_tokens = [tokens_in_block(state.seqs[each.seq_id], each.place, state) for each in life.owners]
    empty = 0 if block_hash is None else state.block_size
    token_ids = life.token_ids(state)
    return {
        "block_id": block_id, "step": state.step_number, "group": group_of(state, block_id),
        "state": "in use" if ref_count else "cached" if block_hash is not None else "empty", "ref_count": ref_count,
        "num_tokens": max(num_tokens, default=empty), "block_size": state.block_size, "hash": hash_text(block_hash),
        "token_ids": token_ids, "text": _text(token_ids, decode),
    }  # fmt: skip


def _title(facts: dict[str, Any]) -> str:
    shared = f"ref count {facts['ref_count']}, {facts['num_tokens']} of {facts['block_size']} tokens"
    content = "partial" if facts["hash"] is None else f"content {facts['hash']}"
    step = "before the first step" if facts["step"] is None else f"at step {facts['step']}"
    what = facts["state"] if facts["state"] == "empty" else f"{facts['state']}, {shared}, {content}"
    return f"Block {facts['block_id']} {step}: {what}"


def _group_notes(state: PoolState, *rows: Row) -> list[str]:
    """The groups of these rows in words; of one group nothing is to be told."""
    groups = {row["group"] for row in rows} - {None} if state.num_groups > 1 else ()
    return [group_words(state.started, group) for group in sorted(groups)]


def _notes(facts: dict[str, Any]) -> list[str]:
    owners = [] if facts["ref_count"] else ["nobody holds it"]
    if facts["text"] is not None:
        return [*owners, f'text: "{one_line(facts["text"])}"']
    return owners if facts["token_ids"] is None else [*owners, f"token ids: {list(facts['token_ids'])}"]


def _text(token_ids: tuple[int, ...] | None, decode: Decode | None) -> str | None:
    return None if token_ids is None or decode is None else decode(token_ids)


def _story(life: BlockLife) -> list[dict[str, Any]]:
    return [{"step": step, "what": words} for step, words in life.story]
