"""Fetch sessions (KIP-227): a client lists a partition once, and later only its changes.

    fetch = sessions.begin(request, version, now_ms)  # applies the request to its session
    ...                                               # the broker reads the partitions
    response = fetch.complete(response)               # omits partitions without changes

Rules, as in Kafka 4.1:
- A request contains a session id and an epoch. Epoch 0 closes the session and requests
  a new one. Epoch -1 closes it. Other epochs continue it, from 1 upwards.
- The expected epoch advances when a request is accepted, not when it is answered. If
  another request of the session was accepted before the response, the response is
  INVALID_FETCH_SESSION_EPOCH.
- The response to a continued session contains a partition only if it has records, an
  error or a diverging epoch, or if its high watermark or log start differs from the one
  that was sent last. A partition with an error is sent again in the next response.
- A partition whose records were sent moves to the end. Otherwise, a limit of bytes could
  prevent other partitions from ever being read.
- If all slots are used, a session that was idle for EVICTION_MS is closed to make room
  for a new one. If there is none, a smaller session that is older than EVICTION_MS is
  closed. A follower may replace any session of a consumer. If none can be closed, the
  client gets no session.

This module has no clock and reads no records. handlers/fetch.py stores the offsets of a
log in the partition, and reads the log again only after they have changed. In a
cluster, it compares only the partitions that the broker recorded as changed, so a
request costs the same whatever the number of idle partitions is.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import attrs

from logcore.metadata.checkpoint import Key
from netshim import wire
from netshim.wire import codes

if TYPE_CHECKING:
    from logcore import Log
    from logcore.kernels import UsualFetch
    from netshim.wire.messages import FetchRequest, FetchResponse

#: A session that was idle for this time may be closed to make room for another one. A
#: session that is younger is closed only for a follower.
EVICTION_MS: Final = 120_000
#: Epoch of a request that begins a session.
INITIAL_EPOCH: Final = 0
#: Epoch of a request without a session. It closes the session that the request names.
FINAL_EPOCH: Final = -1
#: Session id of requests and responses without a session.
NO_SESSION: Final = 0
#: First version that identifies topics by their ids.
_IDS_SINCE: Final = 13
#: Maximum number of partitions of all sessions. Each occupies 500 bytes.
_MAX_PARTITIONS: Final = 500_000
#: Maximum number of partitions of one session. Each request of a session compares all
#: of them in one step of the event loop, which takes 7 ms for this number.
_MAX_OF_SESSION: Final = 10_000
#: After this epoch, epoch 1 follows.
_LAST_EPOCH: Final = 2**31 - 1
#: Time after which all partitions of a session are compared with their logs: the
#: retention may have deleted records.
_COMPARE_MS: Final = 5_000

#: Changes that are kept: a fetch session that is older compares all of its partitions.
_MAX_CHANGES: Final = 4_096

#: The id of a topic, or its name before version 13, and the partition's number.
PartitionKey = tuple[bytes | str, int]


#: Log start, high watermark and log end.
Offsets = tuple[int, int, int]


class RecentChanges:
    """The partitions whose offsets changed recently, the latest ones last."""

    def __init__(self) -> None:
        #: The number of changes since the start.
        self.count = 0
        self._keys: deque[Key] = deque(maxlen=_MAX_CHANGES)

    def add(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._keys.append(key)
            self.count += 1

    def since(self, count: int) -> Iterable[Key] | None:
        """Return the partitions that changed after an earlier count, None if unknown.

        Each of them is returned once, the latest change first.
        """
        number = self.count - count
        if number > len(self._keys):
            return None
        return dict.fromkeys(islice(reversed(self._keys), number))


def offsets_of(log: Log) -> Offsets:
    return log.log_start_offset, log.high_watermark, log.log_end_offset


def replica_of(request: FetchRequest) -> int:
    """Return the node id of a follower, or -1 for a consumer."""
    return max(request.replica_id, request.replica_state.replica_id)


def next_epoch(epoch: int) -> int:
    """Return the epoch of the request after one with this epoch."""
    return 1 if epoch == _LAST_EPOCH else epoch + 1


@attrs.define(eq=False)
class SessionPartition:
    """A partition of a session."""

    key: PartitionKey
    topic: FetchRequest.Topic
    #: The latest position and limits that the client has sent.
    requested: FetchRequest.Topic.Partition
    #: The values that were sent last, or -1 if the next ones must be sent.
    high_watermark: int = -1
    log_start: int = -1
    #: The topic and the number, None while the topic is unknown.
    log_key: Key | None = None
    #: The log, and its offsets when it was last read without changes. None if the next
    #: request must read it; see FetchSession.unread.
    unchanged_since: tuple[Log, Offsets] | None = None

    @property
    def is_unchanged(self) -> bool:
        """Whether the log has the same offsets as when it was read without changes."""
        if self.unchanged_since is None:
            return False
        log, offsets = self.unchanged_since
        return offsets == offsets_of(log) and not log.is_closed

    def has_changed(self, part: FetchResponse.Topic.Partition) -> bool:
        """Return whether this result differs from the one that was sent last."""
        return bool(
            part.error_code
            or part.records
            or self.differ_from_sent(part.high_watermark, part.log_start_offset)
            or _diverges(part)
        )

    def differ_from_sent(self, high_watermark: int, log_start: int) -> bool:
        """Return whether these offsets differ from those that were sent last."""
        return high_watermark != self.high_watermark or log_start != self.log_start

    def record_sent(self, part: FetchResponse.Topic.Partition) -> None:
        """Store the offsets of a result that is sent to the client now."""
        self.high_watermark = -1 if part.error_code else part.high_watermark
        self.log_start = part.log_start_offset


def _diverges(part: FetchResponse.Topic.Partition) -> bool:
    return part.diverging_epoch is not None and part.diverging_epoch.end_offset >= 0


@attrs.define(eq=False)
class FetchSession:
    """The partitions that a client fetches."""

    id: int
    #: The node id of a follower, or -1 for a consumer.
    replica: int
    #: Whether requests identify topics by their ids, and not by their names.
    uses_ids: bool
    created_ms: int
    #: The time of the latest request.
    used_ms: int
    #: The epoch of the next request.
    epoch: int = 1
    partitions: OrderedDict[PartitionKey, SessionPartition] = attrs.field(
        factory=OrderedDict
    )
    #: Versions of the topics and leaders when the partitions were read last.
    context: object = None
    #: The partitions that the next request must read, by their keys: all but the
    #: unchanged ones.
    unread: dict[PartitionKey, SessionPartition] = attrs.field(factory=dict)
    #: The partitions whose topics are known, by the name of the topic and the number.
    by_log_key: dict[Key, SessionPartition] = attrs.field(factory=dict)
    #: RecentChanges.count when the unchanged partitions were compared; None if the next
    #: request must compare all partitions with their logs.
    _compared_at: int | None = None
    #: Time at which all partitions are compared nevertheless.
    _compare_at_ms: int = 0
    #: The topic that the partitions of each name or id share.
    _topics: dict[bytes | str, FetchRequest.Topic] = attrs.field(factory=dict)

    @property
    def is_follower(self) -> bool:
        return self.replica >= 0

    def update(self, request: FetchRequest) -> None:
        """Add and change the partitions of a request, and remove the forgotten ones."""
        for topic in request.topics:
            name = self._name_of(topic)
            session_topic = self._topics.get(name)
            if session_topic is None:
                session_topic = self._topics[name] = wire.FETCH.Request.Topic(
                    topic=topic.topic, topic_id=bytes(topic.topic_id), partitions=[]
                )
            for requested in topic.partitions:
                key = name, requested.partition
                session_partition = self.partitions.get(key)
                if session_partition is None:
                    session_partition = self.partitions[key] = SessionPartition(
                        key, session_topic, requested
                    )
                else:
                    session_partition.requested = requested
                self.mark_unread(session_partition)
        for forgotten in request.forgotten_topics_data:
            name = self._name_of(forgotten)
            for number in forgotten.partitions:
                removed = self.partitions.pop((name, number), None)
                self.unread.pop((name, number), None)
                if removed is not None and removed.log_key is not None:
                    self.by_log_key.pop(removed.log_key, None)
        if len(self._topics) > len(self.partitions):
            # Otherwise, forgotten topics would remain in memory.
            self._topics = {
                key[0]: partition.topic for key, partition in self.partitions.items()
            }

    def mark_unread(self, session_partition: SessionPartition) -> None:
        """Make the next request read a partition."""
        session_partition.unchanged_since = None
        self.unread.setdefault(session_partition.key, session_partition)

    def mark_unchanged(
        self, session_partition: SessionPartition, log: Log, offsets: Offsets
    ) -> None:
        """Let no request read a partition until its log has other offsets."""
        session_partition.unchanged_since = log, offsets
        self.unread.pop(session_partition.key, None)

    def move_to_end(self, session_partition: SessionPartition) -> None:
        """Let the next requests read a partition after the others."""
        self.partitions.move_to_end(session_partition.key)
        self.unread.pop(session_partition.key, None)
        self.mark_unread(session_partition)

    def record_log_key(self, session_partition: SessionPartition, log_key: Key) -> None:
        """Record the name of the topic and the number of a partition."""
        session_partition.log_key = log_key
        self.by_log_key[log_key] = session_partition

    def read_all_again(self) -> None:
        """Let the next request find and read every partition."""
        for partition in self.partitions.values():
            partition.unchanged_since = partition.log_key = None
        self.unread = dict(self.partitions)
        self.by_log_key = {}

    def candidates(self, changes: RecentChanges, now_ms: int) -> list[SessionPartition]:
        """Return the partitions that may have changed, each of them once."""
        changed = None
        if now_ms < self._compare_at_ms:
            changed = self._changed(changes)
        if changed is None:
            self._compared_at = None
            return [
                partition
                for partition in self.partitions.values()
                if not partition.is_unchanged
            ]
        candidates = dict(self.unread)
        for log_key in changed:
            partition = self.by_log_key.get(log_key)
            if partition is not None and not partition.is_unchanged:
                candidates[partition.key] = partition
        return list(candidates.values())

    def may_have_changed(self, changes: RecentChanges) -> bool:
        """Return whether a partition may have changed since the last comparison."""
        if len(self.by_log_key) < len(self.partitions):
            return True  # the changes name no partition of an unknown topic
        changed = self._changed(changes)
        return changed is None or any(log_key in self.by_log_key for log_key in changed)

    def _changed(self, changes: RecentChanges) -> Iterable[Key] | None:
        """Return the changes since the last comparison.

        Returns None if they are unknown, or more than the partitions: it is then cheaper
        to compare all partitions.
        """
        compared_at = self._compared_at
        if compared_at is None or changes.count - compared_at > len(self.partitions):
            return None
        return changes.since(compared_at)

    def single_candidate(
        self, requested: SessionPartition | None, changes: RecentChanges, now_ms: int
    ) -> SessionPartition | None:
        """Return the only partition that may have changed, None if there is not exactly one.

        `requested` is a partition that the request lists.
        """
        count = changes.count
        candidates = self.candidates(changes, now_ms)
        if len(candidates) > 1:
            return None
        candidate = candidates[0] if candidates else requested
        if candidate is None or (requested is not None and candidate is not requested):
            return None
        # It remains unread, so nothing is lost if the general path takes the request.
        self.mark_unread(candidate)
        self.record_comparison(count, now_ms)
        return candidate

    def record_comparison(self, count: int, now_ms: int) -> None:
        """Record that the candidates were compared at this RecentChanges.count."""
        if self._compared_at is None:
            self._compare_at_ms = now_ms + _COMPARE_MS
        self._compared_at = count

    def _name_of(self, topic: Any) -> bytes | str:
        return bytes(topic.topic_id) if self.uses_ids else topic.topic

    def listed(self) -> list[FetchRequest.Topic]:
        """Return the partitions, as a request without a session lists them."""
        topics: list[FetchRequest.Topic] = []
        current = None
        for partition in self.partitions.values():
            if partition.topic is not current:
                current = partition.topic
                topics.append(
                    wire.FETCH.Request.Topic(
                        topic=current.topic, topic_id=current.topic_id, partitions=[]
                    )
                )
            topics[-1].partitions.append(partition.requested)
        return topics

    def remove_unchanged(self, response: FetchResponse, *, is_full: bool) -> None:
        """Remove the unchanged partitions from a response.

        The results of the changed partitions are recorded as sent.
        """
        changed_topics = []
        for topic in response.responses:
            name = self._name_of(topic)
            changed_parts = []
            for part in topic.partitions:
                key = name, part.partition_index
                partition = self.partitions.get(key)
                if partition is not None:
                    if not is_full and not partition.has_changed(part):
                        continue
                    partition.record_sent(part)
                    if part.records:
                        self.move_to_end(partition)
                changed_parts.append(part)
            if changed_parts:
                topic.partitions = changed_parts
                changed_topics.append(topic)
        response.responses = changed_topics


@attrs.frozen
class SessionFetch:
    """One fetch of a session."""

    session: FetchSession
    #: Whether the response contains all partitions, because the session is new.
    is_full: bool
    #: The expected epoch after this request.
    epoch: int

    def complete(self, response: Any) -> Any:
        """Return the response for the client."""
        if not isinstance(response, wire.FETCH.Response):
            return response
        if self.session.epoch != self.epoch:
            return wire.FETCH.Response(
                error_code=codes.INVALID_FETCH_SESSION_EPOCH,
                session_id=self.session.id,
            )
        self.session.remove_unchanged(response, is_full=self.is_full)
        response.session_id = self.session.id
        return response


class SingleFetch:
    """One usual fetch of a session, for the fast path: one partition may have changed."""

    __slots__ = ("_lists_partition", "_request", "_session", "partition")

    def __init__(
        self,
        session: FetchSession,
        partition: SessionPartition,
        request: UsualFetch,
        *,
        lists_partition: bool,
    ) -> None:
        self._session = session
        self._request = request
        self._lists_partition = lists_partition
        self.partition = partition

    def begin(self, now_ms: int) -> None:
        """Apply the request to the session, as FetchSessions.begin() does."""
        session, request = self._session, self._request
        session.epoch = next_epoch(request.session_epoch)
        session.used_ms = now_ms
        session.mark_unread(self.partition)
        if self._lists_partition:
            self.partition.requested = wire.FETCH.Request.Topic.Partition(
                partition=request.partition,
                current_leader_epoch=request.leader_epoch,
                fetch_offset=request.offset,
                last_fetched_epoch=request.last_epoch,
                partition_max_bytes=request.partition_max_bytes,
            )

    @property
    def is_current(self) -> bool:
        """Whether no other request of the session was accepted since begin()."""
        return self._session.epoch == next_epoch(self._request.session_epoch)

    def is_single(self, context: object, changes: RecentChanges, now_ms: int) -> bool:
        """Return whether still no other partition may have changed."""
        session = self._session
        if session.context != context:
            return False
        return session.single_candidate(self.partition, changes, now_ms) is not None

    def record_sent(
        self, high_watermark: int, log_start: int, *, has_records: bool
    ) -> None:
        """Store the offsets that are sent to the client now."""
        if not self.is_current:
            return
        self.partition.high_watermark = high_watermark
        self.partition.log_start = log_start
        if has_records and len(self._session.partitions) > 1:
            self._session.move_to_end(self.partition)

    def mark_unchanged(self, log: Log, offsets: Offsets) -> None:
        """See FetchSession.mark_unchanged()."""
        self._session.mark_unchanged(self.partition, log, offsets)

    def undo(self) -> None:
        """Undo begin(), so that the general path can handle the request."""
        if self.is_current:
            self._session.epoch = self._request.session_epoch


class FetchSessions:
    """The sessions of a broker."""

    def __init__(self, slots: int, random: Callable[[int], bytes]) -> None:
        self._slots = slots
        #: Returns random bytes.
        self._random = random
        self._sessions: dict[int, FetchSession] = {}
        #: Number of partitions of all sessions.
        self._count = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def partitions(self) -> int:
        """The number of partitions of all sessions."""
        return self._count

    def get(self, session_id: int) -> FetchSession | None:
        return self._sessions.get(session_id)

    def begin(
        self, request: FetchRequest, version: int, now_ms: int
    ) -> SessionFetch | int | None:
        """Apply a request to its session.

        Returns None for a request without a session, or the error code of a refusal.
        """
        if request.session_epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            self._remove(request.session_id)
            if request.session_epoch == FINAL_EPOCH:
                return None
            session = self._create(request, version, now_ms)
            return None if session is None else SessionFetch(session, True, 1)
        fetch_session = self._sessions.get(request.session_id)
        if fetch_session is None:
            return codes.FETCH_SESSION_ID_NOT_FOUND
        if request.session_epoch != fetch_session.epoch:
            return codes.INVALID_FETCH_SESSION_EPOCH
        if fetch_session.uses_ids != (version >= _IDS_SINCE):
            return codes.FETCH_SESSION_TOPIC_ID_ERROR
        count_before = len(fetch_session.partitions)
        fetch_session.update(request)
        self._count += len(fetch_session.partitions) - count_before
        fetch_session.epoch = next_epoch(fetch_session.epoch)
        fetch_session.used_ms = now_ms
        if not fetch_session.partitions:
            self._remove(fetch_session.id)
            return None
        if self._is_too_large(len(fetch_session.partitions), 0):
            self._remove(fetch_session.id)
            return codes.FETCH_SESSION_ID_NOT_FOUND
        return SessionFetch(fetch_session, False, fetch_session.epoch)

    def single_fetch(self, request: UsualFetch) -> SingleFetch | None:
        """Return the fetch of a request if its session has one partition, else None.

        A request without a partition gets the session's partition. The session does not
        change.
        """
        session = self._sessions.get(request.session_id)
        if (
            session is None
            or session.is_follower
            or request.replica >= 0
            or session.epoch != request.session_epoch
            or session.uses_ids != (request.version >= _IDS_SINCE)
            or len(session.partitions) != 1
        ):
            return None
        ((key, partition),) = session.partitions.items()
        lists_partition = request.has_partition
        if not lists_partition:
            topic_id = partition.topic.topic_id if session.uses_ids else None
            request.continue_with(partition.topic.topic, topic_id, partition.requested)
        elif key != (request.topic_id or request.topic, request.partition):
            return None
        return SingleFetch(session, partition, request, lists_partition=lists_partition)

    def follower_fetch(
        self, request: UsualFetch, context: object, changes: RecentChanges, now_ms: int
    ) -> SingleFetch | None:
        """Return the fetch of a follower if one partition may have changed, else None.

        A request without a partition gets this one.
        """
        session = self._sessions.get(request.session_id)
        if (
            session is None
            or session.replica != request.replica
            or session.epoch != request.session_epoch
            or session.context != context
        ):
            return None
        requested = None
        if request.has_partition:
            requested = session.partitions.get(
                (request.topic_id or request.topic, request.partition)
            )
            if requested is None:
                return None
        partition = session.single_candidate(requested, changes, now_ms)
        if partition is None or partition.log_key is None:
            return None
        if requested is None:
            topic_id = partition.topic.topic_id if session.uses_ids else None
            request.continue_with(partition.topic.topic, topic_id, partition.requested)
        return SingleFetch(
            session, partition, request, lists_partition=requested is not None
        )

    def _is_too_large(self, size: int, added: int) -> bool:
        """Return whether a session of this size, with partitions to add, has no room."""
        return size > _MAX_OF_SESSION or self._count + added > _MAX_PARTITIONS

    def _remove(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._count -= len(session.partitions)

    def _create(
        self, request: FetchRequest, version: int, now_ms: int
    ) -> FetchSession | None:
        """Return a new session, or None if there is no room for one."""
        session = FetchSession(
            self._new_id(), replica_of(request), version >= _IDS_SINCE, now_ms, now_ms
        )
        session.update(request)
        size = len(session.partitions)
        if self._is_too_large(size, size):
            return None
        if len(self._sessions) >= self._slots and not self._evict_for(session, now_ms):
            return None
        self._sessions[session.id] = session
        self._count += size
        return session

    def _new_id(self) -> int:
        while True:
            number = int.from_bytes(self._random(4), "big") & _LAST_EPOCH
            if number != NO_SESSION and number not in self._sessions:
                return number

    def _evict_for(self, new: FetchSession, now_ms: int) -> bool:
        """Close a session to make room for a new one. Return whether one was closed."""
        if not self._sessions:
            return False
        candidate = min(self._sessions.values(), key=lambda session: session.used_ms)
        if now_ms - candidate.used_ms <= EVICTION_MS:
            evictable = [
                session
                for session in self._sessions.values()
                if now_ms - session.created_ms > EVICTION_MS
                or (new.is_follower and not session.is_follower)
            ]
            if not evictable:
                return False
            candidate = min(evictable, key=_value)
            if _value(new) < _value(candidate):
                return False
        self._remove(candidate.id)
        return True


def _value(session: FetchSession) -> tuple[bool, int]:
    """Return the rank of a session: the one with the lowest rank is closed."""
    return session.is_follower, len(session.partitions)
