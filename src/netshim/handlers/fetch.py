"""Fetch: sends stored batches to clients.

Rules (wire protocol section 5):
- Each partition of a request succeeds or fails independently.
- Batches are sent as they are stored, without a copy.
- A request without enough data waits for an append or for its deadline, whichever is
  first.
- A request that waits for more than one byte is not evaluated again at each append, but
  as soon as it might have enough bytes. Records from before the wait that became
  readable since then, by a sync or a marker, count as well.
- A request of a fetch session without topics is for all partitions of the session. If the
  last read of a partition found nothing, the handler reads it again only after its log has
  changed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import attrs

from logcore import Log, LogcoreError
from logcore.kernels import kernel, layout
from logcore.reader import aborted_transactions
from logcore.replication.leading import FollowerFetch
from netshim import scheduling, wire
from netshim.fetch_sessions import (
    FetchSession,
    Offsets,
    SessionPartition,
    offsets_of,
    replica_of,
)
from netshim.fetch_wakeups import ANY_PARTITION
from netshim.handlers.failures import code_of, message_of
from netshim.handlers.partitions import (
    check_epoch,
    name_leader,
    when_transactions_are_known,
)
from netshim.scheduling import ChunkCounter, PendingResponse, Steps
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        FetchRequest,
        FetchResponse,
    )

    #: A requested partition: its topic, the topic's name (None for an unknown id), the
    #: partition.
    _FetchEntry = tuple[FetchRequest.Topic, str | None, FetchRequest.Topic.Partition]

#: Maximum time that a fetch waits, even if its client allows more. Otherwise, a broken
#: connection would not be detected.
MAX_WAIT_MS: Final = 30_000
#: First version that identifies topics by their ids (KIP-516).
_IDS_SINCE: Final = 13
#: First version that may read a topic whose own `compression.type` is zstd. As in
#: Kafka, zstd batches of other topics are sent to every client, because many clients
#: can read zstd although they use an older Fetch.
_ZSTD_SINCE: Final = 10
#: First version that names the leader in a refusal (KIP-951), and the codes of these
#: refusals.
_LEADERS_SINCE: Final = 16
_NAMES_LEADER: Final = frozenset(
    (codes.NOT_LEADER_OR_FOLLOWER, codes.FENCED_LEADER_EPOCH)
)


def fetch(
    request: FetchRequest, call: Call, state: BrokerState
) -> FetchResponse | PendingResponse:
    """Return stored batches of the requested partitions.

    The response waits up to max_wait_ms for min_bytes.
    """
    session = None
    if request.session_epoch > 0 and not request.topics:
        session = state.fetch_sessions.get(request.session_id)
    partitions: _ListedPartitions | _SessionPartitions
    if session is not None:
        partitions = _SessionPartitions(session, request, call, state)
    else:
        partitions = _ListedPartitions(request, call, state)
    requested = partitions.requested()

    def begin() -> FetchResponse | PendingResponse:
        return state.run_in_steps(_fetch(request, partitions, call, state))

    def begin_committed() -> FetchResponse | PendingResponse:
        return when_transactions_are_known(requested, begin, state) or begin()

    # read_committed (KIP-98) reads up to the last stable offset.
    if request.isolation_level == 1:
        return state.logs.when_open(requested, begin_committed)
    return state.logs.when_open(requested, begin)


class _ListedPartitions:
    """The partitions that a request lists."""

    def __init__(self, request: FetchRequest, call: Call, state: BrokerState) -> None:
        self._request = request
        self._state = state
        self._names: list[str | None]
        if call.version < _IDS_SINCE:
            self._names = [topic.topic for topic in request.topics]
        else:  # topics have ids; the name of an unknown id is None
            self._names = [
                state.topic_ids.name_of(topic.topic_id) for topic in request.topics
            ]
        self._entries: list[_FetchEntry] = []
        #: Partitions that did not exist when the request arrived, by the id() of their
        #: part of the request. As in Kafka, the request still waits for the others.
        self.missing: set[int] = set()
        #: The existing partitions.
        self.keys: list[tuple[str, int]] = []

    def requested(self) -> list[tuple[str, int]]:
        return [
            (name or "", partition.partition)
            for name, topic in zip(self._names, self._request.topics, strict=True)
            for partition in topic.partitions
        ]

    def find(self) -> Steps[None]:
        """List the partitions, each of them once. Duplicates are ignored."""
        seen: set[tuple[str | None, int]] = set()
        chunk_counter = ChunkCounter()
        for name, topic in zip(self._names, self._request.topics, strict=True):
            for partition in topic.partitions:
                if chunk_counter.is_over():
                    yield
                number = partition.partition
                if (name, number) in seen and name is not None:
                    continue
                seen.add((name, number))
                if name is None or number not in self._state.logs.numbers_of(name):
                    self.missing.add(id(partition))
                else:
                    self.keys.append((name, number))
                self._entries.append((topic, name, partition))

    @property
    def are_all_missing(self) -> bool:
        return len(self.missing) == len(self._entries)

    @property
    def is_overtaken(self) -> bool:
        return False

    @property
    def may_have_changed(self) -> bool:
        return True

    def to_read(self) -> list[_FetchEntry]:
        return self._entries

    def record_results(self, parts: list[FetchResponse.Topic.Partition]) -> None:
        """Ignore the results of the partitions that to_read() returned. Only a fetch
        session needs them.
        """


def session_context(
    state: BrokerState,
    version: int,
    isolation_level: int,
    replica: int,
    replica_epoch: int,
) -> object:
    """Return the values on which the partitions of a session depend."""
    return (
        state.logdir.host.topics_version,
        state.leadership.version,
        version,
        isolation_level,
        replica,
        replica_epoch,
    )


class _SessionPartitions:
    """The partitions of a fetch session. Only partitions that have changed are read."""

    def __init__(
        self,
        session: FetchSession,
        request: FetchRequest,
        call: Call,
        state: BrokerState,
    ) -> None:
        self._session = session
        self._epoch = session.epoch
        self._state = state
        self._replica = replica_of(request)
        #: Ids of the requested partitions that do not exist.
        self.missing: set[int] = set()
        #: The partitions to wait for.
        self.keys: list[tuple[str, int]] = []
        self._candidates: list[tuple[SessionPartition, Log | None, Offsets]] = []
        #: RecentChanges.count before the current comparison.
        self._count = 0
        self._version = call.version
        self._may_wait = request.max_wait_ms > 0
        # Besides the logs, the results depend on these; see session_context().
        self._of_request = (
            call.version,
            request.isolation_level,
            self._replica,
            request.replica_state.replica_epoch,
        )
        #: The partitions that are read first.
        self._first: list[_FetchEntry] | None = None
        self._first = self.to_read()

    def _check_topics(self) -> None:
        """Read every partition again if topics or leaders have changed."""
        session = self._session
        context = session_context(self._state, *self._of_request)
        if context != session.context:
            session.read_all_again()
            session.context = context

    def _key_of(self, session_partition: SessionPartition) -> tuple[str, int] | None:
        name: str | None = session_partition.topic.topic
        if self._version >= _IDS_SINCE:
            name = self._state.topic_ids.name_of(session_partition.topic.topic_id)
        return None if name is None else (name, session_partition.requested.partition)

    def requested(self) -> list[tuple[str, int]]:
        return [
            (name or "", partition.partition)
            for _, name, partition in self._first or ()
        ]

    @property
    def _records_changes(self) -> bool:
        """Whether the broker records every change of the offsets of a led log."""
        # Outside a cluster, programs of this process may append too.
        return not self._state.fetches.has_other_writers

    @property
    def compares_all(self) -> bool:
        """Whether each evaluation compares several partitions with their logs.

        A comparison of 1,000 partitions takes 0.75 ms, too much to repeat it at the
        deadline.
        """
        return not self._records_changes and len(self._session.partitions) > 1

    @property
    def _waits_for_any_partition(self) -> bool:
        """Whether a change of any partition wakes the request.

        A follower copies most of the partitions that its leader has.
        """
        return self._replica >= 0 and self._records_changes

    @property
    def may_have_changed(self) -> bool:
        """Whether a partition of the session has changed since the last comparison."""
        changes = self._state.fetches.changes
        return not self._waits_for_any_partition or self._session.may_have_changed(
            changes
        )

    def find(self) -> Steps[None]:
        """List the partitions to wait for."""
        session, numbers_of = self._session, self._state.logs.numbers_of
        for partition in session.unread.values():
            key = partition.log_key
            if key is None or key[1] not in numbers_of(key[0]):
                self.missing.add(id(partition.requested))
        if len(self.missing) == len(session.partitions):
            return
        if self._waits_for_any_partition:
            self.keys.append(ANY_PARTITION)
        elif self._may_wait:
            self.keys += [
                partition.log_key
                for partition in session.partitions.values()
                if partition.log_key is not None
                and id(partition.requested) not in self.missing
            ]
        yield from ()

    @property
    def are_all_missing(self) -> bool:
        return not self.keys

    @property
    def is_overtaken(self) -> bool:
        """Whether the session has a later request, so that this one gets an error."""
        return self._session.epoch != self._epoch

    def to_read(self) -> list[_FetchEntry]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self._check_topics()
        self._candidates = []
        entries: list[_FetchEntry] = []
        state, session = self._state, self._session
        changes = state.fetches.changes
        self._count = changes.count
        open_log = state.logdir.host.opened
        for candidate in session.candidates(changes, state.now_ms):
            key = candidate.log_key
            if key is None:
                key = self._key_of(candidate)
                if key is not None:
                    session.record_log_key(candidate, key)
            log = None if key is None else open_log(*key)
            offsets = (-1, -1, -1) if log is None else offsets_of(log)
            self._candidates.append((candidate, log, offsets))
            entries.append(
                (
                    candidate.topic,
                    None if key is None else key[0],
                    candidate.requested,
                )
            )
        return entries

    def record_results(self, parts: list[FetchResponse.Topic.Partition]) -> None:
        """Record which of the partitions that to_read() returned have not changed."""
        session = self._session
        for (partition, log, offsets), part in zip(
            self._candidates, parts, strict=True
        ):
            if log is not None and self._is_unchanged(partition, offsets, part):
                session.mark_unchanged(partition, log, offsets)
            else:
                session.mark_unread(partition)
        # With other writers, the recent changes are incomplete.
        if self._records_changes:
            session.record_comparison(self._count, self._state.now_ms)

    def _is_unchanged(
        self,
        session_partition: SessionPartition,
        offsets: Offsets,
        part: FetchResponse.Topic.Partition,
    ) -> bool:
        """Return whether a partition needs no read until its log's offsets change."""
        leadership = self._state.leadership
        # An unknown topic may be created, and an unsent change must be sent.
        if session_partition.log_key is None or session_partition.has_changed(part):
            return False
        # The log of a follower changes without an entry in the recent changes.
        if not leadership.is_leader(session_partition.log_key):
            return False
        end = part.last_stable_offset
        if self._replica >= 0:
            if not leadership.is_in_sync(session_partition.log_key, self._replica):
                return False
            # A follower reads up to the log end.
            end = offsets[2]
        return session_partition.requested.fetch_offset >= end


