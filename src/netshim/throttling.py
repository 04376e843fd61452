"""Applies quotas to requests: the amount that each one counts, and the delays.

Rules (as Apache Kafka 4.1.1):
- If a client exceeds a quota, its response contains throttle_time_ms, and no other
  request of its connection is started for that time.
- A fetch over its quota is answered without records, which are then not counted.
- Changes of topics over their quota are refused with THROTTLING_QUOTA_EXCEEDED in the
  versions that have this error. Older versions are delayed only.
- SASL, ApiVersions before authentication and requests of other brokers are not counted,
  if access control lists allow them.

The arithmetic is in security/quotas.py.
"""

from __future__ import annotations

from typing import Any, Final

from netshim import wire
from netshim.fetch_sessions import replica_of
from netshim.security import quotas
from netshim.state import BrokerState, Call
from netshim.wire import codes

#: APIs whose processor time is not counted.
_FREE: Final = wire.keys_of(wire.SASL_HANDSHAKE, wire.SASL_AUTHENTICATE)
#: API -> first version with the error THROTTLING_QUOTA_EXCEEDED.
_STRICT_SINCE: Final = {
    wire.CREATE_TOPICS.key: 6,
    wire.CREATE_PARTITIONS.key: 3,
    wire.DELETE_TOPICS.key: 5,
}


def is_between_brokers(api_key: int, request: Any) -> bool:
    """Return whether only brokers send such requests to each other."""
    if api_key == wire.FETCH.key:
        return replica_of(request) >= 0
    if api_key == wire.ADD_PARTITIONS_TO_TXN.key:
        return bool(request.transactions)
    return api_key == wire.WRITE_TXN_MARKERS.key


class Throttle:
    """The quotas of one request.

    Created only if any quota is set. A request is counted when it arrives, and its
    processor time when its handler returns, before later requests of the same
    connection. The response may be ready much later. Only a fetch is counted then,
    because its size is not known before.
    """

    def __init__(self, call: Call, request_bytes: int, state: BrokerState) -> None:
        """Create the quotas of a request of that size."""
        self._call = call
        self._request_bytes = request_bytes
        self._state = state
        self._bounds = state.security.quotas
        self._user = call.session.principal.removeprefix("User:")
        #: The throttle_time_ms of the response: the longest delay of the exceeded quotas.
        self._delay_ms = 0
        #: Topics of the request whose change is refused.
        self._refused: list[Any] = []

    def begin(self, request: Any, *, is_refused: bool) -> None:
        """Count or limit the request. Parts over a quota are removed from it.

        The handler must be called even if no part is left. With `is_refused`, access
        control has refused the whole request.
        """
        call = self._call
        # Like Kafka, this counts all received bytes, including refused ones.
        if call.api_key == wire.PRODUCE.key:
            self._record(quotas.PRODUCE, self._request_bytes)
        elif is_refused:
            return
        elif call.api_key == wire.FETCH.key:
            # As in Kafka, one fetch gets at most the bytes of a whole window of the
            # quota.
            max_bytes = self._bounds.max_fetch_bytes(self._user, call.client_id)
            if max_bytes is not None:
                request.max_bytes = min(request.max_bytes, max_bytes)
        elif call.api_key in _STRICT_SINCE and quotas.MUTATION in self._bounds.keys:
            self._count_changes(request)

    @property
    def counts_time(self) -> bool:
        """Whether count_time() is required."""
        return quotas.REQUEST in self._bounds.keys and self._call.api_key not in _FREE

    def count_time(self, used_ns: int) -> None:
        """Count the processor time of the handler."""
        # The quota is a percentage of one thread's time, so that a second counts 100.
        self._record(quotas.REQUEST, used_ns * 100 / 1e9)

    def complete(self, response: Any) -> Any:
        """Return the response with its throttle time and the refused parts."""
        call = self._call
        if call.api_key == wire.FETCH.key and hasattr(response, "responses"):
            size = sum(
                len(partition.records or b"")
                for topic in response.responses
                for partition in topic.partitions
            )
            # Over the quota, no record is sent, so that the bytes are not counted. The
            # client fetches the same records after the delay.
            if self._record(quotas.FETCH, size):
                self._bounds.take_out(
                    quotas.FETCH, self._user, call.client_id, size, self._now_ms()
                )
                response = wire.FETCH.Response(session_id=response.session_id)
        if self._refused:
            _add_refused(call, response, self._refused)
        if self._delay_ms and hasattr(response, "throttle_time_ms"):
            response.throttle_time_ms = max(response.throttle_time_ms, self._delay_ms)
        return response

    def _now_ms(self) -> int:
        return max(self._call.now_ms, self._state.now_ms)

    def _record(self, key: str, amount: float) -> int:
        """Count an amount, and delay the client if it is over its quota."""
        call = self._call
        delay_ms = self._bounds.record(
            key, self._user, call.client_id, amount, self._now_ms()
        )
        if delay_ms:
            self._bounds.throttled[key] += 1
        self._delay(delay_ms)
        return delay_ms

    def _delay(self, delay_ms: int) -> None:
        if delay_ms:
            self._delay_ms = max(self._delay_ms, delay_ms)
            mute(self._call, delay_ms, self._state)

    def _count_changes(self, request: Any) -> None:
        """Count the partitions that a request creates or deletes, topic by topic."""
        call = self._call
        is_strict = call.version >= _STRICT_SINCE[call.api_key]
        field = "topics"
        if call.api_key == wire.DELETE_TOPICS.key and call.version < 6:
            field = "topic_names"
        allowed: list[Any] = []
        delay_ms = 0
        for topic in getattr(request, field):
            topic_delay_ms = self._bounds.mutate(
                self._user,
                call.client_id,
                _changed_partitions(topic, call, self._state),
                call.now_ms,
                is_strict=is_strict,
            )
            delay_ms = max(delay_ms, topic_delay_ms)
            # Older clients do not support the error. The change is made, and the next
            # request of the client is delayed.
            if is_strict and topic_delay_ms:
                self._refused.append(topic)
            else:
                allowed.append(topic)
        setattr(request, field, allowed)
        if delay_ms:
            self._bounds.throttled[quotas.MUTATION] += 1
        self._delay(delay_ms)


