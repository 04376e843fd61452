"""Checks each file of a log without opening the log.

The three verdicts:
- damaged: bytes that were written and acknowledged may be lost or wrong, or Kafka would
  refuse the file.
- warning: opening the log repairs the file, for example a torn tail or a wrong index
  (an index is only a cache). Or it is unknown whether there is a fault, for example for
  a gap in the offsets of a log that Kafka wrote.
- ok: no fault was found.

If durable offsets are in no segment, the missing segments get verdicts too.

Rules:
- Nothing is written, locked or repaired. A running writer is not disturbed, and its
  last batch may appear torn. A file with a fault is checked again if files or metadata
  have changed since they were listed.
- Foreign bytes result in a verdict or a LogcoreError, and in no other error.
- Memory is bounded by one batch and one index, not by the length of a log.

The head, the CRC and the order of each batch are checked, but not the records;
dump(records=True) decodes them. To predict how recovery would repair a log, this module
calls partition/recovery.py.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, Protocol, cast

import attrs
import numpy as np
import numpy.typing as npt

from logcore.config import Durability
from logcore.errors import (
    InvalidNameError,
    LogcoreError,
    LogNotFoundError,
    StorageReadError,
)
from logcore.fs import FS, OS
from logcore.index import OFFSET_ENTRY, TIME_ENTRY, TXN_ENTRY
from logcore.inspect.catalog import final_name, kind_of, partitions
from logcore.inspect.dump import DUMPERS, IndexTable, LogFile
from logcore.kernels import layout
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import DIRECTORY_FILES, PARTITION_FILES
from logcore.metadata.filenames import (
    DELETED,
    INDEX,
    LOG,
    QUARANTINE,
    SEAL,
    SNAPSHOT,
    SWAP,
    TIME_INDEX,
    TXN_INDEX,
    UNFINISHED,
    base_offset_of,
    bases_in,
    file_name,
    is_misnamed,
    partition_name,
    partition_of,
)
from logcore.partition import checksum_file, order, recovery
from logcore.partition.gaps import Gaps
from logcore.partition.persisted import PersistedState, value_or
from logcore.partition.recovery import Action, TailFacts, decide
from logcore.segment import ActiveSegment, GrowingSegment, Segment

Status = Literal["ok", "warning", "damaged"]

#: Maximum number of checks of a partition that changes during each check.
_MAX_ATTEMPTS: Final = 5


@attrs.frozen(kw_only=True)
class Verdict:
    """The verdict of verify() on one file.

    Attributes:
        kind: As kind_of() returns it, or "other".
        detail: The finding, or "".
        position, offset: The first damage, as a position in the file and in the log.
        batches, records: Number of complete batches and their records.
        size_bytes: Size of the file.
    """

    path: str
    kind: str
    status: Status
    detail: str = ""
    position: int | None = None
    offset: int | None = None
    batches: int = 0
    records: int = 0
    size_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)


def verify(path: str | os.PathLike[str], *, fs: FS = OS) -> Iterator[Verdict]:
    """Check one file, a partition directory, or a log directory with its partitions.

    Yield a verdict for each file. Each .log file is read once, together with its indexes,
    and its CRCs are checked. Damage is never raised.

    Raises:
        LogNotFoundError: the file or directory does not exist. This is raised before the
            first verdict.
        InvalidNameError: this is not a file of a log. This is raised before the first
            verdict.
    """
    where = os.fspath(path)
    if not fs.is_directory(fs.real_path(where)):
        if not fs.exists(where):
            raise LogNotFoundError("there is no such file or directory", path=where)
        directory, name = os.path.split(where)
        if kind_of(name) is None and not is_misnamed(name):
            raise InvalidNameError("not a file of a log", path=where, found=repr(name))
        if name in DIRECTORY_FILES:
            return iter([_verify_small(fs, where, name)])
        return _verify_partition(fs, directory or ".", only=name)
    found = partitions(where, fs=fs)
    if found == [where]:
        return _verify_partition(fs, where)
    return _verify_directory(fs, where, found)


def _verify_directory(fs: FS, directory: str, found: list[str]) -> Iterator[Verdict]:
    for name in sorted(fs.listdir(directory)):
        path = os.path.join(directory, name)
        if name in DIRECTORY_FILES:
            yield _verify_small(fs, path, name)
        elif name.endswith(UNFINISHED):
            detail = "a copy that `logcore recover` did not finish, and over which Kafka does not start; remove it"
            yield Verdict(path=path, kind="other", status="damaged", detail=detail)
    deleted_names = _unfinished_topics(fs, directory)
    for partition in found:
        key = partition_of(os.path.basename(fs.real_path(partition)))
        if key is not None and key[0] in deleted_names:
            detail = (
                "of a topic that is being created or deleted; "
                "if no process does this, opening the directory removes it"
            )
            yield Verdict(path=partition, kind="other", status="ok", detail=detail)
        else:
            yield from _verify_partition(fs, partition)
    yield from _verify_missing(fs, directory)


def _unfinished_topics(fs: FS, directory: str) -> set[str]:
    """Return the incomplete topics.

    logcore.topics marks a topic as deleting until its creation is complete, and while
    its files are removed.
    """
    content = value_or(None, checkpoint.read, fs, directory, checkpoint.TOPICS)
    rows = checkpoint.unpack_topics(content or b"") or ()
    return {
        str(row.get("topic"))
        for row in rows
        if isinstance(row, dict) and row.get("deleting")
    }


def _verify_missing(fs: FS, directory: str) -> Iterator[Verdict]:
    """Check partitions that had records, by the checkpoints, but have no directory."""
    missing = _missing(fs, directory)
    if missing:
        # The deletion of a topic first renames its directories, and then removes its
        # lines from the checkpoints. A second check then finds no line.
        missing = _missing(fs, directory)
    for (topic, number), end in missing.items():
        path = os.path.join(directory, partition_name(topic, number))
        detail = f"the directory of a partition that reached offset {end} is gone"
        yield Verdict(path=path, kind="other", status="damaged", detail=detail)


def _missing(fs: FS, directory: str) -> dict[tuple[str, int], int]:
    """Return missing partitions: (topic, number) to the offset that each reached."""
    points, starts = (
        value_or({}, checkpoint.read_offsets, fs, directory, name)
        for name in (checkpoint.RECOVERY_POINT, checkpoint.LOG_START)
    )
    names = fs.listdir(directory)
    half = _unfinished_topics(fs, directory)
    present = {partition_of(name) for name in names}
    # Kafka renames a directory like this to delete it, or because it does not know the
    # topic. The checkpoints contain the lines of the partition for another minute.
    deleted_names = [name for name in names if name.endswith(("-delete", "-stray"))]
    return {
        key: end
        for key, end in sorted(points.items())
        if end > starts.get(key, 0)
        and key not in present
        and key[0] not in half
        and not any(
            name.startswith(partition_name(*key) + ".") for name in deleted_names
        )
    }


def _verify_small(fs: FS, path: str, kind: str) -> Verdict:
    """Check a small file on its own: it can be decoded or not."""
    size = 0
    try:
        size = fs.file_size(path)
        rows = sum(
            1
            for row in DUMPERS[kind](fs, path)
            if row["type"] not in ("padding", "fragment")
        )
        detail = ""
        if rows != 1:  # most small files hold one fact and are not lists of entries
            detail = _entries(rows)
        return Verdict(
            path=path, kind=kind, status="ok", detail=detail, size_bytes=size
        )
    except (FileNotFoundError, LogNotFoundError):
        return Verdict(
            path=path, kind=kind, status="ok", detail="removed during the check"
        )
    except LogcoreError as error:
        # Readers and recovery can work without these two files of this library.
        status: Status = "damaged"
        if kind in (checkpoint.POLICY, checkpoint.DURABLE_END):
            status = "warning"
        return Verdict(
            path=path,
            kind=kind,
            status=status,
            detail=_reason(error),
            position=error.position,
            size_bytes=size,
        )


def _entries(count: int) -> str:
    if count == 1:
        return "1 entry"
    return f"{count} entries"


def _reason(error: LogcoreError) -> str:
    if error.expected is None and error.found is None:
        return error.reason
    return f"{error.reason} (expected {error.expected}, found {error.found})"


@attrs.frozen
class _FileSnapshot:
    """The metadata and the file names of a partition at one moment.

    The names are listed after the metadata was read, because a running writer changes
    both.
    """

    #: Metadata of the partition, read first.
    persisted: PersistedState
    #: Whether the directory has the marker of a clean shutdown.
    is_clean: bool
    names: tuple[str, ...]

    @classmethod
    def at(cls, fs: FS, directory: str) -> _FileSnapshot:
        """Read the state of a partition now.

        Raises:
            FileNotFoundError: The partition was deleted.
        """
        parent, name = os.path.split(fs.real_path(directory))
        persisted = PersistedState.read(fs, directory, parent, partition_of(name))
        is_clean = fs.exists(os.path.join(parent, checkpoint.CLEAN_SHUTDOWN))
        return cls(persisted, is_clean, tuple(sorted(fs.listdir(directory))))

    @functools.cached_property
    def bases(self) -> list[int]:
        return bases_in(self.names)

    @functools.cached_property
    def swaps(self) -> list[int]:
        """Base offsets of segments that a compaction is putting in place of others."""
        return [
            base
            for name in self.names
            if (base := base_offset_of(name, LOG + SWAP)) is not None
        ]

    @functools.cached_property
    def files(self) -> dict[str, list[str]]:
        """Base offset, as twenty digits, to the names of the files of that segment."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            if kind_of(name) and final_name(name) == name:
                found.setdefault(name.partition(".")[0], []).append(name)
        return found

    def files_of(self, base: int) -> list[str]:
        return self.files.get(file_name(base, ""), [])

    def context(self, base: int) -> _FileContext:
        slot = bisect_right(self.bases, base)
        next_base = None
        if slot < len(self.bases):
            next_base = self.bases[slot]
        is_active = next_base is None
        return _FileContext(
            next_base,
            self.persisted,
            self.swaps,
            is_rebuilt=is_active and not self.is_clean,
        )


