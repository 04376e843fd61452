"""Effects that a transition of a transaction requests, and its requests and results.

An effect is one of
    TransactionReply: a request ends; answer its client.
    StoreTransaction: append a record to the id's partition of `__transaction_state` and sync it,
        then call TransactionMachine.stored().
    WriteMarkers: end the transaction in these partitions and sync them, then call
        TransactionMachine.markers_written().
    AbortOrphan: in these partitions, abort the open transactions of a producer without
        a transactional id. There is no reply.
    AllocateProducerId: allocate a producer id that was never used, then call
        TransactionMachine.producer_id_allocated().
    SetTransactionTimer, CancelTransactionTimer: set or cancel a timer. When the timer
        expires, call TransactionMachine.timed_out(). Each transactional id has one timer.
    TimedOut: a transaction has timed out; report it to the operator.

Effects are carried out in their order, and all effects of one transition before the
next transition. This module contains no protocol messages or codes.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Final

import attrs

from logcore.format.transaction_records import Partition, StoredTransaction

#: The timeout of a transaction that only its producer ends, as in Kafka's two-phase
#: commits.
NO_TIMEOUT: Final = 2**31 - 1

#: The caller's handle of a request, which the TransactionReply contains. None if no
#: request waits.
Waiter = Hashable | None


class TransactionError(enum.Enum):
    """The reason why a request failed. The names are Kafka's."""

    # The stored state cannot be read or written: try again.
    COORDINATOR_NOT_AVAILABLE = enum.auto()
    # The coordinator of a cluster reads the stored state: try again.
    COORDINATOR_LOAD_IN_PROGRESS = enum.auto()
    # Another broker of a cluster coordinates the id.
    NOT_COORDINATOR = enum.auto()
    INVALID_REQUEST = enum.auto()
    INVALID_TRANSACTION_TIMEOUT = enum.auto()
    # The id is unknown or belongs to another producer id.
    INVALID_PRODUCER_ID_MAPPING = enum.auto()
    # Another producer has taken over the id.
    PRODUCER_FENCED = enum.auto()
    # Markers of the last transaction are missing: try again.
    CONCURRENT_TRANSACTIONS = enum.auto()
    INVALID_TXN_STATE = enum.auto()
    # The partition is not in the transaction.
    TRANSACTION_ABORTABLE = enum.auto()


# -- requests and their results --------------------------------------------------------


@attrs.frozen(kw_only=True)
class Initialize:
    """A producer starts to use an id, or requests a new epoch."""

    transactional_id: str
    #: NO_TIMEOUT for transactions that only their producer ends.
    timeout_ms: int
    #: The present id and epoch of the producer, or -1.
    producer_id: int = -1
    producer_epoch: int = -1
    #: If True, an open transaction is not aborted, and the answer is an Unended
    #: (KIP-939).
    keeps_open: bool = False


@attrs.frozen(kw_only=True)
class AddPartitions:
    """The producer is about to write to these partitions."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: frozenset[Partition]
    #: The transaction version of the client.
    client_version: int = 0
    #: Only check that the partitions are in the open transaction (section 3.6).
    only_verifies: bool = False


@attrs.frozen(kw_only=True)
class End:
    """Commit or abort."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    commit: bool
    #: 2 for a producer that gets a new epoch with each end (KIP-890).
    client_version: int = 0


@attrs.frozen
class Overdue:
    """The transaction has reached its timeout."""

    transactional_id: str


Request = Initialize | AddPartitions | End | Overdue


@attrs.frozen
class ProducerIdAndEpoch:
    """The producer id and epoch to continue with."""

    producer_id: int
    producer_epoch: int


@attrs.frozen
class Unended:
    """The producer id and epoch of the transaction that is still open."""

    producer_id: int
    producer_epoch: int


#: The outcome of a request; None for success without data.
Result = ProducerIdAndEpoch | Unended | TransactionError | None


# -- effects ---------------------------------------------------------------------------


@attrs.frozen
class TransactionReply:
    waiter: Hashable
    result: Result


@attrs.frozen(eq=False)
class StoreTransaction:
    """Store a new state of the id."""

    transactional_id: str
    #: The new record of the id; None to delete the id.
    stored: StoredTransaction | None
    #: Gets `result` once the record is durable.
    waiter: Waiter = None
    result: Result = None
    last_epoch: int = -1


@attrs.frozen(eq=False)
class WriteMarkers:
    #: "" for markers without a coordinator.
    transactional_id: str
    producer_id: int
    producer_epoch: int
    commit: bool
    partitions: frozenset[Partition]


@attrs.frozen
class AbortOrphan:
    producer_id: int
    producer_epoch: int
    partitions: frozenset[Partition]


@attrs.frozen(eq=False)
class AllocateProducerId:
    """Allocate a producer id for a request, which is then processed again."""

    request: Request
    waiter: Waiter


@attrs.frozen
class SetTransactionTimer:
    transactional_id: str
    at_ms: int


@attrs.frozen
class CancelTransactionTimer:
    transactional_id: str


@attrs.frozen
class TimedOut:
    transactional_id: str


Effect = (
    TransactionReply
    | StoreTransaction
    | WriteMarkers
    | AbortOrphan
    | AllocateProducerId
    | SetTransactionTimer
    | CancelTransactionTimer
    | TimedOut
)
