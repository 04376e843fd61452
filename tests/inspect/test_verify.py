"""verify() of directories that are damaged on purpose.

The verdicts are compared with opening the log. Opening must truncate a log that
verify() reports as torn. If verify() reports damage, opening must refuse the log or lose
data.
"""

import itertools
import json
import os
import shutil
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import logcore
from logcore.fs import OsFS
from logcore.inspect.catalog import kind_of
from logcore.inspect.dump import dump
from logcore.inspect.verify import Verdict, verify
from logcore.metadata.checkpoint import DIRECTORY_FILES, PARTITION_FILES
from logcore.metadata.filenames import SUFFIXES
from logcore.recordbatch import encode
from logcore.testing import Fault, FaultPlan, SimulatedCrash, SimulatedDisk
from support.vectors import VECTORS

CLEAN = VECTORS / "partition-clean" / "orders-0"
CRASH = VECTORS / "partition-crash" / "orders-0"
T0 = 1700000000000
FIRST = "00000000000000000000"
SECOND = "00000000000000000016"
KINDS = [
    *(f"{SECOND}{suffix}" for suffix in SUFFIXES),
    *DIRECTORY_FILES,
    *PARTITION_FILES,
]


def verdicts(path):
    return {Path(verdict.path).name: verdict for verdict in verify(path)}


@pytest.mark.parametrize(
    "name", ["partition-clean", "partition-crash/orders-0", "partition-crash"]
)
def test_files_of_kafka_are_ok(name):
    found = list(verify(VECTORS / name))
    assert {verdict.status for verdict in found} == {"ok"}
    assert sum(verdict.batches for verdict in found) == 13
    assert sum(verdict.records for verdict in found) == 29


@pytest.mark.parametrize(
    "name", ["partition-compact-before", "partition-compact-after"]
)
def test_compacted_partitions_are_ok(name):
    assert {verdict.status for verdict in verify(VECTORS / name / "compacted-0")} == {
        "ok"
    }


def test_files_of_logcore_are_ok(logcore_partition):
    found = list(verify(logcore_partition.parent))
    assert {verdict.status for verdict in found} == {"ok"}, found
    assert (
        sum(verdict.batches for verdict in found),
        sum(verdict.records for verdict in found),
    ) == (
        6,
        18,
    )
    assert [
        verdict for verdict in verify(logcore_partition) if verdict.kind == "log"
    ] == [verdict for verdict in found if verdict.kind == "log"]


def test_a_partition_without_segments_is_checked(logcore_partition):
    for path in logcore_partition.glob("*.*"):
        if path.name[0].isdigit():
            path.unlink()
    found = {verdict.kind: verdict for verdict in verify(logcore_partition)}
    assert found.keys() == {"logcore.policy", "leader-epoch-checkpoint", "log"}
    assert (
        found["log"].status == "damaged"
        and "offsets 0 to 17 are in no segment" in found["log"].detail
    )
    for read_only in (False, True):
        with pytest.raises(
            logcore.CorruptLogError, match="segments of this partition are missing"
        ):
            logcore.open(logcore_partition, read_only=read_only)
    (logcore_partition.parent / "recovery-point-offset-checkpoint").unlink()
    assert "log" not in {verdict.kind for verdict in verify(logcore_partition)}, (
        "the missing file cannot be detected"
    )
    (logcore_partition / f"{FIRST}.timeindex").write_bytes(b"")
    assert {
        verdict.kind
        for verdict in verify(logcore_partition)
        if verdict.status == "damaged"
    } == {"log"}


def test_missing_directory_of_a_partition_has_a_verdict(logcore_partition):
    away = logcore_partition.with_name(f"{logcore_partition.name}.0f-delete")
    logcore_partition.rename(away)
    assert {verdict.status for verdict in verify(logcore_partition.parent)} == {"ok"}, (
        "Kafka is deleting it"
    )
    shutil.rmtree(away)
    (found,) = (
        verdict
        for verdict in verify(logcore_partition.parent)
        if verdict.status != "ok"
    )
    assert (found.path, found.status) == (
        str(logcore_partition),
        "damaged",
    ) and "reached offset 18" in found.detail


