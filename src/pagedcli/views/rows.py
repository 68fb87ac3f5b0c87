"""What is shown of a sequence, a lookup, a block and a step: one record each. A field has its name, type, header and
meaning here; screen, files, JSON, pages, filters and docs choose fields by name.

`USES` names the fields of each use in its order. A field that no use names is shown by all of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from msgspec import UNSET

import pagedcli.events as ev
from pagedcli.printable import id_ranges
from pagedcli.records import RIGHT, Column, Means, Share, columns_of, computed, hash_text
from pagedcli.trace.seq_state import SeqState, Stage
from pagedcli.trace.state import PoolState
from pagedcli.views.stats import ROLLING_STEPS, RunStats
from pagedcli.views.words import why_no_more

_ABSENT = object()
_REASONS = get_args(ev.WaitingReason)


class ShownRow:
    """A record whose values are read when they are asked for: from its own properties, else from its sources."""

    USES: ClassVar[dict[str, str]] = {}

    def __init__(self, *sources: object) -> None:
        self.sources = sources

    def __getattr__(self, name: str) -> Any:
        for source in self.sources:
            value = getattr(source, name, _ABSENT)
            if value is not _ABSENT:
                return None if value is UNSET else value
        raise AttributeError(name)


def chosen(record: Any, use: str) -> list[Column]:
    """The fields that a use shows; all of them where the record does not name uses."""
    return _chosen(record, use)


@cache
def _chosen(record: Any, use: str) -> list[Column]:
    by_name = columns_of(record)
    uses: dict[str, str] = getattr(record, "USES", {})
    named = {name for names in uses.values() for name in names.split()}
    return [by_name[name] for name in (*uses.get(use, "").split(), *(name for name in by_name if name not in named))]


def values_of(record: object, use: str) -> dict[str, Any]:
    """The values of the fields that a use shows, by name."""
    return {column.key: getattr(record, column.key) for column in chosen(type(record), use)}


Hash = Annotated[int, hash_text]
SeqId = Annotated[int, Means("number of the sequence, from 0")]
RequestId = Annotated[str, Means("the request's number: the row's index, or index/prompt")]
RowId = Annotated[str, Means("the id that the row has in the input")]
Label = Annotated[
    str, "request", lambda label: label or "-", Means("the request: the row's id, else the request's number")
]


class Now:
    """What the rows of all sequences of a moment have in common."""

    def __init__(self, state: PoolState) -> None:
        self.state, step = state, state.step
        self.step = state.step_number
        self.new_tokens = {} if step is None else step.new_tokens
        self.waiting = None if step is None else step.waiting


class SequenceRow(ShownRow):
    """A sequence at a step."""

    USES: ClassVar = {
        "file": "seq_id request_id row_id sample_index status num_prompt_tokens num_output_tokens max_new_tokens"
        " num_computed_tokens num_new_tokens num_drafted_tokens num_cached_tokens num_preemptions num_waited_steps"
        " num_blocks block_table"
        " ref_counts slots_written waiting_reason",
        "json": "seq_id request_id row_id sample_index status num_tokens num_computed_tokens num_new_tokens"
        " num_cached_tokens num_output_tokens max_new_tokens num_preemptions block_table ref_counts slots_written"
        " waiting_reason",
        "followed": "slots_written",
        "table": "seq_id label status num_new_tokens num_cached_tokens progress generated num_blocks share",
        "list": "seq_id label status_now progress generated num_blocks num_waited_steps num_preemptions",
        "filter": "seq_id label sample_index status finish_reason num_tokens num_computed_tokens num_prompt_tokens"
        " num_output_tokens num_cached_tokens num_blocks num_waited_steps num_preemptions num_recomputed_tokens"
        " num_guesses num_right_guesses",
    }

    seq_id: SeqId
    request_id: RequestId
    row_id: RowId | None
    label: Label
    sample_index: Annotated[int, "sample", Means("which sample of its request, from 0")]
    status: Annotated[Stage, "state", Means("prefill, decode, stalled (lacks room), waiting or preempted")] = computed(
        lambda row: row.now.state.status_of(row.seq)
    )
    finish_reason: Annotated[str | None, "end", Means("why it finished: stop, length, ...")]
    num_tokens: Annotated[int, Means("tokens of prompt and answer")]
    num_prompt_tokens: Annotated[int, "prompt", Means("tokens of the prompt", "tokens")]
    num_output_tokens: Annotated[int, "out", Means("tokens generated before this step", "tokens")]
    max_new_tokens: Annotated[int, Means("tokens that it may generate")]
    num_computed_tokens: Annotated[int, "computed", Means("tokens in the cache after this step", "tokens")]
    num_new_tokens: Annotated[int, "new", Means("tokens that this step computes", "tokens")] = computed(
        lambda row: row.now.new_tokens.get(row.seq_id, 0)
    )
    num_drafted_tokens: Annotated[int, "guessed", Means("of these, draft tokens that it verifies", "tokens")]
    num_guesses: Annotated[int, "guesses", Means("draft tokens that have been verified", "tokens")]
    num_right_guesses: Annotated[int, "right", Means("of these, accepted ones", "tokens")]
    num_cached_tokens: Annotated[int, "cached", Means("tokens that its last prefix lookup found", "tokens")]
    num_preemptions: Annotated[int, "preempted", Means("how often it has been preempted", "times")]
    num_recomputed_tokens: Annotated[int, "recomputed", Means("tokens recomputed", "tokens")]
    num_waited_steps: Annotated[int, "waited", Means("steps in which it has waited", "steps")] = computed(
        lambda row: row.seq.num_steps_waited(row.now.step)
    )
    num_blocks: Annotated[int, Means("blocks that it holds")] = computed(lambda row: len(row.seq.held_block_ids))
    block_table: Annotated[
        list[int | None], Means("its blocks in order; null: released, no later token sees it (sliding windows)")
    ] = computed(lambda row: row.seq.block_table.copy())
    ref_counts: Annotated[list[int | None], Means("how many sequences hold each block of the table")] = computed(
        lambda row: [None if each is None else row.now.state.ref_counts[each] for each in row.seq.block_table]
    )
    slots_written: Annotated[
        str | None,
        Means("slots that this step writes: block * block_size + place in it; of several groups, a ; between"),
    ] = computed(lambda row: written_slots(row.seq, row.num_new_tokens, row.now.state))
    waiting_reason: Annotated[str | None, Means("why it was not scheduled, if the scheduler said so")] = computed(
        lambda row: (
            waiting.reason
            if (waiting := row.now.waiting) and waiting.seq_id == row.seq_id
            else row.now.state.stalled_for(row.seq)
        )
    )
    status_now: Annotated[str, "state", Means("and how many tokens this step computes")] = computed(
        lambda row: f"{row.status} +{row.num_new_tokens}" if row.seq_id in row.now.new_tokens else row.status
    )
    progress: Annotated[str, "tokens", RIGHT, Means("in the cache / of the sequence")] = computed(
        lambda row: f"{row.num_computed_tokens}/{row.num_tokens}"
    )
    generated: Annotated[str, "out", RIGHT, Means("generated / at most", "tokens")] = computed(
        lambda row: f"{row.num_output_tokens}/{row.max_new_tokens}"
    )
    share: Annotated[Share, "of pool", Means("blocks that it holds / blocks of the pool")] = computed(
        lambda row: row.num_blocks / row.now.state.num_blocks
    )

    def __init__(self, seq: SeqState, now: Now) -> None:
        super().__init__(seq)
        self.seq, self.now = seq, now


class LookupRow(ShownRow):
    """A prefix lookup of a step."""

    USES: ClassVar = {
        "file": "seq_id request_id row_id reason own num_tokens blocks_asked blocks_hit tokens_hit first_miss"
        " missing_hash miss_reason partial_tokens shared_tokens disk_tokens blocks_shared blocks_revived blocks_fresh",
        "json": "",  # as the event
        "table": "seq_id label reason num_tokens blocks_asked tokens_hit blocks_taken first_miss why",
    }

    seq_id: SeqId
    request_id: RequestId
    row_id: RowId | None
    label: Label
    reason: Annotated[
        str, "lookup", Means("new, resumed (after a preemption) or continued (a chunked prompt found more)")
    ]
    own: Annotated[bool, Means("whether its request ran before, so that it finds the request's own blocks")] = computed(
        lambda row: row.repeats
    )
    num_tokens: Annotated[int, Means("tokens of the sequence")]
    blocks_asked: Annotated[int, "full blocks", Means("full blocks looked up")]
    blocks_hit: Annotated[int, Means("of these, found")]
    tokens_hit: Annotated[int, Means("tokens that need no computing")]
    first_miss: Annotated[
        int | None, "block {}".format, Means("place in the block table of the first full block not found, from 0")
    ]
    missing_hash: Annotated[Hash | None, Means("its hash")]
    miss_reason: Annotated[
        str | None, Means("caching_off, no_full_block or no_match; null: every full block was found")
    ]
    partial_tokens: Annotated[int, Means("tokens after the last hit with which a cached block also begins")]
    shared_tokens: Annotated[
        int | None, Means("tokens with which an earlier sequence also begins, cached or not; null: not counted")
    ]
    disk_tokens: Annotated[
        int | None, Means("of tokens_hit, those read from the prefix store for it; null: none is used")
    ] = computed(lambda row: None if row.event.disk_tokens is UNSET else row.event.disk_tokens)
    blocks_shared: Annotated[int | None, Means("blocks found while another sequence holds them; null: an older trace")]
    blocks_revived: Annotated[int | None, Means("blocks found on the free list, while nobody held them")]
    blocks_fresh: Annotated[int | None, Means("blocks taken from the free list, to be written")]
    blocks_taken: Annotated[
        dict[str, int] | None, "shared+revived+fresh", lambda taken: "+".join(map(str, taken.values()))
    ]
    why: Annotated[str, "why no more"] = computed(lambda row: why_no_more(row.event))

    def __init__(self, event: ev.PrefixLookedUp, seq: SeqState | None) -> None:
        super().__init__(event, seq)
        self.event = event


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A block with content, or in use, at a step."""

    block_id: Annotated[int, Means("number of the block, from 0")]
    state: Annotated[Literal["in_use", "cached"], Means("in_use or cached")]
    ref_count: Annotated[int, Means("sequences that hold it; 0: cached")]
    num_tokens: Annotated[int, Means("slots that hold a token after this step")]
    slots: Annotated[str, Means("these slots, counted over the pool: the first one is block_id * block_size")]
    hash: Annotated[
        Hash | None, Means("its content and all before it, 16 hexadecimal digits; null: partial, not yet findable")
    ]
    group: Annotated[int, Means("the group of layers whose K and V it holds, from 0")]
    seq_ids: Annotated[list[int], Means("the sequences that hold it")]
    requests: Annotated[list[str], Means("what they are called: the row's id, else the request's number")]


