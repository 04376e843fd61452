"""Maintenance commands: dump, verify, recover, compact, scrub, retention, delete-records
and roll.

Rules:
- dump and verify only read, even while another process writes. recover writes only its
  copy.
- compact, scrub, retention, delete-records and roll acquire the writer's lock.

The work is done by inspect/, cleaner.py, retention.py and the log itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Generator
from typing import TypeVar

import attrs
import click

import logcore
from logcore.cli.arguments import (
    named_directories,
    named_partitions,
    offset_within,
    topic_argument,
)
from logcore.cli.options import (
    DAMAGED,
    config_option,
    directory_argument,
    fail,
    full_option,
    json_option,
    setting,
)
from logcore.cli.terminal import (
    Lines,
    plain_text,
    print_problems,
    print_table,
    print_verdicts,
    progress,
    size_text,
    to_json,
    wants_json,
)
from logcore.errors import (
    CorruptBatchError,
    CorruptLogError,
    InvalidNameError,
    LogNotFoundError,
    StorageReadError,
)
from logcore.metadata.filenames import (
    OFFSETS_TOPIC,
    parse_partition_name,
    partition_name,
)
from logcore.partition.checksum_file import ScrubProgress, unopened

_T = TypeVar("_T")


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
@click.option("--records", is_flag=True, help="Also show the records of .log files.")
@json_option
def dump(files: tuple[str, ...], records: bool, as_json: bool) -> None:
    """Show the content of log files: .log, .index, .timeindex, .txnindex, .snapshot,
    checkpoints and small metadata files.

    With --records, it also decodes the records of __consumer_offsets,
    __transaction_state and __cluster_metadata, and of .checkpoint files.

    A damaged batch is marked as damaged. `logcore verify` checks a whole directory.
    """
    from logcore.inspect.dump import dump as rows_of

    with Lines() as out:
        for file in files:
            if wants_json(as_json):
                for row in rows_of(file, records=records):
                    out.write(to_json({"file": file, **row}))
                continue
            out.write(file)
            for row in rows_of(file, records=records):
                fields = " ".join(
                    f"{name}={plain_text(value)}"
                    for name, value in row.items()
                    if name != "type"
                )
                indent = "  "
                if row["type"] == "record":
                    indent = "      "
                out.write(f"{indent}{row['type']}  {fields}")


@click.command()
@directory_argument
@topic_argument
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="At a terminal: print a line for each file, not only for damaged files.",
)
@full_option
@json_option
def verify(
    directory: str, topic: str | None, verbose: bool, full: bool, as_json: bool
) -> None:
    """Check every file of a log directory, a topic or a partition, read-only; exit code
    1 if a file is damaged.

    ok: the file is correct. warning: opening the log repairs the file. damaged: data may
    be lost or wrong. The .log files are checked batch by batch, including CRCs. A
    terminal shows the findings and a summary; a pipe or --json gets one object for each
    file.
    """
    from logcore.inspect.verify import Verdict
    from logcore.inspect.verify import verify as verdicts_of

    paths = [directory]
    if topic is not None:
        paths = named_directories(directory, topic)
    found: list[Verdict] = []
    streaming = wants_json(as_json)
    with Lines() as out, progress("verifying", None) as tick:
        for path in paths:
            for verdict in verdicts_of(path):
                found.append(verdict)
                tick(1)
                if streaming:
                    out.write(to_json(verdict.as_dict()))
    counts = {
        status: sum(verdict.status == status for verdict in found)
        for status in ("damaged", "warning", "ok")
    }
    if not streaming:
        within = directory.rstrip(os.sep)
        if verbose:
            print_verdicts(found, within=within, full=full)
        if not (verbose and full):
            print_problems(
                [verdict for verdict in found if verdict.status != "ok"], within=within
            )
        batches = sum(verdict.batches for verdict in found)
        records = sum(verdict.records for verdict in found)
        size = size_text(
            sum(verdict.size_bytes for verdict in found if verdict.kind == "log")
        )
        click.echo(
            f"{batches:,} batches, {records:,} records, {size} checked in {_counted(counts)}"
        )
    if counts["damaged"]:
        if not streaming:
            click.echo(
                "next:  `logcore recover SRC DST` copies all intact records", err=True
            )
        raise click.exceptions.Exit(DAMAGED)


def _counted(counts: dict[str, int]) -> str:
    files = sum(counts.values())
    each = (
        ", ".join(f"{count:,} {status}" for status, count in counts.items() if count)
        or "nothing to check"
    )
    return f"{files:,} file{'s' * (files != 1)}: {each}"


@click.command()
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@json_option
def recover(source: str, target: str, as_json: bool) -> None:
    """Copy all intact batches of a damaged partition or log directory SRC to a new
    directory DST.

    Batches before and after the damage are copied unchanged, with their offsets. SRC is
    not changed, and no process may write it during the copy. Exit code 1 if records are
    lost; lost ranges are listed by bytes and by offsets.
    """
    from logcore.inspect.salvage import Part, salvage

    with progress("reading", None) as tick:
        report = salvage(source, target, tick=tick)
    if wants_json(as_json):
        with Lines() as out:
            out.write(to_json(report.as_dict()))
    else:
        headers = (
            "partition",
            "files",
            "batches",
            "records",
            "size",
            "start",
            "end",
            "losses",
        )
        rows = [
            (
                os.path.basename(partition.target),
                partition.files,
                partition.batches,
                partition.records,
                size_text(partition.size_bytes),
                partition.log_start_offset,
                partition.log_end_offset,
                len(partition.lost),
            )
            for partition in report.partitions
        ]
        print_table(headers, rows, right=range(1, len(headers)))

        def parts_of(name: str) -> list[Part]:
            return [
                part
                for partition in (report, *report.partitions)
                for part in getattr(partition, name)
            ]

        for part in parts_of("lost"):
            click.echo(f"lost: {part}")
        for part in parts_of("left_out"):
            click.echo(f"left out, no loss: {part}")
        click.echo(
            "all records were saved"
            if report.is_whole
            else "the ranges listed as lost are not in the copy"
        )
    if not report.is_whole:
        raise click.exceptions.Exit(DAMAGED)


def _open_partitions(
    stack: contextlib.ExitStack,
    directory: str,
    topic: str | None,
    configs: tuple[str, ...] = (),
) -> list[logcore.Log]:
    """Open the logs that the arguments name for writing, with the settings of their
    topics.
    """
    found = _partitions_to_open(stack, directory, topic, configs)
    return [opened() for _, opened in found]


def _partitions_to_open(
    stack: contextlib.ExitStack,
    directory: str,
    topic: str | None,
    configs: tuple[str, ...] = (),
) -> list[tuple[str, Callable[[], logcore.Log]]]:
    """Return the path of each such partition, and a function that opens it.

    These are the partition whose directory is given, the partitions that
    TOPIC[:PARTITION] names, or all partitions of a log directory.
    """
    settings = dict(map(setting, configs))
    real = os.path.realpath(directory)
    with contextlib.suppress(InvalidNameError):
        name, number = parse_partition_name(os.path.basename(real))
        if topic is not None:
            fail(
                f"{directory} is the directory of one partition",
                f"leave out {topic}, or name {os.path.dirname(real)}",
            )
        logdir = stack.enter_context(
            logcore.open_dir(os.path.dirname(real), config=settings)
        )
        if name in logdir and number in logdir.partitions(name):
            return [(real, functools.partial(logdir.partition, name, number))]
        raise LogNotFoundError("there is no such partition", path=directory)
    logdir = stack.enter_context(logcore.open_dir(real, config=settings))
    wanted = [(name, logdir.partitions(name)) for name in logdir.topics()]
    if topic is not None:
        wanted = [named_partitions(logdir, topic)]
    return [
        (
            os.path.join(real, partition_name(name, number)),
            functools.partial(logdir.partition, name, number),
        )
        for name, numbers in wanted
        for number in numbers
    ]


def _finished(
    steps: Generator[ScrubProgress, None, _T], tick: Callable[[int], None]
) -> _T:
    """Run all steps of a generator, report progress, and return the generator's result."""
    done = 0
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        tick(step.done_bytes - done)
        done = step.done_bytes