@pytest.mark.long
def test_topic_being_created_is_not_reported_as_damaged():
    disk = SimulatedDisk()
    with logcore.open_dir(
        "d", create=True, fs=disk, config={"segment.bytes": 300}
    ) as directory:
        directory.create_topic("t")
        for number in range(6):
            directory.partition("t", 0).append(b"%d" % number * 100)
    files = disk.files()
    seen = set()
    for at in itertools.count(1, 3):
        disk = SimulatedDisk(files, faults=FaultPlan(Fault("*", "crash", at=at)))
        try:
            with logcore.open_dir("d", fs=disk) as directory:
                directory.fork("t", None, "u")
        except SimulatedCrash:
            pass
        if not disk.faults.hits:
            break
        for left in disk.after_crash(limit=6):
            found = list(verify("d", fs=left))
            assert "damaged" not in {verdict.status for verdict in found}, found
            seen |= {
                verdict.detail for verdict in found if verdict.path.endswith("/u-0")
            }
    assert any("being created" in detail for detail in seen)


def test_checksum_file_has_its_own_verdict(logcore_partition):
    seal, log = (
        logcore_partition / f"{0:020d}{suffix}" for suffix in (".seal", ".log")
    )
    assert [
        (verdict.kind, verdict.status, verdict.detail) for verdict in verify(seal)
    ] == [("seal", "ok", "")]
    data = log.read_bytes()
    times = log.stat()
    # Change the leader epoch, which no CRC covers.
    log.write_bytes(data[:15] + b"\1" + data[16:])
    assert (
        verdicts(logcore_partition)[seal.name].detail
        == "the segment was rewritten since it was sealed"
    )
    os.utime(log, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (
        verdicts(logcore_partition)[seal.name].status,
        verdicts(logcore_partition)[log.name].status,
    ) == (
        "damaged",
        "ok",
    )
    seal.write_bytes(b"torn")
    assert verdicts(logcore_partition)[seal.name].status == "warning"


def test_single_file_is_checked_with_its_partition(logcore_partition):
    log = logcore_partition / "00000000000000000006.log"
    assert [verdict.path for verdict in verify(log)] == [str(log)]
    log.write_bytes(log.read_bytes()[:-1])
    (verdict,) = verify(log)
    assert verdict.status == "damaged"


def test_torn_tail_is_a_warning_and_opening_truncates_only_that(kafka_partition):
    path = kafka_partition / f"{SECOND}.log"
    path.write_bytes(path.read_bytes()[:-5])
    verdict = verdicts(kafka_partition)[path.name]
    assert (verdict.status, verdict.records, verdict.offset) == ("warning", 12, 28)
    with logcore.open(kafka_partition) as log:
        assert log.log_end_offset == 28
        assert log.recovery_report.cut_position == verdict.position


def test_zeros_at_the_end_are_a_torn_tail(logcore_partition):
    path = logcore_partition / "00000000000000000012.log"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(100))
    verdict = verdicts(logcore_partition)[path.name]
    assert (verdict.status, verdict.position) == ("warning", size)
    assert "100 zero bytes" in verdict.detail


def test_loss_of_durable_records_is_damage(logcore_partition):
    """The log ends in a torn tail, but the recovery point shows that the bytes were
    durable. So opening the log is refused.
    """
    path = logcore_partition / "00000000000000000012.log"
    path.write_bytes(path.read_bytes()[:-5])
    verdict = verdicts(logcore_partition)[path.name]
    assert (verdict.status, verdict.offset) == ("damaged", 15)
    with pytest.raises(logcore.CorruptLogError):
        logcore.open(logcore_partition)
    path.write_bytes(b"")
    assert verdicts(logcore_partition)[path.name].status == "damaged"


