"""The fast path: answers usual Produce and Fetch requests for one partition.

Most requests of a busy broker have the same form: a Produce of one batch, or a Fetch
that waits at the end of one partition. The kernels decode and encode them without
objects for their parts, in a twentieth of the time of the general codec.

Rules:
- A request that is unusual in any way is not answered here and changes nothing here.
  handlers/produce.py and handlers/fetch.py then handle it. They define the responses.
- A batch is appended once. After a failed write it may be in the file. Therefore, this
  module responds with the error, and the general path does not append the batch again.
- The partition is led by this broker, and its log is open and idle.
- A Fetch that waits, and then cannot be answered here, is passed to the general path
  with the remaining time.
- The access rules must allow the request when it arrives and when it is answered.
- A request of a fetch session is answered here if it continues the session, and if the
  session has one partition. The session of a follower may have several, of which one may
  have changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from logcore import Log, LogcoreError
from logcore.kernels import UsualFetch, UsualProduce, kernel
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import INTERNAL_TOPICS
from logcore.replication.leading import FollowerFetch
from netshim import wire
from netshim.fetch_wakeups import ANY_PARTITION
from netshim.handlers.failures import code_of, message_of
from netshim.handlers.fetch import MAX_WAIT_MS, session_context
from netshim.handlers.produce import name_leaders, record_refused_batch, refuse
from netshim.scheduling import PendingResponse, Waiters, resolve_with
from netshim.security.acls import AclOperation
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.fetch_sessions import SingleFetch
    from netshim.request_counts import RequestCounts
    from netshim.session import ClientSession
    from netshim.wire.messages import ProduceResponse

_log = logging.getLogger("netshim")

Buffer = wire.Buffer
#: Handles a frame in the general way.
GeneralPath = Callable[
    ["ClientSession", memoryview, int], list[Buffer] | PendingResponse | None
]


class FastPath:
    """The fast path of a broker that does not share its directory."""

    def __init__(self, state: BrokerState, general: GeneralPath) -> None:
        self._state = state
        #: Handles the other requests.
        self._general = general

    def handle(
        self,
        session: ClientSession,
        frame: memoryview,
        now_ms: int,
        counts: RequestCounts | None = None,
    ) -> list[Buffer] | PendingResponse | None:
        """Return the response to a usual request, or None for an unusual one.

        `counts` counts the requests that are answered here.
        """
        # None for all other APIs, versions and forms.
        request = kernel.read_request(frame)
        if request is None:
            return None
        if isinstance(request, UsualFetch) and request.replica >= 0:
            return self._handle_follower(request, session, frame, now_ms, counts)
        session_fetch = None
        if isinstance(request, UsualFetch) and request.session_id:
            session_fetch = self._state.fetch_sessions.single_fetch(request)
            # The session has several partitions, or does not accept the request.
            if session_fetch is None:
                return None
        name = request.topic
        if request.topic_id is not None:
            # No log has the empty name, so the general path refuses an unknown id.
            name = self._state.topic_ids.name_of(request.topic_id) or ""
        is_fetch = isinstance(request, UsualFetch)
        operation = AclOperation.READ if is_fetch else AclOperation.WRITE
        if not self._state.security.may(session, operation, name):
            return None
        key = name, request.partition
        log = self._state.logs.free_log(*key)
        if log is None:
            return None
        counter = None
        if counts is not None:
            api = wire.FETCH if is_fetch else wire.PRODUCE
            counter = _Counter(counts, api.name, len(frame))
        if isinstance(request, UsualFetch):
            return self._fetch(
                request, session_fetch, key, log, session, frame, now_ms, counter
            )
        return self._produce(request, key, log, session, frame, now_ms, counter)

    def _handle_follower(
        self,
        request: UsualFetch,
        session: ClientSession,
        frame: memoryview,
        now_ms: int,
        counts: RequestCounts | None,
    ) -> list[Buffer] | PendingResponse | None:
        """Do what handle() does for a Fetch of a follower."""
        state = self._state
        if not state.leadership.is_clustered or not state.security.may_follow(session):
            return None
        session_fetch = state.fetch_sessions.follower_fetch(
            request, self.context_of(request), state.fetches.changes, state.now_ms
        )
        # Several partitions may have changed, or the topic of the partition is unknown.
        if session_fetch is None or session_fetch.partition.log_key is None:
            return None
        key = session_fetch.partition.log_key
        log = state.logs.free_log(*key)
        if log is None:
            return None
        counter = None
        if counts is not None:
            counter = _Counter(counts, wire.FETCH.name, len(frame))
        return self._fetch(
            request, session_fetch, key, log, session, frame, now_ms, counter
        )

    def context_of(self, request: UsualFetch) -> object:
        """Return the context of the session of a follower's request."""
        return session_context(
            self._state,
            request.version,
            int(request.is_committed),
            request.replica,
            request.replica_epoch,
        )

    def _produce(
        self,
        request: UsualProduce,
        key: Key,
        log: Log,
        session: ClientSession,
        frame: memoryview,
        now_ms: int,
        counter: _Counter | None,
    ) -> list[Buffer] | PendingResponse | None:
        leadership = self._state.leadership
        # The general path decides about appends to internal topics.
        if key[0] in INTERNAL_TOPICS:
            return None
        if leadership.is_clustered and not self._may_append(request, key):
            return None
        writer = log.host.writer
        try:
            # Validates the batch and appends it from the frame, without a copy.
            offset = writer.append_request(request, frame)
        except LogcoreError as error:
            # A failed write may have stored a part of the batch, so the general path
            # must not append it again.
            result = _result_of(request, -1)
            call = _call_of(request, session, now_ms)
            refuse(result, code_of(error), message_of(error), call, self._state)
            record_refused_batch(
                self._state,
                key,
                frame[request.start : request.stop],
                result.error_code,
                now_ms,
            )
            if counter is not None:
                counter.count(result.error_code)
            return _error_response(request, key[0], result, call, self._state)
        # The batch is unusual: nothing was appended.
        if offset is None:
            return None
        end = offset + request.record_count
        log_start = writer.state.log_start
        # -1, because the log keeps the timestamps of the producer.
        response = request.respond(offset, -1, log_start)
        leadership.appended(key, log, end, now_ms)
        if (
            request.acks == 1
            or writer.shows_appends
            or leadership.is_committed(log, end)
        ):
            if counter is not None:
                counter.count(codes.NONE)
            return [response]
        waiting = _WaitingProduce(
            request,
            key[0],
            response,
            _result_of(request, log_start),
            _call_of(request, session, now_ms),
            self._state,
            counter,
        )
        waiting.pending.held_bytes = len(frame)
        # As in the general path, the batch may be committed after the deadline.
        deadline_ms = now_ms + max(0, request.timeout_ms)
        leadership.when_committed(key, log, end, waiting.committed, deadline_ms)
        return waiting.pending

    def _may_append(self, request: UsualProduce, key: Key) -> bool:
        """Return whether nothing is unusual about an append in a cluster."""
        # A batch after a refused batch of its producer may have to be refused too.
        if self._state.refused_batches:
            return False
        # min.insync.replicas concerns only acks=all.
        if request.acks == -1:
            try:
                self._state.leadership.check_in_sync(key)
            except LogcoreError:
                return False
        return True

    def _fetch(
        self,
        request: UsualFetch,
        session_fetch: SingleFetch | None,
        key: Key,
        log: Log,
        session: ClientSession,
        frame: memoryview,
        now_ms: int,
        counter: _Counter | None,
    ) -> list[Buffer] | PendingResponse | None:
        if request.min_bytes > 1:  # handlers/fetch.py estimates when there are enough
            return None
        wait_ms = min(request.max_wait_ms, MAX_WAIT_MS)
        # A broker that stops answers all requests at once.
        may_wait = wait_ms > 0 and not self._state.is_stopping
        if session_fetch is not None:
            session_fetch.begin(now_ms)
        response = None
        # Only followers have a position, which may complete acks=all.
        if request.replica < 0 or self._take_position(request, key, log):
            response = self.read(request, session_fetch, key, log, may_wait=may_wait)
        if response is None:
            # The general path applies the request to the session again.
            if session_fetch is not None:
                session_fetch.undo()
            return None
        # An empty response means that the request must wait.
        if response:
            if counter is not None:
                counter.count(codes.NONE)
            return response
        waiting = _WaitingFetch(
            self,
            request,
            session_fetch,
            key,
            session,
            # A copy, because the connection reads the next request into its buffer.
            bytes(frame),
            now_ms + wait_ms,
            counter,
        )
        return waiting.park(self._state)

    def read(
        self,
        request: UsualFetch,
        session_fetch: SingleFetch | None,
        key: Key,
        log: Log,
        *,
        may_wait: bool,
    ) -> list[Buffer] | None:
        """Return the response to a Fetch, or None if the log or the range is unusual.

        The response is empty if the request must wait, which it does if `may_wait` and
        there are no records for it.
        """
        leadership = self._state.leadership
        writer = log.host.writer
        epoch = writer.leader_epoch
        if leadership.is_clustered and leadership.leader_epoch(key, log) != epoch:
            return None  # a leadership begins or ends
        if request.replica >= 0 and session_fetch is not None:
            return self._read_for_follower(
                request, session_fetch, key, log, may_wait=may_wait
            )
        # The general path returns the error or the point of divergence (KIP-320).
        if request.leader_epoch not in (-1, epoch) or request.last_epoch not in (
            -1,
            epoch,
        ):
            return None
        # This is read before the high watermark, which another thread may raise in
        # between.
        state = writer.state
        stable = log.known_stable_offset if request.is_committed else state.visible
        if stable is None or state.is_closed:
            return None
        high_watermark = state.visible
        log_start = state.log_start
        response: list[Buffer] | None
        if request.offset < stable:
            # The response names no aborted transactions.
            if request.is_committed and request.offset < state.no_transactions_from:
                return None
            response = self._records(request, log, stable)
            if response is None:
                return None
        elif not log_start <= request.offset <= state.end:
            return None  # OFFSET_OUT_OF_RANGE
        # There are no records at this offset yet.
        elif may_wait:
            return []
        elif session_fetch is not None and not session_fetch.partition.differ_from_sent(
            high_watermark, log_start
        ):
            # A session leaves out a partition without changes (KIP-227).
            return [request.respond_without_news()]
        else:
            response = [request.respond_empty(high_watermark, stable, log_start)]
        if session_fetch is not None:
            session_fetch.record_sent(
                high_watermark, log_start, has_records=request.offset < stable
            )
        return response

    def _take_position(self, request: UsualFetch, key: Key, log: Log) -> bool:
        """Record the position of a follower, once for each fetch.

        Returns False if the general path must refuse the fetch. After a change of
        replicas or leaders, the general path also answers a fetch that waits.
        """
        fetch = FollowerFetch(
            request.replica,
            request.replica_epoch,
            request.leader_epoch,
            request.offset,
            request.last_epoch,
        )
        return self._state.leadership.follower_fetched(key, log, fetch) is None

    def _read_for_follower(
        self,
        request: UsualFetch,
        session_fetch: SingleFetch,
        key: Key,
        log: Log,
        *,
        may_wait: bool,
    ) -> list[Buffer] | None:
        """Do what read() does for a follower, which gets records up to the log end."""
        leadership = self._state.leadership
        state = log.host.writer.state
        if state.is_closed:
            return None
        # In a cluster, only this thread changes both.
        high_watermark, log_start = state.visible, state.log_start
        has_records = request.offset < state.end
        response: list[Buffer] | None = None
        if has_records:
            response = self._records(request, log, state.end)
            if response is None:
                return None
        is_urgent = leadership.must_send_high_watermark(
            key, request.replica, high_watermark, has_records=has_records
        )
        if response is None:
            has_changes = session_fetch.partition.differ_from_sent(
                high_watermark, log_start
            )
            if not has_changes and leadership.is_in_sync(key, request.replica):
                # Until one of these offsets changes, the same fetch has no changes.
                session_fetch.mark_unchanged(
                    log, (log_start, high_watermark, state.end)
                )
            if may_wait and not is_urgent:
                return []
            # A session leaves out a partition without changes (KIP-227).
            if not has_changes:
                return [request.respond_without_news()]
            response = [request.respond_empty(high_watermark, -1, log_start)]
        session_fetch.record_sent(high_watermark, log_start, has_records=has_records)
        return response

    def _records(
        self, request: UsualFetch, log: Log, stable: int
    ) -> list[Buffer] | None:
        """Return the response with records below `stable`, or None after an error."""
        max_bytes = min(request.max_bytes, self._state.settings.fetch_max_bytes)
        writer = log.host.writer
        # The newest batches are copied by one read, if they are few.
        recent = writer.respond_recent(request, stable, max_bytes)
        if recent is not None:
            return [recent]
        state = writer.state
        log_start = state.log_start
        try:
            records = log.stored(
                request.offset,
                stable,
                max_bytes=max_bytes,
                up_to="high_watermark" if request.replica < 0 else "log_end",
            )
        except LogcoreError:
            return None  # the general path returns the error
        size_bytes = sum(map(len, records))
        response_start, response_end = request.respond_around(
            state.visible, stable, log_start, size_bytes
        )
        buffers: list[Buffer] = [response_start, *records]
        if response_end:
            buffers.append(response_end)
        return buffers

    def handle_in_general(
        self,
        session: ClientSession,
        frame: bytes,
        now_ms: int,
        pending: PendingResponse,
    ) -> None:
        """Set a PendingResponse to the response of the general path."""
        resolve_with(
            partial(self._general, session, memoryview(frame), now_ms), pending
        )


