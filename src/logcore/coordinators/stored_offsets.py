"""Reads the groups and offsets in the logs of `__consumer_offsets`: the last record of
each key.

Rules:
- All records below the high watermark are valid, even those after the start of an open
  transaction.
- A record of a transaction is valid once the transaction is committed. Its own offset
  counts, not the offset of the marker.
- A record in an unknown form is skipped and counted in `skipped_count`.

The bytes of a record are decoded in format/group_records.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Final

from logcore.config import INT64_MAX
from logcore.format.consumer_group_records import (
    CONSUMER_KEY_VERSIONS,
    ConsumerValue,
    RecordKind,
    read_consumer_key,
    read_consumer_value,
)
from logcore.format.group_records import (
    KEY_VERSIONS,
    CommitKey,
    Committed,
    StoredGroup,
    TopicWithId,
    read_commit,
    read_group,
    read_key,
)
from logcore.reader import LogReader, aborted_transactions

#: Settings of the topic.
OFFSETS_CONFIG: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": 104_857_600,
    "compression.type": "producer",
}

#: Offset, key and value of a record.
Row = tuple[int, bytes, bytes | None]


class StoredGroups:
    """The groups and offsets that the records of the topic define."""

    def __init__(self) -> None:
        #: Group -> topic -> partition -> the committed offset.
        self.offsets: dict[str, dict[str, dict[int, Committed]]] = {}
        #: The last record of each group of the classic protocol.
        self.groups: dict[str, StoredGroup] = {}
        #: The last records of each group of the consumer protocol, by kind and name.
        self.consumers: dict[str, dict[tuple[RecordKind, str], ConsumerValue]] = {}
        #: Group -> producer id -> (topic, partition) -> (position, commit of an open
        #: transaction). The position orders the commits of one partition. It is a
        #: negative number that rises with the log.
        self.unstable: dict[
            str, dict[int, dict[tuple[str, int], tuple[int, Committed]]]
        ] = {}
        #: The number of records that were skipped.
        self.skipped_count = 0

    def topics(self) -> set[TopicWithId]:
        """Return the topics of all offsets that contain the id of their topic."""
        found = {
            (topic, committed.topic_id)
            for topics in self.offsets.values()
            for topic, partitions in topics.items()
            for committed in partitions.values()
        }
        for producers in self.unstable.values():
            for offsets in producers.values():
                found |= {
                    (topic, committed.topic_id)
                    for (topic, _), (_, committed) in offsets.items()
                }
        return {topic for topic in found if topic[1]}

    def member_count(self, group_id: str) -> int:
        """Return the number of members of a group in its last record, 0 without a
        record.
        """
        if group_id in self.groups and self.groups[group_id].members:
            return len(self.groups[group_id].members)
        return sum(
            kind is RecordKind.MEMBER for kind, _ in self.consumers.get(group_id, {})
        )

    def add_records(self, latest: Mapping[bytes, bytes | None]) -> None:
        """Add the last records of the keys in one partition of the topic."""
        # Old releases of Kafka wrote keys of version 0, with the same meaning. Keys of
        # version 1 take precedence.
        oldest = (
            (key, value) for key, value in latest.items() if key.startswith(b"\0\0")
        )
        others = (
            (key, value) for key, value in latest.items() if not key.startswith(b"\0\0")
        )
        for key, value in itertools.chain(oldest, others):
            name = read_key(key)
            if isinstance(name, CommitKey):
                self._apply_commit(name, value)
            elif isinstance(name, str):
                self._apply_group(name, value)
            elif key[:2] in CONSUMER_KEY_VERSIONS:
                self._apply_consumer_record(key, value)
            elif key[:2] in KEY_VERSIONS:
                self.skipped_count += 1

    def _apply_commit(self, key: CommitKey, value: bytes | None) -> None:
        if value is None:
            self._drop_commit(key)
            return
        committed = read_commit(value)
        if committed is None:
            self.skipped_count += 1
            return
        self.offsets.setdefault(key.group_id, {}).setdefault(key.topic, {})[
            key.partition
        ] = committed

    def _drop_commit(self, key: CommitKey) -> None:
        """Remove an offset, and with the last one its topic and group."""
        topics = self.offsets.get(key.group_id, {})
        partitions = topics.get(key.topic, {})
        partitions.pop(key.partition, None)
        if not partitions:
            topics.pop(key.topic, None)
        if not topics:
            self.offsets.pop(key.group_id, None)

    def add_unstable(self, undecided: Mapping[int, Iterable[Row]]) -> None:
        """Add the commits of open transactions by producer id."""
        for producer_id, rows in undecided.items():
            for offset, key, value in rows:
                name = read_key(key)
                committed = None
                if value is not None:
                    committed = read_commit(value)
                if isinstance(name, CommitKey) and committed is not None:
                    group = self.unstable.setdefault(name.group_id, {})
                    position = offset - INT64_MAX - 1
                    group.setdefault(producer_id, {})[name.topic, name.partition] = (
                        position,
                        committed,
                    )

    def _apply_group(self, group_id: str, value: bytes | None) -> None:
        if value is None:
            self.groups.pop(group_id, None)
            return
        group = read_group(value)
        if group is None:
            self.skipped_count += 1
        else:
            self.groups[group_id] = group

    def _apply_consumer_record(self, key: bytes, value: bytes | None) -> None:
        name = read_consumer_key(key)
        if name is None:
            self.skipped_count += 1
            return
        if value is None:
            return
        fact = read_consumer_value(name.kind, value)
        if fact is None and name.kind is not RecordKind.TOPICS:
            self.skipped_count += 1
            return
        self.consumers.setdefault(name.group_id, {})[name.kind, name.name] = fact


def latest_records(
    log: LogReader,
) -> tuple[dict[bytes, bytes | None], dict[int, list[Row]]]:
    """Return the last value of each key in one partition of the topic, and the later
    records of open transactions by producer id.

    Raises:
        LogcoreError: the log cannot be read.
    """
    start = log.log_start_offset
    end = log.high_watermark
    if log.last_stable_offset == end and not aborted_transactions(log, start, end):
        latest: dict[bytes, bytes | None] = {}
        for columns in log.scan(start, end):
            latest.update(zip(columns.keys(), columns.values()))  # type: ignore[arg-type]
        latest.pop(None, None)  # type: ignore[call-overload]
        return latest, {}
    return _latest_of_committed(log, start, end)


def _latest_of_committed(
    log: LogReader, start: int, end: int
) -> tuple[dict[bytes, bytes | None], dict[int, list[Row]]]:
    """Return latest_records() of a log with open or aborted transactions."""
    latest: dict[bytes, bytes | None] = {}
    offsets: dict[bytes, int] = {}
    undecided: dict[int, list[Row]] = {}  # by producer id

    def apply_rows(rows: Iterable[Row]) -> None:
        for offset, key, value in rows:
            # A later record may have been applied while the transaction was open.
            if offsets.get(key, -1) < offset:
                offsets[key] = offset
                latest[key] = value

    for batch in log.batches(start, end):
        if batch.is_control:
            rows = undecided.pop(batch.producer_id, [])
            if batch.control_type() == "COMMIT":
                apply_rows(rows)
            continue
        rows = [
            (record.offset, record.key, record.value)
            for record in batch.records()
            if record.key is not None
        ]
        if batch.is_transactional:
            undecided.setdefault(batch.producer_id, []).extend(rows)
        else:
            apply_rows(rows)
    # A record has no effect if a later record of its key is valid, even if its
    # transaction commits.
    pending = {
        producer_id: [row for row in rows if row[0] > offsets.get(row[1], -1)]
        for producer_id, rows in undecided.items()
    }
    return latest, pending


def stored_groups(logs: Iterable[LogReader]) -> StoredGroups:
    """Return the groups of all partitions of the topic.

    Raises:
        LogcoreError: a partition cannot be read, so that groups would be missing.
    """
    found = StoredGroups()
    for log in logs:
        latest, undecided = latest_records(log)
        found.add_records(latest)
        found.add_unstable(undecided)
    return found


def committed_in(logs: Iterable[LogReader]) -> dict[tuple[str, int], dict[str, int]]:
    """Return the committed offsets of all partitions of the topic: (topic, partition)
    to group to offset.

    Raises:
        LogcoreError: a partition cannot be read.
    """
    found: dict[tuple[str, int], dict[str, int]] = {}
    for group_id, topics in stored_groups(logs).offsets.items():
        for topic, partitions in topics.items():
            for partition, committed in partitions.items():
                found.setdefault((topic, partition), {})[group_id] = committed.offset
    return found
