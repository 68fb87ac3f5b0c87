"""Why no more was found in a prefix cache: per run, per request and per block, of our own runs and of the requests
that a server's events show, in the same words. A pure function of what `views.explain`, `views.block_life` and
`kvevents` have folded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pagedcli.events import MISS_WORDS
from pagedcli.kvevents.fold import KVState
from pagedcli.printable import capitalized, percent_text, plural
from pagedcli.records import Share, computed
from pagedcli.trace.seq_state import SeqState
from pagedcli.trace.state import PoolState
from pagedcli.trace.tokens import Decode
from pagedcli.views.block_life import BlockLife
from pagedcli.views.explain import (
    LOSS_WORDS,
    Explainer,
    FirstDifference,
    Lookup,
    Reason,
    SnapshotRow,
    Totals,
    longest_shared_prefix,
    totals_of,
)
from pagedcli.views.rows import LookupRow, ShownRow
from pagedcli.views.words import accepted_words, again_words, seq_name, when

_MOST_TOLD = 4  # lookups of a request that are told in sentences
_MOST_NAMED = 3  # sequences that hold a block
_WORTH_SAYING = 0.01  # share of the blocks that were stored
_MOST_OF_IT = 0.9  # share of what the largest cache would have kept
_MORE_MEMORY = (
    "give the cache more memory (vLLM: --gpu-memory-utilization, SGLang: --mem-fraction-static,"
    " TensorRT-LLM: free_gpu_memory_fraction)"
)

REASON_WORDS: dict[Reason, str] = {
    "all_hit": "every full block was cached",
    "evicted": "the content had been cached, but was evicted",
    "cleared": "the content had been cached, but the whole cache was reset",
    "restarted": "the content had been cached, but the server restarted with an empty cache",
    "unfindable": "the content is in the pool, but the block indexed under its hash was evicted",
    "in_flight": "another running sequence was still computing the same block",
    "not_seen_before": "the next block had never been computed before",
    "shorter_than_block": "the shared prefix is shorter than a block",
    "no_shared_prefix": "no cached block matches the start of this prompt",
    "different_salt": "the same tokens are cached under another cache_salt",
    "no_full_block": "the prompt is shorter than a block",
    "caching_off": MISS_WORDS["caching_off"],
    "hash_collision": "the block with this hash holds other tokens",
    "not_known": "the sequence ended before it reached the missing block",
    "no_snapshot": "K and V of the next block are cached, but no snapshot of the recurrent state",
}
PART_WORDS = {  # parts of Totals -> what became of these tokens
    "hit": "hit",
    "disk_hit": "hit: read from the prefix store",
    "late_hit": "hit later: computed by another meanwhile",
    **{part: f"lost: {LOSS_WORDS[part]}" for part in ("vetoed", "evicted", "in_flight")},
    "first_seen": "seen for the first time",
    "first_seen_shared": "  of these: shared in a partial block",
    "last_block": "after the last full block",
    "last_block_shared": "  of these: shared in a partial block",
    "last_token": "last token of a prompt cached in full",
    "caching_off": MISS_WORDS["caching_off"],
    "not_known": "unknown: the sequence ended first",
    "num_tokens": "all tokens looked up",
    "ideal": "ceiling: an unlimited cache",
}


@dataclass(frozen=True, slots=True)
class ReasonRow:
    """Lookups that ended for one reason."""

    reason: Annotated[str, "outcome"]
    lookups: Annotated[int, "first lookups"]
    own_lookups: Annotated[int, "later lookups"]
    meaning: Annotated[str, "because"]


class SaltRow(ShownRow):
    """The first lookups of the requests of one cache_salt."""

    USES: ClassVar = {"table": "salt label num_lookups num_tokens tokens_hit hit_rate"}

    salt: Annotated[str, "cache_salt"]
    label: Annotated[str, "first request"]
    num_lookups: int
    num_tokens: int
    tokens_hit: int
    hit_rate: Annotated[Share, "hit rate"] = computed(lambda row: row.tokens_hit / max(1, row.num_tokens))

    def __init__(self, salt: str, label: str) -> None:
        super().__init__()
        self.salt, self.label = salt, label
        self.num_lookups = self.num_tokens = self.tokens_hit = 0


@dataclass(frozen=True, slots=True)
class Reasons:
    """Why the lookups of a run, or of the requests that a server's events show, ended where they did."""

    answer: str
    lookups: list[Lookup]
    block_size: int
    snapshots: list[SnapshotRow] = field(default_factory=list)
    lost_content: str | None = None  # what failed steps lost, in words

    def totals(self, *, own: bool) -> Totals:
        return totals_of(self.lookups, own=own)

    def longest_shared_prefix(self) -> int:
        """Tokens."""
        return longest_shared_prefix(self.lookups)

    def rows(self) -> list[ReasonRow]:
        """The reasons that there are, with their counts."""
        first, own = (self.totals(own=own).reasons for own in (False, True))
        words = REASON_WORDS.items()
        return [ReasonRow(each, first[each], own[each], text) for each, text in words if first[each] or own[each]]

    def lost(self) -> list[Lookup]:
        """The lookups that lost tokens, most first."""
        return sorted(filter(Lookup.num_lost_tokens, self.lookups), key=Lookup.num_lost_tokens, reverse=True)

    def salts(self) -> list[SaltRow]:
        """The hit rate of each cache_salt, that of the most tokens first; empty if no request has one."""
        rows: dict[str | None, SaltRow] = {}
        for lookup in self.lookups:
            if lookup.own:
                continue
            row = rows.get(lookup.salt)
            if row is None:
                name = lookup.salt or ("not named in this trace" if lookup.salted else "none")
                row = rows[lookup.salt] = SaltRow(name, lookup.label)
            row.num_lookups += 1
            row.num_tokens += lookup.event.num_tokens
            row.tokens_hit += lookup.tokens_hit
        salted = any(salt is not None for salt in rows)
        return sorted(rows.values(), key=lambda row: -row.num_tokens) if salted else []


