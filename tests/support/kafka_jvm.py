"""Apache Kafka in a Java process of its own, for the tests that are marked interop.

kafka_jars() lets Maven fetch Kafka's jars once. Storage communicates with
tests/data/kafka/Storage.java, which uses Kafka's own log, loader and cleaner. If Java
or Maven is missing, the test is skipped, and the reason names the missing program.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

from support.vectors import DATA

SOURCES = DATA / "kafka"
#: Options of Java for a process that starts fast. Its throughput does not matter.
QUICK_START: Final = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def kafka_jars() -> Path:
    """Fetch Kafka in the version of pom.xml, and return the folder of jars."""
    return fetch_jars("pom.xml", "kafka", "kafka_2.13")


def tool_jars() -> Path:
    """Fetch Kafka's command-line tools, and return the folder of jars."""
    return fetch_jars("tools.xml", "tools", "kafka-tools")


def run_tool(program: str, *arguments: str) -> str:
    """Run one of Kafka's command-line tools, and return its output."""
    folders = f"{tool_jars()}/*:{kafka_jars()}/*"
    command = ["java", *QUICK_START, "-cp", folders, program, *arguments]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert not done.returncode, (done.stdout + done.stderr).decode()[-2_000:]
    return done.stdout.decode()


def framework_jars() -> Path:
    """Fetch Kafka Streams and Kafka Connect, and return the folder of jars."""
    return fetch_jars("streams.xml", "frameworks", "kafka-streams")


