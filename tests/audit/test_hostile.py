"""Servers that are broken or worse: a clear error, bounded memory, and nothing sent anywhere else."""

import asyncio
import base64
import gzip
import html
import json
import traceback
import tracemalloc
from urllib.parse import quote, unquote

import pytest
from hostile_servers import OK, listening, sending

from pagedcli.audit.answers import AnswerChoice
from pagedcli.audit.client import Budget, Client, LimitReached
from pagedcli.errors import UsageError
from pagedcli.remote import MAX_BYTES, RefusedError, ServerError

JSON = OK + b"Content-Type: application/json\r\n"
STREAM = OK + b"Content-Type: text/event-stream\r\nConnection: close\r\n\r\n"
GOOD = json.dumps({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1}}).encode()


def whole(content, head=JSON):
    return head + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


def ask(url, *, stream=False, timeout_s=2.0, key=None, seconds=20.0):
    """One completion. Returns the answer."""

    async def run():
        async with Client(url, Budget(10, 1000, seconds), timeout_s=timeout_s, key=key) as client:
            return await client.complete({"prompt": "a", "stream": stream}, num_tokens=1)

    return asyncio.run(run())


EVENT = b"data: " + json.dumps({"choices": [{"index": 0, "text": "a"}]}).encode() + b"\n\n"
HOSTILE = {
    "not JSON": (sending(whole(b"<html>hello</html>")), "not JSON"),
    "not UTF-8": (sending(whole(b'{"choices": "\xff\xfe"}')), "not JSON|no choices"),
    "deeply nested": (sending(whole(b"[" * 200_000)), "not JSON"),
    "a list": (sending(whole(b"[]")), "not a completion"),
    "no choices": (sending(whole(b'{"choices": []}')), "not a completion"),
    "a number for text": (sending(whole(b'{"choices": [{"text": 5}]}')), "not a completion"),
    "an empty body": (sending(whole(b"")), "not JSON"),
    "no HTTP": (sending(b"hello there\r\n\r\n"), "no answer"),
    "a closed connection": (sending(), "no answer"),
    "half a body": (sending(JSON + b"Content-Length: 100\r\n\r\n{"), "no answer"),
    "endless headers": (sending(OK, forever=b"X-More: " + b"x" * 1000 + b"\r\n"), "no answer"),
    "an endless body": (sending(JSON + b"\r\n", forever=b" " * 65536), "more than 4.0 MiB"),
    "a huge length": (sending(JSON + b"Content-Length: 9999999999\r\n\r\n", forever=b" " * 65536), "more than 4.0 Mi"),
    "a bomb": (sending(whole(gzip.compress(b" " * 10_000_000), JSON + b"Content-Encoding: gzip\r\n")), "compressed"),
    "a slow drip": (sending(JSON + b"Content-Length: 100\r\n\r\n", forever=b" ", pause_s=0.2), "took more than 2 s"),
    "silence": (sending(JSON, forever=b"", pause_s=0.2), "took more than 2 s|did not answer"),
}  # fmt: skip
HOSTILE_STREAMS = {
    "an endless stream": (sending(STREAM, forever=EVENT * 100), "more than 4.0 MiB"),
    "an endless line": (sending(STREAM, forever=b"data: " + b"x" * 65536), "more than 4.0 MiB"),
    "a slow stream": (sending(STREAM, forever=EVENT, pause_s=0.1), "took more than 2 s"),
    "a stream that stops": (sending(STREAM, EVENT), "ended without"),
    "events of something else": (sending(STREAM, b'data: {"choices": 7}\n\n'), "not a completion"),
    "events that are no JSON": (sending(STREAM, b"data: hello\n\n"), "not JSON"),
    "an error in the stream": (sending(STREAM, b'data: {"error": "out of memory"}\n\n'), "out of memory"),
    "nothing but an end": (sending(STREAM, b"data: [DONE]\n\n"), "not a completion"),
}


