"""Maps the errors of logcore to Kafka's error codes.

The text of each error is useful too, if the API has a field for it. Errors that only
the protocol defines are not here; their handlers set the code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, Final

import logcore
from logcore.errors import (
    CommitTimeoutError,
    NotEnoughReplicasError,
    RegistryClosedError,
    RegistryLockedError,
    RegistryUnavailableError,
    SessionExpiredError,
)
from netshim.wire import codes

#: The first class that matches is used, so subclasses precede their base classes.
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
    # Clients retry this error. Kafka itself returns it when a log directory has failed.
    (logcore.LogFailedError, codes.KAFKA_STORAGE_ERROR),
    (logcore.LogNotFoundError, codes.KAFKA_STORAGE_ERROR),
    (logcore.CorruptLogError, codes.KAFKA_STORAGE_ERROR),
    (logcore.StorageReadError, codes.KAFKA_STORAGE_ERROR),
    (logcore.StorageWriteError, codes.KAFKA_STORAGE_ERROR),
    (logcore.DiskFullError, codes.KAFKA_STORAGE_ERROR),
    (logcore.ResourceError, codes.KAFKA_STORAGE_ERROR),
    (logcore.NotLeaderError, codes.NOT_LEADER_OR_FOLLOWER),
    (NotEnoughReplicasError, codes.NOT_ENOUGH_REPLICAS),
    (CommitTimeoutError, codes.REQUEST_TIMED_OUT),
    # The registry of a cluster does not answer, or the broker registers again. Clients
    # repeat the request.
    (RegistryUnavailableError, codes.REQUEST_TIMED_OUT),
    (RegistryLockedError, codes.REQUEST_TIMED_OUT),
    (RegistryClosedError, codes.REQUEST_TIMED_OUT),
    (SessionExpiredError, codes.REQUEST_TIMED_OUT),
    # The partition was deleted, or the broker is stopping. Clients then refresh their
    # metadata.
    (logcore.LogClosedError, codes.NOT_LEADER_OR_FOLLOWER),
)


#: Maximum length of a message. The protocol has room for 32 KB, and some of the text
#: may be the client's own bytes.
_MESSAGE_CHARACTERS: Final = 1_000


#: An absolute path. Only its last name is sent.
_PATH: Final = re.compile(r"(?<![\w.])/(?:[^/\s'\"(),:]+/)+(?=[^/\s'\"(),:])")


def message_of(error: BaseException) -> str:
    """Return the text of an error, shortened and without the server's directories."""
    if isinstance(error, logcore.TopicNotFoundError):
        # The text would name the most similar topic, and a client could request that
        # search without limit.
        return error.reason
    text = str(error)
    path = getattr(error, "path", None)
    if path:
        text = text.replace(path, os.path.basename(path))
    text = _PATH.sub("", text)
    if len(text) <= _MESSAGE_CHARACTERS:
        return text
    return text[:_MESSAGE_CHARACTERS] + "..."


def code_of(error: BaseException) -> int:
    """Return the code for an error, UNKNOWN_SERVER_ERROR if it has none."""
    for error_type, code in _CODES:
        if isinstance(error, error_type):
            return code
    return codes.UNKNOWN_SERVER_ERROR


def fail_results(results: Iterable[Any], error: BaseException) -> None:
    """Set the code and the text of an error in results that have none yet."""
    code, text = code_of(error), message_of(error)
    for result in results:
        if not result.error_code:
            result.error_code, result.error_message = code, text
