"""The topic `__consumer_offsets`: what groups have committed and how they stand, as Kafka's records.

Layout (storage format section 12.1): the key begins with its version and names a group (2), or a group, topic and
partition (0, 1); the value begins with its version too; a null value takes back what was said under its key.

Rules:
- Records are byte for byte what Kafka writes: keys of versions 1 and 2, values of version 3 (1 with an expiry).
- Of what is read, the last value of a key counts. What has a version that is not known is passed over and stays.
- Whoever appends is told once the records are on disk, in the order of the log, so that memory never tells of what a
  crash could take back, and an earlier value never covers a later one.

Not here: what the records mean for a group (groups.py). Transactional commits of other writers are read, none is made.
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from logcore import Log, LogcoreError, Receipt, RecordTooLargeError, TopicExistsError
from netshim import wire
from netshim.state import State
from netshim.wire import codes

_log = logging.getLogger("netshim")

OFFSETS_TOPIC: Final = "__consumer_offsets"
#: How the topic is made.
OFFSETS_CONFIG: Final = {"cleanup.policy": "compact", "segment.bytes": 104_857_600, "compression.type": "producer"}
_COMMITTED: Final = 1  # type of the control record that commits a transaction
_SHORT: Final = struct.Struct(">h")
_UNIT: Final = struct.Struct(">H")
_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")
_OFFSET_HEAD: Final = struct.Struct(">hq")
_EPOCH_HEAD: Final = struct.Struct(">hqi")
#: Where a commit's metadata begins, by the version of the value.
_HEADS: Final = {0: _OFFSET_HEAD, 1: _OFFSET_HEAD, 2: _OFFSET_HEAD, 3: _EPOCH_HEAD}

Record = tuple[bytes, bytes | None]


class Committed(NamedTuple):
    """One committed offset. expire_ms: -1, or the time that the committer asked for."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_ms: int
    expire_ms: int = -1


def partition_of(group_id: str, partition_count: int) -> int:
    """Which partition holds a group: |String.hashCode of Java| modulo their number, where |-2^31| is 0."""
    value = 0
    for (unit,) in _UNIT.iter_unpack(group_id.encode("utf-16-be", "surrogatepass")):
        value = (31 * value + unit) & 0xFFFFFFFF
    if value >= 1 << 31:
        value = (1 << 32) - value
    return 0 if value == 1 << 31 else value % partition_count


def commit_key(group_id: str, topic: str, partition: int) -> bytes:
    return wire.encode_versioned(
        wire.OFFSET_COMMIT_KEY, 1, wire.OFFSET_COMMIT_KEY.Value(group=group_id, topic=topic, partition=partition)
    )


def commit_value(committed: Committed) -> bytes:
    value = wire.OFFSET_COMMIT_VALUE.Value(
        offset=committed.offset,
        leader_epoch=committed.leader_epoch,
        metadata=committed.metadata,
        commit_timestamp=committed.commit_ms,
        expire_timestamp=committed.expire_ms,
    )
    return wire.encode_versioned(wire.OFFSET_COMMIT_VALUE, 3 if committed.expire_ms < 0 else 1, value)


def group_key(group_id: str) -> bytes:
    return wire.encode_versioned(wire.GROUP_METADATA_KEY, 2, wire.GROUP_METADATA_KEY.Value(group=group_id))


def group_value(value: Any) -> bytes:
    """value: of wire.GROUP_METADATA_VALUE."""
    return wire.encode_versioned(wire.GROUP_METADATA_VALUE, 3, value)


def _read_text(data: bytes, at: int) -> tuple[str, int]:
    (size,) = _SHORT.unpack_from(data, at)
    stop = at + 2 + size
    if size < 0 or stop > len(data):
        raise ValueError(f"a text of {size} bytes at {at} of {len(data)}")
    return str(data[at + 2 : stop], "utf-8"), stop


def _read_commit(value: bytes) -> Committed:
    """A commit in one of the old layouts by hand, which a million of them need, or any by the table of messages."""
    (version,) = _SHORT.unpack_from(value)
    head = _HEADS.get(version)
    if head is not None:
        _, offset, *epoch = head.unpack_from(value)
        metadata, at = _read_text(value, head.size)
        (commit_ms,) = _LONG.unpack_from(value, at)
        expire_ms = _LONG.unpack_from(value, at + 8)[0] if version == 1 else -1
        return Committed(offset, epoch[0] if epoch else -1, metadata, commit_ms, expire_ms)
    _, known = wire.decode_versioned(wire.OFFSET_COMMIT_VALUE, value)
    return Committed(known.offset, known.leader_epoch, known.metadata, known.commit_timestamp)


class Loaded:
    """What a reading of the topic found. offsets: group -> topic -> partition. groups: group -> its last metadata."""

    def __init__(self) -> None:
        self.offsets: dict[str, dict[str, dict[int, Committed]]] = {}
        self.groups: dict[str, Any] = {}

    def take(self, latest: dict[bytes, bytes | None]) -> None:
        unread = 0
        # Keys of version 0 mean the same as those of version 1, and are older.
        oldest = {key: latest.pop(key) for key in [key for key in latest if key.startswith(b"\0\0")]}
        for key, value in itertools.chain(oldest.items(), latest.items()):
            try:
                version = key[:2]
                if version in (b"\0\0", b"\0\1"):
                    self._take_commit(key, value)
                elif version == b"\0\2" and value is not None:
                    self.groups[_read_text(key, 2)[0]] = wire.decode_versioned(wire.GROUP_METADATA_VALUE, value)[1]
            except (wire.ProtocolError, ValueError, struct.error):
                unread += 1
        if unread:
            _log.warning("%s: %d records are not understood and left as they are", OFFSETS_TOPIC, unread)

    def _take_commit(self, key: bytes, value: bytes | None) -> None:
        group_id, at = _read_text(key, 2)
        topic, at = _read_text(key, at)
        (partition,) = _INT.unpack_from(key, at)
        if value is not None:
            committed = _read_commit(value)
            self.offsets.setdefault(group_id, {}).setdefault(topic, {})[partition] = committed
        elif partition in self.offsets.get(group_id, {}).get(topic, {}):
            del self.offsets[group_id][topic][partition]


