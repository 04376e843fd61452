"""One client's connection without its socket.

It turns received bytes into requests, and responses into bytes to send.

Rules (wire protocol section 2; limits: docs/netshim.md, Settings):
- Responses are sent in the order of their requests, even if a later one is ready first.
- A request starts immediately, even while earlier requests are in progress. The
  exception is a request that reports state which earlier requests change: it waits
  until they are answered. It does not wait for parked requests, because a parked
  request changes nothing.
- After a request that is processed in chunks, every later request waits, because the
  first one has not started all its changes.
- A frame is a size of 4 bytes and then as many bytes. A size below 1 or above the limit
  closes the connection without a response.
- The buffer grows with the bytes that were received, never with the size that the
  client announced.
- All connections share the memory for large frames. A connection that waits for memory
  does not count as slow. A slow connection is closed if others wait for its memory.
- Reading pauses while too many requests or too many response bytes are outstanding, and
  resumes afterwards.
- The number of requests in progress on all connections has a separate limit, and the
  memory of these requests counts as memory for frames. Connections above the limit
  alternate.

This module decodes no request and owns no socket: its caller supplies a function that
answers frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from netshim.scheduling import CloseConnection, PendingResponse
from netshim.session import ClientSession
from netshim.settings import Settings

if TYPE_CHECKING:  # imported only if it is used
    from netshim.recording.recorder import ConnectionRecorder

Buffer = bytes | bytearray | memoryview
#: Result of a frame handler: the buffers of a response, None for no response, or a
#: PendingResponse, which will hold buffers, None or a CloseConnection.
Reply = list[Buffer] | PendingResponse | None
Handle = Callable[[memoryview, int], Reply]

#: Initial size of the receive buffer. The budget counts only the bytes beyond it.
_SMALL_BYTES: Final = 64 << 10
#: Maximum size of an empty buffer that is kept for the next request.
_MAX_EMPTY_BUFFER_BYTES: Final = 4 << 20
#: An empty buffer is kept until the client has been silent for this time.
_EMPTY_BUFFER_MS: Final = 1_000
#: Buffers smaller than this are joined, which costs less than a system call for each.
_SMALL_BUFFER_BYTES: Final = 16 << 10
#: Maximum number of bytes for one send.
_SEND_BYTES: Final = 1 << 20
#: If an incomplete frame grows by less than this in a request timeout, the connection
#: is closed.
_MIN_RATE_BYTES: Final = 1_024 * 30


def _do_nothing() -> None:
    """Replace the `ready` callback of a closed connection."""


def _ignore_frame(frame: memoryview, now_ms: int) -> Reply:
    """Replace the frame handler of a closed connection."""
    return None


def _reports_no_changes(frame: memoryview) -> bool:
    return False


def _frame_size_error(start: bytes, size: int, limit: int) -> str:
    """Return why the bytes start no frame, with advice for the operator of the client."""
    if start[:2] == b"\x16\x03":
        return (
            "the client speaks TLS, and this listener does not; "
            "the client needs security.protocol=PLAINTEXT or SASL_PLAINTEXT"
        )
    if start in (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"PRI "):
        return "the client speaks HTTP; this is the port of a Kafka broker"
    return f"a frame of {size} bytes; expected 1 to {limit}"


class ConnectionMemory:
    """Bytes that all connections together may hold beyond their small buffers.

    Requests in progress hold memory too, see reserve_for_request(). Closing a
    connection does not free that memory.

    A connection that gets no memory is queued and reads nothing until it is first and
    there is room. While one waits, select_slow_connections() selects requests that
    arrive too slowly, and their connections are closed. Otherwise, a few clients that
    send a few bytes at a time would hold all of the memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        #: May exceed limit_bytes, because requests in progress are always counted.
        self.used_bytes = 0
        #: The part of used_bytes that requests in progress hold.
        self.request_bytes = 0
        #: The part of used_bytes that each connection's buffer holds.
        self._buffer_bytes: dict[Connection, int] = {}
        #: The number of bytes that each connection waits for, in FIFO order.
        self.waiting: dict[Connection, int] = {}
        #: The first of `waiting`, and the time since when it has been first.
        self._first_waiter: tuple[Connection, int] | None = None

    def reserve(self, connection: Connection, size: int) -> bool:
        """Reserve memory for a larger buffer. If there is none, queue the connection.

        Returns whether the memory was reserved.
        """
        # A connection that is not first must wait, even if there is room.
        is_first = connection is next(iter(self.waiting), connection)
        if not is_first or self.used_bytes + size > self.limit_bytes:
            self.waiting[connection] = size
            return False
        self.used_bytes += size
        self._buffer_bytes[connection] = self._buffer_bytes.get(connection, 0) + size
        self.stop_waiting(connection)
        return True

    def free(self, connection: Connection, size: int) -> None:
        """Free memory that reserve() has reserved."""
        self.used_bytes -= size
        remaining = self._buffer_bytes.pop(connection, 0) - size
        if remaining > 0:
            self._buffer_bytes[connection] = remaining
        self._call_first()

    def reserve_for_request(self, size: int) -> None:
        """Count the memory of a request in progress.

        The request has been received already, so this has no limit. Reads and further
        requests wait until there is room again.
        """
        self.request_bytes += size
        self.used_bytes += size

    def release(self, size: int) -> None:
        """Free the memory of a request that has ended; see reserve_for_request()."""
        self.request_bytes -= size
        self.used_bytes -= size
        self._call_first()

    def stop_waiting(self, connection: Connection) -> None:
        """Remove a connection from the queue. Others are ignored."""
        if self.waiting.pop(connection, None) is not None:
            self._call_first()

    def _call_first(self) -> None:
        first = next(iter(self.waiting), None)
        if (
            first is not None
            and self.used_bytes + self.waiting[first] <= self.limit_bytes
        ):
            first.wake()

    def select_slow_connections(
        self, now_ms: int, timeout_ms: int
    ) -> dict[Connection, str]:
        """Return the connections to close for the first waiter, with the reasons.

        The server calls this periodically. Connections whose frame would take longer
        than timeout_ms at its current rate are closed, the slowest first. If there are
        none and the first waiter has waited for a quarter of timeout_ms, the slowest of
        all is closed.
        """
        # Step 1: calculate how much memory is missing.
        first = next(iter(self.waiting), None)
        if first is None:
            self._first_waiter = None
            return {}
        if self._first_waiter is None or self._first_waiter[0] is not first:
            self._first_waiter = first, now_ms
        needed_bytes = self.waiting[first]
        if self._buffer_bytes.get(first, 0) + needed_bytes > self.limit_bytes:
            return {
                first: f"a request larger than the {self.limit_bytes} bytes for requests of all connections"
            }
        if (
            self.request_bytes + self._buffer_bytes.get(first, 0) + needed_bytes
            > self.limit_bytes
        ):
            return {}  # it waits for requests in progress, not for slow clients
        missing_bytes = self.used_bytes + needed_bytes - self.limit_bytes
        selected: dict[Connection, str] = {}
        candidates = {*self._buffer_bytes, first}
        # Step 2: select the slowest of them until that frees enough.
        slowest_first = sorted(
            (
                (
                    candidate.remaining_ms(now_ms),
                    self._buffer_bytes.get(candidate, 0),
                    id(candidate),
                    candidate,
                )
                for candidate in candidates
            ),
            reverse=True,
        )
        is_urgent = now_ms - self._first_waiter[1] >= timeout_ms // 4
        for remaining_ms, buffer_bytes, _, connection in slowest_first:
            if (
                missing_bytes <= 0
                or first in selected
                or (remaining_ms <= timeout_ms and (selected or not is_urgent))
            ):
                break
            selected[connection] = (
                f"others wait for the {buffer_bytes} bytes of a request that would take {remaining_ms} ms more"
            )
            missing_bytes -= buffer_bytes
        return selected


