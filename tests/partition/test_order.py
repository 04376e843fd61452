"""Order of batches: one table of cases for each component that decides whether a batch
continues the previous one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import logcore
from logcore import cleaner
from logcore.inspect.batch_search import BatchFile, DamagedRange, Search
from logcore.inspect.verify import verify
from logcore.kernels import kernel, layout
from logcore.partition.gaps import NEVER, Gaps, PersistedGaps
from logcore.partition.order import (
    OrderFault,
    epochs_in_order,
    fault_of,
    first_fault,
    in_order,
    reach,
)
from logcore.recordbatch import encode
from logcore.segment import Segment
from logcore.testing import SimulatedDisk
from support.kernels import KERNELS

LOG = f"t-0/{0:020d}.log"
DENSE_POLICY = {
    "t-0/logcore.policy": b'{"durability": "group", "max_bytes": 1048576, "dense_from": 0}'
}
FAR_OFFSET = 1 << 33


class Case(NamedTuple):
    """Batches that follow two sound batches with the offsets 0 to 1, and 2."""

    name: str
    #: The base offset and the number of records of each batch.
    batches: tuple[tuple[int, int], ...]
    #: Number of batches before the first fault, if the log may not have gaps.
    in_order_count: int
    fault: OrderFault | None
    #: The same number and fault if the log may have gaps, as in Kafka.
    in_kafka: tuple[int, OrderFault | None]


CASES = [
    Case("they follow", ((3, 2), (5, 1)), 2, None, (2, None)),
    Case("none", (), 0, None, (0, None)),
    Case("a gap", ((3, 1), (6, 1)), 1, OrderFault.GAP, (2, None)),
    Case("a gap at once", ((4, 1), (5, 2)), 0, OrderFault.GAP, (2, None)),
    Case(
        "the same again", ((3, 1), (3, 1)), 1, OrderFault.FALLS, (1, OrderFault.FALLS)
    ),
    Case("an overlap", ((3, 3), (5, 2)), 1, OrderFault.FALLS, (1, OrderFault.FALLS)),
    Case("back to the start", ((0, 1),), 0, OrderFault.FALLS, (0, OrderFault.FALLS)),
    Case("below zero", ((-7, 1),), 0, OrderFault.FALLS, (0, OrderFault.FALLS)),
    Case(
        "further than a segment reaches",
        ((3, 1), (FAR_OFFSET, 1)),
        1,
        OrderFault.FAR,
        (1, OrderFault.FAR),
    ),
    Case(
        "a gap, then a fall", ((4, 1), (4, 1)), 0, OrderFault.GAP, (1, OrderFault.FALLS)
    ),
]
SOUND_BATCHES = ((0, 2), (2, 1))
ids = [case.name for case in CASES]


def batch(base_offset: int, records: int) -> bytes:
    rows = [(b"k", b"v%d" % row, (), 1_700_000_000_000) for row in range(records)]
    raw = bytearray(encode(rows, leader_epoch=0))
    raw[:8] = base_offset.to_bytes(8, "big", signed=True)  # no CRC covers the offset
    return bytes(raw)


def stored(case: Case) -> bytes:
    return b"".join(batch(*row) for row in SOUND_BATCHES + case.batches)


def disk_of(case: Case, is_dense: bool, **more: bytes) -> SimulatedDisk:
    return SimulatedDisk(
        {LOG: stored(case), **(DENSE_POLICY if is_dense else {}), **more},
        now_ms=1_700_000_000_000,
    )


def facts_of(data: bytes) -> layout.Facts:
    facts, position, _ = kernel.walk(data, 0, len(data), 100, True)
    assert position == len(data)
    return facts


def expected(case: Case, is_dense: bool) -> tuple[int, OrderFault | None]:
    return (case.in_order_count, case.fault) if is_dense else case.in_kafka


# -- the rules themselves --------------------------------------------------------------


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_rules_agree_for_one_batch_and_for_several(case: Case, is_dense: bool) -> None:
    headers = facts_of(stored(case))
    in_order_count, fault = expected(case, is_dense)
    dense_from = 0 if is_dense else NEVER
    assert first_fault(headers, 0, reach(0), dense_from=dense_from) == (
        len(SOUND_BATCHES) + in_order_count,
        fault,
    )
    assert (
        in_order(headers, 0, reach(0), dense_from=dense_from)
        == len(SOUND_BATCHES) + in_order_count
    )
    following = 0
    faults: list[OrderFault | None] = []
    for header in headers:
        faults.append(
            fault_of(
                2,
                int(header["base_offset"]),
                int(header["last_offset"]),
                following,
                reach(0),
                dense_from,
            )
        )
        following = int(header["last_offset"]) + 1
    assert faults[: len(SOUND_BATCHES) + in_order_count] == [None] * (
        len(SOUND_BATCHES) + in_order_count
    )
    assert fault is None or faults[len(SOUND_BATCHES) + in_order_count] is fault


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 14), st.integers(-1, 4)), max_size=6
    ),
    st.integers(0, 6),
    st.integers(0, 20),
    st.one_of(st.integers(0, 20), st.just(NEVER)),
)
@example([(2, 0, 0), (2, 2, 0)], 0, 20, 0)
@example([(2, 0, 0), (2, 2, 0)], 0, 20, 1)
@example([(2, 0, 0), (2, 2, 0)], 0, 20, 2)
@example([(2, 1, 0)], 0, 20, 0)
@example([(2, 0, 0), (2, 1, 0), (2, 2, 0)], 0, 3, 0)
def test_batches_are_in_order_while_their_offsets_rise(
    batches: list[tuple[int, int, int]], next_offset: int, limit: int, dense_from: int
) -> None:
    headers = np.zeros(len(batches), layout.BATCH_FACTS)
    expected_count = 0
    is_in_order = True
    following = next_offset
    faults: list[OrderFault | None] = []
    for row, (magic, base, delta) in enumerate(batches):
        last = base + delta
        headers[row]["magic"] = magic
        headers[row]["base_offset"] = base
        headers[row]["last_offset"] = last
        # Old formats do not store the base offset of a batch.
        first = base if magic == 2 else last
        missing = [offset for offset in range(following, first) if offset >= dense_from]
        is_in_order &= following <= first <= last < limit and not (
            magic == 2 and missing
        )
        expected_count += is_in_order
        faults.append(fault_of(magic, base, last, following, limit, dense_from))
        following = last + 1
    fault = None if expected_count == len(batches) else faults[expected_count]
    assert first_fault(headers, next_offset, limit, dense_from=dense_from) == (
        expected_count,
        fault,
    )
    assert (fault is None) == (expected_count == len(batches))
    assert faults[:expected_count] == [None] * expected_count


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 4)), max_size=6),
    st.integers(-1, 4),
)
@example([(2, 1), (2, 0)], 0)
@example([(2, -1), (1, 0), (2, 3)], 3)
def test_leader_epochs_never_fall(batches: list[tuple[int, int]], latest: int) -> None:
    headers = np.zeros(len(batches), layout.BATCH_FACTS)
    first_epoch = latest
    expected_count = 0
    is_in_order = True
    for row, (magic, epoch) in enumerate(batches):
        headers[row]["magic"] = magic
        headers[row]["partition_leader_epoch"] = epoch
        if magic == 2 and epoch >= 0:  # other batches have no epoch
            is_in_order &= epoch >= latest
            latest = max(latest, epoch)
        expected_count += is_in_order
    assert epochs_in_order(headers, first_epoch) == expected_count


# -- components that check the order of batches ----------------------------------------


def open_with_recovery(disk: SimulatedDisk, case: Case) -> OrderFault | None:
    """Open the log, and return the fault that recovery found. Recovery truncates
    batches that a crash can leave after the last sound batch, and refuses a gap.
    """
    try:
        with logcore.open("t-0", fs=disk) as log:
            report = log.recovery_report
            assert report is not None
            in_order_count = (
                case.in_order_count
                if report.cut_position is not None
                else len(case.batches)
            )
            assert log.log_end_offset == sum(
                (SOUND_BATCHES + case.batches)[len(SOUND_BATCHES) + in_order_count - 1]
            )
            assert report.cut_position in (
                None,
                len(stored(case._replace(batches=case.batches[:in_order_count]))),
            )
            return None if report.cut_position is None else case.fault
    except logcore.CorruptLogError:
        return OrderFault.GAP


def read_records(disk: SimulatedDisk, case: Case) -> None:
    with logcore.open("t-0", read_only=True, fs=disk) as log:
        assert len(list(log.read(0))) == sum(
            count for _, count in SOUND_BATCHES + case.batches
        )


def read_columns(disk: SimulatedDisk, case: Case) -> None:
    with logcore.open("t-0", read_only=True, fs=disk) as log:
        assert sum(map(len, log.scan())) == sum(
            count for _, count in SOUND_BATCHES + case.batches
        )


def read_stored(disk: SimulatedDisk, case: Case) -> None:
    with logcore.open("t-0", read_only=True, fs=disk) as log:
        assert b"".join(log.stored(0, max_bytes=1 << 20)) == stored(case)


def search_newest(disk: SimulatedDisk, case: Case) -> None:
    with logcore.open("t-0", read_only=True, fs=disk) as log:
        log.newest()


def walk_gaps(disk: SimulatedDisk, case: Case) -> None:
    end = sum((SOUND_BATCHES + case.batches)[-1])
    gaps = Gaps(
        PersistedGaps(
            0 if disk.exists("t-0/logcore.policy") else NEVER, has_seals=False
        )
    )
    for _ in gaps.walk([Segment(disk, "t-0", 0)], 0, end, crc=True):
        pass


READERS: list[Callable[[SimulatedDisk, Case], None]] = [
    read_records,
    read_columns,
    read_stored,
    search_newest,
    walk_gaps,
]


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_recovery_keeps_batches_that_are_in_order(case: Case, is_dense: bool) -> None:
    in_order_count, fault = expected(case, is_dense)
    assert (
        open_with_recovery(
            disk_of(case, is_dense),
            case._replace(in_order_count=in_order_count, fault=fault),
        )
        is fault
    )


@pytest.mark.parametrize(
    ("dense_from", "is_lost"),
    [(0, True), (3, True), (5, True), (6, False), (100, False)],
)
def test_gap_is_a_loss_from_the_dense_offset_on(dense_from: int, is_lost: bool) -> None:
    """The dense offset may be inside a segment. Below it, compaction may have left gaps,
    here or in the log of the leader.
    """
    case = CASES[ids.index("a gap")]
    policy = (
        b'{"durability": "group", "max_bytes": 1048576, "dense_from": %d}' % dense_from
    )
    files = {LOG: stored(case), "t-0/logcore.policy": policy}
    assert (
        "damaged"
        in {verdict.status for verdict in verify("t-0", fs=SimulatedDisk(files))}
    ) == is_lost
    if not is_lost:
        read_records(SimulatedDisk(files), case)
        logcore.open("t-0", fs=SimulatedDisk(files)).close()
        return
    with pytest.raises(logcore.CorruptBatchError):
        read_records(SimulatedDisk(files), case)
    with pytest.raises(
        logcore.CorruptLogError, match="expected base offset 4, found 6"
    ):
        logcore.open("t-0", fs=SimulatedDisk(files))


def test_old_format_entry_does_not_hide_a_following_gap() -> None:
    body = struct.pack(">bbqi1si1s", 1, 0, 1_700_000_000_000, 1, b"k", 1, b"v")
    old_entry = struct.pack(">qiI", 3, len(body) + 4, zlib.crc32(body)) + body
    case = Case("", ((3, 1), (6, 1)), 1, OrderFault.GAP, (2, None))
    data = b"".join(batch(*row) for row in SOUND_BATCHES) + old_entry + batch(6, 1)
    disk = SimulatedDisk({LOG: data, **DENSE_POLICY})
    assert "damaged" in {verdict.status for verdict in verify("t-0", fs=disk)}
    with pytest.raises(logcore.CorruptBatchError):
        read_records(disk, case)
    with pytest.raises(
        logcore.CorruptLogError, match="expected base offset 4, found 6"
    ):
        logcore.open("t-0", fs=disk)


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize("read", READERS)
def test_readers_refuse_batches_that_are_out_of_order(
    read: Callable[[SimulatedDisk, Case], None], case: Case, is_dense: bool
) -> None:
    _, fault = expected(case, is_dense)
    if fault is None:
        read(disk_of(case, is_dense), case)
        return
    if fault is OrderFault.FAR:
        return  # readers accept any offset in the last segment
    # A reader stops at the end offset that the last batch header contains. One more
    # batch moves the fault before the last batch.
    case = case._replace(batches=(*case.batches, (50, 1)))
    with pytest.raises((logcore.CorruptBatchError, logcore.CorruptLogError)):
        read(disk_of(case, is_dense), case)


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_verify_reports_the_position_of_the_first_order_fault(
    case: Case, is_dense: bool
) -> None:
    in_order_count, fault = expected(case, is_dense)
    verdict = next(
        verdict
        for verdict in verify("t-0", fs=disk_of(case, is_dense))
        if verdict.kind == "log"
    )
    # verify reports lost records as damage, because opening the log fails. It only
    # warns about batches that a crash can leave, because recovery truncates them.
    assert verdict.status == {None: "ok", OrderFault.GAP: "damaged"}.get(
        fault, "warning"
    ), verdict
    if fault is not None:
        assert verdict.position == len(
            stored(case._replace(batches=case.batches[:in_order_count]))
        )


def test_verify_allows_gaps_in_a_kafka_log_opened_by_this_library() -> None:
    """The log has a stored policy without a dense offset, so that opening it accepts
    gaps.
    """
    case = CASES[ids.index("a gap")]
    disk = disk_of(case, False)
    for _ in range(2):
        with logcore.open("t-0", fs=disk) as log:
            assert [record.offset for record in log.read(0)] == [0, 1, 2, 3, 6]
        disk.unlink("recovery-point-offset-checkpoint")
        assert {verdict.status for verdict in verify("t-0", fs=disk)} == {"ok"}


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_salvage_keeps_batches_that_are_in_order(case: Case, is_dense: bool) -> None:
    _, fault = expected(case, is_dense)
    source = BatchFile(disk_of(case, is_dense), LOG, "scratch")
    ranges = Search(source, 0, 0, reach(0), is_dense=is_dense).found
    damaged_ranges = [
        file_range for file_range in ranges if isinstance(file_range, DamagedRange)
    ]
    assert bool(damaged_ranges) == (fault is not None)
    if fault is not None:
        assert damaged_ranges[0].reason in [
            order_fault.value for order_fault in OrderFault
        ]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_follower_appends_all_batches_or_none(case: Case) -> None:
    """A follower accepts gaps, as in Kafka, because compaction leaves gaps in the
    leader's log.
    """
    disk = SimulatedDisk(now_ms=1_700_000_000_000)
    _, fault = expected(case, False)
    with logcore.open("t-0", create=True, replicated=True, fs=disk) as log:
        log.append_as_follower(b"".join(batch(*row) for row in SOUND_BATCHES))
        if not case.batches:
            return
        data = b"".join(batch(*row) for row in case.batches)
        # A roll begins a new segment for offsets that are too far for the active one.
        if fault in (
            None,
            OrderFault.FAR,
        ):
            log.append_as_follower(data)
            assert log.log_end_offset == sum(case.batches[-1])
            return
        with pytest.raises(logcore.OffsetOutOfRangeError):
            log.append_as_follower(data)
        assert log.log_end_offset == 3


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_leader_assigns_the_offsets_itself(case: Case) -> None:
    disk = SimulatedDisk(now_ms=1_700_000_000_000)
    with logcore.open("t-0", create=True, fs=disk) as log:
        log.append_batch(stored(case))
        assert [record.offset for record in log.read(0)] == list(
            range(sum(count for _, count in SOUND_BATCHES + case.batches))
        )


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_scrub_and_compaction_apply_the_same_order_rules(
    case: Case, is_dense: bool
) -> None:
    _, fault = expected(case, is_dense)
    end = max(
        3, sum(case.batches[-1]) if case.batches and fault is not OrderFault.FAR else 3
    )
    files: dict[str, bytes] = {
        f"t-0/{end:020d}.log": batch(end, 1),
        "recovery-point-offset-checkpoint": f"0\n1\nt 0 {end}\n".encode(),
    }
    with logcore.open(
        "t-0", fs=disk_of(case, is_dense, **files), config={"cleanup.policy": "compact"}
    ) as log:
        findings = log.scrub().findings
        assert bool(findings) == (fault is not None), findings
        if fault is None:
            assert cleaner.clean(log) is not None
            return
        with pytest.raises((logcore.CorruptBatchError, logcore.CorruptLogError)):
            cleaner.clean(log)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_kernels_stop_at_the_same_batch_as_the_rules(
    kernel: Any, case: Case, is_dense: bool
) -> None:
    in_order_count, _ = expected(case, is_dense)
    data = stored(case)
    sound = len(stored(case._replace(batches=case.batches[:in_order_count])))
    assert (
        kernel.plan_run(data, 0, len(data), 1000, 1 << 20, reach(0), 0, is_dense)[0]
        == sound
    )
    assert kernel.are_consecutive(facts_of(data), 0) == (case.fault is None)
