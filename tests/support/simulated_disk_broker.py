"""A broker without sockets on a simulated disk. Submitted work runs in order, after the
broker has handled a request or a tick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import logcore
from logcore.testing import SimulatedDisk
from netshim import wire
from netshim.broker import Broker
from netshim.scheduling import PendingResponse
from netshim.session import ClientSession
from netshim.settings import Settings


class SimulatedDiskBroker:
    def __init__(
        self, disk: SimulatedDisk, now_ms: int, durability: str = "group"
    ) -> None:
        self.disk = disk
        self.durability = durability
        self.now_ms = now_ms
        self.submitted: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.session = ClientSession("127.0.0.1", 9092, "127.0.0.1")
        self.start()

    def start(self) -> None:
        self.is_stopped = False
        self.logdir = logcore.open_dir(
            "/data", create=True, fs=self.disk, durability=self.durability
        )
        self.broker = Broker(self.logdir, Settings(), self.submit, lambda: "id")
        self.tick()

    def stop(self) -> None:
        self.is_stopped = True
        self.broker.stop(self.now_ms)
        self.run()
        self.broker.state.security.close()
        self.logdir.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Queue work for run(). A handler that does not wait for its work then responds
        too early, and a test detects this.
        """
        self.submitted.append((work, done))

    def run(self) -> None:
        while self.submitted:
            work, done = self.submitted.pop(0)
            try:
                result = work()
            except Exception as error:
                result = error
            done(result)

    def tick(self, ms: int = 0) -> None:
        self.now_ms += ms
        self.broker.tick(self.now_ms)
        self.run()

    def ask(self, api: Any, version: int, **fields: Any) -> Any:
        """Send a request, and return the response, which must be available at once. Both
        are encoded and decoded.
        """
        frame = memoryview(
            wire.encode_request(api, version, 1, "me", api.Request(**fields))
        )[4:]
        reply = self.broker.handle(self.session, frame, self.now_ms)
        self.run()
        if isinstance(reply, PendingResponse):
            assert reply.is_set, f"{api.name} has no response yet"
            reply = reply.value
        assert isinstance(reply, list), reply
        return wire.decode_response(api, version, b"".join(reply)[4:])[1]
