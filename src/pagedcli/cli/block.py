"""One block of a recorded run: `trace RUN --block N --step S` at a step, `explain --block N` through the whole run."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pagedcli.cli.decoder import Decode, recorded_decoder
from pagedcli.errors import UsageError
from pagedcli.events import StepScheduled
from pagedcli.printable import capitalized, one_line, plural
from pagedcli.records import RIGHT, hash_text
from pagedcli.show.tables import Format, Table, print_tables, table
from pagedcli.show.terminal import say_notes
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import pool_fold
from pagedcli.trace.state import PoolState
from pagedcli.views.block_life import BlockLife, Content, Tenure
from pagedcli.views.cache_groups import group_of, group_words
from pagedcli.views.rows import ShownRow, tokens_in_block
from pagedcli.views.words import seq_name

_MOST_NAMED = 3  # sequences in the first sentence


@dataclass(frozen=True, slots=True)
class _Told:
    """A line of a story."""

    step: int | None
    what: str


class _OwnerRow(ShownRow):
    """A sequence that holds the block at a step."""

    seq_id: int
    label: Annotated[str, "request"]
    status: Annotated[str, "state"]
    place: Annotated[int, "place in table"]
    group: int
    first_token: int
    last_token: int
    tokens: Annotated[str, "its tokens", RIGHT]
    since: Annotated[int | None, "since step"]
    how: Annotated[str, "how it got it"]

    def __init__(self, tenure: Tenure, state: PoolState) -> None:
        seq = state.seqs[tenure.seq_id]
        super().__init__(tenure, seq)
        self.first_token = tenure.place // state.num_groups * state.block_size
        self.last_token = self.first_token + tokens_in_block(seq, tenure.place, state) - 1
        self.tokens = f"{self.first_token}-{self.last_token}"


class _ContentRow(ShownRow):
    """What the block contained for a time."""

    hash: Annotated[str | None, "content"]
    group: int
    since: Annotated[int | None, "from step"]
    until: Annotated[int | None, "to step"]
    seq_id: Annotated[int, "filled by seq"]
    label: Annotated[str, "request"]
    num_reuses: Annotated[int, "times found again"]
    token_ids: tuple[int, ...] | None
    text: str | None

    def __init__(self, content: Content, decode: Decode | None) -> None:
        super().__init__(content)
        self.hash, self.text = hash_text(content.hash), _text(content.token_ids, decode)


def print_block_at(trace: Path, block_id: int, step: int | None, format_: Format) -> None:
    """Print the block at a step, as its forward pass sees the cache; None: at the end."""
    life, state = _lived(trace, block_id, step)
    decode = recorded_decoder(trace, None)
    facts = _facts(life, state, decode)
    notes = [*_group_notes(state, [facts["group"]]), *_notes(facts)]
    owners = [_OwnerRow(tenure, state) for tenure in life.owners]
    shown = "seq_id label place status tokens since how"
    print_tables(
        [table(_OwnerRow, "owners", _title(facts), owners, shown, notes=notes), _story(life)],
        format_,
        facts=facts,
        story=[_answer(life, state)],
    )


def explain_block(trace: Path, block_id: int, tokenizer: str | None, format_: Format) -> None:
    """Print who held the block through the run, its contents and its story."""
    life, state = _lived(trace, block_id, None)
    decode = recorded_decoder(trace, tokenizer)
    group = "group" if state.num_groups > 1 else ""
    tables = [
        table(
            Tenure, "holders", f"Who held block {block_id}", life.tenures,
            f"seq_id label place {group} since until how end",
            notes=_group_notes(state, (each.group for each in life.tenures)),
        ),
        table(
            _ContentRow, "contents", f"What block {block_id} contained",
            [_ContentRow(each, decode) for each in life.contents],
            f"hash {group} since until seq_id label num_reuses text",
        ),
        _story(life),
    ]  # fmt: skip
    tables = tables[:1] if format_ is Format.CSV else tables
    print_tables(tables, format_, facts=_facts(life, state, decode), story=[_answer(life, state)])


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
    say_notes(reader.notes)
    if step is not None:
        raise UsageError(f"{trace} has no step {step}: the last one is {folding.state.step_number}")
    return life, folding.state


def _answer(life: BlockLife, state: PoolState) -> str:
    """Who holds the block now, or who did, and for whom its last content was evicted."""
    block, owners = f"block {life.block_id}", life.owners
    finding = f"{_when(state.step_number)} "
    if owners:
        names = [f"{seq_name(state, each.seq_id)} since {_when(each.since, '')}" for each in owners[:_MOST_NAMED]]
        more = len(owners) - len(names)
        finding += f"{block} is held by {', '.join(names)}" + (f" and {plural(more, 'other sequence')}" if more else "")
    elif not life.tenures:
        finding += f"no sequence has ever held {block}"
    else:
        holder, kept = life.tenures[-1], "is empty"
        if state.hashes[life.block_id] is not None:
            kept = f"caches content of {seq_name(state, life.contents[-1].seq_id)}"
        held = f"last held by {seq_name(state, holder.seq_id)} until {_when(holder.until, '')}"
        finding += f"no sequence holds {block}; it {kept}, {held}"
    if evicted := [each for each in life.contents if each.evicted_for is not None]:
        last, number = evicted[-1], f", the last of {len(evicted):,} evictions" if len(evicted) > 1 else ""
        finding += (
            f"; content of {seq_name(state, last.seq_id)} was evicted {_when(last.until)}{last.evicted_for}{number}"
        )
    return f"{capitalized(finding)}."


def _when(step: int | None, at: str = "at ") -> str:
    return "before the first step" if step is None else f"{at}step {step}"


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
    shared = f"ref count {facts['ref_count']}, {facts['num_tokens']} of {plural(facts['block_size'], 'token')}"
    content = "partial" if facts["hash"] is None else f"content {facts['hash']}"
    what = facts["state"] if facts["state"] == "empty" else f"{facts['state']}, {shared}, {content}"
    return f"Block {facts['block_id']} {_when(facts['step'])}: {what}"


def _group_notes(state: PoolState, groups: Iterable[int | None]) -> list[str]:
    """These groups in words; nothing where there is only one."""
    found = {group for group in groups if group is not None} if state.num_groups > 1 else ()
    return [group_words(state.started, group) for group in sorted(found)]


def _notes(facts: dict[str, Any]) -> list[str]:
    owners = [] if facts["ref_count"] else ["no sequence holds it"]
    if facts["text"] is not None:
        return [*owners, f'text: "{one_line(facts["text"])}"']
    return owners if facts["token_ids"] is None else [*owners, f"token ids: {list(facts['token_ids'])}"]


def _text(token_ids: tuple[int, ...] | None, decode: Decode | None) -> str | None:
    return None if token_ids is None or decode is None else decode(token_ids)


def _story(life: BlockLife) -> Table:
    return table(_Told, "story", f"Story of block {life.block_id}", [_Told(*told) for told in life.story])
