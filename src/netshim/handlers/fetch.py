"""Fetch: stored batches to clients.

Rules (wire protocol section 5):
- Each partition of a request succeeds or fails alone.
- Batches leave as they are stored, as views.
- A request that has nothing to say yet waits for an append or its time, whichever is first.
- One that waits for more than a byte is not rebuilt at each append, but as soon as it might have enough. What
  was stored before it waited, and became readable since by a sync or a marker, counts as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from logcore import LogcoreError
from logcore.reader import aborted_transactions
from netshim import waiting, wire
from netshim.handlers.failures import code_of, message_of
from netshim.handlers.partitions import (
    check_epoch,
    when_transactions_are_known,
)
from netshim.state import Call, State
from netshim.waiting import Answer, Pace, Steps
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        FetchRequest,
        FetchResponse,
    )

    #: What is asked of a partition: its topic, the topic's name (None for an unknown id), the partition.
    _Wanted = tuple[FetchRequest.Topic, str | None, FetchRequest.Topic.Partition]

#: A fetch waits no longer than this, whatever its client would bear: a connection that is gone must be noticed.
_MAX_WAIT_MS: Final = 30_000
#: An older Fetch of a topic whose own `compression.type` is zstd is refused. As in Kafka, zstd batches of other topics
#: are sent to every client: many clients can read zstd although they use an old Fetch.
_ZSTD_SINCE: Final = 10


def fetch(request: FetchRequest, call: Call, state: State) -> FetchResponse | Answer:
    """Stored batches of the partitions asked for; waits up to max_wait_ms for min_bytes of them.

    Sessions (KIP-227) are declined by answering session id 0, which every client copes with.
    """
    names: list[str | None]
    if call.version < 13:
        names = [topic.topic for topic in request.topics]
    else:  # by their ids; None for an unknown one
        names = [state.topic_of(topic.topic_id) for topic in request.topics]
    asked = [
        (name or "", partition.partition)
        for name, topic in zip(names, request.topics, strict=True)
        for partition in topic.partitions
    ]

    def begin() -> FetchResponse | Answer:
        return state.in_pieces(_fetch(request, names, call, state))

    def begin_committed() -> FetchResponse | Answer:
        return when_transactions_are_known(asked, begin, state) or begin()

    if request.isolation_level == 1:
        return state.when_open(asked, begin_committed)
    return state.when_open(asked, begin)


def _fetch(request: FetchRequest, names: list[str | None], call: Call, state: State) -> Steps[FetchResponse | Answer]:
    """As fetch(). The logs are open; names: of the topics in the request."""
    response_type = wire.FETCH.Response
    if request.session_id and request.session_epoch > 0:
        return response_type(error_code=codes.FETCH_SESSION_ID_NOT_FOUND)
    wanted: list[_Wanted] = []
    missing: set[int] = set()  # places in `wanted` of what does not exist; as in Kafka, the others are waited for
    seen: set[tuple[str | None, int]] = set()
    pace = Pace()
    for name, topic in zip(names, request.topics, strict=True):
        for partition in topic.partitions:
            if pace.is_over():
                yield
            if (name, partition.partition) not in seen or name is None:  # once is enough
                seen.add((name, partition.partition))
                if name is None or partition.partition not in state.numbers_of(name):
                    missing.add(len(wanted))
                wanted.append((topic, name, partition))
    keys = [
        (name, partition.partition)
        for at, (_, name, partition) in enumerate(wanted)
        if name is not None and at not in missing
    ]
    growth = None
    if request.max_wait_ms > 0 and request.min_bytes > 1:  # others append meanwhile: what is looked at later may count
        growth = _Growth(_extent(keys, state, committed=request.isolation_level == 1))
    was_called = False

    def note(_: int) -> None:
        nonlocal was_called
        was_called = True

    # Between two pieces records may be appended to a partition that was looked at.
    noted = keys if request.max_wait_ms > 0 and len(wanted) >= waiting.PIECE else []
    state.fetches.add(noted, note)
    try:
        response, size, settled = yield from _collect(request, wanted, missing, call, state)
    finally:
        state.fetches.remove(noted, note)
    deadline_ms = call.now_ms + min(request.max_wait_ms, _MAX_WAIT_MS)
    if (
        settled
        or state.is_stopping
        or len(missing) == len(wanted)
        or request.max_wait_ms <= 0
        or size >= min(request.min_bytes, request.max_bytes)
    ):
        return response
    parked = _ParkedFetch(request, wanted, missing, keys, call, state, deadline_ms, size, growth)
    return parked.park(looks_again=was_called)


@attrs.frozen
class _Extent:
    """How far some logs go. written: bytes ever appended to them. taken: a number that changes when records of one are
    deleted or truncated. readable, ends: of each, up to where the request may read, and where it ends.
    """

    written: int
    taken: int
    readable: list[int]
    ends: list[int]


class _Growth:
    """What a request that waits might get beyond what it found last. None as an extent: a log was not open."""

    def __init__(self, extent: _Extent | None) -> None:
        """extent: taken before the logs were read."""
        self._found = extent
        self._surely_found: int | None = None  # so many of the bytes that were ever written were readable
        if extent is not None and extent.readable == extent.ends:
            self._surely_found = extent.written

    def may_reach(self, missing: int, now: _Extent | None) -> bool:
        """Whether as many more bytes may be readable, or records were removed."""
        found = self._found
        if now is None or found is None or now.taken != found.taken:
            return True
        if now.readable == found.readable:
            return False
        if self._surely_found is None:
            return True
        return not 0 <= now.written - self._surely_found < missing

    def found(self, now: _Extent | None) -> None:
        """The logs were read after `now` was taken."""
        before = self._found
        self._found = now
        if now is None or before is None or now.taken != before.taken:
            self._surely_found = None
        elif all(readable >= end for readable, end in zip(now.readable, before.ends, strict=True)):
            self._surely_found = before.written
        if now is not None and now.readable == now.ends:
            self._surely_found = now.written


class _ParkedFetch:
    """A request that waits for appends to its partitions, or for its deadline.

    One object with methods, not closures that refer to each other: those would be garbage that only the cycle
    collector frees, at every Fetch that waits.
    """

    __slots__ = (
        "_answer",
        "_call",
        "_deadline_ms",
        "_enough",
        "_growth",
        "_is_looking",
        "_keys",
        "_missing",
        "_request",
        "_size",
        "_state",
        "_timer",
        "_wanted",
        "_was_called",
    )

    def __init__(
        self,
        request: FetchRequest,
        wanted: list[_Wanted],
        missing: set[int],
        keys: list[tuple[str, int]],
        call: Call,
        state: State,
        deadline_ms: int,
        size: int,
        growth: _Growth | None,
    ) -> None:
        """size: bytes that the request could have now."""
        self._request = request
        self._wanted = wanted
        self._missing = missing
        self._keys = keys
        self._call = call
        self._state = state
        self._deadline_ms = deadline_ms
        self._size = size
        self._growth = growth
        self._enough = min(request.min_bytes, request.max_bytes)
        self._is_looking = False
        self._was_called = False
        self._answer = Answer()

    def park(self, *, looks_again: bool) -> Answer:
        """looks_again: something has come since it was looked for."""
        answer = self._answer
        self._timer = self._state.timers.at(self._deadline_ms, self._look)
        self._state.fetches.add(self._keys, self._look)
        answer.when_cancelled(self._forget)
        if looks_again:
            self._look(self._state.now_ms)
        return answer

    def _forget(self) -> None:
        self._state.fetches.remove(self._keys, self._look)
        self._state.timers.cancel(self._timer)

    def _finish(self, response: FetchResponse | Exception) -> None:
        self._forget()
        self._answer.set(response)

    def _look(self, now_ms: int) -> None:
        if self._is_looking:
            self._was_called = True
            return
        state = self._state
        now = None
        if self._growth is not None:
            now = _extent(self._keys, state, committed=self._request.isolation_level == 1)
            is_due = now_ms >= self._deadline_ms or state.is_stopping
            if not is_due and not self._growth.may_reach(self._enough - self._size, now):
                return
        self._is_looking = True
        try:
            found = state.in_pieces(_collect(self._request, self._wanted, self._missing, self._call, state))
        except Exception as error:  # it belongs to this request, not to the one that woke it
            self._finish(error)
            return
        if isinstance(found, Answer):
            found.then(lambda value: self._looked(value, now, state.now_ms))
        else:
            self._looked(found, now, now_ms)

    def _looked(self, found: tuple[FetchResponse, int, bool] | Exception, now: _Extent | None, now_ms: int) -> None:
        self._is_looking = False
        if isinstance(found, Exception):
            self._finish(found)
            return
        response, size, settled = found
        if settled or now_ms >= self._deadline_ms or size >= self._enough:
            self._finish(response)
            return
        self._size = size
        if self._growth is not None:
            self._growth.found(now)
        if self._was_called:  # in the pieces that were done by then something may have changed
            self._was_called = False
            self._look(now_ms)


def _extent(keys: list[tuple[str, int]], state: State, *, committed: bool) -> _Extent | None:
    """None when one of the logs is not open, or cannot be read."""
    written = 0
    taken = 0
    readable = []
    ends = []
    for topic, partition in keys:
        log = state.logdir.opened(topic, partition)
        if log is None:
            return None
        # In this order, since others append meanwhile: what was readable at first had been written by then.
        if committed:
            try:
                readable.append(log.last_stable_offset)
            except LogcoreError:
                return None
        else:
            readable.append(log.high_watermark)
        written += log.writer.written_bytes
        ends.append(log.log_end_offset)
        taken += log.log_start_offset + log.times_truncated
    return _Extent(written, taken, readable, ends)


def _collect(
    request: FetchRequest, wanted: list[_Wanted], missing: set[int], call: Call, state: State
) -> Steps[tuple[FetchResponse, int, bool]]:
    """(response, bytes of records in it, whether it has to go out at once). missing: places in `wanted` of what did not
    exist when the request came.
    """
    response_type = wire.FETCH.Response
    topic_type = response_type.Topic
    partition_type = response_type.Topic.Partition
    topics: list[FetchResponse.Topic] = []
    total = 0
    settled = state.is_stopping
    left = min(request.max_bytes, state.settings.fetch_max_bytes)
    committed = request.isolation_level == 1
    current = None
    pace = Pace()
    for at, (asked, name, partition) in enumerate(wanted):
        if pace.is_over():
            yield
        if asked is not current:
            current = asked
            topics.append(topic_type(topic=asked.topic, topic_id=asked.topic_id, partitions=[]))
        part = partition_type(partition_index=partition.partition, high_watermark=-1, records=b"")
        topics[-1].partitions.append(part)
        try:
            # The topic may have been deleted while the request waited; a new topic of that name has another id.
            if name is None or (
                call.version >= 13 and (name not in state.logdir or state.topic_id(name) != asked.topic_id)
            ):
                part.error_code = codes.UNKNOWN_TOPIC_ID
                settled = settled or at not in missing
                continue
            log = state.log(name, partition.partition)
            part.aborted_transactions = None
            part.error_code = check_epoch(log, partition.current_leader_epoch)
            if not part.error_code and call.version < _ZSTD_SINCE and log.config.compression_type == "zstd":
                part.error_code = codes.UNSUPPORTED_COMPRESSION_TYPE
            if part.error_code:
                settled = True
                continue
            # The client says which epoch its last record has. If that ended earlier in this log, the log was truncated
            # since, and the client learns up to where its records are those of the log.
            if partition.last_fetched_epoch >= 0:
                epoch, end = log.end_of_epoch(partition.last_fetched_epoch)
                if end < 0 or partition.fetch_offset < log.log_start_offset:
                    part.error_code = codes.OFFSET_OUT_OF_RANGE
                    settled = True
                    continue
                if epoch < partition.last_fetched_epoch or end < partition.fetch_offset:
                    part.diverging_epoch = partition_type.DivergingEpoch(epoch=epoch, end_offset=end)
                    part.high_watermark = log.high_watermark
                    part.log_start_offset = log.log_start_offset
                    part.last_stable_offset = log.high_watermark
                    if committed:
                        part.last_stable_offset = log.last_stable_offset
                    settled = True
                    continue
            offset = partition.fetch_offset
            start = log.log_start_offset
            high_watermark = log.high_watermark
            stable = high_watermark  # up to where the client may read: with read_committed not into an open transaction
            if committed:
                stable = log.last_stable_offset
            # There is something to read, or stored() raises that the offset lies outside the log.
            if offset < stable or not start <= offset <= log.log_end_offset:
                most = min(left, partition.partition_max_bytes)
                pieces = log.stored(offset, stable, max_bytes=most, at_least_one=not total)
                size = sum(map(len, pieces))
                if len(pieces) == 1:
                    part.records = pieces[0]
                elif size:
                    part.records = pieces
                total += size
                left -= size
            part.high_watermark = high_watermark
            part.last_stable_offset = stable
            part.log_start_offset = start
            if committed:
                aborted: list[tuple[int, int]] = []
                if part.records:
                    aborted = aborted_transactions(log, offset, stable)
                part.aborted_transactions = [
                    partition_type.AbortedTransaction(producer_id=producer_id, first_offset=first)
                    for producer_id, first in aborted
                ]
        except LogcoreError as error:
            part.error_code = code_of(error)
            settled = settled or at not in missing
            state.journal.refused(call, "Fetch", part.error_code, message_of(error))
    return response_type(responses=topics), total, settled
