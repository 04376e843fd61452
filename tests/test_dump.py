"""dump() against what the vectors' README says they hold; verify() against directories that are damaged on purpose.

The oracle is the README of the vectors, which Kafka's own classes wrote, and the recovery of the log itself: what
verify() calls torn, opening must cut; what it calls damaged, opening must refuse or lose data over.
"""

import json
import shutil
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import logcore
from logcore.dump import (
    DIRECTORY_FILES,
    LIFE_SUFFIXES,
    PARTITION_FILES,
    SEGMENT_SUFFIXES,
    Verdict,
    describe,
    dump,
    kind_of,
    partitions,
    shown,
    unshown,
    verify,
)

VECTORS = Path(__file__).parent / "data" / "vectors"
CLEAN = VECTORS / "partition-clean" / "orders-0"
CRASH = VECTORS / "partition-crash" / "orders-0"
T0 = 1700000000000
FIRST, SECOND = "00000000000000000000", "00000000000000000016"
KINDS = [*(f"{SECOND}{suffix}" for suffix in SEGMENT_SUFFIXES), *DIRECTORY_FILES, *PARTITION_FILES]


def rows(path, **options):
    found = list(dump(path, **options))
    json.dumps(found)
    return found


def verdicts(path):
    return {Path(one.path).name: one for one in verify(path)}


@pytest.fixture
def crash(tmp_path):
    """A copy of a partition without checkpoints beside it."""
    return Path(shutil.copytree(CRASH, tmp_path / "orders-0"))


@pytest.fixture
def own(tmp_path):
    """A log of ours in three segments of two batches each, offsets 0..5, 6..11, 12..17; the recovery point is 18."""
    path = tmp_path / "mine-0"
    with logcore.open(path, create=True) as log:
        for number in range(6):
            log.append_many([(b"k", b"v%d" % number, (), T0 + number)] * 3)
            if number in (1, 3):
                log.roll()
    return path


# -- values and names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, None),
        (b"", ""),
        (b"plain", "plain"),
        ("Gruß\n\t".encode(), "Gruß\n\t"),
        (b"\x00\xff", {"hex": "00ff"}),
        (b"bell\x07", {"hex": "62656c6c07"}),
    ],
)
def test_bytes_are_text_where_they_print_and_hex_elsewhere(data, expected):
    assert shown(data) == expected


@given(st.none() | st.binary(max_size=50) | st.text(max_size=20).map(str.encode))
def test_what_is_shown_can_be_read_back(data):
    assert unshown(json.loads(json.dumps(shown(data)))) == data


def test_unshown_refuses_what_shown_does_not_make():
    for value in (5, {"hex": "0"}, {"hex": 1}, {"a": "00"}, []):
        with pytest.raises(ValueError):
            unshown(value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"{FIRST}.log", "log"),
        (f"{FIRST}.log.deleted", "log"),
        (f"{FIRST}.timeindex.cleaned", "timeindex"),
        (f"{FIRST}.txnindex.swap", "txnindex"),
        ("leader-epoch-checkpoint", "leader-epoch-checkpoint"),
        ("0.log", None),
        (".lock", None),
        ("orders-0", None),
    ],
)
def test_the_name_says_what_a_file_holds(name, kind):
    assert kind_of(name) == kind


