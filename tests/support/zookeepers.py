"""A ZooKeeper server in a Java process.

Maven fetches the server once. If Java or Maven is missing, the test is skipped.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from support.kafka_jvm import fetch_jars, free_port

#: The unit of time of the servers. Session timeouts are multiples of it.
TICK_MS = 200
_START_S = 60.0


class ZooKeeper:
    """A server with its files in `directory`.

    `prefix` is a command that runs the server on another machine. `members` are the
    addresses of an ensemble, in which this server has the number `number`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        prefix: Sequence[str] = (),
        members: Sequence[str] = (),
        number: int = 0,
    ) -> None:
        folder = fetch_jars("zookeeper.xml", "zookeeper", "zookeeper")
        self._directory = directory
        self.host, self.port = address, port or free_port()
        data = directory / "data"
        data.mkdir(parents=True)
        lines = [
            f"dataDir={data}",
            f"clientPort={self.port}",
            f"clientPortAddress={address}",
            f"tickTime={TICK_MS}",
            "admin.enableServer=false",
            "maxClientCnxns=0",
            f"minSessionTimeout={2 * TICK_MS}",
            "maxSessionTimeout=60000",
        ]
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        if members:
            (data / "myid").write_text(str(number))
            lines += ["initLimit=50", "syncLimit=10"]
            lines += [
                f"server.{at}={member}:2888:3888"
                for at, member in enumerate(members, 1)
            ]
            main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        (directory / "zoo.cfg").write_text("\n".join(lines) + "\n")
        java = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-cp", f"{folder}/*", main]
        self._command = [*prefix, *java, str(directory / "zoo.cfg")]
        self.process: subprocess.Popen[bytes] | None = None
        self.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        if error is not None:
            print(f"-- ZooKeeper\n{self.output()[-3_000:]}")

    @property
    def server(self) -> str:
        return f"{self.host}:{self.port}"

    def mode(self) -> str:
        """Return "leader", "follower" or "standalone", or "" if the server does not run."""
        try:
            with socket.create_connection((self.host, self.port), 2) as sock:
                sock.sendall(b"srvr")
                response = b"".join(iter(lambda: sock.recv(4_096), b""))
        except OSError:
            return ""
        return response.decode().rpartition("Mode: ")[2].split("\n")[0]

    def output(self) -> str:
        return (self._directory / "out").read_text(errors="replace")

    def begin(self) -> None:
        """Start the process, with the data of its earlier run."""
        with (self._directory / "out").open("ab") as out:
            self.process = subprocess.Popen(self._command, stdout=out, stderr=out)

    def await_start(self) -> None:
        """Wait until the server accepts connections."""
        assert self.process is not None
        end_s = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection((self.host, self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, self.output()[-2_000:]
                assert time.monotonic() < end_s, self.output()[-2_000:]
                time.sleep(0.1)

    def start(self) -> None:
        self.begin()
        self.await_start()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
