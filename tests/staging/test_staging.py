"""Staged writes: a write is stored completely or not at all, and once, whichever
process dies. These tests do the work of the driver and its tasks.
"""

from __future__ import annotations

import os
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any

import attrs
import pytest

import logcore
from logcore.config import LogConfig
from logcore.errors import (
    CorruptLogError,
    InvalidConfigError,
    LogFailedError,
    LogNotFoundError,
)
from logcore.fs import FS, OS, OsFS
from logcore.inspect.verify import verify
from logcore.kernels.layout import InputColumns
from logcore.metadata import checkpoint
from logcore.metadata.filenames import staging_path
from logcore.staging import applying, publishing
from logcore.staging.applying import apply_ready
from logcore.staging.manifest import (
    Manifest,
    StagedTarget,
    manifest_name,
    read_manifest,
    read_state,
)
from logcore.staging.publishing import Staging
from logcore.staging.writing import StagedWriter
from support.staged import (
    PARTITIONS,
    SMALL,
    column,
    create,
    manifest,
    publish,
    rows,
    stage,
    staged,
    values,
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return create(tmp_path / "data")


@pytest.mark.parametrize("config", [None, SMALL], ids=["appended", "moved"])
def test_opening_applies_published_writes(
    tmp_path: Path, config: dict[str, str] | None
) -> None:
    path = create(tmp_path / "data", config)
    staging = publish(path, "first", config=config, count=300)
    assert values(path, 0) == [b"before"], (
        "no row is visible before the write is applied"
    )
    with logcore.open_dir(path) as directory:
        assert staging.outcome("app", 0) == "done"
        receipt = directory.partition("t", 0).append(b"after")
        assert receipt.offset == 301
        shape = directory.partition("t", 0).statistics()
        assert (shape.segments > 1) == (config is not None)
        assert (
            shape.log_end_offset
            == shape.high_watermark
            == shape.durable_end_offset
            == 302
        )
    for partition in PARTITIONS:
        tail = [b"after"] if partition == 0 else []
        assert values(path, partition) == [
            b"before",
            *rows("first", partition, 300),
            *tail,
        ]
    assert staged(path) == ["app.state"]
    state = read_state(OS, str(tmp_path / "data.staging"), "app")
    assert state is not None and state["ranges"] == {
        "t": {"0": [1, 301], "1": [1, 301]}
    }
    assert {verdict.status for verdict in verify(str(path))} == {"ok"}


@pytest.mark.parametrize("durability", ["group", "os"])
def test_tick_applies_published_writes_in_an_open_directory(
    data: Path, durability: str
) -> None:
    with logcore.open_dir(data, durability=durability) as directory:
        log = directory.partition("t", 0)
        tail = log.tail(1, timeout=300)
        publish(data, "first")
        directory.tick()
        assert log.log_end_offset == 31
        assert next(tail).value == b"first-0-0", "waiting readers are woken"
        tail.close()
        log.append(b"after")
    assert values(data, 0) == [b"before", *rows("first", 0), b"after"]


def test_missing_topic_is_created(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True):
        pass
    publish(tmp_path / "data", "first")
    with logcore.open_dir(tmp_path / "data") as directory:
        assert directory.partitions("t") == (0, 1)
    assert values(tmp_path / "data", 1) == rows("first", 1)


def test_a_version_is_applied_once(data: Path) -> None:
    for txid, version in (("first", 3), ("again", 3), ("older", 2), ("newer", 4)):
        publish(data, txid, version=version)
        with logcore.open_dir(data):
            pass
        assert staged(data) == ["app.state"]
    publish(data, "other", app="another app/with @ odd .. characters", version=0)
    with logcore.open_dir(data):
        pass
    assert values(data, 1) == [
        b"before",
        *rows("first", 1),
        *rows("newer", 1),
        *rows("other", 1),
    ]


def test_concurrent_publishers_of_a_version_do_not_share_a_file(
    data: Path,
) -> None:
    """A successor replaced one driver, which was only suspended in its publish(). Both
    drivers publish the same rows under the same name.
    """

    class Late(OsFS):
        is_waiting = True

        def rename(self, source: str, target: str) -> None:
            if self.is_waiting and target.endswith(".json"):
                self.is_waiting = False
                publish(data, "successor", count=10)
            super().rename(source, target)

    fs = Late()
    late = Staging(fs, str(data))
    late.publish(manifest(stage(data, "late", count=20), "late"))
    assert (
        read_manifest(
            OS, str(data.parent / "data.staging"), manifest_name("app", 0, ".json")
        ).txid
        == "late"
    )
    with logcore.open_dir(data):
        assert late.outcome("app", 0) == "done"
    assert values(data, 0) == [b"before", *rows("late", 0, 20)]


def test_staged_segments_are_valid_on_their_own(data: Path) -> None:
    files = stage(data, "first", count=500, config=SMALL)
    assert len({file.name for file in files}) == len(files) > len(PARTITIONS) * 2, (
        "the tasks roll their segments"
    )
    for file in files:
        raw = Path(staging_path(str(data)), file.name + ".log").read_bytes()
        batches = list(logcore.recordbatch.read_batches(raw))
        assert [batch.base_offset for batch in batches] == [
            sum(batch.record_count for batch in batches[:number])
            for number in range(len(batches))
        ]
        assert (
            sum(batch.record_count for batch in batches),
            len(raw),
            len(batches),
        ) == (
            file.count,
            file.size_bytes,
            file.batches,
        )
        for batch in batches:
            batch.verify()


def test_offsets_can_be_found_by_the_moved_indexes(tmp_path: Path) -> None:
    path = create(tmp_path / "data", SMALL)
    publish(path, "first", count=2000, config=SMALL)
    with logcore.open_dir(path):
        pass
    with logcore.open(path / "t-0", read_only=True) as log:
        for offset in range(1, 2001, 97):
            assert log.get(offset).value == b"first-0-%d" % (offset - 1)


def test_withdrawn_write_has_no_effect(data: Path) -> None:
    staging = publish(data, "first")
    assert not staging.withdraw("app", 0, "another job's"), (
        "another job has the same name"
    )
    assert staging.withdraw("app", 0, "first")
    assert not staging.withdraw("app", 0, "first")
    assert staging.outcome("app", 0) == "unknown"
    staging.abort("app", 0, "first")
    with logcore.open_dir(data):
        pass
    assert values(data, 0) == [b"before"]
    assert staged(data) == []


def test_abort_keeps_published_writes(data: Path) -> None:
    staging = publish(data, "first")
    staging.abort("app", 0, "first")
    with logcore.open_dir(data):
        pass
    staging.abort("app", 0, "first")
    assert values(data, 0) == [b"before", *rows("first", 0)]


def test_late_task_of_an_aborted_write_is_refused(data: Path) -> None:
    staging = Staging(OS, str(data))
    staging.begin("first")
    staging.abort("app", 0, "first")
    writer = StagedWriter(OS, str(data), "first", "t", 0, "0.1", LogConfig())
    with pytest.raises(LogNotFoundError, match="aborted"):
        writer.append_columns(InputColumns(None, column([b"x"]), None, 1))


def test_unread_refusal_does_not_prevent_an_abort(
    data: Path,
) -> None:
    """The driver that published the write has died. The next driver aborts it before it
    reads the refusal.
    """
    staging = Staging(OS, str(data))
    files = stage(data, "first")
    Path(staging.path, files[-1].name + ".log").unlink()
    staging.publish(manifest(files, "first"))
    with logcore.open_dir(data):
        pass
    staging.abort("app", 0, "first")
    assert "first" not in staged(data)
    with pytest.raises(CorruptLogError, match="refused"):
        staging.outcome("app", 0)
    assert staging.outcome("app", 0) == "unknown"


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_files_are_refused_and_leave_nothing(data: Path, damage: str) -> None:
    staging = Staging(OS, str(data))
    files = stage(data, "first")
    victim = Path(staging.path, files[-1].name + ".log")
    raw = bytearray(victim.read_bytes())
    if damage == "gone":
        victim.unlink()
    else:
        raw[-1] ^= damage == "flip"
        victim.write_bytes(raw[: -1 if damage == "cut" else None])
    staging.publish(manifest(files, "first"))
    with logcore.open_dir(data):
        pass  # opening the directory succeeds despite the damage
    with pytest.raises(CorruptLogError, match="refused"):
        staging.outcome("app", 0)
    staging.abort("app", 0, "first")
    assert values(data, 0) == values(data, 1) == [b"before"]
    assert staged(data) == []


def test_recreated_topic_with_fewer_partitions_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True):
        pass
    staging = publish(path, "first")
    with logcore.open_dir(path) as directory:
        directory.delete_topic("t")
        directory.create_topic("t", 1)
        staging = publish(path, "second", version=1)
        with pytest.raises(InvalidConfigError, match="no partition 1"):
            apply_ready(OS, directory)
    with pytest.raises(CorruptLogError, match="refused"):
        staging.outcome("app", 1)


