"""The file `logcore.topics`, with a row for each topic created here, and Kafka's topic
ids.

Rules:
- The file is replaced atomically. A topic marked as deleting does not exist: its files
  are being removed, or are not complete yet.
- The file may come from any source. All of its content is checked before any of it
  is used as a path or as a size of memory.

This module creates no directories and opens no logs.
"""

from __future__ import annotations

import base64
import bisect
import operator
import os
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import attrs

from logcore.errors import CorruptLogError, InvalidConfigError
from logcore.fs import FS
from logcore.metadata import checkpoint
from logcore.metadata.filenames import is_topic_name

#: Topics to create: the number of partitions and the settings of each, by its name.
NewTopics = Mapping[str, tuple[int, Mapping[str, object] | None]]

NO_ID: Final = uuid.UUID(int=0)
#: Not Kafka's limit. Each partition is a directory with files, and a typing error must
#: not create a million of them.
MAX_PARTITIONS: Final = 100_000
_MAX_TOTAL_PARTITIONS: Final = 1_000_000
#: A setting that Kafka 4 removed. Rows of earlier versions of logcore may contain it.
_REMOVED_SETTING: Final = "message.downconversion.enable"


class PartitionNumbers(tuple[int, ...]):
    """The numbers of a topic's partitions, ascending.

    `number in numbers` is a binary search, because it runs for each partition of a
    request. With the linear search of a tuple, a commit of 10,000 partitions took 0.4 s.
    """

    __slots__ = ()

    def __contains__(self, number: object) -> bool:
        try:
            at = bisect.bisect_left(self, cast("int", number))
        # A value that cannot be compared with numbers is not a number.
        except TypeError:
            return False
        return at < len(self) and self[at] == number


