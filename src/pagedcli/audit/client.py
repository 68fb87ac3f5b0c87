"""One server over HTTP, with a limit on everything: bytes and seconds per answer, requests, tokens and seconds per run.

Talks to the given address only: no redirects, no proxy and no password file of the environment. Knows no probes.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from pagedcli.audit.answers import Answer, Pieces, parse_answer
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.printable import byte_text, one_line

MAX_BYTES = 4 << 20  # of one answer; 20 alternatives at 100 positions take less than 1 MiB
_MAX_SHOWN = 200  # characters of a server's message
_RETRY_STATUS = (429, 503)
_RETRY_AFTER_S = (0.5, 2.0)
_HTTP_ERRORS = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError)


class AuditError(PagedcliError):
    """The server cannot be audited, or not any further: nothing is known about its cache (exit code 3)."""

    exit_code = 3


class RefusedError(AuditError):
    """The server refused a request with a status code: it may not offer what was asked for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server refused a request with status {status}: {message}")
        self.status = status


class LimitReached(Exception):
    """A limit of the run is used up; the text names it."""


@dataclass(slots=True)
class Budget:
    """What a run may still send."""

    max_requests: int
    max_tokens: int  # of prompts and answers together
    max_seconds: float
    num_requests: int = 0
    num_tokens: int = 0
    start_s: float = 0.0

    def take(self, num_tokens: int) -> None:
        """Count a request before it is sent. Raises: LimitReached."""
        if self.num_requests >= self.max_requests:
            raise LimitReached(f"the limit of {self.max_requests:,} requests is reached")
        if self.num_tokens + num_tokens > self.max_tokens:
            raise LimitReached(f"the limit of {self.max_tokens:,} tokens is reached")
        if self.seconds_left() <= 0:
            raise LimitReached(f"the limit of {self.max_seconds:,.0f} seconds is reached")
        self.num_requests += 1
        self.num_tokens += num_tokens

    def seconds_left(self) -> float:
        return self.max_seconds - (time.monotonic() - self.start_s)


