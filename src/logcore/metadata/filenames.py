"""Names of directories and files in a log directory, converted from and to partitions
and offsets.

    orders-0                                a partition: topic, hyphen, number
    orders-0.<32 hex digits>-delete         a partition that is being deleted
    orders-0.recovering                     an incomplete copy made by `logcore recover`
    00000000000000000042.log                a file of a segment, or of an offset: base
    offset, kind
    00000000000000000042.log.swap           the same before or after its use: base
    offset, kind, state
    00000000000000000042.1234.quarantine    bytes that recovery removed from a segment,
    by position

Rules:
- A name is checked on its own. Twenty digits above the largest offset do not name a file
  of a log.
- A partition has one name: orders-00 can be parsed, but partition_name() never returns
  it.

This module uses no disk. The small files with fixed names belong to checkpoint.py,
staged ones to staging/.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeGuard

from logcore.config import INT32_MAX, INT64_MAX
from logcore.errors import InvalidNameError

LOG: Final = ".log"
INDEX: Final = ".index"
TIME_INDEX: Final = ".timeindex"
TXN_INDEX: Final = ".txnindex"
SNAPSHOT: Final = ".snapshot"
SEAL: Final = ".seal"
INDEXES: Final = (INDEX, TIME_INDEX, TXN_INDEX)
#: In the staging directory: a staged write with offsets, and the last visible version
#: of an application.
ASSIGNED: Final = ".assigned"
STATE: Final = ".state"
#: The files of a segment, in the order in which compaction renames them (storage format
#: section 9.7).
SEGMENT_FILES: Final = (LOG, *INDEXES, SEAL)
#: All suffixes after a base offset.
SUFFIXES: Final = (LOG, *INDEXES, SNAPSHOT, SEAL)

#: States of a file before or after its use (storage format section 3.1).
DELETED: Final = ".deleted"
CLEANED: Final = ".cleaned"
SWAP: Final = ".swap"
STATES: Final = (DELETED, CLEANED, SWAP)

QUARANTINE: Final = ".quarantine"
#: No opening treats such a directory as a partition, and Kafka refuses to start with
#: it.
UNFINISHED: Final = ".recovering"

#: Kafka's topics for committed offsets of groups, and for the state of transactions.
OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"
#: Kafka's topic for the state of share groups.
SHARE_GROUPS_TOPIC: Final = "__share_group_state"
#: Topics that a broker manages itself: they are listed, and clients do not write to
#: them.
INTERNAL_TOPICS: Final = frozenset(
    {OFFSETS_TOPIC, TRANSACTIONS_TOPIC, SHARE_GROUPS_TOPIC}
)
#: The log of a KRaft quorum. It is not a topic, although its directory is named like a
#: partition. Kafka does not start without it.
METADATA_LOG: Final = "__cluster_metadata"

#: The longest name that common file systems support.
_NAME_BYTES: Final = 255
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_PARTITION: Final = re.compile(rf"({_TOPIC.pattern})-(\d{{1,10}})")
_DELETED_PARTITION: Final = re.compile(r".*\.[0-9a-f]{32}-delete")


# -- partitions ------------------------------------------------------------------------


def is_topic_name(name: object) -> TypeGuard[str]:
    """Return whether Kafka accepts this as the name of a topic."""
    return (
        isinstance(name, str)
        and _TOPIC.fullmatch(name) is not None
        and name not in (".", "..")
    )


def check_topic_name(name: object) -> str:
    """Return the name if Kafka accepts it.

    Raises:
        InvalidNameError: Kafka does not accept it; the error contains the rule for
            names.
    """
    if not is_topic_name(name):
        raise InvalidNameError(
            "not a topic name",
            expected="1 to 249 of letters, digits, '.', '_' and '-'",
            found=repr(name),
        )
    return name


def partition_name(topic: str, number: int) -> str:
    return f"{topic}-{number}"


def partition_of(name: str) -> tuple[str, int] | None:
    """Return (topic, number) of a partition directory's name, or None.

    None also for names that Kafka would refuse.
    """
    found = _PARTITION.fullmatch(name)
    if found is None:
        return None
    topic, digits = found.groups()
    number = int(digits)
    if topic in (".", "..") or len(name) > _NAME_BYTES or number > INT32_MAX:
        return None
    return topic, number


def parse_partition_name(name: str) -> tuple[str, int]:
    """Return (topic, number) like partition_of(), or raise InvalidNameError."""
    found = partition_of(name)
    if found is None:
        raise InvalidNameError(
            "a partition directory is named <topic>-<number>, the topic of letters, digits, '.', '_' and '-'",
            expected="a name like 'orders-0'",
            found=repr(name),
        )
    return found


def deleted_partition_name(name: str, unique: bytes) -> str:
    """Return Kafka's name for a partition directory that is being deleted.

    `unique` contains 16 random bytes.
    """
    suffix = f".{unique.hex()}-delete"
    return name[: _NAME_BYTES - len(suffix)] + suffix


def is_deleted_partition(name: str) -> bool:
    """Return whether an opening may remove the directory.

    Kafka or logcore renamed it in order to delete it.
    """
    return _DELETED_PARTITION.fullmatch(name) is not None


def unfinished(path: str) -> str:
    """Return the name of a partition's copy until it is complete.

    A name that is too long for a file system is shortened at its start.
    """
    directory, name = os.path.split(path)
    return os.path.join(
        directory, name[-(_NAME_BYTES - len(UNFINISHED)) :] + UNFINISHED
    )


# -- files -----------------------------------------------------------------------------


class FileName(NamedTuple):
    """The parts of a file name."""

    base_offset: int
    #: One of SUFFIXES.
    suffix: str
    #: "" for a file in use, else one or several of STATES.
    state: str = ""

    def __str__(self) -> str:
        return file_name(self.base_offset, self.suffix + self.state)


def file_name(base_offset: int, suffix: str) -> str:
    """Return the base offset as 20 digits, then the suffix."""
    return f"{base_offset:020d}{suffix}"


def parse_file_name(name: str) -> FileName | None:
    """Return the parts of the name of a segment file or snapshot; None for other files."""
    living = without_state(name)
    suffix = living[20:]
    base_offset = None
    if suffix in SUFFIXES:
        base_offset = base_offset_of(living, suffix)
    if base_offset is None:
        return None
    return FileName(base_offset, suffix, name[len(living) :])


def base_offset_of(name: str, suffix: str = LOG) -> int | None:
    """Return the base offset in a file name that ends with the suffix; None for other
    files.
    """
    stem = name[: -len(suffix)]
    if not (name.endswith(suffix) and _is_digits(stem)):
        return None
    if int(stem) <= INT64_MAX:
        return int(stem)
    return None


def leading_offset(name: str) -> int | None:
    """Return the offset that a name begins with, whatever follows it."""
    return base_offset_of(name[:20] + LOG)


def bases_in(names: Iterable[str]) -> list[int]:
    """Return the base offsets of the segments among some names, sorted."""
    logs = (base_offset_of(name) for name in names if name.endswith(LOG))
    return sorted(base for base in logs if base is not None)


def without_state(name: str) -> str:
    """Return a name without the suffixes of STATES."""
    for state in STATES:
        name = name.removesuffix(state)
    return name


def is_file_of_log(name: str) -> bool:
    """Return whether a name begins like that of a segment, even if the number is not an
    offset.
    """
    return name[20:21] == "." and _is_digits(name[:20])


def is_misnamed(name: str) -> bool:
    """Return whether a name has the form of a segment file, but its digits are not an
    offset.

    Kafka fails on such a file.
    """
    is_kafka_file = name[20:] in SUFFIXES and name[20:] != SEAL
    return is_kafka_file and _is_digits(name[:20]) and int(name[:20]) > INT64_MAX


def quarantine_name(base_offset: int, position: int, number: int = 0) -> str:
    """Return a quarantine file's name; `number` separates several recoveries at one
    position.
    """
    return file_name(
        base_offset,
        f".{position}.{number}{QUARANTINE}" if number else f".{position}{QUARANTINE}",
    )


def quarantined_position(name: str) -> int | None:
    """Return the position in its segment of a quarantine file's content; None for other
    files.
    """
    parts = name.split(".")
    if not name.endswith(QUARANTINE) or not parts[1].isdecimal():
        return None
    return int(parts[1])


def _is_digits(stem: str) -> bool:
    return len(stem) == 20 and stem.isascii() and stem.isdigit()


def staging_path(directory: str) -> str:
    """Return the staging directory, which is beside the log directory.

    Inside it, Kafka would treat any directory as a partition.
    """
    return directory.rstrip("/") + ".staging"
