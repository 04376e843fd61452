"""dump() of the vectors, compared with the contents that their README describes. Kafka's
own classes wrote the vectors.
"""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logcore
from logcore.inspect.catalog import kind_of, partitions
from logcore.inspect.dump import dump, shown
from logcore.inspect.verify import verify
from logcore.metadata.filenames import STATES
from logcore.summary import describe
from support.vectors import VECTORS

CLEAN = VECTORS / "partition-clean" / "orders-0"
CRASH = VECTORS / "partition-crash" / "orders-0"
T0 = 1700000000000
FIRST = "00000000000000000000"
SECOND = "00000000000000000016"


def rows(path, **options):
    found = list(dump(path, **options))
    json.dumps(found)
    return found


# -- values and names ------------------------------------------------------------------


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
def test_printable_bytes_are_text_and_others_are_hex(data, expected):
    assert shown(data) == expected


@given(st.none() | st.binary(max_size=50) | st.text(max_size=20).map(str.encode))
def test_shown_values_can_be_read_back(data):
    value = json.loads(json.dumps(shown(data)))
    if isinstance(value, dict):
        assert bytes.fromhex(value.pop("hex")) == data
        assert not value
    else:
        assert data == (None if value is None else value.encode())


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
def test_kind_of_a_file_follows_from_its_name(name, kind):
    assert kind_of(name) == kind


def test_file_that_is_not_of_a_log_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(logcore.InvalidNameError):
        dump(tmp_path / "notes.txt")
    with pytest.raises(logcore.InvalidNameError):
        verify(tmp_path / "notes.txt")
    with pytest.raises(logcore.LogNotFoundError):
        dump(tmp_path / f"{FIRST}.log")
    with pytest.raises(logcore.LogNotFoundError):
        verify(tmp_path / "nowhere")


# -- dump --------------------------------------------------------------------------


def test_dump_returns_the_batches_of_the_readme():
    found = rows(CLEAN / f"{FIRST}.log")
    assert [
        (entry["base_offset"], entry["last_offset"], entry["codec"]) for entry in found
    ] == [
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
    assert [entry["position"] for entry in found] == [
        0,
        92,
        211,
        330,
        449,
        526,
        627,
        705,
        783,
    ]
    assert found[3]["producer_id"] == 4000 and found[3]["producer_epoch"] == 7
    assert (found[3]["base_sequence"], found[3]["last_sequence"]) == (4, 5)
    assert [entry.get("control_type") for entry in found[6:8]] == ["ABORT", "COMMIT"]
    assert all(entry["crc_ok"] for entry in found)


def test_dump_decodes_records_of_every_codec():
    found = rows(CLEAN / f"{SECOND}.log", records=True)
    records = [entry for entry in found if entry["type"] == "record"]
    assert [record["offset"] for record in records] == list(range(16, 29))
    assert [entry["codec"] for entry in found if entry["type"] == "batch"] == [
        "snappy",
        "lz4",
        "zstd",
        "none",
    ]
    control = [
        row
        for row in rows(CLEAN / f"{FIRST}.log", records=True)
        if row.get("coordinator_epoch")
    ]
    assert [
        (entry["control_type"], entry["coordinator_epoch"]) for entry in control
    ] == [
        ("ABORT", 11),
        ("COMMIT", 12),
    ]


def test_dump_returns_the_first_record_as_written():
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
    entries = [
        (row["offset"], row["position"]) for row in rows(CLEAN / f"{FIRST}.index")
    ]
    assert entries == [(5, 211), (7, 330), (8, 449), (10, 627), (15, 783)]
    assert rows(CLEAN / f"{FIRST}.timeindex")[0] == {
        "type": "timeindex_entry",
        "timestamp_ms": T0 + 12,
        "offset": 5,
    }
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


def test_dump_distinguishes_padding_from_entries():
    found = rows(CRASH / f"{SECOND}.index")
    assert [entry["type"] for entry in found] == ["index_entry"] * 3 + ["padding"]
    assert found[-1]["size_bytes"] == 1200 - 24


def test_dump_reads_snapshots():
    found = {
        row["producer_id"]: row for row in rows(CLEAN / "00000000000000000029.snapshot")
    }
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


def test_dump_reads_checkpoints_and_small_files(logcore_partition):
    root = CLEAN.parent
    assert rows(root / "recovery-point-offset-checkpoint") == [
        {"type": "checkpoint_entry", "topic": "orders", "partition": 0, "offset": 29}
    ]
    assert rows(root / "log-start-offset-checkpoint") == []
    epochs = rows(CLEAN / "leader-epoch-checkpoint")
    assert [(epoch["leader_epoch"], epoch["start_offset"]) for epoch in epochs] == [
        (3, 0),
        (4, 12),
    ]
    assert rows(CLEAN / "partition.metadata")[0]["topic_id"] == "ASNFZ4mrze9-3LqYdlQyEA"
    assert rows(root / "meta.properties")[0]["properties"]["version"] == "1"
    assert rows(root / ".kafka_cleanshutdown") == [
        {"type": "clean_shutdown", "broker_epoch": 42}
    ]
    assert rows(logcore_partition / "logcore.policy") == [
        {"type": "policy", "durability": "group", "max_bytes": 1 << 20}
    ]
    with logcore.open(logcore_partition) as log:
        log.append(b"x")
        assert rows(logcore_partition / "logcore.durable") == [
            {"type": "durable_end", "offset": 19}
        ]


@pytest.mark.parametrize("life", STATES)
def test_dump_reads_files_that_are_being_created_or_deleted(life, tmp_path):
    for suffix in (".log", ".index", ".timeindex", ".txnindex"):
        copy = Path(
            shutil.copy(CLEAN / f"{FIRST}{suffix}", tmp_path / f"{FIRST}{suffix}{life}")
        )
        assert rows(copy) == rows(CLEAN / f"{FIRST}{suffix}")


def test_dump_continues_after_a_batch_with_a_wrong_crc(kafka_partition):
    path = kafka_partition / f"{FIRST}.log"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    found = rows(path, records=True)
    batches = [entry for entry in found if entry["type"] == "batch"]
    assert [batch["crc_ok"] for batch in batches] == [True, False] + [True] * 7
    assert [entry["offset"] for entry in found if entry["type"] == "record"] == [
        0,
        1,
        *range(4, 16),
    ]


def test_dump_reports_an_incomplete_batch_at_the_end(kafka_partition):
    path = kafka_partition / f"{FIRST}.log"
    path.write_bytes(path.read_bytes()[:800])
    assert rows(path)[-1] == {
        "type": "damage",
        "position": 783,
        "size_bytes": 17,
        "reason": "incomplete batch",
    }


# -- directories -----------------------------------------------------------------------


def test_describe_summarizes_a_partition():
    facts = describe(CLEAN)
    assert (facts.topic, facts.partition, facts.segments, facts.size_bytes) == (
        "orders",
        0,
        2,
        941 + 577,
    )
    assert (facts.log_start_offset, facts.high_watermark) == (0, 29)
    assert facts.first_timestamp_ms == T0
    assert facts.codecs == {"none": 1, "snappy": 1, "lz4": 1, "zstd": 1}


def test_partitions_lists_partition_directories(tmp_path, logcore_partition):
    assert partitions(CLEAN.parent) == [str(CLEAN)]
    assert partitions(logcore_partition) == [str(logcore_partition)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(logcore.LogNotFoundError):
        partitions(tmp_path / "empty")