@click.command()
@directory_argument
@topic_argument
@click.option(
    "--force",
    is_flag=True,
    help="Also compact logs below the dirty ratio, and roll their active segments first.",
)
@click.option(
    "--memory",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Memory for the table of keys, in MiB.",
)
@config_option
@json_option
def compact(
    directory: str,
    topic: str | None,
    force: bool,
    memory: int,
    configs: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compact a partition, or all partitions of a log directory whose cleanup.policy is
    compact.

    The last record of each key remains. --config cleanup.policy=compact applies to
    topics that do not set cleanup.policy.
    """
    from logcore.cleaner import cleaning, plan_of

    with contextlib.ExitStack() as stack, Lines() as out:
        rows = []
        for log in _open_partitions(stack, directory, topic, configs):
            if not log.config.is_compacted:
                continue
            if force:
                log.roll()
            plan = plan_of(log)
            with progress(
                os.path.basename(log.path), plan.clean_bytes + 2 * plan.cleanable_bytes
            ) as tick:
                report = _finished(
                    cleaning(log, force=force, memory_bytes=memory << 20), tick
                )
            if report is None:
                continue
            if wants_json(as_json):
                out.write(to_json(attrs.asdict(report)))
            rows.append(
                (
                    os.path.basename(log.path),
                    report.records_read,
                    report.records_kept,
                    size_text(report.bytes_before),
                    size_text(report.bytes_after),
                    report.segments_before,
                    report.segments_after,
                )
            )
    if not wants_json(as_json):
        headers = ("partition", "records", "kept", "size", "left", "segments", "left")
        print_table(headers, rows, right=range(1, 7))


@click.command()
@directory_argument
@topic_argument
@json_option
def scrub(directory: str, topic: str | None, as_json: bool) -> None:
    """Read every byte of a partition, or of all partitions of a log directory, and
    report damage.

    A segment with a checksum file must be unchanged, byte for byte. If the checksum file
    is missing, or another program wrote the segment since, the batches are checked and a
    checksum file is written. Exit code 1 if a file is damaged. The command acquires the
    writer's lock; `logcore verify` works while another process writes, and writes no
    checksum files.
    """
    found: list[logcore.ScrubReport] = []
    with contextlib.ExitStack() as stack, Lines() as out:
        for path, opened in _partitions_to_open(stack, directory, topic):
            try:
                log = opened()
                with progress(
                    os.path.basename(path), log.statistics().size_bytes
                ) as tick:
                    report = _finished(log.scrubbing(), tick)
            except (CorruptLogError, CorruptBatchError, StorageReadError) as error:
                # The remaining partitions are still checked.
                report = unopened(path, error)
            found.append(report)
            if wants_json(as_json):
                out.write(
                    to_json({**attrs.asdict(report), "is_sound": report.is_sound})
                )
    if not wants_json(as_json):
        rows = [
            (
                os.path.basename(report.path),
                report.segments,
                report.sealed,
                report.skipped,
                size_text(report.checked_bytes),
                len(report.findings),
            )
            for report in found
        ]
        print_table(
            ("partition", "segments", "sealed", "skipped", "checked", "damaged"),
            rows,
            right=range(1, 6),
        )
        for scrubbed in found:
            for finding in scrubbed.findings:
                click.echo(str(finding))
    if not all(report.is_sound for report in found):
        raise click.exceptions.Exit(DAMAGED)


@click.command()
@directory_argument
@topic_argument
@click.option(
    "--delete",
    "is_delete",
    is_flag=True,
    help="Delete the segments. Without this option nothing is changed.",
)
@click.option(
    "--hold",
    "groups",
    metavar="GROUP",
    multiple=True,
    help="Keep records that this group has not read. Repeatable.",
)
@config_option
@json_option
def retention(
    directory: str,
    topic: str | None,
    is_delete: bool,
    groups: tuple[str, ...],
    configs: tuple[str, ...],
    as_json: bool,
) -> None:
    """List the segments that the settings would delete: retention.ms, retention.bytes,
    and the log start.

    --config retention.ms=... tries other settings, for topics that do not set them.
    """
    from logcore.coordinators.stored_offsets import committed_in
    from logcore.retention import hold_for

    policy = hold_for(*groups)
    with contextlib.ExitStack() as stack, Lines() as out:
        rows = []
        logs = _open_partitions(stack, directory, topic, configs)
        offsets_logs = [
            log
            for log in logs
            if parse_partition_name(os.path.basename(log.path))[0] == OFFSETS_TOPIC
        ]
        if groups:
            committed = committed_in([*offsets_logs])
        else:
            committed = {}
        for log in logs:
            known = committed.get(parse_partition_name(os.path.basename(log.path)), {})
            facts = log.host.maintenance.facts(committed=known)
            count = max(0, min(policy(facts), facts.deletable))
            gone = facts.segments[:count]
            if is_delete:
                log.retain(policy=policy, committed=known)
            freed = sum(segment_facts.size_bytes for segment_facts in gone)
            start = gone[-1].end_offset if gone else facts.log_start
            row = {
                "partition": os.path.basename(log.path),
                "segments": len(facts.segments),
                "deleted" if is_delete else "would_delete": count,
                "size_bytes": freed,
                "log_start_offset": start,
            }
            if wants_json(as_json):
                out.write(to_json(row))
            rows.append((*list(row.values())[:3], size_text(freed), start))
    if not wants_json(as_json):
        done = "would go"
        if is_delete:
            done = "deleted"
        print_table(
            ("partition", "segments", done, "size", "start then"),
            rows,
            right=range(1, 5),
        )


@click.command()
@directory_argument
@topic_argument
@click.option(
    "--before",
    "place",
    metavar="PLACE",
    required=True,
    help="Delete records before this offset, latest, time, or age as -10m.",
)
@json_option
def delete_records(
    directory: str, topic: str | None, place: str, as_json: bool
) -> None:
    """Delete the records of a partition or topic before a place, to free space now.

    Readers see the new start at once. Disk space is freed for whole segments: run
    `logcore roll` first to include the last one. This works on a full disk.
    """
    with contextlib.ExitStack() as stack, Lines() as out:
        rows = []
        # Files are deleted when the log is closed, and not a minute later.
        configs = ("file.delete.delay.ms=0",)
        if topic is None and _is_directory_of_topics(directory):
            fail(
                f"{directory} is a directory of topics: name one of them",
                "records of all topics are deleted by `logcore retention --delete`",
            )
        for log in _open_partitions(stack, directory, topic, configs):
            before = log.statistics().size_bytes
            start = log.log_start_offset
            log.delete_records(offset_within(log, place, time.time_ns() // 1_000_000))
            name = os.path.basename(log.path)
            freed = before - log.statistics().size_bytes
            row = {
                "partition": name,
                "start_before": start,
                "log_start_offset": log.log_start_offset,
                "freed_bytes": freed,
            }
            if wants_json(as_json):
                out.write(to_json(row))
            rows.append((name, start, log.log_start_offset, size_text(freed)))
    if not wants_json(as_json):
        headers = ("partition", "start before", "start", "freed")
        print_table(headers, rows, right=range(1, 4))


def _is_directory_of_topics(directory: str) -> bool:
    with contextlib.suppress(InvalidNameError):
        parse_partition_name(os.path.basename(os.path.realpath(directory)))
        return False
    return True


@click.command()
@directory_argument
@topic_argument
@json_option
def roll(directory: str, topic: str | None, as_json: bool) -> None:
    """Begin a new segment in a partition, a topic, or all topics.

    Retention, compaction and delete-records remove whole segments, and never the last
    one. An empty last segment is left as it is.
    """
    with contextlib.ExitStack() as stack, Lines() as out:
        rows = []
        for log in _open_partitions(stack, directory, topic):
            log.roll()
            row = {
                "partition": os.path.basename(log.path),
                "base_offset": log.log_end_offset,
                "segments": log.statistics().segments,
            }
            if wants_json(as_json):
                out.write(to_json(row))
            rows.append(tuple(row.values()))
    if not wants_json(as_json):
        print_table(("partition", "begins at", "segments"), rows, right=(1, 2))
