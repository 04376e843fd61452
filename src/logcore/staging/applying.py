"""The owner's part: carries out manifests that are ready, and completes writes that a
crash interrupted.

Rules:
- Every step can be repeated: offsets are absolute, a moved file no longer exists at its
  source, and before appending, the segment is truncated to the position in the
  manifest.
- Readers see a write in all partitions at once, when its application's state file
  contains its version. Until then the assigned manifest limits them
  (partition/staged_limit.py).
- A version at or below the application's state is done. Its manifest and files are
  removed, and this is success.

This module works on files, and on logs passed by the caller. It takes no directory lock
and starts no thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Final, Protocol

import attrs

from logcore.errors import (
    CorruptLogError,
    InvalidConfigError,
    InvalidNameError,
    LogcoreError,
)
from logcore.fs import FS, opened
from logcore.kernels import kernel, layout
from logcore.kernels.checksum import crc32c
from logcore.metadata import checkpoint
from logcore.metadata.filenames import (
    ASSIGNED,
    INDEX,
    LOG,
    TIME_INDEX,
    file_name,
    partition_name,
    staging_path,
)
from logcore.partition.rewriting import adopting, save_recovery_points
from logcore.partition.segment_files import list_bases
from logcore.partition.writer import Writer
from logcore.reporting import ERROR, log_line
from logcore.segment import GrowingSegment, Segment
from logcore.staging.manifest import (
    CLAIM,
    DAMAGED,
    READY,
    REFUSED,
    Manifest,
    StagedFile,
    StagedTarget,
    check_directory,
    manifest_name,
    names_in,
    read_manifest,
    read_state,
    remove_tree,
    write_state,
)

# Base offset, batch length, leader epoch: the fields before the magic.
_STAMP: Final = struct.Struct(">qii")
_WALK_BATCHES: Final = 1 << 16
#: Staged data of a partition up to this size is appended to the active segment. Larger
#: files are moved in place, because a copy would cost more than a separate file.
_COPY_BYTES: Final = 16 << 20
#: Carried pieces that do not fit into the active segment are joined to segments of
#: about this size.
_UNIT_BYTES: Final = 64 << 20


class Target(Protocol):
    """A log whose appends are blocked and whose records are all durable."""

    path: str
    #: The log end offset.
    end: int
    leader_epoch: int
    #: Base offset and size of the active segment.
    segment: int
    size_bytes: int
    #: Maximum size of the active segment.
    segment_bytes: int

    def has_room(self, size: int, max_timestamp: int, last_offset: int) -> bool: ...
    def seal(self) -> None: ...
    def add_durable(self, bases: Sequence[int], end: int, size_bytes: int) -> None: ...
    def make_visible(self) -> None: ...
    def fail(self, cause: BaseException) -> None: ...


class TargetHost(Protocol):
    """The part of log.LogHost that apply_ready() uses."""

    @property
    def writer(self) -> Writer: ...


class TargetLog(Protocol):
    """The part of log.Log that apply_ready() uses."""

    @property
    def host(self) -> TargetHost: ...


class TargetDirectory(Protocol):
    """The methods of logdir.LogDir that apply_ready() uses."""

    @property
    def path(self) -> str: ...
    def __contains__(self, topic: object) -> bool: ...
    def create_topics(
        self, wanted: Mapping[str, tuple[int, Mapping[str, object] | None]]
    ) -> None: ...
    def partitions(self, name: str) -> tuple[int, ...]: ...
    def partition(self, topic: str, number: int) -> TargetLog: ...


def apply_ready(fs: FS, directory: TargetDirectory, *, most: int | None = None) -> int:
    """Apply up to `most` manifests that are ready. Return the number of applied ones.

    The caller owns the directory. A manifest whose files do not match it is refused. If
    its logs cannot be written, a manifest waits for a later call. The first such error
    is raised after the other manifests were processed.
    """
    path = staging_path(directory.path)
    done = 0
    failure: LogcoreError | None = None
    # Applications with an earlier unfinished version. Later versions wait: the state
    # file contains only the last version, so a later one would mark the earlier one as
    # done.
    waiting = _with_unfinished(fs, directory, path)
    for name in names_in(fs, path, READY):
        if done == most:
            break
        application = name.partition("@")[0]
        if application in waiting:
            continue
        try:
            manifest = read_manifest(fs, path, name)
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
            # The manifest was neither applied nor refused.
            if fs.exists(os.path.join(path, name)):
                waiting.add(application)
    if failure is not None:
        raise failure
    return done


def _with_unfinished(fs: FS, directory: TargetDirectory, path: str) -> set[str]:
    """Return applications with a version that has offsets but could not be placed.

    Opens the logs of such a version: opening a closed log rolls the version forward. A
    log that failed and was not closed remains failed, and its version remains
    unfinished.
    """
    for name in names_in(fs, path, ASSIGNED):
        # The failure was reported when the version could not be placed.
        with contextlib.suppress(LogcoreError):
            manifest = read_manifest(fs, path, name)
            if manifest is not None:
                for key in manifest.partitions():
                    directory.partition(*key)
    return {name.partition("@")[0] for name in names_in(fs, path, ASSIGNED)}


def roll_forward(fs: FS, directory: str) -> dict[str, LogcoreError]:
    """Complete writes that a crash interrupted after offsets were assigned.

    The caller has just acquired the directory's lock and has not opened any log.

    Returns the names of partition directories that must not be written, with the
    errors: their assigned offsets belong to records that could not be placed.

    A damaged manifest is renamed to `.damaged`. The destination of its records is
    unknown, so no partition is blocked for it. Requests for its outcome raise an error.

    Raises:
        LogcoreError: the staging directory itself cannot be read.
    """
    path = staging_path(directory)
    blocked: dict[str, LogcoreError] = {}
    names = set(names_in(fs, path, ""))
    # A visible name may not be durable: the process that created it may have been
    # killed, or its sync may have failed. Without this sync, a power failure after the
    # records are placed could restore the unclaimed manifest, and the records would be
    # placed twice.
    if any(name.endswith((CLAIM, ASSIGNED)) for name in names):
        fs.sync_dir(path)
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
            manifest = read_manifest(fs, path, name)
        except CorruptLogError as error:
            fs.rename(
                os.path.join(path, name),
                os.path.join(path, name[: -len(ASSIGNED)] + DAMAGED),
            )
            fs.sync_dir(path)
            log_line(
                "staging",
                ERROR,
                "a staged write was set aside, and may be in the log in part: %s",
                error,
            )
            continue
        if manifest is None:
            continue
        try:
            try:
                is_done = _is_done(fs, path, manifest)
            # The state file is damaged. _finish() writes it again, with this version,
            # which is the newest.
            except CorruptLogError:
                is_done = False
            if not is_done:
                _finish(fs, directory, path, manifest)
            _clear(fs, path, manifest, ASSIGNED)
        except LogcoreError as error:
            error.reason += f" (to abandon the rest of this write, remove {os.path.join(path, name)})"
            blocked.update(
                (partition_name(topic, partition), error)
                for topic, partition in manifest.partitions()
            )
    return blocked


def drop_topics(fs: FS, directory: str, topics: Collection[str]) -> None:
    """Remove topics under deletion from partially placed writes, so that these can
    complete.
    """
    path = staging_path(directory)
    for name in names_in(fs, path, ASSIGNED):
        try:
            manifest = read_manifest(fs, path, name)
        # The next opening renames this manifest to `.damaged`.
        except CorruptLogError:
            continue
        if manifest is None or not any(file.topic in topics for file in manifest.files):
            continue
        assert manifest.places is not None
        kept = attrs.evolve(
            manifest,
            files=[file for file in manifest.files if file.topic not in topics],
            places={
                key: place
                for key, place in manifest.places.items()
                if key[0] not in topics
            },
        )
        checkpoint.write(fs, path, name, kept.pack())


def damaged(fs: FS, directory: str) -> list[str]:
    """Return the paths of damaged manifests, see roll_forward()."""
    path = staging_path(directory)
    return [os.path.join(path, name) for name in names_in(fs, path, DAMAGED)]


def choose_destination(target: Target, files: Sequence[StagedFile]) -> StagedTarget:
    """Return the destination of staged files.

    Small files go into the active segment, so that many small writes do not create many
    small segments.
    """
    size = sum(file.size_bytes for file in files)
    count = sum(file.count for file in files)
    newest = max(file.max_timestamp for file in files)
    last_offset = target.end + count - 1
    place = StagedTarget(base=target.end, leader_epoch=target.leader_epoch)
    if size < min(target.segment_bytes // 4, _COPY_BYTES) and target.has_room(
        size, newest, last_offset
    ):
        return attrs.evolve(place, segment=target.segment, position=target.size_bytes)
    return place


def _is_done(fs: FS, path: str, manifest: Manifest) -> bool:
    state = read_state(fs, path, manifest.app_id)
    return state is not None and bool(manifest.version <= state["version"])


def _apply(fs: FS, directory: TargetDirectory, path: str, manifest: Manifest) -> int:
    if _is_done(fs, path, manifest):
        _clear(fs, path, manifest, READY)
        return 1
    try:
        _check_staged(fs, path, manifest)
        _make_topics(directory, manifest)
    except (CorruptLogError, InvalidNameError, InvalidConfigError) as error:
        _refuse(fs, path, manifest, str(error))
        raise
    writers: dict[tuple[str, int], Writer] = {
        key: directory.partition(*key).host.writer for key in manifest.partitions()
    }
    with contextlib.ExitStack() as stack:
        # From here on appends to all partitions are blocked, so that the assigned
        # offsets remain free.
        targets = {
            key: stack.enter_context(adopting(writer))
            for key, writer in writers.items()
        }
        places = {
            key: choose_destination(targets[key], files)
            for key, files in manifest.partitions().items()
        }
        assigned = attrs.evolve(manifest, places=places)
        # If new segments follow, the active segment is sealed as in a roll.
        for key, place in places.items():
            if place.segment is None:
                targets[key].seal()
        try:
            # After this the write is committed: roll_forward() completes it after a
            # crash.
            if not _claim(fs, path, assigned):
                return 0
            placed = _place_all(fs, directory.path, path, assigned)
            for key, bases in placed.items():
                files = assigned.partitions()[key]
                count = sum(file.count for file in files)
                size = sum(file.size_bytes for file in files)
                targets[key].add_durable(bases, places[key].base + count, size)
            for target in targets.values():
                target.make_visible()
            save_recovery_points(writers.values())
            write_state(fs, path, assigned)
        except BaseException as error:
            if fs.exists(
                os.path.join(
                    path, manifest_name(manifest.app_id, manifest.version, ASSIGNED)
                )
            ):
                # These offsets are assigned, and the state in memory may not include
                # them. No append may use them.
                for target in targets.values():
                    target.fail(error)
            raise
    _clear(fs, path, assigned, ASSIGNED)
    return 1


def _check_staged(fs: FS, path: str, manifest: Manifest) -> None:
    check_directory(fs, os.path.join(path, manifest.txid))
    for name, files in itertools.groupby(manifest.files, lambda file: file.name + LOG):
        where = os.path.join(path, name)
        try:
            with opened(fs, where) as handle:
                size = fs.size(handle)
                if size:
                    view = fs.map(handle, size)
                else:
                    view = memoryview(b"")
        except FileNotFoundError as error:
            raise CorruptLogError("a staged segment is missing", path=where) from error
        for file in files:
            _check_piece(view, file, where)


def _check_piece(view: memoryview, file: StagedFile, path: str) -> None:
    """Raise CorruptLogError if the bytes of a file are not those that its task wrote."""
    start = file.position or 0
    if file.position is None:
        end = len(view)
    else:
        end = start + file.size_bytes
    crc = crc32c(view[start:end])
    if (min(end, len(view)) - start, crc) != (file.size_bytes, file.crc):
        raise CorruptLogError(
            "a staged segment differs from the one that its task wrote",
            path=path,
            position=file.position,
            expected=f"{file.size_bytes} bytes, CRC-32C {file.crc:#010x}",
            found=f"{max(0, min(end, len(view)) - start)} bytes, {crc:#010x}",
        )


def units(files: Sequence[StagedFile]) -> list[list[StagedFile]]:
    """Group the files of one partition by the segments that they become.

    Each staged segment is a unit. Consecutive carried pieces are joined up to a size.
    The result depends on the manifest only, because a repeated run relies on it.
    """
    found: list[list[StagedFile]] = []
    size = 0
    for file in files:
        joins = (
            file.position is not None and found and found[-1][-1].position is not None
        )
        if joins and size + file.size_bytes <= _UNIT_BYTES:
            found[-1].append(file)
        else:
            found.append([file])
            size = 0
        size += file.size_bytes
    return found


def _make_topics(directory: TargetDirectory, manifest: Manifest) -> None:
    wanted = {
        name: (count, None)
        for name, count in manifest.topics.items()
        if name not in directory
    }
    if wanted:
        directory.create_topics(wanted)
    for topic, partition in manifest.partitions():
        if topic not in directory or partition not in directory.partitions(topic):
            raise InvalidConfigError(
                f"topic {topic!r} has no partition {partition}: it was created again since the write was planned"
            )


def _refuse(fs: FS, path: str, manifest: Manifest, reason: str) -> None:
    checkpoint.write(
        fs,
        path,
        manifest_name(manifest.app_id, manifest.version, REFUSED),
        reason.encode(),
    )
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(
            os.path.join(path, manifest_name(manifest.app_id, manifest.version, READY))
        )


def _claim(fs: FS, path: str, assigned: Manifest) -> bool:
    """Change a manifest from ready to assigned; return False if it was withdrawn.

    On an error the manifest becomes ready again, unless the assigned file exists.
    """
    ready, claim, final = (
        manifest_name(assigned.app_id, assigned.version, suffix)
        for suffix in (READY, CLAIM, ASSIGNED)
    )
    try:
        fs.rename(os.path.join(path, ready), os.path.join(path, claim))
    except FileNotFoundError:
        return False
    try:
        claimed = read_manifest(fs, path, claim)
    except CorruptLogError:
        fs.rename(os.path.join(path, claim), os.path.join(path, ready))
        raise
    # It was withdrawn, and another manifest with that name was published.
    if claimed is None or claimed.txid != assigned.txid:
        fs.rename(os.path.join(path, claim), os.path.join(path, ready))
        return False
    try:
        checkpoint.write(fs, path, final, assigned.pack())
    except BaseException:
        # Otherwise the sync of its name failed, and the file may or may not survive.
        if not fs.exists(os.path.join(path, final)):
            fs.rename(os.path.join(path, claim), os.path.join(path, ready))
        raise
    fs.unlink(os.path.join(path, claim))
    return True


def _finish(fs: FS, directory: str, path: str, assigned: Manifest) -> None:
    assert assigned.places is not None
    for (topic, partition), files in assigned.partitions().items():
        target = os.path.join(directory, partition_name(topic, partition))
        check_directory(fs, target)
        _check_unchanged(fs, path, target, files, assigned.places[topic, partition])
    _place_all(fs, directory, path, assigned)
    # Like the assigned manifest, this file limits readers in other processes. They see
    # the records once both permit it.
    for (topic, partition), files in assigned.partitions().items():
        name = os.path.join(
            directory, partition_name(topic, partition), checkpoint.DURABLE_END
        )
        end = assigned.places[topic, partition].base + sum(file.count for file in files)
        with (
            contextlib.suppress(FileNotFoundError),
            opened(fs, name, write=True) as handle,
        ):
            fs.pwrite(handle, checkpoint.pack_visible_end(end), 0)
            fs.fsync(handle)
    write_state(fs, path, assigned)


def _check_unchanged(
    fs: FS, path: str, target: str, files: Sequence[StagedFile], place: StagedTarget
) -> None:
    """Raise CorruptLogError if another program appended after offsets were assigned.

    An example is a Kafka broker that was started after the crash.
    """
    made = units(files)
    ends = list(
        itertools.accumulate(
            (sum(file.count for file in unit) for unit in made), initial=0
        )
    )
    ours = {place.base + before for before in ends}
    bases = list_bases(fs, target)
    # Paths of segments with records of another program.
    foreign: list[str] = []
    for base in bases:
        name = os.path.join(target, file_name(base, LOG))
        if place.segment is not None:
            # Staged records go into the active segment, and another program has begun a
            # later one.
            is_foreign = base > place.segment
        elif base >= place.base:
            is_foreign = base not in ours and fs.file_size(name) > 0
        else:
            # Another program may have appended to the segment before the staged ones.
            last_before = max(base for base in bases if base < place.base)
            is_foreign = base == last_before and _end_of(fs, target, base) > place.base
        if is_foreign:
            foreign.append(name)
    if place.segment is None:
        # A placed segment that is not the last must be as it was staged. Otherwise its
        # offsets would continue into the next.
        names = [
            os.path.join(target, file_name(place.base + before, LOG)) for before in ends
        ]
        sizes = [sum(file.size_bytes for file in unit) for unit in made]
        waiting = [
            _is_waiting(fs, path, unit, name)
            for unit, name in zip(made, names, strict=False)
        ]
        for number, name in enumerate(names[:-1]):
            is_in_place = (
                not waiting[number] and any(waiting[number:]) and fs.exists(name)
            )
            if is_in_place and fs.file_size(name) != sizes[number]:
                foreign.append(name)
    if foreign:
        raise CorruptLogError(
            "another program appended while a write from Spark was half in place",
            path=foreign[0],
            offset=place.base,
        )


def _is_waiting(fs: FS, path: str, unit: Sequence[StagedFile], final: str) -> bool:
    """Return whether a unit is not in place yet.

    The file of carried pieces remains until all of them are.
    """
    if unit[0].position is None:
        return fs.exists(os.path.join(path, unit[0].name + LOG))
    return not fs.exists(final) or fs.file_size(final) < sum(
        file.size_bytes for file in unit
    )


def _end_of(fs: FS, target: str, base: int) -> int:
    segment: Segment = GrowingSegment(fs, target, base)
    return segment.next_offset()


def _place_all(
    fs: FS, directory: str, path: str, assigned: Manifest
) -> dict[tuple[str, int], list[int]]:
    """Move or append all staged files.

    Returns (topic, partition) -> base offsets of the new segments.
    """
    assert assigned.places is not None
    placed = {}
    for (topic, partition), files in assigned.partitions().items():
        place = assigned.places[topic, partition]
        target = os.path.join(directory, partition_name(topic, partition))
        if place.segment is None:
            placed[topic, partition] = _make_segments(fs, path, target, files, place)
            fs.sync_dir(target)
        else:
            assert place.position is not None
            final = os.path.join(target, file_name(place.segment, LOG))
            _append(fs, path, final, files, place)
            placed[topic, partition] = []
    return placed


def _make_segments(
    fs: FS, path: str, target: str, files: Sequence[StagedFile], place: StagedTarget
) -> list[int]:
    """Place files after the log's end as separate segments; return their base offsets."""
    bases = []
    base = place.base
    for unit in units(files):
        if unit[0].position is None:
            _move(fs, path, target, unit[0], base, place.leader_epoch)
        else:
            final = os.path.join(target, file_name(base, LOG))
            _append(fs, path, final, unit, attrs.evolve(place, position=0, base=base))
        bases.append(base)
        base += sum(file.count for file in unit)
    return bases


