"""The data of the pages about groups and transactions.

Sources:
- The records of `__consumer_offsets` and `__transaction_state`, as they were last stored.
- The registry of a shared directory, for the members in its processes.
- The group coordinator of the broker of this process, for the current state of a group.

The lag counts offsets up to the log end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import attrs

from logcore.coordinators import group_descriptions
from logcore.coordinators.group_descriptions import GroupMemberDescription
from logcore.coordinators.stored_offsets import StoredGroups
from logcore.errors import LogcoreError
from logcore.format.group_records import Committed
from logcore.format.transaction_records import StoredTransaction
from logcore.inspect.segmentmap import segment_map
from logcore.metadata.checkpoint import Key
from netshim.console.access import ConsoleViewer
from netshim.console.broker import LiveGroup
from netshim.console.directory import DirectoryView, OpenDirectory, TimeBudget
from netshim.console.lags import MAX_SERIES, LagKey


@attrs.frozen(kw_only=True)
class OffsetRow:
    """The committed offset of a group in a partition."""

    topic: str
    partition: int
    committed: Committed
    #: The log end, and the offsets up to it; None if they are unknown.
    end: int | None
    lag: int | None
    owner: str = ""


@attrs.frozen(kw_only=True)
class GroupSummary:
    """A group, as its last records describe it."""

    name: str
    #: classic or consumer; "" for a group that only has offsets.
    protocol: str
    state: str
    members: int
    #: Number of partitions with a committed offset.
    partitions: int
    topics: tuple[str, ...]
    #: Sum of the lags that are known.
    lag: int
    #: Whether a lag is unknown.
    is_lag_partial: bool
    #: Time of the last commit in ms; -1 for none.
    commit_ms: int


@attrs.frozen
class GroupData:
    """The groups of a directory."""

    #: The groups in `__consumer_offsets`.
    stored: StoredGroups = attrs.Factory(StoredGroups)
    #: Group -> number of members in processes that share the directory.
    shared: Mapping[str, int] = attrs.Factory(dict)
    #: The groups of the broker of this process.
    live: Mapping[str, LiveGroup] = attrs.Factory(dict)

    @property
    def offsets(self) -> Mapping[str, Mapping[str, Mapping[int, Committed]]]:
        """The committed offsets by group, topic and partition."""
        return self.stored.offsets

    def names(self) -> set[str]:
        """Return the names of all groups."""
        stored = self.stored
        return {*stored.offsets, *stored.groups, *stored.consumers, *self.shared}

    def member_count(self, name: str) -> int:
        """Return the number of members of a group, from the newest source."""
        if name in self.live:
            return self.live[name].members
        # Members in processes are in the registry. Those of a broker are stored with
        # the group.
        return self.shared.get(name, 0) or self.stored.member_count(name)

    def state(self, name: str) -> str:
        """Return the state of a group by Kafka's names."""
        if name in self.live:
            return self.live[name].state
        return "Stable" if self.member_count(name) else "Empty"

    def protocol(self, name: str) -> str:
        """Return classic, consumer, or "" for a group that only has offsets."""
        if name in self.stored.consumers:
            return "consumer"
        return "classic" if name in self.stored.groups else ""


def group_names(directory: OpenDirectory, data: GroupData) -> list[str]:
    """Return the names of the stored groups that the user may see."""
    return sorted(filter(directory.viewer.may_see_group, data.names()))


def offsets_of(
    directory: OpenDirectory,
    data: GroupData,
    name: str,
    budget: TimeBudget,
    owners: Mapping[Key, str] | None = None,
) -> list[OffsetRow]:
    """Return the committed offsets of a group. Lags are unknown if the time is over."""
    rows = []
    for topic, partitions in sorted(data.offsets.get(name, {}).items()):
        if not directory.viewer.may_see_topic(topic):
            continue
        existing = directory.topics.get(topic, ())
        for number, committed in sorted(partitions.items()):
            end = None
            if number in existing and not budget.is_over():
                end = _end(directory, topic, number)
            rows.append(
                OffsetRow(
                    topic=topic,
                    partition=number,
                    committed=committed,
                    end=end,
                    lag=None if end is None else max(0, end - committed.offset),
                    owner=(owners or {}).get((topic, number), ""),
                )
            )
    return rows


def _end(directory: OpenDirectory, topic: str, number: int) -> int | None:
    try:
        return directory.size(topic, number).end_offset
    except (LogcoreError, OSError):
        return None


def summary_of(
    directory: OpenDirectory, data: GroupData, name: str, budget: TimeBudget
) -> GroupSummary:
    """Return a group for a list of groups."""
    rows = offsets_of(directory, data, name, budget)
    return GroupSummary(
        name=name,
        protocol=data.protocol(name),
        state=data.state(name),
        members=data.member_count(name),
        partitions=len(rows),
        topics=tuple(sorted({row.topic for row in rows})),
        lag=sum(row.lag or 0 for row in rows),
        is_lag_partial=any(row.lag is None for row in rows),
        commit_ms=max((row.committed.commit_ms for row in rows), default=-1),
    )


