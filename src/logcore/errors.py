"""Every error the library raises, in one tree.

    LogcoreError
    ├── CorruptBatchError         bytes of one batch are not what their writer wrote (CRC, length, magic)
    ├── InvalidRecordError        the bytes are intact but break the format's rules, or a record given by the caller
    │   └── InvalidTimestampError     a timestamp outside what the topic's config allows
    ├── OutOfOrderSequenceError   a batch of an idempotent producer is missing before this one
    ├── InvalidProducerEpochError a producer that another one with its id has replaced
    ├── InvalidTransactionStateError  what a producer sends does not fit its open transaction, or the lack of one
    ├── CoordinatorFencedError    a transaction marker of a coordinator that another one has replaced
    ├── RecordTooLargeError       a batch, or what it inflates to, is above its limit
    │   └── SegmentTooSmallError      a batch that the limits allow does not fit a segment
    ├── UnsupportedCodecError     an unknown compression type, or one whose package is not installed
    ├── CorruptLogError           files of a partition contradict each other or are damaged in the middle
    ├── OffsetConflictError       an append that expected the log to end elsewhere
    ├── OffsetOutOfRangeError     the offset asked for is below the log start or above the log end
    │   └── LogTruncatedError         the record before a committed offset was cut off, and another may stand there
    ├── LogFailedError            the log was poisoned by a failed write or sync; only reopening helps
    │   └── DurabilityUnknownError    this very sync failed: what was written may or may not be on disk
    ├── StorageReadError          the operating system failed a read; nothing was concluded from it
    ├── StorageWriteError         the operating system failed a write; the log is poisoned
    ├── DiskFullError             no space; the write was cut back and may be retried          (retriable)
    ├── ResourceError             no file descriptors or memory left; nothing was half done    (retriable)
    ├── CompactionAbandonedError  the log changed under a compaction, which left it as it was  (retriable)
    ├── LogLockedError            another writer holds the log directory                       (retriable)
    ├── LogClosedError            the log was closed
    ├── ForkedWriterError         a child process used a log that its parent opened
    ├── WrongLoopError            an object of logcore.aio was used outside its event loop
    ├── ReadOnlyLogError          a write to a log that was opened read-only
    ├── LogNotFoundError          there is no log at that path
    ├── TopicNotFoundError        there is no such topic, or no such partition of it
    ├── TopicExistsError          there is such a topic already
    ├── InvalidNameError          a topic or directory name that Kafka would refuse
    ├── InvalidConfigError        an unknown config, or a value outside its range
    │   ├── InconsistentGroupError    a consumer and its group have no assignor in common
    │   └── InvalidSchemaError        a schema of values that cannot be parsed, or whose references are missing
    ├── ConsumerStateError        a call that a consumer cannot carry out as it stands
    │   └── ConsumerBusyError         another thread uses it
    ├── CommitFailedError         offsets were not committed: the consumer has lost its partitions, or the disk failed
    ├── RebalanceInProgressError  offsets were not committed while the group divides its partitions    (retriable)
    ├── FencedInstanceError       another consumer took the place of a static member
    ├── NoOffsetError             nothing says where a consumer begins
    ├── WakeupError               wakeup() was called, and ended a poll()
    ├── SerializationError        a producer's serializer failed
    ├── BufferFullError           the memory of a producer is full                             (retriable)
    ├── DeliveryTimeoutError      a producer could not write a record in time
    ├── ProducerStateError        a call that a producer cannot carry out as it stands
    │   └── ProducerClosedError       it is closed, or was before a record was written
    ├── RegistryError             a registry cannot do what it was asked
    │   ├── InvalidNodeError          a path or a value that no registry holds
    │   ├── NodeExistsError           a node to be created exists
    │   ├── NodeNotFoundError         no such node, or its session is over
    │   ├── NodeNotEmptyError         a node to be deleted has children
    │   ├── BadVersionError           the node has another version than the caller expected
    │   ├── SessionExpiredError       this session was declared over; what it owned belongs to others
    │   ├── RegistryClosedError       the registry was closed
    │   ├── RegistryLockedError       another process kept the lock of a domain too long   (retriable)
    │   ├── RegistryUnavailableError  the server does not answer; the outcome is unknown   (retriable)
    │   ├── CorruptRegistryError      a file of the registry is damaged, or not the registry's
    │   └── UnsupportedRegistryError  a file of a newer version
    ├── ShippingError             records cannot be shipped to a cluster or a table, or mirrored from a cluster
    │   ├── RemoteUnavailableError    the cluster does not answer; the outcome is unknown          (retriable)
    │   ├── RemoteTopicError          a topic there is missing, too small, or may not be used
    │   ├── RecordRefusedError        a record that the other side does not take
    │   ├── ShippingGapError          records were deleted before they were shipped, mirrored or exported
    │   ├── DivergedError             the two sides do not hold the same any more
    │   ├── LakeTableError            a table cannot be written, or is not the export of this topic
    │   └── CommitConflictError       another writer committed to a table first                    (retriable)
    └── MissingDependencyError    an optional package is needed; the message names the extra

Rules:
- Bytes from outside never cause anything but a member of this tree.
- `retriable` says whether the same call may succeed later without any other action.
- An OSError is always chained as the cause.

This module knows no other module of logcore.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any


class LogcoreError(Exception):
    """Root of all errors.

    The keywords say where the error is and what was met there; each is kept as an
    attribute and becomes part of the message.

    path: file or directory; position: byte in that file (or in the buffer given);
    offset: place in the log.
    """

    retriable = False

    def __init__(
        self,
        reason: str,
        *,
        path: str | os.PathLike[str] | None = None,
        position: int | None = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        self.reason = reason
        self.path: str | None = None
        if path is not None:
            self.path = os.fspath(path)
        self.position = position
        self.offset = offset
        self.expected = expected
        self.found = found
        super().__init__(self._text())

    def _text(self) -> str:
        where = []
        if self.path:
            where.append(str(self.path))
        if self.position is not None:
            where.append(f"position {self.position}")
        if self.offset is not None:
            where.append(f"offset {self.offset}")
        if where:
            text = f"{', '.join(where)}: {self.reason}"
        else:
            text = self.reason
        met = [
            f"{name} {value}"
            for name, value in (("expected", self.expected), ("found", self.found))
            if value is not None
        ]
        if met:
            return f"{text} ({', '.join(met)})"
        return text

    def __str__(self) -> str:
        return self._text()


class CorruptBatchError(LogcoreError):
    """The bytes of a batch are not what its writer wrote. Kafka: CORRUPT_MESSAGE."""


class InvalidRecordError(LogcoreError):
    """Intact bytes that break the format's rules, or a record that cannot be stored.
    Kafka: INVALID_RECORD.

    record_errors: where a batch was refused for some of its records, which these are,
    counted from 0, and why.
    """

    record_errors: tuple[tuple[int, str], ...] = ()


class InvalidTimestampError(InvalidRecordError):
    """A timestamp outside the topic's limits. Kafka: INVALID_TIMESTAMP."""


