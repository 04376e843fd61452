"""Writes of many tasks that appear at once or never: segments staged beside the log, published by one manifest.

    data/orders-0/...                                       the log directory, as Kafka and all readers see it
    data.staging/<txid>/<topic>-<partition>.<task>.<attempt>.<n>.{log,index,timeindex}
    data.staging/<app>@<version>.json                       a manifest: ready, nothing in it says where records will lie
    data.staging/<app>@<version>.claim                      the same while a writer turns it into
    data.staging/<app>@<version>.assigned                   a manifest with offsets, carried out whatever happens
    data.staging/<app>.state                                the last version of an application that is done
    data.staging/<app>@<version>.refused                    why a manifest was not carried out
    data.staging/<app>@<version>.damaged                    an assigned manifest that rotted, kept for a person to see
    data.staging/logcore.garbage                            what was old when publish() last looked, and since when

The road of a write: tasks stage segments whose offsets begin at 0, under names no other attempt has, and sync them.
Whoever drives them publishes a manifest: this is the moment from which all of it will be there. A writer of the
directory claims it, gives out offsets from the ends of the logs, writes them down, and only then stamps them into the
batch heads, outside the CRC, and moves the files in place. A crash before "assigned" leaves a manifest that somebody
claims later; after it, roll_forward() ends the work before any log is listed.

Rules:
- Every step may be done twice: offsets are absolute, what is moved is not there to be moved again, and what is appended
  is first cut back to the place written down.
- Nothing of a manifest is shown before all partitions of it are in place.
- A version at or below an application's state is done: its manifest and its files are removed, and that is success.
- What no manifest names is garbage after a day: attempts that lost, or came late. It is removed when two looks a day
  apart found it old, so that one jump of the wall clock removes nothing.
- Manifests and states carry a CRC. One that is damaged is an error and is not carried out; what is damaged of an
  assigned one, or of a state, is made good from its second copy.
- A staged segment differs from a real one in its name and in the base offsets and leader epochs of its heads.

This module works on files and on logs that are handed to it. It takes no lock of a directory, and starts nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import struct
import urllib.parse
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from logcore import checkpoint
from logcore.config import INT32_MAX, INT64_MAX, LogConfig
from logcore.errors import (
    CorruptLogError,
    InvalidConfigError,
    InvalidNameError,
    LogcoreError,
    LogNotFoundError,
    StorageWriteError,
)
from logcore.format.columns import InputColumn
from logcore.format.compression import Codec
from logcore.fs import FS
from logcore.kernels import active, layout
from logcore.notices import ERROR, tell
from logcore.reader import list_bases, parse_partition_name
from logcore.recordbatch import check_timestamps, compressor, target_codec
from logcore.segment import LOG, ActiveSegment, GrowingSegment, Segment, file_name

_INDEXES: Final = (".index", ".timeindex")
_STAMP: Final = struct.Struct(">qii")  # base offset, batch length, leader epoch: what precedes the magic
#: A manifest comes from a file; what makes one of it raises TypeError for other values.
_NUMBER: Final = attrs.validators.instance_of(int)
_COUNT: Final = attrs.validators.and_(_NUMBER, attrs.validators.ge(0), attrs.validators.le(INT64_MAX))
_EPOCH: Final = attrs.validators.and_(_NUMBER, attrs.validators.ge(0), attrs.validators.le(INT32_MAX))
_TEXT: Final = attrs.validators.instance_of(str)
STATE, READY, CLAIM, ASSIGNED, REFUSED = ".state", ".json", ".claim", ".assigned", ".refused"
DAMAGED: Final = ".damaged"
_MARKS: Final = "logcore.garbage"
_TXID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
#: Staged files that no manifest names, and the state of applications that write no more, are removed at these ages.
GARBAGE_MS: Final = 24 * 3_600_000
MANIFEST_BYTES: Final = 32 << 20
STATE_MS: Final = 30 * 24 * 3_600_000
_FORMAT: Final = 2
_WALK_BATCHES: Final = 1 << 16
#: Pieces of a partition up to this size are copied behind the active segment; larger ones, which a copy would cost more
#: than a file of their own, are moved in place.
_COPY_BYTES: Final = 16 << 20


# -- what a task stages ----------------------------------------------------------------------------------------------


@attrs.frozen
class StagedFile:
    """One staged segment. name: its path below the staging directory, without a suffix. count: records. crc: CRC-32C
    of the whole file as it was staged.
    """

    topic: str = attrs.field(validator=_TEXT)
    partition: int = attrs.field(validator=_COUNT)
    name: str = attrs.field(validator=_TEXT)
    count: int = attrs.field(validator=_COUNT)
    size_bytes: int = attrs.field(validator=_COUNT)
    batches: int = attrs.field(validator=_COUNT)
    max_timestamp: int = attrs.field(validator=_NUMBER)
    crc: int = attrs.field(validator=_NUMBER)


class _StagedSegment(ActiveSegment):
    """An active segment of base offset 0 under a name of its own."""

    def __init__(self, fs: FS, directory: str, stem: str, config: LogConfig) -> None:
        self._stem = stem
        super().__init__(fs, directory, 0, config, create=True)

    def file(self, suffix: str) -> str:
        return os.path.join(self.directory, self._stem + suffix)


class StagedWriter:
    """What one attempt of a task writes to one partition: a chain of staged segments, rolled as a log is.

    stem: <topic>-<partition>.<task>.<attempt>, which no other attempt has. codec: what records are compressed with
    where the topic says "producer". batch_bytes: size at which a batch is closed.
    """

    def __init__(
        self,
        fs: FS,
        directory: str,
        txid: str,
        topic: str,
        partition: int,
        attempt: str,
        config: LogConfig,
        *,
        codec: Codec = Codec.NONE,
        batch_bytes: int = 64 << 10,
    ) -> None:
        self._fs, self._txid = fs, txid
        self._directory = os.path.join(staging_path(fs.real_path(directory)), check_txid(txid))
        self._topic, self._partition, self._attempt = topic, partition, attempt
        self._config = config
        codec = target_codec(config, codec)
        most = min(config.max_message_bytes, config.segment_bytes)
        attributes = int(codec) | layout.APPEND_TIME_BIT * config.is_append_time
        no_producer = (-1, -1, -1)
        self._encoding = (min(batch_bytes, most), most, attributes, *no_producer, compressor(codec, config))
        self._scratch = bytearray(1 << 16)
        self._segment: _StagedSegment | None = None
        self._done: list[StagedFile] = []
        self._crc = self._batches = 0

    def append_columns(
        self,
        keys: InputColumn | None,
        values: InputColumn | None,
        timestamps_ms: npt.NDArray[np.int64] | None,
        count: int,
    ) -> None:
        """Stages rows given as columns, see columns.input_column(); timestamps_ms: now for all when None.

        Raises InvalidRecordError, InvalidTimestampError, RecordTooLargeError, DiskFullError, StorageWriteError.
        """
        now_ms = self._fs.now_ms()
        if timestamps_ms is not None and not self._config.is_append_time:
            check_timestamps(timestamps_ms, now_ms, self._config)
        end, require_key = self._end, self._config.is_compacted
        size, batches = active.encode_columns(
            self._scratch, keys, values, timestamps_ms, count, end, 0, now_ms, *self._encoding, require_key
        )
        self._store(size, batches, now_ms)

    def append_records(self, records: Sequence[Any]) -> None:
        """Stages (key, value, headers, timestamp_ms) tuples. Errors as append_columns()."""
        now_ms = self._fs.now_ms()
        given = [layout.milliseconds(row[3]) for row in records if row[3] is not None]
        if given and not self._config.is_append_time:
            check_timestamps(np.array(given, np.int64), now_ms, self._config)
        end, require_key = self._end, self._config.is_compacted
        size, batches = active.encode_records(self._scratch, records, end, 0, now_ms, *self._encoding, require_key)
        self._store(size, batches, now_ms)

    @property
    def _end(self) -> int:
        return 0 if self._segment is None else self._segment.last_offset + 1

    def _store(self, size: int, batches: Sequence[layout.EncodedBatch], now_ms: int) -> None:
        """Writes what was encoded, in as few pieces as segments allow."""
        if not batches:
            return
        newest, end = max(batch[3] for batch in batches), self._end
        segment = self._segment
        if segment is None:
            segment = self._begin()
        if not segment.is_full(size, newest, batches[-1][2], now_ms) and size <= self._config.segment_bytes:
            self._write(segment, memoryview(self._scratch)[:size], batches)
            return
        moved, start = 0, end  # what a roll takes from the offsets that were encoded, and where the next batch begins
        for at, length, last, time in batches:
            if segment.is_full(length, time, last - moved, now_ms):
                self._seal()
                segment = self._begin()
                moved = start
            struct.pack_into(">q", self._scratch, at, start - moved)
            part = memoryview(self._scratch)[at : at + length]
            self._write(segment, part, [(0, length, last - moved, time)])
            start = last + 1

    def _begin(self) -> _StagedSegment:
        stem = f"{self._topic}-{self._partition}.{self._attempt}.{len(self._done)}"
        try:
            self._segment = _StagedSegment(self._fs, self._directory, stem, self._config)
        except FileNotFoundError as error:
            raise LogNotFoundError(
                "this write was aborted: its staging directory is gone", path=self._directory
            ) from error
        self._crc = self._batches = 0
        return self._segment

    def _write(self, segment: _StagedSegment, data: memoryview, batches: Sequence[layout.EncodedBatch]) -> None:
        segment.append(data, batches[-1][2], max(batch[3] for batch in batches), batches)
        self._crc = _crc32c(data, self._crc)
        self._batches += len(batches)

    def _seal(self) -> None:
        segment, self._segment = self._segment, None
        assert segment is not None
        segment.seal()
        name = f"{self._txid}/{os.path.basename(segment.path)[: -len(LOG)]}"
        count, size, newest = segment.last_offset + 1, segment.size_bytes, segment.largest_timestamp
        self._done.append(StagedFile(self._topic, self._partition, name, count, size, self._batches, newest, self._crc))

    def close(self) -> list[StagedFile]:
        """Brings all of it to the disk and says what there is, in order; nothing for a writer without rows."""
        if self._segment is not None:
            self._seal()
        if self._done:
            self._fs.sync_dir(self._directory)
        return self._done


def _crc32c(data: memoryview, crc: int = 0) -> int:
    from crc32c import crc32c  # 40-70 ms to import, see kernels

    return crc32c(data, crc)


# -- names -----------------------------------------------------------------------------------------------------------


def staging_path(directory: str) -> str:
    """The directory beside a log directory: inside it Kafka would take any directory for a partition."""
    return directory.rstrip("/") + ".staging"


def check_txid(txid: str) -> str:
    if not _TXID.fullmatch(txid):
        raise InvalidNameError("not the name of a staged write", expected="letters, digits, - and _", found=repr(txid))
    return txid


def _app_name(app_id: str) -> str:
    """An application's id as part of a file name; long ones by their hash."""
    quoted = urllib.parse.quote(app_id, safe="")
    return quoted if 0 < len(quoted) <= 150 else "%hash-" + hashlib.sha256(app_id.encode()).hexdigest()


