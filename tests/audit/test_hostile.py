"""Servers that are broken or worse: a clear error, bounded memory, and nothing sent anywhere else."""

import asyncio
import gzip
import json
import socket
import threading
import time
import tracemalloc
from contextlib import contextmanager, suppress

import pytest

from pagedcli.audit.client import MAX_BYTES, AuditError, Budget, Client, LimitReached, RefusedError
from pagedcli.errors import UsageError

OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"Content-Type: application/json\r\n"
STREAM = OK + b"Content-Type: text/event-stream\r\nConnection: close\r\n\r\n"
GOOD = json.dumps({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1}}).encode()


def whole(content, head=JSON):
    return head + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


@contextmanager
def listening(talk):
    """A server that answers every connection with `talk(connection)`. Yields its URL and the requests it has seen."""
    listener = socket.create_server(("127.0.0.1", 0))
    requests = []

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection):
        with connection, suppress(OSError):
            connection.settimeout(10)
            requests.append(connection.recv(1 << 16))
            talk(connection)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", requests
    finally:
        listener.close()


def ask(url, *, stream=False, timeout_s=2.0, key=None, seconds=20.0):
    """One completion. Returns the answer."""

    async def run():
        async with Client(url, Budget(10, 1000, seconds), timeout_s=timeout_s, key=key) as client:
            return await client.complete({"prompt": "a", "stream": stream}, num_tokens=1)

    return asyncio.run(run())


def sending(*parts, forever=None, pause_s=0.0):
    """Sends the parts, then `forever` again and again until the other side leaves."""

    def talk(connection):
        for part in parts:
            connection.sendall(part)
        deadline_s = time.monotonic() + 15
        while forever is not None and time.monotonic() < deadline_s:
            connection.sendall(forever)
            time.sleep(pause_s)

    return talk


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


@pytest.mark.parametrize(("talk", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_answer_is_a_clear_error(talk, words):
    with listening(talk) as (url, _), pytest.raises(AuditError, match=words):
        ask(url)


@pytest.mark.parametrize(("talk", "words"), HOSTILE_STREAMS.values(), ids=HOSTILE_STREAMS.keys())
def test_a_hostile_stream_is_a_clear_error(talk, words):
    with listening(talk) as (url, _), pytest.raises(AuditError, match=words):
        ask(url, stream=True)


@pytest.mark.parametrize("stream", [False, True])
def test_memory_stays_bounded(stream):
    talk = sending(STREAM if stream else JSON + b"\r\n", forever=EVENT * 1000 if stream else b" " * 65536)
    with listening(talk) as (url, _):
        ask_again = pytest.raises(AuditError, match="more than")
        with ask_again:
            ask(url, stream=stream)  # imports and caches
        tracemalloc.start()
        with pytest.raises(AuditError, match="more than"):
            ask(url, stream=stream)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 * MAX_BYTES


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_nothing_follows_a_redirect(status):
    with listening(sending(whole(GOOD))) as (elsewhere, seen):
        head = f"HTTP/1.1 {status} Go\r\nLocation: {elsewhere}/completions\r\n".encode()
        with listening(sending(whole(b"", head))) as (url, _), pytest.raises(AuditError, match="redirects to"):
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


def test_the_key_is_sent_and_never_repeated():
    echo = json.dumps({"error": {"message": "wrong key sk-secret-1"}}).encode()
    with listening(sending(whole(echo, b"HTTP/1.1 401 No\r\n"))) as (url, seen):
        with pytest.raises(RefusedError) as caught:
            ask(url, key="sk-secret-1")
        assert b"Bearer sk-secret-1" in seen[0]
    assert "sk-secret-1" not in str(caught.value)
    assert "wrong key ***" in caught.value.message


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