class _Counter:
    """Counts one request when it is answered."""

    __slots__ = ("_api", "_began_s", "_counts", "_size_bytes")

    def __init__(self, counts: RequestCounts, api: str, size_bytes: int) -> None:
        self._counts = counts
        self._api = api
        self._size_bytes = size_bytes
        self._began_s = perf_counter()

    def count(self, code: int, *, is_parked: bool = False) -> None:
        self._counts.received_bytes += self._size_bytes
        self._counts.add(self._api, code, self._began_s, is_parked=is_parked)


def _call_of(request: UsualProduce, session: ClientSession, now_ms: int) -> Call:
    return Call(session, wire.PRODUCE.key, request.version, request.client_id, now_ms)


def _result_of(
    request: UsualProduce, log_start: int
) -> ProduceResponse.Topic.Partition:
    """Return the result of a batch for a refusal, without the error."""
    return wire.PRODUCE.Response.Topic.Partition(
        index=request.partition, base_offset=-1, log_start_offset=log_start
    )


def _error_response(
    request: UsualProduce,
    name: str,
    result: ProduceResponse.Topic.Partition,
    call: Call,
    state: BrokerState,
) -> list[Buffer]:
    """Return the response to a batch for the topic `name` with an error."""
    topic = wire.PRODUCE.Response.Topic(name=name, partition_responses=[result])
    if request.topic_id is not None:
        # Since version 13, the response names the topic by its id.
        topic.topic_id = request.topic_id
    response = wire.PRODUCE.Response(responses=[topic])
    name_leaders(response, call, state)
    return wire.encode_response(
        wire.PRODUCE, request.version, request.correlation_id, response
    )


