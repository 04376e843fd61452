"""A consumer group with members in several real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import LogDir
from logcore.consumer import OffsetAndMetadata
from logcore.coordination.classic_group import STABLE, ClassicGroupMember, Group
from logcore.coordination.group_requests import (
    GroupError,
    Joined,
    JoinedMember,
    JoinEnds,
    JoinRefused,
    SessionEnds,
    SyncResult,
)
from logcore.coordinators.durable_queue import DurableQueue
from logcore.coordinators.group_codec import GroupNode
from logcore.coordinators.shared_groups import SharedGroups
from logcore.errors import (
    CommitFailedError,
    InconsistentGroupError,
    UnsupportedRegistryError,
)
from logcore.format.group_records import Committed, commit_key, commit_value
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.recordbatch import encode
from logcore.registry.paths import group_state
from logcore.testing import Fault, FaultPlan, SimulatedDisk

_CONTEXT = multiprocessing.get_context("fork")
PARTITIONS = 4
SECONDS = 300  # time limit for events that must happen


class Worker:
    """A process with a consumer, which reports the values that it processes and its
    assigned partitions.
    """

    def __init__(self, path: Path, **settings: Any) -> None:
        self.here, pipe = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=_work, args=(path, pipe, settings), daemon=True
        )
        self.process.start()
        pipe.close()
        self.values: list[bytes] = []
        self.assigned: tuple[int, ...] = ()

    def receive(self) -> None:
        try:
            while self.here.poll(0):
                message_type, content = self.here.recv()
                if message_type == "values":
                    self.values += content
                else:
                    self.assigned = content
        except EOFError:
            pass

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def _work(path: Path, pipe: Connection, settings: Any) -> None:
    with (
        logcore.open_dir(path, shared=True) as data,
        data.consumer(**settings) as consumer,
    ):
        consumer.subscribe(["t"])
        assigned: tuple[int, ...] | None = None
        while True:
            polled = consumer.poll(0.5)
            present = tuple(
                sorted(partition.partition for partition in consumer.assignment())
            )
            if present != assigned:
                assigned = present
                pipe.send(("has", assigned))
            if polled:
                try:
                    consumer.commit()
                except CommitFailedError:
                    continue
                pipe.send(("values", [record.value for record in polled.records()]))


def until(workers: list[Worker], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        for worker in workers:
            worker.receive()
        assert time.monotonic() < deadline, [
            (worker.assigned, len(worker.values)) for worker in workers
        ]
        time.sleep(0.005)


def is_divided(workers: list[Worker]) -> bool:
    return sorted(number for worker in workers for number in worker.assigned) == list(
        range(PARTITIONS)
    ) and all(worker.assigned for worker in workers)


SETTINGS: dict[str, Any] = {
    "group_id": "g",
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
}


@pytest.fixture
def data(tmp_path: Path) -> Iterator[LogDir]:
    with logcore.open_dir(tmp_path / "data", create=True, shared=True) as data:
        data.create_topic("t", partitions=PARTITIONS)
        yield data


@pytest.fixture
def start(data: LogDir) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def begin(**settings: Any) -> Worker:
        workers.append(Worker(Path(data.path), **{**SETTINGS, **settings}))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.signal(signal.SIGKILL)
        worker.process.join()


@pytest.mark.long
def test_another_process_takes_over_the_partitions_of_a_killed_one(
    data: LogDir, start: Callable[..., Worker]
) -> None:
    workers = [start(), start()]
    until(workers, lambda: is_divided(workers))
    values = [b"%d" % number for number in range(40)]
    for number, value in enumerate(values):
        data.append("t", value, partition=number % PARTITIONS)
    until(workers, lambda: sum(len(worker.values) for worker in workers) >= len(values))
    workers[0].signal(signal.SIGKILL)
    later = [b"later %d" % number for number in range(40)]
    for number, value in enumerate(later):
        data.append("t", value, partition=number % PARTITIONS)
    until(workers, lambda: set(later) <= {*workers[0].values, *workers[1].values})
    assert len(workers[1].assigned) == PARTITIONS
    assert set(values) <= {*workers[0].values, *workers[1].values}


@pytest.mark.long
def test_member_that_was_stopped_for_long_cannot_commit(
    data: LogDir, start: Callable[..., Worker]
) -> None:
    workers = [start(max_poll_interval_ms=1_000), start(max_poll_interval_ms=1_000)]
    until(workers, lambda: is_divided(workers))
    workers[0].signal(signal.SIGSTOP)
    until(workers[1:], lambda: len(workers[1].assigned) == PARTITIONS)
    for number in range(20):
        data.append("t", b"%d" % number, partition=number % PARTITIONS)
    until(workers[1:], lambda: len(workers[1].values) == 20)
    workers[0].signal(signal.SIGCONT)
    until(workers, lambda: is_divided(workers))
    assert workers[0].values == []


def test_members_of_two_processes_divide_the_partitions(
    data: LogDir, start: Callable[..., Worker]
) -> None:
    with data.consumer(**SETTINGS) as consumer:
        consumer.subscribe(["t"])
        other = start()

        def is_shared() -> bool:
            consumer.poll(0.01)
            return len(consumer.assignment()) == 2 and len(other.assigned) == 2

        until([other], is_shared)
    until([other], lambda: len(other.assigned) == PARTITIONS)


def test_offsets_of_a_shared_group_are_readable_from_the_log(data: LogDir) -> None:
    """A broker, or a process with exclusive access to the directory, can later read the
    offsets.
    """
    for number in range(8):
        data.append("t", b"%d" % number, partition=number % PARTITIONS)
    with data.consumer(**SETTINGS) as consumer:
        consumer.subscribe(["t"])
        while (
            sum(consumer.position(partition) for partition in consumer.assignment()) < 8
        ):
            consumer.poll(0.1)
        consumer.commit()
    path = data.path
    data.close()
    with (
        logcore.open_dir(path) as exclusive,
        exclusive.consumer(**SETTINGS) as consumer,
    ):
        consumer.subscribe(["t"])
        assert not consumer.poll(0.2)
        assert [
            consumer.position(partition) for partition in sorted(consumer.assignment())
        ] == [
            2,
            2,
            2,
            2,
        ]


def create_shared(disk: SimulatedDisk) -> LogDir:
    """Create a shared directory with a topic t of one partition."""
    data = logcore.open_dir("data", create=True, shared=True, fs=disk)
    data.create_topic("t")
    return data


def join_group(data: LogDir, **settings: Any) -> logcore.Consumer:
    """Return a consumer that has received its assignment."""
    consumer = data.consumer(**{**SETTINGS, **settings})
    consumer.subscribe(["t"])
    while not consumer.assignment():
        consumer.poll(0.01)
    return consumer


def generation_of(data: LogDir) -> int:
    with join_group(data) as consumer:
        assert consumer._membership.member is not None
        return consumer._membership.member.generation


def test_recreated_topic_begins_without_the_offsets_of_the_deleted_one(
    tmp_path: Path,
) -> None:
    """The offsets are deleted even if the deleting process has never loaded the
    group.
    """
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True, shared=True) as data:
        data.create_topic("t")
        data.append("t", b"old")
        with join_group(data, group_id="other") as consumer:
            consumer.commit({("t", 0): 1})
    with logcore.open_dir(path, shared=True) as data:
        data.delete_topic("t")
        data.create_topic("t")
        data.append("t", b"new")
        with join_group(data, group_id="other") as consumer:
            assert consumer.committed([("t", 0)]) == {("t", 0): None}


def test_generation_of_an_exclusive_process_is_not_reused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True, shared=True) as data:
        data.create_topic("t")
        first = generation_of(data)
    with logcore.open_dir(path) as exclusive:
        later = max(generation_of(exclusive) for _ in range(4))
    assert later > first
    with logcore.open_dir(path, shared=True) as data:
        assert generation_of(data) > later


def test_offset_commit_of_a_transaction_counts_once_committed(
    tmp_path: Path,
) -> None:
    """A broker that served the directory earlier has written such records."""
    with logcore.open_dir(tmp_path / "data", create=True, shared=True) as data:
        data.create_topic("t")
        for number in range(9):
            data.append("t", b"%d" % number)
        partition = ("t", 0)
        with data.consumer(**SETTINGS) as consumer:
            consumer.assign([partition])
            consumer.commit({partition: 1})
            log = data.partition("__consumer_offsets", 0)
            expected = 1
            for producer_id, (offset, is_committed) in enumerate(
                [(7, False), (2, True), (3, True)]
            ):
                row = (
                    commit_key("g", *partition),
                    commit_value(Committed(offset, -1, "", 5)),
                )
                batch = encode(
                    [row],
                    producer_id=producer_id,
                    producer_epoch=0,
                    base_sequence=0,
                    transactional=True,
                    now_ms=5,
                )
                log.append_batch(batch)
                assert consumer.committed([partition])[partition].offset == expected, (
                    "open"
                )  # type: ignore[union-attr]
                log.end_transaction(producer_id, 0, commit=is_committed)
                expected = offset if is_committed else expected
                assert consumer.committed([partition])[partition].offset == expected, (
                    "ended"
                )  # type: ignore[union-attr]


def test_generation_is_never_reused_after_a_power_cut() -> None:
    disk = SimulatedDisk({"data": None})
    data = create_shared(disk)
    generation = 0
    for is_last in (False, False, True):
        consumer = join_group(data)
        assert consumer._membership.member is not None
        generation = consumer._membership.member.generation
        if not is_last:
            consumer.close()
    disk.crash()
    for crashed_disk in disk.after_crash(limit=6):
        crashed_disk.seed += 1
        with (
            logcore.open_dir("data", shared=True, fs=crashed_disk) as reopened,
            join_group(reopened) as consumer,
        ):
            assert consumer._membership.member is not None
            assert consumer._membership.member.generation > generation


def test_acknowledged_commit_survives_a_power_cut() -> None:
    disk = SimulatedDisk({"data": None})
    data = create_shared(disk)
    data.append("t", b"1", partition=0)
    consumer = data.consumer(**SETTINGS)
    consumer.subscribe(["t"])
    while not consumer.poll(0.01):
        pass
    consumer.commit()
    disk.crash()
    for crashed_disk in disk.after_crash(limit=20):
        crashed_disk.seed += 1
        with (
            logcore.open_dir("data", shared=True, fs=crashed_disk) as reopened,
            reopened.consumer(**SETTINGS) as consumer,
        ):
            consumer.assign([("t", 0)])
            committed = consumer.committed([("t", 0)])["t", 0]
            assert committed is not None
            assert committed.offset == 1


@pytest.mark.parametrize("read_by", ["committed", "unstable", "join"])
def test_reader_of_an_unsynced_commit_syncs_it(
    monkeypatch: pytest.MonkeyPatch, read_by: str
) -> None:
    """The process of a commit stops after the append and before the sync. Another
    process then reads the commit, and a power cut must not undo the offset that this
    process returned.
    """
    disk = SimulatedDisk({"data": None})
    data = create_shared(disk)
    first = data.consumer(**SETTINGS)
    first.commit({("t", 0): 1})
    with monkeypatch.context() as patch:
        patch.setattr(DurableQueue, "wait_until_durable", lambda _: None)
        first.commit({("t", 0): 5})
    other = data.consumer(**SETTINGS)
    if read_by == "committed":
        assert other.committed([("t", 0)])["t", 0] == OffsetAndMetadata(5)
    elif read_by == "unstable":
        assert isinstance(other._groups, SharedGroups)
        assert other._groups.unstable("g") == set()
    else:
        other.subscribe(["t"])
        while not other.assignment():
            other.poll(0.01)
    disk.crash()
    for crashed_disk in disk.after_crash(limit=20):
        crashed_disk.seed += 1
        with logcore.open_dir("data", shared=True, fs=crashed_disk) as reopened:
            assert reopened.committed_offsets("t", 0) == {"g": 5}


def test_concurrent_commits_of_threads_share_syncs(data: LogDir) -> None:
    """The threads wait for one another before the first sync, so that all of them have
    appended.
    """
    consumers = [
        data.consumer(**{**SETTINGS, "group_id": f"g{number}"}) for number in range(8)
    ]
    for consumer in consumers:
        consumer.commit({("t", 0): 0})
    log = data.partition(OFFSETS_TOPIC, 0)
    before = log.statistics().syncs
    together = threading.Barrier(len(consumers), timeout=SECONDS)
    settle = DurableQueue.wait_until_durable

    def sync_together(self: DurableQueue) -> None:
        together.wait()
        settle(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DurableQueue, "wait_until_durable", sync_together)
        threads = [
            threading.Thread(target=consumer.commit, args=({("t", 0): 3},))
            for consumer in consumers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # At most one sync began before all threads had appended, and one sync is for all
    # threads.
    assert log.statistics().syncs - before <= 2
    assert data.committed_offsets("t", 0) == {f"g{number}": 3 for number in range(8)}
    for consumer in consumers:
        consumer.close()


def test_failed_sync_is_reported_to_the_waiting_commits() -> None:
    disk = SimulatedDisk({"data": None})
    with create_shared(disk) as data:
        consumer = data.consumer(**SETTINGS)
        consumer.commit({("t", 0): 1})
        disk.faults = FaultPlan(Fault("fdatasync", path="*__consumer_offsets*.log"))
        with pytest.raises(CommitFailedError, match="COORDINATOR_NOT_AVAILABLE"):
            consumer.commit({("t", 0): 2})
        disk.faults = None
        consumer.commit({("t", 0): 3})
        assert data.committed_offsets("t", 0) == {"g": 3}
        consumer.close()


def test_commits_change_the_group_node_only_to_renew_a_session() -> None:
    """Each change of the node wakes all members, which then read it."""
    disk = SimulatedDisk({"data": None})
    with (
        create_shared(disk) as data,
        join_group(data, max_poll_interval_ms=1_000) as consumer,
    ):
        assert isinstance(consumer._groups, SharedGroups)

        def version() -> int:
            return consumer._groups._registry.get(group_state("g")).version  # type: ignore[union-attr]

        before = version()
        for offset in range(5):
            disk.advance(10)
            consumer.commit({("t", 0): offset})
        assert version() == before
        for offset in range(20):
            disk.advance(200)
            consumer.commit({("t", 0): offset})
        assert version() > before
        consumer.poll()
        assert consumer.assignment(), (
            "commits alone have renewed its session for 4,000 ms"
        )


def test_members_of_a_shared_group_need_a_common_assignor() -> None:
    disk = SimulatedDisk({"data": None})
    with create_shared(disk) as data:
        first = join_group(data, assignors=["range", "sticky"])
        second = data.consumer(**SETTINGS, assignors=["roundrobin"])
        second.subscribe(["t"])
        with pytest.raises(
            InconsistentGroupError, match=r"'g'.*one of range, sticky.*found roundrobin"
        ):
            second.poll(0.01)
        first.close()
        second.close()


def test_member_that_polls_in_time_is_kept() -> None:
    disk = SimulatedDisk({"data": None})
    with (
        create_shared(disk) as data,
        join_group(data, max_poll_interval_ms=1_000) as consumer,
    ):
        assert consumer._membership.member is not None
        member_id = consumer._membership.member.member_id
        for _ in range(12):
            disk.advance(400)
            consumer.poll(0)
        assert consumer._membership.member.member_id == member_id


def test_members_paused_together_are_kept() -> None:
    """When a paused container resumes, all deadlines have passed."""
    disk = SimulatedDisk({"data": None})
    settings = {**SETTINGS, "max_poll_interval_ms": 3_000}
    with (
        logcore.open_dir("data", create=True, shared=True, fs=disk) as data,
        data.consumer(**settings) as first,
        data.consumer(**settings) as other,
    ):
        data.create_topic("t", 2)
        first.subscribe(["t"])
        other.subscribe(["t"])
        while not (len(first.assignment()) == len(other.assignment()) == 1):
            first.poll(0)
            other.poll(0)
            disk.advance(10)
        assert first._membership.member is not None
        assert other._membership.member is not None
        generation = first._membership.member.generation
        for _ in range(5):
            disk.advance(3_600_000)
            first.poll(0)
            other.poll(0)
        assert [
            member.generation
            for member in (first._membership.member, other._membership.member)
        ] == [generation] * 2
        for _ in range(9):
            disk.advance(400)
            first.poll(0)
        while len(first.assignment()) < 2:  # the other member no longer polls
            disk.advance(10)
            first.poll(0)
        assert first._membership.member.generation > generation


def test_commit_of_a_removed_member_is_refused() -> None:
    disk = SimulatedDisk({"data": None})
    settings = {**SETTINGS, "max_poll_interval_ms": 1_000}
    with (
        create_shared(disk) as data,
        data.consumer(**settings) as removed_member,
        data.consumer(**settings) as other,
    ):
        data.append("t", b"1")
        data.append("t", b"2")
        removed_member.subscribe(["t"])
        while not removed_member.poll(0.01, 1):
            pass
        other.subscribe(["t"])
        while not other.assignment():
            disk.advance(600)
            other.poll(0, 1)
        other.poll(0)
        other.commit()
        with pytest.raises(CommitFailedError):
            removed_member.commit()
        assert {
            offset.offset
            for offset in other.committed([("t", 0)]).values()
            if offset is not None
        } == {2}


def full_node() -> GroupNode:
    """Return a node with a value in each field."""
    group = Group(
        "g",
        state=STABLE,
        state_ms=5,
        generation=7,
        protocol_type="consumer",
        protocol="range",
        leader="m",
    )
    group.add(
        ClassicGroupMember(
            "m",
            "i",
            "client",
            "/host",
            10,
            20,
            (("range", b"\0\xff"),),
            b"\1",
            joining="s:1",
        ),
        "consumer",
    )
    group.pending.add("p")
    group.topics = frozenset({"t"})
    group.join_timer = JoinEnds()
    unfetched_results = {
        "s:1": Joined(
            generation=7,
            protocol_type="consumer",
            protocol="range",
            leader="m",
            member_id="m",
            members=(JoinedMember("m", "i", b"\0"),),
        ),
        "s:2": JoinRefused(GroupError.FENCED_INSTANCE_ID, "m"),
        "s:3": SyncResult(protocol_type="consumer", protocol=None, assignment=b"\2"),
        "s:4": GroupError.ILLEGAL_GENERATION,
        "s:5": None,
    }
    return GroupNode(
        group,
        "boot",
        9,
        {SessionEnds("m"): 100, JoinEnds(): 50},
        {"m": "s"},
        unfetched_results,
    )


def test_node_is_unchanged_by_packing_and_unpacking() -> None:
    node = full_node()
    unpacked = GroupNode.unpack("g", node.pack())
    assert unpacked.pack() == node.pack()
    assert unpacked.unfetched_results == node.unfetched_results
    assert unpacked.timers == node.timers
    assert unpacked.group.static == {"i": "m"}


@pytest.mark.parametrize(
    "value", [b"x", b"{}", b'{"version":2}', b"[]", b'{"version":1,"state":"Empty"}']
)
def test_node_of_another_version_is_an_error(value: bytes) -> None:
    with pytest.raises(UnsupportedRegistryError, match="version 1"):
        GroupNode.unpack("g", value)


def elements(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of each element in a value."""
    all_elements: list[tuple[Any, Any]] = []
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else []
    )
    for key in keys:
        all_elements += [(value, key), *elements(value[key])]
    return all_elements


