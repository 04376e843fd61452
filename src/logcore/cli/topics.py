"""`logcore topic`: create, list, describe, alter, delete and fork the topics of a log
directory.

The work is done by logdir.py.
"""

from __future__ import annotations

import click

import logcore
from logcore.cli.arguments import complete_topic
from logcore.cli.opening import open_to_write
from logcore.cli.options import (
    CommandGroup,
    config_option,
    confirm_deletion,
    json_option,
    log_directory_argument,
    setting,
)
from logcore.cli.terminal import Lines, print_table, size_text, to_json, wants_json
from logcore.directory.topic_file import id_text

#: Name of an existing topic.
_name_argument = click.argument("name", shell_complete=complete_topic)


@click.group(cls=CommandGroup)
def topic() -> None:
    """Create, list, describe, alter and delete the topics of a log directory."""


@topic.command("create")
@log_directory_argument
@click.argument("name")
@click.option("--partitions", type=click.IntRange(1), default=1, show_default=True)
@config_option
def topic_create(
    directory: str, name: str, partitions: int, configs: tuple[str, ...]
) -> None:
    """Create the topic NAME in DIR; a missing log directory DIR is created."""
    with open_to_write(directory, create=True) as logdir:
        logdir.create_topic(name, partitions, dict(map(setting, configs)))


@topic.command("list")
@log_directory_argument
@json_option
def topic_list(directory: str, as_json: bool) -> None:
    """List the topics in DIR, with their partitions and sizes."""
    with logcore.open_dir(directory, read_only=True) as logdir:
        rows = []
        for name in logdir.topics():
            numbers = logdir.partitions(name)
            rows.append(
                (
                    name,
                    len(numbers),
                    sum(logdir.size_bytes(name, number) for number in numbers),
                )
            )
    if wants_json(as_json):
        with Lines() as out:
            for name, count, size_bytes in rows:
                out.write(
                    to_json(
                        {"topic": name, "partitions": count, "size_bytes": size_bytes}
                    )
                )
    else:
        shown = [(name, count, size_text(size)) for name, count, size in rows]
        print_table(("topic", "partitions", "size"), shown, right=(1, 2))


@topic.command("describe")
@log_directory_argument
@_name_argument
@json_option
def topic_describe(directory: str, name: str, as_json: bool) -> None:
    """Show the id, settings and partitions of the topic NAME."""
    with logcore.open_dir(directory, read_only=True) as logdir:
        found = logdir.describe_topic(name)
        rows = []
        for part in found.partitions:
            log = logdir.partition(name, part.partition)
            facts = log.statistics()
            rows.append(
                (
                    part.partition,
                    facts.segments,
                    facts.size_bytes,
                    log.log_start_offset,
                    log.high_watermark,
                )
            )
    names = (
        "partition",
        "segments",
        "size_bytes",
        "log_start_offset",
        "high_watermark",
    )
    if wants_json(as_json):
        with Lines() as out:
            partitions = [dict(zip(names, row, strict=True)) for row in rows]
            facts_ = {
                "topic": name,
                "topic_id": id_text(found.topic_id),
                "config": dict(found.overrides),
            }
            out.write(to_json({**facts_, "partitions": partitions}))
        return
    settings = (
        ", ".join(f"{key}={value}" for key, value in sorted(found.overrides.items()))
        or "the defaults"
    )
    click.echo(f"{name}  id {id_text(found.topic_id)}  {settings}")
    shown = [(*row[:2], size_text(row[2]), *row[3:]) for row in rows]
    headers = ("partition", "segments", "size", "start", "end")
    print_table(headers, shown, right=range(5))


@topic.command("alter")
@log_directory_argument
@_name_argument
@config_option
@click.option(
    "--unset",
    metavar="NAME",
    multiple=True,
    help="Reset a setting to its default. Repeatable.",
)
@click.option(
    "--partitions",
    type=click.IntRange(1),
    help="Increase the number of partitions to this.",
)
def topic_alter(
    directory: str,
    name: str,
    configs: tuple[str, ...],
    unset: tuple[str, ...],
    partitions: int | None,
) -> None:
    """Change settings of the topic NAME, or its number of partitions."""
    changes: dict[str, object | None] = {
        **dict(map(setting, configs)),
        **dict.fromkeys(unset),
    }
    if not changes and partitions is None:
        raise click.UsageError(
            "nothing to change: give --config, --unset or --partitions"
        )
    with open_to_write(directory) as logdir:
        logdir.alter_topic(name, changes, check_only=True)
        if partitions is not None:
            logdir.add_partitions(name, partitions)
        if changes:
            logdir.alter_topic(name, changes)


@topic.command("delete")
@log_directory_argument
@_name_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def topic_delete(directory: str, name: str, yes: bool) -> None:
    """Delete the topic NAME with all its records.

    The command asks first. Without a terminal it deletes nothing unless --yes is given.
    """
    with logcore.open_dir(
        directory, read_only=True
    ) as logdir:  # read-only: no lock is held while the command waits for the answer
        numbers = logdir.partitions(name)
        size = size_text(sum(logdir.size_bytes(name, number) for number in numbers))
    if not yes:
        count = f"{len(numbers)} partition{'s' * (len(numbers) != 1)}"
        confirm_deletion(
            name, f"Delete {name} with {count}, {size}, and all its records?"
        )
    with open_to_write(directory) as logdir:
        logdir.delete_topic(name)


@topic.command("fork")
@log_directory_argument
@_name_argument
@click.argument("new_name")
@click.option(
    "--at",
    "at_offset",
    type=click.IntRange(0),
    help="Copy records below this offset; by default, all records.",
)
def topic_fork(directory: str, name: str, new_name: str, at_offset: int | None) -> None:
    """Create the topic NEW_NAME with the records of NAME, as hard links, which use no
    additional disk space.
    """
    with logcore.open_dir(directory) as logdir:
        logdir.fork(name, at_offset, new_name)
