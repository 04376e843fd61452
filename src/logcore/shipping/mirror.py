"""Mirrors topics of a remote Kafka cluster into a local directory.

The local records have the offsets of the cluster or new ones.

    with (
        logcore.open_dir("copy", create=True) as data,
        shipping.KafkaCluster("kafka:9092") as cluster,
        shipping.Mirror(data, cluster, topics=["orders"], offsets="keep") as mirror,
    ):
        mirror.run()

Rules (clients reference 10.2):
- offsets="keep": batches are stored with the offsets and leader epochs that they have
  in the cluster. The local log end is the only progress, so no record can be stored
  twice or be missing.
- offsets="new": records and progress are stored in one local transaction. The progress
  is stored as offsets of a local group.
- Only committed records are mirrored. Skipped offsets are reported; see the table in
  mirror_rules.py.
- If a partition cannot continue, it stops with an error. The other partitions continue.

step() performs one step in the thread of the caller. mirror_rules.py makes the
decisions, and kafka.py contains the client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Unpack

import attrs

from logcore.closeable import Closeable
from logcore.consumer.settings import OffsetAndMetadata
from logcore.coordinators.stored_offsets import stored_groups
from logcore.errors import (
    DivergedError,
    InvalidConfigError,
    InvalidRecordError,
    LogcoreError,
    OffsetOutOfRangeError,
    ProducerStateError,
    RecordRefusedError,
    RecordTooLargeError,
    RemoteTopicError,
    RemoteUnavailableError,
    TransactionAbortedError,
)
from logcore.format.group_records import Committed
from logcore.fs import FS, OS
from logcore.kernels import Record
from logcore.log import Log
from logcore.logdir import LogDir
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.reader import LogReader
from logcore.recordbatch import empty_batch
from logcore.reporting import WARNING, log_line
from logcore.shipping import mirror_rules
from logcore.shipping.cluster import (
    FetchResult,
    Partition,
    RemoteRecord,
    RemoteSpan,
    RemoteTopic,
    SourceCluster,
)
from logcore.shipping.dead_letters import Quarantine
from logcore.shipping.forward_rules import Stop
from logcore.shipping.mirror_rules import Diverged
from logcore.shipping.settings import (
    MirrorMetrics,
    MirrorOptions,
    MirrorSettings,
)
from logcore.shipping.status import ShippingStatus

#: Interval at which partitions are listed, their ends are read, and the offsets of
#: groups are copied.
_CHECK_MS: Final = 5_000
_RECORD_ERRORS: Final = (InvalidRecordError, RecordTooLargeError)
#: Number of offsets at the local end that are compared with the cluster before a
#: partition continues.
_COMPARED_OFFSETS: Final = 16
#: Maximum time for fetching a single record.
_SINGLE_FETCH_S: Final = 10.0


@attrs.define(kw_only=True)
class _MirroredPartition:
    """One mirrored partition.

    Attributes:
        source: The partition in the cluster.
        target: The local partition.
        source_id: Cluster id and topic id of the source.
        position: The next offset to store, or None until _set_positions() has set it.
        fetch_offset: The next offset to fetch. It is below `position` until the records
            of `local_tail` have been compared.
        local_tail: The last local records, by offset.
        span: The bounds of the source when they were last requested.
        reached: End of the offsets that were read.
    """

    source: Partition
    target: Partition
    source_id: str
    is_compacted: bool = False
    position: int | None = None
    fetch_offset: int = 0
    local_tail: Mapping[int, Record] = attrs.field(factory=dict)
    span: RemoteSpan = attrs.Factory(lambda: RemoteSpan(0, 0))
    reached: int = 0
    failure: LogcoreError | None = None

    @property
    def is_ready(self) -> bool:
        """Return whether the partition has stopped, or whether its last records have
        been compared.
        """
        if self.failure is not None:
            return True
        return self.position is not None and self.fetch_offset >= self.position

    @property
    def end(self) -> int:
        """The end of the mirrored offsets."""
        return max(self.reached, self.position or 0)


class Mirror(Closeable):
    """Copies topics of a cluster. See the top of this module.

    A `with` block closes it. Only one thread may use it at a time.

    Args:
        logdir: The local directory, open for writing.
        cluster: A KafkaCluster.
        options: See MirrorOptions.

    Raises:
        InvalidConfigError: An option is invalid.
    """

    def __init__(
        self,
        logdir: LogDir,
        cluster: SourceCluster,
        *,
        fs: FS = OS,
        **options: Unpack[MirrorOptions],
    ) -> None:
        self._settings = MirrorSettings(**options)
        if logdir.is_read_only:
            raise InvalidConfigError(
                "a mirror writes to the directory, which was opened with read_only=True"
            )
        self._logdir = logdir
        self._cluster = cluster
        self._fs = fs
        #: Whether records keep their remote offsets.
        self._keeps_offsets = self._settings.offsets == "keep"
        self._quarantine = Quarantine(logdir, f"mirror-{self._settings.name}")
        self._cluster_id = ""
        self._partitions: dict[Partition, _MirroredPartition] = {}  # by source
        #: Writes records with new offsets.
        self._producer: Any = None
        self._consumers: dict[str, Any] = {}  # of local groups
        self._copied_offsets: dict[str, dict[Partition, int]] = {}
        self._status = ShippingStatus(fs, f"mirror {self._settings.name}")
        self._next_check_ms = 0
        self._record_count = 0
        self._size_bytes = 0
        self._quarantined_count = 0
        self._skipped_offsets = 0
        self._closed = False
        self._check_names()

    def __repr__(self) -> str:
        state = "closed"
        if not self._closed:
            state = self._status.state
        return f"<Mirror {self._settings.name} into {self._logdir.path}, {state}, {len(self._partitions)} partitions>"

    def close(self) -> None:
        """Close the mirror.

        The next mirror fetches records that were not stored again. A second call has no
        effect.
        """
        if self._closed:
            return
        self._closed = True
        self._end_producer()
        for consumer in self._consumers.values():
            consumer.close()

    @property
    def group_id(self) -> str:
        """The local group that stores the progress with offsets="new".

        It is valid after the first connection, because it contains the cluster id.
        """
        return f"logcore-mirror-{self._cluster_id}-{self._settings.name}"

    # -- work --------------------------------------------------------------------------

    def run(
        self, *, until_end: bool = False, after_step: Callable[[], None] | None = None
    ) -> None:
        """Mirror until an exception is raised, such as KeyboardInterrupt.

        With `until_end`, return after all records that exist at the start are mirrored.
        `after_step` is called after each step.

        Raises:
            LogcoreError: A partition failed, and no partition can continue. With
                `until_end`, the error is raised after the other partitions have reached
                their ends.
        """
        ends: dict[Partition, int] | None = None
        while True:
            self.step()
            if after_step is not None:
                after_step()
            parts = self._partitions.values()
            failures = [part.failure for part in parts if part.failure is not None]
            if failures and len(failures) == len(parts):
                raise failures[0]
            if not until_end or not parts or not all(part.is_ready for part in parts):
                continue
            if ends is None:
                ends = {part.source: part.span.log_end for part in parts}
            running = [
                part for part in parts if part.failure is None and part.source in ends
            ]
            if all(part.end >= ends[part.source] for part in running):
                if failures:
                    raise failures[0]
                return

    def step(self, timeout_s: float = 0.1) -> int:
        """Perform one step of at most about `timeout_s`.

        Return the number of stored records. If the cluster does not respond, the state
        becomes "waiting" and no exception is raised.

        Raises:
            RemoteTopicError: Topics are missing in the cluster.
            DivergedError: A topic was deleted and created again.
            LogcoreError: The directory cannot be written.
        """
        if self._closed:
            raise ProducerStateError("the mirror is closed")
        try:
            return self._step(timeout_s)
        except LogcoreError as error:
            if not error.retriable:
                self._reset_positions()
                raise
            self._wait_after_error(error)
        except BaseException:
            self._reset_positions()
            raise
        return 0

    def _reset_positions(self) -> None:
        """Reset all positions, because fetched batches may not have been stored."""
        self._end_producer()
        for part in self._partitions.values():
            part.position = None

    def _step(self, timeout_s: float) -> int:
        remaining_s = self._status.remaining_s()
        if remaining_s > 0:
            self._cluster.pause(min(timeout_s, remaining_s))
            return 0
        now_ms = self._fs.monotonic_ms()
        if now_ms >= self._next_check_ms:
            self._find_partitions()
            self._next_check_ms = now_ms + _CHECK_MS
        self._set_positions()
        parts = self._partitions.values()
        positions = {
            part.source: part.fetch_offset
            for part in parts
            if part.position is not None and part.failure is None
        }
        if not positions:
            if self._partitions:
                self._status.state = "stopped"
            else:
                self._status.state = "idle"
            self._cluster.pause(timeout_s)
            return 0
        fetched = self._cluster.fetch(positions, timeout_s)
        for key in fetched.lost:
            self._partitions[key].position = None  # _set_positions() sets it again
        for key, offset in fetched.reached.items():
            self._partitions[key].reached = max(self._partitions[key].reached, offset)
        records_to_store = {}
        for key in fetched.records.keys() | fetched.reached.keys():
            part = self._partitions[key]
            if part.position is not None and part.failure is None:
                new_records = self._records_to_store(part, fetched)
                if new_records:
                    records_to_store[key] = new_records
        self._status.succeed("shipping" if records_to_store else "idle")
        return self._store(records_to_store)

    def _wait_after_error(self, error: LogcoreError) -> None:
        """Schedule the next attempt after a transient error. It begins at the stored
        positions.
        """
        self._reset_positions()
        self._status.fail(error)

    # -- choice of partitions ----------------------------------------------------------

    def _target(self, name: str) -> str:
        if self._settings.rename is None:
            return name
        return self._settings.rename(name)

    def _check_names(self) -> None:
        """Raise InvalidConfigError if offsets="keep" would mix topics in one log."""
        targets = [self._target(name) for name in self._settings.topics]
        if self._keeps_offsets and len(set(targets)) < len(targets):
            raise InvalidConfigError(
                "two topics would be mirrored to the same local topic, which needs offsets='new'",
                found=str(targets),
            )

    def _find_partitions(self) -> None:
        """Add new partitions, and check that the topics were not recreated."""
        if not self._cluster_id:
            self._cluster_id = self._cluster.cluster_id()
        topics = self._cluster.topics(self._settings.topics)
        missing = sorted(set(self._settings.topics) - set(topics))
        if missing:
            raise RemoteTopicError(
                f"topics are missing in the cluster: {', '.join(missing)}"
            )
        for name, topic in topics.items():
            source_id = f"{self._cluster_id}/{topic.topic_id}"
            self._prepare_topic(self._target(name), topic, source_id)
            for number in range(topic.partitions):
                key = (name, number)
                mirrored = self._partitions.get(key)
                if mirrored is None:
                    mirrored = _MirroredPartition(
                        source=key,
                        target=(self._target(name), number),
                        source_id=source_id,
                    )
                    self._partitions[key] = mirrored
                mirror_rules.check_same_topic(mirrored.source_id, source_id, name)
                mirrored.is_compacted = topic.is_compacted
        for part in self._partitions.values():
            if part.failure is None:
                part.span = self._cluster.span(part.source)
        self._copy_groups()

    def _prepare_topic(self, target: str, topic: RemoteTopic, source_id: str) -> None:
        """Create the local topic, or add partitions to it.

        Raises DivergedError if the local topic is not a mirror, is a mirror of another
        topic, or is a mirror of an earlier topic with the same name.
        """
        if target not in self._logdir:
            config = {}
            if self._keeps_offsets:
                config["mirror.source"] = source_id
            self._logdir.create_topic(target, topic.partitions, config)
            return
        mirrored = self._logdir.settings(target).mirror_source
        if self._keeps_offsets and not mirrored:
            raise DivergedError(
                f"topic {target!r} exists already and is not a mirror: mirror to another name with rename (--rename)"
            )
        if self._keeps_offsets:
            mirror_rules.check_same_topic(mirrored, source_id, target)
        if len(self._logdir.partitions(target)) < topic.partitions:
            self._logdir.add_partitions(target, topic.partitions)

    # -- positions ---------------------------------------------------------------------

    def _set_positions(self) -> None:
        unplaced = [
            part
            for part in self._partitions.values()
            if part.position is None and part.failure is None
        ]
        if not unplaced:
            return
        progress: Mapping[Partition, Committed] = {}
        if not self._keeps_offsets:
            # The producer is initialized before the progress is read, because this ends
            # an open transaction of an earlier mirror, which may contain progress.
            self._begin_producer()
            progress = self._progress()
        for part in unplaced:
            part.span = self._cluster.span(part.source)
            if self._keeps_offsets:
                self._set_position_from_log(part)
                continue
            end = None
            committed = progress.get(part.source)
            if committed is not None:
                mirror_rules.check_same_topic(
                    committed.metadata, part.source_id, part.source[0]
                )
                end = committed.offset
            self._set_position(part, end, None)

    def _set_position_from_log(self, part: _MirroredPartition) -> None:
        log = self._logdir.partition(*part.target)
        end = None  # an empty log begins at the start of the source
        if log.log_end_offset > 0:
            end = log.log_end_offset
        self._set_position(part, end, log)

    def _set_position(
        self, part: _MirroredPartition, end: int | None, log: Log | None
    ) -> None:
        decision = mirror_rules.decide_start(
            end, part.span, on_gap=self._settings.on_gap
        )
        if isinstance(decision, Stop):
            self._stop(part, decision.error)
        elif isinstance(decision, Diverged):
            self._handle_divergence(part, decision.error)
        else:
            if decision.skipped:
                self._skipped_offsets += decision.skipped
                text = "mirror %s: %d offsets of %s-%d were deleted before they were mirrored"
                log_line(
                    "shipping",
                    WARNING,
                    text,
                    self._settings.name,
                    decision.skipped,
                    *part.source,
                )
            part.position = decision.offset
            part.reached = min(part.reached, decision.offset)
            if log is None or decision.skipped:
                part.local_tail = {}
            else:
                part.local_tail = _last_records(log, part.span.log_start)
            part.fetch_offset = min(part.local_tail, default=decision.offset)

    def _records_to_store(
        self, part: _MirroredPartition, fetched: FetchResult
    ) -> Sequence[RemoteRecord]:
        """Return the records to store.

        Records below the position are compared with the local records first.
        """
        records = fetched.records.get(part.source, ())
        position = part.position or 0
        if records:
            range_end = records[-1].record.offset + 1
        else:
            range_end = part.fetch_offset
        range_end = max(range_end, fetched.reached.get(part.source, 0))
        if self._keeps_offsets:
            differing = mirror_rules.find_difference(
                part.local_tail,
                position,
                records,
                range_end,
                is_compacted=part.is_compacted,
            )
            if differing is not None:
                reason = f"the two logs differ at offset {differing.offset}"
                self._handle_divergence(
                    part,
                    mirror_rules.divergence_error(
                        reason,
                        part.local_tail.get(differing.offset),
                        _record_at(records, differing.offset),
                    ),
                )
                return ()
        part.local_tail = {
            offset: record
            for offset, record in part.local_tail.items()
            if offset >= range_end
        }
        if range_end < position:
            part.fetch_offset = range_end
        else:
            part.fetch_offset = max(position, part.fetch_offset)
        new_records = [record for record in records if record.record.offset >= position]
        if new_records:
            part.fetch_offset = new_records[-1].record.offset + 1
        return new_records

    def _handle_divergence(
        self, part: _MirroredPartition, error: DivergedError
    ) -> None:
        """Stop the partition, or truncate the local log to the common records."""
        if self._settings.on_divergence != "truncate" or not self._keeps_offsets:
            self._stop(part, error)
            return
        log = self._logdir.partition(*part.target)
        start = max(log.log_start_offset, part.span.log_start)
        end = max(start, min(log.log_end_offset, part.span.log_end))
        common_end = mirror_rules.common_end(
            start, end, lambda offset: self._is_same_at(part, log, offset)
        )
        # The local log begins above the end of the source, so a truncation cannot make
        # them equal.
        if common_end >= log.log_end_offset:
            self._stop(part, error)
            return
        question = f"truncate {part.target[0]}-{part.target[1]} from offset {log.log_end_offset} to {common_end}?"
        if self._settings.confirm is not None and not self._settings.confirm(question):
            self._stop(part, error)
            return
        log_line(
            "shipping", WARNING, "mirror %s: %s yes", self._settings.name, question
        )
        log.truncate_to_epoch(_epoch_before(log, common_end), common_end)
        part.position = None

    def _is_same_at(
        self, part: _MirroredPartition, log: LogReader, offset: int
    ) -> bool:
        try:
            local_record = log.get(offset)
        except OffsetOutOfRangeError:
            return True  # there is no local record that could differ
        deadline_ms = self._fs.monotonic_ms() + round(_SINGLE_FETCH_S * 1000)
        while self._fs.monotonic_ms() < deadline_ms:
            fetched = self._cluster.fetch({part.source: local_record.offset}, 0.1)
            records = fetched.records.get(part.source)
            if records:
                return records[0].record == local_record
            if part.source in fetched.reached or part.source in fetched.lost:
                return False
        raise RemoteUnavailableError(
            "the cluster did not return a record that is needed for a comparison"
        )

    def _stop(self, part: _MirroredPartition, error: LogcoreError) -> None:
        part.failure = error
        log_line(
            "shipping",
            WARNING,
            "%s-%d is not mirrored any more: %s",
            *part.source,
            error,
        )

    # -- storing -----------------------------------------------------------------------

    def _store(
        self, records_by_source: Mapping[Partition, Sequence[RemoteRecord]]
    ) -> int:
        if not records_by_source:
            return 0
        if not self._keeps_offsets:
            return self._store_new(records_by_source)
        stored = 0
        for key, records in records_by_source.items():
            stored += self._store_with_offsets(self._partitions[key], records)
        return stored

    def _store_with_offsets(
        self, part: _MirroredPartition, records: Sequence[RemoteRecord]
    ) -> int:
        log = self._logdir.partition(*part.target)
        try:
            self._append(log, records, part.span.log_start)
        except (
            OffsetOutOfRangeError
        ) as error:  # the leader epoch decreased, or another program wrote to the log
            self._handle_divergence(
                part,
                mirror_rules.divergence_error(
                    "the next records do not continue the local log", "", error
                ),
            )
            return 0
        except _RECORD_ERRORS as error:
            self._stop(part, error)
            return 0
        self._count(records)
        part.position = log.log_end_offset
        return len(records)

    def _append(
        self, log: Log, records: Sequence[RemoteRecord], log_start: int
    ) -> None:
        codec = log.config.compression_type
        if codec == "producer":
            codec = "uncompressed"
        data = b"".join(
            mirror_rules.encode_batches(records, max(0, log.leader_epoch), codec)
        )
        first = records[0].record.offset
        epoch = records[0].leader_epoch
        if log.log_end_offset == 0 and first > log_start:
            # Compaction may have removed the first records. An empty batch replaces
            # them, so that both logs begin at the same offset. Otherwise, the local log
            # would begin above offsets that consumers may have committed.
            data = empty_batch(log_start, first - 1, max(0, epoch)) + data
        log.append_as_follower(data)

    def _quarantine_record(
        self, part: _MirroredPartition, record: Record, error: LogcoreError
    ) -> bool:
        """Quarantine a record that cannot be stored locally.

        Return False if the partition was stopped instead.
        """
        if self._settings.on_error == "fail":
            refusal = RecordRefusedError(
                f"a record of {part.source[0]}-{part.source[1]} cannot be stored here: {error}. Change the settings of "
                f"topic {part.target[0]!r}, or skip the record with on_error='quarantine' (--on-error quarantine)",
                offset=record.offset,
            )
            self._stop(part, refusal)
            return False
        count = len(self._logdir.partitions(part.target[0]))
        if self._quarantine.append_once(part.target, count, record, str(error)):
            self._quarantined_count += 1
        return True

    def _count(self, records: Sequence[RemoteRecord]) -> None:
        self._record_count += len(records)
        self._size_bytes += sum(
            mirror_rules.size_of(record.record) for record in records
        )

    # -- new offsets -------------------------------------------------------------------

    def _begin_producer(self) -> None:
        if self._producer is None:
            self._producer = self._logdir.producer(
                transactional_id=self.group_id, threaded=False
            )
            self._producer.init_transactions()

    def _end_producer(self) -> None:
        if self._producer is not None:
            producer = self._producer
            self._producer = None
            # The next producer with the same id aborts an open transaction.
            with contextlib.suppress(LogcoreError):
                producer.close()

    def _progress(self) -> Mapping[Partition, Committed]:
        """Return the offsets committed by the local group, by partition of the source."""
        if OFFSETS_TOPIC not in self._logdir:
            return {}
        numbers = self._logdir.partitions(OFFSETS_TOPIC)
        logs: list[LogReader] = [
            self._logdir.partition(OFFSETS_TOPIC, number) for number in numbers
        ]
        topics = stored_groups(logs).offsets.get(self.group_id, {})
        return {
            (topic, number): row
            for topic, rows in topics.items()
            for number, row in rows.items()
        }

    def _store_new(
        self, records_by_source: Mapping[Partition, Sequence[RemoteRecord]]
    ) -> int:
        """Store records and progress of all partitions in one transaction.

        After any failure, _set_positions() sets all positions again.
        """
        self._begin_producer()
        if (
            self._in_transaction(records_by_source) is not None
        ):  # a record was refused, and storing the records one by one finds it
            return self._store_new_one_by_one(records_by_source)
        for key, records in records_by_source.items():
            self._count(records)
            self._partitions[key].position = records[-1].record.offset + 1
        return sum(map(len, records_by_source.values()))

    def _in_transaction(
        self, records_by_source: Mapping[Partition, Sequence[RemoteRecord]]
    ) -> LogcoreError | None:
        """Store records and progress in one transaction.

        If a record is refused, store nothing and return its error.
        """
        producer = self._producer
        offsets = {}
        try:
            with producer.transaction():
                for key, records in records_by_source.items():
                    part = self._partitions[key]
                    topic, number = part.target
                    rows = [
                        (
                            remote_record.key,
                            remote_record.value,
                            remote_record.headers,
                            _timestamp_ms(remote_record),
                        )
                        for remote_record, _ in records
                    ]
                    producer.send_many(topic, rows, partition=number)
                    offsets[key] = OffsetAndMetadata(
                        records[-1].record.offset + 1, part.source_id
                    )
                producer.send_offsets_to_transaction(offsets, self.group_id)
        except _RECORD_ERRORS as error:
            return error
        except TransactionAbortedError as error:
            if isinstance(error.__cause__, _RECORD_ERRORS):
                return error.__cause__
            raise
        return None

    def _store_new_one_by_one(
        self, records_by_source: Mapping[Partition, Sequence[RemoteRecord]]
    ) -> int:
        stored = 0
        for key, records in records_by_source.items():
            part = self._partitions[key]
            for remote_record in records:
                error = self._in_transaction({key: [remote_record]})
                if error is None:
                    stored += 1
                    self._count([remote_record])
                elif not self._quarantine_record(part, remote_record.record, error):
                    break
                part.position = remote_record.record.offset + 1
        return stored

    # -- groups ------------------------------------------------------------------------

    def _copy_groups(self) -> None:
        """Copy the committed offsets of groups of the cluster.

        This requires offsets="keep", so that an offset means the same record in both
        logs.
        """
        for group_id in self._settings.groups:
            committed = self._cluster.committed(group_id, list(self._partitions))
            offsets = {key: progress.offset for key, progress in committed.items()}
            if offsets == self._copied_offsets.get(group_id):
                continue
            if group_id not in self._consumers:
                self._consumers[group_id] = self._logdir.consumer(
                    group_id=group_id, enable_auto_commit=False
                )
            self._consumers[group_id].commit(
                {
                    self._partitions[key].target: offset
                    for key, offset in offsets.items()
                }
            )
            self._copied_offsets[group_id] = offsets

    # -- metrics -----------------------------------------------------------------------

    def metrics(self) -> MirrorMetrics:
        """Return the current metrics; see MirrorMetrics."""
        parts = self._partitions.values()
        return MirrorMetrics(
            state=self._status.state,
            record_count=self._record_count,
            size_bytes=self._size_bytes,
            retry_count=self._status.retry_count,
            quarantined_count=self._quarantined_count,
            skipped_offsets=self._skipped_offsets,
            lag_records=sum(max(0, part.span.log_end - part.end) for part in parts),
            failures={
                part.source: str(part.failure)
                for part in parts
                if part.failure is not None
            },
            reason=self._status.reason,
        )


def _timestamp_ms(record: Record) -> int | None:
    if record.timestamp_ms < 0:
        return None
    return record.timestamp_ms


def _record_at(records: Sequence[RemoteRecord], offset: int) -> Record | None:
    return next((record for record, _ in records if record.offset == offset), None)


def _last_records(log: Log, lowest_offset: int) -> dict[int, Record]:
    """Return the records of the last _COMPARED_OFFSETS offsets, from `lowest_offset` on."""
    start = max(
        log.log_start_offset, lowest_offset, log.log_end_offset - _COMPARED_OFFSETS
    )
    if start >= log.log_end_offset:
        return {}
    return {record.offset: record for record in log.read(start, log.log_end_offset)}


def _epoch_before(log: Log, offset: int) -> int:
    """Return the leader epoch of the last record before an offset, -1 if there is none."""
    if offset <= log.log_start_offset:
        return -1
    epoch, _ = log.end_of_epoch(log.leader_epoch)
    while epoch >= 0:
        earlier, start = log.end_of_epoch(epoch - 1)
        if start < offset:
            break
        epoch = earlier
    return epoch
