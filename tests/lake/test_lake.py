"""Exports to Iceberg and Delta tables: each committed record becomes one row, and each
difference between topic and table is an error.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import lake
from logcore.errors import (
    CommitConflictError,
    DivergedError,
    InvalidConfigError,
    InvalidTimestampError,
    LakeTableError,
    MissingDependencyError,
    OffsetOutOfRangeError,
    RecordRefusedError,
    ShippingGapError,
)
from logcore.lake import exporting
from logcore.lake.rules import ExportProgress

pa = pytest.importorskip("pyarrow")
pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

from support.lakes import (  # noqa: E402
    COMMIT_BYTES,
    KINDS,
    PARTITIONS,
    TOPIC,
    committed_offsets,
    fill,
    offsets_of,
    rows_of,
    target,
)

SMALL = lake.ExportOptions(commit_bytes=COMMIT_BYTES)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[logcore.LogDir]:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as logdir:
        logdir.create_topic(TOPIC, PARTITIONS)
        yield logdir


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_rows_are_the_records_of_the_topic(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    data.append(TOPIC, b"1", key=b"a", partition=0, timestamp_ms=1_700_000_000_123)
    data.append(
        TOPIC, None, key=None, partition=1, headers=[("h", b"\xff"), ("i", None)]
    )
    data.append(TOPIC, b"", key=b"", partition=2, timestamp_ms=-1)
    report = lake.export(data, TOPIC, target(kind, tmp_path))
    assert (report.record_count, report.commit_count) == (3, 1)
    assert report.next_offsets == {0: 1, 1: 1, 2: 1}
    found = rows_of(kind, tmp_path)
    wanted = data.scan(TOPIC).to_table().drop_columns("topic")
    for name in ("partition", "offset", "key", "value", "headers"):
        assert found.column(name).to_pylist() == wanted.column(name).to_pylist(), name
    assert found.schema.field("timestamp").type == pa.timestamp("us", "UTC")
    times = found.column("timestamp").cast(pa.timestamp("ms", "UTC"))
    assert times.to_pylist() == wanted.column("timestamp").to_pylist()
    assert found.column("timestamp_type").to_pylist() == [0, 0, 0]


def test_next_export_adds_the_new_records(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    fill(data, 240)
    first = lake.export(data, TOPIC, target(kind, tmp_path), SMALL)
    assert first.commit_count > 3
    again = lake.export(data, TOPIC, target(kind, tmp_path), SMALL)
    assert (again.record_count, again.commit_count) == (0, 0)
    fill(data, 60, 240)
    second = lake.export(data, TOPIC, target(kind, tmp_path), SMALL)
    assert first.record_count + second.record_count == len(committed_offsets(data))
    assert offsets_of(kind, tmp_path) == committed_offsets(data)


def test_open_transaction_ends_the_export(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    data.append(TOPIC, b"before", partition=0)
    producer = data.producer(transactional_id="slow", threaded=False)
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(TOPIC, b"inside", partition=0)
    producer.flush()
    data.append(TOPIC, b"after", partition=0)
    lake.export(data, TOPIC, target(kind, tmp_path))
    assert offsets_of(kind, tmp_path) == [(0, 0)]
    producer.commit_transaction()
    producer.close()
    lake.export(data, TOPIC, target(kind, tmp_path))
    assert offsets_of(kind, tmp_path) == [(0, 0), (0, 1), (0, 2)]


def test_offsets_without_rows_count_as_exported(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    """If only an aborted transaction was added, retention may delete it afterwards."""
    fill(data, 36)
    lake.export(data, TOPIC, target(kind, tmp_path))
    fill(data, 12, 36)  # aborted
    report = lake.export(data, TOPIC, target(kind, tmp_path))
    assert (report.record_count, report.commit_count) == (0, 1)
    log = data.partition(TOPIC, 0)
    assert report.next_offsets[0] == log.log_end_offset
    log.delete_records(log.log_end_offset)
    assert lake.export(data, TOPIC, target(kind, tmp_path)).record_count == 0


def test_new_partition_is_exported_from_its_first_record(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    fill(data, 36)
    lake.export(data, TOPIC, target(kind, tmp_path))
    data.add_partitions(TOPIC, PARTITIONS + 1)
    data.append(TOPIC, b"new", partition=PARTITIONS)
    data.append(TOPIC, b"newer", partition=PARTITIONS)
    data.partition(TOPIC, PARTITIONS).delete_records(1)
    with pytest.raises(ShippingGapError, match="offsets 0 to 0 were deleted"):
        lake.export(data, TOPIC, target(kind, tmp_path))


def test_start_and_end_bound_the_first_export(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    fill(data, 36)
    options = lake.ExportOptions(start={0: 2, 1: 0}, end={0: 4, 1: 1, 2: 0})
    lake.export(data, TOPIC, target(kind, tmp_path), options)
    assert offsets_of(kind, tmp_path) == [(0, 2), (0, 3), (1, 0)]
    lake.export(data, TOPIC, target(kind, tmp_path), lake.ExportOptions(start={0: 0}))
    left_out = {(0, 0), (0, 1)}
    assert offsets_of(kind, tmp_path) == [
        offset for offset in committed_offsets(data) if offset not in left_out
    ]
    with pytest.raises(
        OffsetOutOfRangeError, match="cannot begin at an offset outside"
    ):
        lake.export(
            data,
            TOPIC,
            target(kind, tmp_path, "other"),
            lake.ExportOptions(start={0: 999}),
        )


def test_recreated_topic_is_refused(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    fill(data, 36)
    lake.export(data, TOPIC, target(kind, tmp_path))
    before = offsets_of(kind, tmp_path)
    data.delete_topic(TOPIC)
    data.create_topic(TOPIC, PARTITIONS)
    fill(data, 120)
    with pytest.raises(DivergedError, match="deleted and created again"):
        lake.export(data, TOPIC, target(kind, tmp_path))
    assert offsets_of(kind, tmp_path) == before


def test_deleted_records_are_a_gap(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    fill(data, 36)
    lake.export(data, TOPIC, target(kind, tmp_path))
    fill(data, 36, 36)
    end = data.partition(TOPIC, 1).log_end_offset
    data.partition(TOPIC, 1).delete_records(end - 2)
    with pytest.raises(ShippingGapError, match="on_gap='skip'"):
        lake.export(data, TOPIC, target(kind, tmp_path))
    left = [offset for offset in committed_offsets(data) if offset >= (0, 0)]
    lake.export(data, TOPIC, target(kind, tmp_path), lake.ExportOptions(on_gap="skip"))
    found = offsets_of(kind, tmp_path)
    assert len(set(found)) == len(found)
    assert set(left) <= set(found)


def test_truncated_log_is_refused(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    for n in range(10):
        data.append(TOPIC, b"%d" % n, partition=0)
    lake.export(data, TOPIC, target(kind, tmp_path))
    data.partition(TOPIC, 0).truncate(6)
    with pytest.raises(DivergedError, match="ends before its exported records"):
        lake.export(data, TOPIC, target(kind, tmp_path))
    for n in range(10):
        data.append(TOPIC, b"other %d" % n, partition=0)
    with pytest.raises(DivergedError, match="has grown again"):
        lake.export(data, TOPIC, target(kind, tmp_path))


def test_table_of_another_topic_or_layout_is_refused(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    fill(data, 12)
    lake.export(data, TOPIC, target(kind, tmp_path))
    data.create_topic("other")
    with pytest.raises(LakeTableError, match="another topic"):
        lake.export(data, "other", target(kind, tmp_path))
    text = lake.ExportOptions(layout=lake.TableLayout(value="text"))
    with pytest.raises(
        LakeTableError, match="expected value 'text', found value 'bytes'"
    ):
        lake.export(data, TOPIC, target(kind, tmp_path), text)


def test_foreign_table_is_refused(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    schema = pa.schema([("offset", pa.int64())])
    if kind == "delta":
        import deltalake

        deltalake.DeltaTable.create(tmp_path / "orders", schema)
    else:
        catalog = lake.local_catalog(tmp_path)
        catalog.create_namespace("shop")
        catalog.create_table("shop.orders", schema)
    with pytest.raises(LakeTableError, match="not the export of a topic"):
        lake.export(data, TOPIC, target(kind, tmp_path))


def test_stale_commit_is_refused(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    """Two exports have read the same progress; one of the two commits is refused."""
    fill(data, 36)
    lake.export(
        data, TOPIC, target(kind, tmp_path), lake.ExportOptions(end={0: 0, 1: 0, 2: 0})
    )
    first = target(kind, tmp_path)
    second = target(kind, tmp_path)
    state = first.load(range(PARTITIONS))
    assert state == second.load(range(PARTITIONS))
    rows = pa.Table.from_batches([], state.schema)
    first.commit(rows, {1: ExportProgress(7, "6:00000001")})
    with pytest.raises(CommitConflictError):
        second.commit(rows, {1: ExportProgress(8, "7:00000001")})
    assert first.load([1]).progress[1] == ExportProgress(7, "6:00000001")


class Interrupted:
    """A table that runs a function before its first commit."""

    def __init__(self, table: Any, before: Any) -> None:
        self._table = table
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def commit(self, rows: Any, progress: Any) -> None:
        before = self._before
        self._before = lambda: None
        before()
        self._table.commit(rows, progress)


def test_concurrent_export_ends_the_slower_one(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    fill(data, 36)
    options = lake.ExportOptions(end={0: 0, 1: 0, 2: 0})
    lake.export(data, TOPIC, target(kind, tmp_path), options)
    slow = Interrupted(
        target(kind, tmp_path),
        lambda: lake.export(data, TOPIC, target(kind, tmp_path)),
    )
    with pytest.raises(CommitConflictError, match="another export"):
        lake.export(data, TOPIC, slow)
    assert offsets_of(kind, tmp_path) == committed_offsets(data)


def test_commit_of_another_writer_is_not_a_conflict(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    """A compaction of the table, or a writer that adds nothing, does not end an export."""
    fill(data, 36)
    lake.export(data, TOPIC, target(kind, tmp_path), SMALL)
    fill(data, 48, 36)

    def compact() -> None:
        if kind == "delta":
            import deltalake

            deltalake.DeltaTable(tmp_path / "orders").optimize.compact()
            return
        table = lake.local_catalog(tmp_path).load_table("shop.orders")
        table.append(table.schema().as_arrow().empty_table())

    lake.export(data, TOPIC, Interrupted(target(kind, tmp_path), compact), SMALL)
    assert offsets_of(kind, tmp_path) == committed_offsets(data)


def test_progress_outlives_the_snapshots_of_the_export(
    data: logcore.LogDir, tmp_path: Path
) -> None:
    """Iceberg: another writer has committed, and the older snapshots have expired."""
    fill(data, 36)
    lake.export(data, TOPIC, target("iceberg", tmp_path))
    table = lake.local_catalog(tmp_path).load_table("shop.orders")
    assert "commit.retry.num-retries" not in table.properties, "in memory only"
    exported = table.current_snapshot().snapshot_id
    table.append(table.schema().as_arrow().empty_table())
    table.maintenance.expire_snapshots().by_ids([exported]).commit()
    fill(data, 36, 36)
    lake.export(data, TOPIC, target("iceberg", tmp_path))
    assert offsets_of("iceberg", tmp_path) == committed_offsets(data)


def test_rollback_of_an_iceberg_table_rolls_the_progress_back(
    data: logcore.LogDir, tmp_path: Path
) -> None:
    fill(data, 36)
    lake.export(data, TOPIC, target("iceberg", tmp_path))
    table = lake.local_catalog(tmp_path).load_table("shop.orders")
    before = table.current_snapshot().snapshot_id
    fill(data, 36, 36)
    lake.export(data, TOPIC, target("iceberg", tmp_path))
    table.refresh()
    table.manage_snapshots().rollback_to_snapshot(before).commit()
    lake.export(data, TOPIC, target("iceberg", tmp_path))
    assert offsets_of("iceberg", tmp_path) == committed_offsets(data)


def test_rows_without_progress_are_refused(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    """An export from the beginning would store the rows twice."""
    nothing = lake.ExportOptions(end={0: 0, 1: 0, 2: 0})
    lake.export(data, TOPIC, target(kind, tmp_path), nothing)
    state = target(kind, tmp_path).load(range(PARTITIONS))
    none = state.schema.empty_table()
    row = pa.concat_tables([none, pa.table({"offset": [1]})], promote_options="default")
    if kind == "delta":
        import deltalake

        other = deltalake.DeltaTable.create(
            tmp_path / "other",
            none.schema,
            configuration=state.owner.as_properties(),
            raise_if_key_not_exists=False,
        )
        deltalake.write_deltalake(other, row, mode="append")
    else:
        catalog = lake.local_catalog(tmp_path)
        properties = state.owner.as_properties()
        other = catalog.create_table("shop.other", none.schema, properties=properties)
        other.append(row)
    with pytest.raises(LakeTableError, match="progress of the export is lost"):
        lake.export(data, TOPIC, target(kind, tmp_path, "other"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["a b", "ä", "50%", "a:b", "'"])
def test_table_in_a_folder_with_an_unusual_name(
    data: logcore.LogDir, tmp_path: Path, kind: str, name: str
) -> None:
    data.append(TOPIC, b"", partition=0)
    place = tmp_path / name
    lake.export(data, TOPIC, target(kind, place))
    data.append(TOPIC, b"", partition=0)
    lake.export(data, TOPIC, target(kind, place))
    assert offsets_of(kind, place) == [(0, 0), (0, 1)]
    assert {path.name for path in tmp_path.iterdir()} == {"data", name}


def test_old_metadata_of_iceberg_is_deleted(
    data: logcore.LogDir, tmp_path: Path
) -> None:
    """Otherwise each commit would leave a file."""
    data.append(TOPIC, b"")
    lake.export(data, TOPIC, target("iceberg", tmp_path))
    table = lake.local_catalog(tmp_path).load_table("shop.orders")
    with table.transaction() as transaction:
        transaction.set_properties({"write.metadata.previous-versions-max": "2"})
    for _ in range(4):
        data.append(TOPIC, b"")
        lake.export(data, TOPIC, target("iceberg", tmp_path))
    files = list((tmp_path / "shop" / "orders" / "metadata").glob("*.metadata.json"))
    assert len(files) <= 3


def test_restored_delta_table_is_refused(data: logcore.LogDir, tmp_path: Path) -> None:
    import deltalake

    fill(data, 36)
    lake.export(data, TOPIC, target("delta", tmp_path))
    fill(data, 36, 36)
    lake.export(data, TOPIC, target("delta", tmp_path))
    deltalake.DeltaTable(tmp_path / "orders").restore(1)
    with pytest.raises(LakeTableError, match="restored to an earlier version"):
        lake.export(data, TOPIC, target("delta", tmp_path))


def partitions_of(kind: str, place: Path, name: str) -> set[Any]:
    """The values by which the files of a table are partitioned."""
    if kind == "delta":
        import deltalake

        found = deltalake.DeltaTable(place / name).partitions()
        return {next(iter(entry.values())) for entry in found}
    table = lake.local_catalog(place).load_table(f"shop.{name}")
    rows = table.inspect.partitions().to_pylist()
    return {str(next(iter(row["partition"].values()))) for row in rows}


def test_table_partitioned_by_day(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    fill(data, 48)
    options = lake.ExportOptions(layout=lake.TableLayout(partition_by="day"))
    lake.export(data, TOPIC, target(kind, tmp_path), options)
    assert offsets_of(kind, tmp_path) == committed_offsets(data)
    days = {"2023-11-14", "2023-11-15", "2023-11-16"}
    assert {str(entry) for entry in partitions_of(kind, tmp_path, "orders")} == days


def test_table_partitioned_by_a_header(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    fill(data, 36)
    data.append(TOPIC, b"", partition=0, headers=[("source", None)])
    options = lake.ExportOptions(layout=lake.TableLayout(partition_by="header.source"))
    lake.export(data, TOPIC, target(kind, tmp_path), options)
    found = rows_of(kind, tmp_path)
    values = found.column("header_source").to_pylist()
    assert set(values) == {"web", None}
    for headers, value in zip(found.column("headers").to_pylist(), values, strict=True):
        assert value == next(
            (header["value"].decode() for header in headers if header["value"]), None
        )
    assert "web" in partitions_of(kind, tmp_path, "orders")


def test_unusual_headers_name_partitions(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    values = [
        "a/b",
        "../x",
        "a#b",
        "a?b",
        "",
        "ä",
        "50%",
        "%2F",
        "a b",
        "a=b",
        "a:b",
        "x" * 200,
    ]
    for value in values:
        headers = [("source.of", value.encode()), ("source.of", b"second")]
        data.append(TOPIC, value.encode(), partition=0, headers=headers)
    layout = lake.TableLayout(value="text", partition_by="header.source.of")
    options = lake.ExportOptions(layout=layout)
    lake.export(data, TOPIC, target(kind, tmp_path), options)
    found = rows_of(kind, tmp_path)
    assert found.column("value").to_pylist() == values
    # Delta has no partition with an empty name, so the text is null there.
    stored = [value or None for value in values] if kind == "delta" else values
    assert found.column("header_source_of").to_pylist() == stored


def test_text_layout(data: logcore.LogDir, tmp_path: Path, kind: str) -> None:
    layout = lake.TableLayout(value="text", key="text")
    options = lake.ExportOptions(layout=layout)
    data.append(TOPIC, "ä".encode(), key=b"k", partition=0, headers=[("h", b"i")])
    lake.export(data, TOPIC, target(kind, tmp_path), options)
    row = rows_of(kind, tmp_path).to_pylist()[0]
    assert (row["key"], row["value"]) == ("k", "ä")
    assert row["headers"] == [{"key": "h", "value": "i"}]
    data.append(TOPIC, b"fine", partition=0)
    data.append(TOPIC, b"\xff", partition=0)
    with pytest.raises(RecordRefusedError, match="offset 2: the value is not UTF-8"):
        lake.export(data, TOPIC, target(kind, tmp_path), options)
    data.append(TOPIC, b"", partition=1, headers=[("h", b"\xff")])
    with pytest.raises(RecordRefusedError, match="the header 'h' is not UTF-8"):
        lake.export(
            data,
            TOPIC,
            target(kind, tmp_path),
            lake.ExportOptions(layout=layout, end={0: 1}),
        )


def test_selected_records_only(data: logcore.LogDir, tmp_path: Path, kind: str) -> None:
    fill(data, 36)
    options = lake.ExportOptions(select=lambda columns: columns.header_counts > 0)
    report = lake.export(data, TOPIC, target(kind, tmp_path), options)
    assert 0 < report.record_count < len(committed_offsets(data))
    assert report.next_offsets[0] == data.partition(TOPIC, 0).log_end_offset
    again = lake.export(data, TOPIC, target(kind, tmp_path), options)
    assert again.commit_count == 0


def test_compacted_topic_may_have_lost_the_last_record(
    tmp_path: Path, kind: str
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as logdir:
        logdir.create_topic(TOPIC, 1, {"cleanup.policy": "compact"})
        for n in range(6):
            logdir.append(TOPIC, b"%d" % n, key=b"k")
        lake.export(logdir, TOPIC, target(kind, tmp_path))
        logdir.append(TOPIC, b"newest", key=b"k")
        log = logdir.partition(TOPIC, 0)
        log.roll()
        logcore.clean(log, force=True)
        assert [record.offset for record in log.read(0)] == [6]
        lake.export(logdir, TOPIC, target(kind, tmp_path))
        assert offsets_of(kind, tmp_path) == [(0, n) for n in range(7)]


def test_progress_reports_reach_the_total(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    fill(data, 120)
    seen: list[tuple[int, int]] = []
    options = lake.ExportOptions(
        commit_bytes=COMMIT_BYTES, on_progress=lambda *values: seen.append(values)
    )
    lake.export(data, TOPIC, target(kind, tmp_path), options)
    total = sum(data.partition(TOPIC, n).log_end_offset for n in range(PARTITIONS))
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(seen))


@pytest.mark.long
def test_commits_are_of_bounded_size(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    """The rows of a commit are in memory, so their size bounds the memory."""
    fill(data, 480)
    sizes: list[int] = []

    class Counting(Interrupted):
        def commit(self, rows: Any, progress: Any) -> None:
            sizes.append(rows.nbytes)
            super().commit(rows, progress)

    table = Counting(target(kind, tmp_path), lambda: None)
    lake.export(data, TOPIC, table, SMALL)
    assert len(sizes) > 3
    assert max(sizes) < 2 * COMMIT_BYTES


def test_old_deltalake_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deltalake 1.0 stores rows twice if two exports commit at the same time."""
    import deltalake

    monkeypatch.setattr(deltalake, "__version__", "1.0.2")
    with pytest.raises(MissingDependencyError, match="twice"):
        lake.DeltaTarget(tmp_path / "orders")