def _move(
    fs: FS, path: str, target: str, file: StagedFile, base: int, leader_epoch: int
) -> None:
    source = os.path.join(path, file.name)
    final = os.path.join(target, file_name(base, LOG))
    if fs.exists(source + LOG):
        if (
            fs.exists(final)
            and fs.file_size(final)
            and not _same_batches(fs, source + LOG, final)
        ):
            raise CorruptLogError(
                "another program appended where staged records belong", path=final
            )
        _stamp(fs, source + LOG, file, base, leader_epoch)
        for suffix in (INDEX, TIME_INDEX):
            with contextlib.suppress(FileNotFoundError):
                fs.rename(
                    source + suffix, os.path.join(target, file_name(base, suffix))
                )
        fs.rename(source + LOG, final)
    elif not fs.exists(final) or fs.file_size(final) < file.size_bytes:
        raise CorruptLogError(
            "a staged segment is missing, and was not published", path=source + LOG
        )


def _append(
    fs: FS, path: str, final: str, files: Sequence[StagedFile], place: StagedTarget
) -> None:
    """Write files into a segment at the assigned position, with offsets from place.base
    on.

    The position was the size of the segment when it was chosen.
    """
    assert place.position is not None
    position = place.position
    base = place.base
    stamped = []
    for file in files:
        data = bytearray(_read(fs, os.path.join(path, file.name + LOG), file))
        for at, head in _stamps(data, file, base, place.leader_epoch):
            data[at : at + len(head)] = head
        stamped.append(data)
        base += file.count
    ours = b"".join(stamped)
    with opened(fs, final, write=True, create=position == 0) as handle:
        size = fs.size(handle)
        if size < position:
            raise CorruptLogError(
                "the segment is shorter than it was",
                path=final,
                expected=position,
                found=size,
            )
        if size > position:
            found = fs.pread(handle, size - position, position)
            if not found.startswith(ours):
                # These bytes must be staged records, complete or torn by a crash, and
                # not another program's batch.
                _, end, _ = kernel.walk(found, 0, len(found), layout.INT32_MAX, True)
                if found[:end] != ours[:end]:
                    raise CorruptLogError(
                        "another program appended where staged records belong",
                        path=final,
                        position=position,
                    )
                fs.truncate(handle, position)
        # Written even if the bytes are there. After a failed sync they may be only in
        # the page cache, in pages marked clean, so that another sync would succeed
        # without writing them.
        fs.pwrite(handle, ours, position)
        fs.fsync(handle)


