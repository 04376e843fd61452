"""Names of directories and files in a log directory, both ways: from a partition or an offset to a name, and back.

    orders-0                                a partition: topic, hyphen, number
    orders-0.<32 hex digits>-delete         a partition that is being deleted
    orders-0.recovering                     a copy that `logcore recover` has not finished
    00000000000000000042.log                a file of a segment, or of a point in the log: base offset, kind
    00000000000000000042.log.swap           the same while it is on its way in or out: base offset, kind, state
    00000000000000000042.1234.quarantine    what recovery cut from a segment, and the position where it lay

Rules:
- A name is judged alone. Twenty digits that are larger than any offset name no file of a log.
- A partition has one name: orders-00 can be parsed, but partition_name() never gives it.

This module touches no disk. The small files with fixed names belong to checkpoint.py, staged ones to staging/.
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
#: In the staging directory: a staged write that has offsets, and the last version of an application that is visible.
ASSIGNED: Final = ".assigned"
STATE: Final = ".state"
#: What belongs to a segment, in the order in which compaction renames it (storage format section 9.7).
SEGMENT_FILES: Final = (LOG, *INDEXES, SEAL)
#: All that follows a base offset.
SUFFIXES: Final = (LOG, *INDEXES, SNAPSHOT, SEAL)

#: States of a file that is going or coming (storage format section 3.1).
DELETED: Final = ".deleted"
CLEANED: Final = ".cleaned"
SWAP: Final = ".swap"
STATES: Final = (DELETED, CLEANED, SWAP)

QUARANTINE: Final = ".quarantine"
#: No opening mistakes such a directory for a partition, and Kafka does not start over it.
UNFINISHED: Final = ".recovering"

#: Kafka's topics for what groups have committed, and for how transactions stand.
OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"
#: Kafka's topic for the state of share groups.
SHARE_GROUPS_TOPIC: Final = "__share_group_state"
#: Topics that a broker keeps for itself: listed, and not written by clients.
INTERNAL_TOPICS: Final = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC, SHARE_GROUPS_TOPIC})
#: The log of a KRaft quorum. It is no topic, although its directory is named like that of a partition. Kafka does not
#: start without it.
METADATA_LOG: Final = "__cluster_metadata"

#: The longest name that common file systems take.
_NAME_BYTES: Final = 255
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_PARTITION: Final = re.compile(rf"({_TOPIC.pattern})-(\d{{1,10}})")
_DELETED_PARTITION: Final = re.compile(r".*\.[0-9a-f]{32}-delete")


# -- partitions ------------------------------------------------------------------------------------------------------


def is_topic_name(name: object) -> TypeGuard[str]:
    """Whether Kafka takes it as the name of a topic."""
    return isinstance(name, str) and _TOPIC.fullmatch(name) is not None and name not in (".", "..")


def check_topic_name(name: object) -> str:
    """The name, if Kafka takes it. Raises InvalidNameError, which says what a name may be."""
    if not is_topic_name(name):
        raise InvalidNameError(
            "not a topic name", expected="1 to 249 of letters, digits, '.', '_' and '-'", found=repr(name)
        )
    return name


def partition_name(topic: str, number: int) -> str:
    return f"{topic}-{number}"


def partition_of(name: str) -> tuple[str, int] | None:
    """(topic, number) of a partition directory's name, None for any other name and for what Kafka would refuse."""
    found = _PARTITION.fullmatch(name)
    if found is None:
        return None
    topic, digits = found.groups()
    number = int(digits)
    if topic in (".", "..") or len(name) > _NAME_BYTES or number > INT32_MAX:
        return None
    return topic, number


def parse_partition_name(name: str) -> tuple[str, int]:
    """The same, but raises InvalidNameError for what Kafka would refuse."""
    found = partition_of(name)
    if found is None:
        raise InvalidNameError(
            "a partition directory is named <topic>-<number>, the topic of letters, digits, '.', '_' and '-'",
            expected="a name like 'orders-0'",
            found=repr(name),
        )
    return found