LAST_TIME = 253_402_300_799_999  # of the year 9999


@pytest.mark.parametrize("timestamp_ms", [0, 1, LAST_TIME])
def test_extreme_timestamps_are_stored(
    data: logcore.LogDir,
    tmp_path: Path,
    kind: str,
    timestamp_ms: int,
) -> None:
    data.append(TOPIC, b"x", timestamp_ms=timestamp_ms)
    options = lake.ExportOptions(layout=lake.TableLayout(partition_by="day"))
    lake.export(data, TOPIC, target(kind, tmp_path), options)
    times = rows_of(kind, tmp_path).column("timestamp").cast(pa.int64())
    assert times.to_pylist() == [timestamp_ms * 1000]


def test_timestamp_after_the_year_9999_is_refused(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    """Such as a time in microseconds. pyiceberg would fail without an offset."""
    data.append(TOPIC, b"x", partition=0)
    data.append(TOPIC, b"x", partition=0, timestamp_ms=LAST_TIME + 1)
    with pytest.raises(InvalidTimestampError, match=r"offset 1: .*microseconds"):
        lake.export(data, TOPIC, target(kind, tmp_path))


@pytest.mark.parametrize("sign", ["#", "?"])
def test_iceberg_refuses_signs_of_urls(tmp_path: Path, sign: str) -> None:
    with pytest.raises(InvalidConfigError, match="parts of a URL"):
        lake.local_catalog(tmp_path / f"a{sign}b")
    assert not list(tmp_path.iterdir())
    with pytest.raises(InvalidConfigError, match="parts of a URL"):
        target("iceberg", tmp_path, f"a{sign}b")


def test_iceberg_table_needs_a_namespace(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"shop\.orders"):
        lake.IcebergTarget("orders", catalog=lake.local_catalog(tmp_path))


def test_duckdb_reads_the_table(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    """Through Arrow: DuckDB's own extensions for the formats need a download."""
    duckdb = pytest.importorskip("duckdb")
    fill(data, 48)
    lake.export(data, TOPIC, target(kind, tmp_path), SMALL)
    if kind == "delta":
        import deltalake

        orders = deltalake.DeltaTable(tmp_path / "orders").to_pyarrow_dataset()
    else:
        table = lake.local_catalog(tmp_path).load_table("shop.orders")
        orders = table.scan().to_arrow_batch_reader()
    connection = duckdb.connect()
    connection.register("orders", orders)
    query = (
        'select partition, count(*), max("offset") from orders group by 1 order by 1'
    )
    committed = committed_offsets(data)
    wanted = []
    for number in range(PARTITIONS):
        offsets = [offset for index, offset in committed if index == number]
        wanted.append((number, len(offsets), max(offsets)))
    assert connection.execute(query).fetchall() == wanted
    connection.close()


@pytest.mark.parametrize(
    ("deleted", "on_gap", "expected"),
    [
        (0, "fail", range(40)),  # a compaction has replaced the files
        (30, "skip", [*range(10), *range(30, 40)]),
        (30, "fail", range(10)),
    ],
)
def test_files_removed_while_they_are_read(
    data: logcore.LogDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deleted: int,
    on_gap: Any,
    expected: Any,
) -> None:
    """Retention or compaction removes files of the log after the export has begun."""
    log = data.partition(TOPIC, 0)
    for at in range(0, 40, 10):
        log.append_many([(None, b"%d" % n) for n in range(at, at + 10)])
    calls = itertools.count()
    read = exporting.typed_columns

    def interrupted(*arguments: Any, **options: Any) -> Iterator[Any]:
        chunks = read(*arguments, **options)
        yield next(chunks)
        if next(calls) == 0:
            log.delete_records(deleted)
            raise OffsetOutOfRangeError("a segment was removed by its writer")
        yield from chunks

    monkeypatch.setattr(exporting, "typed_columns", interrupted)
    options = lake.ExportOptions(commit_bytes=1, on_gap=on_gap)
    with contextlib.ExitStack() as stack:
        if deleted and on_gap == "fail":
            stack.enter_context(pytest.raises(ShippingGapError, match="10 to 29"))
        lake.export(data, TOPIC, target("delta", tmp_path), options)
    assert offsets_of("delta", tmp_path) == [(0, offset) for offset in expected]
