"""`logcore transactions`: list open transactions, and commit or abort them by hand.

Rules:
- `list` acquires no lock and works while a broker or another process writes. `commit`
  and `abort` open the directory for writing.
- Only an open transaction can be ended. The producer that opened the transaction is
  fenced.

The work is done by coordinators/transactions.py.
"""

from __future__ import annotations

import click

import logcore
from logcore.cli.opening import open_to_write
from logcore.cli.options import CommandGroup, json_option, log_directory_argument
from logcore.cli.terminal import Lines, print_table, time_text, to_json, wants_json

_id_argument = click.argument("transactional_id", metavar="ID")


@click.group(cls=CommandGroup)
def transactions() -> None:
    """List the transactions of a log directory, and end open transactions."""


@transactions.command("list")
@log_directory_argument
@click.option(
    "--all",
    "shows_all",
    is_flag=True,
    help="Also list ids without an open transaction.",
)
@json_option
def transactions_list(directory: str, shows_all: bool, as_json: bool) -> None:
    """List transactions in DIR that are open, or not yet ended in all partitions."""
    with logcore.open_dir(directory, read_only=True) as logdir:
        found = sorted(logdir.transactions().items())
    names = ("id", "state", "producer", "epoch", "partitions", "since")
    rows = []
    for name, stored in found:
        if stored.partitions or shows_all:
            if stored.partitions:
                since_ms = stored.start_ms
            else:
                since_ms = stored.update_ms
            rows.append(
                (
                    name,
                    stored.status.label,
                    stored.producer_id,
                    stored.producer_epoch,
                    len(stored.partitions),
                    since_ms,
                )
            )
    if not wants_json(as_json):
        print_table(
            names, [(*row[:-1], time_text(row[-1])) for row in rows], right=range(2, 5)
        )
        return
    with Lines() as out:
        for row in rows:
            out.write(to_json(dict(zip((*names[:-1], "since_ms"), row, strict=True))))


@transactions.command("commit")
@log_directory_argument
@_id_argument
def transactions_commit(directory: str, transactional_id: str) -> None:
    """Commit the open transaction of ID, because the other store of a two-phase commit
    has committed.
    """
    _end(directory, transactional_id, commit=True)


@transactions.command("abort")
@log_directory_argument
@_id_argument
def transactions_abort(directory: str, transactional_id: str) -> None:
    """Abort the open transaction of ID; read_committed readers then continue after it."""
    _end(directory, transactional_id, commit=False)


def _end(directory: str, transactional_id: str, *, commit: bool) -> None:
    with open_to_write(directory) as logdir:
        logdir.end_transaction(transactional_id, commit=commit)
    click.echo(
        f"the transaction of {transactional_id} is {'committed' if commit else 'aborted'}"
    )