def _fetch(
    request: FetchRequest,
    partitions: _ListedPartitions | _SessionPartitions,
    call: Call,
    state: BrokerState,
) -> Steps[FetchResponse | PendingResponse]:
    """Run fetch() once the logs are open."""
    # Step 1: list the requested partitions.
    yield from partitions.find()
    keys = partitions.keys
    growth = None
    # The extent is measured before the logs are read, because other requests append
    # concurrently.
    if request.max_wait_ms > 0 and request.min_bytes > 1:
        growth = _Growth(_extent(keys, state, committed=request.isolation_level == 1))
    # Step 2: read the logs.
    was_woken = False

    def record_wakeup(_: int) -> None:
        nonlocal was_woken
        was_woken = True

    # Between two chunks, records may be appended to a partition that was already read. The
    # request then reads again at once.
    entries = partitions.to_read()
    awaited_keys = (
        keys
        if request.max_wait_ms > 0 and len(entries) >= scheduling.CHUNK_ENTRIES
        else []
    )
    waiters = _waiters_for(request, state)
    waiters.add(awaited_keys, record_wakeup)
    try:
        response, size, is_urgent = yield from _collect(
            request, entries, partitions, call, state
        )
    finally:
        waiters.remove(awaited_keys, record_wakeup)
    # Step 3: respond, or wait for more records.
    deadline_ms = call.now_ms + min(request.max_wait_ms, MAX_WAIT_MS)
    if (
        is_urgent
        or state.is_stopping
        or partitions.are_all_missing
        or request.max_wait_ms <= 0
        or size >= _min_bytes(request, state)
    ):
        return response
    parked = _ParkedFetch(
        request, partitions, keys, call, state, deadline_ms, size, growth
    )
    if isinstance(partitions, _SessionPartitions) and partitions.compares_all:
        parked.last_response = response
    return parked.park(reads_again=was_woken)


