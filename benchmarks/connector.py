"""How fast is format("logcore") beside Spark's own Kafka connector, which reads and
writes an Apache Kafka on loopback?

Method: one session, local[2], set up by pyspark_logcore.tune(), in an environment with
the newest pyspark for which a connector exists. Four million records (400,000 with
--quick) of random 16-byte keys and 100-byte values, in two partitions, the same in
both. The sides take turns, and of three samples the best counts.
- Read: every column into the noop sink; with the connector's defaults, and with larger
  fetches.
- Value: that column alone; with .schema("value BINARY"), and .select("value").
- Write: key and value, read from Parquet files. logcore syncs and publishes at once;
  Kafka does neither.
- Stream: AvailableNow from the beginning in four batches, to the noop sink, from
  start() to the end.
- Visible: from an append to the foreachBatch function that has its row, without a
  trigger interval; median of 35.

Needs Java, Maven and uv. Not shown: the network, more than one broker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import common
from common import Result, Settings

#: Question, target and remark of each row.
ROWS = {
    "read": ("Spark read, all columns", 2.8, "The connector as it comes."),
    "read, tuned": (
        "Spark read, tuned connector",
        1.6,
        "max.poll.records 20000, fetches of 16 MiB.",
    ),
    "value": ("Spark read, value alone", 3.8, 'With .schema("value BINARY").'),
    "write": ("Spark write, key and value", 2.3, "Kafka does not sync."),
    "stream": ("Spark stream, full load", 2.0, "AvailableNow, four batches."),
}


def run(settings: Settings) -> Iterator[Result]:
    sys.path.insert(0, str(common.ROOT / "tests"))
    from _pytest.outcomes import Skipped

    from support.pyspark_versions import CONNECTOR, connector_jars, environment_of

    try:
        python = environment_of(CONNECTOR)
        jars = connector_jars()
    except Skipped as reason:
        print(f"skipping Spark's Kafka connector: {reason}", file=sys.stderr)
        return
    count = 400_000 if settings.quick else 4_000_000
    with common.scratch(settings, "connector") as path:
        folders = [common.ROOT / "benchmarks", common.ROOT / "tests"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        for name in ("PYSPARK_PYTHON", "SPARK_HOME"):
            environment.pop(name, None)
        command = [
            str(python),
            str(common.ROOT / "benchmarks" / "connector_job.py"),
            str(path),
            jars,
            str(count),
        ]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (question, target, method) in ROWS.items():
        ours, theirs = found[name]
        yield Result(
            question=question,
            unit="records/s",
            ours=count / ours,
            peer_name="connector",
            peer=count / theirs,
            ratio=theirs / ours,
            target=target,
            method=method,
        )
    ours, theirs = found["visible"]
    yield Result(
        question="Spark, append to visible",
        unit="ms",
        ours=ours,
        peer_name="connector",
        peer=theirs,
        ratio=ours / theirs,
        target=1.0,
        bound="at most",
        method="foreachBatch, no trigger interval.",
    )