def test_write_stays_pending_while_a_log_is_failed(data: Path) -> None:
    with logcore.open_dir(data) as directory:
        log = directory.partition("t", 1)
        log.host.writer.commit.poison(OSError("as after a failed sync"))
        staging = publish(data, "first")
        with pytest.raises(LogFailedError):
            apply_ready(OS, directory)
        directory.tick()
        assert staging.outcome("app", 0) == "pending"
        directory.partition("t", 0).append(b"meanwhile")
    with logcore.open_dir(data):
        assert staging.outcome("app", 0) == "done"
    assert values(data, 0) == [b"before", b"meanwhile", *rows("first", 0)]


def test_only_garbage_is_removed_after_a_day(data: Path) -> None:
    root = Path(staging_path(str(data)))
    old = root.parent / "old"
    old.touch()
    stage(data, "left")
    stage(data, "running")
    for txid in ("left", "running"):
        for path in (*(root / txid).iterdir(), root / txid):
            os.utime(path, (1, 1))
    os.utime(next((root / "running").iterdir()))  # a task of this job has just written
    os.utime(root / "running", (1, 1))
    publish(data, "first")
    marks = checkpoint.unpack_checked((root / "logcore.garbage").read_bytes())
    assert marks is not None and list(marks) == ["left"] and (root / "left").is_dir()
    (root / "logcore.garbage").write_bytes(
        checkpoint.pack_checked({"left": marks["left"] - publishing.GARBAGE_MS - 1})
    )
    publish(data, "second", version=1)
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == [
        "first",
        "running",
        "second",
    ]


