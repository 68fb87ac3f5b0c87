"""Predicts how a prompt file uses a KV cache: lengths, shared prefixes, ideal hit rates, waste.

Used by `pagedcli plan` and `profile-memory --prompts`; handles neither text nor files. It receives each prompt's token
ids once and keeps only hashes of prefixes, 12 to 20 bytes per 8 tokens that no earlier prompt began with, and the
tokens of those that prompts share.
"""

import heapq
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pagedcli.core.budget import blocks_for
from pagedcli.core.prefixes import BLOCK_SIZES, SeenPrefixes, token_bytes, token_ids_of, unit_digests

_MIN_RECENT = 65536

UNIT = BLOCK_SIZES[0]  # tokens; every other block size is a multiple, so one chain of hashes serves all
_MOST_SHOWN = 5  # shared prefixes
_MOST_ROWS = 4  # named of each
SurveyRow = dict[str, Any]


@dataclass(slots=True)
class _Shared:
    """A prefix that at least two prompts begin with."""

    num_units: int
    first_row: int
    parent: int | None  # digest of the prefix one unit shorter
    tokens: bytes  # the last unit
    num_rows: int = 2
    ends: list[int] | None = None  # the first rows whose known prefix was this one and no longer one


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """A shared prefix and the prompts that begin with it."""

    token_ids: list[int]
    num_prompts: int
    rows: list[int]  # rows of the first prompts; a row with several prompts may come several times


class _Shape(NamedTuple):
    """What a prompt's blocks and hits depend on."""

    num_prompt: int  # tokens
    max_tokens: int
    num_known: int  # leading units of tokens that an earlier prompt begins with
    num_seqs: int = 1
    at_once: bool = False  # whether all sequences must fit at once: beams
    num_context: int | None = None  # tokens before continuations: lookups end before the last of them

    @property
    def num_cached(self) -> int:
        """Tokens of one sequence, prompt and output; the last generated token is never cached."""
        return self.num_prompt + max(0, self.max_tokens - 1)

    def num_shared(self, block_size: int) -> int:
        """Full blocks of the prompt that the sequences of a request share, of each group of layers."""
        return 0 if self.num_seqs == 1 else self.num_prompt // block_size

    def num_spans(self, block_size: int) -> int:
        """Blocks of each group of layers at full length."""
        shared = self.num_shared(block_size)
        return shared + self.num_seqs * (blocks_for(self.num_cached, block_size) - shared)

    def num_tokens(self, block_size: int) -> int:
        shared = self.num_shared(block_size) * block_size
        return shared + self.num_seqs * (self.num_cached - shared)

    def hit_spans(self, block_size: int) -> int:
        """Blocks of each group of layers that an unlimited cache has."""
        num_known = self.num_known * UNIT
        return (num_known if self.num_context is None else min(num_known, self.num_context - 1)) // block_size

    def hit_tokens(self, block_size: int) -> int:
        return max(0, min(self.hit_spans(block_size) * block_size, self.num_prompt - 1))