def _manifest_name(app_id: str, version: int, suffix: str) -> str:
    return f"{_app_name(app_id)}@{version:020d}{suffix}"


# -- manifests -------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Place:
    """Where the staged files of one partition go.

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
                parse_partition_name(f"{file.topic}-{file.partition}")
                directory, _, stem = file.name.partition("/")
                if directory != found.txid or not re.fullmatch(r"[A-Za-z0-9._-]+", stem) or file.count < 1:
                    raise ValueError
            if not all(isinstance(count, int) for count in found.topics.values()):
                raise ValueError
            given = found.places
            if path.endswith(ASSIGNED) if given is None else not given.keys() >= found.partitions().keys():
                raise ValueError
            found.app_id.encode()  # a lone surrogate has no name in a directory
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidNameError) as error:
            raise CorruptLogError("not a manifest of staged segments", path=path) from error
        return found


class Staging:
    """The staging directory of one log directory, as those who write into it through tasks see it."""

    def __init__(self, fs: FS, directory: str) -> None:
        self._fs = fs
        self.directory = fs.real_path(directory)
        self.path = staging_path(self.directory)

    def begin(self, txid: str) -> None:
        """Makes the directory that tasks stage in. Raises InvalidConfigError when its files could not be moved into the
        log directory, because that lies on another file system.
        """
        fs = self._fs
        for path in (self.path, os.path.join(self.path, check_txid(txid))):
            with contextlib.suppress(FileExistsError):
                fs.mkdir(path)
                fs.sync_dir(os.path.dirname(path))
            _check_directory(fs, path)
        if fs.identity(self.path)[0] != fs.identity(self.directory)[0]:
            raise InvalidConfigError(
                "the log directory is the root of a file system of its own, so segments staged beside it cannot be "
                f"moved into it; use a directory inside it, such as {os.path.join(self.directory, 'data')}"
            )

    def publish(self, manifest: Manifest) -> None:
        """Makes the write one that will be there. Durable when this returns; nothing of it is shown yet."""
        _check_directory(self._fs, self.path)
        self._check_undamaged(manifest.app_id, manifest.version)
        with contextlib.suppress(LogcoreError, OSError):  # others may clean up too; no write is to fail for it
            self._collect_garbage(manifest.txid)
        content = manifest.pack()
        if len(content) > MANIFEST_BYTES:
            raise InvalidConfigError(
                "too many staged files for one write; use fewer tasks or partitions",
                expected=f"a manifest of at most {MANIFEST_BYTES} bytes",
                found=len(content),
            )
        with contextlib.suppress(FileNotFoundError):  # what became of an earlier attempt, whose driver did not ask
            self._fs.unlink(os.path.join(self.path, _manifest_name(manifest.app_id, manifest.version, REFUSED)))
        checkpoint.write(self._fs, self.path, _manifest_name(manifest.app_id, manifest.version, READY), content)

    def outcome(self, app_id: str, version: int) -> Literal["done", "pending", "unknown"]:
        """What has become of a write. Raises CorruptLogError when it was refused, which is forgotten with this, and
        when its manifest was damaged after offsets had been given out, which is not.
        """
        self._check_undamaged(app_id, version)
        pending = any(
            self._fs.exists(os.path.join(self.path, _manifest_name(app_id, version, suffix)))
            for suffix in (READY, CLAIM, ASSIGNED)
        )
        state = read_state(self._fs, self.path, app_id)
        if state is not None and version <= state["version"]:
            return "done"
        if pending:
            return "pending"
        name = _manifest_name(app_id, version, REFUSED)
        reason = checkpoint.read(self._fs, self.path, name)
        if reason is not None:
            self._fs.unlink(os.path.join(self.path, name))
            raise CorruptLogError(f"the write was refused: {reason.decode(errors='replace')}", path=self.path)
        return "unknown"

    def withdraw(self, app_id: str, version: int, txid: str) -> bool:
        """Takes a manifest back, as if it had never been published; False when a writer has claimed it, or is done, or
        when another job has published one of that name.
        """
        name = _manifest_name(app_id, version, READY)
        path = os.path.join(self.path, name)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rename(path, path + ".withdrawn")
            found = _read_manifest(self._fs, self.path, name + ".withdrawn")
            if found is not None and found.txid != txid:
                self._fs.rename(path + ".withdrawn", path)
                return False
            self._fs.sync_dir(self.path)
            self._fs.unlink(path + ".withdrawn")
            return True
        return False

    def abort(self, app_id: str, version: int, txid: str) -> None:
        """Removes all that was staged for a write, unless it has been published."""
        damaged = os.path.join(self.path, _manifest_name(app_id, version, DAMAGED))
        if not self._fs.exists(damaged) and self.outcome(app_id, version) == "unknown":
            self.abort_files(txid)

    def abort_files(self, txid: str) -> None:
        """Removes what was staged for a write that is not going to be published."""
        remove_tree(self._fs, os.path.join(self.path, check_txid(txid)))

    def forget(self, app_id: str) -> None:
        """Removes the state of an application that will not come again, unless a manifest of it is still there: without
        its state that would be carried out once more.
        """
        mine = _app_name(app_id) + "@"
        if any(name.startswith(mine) for name in _names(self._fs, self.path, "")):
            return
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(os.path.join(self.path, _app_name(app_id) + STATE))

    def _check_undamaged(self, app_id: str, version: int) -> None:
        """Raises CorruptLogError when part of a write may be in place and no file says which."""
        path = os.path.join(self.path, _manifest_name(app_id, version, DAMAGED))
        if self._fs.exists(path):
            raise CorruptLogError(
                f"the manifest of version {version} of {app_id!r} was damaged when offsets had been given out; parts "
                "of the write may be in the log. Look there, then remove this file to write that version again",
                path=path,
            )

    def _collect_garbage(self, txid: str) -> None:
        """Removes what no manifest names and has been old for a day of looks; never what belongs to txid."""
        fs, now_ms = self._fs, self._fs.now_ms()
        names = fs.listdir(self.path)
        old = [name for name in names if name != txid and self._is_old(name, now_ms)]
        if any(fs.is_directory(os.path.join(self.path, name)) for name in old):
            kept = {manifest.txid for manifest in self._manifests(names)}
            old = [name for name in old if name not in kept]
        before = checkpoint.unpack_checked(checkpoint.read(fs, self.path, _MARKS) or b"") or {}
        marks = {}
        for name in old:
            since = before.get(name)
            # A mark of the future is one of a clock that was wrong: it begins again.
            since = since if isinstance(since, int) and since <= now_ms else now_ms
            if now_ms - since > GARBAGE_MS:
                self._remove(name)
            else:
                marks[name] = since
        if marks != before:
            checkpoint.write(fs, self.path, _MARKS, checkpoint.pack_checked(marks))

    def _is_old(self, name: str, now_ms: int) -> bool:
        fs = self._fs
        path = os.path.join(self.path, name)
        if name.endswith((READY, CLAIM, ASSIGNED, DAMAGED)) or name == _MARKS:
            return False
        try:
            newest = fs.modified_ms(path)
            if fs.is_directory(path):
                inside = (fs.modified_ms(os.path.join(path, one)) for one in fs.listdir(path))
                newest = max(newest, *inside, 0)
        except FileNotFoundError:
            return False  # others clean up too
        if name.endswith(STATE):
            return now_ms - newest > STATE_MS and _is_unnamed(fs, self.path, name)
        return now_ms - newest > GARBAGE_MS

    def _remove(self, name: str) -> None:
        path = os.path.join(self.path, name)
        if self._fs.is_directory(path):
            remove_tree(self._fs, path)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(path)

    def _manifests(self, names: Iterable[str]) -> Generator[Manifest, None, None]:
        """Raises CorruptLogError when one is damaged: the files that it names are not known then."""
        for name in names:
            if name.endswith((READY, CLAIM, ASSIGNED, DAMAGED)):
                found = _read_manifest(self._fs, self.path, name)
                if found is not None:
                    yield found


def _is_unnamed(fs: FS, path: str, name: str) -> bool:
    """Whether a state is of a write without a name, which nobody can repeat; that of a name is kept for ever."""
    state = checkpoint.unpack_checked(checkpoint.read(fs, path, name) or b"") or {}
    return state.get("app_id") is not None and state.get("app_id") == state.get("txid")


def read_state(fs: FS, path: str, app_id: str) -> dict[str, Any] | None:
    """The last version of an application that is done: version, txid, ranges. None when there was none.

    Raises CorruptLogError when it cannot be read: to guess would be to write twice, or never.
    """
    name = _app_name(app_id) + STATE
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


def _read_manifest(fs: FS, path: str, name: str) -> Manifest | None:
    content = checkpoint.read(fs, path, name)
    return None if content is None else Manifest.unpack(content, os.path.join(path, name))


def remove_tree(fs: FS, path: str) -> None:
    """Removes a directory of staged files; not being there is fine, and a link is not followed."""
    if not fs.is_directory(path):
        return
    with contextlib.suppress(FileNotFoundError):
        for name in fs.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(os.path.join(path, name))
        with contextlib.suppress(StorageWriteError):  # a task that nobody waits for has just made a file in it
            fs.rmdir(path)


# -- carrying out ----------------------------------------------------------------------------------------------------


class TargetLog(Protocol):
    """What apply_ready() asks of a log that is open for writing; log.Log has it."""

    def adopting(self) -> contextlib.AbstractContextManager[Target]: ...


class Target(Protocol):
    """A log whose appends wait, and whose records are all on disk.

    end: its log end offset. segment, size_bytes: base offset and size of its active segment. segment_bytes: how large
    that may become. has_room: whether so many bytes up to an offset and a timestamp fit into it.
    """

    path: str
    end: int
    leader_epoch: int
    segment: int
    size_bytes: int
    segment_bytes: int

    def has_room(self, size: int, max_timestamp: int, last_offset: int) -> bool: ...
    def seal(self) -> None: ...
    def take(self, bases: Sequence[int], end: int, size_bytes: int) -> None: ...
    def show(self) -> None: ...
    def fail(self, cause: BaseException) -> None: ...


class TargetDirectory(Protocol):
    """What apply_ready() asks of a log directory; logdir.LogDir has it."""

    @property
    def path(self) -> str: ...
    def __contains__(self, topic: object) -> bool: ...
    def create_topics(self, wanted: Mapping[str, tuple[int, Mapping[str, object] | None]]) -> None: ...
    def partitions(self, name: str) -> tuple[int, ...]: ...
    def partition(self, topic: str, number: int) -> Any: ...


def apply_ready(fs: FS, directory: TargetDirectory, *, most: int | None = None) -> int:
    """Carries out the manifests that are ready, at most so many; returns how many are done.

    For whoever holds the directory for writing. One whose files are not what it says is refused; one whose logs cannot
    be written stays for later, and the first such error is raised when the others have had their turn.
    """
    path = staging_path(directory.path)
    done = 0
    failure: LogcoreError | None = None
    waiting: set[str] = set()  # applications whose earlier version could not be carried out: the later ones wait for it
    for name in _names(fs, path, READY):
        if done == most:
            break
        application = name.partition("@")[0]
        if application in waiting:
            continue
        try:
            manifest = _read_manifest(fs, path, name)
        except CorruptLogError as error:
            stem = name[: -len(READY)]
            checkpoint.write(fs, path, stem + REFUSED, str(error).encode())
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(os.path.join(path, name))
            failure = failure or error
            continue
        try:
            if manifest is not None:
                done += _apply(fs, directory, path, manifest)
        except LogcoreError as error:
            failure = failure or error
            if fs.exists(os.path.join(path, name)):  # neither done nor refused
                waiting.add(application)
    if failure is not None:
        raise failure
    return done


def _check_directory(fs: FS, path: str) -> None:
    """Raises CorruptLogError for a link, which may lead to files that are not ours to move or remove."""
    if fs.exists(path) and not fs.is_directory(path):
        raise CorruptLogError(
            "no directory: links beside and inside a log directory are not followed", path=path, expected="a directory"
        )


def damaged(fs: FS, directory: str) -> list[str]:
    """Paths of manifests that were set aside, see roll_forward()."""
    path = staging_path(directory)
    return [os.path.join(path, name) for name in _names(fs, path, DAMAGED)]


def _names(fs: FS, path: str, suffix: str) -> list[str]:
    _check_directory(fs, path)
    try:
        return sorted(name for name in fs.listdir(path) if name.endswith(suffix))
    except FileNotFoundError:
        return []


def _apply(fs: FS, directory: TargetDirectory, path: str, manifest: Manifest) -> int:
    state = read_state(fs, path, manifest.app_id)
    if state is not None and manifest.version <= state["version"]:
        _clear(fs, path, manifest, READY)
        return 1
    try:
        _check_staged(fs, path, manifest)
        _make_topics(directory, manifest)
    except (CorruptLogError, InvalidNameError, InvalidConfigError) as error:
        _refuse(fs, path, manifest, str(error))
        raise
    logs: dict[tuple[str, int], TargetLog] = {key: directory.partition(*key) for key in manifest.partitions()}
    with contextlib.ExitStack() as stack:
        targets = {key: stack.enter_context(log.adopting()) for key, log in logs.items()}
        places = {key: choose_place(targets[key], files) for key, files in manifest.partitions().items()}
        assigned = attrs.evolve(manifest, places=places)
        for key, place in places.items():
            if place.segment is None:
                targets[key].seal()
        try:
            if not _claim(fs, path, assigned):
                return 0
            placed = _place_all(fs, directory.path, path, assigned)
            for key, bases in placed.items():
                files = assigned.partitions()[key]
                count, size = sum(file.count for file in files), sum(file.size_bytes for file in files)
                targets[key].take(bases, places[key].base + count, size)
            for target in targets.values():
                target.show()
            _write_state(fs, path, assigned)
        except BaseException as error:
            if fs.exists(os.path.join(path, _manifest_name(manifest.app_id, manifest.version, ASSIGNED))):
                # These offsets are given out, whatever memory knows of it: no append may take them.
                for target in targets.values():
                    target.fail(error)
            raise
    _clear(fs, path, assigned, ASSIGNED)
    return 1


def choose_place(target: Target, files: Sequence[StagedFile]) -> Place:
    """Small pieces go into the active segment, so that many small writes do not make many small segments."""
    size, count = sum(file.size_bytes for file in files), sum(file.count for file in files)
    newest = max(file.max_timestamp for file in files)
    last_offset = target.end + count - 1
    place = Place(base=target.end, leader_epoch=target.leader_epoch)
    if size < min(target.segment_bytes // 4, _COPY_BYTES) and target.has_room(size, newest, last_offset):
        return attrs.evolve(place, segment=target.segment, position=target.size_bytes)
    return place


def _check_staged(fs: FS, path: str, manifest: Manifest) -> None:
    _check_directory(fs, os.path.join(path, manifest.txid))
    for file in manifest.files:
        name = os.path.join(path, file.name + LOG)
        try:
            with _opened(fs, name) as handle:
                size = fs.size(handle)
                crc = _crc32c(fs.map(handle, size)) if size else 0
        except FileNotFoundError as error:
            raise CorruptLogError("a staged segment is gone", path=name) from error
        if (size, crc) != (file.size_bytes, file.crc):
            raise CorruptLogError(
                "a staged segment is not what its task wrote",
                path=name,
                expected=f"{file.size_bytes} bytes, CRC-32C {file.crc:#010x}",
                found=f"{size} bytes, {crc:#010x}",
            )


def _make_topics(directory: TargetDirectory, manifest: Manifest) -> None:
    wanted = {name: (count, None) for name, count in manifest.topics.items() if name not in directory}
    if wanted:
        directory.create_topics(wanted)
    for topic, partition in manifest.partitions():
        if topic not in directory or partition not in directory.partitions(topic):
            raise InvalidConfigError(
                f"topic {topic!r} has no partition {partition}: it was made anew since the write was planned"
            )


def _refuse(fs: FS, path: str, manifest: Manifest, reason: str) -> None:
    checkpoint.write(fs, path, _manifest_name(manifest.app_id, manifest.version, REFUSED), reason.encode())
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(os.path.join(path, _manifest_name(manifest.app_id, manifest.version, READY)))


def _claim(fs: FS, path: str, assigned: Manifest) -> bool:
    """From ready to assigned; False when it was withdrawn meanwhile. On an error it is ready again, unless there is a
    manifest that is assigned.
    """
    ready, claim, final = (
        _manifest_name(assigned.app_id, assigned.version, suffix) for suffix in (READY, CLAIM, ASSIGNED)
    )
    try:
        fs.rename(os.path.join(path, ready), os.path.join(path, claim))
    except FileNotFoundError:
        return False
    try:
        claimed = _read_manifest(fs, path, claim)
    except CorruptLogError:
        fs.rename(os.path.join(path, claim), os.path.join(path, ready))
        raise
    if claimed is None or claimed.txid != assigned.txid:  # withdrawn, and another of that name published meanwhile
        fs.rename(os.path.join(path, claim), os.path.join(path, ready))
        return False
    try:
        checkpoint.write(fs, path, final, assigned.pack())
    except BaseException:
        if not fs.exists(os.path.join(path, final)):  # else the sync of its name failed, and it may or may not last
            fs.rename(os.path.join(path, claim), os.path.join(path, ready))
        raise
    fs.unlink(os.path.join(path, claim))
    return True


def _place_all(fs: FS, directory: str, path: str, assigned: Manifest) -> dict[tuple[str, int], list[int]]:
    """Moves or appends all staged files; (topic, partition) -> base offsets of the segments that are new."""
    assert assigned.places is not None
    placed = {}
    for (topic, partition), files in assigned.partitions().items():
        place, target = assigned.places[topic, partition], os.path.join(directory, f"{topic}-{partition}")
        if place.segment is None:
            placed[topic, partition] = _move(fs, path, target, files, place)
        else:
            _append(fs, path, target, files, place)
            placed[topic, partition] = []
        fs.sync_dir(target)
    return placed


def _move(fs: FS, path: str, target: str, files: Sequence[StagedFile], place: Place) -> list[int]:
    bases, base = [], place.base
    for file in files:
        source, final = os.path.join(path, file.name), os.path.join(target, file_name(base, LOG))
        if fs.exists(source + LOG):
            if fs.exists(final) and fs.file_size(final) and not _same_batches(fs, source + LOG, final):
                raise CorruptLogError("another program appended where staged records belong", path=final)
            _stamp(fs, source + LOG, file, base, place.leader_epoch)
            for suffix in _INDEXES:
                with contextlib.suppress(FileNotFoundError):
                    fs.rename(source + suffix, os.path.join(target, file_name(base, suffix)))
            fs.rename(source + LOG, final)
        elif not fs.exists(final) or fs.file_size(final) < file.size_bytes:
            raise CorruptLogError("a staged segment is gone and not in its place", path=source + LOG)
        bases.append(base)
        base += file.count
    return bases


def _append(fs: FS, path: str, target: str, files: Sequence[StagedFile], place: Place) -> None:
    assert place.segment is not None and place.position is not None
    final = os.path.join(target, file_name(place.segment, LOG))
    with _opened(fs, final, write=True) as handle:
        size, at, base = fs.size(handle), place.position, place.base
        if size < at:
            raise CorruptLogError("the segment is shorter than it was", path=final, expected=at, found=size)
        stamped = []
        for file in files:
            data = bytearray(_read(fs, os.path.join(path, file.name + LOG), file))
            for position, head in _stamps(data, file, base, place.leader_epoch):
                data[position : position + len(head)] = head
            stamped.append(data)
            base += file.count
        ours = b"".join(stamped)
        if size > at:
            found = fs.pread(handle, size - at, at)
            if not found.startswith(ours):
                # It must be what a crash left of ours, whole or torn, and no other program's batch.
                _, end, _ = active.walk(found, 0, len(found), layout.INT32_MAX, True)
                if found[:end] != ours[:end]:
                    raise CorruptLogError(
                        "another program appended where staged records belong", path=final, position=at
                    )
                fs.truncate(handle, at)
                size = at
        if size == at:
            fs.pwrite(handle, ours, at)
        fs.fsync(handle)


def _stamp(fs: FS, name: str, file: StagedFile, base: int, leader_epoch: int) -> None:
    """Writes the real offsets into the batch heads of a staged segment, durably.

    Not over the lengths that stand between offset and epoch, for a crash may leave zeros of what is written: without
    them nobody would find the next head.
    """
    with _opened(fs, name, write=True) as handle:
        view = fs.map(handle, fs.size(handle))
        for position, head in _stamps(view, file, base, leader_epoch):
            for start, stop in ((0, 8), (12, 16)):
                if view[position + start : position + stop] != head[start:stop]:
                    fs.pwrite(handle, head[start:stop], position + start)
        fs.fsync(handle)


def _stamps(
    data: memoryview | bytearray, file: StagedFile, base: int, leader_epoch: int
) -> Generator[tuple[int, bytes], None, None]:
    """(position, new head) of each batch: offsets by how many records came before, whatever stands there now."""
    at, count, batches = 0, 0, 0
    while at < len(data):
        facts, stop, _ = active.walk(data, at, len(data), _WALK_BATCHES, False)
        if not len(facts):
            break
        spans = (facts["last_offset"] - facts["base_offset"] + 1).tolist()
        for position, size, span in zip(facts["position"].tolist(), facts["size_bytes"].tolist(), spans, strict=True):
            yield position, _STAMP.pack(base + count, size - layout.LOG_OVERHEAD, leader_epoch)
            count += span
        batches += len(facts)
        at = stop
    if (at, count, batches) != (file.size_bytes, file.count, file.batches):
        raise CorruptLogError(
            "a staged segment is not what its task wrote",
            path=file.name,
            position=at,
            expected=f"{file.batches} batches of {file.count} records in {file.size_bytes} bytes",
            found=f"{batches} of {count} in {at}",
        )


def _same_batches(fs: FS, one: str, other: str) -> bool:
    """Whether two segments differ in their offsets at most: a rename that a power cut left half done."""
    crcs = []
    for name in (one, other):
        with _opened(fs, name) as handle:
            size = fs.size(handle)
            view = fs.map(handle, size) if size else memoryview(b"")
            facts, end, _ = active.walk(view, 0, size, layout.INT32_MAX, False)
            crcs.append((size, end, facts["crc"].tolist()))
    return crcs[0] == crcs[1]


def _read(fs: FS, name: str, file: StagedFile) -> bytes:
    with _opened(fs, name) as handle:
        return fs.pread(handle, file.size_bytes, 0)


@contextlib.contextmanager
def _opened(fs: FS, name: str, *, write: bool = False) -> Generator[int, None, None]:
    handle = fs.open(name, write=write)
    try:
        yield handle
    finally:
        fs.close(handle)


def _write_state(fs: FS, path: str, assigned: Manifest) -> None:
    state = {
        "app_id": assigned.app_id,
        "version": assigned.version,
        "txid": assigned.txid,
        "ranges": assigned.ranges(),
        "query": assigned.query,
    }
    checkpoint.write(fs, path, _app_name(assigned.app_id) + STATE, checkpoint.pack_checked(state, copies=2))


def _clear(fs: FS, path: str, manifest: Manifest, suffix: str) -> None:
    """The end of a manifest that is done: it goes first, so that its files are never missed."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(os.path.join(path, _manifest_name(manifest.app_id, manifest.version, suffix)))
    fs.sync_dir(path)
    remove_tree(fs, os.path.join(path, manifest.txid))


