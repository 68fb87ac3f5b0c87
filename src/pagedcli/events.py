"""Events: facts about what the engine did, in the past tense. Ids, counts and reasons, never text.

Emitted by the object that changed the state, after the change; folded by trace.state.PoolState. With
`emit is None` no event is built. Only step events carry times. Token ids are None unless the user asked for them.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

SCHEMA_VERSION = 4
OLDEST_SCHEMA = 3  # the oldest readable one, in which copies of evicted content were not found
TokenId = Annotated[int, msgspec.Meta(ge=0, le=0x10FFFF)]  # no vocabulary is larger, and such ids compare as characters
MissReason = Literal["caching_off", "no_full_block", "no_match"]
Eviction = str  # the name of a policy in core.eviction.POLICIES
Speculation = Literal["off", "ngram"]
DraftSource = Literal["own_text", "answers", "grammar", "mtp"]  # mtp: in traces of earlier versions
FinishReason = Literal["stop", "length", "score", "abort", "error"]
WaitingReason = Literal[
    "max_num_seqs", "token_budget", "free_blocks", "preemption", "state_slots", "checkpoint", "min_prefill_tokens"
]
SnapshotReason = Literal["branch", "interval", "end", "store"]  # see core.states; store: of an earlier run

# the words of each reason, next to its name; what needs numbers is made of them in views.words
MISS_WORDS: dict[MissReason, str] = {
    "caching_off": "prefix caching is off",
    "no_full_block": "no full block",
    "no_match": "not cached",
}
DRAFT_WORDS: dict[DraftSource, str] = {
    "own_text": "their own text",
    "answers": "finished answers",
    "grammar": "their grammar",
    "mtp": "the model's MTP head",
}
WAITING_WORDS: dict[str, str] = {  # WaitingReason -> words
    "max_num_seqs": "sequence limit",
    "token_budget": "token budget",
    "free_blocks": "free blocks",
    "preemption": "room for a preempting sequence",
    "min_prefill_tokens": "more prompts to start with",
    "state_slots": "slots of recurrent state",
    "checkpoint": "snapshot of a running sequence",
}
SNAPSHOT_WORDS: dict[SnapshotReason, str] = {
    "branch": "waiting prompts that part there",
    "interval": "the interval of --checkpoints",
    "end": "the end of the prompt",
    "store": "the prefix store, which has it from an earlier run",
}


def _snake_case(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Event(msgspec.Struct, frozen=True, gc=False, tag_field="event", tag=_snake_case):
    """Base of all events. In a trace file each is one JSON object whose `event` names its type."""


class CacheGroup(msgspec.Struct, frozen=True, gc=False):
    """Layers whose K and V of the same tokens are in one block, see core.groups."""

    window: int | None = None  # tokens that a query sees, itself included; None: all before it
    layers: tuple[int, ...] = ()  # rising; empty: not known, in simulations without a model
    heads: tuple[int, int] | None = None  # key/value heads of each layer, and their size; None: the model's
    token_bytes: int | None = None  # K and V of a token in all of them; None: not known
    value_dim: int | None = None  # V is the first so many elements of K, which alone is kept; None: V is, too

    def used_bytes(self, block_size: int) -> int | None:
        """Bytes that they take of a block, whose rest stays unused; None: not known."""
        return None if self.token_bytes is None else self.token_bytes * block_size


class EngineStarted(Event, frozen=True, gc=False):
    """First record of a trace: the plan of the engine."""

    schema_version: int
    pagedcli_version: str
    time_ns: int  # Unix time
    model: str
    device: str
    dtype: str
    backend: str
    refused: tuple[str, ...]  # why faster backends were not chosen, one line each
    num_blocks: int
    block_size: int  # tokens per block
    block_bytes: int  # bytes of one block, K and V of all layers of a group
    max_model_len: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill_size: int | None  # tokens of one sequence per step, None: no limit
    enable_prefix_caching: bool
    eviction: Eviction = "lru"  # the policy of the block pool
    min_prefill_tokens: int = 0  # prompt tokens that start together in a step of decodes; fewer wait for some steps
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)  # groups of layers that share the pool
    preemption_policy: Literal["last", "largest"] = "last"
    step_times: str | None = None  # the calibration of its steps, where they are timed: see planning.step_time
    kinds: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET  # kinds of cache next to the blocks, see core.cache
    # how next tokens are guessed, see core.drafts; the last two in traces of earlier versions
    speculation: Speculation | Literal["mtp", "auto"] = "off"
    part: int = 1  # part of a resumed run's trace, each with an empty pool at first; set by the reader of several files

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group, tokens; None: all are seen."""
        return tuple(group.window for group in self.groups)


