"""The completions of one server, with a limit on the requests, tokens and seconds of a run. Knows no probes."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec

from pagedcli.audit.answers import Answer, AnswerChoice, Pieces, parse_answer
from pagedcli.later import httpx
from pagedcli.printable import one_line, plural
from pagedcli.remote import RefusedError, Remote, ServerError, checked_url

_RETRY_STATUS = (429, 503)
_RETRY_AFTER_S = (0.5, 2.0)


class LimitReached(Exception):
    """A limit of the run is used up; the text names it."""


@dataclass(slots=True)
class Budget:
    """What a run may still send."""

    max_requests: int
    max_tokens: int  # prompts and answers together
    max_seconds: float
    num_requests: int = 0
    num_tokens: int = 0
    start_s: float = 0.0

    def take(self, num_tokens: int) -> None:
        """Count a request before it is sent. Raises: LimitReached."""
        if self.num_requests >= self.max_requests:
            raise LimitReached(f"the limit of {plural(self.max_requests, 'request')} is reached")
        if self.num_tokens + num_tokens > self.max_tokens:
            raise LimitReached(f"the limit of {plural(self.max_tokens, 'token')} is reached")
        if self.seconds_left() <= 0:
            raise LimitReached(f"the limit of {self.max_seconds:,.0f} seconds is reached")
        self.num_requests += 1
        self.num_tokens += num_tokens

    def seconds_left(self) -> float:
        return self.max_seconds - (time.monotonic() - self.start_s)


class Client(Remote):
    """Sends requests to one server and counts them."""

    def __init__(self, url: str, budget: Budget, **connection: Any) -> None:
        """`connection`: see Remote. Raises: UsageError if the URL, the proxy or the certificates cannot be used."""
        super().__init__(
            checked_url(url, example="http://localhost:8000/v1, the part before /completions"), **connection
        )
        self.budget = budget

    async def __aenter__(self) -> Self:
        self.budget.start_s = time.monotonic()
        return self

    async def get(self, path: str) -> Any:
        """A JSON document. Raises: ServerError, RefusedError, LimitReached."""
        self.budget.take(0)
        async with self._within_budget("GET", path, None) as response:
            return _decode(await self.read(response))

    async def complete(self, body: Mapping[str, Any], *, num_tokens: int) -> Answer:
        """The answer to POST /completions; `num_tokens` is the most that it may cost.

        Raises: ServerError, RefusedError, LimitReached.
        """
        for wait_s in (*_RETRY_AFTER_S, None):
            self.budget.take(num_tokens)
            try:
                return await self._complete(body)
            except RefusedError as error:
                if error.status not in _RETRY_STATUS or wait_s is None:
                    raise
                await asyncio.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    async def _complete(self, body: Mapping[str, Any]) -> Answer:
        async with self._within_budget("POST", "/completions", body) as response:
            start_s = time.monotonic() - response.extensions["waited_s"]
            document, first_s = await (self._stream(response) if body.get("stream") else self._whole(response))
        try:
            answer = parse_answer(
                document, first_s=None if first_s is None else first_s - start_s, total_s=time.monotonic() - start_s
            )
        except ValueError as error:
            raise ServerError(f"the server's answer is not a completion: {error}") from error
        return replace(answer, choices=tuple(map(self._without_secrets, answer.choices)))

    @asynccontextmanager
    async def _within_budget(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator["httpx.Response"]:
        budget = self.budget
        try:
            async with self.exchange(method, path, body, end_s=budget.start_s + budget.max_seconds) as response:
                yield response
        except ServerError:
            if budget.seconds_left() <= 0:
                raise LimitReached(f"the limit of {budget.max_seconds:,.0f} seconds is reached") from None
            raise

    def _without_secrets(self, choice: AnswerChoice) -> AnswerChoice:
        spelled = "".join(choice.tokens)
        named = choice if self.secrets.without(spelled) == spelled else AnswerChoice(choice.text)
        return replace(named, text=self.secrets.without(choice.text), top=self.secrets.without(named.top))

    async def _whole(self, response: "httpx.Response") -> tuple[Any, None]:
        return _decode(await self.read(response)), None

    async def _stream(self, response: "httpx.Response") -> tuple[Any, float | None]:
        """The document of server-sent events, and when its first piece of text came."""
        pieces, rest, first_s = Pieces(), bytearray(), None
        async for chunk in self.chunks(response):
            rest += chunk
            *lines, rest = rest.split(b"\n") if b"\n" in chunk else [rest]
            for line in lines:
                content = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if content == b"[DONE]":
                    return pieces.document(), first_s
                try:
                    has_text = pieces.add(_decode(content))
                except ValueError as error:
                    raise ServerError(f"the server's stream has an event that is not a completion: {error}") from error
                if has_text and first_s is None:
                    first_s = time.monotonic()
        raise ServerError("the server's stream ended without [DONE]")


def _decode(content: bytes | bytearray) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = one_line(content[:80].decode(errors="replace"))
        raise ServerError(f"the server's answer is not JSON ({one_line(str(error))[:80]}): {shown!r}") from error
