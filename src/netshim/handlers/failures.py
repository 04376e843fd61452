"""Which of Kafka's error codes an error of the log is.

The text of each error is worth sending too, where the API has a field for it. Not here: errors that the protocol itself
knows and the log does not; their handlers name the code.
"""

from __future__ import annotations

import os
import re
from typing import Final

import logcore
from netshim.wire import codes

#: The first that fits counts, so children stand before their parents.
_CODES: Final[tuple[tuple[type[logcore.LogcoreError], int], ...]] = (
    (logcore.TopicNotFoundError, codes.UNKNOWN_TOPIC_OR_PARTITION),
    (logcore.TopicExistsError, codes.TOPIC_ALREADY_EXISTS),
    (logcore.InvalidNameError, codes.INVALID_TOPIC_EXCEPTION),
    (logcore.InvalidConfigError, codes.INVALID_CONFIG),
    (logcore.OffsetOutOfRangeError, codes.OFFSET_OUT_OF_RANGE),
    (logcore.CorruptBatchError, codes.CORRUPT_MESSAGE),
    (logcore.InvalidTimestampError, codes.INVALID_TIMESTAMP),
    (logcore.InvalidRecordError, codes.INVALID_RECORD),
    (logcore.OutOfOrderSequenceError, codes.OUT_OF_ORDER_SEQUENCE_NUMBER),
    (logcore.InvalidProducerEpochError, codes.INVALID_PRODUCER_EPOCH),
    (logcore.InvalidTransactionStateError, codes.INVALID_TXN_STATE),
    (logcore.CoordinatorFencedError, codes.TRANSACTION_COORDINATOR_FENCED),
    (logcore.SegmentTooSmallError, codes.RECORD_LIST_TOO_LARGE),
    (logcore.RecordTooLargeError, codes.MESSAGE_TOO_LARGE),
    (logcore.UnsupportedCodecError, codes.UNSUPPORTED_COMPRESSION_TYPE),
    # Retriable for clients, and what Kafka itself says when a log directory has failed.
    (logcore.LogFailedError, codes.KAFKA_STORAGE_ERROR),
    (logcore.LogNotFoundError, codes.KAFKA_STORAGE_ERROR),
    (logcore.CorruptLogError, codes.KAFKA_STORAGE_ERROR),
    (logcore.StorageReadError, codes.KAFKA_STORAGE_ERROR),
    (logcore.StorageWriteError, codes.KAFKA_STORAGE_ERROR),
    (logcore.DiskFullError, codes.KAFKA_STORAGE_ERROR),
    (logcore.ResourceError, codes.KAFKA_STORAGE_ERROR),
    # The partition was deleted, or the broker is stopping: look for it elsewhere.
    (logcore.LogClosedError, codes.NOT_LEADER_OR_FOLLOWER),
)


#: A message says what a person needs; the protocol has room for 32 KB, and some of it may be the client's own bytes.
_MESSAGE_CHARACTERS: Final = 1_000


#: An absolute path, of which only the last name is told.
_PATH: Final = re.compile(r"(?<![\w.])/(?:[^/\s'\"(),:]+/)+(?=[^/\s'\"(),:])")


def message_of(error: BaseException) -> str:
    """The error's text, cut to what a person reads, and without the server's folders."""
    if isinstance(error, logcore.TopicNotFoundError):
        return error.reason  # its text would name the nearest topic, a search that a client could ask for without end
    text = str(error)
    path = getattr(error, "path", None)
    if path:
        text = text.replace(path, os.path.basename(path))
    text = _PATH.sub("", text)
    if len(text) <= _MESSAGE_CHARACTERS:
        return text
    return text[:_MESSAGE_CHARACTERS] + "..."


def code_of(error: BaseException) -> int:
    """The code for an error, UNKNOWN_SERVER_ERROR for one that has none."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return codes.UNKNOWN_SERVER_ERROR