def test_damage_before_a_whole_batch_is_damage(kafka_partition):
    path = kafka_partition / f"{SECOND}.log"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    verdict = verdicts(kafka_partition)[path.name]
    assert (verdict.status, verdict.position, verdict.offset) == ("damaged", 0, 16)
    assert "the next whole batch is" in verdict.detail


def test_damage_in_a_sealed_segment_is_damage(kafka_partition):
    path = kafka_partition / f"{FIRST}.log"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    verdict = verdicts(kafka_partition)[path.name]
    assert (verdict.status, verdict.position, verdict.offset, verdict.records) == (
        "damaged",
        783,
        12,
        12,
    )
    path.write_bytes(whole[:783])  # a cut between two batches shows as a gap only
    verdict = verdicts(kafka_partition)[path.name]
    assert (verdict.status, verdict.offset) == ("warning", 12)


@pytest.mark.parametrize(("gone", "path", "words"), [
    (0, 0, "offsets 0 to 5 are in no segment, and were not deleted"),
    (6, 0, "offsets 6 to 11 are in no segment: the log has no gaps there"),
])  # fmt: skip
def test_missing_segment_of_a_dense_log_is_damage(logcore_partition, gone, path, words):
    """The missing segment is also found without its checksum file, and reading reports
    it too. Deleted and compacted records are not a loss.
    """
    for name in logcore_partition.glob(f"{gone:020d}.*"):
        name.unlink()
    for seal in logcore_partition.glob("*.seal"):
        seal.unlink()
    verdict = verdicts(logcore_partition)[f"{path:020d}.log"]
    assert (verdict.status, verdict.detail) == ("damaged", words)
    start = logcore_partition.parent / "log-start-offset-checkpoint"
    start.write_text(f"0\n1\npayments 0 {gone + 6}\n")
    assert {verdict.status for verdict in verify(logcore_partition.parent)} == {"ok"}
    start.unlink()
    (logcore_partition.parent / "cleaner-offset-checkpoint").write_text(
        "0\n1\npayments 0 12\n"
    )
    assert (
        "damaged" in {verdict.status for verdict in verify(logcore_partition.parent)}
    ) == (gone == 0), "no compaction moves the start"
    (logcore_partition.parent / "cleaner-offset-checkpoint").unlink()
    alone = logcore_partition.rename(
        logcore_partition.parent / "payments-0.bak"
    )  # a name without checkpoints
    assert ("damaged" in {verdict.status for verdict in verify(alone)}) == (gone == 6)