def test_missing_unknown_or_mistyped_field_is_an_error() -> None:
    data = full_node().pack()
    count = len(elements(json.loads(data)))
    assert count > 50
    for number in range(count):
        for change in ("missing", "unknown", "float", "list", "dict"):
            values = json.loads(data)
            container, key = elements(values)[number]
            if change == "missing":
                del container[key]
            elif change == "unknown" and isinstance(container[key], dict):
                container[key]["more"] = 1.5
            else:
                container[key] = {"float": 1.5, "list": [1.5]}.get(change, {"a": 1.5})
            try:
                GroupNode.unpack("g", json.dumps(values).encode())
            except UnsupportedRegistryError:
                continue
            # One element or name fewer may be another valid node.
            assert change == "missing", (number, change, key)


def test_group_with_active_members_is_read_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step locks the group against all processes, and may write its node."""
    with logcore.open_dir(tmp_path / "d", create=True, shared=True) as data:
        data.create_topic("t")
        with data.consumer(group_id="g") as consumer:
            consumer.subscribe(["t"])
            while not consumer.assignment():
                consumer.poll(0.01)
            groups = data.host.coordinators.groups(data)
            assert isinstance(groups, SharedGroups)
            monkeypatch.setattr(SharedGroups, "step", lambda *_: pytest.fail("a step"))
            group = groups.get("g")
            monkeypatch.undo()
    assert group is not None and group.members
