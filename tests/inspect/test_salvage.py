"""What `logcore recover` saves of damaged logs: every sound batch, no other, and an account of the rest.

A log is damaged in every way a disk knows. What is saved is compared, batch by batch, with what was written; what is
not there has to be in the report, by its offsets.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import struct
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest

import logcore
from logcore import checkpoint, kernels
from logcore.config import LogConfig
from logcore.fs import OS
from logcore.inspect import searching
from logcore.inspect.salvage import Part, PartitionReport, salvage
from logcore.inspect.verify import verify
from logcore.kernels import layout
from logcore.names import file_name
from logcore.partition.producers import snapshot_entries
from logcore.recordbatch import encode, read_batches
from logcore.staging.applying import apply_ready
from logcore.staging.manifest import Manifest, Place
from logcore.staging.publishing import Staging
from logcore.staging.writing import StagedWriter
from logcore.testing import Fault, FaultPlan, SimulatedCrash, SimulatedDisk
from support import kafka_jvm
from support.vectors import VECTORS

CliRunner = pytest.importorskip("click.testing").CliRunner
from logcore.cli.commands import main  # noqa: E402

T0 = 1_700_000_000_000
#: Late enough for no producer to have expired.
FUTURE = 4_000_000_000_000
SOURCE, TARGET = "/data/t-0", "/out/t-0"


# -- logs and judgements ---------------------------------------------------------------------------------------------


def batches_of(files: dict[str, bytes], directory: str = SOURCE) -> dict[int, bytes]:
    """Base offset -> bytes of every batch in the .log files of a directory."""
    names = sorted(name for name in files if os.path.dirname(name) == directory and name.endswith(".log"))
    return {
        batch.base_offset: files[name][batch.position : batch.position + batch.size_bytes]
        for name in names
        for batch in read_batches(files[name])
    }


def recover(
    files: dict[str, Any], faults: FaultPlan | None = None, *, quick: bool = False
) -> tuple[PartitionReport, dict[int, bytes]]:
    """Salvages SOURCE: (report, batches saved). The source is as it was, and unless quick, the result is sound."""
    disk = SimulatedDisk({"/data": None, SOURCE: None, **files}, faults=faults)
    before = disk.files()
    report = salvage(SOURCE, TARGET, fs=disk)
    disk.faults = None
    after = disk.files()
    assert {path: after[path] for path in before} == before, "the source was changed"
    assert not disk.open_handles
    assert not [path for path in after if path.endswith(".tmp")]
    (partition,) = report.partitions
    saved = batches_of(after, TARGET)
    if quick:
        return partition, saved
    verdicts = [one for one in verify(TARGET, fs=disk) if one.status == "damaged"]
    assert not verdicts, verdicts
    assert partition.batches == len(saved) and partition.size_bytes == sum(map(len, saved.values()))
    assert partition.records == sum(len(b.records()) for raw in saved.values() for b in read_batches(raw))
    with logcore.open(TARGET, fs=disk) as log:
        assert (log.log_start_offset, log.log_end_offset) == (partition.log_start_offset, partition.log_end_offset)
        assert log.append(b"next").offset == partition.log_end_offset
    return partition, saved


def offsets(raw: bytes) -> set[int]:
    return {offset for batch in read_batches(raw) for offset in range(batch.base_offset, batch.next_offset)}


def lost_offsets(parts: Iterable[Part]) -> set[int]:
    found: set[int] = set()
    for part in parts:
        if part.first_offset is not None and part.last_offset is not None:
            found |= set(range(part.first_offset, part.last_offset + 1))
    return found


def judge(written: dict[int, bytes], report: PartitionReport, saved: dict[int, bytes]) -> set[int]:
    """Nothing invented, nothing silent: base offsets of the batches that are gone."""
    assert all(written.get(base) == raw for base, raw in saved.items()), "saved what was never written"
    gone = set(written) - set(saved)
    missing = {offset for base in gone for offset in offsets(written[base])}
    assert lost_offsets(report.lost) == missing, report.lost
    return gone


def log_of(*batches: tuple[int, bytes], codec: str = "uncompressed", size: int = 1) -> bytes:
    """Batches of `size` records each, at these offsets."""
    return b"".join(
        encode([(b"k", value, (), T0)] * size, codec=codec, base_offset=offset, leader_epoch=0)
        for offset, value in batches
    )


def path_of(base: int, suffix: str = ".log") -> str:
    return f"{SOURCE}/{file_name(base, suffix)}"


SEGMENTS = {
    path_of(0): log_of((0, b"a" * 9), (2, b"bb"), (4, b"c"), size=2),
    path_of(6): log_of((6, b"d" * 30), (9, b"e" * 30), codec="zstd", size=3),
    path_of(12): log_of((12, b"ff"), (13, b"gg"), (14, b"hh")),
}
WRITTEN = batches_of(SEGMENTS)
#: The note that it is a log of ours, where offsets leave no gap; and how far it was on disk.
DENSE = {f"{SOURCE}/logcore.policy": b'{"durability": "group", "max_bytes": 1048576, "dense_from": 0}\n'}
END = {"/data/recovery-point-offset-checkpoint": b"0\n1\nt 0 15\n"}


def changed(changes: dict[str, bytes | None], *, dense: bool = True) -> dict[str, bytes]:
    files = {**SEGMENTS, **(DENSE if dense else {}), **END, **changes}
    return {path: content for path, content in files.items() if content is not None}


def tree(path: Path) -> dict[str, tuple[str, int]]:
    """Every file: what is in it, and when it was written."""
    return {
        str(file.relative_to(path)): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in path.rglob("*")
        if file.is_file()
    }


# -- whole logs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clean", "crash", "compact-before", "compact-after"])
def test_what_kafka_wrote_is_copied_whole(tmp_path: Path, name: str) -> None:
    """Kafka's own snapshots, indexes of aborted transactions and epochs judge those that are made anew."""
    data = Path(shutil.copytree(VECTORS / f"partition-{name}", tmp_path / "data"))
    before = tree(data)
    report = salvage(data, tmp_path / "out")
    assert report.is_whole, report
    assert tree(data) == before
    (source,) = (path for path in data.iterdir() if path.is_dir())
    target = tmp_path / "out" / source.name
    for path in source.iterdir():
        is_kept = path.suffix in (".log", ".txnindex") or path.name in (checkpoint.LEADER_EPOCH, "partition.metadata")
        if is_kept and (path.stat().st_size or (target / path.name).exists()):
            assert (target / path.name).read_bytes() == path.read_bytes(), path.name
    end = report.partitions[0].log_end_offset
    ours, theirs = (where / file_name(end, ".snapshot") for where in (target, source))
    if theirs.exists():
        assert sorted_entries(ours) == sorted_entries(theirs)
    assert "damaged" not in {one.status for one in verify(tmp_path / "out")}
    assert read(target) == read(source)
    again = salvage(target, tmp_path / "again" / source.name)
    assert again.is_whole
    assert [path.read_bytes() for path in sorted((tmp_path / "again" / source.name).iterdir())] == [
        path.read_bytes() for path in sorted(target.iterdir())
    ]


