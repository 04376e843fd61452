"""Reads the state of each transactional id from the logs of `__transaction_state`.

A record in another form is an error, because a skipped transaction would remain open
forever. The bytes of a record are decoded in format/transaction_records.py, and
logcore.coordination makes the decisions.
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
    """Return the last record of each transactional id, of all partitions of the topic.

    Raises:
        CorruptLogError: a record has another form.
        LogcoreError: a log cannot be read.
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