@attrs.frozen
class _Extent:
    """The extent of some logs at one moment."""

    #: Bytes ever appended to the logs.
    written: int
    #: A number that changes when records of one of the logs are deleted or truncated.
    removals: int
    #: For each log, the offset up to which the request may read.
    readable: list[int]
    #: For each log, its end offset.
    ends: list[int]


class _Growth:
    """Estimates whether a waiting request could get more bytes now.

    An extent of None means that a log was not open.
    """

    def __init__(self, extent: _Extent | None) -> None:
        """Initialize with an extent that was measured before the logs were read."""
        self._extent = extent
        #: A lower bound for the readable part of `written`, or None if it is unknown.
        self._min_readable_bytes: int | None = None
        if extent is not None and extent.readable == extent.ends:
            self._min_readable_bytes = extent.written

    def may_reach(self, missing_bytes: int, current: _Extent | None) -> bool:
        """Return whether `missing_bytes` more bytes may be readable, or records were
        removed.
        """
        extent = self._extent
        # The size is unknown, or records were removed: any number of bytes is possible.
        if current is None or extent is None or current.removals != extent.removals:
            return True
        # Readers cannot read these appends yet.
        if current.readable == extent.readable:
            return False
        # Transactions or unsynced records hide some bytes, so the readable size is
        # unknown.
        if self._min_readable_bytes is None:
            return True
        return not 0 <= current.written - self._min_readable_bytes < missing_bytes

    def record_read(self, current: _Extent | None) -> None:
        """Record that the logs were read after `current` was measured."""
        previous = self._extent
        self._extent = current
        if current is None or previous is None or current.removals != previous.removals:
            self._min_readable_bytes = None
        elif all(
            readable >= end
            for readable, end in zip(current.readable, previous.ends, strict=True)
        ):
            self._min_readable_bytes = previous.written
        if current is not None and current.readable == current.ends:
            self._min_readable_bytes = current.written


