"""A log directory that several real processes have open for writing: topics, appends,
deletions, crashes.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import pytest

import logcore
from logcore import LogDir
from logcore.acquire import claim_directory
from logcore.directory.topic_file import TopicEntry, new_id, read_topics, write_topics
from logcore.fs import OS, OsFS
from logcore.fs.byte_lock import TRANSACTIONS_BYTE
from logcore.testing import Fault, FaultPlan, SimulatedDisk

_CONTEXT = multiprocessing.get_context("fork")


class OtherProcess:
    """Another process that has the directory open. It calls the functions that it
    receives with its LogDir.
    """

    def __init__(self, path: Path) -> None:
        self.here, pipe = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(path, pipe), daemon=True)
        self.process.start()
        reply = self.here.recv()
        if reply != "open":
            raise reply

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.here.send((function, arguments))
        is_error, result = self.here.recv()
        if is_error:
            raise result
        return result

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self.here.send(None)
            self.process.join(300)


def _serve(path: Path, pipe: Connection) -> None:
    try:
        opened = logcore.open_dir(path, shared=True)
    except logcore.LogcoreError as error:
        pipe.send(error)
        return
    with opened as data:
        pipe.send("open")
        while (call := pipe.recv()) is not None:
            function, arguments = call
            try:
                pipe.send((False, function(data, *arguments)))
            except Exception as error:
                pipe.send((True, error))


@pytest.fixture
def data(tmp_path: Path) -> Iterator[LogDir]:
    with logcore.open_dir(tmp_path / "data", create=True, shared=True) as opened:
        opened.create_topic("t", partitions=2, config={"segment.bytes": 20_000})
        yield opened


@pytest.fixture
def other(data: LogDir) -> Iterator[OtherProcess]:
    process = OtherProcess(Path(data.path))
    yield process
    process.end()


def append(data: LogDir, topic: str, value: bytes, partition: int = 0) -> int:
    return data.append(topic, value, partition=partition).offset


def values(data: LogDir, topic: str) -> list[bytes | None]:
    data.refresh()
    found = []
    for number in data.partitions(topic):
        log = data.partition(topic, number)
        log.refresh()
        found += [record.value for record in log.read(log.log_start_offset)]
    return found


def create(data: LogDir, topic: str) -> None:
    data.create_topic(topic)


def test_two_processes_append_to_one_partition(
    data: LogDir, other: OtherProcess
) -> None:
    for number in range(300):
        assert append(data, "t", b"own %d" % number) == 2 * number
        assert other.call(append, "t", b"other %d" % number) == 2 * number + 1
    expected = [
        b"%s %d" % (process, number)
        for number in range(300)
        for process in (b"own", b"other")
    ]
    assert values(data, "t") == expected
    assert other.call(values, "t") == expected


def test_topics_created_by_one_process_are_visible_in_another(
    data: LogDir, other: OtherProcess
) -> None:
    other.call(create, "theirs")
    assert data.topics() == ["t", "theirs"]
    assert append(data, "theirs", b"1") == 0
    assert other.call(append, "theirs", b"2") == 1
    data.alter_topic("theirs", {"max.message.bytes": 100})
    data.add_partitions("theirs", 3)
    with pytest.raises(logcore.TopicExistsError):
        other.call(create, "theirs")
    assert other.call(values, "theirs") == [b"1", b"2"]
    with pytest.raises(logcore.RecordTooLargeError):
        other.call(append, "theirs", b"x" * 200)
    assert other.call(append, "theirs", b"3", 2) == 0


def create_with_settings(data: LogDir, topic: str) -> None:
    data.create_topic(topic, config={"retention.ms": 777})


def test_change_keeps_topics_that_other_processes_created(
    data: LogDir, other: OtherProcess
) -> None:
    other.call(create_with_settings, "theirs")
    data.add_partitions("t", 3)
    with logcore.open_dir(data.path, read_only=True) as reader:
        assert reader.settings("theirs").retention_ms == 777


def test_topic_deleted_by_another_process_is_missing(
    data: LogDir, other: OtherProcess
) -> None:
    other.call(append, "t", b"1")
    append(data, "t", b"2")
    data.delete_topic("t")
    with pytest.raises((logcore.LogFailedError, logcore.TopicNotFoundError)):
        other.call(append, "t", b"lost")
    create(data, "t")
    assert other.call(values, "t") == []
    assert other.call(append, "t", b"new") == 0
    assert values(data, "t") == [b"new"]


def test_topic_half_created_by_killed_process_can_be_created(
    data: LogDir, other: OtherProcess
) -> None:
    rows = read_topics(OS, data.path)
    write_topics(
        OS,
        data.path,
        [*rows, TopicEntry("half", new_id(OS), 2, {}, (0, 1), is_deleting=True)],
    )
    (Path(data.path) / "half-0").mkdir()
    assert data.topics() == ["t"]
    other.call(create, "half")
    assert append(data, "half", b"1") == 0
    assert other.call(values, "half") == [b"1"]


def values_without_refresh(data: LogDir, topic: str) -> list[bytes | None]:
    return [record.value for record in data.read(topic)]


def table_values(data: LogDir, topic: str) -> list[bytes | None]:
    return [*data.table(topic).values()]


def test_read_does_not_mix_records_of_recreated_topic(
    data: LogDir, other: OtherProcess
) -> None:
    """The second partition is opened after the topic was created again, the first one
    before. A read returned the first partition of the former topic.
    """
    for read in (values_without_refresh, table_values):
        other.call(append, "t", b"former")
        data.delete_topic("t")
        data.create_topic("t", 2)
        data.append("t", b"new", key=b"k", partition=1)
        assert [*other.call(read, "t")] == [b"new"]


def test_topic_half_deleted_by_killed_process_leaves_no_offsets(
    data: LogDir, other: OtherProcess
) -> None:
    with data.consumer(group_id="g") as consumer:
        consumer.assign([("t", 0)])
        consumer.commit({("t", 0): 5})
        rows = read_topics(OS, data.path)
        write_topics(
            OS,
            data.path,
            [
                attrs.evolve(row, is_deleting=row.name == "t" or row.is_deleting)
                for row in rows
            ],
        )
        assert "t" not in data.topics()
        other.call(create, "t")
        consumer.assign([("t", 0)])
        assert consumer.committed([("t", 0)]) == {("t", 0): None}


def test_deletion_finished_elsewhere_keeps_recreated_topic(
    data: LogDir, other: OtherProcess
) -> None:
    """The second process assumed that the deleting process was dead, finished the
    deletion, and created the topic again.
    """
    topic = data._registry.topic("t")
    data._registry.start_deleting(topic)
    data.host.close_logs({"t"})
    other.call(create, "t")
    assert other.call(append, "t", b"new") == 0
    data._registry.with_committed_offsets.discard("t")
    data.tick()
    assert other.call(values, "t") == [b"new"]
    assert values(data, "t") == [b"new"]


def test_killed_process_blocks_no_other_process(
    data: LogDir, other: OtherProcess
) -> None:
    other.call(append, "t", b"1")
    other.kill()
    assert append(data, "t", b"2") == 1
    assert values(data, "t") == [b"1", b"2"]


def test_exclusive_and_shared_opening_exclude_each_other(
    data: LogDir, other: OtherProcess
) -> None:
    path = data.path
    with pytest.raises(logcore.LogLockedError, match="another value of shared"):
        logcore.open_dir(path)
    data.close()
    # The other process shares the directory.
    with pytest.raises(logcore.LogLockedError, match="shared=True in both"):
        logcore.open_dir(path)
    other.end()
    with logcore.open_dir(path) as alone:
        assert values(alone, "t") == []
        with pytest.raises(logcore.LogLockedError):
            OtherProcess(Path(path))


def test_processes_with_different_durability_are_refused(
    data: LogDir, other: OtherProcess
) -> None:
    path = data.path
    other.call(append, "t", b"1")
    data.close()
    with (
        logcore.open_dir(path, shared=True, durability="os") as less_durable,
        pytest.raises(logcore.InvalidConfigError, match="durability"),
    ):
        append(less_durable, "t", b"2")


def test_stopped_process_without_the_write_lock_does_not_block_others(
    data: LogDir, other: OtherProcess
) -> None:
    other.call(append, "t", b"1")
    assert other.process.pid is not None
    os.kill(other.process.pid, signal.SIGSTOP)
    assert append(data, "t", b"2") == 1
    os.kill(other.process.pid, signal.SIGCONT)
    assert other.call(append, "t", b"3") == 2


def test_transaction_coordinator_excludes_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logcore.fs.byte_lock.LOCK_WAIT_SECONDS", 0)
    claim = claim_directory(OsFS(), str(tmp_path), "t-0", shared=True)
    other_fs = OsFS()
    handle = other_fs.open(str(tmp_path / ".lock"), write=True)
    with claim.deciding(), claim.deciding():
        assert not other_fs.lock_byte(handle, TRANSACTIONS_BYTE)
    assert other_fs.lock_byte(handle, TRANSACTIONS_BYTE)
    with pytest.raises(logcore.LogLockedError), claim.deciding():
        raise AssertionError("another process holds the lock of the coordinator")
    other_fs.close(handle)
    claim.release()


def test_exclusive_claim_needs_no_lock_of_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other process has the directory open."""
    fs = OsFS()
    claim = claim_directory(fs, str(tmp_path), "t-0")
    monkeypatch.setattr(fs, "lock_byte", None)
    with claim.deciding(), claim.deciding():
        assert not claim.is_shared
    claim.release()


