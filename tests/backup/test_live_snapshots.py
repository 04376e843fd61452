"""Snapshots of a directory beside a broker under load.

Each restored snapshot must have every record that was acknowledged before the snapshot
began, and each transaction in all of its partitions or in none.

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
#: Snapshots of one directory.
SHARE = 10
#: The partitions that each transaction writes.
PLACES = (("a", 0), ("a", 1), ("b", 0))
#: Segments that roll often.
SETTINGS = {"segment.bytes": "200000"}


@attrs.define
class Acknowledged:
    """Records that the clients know to be stored. Lists only grow."""

    plain: list[tuple[int, int, bytes]] = attrs.Factory(list)
    committed: list[int] = attrs.Factory(list)
    aborted: list[int] = attrs.Factory(list)

    def now(self) -> tuple[int, int]:
        return len(self.plain), len(self.committed)


class Load:
    """Clients that write until stop()."""

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
        """Stop writing for a check. A check takes longer than a snapshot, and the log
        would grow during all checks.
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
                for topic, partition in PLACES:
                    client.produce(topic, b"%d" % number, partition=partition)
                if number % 4 == 3:
                    client.flush(LIMIT_S)
                    client.abort_transaction(LIMIT_S)
                    self.known.aborted.append(number)
                else:
                    client.commit_transaction(LIMIT_S)
                    self.known.committed.append(number)
            except confluent_kafka.KafkaException as error:
                # On a busy machine a transaction takes longer than its timeout. The
                # broker then aborts it, and fences the producer.
                if error.args[0].code() != confluent_kafka.KafkaError._FENCED:
                    raise
                client = None


@contextmanager
def loaded_broker(path: Path) -> Iterator[Load]:
    """A broker in a process of its own, with clients that write."""
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


def check(path: Path, known: Acknowledged, before: tuple[int, int]) -> None:
    """Check a restored directory."""
    plain, committed = before
    assert [verdict for verdict in verify(path) if verdict.status == "damaged"] == []
    with logcore.open_dir(path, read_only=True) as logdir:
        # All of the newest records, and a sample of the others.
        newest = known.plain[max(0, plain - 20_000) : plain]
        others = known.plain[: plain : 1 + plain // 5_000]
        for partition, offset, value in newest + others:
            assert logdir.partition("plain", partition).get(offset).value == value
    # The broker completes decided transactions, and aborts open ones after a second.
    with netshim.serve(path), logcore.open_dir(path, read_only=True) as logdir:
        logs = [logdir.partition(*place) for place in PLACES]

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
    assert found[0] == found[1] == found[2], "a transaction is torn"
    assert set(found[0].values()) <= {1}
    assert set(known.committed[:committed]) <= set(found[0])
    assert not set(known.aborted) & set(found[0])


def snapshot(path: Path, backup: Path) -> str:
    """Take a snapshot as a user does; its id."""
    command = [sys.executable, "-m", "logcore", "snapshot", str(path), str(backup)]
    done = subprocess.run(
        [*command, "--keep", "3"], check=True, stdout=subprocess.PIPE, text=True
    )
    taken: str = json.loads(done.stdout)["id"]
    return taken


@pytest.mark.long
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_snapshots_beside_a_loaded_broker_are_complete(
    tmp_path: Path, count: int
) -> None:
    """Each ten snapshots are of a new directory, because a check reads all of it."""
    for first in range(0, count, SHARE):
        place = tmp_path / f"{first}"
        place.mkdir()
        restore_each(place, min(SHARE, count - first))
        shutil.rmtree(place)
        print(f"{min(first + SHARE, count)} snapshots were restored", flush=True)


def restore_each(place: Path, count: int) -> None:
    """Take snapshots of a directory beside a broker, and check each of them."""
    data, backup, copy = (place / name for name in ("data", "backup", "copy"))
    with loaded_broker(data) as load:
        until(lambda: min(load.known.now()) > 20, "no record is acknowledged")
        for _ in range(count):
            before = load.known.now()
            taken = snapshot(data, backup)
            with load.paused():
                logcore.restore(backup, copy, at=taken)
                check(copy, load.known, before)
                shutil.rmtree(copy)
                shutil.rmtree(place / "copy.registry", ignore_errors=True)
            # More records and transactions before the next one.
            time.sleep(0.05)
    assert len(logcore.snapshots(backup)) == min(count, 3)
