"""A broker without sockets, threads or a clock: it maps request frames to responses.

The host (server.py, or a test) passes the time with each call, runs submitted work, and
calls tick() at next_ms. Therefore, a test can run the broker on a simulated disk and
clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from netshim import scheduling, wire
from netshim.fast_path import FastPath
from netshim.fetch_sessions import SessionFetch
from netshim.groups import BrokerGroups
from netshim.handlers import HANDLERS, NOT_SHARED, Handler, refused_versions
from netshim.handlers.authentication import Reply
from netshim.request_counts import RequestCounts
from netshim.request_log import quoted
from netshim.response_errors import errors_in
from netshim.scheduling import (
    CallLater,
    CloseConnection,
    PendingResponse,
    Submit,
    TruncatedResponse,
)
from netshim.security.guards import GUARDS
from netshim.security.requester import Requester
from netshim.security.service import Security
from netshim.served_directory import ServedDirectory
from netshim.session import BROKER_PRINCIPAL, ClientSession
from netshim.settings import Settings
from netshim.sharing import SharedDirectoryGroups, SharedDirectoryTransactions
from netshim.state import BrokerState, Call
from netshim.throttling import Throttle, is_between_brokers
from netshim.topology import SoleTopology
from netshim.transactions import TransactionHost
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.faults.nodes import AdvertisedNodes
    from netshim.faults.plan import RequestFaultPlan

_log = logging.getLogger("netshim")

Buffer = wire.Buffer
#: APIs whose requests wait for records or for other members, and not for work of the
#: broker.
_PARKED: Final = wire.keys_of(wire.FETCH, wire.JOIN_GROUP, wire.SYNC_GROUP)
#: APIs that report state which other requests change. A client that sends one after a
#: change expects to see the result: librdkafka requests committed offsets immediately
#: after commits, on the same connection.
_REPORTING: Final = wire.keys_of(
    wire.LIST_OFFSETS,
    wire.METADATA,
    wire.OFFSET_FETCH,
    wire.DESCRIBE_GROUPS,
    wire.LIST_GROUPS,
    wire.OFFSET_FOR_LEADER_EPOCH,
    wire.DESCRIBE_CONFIGS,
    wire.DESCRIBE_LOG_DIRS,
    wire.DESCRIBE_PRODUCERS,
    wire.DESCRIBE_TRANSACTIONS,
    wire.LIST_TRANSACTIONS,
    wire.CONSUMER_GROUP_DESCRIBE,
    wire.DESCRIBE_TOPIC_PARTITIONS,
)
#: APIs whose refusals are logged: those that change state, and those that a client
#: cannot do without.
_LOGGED_REFUSALS: Final = wire.keys_of(
    wire.API_VERSIONS,
    wire.LIST_OFFSETS,
    wire.OFFSET_COMMIT,
    wire.FIND_COORDINATOR,
    wire.JOIN_GROUP,
    wire.SYNC_GROUP,
    wire.CONSUMER_GROUP_HEARTBEAT,
    wire.CREATE_TOPICS,
    wire.DELETE_TOPICS,
    wire.CREATE_PARTITIONS,
    wire.DELETE_RECORDS,
    wire.INIT_PRODUCER_ID,
    wire.ADD_PARTITIONS_TO_TXN,
    wire.ADD_OFFSETS_TO_TXN,
    wire.END_TXN,
    wire.TXN_OFFSET_COMMIT,
    wire.ALTER_CONFIGS,
    wire.INCREMENTAL_ALTER_CONFIGS,
    wire.DELETE_GROUPS,
    wire.OFFSET_DELETE,
)
#: A request with more entries than this is refused if too many requests are being
#: processed in chunks. Smaller requests are then processed without chunks.
_LARGE_ENTRIES: Final = 10_000
#: Approximate bytes of Python objects for one entry of a request.
_ENTRY_BYTES: Final = 300
#: Key of WorkQueues.submit() for encoding large responses: one at a time, so that the
#: other threads are free for disk I/O.
_LARGE_RESPONSES: Final = "large responses"
#: The feature that a client needs when it sends a request of an API that is not served.
_FEATURES: Final = {
    **dict.fromkeys((*range(76, 80), *range(83, 88), *range(90, 93)), "share groups"),
    **dict.fromkeys((88, 89), "streams groups"),
    **dict.fromkeys(
        NOT_SHARED,
        "groups of the consumer protocol in a directory that is shared with other processes",
    ),
}


def reports_changes(frame: memoryview) -> bool:
    """Return whether a request reports state that others change. Connection calls this."""
    return int.from_bytes(frame[:2], "big") in _REPORTING


def _return_response(
    response: Any, request: Any, call: Call, state: BrokerState
) -> Any:
    """Return the first argument.

    It takes the place of a handler if the response exists.
    """
    return response


def _complete_fetch(
    session_fetch: SessionFetch, complete: Callable[[Any], Any] | None, value: Any
) -> Any:
    """Return the response to a Fetch of a session."""
    if complete is not None:
        value = complete(value)
    if isinstance(value, TruncatedResponse):
        return attrs.evolve(value, response=session_fetch.complete(value.response))
    return session_fetch.complete(value)


def _encoded_or_close(result: Any) -> Any:
    """Return a response that was encoded outside the event loop.

    If encoding failed, return CloseConnection: without it, the client would wait
    indefinitely.
    """
    if isinstance(result, Exception) and not isinstance(result, CloseConnection):
        return CloseConnection(f"an answer could not be encoded: {result!r}")
    return result


class Broker:
    """One broker over a LogDir that is open for writing.

    `new_id` returns the unique part of a new member id. `services` sets the coordinators
    of the state, in a cluster. BrokerState describes `submit` and `later`.
    """

    def __init__(
        self,
        logdir: ServedDirectory,
        settings: Settings,
        submit: Submit,
        new_id: Callable[[], str] | None = None,
        call_later: CallLater | None = None,
        security: Security | None = None,
        services: Callable[[BrokerState], None] | None = None,
    ) -> None:
        self.state = BrokerState(logdir, settings, submit, call_later, security)
        #: The API of the latest request, for the host's report of a slow iteration.
        self.last_api = "none"
        #: Number of requests, for the host's timer.
        self.request_count = 0
        #: The fault rules of a test. They change the handlers.
        self.faults: RequestFaultPlan | None = None
        #: The nodes that a test has chosen. They change the handlers too.
        self._nodes: AdvertisedNodes | None = None
        #: Counts of requests. Set by the host that serves metrics.
        self.counts: RequestCounts | None = None
        self._fast_path: FastPath | None = None
        if not logdir.is_shared:
            self._fast_path = FastPath(self.state, self._handle_in_general)
        if services is not None:
            services(self.state)
        elif logdir.is_shared:
            self.state.groups = SharedDirectoryGroups(self.state)
            self.state.transactions = SharedDirectoryTransactions(self.state)
        else:
            if new_id is None:
                self.state.groups = BrokerGroups(self.state)
            else:
                self.state.groups = BrokerGroups(self.state, new_id)
            self.state.transactions = TransactionHost(self.state)

    def advertise(self, nodes: AdvertisedNodes | None) -> None:
        """Advertise several nodes, which all are this broker, or one node again."""
        self._nodes = nodes
        state = self.state
        if nodes is None:
            state.topology = SoleTopology(
                state.logdir, state.settings.max_replication_factor
            )
        else:
            state.topology = nodes.topology(state)

    def handle(
        self, session: ClientSession, frame: memoryview, now_ms: int
    ) -> list[Buffer] | PendingResponse | None:
        """Return the response to one frame, or the PendingResponse that will hold it.

        The response is None if the API has none.

        Raises:
            CloseConnection: the frame is not a valid request, or its API is not served.
        """
        if (
            self._fast_path is not None
            and (
                session.authentication is None
                or session.authentication.passes_requests(now_ms)
            )
            and self.faults is None
            and self._nodes is None
            and self.state.release is None
            and not self.state.security.quotas.keys
        ):
            reply = self._fast_path.handle(session, frame, now_ms, self.counts)
            if reply is not None:
                # Produce and Fetch have keys below 256, so the second byte is the key.
                self.last_api = wire.APIS[frame[1]].name
                self.request_count += 1
                return reply
        return self._handle_in_general(session, frame, now_ms)

    def _handle_in_general(
        self, session: ClientSession, frame: memoryview, now_ms: int
    ) -> list[Buffer] | PendingResponse | None:
        """Handle a frame of any API, see handle()."""
        # Step 1: decode the request, and refuse APIs and versions that are not served.
        # A connection that must authenticate first reaches no handler.
        if session.authentication is not None:
            reply: Reply | bool = session.authentication.handle(frame, now_ms)
            if not isinstance(reply, bool):
                return reply
        if self.faults is not None:
            # A rule may delay the request, and the buffer of the connection is reused.
            frame = memoryview(bytes(frame))
        try:
            header = wire.decode_header(frame)
            api = wire.APIS[header.api_key]
            version = header.api_version
            release = self.state.release
            is_served = release is None or release.serves(api.key, version)
            if api is wire.API_VERSIONS and not (
                is_served and api.min_version <= version <= api.max_version
            ):
                response_body = refused_versions(release)
                return wire.encode_response(
                    api, 0, header.correlation_id, response_body
                )
            if not is_served:
                raise CloseConnection(f"{api.name} v{version} is not served")
            handler = HANDLERS.get(header.api_key)
            if handler is None or (
                self.state.is_shared and header.api_key in NOT_SHARED
            ):
                self._log_unserved(header, session.client_address, now_ms)
                raise CloseConnection(f"{api.name} is not served")
            request, entries = wire.decode_and_count_request(
                header, frame, self.state.settings.max_request_entries
            )
        except wire.ProtocolError as error:
            self._log_unknown(frame, session.client_address, now_ms)
            raise CloseConnection(str(error)) from error
        if entries > _LARGE_ENTRIES and self.state.step_runner.is_full:
            raise CloseConnection(
                f"{api.name} of {entries} entries, while many large requests are in progress already"
            )
        if self._nodes is not None:
            # Fault rules wrap the nodes: a request that a rule answers reaches no node.
            handler = partial(self._nodes.handle, handler)
        if self.faults is not None:
            handler = partial(self.faults.handle, handler)
        # Step 2: call the handler. Its exceptions become an error response.
        counts = self.counts
        began_s = 0.0
        if counts is not None:
            began_s = time.perf_counter()
            counts.received_bytes += len(frame)
        self.last_api = api.name
        self.request_count += 1
        call = Call(session, header.api_key, version, header.client_id, now_ms)
        complete = None
        response: Any
        security = self.state.security
        session_fetch = None
        if api is wire.FETCH and (request.session_id or request.session_epoch != -1):
            # An error of the session is returned without a call of the handler.
            session_fetch = self._begin_fetch(request, call)
        try:
            if isinstance(session_fetch, int):
                response = wire.FETCH.Response(error_code=session_fetch)
                if self.faults is not None:
                    refuse = partial(_return_response, response)
                    response = self.faults.handle(refuse, request, call, self.state)
            elif (
                security.acls is None and not security.quotas.keys
            ) or session.principal == BROKER_PRINCIPAL:
                response = handler(request, call, self.state)
            else:
                response, complete = self._handle_limited(
                    handler, request, call, len(frame)
                )
            if isinstance(session_fetch, SessionFetch):
                complete = partial(_complete_fetch, session_fetch, complete)
        except CloseConnection:
            raise
        except Exception as error:
            response = error
        if isinstance(response, PendingResponse):
            # Step 3: encode the response, when it is available. A request that waits is
            # not processed in chunks yet; a later request would overtake its chunks.
            is_large = response.runs_in_steps or entries > scheduling.CHUNK_ENTRIES
            encoded = PendingResponse(
                is_parked=api.key in _PARKED, runs_in_steps=is_large
            )
            encoded.held_bytes = len(frame) + entries * _ENTRY_BYTES
            handler_response = response
            encoded.when_cancelled(handler_response.cancel)

            def ready(value: object) -> None:
                if complete is not None:
                    value = complete(value)
                if counts is not None:
                    counts.count(api, value, began_s, is_parked=encoded.is_parked)
                finish = partial(
                    self._finished_response, call, api, header.correlation_id, value
                )
                # 10,000 new topics with their configs would block the event loop for
                # 0.5 s
                if is_large:
                    self.state.work.submit(
                        _LARGE_RESPONSES,
                        finish,
                        lambda result: encoded.set(_encoded_or_close(result)),
                        is_urgent=True,
                    )
                else:
                    encoded.set(finish())

            handler_response.then(ready)
            return encoded
        if complete is not None:
            response = complete(response)
        if counts is not None:
            counts.count(api, response, began_s, is_parked=False)
        buffers: list[Buffer] | None = self._finished_response(
            call, api, header.correlation_id, response
        )
        return buffers

    def _begin_fetch(self, request: Any, call: Call) -> SessionFetch | int | None:
        """Apply a Fetch to its session.

        If access control, a fault rule or the like must see the partitions, the request
        lists all of them afterwards.
        """
        state = self.state
        session_fetch = state.fetch_sessions.begin(request, call.version, call.now_ms)
        if isinstance(session_fetch, SessionFetch) and not session_fetch.is_full:
            request.topics = []
            # Otherwise, the handler reads only the partitions that may have changed.
            acls = state.security.acls
            if (
                (acls is not None and not acls.is_super(call.session.principal))
                or state.is_shared
                or self.faults is not None
                or self._nodes is not None
            ):
                request.topics = session_fetch.session.listed()
        return session_fetch

    def _handle_limited(
        self, handler: Handler, request: Any, call: Call, size: int
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Call a handler under access control and quotas.

        Returns its response, and a function that completes the response when it is
        available. `size` is the number of bytes of the request.
        """
        state = self.state
        steps: list[Callable[[Any], Any]] = []
        throttle = None
        authentication = call.session.authentication
        # ApiVersions before authentication is free.
        if state.security.quotas.keys and (
            authentication is None or authentication.is_authenticated
        ):
            throttle = Throttle(call, size, state)
        # Reading the processor time costs a system call, 0.5 us or more.
        is_timed = throttle is not None and throttle.counts_time
        began_ns = time.thread_time_ns() if is_timed else 0
        response = None
        # The API's guard removes the parts for which the user has no permission.
        if state.security.acls is not None:
            guarded = GUARDS[call.api_key](
                request,
                Requester(
                    rules=state.security.rules,
                    principal=call.session.principal,
                    host=call.session.client_address,
                    version=call.version,
                    topic_of=state.topic_ids.name_of,
                    exists=state.logdir.__contains__,
                    topics=state.logdir.topics,
                ),
            )
            if callable(guarded):
                steps.append(guarded)
            else:
                response = guarded
        if response is None and is_between_brokers(call.api_key, request):
            throttle = None
        if throttle is not None:
            throttle.begin(request, is_refused=response is not None)
            steps.append(throttle.complete)
        if response is None:
            response = handler(request, call, state)
        if throttle is not None and is_timed:
            throttle.count_time(time.thread_time_ns() - began_ns)

        def complete(value: Any) -> Any:
            truncated = None
            if isinstance(value, TruncatedResponse):
                truncated = value
                value = truncated.response
            if value is None or isinstance(value, Exception):
                return value
            try:
                for step in steps:
                    value = step(value)
            except Exception as error:  # without a response, the client would wait
                value = error
            return (
                value if truncated is None else attrs.evolve(truncated, response=value)
            )

        return response, complete

    def _log_unserved(
        self, header: wire.Header, client_address: str, now_ms: int
    ) -> None:
        name = wire.APIS[header.api_key].name
        feature = _FEATURES.get(header.api_key)
        self.state.journal.log(
            logging.WARNING,
            f"unserved {name}",
            now_ms,
            "%s v%d of client %s at %s refused: it is not served%s",
            name,
            header.api_version,
            quoted(header.client_id),
            client_address,
            f"; {feature} are not supported yet" if feature else "",
        )

    def _log_unknown(self, frame: memoryview, client_address: str, now_ms: int) -> None:
        """Log a request of an unknown API, with the feature that it belongs to."""
        key = int.from_bytes(frame[:2], "big")
        if key in wire.APIS or key not in _FEATURES:
            return
        self.state.journal.log(
            logging.WARNING,
            f"unserved {key}",
            now_ms,
            "a request of %s refused: %s are not served",
            client_address,
            _FEATURES[key],
        )

    def _log_refusals(
        self, call: Call, api: wire.Api[Any, Any], response: object
    ) -> None:
        """Log refusals in a response.

        Fetch and Produce log their own refusals: they are the most frequent requests,
        and their lines contain more details.
        """
        if api.key in _LOGGED_REFUSALS and not isinstance(response, Exception):
            for code, message in errors_in(response):
                self.state.journal.log_refusal(call, api.name, code, message)

    def _finished_response(
        self, call: Call, api: wire.Api[Any, Any], correlation_id: int, response: object
    ) -> Any:
        """Return the encoded frames of a response or of an exception, and log refusals.

        None and CloseConnection are returned unchanged. Any thread may call this.
        """
        if response is None or isinstance(response, CloseConnection):
            return response
        if isinstance(response, TruncatedResponse):
            return response.cut(
                self._finished_response(call, api, correlation_id, response.response)
            )
        self._log_refusals(call, api, response)
        return self._encode(api, call.version, correlation_id, response)

    def _encode(
        self,
        api: wire.Api[Any, Any],
        version: int,
        correlation_id: int,
        response: object,
    ) -> list[Buffer]:
        """Encode a response as frames.

        For an exception of the handler, or a response that cannot be encoded, encode
        the error form of the API.
        """
        try:
            if not isinstance(response, Exception):
                return wire.encode_response(api, version, correlation_id, response)
        except Exception as error:
            response = error
        _log.error("%s v%d failed", api.name, version, exc_info=response)
        failed = api.Response()
        # Other APIs have errors in their lists, which are empty here.
        if hasattr(failed, "error_code"):
            failed.error_code = codes.UNKNOWN_SERVER_ERROR
        return wire.encode_response(api, version, correlation_id, failed)

    @property
    def next_ms(self) -> int | None:
        """Return the latest time for the next call of tick()."""
        return self.state.timers.next_ms

    def tick(self, now_ms: int) -> None:
        """Run the work that is due.

        This answers requests whose wait is over, expires sessions, and wakes fetches
        after appends by other processes.
        """
        self.state.advance_clock(now_ms)
        self.state.transactions.begin(now_ms)
        self.state.timers.run(now_ms)
        self.state.journal.tick(now_ms)
        self.state.fetches.wake_readers(now_ms)
        self.state.fetches.follow(now_ms)

    def stop(self, now_ms: int) -> None:
        """Answer every waiting request, so that connections can be drained.

        Do not call handle() afterwards.
        """
        if self.faults is not None:
            # First, so that delayed requests are served before the coordinators stop.
            self.faults.end()
        self.state.lifecycle.is_stopping = True
        self.state.fetches.wake(self.state.fetches.awaited_keys(), now_ms)
        self.state.groups.stop(now_ms)
        self.state.transactions.stop(now_ms)
        # Last, because the steps above may have started further requests.
        self.state.step_runner.finish()