class RequestAdded(Event, frozen=True, gc=False):
    """A sequence joined the waiting queue. A request with n > 1 is n sequences with the same request_id."""

    seq_id: int
    request_id: str
    sample_index: int  # 0 ... n-1
    num_prompt_tokens: int
    max_new_tokens: int
    salted: bool  # whether it has a cache_salt and shares blocks only with requests of the same salt
    token_ids: tuple[TokenId, ...] | None = None  # the prompt, only if the user asked for tokens
    row_id: str | None = None  # the id that the user gave the row; None: there is none, or ids are private
    beam_width: int | None = None  # sequences of a beam search, for which the first one needs room
    salt: int | msgspec.UnsetType = (
        msgspec.UNSET
    )  # number of its cache_salt, as they appear; the salt itself is private
    # It scores given tokens and generates nothing: so many tokens of its prompt are the context, which alone is looked
    # up. One whose prompt is all context keeps its blocks until the continuations have forked from it.
    num_context_tokens: int | msgspec.UnsetType = msgspec.UNSET


class RequestRefused(Event, frozen=True, gc=False):
    """A request that can never fit was refused; others are not affected."""

    request_id: str
    code: str
    message: str
    row_id: str | None = None


class PrefixLookedUp(Event, frozen=True, gc=False):
    """One prefix-cache lookup: when a waiting sequence was admitted, or when a chunked prompt found its next blocks
    filled by others (continued; recorded only on a hit)."""

    seq_id: int
    reason: Literal["new", "resumed", "continued"]  # resumed: after a preemption
    num_tokens: int  # tokens of the sequence at the lookup
    blocks_asked: int  # full blocks of these tokens; continued: of those not yet computed
    blocks_hit: int
    tokens_hit: int  # tokens that need no computing; at most num_tokens - 1
    first_miss: int | None  # index in the block table of the first full block not found
    missing_hash: int | None  # chain hash of its first missing group of layers
    miss_reason: MissReason | None  # None: every full block hit
    partial_tokens: int  # tokens after the last hit that match the start of a cached block after the same prefix
    # first lookup of a request: tokens that an earlier sequence begins with, too, cached or not; None: not compared
    shared_tokens: int | None = None
    vetoed_by: str | msgspec.UnsetType = msgspec.UNSET  # the kind of cache that allowed less than the blocks
    disk_tokens: int | msgspec.UnsetType = msgspec.UNSET  # part of tokens_hit, restored for it; UNSET: without a store
    # the blocks that the sequence takes now, in all groups of layers; UNSET: an older trace, or another engine's
    blocks_shared: int | msgspec.UnsetType = msgspec.UNSET  # found while other sequences hold them
    blocks_revived: int | msgspec.UnsetType = msgspec.UNSET  # found on the free list
    blocks_fresh: int | msgspec.UnsetType = msgspec.UNSET  # taken from the free list, to be written

    @property
    def blocks_taken(self) -> dict[str, int] | None:
        """The blocks that the sequence takes now, by where they come from; None: not known."""
        shared, revived, fresh = self.blocks_shared, self.blocks_revived, self.blocks_fresh
        if shared is msgspec.UNSET or revived is msgspec.UNSET or fresh is msgspec.UNSET:
            return None
        return {"shared": shared, "revived": revived, "fresh": fresh}


class BlocksReused(Event, frozen=True, gc=False):
    """Cached blocks were shared with a sequence: ref_count + 1 each; a free one left the free list. None stands for a
    block that no later token sees."""

    seq_id: int
    block_ids: tuple[int | None, ...]


class BlocksAllocated(Event, frozen=True, gc=False):
    """Fresh blocks were taken from the front of the free list: ref_count 1, no hash."""

    seq_id: int
    block_ids: tuple[int, ...]


class BlockEvicted(Event, frozen=True, gc=False):
    """A free cached block was evicted, to be allocated with new content. Precedes BlocksAllocated. If lookups found its
    content in it, and other blocks hold that, too, they find it in the first filled of these from now on."""

    block_id: int
    hash: int
    for_seq_id: int | msgspec.UnsetType = msgspec.UNSET  # the sequence that needed a block; UNSET: an older trace


class BlocksRestored(Event, frozen=True, gc=False):
    """Blocks were taken from the front of the free list, filled with what was read from a store, and released, the last
    one first: free and cached from now on. A sequence that is about to look its prefix up finds them."""

    seq_id: int
    indices: tuple[int, ...]  # entries of the block table that the sequence will have
    block_ids: tuple[int, ...]  # one per entry
    hashes: tuple[int, ...]  # chain hashes of all entries up to the last one, those before the first included

    @property
    def blocks(self) -> list[tuple[int, int, int, int | None]]:
        """Entry, block, hash, and the hash before it."""
        hashes = self.hashes
        return [
            (index, block_id, hashes[index], hashes[index - 1] if index else None)
            for index, block_id in zip(self.indices, self.block_ids, strict=True)
        ]


