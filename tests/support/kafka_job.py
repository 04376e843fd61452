"""A Spark job that was written for Kafka."""

from __future__ import annotations

from typing import Any

from pyspark.sql import functions as F

SERVERS = "kafka-1.example.org:9093,kafka-2.example.org:9093"
SECURITY = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "PLAIN"}


def totals(spark: Any, source: str, sink: str, security: dict[str, str]) -> None:
    """Add up the numbers of each key in a topic, and write the sums to another topic."""
    rows = (
        spark.read.option("kafka.bootstrap.servers", SERVERS)
        .options(**security)
        .format("kafka")
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .load()
    )
    sums = rows.groupBy("key").agg(
        F.sum(F.col("value").cast("string").cast("int")).cast("string").alias("value")
    )
    written = (
        sums.write.format("kafka")
        .mode("append")
        .option("kafka.bootstrap.servers", SERVERS)
    )
    written.options(**security).option("topic", sink).save()


def copied(spark: Any, source: str, sink: str, checkpoint: str) -> Any:
    """Copy the current records of a topic to another topic with a stream, and return the
    query.
    """
    rows = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", SERVERS)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("failOnDataLoss", "true")
        .load()
    )
    query = (
        rows.select("key", "value")
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", SERVERS)
        .option("topic", sink)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query