def test_a_batch_missing_in_a_sealed_segment_of_a_dense_log_is_damage(
    logcore_partition,
):
    path = logcore_partition / f"{0:020d}.log"
    whole = path.read_bytes()
    (path.with_suffix(".seal")).unlink()
    path.write_bytes(whole[len(whole) // 2 :])
    assert "does not follow" in verdicts(logcore_partition)[path.name].detail


def test_torn_transaction_index_that_opening_repairs_is_a_warning(tmp_path):
    """The index of the active segment is rebuilt after a crash, and not after a clean
    close. The index of a sealed segment is never rebuilt.
    """
    with logcore.open(
        tmp_path / "t-0", create=True, config={"segment.ms": 10**12}
    ) as log:
        raw = encode(
            [(None, b"x")],
            transactional=True,
            producer_id=7,
            producer_epoch=0,
            base_sequence=0,
            now_ms=T0,
        )
        log.append_batch(raw)
        log.end_transaction(7, 0, commit=False)
    path = tmp_path / "t-0" / f"{FIRST}.txnindex"
    whole = path.read_bytes()
    path.write_bytes(whole + b"\1" * 34)
    assert verdicts(path.parent)[path.name].status == "damaged"
    (tmp_path / ".kafka_cleanshutdown").unlink()
    assert verdicts(path.parent)[path.name].status == "warning"
    with logcore.open(path.parent) as log:
        assert list(log.read(0, isolation="read_committed")) == []
        log.roll()
    assert path.read_bytes() == whole
    path.write_bytes(whole + b"\1" * 34)
    assert verdicts(path.parent)[path.name].status == "damaged"


class ChangingFS(OsFS):
    """A file system that calls `change` after the nth listing of a directory, or after
    the names of a segment were read.
    """

    def __init__(self, change, after):
        super().__init__()
        self.change = change
        self.left = after

    def listdir(self, path):
        names = super().listdir(path)
        self.left -= 1
        if self.left == 0:
            self.change()
        return names

    def file_size(self, path):
        self.left -= 1
        if self.left == 0:
            self.change()
        return super().file_size(path)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        "compaction",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("retention", "truncation")
        ),
    ],
)
def test_concurrent_changes_are_not_reported_as_damage(tmp_path, kind):
    config = {"segment.bytes": 400, "min.cleanable.dirty.ratio": 0}
    if kind == "compaction":
        config["cleanup.policy"] = "compact"
    for after in range(1, 30):
        path = tmp_path / str(after) / "t-0"
        with logcore.open(path, create=True, config=config) as log:
            for at in range(24):
                log.append(b"%d" % at * 30, key=b"k%d" % (at % 5))
                if at % 6 == 5:
                    log.roll()

            def change(log=log):
                if kind == "compaction":
                    log.reconfigure({**config, "segment.bytes": 4000})
                    logcore.clean(log, force=True)
                elif kind == "retention":
                    log.delete_records(20)
                else:
                    log.truncate(8)

            fs = ChangingFS(change, after)
            found = [
                verdict
                for verdict in verify(path.parent, fs=fs)
                if verdict.status != "ok"
            ]
            assert not found, (after, found)
            if fs.left > 0:
                break
    assert after > 3