class OutOfOrderSequenceError(LogcoreError):
    """A gap in the sequence of an idempotent producer. Kafka:
    OUT_OF_ORDER_SEQUENCE_NUMBER.
    """


class InvalidProducerEpochError(LogcoreError):
    """From a producer that was replaced by one with a newer epoch. Kafka:
    INVALID_PRODUCER_EPOCH.
    """


class InvalidTransactionStateError(LogcoreError):
    """A batch outside a producer's open transaction, or the end of none. Kafka:
    INVALID_TXN_STATE.
    """


class CoordinatorFencedError(LogcoreError):
    """A marker with an older coordinator epoch than one stored before. Kafka:
    TRANSACTION_COORDINATOR_FENCED.
    """


class RecordTooLargeError(LogcoreError):
    """Above max.message.bytes, segment.bytes, or the cap on inflated bytes. Kafka:
    MESSAGE_TOO_LARGE.
    """


class SegmentTooSmallError(RecordTooLargeError):
    """A batch above segment.bytes. Kafka: RECORD_LIST_TOO_LARGE."""


class UnsupportedCodecError(LogcoreError):
    """Compression types 5-7, or a codec whose package is missing. Kafka:
    UNSUPPORTED_COMPRESSION_TYPE.
    """


class CorruptLogError(LogcoreError):
    """Files of one partition are damaged, or contradict each other, where no crash
    could have done it.
    """


class OffsetConflictError(LogcoreError):
    """An append with expected_offset or `expected`: another append came first, and
    nothing was appended.

    expected: the offset that the caller gave; found: the log end offset, or the offset of
    the last record of the key; both int.
    """


class OffsetOutOfRangeError(LogcoreError):
    """Asked for an offset outside [log start, log end]. Kafka: OFFSET_OUT_OF_RANGE."""


class LogTruncatedError(OffsetOutOfRangeError):
    """A consumer has committed an offset of a leader epoch that ends before it: the
    records in between were cut off.
    Kafka: LogTruncationException.
    """


class LogFailedError(LogcoreError):
    """The log refuses writes since a write or sync failed. Reads go on; reopening runs
    recovery.
    """


class DurabilityUnknownError(LogFailedError):
    """The sync this append waited for failed: the record is written but perhaps not on
    disk.
    """


