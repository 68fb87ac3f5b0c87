"""Servers on this machine that answer every connection in the same way, however wrong."""

import re
import socket
import threading
import time
from contextlib import contextmanager, suppress

OK = b"HTTP/1.1 200 OK\r\n"


def whole_request(connection):
    """A connection that is closed with a part of the request unread is reset, and the answer lost."""
    content = connection.recv(1 << 16)
    while content and b"\r\n\r\n" not in content:
        content += connection.recv(1 << 16)
    length = re.search(rb"content-length: (\d+)", content.lower())
    end = content.find(b"\r\n\r\n") + 4 + (0 if length is None else int(length[1]))
    while len(content) < end:
        content += connection.recv(1 << 16)
    return content


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
            requests.append(whole_request(connection))
            talk(connection)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", requests
    finally:
        listener.close()


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
