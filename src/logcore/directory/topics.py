"""The topics of a directory: their names, ids and settings, and changes of topics.

Rules:
- A topic exists completely or not at all. `logcore.topics` is replaced atomically. It
  marks a topic as deleting before the first directory of the topic is created, and
  before the first directory is removed. Directories that were created by Kafka or by
  copying are topics too.
- A name is available again after no group has a committed offset of the deleted topic.
  The row of a deleted topic remains until the directory reports that these offsets are
  deleted. So even after a crash, a new topic with that name has no committed offsets.
- Names and settings are checked before any change is made.
- Links are not followed.

This module does not open logs. It calls the directory (logdir.py) to close the logs of a
deleted topic. The caller holds the lock of an open directory. Changes need a directory
that is open for writing.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from logcore.claim import Claim
from logcore.config import KEEPS_ALL, LogConfig, config_text, known_config
from logcore.directory.incidents import Incidents
from logcore.directory.interface import HostDirectory
from logcore.directory.topic_file import (
    NO_ID,
    NewTopics,
    PartitionNumbers,
    TopicEntry,
    check_count,
    id_text,
    new_id,
    parse_id,
    read_topics,
    write_topics,
)
from logcore.errors import (
    CorruptLogError,
    InvalidConfigError,
    InvalidNameError,
    LogcoreError,
    TopicExistsError,
    TopicNotFoundError,
)
from logcore.fs import FS
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import (
    LOG,
    METADATA_LOG,
    check_topic_name,
    deleted_partition_name,
    is_deleted_partition,
    partition_name,
    partition_of,
)
from logcore.reporting import INFO, log_line

#: Maximum number of attempts of a reader whose listing is outdated by concurrent
#: changes.
_LISTING_ATTEMPTS: Final = 100


@attrs.frozen(kw_only=True)
class PartitionDescription:
    """One partition of a topic: its number and its directory."""

    partition: int
    path: str


@attrs.frozen(kw_only=True)
class TopicDescription:
    """A topic as describe_topic() returns it."""

    name: str
    #: Kafka's topic id; all zero if unknown, as in directories of a Kafka before 2.8.
    topic_id: uuid.UUID
    partitions: tuple[PartitionDescription, ...]
    #: The effective settings.
    config: LogConfig
    #: The settings that were set for this topic, as text.
    overrides: Mapping[str, str]


class TopicRegistry:
    """The topics of one directory."""

    def __init__(
        self,
        fs: FS,
        path: str,
        directory: HostDirectory,
        claim: Claim | None,
        incidents: Incidents,
        defaults: Mapping[str, object],
    ) -> None:
        """Create a registry without topics; reload() reads them.

        `defaults` contains settings for topics that do not set them.
        """
        self._fs = fs
        self.path = path
        # Weak, so that a directory that was not closed warns as soon as it is dropped.
        self._directory: HostDirectory = weakref.proxy(directory)
        self._claim = claim
        self._incidents = incidents
        self._defaults = defaults
        #: Topics by name.
        self.known: dict[str, TopicEntry] = {}
        #: Changes with each change of `known`.
        self.version = 0
        #: Deleted topics with remaining files or committed offsets.
        self.deleting: dict[str, TopicEntry] = {}
        #: Topics of `deleting` without files.
        self.emptied: set[str] = set()
        #: Topics of `deleting` that may still have committed offsets.
        self.with_committed_offsets: set[str] = set()
        #: Topics that other processes sharing the directory are deleting.
        self.deleting_elsewhere: set[str] = set()

    # -- listing ---------------------------------------------------------------------

    def reload(self) -> None:
        """Read the topics from the file of topics and the directories.

        While a topic is incomplete, its writer creates or removes directories, and
        updates the file before and after that. A listing between two equal readings of
        the file is therefore consistent with it.
        """
        previous_rows = read_topics(self._fs, self.path)
        numbers_by_topic = self._partitions_on_disk()
        rows = read_topics(self._fs, self.path)
        for _ in range(_LISTING_ATTEMPTS):
            if rows == previous_rows:
                break
            previous_rows = rows
            numbers_by_topic = self._partitions_on_disk()
            rows = read_topics(self._fs, self.path)
        topics = {
            row.name: row
            for row in rows
            if not row.is_deleting and row.name != METADATA_LOG
        }
        incomplete = {row.name: range(row.count, row.adding) for row in rows}
        deleting = {row.name for row in rows if row.is_deleting}
        # If Kafka or a copy created a directory, no row contains its topic. The topic
        # is derived from the directories.
        for name, numbers in numbers_by_topic.items():
            if name in deleting:
                continue
            topic = topics.setdefault(name, TopicEntry(name))
            complete_numbers = {
                number for number in numbers if number not in incomplete.get(name, ())
            }
            topic.numbers = PartitionNumbers(
                sorted({*topic.numbers, *complete_numbers})
            )
        self.known = topics
        self.version += 1

    def _partitions_on_disk(self) -> dict[str, list[int]]:
        """Return topic -> partition numbers, from the directories on disk."""
        numbers_by_topic: dict[str, list[int]] = {}
        beginning = os.path.join(self.path, "")
        for name in self._fs.listdir(self.path):
            key = partition_of(name)
            if (
                key is None
                or key[0] == METADATA_LOG
                or name != partition_name(*key)
                or name.startswith(".")
            ):
                continue
            if self._fs.is_directory(beginning + name):
                numbers_by_topic.setdefault(key[0], []).append(key[1])
        return numbers_by_topic

    def finish_interrupted(self) -> None:
        """Complete deletions that a crash interrupted, and undo incomplete creations.

        Rows of deleted topics remain, in `deleting` and `with_committed_offsets`, for
        finish_deleting().
        """
        topics = read_topics(self._fs, self.path)
        present: dict[str, list[int]] = {}
        if any(topic.is_deleting for topic in topics):
            present = self._partitions_on_disk()
        numbers_to_remove: dict[str, Iterable[int]] = {
            topic.name: {*topic.numbers, *present.get(topic.name, ())}
            for topic in topics
            if topic.is_deleting
        }
        numbers_to_remove |= {
            topic.name: range(topic.count, topic.adding)
            for topic in topics
            if topic.adding
        }
        # The rows are written last. If this call is interrupted too, the next opening
        # repeats it.
        if numbers_to_remove:
            self._remove_partitions(numbers_to_remove)
            # Offsets that groups committed for a topic of a cluster are deleted by
            # their coordinator, so its row is not needed for them.
            remaining = [
                attrs.evolve(topic, adding=0)
                for topic in topics
                if not (topic.is_of_cluster and topic.is_deleting)
            ]
            write_topics(self._fs, self.path, remaining)
            self.deleting = {
                topic.name: topic for topic in remaining if topic.is_deleting
            }
            self.emptied = {*self.deleting}
            self.with_committed_offsets = {*self.deleting}
        # Directories that were renamed for deletion and not removed.
        for name in self._fs.listdir(self.path):
            if is_deleted_partition(name):
                with self._incidents.reporting_errors("deletion", name):
                    self.remove_tree(name)

    def complete(self) -> None:
        """Create partition directories that are missing after a crash.

        A missing directory that had records is not created: it was lost, and opening it
        as a log reports the loss.
        """
        present = set(self._fs.listdir(self.path))
        assert self._claim is not None
        recovery_points = self._claim.checkpoints.all(checkpoint.RECOVERY_POINT)
        missing: list[tuple[TopicEntry, list[int]]] = []
        for topic in self.known.values():
            if topic.is_of_cluster:
                # A missing replica was lost. If it was created, the broker would report
                # an empty log as in sync.
                continue
            numbers = [
                n
                for n in range(topic.count)
                if partition_name(topic.name, n) not in present
            ]
            missing.append(
                (
                    topic,
                    [n for n in numbers if not recovery_points.get((topic.name, n))],
                )
            )
        self.make_partitions(missing)

    def topic(self, name: str) -> TopicEntry:
        """Return a topic by name.

        Raises:
            TopicNotFoundError: there is no such topic. The error contains the most
                similar name.
        """
        topic = self.known.get(name)
        if topic is None:
            raise TopicNotFoundError(
                "there is no such topic",
                name=str(name),
                known=self.known,
                path=self.path,
                found=repr(name),
            )
        return topic

    def topic_id(self, name: str) -> uuid.UUID:
        """Return Kafka's id of a topic, creating one if none is known.

        In a directory opened read-only, an unknown id is all zero.
        """
        topic = self.topic(name)
        if topic.topic_id is None:
            for number in topic.numbers:
                topic.topic_id = self._stored_id(name, number)
                if topic.topic_id is not None:
                    break
            else:
                if self._claim is None:
                    return NO_ID
                topic.topic_id = new_id(self._fs)
                self.save(topic)
        return topic.topic_id

    def describe(self, topic: TopicEntry) -> TopicDescription:
        partitions = [
            PartitionDescription(
                partition=number, path=self.partition_path(topic.name, number)
            )
            for number in topic.numbers
        ]
        return TopicDescription(
            name=topic.name,
            topic_id=self.topic_id(topic.name),
            partitions=tuple(partitions),
            config=self.settings(topic),
            overrides=dict(topic.overrides),
        )

    def _stored_id(self, name: str, number: int) -> uuid.UUID | None:
        content = checkpoint.read(
            self._fs, self.partition_path(name, number), checkpoint.PARTITION_METADATA
        )
        text = checkpoint.topic_id(content or b"")
        try:
            if text:
                return parse_id(text)
            return None
        except ValueError:
            return None

    def save(
        self,
        *changed: TopicEntry,
        deleting: Iterable[TopicEntry] = (),
        frees_space: bool = False,
    ) -> None:
        """Replace logcore.topics by the known topics with `changed`; this commits a
        change.

        With `frees_space`, a full disk's reserve may be used.
        """
        deleting_topics = {**self.deleting, **{topic.name: topic for topic in deleting}}
        topics = {
            **self.known,
            **{topic.name: topic for topic in changed},
            **deleting_topics,
        }
        # Topics known only from directories have no row.
        rows = [
            attrs.evolve(topic, is_deleting=name in deleting_topics)
            for name, topic in sorted(topics.items())
            if topic.count
            or topic.overrides
            or topic.topic_id
            or name in deleting_topics
        ]
        # Rows of other processes that are deleting topics are kept unchanged.
        if self.deleting_elsewhere:
            rows += [
                row
                for row in read_topics(self._fs, self.path)
                if row.name in self.deleting_elsewhere
            ]
        write_topics(self._fs, self.path, rows, may_use_reserve=frees_space)

    # -- creation, changes, deletion --------------------------------------------------

    def create(self, requested: NewTopics, *, check_only: bool = False) -> None:
        """Create topics, name -> (partitions, config). All topics are created, or none.

        With `check_only`, only raise the errors that this would raise.
        """
        names_by_key = {
            confusable(name): name
            for name in (*self.known, *self.deleting, *self.deleting_elsewhere)
        }
        new_topics = []
        for name, (partitions, config) in requested.items():
            check_topic_name(name)
            if name in self.known:
                raise TopicExistsError(
                    "the topic exists already", path=self.path, found=repr(name)
                )
            if name in self.deleting or name in self.deleting_elsewhere:
                raise TopicExistsError(
                    "a topic of that name is being deleted",
                    path=self.path,
                    found=repr(name),
                )
            check_new_name(name, names_by_key)
            names_by_key[confusable(name)] = name
            count = check_count(partitions, 1)
            overrides = self._overrides({}, config or {})
            new_topics.append(
                TopicEntry(
                    name,
                    new_id(self._fs),
                    count,
                    overrides,
                    PartitionNumbers(range(count)),
                )
            )
        for topic in new_topics:
            for number in topic.numbers:
                self._check_unused(topic.name, number)
        if check_only or not new_topics:
            return
        # Until they are complete, a crash undoes their creation.
        self.save(deleting=new_topics)
        try:
            self.make_partitions((topic, topic.numbers) for topic in new_topics)
            self.known.update((topic.name, topic) for topic in new_topics)
            self.version += 1
            self.save()
            for topic in new_topics:
                log_line(
                    "topics",
                    INFO,
                    "%s: topic %s created with %d partitions",
                    self.path,
                    topic.name,
                    topic.count,
                )
        except BaseException:
            self.undo(*new_topics)
            raise

    def undo(self, *new_topics: TopicEntry) -> None:
        """Remove topics whose creation failed. If this fails, tick() and the next
        opening try again.
        """
        for topic in new_topics:
            self.known.pop(topic.name, None)
            self.version += 1
            self.deleting[topic.name] = topic
        with self._incidents.reporting_errors("deletion", new_topics[0].name):
            self.finish_deleting()

    def add_partitions(
        self, name: str, count: int, *, check_only: bool = False
    ) -> None:
        """Increase a topic's number of partitions to `count`."""
        topic = self.topic(name)
        present = len(topic.numbers)
        if topic.numbers != tuple(range(present)):
            raise InvalidConfigError(
                "the topic has gaps in its partition numbers", found=str(topic.numbers)
            )
        check_count(count, present + 1)
        for number in range(present, count):
            self._check_unused(name, number)
        if check_only:
            return
        grown = attrs.evolve(
            topic,
            topic_id=self.topic_id(name),
            count=count,
            numbers=PartitionNumbers(range(count)),
            overrides=self.overrides_for_copy(topic),
        )
        # Until the partitions exist, a crash undoes their creation.
        self.save(attrs.evolve(grown, count=present, adding=count))
        try:
            self.make_partitions([(grown, range(present, count))])
            self.save(grown)
        except BaseException:
            with self._incidents.reporting_errors("deletion", name):
                self._remove_partitions({name: range(present, count)})
                self.save(frees_space=True)
            raise
        self.known[name] = grown
        self.version += 1

    def place(self, topic: TopicEntry) -> None:
        """Create the replicas of a topic of a cluster that are missing here.

        `topic` contains the id, the number of partitions and the settings of the topic,
        and the numbers of the partitions with a replica here. Replicas with other
        numbers are kept; see remove_replicas().

        Raises:
            TopicExistsError: there is a topic of that name with another id.
            InvalidConfigError: a setting is invalid.
            CorruptLogError: the directory of a new replica contains records.
        """
        check_topic_name(topic.name)
        overrides = self._overrides({}, topic.overrides)
        present = self.known.get(topic.name)
        present_numbers: Iterable[int] = ()
        if present is not None:
            if self.topic_id(topic.name) != topic.topic_id:
                raise TopicExistsError(
                    "a topic of that name has another id",
                    path=self.path,
                    expected=str(topic.topic_id),
                    found=str(present.topic_id),
                )
            present_numbers = present.numbers
        missing = [
            number for number in topic.numbers if number not in set(present_numbers)
        ]
        for number in missing:
            self._check_unused(topic.name, number)
        updated = attrs.evolve(
            topic,
            overrides=overrides,
            numbers=PartitionNumbers(sorted({*present_numbers, *missing})),
            is_of_cluster=True,
        )
        if updated == present:
            return
        # The row is written last. After a crash, a directory without a row is empty,
        # and the broker places it again.
        self.make_partitions([(updated, missing)])
        self.save(updated)
        self.known[topic.name] = updated
        self.version += 1

    def remove_replicas(self, name: str, numbers: Iterable[int]) -> None:
        """Remove replicas of a topic, and the topic itself with its last replica.

        The caller must have closed the logs.
        """
        topic = self.topic(name)
        to_delete = [number for number in numbers if number in topic.numbers]
        remaining = PartitionNumbers(
            number for number in topic.numbers if number not in to_delete
        )
        if remaining:
            changed = attrs.evolve(topic, numbers=remaining)
            # The row is written first. After a crash, the broker finds the directories
            # and removes them again.
            self.save(changed, frees_space=True)
            self.known[name] = changed
            self._remove_partitions({name: to_delete})
        else:
            self.start_deleting(topic)
            # Committed offsets are in the coordinator's partition, perhaps of another
            # broker.
            self.with_committed_offsets.discard(name)
            self.finish_deleting()
        self.version += 1

    def rename_to_stray(self, name: str) -> None:
        """Rename the replicas of a topic that the cluster does not have any more.

        The caller must have closed the logs. The directories keep their records, but are
        not partitions any more.
        """
        topic = self.topic(name)
        for number in topic.numbers:
            away = self.deletion_name(partition_name(name, number))
            self._fs.rename(
                self.partition_path(name, number),
                os.path.join(self.path, away.removesuffix("-delete") + "-stray"),
            )
        self._fs.sync_dir(self.path)
        self.forget({(name, number): None for number in topic.numbers})
        del self.known[name]
        self.version += 1
        self.save(frees_space=True)

    def alter(
        self,
        name: str,
        changes: Mapping[str, object | None],
        *,
        check_only: bool = False,
    ) -> None:
        """Change the settings of a topic; None resets a setting to the default."""
        topic = self.topic(name)
        overrides = self._overrides(topic.overrides, changes)
        if check_only:
            return
        changed = attrs.evolve(topic, topic_id=self.topic_id(name), overrides=overrides)
        self.save(changed)
        self.known[name] = changed

    def start_deleting(self, topic: TopicEntry) -> None:
        """Delete a topic in one step.

        finish_deleting() then removes its files, and its row once it is not in
        `with_committed_offsets`.
        """
        self.save(deleting=[topic], frees_space=True)
        self.deleting[topic.name] = self.known.pop(topic.name)
        self.with_committed_offsets.add(topic.name)
        self.version += 1

    def finish_deleting(self) -> None:
        """Remove the files of deleted topics, and rows that are not needed.

        If this fails, tick() and the next opening try again. The topics remain deleted.

        Raises:
            LogcoreError, OSError: files could not be removed or written.
        """
        from logcore.staging import applying

        # First the topics are removed from staged writes, because finishing a partially
        # placed write needs the directories of all its topics. The row is removed last:
        # while it exists, the next opening completes the deletion.
        self._drop_finished()
        to_delete = {
            name: topic
            for name, topic in self.deleting.items()
            if name not in self.emptied
        }
        if to_delete:
            self._directory.host.close_logs(to_delete)
            applying.drop_topics(self._fs, self.path, to_delete)
            self._remove_partitions(
                {name: topic.numbers for name, topic in to_delete.items()}
            )
            self.emptied.update(to_delete)
        finished = self.emptied - self.with_committed_offsets
        if finished:
            for name in finished:
                self._drop(name)
            self.save(frees_space=True)

    def _drop(self, name: str) -> None:
        del self.deleting[name]
        self.emptied.discard(name)
        self.with_committed_offsets.discard(name)

    def _drop_finished(self) -> None:
        """Drop deletions that another process finished.

        The name may belong to a new topic of that process now.
        """
        if self._claim is None or not self._claim.is_shared:
            return
        remaining = {
            row.name: row.topic_id
            for row in read_topics(self._fs, self.path)
            if row.is_deleting
        }
        for name, topic in [*self.deleting.items()]:
            if name not in remaining or remaining[name] != topic.topic_id:
                self._drop(name)

    def finish_rows(self, names: set[str]) -> None:
        """Remove the files and rows of topics that a crashed process was deleting."""
        rows = read_topics(self._fs, self.path)
        to_delete = {
            row.name: row.numbers
            for row in rows
            if row.is_deleting and row.name in names
        }
        if to_delete:
            self._remove_partitions(to_delete)
            write_topics(
                self._fs, self.path, [row for row in rows if row.name not in to_delete]
            )

    def _remove_partitions(self, numbers: Mapping[str, Iterable[int]]) -> None:
        """Remove existing partition directories and their lines in the checkpoints.

        First all directories are renamed, so that neither Kafka nor logcore opens them
        as partitions. Then the files are removed, which frees space for writing the
        checkpoints. If files cannot be removed, the first error is raised at the end,
        and the next opening tries again.
        """
        assert self._claim is not None
        keys: dict[tuple[str, int], int | None] = {
            (name, n): None
            for name, partition_numbers in numbers.items()
            for n in partition_numbers
        }
        away = [
            self._rename_away(partition_name(name, number))
            for name, number in keys
            if self._fs.is_directory(self.partition_path(name, number))
        ]
        self._fs.sync_dir(self.path)
        failure: LogcoreError | OSError | None = None
        for name in away:
            try:
                self.remove_tree(name)
            except (LogcoreError, OSError) as error:
                failure = failure or error
        self.forget(keys)
        if failure is not None:
            raise failure

    def _rename_away(self, name: str) -> str:
        """Rename a partition directory for deletion, as Kafka does.

        After a crash no incomplete partition remains.
        """
        away = self.deletion_name(name)
        self._fs.rename(os.path.join(self.path, name), os.path.join(self.path, away))
        return away

    def deletion_name(self, name: str) -> str:
        """Return a name for a directory under deletion; each opening removes such
        directories.
        """
        return deleted_partition_name(name, self._fs.random_bytes(16))

    def remove_tree(self, name: str) -> None:
        """Remove a partition's directory and its files, if it exists."""
        remove_tree(self._fs, os.path.join(self.path, name))

    # -- settings ----------------------------------------------------------------------

    def settings(self, topic: TopicEntry) -> LogConfig:
        """Return the effective settings of a topic.

        By default, a topic that was not created here never deletes records, because its
        settings may be stored elsewhere, for example in Kafka's metadata.
        """
        implied: Mapping[str, object] = {}
        if not topic.count:
            implied = KEEPS_ALL
        return LogConfig.parse({**implied, **self._defaults, **topic.overrides})

    def overrides_for_copy(self, topic: TopicEntry) -> dict[str, str]:
        """Return the settings for a copy of a topic.

        These are its own settings. If the topic was not created here, they include the
        default of settings().
        """
        if not topic.count:
            implied = {
                name: config_text(-1)
                for name in KEEPS_ALL
                if name not in self._defaults
            }
        else:
            implied = {}
        return {**implied, **topic.overrides}

    def _overrides(
        self, present: Mapping[str, str], changes: Mapping[str, object | None]
    ) -> dict[str, str]:
        """Return the settings of a topic after changes, validated together with the
        defaults.
        """
        return merged_overrides(self._defaults, present, changes)

    # -- partition directories ---------------------------------------------------------

    def partition_path(self, topic: str, number: int) -> str:
        return os.path.join(self.path, partition_name(topic, number))

    def make_partitions(
        self, requested: Iterable[tuple[TopicEntry, Iterable[int]]]
    ) -> None:
        """Create empty partition directories durably."""
        created: dict[tuple[str, int], int | None] = {}
        for topic, numbers in requested:
            for number in numbers:
                self.make_partition(topic, self.partition_path(topic.name, number))
                created[topic.name, number] = None
        if created:
            # This removes lines that an earlier deletion or another program left.
            self.forget(created)
            self._fs.sync_dir(self.path)

    def make_partition(self, topic: TopicEntry, path: str) -> None:
        """Create one directory and store the topic's id in it. `path` may be temporary."""
        # See _check_unused(): the directory is empty or remains from a crash.
        with contextlib.suppress(FileExistsError):
            self._fs.mkdir(path)
        assert topic.topic_id is not None
        metadata = f"version: 0\ntopic_id: {id_text(topic.topic_id)}"
        checkpoint.write(
            self._fs, path, checkpoint.PARTITION_METADATA, metadata.encode()
        )

    def _check_unused(self, topic: str, number: int) -> None:
        """Raise CorruptLogError if the directory of a new partition contains records."""
        path = self.partition_path(topic, number)
        if self._fs.exists(path):
            self.check_directory(path)
            if any(name.endswith(LOG) for name in self._fs.listdir(path)):
                raise CorruptLogError(
                    "the directory of a new partition contains records", path=path
                )

    def check_directory(self, path: str) -> None:
        """Raise CorruptLogError unless this is a directory.

        A link is refused because it may point outside the log directory.
        """
        if not self._fs.exists(path):
            raise CorruptLogError(
                "the partition's directory is missing; restore it, or delete the topic",
                path=path,
            )
        if not self._fs.is_directory(path):
            raise CorruptLogError(
                "not a directory: links inside a log directory are not followed",
                path=path,
                expected="a directory",
            )

    def write_offsets(self, file: str, offsets: Mapping[Key, int | None]) -> None:
        """Store offsets of partitions in a checkpoint."""
        assert self._claim is not None
        self._claim.checkpoints.set(file, offsets)

    def forget(self, keys: Mapping[tuple[str, int], int | None]) -> None:
        """Remove partitions from the checkpoints."""
        assert self._claim is not None
        for file in checkpoint.OFFSET_FILES:
            self._claim.checkpoints.set(file, keys, may_use_reserve=True)