@pytest.mark.parametrize("first", ["publisher", "another"])
def test_clock_jump_deletes_no_staged_file(data: Path, first: str) -> None:
    """After the jump of the clock, the publisher's own files and the files of running
    jobs seemed older than a day, and publish() removed them.
    """
    days = [0]

    class Clock(OsFS):
        def modified_ms(self, path: str) -> int:
            return super().modified_ms(path) - days[0] * publishing.GARBAGE_MS

    fs = Clock()
    mine = stage(data, "mine", fs=fs)
    others = stage(data, "others", fs=fs)
    days[0] = 2  # the clock has jumped ahead by this number of days
    for version, (txid, files) in enumerate(
        [("mine", mine), ("others", others)][:: 1 if first == "publisher" else -1]
    ):
        Staging(fs, str(data)).publish(manifest(files, txid, version=version))
    with logcore.open_dir(data):
        assert {
            Staging(OS, str(data)).outcome("app", version) for version in (0, 1)
        } == {"done"}
    assert sorted(values(data, 0)) == sorted(
        [b"before", *rows("mine", 0), *rows("others", 0)]
    )


@pytest.mark.long
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ready", [True, False], ids=["ready", "assigned"])
def test_manifest_with_a_corrupted_digit_is_never_applied(
    tmp_path: Path, ready: bool, step: int
) -> None:
    """A single wrong digit caused other records to be stored, or a partition to remain
    closed. For each wrong digit, the write must be stored completely or not at all.
    """
    path = create(tmp_path / "whole" / "data")
    publish(path, "first", count=3, tasks=1)
    root = Path(staging_path(str(path)))
    name = manifest_name("app", 0, ".json")
    if not ready:
        read = read_manifest(OS, str(root), name)
        assert read is not None
        places = {
            key: StagedTarget(base=1, leader_epoch=0) for key in read.partitions()
        }
        (root / name).unlink()
        name = manifest_name("app", 0, ".assigned")
        (root / name).write_bytes(attrs.evolve(read, places=places).pack())
    content = (root / name).read_bytes()
    digits = [at for at, byte in enumerate(content) if chr(byte).isdigit()]
    assert len(digits) > 20
    for at in digits[::step]:
        there = tmp_path / f"{at}"
        shutil.copytree(tmp_path / "whole", there)
        rotten = bytearray(content)
        rotten[at] = ord("0") + (rotten[at] - ord("0") + 1) % 10
        (there / "data.staging" / name).write_bytes(rotten)
        for _ in range(2):
            with logcore.open_dir(there / "data") as directory:
                directory.partition("t", 0).append(b"after")
        staged_rows = [] if ready else rows("first", 0, 3)
        assert values(there / "data", 0) == [
            b"before",
            *staged_rows,
            b"after",
            b"after",
        ], at
        shutil.rmtree(there)


