"""The story of one sequence or one block: the events about it in words, each with its step.

Used by the application. The events come from a Replay, or from those that a running engine's view keeps.
"""

from collections.abc import Collection, Iterable, Iterator

import pagedcli.events as ev
from pagedcli.printable import plural
from pagedcli.trace.state import PoolState
from pagedcli.views.words import event_seq_ids, event_words, seq_name

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
    """What happened to a sequence. Steps that only compute its next token are omitted, and equal waits share a line."""
    story: Story = []
    name = seq_name(state, seq_id)
    wait: tuple[str, int] | None = None  # why it waits, and the line that says so
    has_token = False
    for step, event in events:
        words = None
        if isinstance(event, ev.StepScheduled):
            words = _prompt_tokens(seq_id, event)
        elif isinstance(event, ev.TokensSampled):
            if not has_token and seq_id in event.seq_ids:
                has_token, words = True, "first token"
        elif isinstance(event, ev.StepFailed):
            words = "the step failed: it waits again" if seq_id in event.seq_ids else None
        elif seq_id in event_seq_ids(event):
            words = _without_name(event_words(event, state) or "", name)
            if isinstance(event, ev.RequestWaiting):
                if wait is not None and wait[0] == event.reason:
                    story[wait[1]] = (story[wait[1]][0], f"{words}; until step {step}")
                    continue
                wait = (event.reason, len(story))
            else:
                wait = None
        if words is not None:
            story.append((step, words))
    return story


def _without_name(words: str, name: str) -> str:
    """The words without the sequence that the story is about."""
    for preposition in ("of", "to", "with"):
        words = words.removesuffix(f" {preposition} {name}")
    return words.replace(f" {name}:", ":", 1)


def _prompt_tokens(seq_id: int, event: ev.StepScheduled) -> str | None:
    """The tokens that the step computes, if it is more than the next one."""
    if seq_id not in event.seq_ids:
        return None
    num_tokens = event.num_new_tokens[event.seq_ids.index(seq_id)]
    return f"compute {plural(num_tokens, 'token')}" if num_tokens > 1 else None


def block_story(block_id: int, events: Iterable[StepEvent]) -> Story:
    """Who held a block, and what it held."""
    told = ((step, _block_words(block_id, event)) for step, event in events)
    return [(step, words) for step, words in told if words is not None]


def _block_words(block_id: int, event: ev.Event) -> str | None:
    match event:
        case ev.BlockEvicted(block_id=evicted, hash=block_hash) if evicted == block_id:
            return f"evicted: its content ({block_hash:016x}) is dropped"
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
        case ev.BlocksAllocated(seq_id=seq_id, block_ids=ids) if block_id in ids:
            return f"allocated to seq {seq_id}"
        case ev.BlocksReused(seq_id=seq_id, block_ids=ids) if block_id in ids:
            return f"reused by seq {seq_id}"
        case ev.BlocksFilled(seq_id=seq_id, block_ids=ids, hashes=hashes) if block_id in ids:
            return f"filled by seq {seq_id}: content {hashes[ids.index(block_id)]:016x}"
        case ev.BlocksReleased(seq_id=seq_id, block_ids=ids) if block_id in ids:
            return f"released by seq {seq_id}"
        case ev.WindowPassed(seq_id=seq_id, block_ids=ids) if block_id in ids:
            return f"released by seq {seq_id}: no later token sees it"
        case ev.SequenceForked(parent_seq_id=parent, seq_id=seq_id, block_ids=ids) if block_id in ids:
            return f"shared with seq {seq_id}, forked from seq {parent}"
        case _:
            return None
