"""`logcore recover` saves every sound batch of a damaged log and no other batch, and
reports the losses.

A log is damaged in every way that a disk can fail. The saved batches are compared with
the written batches. The report must contain the offsets of all lost batches.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.inspect.salvage import PartitionReport, salvage
from logcore.inspect.verify import verify
from logcore.metadata import checkpoint
from logcore.metadata.filenames import file_name
from logcore.partition.producers import snapshot_entries
from logcore.recordbatch import encode, read_batches
from logcore.testing import Fault, FaultPlan, SimulatedCrash, SimulatedDisk
from support.salvaging import (
    DENSE,
    SOURCE,
    T0,
    TARGET,
    batches_of,
    log_of,
    lost_offsets,
    path_of,
    recover,
    tree,
)
from support.vectors import VECTORS

#: A time before which no producer has expired.
FUTURE = 4_000_000_000_000


# -- logs and their checks -------------------------------------------------------------


def offsets(raw: bytes) -> set[int]:
    return {
        offset
        for batch in read_batches(raw)
        for offset in range(batch.base_offset, batch.next_offset)
    }


def check_salvage(
    written: dict[int, bytes], report: PartitionReport, saved: dict[int, bytes]
) -> set[int]:
    """Check that no batch is invented or silently lost; return the lost base offsets."""
    assert all(written.get(base) == raw for base, raw in saved.items()), (
        "a saved batch was never written"
    )
    gone = set(written) - set(saved)
    missing = {offset for base in gone for offset in offsets(written[base])}
    assert lost_offsets(report.lost) == missing, report.lost
    return gone


SEGMENTS = {
    path_of(0): log_of((0, b"a" * 9), (2, b"bb"), (4, b"c"), size=2),
    path_of(6): log_of((6, b"d" * 30), (9, b"e" * 30), codec="zstd", size=3),
    path_of(12): log_of((12, b"ff"), (13, b"gg"), (14, b"hh")),
}
WRITTEN = batches_of(SEGMENTS)
END = {"/data/recovery-point-offset-checkpoint": b"0\n1\nt 0 15\n"}


def changed(
    changes: dict[str, bytes | None], *, dense: bool = True
) -> dict[str, bytes]:
    files = {**SEGMENTS, **(DENSE if dense else {}), **END, **changes}
    return {path: content for path, content in files.items() if content is not None}


# -- whole logs ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clean", "crash", "compact-before", "compact-after"])
def test_files_of_kafka_are_copied_completely(tmp_path: Path, name: str) -> None:
    """The snapshots, transaction indexes and epochs that salvage rebuilds are compared
    with those of Kafka.
    """
    data = Path(shutil.copytree(VECTORS / f"partition-{name}", tmp_path / "data"))
    before = tree(data)
    report = salvage(data, tmp_path / "out")
    assert report.is_whole, report
    assert tree(data) == before
    (source,) = (path for path in data.iterdir() if path.is_dir())
    target = tmp_path / "out" / source.name
    for path in source.iterdir():
        is_kept = path.suffix in (".log", ".txnindex") or path.name in (
            checkpoint.LEADER_EPOCH,
            "partition.metadata",
        )
        if is_kept and (path.stat().st_size or (target / path.name).exists()):
            assert (target / path.name).read_bytes() == path.read_bytes(), path.name
    end = report.partitions[0].log_end_offset
    ours, theirs = (where / file_name(end, ".snapshot") for where in (target, source))
    if theirs.exists():
        assert sorted_entries(ours) == sorted_entries(theirs)
    assert "damaged" not in {verdict.status for verdict in verify(tmp_path / "out")}
    assert read(target) == read(source)
    again = salvage(target, tmp_path / "again" / source.name)
    assert again.is_whole
    assert [
        path.read_bytes()
        for path in sorted((tmp_path / "again" / source.name).iterdir())
    ] == [path.read_bytes() for path in sorted(target.iterdir())]


def sorted_entries(path: Path) -> list[Any]:
    entries = snapshot_entries(path.read_bytes())
    assert entries is not None
    return sorted(entries.tolist())


def read(path: Path) -> list[Any]:
    with logcore.open(path, read_only=True) as log:
        start = log.log_start_offset
        return [
            list(log.read(start)),
            list(log.read(start, isolation="read_committed")),
        ]


def test_a_log_directory_keeps_its_topics_ids_and_producers(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("t", partitions=2, config={"retention.ms": "77"})
        for number in range(2):
            directory.partition("t", number).append_many(
                [(None, b"%d" % at) for at in range(9)]
            )
        directory.partition("t", 1).delete_records(4)
        given = directory.host.next_producer_id()
        raw = encode(
            [(None, b"x")],
            producer_id=given,
            producer_epoch=0,
            base_sequence=0,
            now_ms=FUTURE,
        )
        stored = directory.partition("t", 0).append_batch(raw).offset
    report = salvage(tmp_path / "data", tmp_path / "out")
    assert report.is_whole, report
    assert "damaged" not in {verdict.status for verdict in verify(tmp_path / "out")}
    ids = [
        (tmp_path / name / "t-0" / "partition.metadata").read_bytes()
        for name in ("data", "out")
    ]
    assert ids[0] == ids[1]
    with logcore.open_dir(tmp_path / "out") as directory:
        assert directory.partition("t", 0).config.retention_ms == 77
        assert directory.partition("t", 1).log_start_offset == 4
        assert directory.partition("t", 0).append_batch(raw).offset == stored, (
            "a batch sent twice is stored once"
        )
        assert directory.host.next_producer_id() > given
    assert salvage(tmp_path / "data", tmp_path / "one" / "t-0").is_whole is True


# -- damage ----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("head_step", "step"), [(3, 97), pytest.param(1, 1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("base", [0, 6, 12])
def test_flipped_bit_loses_at_most_its_batch(
    base: int, dense: bool, head_step: int, step: int
) -> None:
    """Every bit of every segment is flipped. Of the bits that a CRC covers, every
    `step`-th is flipped, and of the lengths, offsets and epochs every `head_step`-th.
    """
    data = SEGMENTS[path_of(base)]
    for batch in read_batches(data):
        size = batch.size_bytes if dense else 21  # the CRC does not cover the offsets
        for bit in itertools.chain(
            range(0, 21 * 8, head_step), range(21 * 8, size * 8, step)
        ):
            bad = bytearray(data)
            bad[batch.position + bit // 8] ^= 1 << bit % 8
            report, saved = recover(
                changed({path_of(base): bytes(bad)}, dense=dense), quick=True
            )
            hit = batch.base_offset
            if 12 <= bit // 8 < 16:  # the leader epoch, which does not change records
                assert saved[hit][16:] == WRITTEN[hit][16:] and not report.lost
            elif hit == 14 and bit < 64 and not dense and set(saved) - set(WRITTEN):
                # A larger last offset cannot be distinguished from the truth if there may be
                # gaps.
                (moved,) = set(saved) - set(WRITTEN)
                assert moved > 14 and saved[moved][8:] == WRITTEN[14][8:]
            else:
                assert check_salvage(WRITTEN, report, saved) <= {hit}, bit


def test_wrong_length_that_leads_to_a_later_batch_hides_no_batch() -> None:
    """In batches of 128 bytes, one flipped bit changes the length to 256. A sound batch
    begins there, and another one in between.
    """
    data = log_of(*((at, b"x" * 58) for at in range(4)))
    assert len(data) == 4 * 128
    bad = bytearray(data)
    bad[128 + 11] ^= 128
    report, saved = recover({path_of(0): bytes(bad), **DENSE})
    assert check_salvage(batches_of({path_of(0): data}), report, saved) == {1}


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_truncation_of_the_last_segment_loses_only_its_end(step: int) -> None:
    data = SEGMENTS[path_of(12)]
    for cut in range(0, len(data), step):
        report, saved = recover(changed({path_of(12): data[:cut]}))
        whole = {batch.base_offset for batch in read_batches(data[:cut])}
        assert check_salvage(WRITTEN, report, saved) == {12, 13, 14} - whole
        assert report.log_end_offset == 15, "an assigned offset is assigned again"


@pytest.mark.long
@pytest.mark.parametrize("step", [12007, pytest.param(1501, marks=pytest.mark.slow)])
@pytest.mark.parametrize("filler", [b"\0", b"\xff", b"noise"])
@pytest.mark.parametrize("size", [17, 61, 512, 4096])
def test_overwritten_block_loses_only_the_batches_it_touches(
    size: int, filler: bytes, step: int
) -> None:
    values = [(at, bytes([at]) * (700 * (at % 5) + 9)) for at in range(60)]
    data = log_of(*values)
    written = batches_of({path_of(0): data})
    for position in range(0, len(data) - size, step):
        bad = data[:position] + (filler * size)[:size] + data[position + size :]
        report, saved = recover(
            {path_of(0): bad, **DENSE, **dict.fromkeys(END, b"0\n1\nt 0 60\n")}
        )
        touched = {
            batch.base_offset
            for batch in read_batches(data)
            if batch.position < position + size
            and position < batch.position + batch.size_bytes
        }
        assert check_salvage(written, report, saved) <= touched


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_missing_segment_index_or_codec_does_not_fail(codec: str) -> None:
    segments = {
        path_of(at): log_of((at, b"x" * 50), (at + 2, b"y"), codec=codec, size=2)
        for at in (0, 4, 8)
    }
    written = batches_of(segments)
    del segments[path_of(4)]
    for more in (DENSE, {}):
        report, saved = recover(
            {
                **segments,
                **more,
                path_of(8, ".index"): b"garbage",
                path_of(8, ".snapshot"): b"",
            }
        )
        assert check_salvage(written, report, saved) == {4, 6}
        (part,) = report.lost
        assert (part.first_offset, part.last_offset, part.position) == (4, 7, None)
    report, saved = recover(
        {path: data for path, data in segments.items() if path == path_of(0)}
    )
    assert not report.lost and len(saved) == 2, "the loss cannot be detected"


def test_garbage_after_the_end_is_a_loss_but_zeros_are_not() -> None:
    report, saved = recover(changed({path_of(12): SEGMENTS[path_of(12)] + bytes(5000)}))
    assert check_salvage(WRITTEN, report, saved) == set() and not report.lost
    assert [(part.size_bytes, part.reason) for part in report.left_out] == [
        (5000, "zeros")
    ]
    report, saved = recover(changed({path_of(12): SEGMENTS[path_of(12)] + b"torn"}))
    assert check_salvage(WRITTEN, report, saved) == set()
    assert [(part.size_bytes, part.first_offset) for part in report.lost] == [(4, None)]


def test_duplicate_offsets_are_copied_once() -> None:
    twice = SEGMENTS[path_of(6)] + SEGMENTS[path_of(6)]
    report, saved = recover(
        changed(
            {path_of(6): twice, path_of(0): SEGMENTS[path_of(0)] + SEGMENTS[path_of(6)]}
        )
    )
    assert check_salvage(WRITTEN, report, saved) == set() and not report.lost
    assert len(report.left_out) == 2


@pytest.mark.parametrize(
    "spare", [".log.swap", ".log.deleted", ".log.cleaned", ".77.quarantine"]
)
def test_leftover_files_are_used_only_for_gaps(spare: str) -> None:
    """Records that a recovery truncated were written again. A new segment that has begun
    to replace old segments belongs to the log.
    """
    other = log_of((6, b"OTHER"), (9, b"OTHER"), size=3)
    for gone, lost in ((None, {6, 9}), (SEGMENTS[path_of(6)][:-1], {9})):
        report, saved = recover(
            changed({path_of(6): gone, path_of(6, spare): SEGMENTS[path_of(6)]})
        )
        assert check_salvage(WRITTEN, report, saved) == (
            lost if spare == ".77.quarantine" else set()
        )
        is_log = spare == ".log.swap" and gone is None
        assert (path_of(6, spare) in {part.path for part in report.left_out}) != is_log
    report, saved = recover(changed({path_of(6, spare): other}))
    assert check_salvage(WRITTEN, report, saved) == set(), (
        "a segment that exists is not replaced"
    )


@pytest.mark.long
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_crashed_compaction_loses_no_record_that_opening_finds(
    step: int,
) -> None:
    """After the first old segment was removed, the new segment with its .swap name
    belongs to the log, even if it is the first segment. The other replaced segments may
    still exist.
    """
    disk = SimulatedDisk()
    config = {
        "segment.bytes": 300,
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": 0,
    }
    with logcore.open("/data/t-0", create=True, config=config, fs=disk) as log:
        for at in range(10):
            log.append(b"%d" % at * 50, key=b"k%d" % (at % 3))
        log.roll()
        for changes in itertools.count(0, step):
            copy = SimulatedDisk(disk.files())
            copy.crash_in(changes)
            try:
                with logcore.open("/data/t-0", config=config, fs=copy) as other:
                    logcore.clean(other, force=True)
            except SimulatedCrash:
                pass
            else:
                break
            for state in copy.crash_states(limit=4, kind="power"):
                saved = state.disk()
                opened = state.disk()
                report = salvage("/data/t-0", "/out/t-0", fs=saved)
                with logcore.open("/data/t-0", config=config, fs=opened) as log_:
                    expected = list(log_.read(log_.log_start_offset))
                with logcore.open("/out/t-0", config=config, fs=saved) as log_:
                    found = {
                        record.offset: record
                        for record in log_.read(log_.log_start_offset)
                    }
                # If all old segments still exist, salvage also finds records that
                # compaction would remove. This is not a loss.
                assert [found.get(record.offset) for record in expected] == expected, (
                    state.what
                )
                assert report.is_whole, (state.what, report.partitions[0].lost)


def test_rewritten_offsets_are_not_read_from_old_files() -> None:
    """A recovery quarantined the tail, and new records got the same offsets. If a batch
    of the new records is lost, the old batch must not replace it.
    """
    disk = SimulatedDisk()
    with logcore.open("/data/t-0", create=True, fs=disk) as log:
        log.append(b"kept")
    name = f"/data/t-0/{0:020d}.log"
    size = len(disk.files()[name] or b"")
    old = log_of((1, b"old 1"), (2, b"old 2"))
    torn = SimulatedDisk(
        {**disk.files(), name: (disk.files()[name] or b"") + b"\1" + old[1:]}
    )
    with logcore.open("/data/t-0", fs=torn) as log:
        assert (
            log.recovery_report is not None and log.recovery_report.cut_position == size
        )
        for at in (1, 2):
            log.append(b"new %d" % at)
    rotten = bytearray(torn.files()[name] or b"")
    rotten[-3] ^= 1
    bad = SimulatedDisk({**torn.files(), name: bytes(rotten)})
    report = salvage("/data/t-0", "/out/t-0", fs=bad)
    with logcore.open("/out/t-0", read_only=True, fs=bad) as log:
        assert [record.value for record in log.read(0)] == [b"kept", b"new 1"]
    assert [
        (part.first_offset, part.last_offset) for part in report.partitions[0].lost
    ] == [(2, 2)]


def test_noncanonical_and_unlistable_names_do_not_affect_other_partitions() -> None:
    disk = SimulatedDisk()
    with logcore.open_dir("/data", create=True, fs=disk) as logdir:
        for topic in ("a", "b"):
            logdir.create_topic(topic)
            logdir.partition(topic, 0).append(topic.encode())
    files = {**disk.files(), "/data/b-00": None, f"/data/b-00/{0:020d}.log": b""}
    bad = SimulatedDisk(
        files, faults=FaultPlan(Fault("listdir", errno.EIO, path="/data/a-0", at=1))
    )
    report = salvage("/data", "/out", fs=bad)
    assert [part.path for part in report.lost] == ["/data/a-0"]
    assert "/data/b-00" in [part.path for part in report.left_out]
    with logcore.open_dir("/out", read_only=True, fs=bad) as logdir:
        assert [record.value for record in logdir.partition("b", 0).read(0)] == [b"b"]
    with (
        logcore.open_dir("/out", fs=bad) as logdir,
        pytest.raises(logcore.CorruptLogError, match="directory is missing"),
    ):
        logdir.partition("a", 0)


@pytest.mark.parametrize("spoil", ["payload", "length", "magic", "head", "crc"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("place", ["middle", "end"])
def test_batch_inside_a_value_is_not_read_as_a_batch(
    spoil: str, count: int, place: str
) -> None:
    """The value contains complete batches with the offsets that are expected next."""
    inner = log_of(*((offset, b"invented") for offset in range(1, 1 + count)))
    front = log_of((0, b"first"))
    outer = log_of((1, b"x" * 40 + inner + b"y" * 40), size=10)
    back = log_of((11, b"last")) if place == "middle" else b""
    bad = bytearray(outer)
    if spoil == "head":
        bad[:61] = os.urandom(61)
    else:
        bad[{"payload": -3, "length": 10, "magic": 16, "crc": 17}[spoil]] ^= 4
    written = batches_of({path_of(0): front + outer + back})
    end = dict.fromkeys(END, b"0\n1\nt 0 11\n")
    report, saved = recover({path_of(0): front + bytes(bad) + back, **DENSE, **end})
    assert check_salvage(written, report, saved) == {1}


def test_unreadable_sector_loses_only_its_batches() -> None:
    data = log_of(*((at, bytes([at]) * 900) for at in range(40)))
    name = path_of(0)
    plan = FaultPlan(
        Fault("pread", errno.EIO, path=name, at=1),
        Fault("pread", errno.EIO, path=name, at=4),
    )
    # The first read is of the whole file, the others are of sectors.
    report, saved = recover({name: data}, plan)
    gone = check_salvage(batches_of({name: data}), report, saved)
    assert 4 <= len(gone) <= 6
    assert report.lost[0].reason == "a part of it cannot be read"


def test_wrong_checkpoints_lose_no_record() -> None:
    for name in (
        checkpoint.LOG_START,
        checkpoint.RECOVERY_POINT,
        checkpoint.LEADER_EPOCH,
    ):
        where = SOURCE if name == checkpoint.LEADER_EPOCH else "data"
        for content in (
            b"",
            b"0\n1\n",
            b"\xff" * 99,
            b"0\n1\nt 0 -5\n",
            b"0\n1\nt 0 14\n",
            b"0\n1\nt 0 %d\n" % 2**63,
        ):
            report, saved = recover(changed({f"{where}/{name}": content}))
            start = 14 if (name, content[-3:]) == (checkpoint.LOG_START, b"14\n") else 0
            assert report.log_start_offset == start
            assert set(WRITTEN) - set(saved) == ({0, 2, 4, 6, 9} if start else set()), (
                name,
                content,
            )
    report, saved = recover(
        changed({f"/data/{checkpoint.LOG_START}": b"0\n1\nt 0 99\n"})
    )
    assert check_salvage(WRITTEN, report, saved) == set()
    assert [part.path for part in report.lost] == [f"/data/{checkpoint.LOG_START}"]


def test_a_log_directory_with_damaged_files_of_its_own() -> None:
    files = {
        f"/data/{name}": b"garbage"
        for name in (checkpoint.TOPICS, checkpoint.PRODUCER_IDS, "meta.properties")
    }
    batch = encode(
        [(None, b"x")],
        base_offset=0,
        producer_id=41,
        producer_epoch=0,
        base_sequence=0,
        now_ms=T0,
    )
    files[path_of(0)] = batch
    disk = SimulatedDisk(
        {
            **files,
            "/data/t-1": None,
            "/data/odd": None,
            f"{SOURCE}/partition.metadata": b"garbage",
        }
    )
    report = salvage("/data", "/out", fs=disk)
    assert {os.path.basename(part.path) for part in report.lost} == {
        os.path.basename(name) for name in files
    } - {os.path.basename(path_of(0))}
    assert [part.path for part in report.left_out] == ["/data/odd"]
    assert [part.path for part in report.partitions[0].lost] == [
        f"{SOURCE}/partition.metadata"
    ]
    with logcore.open_dir("/out", fs=disk) as directory:
        assert directory.partition("t", 0).log_end_offset == 1
        assert directory.partition("t", 1).log_end_offset == 0
        assert directory.host.next_producer_id() > 41, "no id is allocated twice"


@pytest.mark.long
def test_random_damage_never_adds_batches(tmp_path: Path) -> None:
    rng = random.Random(7)
    values = [(at, rng.randbytes(rng.randrange(300))) for at in range(120)]
    segments = {path_of(low): log_of(*values[low : low + 40]) for low in (0, 40, 80)}
    written = batches_of(segments)
    for _ in range(150):
        bad = {path: bytearray(data) for path, data in segments.items()}
        for _ in range(rng.randrange(1, 8)):
            data = bad[rng.choice(list(bad))]
            at = rng.randrange(len(data))
            size = rng.choice([1, 8, 64, 600])
            match rng.randrange(4):
                case 0:
                    data[at : at + size] = rng.randbytes(size)
                case 1:
                    del data[at : at + size]
                case 2:
                    data[at : at + size] = bytes(size)
                case 3:
                    data[at:at] = data[
                        (other := rng.randrange(len(data))) : other + size
                    ]
        files = {path: bytes(data) for path, data in bad.items()}
        report, saved = recover(
            {
                **files,
                **DENSE,
                "/data/recovery-point-offset-checkpoint": b"0\n1\nt 0 120\n",
            }
        )
        check_salvage(written, report, saved)


# -- files of metadata -----------------------------------------------------------------


def partition_of_ten(path: Path) -> Path:
    """Return t-0 with the offsets 0 to 9 in a batch each, the first four of them deleted.
    The directory also contains u-0, with three records.
    """
    with logcore.open(path / "t-0", create=True) as log:
        for at in range(10):
            log.append(b"%d" % at)
        log.delete_records(4)
    with logcore.open(path / "u-0", create=True) as log:
        log.append_many([(None, b"u")] * 3)
    return path / "t-0"


def lines(path: Path, name: str) -> set[str]:
    return set((path / name).read_text().splitlines()[2:])


@pytest.mark.parametrize("place", ["beside", "elsewhere", "by its name"])
def test_renamed_partition_keeps_start_and_end(tmp_path: Path, place: str) -> None:
    """The checkpoints of the log directory still contain the former name, which the
    partition will get again.
    """
    data = tmp_path / "data"
    own = partition_of_ten(data)
    source = own.rename(
        tmp_path / "t-0" if place == "by its name" else data / "t-0.bad"
    )
    (segment,) = source.glob("*.log")
    segment.write_bytes(segment.read_bytes()[:-5])
    before = {
        name: lines(data, name)
        for name in (checkpoint.LOG_START, checkpoint.RECOVERY_POINT)
    }
    target = (tmp_path / "out" if place == "elsewhere" else data) / "t-0"
    (report,) = salvage(source, target).partitions
    assert (report.log_start_offset, report.log_end_offset) == (4, 10)
    assert lost_offsets(report.lost) == {9}
    if place != "elsewhere":
        assert {name: lines(data, name) for name in before} == before
    with logcore.open(target) as log:
        assert [record.offset for record in log.read(log.log_start_offset)] == [
            4,
            5,
            6,
            7,
            8,
        ]
        assert log.append(b"next").offset == 10


def test_copy_under_another_name_ignores_checkpoints_of_that_name(
    tmp_path: Path,
) -> None:
    own = partition_of_ten(tmp_path)
    shutil.rmtree(tmp_path / "u-0")
    (tmp_path / checkpoint.LOG_START).write_text("0\n2\nt 0 4\nu 0 2\n")
    (tmp_path / checkpoint.CLEANER).write_text("0\n2\nt 0 0\nu 0 2\n")
    (report,) = salvage(own, tmp_path / "u-0").partitions
    assert (report.log_start_offset, report.log_end_offset, report.lost) == (4, 10, ())
    assert lines(tmp_path, checkpoint.LOG_START) == {"t 0 4", "u 0 4"}
    assert lines(tmp_path, checkpoint.RECOVERY_POINT) == {"t 0 10", "u 0 10"}
    assert lines(tmp_path, checkpoint.CLEANER) == {"t 0 0"}


def test_undecodable_checkpoint_is_reported() -> None:
    for name in (checkpoint.LOG_START, checkpoint.RECOVERY_POINT):
        disk = SimulatedDisk({**SEGMENTS, f"/data/{name}": b"garbage"})
        assert [part.path for part in salvage(SOURCE, TARGET, fs=disk).lost] == [
            f"/data/{name}"
        ]


@pytest.mark.parametrize("start", [0, 3])
def test_missing_first_segments_are_lost_and_deleted_ones_are_not(
    start: int,
) -> None:
    notes = {
        **END,
        f"/data/{checkpoint.LOG_START}": b"0\n1\nt 0 %d\n" % start,
        f"{SOURCE}/{checkpoint.LEADER_EPOCH}": b"0\n1\n0 0\n",
    }
    report, saved = recover(changed({path_of(0): None, **notes}))
    assert lost_offsets(report.lost) == set(range(start, 6)) and set(saved) == {
        6,
        9,
        12,
        13,
        14,
    }
    report, saved = recover(
        changed(
            {
                path_of(0): None,
                f"{SOURCE}/x": b"",
                **notes,
                path_of(0, ".log.deleted"): log_of(*((at, b"kept") for at in range(6))),
            }
        )
    )
    assert not report.lost and report.log_start_offset == start
    report, _ = recover(
        changed(
            {
                path_of(0): None,
                **notes,
                f"/data/{checkpoint.LOG_START}": b"0\n1\nt 0 6\n",
            }
        )
    )
    assert not report.lost and report.log_start_offset == 6


# -- transactions ----------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "abort", "open"])
def test_transaction_with_a_lost_marker_is_reported(end: str) -> None:
    """The records of an aborted transaction would be read as if the next one had
    committed them.
    """
    disk = SimulatedDisk()
    with logcore.open(SOURCE, create=True, fs=disk) as log:

        def write(producer: int, sequence: int, value: bytes) -> int:
            raw = encode([(None, value)], transactional=True, producer_id=producer, producer_epoch=0,
                         base_sequence=sequence, now_ms=FUTURE)  # fmt: skip
            return log.append_batch(raw).offset

        write(7, 0, b"aborted")
        write(8, 0, b"committed")
        log.end_transaction(8, 0, commit=True)
        lost = log.end_transaction(7, 0, commit=False).offset
        log.append(b"between")
        write(7, 1, b"second")
        if end != "open":
            log.end_transaction(7, 0, commit=end == "commit")
        log.append(b"last")
    name = path_of(0)
    data = bytearray(disk.files()[name] or b"")
    marker = next(
        batch for batch in read_batches(bytes(data)) if batch.base_offset == lost
    )
    data[marker.position + 61] ^= 1
    bad = SimulatedDisk({**disk.files(), name: bytes(data)})
    (report,) = salvage(SOURCE, TARGET, fs=bad).partitions
    assert lost_offsets(report.lost) == {lost}
    (named,) = (part for part in report.lost if part.first_offset is None)
    assert "producer 7 " in named.reason and "began at offset 0" in named.reason
    with logcore.open(TARGET, read_only=True, fs=bad) as copy:
        shown = [record.value for record in copy.read(0, isolation="read_committed")]
    rest = [b"committed", b"between"]
    assert (
        shown
        == {
            "commit": [b"aborted", *rest, b"second", b"last"],
            "abort": [*rest, b"last"],
            "open": [],
        }[end]
    )
    assert {"commit": "commits it", "abort": "aborts it", "open": "it is open"}[
        end
    ] in named.reason


def test_loss_outside_of_transactions_reports_no_transaction() -> None:
    disk = SimulatedDisk()
    with logcore.open(SOURCE, create=True, fs=disk) as log:
        first = log.append(b"lost").offset
        raw = encode(
            [(None, b"x")],
            transactional=True,
            producer_id=7,
            producer_epoch=0,
            base_sequence=0,
            now_ms=FUTURE,
        )
        log.append_batch(raw)
        log.end_transaction(7, 0, commit=True)
        log.append(b"lost too")
        log.append_batch(encode([(None, b"x")], transactional=True, producer_id=7, producer_epoch=0, base_sequence=1,
                                now_ms=FUTURE))  # fmt: skip
    files = disk.files()
    for name in [name for name in files if name.endswith(".log")]:
        data = bytearray(files[name] or b"")
        for batch in read_batches(bytes(data)):
            data[batch.position + 61] ^= batch.base_offset in (first, 3)
        files[name] = bytes(data)
    (report,) = salvage(SOURCE, TARGET, fs=SimulatedDisk(files)).partitions
    assert [(part.first_offset, part.last_offset) for part in report.lost] == [
        (0, 0),
        (3, 3),
    ]


# -- batches that cannot be decoded ----------------------------------------------------


def with_crc(batch: bytearray) -> bytes:
    from crc32c import crc32c

    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")
    return bytes(batch)


@pytest.mark.parametrize("spoil", ["payload", "count", "record", "codec"])
@pytest.mark.parametrize("place", ["middle", "end"])
def test_a_batch_with_a_right_crc_that_cannot_be_decoded_is_lost(
    spoil: str, place: str
) -> None:
    batch = bytearray(
        log_of(
            (6, b"d" * 30),
            codec="gzip" if spoil == "payload" else "uncompressed",
            size=3,
        )
    )
    match spoil:
        case "payload":
            batch[61:] = bytes(len(batch) - 61)
        case "count":
            batch[60] += 1
        case "record":
            batch[61] ^= 0x40
        case "codec":
            batch[22] |= 7
    good = log_of((9, b"e"), size=3)
    segment = with_crc(batch) + good if place == "middle" else with_crc(batch)
    files = {path_of(0): SEGMENTS[path_of(0)], path_of(6): segment}
    report, saved = recover(files)
    assert check_salvage(
        {
            **batches_of({path_of(0): files[path_of(0)]}),
            6: bytes(batch),
            **(batches_of({path_of(6): good}) if place == "middle" else {}),
        },
        report,
        saved,
    ) == {6}
    assert [(part.position, part.size_bytes) for part in report.lost] == [
        (0, len(batch))
    ]
    assert report.log_end_offset == (12 if place == "middle" else 9), (
        "its offsets were assigned"
    )


def test_batch_of_a_missing_codec_is_not_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = batches_of(SEGMENTS)

    def missing(*_: object, **__: object) -> None:
        raise logcore.UnsupportedCodecError(
            "zstd needs a package that is not installed"
        )

    monkeypatch.setattr("logcore.recordbatch.decompress", missing)
    report, saved = recover(changed({}), quick=True)
    assert check_salvage(written, report, saved) == set() and not report.lost