def roll_forward(fs: FS, directory: str) -> dict[str, LogcoreError]:
    """Ends what a crash left between giving out offsets and having all files in place.

    For whoever has just taken the lock of the directory, before any log of it is open. Returns the names of partition
    directories that must not be written, each with the reason: offsets in them are given out for records that could
    not be put in place. A manifest that is damaged is set aside as `.damaged`: where its records went is not known, so
    no partition waits for it, and whoever asks for its outcome is told. Raises LogcoreError when the staging directory
    itself cannot be read.
    """
    path = staging_path(directory)
    blocked: dict[str, LogcoreError] = {}
    names = set(_names(fs, path, ""))
    for name in sorted(names):
        if name.endswith(CLAIM):
            stem = name[: -len(CLAIM)]
            if stem + ASSIGNED in names:
                fs.unlink(os.path.join(path, name))
            else:
                fs.rename(os.path.join(path, name), os.path.join(path, stem + READY))
    for name in sorted(names):
        if not name.endswith(ASSIGNED):
            continue
        try:
            manifest = _read_manifest(fs, path, name)
        except CorruptLogError as error:
            fs.rename(os.path.join(path, name), os.path.join(path, name[: -len(ASSIGNED)] + DAMAGED))
            fs.sync_dir(path)
            tell("staging", ERROR, "a staged write was set aside, and may be in the log in part: %s", error)
            continue
        if manifest is None:
            continue
        try:
            try:
                state = read_state(fs, path, manifest.app_id)
            except CorruptLogError:  # this version came after all that it told of, and is told of next
                state = None
            if state is None or state["version"] < manifest.version:
                _finish(fs, directory, path, manifest)
            _clear(fs, path, manifest, ASSIGNED)
        except LogcoreError as error:
            error.reason += f" (to give the rest of this write up, remove {os.path.join(path, name)})"
            blocked.update((f"{topic}-{partition}", error) for topic, partition in manifest.partitions())
    return blocked


