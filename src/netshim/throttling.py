"""Applies quotas to requests: the amount that each one counts, and the delays.

Rules (as Apache Kafka 4.1.1):
- A client over a quota is answered with throttle_time_ms, and its connection is not read
  for that time.
- A fetch over its quota is answered without records, which are then not counted.
- Changes of topics over their quota are refused with THROTTLING_QUOTA_EXCEEDED in the
  versions that know the error. Older versions are delayed only.
- SASL, ApiVersions before authentication and requests of other brokers are free.

The arithmetic is in security/quotas.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from netshim import wire
from netshim.security import quotas
from netshim.session import ClientSession
from netshim.state import BrokerState, Call
from netshim.wire import codes

#: APIs whose time is not counted.
_FREE: Final = frozenset(
    api.key
    for api in (wire.SASL_HANDSHAKE, wire.SASL_AUTHENTICATE, wire.WRITE_TXN_MARKERS)
)
#: API -> first version that knows THROTTLING_QUOTA_EXCEEDED.
_STRICT_SINCE: Final = {
    wire.CREATE_TOPICS.key: 6,
    wire.CREATE_PARTITIONS.key: 3,
    wire.DELETE_TOPICS.key: 5,
}


def _user(session: ClientSession) -> str:
    return session.principal.removeprefix("User:")


def limit_request(
    request: Any, call: Call, state: BrokerState
) -> Callable[[Any], Any] | None:
    """Apply quotas before the handler; return a function that completes its response.

    Called only if any quota is set. The function must be called even if no part of the
    request is left.
    """
    bounds = state.security.quotas
    if call.api_key == wire.FETCH.key:
        most_bytes = bounds.most_fetch_bytes(_user(call.session), call.client_id)
        if most_bytes is not None:
            request.max_bytes = min(request.max_bytes, most_bytes)
        return None
    if call.api_key not in _STRICT_SINCE or quotas.MUTATION not in bounds.keys:
        return None
    return _limit_changes(request, call, state)


def _limit_changes(
    request: Any, call: Call, state: BrokerState
) -> Callable[[Any], Any] | None:
    """Count the partitions that a request creates or deletes, topic by topic."""
    is_strict = call.version >= _STRICT_SINCE[call.api_key]
    field = "topics"
    if call.api_key == wire.DELETE_TOPICS.key and call.version < 6:
        field = "topic_names"
    allowed: list[Any] = []
    refused: list[Any] = []
    delay_ms = 0
    for topic in getattr(request, field):
        topic_delay_ms = state.security.quotas.mutate(
            _user(call.session),
            call.client_id,
            _changed_partitions(topic, call, state),
            call.now_ms,
            is_strict=is_strict,
        )
        delay_ms = max(delay_ms, topic_delay_ms)
        if is_strict and topic_delay_ms:
            refused.append(topic)
        else:
            allowed.append(topic)
    if not delay_ms:
        return None
    setattr(request, field, allowed)
    error: dict[str, Any] = {
        "error_code": codes.THROTTLING_QUOTA_EXCEEDED,
        "error_message": "the quota of changed partitions is exceeded",
    }

    def complete(response: Any) -> Any:
        response.throttle_time_ms = delay_ms
        mute(call, delay_ms, state)
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
            if hasattr(parts[-1], "topic_id") and hasattr(topic, "topic_id"):
                parts[-1].topic_id = topic.topic_id
        return response

    return complete


def _changed_partitions(topic: Any, call: Call, state: BrokerState) -> int:
    """Return the number of partitions that a change of a topic creates or deletes."""
    logdir = state.logdir
    if call.api_key == wire.CREATE_TOPICS.key:
        if topic.assignments:
            return len(topic.assignments)
        if topic.num_partitions < 0:
            return state.settings.num_partitions
        # The handler refuses more, and a refused number must not fill the quota.
        return min(int(topic.num_partitions), state.settings.max_partitions_per_request)
    name = topic
    if not isinstance(topic, str):
        name = topic.name
        if name is None:
            name = state.topic_ids.name_of(bytes(topic.topic_id))
    if name is None or name not in logdir:
        return 0
    count = len(logdir.partitions(name))
    if call.api_key == wire.CREATE_PARTITIONS.key:
        return max(0, int(topic.count) - count)
    return count


def throttle(
    response: Any, call: Call, request_bytes: int, used_ns: int, state: BrokerState
) -> Any:
    """Count a request that was handled, and return its response.

    `used_ns` is the processor time of its handler. Called only if any quota is set.
    """
    gate = call.session.gate
    if gate is not None and not gate.is_open:
        return response
    bounds = state.security.quotas
    user = _user(call.session)
    now_ms = max(call.now_ms, state.now_ms)
    delay_ms = 0
    if call.api_key == wire.PRODUCE.key:
        delay_ms = bounds.record(
            quotas.PRODUCE, user, call.client_id, request_bytes, now_ms
        )
    elif call.api_key == wire.FETCH.key and hasattr(response, "responses"):
        size = sum(
            len(one.records or b"")
            for topic in response.responses
            for one in topic.partitions
        )
        delay_ms = bounds.record(quotas.FETCH, user, call.client_id, size, now_ms)
        if delay_ms:
            bounds.take_out(quotas.FETCH, user, call.client_id, size, now_ms)
            response = wire.FETCH.Response(session_id=response.session_id)
    if quotas.REQUEST in bounds.keys and call.api_key not in _FREE:
        percent_seconds = used_ns * 100 / 1e9
        delay_ms = max(
            delay_ms,
            bounds.record(
                quotas.REQUEST, user, call.client_id, percent_seconds, now_ms
            ),
        )
    if delay_ms:
        if hasattr(response, "throttle_time_ms"):
            response.throttle_time_ms = max(response.throttle_time_ms, delay_ms)
        mute(call, delay_ms, state)
    return response


def mute(call: Call, delay_ms: int, state: BrokerState) -> None:
    """Take no request from a connection for some time."""
    session = call.session
    session.mutes += 1

    def unmute(now_ms: int) -> None:
        session.mutes -= 1
        if not session.mutes and session.wake is not None:
            session.wake()

    state.timers.at(max(call.now_ms, state.now_ms) + delay_ms, unmute)