def read_groups(directory: OpenDirectory) -> GroupData:
    """Return the groups of a directory. Raises LogcoreError if they cannot be read."""
    if directory.logdir is None:
        return GroupData()
    shared: dict[str, int] = {}
    view = directory.view
    with group_descriptions.registry_of(view.fs, view.path) as registry:
        for name in group_descriptions.shared_group_names(registry):
            shared[name] = len(group_descriptions.shared_members(registry, name))
    live: Mapping[str, LiveGroup] = {}
    if view.live_groups is not None:
        # A broker that is stopping does not answer, and has no members any more.
        with contextlib.suppress(RuntimeError, TimeoutError):
            live = view.live_groups()
    return GroupData(group_descriptions.read_groups(directory.logdir), shared, live)


def _stored_offsets(directory: OpenDirectory) -> dict[LagKey, int]:
    return {
        (name, topic, number): partition.offset
        for name, topics in read_groups(directory).offsets.items()
        for topic, partitions in topics.items()
        for number, partition in partitions.items()
    }


def sample_lags(view: DirectoryView) -> None:
    """Add a sample of all lags to the history of a console.

    A partition that cannot be read in time has no sample.
    """
    unrestricted_viewer = ConsoleViewer()
    committed: dict[LagKey, int] = {}
    try:
        with view.open_directory(unrestricted_viewer) as directory:
            live = {} if view.live_groups is None else view.live_groups()
            for name, group in live.items():
                for (topic, number), offset in group.offsets.items():
                    committed[name, topic, number] = offset
            # Without a broker, or in a shared directory, the stored offsets are used.
            if not live:
                committed = _stored_offsets(directory)
            budget = TimeBudget.of(view.fs, view.page_s)
            lags = {}
            for key in list(committed)[:MAX_SERIES]:
                _, topic, number = key
                if budget.is_over():
                    break
                if number in directory.topics.get(topic, ()):
                    end = _end(directory, topic, number)
                    if end is not None:
                        lags[key] = max(0, end - committed[key])
    except (LogcoreError, OSError, RuntimeError, TimeoutError):
        return
    view.lags.add(view.fs.now_ms(), lags)


def members_of(
    directory: OpenDirectory, data: GroupData, name: str
) -> tuple[GroupMemberDescription, ...]:
    """Return the members of a group. Raises LogcoreError."""
    if directory.logdir is None:
        return ()
    with group_descriptions.registry_of(
        directory.view.fs, directory.view.path
    ) as registry:
        members = group_descriptions.members_of(
            directory.logdir, data.stored, registry, name
        )
    may_see = directory.viewer.may_see_topic
    return tuple(
        attrs.evolve(
            member,
            partitions=tuple(key for key in member.partitions if may_see(key[0])),
        )
        for member in members
    )


def owners_of(directory: OpenDirectory, name: str) -> dict[Key, str]:
    """Return the current owner of each partition, if processes share the directory."""
    with group_descriptions.registry_of(
        directory.view.fs, directory.view.path
    ) as registry:
        return group_descriptions.owners_of(registry, name)


# -- transactions ----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class OpenPart:
    """An open transaction in one partition."""

    topic: str
    partition: int
    producer_id: int
    first_offset: int
    #: Records above the last stable offset that read_committed readers wait for.
    waiting_records: int
    #: The transactional id of its producer; "" if the coordinator has no such
    #: transaction.
    transactional_id: str


@attrs.define
class TransactionData:
    """The transactions of a directory."""

    #: Transactional ids with their last state, open ones first.
    ids: list[tuple[str, StoredTransaction]] = attrs.Factory(list)
    parts: list[OpenPart] = attrs.Factory(list)
    #: Partitions that were not read in time.
    unread: int = 0
    problems: list[str] = attrs.Factory(list)


def read_transactions(directory: OpenDirectory, budget: TimeBudget) -> TransactionData:
    """Read the open transactions of the coordinator and of all partitions."""
    data = TransactionData()
    names: dict[int, str] = {}
    if directory.logdir is not None:
        try:
            transactions = directory.logdir.transactions()
        except LogcoreError as error:
            data.problems.append(str(error))
            transactions = {}
        viewer = directory.viewer
        visible = {
            name: transaction
            for name, transaction in transactions.items()
            if viewer.may_see_transactional_id(name)
        }
        data.ids = sorted(
            visible.items(), key=lambda item: (not item[1].partitions, item[0])
        )
        names = {
            transaction.producer_id: name
            for name, transaction in visible.items()
            if transaction.partitions
        }
    # Partitions of open transactions are read first, in case the time ends.
    first = {key for _, transaction in data.ids for key in transaction.partitions}
    partitions = [
        (topic, n) for topic, numbers in directory.topics.items() for n in numbers
    ]
    existing = set(partitions)
    for topic, number in [
        *sorted(first & existing),
        *(key for key in partitions if key not in first),
    ]:
        if budget.is_over():
            data.unread += 1
            continue
        try:
            partition_map = segment_map(
                directory.path_of(topic, number),
                is_over=lambda: True,  # only the open transactions are needed
                fs=directory.view.fs,
            )
        except LogcoreError as error:
            data.problems.append(str(error))
            continue
        # The last stable offset. Readers with read_committed stop there.
        stable = min(
            partition_map.open_transactions.values(), default=partition_map.end_offset
        )
        data.parts += [
            OpenPart(
                topic=topic,
                partition=number,
                producer_id=producer_id,
                first_offset=offset,
                waiting_records=partition_map.end_offset - stable,
                transactional_id=names.get(producer_id, ""),
            )
            for producer_id, offset in partition_map.open_transactions.items()
        ]
    return data