def merged_overrides(
    defaults: Mapping[str, object],
    present: Mapping[str, str],
    changes: Mapping[str, object | None],
) -> dict[str, str]:
    """Return the settings of a topic after changes, as text.

    `defaults` contains the settings of topics that do not set them. None resets a
    setting.

    Raises:
        InvalidConfigError: a setting is unknown, or the settings do not go together.
    """
    result: dict[str, Any] = {**present, **changes}
    for name in changes:
        known_config(name)
    result = {name: value for name, value in result.items() if value is not None}
    settings = LogConfig.parse({**defaults, **result}).as_mapping()
    return {name: config_text(settings[name]) for name in result}


def check_new_name(name: str, known: Mapping[str, str]) -> None:
    """Check the name of a new topic. `known` maps confusable() of each topic to it.

    Raises:
        InvalidNameError: the name is invalid, reserved, or too similar to another one.
    """
    check_topic_name(name)
    if name == METADATA_LOG:
        raise InvalidNameError(
            "the name is reserved for the log of Kafka's quorum", found=repr(name)
        )
    other = known.get(confusable(name), name)
    if other != name:
        raise InvalidNameError(
            "the name differs from another topic's only in '.' and '_', or in upper and lower case",
            expected=f"not {other!r}",
            found=repr(name),
        )


def remove_tree(fs: FS, directory: str) -> None:
    """Remove a directory and its files, if it exists."""
    # Links are not followed, and other kinds of files do not belong to logcore.
    if not fs.is_directory(directory):
        return
    for file in fs.listdir(directory):
        fs.unlink(os.path.join(directory, file))
    fs.rmdir(directory)


def confusable(name: str) -> str:
    """Return a key that is equal for names that Kafka's metrics or a file system
    confuse.
    """
    return name.replace(".", "_").lower()