def _max_bytes(request: FetchRequest, state: BrokerState) -> int:
    return min(request.max_bytes, state.settings.fetch_max_bytes)


def _min_bytes(request: FetchRequest, state: BrokerState) -> int:
    """Return the number of bytes for which a request waits.

    As in KafkaApis.handleFetchRequest, it is at most the maximum. Otherwise, a full
    response would wait until its deadline.
    """
    return min(request.min_bytes, _max_bytes(request, state))


class _ParkedFetch:
    """A request that waits for appends to its partitions, or for its deadline.

    This is one object with methods instead of closures that refer to each other. Such
    closures would be garbage that only the cycle collector frees, for every Fetch that
    waits.
    """

    __slots__ = (
        "_call",
        "_deadline_ms",
        "_growth",
        "_is_reading",
        "_keys",
        "_min_bytes",
        "_partitions",
        "_pending",
        "_request",
        "_size",
        "_state",
        "_timer",
        "_waiters",
        "_was_woken",
        "last_response",
    )

    def __init__(
        self,
        request: FetchRequest,
        partitions: _ListedPartitions | _SessionPartitions,
        keys: list[tuple[str, int]],
        call: Call,
        state: BrokerState,
        deadline_ms: int,
        size: int,
        growth: _Growth | None,
    ) -> None:
        """Initialize the request. `size` is the number of bytes that it could get now."""
        self._request = request
        self._partitions = partitions
        self._keys = keys
        self._call = call
        self._state = state
        self._deadline_ms = deadline_ms
        self._size = size
        #: Estimates the bytes of a request with min_bytes; None for others.
        self._growth = growth
        #: The number of bytes that ends the wait.
        self._min_bytes = _min_bytes(request, state)
        #: Whether _collect() is running, which may take several chunks.
        self._is_reading = False
        #: Whether the request was woken while it was reading.
        self._was_woken = False
        self._waiters = _waiters_for(request, state)
        self._pending = PendingResponse()
        #: The last result of a request that compares all partitions, which is the
        #: response at the deadline. Otherwise None.
        self.last_response: FetchResponse | None = None

    def park(self, *, reads_again: bool) -> PendingResponse:
        """Start to wait.

        `reads_again` means that records may have arrived since the logs were read.
        """
        pending = self._pending
        self._timer = self._state.timers.at(self._deadline_ms, self._retry)
        self._waiters.add(self._keys, self._retry)
        pending.when_cancelled(self._forget)
        if reads_again:
            self._retry(self._state.now_ms)
        return pending

    def _forget(self) -> None:
        self._waiters.remove(self._keys, self._retry)
        self._state.timers.cancel(self._timer)

    def _finish(self, response: FetchResponse | Exception) -> None:
        self._forget()
        self._pending.set(response)

    def _retry(self, now_ms: int) -> None:
        if self._is_reading:
            self._was_woken = True
            return
        if self._partitions.is_overtaken:
            self._finish(wire.FETCH.Response())
            return
        state = self._state
        is_due = now_ms >= self._deadline_ms or state.is_stopping
        # A change of any partition wakes the requests of followers, also of one that
        # their session does not contain.
        if not is_due and not self._partitions.may_have_changed:
            return
        if (
            is_due
            and not state.is_stopping
            and self.last_response is not None
            and not self._size
        ):
            # An empty response needs no second comparison; see compares_all.
            self._finish(self.last_response)
            return
        now = None
        if self._growth is not None:
            now = _extent(
                self._keys, state, committed=self._request.isolation_level == 1
            )
            if not is_due and not self._growth.may_reach(
                self._min_bytes - self._size, now
            ):
                return
        self._is_reading = True
        try:
            result = state.run_in_steps(
                _collect(
                    self._request,
                    self._partitions.to_read(),
                    self._partitions,
                    self._call,
                    state,
                )
            )
        except Exception as error:
            # The exception belongs to this request, and the caller may serve another
            # one.
            self._finish(error)
            return
        if isinstance(result, PendingResponse):
            result.then(lambda value: self._handle_result(value, now, state.now_ms))
        else:
            self._handle_result(result, now, now_ms)

    def _handle_result(
        self,
        result: tuple[FetchResponse, int, bool] | Exception,
        now: _Extent | None,
        now_ms: int,
    ) -> None:
        self._is_reading = False
        if isinstance(result, Exception):
            self._finish(result)
            return
        response, size, is_urgent = result
        if is_urgent or now_ms >= self._deadline_ms or size >= self._min_bytes:
            self._finish(response)
            return
        self._size = size
        if self.last_response is not None:
            self.last_response = response
        if self._growth is not None:
            self._growth.record_read(now)
        # After a wake-up, the chunks that were already read may have changed.
        if self._was_woken:
            self._was_woken = False
            self._retry(now_ms)


