"""The files of a staging directory: their names, manifests and the states of
applications.

Rules:
- Manifests and states carry a CRC. A damaged one is an error and is not carried out.
  Assigned manifests and states hold their content twice, so that one damaged copy does
  no harm.
- The content of a manifest is checked when it is read; it names nothing outside its own
  directory.

This module gives out no offset and moves no file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from logcore.config import INT32_MAX, INT64_MAX
from logcore.errors import (
    CorruptLogError,
    InvalidNameError,
    StorageWriteError,
)
from logcore.fs import FS
from logcore.metadata import checkpoint
from logcore.metadata.filenames import (
    ASSIGNED,
    STATE,
    parse_partition_name,
    partition_name,
)

#: Suffixes of the names, explained at the top of the package.
READY: Final = ".json"
CLAIM: Final = ".claim"
REFUSED: Final = ".refused"
DAMAGED: Final = ".damaged"
_FORMAT: Final = 3
#: The stem of the file with the carried pieces of a write, in the directory of that
#: write.
CARRIED: Final = "carried"
_TXID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
#: A manifest comes from a file, so values of other types raise TypeError.
_NUMBER: Final = attrs.validators.instance_of(int)
_COUNT: Final = attrs.validators.and_(
    _NUMBER, attrs.validators.ge(0), attrs.validators.le(INT64_MAX)
)
_COUNT_OR_NONE: Final = attrs.validators.optional(_COUNT)
_EPOCH: Final = attrs.validators.and_(
    _NUMBER, attrs.validators.ge(0), attrs.validators.le(INT32_MAX)
)
_TEXT: Final = attrs.validators.instance_of(str)


@attrs.frozen
class StagedFile:
    """A staged segment, or a carried piece."""

    topic: str = attrs.field(validator=_TEXT)
    partition: int = attrs.field(validator=_COUNT)
    #: Path of the file below the staging directory, without a suffix.
    name: str = attrs.field(validator=_TEXT)
    #: Number of records.
    count: int = attrs.field(validator=_COUNT)
    size_bytes: int = attrs.field(validator=_COUNT)
    batches: int = attrs.field(validator=_COUNT)
    max_timestamp: int = attrs.field(validator=_NUMBER)
    #: CRC-32C of these bytes as they were staged.
    crc: int = attrs.field(validator=_NUMBER)
    #: Position of a piece in its file. None for a segment, which is a whole file.
    position: int | None = attrs.field(default=None, validator=_COUNT_OR_NONE)


@attrs.frozen
class Carried:
    """The records of one task for one partition, sent to the driver in a message.

    The other fields are like those of a StagedFile.
    """

    topic: str
    partition: int
    #: Whole batches whose offsets begin at 0.
    data: bytes = attrs.field(repr=False)
    count: int
    batches: int
    max_timestamp: int
    crc: int


@attrs.frozen(kw_only=True)
class StagedTarget:
    """The destination of the staged files of one partition."""

    #: The offset of their first record.
    base: int = attrs.field(validator=_COUNT)
    leader_epoch: int = attrs.field(validator=_EPOCH)
    #: Append the files to the segment with this base offset, at this position, which
    #: was its size. None to move the files in place as separate segments.
    segment: int | None = attrs.field(default=None, validator=_COUNT_OR_NONE)
    position: int | None = attrs.field(default=None, validator=_COUNT_OR_NONE)


@attrs.frozen(kw_only=True)
class Manifest:
    """One write."""

    app_id: str = attrs.field(validator=_TEXT)
    version: int = attrs.field(validator=_NUMBER)
    txid: str
    files: Sequence[StagedFile]
    #: Topics to create, with their number of partitions.
    topics: Mapping[str, int] = attrs.Factory(dict)
    #: Destinations by (topic, partition); None until a writer has claimed the manifest.
    places: Mapping[tuple[str, int], StagedTarget] | None = None
    #: The stream that this batch belongs to, or None.
    query: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(_TEXT)
    )

    def partitions(self) -> dict[tuple[str, int], list[StagedFile]]:
        """Return the files of each partition, in order."""
        found: dict[tuple[str, int], list[StagedFile]] = {}
        for file in self.files:
            found.setdefault((file.topic, file.partition), []).append(file)
        return dict(sorted(found.items()))

    def ranges(self) -> dict[str, dict[str, list[int]]]:
        """Return topic -> partition -> [first offset, end offset], as stored in the
        state.
        """
        assert self.places is not None
        found: dict[str, dict[str, list[int]]] = {}
        for (topic, partition), files in self.partitions().items():
            base = self.places[topic, partition].base
            found.setdefault(topic, {})[str(partition)] = [
                base,
                base + sum(file.count for file in files),
            ]
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
        """Return a manifest from the content of its file, or raise CorruptLogError."""
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
                    places[key] = StagedTarget(**place)
                facts["places"] = places
            found = cls(**facts)
            check_txid(found.txid)
            for file in found.files:
                parse_partition_name(partition_name(file.topic, file.partition))
                directory, _, stem = file.name.partition("/")
                if (
                    directory != found.txid
                    or not re.fullmatch(r"[A-Za-z0-9._-]+", stem)
                    or file.count < 1
                ):
                    raise ValueError
            if not all(isinstance(count, int) for count in found.topics.values()):
                raise ValueError
            if found.places is None:
                has_no_destinations = path.endswith(ASSIGNED)
            else:
                has_no_destinations = (
                    not found.places.keys() >= found.partitions().keys()
                )
            if has_no_destinations:
                raise ValueError
            # A lone surrogate has no name in a directory.
            found.app_id.encode()
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            InvalidNameError,
        ) as error:
            raise CorruptLogError(
                "not a manifest of staged segments", path=path
            ) from error
        return found


def read_manifest(fs: FS, path: str, name: str) -> Manifest | None:
    content = checkpoint.read(fs, path, name)
    if content is None:
        return None
    return Manifest.unpack(content, os.path.join(path, name))


def read_state(fs: FS, path: str, app_id: str) -> dict[str, Any] | None:
    """Return the last completed version of an application: version, txid, ranges.

    The result is None if no version was completed.

    Raises:
        CorruptLogError: the state cannot be read. A guess could write twice, or never.
    """
    name = app_name(app_id) + STATE
    content = checkpoint.read(fs, path, name)
    if content is None:
        return None
    state = checkpoint.unpack_checked(content) or {}
    if state.get("app_id") != app_id or not isinstance(state.get("version"), int):
        raise CorruptLogError(
            f"the state of application {app_id!r} is damaged, so its completed versions are unknown; remove it to "
            "begin without them",
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
    checkpoint.write(
        fs,
        path,
        app_name(assigned.app_id) + STATE,
        checkpoint.pack_checked(state, copies=2),
    )


def check_txid(txid: str) -> str:
    if not _TXID.fullmatch(txid):
        raise InvalidNameError(
            "not the name of a staged write",
            expected="letters, digits, - and _",
            found=repr(txid),
        )
    return txid


def app_name(app_id: str) -> str:
    """Return an application's id as part of a file name; a hash if it is long."""
    # These are imported late because they load slower than most of this library.
    import hashlib
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
    """Raise CorruptLogError for a link, which may lead to files outside the log."""
    if fs.exists(path) and not fs.is_directory(path):
        raise CorruptLogError(
            "no directory: links beside and inside a log directory are not followed",
            path=path,
            expected="a directory",
        )


def remove_tree(fs: FS, path: str) -> None:
    """Remove a directory of staged files, if it exists; links are not followed."""
    if not fs.is_directory(path):
        return
    with contextlib.suppress(FileNotFoundError):
        for name in fs.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(os.path.join(path, name))
        # A task that was given up has just created a file in it.
        with contextlib.suppress(StorageWriteError):
            fs.rmdir(path)
