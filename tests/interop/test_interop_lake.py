"""Spark reads the Delta and Iceberg tables of an export, and compacts them while the
export continues.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import lake
from support.kafka_jvm import fetch_jars
from support.lakes import KINDS, TOPIC, offsets_of, target
from support.pyspark_versions import environment_of

pytestmark = pytest.mark.interop

#: The newest Spark that both formats support.
SPARK = "4.0"
JOB = Path(__file__).parents[1] / "support" / "lake_job.py"


def run_spark(directory: Path, mode: str) -> dict[str, list[Any]]:
    folder = fetch_jars("lake.xml", "lake", "delta-spark_2.13")
    names = ",".join(
        str(path) for path in folder.iterdir() if not path.name.startswith("scala")
    )
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    for name in ("PYSPARK_PYTHON", "SPARK_HOME"):
        environment.pop(name, None)
    result = subprocess.run(
        [environment_of(SPARK), JOB, directory / "orders", directory, names, mode],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert not result.returncode, result.stderr[-4_000:]
    printed: dict[str, list[Any]] = json.loads(result.stdout.splitlines()[-1])
    return printed


def test_spark_reads_and_compacts_the_tables(tmp_path: Path) -> None:
    options = lake.ExportOptions(
        layout=lake.TableLayout(value="json", partition_by="day")
    )
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic(TOPIC, 2)

        def append(count: int) -> None:
            for number in range(count):
                value: dict[str, Any] = {"id": number}
                if number % 3 == 0:
                    value["to"] = {"city": "Ulm"}
                if number % 3 == 1:
                    value["tags"] = ["a", str(number)]
                data.append(
                    TOPIC,
                    json.dumps(value).encode(),
                    partition=number % 2,
                    timestamp_ms=1_700_000_000_123 + number * 3_600_000,
                    headers=[("source", b"web %d" % (number % 2))],
                )

        def export() -> None:
            for format_name in KINDS:
                lake.export(data, TOPIC, target(format_name, tmp_path), options)

        def expected() -> list[list[Any]]:
            rows = []
            for record in data.read(TOPIC):
                value = json.loads(record.value or b"")
                position = [record.partition, record.offset, record.timestamp_ms, 0]
                city = value.get("to", {}).get("city")
                rows.append([*position, value["id"], city, value.get("tags")])
            return rows

        append(40)
        export()
        assert run_spark(tmp_path, "read") == dict.fromkeys(KINDS, expected())
        append(40)
        export()
        assert run_spark(tmp_path, "compact") == dict.fromkeys(KINDS, expected())
        append(40)
        export()
        assert run_spark(tmp_path, "read") == dict.fromkeys(KINDS, expected())
        for format_name in KINDS:
            assert len(offsets_of(format_name, tmp_path)) == 120