def block_rows(state: PoolState) -> Iterator[BlockRow]:
    """The blocks in use and the cached ones, in order."""
    owners = block_owners(state)
    for block_id, ref_count in enumerate(state.ref_counts):
        block_hash = state.hashes[block_id]
        if not ref_count and block_hash is None:
            continue
        held = owners.get(block_id, [])
        num_tokens = num_tokens_of(block_id, held, state)
        yield BlockRow(
            block_id, "in_use" if ref_count else "cached", ref_count, num_tokens,
            block_slots(block_id, num_tokens, state), block_hash, state.block_groups[block_id],
            [seq.seq_id for seq, _ in held], [seq.label for seq, _ in held],
        )  # fmt: skip


BlockKind = Literal["empty", "cached", "partial", "full", "shared"]


def block_kind(state: PoolState, block_id: int) -> BlockKind:
    """What a map of the pool shows of a block."""
    count, has_content = state.ref_counts[block_id], state.hashes[block_id] is not None
    if count > 1:
        return "shared"
    if count:
        return "full" if has_content else "partial"
    return "cached" if has_content else "empty"


def block_owners(state: PoolState) -> dict[int, list[tuple[SeqState, int]]]:
    """Block in use -> the sequences that hold it, each with the place of the block in its table."""
    owners: dict[int, list[tuple[SeqState, int]]] = {}
    for seq in state.seqs.values():
        for place, block_id in enumerate(seq.block_table):
            if block_id is not None:
                owners.setdefault(block_id, []).append((seq, place))
    return owners


