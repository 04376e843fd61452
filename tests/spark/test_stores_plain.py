"""Tests of reads from object stores without a JVM. The stores are a local file system of
pyarrow and an S3 server.
"""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs as arrow_fs

import logcore
from logcore.errors import (
    CorruptBatchError,
    CorruptLogError,
    InvalidConfigError,
    LogcoreError,
    LogNotFoundError,
    ReadOnlyLogError,
    StorageReadError,
)
from logcore.metadata import checkpoint
from logcore.metadata.filenames import LOG, file_name
from pyspark_logcore import options, stores
from pyspark_logcore.identity import OtherDirectoryError
from pyspark_logcore.options import ObjectStore
from pyspark_logcore.ranges import DataLossError
from pyspark_logcore.reader import RangePartition
from pyspark_logcore.stores import StoreFS
from support.s3 import upload
from support.simulated_spark import source

T0 = 1_700_000_000_000
URI = "s3://bucket/logs"
STORE = ObjectStore(location=URI, uri=URI, is_s3=True, settings={})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Create two partitions of several segments each, with headers, keys and null
    values. One partition is compressed.
    """
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        config = {"segment.bytes": 6000, "index.interval.bytes": 300, "batch.size": 400}
        directory.create_topic("plain", 2, config)
        directory.create_topic("packed", 1, {**config, "compression.type": "zstd"})
        for topic, number in (("plain", 0), ("plain", 1), ("packed", 0)):
            directory.partition(topic, number).append_many(
                [
                    (
                        b"k%d" % row,
                        None if row % 7 == 3 else b"value-%d-%d" % (number, row),
                        [("h", b"x")],
                        T0 + row,
                    )
                    for row in range(600)
                ]
            )
    return path


@pytest.fixture
def store(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the URI refer to the directory."""
    monkeypatch.setattr(
        stores, "open_store", lambda url: (arrow_fs.LocalFileSystem(), str(data))
    )
    return data


