"""The names of all commands, with the help of the program and the completion of a
command's name.

A shell waits for this output at each press of the tab key. So it is printed without
click, whose import takes three times as long as an empty Python process. A test compares
the output with that of click.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing typing takes as long as an empty Python process
if TYPE_CHECKING:
    from collections.abc import Mapping

#: Command -> the module in logcore.cli that has a function of that name, and one line of
#: help, in the order of `logcore --help`.
MODULES = {
    "append": ("append", "Append lines as records, to a partition or a topic."),
    "produce": ("append", "Send lines to a topic that other processes may write too."),
    "read": ("read", "Print records, between two offsets or times."),
    "tail": ("read", "Print the last records, and follow new ones."),
    "consume": (
        "consume",
        "Print new records of topics, optionally as a group member.",
    ),
    "sql": ("sql", "Query topics as tables."),
    "export": ("export", "Write records to a Parquet, Arrow, CSV or NDJSON file."),
    "dump": ("maintenance", "Show the content of log files."),
    "verify": ("maintenance", "Check every file of a directory, read-only."),
    "recover": ("maintenance", "Copy the intact records of a damaged directory."),
    "info": ("info", "Show versions, or the partitions of a directory."),
    "topic": ("topics", "Create, list, describe, alter and delete topics."),
    "group": ("groups", "List, describe, reset, move and delete consumer groups."),
    "transactions": ("transactions", "List transactions, and end open ones."),
    "registry": ("registry", "Show members, owners and settings that processes share."),
    "forward": ("shipping", "Ship topics to a Kafka cluster."),
    "mirror": ("shipping", "Copy topics of a Kafka cluster."),
    "snapshot": ("backup", "Store a snapshot of a directory in a backup."),
    "snapshots": ("backup", "List the snapshots in a backup."),
    "restore": ("backup", "Write a snapshot to a new directory."),
    "compact": ("maintenance", "Keep the last record of each key."),
    "scrub": ("maintenance", "Read every byte, and report bit rot and losses."),
    "retention": (
        "maintenance",
        "List or delete segments that the settings do not keep.",
    ),
    "delete-records": ("maintenance", "Delete records before an offset or a time."),
    "roll": ("maintenance", "Begin a new segment."),
    "bench": ("commands", "Measure appends and reads on this disk."),
    "demo": ("commands", "Append, kill, recover and read 336,776 flights."),
}

INTRODUCTION = """Apache Kafka's log format as files you own: append, read and inspect
records.

DIR is a partition directory such as data/orders-0. In a pipe or with
--json, output is one JSON object per line. Exit codes: 0 done, 1 damage
found or a check failed, 2 wrong usage or an error."""

#: Columns for which INTRODUCTION is wrapped. click wraps it for narrower terminals.
_COLUMNS = 80


def help_text() -> str | None:
    """Return the output of `logcore --help`, or None if the terminal is too narrow."""
    if _columns() < _COLUMNS:
        return None
    lines = [f"  {line}".rstrip() for line in INTRODUCTION.splitlines()]
    width = max(map(len, MODULES))
    commands = [f"  {name:{width}}  {text}" for name, (_, text) in MODULES.items()]
    return "\n".join(
        (
            "Usage: logcore [OPTIONS] COMMAND [ARGS]...",
            "",
            *lines,
            "",
            "Options:",
            "  --version   Show the version and exit.",
            "  -h, --help  Show this message and exit.",
            "",
            "Commands:",
            *commands,
        )
    )


def _columns() -> int:
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size().columns or _COLUMNS
    except OSError:
        return _COLUMNS


def completion(environment: Mapping[str, str]) -> str | None:
    """Return the completion of a command's name for bash or zsh, or None if another
    text is completed.

    `environment` contains the variables that the completion scripts of click set.
    """
    shell = environment.get("_LOGCORE_COMPLETE", "").removesuffix("_complete")
    words = environment.get("COMP_WORDS", "").split()
    if shell not in ("bash", "zsh") or environment.get("COMP_CWORD") != "1":
        return None
    begin = words[1] if len(words) > 1 else ""
    if begin.startswith(("-", '"', "'", "\\")):
        return None
    found = [
        (name, text) for name, (_, text) in MODULES.items() if name.startswith(begin)
    ]
    if shell == "bash":
        return "\n".join(f"plain,{name}" for name, _ in found)
    return "\n".join(f"plain\n{name}\n{text}" for name, text in found)
