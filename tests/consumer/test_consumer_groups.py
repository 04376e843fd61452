"""Consumer groups in one process: which member owns which partition, the effect of
commits, and the state after a crash.

The random histories are in tests/support/consumer_histories.py.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import logcore
import netshim
from logcore.consumer import Consumer, RebalanceListener, TopicPartition
from logcore.errors import (
    CommitFailedError,
    ConsumerBusyError,
    ConsumerStateError,
    DiskFullError,
    DurabilityUnknownError,
    FencedInstanceError,
    ForkedWriterError,
    InconsistentGroupError,
    InvalidConfigError,
)
from logcore.logdir import LogDir
from logcore.testing import Fault, FaultPlan, SimulatedCrash, SimulatedDisk
from support.consumer_histories import (
    ASSIGNORS,
    INTERVAL_MS,
    ConsumerHistory,
    open_data,
)

SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or 20_261_125


class RecordingListener(RebalanceListener):
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        self.calls.append(
            ("assigned", sorted(partition.partition for partition in partitions))
        )

    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self.calls.append(
            ("revoked", sorted(partition.partition for partition in partitions))
        )

    def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        self.calls.append(
            ("lost", sorted(partition.partition for partition in partitions))
        )


def consumers(data: LogDir, count: int, **options: Any) -> list[Consumer]:
    members = []
    for _ in range(count):
        settings = {"auto_offset_reset": "earliest", **options}
        consumer = data.consumer(
            group_id="g", max_poll_interval_ms=INTERVAL_MS, **settings
        )
        consumer.subscribe(["t"], listener=RecordingListener())
        members.append(consumer)
    return members


def poll_all(members: list[Consumer], rounds: int = 4) -> None:
    for _ in range(rounds):
        for member in members:
            member.poll()


def assigned_partitions(members: list[Consumer]) -> list[list[int]]:
    return [
        sorted(partition.partition for partition in member.assignment())
        for member in members
    ]


@pytest.mark.parametrize("name", ASSIGNORS)
def test_members_divide_partitions_and_take_over(name: str) -> None:
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 4)
        members = consumers(data, 2, assignors=[name])
        poll_all(members)
        first = assigned_partitions(members)
        assert sorted(first[0] + first[1]) == [0, 1, 2, 3] and len(first[0]) == 2
        members[0].close()
        poll_all(members[1:])
        assert assigned_partitions(members[1:]) == [[0, 1, 2, 3]]
        data.add_partitions("t", 6)
        disk.advance(1000)
        poll_all(members[1:])
        assert assigned_partitions(members[1:]) == [[0, 1, 2, 3, 4, 5]]
        members[1].close()


def test_cooperative_members_keep_their_remaining_partitions() -> None:
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 4)
        first, second = consumers(data, 2)
        first.poll()
        poll_all([first, second])
        calls = first._assignment._listener.calls  # type: ignore[attr-defined]
        assert (
            calls == [("assigned", [0, 1, 2, 3]), ("revoked", [2, 3])]
            or calls[1][0] == "revoked"
        )
        assert len(calls) == 2, "the partitions that it keeps were never revoked"
        first.close()
        second.close()


class CommittingListener(RebalanceListener):
    """A listener that commits the revoked partitions."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer

    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self.consumer.commit()


