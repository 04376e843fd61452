"""Saves the sound batches of damaged partitions by copying them into a new directory.

Rules:
- The source is never written, locked or repaired. No process may write to it during the
  copy, because its files are mapped.
- A batch is copied byte for byte or not at all, and keeps its offsets. A segment keeps
  the base offset of its file.
- A loss is reported as bytes of a file and as a range of offsets. No offset is assigned
  to two records: if the end of a log is lost, the copy continues above that end. Deleted
  records do not reappear: the log start offset is kept.
- If the marker of a transaction may be lost, the report contains the transaction. No
  marker is added for it.
- Gaps are filled from the .swap, .deleted, .cleaned and .quarantine files of interrupted
  work.
- Indexes, snapshots and checkpoints are rebuilt.
- A copy exists completely or not at all. A partition is copied to a directory that no
  program opens, which is renamed once the copy is durable. A log directory cannot be
  opened before its file of topics is written, which happens last.

The copy of a partition is planned before it is written. batch_search.py finds the sound
batches of a file, verify.py checks files, and partition/recovery.py repairs them in
place.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import attrs
import numpy as np

from logcore.acquire import claim_directory
from logcore.claim import Claim
from logcore.config import INT64_MAX, LogConfig
from logcore.errors import InvalidConfigError, LogcoreError, StorageReadError
from logcore.fs import FS, OS, copy_range, opened
from logcore.inspect.batch_search import (
    WALK_BATCHES,
    ZEROS,
    BatchFile,
    DamagedRange,
    Extent,
    Search,
)
from logcore.inspect.catalog import partitions
from logcore.inspect.dump import DUMPERS
from logcore.kernels import kernel, layout
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key, make_directories
from logcore.metadata.filenames import (
    ASSIGNED,
    CLEANED,
    DELETED,
    LOG,
    QUARANTINE,
    SNAPSHOT,
    STATE,
    SWAP,
    UNFINISHED,
    base_offset_of,
    bases_in,
    file_name,
    leading_offset,
    parse_partition_name,
    partition_of,
    quarantined_position,
    staging_path,
    unfinished,
)
from logcore.partition import gaps, order
from logcore.partition.aborted_transactions import PartitionTransactions
from logcore.partition.gaps import Gaps
from logcore.partition.persisted import PersistedState, is_valid_checkpoint, value_or
from logcore.partition.producer_state import coordinator_epochs
from logcore.partition.producers import Producers
from logcore.partition.segment_files import list_bases
from logcore.segment import ActiveSegment, Segment
from logcore.staging.manifest import (
    CLAIM,
    DAMAGED,
    READY,
    REFUSED,
    Manifest,
    read_state,
)

#: Suffixes of files with batches that are not segments. If two such files can fill a
#: gap, the file whose suffix comes first here is used.
_RETIRED_SUFFIXES: Final = (LOG + SWAP, LOG + DELETED, LOG + CLEANED, QUARANTINE)
#: Content of the file of topics until the copy of a log directory is complete. A
#: directory with this content cannot be opened.
_UNFINISHED_TOPICS: Final = b"a copy that `logcore recover` has not finished\n"


@attrs.frozen(kw_only=True)
class Part:
    """A part of the source that was not copied.

    Attributes:
        position, size_bytes: The range of bytes in the file; position is None for the
            whole file.
        first_offset, last_offset: The missing offsets; None if they are unknown or no
            offset is missing.
    """

    path: str
    position: int | None = None
    size_bytes: int = 0
    first_offset: int | None = None
    last_offset: int | None = None
    reason: str

    def __str__(self) -> str:
        offsets = ""
        if self.first_offset is not None:
            offsets = f"offsets {self.first_offset} to {self.last_offset}, "
        where = ""
        if self.position is not None:
            where = f", {self.size_bytes} bytes at position {self.position}"
        return f"{offsets}{self.path}{where}: {self.reason}"


@attrs.frozen(kw_only=True)
class PartitionReport:
    """The result for one partition.

    Attributes:
        lost: Parts that are missing now.
        left_out: Parts that were not copied without a loss.
        files: Number of files read.
        batches, records, size_bytes: Counts of the copied data.
    """

    source: str
    target: str
    files: int
    batches: int
    records: int
    size_bytes: int
    log_start_offset: int
    log_end_offset: int
    lost: tuple[Part, ...]
    left_out: tuple[Part, ...]


@attrs.frozen(kw_only=True)
class SalvageReport:
    """The report of salvage().

    `lost` and `left_out` are parts of the log directory itself, such as its topics
    file.
    """

    source: str
    target: str
    partitions: tuple[PartitionReport, ...]
    lost: tuple[Part, ...] = ()
    left_out: tuple[Part, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Return whether nothing was lost."""
        return not self.lost and not any(
            partition.lost for partition in self.partitions
        )

    def as_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)


