"""Where prompts diverge: groups of prompts that differ early and are equal afterwards, what differs, and what moving,
sorting or normalizing it, one cache_salt or smaller blocks give, by the law of hits on the changed prompts.

A pure function of token ids, salts and texts, for prompt files, recordings and servers.
"""

import math
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.core.prefixes import BLOCK_SIZES, num_equal
from pagedcli.errors import RequestError
from pagedcli.planning import differences as diff
from pagedcli.planning.differences import Difference
from pagedcli.planning.equal_runs import (
    EqualWindow,
    Ids,
    Ints,
    common_prefix,
    common_suffix,
    equal_runs,
    hit_tokens,
    shared_tokens,
)
from pagedcli.planning.prompt_sample import PromptSample, SaltedPrompt
from pagedcli.printable import plural

LEAST_SHARE = 0.05  # smallest share of the prompts that makes a finding
LEAST_PROMPTS = 3
LEAST_GAIN = 0.02  # smallest gain that makes a finding, in shares of all prompt tokens
_MOST_PAIRS = 256  # compared as texts
_MOST_TRIED = 2_000  # prompts that ways to change them are tried on, before the best one is tried on all
_MOST_PLACES = 4
_KEY = 12  # characters before a place that tell it from others
_OUT_OF_ORDER = 0.2  # share of the pairs whose parts are elsewhere in the other prompt
_MOST_MERGED = 6  # marks of a template that are made alike one after the other

_NO_LIMIT = 2**31  # tokens of a text
_MOST_OF_TEMPLATE = 2**15  # tokens that a chat template may add: it can make millions
_LOOKED_AT = 1_000  # prompts that show which special tokens there are
_TEXTS_AT_ONCE = 1_000  # the tokenizer takes some hundred bytes for a token, until their ids are copied
_KINDS = {
    "time": "the time", "date": "the date", "id": "the id", "counter": "the counter", "number": "the number",
    "language": "the language", "name": "the name", "text": "the text there", "start": "the mark at the beginning",
    "blank": "the blank", "template": "the chat template", "tools": "the tools", "documents": "the documents",
}  # fmt: skip