@attrs.frozen
class _FileContext:
    """The facts about a partition that the verdict on one segment needs."""

    #: Base offset of the next segment, None for the active segment.
    next_base: int | None
    #: Metadata files and checkpoints of the log.
    persisted: PersistedState
    #: Base offsets of segments that a compaction is about to put in place.
    swaps: list[int]
    #: Whether opening the log rebuilds all other files of this segment from its
    #: batches.
    is_rebuilt: bool


def _verify_partition(
    fs: FS, directory: str, *, only: str | None = None
) -> Iterator[Verdict]:
    try:
        first = _FileSnapshot.at(fs, directory)
    except FileNotFoundError:
        return  # the partition was deleted
    known = set(first.bases)
    for base in first.bases:
        if only is None or only in first.files_of(base):
            path = os.path.join(directory, file_name(base, LOG))
            for verdict in _stable_verdicts(
                fs,
                directory,
                first,
                path,
                functools.partial(_verify_segment, fs, directory, base),
            ):
                if only is None or os.path.basename(verdict.path) == only:
                    yield verdict
    if only is None:
        yield from _stable_verdicts(
            fs, directory, first, directory, functools.partial(_verify_start, directory)
        )
    for name in first.names:
        if only is None or name == only:
            other = _verify_other(fs, os.path.join(directory, name), name, known)
            if other is not None:
                yield other