class StorageReadError(LogcoreError):
    """A read failed in the operating system. Never treated as end of log, and never as
    corruption.
    """


class StorageWriteError(LogcoreError):
    """A write failed in the operating system for another reason than space."""


class DiskFullError(LogcoreError):
    """No space left; the partial write was cut back. Retry once there is room."""

    retriable = True


class ResourceError(LogcoreError):
    """Out of file descriptors or memory. A log open for writing holds two files;
    `ulimit -n` tells the limit.
    """

    retriable = True


class CompactionAbandonedError(LogcoreError):
    """The log was truncated, or lost segments to retention, while it was compacted;
    nothing was replaced since.
    """

    retriable = True


class LogLockedError(LogcoreError):
    """Another writer, Python or a Kafka broker, holds the lock of the log directory.

    pid: process id of the holder if known, else None. host: its host name if known,
    else None.
    """

    retriable = True

    def __init__(
        self,
        reason: str,
        *,
        path: str | os.PathLike[str] | None = None,
        pid: int | None = None,
        host: str | None = None,
    ) -> None:
        self.pid = pid
        self.host = host
        super().__init__(reason, path=path)


class LogClosedError(LogcoreError):
    """The log was closed."""


class ForkedWriterError(LogcoreError):
    """A process forked from the one that opened the log tried to use it; open it again
    in the child.
    """


class WrongLoopError(LogcoreError):
    """An object of logcore.aio was used in another event loop than the one it was made
    in, or in none.
    """


class ReadOnlyLogError(LogcoreError):
    """A write to a log opened with read_only=True."""


class NotLeaderError(LogcoreError):
    """An append to a replica of a partition that another broker leads, or no broker.
    Kafka: NOT_LEADER_OR_FOLLOWER.
    """


class NotEnoughReplicasError(LogcoreError):
    """An append that requires more in-sync replicas than there are. It was not stored.
    Kafka: NOT_ENOUGH_REPLICAS.
    """


class CommitTimeoutError(LogcoreError):
    """A cluster did not confirm a change in time, such as an append or a new topic. The
    change may still take effect. Kafka: REQUEST_TIMED_OUT.
    """


class LogNotFoundError(LogcoreError):
    """No partition directory at that path; create=True makes one."""


class TopicNotFoundError(LogcoreError):
    """No such topic in the log directory. Kafka: UNKNOWN_TOPIC_OR_PARTITION.

    name, known: the topic and those that exist; the text says which of these is
    nearest. That is found when the text is read: it takes a millisecond for 100 topics,
    and a broker is asked for many names and reads no text.
    """

    def __init__(
        self, reason: str, *, name: str = "", known: Iterable[str] = (), **where: Any
    ) -> None:
        self._name = name
        self._known: Iterable[str] = ()
        super().__init__(reason, **where)
        self._known = known

    def _find_nearest(self) -> None:
        import difflib  # late: only who makes a mistake needs it

        known = list(self._known)  # others may make topics meanwhile
        self._known = ()
        near = difflib.get_close_matches(self._name, known, 1)
        if near:
            self.reason += f"; did you mean {near[0]!r}?"

    def __str__(self) -> str:
        self._find_nearest()
        return super().__str__()

    def __reduce__(self) -> tuple[Any, ...]:
        self._find_nearest()  # before pickling, so that the list of topics stays here
        return super().__reduce__()  # type: ignore[return-value]


class TopicExistsError(LogcoreError):
    """A topic to be made exists already. Kafka: TOPIC_ALREADY_EXISTS."""


class InvalidNameError(LogcoreError):
    """A name that Kafka would refuse, or that would leave the directory. Kafka:
    INVALID_TOPIC_EXCEPTION.
    """


class InvalidConfigError(LogcoreError):
    """An unknown config name or a value out of range. Kafka: INVALID_CONFIG."""


class InconsistentGroupError(InvalidConfigError):
    """A consumer has no assignor that all members of its group know. Kafka:
    INCONSISTENT_GROUP_PROTOCOL.
    """


class InvalidSchemaError(InvalidConfigError):
    """A schema of values cannot be parsed, or a schema to which it refers is missing."""


class ConsumerStateError(LogcoreError):
    """A call that a consumer cannot carry out as it stands: it is closed, or has no
    group.
    """


class ConsumerBusyError(ConsumerStateError):
    """A consumer is used by one thread at a time, and another uses it. Java:
    ConcurrentModificationException.
    """


class WakeupError(LogcoreError):
    """wakeup() was called: the poll() that waited, or the next one, ends without
    records, once.
    """


class CommitFailedError(LogcoreError):
    """Offsets were not committed: the consumer is no member of this generation any
    more, or the disk failed.

    Records after the last commit are processed again by the new owners of the
    partitions.
    """


