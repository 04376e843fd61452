"""`netshim console DIR`: web pages that show a log directory as it is.

The directory is only read, beside a running broker or writer too.
"""

from __future__ import annotations

import os
import signal
import threading

import click

from logcore.cli.options import config_option, directory_argument, setting
from logcore.errors import LogNotFoundError
from netshim.http_command import check_loopback, missing_packages


@click.command()
@directory_argument
@click.option(
    "--listen",
    metavar="HOST",
    default="127.0.0.1",
    show_default=True,
    help="Address of this machine to listen on: 127.0.0.1, localhost or ::1.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8080,
    show_default=True,
    help="Port of the pages; 0 takes a free one.",
)
@config_option
def console(directory: str, listen: str, port: int, configs: tuple[str, ...]) -> None:
    """Show the log directory DIR in a browser: topics, messages, segments, groups and
    transactions.

    Prints the address of the pages. DIR is only read, without a lock, so that a broker or
    another writer may run. Ctrl-C ends it. --config sets what topics that do
    not set it themselves have.
    """
    check_loopback("--listen", listen)
    if not os.path.isdir(directory):
        raise LogNotFoundError("there is no such directory", path=directory)
    try:
        from netshim.console.directory import DirectoryView
        from netshim.console.pages import console_app
        from netshim.http.host import HttpHost, bind
    except ImportError as error:
        raise missing_packages(error) from error
    view = DirectoryView(directory, config=dict(map(setting, configs)))
    shown = f"[{listen}]" if ":" in listen else listen
    host = HttpHost()
    with bind("--port", f"{shown}:{port}") as address:
        url = host.add(address, console_app(view))
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    host.start()
    print(f"netshim: console of {directory} at {url}", flush=True)
    stopping.wait()
    host.stop()