def _stable_verdicts(
    fs: FS,
    directory: str,
    snapshot: _FileSnapshot,
    path: str,
    check: Callable[[_FileSnapshot], Iterable[Verdict]],
) -> list[Verdict]:
    """Return the verdicts on the file at `path`, in a partition that may be changing.

    A verdict other than "ok" is returned only if names, metadata and the file were the
    same before and after the check.
    """
    found: list[Verdict] = []
    for _ in range(_MAX_ATTEMPTS):
        before = _identity(fs, path)
        found = list(check(snapshot))
        if all(verdict.status == "ok" for verdict in found):
            break
        try:
            later = _FileSnapshot.at(fs, directory)
        except FileNotFoundError:
            return []
        if later == snapshot and _identity(fs, path) == before:
            break
        snapshot = later
    else:
        # The file changed during every check. It may be damaged, or its writer was
        # active.
        for at, verdict in enumerate(found):
            if verdict.status == "damaged":
                detail = f"the file changed during each check; the last result: {verdict.detail}"
                found[at] = attrs.evolve(verdict, status="warning", detail=detail)
    return found


def _identity(fs: FS, path: str) -> tuple[int, int] | None:
    try:
        return fs.identity(path)
    except (FileNotFoundError, LogcoreError):
        return None


def _verify_start(directory: str, snapshot: _FileSnapshot) -> Iterator[Verdict]:
    """Check whether the first segments, or all segments, are missing."""
    persisted = snapshot.persisted
    bases = sorted([*snapshot.bases, *snapshot.swaps])
    if bases:
        begin = persisted.begin(bases[0])
        end = bases[0]
    else:
        begin = persisted.log_start
        end = persisted.end
    detail = ""
    if begin < end:
        detail = f"offsets {begin} to {end - 1} are in no segment, and were not deleted"
    elif not bases:
        remaining = [
            name
            for name in snapshot.names
            if base_offset_of(name, os.path.splitext(name)[1]) is not None
        ]
        if remaining:
            detail = (
                f"there is no segment, only a file of a former segment: {remaining[0]}"
            )
    if detail:
        path = os.path.join(directory, file_name(begin, LOG))
        yield Verdict(
            path=path, kind="log", status="damaged", detail=detail, offset=begin
        )


