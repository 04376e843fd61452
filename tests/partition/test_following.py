"""Followers: a log that copies its leader has the same offsets, leader epochs and
bytes.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logcore
from logcore import cleaner
from logcore.kernels import kernel
from logcore.log import Log
from logcore.metadata import checkpoint
from logcore.partition.replication import restart_at
from logcore.recordbatch import encode
from logcore.testing import FaultPlan, SimulatedDisk, explore
from logcore.testing.faults import Fault

T0 = 1_700_000_000_000
CONFIG = {"segment.bytes": 400, "index.interval.bytes": 100}


def open_replicated(disk: SimulatedDisk, path: str, **options: object) -> Log:
    return logcore.open(
        path, create=True, replicated=True, config=CONFIG, fs=disk, **options
    )  # type: ignore[arg-type]


def copy_leader(leader: Log, follower: Log, *, max_bytes: int = 1 << 20) -> None:
    """Fetch like a follower: truncate to the last common offset, then copy one chunk
    after another.
    """
    while True:
        before = follower.log_end_offset
        follower.truncate_to_epoch(*leader.end_of_epoch(follower.leader_epoch))
        if follower.log_end_offset == before:
            break
    while follower.log_end_offset < leader.log_end_offset:
        fetch_offset = follower.log_end_offset
        for chunk in leader.stored(fetch_offset, max_bytes=max_bytes, up_to="log_end"):
            base_offset = int.from_bytes(chunk[:8], "big")
            base_offsets = [segment.base_offset for segment in leader._state.segments]
            follower.append_as_follower(
                chunk, begins_segment=base_offset in base_offsets
            )


def log_files(disk: SimulatedDisk, path: str, *suffixes: str) -> dict[str, bytes]:
    files = {
        name.rpartition("/")[2]: content
        for name, content in disk.files().items()
        if name.startswith(path + "/")
    }
    return {
        name: content or b""
        for name, content in files.items()
        if name.endswith(suffixes or ".log")
    }


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk(now_ms=T0)


def test_only_followers_read_above_the_high_watermark(
    disk: SimulatedDisk,
) -> None:
    with open_replicated(disk, "/a/t-0") as log:
        log.append(b"one")
        log.append(b"two")
        assert (log.high_watermark, log.log_end_offset) == (0, 2)
        assert list(log.read(0)) == []
        assert log.stored(0, max_bytes=1 << 20) == []
        assert (
            sum(map(len, log.stored(0, max_bytes=1 << 20, up_to="log_end")))
            == log.statistics().size_bytes
        )
        assert log.advance_high_watermark(1) == 1
        assert [record.value for record in log.read(0)] == [b"one"]


@pytest.mark.parametrize("policy", ["os", "group", "always", "every(2)"])
def test_high_watermark_of_replicated_log_is_moved_only_by_its_owner(
    disk: SimulatedDisk, policy: str
) -> None:
    with open_replicated(disk, "/a/t-0", durability=policy) as log:
        for number in range(4):
            log.append(b"%d" % number, durability="disk")
        log.flush()
        log.roll()
        log.append(b"4")
        assert log.high_watermark == 0
        assert log.advance_high_watermark(3) == 3
        assert log.advance_high_watermark(1) == 3, (
            "the high watermark never moves backwards"
        )
        with logcore.open("/a/t-0", read_only=True, fs=disk) as other:
            assert [record.value for record in other.read(0)] == [b"0", b"1", b"2"]
    with open_replicated(disk, "/a/t-0") as log:
        assert log.high_watermark == 3
        assert log.log_end_offset == 5
        log.truncate(2)
        assert log.high_watermark == 2
    with logcore.open("/a/t-0", fs=disk) as log:
        assert log.high_watermark == 2, (
            "without replication, a sync moves the high watermark"
        )
        with pytest.raises(logcore.InvalidConfigError, match="moved by its durability"):
            log.advance_high_watermark(1)


@pytest.mark.parametrize("offset", range(11))
def test_high_watermark_is_lowered_to_the_end_of_a_batch(
    disk: SimulatedDisk, offset: int
) -> None:
    with open_replicated(disk, "/a/t-0") as log:
        for count in (3, 1, 4, 2):
            log.append_many([(None, b"x" * 60)] * count)
        assert log.advance_high_watermark(offset) == max(
            end for end in (0, 3, 4, 8, 10) if end <= offset
        )


@pytest.mark.skipif(
    not kernel.__name__.endswith("_compiled"),
    reason="the plain kernels keep no recent batches",
)
def test_high_watermark_at_a_recent_batch_reads_no_file(disk: SimulatedDisk) -> None:
    """A follower gets the high watermark of one append with the records of the next."""
    with open_replicated(disk, "/a/t-0") as log:
        for number in range(3):
            log.append(b"%d" % number)
        disk.faults = FaultPlan(Fault("pread", errno.EIO))
        assert log.advance_high_watermark(2) == 2
        assert not disk.faults.hits
        with pytest.raises(logcore.LogcoreError):
            list(log.read(0))


def test_follower_keeps_leader_epochs(disk: SimulatedDisk) -> None:
    with (
        open_replicated(disk, "/a/t-0") as leader,
        open_replicated(disk, "/b/t-0") as follower,
    ):
        leader.append(b"of epoch 0")
        leader.begin_epoch(5)
        leader.append(b"of epoch 5")
        copy_leader(leader, follower)
        assert [follower.end_of_epoch(epoch) for epoch in (0, 5)] == [(0, 1), (5, 2)]
        assert follower.leader_epoch == 5
        assert log_files(disk, "/b/t-0") == log_files(disk, "/a/t-0")


def test_empty_follower_starts_at_the_log_start_of_its_leader(
    disk: SimulatedDisk,
) -> None:
    with (
        open_replicated(disk, "/a/t-0") as leader,
        open_replicated(disk, "/b/t-0") as follower,
    ):
        for number in range(9):
            leader.append(b"%d" % number * 60)
        leader.begin_epoch(3)
        leader.append(b"9")
        leader.advance_high_watermark(10)
        leader.delete_records(5)
        for chunk in leader.stored(5, max_bytes=1, up_to="log_end"):
            follower.append_as_follower(chunk)
        copy_leader(leader, follower)
        assert follower.log_start_offset == 5
        assert follower.end_of_epoch(3) == leader.end_of_epoch(3) == (3, 10)
        follower.advance_high_watermark(10)
        assert list(follower.read(5)) == list(leader.read(5))
    with logcore.open("/b/t-0", read_only=True, fs=disk) as log:
        assert [record.offset for record in log.read(5)] == [5, 6, 7, 8, 9]


def restarted(disk: SimulatedDisk, offset: int = 40) -> Log:
    """Return a replica with five records that was restarted at an offset."""
    log = open_replicated(disk, "/b/t-0")
    for number in range(5):
        log.append(b"%d" % number * 100)
    log.advance_high_watermark(2)
    restart_at(log.host.writer, offset)
    return log


def test_restarted_follower_remains_at_its_start(disk: SimulatedDisk) -> None:
    """A follower that was restarted at 257 became the leader before its first batch, and
    appended at offset 0.
    """
    with restarted(disk) as log:
        assert (log.log_start_offset, log.log_end_offset) == (40, 40)
        assert (log.high_watermark, log.durable_end_offset) == (40, 40)
    with open_replicated(disk, "/b/t-0") as log:
        assert (log.log_start_offset, log.log_end_offset) == (40, 40)
        log.begin_epoch(7)
        assert log.append(b"first").offset == 40
        assert log.end_of_epoch(7) == (7, 41)


def test_restarted_follower_copies_its_leader(disk: SimulatedDisk) -> None:
    with open_replicated(disk, "/a/t-0") as leader:
        for number in range(9):
            leader.append(b"%d" % number * 60)
        leader.advance_high_watermark(9)
        leader.delete_records(7)
        with restarted(disk, 7) as follower:
            copy_leader(leader, follower)
            follower.advance_high_watermark(9)
            assert list(follower.read(7)) == list(leader.read(7))


def test_restart_below_the_log_end_is_refused(disk: SimulatedDisk) -> None:
    with restarted(disk) as log:
        with pytest.raises(logcore.OffsetOutOfRangeError, match="restart"):
            restart_at(log.host.writer, 39)
        assert log.log_end_offset == 40


def test_restarted_follower_forgets_producers(disk: SimulatedDisk) -> None:
    """The last batches of the producers are not in the log, so that any sequence may be
    the next one.
    """

    def batch_of_producer(sequence: int) -> bytes:
        return encode(
            [(None, b"v", (), T0)],
            base_offset=0,
            producer_id=9,
            producer_epoch=0,
            base_sequence=sequence,
        )

    with open_replicated(disk, "/b/t-0") as log:
        log.append_batch(batch_of_producer(0))
        restart_at(log.host.writer, 40)
        log.begin_epoch(3)
        assert log.append_batch(batch_of_producer(30)).offset == 40


@pytest.mark.long
@pytest.mark.parametrize("names", ["posix", "journal"])
def test_each_crash_leaves_a_log_before_or_after_its_restart(names: Any) -> None:
    def run(disk: SimulatedDisk, promise: Callable[[object], None]) -> None:
        with restarted(disk):
            promise("restarted")

    def recover(disk: SimulatedDisk) -> tuple[int, int]:
        with open_replicated(disk, "/b/t-0") as log:
            log.scrub()
            return log.log_start_offset, log.log_end_offset

    def check(promised: list[object], offsets: tuple[int, int]) -> None:
        # The new segment may exist before the log start is raised. This is a gap, not a
        # loss.
        empty = {(40, 40), (0, 40)}
        if promised:
            assert offsets == (40, 40)
        else:
            assert offsets in empty or (offsets[0] == 0 and offsets[1] <= 5)

    report = explore(run, recover, check, names=names, limit=50)
    assert report.states > 50


def test_gaps_of_a_compacted_leader_are_not_data_loss(disk: SimulatedDisk) -> None:
    compacted = {**CONFIG, "cleanup.policy": "compact"}
    with logcore.open("/a/t-0", create=True, config=compacted, fs=disk) as leader:
        for number in range(30):
            leader.append(b"%d" % number * 20, key=b"k%d" % (number % 3))
        leader.roll()
        assert cleaner.clean(leader, force=True) is not None
        leader.append(b"last", key=b"k9")
        remaining = list(leader.read(0))
        assert len(remaining) < 31
        with open_replicated(disk, "/b/t-0") as follower:
            copy_leader(leader, follower, max_bytes=100)
            follower.advance_high_watermark(follower.log_end_offset)
            assert list(follower.read(follower.log_start_offset)) == remaining
    with logcore.open("/b/t-0", read_only=True, fs=disk) as log:
        assert list(log.read(log.log_start_offset)) == remaining


def batch(*, base_offset: int = 3, leader_epoch: int = 2, count: int = 1) -> bytes:
    rows = [(b"k", b"v", (), T0)] * count
    return encode(rows, base_offset=base_offset, leader_epoch=leader_epoch)


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (b"", logcore.CorruptBatchError, "not whole batches"),
        (batch()[:-1], logcore.CorruptBatchError, "not whole batches"),
        (batch() + b"\0", logcore.CorruptBatchError, "not whole batches"),
        (batch()[:-1] + b"\xff", logcore.CorruptBatchError, "CRC does not match"),
        (batch(base_offset=2), logcore.OffsetOutOfRangeError, "does not continue"),
        (batch() + batch(), logcore.OffsetOutOfRangeError, "does not continue"),
        (batch(leader_epoch=1), logcore.OffsetOutOfRangeError, "leader epoch"),
        (
            batch(leader_epoch=4) + batch(base_offset=4),
            logcore.OffsetOutOfRangeError,
            "leader epoch",
        ),
    ],
)
def test_batches_that_do_not_continue_the_log_are_refused_by_a_follower(
    disk: SimulatedDisk, data: bytes, error: type[Exception], text: str
) -> None:
    with open_replicated(disk, "/b/t-0") as follower:
        follower.append_as_follower(batch(base_offset=0, leader_epoch=2, count=3))
        before = disk.files()
        with pytest.raises(error, match=text):
            follower.append_as_follower(data)
        assert disk.files() == before
        assert follower.append_as_follower(batch()).offset == 3


def act_as_leader(log: Log, rng: random.Random, steps: int, label: bytes) -> None:
    """Take random actions of a leader: append records and transactions, and roll."""
    open_transactions: dict[int, int] = {}
    for step in range(steps):
        action = rng.choice(
            ["append", "append", "many", "roll", "idempotent", "transact", "end"]
        )
        value = b"%s%d" % (label, step) * rng.randrange(1, 12)
        if action == "append":
            log.append(value, key=b"k")
        elif action == "many":
            log.append_many([(None, value)] * rng.randrange(1, 9))
        elif action == "roll":
            log.roll()
        elif action == "idempotent":
            rows = [(None, value, (), T0)]
            log.append_batch(
                encode(rows, producer_id=500 + step, producer_epoch=0, base_sequence=0)
            )
        elif action == "transact":
            producer_id = rng.randrange(1, 4)
            sequence = open_transactions.get(producer_id, 0)
            rows = [(None, value, (), T0)]
            batch = encode(
                rows,
                producer_id=producer_id,
                producer_epoch=0,
                base_sequence=sequence,
                transactional=True,
            )
            log.append_batch(batch, check_sequence=False)
            open_transactions[producer_id] = sequence + 1
        else:
            log.end_transaction(rng.randrange(1, 4), 0, commit=rng.random() < 0.5)


@pytest.mark.long
@given(st.integers(0, 1 << 30))
def test_follower_and_leader_files_are_identical_after_leader_changes(
    seed: int,
) -> None:
    """Leader and follower change roles. Each time, the old leader truncates the records
    that the new leader never received.
    """
    rng = random.Random(seed)
    disk = SimulatedDisk(now_ms=T0)
    paths = ["/a/t-0", "/b/t-0"]
    logs = [
        open_replicated(disk, path, durability=rng.choice(["os", "group", "every(3)"]))
        for path in paths
    ]
    leader, follower = logs
    for epoch in range(1, rng.randrange(2, 5)):
        leader.begin_epoch(epoch)
        act_as_leader(leader, rng, rng.randrange(1, 12), b"shared")
        copy_leader(leader, follower, max_bytes=rng.choice([1, 150, 1000]))
        agreed = leader.log_end_offset
        leader.advance_high_watermark(agreed)
        follower.advance_high_watermark(agreed)
        act_as_leader(leader, rng, rng.randrange(0, 6), b"lost")
        leader, follower = follower, leader
    leader.begin_epoch(9)
    leader.append(b"from the last leader")
    copy_leader(leader, follower, max_bytes=rng.choice([1, 150, 1000]))
    for log in logs:
        log.advance_high_watermark(leader.log_end_offset)
        log.roll()
    assert leader.log_end_offset == follower.log_end_offset
    assert leader.host.writer.metadata.epochs == follower.host.writer.metadata.epochs
    log_bytes = [b"".join(log_files(disk, path).values()) for path in paths]
    assert log_bytes[0] == log_bytes[1]
    assert leader.last_stable_offset == follower.last_stable_offset
    committed = [list(log.read(0, isolation="read_committed")) for log in logs]
    assert committed[0] == committed[1]
    for log in logs:
        log.close()
    aborted = [b"".join(log_files(disk, path, ".txnindex").values()) for path in paths]
    assert aborted[0] == aborted[1], "Kafka finds aborted records through this file"
    for path in paths:
        with logcore.open(path, read_only=True, fs=disk) as log:
            assert list(log.read(0, isolation="read_committed")) == committed[0]


@pytest.mark.long
def test_follower_holds_a_prefix_of_its_leader_after_any_crash() -> None:
    origin = SimulatedDisk(now_ms=T0)
    with open_replicated(origin, "/a/t-0") as leader:
        leader.begin_epoch(1)
        act_as_leader(leader, random.Random(3), 12, b"x")
        leader.advance_high_watermark(leader.log_end_offset)
        start = leader.append(b"start").offset
        leader.begin_epoch(2)
        act_as_leader(leader, random.Random(4), 8, b"y")
        leader.advance_high_watermark(leader.log_end_offset)
        leader.delete_records(min(start, leader._state.segments[-1].base_offset))
        records_of_leader = {
            record.offset: record for record in leader.read(leader.log_start_offset)
        }
        first = leader.log_start_offset
        chunks = [
            bytes(chunk)
            for chunk in leader.stored(first, max_bytes=1 << 20, up_to="log_end")
        ]
        end = leader.log_end_offset

    def run(disk: SimulatedDisk, promise: object) -> None:
        with open_replicated(disk, "/b/t-0") as follower:
            for chunk in chunks:
                receipt = follower.append_as_follower(chunk)
                promise(receipt.last_offset + 1)  # type: ignore[operator]
                follower.advance_high_watermark(receipt.last_offset + 1)

    def recover(disk: SimulatedDisk) -> tuple[int, int, list[object]]:
        with logcore.open("/b/t-0", create=True, config=CONFIG, fs=disk) as log:
            state = list(log.read(log.log_start_offset))
            return log.log_end_offset, log.leader_epoch, state

    def check(promised: list[int], state: tuple[int, int, list[object]]) -> None:
        reached, epoch, records = state
        assert reached >= max(promised, default=0)
        assert reached <= end
        assert epoch <= 2
        expected = [
            records_of_leader[offset]
            for offset in sorted(records_of_leader)
            if offset < reached
        ]
        assert records == expected

    assert explore(run, recover, check, limit=12, again_every=20).states > 100


def test_full_disk_leaves_follower_unchanged(disk: SimulatedDisk) -> None:
    with open_replicated(disk, "/b/t-0", durability="os") as follower:
        follower.append_as_follower(batch(base_offset=7, count=2))
        disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.log"))
        with pytest.raises(logcore.DiskFullError):
            follower.append_as_follower(batch(base_offset=9, leader_epoch=4))
        disk.faults = None
        assert follower.log_end_offset == 9
        assert (
            follower.append_as_follower(batch(base_offset=9, leader_epoch=4)).offset
            == 9
        )


def test_closing_saves_the_high_watermark(
    disk: SimulatedDisk,
) -> None:
    with open_replicated(disk, "/b/t-0") as follower:
        follower.append_as_follower(batch(base_offset=0, count=4))
        follower.append_as_follower(batch(base_offset=4))
        follower.advance_high_watermark(4)
    assert checkpoint.read_offsets(disk, "/b", checkpoint.HIGH_WATERMARK) == {
        ("t", 0): 4
    }


def test_follower_accepts_lower_epoch_after_leading_without_records(
    disk: SimulatedDisk,
) -> None:
    """A log that led in epoch 5 and stored no records can follow a leader whose batches
    have epoch 4.
    """
    with (
        open_replicated(disk, "/a/t-0") as leader,
        open_replicated(disk, "/b/t-0") as follower,
    ):
        leader.begin_epoch(4)
        leader.append(b"one")
        copy_leader(leader, follower)
        follower.begin_epoch(5)
        leader.append(b"two")
        leader.begin_epoch(6)
        copy_leader(leader, follower)
        leader.append(b"three")
        copy_leader(leader, follower)
        assert (
            follower.host.writer.metadata.epochs
            == leader.host.writer.metadata.epochs
            == [(4, 0), (6, 2)]
        )
        assert log_files(disk, "/b/t-0") == log_files(disk, "/a/t-0")


@pytest.mark.parametrize(
    ("operation", "code"),
    [("create", errno.ENOSPC), ("create", errno.EMFILE), ("pwrite", errno.ENOSPC)],
)
@pytest.mark.parametrize("first", [0, 5])
def test_failed_append_as_follower_can_be_repeated(
    disk: SimulatedDisk, operation: str, code: int, first: int
) -> None:
    data = batch(base_offset=first, leader_epoch=4)
    with open_replicated(disk, "/b/t-0") as follower:
        disk.faults = FaultPlan(Fault(operation, code, path="*.log"))
        with contextlib.suppress(logcore.DiskFullError, logcore.ResourceError):
            follower.append_as_follower(data, durability="os")
        disk.faults = None
        assert not follower.has_failed
        if follower.log_end_offset <= first:  # no record was stored
            follower.append_as_follower(data)
        follower.append_as_follower(batch(base_offset=first + 1, leader_epoch=4))
        assert follower.log_end_offset == first + 2
        assert follower.host.writer.metadata.epochs[-1] == (4, first)


def test_high_watermark_survives_a_kill(disk: SimulatedDisk) -> None:
    log = open_replicated(disk, "/b/t-0")
    log.append_as_follower(batch(base_offset=0, count=5))
    log.append_as_follower(batch(base_offset=5, count=5))
    log.advance_high_watermark(5)
    disk.kill()
    with open_replicated(disk, "/b/t-0") as reopened:
        assert reopened.high_watermark == 5


def test_high_watermark_is_rounded_down_to_the_end_of_a_batch(
    disk: SimulatedDisk,
) -> None:
    with open_replicated(disk, "/b/t-0") as log:
        log.append_as_follower(batch(base_offset=0, count=10))
        log.append_as_follower(batch(base_offset=10, count=10))
        assert log.advance_high_watermark(7) == 0
        assert log.advance_high_watermark(17) == 10
        log.delete_records(5)
        assert [
            record.offset for record in log.read(5, isolation="read_committed")
        ] == [5, 6, 7, 8, 9]
    for name in (checkpoint.HIGH_WATERMARK, "t-0/" + checkpoint.DURABLE_END):
        disk.unlink("/b/" + name)
    with open_replicated(disk, "/b/t-0") as log:
        assert log.high_watermark == 10, (
            "the deleted records were below the high watermark"
        )
        assert log.last_stable_offset == 10


def test_damaged_durable_end_does_not_raise_the_high_watermark(
    disk: SimulatedDisk,
) -> None:
    with open_replicated(disk, "/b/t-0") as log:
        for number in range(5):
            log.append(b"%d" % number)
        log.advance_high_watermark(2)
        with logcore.open("/b/t-0", read_only=True, fs=disk) as reader:
            handle = disk.open("/b/t-0/" + checkpoint.DURABLE_END, write=True)
            disk.pwrite(handle, b"\x77", 3)
            disk.close(handle)
            reader.refresh()
            assert reader.high_watermark == 2
        with logcore.open("/b/t-0", read_only=True, fs=disk) as reader:
            assert reader.high_watermark == 0


def test_follower_that_becomes_leader_has_the_producer_state(
    disk: SimulatedDisk,
) -> None:
    with (
        open_replicated(disk, "/a/t-0") as leader,
        open_replicated(disk, "/b/t-0") as follower,
    ):
        rows = [(None, b"x", (), T0)]
        raws = [
            encode(rows, producer_id=7, producer_epoch=0, base_sequence=number)
            for number in range(3)
        ]
        for raw in raws:
            leader.append_batch(raw)
            leader.roll()
        copy_leader(leader, follower)
        follower.roll()
        follower.append(b"x")
        follower.advance_high_watermark(3)
        follower.delete_records(3)
        assert follower.append_batch(raws[2]).offset == 2, (
            "a batch sent twice is stored once"
        )


@pytest.mark.parametrize("begins_segment", [False, True])
def test_gap_wider_than_a_segment_is_appended(
    disk: SimulatedDisk, begins_segment: bool
) -> None:
    far_offset = 1 << 32
    with open_replicated(disk, "/b/t-0") as follower:
        follower.append_as_follower(batch(base_offset=0, leader_epoch=0))
        data = batch(base_offset=far_offset, leader_epoch=0) + batch(
            base_offset=far_offset + far_offset, leader_epoch=0
        )
        follower.append_as_follower(data, begins_segment=begins_segment)
        follower.roll()
    with open_replicated(disk, "/b/t-0") as follower:
        follower.advance_high_watermark(follower.log_end_offset)
        assert [record.offset for record in follower.read(0)] == [
            0,
            far_offset,
            far_offset + far_offset,
        ]


@pytest.mark.parametrize(
    ("operation", "number"),
    [
        ("pwrite", 1),
        ("open", 1),
        ("open", 2),
        ("sync_dir", 1),
        ("sync_dir", 2),
        ("fdatasync", 1),
        ("fsync", 1),
    ],
)
@pytest.mark.parametrize("number_of_error", [errno.ENOSPC, errno.EMFILE])
def test_full_disk_at_a_gap_wider_than_a_segment_keeps_the_log_end(
    disk: SimulatedDisk, operation: str, number: int, number_of_error: int
) -> None:
    """The roll had succeeded, but the log end offset was reset to a value below the
    base offset of the new segment.
    """
    far_offset = 1 << 32
    log = open_replicated(disk, "/b/t-0", durability="os")
    log.append_as_follower(batch(base_offset=0, leader_epoch=0))
    data = batch(base_offset=far_offset, leader_epoch=0)
    disk.faults = FaultPlan(
        Fault(operation, number_of_error, path=f"*{far_offset:020d}.log")
    )
    if operation != "pwrite":
        disk.faults = FaultPlan(Fault(operation, number_of_error, at=number))
    with contextlib.suppress(logcore.LogcoreError):
        log.append_as_follower(data)
    disk.faults = None
    assert log.log_end_offset in (1, far_offset, far_offset + 1)
    if not log.has_failed and log.log_end_offset <= far_offset:
        log.append_as_follower(data)
    with contextlib.suppress(logcore.LogcoreError):
        log.close()
    with open_replicated(disk, "/b/t-0") as reopened:
        if reopened.log_end_offset <= far_offset:
            reopened.append_as_follower(data)
        reopened.advance_high_watermark(far_offset + 1)
        assert [record.offset for record in reopened.read(0)] == [0, far_offset]


@pytest.mark.parametrize("policy", ["os", "group"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_first_replicated_open_keeps_the_high_watermark(
    disk: SimulatedDisk, policy: str, is_killed: bool
) -> None:
    log = logcore.open("/b/t-0", create=True, durability=policy, fs=disk)
    log.append_many([(None, b"x")] * 5)
    if is_killed:
        disk.kill()
    else:
        log.close()
    with open_replicated(disk, "/b/t-0", durability=policy) as reopened:
        assert reopened.high_watermark == 5


def test_crash_during_first_replicated_open_keeps_the_high_watermark() -> None:
    def run(disk: SimulatedDisk, promise: Callable[[object], None]) -> None:
        with logcore.open("/b/t-0", create=True, fs=disk) as log:
            log.append_many([(None, b"x")] * 5, durability="disk")
            promise(5)
        with open_replicated(disk, "/b/t-0") as reopened:
            promise(reopened.high_watermark)

    def recover(disk: SimulatedDisk) -> int:
        with open_replicated(disk, "/b/t-0") as log:
            return log.high_watermark

    def check(promised: list[int], high_watermark: int) -> None:
        assert high_watermark >= max(promised, default=0)

    assert explore(run, recover, check, limit=12, again_every=20).states > 100


def test_truncation_inside_a_gap_keeps_the_epochs_in_order(disk: SimulatedDisk) -> None:
    """truncate_to_epoch() filled the gap with an empty batch of an epoch that the call
    removed from the epoch list. Followers then refused later batches.
    """
    with (
        open_replicated(disk, "/a/t-0") as leader,
        open_replicated(disk, "/b/t-0") as follower,
    ):
        for offset in range(6):
            leader.append_as_follower(batch(base_offset=offset, leader_epoch=0))
        leader.append_as_follower(batch(base_offset=10, leader_epoch=5))
        assert leader.truncate_to_epoch(0, 8) == 8
        leader.append_as_follower(batch(base_offset=8, leader_epoch=3))
        copy_leader(leader, follower)
        assert (
            follower.host.writer.metadata.epochs
            == leader.host.writer.metadata.epochs
            == [(0, 0), (3, 8)]
        )
        assert log_files(disk, "/a/t-0") == log_files(disk, "/b/t-0")


def test_truncation_inside_a_gap_wider_than_a_segment_is_refused(
    disk: SimulatedDisk,
) -> None:
    far_offset = 1 << 32
    with open_replicated(disk, "/b/t-0") as follower:
        follower.append_as_follower(batch(base_offset=0, leader_epoch=0))
        follower.append_as_follower(batch(base_offset=far_offset, leader_epoch=0))
        for offset in ((1 << 31) + 1, far_offset - 1):
            with pytest.raises(
                logcore.OffsetOutOfRangeError, match="wider than a segment"
            ):
                follower.truncate(offset)
        assert (follower.log_end_offset, follower.has_failed) == (far_offset + 1, False)
        follower.truncate(1 << 31)
        assert follower.log_end_offset == 1 << 31


def test_invalid_arguments_of_append_as_follower_have_no_effect(
    disk: SimulatedDisk,
) -> None:
    with open_replicated(disk, "/b/t-0") as follower:
        before = disk.files()
        with pytest.raises(logcore.InvalidConfigError):
            follower.append_as_follower(batch(base_offset=5), durability="later")  # type: ignore[arg-type]
        for data in ("text", memoryview(batch())[::2], 3):
            with pytest.raises(logcore.InvalidRecordError):
                follower.append_as_follower(data)  # type: ignore[arg-type]
        assert disk.files() == before
        assert follower.log_end_offset == 0


def test_replicated_option_is_refused_for_readers(disk: SimulatedDisk) -> None:
    open_replicated(disk, "/b/t-0").close()
    with pytest.raises(logcore.InvalidConfigError, match="for a writer"):
        logcore.open("/b/t-0", read_only=True, replicated=True, fs=disk)