def test_manifest_restored_by_a_power_cut_is_not_applied_again(
    data: Path,
) -> None:
    """The removal of the manifest was not on disk, but the state that records the end
    of the write was.
    """
    publish(data, "first", count=3)
    path = Path(staging_path(str(data)))
    name = manifest_name("app", 0, ".json")
    left = {
        entry.relative_to(path): entry.read_bytes()
        for entry in path.rglob("*")
        if entry.is_file()
    }
    assert Path(name) in left
    logcore.open_dir(data).close()
    assert name not in staged(data)
    for entry, content in left.items():
        (path / entry).parent.mkdir(exist_ok=True)
        (path / entry).write_bytes(content)
    logcore.open_dir(data).close()
    assert values(data, 0) == [b"before", *rows("first", 0, 3)]
    assert name not in staged(data)


def test_damaged_assigned_manifest_is_an_error_and_logs_remain_writable(
    data: Path,
) -> None:
    staging = publish(data, "first")
    root = Path(staging.path)
    (root / manifest_name("app", 0, ".json")).unlink()
    (root / manifest_name("app", 0, ".assigned")).write_bytes(b"\0" * 100)
    for _ in range(2):
        with logcore.open_dir(data) as directory:
            directory.partition("t", 0).append(b"after")
    assert values(data, 0) == [b"before", b"after", b"after"]
    again = manifest(stage(data, "again"), "again")
    for ask in (lambda: staging.outcome("app", 0), lambda: staging.publish(again)):
        with pytest.raises(
            CorruptLogError, match="damaged when offsets had been given out"
        ) as caught:
            ask()
    staging.abort("app", 0, "first")
    assert (root / "first").is_dir(), "the named directory was removed"
    assert caught.value.path is not None
    os.unlink(caught.value.path)
    staging.publish(again)
    with logcore.open_dir(data):
        assert staging.outcome("app", 0) == "done"


def test_missing_staged_files_close_only_their_partitions(
    data: Path,
) -> None:
    """A directory could not be opened after its staged files were removed."""
    staging = publish(data, "first", carries=True)
    root = Path(staging.path)
    ready = root / manifest_name("app", 0, ".json")
    read = read_manifest(OS, str(root), ready.name)
    assert read is not None
    size = (data / "t-0" / f"{0:020d}.log").stat().st_size
    places = {
        key: StagedTarget(base=1, leader_epoch=0, segment=0, position=size)
        for key in read.partitions()
    }
    (root / manifest_name("app", 0, ".assigned")).write_bytes(
        attrs.evolve(read, places=places).pack()
    )
    ready.unlink()
    shutil.rmtree(root / "first")
    with logcore.open_dir(data) as directory:
        directory.create_topic("other")
        with pytest.raises(
            CorruptLogError,
            match=r"missing \(to abandon the rest of this write, remove .*assigned",
        ):
            directory.partition("t", 0)