class ExplainedLookup(LookupRow):
    """A lookup with its outcome."""

    USES: ClassVar = {
        "json": "step seq_id request_id row_id label kind num_tokens blocks_asked blocks_hit tokens_hit"
        " ideal_tokens_hit lost_tokens first_miss reason why evicted_step"
        " evicted_block_id evicted_for num_more_blocks partial_tokens disk_tokens blocks_taken divergence",
        "table": "step seq_id label kind num_tokens blocks_asked tokens_hit blocks_taken ideal_tokens_hit"
        " first_miss lost_tokens why",
        "page": "step seq_id label kind num_tokens blocks_asked tokens_hit blocks_taken ideal_tokens_hit reason why"
        " divergence",
        "nowhere": "own missing_hash miss_reason shared_tokens blocks_shared blocks_revived blocks_fresh",
    }

    step: int | None
    kind: Annotated[str, lambda kind: "later" if kind == "own" else kind]
    ideal_tokens_hit: Annotated[int, "ideal tokens"]
    lost_tokens: Annotated[int, "tokens lost"] = computed(lambda row: row.lookup.num_lost_tokens())
    why: Annotated[str, "why it ended there"] = computed(lambda row: why_it_ended(row.lookup))
    evicted_step: int | None
    evicted_block_id: int | None
    evicted_for: str | None
    num_more_blocks: int | None
    divergence: str | None

    def __init__(self, lookup: Lookup, decode: Decode | None) -> None:
        ShownRow.__init__(self, lookup, lookup.event)
        self.lookup = lookup
        split = None if lookup.reason == "caching_off" else lookup.divergence  # None where it costs nothing
        self.divergence = None if split is None else divergence_text(split, decode)


# ---------------------------------------------------------------------- a run


def why(explainer: Explainer, state: PoolState) -> Reasons:
    """Why a run found no more, by what is known at its end."""
    lost_content = None
    if failed := explainer.num_failed_steps:
        lost = plural(explainer.num_lost_blocks, "block")
        lost_content = f"{plural(failed, 'step')} failed; the content of {lost} was dropped"
    answer = _of_run(explainer, state)
    return Reasons(answer, explainer.lookups, explainer.block_size, explainer.snapshots, lost_content)


