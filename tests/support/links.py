"""Links between the brokers of a cluster that a test can cut.

Each broker advertises the port of a LinkProxy. The proxy recognizes the fetches of
followers by their node id, and handles each follower as a separate link. It passes on
all other connections.
"""

from __future__ import annotations

import contextlib
import enum
import random
import socket
import threading

from logcore.closeable import Closeable
from netshim import wire

_NOT_A_FOLLOWER = -1


def low_port() -> int:
    """Return a free port below the range of ports for outgoing connections.

    A connection to a port without a listener may get the same port for its own side, and
    a broker could then not listen there.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class Cut(enum.Enum):
    """The direction in which a link loses messages."""

    REQUESTS = "the leader gets no requests"
    RESPONSES = "the follower gets no responses"
    BOTH = "connections end, and new ones end too"


class _ProxiedConnection:
    """A connection through the proxy. `follower` is set by the first fetch."""

    def __init__(self, client: socket.socket, broker: socket.socket) -> None:
        self.client = client
        self.broker = broker
        self.follower = _NOT_A_FOLLOWER

    def close(self) -> None:
        for sock in (self.client, self.broker):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class LinkProxy(Closeable):
    """Forwards connections to one broker, which listens on another port."""

    def __init__(self, broker_port: int) -> None:
        self._broker_port = broker_port
        self._cuts: dict[int, Cut] = {}
        self._pairs: set[_ProxiedConnection] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self, follower: int, cut: Cut) -> None:
        """Cut the link from a follower to this broker."""
        with self._lock:
            self._cuts[follower] = cut
        if cut is Cut.BOTH:
            self._end_pairs({follower})

    def heal(self) -> None:
        """End the cuts. Connections that have lost frames are closed."""
        with self._lock:
            followers = set(self._cuts)
            self._cuts = {}
        self._end_pairs(followers)

    def _end_pairs(self, followers: set[int]) -> None:
        with self._lock:
            ended = [pair for pair in self._pairs if pair.follower in followers]
        for pair in ended:
            pair.close()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.close()
        for thread in self._threads:
            thread.join()

    # -- threads -----------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(("127.0.0.1", self._broker_port))
            except OSError:  # the broker does not run
                client.close()
                continue
            for sock in (client, broker):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = _ProxiedConnection(client, broker)
            with self._lock:
                self._pairs.add(pair)
            thread = threading.Thread(target=self._forward, args=(pair,))
            self._threads.append(thread)
            thread.start()

    def _forward(self, pair: _ProxiedConnection) -> None:
        back = threading.Thread(target=self._copy_frames, args=(pair, False))
        back.start()
        self._copy_frames(pair, True)
        back.join()
        with self._lock:
            self._pairs.discard(pair)
        pair.client.close()
        pair.broker.close()

    def _copy_frames(self, pair: _ProxiedConnection, is_request: bool) -> None:
        source, target = pair.client, pair.broker
        lost = Cut.REQUESTS
        if not is_request:
            source, target = pair.broker, pair.client
            lost = Cut.RESPONSES
        with contextlib.suppress(OSError, EOFError):
            while True:
                size = _receive_exactly(source, 4)
                frame = _receive_exactly(source, int.from_bytes(size, "big"))
                if is_request and pair.follower == _NOT_A_FOLLOWER:
                    pair.follower = _follower_of(frame)
                cut = self._cuts.get(pair.follower)
                if cut is Cut.BOTH:
                    break
                if cut is not lost:
                    target.sendall(size + frame)
        pair.close()


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        found = sock.recv(size - len(data))
        if not found:
            raise EOFError
        data += found
    return bytes(data)


def _follower_of(frame: bytes) -> int:
    """Return the node id in a fetch of a follower."""
    if int.from_bytes(frame[:2], "big") != wire.FETCH.key:
        return _NOT_A_FOLLOWER
    view = memoryview(frame)
    request = wire.decode_request(wire.decode_header(view), view)
    return int(request.replica_state.replica_id)
