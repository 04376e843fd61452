"""Every error the library raises, in one tree.

    LogcoreError
    ├── CorruptBatchError         the bytes of a batch were changed after they were written (CRC, length, magic)
    ├── InvalidRecordError        intact bytes that break a rule of the format, or an invalid record of the caller
    │   └── InvalidTimestampError     a timestamp outside the limits of the topic
    ├── OutOfOrderSequenceError   an earlier batch of an idempotent producer is missing
    ├── InvalidProducerEpochError a producer that was replaced by another one with its id
    ├── InvalidTransactionStateError  a batch or a marker without an open transaction
    ├── CoordinatorFencedError    a transaction marker of a coordinator that was replaced
    ├── RecordTooLargeError       a batch is too large, compressed or decompressed
    │   └── SegmentTooSmallError      a batch is larger than a segment
    ├── UnsupportedCodecError     an unknown compression type, or one whose package is not installed
    ├── CorruptLogError           files of a partition contradict each other or are damaged in the middle
    ├── OffsetConflictError       another append came before one with an expected offset
    ├── OffsetOutOfRangeError     the requested offset is below the log start or above the log end
    │   └── LogTruncatedError         the records before a committed offset were truncated
    ├── LogFailedError            an earlier write or sync failed; the log must be opened again
    │   └── DurabilityUnknownError    the sync of this append failed; its records may not be on disk
    ├── StorageReadError          a read failed in the operating system
    ├── StorageWriteError         a write failed in the operating system; the log must be opened again
    ├── DiskFullError             no space; the unfinished write was removed                      (retriable)
    ├── ResourceError             no file descriptors or memory left; nothing was changed          (retriable)
    ├── CompactionAbandonedError  the log was truncated while it was compacted                     (retriable)
    ├── LogLockedError            another writer has the lock of the log directory                 (retriable)
    ├── LogClosedError            the log was closed
    ├── ForkedWriterError         a child process used a log that its parent opened
    ├── WrongLoopError            an object of logcore.aio was used outside its event loop
    ├── ReadOnlyLogError          a write to a log that was opened read-only
    ├── LogNotFoundError          there is no log at the path
    ├── TopicNotFoundError        the topic or its partition does not exist
    ├── TopicExistsError          the topic exists already
    ├── InvalidNameError          a name of a topic or directory that Kafka refuses
    ├── InvalidConfigError        an unknown config, or a value outside its range
    │   ├── InconsistentGroupError    a consumer and its group have no assignor in common
    │   └── InvalidSchemaError        a schema of values that cannot be parsed, or whose references are missing
    ├── ConsumerStateError        a call that the state of the consumer does not allow
    │   └── ConsumerBusyError         another thread uses the consumer
    ├── CommitFailedError         offsets were not committed: the consumer has lost its partitions, or the disk failed
    ├── RebalanceInProgressError  offsets were not committed because the group rebalances               (retriable)
    ├── FencedInstanceError       another consumer has the same group_instance_id
    ├── NoOffsetError             no offset is committed, and auto_offset_reset is "none"
    ├── WakeupError               wakeup() ended a poll()
    ├── SerializationError        a producer's serializer failed
    ├── BufferFullError           the memory of a producer is full                             (retriable)
    ├── DeliveryTimeoutError      a record was not written in time
    ├── ProducerStateError        a call that the state of the producer does not allow
    │   └── ProducerClosedError       the producer is closed, or was closed before it wrote a record
    ├── RegistryError             root of the errors of registries
    │   ├── InvalidNodeError          a path or a value that no registry accepts
    │   ├── NodeExistsError           a node that should be created exists
    │   ├── NodeNotFoundError         the node does not exist, or its session has ended
    │   ├── NodeNotEmptyError         a node that should be deleted has children
    │   ├── BadVersionError           the node has another version than the caller expected
    │   ├── SessionExpiredError       the session was declared expired; its ephemeral nodes were deleted
    │   ├── RegistryClosedError       the registry was closed
    │   ├── RegistryLockedError       another process kept a lock of the registry too long (retriable)
    │   ├── RegistryUnavailableError  the server does not answer; the outcome is unknown   (retriable)
    │   ├── CorruptRegistryError      a file of the registry is damaged, or of another program
    │   └── UnsupportedRegistryError  a file of a newer version
    ├── ShippingError             records cannot be shipped to a cluster or a table, or mirrored from a cluster
    │   ├── RemoteUnavailableError    the cluster does not answer; the outcome is unknown          (retriable)
    │   ├── RemoteTopicError          a topic of the cluster is missing, has too few partitions, or is not allowed
    │   ├── RecordRefusedError        the cluster or the table refuses a record
    │   ├── ShippingGapError          records were deleted before they were shipped, mirrored or exported
    │   ├── DivergedError             the source and its copy have different records
    │   ├── LakeTableError            a table cannot be written, or is not the export of this topic
    │   └── CommitConflictError       another writer committed to a table first                    (retriable)
    └── MissingDependencyError    an optional package is needed; the message names the extra

Rules:
- Invalid bytes from outside cause only errors of this tree.
- `retriable` is True if the same call may succeed later without any other action.
- An OSError is always chained as the cause.

This module imports no other module of logcore.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any


class LogcoreError(Exception):
    """Root of all errors.

    The arguments are attributes of the error, and parts of its message: `path` is a file
    or directory, `position` a byte in that file or in the given buffer, and `offset` an
    offset of the log. `expected` and `found` are the expected and the actual value.
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
    """The bytes of a batch were changed after they were written. Kafka: CORRUPT_MESSAGE."""


