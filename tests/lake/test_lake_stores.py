"""Tables in an object store: an S3 server of this machine, and a catalog that pyiceberg
finds by its settings.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import lake
from logcore.errors import CommitConflictError, LakeTableError

pytest.importorskip("pyarrow")
pytest.importorskip("moto.server")
pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

from support.lakes import (
    KINDS,
    PARTITIONS,
    TOPIC,
    committed_offsets,
    fill,
)

BUCKET = "lake"


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """Endpoint and keys of an S3 server with a bucket.

    It is another process, because deltalake holds the GIL while it waits for a store.
    """
    from pyarrow import fs

    program = """
import json, sys
from support.s3 import serving
with serving() as options:
    print(json.dumps(options), flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        options: dict[str, str] = json.loads(server.stdout.readline())
        system = fs.S3FileSystem(
            endpoint_override=options["store.endpoint"].removeprefix("http://"),
            scheme="http",
            region=options["store.region"],
            access_key=options["store.accessKey"],
            secret_key=options["store.secretKey"],
            allow_bucket_creation=True,
        )
        system.create_dir(BUCKET)
        yield options


def delta_storage(store: dict[str, str]) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": store["store.endpoint"],
        "AWS_REGION": store["store.region"],
        "AWS_ACCESS_KEY_ID": store["store.accessKey"],
        "AWS_SECRET_ACCESS_KEY": store["store.secretKey"],
        "AWS_ALLOW_HTTP": "true",
    }


def catalog(store: dict[str, str], place: Path) -> Any:
    return lake.named_catalog(
        "tests",
        {
            "type": "sql",
            "uri": f"sqlite:///{place}/tests.db",
            "warehouse": f"s3://{BUCKET}/iceberg",
            "s3.endpoint": store["store.endpoint"],
            "s3.region": store["store.region"],
            "s3.access-key-id": store["store.accessKey"],
            "s3.secret-access-key": store["store.secretKey"],
        },
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_export_to_an_object_store(
    tmp_path: Path, store: dict[str, str], kind: str
) -> None:
    make: Callable[[], Any]
    if kind == "delta":
        storage = delta_storage(store)
        url = f"s3://{BUCKET}/delta/orders"

        def make() -> Any:
            return lake.DeltaTarget(url, storage=storage)

        def rows() -> Any:
            import deltalake

            return deltalake.DeltaTable(url, storage_options=storage).to_pyarrow_table()

    else:

        def make() -> Any:
            return lake.IcebergTarget("shop.orders", catalog=catalog(store, tmp_path))

        def rows() -> Any:
            return catalog(store, tmp_path).load_table("shop.orders").scan().to_arrow()

    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as logdir:
        logdir.create_topic(TOPIC, PARTITIONS)
        fill(logdir, 48)
        lake.export(logdir, TOPIC, make())
        first, second = make(), make()
        state = first.load(range(PARTITIONS))
        second.load(range(PARTITIONS))
        none = state.schema.empty_table()
        first.commit(none, state.progress)
        with pytest.raises(CommitConflictError):
            second.commit(none, state.progress)
        fill(logdir, 48, 48)
        lake.export(logdir, TOPIC, make())
        found = rows().sort_by([("partition", "ascending"), ("offset", "ascending")])
        pairs = zip(
            found.column("partition").to_pylist(),
            found.column("offset").to_pylist(),
            strict=True,
        )
        assert list(pairs) == committed_offsets(logdir)


def test_object_store_that_does_not_answer(
    tmp_path: Path, store: dict[str, str]
) -> None:
    storage = {
        **delta_storage(store),
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "max_retries": "0",
        "retry_timeout": "1s",
        "connect_timeout": "1s",
    }
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as logdir:
        logdir.create_topic(TOPIC)
        target = lake.DeltaTarget(f"s3://{BUCKET}/elsewhere", storage=storage)
        with pytest.raises(
            LakeTableError, match="cannot read the Delta table"
        ) as found:
            lake.export(logdir, TOPIC, target)
        assert str(found.value).isprintable()


@pytest.mark.long
def test_catalog_that_does_not_answer(tmp_path: Path) -> None:
    properties = {"type": "rest", "uri": "http://127.0.0.1:9"}
    with pytest.raises(LakeTableError, match="cannot open the catalog 'tests'"):
        lake.named_catalog("tests", properties)
