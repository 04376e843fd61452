"""Caches of a reader: checkpoints of the log directory, and the file position of a
tail.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import logcore
from logcore.fs import OS, OsFS
from logcore.metadata import checkpoint
from logcore.partition.persisted import PersistedOffsets
from logcore.testing import SimulatedDisk

NAME = checkpoint.LOG_START


def write_checkpoint(directory: str, offset: int, fs: OsFS = OS) -> None:
    checkpoint.write(fs, directory, NAME, b"0\n1\nt 0 %d\n" % offset)


def test_reader_detects_two_replacements_in_succession(
    tmp_path: Path,
) -> None:
    """The file system may reuse the inode number of a replaced file two replacements
    later.
    """
    (tmp_path / "t-0").mkdir()
    persisted_offsets = PersistedOffsets(OS, str(tmp_path / "t-0"))
    assert persisted_offsets.get(NAME) == 0
    for offset in range(300):
        write_checkpoint(str(tmp_path), offset)
        assert persisted_offsets.get(NAME) == offset


def test_unchanged_file_is_not_read_again() -> None:
    disk = SimulatedDisk({"data/t-0": None})
    write_checkpoint("/data", 7, disk)  # type: ignore[arg-type]
    persisted_offsets = PersistedOffsets(disk, "/data/t-0")
    disk.advance(1_000)
    opened_paths: list[str] = []
    disk_open = disk.open
    disk.open = lambda path, **options: (
        opened_paths.append(path) or disk_open(path, **options)
    )  # type: ignore[method-assign]
    assert [persisted_offsets.get(NAME) for _ in range(5)] == [7] * 5
    assert len(opened_paths) == 1
    write_checkpoint("/data", 8, disk)  # type: ignore[arg-type]
    assert persisted_offsets.get(NAME) == 8


@pytest.mark.parametrize("durability", ["os", "group"])
def test_tail_of_another_log_object_continues_through_rolls_and_deletions(
    tmp_path: Path, durability: str
) -> None:
    path = tmp_path / "t-0"
    with (
        logcore.open(
            path, create=True, durability=durability, config={"segment.bytes": 2_000}
        ) as log,
        logcore.open(path, read_only=True) as reader,
    ):
        tail = reader.tail(0, timeout=300)
        for number in range(300):
            log.append(b"%d" % number, headers=[("h", b"x" * (number % 50))])
            if number % 97 == 96:
                log.delete_records(number - 1)
            record = next(tail)
            assert (record.offset, record.value) == (number, b"%d" % number)
        log.truncate(290)
        log.append(b"another")
        with pytest.raises(logcore.OffsetOutOfRangeError):
            next(tail)


def test_tail_does_not_search_for_its_position_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from logcore.partition.scan import LogRange

    path = tmp_path / "t-0"
    searched: list[int] = []
    find = LogRange._find
    monkeypatch.setattr(
        LogRange,
        "_find",
        staticmethod(lambda *given: searched.append(given[1]) or find(*given)),
    )
    with (
        logcore.open(path, create=True) as log,
        logcore.open(path, read_only=True) as reader,
    ):
        log.append(b"0")
        tail = reader.tail(0, timeout=300)
        for number in range(1, 20):
            next(tail)
            log.append(b"%d" % number)
    assert len(searched) <= 1, searched


def test_reader_ends_at_the_high_watermark_after_the_file_was_truncated(
    tmp_path: Path,
) -> None:
    """A writer truncates the torn batch of a killed writer after the reader has read
    the size of the file.
    """
    path = tmp_path / "t-0"
    with logcore.open(path, create=True) as log:
        log.append_many([(None, b"%d" % number) for number in range(3)])
    file = path / "00000000000000000000.log"
    sound = file.read_bytes()
    file.write_bytes(sound + (3).to_bytes(8, "big") + (70).to_bytes(4, "big") + b"torn")
    with logcore.open(path, read_only=True) as reader:
        assert reader.high_watermark == 3
        file.write_bytes(sound)
        assert [record.value for record in reader.read(0)] == [b"0", b"1", b"2"]


def test_durable_end_file_created_later_is_found() -> None:
    """A reader without a durable end file opens the file again only after a name in the
    directory changed.
    """
    disk = SimulatedDisk()
    with logcore.open("/data/t-0", create=True, durability="os", fs=disk) as log:
        log.append(b"shown")
    disk.advance(10_000)
    with logcore.open("/data/t-0", read_only=True, fs=disk) as reader:
        assert not reader.refresh()
        opened_paths: list[str] = []
        disk_open = disk.open
        disk.open = lambda path, **named: (
            opened_paths.append(path) or disk_open(path, **named)
        )  # type: ignore[method-assign]
        assert not reader.refresh()
        assert not [
            path for path in opened_paths if path.endswith(checkpoint.DURABLE_END)
        ]
        disk.open = disk_open  # type: ignore[method-assign]
        with logcore.open("/data/t-0", durability="group", fs=disk) as log:
            log.append(b"on disk")
            log.append(b"not yet", durability="os")
            reader.refresh()
            assert reader.high_watermark == 2
            log.flush()
            reader.refresh()
            assert reader.high_watermark == 3


def test_tail_refreshes_before_waiting_and_once_per_record() -> None:
    disk = SimulatedDisk()
    with (
        logcore.open("/data/t-0", create=True, durability="os", fs=disk) as log,
        logcore.open("/data/t-0", read_only=True, fs=disk) as reader,
    ):
        tail = reader.tail(0, timeout=0)
        log.append(b"before the first refresh")
        assert next(tail).offset == 0
        refreshes = []
        refresh = reader.refresh
        reader.refresh = lambda: refreshes.append(1) or refresh()  # type: ignore[method-assign]
        for offset in range(1, 4):
            log.append(b"x")
            assert next(tail).offset == offset
        assert len(refreshes) == 3, "one for each new record"
        assert next(tail, None) is None
        assert len(refreshes) == 4
