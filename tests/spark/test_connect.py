"""Tests of the data source with Spark Connect, whose driver runs in another process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import logcore

PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
from pyspark_logcore import ensure_java

ensure_java()
data = sys.argv[1]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
orders = spark.read.format("logcore").option("subscribe", "orders").load(data)
found = [type(spark).__module__, orders.count()]
rows = orders.select("key", "value")
rows.write.format("logcore").mode("append").option("topic", "copy").save(data)
stream = (
    spark.readStream.format("logcore")
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load(data)
    .select("key", "value")
)
query = (
    stream.writeStream.format("logcore")
    .option("topic", "streamed")
    .option("checkpointLocation", data + "-checkpoint")
    .trigger(availableNow=True)
    .start(data)
)
query.awaitTermination()
print(json.dumps(found))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spark_connect_reads_writes_and_streams(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    if importlib.util.find_spec("grpc_status") is None:
        pytest.skip("needs pip install 'pyspark[connect]'")
    data = tmp_path / "data"
    values = [b"%d" % number for number in range(100)]
    with logcore.open_dir(data, create=True, durability="os") as directory:
        directory.create_topic("orders", 2)
        for value in values:
            directory.append("orders", value, key=value)
    # The server starts the Python of this variable.
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(data)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed == ["pyspark.sql.connect.session", 100]
    with logcore.open_dir(data) as directory:
        for topic in ("copy", "streamed"):
            stored = sorted(record.value or b"" for record in directory.read(topic))
            assert stored == sorted(values)