def test_a_file_that_is_none_of_a_log_is_refused_by_name(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(logcore.InvalidNameError):
        dump(tmp_path / "notes.txt")
    with pytest.raises(logcore.InvalidNameError):
        verify(tmp_path / "notes.txt")
    with pytest.raises(logcore.LogNotFoundError):
        dump(tmp_path / f"{FIRST}.log")
    with pytest.raises(logcore.LogNotFoundError):
        verify(tmp_path / "nowhere")


# -- dump ------------------------------------------------------------------------------------------------------------


def test_dump_gives_the_batches_the_readme_lists():
    found = rows(CLEAN / f"{FIRST}.log")
    assert [(one["base_offset"], one["last_offset"], one["codec"]) for one in found] == [
        (0, 1, "none"),
        (2, 3, "none"),
        (4, 5, "none"),
        (6, 7, "none"),
        (8, 8, "none"),
        (9, 9, "gzip"),
        (10, 10, "none"),
        (11, 11, "none"),
        (12, 15, "gzip"),
    ]
    assert [one["position"] for one in found] == [0, 92, 211, 330, 449, 526, 627, 705, 783]
    assert found[3]["producer_id"] == 4000 and found[3]["producer_epoch"] == 7
    assert (found[3]["base_sequence"], found[3]["last_sequence"]) == (4, 5)
    assert [one.get("control_type") for one in found[6:8]] == ["ABORT", "COMMIT"]
    assert all(one["crc_ok"] for one in found)


def test_dump_gives_records_of_every_codec():
    found = rows(CLEAN / f"{SECOND}.log", records=True)
    records = [one for one in found if one["type"] == "record"]
    assert [one["offset"] for one in records] == list(range(16, 29))
    assert [one["codec"] for one in found if one["type"] == "batch"] == ["snappy", "lz4", "zstd", "none"]
    control = [one for one in rows(CLEAN / f"{FIRST}.log", records=True) if one.get("coordinator_epoch")]
    assert [(one["control_type"], one["coordinator_epoch"]) for one in control] == [("ABORT", 11), ("COMMIT", 12)]


def test_dump_gives_the_first_record_as_written():
    record = rows(CLEAN / f"{FIRST}.log", records=True)[1]
    assert record == {
        "type": "record",
        "offset": 0,
        "timestamp_ms": T0,
        "key": "k1",
        "value": "hello",
        "headers": [{"key": "h", "value": "x"}],
    }


def test_dump_reads_the_indexes():
    entries = [(one["offset"], one["position"]) for one in rows(CLEAN / f"{FIRST}.index")]
    assert entries == [(5, 211), (7, 330), (8, 449), (10, 627), (15, 783)]
    assert rows(CLEAN / f"{FIRST}.timeindex")[0] == {"type": "timeindex_entry", "timestamp_ms": T0 + 12, "offset": 5}
    assert rows(CLEAN / f"{FIRST}.txnindex") == [
        {
            "type": "txnindex_entry",
            "version": 0,
            "producer_id": 5000,
            "first_offset": 8,
            "last_offset": 10,
            "last_stable_offset": 9,
        }
    ]


def test_dump_tells_padding_from_entries():
    found = rows(CRASH / f"{SECOND}.index")
    assert [one["type"] for one in found] == ["index_entry"] * 3 + ["padding"]
    assert found[-1]["size_bytes"] == 1200 - 24


def test_dump_reads_snapshots():
    found = {one["producer_id"]: one for one in rows(CLEAN / "00000000000000000029.snapshot")}
    assert sorted(found) == [4000, 5000, 6000, 7000]
    assert found[4000] == {
        "type": "producer",
        "producer_id": 4000,
        "producer_epoch": 7,
        "last_sequence": 5,
        "last_offset": 7,
        "offset_delta": 1,
        "timestamp_ms": T0 + 13,
        "coordinator_epoch": -1,
        "current_txn_first_offset": -1,
    }
    assert found[7000]["current_txn_first_offset"] == 28
    assert len(rows(CLEAN / f"{SECOND}.snapshot")) == 3


def test_dump_reads_checkpoints_and_small_files(own):
    root = CLEAN.parent
    assert rows(root / "recovery-point-offset-checkpoint") == [
        {"type": "checkpoint_entry", "topic": "orders", "partition": 0, "offset": 29}
    ]
    assert rows(root / "log-start-offset-checkpoint") == []
    epochs = rows(CLEAN / "leader-epoch-checkpoint")
    assert [(one["leader_epoch"], one["start_offset"]) for one in epochs] == [(3, 0), (4, 12)]
    assert rows(CLEAN / "partition.metadata")[0]["topic_id"] == "ASNFZ4mrze9-3LqYdlQyEA"
    assert rows(root / "meta.properties")[0]["properties"]["version"] == "1"
    assert rows(root / ".kafka_cleanshutdown") == [{"type": "clean_shutdown", "broker_epoch": 42}]
    assert rows(own / "logcore.policy") == [{"type": "policy", "durability": "group", "max_bytes": 1 << 20}]
    with logcore.open(own) as log:
        log.append(b"x")
        assert rows(own / "logcore.durable") == [{"type": "durable_end", "offset": 19}]


@pytest.mark.parametrize("life", LIFE_SUFFIXES)
def test_dump_reads_files_that_are_going_or_coming(life, tmp_path):
    for suffix in (".log", ".index", ".timeindex", ".txnindex"):
        copy = Path(shutil.copy(CLEAN / f"{FIRST}{suffix}", tmp_path / f"{FIRST}{suffix}{life}"))
        assert rows(copy) == rows(CLEAN / f"{FIRST}{suffix}")


def test_dump_goes_on_behind_a_batch_whose_crc_is_wrong(crash):
    path = crash / f"{FIRST}.log"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    found = rows(path, records=True)
    batches = [one for one in found if one["type"] == "batch"]
    assert [one["crc_ok"] for one in batches] == [True, False] + [True] * 7
    assert [one["offset"] for one in found if one["type"] == "record"] == [0, 1, *range(4, 16)]


def test_dump_says_where_a_file_ends_in_the_middle_of_a_batch(crash):
    path = crash / f"{FIRST}.log"
    path.write_bytes(path.read_bytes()[:800])
    assert rows(path)[-1] == {"type": "damage", "position": 783, "size_bytes": 17, "reason": "incomplete batch"}


# -- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["partition-clean", "partition-crash/orders-0", "partition-crash"])
def test_what_kafka_left_is_ok(name):
    found = list(verify(VECTORS / name))
    assert {one.status for one in found} == {"ok"}
    assert sum(one.batches for one in found) == 13
    assert sum(one.records for one in found) == 29


@pytest.mark.parametrize("name", ["partition-compact-before", "partition-compact-after"])
def test_compacted_partitions_are_ok(name):
    assert {one.status for one in verify(VECTORS / name / "compacted-0")} == {"ok"}


def test_what_we_write_is_ok(own):
    found = list(verify(own.parent))
    assert {one.status for one in found} == {"ok"}, found
    assert (sum(one.batches for one in found), sum(one.records for one in found)) == (6, 18)
    assert [one for one in verify(own) if one.kind == "log"] == [one for one in found if one.kind == "log"]


def test_one_file_is_judged_in_its_place(own):
    log = own / "00000000000000000006.log"
    assert [one.path for one in verify(log)] == [str(log)]
    log.write_bytes(log.read_bytes()[:-1])
    (verdict,) = verify(log)
    assert verdict.status == "damaged"


def test_a_torn_tail_is_a_warning_and_opening_cuts_just_that(crash):
    path = crash / f"{SECOND}.log"
    path.write_bytes(path.read_bytes()[:-5])
    verdict = verdicts(crash)[path.name]
    assert (verdict.status, verdict.records, verdict.offset) == ("warning", 12, 28)
    with logcore.open(crash) as log:
        assert log.log_end_offset == 28
        assert log.recovery_report.cut_position == verdict.position


def test_zeros_at_the_end_are_a_torn_tail(own):
    path = own / "00000000000000000012.log"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(100))
    verdict = verdicts(own)[path.name]
    assert (verdict.status, verdict.position) == ("warning", size)
    assert "100 zero bytes" in verdict.detail


