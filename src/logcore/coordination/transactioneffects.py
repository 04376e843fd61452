"""What a transition of a transaction asks for, and the values it speaks in. No codes and no shapes of any protocol.

An effect is one of
    Reply           a request ends: tell its client
    Store           append a record to the id's partition of `__transaction_state`, and sync it; then tell
                    Transactions.stored()
    WriteMarkers    end the transaction in these partitions, and sync them; then tell Transactions.marked()
    AbortOrphan     abort what a producer without a transactional id left open in these partitions; no reply follows
    TakeProducerId  a producer id is needed that was never given out; then tell Transactions.taken()
    At, Cancel      a timer: at its time, tell Transactions.timed_out(). There is one for each transactional id
    TimedOut        something a person may want to read about

Effects are carried out in their order, and those of one transition before those of the next.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import TYPE_CHECKING, Final

import attrs

from logcore.format.transactionrecords import Partition, StoredTransaction

if TYPE_CHECKING:
    from logcore.coordination.transactions import Transaction

#: The timeout of a transaction that is open until its producer ends it, as Kafka has it for two-phase commits.
NO_TIMEOUT: Final = 2**31 - 1

#: What the caller knows a request by. It comes back in the Reply. None: no request waits.
Waiter = Hashable | None


class TransactionError(enum.Enum):
    """Why a request fails. The names are Kafka's."""

    COORDINATOR_NOT_AVAILABLE = enum.auto()  # what is stored cannot be read or written: try again
    INVALID_REQUEST = enum.auto()
    INVALID_TRANSACTION_TIMEOUT = enum.auto()
    INVALID_PRODUCER_ID_MAPPING = enum.auto()  # the id is not known, or belongs to another producer id
    PRODUCER_FENCED = enum.auto()  # another producer has taken the id over
    CONCURRENT_TRANSACTIONS = enum.auto()  # markers of the last transaction are not all written: try again
    INVALID_TXN_STATE = enum.auto()
    TRANSACTION_ABORTABLE = enum.auto()  # the partition is not in the transaction


# -- requests and their results --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Initialize:
    """A producer begins to use an id, or wants a new epoch. producer_id and producer_epoch: what it has, or -1.

    timeout_ms: NO_TIMEOUT for transactions that only their producer ends. keeps_open: a transaction that is open is not
    aborted, and the answer is an Unended (KIP-939).
    """

    transactional_id: str
    timeout_ms: int
    producer_id: int = -1
    producer_epoch: int = -1
    keeps_open: bool = False


@attrs.frozen(kw_only=True)
class AddPartitions:
    """The producer is going to write to these partitions. client_version: its transaction version."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: frozenset[Partition]
    client_version: int = 0


@attrs.frozen(kw_only=True)
class End:
    """Commit or abort. client_version: 2 for a producer that gets a new epoch with each end (KIP-890)."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    commit: bool
    client_version: int = 0


@attrs.frozen
class Overdue:
    """The transaction has been open for as long as its producer may keep it so."""

    transactional_id: str


Request = Initialize | AddPartitions | End | Overdue


@attrs.frozen
class Identity:
    """The producer id and epoch to go on with."""

    producer_id: int
    producer_epoch: int


@attrs.frozen
class Unended:
    """The producer id and epoch whose transaction is still open."""

    producer_id: int
    producer_epoch: int


#: How a request ends; None for success with nothing to tell.
Result = Identity | Unended | TransactionError | None


# -- effects ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Reply:
    waiter: Hashable
    result: Result


@attrs.frozen(eq=False)
class Store:
    """stored: how the id will stand, None to take it away. waiter: is told `result` once the record is on disk."""

    transaction: Transaction
    stored: StoredTransaction | None
    waiter: Waiter = None
    result: Result = None
    last_epoch: int = -1


@attrs.frozen(eq=False)
class WriteMarkers:
    transaction: Transaction
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
class TakeProducerId:
    """For a request, which is asked again once there is an id."""

    request: Request
    waiter: Waiter


@attrs.frozen
class At:
    transactional_id: str
    at_ms: int


@attrs.frozen
class Cancel:
    transactional_id: str


@attrs.frozen
class TimedOut:
    transactional_id: str


Effect = Reply | Store | WriteMarkers | AbortOrphan | TakeProducerId | At | Cancel | TimedOut
