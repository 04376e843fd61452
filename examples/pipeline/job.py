"""The Spark job of the pipeline: two streams from one topic. Copy it, and change the
columns.

    python examples/pipeline/job.py DIRECTORY WORK [--rows-per-batch N]

- Each flight is written to Parquet files in WORK/flights, with its partition and offset.
- For each carrier and day, the number of flights and their minutes of delay are written
  to the compacted topic `daily`. The key is the carrier and the day, so that the topic
  holds the latest sum of each.

The job reads all present records, and ends. It may be killed at any moment and started
again: Spark stores its offsets in WORK/checkpoints, and each batch is written once.
"""

from __future__ import annotations

import argparse
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import pyspark_logcore


def flights(
    spark: SparkSession,
    directory: str,
    work: str,
    name: str,
    rows_per_batch: int,
    header: str,
) -> DataFrame:
    """Return the topic as a stream of columns; each query needs its own checkpoint."""
    lines = (
        spark.readStream.format("logcore")
        .option("subscribe", "flights")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", rows_per_batch)
        .option("checkpointLocation", f"{work}/checkpoints/{name}")
        .load(directory)
    )
    schema = ", ".join(f"{column} STRING" for column in header.split(","))
    flight = F.from_csv(F.col("value").cast("string"), schema)
    return lines.select(
        "partition", "offset", "timestamp", flight.alias("flight")
    ).select(
        "partition",
        "offset",
        "timestamp",
        "flight.carrier",
        F.expr("try_cast(flight.dep_delay AS INT)").alias("delay"),
    )


def daily(rows: DataFrame) -> DataFrame:
    """Return sums for each carrier and day, as keys and values.

    Rows that arrive more than two days late are dropped.
    """
    sums = (
        rows.withWatermark("timestamp", "2 days")
        .groupBy(F.window("timestamp", "1 day").alias("day"), "carrier")
        .agg(
            F.count("*").alias("flights"),
            F.count("delay").alias("departed"),
            F.sum("delay").alias("minutes"),
        )
    )
    key = F.concat_ws("|", "carrier", F.date_format("day.start", "yyyy-MM-dd"))
    return sums.select(
        key.alias("key"),
        F.to_json(F.struct("flights", "departed", "minutes")).alias("value"),
    )


def upsert(directory: str) -> Any:
    """Return a function that writes each batch of sums once.

    The name of a write consists of the query and the number of the batch.
    """

    def write(rows: DataFrame, batch_id: int) -> None:
        named = rows.write.format("logcore").mode("append").option("topic", "daily")
        named.option("txnAppId", "flights-daily").option("txnVersion", batch_id).save(
            directory
        )

    return write


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Flights to Parquet, and to sums for each carrier and day."
    )
    parser.add_argument("directory", help="the log directory")
    parser.add_argument("work", help="directory of checkpoints and Parquet files")
    parser.add_argument(
        "--header",
        required=True,
        help="names of the columns of a line, separated by commas",
    )
    parser.add_argument("--rows-per-batch", type=int, default=20_000)
    options = parser.parse_args()

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
    }
    builder = SparkSession.builder.master("local[2]").appName("flights")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = pyspark_logcore.tune(builder).getOrCreate()

    def stream(name: str) -> DataFrame:
        return flights(
            spark,
            options.directory,
            options.work,
            name,
            options.rows_per_batch,
            options.header,
        )

    to_files = (
        stream("files")
        .writeStream.format("parquet")
        .option("path", f"{options.work}/flights")
        .option("checkpointLocation", f"{options.work}/checkpoints/files")
        .trigger(availableNow=True)
        .start()
    )
    to_topic = (
        daily(stream("daily"))
        .writeStream.outputMode("update")
        .foreachBatch(upsert(options.directory))
        .option("checkpointLocation", f"{options.work}/checkpoints/daily")
        .trigger(availableNow=True)
        .start()
    )
    to_files.awaitTermination()
    to_topic.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
