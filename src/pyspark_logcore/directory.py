"""A log directory of this machine as the origin of a query.

Rules:
- Files are read without a lock, while other processes may write them.
- Before a task reads, it checks that the directory is the one that the query was
  planned with.

Offsets are decided in planning.py; columns are defined in columns.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

import logcore
from logcore.closeable import Closeable
from logcore.errors import LogNotFoundError
from logcore.format.columns import RecordColumns
from logcore.fs import OS
from logcore.metadata import checkpoint
from logcore.metadata.filenames import partition_name
from logcore.reader import LogReader, segments_between
from pyspark_logcore.identity import (
    OtherDirectoryError,
    SourceIdentity,
    check_identity,
    directory_ids,
)
from pyspark_logcore.logs import columns_of, size_index_of
from pyspark_logcore.options import ReadOptions
from pyspark_logcore.ranges import Bounds, OffsetRange, TopicPartition, report_loss
from pyspark_logcore.tasks import SizeIndex

#: Time for which a partition is checked closely after a change. The times of files have
#: steps of some milliseconds, so a second change may leave them unchanged.
_RECHECK_SECONDS: Final = 1.0


@attrs.define
class _PartitionView:
    """The last observed state of a partition."""

    log: logcore.Log
    bounds: Bounds
    #: Time of the last change of `facts`, by the clock.
    changed_at: float
    #: The file that changes with each record that becomes visible.
    growing_file: str = ""
    #: Facts of the files, read before `bounds`.
    facts: tuple[Any, ...] = ()

    def file_facts(self) -> tuple[Any, ...]:
        """Return the current facts. The first fact is about the directory; () if the
        directory is missing.
        """
        # For each of hundreds of partitions, a hundred times a second: two calls, and
        # nothing more.
        try:
            folder = os.stat(self.log.path)
        except OSError:
            return ()
        try:
            growing_file = os.stat(self.growing_file)
        except OSError:
            return folder.st_ino, folder.st_mtime_ns
        return (
            folder.st_ino,
            folder.st_mtime_ns,
            growing_file.st_mtime_ns,
            growing_file.st_size,
        )

    def watch(self) -> None:
        """Choose the file that changes with new records: logcore.durable if it exists,
        otherwise the last segment.
        """
        self.growing_file = os.path.join(self.log.path, checkpoint.DURABLE_END)
        if not os.path.exists(self.growing_file):
            end = self.log.high_watermark
            self.growing_file = next(
                (
                    segment.path
                    for segment in reversed(segments_between(self.log, end, end))
                ),
                self.log.path,
            )


class DirectoryOrigin(Closeable):
    """Origin of a local directory; see origin.Origin. Used in one thread of one process."""

    def __init__(
        self, options: ReadOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._opened: logcore.LogDir | None = None
        # The ids of the first directory at this path.
        self._ids: tuple[str, str] | None = None
        self._root_changed_at = 0.0
        self._root_facts: tuple[Any, ...] = ()
        self._views: dict[TopicPartition, _PartitionView] = {}

    @property
    def location(self) -> str:
        return self._options.path

    @property
    def _directory(self) -> logcore.LogDir:
        if self._opened is None:
            self._opened = logcore.open_dir(self._options.path, read_only=True)
        return self._opened

    def refresh(self) -> bool:
        facts = _file_facts(self._options.path)
        now = self._clock()
        if not facts:
            raise LogNotFoundError("the log directory is missing", path=self.location)
        if facts != self._root_facts:
            if facts[:1] != self._root_facts[:1]:
                self._check_same()
            self._root_facts = facts
            self._root_changed_at = now
        if now - self._root_changed_at > _RECHECK_SECONDS:
            return False
        self._directory.refresh()
        return True

    def _check_same(self) -> None:
        """Raise OtherDirectoryError if another log directory has replaced the first one."""
        found = directory_ids(self._options.path)
        if self._ids is None:
            self._ids = found
        if found != self._ids:
            raise OtherDirectoryError(
                "another log directory took the place of the one that this query reads",
                path=self.location,
                expected=f"directory.id and cluster.id {self._ids}",
                found=found,
            )

    def topics(self) -> list[str]:
        return sorted(self._directory.topics())

    def partitions(self, topic: str) -> tuple[int, ...]:
        return self._directory.partitions(topic)

    def bounds(
        self, requested: Sequence[TopicPartition]
    ) -> dict[TopicPartition, Bounds]:
        starts = _file_facts(os.path.join(self._options.path, checkpoint.LOG_START))
        found = {}
        for key in requested:
            try:
                found[key] = self._view_of(key, starts).bounds
            except LogNotFoundError:
                self._forget(key)
        return found

    def _view_of(self, key: TopicPartition, starts: tuple[Any, ...]) -> _PartitionView:
        """Check a partition closely if its files have changed now or a moment ago."""
        view = self._views.get(key)
        now = self._clock()
        if view is None:
            view = self._views[key] = self._first_view(key, now)
        facts = (*view.file_facts(), starts)
        if facts != view.facts:
            # The directory of the partition was replaced or deleted.
            if view.facts and facts[:1] != view.facts[:1]:
                self._forget(key)
                return self._view_of(key, starts)
            view.facts = facts
            view.changed_at = now
        if now - view.changed_at <= _RECHECK_SECONDS:
            view.log.refresh()
            view.watch()
            view.bounds = self._bounds(view.log, view.bounds.incarnation)
        return view

    def _first_view(self, key: TopicPartition, now: float) -> _PartitionView:
        log = logcore.open(
            os.path.join(self._options.path, partition_name(*key)), read_only=True
        )
        metadata = checkpoint.read(OS, log.path, checkpoint.PARTITION_METADATA)
        incarnation = checkpoint.topic_id(metadata or b"") or str(
            OS.identity(log.path)[1]
        )
        view = _PartitionView(log, self._bounds(log, incarnation), now)
        view.watch()
        return view

    def _bounds(self, log: LogReader, incarnation: str) -> Bounds:
        committed = self._options.isolation == "read_committed"
        if committed:
            end = log.last_stable_offset
        else:
            end = log.high_watermark
        return Bounds(log.log_start_offset, end, incarnation)

    def _forget(self, key: TopicPartition) -> None:
        view = self._views.pop(key, None)
        if view is not None:
            view.log.close()

    def _log(self, key: TopicPartition) -> LogReader:
        self.bounds([key])
        if key not in self._views:
            raise LogNotFoundError(
                "the partition was deleted",
                path=os.path.join(self.location, partition_name(*key)),
            )
        return self._views[key].log

    def offsets_at(
        self, times_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        return {
            key: self._directory.partition(*key).offset_for_timestamp(time_ms)
            for key, time_ms in times_ms.items()
        }

    def size_index(self, offset_range: OffsetRange) -> SizeIndex:
        return size_index_of(
            self._log((offset_range.topic, offset_range.partition)),
            offset_range.start,
            offset_range.end,
        )

    def identity(self, topic: str, partition: int) -> SourceIdentity:
        return SourceIdentity.of(self._options.path, topic, partition)

    def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        with (
            logcore.open_dir(self._options.path) as directory,
            directory.consumer(group_id=group, enable_auto_commit=False) as consumer,
        ):
            consumer.commit(offsets)

    def close(self) -> None:
        for key in list(self._views):
            self._forget(key)
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def read(
        self, offset_range: OffsetRange, identity: SourceIdentity
    ) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        changed = check_identity(
            identity, self._options.path, offset_range.topic, offset_range.partition
        )
        if changed is not None:
            self._report(offset_range, changed)
            return
        path = os.path.join(
            self._options.path,
            partition_name(offset_range.topic, offset_range.partition),
        )
        try:
            log = logcore.open(path, read_only=True)
        except LogNotFoundError as error:
            self._report(offset_range, error.reason)
            return
        with log:
            yield from columns_of(log, offset_range, self._options, self._options.path)

    def _report(self, offset_range: OffsetRange, reason: str) -> None:
        report_loss(
            self._options.fail_on_data_loss,
            self._options.path,
            offset_range.topic,
            offset_range.partition,
            reason,
        )


def _file_facts(path: str) -> tuple[Any, ...]:
    """Return facts that differ after a file was replaced or written, or () for no file.

    A change within one step of the file's times may not be visible.
    """
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size
