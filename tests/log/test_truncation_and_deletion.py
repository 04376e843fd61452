"""Truncation at the end of a log, and deletion at its front."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import logcore
from logcore.metadata import checkpoint
from logcore.reader import segments_between
from logcore.recordbatch import encode
from logcore.testing import SimulatedDisk
from support.logs import SMALL, T0, segments, values

# -- truncation and deletion -----------------------------------------------------------


@pytest.mark.parametrize("codec", ["uncompressed", "zstd"])
def test_truncation_anywhere_keeps_exactly_the_records_below(
    tmp_path: Path, codec: str
) -> None:
    for offset in range(0, 41, 3):
        partition = tmp_path / f"t-{offset}"
        with logcore.open(
            partition, create=True, config={**SMALL, "compression.type": codec}
        ) as log:
            log.append_many(
                [
                    (
                        b"k%d" % number,
                        b"%d" % number,
                        (("h", b"%d" % number),),
                        T0 + number,
                    )
                    for number in range(40)
                ]
            )
            log.truncate(offset)
            assert (log.log_end_offset, log.high_watermark) == (offset, offset)
            assert values(log) == [b"%d" % number for number in range(offset)]
            assert log.append(b"new").offset == offset
        with logcore.open(partition) as log:
            assert values(log) == [b"%d" % number for number in range(offset)] + [
                b"new"
            ]
            assert log.recovery_report is not None
            assert log.recovery_report.cut_position is None
        assert not list(partition.glob("*.tmp"))


def test_reader_of_a_growing_segment_detects_replaced_batches(
    partition: Path,
) -> None:
    """A crash lost batches that another reader had read under `os`, and new batches
    were appended in their place.
    """

    def batch(base: int, size: int) -> bytes:
        candidates = (
            encode([(None, b"%d" % base * count)], base_offset=base, leader_epoch=0)
            for count in range(size)
        )
        return next(data for data in candidates if len(data) == size)

    def batches_read() -> list[tuple[int, int]]:
        return [
            (batch.base_offset, batch.size_bytes)
            for batch in reader.batches(0)
            if batch.records()
        ]

    partition.mkdir(parents=True)
    file = partition / f"{0:020d}.log"
    file.write_bytes(batch(0, 100) + batch(1, 100) + batch(2, 100))
    with logcore.open(partition, read_only=True) as reader, file.open("ab") as writer:
        assert batches_read() == [(0, 100), (1, 100), (2, 100)]
        for kept_bytes, new_batches in (
            (100, [(0, 100)]),
            (100, [(0, 100), (1, 200)]),
            (300, [(0, 100), (1, 200), (2, 100), (3, 100)]),
            # Another batch begins at the position at which the last read ended.
            (
                100,
                [(0, 100), (1, 200), (2, 200), (3, 100)],
            ),
        ):
            os.truncate(file, kept_bytes)
            for base, size in new_batches[1 if kept_bytes == 100 else 2 :]:
                writer.write(batch(base, size))
            writer.flush()
            reader.refresh()
            assert batches_read() == new_batches
            assert reader.log_end_offset == len(new_batches)


def test_reader_of_deleted_records_gets_an_error(
    partition: Path,
) -> None:
    config = {"file.delete.delay.ms": 0}
    with logcore.open(partition, create=True, config=config) as log:
        for number in range(3):
            log.append(b"%d" % number)
            log.roll()
        with logcore.open(partition, read_only=True) as reader:
            log.delete_records(2)
            log.tick()
            assert segments(partition) == [2, 3]
            with pytest.raises(
                logcore.OffsetOutOfRangeError, match="removed by its writer"
            ):
                list(reader.read(0))
            assert [record.value for record in reader.read(2)] == [b"2"]


def test_mapped_segment_is_sent_after_its_file_was_deleted(
    partition: Path,
) -> None:
    with logcore.open(
        partition, create=True, config={"file.delete.delay.ms": 0}
    ) as log:
        for number in range(3):
            log.append(b"%d" % number)
            log.roll()
        with logcore.open(partition, read_only=True) as reader:
            assert reader.get(0).value == b"0"
            data = (partition / f"{0:020d}.log").read_bytes()
            log.delete_records(2)
            log.tick()
            assert segments(partition) == [2, 3]
            assert b"".join(reader.stored(0, 1, max_bytes=100)) == data


def test_checksum_file_is_ignored_if_its_segment_file_was_replaced(
    partition: Path,
) -> None:
    """The checksum file records that another segment follows. A file that replaced the
    sealed segment may be the last one.
    """
    with logcore.open(partition, create=True) as log:
        log.append(b"x")
        log.roll()
        log.append(b"y")
        log.scrub()
    (partition.parent / checkpoint.RECOVERY_POINT).unlink()
    for file in partition.glob(f"{1:020d}.*"):
        file.unlink()
    with pytest.raises(logcore.CorruptLogError, match="the next one is missing"):
        logcore.open(partition)
    os.utime(partition / f"{0:020d}.log", (1, 1))
    with logcore.open(partition) as log:
        assert values(log) == [b"x"]
        assert not list(partition.glob("*.seal"))


def test_reader_follows_a_truncation_into_an_earlier_segment(partition: Path) -> None:
    with logcore.open(partition, create=True) as log:
        for number in range(4):
            log.append(b"%d" % number)
            log.roll()
        with logcore.open(partition, read_only=True) as reader:
            assert values(reader) == [b"0", b"1", b"2", b"3"]
            log.truncate(1)
            log.append(b"new")
            assert reader.refresh()
            assert values(reader) == [b"0", b"new"]
            assert reader.times_truncated == 1
            statistics = reader.statistics()
            assert (
                statistics.segments,
                statistics.log_end_offset,
                statistics.appends,
                statistics.syncs,
            ) == (
                len(segments(partition)),
                2,
                0,
                0,
            )
            assert statistics.size_bytes == sum(
                file.stat().st_size for file in partition.glob("*.log")
            )


def test_reader_of_a_file_that_became_shorter_does_not_hang(
    partition: Path,
) -> None:
    """The writer removes an interrupted append, so that the size that the reader stored
    is too large.
    """
    calls: list[Callable[[logcore.Log], object]] = [
        lambda reader: list(reader.read(0)),
        lambda reader: list(reader.read(0, isolation="read_committed")),
        lambda reader: reader.get(4),
        lambda reader: reader.newest(),
        lambda reader: reader.offset_for_timestamp(T0 + 99),
        lambda reader: reader.stored(4, max_bytes=100),
    ]
    with logcore.open(partition, create=True, durability="os") as log:
        for number in range(5):
            log.append(b"x" * 32, timestamp_ms=T0 + number)
        data = (partition / f"{0:020d}.log").read_bytes()
        for call in calls:
            with logcore.open(partition, read_only=True) as reader:
                os.truncate(partition / f"{0:020d}.log", len(data) // 5 * 3)
                with contextlib.suppress(logcore.LogcoreError):
                    call(reader)
                reader.refresh()
                assert [record.offset for record in reader.read(0)] == [0, 1, 2]
                assert reader.offset_for_timestamp(T0 + 99) is None
            (partition / f"{0:020d}.log").write_bytes(data)


def test_reader_of_a_growing_segment_reloads_the_index(
    partition: Path,
) -> None:
    with logcore.open(
        partition, create=True, config={"index.interval.bytes": 10_000}
    ) as log:
        log.append(b"first")
        with logcore.open(partition, read_only=True) as reader:
            assert reader.get(0).value == b"first"
            (segment,) = segments_between(reader, 0, 1)
            index = segment.offset_index
            log.append(b"little")
            assert reader.refresh() and segment.offset_index is index
            log.truncate(1)
            for number in range(1, 200):
                log.append(b"%03d" % number * 5_000)
            log.host.writer.active.try_write_indexes()
            assert reader.refresh()
            (segment,) = segments_between(reader, 0, 200)
            assert reader.get(199).value == b"199" * 5_000
            assert len(segment.offset_index) > 100, (
                "without the index, each lookup would scan 3 MB"
            )


def test_views_of_a_growing_segment_are_copies(partition: Path) -> None:
    """The writer may truncate the files. Access to a mapping of a truncated file ends
    the process.
    """
    with logcore.open(
        partition, create=True, config={"index.interval.bytes": 0}
    ) as log:
        for number in range(10):
            log.append(b"x" * 1_000, timestamp_ms=T0 + number)
        log.host.writer.active.try_write_indexes()
        with logcore.open(partition, read_only=True) as reader:
            (segment,) = segments_between(reader, 0, 10)
            views = segment.view(), segment.offset_index.data, segment.time_index.data
            files = [
                partition / f"{0:020d}{suffix}"
                for suffix in (".log", ".index", ".timeindex")
            ]
            before = [file.read_bytes() for file in files]
            for file in files:
                os.truncate(file, 0)
            assert [bytes(view) for view in views] == before
            assert (before[1], before[2]) != (b"", b"")
            for file, content in zip(files, before, strict=True):
                file.write_bytes(content)


@pytest.mark.parametrize("sealed", [True, False])
def test_search_by_time_fails_at_a_damaged_batch(partition: Path, sealed: bool) -> None:
    with logcore.open(partition, create=True) as log:
        for number in range(3):
            log.append(b"x" * 32, timestamp_ms=T0 + number)
        if sealed:
            log.roll()
            log.append(b"last", timestamp_ms=T0)
    (partition / f"{0:020d}.timeindex").unlink()
    file = partition / f"{0:020d}.log"
    data = bytearray(file.read_bytes())
    data[150] ^= 1
    file.write_bytes(data)
    with logcore.open(partition, read_only=True) as log:
        with pytest.raises(logcore.CorruptBatchError) as caught:
            log.offset_for_timestamp(T0 + 99)
        assert caught.value.position == 100


def test_search_by_time_checks_batches_again_after_a_truncation(
    partition: Path,
) -> None:
    """A search by time checks the batches of the active segment once, up to the
    position that it reached.
    """
    with logcore.open(partition, create=True) as log:
        for number in range(5):
            log.append(b"%d" % number, timestamp_ms=T0 + number)
        assert log.newest() == (4, T0 + 4)
        log.truncate(2)
        for number in range(3):
            log.append(b"n", timestamp_ms=T0 - number)
        assert log.newest() == (1, T0 + 1)
        log.truncate(2)
        for number in range(3):
            log.append(b"%d" % number, timestamp_ms=T0 + 9)
        file = partition / f"{0:020d}.log"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(logcore.CorruptBatchError):
            log.newest()


def test_truncation_outside_the_log_is_refused(partition: Path) -> None:
    with logcore.open(partition, create=True) as log:
        log.append(b"x")
        for offset in (-1, 2):
            with pytest.raises(logcore.OffsetOutOfRangeError):
                log.truncate(offset)
        log.truncate(1)
        assert (log.log_end_offset, log.times_truncated) == (1, 0), (
            "truncation at the log end removes nothing"
        )


@pytest.mark.parametrize("policy", ["group", "always"])
def test_records_after_a_truncation_are_hidden_until_synced(
    policy: str,
) -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, durability=policy, fs=disk) as log:
        for _ in range(3):
            log.append(b"gone")
        log.truncate(1)
        log.append(b"new", durability="os")
        with logcore.open("t-0", read_only=True, fs=disk) as reader:
            assert (log.high_watermark, reader.high_watermark) == (1, 1)
            log.flush()
            reader.refresh()
            assert values(reader) == values(log) == [b"gone", b"new"]


def test_delete_records_moves_the_log_start_and_deletes_whole_segments(
    partition: Path,
) -> None:
    with logcore.open(partition, create=True, config={"segment.bytes": 250}) as log:
        for number in range(8):
            log.append(b"%d" % number * 32)
        iterator = log.read(0)
        first = next(iterator)
        assert log.delete_records(5) == 5
        assert segments(partition) == [4, 6]
        assert log.delete_records(3) == 5
        assert [record.offset for record in log.read(5)] == [5, 6, 7]
        assert [first.offset, *(record.offset for record in iterator)] == list(
            range(8)
        ), "readers keep the segments that they hold"
        with pytest.raises(logcore.OffsetOutOfRangeError):
            log.read(4)
        for outside in (-1, 9):
            with pytest.raises(logcore.OffsetOutOfRangeError):
                log.delete_records(outside)
    with logcore.open(partition) as log:
        assert (log.log_start_offset, log.log_end_offset) == (5, 8)
        log.delete_records(8)
        assert log.append(b"x").offset == 8
    with logcore.open(partition, read_only=True) as log:
        assert (log.log_start_offset, values(log)) == (8, [b"x"])