def deleted_partition_name(name: str, unique: bytes) -> str:
    """As Kafka names a partition directory that is being deleted. unique: 16 random bytes."""
    suffix = f".{unique.hex()}-delete"
    return name[: _NAME_BYTES - len(suffix)] + suffix


def is_deleted_partition(name: str) -> bool:
    """Whether an opening may remove the directory: Kafka or logcore renamed it in order to delete it."""
    return _DELETED_PARTITION.fullmatch(name) is not None


def unfinished(path: str) -> str:
    """The name of a partition's copy until it is whole; cut in front if it is too long for a file system."""
    directory, name = os.path.split(path)
    return os.path.join(directory, name[-(_NAME_BYTES - len(UNFINISHED)) :] + UNFINISHED)


# -- files -----------------------------------------------------------------------------------------------------------


class FileName(NamedTuple):
    """suffix: one of SUFFIXES. state: "" for a file that is in place, else one of STATES, or several."""

    base_offset: int
    suffix: str
    state: str = ""

    def __str__(self) -> str:
        return file_name(self.base_offset, self.suffix + self.state)


def file_name(base_offset: int, suffix: str) -> str:
    """Base offset as 20 digits, then the suffix."""
    return f"{base_offset:020d}{suffix}"


def parse_file_name(name: str) -> FileName | None:
    """The parts of the name of a segment's file, or of a snapshot; None for other files."""
    living = without_state(name)
    suffix = living[20:]
    base_offset = None
    if suffix in SUFFIXES:
        base_offset = base_offset_of(living, suffix)
    if base_offset is None:
        return None
    return FileName(base_offset, suffix, name[len(living) :])


def base_offset_of(name: str, suffix: str = LOG) -> int | None:
    """The base offset in a file name that ends with the suffix, None for other files."""
    stem = name[: -len(suffix)]
    if not (name.endswith(suffix) and _is_digits(stem)):
        return None
    if int(stem) <= INT64_MAX:
        return int(stem)
    return None


def leading_offset(name: str) -> int | None:
    """The offset that a name begins with, whatever follows it."""
    return base_offset_of(name[:20] + LOG)


def bases_in(names: Iterable[str]) -> list[int]:
    """Base offsets of the segments among some names, rising."""
    logs = (base_offset_of(name) for name in names if name.endswith(LOG))
    return sorted(base for base in logs if base is not None)


def without_state(name: str) -> str:
    """A name without the suffixes of files that are going or coming."""
    for state in STATES:
        name = name.removesuffix(state)
    return name


def is_file_of_log(name: str) -> bool:
    """Whether a name begins as those of segments do, also where no offset is that large."""
    return name[20:21] == "." and _is_digits(name[:20])


def is_misnamed(name: str) -> bool:
    """Whether a name is a segment file's but for its digits, which are no offset: Kafka fails over it."""
    is_kafkas = name[20:] in SUFFIXES and name[20:] != SEAL
    return is_kafkas and _is_digits(name[:20]) and int(name[:20]) > INT64_MAX


def quarantine_name(base_offset: int, position: int, number: int = 0) -> str:
    """number: tells apart what several recoveries cut off at one position."""
    return file_name(base_offset, f".{position}.{number}{QUARANTINE}" if number else f".{position}{QUARANTINE}")


def quarantined_position(name: str) -> int | None:
    """The position in its segment of the content of a quarantine file, None for other files."""
    parts = name.split(".")
    if not name.endswith(QUARANTINE) or not parts[1].isdecimal():
        return None
    return int(parts[1])


def _is_digits(stem: str) -> bool:
    return len(stem) == 20 and stem.isascii() and stem.isdigit()


def staging_path(directory: str) -> str:
    """The directory beside a log directory: inside it Kafka would take any directory for a partition."""
    return directory.rstrip("/") + ".staging"
