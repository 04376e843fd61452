"""Tests that the compiled fast paths of append() and append_batch() have the same
results as the general path in Python, and that they refuse appends that need the
general path.

Two logs run the same operations. The second log is on a subclass of OsFS, so that it
never uses the fast path, and its clock repeats the times of the receipts of the first
log. Files and fields must be equal.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import resource
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import logcore
from logcore import log as log_module
from logcore.config import Durability, LogConfig
from logcore.fs import OsFS
from logcore.kernels import Appender, appending, kernel, layout, plain
from logcore.kernels.checksum import crc32c
from logcore.partition.replication import begin_to_follow
from logcore.partition.writer import Writer
from logcore.reader import listen_to
from logcore.recordbatch import encode
from logcore.segment import ActiveSegment
from logcore.testing import SimulatedDisk
from netshim import wire
from support.broker_harness import BrokerHarness
from support.kernels import compiled, runs_compiled

pytestmark = runs_compiled

T0 = 1_700_000_000_000
FIELDS = [
    name
    for name in appending.SegmentFields.__annotations__
    if name not in ("handle", "held", "_indexes")
]
STATE_FIELDS = ("end", "visible", "is_closed", "log_start")
WRITER_FIELDS = (
    "written_bytes",
    "appends",
    "leader_epoch",
    "has_unfinished_write",
    "is_held",
    "is_maintenance_idle",
)


class ClockedFS(OsFS):
    """A subclass of OsFS, which allows no fast path, with a clock that the test
    sets.
    """

    clock_ms: int | None = None

    def now_ms(self) -> int:
        return super().now_ms() if self.clock_ms is None else self.clock_ms


def fields_of(log: logcore.Log) -> dict[str, Any]:
    writer = log.host.writer
    values = {name: getattr(writer.active, name) for name in FIELDS}
    values |= {name: getattr(writer.state, name) for name in STATE_FIELDS}
    values |= {name: getattr(writer, name) for name in WRITER_FIELDS}
    values["rolls"] = writer.progress.rolls
    values["indexes"] = [
        bytes(index.data)
        for index in (writer.active.offset_index, writer.active.time_index)
    ]
    return values


def files_of(log: logcore.Log) -> dict[str, bytes]:
    names = (
        name
        for name in os.listdir(log.path)
        if name.endswith((".log", ".index", ".timeindex"))
    )
    return {name: Path(log.path, name).read_bytes() for name in names}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[logcore.Log]:
    """Create a log whose next plain append uses the fast path."""
    with logcore.open(tmp_path / "t-0", create=True, durability="os", fs=OsFS()) as log:
        log.append(b"first")
        yield log


def append_fast(
    log: logcore.Log, value: object = b"v", key: object = b"k", **arguments: object
) -> logcore.Receipt | None:
    """Return the result of the fast path of append(), or None if it refuses."""
    names = ("headers", "timestamp_ms", "durability", "expected_offset")
    options = {"headers": (), **arguments}
    return log.host.writer.append_fast(
        value, key, *(options.get(name) for name in names)
    )


def batch_of(
    count: int = 1,
    *,
    value: bytes = b"v",
    key: bytes | None = b"k",
    times: tuple[int, ...] = (T0,),
    producer: tuple[int, int, int] = (-1, -1, -1),
    **more: Any,
) -> bytes:
    producer_id, epoch, sequence = producer
    rows = [(key, value, (), times[number % len(times)]) for number in range(count)]
    return bytes(
        encode(
            rows,
            now_ms=T0,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            **more,
        )
    )


def append_request(log: logcore.Log, batch: bytes | None = None) -> int | None:
    """Return the result of append_request() for a batch."""
    batch = batch_of() if batch is None else batch
    frame = memoryview(
        wire.encode_request(
            wire.PRODUCE, 9, 1, "client", BrokerHarness.produce_request(batch)
        )[4:]
    )
    request = kernel.read_request(frame)
    if request is None:
        return None
    assert isinstance(request, compiled.UsualProduce)
    return log.host.writer.append_request(request, frame)


def append_encoded(log: logcore.Log, batch: object = None) -> int | None:
    """Return the first offset of append_encoded() for a batch."""
    receipt = log.host.writer.append_encoded(batch_of() if batch is None else batch)
    if receipt is None:
        return None
    assert receipt.durability == "os"
    assert (receipt.topic, receipt.partition) == log.host.writer.key
    assert receipt.last_offset == log.log_end_offset - 1
    return receipt.offset


FAST_PATHS = pytest.mark.parametrize(
    "append", [append_fast, append_request, append_encoded]
)
BATCH_FAST_PATHS = pytest.mark.parametrize("append", [append_request, append_encoded])


@pytest.mark.parametrize("version", [8, 9, 12])
def test_usual_produce_has_the_timeout_of_the_request(version: int) -> None:
    request = BrokerHarness.produce_request(batch_of())
    request.acks = -1
    request.timeout_ms = 1_234
    frame = wire.encode_request(wire.PRODUCE, version, 1, "client", request)[4:]
    usual = kernel.read_request(memoryview(frame))
    assert isinstance(usual, compiled.UsualProduce)
    assert (usual.acks, usual.timeout_ms) == (-1, 1_234)


# -- accepted --------------------------------------------------------------------------


def test_plain_append_takes_the_fast_path(log: logcore.Log) -> None:
    began_ms = OsFS().now_ms()
    receipt = append_fast(log, b"value", b"key")
    assert receipt is not None
    assert receipt == (1, 1, receipt.timestamp_ms, "os", "t", 0)
    assert began_ms <= receipt.timestamp_ms <= OsFS().now_ms()
    assert append_fast(log, None, b"key") is not None
    assert append_fast(log, b"", None) is not None
    assert [(record.key, record.value) for record in log.read(1)] == [
        (b"key", b"value"),
        (b"key", None),
        (None, b""),
    ]
    assert log.get(1).timestamp_ms == receipt.timestamp_ms


def test_plain_append_with_an_index_entry_takes_the_general_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_on_fast_path: list[bool] = []

    def counting_append_fast(
        writer: Writer, *arguments: object
    ) -> logcore.Receipt | None:
        receipt = Appender.append_fast(writer, *arguments)
        is_on_fast_path.append(receipt is not None)
        return receipt

    monkeypatch.setattr(Writer, "append_fast", counting_append_fast)
    with logcore.open(tmp_path / "t-0", create=True, durability="os", fs=OsFS()) as log:
        for _ in range(100):
            log.append(bytes(100), key=bytes(16))
        assert len(log.host.writer.active.offset_index) == 4
    assert len(is_on_fast_path) == 100
    assert is_on_fast_path.count(False) == 1 + 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"headers": [("a", b"b")]},
        {"headers": (("a", b"b"),)},
        {"headers": None},
        {"timestamp_ms": 5},
        {"durability": "os"},
        {"durability": "disk"},
        {"expected_offset": 1},
        {"value": bytearray(b"v")},
        {"value": "v"},
        {"key": memoryview(b"k")},
        {"key": 7},
        {"value": bytes(5000)},
        {"key": bytes(5000)},
        {"value": bytes(2000), "key": bytes(2100)},
    ],
    ids=lambda arguments: "-".join(
        f"{name}:{type(value).__name__}" for name, value in arguments.items()
    ),
)
def test_unusual_records_take_the_general_path(
    log: logcore.Log, arguments: dict[str, Any]
) -> None:
    check_refusal(log, lambda: append_fast(log, **arguments))


@pytest.mark.parametrize(
    "batch",
    [
        batch_of(codec="zstd"),
        batch_of(transactional=True, producer=(7, 0, 0)),
        batch_of(producer=(7, 0, 0)),
        batch_of()[:-1] + b"x",
        batch_of(value=bytes(2_000_000)),
    ],
    ids=["compressed", "transaction", "unknown producer", "damaged", "large"],
)
def test_unusual_batch_takes_the_general_path(log: logcore.Log, batch: bytes) -> None:
    check_refusal(log, lambda: append_request(log, batch))


@pytest.mark.parametrize(
    ("times", "is_accepted"),
    [
        ((-5_000, 5_000), True),
        ((-70_000, 0), False),
        ((0, 70_000), False),
        ((None,), True),
    ],
    ids=str,
)
def test_times_near_the_clock_are_accepted(
    tmp_path: Path, times: tuple[int | None, ...], is_accepted: bool
) -> None:
    config = {
        "message.timestamp.before.max.ms": "60000",
        "message.timestamp.after.max.ms": "60000",
    }
    now_ms = OsFS().now_ms()
    absolute_times = tuple(-1 if time is None else now_ms + time for time in times)
    with logcore.open(
        tmp_path / "t-0", create=True, durability="os", config=config, fs=OsFS()
    ) as log:
        log.append(b"first")
        batch = batch_of(2, times=absolute_times)
        assert (append_request(log, batch) is not None) == is_accepted


def test_next_batch_of_a_producer_is_accepted(log: logcore.Log) -> None:
    log.append_batch(batch_of(2, producer=(7, 3, 0)))
    assert append_request(log, batch_of(3, producer=(7, 3, 2))) == 3
    for sequence, epoch in ((2, 3), (4, 3), (6, 3), (5, 2), (0, 4), (5, 4)):
        batch = batch_of(1, producer=(7, epoch, sequence))
        check_refusal(log, lambda batch=batch: append_request(log, batch))
    assert log.append_batch(batch_of(3, producer=(7, 3, 2))).offset == 3
    with pytest.raises(logcore.OutOfOrderSequenceError):
        log.append_batch(batch_of(1, producer=(7, 3, 6)))
    assert append_request(log, batch_of(1, producer=(7, 3, 5))) == 6
    log.host.writer.producers.forget()
    check_refusal(log, lambda: append_request(log, batch_of(1, producer=(7, 3, 6))))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_batch_is_not_stored_twice_after_an_interrupt(
    log: logcore.Log, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes between the write and the change of the producer state."""
    times = (OsFS().now_ms(),)  # recent, because the state of old producers expires
    log.append_batch(batch_of(2, producer=(7, 3, 0), times=times))
    batch = batch_of(3, producer=(7, 3, 2), times=times)

    def interrupt(state: object) -> None:
        raise error

    forget = listen_to(log, lambda: None)
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(type(log.host.writer.state), "wake", interrupt)
        append_request(log, batch)
    forget()
    assert not log.host.writer.state.lock.locked()
    assert append_request(log, batch) is None
    assert log.append_batch(batch).offset == 3
    assert log.log_end_offset == 6
    assert append_request(log, batch_of(1, producer=(7, 3, 5))) == 6


