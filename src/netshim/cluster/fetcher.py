"""Copies partitions from one leader, in a thread for each leader.

Rules:
- Decisions are those of logcore.replication.following: this module sends the fetches and
  changes the logs.
- One request is outstanding. If the connection fails, the fetches are given up with it.
- In a fetch session, the fetch of a partition is outstanding until the leader answers it,
  also over several requests. A request lists only the partitions whose fetch is new,
  so an idle partition costs neither side anything.
- A partition that cannot be fetched now is tried again later, and the others continue.
- After drop() has returned, this module no longer changes the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import attrs

from logcore import Log, LogcoreError
from logcore.errors import RemoteUnavailableError, ShippingError
from logcore.fs import FS
from logcore.metadata.checkpoint import Key
from logcore.partition.replication import restart_at
from logcore.replication import following
from logcore.replication.following import (
    AppendFetched,
    BackOff,
    DeleteRecordsBelow,
    FollowerState,
    LeaderResponse,
    RestartLog,
    SendFetch,
    StopReplica,
    SyncLog,
    TruncateToEpoch,
)
from logcore.replication.leading import NO_EPOCH, FollowerFetch
from logcore.replication.state import LeaderAndIsr, ReplicationError
from netshim import wire
from netshim.cluster.broker_connections import Connect
from netshim.cluster.peer_requests import PeerConnection
from netshim.fetch_sessions import INITIAL_EPOCH, NO_SESSION, next_epoch

_log = logging.getLogger("netshim")

#: Version with topic ids and the epoch of the follower, without the follower's high
#: watermark.
_FETCH_VERSION: Final = 17
#: Time before a partition is fetched again after an error, and a leader after a failed
#: connection.
_BACK_OFF_MS: Final = 100
_MAX_BYTES: Final = 10 << 20
#: Minimum time that a fetch waits if the previous one was empty. Records, other leaders
#: and new partitions end the wait. A connection is given up after 30 s without an answer.
_IDLE_WAIT_MS: Final = 2_500
#: Wait of a fetch while partitions are being added, and the time after an addition for
#: which more are expected. A broker that starts adds a thousand within seconds.
_SHORT_WAIT_MS: Final = 50
_GROWTH_MS: Final = 1_000

_ERRORS_BY_CODE: Final = {int(error): error for error in ReplicationError}


#: A topic id and a partition.
_FetchKey = tuple[bytes, int]


@attrs.frozen(kw_only=True)
class FetcherSettings:
    """Limits of the requests of followers."""

    wait_ms: int = 500
    partition_bytes: int = 1 << 20


@attrs.define(eq=False)
class FollowedPartition:
    """One partition that this broker follows. `mutex` guards `follower_state` and `log`."""

    key: Key
    topic_id: bytes
    log: Log
    follower_state: FollowerState
    mutex: threading.Lock = attrs.field(factory=threading.Lock)
    is_dropped: bool = False
    retry_at_ms: int = 0
    #: The last error, which is logged once.
    error: str = ""

    @property
    def fetch_key(self) -> _FetchKey:
        return self.topic_id, self.key[1]


@attrs.frozen
class _SentFetch:
    """A fetch that was sent to the leader, and not given up."""

    partition: FollowedPartition
    fetch: FollowerFetch
    log_start: int


def last_epoch(log: Log) -> int:
    """Return the epoch of the end of a log, NO_EPOCH for an empty one."""
    if log.log_start_offset == log.log_end_offset:
        return NO_EPOCH
    return log.leader_epoch


class LeaderFetcher:
    """The partitions that this broker follows from one leader."""

    def __init__(
        self,
        leader: int,
        fs: FS,
        settings: FetcherSettings,
        connect: Connect,
        on_failure: Callable[[Key, LogcoreError], None],
    ) -> None:
        self.leader = leader
        self._fs = fs
        self._settings = settings
        #: Called if a log cannot be written.
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._partitions: dict[Key, FollowedPartition] = {}
        #: Partitions whose next fetch may differ from the one that the leader has.
        self._due: dict[FollowedPartition, None] = {}
        self._is_closing = False
        #: When a partition was last added, and whether the current request waits briefly
        #: because more are expected.
        self._added_ms = 0
        self._uses_short_wait = False
        #: The fetch session, and the fetches that it contains. Only the thread uses
        #: them.
        self._session_id = NO_SESSION
        self._epoch = INITIAL_EPOCH
        self._sent: dict[_FetchKey, _SentFetch] = {}
        #: Whether the last response contained no partition.
        self._was_empty = False
        self._connection = PeerConnection(leader, connect)
        self._thread = threading.Thread(
            target=self._run, name=f"netshim-fetch-{leader}", daemon=True
        )
        self._thread.start()

    def follow(self, followed_partition: FollowedPartition) -> None:
        with self._changed:
            self._partitions[followed_partition.key] = followed_partition
            self._due[followed_partition] = None
            self._added_ms = self._fs.monotonic_ms()
            uses_short_wait = self._uses_short_wait
            self._changed.notify_all()
        # The current request may wait for records of other partitions. An interrupt
        # also ends the session, so it would be costly for each of many new partitions.
        if not uses_short_wait:
            self._connection.interrupt()

    def drop(self, key: Key) -> None:
        """Stop following a partition. Returns when its log is no longer used."""
        with self._changed:
            partition = self._partitions.pop(key, None)
            if partition is not None:
                self._due[partition] = None  # to remove it from the session
        if partition is not None:
            with partition.mutex:
                # The thread holds the mutex while it uses the log.
                partition.is_dropped = True

    def read_state(self, key: Key, state: LeaderAndIsr) -> None:
        """Use a newer state with the same leader and epoch."""
        with self._changed:
            partition = self._partitions.get(key)
        if partition is not None:
            with partition.mutex:
                partition.follower_state = following.read_state(
                    partition.follower_state, state
                )

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        # This ends the request that waits for records.
        self._connection.interrupt()
        self._thread.join()

    # -- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._partitions and not self._is_closing:
                    self._changed.wait()
                if self._is_closing:
                    break
                due, self._due = list(self._due), {}
                since_addition_ms = self._fs.monotonic_ms() - self._added_ms
                self._uses_short_wait = since_addition_ms < _GROWTH_MS
            try:
                self._fetch_round(due)
            except Exception:
                _log.exception("an internal error in the fetcher of %d", self.leader)
                self._restart_session()
                with self._changed:
                    self._due = dict.fromkeys(self._partitions.values())
                self._pause()
        self._connection.close()

    def _fetch_round(self, due: list[FollowedPartition]) -> None:
        """Send one request, and handle its response."""
        new_fetches: list[_SentFetch] = []
        forgotten: list[_FetchKey] = []
        for partition in due:
            try:
                fetch = self._next_fetch(partition)
            except LogcoreError as error:
                self._fail(partition, error)
                fetch = None
            previous = self._sent.get(partition.fetch_key)
            if fetch is None:
                # Otherwise, the leader would answer the previous fetch again in each
                # response.
                if previous is not None and previous.partition is partition:
                    del self._sent[partition.fetch_key]
                    forgotten.append(partition.fetch_key)
                if (
                    not partition.is_dropped
                    and partition.follower_state.stopped is None
                ):
                    self._mark_due(partition)
                continue
            sent = self._sent[partition.fetch_key] = _SentFetch(
                partition, fetch, partition.follower_state.log_start
            )
            if previous is None and partition.fetch_key not in forgotten:
                new_fetches.append(sent)
            elif previous is None or previous.partition is not partition:
                # A new role has no values from the leader, so it needs a full response.
                self._epoch = INITIAL_EPOCH
            elif previous.fetch != fetch or previous.log_start != sent.log_start:
                new_fetches.append(sent)
        if not self._sent:
            self._epoch = INITIAL_EPOCH
            self._pause()
            return
        is_full = self._epoch == INITIAL_EPOCH
        # A partition that backs off is due before a long wait would end.
        is_idle = self._was_empty and not (is_full or new_fetches or self._due)
        if is_full:
            # A new session begins with all partitions.
            new_fetches, forgotten = list(self._sent.values()), []
        try:
            response = self._connection.request(
                wire.FETCH,
                self._request(new_fetches, forgotten, is_idle=is_idle),
                max_version=_FETCH_VERSION,
            )
        except (RemoteUnavailableError, ShippingError) as error:
            _log.debug("fetches from broker %d: %s", self.leader, error)
            self._restart_session()
            self._pause()
            return
        if response.error_code:
            # Such as an unknown session, after a restart of the leader.
            _log.debug("fetches from broker %d: %d", self.leader, response.error_code)
            is_broken = is_full
            self._restart_session(keeps_connection=True)
            # The leader refuses new sessions too, so an immediate retry would loop.
            if is_broken:
                self._pause()
            return
        answered = self._handle_response(response)
        self._was_empty = not answered
        if response.session_id == NO_SESSION:
            # Without a session, a partition that the response lacks is given up.
            self._abandon_fetches(answered, _BACK_OFF_MS)
            self._session_id, self._epoch = NO_SESSION, INITIAL_EPOCH
        else:
            self._session_id = response.session_id
            self._epoch = next_epoch(self._epoch)

    def _handle_response(self, response: Any) -> set[_FetchKey]:
        """Handle the partitions of a response, and return which they are."""
        answered: set[_FetchKey] = set()
        for topic in response.responses:
            for part in topic.partitions:
                fetch_key = bytes(topic.topic_id), part.partition_index
                sent = self._sent.get(fetch_key)
                # A partition that was not requested, or is listed twice, is ignored.
                if sent is not None and fetch_key not in answered:
                    answered.add(fetch_key)
                    self._handle_partition(sent.partition, sent.fetch, part)
                    self._mark_due(sent.partition)
        return answered

    def _restart_session(self, *, keeps_connection: bool = False) -> None:
        """Give up all fetches. The next request closes the session and begins another."""
        if not keeps_connection:
            self._connection.close()
        self._abandon_fetches(set())
        self._was_empty = False
        self._epoch = INITIAL_EPOCH

    def _abandon_fetches(self, answered: set[_FetchKey], delay_ms: int = 0) -> None:
        """Give up the fetches that were not answered, and send them again later."""
        sent, self._sent = self._sent, {}
        for fetch_key, sent_fetch in sent.items():
            if fetch_key not in answered:
                partition = sent_fetch.partition
                with partition.mutex:
                    partition.follower_state = following.gave_up(
                        partition.follower_state
                    )
                    partition.retry_at_ms = self._fs.monotonic_ms() + delay_ms
                self._mark_due(partition)

    def _mark_due(self, followed_partition: FollowedPartition) -> None:
        """Compute the fetch of a partition again for the next request."""
        with self._changed:
            self._due[followed_partition] = None

    def _pause(self) -> None:
        with self._changed:
            if not self._is_closing:
                self._changed.wait(_BACK_OFF_MS / 2_000)

    def _next_fetch(
        self, followed_partition: FollowedPartition
    ) -> FollowerFetch | None:
        """Sync the log if necessary, and return the next fetch."""
        with followed_partition.mutex:
            if (
                followed_partition.is_dropped
                or self._fs.monotonic_ms() < followed_partition.retry_at_ms
            ):
                return None
            step = following.next_step(followed_partition.follower_state)
            if isinstance(step, SyncLog):
                followed_partition.log.flush()
                followed_partition.follower_state = following.synced(
                    followed_partition.follower_state,
                    followed_partition.log.durable_end_offset,
                )
                self._advance_high_watermark(followed_partition)
                step = following.next_step(followed_partition.follower_state)
            if not isinstance(step, SendFetch):
                return None
            followed_partition.follower_state = following.sent(
                followed_partition.follower_state, step.fetch
            )
            return step.fetch

    def _request(
        self,
        new_fetches: list[_SentFetch],
        forgotten: list[_FetchKey],
        *,
        is_idle: bool,
    ) -> Any:
        wait_ms = self._settings.wait_ms
        if self._uses_short_wait:
            wait_ms = min(wait_ms, _SHORT_WAIT_MS)
        elif is_idle:
            wait_ms = max(wait_ms, _IDLE_WAIT_MS)
        topic_type = wire.FETCH.Request.Topic
        topics: dict[bytes, Any] = {}
        for sent_fetch in new_fetches:
            topic_id, number = sent_fetch.partition.fetch_key
            topic = topics.get(topic_id)
            if topic is None:
                topic = topics[topic_id] = topic_type(topic_id=topic_id, partitions=[])
            topic.partitions.append(
                topic_type.Partition(
                    partition=number,
                    current_leader_epoch=sent_fetch.fetch.leader_epoch,
                    fetch_offset=sent_fetch.fetch.offset,
                    last_fetched_epoch=sent_fetch.fetch.last_epoch,
                    log_start_offset=sent_fetch.log_start,
                    partition_max_bytes=self._settings.partition_bytes,
                )
            )
        forgotten_type = wire.FETCH.Request.ForgottenTopic
        any_fetch = next(iter(self._sent.values())).fetch
        return wire.FETCH.Request(
            replica_state=wire.FETCH.Request.ReplicaState(
                replica_id=any_fetch.replica, replica_epoch=any_fetch.broker_epoch
            ),
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=_MAX_BYTES,
            isolation_level=0,
            session_id=self._session_id,
            session_epoch=self._epoch,
            topics=list(topics.values()),
            forgotten_topics_data=[
                forgotten_type(topic_id=topic_id, partitions=[number])
                for topic_id, number in forgotten
            ],
        )

    # -- answers -----------------------------------------------------------------------

    def _handle_partition(
        self, followed_partition: FollowedPartition, fetch: FollowerFetch, part: Any
    ) -> None:
        """Handle the part of a response for one partition."""
        with followed_partition.mutex:
            if followed_partition.is_dropped:
                return
            try:
                response = _fetch_answer(part)
                own_end = (-1, -1)
                if response.diverging is not None:
                    own_end = followed_partition.log.end_of_epoch(response.diverging[0])
                followed_partition.follower_state, effects = following.answered(
                    followed_partition.follower_state, fetch, response, own_end
                )
                for effect in effects:
                    self._execute(followed_partition, effect)
                self._advance_high_watermark(followed_partition)
            except LogcoreError as error:
                followed_partition.follower_state = following.gave_up(
                    followed_partition.follower_state
                )
                self._fail(followed_partition, error)

    def _execute(
        self, followed_partition: FollowedPartition, effect: following.FollowerEffect
    ) -> None:
        log = followed_partition.log
        match effect:
            case AppendFetched(records):
                for data in records:
                    assert isinstance(data, memoryview)
                    log.append_as_follower(data, durability="os")
            case TruncateToEpoch(epoch, end):
                before = log.log_end_offset
                after = log.truncate_to_epoch(epoch, end)
                _log.info(
                    "%s-%d: truncated from %d to %d",
                    *followed_partition.key,
                    before,
                    after,
                )
            case RestartLog(offset):
                _log.warning("%s-%d: continues at %d", *followed_partition.key, offset)
                restart_at(log.host.writer, offset)
            case DeleteRecordsBelow(offset):
                if log.log_start_offset < offset <= log.high_watermark:
                    log.delete_records(offset)
            case StopReplica(reason):
                _log.error(
                    "%s-%d stops following broker %d: %s",
                    *followed_partition.key,
                    self.leader,
                    reason,
                )
                return
            case BackOff():
                followed_partition.retry_at_ms = self._fs.monotonic_ms() + _BACK_OFF_MS
                return
        followed_partition.follower_state = following.changed_log(
            followed_partition.follower_state,
            log.log_start_offset,
            log.log_end_offset,
            last_epoch(log),
        )

    def _advance_high_watermark(self, followed_partition: FollowedPartition) -> None:
        """Let readers see the records below the high watermark."""
        offset = min(
            followed_partition.follower_state.high_watermark,
            followed_partition.log.log_end_offset,
        )
        if offset > followed_partition.log.high_watermark:
            followed_partition.log.advance_high_watermark(offset)

    def _fail(self, followed_partition: FollowedPartition, error: LogcoreError) -> None:
        followed_partition.retry_at_ms = self._fs.monotonic_ms() + _BACK_OFF_MS
        if followed_partition.log.has_failed:
            self._on_failure(followed_partition.key, error)
        elif str(error) != followed_partition.error:  # such as a full disk
            followed_partition.error = str(error)
            _log.error("%s-%d cannot be copied now: %s", *followed_partition.key, error)


def _fetch_answer(part: Any) -> LeaderResponse:
    error = None
    if part.error_code:
        # Newer metadata also resolves other codes, such as UNKNOWN_TOPIC_ID.
        error = _ERRORS_BY_CODE.get(
            part.error_code, ReplicationError.NOT_LEADER_OR_FOLLOWER
        )
    diverging = None
    if part.diverging_epoch is not None and part.diverging_epoch.end_offset >= 0:
        diverging = part.diverging_epoch.epoch, part.diverging_epoch.end_offset
    records: tuple[memoryview, ...] = ()
    if part.records:
        records = (memoryview(part.records),)
    return LeaderResponse(
        error, diverging, records, part.high_watermark, max(0, part.log_start_offset)
    )