class BlocksFilled(Event, frozen=True, gc=False):
    """Blocks were filled by this step's tokens and hashed; they are shareable from now on."""

    seq_id: int
    block_ids: tuple[int, ...]
    hashes: tuple[int, ...]


class BlocksReleased(Event, frozen=True, gc=False):
    """A sequence released these blocks in this order: ref_count - 1 each; at 0 a full one went to the back of the free
    list (still cached) and a partial one to its front."""

    seq_id: int
    block_ids: tuple[int, ...]


class WindowPassed(Event, frozen=True, gc=False):
    """A sequence released these blocks, as no later token sees them: ref_count - 1 each, in this order; at 0 as in
    BlocksReleased. Their entries in its block table became None."""

    seq_id: int
    block_ids: tuple[int, ...]


class BlockCopied(Event, frozen=True, gc=False):
    """Copy on write: the sequence's shared partial block was replaced by its own copy (taken before, see
    BlocksAllocated), and the shared one released (see BlocksReleased)."""

    seq_id: int
    source_block_id: int
    copy_block_id: int


class SequenceForked(Event, frozen=True, gc=False):
    """A sequence without blocks shares all blocks of its parent: ref_count + 1 each. It is new, or a beam that was
    dropped: then it has released its blocks, and now has the parent's tokens."""

    parent_seq_id: int
    seq_id: int
    block_ids: tuple[int | None, ...]  # the parent's block table
    num_computed_tokens: int


class StateSlotsMade(Event, frozen=True, gc=False):
    """Follows EngineStarted of a model with recurrent state: its slots, all of them empty."""

    num_slots: int
    slot_bytes: int  # size of one slot, over all layers with a state
    checkpoints: str  # the policy of the configuration


class CheckpointLookedUp(Event, frozen=True, gc=False):
    """Precedes the PrefixLookedUp of a model with recurrent state: what attention and the state allowed. With a slot,
    the sequence holds it and continues from it: ref_count + 1; an idle one is no longer idle."""

    seq_id: int
    cached_tokens: int  # leading tokens of full blocks whose K and V are cached in all groups of layers
    checkpoint_tokens: int  # tokens before the snapshot that is used: the hit
    slot_id: int | None  # slot of the snapshot; None: there is none


class StateSlotTaken(Event, frozen=True, gc=False):
    """A sequence took the first empty slot: its next step writes it, and reads the slot that it held before, if any,
    which it releases in the step after. With guesses of which some are wrong, it releases the new slot in the same step
    and keeps the other."""

    seq_id: int
    slot_id: int


class StateSlotsReleased(Event, frozen=True, gc=False):
    """A sequence released these slots in this order: ref_count - 1 each; at 0 a snapshot became idle, any other slot
    empty, in both cases as the last one."""

    seq_id: int
    slot_ids: tuple[int, ...]


class CheckpointMade(Event, frozen=True, gc=False):
    """The state that a sequence's step writes is kept: lookups of later steps find it, and nobody writes the slot."""

    seq_id: int
    slot_id: int
    hash: int  # hash of the chain of blocks before the snapshot
    num_tokens: int  # tokens before the snapshot, a multiple of the block size
    reason: SnapshotReason


class CheckpointDropped(Event, frozen=True, gc=False):
    """A snapshot was dropped, as no slot was empty. An idle slot became the last empty one; of a slot that a single
    sequence held, that sequence continues in place."""

    slot_id: int
    hash: int


class CheckpointRestored(Event, frozen=True, gc=False):
    """The first empty slot was filled with a snapshot that was read from a store: idle, as the last one. It follows
    the BlocksRestored of the same sequence, if any; the sequence is about to look its prefix up."""

    seq_id: int
    slot_id: int
    hash: int  # hash of the chain of blocks before the snapshot
    num_tokens: int  # tokens before the snapshot, a multiple of the block size

    @property
    def reason(self) -> SnapshotReason:
        """Why there is one."""
        return "store"


class StatesRecovered(Event, frozen=True, gc=False):
    """A step failed (see StepFailed, which follows). No sequence holds a slot. The snapshots known to be written are
    idle, all other slots empty, sorted by id."""

    idle_slot_ids: tuple[int, ...]  # first released first


