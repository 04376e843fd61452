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

The work is done by coordinators/stored_offsets.py, consumer/ and registry/.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from typing import NamedTuple

import click

import logcore
from logcore.cli.arguments import named_partitions, place_in
from logcore.cli.opening import open_to_write
from logcore.cli.options import (
    DECLINED,
    CommandGroup,
    fail,
    json_option,
    log_directory_argument,
)
from logcore.cli.terminal import Lines, print_table, time_text, to_json, wants_json
from logcore.coordinators.shared_groups import SeenMember, living_members, seen_members
from logcore.coordinators.stored_offsets import StoredGroups, stored_groups
from logcore.errors import LogNotFoundError, NodeNotFoundError
from logcore.format.consumer_group_records import (
    ConsumerMember,
    Current,
    Partitions,
    RecordKind,
)
from logcore.format.group_records import Committed, read_assignment
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.registry import Registry, offsets, open_registry, paths

_group_argument = click.argument("name", metavar="GROUP")


class _Place(NamedTuple):
    """Committed offset of a group for one partition."""

    topic: str
    partition: int
    committed: Committed
    #: The high watermark, or None if the partition is not in the directory.
    end: int | None
    #: Number of offsets up to the high watermark, or None if `end` is None.
    lag: int | None


@click.group(cls=CommandGroup)
def group() -> None:
    """List, describe, reset, move and delete the consumer groups of a log directory."""


@group.command("list")
@log_directory_argument
@json_option
def group_list(directory: str, as_json: bool) -> None:
    """List the groups in DIR that have committed offsets or members, with their lag."""
    with logcore.open_dir(directory, read_only=True) as logdir:
        found = _stored(logdir)
        rows = []
        for name in sorted({*found.offsets, *found.groups, *found.consumers}):
            places = list(_places(logdir, found, name))
            members = found.member_count(name)
            lag = sum(place.lag or 0 for place in places)
            if places or members:
                rows.append(
                    (
                        name,
                        members,
                        len({place.topic for place in places}),
                        len(places),
                        lag,
                    )
                )
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
    with logcore.open_dir(directory, read_only=True) as logdir:
        places = list(_places(logdir, _known(logdir, name), name))
    owners = _owners(directory, name)
    if not wants_json(as_json):
        rows = []
        for place in places:
            since = time_text(place.committed.commit_ms)
            owner = owners.get(place[:2], "-")
            rows.append(
                (
                    *place[:2],
                    place.committed.offset,
                    _or_dash(place.end),
                    _or_dash(place.lag),
                    since,
                    owner,
                )
            )
        print_table(
            ("topic", "partition", "committed", "end", "lag", "since", "owner"),
            rows,
            right=range(1, 5),
        )
        return
    with Lines() as out:
        for place in places:
            committed = place.committed
            facts = {
                "group": name,
                "topic": place.topic,
                "partition": place.partition,
                "committed": committed.offset,
            }
            owned_by = owners.get(place[:2])
            told = {
                "metadata": committed.metadata,
                "commit_ms": committed.commit_ms,
                "owner": owned_by,
            }
            out.write(to_json({**facts, "end": place.end, "lag": place.lag, **told}))


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
    rows = _shared_members(directory, name)
    if not rows:
        with logcore.open_dir(directory, read_only=True) as logdir:
            rows = list(_stored_members(logdir, name))
    if not wants_json(as_json):
        cells = [(*row[:-1], _partitions_text(row.partitions)) for row in rows]
        names = ("member", "instance", "client", "host", "pid", "alive", "partitions")
        print_table(names, [tuple(map(_shown, one)) for one in cells], right=(4,))
        return
    with Lines() as out:
        for row in rows:
            facts = row._asdict()
            facts["partitions"] = [
                {"topic": topic, "partition": number}
                for topic, number in row.partitions
            ]
            out.write(to_json({"group": name, **facts}))


class _Member(NamedTuple):
    """A row of `group members`; `pid` and `alive` are None if they are unknown."""

    member: str
    instance: str | None
    client: str
    host: str
    pid: int | None
    alive: bool | None
    partitions: tuple[Key, ...]


def _shared_members(directory: str, name: str) -> list[_Member]:
    """Return the members in processes that share the directory."""
    seen: list[SeenMember] = []
    with (
        contextlib.suppress(LogNotFoundError),
        open_registry(directory, read_only=True) as registry,
    ):
        seen = seen_members(registry, name)
    return [
        _Member(
            one.member_id,
            one.instance_id,
            one.client_id,
            one.client_host,
            one.pid,
            one.is_alive,
            one.partitions,
        )
        for one in seen
    ]


