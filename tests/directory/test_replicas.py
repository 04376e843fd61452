"""Directories of brokers in a cluster, which contain some partitions of each topic."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import (
    CorruptLogError,
    InvalidConfigError,
    Log,
    LogDir,
    NotLeaderError,
    TopicExistsError,
    TopicNotFoundError,
)
from logcore.errors import ProducerStateError
from logcore.metadata.filenames import TRANSACTIONS_TOPIC
from logcore.partition.coordinator_append import append_atomically
from logcore.partition.replication import begin_to_follow
from logcore.testing import SimulatedDisk, explore
from logcore.testing.explore import Promiser

ID = uuid.UUID(int=7)
OTHER_ID = uuid.UUID(int=8)


def opened(path: Any, **options: Any) -> LogDir:
    return logcore.open_dir(path, create=True, replicated=True, **options)


def leading(logdir: LogDir) -> Log:
    """Return the log of a partition that this directory leads."""
    log = logdir.partition("t", 0)
    log.begin_epoch(0)
    return log


def test_a_topic_has_the_placed_partitions(tmp_path: Path) -> None:
    with opened(tmp_path) as logdir:
        logdir.host.place_topic("t", ID, 5, [1, 3], {"retention.ms": "1000"})
        assert logdir.partitions("t") == (1, 3)
        assert logdir.topic_id("t") == ID
        assert logdir.settings("t").retention_ms == 1000
        logdir.host.place_topic("t", ID, 5, [1, 4], {"retention.ms": "2000"})
        assert logdir.partitions("t") == (1, 3, 4)
        log = logdir.partition("t", 1)
        assert log.is_replicated
        assert log.config.retention_ms == 2000
        with pytest.raises(TopicNotFoundError):
            logdir.partition("t", 0)
    with opened(tmp_path) as logdir:
        assert logdir.partitions("t") == (1, 3, 4)
        assert logdir.settings("t").retention_ms == 2000


def test_open_logs_get_changed_settings(tmp_path: Path) -> None:
    with opened(tmp_path) as logdir:
        logdir.host.place_topic("t", ID, 1, [0], {})
        log = logdir.partition("t", 0)
        logdir.host.place_topic("t", ID, 1, [0], {"retention.ms": "7"})
        assert log.config.retention_ms == 7


def test_removed_replicas_have_no_files(tmp_path: Path) -> None:
    with opened(tmp_path) as logdir:
        logdir.host.place_topic("t", ID, 3, [0, 2], {})
        leading(logdir).append(b"v")
        logdir.host.remove_replicas("t", [0])
        assert logdir.partitions("t") == (2,)
        assert not (tmp_path / "t-0").exists()
        logdir.host.place_topic("t", ID, 3, [0], {})
        assert logdir.partition("t", 0).log_end_offset == 0
        logdir.host.remove_replicas("t", [0, 2])
        assert logdir.topics() == []
        logdir.host.place_topic("t", OTHER_ID, 1, [0], {})
        assert logdir.topic_id("t") == OTHER_ID


def test_follower_accepts_only_batches_of_its_leader(tmp_path: Path) -> None:
    with opened(tmp_path / "leader") as leader, opened(tmp_path / "d") as logdir:
        for entry in (leader, logdir):
            entry.host.place_topic("t", ID, 1, [0], {})
        source = leading(leader)
        source.append_many([(None, b"a"), (None, b"b")])
        log = logdir.partition("t", 0)
        (piece,) = source.stored(0, max_bytes=1_000, up_to="log_end")
        batch = bytes(piece)
        for append in (
            lambda: log.append(b"x"),
            lambda: log.append_many([(None, b"x")]),
            lambda: log.append_batch(batch),
            lambda: log.end_transaction(1, 0, commit=True),
            lambda: append_atomically(log.host.writer, [(b"k", b"v", (), 1)]),
        ):
            with pytest.raises(NotLeaderError):
                append()
        log.append_as_follower(piece)
        logdir.host.place_topic("t", ID, 1, [0], {"retention.ms": "5"})
        with pytest.raises(NotLeaderError):
            log.append(b"x")
        log.begin_epoch(3)
        assert log.append(b"x").offset == 2
        begin_to_follow(log.host.writer)
        with pytest.raises(NotLeaderError):
            log.append(b"x")
    with logcore.open_dir(tmp_path / "ordinary", create=True) as ordinary:
        ordinary.create_topic("t")
        with pytest.raises(InvalidConfigError, match="replica"):
            begin_to_follow(ordinary.partition("t", 0).host.writer)


def test_replica_without_a_role_refuses_appends(tmp_path: Path) -> None:
    """After a restart, another broker may lead in the last epoch of the log."""
    with opened(tmp_path) as logdir:
        logdir.host.place_topic("t", ID, 1, [0], {})
        leading(logdir).append(b"v")
    with opened(tmp_path) as logdir:
        with pytest.raises(NotLeaderError):
            logdir.partition("t", 0).append(b"w")
        with pytest.raises(NotLeaderError):
            logdir.partition("t", 0).end_transaction(1, 0, commit=False)


def test_maintenance_ends_no_transaction_in_replicas() -> None:
    """The coordinator may be in another broker, and another leader writes the markers."""
    disk = SimulatedDisk()
    keys = [("t", 0), (TRANSACTIONS_TOPIC, 0)]
    with logcore.open_dir("/source", create=True, fs=disk) as source:
        source.create_topic("t")
        producer = source.producer(transactional_id="id", transaction_timeout_ms=5_000)
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("t", b"v", partition=0)
        producer.flush()
        with opened("/replicas", fs=disk) as logdir:
            for name, number in keys:
                logdir.host.place_topic(name, ID, 1, [number], {})
                log = logdir.partition(name, number)
                for piece in source.partition(name, number).stored(
                    0, max_bytes=10_000, up_to="log_end"
                ):
                    log.append_as_follower(piece)
                log.begin_epoch(log.leader_epoch)
                log.advance_high_watermark(log.log_end_offset)
            ends = [logdir.partition(*key).log_end_offset for key in keys]
            disk.advance(60_000)
            logdir.tick()
            assert [logdir.partition(*key).log_end_offset for key in keys] == ends
            with pytest.raises(ProducerStateError, match="coordinates"):
                logdir.producer(transactional_id="id").init_transactions()
        # The directory of the source has a coordinator.
        source.tick()
        assert source.partition("t", 0).log_end_offset == ends[0] + 1
        producer.close()


def test_replicas_that_are_set_aside_keep_their_records(tmp_path: Path) -> None:
    with opened(tmp_path) as logdir:
        logdir.host.place_topic("t", ID, 2, [0, 1], {})
        leading(logdir).append(b"v")
        logdir.host.set_topic_aside("t")
        logdir.host.place_topic("t", OTHER_ID, 1, [0], {})
        assert logdir.partition("t", 0).log_end_offset == 0
    (kept,) = tmp_path.glob("t-0.*-stray")
    with opened(tmp_path) as logdir:
        assert logdir.topics() == ["t"]
    with logcore.open(kept, read_only=True) as log:
        assert log.high_watermark == 0  # the record was not committed
        assert log.log_end_offset == 1


def test_topic_with_another_id_is_not_placed(tmp_path: Path) -> None:
    with opened(tmp_path) as logdir:
        logdir.host.place_topic("t", ID, 1, [0], {})
        with pytest.raises(TopicExistsError):
            logdir.host.place_topic("t", OTHER_ID, 1, [0], {})


def test_a_lost_replica_is_an_error(tmp_path: Path) -> None:
    """If an empty log replaced it, the leader would count the replica as in sync."""
    with opened(tmp_path) as logdir:
        logdir.host.place_topic("t", ID, 2, [0, 1], {})
    for file in (tmp_path / "t-0").iterdir():
        file.unlink()
    (tmp_path / "t-0").rmdir()
    with opened(tmp_path) as logdir:
        with pytest.raises(CorruptLogError, match="missing"):
            logdir.partition("t", 0)
        assert logdir.partition("t", 1).log_end_offset == 0


def test_the_directory_of_a_broker_is_written_by_brokers_only(tmp_path: Path) -> None:
    with opened(tmp_path) as logdir:
        logdir.host.place_topic("t", ID, 1, [0], {})
        for change in (
            lambda: logdir.create_topic("u"),
            lambda: logdir.add_partitions("t", 2),
            lambda: logdir.delete_topic("t"),
        ):
            with pytest.raises(InvalidConfigError, match="through its brokers"):
                change()
    with pytest.raises(InvalidConfigError, match="broker in a cluster"):
        logcore.open_dir(tmp_path)
    with logcore.open_dir(tmp_path, read_only=True) as logdir:
        assert logdir.partitions("t") == (0,)


def test_unreplicated_directory_cannot_join_a_cluster(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path, create=True) as logdir:
        logdir.create_topic("t")
        with pytest.raises(InvalidConfigError, match="replicated=True"):
            logdir.host.place_topic("u", ID, 1, [0], {})
    with pytest.raises(InvalidConfigError, match="an ordinary directory"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "options", [{"shared": True}, {"read_only": True, "create": False}]
)
def test_a_replicated_directory_has_one_writer(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with opened(tmp_path):
        pass
    with pytest.raises(InvalidConfigError, match="replicated=True"):
        logcore.open_dir(tmp_path, replicated=True, **options)


@pytest.mark.parametrize("placed", ["x", [0, 0], [2], [1, 0], [True]])
def test_damaged_rows_are_refused(placed: Any) -> None:
    from logcore.directory.topic_file import TopicEntry, id_text

    row = {"topic": "t", "id": id_text(ID), "partitions": 2, "placed": placed}
    with pytest.raises(ValueError, match="replicas"):
        TopicEntry.from_json(row)


def place_write_and_remove(disk: SimulatedDisk, promise: Promiser) -> None:
    """Place two replicas, write one, remove both, and place one with another topic id."""
    with opened("/data", fs=disk, durability="always") as logdir:
        promise(0)
        logdir.host.place_topic("t", ID, 3, [0, 1], {})
        promise(1)
        leading(logdir).append(b"v")
        promise(2)
        logdir.host.remove_replicas("t", [0])
        promise(3)
        logdir.host.remove_replicas("t", [1])
        promise(4)
        logdir.host.place_topic("t", OTHER_ID, 3, [0], {})
        promise(5)


def reopen_and_place(disk: SimulatedDisk) -> tuple[list[bytes], int]:
    """Place the replica again, then remove it. Return its log end offset, as one byte,
    and the topic id.
    """
    disk.seed += 1
    with opened("/data", fs=disk) as logdir:
        topic_id = ID
        if "t" in logdir:
            topic_id = logdir.topic_id("t")
        logdir.host.place_topic("t", topic_id, 3, [0], {})
        log = leading(logdir)
        values = [log.log_end_offset.to_bytes(1, "big")]
        log.append(b"w")
        logdir.host.remove_replicas("t", logdir.partitions("t"))
        assert logdir.topics() == []
        return values, topic_id.int


def check(promised: list[int], found: tuple[list[bytes], int]) -> None:
    last = max(promised, default=0)
    (end,), topic_id = found
    if last == 2:
        assert end in (b"\1", b"\0")  # the removal has begun
        assert topic_id == ID.int
    elif last >= 3:
        assert end == b"\0"
    if last == 5:
        assert topic_id == OTHER_ID.int


@pytest.mark.long
@pytest.mark.parametrize("names", ["posix", "journal"])
def test_replicas_can_be_placed_again_after_each_crash(names: Any) -> None:
    report = explore(
        place_write_and_remove,
        reopen_and_place,
        check,
        files={"data": None},
        names=names,
        limit=25,
        again_every=0,
    )
    assert report.states > 50
