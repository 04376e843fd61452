"""A directory of partition logs: its topics, their settings, and the logs opened in it.

Rules:
- Kafka's lock covers the whole directory. Opening it for writing first completes work
  that a crash interrupted.
- A partition is opened at its first use, and remains open until the directory is
  closed.
- All methods may be called from several threads. One lock orders changes of topics and
  openings of logs.

directory/topics.py keeps the topics, directory/open_logs.py the open logs, and
directory/maintenance.py does the work of tick(). log.py appends and reads, and
consumer/ reads topics for members of a group. This module starts no thread.
"""

from __future__ import annotations

import contextlib
import operator
import os
import uuid
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack, overload

from logcore.acquire import claim_directory
from logcore.claim import Claim
from logcore.closeable import Closeable
from logcore.config import Durability, LogConfig
from logcore.directory.forking import fork_topic
from logcore.directory.identity import DirectoryIdentity, check_kind
from logcore.directory.incidents import Incidents
from logcore.directory.maintenance import (
    DirectoryMaintenance,
    MaintenanceConfig,
    high_watermarks,
)
from logcore.directory.open_logs import OpenLogs
from logcore.directory.shared_topics import SharedTopics
from logcore.directory.topic_file import (
    NewTopics,
    TopicEntry,
    new_id,
)
from logcore.directory.topics import TopicDescription as TopicDescription  # noqa: PLC0414 -- others import it from here
from logcore.directory.topics import TopicRegistry
from logcore.directory_host import DirectoryHost
from logcore.errors import (
    ConsumerStateError,
    CorruptBatchError,
    CorruptLogError,
    InvalidConfigError,
    LogcoreError,
    LogNotFoundError,
    StorageReadError,
    TopicExistsError,
    TopicNotFoundError,
)
from logcore.format.columns import TOPIC_COLUMNS
from logcore.fs import FS, OS
from logcore.kernels import Receipt, Record, TopicRecord
from logcore.kernels.layout import Buffer, HeadersInput, Level, Time
from logcore.log import (
    Log,
    OnCorruption,
    check_on_corruption,
    check_path,
)
from logcore.metadata.checkpoint import ensure_directory, expecting_directory
from logcore.metadata.filenames import (
    LOG,
    OFFSETS_TOPIC,
    TRANSACTIONS_TOPIC,
    file_name,
)
from logcore.partition.checksum_file import ScrubProgress, ScrubReport, finish, unopened
from logcore.partition.scan import Scan
from logcore.partition.segment_files import list_bases
from logcore.partitioner import Partitioner
from logcore.reader import Isolation, LogReader
from logcore.recordbatch import time_ms
from logcore.reporting import Incident
from logcore.table import TopicTable
from logcore.topic import Order, Position, Topic

# Imported in the methods that use them: every user waits for `import logcore`.
if TYPE_CHECKING:
    import duckdb

    from logcore.backup import SnapshotResult
    from logcore.consumer.consumer import Consumer
    from logcore.consumer.settings import ConsumerOptions, OffsetAndMetadata
    from logcore.coordinators.group_descriptions import GroupDescription
    from logcore.format.transaction_records import StoredTransaction
    from logcore.legacy.connector import Connector
    from logcore.legacy.simple_consumer import SimpleConsumer
    from logcore.producer.producer import Producer
    from logcore.producer.settings import ProducerOptions, TransactionOptions
    from logcore.producer.transactional_producer import TransactionalProducer

#: The member under which the directory itself is claimed; no partition directory can
#: have this name.
_MEMBER: Final = "."
#: Maximum number of topics that a repr names.
_SHOWN_TOPICS: Final = 8
#: Maximum number of partitions that an error names.
_SHOWN_PARTITIONS: Final = 8


