"""`logcore recover`: its work and memory, interrupted copies, staged writes, and the
command.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import attrs
import pytest

import logcore
from logcore import kernels
from logcore.config import LogConfig
from logcore.fs import OS
from logcore.inspect import batch_search
from logcore.inspect.salvage import salvage
from logcore.inspect.verify import verify
from logcore.kernels import layout
from logcore.metadata import checkpoint
from logcore.recordbatch import encode
from logcore.staging.applying import apply_ready
from logcore.staging.manifest import Manifest, StagedTarget
from logcore.staging.publishing import Staging
from logcore.staging.writing import StagedWriter
from logcore.testing import SimulatedCrash, SimulatedDisk
from support import kafka_jvm
from support.salvaging import (
    DENSE,
    batches_of,
    log_of,
    lost_offsets,
    path_of,
    recover,
    tree,
)

CliRunner = pytest.importorskip("click.testing").CliRunner
from logcore.cli.commands import main  # noqa: E402

# -- work ------------------------------------------------------------------------------


class Counted:
    """The kernels, with a count of the bytes whose CRC they check."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(kernels.kernel, name)

    def walk(self, data: Any, position: int, limit: int, count: int, crc: bool) -> Any:
        facts, end, why = kernels.kernel.walk(data, position, limit, count, crc)
        if crc:
            self.size_bytes += end - position
            if why == layout.WALK_CRC:
                self.size_bytes += 12 + int.from_bytes(
                    bytes(data[end + 8 : end + 12]), "big"
                )
        return facts, end, why

    def checksum(self, call: Any) -> Any:
        def counted(data: Any, crc: int = 0) -> int:
            self.size_bytes += len(data)
            return int(call(data, crc))

        return counted


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()
    monkeypatch.setattr(batch_search, "kernel", found)
    monkeypatch.setattr(batch_search, "crc32c", found.checksum(batch_search.crc32c))
    monkeypatch.setattr(
        batch_search.zlib, "crc32", found.checksum(batch_search.zlib.crc32)
    )
    return found


def test_spare_file_is_read_once_for_many_gaps(counted: Counted) -> None:
    data = log_of(*((at, b"value") for at in range(8000)))
    size = len(data) // 8000
    bad = bytearray(data)
    for at in range(40, 8000, 80):  # a hundred of them
        bad[at * size + 61] ^= 1
    report, saved = recover(
        {path_of(0): bytes(bad), path_of(0, ".log.deleted"): data, **DENSE}, quick=True
    )
    assert not report.lost and saved == batches_of({path_of(0): data})
    assert counted.size_bytes < 8 * len(data), counted.size_bytes / len(data)


@pytest.mark.long
@pytest.mark.parametrize("magic", [0, 1, 2])
def test_heads_with_long_lengths_cause_only_linear_work(
    counted: Counted, magic: int
) -> None:
    last = log_of((10**6, b"real"))
    work = []
    for size in (1 << 16, 1 << 17):
        counted.size_bytes = 0
        data = bytearray(b"\1" * 70)
        while len(data) < size:
            data += struct.pack(
                ">qiib", len(data), size + len(last) - len(data) - 30, 0, magic
            )
        _, saved = recover({path_of(0): bytes(data) + last}, quick=True)
        assert set(saved) == {10**6}
        work.append(counted.size_bytes)
    assert work[1] < 2.5 * work[0], work


# -- copies that were cut off ----------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["partition", "directory"])
def test_interrupted_copy_is_not_a_log(kind: str) -> None:
    """After a crash at any change of the disk, the copy is complete, or opening it and
    copying again report an error.
    """
    disk = SimulatedDisk()
    with logcore.open_dir("/data", create=True, fs=disk) as directory:
        directory.create_topic("t", partitions=2)
        for number in range(2):
            for at in range(4):
                directory.partition("t", number).append(b"%d" % at)
                if at == 1:
                    directory.partition("t", number).roll()
    source, target = (
        ("/data", "/out") if kind == "directory" else ("/data/t-0", "/out/t-0")
    )
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
                    assert [record.value for record in log.read(0)] == [
                        b"0",
                        b"1",
                        b"2",
                        b"3",
                    ], state.what
            if (
                kind == "directory"
                and left.is_directory("/out")
                and checkpoint.TOPICS in left.listdir("/out")
            ):
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
                unfinished = [
                    name
                    for name in left.listdir("/out")
                    if name.endswith(".recovering")
                ]
                assert not unfinished or "did not finish" in str(error)
                refused += 1
            else:
                assert report.is_whole
                assert not is_there[0] and not any(is_there), state.what
    assert refused > 20 and (finished or kind == "partition")


# -- staged writes ---------------------------------------------------------------------


def staged_into(path: Path, version: int, *, publishes: bool = True) -> None:
    """Stage a write of three records to t-0, like a Spark job."""
    staging = Staging(OS, str(path))
    staging.begin(f"tx{version}")
    writer = StagedWriter(
        OS, str(path), f"tx{version}", "t", 0, "0.0", LogConfig.parse(None)
    )
    writer.append_records([(None, b"staged", (), None)] * 3)
    files = writer.close()
    if publishes:
        staging.publish(
            Manifest(app_id="app", version=version, txid=f"tx{version}", files=files)
        )


