"""The measurements of connector.py, which run in an environment with the pyspark version
that Spark's Kafka connector needs.

    python connector_job.py DIRECTORY JARS ROWS

It prints a line of JSON: for each question, the seconds (or milliseconds) of both
sides.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import common
import spark as batches
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic
from pyspark.sql import SparkSession

import logcore
import pyspark_logcore
from support.kafka_jvm import Broker

REPEATS = 3
LOOKS = 40
#: Settings for larger fetches. Most users run with the defaults.
TUNED = {
    "kafka.max.poll.records": "20000",
    "kafka.max.partition.fetch.bytes": str(16 << 20),
    "kafka.fetch.max.bytes": str(64 << 20),
    "kafka.receive.buffer.bytes": str(1 << 20),
}


class Sides:
    def __init__(self, spark: Any, path: Path, servers: str, count: int) -> None:
        self.spark = spark
        self.path = path
        self.servers = servers
        self.count = count
        self.log = str(path / "log")
        self.topics = 0
        self.admin = KafkaAdminClient(bootstrap_servers=servers)

    def make_topic(self, name: str) -> None:
        wanted = {"retention.ms": "-1"}
        self.admin.create_topics(
            [NewTopic(name, batches.PARTITIONS, 1, topic_configs=wanted)]
        )

    def ours(self, schema: str | None = None, **given: Any) -> Any:
        reader = (
            self.spark.read.format("logcore")
            .option("subscribe", "rows")
            .options(**given)
        )
        return (reader if schema is None else reader.schema(schema)).load(self.log)

    def theirs(self, **given: Any) -> Any:
        reader = self.spark.read.format("kafka").option(
            "kafka.bootstrap.servers", self.servers
        )
        return reader.option("subscribe", "rows").options(**given).load()

    def fill(self) -> None:
        """Write the same rows to both sides, and to the Parquet files that the measured
        writes read.
        """
        batches.make_log(Path(self.log), self.count)
        files = str(self.path / "parquet")
        self.ours().select("key", "value", "partition").write.parquet(files)
        self.pairs = self.spark.read.parquet(files).select("key", "value")
        self.make_topic("rows")
        writer = (
            self.spark.read.parquet(files)
            .write.format("kafka")
            .option("kafka.bootstrap.servers", self.servers)
        )
        writer.option("topic", "rows").save()
        assert self.theirs().count() == self.count

    def read(self) -> dict[str, tuple[float, float]]:
        def drop(frame: Any) -> Any:
            return lambda: frame.write.format("noop").mode("overwrite").save()

        plain = measure(drop(self.ours()), drop(self.theirs()))
        tuned = measure(drop(self.ours()), drop(self.theirs(**TUNED)))
        value = measure(
            drop(self.ours("value BINARY")), drop(self.theirs().select("value"))
        )
        return {"read": plain, "read, tuned": tuned, "value": value}

    def write(self) -> dict[str, tuple[float, float]]:
        target = str(self.path / "written")

        def ours() -> None:
            shutil.rmtree(target, ignore_errors=True)
            writer = (
                self.pairs.write.format("logcore")
                .mode("append")
                .option("topic", "rows")
            )
            writer.option("numPartitions", batches.PARTITIONS).save(target)

        def theirs() -> None:
            self.topics += 1
            self.make_topic(f"written{self.topics}")
            writer = self.pairs.write.format("kafka").option(
                "kafka.bootstrap.servers", self.servers
            )
            writer.option("topic", f"written{self.topics}").save()

        return {"write": measure(ours, theirs)}

    def stream(self) -> dict[str, tuple[float, float]]:
        def side(name: str, options: dict[str, str], path: str | None) -> Any:
            def run() -> None:
                checkpoint = self.path / f"checkpoint-{name}"
                shutil.rmtree(checkpoint, ignore_errors=True)
                reader = (
                    self.spark.readStream.format(name)
                    .options(**options)
                    .option("subscribe", "rows")
                )
                reader = reader.option("startingOffsets", "earliest")
                rows = reader.option("maxOffsetsPerTrigger", self.count // 4).load(path)
                writer = rows.writeStream.format("noop").option(
                    "checkpointLocation", str(checkpoint)
                )
                writer.trigger(availableNow=True).start().awaitTermination()

            return run

        kafka = {"kafka.bootstrap.servers": self.servers}
        return {
            "stream": measure(side("logcore", {}, self.log), side("kafka", kafka, None))
        }

    def latency(self) -> dict[str, tuple[float, float]]:
        """Measure the median time, in milliseconds, from an append to the call of the
        foreachBatch function with its row.
        """
        return {"visible": (self._latency_of_ours(), self._latency_of_theirs())}

    def _latency_of_ours(self) -> float:
        path = str(self.path / "live")
        with logcore.open_dir(path, create=True, durability="os") as directory:
            directory.create_topic("live", 1)
            log = directory.partition("live", 0)
            return self._latency(
                "logcore", {}, path, lambda value: log.append(value=value)
            )

    def _latency_of_theirs(self) -> float:
        self.make_topic("live")
        producer = KafkaProducer(bootstrap_servers=self.servers, linger_ms=0)
        try:
            kafka = {"kafka.bootstrap.servers": self.servers}
            return self._latency(
                "kafka", kafka, None, lambda value: producer.send("live", value).get()
            )
        finally:
            producer.close()

    def _latency(
        self, name: str, options: dict[str, str], path: str | None, append: Any
    ) -> float:
        seen = threading.Event()
        found: list[float] = []

        def sink(rows: Any, _: int) -> None:
            for row in rows.select("value").collect():
                found.append(time.perf_counter() - float(row["value"]))
                seen.set()

        reader = (
            self.spark.readStream.format(name)
            .options(**options)
            .option("subscribe", "live")
        )
        rows = reader.option("startingOffsets", "earliest").load(path)
        writer = rows.writeStream.foreachBatch(sink)
        query = writer.option(
            "checkpointLocation", str(self.path / f"live-{name}")
        ).start()
        try:
            for _ in range(LOOKS):
                seen.clear()
                append(b"%.6f" % time.perf_counter())
                assert seen.wait(60), "the query does not see the record"
                time.sleep(0.05)
        finally:
            query.stop()
        return statistics.median(found[5:]) * 1000


def measure(ours: Any, theirs: Any) -> tuple[float, float]:
    """Return the best of some runs in turns, after one run for warming up."""
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(REPEATS + 1):
        for side, taken in zip((ours, theirs), samples, strict=True):
            started = time.perf_counter()
            side()
            if number:
                taken.append(time.perf_counter() - started)
    return min(samples[0]), min(samples[1])


def main(place: str, jars: str, rows: str) -> None:
    builder = pyspark_logcore.tune(SparkSession.builder.master("local[2]"))
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.memory": "4g",
        "spark.sql.shuffle.partitions": "2",
        "spark.jars": jars,
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    path = Path(place)
    with Broker(path) as broker:
        sides = Sides(spark, path, broker.address, int(rows))
        sides.fill()
        common.settle()
        found = {**sides.read(), **sides.write(), **sides.stream(), **sides.latency()}
        sides.admin.close()
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