@pytest.mark.long
@pytest.mark.parametrize("at", range(0, 60, 3))
def test_corrupted_state_is_repaired(data: Path, at: int) -> None:
    """A corrupted byte raised the version in the state. All writes up to that version
    were then skipped as done.
    """
    publish(data, "first", version=3)
    with logcore.open_dir(data):
        pass
    path = Path(staging_path(str(data)), "app.state")
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert read_state(OS, str(path.parent), "app") == {
        "app_id": "app",
        "version": 3,
        "txid": "first",
        "ranges": {"t": {"0": [1, 31], "1": [1, 31]}},
        "query": None,
    }
    path.write_bytes(content[: len(content) // 2 - 1])
    with pytest.raises(CorruptLogError, match="its completed versions are unknown"):
        read_state(OS, str(path.parent), "app")


def test_files_in_the_staging_directory_are_checked(data: Path) -> None:
    root = Path(staging_path(str(data)))
    root.mkdir()
    (root / "app@1.json").write_text('{"format": 1}')
    (root / "app@2.json").write_bytes(b"\xff\0")
    with logcore.open_dir(data) as directory:
        apply_ready(OS, directory)
    assert sorted(os.listdir(root)) == ["app@1.refused", "app@2.refused"]
    assert "is damaged" in (root / "app@1.refused").read_text()
    for text in ('{"format": 1, "files": [{"name": "../../etc/passwd"}]}', "[]", "{"):
        for content in (
            text.encode(),
            b"%08x %s\n" % (zlib.crc32(text.encode()), text.encode()),
        ):
            with pytest.raises(CorruptLogError):
                Manifest.unpack(content, "x")


FILE = {
    "topic": "t",
    "partition": 0,
    "name": "tx/a",
    "count": 1,
    "size_bytes": 1,
    "batches": 1,
    "max_timestamp": 1,
    "crc": 1,
}
PLACE = {
    "topic": "t",
    "partition": 0,
    "base": 1,
    "leader_epoch": 0,
    "segment": None,
    "position": None,
}


@pytest.mark.parametrize(
    ("suffix", "wrong"),
    [
        (".assigned", {}),  # a claimed write has a target
        (".assigned", {"places": []}),
        (".assigned", {"places": [{**PLACE, "partition": 1}]}),
        (".assigned", {"places": [{**PLACE, "base": "1"}]}),
        (".json", {"files": [{**FILE, "count": 1.5}]}),
        (".json", {"files": [{**FILE, "crc": None}]}),
        (".json", {"files": [{**FILE, "partition": float("inf")}]}),
        (".json", {"app_id": "\ud800"}),
        (".json", {"version": "1"}),
        (".json", {"topics": []}),
        (".json", {"topics": {"t": "2"}}),
        (".json", {"files": [{**FILE, "name": "../a"}]}),
        (".assigned", {"places": [{**PLACE, "base": -1}]}),
        (".assigned", {"places": [{**PLACE, "base": 1 << 63}]}),
        (".assigned", {"places": [{**PLACE, "leader_epoch": 1 << 31}]}),
    ],
)
def test_manifest_requires_all_fields_with_their_types(
    suffix: str, wrong: dict[str, Any]
) -> None:
    right = {
        "format": 3,
        "app_id": "a",
        "version": 1,
        "txid": "tx",
        "files": [FILE],
        "topics": {},
        "places": None,
    }
    placed = {**right, "places": [PLACE]}
    pack = checkpoint.pack_checked
    assert Manifest.unpack(pack(placed), "a@1.assigned").ranges() == {
        "t": {"0": [1, 2]}
    }
    assert Manifest.unpack(pack(right), "a@1.json").places is None
    with pytest.raises(CorruptLogError, match="not a manifest"):
        Manifest.unpack(pack({**right, **wrong}), "a@1" + suffix)


def test_concurrent_ticks_apply_a_write_once(data: Path) -> None:
    with logcore.open_dir(data) as directory:
        for number in range(5):
            publish(data, f"tx{number}", version=number, count=5)
        threads = [
            threading.Thread(target=lambda: [directory.tick() for _ in range(10)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = [
        b"before",
        *(value for number in range(5) for value in rows(f"tx{number}", 0, 5)),
    ]
    assert values(data, 0) == expected


# -- failures --------------------------------------------------------------------------


def test_partial_failure_stops_the_logs_until_they_are_reopened(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no state today")

    with logcore.open_dir(data) as directory:
        log = directory.partition("t", 0)
        publish(data, "first")
        with monkeypatch.context() as patch:
            patch.setattr(applying, "write_state", fail)
            with pytest.raises(OSError, match="no state"):
                apply_ready(OS, directory)
        with pytest.raises(LogFailedError):
            log.append(b"would take an offset that is given out")
        log.close()
        again = directory.partition("t", 0)
        assert again.append(b"after").offset == 31
    assert values(data, 0) == [b"before", *rows("first", 0), b"after"]
    assert values(data, 1) == [b"before", *rows("first", 1)]


def test_later_version_waits_for_a_failed_earlier_version(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the state of the later write records that the earlier write is done,
    and the rows of the earlier write are lost.
    """
    with logcore.open_dir(data) as directory:
        publish(data, "one", version=1)
        publish(data, "two", version=2)
        real = applying._apply

        def fail_first(fs: FS, target: Any, path: str, what: Manifest) -> int:
            if what.version == 1:
                raise LogFailedError("poisoned")
            return real(fs, target, path, what)

        with monkeypatch.context() as patch:
            patch.setattr(applying, "_apply", fail_first)
            with pytest.raises(LogFailedError):
                apply_ready(OS, directory)
        assert Staging(OS, str(data)).outcome("app", 2) == "pending"
        assert apply_ready(OS, directory) == 2
    assert values(data, 0) == [b"before", *rows("one", 0), *rows("two", 0)]


def test_replaced_manifest_is_not_claimed(data: Path) -> None:
    with logcore.open_dir(data) as directory:
        staging = publish(data, "first")
        stale = manifest(stage(data, "first-again"), "first")
        assert staging.withdraw("app", 0, "first")
        staging.abort_files("first")
        publish(data, "second")
        claimed = applying._claim(OS, staging_path(str(data)), stale)
        assert not claimed and staging.outcome("app", 0) == "pending"
        assert apply_ready(OS, directory) == 1
    assert values(data, 1) == [b"before", *rows("second", 1)]


def test_state_is_kept_while_its_manifest_exists(data: Path) -> None:
    publish(data, "first", app="first")
    with logcore.open_dir(data):
        pass
    staging = Staging(OS, str(data))
    left = Path(staging_path(str(data))) / (manifest_name("first", 0, ".assigned"))
    left.write_bytes(b"{}")
    staging.forget("first")
    assert read_state(OS, str(left.parent), "first") is not None
    left.unlink()
    staging.forget("first")
    assert read_state(OS, str(left.parent), "first") is None


def test_offsets_are_written_around_the_lengths(tmp_path: Path) -> None:
    """A crash may replace overwritten bytes with zeros. A batch header whose length was
    lost would hide all batches after it.
    """

    class Recorder(OsFS):
        def pwrite(self, handle: int, data: Any, position: int) -> None:
            name = self.path_of(handle)
            if name.startswith(staging_path(str(path))) and name.endswith(".log"):
                written.append((position, len(data)))
            super().pwrite(handle, data, position)

    path = create(tmp_path / "data", SMALL)
    written = list[tuple[int, int]]()
    publish(path, "one", config=SMALL, count=300)
    with logcore.open_dir(path, fs=Recorder()) as directory:
        assert (
            len(values(path, 0)) == 301
            and directory.partition("t", 0).log_end_offset == 301
        )
    assert len(written) > 20 and {size for _, size in written} <= {8, 4}


def test_links_in_the_staging_directory_are_not_followed(
    data: Path, tmp_path: Path
) -> None:
    """The files to which such links pointed were deleted as garbage."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    publish(data, "first")
    root = Path(staging_path(str(data)))
    (root / "old").symlink_to(victim)
    for path in (victim / "precious", victim):
        os.utime(path, (1, 1))
    os.utime(root / "old", (1, 1), follow_symlinks=False)
    (root / "logcore.garbage").write_bytes(checkpoint.pack_checked({"old": 1}))
    publish(data, "second", version=1)
    assert not (root / "old").is_symlink(), "the link itself is deleted"
    (root / "third").symlink_to(victim)
    with pytest.raises(CorruptLogError, match="not followed"):
        Staging(OS, str(data)).begin("third")
    Staging(OS, str(data)).abort_files("third")
    assert os.listdir(victim) == ["precious"]
    shutil.move(root, tmp_path / "elsewhere")
    root.symlink_to(tmp_path / "elsewhere")
    for call in (lambda: logcore.open_dir(data), lambda: publish(data, "fourth")):
        with pytest.raises(CorruptLogError, match="not followed"):
            call()
