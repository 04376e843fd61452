"""A cluster of real processes for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from netshim import wire
from netshim.follow.connection import ClientSettings, SourceConnection
from netshim.wire import codes
from support.machines import Machine

#: Short times, so that tests need not wait. A timeout is longer than a pause of a busy
#: machine, because such a pause must not look like a failure.
FAST = {
    "broker_session_timeout_ms": 3_000,
    "replica_lag_time_max_ms": 4_000,
    "replica_fetch_wait_max_ms": 200,
    "default_replication_factor": 3,
}
#: Time limit for events that take seconds on an idle machine.
LIMIT_S = 90.0


def until(
    condition: Callable[[], Any], description: str, limit_s: float = LIMIT_S
) -> Any:
    """Wait until a condition returns a true value, and return that value."""
    end_s = time.monotonic() + limit_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {limit_s:.0f} s: {description}")
        time.sleep(0.02)


class Cluster:
    """Brokers 1 to `count`, one process each, below a directory."""

    def __init__(
        self,
        path: Path,
        count: int = 3,
        *,
        config: tuple[str, ...] = ("min.insync.replicas=2",),
        durability: str = "group",
        advertised: Mapping[int, int] | None = None,
        ports: Mapping[int, int] | None = None,
        protocol: str = "PLAINTEXT",
        options: Sequence[str] = (),
        client: ClientSettings | None = None,
        client_config: Mapping[str, Any] | None = None,
        registry: str | None = None,
        machines: Mapping[int, Machine] | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        """Start the brokers.

        `ports` are the ports on which brokers listen, and `advertised` the ports that
        clients and other brokers use instead. `machines` are the machines of brokers, by
        default this one. `environment` is added to the environment of each broker.
        `client` has the settings for ask() and `client_config` the settings for
        librdkafka, with the protocol of the listeners.
        """
        self.path = path
        self._protocol = protocol
        self.client = client or ClientSettings()
        self.client_config = dict(client_config or {})
        self._registry = registry or str(path / "cluster")
        self._machines = dict(machines or {})
        self._advertised = dict(advertised or {})
        self._environment = {"PYTHONUNBUFFERED": "1", **(environment or {})}
        path.mkdir(exist_ok=True)
        self._options = ["--durability", durability]
        for name, value in {**FAST, **settings}.items():
            self._options += [f"--{name.replace('_', '-')}", str(value)]
        for text in config:
            self._options += ["--config", text]
        self._options += options
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.ports: dict[int, int] = dict(ports or {})
        for number in range(1, count + 1):
            self.begin(number)
        for number in range(1, count + 1):
            self.await_start(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, process in self.processes.items():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            if error is not None:
                print(f"-- broker {number}\n{self.log(number)}")

    # -- processes ---------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Start a broker with the port of its earlier run."""
        advertise = []
        prefix: list[str] = []
        if number in self._machines:
            prefix = self._machines[number].command()
            advertise = ["--insecure"]
        if number in self._advertised:
            advertise = [
                "--advertise",
                f"{self._protocol}=127.0.0.1:{self._advertised[number]}",
            ]
        before = self.processes.get(number)
        if before is not None and before.stdout is not None:
            before.stdout.close()
        with (self.path / f"{number}.log").open("a") as log:
            self.processes[number] = subprocess.Popen(
                [
                    *prefix,
                    sys.executable,
                    "-m",
                    "netshim",
                    "serve",
                    str(self.path / str(number)),
                    "--registry",
                    self._registry,
                    "--node-id",
                    str(number),
                    "--listener",
                    f"{self._protocol}://{self.host(number)}:{self.ports.get(number, 0)}",
                    "--log-format",
                    "text",
                    *advertise,
                    *self._options,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self._environment},
            )

    def await_start(self, number: int) -> None:
        stdout = self.processes[number].stdout
        assert stdout is not None
        line = stdout.readline()
        assert "serving" in line, self.log(number)
        if number not in self._advertised:  # the line contains the advertised port
            self.ports[number] = int(line.rsplit(":", 1)[1])

    def start(self, number: int) -> None:
        self.begin(number)
        self.await_start(number)

    def send(self, number: int, signal_number: int) -> None:
        self.processes[number].send_signal(signal_number)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()

    def stop(self, number: int) -> int:
        """Stop a broker cleanly, and return its exit code."""
        self.processes[number].terminate()
        return self.processes[number].wait(LIMIT_S)

    def log(self, number: int) -> str:
        return (self.path / f"{number}.log").read_text()

    # -- requests ----------------------------------------------------------------------

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(
            f"{self.host(number)}:{port}" for number, port in self.ports.items()
        )

    def host(self, number: int) -> str:
        """Return the address of a broker's machine."""
        machine = self._machines.get(number)
        return "127.0.0.1" if machine is None else machine.address

    def ask(
        self,
        number: int,
        api: Any,
        request: Any,
        client: ClientSettings | None = None,
        **options: Any,
    ) -> Any:
        """Send one request to a broker, and return the response."""
        connection = SourceConnection(
            self.host(number), self.ports[number], client or self.client
        )
        try:
            return connection.request(api, request, **options)
        finally:
            connection.close()

    def metadata(self, topic: str, number: int | None = None) -> Any:
        """Return the metadata of a topic, from a broker that runs."""
        if number is None:
            number = next(
                number
                for number, process in self.processes.items()
                if process.poll() is None
            )
        request = wire.METADATA.Request(
            topics=[wire.METADATA.Request.Topic(name=topic)],
            allow_auto_topic_creation=False,
        )
        return self.ask(number, wire.METADATA, request).topics[0]

    def partition(self, topic: str, index: int = 0, number: int | None = None) -> Any:

        def found() -> Any:
            # The other brokers apply the creation of a topic a moment later.
            partitions = self.metadata(topic, number).partitions
            return next(
                (
                    partition
                    for partition in partitions
                    if partition.partition_index == index
                ),
                None,
            )

        return until(found, f"a broker reports {topic}-{index}")

    def create(
        self,
        topic: str,
        partitions: int = 1,
        factor: int = 3,
        expected: int = codes.NONE,
        **config: str,
    ) -> Any:
        """Create a topic, check the error code, and return the topic of the response."""
        kind = wire.CREATE_TOPICS.Request.Topic
        request = wire.CREATE_TOPICS.Request(
            topics=[
                kind(
                    name=topic,
                    num_partitions=partitions,
                    replication_factor=factor,
                    configs=[
                        kind.Config(name=name.replace("_", "."), value=value)
                        for name, value in config.items()
                    ],
                )
            ],
            timeout_ms=30_000,
        )
        created = self.ask(1, wire.CREATE_TOPICS, request).topics[0]
        assert created.error_code == expected, created
        return created

    def until_in_sync(self, topic: str, count: int, index: int = 0) -> Any:
        """Wait until a partition has a leader and this many replicas in sync."""

        def found() -> Any:
            entry = self.partition(topic, index)
            if entry.leader_id >= 0 and len(entry.isr_nodes) == count:
                return entry
            return None

        return until(found, f"{count} replicas of {topic}-{index} in sync")