class ChangingLock:
    """The lock of a log. Another thread changes the log just before the lock is acquired."""

    def __init__(self, lock: Any, change: Callable[[], None]) -> None:
        self.lock = lock
        self.change = change

    def acquire(self, blocking: bool = True) -> bool:
        with self.lock:
            self.change()
        return bool(self.lock.acquire(blocking))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)


CHANGES: dict[str, Callable[[logcore.Log], object]] = {
    "follows": lambda log: log.host.writer.set_following_locked(True),
    "compacted": lambda log: setattr(log.host.writer, "requires_key", True),
    "smaller": lambda log: setattr(log.host.writer, "client_batch_bytes", 10),
    "times": lambda log: setattr(log.host.writer, "max_behind_ms", 1000),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fast_path_applies_settings_that_change_during_the_checks(
    log: logcore.Log, change: str
) -> None:
    """Otherwise a log that became a follower during the checks would append a record."""
    state = log.host.writer.state
    batch = batch_of(key=None)
    lock = state.lock
    state.lock = ChangingLock(lock, lambda: None)
    assert append_request(log, batch) == 1
    state.lock = ChangingLock(lock, lambda: CHANGES[change](log))
    try:
        assert append_request(log, batch) is None
    finally:
        state.lock = lock
        with lock:
            log.host.writer.set_following_locked(False)
    assert log.log_end_offset == 2


def test_batch_of_a_producer_outside_its_transaction_is_refused(
    log: logcore.Log,
) -> None:
    log.append_batch(batch_of(1, producer=(7, 0, 0)))
    log.append_batch(batch_of(1, producer=(7, 0, 1), transactional=True))
    check_refusal(log, lambda: append_request(log, batch_of(1, producer=(7, 0, 2))))
    with pytest.raises(logcore.InvalidTransactionStateError):
        log.append_batch(batch_of(1, producer=(7, 0, 2)))


def test_batch_beyond_the_unsynced_limit_takes_the_general_path(
    tmp_path: Path,
) -> None:
    policy = Durability("group", max_bytes=500)
    with logcore.open(
        tmp_path / "t-0", create=True, durability=policy, fs=OsFS()
    ) as log:
        log.append(b"first")
        size = len(batch_of())
        for number in range(500 // size):
            assert append_request(log) == 1 + number
        check_refusal(log, lambda: append_request(log))
        assert log.high_watermark == 1
        log.flush()
        assert append_request(log) is not None


def check_refusal(log: logcore.Log, append: Callable[[], object]) -> None:
    """Check that the fast path refuses an append and changes nothing."""
    before = fields_of(log), files_of(log)
    assert append() is None
    assert (fields_of(log), files_of(log)) == before


@pytest.mark.parametrize(
    ("owner", "field", "value"),
    [
        ("writer", "is_held", True),
        ("writer", "has_unfinished_write", True),
        ("writer", "is_maintenance_idle", True),
        ("writer", "fast_path_bytes", 0),
        ("writer", "forks", 7),
        ("writer", "slow_until_ns", 2**62),
        ("state", "is_closed", True),
        ("state", "listeners", (print,)),
        ("active", "limit_bytes", 100),
        ("active", "limit_bytes", -1),
        ("active", "limit_timestamp", 5),
        ("active", "limit_offset", 0),
        ("active", "first_timestamp", -1),
        ("active", "since_entry_bytes", 4097),
        ("active", "_size", 0),
        ("commit", "failure", logcore.LogFailedError("it failed")),
    ],
)
def test_appends_to_unusual_logs_take_the_general_path(
    log: logcore.Log, owner: str, field: str, value: object
) -> None:
    check_refusal_with_field(log, append_fast, owner, field, value)


@pytest.mark.parametrize(
    ("owner", "field", "value"),
    [
        ("writer", "is_held", True),
        ("writer", "has_unfinished_write", True),
        ("writer", "client_batch_bytes", 0),
        ("writer", "unsynced_limit", 10),
        ("writer", "forks", 7),
        ("writer", "slow_until_ns", 2**62),
        ("state", "is_closed", True),
        ("active", "limit_bytes", 100),
        ("active", "limit_timestamp", 5),
        ("active", "limit_offset", 0),
        ("active", "_size", 0),
        ("commit", "failure", logcore.LogFailedError("it failed")),
    ],
)
@BATCH_FAST_PATHS
def test_batches_for_unusual_logs_take_the_general_path(
    log: logcore.Log, owner: str, field: str, value: object, append: Any
) -> None:
    check_refusal_with_field(log, append, owner, field, value)


def check_refusal_with_field(
    log: logcore.Log,
    append: Callable[[logcore.Log], object],
    owner: str,
    field: str,
    value: object,
) -> None:
    writer = log.host.writer
    holder: Any = {
        "writer": writer,
        "state": writer.state,
        "active": writer.active,
        "commit": writer.commit,
    }[owner]
    before = getattr(holder, field)
    setattr(holder, field, value)
    try:
        assert append(log) is None
        assert getattr(holder, field) == value
    finally:
        setattr(holder, field, before)
    assert log.log_end_offset == 1
    assert append(log) is not None


def test_batch_that_fills_the_segment_takes_the_fast_path(
    log: logcore.Log,
) -> None:
    active = log.host.writer.active
    log.append(b"v", key=b"k")
    size = active.size_bytes - len(b"first") - 68
    active.limit_bytes = active.size_bytes + size
    active.limit_offset = 2
    assert append_fast(log) is not None
    check_refusal(log, lambda: append_fast(log))


@FAST_PATHS
def test_fast_path_does_not_wait_for_the_lock(log: logcore.Log, append: Any) -> None:
    with log.host.writer.state.lock:
        check_refusal(log, lambda: append(log))
    assert append(log) is not None
    assert not log.host.writer.state.lock.locked()


@pytest.mark.parametrize(
    "config",
    [
        {"compression.type": "lz4"},
        {"message.timestamp.type": "LogAppendTime"},
        {"message.timestamp.after.max.ms": "1000"},
        {"flush.messages": "2"},
        {"max.message.bytes": "60"},
    ],
    ids=str,
)
@FAST_PATHS
def test_settings_with_further_work_take_the_general_path(
    tmp_path: Path, config: dict[str, str], append: Any
) -> None:
    with logcore.open(tmp_path / "t-0", create=True, durability="os", fs=OsFS()) as log:
        log.append(b"first")
        assert append(log) is not None
        log.reconfigure(config)
        if append is append_fast or "message.timestamp.after.max.ms" not in config:
            check_refusal(log, lambda: append(log))
        log.reconfigure({})
        assert append(log) is not None


def test_compacted_topic_accepts_only_records_with_keys(tmp_path: Path) -> None:
    config = {"cleanup.policy": "compact"}
    with logcore.open(
        tmp_path / "t-0", create=True, durability="os", config=config, fs=OsFS()
    ) as log:
        log.append(b"first", key=b"k")
        assert append_fast(log) is not None
        check_refusal(log, lambda: append_fast(log, key=None))
        assert append_request(log) is not None
        check_refusal(log, lambda: append_request(log, batch_of(key=None)))


@pytest.mark.parametrize(
    "durability", ["group", "always", logcore.every(3), logcore.interval(5)]
)
def test_other_policies_take_the_general_path(tmp_path: Path, durability: Any) -> None:
    with logcore.open(
        tmp_path / "t-0", create=True, durability=durability, fs=OsFS()
    ) as log:
        log.append(b"first")
        check_refusal(log, lambda: append_fast(log))
        if durability != "group":
            check_refusal(log, lambda: append_request(log))
            check_refusal(log, lambda: append_encoded(log))


@pytest.mark.parametrize(
    "options",
    [{"shared": True}, {"replicated": True}, {"fs": ClockedFS()}],
    ids=["shared", "replicated", "watched"],
)
def test_shared_replicated_and_wrapped_logs_take_the_general_path(
    tmp_path: Path, options: Any
) -> None:
    with logcore.open(tmp_path / "t-0", create=True, durability="os", **options) as log:
        log.append(b"first")
        assert append_fast(log) is None
        if "replicated" not in options:
            assert append_request(log) is None
            assert append_encoded(log) is None
            assert log.append(b"second").offset == 1
        else:  # the high watermark does not move
            assert append_request(log) == 1
            assert log.high_watermark == 0


def test_appends_to_a_simulated_disk_take_the_general_path() -> None:
    with logcore.open("t-0", create=True, durability="os", fs=SimulatedDisk()) as log:
        log.append(b"first")
        assert log.host.writer.fast_path_bytes == 0
        assert append_fast(log) is None
        assert append_request(log) is None
        assert append_encoded(log) is None


@pytest.mark.parametrize(
    "type_name", ["bytes", "bytearray", "memoryview", "part of a memoryview"]
)
def test_append_batch_takes_the_fast_path_with_each_type(
    log: logcore.Log, type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(3)
    data: Any = {
        "bytes": batch,
        "bytearray": bytearray(batch),
        "memoryview": memoryview(batch),
        "part of a memoryview": memoryview(bytearray(batch + bytes(100)))[: len(batch)],
    }[type_name]
    monkeypatch.setattr(log_module, "prepare_append", None)
    receipt = log.append_batch(data, durability="os")
    assert receipt == (1, 3, receipt.timestamp_ms, "os", "t", 0)
    assert bytes(data) == batch, (
        "append_batch() does not change the bytes of its caller"
    )
    assert [record.value for record in log.read(1)] == [b"v"] * 3


def batch_of_four_byte_items() -> memoryview:
    """Return a batch as a memoryview with items of 4 bytes."""
    sizes = (batch_of(value=bytes(size)) for size in range(1, 5))
    return memoryview(next(size for size in sizes if len(size) % 4 == 0)).cast("I")


UNUSUAL_BYTES = {
    "not contiguous": memoryview(
        bytes(byte for number in batch_of() for byte in (number, 0))
    )[::2],
    "items of 4 bytes": batch_of_four_byte_items(),
    "more bytes": batch_of() + b"x",
    "fewer bytes": batch_of()[:-1],
    "no bytes": b"",
    "text": "text",
    "transaction": batch_of(producer=(8, 0, 1), transactional=True),
    "transaction without a producer": batch_of(transactional=True),
    "compressed": batch_of(5, codec="gzip"),
}


@pytest.mark.parametrize("data", UNUSUAL_BYTES.values(), ids=UNUSUAL_BYTES)
def test_unusual_bytes_take_the_general_path(log: logcore.Log, data: object) -> None:
    # The log has a producer before the test.
    log.append_batch(batch_of(producer=(8, 0, 0)))
    check_refusal(log, lambda: append_encoded(log, data))


@pytest.mark.parametrize("arguments", [{}, {"durability": "disk"}])
def test_append_batch_that_waits_takes_the_general_path(
    log: logcore.Log, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "append_encoded", None)
    assert log.append_batch(batch_of(), **arguments).offset == 1
    assert log.append_batch(batch_of(), durability="os", check_sequence=False)


def test_each_append_wakes_a_tail(log: logcore.Log) -> None:
    ends: list[int] = []
    forget = listen_to(log, lambda: ends.append(log.high_watermark))
    for _ in range(3):
        log.append(b"x")
    assert append_request(log) == 4
    forget()
    log.append(b"x")
    assert ends == [2, 3, 4, 5]


# -- results ---------------------------------------------------------------------------

small_values = st.none() | st.binary(max_size=30) | st.integers(0, 5000).map(bytes)
operations = st.one_of(
    st.tuples(st.just("append"), small_values, small_values),
    st.tuples(st.just("append"), small_values, small_values),
    st.tuples(st.just("headers"), small_values),
    st.tuples(st.just("time"), st.sampled_from([-1, 0, 5, 2**42, 2**62])),
    st.tuples(st.just("disk"), small_values),
    st.tuples(st.just("expected"), st.integers(0, 5)),
    st.tuples(st.just("many"), st.integers(0, 40)),
    st.tuples(st.just("burst"), st.integers(1, 60)),
    st.tuples(
        st.just("batch"),
        st.integers(1, 40),
        st.sampled_from([b"", bytes(100), bytes(5000)]),
        st.none() | st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 2)),
    ),
    st.tuples(st.just("batch"), st.just(1), st.just(b"v"), st.just((0, 0, 0))),
    st.tuples(st.just("roll")),
    st.tuples(st.just("flush")),
    st.tuples(st.just("truncate"), st.integers(0, 60)),
    st.tuples(st.just("delete"), st.integers(0, 60)),
    st.tuples(st.just("epoch")),
    st.tuples(st.just("reopen")),
    st.tuples(
        st.just("reconfigure"),
        st.fixed_dictionaries(
            {},
            optional={
                "segment.bytes": st.sampled_from(["1000", "3000", "100000"]),
                "index.interval.bytes": st.sampled_from(["0", "200", "4096"]),
                "segment.index.bytes": st.sampled_from(["24", "48", "1000"]),
                "segment.ms": st.sampled_from(["1", "1000000"]),
                "cleanup.policy": st.sampled_from(["compact", "delete"]),
                "compression.type": st.sampled_from(["lz4", "producer"]),
                "max.message.bytes": st.sampled_from(["100", "5000"]),
            },
        ),
    ),
)
#: No operation of a program depends on the time at which it runs.
CONFIG = {"retention.ms": "-1", "segment.ms": "1000000"}


class OperatedLog:
    """A log on which a program of operations runs."""

    def __init__(self, directory: str, fs: OsFS, durability: str) -> None:
        self.path = Path(directory, "t-0")
        self.fs = fs
        self.durability: Any = durability
        self.log = self.open()
        #: The next sequence of each producer and epoch.
        self.sequences: dict[tuple[int, int], int] = {}

    def open(self) -> logcore.Log:
        return logcore.open(
            self.path,
            create=True,
            durability=self.durability,
            config=CONFIG,
            fs=self.fs,
        )

    def do(self, operation: tuple[Any, ...]) -> list[Any]:
        try:
            return self._do(*operation)
        except logcore.LogcoreError as error:
            return [type(error).__name__]

    def _do(self, kind: str, *arguments: Any) -> list[Any]:
        log = self.log
        if kind == "append":
            return [log.append(arguments[0], key=arguments[1])]
        if kind == "headers":
            return [log.append(arguments[0], headers=[("h", b"1")])]
        if kind == "time":
            return [log.append(b"t", timestamp_ms=arguments[0])]
        if kind == "disk":
            return [log.append(arguments[0], durability="disk")]
        if kind == "expected":
            return [
                log.append(b"e", expected_offset=log.log_end_offset + arguments[0] - 1)
            ]
        if kind == "many":
            return [
                log.append_many(
                    [(b"k", b"v%d" % number) for number in range(arguments[0])]
                )
            ]
        if kind == "batch":
            return [self._append_batch(*arguments)]
        if kind == "truncate":
            log.truncate(max(log.log_start_offset, log.log_end_offset - arguments[0]))
        if kind == "delete":
            log.delete_records(
                min(log.log_end_offset, log.log_start_offset + arguments[0])
            )
        if kind == "epoch":
            log.begin_epoch(log.leader_epoch + 1)
        if kind == "reconfigure":
            log.reconfigure({**CONFIG, **arguments[0]})
        if kind == "reopen":
            log.close()
            self.log = self.open()
        if kind in ("roll", "flush"):
            getattr(log, kind)()
        return []

    def _append_batch(
        self, count: int, value: bytes, producer: tuple[int, int, int] | None
    ) -> int:
        """Append a batch. `producer` is its id, its epoch, and the lag of the
        sequence.
        """
        log = self.log
        if producer is None:
            batch = batch_of(count, value=value)
        else:
            producer_id, epoch, lag = producer
            next_sequence = self.sequences.get((producer_id, epoch), 0)
            sequence = max(0, next_sequence - lag)
            batch = batch_of(
                count, value=value, producer=(producer_id, epoch, sequence)
            )
        end = log.log_end_offset
        offset = (append_request if count % 2 else append_encoded)(log, batch)
        if offset is None:
            offset = log.append_batch(batch, durability="os").offset
        if producer is not None and offset == end:
            self.sequences[producer_id, epoch] = sequence + count
        return offset


@pytest.mark.long
@given(st.lists(operations, max_size=30), st.sampled_from(["os", "os", "group"]))
def test_both_paths_write_the_same_files(
    program: list[tuple[Any, ...]], durability: str
) -> None:
    directories = [tempfile.mkdtemp(), tempfile.mkdtemp()]
    clocked = ClockedFS()
    clocked.clock_ms = OsFS().now_ms()
    logs = [
        OperatedLog(directories[0], OsFS(), durability),
        OperatedLog(directories[1], clocked, durability),
    ]
    try:
        for operation in program:
            for action in (
                [("append", b"b", b"k")] * operation[1]
                if operation[0] == "burst"
                else [operation]
            ):
                result = logs[0].do(action)
                clocked.clock_ms = (
                    result[0].timestamp_ms
                    if result and isinstance(result[0], tuple | logcore.Receipt)
                    else OsFS().now_ms()
                )
                assert logs[1].do(action) == result
            assert fields_of(logs[0].log) == fields_of(logs[1].log)
        for log in logs:
            log.log.close()
        assert files_of(logs[0].log) == files_of(logs[1].log)
    finally:
        for log in logs:
            log.log.close()
            shutil.rmtree(os.path.dirname(log.path))


leader_operations = st.one_of(
    st.tuples(st.just("plain"), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("plain"), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("compressed"), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("transaction"), st.booleans()),
    st.tuples(st.just("epoch")),
    st.tuples(st.just("skip")),
)
copy_operations = st.one_of(
    st.just(("copy", 0)),
    st.just(("copy", 0)),
    st.tuples(st.just("copy"), st.integers(0, 500)),
    st.tuples(st.just("damage"), st.integers(0, 100)),
    st.tuples(st.just("truncate"), st.integers(0, 4)),
    st.tuples(st.just("segment.bytes"), st.sampled_from(["600", "100000"])),
    st.just(("roll",)),
    st.just(("reopen",)),
    st.just(("begin",)),
)


class CopiedLog(OperatedLog):
    """A log that follows another log."""

    def open(self) -> logcore.Log:
        log = logcore.open(
            self.path,
            create=True,
            durability=self.durability,
            config=CONFIG,
            replicated=True,
            fs=self.fs,
        )
        begin_to_follow(log.host.writer)
        return log

    def _do(self, kind: str, *arguments: Any) -> list[Any]:
        log = self.log
        if kind == "append":
            receipt = log.append_as_follower(arguments[0], durability="os")
            return [receipt._replace(timestamp_ms=0)]
        if kind == "segment.bytes":
            log.reconfigure({**CONFIG, "segment.bytes": arguments[0]})
        elif kind == "truncate":
            log.truncate(max(log.log_start_offset, log.log_end_offset - arguments[0]))
        elif kind == "begin":
            log.begin_epoch(log.leader_epoch + 1)
            begin_to_follow(log.host.writer)
        elif kind == "reopen":
            log.close()
            self.log = self.open()
        else:
            log.roll()
        return []


def log_of_leader(path: Path, program: list[tuple[Any, ...]]) -> logcore.Log:
    """Return the log of a leader after a program of operations."""
    log = logcore.open(path, create=True, durability="os", config=CONFIG)
    sequences = 0
    for number, (kind, *values) in enumerate(program):
        if kind == "epoch":
            log.begin_epoch(log.leader_epoch + 1)
        elif kind == "skip" and log.log_end_offset == 0:
            with log.host.writer.state.lock:
                log.host.writer.begin_at_locked(2)
        elif kind == "skip":
            pass
        elif kind == "transaction":
            batch = batch_of(1, producer=(100 + number, 0, 0), transactional=True)
            log.append_batch(batch)
            log.end_transaction(100 + number, 0, commit=values[0])
        else:
            count, has_producer = values
            producer = (-1, -1, -1)
            if has_producer:
                producer = (7, 0, sequences)
                sequences += count
            codec = "gzip" if kind == "compressed" else "uncompressed"
            log.append_batch(batch_of(count, producer=producer, codec=codec))
    return log


@pytest.mark.long
@given(
    st.lists(leader_operations, min_size=1, max_size=20),
    st.lists(copy_operations, max_size=40),
    st.sampled_from(["os", "os", "group"]),
)
def test_both_paths_write_the_same_copy(
    program: list[tuple[Any, ...]], operations: list[tuple[Any, ...]], durability: str
) -> None:
    directories = [tempfile.mkdtemp() for _ in range(3)]
    leader = log_of_leader(Path(directories[2], "t-0"), program)
    copies = [
        CopiedLog(directories[0], OsFS(), durability),
        CopiedLog(directories[1], ClockedFS(), durability),
    ]
    try:
        for operation in operations:
            operation_on_copy = operation
            if operation[0] in ("copy", "damage"):
                end = copies[0].log.log_end_offset
                if not leader.log_start_offset <= end < leader.log_end_offset:
                    continue
                size = operation[1] if operation[0] == "copy" else 0
                data = bytearray(
                    b"".join(leader.stored(end, max_bytes=size, at_least_one=True))
                )
                if operation[0] == "damage":
                    data[operation[1] % len(data)] ^= 1
                operation_on_copy = ("append", bytes(data))
            assert copies[0].do(operation_on_copy) == copies[1].do(operation_on_copy)
            fields, other_fields = (fields_of(copy.log) for copy in copies)
            assert fields == other_fields
        producers = [copy.log.host.writer.producers.known().facts() for copy in copies]
        assert producers[0] == producers[1]
        for copy in copies:
            copy.log.close()
        assert files_of(copies[0].log) == files_of(copies[1].log)
    finally:
        for copy in copies:
            copy.log.close()
        leader.close()
        for directory in directories:
            shutil.rmtree(directory)


def test_batch_of_the_leader_takes_the_fast_path(tmp_path: Path) -> None:
    program = [("plain", 1, True), ("plain", 2, False), ("compressed", 2, True)]
    with log_of_leader(tmp_path / "leader" / "t-0", program) as leader:
        copy = CopiedLog(str(tmp_path / "copy"), OsFS(), "group")
        assert leader.log_end_offset == 5
        copy.do(("append", leader.stored(0, 1, max_bytes=1)[0]))
        writer = copy.log.host.writer
        for start, last in ((1, 2), (3, 4)):
            (batch,) = leader.stored(start, last + 1, max_bytes=1)
            with writer.state.lock:  # as if another thread held the lock
                assert writer.append_stored(batch) is None
            receipt = writer.append_stored(batch)
            assert receipt == logcore.Receipt(
                start, last, receipt.timestamp_ms, "os", "t", 0
            )
            assert writer.append_stored(batch) is None  # it does not continue the log
        assert copy.log.high_watermark == 0
        copy.log.close()


class PlainSegment(ActiveSegment):
    """A segment that records batches with the plain kernels."""

    is_full = appending.SegmentFields.is_full
    record_batch = appending.SegmentFields.record_batch
    record_batches = appending.SegmentFields.record_batches
    _add_entries = appending.SegmentFields._add_entries


@given(
    batches=st.lists(
        st.tuples(st.integers(61, 200), st.sampled_from([-1, 0, 3, 5, 90])), max_size=30
    ),
    config=st.fixed_dictionaries(
        {
            "index.interval.bytes": st.sampled_from([0, 100, 1000]),
            "segment.index.bytes": st.sampled_from([24, 48, 1000]),
        }
    ),
    single_count=st.integers(0, 30),
)
@example(
    batches=[(100, 1), (100, 3), (100, 2)],
    config={"index.interval.bytes": 0, "segment.index.bytes": 24},
    single_count=1,
)
def test_both_kernels_record_the_same_state_of_a_batch(
    batches: list[tuple[int, int]], config: dict[str, int], single_count: int
) -> None:
    """The first batches are recorded one by one, and the others in one call."""
    states = list[list[Any]]()
    for segment_type in (ActiveSegment, PlainSegment):
        disk = SimulatedDisk({"t-0": None})
        segment = segment_type(disk, "t-0", 7, LogConfig.parse(config), create=True)
        state = list[Any]()
        ends = list(itertools.accumulate((size for size, _ in batches), initial=0))
        rows = [
            (number, size, 7 + slot, time)
            for slot, (number, (size, time)) in enumerate(
                zip(ends, batches, strict=False)
            )
        ]
        for row in rows[:single_count]:
            state.append(segment.is_full(row[1], row[3], row[2], T0))
            segment.record_batch(*row)
            state.append([getattr(segment, name) for name in FIELDS])
        segment.record_batches(0, rows[single_count:])
        state.append([getattr(segment, name) for name in FIELDS])
        state += [
            bytes(index.data) for index in (segment.offset_index, segment.time_index)
        ]
        state.append(
            {
                path: data
                for path, data in disk.files().items()
                if not path.endswith(".log")
            }
        )
        states.append(state)
    assert states[0] == states[1]


def test_appends_by_threads_get_distinct_offsets(log: logcore.Log) -> None:
    offsets: list[int] = []

    def work(number: int) -> None:
        own_offsets = []
        for index in range(100):
            if index % 10 == number:
                own_offsets.append(log.append_many([(None, b"m")] * 2).last_offset)
            own_offsets.append(log.append(b"%d" % number).offset)
        offsets.extend(own_offsets)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(offsets)) == len(offsets) == 440
    assert [record.offset for record in log.read(0)] == list(range(1 + 4 * 120))
    assert log.statistics().appends == 1 + 4 * 110


