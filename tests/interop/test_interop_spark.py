"""Each minor version of pyspark from 4.0 on runs one job, as a batch and as a stream.
Spark's Kafka connector with netshim returns the same rows as format("logcore"). uv
installs each pyspark once into a directory of build/. Needs Java 17, and for the
connector Maven. Run by `make interop`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import logcore
import netshim
import pyspark_logcore
from support.environments import ROOT
from support.pyspark_versions import CONNECTOR, connector_jars, environment_of

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]
MINORS = ("4.0", "4.1", "4.2", "4.3")
ROWS = 20


def run(minor: str, *args: str) -> dict[str, Any]:
    """Return the report of the job."""
    try:
        pyspark_logcore.ensure_java()
    except pyspark_logcore.JavaNotFoundError as error:
        pytest.skip(str(error))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tests"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    for name in ("PYSPARK_PYTHON", "SPARK_HOME"):
        environment.pop(name, None)
    command = [str(environment_of(minor)), "-m", "support.matrix_job", *args]
    result = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert report["pyspark"].startswith(minor)
    return report


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        for topic in ("orders", "copy", "streamed"):
            directory.create_topic(topic, 2, {"retention.ms": -1})
        for partition in (0, 1):
            directory.partition("orders", partition).append_many(
                [
                    (
                        b"k%d" % number if number % 4 else None,
                        b"v%d" % number if number % 5 else None,
                        [("h", b"x"), ("h", None)] if number % 2 else [],
                        1_700_000_000_000 + number,
                    )
                    for number in range(ROWS)
                ]
            )
    return path


def rows_of(
    path: Path, topic: str, first: int = 0, last: int = ROWS
) -> list[list[Any]]:
    """Return the rows as in the report of the job, but read by logcore."""
    rows = []
    with logcore.open_dir(path, read_only=True) as directory:
        for partition in (0, 1):
            for record in directory.partition(topic, partition).read(first):
                if record.offset < last:
                    key = None if record.key is None else record.key.hex()
                    value = None if record.value is None else record.value.hex()
                    headers = [
                        [name, None if data is None else data.hex()]
                        for name, data in record.headers
                    ] or None
                    rows.append(
                        [
                            topic,
                            partition,
                            record.offset,
                            0,
                            key,
                            value,
                            headers,
                            record.timestamp_ms,
                        ]
                    )
    return rows


def pairs_of(path: Path, topic: str) -> list[list[Any]]:
    """Return the rows without the fields that a copy does not keep."""
    return [[row[1], row[4], row[5]] for row in rows_of(path, topic, last=1000)]


@pytest.mark.parametrize("minor", MINORS)
def test_job_reads_and_copies_all_rows_with_each_pyspark(
    data: Path, tmp_path: Path, minor: str
) -> None:
    report = run(minor, str(data), str(tmp_path))
    expected = rows_of(data, "orders")
    assert report["orders"] == expected
    assert report["part"] == [row for row in expected if row[1] == 1 or 3 <= row[2] < 9]
    for topic in ("copy", "streamed"):
        assert pairs_of(data, topic) == pairs_of(data, "orders")


def test_kafka_connector_of_spark_returns_the_same_rows(
    data: Path, tmp_path: Path
) -> None:
    needed = connector_jars()
    with netshim.serve(str(data)) as broker:
        report = run(
            CONNECTOR, str(data), str(tmp_path), broker.bootstrap_servers, needed
        )
    expected = rows_of(data, "orders")
    for name in ("theirs", "ours", "through", "theirs committed", "ours committed"):
        assert report[name] == expected, name
    assert report["ours by time"] == report["theirs by time"]
    assert [row[2] for row in report["ours by time"]] == [*range(5, 12)] * 2
    for topic in ("copy", "streamed"):
        assert pairs_of(data, topic) == pairs_of(data, "orders")
