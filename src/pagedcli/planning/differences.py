"""What differs between texts that are equal afterwards: its kind, where it is in each text, and the same texts with it
moved, normalized or sorted. Used by answers.divergence; knows neither tokens nor hits.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import xxhash

from pagedcli.planning.equal_runs import common_prefix, common_suffix

TextKind = Literal["time", "date", "id", "counter", "number", "language", "name", "start", "blank", "template", "text"]
TextSpan = tuple[int, int]

_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec"
_DAYS = "mon tue wed thu fri sat sun"
_LANGUAGES = (
    "arabic bengali chinese czech danish dutch english finnish french german greek hebrew hindi hungarian indonesian"
    " italian japanese korean norwegian persian polish portuguese romanian russian spanish swedish thai turkish"
    " ukrainian urdu vietnamese deutsch français español italiano português"
)
_WORD_OF = {"month": rf"(?:{'|'.join(_MONTHS.split())})[a-z]*\.?", "day": rf"(?:{'|'.join(_DAYS.split())})[a-z]*\.?"}
_TIME = r"\d{1,2}[:.h]\d{2}(?:[:.]\d{2}(?:[.,]\d+)?)?(?:\s?[ap]\.?m\.?)?(?:\s?(?:Z|UTC|GMT|[A-Z]{3,4}))?"
_DATE = (
    rf"(?:{_WORD_OF['day']},?\s+)?(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}"
    rf"|(?:the\s)?\d{{1,2}}(?:st|nd|rd|th|\.)?\s+(?:of\s)?{_WORD_OF['month']}(?:,?\s+\d{{4}})?"
    rf"|{_WORD_OF['month']}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?|{_WORD_OF['day']})"
)
_PATTERNS: dict[TextKind, str] = {  # the first that fits nearly all
    "time": rf"(?:{_DATE}(?:,?\s+|T)(?:at\s)?)?{_TIME}(?:[+-]\d{{2}}:?\d{{2}})?",
    "date": _DATE,
    "counter": r"[#№]?\d{1,6}",
    "id": (
        r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
        r"|(?=[\w-]*\d)[A-Za-z]*[-_#]?[0-9A-Za-z]{3,}(?:[-_][0-9A-Za-z]+)*|\d{5,}"
    ),
    "name": r"(?:(?:Mr|Mrs|Ms|Dr|Prof)\.?\s)?[A-ZÀ-Þ][\w'’-]*(?:\s[A-ZÀ-Þ][\w'’-]*){0,2}",
}
_FITS = 0.85  # share of the texts that a pattern must match
_MOST_FEW = 8  # different texts that are given literally
_MOST_CONTEXT = 40  # characters
_PIECE = 24  # characters that two texts do not have by chance
_LEAST_AFTER = 4  # characters that end a part without a pattern
_MOST_UNIT = 240  # characters of a sentence that is moved as a whole
_MOST_SHARED = 0.9  # share of the longest common beginning that a shorter one of more texts must have
_MOST_LAST_LINE = 20  # characters of a last line such as `Answer:`, before which texts are inserted
_PUNCTUATION = ".,;:!?)]}\"'"
MARK = re.compile(r"<[|｜][^|｜<>]{1,40}[|｜]>|</?s>|<(?:bos|eos|pad|start_of_turn|end_of_turn)>|\[/?INST\]|<</?SYS>>")
_ROLE = r"(?:(?:system|developer|user|assistant|model|tool)?\n+)?"  # the role that follows a mark
_END_OF_SENTENCE = re.compile(r"\n|[.!?](?=\s)[^\S\n]?")


@dataclass(frozen=True, slots=True)
class Difference:
    """The part of a text, between a beginning that another text has and a run that it has, too."""

    text: str
    start: int
    end: int
    other: str  # the part of the other text at this place

    @property
    def part(self) -> str:
        return self.text[self.start : self.end]


def between(text: str, end: int, other: str, other_end: int, *, has_words: bool) -> tuple[Difference, Difference]:
    """The parts of two texts that differ, before two equal runs that begin at `end` and `other_end`, as whole words."""
    start = common_prefix(text, other)
    marks = MARK.finditer(text, max(0, start - _MOST_CONTEXT))
    start = next((mark.start() for mark in marks if mark.start() < start < mark.end()), start)
    back = common_suffix(text[:end], other[:other_end])
    back = min(back, end - start, other_end - start) if min(end, other_end) >= start else 0
    end, other_end = end - back, other_end - back
    forward = max(0, start - min(end, other_end))  # the run begins in what both begin with
    end, other_end = min(end + forward, len(text)), min(other_end + forward, len(other))  # and may end in it, too
    parts = text[start:end], other[start:other_end]
    if has_words and not all(_is_markup(part) for part in parts):
        start = max(_word_start(text, start), _word_start(other, start))
        after = min(_word_end(text, end) - end, _word_end(other, other_end) - other_end)
        end, other_end = end + after, other_end + after
        while end > start and other_end > start and text[end - 1] == other[other_end - 1] and _is_end(text[end - 1]):
            end, other_end = end - 1, other_end - 1
    mine, theirs = text[start:end], other[start:other_end]
    return Difference(text, start, end, theirs), Difference(other, start, other_end, mine)


def is_within(part: str, text: str) -> bool:
    """Whether a text has most of a long part, perhaps in pieces in another order."""
    if len(part) < 2 * _PIECE:
        return False
    starts = range(0, len(part) - _PIECE + 1, max(1, (len(part) - _PIECE) // 8))
    return sum(part[start : start + _PIECE] in text for start in starts) > len(starts) / 2


def _is_end(char: str) -> bool:
    return char in _PUNCTUATION or char.isspace()


def _is_markup(part: str) -> bool:
    """Whether a part is nothing but marks of a template and blanks."""
    return not MARK.sub("", part).strip()


def _word_start(text: str, start: int) -> int:
    while start and not text[start - 1].isspace() and not text[:start].endswith((">", "]", "[", "(", "{")):
        start -= 1
    return start


def _word_end(text: str, end: int) -> int:
    while end < len(text) and not text[end].isspace() and not text.startswith(("<", "[/"), end):
        end += 1
    return end


# ---------------------------------------------------------------------- the place in any text


@dataclass(frozen=True)
class Place:
    """Where texts differ: between two contexts that they share, with a pattern of what stands there."""

    kind: TextKind
    before: str
    after: str
    is_first: bool  # `before` is everything before it
    pattern: str
    values: tuple[str, ...]  # all that were seen, if few; the most frequent first

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        start = r"\A" if self.is_first else ""
        return re.compile(f"{start}{re.escape(self.before)}({self.pattern}){re.escape(self.after)}", re.DOTALL)

    def find(self, text: str) -> TextSpan | None:
        """Where it is in a text; None: nowhere."""
        found = self._compiled.search(text)
        return None if found is None else found.span(1)


def place_of(pairs: Sequence[tuple[Difference, Difference]], *, has_words: bool) -> Place | None:
    """The place that these pairs, in the order of their texts, have in common. None if nothing marks it."""
    differences = [each for pair in pairs for each in pair]
    befores = [each.text[: each.start] for each in differences]
    before = _common_start([text[: -_MOST_CONTEXT - 1 : -1] for text in befores])[::-1]
    after = _common_start([each.text[each.end : each.end + _MOST_CONTEXT] for each in differences])
    is_first = all(text == before for text in befores)
    parts = [each.part for each in differences]
    kind, pattern = kind_of(parts) if has_words else ("text", "")
    values = [value for value, _ in Counter(parts).most_common()]
    is_few = len(values) <= min(_MOST_FEW, len(parts) / 2) and kind in ("start", "blank", "template", "text")
    if not before and not is_first:
        return None
    if is_few and not pattern:
        pattern = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
    elif pattern:
        after = ""
    else:
        after = after if len(after) >= _LEAST_AFTER else _after_all(differences)
        if not after:
            return None
        pattern = f".{{0,{2 * max(map(len, parts)) + 64}}}?"
    return Place(kind, before, after, is_first, pattern, tuple(values) if is_few else ())


def _common_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)  # the others begin with what these two do
    return first[: common_prefix(first, last)]


def _after_all(differences: Sequence[Difference]) -> str:
    """A text that comes soon after nearly all of these parts: some end a few characters late, by chance."""
    texts = [each.text[each.end : each.end + 4 * _MOST_CONTEXT] for each in differences]
    candidates = [text[:_MOST_CONTEXT] for text in texts[:: max(1, len(texts) // 16)] if text]
    count, found = max(((sum(each in text for text in texts), each) for each in candidates), default=(0, ""))
    return found if count >= _FITS * len(texts) else ""


def kind_of(parts: Sequence[str]) -> tuple[TextKind, str]:
    """The kind of what differs, and the pattern of it, if there is one. Parts of both texts of each pair."""
    found = [part.strip() for part in parts]
    if all(_is_markup(part) for part in parts):
        has_marks = [MARK.search(part) is not None for part in parts]
        if not any(has_marks):
            return "blank", ""
        marks = {mark for part in parts for mark in MARK.findall(part)}
        is_one_mark_repeated = len(marks) == 1 and len(set(parts)) > 1
        return ("start" if is_one_mark_repeated else "template"), ""
    if sum(MARK.search(part) is not None for part in parts) > len(parts) / 2 and len(set(parts)) <= _MOST_FEW:
        return "template", ""
    if set(map(str.lower, found)) <= set(_LANGUAGES.split()):
        return "language", r"[^\W\d_]+"
    for kind, pattern in _PATTERNS.items():
        pattern = f"(?i:{pattern})" if kind in ("time", "date") else f"(?:{pattern})"
        if sum(re.fullmatch(pattern, part) is not None for part in found) >= _FITS * len(found):
            return (kind if kind != "counter" or _counts(found[::2]) else "number"), pattern
    return "text", ""


def _counts(parts: Sequence[str]) -> bool:
    """Whether numbers rise from text to text."""
    numbers = [int(number) for part in parts if (number := part.strip("#№")).isdecimal()]
    num_rises = sum(a < b for a, b in pairwise(numbers))
    return len(numbers) > 2 and num_rises > 0.9 * (len(numbers) - 1)


# ---------------------------------------------------------------------- changed texts


def unit_around(text: str, span: TextSpan) -> TextSpan:
    """The brackets, the sentence or the line around a part; a long one, or what crosses marks of a template, is left
    alone."""
    start, end = span
    if start and text[start - 1 : start] + text[end : end + 1] in ("[]", "()", "{}", "<>"):
        return start - 1, end + 1 + text.startswith(" ", end + 1)
    begins = [max(0, start - _MOST_UNIT)] if start <= _MOST_UNIT else []
    window = text[max(0, start - _MOST_UNIT) : start]
    offset = start - len(window)
    begins += [offset + found.end() for found in (*_END_OF_SENTENCE.finditer(window), *MARK.finditer(window))]
    found = _END_OF_SENTENCE.search(text, max(start, end - 1)) if "\n" not in text[start:end].rstrip("\n") else None
    mark = MARK.search(text, end)
    if not begins or found is None or (mark is not None and mark.start() < found.end()):
        if begins and mark is not None and (found is None or mark.start() < found.end()):
            return (max(begins), mark.start()) if mark.start() - max(begins) <= _MOST_UNIT else span
        return span
    return (max(begins), found.end()) if found.end() - max(begins) <= _MOST_UNIT else span


def inserted(text: str, place: int, part: str) -> str:
    """A part in a text, on its own line if nothing separates it from what is around it."""
    before, after = text[:place], text[place:]
    gap = "" if not before or before[-1].isspace() or part[:1].isspace() or before.endswith(">") else "\n"
    is_last = not after or after.startswith(("<", "["))
    if gap and is_last and part[-1:].isspace():  # the white space after it separates it from what is before it now
        part, gap = part.rstrip(), part[len(part.rstrip()) :]
    needs_end = not is_last and not part[-1:].isspace() and not after[0].isspace()
    return before + gap + part + ("\n" if needs_end else "") + after


def moved(
    texts: Sequence[str], place: Place, tail: str, *, has_words: bool, marks: re.Pattern[str] = MARK
) -> list[str]:
    """The texts with what differs at the place moved to the end of what each shares with any other, but within its
    message: behind a mark it would be said by another."""
    places = zip(texts, map(place.find, texts), strict=True)
    spans = [unit_around(text, span) if span is not None and has_words else span for text, span in places]
    bases = [
        text if span is None else text[: span[0]] + text[span[1] :] for text, span in zip(texts, spans, strict=True)
    ]
    changed = list(texts)
    for row, (base, span, num_shared) in enumerate(zip(bases, spans, _shared_beginnings(bases), strict=True)):
        if span is None:
            continue
        end = len(base) - (len(tail) if tail and base.endswith(tail) else _last_line(base) if has_words else 0)
        if has_words and (mark := marks.search(base, span[0])) is not None:
            end = min(end, mark.start())
        target = min(num_shared, end)
        if has_words and target < end:
            target = _boundary_before(base, target, span[0])
        if target > span[0]:
            changed[row] = inserted(base, target, texts[row][span[0] : span[1]])
    return changed


def _shared_beginnings(texts: Sequence[str]) -> list[int]:
    """Per text, the length of the beginning that it shares with others. A slightly longer one that only few share, by
    chance or as the usual beginning of a question, is not taken: what is put after it would be inside the question."""
    order = sorted(range(len(texts)), key=texts.__getitem__)
    lengths = [common_prefix(texts[a], texts[b]) for a, b in pairwise(order)]
    # a Cartesian tree: the parent of a place is the nearest one with a smaller length, of the two on its sides the one
    # with the larger; or the first of those equal to it, so that paths are no longer than there are different lengths
    parents: list[int | None] = []
    stack: list[int] = []
    for place, length in enumerate(lengths):
        last = None
        while stack and lengths[stack[-1]] > length:
            last = stack.pop()
        if last is not None:
            parents[last] = place
        parents.append(stack[-1] if stack else None)
        if not stack or lengths[stack[-1]] < length:
            stack.append(place)
    shared = [0] * len(texts)
    for rank, row in enumerate(order if lengths else ()):
        place = max(range(max(0, rank - 1), min(rank + 1, len(lengths))), key=lengths.__getitem__)
        least = _MOST_SHARED * lengths[place]
        while (parent := parents[place]) is not None and lengths[parent] >= least:
            place = parent
        shared[row] = lengths[place]
    return shared


def _last_line(text: str) -> int:
    line = text[text.rstrip("\n").rfind("\n") + 1 :]
    return len(line) if line.rstrip().endswith(":") and len(line) <= _MOST_LAST_LINE else 0


def _boundary_before(text: str, place: int, least: int) -> int:
    """The last end of a line, a sentence, a mark or else a word before a place."""
    first = max(least, place - _MOST_UNIT)
    window = text[first:place]
    ends = [found.end() for pattern in (_END_OF_SENTENCE, MARK) for found in pattern.finditer(window)]
    if ends:
        return first + max(ends)
    space = max(window.rfind(" "), window.rfind("\n"))
    return first + space + 1 if space >= 0 else least


def replaced(texts: Iterable[str], place: Place, new: Callable[[str], str]) -> list[str]:
    """The texts with another part at the place."""
    changed = []
    for text in texts:
        span = place.find(text)
        changed.append(text if span is None else text[: span[0]] + new(text[span[0] : span[1]]) + text[span[1] :])
    return changed


# ---------------------------------------------------------------------- parts in another order

SEPARATORS = (
    r"\n+(?=(?:[A-Z][a-z]+ )?[\[(#]?\d{1,3}[\])]?[:.)\] ])",  # `Document 2:`, `[2]`, `2.`
    r"\n\n+",
    r"(?<=\}),\s*(?=\{)",  # objects of a JSON list
    r"\n",
)
_TOOLS = re.compile(r"\"(?:function|parameters|input_schema)\"\s*:")
_NUMBERED = re.compile(r"\A((?:[A-Z][a-z]+ )?[\[(#]?)(\d{1,3})(?=[\])]?[:.)\] ])")


def looks_like_tools(text: str) -> bool:
    """Whether a text lists tools as chat templates write them."""
    return len(_TOOLS.findall(text)) > 1


def sorted_parts(texts: Sequence[str], separator: str, marks: re.Pattern[str] = MARK) -> list[str]:
    """The texts with the parts that several of them have in one order, by their mean place. A number that a part begins
    with stays where it is, unless most parts have their own in all texts. No part moves into another message."""
    splits = [re.split(f"((?:{marks.pattern}){_ROLE}|{separator})", text) for text in texts]
    places: dict[int, list[int]] = {}  # content -> number of texts that have it, sum of its places
    for pieces in splits:
        for key, place in {_content(part): place for place, part in enumerate(pieces[::2])}.items():
            count = places.setdefault(key, [0, 0])
            count[0], count[1] = count[0] + 1, count[1] + place
    numbers: dict[int, set[str]] = {}
    for part in (part for pieces in splits for part in pieces[::2]):
        if (found := _NUMBERED.match(part)) is not None:
            numbers.setdefault(_content(part), set()).add(found[2])
    shared = {key: places[key][0] for key in numbers if places[key][0] > 1}
    has_names = 2 * sum(num for key, num in shared.items() if len(numbers[key]) == 1) > sum(shared.values())
    return [_in_order(pieces, places, marks, has_names=has_names) for pieces in splits]


def _content(part: str) -> int:
    """What a part is, whatever number it begins with."""
    return xxhash.xxh64_intdigest(_NUMBERED.sub(r"\1", part, count=1).strip().encode("utf-8", "surrogatepass"))


def _in_order(pieces: list[str], places: dict[int, list[int]], marks: re.Pattern[str], *, has_names: bool) -> str:
    """One text: its shared parts sorted within each run of them."""
    parts = pieces[::2]
    runs: list[list[int]] = [[]]
    for place, part in enumerate(parts):
        if places[_content(part)][0] > 1:
            runs[-1].append(place)
        elif runs[-1]:
            runs.append([])
        if marks.match("".join(pieces[2 * place + 1 : 2 * place + 2])):
            runs.append([])
    for run in runs:
        keys = {place: (key := _content(parts[place]), places[key]) for place in run}
        order = sorted(run, key=lambda place: (keys[place][1][1] / keys[place][1][0], keys[place][0]))
        numbers = [found[2] for place in run if (found := _NUMBERED.match(parts[place]))]
        rising = iter(numbers)
        for place, part in zip(run, (parts[place] for place in order), strict=True):
            found = None if has_names else _NUMBERED.match(part)
            pieces[2 * place] = part if found is None else found[1] + next(rising) + part[found.end() :]
    return "".join(pieces)
