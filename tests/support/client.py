"""A client of a broker on a raw socket, which sends exactly the given bytes."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

from logcore import recordbatch
from netshim import wire

DEADLINE_S = 60


class Client:
    """A well-behaved client with methods for single requests."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self.correlation_id = 0

    def ask(self, api: Any, version: int, request: Any) -> Any:
        self.send(api, version, request)
        return self.receive(api, version)

    def send(self, api: Any, version: int, request: Any) -> None:
        self.correlation_id += 1
        self.sock.sendall(
            wire.encode_request(api, version, self.correlation_id, "test", request)
        )

    def receive(self, api: Any, version: int) -> Any:
        correlation_id, value = wire.decode_response(api, version, self.read_frame())
        self.correlation_id = max(self.correlation_id, correlation_id)
        return value

    def read_frame(self) -> bytes:
        return self._receive_exactly(int.from_bytes(self._receive_exactly(4), "big"))

    def _receive_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            got = self.sock.recv(size - len(data))
            if not got:
                raise EOFError(data)
            data += got
        return data

    def use_tls(self, ca_file: Path) -> None:
        """Continue with TLS, and check the certificate of `localhost`."""
        context = ssl.create_default_context(cafile=str(ca_file))
        self.sock = context.wrap_socket(self.sock, server_hostname="localhost")

    def log_in(self, user: str, password: str) -> None:
        """Authenticate with PLAIN."""
        request = wire.SASL_HANDSHAKE.Request(mechanism="PLAIN")
        assert not self.ask(wire.SASL_HANDSHAKE, 1, request).error_code
        token = f"\0{user}\0{password}".encode()
        request = wire.SASL_AUTHENTICATE.Request(auth_bytes=token)
        response = self.ask(wire.SASL_AUTHENTICATE, 1, request)
        assert not response.error_code, response

    def produce(
        self,
        values: list[bytes],
        topic: str = "t",
        acks: int = -1,
        records: bytes | None = None,
    ) -> Any:
        self.begin_produce(values, topic, acks, records)
        if not acks:
            return None
        return self.receive_produced()

    def begin_produce(
        self,
        values: list[bytes],
        topic: str = "t",
        acks: int = -1,
        records: bytes | None = None,
    ) -> None:
        """Send the request of produce(), and do not wait for the response."""
        request = wire.PRODUCE.Request
        batch = (
            recordbatch.encode([(None, value) for value in values], now_ms=1)
            if records is None
            else records
        )
        partition = request.Topic.Partition(index=0, records=batch)
        topics = [request.Topic(name=topic, partition_data=[partition])]
        self.send(
            wire.PRODUCE, 9, request(acks=acks, timeout_ms=1000, topic_data=topics)
        )

    def receive_produced(self) -> Any:
        return self.receive(wire.PRODUCE, 9).responses[0].partition_responses[0]

    def fetch(
        self, offset: int = 0, topic: str = "t", partition: int = 0, **more: Any
    ) -> Any:
        request = wire.FETCH.Request
        partition_fields = request.Topic.Partition(
            partition=partition, fetch_offset=offset, partition_max_bytes=1 << 20
        )
        body = request(
            topics=[request.Topic(topic=topic, partitions=[partition_fields])],
            **{"max_wait_ms": 0, **more},
        )
        return self.ask(wire.FETCH, 11, body).responses[0].partitions[0]

    def create(self, topic: str = "t", **config: str) -> None:
        request = wire.CREATE_TOPICS.Request
        configs = [
            request.Topic.Config(name=name.replace("_", "."), value=value)
            for name, value in config.items()
        ]
        made = request.Topic(
            name=topic, num_partitions=1, replication_factor=1, configs=configs
        )
        answer = self.ask(
            wire.CREATE_TOPICS, 4, request(topics=[made], timeout_ms=1000)
        )
        assert answer.topics[0].error_code == 0

    def is_closed_by_broker(self) -> bool:
        """Wait for the broker, and return whether it closes the connection."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.sock.close()
