"""Segment checksum files and scrubbing: a scrub finds a flip of any bit in sealed
segments, and reports no change by a program as rot.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.inspect.dump import dump
from logcore.inspect.verify import verify
from logcore.kernels.checksum import crc32c
from logcore.metadata.filenames import LOG, SEAL, file_name
from logcore.partition import checksum_file
from logcore.partition.checksum_file import Finding, Seal
from logcore.recordbatch import encode
from logcore.testing import Fault, FaultPlan, SimulatedDisk, explore
from logcore.testing.oracle import recover_log
from support.staged import create, publish
from support.vectors import EXPECTED, VECTORS

T0 = 1_700_000_000_000
CODECS = ["uncompressed", "gzip", "snappy", "lz4", "zstd"]
PATH = "/data/t-0"

Files = dict[str, bytes]


def fill_log(
    disk: SimulatedDisk, *, rolls: int = 3, codec: str = "uncompressed", **options: Any
) -> logcore.Log:
    """Create a log with sealed segments and an active one. Each segment has two batches
    of two records.
    """
    log = logcore.open(PATH, create=True, fs=disk, **options)
    for number in range(rolls + 1):
        if number:
            log.roll()
        for batch_number in range(2):
            rows = [
                (b"k%d" % row, b"value %d" % number, (), T0 + number)
                for row in (batch_number, batch_number + 2)
            ]
            log.append_batch(encode(rows, codec=codec))
    return log


def filled_files(**options: Any) -> Files:
    """Return the files of the log of fill_log() after it is closed."""
    disk = SimulatedDisk(now_ms=T0)
    fill_log(disk, **options).close()
    return disk.files()


def path_of(base: int, suffix: str = LOG) -> str:
    return f"{PATH}/{file_name(base, suffix)}"


def flip_bit(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def scrub_files(
    files: Files, *, read_only: bool = True, **options: Any
) -> logcore.ScrubReport:
    disk = SimulatedDisk(files, now_ms=T0)
    with logcore.open(PATH, read_only=read_only, fs=disk, **options) as log:
        return log.scrub()


def damaged_files(files: Files, path: str = PATH) -> set[str]:
    """Return the base names of the files that verify reports as damaged."""
    disk = SimulatedDisk(files, now_ms=T0)
    return {
        os.path.basename(verdict.path)
        for verdict in verify(path, fs=disk)
        if verdict.status == "damaged"
    }


def without_checksum_files(files: Files) -> Files:
    return {path: data for path, data in files.items() if not path.endswith(SEAL)}


def bases_with(files: Files, suffix: str) -> list[int]:
    return sorted(
        int(os.path.basename(path)[:20]) for path in files if path.endswith(suffix)
    )


# -- contents of a checksum file -------------------------------------------------------


def test_roll_writes_a_checksum_file_for_the_sealed_segment() -> None:
    files = filled_files(rolls=2)
    assert bases_with(files, LOG) == [0, 4, 8] and bases_with(files, SEAL) == [0, 4]
    seal = Seal.unpack(files[path_of(4, SEAL)])
    assert seal == Seal(
        size_bytes=len(files[path_of(4)]),
        modified_ms=T0,
        crc32c=crc32c(files[path_of(4)]),
        end_offset=8,
        next_base_offset=8,
    )
    assert files[path_of(4, SEAL)].count(b"\n") == 1 and files[
        path_of(4, SEAL)
    ].endswith(b"\n")


def test_log_rolls_after_another_program_deleted_its_segment() -> None:
    """The append after the roll raised FileNotFoundError, which is not an error of
    logcore.
    """
    disk = SimulatedDisk()
    with logcore.open("/t-0", create=True, durability="os", fs=disk) as log:
        log.append(b"0")
        disk.unlink("/t-0/00000000000000000000.log")
        log.roll()
        assert log.append(b"1").offset == 1
        # Each read of the lost records and the next opening report the loss.
        with pytest.raises(logcore.OffsetOutOfRangeError, match="was removed"):
            log.get(0)
    with pytest.raises(
        logcore.CorruptLogError, match="segments of the log are missing"
    ):
        logcore.open("/t-0", durability="os", fs=disk)


def test_checksum_file_is_dumped_and_a_torn_one_is_refused() -> None:
    files = filled_files(rolls=1)
    (row,) = dump(path_of(0, SEAL), fs=SimulatedDisk(files))
    assert (row["type"], row["end_offset"], row["next_base_offset"]) == ("seal", 4, 4)
    for size in range(len(files[path_of(0, SEAL)])):
        disk = SimulatedDisk(
            {**files, path_of(0, SEAL): files[path_of(0, SEAL)][:size]}
        )
        with pytest.raises(logcore.CorruptLogError):
            list(dump(path_of(0, SEAL), fs=disk))


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b"[]",
        b'{"size_bytes":1}',
        b'{"size_bytes":[],"modified_ms":1,"crc32c":1,"end_offset":1,"next_base_offset":1}',
    ],
)
def test_invalid_checksum_file_unpacks_to_none(text: bytes) -> None:
    import zlib

    assert Seal.unpack(b"%s %08x\n" % (text, zlib.crc32(text))) is None
    assert Seal.unpack(text) is None


def test_segment_too_large_for_a_roll_gets_its_checksum_from_the_scrub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checksum_file, "ROLL_BYTES", 10)
    disk = SimulatedDisk(now_ms=T0)
    with fill_log(disk) as log:
        assert not bases_with(disk.files(), SEAL)
        report = log.scrub()
        assert (report.segments, report.sealed, report.is_sound) == (4, 3, True)
        assert bases_with(disk.files(), SEAL) == [0, 4, 8]
        assert log.scrub().sealed == 0


def test_segment_appended_before_the_opening_gets_no_checksum_file_at_a_roll() -> None:
    """Opening does not read the segment. If the roll computed a checksum, it would
    include existing rot.
    """
    files = filled_files(rolls=1)
    disk = SimulatedDisk(
        {**files, path_of(4): flip_bit(files[path_of(4)], 8 * 30)}, now_ms=T0
    )
    with logcore.open(PATH, fs=disk) as log:
        log.append(b"more")
        log.roll()
        assert bases_with(disk.files(), SEAL) == [0]
        (finding,) = log.scrub().findings
        assert (finding.position, finding.first_offset, finding.next_offset) == (
            0,
            4,
            9,
        )
        assert bases_with(disk.files(), SEAL) == [0]


# -- rot -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("step", [19, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("codec", CODECS)
def test_T11_every_bit_flip_of_a_sealed_segment_is_found(codec: str, step: int) -> None:
    """The flips include the 17 bytes of each batch header that no CRC covers. `make
    check` flips one bit in 19, and `make slow` flips all bits.
    """
    files = filled_files(rolls=1, codec=codec)
    assert scrub_files(files).is_sound and not damaged_files(files)
    for bit in range(0, len(files[path_of(0)]) * 8, step):
        changed_files = {**files, path_of(0): flip_bit(files[path_of(0)], bit)}
        (finding,) = scrub_files(changed_files).findings
        assert (finding.path, finding.next_offset) == (path_of(0), 4), bit
        assert file_name(0, SEAL) in damaged_files(changed_files), bit


@pytest.mark.long
@pytest.mark.parametrize("step", [43, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", sorted(name for name in EXPECTED if name.startswith(("v0", "v1")))[::5]
)
def test_every_bit_flip_of_an_old_segment_is_found(name: str, step: int) -> None:
    """Segments of formats v0 and v1 as Kafka wrote them, with checksum files from a
    scrub.
    """
    data = (VECTORS / "records" / name).read_bytes()
    files = {path_of(0): data, path_of(1 << 20): b""}
    disk = SimulatedDisk(files, now_ms=T0)
    with logcore.open(PATH, fs=disk) as log:
        assert log.scrub().sealed == 1
    sealed = disk.files()
    for bit in range(0, len(data) * 8, step):
        changed_files = {**sealed, path_of(0): flip_bit(data, bit)}
        assert scrub_files(changed_files).findings, bit
        assert file_name(0, SEAL) in damaged_files(changed_files), bit


@pytest.mark.long
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_flip_of_a_checksum_file_disables_it(step: int) -> None:
    files = filled_files(rolls=1)
    rotten = flip_bit(files[path_of(0)], 8 * 70)
    for bit in range(0, len(files[path_of(0, SEAL)]) * 8, step):
        changed_files = {
            **files,
            path_of(0, SEAL): flip_bit(files[path_of(0, SEAL)], bit),
        }
        assert Seal.unpack(changed_files[path_of(0, SEAL)]) is None, bit
        assert (
            not damaged_files(changed_files) and scrub_files(changed_files).is_sound
        ), bit
        assert scrub_files({**changed_files, path_of(0): rotten}).findings, bit
    disk = SimulatedDisk(changed_files, now_ms=T0)
    assert [verdict.status for verdict in verify(path_of(0, SEAL), fs=disk)] == [
        "warning"
    ]
    with logcore.open(PATH, fs=disk) as log:
        assert log.scrub().sealed == 1
    assert disk.files()[path_of(0, SEAL)] == files[path_of(0, SEAL)]


@pytest.mark.parametrize("is_dense", [True, False])
def test_flipped_offset_is_found(is_dense: bool) -> None:
    """No CRC covers the offset. A scrub finds the flip through the checksum file, and a
    read through the batches around it.
    """
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open(
        PATH, create=True, fs=disk, config={"index.interval.bytes": 1 << 20}
    ) as log:
        for number in range(4):
            log.append(b"%d" % number)
        log.roll()
        log.append(b"4")
    files = disk.files()
    # The first batch now has the base offset of the last one.
    damaged_files = {
        **files,
        path_of(0): bytes(7) + b"\3" + files[path_of(0)][8:],
    }
    if not is_dense:
        del damaged_files[f"{PATH}/logcore.policy"]
    with logcore.open(PATH, fs=SimulatedDisk(damaged_files, now_ms=T0)) as log:
        with pytest.raises(
            logcore.CorruptBatchError, match="does not continue the one before it"
        ):
            log.get(3)
        (finding,) = log.scrub().findings
    # If offsets may have gaps, batches before the first wrong offset count as sound.
    first = 0 if is_dense else 4
    assert (finding.path, finding.first_offset, finding.next_offset) == (
        path_of(0),
        first,
        4,
    )


@pytest.mark.parametrize("missing_offset", [4, 8])
@pytest.mark.parametrize("is_dense", [True, False])
def test_missing_segment_is_found(missing_offset: int, is_dense: bool) -> None:
    """The checksum file of the previous segment shows the loss, even if offsets may
    have gaps.
    """
    files = filled_files(rolls=3)
    if not is_dense:
        del files[f"{PATH}/logcore.policy"]
    remaining = {
        path: data
        for path, data in files.items()
        if not os.path.basename(path).startswith(f"{missing_offset:020d}")
    }
    reasons = [finding.reason for finding in scrub_files(remaining).findings]
    assert reasons == [
        f"the next segment, which begins at offset {missing_offset}, is gone"
    ]
    assert damaged_files(remaining) >= {file_name(missing_offset - 4, SEAL)}
    if not is_dense:
        # No other file shows the loss.
        assert scrub_files(without_checksum_files(remaining)).is_sound


@pytest.mark.parametrize("quarantines", [True, False])
def test_missing_last_segment_is_found(quarantines: bool) -> None:
    """The loss is found even if the segment had no records below the recovery point.
    Opening must not continue at offsets that were already assigned.
    """
    files = filled_files(rolls=2)
    for path in list(files):
        if os.path.basename(path).startswith(f"{8:020d}") or path.endswith(
            "-checkpoint"
        ):
            del files[path]
    disk = SimulatedDisk(files, now_ms=T0)
    assert damaged_files(files) == {file_name(4, SEAL)}
    assert [finding.reason for finding in scrub_files(files).findings] == [
        "the next segment, which begins at offset 8, is gone"
    ]
    if not quarantines:
        with pytest.raises(logcore.CorruptLogError, match="the next one is missing"):
            logcore.open(PATH, fs=disk)
        assert disk.files()[path_of(4, SEAL)] == files[path_of(4, SEAL)]
        return
    with logcore.open(PATH, fs=disk, on_corruption="quarantine") as log:
        assert (
            log.recovery_report is not None
            and log.recovery_report.damage[0].next_offset is None
        )
        assert len(list(log.read(0))) == 8
        with pytest.raises(logcore.LogFailedError):
            log.append(b"at a used offset")


def test_swapped_segments_are_found() -> None:
    files = filled_files(rolls=3)
    assert len(files[path_of(0)]) == len(files[path_of(4)])
    swapped = {**files, path_of(0): files[path_of(4)], path_of(4): files[path_of(0)]}
    assert [finding.path for finding in scrub_files(swapped).findings] == [
        path_of(0),
        path_of(4),
    ]
    assert damaged_files(swapped) >= {file_name(0, SEAL), file_name(4, SEAL)}
    with_seals = {
        **swapped,
        path_of(0, SEAL): files[path_of(4, SEAL)],
        path_of(4, SEAL): files[path_of(0, SEAL)],
    }
    assert {file_name(0, LOG), file_name(0, SEAL), file_name(4, LOG)} & damaged_files(
        with_seals
    )
    assert scrub_files(with_seals).findings


def test_segment_that_overlaps_the_next_is_found() -> None:
    """A stale file begins between two consecutive segments."""
    files = filled_files(rolls=2)
    overlapping = {**files, path_of(2): b""}
    assert [finding.reason for finding in scrub_files(overlapping).findings][:1] == [
        "segment 2 begins before this one ends"
    ]
    assert file_name(0, SEAL) in damaged_files(overlapping)


def test_rot_in_the_active_segment_is_found() -> None:
    files = filled_files(rolls=1)
    for bit in range(17 * 8, len(files[path_of(4)]) * 8, 7):
        report = scrub_files({**files, path_of(4): flip_bit(files[path_of(4)], bit)})
        if bit // 8 % 100 >= 17 or report.findings:
            assert [finding.path for finding in report.findings] == [path_of(4)]
    (finding,) = scrub_files({**files, path_of(4): files[path_of(4)][:-1]}).findings
    assert finding.path == path_of(4)


def test_writer_scrubs_unsynced_records_and_a_reader_does_not() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open(PATH, create=True, fs=disk) as log:
        log.append(b"on disk")
        size = log.statistics().size_bytes
        log.append(b"in memory", durability="os")
        disk.flip(path_of(0), size + 70)
        assert [finding.path for finding in log.scrub().findings] == [path_of(0)]
        with logcore.open(PATH, read_only=True, fs=disk) as reader:
            assert reader.high_watermark == 1
            assert reader.scrub().is_sound


# -- changes by programs are not rot ---------------------------------------------------


def test_segment_rewritten_by_another_program_gets_a_new_checksum_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t-0"
    with logcore.open(path, create=True) as log:
        for number in range(2):
            log.append(b"%d" % number, timestamp_ms=T0)
            log.roll()
        log.append(b"2")
    segment = path / file_name(0, LOG)
    seal = path / file_name(0, SEAL)
    before = seal.read_bytes()
    data = segment.read_bytes()
    segment.write_bytes(encode([(None, b"9", (), T0)]))
    os.utime(segment, ns=(0, 1_000_000_000 * 10**6))
    (verdict,) = verify(seal)
    assert (verdict.status, verdict.detail) == (
        "ok",
        "the segment was rewritten since it was sealed",
    )
    with logcore.open(path) as log:
        report = log.scrub()
        assert report.is_sound and report.sealed == 1
        assert seal.read_bytes() != before
        assert log.scrub().sealed == 0
    segment.write_bytes(data)
    os.utime(segment, ns=(0, 1_000_000_000 * 10**6))
    assert [verdict.status for verdict in verify(seal)] == ["damaged"]


def test_restored_segment_with_damage_gets_no_checksum_file() -> None:
    files = filled_files(rolls=1)
    disk = SimulatedDisk(
        {**files, path_of(0): flip_bit(files[path_of(0)], 999)}, now_ms=T0 + 5
    )
    with logcore.open(PATH, fs=disk) as log:
        assert log.scrub().findings
    assert disk.files()[path_of(0, SEAL)] == files[path_of(0, SEAL)]


def compact(log: logcore.Log) -> None:
    log.reconfigure({"cleanup.policy": "compact", "segment.bytes": 1 << 20})
    assert logcore.clean(log, force=True) is not None


CHANGES: dict[str, Callable[[logcore.Log], Any]] = {
    "truncate in the middle": lambda log: log.truncate(5),
    "truncate at a border": lambda log: log.truncate(8),
    "truncate all": lambda log: log.truncate(0),
    "compact": compact,
    "delete": lambda log: log.delete_records(9),
    "retain": lambda log: log.retain(segments=2),
    "retain all": lambda log: log.retain(segments=4),
    "roll": lambda log: log.roll(),
}


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_a_log_leaves_a_stale_checksum_file(change: str) -> None:
    disk = SimulatedDisk(now_ms=T0)
    with fill_log(disk) as log:
        CHANGES[change](log)
        assert not damaged_files(disk.files())
        assert log.scrub().is_sound
        for number in range(12):  # the same offsets again, in files of the same sizes
            log.append_batch(encode([(b"k%d" % number, b"another", (), T0)] * 2))
            if number % 2:
                log.roll()
            assert not damaged_files(disk.files())
        assert log.scrub().is_sound
        assert bases_with(disk.files(), SEAL) == bases_with(disk.files(), LOG)[:-1]
    assert not damaged_files(disk.files())


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_compaction_writes_a_checksum_file(step: int) -> None:
    disk = SimulatedDisk(now_ms=T0)
    with fill_log(disk) as log:
        compact(log)
        files = disk.files()
        assert bases_with(files, SEAL) == [0]
        seal = Seal.unpack(files[path_of(0, SEAL)])
        assert (
            seal is not None
            and seal.next_base_offset == 12
            and seal.crc32c == crc32c(files[path_of(0)])
        )
        assert seal.end_offset == list(log.batches(0, 12))[-1].next_offset
        assert log.scrub().sealed == 0
    for bit in range(0, len(files[path_of(0)]) * 8, step):
        assert scrub_files(
            {**disk.files(), path_of(0): flip_bit(files[path_of(0)], bit)}
        ).findings, bit


def test_copies_and_originals_of_forks_and_snapshots_are_sound(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("one")
        log = logdir.partition("one", 0)
        for number in range(9):
            log.append(b"%d" % number)
            if number % 3 == 2:
                log.roll()
        logdir.fork("one", 7, "two")
        logdir.fork("one", 6, "three")
        logdir.snapshot(tmp_path / "backup")
        logcore.restore(tmp_path / "backup", tmp_path / "copy")
        log.truncate(4)
        for _ in range(5):
            log.append(b"again")
            log.roll()
        assert all(report.is_sound and not report.skipped for report in logdir.scrub())
        assert {os.path.basename(report.path) for report in logdir.scrub()} == {
            "one-0",
            "two-0",
            "three-0",
        }
    assert not [
        verdict
        for name in ("data", "copy")
        for verdict in verify(tmp_path / name)
        if verdict.status == "damaged"
    ]
    # shutil.copy gives the copies other modification times.
    shutil.copytree(tmp_path / "copy", tmp_path / "again", copy_function=shutil.copy)
    with logcore.open_dir(tmp_path / "again") as logdir:
        assert [(report.is_sound, report.sealed) for report in logdir.scrub()] == [
            (True, 3),
            (True, 2),
            (True, 2),
        ]


def test_staged_writes_are_sound(tmp_path: Path) -> None:
    with logcore.open_dir(
        create(tmp_path / "data", {"segment.bytes": "2000"})
    ) as logdir:
        publish(tmp_path / "data", "one")
        logdir.tick()
        assert all(report.is_sound for report in logdir.scrub())
        publish(tmp_path / "data", "two")
        logdir.tick()
        logs = [
            logdir.partition(name, number)
            for name in logdir.topics()
            for number in logdir.partitions(name)
        ]
        assert sum(log.statistics().segments for log in logs) > len(logs)
        for log in logs:
            log.roll()
        assert all(report.is_sound for report in logdir.scrub())
    assert not [
        verdict for verdict in verify(tmp_path / "data") if verdict.status == "damaged"
    ]


@pytest.mark.parametrize(
    "name", sorted(path.name for path in VECTORS.glob("partition-*"))
)
def test_partitions_of_kafka_are_sound(name: str, tmp_path: Path) -> None:
    shutil.copytree(VECTORS / name, tmp_path / name)
    with logcore.open_dir(tmp_path / name, read_only=True) as logdir:
        assert all(report.is_sound for report in logdir.scrub())
    with logcore.open_dir(tmp_path / name) as logdir:
        reports = logdir.scrub()
        assert all(
            report.is_sound and report.sealed == report.segments - 1
            for report in reports
        )
        assert sum(report.segments for report in reports) > 0
    assert not [
        verdict for verdict in verify(tmp_path / name) if verdict.status == "damaged"
    ]


# -- concurrent changes ----------------------------------------------------------------


def test_read_only_scrub_writes_nothing() -> None:
    files = without_checksum_files(filled_files())
    disk = SimulatedDisk(files, now_ms=T0)
    with logcore.open(PATH, read_only=True, fs=disk) as log:
        report = log.scrub()
    assert (report.segments, report.sealed, report.is_sound) == (4, 0, True)
    assert disk.files() == files


@pytest.mark.long
@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_change_at_any_step_of_a_scrub_is_not_damage(
    change: str, read_only: bool, monkeypatch: Any
) -> None:
    """A concurrent writer, or the log of the scrub itself, makes the change at the n-th
    read of a segment, for each n.
    """
    monkeypatch.setattr(checksum_file, "_STEP_BYTES", 1)
    original_pread = SimulatedDisk.pread
    for count in itertools.count(1):
        disk = SimulatedDisk(now_ms=T0)
        writer = fill_log(disk)
        log = logcore.open(PATH, read_only=True, fs=disk) if read_only else writer
        remaining = [count]

        def pread(
            self: SimulatedDisk,
            handle: int,
            *arguments: int,
            remaining: Any = remaining,
            writer: Any = writer,
        ) -> bytes:
            # In a real process, the change would wait for the lock.
            is_free = not writer._state.lock.locked()
            if is_free and self._open_handle(handle)[1].endswith(LOG):
                remaining[0] -= 1
                if remaining[0] == 0:
                    CHANGES[change](writer)
            return original_pread(self, handle, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(SimulatedDisk, "pread", pread)
            report = log.scrub()
        assert report.is_sound, (count, report)
        writer.close()
        assert not damaged_files(disk.files()), count
        if remaining[0] > 0:
            break
    assert count > 4


@pytest.mark.long
def test_scrub_runs_concurrently_with_a_writer_and_a_cleaner(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    config = {"cleanup.policy": "compact,delete", "segment.bytes": 4000}
    with logcore.open(path, create=True, config=config, durability="os") as log:
        is_over = threading.Event()
        failures = []

        def write() -> None:
            try:
                for number in range(400):
                    log.append_many([(b"k%d" % (number % 50), b"v" * 50, (), T0)] * 10)
                    if number % 40 == 39:
                        logcore.clean(log, force=True)
                    if number % 90 == 89:
                        log.truncate(log.log_end_offset - 7)
                    if number % 150 == 149:
                        log.retain(segments=1)
            except BaseException as error:
                failures.append(error)
            finally:
                is_over.set()

        thread = threading.Thread(target=write)
        thread.start()
        reader = logcore.open(path, read_only=True)
        while not is_over.is_set():
            assert log.scrub().is_sound
            assert reader.scrub().is_sound
            assert not [
                verdict
                for verdict in verify(path)
                if verdict.kind == "seal" and verdict.status == "damaged"
            ]
        thread.join()
        assert not failures
        report = log.scrub()
        assert report.is_sound and not report.skipped and report.segments > 1


def test_file_deleted_at_the_end_of_a_scrub_is_skipped() -> None:
    files, query_count = filled_files(), 0
    disk = SimulatedDisk(files, now_ms=T0)
    original_modified_ms = disk.modified_ms

    def modified_ms(path: str) -> int:
        nonlocal query_count
        query_count += path == path_of(4)
        if path == path_of(4) and query_count == 2:
            disk.unlink(path)
        return original_modified_ms(path)

    disk.modified_ms = modified_ms  # type: ignore[method-assign]
    with logcore.open(PATH, fs=disk, read_only=True) as log:
        report = log.scrub()
    assert query_count == 2 and report.skipped == 1 and report.is_sound


def test_read_error_during_a_scrub_is_not_damage() -> None:
    files = filled_files()
    plan = FaultPlan(Fault("pread", errno.EIO, path="*" + file_name(4, LOG)))
    disk = SimulatedDisk(files, now_ms=T0, faults=plan)
    with (
        logcore.open(PATH, read_only=True, fs=disk) as log,
        pytest.raises(logcore.StorageReadError),
    ):
        log.scrub()


def test_failed_write_of_a_checksum_file_does_not_fail_the_log() -> None:
    for operation in ("create", "pwrite"):
        disk = SimulatedDisk(now_ms=T0)
        disk.faults = FaultPlan(
            Fault(operation, errno.ENOSPC, path="*" + SEAL, times=3)
        )
        with fill_log(disk) as log:
            assert len(list(log.read(0))) == 16
            assert log.scrub().is_sound
        assert not damaged_files(disk.files())


def test_scrub_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum_file, "_STEP_BYTES", 1)
    disk = SimulatedDisk(now_ms=T0)
    with fill_log(disk) as log:
        steps = list(log.scrubbing())
        done_bytes = [step.done_bytes for step in steps]
        assert done_bytes == sorted(set(done_bytes)) and len(done_bytes) >= 4
        assert done_bytes[-1] == steps[-1].total_bytes == log.statistics().size_bytes
        assert log.scrub().checked_bytes == done_bytes[-1]


def test_partition_that_failed_to_open_has_a_scrub_report() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open_dir("/data", create=True, fs=disk) as logdir:
        for name in ("a", "b"):
            logdir.create_topic(name)
            log = logdir.partition(name, 0)
            log.append(b"x")
            log.roll()
    files = disk.files()
    del files["/data/a-0/" + file_name(1, LOG)]
    with logcore.open_dir("/data", fs=SimulatedDisk(files, now_ms=T0)) as logdir:
        first, second = logdir.scrub()
    assert not first.is_sound and second.is_sound and "a-0" in str(first)


def test_closed_log_refuses_a_scrub() -> None:
    log = fill_log(SimulatedDisk(now_ms=T0))
    steps = log.scrubbing()
    log.close()
    with pytest.raises(logcore.LogClosedError):
        list(steps)
    with pytest.raises(logcore.LogClosedError):
        log.scrub()


# -- crashes ---------------------------------------------------------------------------


LIFE_CONFIG: dict[str, Any] = {
    "cleanup.policy": "compact,delete",
    "delete.retention.ms": 0,
    "segment.bytes": 200,
}


def run_operations(
    disk: SimulatedDisk, promise: Any, *, first: int, second: int
) -> None:
    """Run each operation that affects checksum files, over the same offsets and sizes."""
    with logcore.open("t-0", create=True, fs=disk, config=LIFE_CONFIG) as log:
        for number in range(first):
            log.append(b"value", key=b"k%d" % (number % 3), timestamp_ms=T0)
        log.scrub()
        log.truncate(3)
        for number in range(second):
            log.append(b"other", key=b"k%d" % (number % 2), timestamp_ms=T0)
        logcore.clean(log, force=True)
        log.retain(segments=1)


def check_after_crash(disk: SimulatedDisk) -> Any:
    before = (
        [verdict for verdict in verify("t-0", fs=disk) if verdict.status == "damaged"]
        if "/t-0" in disk.view()
        else []
    )
    assert not [verdict for verdict in before if verdict.kind == "seal"], before
    recover_log(disk, config=LIFE_CONFIG, thorough=True)
    with logcore.open("t-0", fs=disk, config=LIFE_CONFIG) as log:
        report = log.scrub()
        assert report.is_sound and not report.skipped, report
    assert not [
        verdict for verdict in verify("t-0", fs=disk) if verdict.status == "damaged"
    ]
    return None


@pytest.mark.parametrize(
    ("names", "limit", "again_every", "appended"),
    [
        pytest.param("posix", 1, 200, (5, 4), marks=pytest.mark.slow),
        pytest.param("posix", 2, 40, (7, 6), marks=pytest.mark.slow),
        pytest.param("journal", 2, 40, (7, 6), marks=pytest.mark.slow),
    ],
)
def test_no_crash_leaves_a_stale_checksum_file(
    names: Any, limit: int, again_every: int, appended: tuple[int, int]
) -> None:
    operations = functools.partial(
        run_operations, first=appended[0], second=appended[1]
    )
    report = explore(
        operations,
        check_after_crash,
        lambda promised, found: None,
        limit=limit,
        again_every=again_every,
        names=names,
    )
    print(report)
    assert report.states > 16 * sum(appended)


@pytest.mark.parametrize(
    ("first", "following", "text"),
    [
        (3, 8, "a.log: damaged at position 70, offsets 3 to 7 (why)"),
        (3, None, "a.log: damaged at position 70, offsets 3 to the end (why)"),
        (None, None, "a.log: damaged at position 70 (why)"),
    ],
)
def test_text_of_a_finding_contains_the_last_damaged_offset(
    first: int | None, following: int | None, text: str
) -> None:
    assert str(Finding("a.log", 70, first, following, "why")) == text