def _verify_other(fs: FS, path: str, name: str, bases: set[int]) -> Verdict | None:
    """Check a file that belongs to no segment of the log."""
    if name == checkpoint.CHECKSUMS_VALID:
        return None
    if name in PARTITION_FILES:
        return _verify_small(fs, path, name)
    kind = kind_of(name)
    try:
        size = fs.file_size(path)
    except (FileNotFoundError, LogcoreError):
        size = 0
    if is_misnamed(name):
        detail = "its 20 digits are not an offset, and Kafka fails on such a name; move the file away"
        return Verdict(
            path=path, kind="other", status="damaged", detail=detail, size_bytes=size
        )
    if name != final_name(name):
        if name.endswith(SWAP):
            detail = "a compaction was interrupted; Kafka finishes it when it opens the partition"
            return Verdict(
                path=path,
                kind=kind or "other",
                status="warning",
                detail=detail,
                size_bytes=size,
            )
        origin = "left by a compaction"
        if name.endswith(DELETED):
            origin = "waits for deletion"
        return Verdict(
            path=path,
            kind=kind or "other",
            status="ok",
            detail=f"{origin}; not checked",
            size_bytes=size,
        )
    base = None
    if kind is not None:
        base = base_offset_of(name, f".{kind}")
    if kind is not None and base is not None and base not in bases:
        if kind == "snapshot":
            return _verify_small(fs, path, kind)
        detail = "belongs to no .log file"
        return Verdict(
            path=path, kind=kind, status="warning", detail=detail, size_bytes=size
        )
    if kind is None and name.endswith(QUARANTINE):
        detail = "bytes that a recovery removed from the log"
        return Verdict(
            path=path, kind="other", status="ok", detail=detail, size_bytes=size
        )
    return None


def _verify_segment(
    fs: FS, directory: str, base: int, snapshot: _FileSnapshot
) -> Iterator[Verdict]:
    """Check a .log file and the other files of its segment, in one walk."""
    names = snapshot.files_of(base)
    context = snapshot.context(base)
    checks: list[_Check] = []
    early: list[Verdict] = []
    for suffix, kind in (
        (INDEX, _IndexCheck),
        (TIME_INDEX, _TimeCheck),
        (TXN_INDEX, _TxnCheck),
    ):
        name = file_name(base, suffix)
        if name in names:
            try:
                checks.append(kind(fs, os.path.join(directory, name), base, context))
            except LogNotFoundError:
                pass  # deleted together with its segment
            except LogcoreError as error:
                path = os.path.join(directory, name)
                early.append(
                    Verdict(
                        path=path,
                        kind=suffix[1:],
                        status="damaged",
                        detail=_reason(error),
                    )
                )
    yield _verify_log(fs, directory, base, context, checks)
    yield from early
    for check in checks:
        yield check.verdict()
    if file_name(base, SEAL) in names:
        yield _verify_checksum_file(
            fs,
            os.path.join(directory, file_name(base, SEAL)),
            base,
            context.persisted.log_start,
        )
    if file_name(base, SNAPSHOT) in names:
        yield _verify_small(
            fs, os.path.join(directory, file_name(base, SNAPSHOT)), "snapshot"
        )