def salvage(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    fs: FS = OS,
    tick: Callable[[int], None] = lambda size_bytes: None,
) -> SalvageReport:
    """Copy every sound batch of a partition or log directory to a new directory.

    Args:
        target: A path that does not exist or is an empty directory. For a partition it
            has a partition's name.
        tick: Called with the size of each file that was read.

    Raises:
        LogNotFoundError: The source is not a partition or log directory.
        InvalidConfigError, InvalidNameError: The target is not allowed.
        StorageWriteError: The copy cannot be written.
        UnsupportedCodecError: Batches of the old formats need a package that is not
            installed. Other faults in the source are reported, and not raised.
    """
    origin = os.fspath(source)
    goal = os.fspath(target)
    found = partitions(origin, fs=fs)
    real = fs.real_path(goal)
    root = fs.real_path(origin)
    if real == root or real.startswith(root + os.sep):
        raise InvalidConfigError(
            "the target is inside the source, which must not be changed", path=goal
        )
    if found == [origin]:
        parent, name = os.path.split(real)
        only = parse_partition_name(name)
        jobs = [_Job(origin, goal, only, _known_as(fs, root, real, only))]
        staged = None
    else:
        parent = real
        name = "."
        keys = {path: key for path in found if (key := _key_of(path)) is not None}
        jobs = [
            _Job(
                path,
                os.path.join(goal, os.path.basename(path)),
                key,
                {root: key, **_parent_checkpoints(fs.real_path(path))},
            )
            for path, key in keys.items()
        ]
        staged = _Staged(fs, root)
    _check_free(fs, goal, real)
    make_directories(fs, parent)
    claim = claim_directory(fs, parent, name)
    try:
        done = []
        lost = _undecodable_checkpoints(fs, jobs)
        left_out = list[Part]()
        if staged is not None:
            checkpoint.write(fs, real, checkpoint.TOPICS, _UNFINISHED_TOPICS)
        known = value_or(
            {}, checkpoint.read_offsets, fs, origin, checkpoint.RECOVERY_POINT
        )
        unreadable: dict[Key, int | None] = {}
        for job in jobs:
            try:
                reserved_end = 0
                if staged is not None:
                    reserved_end = staged.reserved_end.get(job.key, 0)
                partition = _Partition(fs, job, tick, reserved_end=reserved_end)
            except StorageReadError as error:
                lost.append(
                    Part(
                        path=job.source,
                        reason=f"its files cannot be listed: {error.reason}",
                    )
                )
                # Keep its recovery point: opening the copy then reports a missing
                # partition. Without it, the partition would begin again at offset 0.
                unreadable |= {key: end for key, end in known.items() if key == job.key}
            else:
                done.append(partition.save())
        if staged is not None:
            _copy_directory(fs, origin, goal, done, lost, left_out)
            staged.copy(real, lost, left_out)
        # The order matters after a crash. Checkpoints come before the names, because a
        # partition without its line of the log start could show deleted records. The
        # file of topics comes last, because the directory cannot be opened without it.
        _write_checkpoints(claim, done, unreadable)
        for saved in done:
            _rename_to_final(fs, fs.real_path(saved.job.target))
        if staged is not None:
            damaged = _copy_small(fs, origin, goal, checkpoint.TOPICS)
            lost += damaged
            # If the source has no readable file of topics, neither has the copy: each
            # directory is then a topic.
            if damaged or not fs.exists(os.path.join(origin, checkpoint.TOPICS)):
                fs.unlink(os.path.join(real, checkpoint.TOPICS))
                fs.sync_dir(real)
        claim.leave()
    except BaseException:
        claim.fail()
        raise
    finally:
        claim.release()
    reports = tuple(saved.report for saved in done)
    return SalvageReport(
        source=origin,
        target=goal,
        partitions=reports,
        lost=tuple(lost),
        left_out=tuple(left_out),
    )


# -- names -----------------------------------------------------------------------------


@attrs.frozen
class _Job:
    """One partition to be copied.

    `key` is the key of the copy. `known_as` maps a log directory to the name of the
    source in the checkpoints of that directory.
    """

    source: str
    target: str
    key: Key
    known_as: Mapping[str, Key]


def _key_of(path: str) -> Key | None:
    """Return (topic, partition) of a directory, if it has the canonical name.

    Checkpoints list the canonical name only: t-00 would be listed as t-0.
    """
    name = os.path.basename(path)
    key = partition_of(name)
    if key is not None and name == f"{key[0]}-{key[1]}":
        return key
    return None


def _parent_checkpoints(path: str) -> dict[str, Key]:
    """Return the checkpoints in the parent directory of a partition.

    `path` is resolved, because a partition may be a symbolic link into another log
    directory.
    """
    own = _key_of(path)
    if own is None:
        return {}
    return {os.path.dirname(path): own}


def _known_as(fs: FS, source: str, target: str, key: Key) -> dict[str, Key]:
    """Return the checkpoints that list a single partition.

    These are the checkpoints in its parent directory, if they list its name. If they do
    not, the partition was moved or renamed (t-0 to t-0.bad), and the checkpoints in the
    parent directory of the copy may list it too.
    """
    own = _key_of(source)
    parent = os.path.dirname(source)
    known = _parent_checkpoints(source)
    if own is not None and own in value_or(
        {}, checkpoint.read_offsets, fs, parent, checkpoint.RECOVERY_POINT
    ):
        return known
    if not known and not fs.is_directory(os.path.join(parent, f"{key[0]}-{key[1]}")):
        known[parent] = key  # t-0.bad was t-0, as long as there is no other t-0
    if own in (None, key):
        known[os.path.dirname(target)] = key
    return known


