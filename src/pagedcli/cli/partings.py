"""Where the prompts of a file or a run part, with the texts of a tokenizer, and the verdicts on a run."""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeVar

from pagedcli.cli.decoder import recorded_tokenizer
from pagedcli.errors import PagedcliError, RequestError, TraceError
from pagedcli.planning.prompt_sample import PromptSample
from pagedcli.show.terminal import say
from pagedcli.simulation.advice import ADVICE_S, Advice, Adviser
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold
from pagedcli.verdicts import Verdict, paragraph
from pagedcli.views.explain import PromptsSeen

if TYPE_CHECKING:
    from pagedcli.batch.tokenizer import Tokenizer
    from pagedcli.kvevents.lookups import Lookups
    from pagedcli.planning.parting import Parting
    from pagedcli.simulation.requests import Request

_T = TypeVar("_T")
_NO_LIMIT = 2**31  # tokens of a text
_MOST_OF_TEMPLATE = 2**15  # tokens that a chat template may add: it can make millions
_UNSEEN = "prompts that leave no event, as they were found in whole or are shorter than a block"
_LOOKED_AT = 1_000  # prompts that show which special tokens there are
_TEXTS_AT_ONCE = 1_000  # the tokenizer takes some hundred bytes for a token, until their ids are copied


class Caching(Protocol):
    """What the settings of an engine or a run say of its prefix cache."""

    @property
    def block_size(self) -> int: ...

    @property
    def enable_prefix_caching(self) -> bool: ...


def or_note(what: str, find: Callable[[], _T], otherwise: _T) -> _T:
    """What `find` returns, or a line that says what is not known: a run and its tables are right without it."""
    try:
        return find()
    except PagedcliError:
        raise
    except Exception as error:
        say(f"note: {what} is not known, as looking for it failed: {type(error).__name__}: {error}".rstrip(": "))
        return otherwise


def advice_or_note(find: Callable[[], Advice]) -> Advice:
    """The advice of `find`, or a line that says that there is none."""
    return or_note("which settings are better", find, Advice(not_tried="the search failed"))


def find_partings(
    drawn: PromptSample,
    block_size: int,
    tokenizer: "Tokenizer | None",
    *,
    rates_in_file: Mapping[int, float] = MappingProxyType({}),
) -> "list[Parting]":
    """Causes why these prompts share less than they could. Without a tokenizer they are found, but not named.
    `rates_in_file`: block size -> the hits of all prompts in an unlimited cache, drawn or not, where counted."""
    from pagedcli.planning.parting import Finder  # loads numpy

    finder = Finder(block_size, num_in_file=drawn.num_seen, rates_in_file=rates_in_file)
    find = partial(or_note, "where the prompts part", partial(finder.find, drawn.prompts), list["Parting"]())
    if tokenizer is None:
        return find()

    def encode(texts: Sequence[str]) -> "Iterator[array[int]]":
        for first in range(0, len(texts), _TEXTS_AT_ONCE):
            some = list(texts[first : first + _TEXTS_AT_ONCE])
            for ids in tokenizer.encode_all(some, _NO_LIMIT, add_special_tokens=False):
                yield array("i", () if isinstance(ids, RequestError) else ids)

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    finder.decode, finder.encode = decode, encode
    special = set(tokenizer.special_token_ids)
    used = set[int]().union(*(special.intersection(each.token_ids) for each in drawn.prompts[:_LOOKED_AT]))
    texts = [re.escape(text) for text in map(decode, zip(sorted(used))) if text.strip()]
    finder.marks = re.compile("|".join([finder.marks.pattern, *texts]))
    with suppress(RequestError):  # no template, or none that takes a single word and makes few tokens of it
        word = [{"role": "user", "content": "word"}]
        finder.template = tokenizer.encode_chat(word, num_allowed=_MOST_OF_TEMPLATE)
    return find()


def part_verdicts(drawn: PromptSample, limits: Caching, tokenizer: "Tokenizer | None") -> list[Verdict]:
    """The same as verdicts."""
    found = find_partings(drawn, limits.block_size, tokenizer) if drawn.num_seen else []
    return in_words(found, is_cached=limits.enable_prefix_caching)


def in_words(partings: "Sequence[Parting]", *, is_cached: bool = True, has_all: bool = False) -> list[Verdict]:
    """These causes as verdicts, which without prefix caching are about a run with it. `has_all`: more rows cannot be
    looked at than have been."""
    from pagedcli.planning.parting_words import parting_verdict

    found = [parting_verdict(each, has_all=has_all) for each in partings]
    if is_cached:
        return found
    return [
        replace(
            each,
            finding=f"with prefix caching, which is off, {each.finding}",
            to_do=f"turn it on (--enable-prefix-caching) and {each.to_do}",
        )
        for each in found
    ]


def with_settings(parts: Sequence[Verdict], advice: Advice, not_drawn: str | None) -> list[Verdict]:
    """Where the prompts of a run part, and which settings would save, or that none would. `not_drawn`: the prompts
    among which nobody looked, in words."""
    return [*parts, *advice.verdicts(or_nothing=not parts, not_looked_at=None if parts else not_drawn)]


def run_verdicts(drawn: PromptSample, advice: Advice, limits: Caching, tokenizer: "Tokenizer | None") -> list[Verdict]:
    """The same of prompts that a run has served."""
    return with_settings(part_verdicts(drawn, limits, tokenizer), advice, drawn.not_drawn)


def request_verdicts(requests: "Iterable[Request]", limits: Caching, tokenizer: "Tokenizer | None") -> list[Verdict]:
    """The same of simulated requests, as far as their tokens are known."""
    sample = PromptSample()
    for request in requests:
        if request.token_ids is not None:
            sample.add(request.token_ids, request.cache_salt)
    return part_verdicts(sample, limits, tokenizer)


def seen_verdicts(found: "Lookups", tokenizer: "Tokenizer | None") -> list[Verdict] | None:
    """The same of the prompts that the KV events of a server show; None if they show no tokens."""
    sample = PromptSample()
    for token_ids, salt in found.prompts():
        sample.add(token_ids, salt)
    if not sample.num_seen or found.block_size is None:
        return None
    parts = in_words(find_partings(sample, found.block_size, tokenizer))
    return [
        replace(
            each,
            certainty=f"{each.certainty}; counted in full blocks",
            not_looked_at="; ".join(filter(None, [each.not_looked_at, _UNSEEN])),
        )
        for each in parts
    ]


def judged_recording(trace: Path) -> list[str]:
    """The verdicts on a recorded run in words. Nothing of a damaged one, of which its reader tells."""
    adviser, prompts = Adviser(), PromptsSeen()
    try:
        state = fold(TraceReader(trace), adviser, prompts)
    except TraceError:
        return []
    advice = advice_or_note(partial(adviser.advice, state, budget_s=ADVICE_S))
    return paragraph(run_verdicts(prompts.drawn, advice, state.started, recorded_tokenizer(trace, None)))
