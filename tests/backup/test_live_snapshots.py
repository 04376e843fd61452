"""Snapshots of a directory while clients write it through a broker.

Each restored snapshot must have every record that was acknowledged before the snapshot
began. Each transaction must be in all of its partitions or in none.

`make check` restores 3 snapshots, `make slow` 100. LOGCORE_SNAPSHOTS=n restores n.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

import logcore
import netshim
from logcore.inspect.verify import verify
from support.confluent import LIMIT_S, confluent_kafka, until

FEW = int(os.environ.get("LOGCORE_SNAPSHOTS", "3"))
MANY = int(os.environ.get("LOGCORE_SNAPSHOTS", "100"))
#: The number of snapshots of one directory. A check reads the whole directory, so a new
#: directory keeps the checks short.
SNAPSHOTS_PER_DIRECTORY = 10
#: The partitions that each transaction writes.
PARTITIONS = (("a", 0), ("a", 1), ("b", 0))
#: Small segments, so that the log rolls often.
SETTINGS = {"segment.bytes": "200000"}


@attrs.define
class Acknowledged:
    """Records and transactions that the broker acknowledged to the clients.

    The lists only grow, so their lengths identify a moment.
    """

    plain: list[tuple[int, int, bytes]] = attrs.Factory(list)
    committed: list[int] = attrs.Factory(list)
    aborted: list[int] = attrs.Factory(list)

    def counts(self) -> tuple[int, int]:
        return len(self.plain), len(self.committed)


class Load:
    """Runs clients that write until stop()."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self.known = Acknowledged()
        self._is_stopping = threading.Event()
        self._numbers = itertools.count()
        self._failures: list[BaseException] = []
        self._is_writing = threading.Event()
        self._is_writing.set()
        self._threads = [
            threading.Thread(target=self._run, args=(work, *more))
            for work, *more in (
                (self._plain,),
                (self._transactions, "t1"),
                (self._transactions, "t2"),
            )
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self._failures.append(error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop writing during a check, which takes longer than a snapshot.

        Otherwise the log would become too long to be checked.
        """
        self._is_writing.clear()
        try:
            yield
        finally:
            self._is_writing.set()

    def stop(self) -> None:
        self._is_stopping.set()
        for thread in self._threads:
            thread.join()
        assert self._failures == []

    def _client(self, **settings: Any) -> Any:
        return confluent_kafka.Producer(
            {"bootstrap.servers": self.servers, "linger.ms": 1, **settings}
        )

    def _plain(self) -> None:
        client = self._client(acks="1")

        def delivered(error: Any, message: Any) -> None:
            assert error is None, error
            self.known.plain.append(
                (message.partition(), message.offset(), message.value())
            )

        for number in itertools.count():
            self._is_writing.wait()
            if self._is_stopping.is_set():
                break
            client.produce("plain", b"%d" % number * 20, on_delivery=delivered)
            client.poll(0)
            if number % 100 == 0:
                client.flush(LIMIT_S)
        client.flush(LIMIT_S)

    def _transactions(self, name: str) -> None:
        client = None
        while not self._is_stopping.is_set():
            self._is_writing.wait()
            number = next(self._numbers)
            try:
                if client is None:
                    client = self._client(
                        **{"transactional.id": name, "transaction.timeout.ms": 1000}
                    )
                    client.init_transactions(LIMIT_S)
                client.begin_transaction()
                for topic, partition in PARTITIONS:
                    client.produce(topic, b"%d" % number, partition=partition)
                if number % 4 == 3:
                    client.flush(LIMIT_S)
                    client.abort_transaction(LIMIT_S)
                    self.known.aborted.append(number)
                else:
                    client.commit_transaction(LIMIT_S)
                    self.known.committed.append(number)
            except confluent_kafka.KafkaException as error:
                # If a transaction takes longer than its timeout, as on a busy machine, the
                # broker aborts the transaction and fences the producer.
                if error.args[0].code() != confluent_kafka.KafkaError._FENCED:
                    raise
                client = None


@contextmanager
def loaded_broker(path: Path) -> Iterator[Load]:
    """Run a broker in another process, with clients that write."""
    with logcore.open_dir(path, create=True) as logdir:
        logdir.create_topic("plain", partitions=2, config=SETTINGS)
        logdir.create_topic("a", partitions=2, config=SETTINGS)
        logdir.create_topic("b", config=SETTINGS)
    command = [sys.executable, "-m", "netshim", "serve", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().split(":")[-1].strip()
            load = Load(f"127.0.0.1:{port}")
            try:
                yield load
            finally:
                load.stop()
        finally:
            process.terminate()


def check_copy(path: Path, known: Acknowledged, counts: tuple[int, int]) -> None:
    """Check a restored directory. `counts` were taken before the snapshot began."""
    plain, committed = counts
    assert [verdict for verdict in verify(path) if verdict.status == "damaged"] == []
    with logcore.open_dir(path, read_only=True) as logdir:
        # Check each of the newest records, and a sample of the older records.
        newest = known.plain[max(0, plain - 20_000) : plain]
        others = known.plain[: plain : 1 + plain // 5_000]
        for number, offset, value in newest + others:
            assert logdir.partition("plain", number).get(offset).value == value
    # The broker completes decided transactions, and aborts open transactions after their
    # timeout of a second.
    with netshim.serve(path), logcore.open_dir(path, read_only=True) as logdir:
        logs = [logdir.partition(*partition) for partition in PARTITIONS]

        def is_decided() -> bool:
            for log in logs:
                log.refresh()
            return all(log.last_stable_offset == log.high_watermark for log in logs)

        until(is_decided, "transactions are still open")
        found = [
            Counter(
                int(record.value or b"")
                for record in log.read(0, isolation="read_committed")
            )
            for log in logs
        ]
    assert found[0] == found[1] == found[2], "a transaction is incomplete"
    assert set(found[0].values()) <= {1}
    assert set(known.committed[:committed]) <= set(found[0])
    assert not set(known.aborted) & set(found[0])


def snapshot(path: Path, backup: Path) -> str:
    """Take a snapshot with the command line, and return its id."""
    command = [sys.executable, "-m", "logcore", "snapshot", str(path), str(backup)]
    done = subprocess.run(
        [*command, "--keep", "3"], check=True, stdout=subprocess.PIPE, text=True
    )
    snapshot_id: str = json.loads(done.stdout)["id"]
    return snapshot_id


@pytest.mark.long
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_snapshots_during_writes_are_complete(tmp_path: Path, count: int) -> None:
    for first in range(0, count, SNAPSHOTS_PER_DIRECTORY):
        parent = tmp_path / f"{first}"
        parent.mkdir()
        check_snapshots(parent, min(SNAPSHOTS_PER_DIRECTORY, count - first))
        shutil.rmtree(parent)
        restored = min(first + SNAPSHOTS_PER_DIRECTORY, count)
        print(f"{restored} snapshots were restored", flush=True)


def check_snapshots(parent: Path, count: int) -> None:
    """Take snapshots while clients write, and check each restored snapshot."""
    data, backup, copy = (parent / name for name in ("data", "backup", "copy"))
    with loaded_broker(data) as load:
        until(lambda: min(load.known.counts()) > 20, "no record is acknowledged")
        for _ in range(count):
            counts = load.known.counts()
            snapshot_id = snapshot(data, backup)
            with load.paused():
                logcore.restore(backup, copy, at=snapshot_id)
                check_copy(copy, load.known, counts)
                shutil.rmtree(copy)
                shutil.rmtree(parent / "copy.registry", ignore_errors=True)
            # The clients write more records and transactions before the next snapshot.
            time.sleep(0.05)
    assert len(logcore.snapshots(backup)) == min(count, 3)