# -- a disk that fails -----------------------------------------------------------------


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """Return a function that limits the size of files of this process.

    Above the limit, the system shortens or refuses writes.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@FAST_PATHS
@pytest.mark.parametrize("free_bytes", [0, 1, 50])
def test_short_write_leaves_no_bytes(
    log: logcore.Log, file_limit: Callable[[int], None], free_bytes: int, append: Any
) -> None:
    append(log)
    before = fields_of(log), files_of(log)
    file_limit(log.host.writer.active.size_bytes + free_bytes)
    assert append(log) is None
    assert (fields_of(log), files_of(log)) == before
    with pytest.raises(logcore.DiskFullError):
        log.append(b"v", key=b"k")
    assert (fields_of(log), files_of(log)) == before
    assert log.host.writer.active.had_failed_write
    file_limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert log.append(b"v").offset == 2
    assert [record.offset for record in log.read(0)] == [0, 1, 2]


@pytest.mark.parametrize("append", [lambda log: log.append(b"v"), append_request])
def test_write_that_cannot_be_truncated_fails_the_log(
    log: logcore.Log, tmp_path: Path, append: Any
) -> None:
    append_fast(log)
    handle = log.host.writer.active.handle
    duplicate = os.dup(handle)
    read_only = os.open(tmp_path / "t-0" / f"{0:020d}.log", os.O_RDONLY)
    try:
        os.dup2(read_only, handle)
        with pytest.raises(logcore.StorageWriteError, match="could not be cut back"):
            append(log)
    finally:
        os.dup2(duplicate, handle)
        os.close(duplicate)
        os.close(read_only)
    assert log.has_failed
    assert not log.host.writer.state.lock.locked()
    with pytest.raises(logcore.LogFailedError):
        log.append(b"v")
    assert log.log_end_offset == 2


# -- conditions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [*range(40), 300, 959, 960, 961, 1000, 1023, 1024, 1025, 4000, 70_000]
)
def test_checksums_of_the_processor_and_the_library_are_equal(size: int) -> None:
    value = bytes(number * 7 % 251 for number in range(size))
    checksums = [
        kernel_module.encode_one(
            (None, value, (), 5), 0, 0, 5, layout.BatchEncoding(1 << 20, 1 << 20)
        )[0]
        for kernel_module in (compiled, plain)
    ]
    assert checksums[0] == checksums[1]
    assert int.from_bytes(checksums[0][17:21], "big") == crc32c(
        checksums[0][layout.CRC_START :]
    )


def test_receipt_behaves_like_a_named_tuple() -> None:
    for receipt_type in (layout.Receipt, compiled.Receipt):
        receipt = receipt_type(3, 4, 5, "os", "t", 1)
        offset, last_offset, timestamp_ms, durability, topic, partition = receipt
        assert (
            offset,
            last_offset,
            timestamp_ms,
            durability,
            topic,
            partition,
        ) == receipt
        assert receipt != receipt_type(3, 4, 5, "disk", "t", 1)
        assert hash(receipt) == hash(tuple(receipt))
        assert eval(repr(receipt), {"Receipt": receipt_type}) == receipt
        assert receipt._replace(offset=2).offset == 2
        assert receipt._asdict() == dict(zip(receipt._fields, receipt, strict=True))
        with pytest.raises(AttributeError):
            receipt.offset = 5
        changed = receipt_type(4, 4, 5, "os", "t", 1)
        assert (
            receipt < changed
            and receipt <= receipt
            and changed > tuple(receipt)
            and not receipt >= changed
        )
        assert (*receipt, 1) == receipt + (1,) and (1,) + receipt == (1, *receipt)  # noqa: RUF005
        assert (
            receipt.index("t"),
            receipt.count(4),
            len(receipt),
            receipt[-1],
            receipt[:2],
        ) == (
            4,
            1,
            6,
            1,
            (3, 4),
        )
        assert copy.copy(receipt) == receipt
        match receipt:
            case receipt_type(offset=found):
                assert found == 3
            case _:
                raise AssertionError("no match")
        with pytest.raises(TypeError):
            _ = receipt < 3
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            packed = pickle.dumps(receipt, protocol)
            assert b"_compiled" not in packed
            assert pickle.loads(packed) == receipt
            assert type(pickle.loads(packed)) is logcore.Receipt