@pytest.mark.slow_cases("an endless stream")
@pytest.mark.parametrize("name", [*HOSTILE, *HOSTILE_STREAMS])
def test_a_hostile_answer_is_a_clear_error(name):
    talk, words = (HOSTILE | HOSTILE_STREAMS)[name]
    with listening(talk) as (url, _), pytest.raises(ServerError, match=words):
        ask(url, stream=name in HOSTILE_STREAMS)


@pytest.mark.quick("False")
@pytest.mark.parametrize("stream", [False, True])
def test_memory_stays_bounded(stream):
    talk = sending(STREAM if stream else JSON + b"\r\n", forever=EVENT * 1000 if stream else b" " * 65536)
    with listening(talk) as (url, _):
        with pytest.raises(ServerError, match="more than"):
            ask(url, stream=stream)  # imports and caches
        tracemalloc.start()
        with pytest.raises(ServerError, match="more than"):
            ask(url, stream=stream)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 * MAX_BYTES


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_nothing_follows_a_redirect(status):
    with listening(sending(whole(GOOD))) as (elsewhere, seen):
        head = f"HTTP/1.1 {status} Go\r\nLocation: {elsewhere}/completions\r\n".encode()
        with listening(sending(whole(b"", head))) as (url, _), pytest.raises(ServerError, match="redirects to"):
            ask(url)
        assert seen == []


def test_no_proxy_of_the_environment_is_used(monkeypatch):
    with listening(sending(whole(GOOD))) as (proxy, through_proxy), listening(sending(whole(GOOD))) as (url, seen):
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        assert ask(url).choices[0].text == "a"
        assert len(seen) == 1
        assert through_proxy == []


