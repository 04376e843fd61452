"""logcore.logdir: topics and their settings, lazily opened partitions, the files that
Kafka expects, and crashes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import logcore
from logcore import recordbatch
from logcore.directory.topic_file import PartitionNumbers, id_text, parse_id
from logcore.errors import CorruptLogError, LogNotFoundError, TopicNotFoundError
from logcore.fs import OS, OsFS
from logcore.metadata import checkpoint
from logcore.testing import Fault, FaultPlan, SimulatedCrash, SimulatedDisk


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(tmp_path / "data")


def test_a_directory_keeps_topics_settings_and_records(data: str) -> None:
    with logcore.open_dir(data, create=True, config={"segment.ms": 1234}) as logdir:
        logdir.create_topic(
            "orders",
            partitions=3,
            config={"cleanup.policy": "compact", "retention.ms": 5},
        )
        logdir.create_topic("plain")
        receipt = logdir.partition("orders", 2).append(b"v", key=b"k")
        topic_id = logdir.topic_id("orders")
        assert logdir.partition("orders", 2).config.segment_ms == 1234
        assert logdir.partition("orders", 2).config.is_compacted
    with logcore.open_dir(data) as logdir:
        assert logdir.topics() == ["orders", "plain"]
        described = logdir.describe_topic("orders")
        assert [p.partition for p in described.partitions] == [0, 1, 2]
        assert [os.path.basename(p.path) for p in described.partitions] == [
            "orders-0",
            "orders-1",
            "orders-2",
        ]
        assert described.overrides == {"cleanup.policy": "compact", "retention.ms": "5"}
        assert described.config.retention_ms == 5
        assert described.topic_id == topic_id
        assert logdir.partition("orders", 2).get(receipt.offset).value == b"v"
        assert logdir.partition("orders", 2) is logdir.partition("orders", 2)


def test_repr_of_directory_lists_its_content(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        assert repr(logdir) == f"<LogDir {logdir.path} writing; no topics>"
        logdir.create_topics({f"t{number}": (2, None) for number in range(10)})
        logdir.append("t0", b"x", partition=1)
        assert "; t0, t1, " in repr(logdir), (
            "a log that is not open is not opened for this"
        )
        logdir.append("t0", b"y", partition=0)
        assert "; t0: 2 offsets, t1, " in repr(logdir)
        assert repr(logdir).endswith(", t7, 2 others>")
    assert "closed; t0, t1, " in repr(logdir)


def test_directory_has_the_files_of_kafka(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t", partitions=2)
        logdir.partition("t", 0).append_many([(None, b"x")] * 5)
        logdir.partition("t", 1)
        cluster = logdir.cluster_id
        topic_id = logdir.topic_id("t")
    properties = Path(data, "meta.properties").read_text()
    assert (
        "version=1\n" in properties
        and f"cluster.id={cluster}\n" in properties
        and "node.id=1\n" in properties
    )
    assert re.search(r"^directory.id=[\w-]{22}$", properties, re.M)
    for n in (0, 1):
        assert (
            Path(data, f"t-{n}", "partition.metadata").read_text()
            == f"version: 0\ntopic_id: {id_text(topic_id)}"
        )
    assert (
        Path(data, "recovery-point-offset-checkpoint").read_text()
        == "0\n2\nt 0 5\nt 1 0\n"
    )
    assert (
        Path(data, "replication-offset-checkpoint").read_text()
        == "0\n2\nt 0 5\nt 1 0\n"
    )
    assert (
        Path(data, ".kafka_cleanshutdown").read_text()
        == '{"version":0,"brokerEpoch":-1}'
    )
    with logcore.open_dir(data) as logdir:
        assert not Path(data, ".kafka_cleanshutdown").exists()
        assert logdir.cluster_id == cluster
    assert Path(data, ".kafka_cleanshutdown").exists()


def test_kafkas_own_properties_are_kept(data: str) -> None:
    os.mkdir(data)
    text = "#Mon Jan 01\ncluster.id=abcDEF\nnode.id=7\nversion=1\n"
    Path(data, "meta.properties").write_text(text)
    with logcore.open_dir(data) as logdir:
        assert (logdir.cluster_id, logdir.node_id) == ("abcDEF", 7)
    assert Path(data, "meta.properties").read_text() == text


def test_partitions_that_were_copied_in_are_topics(data: str, tmp_path: Path) -> None:
    with logcore.open(os.path.join(data, "copied-3"), create=True) as log:
        log.append(b"here")
    os.mkdir(os.path.join(data, "not a topic"))
    with logcore.open_dir(data) as logdir:
        assert logdir.topics() == ["copied"]
        assert logdir.partitions("copied") == (3,)
        assert logdir.partition("copied", 3).get(0).value == b"here"
        given_id = logdir.topic_id("copied")
        assert given_id.int
        with pytest.raises(logcore.TopicNotFoundError, match="no such partition"):
            logdir.partition("copied", 0)
    with logcore.open_dir(data) as logdir:
        assert logdir.topic_id("copied") == given_id


def test_one_writer_many_readers(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t")
        logdir.partition("t", 0).append(b"1")
        with pytest.raises(logcore.LogLockedError):
            logcore.open_dir(data)
        with logcore.open_dir(data, read_only=True) as reading:
            assert [r.value for r in reading.partition("t", 0).read(0)] == [b"1"]
            with pytest.raises(logcore.ReadOnlyLogError):
                reading.create_topic("u")
            logdir.create_topic("u")
            assert "u" not in reading
            reading.refresh()
            assert "u" in reading


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a b", "ü", "x" * 250, "a\0", 5, None]
)
def test_invalid_names_are_refused_before_any_change(data: str, name: Any) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        before = sorted(os.listdir(data))
        with pytest.raises(logcore.InvalidNameError):
            logdir.create_topic(name)
        assert sorted(os.listdir(data)) == before


def test_topic_names_that_collide_in_kafka_are_refused(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("a.b")
        with pytest.raises(logcore.InvalidNameError, match=r"a\.b"):
            logdir.create_topic("a_b")
        with pytest.raises(logcore.InvalidNameError):
            logdir.create_topics({"c.d": (1, None), "c_d": (1, None)})
        assert logdir.topics() == ["a.b"]


@pytest.mark.parametrize(
    ("partitions", "config"),
    [
        (0, {}),
        (-1, {}),
        (100_001, {}),
        ("2", {}),
        (1, {"retention.msx": 1}),
        (1, {"retention.ms": "soon"}),
    ],
)
def test_invalid_topics_create_nothing(data: str, partitions: Any, config: Any) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        with pytest.raises(logcore.InvalidConfigError):
            logdir.create_topics({"fine": (1, None), "bad": (partitions, config)})
        assert logdir.topics() == []
        assert not [
            name for name in os.listdir(data) if os.path.isdir(os.path.join(data, name))
        ]


def test_missing_or_existing_topic_raises(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t", partitions=2)
        with pytest.raises(logcore.TopicExistsError):
            logdir.create_topic("t")
        for act in (
            logdir.delete_topic,
            logdir.describe_topic,
            logdir.partitions,
            logdir.topic_id,
        ):
            with pytest.raises(logcore.TopicNotFoundError):
                act("u")
        with pytest.raises(logcore.TopicNotFoundError):
            logdir.partition("t", 2)
        with pytest.raises(logcore.InvalidConfigError, match="3 to"):
            logdir.add_partitions("t", 2)
        logdir.add_partitions("t", 4)
        assert logdir.partitions("t") == (0, 1, 2, 3)
        logdir.partition("t", 3).append(b"new")


def test_settings_reach_open_logs_and_are_stored(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t", config={"max.message.bytes": 1000})
        log = logdir.partition("t", 0)
        with pytest.raises(logcore.RecordTooLargeError):
            log.append(b"x" * 2000)
        logdir.alter_topic("t", {"max.message.bytes": 5000, "segment.bytes": 3000})
        log.append(b"x" * 2000)
        log.append(b"x" * 2000)
        assert log.statistics().rolls == 1
        logdir.alter_topic("t", {"max.message.bytes": None})
        log.append(b"x" * 2900)
        with pytest.raises(logcore.InvalidConfigError):
            logdir.alter_topic("t", {"retention.ms": 1, "segment.bytes": "many"})
        with pytest.raises(logcore.InvalidConfigError, match="did you mean"):
            logdir.alter_topic("t", {"retention.m": None})
        assert logdir.describe_topic("t").overrides == {"segment.bytes": "3000"}
    with logcore.open_dir(data) as logdir:
        assert logdir.describe_topic("t").overrides == {"segment.bytes": "3000"}


def test_deleting_a_topic_removes_its_files(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t", partitions=2, config={"segment.bytes": 2000})
        logdir.create_topic("tt")
        log = logdir.partition("t", 1)
        for n in range(100):
            log.append(b"%d" % n * 100)
        reading = log.read(0)
        first = next(reading)
        old_id = logdir.topic_id("t")
        logdir.delete_topic("t")
        assert logdir.topics() == ["tt"]
        assert sorted(
            name for name in os.listdir(data) if os.path.isdir(os.path.join(data, name))
        ) == ["tt-0"]
        assert first.value == b"0" * 100
        with pytest.raises(logcore.OffsetOutOfRangeError, match="removed"):
            list(reading)
        with pytest.raises(logcore.LogClosedError):
            log.append(b"late")
        logdir.create_topic("t")
        assert logdir.topic_id("t") != old_id
        assert logdir.partition("t", 0).log_end_offset == 0
    text = Path(data, "recovery-point-offset-checkpoint").read_text()
    assert "t 1" not in text.splitlines()


def test_flush_messages(data: str) -> None:
    with logcore.open_dir(data, create=True, durability="os") as logdir:
        logdir.create_topic("t", config={"flush.messages": 3})
        log = logdir.partition("t", 0)
        for _ in range(7):
            log.append(b"v")
        assert log.statistics().syncs == 2


def test_partition_that_stores_batches_of_clients_takes_little_memory(
    data: str,
) -> None:
    partitions = 50
    batch = recordbatch.encode([(None, b"v")], now_ms=1_000)
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t", partitions + 1)
        logdir.partition("t", partitions).append_batch(batch)
        tracemalloc.start()
        try:
            for number in range(partitions):
                logdir.partition("t", number).append_batch(batch)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert held < partitions * 32 * 1024


def test_partitions_are_opened_by_many_threads_once(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t", partitions=4)
        seen: list[Any] = []
        threads = [
            threading.Thread(
                target=lambda n=n: seen.append(logdir.partition("t", n % 4))
            )
            for n in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(log) for log in seen}) == 4


@pytest.mark.parametrize("flip", range(0, 200, 7))
def test_damaged_topic_file_is_refused(data: str, flip: int) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t", partitions=2, config={"retention.ms": 123456})
        logdir.create_topic("u", partitions=2, config={"retention.ms": 123456})
    path = Path(data, "logcore.topics")
    content = bytearray(path.read_bytes())
    content[flip % len(content)] ^= 1 << flip % 8
    path.write_bytes(content)
    for read_only in (True, False):
        try:
            with logcore.open_dir(data, read_only=read_only) as logdir:
                assert logdir.describe_topic("t").overrides == {
                    "retention.ms": "123456"
                }
        except logcore.CorruptLogError as error:
            assert "logcore.topics" in str(error)


def _check_reader_sees_complete_topics(disk: SimulatedDisk) -> None:
    """Check that a reader, which opens the directory without repairing anything, finds
    only complete topics.
    """
    whole = {
        "t": {(0, 1), (0, 1, 2, 3, 4)},
        "stays": {(0,)},
        "new": {(0, 1, 2)},
        "copy": {(0, 1)},
    }
    with logcore.open_dir("/d", read_only=True, fs=disk) as reader:
        for topic in reader.topics():
            assert reader.partitions(topic) in whole[topic]
            for number in reader.partitions(topic):
                # A fork whose start offset was not saved yet exposed records that had
                # been deleted.
                first = 1 if topic in ("t", "copy") and number == 0 else 0
                assert reader.partition(topic, number).log_start_offset == first


def _change(logdir: logcore.LogDir, act: str) -> None:
    if act == "create":
        logdir.create_topic("new", partitions=3, config={"retention.ms": 9})
    elif act == "delete":
        logdir.delete_topic("t")
    elif act == "grow":
        logdir.add_partitions("t", 5)
    elif act == "fork":
        logdir.fork("t", None, "copy")
    else:
        logdir.alter_topic("t", {"retention.ms": 9})


def _is_whole_or_not_at_all(disk: SimulatedDisk, act: str) -> None:
    with logcore.open_dir("/d", fs=disk) as logdir:
        assert logdir.describe_topic("stays").overrides == {"retention.ms": "7"}
        if act == "create" and "new" in logdir:
            assert logdir.partitions("new") == (0, 1, 2)
            assert logdir.describe_topic("new").overrides == {"retention.ms": "9"}
            assert logdir.partition("new", 2).append(b"x").offset == 0
        if "copy" in logdir:
            assert act == "fork"
            assert [record.value for record in logdir.partition("copy", 0).read(1)] == [
                b"kept"
            ]
        if "t" in logdir:
            assert logdir.partition("t", 0).get(1).value == b"kept"
            assert logdir.partitions("t") in ((0, 1), (0, 1, 2, 3, 4))
        else:
            assert act == "delete"
            assert not [name for name in disk.listdir("/d") if name.startswith("t-")]


@pytest.mark.long
@pytest.mark.parametrize("limit", [3, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("act", ["create", "delete", "grow", "alter", "fork"])
def test_topic_changes_are_atomic_after_a_crash_anywhere(act: str, limit: int) -> None:
    """`limit` is the number of checked disk states of each crash. The first state is the
    disk after the process was killed.
    """
    for stop in itertools.count():
        disk = SimulatedDisk()
        with logcore.open_dir("/d", create=True, fs=disk) as logdir:
            logdir.create_topic("t", partitions=2)
            logdir.create_topic("stays", config={"retention.ms": 7})
            logdir.partition("t", 0).append(b"gone")
            logdir.partition("t", 0).append(b"kept")
            logdir.partition("t", 0).delete_records(1)
        logdir = logcore.open_dir("/d", fs=disk)
        disk.crash_in(stop)
        try:
            _change(logdir, act)
        except SimulatedCrash:
            for at, state in enumerate(disk.after_crash(limit=limit)):
                if at == 0:
                    _check_reader_sees_complete_topics(state)
                _is_whole_or_not_at_all(state, act)
            continue
        disk.crash_in(None)
        logdir.close()
        assert stop > 2
        return


def test_a_thousand_partitions_write_each_checkpoint_once_when_closed(
    data: str, monkeypatch: Any
) -> None:
    logdir = logcore.open_dir(data, create=True, durability="os")
    logdir.create_topic("t", partitions=50)
    for n in range(50):
        logdir.partition("t", n).append(b"v")
    written: list[str] = []
    real = checkpoint.write
    monkeypatch.setattr(
        checkpoint,
        "write",
        lambda fs, d, name, c, **how: (
            written.append(name),
            real(fs, d, name, c, **how),
        )[1],
    )
    logdir.close()
    assert written.count(checkpoint.RECOVERY_POINT) == 1
    assert len(checkpoint.read_offsets(OS, data, checkpoint.RECOVERY_POINT)) == 50


@given(st.uuids())
def test_ids_as_text(value: Any) -> None:
    assert parse_id(id_text(value)) == value and len(id_text(value)) == 22


def test_closed_directory_raises(data: str) -> None:
    logdir = logcore.open_dir(data, create=True)
    logdir.create_topic("t")
    logdir.close()
    logdir.close()
    for act in (logdir.topics, logdir.tick, lambda: logdir.create_topic("u")):
        with pytest.raises(logcore.LogClosedError):
            act()
    with pytest.raises(logcore.LogNotFoundError):
        logcore.open_dir(data + "x")
    with pytest.raises(logcore.InvalidConfigError):
        logcore.open_dir(data, create=True, read_only=True)


# -- what went wrong once --------------------------------------------------------------


@pytest.mark.long
def test_topic_can_be_created_again_after_interrupted_deletion() -> None:
    for stop in itertools.count():
        disk = SimulatedDisk()
        with logcore.open_dir("/d", create=True, fs=disk) as logdir:
            logdir.create_topic("t", partitions=2)
            logdir.partition("t", 1).append_many([(None, b"old")] * 100)
        logdir = logcore.open_dir("/d", fs=disk)
        disk.crash_in(stop)
        try:
            logdir.delete_topic("t")
        except SimulatedCrash:
            for state in disk.after_crash(limit=3):
                _create_again(state)
            continue
        disk.crash_in(None)
        logdir.close()
        assert stop > 2
        return


def _create_again(disk: SimulatedDisk) -> None:
    with logcore.open_dir("/d", fs=disk) as logdir:
        if "t" in logdir:
            assert logdir.partition("t", 1).log_end_offset == 100
            logdir.delete_topic("t")
        logdir.create_topic("t", partitions=3)
        assert [logdir.partition("t", n).append(b"new").offset for n in range(3)] == [
            0,
            0,
            0,
        ]


def test_failed_deletion_is_retried_and_reserves_the_name(data: str) -> None:
    fs = OsFS()
    with logcore.open_dir(data, create=True, fs=fs) as logdir:
        logdir.create_topic("t", partitions=2)
        logdir.partition("t", 0).append(b"old record")
        real = fs.rename

        def refuse(source: str, target: str) -> None:
            if target.endswith("-delete"):
                raise logcore.DiskFullError("no space")
            real(source, target)

        fs.rename = refuse  # type: ignore[method-assign]
        with pytest.raises(logcore.DiskFullError):
            logdir.delete_topic("t")
        assert "t" not in logdir
        with pytest.raises(logcore.TopicExistsError, match="being deleted"):
            logdir.create_topic("t")
        logdir.tick()
        fs.rename = real  # type: ignore[method-assign]
        logdir.tick()
        logdir.create_topic("t")
        assert logdir.partition("t", 0).log_end_offset == 0


def test_failed_creation_leaves_nothing(data: str) -> None:
    fs = OsFS()
    with logcore.open_dir(data, create=True, fs=fs) as logdir:
        real = fs.mkdir

        def refuse(path: str) -> None:
            if path.endswith("t-2"):
                raise logcore.DiskFullError("no space")
            real(path)

        fs.mkdir = refuse  # type: ignore[method-assign]
        with pytest.raises(logcore.DiskFullError):
            logdir.create_topics({"t": (4, None), "u": (1, None)})
        assert logdir.topics() == []
        logdir.create_topic("u")
        with pytest.raises(logcore.DiskFullError):
            logdir.create_topic("t", 3)
        fs.mkdir = real  # type: ignore[method-assign]
        logdir.create_topic("t", 3)
        fs.mkdir = refuse  # type: ignore[method-assign]
        assert logdir.partition("t", 2).append(b"v").offset == 0
    with logcore.open_dir(data) as logdir:
        assert logdir.topics() == ["t", "u"]


def test_producer_ids_start_above_ids_found_in_logs(data: str) -> None:
    """A directory that Kafka wrote has no file of producer ids. If an id were assigned
    again, a batch with it would look like a retry.
    """

    def batch(producer_id: int) -> bytes:
        return recordbatch.encode(
            [(None, b"v", (), OS.now_ms())], producer_id=producer_id, base_sequence=0
        )

    name = os.path.join(data, checkpoint.PRODUCER_IDS)
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t", 2)
        logdir.partition("t", 0).append_batch(batch(4))
        logdir.partition("t", 1).append_batch(batch(7))
        # The library never assigns this id, but any client may write it.
        logdir.partition("t", 1).append_batch(batch(2**63 - 1))
    with logcore.open_dir(data) as logdir:
        assert not os.path.exists(name), "opening allocates no producer ids"
        assert logdir.host.next_producer_id() == 8
        stored = logdir.partition("t", 1).log_end_offset
        assert logdir.partition("t", 1).append_batch(batch(8)).offset == stored
        with logdir.producer(transactional_id="x", threaded=False) as producer:
            producer.init_transactions()
        (transaction,) = logdir.transactions().values()
        given = transaction.producer_id
    os.remove(name)
    with logcore.open_dir(data) as logdir:
        assert logdir.host.next_producer_id() == given + 1, (
            "it has written nothing but the record of its transactional id"
        )
    with logcore.open_dir(data) as logdir:
        logdir.partition("t", 0).append_batch(batch(5_000))
        assert logdir.host.next_producer_id() == given + 1 + 1_000, (
            "the file of producer ids decides if it exists"
        )


def test_log_with_unknown_producers_is_reported(
    data: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writer: object) -> NoReturn:
        raise logcore.StorageReadError("cannot be read", path="t-0")

    monkeypatch.setattr("logcore.coordinators.orphans.producers_of", fail)
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t")
        assert logdir.host.next_producer_id() == 0
    assert (
        "t-0 cannot be read: a new producer may get the id of an earlier producer"
        in caplog.text
    )


def test_a_forked_child_changes_nothing(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t")
        pid = os.fork()
        if pid == 0:
            refused = 0
            for act in (
                lambda: logdir.create_topic("u"),
                lambda: logdir.delete_topic("t"),
                logdir.host.next_producer_id,
            ):
                try:
                    act()
                except logcore.ForkedWriterError:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert logdir.topics() == ["t"]


def test_log_open_for_writing_elsewhere_is_not_deleted(
    data: str,
) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t")
        with logcore.open(os.path.join(data, "t-0")) as log:
            with pytest.raises(logcore.LogLockedError):
                logdir.delete_topic("t")
            log.append(b"kept")
        assert logdir.partition("t", 0).get(0).value == b"kept"
        logdir.delete_topic("t")


def test_names_that_differ_by_case_are_refused(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("Orders")
        with pytest.raises(logcore.InvalidNameError, match="case"):
            logdir.create_topic("orders")


def test_time_settings_apply_to_the_active_segment(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t", config={"segment.ms": 1_000})
        log = logdir.partition("t", 0)
        log.append(b"v", timestamp_ms=10_000)
        logdir.alter_topic("t", {"segment.ms": 100_000})
        log.append(b"v", timestamp_ms=50_000)
        assert log.statistics().rolls == 0
        logdir.alter_topic("t", {"segment.ms": 100})
        log.append(b"v", timestamp_ms=50_001)
        assert log.statistics().rolls == 1


@pytest.mark.parametrize("change", ["truncate", "delete"])
def test_stale_recovery_point_is_not_saved_above_the_end(
    change: str,
) -> None:
    """If the recovery point were above the end, the log could not be opened."""
    disk = SimulatedDisk()
    with logcore.open_dir("/d", create=True, fs=disk) as logdir:
        logdir.create_topic("t")
        log = logdir.partition("t", 0)
        log.append_many([(None, b"v")] * 10)
        log.host.writer.progress.recovered_ms -= 60_000
        _, point = log.host.maintenance.tick_without_recovery_point()
        assert point == 10
        if change == "truncate":
            log.truncate(3)
        else:
            logdir.delete_topic("t")
            logdir.create_topic("t")
            logdir.partition("t", 0).append(b"new")
        logdir._maintenance._save_recovery_points([(("t", 0), log, point)])
        assert (
            checkpoint.read_offsets(disk, "/d", checkpoint.RECOVERY_POINT).get(
                ("t", 0), 0
            )
            <= 3
        )
        disk.kill()
    with logcore.open_dir("/d", fs=disk) as logdir:
        assert logdir.partition("t", 0).log_end_offset == (
            3 if change == "truncate" else 1
        )


def test_path_that_no_file_system_allows_is_refused(data: str) -> None:
    for path in (data + "\0", data + "\ud800"):
        with pytest.raises(logcore.InvalidNameError):
            logcore.open_dir(path, create=True)


def test_partition_with_missing_directory_is_not_recreated() -> None:
    """The checkpoint proves that the partition had records. If the partition were created
    again, other records would get their offsets.
    """
    disk = SimulatedDisk()
    with logcore.open_dir("/d", create=True, fs=disk) as logdir:
        logdir.create_topic("t", partitions=2)
        for number in (0, 1):
            logdir.partition("t", number).append(b"x")
    disk = SimulatedDisk(
        {
            path: content
            for path, content in disk.files().items()
            if not path.startswith("/d/t-1")
        }
    )
    for _ in range(2):
        with logcore.open_dir("/d", fs=disk) as logdir:
            with pytest.raises(logcore.CorruptLogError, match="directory is missing"):
                logdir.partition("t", 1)
            disk.advance(1_000_000)
            logdir.tick()
            assert logdir.partition("t", 0).append(b"y").offset > 0
            assert [report.is_sound for report in logdir.scrub()] == [True, False]
    with logcore.open_dir("/d", fs=disk) as logdir:
        logdir.delete_topic("t")
        assert logdir.topics() == []


HOSTILE_ID = "AAAAAAAAAAAAAAAAAAAAAQ"


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(
    "rows",
    [
        [
            {
                "topic": "../victim/home",
                "id": HOSTILE_ID,
                "partitions": 1,
                "deleting": True,
            }
        ],
        [{"topic": "../victim/made", "id": HOSTILE_ID, "partitions": 1}],
        [{"topic": "/victim", "id": HOSTILE_ID, "partitions": 1}],
        [{"topic": "t", "id": HOSTILE_ID, "partitions": 3_000_000_000}],
        [{"topic": "t", "id": HOSTILE_ID, "partitions": 1, "adding": 3_000_000_000}],
        [
            {"topic": f"t{number}", "id": HOSTILE_ID, "partitions": 100_000}
            for number in range(11)
        ],
        [{"topic": "t", "id": HOSTILE_ID, "partitions": -4}],
        [{"topic": "t", "id": HOSTILE_ID, "partitions": True}],
        [{"topic": "t", "id": HOSTILE_ID, "partitions": "1"}],
        [{"topic": "t", "id": HOSTILE_ID}],
        [{"topic": "t", "partitions": 1}],
        [{"topic": "t", "id": "?", "partitions": 1}],
        [{"topic": "t", "id": 7, "partitions": 1}],
        [{"topic": 5, "id": HOSTILE_ID, "partitions": 1}],
        [{"id": HOSTILE_ID, "partitions": 1}],
        [{"topic": "t", "id": HOSTILE_ID, "partitions": 1, "config": [1]}],
        [
            {
                "topic": "t",
                "id": HOSTILE_ID,
                "partitions": 1,
                "config": {"retention.ms": {}},
            }
        ],
        [{"topic": "t", "id": HOSTILE_ID, "partitions": 1}] * 2,
        [7],
    ],
)
def test_a_hostile_file_of_topics_has_no_effect(
    tmp_path: Path, rows: list[Any], read_only: bool
) -> None:
    """Names from the file were used as paths, and counts from it as sizes of memory.
    Wrong types raised errors other than LogcoreError.
    """
    (tmp_path / "victim" / "home-0").mkdir(parents=True)
    data = tmp_path / "data"
    (data / "x-0").mkdir(parents=True)
    (data / "logcore.topics").write_bytes(checkpoint.pack_topics(rows))
    with pytest.raises(CorruptLogError, match="content that no program writes"):
        logcore.open_dir(data, read_only=read_only)
    assert sorted(os.listdir(tmp_path / "victim")) == ["home-0"]
    assert set(os.listdir(data)) <= {
        "x-0",
        "logcore.topics",
        "meta.properties",
        ".lock",
        "logcore.reserve",
    }


def test_links_inside_a_directory_are_not_followed(tmp_path: Path) -> None:
    """The targets of links were removed, renamed and written to, with the rights of the
    user who opened the directory.
    """
    victim = tmp_path / "victim"
    data = tmp_path / "data"
    victim.mkdir()
    (victim / "precious").touch()
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t", 2)
    shutil.rmtree(data / "t-0")
    for name in ("t-0", "new-0", "other-0", "x." + "0" * 32 + "-delete"):
        (data / name).symlink_to(victim)
    with logcore.open_dir(data) as logdir:
        assert logdir.topics() == ["t"]
        for call in (
            lambda: logdir.partition("t", 0),
            lambda: logdir.create_topic("new"),
        ):
            with pytest.raises(
                CorruptLogError, match="links inside a log directory are not followed"
            ):
                call()
        logdir.partition("t", 1).append(b"x")
        logdir.delete_topic("t")
    with logcore.open_dir(data, read_only=True) as logdir:
        assert logdir.topics() == []
    assert os.listdir(victim) == ["precious"]


def test_failed_topic_creation_keeps_existing_partition(data: str) -> None:
    """Undoing the failed creation of a topic deleted the records of a partition that
    already existed at its path.
    """
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t")
        logdir.partition("t", 0).append(b"kept")
        for name in ("late-1", "t-1"):
            shutil.copytree(os.path.join(data, "t-0"), os.path.join(data, name))
        for call in (
            lambda: logdir.create_topic("late", 2),
            lambda: logdir.add_partitions("t", 2),
        ):
            with pytest.raises(CorruptLogError, match="new partition contains records"):
                call()
        assert logdir.topics() == ["t"]
    for name in ("late-1", "t-1"):
        assert os.path.exists(os.path.join(data, name, f"{0:020d}.log"))


@pytest.mark.parametrize("read_only", [True, False])
def test_other_directory_is_not_opened_as_log_directory(
    tmp_path: Path, read_only: bool
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("orders")
        logdir.partition("orders", 0).append(b"x")
    with pytest.raises(LogNotFoundError, match="directory of one partition"):
        logcore.open_dir(tmp_path / "data" / "orders-0", read_only=read_only)
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter").touch()
    with pytest.raises(LogNotFoundError, match="not a log directory"):
        logcore.open_dir(other, read_only=read_only)
    with logcore.open_dir(other, create=True) as logdir:
        assert logdir.topics() == []


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(
    "left", [checkpoint.RESERVE, checkpoint.META_PROPERTIES + ".tmp"]
)
def test_directory_with_interrupted_creation_opens_without_topics(
    tmp_path: Path, left: str, read_only: bool
) -> None:
    (tmp_path / left).write_bytes(b"")
    with logcore.open_dir(tmp_path, read_only=read_only) as logdir:
        assert logdir.topics() == []


def test_other_directory_is_not_opened_as_log(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("orders")
    for path, says in (
        (tmp_path / "data", "directory of partitions"),
        (tmp_path, "not a partition directory"),
    ):
        with pytest.raises(LogNotFoundError, match=says):
            logcore.open(path, read_only=True)
    with logcore.open(tmp_path / "data" / "orders-0", read_only=True) as log:
        assert list(log.read(0)) == []
    (tmp_path / "new-0").mkdir()
    logcore.open(tmp_path / "new-0", read_only=True).close()


def test_missing_topic_error_suggests_similar_name(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("orders")
        with pytest.raises(TopicNotFoundError, match="did you mean 'orders'") as caught:
            logdir.partition("order", 0)
        assert "None" not in str(caught.value)
        with pytest.raises(TopicNotFoundError) as caught:
            logdir.partition("something else", 0)
        assert "did you mean" not in str(caught.value)


# -- a full disk -----------------------------------------------------------------------


def _filled(**more: Any) -> tuple[SimulatedDisk, Any]:
    disk = SimulatedDisk(capacity_bytes=200_000, **more)
    settings = {"segment.bytes": 8000, "retention.ms": -1, "file.delete.delay.ms": 0}
    logdir = logcore.open_dir("data", create=True, fs=disk, config=settings)
    for topic in ("t", "u"):
        logdir.create_topic(topic)
    logdir.partition("u", 0).append(b"small")
    for size in (2000, 100, 1):
        with contextlib.suppress(logcore.DiskFullError):
            while True:
                logdir.partition("t", 0).append(b"x" * size)
    # Other programs fill the rest of the disk, to the last byte.
    for path in (
        "/data/t-0/fill",
        "/data/u-0/fill",
    ):
        handle = disk.open(path, write=True, create=True)
        with contextlib.suppress(logcore.DiskFullError):
            disk.pwrite(handle, bytes(disk.free_bytes("/")), 0)
        disk.close(handle)
    assert disk.free_bytes("/") == 0
    return disk, logdir


@pytest.mark.parametrize("how", ["delete_records", "retain", "delete_topic"])
def test_deletion_works_on_a_full_disk(how: str) -> None:
    """A deletion first writes a file, for which the disk had no space."""
    disk, logdir = _filled()
    log = logdir.partition("t", 0)
    with pytest.raises(logcore.DiskFullError):
        log.append(b"x" * 1000)
    if how == "delete_records":
        log.delete_records(log.high_watermark // 2)
    elif how == "retain":
        assert log.retain(segments=5) == 5
    else:
        logdir.delete_topic("t")
        assert logdir.topics() == ["u"]
    logdir.tick()
    left = "u" if how == "delete_topic" else "t"
    for _ in range(3):
        logdir.partition(left, 0).append(b"x" * 1000)
    logdir.close()
    assert "/data/logcore.reserve" in disk.files(), "the reserve was created again"


def test_a_directory_on_a_full_disk_is_closed_and_opened_by_any_policy() -> None:
    """close() stopped at the first file that did not fit, and left every log open and
    locked until the process ended.
    """
    disk, logdir = _filled()
    end = logdir.partition("t", 0).log_end_offset
    logdir.close()
    for durability in ("os", "group", "always", "os"):
        with logcore.open_dir("data", fs=disk, durability=durability) as logdir:
            assert logdir.partition("t", 0).log_end_offset == end
            assert logdir.partition("u", 0).get(0).value == b"small"


@pytest.mark.parametrize(
    "operation", ["pwrite", "fsync", "rename", "unlink", "sync_dir"]
)
def test_close_releases_everything_when_any_operation_fails(operation: str) -> None:
    disk = SimulatedDisk()
    for number in range(3):
        logdir = logcore.open_dir("data", create=True, fs=disk)
        for topic in {"a", "b"} - set(logdir.topics()):
            logdir.create_topic(topic)
        logs = [logdir.partition(topic, 0) for topic in ("a", "b")]
        for log in logs:
            log.append(b"x")
        disk.faults = FaultPlan(
            Fault(operation, errno.EIO, times=None if number else 1)
        )
        with contextlib.suppress(logcore.LogcoreError):
            logdir.close()
        disk.faults = None
        assert all(log.is_closed for log in logs)
    with logcore.open_dir("data", fs=disk) as logdir:
        assert [logdir.partition(topic, 0).log_end_offset for topic in ("a", "b")] == [
            3,
            3,
        ]


@pytest.mark.long
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_start_offset_is_durable_before_deletion_on_full_disk(step: int) -> None:
    """The reserve file becomes the checkpoint. A crash in between leaves the old start
    offset or the new one, and no hole.
    """
    disk, logdir = _filled()
    logdir.close()
    files = disk.files()
    seen = set()
    for at in range(1, 400, step):
        disk = SimulatedDisk(
            files, capacity_bytes=200_000, faults=FaultPlan(Fault("*", "crash", at=at))
        )
        with (
            contextlib.suppress(SimulatedCrash),
            logcore.open_dir("data", fs=disk) as logdir,
        ):
            log = logdir.partition("t", 0)
            middle = log.log_end_offset // 2
            log.delete_records(middle)
        if not disk.faults.hits:
            break
        for left in disk.after_crash(limit=3):
            with logcore.open_dir("data", fs=left) as logdir:
                log = logdir.partition("t", 0)
                seen.add(log.log_start_offset)
                assert [
                    record.offset for record in log.read(log.log_start_offset)
                ] == list(range(log.log_start_offset, log.log_end_offset))
    assert seen == {0, middle}


def test_two_threads_that_need_the_reserve_do_not_write_to_one_file() -> None:
    """At each step of the first thread, the second thread does all of its work."""

    class Other(FaultPlan):
        def __init__(self, disk: SimulatedDisk, at: int) -> None:
            super().__init__()
            self.disk = disk
            self.left = at

        def action_for(self, operation: str, path: str) -> Any:
            self.left -= 1
            if self.left == 0:
                with contextlib.suppress(logcore.DiskFullError):
                    checkpoint.write(self.disk, "/d", "y", b"y" * 30, reserve="/d")
            return super().action_for(operation, path)

    for at in range(1, 100):
        disk = SimulatedDisk({"/d/x": b"old", "/d/y": b"old"})
        checkpoint.create_reserve(disk, "/d")
        disk.capacity_bytes = sum(
            len(content or b"") for content in disk.files().values()
        )
        disk.faults = plan = Other(disk, at)
        with contextlib.suppress(logcore.DiskFullError):
            checkpoint.write(disk, "/d", "x", b"x" * 30, reserve="/d")
        disk.faults = None
        files = disk.files()
        assert files["/d/x"] in (b"old", b"x" * 30) and files["/d/y"] in (
            b"old",
            b"y" * 30,
        )
        if plan.left > 0:
            break
    assert at > 10 and files["/d/x"] == b"x" * 30


def test_a_file_that_only_has_the_name_of_the_reserve_is_not_written_to() -> None:
    """After a crash two names may refer to one file, and that file may be the current
    checkpoint.
    """
    disk = SimulatedDisk(
        {"/d/logcore.reserve": b"0\n1\nt 0 5\n", "/d/x": b"old"}, capacity_bytes=20
    )
    with pytest.raises(logcore.DiskFullError):
        checkpoint.write(disk, "/d", "x", b"n" * 30, reserve="/d")
    assert disk.files() == {"/d/logcore.reserve": b"0\n1\nt 0 5\n", "/d/x": b"old"}


def test_scrub_continues_after_a_log_that_cannot_be_opened(data: str) -> None:
    with logcore.open_dir(data, create=True, config={"segment.bytes": 300}) as logdir:
        for topic in ("a", "b", "c"):
            logdir.create_topic(topic)
            for _ in range(9):
                logdir.partition(topic, 0).append(b"x" * 50)
    shutil.rmtree(os.path.join(data, "b-0"))
    for topic in ("a", "c"):
        path = Path(data, f"{topic}-0", f"{0:020d}.log")
        raw = bytearray(path.read_bytes())
        raw[70] ^= 1
        path.write_bytes(raw)
    with logcore.open_dir(data) as logdir:
        reports = {os.path.basename(report.path): report for report in logdir.scrub()}
    assert [reports[name].is_sound for name in ("a-0", "b-0", "c-0")] == [
        False,
        False,
        False,
    ]
    assert "is missing" in str(reports["b-0"])


class Counted(int):
    """A number that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) < other

    def __gt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) > other

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


