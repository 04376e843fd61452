"""Reads concurrent with a writer, tested without threads: the writer acts at each point
at which it can affect a read, one point at a time.

A read uses a few shared fields, such as the segments and the high watermark. Between
any two accesses a writer may append, roll, delete or compact. Here the writer acts at
the n-th access of one field, for each field and each n until a read has no n-th access.
The read must return the log as of one moment during the read, and no record above its
end offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import logcore
from logcore.log import Log
from logcore.partition.state import PartitionState
from logcore.reader import aborted_transactions
from logcore.recordbatch import encode, read_batches
from logcore.testing import FaultPlan, SimulatedDisk

T0 = 1_700_000_000_000
FIELDS = ("segments", "visible", "end", "log_start", "transactions")
ABORTED = b"aborted"
CONFIG = {"cleanup.policy": "compact", "file.delete.delay.ms": 0}


class AccessHook:
    """Counts the accesses of one field of a PartitionState, and lets a writer act at
    one of them.
    """

    def __init__(self, field: str, at: int, action: Callable[[], None]) -> None:
        self.field = field
        self.at = at
        self.action = action
        self.count = -1  # not counting yet
        self.values: dict[int, Any] = {}

    def __get__(self, state: Any, owner: type) -> Any:
        if self.count >= 0:
            self.count += 1
            if self.count == self.at:
                value = self.values[id(state)]
                self.count = -1
                self.action()
                return value  # the value from before the action
        return self.values[id(state)]

    def __set__(self, state: Any, value: Any) -> None:
        self.values[id(state)] = value


def write(log: Log, number: int, *, commit: bool | None) -> None:
    """Write a transaction of one record, and leave it open if `commit` is None."""
    value = ABORTED if commit is not True else b"committed"
    rows = [(b"k%d" % number, value, (), T0 + number)]
    batch = encode(
        rows,
        producer_id=number,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
        now_ms=T0,
    )
    log.append_batch(batch)
    if commit is not None:
        log.end_transaction(number, 0, commit=commit)


def append_aborted(log: Log) -> None:
    write(log, 90, commit=False)


def append_open(log: Log) -> None:
    write(log, 91, commit=None)


def append_after_a_roll(log: Log) -> None:
    log.roll()
    write(log, 92, commit=False)
    log.roll()
    log.append(b"plain", key=b"p", timestamp_ms=T0)


def delete_from_the_front(log: Log) -> None:
    log.roll()
    log.delete_records(4)
    log.tick(T0)


def compact(log: Log) -> None:
    log.roll()
    logcore.clean(log, force=True)
    log.tick(T0)


ACTIONS = [
    append_aborted,
    append_open,
    append_after_a_roll,
    delete_from_the_front,
    compact,
]


def read(log: Log) -> list[tuple[int, bytes | None]]:
    return [(record.offset, record.value) for record in log.read(0)]


def read_committed(log: Log) -> list[tuple[int, bytes | None]]:
    return [
        (record.offset, record.value)
        for record in log.read(0, isolation="read_committed")
    ]


def scan_committed(log: Log) -> list[tuple[int, bytes | None]]:
    scan = log.scan(0, isolation="read_committed")
    return [
        (record.offset, record.value)
        for columns in scan
        for record in columns.records()
    ]


def fetch(log: Log) -> list[tuple[int, bytes | None]]:
    fetched = b"".join(log.stored(0, max_bytes=1 << 20))
    data = [batch for batch in read_batches(fetched) if not batch.is_control]
    return [
        (record.offset, record.value) for batch in data for record in batch.records()
    ]


def fetch_committed(log: Log) -> list[tuple[int, bytes | None]]:
    """Read as a broker does for a read_committed consumer: first the last stable
    offset, then the bytes, then the aborted transactions.
    """
    stable_offset = log.last_stable_offset
    fetched = b"".join(log.stored(0, stable_offset, max_bytes=1 << 20))
    aborted = aborted_transactions(log, 0, stable_offset)
    rows = []
    for batch in read_batches(fetched):
        is_aborted = any(
            batch.producer_id == producer_id and batch.base_offset >= first
            for producer_id, first in aborted
        )
        if not is_aborted and not batch.is_control:
            rows += [(record.offset, record.value) for record in batch.records()]
    return rows


READS = [read, read_committed, scan_committed, fetch, fetch_committed]


def make_log(disk: SimulatedDisk) -> Log:
    log = logcore.open(
        "/data/t-0", create=True, config=CONFIG, durability="os", fs=disk
    )
    for number in range(3):
        write(log, number, commit=number != 1)
        if number != 1:
            log.roll()
    return log


def results_at_each_access(
    monkeypatch: pytest.MonkeyPatch, read_log: Any, action: Any, field: str
) -> Iterator[tuple[Any, Any]]:
    """Yield, for each access of the field, the result or error of the read and the
    log's records before the read.
    """
    for number in range(1, 100):
        disk = SimulatedDisk(now_ms=T0)
        with make_log(disk) as log:
            before = read(log)
            hook = AccessHook(field, number, lambda log=log: action(log))
            state = log.host.writer.state
            hook.values[id(state)] = getattr(state, field)
            # The compiled kernels store some fields elsewhere.
            state.__dict__.pop(field, None)
            try:
                with monkeypatch.context() as patch:
                    patch.setattr(PartitionState, field, hook, raising=False)
                    hook.count = 0
                    result = read_log(log)
            except logcore.OffsetOutOfRangeError as error:
                result = error
            finally:
                is_reached = hook.count == -1
                setattr(state, field, hook.values[id(state)])
        if not is_reached:
            return
        yield result, before


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("read_log", READS)
def test_read_returns_the_log_as_of_one_moment(
    monkeypatch: pytest.MonkeyPatch, read_log: Any, action: Any, field: str
) -> None:
    is_committed = "committed" in read_log.__name__
    for result, before in results_at_each_access(monkeypatch, read_log, action, field):
        if isinstance(result, logcore.OffsetOutOfRangeError):
            assert action is delete_from_the_front, (
                "the records to read were deleted during the read"
            )
            continue
        offsets = [offset for offset, _ in result]
        assert offsets == sorted(set(offsets)), "in order, without duplicates"
        if is_committed:
            assert ABORTED not in [value for _, value in result], (
                "records of an aborted or open transaction"
            )
        if action is not delete_from_the_front:
            keeps_aborted = not is_committed and action is not compact
            earlier = [row for row in before if keeps_aborted or row[1] != ABORTED]
            if action is compact:
                result = [row for row in result if row[1] != ABORTED]
            assert result[: len(earlier)] == earlier, "earlier records are returned"


@pytest.mark.parametrize("action", [append_open, append_after_a_roll])
@pytest.mark.parametrize("field", FIELDS)
def test_last_stable_offset_is_not_above_an_open_transaction(
    monkeypatch: pytest.MonkeyPatch, action: Any, field: str
) -> None:
    def stable_offset(log: Log) -> int:
        return log.last_stable_offset

    for last_stable_offset, before in results_at_each_access(
        monkeypatch, stable_offset, append_open, field
    ):
        assert last_stable_offset <= before[-1][0] + 2, (
            "the open transaction begins after the last marker"
        )


def test_end_of_a_read_is_fixed_when_it_begins() -> None:
    """Check records, columns and batches, and a scan that is read twice."""
    with logcore.open(
        "/data/t-0", create=True, durability="os", fs=SimulatedDisk(now_ms=T0)
    ) as log:
        for number in range(5):
            log.append(b"%d" % number)
            log.roll()
        records = log.read(0)
        batches = log.batches(0)
        scan = log.scan()
        columns = iter(scan)
        first = (
            [next(records).offset],
            [next(batches).base_offset],
            next(columns).offsets.tolist(),
        )
        log.append(b"later")
        log.roll()
        log.append(b"last")
        assert [*first[0], *(record.offset for record in records)] == [0, 1, 2, 3, 4]
        assert [*first[1], *(batch.base_offset for batch in batches)] == [0, 1, 2, 3, 4]
        assert [
            *first[2],
            *(offset for chunk in columns for offset in chunk.offsets.tolist()),
        ] == [0, 1, 2, 3, 4]
        assert [offset for chunk in scan for offset in chunk.offsets.tolist()] == [
            0,
            1,
            2,
            3,
            4,
        ]


def test_reader_keeps_segments_that_are_deleted_during_the_read() -> None:
    """The reader also keeps segments that it has not accessed yet. Their files are
    deleted at once, without a rename to .deleted.
    """
    disk = SimulatedDisk(now_ms=T0)
    config = {"file.delete.delay.ms": 0}
    with logcore.open(
        "/data/t-0", create=True, config=config, durability="os", fs=disk
    ) as log:
        for number in range(5):
            log.append(b"%d" % number)
            log.roll()
        log.append(b"5")
        records = log.read(0)
        first = next(records).offset
        log.delete_records(5)
        log.tick(T0)
        assert [
            path for path in disk.files() if path.endswith((".log", ".deleted"))
        ] == [f"/data/t-0/{5:020d}.log"]
        assert [first, *(record.offset for record in records)] == [0, 1, 2, 3, 4, 5]


class ObservingPlan(FaultPlan):
    """A plan without faults that calls its observer before each operation on the disk."""

    def __init__(self, observe: Callable[[], None]) -> None:
        super().__init__()
        self.observe = observe
        self.is_observing = False

    def action_for(self, operation: str, path: str) -> Any:
        if not self.is_observing:
            self.is_observing = True
            self.observe()
            self.is_observing = False
        return super().action_for(operation, path)


POLICIES = ["always", "group", "every(3)", "interval(1)", "os"]


@pytest.mark.long
@pytest.mark.parametrize("old_durability", POLICIES)
@pytest.mark.parametrize("new_durability", POLICIES)
def test_visible_high_watermark_never_decreases(
    old_durability: str, new_durability: str
) -> None:
    """A reader that remains open and a new reader check it at each step of a writer
    that opens, appends and closes after another writer was killed.
    """
    disk = SimulatedDisk(now_ms=T0)
    log = logcore.open("/data/t-0", create=True, durability=old_durability, fs=disk)
    for number in range(5):
        log.append(b"%d" % number)
    disk.kill()
    high_watermarks = [5]

    with logcore.open("/data/t-0", read_only=True, fs=disk) as reader:
        assert reader.high_watermark == 5

        def observe() -> None:
            reader.refresh()
            with logcore.open("/data/t-0", read_only=True, fs=disk) as other:
                for high_watermark in (reader.high_watermark, other.high_watermark):
                    assert high_watermark >= high_watermarks[-1]
                    high_watermarks.append(high_watermark)

        disk.faults = ObservingPlan(observe)
        with logcore.open("/data/t-0", durability=new_durability, fs=disk) as log:
            log.append(b"5", durability="disk")
            log.roll()
            log.append(b"6", durability="disk")
        disk.faults = None
        reader.refresh()
        assert reader.high_watermark == 7
    assert len(high_watermarks) > 50


@pytest.mark.parametrize("start", range(6))
def test_queries_of_a_log_that_begins_inside_a_batch(start: int) -> None:
    with logcore.open(
        "/data/t-0", create=True, durability="os", fs=SimulatedDisk(now_ms=T0)
    ) as log:
        log.append_many(
            [(b"k", b"%d" % number, (), T0 + number) for number in range(5)]
        )
        log.append(b"5", timestamp_ms=T0 + 5)
        log.delete_records(start)
        assert [
            record.offset for record in log.read(start, isolation="read_committed")
        ] == [*range(start, 6)]
        assert [log.offset_for_timestamp(T0 + number) for number in range(6)] == [
            max(start, number) for number in range(6)
        ]
        assert log.newest() == (5, T0 + 5)
        assert log.last_stable_offset == 6


def test_transaction_whose_marker_was_deleted_is_closed() -> None:
    with logcore.open("/data/t-0", create=True, fs=SimulatedDisk(now_ms=T0)) as log:
        write(log, 0, commit=None)
        assert log.last_stable_offset == 0, (
            "the search for transactions ends inside this one"
        )
        log.end_transaction(0, 0, commit=True)
        log.roll()
        write(log, 1, commit=True)
        log.delete_records(2)
        assert [
            record.offset for record in log.read(2, isolation="read_committed")
        ] == [2]
        assert log.last_stable_offset == 4


def test_reader_forgets_transactions_that_the_writer_truncated() -> None:
    """Under `os`, readers see all written records, until a failed append is truncated."""
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open("/data/t-0", create=True, durability="os", fs=disk) as log:
        write(log, 0, commit=True)
        size = disk.file_size(log.path + "/" + "0" * 20 + ".log")
        write(log, 1, commit=True)
        with logcore.open("/data/t-0", read_only=True, fs=disk) as reader:
            assert reader.last_stable_offset == 4
            log.host.writer.active.cut(size)
            reader.refresh()
            assert reader.last_stable_offset == 2
            log._state.end = log._state.visible = 2
            log.host.writer.producers.forget()
            write(log, 2, commit=False)
            reader.refresh()
            assert [
                record.offset for record in reader.read(0, isolation="read_committed")
            ] == [0]


class ActingPlan(FaultPlan):
    """A plan without faults that calls `action` once, before the n-th operation on the
    disk.
    """

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        super().__init__()
        self.left = at
        self.action = action

    def action_for(self, operation: str, path: str) -> Any:
        self.left -= 1
        if self.left == 0:
            self.action()
        return super().action_for(operation, path)


def test_unsynced_record_is_hidden_at_any_step_of_a_refresh() -> None:
    """Between any two disk operations of a reader, a writer opens the log and appends a
    record without a sync.

    If the reader read the durable end before the size, it would find no durable end,
    and the record would be visible.
    """
    is_reached = True
    nth = 0
    while is_reached:
        nth += 1
        disk = SimulatedDisk(now_ms=T0)
        with logcore.open("/data/t-0", create=True, durability="group", fs=disk) as log:
            log.append(b"on disk")
        writers: list[Log] = []

        def write_unsynced(
            disk: SimulatedDisk = disk, writers: list[Log] = writers
        ) -> None:
            writers.append(logcore.open("/data/t-0", durability="group", fs=disk))
            writers[0].append(b"in memory", durability="os")

        with logcore.open("/data/t-0", read_only=True, fs=disk) as reader:
            disk.faults = ActingPlan(nth, write_unsynced)
            reader.refresh()
            disk.faults = None
            assert reader.high_watermark == 1
        is_reached = bool(writers)
        for log in writers:
            log.close()
    assert nth > 5


def test_directory_listing_during_a_rename_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A directory listing during a rename may lack a name that exists before and after
    it.
    """
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open("/data/t-0", create=True, durability="os", fs=disk) as log:
        for number in range(3):
            log.append(b"%d" % number)
            log.roll()
        listed: list[str] = []

        def listdir(path: str) -> list[str]:
            listed.append(path)
            names = SimulatedDisk.listdir(disk, path)
            # The first listing only checks that this is a partition.
            is_first = listed.count("/data/t-0") == 2
            return [
                name
                for name in names
                if not (is_first and path == "/data/t-0" and name == f"{1:020d}.log")
            ]

        monkeypatch.setattr(disk, "listdir", listdir)
        with logcore.open("/data/t-0", read_only=True, fs=disk) as reader:
            assert listed.count("/data/t-0") >= 4, "listed again"
            assert [record.offset for record in reader.read(0)] == [0, 1, 2]


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\xff" * 100, b"cut", b"crc"])
def test_search_by_time_ignores_a_crash_tail_after_the_end(
    tail: bytes,
) -> None:
    """No writer has opened the log since the crash, and the durable records are
    complete.
    """
    disk = SimulatedDisk(now_ms=T0)
    log = logcore.open("/data/t-0", create=True, fs=disk)
    for number in range(5):
        log.append(b"x", timestamp_ms=T0 + number)
    path = log.path + "/" + "0" * 20 + ".log"
    size = disk.file_size(path)
    log.append(b"unsynced", timestamp_ms=T0 + 9, durability="os")
    disk.kill()
    files = disk.files()
    data = files[path]
    assert data is not None
    ends = {b"cut": data[size:-1], b"crc": data[size:-1] + b"!"}
    files[path] = data[:size] + ends.get(tail, tail)
    with logcore.open("/data/t-0", read_only=True, fs=SimulatedDisk(files)) as reader:
        assert reader.high_watermark == 5
        assert [
            reader.offset_for_timestamp(T0 + number) for number in (3, 5, 9, 10)
        ] == [3, None, None, None]
        assert reader.newest() == (4, T0 + 4)
    files[path] = data[: size - 1] + b"!" + data[size:]
    with logcore.open("/data/t-0", read_only=True, fs=SimulatedDisk(files)) as reader:
        for timestamp_ms in (T0 + 5, T0 + 10):
            with pytest.raises(logcore.CorruptBatchError):
                reader.offset_for_timestamp(timestamp_ms)
