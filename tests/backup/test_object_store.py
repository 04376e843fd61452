"""Backups in object stores: an S3 server on this machine, and a `file:` URL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import logcore
from logcore.backup.store import open_store
from logcore.fs import OS
from support import s3

pytest.importorskip("pyarrow.fs")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Yield the URL of a bucket, with credentials and `{}` for the path."""
    from pyarrow import fs

    with s3.serving() as options:
        host = options["store.endpoint"].removeprefix("http://")
        key, secret = options["store.accessKey"], options["store.secretKey"]
        system = fs.S3FileSystem(
            endpoint_override=host,
            scheme="http",
            region="us-east-1",
            access_key=key,
            secret_key=secret,
            allow_bucket_creation=True,
        )
        system.create_dir("backups")
        yield (
            f"s3://{key}:{secret}@backups/{{}}?scheme=http&region=us-east-1"
            f"&endpoint_override={host.replace(':', '%3A')}"
        )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["s3", "file"])
def test_object_store_has_snapshots_and_restores_them(
    tmp_path: Path, bucket: str, kind: str
) -> None:
    url = bucket.format("shop")
    if kind == "file":
        url = f"file://{tmp_path}/backup"
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t", config={"segment.bytes": 1000})
        for number in range(100):
            logdir.append("t", b"%d" % number * 20)
        first = logdir.snapshot(url)
        assert (first.stored_bytes, first.linked_bytes) == (first.size_bytes, 0)
        logdir.append("t", b"last")
        second = logdir.snapshot(url, keep=1)
        assert 0 < second.stored_bytes < 1000
        values = [record.value for record in logdir.partition("t", 0).read(0)]
    assert [snapshot.id for snapshot in logcore.snapshots(url)] == [second.id]
    logcore.restore(url, tmp_path / "copy")
    with logcore.open_dir(tmp_path / "copy") as copy:
        assert [record.value for record in copy.partition("t", 0).read(0)] == values


def test_errors_of_an_object_store_contain_no_secret(
    tmp_path: Path, bucket: str
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t")
        logdir.append("t", b"1")
        for url in (
            bucket.format("shop").replace("@backups", "@missing-bucket"),
            bucket.format("shop").replace("scheme=http", "scheme=nonsense"),
        ):
            with pytest.raises(logcore.LogcoreError) as caught:
                logdir.snapshot(url)
            assert s3.SECRET not in str(caught.value)
        with pytest.raises(logcore.InvalidConfigError, match="pyarrow supports"):
            logdir.snapshot("ftp://host/path")
    with pytest.raises(logcore.LogNotFoundError):
        logcore.restore(bucket.format("nothing"), tmp_path / "copy")


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_object_that_fails_in_the_middle_is_not_stored(
    tmp_path: Path, bucket: str, kind: str
) -> None:
    """The end of a stream completes its object, also after an error."""
    url = bucket.format("broken")
    if kind == "file":
        url = f"file://{tmp_path}/backup"

    def chunks() -> Iterator[bytes]:
        yield b"the first chunk"
        raise ZeroDivisionError

    store = open_store(url, OS, create=True)
    with pytest.raises(ZeroDivisionError):
        store.put("parts/t-0", chunks())
    assert store.names("parts") == []
