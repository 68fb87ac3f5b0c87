"""One line of English for one event. Used by the views."""

import pagedcli.events as ev
from pagedcli.printable import one_line, plural
from pagedcli.trace.state import PoolState

_WAITING = {
    "max_num_seqs": "sequence limit ({limit} run)",
    "token_budget": "token budget of the step is used up ({budget})",
    "free_blocks": "needs {needed}, {free} free",
    "preemption": "room was made for a running sequence",
}


def waiting_reason(event: ev.RequestWaiting, engine: ev.EngineStarted) -> str:
    """Why a sequence waits, with the numbers."""
    return _WAITING[event.reason].format(
        limit=engine.max_num_seqs,
        budget=engine.max_num_batched_tokens,
        needed=plural(event.num_blocks_needed, "block"),
        free=event.num_free_blocks,
    )


def lookup_outcome(event: ev.PrefixLookedUp) -> str:
    """The outcome of a prefix lookup, and why it hit no more."""
    found = f"hit {event.blocks_hit} of {plural(event.blocks_asked, 'block')} ({plural(event.tokens_hit, 'token')})"
    if event.miss_reason == "caching_off":
        return "prefix caching is off"
    if event.miss_reason == "no_full_block":
        return f"no full block in {plural(event.num_tokens, 'token')}"
    if event.miss_reason is None:
        return found
    if event.partial_tokens:
        return f"{found}, {plural(event.partial_tokens, 'more token')} shared, less than a block"
    return found


def seq_name(state: PoolState, seq_id: int) -> str:
    """`seq 31`, or `seq 31 (code-Mirano)` if the row has an id of the user."""
    seq = state.seq(seq_id)
    return f"seq {seq_id}" if seq is None or seq.row_id is None else f"seq {seq_id} ({one_line(seq.row_id)})"


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
            return f"{verb} {seq}: {lookup_outcome(event)}"
        case ev.BlockEvicted():
            return f"evict block {event.block_id} (hash {event.hash:016x})"
        case ev.RequestWaiting():
            return f"wait {seq}: {waiting_reason(event, state.started)}"
        case ev.RequestFinished():
            return f"finish {seq}: {event.reason} after {plural(event.num_output_tokens, 'token')}"
        case ev.RequestRefused():
            return f"refuse request {one_line(event.row_id or event.request_id)}: {one_line(event.message)}"
        case ev.RequestAdded():
            prompt = plural(event.num_prompt_tokens, "prompt token")
            return f"add {seq}: request {one_line(event.request_id)}, {prompt}"
        case ev.SequenceForked():
            shared = plural(len(event.block_ids), "block")
            return f"fork {seq_name(state, event.parent_seq_id)} to {seq}: {shared} shared"
        case ev.BlockCopied():
            return f"copy block {event.source_block_id} to {event.copy_block_id} for {seq}: it was shared"
        case ev.BlocksReused():
            return f"share blocks {_ids(event.block_ids)} with {seq}"
        case ev.BlocksAllocated():
            return f"allocate blocks {_ids(event.block_ids)} to {seq}"
        case ev.BlocksFilled():
            return f"fill blocks {_ids(event.block_ids)} of {seq}"
        case ev.BlocksReleased():
            return f"release blocks {_ids(event.block_ids)} of {seq}"
        case ev.WindowPassed():
            return f"release blocks {_ids(event.block_ids)} of seq {event.seq_id}: no later token sees them"
        case ev.StepFailed():
            again, kept = plural(len(event.seq_ids), "sequence"), plural(len(event.cached_block_ids), "block")
            return f"fail step {event.step}: {again} back in the queue, {kept} still cached"
        case ev.EngineStarted():
            pool = f"{plural(event.num_blocks, 'block')} of {plural(event.block_size, 'token')}"
            return f"start {one_line(event.model)}: {pool}"
        case _:
            return None


def _ids(entries: tuple[int | None, ...]) -> str:
    block_ids = [block_id for block_id in entries if block_id is not None]
    shown, num_more = ", ".join(map(str, block_ids[:8])), len(block_ids) - 8
    return shown if num_more <= 0 else f"{shown} and {num_more} more"
