"""ZMQ sockets of KV events: a subscriber that can request missed messages, and a publisher that can replay them.

The only file that imports pyzmq, an optional dependency; raises UsageError on import where that is missing. Sizes
and queues are bounded.
"""

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pagedcli.errors import UsageError
from pagedcli.kvevents.publisher import KVEventPublisher
from pagedcli.kvevents.wire import END_OF_REPLAY, MAX_PAYLOAD_BYTES, WireError, split_frames
from pagedcli.process import Closes
from pagedcli.trace.fold import Fold
from pagedcli.trace.state import PoolState

try:
    import zmq
    from zmq.utils.monitor import recv_monitor_message
except ModuleNotFoundError as error:
    raise UsageError("KV events need pyzmq, which is not installed", hint="pip install 'pagedcli[attach]'") from error

_RECEIVE_S = 0.1  # longest time in `receive` before it ends between two messages
_RECEIVE_QUEUE = 128  # messages; a publisher queues more on its side
_REPLAY_MOST = 200_000  # messages
_TOPIC = b"kv"
_KEPT_BATCHES = 10_000
_KEPT_BYTES = 256 << 20
_LINGER_MS = 1000


class Subscriber(Closes):
    """Receives from several publishers. `replays` has one endpoint per publisher, or is empty.

    Raises: UsageError for an invalid endpoint.
    """

    def __init__(self, endpoints: Sequence[str], replays: Sequence[str] = (), *, topic: str = "") -> None:
        if replays and len(replays) != len(endpoints):
            raise UsageError(f"{len(endpoints)} endpoints need as many --replay, not {len(replays)}")
        self.endpoints = list(endpoints)
        self._replays = list(replays)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sources: dict[zmq.Socket[bytes], int] = {}
        self._monitors: dict[zmq.Socket[bytes], zmq.Socket[bytes]] = {}  # monitor of lost connections -> its socket
        self._lost: list[int] = []
        try:
            for source, endpoint in enumerate(endpoints):
                socket = self._receiver(zmq.SUB)
                socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
                self._sources[socket] = source
                monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                self._monitors[monitor] = socket
                connect(socket, endpoint)
                self._poller.register(socket, zmq.POLLIN)
                self._poller.register(monitor, zmq.POLLIN)
        except BaseException:
            self.close()
            raise

    @property
    def can_replay(self) -> bool:
        return bool(self._replays)

    def _receiver(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, _RECEIVE_QUEUE), (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)):
            socket.setsockopt(option, value)
        return socket

    def receive(self, timeout_s: float) -> Iterator[tuple[int, list[bytes]]]:
        """Yield (source, frames) of queued messages, for a limited time; waits for the first up to the timeout."""
        polled = [socket for socket, _ in self._poller.poll(int(timeout_s * 1000))]
        ready = [socket for socket in polled if socket in self._sources]
        for socket in ready:
            end_s = time.monotonic() + _RECEIVE_S / len(ready)
            while time.monotonic() < end_s:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                yield self._sources[socket], frames
        for monitor in polled:
            if monitor in self._monitors:
                self._reconnect(monitor)

    def take_lost(self) -> list[int]:
        """The sources whose connection was lost since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def _reconnect(self, monitor: zmq.Socket[bytes]) -> None:
        """Connect again, which ZMQ itself does not do after a message over the limit."""
        num_lost = 0
        while monitor.poll(0):
            num_lost += recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        if num_lost:
            socket = self._monitors[monitor]
            source = self._sources[socket]
            socket.disconnect(self.endpoints[source])
            socket.connect(self.endpoints[source])
            self._lost.append(source)

    def replay(
        self, source: int, first: int, before: int | None = None, *, idle_s: float = 3.0
    ) -> Iterator[list[bytes]]:
        """The messages numbered from `first` to before `before` that the publisher still has. Ends early if the
        publisher does not answer for `idle_s` seconds."""
        socket = self._receiver(zmq.DEALER)
        try:
            connect(socket, self._replays[source])
            socket.send_multipart([b"", struct.pack(">Q", first)])
            for _ in range(_REPLAY_MOST):
                if not socket.poll(int(idle_s * 1000)):
                    return
                frames = socket.recv_multipart()
                try:
                    message = split_frames(frames)
                except WireError:
                    continue
                if message.seq is not None and message.seq >= (END_OF_REPLAY if before is None else before):
                    return
                yield [message.topic, *frames[-2:]]
        finally:
            socket.close()

    def close(self) -> None:
        for monitor, socket in self._monitors.items():
            socket.disable_monitor()
            monitor.close()
        for socket in self._sources:
            socket.close()
        self._context.term()


class PublisherSocket(Closes):
    """Publishes numbered batches, and replays them on request at the replay endpoint.

    `endpoint` is bound, e.g. tcp://*:5557; the replay endpoint is the next port, or any for tcp://HOST:*.
    Raises: UsageError for an endpoint that cannot be bound.
    """

    def __init__(self, endpoint: str) -> None:
        self.num_sent = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        try:
            for socket in (self._socket, self._replay):
                socket.setsockopt(zmq.LINGER, _LINGER_MS)
            self._socket.setsockopt(zmq.SNDHWM, _KEPT_BATCHES)
            self._replay.setsockopt(zmq.MAXMSGSIZE, 1024)
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # wait for a slow reader instead of dropping
            self._replay.setsockopt(zmq.SNDTIMEO, 1000)
            self.endpoint = bind(self._socket, endpoint)
            self.replay_endpoint = bind(self._replay, _next_endpoint(endpoint))
        except BaseException:
            self._socket.close()
            self._replay.close()
            self._context.term()
            raise
        self._thread = threading.Thread(target=self._answer, name="kv-events-replay", daemon=True)
        self._thread.start()

    def send(self, payload: bytes) -> None:
        with self._lock:
            self._kept.append((self.num_sent, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > _KEPT_BATCHES or self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])
        self._socket.send_multipart([_TOPIC, struct.pack(">Q", self.num_sent), payload])
        self.num_sent += 1

    def _answer(self) -> None:
        while not self._closing.is_set():
            if not self._replay.poll(50):
                continue
            request = self._replay.recv_multipart()
            if len(request) < 2 or len(request[-1]) != 8:
                continue
            first = struct.unpack(">Q", request[-1])[0]
            with self._lock:
                wanted = [(seq, payload) for seq, payload in self._kept if seq >= first]
            try:
                for seq, payload in [*wanted, (END_OF_REPLAY, b"")]:
                    self._replay.send_multipart([*request[:-1], struct.pack(">Q", seq), payload])
            except zmq.ZMQError:  # the reader is gone, or has not read for a second
                continue

    def close(self) -> None:
        """Send what is queued, for up to a second. Further calls do nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._socket.close()
        self._replay.close()
        self._context.term()


