"""A /metrics page from a server that is broken or worse: a note, in bounded time."""

import pytest
from hostile_servers import OK, listening, sending

from pagedcli.errors import UsageError
from pagedcli.kvevents.scrape import Scraper

HOSTILE = {
    "no HTTP": b"hello\r\n\r\n",
    "a bad status line": b"HTTP/1.1 abc\r\n\r\n",
    "a bad chunk": OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "half a body": OK + b"Content-Length: 100\r\n\r\nvllm",
    "no UTF-8": OK + b"Content-Length: 2\r\n\r\n\xff\xfe",
    "no metrics": OK + b'Content-Length: 9\r\n\r\na{b="c"} {',
    "another address": b"HTTP/1.1 302 Go\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
    "an error": b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_broken_page_is_a_note(content):
    with listening(sending(content)) as (url, _), Scraper(url) as scraper:
        scraper.read_now()
    assert scraper.problem.startswith("no metrics: ")
    assert list(scraper.metrics.figures()) == []


def test_a_page_that_never_ends_does_not_hold_up_the_end():
    talk = sending(OK + b"Content-Length: 100000\r\n\r\n", forever=b"#", pause_s=0.1)
    with listening(talk) as (url, _), Scraper(url, timeout_s=0.5) as scraper:
        pass
    assert "took more than" in scraper.problem


def test_a_password_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(UsageError, match="password") as caught:
        Scraper("http://me:pass-word@localhost/metrics")
    assert "pass-word" not in str(caught.value)