def _extent(
    keys: list[tuple[str, int]], state: BrokerState, *, committed: bool
) -> _Extent | None:
    """Measure the logs. Return None if one of them is not open or cannot be read."""
    written = 0
    removals = 0
    readable = []
    ends = []
    for topic, partition in keys:
        log = state.logdir.host.opened(topic, partition)
        if log is None:
            return None
        # The order matters because other requests append concurrently: `written` includes
        # all bytes that were readable before.
        if committed:
            try:
                readable.append(log.last_stable_offset)
            except LogcoreError:
                return None
        else:
            readable.append(log.high_watermark)
        written += log.host.writer.written_bytes
        ends.append(log.log_end_offset)
        removals += log.log_start_offset + log.times_truncated
    return _Extent(written, removals, readable, ends)


def _collect(
    request: FetchRequest,
    entries: list[_FetchEntry],
    partitions: _ListedPartitions | _SessionPartitions,
    call: Call,
    state: BrokerState,
) -> Steps[tuple[FetchResponse, int, bool]]:
    """Read the logs. Return the response, the number of bytes that count for min_bytes,
    and whether it must be sent at once.
    """
    response_type = wire.FETCH.Response
    topic_type = response_type.Topic
    partition_type = response_type.Topic.Partition
    topics: list[FetchResponse.Topic] = []
    parts: list[FetchResponse.Topic.Partition] = []
    missing = partitions.missing
    refused: list[tuple[str, FetchResponse.Topic.Partition]] = []
    total = 0
    # Bytes that the limits omitted although they are readable. As in Kafka, they count
    # for min_bytes: a client must not wait for records that it could get now.
    omitted = 0
    is_urgent = state.is_stopping
    # As in Kafka, the broker has a limit of its own (KIP-541).
    remaining_bytes = _max_bytes(request, state)
    min_bytes = _min_bytes(request, state)
    committed = request.isolation_level == 1
    follower = _follower_of(request, state)
    current = None
    chunk_counter = ChunkCounter()
    for requested, name, partition in entries:
        if chunk_counter.is_over():
            yield
        if requested is not current:
            current = requested
            topics.append(
                topic_type(
                    topic=requested.topic, topic_id=requested.topic_id, partitions=[]
                )
            )
        part = partition_type(
            partition_index=partition.partition, high_watermark=-1, records=b""
        )
        topics[-1].partitions.append(part)
        parts.append(part)
        try:
            # The topic may have been deleted while the request waited. A new topic of
            # the same name has another id.
            if name is None or (
                call.version >= _IDS_SINCE
                and (
                    name not in state.logdir
                    or state.topic_ids.id_of(name) != requested.topic_id
                )
            ):
                part.error_code = codes.UNKNOWN_TOPIC_ID
                is_urgent = is_urgent or id(partition) not in missing
                continue
            key = name, partition.partition
            log = state.logs.replica(*key)
            # Null, unless the request reads committed records only.
            part.aborted_transactions = None
            # Step 1: check the client's leader epoch and version.
            leader_epoch = state.leadership.leader_epoch(key, log)
            part.error_code = check_epoch(leader_epoch, partition.current_leader_epoch)
            if (
                not part.error_code
                and call.version < _ZSTD_SINCE
                and log.config.compression_type == "zstd"
            ):
                part.error_code = codes.UNSUPPORTED_COMPRESSION_TYPE
            if part.error_code:
                refused.append((name, part))
                is_urgent = True
                continue
            if follower is not None:
                size, must_send = _fetch_for_follower(
                    part, partition, follower, log, key, remaining_bytes, total, state
                )
                is_urgent = is_urgent or must_send
                total += size
                remaining_bytes -= size
                continue
            state.leadership.check_serves(key, partition.current_leader_epoch)
            # Step 2: check for divergence (KIP-595). The request contains the epoch of the
            # client's last record. If that epoch ends earlier in this log, the log was
            # truncated since then. The response contains the offset up to which the
            # client's records match the log.
            if partition.last_fetched_epoch >= 0:
                epoch, end = log.end_of_epoch(partition.last_fetched_epoch)
                if end < 0 or partition.fetch_offset < log.log_start_offset:
                    part.error_code = codes.OFFSET_OUT_OF_RANGE
                    is_urgent = True
                    continue
                if epoch < partition.last_fetched_epoch or end < partition.fetch_offset:
                    part.diverging_epoch = partition_type.DivergingEpoch(
                        epoch=epoch, end_offset=end
                    )
                    part.high_watermark = log.high_watermark
                    part.log_start_offset = log.log_start_offset
                    part.last_stable_offset = log.high_watermark
                    if committed:
                        part.last_stable_offset = log.last_stable_offset
                    is_urgent = True
                    continue
            # Step 3: read the batches.
            offset = partition.fetch_offset
            start = log.log_start_offset
            high_watermark = log.high_watermark
            # The end of the readable records; read_committed excludes open
            # transactions.
            stable = high_watermark
            if committed:
                stable = log.last_stable_offset
            # Either there are records to read, or stored() raises because the offset is
            # out of range.
            if offset < stable or not start <= offset <= log.log_end_offset:
                # A batch that is larger than the limits is sent as the first of a
                # response (KIP-74). Otherwise, its consumer would never proceed.
                max_bytes = min(remaining_bytes, partition.partition_max_bytes)
                buffers = log.stored(
                    offset, stable, max_bytes=max_bytes, at_least_one=not total
                )
                size = sum(map(len, buffers))
                if len(buffers) == 1:
                    part.records = buffers[0]
                elif size:
                    part.records = buffers
                total += size
                remaining_bytes -= size
                # Only if the response would wait, because finding the end takes a walk.
                if size < max_bytes and total + omitted < min_bytes:
                    next_offset = _next_offset(buffers[-1]) if buffers else offset
                    if next_offset < stable:
                        omitted += max_bytes - size
            part.high_watermark = high_watermark
            part.last_stable_offset = stable
            part.log_start_offset = start
            if committed:
                aborted: list[tuple[int, int]] = []
                if part.records:
                    aborted = aborted_transactions(log, offset, stable)
                part.aborted_transactions = [
                    partition_type.AbortedTransaction(
                        producer_id=producer_id, first_offset=first
                    )
                    for producer_id, first in aborted
                ]
        except LogcoreError as error:
            part.error_code = code_of(error)
            is_urgent = is_urgent or id(partition) not in missing
            if name is not None:
                refused.append((name, part))
            state.journal.log_refusal(call, "Fetch", part.error_code, message_of(error))
    partitions.record_results(parts)
    response = response_type(responses=topics)
    if call.version >= _LEADERS_SINCE:
        for topic_name, part in refused:
            if part.error_code in _NAMES_LEADER:
                name_leader(
                    part, topic_name, part.partition_index, response, call, state
                )
    return response, total + omitted, is_urgent