def test_staged_writes_are_copied(tmp_path: Path) -> None:
    data = tmp_path / "data"
    out = tmp_path / "out"
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
    assert {
        path: at for path, at in tree(tmp_path).items() if not path.startswith("out")
    } == before
    staged_into(out, 0)  # a driver that repeats its write
    with logcore.open_dir(out) as directory:
        assert [record.value for record in directory.partition("t", 0).read(0)] == [
            b"before",
            *[b"staged"] * 6,
        ]
    with pytest.raises(logcore.InvalidConfigError, match="staged writes beside it"):
        shutil.rmtree(out)
        salvage(data, out)


def test_offsets_of_a_partially_applied_write_are_not_reused(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    out = tmp_path / "out"
    with logcore.open_dir(data, create=True) as directory:
        directory.create_topic("t")
        directory.partition("t", 0).append(b"before")
    staged_into(data, 1)
    (ready,) = (tmp_path / "data.staging").glob("*.json")
    manifest = Manifest.unpack(ready.read_bytes(), "")
    assigned = attrs.evolve(
        manifest,
        places={("t", 0): StagedTarget(base=1, leader_epoch=0, segment=0, position=75)},
    )
    ready.with_suffix(".assigned").write_bytes(assigned.pack())
    ready.unlink()
    report = salvage(data, out)
    assert [Path(part.path).suffix for part in report.lost] == [".assigned"]
    assert lost_offsets(report.partitions[0].lost) == {1, 2, 3}
    with logcore.open_dir(out) as directory:
        assert directory.partition("t", 0).append(b"next").offset == 4


# -- limits and the command ------------------------------------------------------------


@pytest.mark.parametrize("target", ["full", "t-0/sub-0", "t-0", "no-partition-"])
def test_invalid_target_is_refused_before_any_change(
    tmp_path: Path, logcore_partition: Path, target: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    logcore_partition.rename(tmp_path / "t-0")
    before = tree(tmp_path)
    with pytest.raises((logcore.InvalidConfigError, logcore.InvalidNameError)):
        salvage(tmp_path / "t-0", tmp_path / target)
    assert tree(tmp_path) == before


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    with logcore.open(
        tmp_path / "t-0",
        create=True,
        durability="os",
        config={"segment.bytes": 40 << 20},
    ) as log:
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


def test_recover_command_prints_json(tmp_path: Path, logcore_partition: Path) -> None:
    done = run("recover", logcore_partition, tmp_path / "a" / "t-0")
    assert (done.exit_code, json.loads(done.stdout)["partitions"][0]["records"]) == (
        0,
        18,
    )
    path = sorted(logcore_partition.glob("*.log"))[1]
    data = bytearray(path.read_bytes())
    data[80] ^= 1
    path.write_bytes(data)
    done = run("recover", logcore_partition, tmp_path / "b" / "t-0", "--json")
    (part,) = json.loads(done.stdout)["partitions"][0]["lost"]
    assert (done.exit_code, part["first_offset"], part["last_offset"]) == (1, 6, 8)
    for arguments in (
        (logcore_partition,),
        (logcore_partition, tmp_path / "b" / "t-0"),
        (tmp_path / "none", tmp_path / "c"),
        (),
    ):
        done = run("recover", *arguments)
        assert (done.exit_code, done.stdout) == (2, "")


def test_recover_command_prints_text_on_a_terminal(
    tmp_path: Path, logcore_partition: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logcore.cli.maintenance.wants_json", lambda as_json: as_json)
    done = run("recover", logcore_partition, tmp_path / "b" / "t-0")
    assert done.exit_code == 0 and "all records were saved" in done.stdout
    for path in sorted(logcore_partition.glob("*.log"))[:2]:
        path.unlink()
    (path,) = logcore_partition.glob("*.log")
    path.write_bytes(path.read_bytes()[:-1])
    done = run("recover", logcore_partition, tmp_path / "c" / "t-0")
    assert done.exit_code == 1
    assert re.search(
        r"lost: offsets 15 to 17, .*000012.log, \d+ bytes at position \d+: incomplete batch",
        done.stdout,
    )
    assert re.search(
        r"lost: offsets 0 to 11, .*payments-0: no file holds these offsets", done.stdout
    )


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.mark.interop
def test_kafka_reads_the_salvaged_copy(tmp_path: Path) -> None:
    """Kafka accepts a gap in the offsets, and its dump tool finds no fault in batches and
    indexes.
    """
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
        text = kafka_jvm.run_dump_tool(path, "--deep-iteration")
        batches = re.findall(r"^baseOffset: .*$", text, re.M)
        assert batches and all("isvalid: true" in batch for batch in batches)
        found += [
            int(offset) for offset in re.findall(r"^\| offset: (\d+)", text, re.M)
        ]
        for suffix in (".index", ".timeindex"):
            text = kafka_jvm.run_dump_tool(
                path.with_suffix(suffix), "--index-sanity-check"
            )
            assert "mismatch" not in text.lower() and "exception" not in text.lower(), (
                text
            )
    assert set(found) == set(range(300)) - lost_offsets(report.partitions[0].lost)
    assert 4 < 300 - len(found) < 100


def test_checkpoints_are_written_to_the_target_of_a_link(tmp_path: Path) -> None:
    """The checkpoints of a log that is opened by a symbolic link are next to the target of
    the link.
    """
    data = tmp_path / "data"
    other = tmp_path / "other"
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
    for source, target in (
        (data / "t-0", tmp_path / "one" / "t-0"),
        (data, tmp_path / "all"),
    ):
        report = next(
            partition
            for partition in salvage(source, target).partitions
            if partition.target.endswith("t-0")
        )
        assert (report.log_start_offset, report.log_end_offset) == (3, end)
        assert [(part.first_offset, part.last_offset) for part in report.lost] == [
            (end - 1, end - 1)
        ]


def test_batch_far_above_its_segment_gets_its_own_segment() -> None:
    far = 5_000_000_000
    batch = encode([(None, b"x", (), 1_000)] * 4, base_offset=far)
    points = b"0\n1\nt 0 %d\n" % (far + 4)
    files = {f"/d/t-0/{0:020d}.log": b"", f"/d/t-0/{far:020d}.log.deleted": batch}
    disk = SimulatedDisk({**files, "/d/recovery-point-offset-checkpoint": points})
    report = salvage("/d/t-0", "/out/t-0", fs=disk).partitions[0]
    assert (report.records, report.log_end_offset) == (4, far + 4)
    with logcore.open("/out/t-0", fs=disk) as log:
        assert [record.offset for record in log.read(log.log_start_offset)] == list(
            range(far, far + 4)
        )


def test_checkpoints_of_another_log_in_the_target_are_ignored() -> None:
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
    assert (report.partitions[0].records, report.partitions[0].log_end_offset) == (
        10,
        10,
    )
    with logcore.open("/new/t-0", fs=disk) as log:
        assert (log.log_start_offset, log.log_end_offset) == (0, 10)


def test_unreadable_partition_with_an_unknown_name_is_lost(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "data" / "t-00", create=True) as log:
        log.append(b"acknowledged")
    with logcore.open(tmp_path / "data" / "u-0", create=True) as log:
        log.append(b"beside")
    report = salvage(tmp_path / "data", tmp_path / "out")
    assert [Path(part.path).name for part in report.lost] == ["t-00"]
    assert "damaged" not in {verdict.status for verdict in verify(tmp_path / "data")}
    assert salvage(tmp_path / "data" / "t-00", tmp_path / "one" / "t-0").is_whole


def test_damaged_offset_after_a_torn_sector_is_rejected() -> None:
    """A torn sector ended in the offset of the next header, which no CRC covers. The
    batch was copied with another offset, and the sound batch after it was lost.
    """
    disk = SimulatedDisk()
    with logcore.open("/d/t-0", create=True, fs=disk) as log:
        log.append_many([(None, b"first")] * 4)
        at = log.host.writer.active.size_bytes
        log.append(b"four")
        log.append_many([(None, b"last")] * 3)
        path = log.host.writer.active.path
    broken = bytearray(disk.files()[path])
    broken[at - 56 : at + 8] = bytes(64)
    disk = SimulatedDisk({**disk.files(), path: bytes(broken)})
    report = salvage("/d/t-0", "/out/t-0", fs=disk).partitions[0]
    assert [(part.first_offset, part.last_offset) for part in report.lost] == [(0, 4)]
    with logcore.open("/out/t-0", fs=disk) as log:
        assert [
            (record.offset, record.value) for record in log.read(log.log_start_offset)
        ] == [(offset, b"last") for offset in (5, 6, 7)]


def test_gap_reads_only_spare_files_that_overlap_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each gap was compared with each spare file: 4,000 of both took ten seconds."""
    count = 200
    looked = 0
    real = batch_search.Extent.cut

    def cut(self: Any, *arguments: Any) -> Any:
        nonlocal looked
        looked += 1
        return real(self, *arguments)

    monkeypatch.setattr(batch_search.Extent, "cut", cut)
    files = {"/d/recovery-point-offset-checkpoint": b"0\n1\nt 0 %d\n" % count}
    for offset in range(0, count, 2):
        for name in (f"{offset:020d}.log", f"{offset + 1:020d}.log.deleted"):
            base = int(name[:20])
            files[f"/d/t-0/{name}"] = encode(
                [(None, b"%d" % base, (), 1_000)], base_offset=base
            )
    report = salvage("/d/t-0", "/out/t-0", fs=SimulatedDisk(files)).partitions[0]
    assert (report.records, report.lost) == (count, ())
    assert looked <= 2 * count
