"""The file `logcore.topics`: a row for each topic that was made here, and the ids that Kafka gives topics.

Rules:
- The file is replaced in one step. A topic that it calls deleting does not exist: its files are being removed, or are
  not all made yet.
- The file may come from anywhere. All that it says is checked before any of it becomes a path or memory.

This module makes no directory and opens no log.
"""

from __future__ import annotations

import base64
import bisect
import operator
import os
import uuid
from collections.abc import Iterable
from typing import Any, Final, cast

import attrs

from logcore import checkpoint
from logcore.errors import CorruptLogError, InvalidConfigError
from logcore.fs import FS
from logcore.names import is_topic_name

NO_ID: Final = uuid.UUID(int=0)
#: Not Kafka's limit: each is a directory with files, and a slip of the keyboard must not make a million of them.
MOST_PARTITIONS: Final = 100_000
_MOST_IN_ALL: Final = 1_000_000
#: Taken until Kafka 4 removed it; rows that an earlier version wrote may have it.
_REMOVED_SETTING: Final = "message.downconversion.enable"


class PartitionNumbers(tuple[int, ...]):
    """The numbers of a topic's partitions, ascending.

    `number in numbers` is a search by halves. It is asked for each partition of a request, and a tuple would walk all
    numbers each time: with 10,000 partitions a commit of all of them took 0.4 s.
    """

    __slots__ = ()

    def __contains__(self, number: object) -> bool:
        try:
            at = bisect.bisect_left(self, cast("int", number))
        except TypeError:  # what compares with no number is none
            return False
        return at < len(self) and self[at] == number


@attrs.define
class TopicEntry:
    """What is known of a topic. count: its partitions are 0..count-1; 0 for one that only its directories tell of."""

    name: str
    topic_id: uuid.UUID | None = None  # None: not looked up yet
    count: int = 0
    overrides: dict[str, str] = attrs.Factory(dict)
    numbers: PartitionNumbers = attrs.Factory(PartitionNumbers)
    is_deleting: bool = False  # in the file of topics: its files are being removed, or not all of them are made yet
    adding: int = 0  # in the file of topics: partitions from count to here are being made

    def as_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"topic": self.name, "id": id_text(self.topic_id or NO_ID), "partitions": self.count}
        if self.overrides:
            facts["config"] = self.overrides
        if self.is_deleting:
            facts["deleting"] = True
        if self.adding:
            facts["adding"] = self.adding
        return facts

    @classmethod
    def from_json(cls, row: object) -> TopicEntry:
        """Raises ValueError, which says what is wrong. The file may come from anywhere, and what it says becomes paths
        and memory.
        """
        facts: dict[str, Any] = {}
        if isinstance(row, dict):
            facts = row
        name = facts.get("topic")
        if not is_topic_name(name):
            raise ValueError(f"a row whose topic is {name!r:.80}")
        count = facts.get("partitions")
        adding = facts.get("adding", 0)
        for number in (count, adding):
            if type(number) is not int or not 0 <= number <= MOST_PARTITIONS:
                raise ValueError(f"topic {name} with {number!r:.80} partitions")
        overrides = facts.get("config", {})
        if not isinstance(overrides, dict) or not all(isinstance(value, str) for value in overrides.values()):
            raise ValueError(f"topic {name} with settings that are no text")
        overrides = {setting: value for setting, value in overrides.items() if setting != _REMOVED_SETTING}
        try:
            topic_id = parse_id(facts["id"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"topic {name} without an id") from None
        assert isinstance(count, int)
        known_id: uuid.UUID | None = topic_id
        if not topic_id.int:
            known_id = None  # as_json() writes 0 for an id that was not looked up
        return cls(
            name,
            known_id,
            count,
            overrides,
            PartitionNumbers(range(count)),
            facts.get("deleting") is True,
            adding,
        )


def read_topics(fs: FS, path: str) -> list[TopicEntry]:
    """Rows of logcore.topics. Raises CorruptLogError: settings that cannot be believed are not guessed."""
    content = checkpoint.read(fs, path, checkpoint.TOPICS)
    if content is None:
        return []
    rows = checkpoint.unpack_topics(content)
    if rows is None:
        raise CorruptLogError(
            "the file of topics is damaged; restore it from a copy, or remove it and set the topics' configs again",
            path=os.path.join(path, checkpoint.TOPICS),
            expected="a first line whose crc32 is that of the rest",
            found=repr(content[:80]),
        )
    try:
        total = sum(int(row["partitions"]) for row in rows if isinstance(row, dict) and _is_count(row))
        if total > _MOST_IN_ALL:
            raise ValueError(f"{total} partitions in all, where {_MOST_IN_ALL} are the most")
        topics = [TopicEntry.from_json(row) for row in rows]
        if len({topic.name for topic in topics}) < len(topics):
            raise ValueError("a topic twice")
    except ValueError as error:
        raise CorruptLogError(
            "the file of topics holds what no program writes; restore it from a copy, or remove it and set "
            "the topics' configs again",
            path=os.path.join(path, checkpoint.TOPICS),
            expected="names, ids, counts and settings of topics",
            found=str(error),
        ) from error
    return topics


def write_topics(fs: FS, path: str, topics: Iterable[TopicEntry], *, may_use_reserve: bool = True) -> None:
    """Replaces the file. may_use_reserve: on a full disk."""
    rows = [topic.as_json() for topic in topics]
    total = sum(row["partitions"] for row in rows)
    if total > _MOST_IN_ALL:
        raise InvalidConfigError("partitions in all", expected=f"at most {_MOST_IN_ALL}", found=total)
    content = checkpoint.pack_topics(rows)
    reserve = None
    if may_use_reserve:
        reserve = path
    checkpoint.write(fs, path, checkpoint.TOPICS, content, reserve=reserve)


def id_text(topic_id: uuid.UUID) -> str:
    """A topic or cluster id as Kafka writes it: 22 characters of base64url."""
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def parse_id(text: str) -> uuid.UUID:
    """The reverse of id_text(). Raises ValueError."""
    return uuid.UUID(bytes=base64.b64decode(text + "==", b"-_", validate=True))


def new_id(fs: FS) -> uuid.UUID:
    """An id for a topic, a cluster or a directory."""
    while True:
        made = uuid.UUID(bytes=fs.random_bytes(16), version=4)
        if not id_text(made).startswith("-"):  # Kafka: such a text would look like an option
            return made


def check_count(partitions: object, least: int) -> int:
    """A number of partitions. Raises InvalidConfigError."""
    try:
        count = operator.index(partitions)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if not least <= count <= MOST_PARTITIONS:
        raise InvalidConfigError(
            "number of partitions", expected=f"{least} to {MOST_PARTITIONS}", found=repr(partitions)
        )
    return count


def _is_count(row: dict[str, Any]) -> bool:
    return type(row.get("partitions")) is int and row["partitions"] > 0
