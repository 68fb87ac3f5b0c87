"""Events in words: one line for one event, and the story of a sequence or a block. Used by all that shows events."""

import re
from collections.abc import Collection, Iterable, Iterator

from msgspec import UNSET

import pagedcli.events as ev
from pagedcli.printable import one_line, plural
from pagedcli.trace.state import PoolState

# the words of a reason to wait with its numbers
_WAITING: dict[ev.WaitingReason, str] = {
    "max_num_seqs": f"{ev.WAITING_WORDS['max_num_seqs']} ({{limit}} run)",
    "token_budget": f"{ev.WAITING_WORDS['token_budget']} of the step is used up ({{budget}})",
    "free_blocks": "needs {needed}, {free} free",
    "preemption": "room was made for a running sequence",
    "min_prefill_tokens": "prompts of {least} are to start in one step",
    "state_slots": f"all {ev.WAITING_WORDS['state_slots']} are in use",
    "checkpoint": "a running sequence will make a snapshot for it",
}


_WORDS: dict[type[ev.Event], str] = {
    ev.BlockCopied: "copy block {event.source_block_id} to {event.copy_block_id} for {seq}: it was shared",
    ev.BlocksReused: "share blocks {ids} with {seq}",
    ev.BlocksAllocated: "allocate blocks {ids} to {seq}",
    ev.BlocksRestored: "read blocks {ids} from the prefix store for {seq}",
    ev.BlocksFilled: "fill blocks {ids} of {seq}",
    ev.BlocksReleased: "release blocks {ids} of {seq}",
    ev.WindowPassed: "release blocks {ids} of {seq}: no later token sees them",
    ev.StateSlotTaken: "take state slot {event.slot_id} for {seq}",
    ev.CheckpointDropped: "drop the snapshot in slot {event.slot_id} (hash {event.hash:016x}): no slot was empty",
}


def waiting_reason(event: ev.RequestWaiting, engine: ev.EngineStarted) -> str:
    """Why a sequence waits, with the numbers."""
    return _WAITING[event.reason].format(
        limit=engine.max_num_seqs,
        budget=engine.max_num_batched_tokens,
        least=plural(engine.min_prefill_tokens, "token"),
        needed=plural(event.num_blocks_needed, "block"),
        free=event.num_free_blocks,
    )


def lookup_outcome(event: ev.PrefixLookedUp) -> str:
    """The outcome of a prefix lookup, and why it hit no more."""
    tokens = plural(event.tokens_hit, "token")
    if event.disk_tokens is not UNSET and event.disk_tokens:
        tokens += f", {event.disk_tokens:,} of them from disk"
    found = f"hit {event.blocks_hit} of {plural(event.blocks_asked, 'block')} ({tokens})"
    if event.miss_reason == "caching_off":
        return ev.MISS_WORDS["caching_off"]
    if event.miss_reason == "no_full_block":
        return f"{ev.MISS_WORDS['no_full_block']} in {plural(event.num_tokens, 'token')}"
    if event.miss_reason is None:
        return found
    if event.partial_tokens:
        return f"{found}, {plural(event.partial_tokens, 'more token')} shared, less than a block"
    return found


def why_no_more(event: ev.PrefixLookedUp) -> str:
    """Why a lookup hit no more, in a few words."""
    if event.miss_reason is None:
        return "every full block found"
    words = ev.MISS_WORDS[event.miss_reason]
    if event.miss_reason == "no_match" and event.partial_tokens:
        return f"{words}, {plural(event.partial_tokens, 'more token')} shared"
    return words


def seq_name(state: PoolState, seq_id: int) -> str:
    """`seq 31`, or `seq 31 (code-Mirano)` if the row has an id of the user."""
    seq = state.seq(seq_id)
    return f"seq {seq_id}" if seq is None or seq.row_id is None else f"seq {seq_id} ({one_line(seq.row_id)})"


def when(step: int | None, at: str = "at ") -> str:
    """`at step 3`, or `before the first step`."""
    return "before the first step" if step is None else f"{at}step {step}"


def describe(event: ev.Event, step: int | None, state: PoolState) -> str | None:
    """The event as text, starting with `step N`. None for events of every step."""
    words = event_words(event, state)
    return None if words is None else f"step {'-' if step is None else step} {words}"


def event_seq_ids(event: ev.Event) -> tuple[int, ...]:
    """The sequences an event is about."""
    ids = (getattr(event, name, None) for name in ("seq_id", "for_seq_id", "parent_seq_id"))
    return tuple(seq_id for seq_id in ids if seq_id is not None)


