"""Takes snapshots of a log directory while any process writes it.

Rules:
- A snapshot contains every record that was acknowledged before it began. Only the files
  of the directory are read, so no lock is acquired and no writer waits.
- Committed offsets are copied before the topics. So each committed offset is within the
  copy of its partition.
- The copies of all partitions end at the same point between transactions; see
  transaction_cut.py.
- Parts of an earlier snapshot are used again if the file is the same, or if the bytes
  are the same.

store.py stores the parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import attrs

from logcore.backup import manifest as manifests
from logcore.backup.catalog import newest, prune, snapshot_ids
from logcore.backup.manifest import (
    FileIdentity,
    SnapshotManifest,
    StoredPart,
    StoredPartition,
    StoredSegment,
)
from logcore.backup.store import CHUNK_BYTES, Store
from logcore.backup.transaction_cut import TransactionCut, first_after
from logcore.directory.copying import (
    ChooseEnd,
    CopyPlan,
    check_current,
    planned_copy,
)
from logcore.directory.interface import PartitionDirectory
from logcore.directory.topic_file import TopicEntry
from logcore.errors import (
    CompactionAbandonedError,
    InvalidConfigError,
    LogNotFoundError,
    NodeNotFoundError,
    TopicNotFoundError,
)
from logcore.fs import FS, SharedFS, opened
from logcore.kernels.checksum import crc32c
from logcore.kernels.layout import Buffer
from logcore.log import Log
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import (
    LOG,
    OFFSETS_TOPIC,
    TRANSACTIONS_TOPIC,
    parse_partition_name,
    partition_name,
)
from logcore.registry import Registry, open_registry, registry_path
from logcore.registry.files import Layout
from logcore.registry.protocol import node_names
from logcore.segment import Segment

#: Attempts to copy a log that is compacted or truncated during the copy.
_ATTEMPTS: Final = 20
#: A segment that has this many parts is stored again as one part, so that a restore reads
#: few objects.
_MAX_PARTS: Final = 32
#: Attempts to read a clock that may not advance, as on a simulated disk.
_CLOCK_READS: Final = 10_000
#: The topics of coordinators. Their copies contain the records up to the snapshot's time.
_COORDINATED: Final = (OFFSETS_TOPIC, TRANSACTIONS_TOPIC)


class SnapshotSource(PartitionDirectory, Protocol):
    """A directory to copy."""

    @property
    def cluster_id(self) -> str: ...
    @property
    def is_read_only(self) -> bool: ...
    def refresh(self) -> None: ...


@attrs.frozen
class SnapshotResult:
    """A snapshot that was stored."""

    #: The id, for restore().
    id: str
    #: When the snapshot began. It contains all records acknowledged before that time.
    time_ms: int
    #: The number of partitions.
    partitions: int
    #: The size of their records.
    size_bytes: int
    #: The number of bytes stored for this snapshot. Earlier snapshots stored the rest.
    stored_bytes: int
    #: The number of bytes in segments that are stored as hard links.
    linked_bytes: int


Tick = Callable[[int], object]


class _Snapshot:
    """One snapshot while it is taken."""

    def __init__(
        self, fs: FS, directory: SnapshotSource, store: Store, tick: Tick
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._store = store
        self._tick = tick
        self.stored_bytes = 0
        self.linked_bytes = 0
        self.previous = newest(store)
        cluster_id = directory.cluster_id
        if self.previous is not None and self.previous.cluster_id != cluster_id:
            raise InvalidConfigError(
                "the backup belongs to another log directory; choose another place",
                path=store.location,
                expected=f"cluster id {cluster_id}",
                found=f"cluster id {self.previous.cluster_id}",
            )
        self.time_ms = fs.now_ms()
        if TRANSACTIONS_TOPIC in directory:
            self._wait_for_next_ms()
        id_ms = self.time_ms
        if self.previous is not None:
            # The clock may have been set back. The new id must still be the greatest.
            id_ms = max(id_ms, manifests.id_time_ms(self.previous.id) + 1)
        self.id = manifests.new_id(id_ms, fs.random_bytes(4))

    def _wait_for_next_ms(self) -> None:
        """Wait until the clock advances, so that later batches have a later time.

        Without the wait, TransactionCut.refresh() would often fail.
        """
        for _ in range(_CLOCK_READS):
            if self._fs.now_ms() > self.time_ms:
                return
            self._fs.yield_thread()

    def take(self, topics: Sequence[TopicEntry]) -> SnapshotManifest:
        """Store all parts, and return the manifest."""
        nodes = _registry_nodes(self._fs, self._directory.path)
        self._cut = self._transaction_cut()
        partitions: dict[str, StoredPartition] = {}
        kept = []
        for topic in sorted(
            topics, key=lambda topic: (topic.name not in _COORDINATED, topic.name)
        ):
            try:
                for number in topic.numbers:
                    name = partition_name(topic.name, number)
                    partitions[name] = self._store_partition(topic.name, number)
            except (LogNotFoundError, TopicNotFoundError):
                self._directory.refresh()
                if topic.name in self._directory:
                    raise
                # The topic was deleted during the snapshot.
                for number in topic.numbers:
                    partitions.pop(partition_name(topic.name, number), None)
                continue
            kept.append(topic)
        self._cut.refresh()
        return SnapshotManifest(
            self.id,
            self.time_ms,
            self._directory.cluster_id,
            tuple(kept),
            partitions,
            self._small_files(),
            nodes,
        )

    def _transaction_cut(self) -> TransactionCut:
        directory = self._directory
        logs: list[Log] = []
        if TRANSACTIONS_TOPIC in directory:
            logs = [
                directory.partition(TRANSACTIONS_TOPIC, number)
                for number in directory.partitions(TRANSACTIONS_TOPIC)
            ]
        return TransactionCut(logs, self.time_ms)

    def _choose_end(self, log: Log, partition: Key) -> ChooseEnd:
        """Return a function that chooses the end of a partition's copy."""
        topic, _ = partition

        def choose(segments: Sequence[Segment], end: int) -> int:
            if topic == OFFSETS_TOPIC:
                # So each committed offset is within the copy of its partition.
                return first_after(segments, end, self.time_ms)
            if topic == TRANSACTIONS_TOPIC:
                return self._cut.end_of_states(log, end)
            return self._cut.choose(partition, segments, end)

        return choose

    def _small_files(self) -> dict[str, bytes]:
        """Return the files of the directory.

        The files are read last, so that the allocated producer ids include all producer
        ids in the copied logs.
        """
        found = {
            name: checkpoint.read(self._fs, self._directory.path, name)
            for name in manifests.DIRECTORY_FILES
        }
        return {name: content for name, content in found.items() if content is not None}

    def _store_partition(self, topic: str, number: int) -> StoredPartition:
        directory = self._directory
        was_open = directory.host.opened(topic, number) is not None
        log = directory.partition(topic, number)
        try:
            for attempt in range(_ATTEMPTS):
                try:
                    return self._store_log(log)
                except CompactionAbandonedError:
                    if attempt == _ATTEMPTS - 1:
                        raise
        finally:
            # Each open log has a file handle, and a directory may have 10,000 logs.
            if directory.is_read_only and not was_open:
                log.close()
        raise AssertionError("the last attempt returns or raises")

    def _store_log(self, log: Log) -> StoredPartition:
        name = os.path.basename(log.path)
        choose_end = self._choose_end(log, parse_partition_name(name))
        previous_segments: dict[int, StoredSegment] = {}
        if self.previous is not None and self._is_same_topic(log, name):
            previous_segments = {
                segment.base_offset: segment
                for segment in self.previous.partitions[name].segments
            }
        with planned_copy(log, choose_end=choose_end) as plan:
            segments = [
                self._store_sealed(name, segment, previous_segments)
                for segment in plan.sealed
            ]
            segments.append(self._store_growing(name, plan, previous_segments))
            files = dict(plan.files)
            content = checkpoint.read(self._fs, log.path, checkpoint.PARTITION_METADATA)
            if content is not None:
                files[checkpoint.PARTITION_METADATA] = content
        return StoredPartition(plan.log_start, plan.end, tuple(segments), files)

    def _is_same_topic(self, log: Log, name: str) -> bool:
        """Return whether the previous snapshot has the partition, with the same topic id."""
        assert self.previous is not None
        stored = self.previous.partitions.get(name)
        if stored is None:
            return False
        current = checkpoint.read(self._fs, log.path, checkpoint.PARTITION_METADATA)
        return stored.files.get(checkpoint.PARTITION_METADATA) == current

    def _store_sealed(
        self,
        partition: str,
        segment: Segment,
        previous_segments: Mapping[int, StoredSegment],
    ) -> StoredSegment:
        """Store a segment that never changes, unless it is stored already."""
        fs = self._fs
        path = segment.file(LOG)
        try:
            size = fs.file_size(path)
            identity = FileIdentity(fs.identity(path)[1], size, fs.modified_ms(path))
            previous_segment = previous_segments.get(segment.base_offset)
            if previous_segment is not None and previous_segment.identity == identity:
                stored = previous_segment
                self._tick(size)
            else:
                stored = self._store_segment(partition, segment, size, previous_segment)
            check_current(segment)
        except FileNotFoundError:
            raise CompactionAbandonedError(
                "a segment was removed during the copy; copy the log again", path=path
            ) from None
        return attrs.evolve(stored, identity=identity)

    def _store_segment(
        self,
        partition: str,
        segment: Segment,
        size: int,
        previous_segment: StoredSegment | None,
    ) -> StoredSegment:
        name = manifests.part_name(partition, segment.base_offset, self.id, 0)
        with opened(self._fs, segment.file(LOG)) as handle:
            if self._store.link(segment.file(LOG), name):
                crc = 0
                for chunk in self._chunks(handle, segment.path, 0, size):
                    crc = crc32c(chunk, crc)
                self.linked_bytes += size
                return StoredSegment(
                    segment.base_offset, (StoredPart(name, size, crc),)
                )
            return self._store_in_parts(
                partition, segment, handle, size, b"", previous_segment
            )

    def _store_growing(
        self,
        partition: str,
        plan: CopyPlan,
        previous_segments: Mapping[int, StoredSegment],
    ) -> StoredSegment:
        segment = plan.growing
        if segment is None:
            return StoredSegment(plan.end, ())
        previous_segment = previous_segments.get(segment.base_offset)
        try:
            with opened(self._fs, segment.file(LOG)) as handle:
                check_current(segment)
                return self._store_in_parts(
                    partition,
                    segment,
                    handle,
                    plan.position,
                    plan.tail,
                    previous_segment,
                )
        except FileNotFoundError:
            raise CompactionAbandonedError(
                "a segment was removed during the copy; copy the log again",
                path=segment.path,
            ) from None

    def _store_in_parts(
        self,
        partition: str,
        segment: Segment,
        handle: int,
        size: int,
        tail: bytes,
        previous_segment: StoredSegment | None,
    ) -> StoredSegment:
        """Store the bytes below `size`, and `tail`, after the unchanged parts."""
        parts: list[StoredPart] = []
        position = 0
        if previous_segment is not None and len(previous_segment.parts) < _MAX_PARTS:
            for part in previous_segment.parts:
                if position + part.size_bytes > size:
                    break
                crc = 0
                for chunk in self._chunks(
                    handle, segment.path, position, position + part.size_bytes
                ):
                    crc = crc32c(chunk, crc)
                if crc != part.crc32c:
                    break
                parts.append(part)
                position += part.size_bytes
        if position < size or tail:
            parts.append(self._put(partition, segment, handle, position, size, tail))
        return StoredSegment(segment.base_offset, tuple(parts))

    def _put(
        self,
        partition: str,
        segment: Segment,
        handle: int,
        start: int,
        stop: int,
        tail: bytes,
    ) -> StoredPart:
        name = manifests.part_name(partition, segment.base_offset, self.id, start)
        crc = 0

        def chunks() -> Iterator[Buffer]:
            nonlocal crc
            for chunk in self._chunks(handle, segment.path, start, stop):
                crc = crc32c(chunk, crc)
                yield chunk
            if tail:
                crc = crc32c(tail, crc)
                yield tail

        self._store.put(name, chunks())
        size = stop - start + len(tail)
        self.stored_bytes += size
        return StoredPart(name, size, crc)

    def _chunks(self, handle: int, path: str, start: int, stop: int) -> Iterator[bytes]:
        while start < stop:
            chunk = self._fs.pread(handle, min(CHUNK_BYTES, stop - start), start)
            if not chunk:
                raise CompactionAbandonedError(
                    "the file became shorter during the copy; copy the log again",
                    path=path,
                )
            start += len(chunk)
            self._tick(len(chunk))
            yield chunk