def test_losing_what_was_on_disk_is_damage(own):
    """The same cut as in a torn tail, but the recovery point says that the bytes were on disk; so opening refuses."""
    path = own / "00000000000000000012.log"
    path.write_bytes(path.read_bytes()[:-5])
    verdict = verdicts(own)[path.name]
    assert (verdict.status, verdict.offset) == ("damaged", 15)
    with pytest.raises(logcore.CorruptLogError):
        logcore.open(own)
    path.write_bytes(b"")
    assert verdicts(own)[path.name].status == "damaged"


def test_damage_before_a_whole_batch_is_damage(crash):
    path = crash / f"{SECOND}.log"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    verdict = verdicts(crash)[path.name]
    assert (verdict.status, verdict.position, verdict.offset) == ("damaged", 0, 16)
    assert "the next whole batch is" in verdict.detail


def test_damage_in_a_sealed_segment_is_damage(crash):
    path = crash / f"{FIRST}.log"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    verdict = verdicts(crash)[path.name]
    assert (verdict.status, verdict.position, verdict.offset, verdict.records) == ("damaged", 783, 12, 12)
    path.write_bytes(whole[:783])  # a cut between two batches shows as a gap only
    verdict = verdicts(crash)[path.name]
    assert (verdict.status, verdict.offset) == ("warning", 12)