def drop_topics(fs: FS, directory: str, topics: Collection[str]) -> None:
    """Takes topics that are being deleted out of writes that are half in place, so that these end without them."""
    path = staging_path(directory)
    for name in _names(fs, path, ASSIGNED):
        try:
            manifest = _read_manifest(fs, path, name)
        except CorruptLogError:  # the next opening sets it aside
            continue
        if manifest is None or not any(file.topic in topics for file in manifest.files):
            continue
        assert manifest.places is not None
        kept = attrs.evolve(
            manifest,
            files=[file for file in manifest.files if file.topic not in topics],
            places={key: place for key, place in manifest.places.items() if key[0] not in topics},
        )
        checkpoint.write(fs, path, name, kept.pack())


def _finish(fs: FS, directory: str, path: str, assigned: Manifest) -> None:
    assert assigned.places is not None
    for (topic, partition), files in assigned.partitions().items():
        target = os.path.join(directory, f"{topic}-{partition}")
        _check_directory(fs, target)
        _check_undisturbed(fs, path, target, files, assigned.places[topic, partition])
    _place_all(fs, directory, path, assigned)
    # Readers elsewhere are held back by this file, until here in all partitions alike.
    for (topic, partition), files in assigned.partitions().items():
        name = os.path.join(directory, f"{topic}-{partition}", checkpoint.DURABLE_END)
        end = assigned.places[topic, partition].base + sum(file.count for file in files)
        with contextlib.suppress(FileNotFoundError), _opened(fs, name, write=True) as handle:
            fs.pwrite(handle, checkpoint.pack_durable_end(end), 0)
            fs.fsync(handle)
    _write_state(fs, path, assigned)


