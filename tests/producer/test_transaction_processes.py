"""Transactions of several threads, and of real processes that share a directory and are
killed at any time.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import logcore
from logcore import LogDir
from logcore.errors import LogcoreError

_CONTEXT = multiprocessing.get_context("fork")
PARTITIONS = 4
RECORDS = 300
SECONDS = 300


def committed(data: LogDir, topic: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    for number in data.partitions(topic):
        log = data.partition(topic, number)
        log.refresh()
        found.update(
            bytes(record.value or b"")
            for record in log.read(log.log_start_offset, isolation="read_committed")
        )
    return found


def test_threads_with_different_ids_do_not_affect_one_another(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as data:
        data.create_topic("out", PARTITIONS)
        kept: list[bytes] = []
        failures: list[BaseException] = []

        def work(number: int) -> None:
            rng = random.Random(number)
            try:
                with data.producer(
                    transactional_id=f"id-{number}", linger_ms=0
                ) as producer:
                    producer.init_transactions()
                    for turn in range(15):
                        values = [
                            b"%d:%d:%d" % (number, turn, place)
                            for place in range(rng.randrange(1, 6))
                        ]
                        producer.begin_transaction()
                        for value in values:
                            producer.send(
                                "out", value, partition=rng.randrange(PARTITIONS)
                            )
                        if rng.random() < 0.3:
                            producer.abort_transaction()
                        else:
                            producer.commit_transaction()
                            kept.extend(values)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not failures
        assert committed(data, "out") == Counter(kept)


def _thread_state(path: Path, number: int) -> None:
    """Copy each record of topic "in" to topic "out", until the process is killed."""
    settings = {
        "group_id": "g",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
    }
    with logcore.open_dir(path, shared=True) as data:
        while True:
            try:
                with (
                    data.consumer(
                        **settings,
                        isolation_level="read_committed",
                        max_poll_records=10,
                    ) as consumer,  # type: ignore[arg-type]
                    data.producer(
                        transactional_id=f"id-{number}",
                        linger_ms=0,
                        transaction_timeout_ms=1_000,
                    ) as producer,
                ):
                    consumer.subscribe(["in"])
                    producer.init_transactions()
                    while True:
                        found = consumer.poll(0.1)
                        data.tick()
                        if not found:
                            continue
                        with producer.transaction():
                            for record in found.records():
                                producer.send(
                                    "out", record.value, partition=record.partition
                                )
                            offsets = {
                                partition: records[-1].offset + 1
                                for partition, records in found.items()
                            }
                            producer.send_offsets_to_transaction(
                                dict(offsets), consumer.group_metadata()
                            )
            except LogcoreError:
                # The group was rebalanced, or the transaction timed out. Begin again.
                continue


@pytest.mark.long
def test_kills_neither_lose_nor_repeat_a_record(tmp_path: Path) -> None:
    """The exactly-once row of docs/producer.md, with SIGKILL."""
    path = tmp_path / "data"
    rng = random.Random(7)
    sent = Counter(b"%d" % number for number in range(RECORDS))
    with logcore.open_dir(path, create=True, shared=True) as data:
        data.create_topic("in", PARTITIONS)
        data.create_topic("out", PARTITIONS)
        for number, value in enumerate(sorted(sent)):
            data.append("in", value, partition=number % PARTITIONS)
        workers = [
            _CONTEXT.Process(target=_thread_state, args=(path, number), daemon=True)
            for number in range(2)
        ]
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + SECONDS
        kills = 0
        try:
            while sum(committed(data, "out").values()) < RECORDS:
                assert time.monotonic() < deadline, (
                    f"{sum(committed(data, 'out').values())} of {RECORDS}"
                )
                data.tick()
                time.sleep(0.02)
                if kills < 6 and rng.random() < 0.3:
                    kills += 1
                    number = rng.randrange(2)
                    victim = workers[number]
                    assert victim.pid is not None
                    os.kill(victim.pid, signal.SIGKILL)
                    victim.join()
                    workers[number] = _CONTEXT.Process(
                        target=_thread_state, args=(path, number), daemon=True
                    )
                    workers[number].start()
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        assert committed(data, "out") == sent