def test_segments_that_overlap_are_damage(crash):
    shutil.copy(crash / f"{FIRST}.log", crash / "00000000000000000014.log")
    (crash / f"{FIRST}.log").rename(crash / "00000000000000000001.log")
    found = verdicts(crash)
    assert found["00000000000000000001.log"].status == "damaged"  # offset 0 in a segment from 1 on
    assert "does not follow" in found["00000000000000000014.log"].detail


def test_offsets_that_run_into_the_next_segment_are_damage(own):
    middle, last = own / "00000000000000000006.log", own / "00000000000000000012.log"
    middle.write_bytes(middle.read_bytes() + last.read_bytes())
    verdict = verdicts(own)[middle.name]
    assert verdict.status == "damaged"
    assert "next segment" in verdict.detail


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([(5, 211), (4, 330)], "offset does not rise"),
        ([(5, 211), (7, 211)], "position does not rise"),
        ([(5, 212)], "no batch begins"),
        ([(4, 211)], "lies behind it"),
        ([(5, 5000)], "behind the end"),
        ([(-1, 211)], "below the segment"),
    ],
)
def test_an_index_that_misleads_is_a_warning(crash, entries, words):
    path = crash / f"{FIRST}.index"
    path.write_bytes(b"".join(struct.pack(">ii", *entry) for entry in entries))
    verdict = verdicts(crash)[path.name]
    assert verdict.status == "warning"
    assert words in verdict.detail


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([(T0 + 12, 5), (T0 + 12, 7)], "timestamp does not rise"),
        ([(T0 + 12, 7), (T0 + 13, 5)], "offset falls"),
        ([(T0 + 1, 10)], "an older record"),
        ([(T0 + 12, 5)], "retention"),
        ([(T0 + 10**6, 400)], "behind the end"),
        ([], "retention"),
    ],
)
def test_a_time_index_that_misleads_is_a_warning(crash, entries, words):
    path = crash / f"{FIRST}.timeindex"
    path.write_bytes(b"".join(struct.pack(">qi", *entry) for entry in entries))
    verdict = verdicts(crash)[path.name]
    assert verdict.status == "warning"
    assert words in verdict.detail


@pytest.mark.parametrize(
    "content", [b"\1" * 34, struct.pack(">hqqqq", 0, 1, 9, 8, 9), struct.pack(">hqqqq", 0, 1, 8, 90, 9)]
)
def test_a_txnindex_that_misleads_is_damage(crash, content):
    path = crash / f"{FIRST}.txnindex"
    path.write_bytes(content)
    assert verdicts(crash)[path.name].status == "damaged"


@pytest.mark.parametrize(
    ("name", "status"),
    [(name, "damaged") for name in ("leader-epoch-checkpoint", "partition.metadata", f"{SECOND}.snapshot")]
    + [(name, "warning") for name in ("logcore.policy", "logcore.durable")],
)
def test_small_files_that_cannot_be_understood(crash, name, status):
    (crash / name).write_bytes(b"0\n7\nnonsense")
    assert verdicts(crash)[name].status == status