def test_only_one_process_runs_timed_maintenance(tmp_path: Path) -> None:
    """The first process that calls runs_maintenance() does it, until it releases its
    claim.
    """
    claims = [
        claim_directory(OsFS(), str(tmp_path), "t-0", shared=True) for _ in range(2)
    ]
    assert [claim.runs_maintenance() for claim in claims] == [True, False]
    assert [claim.runs_maintenance() for claim in claims] == [True, False]
    claims[0].release()
    assert claims[1].runs_maintenance()
    claims[1].release()


def recreate(data: LogDir, topic: str) -> None:
    data.delete_topic(topic)
    data.create_topic(topic)
    data.append(topic, b"new", partition=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.alter_topic("u", {"retention.ms": "1000000"}),
        lambda data: data.add_partitions("u", 2),
        lambda data: data.delete_topic("u"),
        lambda data: data.create_topic("v"),
        lambda data: data.tick(),
    ],
    ids=["alter", "grow", "delete", "create", "tick"],
)
def test_recreated_topic_replaces_open_log_after_any_change(
    data: LogDir, other: OtherProcess, change: Callable[[LogDir], None]
) -> None:
    """A change of another topic reloaded the file of topics without comparing the open
    logs with it. The process then read deleted records, and its appends failed until it
    was restarted.
    """
    data.create_topic("u")
    data.append("t", b"old", partition=0)
    other.call(recreate, "t")
    change(data)
    assert [record.value for record in data.partition("t", 0).read(0)] == [b"new"]
    assert data.append("t", b"mine", partition=0).offset == 1


