"""Search in a run: sequences, blocks and events that a text means, each with the place to go to."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from pagedcli.printable import one_line, plural
from pagedcli.trace.seq_state import SeqState
from pagedcli.trace.state import PoolState
from pagedcli.views.words import StepEvent, block_story, event_words

MOST_HITS = 2000  # events
_BLOCK = re.compile(r"block\s+(\d+)", re.IGNORECASE)
_HASH = re.compile(r"[0-9a-f]{6,16}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Hit:
    """Something that was found: a sequence or a block by its number, or an event, which has none."""

    kind: Literal["seq", "block", "event"]
    key: int
    step: int | None  # the step of an event; None: before the first step
    words: str


def find(text: str, events: Iterable[StepEvent], state: PoolState, seqs: Iterable[SeqState]) -> list[Hit]:
    """What a text means: `seqs` whose number or request contains it, blocks by number or content, and events whose
    words contain it, in the order of the run. `block 37` finds all that happened to that block."""
    wanted = text.strip()
    block = _BLOCK.fullmatch(wanted)
    if block is not None:
        block_id = int(block[1])
        if block_id >= state.num_blocks:
            return []
        told = (Hit("event", block_id, step, words) for step, words in block_story(block_id, events))
        return [_block_hit(state, block_id), *islice(told, MOST_HITS)]
    is_found = _matcher(wanted)
    hits = [Hit("seq", seq.seq_id, None, _seq_words(seq)) for seq in seqs if is_found(f"seq {seq.seq_id} {seq.label}")]
    if _HASH.fullmatch(wanted):
        hashes = ((block_id, content) for block_id, content in enumerate(state.hashes) if content is not None)
        hits += [_block_hit(state, each) for each, content in hashes if wanted.lower() in f"{content:016x}"]
    return [*hits, *islice(_event_hits(is_found, events, state), MOST_HITS)]


def _matcher(text: str) -> Callable[[str], bool]:
    """Whether a text occurs, as whole numbers where it begins or ends with a digit: `seq 3` is not in `seq 31`."""
    before, after = (r"(?<!\d)" if text[:1].isdigit() else ""), (r"(?!\d)" if text[-1:].isdigit() else "")
    pattern = re.compile(before + re.escape(text) + after, re.IGNORECASE)
    return lambda words: pattern.search(words) is not None


def _event_hits(is_found: Callable[[str], bool], events: Iterable[StepEvent], state: PoolState) -> Iterator[Hit]:
    for step, event in events:
        words = event_words(event, state)
        if words is not None and is_found(words):
            yield Hit("event", -1, step, words)


def _seq_words(seq: SeqState) -> str:
    ended = f" ({seq.finish_reason})" if seq.finish_reason else ""
    return f"request {one_line(seq.label)}, sample {seq.sample_index}: {plural(seq.num_tokens, 'token')}{ended}"


def _block_hit(state: PoolState, block_id: int) -> Hit:
    content = state.hashes[block_id]
    held = plural(state.ref_counts[block_id], "owner")
    return Hit("block", block_id, None, f"{held}, {'no content' if content is None else f'content {content:016x}'}")
