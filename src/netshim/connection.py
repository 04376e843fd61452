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
#: Result of a frame handler: the pieces of a response, None for no response, or a
#: PendingResponse, which will hold pieces, None or a CloseConnection.
Reply = list[Buffer] | PendingResponse | None
Handle = Callable[[memoryview, int], Reply]

#: Initial size of the receive buffer. The budget counts only the bytes beyond it.
_SMALL_BYTES: Final = 64 << 10
#: Maximum size of an empty buffer that is kept for the next request.
_KEPT_BYTES: Final = 4 << 20
#: An empty buffer is kept until the client has been silent for this time.
_KEPT_MS: Final = 1_000
#: Pieces smaller than this are joined, which costs less than a system call for each.
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


def _refusal(start: bytes, size: int, limit: int) -> str:
    """Return why the bytes start no frame, with advice for the operator of the client."""
    if start[:2] == b"\x16\x03":
        return (
            "the client speaks TLS, and this listener does not; "
            "the client needs security.protocol=PLAINTEXT or SASL_PLAINTEXT"
        )
    if start in (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"PRI "):
        return "the client speaks HTTP; this is the port of a Kafka broker"
    return f"a frame of {size} bytes; expected 1 to {limit}"


class Budget:
    """Bytes that all connections together may hold beyond their small buffers.

    Requests in progress hold memory too, see reserve_for_request(). Closing a
    connection does not free that memory.

    A connection that gets no memory is queued and reads nothing until it is first and
    there is room. While one waits, end_slow() selects requests that arrive too slowly,
    and their connections are closed. Otherwise, a few clients that send a few bytes at
    a time would hold all of the memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        #: May exceed limit_bytes, because requests in progress are always counted.
        self.used_bytes = 0
        #: The part of used_bytes that requests in progress hold.
        self.kept_bytes = 0
        #: The part of used_bytes that each connection's buffer holds.
        self._holders: dict[Connection, int] = {}
        #: The number of bytes that each connection waits for, in FIFO order.
        self.waiting: dict[Connection, int] = {}
        #: The first of `waiting`, and the time since when it has been first.
        self._waited_for: tuple[Connection, int] | None = None

    def reserve(self, holder: Connection, size: int) -> bool:
        """Reserve memory for a larger buffer. If there is none, queue the connection.

        Returns whether the memory was reserved.
        """
        # A connection that is not first must wait, even if there is room.
        is_first = holder is next(iter(self.waiting), holder)
        if not is_first or self.used_bytes + size > self.limit_bytes:
            self.waiting[holder] = size
            return False
        self.used_bytes += size
        self._holders[holder] = self._holders.get(holder, 0) + size
        self.stop_waiting(holder)
        return True

    def free(self, holder: Connection, size: int) -> None:
        """Free memory that reserve() has reserved."""
        self.used_bytes -= size
        left = self._holders.pop(holder, 0) - size
        if left > 0:
            self._holders[holder] = left
        self._call_first()

    def reserve_for_request(self, size: int) -> None:
        """Count the memory of a request in progress.

        The request has been received already, so this has no limit. Reads and further
        requests wait until there is room again.
        """
        self.kept_bytes += size
        self.used_bytes += size

    def release(self, size: int) -> None:
        """Free the memory of a request that has ended; see reserve_for_request()."""
        self.kept_bytes -= size
        self.used_bytes -= size
        self._call_first()

    def stop_waiting(self, holder: Connection) -> None:
        """Remove a connection from the queue. Others are ignored."""
        if self.waiting.pop(holder, None) is not None:
            self._call_first()

    def _call_first(self) -> None:
        first = next(iter(self.waiting), None)
        if (
            first is not None
            and self.used_bytes + self.waiting[first] <= self.limit_bytes
        ):
            first.wake()

    def end_slow(self, now_ms: int, timeout_ms: int) -> dict[Connection, str]:
        """Return the connections to close for the first waiter, with the reasons.

        The server calls this periodically. Connections whose frame would take longer
        than timeout_ms at its current rate are closed, the slowest first. If there are
        none and the first waiter has waited for a quarter of timeout_ms, the slowest of
        all is closed.
        """
        # Step 1: calculate how much memory is missing.
        first = next(iter(self.waiting), None)
        if first is None:
            self._waited_for = None
            return {}
        if self._waited_for is None or self._waited_for[0] is not first:
            self._waited_for = first, now_ms
        wanted = self.waiting[first]
        if self._holders.get(first, 0) + wanted > self.limit_bytes:
            return {
                first: f"a request larger than the {self.limit_bytes} bytes for requests of all connections"
            }
        if self.kept_bytes + self._holders.get(first, 0) + wanted > self.limit_bytes:
            return {}  # it waits for requests in progress, not for slow clients
        missing = self.used_bytes + wanted - self.limit_bytes
        ended: dict[Connection, str] = {}
        candidates = {*self._holders, first}
        # Step 2: select the slowest of them until that frees enough.
        slowest_first = sorted(
            (
                (
                    candidate.left_ms(now_ms),
                    self._holders.get(candidate, 0),
                    id(candidate),
                    candidate,
                )
                for candidate in candidates
            ),
            reverse=True,
        )
        is_urgent = now_ms - self._waited_for[1] >= timeout_ms // 4
        for left_ms, held_bytes, _, connection in slowest_first:
            if (
                missing <= 0
                or first in ended
                or (left_ms <= timeout_ms and (ended or not is_urgent))
            ):
                break
            ended[connection] = (
                f"others wait for the {held_bytes} bytes of a request that would take {left_ms} ms more"
            )
            missing -= held_bytes
        return ended


class Workload:
    """Limits the requests in progress on all connections.

    A request is in progress from its start until its response, except while it is
    parked.

    A connection that exceeds the limit is queued, and starts no request until it is
    first and there is room. Then it starts one request and is queued again, so that a
    busy connection does not keep others waiting.
    """

    def __init__(self, limit: int, budget: Budget) -> None:
        self.limit = limit
        #: Counts the memory of the requests.
        self._budget = budget
        #: Number of requests in progress.
        self.count = 0
        #: Connections that wait, in FIFO order.
        self.line: dict[Connection, None] = {}

    def has_room(self, holder: Connection) -> bool:
        """Return whether `holder` may start a request now.

        If not, it is woken when it may.
        """
        has_room = (
            self.count < self.limit
            and self._budget.kept_bytes < self._budget.limit_bytes
        )
        if has_room and not self.line:
            return True
        is_first = holder is next(iter(self.line), holder)
        if not is_first or not has_room:
            self.line[holder] = None
            return False
        self.line.pop(holder, None)
        self._call_first(self.limit - 1)  # the room that is left after this request
        return True

    def leave_line(self, holder: Connection) -> None:
        """Remove a connection from the queue. Others are ignored."""
        if holder in self.line:
            del self.line[holder]
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
        first = next(iter(self.line), None)
        if (
            first is not None
            and self.count < limit
            and self._budget.kept_bytes < self._budget.limit_bytes
        ):
            first.wake()


class Connection:
    """State of one connection."""

    def __init__(
        self,
        handle: Handle,
        settings: Settings,
        budget: Budget,
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
        #: Pieces of responses that were not sent.
        self.outgoing: deque[Buffer] = deque()
        #: Number of bytes in `outgoing`.
        self.unsent_bytes = 0
        self._draining = self._is_closed = False
        #: The next request waits until earlier ones are answered.
        self._is_behind = False
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
        self._waited_ms = 0
        #: Reading has been paused since active_ms, because there was no memory.
        self._was_waiting = False
        #: Why the connection must be closed.
        self._given_up: str | None = None
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
            self._make_room()
        return self._view[self._end :]

    def has_room(self) -> bool:
        """Return whether get_buffer() has room.

        It has none while all connections together hold too much memory.
        """
        has_room = self._end < len(self._buffer) or len(self.get_buffer()) > 0
        if has_room and self in self._budget.waiting:
            self._budget.stop_waiting(self)
        return has_room

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

    def left_ms(self, now_ms: int) -> int:
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
            * max(0, until_ms - self._began_ms - self._waited_ms)
            // received_bytes
        )

    def fail(self, reason: str) -> None:
        """Make overdue() return this reason."""
        self._given_up = reason

    def received(self, size: int, now_ms: int) -> None:
        """Add `size` received bytes of the buffer, and answer the complete frames.

        Raises:
            CloseConnection: the bytes are not a frame, or the handler refused the request.
        """
        self._end += size
        if self._was_waiting:
            self._was_waiting = False
            self._waited_ms += now_ms - self.active_ms
        self.active_ms = now_ms
        self.process(now_ms)

    @property
    def has_input(self) -> bool:
        """Whether process() has something to do: received bytes, or a place in line."""
        return self._end > self._start or self in self._workload.line

    def process(self, now_ms: int) -> None:
        """Answer complete frames within the limits.

        Raises:
            CloseConnection: the bytes are not a frame, or the handler refused the request.
        """
        view = self._view
        session = self._session
        most = self._settings.max_request_bytes
        handle = self._handle
        before = self._start
        self._is_behind = False
        # Step 1: handle frames until one is incomplete or a limit is reached.
        while self._end - self._start >= 4 and not self._is_at_limit:
            start = self._start
            size = int.from_bytes(view[start : start + 4], "big", signed=True)
            limit = session.frame_limit_bytes or most  # authentication raises it
            if not 0 < size <= limit:
                raise CloseConnection(
                    _refusal(bytes(view[start : start + 4]), size, limit)
                )
            stop = start + 4 + size
            if stop > self._end:
                break
            frame = view[start + 4 : stop]
            self._is_behind = (
                bool(self._slots)
                and self._reports_changes(frame)
                and self._is_changing()
            )
            if self._is_behind or not self._workload.has_room(self):
                break
            self._start = stop
            if self.recorder is not None:
                self.recorder.request(frame, is_first=not self._slots)
            reply = handle(frame, now_ms)
            if reply is None:
                continue
            if isinstance(reply, PendingResponse) or self._slots:
                self._slots.append(reply)
                if isinstance(reply, PendingResponse):
                    self._await(reply)
            else:
                self._queue(reply)
        # Step 2: leave the queue if this connection could not use its place.
        if self in self._workload.line and self._is_at_limit:
            # Connections after this one may use the room.
            self._workload.leave_line(self)
        self.is_waiting = self._end - self._start >= 4 and self.is_full
        # Step 3: shrink an empty buffer, or start the clock of the next incomplete
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
            self._waited_ms = 0

    def _may_keep_buffer(self) -> bool:
        """Return whether the empty buffer remains for the next request.

        A new buffer for each large request costs as much as its append: the system
        clears its pages. overdue() frees the buffer of a connection that pauses.
        """
        size = len(self._buffer)
        budget = self._budget
        return size <= _SMALL_BYTES or (
            size <= _KEPT_BYTES and 2 * budget.used_bytes < budget.limit_bytes
        )

    def _make_room(self) -> None:
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
        grown = size - len(self._buffer)
        if grown > 0 and not self._budget.reserve(self, grown):
            self._was_waiting = True
            return
        buffer = bytearray(size)
        used = self._end - self._start
        buffer[:used] = self._view[self._start : self._end]
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._start = 0
        self._end = used
        if grown < 0:
            self._budget.free(self, -grown)

    @property
    def is_full(self) -> bool:
        """Whether no further request may start now.

        Responses must be sent or other requests must end before.
        """
        return self in self._workload.line or self._is_at_limit

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
            or self._given_up is not None
            or self._session.is_ending
            or self._session.mutes > 0
            or (self._is_behind and self._is_changing())
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

    def _is_changing(self) -> bool:
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
        if self._given_up is not None:
            return self._given_up
        if (
            self._end == 0
            and len(self._buffer) > _SMALL_BYTES
            and now_ms - self.active_ms >= _KEPT_MS
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

    def _await(self, answer: PendingResponse) -> None:
        if answer.is_parked:
            answer.then(self._settled)
            return
        self._workload.begin(answer.held_bytes)
        answer.then(partial(self._worked, answer.held_bytes))

    def _worked(self, held_bytes: int, _: object) -> None:
        self._workload.end(held_bytes)
        self._settled(_)

    def _settled(self, _: object) -> None:
        """Queue the responses for sending, up to the first one that is still pending."""
        slots = self._slots
        while slots:
            head = slots[0]
            if isinstance(head, PendingResponse):
                if not head.is_set:
                    break
                head = head.value
            slots.popleft()
            if isinstance(head, CloseConnection):
                self.fail(str(head))
            elif head is not None:
                self._queue(head)
        self._ready()

    def _queue(self, buffers: list[Buffer]) -> None:
        if self.recorder is not None:
            self.recorder.response(buffers)
        self.outgoing += buffers
        for buffer in buffers:
            self.unsent_bytes += len(buffer)

    def next_buffer(self, max_bytes: int = _SEND_BYTES) -> Buffer | None:
        """Return the next bytes to send, or None if there are none.

        At most max_bytes are returned: a view of a large piece, or several small pieces
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
        """Return the next pieces, which one system call may send."""
        buffers: list[Buffer] = []
        left = _SEND_BYTES
        while self.outgoing and left > 0:
            buffer = self.next_buffer(left)
            assert buffer is not None
            buffers.append(buffer)
            left -= len(buffer)
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
        held = len(self._buffer) - _SMALL_BYTES
        self._buffer = bytearray()
        self._view = memoryview(b"")
        self._start = self._end = 0
        self._budget.stop_waiting(self)
        self._budget.free(self, held)
        self._handle = _ignore_frame
        self._ready = _do_nothing
        self._session.wake = None
        if self._session.gate is not None:
            self._session.gate.close()
        self._workload.leave_line(self)
        for slot in self._slots:
            if isinstance(slot, PendingResponse):
                slot.cancel()
                if not slot.is_set and not slot.is_parked:
                    self._workload.end(slot.held_bytes)
        self._slots.clear()
        self.outgoing.clear()
        self.unsent_bytes = 0