def _stamp(fs: FS, name: str, file: StagedFile, base: int, leader_epoch: int) -> None:
    """Write the real offsets into the batch heads of a staged segment, durably.

    The length between offset and epoch is not written. A crash may replace a write by
    zeros, and without lengths no reader would find the next head. Correct heads are
    written again, because after a failed sync they may be only in the page cache.
    """
    with opened(fs, name, write=True) as handle:
        view = fs.map(handle, fs.size(handle))
        for position, head in _stamps(view, file, base, leader_epoch):
            for start, stop in ((0, 8), (12, 16)):
                fs.pwrite(handle, head[start:stop], position + start)
        fs.fsync(handle)


def _stamps(
    data: memoryview | bytearray, file: StagedFile, base: int, leader_epoch: int
) -> Generator[tuple[int, bytes], None, None]:
    """Yield the position and new head of each batch.

    Offsets follow from the number of earlier records, not from the present heads.
    """
    at = 0
    count = 0
    batches = 0
    while at < len(data):
        facts, stop, _ = kernel.walk(data, at, len(data), _WALK_BATCHES, False)
        if not len(facts):
            break
        spans = (facts["last_offset"] - facts["base_offset"] + 1).tolist()
        for position, size, span in zip(
            facts["position"].tolist(), facts["size_bytes"].tolist(), spans, strict=True
        ):
            yield (
                position,
                _STAMP.pack(base + count, size - layout.LOG_OVERHEAD, leader_epoch),
            )
            count += span
        batches += len(facts)
        at = stop
    if (at, count, batches) != (file.size_bytes, file.count, file.batches):
        raise CorruptLogError(
            "a staged segment differs from the one that its task wrote",
            path=file.name,
            position=at,
            expected=f"{file.batches} batches of {file.count} records in {file.size_bytes} bytes",
            found=f"{batches} of {count} in {at}",
        )