def _verify_checksum_file(fs: FS, path: str, base: int, log_start: int) -> Verdict:
    """Compare a segment with its checksum file, and check that the next segment exists.

    A difference does not count if the segment or the checksum file changed during the
    check.
    """
    verdict = Verdict(path=path, kind=SEAL[1:], status="ok")
    directory = os.path.dirname(path)
    try:
        verdict = attrs.evolve(verdict, size_bytes=fs.file_size(path))
        segment = GrowingSegment(fs, directory, base)
        modified_ms = fs.modified_ms(segment.path)
        seal = checksum_file.read(fs, directory, base)
        if seal is None:
            if not fs.exists(path):
                return attrs.evolve(verdict, detail="removed during the check")
            return attrs.evolve(
                verdict,
                status="warning",
                detail="not a seal; scrubbing the log rewrites it",
            )
        if not seal.is_of(segment.size_bytes, modified_ms):
            return attrs.evolve(
                verdict, detail="the segment was rewritten since it was sealed"
            )
        detail = checksum_file.follows(fs, directory, base, seal, log_start)
        if checksum_file.checksum(segment) != seal.crc32c:
            detail = "the segment differs from its checksum file"
        if (
            detail
            and segment.is_current()
            and checksum_file.read(fs, directory, base) == seal
        ):
            return attrs.evolve(verdict, status="damaged", detail=detail)
        return verdict
    except FileNotFoundError:
        return attrs.evolve(verdict, detail="removed during the check")
    except LogcoreError as error:
        return attrs.evolve(verdict, status="damaged", detail=_reason(error))


@attrs.define
class _WalkResult:
    """The result of a walk over a segment, up to the first damage."""

    batches: int = 0
    records: int = 0
    end_offset: int = 0
    bad_position: int | None = None
    reason: str = ""
    recovery_position: int | None = None
    has_gaps: bool = False
    #: Opening the log neither accepts nor cuts off the bad bytes.
    is_refused: bool = False


def _verify_log(
    fs: FS, directory: str, base: int, context: _FileContext, checks: list[_Check]
) -> Verdict:
    path = os.path.join(directory, file_name(base, LOG))
    try:
        # The last segment is read, not mapped: its writer may truncate it, and a
        # process that touches a lost page of a mapping is killed. Sealed segments do
        # not change, and a walk over a mapping is one and a half times as fast.
        growing = LogFile(fs, path)
        segment: LogFile | Segment
        if context.next_base is None:
            segment = growing
        else:
            segment = Segment(fs, directory, base)
        walked = _walk(segment, context, checks)
        walked_size = None  # an index is checked only by batches that could be walked
        if walked.bad_position is None:
            walked_size = growing.size_bytes
        for check in checks:
            check.finish(walked_size)
        return _check_log(growing, walked, context)
    except FileNotFoundError:
        return Verdict(
            path=path, kind="log", status="ok", detail="removed during the check"
        )
    except LogcoreError as error:
        return Verdict(
            path=path,
            kind="log",
            status="damaged",
            detail=_reason(error),
            position=error.position,
            offset=error.offset,
        )


def _walk(segment: Segment, context: _FileContext, checks: list[_Check]) -> _WalkResult:
    walked = _WalkResult(end_offset=segment.base_offset)
    for facts, position, stop_reason in segment.walk(0, crc=True):
        count, reason = _in_order(facts, walked, segment.base_offset, context)
        count, reason = _count(segment, facts, count, reason, walked)
        if count:
            good = facts[:count]
            walked.end_offset = int(good["last_offset"][-1]) + 1
            if (
                walked.recovery_position is None
                and walked.end_offset > context.persisted.recovery_point
            ):
                first_above = np.argmax(
                    good["last_offset"] >= context.persisted.recovery_point
                )
                walked.recovery_position = int(good["position"][first_above])
            for check in checks:
                check.add(good)
        if reason:
            walked.bad_position = int(facts["position"][count])
            walked.reason = reason
            return walked
        if stop_reason not in (layout.WALK_END, layout.WALK_LIMIT):
            walked.bad_position = position
            walked.reason = layout.WALK_REASONS[stop_reason]
    return walked