def _check_free(fs: FS, goal: str, real: str) -> None:
    """Check that a copy can be made at a path.

    Raises:
        InvalidConfigError: no copy can be made there.
    """
    is_directory = fs.is_directory(fs.real_path(goal))
    names = []
    if is_directory:
        names = fs.listdir(goal)
    if fs.exists(unfinished(real)):
        raise InvalidConfigError(_UNFINISHED_COPY_TEXT, path=unfinished(real))
    has_unfinished_topics = (
        checkpoint.TOPICS in names
        and checkpoint.read(fs, goal, checkpoint.TOPICS) == _UNFINISHED_TOPICS
    )
    if has_unfinished_topics or any(name.endswith(UNFINISHED) for name in names):
        raise InvalidConfigError(_UNFINISHED_COPY_TEXT, path=goal)
    if names or (fs.exists(goal) and not is_directory):
        raise InvalidConfigError(
            "there is something here already; name a new or an empty directory",
            path=goal,
        )
    beside = staging_path(real)
    if fs.exists(beside):
        raise InvalidConfigError(
            "there are staged writes beside it already; name another directory",
            path=beside,
        )


_UNFINISHED_COPY_TEXT: Final = (
    "there is something here already: a copy that an earlier recover did not finish; "
    "remove it first"
)


def _rename_to_final(fs: FS, path: str) -> None:
    """Rename the copy to the name of the partition, in one step."""
    if fs.exists(path):  # an empty directory, by _check_free()
        fs.rmdir(path)
    fs.rename(unfinished(path), path)
    fs.sync_dir(os.path.dirname(path))


# -- a log directory -------------------------------------------------------------------


def _undecodable_checkpoints(fs: FS, jobs: Iterable[_Job]) -> list[Part]:
    """Return the checkpoints of log starts and log ends that cannot be decoded."""
    what = {
        checkpoint.LOG_START: "records that were deleted may be back",
        checkpoint.RECOVERY_POINT: "a lost end of a log may not show",
    }
    return [
        Part(
            path=os.path.join(directory, name),
            reason=f"not an offset checkpoint: {effect}",
        )
        for directory in sorted(
            {directory for job in jobs for directory in job.known_as}
        )
        for name, effect in what.items()
        if not is_valid_checkpoint(fs, directory, name)
    ]


def _copy_directory(
    fs: FS,
    source: str,
    target: str,
    done: Sequence[_CopiedPartition],
    lost: list[Part],
    left_out: list[Part],
) -> None:
    """Copy the other files of a log directory, and record lost and left-out parts."""
    lost += _copy_small(
        fs, source, target, checkpoint.META_PROPERTIES, checkpoint.GROUPS
    )
    damaged_ids = _copy_small(fs, source, target, checkpoint.PRODUCER_IDS)
    lost += damaged_ids
    if damaged_ids:  # two producers must never get the same id: continue above all ids in the batches
        end = 0
        if done:
            end = max(saved.producer_ids for saved in done)
        checkpoint.write(
            fs, target, checkpoint.PRODUCER_IDS, checkpoint.pack_producer_ids(end)
        )
    for name in sorted(fs.listdir(source)):
        path = os.path.join(source, name)
        if fs.is_directory(path) and _key_of(path) is None:
            logs = [
                os.path.join(path, file_name(base, LOG))
                for base in value_or((), list_bases, fs, path)
            ]
            if partition_of(name) is not None and any(
                value_or(1, fs.file_size, log) for log in logs
            ):
                reason = "the name differs from the partition's name in checkpoints and Kafka; recover it separately"
                lost.append(Part(path=path, reason=reason))
            else:
                left_out.append(Part(path=path, reason="not a partition directory"))


def _copy_small(fs: FS, source: str, target: str, *names: str) -> list[Part]:
    """Copy the small files that can be decoded. Return the others as lost parts."""
    lost = []
    for name in names:
        path = os.path.join(source, name)
        if not fs.exists(path):
            continue
        try:
            content = checkpoint.read(fs, source, name)
            for _ in DUMPERS[name](fs, path):
                pass
        except LogcoreError as error:
            lost.append(Part(path=path, reason=error.reason))
        else:
            checkpoint.write(fs, target, name, content or b"")
    return lost


def _write_checkpoints(
    claim: Claim, done: Sequence[_CopiedPartition], unreadable: Mapping[Key, int | None]
) -> None:
    """Write the starts and ends of the copies.

    The lines of other partitions are kept.
    """
    starts = {saved.job.key: saved.report.log_start_offset or None for saved in done}
    ends = {
        **unreadable,
        **{saved.job.key: saved.report.log_end_offset for saved in done},
    }
    # Existing lines under the name of a copy belong to another log, unless they belong
    # to the source.
    stale = {
        saved.job.key: None
        for saved in done
        if saved.job.known_as.get(claim.directory) != saved.job.key
    }
    for name in (checkpoint.HIGH_WATERMARK, checkpoint.CLEANER):
        claim.checkpoints.set(name, stale)
    claim.checkpoints.set(checkpoint.LOG_START, starts)
    claim.checkpoints.set(checkpoint.RECOVERY_POINT, ends)