def open_dir(
    path: str | os.PathLike[str],
    *,
    create: bool = False,
    read_only: bool = False,
    config: Mapping[str, object] | None = None,
    durability: str | Durability = "group",
    maintenance: MaintenanceConfig | None = None,
    on_corruption: OnCorruption = "fail",
    on_incident: Callable[[Incident], None] | None = None,
    shared: bool = False,
    replicated: bool = False,
    fs: FS = OS,
) -> LogDir:
    """Open a directory of partitions, for example data with data/orders-0 and
    data/orders-1.

    Opening for writing acquires Kafka's lock.

    Args:
        path: The directory.
        create: Create the directory if it does not exist.
        read_only: Acquire no lock and write nothing. This works beside a running
            writer.
        config: Settings by Kafka's names, for topics that do not set them.
        durability: When an append to any of the logs returns; see Durability.
        maintenance: Limits of the directory, and how tick() enforces them.
        on_corruption: The reaction to damage in a log; see logcore.open().
        on_incident: A function for errors in work that no caller waits for. It is
            called in the thread that does the work, for the 1st, 10th, 100th error of
            each kind and so on; see LogDir.incidents().
        shared: Other processes may open the directory for writing too, if they also
            pass shared=True; see docs/sharing.md.
        replicated: A broker of a cluster owns the directory. Its topics are placed by
            place_topic(), and advance_high_watermark() moves the high watermarks. Logs
            accept appends after Log.begin_epoch(), and only append_as_follower() before.
        fs: The files, the clock and the locks: the operating system's, or a
            logcore.testing.SimulatedDisk.

    Raises:
        LogNotFoundError: the directory does not exist, and `create` is false.
        LogLockedError: another writer has it open.
        InvalidConfigError: a setting is invalid, or arguments contradict each other.
        CorruptLogError: the file of topics is damaged.
        StorageReadError, StorageWriteError, DiskFullError, ResourceError: the system
            failed.
    """
    directory = check_path(path)
    defaults = LogConfig.parse(config)
    policy = Durability.parse(durability)
    if read_only and create:
        raise InvalidConfigError("a directory cannot be created read-only")
    check_on_corruption(on_corruption)
    real = fs.real_path(directory)
    if fs.is_directory(real):
        check_kind(fs, real, create=create)
    elif not create:
        raise LogNotFoundError(
            "there is no log directory here; create=True makes one", path=directory
        )
    if read_only and shared:
        raise InvalidConfigError(
            "read_only=True works beside any writer; shared=True is for those who write"
        )
    if replicated and (read_only or shared):
        raise InvalidConfigError(
            "replicated=True is for the one broker that writes the directory"
        )
    claim = None
    if not read_only:
        ensure_directory(fs, real)
        claim = claim_directory(fs, real, _MEMBER, shared=shared)
    try:
        return LogDir(
            fs,
            real,
            claim,
            dict(config or {}),
            defaults,
            policy,
            maintenance or MaintenanceConfig(),
            on_corruption,
            on_incident,
            is_replicated=replicated,
        )
    except BaseException:
        if claim is not None:
            claim.fail()
            claim.release()
        raise


