"""Two streams of one topic in a process that is killed: a stream writes `copy`, and
named batch writes create `kept`.

    python -m support.killed_job DIRECTORY WORK
"""

from __future__ import annotations

import sys
from typing import Any

from pyspark.sql import SparkSession

import pyspark_logcore
from support.slow_source import SlowDataSource

ROWS_PER_BATCH = 200
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
}


def main(path: str, work: str) -> None:
    builder = SparkSession.builder.master("local[2,4]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = pyspark_logcore.tune(builder).getOrCreate()
    spark.dataSource.register(SlowDataSource)

    def stream(name: str) -> Any:
        reader = (
            spark.readStream.format("logcore")
            .option("subscribe", "orders")
            .option("startingOffsets", "earliest")
        )
        reader = reader.option("maxOffsetsPerTrigger", ROWS_PER_BATCH)
        rows = reader.option("checkpointLocation", f"{work}/{name}").load(path)
        return rows.select("value", "partition")

    def started(writer: Any, name: str) -> Any:
        return (
            writer.option("checkpointLocation", f"{work}/{name}")
            .trigger(availableNow=True)
            .start()
        )

    def keep(rows: Any, batch_id: int) -> None:
        named = (
            rows.write.format("slowcore")
            .mode("append")
            .option("topic", "kept")
            .option("txnAppId", "kept")
        )
        named.option("txnVersion", batch_id).option("carryBytes", 0).save(path)

    to_copy = (
        stream("copy")
        .writeStream.format("slowcore")
        .option("topic", "copy")
        .option("path", path)
    )
    queries = [
        started(to_copy, "copy"),
        started(stream("kept").writeStream.foreachBatch(keep), "kept"),
    ]
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