class _Staged:
    """Copies the staged writes of a log directory (staging/).

    Published writes are copied, with the files that record the completed writes.
    `reserved_end` maps (topic, partition) to the end of the offsets that are reserved for
    an incomplete write. Such a write is not copied, because its files are only valid for
    these offsets of the source. The copy continues above them.
    """

    def __init__(self, fs: FS, directory: str) -> None:
        self.fs = fs
        self.path = staging_path(directory)
        self.reserved_end: dict[Key, int] = {}
        self.lost: list[Part] = []
        #: Files of the staging directory to copy.
        self.kept: list[str] = []
        #: Directories of writes to copy: a kept manifest contains their files.
        self.txids: set[str] = set()
        self.unplaced: set[str] = set()  # its directories of the writes in `given`
        if fs.is_directory(self.path):
            self.names = value_or([], fs.listdir, self.path)
        else:
            self.names = []
        for name in sorted(self.names):
            try:
                self._sort_file(name)
            except LogcoreError as error:
                self.lost.append(
                    Part(path=os.path.join(self.path, name), reason=error.reason)
                )

    def _sort_file(self, name: str) -> None:
        stem, suffix = os.path.splitext(name)
        if suffix in (STATE, REFUSED):
            self.kept.append(name)
        elif suffix in (READY, CLAIM) and stem + ASSIGNED not in self.names:
            self.txids.add(self._manifest(name).txid)
            self.kept.append(name)
        elif suffix == DAMAGED:
            self.lost.append(
                Part(
                    path=os.path.join(self.path, name),
                    reason="a staged write with a damaged manifest",
                )
            )
        elif suffix == ASSIGNED:
            manifest = self._manifest(name)
            self.unplaced.add(manifest.txid)
            for topic, numbers in manifest.ranges().items():
                for number, (_, end) in numbers.items():
                    key = topic, int(number)
                    self.reserved_end[key] = max(end, self.reserved_end.get(key, 0))
            state = read_state(self.fs, self.path, manifest.app_id)
            if state is None or state["version"] < manifest.version:
                reason = "a staged write that was being put in place; opening the source, where it can be, ends it"
                self.lost.append(
                    Part(path=os.path.join(self.path, name), reason=reason)
                )

    def _manifest(self, name: str) -> Manifest:
        content = checkpoint.read(self.fs, self.path, name)
        return Manifest.unpack(content or b"", os.path.join(self.path, name))

    def copy(self, directory: str, lost: list[Part], left_out: list[Part]) -> None:
        """Copy the kept files, each manifest after the files that it names."""
        fs = self.fs
        target = staging_path(directory)
        lost += self.lost
        accounted = self.txids | self.unplaced
        for name in sorted(self.names):
            path = os.path.join(self.path, name)
            if fs.is_directory(path) and name not in accounted:
                left_out.append(
                    Part(path=path, reason="staged files of an unpublished write")
                )
        if not self.kept:
            return
        make_directories(fs, target)
        for txid in sorted(self.txids & set(self.names)):
            make_directories(fs, os.path.join(target, txid))
            for name in value_or([], fs.listdir, os.path.join(self.path, txid)):
                self._copy(os.path.join(txid, name), target, lost)
            fs.sync_dir(os.path.join(target, txid))
        for name in self.kept:
            self._copy(name, target, lost)
        fs.sync_dir(target)

    def _copy(self, name: str, target: str, lost: list[Part]) -> None:
        fs = self.fs
        path = os.path.join(self.path, name)
        with opened(
            fs, os.path.join(target, name), write=True, create=True, exclusive=True
        ) as out:
            try:
                with opened(fs, path) as handle:
                    copy_range(fs, handle, out, 0, fs.size(handle))
            except StorageReadError as error:
                lost.append(
                    Part(path=path, reason=f"it cannot be read: {error.reason}")
                )
            fs.fsync(out)


# -- one partition ---------------------------------------------------------------------


@attrs.frozen
class _CopiedPartition:
    """A copied partition. `producer_ids` is one above the highest producer id in it."""

    job: _Job
    report: PartitionReport
    producer_ids: int