def test_a_checkpoint_that_cannot_be_understood_is_damage(tmp_path):
    root = Path(shutil.copytree(CLEAN.parent, tmp_path / "data"))
    (root / "recovery-point-offset-checkpoint").write_text("0\n2\norders 0 29\n")
    assert verdicts(root)["recovery-point-offset-checkpoint"].status == "damaged"


def test_a_batch_missing_in_the_middle_is_found(own):
    """Cut out whole, it leaves no bad CRC: only the offsets tell, and only of our own logs, which have no gaps."""
    (own.parent / "recovery-point-offset-checkpoint").unlink()
    path = own / "00000000000000000012.log"
    with logcore.open(own, durability="os") as log:
        log.append_many([(b"k", b"v", (), T0 + 5)] * 3)
    (own.parent / "recovery-point-offset-checkpoint").unlink()
    with logcore.open(own, read_only=True) as log:
        first, second, third = (batch.size_bytes for batch in log.batches(12))
    whole = path.read_bytes()
    assert first + second + third == len(whole)
    path.write_bytes(whole[:first] + whole[first + second :])
    verdict = verdicts(own)[path.name]
    assert (verdict.status, verdict.position, verdict.offset) == ("damaged", first, 15)
    (own / "logcore.policy").unlink()
    assert verdicts(own)[path.name].status == "ok"


def test_what_a_failed_roll_leaves_is_a_warning(own):
    (own / "00000000000000000015.log").write_bytes(b"")
    found = verdicts(own)
    assert found["00000000000000000015.log"].status == "warning"
    assert found["00000000000000000012.log"].status == "ok"
    with logcore.open(own) as log:
        assert log.log_end_offset == 18
    assert not (own / "00000000000000000015.log").exists()


def test_leftovers_are_named(crash):
    for name in (f"{FIRST}.log.deleted", f"{FIRST}.index.cleaned", f"{FIRST}.log.swap", "00000000000000000099.index"):
        (crash / name).write_bytes(b"anything")
    found = verdicts(crash)
    assert found[f"{FIRST}.log.deleted"].status == "ok"
    assert found[f"{FIRST}.index.cleaned"].status == "ok"
    assert found[f"{FIRST}.log.swap"].status == "warning"
    assert found["00000000000000000099.index"].status == "warning"


def test_a_running_writer_is_not_disturbed(own):
    with logcore.open(own) as log:
        log.append(b"more")
        assert {one.status for one in verify(own.parent)} == {"ok"}
        log.append(b"and more")


def test_old_formats_are_counted(tmp_path):
    path = tmp_path / "old-0"
    path.mkdir()
    wrapper = (VECTORS / "records" / "v1-gzip-wrapper-20.kafka-java.bin").read_bytes()
    (path / f"{FIRST}.log").write_bytes(wrapper)
    (verdict,) = verify(path)
    assert (verdict.status, verdict.batches, verdict.records) == ("ok", 1, 20)
    assert len(rows(path / f"{FIRST}.log", records=True)) == 21


def test_an_old_entry_that_cannot_be_decoded_is_damage(tmp_path):
    """Its CRC may be right and the compressed bytes be nonsense all the same: here, behind a good one."""
    path = tmp_path / "old-0"
    path.mkdir()
    good = bytearray((VECTORS / "records" / "v1-gzip-wrapper-20.kafka-java.bin").read_bytes())
    bad = bytearray(good)
    struct.pack_into(">q", bad, 0, 2000)
    bad[34] ^= 0xFF  # where the gzip stream begins
    struct.pack_into(">I", bad, 12, zlib.crc32(bad[16:]))
    (path / f"{FIRST}.log").write_bytes(good + bad)
    (verdict,) = verify(path)
    assert (verdict.batches, verdict.records, verdict.offset) == (1, 20, 1020)
    assert (verdict.status, verdict.position) == ("damaged", len(good))