Action = Literal["move", "sort", "normalize", "one salt", "block size"]
Texts = Sequence[str]
Encode = Callable[[Texts], Iterable[Ids]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A cause why prompts share less than they could. Tokens are counted from 0, rates are shares of prompt tokens."""

    kind: str  # kind of text that differs
    action: Action
    first_token: int  # the earliest one at which prompts diverge
    last_token: int  # the latest one
    texts: tuple[str, ...]  # the text there, in some prompts
    num_equal: int  # tokens that are equal after it, in the middle one of these prompts
    num_prompts: int  # prompts that would share more
    num_looked_at: int
    is_sample: bool
    rate: float  # hits as it is
    new_rate: float  # hits after the change, with the changes before
    margin: float  # half the 95 % interval of a sample's rate; a lower bound for the file is the rate less this
    block_size: int  # block size of the rates; for the action `block size` the one to use
    change: "Change | None" = None
    changed: Sequence[Ids] = ()  # all prompts after the change, and after the changes before
    rate_in_file: float | None = None  # hits of the whole file before the change, of a sample; None: not counted
    new_rate_in_file: float | None = None  # the same after the change; None: not counted

    @property
    def rates(self) -> tuple[float, float, bool]:
        """Hits before and after, and whether the latter is a lower bound: a prompt has hits on those before it, of
        which a file has more than a sample."""
        if self.rate_in_file is None:
            return self.rate, self.new_rate, False
        if self.new_rate_in_file is not None:
            return self.rate_in_file, self.new_rate_in_file, False
        return self.rate_in_file, max(0.0, self.new_rate - self.margin), True

    def finding(self, block_size: int) -> str:
        what = "drawn prompt" if self.is_sample else "prompt"
        prompts = f"{self.num_prompts:,} of {plural(self.num_looked_at, what)}"
        if self.action == "one salt":
            return f"{prompts} begin with {plural(self.num_equal, 'equal token')}, but with another cache_salt"
        last = f"s {self.first_token:,} to {self.last_token:,}"
        at = f"token {self.first_token:,}" if self.first_token == self.last_token else f"token{last}"
        if self.action == "block size":
            return f"{prompts} diverge at {at}, before a block of {block_size} tokens is full"
        shown = " / ".join(f'"{text}"' for text in self.texts)
        return f"{prompts} diverge at {at}" + (f" ({shown})" if shown else "")

    @property
    def to_do(self) -> str:
        """The change, in words that begin a sentence."""
        match self.action:
            case "move":
                behind = f"behind the {self.num_equal:,} equal tokens after it"
                return f"moving {_KINDS[self.kind]} {behind}, in the same message,"
            case "sort":
                return f"sorting {_KINDS[self.kind]} the same way"
            case "normalize":
                return f"writing {_KINDS[self.kind]} the same way"
            case "one salt":
                return "giving those that may share one cache_salt"
            case "block size":
                return f"--block-size {self.block_size}"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of texts. `apply` needs all of them together, as a part moves behind what others share."""

    action: Action
    kind: str
    apply: Callable[[Texts], list[str]]
    differences: Sequence["_Compared"] = ()


@dataclass(frozen=True, slots=True)
class _Compared:
    """A prompt and the one that it is equal to after they diverge."""

    mine: Difference
    other: Difference
    token: int  # the first that differs
    num_equal: int  # tokens of the run
    is_elsewhere: bool  # whether what differs is elsewhere in the other prompt


@dataclass(slots=True)
class _State:
    """The prompts as they would be, after the changes found so far."""

    ids: list[Ids]
    salts: list[str | None]
    texts: list[str]
    hits: Ints

    def rate(self) -> float:
        return _rate(self.ids, self.hits)

    def part(self, rows: Sequence[int], block_size: int) -> "_State":
        ids, salts = [self.ids[row] for row in rows], [self.salts[row] for row in rows]
        return _State(ids, salts, [self.texts[row] for row in rows], hit_tokens(ids, salts, block_size))


def _as_text(ids: Ids) -> str:
    """A character per token: fast to compare."""
    return array("i", ids).tobytes().decode("utf-32-le", "surrogatepass")


def _all_ids(texts: Texts) -> Iterable[Ids]:
    """The token ids of `_as_text`."""
    return (array("i", text.encode("utf-32-le", "surrogatepass")) for text in texts)


@dataclass(slots=True)
class Finder:
    """Looks for causes in prompts. `decode` and `encode` make texts of token ids and token ids of texts, special tokens
    included; without them places are found, but not what differs. `template`: token ids of a chat of one word."""

    block_size: int
    decode: Callable[[Ids], str] = _as_text
    encode: Encode = _all_ids
    template: Ids = ()
    marks: re.Pattern[str] = diff.MARK  # marks of messages: no text moves over one
    num_in_file: int | None = None  # prompts, if more than are looked at
    rates_in_file: Mapping[int, float] = field(default_factory=dict)  # block size -> hits of the whole file as it is

    @property
    def has_words(self) -> bool:
        return self.decode is not _as_text

    def find(self, prompts: Sequence[SaltedPrompt], most: int = 3) -> list[Divergence]:
        """Causes, the largest first; each with the rates after those before it."""
        ids = [prompt.token_ids for prompt in prompts]
        if len(prompts) < 3 or not any(map(len, ids)):
            return []
        salts = [prompt.salt for prompt in prompts]
        state = _State(list(ids), salts, [], hit_tokens(ids, salts, self.block_size))
        originals: list[str] = []
        found = self._one_salt(state)
        while len(found) < most and (each := self._next(state)) is not None:
            if found and each.texts:  # it has been found in changed prompts: a quote must be in one as it is
                originals = originals or [self.decode(each_ids) for each_ids in ids]
                is_quote = all(any(text.rstrip("…") in original for original in originals) for text in each.texts)
                each = each if is_quote else replace(each, texts=())
            found.append(each)
        if len(found) < most:
            found += self._shorter_blocks(state, is_as_in_file=not found)
        now = self.rates_in_file.get(self.block_size)
        if now is None or len(prompts) >= (self.num_in_file or 0):
            return found
        # Of a sample only what the whole file gains for sure.
        found = [replace(each, rate_in_file=max(now, each.rate) if place else now) for place, each in enumerate(found)]
        return [each for each in found if each.rates[1] - each.rates[0] >= LEAST_GAIN]

    # ------------------------------------------------------------------ causes

    def _one_salt(self, state: _State) -> list[Divergence]:
        """Prompts that differ in nothing but their salts, as far as they share blocks without."""
        if len(set(state.salts)) < 2:
            return []
        none = [None] * len(state.ids)
        hits = hit_tokens(state.ids, none, self.block_size)
        if not self._is_enough(state, state.ids, hits):
            return []
        gains = (hits - state.hits)[hits > state.hits]
        found = self._divergence(
            state, state.ids, hits, kind="salt", action="one salt", places=[0], num_equal=int(median(gains))
        )
        state.salts, state.hits = list(none), hits
        return [found]

    def _next(self, state: _State) -> Divergence | None:
        """The cause that costs most, and the prompts changed; None: there is no other."""
        pairs = self._pairs(state)
        if not pairs:
            return None
        if not state.texts:
            state.texts = [self.decode(ids) for ids in state.ids]
        rows = self._tried(pairs, len(state.ids))
        probe = state if rows is None else state.part(rows, self.block_size)
        best, best_gain = None, 0.0
        for change in self._changes(state, pairs):
            ids, hits, _ = self._changed(probe, change)
            gain = float((hits - probe.hits).sum())
            both_sort = best is not None and best.action == change.action == "sort"
            if gain > (1.02 if both_sort else 1.1) * best_gain:  # earlier ones are more natural
                best, best_gain = change, gain
        if best is None:
            return None
        found, texts, ids, hits = best, *self._merged(state, best)
        if not self._is_enough(state, ids, hits):
            return None
        compared = found.differences
        parting = self._divergence(
            state, ids, hits, kind=found.kind, action=found.action, places=[each.token for each in compared],
            num_equal=int(median(each.num_equal for each in compared)),
            texts=_shown(compared) if self.has_words else (), change=found,
        )  # fmt: skip
        state.ids, state.texts, state.hits = ids, texts, hits
        return parting

    def _shorter_blocks(self, state: _State, *, is_as_in_file: bool) -> list[Divergence]:
        """Prompts that begin alike, but not for a block. `is_as_in_file`: none has been changed, so that the rates of
        the whole file are theirs."""
        size = self.block_size
        if not self._are_enough(int((state.hits == 0).sum()), len(state.ids)):
            return []
        in_template = max((num_equal(ids, self.template) for ids in state.ids[:100]), default=0)
        best: tuple[int, Ints] | None = None
        for smaller in sorted((each for each in BLOCK_SIZES if each < size), reverse=True):
            shared = shared_tokens(state.ids, state.salts, smaller)
            is_short = (state.hits == 0) & (shared > in_template) & (shared < size)
            hits = hit_tokens(state.ids, state.salts, smaller)
            hits = hits * is_short + state.hits * ~is_short
            if self._is_enough(state, state.ids, hits) and (best is None or hits.sum() > 1.2 * best[1].sum()):
                best = smaller, hits
        if best is None:
            return []
        smaller, hits = best
        beginnings = [ids[:size] for ids in state.ids]  # no longer, or the block would be full
        shared = shared_tokens(beginnings, state.salts, 1)[hits > state.hits]
        found = self._divergence(
            state, state.ids, hit_tokens(state.ids, state.salts, smaller), kind="short", action="block size",
            places=[int(each) for each in shared], num_equal=0, block_size=smaller,
        )  # fmt: skip
        then = self.rates_in_file.get(smaller) if found.is_sample and is_as_in_file else None
        return [replace(found, new_rate_in_file=then)]

    # ------------------------------------------------------------------ parts

    def _is_enough(self, state: _State, ids: Sequence[Ids], hits: Ints) -> bool:
        gain = float((hits - state.hits).sum())
        num_better = int((hits > state.hits).sum())
        is_better = _rate(ids, hits) - state.rate() >= LEAST_GAIN
        return is_better and gain >= LEAST_GAIN * sum(map(len, state.ids)) and self._are_enough(num_better, len(ids))

    @staticmethod
    def _are_enough(num_prompts: int, num_looked_at: int) -> bool:
        return num_prompts >= max(LEAST_PROMPTS, LEAST_SHARE * num_looked_at)

    def _pairs(self, state: _State) -> list[EqualWindow]:
        ignored = [self.template] if len(self.template) else []
        runs = equal_runs(state.ids, self.block_size, ignored)
        if len(runs.pairs) < LEAST_SHARE * len(state.ids) or runs.share < LEAST_GAIN / 2:
            return []
        return runs.pairs

    def _tried(self, pairs: list[EqualWindow], num_rows: int) -> list[int] | None:
        """The rows that changes are tried on, with those that they are equal to. None: all."""
        if num_rows <= _MOST_TRIED:
            return None
        by_row = {pair.row: pair for pair in pairs}
        rows: set[int] = set()
        for pair in pairs[:: max(1, len(pairs) // _MOST_PAIRS)]:
            row: int | None = pair.row
            while row is not None and row not in rows and len(rows) < _MOST_TRIED:
                rows.add(row)
                row = by_row[row].other if row in by_row else None
        return sorted(rows)

    def _compare(self, state: _State, pairs: Sequence[EqualWindow]) -> list[_Compared]:
        """What differs between the prompts of some pairs, before the window that both have."""
        compared = []
        for pair in pairs[:: max(1, len(pairs) // _MOST_PAIRS)]:
            ids, other = state.ids[pair.row], state.ids[pair.other]
            a, b = _as_text(ids), _as_text(other)
            token = common_prefix(a, b)
            back = common_suffix(a[token : pair.place], b[token : pair.other_place])
            num_equal = back + common_prefix(a[pair.place :], b[pair.other_place :])
            if num_equal < 2 * self.block_size:
                continue
            text, other_text = state.texts[pair.row], state.texts[pair.other]
            end, other_end = len(self.decode(ids[: pair.place])), len(self.decode(other[: pair.other_place]))
            mine, theirs = diff.between(text, end, other_text, other_end, has_words=self.has_words)
            is_elsewhere = diff.is_within(mine.part, theirs.text) or diff.is_within(theirs.part, mine.text)
            compared.append(_Compared(mine, theirs, token, num_equal, is_elsewhere))
        return compared

    def _changes(self, state: _State, pairs: Sequence[EqualWindow]) -> list[Change]:
        """What could be changed, the most natural first."""
        compared = self._compare(state, pairs)
        changes: list[Change] = []
        elsewhere = [each for each in compared if each.is_elsewhere]
        if self.has_words and len(elsewhere) > _OUT_OF_ORDER * len(compared):
            for separator in diff.SEPARATORS:
                kind = "documents"
                if all(diff.looks_like_tools(each.mine.text) for each in elsewhere[:20]):
                    kind = "tools"
                apply = partial(diff.sorted_parts, separator=separator, marks=self.marks)
                changes.append(Change("sort", kind, apply, elsewhere))
        tail = self._tail(state.texts)
        for group in _groups([each for each in compared if not each.is_elsewhere]):
            place = diff.place_of([(each.mine, each.other) for each in group], has_words=self.has_words)
            if place is None:
                continue
            if place.values:
                apply = partial(diff.replaced, place=place, new=partial(_first, place.values[0]))
                changes.append(Change("normalize", place.kind, apply, group))
            if place.kind not in ("start", "blank", "template"):
                apply = partial(diff.moved, place=place, tail=tail, has_words=self.has_words, marks=self.marks)
                changes.append(Change("move", place.kind, apply, group))
        return changes

    def _tail(self, texts: Texts) -> str:
        """What the template writes after the last message."""
        if not self.has_words or not len(self.template):
            return ""
        template = self.decode(self.template)
        num = min((common_suffix(template, text) for text in texts[:100]), default=0)
        return template[len(template) - num :]

    def _changed(self, state: _State, change: Change) -> tuple[list[Ids], Ints, list[str]]:
        """The tokens, hits and texts after a change. Only changed texts are tokenized again."""
        texts = change.apply(state.texts)
        rows = [row for row, (old, new) in enumerate(zip(state.texts, texts, strict=True)) if old != new]
        ids = list(state.ids)
        for row, new_ids in zip(rows, self.encode([texts[row] for row in rows]), strict=True):
            ids[row] = new_ids
        return ids, hit_tokens(ids, state.salts, self.block_size), texts

    def _merged(self, state: _State, change: Change) -> tuple[list[str], list[Ids], Ints]:
        """The prompts after the change; of two templates after all their marks have been made alike."""
        ids, hits, texts = self._changed(state, change)
        for _ in range(_MOST_MERGED if change.action == "normalize" else 0):
            now = _State(ids, state.salts, texts, hits)
            further = [each for each in self._changes(now, self._pairs(now)) if each.action == "normalize"]
            if not further:
                break
            new_ids, new_hits, new_texts = self._changed(now, further[0])
            if new_hits.sum() <= hits.sum():
                break
            ids, hits, texts = new_ids, new_hits, new_texts
        return texts, ids, hits

    def _divergence(
        self, state: _State, ids: Sequence[Ids], hits: Ints, *, places: Sequence[int], texts: tuple[str, ...] = (),
        block_size: int | None = None, **cause: Any,
    ) -> Divergence:  # fmt: skip
        """`places`: the tokens at which prompts diverge. `cause`: the other fields, which are not counted."""
        ordered = sorted(places)
        return Divergence(
            first_token=ordered[len(ordered) // 20],
            last_token=ordered[len(ordered) - 1 - len(ordered) // 20],
            texts=texts,
            num_prompts=int((hits > state.hits).sum()),
            num_looked_at=len(ids),
            is_sample=self.num_in_file is not None and self.num_in_file > len(ids),
            rate=state.rate(),
            new_rate=_rate(ids, hits),
            margin=self._margin(ids, hits),
            block_size=block_size or self.block_size,
            changed=list(ids),
            **cause,
        )

    def _margin(self, ids: Sequence[Ids], hits: Ints) -> float:
        """Half the 95 % interval of a rate, by the spread of the prompts around it."""
        num, all_rows = len(ids), self.num_in_file or len(ids)
        if all_rows <= num or num < 2:
            return 0.0
        rate = _rate(ids, hits)
        squares = sum((float(hit) - rate * len(each)) ** 2 for hit, each in zip(hits, ids, strict=True))
        return 1.96 * math.sqrt(squares * num / (num - 1) * (1 - num / all_rows)) / sum(map(len, ids))


def divergences(
    drawn: PromptSample,
    block_size: int,
    tokenizer: Tokenizer | None,
    *,
    rates_in_file: Mapping[int, float] = MappingProxyType({}),
) -> list[Divergence]:
    """Causes why these prompts share less than they could. Without a tokenizer they are found, but not named.
    `rates_in_file`: block size -> the hits of all prompts in an unlimited cache, drawn or not, where counted."""
    finder = Finder(block_size, num_in_file=drawn.num_seen, rates_in_file=rates_in_file)
    if tokenizer is None:
        return finder.find(drawn.prompts)

    def encode(texts: Texts) -> Iterator[Ids]:
        for first in range(0, len(texts), _TEXTS_AT_ONCE):
            some = list(texts[first : first + _TEXTS_AT_ONCE])
            for ids in tokenizer.encode_all(some, _NO_LIMIT, add_special_tokens=False):
                yield array("i", () if isinstance(ids, RequestError) else ids)

    def decode(ids: Ids) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    finder.decode, finder.encode = decode, encode
    special = set(tokenizer.special_token_ids)
    used = set[int]().union(*(special.intersection(each.token_ids) for each in drawn.prompts[:_LOOKED_AT]))
    texts = [re.escape(text) for text in map(decode, zip(sorted(used))) if text.strip()]
    finder.marks = re.compile("|".join([finder.marks.pattern, *texts]))
    with suppress(RequestError):  # no template, or none that takes a single word and makes few tokens of it
        word = [{"role": "user", "content": "word"}]
        finder.template = tokenizer.encode_chat(word, num_allowed=_MOST_OF_TEMPLATE)
    return finder.find(drawn.prompts)


def _rate(ids: Sequence[Ids], hits: Ints) -> float:
    return float(hits.sum()) / max(1, sum(map(len, ids)))


def _first(value: str, _: str) -> str:
    return value


def _groups(compared: Sequence[_Compared]) -> list[list[_Compared]]:
    """Prompts that diverge after the same text, the largest groups first."""
    groups: dict[tuple[str, bool], list[_Compared]] = defaultdict(list)
    for each in compared:
        before = each.mine.text[: each.mine.start]
        groups[before[-_KEY:], len(before) < _KEY].append(each)
    enough = [group for group in groups.values() if len(group) >= LEAST_SHARE * len(compared)]
    return sorted(enough, key=len, reverse=True)[:_MOST_PLACES]


def _shown(compared: Sequence[_Compared]) -> tuple[str, ...]:
    """The text around the place in the two prompts of a pair, with a few characters before it."""
    each = compared[len(compared) // 2]
    parts = []
    for part in (each.mine, each.other):
        before = part.text[max(0, part.start - 16) : part.start]
        shown = part.part if len(part.part) <= 40 else part.part[:39] + "…"
        parts.append(before[before.rfind("\n") + 1 :] + shown)
    return tuple(parts)