def _in_order(
    facts: layout.Facts, walked: _WalkResult, base_offset: int, context: _FileContext
) -> tuple[int, str]:
    """Return how many batches continue the log in this segment, and the fault of the
    next batch.
    """
    dense_from = context.persisted.gaps.dense_from
    if dense_from < order.NEVER:
        # Offsets below the log start may be missing.
        dense_from = max(dense_from, context.persisted.log_start)
    limit = order.reach(base_offset)
    if context.next_base is not None:
        limit = min(limit, context.next_base)
    row, fault = order.first_fault(
        facts, walked.end_offset, limit, dense_from=dense_from
    )
    walked.is_refused = fault is order.OrderFault.GAP
    if fault is None:
        return row, ""
    field = "base_offset"
    if facts["magic"][row] != 2:  # an entry of v0 or v1 stores its last offset only
        field = "last_offset"
    first = int(facts[field][row])
    last = int(facts["last_offset"][row])
    if fault is not order.OrderFault.FAR:
        return (
            row,
            f"offset {first} does not follow {order.end_of(facts[:row], walked.end_offset) - 1}",
        )
    if context.next_base is not None and last >= context.next_base:
        return (
            row,
            f"offset {last} belongs to the next segment, which begins at {context.next_base}",
        )
    return row, f"offset {last} is further from {base_offset} than a segment can hold"


def _count(
    segment: Segment, facts: layout.Facts, count: int, reason: str, walked: _WalkResult
) -> tuple[int, str]:
    """Count the first batches and their records.

    Return (count, reason), or the number of batches before the first invalid v0 or v1
    entry and its fault. Such an entry must be decoded to count its records.
    """
    modern = facts["magic"] == 2
    for row in np.flatnonzero(~modern[:count]).tolist():
        try:
            batch = segment.batch(int(facts["position"][row]))
            if batch is not None:
                walked.records += len(batch.records())
        except StorageReadError:
            raise
        except LogcoreError as error:
            count = row
            reason = error.reason
            walked.is_refused = True
            break
    good = facts[:count][modern[:count]]
    offsets_spanned = good["last_offset"] - good["base_offset"] + 1
    walked.batches += count
    walked.records += int(good["record_count"].sum(dtype=np.int64))
    # Compaction leaves batches with fewer records than offsets.
    walked.has_gaps |= bool(np.any(good["record_count"] < offsets_spanned))
    return count, reason


def _check_log(
    segment: GrowingSegment, walked: _WalkResult, context: _FileContext
) -> Verdict:
    size = segment.size_bytes
    position = walked.bad_position
    verdict = Verdict(
        path=segment.path,
        kind="log",
        status="ok",
        batches=walked.batches,
        records=walked.records,
        size_bytes=size,
    )
    is_active = context.next_base is None
    # All offsets below the recovery point were durable. A log that ends below it has
    # lost acknowledged records.
    lost = is_active and walked.end_offset < context.persisted.recovery_point
    if position is None and not lost:
        if is_active or walked.end_offset == context.next_base:
            return verdict
        return attrs.evolve(
            verdict, **_check_gap(segment, walked, context.next_base or 0, context)
        )
    if position is None:
        detail = (
            f"the log ends at offset {walked.end_offset}, but up to "
            f"{context.persisted.recovery_point} it was durable"
        )
        return attrs.evolve(
            verdict,
            status="damaged",
            detail=detail,
            position=size,
            offset=walked.end_offset,
        )
    # partition/recovery.py decides, as when the log is opened. The writer may have
    # truncated the file since it was read.
    segment.refresh()
    only_zeros, next_batch_bytes = recovery.search_after_damage(
        cast(ActiveSegment, segment), position, walked.end_offset
    )
    known = position  # bytes below this position were durable
    if lost:
        known = size + 1
    elif walked.recovery_position is not None:
        known = walked.recovery_position
    policy = context.persisted.sidecar.policy or Durability("os")
    action = decide(TailFacts(position, known, only_zeros, next_batch_bytes, policy))
    remaining = f"{size - position} bytes from here on"
    if only_zeros:
        remaining = f"{size - position} zero bytes from here on"
    is_torn = (
        next_batch_bytes is None and action is not Action.FAIL and not walked.is_refused
    )
    if is_active and is_torn:
        detail = f"torn tail: {walked.reason}; opening the log cuts the {remaining}"
        status: Status = "warning"
    else:
        status = "damaged"
        detail = f"{walked.reason}; {remaining} cannot be trusted"
        if next_batch_bytes is not None:
            detail = f"{walked.reason}; the next whole batch is {next_batch_bytes} bytes further, {remaining}"
        elif lost:
            detail += f", but all data below offset {context.persisted.recovery_point} was synced"
    return attrs.evolve(
        verdict,
        status=status,
        detail=detail,
        position=position,
        offset=walked.end_offset,
    )


