"""Parts that the commands of logcore and netshim share: a group that turns errors into
exit codes, and common options.

Rules:
- A LogcoreError is printed as one line, followed by one line of advice. A traceback is
  a bug.
- Exit codes: 0 done; 1 damage found (verify, scrub), records lost (recover), a failed
  check (demo) or a question answered with no (topic delete); 2 wrong usage or an error;
  130 interrupted; 141 the reader of the output has closed it.

This module imports no command.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any, Final, NoReturn

import click

from logcore.errors import (
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    InvalidNameError,
    LogcoreError,
    LogNotFoundError,
    NodeNotFoundError,
    OffsetOutOfRangeError,
    ResourceError,
    TopicNotFoundError,
)

DAMAGED: Final = 1
DECLINED: Final = 1
FAILED: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE_EXIT: Final = 141

#: Advice for each class of error.
NEXT_STEPS: Final[tuple[tuple[type[LogcoreError], str], ...]] = (
    (TopicNotFoundError, "run `logcore topic list` on the directory to see its topics"),
    (
        LogNotFoundError,
        "check the path; `append --create` creates missing directories and topics",
    ),
    (CorruptBatchError, "run `logcore verify` on the directory to find the damage"),
    (
        CorruptLogError,
        "run `logcore verify` on the directory to find the damage, `logcore recover` to save the intact records",
    ),
    (
        OffsetOutOfRangeError,
        "run `logcore info` on the directory to see which offsets it holds",
    ),
    (InvalidNameError, "name the directory <topic>-<number>, such as orders-0"),
    (DiskFullError, "free some space and repeat the command from where it stopped"),
    (NodeNotFoundError, "run `logcore registry ls` on the directory to see its nodes"),
    (ResourceError, "close some files or processes and repeat the command"),
)


class CommandGroup(click.Group):
    """Command group that turns an exception into an exit code and at most two lines."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except LogcoreError as error:
            fail(
                _with_command_line_advice(str(error)),
                next(
                    (step for kind, step in NEXT_STEPS if isinstance(error, kind)), None
                ),
            )
        except BrokenPipeError:
            # Python flushes stdout again at exit; redirecting it avoids a second error.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(BROKEN_PIPE_EXIT)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except OSError as error:  # from input and output files; errors of log files are LogcoreErrors
            fail(f"{error.filename or 'input or output'}: {error.strerror}", None)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


#: Advice to programmers in errors of the library, and its replacement on the command
#: line.
_COMMAND_LINE_TEXTS: Final = (
    (re.compile(r"; create=True makes (one|it one)"), ""),
    (
        re.compile(
            r"open it with logcore\.open\(\), or open the directory that holds it"
        ),
        "name the directory that holds it",
    ),
    (
        re.compile(r"open it with logcore\.open_dir\(\), or one of them"),
        "name one of them",
    ),
)


def _with_command_line_advice(text: str) -> str:
    """Replace advice to programmers by advice to users of the command line."""
    for pattern, words in _COMMAND_LINE_TEXTS:
        text = pattern.sub(words, text)
    return text


def fail(message: str, advice: str | None) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    if advice:
        click.echo(f"next:  {advice}", err=True)
    raise click.exceptions.Exit(FAILED)


def confirm_deletion(name: str, question: str) -> None:
    """Ask before a deletion, and end the command if the answer is no."""
    if not sys.stdin.isatty():
        fail(
            f"deleting {name} must be confirmed, and stdin is not a terminal",
            "give --yes to delete it without a question",
        )
    if not click.confirm(question):
        click.echo("nothing was deleted", err=True)
        raise click.exceptions.Exit(DECLINED)


json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object per line, also on a terminal.",
)
full_option = click.option(
    "--full",
    is_flag=True,
    help="At a terminal: do not shorten long lines to its width.",
)
config_option = click.option(
    "--config",
    "configs",
    metavar="NAME=VALUE",
    multiple=True,
    help="A setting, by its name in Kafka. Repeatable.",
)
directory_argument = click.argument("directory", metavar="DIR", type=click.Path())
log_directory_argument = click.argument("directory", metavar="DIR", type=click.Path())


def setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--config")
    return name.strip(), value.strip()
