"""The topics of a directory: their names, ids and settings; makes, changes and deletes them.

Rules:
- A topic exists whole or not at all: `logcore.topics` calls it deleting before its first directory is made and before
  the first is removed, and is replaced in one step. Directories that Kafka or a copy put there are topics too.
- A name is free again once no group has a committed offset of the deleted topic: the row of a deleted topic stays
  until the directory says that these are forgotten. So a new topic of the name begins without them after any crash.
- Names and settings are checked before there is any effect.
- Links are not followed.

This module opens no log, and asks the directory (logdir.py) to close those of a topic that is deleted. All of it is
called under the directory's lock, on a directory that is open; and all that changes something, on one that may be
written.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Protocol

import attrs

from logcore import checkpoint
from logcore.checkpoint import Key
from logcore.claim import Claim
from logcore.config import KEEPS_ALL, LogConfig, config_text, known_config
from logcore.directory.incidents import Incidents
from logcore.directory.topicfile import (
    NO_ID,
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
from logcore.names import (
    LOG,
    METADATA_LOG,
    check_topic_name,
    deleted_partition_name,
    is_deleted_partition,
    partition_name,
    partition_of,
)
from logcore.notices import INFO, tell

#: How often a reader looks again when topics change while it looks.
_LOOKS: Final = 100
_CHECKPOINTS: Final = (checkpoint.RECOVERY_POINT, checkpoint.LOG_START, checkpoint.HIGH_WATERMARK, checkpoint.CLEANER)


@attrs.frozen(kw_only=True)
class PartitionDescription:
    """One partition of a topic: its number and its directory."""

    partition: int
    path: str


@attrs.frozen(kw_only=True)
class TopicDescription:
    """A topic as describe_topic() finds it.

    topic_id: Kafka's topic id; all zero where it is not known, as in directories of a Kafka before 2.8. config: the
    settings in force. overrides: those of them that were set for this topic, as text.
    """

    name: str
    topic_id: uuid.UUID
    partitions: tuple[PartitionDescription, ...]
    config: LogConfig
    overrides: Mapping[str, str]


class Directory(Protocol):
    """What the registry asks of a directory of partitions; logdir.LogDir has it."""

    def close_logs(self, topics: Collection[str]) -> None: ...


class TopicRegistry:
    """The topics of one directory. known: by name. version: another number after each change of it. deleting: deleted
    topics whose files still exist, or whose offsets do. emptied: those of them without files. remembered: those of them
    whose offsets may still exist.
    """

    def __init__(
        self,
        fs: FS,
        path: str,
        directory: Directory,
        claim: Claim | None,
        incidents: Incidents,
        given: Mapping[str, object],
    ) -> None:
        """given: settings for topics that do not set them."""
        self._fs = fs
        self.path = path
        # Weak: a directory that was not closed warns as soon as it is dropped.
        self._directory: Directory = weakref.proxy(directory)
        self._claim = claim
        self._incidents = incidents
        self._given = given
        self.known: dict[str, TopicEntry] = {}
        self.version = 0
        self.deleting: dict[str, TopicEntry] = {}
        self.emptied: set[str] = set()
        self.remembered: set[str] = set()
        self.deleting_elsewhere: set[str] = set()  # by other processes that share the directory

    # -- what there is -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Takes what the file of topics and the directories say.

        A writer makes directories while a topic is not whole and removes them when it is no more; the file says so
        before and after. Directories that were listed between two readings of one file are judged by it.
        """
        before = read_topics(self._fs, self.path)
        found = self._partitions_on_disk()
        rows = read_topics(self._fs, self.path)
        for _ in range(_LOOKS):
            if rows == before:
                break
            before = rows
            found = self._partitions_on_disk()
            rows = read_topics(self._fs, self.path)
        topics = {row.name: row for row in rows if not row.is_deleting and row.name != METADATA_LOG}
        half_made = {row.name: range(row.count, row.adding) for row in rows}
        deleting = {row.name for row in rows if row.is_deleting}
        # A directory that no row names was put there by Kafka or a copy: its topic is what the directories say.
        for name, numbers in found.items():
            if name in deleting:
                continue
            topic = topics.setdefault(name, TopicEntry(name))
            whole = {number for number in numbers if number not in half_made.get(name, ())}
            topic.numbers = PartitionNumbers(sorted({*topic.numbers, *whole}))
        self.known = topics
        self.version += 1

    def _partitions_on_disk(self) -> dict[str, list[int]]:
        """Topic -> numbers of its partitions, by its directories on disk."""
        found: dict[str, list[int]] = {}
        beginning = os.path.join(self.path, "")
        for name in self._fs.listdir(self.path):
            key = partition_of(name)
            if key is None or key[0] == METADATA_LOG or name != partition_name(*key) or name.startswith("."):
                continue
            if self._fs.is_directory(beginning + name):
                found.setdefault(key[0], []).append(key[1])
        return found

    def finish_interrupted(self) -> None:
        """Ends deletions that a crash ended, and undoes what it left half made.

        Rows of deleted topics stay, in `deleting` and `remembered`, for finish_deleting().
        """
        topics = read_topics(self._fs, self.path)
        present: dict[str, list[int]] = {}
        if any(topic.is_deleting for topic in topics):
            present = self._partitions_on_disk()
        undone: dict[str, Iterable[int]] = {
            topic.name: {*topic.numbers, *present.get(topic.name, ())} for topic in topics if topic.is_deleting
        }
        undone |= {topic.name: range(topic.count, topic.adding) for topic in topics if topic.adding}
        # The rows go last: should this be cut off too, the next opening begins again.
        if undone:
            self._remove_partitions(undone)
            write_topics(self._fs, self.path, [attrs.evolve(topic, adding=0) for topic in topics])
            self.deleting = {topic.name: topic for topic in topics if topic.is_deleting}
            self.emptied = {*self.deleting}
            self.remembered = {*self.deleting}
        # Directories that were renamed out of the way, and not removed any more.
        for name in self._fs.listdir(self.path):
            if is_deleted_partition(name):
                with self._incidents.going_on("deletion", name):
                    self.remove_tree(name)

    def complete(self) -> None:
        """Makes directories that a crash left unmade. One that had records was lost, and is not made as an empty one:
        opening it as a log reports the loss.
        """
        present = set(self._fs.listdir(self.path))
        assert self._claim is not None
        had = self._claim.checkpoints.all(checkpoint.RECOVERY_POINT)
        missing: list[tuple[TopicEntry, list[int]]] = []
        for topic in self.known.values():
            numbers = [n for n in range(topic.count) if partition_name(topic.name, n) not in present]
            missing.append((topic, [n for n in numbers if not had.get((topic.name, n))]))
        self.make_partitions(missing)

    def topic(self, name: str) -> TopicEntry:
        """Raises TopicNotFoundError, with the name that is nearest."""
        topic = self.known.get(name)
        if topic is None:
            raise TopicNotFoundError(
                "there is no such topic", name=str(name), known=self.known, path=self.path, found=repr(name)
            )
        return topic

    def topic_id(self, name: str) -> uuid.UUID:
        """Kafka's id of a topic, looked up or given where none is known; all zero in a directory opened read-only."""
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
            PartitionDescription(partition=number, path=self.partition_path(topic.name, number))
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
        content = checkpoint.read(self._fs, self.partition_path(name, number), checkpoint.PARTITION_METADATA)
        found = checkpoint.topic_id(content or b"")
        try:
            if found:
                return parse_id(found)
            return None
        except ValueError:
            return None

    def save(self, *changed: TopicEntry, deleting: Iterable[TopicEntry] = (), makes_room: bool = False) -> None:
        """Replaces logcore.topics by what is known with `changed` in it; this is the moment a change takes place.

        makes_room: on a full disk the reserve may be used for it.
        """
        gone = {**self.deleting, **{topic.name: topic for topic in deleting}}
        topics = {**self.known, **{topic.name: topic for topic in changed}, **gone}
        # No row for a topic of which only its directories tell.
        rows = [
            attrs.evolve(topic, is_deleting=name in gone)
            for name, topic in sorted(topics.items())
            if topic.count or topic.overrides or topic.topic_id or name in gone
        ]
        # Rows of other processes, which are about to remove those files, are kept as they are.
        if self.deleting_elsewhere:
            rows += [row for row in read_topics(self._fs, self.path) if row.name in self.deleting_elsewhere]
        write_topics(self._fs, self.path, rows, may_use_reserve=makes_room)

    # -- make, change, delete ----------------------------------------------------------------------------------------

    def create(
        self, wanted: Mapping[str, tuple[int, Mapping[str, object] | None]], *, check_only: bool = False
    ) -> None:
        """Makes topics, name -> (partitions, config), all of them or none. check_only: only raise what that would."""
        flat = {_confusable(name): name for name in (*self.known, *self.deleting, *self.deleting_elsewhere)}
        made = []
        for name, (partitions, config) in wanted.items():
            check_topic_name(name)
            if name == METADATA_LOG:
                raise InvalidNameError("Kafka keeps this name for the log of its quorum", found=repr(name))
            if name in self.known:
                raise TopicExistsError("there is such a topic already", path=self.path, found=repr(name))
            if name in self.deleting or name in self.deleting_elsewhere:
                raise TopicExistsError("the topic of that name is being deleted", path=self.path, found=repr(name))
            other = flat.setdefault(_confusable(name), name)
            if other != name:
                raise InvalidNameError(
                    "the name differs from another topic's only in '.' and '_', or in upper and lower case",
                    expected=f"not {other!r}",
                    found=repr(name),
                )
            count = check_count(partitions, 1)
            overrides = self._overrides({}, config or {})
            made.append(TopicEntry(name, new_id(self._fs), count, overrides, PartitionNumbers(range(count))))
        for topic in made:
            for number in topic.numbers:
                self._check_unused(topic.name, number)
        if check_only or not made:
            return
        self.save(deleting=made)  # until they are whole, a crash undoes it
        try:
            self.make_partitions((topic, topic.numbers) for topic in made)
            self.known.update((topic.name, topic) for topic in made)
            self.version += 1
            self.save()
            for topic in made:
                tell("topics", INFO, "%s: topic %s made with %d partitions", self.path, topic.name, topic.count)
        except BaseException:
            self.undo(*made)
            raise

    def undo(self, *made: TopicEntry) -> None:
        """Takes back topics that could not be made; what fails of it is left to tick() and the next opening."""
        for topic in made:
            self.known.pop(topic.name, None)
            self.version += 1
            self.deleting[topic.name] = topic
        with self._incidents.going_on("deletion", made[0].name):
            self.finish_deleting()

    def grow(self, name: str, count: int, *, check_only: bool = False) -> None:
        """Raises a topic's number of partitions to count."""
        topic = self.topic(name)
        present = len(topic.numbers)
        if topic.numbers != tuple(range(present)):
            raise InvalidConfigError("the topic has gaps in its partition numbers", found=str(topic.numbers))
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
            overrides=self.own_overrides(topic),
        )
        self.save(attrs.evolve(grown, count=present, adding=count))  # until they exist, a crash undoes it
        try:
            self.make_partitions([(grown, range(present, count))])
            self.save(grown)
        except BaseException:
            with self._incidents.going_on("deletion", name):
                self._remove_partitions({name: range(present, count)})
                self.save(makes_room=True)
            raise
        self.known[name] = grown
        self.version += 1

    def alter(self, name: str, changes: Mapping[str, object | None], *, check_only: bool = False) -> None:
        """Changes what a topic sets itself; None takes a setting back to the default."""
        topic = self.topic(name)
        overrides = self._overrides(topic.overrides, changes)
        if check_only:
            return
        changed = attrs.evolve(topic, topic_id=self.topic_id(name), overrides=overrides)
        self.save(changed)
        self.known[name] = changed

    def start_deleting(self, topic: TopicEntry) -> None:
        """Deletes a topic, in one step; finish_deleting() removes its files, and its row if it is not `remembered`."""
        self.save(deleting=[topic], makes_room=True)
        self.deleting[topic.name] = self.known.pop(topic.name)
        self.remembered.add(topic.name)
        self.version += 1

    def finish_deleting(self) -> None:
        """Removes the files of topics that are gone. What fails here is tried again in tick(), and at the next opening.

        Raises what the system raises; the topics are gone all the same.
        """
        from logcore.staging import applying

        # Out of staged writes first: finishing one that is half in place needs the directories of all its topics. The
        # row of the file last: as long as it exists, the next opening ends the deletion.
        self._drop_finished()
        doomed = {name: topic for name, topic in self.deleting.items() if name not in self.emptied}
        if doomed:
            self._directory.close_logs(doomed)
            applying.drop_topics(self._fs, self.path, doomed)
            self._remove_partitions({name: topic.numbers for name, topic in doomed.items()})
            self.emptied.update(doomed)
        done = self.emptied - self.remembered
        if done:
            for name in done:
                self._drop(name)
            self.save(makes_room=True)

    def _drop(self, name: str) -> None:
        del self.deleting[name]
        self.emptied.discard(name)
        self.remembered.discard(name)

    def _drop_finished(self) -> None:
        """Passes over deletions that another process has finished: a topic of the name may be its, and new."""
        if self._claim is None or not self._claim.is_shared:
            return
        left = {row.name: row.topic_id for row in read_topics(self._fs, self.path) if row.is_deleting}
        for name, topic in [*self.deleting.items()]:
            if name not in left or left[name] != topic.topic_id:
                self._drop(name)

    def finish_rows(self, names: set[str]) -> None:
        """Removes the files of topics that a process was deleting when it died."""
        rows = read_topics(self._fs, self.path)
        doomed = {row.name: row.numbers for row in rows if row.is_deleting and row.name in names}
        if doomed:
            self._remove_partitions(doomed)
            write_topics(self._fs, self.path, [row for row in rows if row.name not in doomed])

    def _remove_partitions(self, numbers: Mapping[str, Iterable[int]]) -> None:
        """Removes partition directories, those that exist, and their lines in the checkpoints.

        First all are renamed, so that neither Kafka nor we take them for partitions. Then the files are removed, which
        makes room for writing the checkpoints. One that cannot be removed waits for the next opening; the first such
        error is raised in the end.
        """
        assert self._claim is not None
        keys: dict[tuple[str, int], int | None] = {(name, n): None for name, those in numbers.items() for n in those}
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
        """First step of deleting a partition directory, as Kafka does it, so that a crash leaves no half of one."""
        away = self.doomed_name(name)
        self._fs.rename(os.path.join(self.path, name), os.path.join(self.path, away))
        return away

    def doomed_name(self, name: str) -> str:
        """For a partition directory that is being deleted: each opening removes it."""
        return deleted_partition_name(name, self._fs.random_bytes(16))

    def remove_tree(self, name: str) -> None:
        """Removes a partition's directory with its files, if it exists."""
        remove_tree(self._fs, os.path.join(self.path, name))

    # -- settings ----------------------------------------------------------------------------------------------------

    def settings(self, topic: TopicEntry) -> LogConfig:
        """Those in force. For a topic that was not made here nothing is deleted by default: its settings may be in a
        place that is not known, such as Kafka's metadata.
        """
        implied: Mapping[str, object] = {}
        if not topic.count:
            implied = KEEPS_ALL
        return LogConfig.parse({**implied, **self._given, **topic.overrides})

    def own_overrides(self, topic: TopicEntry) -> dict[str, str]:
        """The settings for a copy of a topic, which is made here: its own, and those that settings() implies for a
        topic that was not.
        """
        if not topic.count:
            implied = {name: config_text(-1) for name in KEEPS_ALL if name not in self._given}
        else:
            implied = {}
        return {**implied, **topic.overrides}

    def _overrides(self, present: Mapping[str, str], changes: Mapping[str, object | None]) -> dict[str, str]:
        """The settings of a topic after changes, checked together with the defaults."""
        result: dict[str, Any] = {**present, **changes}
        for name in changes:
            known_config(name)
        result = {name: value for name, value in result.items() if value is not None}
        settings = LogConfig.parse({**self._given, **result}).as_mapping()
        return {name: config_text(settings[name]) for name in result}

    # -- directories of partitions ------------------------------------------------------------------------------------

    def partition_path(self, topic: str, number: int) -> str:
        return os.path.join(self.path, partition_name(topic, number))

    def make_partitions(self, wanted: Iterable[tuple[TopicEntry, Iterable[int]]]) -> None:
        """Makes directories of partitions, durably, that hold nothing yet."""
        made: dict[tuple[str, int], int | None] = {}
        for topic, numbers in wanted:
            for number in numbers:
                self.make_partition(topic, self.partition_path(topic.name, number))
                made[topic.name, number] = None
        if made:
            self.forget(made)  # lines that a deletion or another program may have left
            self._fs.sync_dir(self.path)

    def make_partition(self, topic: TopicEntry, path: str) -> None:
        """Makes one, under a name that may not be its last, with the topic's id in it."""
        with contextlib.suppress(FileExistsError):  # see _check_unused(); it is empty, or a crash left it
            self._fs.mkdir(path)
        assert topic.topic_id is not None
        metadata = f"version: 0\ntopic_id: {id_text(topic.topic_id)}"
        checkpoint.write(self._fs, path, checkpoint.PARTITION_METADATA, metadata.encode())

    def _check_unused(self, topic: str, number: int) -> None:
        """Raises CorruptLogError when there is something where a partition is to be made."""
        path = self.partition_path(topic, number)
        if self._fs.exists(path):
            self.check_directory(path)
            if any(name.endswith(LOG) for name in self._fs.listdir(path)):
                raise CorruptLogError("a new partition's directory holds records of another", path=path)

    def check_directory(self, path: str) -> None:
        """Raises CorruptLogError where no partition's directory is: a link may lead to what is not ours."""
        if not self._fs.exists(path):
            raise CorruptLogError("the partition's directory is gone; restore it, or delete the topic", path=path)
        if not self._fs.is_directory(path):
            raise CorruptLogError(
                "no directory: links inside a log directory are not followed", path=path, expected="a directory"
            )

    def note(self, file: str, offsets: Mapping[Key, int | None]) -> None:
        """Puts offsets of partitions into a checkpoint."""
        assert self._claim is not None
        self._claim.checkpoints.set(file, offsets)

    def forget(self, keys: Mapping[tuple[str, int], int | None]) -> None:
        """Takes partitions out of the checkpoints."""
        assert self._claim is not None
        for file in _CHECKPOINTS:
            self._claim.checkpoints.set(file, keys, may_use_reserve=True)


def remove_tree(fs: FS, directory: str) -> None:
    """Removes a directory with its files, if it exists."""
    if not fs.is_directory(directory):  # a link is not followed, and any other kind of file is not ours
        return
    for file in fs.listdir(directory):
        fs.unlink(os.path.join(directory, file))
    fs.rmdir(directory)


def _confusable(name: str) -> str:
    """Equal for names that Kafka's metrics, or a file system, cannot tell apart."""
    return name.replace(".", "_").lower()