def _check_gap(
    segment: Segment, walked: _WalkResult, next_base: int, context: _FileContext
) -> dict[str, Any]:
    """Check a segment that ends before the next one begins."""
    gap = f"offsets {walked.end_offset} to {next_base - 1} are in no segment"
    if next_base <= context.persisted.log_start:
        return {"detail": f"{gap}: deleted"}
    if any(walked.end_offset <= base < next_base for base in context.swaps):
        return {"detail": f"{gap}: they are in the file of a compaction in progress"}
    lost = Gaps(context.persisted.gaps).loss_at_segment_end(
        segment, walked.end_offset, next_base
    )
    if lost:
        return {
            "status": "damaged",
            "detail": f"{gap}: {lost}",
            "offset": walked.end_offset,
        }
    if walked.has_gaps:
        return {"detail": f"{gap}: compacted away"}
    return {
        "status": "warning",
        "detail": f"{gap}: normal only after compaction",
        "offset": walked.end_offset,
    }


class _Check(Protocol):
    """A check of another file of the segment, fed by the walk over the .log file."""

    def __init__(self, fs: FS, path: str, base: int, context: _FileContext) -> None: ...
    def add(self, facts: layout.Facts) -> None:
        """Process the next good batches of the segment."""

    def finish(self, size: int | None) -> None:
        """End the check.

        `size` is the size of the .log file, or None if the walk ended early.
        """

    def verdict(self) -> Verdict: ...


class _EntriesCheck:
    """Common part of the three index checks: the entries, and their first fault."""

    kind = ""
    dtype: np.dtype[Any]
    status: Status = "warning"

    def __init__(self, fs: FS, path: str, base: int, context: _FileContext) -> None:
        self.path = path
        self.base = base
        self.table = IndexTable.read(fs, path, self.dtype)
        self.entries = self.table.entries
        self.reason = ""
        self.slot: int | None = None
        self.is_active = context.next_base is None
        self.is_rebuilt = context.is_rebuilt
        self.check()

    def check(self) -> None:
        raise NotImplementedError

    def add(self, facts: layout.Facts) -> None:
        pass

    def finish(self, size: int | None) -> None:
        pass

    def fault(self, bad: npt.NDArray[np.bool_], reason: str, first: int = 0) -> None:
        """Record the first True of `bad` as the fault, unless there is one already.

        Element 0 of `bad` is the entry `first`.
        """
        if not self.reason and bad.any():
            self.slot = first + int(bad.argmax())
            self.reason = f"entry {self.slot}: {reason}"

    def verdict(self) -> Verdict:
        table = self.table
        size = (
            len(self.entries) * self.dtype.itemsize
            + table.padding_bytes
            + table.fragment_bytes
        )
        detail = _entries(len(self.entries))
        if table.padding_bytes:
            detail += ", zero-padded while it is written"
        found = Verdict(
            path=self.path, kind=self.kind, status="ok", detail=detail, size_bytes=size
        )
        if self.reason:
            position = None
            if self.slot is not None:
                position = self.slot * self.dtype.itemsize
            return attrs.evolve(
                found, status=self.status, detail=self.reason, position=position
            )
        if table.fragment_bytes:
            detail = f"{table.fragment_bytes} bytes of an entry at the end"
            return attrs.evolve(
                found,
                status="warning",
                detail=detail,
                position=size - table.fragment_bytes,
            )
        if table.padding_bytes and not self.is_active:
            return attrs.evolve(
                found, status="warning", detail="zero-padded, but the segment is sealed"
            )
        return found