def _next_offset(data: wire.Buffer) -> int:
    """Return the offset after the last of these whole batches."""
    facts, _, _ = kernel.walk(
        data, 0, len(data), len(data) // layout.LOG_OVERHEAD + 1, False
    )
    # Damaged data does not count; the next fetch reports it.
    return int(facts[-1]["last_offset"]) + 1 if len(facts) else sys.maxsize


def _follower_of(request: FetchRequest, state: BrokerState) -> tuple[int, int] | None:
    """Return the node id and the broker epoch of a follower, None for a consumer."""
    # Without a cluster, no client is a follower, whatever its request contains.
    if not state.leadership.is_clustered:
        return None
    replica = request.replica_state
    if replica is not None and replica.replica_id >= 0:
        return replica.replica_id, replica.replica_epoch
    return None


def _waiters_for(request: FetchRequest, state: BrokerState) -> scheduling.Waiters:
    """Return the waiters that a request joins to wait for records."""
    if _follower_of(request, state) is None:
        return state.fetches
    return state.fetches.of_followers


def _fetch_for_follower(
    part: FetchResponse.Topic.Partition,
    requested: FetchRequest.Topic.Partition,
    follower: tuple[int, int],
    log: Log,
    key: tuple[str, int],
    max_bytes: int,
    bytes_before: int,
    state: BrokerState,
) -> tuple[int, bool]:
    """Read the batches for a follower, up to the log end.

    Returns the number of their bytes, and whether the response must be sent at once.
    """
    replica, broker_epoch = follower
    # A fetch confirms that the follower has all records before its offset. This may
    # raise the high watermark.
    refusal = state.leadership.follower_fetched(
        key,
        log,
        FollowerFetch(
            replica=replica,
            broker_epoch=broker_epoch,
            leader_epoch=requested.current_leader_epoch,
            offset=requested.fetch_offset,
            last_epoch=requested.last_fetched_epoch,
        ),
    )
    part.high_watermark = log.high_watermark
    part.log_start_offset = log.log_start_offset
    if refusal is not None:
        part.error_code = refusal.error or codes.NONE
        if refusal.diverging is not None:
            epoch, end = refusal.diverging
            part.diverging_epoch = part.DivergingEpoch(epoch=epoch, end_offset=end)
        return 0, True
    size = 0
    if requested.fetch_offset < log.log_end_offset:
        buffers = log.stored(
            requested.fetch_offset,
            log.log_end_offset,
            max_bytes=min(max_bytes, requested.partition_max_bytes),
            at_least_one=not bytes_before,
            # Records are committed only after the followers have them.
            up_to="log_end",
        )
        size = sum(map(len, buffers))
        if size:
            part.records = buffers
    is_urgent = state.leadership.must_send_high_watermark(
        key, replica, part.high_watermark, has_records=size > 0
    )
    return size, is_urgent