class _Partition:
    """Plans the copy of one partition, then makes it."""

    def __init__(
        self, fs: FS, job: _Job, tick: Callable[[int], None], *, reserved_end: int
    ) -> None:
        self.fs = fs
        self.job = job
        self.source = job.source
        self.tick = tick
        self.reserved_end = reserved_end
        self.work = unfinished(fs.real_path(job.target))
        self.names = sorted(fs.listdir(self.source))
        self.bases = bases_in(self.names)
        spares = [
            name
            for suffix in _RETIRED_SUFFIXES
            for name in self.names
            if name.endswith(suffix)
        ]
        self.spares: dict[str, BatchFile | None] = dict.fromkeys(
            name for name in spares if leading_offset(name) is not None
        )
        self.files = 0
        self.lost: list[Part] = []
        self.left_out: list[Part] = []
        #: Offsets that a loss precedes, in ascending order.
        self.losses: list[int] = []
        #: The result of the search in the files of the log.
        self.found: list[Extent | DamagedRange] = []
        # Spare files are read when the first gap needs them.
        #: Name of a spare file -> its extents that belong to this log.
        self.retired_extents_by_name: dict[str, list[Extent]] = {}
        #: All of these extents by first offset, with the priority and name of the file.
        self.retired_extents: list[tuple[Extent, int, str]] | None = None
        #: For each of these extents, the highest end of all extents up to it.
        self.retired_ends: list[int] = []
        self.persisted = [
            PersistedState.read(fs, self.source, directory, key)
            for directory, key in job.known_as.items()
        ]
        if not self.persisted:
            self.persisted = [
                PersistedState.read(
                    fs, self.source, os.path.dirname(fs.real_path(self.source)), None
                )
            ]
        sidecar = self.persisted[0].sidecar
        known = [persisted.gaps for persisted in self.persisted]
        # If two sets of checkpoints list the partition, use only facts on which both
        # agree.
        self.gaps = Gaps(
            gaps.PersistedGaps(
                max(persisted_gaps.dense_from for persisted_gaps in known),
                all(persisted_gaps.has_seals for persisted_gaps in known),
            )
        )
        # This library records the offsets of gaps that are not losses.
        was_opened_here = sidecar.policy is not None
        self.is_compacted = any(
            persisted.cleaned_to for persisted in self.persisted
        ) or (was_opened_here and sidecar.dense_from > 0)

    def save(self) -> _CopiedPartition:
        fs = self.fs
        fs.mkdir(self.work)
        start, end, extents = self._plan()
        segments: dict[int, list[Extent]] = {}
        for extent in extents:
            segments.setdefault(extent.base, []).append(extent)
        if not extents or extents[-1].next_offset < end:
            # An empty segment, so that the copy continues above the lost end.
            segments[end] = []
        copy = _Copy(fs, self.work, self._producers(start, end), self.losses)
        for base, parts in segments.items():
            copy.write(base, parts)
        self.lost += [Part(path=self.source, reason=text) for text in copy.warnings()]
        epochs = value_or([], checkpoint.read_epochs, fs, self.source) or copy.epochs
        checkpoint.write_epochs(
            fs,
            self.work,
            [epoch for epoch in epochs if epoch[1] <= end] or [(0, start)],
        )
        if len(copy.producers):
            checkpoint.write(
                fs, self.work, file_name(end, SNAPSHOT), copy.producers.pack()
            )
        self.lost += _copy_small(
            fs, self.source, self.work, checkpoint.PARTITION_METADATA
        )
        # The policy file records the offset from which the log has no gaps. It is not
        # copied if the copy has a loss, which is a gap.
        if self.gaps.dense_from < order.NEVER and not self.lost:
            _copy_small(fs, self.source, self.work, checkpoint.POLICY)
        fs.sync_dir(self.work)
        report = PartitionReport(
            source=self.source,
            target=self.job.target,
            files=self.files,
            batches=sum(extent.batches for extent in extents),
            records=sum(extent.records for extent in extents),
            size_bytes=sum(extent.end - extent.position for extent in extents),
            log_start_offset=start,
            log_end_offset=end,
            lost=tuple(self.lost),
            left_out=tuple(self.left_out),
        )
        return _CopiedPartition(self.job, report, copy.producer_ids)

    def _producers(self, start: int, end: int) -> Producers:
        """Return the producers in the newest sound snapshot within the copy."""
        offsets = [
            offset
            for name in self.names
            if (offset := base_offset_of(name, SNAPSHOT)) is not None
        ]
        for offset in sorted(offsets, reverse=True):
            content = value_or(
                None, checkpoint.read, self.fs, self.source, file_name(offset, SNAPSHOT)
            )
            producers = None
            if content and start <= offset <= end:
                producers = Producers.unpack(content, offset)
            if producers is not None:
                return producers
        return Producers()

    # -- the plan ----------------------------------------------------------------------

    def _plan(self) -> tuple[int, int, list[Extent]]:
        """Return (log start offset, log end offset, extents to copy, by offset), and
        record losses and parts that are left out.
        """
        found: list[Extent | DamagedRange] = []
        swapped = self._adopt_swaps()
        for base, next_base in itertools.zip_longest(self.bases, self.bases[1:]):
            source = swapped.get(base) or self._open(file_name(base, LOG))
            if source is not None:
                if next_base is None:
                    high = _limit(base)
                else:
                    high = min(next_base, _limit(base))
                found += Search(
                    source, base, base, high, is_dense=base >= self.gaps.dense_from
                ).found
                found += self._find_truncation(source, base, next_base, found)
        # The copy ends at or above every offset that was assigned: to a staged write, to
        # durable or visible records according to the checkpoints, to the last segment,
        # and to the last batch.
        ends = [extent.next_offset for extent in found if extent.next_offset]
        end = max(
            [
                self.reserved_end,
                *(persisted.end for persisted in self.persisted),
                *self.bases[-1:],
                *ends[-1:],
            ]
        )
        start = self._start_offset(end)
        for base, next_base in itertools.pairwise(self.bases):
            if next_base <= start:
                self._record_left_out(
                    file_name(base, LOG), "all records are below the log start offset"
                )
                found = [extent for extent in found if extent.base != base]
        self.found = found
        extents = self._fill_gaps(found, start, end)
        for name in self.spares:
            self._record_left_out(
                name,
                "left by a recovery, a deletion or a compaction; used to fill gaps only",
            )
        # An extent of a spare file may have a base below the base of the preceding
        # segment, or too far below its offsets.
        base = 0
        for extent in extents:
            base = max(base, extent.base)
            if extent.next_offset > _limit(base):
                base = extent.first
            extent.base = base
        if extents:
            start = max(start, extents[0].base)
            end = max(end, extents[-1].next_offset)
        else:
            start = max(start, end)
        return start, end, extents

    def _find_truncation(
        self,
        source: BatchFile,
        base: int,
        next_base: int | None,
        found: Sequence[Extent | DamagedRange],
    ) -> list[DamagedRange]:
        """Return the loss after the last batch of a segment, from the metadata about gaps
        and the checksum file of the segment.
        """
        if next_base is None:
            return []
        reached = max(
            base, *(extent.next_offset for extent in found if extent.base == base), 0
        )
        if self.gaps.is_loss(reached, next_base):
            return []  # _account() reports this gap
        segment = Segment(self.fs, self.source, base)
        reason = value_or(
            "", self.gaps.loss_at_segment_end, segment, reached, next_base
        )
        if reason:
            return [DamagedRange(source, base, source.size, source.size, reason)]
        return []

    def _start_offset(self, end: int) -> int:
        """Return the start of a log that ends at `end`, according to its metadata."""
        begins = []
        for persisted in [
            persisted for persisted in self.persisted if persisted.is_listed
        ] or self.persisted:
            if persisted.log_start > end:
                path = os.path.join(persisted.directory, checkpoint.LOG_START)
                reason = f"the log start offset {persisted.log_start} is after the end of the log"
                self.lost.append(Part(path=path, reason=reason))
            elif self.bases:
                begins.append(persisted.begin(self.bases[0]))
            else:
                begins.append(persisted.log_start)
        return max(begins, default=min(self.bases, default=0))

    def _adopt_swaps(self) -> dict[int, BatchFile]:
        """Return the new segments of compactions that had removed the first old segment.

        The new segments replace the old ones in the log (recovery.decide_swap). A damaged
        new segment is kept as a spare file.
        """
        adopted: dict[int, BatchFile] = {}
        for name in [name for name in self.spares if name.endswith(LOG + SWAP)]:
            base = leading_offset(name)
            if base is None or base in self.bases:  # no old segment was removed yet
                continue
            source = self._open(name)
            if source is None:
                continue
            self.spares[name] = source
            parts = Search(source, base, base, _limit(base)).found
            if parts and all(isinstance(part, Extent) for part in parts):
                end = max(
                    part.next_offset for part in parts if isinstance(part, Extent)
                )
                for old in [old for old in self.bases if base <= old < end]:
                    self.bases.remove(old)
                    self._record_left_out(
                        file_name(old, LOG),
                        f"replaced by {name}, which a compaction has made",
                    )
                adopted[base] = source
                self.bases = sorted([*self.bases, base])
                del self.spares[name]
        return adopted

    def _open(self, name: str) -> BatchFile | None:
        path = os.path.join(self.source, name)
        self.files += 1
        try:
            source = BatchFile(self.fs, path, os.path.join(self.work, "readable.tmp"))
        except (FileNotFoundError, StorageReadError) as error:
            self.lost.append(Part(path=path, reason=f"it cannot be opened: {error}"))
            return None
        self.tick(source.size)
        return source

    def _record_left_out(self, name: str, reason: str) -> None:
        self.left_out.append(Part(path=os.path.join(self.source, name), reason=reason))

    def _fill_gaps(
        self, found: Sequence[Extent | DamagedRange], start: int, end: int
    ) -> list[Extent]:
        """Return all extents by offset, with those that fill gaps.

        The missing offsets of each gap and each damage are recorded.
        """
        is_compacted = self.is_compacted or any(
            extent.has_gaps for extent in found if isinstance(extent, Extent)
        )
        extents: list[Extent] = []
        damages: list[DamagedRange] = []  # damages since the last extent
        low = start  # the next offset to be found
        for extent in (*found, None):  # None: the end of the log
            if isinstance(extent, DamagedRange):
                damages.append(extent)
                continue
            if extent is None:
                high = end
            else:
                high = extent.first
            filling: list[Extent] = []
            # Compaction leaves gaps between batches. A gap next to damage may be a
            # loss.
            is_front = not extents and bool(self.bases) and low < self.bases[0]
            is_lost = is_front or self.gaps.is_loss(low, high)
            if low < high and (
                damages or extent is None or is_lost or not is_compacted
            ):
                filling = self._fill(low, high)
                self._record_lost(low, high, damages, filling, is_end=extent is None)
            else:
                self._record_damage(damages, is_end=extent is None)
            extents += filling
            damages = []
            if extent is not None:
                extents.append(extent)
                low = max(start, extent.next_offset)
        return extents

    def _fill(self, low: int, high: int) -> list[Extent]:
        """Return the sound batches of spare files in [low, high), by offset."""
        filling: list[Extent] = []
        for name, spare in self._read_retired(low, high):
            more: list[Extent] = []
            for gap_low, gap_high in _gaps(low, high, filling):
                # A part that fills a gap must not cross the border of a segment, so the
                # gap is split at each base offset inside it.
                borders = [
                    gap_low,
                    *(base for base in self.bases if gap_low < base < gap_high),
                    gap_high,
                ]
                for part_low, part_high in itertools.pairwise(borders):
                    base = leading_offset(name) or 0
                    if not part_low <= base < part_high:
                        base = max(
                            [base for base in self.bases if base <= part_low],
                            default=part_low,
                        )
                    for extent in spare:
                        more += extent.cut(base, part_low, part_high)
            filling = sorted(filling + more, key=lambda extent: extent.first)
        return filling

    def _read_retired(self, low: int, high: int) -> list[tuple[str, list[Extent]]]:
        """Return the extents of spare files in [low, high), by file and priority."""
        if self.retired_extents is None:
            found = [
                (extent, order, name)
                for order, name in enumerate(self.spares)
                for extent in self._spare_extents(name)
            ]
            self.retired_extents = sorted(found, key=lambda row: row[0].first)
            # The search below runs back from `high`. It stops once no earlier extent
            # ends above `low`.
            self.retired_ends = [
                *itertools.accumulate(
                    (row[0].next_offset for row in self.retired_extents), max
                )
            ]
        at = bisect_left(self.retired_extents, high, key=lambda row: row[0].first) - 1
        found_in: dict[tuple[int, str], list[Extent]] = {}
        while at >= 0 and self.retired_ends[at] > low:
            extent, order, name = self.retired_extents[at]
            if extent.next_offset > low:
                found_in.setdefault((order, name), []).insert(0, extent)
            at -= 1
        return [(name, found_in[order, name]) for order, name in sorted(found_in)]

    def _spare_extents(self, name: str) -> list[Extent]:
        """Return the extents of a spare file that belong to this log.

        There are none if the file belongs to an earlier log with the same offsets. This
        is detected in two ways. The log was written after the position at which a
        recovery truncated it. Or the log has no gaps, and a batch of the spare file
        differs from the batch of the log at the same offset.
        """
        if name not in self.retired_extents_by_name:
            source = self.spares[name] = self.spares[name] or self._open(name)
            low = leading_offset(name) or 0
            spares: list[Extent] = []
            if source is not None:
                spares = Search(source, low, low, _limit(low), is_marked=True).extents
            # Only a name <base>.<position of the truncation>.quarantine has a position.
            cut = quarantined_position(name)
            was_written_again = cut is not None and any(
                extent.base > low or (extent.base == low and extent.end > cut)
                for extent in self.found
            )
            is_same_log = True
            if not self.gaps.dense_from and spares:
                own = [extent for extent in self.found if isinstance(extent, Extent)]
                known = _crcs(own, spares[0].first, spares[-1].next_offset)
                crcs = _crcs(spares, low, _limit(low))
                is_same_log = all(
                    known.get(offset, crc) == crc for offset, crc in crcs.items()
                )
            if was_written_again or not is_same_log:
                spares = []
            self.retired_extents_by_name[name] = spares
        return self.retired_extents_by_name[name]

    def _record_lost(
        self,
        low: int,
        high: int,
        damages: Sequence[DamagedRange],
        filling: Sequence[Extent],
        *,
        is_end: bool,
    ) -> None:
        gaps = _gaps(low, high, filling)
        if not gaps:
            self._record_damage(damages, is_end=False)
        path = self.source
        position = None
        size = 0
        reason = "no file holds these offsets"
        if is_end:
            reason = "the log continued up to this offset"
        if damages:
            first = damages[0]
            path = first.source.path
            position = first.position
            size = sum(stretch.end - stretch.position for stretch in damages)
            reason = first.source.describe_damage(
                first.position, first.end, first.reason
            )
        self.losses += [gap_high for _, gap_high in gaps]
        for gap_low, gap_high in gaps:
            offsets = {"first_offset": gap_low, "last_offset": gap_high - 1}
            self.lost.append(
                Part(
                    path=path,
                    position=position,
                    size_bytes=size,
                    reason=reason,
                    **offsets,
                )
            )

    def _record_damage(self, damages: Sequence[DamagedRange], *, is_end: bool) -> None:
        """Record damage that has no missing offsets.

        After the end of the log, damage may have destroyed records. It is then a loss,
        unless the bytes are zeros.
        """
        for stretch in damages:
            size = stretch.end - stretch.position
            reason = stretch.source.describe_damage(
                stretch.position, stretch.end, stretch.reason
            )
            part = Part(
                path=stretch.source.path,
                position=stretch.position,
                size_bytes=size,
                reason=reason,
            )
            if is_end and reason != ZEROS:
                self.lost.append(part)
                self.losses.append(INT64_MAX)
            else:
                self.left_out.append(part)


