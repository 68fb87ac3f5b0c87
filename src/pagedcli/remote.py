"""One HTTP server, with a limit on the bytes and seconds of each answer. Used by audit, and by attach for /metrics.

Connects to the given address only: no redirects, cookies, proxies or password files of the environment. No text of the
server or the network library leaves this module with a secret in it.
"""

import asyncio
import base64
import html
import math
import re
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from pagedcli.errors import PagedcliError, UsageError
from pagedcli.later import httpx
from pagedcli.printable import byte_text, one_line

T = TypeVar("T")
MAX_BYTES = 4 << 20  # one answer; 20 alternatives at 100 positions take less than 1 MiB
MAX_SHOWN = 200  # characters of a server's message
_PIECES = (6, 8)  # characters by which part of a secret is recognised: half of it, within these limits
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)


class ServerError(PagedcliError):
    """A server cannot be used, or not any further (exit code 3)."""

    exit_code = 3


class RefusedError(ServerError):
    """The server refused a request with a status code: it may not offer what was asked for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server refused a request with status {status}: {message}")
        self.status = status


class Secrets:
    """Keys and passwords that no output may contain: whole, in part, percent-encoded, escaped, in Base64 or hex."""

    def __init__(self, *secrets: str | None) -> None:
        least, most = _PIECES
        pieces: dict[str, None] = {}
        for secret in filter(None, secrets):
            encoded = secret.encode()
            for form in (secret, base64.b64encode(encoded).decode().rstrip("="), encoded.hex()):
                size = min(len(form), max(least, min(most, len(form) // 2)))
                pieces |= dict.fromkeys(form[i : i + size].lower() for i in range(len(form) - size + 1))
        self._pieces = tuple(pieces)
        any_piece = "|".join(map(re.escape, pieces))
        self._pattern = re.compile(f"(?=({any_piece}))" if pieces else "(?!)", re.IGNORECASE)

    def without(self, value: T) -> T:
        """A text, or a document of them, with *** in place of every secret."""
        cleaned: Any = value
        if not self._pieces:
            pass
        elif isinstance(value, str):
            cleaned = self._cleaned(value)
        elif isinstance(value, Mapping):
            cleaned = {self.without(name): self.without(each) for name, each in value.items()}
        elif isinstance(value, list | tuple):
            cleaned = type(value)(map(self.without, value))
        return cleaned  # type: ignore[no-any-return]

    def _cleaned(self, text: str) -> str:
        for decode in (str, unquote, html.unescape, _unescape):
            decoded = decode(text)
            lower = decoded.lower()
            if any(piece in lower for piece in self._pieces):
                text = self._replaced(decoded)
        return text

    def _replaced(self, text: str) -> str:
        parts: list[str] = []
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end or not parts:
                parts += [text[end : match.start()], "***"]
            end = max(end, match.end(1))
        return "".join(parts) + text[end:]


def _unescape(text: str) -> str:
    r"""Text without the escapes of JSON or of Python's repr: \u0073, \x73, \/."""
    return _ESCAPE.sub(lambda match: chr(int(match[1] or match[2], 16)) if match[1] or match[2] else match[3], text)


def shown_url(url: str) -> str:
    """A URL for a message: no user, password, query or fragment, which may hold keys."""
    return one_line(re.sub(r"(^|//)[^/?#]*@", r"\1***@", re.split(r"[?#]", url)[0]))


