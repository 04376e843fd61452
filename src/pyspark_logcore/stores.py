"""Reads logs in an object store: a URI such as s3://bucket/logs as the source of a query.

Rules:
- Only archives are supported: copies of log directories whose files no longer change.
  Each process lists a directory once. Objects are never locked, followed or written.
- Objects are read in ranges, with a read-ahead of at most 8 MiB, and a few such blocks
  are cached. Their bytes are decoded like the files of a directory.
- An object that is shorter than in its listing is an error. So is a log that ends
  before its recorded end.
- Credentials come from options or from the environment. They never appear in errors,
  plans or representations.

Offsets are decided in planning.py; columns are defined in columns.py.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import attrs
import numpy as np
import numpy.typing as npt

import logcore
from logcore.closeable import Closeable
from logcore.distribution import install_command
from logcore.errors import (
    CorruptLogError,
    InvalidConfigError,
    LogNotFoundError,
    MissingDependencyError,
    ReadOnlyLogError,
    ResourceError,
    StorageReadError,
)
from logcore.format.columns import RecordColumns
from logcore.metadata import checkpoint
from logcore.metadata.filenames import partition_name
from logcore.reader import avoid_mapping
from pyspark_logcore.identity import SourceIdentity, check_identity
from pyspark_logcore.logs import columns_of, size_index_of
from pyspark_logcore.options import ObjectStore, ReadOptions
from pyspark_logcore.ranges import Bounds, OffsetRange, TopicPartition, report_loss
from pyspark_logcore.tasks import SizeIndex

if TYPE_CHECKING:
    import pyarrow.fs

#: Bytes per request: for a sequential read, and for any other read.
_SEQUENTIAL_READ_BYTES: Final = 8 << 20
_RANDOM_READ_BYTES: Final = 128 << 10
_BLOCKS: Final = 3
#: Maximum size of an index file, which is read as a whole. Segments are read in chunks.
_MAX_MAPPED: Final = 64 << 20
_REFUSED: Final = (
    "ACCESS_DENIED",
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "403",
    "FORBIDDEN",
)


def open_store(store: ObjectStore) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the file system that a URI names, and the path in it.

    Raises:
        LogcoreError: pyarrow is missing or does not support the URI.
    """
    try:
        import pyarrow
        from pyarrow import fs
    except ImportError as error:
        raise MissingDependencyError(
            f"object stores need pyarrow: {install_command('spark')}"
        ) from error
    try:
        if not store.is_s3:
            found: tuple[pyarrow.fs.FileSystem, str] = fs.FileSystem.from_uri(store.uri)
            return found
        settings = dict(store.settings)
        bucket = store.location.split("/")[2]
        if "region" not in settings and "endpoint_override" not in settings:
            # A bucket whose region is unknown may be in the default region.
            with contextlib.suppress(OSError):
                settings["region"] = fs.resolve_s3_region(bucket)
        return fs.S3FileSystem(**settings), store.location.split("://", 1)[1]
    except (
        pyarrow.ArrowInvalid,
        pyarrow.ArrowNotImplementedError,
        ImportError,
        ValueError,
    ) as error:
        raise InvalidConfigError(
            f"pyarrow does not support this file system: {store.hide(str(error))}",
            path=store.location,
        ) from None
    except OSError as error:
        _fail(error, store, store.location)


def _fail(error: OSError, store: ObjectStore, path: str) -> NoReturn:
    """Raise the LogcoreError for an OSError of pyarrow."""
    text = store.hide(str(error))
    if any(sign in text for sign in _REFUSED):
        raise StorageReadError(
            "the object store refuses access; check the options store.accessKey and store.secretKey, or the "
            f"credentials of the environment, and the rights to list and to read: {text}",
            path=path,
        ) from None
    raise StorageReadError(f"the object store failed: {text}", path=path) from None


@attrs.define
class _RemoteFile:
    """An open object. `end` is the position after the last byte that was read."""

    path: str
    size: int
    file: Any = None
    end: int = 0