@pytest.mark.parametrize("is_automatic", [True, False], ids=["auto-commit", "listener"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["one process", "shared"])
@pytest.mark.parametrize(
    "situation",
    [
        "leader has the old generation",
        "follower has the old generation",
        "new generation is not assigned",
    ],
)
def test_close_during_a_rebalance_commits(
    situation: str, is_shared: bool, is_automatic: bool
) -> None:
    """Members keep their partitions during a rebalance. A member that closes then has
    offsets to commit, whether or not it has processed the new generation, and whether
    or not the leader has assigned partitions.
    """
    disk = SimulatedDisk()
    settings: dict[str, Any] = {
        "group_id": "g",
        "auto_offset_reset": "earliest",
        "max_poll_interval_ms": INTERVAL_MS,
        "assignors": ["cooperative-sticky"],
        "enable_auto_commit": is_automatic,
    }
    with logcore.open_dir("/data", create=True, fs=disk, shared=is_shared) as data:
        data.create_topic("t", 4)
        members = []
        for _ in range(3):
            consumer = data.consumer(**settings)
            listener = None if is_automatic else CommittingListener(consumer)
            consumer.subscribe(["t"], listener=listener)
            members.append(consumer)
        newcomer = members.pop()
        poll_all(members)
        leader, follower = sorted(
            members,
            key=lambda member: (
                member._membership.member is not None
                and member._membership.member._assigned_counts is None
            ),
        )
        closing, other = (
            (leader, follower) if situation.startswith("leader") else (follower, leader)
        )
        for partition in range(4):
            data.partition("t", partition).append_many([(None, b"x")] * 5)
            data.partition("t", partition).flush()
        returned = {
            partition: records[-1].offset + 1
            for partition, records in closing.poll().items()
        }
        assert len(returned) == 2
        newcomer.poll()
        if situation == "new generation is not assigned":
            other.poll()
            closing.poll()
        else:
            closing.poll()
            other.poll()
        assert closing.assignment() == set(returned), "the member keeps its partitions"
        closing.close()
        with data.consumer(group_id="g") as observer:
            stored = observer.committed(returned)
        assert {
            partition: offset and offset.offset for partition, offset in stored.items()
        } == returned
        other.leave_unfinished()
        newcomer.leave_unfinished()


def test_commit_of_another_thread_waits_for_the_next_generation() -> None:
    """Connector.commit_offsets() commits while the thread of the stream waits for its
    next record.
    """
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 4)
        members = consumers(
            data, 3, assignors=["cooperative-sticky"], enable_auto_commit=False
        )
        newcomer = members.pop()
        poll_all(members)
        for partition in range(4):
            data.partition("t", partition).append(b"x")
            data.partition("t", partition).flush()
        reading_consumer, other = members
        returned = {
            partition: records[-1].offset + 1
            for partition, records in reading_consumer.poll().items()
        }
        newcomer.poll()
        reading_consumer.poll()
        other.poll()
        with ThreadPoolExecutor(1) as executor:
            committing = executor.submit(reading_consumer.commit_from_other_thread)
            while not reading_consumer._commits.refused:
                assert not committing.done()
            while not committing.done():
                poll_all([*members, newcomer], 1)
            committing.result()
        stored = reading_consumer.committed(returned)
        assert all(
            offset is not None
            for partition, offset in stored.items()
            if partition in reading_consumer.assignment()
        )
        for consumer in (*members, newcomer):
            consumer.leave_unfinished()