class LogDir(Closeable):
    """A directory of partition logs. logcore.open_dir() creates it; a `with` block
    closes it.

    All methods may be called from several threads. `cluster_id` and `node_id` are the
    values in meta.properties.
    """

    def __init__(
        self,
        fs: FS,
        path: str,
        claim: Claim | None,
        given: Mapping[str, object],
        defaults: LogConfig,
        policy: Durability,
        maintenance: MaintenanceConfig,
        on_corruption: OnCorruption,
        on_incident: Callable[[Incident], None] | None = None,
        *,
        is_replicated: bool = False,
    ) -> None:
        """Create the directory object. Users call open_dir()."""
        #: The path of the directory.
        self.path = path
        self.is_replicated = is_replicated
        #: Settings for topics without values of their own.
        self.config = defaults
        self.durability = policy
        self._fs = fs
        self._claim = claim
        #: Whether other processes may have the directory open for writing too.
        self.is_shared = claim is not None and claim.is_shared
        self.given_config = given
        #: The partitioner of each topic, from its first append on; see append().
        self._partitioners: dict[str, Partitioner] = {}
        self._incidents = Incidents(fs, on_incident)
        self._registry = TopicRegistry(fs, path, self, claim, self._incidents, given)
        self._maintenance = DirectoryMaintenance(
            fs, self, claim, self._incidents, maintenance
        )
        self._logs = OpenLogs(
            fs,
            self._registry,
            claim,
            self._maintenance,
            self._incidents,
            on_corruption,
            is_replicated=is_replicated,
        )
        self._sharing = SharedTopics(fs, self, claim, self._registry, self._incidents)
        #: The methods for brokers and coordinators.
        self.host = DirectoryHost(
            fs,
            self,
            claim,
            self._registry,
            self._logs,
            self._sharing,
            self._incidents,
            is_replicated=is_replicated,
        )
        try:
            if claim is None:
                self._begin(finishes=False)
            else:
                with claim.alone() as is_alone:
                    self._begin(finishes=is_alone)
        except BaseException:
            self.host.is_closed = True
            for log in self._logs.known.values():
                # The first error is the one to report.
                with contextlib.suppress(LogcoreError):
                    log.close()
            raise

    def _begin(self, *, finishes: bool) -> None:
        """Use the directory. With `finishes`, complete interrupted work first, because
        no other process has the directory open for writing.
        """
        claim = self._claim
        with contextlib.ExitStack() as stack:
            if claim is not None:
                stack.enter_context(claim.changing())
            self._identity = DirectoryIdentity(
                self._fs, self.path, can_write=claim is not None
            )
            if finishes:
                self._registry.finish_interrupted()
            self._registry.reload()
            self._check_cluster()
            if finishes:
                self._registry.complete()
        self.host.is_closed = False
        self.host.deletions.retry_forgetting(self, self.host.lock)
        if finishes and not self.is_replicated:
            self._apply_staged()

    def _check_cluster(self) -> None:
        """Refuse to write a broker's directory outside of its cluster, and the reverse.

        Without the cluster, records would be appended that the other replicas never get.
        """
        if self._claim is None:
            return
        for topic in self._registry.known.values():
            # After a crash, a new replica has no row yet.
            has_row = topic.count or topic.overrides
            if has_row and topic.is_of_cluster != self.is_replicated:
                found = "an ordinary directory"
                if topic.is_of_cluster:
                    found = "the directory of a broker in a cluster"
                raise InvalidConfigError(
                    f"this is {found}",
                    path=self.path,
                    expected="netshim serve --registry for a broker in a cluster, "
                    "or read_only=True",
                    found=f"replicated={self.is_replicated}",
                )

    def _apply_staged(self) -> None:
        """Execute staged writes. tick() repeats a write that fails now, and the
        directory opens without it.
        """
        from logcore.staging import applying

        for path in applying.damaged(self._fs, self.path):
            error = CorruptLogError(
                "the manifest of a staged write is damaged", path=path
            )
            self._incidents.record("staging", path, error)
        with self._incidents.reporting_errors("staging", self.path):
            applying.apply_ready(self._fs, self)

    # -- opening and closing -----------------------------------------------------------

    @property
    def cluster_id(self) -> str:
        return self._identity.cluster_id

    @property
    def node_id(self) -> int:
        return self._identity.node_id

    def __del__(self) -> None:
        # Missing if __init__() failed early.
        host = getattr(self, "host", None)
        if host is None or self._claim is None:
            return
        if not host.is_closed and not host.is_forked:
            warnings.warn(
                f"log directory {self.path} was not closed",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        state = "writing"
        if self.host.is_closed:
            state = "closed"
        elif self._claim is None:
            state = "read-only"
        known = sorted(self._registry.known.copy().items())
        labels = [self._topic_label(topic) for _, topic in known[:_SHOWN_TOPICS]]
        if len(known) > _SHOWN_TOPICS:
            labels.append(f"{len(known) - _SHOWN_TOPICS} others")
        return f"<LogDir {self.path} {state}; {', '.join(labels) or 'no topics'}>"

    def _topic_label(self, topic: TopicEntry) -> str:
        """Return a topic, with the number of its offsets if that is known without
        reading the disk.
        """
        logs = [self.host.opened(topic.name, number) for number in topic.numbers]
        if None in logs:
            return topic.name
        count = sum(
            log.high_watermark - log.log_start_offset for log in logs if log is not None
        )
        return f"{topic.name}: {count} offsets"

    def _repr_html_(self) -> str | None:
        """Return a table of the topics, or None if the directory is closed. A notebook
        then shows the text form.
        """
        if self.host.is_closed:
            return None
        from logcore.summary import directory_html

        self.refresh()
        return directory_html(
            self._fs, self.path, {name: self._paths(name) for name in self.topics()}
        )

    def topic_html(self, name: str) -> str:
        """Return a topic as a small HTML table, for notebooks."""
        from logcore.summary import topic_html

        return topic_html(self._fs, name, self._paths(name))

    def _paths(self, name: str) -> dict[int, str]:
        return {
            number: self._registry.partition_path(name, number)
            for number in self.partitions(name)
        }

    def close(self) -> None:
        """Close every log, write the checkpoints once for all of them, and release the
        lock.

        Closing twice is allowed. If closing a log fails, the other logs are closed too,
        and then the first error is raised.
        """
        with self.host.lock:
            if self._logs.is_released:
                return
            self.host.is_closed = True
            everything = {
                (topic.name, n)
                for topic in self._registry.known.values()
                for n in topic.numbers
            }
            self._logs.close_all(
                everything,
                self.host.coordinators.close,
                is_forked=self.host.is_forked,
            )

    # -- topics ------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Return the names of the topics, sorted."""
        self.host.check_open()
        if self.is_shared:
            self.refresh()
        return sorted(self._registry.known)

    @property
    def is_read_only(self) -> bool:
        """Whether the directory was opened with read_only=True."""
        return self._claim is None

    def __contains__(self, topic: object) -> bool:
        if (
            self.is_shared
            and topic not in self._registry.known
            and not self.host.is_closed
        ):
            self.refresh()
        return topic in self._registry.known

    def refresh(self) -> None:
        """Read the topics again, in a directory that is shared, or that was opened
        read-only beside a writer.
        """
        with self.host.lock:
            self.host.check_open()
            if self._claim is None:
                self._registry.reload()
            else:
                self._sharing.follow()

    def _topic(self, name: str) -> TopicEntry:
        self.host.check_open()
        if self.is_shared and name not in self._registry.known:
            self.refresh()
        return self._registry.topic(name)

    def topic_id(self, name: str) -> uuid.UUID:
        """Return Kafka's id of a topic.

        In a directory opened read-only, the id is all zero if no file contains it.
        """
        known = self._topic(name).topic_id
        if known is not None:
            return known
        with self.host.lock:
            self.host.check_open()
            return self._registry.topic_id(name)

    def describe_topic(self, name: str) -> TopicDescription:
        """Return a description of a topic and its partitions. Raises
        TopicNotFoundError.
        """
        with self.host.lock:
            return self._registry.describe(self._topic(name))

    def settings(self, name: str) -> LogConfig:
        """Return the effective settings of a topic. Raises TopicNotFoundError."""
        return self._registry.settings(self._topic(name))

    def partitions(self, name: str) -> tuple[int, ...]:
        """Return the partition numbers of a topic, sorted. Raises TopicNotFoundError."""
        return self._topic(name).numbers

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, object] | None = None,
        *,
        exist_ok: bool = False,
    ) -> bool:
        """Create a topic with its partitions, each an empty log.

        With `exist_ok`, an existing topic is not changed. It keeps its own partitions
        and settings. Several threads and processes may create it concurrently. Returns
        whether this call created the topic.

        Raises:
            InvalidNameError: the name is invalid, or differs from another topic's only
                in '.' and '_', which Kafka's metrics confuse.
            InvalidConfigError: a setting or the number of partitions is invalid.
            TopicExistsError: the topic exists; with `exist_ok`, it is being deleted.
        """
        if exist_ok and name in self:
            return False
        try:
            self.create_topics({name: (partitions, config)})
        except TopicExistsError:
            if not exist_ok or name not in self:
                raise
            return False
        return True

    def create_topics(self, wanted: NewTopics, *, check_only: bool = False) -> None:
        """Create several topics, or none of them if one cannot be created.

        `wanted` maps each name to the number of partitions and the settings. With
        `check_only`, here and in the methods below, errors are raised, and nothing is
        changed. Raises the same errors as create_topic().
        """
        with self.host.lock:
            self.host.check_standalone()
            self.refresh()
            deleted_elsewhere = self._registry.deleting_elsewhere.intersection(wanted)
            is_half_deleted = not self._registry.deleting.keys().isdisjoint(wanted)
        if is_half_deleted:  # an earlier creation or deletion failed half way, for example on a full disk
            self.host.deletions.finish(self.host.lock)
        if deleted_elsewhere:
            self.host.deletions.forget_remaining(self, deleted_elsewhere)
        with self.host.lock:
            self.host.check_writable()
            if deleted_elsewhere:
                self._sharing.finish_crashed_deletions(deleted_elsewhere)
            with self._sharing.changing():
                self._registry.create(wanted, check_only=check_only)

    def fork(
        self, topic: str, at_offset: int | Mapping[int, int] | None, new_topic: str
    ) -> None:
        """Create a topic with the records of another topic below an offset, and with
        its offsets, partitions and settings.

        `at_offset` is an offset for each partition or for all of them. The default is
        the high watermark of each partition. Sealed segments become hard links, which
        take no space until one of the two topics deletes them. Later appends to one
        topic do not change the other one. The new topic exists completely or not at
        all.

        Raises:
            OffsetOutOfRangeError: an offset is outside [log start, high watermark] of its
                partition. Otherwise the errors of create_topic().
        """
        with self.host.lock:
            self.host.check_writable()
            if self.is_shared:
                raise InvalidConfigError(
                    "fork() needs the directory for itself; open it without shared=True"
                )
            source = self._topic(topic)
            overrides = self._registry.overrides_for_copy(source)
            made = TopicEntry(
                new_topic,
                new_id(self._fs),
                len(source.numbers),
                overrides,
                source.numbers,
            )
            if source.numbers != tuple(range(len(source.numbers))):
                raise InvalidConfigError(
                    "the topic has gaps in its partition numbers",
                    found=str(source.numbers),
                )
            self.create_topics(
                {new_topic: (made.count, made.overrides)}, check_only=True
            )
            offsets: dict[int, int | None]
            if isinstance(at_offset, Mapping):
                offsets = {number: at_offset.get(number) for number in source.numbers}
            else:
                offsets = dict.fromkeys(source.numbers, at_offset)
            fork_topic(
                self._fs,
                self._registry,
                self._incidents,
                made,
                lambda number: self.partition(topic, number),
                offsets,
            )

    def snapshot(
        self,
        backup: str | os.PathLike[str],
        *,
        keep: int | None = None,
        tick: Callable[[int], object] | None = None,
    ) -> SnapshotResult:
        """Store a snapshot of the directory in a backup; logcore.restore() reads it.

        The snapshot contains every record that was acknowledged before this call, the
        committed offsets of groups, open transactions, settings and topic ids. Other
        processes may write concurrently, so this also works on a directory that was
        opened with read_only=True. Only what earlier snapshots in the same backup lack
        is stored. On one file system, sealed segments become hard links.

        Args:
            backup: the path of a directory, which is created, or the URL of an object
                store such as s3://bucket/path?region=eu-west-1. The URL needs the extra
                `arrow`, and takes credentials from the environment.
            keep: delete older snapshots, so that this many remain.
            tick: called with the number of bytes that were just read.

        Raises:
            InvalidConfigError: the backup belongs to another log directory.
            CorruptBatchError: the last segment of a partition is damaged.
            CompactionAbandonedError: another process deleted snapshots of the same
                backup, or compacted the same log very often; retriable.
            StorageReadError, StorageWriteError, DiskFullError: the copy failed.
        """
        from logcore.backup import open_store, take_snapshot

        self.host.check_open()
        self.refresh()
        store = open_store(backup, self._fs, create=True)
        topics = list(self._registry.known.values())
        return take_snapshot(self._fs, self, topics, store, keep=keep, tick=tick)

    def add_partitions(
        self, name: str, count: int, *, check_only: bool = False
    ) -> None:
        """Increase the number of partitions of a topic to `count`. Raises
        InvalidConfigError unless `count` is larger than the present number.
        """
        with self.host.lock:
            self.host.check_standalone()
            with self._sharing.changing():
                self._registry.add_partitions(name, count, check_only=check_only)

    def alter_topic(
        self,
        name: str,
        changes: Mapping[str, object | None],
        *,
        check_only: bool = False,
    ) -> None:
        """Change settings of a topic by Kafka's names, all or none of them. None
        restores the default of a setting.
        """
        with self.host.lock:
            self.host.check_writable()
            with self._sharing.changing():
                self._registry.alter(name, changes, check_only=check_only)
            if not check_only:
                self.host.reconfigure(name)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its records, and with the offsets that groups have
        committed for it.

        A running reader reaches the end of its segment, and then raises
        OffsetOutOfRangeError.
        """
        self.host.start_deletion(name)
        self._partitioners.pop(name, None)
        self.host.deletions.forget_and_end(self, self.host.lock, name)

    def delete_group(self, group_id: str) -> None:
        """Delete a consumer group with its committed offsets.

        Raises:
            ConsumerStateError: the group does not exist or has members, or the deletion
                cannot be stored. Otherwise the errors of consumer() with a group.
        """
        from logcore.consumer.offset_stores import delete

        self.host.check_writable()
        refused = delete(
            self.host.coordinators.groups(self),
            self.host.coordinators.present_registry(self),
            group_id,
        )
        if refused is not None:
            raise ConsumerStateError(
                f"group {group_id!r} was not deleted",
                path=self.path,
                found=refused.name,
            )

    def alter_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[tuple[str, int], int | OffsetAndMetadata],
        *,
        force: bool = False,
    ) -> None:
        """Set committed offsets of a group, by (topic, partition). They may be lower
        than the present ones.

        The offsets are durable when this returns. The registry is changed too, if it
        contains offsets of the group. With `force`, the group may have members. They
        lose their partitions, rejoin and begin at these offsets, so unfinished records
        are returned again.

        Raises:
            ConsumerStateError: the group has members, and `force` is not set; or the
                offsets cannot be stored.
            InvalidConfigError: an offset is invalid. Otherwise the errors of consumer()
                with a group.
        """
        from logcore.consumer.offset_stores import alter, committed_rows

        self.host.check_writable()
        groups = self.host.coordinators.groups(self)
        rows = committed_rows(offsets, self._fs.now_ms())
        refused = alter(
            groups,
            self.host.coordinators.present_registry(self),
            group_id,
            rows,
            is_forced=force,
        )
        if refused is not None:
            raise ConsumerStateError(
                f"the offsets of group {group_id!r} were not set",
                path=self.path,
                found=refused.name,
            ) from groups.failure

    def transactions(self) -> dict[str, StoredTransaction]:
        """Return the state of each transactional id, from the records in
        `__transaction_state`.

        Raises:
            LogcoreError: the records cannot be read.
            CorruptLogError: a record has an unknown form.
        """
        if TRANSACTIONS_TOPIC not in self._registry.known:
            return {}
        from logcore.coordinators.stored_transactions import stored_transactions

        logs = [
            self.partition(TRANSACTIONS_TOPIC, number)
            for number in self.partitions(TRANSACTIONS_TOPIC)
        ]
        return stored_transactions(logs)

    def end_transaction(self, transactional_id: str, *, commit: bool) -> None:
        """Commit or abort the open transaction of an id instead of its producer, and
        fence that producer.

        Raises:
            InvalidTransactionStateError: no transaction is open. Otherwise the errors of
                TransactionalProducer.commit_transaction().
        """
        self.host.check_writable()
        self.host.coordinators.transactions(self).end(transactional_id, commit=commit)

    # -- partitions --------------------------------------------------------------------

    def partition(self, topic: str, number: int) -> Log:
        """Return the log of a partition. The first call opens it, and the directory
        closes it.

        Raises:
            TopicNotFoundError: there is no such topic, or no such partition. Otherwise the
                errors of logcore.open().
        """
        log = self._logs.known.get((topic, number))
        if log is not None and not log.is_closed and not self._sharing.is_behind:
            return log
        with self.host.lock:
            if self.is_shared:  # also another process may have deleted the topic, and created another of its name
                self.refresh()
            known = self._topic(topic)
            number = operator.index(number)
            log = self._logs.opened((topic, number))
            if log is not None:
                return log
            if number not in known.numbers:
                expected = f"{len(known.numbers)} others"
                if len(known.numbers) <= _SHOWN_PARTITIONS:
                    expected = f"one of {known.numbers}"
                raise TopicNotFoundError(
                    f"topic {topic!r} has no such partition",
                    path=self.path,
                    expected=expected,
                    found=number,
                )
            committed = self._maintenance.settings.committed or self.committed_offsets
            return self._logs.open(known, number, self.durability, committed)

    # -- records -----------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """Return a topic, for appends and reads. Raises TopicNotFoundError."""
        self._topic(name)
        return Topic(self, name)

    def append(
        self,
        topic: str,
        value: Buffer | None,
        *,
        key: Buffer | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        partition: int | None = None,
        durability: Level | None = None,
        expected: Mapping[Buffer, int] | None = None,
    ) -> Receipt:
        """Append one record to a partition of a topic. The receipt contains the
        partition.

        The default partition depends on the key, as in Kafka's Java client (murmur2).
        Records without a key use one partition for 16 KiB, then the next one. For the
        other arguments see Log.append().

        Raises:
            InvalidConfigError: partitions are missing, so that the key has none, or a key of
                `expected` belongs to another partition. Otherwise the errors of Log.append()
                and partition().
        """
        if partition is None:
            partition = self.choose_partition(topic, key, value, expected or ())
        log = self._logs.known.get((topic, partition))
        if log is None or log.is_closed or self._sharing.is_behind:
            log = self.partition(topic, partition)
        return log.append(
            value,
            key=key,
            headers=headers,
            timestamp_ms=timestamp_ms,
            durability=durability,
            expected=expected,
        )

    def history(
        self,
        topic: str,
        key: Buffer,
        start: int | None = None,
        end: int | None = None,
    ) -> Iterator[Record]:
        """Return an iterator over the records of a key; see Log.history().

        Reads the partition that append() chooses for the key.
        """
        partition = self.choose_partition(topic, key, None)
        return self.partition(topic, partition).history(key, start, end)

    def choose_partition(
        self,
        topic: str,
        key: Buffer | None,
        value: Buffer | None,
        expected: Iterable[Buffer] = (),
    ) -> int:
        """Return the partition that append() chooses for a record.

        Raises the same errors as append(), also if a key of `expected` belongs to
        another partition.
        """
        known = self._registry.known.get(topic) or self._topic(topic)
        partitioner = self._partitioners.get(topic)
        if partitioner is None or partitioner.numbers is not known.numbers:
            partitioner = self._partitioners[topic] = Partitioner(known.numbers)
        partition = partitioner.choose(key, value)
        for other in expected:
            if partitioner.choose(other, None) != partition:
                raise InvalidConfigError(
                    "a key of `expected` belongs to another partition than the record",
                    expected=f"keys of partition {partition}",
                    found=repr(other)[:80],
                )
        return partition

    def read(
        self,
        topic: str,
        start: Position | None = None,
        end: Position | None = None,
        *,
        partitions: Iterable[int] | None = None,
        isolation: Isolation = "read_uncommitted",
        order: Order = "partition",
    ) -> Iterator[TopicRecord]:
        """Return an iterator over the records of a topic; see Topic.read()."""
        return self.topic(topic).read(
            start, end, partitions=partitions, isolation=isolation, order=order
        )

    def scan(
        self,
        topic: str,
        start: Position | None = None,
        end: Position | None = None,
        *,
        partitions: Iterable[int] | None = None,
        isolation: Isolation = "read_uncommitted",
        columns: Iterable[str] = TOPIC_COLUMNS,
    ) -> Scan:
        """Return an iterator over the records of a topic as columns; see Topic.scan()."""
        return self.topic(topic).scan(
            start, end, partitions=partitions, isolation=isolation, columns=columns
        )

    def sql(
        self, query: str, *, text: bool = True, schemas: bool | str = False
    ) -> duckdb.DuckDBPyRelation:
        """Return the result of a query in DuckDB's SQL over the topics, each a table.

        The columns are partition, offset, timestamp, key, value and headers;
        header(headers, 'trace') is a header, and value->>'$.price' a field of JSON. The
        result has df(), pl(), fetchall() and other methods, which read the logs; keep
        the directory open until then.

        With `text`, keys, values and headers are VARCHAR, in which a byte that is not
        UTF-8 is shown as \\xFF. Otherwise they are BLOB. With `schemas`, keys and values
        that name a schema are decoded to JSON, by the topic `_schemas` of the directory
        or by the schema registry with this URL. A value that cannot be decoded is shown
        as it is stored, and the logger `logcore.schemas` gets each reason once.

        Raises:
            LogNotFoundError: there is no topic `_schemas`.
            RemoteUnavailableError: the registry does not answer.
            QueryError: the query is wrong, or returns no rows.
            MissingDependencyError: duckdb or pyarrow is not installed (extra sql).
        """
        from logcore.query.sql import relation

        self.host.check_open()
        return relation(self, query, is_text=text, schemas=schemas)

    def tail(
        self,
        topic: str,
        start: Position | None = None,
        *,
        partitions: Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> Iterator[TopicRecord]:
        """Return an iterator over the records of a topic as they are appended; see
        Topic.tail().
        """
        return self.topic(topic).tail(start, partitions=partitions, timeout=timeout)

    def table(
        self, topic: str, *, isolation: Isolation = "read_uncommitted"
    ) -> TopicTable:
        """Return a read-only mapping of the latest value of each key in all partitions.
        It follows the partitions. Raises the errors of partition().
        """
        logs = self.topic(topic)._logs(None, None, None)
        return TopicTable([log.table(isolation=isolation) for _, log in logs])

    def groups(self) -> dict[str, GroupDescription]:
        """Return the consumer groups of the directory by id, with their members,
        committed offsets and lag.

        This reads the whole `__consumer_offsets` topic, and the registry of a shared
        directory. It works in a directory that is opened read-only, beside its writers.
        Raises the same errors as reading a log.
        """
        from logcore.coordinators.group_descriptions import describe_groups

        return describe_groups(self._fs, self)

    def committed_offsets(self, topic: str, number: int) -> dict[str, int]:
        """Return the last committed offset of each consumer group for a partition, by
        group.

        This reads the whole `__consumer_offsets` topic of the directory. It suits a
        retention policy that waits for groups, but not a hot path. Raises the same
        errors as reading a log.
        """
        if OFFSETS_TOPIC not in self._registry.known:
            return {}
        from logcore.coordinators.stored_offsets import committed_in

        logs: list[LogReader] = [
            self.partition(OFFSETS_TOPIC, part)
            for part in self.partitions(OFFSETS_TOPIC)
        ]
        return committed_in(logs).get((topic, number), {})

    def consumer(
        self,
        *,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[ConsumerOptions],
    ) -> Consumer:
        """Return a consumer of topics of this directory, alone or as a member of a
        group; see docs/consumer.md.

        `config` contains settings by Kafka's dotted names, as for producer(). For
        `settings`, see ConsumerOptions.

        Raises:
            InvalidConfigError: a setting is invalid.
            ReadOnlyLogError: a group was given, and the directory was opened read-only.
            ConsumerStateError: a group was given, and a broker of this process serves the
                directory. With a group, also the errors of reading `__consumer_offsets`.
        """
        from logcore.consumer.consumer import Consumer
        from logcore.consumer.settings import consumer_settings

        self.host.check_open()
        chosen = consumer_settings(config, settings)
        groups = None
        registry = None
        if chosen.group_id is not None:
            self.host.check_writable()
            groups = self.host.coordinators.groups(self)
        if chosen.uses_registry:
            registry = self.host.coordinators.registry(self)
        return Consumer(self._fs, self, groups, chosen, registry)

    def connector(
        self, group_id: str, /, **settings: Unpack[ConsumerOptions]
    ) -> Connector:
        """Return streams of records for threads that share the work of a group; see
        logcore.legacy.connector.

        For `settings` see consumer(). The default of assignors is ("range",). Raises
        InvalidConfigError.
        """
        from logcore.legacy.connector import Connector

        self.host.check_open()
        return Connector(self, group_id, settings)

    def simple_consumer(
        self, *, isolation_level: Isolation = "read_uncommitted"
    ) -> SimpleConsumer:
        """Return a reader of stored batches, from offsets that the caller keeps; see
        logcore.legacy.simple_consumer.
        """
        from logcore.legacy.simple_consumer import SimpleConsumer

        self.host.check_open()
        return SimpleConsumer(self._fs, self, isolation_level)

    @overload
    def producer(
        self,
        *,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[ProducerOptions],
    ) -> Producer: ...
    @overload
    def producer(
        self,
        *,
        transactional_id: str,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[TransactionOptions],
    ) -> TransactionalProducer: ...
    def producer(
        self, *, config: Mapping[str, object] | None = None, **settings: Any
    ) -> Producer:
        """Return a producer of records for topics of this directory; see
        docs/producer.md and ProducerOptions.

        `config` contains settings by Kafka's dotted names, such as {"linger.ms": 5}.
        Settings for the network are ignored there. `settings` are the same with
        underscores, and override `config`. With a transactional_id, the result is a
        TransactionalProducer.

        Raises:
            InvalidConfigError: a setting is invalid. For an unknown setting, the error
                contains the most similar one.
            ReadOnlyLogError: the directory was opened with read_only=True.
        """
        from logcore.producer.producer import Producer
        from logcore.producer.settings import build_settings
        from logcore.producer.transactional_producer import TransactionalProducer

        self.host.check_writable()
        chosen = build_settings(config, settings)
        if chosen.transactional_id is None:
            return Producer(self._fs, self, chosen)
        return TransactionalProducer(self._fs, self, chosen, self.host.coordinators)

    def size_bytes(self, topic: str, number: int) -> int:
        """Return the size of all .log files of a partition, without opening it. Raises
        TopicNotFoundError.
        """
        if number not in self._topic(topic).numbers:
            raise TopicNotFoundError(
                f"topic {topic!r} has no such partition", path=self.path, found=number
            )
        path = self._registry.partition_path(topic, number)
        total = 0
        for base in list_bases(self._fs, path):
            # Deleted concurrently.
            with contextlib.suppress(FileNotFoundError):
                total += self._fs.file_size(os.path.join(path, file_name(base, LOG)))
        return total

    def space(self) -> tuple[int, int]:
        """Return the total and the free bytes of the file system with the directory."""
        with expecting_directory(self._fs, self.path):
            return self._fs.total_bytes(self.path), self._fs.free_bytes(self.path)

    def incidents(self) -> tuple[Incident, ...]:
        """Return errors in work that no caller waits for, such as tick(), since the
        directory was opened. The newest is last.

        Examples are damage found by compaction or retention, files that could not be
        removed, and staged writes that failed. The loggers `logcore.<work>` report them
        too. At most a hundred kinds are kept.
        """
        return self._incidents.all()

    # -- work in time ------------------------------------------------------------------

    def tick(self, now_ms: Time | None = None) -> None:
        """Do a bounded amount of due work: syncs and rolls by time, retention,
        compaction, checkpoints, and writes that Spark has published.

        Call it from a timer, a few times a second. `now_ms` is the wall clock, by
        default the system's. A log that an earlier error has poisoned is skipped; its
        next append raises the error.
        """
        claim = self.host.check_writable()
        self.refresh()
        wall_ms = time_ms(now_ms)
        if wall_ms is None:
            wall_ms = self._fs.now_ms()
        if self._registry.deleting:
            self.host.deletions.finish(self.host.lock)
            self.host.deletions.retry_forgetting(self, self.host.lock)
        # In this order, until one of them has taken the time of a tick.
        if not self._maintenance.visit_open_logs(wall_ms):
            return
        with self._incidents.reporting_errors("transactions", self.path):
            self.host.coordinators.run_due_work(self)
        if not self.is_shared and not self.is_replicated:
            from logcore.staging import applying

            # The publisher finds the refusal too.
            with self._incidents.reporting_errors("staging", self.path):
                if applying.apply_ready(self._fs, self, most=1):
                    return
        if self.is_shared and claim.runs_maintenance():
            with self._incidents.reporting_errors("registry", self.path):
                self.host.coordinators.control(self)
        clock_ms = self._fs.monotonic_ms()
        with self.host.lock:
            if self.host.is_closed or (
                claim.runs_maintenance()
                and self._maintenance.enforce_limits(clock_ms, wall_ms)
            ):
                return
        if self._maintenance.has_unsaved_high_watermarks:
            with (
                self.host.lock,
                self._incidents.reporting_errors("checkpoints", self.path),
            ):
                self._maintenance.save_high_watermarks(
                    high_watermarks(self._logs.known)
                )

    # -- rot ---------------------------------------------------------------------------

    def scrub(self) -> list[ScrubReport]:
        """Check every byte of all partitions, and return a report for each; see
        Log.scrub().

        A partition that is too damaged to open has a report too.
        """
        return finish(self.scrubbing())

    def scrubbing(self) -> Generator[ScrubProgress, None, list[ScrubReport]]:
        """Scrub in steps of some milliseconds, so that a host controls the speed; see
        scrub().

        The generator yields Progress, partition by partition, and returns the reports.
        """
        reports = []
        for name in self.topics():
            for number in self.partitions(name):
                try:
                    reports.append(
                        (yield from self.partition(name, number).scrubbing())
                    )
                except TopicNotFoundError:
                    # Deleted concurrently.
                    continue
                except (CorruptLogError, CorruptBatchError, StorageReadError) as error:
                    reports.append(
                        unopened(self._registry.partition_path(name, number), error)
                    )
        return reports