def checked_url(url: str, *, example: str, has_query: bool = False) -> str:
    """The URL without a slash at its end. Raises: UsageError if it is not the address of a server."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise UsageError(f"{shown_url(url)} is not a URL", hint=f"for example {example}") from None
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            "the URL contains a user name or a password, which any user of this machine can read",
            hint=f"write it without, for example {example}; audit takes a key from a variable: --key-env NAME",
        )
    if parts.scheme not in ("http", "https") or not host or not (has_query or not (parts.query or parts.fragment)):
        raise UsageError(f"{shown_url(url)} is not the URL of a server", hint=f"for example {example}")
    return url.rstrip("/")


class Remote:
    """A connection to one server, for at most `concurrency` requests at a time."""

    def __init__(
        self, url: str, *, key: str | None = None, timeout_s: float = 30.0, concurrency: int = 8,
        proxy: str | None = None, ca_file: Path | None = None,
    ) -> None:  # fmt: skip
        """`url` has passed checked_url. Raises: UsageError for a proxy or certificates that cannot be used."""
        self.secrets = Secrets(key, *_proxy_secrets(proxy))
        self.shown = self.secrets.without(shown_url(url))
        self.timeout_s = timeout_s
        self._url = url
        self._slots = asyncio.Semaphore(concurrency)
        headers = {"Accept-Encoding": "identity", "User-Agent": "pagedcli"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        try:
            context = ssl.create_default_context(cafile=ca_file) if url.startswith("https:") else False
            self._http = httpx.AsyncClient(
                headers=headers, follow_redirects=False, trust_env=False, proxy=proxy, verify=context,
                timeout=timeout_s, limits=httpx.Limits(max_connections=concurrency),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            )  # fmt: skip
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise UsageError(f"cannot set up the connection: {self._text(str(error))}") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def exchange(
        self, method: str, path: str = "", body: Mapping[str, Any] | None = None, *, end_s: float = math.inf
    ) -> AsyncIterator["httpx.Response"]:
        """A response with status 200 whose body has not been read. The extension waited_s: to its headers.

        Ends after the timeout, or at `end_s` of the monotonic clock. Raises: ServerError, RefusedError.
        """
        async with self._slots:
            start_s = time.monotonic()
            limit_s = max(0.1, min(self.timeout_s, end_s - start_s))
            try:
                async with asyncio.timeout(limit_s), self._http.stream(method, self._url + path, json=body) as response:
                    response.extensions["waited_s"] = time.monotonic() - start_s
                    await self._check_status(response)
                    yield response
            except httpx.TimeoutException:
                raise ServerError(f"the server did not answer within {limit_s:,.0f} s") from None
            except TimeoutError:
                raise ServerError(
                    f"the server took more than {limit_s:,.0f} s for one answer", hint="--timeout allows more"
                ) from None
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
                what = self._text(str(error)) or type(error).__name__
                raise ServerError(f"no answer from {self.shown}: {what}", hint="is the server running?") from None
            except PagedcliError as error:  # anything in it may be the server's words
                error.message = self.secrets.without(error.message)
                error.args = (error.message,)
                error.__cause__, error.__suppress_context__ = None, True
                raise

    async def read(self, response: "httpx.Response") -> bytes:
        content = bytearray()
        async for chunk in self.chunks(response):
            content += chunk
        return bytes(content)

    async def chunks(self, response: "httpx.Response") -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in response.aiter_raw():
            num_bytes += len(chunk)
            if num_bytes > MAX_BYTES:
                raise ServerError(f"the server sent more than {byte_text(MAX_BYTES)} for one answer")
            yield chunk

    async def _check_status(self, response: "httpx.Response") -> None:
        if response.is_redirect or 300 <= response.status_code < 400:
            target = self._text(response.headers.get("location", "nowhere"))
            raise ServerError(
                f"the server redirects to {target}; nothing is sent to any other address than the given one",
                hint="name that address if you trust it",
            )
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ServerError("the server sent a compressed answer although none was asked for")
        if response.status_code != 200:
            raise RefusedError(response.status_code, self._text(_message(await self.read(response))) or "no message")

    def _text(self, text: str) -> str:
        """The beginning of a server's or the network library's text. Secrets are removed before it is cut."""
        return one_line(self.secrets.without(text[: 16 * MAX_SHOWN]))[:MAX_SHOWN]


def _proxy_secrets(proxy: str | None) -> list[str]:
    user = (proxy or "").rpartition("//")[2].rpartition("@")[0]
    return [text for each in (user, user.partition(":")[2]) for text in (each, unquote(each))]


def _message(content: bytes) -> str:
    """The text of an error, in the shapes that servers use."""
    found: Any = content[: 16 * MAX_SHOWN].decode(errors="replace")
    try:
        document = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        document = None
    for key in ("error", "message", "detail"):
        if isinstance(document, dict) and key in document:
            document = found = document[key]
    return found if isinstance(found, str) else msgspec.json.encode(found).decode()
