"""`logcore group`: list, describe, reset, move and delete the consumer groups of a log
directory.

Rules:
- Commands that only read acquire no lock and work while a broker or another process
  writes. Commands that change a group open the directory for writing, exclusively or
  shared with processes that share it.
- The committed offsets of a group are changed only while the group has no members,
  unless export or import is forced.
- A place is written as for `logcore read`: an offset, earliest, latest, now, a time, or
  an age.

The work is done by coordinators/group_descriptions.py, consumer/ and registry/.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping

import attrs
import click

import logcore
from logcore.cli.arguments import named_partitions, parse_offset
from logcore.cli.opening import open_to_write
from logcore.cli.options import (
    CommandGroup,
    confirm_deletion,
    fail,
    json_option,
    log_directory_argument,
)
from logcore.cli.terminal import Lines, print_table, time_text, to_json, wants_json
from logcore.coordinators.group_descriptions import GroupDescription, read_groups
from logcore.coordinators.shared_groups import live_members
from logcore.errors import LogNotFoundError
from logcore.metadata.checkpoint import Key
from logcore.registry import Registry, offsets, open_registry

_group_argument = click.argument("name", metavar="GROUP")


@click.group(cls=CommandGroup)
def group() -> None:
    """List, describe, reset, move and delete the consumer groups of a log directory."""


@group.command("list")
@log_directory_argument
@json_option
def group_list(directory: str, as_json: bool) -> None:
    """List the groups in DIR that have committed offsets or members, with their lag."""
    with logcore.open_dir(directory, read_only=True) as logdir:
        rows = [
            (
                name,
                len(group.members),
                len({each.topic for each in group.offsets}),
                len(group.offsets),
                group.lag,
            )
            for name, group in logdir.groups().items()
        ]
    names = ("group", "members", "topics", "partitions", "lag")
    if not wants_json(as_json):
        print_table(names, rows, right=range(1, 5))
        return
    with Lines() as out:
        for row in rows:
            out.write(to_json(dict(zip(names, row, strict=True))))


@group.command("describe")
@log_directory_argument
@_group_argument
@json_option
def group_describe(directory: str, name: str, as_json: bool) -> None:
    """Show the committed offset and the lag of GROUP for each partition.

    The lag counts offsets up to the high watermark. It is "-" if the partition is in
    another directory. The owner is the member that reads the partition now, if the
    members are processes that share the directory.
    """
    places = _described(directory, name).offsets
    if not wants_json(as_json):
        rows = [
            (
                place.topic,
                place.partition,
                place.committed,
                _or_dash(place.end),
                _or_dash(place.lag),
                time_text(place.commit_ms),
                place.owner or "-",
            )
            for place in places
        ]
        print_table(
            ("topic", "partition", "committed", "end", "lag", "since", "owner"),
            rows,
            right=range(1, 5),
        )
        return
    with Lines() as out:
        for place in places:
            out.write(to_json({"group": name, **attrs.asdict(place), "lag": place.lag}))


@group.command("members")
@log_directory_argument
@_group_argument
@json_option
def group_members(directory: str, name: str, as_json: bool) -> None:
    """List the members of GROUP and the partitions assigned to each member.

    Members in processes that share the directory are read from the registry, with the
    process id and whether the process is alive. Members of a broker, or of a process
    that locks the directory exclusively, are read from the last stored rebalance.
    """
    members = _described(directory, name).members
    if not wants_json(as_json):
        names = ("member", "instance", "client", "host", "pid", "alive", "partitions")
        cells = [
            (
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.pid,
                member.is_alive,
                _partitions_text(member.partitions),
            )
            for member in members
        ]
        print_table(names, [tuple(map(_cell_text, cell)) for cell in cells], right=(4,))
        return
    with Lines() as out:
        for member in members:
            out.write(
                to_json(
                    {
                        "group": name,
                        "member": member.member_id,
                        "instance": member.instance_id,
                        "client": member.client_id,
                        "host": member.client_host,
                        "pid": member.pid,
                        "alive": member.is_alive,
                        "partitions": [
                            {"topic": topic, "partition": number}
                            for topic, number in member.partitions
                        ],
                    }
                )
            )


def _partitions_text(partitions: tuple[Key, ...]) -> str:
    """Return partitions as text such as `t:0,1 u:3`."""
    numbers: dict[str, list[str]] = {}
    for topic, number in sorted(partitions):
        numbers.setdefault(topic, []).append(str(number))
    return " ".join(f"{topic}:{','.join(those)}" for topic, those in numbers.items())


@group.command("reset")
@log_directory_argument
@_group_argument
@click.option(
    "--topic",
    "topics",
    metavar="TOPIC[:PARTITION]",
    multiple=True,
    help="Default: all partitions with a committed offset.",
)
@click.option(
    "--to",
    "place",
    metavar="PLACE",
    help="Offset, earliest, latest, time, or age as -10m.",
)
@click.option("--shift-by", type=int, help="Offsets to move forward, or back.")
@click.option("--live", is_flag=True, help="Also while the group has members.")
@click.option("--dry-run", is_flag=True, help="Show the changes without making them.")
@json_option
def group_reset(
    directory: str,
    name: str,
    topics: tuple[str, ...],
    place: str | None,
    shift_by: int | None,
    live: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Set the committed offsets of GROUP; its members must have ended.

    With --live the members may run, if their processes share the directory: they lose
    their partitions, join again and begin at the new offsets. An offset outside the log
    becomes its start or its end. For a group that does not exist yet, name topics.
    """
    if (place is None) == (shift_by is None):
        raise click.UsageError("give one of --to and --shift-by")
    now_ms = time.time_ns() // 1_000_000
    with (
        logcore.open_dir(directory, read_only=True)
        if dry_run
        else open_to_write(directory) as logdir
    ):
        stored = read_groups(logdir).offsets.get(name, {})
        chosen = [
            (topic, number)
            for topic in stored
            if topic in logdir
            for number in stored[topic]
        ]
        if topics:
            named = [named_partitions(logdir, text) for text in topics]
            chosen = [(topic, number) for topic, numbers in named for number in numbers]
        if not chosen:
            fail(
                f"group {name} has no committed offsets for topics in {directory}",
                "name topics with --topic",
            )
        changes: dict[tuple[str, int], tuple[int | None, int]] = {}
        for topic, number in sorted(set(chosen)):
            log = logdir.partition(topic, number)
            committed = stored.get(topic, {}).get(number)
            before = None if committed is None else committed.offset
            wanted = (
                parse_offset(log, place, now_ms)
                if place is not None
                else (before or 0) + (shift_by or 0)
            )
            wanted = min(max(wanted, log.log_start_offset), log.high_watermark)
            changes[topic, number] = (before, wanted)
        if not dry_run:
            wanted_offsets = {
                partition: wanted for partition, (_, wanted) in changes.items()
            }
            logdir.alter_group_offsets(name, wanted_offsets, force=live)
    _print_changes(name, changes, as_json, is_done=not dry_run)


