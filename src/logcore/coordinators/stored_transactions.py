"""The present state of each transactional id, by the logs of `__transaction_state`.

A record of another form is an error, since a transaction that was passed over would
stay open for ever. The bytes of a record are read in format/transaction_records.py; what
follows from them is decided in logcore.coordination.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from logcore.format.transaction_records import (
    StoredTransaction,
    read_transaction,
    read_transaction_key,
)
from logcore.reader import LogReader

#: Settings of the topic, as Kafka creates it.
TRANSACTIONS_CONFIG: Final = {
    "cleanup.policy": "compact",
    "compression.type": "uncompressed",
    "segment.bytes": 104_857_600,
}


def stored_transactions(logs: Iterable[LogReader]) -> dict[str, StoredTransaction]:
    """Transactional id -> its last record, of all partitions of the topic. Raises what
    reading raises, and CorruptLogError for a record of another form.
    """
    found: dict[str, StoredTransaction] = {}
    for log in logs:
        for columns in log.scan(log.log_start_offset, log.high_watermark):
            for key, value in zip(columns.keys(), columns.values(), strict=True):
                name = None
                if key is not None:
                    name = read_transaction_key(key)
                if name is None:
                    continue
                if value is None:
                    found.pop(name, None)
                else:
                    found[name] = read_transaction(value)
    return found
