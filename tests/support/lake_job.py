"""Read the tables of support.lakes with Spark, and compact them.

    python lake_job.py DELTA WAREHOUSE JARS MODE

The job runs in an environment with another pyspark, so it imports no other file of the
tests. MODE is "read" or "compact". The job prints the rows of each table as one line of
JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f


def session(warehouse: str, jars: str) -> SparkSession:
    catalog = "spark.sql.catalog.local"
    return (
        SparkSession.builder.master("local[1]")
        .config("spark.jars", jars)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "1")
        .config(
            "spark.sql.extensions",
            "io.delta.sql.DeltaSparkSessionExtension,"
            "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        )
        .config(
            "spark.sql.catalog.spark_catalog",
            "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        )
        .config(catalog, "org.apache.iceberg.spark.SparkCatalog")
        .config(f"{catalog}.type", "jdbc")
        .config(f"{catalog}.uri", f"jdbc:sqlite:{warehouse}/catalog.db")
        .config(f"{catalog}.warehouse", f"file://{warehouse}")
        .config(f"{catalog}.jdbc.schema-version", "V1")
        .getOrCreate()
    )


def rows(frame: DataFrame) -> list[list[Any]]:
    milliseconds = f.unix_millis("timestamp").alias("milliseconds")
    chosen = frame.select(
        "partition", "offset", milliseconds, "timestamp_type", "id", "to.city", "tags"
    )
    return [list(row) for row in chosen.orderBy("partition", "offset").collect()]


def main(delta: str, warehouse: str, jars: str, mode: str) -> None:
    spark = session(warehouse, jars)
    if mode == "compact":
        spark.sql(f"OPTIMIZE delta.`{delta}`")
        spark.sql("CALL local.system.rewrite_data_files(table => 'shop.orders')")
    tables = {
        "delta": spark.read.format("delta").load(delta),
        "iceberg": spark.table("local.shop.orders"),
    }
    print(json.dumps({name: rows(frame) for name, frame in tables.items()}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
