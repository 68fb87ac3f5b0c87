"""Sends probes and keeps what was seen: answers, which prompts could have been cached, and differences.

Used by the audit, by shrinking and by --replay. Judges nothing; see verdicts.
"""

import asyncio
import re
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from pagedcli.audit.answers import Answer
from pagedcli.audit.client import Client
from pagedcli.audit.compare import AnswerDifference, compare
from pagedcli.audit.plan import Ask, ComparedPair, Probe, Target, Words, shared_length
from pagedcli.remote import ServerError

NUM_TOP = 5  # alternatives per position
_NEARLY_GREEDY = 0.001  # vLLM refuses n > 1 with temperature 0
_BY_CHANCE = 6  # tokens that a prompt may share with one that an earlier audit has sent


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How requests to the server at hand are written."""

    model: str
    words: tuple[str, ...]  # each of them one token
    num_extra: int  # tokens before the first word
    has_logprobs: bool = True
    ignores_eos: bool = True  # the server knows ignore_eos, so that answers do not end early
    bypass: str | None = None

    def text(self, words: Words) -> str:
        return "".join(f" {self.words[number]}" for number in words)

    def body(self, ask: Ask, tail: str = "") -> dict[str, Any]:
        """The JSON of a request; `tail` follows the prompt."""
        body: dict[str, Any] = {
            "model": self.model, "prompt": self.text(ask.words) + tail, "max_tokens": ask.max_new, "temperature": 0,
        }  # fmt: skip
        if self.has_logprobs:
            body["logprobs"] = NUM_TOP
        if self.ignores_eos:
            body["ignore_eos"] = True
        if ask.n > 1:
            body |= {"n": ask.n, "temperature": _NEARLY_GREEDY}
        if ask.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if ask.salt is not None:
            body["cache_salt"] = f"pagedcli-{ask.salt:x}"
        if ask.user is not None:
            body["user"] = f"pagedcli-{ask.user:x}"
        if ask.is_cold and self.bypass == "salt":
            body["cache_salt"] = f"pagedcli-{secrets.token_hex(12)}"
        if ask.is_cold and self.bypass == "cache_prompt":
            body["cache_prompt"] = False
        return body


@dataclass(frozen=True, slots=True)
class Seen:
    """One request and what came back."""

    check: str
    ask: Ask
    num_shared: int  # tokens that this prompt shares with an earlier or concurrent one, at most
    is_alone: bool
    answer: Answer
    num_after: int = 0  # tokens of an earlier answer at the end of the prompt

    @property
    def num_prompt(self) -> int | None:
        return self.answer.num_prompt

    @property
    def num_cached(self) -> int:
        return self.answer.num_cached or 0

    @property
    def is_hit(self) -> bool:
        """Whether more was cached than chance explains."""
        return self.num_cached > _BY_CHANCE

    def claims_too_much(self, unit: int | None) -> bool:
        """Whether the server says that more was cached than it was ever sent."""
        slack = _BY_CHANCE if unit is None or unit <= _BY_CHANCE else 0
        return not self.ask.is_cold and self.num_cached > max(self.num_shared, slack)

    def follows_law(self, target: Target) -> bool | None:
        """Whether the cached tokens are those of the whole blocks shared. None if that cannot be said of it."""
        cached, length, unit = self.answer.num_cached, self.answer.num_prompt, target.unit
        is_plain = self.is_alone and not self.ask.is_cold and self.ask.after is None
        if cached is None or length is None or unit is None or not is_plain:
            return None
        if self.num_shared >= length:  # the last token is always computed: by block, by token, or not counted
            return cached in {length // unit * unit, (length - 1) // unit * unit, length - 1, length}
        return cached == target.whole(self.num_shared) or max(cached, self.num_shared) <= _BY_CHANCE


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """A probe that was sent, and the differences of its pairs."""

    number: int
    probe: Probe
    seen: tuple[Seen, ...]
    differences: tuple[AnswerDifference | None, ...]  # per pair; None if the two cannot be compared

    def compared(self) -> list[tuple[ComparedPair, AnswerDifference]]:
        pairs = zip(self.probe.pairs, self.differences, strict=True)
        return [(pair, found) for pair, found in pairs if found is not None]


@dataclass(slots=True)
class Runner:
    """Sends probes to one server, one probe at a time."""

    client: Client
    endpoint: Endpoint
    reports: bool = True  # the server reports cached tokens, so none reported means 0
    seen: list[Seen] = field(default_factory=list)
    num_other_lengths: int = 0  # answers to prompts that the server cut into other tokens than expected
    _sent: dict[int | None, list[Words]] = field(default_factory=dict)  # salt -> prompts
    _num_probes: int = 0

    def know(self, ask: Ask) -> None:
        """Count a prompt as sent: an earlier audit has sent it."""
        self._sent.setdefault(ask.salt, []).append(ask.words)

    async def run(self, probe: Probe) -> ProbeOutcome:
        """Send a probe's requests. Raises: RefusedError, ServerError, LimitReached."""
        self._num_probes += 1
        seen: list[Seen] = []
        for step in probe.steps:
            shared = [self._shared(step, place) for place in range(len(step))]
            for ask in step:
                self.know(ask)
            tails = [_whole_words(ask, seen) for ask in step]
            answers = await self._together([self._ask(*each) for each in zip(step, tails, strict=True)])
            for ask, num_shared, answer, tail in zip(step, shared, answers, tails, strict=True):
                seen.append(Seen(probe.check, ask, num_shared, len(step) == 1, answer, len(tail)))
        self.seen += seen
        return ProbeOutcome(
            self._num_probes, probe, tuple(seen), tuple(self._difference(seen, pair) for pair in probe.pairs)
        )

    async def _together(self, asks: list[Coroutine[Any, Any, Answer]]) -> list[Answer]:
        """All answers; the first error cancels the others."""
        tasks = [asyncio.ensure_future(ask) for ask in asks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, ask: Ask, tail: tuple[str, ...]) -> Answer:
        body = self.endpoint.body(ask, "".join(tail))
        answer = await self.client.complete(body, num_tokens=ask.num_tokens)
        if len(answer.choices) != ask.n:
            raise ServerError(f"n = {ask.n} is not offered: the number of answers is {len(answer.choices)}")
        return replace(answer, num_cached=0) if answer.num_cached is None and self.reports else answer

    def _shared(self, step: tuple[Ask, ...], place: int) -> int:
        """Tokens that a prompt shares with those before it, or with concurrent ones."""
        ask = step[place]
        earlier = shared_length(ask.words, self._sent.get(ask.salt, [])) + ask.num_after
        others = [each.words for i, each in enumerate(step) if i != place and each.salt == ask.salt]
        return max(earlier, shared_length(ask.words, others)) + self.endpoint.num_extra

    def _difference(self, seen: list[Seen], pair: ComparedPair) -> AnswerDifference | None:
        """The worst difference over the answers of a pair; None if the server saw other prompts than we think."""
        cold, warm = seen[pair.cold], seen[pair.warm]
        for each in (cold, warm):
            expected = len(each.ask.words) + self.endpoint.num_extra + each.num_after
            if each.num_prompt is not None and each.num_prompt != expected:
                self.num_other_lengths += 1
                return None
        if warm.ask.after is not None and (warm.num_after == 0 or not warm.answer.choices[0].top):
            return None
        return max(compare(cold.answer.choices[0], choice, skip=warm.num_after) for choice in warm.answer.choices)


def _whole_words(ask: Ask, seen: list[Seen]) -> tuple[str, ...]:
    """The tokens of an earlier answer that are to follow a prompt, as long as each is a word after a space.

    Anything else may become other tokens when the server reads it again as text, even as many.
    """
    if ask.after is None:
        return ()
    number, count = ask.after
    tokens = seen[number].answer.choices[0].tokens[:count]
    return tuple(takewhile(lambda token: re.fullmatch(r" [A-Za-z]+", token) is not None, tokens))
