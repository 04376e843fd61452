"""`logcore consume`: records of topics as they come, with a consumer group that remembers how far it came.

Rules:
- At least once: what was printed is committed after it has left this process, so a crash repeats some and skips none.
- With a group the directory is opened for writing, since the group commits in it; without one, beside a writer.

reading.py says how a record looks.
"""

from __future__ import annotations

import contextlib
from typing import Any

import click

import logcore
from logcore.cli.opening import open_to_write, shared_option
from logcore.cli.program import full_option, json_option, log_directory_argument
from logcore.cli.reading import print_lines
from logcore.cli.sources import complete_topic, isolation_option
from logcore.cli.terminal import Lines

#: How long one poll waits; Ctrl-C comes through at once all the same.
_POLL_MS = 1_000


@click.command()
@log_directory_argument
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True, shell_complete=complete_topic)
@click.option("--group", "group_id", metavar="GROUP", help="Go on where this group stopped, and commit for it.")
@click.option(
    "--from",
    "start",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Where to begin without a committed offset.",
)
@click.option("-n", "--count", type=click.IntRange(1), help="End after so many records.")
@click.option("--until-end", is_flag=True, help="End when there is nothing more to read.")
@shared_option
@isolation_option
@full_option
@json_option
def consume(
    directory: str,
    topics: tuple[str, ...],
    group_id: str | None,
    start: Any,
    count: int | None,
    until_end: bool,
    shared: bool,
    isolation: Any,
    full: bool,
    as_json: bool,
) -> None:
    """Print the records of topics as they come, until Ctrl-C. With --group, go on where the group stopped.

    A record is printed before it is committed: after a crash some come twice and none is missing.
    """
    left = count
    with contextlib.ExitStack() as stack:
        if group_id is None:
            logdir = logcore.open_dir(directory, read_only=True)
        else:
            logdir = open_to_write(directory, shared=shared)
        stack.enter_context(logdir)
        for topic in topics:
            logdir.topic(topic)  # raises for one that does not exist
        consumer = stack.enter_context(
            logdir.consumer(
                group_id=group_id, auto_offset_reset=start, isolation_level=isolation, enable_auto_commit=False
            )
        )
        consumer.subscribe(topics)
        out = stack.enter_context(Lines())
        while left is None or left > 0:
            found = consumer.poll(0 if until_end else _POLL_MS, left)
            if not found and until_end:
                return
            print_lines(out, found.records(), full, as_json)
            out.flush()
            if group_id is not None and found:
                consumer.commit()
            if left is not None:
                left = left - found.count
            else:
                left = None