def _limit(base: int) -> int:
    """Return the first offset that a segment with this base cannot hold."""
    return min(INT64_MAX, base + layout.INT32_MAX + 1)


def _crcs(extents: Sequence[Extent], low: int, high: int) -> dict[int, int]:
    """Return base offset to CRC of the batches that begin in [low, high)."""
    found: dict[int, int] = {}
    for extent in extents:
        position, end = extent.around(low, high)
        while position < end:
            facts, position, _ = kernel.walk(
                extent.source.view, position, end, WALK_BATCHES, False
            )
            facts = facts[(facts["base_offset"] >= low) & (facts["base_offset"] < high)]
            found.update(
                zip(facts["base_offset"].tolist(), facts["crc"].tolist(), strict=True)
            )
    return found


def _gaps(low: int, high: int, filling: Sequence[Extent]) -> list[tuple[int, int]]:
    """Return the parts of [low, high) that the extents, by offset, do not cover."""
    edges = [
        low,
        *(
            offset
            for extent in filling
            for offset in (extent.first, extent.next_offset)
        ),
        high,
    ]
    return [
        (edges[at], edges[at + 1])
        for at in range(0, len(edges), 2)
        if edges[at] < edges[at + 1]
    ]


class _Copy:
    """Writes the segments of one partition in order.

    It also collects the content of the other files of the partition from the batch heads.
    """

    def __init__(
        self, fs: FS, directory: str, producers: Producers, losses: Sequence[int]
    ) -> None:
        self.fs = fs
        self.directory = directory
        self.producers = producers
        #: Offsets that a loss precedes, in ascending order.
        self.losses = losses
        self.config = LogConfig.parse(None)
        self.transactions = PartitionTransactions()
        self.doubtful: dict[
            tuple[int, int], None
        ] = {}  # (producer id, first offset), of transactions
        #: (leader epoch, start offset), ascending in both.
        self.epochs: list[tuple[int, int]] = []
        #: One above the highest producer id in the heads.
        self.producer_ids = 0

    def _mark_doubtful(self, offset: int) -> None:
        """Mark transactions that are open at a loss as doubtful, because the loss before
        `offset` may have contained their markers.
        """
        if self.losses and self.losses[0] <= offset:
            self.losses = self.losses[bisect_right(self.losses, offset) :]
            self.doubtful |= dict.fromkeys(self.transactions.open.items())

    def warnings(self) -> list[str]:
        """Return the warnings about transactions, after all segments were written."""
        self._mark_doubtful(INT64_MAX)
        said = []
        for producer_id, first in self.doubtful:
            if self.transactions.open.get(producer_id) == first:
                consequence = "in the copy it is open, and readers of committed records wait for its end"
            elif any(
                begin == first
                for begin, _ in self.transactions.aborted.get(producer_id, [])
            ):
                consequence = "in the copy the next marker of that producer aborts it"
            else:
                consequence = "in the copy the next marker of that producer commits it"
            said.append(
                f"it is not known how the transaction of producer {producer_id} ended that began at offset {first}: "
                f"its marker may be among the lost batches; {consequence}"
            )
        return said

    def write(self, base: int, parts: Sequence[Extent]) -> None:
        """Write one segment with its indexes, durably."""
        segment = ActiveSegment(self.fs, self.directory, base, self.config, create=True)
        for part in parts:
            self._mark_doubtful(part.first)
            view = part.source.view
            position = part.position
            while position < part.end:
                facts, behind, _ = kernel.walk(
                    view, position, part.end, WALK_BATCHES, False
                )
                batches = layout.encoded_batches(facts, position)
                segment.append(view[position:behind], *batches[-1][2:], batches)
                self._record_producers(facts, part.source, segment)
                position = behind
        segment.seal()

    def _record_producers(
        self, facts: layout.Facts, source: BatchFile, segment: ActiveSegment
    ) -> None:
        modern = facts[facts["magic"] == 2]
        ids = modern[modern["producer_id"] >= 0]
        if len(ids):
            self.producer_ids = max(
                self.producer_ids, int(ids["producer_id"].max()) + 1
            )
            behind = ids[ids["base_offset"] >= self.producers.next_offset]
            epochs_of = coordinator_epochs(cast(Segment, source))
            self.producers.add_facts(
                behind, lambda position: value_or(-1, epochs_of, position)
            )
        # No CRC covers the leader epoch of a batch. Epochs never decrease, so an epoch
        # above the next epoch is damaged.
        epochs = modern["partition_leader_epoch"]
        has_changed = np.diff(epochs, prepend=-2) != 0
        is_sound = epochs <= np.append(epochs[1:], layout.INT32_MAX)
        for row in np.flatnonzero(has_changed & is_sound).tolist():
            latest = -1
            if self.epochs:
                latest = self.epochs[-1][0]
            if epochs[row] > latest:
                self.epochs.append((int(epochs[row]), int(modern["base_offset"][row])))
        known = len(self.transactions.entries)
        self.transactions.add(modern, lambda position: _control_type(source, position))
        for entry in self.transactions.entries[known:]:
            segment.add_aborted(entry)


def _control_type(source: BatchFile, position: int) -> str:
    batch = value_or(None, source.batch, position)
    return (batch and value_or(None, batch.control_type)) or "UNKNOWN"
