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
from pagedcli.audit.compare import Difference, compare
from pagedcli.audit.plan import Ask, Probe, Words, shared_length
from pagedcli.remote import ServerError

NUM_TOP = 5  # alternatives per position
_NEARLY_GREEDY = 0.001  # vLLM refuses n > 1 with temperature 0
_BY_CHANCE = 6  # tokens that a prompt may share with one that an earlier audit has sent
_NO_SALT = 0


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

    def claims_too_much(self, unit: int | None) -> bool:
        """Whether the server says that more was cached than it was ever sent."""
        cached = self.answer.num_cached
        slack = _BY_CHANCE if unit is None or unit <= _BY_CHANCE else 0
        return cached is not None and not self.ask.is_cold and cached > max(self.num_shared, slack)

    def follows_law(self, unit: int, smallest: int) -> bool | None:
        """Whether the cached tokens are those of the whole blocks shared. None if that cannot be said of it."""
        cached, length = self.answer.num_cached, self.answer.num_prompt
        if cached is None or length is None or not self.is_alone or self.ask.is_cold or self.ask.after is not None:
            return None
        if self.num_shared >= length:  # the last token is always computed: by block, by token, or not counted
            return cached in {length // unit * unit, (length - 1) // unit * unit, length - 1, length}
        whole = self.num_shared // unit * unit
        return cached == (whole if whole >= smallest else 0) or (cached <= _BY_CHANCE and self.num_shared <= _BY_CHANCE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A probe that was sent, and the differences of its pairs."""

    number: int
    probe: Probe
    seen: tuple[Seen, ...]
    differences: tuple[Difference | None, ...]  # per pair; None if the two cannot be compared
    prompts: tuple[str, ...] = ()  # texts, only of probes that differ

    def worst(self) -> Difference | None:
        known = [each for each in self.differences if each is not None]
        return max(known, key=lambda each: (each.distance or 0.0, not each.is_same), default=None)


@dataclass(slots=True)
class Runner:
    """Sends probes to one server, one probe at a time."""

    client: Client
    endpoint: Endpoint
    reports: bool = True  # the server reports cached tokens, so none reported means 0
    seen: list[Seen] = field(default_factory=list)
    num_other_lengths: int = 0  # answers to prompts that the server cut into other tokens than expected
    _sent: dict[int, list[Words]] = field(default_factory=dict)  # salt -> prompts
    _num_probes: int = 0

    async def run(self, probe: Probe) -> Outcome:
        """Send a probe's requests. Raises: RefusedError, ServerError, LimitReached."""
        self._num_probes += 1
        seen: list[Seen] = []
        for step in probe.steps:
            before = [self._take(ask) for ask in step]  # concurrent requests may share, too
            shared = [max(old, self._shared_in(step, i)) for i, old in enumerate(before)]
            tails = ["".join(_whole_words(ask, seen)) for ask in step]
            answers = await self._together(
                [self._ask(ask, tail) for ask, tail in zip(step, tails, strict=True)]
            )  # fmt: skip
            for ask, num_shared, answer in zip(step, shared, answers, strict=True):
                num_after = len(_whole_words(ask, seen))
                seen.append(Seen(probe.check, ask, num_shared, len(step) == 1, answer, num_after))
        self.seen += seen
        differences = tuple(self._difference(probe, seen, number) for number in range(len(probe.pairs)))
        return Outcome(self._num_probes, probe, tuple(seen), differences)

    async def _together(self, asks: list[Coroutine[Any, Any, Answer]]) -> list[Answer]:
        """All answers; the first error cancels the others."""
        tasks = [asyncio.ensure_future(ask) for ask in asks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, ask: Ask, tail: str) -> Answer:
        num_tokens = len(ask.words) + ask.n * ask.max_new + (ask.after[1] if ask.after else 0)
        answer = await self.client.complete(self.endpoint.body(ask, tail), num_tokens=num_tokens)
        if len(answer.choices) != ask.n:
            raise ServerError(f"n = {ask.n} is not offered: the number of answers is {len(answer.choices)}")
        if answer.num_cached is None and self.reports:
            answer = replace(answer, num_cached=0)
        return answer

    def _take(self, ask: Ask) -> int:
        """Remember a prompt. Returns the tokens that it shares with those before it."""
        salt = _NO_SALT if ask.salt is None else ask.salt
        earlier = self._sent.setdefault(salt, [])
        shared = shared_length(ask.words, earlier) + self.endpoint.num_extra
        earlier.append(ask.words)
        return shared + (ask.after[1] if ask.after is not None else 0)

    def _shared_in(self, step: tuple[Ask, ...], place: int) -> int:
        others = [ask.words for i, ask in enumerate(step) if i != place and ask.salt == step[place].salt]
        return shared_length(step[place].words, others) + self.endpoint.num_extra

    def _difference(self, probe: Probe, seen: list[Seen], number: int) -> Difference | None:
        """The worst difference over the answers of a pair; None if the server saw other prompts than we think."""
        pair = probe.pairs[number]
        cold, warm = seen[pair.cold], seen[pair.warm]
        for each in (cold, warm):
            expected = len(each.ask.words) + self.endpoint.num_extra + each.num_after
            if each.num_prompt is not None and each.num_prompt != expected:
                self.num_other_lengths += 1
                return None
        if warm.ask.after is not None and (warm.num_after == 0 or not warm.answer.choices[0].top):
            return None
        found = [compare(cold.answer.choices[0], choice, skip=warm.num_after) for choice in warm.answer.choices]
        return max(found, key=lambda each: (each.distance or 0.0, not each.is_same))


def _whole_words(ask: Ask, seen: list[Seen]) -> tuple[str, ...]:
    """The tokens of an earlier answer that are to follow a prompt, as long as each is a word after a space.

    Anything else may become other tokens when the server reads it again as text, even as many.
    """
    if ask.after is None:
        return ()
    number, count = ask.after
    tokens = seen[number].answer.choices[0].tokens[:count]
    return tuple(takewhile(lambda token: re.fullmatch(r" [A-Za-z]+", token) is not None, tokens))