def _check_undisturbed(fs: FS, path: str, target: str, files: Sequence[StagedFile], place: Place) -> None:
    """Nobody may have appended since the offsets were given out, such as a Kafka that was started after the crash."""
    ends = list(itertools.accumulate((file.count for file in files), initial=0))
    ours = {place.base + before for before in ends}
    bases = list_bases(fs, target)
    foreign = None
    for base in bases:
        name = os.path.join(target, file_name(base, LOG))
        if place.segment is not None:
            is_foreign = base > place.segment
        elif base >= place.base:
            is_foreign = base not in ours and fs.file_size(name) > 0
        else:
            is_foreign = (
                base == max(one for one in bases if one < place.base) and _end_of(fs, target, base) > place.base
            )
        foreign = foreign or (name if is_foreign else None)
    if place.segment is None:
        # One of ours that is in place and not the last must be as it was staged: else its offsets go on into the next.
        waiting = [fs.exists(os.path.join(path, file.name + LOG)) for file in files]
        for number, file in enumerate(files):
            name = os.path.join(target, file_name(place.base + ends[number], LOG))
            if not waiting[number] and any(waiting[number:]) and fs.exists(name):
                foreign = foreign or (name if fs.file_size(name) != file.size_bytes else None)
    if foreign:
        raise CorruptLogError(
            "another program appended while a write from Spark was half in place", path=foreign, offset=place.base
        )


def _end_of(fs: FS, target: str, base: int) -> int:
    segment: Segment = GrowingSegment(fs, target, base)
    return segment.next_offset()