def sorted_entries(path: Path) -> list[Any]:
    entries = snapshot_entries(path.read_bytes())
    assert entries is not None
    return sorted(entries.tolist())


def read(path: Path) -> list[Any]:
    with logcore.open(path, read_only=True) as log:
        start = log.log_start_offset
        return [list(log.read(start)), list(log.read(start, isolation="read_committed"))]


def test_a_log_directory_keeps_its_topics_ids_and_producers(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("t", partitions=2, config={"retention.ms": "77"})
        for number in range(2):
            directory.partition("t", number).append_many([(None, b"%d" % at) for at in range(9)])
        directory.partition("t", 1).delete_records(4)
        given = directory.next_producer_id()
        raw = encode([(None, b"x")], producer_id=given, producer_epoch=0, base_sequence=0, now_ms=FUTURE)
        stored = directory.partition("t", 0).append_batch(raw).offset
    report = salvage(tmp_path / "data", tmp_path / "out")
    assert report.is_whole, report
    assert "damaged" not in {one.status for one in verify(tmp_path / "out")}
    ids = [(tmp_path / name / "t-0" / "partition.metadata").read_bytes() for name in ("data", "out")]
    assert ids[0] == ids[1]
    with logcore.open_dir(tmp_path / "out") as directory:
        assert directory.partition("t", 0).config.retention_ms == 77
        assert directory.partition("t", 1).log_start_offset == 4
        assert directory.partition("t", 0).append_batch(raw).offset == stored, "a batch sent twice is stored once"
        assert directory.next_producer_id() > given
    assert salvage(tmp_path / "data", tmp_path / "one" / "t-0").is_whole is True


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("base", [0, 6, 12])
def test_a_flipped_bit_costs_at_most_its_batch(base: int, dense: bool, step: int) -> None:
    """Every bit of every segment: those a CRC covers, and the lengths, offsets and epochs that none does.

    step: of the bits that a CRC covers, which are alike.
    """
    data = SEGMENTS[path_of(base)]
    for batch in read_batches(data):
        size = batch.size_bytes if dense else 21  # what a CRC covers does not depend on how offsets rise
        for bit in itertools.chain(range(21 * 8), range(21 * 8, size * 8, step)):
            bad = bytearray(data)
            bad[batch.position + bit // 8] ^= 1 << bit % 8
            report, saved = recover(changed({path_of(base): bytes(bad)}, dense=dense), quick=True)
            hit = batch.base_offset
            if 12 <= bit // 8 < 16:  # the leader epoch, which says nothing of records
                assert saved[hit][16:] == WRITTEN[hit][16:] and not report.lost
            elif hit == 14 and bit < 64 and not dense and set(saved) - set(WRITTEN):
                # A larger last offset cannot be told from the truth where there may be gaps.
                (moved,) = set(saved) - set(WRITTEN)
                assert moved > 14 and saved[moved][8:] == WRITTEN[14][8:]
            else:
                assert judge(WRITTEN, report, saved) <= {hit}, bit


def test_a_length_that_leads_to_the_batch_after_the_next_hides_none() -> None:
    """In batches of 128 bytes one bit of the length makes it 256: a sound batch stands there, and one in between."""
    data = log_of(*((at, b"x" * 58) for at in range(4)))
    assert len(data) == 4 * 128
    bad = bytearray(data)
    bad[128 + 11] ^= 128
    report, saved = recover({path_of(0): bytes(bad), **DENSE})
    assert judge(batches_of({path_of(0): data}), report, saved) == {1}


def test_no_cut_of_the_last_segment_loses_more_than_what_is_cut() -> None:
    data = SEGMENTS[path_of(12)]
    for cut in range(len(data)):
        report, saved = recover(changed({path_of(12): data[:cut]}))
        whole = {batch.base_offset for batch in read_batches(data[:cut])}
        assert judge(WRITTEN, report, saved) == {12, 13, 14} - whole
        assert report.log_end_offset == 15, "what was given out is not given out again"


@pytest.mark.parametrize("filler", [b"\0", b"\xff", b"noise"])
@pytest.mark.parametrize("size", [17, 61, 512, 4096])
def test_a_block_that_is_overwritten_costs_the_batches_it_touches(size: int, filler: bytes) -> None:
    values = [(at, bytes([at]) * (700 * (at % 5) + 9)) for at in range(60)]
    data = log_of(*values)
    written = batches_of({path_of(0): data})
    for position in range(0, len(data) - size, 1501):
        bad = data[:position] + (filler * size)[:size] + data[position + size :]
        report, saved = recover({path_of(0): bad, **DENSE, **dict.fromkeys(END, b"0\n1\nt 0 60\n")})
        touched = {
            batch.base_offset
            for batch in read_batches(data)
            if batch.position < position + size and position < batch.position + batch.size_bytes
        }
        assert judge(written, report, saved) <= touched


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_a_missing_segment_or_index_or_codec_is_no_trouble(codec: str) -> None:
    segments = {path_of(at): log_of((at, b"x" * 50), (at + 2, b"y"), codec=codec, size=2) for at in (0, 4, 8)}
    written = batches_of(segments)
    del segments[path_of(4)]
    for more in (DENSE, {}):
        report, saved = recover({**segments, **more, path_of(8, ".index"): b"garbage", path_of(8, ".snapshot"): b""})
        assert judge(written, report, saved) == {4, 6}
        (part,) = report.lost
        assert (part.first_offset, part.last_offset, part.position) == (4, 7, None)
    report, saved = recover({path: data for path, data in segments.items() if path == path_of(0)})
    assert not report.lost and len(saved) == 2, "nothing says that there ever was more"


def test_zeros_behind_the_end_are_no_loss_and_garbage_is() -> None:
    report, saved = recover(changed({path_of(12): SEGMENTS[path_of(12)] + bytes(5000)}))
    assert judge(WRITTEN, report, saved) == set() and not report.lost
    assert [(part.size_bytes, part.reason) for part in report.left_out] == [(5000, "zeros")]
    report, saved = recover(changed({path_of(12): SEGMENTS[path_of(12)] + b"torn"}))
    assert judge(WRITTEN, report, saved) == set()
    assert [(part.size_bytes, part.first_offset) for part in report.lost] == [(4, None)]


def test_the_same_offsets_twice_are_kept_once() -> None:
    twice = SEGMENTS[path_of(6)] + SEGMENTS[path_of(6)]
    report, saved = recover(changed({path_of(6): twice, path_of(0): SEGMENTS[path_of(0)] + SEGMENTS[path_of(6)]}))
    assert judge(WRITTEN, report, saved) == set() and not report.lost
    assert len(report.left_out) == 2


@pytest.mark.parametrize("spare", [".log.swap", ".log.deleted", ".log.cleaned", ".77.quarantine"])
def test_what_a_recovery_or_compaction_left_fills_gaps_only(spare: str) -> None:
    """But what a recovery cut off of a log that went on was written again, and a new segment that has begun to take the
    place of the old ones is the log.
    """
    other = log_of((6, b"OTHER"), (9, b"OTHER"), size=3)
    for gone, lost in ((None, {6, 9}), (SEGMENTS[path_of(6)][:-1], {9})):
        report, saved = recover(changed({path_of(6): gone, path_of(6, spare): SEGMENTS[path_of(6)]}))
        assert judge(WRITTEN, report, saved) == (lost if spare == ".77.quarantine" else set())
        is_log = spare == ".log.swap" and gone is None
        assert (path_of(6, spare) in {part.path for part in report.left_out}) != is_log
    report, saved = recover(changed({path_of(6, spare): other}))
    assert judge(WRITTEN, report, saved) == set(), "what is there is not replaced"


def test_a_compaction_that_a_crash_ended_loses_nothing_that_opening_finds() -> None:
    """After the first old segment was taken away the new one under its .swap name is the log, also where it is the
    first; the others that it replaces may still be there.
    """
    disk = SimulatedDisk()
    config = {"segment.bytes": 300, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0}
    with logcore.open("/data/t-0", create=True, config=config, fs=disk) as log:
        for at in range(10):
            log.append(b"%d" % at * 50, key=b"k%d" % (at % 3))
        log.roll()
        for changes in itertools.count():
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
                saved, opened = state.disk(), state.disk()
                report = salvage("/data/t-0", "/out/t-0", fs=saved)
                with logcore.open("/data/t-0", config=config, fs=opened) as log_:
                    expected = list(log_.read(log_.log_start_offset))
                with logcore.open("/out/t-0", config=config, fs=saved) as log_:
                    found = {record.offset: record for record in log_.read(log_.log_start_offset)}
                # Old segments that are all there still hold what compaction leaves out, which is no loss.
                assert [found.get(record.offset) for record in expected] == expected, state.what
                assert report.is_whole, (state.what, report.partitions[0].lost)


def test_what_was_written_again_is_not_taken_from_before() -> None:
    """A recovery put the tail aside, the log went on, and then lost a batch: the old one has its offset."""
    disk = SimulatedDisk()
    with logcore.open("/data/t-0", create=True, fs=disk) as log:
        log.append(b"kept")
    name = f"/data/t-0/{0:020d}.log"
    size = len(disk.files()[name] or b"")
    old = log_of((1, b"old 1"), (2, b"old 2"))
    torn = SimulatedDisk({**disk.files(), name: (disk.files()[name] or b"") + b"\1" + old[1:]})
    with logcore.open("/data/t-0", fs=torn) as log:
        assert log.recovery_report is not None and log.recovery_report.cut_position == size
        for at in (1, 2):
            log.append(b"new %d" % at)
    rotten = bytearray(torn.files()[name] or b"")
    rotten[-3] ^= 1
    bad = SimulatedDisk({**torn.files(), name: bytes(rotten)})
    report = salvage("/data/t-0", "/out/t-0", fs=bad)
    with logcore.open("/out/t-0", read_only=True, fs=bad) as log:
        assert [record.value for record in log.read(0)] == [b"kept", b"new 1"]
    assert [(part.first_offset, part.last_offset) for part in report.partitions[0].lost] == [(2, 2)]


def test_a_name_that_is_not_canonical_and_one_that_cannot_be_listed_cost_no_other() -> None:
    disk = SimulatedDisk()
    with logcore.open_dir("/data", create=True, fs=disk) as logdir:
        for topic in ("a", "b"):
            logdir.create_topic(topic)
            logdir.partition(topic, 0).append(topic.encode())
    files = {**disk.files(), "/data/b-00": None, f"/data/b-00/{0:020d}.log": b""}
    bad = SimulatedDisk(files, faults=FaultPlan(Fault("listdir", errno.EIO, path="/data/a-0", at=1)))
    report = salvage("/data", "/out", fs=bad)
    assert [part.path for part in report.lost] == ["/data/a-0"]
    assert "/data/b-00" in [part.path for part in report.left_out]
    with logcore.open_dir("/out", read_only=True, fs=bad) as logdir:
        assert [record.value for record in logdir.partition("b", 0).read(0)] == [b"b"]
    with logcore.open_dir("/out", fs=bad) as logdir, pytest.raises(logcore.CorruptLogError, match="directory is gone"):
        logdir.partition("a", 0)


@pytest.mark.parametrize("spoil", ["payload", "length", "magic", "head", "crc"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("place", ["middle", "end"])
def test_a_batch_inside_a_value_is_not_taken_for_one(spoil: str, count: int, place: str) -> None:
    """The value holds whole batches with the very offsets that are expected next."""
    inner = log_of(*((offset, b"invented") for offset in range(1, 1 + count)))
    front, outer = log_of((0, b"first")), log_of((1, b"x" * 40 + inner + b"y" * 40), size=10)
    back = log_of((11, b"last")) if place == "middle" else b""
    bad = bytearray(outer)
    if spoil == "head":
        bad[:61] = os.urandom(61)
    else:
        bad[{"payload": -3, "length": 10, "magic": 16, "crc": 17}[spoil]] ^= 4
    written = batches_of({path_of(0): front + outer + back})
    end = dict.fromkeys(END, b"0\n1\nt 0 11\n")
    report, saved = recover({path_of(0): front + bytes(bad) + back, **DENSE, **end})
    assert judge(written, report, saved) == {1}


def test_a_sector_that_cannot_be_read_costs_its_batches() -> None:
    data = log_of(*((at, bytes([at]) * 900) for at in range(40)))
    name = path_of(0)
    plan = FaultPlan(Fault("pread", errno.EIO, path=name, at=1), Fault("pread", errno.EIO, path=name, at=4))
    report, saved = recover({name: data}, plan)  # the first is the look at all of it, the others go by sectors
    gone = judge(batches_of({name: data}), report, saved)
    assert 4 <= len(gone) <= 6
    assert report.lost[0].reason == "a part of it cannot be read"


def test_wrong_checkpoints_cost_no_record() -> None:
    for name in (checkpoint.LOG_START, checkpoint.RECOVERY_POINT, checkpoint.LEADER_EPOCH):
        where = SOURCE if name == checkpoint.LEADER_EPOCH else "data"
        for content in (b"", b"0\n1\n", b"\xff" * 99, b"0\n1\nt 0 -5\n", b"0\n1\nt 0 14\n", b"0\n1\nt 0 %d\n" % 2**63):
            report, saved = recover(changed({f"{where}/{name}": content}))
            start = 14 if (name, content[-3:]) == (checkpoint.LOG_START, b"14\n") else 0
            assert report.log_start_offset == start
            assert set(WRITTEN) - set(saved) == ({0, 2, 4, 6, 9} if start else set()), (name, content)
    report, saved = recover(changed({f"/data/{checkpoint.LOG_START}": b"0\n1\nt 0 99\n"}))
    assert judge(WRITTEN, report, saved) == set()
    assert [part.path for part in report.lost] == [f"/data/{checkpoint.LOG_START}"]


def test_a_log_directory_with_damaged_files_of_its_own() -> None:
    files = {f"/data/{name}": b"garbage" for name in (checkpoint.TOPICS, checkpoint.PRODUCER_IDS, "meta.properties")}
    batch = encode([(None, b"x")], base_offset=0, producer_id=41, producer_epoch=0, base_sequence=0, now_ms=T0)
    files[path_of(0)] = batch
    disk = SimulatedDisk({**files, "/data/t-1": None, "/data/odd": None, f"{SOURCE}/partition.metadata": b"garbage"})
    report = salvage("/data", "/out", fs=disk)
    assert {os.path.basename(part.path) for part in report.lost} == {os.path.basename(name) for name in files} - {
        os.path.basename(path_of(0))
    }
    assert [part.path for part in report.left_out] == ["/data/odd"]
    assert [part.path for part in report.partitions[0].lost] == [f"{SOURCE}/partition.metadata"]
    with logcore.open_dir("/out", fs=disk) as directory:
        assert directory.partition("t", 0).log_end_offset == 1
        assert directory.partition("t", 1).log_end_offset == 0
        assert directory.next_producer_id() > 41, "no id is given out twice"


def test_random_damage_never_invents(tmp_path: Path) -> None:
    rng = random.Random(7)
    values = [(at, rng.randbytes(rng.randrange(300))) for at in range(120)]
    segments = {path_of(low): log_of(*values[low : low + 40]) for low in (0, 40, 80)}
    written = batches_of(segments)
    for _ in range(150):
        bad = {path: bytearray(data) for path, data in segments.items()}
        for _ in range(rng.randrange(1, 8)):
            data = bad[rng.choice(list(bad))]
            at, size = rng.randrange(len(data)), rng.choice([1, 8, 64, 600])
            match rng.randrange(4):
                case 0:
                    data[at : at + size] = rng.randbytes(size)
                case 1:
                    del data[at : at + size]
                case 2:
                    data[at : at + size] = bytes(size)
                case 3:
                    data[at:at] = data[(other := rng.randrange(len(data))) : other + size]
        files = {path: bytes(data) for path, data in bad.items()}
        report, saved = recover({**files, **DENSE, "/data/recovery-point-offset-checkpoint": b"0\n1\nt 0 120\n"})
        judge(written, report, saved)


# -- what is noted beside the files ----------------------------------------------------------------------------------


def partition_of_ten(path: Path) -> Path:
    """t-0 with offsets 0 to 9 in a batch each, the first four deleted; beside it u-0, which holds three."""
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
def test_a_partition_that_was_moved_aside_keeps_start_and_end(tmp_path: Path, place: str) -> None:
    """The log directory's checkpoints go on speaking of it by the name it had and is to have again."""
    data = tmp_path / "data"
    own = partition_of_ten(data)
    source = own.rename(tmp_path / "t-0" if place == "by its name" else data / "t-0.bad")
    (segment,) = source.glob("*.log")
    segment.write_bytes(segment.read_bytes()[:-5])
    before = {name: lines(data, name) for name in (checkpoint.LOG_START, checkpoint.RECOVERY_POINT)}
    target = (tmp_path / "out" if place == "elsewhere" else data) / "t-0"
    (report,) = salvage(source, target).partitions
    assert (report.log_start_offset, report.log_end_offset) == (4, 10)
    assert lost_offsets(report.lost) == {9}
    if place != "elsewhere":
        assert {name: lines(data, name) for name in before} == before
    with logcore.open(target) as log:
        assert [record.offset for record in log.read(log.log_start_offset)] == [4, 5, 6, 7, 8]
        assert log.append(b"next").offset == 10


def test_a_copy_under_another_name_does_not_take_over_what_was_noted_of_that(tmp_path: Path) -> None:
    own = partition_of_ten(tmp_path)
    shutil.rmtree(tmp_path / "u-0")
    (tmp_path / checkpoint.LOG_START).write_text("0\n2\nt 0 4\nu 0 2\n")
    (tmp_path / checkpoint.CLEANER).write_text("0\n2\nt 0 0\nu 0 2\n")
    (report,) = salvage(own, tmp_path / "u-0").partitions
    assert (report.log_start_offset, report.log_end_offset, report.lost) == (4, 10, ())
    assert lines(tmp_path, checkpoint.LOG_START) == {"t 0 4", "u 0 4"}
    assert lines(tmp_path, checkpoint.RECOVERY_POINT) == {"t 0 10", "u 0 10"}
    assert lines(tmp_path, checkpoint.CLEANER) == {"t 0 0"}


def test_a_checkpoint_that_cannot_be_understood_is_reported() -> None:
    for name in (checkpoint.LOG_START, checkpoint.RECOVERY_POINT):
        disk = SimulatedDisk({**SEGMENTS, f"/data/{name}": b"garbage"})
        assert [part.path for part in salvage(SOURCE, TARGET, fs=disk).lost] == [f"/data/{name}"]


@pytest.mark.parametrize("start", [0, 3])
def test_first_segments_that_are_gone_are_lost_and_those_that_were_deleted_are_not(start: int) -> None:
    notes = {
        **END,
        f"/data/{checkpoint.LOG_START}": b"0\n1\nt 0 %d\n" % start,
        f"{SOURCE}/{checkpoint.LEADER_EPOCH}": b"0\n1\n0 0\n",
    }
    report, saved = recover(changed({path_of(0): None, **notes}))
    assert lost_offsets(report.lost) == set(range(start, 6)) and set(saved) == {6, 9, 12, 13, 14}
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
    report, _ = recover(changed({path_of(0): None, **notes, f"/data/{checkpoint.LOG_START}": b"0\n1\nt 0 6\n"}))
    assert not report.lost and report.log_start_offset == 6


# -- transactions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "abort", "open"])
def test_a_transaction_whose_marker_is_lost_is_named(end: str) -> None:
    """What an aborted transaction wrote would be read as if it had been committed with the next one."""
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
    marker = next(batch for batch in read_batches(bytes(data)) if batch.base_offset == lost)
    data[marker.position + 61] ^= 1
    bad = SimulatedDisk({**disk.files(), name: bytes(data)})
    (report,) = salvage(SOURCE, TARGET, fs=bad).partitions
    assert lost_offsets(report.lost) == {lost}
    (named,) = (part for part in report.lost if part.first_offset is None)
    assert "producer 7 " in named.reason and "began at offset 0" in named.reason
    with logcore.open(TARGET, read_only=True, fs=bad) as copy:
        shown = [record.value for record in copy.read(0, isolation="read_committed")]
    rest = [b"committed", b"between"]
    assert shown == {"commit": [b"aborted", *rest, b"second", b"last"], "abort": [*rest, b"last"], "open": []}[end]
    assert {"commit": "commits it", "abort": "aborts it", "open": "it is open"}[end] in named.reason


def test_a_loss_outside_of_transactions_names_none() -> None:
    disk = SimulatedDisk()
    with logcore.open(SOURCE, create=True, fs=disk) as log:
        first = log.append(b"lost").offset
        raw = encode(
            [(None, b"x")], transactional=True, producer_id=7, producer_epoch=0, base_sequence=0, now_ms=FUTURE
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
    assert [(part.first_offset, part.last_offset) for part in report.lost] == [(0, 0), (3, 3)]


# -- batches that nobody can decode ----------------------------------------------------------------------------------


def with_crc(batch: bytearray) -> bytes:
    from crc32c import crc32c

    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")
    return bytes(batch)


@pytest.mark.parametrize("spoil", ["payload", "count", "record", "codec"])
@pytest.mark.parametrize("place", ["middle", "end"])
def test_a_batch_with_a_right_crc_that_cannot_be_decoded_is_lost(spoil: str, place: str) -> None:
    batch = bytearray(log_of((6, b"d" * 30), codec="gzip" if spoil == "payload" else "uncompressed", size=3))
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
    assert judge(
        {
            **batches_of({path_of(0): files[path_of(0)]}),
            6: bytes(batch),
            **(batches_of({path_of(6): good}) if place == "middle" else {}),
        },
        report,
        saved,
    ) == {6}
    assert [(part.position, part.size_bytes) for part in report.lost] == [(0, len(batch))]
    assert report.log_end_offset == (12 if place == "middle" else 9), "its offsets were given out"


def test_a_batch_whose_codec_is_not_installed_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    written = batches_of(SEGMENTS)

    def missing(*_: object, **__: object) -> None:
        raise logcore.UnsupportedCodecError("zstd needs a package that is not installed")

    monkeypatch.setattr("logcore.recordbatch.decompress", missing)
    report, saved = recover(changed({}), quick=True)
    assert judge(written, report, saved) == set() and not report.lost


# -- work ------------------------------------------------------------------------------------------------------------


class Counted:
    """The kernels, and how many bytes they were asked to look at with CRCs."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(kernels.kernel, name)

    def walk(self, data: Any, position: int, limit: int, count: int, crc: bool) -> Any:
        facts, end, why = kernels.kernel.walk(data, position, limit, count, crc)
        if crc:
            self.size_bytes += end - position
            if why == layout.WALK_CRC:
                self.size_bytes += 12 + int.from_bytes(bytes(data[end + 8 : end + 12]), "big")
        return facts, end, why

    def checksum(self, call: Any) -> Any:
        def counted(data: Any, crc: int = 0) -> int:
            self.size_bytes += len(data)
            return int(call(data, crc))

        return counted


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()
    monkeypatch.setattr(searching, "kernel", found)
    monkeypatch.setattr(searching, "crc32c", found.checksum(searching.crc32c))
    monkeypatch.setattr(searching.zlib, "crc32", found.checksum(searching.zlib.crc32))
    return found


def test_many_gaps_do_not_read_a_spare_file_as_often(counted: Counted) -> None:
    data = log_of(*((at, b"value") for at in range(8000)))
    size = len(data) // 8000
    bad = bytearray(data)
    for at in range(40, 8000, 80):  # a hundred of them
        bad[at * size + 61] ^= 1
    report, saved = recover({path_of(0): bytes(bad), path_of(0, ".log.deleted"): data, **DENSE}, quick=True)
    assert not report.lost and saved == batches_of({path_of(0): data})
    assert counted.size_bytes < 8 * len(data), counted.size_bytes / len(data)


@pytest.mark.parametrize("magic", [0, 1, 2])
def test_heads_that_claim_all_of_the_rest_do_not_make_the_work_grow_with_its_square(
    counted: Counted, magic: int
) -> None:
    last = log_of((10**6, b"real"))
    work = []
    for size in (1 << 17, 1 << 18):
        counted.size_bytes = 0
        data = bytearray(b"\1" * 70)
        while len(data) < size:
            data += struct.pack(">qiib", len(data), size + len(last) - len(data) - 30, 0, magic)
        _, saved = recover({path_of(0): bytes(data) + last}, quick=True)
        assert set(saved) == {10**6}
        work.append(counted.size_bytes)
    assert work[1] < 2.5 * work[0], work


# -- copies that were cut off ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["partition", "directory"])
def test_a_copy_that_was_cut_off_is_no_log(kind: str) -> None:
    """At every change of the disk: the copy is all there, or whoever opens it or makes it again is told."""
    disk = SimulatedDisk()
    with logcore.open_dir("/data", create=True, fs=disk) as directory:
        directory.create_topic("t", partitions=2)
        for number in range(2):
            for at in range(4):
                directory.partition("t", number).append(b"%d" % at)
                if at == 1:
                    directory.partition("t", number).roll()
    source, target = ("/data", "/out") if kind == "directory" else ("/data/t-0", "/out/t-0")
    refused = finished = 0
    for changes in itertools.count():
        copy = SimulatedDisk(disk.files())
        copy.crash_in(changes)
        try:
            salvage(source, target, fs=copy)
        except SimulatedCrash:
            pass
        else:
            break
        for state in copy.crash_states(limit=6):
            left = state.disk()
            is_there = [left.is_directory(f"/out/t-{number}") for number in range(2)]
            for number in [number for number in range(2) if is_there[number]]:
                with logcore.open(f"/out/t-{number}", read_only=True, fs=left) as log:
                    assert [record.value for record in log.read(0)] == [b"0", b"1", b"2", b"3"], state.what
            if kind == "directory" and left.is_directory("/out") and checkpoint.TOPICS in left.listdir("/out"):
                try:
                    with logcore.open_dir("/out", read_only=True, fs=left) as opened:
                        assert opened.topics() == ["t"] and all(is_there), state.what
                        finished += 1
                except logcore.CorruptLogError as error:
                    assert "has not finished" in str(error)
                    refused += 1
            try:
                report = salvage(source, target, fs=left)
            except logcore.InvalidConfigError as error:
                assert "there is something here already" in str(error), state.what
                unfinished = [name for name in left.listdir("/out") if name.endswith(".recovering")]
                assert not unfinished or "did not finish" in str(error)
                refused += 1
            else:
                assert report.is_whole
                assert not is_there[0] and not any(is_there), state.what
    assert refused > 20 and (finished or kind == "partition")


# -- staged writes ---------------------------------------------------------------------------------------------------


def staged_into(path: Path, version: int, *, publishes: bool = True) -> None:
    """A write of three records to t-0, as Spark stages one."""
    staging = Staging(OS, str(path))
    staging.begin(f"tx{version}")
    writer = StagedWriter(OS, str(path), f"tx{version}", "t", 0, "0.0", LogConfig.parse(None))
    writer.append_records([(None, b"staged", (), None)] * 3)
    files = writer.close()
    if publishes:
        staging.publish(Manifest(app_id="app", version=version, txid=f"tx{version}", files=files))


def test_staged_writes_are_copied(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    with logcore.open_dir(data, create=True) as directory:
        directory.create_topic("t")
        directory.partition("t", 0).append(b"before")
        staged_into(data, 0)
        assert apply_ready(OS, directory) == 1
    staged_into(data, 1)
    staged_into(data, 2, publishes=False)
    before = tree(tmp_path)
    report = salvage(data, out)
    assert report.is_whole
    assert [Path(part.path).name for part in report.left_out] == ["tx2"]
    assert {path: at for path, at in tree(tmp_path).items() if not path.startswith("out")} == before
    staged_into(out, 0)  # a driver that does not know that it was done
    with logcore.open_dir(out) as directory:
        assert [record.value for record in directory.partition("t", 0).read(0)] == [b"before", *[b"staged"] * 6]
    with pytest.raises(logcore.InvalidConfigError, match="staged writes beside it"):
        shutil.rmtree(out)
        salvage(data, out)


def test_offsets_of_a_staged_write_that_was_half_in_place_are_not_given_out_again(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    with logcore.open_dir(data, create=True) as directory:
        directory.create_topic("t")
        directory.partition("t", 0).append(b"before")
    staged_into(data, 1)
    (ready,) = (tmp_path / "data.staging").glob("*.json")
    manifest = Manifest.unpack(ready.read_bytes(), "")
    assigned = attrs.evolve(manifest, places={("t", 0): Place(base=1, leader_epoch=0, segment=0, position=75)})
    ready.with_suffix(".assigned").write_bytes(assigned.pack())
    ready.unlink()
    report = salvage(data, out)
    assert [Path(part.path).suffix for part in report.lost] == [".assigned"]
    assert lost_offsets(report.partitions[0].lost) == {1, 2, 3}
    with logcore.open_dir(out) as directory:
        assert directory.partition("t", 0).append(b"next").offset == 4


# -- limits and the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["full", "t-0/sub-0", "t-0", "no-partition-"])
def test_a_target_that_will_not_do_is_refused_before_any_effect(tmp_path: Path, own: Path, target: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    own.rename(tmp_path / "t-0")
    before = tree(tmp_path)
    with pytest.raises((logcore.InvalidConfigError, logcore.InvalidNameError)):
        salvage(tmp_path / "t-0", tmp_path / target)
    assert tree(tmp_path) == before


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True, durability="os", config={"segment.bytes": 40 << 20}) as log:
        value = os.urandom(100_000)
        for _ in range(80):
            log.append_many([(None, value)] * 10)
    path = sorted((tmp_path / "t-0").glob("*.log"))[0]
    with path.open("r+b") as file:
        file.seek(15 << 20)
        file.write(os.urandom(5 << 20))
    tracemalloc.start()
    report = salvage(tmp_path / "t-0", tmp_path / "out" / "t-0")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.partitions[0].size_bytes > 70 << 20 and not report.is_whole
    assert peak < 16 << 20, peak


def test_the_command(tmp_path: Path, own: Path) -> None:
    done = run("recover", own, tmp_path / "a" / "t-0")
    assert (done.exit_code, json.loads(done.stdout)["partitions"][0]["records"]) == (0, 18)
    path = sorted(own.glob("*.log"))[1]
    data = bytearray(path.read_bytes())
    data[80] ^= 1
    path.write_bytes(data)
    done = run("recover", own, tmp_path / "b" / "t-0", "--json")
    (part,) = json.loads(done.stdout)["partitions"][0]["lost"]
    assert (done.exit_code, part["first_offset"], part["last_offset"]) == (1, 6, 8)
    for arguments in ((own,), (own, tmp_path / "b" / "t-0"), (tmp_path / "none", tmp_path / "c"), ()):
        done = run("recover", *arguments)
        assert (done.exit_code, done.stdout) == (2, "")


def test_the_command_for_people(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logcore.cli.commands.wants_json", lambda as_json: as_json)
    done = run("recover", own, tmp_path / "b" / "t-0")
    assert done.exit_code == 0 and "all of it was saved" in done.stdout
    for path in sorted(own.glob("*.log"))[:2]:
        path.unlink()
    (path,) = own.glob("*.log")
    path.write_bytes(path.read_bytes()[:-1])
    done = run("recover", own, tmp_path / "c" / "t-0")
    assert done.exit_code == 1
    assert re.search(r"lost: offsets 15 to 17, .*000012.log, \d+ bytes at position \d+: incomplete batch", done.stdout)
    assert re.search(r"lost: offsets 0 to 11, .*mine-0: no file holds these offsets", done.stdout)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.mark.interop
def test_kafka_reads_what_was_saved(tmp_path: Path) -> None:
    """A gap in the offsets is nothing to Kafka; its dump tool finds batches and indexes sound."""
    config = {"segment.bytes": 6000, "index.interval.bytes": 300}
    with logcore.open(tmp_path / "t-0", create=True, config=config) as log:
        for at in range(300):
            log.append(b"value %d" % at * 3)
    paths = sorted((tmp_path / "t-0").glob("*.log"))
    for path in paths[:4]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    paths[-2].unlink()
    report = salvage(tmp_path / "t-0", tmp_path / "out" / "t-0")
    found = []
    for path in sorted((tmp_path / "out" / "t-0").glob("*.log")):
        text = kafka_jvm.dump(path, "--deep-iteration")
        batches = re.findall(r"^baseOffset: .*$", text, re.M)
        assert batches and all("isvalid: true" in batch for batch in batches)
        found += [int(offset) for offset in re.findall(r"^\| offset: (\d+)", text, re.M)]
        for suffix in (".index", ".timeindex"):
            text = kafka_jvm.dump(path.with_suffix(suffix), "--index-sanity-check")
            assert "mismatch" not in text.lower() and "exception" not in text.lower(), text
    assert set(found) == set(range(300)) - lost_offsets(report.partitions[0].lost)
    assert 4 < 300 - len(found) < 100


def test_checkpoints_beside_what_a_link_points_to(tmp_path: Path) -> None:
    """A log that is opened by a symbolic link has its checkpoints where the directory really is."""
    data, other = tmp_path / "data", tmp_path / "other"
    with logcore.open(data / "u-0", create=True) as log:
        log.append(b"beside")
    with logcore.open(other / "t-0", create=True) as log:
        for number in range(8):
            log.append(b"%d" % number)
            log.roll()
        log.delete_records(3)
        end = log.log_end_offset
    for name in os.listdir(other / "t-0"):
        if name.startswith(f"{end:020d}") or name.startswith(f"{end - 1:020d}"):
            (other / "t-0" / name).unlink()
    (data / "t-0").symlink_to(other / "t-0")
    for source, target in ((data / "t-0", tmp_path / "one" / "t-0"), (data, tmp_path / "all")):
        report = next(one for one in salvage(source, target).partitions if one.target.endswith("t-0"))
        assert (report.log_start_offset, report.log_end_offset) == (3, end)
        assert [(part.first_offset, part.last_offset) for part in report.lost] == [(end - 1, end - 1)]


def test_what_fills_a_gap_far_above_its_segment_gets_one_of_its_own() -> None:
    far = 5_000_000_000
    batch = encode([(None, b"x", (), 1_000)] * 4, base_offset=far)
    points = b"0\n1\nt 0 %d\n" % (far + 4)
    files = {f"/d/t-0/{0:020d}.log": b"", f"/d/t-0/{far:020d}.log.deleted": batch}
    disk = SimulatedDisk({**files, "/d/recovery-point-offset-checkpoint": points})
    report = salvage("/d/t-0", "/out/t-0", fs=disk).partitions[0]
    assert (report.records, report.log_end_offset) == (4, far + 4)
    with logcore.open("/out/t-0", fs=disk) as log:
        assert [record.offset for record in log.read(log.log_start_offset)] == list(range(far, far + 4))


def test_what_another_log_left_in_the_checkpoints_of_the_target_is_not_this_ones() -> None:
    disk = SimulatedDisk()
    with logcore.open("/data/t-0", create=True, fs=disk) as log:
        for number in range(10):
            log.append(b"%d" % number)
            log.roll()
    stale = {
        "/new/log-start-offset-checkpoint": b"0\n1\nt 0 8\n",
        "/new/recovery-point-offset-checkpoint": b"0\n1\nt 0 90\n",
    }
    disk = SimulatedDisk({**disk.files(), **stale})
    report = salvage("/data/t-0", "/new/t-0", fs=disk)
    assert report.is_whole
    assert (report.partitions[0].records, report.partitions[0].log_end_offset) == (10, 10)
    with logcore.open("/new/t-0", fs=disk) as log:
        assert (log.log_start_offset, log.log_end_offset) == (0, 10)


def test_a_partition_under_a_name_that_nothing_knows_is_lost(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "data" / "t-00", create=True) as log:
        log.append(b"acknowledged")
    with logcore.open(tmp_path / "data" / "u-0", create=True) as log:
        log.append(b"beside")
    report = salvage(tmp_path / "data", tmp_path / "out")
    assert [Path(part.path).name for part in report.lost] == ["t-00"]
    assert "damaged" not in {one.status for one in verify(tmp_path / "data")}
    assert salvage(tmp_path / "data" / "t-00", tmp_path / "one" / "t-0").is_whole


def test_an_offset_that_damage_reached_is_not_believed() -> None:
    """A torn sector ended in the offset of the next head, which no CRC covers: the batch came back with another offset,
    and the sound one behind it went.
    """
    disk = SimulatedDisk()
    with logcore.open("/d/t-0", create=True, fs=disk) as log:
        log.append_many([(None, b"first")] * 4)
        at = log.writer.active.size_bytes
        log.append(b"four")
        log.append_many([(None, b"last")] * 3)
        path = log.writer.active.path
    broken = bytearray(disk.files()[path])
    broken[at - 56 : at + 8] = bytes(64)
    disk = SimulatedDisk({**disk.files(), path: bytes(broken)})
    report = salvage("/d/t-0", "/out/t-0", fs=disk).partitions[0]
    assert [(part.first_offset, part.last_offset) for part in report.lost] == [(0, 4)]
    with logcore.open("/out/t-0", fs=disk) as log:
        assert [(record.offset, record.value) for record in log.read(log.log_start_offset)] == [
            (offset, b"last") for offset in (5, 6, 7)
        ]


def test_gaps_look_only_at_the_spare_files_that_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gap looked at each spare file: 4,000 of both took ten seconds."""
    count, looked = 200, 0
    real = searching.Extent.cut

    def cut(self: Any, *arguments: Any) -> Any:
        nonlocal looked
        looked += 1
        return real(self, *arguments)

    monkeypatch.setattr(searching.Extent, "cut", cut)
    files = {"/d/recovery-point-offset-checkpoint": b"0\n1\nt 0 %d\n" % count}
    for offset in range(0, count, 2):
        for name in (f"{offset:020d}.log", f"{offset + 1:020d}.log.deleted"):
            base = int(name[:20])
            files[f"/d/t-0/{name}"] = encode([(None, b"%d" % base, (), 1_000)], base_offset=base)
    report = salvage("/d/t-0", "/out/t-0", fs=SimulatedDisk(files)).partitions[0]
    assert (report.records, report.lost) == (count, ())
    assert looked <= 2 * count
