"""The files of a staging directory: their names, manifests and the states of applications.

Rules:
- Manifests and states carry a CRC. A damaged one is an error and is not carried out. Assigned manifests and states hold
  their content twice, so that one damaged copy does no harm.
- The content of a manifest is checked when it is read; it names nothing outside its own directory.

This module gives out no offset and moves no file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from logcore import checkpoint
from logcore.config import INT32_MAX, INT64_MAX
from logcore.errors import (
    CorruptLogError,
    InvalidNameError,
    StorageWriteError,
)
from logcore.fs import FS
from logcore.names import ASSIGNED, STATE, parse_partition_name, partition_name

#: Suffixes of the names, as the package's first lines explain them.
READY: Final = ".json"
CLAIM: Final = ".claim"
REFUSED: Final = ".refused"
DAMAGED: Final = ".damaged"
_FORMAT: Final = 3
#: The stem of the file that holds the carried pieces of a write, below the directory of that write.
CARRIED: Final = "carried"
_TXID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
#: A manifest comes from a file; what makes one of it raises TypeError for other values.
_NUMBER: Final = attrs.validators.instance_of(int)
_COUNT: Final = attrs.validators.and_(_NUMBER, attrs.validators.ge(0), attrs.validators.le(INT64_MAX))
_EPOCH: Final = attrs.validators.and_(_NUMBER, attrs.validators.ge(0), attrs.validators.le(INT32_MAX))
_TEXT: Final = attrs.validators.instance_of(str)


@attrs.frozen
class StagedFile:
    """A staged segment, or a carried piece of one. name: path of the file below the staging directory, without a
    suffix. count: records. position, size_bytes: where in the file it stands; the position of a segment, which is all
    of its file, is None. crc: CRC-32C of these bytes as they were staged.
    """

    topic: str = attrs.field(validator=_TEXT)
    partition: int = attrs.field(validator=_COUNT)
    name: str = attrs.field(validator=_TEXT)
    count: int = attrs.field(validator=_COUNT)
    size_bytes: int = attrs.field(validator=_COUNT)
    batches: int = attrs.field(validator=_COUNT)
    max_timestamp: int = attrs.field(validator=_NUMBER)
    crc: int = attrs.field(validator=_NUMBER)
    position: int | None = attrs.field(default=None, validator=attrs.validators.optional(_COUNT))


@attrs.frozen
class Carried:
    """The records of one task for one partition, sent to the driver in a message instead of a file. data: whole batches
    whose offsets begin at 0. count, batches, max_timestamp, crc: as of a StagedFile.
    """

    topic: str
    partition: int
    data: bytes = attrs.field(repr=False)
    count: int
    batches: int
    max_timestamp: int
    crc: int


@attrs.frozen(kw_only=True)
class Place:
    """The destination of the staged files of one partition.

    base: offset of their first record. segment, position: append them to the segment of that base offset, which was
    then so long; None to move the files in place as segments of their own.
    """

    base: int = attrs.field(validator=_COUNT)
    leader_epoch: int = attrs.field(validator=_EPOCH)
    segment: int | None = attrs.field(default=None, validator=attrs.validators.optional(_COUNT))
    position: int | None = attrs.field(default=None, validator=attrs.validators.optional(_COUNT))


@attrs.frozen(kw_only=True)
class Manifest:
    """One write. topics: those it makes, with their number of partitions. places: where each partition's files go, by
    (topic, partition); None until a writer has claimed the manifest. query: the stream whose batch it is, or None.
    """

    app_id: str = attrs.field(validator=_TEXT)
    version: int = attrs.field(validator=_NUMBER)
    txid: str
    files: Sequence[StagedFile]
    topics: Mapping[str, int] = attrs.Factory(dict)
    places: Mapping[tuple[str, int], Place] | None = None
    query: str | None = attrs.field(default=None, validator=attrs.validators.optional(_TEXT))

    def partitions(self) -> dict[tuple[str, int], list[StagedFile]]:
        """The files of each partition, in order."""
        found: dict[tuple[str, int], list[StagedFile]] = {}
        for file in self.files:
            found.setdefault((file.topic, file.partition), []).append(file)
        return dict(sorted(found.items()))

    def ranges(self) -> dict[str, dict[str, list[int]]]:
        """topic -> partition -> [first offset, offset behind the last], as the state of an application has them."""
        assert self.places is not None
        found: dict[str, dict[str, list[int]]] = {}
        for (topic, partition), files in self.partitions().items():
            base = self.places[topic, partition].base
            found.setdefault(topic, {})[str(partition)] = [base, base + sum(file.count for file in files)]
        return found

    def pack(self) -> bytes:
        facts = attrs.asdict(self, recurse=False)
        facts["format"] = _FORMAT
        facts["files"] = [attrs.asdict(file) for file in self.files]
        if self.places is not None:
            facts["places"] = [
                {"topic": topic, "partition": partition, **attrs.asdict(place)}
                for (topic, partition), place in self.places.items()
            ]
        return checkpoint.pack_checked(facts, copies=1 if self.places is None else 2)

    @classmethod
    def unpack(cls, content: bytes, path: str) -> Manifest:
        """Raises CorruptLogError for what is no manifest."""
        facts = checkpoint.unpack_checked(content)
        if facts is None:
            raise CorruptLogError(
                "the manifest of staged segments is damaged",
                path=path,
                expected="a line that begins with the CRC-32 of its rest",
                found=repr(content[:40]),
            )
        try:
            if facts.pop("format") != _FORMAT:
                raise ValueError
            facts["files"] = [StagedFile(**file) for file in facts["files"]]
            if facts["places"] is not None:
                places = {}
                for place in facts["places"]:
                    key = place.pop("topic"), place.pop("partition")
                    places[key] = Place(**place)
                facts["places"] = places
            found = cls(**facts)
            check_txid(found.txid)
            for file in found.files:
                parse_partition_name(partition_name(file.topic, file.partition))
                directory, _, stem = file.name.partition("/")
                if directory != found.txid or not re.fullmatch(r"[A-Za-z0-9._-]+", stem) or file.count < 1:
                    raise ValueError
            if not all(isinstance(count, int) for count in found.topics.values()):
                raise ValueError
            if found.places is None:
                lacks_places = path.endswith(ASSIGNED)
            else:
                lacks_places = not found.places.keys() >= found.partitions().keys()
            if lacks_places:
                raise ValueError
            found.app_id.encode()  # a lone surrogate has no name in a directory
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidNameError) as error:
            raise CorruptLogError("not a manifest of staged segments", path=path) from error
        return found


def read_manifest(fs: FS, path: str, name: str) -> Manifest | None:
    content = checkpoint.read(fs, path, name)
    if content is None:
        return None
    return Manifest.unpack(content, os.path.join(path, name))


def read_state(fs: FS, path: str, app_id: str) -> dict[str, Any] | None:
    """The last version of an application that is done: version, txid, ranges. None when there was none.

    Raises CorruptLogError when it cannot be read: to guess would be to write twice, or never.
    """
    name = app_name(app_id) + STATE
    content = checkpoint.read(fs, path, name)
    if content is None:
        return None
    state = checkpoint.unpack_checked(content) or {}
    if state.get("app_id") != app_id or not isinstance(state.get("version"), int):
        raise CorruptLogError(
            f"the state of application {app_id!r} is damaged, so it is not known which versions are done; remove it to "
            "forget what was written",
            path=os.path.join(path, name),
            expected="a line that begins with the CRC-32 of its rest",
            found=repr(content[:40]),
        )
    return state


def write_state(fs: FS, path: str, assigned: Manifest) -> None:
    state = {
        "app_id": assigned.app_id,
        "version": assigned.version,
        "txid": assigned.txid,
        "ranges": assigned.ranges(),
        "query": assigned.query,
    }
    checkpoint.write(fs, path, app_name(assigned.app_id) + STATE, checkpoint.pack_checked(state, copies=2))


def check_txid(txid: str) -> str:
    if not _TXID.fullmatch(txid):
        raise InvalidNameError("not the name of a staged write", expected="letters, digits, - and _", found=repr(txid))
    return txid


def app_name(app_id: str) -> str:
    """An application's id as part of a file name; long ones by their hash."""
    import hashlib  # late, as the other: both take longer to import than most of this library
    import urllib.parse

    quoted = urllib.parse.quote(app_id, safe="")
    if 0 < len(quoted) <= 150:
        return quoted
    return "%hash-" + hashlib.sha256(app_id.encode()).hexdigest()


def manifest_name(app_id: str, version: int, suffix: str) -> str:
    return f"{app_name(app_id)}@{version:020d}{suffix}"


def names_in(fs: FS, path: str, suffix: str) -> list[str]:
    check_directory(fs, path)
    try:
        return sorted(name for name in fs.listdir(path) if name.endswith(suffix))
    except FileNotFoundError:
        return []


def check_directory(fs: FS, path: str) -> None:
    """Raises CorruptLogError for a link, which may lead to files that are not ours to move or remove."""
    if fs.exists(path) and not fs.is_directory(path):
        raise CorruptLogError(
            "no directory: links beside and inside a log directory are not followed", path=path, expected="a directory"
        )


def remove_tree(fs: FS, path: str) -> None:
    """Removes a directory of staged files, if it exists; a link is not followed."""
    if not fs.is_directory(path):
        return
    with contextlib.suppress(FileNotFoundError):
        for name in fs.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(os.path.join(path, name))
        with contextlib.suppress(StorageWriteError):  # a task that was given up has just made a file in it
            fs.rmdir(path)
