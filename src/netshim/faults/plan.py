"""The fault rules of one broker, and their effect on requests.

Rules:
- The first rule that matches a request acts on it. Rules that only observe never
  prevent others.
- A request that a rule answers with an error stores nothing. If only some partitions of
  a request match, the others are served. A request whose response is lost is served.
- Access control and quotas are applied first. SaslHandshake and SaslAuthenticate have
  no faults.

Only the broker's thread uses a plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final

from logcore.errors import InvalidConfigError
from netshim import wire
from netshim.faults.refusals import Handler, refusal_response, refuse_partitions
from netshim.faults.requests import ANY_API, ObservedRequest, observe_request
from netshim.faults.rules import (
    MAX_OBSERVED,
    Answer,
    Delay,
    Disconnect,
    FaultRule,
    Intercept,
    LoseResponse,
    Observe,
)
from netshim.response_errors import error_fields
from netshim.scheduling import (
    CloseConnection,
    PendingResponse,
    TruncatedResponse,
    map_response,
    resolve_with,
)
from netshim.state import BrokerState, Call
from netshim.wire import codes

#: Maximum number of rules of one plan.
MAX_RULES: Final = 1_000


class _RulesOfApi:
    """The rules of a plan for one API. Rules for single topics are found by the topic."""

    def __init__(self, rules: Sequence[FaultRule], api: str) -> None:
        #: The rules for one topic, with their positions in the plan.
        self._by_topic: dict[str, list[tuple[int, FaultRule]]] = {}
        #: The other rules.
        self._without_topic: list[tuple[int, FaultRule]] = []
        for position, rule in enumerate(rules):
            if rule.api not in (ANY_API, api):
                continue
            topic = rule.only_topic
            target = self._without_topic
            if topic is not None:
                target = self._by_topic.setdefault(topic, [])
            target.append((position, rule))

    def rules_for(self, observed: ObservedRequest) -> Iterable[FaultRule]:
        """Return the rules for the topics of a request, in the order of the plan."""
        if not self._by_topic:
            return [rule for _, rule in self._without_topic]
        numbered = self._without_topic
        for topic in {topic for topic, _ in observed.partitions}:
            # Not `+=`, which would change the list of the index.
            numbered = numbered + self._by_topic.get(topic, [])
        return [rule for _, rule in sorted(numbered, key=itemgetter(0))]


class RequestFaultPlan:
    """The rules of one broker, in the order in which they are checked."""

    def __init__(self) -> None:
        """Create a plan without rules."""
        self.rules: list[FaultRule] = []
        #: The rules by API, for the APIs that were requested since the last change.
        self._index: dict[str, _RulesOfApi] = {}
        #: The latest requests, whether or not a rule matched.
        self.requests: deque[ObservedRequest] = deque(maxlen=MAX_OBSERVED)

    def add(self, rule: FaultRule) -> None:
        """Add a rule after the others.

        Raises:
            InvalidConfigError: the plan has too many rules.
        """
        if len(self.rules) >= MAX_RULES:
            raise InvalidConfigError("too many rules", expected=f"at most {MAX_RULES}")
        rule.recent = self.requests
        self.rules.append(rule)
        # Rebuilt by the next request of each API.
        self._index.clear()

    def remove(self, rule: FaultRule) -> None:
        """Remove a rule, and release its requests."""
        if rule in self.rules:
            self.rules.remove(rule)
            self._index.clear()
        # Otherwise, the clients of these requests would wait until their timeouts.
        rule.release()

    def end(self) -> None:
        """Remove all rules, and release their requests."""
        # A copy, because remove() changes the list.
        for rule in [*self.rules]:
            self.remove(rule)

    def handle(
        self, handler: Handler, request: Any, call: Call, state: BrokerState
    ) -> Any:
        """Call the handler of a request, changed by the rules that match."""
        api = wire.APIS[call.api_key]
        observed = observe_request(api.name, request, call, state)
        if api is wire.METADATA and (
            request.topics is None or (call.version == 0 and not request.topics)
        ):
            # The response lists all topics.
            observed.partitions = tuple(
                (topic, None) for topic in state.logdir.topics()
            )
        self.requests.append(observed)
        # Step 1: count the request for each rule that matches, and choose the one that
        # acts.
        chosen = None
        index = self._index.get(api.name)
        if index is None:
            index = self._index[api.name] = _RulesOfApi(self.rules, api.name)
        for rule in index.rules_for(observed):
            if not rule.matches(observed):
                continue
            is_observer = isinstance(rule.action, Observe)
            # Observers count each request. Only the first other rule that matches acts.
            if (is_observer or chosen is None) and rule.acts():
                rule.hit(observed)
                if not is_observer:
                    chosen = rule
        # Step 2: call the handler, unless the rule prevents it.
        if chosen is None:
            response = handler(request, call, state)
        else:
            response = self._act(chosen, observed, handler, request, call, state)
        # The error codes are available together with the response.
        if isinstance(response, PendingResponse):
            return map_response(response, partial(_record, observed))
        return _record(observed, response)

    def _act(
        self,
        rule: FaultRule,
        observed: ObservedRequest,
        handler: Handler,
        request: Any,
        call: Call,
        state: BrokerState,
    ) -> Any:
        serve = partial(handler, request, call, state)
        match rule.action:
            case Answer(code):
                return _respond_with_error(rule, code, handler, request, call, state)
            case Delay(delay_ms):
                return _delay(rule, delay_ms, serve, call, state)
            case LoseResponse(closes):
                return _lose(rule, closes, serve, observed)
            # Before the handler, so that the request has no effect.
            case Disconnect(0):
                raise CloseConnection("a fault rule closes the connection")
            case Disconnect(after_bytes):
                return map_response(
                    serve(), lambda value: _truncate(value, after_bytes, call)
                )
            case Intercept(function):
                response = function(request, call)
                return serve() if response is None else response
            case Observe():
                raise AssertionError("an observer is never chosen")


def _lose(
    rule: FaultRule,
    closes: bool,
    serve: Callable[[], Any],
    observed: ObservedRequest,
) -> PendingResponse:
    """Serve a request, and return a response that is never sent."""
    # Parked, so that it does not count as a request in progress until the rule ends.
    lost = PendingResponse(is_parked=True)
    served = PendingResponse()

    def close() -> None:
        lost.set(CloseConnection("a fault rule lost the response"))

    def finish(value: Any) -> None:
        _record(observed, value)
        if closes:
            close()

    def cancel() -> None:
        rule.forget(close)
        served.cancel()

    if not closes:
        rule.waiting.append(close)
    lost.when_cancelled(cancel)
    # The request is served, and its response is lost, as after a network failure.
    resolve_with(serve, served)
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
    # runs_in_steps makes the later requests of the connection wait.
    pending = PendingResponse(runs_in_steps=True, is_parked=True)

    def release() -> None:
        resolve_with(serve, pending)

    rule.waiting.append(release)

    def cancel() -> None:
        rule.forget(release)

    pending.when_cancelled(cancel)
    if delay_ms is not None:

        def due(_: int) -> None:
            # The rule may have been removed, which has served the request.
            if rule.forget(release):
                release()

        state.timers.at(max(call.now_ms, state.now_ms) + delay_ms, due)
    return pending


# -- errors ----------------------------------------------------------------------------


def _respond_with_error(
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
        return map_response(response, lambda value: _mark_topics(value, rule, code))
    if not rule.selects_partitions:
        return refusal_response(request, code, call, state)
    return refuse_partitions(rule.selects, code, handler, request, call, state)


def _truncate(value: Any, after_bytes: int, call: Call) -> Any:
    # Without a response, there are no bytes to send.
    if value is None or isinstance(value, Exception):
        return CloseConnection("a fault rule closes the connection")
    # No request of the connection is served after the cut.
    call.session.is_closing = True
    return TruncatedResponse(value, after_bytes)


def _record(observed: ObservedRequest, response: Any) -> Any:
    """Store the error codes of a response with its request, and return the response."""
    full_response = (
        response.response if isinstance(response, TruncatedResponse) else response
    )
    if isinstance(full_response, Exception) and not isinstance(
        full_response, CloseConnection
    ):
        observed.codes = (codes.UNKNOWN_SERVER_ERROR,)
    # Recorded earlier if the response was lost, see _lose().
    elif observed.codes is None:
        observed.codes = tuple(
            getattr(part, name) for part, name in error_fields(full_response)
        )
    return response


def _mark_topics(response: Any, rule: FaultRule, code: int) -> Any:
    """Set the error of topics or partitions in a response of Metadata."""
    for topic in getattr(response, "topics", ()):
        if not rule.selects(topic.name, None):
            continue
        # The filter `topic` alone selects the whole topic.
        if "partition" not in rule.filters:
            topic.error_code = code
            # As in Kafka, a topic with an error has no partitions.
            topic.partitions = []
            continue
        for partition in topic.partitions:
            if rule.selects(topic.name, partition.partition_index):
                partition.error_code = code
    return response
