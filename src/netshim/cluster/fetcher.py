"""Copies partitions from one leader, in a thread for each leader.

Rules:
- Decisions are those of logcore.replication.following: this module sends the fetches and
  changes the logs.
- One request is outstanding. If the connection fails, the fetches are given up with it.
- In a fetch session, the fetch of a partition is outstanding until the leader answers it,
  also over several requests. A request lists only the partitions whose fetch is new,
  so an idle partition costs neither side anything.
- A partition that cannot be fetched now is tried again later, and the others continue.
- After drop() has returned, this module changes the log no more.
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
    FetchAnswer,
    FollowerBook,
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
_QUIET_WAIT_MS: Final = 2_500
#: Wait of a fetch while partitions are being added, and the time after an addition for
#: which more are expected. A broker that starts adds a thousand within seconds.
_BRIEF_WAIT_MS: Final = 50
_GROWS_FOR_MS: Final = 1_000

_CODES: Final = {int(error): error for error in ReplicationError}


#: A topic id and a partition.
_Place = tuple[bytes, int]


@attrs.frozen(kw_only=True)
class FetcherSettings:
    """Limits of the requests of followers."""

    wait_ms: int = 500
    partition_bytes: int = 1 << 20


@attrs.define(eq=False)
class FollowedPartition:
    """One partition that this broker follows. `mutex` guards the book and the log."""

    key: Key
    topic_id: bytes
    log: Log
    book: FollowerBook
    mutex: threading.Lock = attrs.field(factory=threading.Lock)
    is_dropped: bool = False
    retry_at_ms: int = 0
    #: The last error, which is logged once.
    error: str = ""

    @property
    def place(self) -> _Place:
        return self.topic_id, self.key[1]


@attrs.frozen
class _SentFetch:
    """A fetch that the leader has."""

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
        #: When a partition was last added, and whether the present request waits briefly
        #: because more are expected.
        self._added_ms = 0
        self._waits_briefly = False
        #: The fetch session, and the fetches that it contains. Of the thread.
        self._session_id = NO_SESSION
        self._epoch = INITIAL_EPOCH
        self._sent: dict[_Place, _SentFetch] = {}
        #: Whether the last response contained no partition.
        self._was_quiet = False
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
            waits_briefly = self._waits_briefly
            self._changed.notify_all()
        # The present request may wait for records of other partitions. An interrupt also
        # ends the session, so it would be costly for each of many new partitions.
        if not waits_briefly:
            self._connection.interrupt()

    def drop(self, key: Key) -> None:
        """Stop to follow a partition. Returns when its log is no longer used."""
        with self._changed:
            partition = self._partitions.pop(key, None)
            if partition is not None:
                self._due[partition] = None  # the session forgets it
        if partition is not None:
            with partition.mutex:
                # The thread holds the mutex while it uses the log.
                partition.is_dropped = True

    def read_state(self, key: Key, state: LeaderAndIsr) -> None:
        """Take a newer state with the same leader and epoch."""
        with self._changed:
            partition = self._partitions.get(key)
        if partition is not None:
            with partition.mutex:
                partition.book = following.read_state(partition.book, state)

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        # It ends the request that waits for records.
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
                grown_ms = self._fs.monotonic_ms() - self._added_ms
                self._waits_briefly = grown_ms < _GROWS_FOR_MS
            try:
                self._round(due)
            except Exception:
                _log.exception("an internal error in the fetcher of %d", self.leader)
                self._begin_again()
                with self._changed:
                    self._due = dict.fromkeys(self._partitions.values())
                self._pause()
        self._connection.close()

    def _round(self, due: list[FollowedPartition]) -> None:
        """Send one request, and handle its response."""
        listed: list[_SentFetch] = []
        forgotten: list[_Place] = []
        for partition in due:
            try:
                fetch = self._next_fetch(partition)
            except LogcoreError as error:
                self._fail(partition, error)
                fetch = None
            before = self._sent.get(partition.place)
            if fetch is None:
                # The leader would answer its former fetch again and again.
                if before is not None and before.partition is partition:
                    del self._sent[partition.place]
                    forgotten.append(partition.place)
                if not partition.is_dropped and partition.book.stopped is None:
                    self._retry_next_round(partition)
                continue
            sent = self._sent[partition.place] = _SentFetch(
                partition, fetch, partition.book.log_start
            )
            if before is None and partition.place not in forgotten:
                listed.append(sent)
            elif before is None or before.partition is not partition:
                # The leader must send all facts again: this role has none of them.
                self._epoch = INITIAL_EPOCH
            elif before.fetch != fetch or before.log_start != sent.log_start:
                listed.append(sent)
        if not self._sent:
            self._epoch = INITIAL_EPOCH
            self._pause()
            return
        is_full = self._epoch == INITIAL_EPOCH
        # A partition that backs off is due before a long wait would end.
        is_quiet = self._was_quiet and not (is_full or listed or self._due)
        if is_full:
            # A new session begins with all partitions.
            listed, forgotten = list(self._sent.values()), []
        try:
            response = self._connection.request(
                wire.FETCH,
                self._request(listed, forgotten, is_quiet=is_quiet),
                most_version=_FETCH_VERSION,
            )
        except (RemoteUnavailableError, ShippingError) as error:
            _log.debug("fetches from broker %d: %s", self.leader, error)
            self._begin_again()
            self._pause()
            return
        if response.error_code:
            # Such as an unknown session, after a restart of the leader.
            _log.debug("fetches from broker %d: %d", self.leader, response.error_code)
            is_broken = is_full
            self._begin_again(keeps_connection=True)
            # The leader refuses new sessions too, so an immediate retry would loop.
            if is_broken:
                self._pause()
            return
        answered = self._take_all(response)
        self._was_quiet = not answered
        if response.session_id == NO_SESSION:
            # Without a session, a partition that the response lacks is given up.
            self._give_up(answered, _BACK_OFF_MS)
            self._session_id, self._epoch = NO_SESSION, INITIAL_EPOCH
        else:
            self._session_id = response.session_id
            self._epoch = next_epoch(self._epoch)

    def _take_all(self, response: Any) -> set[_Place]:
        """Handle the partitions of a response, and return which they are."""
        answered: set[_Place] = set()
        for topic in response.responses:
            for part in topic.partitions:
                place = bytes(topic.topic_id), part.partition_index
                sent = self._sent.get(place)
                # A partition that was not requested, or is listed twice, is ignored.
                if sent is not None and place not in answered:
                    answered.add(place)
                    self._take(sent.partition, sent.fetch, part)
                    self._retry_next_round(sent.partition)
        return answered

    def _begin_again(self, *, keeps_connection: bool = False) -> None:
        """Give up all fetches. The next request closes the session and begins another."""
        if not keeps_connection:
            self._connection.close()
        self._give_up(set())
        self._was_quiet = False
        self._epoch = INITIAL_EPOCH

    def _give_up(self, answered: set[_Place], delay_ms: int = 0) -> None:
        """Give up the fetches that were not answered, and send them again later."""
        sent, self._sent = self._sent, {}
        for place, each in sent.items():
            if place not in answered:
                partition = each.partition
                with partition.mutex:
                    partition.book = following.gave_up(partition.book)
                    partition.retry_at_ms = self._fs.monotonic_ms() + delay_ms
                self._retry_next_round(partition)

    def _retry_next_round(self, followed_partition: FollowedPartition) -> None:
        """Look for the next fetch of a partition in the next round."""
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
            step = following.next_step(followed_partition.book)
            if isinstance(step, SyncLog):
                followed_partition.log.flush()
                followed_partition.book = following.synced(
                    followed_partition.book, followed_partition.log.durable_end_offset
                )
                self._show(followed_partition)
                step = following.next_step(followed_partition.book)
            if not isinstance(step, SendFetch):
                return None
            followed_partition.book = following.sent(
                followed_partition.book, step.fetch
            )
            return step.fetch

    def _request(
        self, listed: list[_SentFetch], forgotten: list[_Place], *, is_quiet: bool
    ) -> Any:
        wait_ms = self._settings.wait_ms
        if self._waits_briefly:
            wait_ms = min(wait_ms, _BRIEF_WAIT_MS)
        elif is_quiet:
            wait_ms = max(wait_ms, _QUIET_WAIT_MS)
        kind = wire.FETCH.Request.Topic
        topics: dict[bytes, Any] = {}
        for each in listed:
            topic_id, number = each.partition.place
            topic = topics.get(topic_id)
            if topic is None:
                topic = topics[topic_id] = kind(topic_id=topic_id, partitions=[])
            topic.partitions.append(
                kind.Partition(
                    partition=number,
                    current_leader_epoch=each.fetch.leader_epoch,
                    fetch_offset=each.fetch.offset,
                    last_fetched_epoch=each.fetch.last_epoch,
                    log_start_offset=each.log_start,
                    partition_max_bytes=self._settings.partition_bytes,
                )
            )
        left = wire.FETCH.Request.ForgottenTopic
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
                left(topic_id=topic_id, partitions=[number])
                for topic_id, number in forgotten
            ],
        )

    # -- answers -----------------------------------------------------------------------

    def _take(
        self, followed_partition: FollowedPartition, fetch: FollowerFetch, part: Any
    ) -> None:
        """Handle the part of a response for one partition."""
        with followed_partition.mutex:
            if followed_partition.is_dropped:
                return
            try:
                response = _answer_of(part)
                own_end = (-1, -1)
                if response.diverging is not None:
                    own_end = followed_partition.log.end_of_epoch(response.diverging[0])
                followed_partition.book, effects = following.answered(
                    followed_partition.book, fetch, response, own_end
                )
                for effect in effects:
                    self._execute(followed_partition, effect)
                self._show(followed_partition)
            except LogcoreError as error:
                followed_partition.book = following.gave_up(followed_partition.book)
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
                    "%s-%d stops to follow broker %d: %s",
                    *followed_partition.key,
                    self.leader,
                    reason,
                )
                return
            case BackOff():
                followed_partition.retry_at_ms = self._fs.monotonic_ms() + _BACK_OFF_MS
                return
        followed_partition.book = following.changed_log(
            followed_partition.book,
            log.log_start_offset,
            log.log_end_offset,
            last_epoch(log),
        )

    def _show(self, followed_partition: FollowedPartition) -> None:
        """Let readers see the records below the high watermark."""
        offset = min(
            followed_partition.book.high_watermark,
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


def _answer_of(part: Any) -> FetchAnswer:
    error = None
    if part.error_code:
        # Other codes, such as UNKNOWN_TOPIC_ID, also end with newer metadata.
        error = _CODES.get(part.error_code, ReplicationError.NOT_LEADER_OR_FOLLOWER)
    diverging = None
    if part.diverging_epoch is not None and part.diverging_epoch.end_offset >= 0:
        diverging = part.diverging_epoch.epoch, part.diverging_epoch.end_offset
    records: tuple[memoryview, ...] = ()
    if part.records:
        records = (memoryview(part.records),)
    return FetchAnswer(
        error, diverging, records, part.high_watermark, max(0, part.log_start_offset)
    )