class _IndexCheck(_EntriesCheck):
    """.index: offsets and positions rise, and each entry points to a batch that does not
    begin above its offset.
    """

    kind = "index"
    dtype = OFFSET_ENTRY

    def check(self) -> None:
        self.offsets = self.base + self.entries["relative_offset"].astype(np.int64)
        self.positions = self.entries["position"].astype(np.int64)
        self.fault(self.entries["relative_offset"] < 0, "offset below the segment's")
        self.fault(self.positions < 0, "negative position")
        self.fault(np.diff(self.offsets) <= 0, "offset does not rise", 1)
        self.fault(np.diff(self.positions) <= 0, "position does not rise", 1)

    def add(self, facts: layout.Facts) -> None:
        if self.reason or not len(self.entries):
            return
        start = int(facts["position"][0])
        end = int(facts["position"][-1]) + int(facts["size_bytes"][-1])
        first, stop = np.searchsorted(
            self.positions, [start, end]
        ).tolist()  # entries that point into these batches
        indexed_positions = self.positions[first:stop]
        # Rows of the batches that the entries point into.
        rows = np.searchsorted(facts["position"], indexed_positions, side="right") - 1
        self.fault(
            facts["position"][rows] != indexed_positions,
            "no batch begins at its position",
            first,
        )
        self.fault(
            facts["last_offset"][rows] > self.offsets[first:stop],
            "it points to a batch above its offset",
            first,
        )

    def finish(self, size: int | None) -> None:
        if size is not None:
            self.fault(self.positions >= size, "points after the end of the log")


class _TimeCheck(_EntriesCheck):
    """.timeindex: timestamps rise, and no record before an entry has a larger timestamp.

    The index of a sealed segment ends with the largest timestamp.
    """

    kind = "timeindex"
    dtype = TIME_ENTRY

    def check(self) -> None:
        self.offsets = self.base + self.entries["relative_offset"].astype(np.int64)
        self.timestamps = self.entries["timestamp"].astype(np.int64)
        self.largest = -1
        self.fault(self.entries["relative_offset"] < 0, "offset below the segment's")
        self.fault(
            self.timestamps[1:] <= self.timestamps[:-1], "timestamp does not rise", 1
        )
        self.fault(np.diff(self.offsets) < 0, "offset falls", 1)
        self.end = self.base

    def add(self, facts: layout.Facts) -> None:
        if not self.reason and len(self.entries):
            # A search for an entry's time starts at its offset, so no batch wholly
            # before it may be newer.
            largest = np.maximum(
                np.maximum.accumulate(facts["max_timestamp"]), self.largest
            )
            last = facts["last_offset"]
            first, stop = np.searchsorted(
                self.offsets, [int(self.end), int(last[-1]) + 1]
            ).tolist()
            # For each entry in the range of these batches: the last batch wholly before
            # it, -1 if that was in an earlier call, and the largest timestamp up to the
            # end of that batch.
            rows = np.searchsorted(last, self.offsets[first:stop]) - 1
            before = np.where(rows >= 0, largest[np.maximum(rows, 0)], self.largest)
            self.fault(
                before > self.timestamps[first:stop],
                "an older record has a larger timestamp",
                first,
            )
        self.largest = max(self.largest, int(facts["max_timestamp"].max(initial=-1)))
        self.end = int(facts["last_offset"][-1]) + 1

    def finish(self, size: int | None) -> None:
        if size is None or self.reason:
            return
        self.fault(self.offsets >= self.end, "offset after the end of the log")
        last = -1
        if len(self.timestamps):
            last = int(self.timestamps[-1])
        if not self.reason and not self.is_active and last != self.largest:
            self.slot = None
            self.reason = (
                f"its last timestamp is {last}, the segment's largest {self.largest}; "
                "retention uses the last timestamp"
            )


class _TxnCheck(_EntriesCheck):
    """.txnindex: aborted transactions that end in this segment, in marker order.

    A fault is damage and not a warning, because readers of committed data rely on the
    index. The exception is the index of the active segment after a crash, which opening
    rebuilds.
    """

    kind = "txnindex"
    dtype = TXN_ENTRY

    def check(self) -> None:
        entries = self.entries
        if self.is_rebuilt:
            self.status = "warning"
        else:
            self.status = "damaged"
        last = entries["last_offset"].astype(np.int64)
        # As in Kafka, the high byte of the version decides.
        self.fault(entries["version"] >> 8 != 0, "unknown version")
        self.fault(last < self.base, "ends before the segment")
        self.fault(entries["first_offset"] > last, "ends before it begins")
        self.fault(last[1:] <= last[:-1], "markers do not rise", 1)
        self.end = self.base

    def add(self, facts: layout.Facts) -> None:
        self.end = int(facts["last_offset"][-1]) + 1

    def finish(self, size: int | None) -> None:
        if size is not None:
            self.fault(
                self.entries["last_offset"] >= self.end,
                "its marker is after the end of the segment",
            )
