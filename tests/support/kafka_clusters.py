"""Three brokers of Apache Kafka in KRaft mode, with the interface of Cluster."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from support import kafka_jvm
from support.clusters import FAST, LIMIT_S, Cluster, until

_CLUSTER_ID: Final = "ASNFZ4mrze9-3LqYdlQyEA"


class KafkaCluster(Cluster):
    """Brokers 1 to `count`. Each broker is also a controller."""

    def __init__(
        self,
        path: Path,
        count: int = 3,
        *,
        java_options: Sequence[str] = kafka_jvm.QUICK_START,
    ) -> None:
        self._java_options = java_options
        self._controllers = {
            number: f"127.0.0.1:{kafka_jvm.free_port()}"
            for number in range(1, count + 1)
        }
        super().__init__(
            path,
            count,
            ports={number: kafka_jvm.free_port() for number in self._controllers},
        )

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
            if error is not None:
                print(f"-- broker {number}\n{self.log(number)[-3_000:]}")

    def begin(self, number: int) -> None:
        folder = self.path / str(number)
        file = folder / "server.properties"
        java = ["java", *self._java_options, "-cp", f"{kafka_jvm.kafka_jars()}/*"]
        if not file.exists():
            folder.mkdir()
            settings = self._settings(number)
            file.write_text("".join(f"{name}={settings[name]}\n" for name in settings))
            subprocess.run(
                [
                    *java,
                    "kafka.tools.StorageTool",
                    "format",
                    "-t",
                    _CLUSTER_ID,
                    "-c",
                    str(file),
                ],
                check=True,
                capture_output=True,
                timeout=LIMIT_S,
            )
        with (self.path / f"{number}.log").open("a") as log:
            self.processes[number] = subprocess.Popen(
                [*java, "kafka.Kafka", str(file)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                text=True,
            )

    def await_start(self, number: int) -> None:
        def is_listening() -> bool:
            with socket.socket() as sock:
                return sock.connect_ex(("127.0.0.1", self.ports[number])) == 0

        until(is_listening, f"broker {number} listens")

    def _settings(self, number: int) -> dict[str, object]:
        address = f"127.0.0.1:{self.ports[number]}"
        controller = self._controllers[number]
        voters = ",".join(
            f"{voter}@{voter_address}"
            for voter, voter_address in self._controllers.items()
        )
        folder = self.path / str(number)
        return {
            "process.roles": "broker,controller",
            "node.id": number,
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://{address},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{address}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": folder / "data",
            "metadata.log.dir": folder / "meta",
            "min.insync.replicas": 2,
            "default.replication.factor": FAST["default_replication_factor"],
            "offsets.topic.replication.factor": 3,
            "offsets.topic.num.partitions": 1,
            "broker.session.timeout.ms": FAST["broker_session_timeout_ms"],
            "broker.heartbeat.interval.ms": 300,
            "replica.lag.time.max.ms": FAST["replica_lag_time_max_ms"],
            "replica.fetch.wait.max.ms": FAST["replica_fetch_wait_max_ms"],
            "group.initial.rebalance.delay.ms": 0,
        }