def publisher(socket: PublisherSocket) -> Fold:
    """An observer of the engine's events that publishes them."""
    return Fold(PoolState(), KVEventPublisher(socket.send))


def connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect. Raises: UsageError for an invalid endpoint; whether it is reachable is not checked."""
    _take(socket.connect, endpoint, "connect to endpoint", "tcp://HOST:PORT, e.g. tcp://localhost:5557")


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind; returns the endpoint with the actual port. Raises: UsageError if that fails."""
    _take(socket.bind, endpoint, "publish on", "tcp://ADDRESS:PORT, e.g. tcp://*:5557")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _take(attach: Callable[[str], object], endpoint: str, verb: str, form: str) -> None:
    port = endpoint.rpartition(":")[2]
    try:
        if port.isdecimal() and int(port) > 65535:  # ZMQ would use the lower 16 bits
            raise ValueError(f"there is no port {port}")
        attach(endpoint)
    except (zmq.ZMQError, ValueError) as error:
        raise UsageError(f"cannot {verb} {endpoint}: {error}", hint=f"write it as {form}") from error


def _next_endpoint(endpoint: str) -> str:
    """The replay endpoint: the next port, or a different name for other transports."""
    address, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}.replay"
    return f"{address}:{int(port) + 1}" if port.isdecimal() and port != "0" else endpoint
