"""A log directory of this machine as the origin of a query.

Rules:
- Files are read as they are, without a lock, beside whoever writes them.
- A range is delivered whole or the task fails; what is gone is DataLossError, or a warning where the user said so.
- Before a task reads, it checks that it sees the directory that the query was planned with.

This module decides nothing about offsets (planning.py) and knows no column (columns.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import attrs
import numpy as np
import numpy.typing as npt

import logcore
from logcore import checkpoint
from logcore.errors import InvalidConfigError, LogcoreError, LogNotFoundError, OffsetOutOfRangeError, ResourceError
from logcore.format.columns import RecordColumns
from logcore.fs import OS
from logcore.names import partition_name
from logcore.reader import LogReader, avoid_mapping, segments_between, typed_columns
from pyspark_logcore.identity import Identity, OtherDirectoryError, check_identity, directory_ids
from pyspark_logcore.options import ReadOptions
from pyspark_logcore.ranges import Bounds, OffsetRange, TopicPartition, report_loss
from pyspark_logcore.tasks import Marks

if TYPE_CHECKING:
    from types import TracebackType


#: After a change is seen, a partition is looked at closely for so long. The times of files have steps of some
#: milliseconds, so a second change may leave them as they are.
_RESTLESS_SECONDS: Final = 1.0


@attrs.define
class _Look:
    """What was seen of a partition. facts: of its files, as they stood before that. growing: the file that changes with
    each record that becomes visible. changed_at: when facts last differed, by the clock.
    """

    log: logcore.Log
    bounds: Bounds
    changed_at: float
    growing: str = ""
    facts: tuple[Any, ...] = ()

    def see(self) -> tuple[Any, ...]:
        """The facts as they are now. The first is the directory itself; () when it is gone."""
        # For each of hundreds of partitions, a hundred times a second: two calls, and nothing more.
        try:
            folder = os.stat(self.log.path)
        except OSError:
            return ()
        try:
            growing = os.stat(self.growing)
        except OSError:
            return folder.st_ino, folder.st_mtime_ns
        return folder.st_ino, folder.st_mtime_ns, growing.st_mtime_ns, growing.st_size

    def watch(self) -> None:
        """Chooses the file that tells of new records: what writers tell other processes, or else the last segment."""
        self.growing = os.path.join(self.log.path, checkpoint.DURABLE_END)
        if not os.path.exists(self.growing):
            end = self.log.high_watermark
            self.growing = next((one.path for one in reversed(segments_between(self.log, end, end))), self.log.path)


class DirectoryOrigin:
    """See origin.Origin. Lives in one thread of one process."""

    def __init__(self, options: ReadOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._opened: logcore.LogDir | None = None
        self._ids: tuple[str, str] | None = None  # of the directory that was there first
        self._root_changed_at = 0.0
        self._root_facts: tuple[Any, ...] = ()
        self._looks: dict[TopicPartition, _Look] = {}

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
            raise LogNotFoundError("the log directory is gone", path=self.location)
        if facts != self._root_facts:
            if facts[:1] != self._root_facts[:1]:
                self._check_same()
            self._root_facts = facts
            self._root_changed_at = now
        if now - self._root_changed_at > _RESTLESS_SECONDS:
            return False
        self._directory.refresh()
        return True

    def _check_same(self) -> None:
        """Raises OtherDirectoryError when another log directory took the place of the one that was there first."""
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

    def bounds(self, wanted: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
        starts = _file_facts(os.path.join(self._options.path, checkpoint.LOG_START))
        found = {}
        for key in wanted:
            try:
                found[key] = self._look(key, starts).bounds
            except LogNotFoundError:
                self._forget(key)
        return found

    def _look(self, key: TopicPartition, starts: tuple[Any, ...]) -> _Look:
        """Looks at a partition closely where its files have changed, or did so a moment ago."""
        look = self._looks.get(key)
        now = self._clock()
        if look is None:
            look = self._looks[key] = self._first_look(key, now)
        facts = (*look.see(), starts)
        if facts != look.facts:
            if look.facts and facts[:1] != look.facts[:1]:  # another directory under that name, or none
                self._forget(key)
                return self._look(key, starts)
            look.facts = facts
            look.changed_at = now
        if now - look.changed_at <= _RESTLESS_SECONDS:
            look.log.refresh()
            look.watch()
            look.bounds = self._bounds(look.log, look.bounds.incarnation)
        return look

    def _first_look(self, key: TopicPartition, now: float) -> _Look:
        log = logcore.open(os.path.join(self._options.path, partition_name(*key)), read_only=True)
        metadata = checkpoint.read(OS, log.path, checkpoint.PARTITION_METADATA)
        incarnation = checkpoint.topic_id(metadata or b"") or str(OS.identity(log.path)[1])
        look = _Look(log, self._bounds(log, incarnation), now)
        look.watch()
        return look

    def _bounds(self, log: LogReader, incarnation: str) -> Bounds:
        committed = self._options.isolation == "read_committed"
        end = log.last_stable_offset if committed else log.high_watermark
        return Bounds(log.log_start_offset, end, incarnation)

    def _forget(self, key: TopicPartition) -> None:
        look = self._looks.pop(key, None)
        if look is not None:
            look.log.close()

    def _log(self, key: TopicPartition) -> LogReader:
        self.bounds([key])
        if key not in self._looks:
            raise LogNotFoundError("the partition is gone", path=os.path.join(self.location, partition_name(*key)))
        return self._looks[key].log

    def offsets_at(self, times_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        return {key: self._directory.partition(*key).offset_for_timestamp(time_ms) for key, time_ms in times_ms.items()}

    def marks(self, one: OffsetRange) -> Marks:
        return marks_of(self._log((one.topic, one.partition)), one.start, one.end)

    def identity(self, topic: str, partition: int) -> Identity:
        return Identity.of(self._options.path, topic, partition)

    def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        raise InvalidConfigError(
            "commitOffsets needs a broker: read through kafka.bootstrap.servers", path=self.location
        )

    def close(self) -> None:
        for key in list(self._looks):
            self._forget(key)
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, one: OffsetRange, identity: Identity) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        changed = check_identity(identity, self._options.path, one.topic, one.partition)
        if changed is not None:
            self._report(one, changed)
            return
        path = os.path.join(self._options.path, partition_name(one.topic, one.partition))
        try:
            log = logcore.open(path, read_only=True)
        except LogNotFoundError as error:
            self._report(one, error.reason)
            return
        with log:
            yield from self._columns(log, one)

    def _report(self, one: OffsetRange, reason: str) -> None:
        report_loss(self._options.fail_on_data_loss, self._options.path, one.topic, one.partition, reason)

    def _columns(self, log: LogReader, one: OffsetRange) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        options = self._options
        at = one.start
        end = one.end
        if log.log_start_offset > at or log.high_watermark < end:
            held = f"the log holds {log.log_start_offset} to {log.high_watermark}"
            self._report(one, f"offsets {at} to {end} were planned, and {held}")
            at = max(at, log.log_start_offset)
            end = min(end, log.high_watermark)
        mapping = True
        stopped = -1
        while at < end:
            try:
                for columns, types in typed_columns(
                    log, at, end, isolation=options.isolation, rows=options.batch_rows, size_bytes=options.batch_bytes
                ):
                    behind = int(columns.offsets[-1]) + 1
                    yield columns, types
                    at = behind
                return
            except ResourceError:
                if not mapping:
                    raise
                mapping = False  # a memory limit counts a mapping in full: read piece by piece instead
                avoid_mapping(log)
            except OffsetOutOfRangeError as error:
                log.refresh()
                if log.log_start_offset <= at and at != stopped:
                    stopped = at  # a compaction may have replaced files meanwhile, and lost nothing
                    continue
                if log.log_start_offset <= at:
                    raise
                self._report(one, error.reason)
                at = log.log_start_offset
            except LogcoreError as error:
                if error.offset is None:
                    error.offset = _offset_of(error, at, end)
                raise


def _file_facts(path: str) -> tuple[Any, ...]:
    """What differs when a file was replaced or written to, within the steps of its times; () for none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _offset_of(error: LogcoreError, start: int, end: int) -> int:
    """The offset in the head of the batch that an error is about, if that can be right, else where reading began."""
    if error.path is not None and error.position is not None:
        with contextlib.suppress(OSError, LogcoreError):
            handle = OS.open(error.path)
            try:
                found = int.from_bytes(OS.pread(handle, 8, error.position), "big")
            finally:
                OS.close(handle)
            if start <= found < end:
                return found
    return start


def marks_of(log: LogReader, start: int, end: int) -> Marks:
    """The entries of the offset indexes in a stretch of a log."""
    stretch = segments_between(log, start, end)
    empty = np.zeros(0, np.int64)
    total = 0
    before = [empty]
    numbers = [empty]
    positions = [empty]
    for number, segment in enumerate(stretch):
        low = segment.find(start) if segment.base_offset < start else 0
        high = segment.find(end) if number == len(stretch) - 1 else segment.size_bytes
        entries = segment.offset_index.array()["position"].astype(np.int64)
        here = np.concatenate([[low], entries[(entries > low) & (entries < high)]])
        before.append(here - low + total)
        numbers.append(np.full(len(here), number, np.int64))
        positions.append(here)
        total += max(0, high - low)
    segment_of = np.concatenate(numbers)
    position_of = np.concatenate(positions)

    def offset_at(mark: int) -> int | None:
        try:
            batch = stretch[int(segment_of[mark])].batch(int(position_of[mark]))
        except LogcoreError:  # an index is no evidence, and damage is for the task to meet
            return None
        return None if batch is None else batch.base_offset

    return Marks(total, np.concatenate(before), offset_at)