@contextlib.contextmanager
def run_streams(
    address: str, state: Path, name: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run tests/data/kafka/Streams.java. Its output is in the file {name}.txt."""
    program = str(SOURCES / "Streams.java")
    command = [
        "java",
        "-cp",
        f"{framework_jars()}/*",
        program,
        address,
        str(state),
        name,
    ]
    with (state.parent / f"{name}.txt").open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def client_jars(version: str) -> Path:
    """Fetch kafka-clients of one version, with its dependencies, and return the folder
    of jars.
    """
    return fetch_jars("clients.xml", "clients", "kafka-clients", version)


@functools.cache
def fetch_jars(pom: str, name: str, artifact: str, version: str = "") -> Path:
    """Fetch the jars that a pom of tests/data/kafka lists, with their dependencies, and
    return the folder of jars.

    The name of the folder ends with the version of `artifact`. `version` replaces
    VERSION in the pom.
    """
    for program, package in (("java", "default-jdk-headless"), ("mvn", "maven")):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install {package}")
    text = (SOURCES / pom).read_text().replace("VERSION", version)
    versions = re.findall(
        rf"<artifactId>{re.escape(artifact)}</artifactId>\s*<version>(.*)</version>",
        text,
    )
    folder = Path(__file__).parents[2] / "build" / f"{name}-{versions[0]}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=_create(folder.parent)) as scratch:
            (Path(scratch) / "pom.xml").write_text(text)
            fetched = Path(scratch) / "jars"
            goal = [
                "dependency:copy-dependencies",
                f"-DoutputDirectory={fetched}",
                "-DincludeScope=runtime",
            ]
            done = subprocess.run(
                ["mvn", "-q", "-B", "-f", f"{scratch}/pom.xml", *goal],
                capture_output=True, text=True, check=False, timeout=600,
            )  # fmt: skip
            if done.returncode:
                pytest.skip(
                    f"Maven could not fetch {artifact}: {(done.stdout + done.stderr)[-300:]}"
                )
            try:
                fetched.rename(folder)
            except OSError:  # another process of this run has fetched the jars too
                if not folder.is_dir():
                    raise
    return folder


def _create(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def measure_small_transactions(
    address: str, transactional_id: str, warm: int, count: int
) -> dict[str, float]:
    """Measure transactions of one record each by Kafka's Java producer. Return the
    requests per transaction, and p50 of the duration in microseconds.
    """
    program = str(SOURCES / "SmallTransactions.java")
    command = [
        "java",
        "-cp",
        f"{kafka_jars()}/*",
        program,
        address,
        transactional_id,
        str(warm),
        str(count),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        raise KafkaError("SmallTransactions", done.stdout + done.stderr)
    found: dict[str, float] = {}
    for line in done.stdout.splitlines():
        name, figure = line.split()
        found[name] = float(figure)
    return found


def run_dump_tool(path: Path, *options: str) -> str:
    """Run the dump tool in a process of its own, and return its output."""
    command = [
        "java",
        "-cp",
        f"{kafka_jars()}/*",
        "kafka.tools.DumpLogSegments",
        "--files",
        str(path),
        *options,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout + done.stderr


class KafkaError(Exception):
    """An exception of Kafka. `name` is the name of its class, without the package."""

    def __init__(self, name: str, trace: str) -> None:
        super().__init__(trace)
        self.name = name


class Storage:
    """Kafka's storage classes, which handle one request at a time. `options` are
    options of Java; the default is a quick start.
    """

    def __init__(self, *options: str) -> None:
        options = options or QUICK_START
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = ["java", *options, "-cp", f"{kafka_jars()}/*"]
        self.process = subprocess.Popen(
            [*command, str(SOURCES / "Storage.java")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: object,
        trace: TracebackType | None,
    ) -> None:
        process = self.process
        try:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        finally:
            if process.stdout is not None:
                process.stdout.close()
            self._errors.close()

    def ask(self, operation: str, **more: Any) -> dict[str, Any]:
        """Send a request, and return the response.

        Raises:
            KafkaError: Kafka raised an exception.
        """
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(
            json.dumps({"do": operation, **more}, default=os.fspath) + "\n"
        )
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            self._errors.seek(0)
            pytest.fail(f"Kafka's process ended: {self._errors.read()[-2000:]}")
        response: dict[str, Any] = json.loads(line)
        if "error" in response:
            raise KafkaError(response["error"], response["trace"])
        return response

    def dump(self, path: Path, *options: str) -> str:
        """Return the output of kafka-dump-log for a file."""
        return str(self.ask("dump", arguments=["--files", str(path), *options])["text"])


class Broker:
    """A broker of one node in KRaft mode, on loopback. Its partitions are in folder /
    "data".

    A second Broker on the same folder continues with the files of the first one.
    `options` are options of Java; the default is a quick start.
    """

    def __init__(
        self,
        folder: Path,
        options: Sequence[str] = QUICK_START,
        more: Mapping[str, object] | None = None,
    ) -> None:
        """`more` are further settings of the broker. In their values, {address} and
        {controller} are replaced with the addresses of the two listeners.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.data = folder / "data"
        self.address = f"127.0.0.1:{free_port()}"
        controller = f"127.0.0.1:{free_port()}"
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{controller}",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": self.data,
            "metadata.log.dir": folder / "meta",
            "log.cleaner.backoff.ms": 100,
            "log.cleaner.dedupe.buffer.size": 4 << 20,
            "log.flush.start.offset.checkpoint.interval.ms": 100,
            "log.initial.task.delay.ms": 100,
            "log.retention.check.interval.ms": 200,
            "group.initial.rebalance.delay.ms": 0,
        }
        for topic in ("offsets.topic", "transaction.state.log"):
            settings |= {f"{topic}.replication.factor": 1, f"{topic}.num.partitions": 1}
        settings["transaction.state.log.min.isr"] = 1
        for name, value in (more or {}).items():
            settings[name] = str(value).format(
                address=self.address, controller=controller
            )
        file = folder / "server.properties"
        is_formatted = file.exists()
        file.write_text(
            "".join(f"{name}={value}\n" for name, value in settings.items())
        )
        java = ["java", *options, "-cp", f"{kafka_jars()}/*"]
        if not is_formatted:
            format_storage = [
                "kafka.tools.StorageTool",
                "format",
                "-t",
                "ASNFZ4mrze9-3LqYdlQyEA",
                "-c",
                str(file),
            ]
            subprocess.run(
                [*java, *format_storage], check=True, capture_output=True, timeout=60
            )
        self._output = (folder / "output").open("a+")
        self.process = subprocess.Popen(
            [*java, "kafka.Kafka", str(file)],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        host, port = self.address.split(":")
        end_s = time.monotonic() + 60
        while True:
            with socket.socket() as sock:
                if sock.connect_ex((host, int(port))) == 0:
                    break
            if self.process.poll() is not None or time.monotonic() > end_s:
                self.kill()
                pytest.fail(f"the broker did not start: {self.output()[-2000:]}")
            time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: object,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.stop() if kind is None else self.kill()

    def stop(self) -> None:
        """Stop the broker cleanly."""
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.kill()
        assert self.process.returncode == 143, self.output()  # by SIGTERM

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()

    def output(self) -> str:
        return Path(self._output.name).read_text()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
