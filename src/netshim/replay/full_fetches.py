"""Replaces the fetch sessions of a recording by fetches that list all partitions.

A replay sends a fetch again if its response contains less than the recorded one. A
request of a session can be sent only once, because its epoch advances.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import attrs

from netshim import wire
from netshim.fetch_sessions import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    NO_SESSION,
    FetchSession,
    PartitionKey,
    replica_of,
)
from netshim.recording.traffic_file import TrafficKind, TrafficRecord

#: First version of Fetch with topic ids.
_IDS_SINCE: Final = 13
#: First version of Fetch with sessions (KIP-227).
_SESSIONS_SINCE: Final = 7


@attrs.define(eq=False)
class _RecordedSession:
    """A session of the recording, and the latest responses for its partitions."""

    session: FetchSession
    #: The latest response for each partition, without its records.
    latest_parts: dict[PartitionKey, Any] = attrs.field(factory=dict)

    def expand(self, response: Any) -> None:
        """Add the partitions without changes to a response, in the order of requests."""
        response_type = wire.FETCH.Response
        sent_partitions = {
            (self._name_of(topic), part.partition_index): part
            for topic in response.responses
            for part in topic.partitions
        }
        # The replayed requests have no session, so neither have the responses.
        response.session_id = NO_SESSION
        response.responses = []
        for topic in self.session.listed():
            name = self._name_of(topic)
            parts = []
            for requested in topic.partitions:
                key = name, requested.partition
                part = sent_partitions.get(key)
                if part is None:
                    part = self.latest_parts.get(key)
                else:
                    # A later response may leave this partition out.
                    self.latest_parts[key] = _without_records(part)
                # A broker leaves out a partition whose offsets have not changed since
                # its last response (KIP-227).
                if part is not None:
                    parts.append(part)
            response.responses.append(
                response_type.Topic(
                    topic=topic.topic, topic_id=topic.topic_id, partitions=parts
                )
            )

    def _name_of(self, topic: Any) -> bytes | str:
        return bytes(topic.topic_id) if self.session.uses_ids else topic.topic


def _without_records(part: Any) -> Any:
    partition_type = wire.FETCH.Response.Topic.Partition
    return partition_type(
        partition_index=part.partition_index,
        high_watermark=part.high_watermark,
        last_stable_offset=part.last_stable_offset,
        log_start_offset=part.log_start_offset,
        aborted_transactions=part.aborted_transactions and [],
        records=b"",
    )


def with_full_fetches(records: Iterable[TrafficRecord]) -> Iterator[TrafficRecord]:
    """Yield the records of a recording, without fetch sessions."""
    return _Expansion().run(records)


class _Expansion:
    """One pass through a recording."""

    def __init__(self) -> None:
        #: By the session id that the recorded broker has issued.
        self._sessions: dict[int, _RecordedSession] = {}
        #: Requests of sessions without a response: the version and the session.
        self._waiting: dict[tuple[int, int], tuple[int, _RecordedSession]] = {}

    def run(self, records: Iterable[TrafficRecord]) -> Iterator[TrafficRecord]:
        for record in records:
            if record.is_redacted:
                yield record
            elif record.kind is TrafficKind.REQUEST:
                yield self._request(record)
            elif record.kind is TrafficKind.RESPONSE and self._waiting:
                yield self._response(record)
            else:
                yield record

    def _request(self, record: TrafficRecord) -> TrafficRecord:
        frame = record.frame
        # A frame begins with the key of its API.
        if int.from_bytes(frame[:2], "big") != wire.FETCH.key:
            return record
        try:
            header = wire.decode_header(frame)
            version = header.api_version
            if not _SESSIONS_SINCE <= version <= wire.FETCH.max_version:
                return record
            request = wire.decode_request(header, frame)
        except wire.ProtocolError:
            return record
        session_id, epoch = request.session_id, request.session_epoch
        # A fetch without a session is replayed unchanged.
        if (session_id, epoch) == (NO_SESSION, FINAL_EPOCH):
            return record
        if epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            # The request ends its former session.
            self._sessions.pop(session_id, None)
            recorded_session = _RecordedSession(
                FetchSession(
                    NO_SESSION, replica_of(request), version >= _IDS_SINCE, 0, 0
                )
            )
        elif session_id in self._sessions:
            recorded_session = self._sessions[session_id]
        else:  # the recorded broker refused this request, too
            return record
        recorded_session.session.update(request)
        if epoch != FINAL_EPOCH:
            key = record.connection, header.correlation_id
            self._waiting[key] = version, recorded_session
        request.session_id, request.session_epoch = NO_SESSION, FINAL_EPOCH
        # The session contains the partitions of this request and of all earlier ones.
        request.topics = recorded_session.session.listed()
        request.forgotten_topics_data = []
        payload = wire.encode_request(
            wire.FETCH, version, header.correlation_id, header.client_id, request
        )
        return attrs.evolve(record, payload=payload)

    def _response(self, record: TrafficRecord) -> TrafficRecord:
        correlation_id = int.from_bytes(record.frame[:4], "big", signed=True)
        pending = self._waiting.pop((record.connection, correlation_id), None)
        if pending is None:
            return record
        version, recorded_session = pending
        try:
            _, response = wire.decode_response(wire.FETCH, version, record.frame)
        except (wire.ProtocolError, ValueError):
            return record
        # An error such as INVALID_FETCH_SESSION_EPOCH concerns the whole response.
        if response.error_code:
            return record
        if response.session_id != NO_SESSION:
            # The response to the first request contains the id of the session.
            self._sessions[response.session_id] = recorded_session
        recorded_session.expand(response)
        buffers = wire.encode_response(wire.FETCH, version, correlation_id, response)
        return attrs.evolve(record, payload=b"".join(map(bytes, buffers)))