def _latest_of(log: Log) -> dict[bytes, bytes | None]:
    """The last value of each key. What a transaction wrote counts once that is committed."""
    latest: dict[bytes, bytes | None] = {}
    start, end = log.log_start_offset, log.high_watermark
    if log.last_stable_offset == end and not log.aborted_transactions(start, end):
        for columns in log.scan(start, end):
            latest.update(zip(columns.keys(), columns.values()))  # type: ignore[arg-type]
    else:
        places: dict[bytes, int] = {}
        undecided: dict[int, list[tuple[int, bytes, bytes | None]]] = {}

        def take(rows: Iterable[tuple[int, bytes, bytes | None]]) -> None:
            for offset, key, value in rows:
                if places.get(key, -1) < offset:  # a commit counts from where it stands, not from its marker
                    places[key], latest[key] = offset, value

        for batch in log.batches(start, end):
            if batch.is_control:
                rows = undecided.pop(batch.producer_id, [])
                control = batch.records()
                if control and control[0].key is not None and int.from_bytes(control[0].key[2:4], "big") == _COMMITTED:
                    take(rows)
                continue
            rows = [(record.offset, record.key, record.value) for record in batch.records() if record.key is not None]
            if batch.is_transactional:
                undecided.setdefault(batch.producer_id, []).extend(rows)
            else:
                take(rows)
    latest.pop(None, None)  # type: ignore[call-overload]
    return latest


class OffsetsTopic:
    """The topic as a place to write to and to read from. It is made when something is first to be written."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._unsynced: dict[Log, deque[tuple[int, Callable[[int], None]]]] = {}

    @property
    def exists(self) -> bool:
        return OFFSETS_TOPIC in self._state.logdir

    def read(self) -> Loaded:
        """All that the topic says now. May take long; may be called in any thread. Raises LogcoreError."""
        loaded = Loaded()
        if self.exists:
            for number in self._state.logdir.partitions(OFFSETS_TOPIC):
                loaded.take(_latest_of(self._state.open(OFFSETS_TOPIC, number)))
        return loaded

    def append(self, group_id: str, records: list[Record], now_ms: int, done: Callable[[int], None]) -> None:
        """Calls done(0) once the records are on disk, or done(code) when they are not; for one log in its order."""
        state = self._state
        rows = [(key, value, (), now_ms) for key, value in records]

        def write() -> tuple[Log, int, Receipt]:
            if not self.exists:
                self._create()
            number = self._partition_of(group_id)
            log = state.open(OFFSETS_TOPIC, number)
            return log, number, log.append_many(rows, durability="os")

        def may_wait() -> bool:
            log = state.logdir.opened(OFFSETS_TOPIC, self._partition_of(group_id)) if self.exists else None
            size_bytes = sum(len(key) + len(value or b"") + 32 for key, value in records)
            return log is None or log.has_failed or log.may_wait(size_bytes, now_ms, has_producer=False)

        def written(result: Any) -> None:
            if isinstance(result, Exception):
                done(_code_of(group_id, result))
                return
            log, number, receipt = result
            end = receipt.last_offset + 1
            self._unsynced.setdefault(log, deque()).append((end, done))
            state.appended(OFFSETS_TOPIC, number, log, end, now_ms)
            state.syncs.when_durable(log, end, lambda error: self._settle(group_id, log, end, error))

        if state.has_turns(OFFSETS_TOPIC) or may_wait():
            state.in_turn(OFFSETS_TOPIC, write, written)
            return
        try:
            result: Any = write()
        except (LogcoreError, OSError) as error:
            result = error
        written(result)

    def _partition_of(self, group_id: str) -> int:
        return partition_of(group_id, self._state.logdir.partitions(OFFSETS_TOPIC)[-1] + 1)

    def _create(self) -> None:
        try:
            self._state.logdir.create_topic(OFFSETS_TOPIC, self._state.settings.offsets_partitions, OFFSETS_CONFIG)
        except TopicExistsError:  # a client made it meanwhile
            pass

    def _settle(self, group_id: str, log: Log, end: int, error: LogcoreError | None) -> None:
        """Tells all who wrote below end: a sync may be noticed by a later writer first."""
        code = codes.NONE if error is None else _code_of(group_id, error)
        waiting = self._unsynced.get(log)
        while waiting and waiting[0][0] <= end:
            waiting.popleft()[1](code)
        if not waiting:
            self._unsynced.pop(log, None)


def _code_of(group_id: str, error: Exception) -> int:
    """What clients take for a reason to try again, except for records that will never fit."""
    _log.error("%s: a record of group %r was not stored: %s", OFFSETS_TOPIC, group_id, error)
    if isinstance(error, RecordTooLargeError):
        return codes.INVALID_COMMIT_OFFSET_SIZE
    return codes.COORDINATOR_NOT_AVAILABLE