@given(
    st.sets(st.integers(0, 50)),
    st.one_of(st.integers(-1, 51), st.floats(), st.none(), st.text(), st.booleans()),
)
def test_partition_numbers_contain_the_same_values_as_a_tuple(values, candidate):
    numbers = PartitionNumbers(sorted(values))
    assert (candidate in numbers) == (candidate in tuple(numbers))
    assert (np.int64(7) in numbers) == (7 in numbers)


def test_partition_is_found_by_binary_search():
    disk = SimulatedDisk({"/d": None})
    with logcore.open_dir("/d", fs=disk) as logdir:
        logdir.create_topic("wide", 500)
        found = [logdir.partitions("wide")]
        logdir.add_partitions("wide", 1_000)
        found.append(logdir.partitions("wide"))
    with logcore.open_dir("/d", read_only=True, fs=disk) as reader:
        found.append(reader.partitions("wide"))
    for numbers in found:
        Counted.compared = 0
        assert Counted(400) in numbers
        assert 0 < Counted.compared < 20


def test_removed_directory_raises_errors_of_the_library_only(tmp_path: Path) -> None:
    """After another program had removed the directory, methods and close() raised a
    bare FileNotFoundError.
    """
    data = logcore.open_dir(tmp_path / "data", create=True)
    data.create_topic("t")
    data.append("t", b"x", partition=0)
    log = data.partition("t", 0)
    shutil.rmtree(tmp_path / "data")
    calls: list[Callable[[], object]] = [
        data.tick,
        data.refresh,
        data.space,
        data.host.next_producer_id,
        log.roll,
        log.flush,
        log.scrub,
        log.retain,
        lambda: log.truncate(0),
        lambda: log.delete_records(1),
        lambda: log.reconfigure({}),
        lambda: data.create_topic("u"),
        lambda: data.alter_topic("t", {"retention.ms": "1"}),
        lambda: data.add_partitions("t", 2),
        lambda: data.size_bytes("t", 0),
        lambda: data.snapshot(tmp_path / "backup"),
        lambda: data.fork("t", None, "v"),
        lambda: data.consumer(group_id="g"),
        lambda: data.delete_topic("t"),
    ]
    failed = 0
    for call in calls:
        try:
            call()
        except logcore.LogcoreError:
            failed += 1
    assert failed > 5
    with pytest.raises(logcore.LogcoreError, match="removed"):
        data.close()
    logcore.open_dir(tmp_path / "data", create=True).close()