def tokens_in_block(seq: SeqState, place: int, state: PoolState) -> int:
    """How many tokens of a sequence the block at a place of its table holds."""
    first = place // state.num_groups * state.block_size
    return min(max(seq.num_computed_tokens - first, 0), state.block_size)


def num_tokens_of(block_id: int, held: Iterable[tuple[SeqState, int]], state: PoolState) -> int:
    """How many tokens a block holds; `held`: its sequences, see block_owners."""
    unheld = 0 if state.hashes[block_id] is None else state.block_size
    return max((tokens_in_block(seq, place, state) for seq, place in held), default=unheld)


def block_slots(block_id: int, num_tokens: int, state: PoolState) -> str:
    """`3072-3115`: the slots of so many tokens of a block."""
    first = block_id * state.block_size
    return id_ranges(range(first, first + num_tokens))


def written_slots(seq: SeqState, num_new_tokens: int, state: PoolState) -> str | None:
    """`1280-1535 3072-3115`: the slots of a sequence that the current step writes, a text per group of layers."""
    size, num_groups, end = state.block_size, state.num_groups, seq.num_computed_tokens + seq.num_drafted_tokens
    positions = range(max(end - num_new_tokens, seq.num_found_tokens), end) if num_new_tokens else ()
    if not positions:
        return None
    texts = []
    for group in range(num_groups):
        places = [(seq.block_table[each // size * num_groups + group], each % size) for each in positions]
        texts.append(id_ranges(block_id * size + at for block_id, at in places if block_id is not None))
    return "; ".join(texts)


_RECENT = f"over the last {ROLLING_STEPS} steps"


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step, as its forward pass sees the pool."""

    start_ms: Annotated[
        float, Means("when it began, in milliseconds after the first step of the run, without paused time")
    ]
    num_running: Annotated[int, Means("sequences that hold blocks")]
    num_waiting: Annotated[int, Means("sequences that wait, preempted ones included")]
    num_stalled: Annotated[int, Means("running ones that stand still, as a block or a slot is not free for them")]
    num_finished: Annotated[int, Means("sequences that have finished so far")]
    num_new_tokens: Annotated[int, Means("tokens that the step computes")]
    num_drafted: Annotated[int, Means("of these, draft tokens that it verifies")]
    accepted_rate: Annotated[Share | None, Means("accepted / verified draft tokens, 0 to 1, of the steps before")]
    num_blocks: Annotated[int, Means("blocks of the pool = in use + cached + empty")]
    used_blocks: Annotated[int, Means("blocks in use: at least one sequence holds them")]
    shared_blocks: Annotated[int, Means("of these, held by more than one sequence")]
    cached_blocks: Annotated[int, Means("blocks that nobody holds, but whose content can still be found")]
    empty_blocks: Annotated[int, Means("blocks without content; they have no row in blocks")]
    unfilled_slots: Annotated[int, Means("slots of blocks in use that hold no token")]
    num_preemptions: Annotated[int, Means("sequences that the step has preempted")]
    num_evictions: Annotated[int, Means("cached blocks that the step has evicted")]
    waiting_seq_id: Annotated[int | None, Means("the first waiting sequence, if the scheduler said why it waits")]
    waiting_reason: Annotated[str | None, Means(f"why: {', '.join(_REASONS[:-1])} or {_REASONS[-1]}")]
    hit_rate: Annotated[
        Share | None, Means("tokens found / tokens looked up, 0 to 1, by first lookups of requests since the start")
    ]
    block_hit_rate: Annotated[Share | None, Means("full blocks found / full blocks looked up, by the same lookups")]
    recent_hit_rate: Annotated[Share | None, Means(f"hit_rate, {_RECENT}")]
    recent_block_hit_rate: Annotated[Share | None, Means(f"block_hit_rate, {_RECENT}")]
    own_hit_rate: Annotated[
        Share | None, Means("tokens found / looked up by requests that ran before (preempted, or more samples)")
    ]
    own_block_hit_rate: Annotated[Share | None, Means("full blocks found / looked up by the same lookups")]


def step_row(state: PoolState, stats: RunStats, first_ns: int) -> StepRow:
    """The current step, which was scheduled. `first_ns`: the start of the first step."""
    step, run, recent = state.step, stats.run, stats.rolling
    assert step is not None, "it was scheduled"
    waiting, num_before = step.waiting, stats.facts.num_drafted_tokens - step.num_drafted
    return StepRow(
        (step.start_ns - first_ns) / 1e6, state.num_running, len(state.seqs) - state.num_running, state.num_stalled,
        state.num_finished,
        sum(step.num_new_tokens), step.num_drafted,
        stats.facts.num_accepted_tokens / num_before if num_before else None,
        state.num_blocks, state.num_used_blocks, state.num_shared_blocks,
        state.num_cached_blocks, state.num_empty_blocks, state.num_unfilled_slots(), len(step.preemptions),
        step.num_evicted, None if waiting is None else waiting.seq_id, None if waiting is None else waiting.reason,
        run.from_others.token_rate, run.from_others.block_rate, recent.from_others.token_rate,
        recent.from_others.block_rate, run.own.token_rate, run.own.block_rate,
    )  # fmt: skip