def _same_batches(fs: FS, first: str, other: str) -> bool:
    """Return whether two segments differ at most in their offsets.

    A power failure during a rename can leave such a pair.
    """
    crcs = []
    for name in (first, other):
        with opened(fs, name) as handle:
            size = fs.size(handle)
            if size:
                view = fs.map(handle, size)
            else:
                view = memoryview(b"")
            facts, end, _ = kernel.walk(view, 0, size, layout.INT32_MAX, False)
            crcs.append((size, end, facts["crc"].tolist()))
    return crcs[0] == crcs[1]


def _read(fs: FS, name: str, file: StagedFile) -> bytes:
    try:
        with opened(fs, name) as handle:
            return fs.pread(handle, file.size_bytes, file.position or 0)
    # Only the partitions that wait for it are blocked, not the directory.
    except FileNotFoundError as error:
        raise CorruptLogError("a staged segment is missing", path=name) from error


def _clear(fs: FS, path: str, manifest: Manifest, suffix: str) -> None:
    """Remove a completed manifest and its files.

    If a power failure restores its name, the state marks it as done, and its files are
    not needed.
    """
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(
            os.path.join(path, manifest_name(manifest.app_id, manifest.version, suffix))
        )
    remove_tree(fs, os.path.join(path, manifest.txid))