def event_words(event: ev.Event, state: PoolState) -> str | None:
    """The event as text without its step. None for events of every step."""
    seq = seq_name(state, getattr(event, "seq_id", -1))
    if (words := _WORDS.get(type(event))) is not None:
        return words.format(event=event, seq=seq, ids=_ids(getattr(event, "block_ids", ())))
    match event:
        case ev.RequestPreempted():
            return (
                f"preempt {seq}: {plural(event.num_tokens_dropped, 'token')} dropped, "
                f"{plural(event.num_blocks_freed, 'block')} freed, for {seq_name(state, event.for_seq_id)} "
                f"which needed {event.num_blocks_needed}"
            )
        case ev.PrefixLookedUp():
            if event.reason == "continued":
                taken = f"{plural(event.blocks_hit, 'block')} ({plural(event.tokens_hit, 'token')})"
                return f"reuse for {seq}: {taken} meanwhile computed by another sequence"
            verb = "admit" if event.reason == "new" else "resume"
            taken = ", ".join(f"{count} {kind}" for kind, count in (event.blocks_taken or {}).items())
            return f"{verb} {seq}: {lookup_outcome(event)}" + (f"; blocks: {taken}" if taken else "")
        case ev.BlockEvicted():
            needed = "" if event.for_seq_id is UNSET else f" for {seq_name(state, event.for_seq_id)}"
            return f"evict block {event.block_id} (hash {event.hash:016x}){needed}"
        case ev.RequestWaiting():
            return f"wait {seq}: {waiting_reason(event, state.started)}"
        case ev.RequestFinished():
            after = "" if event.reason == "score" else f" after {plural(event.num_output_tokens, 'token')}"
            return f"finish {seq}: {event.reason}{after}"
        case ev.RequestRefused():
            return f"refuse request {one_line(event.row_id or event.request_id)}: {one_line(event.message)}"
        case ev.RequestAdded():
            return _added_words(event, seq)
        case ev.SequenceForked():
            shared = plural(len(event.block_ids), "block")
            return f"fork {seq_name(state, event.parent_seq_id)} to {seq}: {shared} shared"
        case ev.DraftChecked():
            after = f"; release blocks {_ids(event.block_ids)}" if event.block_ids else ""
            return f"check {seq}: {accepted_words(event.num_accepted, event.num_drafted)}{after}"
        case ev.CheckpointLookedUp():
            return _snapshot_words(event, seq)
        case ev.StateSlotsReleased():
            return f"release state slots {_ids(event.slot_ids)} of {seq}"
        case ev.CheckpointMade():
            at, why = plural(event.num_tokens, "token"), ev.SNAPSHOT_WORDS[event.reason]
            return f"snapshot {seq}: the state after {at} stays in slot {event.slot_id}, because of {why}"
        case ev.CheckpointRestored():
            at = plural(event.num_tokens, "token")
            return f"read the state after {at} from the prefix store into slot {event.slot_id} for {seq}"
        case ev.StepFailed():
            again, kept = plural(len(event.seq_ids), "sequence"), plural(len(event.cached_block_ids), "block")
            return f"fail step {event.step}: {again} back in the queue, {kept} still cached"
        case ev.EngineStarted():
            pool = f"{plural(event.num_blocks, 'block')} of {plural(event.block_size, 'token')}"
            return f"start {one_line(event.model)}: {pool}"
        case _:
            return None


def _added_words(event: ev.RequestAdded, seq: str) -> str:
    prompt, context = plural(event.num_prompt_tokens, "prompt token"), event.num_context_tokens
    scores = "" if context is UNSET else f", scores what follows the first {context:,}"
    return f"add {seq}: request {one_line(event.request_id)}, {prompt}{scores}"


def accepted_words(num_accepted: int, num_drafted: int) -> str:
    """How many draft tokens were accepted."""
    return f"{num_accepted:,} of {plural(num_drafted, 'draft token')} accepted"


def again_words(num_tokens: int) -> str:
    """How many tokens drafts made a model compute once more for its recurrent state; empty: none."""
    return f"; {plural(num_tokens, 'token')} computed once more for the recurrent state" if num_tokens else ""


def _snapshot_words(event: ev.CheckpointLookedUp, seq: str) -> str | None:
    """From which snapshot a sequence continues; None if K and V were not cached either."""
    if not event.cached_tokens:
        return None
    cached = f"K and V of {plural(event.cached_tokens, 'token')} are cached"
    if event.slot_id is None:
        return f"compute {seq}: from its beginning; {cached}, but there is no snapshot of the state"
    at = plural(event.checkpoint_tokens, "token")
    words = f"continue {seq}: from the snapshot at {at} in slot {event.slot_id}"
    return words if event.checkpoint_tokens == event.cached_tokens else f"{words}; {cached}, but no later snapshot"


def _ids(entries: tuple[int | None, ...]) -> str:
    block_ids = [block_id for block_id in entries if block_id is not None]
    shown, num_more = ", ".join(map(str, block_ids[:8])), len(block_ids) - 8
    return shown if num_more <= 0 else f"{shown} and {num_more} more"


StepEvent = tuple[int | None, ev.Event]
Story = list[tuple[int | None, str]]  # step and words, in order


def with_steps(events: Collection[ev.Event]) -> Iterator[StepEvent]:
    """Events with their steps, which may begin within a run."""
    first = next((event.step for event in events if isinstance(event, ev.StepStarted)), 0)
    step = first - 1 if first else None
    for event in events:
        if isinstance(event, ev.StepStarted):
            step = event.step
        yield step, event


