"""Converts the frames of a recording to rows, for display and for queries."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from netshim import wire
from netshim.recording.traffic_file import TrafficFile, TrafficKind, TrafficRecord
from netshim.replay.replayer import error_of
from netshim.wire import codes
from netshim.wire.codec import Api

#: Requests of a connection that may still get a response.
_MAX_WAITING: Final = 10_000
#: Position of the error code in a redacted response of SaslAuthenticate.
_SASL_ERROR: Final = slice(4, 6)
_FLEXIBLE_SASL_ERROR: Final = slice(5, 7)


def rows_of(traffic: TrafficFile) -> Iterator[dict[str, Any]]:
    """Yield a row for each request and response."""
    start = datetime.fromtimestamp(traffic.start_ms / 1000, UTC)
    peers: dict[int, dict[str, str]] = {}
    # Requests without a response, by connection and correlation id.
    waiting: dict[int, dict[int, tuple[Api[Any, Any] | None, int, str]]] = {}
    for record in traffic:
        number = record.connection
        if record.kind is TrafficKind.OPEN:
            peers[number] = record.fields()
        elif record.kind is TrafficKind.CLOSE:
            peers.pop(number, None)
            waiting.pop(number, None)
        elif record.kind is not TrafficKind.END:
            time = start + timedelta(microseconds=record.time_ns // 1_000)
            peer = peers.get(number, {})
            fields = (
                _request(record, waiting.setdefault(number, {}))
                if record.kind is TrafficKind.REQUEST
                else _response(record, waiting.get(number, {}))
            )
            yield {
                "time": time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
                "connection": number,
                "peer": peer.get("peer"),
                "listener": peer.get("listener"),
                "direction": record.kind.name.lower(),
                **fields,
                "bytes": len(record.payload),
                "redacted": record.is_redacted,
            }


def _request(
    record: TrafficRecord,
    waiting: dict[int, tuple[Api[Any, Any] | None, int, str]],
) -> dict[str, Any]:
    frame = record.frame
    api = wire.APIS.get(int.from_bytes(frame[:2], "big"))
    version = int.from_bytes(frame[2:4], "big", signed=True)
    correlation_id = int.from_bytes(frame[4:8], "big", signed=True)
    size = max(0, int.from_bytes(frame[8:10], "big", signed=True))
    client_id = str(frame[10 : 10 + size], "utf-8", "replace")
    if record.is_redacted and not any(frame):
        # A frame of zeros would be decoded as a Produce, whose API key is 0.
        api = None
    waiting[correlation_id] = api, version, client_id
    if len(waiting) > _MAX_WAITING:  # requests without a response
        del waiting[next(iter(waiting))]
    return _fields(api, version, correlation_id, client_id, None)


def _response(
    record: TrafficRecord,
    waiting: dict[int, tuple[Api[Any, Any] | None, int, str]],
) -> dict[str, Any]:
    frame = record.frame
    correlation_id = int.from_bytes(frame[:4], "big", signed=True)
    # A recording may begin between a request and its response.
    api, version, client_id = waiting.pop(correlation_id, (None, -1, ""))
    error = None
    if api is not None and not record.is_redacted:
        error = error_of(api, version, frame)
    # Of the redacted responses, only this one has a known position of its error code.
    # After many logins of a connection, the recorder redacts all its responses.
    elif api is not None and api.key == wire.SASL_AUTHENTICATE.key:
        error_bytes = _FLEXIBLE_SASL_ERROR if api.is_flexible(version) else _SASL_ERROR
        code = int.from_bytes(frame[error_bytes], "big", signed=True)
        error = codes.name(code) if code else None
    return _fields(api, version, correlation_id, client_id, error)


def _fields(
    api: Api[Any, Any] | None,
    version: int,
    correlation_id: int,
    client_id: str,
    error: str | None,
) -> dict[str, Any]:
    return {
        "api": "unknown" if api is None else api.name,
        "version": version,
        "correlation_id": correlation_id,
        "client_id": client_id,
        "error": error,
    }
