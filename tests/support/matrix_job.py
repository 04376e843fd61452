"""A Spark job that runs on any pyspark from 4.0. It reads and writes in batches and in
streams.

    python -m support.matrix_job DIRECTORY WORK [SERVERS JARS]

It prints a line of JSON: the rows that it has read, and the version of pyspark. With
SERVERS, it also does the steps with a broker and Spark's Kafka connector, which is in
JARS.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pyspark
from pyspark.sql import SparkSession

import pyspark_logcore

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
}
COLUMNS = ("topic", "partition", "offset", "timestampType", "key", "value", "headers")


class Job:
    """The steps of the job with one format. `options` are the options of the format."""

    def __init__(
        self, spark: Any, name: str, options: dict[str, str], work: str
    ) -> None:
        self.spark = spark
        self.name = name
        self.options = options
        self.work = work

    def rows(self, topic: str, **given: str) -> list[list[Any]]:
        reader = (
            self.spark.read.format(self.name)
            .options(**self.options)
            .option("subscribe", topic)
        )
        frame = reader.option("includeHeaders", "true").options(**given).load()
        found = [
            [
                *(plain(row[name]) for name in COLUMNS),
                round(row["timestamp"].timestamp() * 1000),
            ]
            for row in frame.collect()
        ]
        return sorted(found, key=lambda row: row[:3])

    def copy(self, source: str, sink: str) -> None:
        reader = (
            self.spark.read.format(self.name)
            .options(**self.options)
            .option("subscribe", source)
        )
        rows = reader.load().select("key", "value", "partition")
        writer = rows.write.format(self.name).mode("append").options(**self.options)
        writer.option("topic", sink).save()

    def stream(self, source: str, sink: str) -> None:
        """Run the stream twice from one checkpoint. The second run finds no new
        records.
        """
        for _ in range(2):
            reader = (
                self.spark.readStream.format(self.name)
                .options(**self.options)
                .option("subscribe", source)
            )
            rows = (
                reader.option("startingOffsets", "earliest")
                .load()
                .select("key", "value", "partition")
            )
            writer = (
                rows.writeStream.format(self.name)
                .options(**self.options)
                .option("topic", sink)
            )
            checkpoint = f"{self.work}/{self.name}-{sink}"
            query = (
                writer.option("checkpointLocation", checkpoint)
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()


def plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, list):
        return [[header["key"], plain(header["value"])] for header in value]
    return value


def main(
    path: str, work: str, servers: str | None = None, jars: str | None = None
) -> None:
    builder = SparkSession.builder.master("local[2]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    if jars:
        builder = builder.config("spark.jars", jars)
    spark = pyspark_logcore.tune(builder).getOrCreate()
    ours = Job(spark, "logcore", {"path": path}, work)
    report: dict[str, Any] = {"pyspark": pyspark.__version__}
    if servers is None:
        report["orders"] = ours.rows("orders")
        report["part"] = ours.rows(
            "orders",
            startingOffsets=json.dumps({"orders": {"0": 3, "1": -2}}),
            endingOffsets=json.dumps({"orders": {"0": 9, "1": -1}}),
        )
        ours.copy("orders", "copy")
        ours.stream("orders", "streamed")
    else:
        theirs = Job(spark, "kafka", {"kafka.bootstrap.servers": servers}, work)
        through = Job(spark, "logcore", {"kafka.bootstrap.servers": servers}, work)
        report["theirs"] = theirs.rows("orders")
        report["ours"] = ours.rows("orders")
        report["through"] = through.rows("orders")
        committed = {"kafka.isolation.level": "read_committed"}
        report["theirs committed"] = theirs.rows("orders", **committed)
        report["ours committed"] = ours.rows("orders", **committed)
        by_time = {
            "startingTimestamp": "1700000000005",
            "endingTimestamp": "1700000000012",
        }
        report["theirs by time"] = theirs.rows("orders", **by_time)
        report["ours by time"] = ours.rows("orders", **by_time)
        theirs.copy("orders", "copy")
        theirs.stream("orders", "streamed")
    spark.stop()
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