@attrs.define
class TopicEntry:
    """A topic: its row in the file of topics, and its partitions in this directory."""

    name: str
    #: None until it is determined.
    topic_id: uuid.UUID | None = None
    #: The partitions are 0..count-1; 0 if the topic is known only from its directories.
    count: int = 0
    overrides: dict[str, str] = attrs.Factory(dict)
    numbers: PartitionNumbers = attrs.Factory(PartitionNumbers)
    #: Whether the files of the topic are being removed, or are not complete yet.
    is_deleting: bool = False
    #: The partitions from `count` to `adding` - 1 are being created.
    adding: int = 0
    #: Whether this is a topic of a cluster: `numbers` contains the partitions that have
    #: a replica in this directory.
    is_of_cluster: bool = False

    def as_json(self) -> dict[str, Any]:
        row_values: dict[str, Any] = {
            "topic": self.name,
            "id": id_text(self.topic_id or NO_ID),
            "partitions": self.count,
        }
        if self.overrides:
            row_values["config"] = self.overrides
        if self.is_deleting:
            row_values["deleting"] = True
        if self.adding:
            row_values["adding"] = self.adding
        if self.is_of_cluster:
            row_values["placed"] = list(self.numbers)
        return row_values

    @classmethod
    def from_json(cls, row: object) -> TopicEntry:
        """Return the topic of a row.

        The file may come from any source, and its content becomes paths and memory.

        Raises:
            ValueError: the row is invalid; the text is the reason.
        """
        row_values: dict[str, Any] = {}
        if isinstance(row, dict):
            row_values = row
        name = row_values.get("topic")
        if not is_topic_name(name):
            raise ValueError(f"a row whose topic is {name!r:.80}")
        count = row_values.get("partitions")
        adding = row_values.get("adding", 0)
        for number in (count, adding):
            if type(number) is not int or not 0 <= number <= MAX_PARTITIONS:
                raise ValueError(f"topic {name} with {number!r:.80} partitions")
        overrides = row_values.get("config", {})
        if not isinstance(overrides, dict) or not all(
            isinstance(value, str) for value in overrides.values()
        ):
            raise ValueError(f"topic {name} with settings that are not text")
        overrides = {
            setting: value
            for setting, value in overrides.items()
            if setting != _REMOVED_SETTING
        }
        try:
            topic_id = parse_id(row_values["id"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"topic {name} without an id") from None
        assert isinstance(count, int)
        numbers = PartitionNumbers(range(count))
        replicas = row_values.get("placed")
        if replicas is not None:
            numbers = PartitionNumbers(_check_replicas(name, replicas, count))
        known_id: uuid.UUID | None = topic_id
        if not topic_id.int:
            # as_json() writes 0 for an unknown id.
            known_id = None
        return cls(
            name,
            known_id,
            count,
            overrides,
            numbers,
            row_values.get("deleting") is True,
            adding,
            replicas is not None,
        )


def _check_replicas(name: str, replicas: object, count: int) -> list[int]:
    """Return the partitions of a topic in this directory, or raise ValueError."""
    if not isinstance(replicas, list) or not all(
        type(number) is int and 0 <= number < count for number in replicas
    ):
        raise ValueError(f"topic {name} with replicas {replicas!r:.80}")
    if sorted(set(replicas)) != replicas:
        raise ValueError(f"topic {name} with replicas {replicas!r:.80}")
    return replicas


def read_topics(fs: FS, path: str) -> list[TopicEntry]:
    """Return the rows of logcore.topics.

    Raises:
        CorruptLogError: the file is damaged. Its settings are not guessed.
    """
    content = checkpoint.read(fs, path, checkpoint.TOPICS)
    if content is None:
        return []
    rows = checkpoint.unpack_topics(content)
    if rows is None:
        raise CorruptLogError(
            "the file of topics is damaged; restore it from a copy, or remove it and set the topics' configs again",
            path=os.path.join(path, checkpoint.TOPICS),
            expected="a first line with the crc32 of the other lines",
            found=repr(content[:80]),
        )
    try:
        total = sum(
            int(row["partitions"])
            for row in rows
            if isinstance(row, dict) and _is_count(row)
        )
        if total > _MAX_TOTAL_PARTITIONS:
            raise ValueError(
                f"{total} partitions in total, and the maximum is {_MAX_TOTAL_PARTITIONS}"
            )
        topics = [TopicEntry.from_json(row) for row in rows]
        if len({topic.name for topic in topics}) < len(topics):
            raise ValueError("a topic twice")
    except ValueError as error:
        raise CorruptLogError(
            "the file of topics has content that no program writes; restore it from a copy, or remove it and set "
            "the topics' configs again",
            path=os.path.join(path, checkpoint.TOPICS),
            expected="names, ids, counts and settings of topics",
            found=str(error),
        ) from error
    return topics


def write_topics(
    fs: FS, path: str, topics: Iterable[TopicEntry], *, may_use_reserve: bool = True
) -> None:
    """Replace the file. With `may_use_reserve`, space of the reserve file may be used."""
    rows = [topic.as_json() for topic in topics]
    total = sum(row["partitions"] for row in rows)
    if total > _MAX_TOTAL_PARTITIONS:
        raise InvalidConfigError(
            "partitions in total",
            expected=f"at most {_MAX_TOTAL_PARTITIONS}",
            found=total,
        )
    content = checkpoint.pack_topics(rows)
    reserve = None
    if may_use_reserve:
        reserve = path
    checkpoint.write(fs, path, checkpoint.TOPICS, content, reserve=reserve)


def id_text(topic_id: uuid.UUID) -> str:
    """Return a topic or cluster id in Kafka's form: 22 characters of base64url."""
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def parse_id(text: str) -> uuid.UUID:
    """Return the id of a text from id_text(), or raise ValueError."""
    return uuid.UUID(bytes=base64.b64decode(text + "==", b"-_", validate=True))


def new_id(fs: FS) -> uuid.UUID:
    """Return a new id for a topic, a cluster or a directory."""
    while True:
        candidate = uuid.UUID(bytes=fs.random_bytes(16), version=4)
        # As in Kafka, because such a text would resemble a command-line option.
        if not id_text(candidate).startswith("-"):
            return candidate


def check_count(partitions: object, least: int) -> int:
    """Return a valid number of partitions, or raise InvalidConfigError."""
    try:
        count = operator.index(partitions)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if not least <= count <= MAX_PARTITIONS:
        raise InvalidConfigError(
            "number of partitions",
            expected=f"{least} to {MAX_PARTITIONS}",
            found=repr(partitions),
        )
    return count


def _is_count(row: dict[str, Any]) -> bool:
    return type(row.get("partitions")) is int and row["partitions"] > 0