def _of_run(explainer: Explainer, state: PoolState) -> str:
    """How much of a run's prompts came from the cache, how much could have, and what the rest was lost to."""
    first = totals_of(explainer.lookups, own=False)
    if not first.num_tokens:
        return "No prompt was looked up in the prefix cache."
    tokens, num_blocks = plural(first.num_tokens, "prompt token"), plural(state.started.num_blocks, "block")
    lost = {part: getattr(first, part) for part in LOSS_WORDS}
    losses = {part: f"{plural(count, 'token')} {LOSS_WORDS[part]}" for part, count in lost.items() if count}
    if "evicted" in losses:
        were = "was" if state.started.num_blocks == 1 else "were"
        losses["evicted"] = f"{num_blocks} {were} too few ({losses['evicted']})"
    if first.caching_off:
        said = f"Prefix caching was off: all of {tokens} were computed"
    else:
        said = f"{percent_text(first.num_found / first.num_tokens)} of {tokens} came from the cache"
        if first.ideal > first.num_found:
            could = f"; an unlimited cache would find {percent_text(first.ideal / first.num_tokens)}"
            said += could + (f": {', '.join(losses.values())}" if losses else "")
        else:
            said += ", as much as an unlimited cache would find"
    if num_preemptions := sum(seq.num_preemptions for seq in state.all_seqs()):
        again = plural(state.num_recomputed_tokens, "token")
        said += f"; {plural(num_preemptions, 'preemption')}: {again} recomputed"
    if words := _draft_words(state.all_seqs()):
        said += f"; {words}{again_words(state.num_again_tokens)}"
    return f"{said}."


def _draft_words(seqs: Iterable[SeqState]) -> str | None:
    """How many draft tokens of sequences were accepted; None: nothing was drafted."""
    counts = [(seq.num_right_guesses, seq.num_guesses) for seq in seqs]
    num_right, num_guesses = map(sum, zip(*counts, strict=True)) if counts else (0, 0)
    return accepted_words(num_right, num_guesses) if num_guesses else None


# ---------------------------------------------------------------------- a request


def why_of_request(lookups: Sequence[Lookup], decode: Decode | None, seqs: Iterable[SeqState]) -> list[str]:
    """What the lookups of a request found, why they ended, where its prompt diverged, and how many draft tokens were
    accepted, in sentences."""
    told = [lookup_story(lookup) for lookup in lookups[:_MOST_TOLD]]
    if len(lookups) > _MOST_TOLD:
        told.append(f"It looked up {len(lookups) - _MOST_TOLD:,} more times.")
    diverged = dict.fromkeys(ExplainedLookup(lookup, decode).divergence for lookup in lookups)
    words = [*diverged, _draft_words(seqs)]
    return [*told, *(f"{capitalized(each)}." for each in words if each is not None)]


def why_it_ended(lookup: Lookup) -> str:
    """The reason as text, with numbers."""
    event, words, size = lookup.event, REASON_WORDS[lookup.reason], lookup.block_size
    if lookup.num_late:
        later = "was" if lookup.late_tokens_hit == 1 else "were"
        words += f"; {plural(lookup.late_tokens_hit, 'token')} {later} reused later from another sequence"
    match lookup.reason:
        case "all_hit" if event.tokens_hit < event.blocks_hit * size:
            return f"{words}; the last token is always computed: its logits give the next token"
        case "evicted" | "cleared" | "restarted":
            more = lookup.num_more_blocks
            would = "" if more is None else f"; keeping it would take at least {plural(more, 'more block')}"
            return f"{words} at {lookup.unit} {lookup.evicted_step}{would}"
        case "no_snapshot":
            last = f"the last one is at {event.tokens_hit:,}" if event.tokens_hit else "there is none"
            return f"{lookup.kv_tokens:,} tokens of K and V are cached, but a snapshot of the state is needed: {last}"
        case "not_seen_before" | "shorter_than_block" if event.partial_tokens:
            return f"{words}: {plural(event.partial_tokens, 'more token')} shared, a block is {size}"
        case "no_shared_prefix" if lookup.salted:
            return f"{words} (under its cache_salt)"
    return words


def lookup_story(lookup: Lookup) -> str:
    """What a lookup found and why it ended there, in sentences."""
    event, size = lookup.event, lookup.block_size
    when_ = "" if lookup.step is None else f" at {lookup.unit} {lookup.step:,}"
    if lookup.reason == "caching_off":
        were_computed = f"its {plural(event.num_tokens, 'token')} {'was' if event.num_tokens == 1 else 'were'} computed"
        began = f"Request {lookup.label} (seq {lookup.seq_id}) began{when_} without a prefix lookup"
        return f"{began}, as prefix caching is off: {were_computed}."
    whose = "looked up again what it had" if lookup.own else "looked up its prompt"
    share = percent_text(lookup.tokens_hit / event.num_tokens) if event.num_tokens else "nothing"
    said = (
        f"Request {lookup.label} (seq {lookup.seq_id}) {whose}{when_}: {lookup.tokens_hit:,} of"
        f" {plural(event.num_tokens, 'token')} ({share}) came from the cache"
    )
    if lookup.reason != "evicted" or event.first_miss is None:
        return f"{said}. Why it ended there: {why_it_ended(lookup)}."
    first = event.first_miss * size
    culprit = "" if lookup.evicted_for is None else f" to make room for request {lookup.evicted_for}"
    wanted = lookup.wanted_step
    last = "" if wanted is None else f"; the last lookup that wanted it came at step {wanted:,}"
    more = lookup.num_more_blocks
    kept = "" if more is None else f" {plural(more, 'more block')} would have kept it."
    return (
        f"{said}. The block of tokens {first:,} to {first + size - 1:,} had been cached in block"
        f" {lookup.evicted_block_id}, but was evicted at step {lookup.evicted_step}{culprit}{last}.{kept}"
    )