class RebalanceInProgressError(LogcoreError):
    """Offsets were not committed while the group divides its partitions: poll, then
    commit. Kafka: REBALANCE_IN_PROGRESS.
    """

    retriable = True


class FencedInstanceError(LogcoreError):
    """Another consumer with this group_instance_id took this one's place. Kafka:
    FENCED_INSTANCE_ID.
    """


class NoOffsetError(LogcoreError):
    """There is no committed offset, and auto_offset_reset="none" names no other
    beginning.
    """


class SerializationError(LogcoreError):
    """A key_serializer or value_serializer raised; its error is the cause. Nothing was
    sent.
    """


class BufferFullError(LogcoreError):
    """The memory of a producer was full for max_block_ms: records are sent faster than
    the disk takes them.
    """

    retriable = True


class DeliveryTimeoutError(LogcoreError):
    """A record was not written within delivery_timeout_ms, or flush() did not end in
    its time. Kafka: TIMED_OUT.
    """


class ProducerStateError(LogcoreError):
    """A call that a producer cannot carry out as it stands, such as waiting for a
    delivery in a delivery callback.
    """


class ProducerClosedError(ProducerStateError):
    """The producer is closed, or was closed before the record was written."""


class ProducerFencedError(LogcoreError):
    """Another producer has taken the transactional id over. This one can only be
    closed. Kafka: PRODUCER_FENCED.
    """


class TransactionAbortedError(LogcoreError):
    """The transaction of a record was aborted, or can only be aborted: call
    abort_transaction() and begin again.

    Kafka: TRANSACTION_ABORTABLE.
    """


class RegistryError(LogcoreError):
    """Root of the errors of registries (logcore.registry). path: of the node, where it
    is about one.
    """


class InvalidNodeError(RegistryError):
    """A path or a value that no registry holds: raised before any effect."""


class NodeTooLargeError(InvalidNodeError):
    """A value is larger than a registry holds."""


class NodeExistsError(RegistryError):
    """A node to be created exists, and its session lives."""


class NodeNotFoundError(RegistryError):
    """There is no such node, or it was ephemeral and its session is over."""


class NodeNotEmptyError(RegistryError):
    """A node to be deleted has children."""


class BadVersionError(RegistryError):
    """The node has another version than the caller expected: another session changed it
    first. Nothing was written.
    """


class SessionExpiredError(RegistryError):
    """This registry's session was declared over. Its ephemeral nodes belong to others;
    open the registry again.
    """


class RegistryClosedError(RegistryError):
    """The registry was closed."""


class RegistryLockedError(RegistryError):
    """Another process kept the lock of a domain beyond the timeout; it may be stopped.
    Nothing was written.

    pids: of the processes that are in the middle of a change, as far as they tell.
    """

    retriable = True

    def __init__(
        self,
        reason: str,
        *,
        path: str | os.PathLike[str] | None = None,
        pids: tuple[int, ...] = (),
    ) -> None:
        self.pids = pids
        super().__init__(reason, path=path)


class RegistryUnavailableError(RegistryError):
    """The server of the registry does not answer. A change that was asked for may have
    happened or not.
    """

    retriable = True


class CorruptRegistryError(RegistryError):
    """A file of the registry is damaged where no crash could have done it, or something
    else wrote it. It is kept.
    """


class UnsupportedRegistryError(RegistryError):
    """A file of the registry was written by a newer version of logcore."""


class ShippingError(LogcoreError):
    """Root of the errors of forwarding and mirroring (logcore.shipping), and of exports
    to tables (logcore.lake).
    """


class RemoteUnavailableError(ShippingError):
    """The remote cluster does not answer. What was asked of it may have happened or
    not.
    """

    retriable = True


class RemoteTopicError(ShippingError):
    """A topic of the remote cluster is missing, has too few partitions, or may not be
    used.
    """


class RecordRefusedError(ShippingError):
    """A record that the other side does not take, such as one that is too large. Its
    partition stands still.
    """


class ShippingGapError(ShippingError):
    """Records were deleted before they were shipped, mirrored or exported."""


class DivergedError(ShippingError):
    """The two sides do not hold the same any more: one was cut, lost records, or is
    another topic of that name.
    """


class LakeTableError(ShippingError):
    """An Iceberg or Delta table cannot be read or written, or is not the export of this
    topic with this layout.
    """


class CommitConflictError(ShippingError):
    """Another writer committed to the table first. This commit stored no rows."""

    retriable = True


class QueryError(LogcoreError):
    """An SQL query is wrong, or names no topic of the directory."""


class MissingDependencyError(LogcoreError):
    """An optional package is needed for this call."""