def test_what_is_no_file_is_a_verdict(crash):
    (crash / "00000000000000000040.log").mkdir()
    (crash / "00000000000000000040.snapshot").symlink_to(crash / f"{SECOND}.snapshot")
    found = verdicts(crash)
    assert found["00000000000000000040.log"].status == "damaged"
    assert found["00000000000000000040.snapshot"].status == "damaged"


def test_twenty_digits_that_are_no_offset_are_no_segment(crash):
    (crash / "99999999999999999999.log").write_bytes(b"x")
    (crash / "99999999999999999999.index").write_bytes(b"12345678")
    assert {one.status for one in verify(crash)} == {"ok"}


def test_describe_gives_a_partition_at_a_glance():
    facts = describe(CLEAN)
    assert (facts.topic, facts.partition, facts.segments, facts.size_bytes) == ("orders", 0, 2, 941 + 577)
    assert (facts.log_start_offset, facts.high_watermark) == (0, 29)
    assert facts.first_timestamp_ms == T0
    assert facts.codecs == {"none": 1, "snappy": 1, "lz4": 1, "zstd": 1}


def test_partitions_finds_them(tmp_path, own):
    assert partitions(CLEAN.parent) == [str(CLEAN)]
    assert partitions(own) == [str(own)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(logcore.LogNotFoundError):
        partitions(tmp_path / "empty")


# -- foreign bytes ---------------------------------------------------------------------------------------------------


def survive(path):
    """dump and verify give rows, verdicts and LogcoreErrors, whatever stands in the file."""
    try:
        json.dumps(list(dump(path, records=True)))
    except logcore.LogcoreError:
        pass
    for target in (path, path.parent):
        found = list(verify(target))
        assert found and all(isinstance(one, Verdict) for one in found)
        json.dumps([one.as_dict() for one in found])


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25)
@given(data=st.binary(max_size=200) | st.text("0123456789 \n:=[{", max_size=40).map(str.encode))
def test_any_bytes_in_any_file(tmp_path_factory, name, data):
    path = tmp_path_factory.mktemp("any") / "any-0" / name
    path.parent.mkdir()
    (path.parent / f"{SECOND}.log").write_bytes((CRASH / f"{SECOND}.log").read_bytes())
    path.write_bytes(data)
    survive(path)


@pytest.mark.parametrize("name", [one.name for one in sorted(CLEAN.iterdir()) if not one.name.startswith(FIRST)])
def test_every_cut_of_a_file(crash, name):
    whole = (CLEAN / name).read_bytes()
    for cut in range(0, len(whole), 1 + len(whole) // 80):
        (crash / name).write_bytes(whole[:cut])
        survive(crash / name)


@pytest.mark.parametrize("name", [one.name for one in sorted(CLEAN.iterdir()) if not one.name.startswith(FIRST)])
def test_every_byte_of_a_file_flipped(crash, name):
    whole = (CLEAN / name).read_bytes()
    for position in range(0, len(whole), 1 + len(whole) // 80):
        for mask in (0x80, 0x01):
            data = bytearray(whole)
            data[position] ^= mask
            (crash / name).write_bytes(data)
            survive(crash / name)


def test_every_bit_of_a_sealed_batch_is_guarded(crash):
    """Any flipped bit that the CRC or the walk covers is found: all but the leader epoch (12..15) of a lone batch."""
    path = crash / f"{FIRST}.log"
    whole = path.read_bytes()
    for position in range(92):
        data = bytearray(whole)
        data[position] ^= 0x10
        path.write_bytes(data)
        status = verdicts(crash)[path.name].status
        assert status == ("ok" if 12 <= position < 16 else "damaged"), position


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"durability": 5}', b'{"durability":"os","max_bytes":1e999}', b"null"]
)
def test_hostile_json_is_a_verdict(crash, content):
    (crash / "logcore.policy").write_bytes(content)
    survive(crash / "logcore.policy")