def _print_changes(
    name: str,
    changes: Mapping[Key, tuple[int | None, int]],
    as_json: bool,
    *,
    is_done: bool,
) -> None:
    names = ("topic", "partition", "before", "after")
    rows = [(*partition, *change) for partition, change in changes.items()]
    if not wants_json(as_json):
        print_table(
            names,
            [(*row[:2], _or_dash(row[2]), row[3]) for row in rows],
            right=range(1, 4),
        )
        return
    with Lines() as out:
        for row in rows:
            out.write(
                to_json(
                    {
                        "group": name,
                        **dict(zip(names, row, strict=True)),
                        "done": is_done,
                    }
                )
            )


_zookeeper_option = click.option(
    "--zookeeper",
    "hosts",
    metavar="HOSTS",
    help="A registry in ZooKeeper, as host:port[,...][/path].",
)
_force_option = click.option(
    "--force", is_flag=True, help="Also while the group has members."
)
_dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show the changes without making them."
)


@group.command("export")
@log_directory_argument
@_group_argument
@_zookeeper_option
@_force_option
@_dry_run_option
@json_option
def group_export(
    directory: str,
    name: str,
    hosts: str | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy the committed offsets of GROUP to the registry, DIR.registry, in the layout
    of the first Kafka.

    The members of GROUP must have ended. With --force, offsets that they commit during
    the export are not in the registry.
    """
    with _opened(directory, hosts, dry_run) as (logdir, registry):
        _check_members(directory, name, force)
        changes = _changes(name, _stored(logdir, name), _committed(registry, name))
        if registry is not None and not dry_run:
            offsets.rewind(
                registry,
                name,
                {partition: after for partition, (_, after) in changes.items()},
            )
    _print_changes(name, changes, as_json, is_done=not dry_run)


@group.command("import")
@log_directory_argument
@_group_argument
@_zookeeper_option
@_force_option
@_dry_run_option
@json_option
def group_import(
    directory: str,
    name: str,
    hosts: str | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy the committed offsets of GROUP from the registry, DIR.registry.

    The members of GROUP must have ended. With --force they lose their partitions, join
    again and begin at the imported offsets.
    """
    with _opened(directory, hosts, dry_run) as (logdir, registry):
        _check_members(directory, name, force)
        changes = _changes(name, _committed(registry, name), _stored(logdir, name))
        if not dry_run and changes:
            wanted = {partition: after for partition, (_, after) in changes.items()}
            logdir.alter_group_offsets(name, wanted, force=force)
    _print_changes(name, changes, as_json, is_done=not dry_run)


def _stored(logdir: logcore.LogDir, name: str) -> dict[tuple[str, int], int]:
    """Return the committed offsets of a group in the directory."""
    stored = read_groups(logdir).offsets.get(name, {})
    return {
        (topic, number): each.offset
        for topic in stored
        for number, each in stored[topic].items()
    }


@contextlib.contextmanager
def _opened(
    directory: str, hosts: str | None, dry_run: bool
) -> Generator[tuple[logcore.LogDir, Registry | None]]:
    """Open the directory and the registry.

    The registry is None if it does not exist and `dry_run` prevents its creation.
    """
    with contextlib.ExitStack() as stack:
        logdir = (
            logcore.open_dir(directory, read_only=True)
            if dry_run
            else open_to_write(directory)
        )
        stack.enter_context(logdir)
        registry: Registry | None = None
        if hosts is not None:
            from logcore.registry.zookeeper import connect

            registry = stack.enter_context(connect(hosts))
        else:
            with contextlib.suppress(LogNotFoundError):
                registry = stack.enter_context(
                    open_registry(directory, read_only=dry_run)
                )
        yield logdir, registry


def _committed(registry: Registry | None, name: str) -> dict[Key, int]:
    return {} if registry is None else offsets.committed(registry, name)


def _check_members(directory: str, name: str, force: bool) -> None:
    """End the command if GROUP has live members, unless forced.

    Only members in processes that share the directory are checked: the write lock
    excludes every other writer.
    """
    with (
        contextlib.suppress(LogNotFoundError),
        open_registry(directory, read_only=True) as registry,
    ):
        count = len(live_members(registry, name))
        if count and not force:
            fail(
                f"group {name} has {count} members",
                "stop its consumers, or give --force",
            )
        if count:
            click.echo(f"warning: group {name} has {count} live members", err=True)


def _changes(
    name: str, source: Mapping[Key, int], present: Mapping[Key, int]
) -> dict[Key, tuple[int | None, int]]:
    """Return the present and the new offset of each partition whose offset changes."""
    if not source:
        fail(
            f"group {name} has no offsets to copy",
            "`logcore group list` and `logcore registry tree` show the stored offsets",
        )
    return {
        partition: (present.get(partition), offset)
        for partition, offset in sorted(source.items())
        if present.get(partition) != offset
    }


@group.command("delete")
@log_directory_argument
@_group_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def group_delete(directory: str, name: str, yes: bool) -> None:
    """Delete GROUP with all its committed offsets.

    The command asks first. Without a terminal it needs --yes.
    """
    # Read-only, so that no lock is held while the command waits for the answer.
    count = len(_described(directory, name).offsets)
    if not yes:
        parts = f"{count} partition{'s' * (count != 1)}"
        confirm_deletion(name, f"Delete group {name} with the offsets of {parts}?")
    with open_to_write(directory) as logdir:
        logdir.delete_group(name)


def _described(directory: str, name: str) -> GroupDescription:
    with logcore.open_dir(directory, read_only=True) as logdir:
        found = logdir.groups().get(name)
    if found is not None:
        return found
    if not _registered(directory, name):
        fail(
            f"there is no group {name} in {directory}",
            "`logcore group list` shows the existing groups",
        )
    return GroupDescription(name, (), ())


def _registered(directory: str, name: str) -> dict[Key, int]:
    """Return the committed offsets of a group from the registry of a directory."""
    with (
        contextlib.suppress(LogNotFoundError),
        open_registry(directory, read_only=True) as registry,
    ):
        return offsets.committed(registry, name)
    return {}


def _cell_text(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return "-" if cell in (None, "") else str(cell)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
