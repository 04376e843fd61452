"""The command `netshim replay`: sends a recording to a broker, or lists its frames."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from logcore.cli.options import DAMAGED
from logcore.cli.terminal import Lines, print_table, to_json
from logcore.errors import InvalidConfigError

if TYPE_CHECKING:  # imported only if they are used
    from netshim.recording.traffic_file import TrafficFile
    from netshim.replay.replayer import ReplayReport, ResponseDifference

#: Maximum number of differences that are printed as text.
_MAX_PRINTED: Final = 200


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))
@click.option("--to", metavar="HOST:PORT", help="Address of the broker.")
@click.option(
    "--speed",
    type=float,
    metavar="N",
    help="Keep the times of the recording, divided by N. Default: as fast as the order allows.",
)
@click.option(
    "--compare", is_flag=True, help="Compare the responses with the recorded ones."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.1, 86_400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for a response.",
)
@click.option(
    "--list", "lists", is_flag=True, help="Print the frames, and send nothing."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "ndjson"]),
    default="text",
    show_default=True,
    help="Format of the output.",
)
def replay(
    file: str,
    to: str | None,
    speed: float | None,
    compare: bool,
    timeout: float,
    lists: bool,
    form: str,
) -> None:
    """Send the requests of a recording of `netshim serve --record` to a broker.

    Each connection keeps its order, and a request waits for the responses that were
    recorded before it. The exit code is 1 if --compare finds a difference or a response
    is missing, and 2 if the recording is damaged or the broker cannot be reached.
    """
    if lists == (to is not None):
        raise click.UsageError("expected one of --to HOST:PORT and --list")
    if speed is not None and not 0 < speed < math.inf:
        raise click.BadParameter("expected a number above 0", param_hint="'--speed'")
    # Imported here, because `netshim serve` needs neither module.
    from netshim.recording.traffic_file import RecordingError, TrafficFile
    from netshim.replay.replayer import TrafficReplayer

    try:
        with TrafficFile(file) as traffic:
            if lists:
                _print_frames(traffic, form)
                is_different = False
            else:
                replayer = TrafficReplayer(
                    _address(to or ""),
                    speed=speed,
                    compares=compare,
                    timeout_s=timeout,
                    report=(printer := _Printer(form)).report,
                )
                report = replayer.run(traffic)
                printer.finish(report, compares=compare)
                is_different = report.total("differences") > 0
            # After the last record, because only then the end is known.
            _report_end(traffic)
    except FileNotFoundError as error:
        raise RecordingError("there is no such file", path=file) from error
    if is_different:
        raise click.exceptions.Exit(DAMAGED)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise InvalidConfigError("--to", expected="HOST:PORT", found=repr(text))
    return host.strip("[]"), int(port)


def _report_end(traffic: TrafficFile) -> None:
    """Report a recording that was not closed."""
    if traffic.is_complete:
        return
    text = "the recording was not closed; its process may have been killed"
    if traffic.incomplete_bytes:
        text += f". Its last {traffic.incomplete_bytes} bytes are an incomplete block"
    click.echo(f"note: {text}", err=True)


class _Printer:
    """Prints differences as they are found, and the numbers at the end."""

    def __init__(self, form: str) -> None:
        self._is_json = form == "ndjson"
        #: Number of differences that do not repeat an earlier one.
        self._printed = 0
        #: Number of differences that repeat the fields and values of another one.
        self._repeated = 0
        #: Hashes of the fields and values of these differences. Not the values, because a
        #: recording may have millions.
        self._hashes: set[int] = set()

    def report(self, difference: ResponseDifference) -> None:
        if self._is_json:
            fields = {"kind": "difference", **attrs.asdict(difference)}
            click.echo(to_json(fields))
            return
        for field in difference.fields:
            # One change of a broker may differ in thousands of responses.
            key = hash((difference.api, difference.version, field))
            if key in self._hashes:
                self._repeated += 1
                continue
            # Also if the difference is not printed, so that its repetitions do not count.
            self._hashes.add(key)
            self._printed += 1
            if self._printed > _MAX_PRINTED:
                continue
            click.echo(
                f"{difference.time_ns / 1e9:.6f} s, connection {difference.connection}, "
                f"{difference.api} v{difference.version}, correlation id {difference.correlation_id}: "
                f"{field.path}: recorded {field.recorded}, replayed {field.replayed}"
            )

    def finish(self, report: ReplayReport, *, compares: bool) -> None:
        """Print the numbers of requests, responses and differences."""
        rows: list[dict[str, Any]] = []
        for name, count in sorted(report.apis.items()):
            min_version, max_version = min(count.versions), max(count.versions)
            rows.append(
                {
                    "api": name,
                    "versions": str(min_version)
                    if min_version == max_version
                    else f"{min_version}-{max_version}",
                    "requests": count.requests,
                    "responses": count.responses,
                    "differences": count.differences,
                }
            )
        summary = {
            "requests": report.total("requests"),
            "responses": report.total("responses"),
            "differences": report.total("differences"),
            "connections": report.connections,
            "redacted": report.redacted,
            "elapsed_s": round(report.elapsed_s, 3),
            "compared": compares,
        }
        if self._is_json:
            for row in rows:
                click.echo(to_json({"kind": "api", **row}))
            click.echo(to_json({"kind": "summary", **summary}))
            return
        if self._printed > _MAX_PRINTED:
            click.echo(
                f"the first {_MAX_PRINTED} of {self._printed} differences; "
                "--format ndjson prints all"
            )
        if self._repeated:
            click.echo(
                f"{self._repeated} more differences repeat these fields and values"
            )
        headings = ("API", "versions", "requests", "responses", "differences")
        print_table(headings, [tuple(row.values()) for row in rows], right=(2, 3, 4))
        text = (
            f"requests: {summary['requests']}, connections: {report.connections}, "
            f"responses that differ: {summary['differences']}, "
            f"seconds: {report.elapsed_s:.1f}"
        )
        if not compares:
            text += " (without --compare, only missing ones count)"
        if report.redacted:
            text += f", not sent because of removed secrets: {report.redacted}"
        click.echo(text)


# -- the list --------------------------------------------------------------------------


def _print_frames(traffic: TrafficFile, form: str) -> None:
    from netshim.replay.frame_list import rows_of

    # A buffered writer, because a recording may have millions of frames.
    with Lines() as out:
        for row in rows_of(traffic):
            if form == "ndjson":
                out.write(to_json(row))
                continue
            parts = [row["time"], str(row["connection"]), row["peer"]]
            parts.append("->" if row["direction"] == "request" else "<-")
            parts.append(f"{row['api']} v{row['version']}")
            parts.append(f"id {row['correlation_id']}, {row['bytes']} bytes")
            if row["client_id"]:
                parts.append(f"client {row['client_id']}")
            if row["error"]:
                parts.append(row["error"])
            if row["redacted"]:
                parts.append("without secrets")
            out.write("  ".join(parts))