@pytest.mark.long
@pytest.mark.parametrize("step", [18, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "config", [{}, {"cleanup.policy": "compact"}, {"retention.bytes": 900}]
)
def test_verify_reports_no_damage_after_normal_use_or_a_crash(config, step):
    """A crash at changes of the disk during normal use, for some of the disks that the
    crash may leave.
    """
    config = {
        "segment.bytes": 300,
        "min.cleanable.dirty.ratio": 0,
        "index.interval.bytes": 60,
        **config,
    }

    def live(disk):
        with logcore.open("/data/t-0", create=True, config=config, fs=disk) as log:
            for at in range(8):
                log.append(b"%d" % at * 40, key=b"k%d" % (at % 3))
                raw = encode([(b"k", b"x" * 9)], transactional=True, producer_id=at, producer_epoch=0, base_sequence=0,
                             now_ms=disk.now_ms())  # fmt: skip
                log.append_batch(raw)
                log.end_transaction(at, 0, commit=at % 2 == 0)
                if at == 5:
                    log.truncate(14)
            log.roll()
            logcore.clean(log, force=True) if log.config.is_compacted else log.retain()
            log.delete_records(9)

    for changes in itertools.count(3 * len(config), step):
        disk = SimulatedDisk()
        disk.crash_in(changes)
        try:
            live(disk)
        except SimulatedCrash:
            pass
        else:
            break
        for state in disk.crash_states(limit=3, seed=changes):
            left = state.disk()
            if left.is_directory("/data/t-0"):
                bad = [
                    verdict
                    for verdict in verify("/data", fs=left)
                    if verdict.status == "damaged"
                ]
                assert not bad, (changes, state.what, bad)
                logcore.open("/data/t-0", config=config, fs=left).close()
    assert changes > 100


def test_unfinished_copy_is_reported(logcore_partition):
    (logcore_partition.parent / "other-0.recovering").mkdir()
    [verdict] = [
        verdict
        for verdict in verify(logcore_partition.parent)
        if verdict.status != "ok"
    ]
    assert verdict.status == "damaged" and "did not finish" in verdict.detail


def test_segments_that_overlap_are_damage(kafka_partition):
    shutil.copy(
        kafka_partition / f"{FIRST}.log", kafka_partition / "00000000000000000014.log"
    )
    (kafka_partition / f"{FIRST}.log").rename(
        kafka_partition / "00000000000000000001.log"
    )
    found = verdicts(kafka_partition)
    # Offset 0 in a segment that begins at 1.
    assert found["00000000000000000001.log"].status == "damaged"
    assert "does not follow" in found["00000000000000000014.log"].detail


def test_offsets_of_the_next_segment_are_damage(logcore_partition):
    middle = logcore_partition / "00000000000000000006.log"
    last = logcore_partition / "00000000000000000012.log"
    middle.write_bytes(middle.read_bytes() + last.read_bytes())
    verdict = verdicts(logcore_partition)[middle.name]
    assert verdict.status == "damaged"
    assert "next segment" in verdict.detail


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([(5, 211), (4, 330)], "offset does not rise"),
        ([(5, 211), (7, 211)], "position does not rise"),
        ([(5, 212)], "no batch begins"),
        ([(4, 211)], "points to a batch above its offset"),
        ([(5, 5000)], "after the end"),
        ([(-1, 211)], "below the segment"),
    ],
)
def test_wrong_index_is_a_warning(kafka_partition, entries, words):
    path = kafka_partition / f"{FIRST}.index"
    path.write_bytes(b"".join(struct.pack(">ii", *entry) for entry in entries))
    verdict = verdicts(kafka_partition)[path.name]
    assert verdict.status == "warning"
    assert words in verdict.detail


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([(T0 + 12, 5), (T0 + 12, 7)], "timestamp does not rise"),
        ([(T0 + 12, 7), (T0 + 13, 5)], "offset falls"),
        ([(T0 + 1, 10)], "an older record"),
        ([(T0 + 12, 5)], "retention"),
        ([(T0 + 10**6, 400)], "after the end"),
        ([], "retention"),
    ],
)
def test_wrong_time_index_is_a_warning(kafka_partition, entries, words):
    path = kafka_partition / f"{FIRST}.timeindex"
    path.write_bytes(b"".join(struct.pack(">qi", *entry) for entry in entries))
    verdict = verdicts(kafka_partition)[path.name]
    assert verdict.status == "warning"
    assert words in verdict.detail


@pytest.mark.parametrize(
    "content",
    [
        b"\1" * 34,
        struct.pack(">hqqqq", 0, 1, 9, 8, 9),
        struct.pack(">hqqqq", 0, 1, 8, 90, 9),
    ],
)
def test_wrong_transaction_index_is_damage(kafka_partition, content):
    path = kafka_partition / f"{FIRST}.txnindex"
    path.write_bytes(content)
    assert verdicts(kafka_partition)[path.name].status == "damaged"


@pytest.mark.parametrize(
    ("name", "status"),
    [
        (name, "damaged")
        for name in (
            "leader-epoch-checkpoint",
            "partition.metadata",
            f"{SECOND}.snapshot",
        )
    ]
    + [(name, "warning") for name in ("logcore.policy", "logcore.durable")],
)
def test_undecodable_small_files_have_a_verdict(kafka_partition, name, status):
    (kafka_partition / name).write_bytes(b"0\n7\nnonsense")
    assert verdicts(kafka_partition)[name].status == status


def test_undecodable_checkpoint_is_damage(tmp_path):
    root = Path(shutil.copytree(CLEAN.parent, tmp_path / "data"))
    (root / "recovery-point-offset-checkpoint").write_text("0\n2\norders 0 29\n")
    assert verdicts(root)["recovery-point-offset-checkpoint"].status == "damaged"


