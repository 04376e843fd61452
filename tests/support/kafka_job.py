"""A Spark job as it was written for Kafka."""

from __future__ import annotations

from typing import Any

from pyspark.sql import functions as F

SERVERS = "kafka-1.example.org:9093,kafka-2.example.org:9093"
SECURITY = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "PLAIN"}


def totals(spark: Any, source: str, sink: str) -> None:
    """Sums the numbers of each key in a topic, and writes the sums into another."""
    rows = (
        spark.read.option("kafka.bootstrap.servers", SERVERS)
        .options(**SECURITY)
        .format("kafka")
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .load()
    )
    sums = rows.groupBy("key").agg(F.sum(F.col("value").cast("string").cast("int")).cast("string").alias("value"))
    sums.write.format("kafka").option("kafka.bootstrap.servers", SERVERS).options(**SECURITY).option(
        "topic", sink
    ).save()
