"""The fault rules of one broker, and their effect on requests.

Rules:
- The first rule that matches a request acts on it. Rules that only observe never
  prevent others.
- An error that a rule answers has stored nothing. If only some partitions of a request
  match, the others are served. A lost response has stored everything.
- Access control and quotas are applied first. SaslHandshake and SaslAuthenticate have
  no faults.

A plan belongs to the broker's thread.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from logcore.errors import InvalidConfigError
from netshim import wire
from netshim.faults.requests import (
    PARTITION_FIELDS,
    TOPIC_FIELDS,
    TOPIC_RESOURCE,
    SeenRequest,
    number_of,
    seen_request,
    topic_name,
)
from netshim.faults.rules import (
    REMEMBERED,
    Answer,
    Delay,
    Disconnect,
    FaultRule,
    Intercept,
    LoseResponse,
    Observe,
)
from netshim.request_log import errors_in
from netshim.scheduling import (
    CloseConnection,
    CutResponse,
    PendingResponse,
    answer_with,
)
from netshim.security.acls import (
    WILDCARD,
    Acl,
    AclIndex,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.security.asker import Asker
from netshim.security.guards import GUARDS
from netshim.state import BrokerState, Call
from netshim.wire import codes

#: Maximum number of rules of one plan.
MOST_RULES: Final = 1_000
Handler = Callable[[Any, Call, BrokerState], Any]
_MESSAGE: Final = "a fault rule answers this error"


def _all_but_topics() -> AclIndex:
    """Return rules that refuse topics only, so that each partition has its error."""
    kinds = (ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID)
    return AclIndex(
        Acl(
            kind,
            Pattern.LITERAL,
            WILDCARD,
            "User:*",
            WILDCARD,
            AclOperation.ALL,
            Permission.ALLOW,
        )
        for kind in kinds
    )


class RequestFaultPlan:
    """The rules of one broker, in the order in which they are asked."""

    def __init__(self) -> None:
        """Create a plan without rules."""
        self.rules: list[FaultRule] = []
        #: The latest requests, whether or not a rule matched.
        self.requests: deque[SeenRequest] = deque(maxlen=REMEMBERED)

    def add(self, rule: FaultRule) -> None:
        """Add a rule after the others.

        Raises:
            InvalidConfigError: the plan has too many rules.
        """
        if len(self.rules) >= MOST_RULES:
            raise InvalidConfigError("too many rules", expected=f"at most {MOST_RULES}")
        rule.recent = self.requests
        self.rules.append(rule)

    def remove(self, rule: FaultRule) -> None:
        """Remove a rule, and release its requests."""
        if rule in self.rules:
            self.rules.remove(rule)
        rule.release()

    def end(self) -> None:
        """Remove all rules, and release their requests."""
        for rule in [*self.rules]:
            self.remove(rule)

    def handle(
        self, handler: Handler, request: Any, call: Call, state: BrokerState
    ) -> Any:
        """Call the handler of a request, changed by the rules that match."""
        api = wire.APIS[call.api_key]
        seen = seen_request(api.name, request, call, state.topic_ids.name_of)
        if api is wire.METADATA and (
            request.topics is None or (call.version == 0 and not request.topics)
        ):
            # The response lists all topics.
            seen.partitions = tuple((one, None) for one in state.logdir.topics())
        self.requests.append(seen)
        chosen = None
        for rule in self.rules:
            if not rule.matches(seen):
                continue
            is_observer = isinstance(rule.action, Observe)
            if (is_observer or chosen is None) and rule.acts():
                rule.hit(seen)
                if not is_observer:
                    chosen = rule
        if chosen is None:
            response = handler(request, call, state)
        else:
            response = self._act(chosen, seen, handler, request, call, state)
        return _then(response, lambda value: _record(seen, value))

    def _act(
        self,
        rule: FaultRule,
        seen: SeenRequest,
        handler: Handler,
        request: Any,
        call: Call,
        state: BrokerState,
    ) -> Any:
        serve = partial(handler, request, call, state)
        match rule.action:
            case Answer(code):
                return _answer(rule, code, handler, request, call, state)
            case Delay(delay_ms):
                return _delay(rule, delay_ms, serve, call, state)
            case LoseResponse(closes):
                return _lose(rule, closes, serve, seen)
            case Disconnect(0):
                raise CloseConnection("a fault rule closes the connection")
            case Disconnect(after_bytes):
                return _then(serve(), lambda value: _cut(value, after_bytes, call))
            case Intercept(function):
                response = function(request, call)
                return serve() if response is None else response
            case Observe():
                raise AssertionError("an observer is never chosen")


def _lose(
    rule: FaultRule, closes: bool, serve: Callable[[], Any], seen: SeenRequest
) -> PendingResponse:
    """Serve a request, and return a response that is never sent."""
    lost = PendingResponse(is_parked=True)
    served = PendingResponse()

    def close() -> None:
        lost.set(CloseConnection("a fault rule lost the response"))

    def finish(value: Any) -> None:
        _record(seen, value)
        if closes:
            close()

    def cancel() -> None:
        rule.forget(close)
        served.cancel()

    if not closes:
        rule.waiting.append(close)
    lost.when_cancelled(cancel)
    answer_with(serve, served)
    served.then(finish)
    return lost


def _delay(
    rule: FaultRule,
    delay_ms: int | None,
    serve: Callable[[], Any],
    call: Call,
    state: BrokerState,
) -> PendingResponse:
    """Serve a request later. The connection starts no other request until then."""
    pending = PendingResponse(is_in_pieces=True, is_parked=True)

    def release() -> None:
        answer_with(serve, pending)

    rule.waiting.append(release)

    def cancel() -> None:
        rule.forget(release)

    pending.when_cancelled(cancel)
    if delay_ms is not None:

        def due(_: int) -> None:
            if rule.forget(release):
                release()

        state.timers.at(max(call.now_ms, state.now_ms) + delay_ms, due)
    return pending


# -- errors ----------------------------------------------------------------------------


def _answer(
    rule: FaultRule,
    code: int,
    handler: Handler,
    request: Any,
    call: Call,
    state: BrokerState,
) -> Any:
    """Answer an error for the partitions of a rule, and serve the others."""
    if call.api_key == wire.METADATA.key:
        # A request may name no topic, and its response lists them.
        response = handler(request, call, state)
        return _then(response, lambda value: _mark_topics(value, rule, code))
    if not rule.selects_partitions:
        return _refusal(request, code, call, state)
    faulted, others = _split(request, rule, state.topic_ids.name_of)
    if others is None:
        return _refusal(faulted, code, call, state)
    response = handler(others, call, state)
    # Like Kafka, Produce with acks=0 closes the connection after the other appends.
    refused = _refusal(faulted, code, call, state, rules=_all_but_topics)
    return _then(response, lambda value: _joined(value, refused))


def _joined(response: Any, refused: Any) -> Any:
    """Return a response with its refused parts.

    If the API has errors for whole requests only, the refusal is the response.
    """
    if response is None or isinstance(response, Exception):
        return response
    lists = [getattr(refused, one) for one in refused.__slots__]
    if any(isinstance(one, list) and one for one in lists):
        _join(response, refused)
        return response
    if getattr(refused, "error_code", 0):
        return refused
    return response


def _refusal(
    request: Any,
    code: int,
    call: Call,
    state: BrokerState,
    rules: Callable[[], AclIndex] = AclIndex,
) -> Any:
    """Return the response that refuses a request with a code.

    Access control knows the form of a refusal for each API. `rules` returns the
    permissions of the made-up user that it refuses.
    """
    api = wire.APIS[call.api_key]
    name_of = state.topic_ids.name_of
    stranger = Asker(
        rules=rules,
        principal="",
        host="",
        version=call.version,
        topic_of=lambda topic_id: name_of(topic_id) or "?",
        exists=state.logdir.__contains__,
        topics=state.logdir.topics,
    )
    response: Any = GUARDS[api.key](request, stranger)
    if callable(response):
        empty = api.Response()
        if api is wire.OFFSET_FETCH:
            # Its guard completes the groups that the handler has answered.
            empty.groups = [
                empty.Group(group_id=one.group_id) for one in request.groups
            ]
        response = response(empty)
    elif response is None:
        response = api.Response()
    if not _replace_codes(response, code) and hasattr(response, "error_code"):
        response.error_code = code
    return response


def _cut(value: Any, after_bytes: int, call: Call) -> Any:
    if value is None or isinstance(value, Exception):
        return CloseConnection("a fault rule closes the connection")
    call.session.is_ending = True
    return CutResponse(value, after_bytes)


def _record(seen: SeenRequest, response: Any) -> Any:
    """Store the error codes of a response with its request, and return the response."""
    whole = response.response if isinstance(response, CutResponse) else response
    if isinstance(whole, Exception) and not isinstance(whole, CloseConnection):
        seen.codes = (codes.UNKNOWN_SERVER_ERROR,)
    elif seen.codes is None:
        seen.codes = tuple(code for code, _ in errors_in(whole))
    return response


def _then(response: Any, change: Callable[[Any], Any]) -> Any:
    """Return a changed response, now or once it is available."""
    if not isinstance(response, PendingResponse):
        return change(response)
    changed = PendingResponse(
        is_parked=response.is_parked, is_in_pieces=response.is_in_pieces
    )
    changed.held_bytes = response.held_bytes
    changed.when_cancelled(response.cancel)
    answer = response
    answer.then(lambda value: answer_with(lambda: change(value), changed))
    return changed


def _split(
    request: Any, rule: FaultRule, name_of: Callable[[bytes], str | None]
) -> tuple[Any, Any]:
    """Split a request into the partitions that a rule selects, and the others.

    A part is None if it has no partitions.
    """
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
                is_taken = is_topic and rule.selects(item.resource_name, None)
                pair = (item, None) if is_taken else (None, item)
            elif field in ("groups", "markers"):
                pair = _split(item, rule, name_of)
            else:
                pair = _split_topic(item, rule, topic_name(item, name_of))
            for found, one in zip(lists, pair, strict=True):
                if one is not None:
                    found.append(one)
        for at in range(2):
            setattr(parts[at], field, lists[at])
            is_used[at] = is_used[at] or bool(lists[at])
    return parts[0] if is_used[0] else None, parts[1] if is_used[1] else None


def _split_topic(topic: Any, rule: FaultRule, name: str | None) -> tuple[Any, Any]:
    """Split a topic into the partitions that a rule selects, and the others."""
    for field in PARTITION_FIELDS:
        parts = getattr(topic, field, None)
        if not isinstance(parts, list):
            continue
        taken = [one for one in parts if rule.selects(name, number_of(one))]
        left = [one for one in parts if not rule.selects(name, number_of(one))]
        faulted = others = None
        if taken:
            faulted = copy.copy(topic)
            setattr(faulted, field, taken)
        if left or not taken:
            others = copy.copy(topic)
            setattr(others, field, left)
        return faulted, others
    if rule.selects(name, None):
        return topic, None
    return None, topic


def _replace_codes(part: Any, code: int) -> bool:
    """Replace all errors in a response; return whether there are any."""
    if isinstance(part, list):
        return bool([one for one in part if _replace_codes(one, code)])
    has_error = False
    for name in getattr(part, "__slots__", ()):
        value = getattr(part, name)
        if name.endswith("error_code") and value:
            setattr(part, name, code)
            has_error = True
            if getattr(part, "error_message", None):
                part.error_message = _MESSAGE
        elif isinstance(value, list):
            has_error = _replace_codes(value, code) or has_error
    return has_error


def _mark_topics(response: Any, rule: FaultRule, code: int) -> Any:
    """Set the error of topics or partitions in a response of Metadata."""
    for topic in getattr(response, "topics", ()):
        if not rule.selects(topic.name, None):
            continue
        if "partition" not in rule.filters:
            topic.error_code = code
            topic.partitions = []
            continue
        for one in topic.partitions:
            if rule.selects(topic.name, one.partition_index):
                one.error_code = code
    return response


def _join(response: Any, refused: Any) -> None:
    """Add the refused parts to a response, each to the entry of its topic."""
    for name in refused.__slots__:
        items = getattr(refused, name)
        if not isinstance(items, list):
            continue
        present = {_identity(one): one for one in getattr(response, name)}
        for one in items:
            same = present.get(_identity(one))
            if same is None or _identity(one) is None:
                getattr(response, name).append(one)
            else:
                _join(same, one)


def _identity(part: Any) -> tuple[Any, ...] | None:
    """Return the name or id of an entry of a response, or None if it has neither."""
    topic_id = bytes(getattr(part, "topic_id", b""))
    if any(topic_id):
        return (topic_id,)
    names = ("name", "topic", "group_id", "producer_id")
    found = tuple(getattr(part, one, None) for one in names)
    return None if all(one is None for one in found) else found