def test_a_batch_missing_in_the_middle_is_found(logcore_partition):
    """If a complete batch is removed, no CRC is wrong. Only the offsets show the loss,
    and only in logs of logcore, which have no gaps.
    """
    (logcore_partition.parent / "recovery-point-offset-checkpoint").unlink()
    path = logcore_partition / "00000000000000000012.log"
    with logcore.open(logcore_partition, durability="os") as log:
        log.append_many([(b"k", b"v", (), T0 + 5)] * 3)
    (logcore_partition.parent / "recovery-point-offset-checkpoint").unlink()
    with logcore.open(logcore_partition, read_only=True) as log:
        first, second, third = (batch.size_bytes for batch in log.batches(12))
    whole = path.read_bytes()
    assert first + second + third == len(whole)
    path.write_bytes(whole[:first] + whole[first + second :])
    verdict = verdicts(logcore_partition)[path.name]
    assert (verdict.status, verdict.position, verdict.offset) == ("damaged", first, 15)
    (logcore_partition / "logcore.policy").unlink()
    assert verdicts(logcore_partition)[path.name].status == "ok"


def test_segment_overlapped_by_the_previous_one_is_damage(logcore_partition):
    (logcore_partition / "00000000000000000015.log").write_bytes(b"")
    assert verdicts(logcore_partition)["00000000000000000012.log"].status == "damaged"
    with pytest.raises(logcore.CorruptLogError):
        logcore.open(logcore_partition)


def test_leftover_files_are_reported(kafka_partition):
    for name in (
        f"{FIRST}.log.deleted",
        f"{FIRST}.index.cleaned",
        f"{FIRST}.log.swap",
        "00000000000000000099.index",
    ):
        (kafka_partition / name).write_bytes(b"anything")
    found = verdicts(kafka_partition)
    assert found[f"{FIRST}.log.deleted"].status == "ok"
    assert found[f"{FIRST}.index.cleaned"].status == "ok"
    assert found[f"{FIRST}.log.swap"].status == "warning"
    assert found["00000000000000000099.index"].status == "warning"


def test_verify_does_not_disturb_a_running_writer(logcore_partition):
    with logcore.open(logcore_partition) as log:
        log.append(b"more")
        assert {verdict.status for verdict in verify(logcore_partition.parent)} == {
            "ok"
        }
        log.append(b"and more")


def test_old_formats_are_counted(tmp_path):
    path = tmp_path / "old-0"
    path.mkdir()
    wrapper = (VECTORS / "records" / "v1-gzip-wrapper-20.kafka-java.bin").read_bytes()
    (path / f"{FIRST}.log").write_bytes(wrapper)
    (verdict,) = verify(path)
    assert (verdict.status, verdict.batches, verdict.records) == ("ok", 1, 20)
    assert len(list(dump(path / f"{FIRST}.log", records=True))) == 21


def test_an_old_entry_that_cannot_be_decoded_is_damage(tmp_path):
    """A batch may have the right CRC and malformed compressed bytes. Here it follows a
    valid batch.
    """
    path = tmp_path / "old-0"
    path.mkdir()
    good = bytearray(
        (VECTORS / "records" / "v1-gzip-wrapper-20.kafka-java.bin").read_bytes()
    )
    bad = bytearray(good)
    struct.pack_into(">q", bad, 0, 2000)
    bad[34] ^= 0xFF  # where the gzip stream begins
    struct.pack_into(">I", bad, 12, zlib.crc32(bad[16:]))
    (path / f"{FIRST}.log").write_bytes(good + bad)
    (verdict,) = verify(path)
    assert (verdict.batches, verdict.records, verdict.offset) == (1, 20, 1020)
    assert (verdict.status, verdict.position) == ("damaged", len(good))


def test_unreadable_path_has_a_verdict(kafka_partition):
    (kafka_partition / "00000000000000000040.log").mkdir()
    (kafka_partition / "00000000000000000040.snapshot").symlink_to(
        kafka_partition / f"{SECOND}.snapshot"
    )
    found = verdicts(kafka_partition)
    assert found["00000000000000000040.log"].status == "damaged"
    assert found["00000000000000000040.snapshot"].status == "damaged"