def take_snapshot(
    fs: FS,
    directory: SnapshotSource,
    topics: Sequence[TopicEntry],
    store: Store,
    *,
    keep: int | None = None,
    tick: Tick | None = None,
) -> SnapshotResult:
    """Store a snapshot of a directory; see LogDir.snapshot()."""
    if keep is not None and keep < 1:
        raise InvalidConfigError(
            "number of snapshots to keep", expected="at least 1", found=keep
        )
    attempt = 1
    while True:
        snapshot = _Snapshot(fs, directory, store, tick or (lambda _: None))
        try:
            manifest = snapshot.take(topics)
        except CompactionAbandonedError:
            if attempt == _ATTEMPTS:
                raise
            attempt += 1
        else:
            break
    store.put(manifests.manifest_name(manifest.id), [manifests.pack(manifest)])
    if snapshot.previous is not None and snapshot.previous.id not in snapshot_ids(
        store
    ):
        # prune() in the other process may have deleted parts that this snapshot uses.
        store.delete(manifests.manifest_name(manifest.id))
        raise CompactionAbandonedError(
            "the previous snapshot was deleted by another process; take the snapshot again",
            path=store.location,
        )
    if keep is not None:
        prune(store, keep, fs.now_ms())
    return SnapshotResult(
        manifest.id,
        manifest.time_ms,
        len(manifest.partitions),
        manifest.size_bytes,
        snapshot.stored_bytes,
        snapshot.linked_bytes,
    )


def _registry_nodes(fs: FS, path: str) -> dict[str, bytes]:
    """Return the persistent nodes of the directory's registry, if there is one.

    Nodes that are never synced are left out: a power cut may remove them from the
    original directory too.
    """
    if not fs.is_directory(registry_path(path)):
        return {}
    found: dict[str, bytes] = {}
    shared: SharedFS = fs  # type: ignore[assignment]  # other file systems have no registry
    with open_registry(path, read_only=True, fs=shared) as registry:
        _add_nodes(registry, "/", found)
    return found


def _add_nodes(registry: Registry, path: str, found: dict[str, bytes]) -> None:
    layout = Layout()
    for name in registry.children(path):
        inside = f"{path.rstrip('/')}/{name}"
        try:
            node = registry.get(inside)
            if node.session is None and not layout.is_never_synced(node_names(inside)):
                found[inside] = node.value
        except NodeNotFoundError:
            # The node has children but no value, or it was just deleted.
            pass
        _add_nodes(registry, inside, found)