def sequence_story(seq_id: int, events: Iterable[StepEvent], state: PoolState) -> Story:
    """What happened to a sequence. Steps that only compute its next token, and guesses after it, are omitted; equal
    waits share a line, and so do all guesses."""
    story: Story = []
    name = seq_name(state, seq_id)
    wait: tuple[str, int] | None = None  # why it waits, and the line that says so
    has_token = False
    num_drafted = num_accepted = now_drafted = 0
    # whether it takes and releases state slots for guesses: in the step that checks them, and as the next one starts
    guesses = has_guessed = False
    for step, event in events:
        words = None
        if isinstance(event, ev.StepScheduled):
            guesses = now_drafted > 0
            words, now_drafted = _prompt_tokens(seq_id, event, now_drafted), 0
        elif isinstance(event, ev.TokensDrafted):
            now_drafted = dict(zip(event.seq_ids, event.num_drafted, strict=True)).get(seq_id, 0)
            guesses = now_drafted > 0
        elif isinstance(event, ev.DraftChecked):
            if event.seq_id == seq_id:
                num_drafted, num_accepted = num_drafted + event.num_drafted, num_accepted + event.num_accepted
                guesses, has_guessed = False, True
        elif isinstance(event, ev.StepStarted):
            guesses, has_guessed = has_guessed, False
        elif guesses and isinstance(event, ev.StateSlotTaken | ev.StateSlotsReleased):
            continue
        elif isinstance(event, ev.TokensSampled):
            if not has_token and seq_id in event.seq_ids:
                has_token, words = True, "first token"
        elif isinstance(event, ev.StepFailed):
            words = "the step failed: it waits again" if seq_id in event.seq_ids else None
        elif seq_id in event_seq_ids(event):
            told = event_words(event, state)
            words = None if told is None else _without_name(told, name)
            if isinstance(event, ev.RequestWaiting):
                if wait is not None and wait[0] == event.reason:
                    story[wait[1]] = (story[wait[1]][0], f"{words}; until step {step}")
                    continue
                wait = (event.reason, len(story))
            else:
                wait = None
            if isinstance(event, ev.RequestFinished) and num_drafted:
                words = f"{words}; {accepted_words(num_accepted, num_drafted)}"
        if words is not None:
            story.append((step, words))
    return story


def _without_name(words: str, name: str) -> str:
    """The words without the sequence that the story is about."""
    return re.sub(rf"( of| to| with| for)? {re.escape(name)}(?=:|$)", "", words, count=1)


def _prompt_tokens(seq_id: int, event: ev.StepScheduled, num_drafted: int) -> str | None:
    """The tokens that the step computes, if it is more than the next one and guesses."""
    if seq_id not in event.seq_ids:
        return None
    num_tokens = event.num_new_tokens[event.seq_ids.index(seq_id)] - num_drafted
    return f"compute {plural(num_tokens, 'token')}" if num_tokens > 1 else None


def block_story(block_id: int, events: Iterable[StepEvent]) -> Story:
    """Who held a block, and what it held."""
    told = ((step, _block_words(block_id, event)) for step, event in events)
    return [(step, words) for step, words in told if words is not None]


_BLOCK_WORDS: dict[type[ev.Event], str] = {
    ev.BlocksAllocated: "allocated to seq {0.seq_id}",
    ev.BlocksReused: "reused by seq {0.seq_id}",
    ev.BlocksReleased: "released by seq {0.seq_id}",
    ev.DraftChecked: "released by seq {0.seq_id}: it was taken for rejected draft tokens",
    ev.WindowPassed: "released by seq {0.seq_id}: no later token sees it",
    ev.SequenceForked: "shared with seq {0.seq_id}, forked from seq {0.parent_seq_id}",
}


def _block_words(block_id: int, event: ev.Event) -> str | None:
    """The event as part of a block's story; None if it does not change the block."""
    match event:
        case ev.BlockEvicted(block_id=evicted, hash=block_hash) if evicted == block_id:
            needed = "" if event.for_seq_id is UNSET else f" for seq {event.for_seq_id}"
            return f"evicted{needed}: its content ({block_hash:016x}) is dropped"
        case ev.BlockCopied(seq_id=seq_id, source_block_id=source, copy_block_id=copy) if block_id in (source, copy):
            return (
                f"copied to block {copy} for seq {seq_id}"
                if block_id == source
                else f"becomes a copy of block {source}"
            )
        case ev.EngineStarted():
            return "empty: the engine started"
        case ev.StepFailed(cached_block_ids=cached):
            return f"the step failed: {'still cached' if block_id in cached else 'empty'}"
        case ev.BlocksRestored(seq_id=seq_id, block_ids=ids, hashes=hashes) if block_id in ids:
            block_hash = hashes[event.indices[ids.index(block_id)]]
            return f"read from the prefix store for seq {seq_id}: content {block_hash:016x}"
        case ev.BlocksFilled(seq_id=seq_id, block_ids=ids, hashes=hashes) if block_id in ids:
            return f"filled by seq {seq_id}: content {hashes[ids.index(block_id)]:016x}"
        case _:
            words = _BLOCK_WORDS.get(type(event))
            return None if words is None or block_id not in getattr(event, "block_ids", ()) else words.format(event)
