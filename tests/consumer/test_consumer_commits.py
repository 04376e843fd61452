"""Commits of consumers: their order, pending commits, callbacks, interceptors, and
which commits are accepted.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.consumer import (
    Consumer,
    ConsumerRecords,
    OffsetAndMetadata,
    RebalanceListener,
    TopicPartition,
)
from logcore.consumer.commits import _MAX_QUEUED
from logcore.coordination.group_requests import Committer
from logcore.coordinators.shared_groups import SharedGroups
from logcore.coordinators.stored_offsets import OFFSETS_CONFIG
from logcore.errors import (
    CommitFailedError,
    ConsumerStateError,
    InvalidConfigError,
    RegistryLockedError,
)
from logcore.format.group_records import Committed, partition_of
from logcore.logdir import LogDir
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.testing import SimulatedDisk

ONE = TopicPartition("t", 0)
TWO = TopicPartition("t", 1)
SETTINGS: dict[str, Any] = {
    "group_id": "g",
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
}


class CommitCallback:
    """A callback that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str | None, dict[int, int]]] = []

    def __call__(
        self,
        error: Exception | None,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> None:
        name = None if error is None else type(error).__name__
        self.calls.append(
            (
                name,
                {
                    partition.partition: offset.offset
                    for partition, offset in offsets.items()
                },
            )
        )


@pytest.fixture(params=["alone", "shared"])
def data(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LogDir]:
    with logcore.open_dir(
        tmp_path / "data", create=True, shared=request.param == "shared"
    ) as directory:
        directory.create_topic("t", 2)
        for number in range(10):
            directory.append("t", b"%d" % number, partition=0)
        yield directory


def join_group(data: LogDir, **given: Any) -> Consumer:
    consumer = data.consumer(**{**SETTINGS, **given})
    consumer.subscribe(["t"])
    while not consumer.assignment():
        consumer.poll(0.001, 1)
    return consumer


def stored(data: LogDir) -> int | None:
    return data.committed_offsets("t", 0).get("g")


def test_pending_commits_are_stored_together_in_order(data: LogDir) -> None:
    callback = CommitCallback()
    with join_group(data) as consumer:
        consumer.commit({ONE: 0})
        log = data.partition(OFFSETS_TOPIC, 0)
        before = log.statistics().syncs
        for offset in (1, 4, 2):
            consumer.commit_async({ONE: offset}, callback)
        consumer.commit_async({TWO: 0})
        assert (callback.calls, stored(data)) == ([], 0), (
            "callbacks run only inside methods of the consumer"
        )
        consumer.poll()
        assert callback.calls == [(None, {0: 1}), (None, {0: 4}), (None, {0: 2})]
        assert stored(data) == 2, "the offset of the last call is stored"
        assert log.statistics().syncs == before + 1


def test_commit_is_stored_after_pending_ones(data: LogDir) -> None:
    callback = CommitCallback()
    with join_group(data) as consumer:
        consumer.commit_async({ONE: 7}, callback)
        consumer.commit({ONE: 3})
        assert (callback.calls, stored(data)) == ([(None, {0: 7})], 3)


def test_auto_commit_is_stored_after_pending_commits(data: LogDir) -> None:
    callback = CommitCallback()
    with join_group(
        data, enable_auto_commit=True, auto_commit_interval_ms=1
    ) as consumer:
        consumer.seek(ONE, 0)
        assert consumer.poll(max_records=5).count == 5
        consumer.commit_async({ONE: 2}, callback)
    assert (callback.calls, stored(data)) == ([(None, {0: 2})], 5)


def test_full_queue_of_pending_commits_is_stored_at_once(data: LogDir) -> None:
    callback = CommitCallback()
    with join_group(data) as consumer:
        for offset in range(_MAX_QUEUED):
            assert not callback.calls
            consumer.commit_async({ONE: offset}, callback)
        assert len(callback.calls) == _MAX_QUEUED
        assert stored(data) == _MAX_QUEUED - 1


@pytest.mark.parametrize("end", ["close", "unsubscribe", "error", "assign"])
def test_pending_commits_are_stored_at_the_end(data: LogDir, end: str) -> None:
    callback = CommitCallback()
    with contextlib.suppress(ZeroDivisionError), join_group(data) as consumer:
        if end == "assign":
            consumer.unsubscribe()
            consumer.assign([ONE])
        consumer.commit_async({ONE: 6}, callback)
        if end == "error":
            raise ZeroDivisionError
        if end == "assign":
            consumer.assign([TWO])
        elif end == "unsubscribe":
            consumer.unsubscribe()
        else:
            consumer.close()
    assert (callback.calls, stored(data)) == ([(None, {0: 6})], 6)


def test_async_commit_stores_the_positions_of_the_call(data: LogDir) -> None:
    with join_group(data) as consumer:
        consumer.seek(ONE, 0)
        assert consumer.poll(max_records=5).count == 5
        consumer.commit_async()
        assert consumer.poll(max_records=5).count == 5
        assert stored(data) == 5


def test_callback_may_commit_and_its_exception_is_only_reported(
    data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    callback = CommitCallback()
    with join_group(data) as consumer:

        def commit_and_fail(error: Exception | None, offsets: object) -> None:
            consumer.commit({ONE: 8})
            raise ZeroDivisionError

        consumer.commit_async({ONE: 5}, commit_and_fail)
        consumer.commit_async({ONE: 6}, callback)
        consumer.poll()
        assert stored(data) == 8
        assert callback.calls == [(None, {0: 6})]
        assert len(reported) == 1


def test_commit_of_a_listener_belongs_to_the_ending_generation(data: LogDir) -> None:
    """If the commit were stored with the next call, it would belong to the next
    generation, in which another member may have committed a larger offset.
    """

    class CommittingListener(RebalanceListener):
        def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
            first.commit_async(dict.fromkeys(partitions, 9), record)

    def record(
        error: Exception | None, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> None:
        callback(error, offsets)
        assignments.append(first.assignment())

    assignments: list[frozenset[TopicPartition]] = []
    callback = CommitCallback()
    first = data.consumer(**SETTINGS, assignors=["range"])
    first.subscribe(["t"], listener=CommittingListener())
    while not first.assignment():
        first.poll(0.001, 1)
    other = data.consumer(**SETTINGS, assignors=["range"])
    other.subscribe(["t"])
    while not callback.calls:
        other.poll(0.001, 1)
        first.poll(0.001, 1)
    assert callback.calls[0] == (None, {0: 9, 1: 9})
    assert assignments[0] == {ONE, TWO}, (
        "the partitions are revoked only after the commit is stored"
    )
    first.close()
    other.close()


def test_removed_member_commits_nothing_after_the_group_is_empty() -> None:
    """A commit without a member id is accepted by an empty group. A removed member has
    no member id.
    """

    class LateCommittingListener(RebalanceListener):
        def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
            for commit in (slow.commit, slow.commit_async):
                try:
                    commit({ONE: 1})
                except CommitFailedError:
                    refused.append(commit)

    refused: list[object] = []
    disk = SimulatedDisk()
    with logcore.open_dir("/data", create=True, fs=disk) as data:
        data.create_topic("t", 2)
        slow = data.consumer(**SETTINGS, max_poll_interval_ms=1_000)
        slow.subscribe(["t"], listener=LateCommittingListener())
        while not slow.assignment():
            slow.poll()
        disk.advance(2_000)
        other = data.consumer(**SETTINGS)
        other.subscribe(["t"])
        while not other.assignment():
            other.poll()
        other.commit({ONE: 5})
        other.close()
        slow.poll()
        assert refused == [slow.commit]
        slow.poll()
        assert stored(data) == 5
        slow.close()


def test_refused_commit_is_reported_to_every_callback(
    data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = CommitCallback()
    with join_group(data) as consumer:
        assert consumer._membership.member is not None
        monkeypatch.setattr(consumer._membership.member, "generation", 99)
        consumer.commit_async({ONE: 1}, callback)
        consumer.commit_async({TWO: 1}, callback)
        with pytest.raises(CommitFailedError):
            consumer.commit({ONE: 2})
        assert callback.calls == [
            ("CommitFailedError", {0: 1}),
            ("CommitFailedError", {1: 1}),
        ]
        assert stored(data) is None


def test_refused_commit_without_a_callback_is_logged(
    data: LogDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with join_group(data) as consumer:
        assert consumer._membership.member is not None
        monkeypatch.setattr(consumer._membership.member, "generation", 99)
        consumer.commit_async({ONE: 1})
        consumer.poll()
        assert "processed up to offset 1, which is not committed" in caplog.text


def test_member_commits_only_for_subscribed_topics(data: LogDir) -> None:
    data.create_topic("u")
    with join_group(data) as consumer:
        for commit in (consumer.commit, consumer.commit_async):
            with pytest.raises(
                CommitFailedError, match=r"subscribes to.*some of t, found u"
            ):
                commit({("u", 0): 1})
            with pytest.raises(InvalidConfigError):
                commit({ONE: -1})
        for timeout in (-1, float("nan"), float("inf")):
            with pytest.raises(InvalidConfigError, match=r"timeout.*seconds"):
                consumer.commit({ONE: 1}, timeout)
        consumer.unsubscribe()
        consumer.commit({("u", 0): 1})
    with (
        data.consumer() as consumer,
        pytest.raises(ConsumerStateError, match="no group"),
    ):
        consumer.commit_async({ONE: 1})


def test_commit_is_retried_until_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds the lock of the group during two attempts, and later
    permanently.
    """
    tries: list[int] = []
    commit = SharedGroups.commit

    def locked(self: SharedGroups, *given: Any) -> Any:
        tries.append(1)
        if len(tries) in (1, 2) or len(tries) > 3:
            disk.advance(400)
            raise RegistryLockedError("another process changes the group")
        return commit(self, *given)

    disk = SimulatedDisk({"data": None})
    with logcore.open_dir("data", create=True, shared=True, fs=disk) as data:
        data.create_topic("t", 2)
        consumer = join_group(data)
        monkeypatch.setattr(SharedGroups, "commit", locked)
        consumer.commit({ONE: 1}, timeout=1)
        assert len(tries) == 3
        assert stored(data) == 1
        with pytest.raises(RegistryLockedError):
            consumer.commit({ONE: 2}, timeout=1)
        assert len(tries) == 6
        with pytest.raises(RegistryLockedError):
            consumer.commit({ONE: 2})
        assert len(tries) == 7, "one attempt without a timeout"
        monkeypatch.undo()
        consumer.close(timeout=1)


class MarkingInterceptor:
    """Marks each value, drops every second record, and records commits."""

    def __init__(self) -> None:
        self.committed: list[dict[int, int]] = []

    def on_consume(self, records: ConsumerRecords) -> ConsumerRecords:
        remaining = {
            record: [
                topic_record._replace(value=bytes(topic_record.value or b"") + b"!")
                for topic_record in records[record]
                if topic_record.offset % 2
            ]
            for record in records
        }
        return ConsumerRecords(
            {partition: rows for partition, rows in remaining.items() if rows}
        )

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        self.committed.append(
            {
                partition.partition: offset.offset
                for partition, offset in offsets.items()
            }
        )


class FailingInterceptor:
    def on_consume(self, records: ConsumerRecords) -> ConsumerRecords:
        raise ZeroDivisionError

    def on_commit(self, offsets: object) -> None:
        raise ZeroDivisionError


def test_interceptors_get_returned_records_and_commits(
    data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    marking = MarkingInterceptor()
    with join_group(
        data, interceptors=[marking, FailingInterceptor()], consumer_timeout_ms=0
    ) as consumer:
        consumer.seek(ONE, 0)
        assert [
            record.value for record in consumer.poll(max_records=4).records(ONE)
        ] == [b"1!", b"3!"]
        assert consumer.position(ONE) == 4, "the commit includes the dropped records"
        assert [record.value for record in consumer] == [b"5!", b"7!", b"9!"]
        reported.clear()
        consumer.commit()
        assert (marking.committed, len(reported)) == ([{0: 10, 1: 0}], 1)


def test_iteration_continues_after_an_interceptor_raised(data: LogDir) -> None:
    """No record that was read ahead is skipped."""
    consumed: list[int] = []
    interrupts = False

    class Interrupting:
        def on_consume(self, records: ConsumerRecords) -> ConsumerRecords:
            for record in records.records() if interrupts else ():
                consumed.append(record.offset)
                if consumed.count(record.offset) == 1 and record.offset in (0, 3, 4, 9):
                    raise KeyboardInterrupt
            return records

        def on_commit(self, offsets: object) -> None:
            pass

    with join_group(
        data, interceptors=[Interrupting()], consumer_timeout_ms=0
    ) as consumer:
        consumer.seek(ONE, 0)
        returned: list[int] = []
        interrupts = True
        records = iter(consumer)
        while True:
            try:
                returned.append(next(records).offset)
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
    assert returned == list(range(10))


def test_records_of_one_partition_are_selectable(data: LogDir) -> None:
    with join_group(data) as consumer:
        consumer.seek(ONE, 0)
        polled = consumer.poll(max_records=2)
        assert polled.partitions() == [ONE]
        assert [record.offset for record in polled.records(("t", 0))] == [0, 1]
        assert list(polled.records(TWO)) == []


def test_concurrent_commits_of_threads_share_batches(tmp_path: Path) -> None:
    """Commits share a batch if they are for the same partition and producer, up to the
    maximum batch size of a producer.
    """
    large = "m" * 4_000
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic("t")
        data.create_topic(OFFSETS_TOPIC, 2, OFFSETS_CONFIG)
        data.consumer(group_id="g").close()
        groups: Any = data.host.coordinators._groups
        commits: list[tuple[str, int, str, tuple[int, int] | None]] = [
            *((f"g{2 * number}", 0, "", None) for number in range(5)),
            *((f"g{2 * number + 1}", 0, "", None) for number in range(5)),
            ("g0", 1, "", (7, 0)),
            ("g2", 2, "", None),
            *((f"g{2 * number}", 3, large, None) for number in range(5)),
        ]
        threads = []
        with groups._lock:
            for group_id, offset, metadata, producer in commits:
                committed = {("t", 0): Committed(offset, -1, metadata, 1_000)}
                arguments = (Committer(group_id, -1, "", None), committed, producer)
                threads.append(threading.Thread(target=groups.commit, args=arguments))
                threads[-1].start()
                while len(groups._steps._requests) < len(threads):
                    time.sleep(0.0005)
        for thread in threads:
            thread.join()
        first, second = (
            data.partition(OFFSETS_TOPIC, number)
            for number in (partition_of("g0", 2), partition_of("g1", 2))
        )
        batch_facts = [
            (batch.record_count, batch.is_transactional) for batch in first.batches(0)
        ]
        assert batch_facts == [(5, False), (1, True), (5, False), (1, False)], (
            "four of 4 KB and a small one are 16 KiB"
        )
        assert [batch.record_count for batch in second.batches(0)] == [5]
        assert [
            groups.committed(f"g{number}")["t", 0].offset for number in (0, 1, 2, 3)
        ] == [3, 0, 3, 0]
    with logcore.open_dir(tmp_path / "data", read_only=True) as data:
        assert data.committed_offsets("t", 0) == {
            f"g{number}": 3 * (number % 2 == 0) for number in range(10)
        }


@pytest.mark.parametrize("name", ["max.message.bytes", "segment.bytes"])
def test_shared_batch_respects_the_size_limits_of_the_topic(
    tmp_path: Path, name: str
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic("t")
        data.create_topic(OFFSETS_TOPIC, 1, {**OFFSETS_CONFIG, name: 600})
        data.consumer(group_id="g").close()
        groups: Any = data.host.coordinators._groups
        results = commit_concurrently(
            groups, [(f"g{number}", number) for number in range(20)]
        )
        assert results == dict.fromkeys(range(20))
        assert 1 < len(list(data.partition(OFFSETS_TOPIC, 0).batches(0))) < 20
        assert [
            groups.committed(f"g{number}")["t", 0].offset for number in range(20)
        ] == list(range(20))


def test_commits_with_unknown_result_raise_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread stores three commits, and is interrupted in the callback that runs once
    the first commit is durable.
    """
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic("t")
        data.consumer(group_id="g").close()
        groups: Any = data.host.coordinators._groups
        stored = groups._coordinator.stored
        calls = []

        def interrupt(*given: Any) -> Any:
            calls.append(given)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return stored(*given)

        monkeypatch.setattr(groups._coordinator, "stored", interrupt)
        results = commit_concurrently(groups, [("a", 1), ("b", 2), ("c", 3)])
        assert isinstance(results[1], KeyboardInterrupt)
        assert isinstance(results[2], logcore.DurabilityUnknownError)
        assert isinstance(results[3], logcore.DurabilityUnknownError)


def commit_concurrently(
    groups: Any, commits: list[tuple[str, int]]
) -> dict[int, object]:
    """Queue all commits in threads before the first is executed. Return the result of
    each by its offset.
    """
    results: dict[int, object] = {}

    def commit(group_id: str, offset: int) -> None:
        committed = {("t", 0): Committed(offset, -1, "m" * 20, 1_000)}
        try:
            results[offset] = groups.commit(
                Committer(group_id, -1, "", None), committed
            )
        except BaseException as error:
            results[offset] = error

    threads = []
    with groups._lock:
        for arguments in commits:
            threads.append(threading.Thread(target=commit, args=arguments))
            threads[-1].start()
            while len(groups._steps._requests) < len(threads):
                time.sleep(0.0005)
    for thread in threads:
        thread.join()
    return results