def divergence_text(split: FirstDifference, decode: Decode | None) -> str:
    """`first divergence at token 3: earlier "... b c" vs prompt "... b d"`; token ids where they cannot be decoded."""

    def shown(token_ids: tuple[int, ...]) -> str:
        ids = split.shared_tail + token_ids
        text = str(list(ids)) if decode is None else f'"{decode(ids)}"'
        return text if token_ids else f"{text} (its end)"

    if not split.own_next and not split.other_next:
        return f"all of {plural(split.num_shared_tokens, 'token')} match request {split.other_label}"
    at = f"first divergence at token {split.num_shared_tokens}"
    if not split.has_ids:
        return f"{at} from request {split.other_label}"
    return f"{at}: earlier {shown(split.other_next)} (request {split.other_label}) vs prompt {shown(split.own_next)}"


# ---------------------------------------------------------------------- a block


def why_of_block(life: BlockLife, state: PoolState) -> str:
    """Who holds a block now, or who did, and for whom its last content was evicted."""
    block, owners = f"block {life.block_id}", life.owners
    finding = f"{when(state.step_number)} "
    if owners:
        names = [f"{seq_name(state, each.seq_id)} since {when(each.since, '')}" for each in owners[:_MOST_NAMED]]
        more = len(owners) - len(names)
        finding += f"{block} is held by {', '.join(names)}" + (f" and {plural(more, 'other sequence')}" if more else "")
    elif not life.tenures:
        finding += f"no sequence has ever held {block}"
    else:
        holder, kept = life.tenures[-1], "is empty"
        if state.hashes[life.block_id] is not None:
            kept = f"caches content of {seq_name(state, life.contents[-1].seq_id)}"
        held = f"last held by {seq_name(state, holder.seq_id)} until {when(holder.until, '')}"
        finding += f"no sequence holds {block}; it {kept}, {held}"
    if evicted := [each for each in life.contents if each.evicted_for is not None]:
        last, number = evicted[-1], f", the last of {len(evicted):,} evictions" if len(evicted) > 1 else ""
        needed = f" for {last.evicted_for}" if last.evicted_for else ""
        finding += f"; content of {seq_name(state, last.seq_id)} was evicted {when(last.until)}{needed}{number}"
    return f"{capitalized(finding)}."


# ---------------------------------------------------------------------- a server


def why_of_server(state: KVState) -> str:
    """How much of what was stored had been evicted before, and what larger caches would have kept, if it was seen."""
    points, num_stored, alone, answers = state.curve(), state.total("num_stored"), state.num_alone["evicted"], ""
    if not num_stored:
        return "No block was stored, so there is nothing to judge."
    again = sum(tree.num_again["evicted"] for tree in state.trees) - alone
    if alone:
        came_back = plural(alone, "more block" if again else "block")
        answers = f"; {came_back} came back alone, as answers do that are generated again: a cache saves none of these"
    if not again:
        return f"No block of a prompt was stored again after an eviction{answers}."
    kept = ""
    if points and (most := points[-1].num_prompt_blocks_kept):
        enough = next(point for point in points if point.num_prompt_blocks_kept >= _MOST_OF_IT * most)
        kept = (
            f"; {plural(enough.num_more_blocks, 'more block')} would have kept at least"
            f" {enough.num_prompt_blocks_kept:,} of these"
        )
    counts = f"{percent_text(again / num_stored)} of the stored blocks ({again:,} of {num_stored:,})"
    to_do = f"; {_MORE_MEMORY}" if again >= _WORTH_SAYING * num_stored else ""
    return f"{counts} had been evicted before{kept}{answers}{to_do}."
