"""The topic `__consumer_offsets` of a broker: it stores committed offsets and groups.

Rules:
- Appends are completed in the order of the log, after they are on disk, in a cluster
  after they are committed (internal_topics.py).
- The last value of each key is valid (logcore.coordinators.stored_offsets). Records in
  an unknown form are left unchanged.

The bytes of records are in logcore.format.group_records, their meaning in groups.py,
and the markers of transactions in transactions.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from logcore import Log, Receipt, RecordTooLargeError
from logcore.coordination.group_requests import GroupError
from logcore.coordinators.stored_offsets import (
    OFFSETS_CONFIG,
    StoredGroups,
    stored_groups,
)
from logcore.format.group_records import GroupRecord
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.partition.coordinator_append import (
    append_atomically,
    append_to_transaction,
)
from netshim.internal_topics import InternalTopic
from netshim.state import BrokerState

_log = logging.getLogger("netshim")


class OffsetsTopic:
    """Writes and reads the topic, which is created by the first write."""

    def __init__(self, state: BrokerState, only: int | None = None) -> None:
        """Initialize the topic, or its partition `only`."""
        #: Also used by the coordinator, which loads the records.
        self.topic = InternalTopic(
            state,
            OFFSETS_TOPIC,
            state.settings.offsets_partitions,
            OFFSETS_CONFIG,
            only=only,
        )

    @property
    def exists(self) -> bool:
        return self.topic.exists

    def read(self) -> StoredGroups:
        """Return all current offsets and groups.

        This blocks on the disk. Any thread may call it.

        Raises:
            LogcoreError: a log could not be opened or read.
        """
        groups = stored_groups(self.topic.logs())
        # A newer version may have written them.
        if groups.skipped_count:
            _log.warning(
                "%s: %d records are not understood and left as they are",
                OFFSETS_TOPIC,
                groups.skipped_count,
            )
        return groups

    def append(
        self,
        group_id: str,
        records: list[GroupRecord],
        now_ms: int,
        callback: Callable[[GroupError | None], None],
        producer: tuple[int, int] | None = None,
    ) -> None:
        """Append records as one batch.

        After they are on disk, in a cluster after they are committed, call
        callback(None), in the order of the log. If that failed, call callback(error).
        `producer` contains the id and the epoch of the producer whose transaction
        contains the records.
        """
        # Key, value, no headers, and the timestamp.
        rows = [(key, value, (), now_ms) for key, value in records]

        def write(log: Log) -> Receipt:
            # A commit outside of a transaction. The records of one commit are stored
            # together or not at all.
            if producer is None:
                return append_atomically(log.host.writer, rows, durability="os")
            return append_to_transaction(
                log.host.writer, rows, *producer, durability="os"
            )

        def stored(error: Exception | None) -> None:
            callback(None if error is None else _error_of(group_id, error))

        # Approximate. It decides whether the append may block.
        size_bytes = sum(len(key) + len(value or b"") + 32 for key, value in records)
        self.topic.append(
            group_id,
            size_bytes,
            write,
            now_ms,
            stored,
            has_producer=producer is not None,
        )


def _error_of(group_id: str, error: Exception) -> GroupError:
    """Log an error, and return the code for clients.

    They retry, except after RECORD_TOO_LARGE, because the record would never fit.
    """
    _log.error(
        "%s: a record of group %r was not stored: %s", OFFSETS_TOPIC, group_id, error
    )
    if isinstance(error, RecordTooLargeError):
        return GroupError.RECORD_TOO_LARGE
    return GroupError.COORDINATOR_NOT_AVAILABLE