def _session_error_response(request: UsualFetch) -> list[Buffer]:
    """Return the response to a request that a later one of its session has replaced."""
    response = wire.FETCH.Response(
        error_code=codes.INVALID_FETCH_SESSION_EPOCH, session_id=request.session_id
    )
    return wire.encode_response(
        wire.FETCH, request.version, request.correlation_id, response
    )


class _WaitingProduce:
    """A batch that was appended and is not committed yet."""

    __slots__ = (
        "_call",
        "_counter",
        "_name",
        "_request",
        "_response",
        "_result",
        "_state",
        "pending",
    )

    def __init__(
        self,
        request: UsualProduce,
        name: str,
        response: bytes,
        result: ProduceResponse.Topic.Partition,
        call: Call,
        state: BrokerState,
        counter: _Counter | None,
    ) -> None:
        self._request = request
        self._name = name
        self._response = response
        #: The result if the batch may not be committed.
        self._result = result
        self._call = call
        self._state = state
        self._counter = counter
        #: The response to the request.
        self.pending = PendingResponse()

    def committed(self, error: LogcoreError | None) -> None:
        """Answer the request. `error` is why the batch may not be committed."""
        if error is None:
            if self._counter is not None:
                self._counter.count(codes.NONE)
            self.pending.set([self._response])
            return
        result = self._result
        refuse(result, code_of(error), message_of(error), self._call, self._state)
        if self._counter is not None:
            self._counter.count(result.error_code)
        self.pending.set(
            _error_response(self._request, self._name, result, self._call, self._state)
        )