def _add_refused(call: Call, response: Any, refused: list[Any]) -> None:
    """Add topics whose change exceeds the quota to a response."""
    error: dict[str, Any] = {
        "error_code": codes.THROTTLING_QUOTA_EXCEEDED,
        "error_message": "the quota of changed partitions is exceeded",
    }
    parts: list[Any]
    topic_type: Any
    if call.api_key == wire.CREATE_PARTITIONS.key:
        parts = response.results
        topic_type = wire.CREATE_PARTITIONS.Response.Topic
    elif call.api_key == wire.CREATE_TOPICS.key:
        parts = response.topics
        topic_type = wire.CREATE_TOPICS.Response.Topic
    else:
        parts = response.responses
        topic_type = wire.DELETE_TOPICS.Response.Topic
    for topic in refused:
        if isinstance(topic, str):
            parts.append(topic_type(name=topic, **error))
        else:
            parts.append(topic_type(name=topic.name, **error))
        topic_id = getattr(topic, "topic_id", None)
        if topic_id is not None and hasattr(parts[-1], "topic_id"):
            parts[-1].topic_id = topic_id


def _changed_partitions(topic: Any, call: Call, state: BrokerState) -> int:
    """Return the number of partitions that a change of a topic creates or deletes."""
    logdir = state.logdir
    if call.api_key == wire.CREATE_TOPICS.key:
        if topic.assignments:
            return len(topic.assignments)
        # -1 requests the default of the broker.
        if topic.num_partitions < 0:
            return state.settings.num_partitions
        # The handler refuses a larger number, which must not use up the quota.
        return min(int(topic.num_partitions), state.settings.max_partitions_per_request)
    name = getattr(topic, "name", topic)
    if name is None:
        name = state.topic_ids.name_of(bytes(topic.topic_id))
    if name is None or name not in logdir:
        return 0
    count = len(logdir.partitions(name))
    if call.api_key == wire.CREATE_PARTITIONS.key:
        return max(0, int(topic.count) - count)
    return count


def mute(call: Call, delay_ms: int, state: BrokerState) -> None:
    """Start no request of a connection for some time."""
    session = call.session
    # Several quotas may delay the same connection for different times.
    session.pause_count += 1

    def unmute(now_ms: int) -> None:
        session.pause_count -= 1
        if not session.pause_count and session.wake is not None:
            session.wake()

    state.timers.at(max(call.now_ms, state.now_ms) + delay_ms, unmute)
