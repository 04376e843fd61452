"""Ships topics of a local log to a remote Kafka cluster, in order per partition.

    with (
        logcore.open_dir("edge") as data,
        shipping.KafkaCluster("kafka:9092") as cluster,
        shipping.Forwarder(data, cluster, topics=["orders"]) as forwarder,
    ):
        forwarder.run()

Rules (clients reference 10.1):
- One batch is in progress at a time. It is read and shipped, and then its result is
  processed. A batch without a result is read again.
- Exactly once: a batch is a transaction of the cluster, which also commits the local
  offset after the batch. After any failure the sender is recreated, which ends an open
  transaction, and the progress is read from the cluster.
- At least once: the progress is recorded in the directory, after the deliveries were
  reported.
- Only committed records are read. Under the "always" and "group" durability policies,
  they are synced.
- If a partition cannot continue, it stops with an error. The other partitions continue.

step() performs one step in the thread of the caller. forward_rules.py makes the
decisions, and kafka.py contains the client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Unpack

import attrs

from logcore.closeable import Closeable
from logcore.errors import (
    DivergedError,
    InvalidConfigError,
    LogcoreError,
    OffsetOutOfRangeError,
    ProducerFencedError,
    ProducerStateError,
    RecordRefusedError,
    RemoteTopicError,
    RemoteUnavailableError,
    ResourceError,
    ShippingError,
    TopicNotFoundError,
)
from logcore.fs import FS, OS
from logcore.kernels import Record
from logcore.log import Log
from logcore.logdir import LogDir
from logcore.reader import LogReader, segments_between
from logcore.reporting import WARNING, log_line
from logcore.shipping.cluster import (
    ClusterSender,
    Outcome,
    OutgoingBatch,
    Partition,
    ShippedProgress,
    TargetCluster,
)
from logcore.shipping.dead_letters import Quarantine
from logcore.shipping.forward_rules import (
    Begin,
    KnownOffsets,
    ShippedPartition,
    Stop,
    advice_to_create,
    check_fingerprint,
    fingerprint_offset,
    missing_topics,
    record_fingerprint,
    resume,
)
from logcore.shipping.progress import ProgressOwner, ProgressStore, RecordedProgress
from logcore.shipping.settings import (
    QUARANTINE_SUFFIX,
    ForwardMetrics,
    ForwardOptions,
    ForwardSettings,
)
from logcore.shipping.status import ShippingStatus

#: Interval of the search for new topics and partitions.
_CHECK_MS: Final = 1_000
#: Interval at which the progress is written to the registry if the cluster keeps it,
#: and committed for the local group.
_WRITE_MS: Final = 1_000
#: Interval at which all progress is committed again. Clusters delete groups that commit
#: nothing for a week.
_REFRESH_MS: Final = 3_600_000
#: After this time without a result of a batch, the state becomes "waiting". A batch
#: usually takes a few milliseconds.
_SLOW_MS: Final = 2_000
#: Transaction timeout in the cluster. After the timeout, the cluster returns the same
#: error as after a takeover by another forwarder.
_TRANSACTION_TIMEOUT_MS: Final = 60_000
#: Size of a record in memory, in addition to key, value and headers.
_RECORD_BYTES: Final = 64


@attrs.define
class _BatchInProgress:
    """A batch that was given to the sender and has no result yet."""

    batch: OutgoingBatch
    #: Size of its keys, values and headers.
    size_bytes: int
    #: Start by the monotonic clock.
    began_ms: int
    #: Start by the wall clock.
    wall_ms: int


@attrs.define
class _Counts:
    records: int = 0
    bytes: int = 0
    batches: int = 0
    quarantined: int = 0
    skipped: int = 0


class Forwarder(Closeable):
    """Ships topics to a cluster. See the top of this module.

    A `with` block closes it. Only one thread may use it at a time.

    Args:
        logdir: The local directory. It may be open read-only, while another process
            writes.
        cluster: A KafkaCluster.
        options: See ForwardOptions.

    Raises:
        InvalidConfigError: An option is invalid.
        ShippingError: Another forwarder with this name is running with
            at_least_once=True.
    """

    def __init__(
        self,
        logdir: LogDir,
        cluster: TargetCluster,
        *,
        fs: FS = OS,
        **options: Unpack[ForwardOptions],
    ) -> None:
        self._settings = ForwardSettings(**options)
        self._logdir = logdir
        self._cluster = cluster
        self._fs = fs
        self.group_id = f"logcore-forward-{logdir.cluster_id}"
        self.transactional_id = f"{self.group_id}-{self._settings.name}"
        # With transactions, the cluster owns the progress, because it is committed in
        # the transaction of the records.
        self._progress_owner: ProgressOwner = "cluster"
        if self._settings.at_least_once:
            self._progress_owner = "directory"
        can_write = not logdir.is_read_only
        if self._settings.hold is None:
            self._commits_local_group = can_write and not logdir.host.has_coordinator
        else:
            self._commits_local_group = self._settings.hold
        if not can_write and (
            self._commits_local_group or self._settings.on_error == "quarantine"
        ):
            raise InvalidConfigError(
                "hold=True and on_error='quarantine' write to the directory, which was opened with read_only=True"
            )
        self._quarantine = Quarantine(logdir, f"forward-{self._settings.name}")
        self._consumer: Any = (
            None  # of the local group; created by the first _commit_local_group()
        )
        self._partitions: dict[Partition, ShippedPartition] = {}  # by target
        self._sender: ClusterSender | None = (
            None  # None until connected, and after an error
        )
        self._in_progress: _BatchInProgress | None = None
        self._counts = _Counts()
        self._status = ShippingStatus(fs, f"forwarder {self._settings.name}")
        # Times when _find_partitions(), _write_progress() and the next full commit are
        # due.
        self._next_check_ms = 0
        self._next_write_ms = 0
        self._next_refresh_ms = fs.monotonic_ms() + _REFRESH_MS
        # Progress of delivered records, to be written by _write_progress().
        self._recorded: dict[Partition, ShippedProgress] = {}
        self._cluster_id = ""
        self._first_index = 0  # index of the partition with which the next batch begins
        self._closed = False
        self._progress_store = ProgressStore(fs, logdir.path, self._settings.name)
        try:
            if self._progress_owner == "directory":
                self._progress_store.acquire_lock()
            self._check_names()
        except BaseException:
            self._progress_store.close()
            raise

    def __repr__(self) -> str:
        state = "closed"
        if not self._closed:
            state = self._status.state
        return f"<Forwarder {self._settings.name} of {self._logdir.path}, {state}, {len(self._partitions)} partitions>"

    def close(self) -> None:
        """Abandon the batch in progress, write the progress, and close.

        Closing twice is allowed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._drop_sender()
            self._write_progress(is_last=True)
        finally:
            if self._consumer is not None:
                self._consumer.close()
            self._progress_store.close()

    # -- work --------------------------------------------------------------------------

    def run(
        self, *, until_end: bool = False, after_step: Callable[[], None] | None = None
    ) -> None:
        """Ship until an exception is raised, such as KeyboardInterrupt.

        With `until_end`, return after all records that exist at the start are shipped.
        `after_step` is called after each step.

        Raises:
            ProducerFencedError: Another forwarder of this name has started.
            LogcoreError: A partition failed, and no partition can continue. With
                `until_end`, the error is raised after the other partitions have reached
                their ends.
        """
        ends: dict[Partition, int] | None = None
        while True:
            self.step()
            if after_step is not None:
                after_step()
            failures = [
                part.failure
                for part in self._partitions.values()
                if part.failure is not None
            ]
            if failures and len(failures) == len(self._partitions):
                raise failures[0]
            if not until_end or self._sender is None:
                continue
            if ends is None:
                ends = {key: self._end(part) for key, part in self._partitions.items()}
            running = [
                part
                for key, part in self._partitions.items()
                if part.failure is None and key in ends
            ]
            if all(
                part.delivered >= ends[part.target] and not part.needs_commit
                for part in running
            ):
                if failures:
                    raise failures[0]
                return

    def step(self, timeout_s: float = 0.1) -> int:
        """Perform one step of at most about `timeout_s`.

        Return the number of delivered records. If the cluster does not respond, the
        state becomes "waiting" and no exception is raised.

        Raises:
            ProducerFencedError: Another forwarder of this name has started.
            RemoteTopicError: Topics are missing in the cluster.
            LogcoreError: The directory cannot be read.
        """
        if self._closed:
            raise ProducerStateError("the forwarder is closed")
        try:
            return self._step(timeout_s)
        except RemoteUnavailableError as error:
            self._wait_after_error(error)
        except ProducerFencedError as error:
            # The cluster returns the same error if it aborted the transaction because
            # of its timeout.
            if not self._took_too_long():
                self.close()
                raise self._fenced_error() from error
            self._wait_after_error(error)
        except BaseException:
            # Part of a batch may have been sent. Closing the sender aborts the batch or
            # discards its result. The next sender begins at the delivered offset.
            self._drop_sender()
            raise
        return 0

    def _step(self, timeout_s: float) -> int:
        remaining_s = self._status.remaining_s()
        if remaining_s > 0:
            self._cluster.pause(min(timeout_s, remaining_s))
            return 0
        now_ms = self._fs.monotonic_ms()
        if now_ms >= self._next_check_ms or self._sender is None:
            self._find_partitions()
            self._next_check_ms = now_ms + _CHECK_MS
        if self._sender is None:
            self._sender = self._connect()
        # One batch at a time: the next batch is read after this batch has its result.
        if self._in_progress is None:
            self._in_progress = self._read()
            if self._in_progress is None:
                self._idle(timeout_s)
                return 0
            self._sender.start(self._in_progress.batch)
        outcome = self._sender.wait(timeout_s)
        if outcome is None:
            waited_ms = self._fs.monotonic_ms() - self._in_progress.began_ms
            if waited_ms >= _SLOW_MS:
                self._status.state = "waiting"
                self._status.reason = (
                    f"the cluster has not responded for {waited_ms // 1000} s"
                )
            return 0
        return self._finish_batch(outcome)

    def _idle(self, timeout_s: float) -> None:
        """Update the state and wait, because there is nothing to ship now."""
        is_stopped = self._partitions and all(
            part.failure is not None for part in self._partitions.values()
        )
        self._status.succeed("stopped" if is_stopped else "idle")
        self._write_progress()
        self._cluster.pause(timeout_s)

    def _wait_after_error(self, error: LogcoreError) -> None:
        """Schedule a new connection.

        The new sender finds out whether the batch in progress was committed.
        """
        self._drop_sender()
        self._status.fail(error)

    def _drop_sender(self) -> None:
        """Close the sender. The next sender begins at the delivered offsets."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self._in_progress = None

    def _took_too_long(self) -> bool:
        """Return whether the batch exceeded the transaction timeout, by either clock.

        The monotonic clock stops while a machine sleeps.
        """
        if self._in_progress is None:
            return False
        monotonic_ms2 = self._fs.monotonic_ms() - self._in_progress.began_ms
        wall_ms = self._fs.now_ms() - self._in_progress.wall_ms
        return max(monotonic_ms2, wall_ms) >= _TRANSACTION_TIMEOUT_MS

    def _fenced_error(self) -> ProducerFencedError:
        return ProducerFencedError(
            f"another forwarder of the name {self._settings.name!r} ships this directory now, with the transactional "
            f"id {self.transactional_id!r}; the open transaction of this forwarder is aborted. Run only one of them, "
            "or give them different names and different topics"
        )

    # -- choice of partitions ----------------------------------------------------------

    def _target_names(self) -> dict[str, str]:
        """Return the topics to ship: local name to the name in the cluster."""
        names = self._settings.topics
        if names is None:
            names = [
                name for name in self._logdir.topics() if not name.startswith("__")
            ]
            names = [name for name in names if not name.endswith(QUARANTINE_SUFFIX)]
        rename = self._settings.rename
        if rename is None:
            return {name: name for name in names}
        return {name: rename(name) for name in names}

    def _check_names(self) -> None:
        """Check the names of the topics.

        Raises:
            TopicNotFoundError: A topic does not exist.
            InvalidConfigError: Two topics have the same name in the cluster.
        """
        target_names = self._target_names()
        for name in target_names:
            if name not in self._logdir:
                raise TopicNotFoundError(
                    f"topic {name!r} is not in the directory", path=self._logdir.path
                )
        for target in target_names.values():
            sources = [name for name, other in target_names.items() if other == target]
            if len(sources) > 1:
                raise InvalidConfigError(
                    "two topics would be shipped to the same remote topic",
                    expected="different remote names",
                    found=f"{' and '.join(sources)} to {target}",
                )

    def _find_partitions(self) -> None:
        """Add new partitions.

        Raises:
            RemoteTopicError: Topics or partitions are missing in the cluster.
        """
        self._logdir.refresh()
        self._check_names()
        target_names = self._target_names()
        known_sources = {part.source for part in self._partitions.values()}
        new_sources = [
            (name, number)
            for name in target_names
            for number in self._logdir.partitions(name)
        ]
        new_sources = [source for source in new_sources if source not in known_sources]
        if not new_sources:
            return
        failure: LogcoreError | None = None
        try:
            self._check_topics(
                {
                    target_names[topic]: max(self._logdir.partitions(topic)) + 1
                    for topic, _ in new_sources
                }
            )
        except RemoteTopicError as error:
            if not self._partitions:
                raise
            failure = error  # of the new partitions; the others continue
        if self._sender is not None:
            # The next sender reads the progress of the new partitions together with all
            # others.
            self._drop_sender()
        for source in new_sources:
            target = (target_names[source[0]], source[1])
            max_records = self._settings.max_records
            part = ShippedPartition(
                source=source, target=target, max_limit=max_records, limit=max_records
            )
            self._partitions[target] = part
            if failure is not None:
                self._stop(part, failure)

    def _check_topics(self, counts: Mapping[str, int]) -> None:
        missing = missing_topics(counts, self._cluster.partition_counts(counts))
        if missing and self._settings.create_topics:
            self._cluster.create_topics(
                {name: requested for name, (requested, _) in missing.items()}
            )
            missing = missing_topics(counts, self._cluster.partition_counts(counts))
            if missing:
                raise RemoteUnavailableError(
                    f"the cluster does not list its new topics yet: {', '.join(missing)}"
                )
        if missing:
            missing_text = ", ".join(
                f"{name}: {existing} of {requested} partitions"
                for name, (requested, existing) in missing.items()
            )
            raise RemoteTopicError(
                "topics are missing in the cluster, or have too few partitions; create them with create_topics=True "
                f"(--create-topics), or with {advice_to_create(missing)}",
                found=missing_text,
            )

    # -- first offsets -----------------------------------------------------------------

    def _connect(self) -> ClusterSender:
        """Return a new sender, and set every partition to its delivered offset.

        With transactions, the progress is read after the sender is created. Creating
        the sender ends an open transaction, so the progress does not change any more.
        """
        if not self._status.attempts:
            self._status.state = "connecting"
        recorded = self._read_progress()
        if self._progress_owner == "directory":
            sender = self._cluster.plain_sender()
            progress = {**recorded.progress, **self._recorded}
        else:
            sender = self._cluster.transactional_sender(
                self.transactional_id, self.group_id
            )
            try:
                progress = self._cluster.committed(
                    self.group_id, list(self._partitions)
                )
            except BaseException:
                sender.close()
                raise
            # An earlier forwarder with this name did not use transactions.
            if recorded.owner == "directory":
                for target, recorded_progress in recorded.progress.items():
                    progress[target] = max(
                        recorded_progress, progress.get(target, recorded_progress)
                    )
        for target, part in self._partitions.items():
            if part.failure is None:
                self._set_start(
                    part, progress.get(target), recorded.progress.get(target)
                )
        return sender

    def _read_progress(self) -> RecordedProgress:
        """Return the recorded progress of this forwarder.

        Raises:
            ShippingError: The progress was recorded for another cluster, and does not
                apply to this cluster.
        """
        if not self._cluster_id:
            self._cluster_id = self._cluster.cluster_id()
        recorded = self._progress_store.read()
        if recorded is None:
            return RecordedProgress(self._progress_owner, self._cluster_id, {})
        if recorded.cluster_id != self._cluster_id:
            raise ShippingError(
                f"the forwarder {self._settings.name!r} has shipped to another cluster before; use another name",
                expected=f"cluster {recorded.cluster_id}",
                found=self._cluster_id,
            )
        return recorded

    def _set_start(
        self,
        part: ShippedPartition,
        progress: ShippedProgress | None,
        recorded: ShippedProgress | None,
    ) -> None:
        committed = None
        if progress is not None:
            committed = progress.offset
        try:
            log = self._log(part)
            if progress is not None:
                self._check_last_record(log, progress)
        except ResourceError:
            raise
        except (
            LogcoreError
        ) as error:  # another log, damaged or deleted; the others continue
            self._stop(part, error)
            return
        # Clusters delete the offsets of an inactive group after a week. The delivered
        # offset in memory is still valid then.
        start_offset = committed
        if part.has_position and committed is None:
            start_offset = part.delivered
        recorded_offset = None
        if recorded is not None:
            recorded_offset = recorded.offset
        begin = self._decide_start(part, log, start_offset, recorded_offset)
        if begin is None:
            return
        part.set_position(committed, begin)
        if progress is not None:
            part.fingerprint = progress.fingerprint
            self._recorded[part.target] = progress

    def _check_last_record(self, log: Log, progress: ShippedProgress) -> None:
        """Check that the log still contains the last shipped record.

        Raises:
            DivergedError: The log contains another record at that offset.
        """
        offset = fingerprint_offset(progress.fingerprint)
        if offset is None or not log.log_start_offset <= offset < log.high_watermark:
            return
        record: Record | None = log.get(offset)
        if record is not None and record.offset != offset:
            record = None  # compaction has removed it
        check_fingerprint(
            progress.fingerprint, record, is_compacted=log.config.is_compacted
        )

    def _decide_start(
        self,
        part: ShippedPartition,
        log: Log,
        committed: int | None,
        recorded: int | None,
    ) -> Begin | None:
        """Return the offset to continue at, None if the partition was stopped."""
        known = KnownOffsets(
            committed=committed,
            recorded=recorded,
            log_start=log.log_start_offset,
            log_end=log.high_watermark,
        )
        decision = resume(
            known, on_gap=self._settings.on_gap, on_lost=self._settings.on_lost
        )
        if isinstance(decision, Stop):
            self._stop(part, decision.error)
            return None
        if decision.skipped:
            self._counts.skipped += decision.skipped
            text = "forwarder %s: %d offsets of %s-%d were deleted before they were shipped"
            log_line(
                "shipping",
                WARNING,
                text,
                self._settings.name,
                decision.skipped,
                *part.source,
            )
        return decision

    def _stop(self, part: ShippedPartition, error: LogcoreError) -> None:
        part.failure = error
        log_line(
            "shipping",
            WARNING,
            "%s-%d is not shipped any more: %s",
            *part.source,
            error,
        )

    # -- reading -----------------------------------------------------------------------

    def _log(self, part: ShippedPartition) -> Log:
        """Return the log of a partition, after checking the topic id.

        Raises:
            DivergedError: The topic was deleted and created again, so the shipped
                offsets are those of another log.
        """
        topic_id = str(self._logdir.topic_id(part.source[0]))
        log = self._logdir.partition(*part.source)
        if part.delivered and part.topic_id not in ("", topic_id):
            raise DivergedError(
                "the topic was deleted and created again since its records were shipped",
                path=log.path,
                expected=f"topic id {part.topic_id}",
                found=topic_id,
            )
        part.topic_id = topic_id
        log.refresh()
        return log

    def _end(self, part: ShippedPartition) -> int:
        log = self._logdir.partition(*part.source)
        log.refresh()
        return log.last_stable_offset

    def _read(self) -> _BatchInProgress | None:
        """Read the next batch, from all partitions in round-robin order.

        Return None if it is empty.
        """
        began_ms = self._fs.monotonic_ms()
        parts = [part for part in self._partitions.values() if part.failure is None]
        builder = _BatchBuilder(self._settings.max_records, self._settings.batch_bytes)
        for index in range(len(parts)):
            part = parts[(self._first_index + index) % len(parts)]
            try:
                self._read_partition(part, builder)
            except (RemoteUnavailableError, ResourceError):
                raise
            except (
                LogcoreError
            ) as error:  # a damaged or deleted log; the others continue
                self._stop(part, error)
            if (
                builder.is_full
                or self._fs.monotonic_ms() - began_ms >= self._settings.max_ms
            ):
                break
        self._first_index += 1
        # Progress is also committed without records: after skipped offsets, and once
        # per _REFRESH_MS for all partitions.
        is_due = began_ms >= self._next_refresh_ms
        to_commit = [
            part for part in parts if part.needs_commit or (is_due and part.delivered)
        ]
        progress = {
            part.target: ShippedProgress(part.delivered, part.fingerprint)
            for part in to_commit
        } | builder.progress
        if is_due:
            self._next_refresh_ms = began_ms + _REFRESH_MS
        if not progress:
            return None
        batch = OutgoingBatch(builder.records, progress)
        return _BatchInProgress(batch, builder.size_bytes, began_ms, self._fs.now_ms())

    def _read_partition(self, part: ShippedPartition, builder: _BatchBuilder) -> None:
        log = self._log(part)
        # Retention deleted records before they were shipped, or the log was truncated
        # or recreated.
        if not log.log_start_offset <= part.position <= log.high_watermark:
            begin = self._decide_start(part, log, part.delivered, None)
            if begin is None:
                return
            part.skip_to(begin.offset)
            part.needs_commit = True
        end = log.last_stable_offset
        if part.position >= end:
            return
        try:
            records = log.read(part.position, end, isolation="read_committed")
        except OffsetOutOfRangeError:
            return  # retention has just deleted the records; the next step calls resume()
        position = builder.add(part, records, end)
        if part.target in builder.records:
            part.set_position_after_read(position)
        else:  # markers, and records of aborted transactions
            part.skip_to(position)

    # -- outcomes ----------------------------------------------------------------------

    def _finish_batch(self, outcome: Outcome) -> int:
        """Process the result of the batch in progress.

        Return the number of delivered records.
        """
        in_progress = self._in_progress
        assert in_progress is not None
        batch = in_progress.batch
        delivered = 0
        undelivered: dict[Partition, list[Record]] = {}
        for target, records in batch.records.items():
            delivered_end = outcome.delivered.get(
                target, self._partitions[target].delivered
            )
            undelivered_records = [
                record for record in records if record.offset >= delivered_end
            ]
            # Records are delivered in order.
            count = len(records) - len(undelivered_records)
            delivered += count
            undelivered[target] = undelivered_records
            if count:
                self._partitions[target].fingerprint = record_fingerprint(
                    records[count - 1]
                )
        for target, next_offset in outcome.delivered.items():
            self._partitions[target].record_delivered(next_offset)
            self._recorded[target] = ShippedProgress(
                next_offset, self._partitions[target].fingerprint
            )
        self._counts.records += delivered
        if outcome.refused or outcome.failed:
            self._drop_sender()
        else:
            self._counts.bytes += in_progress.size_bytes
            self._counts.batches += 1
            self._in_progress = None
            for target in batch.records:
                self._partitions[target].rewind()
        for target, reason in outcome.failed.items():
            self._stop(
                self._partitions[target],
                RemoteTopicError(
                    f"the cluster refuses {target[0]}-{target[1]}: {reason}"
                ),
            )
        for target, reason in outcome.refused.items():
            self._handle_refused(self._partitions[target], undelivered[target], reason)
        if delivered or outcome.delivered:
            self._status.succeed("shipping")
        self._write_progress(is_due=self._progress_owner == "directory")
        return delivered

    def _handle_refused(
        self, part: ShippedPartition, records: list[Record], reason: str
    ) -> None:
        if not part.reduce_limit(len(records)):
            return
        record = records[0]
        if self._settings.on_error == "fail":
            self._stop(
                part,
                RecordRefusedError(
                    f"the cluster refuses a record of {part.source[0]}-{part.source[1]}: {reason}. Change the topic "
                    "there, or skip the record with on_error='quarantine' (--on-error quarantine)",
                    offset=record.offset,
                ),
            )
            return
        count = len(self._logdir.partitions(part.source[0]))
        if self._quarantine.append_once(part.source, count, record, reason):
            self._counts.quarantined += 1
            log_line(
                "shipping",
                WARNING,
                "a record of %s-%d was refused and quarantined: %s",
                *part.source,
                reason,
            )
        part.skip_to(record.offset + 1)
        part.needs_commit = True

    def _write_progress(self, *, is_due: bool = False, is_last: bool = False) -> None:
        """Write the progress, for the next forwarder and for local retention."""
        now_ms = self._fs.monotonic_ms()
        if not is_due and not is_last and now_ms < self._next_write_ms:
            return
        if not self._recorded:
            return
        stored = self._progress_store.read()
        if stored is not None:
            stored_progress = stored.progress
        else:
            stored_progress = {}
        recorded = RecordedProgress(
            self._progress_owner,
            self._cluster_id,
            {**stored_progress, **self._recorded},
        )
        if recorded != stored:
            self._progress_store.write(recorded)
        if now_ms >= self._next_write_ms or is_last:
            self._next_write_ms = now_ms + _WRITE_MS
            self._commit_local_group()

    def _commit_local_group(self) -> None:
        """Commit the progress for the local group, so that retention may delete the
        shipped records.
        """
        if not self._commits_local_group:
            return
        if self._consumer is None:
            group_id = f"forward-{self._settings.name}"
            self._consumer = self._logdir.consumer(
                group_id=group_id, enable_auto_commit=False
            )
        parts = [
            part for part in self._partitions.values() if part.target in self._recorded
        ]
        with contextlib.suppress(ResourceError):  # it is committed again in a second
            self._consumer.commit({part.source: part.delivered for part in parts})

    # -- metrics -----------------------------------------------------------------------

    def metrics(self) -> ForwardMetrics:
        """Return the current metrics; see ForwardMetrics.

        The ends of the logs are read for this.
        """
        lag_records = 0
        lag_bytes = 0
        oldest_ms: int | None = None
        for part in self._partitions.values():
            with contextlib.suppress(LogcoreError):  # damaged, or deleted
                log = self._logdir.partition(*part.source)
                if part.delivered >= log.high_watermark:
                    continue
                lag_records += log.high_watermark - part.delivered
                lag_bytes += _bytes_from(log, part.delivered)
                first_ms = log.get(part.delivered).timestamp_ms
                if oldest_ms is None:
                    oldest_ms = first_ms
                else:
                    oldest_ms = min(oldest_ms, first_ms)
        lag_age_ms = 0
        if oldest_ms is not None:
            lag_age_ms = max(0, self._fs.now_ms() - oldest_ms)
        buffered_bytes = 0
        if self._in_progress is not None:
            buffered_bytes = self._in_progress.size_bytes
        counts = self._counts
        return ForwardMetrics(
            state=self._status.state,
            record_count=counts.records,
            size_bytes=counts.bytes,
            batch_count=counts.batches,
            retry_count=self._status.retry_count,
            quarantined_count=counts.quarantined,
            skipped_offsets=counts.skipped,
            buffered_bytes=buffered_bytes,
            lag_records=lag_records,
            lag_bytes=lag_bytes,
            lag_age_ms=lag_age_ms,
            failures={
                part.source: str(part.failure)
                for part in self._partitions.values()
                if part.failure is not None
            },
            reason=self._status.reason,
        )


@attrs.define
class _BatchBuilder:
    """Assembles a batch from several partitions."""

    #: Number of records that the batch can still accept.
    free_records: int
    #: Maximum of `size_bytes`.
    max_bytes: int
    records: dict[Partition, list[Record]] = attrs.Factory(dict)
    progress: dict[Partition, ShippedProgress] = attrs.Factory(dict)
    size_bytes: int = 0
    is_full: bool = False

    def add(self, part: ShippedPartition, records: Iterable[Record], end: int) -> int:
        """Add records until the batch is full. Return the next offset to read.

        An empty batch accepts at least one record of any size.
        """
        added: list[Record] = []
        position = end
        for record in records:
            size = _size(record)
            fits = self.size_bytes + size <= self.max_bytes and self.free_records > 0
            if not fits and (added or self.records):
                self.is_full = True
                position = record.offset
                break
            added.append(record)
            self.size_bytes += size
            self.free_records -= 1
            if len(added) == part.limit:
                position = record.offset + 1
                break
        if added:
            self.records[part.target] = added
            self.progress[part.target] = ShippedProgress(
                position, record_fingerprint(added[-1])
            )
        elif self.is_full:
            position = part.position  # no record was added
        return position


def _size(record: Record) -> int:
    size = _RECORD_BYTES + len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += len(name) + len(value or b"")
    return size


def _bytes_from(log: LogReader, offset: int) -> int:
    """Return the size of the log files from the batch that contains `offset` on."""
    segments = segments_between(log, offset, log.high_watermark)
    total = sum(segment.size_bytes for segment in segments)
    if segments:
        return total - segments[0].find(offset)
    return 0