class Workload:
    """Limits the requests in progress on all connections.

    A request is in progress from its start until its response, except while it is
    parked.

    A connection that exceeds the limit is queued, and starts no request until it is
    first and there is room. Then it starts one request and is queued again, so that a
    busy connection does not keep others waiting.
    """

    def __init__(self, limit: int, budget: ConnectionMemory) -> None:
        self.limit = limit
        #: Counts the memory of the requests.
        self._budget = budget
        #: Number of requests in progress.
        self.count = 0
        #: Connections that wait, in FIFO order.
        self.queue: dict[Connection, None] = {}

    def may_start(self, connection: Connection) -> bool:
        """Return whether `connection` may start a request now.

        If not, it is woken when it may.
        """
        is_below_limit = (
            self.count < self.limit
            and self._budget.request_bytes < self._budget.limit_bytes
        )
        if is_below_limit and not self.queue:
            return True
        is_first = connection is next(iter(self.queue), connection)
        if not is_first or not is_below_limit:
            self.queue[connection] = None
            return False
        self.queue.pop(connection, None)
        self._call_first(self.limit - 1)  # the room that is left after this request
        return True

    def leave_queue(self, connection: Connection) -> None:
        """Remove a connection from the queue. Others are ignored."""
        if connection in self.queue:
            del self.queue[connection]
            self._call_first(self.limit)

    def begin(self, size: int) -> None:
        """Count a request that starts and holds `size` bytes."""
        self.count += 1
        self._budget.reserve_for_request(size)

    def end(self, size: int) -> None:
        """Count the end of a request, and free its `size` bytes."""
        self.count -= 1
        self._budget.release(size)
        self._call_first(self.limit)

    def _call_first(self, limit: int) -> None:
        first = next(iter(self.queue), None)
        if (
            first is not None
            and self.count < limit
            and self._budget.request_bytes < self._budget.limit_bytes
        ):
            first.wake()