class StoreFS:
    """The interface logcore.fs.FS over an object store, read-only.

    An instance must be used in one thread.
    """

    forks = 0

    def __init__(
        self, store: ObjectStore, opened: tuple[Any, str] | None = None
    ) -> None:
        """Create a file system for a store.

        `opened` is a pyarrow file system and a path in it, which replace the ones that
        the URI names.
        """
        self._store = store
        self._system, self._root = opened or open_store(store)
        self._listings: dict[str, dict[str, Any]] = {}
        self._handles: dict[int, _RemoteFile] = {}
        self._next = 1
        self._blocks: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self.requests = 0  # listings and reads

    def _key(self, path: str) -> str:
        return posixpath.join(
            self._root, path[len(self._store.location) :].lstrip("/")
        ).rstrip("/")

    def _listing(self, path: str) -> dict[str, Any]:
        """Return the entries of a directory by name; a missing directory has none."""
        path = path.rstrip("/")
        if path not in self._listings:
            from pyarrow import fs

            self.requests += 1
            try:
                found = self._system.get_file_info(
                    fs.FileSelector(self._key(path), allow_not_found=True)
                )
            except OSError as error:
                _fail(error, self._store, path)
            self._listings[path] = {entry.base_name: entry for entry in found}
        return self._listings[path]

    def _info(self, path: str) -> Any:
        """Return pyarrow's facts about an object. Raises FileNotFoundError."""
        info = self._listing(os.path.dirname(path)).get(os.path.basename(path))
        if info is None:
            raise FileNotFoundError(path)
        return info

    # -- files -------------------------------------------------------------------------

    def open(
        self,
        path: str,
        *,
        write: bool = False,
        create: bool = False,
        exclusive: bool = False,
    ) -> int:
        if write or create or exclusive:
            self._refuse(path)
        info = self._info(path)
        handle = self._next
        self._next += 1
        self._handles[handle] = _RemoteFile(path, int(info.size or 0))
        return handle

    def close(self, handle: int) -> None:
        remote_file = self._handles.pop(handle)
        self._blocks.pop(handle, None)
        if remote_file.file is not None:
            remote_file.file.close()

    def pread(self, handle: int, size: int, position: int) -> bytes:
        remote_file = self._handles[handle]
        stop = min(position + size, remote_file.size)
        if stop <= position:
            return b""
        start, block = self._blocks.get(handle, (0, b""))
        if not (start <= position and stop <= start + len(block)):
            follows = start <= position <= remote_file.end and remote_file.end > 0
            requested = max(
                stop - position,
                _SEQUENTIAL_READ_BYTES if follows else _RANDOM_READ_BYTES,
            )
            start = position
            block = self._fetch(
                remote_file, position, min(requested, remote_file.size - position)
            )
            self._blocks[handle] = start, block
            if len(self._blocks) > _BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(handle)
        remote_file.end = max(remote_file.end, start + len(block))
        return block[position - start : stop - start]

    def _fetch(self, remote_file: _RemoteFile, position: int, size: int) -> bytes:
        self.requests += 1
        try:
            if remote_file.file is None:
                remote_file.file = self._system.open_input_file(
                    self._key(remote_file.path)
                )
            data: bytes = remote_file.file.read_at(size, position)
        except FileNotFoundError:
            raise StorageReadError(
                "the object was deleted after it was listed", path=remote_file.path
            ) from None
        except OSError as error:
            _fail(error, self._store, remote_file.path)
        if len(data) < size:
            raise StorageReadError(
                "the object is shorter than it was when it was listed",
                path=remote_file.path,
                position=position,
                expected=f"{remote_file.size} bytes",
                found=f"{position + len(data)} bytes",
            )
        return data

    def map(self, handle: int, size: int) -> memoryview:
        """Read a whole index file.

        Raises:
            ResourceError: the file is too large to be an index file.
        """
        if size > _MAX_MAPPED:
            raise ResourceError(
                "too large to be read as a whole", path=self._handles[handle].path
            )
        return memoryview(self.pread(handle, size, 0))

    def is_readable(self, view: memoryview, *, touch: bool = False) -> bool:
        return True

    def size(self, handle: int) -> int:
        return self._handles[handle].size

    def drop_cache(self, handle: int, position: int) -> bool:
        return False

    # -- names -------------------------------------------------------------------------

    def file_size(self, path: str) -> int:
        return int(self._info(path).size or 0)

    def identity(self, path_or_handle: str | int) -> tuple[int, int]:
        if isinstance(path_or_handle, str):
            path = path_or_handle
        else:
            path = self._handles[path_or_handle].path
        info = self._info(path)
        return int(info.size or 0), int(info.mtime_ns or 0)

    def exists(self, path: str) -> bool:
        return self._is_root(path) or os.path.basename(path) in self._listing(
            os.path.dirname(path)
        )

    def is_directory(self, path: str) -> bool:
        if self._is_root(path):
            return bool(self._listing(path))
        from pyarrow import fs

        info = self._listing(os.path.dirname(path)).get(os.path.basename(path))
        return info is not None and info.type == fs.FileType.Directory

    def _is_root(self, path: str) -> bool:
        return path.rstrip("/") == self._store.location

    def listdir(self, path: str) -> list[str]:
        return list(self._listing(path))

    def modified_ms(self, path: str) -> int:
        """Return the modification time of an object, or of a directory's newest object."""
        from pyarrow import fs

        info = None
        if not self._is_root(path):
            info = self._listing(os.path.dirname(path)).get(os.path.basename(path))
        if info is not None and info.type == fs.FileType.File:
            return int(info.mtime_ns or 0) // 1_000_000
        newest = max(
            (int(entry.mtime_ns or 0) for entry in self._listing(path).values()),
            default=0,
        )
        return newest // 1_000_000

    def real_path(self, path: str) -> str:
        return path

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def thread_us(self) -> int:
        return time.thread_time_ns() // 1_000

    def random_bytes(self, size: int) -> bytes:
        return os.urandom(size)

    def yield_thread(self) -> None:
        pass

    def after_fork(self, forget: Callable[[], None]) -> None:
        """Do nothing, because no object of this module is used after a fork."""

    # -- unsupported operations --------------------------------------------------------

    def _refuse(self, *args: Any, **named: Any) -> NoReturn:
        raise ReadOnlyLogError(
            "an object store is only read", path=self._store.location
        )

    pwrite = truncate = fdatasync = fsync = _refuse
    mkdir = rename = link = unlink = rmdir = sync_dir = _refuse
    free_bytes = total_bytes = lock = watch = _refuse