def base_url(url: str) -> str:
    """The URL without a slash at its end. Raises: UsageError if it is not the address of a server."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{one_line(url)} is not a URL: {error}", hint="http://localhost:8000/v1") from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise UsageError(
            f"{one_line(url)} is not the address of a server",
            hint="name the part before /completions, such as http://localhost:8000/v1",
        )
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            "the URL contains a user name or a password", hint="put a key into a variable and name it: --key-env NAME"
        )
    return url.rstrip("/")


class Client:
    """Sends requests to one server, at most `concurrency` at a time."""

    def __init__(
        self, url: str, budget: Budget, *, key: str | None = None, timeout_s: float = 30.0, concurrency: int = 8,
        proxy: str | None = None, ca_file: Path | None = None,
    ) -> None:  # fmt: skip
        self.url = base_url(url)
        self.budget = budget
        self._timeout_s = timeout_s
        self._secret = None if key is None else key.encode()
        self._slots = asyncio.Semaphore(concurrency)
        headers = {"Accept-Encoding": "identity", "User-Agent": "pagedcli-audit"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        try:
            context = ssl.create_default_context(cafile=ca_file) if url.startswith("https:") else False
            self._http = httpx.AsyncClient(
                headers=headers, follow_redirects=False, trust_env=False, proxy=proxy, verify=context,
                timeout=timeout_s, limits=httpx.Limits(max_connections=concurrency),
            )  # fmt: skip
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise UsageError(f"cannot set up the connection: {one_line(str(error))}") from error

    async def __aenter__(self) -> "Client":
        self.budget.start_s = time.monotonic()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """A JSON document. Raises: AuditError, RefusedError, LimitReached."""
        self.budget.take(0)
        async with self._exchange("GET", path, None) as response:
            return _decode(await self._read(response))

    async def complete(self, body: Mapping[str, Any], *, num_tokens: int) -> Answer:
        """The answer to POST /completions; `num_tokens` is the most that it may cost.

        Raises: AuditError, RefusedError, LimitReached.
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
        async with self._exchange("POST", "/completions", body) as response:
            start_s = time.monotonic()
            if body.get("stream"):
                return await self._read_stream(response, start_s - response.extensions["waited_s"])
            waited_s: float = response.extensions["waited_s"]
            document = _decode(await self._read(response))
            total_s = waited_s + time.monotonic() - start_s
            try:
                return parse_answer(document, first_s=None, total_s=total_s)
            except ValueError as error:
                raise AuditError(f"the server's answer is not a completion: {error}") from error

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[httpx.Response]:
        """A response with status 200 whose body has not been read. The extension waited_s: to its headers."""
        async with self._slots:
            limit_s = max(0.1, min(self._timeout_s, self.budget.seconds_left()))
            start_s = time.monotonic()
            try:
                async with (
                    asyncio.timeout(limit_s),
                    self._http.stream(method, self.url + path, json=body) as response,
                ):
                    response.extensions["waited_s"] = time.monotonic() - start_s
                    await self._check_status(response)
                    yield response
            except TimeoutError as error:
                if self.budget.seconds_left() <= 0:
                    raise LimitReached(f"the limit of {self.budget.max_seconds:,.0f} seconds is reached") from error
                raise AuditError(
                    f"the server took more than {limit_s:,.0f} s for one answer", hint="--timeout allows more"
                ) from error
            except httpx.TimeoutException as error:
                raise AuditError(f"the server did not answer within {limit_s:,.0f} s") from error
            except _HTTP_ERRORS as error:
                what = one_line(str(error))[:_MAX_SHOWN] or type(error).__name__
                raise AuditError(f"no answer from {self.url}: {what}", hint="is the server running?") from error

    async def _check_status(self, response: httpx.Response) -> None:
        if response.is_redirect or 300 <= response.status_code < 400:
            target = one_line(self._without_key(response.headers.get("location", "nowhere").encode()).decode())[
                :_MAX_SHOWN
            ]
            raise AuditError(
                f"the server redirects to {target}; nothing is sent to any other address than the given one",
                hint="name that address if you trust it",
            )
        if response.headers.get("content-encoding", "identity") != "identity":
            raise AuditError("the server sent a compressed answer although none was asked for")
        if response.status_code != 200:
            raise RefusedError(response.status_code, _message(await self._read(response)))

    async def _read(self, response: httpx.Response) -> bytes:
        content = bytearray()
        async for chunk in self._chunks(response):
            content += chunk
        return self._without_key(bytes(content))

    async def _chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in response.aiter_raw():
            num_bytes += len(chunk)
            if num_bytes > MAX_BYTES:
                raise AuditError(f"the server sent more than {byte_text(MAX_BYTES)} for one answer")
            yield chunk

    async def _read_stream(self, response: httpx.Response, start_s: float) -> Answer:
        """The answer whose pieces are server-sent events."""
        pieces, rest = Pieces(), bytearray()
        first_s: float | None = None
        async for chunk in self._chunks(response):
            rest += chunk
            *lines, last = rest.split(b"\n") if b"\n" in chunk else [rest]
            rest = bytearray(last)
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                content = self._without_key(bytes(line[5:]).strip())
                if content == b"[DONE]":
                    return _joined(pieces, first_s, start_s)
                try:
                    has_text = pieces.add(_decode(content))
                except ValueError as error:
                    raise AuditError(f"the server's stream has an event that is not a completion: {error}") from error
                if has_text and first_s is None:
                    first_s = time.monotonic() - start_s
        raise AuditError("the server's stream ended without [DONE]")

    def _without_key(self, content: bytes) -> bytes:
        """What the server sends may repeat the key; nothing of ours does."""
        return content if not self._secret else content.replace(self._secret, b"***")


def _joined(pieces: Pieces, first_s: float | None, start_s: float) -> Answer:
    try:
        return parse_answer(pieces.document(), first_s=first_s, total_s=time.monotonic() - start_s)
    except ValueError as error:
        raise AuditError(f"the server's stream is not a completion: {error}") from error


def _decode(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = one_line(content[:80].decode(errors="replace"))
        raise AuditError(f"the server's answer is not JSON ({one_line(str(error))[:80]}): {shown!r}") from error


def _message(content: bytes) -> str:
    """The text of an error, in the shapes that servers use."""
    found: Any = content[: 4 * _MAX_SHOWN].decode(errors="replace")
    try:
        document = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        document = None
    for key in ("error", "message", "detail"):
        if isinstance(document, dict) and key in document:
            document = found = document[key]
    text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
    return one_line(text)[:_MAX_SHOWN] or "no message"