def rows(path: str, **given: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query. All objects that Spark sends between processes are
    pickled.
    """
    data_source = source(Path("x"), **{"includeHeaders": True, **given})
    data_source.options["path"] = path
    reader = data_source.reader(data_source.schema())
    copy = pickle.loads(pickle.dumps(reader))
    result_rows = []
    for partition in pickle.loads(pickle.dumps(reader.partitions())):
        for batch in copy.read(partition):
            result_rows += [tuple(row.values()) for row in batch.to_pylist()]
    return sorted(result_rows, key=lambda row: (row[2], row[3], row[4]))


def segment(data: Path, name: str, number: int) -> Path:
    return sorted((data / name).glob(f"*{LOG}"))[number]


@pytest.mark.parametrize(
    "read_options",
    [
        {"subscribe": "plain,packed"},
        {"subscribePattern": "p.*", "maxPartitionBytes": 3000},
        {
            "subscribe": "plain",
            "minPartitions": 9,
            "startingOffsets": '{"plain": {"0": 17, "1": -2}}',
        },
        {
            "subscribe": "packed",
            "startingTimestamp": T0 + 333,
            "endingTimestamp": T0 + 555,
        },
        {"assign": '{"plain": [1]}', "kafka.isolation.level": "read_committed"},
    ],
)
def test_rows_equal_the_rows_of_the_directory(
    store: Path, read_options: dict[str, object]
) -> None:
    result_rows = rows(URI, **read_options)
    assert result_rows == rows(str(store), **read_options)
    assert result_rows


def test_scan_requests_large_ranges_and_caches_few(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested_sizes: list[int] = []
    plain = StoreFS._fetch

    def fetch(fs: StoreFS, entry: Any, position: int, size: int) -> bytes:
        requested_sizes.append(size)
        assert len(fs._blocks) <= 3
        return plain(fs, entry, position, size)

    monkeypatch.setattr(StoreFS, "_fetch", fetch)
    with logcore.open_dir(store) as directory:
        directory.create_topic("large")
        directory.partition("large", 0).append_many(
            [(None, bytes(100_000)) for _ in range(200)]
        )
    assert len(rows(URI, subscribe="large", includeHeaders=False)) == 200
    assert max(requested_sizes) <= 8 << 20
    assert sum(requested_sizes) < 24 << 20, "20 MB are read once, with little overhead"
    assert len(requested_sizes) < 30


def test_search_by_time_reads_few_older_bytes(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested_sizes: list[int] = []
    plain = StoreFS._fetch

    def fetch(fs: StoreFS, entry: Any, position: int, size: int) -> bytes:
        requested_sizes.append(size)
        return plain(fs, entry, position, size)

    with logcore.open_dir(store) as directory:
        directory.create_topic("long", 1, {"segment.bytes": 1 << 20})
        for second in range(120):
            directory.partition("long", 0).append_many(
                [(None, bytes(10_000), [], T0 + second * 1000)] * 10
            )
    monkeypatch.setattr(StoreFS, "_fetch", fetch)
    read_options = {
        "subscribe": "long",
        "startingTimestamp": T0 + 95_000,
        "includeHeaders": False,
    }
    data_source = source(Path("x"), **read_options)
    data_source.options["path"] = URI
    (partition,) = data_source.reader(data_source.schema()).partitions()
    assert isinstance(partition, RangePartition)
    assert [offset_range.start for offset_range, _ in partition.ranges] == [950]
    assert sum(requested_sizes) < 6 << 20, "most of the 12 MB are not read"
    assert len(requested_sizes) < 80


@settings(max_examples=25, deadline=None)
@given(
    st.binary(max_size=400),
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 450), st.integers(0, 200)),
        max_size=30,
    ),
    st.integers(1, 64),
    st.integers(1, 16),
)
def test_cached_ranges_equal_the_object(
    content: bytes, reads: list[tuple[int, int, int]], ahead: int, gap: int
) -> None:
    system = arrow_fs._MockFileSystem()
    contents = [content, content[::-1]]
    system.create_dir("logs")
    for number, data in enumerate(contents):
        with system.open_output_stream(f"logs/{number}") as stream:
            stream.write(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "_SEQUENTIAL_READ_BYTES", ahead)
        patch.setattr(stores, "_RANDOM_READ_BYTES", gap)
        fs = StoreFS(STORE, (system, "logs"))
        handles = [fs.open(f"{URI}/{number}") for number in range(2)]
        for index, position, size in reads:
            assert (
                fs.pread(handles[index], size, position)
                == contents[index][position : position + size]
            )
        for handle in handles:
            fs.close(handle)


def test_missing_objects_are_errors(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LogcoreError, match="nosuch"):
        rows(URI, subscribe="nosuch")
    monkeypatch.setattr(
        stores,
        "open_store",
        lambda url: (arrow_fs.LocalFileSystem(), str(tmp_path / "none")),
    )
    with pytest.raises(
        LogNotFoundError, match="the bucket does not exist, or it has no objects"
    ) as caught:
        rows(URI, subscribe="plain")
    assert caught.value.path == URI


def failing_store(text: str) -> Any:
    """Return a store that fails with an error text of pyarrow."""

    class Handler(arrow_fs.FSSpecHandler):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def get_type_name(self) -> str:
            return "refusing"

        def get_file_info_selector(self, selector: Any) -> Any:
            raise OSError(text)

    return arrow_fs.PyFileSystem(Handler())


def test_errors_of_a_store_contain_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {
        "store.accessKey": "AKIAME",
        "store.secretKey": "hush",
        "store.sessionToken": "tok",
        "store.region": "r",
    }
    for text, message in (
        (
            "When listing objects: AWS Error ACCESS_DENIED for AKIAME with hush and tok",
            "refuses access",
        ),
        (
            "When listing objects: AWS Error NETWORK_CONNECTION for AKIAME with hush and tok",
            "the object store failed",
        ),
    ):
        monkeypatch.setattr(
            stores,
            "open_store",
            lambda url, text=text: (failing_store(text), "bucket/logs"),
        )
        with pytest.raises(StorageReadError, match=message) as caught:
            rows(URI, subscribe="plain", **keys)
        parsed = options.parse_read({"path": URI, "subscribe": "a", **keys})
        shown_text = f"{caught.value} {caught.value.__cause__} {parsed}"
        assert not any(
            secret in shown_text for secret in ("AKIAME", "hush", "tok and", "'tok'")
        )


@pytest.mark.long
def test_incomplete_copy_is_an_error(store: Path) -> None:
    last = segment(store, "plain-0", -1)
    content = last.read_bytes()
    last.write_bytes(content[: len(content) // 2])
    with pytest.raises(LogcoreError, match="incomplete batch"):
        rows(URI, subscribe="plain")
    last.unlink()
    with pytest.raises(
        LogcoreError, match=r"the end of the log is missing|records up to offset 600"
    ):
        rows(URI, subscribe="plain")
    last.write_bytes(content)
    assert len(rows(URI, subscribe="plain")) == 1200
    middle = segment(store, "plain-0", 2)
    middle.unlink()
    with pytest.raises(CorruptLogError, match="missing") as caught:
        rows(URI, subscribe="plain")
    assert (caught.value.path or "").startswith(f"{URI}/plain-0/")
    first = segment(store, "plain-1", 0)
    first.unlink()
    with pytest.raises((CorruptLogError, DataLossError), match=r"missing|planned"):
        rows(URI, subscribe="plain", startingOffsets='{"plain": {"0": 590, "1": 0}}')


def test_copy_made_during_writes_that_lacks_the_end_is_an_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        stores,
        "open_store",
        lambda url: (arrow_fs.LocalFileSystem(), str(tmp_path / "copy")),
    )
    with logcore.open_dir(data) as directory:
        directory.partition("packed", 0).append(b"late")
        shutil.copytree(data, tmp_path / "copy")
    assert len(rows(URI, subscribe="packed")) == 601
    (tmp_path / "copy" / checkpoint.RECOVERY_POINT).unlink()
    last = segment(tmp_path / "copy", "packed-0", -1)
    last.write_bytes(b"")
    with pytest.raises(CorruptLogError, match="ends before its recorded end") as caught:
        rows(URI, subscribe="packed")
    assert caught.value.path == f"{URI}/packed-0"


def test_damage_is_reported_with_object_and_position(store: Path) -> None:
    path = segment(store, "plain-1", 1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptBatchError, match="topic plain partition 1") as caught:
        rows(URI, subscribe="plain")
    assert caught.value.path == f"{URI}/plain-1/{path.name}"
    assert caught.value.position is not None
    assert 0 <= caught.value.position <= len(content) // 2
    assert caught.value.offset is not None


def test_object_changed_after_it_was_listed_is_an_error(store: Path) -> None:
    path = segment(store, "plain-0", 0)
    fs = StoreFS(STORE, (arrow_fs.LocalFileSystem(), str(store)))
    handle = fs.open(f"{URI}/plain-0/{path.name}")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StorageReadError, match="shorter than it was") as caught:
        fs.pread(handle, 1000, 0)
    assert caught.value.path == f"{URI}/plain-0/{path.name}"
    fs.close(handle)
    deleted_object = fs.open(f"{URI}/plain-1/{file_name(0, LOG)}")
    (store / "plain-1" / file_name(0, LOG)).unlink()
    with pytest.raises(StorageReadError, match="deleted after it was listed"):
        fs.pread(deleted_object, 10, 0)
    fs.close(deleted_object)


def test_task_with_another_archive_at_the_path_fails(store: Path) -> None:
    data_source = source(Path("x"), subscribe="plain")
    data_source.options["path"] = URI
    reader = data_source.reader(data_source.schema())
    planned = reader.partitions()
    properties = store / "meta.properties"
    properties.write_text(
        properties.read_text().replace("directory.id=", "directory.id=X")
    )
    with pytest.raises(OtherDirectoryError):
        list(reader.read(planned[0]))


def test_writes_and_streams_of_object_stores_are_refused(store: Path) -> None:
    data_source = source(Path("x"), topic="t", subscribe="t")
    for path in (URI, "gs://bucket/logs", "abfs://container@account/logs"):
        data_source.options["path"] = path
        with pytest.raises(
            InvalidConfigError, match="Write to a log directory of a file system"
        ):
            options.parse_write({"path": path, "topic": "t"})
        with pytest.raises(InvalidConfigError, match="for batch reads only"):
            options.parse_stream({"path": path, "subscribe": "t"})
    fs = StoreFS(STORE, (arrow_fs.LocalFileSystem(), str(store)))
    for call in (
        lambda: fs.open(f"{URI}/x", write=True, create=True),
        lambda: fs.unlink(f"{URI}/plain-0"),
        lambda: fs.mkdir(f"{URI}/x"),
        lambda: fs.lock(URI, "."),
    ):
        with pytest.raises(ReadOnlyLogError, match="only read"):
            call()


def test_store_accepts_only_its_own_options() -> None:
    def parse(**given: str) -> ObjectStore:
        texts = {name.replace("_", "."): value for name, value in given.items()}
        store_options = options.parse_read(
            {"path": URI, "subscribe": "a", **texts}
        ).store
        assert store_options is not None
        return store_options

    assert parse(path="s3a://bucket/a/b/").location == "s3://bucket/a/b"
    assert parse(store_endpoint="http://127.0.0.1:9000/").settings == {
        "endpoint_override": "127.0.0.1:9000",
        "scheme": "http",
    }
    assert parse(store_anonymous="true", store_region="eu-1").settings == {
        "anonymous": True,
        "region": "eu-1",
    }
    for invalid_options, message in (
        ({"store_accessKey": "a"}, "go together"),
        ({"store_endpoint": "http://u:p@h"}, "store.endpoint"),
        ({"path": "s3://key:hush@bucket/x"}, "are options"),
        ({"path": "s3://bucket/x?secret=hush"}, "are options"),
        ({"path": "gs://bucket/x", "store_region": "r"}, "is for s3"),
        ({"path": "/data", "store_region": "r"}, "is for object stores"),
    ):
        with pytest.raises(InvalidConfigError, match=message) as caught:
            parse(**invalid_options)
        assert "hush" not in str(caught.value)
    with pytest.raises(
        InvalidConfigError, match="does not support this file system"
    ) as caught:
        stores.open_store(
            attrs.evolve(
                STORE, location="nosuch://h", uri="nosuch://u:hush@h", is_s3=False
            )
        )
    assert "hush" not in str(caught.value)


# -- a real S3 server ------------------------------------------------------------------


@pytest.mark.slow  # this test starts a server; the tests above cover other kinds of stores
def test_archive_on_an_s3_server_is_read(s3_server: dict[str, str], data: Path) -> None:
    system = upload(s3_server, data, "bucket/logs")
    for read_options in (
        {"subscribePattern": "p.*"},
        {"subscribe": "plain", "startingTimestamp": T0 + 500},
    ):
        assert rows(URI, **read_options, **s3_server) == rows(str(data), **read_options)
    with pytest.raises(
        LogNotFoundError, match="the bucket does not exist, or it has no objects"
    ):
        rows("s3://elsewhere/logs", subscribe="plain", **s3_server)
    name = f"plain-0/{segment(data, 'plain-0', 1).name}"
    with system.open_output_stream(f"bucket/logs/{name}") as stream:
        stream.write(b"\0" * 5000)
    with pytest.raises(LogcoreError) as caught:
        rows(URI, subscribe="plain", **s3_server)
    assert caught.value.path == f"{URI}/{name}"
    assert "hush" not in str(caught.value)


def test_unreachable_server_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed = options.parse_read(
        {
            "path": URI,
            "subscribe": "a",
            "store.endpoint": "http://127.0.0.1:1",
            "store.accessKey": "a",
            "store.secretKey": "hush",
        }
    ).store
    assert parsed is not None
    plain = arrow_fs.S3FileSystem
    retries = arrow_fs.AwsStandardS3RetryStrategy(max_attempts=1)
    monkeypatch.setattr(
        arrow_fs, "S3FileSystem", lambda **given: plain(**given, retry_strategy=retries)
    )
    with pytest.raises(StorageReadError, match="the object store failed") as caught:
        StoreFS(parsed).is_directory(URI)
    assert "hush" not in str(caught.value)
    assert os.environ.get("AWS_SECRET_ACCESS_KEY") is None
