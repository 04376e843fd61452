"""Requests that are refused as a whole or for some partitions, in the form of their API.

The guards of access control define the form of a refusal for each API and version. So a
request is refused as if a user without permissions had sent it, with another error
code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

from netshim import wire
from netshim.faults.requests import (
    PARTITION_FIELDS,
    TOPIC_FIELDS,
    TOPIC_RESOURCE,
    number_of,
    topic_name,
)
from netshim.response_errors import error_fields
from netshim.scheduling import map_response
from netshim.security.acls import (
    WILDCARD,
    Acl,
    AclIndex,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.security.guards import GUARDS
from netshim.security.requester import Requester
from netshim.state import BrokerState, Call

#: Whether a partition is refused, by its topic and number. The number is None for a
#: topic in a request without partitions.
Selects = Callable[[str | None, int | None], bool]
Handler = Callable[[Any, Call, BrokerState], Any]
#: Replaces the messages of access control in refusals.
_MESSAGE: Final = "a test has asked for this error"


def refuse_partitions(
    selects: Selects,
    code: int,
    handler: Handler,
    request: Any,
    call: Call,
    state: BrokerState,
) -> Any:
    """Answer an error for the selected partitions, and serve the others."""
    refused_request, served_request = _split(request, selects, state.topic_ids.name_of)
    if refused_request is None:
        return handler(request, call, state)
    # All partitions are selected, so the handler has nothing to do.
    if served_request is None:
        return refusal_response(refused_request, code, call, state)
    if call.api_key == wire.FETCH.key:
        served_request.max_wait_ms = 0  # Kafka answers a refusal at once
    response = handler(served_request, call, state)
    # Like Kafka, Produce with acks=0 closes the connection after the other appends.
    refused = refusal_response(
        refused_request, code, call, state, rules=_allow_all_but_topics
    )
    return map_response(response, lambda value: _joined(value, refused))


def refusal_response(
    request: Any,
    code: int,
    call: Call,
    state: BrokerState,
    rules: Callable[[], AclIndex] = AclIndex,
) -> Any:
    """Return the response that refuses a request with a code.

    The guards of access control define the form of a refusal. They check the request of
    an imaginary user, and `rules` returns the rules for this user.
    """
    api = wire.APIS[call.api_key]
    name_of = state.topic_ids.name_of
    # The imaginary user.
    requester = Requester(
        rules=rules,
        principal="",
        host="",
        version=call.version,
        topic_of=lambda topic_id: name_of(topic_id) or "?",
        exists=state.logdir.__contains__,
        topics=state.logdir.topics,
    )
    response: Any = GUARDS[api.key](request, requester)
    if callable(response):
        empty = api.Response()
        if api is wire.OFFSET_FETCH:
            # Its guard completes the groups that the handler has answered.
            empty.groups = [
                empty.Group(group_id=group.group_id) for group in request.groups
            ]
        # The guard would add the refused parts to the response of the handler.
        response = response(empty)
    elif response is None:
        response = api.Response()
    # The guard uses the codes of access control.
    if not _replace_codes(response, code) and hasattr(response, "error_code"):
        response.error_code = code
    return response


def _allow_all_but_topics() -> AclIndex:
    """Return rules that refuse topics only, so that each partition has its error."""
    resource_types = (ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID)
    return AclIndex(
        Acl(
            resource_type,
            Pattern.LITERAL,
            WILDCARD,
            "User:*",
            WILDCARD,
            AclOperation.ALL,
            Permission.ALLOW,
        )
        for resource_type in resource_types
    )


def _joined(response: Any, refused: Any) -> Any:
    """Return a response with its refused parts.

    If the API has errors for whole requests only, the refusal is the response.
    """
    # A Produce with acks=0 has no response to which errors could be added.
    if response is None or isinstance(response, Exception):
        return response
    lists = [getattr(refused, slot) for slot in refused.__slots__]
    if any(isinstance(entries, list) and entries for entries in lists):
        _join(response, refused)
        return response
    if getattr(refused, "error_code", 0):
        return refused
    return response


def _split(
    request: Any, selects: Selects, name_of: Callable[[bytes], str | None]
) -> tuple[Any, Any]:
    """Split a request into the partitions that are selected, and the others.

    A part is None if it has no partitions.
    """
    # Shallow copies. The lists that are split are replaced, never changed.
    parts: tuple[Any, Any] = (copy.copy(request), copy.copy(request))
    is_used = [False, False]
    for field in ("groups", "markers", "resources", *TOPIC_FIELDS):
        items = getattr(request, field, None)
        if not isinstance(items, list):
            continue
        lists: tuple[list[Any], list[Any]] = ([], [])
        for item in items:
            if field == "resources":
                is_topic = item.resource_type == TOPIC_RESOURCE
                is_selected = is_topic and selects(item.resource_name, None)
                selected_and_rest = (item, None) if is_selected else (None, item)
            elif field in ("groups", "markers"):
                selected_and_rest = _split(item, selects, name_of)
            else:
                selected_and_rest = _split_topic(
                    item, selects, topic_name(item, name_of)
                )
            for target, entry in zip(lists, selected_and_rest, strict=True):
                if entry is not None:
                    target.append(entry)
        for side in range(2):
            setattr(parts[side], field, lists[side])
            is_used[side] = is_used[side] or bool(lists[side])
    return parts[0] if is_used[0] else None, parts[1] if is_used[1] else None


def _split_topic(topic: Any, selects: Selects, name: str | None) -> tuple[Any, Any]:
    """Split a topic into the partitions that are selected, and the others."""
    for field in PARTITION_FIELDS:
        parts = getattr(topic, field, None)
        if not isinstance(parts, list):
            continue
        selected = [part for part in parts if selects(name, number_of(part))]
        rest = [part for part in parts if not selects(name, number_of(part))]
        selected_topic = rest_topic = None
        if selected:
            selected_topic = copy.copy(topic)
            setattr(selected_topic, field, selected)
        # A topic without partitions is passed to the handler.
        if rest or not selected:
            rest_topic = copy.copy(topic)
            setattr(rest_topic, field, rest)
        return selected_topic, rest_topic
    if selects(name, None):
        return topic, None
    return None, topic


def _replace_codes(response: Any, code: int) -> bool:
    """Replace all errors in a response; return whether there are any."""
    has_error = False
    for part, name in error_fields(response):
        has_error = True
        setattr(part, name, code)
        if getattr(part, "error_message", None):
            part.error_message = _MESSAGE
    return has_error


def _join(response: Any, refused: Any) -> None:
    """Add the refused parts to a response, each to the entry of its topic."""
    for name in refused.__slots__:
        items = getattr(refused, name)
        if not isinstance(items, list):
            continue
        existing = {_identity(entry): entry for entry in getattr(response, name)}
        for item in items:
            counterpart = existing.get(_identity(item))
            # The topic has only refused partitions, or the entry is not one of a topic.
            if counterpart is None or _identity(item) is None:
                getattr(response, name).append(item)
            else:
                _join(counterpart, item)


def _identity(part: Any) -> tuple[Any, ...] | None:
    """Return the name or id of an entry of a response, or None if it has neither."""
    # Versions with topic ids have no names of topics.
    topic_id = bytes(getattr(part, "topic_id", b""))
    if any(topic_id):
        return (topic_id,)
    names = ("name", "topic", "group_id", "producer_id")
    values = tuple(getattr(part, name, None) for name in names)
    return None if all(entry is None for entry in values) else values