def test_no_password_file_of_the_environment_is_used(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hidden\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with listening(sending(whole(GOOD))) as (url, seen):
        ask(url)
    assert b"authorization" not in seen[0].lower()


KEY = "sk-very/secret'1"
ECHOES = {
    "an error": whole(json.dumps({"error": {"message": f"wrong key {KEY}"}}).encode(), b"HTTP/1.1 401 No\r\n"),
    "a status line": f"HTTP/1.1 {KEY} No\r\n\r\n".encode(),
    "a reason": whole(b"", f"HTTP/1.1 401 {KEY}\r\n".encode()),
    "a header": OK + f"X {KEY}: 1\r\n\r\n".encode(),
    "a header without a name": OK + f": {KEY}\r\n\r\n".encode(),
    "a length": OK + f"Content-Length: {KEY}\r\n\r\n".encode(),
    "an encoding": OK + f"Transfer-Encoding: {KEY}\r\n\r\n".encode(),
    "a chunk header": JSON + f"Transfer-Encoding: chunked\r\n\r\n{KEY}\r\n".encode(),
    "no HTTP": f"{KEY}\r\n\r\n".encode(),
    "a redirect": whole(b"", f"HTTP/1.1 302 Go\r\nLocation: http://h/?key={quote(KEY, safe='')}\r\n".encode()),
    "no JSON": whole(f"<p>{html.escape(KEY)}</p>".encode()),
    "half of it": whole(json.dumps({"error": f"{KEY[:9]}... is wrong"}).encode(), b"HTTP/1.1 401 No\r\n"),
    "two halves": whole(f"{KEY[:9]}\n{KEY[9:]}".encode(), b"HTTP/1.1 401 No\r\n"),
    "percent signs": whole("".join(f"%{ord(c):02x}" for c in KEY).encode(), b"HTTP/1.1 401 No\r\n"),
    "capitals": whole(KEY.upper().encode(), b"HTTP/1.1 401 No\r\n"),
    "base64": whole(base64.b64encode(KEY.encode()), b"HTTP/1.1 401 No\r\n"),
    "escapes": whole("".join(f"\\u{ord(c):04x}" for c in KEY).encode(), b"HTTP/1.1 401 No\r\n"),
    "a cookie": whole(f"<p>{KEY}</p>".encode(), JSON + f"Set-Cookie: {KEY}; expires={KEY}\r\n".encode()),
}


def shows_key(text):
    for decoded in (text, unquote(text), html.unescape(text), text.encode().decode("unicode_escape")):
        pieces = {KEY[i : i + 8].lower() for i in range(len(KEY) - 7)}
        if any(piece in decoded.lower() for piece in pieces) or base64.b64encode(KEY.encode()).decode() in text:
            return True
    return False


@pytest.mark.parametrize("answer", ECHOES.values(), ids=ECHOES.keys())
def test_the_key_is_sent_and_never_repeated(answer):
    with listening(sending(answer)) as (url, seen):
        with pytest.raises(ServerError) as caught:
            ask(url, key=KEY, timeout_s=15.0)
        assert f"Bearer {KEY}".encode() in seen[0]
    shown = "".join(traceback.format_exception(caught.value))
    assert not shows_key(shown), shown


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_spells_the_key_token_by_token_has_none_of_it(stream):
    logprobs = {"tokens": [KEY[:5], KEY[5:]], "token_logprobs": [-1, -1], "top_logprobs": [{KEY: -1}, {"a": -1}]}
    events = [{"index": 0, "text": KEY[:5], "logprobs": logprobs}, {"index": 0, "text": KEY[5:]}]
    whole_answer = whole(json.dumps({"choices": [{"text": KEY, "logprobs": logprobs}]}).encode())
    streamed = STREAM + b"".join(f"data: {json.dumps({'choices': [each]})}\n\n".encode() for each in events)
    with listening(sending(streamed + b"data: [DONE]\n\n" if stream else whole_answer)) as (url, _):
        (choice,) = ask(url, key=KEY, stream=stream).choices
    assert choice == AnswerChoice("***")


@pytest.mark.parametrize("key", ["x", "EMPTY", KEY])
def test_a_key_does_not_disturb_a_document_that_is_not_its_own(key):
    document = json.dumps({"choices": [{"text": "xylophone"}], "usage": {"prompt_tokens": 1}}).encode()
    with listening(sending(whole(document))) as (url, _):
        assert ask(url, key=key).num_prompt == 1


@pytest.mark.parametrize(
    "url", ["ftp://me:pass-word@h/v1", "http://me:pass-word@[::1", "me:pass-word@h", "http://h/v1?key=pass-word"]
)
def test_passwords_in_a_url_are_not_repeated(url):
    with pytest.raises(UsageError) as caught:
        Client(url, Budget(1, 1, 1.0))
    assert "pass-word" not in str(caught.value)
    with pytest.raises(UsageError) as caught:
        Client("http://h/v1", Budget(1, 1, 1.0), proxy="ftp://me:pass-word@h:1")
    assert "pass-word" not in str(caught.value)


def test_a_busy_server_is_asked_a_few_times_only():
    with listening(sending(whole(b"{}", b"HTTP/1.1 503 Busy\r\n"))) as (url, seen):
        with pytest.raises(RefusedError, match="503"):
            ask(url)
        assert len(seen) == 3


def test_messages_of_a_server_cannot_steer_the_terminal():
    message = json.dumps({"error": {"message": "\x1b[2J\x07evil " + "x" * 10_000}}).encode()
    talk = sending(whole(message, b"HTTP/1.1 400 No\r\n"))
    with listening(talk) as (url, _), pytest.raises(RefusedError) as caught:
        ask(url)
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 300


def test_the_time_of_the_audit_ends_a_request():
    with listening(sending(JSON, forever=b"", pause_s=0.2)) as (url, _), pytest.raises(LimitReached, match="1 seconds"):
        ask(url, timeout_s=30, seconds=1.0)


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://localhost/v1", "http://", "http://[::1", "http://a:99999/v1", "http://h/v1?x=1",
     "http://me:pw@h/v1", "file:///etc/passwd"],
)  # fmt: skip
def test_what_is_no_address_of_a_server_is_refused(url):
    with pytest.raises(UsageError):
        Client(url, Budget(1, 1, 1.0))