class PrefixRows:
    """Known digests of prefixes and the row that each first appeared in: sorted arrays and a small recent dict."""

    def __init__(self) -> None:
        self._digests, self._rows = array("Q"), array("I")
        self._recent: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._digests) + len(self._recent)

    def first_row(self, digest: int) -> int | None:
        """The first row with the prefix of this digest; None if there is none."""
        row = self._recent.get(digest)
        if row is not None:
            return row
        place = bisect_left(self._digests, digest)
        return self._rows[place] if place < len(self._digests) and self._digests[place] == digest else None

    def num_known(self, digests: Sequence[int]) -> int:
        """How many leading digests of a prompt are known, by bisection."""
        return bisect_left(digests, True, key=lambda digest: self.first_row(digest) is None)

    def add(self, digests: Sequence[int], row: int) -> None:
        for digest in digests:
            self._recent[digest] = row
        # merge an eighth of the whole at a time: amortized linear copying
        if len(self._recent) > max(_MIN_RECENT, len(self._digests) // 8):
            self._merge()

    def _merge(self) -> None:
        recent = np.fromiter(self._recent.keys(), np.uint64, len(self._recent))
        rows = np.fromiter(self._recent.values(), np.uint32, len(self._recent))
        digests = np.concatenate([np.frombuffer(self._digests, np.uint64), recent])
        rows = np.concatenate([np.frombuffer(self._rows, np.uint32), rows])
        order = np.argsort(digests, kind="stable")
        self._digests, self._rows = array("Q", digests[order].tobytes()), array("I", rows[order].tobytes())
        self._recent = {}


@dataclass(slots=True)
class PromptSurvey:
    """The fold over a file's prompts. Rows are numbered as the caller likes (line numbers)."""

    num_groups: int = 1  # groups of layers of the engine that is planned for, each with blocks of its own
    num_repeated: int = 0  # prompts equal to an earlier one
    _shapes: Counter[_Shape] = field(default_factory=Counter)
    _seen: PrefixRows = field(default_factory=PrefixRows)
    _whole: set[int] = field(default_factory=set)  # digests of whole prompts
    _shared: dict[int, _Shared] = field(default_factory=dict)
    _newest: SeenPrefixes = field(default_factory=SeenPrefixes)
    _longest_shared: int = 0  # tokens, exactly; with one of the newest prompts

    def add(
        self,
        row: int,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        num_seqs: int = 1,
        is_beam_search: bool = False,
        cache_salt: str | None = None,
        num_context: int | None = None,
    ) -> int:
        """Count a prompt with num_seqs samples, or beams, of at most max_tokens tokens each. Token ids fit into 64
        bits. Returns how many of its first tokens an earlier one begins with, in whole units. `num_context`: so many of
        its tokens come before those of continuations.

        Hits are those of an unlimited cache of the earlier prompts, without generated tokens; the last token is never a
        hit, because its logits give the next token.
        """
        num_prompt = len(token_ids)
        to_end = array("q", token_ids)
        to_end.extend([-1] * (UNIT - num_prompt % UNIT))  # no token is negative: unlike any prefix of whole units
        *digests, whole = unit_digests(to_end, cache_salt, UNIT)
        num_known = self._seen.num_known(digests)
        self._note_shared(row, digests[:num_known], token_ids)
        may_be_longest = (num_known + 1) * UNIT > self._longest_shared
        found = self._newest.add(token_ids, cache_salt, look_back=may_be_longest)
        self._longest_shared = max(self._longest_shared, found)
        self._seen.add(digests[num_known:], row)
        self.num_repeated += whole in self._whole
        self._whole.add(whole)
        self._shapes[_Shape(num_prompt, max_tokens, num_known, num_seqs, is_beam_search, num_context)] += 1
        return num_known * UNIT

    def _note_shared(self, row: int, digests: Sequence[int], token_ids: Sequence[int]) -> None:
        parent: int | None = None
        shared: _Shared | None = None
        for depth, digest in enumerate(digests, 1):
            shared = self._shared.get(digest)
            if shared is None:
                first_row = self._seen.first_row(digest)
                assert first_row is not None, "a known prefix has a row"
                tokens = token_bytes(token_ids[(depth - 1) * UNIT : depth * UNIT])
                shared = self._shared[digest] = _Shared(depth, first_row, parent, tokens)
            else:
                shared.num_rows += 1
            parent = digest
        if shared is not None and len(shared.ends or ()) < _MOST_ROWS:
            shared.ends = [*(shared.ends or ()), row]

    # ------------------------------------------------------------------ answers

    def _total(self, number: Callable[..., int], *block_size: int) -> int:
        return sum(number(shape, *block_size) * count for shape, count in self._shapes.items())

    def _by(self, length: Callable[[_Shape], int]) -> Counter[int]:
        counts: Counter[int] = Counter()
        for shape, count in self._shapes.items():
            counts[length(shape)] += count
        return counts

    @property
    def num_prompts(self) -> int:
        return self._shapes.total()

    @property
    def prompt_tokens(self) -> int:
        return self._total(lambda shape: shape.num_prompt)

    @property
    def output_tokens(self) -> int:
        """The most that the rows may generate, over all samples and beams."""
        return self._total(lambda shape: shape.num_seqs * shape.max_tokens)

    @property
    def total_lengths(self) -> Counter[int]:
        """Prompt and output of one sequence."""
        return self._by(lambda shape: shape.num_prompt + shape.max_tokens)

    def ideal_hit_rate(self, block_size: int) -> float:
        """Share of the prompts' tokens that an unlimited cache has, in blocks of a size in BLOCK_SIZES."""
        return self._total(_Shape.hit_tokens, block_size) / max(1, self.prompt_tokens)

    def block_size_rows(self) -> list[SurveyRow]:
        """Each block size with its hit rate and waste.

        waste: share of unfilled slots of all requests at full length; blocks and slots: what the whole file would take
        if none were released before the end, shared blocks counted once.
        """
        rows = []
        for size in BLOCK_SIZES:
            spans, kept = self._total(_Shape.num_spans, size), self._total(_Shape.hit_spans, size)
            num_tokens, hit_tokens = self._total(_Shape.num_tokens, size), self._total(_Shape.hit_tokens, size)
            rows.append(
                {
                    "block_size": size,
                    "hit_rate": hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
                    "hit_tokens": hit_tokens,
                    "waste": 1 - num_tokens / (spans * size) if spans else 0.0,
                    "num_blocks": (spans - kept) * self.num_groups,
                    "num_slots": (spans - kept) * size,
                }
            )
        return rows

    def shared_prompts(self) -> list[SharedPrompts]:
        """Shared prefixes, those that save most tokens first, and the prompts that begin with them. A prefix is omitted
        if a longer one is shared by as many. It ends with a whole unit of tokens."""
        best = self._best_shared()
        rows: dict[int, list[int]] = {digest: [self._shared[digest].first_row] for digest in best}
        within: dict[int, tuple[int, ...]] = {}  # a prefix -> those of the best that it begins with
        for digest, shared in self._shared.items():  # shorter ones come before those that they begin
            inside = within.get(shared.parent, ()) if shared.parent is not None else ()
            inside = (*inside, digest) if digest in rows else inside
            if inside:
                within[digest] = inside
            for found in inside:
                rows[found] += shared.ends or ()
        return [
            SharedPrompts(self._token_ids(digest), self._shared[digest].num_rows, sorted(rows[digest])[:_MOST_ROWS])
            for digest in best
        ]

    def _best_shared(self) -> list[int]:
        """The digests of the shared prefixes that save most tokens."""
        counts = {(shared.parent, shared.num_rows) for shared in self._shared.values()}  # of one unit more
        candidates = (digest for digest, shared in self._shared.items() if (digest, shared.num_rows) not in counts)

        def saved(digest: int) -> tuple[int, int]:
            shared = self._shared[digest]
            return (shared.num_rows - 1) * shared.num_units, shared.num_units

        return heapq.nlargest(_MOST_SHOWN, candidates, key=saved)

    def _token_ids(self, digest: int | None) -> list[int]:
        units = []
        while digest is not None:
            shared = self._shared[digest]
            units.append(shared.tokens)
            digest = shared.parent
        return token_ids_of(b"".join(reversed(units)))

    def longest_shared_tokens(self) -> int:
        """The longest prefix that any two prompts share: to the token between prompts close to each other in the file,
        at least in whole units of tokens between any others."""
        in_units = max((shared.num_units for shared in self._shared.values()), default=0) * UNIT
        return max(in_units, self._longest_shared)

    def common_prefix_tokens(self, share: float = 0.5) -> int:
        """The longest prefix that at least this share of the prompts begins with, in whole units of tokens."""
        enough = [s.num_units for s in self._shared.values() if s.num_rows >= share * self.num_prompts]
        return max(enough, default=0) * UNIT

    def length_rows(self) -> list[SurveyRow]:
        """Mean and percentiles of prompt lengths and of prompt and output together."""
        rows = []
        prompts = self._by(lambda shape: shape.num_prompt)
        for name, lengths in (("prompt", prompts), ("prompt and output", self.total_lengths)):
            row: SurveyRow = {"what": name, "total": sum(n * count for n, count in lengths.items())}
            row["mean"] = row["total"] / self.num_prompts if lengths else None
            for key, share in (("min", 0.0), ("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
                row[key] = percentile(lengths, share) if lengths else None
            rows.append(row)
        return rows


def percentile(lengths: Counter[int], share: float) -> int:
    """The smallest length that at least this share of all lengths do not exceed. `lengths` is not empty."""
    wanted, num_seen = share * lengths.total(), 0
    for length in sorted(lengths):
        num_seen += lengths[length]
        if num_seen >= wanted:
            break
    return length