class Connection:
    """State of one connection."""

    def __init__(
        self,
        handle: Handle,
        settings: Settings,
        budget: ConnectionMemory,
        workload: Workload,
        now_ms: int,
        ready: Callable[[], None],
        reports_changes: Callable[[memoryview], bool] = _reports_no_changes,
        session: ClientSession | None = None,
    ) -> None:
        self._session = session or ClientSession("", 0, "")
        self._session.wake = self.wake
        self._handle = handle
        #: Returns whether the request in a frame reports state that others change.
        self._reports_changes = reports_changes
        self._settings = settings
        self._budget = budget
        self._workload = workload
        #: Called when next_buffer() may have bytes, or when reading may resume.
        self._ready = ready
        self._buffer = bytearray(_SMALL_BYTES)
        self._view = memoryview(self._buffer)
        # _buffer[_start:_end] holds the received bytes that are not processed.
        self._start = self._end = 0
        #: Responses from the first pending one on, in the order of their requests.
        self._slots: deque[list[Buffer] | PendingResponse] = deque()
        #: Buffers of responses that were not sent.
        self.outgoing: deque[Buffer] = deque()
        #: Number of bytes in `outgoing`.
        self.unsent_bytes = 0
        self._draining = self._is_closed = False
        #: The next request waits until earlier ones are answered.
        self._waits_for_earlier = False
        #: A limit has delayed received requests.
        self.is_waiting = False
        #: When the last byte was received or a response was sent.
        self.active_ms = now_ms
        #: Start of the period in which overdue() measures the rate of an incomplete
        #: frame, and the number of its bytes at that time.
        self._frame_since_ms: int | None = None
        self._frame_bytes = 0
        #: Since when the current frame has been incomplete.
        self._began_ms: int | None = None
        #: The part of the time since _began_ms during which reading was paused.
        self._paused_ms = 0
        #: Reading has been paused since active_ms, because there was no memory.
        self._was_paused = False
        #: Why the connection must be closed.
        self._close_reason: str | None = None
        #: Records the frames, if the traffic is recorded.
        self.recorder: ConnectionRecorder | None = None

    def use_handler(self, handle: Handle) -> None:
        """Pass the next requests to another broker."""
        self._handle = handle

    # -- in ----------------------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return the free part of the buffer.

        It is valid until the next call of received().
        """
        if self._end == len(self._buffer):
            self._grow_or_compact_buffer()
        return self._view[self._end :]

    def can_receive(self) -> bool:
        """Return whether get_buffer() has room.

        It has none while all connections together hold too much memory.
        """
        has_space = self._end < len(self._buffer) or len(self.get_buffer()) > 0
        if has_space and self in self._budget.waiting:
            self._budget.stop_waiting(self)
        return has_space

    def wake(self) -> None:
        """Notify the host that there is room again."""
        self._ready()

    def skip(self, skipped_ms: int) -> None:
        """Do not count time that the clock has skipped, see Server.advance()."""
        self.active_ms += skipped_ms
        if self._frame_since_ms is not None:
            self._frame_since_ms += skipped_ms
        if self._began_ms is not None:
            self._began_ms += skipped_ms

    def remaining_ms(self, now_ms: int) -> int:
        """Estimate the time until the current frame is complete, at the rate so far."""
        received_bytes = self._end - self._start
        if self._began_ms is None or received_bytes < 4:
            return 0
        size = 4 + int.from_bytes(
            self._view[self._start : self._start + 4], "big", signed=True
        )
        until_ms = now_ms
        if self in self._budget.waiting:
            until_ms = self.active_ms
        return (
            max(0, size - received_bytes)
            * max(0, until_ms - self._began_ms - self._paused_ms)
            // received_bytes
        )

    def fail(self, reason: str) -> None:
        """Make overdue() return this reason."""
        self._close_reason = reason

    def received(self, size: int, now_ms: int) -> None:
        """Add `size` received bytes of the buffer, and answer the complete frames.

        Raises:
            CloseConnection: the bytes are not a frame, or the handler refused the request.
        """
        self._end += size
        if self._was_paused:
            self._was_paused = False
            self._paused_ms += now_ms - self.active_ms
        self.active_ms = now_ms
        self.process(now_ms)

    @property
    def has_input(self) -> bool:
        """Whether process() has something to do: received bytes, or a place in a queue."""
        return self._end > self._start or self in self._workload.queue

    def process(self, now_ms: int) -> None:
        """Answer complete frames within the limits.

        Raises:
            CloseConnection: the bytes are not a frame, or the handler refused the request.
        """
        view = self._view
        session = self._session
        max_request_bytes = self._settings.max_request_bytes
        handle = self._handle
        before = self._start
        self._waits_for_earlier = False
        # Step 1: handle frames until one is incomplete or a limit is reached.
        while self._end - self._start >= 4 and not self._is_at_limit:
            start = self._start
            size = int.from_bytes(view[start : start + 4], "big", signed=True)
            limit = (
                session.frame_limit_bytes or max_request_bytes
            )  # authentication raises it
            if not 0 < size <= limit:
                raise CloseConnection(
                    _frame_size_error(bytes(view[start : start + 4]), size, limit)
                )
            stop = start + 4 + size
            if stop > self._end:
                break
            frame = view[start + 4 : stop]
            self._waits_for_earlier = (
                bool(self._slots)
                and self._reports_changes(frame)
                and self._has_earlier_in_progress()
            )
            if self._waits_for_earlier or not self._workload.may_start(self):
                break
            self._start = stop
            if self.recorder is not None:
                self.recorder.request(frame, is_only_pending=not self._slots)
            reply = handle(frame, now_ms)
            if reply is None:
                continue
            if isinstance(reply, PendingResponse) or self._slots:
                self._slots.append(reply)
                if isinstance(reply, PendingResponse):
                    self._track(reply)
            else:
                self._queue(reply)
        # Step 2: leave the queue if this connection could not use its place.
        if self in self._workload.queue and self._is_at_limit:
            # Connections after this one may use the room.
            self._workload.leave_queue(self)
        self.is_waiting = self._end - self._start >= 4 and self.is_full
        # Step 3: shrink an empty buffer, or start the time limit of the next incomplete
        # frame.
        if self._start == self._end:
            self._start = self._end = 0
            self._frame_since_ms = self._began_ms = None
            if not self._may_keep_buffer():
                self._resize(_SMALL_BYTES)
        elif self._frame_since_ms is None or self._start != before:
            self._frame_since_ms = now_ms
            self._frame_bytes = self._end - self._start
            self._began_ms = now_ms
            self._paused_ms = 0

    def _may_keep_buffer(self) -> bool:
        """Return whether the empty buffer remains for the next request.

        A new buffer for each large request costs as much as its append: the system
        clears its pages. overdue() frees the buffer of a connection that pauses.
        """
        size = len(self._buffer)
        budget = self._budget
        return size <= _SMALL_BYTES or (
            size <= _MAX_EMPTY_BUFFER_BYTES
            and 2 * budget.used_bytes < budget.limit_bytes
        )

    def _grow_or_compact_buffer(self) -> None:
        """Move the remaining bytes to the front, or to a larger buffer."""
        used = self._end - self._start
        if self._start > len(self._buffer) // 2 or (
            self._start and used + _SMALL_BYTES <= len(self._buffer)
        ):
            self._buffer[:used] = self._buffer[self._start : self._end]
            self._start = 0
            self._end = used
            return
        self._resize(
            min(
                2 * max(used, _SMALL_BYTES),
                max(used + 1, self._frame_limit + 4),
            )
        )

    def _resize(self, size: int) -> None:
        growth = size - len(self._buffer)
        if growth > 0 and not self._budget.reserve(self, growth):
            self._was_paused = True
            return
        buffer = bytearray(size)
        used = self._end - self._start
        buffer[:used] = self._view[self._start : self._end]
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._start = 0
        self._end = used
        if growth < 0:
            self._budget.free(self, -growth)

    @property
    def is_full(self) -> bool:
        """Whether no further request may start now.

        Responses must be sent or other requests must end before.
        """
        return self in self._workload.queue or self._is_at_limit

    @property
    def _frame_limit(self) -> int:
        """The largest accepted frame."""
        if self._session.frame_limit_bytes is not None:
            return self._session.frame_limit_bytes
        return self._settings.max_request_bytes

    @property
    def _is_at_limit(self) -> bool:
        """Whether a limit of this connection alone is reached."""
        return (
            self._draining
            or self._close_reason is not None
            or self._session.is_closing
            or self._session.pause_count > 0
            or (self._waits_for_earlier and self._has_earlier_in_progress())
            or (len(self._slots) > 0 and self._is_in_steps())
            or len(self._slots) >= self._settings.max_pipelined_requests
            or self.unsent_bytes > self._settings.max_unread_bytes
        )

    def _is_in_steps(self) -> bool:
        """Return whether the latest of the pending requests is processed in chunks."""
        last = self._slots[-1]
        return (
            isinstance(last, PendingResponse) and last.runs_in_steps and not last.is_set
        )

    def _has_earlier_in_progress(self) -> bool:
        """Return whether an earlier request is in progress."""
        return any(
            isinstance(slot, PendingResponse) and not slot.is_set and not slot.is_parked
            for slot in self._slots
        )

    def overdue(self, now_ms: int) -> str | None:
        """Return why the connection must be closed now, or None.

        The reasons are a slow frame, no traffic, and other connections that wait for
        memory.
        """
        if self._close_reason is not None:
            return self._close_reason
        if (
            self._end == 0
            and len(self._buffer) > _SMALL_BYTES
            and now_ms - self.active_ms >= _EMPTY_BUFFER_MS
        ):
            self._resize(_SMALL_BYTES)
        since = self._frame_since_ms
        # While the connection waits for memory, the client is not slow.
        if since is not None and self in self._budget.waiting:
            self._frame_since_ms = now_ms
            self._frame_bytes = self._end - self._start
        elif (
            since is not None
            and now_ms - since >= self._settings.request_timeout_ms
            and not self.is_full
        ):
            received_bytes = self._end - self._start
            if received_bytes - self._frame_bytes < _MIN_RATE_BYTES:
                return f"a request of which {received_bytes} bytes came in {now_ms - since} ms"
            self._frame_since_ms = now_ms
            self._frame_bytes = received_bytes
        if self.is_idle and now_ms - self.active_ms >= self._settings.idle_timeout_ms:
            return f"no request for {now_ms - self.active_ms} ms"
        return None

    # -- out ---------------------------------------------------------------------------

    def _track(self, pending: PendingResponse) -> None:
        if pending.is_parked:
            pending.then(self._queue_ready_responses)
            return
        self._workload.begin(pending.held_bytes)
        pending.then(partial(self._finish_request, pending.held_bytes))

    def _finish_request(self, held_bytes: int, _: object) -> None:
        self._workload.end(held_bytes)
        self._queue_ready_responses(_)

    def _queue_ready_responses(self, _: object) -> None:
        """Queue the responses for sending, up to the first one that is still pending."""
        slots = self._slots
        while slots:
            response = slots[0]
            if isinstance(response, PendingResponse):
                if not response.is_set:
                    break
                response = response.value
            slots.popleft()
            if isinstance(response, CloseConnection):
                self.fail(str(response))
            elif response is not None:
                self._queue(response)
        self._ready()

    def _queue(self, buffers: list[Buffer]) -> None:
        if self.recorder is not None:
            self.recorder.response(buffers)
        self.outgoing += buffers
        for buffer in buffers:
            self.unsent_bytes += len(buffer)

    def next_buffer(self, max_bytes: int = _SEND_BYTES) -> Buffer | None:
        """Return the next bytes to send, or None if there are none.

        At most max_bytes are returned: a view of a large buffer, or several small buffers
        joined.
        """
        outgoing = self.outgoing
        if not outgoing:
            return None
        buffer = outgoing.popleft()
        if len(buffer) > max_bytes:
            view = memoryview(buffer)
            outgoing.appendleft(view[max_bytes:])
            buffer = view[:max_bytes]
        elif outgoing and len(buffer) < _SMALL_BUFFER_BYTES:
            small = [buffer]
            size = len(buffer)
            while (
                outgoing
                and len(outgoing[0]) < _SMALL_BUFFER_BYTES
                and size < max_bytes - _SMALL_BUFFER_BYTES
            ):
                small.append(outgoing.popleft())
                size += len(small[-1])
            buffer = b"".join(small)
        self.unsent_bytes -= len(buffer)
        return buffer

    def next_buffers(self) -> list[Buffer]:
        """Return the next buffers, which one system call may send."""
        buffers: list[Buffer] = []
        remaining = _SEND_BYTES
        while self.outgoing and remaining > 0:
            buffer = self.next_buffer(remaining)
            assert buffer is not None
            buffers.append(buffer)
            remaining -= len(buffer)
        return buffers

    def drain(self) -> None:
        """Start no further requests. Requests in progress are still answered."""
        self._draining = True

    @property
    def is_idle(self) -> bool:
        """Whether every request that was started has been answered and sent."""
        return not self._slots and not self.outgoing

    def close(self) -> None:
        """Release the memory and the references to the host.

        The host may refer to this object.
        """
        if self._is_closed:
            return
        self._is_closed = self._draining = True
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None
        buffer_bytes = len(self._buffer) - _SMALL_BYTES
        self._buffer = bytearray()
        self._view = memoryview(b"")
        self._start = self._end = 0
        self._budget.stop_waiting(self)
        self._budget.free(self, buffer_bytes)
        self._handle = _ignore_frame
        self._ready = _do_nothing
        self._session.wake = None
        if self._session.authentication is not None:
            self._session.authentication.close()
        self._workload.leave_queue(self)
        for slot in self._slots:
            if isinstance(slot, PendingResponse):
                slot.cancel()
                if not slot.is_set and not slot.is_parked:
                    self._workload.end(slot.held_bytes)
        self._slots.clear()
        self.outgoing.clear()
        self.unsent_bytes = 0