def test_append_to_deleted_topic_names_the_deletion(
    data: LogDir, other: OtherProcess
) -> None:
    log = data.partition("t", 0)
    log.append(b"old")
    other.call(LogDir.delete_topic, "t")
    with pytest.raises(logcore.LogcoreError, match="deleted"):
        log.append(b"late")


@pytest.mark.parametrize(
    ("operation", "code"), [("pread", errno.EIO), ("pwrite", errno.ENOSPC)]
)
def test_close_with_unusable_lock_record_releases_the_claim(
    operation: str, code: int
) -> None:
    """close() needed the record that could not be read, and kept the claim and the lock
    until the process ended.
    """
    disk = SimulatedDisk()
    directory = logcore.open_dir("/data", create=True, fs=disk, shared=True)
    for topic in ("a", "b"):
        directory.create_topic(topic)
        directory.append(topic, b"1", partition=0)
    disk.faults = FaultPlan(Fault(operation, code, path="*/a-0/*", times=None))
    with pytest.raises(logcore.LogcoreError):
        directory.close()
    disk.faults = None
    with logcore.open_dir("/data", fs=disk, shared=True) as again:
        assert [
            again.append(topic, b"2", partition=0).offset for topic in ("a", "b")
        ] == [1, 1]


@pytest.mark.long
def test_topic_of_open_transaction_deleted_elsewhere_stops_no_later_transaction(
    data: LogDir, other: OtherProcess
) -> None:
    """The markers of the first transaction could not be written, and every later
    transaction failed until tick().
    """
    data.create_topic("u")
    with data.producer(
        transactional_id="x", max_block_ms=2_000, delivery_timeout_ms=2_000
    ) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("t", b"1", partition=0).result(60)
        other.call(LogDir.delete_topic, "t")
        producer.commit_transaction()
        with producer.transaction():
            producer.send("u", b"2")
    assert [
        record.value
        for record in data.partition("u", 0).read(0, isolation="read_committed")
    ] == [b"2"]
