"""A /metrics page from a server that is broken or worse: a note, in bounded time."""

import socket
import threading
import time
from contextlib import suppress

import pytest

from pagedcli.errors import UsageError
from pagedcli.kvevents.scrape import Scraper

HEAD = b"HTTP/1.1 200 OK\r\n"
HOSTILE = {
    "no HTTP": b"hello\r\n\r\n",
    "a bad status line": b"HTTP/1.1 abc\r\n\r\n",
    "a bad chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "half a body": HEAD + b"Content-Length: 100\r\n\r\nvllm",
    "no UTF-8": HEAD + b"Content-Length: 2\r\n\r\n\xff\xfe",
    "no metrics": HEAD + b'Content-Length: 9\r\n\r\na{b="c"} {',
    "another address": b"HTTP/1.1 302 Go\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
    "an error": b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
}


@pytest.fixture
def serve():
    listener = socket.create_server(("127.0.0.1", 0))

    def start(content, *, drips=False):
        def run():
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.recv(4096)
                        connection.sendall(content)
                        while drips:
                            connection.sendall(b"#")
                            time.sleep(0.1)

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"

    yield start
    listener.close()


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_broken_page_is_a_note(serve, content):
    with Scraper(serve(content)) as scraper:
        scraper.read_now()
    assert scraper.problem.startswith("no metrics: ")
    assert list(scraper.metrics.figures()) == []


def test_a_page_that_never_ends_does_not_hold_up_the_end(serve, monkeypatch):
    monkeypatch.setattr("pagedcli.kvevents.scrape._TIMEOUT_S", 0.5)
    url = serve(HEAD + b"Content-Length: 100000\r\n\r\n", drips=True)
    with Scraper(url) as scraper:
        pass
    assert "took more than" in scraper.problem


def test_a_password_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(UsageError, match="password") as caught:
        Scraper("http://me:pass-word@localhost/metrics")
    assert "pass-word" not in str(caught.value)