def test_delayed_commit_of_another_thread_does_not_lower_offsets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the other thread waits, the thread of the consumer commits larger
    offsets.
    """
    with open_data(SimulatedDisk()) as data:
        data.create_topic("t")
        data.partition("t", 0).append_many([(None, b"x")] * 10)
        data.partition("t", 0).flush()
        (consumer,) = consumers(data, 1, enable_auto_commit=False, max_poll_records=5)
        while not consumer.poll():
            pass
        commit = consumer._commits.commit_from_other_thread
        waiting: list[Any] = []

        def wait_once(chosen: Any) -> bool:
            waiting.append(chosen)
            if len(waiting) == 1:
                consumer.commit({("t", 0): 8})
                return False
            return commit(chosen)

        monkeypatch.setattr(consumer._commits, "commit_from_other_thread", wait_once)
        consumer.commit_from_other_thread()
        assert [len(chosen) for chosen in waiting] == [1, 0]
        assert consumer.committed([("t", 0)])[TopicPartition("t", 0)].offset == 8  # type: ignore[union-attr]
        consumer.leave_unfinished()


def test_member_that_stops_polling_loses_its_partitions_and_cannot_commit() -> None:
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 2)
        data.partition("t", 0).append_many([(None, b"x")] * 10)
        data.partition("t", 1).append_many([(None, b"x")] * 10)
        slow, quick = consumers(data, 2, enable_auto_commit=False)
        poll_all([slow, quick])
        owned = next(iter(slow.assignment()))
        disk.advance(INTERVAL_MS * 2 // 3)
        poll_all([quick])
        assert len(quick.assignment()) == 1, (
            "the member is removed only after its interval"
        )
        disk.advance(INTERVAL_MS)
        poll_all([quick])
        assert assigned_partitions([quick]) == [[0, 1]]
        quick.commit({owned: 9})
        with pytest.raises(CommitFailedError, match="max_poll_interval_ms"):
            slow.commit()
        assert quick.committed([owned])[owned].offset == 9  # type: ignore[union-attr]
        slow.poll()
        assert ("lost", [owned.partition]) in slow._assignment._listener.calls  # type: ignore[attr-defined]
        poll_all([slow, quick])
        assert sorted(map(len, assigned_partitions([slow, quick]))) == [1, 1]
        slow.close()
        quick.close()


@pytest.mark.parametrize("name", ASSIGNORS)
def test_finished_records_are_committed_before_revocation(name: str) -> None:
    with open_data(SimulatedDisk()) as data:
        data.create_topic("t", 4)
        for partition in range(4):
            data.partition("t", partition).append_many([(None, b"x")] * 20)
        members = consumers(data, 1, assignors=[name], max_poll_records=7)
        counts: Counter[tuple[int, int]] = Counter()
        for step in range(60):
            if step in (3, 5):
                members += consumers(data, 1, assignors=[name], max_poll_records=7)
            for member in members:
                counts.update(
                    (record.partition, record.offset)
                    for record in member.poll().records()
                )
        assert counts == Counter(
            {(partition, offset): 1 for partition in range(4) for offset in range(20)}
        )
        for member in members:
            member.close()


def test_stuck_member_delays_a_rebalance_by_at_most_its_interval() -> None:
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 2)
        stuck, other = consumers(data, 2, assignors=["range"])
        poll_all([stuck, other])
        (third,) = consumers(data, 1, assignors=["range"])
        poll_all([third, other])
        assert assigned_partitions([third, other]) == [[], []], (
            "the other members wait for the stuck member"
        )
        disk.advance(INTERVAL_MS + 1)
        poll_all([third, other])
        assert sorted(assigned_partitions([third, other])) == [[0], [1]]
        for member in (stuck, other, third):
            member.close()


def test_wall_clock_change_removes_no_member() -> None:
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 2)
        members = consumers(data, 2)
        poll_all(members)
        before = assigned_partitions(members)
        disk.set_wall_clock(disk.now_ms() + 10 * 24 * 3_600_000)
        poll_all(members[1:])
        disk.set_wall_clock(disk.now_ms() - 20 * 24 * 3_600_000)
        poll_all(members[1:])
        poll_all(members)
        assert assigned_partitions(members) == before
        for member in members:
            member.close()


def test_static_member_returns_to_its_partitions() -> None:
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 2)
        (other,) = consumers(data, 1)
        (static,) = consumers(data, 1, group_instance_id="i")
        poll_all([other, static])
        owned = assigned_partitions([static])
        static.close()
        poll_all([other])
        assert len(other.assignment()) == 1, (
            "its partitions are not assigned to another member at once"
        )
        (returned,) = consumers(data, 1, group_instance_id="i")
        poll_all([other, returned])
        assert assigned_partitions([returned]) == owned
        (second_instance,) = consumers(data, 1, group_instance_id="i")
        poll_all([other, second_instance])
        with pytest.raises(FencedInstanceError):
            returned.commit({("t", owned[0][0]): 0})
        for consumer in (other, second_instance, returned):
            consumer.close()


@pytest.mark.parametrize("is_shared", [False, True], ids=["one process", "shared"])
def test_static_member_is_removed_after_its_session_timeout(
    is_shared: bool,
) -> None:
    disk = SimulatedDisk()
    timeouts: dict[str, Any] = {
        "session_timeout_ms": 3_000,
        "heartbeat_interval_ms": 1_000,
    }
    with logcore.open_dir("/data", create=True, fs=disk, shared=is_shared) as data:
        data.create_topic("t", 2)
        (other,) = consumers(data, 1)
        (static,) = consumers(data, 1, group_instance_id="i", **timeouts)
        poll_all([other, static])
        for _ in range(5):  # the session timeout does not apply to its polls
            disk.advance(1_000)
            other.poll()
        assert len(assigned_partitions([other])[0]) == 1
        static.close()
        for _ in range(5):
            disk.advance(500)
            other.poll()
        assert len(assigned_partitions([other])[0]) == 1, (
            "the static member has 3 s to return"
        )
        for _ in range(5):
            disk.advance(500)
            poll_all([other])
        assert assigned_partitions([other]) == [[0, 1]]
        other.close()


def test_static_member_has_its_session_timeout_after_a_restart() -> None:
    disk = SimulatedDisk()
    timeouts: dict[str, Any] = {
        "session_timeout_ms": 3_000,
        "heartbeat_interval_ms": 1_000,
        "group_instance_id": "i",
    }
    with open_data(disk) as data:
        data.create_topic("t", 2)
        (other,) = consumers(data, 1)
        (static,) = consumers(data, 1, **timeouts)
        poll_all([other, static])
        owned = assigned_partitions([static])
        static.close()
        other.close()
    for wait_ms, expected in ((2_000, owned[0]), (4_000, [0, 1])):
        with open_data(disk) as data:
            (other,) = consumers(data, 1)
            other.poll()
            disk.advance(wait_ms)
            poll_all([other])
            (static,) = consumers(data, 1, **timeouts)
            if wait_ms == 2_000:
                poll_all([other, static])
                assert assigned_partitions([static]) == [expected]
            else:
                assert assigned_partitions([other]) == [expected]
            static.close()
            other.close()


def test_members_need_a_common_assignor() -> None:
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 2)
        (first,) = consumers(data, 1, assignors=["range"])
        first.poll()
        (second,) = consumers(data, 1, assignors=["roundrobin"])
        with pytest.raises(
            InconsistentGroupError, match=r"no assignor.*'g'.*one of range.*roundrobin"
        ):
            second.poll()
        first.close()


def test_result_of_a_custom_assignor_is_checked() -> None:
    class SamePartitionAssignor:
        name = "greedy"
        is_cooperative = False

        def assign(
            self, partitions: Any, members: Any
        ) -> dict[str, list[TopicPartition]]:
            return {member.member_id: [TopicPartition("t", 0)] for member in members}

    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 1)
        members = consumers(data, 2, assignors=[SamePartitionAssignor()])
        members[0].poll()
        with pytest.raises(InvalidConfigError, match="gave t-0"):
            poll_all(members)


class WeightedAssignor:
    """Assigns all partitions to the member with the largest user data."""

    name = "weighted"
    is_cooperative = False

    def __init__(self, weight: Any) -> None:
        self.weight = weight
        self.assignments: list[tuple[list[int], int]] = []

    def subscription_user_data(self, topics: tuple[str, ...]) -> Any:
        assert topics == ("t",)
        return self.weight

    def assign(self, partitions: Any, members: Any) -> dict[str, list[TopicPartition]]:
        max_polls = max(members, key=lambda member: member.user_data or b"")
        return {
            max_polls.member_id: [
                TopicPartition("t", number) for number in range(partitions["t"])
            ]
        }

    def on_assignment(
        self, partitions: frozenset[TopicPartition], generation: int
    ) -> None:
        self.assignments.append(
            (sorted(partition.partition for partition in partitions), generation)
        )


def test_assignor_gets_user_data_and_its_assignment() -> None:
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 2)
        light = WeightedAssignor(b"1")
        heavy = WeightedAssignor(b"2")
        (first,) = consumers(data, 1, assignors=[light])
        (second,) = consumers(data, 1, assignors=[heavy])
        poll_all([first, second])
        assert assigned_partitions([first, second]) == [[], [0, 1]]
        assert light.assignments[-1][0] == []
        assert heavy.assignments[-1] == ([0, 1], light.assignments[-1][1])
        assert first.metrics().rebalances == len(light.assignments)
        (consumer_with_invalid_data,) = consumers(
            data, 1, assignors=[WeightedAssignor("text")]
        )
        with pytest.raises(
            InvalidConfigError,
            match=r"subscription_user_data\(\).*'weighted'.*bytes or None.*'text'",
        ):
            consumer_with_invalid_data.poll()
        for consumer in (first, second):
            consumer.close()


def test_full_disk_refuses_a_commit_and_loses_no_earlier_commit() -> None:
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 1)
        data.append("t", b"x")
        (consumer,) = consumers(data, 1, enable_auto_commit=False)
        consumer.poll()
        consumer.commit({("t", 0): 0})
        disk.capacity_bytes = 0
        with pytest.raises(CommitFailedError) as raised:
            consumer.commit()
        assert isinstance(raised.value.__cause__, DiskFullError)
        disk.capacity_bytes = None
        assert consumer.committed([("t", 0)])[TopicPartition("t", 0)].offset == 0  # type: ignore[union-attr]
        consumer.commit()
        assert consumer.committed([("t", 0)])[TopicPartition("t", 0)].offset == 1  # type: ignore[union-attr]
        consumer.close()


def test_offsets_are_deleted_with_their_topic() -> None:
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 1)
        data.partition("t", 0).append_many([(None, b"old")] * 5)
        (consumer,) = consumers(data, 1)
        consumer.poll()
        consumer.commit()
        data.delete_topic("t")
        assert not consumer.poll()
        data.create_topic("t", 1)
        data.append("t", b"new")
        disk.advance(1000)
        values = [
            record.value for _ in range(4) for record in consumer.poll().records()
        ]
        assert values == [b"new"]
        consumer.close()
    with open_data(disk) as data:  # also without a consumer at the time of the deletion
        data.delete_topic("t")
        data.create_topic("t", 1)
        data.append("t", b"newer")
        (consumer,) = consumers(data, 1)
        assert [record.value for record in consumer.poll().records()] == [b"newer"]
        consumer.close()


@pytest.mark.long
@pytest.mark.parametrize("is_shared", [False, True], ids=["one process", "shared"])
@pytest.mark.parametrize("reset", ["earliest", "latest"])
@pytest.mark.parametrize(
    "use",
    ["poll", "iteration", "close", "commit", "commit_async", "assign", "gone", "seen"],
)
def test_no_record_of_a_recreated_topic_is_skipped(
    use: str, reset: str, is_shared: bool
) -> None:
    """An open consumer continued at its position in the old topic, and committed that
    position for the new topic.
    """
    disk = SimulatedDisk({"data": None})
    with logcore.open_dir(
        "data", create=True, shared=is_shared, durability="os", fs=disk
    ) as data:
        data.create_topic("t")
        (first,) = consumers(data, 1, consumer_timeout_ms=0, auto_offset_reset=reset)
        if use == "assign":
            first.unsubscribe()
            first.assign([("t", 0)])
        poll_all([first])
        data.partition("t", 0).append_many([(None, b"old")] * 3)
        assert sum(first.poll().count for _ in range(3)) == 3
        if use == "commit_async":
            first.commit_async()
        data.delete_topic("t")
        if use == "gone":
            first.close()
        elif use == "seen":
            poll_all([first])
        data.create_topic("t")
        data.partition("t", 0).append_many(
            [(None, b"%d" % number) for number in range(5)]
        )
        values: list[bytes | None] = []
        if use == "seen":
            disk.advance(1000)
        if use in ("poll", "assign", "seen"):
            values += [
                record.value for _ in range(3) for record in first.poll().records()
            ]
        elif use == "iteration":
            values += [record.value for record in first]
        elif use == "commit":
            first.commit()
            with pytest.raises(CommitFailedError, match="was deleted since"):
                first.commit({("t", 0): 3})
        if use in ("poll", "assign", "iteration", "seen"):
            assert (values, first.position(("t", 0))) == (
                [b"%d" % number for number in range(5)],
                5,
            )
            first.commit()
            assert first.committed([("t", 0)])[TopicPartition("t", 0)].offset == 5  # type: ignore[union-attr]
        first.close()
        if values:
            return
        (other,) = consumers(data, 1, auto_offset_reset="earliest")
        values += [record.value for _ in range(3) for record in other.poll().records()]
        assert values == [b"%d" % number for number in range(5)]
        other.close()


def test_deleted_topic_does_not_block_commits_of_other_topics() -> None:
    """A commit that contains a deleted topic is refused as a whole, so that close()
    omits that topic.
    """
    disk = SimulatedDisk()
    with open_data(disk) as data:
        for topic in ("t", "u"):
            data.create_topic(topic)
            data.append(topic, b"0", partition=0)
        (first,) = consumers(data, 1)
        first.subscribe(["t", "u"])
        for _ in range(4):
            first.poll()
        data.delete_topic("u")
        first.close()
        (other,) = consumers(data, 1)
        assert other.committed([("t", 0)])[TopicPartition("t", 0)] is not None
        other.close()


def test_waiting_members_do_not_wake_one_another() -> None:
    with open_data(SimulatedDisk()) as data:
        data.create_topic("t", 2)
        members = consumers(data, 2)
        poll_all(members)
        woken: list[int] = []
        groups = data.host.coordinators._groups
        assert groups is not None
        groups.listen(lambda: woken.append(1))
        poll_all(members, 20)
        assert not woken
        for member in members:
            member.close()


def test_consumer_that_was_not_closed_warns() -> None:
    with open_data(SimulatedDisk()) as data:
        data.create_topic("t", 2)
        members = consumers(data, 1)
        poll_all(members)
        with pytest.warns(ResourceWarning, match="not closed"):
            members.clear()
            gc.collect()


def test_directory_of_a_broker_refuses_group_consumers(tmp_path: Path) -> None:
    with netshim.serve(tmp_path / "data") as server:
        logdir = server.server.logdir
        with pytest.raises(ConsumerStateError, match="use a Kafka client"):
            logdir.consumer(group_id="g")


def test_threads_divide_the_work_of_a_group(tmp_path: Path) -> None:
    """Consumers in several threads, which join and leave, process each record once."""
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic("t", 6)
        for partition in range(6):
            data.partition("t", partition).append_many(
                [(None, b"%d" % number) for number in range(200)]
            )
        counts: Counter[tuple[int, int]] = Counter()
        guard = threading.Lock()
        failures: list[BaseException] = []

        def work(max_polls: int) -> None:
            try:
                with data.consumer(
                    group_id="g", auto_offset_reset="earliest", max_poll_records=50
                ) as consumer:
                    consumer.subscribe(["t"])
                    for _ in range(max_polls):
                        polled = consumer.poll(0.05)
                        with guard:
                            counts.update(
                                (record.partition, record.offset)
                                for record in polled.records()
                            )
                            if len(counts) == 1200:
                                return
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=(max_polls,))
            for max_polls in (5, 2000, 2000)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures
        assert len(counts) == 1200
        assert set(counts.values()) == {1}, (
            "finished records were committed before revocation"
        )


def test_consumer_is_used_by_one_thread_at_a_time() -> None:
    with open_data(SimulatedDisk()) as data:
        data.create_topic("t")
        with data.consumer() as consumer:
            consumer.subscribe(["t"])
            refused = pytest.raises(ConsumerBusyError, match="one thread")
            with consumer._exclusively(), ThreadPoolExecutor(1) as other, refused:
                other.submit(consumer.poll).result()


# -- random histories ------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "count",
    [25, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_random_histories_keep_all_invariants_of_groups(count: int) -> None:
    for number in range(count):
        history = ConsumerHistory(SEED + number)
        try:
            for _ in range(60):
                history.step()
            history.finish()
        except BaseException:
            print(
                f"LOGCORE_TEST_SEED={SEED + number}, {history.assignor}:",
                *history.steps,
            )
            raise


# -- failures and interrupts -----------------------------------------------------------------


def test_failed_sync_refuses_the_commit_and_the_next_is_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = SimulatedDisk()
    with open_data(disk) as data:
        data.create_topic("t", 1)
        data.append("t", b"x")
        (consumer,) = consumers(data, 1, enable_auto_commit=False)
        consumer.poll()
        disk.faults = FaultPlan(Fault("fdatasync", path="*__consumer_offsets*.log"))
        with pytest.raises(CommitFailedError) as raised:
            consumer.commit()
        assert isinstance(raised.value.__cause__, DurabilityUnknownError)
        assert "was not stored" in caplog.text
        disk.faults = None
        consumer.commit()
        assert consumer.committed([("t", 0)])[TopicPartition("t", 0)].offset == 1  # type: ignore[union-attr]
        consumer.close()
    states = list(disk.after_crash(limit=2))
    with open_data(states[-1]) as data:
        assert data.committed_offsets("t", 0) == {"g": 1}


def test_offsets_of_topics_in_other_directories_are_kept() -> None:
    """A broker may have several log directories, one of which has the offsets of all
    topics.
    """
    disk = SimulatedDisk()
    partition_of_another_directory = TopicPartition("elsewhere", 3)
    for _ in range(2):
        with open_data(disk) as data, data.consumer(group_id="g") as consumer:
            if (
                consumer.committed([partition_of_another_directory])[
                    partition_of_another_directory
                ]
                is None
            ):
                consumer.commit({partition_of_another_directory: 7})
    with open_data(disk) as data, data.consumer(group_id="g") as consumer:
        assert (
            consumer.committed([partition_of_another_directory])[
                partition_of_another_directory
            ].offset
            == 7
        )  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["range", "cooperative-sticky"])
def test_listener_that_raises_neither_keeps_nor_loses_partitions(name: str) -> None:
    class FailingListener(RecordingListener):
        fails = True

        def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
            super().on_partitions_revoked(partitions)
            if self.fails:
                raise ZeroDivisionError

    with open_data(SimulatedDisk()) as data:
        data.create_topic("t", 4)
        listener = FailingListener()
        first = data.consumer(
            group_id="g", assignors=[name], max_poll_interval_ms=INTERVAL_MS
        )
        first.subscribe(["t"], listener=listener)
        first.poll()
        (second,) = consumers(data, 1, assignors=[name])
        failures = 0
        for _ in range(6):
            try:
                first.poll()
            except ZeroDivisionError:
                failures += 1
            second.poll()
        assert failures
        listener.fails = False
        poll_all([first, second])
        assert sorted(
            number for share in assigned_partitions([first, second]) for number in share
        ) == [0, 1, 2, 3]
        first.close()
        second.close()


def test_forked_child_does_not_affect_the_group() -> None:
    disk = SimulatedDisk()
    data = open_data(disk)
    data.create_topic("t", 2)
    (consumer,) = consumers(data, 1)
    consumer.poll()
    disk.forks += 1  # the file system reports a fork
    for call in (
        consumer.poll,
        consumer.poll_columns,
        consumer.commit,
        consumer.unsubscribe,
    ):
        with pytest.raises(ForkedWriterError):
            call()
    before = len(disk.operations)
    consumer.close()
    assert len(disk.operations) == before
    disk.forks -= 1
    data.close()


def test_reset_of_a_deleted_position_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_data(SimulatedDisk()) as data:
        data.create_topic("t", 1)
        data.partition("t", 0).append_many([(None, b"x")] * 10)
        (consumer,) = consumers(data, 1)
        consumer.poll(max_records=2)
        consumer.commit()
        consumer.close()
        data.partition("t", 0).delete_records(5)
        (reopened,) = consumers(data, 1)
        assert [record.offset for record in reopened.poll().records()] == list(
            range(5, 10)
        )
        assert "continues" in caplog.text and "at offset 5" in caplog.text
        reopened.close()


def test_listener_may_seek_and_commit() -> None:
    class SeekingListener(RebalanceListener):
        def __init__(self) -> None:
            self.refused: list[str] = []

        def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
            for partition in partitions:
                consumer.seek(partition, 3)
                assert consumer.position(partition) == 3
            for call in (
                consumer.poll,
                consumer.poll_columns,
                consumer.unsubscribe,
                consumer.close,
            ):
                try:
                    call()
                except ConsumerStateError as error:
                    self.refused.append(str(error))

        def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
            consumer.commit()

    with open_data(SimulatedDisk()) as data:
        data.create_topic("t", 2)
        for number in range(2):
            data.partition("t", number).append_many([(None, b"x")] * 5)
        listener = SeekingListener()
        consumer = data.consumer(group_id="g", enable_auto_commit=False)
        consumer.subscribe(["t"], listener=listener)
        returned = [
            (record.partition, record.offset)
            for _ in range(3)
            for record in consumer.poll().records()
        ]
        assert sorted(returned) == [(0, 3), (0, 4), (1, 3), (1, 4)]
        assert len(listener.refused) == 4
        consumer.close()
        assert [data.committed_offsets("t", number) for number in range(2)] == [
            {"g": 5}
        ] * 2


def _with_a_commit(disk: SimulatedDisk, *, is_shared: bool) -> None:
    with logcore.open_dir("data", create=True, shared=is_shared, fs=disk) as data:
        data.create_topic("t", 2)
        data.append("t", b"old", partition=1)
        with data.consumer(group_id="g") as consumer:
            consumer.assign([("t", 1)])
            consumer.commit({("t", 1): 1})


def _committed(data: LogDir) -> object:
    with data.consumer(group_id="g") as consumer:
        return consumer.committed([("t", 1)])[("t", 1)]


@pytest.mark.long
@pytest.mark.parametrize("is_shared", [False, True], ids=["one process", "shared"])
def test_crash_during_topic_deletion_leaves_no_offsets_to_a_new_topic(
    is_shared: bool,
) -> None:
    for nth in itertools.count():
        disk = SimulatedDisk({"data": None})
        _with_a_commit(disk, is_shared=is_shared)
        data = logcore.open_dir("data", shared=is_shared, fs=disk)
        disk.crash_in(nth)
        try:
            data.delete_topic("t")
        except SimulatedCrash:
            for state in disk.after_crash(limit=3):
                with logcore.open_dir("data", shared=is_shared, fs=state) as reopened:
                    if "t" not in reopened:
                        reopened.create_topic("t", 2)
                        assert _committed(reopened) is None
            continue
        disk.crash_in(None)
        data.close()
        assert nth > 10
        return


@pytest.mark.parametrize("is_shared", [False, True], ids=["one process", "shared"])
@pytest.mark.parametrize("is_new", [False, True], ids=["tick", "next opening"])
def test_topic_name_is_reserved_until_its_offsets_are_deleted(
    is_new: bool, is_shared: bool
) -> None:
    disk = SimulatedDisk({"data": None})
    _with_a_commit(disk, is_shared=is_shared)
    with contextlib.ExitStack() as opened_now:
        data = opened_now.enter_context(
            logcore.open_dir("data", shared=is_shared, fs=disk)
        )
        disk.faults = FaultPlan(
            Fault("pwrite", errno.ENOSPC, "*__consumer_offsets-0/*.log", times=None)
        )
        data.delete_topic("t")
        assert "t" not in data
        assert not disk.exists("data/t-1")
        with pytest.raises(logcore.TopicExistsError, match="being deleted"):
            data.create_topic("t", 2)
        assert [incident.work for incident in data.incidents()] == ["deletion"]
        disk.faults = None
        if is_new:
            data.close()
            data = opened_now.enter_context(
                logcore.open_dir("data", shared=is_shared, fs=disk)
            )
        else:
            data.tick()
        data.create_topic("t", 2)
        assert _committed(data) is None
    with logcore.open_dir("data", shared=is_shared, fs=disk) as data:
        assert _committed(data) is None


@pytest.mark.parametrize("instance_id", [None, "i"])
@pytest.mark.parametrize("end", [Consumer.close, Consumer.unsubscribe])
@pytest.mark.parametrize("is_shared", [False, True], ids=["one process", "shared"])
def test_consumer_closed_before_the_response_to_its_join_is_not_a_member(
    is_shared: bool, end: Any, instance_id: str | None
) -> None:
    disk = SimulatedDisk({"data": None})
    with logcore.open_dir("data", create=True, shared=is_shared, fs=disk) as data:
        data.create_topic("t", 2)
        (first,) = consumers(data, 1)
        poll_all([first])
        (brief,) = consumers(data, 1, group_instance_id=instance_id)
        brief.poll(0)
        end(brief)
        poll_all([first])
        assert assigned_partitions([first]) == [[0, 1]]
        (last,) = consumers(data, 1)
        poll_all([first, last])
        assert sorted(map(len, assigned_partitions([first, last]))) == [1, 1]
        for consumer in (first, brief, last):
            consumer.close()


@pytest.mark.parametrize("is_shared", [False, True], ids=["one process", "shared"])
def test_consumer_closed_before_reading_the_response_to_its_join_is_not_a_member(
    is_shared: bool,
) -> None:
    disk = SimulatedDisk({"data": None})
    with logcore.open_dir("data", create=True, shared=is_shared, fs=disk) as data:
        data.create_topic("t", 2)
        (first,) = consumers(data, 1)
        poll_all([first])
        (brief,) = consumers(data, 1)
        brief.poll(0)
        first.poll(0)
        brief.close()
        poll_all([first])
        assert assigned_partitions([first]) == [[0, 1]]
        first.close()


@pytest.mark.parametrize("continues", [False, True], ids=["closed", "continues"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["one process", "shared"])
def test_interrupted_join_leaves_no_member(
    is_shared: bool, continues: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group had added the consumer as a member, but the consumer did not process
    the response. Then a member that did not exist owned the partitions for
    max_poll_interval_ms.
    """
    disk = SimulatedDisk({"data": None})
    with logcore.open_dir("data", create=True, shared=is_shared, fs=disk) as data:
        data.create_topic("t", 2)
        (first,) = consumers(data, 1)
        groups = type(first._groups)
        join = groups.join

        def interrupted(self: Any, request: Any, done: Any) -> None:
            join(self, request, done)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(groups, "join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                first.poll(0)
        last = first
        if not continues:
            first.close()
            (last,) = consumers(data, 1)
        poll_all([last])
        assert assigned_partitions([last]) == [[0, 1]]
        last.close()


def test_interrupted_close_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted close() marked the consumer as closed, but left it in its group."""
    disk = SimulatedDisk({"data": None})
    with logcore.open_dir("data", create=True, fs=disk) as data:
        data.create_topic("t", 2)
        (first,) = consumers(data, 1)
        poll_all([first])

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(type(first._groups), "leave", interrupted)
            with pytest.raises(KeyboardInterrupt):
                first.close()
        first.close()
        (last,) = consumers(data, 1)
        poll_all([last])
        assert assigned_partitions([last]) == [[0, 1]]
        last.close()