class InvalidRecordError(LogcoreError):
    """Intact bytes that break the format's rules, or a record that cannot be stored.
    Kafka: INVALID_RECORD.

    `record_errors` contains the index in the batch and the reason for each refused
    record, if only some records are invalid. The first index is 0.
    """

    record_errors: tuple[tuple[int, str], ...] = ()


class InvalidTimestampError(InvalidRecordError):
    """A timestamp outside the topic's limits. Kafka: INVALID_TIMESTAMP."""


class OutOfOrderSequenceError(LogcoreError):
    """A gap in the sequence of an idempotent producer. Kafka:
    OUT_OF_ORDER_SEQUENCE_NUMBER.
    """


class InvalidProducerEpochError(LogcoreError):
    """A batch of a producer that was replaced by one with a newer epoch. Kafka:
    INVALID_PRODUCER_EPOCH.
    """


class InvalidTransactionStateError(LogcoreError):
    """A batch outside an open transaction, or the end of no transaction. Kafka:
    INVALID_TXN_STATE.
    """


class CoordinatorFencedError(LogcoreError):
    """A marker with an older coordinator epoch than a stored one. Kafka:
    TRANSACTION_COORDINATOR_FENCED.
    """


class RecordTooLargeError(LogcoreError):
    """A batch above max.message.bytes, or above the limit for decompressed bytes. Kafka:
    MESSAGE_TOO_LARGE.
    """


class SegmentTooSmallError(RecordTooLargeError):
    """A batch above segment.bytes. Kafka: RECORD_LIST_TOO_LARGE."""


class UnsupportedCodecError(LogcoreError):
    """Compression types 5-7, or a codec whose package is missing. Kafka:
    UNSUPPORTED_COMPRESSION_TYPE.
    """


class CorruptLogError(LogcoreError):
    """Files of a partition are damaged or contradict each other, and a crash cannot be
    the cause.
    """


class OffsetConflictError(LogcoreError):
    """Another append came before an append with `expected_offset` or `expected`. The
    log was not changed.

    The attribute `expected` is the offset that the caller gave. `found` is the log end
    offset, or the offset of the last record of the key. Both are int.
    """


class OffsetOutOfRangeError(LogcoreError):
    """A requested offset is outside [log start, log end]. Kafka: OFFSET_OUT_OF_RANGE."""


