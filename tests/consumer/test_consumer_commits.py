"""Commits of consumers: their order, those that wait, callbacks, interceptors, who may
commit what.
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
from logcore.consumer.commits import _MOST_WAITING
from logcore.coordination.effects import Committer
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


class Heard:
    """A callback that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str | None, dict[int, int]]] = []

    def __call__(
        self,
        error: Exception | None,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> None:
        name = None if error is None else type(error).__name__
        self.told.append(
            (name, {one.partition: each.offset for one, each in offsets.items()})
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


def joined(data: LogDir, **given: Any) -> Consumer:
    consumer = data.consumer(**{**SETTINGS, **given})
    consumer.subscribe(["t"])
    while not consumer.assignment():
        consumer.poll(1, 1)
    return consumer


def stored(data: LogDir) -> int | None:
    return data.committed_offsets("t", 0).get("g")


def test_commits_that_wait_are_stored_together_and_in_order(data: LogDir) -> None:
    heard = Heard()
    with joined(data) as consumer:
        consumer.commit({ONE: 0})
        log = data.partition(OFFSETS_TOPIC, 0)
        before = log.statistics().syncs
        for offset in (1, 4, 2):
            consumer.commit_async({ONE: offset}, heard)
        consumer.commit_async({TWO: 0})
        assert (heard.told, stored(data)) == ([], 0), (
            "nothing is called outside the consumer's methods"
        )
        consumer.poll()
        assert heard.told == [(None, {0: 1}), (None, {0: 4}), (None, {0: 2})]
        assert stored(data) == 2, "the last call counts"
        assert log.statistics().syncs == before + 1


def test_a_commit_comes_behind_those_that_wait(data: LogDir) -> None:
    heard = Heard()
    with joined(data) as consumer:
        consumer.commit_async({ONE: 7}, heard)
        consumer.commit({ONE: 3})
        assert (heard.told, stored(data)) == ([(None, {0: 7})], 3)


def test_auto_commit_comes_behind_those_that_wait(data: LogDir) -> None:
    heard = Heard()
    with joined(data, enable_auto_commit=True, auto_commit_interval_ms=1) as consumer:
        consumer.seek(ONE, 0)
        assert consumer.poll(max_records=5).count == 5
        consumer.commit_async({ONE: 2}, heard)
    assert (heard.told, stored(data)) == ([(None, {0: 2})], 5)


def test_many_that_wait_are_not_left_waiting(data: LogDir) -> None:
    heard = Heard()
    with joined(data) as consumer:
        for offset in range(_MOST_WAITING):
            assert not heard.told
            consumer.commit_async({ONE: offset}, heard)
        assert len(heard.told) == _MOST_WAITING
        assert stored(data) == _MOST_WAITING - 1


@pytest.mark.parametrize("end", ["close", "unsubscribe", "error", "assign"])
def test_what_waits_is_stored_at_the_end(data: LogDir, end: str) -> None:
    heard = Heard()
    with contextlib.suppress(ZeroDivisionError), joined(data) as consumer:
        if end == "assign":
            consumer.unsubscribe()
            consumer.assign([ONE])
        consumer.commit_async({ONE: 6}, heard)
        if end == "error":
            raise ZeroDivisionError
        if end == "assign":
            consumer.assign([TWO])
        elif end == "unsubscribe":
            consumer.unsubscribe()
        else:
            consumer.close()
    assert (heard.told, stored(data)) == ([(None, {0: 6})], 6)


def test_the_positions_are_those_of_the_call(data: LogDir) -> None:
    with joined(data) as consumer:
        consumer.seek(ONE, 0)
        assert consumer.poll(max_records=5).count == 5
        consumer.commit_async()
        assert consumer.poll(max_records=5).count == 5
        assert stored(data) == 5


def test_a_callback_may_commit_and_what_it_raises_disturbs_nothing(
    data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    heard = Heard()
    with joined(data) as consumer:

        def go_on(error: Exception | None, offsets: object) -> None:
            consumer.commit({ONE: 8})
            raise ZeroDivisionError

        consumer.commit_async({ONE: 5}, go_on)
        consumer.commit_async({ONE: 6}, heard)
        consumer.poll()
        assert stored(data) == 8
        assert heard.told == [(None, {0: 6})]
        assert len(reported) == 1


def test_a_commit_of_a_listener_is_of_the_generation_that_ends(data: LogDir) -> None:
    """Stored with the next call it would be one of the next generation, when another
    may have committed more.
    """

    class Late(RebalanceListener):
        def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
            first.commit_async(dict.fromkeys(partitions, 9), hear)

    def hear(
        error: Exception | None, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> None:
        heard(error, offsets)
        has.append(first.assignment())

    has: list[frozenset[TopicPartition]] = []
    heard = Heard()
    first = data.consumer(**SETTINGS, assignors=["range"])
    first.subscribe(["t"], listener=Late())
    while not first.assignment():
        first.poll(1, 1)
    other = data.consumer(**SETTINGS, assignors=["range"])
    other.subscribe(["t"])
    while not heard.told:
        other.poll(1, 1)
        first.poll(1, 1)
    assert heard.told[0] == (None, {0: 9, 1: 9})
    assert has[0] == {ONE, TWO}, "it has them until the commit is stored"
    first.close()
    other.close()


def test_who_was_removed_commits_nothing_when_the_group_is_empty_again() -> None:
    """A commit that names no member counts in a group without members; this one names
    none once it was removed.
    """

    class Stubborn(RebalanceListener):
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
        slow.subscribe(["t"], listener=Stubborn())
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


def test_a_refusal_is_told_to_every_callback(
    data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    with joined(data) as consumer:
        assert consumer._place.member is not None
        monkeypatch.setattr(consumer._place.member, "generation", 99)
        consumer.commit_async({ONE: 1}, heard)
        consumer.commit_async({TWO: 1}, heard)
        with pytest.raises(CommitFailedError):
            consumer.commit({ONE: 2})
        assert heard.told == [
            ("CommitFailedError", {0: 1}),
            ("CommitFailedError", {1: 1}),
        ]
        assert stored(data) is None


def test_a_refusal_that_nobody_hears_is_said_to_the_logger(
    data: LogDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with joined(data) as consumer:
        assert consumer._place.member is not None
        monkeypatch.setattr(consumer._place.member, "generation", 99)
        consumer.commit_async({ONE: 1})
        consumer.poll()
        assert "processed up to offset 1, which is not committed" in caplog.text


def test_a_member_commits_for_topics_that_it_subscribes_to(data: LogDir) -> None:
    data.create_topic("u")
    with joined(data) as consumer:
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


def test_a_commit_is_tried_again_until_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process keeps the lock of the group twice, and then for ever."""
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
        consumer = joined(data)
        monkeypatch.setattr(SharedGroups, "commit", locked)
        consumer.commit({ONE: 1}, timeout=1)
        assert len(tries) == 3
        assert stored(data) == 1
        with pytest.raises(RegistryLockedError):
            consumer.commit({ONE: 2}, timeout=1)
        assert len(tries) == 6
        with pytest.raises(RegistryLockedError):
            consumer.commit({ONE: 2})
        assert len(tries) == 7, "without a timeout once"
        monkeypatch.undo()
        consumer.close(timeout=1)


class Loud:
    """Says so in each value, leaves out every second record, and counts commits."""

    def __init__(self) -> None:
        self.committed: list[dict[int, int]] = []

    def on_consume(self, records: ConsumerRecords) -> ConsumerRecords:
        kept = {
            one: [
                each._replace(value=bytes(each.value or b"") + b"!")
                for each in records[one]
                if each.offset % 2
            ]
            for one in records
        }
        return ConsumerRecords({one: rows for one, rows in kept.items() if rows})

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        self.committed.append(
            {one.partition: each.offset for one, each in offsets.items()}
        )


class Broken:
    def on_consume(self, records: ConsumerRecords) -> ConsumerRecords:
        raise ZeroDivisionError

    def on_commit(self, offsets: object) -> None:
        raise ZeroDivisionError


def test_interceptors_see_what_is_handed_out_and_committed(
    data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    loud = Loud()
    with joined(data, interceptors=[loud, Broken()], consumer_timeout_ms=0) as consumer:
        consumer.seek(ONE, 0)
        assert [
            record.value for record in consumer.poll(max_records=4).records(ONE)
        ] == [b"1!", b"3!"]
        assert consumer.position(ONE) == 4, "behind those that were left out, too"
        assert [record.value for record in consumer] == [b"5!", b"7!", b"9!"]
        reported.clear()
        consumer.commit()
        assert (loud.committed, len(reported)) == ([{0: 10, 1: 0}], 1)


def test_records_of_one_partition(data: LogDir) -> None:
    with joined(data) as consumer:
        consumer.seek(ONE, 0)
        found = consumer.poll(max_records=2)
        assert found.partitions() == [ONE]
        assert [record.offset for record in found.records(("t", 0))] == [0, 1]
        assert list(found.records(TWO)) == []


def test_threads_that_commit_at_once_share_batches(tmp_path: Path) -> None:
    """As far as the batches have one partition and one producer, and are no larger than
    one of a producer.
    """
    large = "m" * 4_000
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic("t")
        data.create_topic(OFFSETS_TOPIC, 2, OFFSETS_CONFIG)
        data.consumer(group_id="g").close()
        groups: Any = data._coordinators._groups
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
                given = (Committer(group_id, -1, "", None), committed, producer)
                threads.append(threading.Thread(target=groups.commit, args=given))
                threads[-1].start()
                while len(groups._steps._asked) < len(threads):
                    time.sleep(0.0005)
        for thread in threads:
            thread.join()
        first, second = (
            data.partition(OFFSETS_TOPIC, number)
            for number in (partition_of("g0", 2), partition_of("g1", 2))
        )
        kept = [
            (batch.record_count, batch.is_transactional) for batch in first.batches(0)
        ]
        assert kept == [(5, False), (1, True), (5, False), (1, False)], (
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
def test_a_shared_batch_is_no_larger_than_the_topic_takes(
    tmp_path: Path, name: str
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic("t")
        data.create_topic(OFFSETS_TOPIC, 1, {**OFFSETS_CONFIG, name: 600})
        data.consumer(group_id="g").close()
        groups: Any = data._coordinators._groups
        results = committed_at_once(
            groups, [(f"g{number}", number) for number in range(20)]
        )
        assert results == dict.fromkeys(range(20))
        assert 1 < len(list(data.partition(OFFSETS_TOPIC, 0).batches(0))) < 20
        assert [
            groups.committed(f"g{number}")["t", 0].offset for number in range(20)
        ] == list(range(20))


def test_who_is_not_told_how_a_commit_ended_gets_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that stores for three is interrupted while it takes in that the first
    one's records are on disk.
    """
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic("t")
        data.consumer(group_id="g").close()
        groups: Any = data._coordinators._groups
        stored = groups._coordinator.stored
        calls = []

        def interrupt(*given: Any) -> Any:
            calls.append(given)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return stored(*given)

        monkeypatch.setattr(groups._coordinator, "stored", interrupt)
        results = committed_at_once(groups, [("a", 1), ("b", 2), ("c", 3)])
        assert isinstance(results[1], KeyboardInterrupt)
        assert isinstance(results[2], logcore.DurabilityUnknownError)
        assert isinstance(results[3], logcore.DurabilityUnknownError)


def committed_at_once(groups: Any, commits: list[tuple[str, int]]) -> dict[int, object]:
    """Commits of threads that all wait before the first is taken; what each is told, by
    its offset.
    """
    told: dict[int, object] = {}

    def commit(group_id: str, offset: int) -> None:
        committed = {("t", 0): Committed(offset, -1, "m" * 20, 1_000)}
        try:
            told[offset] = groups.commit(Committer(group_id, -1, "", None), committed)
        except BaseException as error:
            told[offset] = error

    threads = []
    with groups._lock:
        for one in commits:
            threads.append(threading.Thread(target=commit, args=one))
            threads[-1].start()
            while len(groups._steps._asked) < len(threads):
                time.sleep(0.0005)
    for thread in threads:
        thread.join()
    return told
