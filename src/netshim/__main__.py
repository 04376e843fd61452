"""The command line: `netshim serve DIR`.

Prints one line with the address once clients may connect; the log goes to standard error, as text at a terminal and as
JSON lines elsewhere. INT and TERM stop it in good order; a second one at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Sequence

import attrs

from logcore import LogcoreError
from netshim.journal import Repeated
from netshim.server import Server, loop_factory
from netshim.settings import Settings


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {
            "time_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            facts["error"] = self.formatException(record.exc_info)
        return json.dumps(facts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="netshim", description="A Kafka broker over a directory of logs.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve a log directory to Kafka clients",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    serve.add_argument("directory", metavar="DIR", help="the log directory; made if it is not there")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serve.add_argument("--port", type=int, default=9092, help="port to listen on; 0 for a free one")
    serve.add_argument("--advertise", metavar="HOST:PORT", help="address to tell clients, if not the one they use")
    serve.add_argument("--durability", default="group", help="always, group, every(M), interval(MS) or os")
    serve.add_argument("--config", action="append", default=[], metavar="NAME=VALUE", help="default setting of topics")
    serve.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"), help=" ")
    for field in attrs.fields(Settings):
        option = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            serve.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            serve.add_argument(option, type=int, default=field.default, metavar="N", help=" ")
    return parser


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"--advertise: expected HOST:PORT, found {text!r}")
    return host.strip("[]"), int(port)


async def _serve(server: Server) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    drain = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            drain.set()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await server.start()
    try:
        print(f"netshim: serving {server.logdir.path} at {server.bootstrap_servers}", flush=True)
        await stopping.wait()
        print("netshim: stopping", file=sys.stderr, flush=True)
    finally:
        ending = loop.create_task(server.stop())
        hurry = loop.create_task(drain.wait())
        await asyncio.wait({ending, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not ending.done():
            server.hurry()
        await ending


def _lift_file_limit() -> None:
    """As many files as the system allows: an open partition holds two, a client one, and the usual limit is 1,024."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    handler = logging.StreamHandler()
    if not sys.stderr.isatty():
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(Repeated())
    logging.basicConfig(level=given.log_level.upper(), handlers=[handler], force=True)
    _lift_file_limit()
    try:
        settings = Settings(**{field.name: getattr(given, field.name) for field in attrs.fields(Settings)})
        config = dict(item.partition("=")[::2] for item in given.config)
        server = Server(
            given.directory,
            host=given.host,
            port=given.port,
            advertised=_address(given.advertise) if given.advertise else None,
            durability=given.durability,
            config=config,
            settings=settings,
        )
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(server))
    except (LogcoreError, ValueError) as error:
        print(f"netshim: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"netshim: cannot listen on {given.host}:{given.port}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