class LogTruncatedError(OffsetOutOfRangeError):
    """A consumer has committed an offset above the end of its leader epoch, because the
    records in between were truncated. Kafka: LogTruncationException.
    """


class LogFailedError(LogcoreError):
    """A write or sync has failed, so the log refuses writes until it is opened again.
    Reads continue. Opening runs recovery.
    """


class DurabilityUnknownError(LogFailedError):
    """The sync of an append failed. Its records are written, but may not be on disk."""


class StorageReadError(LogcoreError):
    """A read failed in the operating system. It is neither the end of the log nor
    damage.
    """


class StorageWriteError(LogcoreError):
    """A write failed in the operating system for a reason other than space."""


class DiskFullError(LogcoreError):
    """No space is left. The unfinished write was removed; try again once there is space."""

    retriable = True


class ResourceError(LogcoreError):
    """No file descriptors or memory are left.

    A log that is open for writing has two open files. `ulimit -n` prints the limit.
    """

    retriable = True


class CompactionAbandonedError(LogcoreError):
    """The log was truncated, or retention deleted segments, while it was compacted.

    No segment was replaced after that.
    """

    retriable = True


class LogLockedError(LogcoreError):
    """Another writer, Python or a Kafka broker, holds the lock of the log directory.

    `pid` is the process id of the holder, and `host` its host name; None if unknown.
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
    """A forked process used a log that its parent opened. Open it again in the child."""


class WrongLoopError(LogcoreError):
    """An object of logcore.aio was used outside the event loop that created it."""


class ReadOnlyLogError(LogcoreError):
    """A write to a log opened with read_only=True."""


class NotLeaderError(LogcoreError):
    """An append to a replica that is not the leader of its partition. Kafka:
    NOT_LEADER_OR_FOLLOWER.
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


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is."""
    import difflib  # imported late, because only a wrong name needs it

    # A copy, because other threads may create topics while difflib compares them.
    return next(iter(difflib.get_close_matches(name, list(known), 1)), None)


class TopicNotFoundError(LogcoreError):
    """No such topic in the log directory. Kafka: UNKNOWN_TOPIC_OR_PARTITION.

    `name` is the topic, and `known` contains the existing topics; the text suggests the
    most similar one. The suggestion is computed when the text is read, because it takes
    a millisecond for 100 topics and a broker does not read the text.
    """

    def __init__(
        self, reason: str, *, name: str = "", known: Iterable[str] = (), **where: Any
    ) -> None:
        self._name = name
        self._known: Iterable[str] = ()
        super().__init__(reason, **where)
        self._known = known

    def _find_nearest(self) -> None:
        known = self._known
        self._known = ()
        nearest = nearest_name(self._name, known)
        if nearest is not None:
            self.reason += f"; did you mean {nearest!r}?"

    def __str__(self) -> str:
        self._find_nearest()
        return super().__str__()

    def __reduce__(self) -> tuple[Any, ...]:
        self._find_nearest()  # before pickling, so that the list of topics is not pickled
        return super().__reduce__()  # type: ignore[return-value]


class TopicExistsError(LogcoreError):
    """A topic that should be created exists already. Kafka: TOPIC_ALREADY_EXISTS."""


class InvalidNameError(LogcoreError):
    """A name that Kafka refuses, or a path outside the directory. Kafka:
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
    """A call that the state of the consumer does not allow: it is closed, or has no
    group.
    """


class ConsumerBusyError(ConsumerStateError):
    """Another thread uses the consumer, which only one thread at a time may use. Java:
    ConcurrentModificationException.
    """


class WakeupError(LogcoreError):
    """wakeup() was called. It ends the waiting poll(), or else the next one."""


class CommitFailedError(LogcoreError):
    """Offsets were not committed, because the consumer is no longer a member of this
    generation, or because the disk failed.

    Records after the last commit are processed again by the new owners of the
    partitions.
    """