def _stored_members(logdir: logcore.LogDir, name: str) -> Iterator[_Member]:
    """Yield the members that the last rebalance stored, for both group protocols."""
    found = _known(logdir, name)
    if name in found.groups:
        for each in found.groups[name].members:
            partitions = read_assignment(each.assignment) or ()
            yield _Member(
                each.member_id,
                each.instance_id,
                each.client_id,
                each.client_host,
                None,
                None,
                partitions,
            )
    facts = found.consumers.get(name, {})
    topics = {logdir.topic_id(topic).bytes: topic for topic in logdir.topics()}
    for (kind, member_id), fact in sorted(facts.items()):
        if kind is not RecordKind.MEMBER or not isinstance(fact, ConsumerMember):
            continue
        current = facts.get((RecordKind.CURRENT, member_id))
        given: Partitions = frozenset()
        if isinstance(current, Current):
            given = current.assigned
        named = tuple(
            sorted(
                (topics[topic], number) for topic, number in given if topic in topics
            )
        )
        yield _Member(
            member_id,
            fact.instance_id,
            fact.client_id,
            fact.client_host,
            None,
            None,
            named,
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
        stored = _stored(logdir).offsets.get(name, {})
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
                place_in(log, place, now_ms)
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
        stored = _stored(logdir).offsets.get(name, {})
        source = {
            (topic, number): each.offset
            for topic in stored
            for number, each in stored[topic].items()
        }
        changes = _changes(name, source, _committed(registry, name))
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
        stored = _stored(logdir).offsets.get(name, {})
        present = {
            (topic, number): each.offset
            for topic in stored
            for number, each in stored[topic].items()
        }
        changes = _changes(name, _committed(registry, name), present)
        if not dry_run and changes:
            wanted = {partition: after for partition, (_, after) in changes.items()}
            logdir.alter_group_offsets(name, wanted, force=force)
    _print_changes(name, changes, as_json, is_done=not dry_run)


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
    """End the command if GROUP has living members, unless forced.

    Only members in processes that share the directory are checked: the write lock
    excludes every other writer.
    """
    with (
        contextlib.suppress(LogNotFoundError),
        open_registry(directory, read_only=True) as registry,
    ):
        count = len(living_members(registry, name))
        if count and not force:
            fail(
                f"group {name} has {count} members",
                "stop its consumers, or give --force",
            )
        if count:
            click.echo(f"warning: group {name} has {count} members at work", err=True)


def _changes(
    name: str, source: Mapping[Key, int], present: Mapping[Key, int]
) -> dict[Key, tuple[int | None, int]]:
    """Return the present and the wanted offset of each partition whose offset changes."""
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
    with logcore.open_dir(directory, read_only=True) as logdir:
        count = len(list(_places(logdir, _known(logdir, name), name)))
    if not yes:
        if not sys.stdin.isatty():
            fail(
                f"deleting {name} must be confirmed, and stdin is not a terminal",
                "give --yes to delete it without a question",
            )
        if not click.confirm(
            f"Delete group {name} with the offsets of {count} partition{'s' * (count != 1)}?"
        ):
            click.echo("nothing was deleted", err=True)
            raise click.exceptions.Exit(DECLINED)
    with open_to_write(directory) as logdir:
        logdir.delete_group(name)


def _stored(logdir: logcore.LogDir) -> StoredGroups:
    if OFFSETS_TOPIC not in logdir:
        return StoredGroups()
    return stored_groups(
        logdir.partition(OFFSETS_TOPIC, number)
        for number in logdir.partitions(OFFSETS_TOPIC)
    )


def _known(logdir: logcore.LogDir, name: str) -> StoredGroups:
    found = _stored(logdir)
    is_stored = (
        found.offsets.get(name) or name in found.groups or name in found.consumers
    )
    if not is_stored and not _registered(logdir.path, name):
        fail(
            f"there is no group {name} in {logdir.path}",
            "`logcore group list` shows those that exist",
        )
    return found


def _owners(directory: str, name: str) -> dict[Key, str]:
    """Return the present owner of each partition, from the registry of a directory."""
    found: dict[Key, str] = {}
    above = f"{paths.group(name)}/owners"
    with (
        contextlib.suppress(LogNotFoundError),
        open_registry(directory, read_only=True) as registry,
    ):
        for topic in registry.children(above):
            for number in registry.children(f"{above}/{topic}"):
                # An owner may release its partition at any time.
                with contextlib.suppress(NodeNotFoundError):
                    owner = registry.get(f"{above}/{topic}/{number}").value.decode(
                        "utf-8", "replace"
                    )
                    found[paths.element_name(topic), int(number)] = owner
    return found


def _registered(directory: str, name: str) -> dict[Key, int]:
    """Return the committed offsets of a group from the registry of a directory."""
    with (
        contextlib.suppress(LogNotFoundError),
        open_registry(directory, read_only=True) as registry,
    ):
        return offsets.committed(registry, name)
    return {}


def _places(logdir: logcore.LogDir, found: StoredGroups, name: str) -> Iterator[_Place]:
    for topic, partitions in sorted(found.offsets.get(name, {}).items()):
        for number, committed in sorted(partitions.items()):
            end = None
            if topic in logdir and number in logdir.partitions(topic):
                end = logdir.partition(topic, number).high_watermark
            yield _Place(
                topic,
                number,
                committed,
                end,
                None if end is None else max(0, end - committed.offset),
            )


def _shown(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return "-" if cell in (None, "") else str(cell)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
