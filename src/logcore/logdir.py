"""A directory of partition logs: its topics, their settings, and the logs opened in it.

Rules:
- One lock for the whole directory, Kafka's. Opening it for writing first finishes what a crash left half done.
- Partitions are opened when they are first asked for and stay open until the directory is closed.
- All methods may be called from several threads; one lock orders what changes topics or opens logs.

Topics are kept by directory/topics.py, open logs by directory/openlogs.py, and tick() is the work of
directory/upkeep.py. This module appends and reads nothing itself (log.py), and starts no thread. consumer/ reads topics
for members of a group.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import uuid
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, Unpack, overload

from logcore.checkpoint import Key
from logcore.claim import Claim
from logcore.claiming import claim_directory, make_directories
from logcore.config import Durability, LogConfig
from logcore.coordinators import Coordinators
from logcore.directory.forking import fork_topic
from logcore.directory.identity import Identity, ProducerIds, check_kind
from logcore.directory.incidents import Incidents
from logcore.directory.openlogs import OpenLogs
from logcore.directory.sharing import Sharing
from logcore.directory.snapshots import take_snapshot
from logcore.directory.topicfile import TopicEntry, new_id
from logcore.directory.topics import TopicDescription as TopicDescription  # noqa: PLC0414 -- others import it from here
from logcore.directory.topics import TopicRegistry
from logcore.directory.upkeep import Upkeep, Upkeeper, high_watermarks
from logcore.errors import (
    ConsumerStateError,
    CorruptBatchError,
    CorruptLogError,
    ForkedWriterError,
    InvalidConfigError,
    LogClosedError,
    LogcoreError,
    LogNotFoundError,
    ReadOnlyLogError,
    StorageReadError,
    TopicNotFoundError,
)
from logcore.format.columns import TOPIC_COLUMNS
from logcore.fs import FS, OS
from logcore.kernels import Receipt, TopicRecord
from logcore.kernels.layout import HeadersInput, Level, Piece, Time
from logcore.log import (
    Log,
    OnCorruption,
    check_on_corruption,
    check_path,
)
from logcore.names import (
    LOG,
    OFFSETS_TOPIC,
    TRANSACTIONS_TOPIC,
    file_name,
    partition_name,
)
from logcore.notices import INFO, Incident, tell
from logcore.partition.scan import Scan
from logcore.partition.seals import Progress, ScrubReport, finish, unopened
from logcore.partition.segmentfiles import list_bases
from logcore.partitioner import Partitioner
from logcore.reader import Isolation, LogReader
from logcore.recordbatch import time_ms
from logcore.table import TopicTable
from logcore.topic import Order, Position, Topic

if TYPE_CHECKING:  # imported in the methods that use them: every user waits for `import logcore`
    from logcore.consumer.consumer import Consumer
    from logcore.consumer.simple import SimpleConsumer
    from logcore.consumer.streams import Connector
    from logcore.consumer.values import ConsumerOptions, OffsetAndMetadata
    from logcore.format.transactionrecords import StoredTransaction
    from logcore.producer.producer import Producer
    from logcore.producer.transactional import TransactionalProducer
    from logcore.producer.values import ProducerOptions, TransactionOptions

#: The member under which the directory itself is claimed; no partition directory can have this name.
_MEMBER: Final = "."
#: Of topics in a repr.
_SHOWN_TOPICS: Final = 8
#: Of partitions in an error.
_SHOWN_PARTITIONS: Final = 8


def open_dir(
    path: str | os.PathLike[str],
    *,
    create: bool = False,
    read_only: bool = False,
    config: Mapping[str, object] | None = None,
    durability: str | Durability = "group",
    upkeep: Upkeep | None = None,
    on_corruption: OnCorruption = "fail",
    on_incident: Callable[[Incident], None] | None = None,
    shared: bool = False,
    fs: FS = OS,
) -> LogDir:
    """Opens a directory of partitions, such as data with data/orders-0 and data/orders-1 in it.

    create: make it if it does not exist. read_only: take no lock and write nothing; works beside a running writer.
    config: settings by Kafka's names for topics that do not set them. durability: of all its logs; see Durability.
    upkeep: limits of the directory, and how tick() keeps them. on_corruption: of each of its logs; see logcore.open().
    on_incident: called, in the thread at work, when something fails in work that no caller waits for; each kind the
    first time, and the tenth, the hundredth and so on. See LogDir.incidents(). shared: other processes that say so may
    have the directory open for writing too; see docs/sharing.md.

    Opening for writing takes Kafka's lock. Raises LogNotFoundError, LogLockedError, InvalidConfigError, CorruptLogError
    when the file of topics is damaged, and what the system raises.
    """
    directory = check_path(path)
    defaults = LogConfig.parse(config)
    policy = Durability.parse(durability)
    if read_only and create:
        raise InvalidConfigError("a directory cannot be created read-only")
    check_on_corruption(on_corruption)
    real = fs.real_path(directory)
    if not fs.is_directory(real):
        if not create:
            raise LogNotFoundError("there is no log directory here; create=True makes one", path=directory)
        make_directories(fs, real)
    else:
        check_kind(fs, real, create=create)
    if read_only and shared:
        raise InvalidConfigError("read_only=True works beside any writer; shared=True is for those who write")
    claim = None
    if not read_only:
        claim = claim_directory(fs, real, _MEMBER, shared=shared)
    try:
        return LogDir(
            fs, real, claim, dict(config or {}), defaults, policy, upkeep or Upkeep(), on_corruption, on_incident
        )
    except BaseException:
        if claim is not None:
            claim.fail()
            claim.release()
        raise


class LogDir:
    """A directory of partition logs. Made by logcore.open_dir(); a with block closes it.

    All methods may be called from several threads. path: of the directory. config: what topics that set nothing get.
    cluster_id: the text in meta.properties; node_id: the number there. has_coordinator: set by a broker of this
    process, which looks after groups then.
    """

    def __init__(
        self,
        fs: FS,
        path: str,
        claim: Claim | None,
        given: Mapping[str, object],
        defaults: LogConfig,
        policy: Durability,
        upkeep: Upkeep,
        on_corruption: OnCorruption,
        on_incident: Callable[[Incident], None] | None = None,
    ) -> None:
        """Not for users: see open_dir()."""
        self.path = path
        self.config = defaults
        self.durability = policy
        self._fs = fs
        self._claim = claim
        self.given_config = given
        self._make_locks()
        self._partitioners: dict[str, Partitioner] = {}  # of topics that were appended to; see append()
        self._closed = True  # until _begin() has opened it, close() and __del__ have nothing to do
        self._producer_ids = ProducerIds(fs, path)
        self._incidents = Incidents(fs, on_incident)
        self._registry = TopicRegistry(fs, path, self, claim, self._incidents, given)
        self._upkeeper = Upkeeper(fs, self, claim, self._incidents, upkeep)
        self._logs = OpenLogs(fs, self._registry, claim, self._upkeeper, self._incidents, on_corruption)
        self._coordinators = Coordinators(fs, claim)
        self.has_coordinator = False
        self._forks = fs.forks
        fs.after_fork(self._make_locks)  # a thread of the parent may hold one, and does not exist in the child
        self._sharing = Sharing(fs, self, claim, self._registry, self._incidents)
        if claim is None:
            self._begin(finishes=False)
        else:
            with claim.alone() as is_alone:
                self._begin(finishes=is_alone)

    def _begin(self, *, finishes: bool) -> None:
        """finishes: ends what a crash left half done, because no other process has the directory open for writing."""
        claim = self._claim
        with contextlib.ExitStack() as turn:
            if claim is not None:
                turn.enter_context(claim.changing())
            self._identity = Identity(self._fs, self.path, can_write=claim is not None)
            if finishes:
                self._registry.finish_interrupted()
            self._registry.look()
            if finishes:
                self._registry.complete()
        self._closed = False
        if finishes:
            from logcore.staging import applying

            for path in applying.damaged(self._fs, self.path):
                error = CorruptLogError("the manifest of a staged write is damaged", path=path)
                self._incidents.met("staging", path, error)
            # A staged write that fails now is tried again by tick(); the directory opens without it.
            with self._incidents.going_on("staging", self.path):
                applying.apply_ready(self._fs, self)

    # -- opening and closing -------------------------------------------------------------------------------------

    def _make_locks(self) -> None:
        self._lock = threading.RLock()

    @property
    def cluster_id(self) -> str:
        return self._identity.cluster_id

    @property
    def node_id(self) -> int:
        return self._identity.node_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        held = getattr(self, "_claim", None)
        if held is not None and not getattr(self, "_closed", True) and self._fs.forks == self._forks:
            warnings.warn(f"log directory {self.path} was not closed", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "writing"
        if self._closed:
            state = "closed"
        elif self._claim is None:
            state = "read-only"
        known = sorted(self._registry.known.copy().items())
        shown = [self._shown(topic) for _, topic in known[:_SHOWN_TOPICS]]
        if len(known) > _SHOWN_TOPICS:
            shown.append(f"{len(known) - _SHOWN_TOPICS} others")
        return f"<LogDir {self.path} {state}; {', '.join(shown) or 'no topics'}>"

    def _shown(self, topic: TopicEntry) -> str:
        """A topic with the number of its offsets, as far as that is known without a look at the disk."""
        logs = [self.opened(topic.name, number) for number in topic.numbers]
        if None in logs:
            return topic.name
        count = sum(log.high_watermark - log.log_start_offset for log in logs if log is not None)
        return f"{topic.name}: {count} offsets"

    def _repr_html_(self) -> str | None:
        """A table of the topics; None, for which a notebook shows the text form, once the directory is closed."""
        if self._closed:
            return None
        from logcore.glance import directory_html

        self.refresh()
        return directory_html(self._fs, self.path, {name: self._paths(name) for name in self.topics()})

    def topic_html(self, name: str) -> str:
        """A topic as a small HTML table, for notebooks."""
        from logcore.glance import topic_html

        return topic_html(self._fs, name, self._paths(name))

    def _paths(self, name: str) -> dict[int, str]:
        return {number: self._registry.partition_path(name, number) for number in self.partitions(name)}

    def close(self) -> None:
        """Closes every log, writes the checkpoints once for all of them, and releases the lock. Closing twice is fine.

        Raises the first error of closing a log, after all of them were closed.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._coordinators.close()
            everything = {(topic.name, n) for topic in self._registry.known.values() for n in topic.numbers}
            self._logs.close_all(everything, is_forked=self._fs.forks != self._forks)

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosedError("the log directory is closed", path=self.path)

    def _check_alone(self, what: str) -> None:
        self._check_writable()
        if self.is_shared:
            raise InvalidConfigError(f"{what} needs the directory for itself; open it without shared=True")

    def _check_writable(self) -> Claim:
        self._check_open()
        if self._fs.forks != self._forks:
            raise ForkedWriterError(
                "the log directory was opened by a parent process; open it again in the child", path=self.path
            )
        if self._claim is None:
            raise ReadOnlyLogError("the log directory was opened with read_only=True", path=self.path)
        return self._claim

    # -- topics --------------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Names of the topics, sorted."""
        self._check_open()
        if self.is_shared:
            self.refresh()
        return sorted(self._registry.known)

    @property
    def coordinators(self) -> Coordinators:
        """Of groups and transactions; for brokers over the directory. Users have consumer() and producer()."""
        return self._coordinators

    @property
    def topics_version(self) -> int:
        """Another number after each topic that was made, grown or deleted."""
        return self._registry.version

    @property
    def is_read_only(self) -> bool:
        """Whether it was opened with read_only=True."""
        return self._claim is None

    @property
    def is_shared(self) -> bool:
        """Whether other processes may have the directory open for writing too."""
        return self._sharing.is_shared

    def __contains__(self, topic: object) -> bool:
        if self.is_shared and topic not in self._registry.known and not self._closed:
            self.refresh()
        return topic in self._registry.known

    def refresh(self) -> None:
        """Looks at the directory again; for one that was opened read-only beside a writer, or shared with others."""
        with self._lock:
            self._check_open()
            if self._claim is None:
                self._registry.look()
            else:
                self._sharing.follow()

    def _topic(self, name: str) -> TopicEntry:
        self._check_open()
        if self.is_shared and name not in self._registry.known:
            self.refresh()
        return self._registry.topic(name)

    def topic_id(self, name: str) -> uuid.UUID:
        """Kafka's id of a topic; all zero when the directory does not say and is opened read-only."""
        known = self._topic(name).topic_id
        if known is not None:
            return known
        with self._lock:
            self._check_open()
            return self._registry.topic_id(name)

    def describe_topic(self, name: str) -> TopicDescription:
        """Raises TopicNotFoundError."""
        with self._lock:
            return self._registry.describe(self._topic(name))

    def settings(self, name: str) -> LogConfig:
        """Those in force for a topic. Raises TopicNotFoundError."""
        return self._registry.settings(self._topic(name))

    def partitions(self, name: str) -> tuple[int, ...]:
        """Numbers of a topic's partitions, rising. Raises TopicNotFoundError."""
        return self._topic(name).numbers

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None) -> None:
        """Makes a topic with its partitions, each an empty log.

        Raises InvalidNameError also when the name differs from another topic's only in '.' and '_', which Kafka's
        metrics cannot tell apart; InvalidConfigError; TopicExistsError.
        """
        self.create_topics({name: (partitions, config)})

    def create_topics(
        self, wanted: Mapping[str, tuple[int, Mapping[str, object] | None]], *, check_only: bool = False
    ) -> None:
        """Makes several topics, name -> (partitions, config), all of them or none; see create_topic().

        check_only: only raise what making them would, here and below.
        """
        with self._lock:
            self._check_writable()
            self.refresh()
            if self._registry.deleting_elsewhere.intersection(wanted):
                self._sharing.finish_elsewhere()
            with self._sharing.changing():
                self._registry.create(wanted, check_only=check_only)

    def fork(self, topic: str, at_offset: int | Mapping[int, int] | None, new_topic: str) -> None:
        """Makes a topic that has another's records below an offset, with the same offsets, partitions and settings.

        at_offset: for each partition or for all of them; None for its high watermark. Sealed segments are hard links
        and take no room until one of the two topics deletes them. Later appends to one topic do not change the other.
        The new topic exists whole or not at all. Errors as create_topic(), and OffsetOutOfRangeError outside
        [log start, high watermark] of a partition.
        """
        with self._lock:
            self._check_alone("fork()")
            source = self._topic(topic)
            overrides = self._registry.own_overrides(source)
            made = TopicEntry(new_topic, new_id(self._fs), len(source.numbers), overrides, source.numbers)
            if source.numbers != tuple(range(len(source.numbers))):
                raise InvalidConfigError("the topic has gaps in its partition numbers", found=str(source.numbers))
            self.create_topics({new_topic: (made.count, made.overrides)}, check_only=True)
            offsets: dict[int, int | None]
            if isinstance(at_offset, Mapping):
                offsets = {number: at_offset.get(number) for number in source.numbers}
            else:
                offsets = dict.fromkeys(source.numbers, at_offset)
            fork_topic(
                self._fs, self._registry, self._incidents, made, lambda number: self.partition(topic, number), offsets
            )

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Copies the whole directory to a path where nothing exists yet: a backup that opens as it is.

        Each partition is copied up to its high watermark, one after the other; sealed segments are hard links if
        possible. Group offsets are records of a topic and are copied too. The copy is made beside the path, under a
        name that ends in `-partial`, and renamed when it is whole. Raises InvalidConfigError when something exists at
        the path, and what reading and writing raise.
        """
        target = self._fs.real_path(check_path(path))
        with self._lock:
            self._check_writable()
            take_snapshot(self._fs, self, self._incidents, target)

    def add_partitions(self, name: str, count: int, *, check_only: bool = False) -> None:
        """Raises a topic's number of partitions to count. Raises InvalidConfigError if it has as many already."""
        with self._lock:
            self._check_writable()
            with self._sharing.changing():
                self._registry.grow(name, count, check_only=check_only)

    def alter_topic(self, name: str, changes: Mapping[str, object | None], *, check_only: bool = False) -> None:
        """Sets settings of a topic by Kafka's names; None takes one back to the default. All of them or none."""
        with self._lock:
            self._check_writable()
            with self._sharing.changing():
                self._registry.alter(name, changes, check_only=check_only)
            if check_only:
                return
            settings = self.settings(name)
            for (of, number), log in self._logs.known.items():
                if of == name and not log.is_closed:
                    # A poisoned one has them when it is opened again.
                    with self._incidents.going_on("settings", partition_name(of, number)):
                        log.reconfigure(settings)

    def delete_topic(self, name: str) -> None:
        """Removes a topic with all its records.

        A reader in the middle of it gets to the end of its segment and then OffsetOutOfRangeError.
        """
        with self._lock, contextlib.ExitStack() as claims:
            self._check_writable()
            with self._sharing.changing():
                topic = self._topic(name)
                # A partition that was opened in this process by logcore.open() is not deleted under its user:
                # claiming it fails then.
                for number in topic.numbers:
                    if self.opened(name, number) is None:
                        member = partition_name(name, number)
                        claims.callback(self._fs.lock(self.path, member, shared=self.is_shared).release)
                self._partitioners.pop(name, None)
                self._registry.start_deleting(topic)
            tell("topics", INFO, "%s: topic %s deleted", self.path, name)
            self.close_logs({name})
            self._sharing.say_deleted(name, topic.numbers)
            claims.close()
            with self._sharing.changing():
                self._registry.finish_deleting()
        # Groups forget their offsets: a new topic of that name begins without them. Not under the lock of the
        # directory, which groups take while they hold theirs.
        if self._coordinators.has_groups or (OFFSETS_TOPIC in self and not self.has_coordinator):
            with self._incidents.going_on("deletion", OFFSETS_TOPIC):
                self._coordinators.groups(self).forget_topics({name})
        if not self.has_coordinator:
            with self._incidents.going_on("deletion", name):
                self._coordinators.forget_registered(self, {name})

    def delete_group(self, group_id: str) -> None:
        """Deletes a consumer group with all that it has committed.

        Raises ConsumerStateError if there is none of that name, while it has members, and where the record of it
        could not be stored; otherwise as consumer() with a group.
        """
        from logcore.consumer.offsetstores import delete

        self._check_writable()
        refused = delete(self._coordinators.groups(self), self._coordinators.present_registry(self), group_id)
        if refused is not None:
            raise ConsumerStateError(f"group {group_id!r} was not deleted", path=self.path, found=refused.name)

    def alter_group_offsets(
        self, group_id: str, offsets: Mapping[tuple[str, int], int | OffsetAndMetadata], *, force: bool = False
    ) -> None:
        """Sets what a group has committed, also backwards; (topic, partition) -> offset. On disk when it returns.

        It is set in the registry too, if the group has offsets there. force: also while the group has members. They
        lose their partitions, join again and begin at these offsets; what they have in hand comes again. Raises
        ConsumerStateError while it has members, and where the offsets could not be stored; InvalidConfigError;
        otherwise as consumer() with a group.
        """
        from logcore.consumer.offsetstores import alter, committed_rows

        self._check_writable()
        groups = self._coordinators.groups(self)
        rows = committed_rows(offsets, self._fs.now_ms())
        refused = alter(groups, self._coordinators.present_registry(self), group_id, rows, is_forced=force)
        if refused is not None:
            raise ConsumerStateError(
                f"the offsets of group {group_id!r} were not set", path=self.path, found=refused.name
            ) from groups.failure

    def transactions(self) -> dict[str, StoredTransaction]:
        """How each transactional id stands, by the records in `__transaction_state`. Raises what reading these raises,
        and CorruptLogError for a record of a form that is not known.
        """
        if TRANSACTIONS_TOPIC not in self._registry.known:
            return {}
        from logcore.transactionstate import stored_transactions

        logs = [self.partition(TRANSACTIONS_TOPIC, number) for number in self.partitions(TRANSACTIONS_TOPIC)]
        return stored_transactions(logs)

    def end_transaction(self, transactional_id: str, *, commit: bool) -> None:
        """Commits or aborts the open transaction of an id, for a producer that will not; it finds itself fenced.

        Raises InvalidTransactionStateError where none is open, and what TransactionalProducer.commit_transaction()
        raises.
        """
        self._check_writable()
        self._coordinators.transactions(self).end(transactional_id, commit=commit)

    def next_producer_id(self) -> int:
        """A producer id that this directory has never given out: blocks of a thousand are noted on disk before use."""
        with self._lock, self._check_writable().changing():
            return self._producer_ids.next()

    # -- partitions ----------------------------------------------------------------------------------------------

    def partition(self, topic: str, number: int) -> Log:
        """The log of a partition, opened when it is first asked for; the directory closes it.

        Raises TopicNotFoundError, also for a partition that the topic does not have, and what logcore.open() raises.
        """
        log = self._logs.known.get((topic, number))
        if log is not None and not log.is_closed:
            return log
        with self._lock:
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
                    f"topic {topic!r} has no such partition", path=self.path, expected=expected, found=number
                )
            committed = self._upkeeper.settings.committed or self.committed_offsets
            return self._logs.open(known, number, self.durability, committed)

    # -- records -------------------------------------------------------------------------------------------------

    def open_again(self, topic: str, number: int) -> Log:
        """partition() for a log that a failed write or sync has poisoned: closes and recovers it.

        Raises what partition() raises. A record that was not acknowledged may be missing afterwards.
        """
        with contextlib.suppress(LogcoreError):
            self.partition(topic, number).close()
        return self.partition(topic, number)

    def topic(self, name: str) -> Topic:
        """A topic to append to and to read from. Raises TopicNotFoundError."""
        self._topic(name)
        return Topic(self, name)

    def append(
        self,
        topic: str,
        value: Piece | None,
        *,
        key: Piece | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        partition: int | None = None,
        durability: Level | None = None,
    ) -> Receipt:
        """Appends one record to a partition of a topic, which the receipt names.

        partition: by default that of the key, as Kafka's Java client chooses it (murmur2); records without a key stay
        with one partition for 16 KiB and then go on to the next. All else, and errors, as for Log.append(); errors of
        partition() too, and InvalidConfigError where partitions are missing, so that a key has none.
        """
        if partition is None:
            partition = self.choose_partition(topic, key, value)
        log = self._logs.known.get((topic, partition))
        if log is None or log.is_closed:
            log = self.partition(topic, partition)
        return log.append(value, key=key, headers=headers, timestamp_ms=timestamp_ms, durability=durability)

    def choose_partition(self, topic: str, key: Piece | None, value: Piece | None) -> int:
        """Where append() puts a record for which no partition is named. Raises what that raises."""
        known = self._registry.known.get(topic) or self._topic(topic)
        partitioner = self._partitioners.get(topic)
        if partitioner is None or partitioner.numbers is not known.numbers:
            partitioner = self._partitioners[topic] = Partitioner(known.numbers)
        return partitioner.choose(key, value)

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
        """The records of a topic; see Topic.read()."""
        return self.topic(topic).read(start, end, partitions=partitions, isolation=isolation, order=order)

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
        """The records of a topic as columns; see Topic.scan()."""
        return self.topic(topic).scan(start, end, partitions=partitions, isolation=isolation, columns=columns)

    def tail(
        self,
        topic: str,
        start: Position | None = None,
        *,
        partitions: Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> Iterator[TopicRecord]:
        """The records of a topic as they come; see Topic.tail()."""
        return self.topic(topic).tail(start, partitions=partitions, timeout=timeout)

    def table(self, topic: str, *, isolation: Isolation = "read_uncommitted") -> TopicTable:
        """The latest value of each key in all partitions, a read-only mapping that follows them. Errors as
        partition().
        """
        numbers = self._topic(topic).numbers
        return TopicTable([self.partition(topic, number).table(isolation=isolation) for number in numbers])

    def committed_offsets(self, topic: str, number: int) -> dict[str, int]:
        """Consumer group -> the offset it committed last for a partition, by `__consumer_offsets` in this directory.

        Reads that topic whole: work for a retention policy that holds for groups, not for a hot path. Raises what
        reading raises.
        """
        if OFFSETS_TOPIC not in self._registry.known:
            return {}
        from logcore.groupoffsets import committed_in

        logs: list[LogReader] = [self.partition(OFFSETS_TOPIC, part) for part in self.partitions(OFFSETS_TOPIC)]
        return committed_in(logs).get((topic, number), {})

    def consumer(self, *, config: Mapping[str, object] | None = None, **settings: Unpack[ConsumerOptions]) -> Consumer:
        """A consumer of topics of this directory, alone or as a member of a group; see docs/consumer.md.

        config: settings by Kafka's dotted names, as for producer(). settings: see ConsumerOptions. Raises
        InvalidConfigError; for a group, ReadOnlyLogError in a directory opened with read_only=True, ConsumerStateError
        in one that a broker of this process serves, and what reading `__consumer_offsets` raises.
        """
        from logcore.consumer.consumer import Consumer
        from logcore.consumer.values import consumer_settings

        self._check_open()
        chosen = consumer_settings(config, settings)
        groups = None
        registry = None
        if chosen.group_id is not None:
            self._check_writable()
            groups = self._coordinators.groups(self)
        if chosen.uses_registry:
            registry = self._coordinators.registry(self)
        return Consumer(self._fs, self, groups, chosen, registry)

    def connector(self, group_id: str, /, **settings: Unpack[ConsumerOptions]) -> Connector:
        """Streams of records for threads that share the work of a group; see logcore.consumer.streams.

        settings: as for consumer(); assignors is ("range",) by default. Raises InvalidConfigError.
        """
        from logcore.consumer.streams import Connector

        self._check_open()
        return Connector(self, group_id, settings)

    def simple_consumer(self, *, isolation_level: Isolation = "read_uncommitted") -> SimpleConsumer:
        """Fetches stored batches from offsets that the caller keeps; see logcore.consumer.simple."""
        from logcore.consumer.simple import SimpleConsumer

        self._check_open()
        return SimpleConsumer(self._fs, self, isolation_level)

    @overload
    def producer(
        self, *, config: Mapping[str, object] | None = None, **settings: Unpack[ProducerOptions]
    ) -> Producer: ...
    @overload
    def producer(
        self,
        *,
        transactional_id: str,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[TransactionOptions],
    ) -> TransactionalProducer: ...
    def producer(self, *, config: Mapping[str, object] | None = None, **settings: Any) -> Producer:
        """A producer of records for topics of this directory; see docs/producer.md and ProducerOptions.

        config: settings by Kafka's dotted names, such as {"linger.ms": 5}; what needs a network is passed over there.
        settings: the same with underscores; they win. transactional_id: makes it a TransactionalProducer; see there.
        Raises InvalidConfigError, which names the nearest setting for an unknown one, and ReadOnlyLogError in a
        directory opened with read_only=True.
        """
        from logcore.producer.producer import Producer
        from logcore.producer.transactional import TransactionalProducer
        from logcore.producer.values import chosen_settings

        self._check_writable()
        chosen = chosen_settings(config, settings)
        if chosen.transactional_id is None:
            return Producer(self._fs, self, chosen)
        return TransactionalProducer(self._fs, self, chosen, self._coordinators)

    def close_logs(self, topics: Collection[str]) -> None:
        """Closes and forgets the logs of topics that are being deleted. What fails of it is an incident."""
        with self._check_writable().gathering():  # and not writing: nothing is to be noted of what is deleted
            self._logs.close_topics(topics)

    def known_logs(self) -> Mapping[Key, Log]:
        """The logs that were opened; a user may have closed some of them since."""
        return self._logs.known

    def opened(self, topic: str, number: int) -> Log | None:
        """The log of a partition if it is open now."""
        return self._logs.opened((topic, number))

    def leader_epoch(self, topic: str, number: int) -> int:
        """The epoch that records appended to a partition are stamped with; if it is not open, what its file says."""
        return self._logs.leader_epoch((topic, number))

    def knows_leader_epoch(self, topic: str, number: int) -> bool:
        """Whether leader_epoch() reads no file."""
        return self._logs.knows_leader_epoch((topic, number))

    def size_bytes(self, topic: str, number: int) -> int:
        """Of all .log files of a partition, without opening it. Raises TopicNotFoundError."""
        if number not in self._topic(topic).numbers:
            raise TopicNotFoundError(f"topic {topic!r} has no such partition", path=self.path, found=number)
        path = self._registry.partition_path(topic, number)
        total = 0
        for base in list_bases(self._fs, path):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                total += self._fs.file_size(os.path.join(path, file_name(base, LOG)))
        return total

    def space(self) -> tuple[int, int]:
        """Bytes of the file system that the directory is on: all of them, and those that are free."""
        return self._fs.total_bytes(self.path), self._fs.free_bytes(self.path)

    @property
    def was_clean(self) -> bool:
        """Whether the last writer closed the directory cleanly; if not, opening its logs checks their ends."""
        return self._claim is None or self._claim.is_clean

    def open_logs(self) -> dict[tuple[str, int], Log]:
        """The logs that are open now, by (topic, partition)."""
        return self._logs.all_open()

    def incidents(self) -> tuple[Incident, ...]:
        """Errors since the directory was opened in work that no caller waits for, such as tick(); newest last.

        Damage met by compaction or retention, files that could not be removed, staged writes that could not be carried
        out. They are also reported to the loggers `logcore.<work>`. At most a hundred kinds are kept.
        """
        return self._incidents.all()

    # -- work in time --------------------------------------------------------------------------------------------

    def tick(self, now_ms: Time | None = None) -> None:
        """Does what is due, a bounded piece of it: syncs and rolls by time, checkpoints, writes that Spark published.

        now_ms: the wall clock, taken from the system when None. Call it from a timer, a few times a second. A log that
        an earlier error has poisoned is passed over; its next append raises the error.
        """
        claim = self._check_writable()
        self.refresh()
        wall_ms = time_ms(now_ms)
        if wall_ms is None:
            wall_ms = self._fs.now_ms()
        if self._registry.deleting:
            with self._lock, self._incidents.going_on("deletion", ", ".join(sorted(self._registry.deleting))):
                self._registry.finish_deleting()
        # In this order, until one of them has taken the time of a tick.
        if not self._upkeeper.visit_open(wall_ms):
            return
        with self._incidents.going_on("transactions", self.path):
            self._coordinators.look(self)
        if not self.is_shared:
            from logcore.staging import applying

            with self._incidents.going_on("staging", self.path):  # the publisher finds the refusal too
                if applying.apply_ready(self._fs, self, most=1):
                    return
        if self.is_shared and claim.takes_care():
            with self._incidents.going_on("registry", self.path):
                self._coordinators.control(self)
        clock_ms = self._fs.monotonic_ms()
        with self._lock:
            if self._closed or (claim.takes_care() and self._upkeeper.keep(clock_ms, wall_ms)):
                return
        if self._upkeeper.owes_high_watermarks:
            with self._lock, self._incidents.going_on("checkpoints", self.path):
                self._upkeeper.save_high_watermarks(high_watermarks(self._logs.known))

    # -- rot -----------------------------------------------------------------------------------------------------

    def scrub(self) -> list[ScrubReport]:
        """Checks every byte of all partitions, and returns a report for each. See Log.scrub().

        A partition that cannot be opened because it is damaged has a report too.
        """
        return finish(self.scrubbing())

    def scrubbing(self) -> Generator[Progress, None, list[ScrubReport]]:
        """As scrub(), in steps of some milliseconds, for a host that decides how fast: a generator of Progress, of one
        partition after the other, that returns the reports.
        """
        reports = []
        for name in self.topics():
            for number in self.partitions(name):
                try:
                    reports.append((yield from self.partition(name, number).scrubbing()))
                except TopicNotFoundError:
                    continue  # deleted meanwhile
                except (CorruptLogError, CorruptBatchError, StorageReadError) as error:
                    reports.append(unopened(self._registry.partition_path(name, number), error))
        return reports


# -- for hosts -------------------------------------------------------------------------------------------------------


def fs_of(directory: LogDir) -> FS:
    """The disk that a directory is on."""
    return directory._fs


def check_open(directory: LogDir) -> None:
    """Raises LogClosedError."""
    directory._check_open()


def check_writable(directory: LogDir) -> None:
    """Raises LogClosedError, ReadOnlyLogError, ForkedWriterError."""
    directory._check_writable()
