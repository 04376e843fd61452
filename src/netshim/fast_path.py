"""The fast path: answers usual Produce and Fetch requests for one partition.

Most requests of a broker at work are alike: one batch for one partition, and a consumer
that waits at the end of one. The kernels decode and encode them without objects for
their parts, in a tenth of the time of the general codec.

Rules:
- A request that is unusual in any way is not answered here, and has changed nothing.
  handlers/produce.py and handlers/fetch.py then handle it. They define the responses.
- The partition is led by this broker, which is alone, and its log is open and idle.
- A Fetch that waits, and then cannot be answered here, passes to the general path with
  the rest of its time.
- Errors are never answered here, except that a sync has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

from logcore import Log, LogcoreError
from logcore.kernels import UsualFetch, UsualProduce, kernel
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import INTERNAL_TOPICS
from netshim import wire
from netshim.handlers.failures import code_of, message_of
from netshim.handlers.fetch import MAX_WAIT_MS
from netshim.scheduling import PendingResponse, answer_with, as_value
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.request_counts import RequestCounts
    from netshim.session import ClientSession

Piece = wire.Buffer
#: Handles a frame in the general way.
GeneralPath = Callable[
    ["ClientSession", memoryview, int], list[Piece] | PendingResponse | None
]
#: The timestamps in a response if the log keeps those of producers.
_NO_APPEND_TIME: Final = -1


class FastPath:
    """The fast path of a broker that is alone and does not share its directory."""

    def __init__(self, state: BrokerState, general: GeneralPath) -> None:
        self._state = state
        self._general = general

    def handle(
        self,
        session: ClientSession,
        frame: memoryview,
        now_ms: int,
        counts: RequestCounts | None = None,
    ) -> list[Piece] | PendingResponse | None:
        """Return the response to a usual request, or None for an unusual one.

        `counts` counts the requests that are answered here.
        """
        request = kernel.read_request(frame)
        if request is None:
            return None
        name = request.topic
        if request.topic_id is not None:
            name = self._state.topic_ids.name_of(request.topic_id) or ""
        log = self._state.logs.free_log(name, request.partition)
        if log is None:
            return None
        key = name, request.partition
        counter = None
        if counts is not None:
            api = wire.FETCH if isinstance(request, UsualFetch) else wire.PRODUCE
            counter = _Counter(counts, api.name, len(frame))
        reply: bytes | PendingResponse | None
        if isinstance(request, UsualFetch):
            reply = self._fetch(request, key, log, session, frame, now_ms, counter)
        else:
            reply = self._produce(request, key, log, session, frame, now_ms, counter)
        if not isinstance(reply, bytes):
            return reply
        if counter is not None:
            counter.count(codes.NONE)
        return [reply]

    def _produce(
        self,
        request: UsualProduce,
        key: Key,
        log: Log,
        session: ClientSession,
        frame: memoryview,
        now_ms: int,
        counter: _Counter | None,
    ) -> bytes | PendingResponse | None:
        start, stop = request.start, request.stop
        if key[0] in INTERNAL_TOPICS or log.host.writer.may_wait(
            stop - start, request.max_timestamp, has_producer=request.has_producer
        ):
            return None
        try:
            receipt = log.append_batch(frame[start:stop], durability="os")
        except LogcoreError as error:
            # The log is unchanged. The general path gets the same error, and reports it.
            as_value(error)
            return None
        end = receipt.last_offset + 1
        append_time_ms = _NO_APPEND_TIME
        if log.config.is_append_time:
            append_time_ms = receipt.timestamp_ms
        log_start = log.log_start_offset
        response = request.respond(receipt.offset, append_time_ms, log_start)
        leadership = self._state.leadership
        leadership.appended(key, log, end, now_ms)
        if request.acks == 1 or leadership.is_committed(log, end):
            return response
        call = Call(
            session, wire.PRODUCE.key, request.version, request.client_id, now_ms
        )
        waiting = _WaitingProduce(
            request, response, append_time_ms, log_start, call, self._state, counter
        )
        waiting.answer.held_bytes = len(frame)
        leadership.when_committed(key, log, end, waiting.committed)
        return waiting.answer

    def _fetch(
        self,
        request: UsualFetch,
        key: Key,
        log: Log,
        session: ClientSession,
        frame: memoryview,
        now_ms: int,
        counter: _Counter | None,
    ) -> bytes | PendingResponse | None:
        if request.min_bytes > 1:  # handlers/fetch.py estimates when there are enough
            return None
        wait_ms = min(request.max_wait_ms, MAX_WAIT_MS)
        may_wait = wait_ms > 0 and not self._state.is_stopping
        response = self.read(request, log, may_wait=may_wait)
        if response is None or response:
            return response
        waiting = _WaitingFetch(
            self, request, key, session, bytes(frame), now_ms + wait_ms, counter
        )
        return waiting.park(self._state)

    def read(self, request: UsualFetch, log: Log, *, may_wait: bool) -> bytes | None:
        """Return the response to a Fetch, or None if the log or the range is unusual.

        The response is empty bytes if the request must wait, which it does if `may_wait`
        and there are no records for it.
        """
        writer = log.host.writer
        epoch = writer.leader_epoch
        if request.leader_epoch not in (-1, epoch) or request.last_epoch not in (
            -1,
            epoch,
        ):
            return None
        # Before the high watermark, which another thread may raise in between.
        stable = log.known_stable_offset if request.is_committed else log.high_watermark
        if stable is None:
            return None
        high_watermark = log.high_watermark
        if request.offset < stable:
            most_bytes = min(request.max_bytes, self._state.settings.fetch_max_bytes)
            return writer.respond_recent(request, stable, most_bytes)
        if not log.log_start_offset <= request.offset <= log.log_end_offset:
            return None
        if may_wait:
            return b""
        return request.respond_empty(high_watermark, stable, log.log_start_offset)

    def answer_in_general(
        self,
        session: ClientSession,
        frame: bytes,
        now_ms: int,
        answer: PendingResponse,
    ) -> None:
        """Set an answer to the response of the general path."""
        answer_with(partial(self._general, session, memoryview(frame), now_ms), answer)


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


class _WaitingProduce:
    """A batch that was appended and is not durable yet."""

    __slots__ = (
        "_append_time_ms",
        "_call",
        "_counter",
        "_log_start",
        "_request",
        "_response",
        "_state",
        "answer",
    )

    def __init__(
        self,
        request: UsualProduce,
        response: bytes,
        append_time_ms: int,
        log_start: int,
        call: Call,
        state: BrokerState,
        counter: _Counter | None,
    ) -> None:
        self._counter = counter
        self._request = request
        self._response = response
        self._append_time_ms = append_time_ms
        self._log_start = log_start
        self._call = call
        self._state = state
        self.answer = PendingResponse()

    def committed(self, error: LogcoreError | None) -> None:
        """Answer the request. `error` is the reason why the batch may not be durable."""
        if error is None:
            if self._counter is not None:
                self._counter.count(codes.NONE)
            self.answer.set([self._response])
            return
        request = self._request
        code, message = code_of(error), message_of(error)
        if self._counter is not None:
            self._counter.count(code)
        self._state.journal.refused(self._call, "Produce", code, message)
        topic = wire.PRODUCE.Response.Topic
        result = topic.Partition(
            index=request.partition,
            error_code=code,
            error_message=message,
            base_offset=-1,
            log_append_time_ms=self._append_time_ms,
            log_start_offset=self._log_start,
        )
        told = topic(name=request.topic, partition_responses=[result])
        if request.topic_id is not None:
            told.topic_id = request.topic_id
        self.answer.set(
            wire.encode_response(
                wire.PRODUCE,
                request.version,
                request.correlation_id,
                wire.PRODUCE.Response(responses=[told]),
            )
        )


class _WaitingFetch:
    """A Fetch that waits for records, or for its deadline."""

    __slots__ = (
        "_answer",
        "_counter",
        "_deadline_ms",
        "_fast",
        "_frame",
        "_key",
        "_request",
        "_session",
        "_state",
        "_timer",
    )

    def __init__(
        self,
        fast: FastPath,
        request: UsualFetch,
        key: Key,
        session: ClientSession,
        frame: bytes,
        deadline_ms: int,
        counter: _Counter | None,
    ) -> None:
        self._counter = counter
        self._fast = fast
        self._request = request
        self._key = key
        self._session = session
        self._frame = frame
        self._deadline_ms = deadline_ms
        self._answer = PendingResponse(is_parked=True)

    def park(self, state: BrokerState) -> PendingResponse:
        """Start to wait."""
        self._state = state
        self._timer = state.timers.at(self._deadline_ms, self._look)
        state.fetches.add([self._key], self._look)
        self._answer.when_cancelled(self._forget)
        return self._answer

    def _forget(self) -> None:
        self._state.fetches.remove([self._key], self._look)
        self._state.timers.cancel(self._timer)

    def _look(self, now_ms: int) -> None:
        state, request = self._state, self._request
        is_over = now_ms >= self._deadline_ms or state.is_stopping
        response = None
        # A topic may have been deleted, and created again with another id.
        is_same = (
            request.topic_id is None
            or state.topic_ids.name_of(request.topic_id) == self._key[0]
        )
        log = state.logs.free_log(*self._key)
        if is_same and log is not None:
            response = self._fast.read(request, log, may_wait=not is_over)
        if response == b"":
            return
        self._forget()
        if response is not None:
            if self._counter is not None:
                self._counter.count(codes.NONE, is_parked=True)
            self._answer.set([response])
            return
        # The general path counts the request.
        left_ms = max(0, self._deadline_ms - now_ms)
        at = request.wait_position
        frame = self._frame
        self._fast.answer_in_general(
            self._session,
            frame[:at] + left_ms.to_bytes(4, "big") + frame[at + 4 :],
            now_ms,
            self._answer,
        )