class RequestPreempted(Event, frozen=True, gc=False):
    """A running sequence returned to the waiting queue; its tokens are recomputed later."""

    seq_id: int
    for_seq_id: int  # the sequence that needed the blocks (may be itself)
    num_blocks_needed: int
    num_tokens_dropped: int  # computed tokens that were dropped
    num_blocks_freed: int  # blocks whose ref_count became 0


class RequestWaiting(Event, frozen=True, gc=False):
    """The first sequence of the waiting queue was not scheduled in this step, with the reason."""

    seq_id: int
    reason: WaitingReason
    num_blocks_needed: int
    num_free_blocks: int


class StepStarted(Event, frozen=True, gc=False):
    """A step began; the changes of scheduling follow."""

    step: int
    time_ns: int  # monotonic clock


class StepScheduled(Event, frozen=True, gc=False):
    """What the step computes."""

    step: int
    seq_ids: tuple[int, ...]
    num_new_tokens: tuple[int, ...]  # per sequence of seq_ids, guessed ones included
    num_waiting: int


class TokensDrafted(Event, frozen=True, gc=False):
    """So many next tokens of these sequences have been guessed: the step that is scheduled next computes them after the
    last token of each, to find out which are right. Blocks that they need were allocated before."""

    seq_ids: tuple[int, ...]
    num_drafted: tuple[int, ...]  # per sequence of seq_ids
    sources: tuple[DraftSource, ...]  # per sequence: where its guess comes from


class DraftChecked(Event, frozen=True, gc=False):
    """The first guessed tokens of a sequence were what it generates, up to one that was not or that came after its end:
    they are its tokens, and computed. What the others took was released: these blocks, as in BlocksReleased."""

    seq_id: int
    num_drafted: int
    num_accepted: int
    block_ids: tuple[int, ...]
    token_ids: tuple[TokenId, ...] | None = None  # the accepted ones, only if the user asked for tokens
    # the last computed tokens that its recurrent state has not seen: its next step computes them once more
    num_again: int = 0


class TokensSampled(Event, frozen=True, gc=False):
    """One new token for each of these sequences."""

    seq_ids: tuple[int, ...]
    token_ids: tuple[TokenId, ...] | None = None  # only if the user asked for tokens


class RequestFinished(Event, frozen=True, gc=False):
    """A sequence ended. Its blocks are released right after (see BlocksReleased)."""

    seq_id: int
    reason: FinishReason
    num_output_tokens: int


class StepFinished(Event, frozen=True, gc=False):
    """A step ended. Times exclude the time spent in observers, which is observer_ns."""

    step: int
    time_ns: int  # monotonic clock
    schedule_ns: int
    forward_ns: int  # model and logits
    sample_ns: int
    observer_ns: int


class StepFailed(Event, frozen=True, gc=False):
    """A step raised and ended. All running sequences wait again, without blocks or computed tokens. Every block is
    free: those known to be written are still cached, all others are empty."""

    step: int
    time_ns: int  # monotonic clock
    seq_ids: tuple[int, ...]  # sequences that wait again, ahead of all others and in this order
    cached_block_ids: tuple[int, ...]  # cached blocks in eviction order, after the empty ones by id


AnyEvent = (
    EngineStarted | RequestAdded | RequestRefused | PrefixLookedUp | BlocksReused | BlocksAllocated | BlockEvicted
    | BlocksRestored
    | BlocksFilled | BlocksReleased | WindowPassed | BlockCopied | SequenceForked | RequestPreempted | RequestWaiting
    | StateSlotsMade | CheckpointLookedUp | StateSlotTaken | StateSlotsReleased | CheckpointMade | CheckpointDropped
    | CheckpointRestored
    | StatesRecovered
    | StepStarted | TokensDrafted | StepScheduled | DraftChecked | TokensSampled | RequestFinished | StepFinished
    | StepFailed
)  # fmt: skip
Emit = Callable[[Event], None]


def to_all(*observers: Emit | None) -> Emit | None:
    """An observer that passes each event on to all of these, in their order; None: there is none."""
    present = [observer for observer in observers if observer is not None]
    if len(present) < 2:
        return present[0] if present else None

    def emit(event: Event) -> None:
        for observer in present:
            observer(event)

    return emit


def only_wanted(emit: Emit, *, tokens: bool, row_ids: bool) -> Emit:
    """An observer that passes the events on to `emit`, without the private fields that are not wanted."""
    unwanted = tuple(name for name, wanted in (("token_ids", tokens), ("row_id", row_ids)) if not wanted)
    if not unwanted:
        return emit

    def emit_wanted(event: Event) -> None:
        present = {name: None for name in unwanted if getattr(event, name, None) is not None}
        emit(msgspec.structs.replace(event, **present) if present else event)

    return emit_wanted
