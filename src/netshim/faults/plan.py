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
from netshim.security.acls import AclIndex
from netshim.security.asker import Asker
from netshim.security.guards import GUARDS
from netshim.state import BrokerState, Call

#: Maximum number of rules of one plan.
MOST_RULES: Final = 1_000
Handler = Callable[[Any, Call, BrokerState], Any]
_MESSAGE: Final = "a fault rule answers this error"


class FaultRules:
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
            response = self._act(chosen, handler, request, call, state)
        return _then(response, lambda value: _record(seen, value))

    def _act(
        self,
        rule: FaultRule,
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
                return _lose(rule, closes, serve())
            case Disconnect(0):
                raise CloseConnection("a fault rule closes the connection")
            case Disconnect(after_bytes):
                return _then(serve(), lambda value: _cut(value, after_bytes, call))
            case Intercept(function):
                response = function(request, call)
                return serve() if response is None else response
            case Observe():
                raise AssertionError("an observer is never chosen")


def _lose(rule: FaultRule, closes: bool, response: Any) -> PendingResponse:
    """Return a response that is never sent."""
    lost = PendingResponse(is_parked=True)

    def close(value: Any = None) -> Any:
        lost.set(CloseConnection("a fault rule lost the response"))
        return value

    if closes:
        _then(response, close)
    else:
        rule.waiting.append(close)
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
        if not pending.is_cancelled:
            answer_with(serve, pending)

    rule.waiting.append(release)
    if delay_ms is not None:

        def due(_: int) -> None:
            if release in rule.waiting:
                rule.waiting.remove(release)
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
    refused = _refusal(faulted, code, call, state)
    if others is None:
        return refused
    response = handler(others, call, state)
    return _then(response, lambda value: _join(value, refused))


def _refusal(request: Any, code: int, call: Call, state: BrokerState) -> Any:
    """Return the response that refuses a whole request with a code.

    Access control knows the form of a refusal for each API.
    """
    api = wire.APIS[call.api_key]
    name_of = state.topic_ids.name_of
    stranger = Asker(
        rules=AclIndex,
        principal="",
        host="",
        version=call.version,
        topic_of=lambda topic_id: name_of(topic_id) or "?",
        exists=state.logdir.__contains__,
        topics=state.logdir.topics,
    )
    response = GUARDS[api.key](request, stranger)
    if callable(response):
        response = response(api.Response())
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
    """Split a request into the partitions of a rule, and the others or None."""
    faulted = copy.copy(request)
    others = copy.copy(request)
    has_others = False
    for field in ("groups", "markers", "resources", *TOPIC_FIELDS):
        items = getattr(request, field, None)
        if not isinstance(items, list):
            continue
        taken: list[Any] = []
        left: list[Any] = []
        for item in items:
            if field == "resources":
                is_taken = item.resource_type == TOPIC_RESOURCE and rule.selects(
                    item.resource_name, None
                )
                (taken if is_taken else left).append(item)
                continue
            if field in ("groups", "markers"):
                one, other = _split(item, rule, name_of)
            else:
                one, other = _split_topic(item, rule, topic_name(item, name_of))
            if one is not None:
                taken.append(one)
            if other is not None:
                left.append(other)
        setattr(faulted, field, taken)
        setattr(others, field, left)
        has_others = has_others or bool(left)
    return faulted, others if has_others else None


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


def _join(response: Any, refused: Any) -> Any:
    """Add the refused parts to a response, each to the entry of its topic."""
    if response is None or isinstance(response, Exception):
        return response
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
    return response


def _identity(part: Any) -> tuple[Any, ...] | None:
    """Return the name or id of an entry of a response, or None if it has neither."""
    topic_id = bytes(getattr(part, "topic_id", b""))
    if any(topic_id):
        return (topic_id,)
    names = ("name", "topic", "group_id", "producer_id")
    found = tuple(getattr(part, one, None) for one in names)
    return None if all(one is None for one in found) else found