def test_name_above_the_largest_offset_is_not_a_segment(kafka_partition):
    """Kafka parses such a name as a long and refuses the whole directory. So verify()
    reports the file and checks the others.
    """
    for name in ("99999999999999999999.log", "09223372036854775808.index"):
        (kafka_partition / name).write_bytes(b"12345678")
        with pytest.raises(
            logcore.InvalidNameError, match="at most 9223372036854775807"
        ):
            dump(kafka_partition / name)
        [alone] = verify(kafka_partition / name)
        assert alone.status == "damaged" and "not an offset" in alone.detail
    assert {
        verdict.path for verdict in verify(kafka_partition) if verdict.status != "ok"
    } == {
        str(kafka_partition / "99999999999999999999.log"),
        str(kafka_partition / "09223372036854775808.index"),
    }
    assert (
        kind_of("09223372036854775807.log") == "log"
        and kind_of("09223372036854775808.log") is None
    )


# -- foreign bytes ---------------------------------------------------------------------


def check_only_expected_errors(path):
    """Check that dump() and verify() raise only LogcoreErrors for the content of a
    file.
    """
    try:
        json.dumps(list(dump(path, records=True)))
    except logcore.LogcoreError:
        pass
    for target in (path, path.parent):
        found = list(verify(target))
        assert found and all(isinstance(verdict, Verdict) for verdict in found)
        json.dumps([verdict.as_dict() for verdict in found])


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25)
@given(
    data=st.binary(max_size=200)
    | st.text("0123456789 \n:=[{", max_size=40).map(str.encode)
)
def test_any_content_of_a_file_is_handled(tmp_path_factory, name, data):
    path = tmp_path_factory.mktemp("any") / "any-0" / name
    path.parent.mkdir()
    (path.parent / f"{SECOND}.log").write_bytes((CRASH / f"{SECOND}.log").read_bytes())
    path.write_bytes(data)
    check_only_expected_errors(path)


@pytest.mark.long
@pytest.mark.parametrize("places", [25, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [path.name for path in sorted(CLEAN.iterdir()) if not path.name.startswith(FIRST)],
)
def test_every_cut_of_a_file(kafka_partition, name, places):
    whole = (CLEAN / name).read_bytes()
    for cut in range(0, len(whole), 1 + len(whole) // places):
        (kafka_partition / name).write_bytes(whole[:cut])
        check_only_expected_errors(kafka_partition / name)


@pytest.mark.long
@pytest.mark.parametrize("places", [25, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [path.name for path in sorted(CLEAN.iterdir()) if not path.name.startswith(FIRST)],
)
def test_every_byte_of_a_file_flipped(kafka_partition, name, places):
    whole = (CLEAN / name).read_bytes()
    for position in range(0, len(whole), 1 + len(whole) // places):
        for mask in (0x80, 0x01):
            data = bytearray(whole)
            data[position] ^= mask
            (kafka_partition / name).write_bytes(data)
            check_only_expected_errors(kafka_partition / name)


def test_every_flipped_bit_of_a_batch_is_found(kafka_partition):
    """The CRC and the checks cover all bytes of a batch except its leader epoch (12 to
    15).
    """
    path = kafka_partition / f"{FIRST}.log"
    whole = path.read_bytes()
    for position in range(92):
        data = bytearray(whole)
        data[position] ^= 0x10
        path.write_bytes(data)
        status = verdicts(kafka_partition)[path.name].status
        assert status == ("ok" if 12 <= position < 16 else "damaged"), position


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"durability": 5}',
        b'{"durability":"os","max_bytes":1e999}',
        b"null",
    ],
)
def test_hostile_json_is_a_verdict(kafka_partition, content):
    (kafka_partition / "logcore.policy").write_bytes(content)
    check_only_expected_errors(kafka_partition / "logcore.policy")
