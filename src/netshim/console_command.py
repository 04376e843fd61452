"""`netshim console DIR`: web pages that show the current content of a log directory.

Without --write, the directory is only read. A broker or another writer may run at the
same time.
"""

from __future__ import annotations

import os
import signal
import threading

import click

from logcore.cli.options import config_option, directory_argument, setting
from logcore.errors import LogNotFoundError
from netshim.http_command import missing_packages
from netshim.listeners import TlsSettings


@click.command()
@directory_argument
@click.option(
    "--host",
    "listen",
    metavar="HOST",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Outside of this machine, --tls-cert is required, and a login.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8080,
    show_default=True,
    help="Port of the pages; 0 takes a free one.",
)
@click.option("--tls-cert", help="PEM file of the certificate of the pages.")
@click.option("--tls-key", help="PEM file of its key, if it is another file.")
@click.option(
    "--login",
    is_flag=True,
    help="Require a login on this machine too. The users are those of `netshim user`.",
)
@click.option(
    "--acls",
    is_flag=True,
    help="Show only what access control lists allow; requires a login.",
)
@click.option(
    "--super-user",
    "super_users",
    metavar="User:NAME",
    multiple=True,
    help="User that may do everything. May be repeated.",
)
@click.option(
    "--write",
    is_flag=True,
    help="Allow changes: reset offsets, abort transactions, delete topics and records.",
)
@config_option
def console(
    directory: str,
    listen: str,
    port: int,
    tls_cert: str | None,
    tls_key: str | None,
    login: bool,
    acls: bool,
    super_users: tuple[str, ...],
    write: bool,
    configs: tuple[str, ...],
) -> None:
    """Show the log directory DIR in a browser: topics, messages, segments, groups and
    transactions.

    Prints the address of the pages. DIR is only read, without a lock, so that a broker or
    another writer may run. With --write, each change opens DIR for writing. Ctrl-C ends
    the console. --config sets defaults of topics.
    """
    if not os.path.isdir(directory):
        raise LogNotFoundError("there is no such directory", path=directory)
    try:
        # Imported here, because the extra `console` may be missing.
        from netshim.console.access import StoredSecurity
        from netshim.console.changes import DirectoryChanges
        from netshim.console.directory import DirectoryView
        from netshim.console.hosting import ConsoleSecurity
        from netshim.console.pages import add_console
        from netshim.http.host import HttpHost, bind
    except ImportError as error:
        raise missing_packages(error) from error
    # The option would have no effect, which may be a mistake.
    if tls_cert is None and tls_key is not None:
        raise click.UsageError("--tls-key needs --tls-cert")
    tls = None if tls_cert is None else TlsSettings(cert=tls_cert, key=tls_key)
    security = ConsoleSecurity(tls=tls, login=login, acls=acls, super_users=super_users)
    # Without a broker, the users are read from the registry in the directory.
    read_snapshot = StoredSecurity(directory)
    view = DirectoryView(
        directory,
        config=dict(map(setting, configs)),
        access=security.access("--host", listen.strip("[]"), read_snapshot),
    )
    if write:
        view.changes = DirectoryChanges(directory, view.config)
    # IPv6 addresses need brackets before a port.
    url_host = f"[{listen}]" if ":" in listen else listen
    host = HttpHost()
    with bind("--port", f"{url_host}:{port}") as address:
        url = add_console(host, address, view, tls)
    stopping = threading.Event()
    # The main thread waits for a signal. The pages run in the thread of the host.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    host.start()
    print(f"netshim: console of {directory} at {url}", flush=True)
    # Warnings about settings that are probably not meant.
    snapshot = read_snapshot()
    if view.access.needs_login and not snapshot.users:
        click.echo(
            "netshim: no user exists, so no login succeeds; create a user: "
            f"netshim user add {directory} NAME",
            err=True,
        )
    if view.access.needs_login and snapshot.acls and not acls:
        click.echo(
            "netshim: every user who logs in sees everything; --acls enforces the "
            "access control lists",
            err=True,
        )
    stopping.wait()
    host.stop()