class StoreOrigin(Closeable):
    """Origin of an object store; see origin.Origin. Used in one thread of one process."""

    def __init__(
        self, options: ReadOptions, opened: tuple[Any, str] | None = None
    ) -> None:
        """Create the store. For `opened` see StoreFS."""
        assert options.store is not None
        self._options = options
        self._store = options.store
        self._given_store = opened
        self._fs: StoreFS | None = None
        self._directory: logcore.LogDir | None = None
        self._logs: dict[TopicPartition, logcore.Log] = {}

    @property
    def location(self) -> str:
        return self._store.location

    @property
    def fs(self) -> StoreFS:
        """Return the file system of the store.

        Raises:
            LogNotFoundError: no object exists at the URI.
        """
        if self._fs is None:
            fs = StoreFS(self._store, self._given_store)
            if not fs.is_directory(self.location):
                raise LogNotFoundError(
                    "the bucket does not exist, or it has no objects at this path",
                    path=self.location,
                    expected="orders-0/...",
                )
            self._fs = fs
        return self._fs

    def _opened(self) -> logcore.LogDir:
        if self._directory is None:
            self._directory = logcore.open_dir(
                self.location, read_only=True, fs=self.fs
            )
        return self._directory

    def refresh(self) -> bool:
        return False

    def topics(self) -> list[str]:
        return sorted(self._opened().topics())

    def partitions(self, topic: str) -> tuple[int, ...]:
        return self._opened().partitions(topic)

    def bounds(
        self, requested: Sequence[TopicPartition]
    ) -> dict[TopicPartition, Bounds]:
        found = {}
        for key in requested:
            with contextlib.suppress(LogNotFoundError):
                log = self._log(key)
                committed = self._options.isolation == "read_committed"
                found[key] = Bounds(
                    log.log_start_offset,
                    log.last_stable_offset if committed else log.high_watermark,
                )
        return found

    def _log(self, key: TopicPartition) -> logcore.Log:
        """Return a log; each log is opened once.

        Raises:
            LogNotFoundError: the log does not exist.
            CorruptLogError: the end of the log is missing.
        """
        if key not in self._logs:
            path = f"{self.location}/{partition_name(*key)}"
            log = logcore.open(path, read_only=True, fs=self.fs)
            avoid_mapping(log)
            recorded = checkpoint.read_visible_end(self.fs, path)
            if recorded is not None and recorded.offset > log.log_end_offset:
                log.close()
                raise CorruptLogError(
                    "the copy of this log is incomplete: it ends before its recorded end",
                    path=path,
                    expected=f"records up to offset {recorded.offset}",
                    found=f"an end at offset {log.log_end_offset}",
                )
            self._logs[key] = log
        return self._logs[key]

    def offsets_at(
        self, times_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        return {
            key: self._log(key).offset_for_timestamp(time_ms)
            for key, time_ms in times_ms.items()
        }

    def size_index(self, offset_range: OffsetRange) -> SizeIndex:
        return size_index_of(
            self._log((offset_range.topic, offset_range.partition)),
            offset_range.start,
            offset_range.end,
        )

    def identity(self, topic: str, partition: int) -> SourceIdentity:
        return SourceIdentity.of(self.location, topic, partition, self.fs)

    def read(
        self, offset_range: OffsetRange, identity: SourceIdentity
    ) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        fail = self._options.fail_on_data_loss
        changed = check_identity(
            identity, self.location, offset_range.topic, offset_range.partition, self.fs
        )
        if changed is not None:
            report_loss(
                fail, self.location, offset_range.topic, offset_range.partition, changed
            )
            return
        try:
            log = self._log((offset_range.topic, offset_range.partition))
        except LogNotFoundError as error:
            report_loss(
                fail,
                self.location,
                offset_range.topic,
                offset_range.partition,
                error.reason,
            )
            return
        yield from columns_of(log, offset_range, self._options, self.location, self.fs)

    def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        raise InvalidConfigError(
            "commitOffsets needs a broker: read through kafka.bootstrap.servers",
            path=self.location,
        )

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs = {}
        if self._directory is not None:
            self._directory.close()
            self._directory = None