class _WaitingFetch:
    """A Fetch that waits for records, or for its deadline."""

    __slots__ = (
        "_counter",
        "_deadline_ms",
        "_fast",
        "_frame",
        "_key",
        "_keys",
        "_pending",
        "_request",
        "_session",
        "_session_fetch",
        "_state",
        "_timer",
        "_waiting",
    )

    def __init__(
        self,
        fast: FastPath,
        request: UsualFetch,
        session_fetch: SingleFetch | None,
        key: Key,
        session: ClientSession,
        frame: bytes,
        deadline_ms: int,
        counter: _Counter | None,
    ) -> None:
        self._counter = counter
        self._fast = fast
        self._request = request
        #: None if the request has no session.
        self._session_fetch = session_fetch
        self._key = key
        self._session = session
        #: The request, for the general path.
        self._frame = frame
        self._deadline_ms = deadline_ms
        self._pending = PendingResponse(is_parked=True)

    def park(self, state: BrokerState) -> PendingResponse:
        """Start to wait for an append or the deadline."""
        self._state = state
        # Two events end the wait: the deadline and an append.
        self._timer = state.timers.at(self._deadline_ms, self._read_again)
        self._keys = [self._key]
        self._waiting: Waiters = state.fetches
        if self._request.replica >= 0:
            # A change of any partition may complete the fetch of a follower.
            self._keys = [ANY_PARTITION]
            self._waiting = state.fetches.of_followers
        self._waiting.add(self._keys, self._read_again)
        # Otherwise, a client that disconnects would leave its waiter until the
        # deadline.
        self._pending.when_cancelled(self._forget)
        return self._pending

    def _read(self, now_ms: int) -> list[Buffer] | None:
        """Read like FastPath.read(), if the conditions of the fast path still hold."""
        state, request, session_fetch = self._state, self._request, self._session_fetch
        is_over = now_ms >= self._deadline_ms or state.is_stopping
        if request.replica >= 0 and session_fetch is not None:
            context = self._fast.context_of(request)
            log = state.logs.free_log(*self._key)
            is_single = session_fetch.is_single(
                context, state.fetches.changes, state.now_ms
            )
            if log is None or not is_single:
                return None
            return self._fast.read(
                request, session_fetch, self._key, log, may_wait=not is_over
            )
        # A topic may have been deleted, and created again with another id.
        is_same = (
            request.topic_id is None
            or state.topic_ids.name_of(request.topic_id) == self._key[0]
        )
        log = state.logs.free_log(*self._key)
        # The rules may have changed.
        may_read = state.security.may(self._session, AclOperation.READ, self._key[0])
        if not is_same or log is None or not may_read:
            return None
        return self._fast.read(
            request, session_fetch, self._key, log, may_wait=not is_over
        )

    def _forget(self) -> None:
        self._waiting.remove(self._keys, self._read_again)
        self._state.timers.cancel(self._timer)

    def _read_again(self, now_ms: int) -> None:
        session_fetch = self._session_fetch
        if session_fetch is not None and not session_fetch.is_current:
            self._forget()
            if self._counter is not None:
                self._counter.count(codes.INVALID_FETCH_SESSION_EPOCH, is_parked=True)
            self._pending.set(_session_error_response(self._request))
            return
        try:
            response = self._read(now_ms)
        except Exception:  # without a response, the client would wait
            _log.exception("the fast path of a waiting fetch failed")
            response = None
        # There is still no record for this request.
        if response == []:
            return
        self._forget()
        if response is not None:
            if self._counter is not None:
                self._counter.count(codes.NONE, is_parked=True)
            self._pending.set(response)
            return
        # The general path counts the request, and applies it to its session again.
        if session_fetch is not None:
            session_fetch.undo()
        remaining_ms = max(0, self._deadline_ms - now_ms)
        # The position of max_wait_ms in the frame.
        at = self._request.wait_position
        frame = self._frame
        self._fast.handle_in_general(
            self._session,
            frame[:at] + remaining_ms.to_bytes(4, "big") + frame[at + 4 :],
            now_ms,
            self._pending,
        )