class RebalanceInProgressError(LogcoreError):
    """Offsets were not committed because the group rebalances: call poll(), then
    commit again. Kafka: REBALANCE_IN_PROGRESS.
    """

    retriable = True


class FencedInstanceError(LogcoreError):
    """Another consumer with this group_instance_id has joined. Kafka:
    FENCED_INSTANCE_ID.
    """


class NoOffsetError(LogcoreError):
    """No offset is committed, and auto_offset_reset="none" does not name another one."""


class SerializationError(LogcoreError):
    """A key_serializer or value_serializer raised its cause. The record was not sent."""


class BufferFullError(LogcoreError):
    """The memory of a producer was full for max_block_ms, because records are sent
    faster than the disk stores them.
    """

    retriable = True


class DeliveryTimeoutError(LogcoreError):
    """A record was not written within delivery_timeout_ms, or flush() did not end
    within its timeout. Kafka: TIMED_OUT.
    """


class ProducerStateError(LogcoreError):
    """A call that the state of the producer does not allow, such as waiting for a
    delivery in a delivery callback.
    """


class ProducerClosedError(ProducerStateError):
    """The producer is closed, or was closed before the record was written."""


class ProducerFencedError(LogcoreError):
    """Another producer has initialized the transactional id. This producer can only be
    closed. Kafka: PRODUCER_FENCED.
    """


class TransactionAbortedError(LogcoreError):
    """The transaction of a record was aborted, or can only be aborted: call
    abort_transaction() and begin again.

    Kafka: TRANSACTION_ABORTABLE.
    """


class RegistryError(LogcoreError):
    """Root of the errors of registries (logcore.registry). `path` is the path of the
    node, or None.
    """


class InvalidNodeError(RegistryError):
    """A path or a value that no registry accepts. The registry was not changed."""


class NodeTooLargeError(InvalidNodeError):
    """A value is larger than a registry allows."""


class NodeExistsError(RegistryError):
    """A node that should be created exists, and its session lives."""


class NodeNotFoundError(RegistryError):
    """The node does not exist, or it was ephemeral and its session has ended."""


class NodeNotEmptyError(RegistryError):
    """A node that should be deleted has children."""


class BadVersionError(RegistryError):
    """The node has another version than the caller expected, because another session
    changed it first. The node was not written.
    """


class SessionExpiredError(RegistryError):
    """The session was declared expired, and its ephemeral nodes were deleted. Open the
    registry again.
    """


class RegistryClosedError(RegistryError):
    """The registry was closed."""


class RegistryLockedError(RegistryError):
    """Another process kept a lock of the registry for longer than the timeout. That
    process may be stopped. The registry was not written.

    `pids` contains the known ids of the processes that are changing the registry.
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
    """The server of the registry does not answer. A requested change may have happened
    or not.
    """

    retriable = True


class CorruptRegistryError(RegistryError):
    """A file of the registry is damaged, and a crash cannot be the cause, or another
    program wrote it. The file is kept.
    """


class UnsupportedRegistryError(RegistryError):
    """A file of the registry was written by a newer version of logcore."""


class ShippingError(LogcoreError):
    """Root of the errors of forwarding and mirroring (logcore.shipping), and of exports
    to tables (logcore.lake).
    """


class RemoteUnavailableError(ShippingError):
    """The remote cluster does not answer. A requested change may have happened or not."""

    retriable = True


class RemoteTopicError(ShippingError):
    """A topic of the remote cluster is missing, has too few partitions, or is not
    allowed.
    """


class RecordRefusedError(ShippingError):
    """The cluster or the table refuses a record, for example because it is too large.
    Its partition is not shipped any further.
    """


class ShippingGapError(ShippingError):
    """Records were deleted before they were shipped, mirrored or exported."""


class DivergedError(ShippingError):
    """The source and its copy have different records: one of them was truncated, lost
    records, or is another topic of that name.
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
