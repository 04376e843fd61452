"""Tests of Ctrl-C at any line of any public call. Records are returned or not committed, no
claim is kept, and no member remains in a group.

`make check` interrupts each call at a few evenly spaced lines; `make slow` interrupts at
every line. LOGCORE_INTERRUPTS=n sets the number of lines per call.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

import logcore
from logcore import acquire, claim, fs
from logcore.consumer import fetcher
from logcore.coordination import classic_group
from logcore.coordination.classic_group import Group
from logcore.coordinators import topic_deletion
from logcore.directory import open_logs
from logcore.format.group_records import Committed
from support import interrupted_calls as calls
from support.interrupting import interrupted

FEW = int(os.environ.get("LOGCORE_INTERRUPTS", "15"))
CASES = (
    calls.Reading,
    calls.ReadingOn,
    calls.ReadingColumns,
    calls.ReadingArrow,
    calls.Iterating,
    calls.Deserializing,
    calls.Intercepting,
    calls.Streaming,
    calls.Committing,
    calls.Leaving,
    calls.Rebalancing,
    calls.Sharing,
    calls.SharingOn,
    calls.Producing,
    calls.Transacting,
    calls.Directing,
    calls.Opening,
    calls.OpeningFiles,
    calls.SharingFiles,
    calls.Registering,
)


@pytest.mark.long
@pytest.mark.parametrize(
    "most",
    [FEW, pytest.param(1 << 60, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_interrupted_call_breaks_no_promise(case: type[calls.Case], most: int) -> None:
    lines = calls.count_lines(case)
    chosen = min(lines, most)
    met = sum(
        calls.interrupt_at(case, 1 + number * lines // chosen)
        for number in range(chosen)
    )
    assert met >= chosen * 9 // 10, "the calls take other ways each time"
    print(f"{case.__name__}: interrupted at {met} of {lines} lines")


@pytest.mark.long
def test_interrupted_opening_of_a_partition_keeps_no_claim(tmp_path: Path) -> None:
    """A partition whose first use was interrupted could not be used again for the life
    of the process: the claim was acquired, and no object could release it.
    """
    nth = left = 0
    while not left:
        nth += 5
        with logcore.open_dir(
            tmp_path / str(nth), create=True, durability="os"
        ) as data:
            data.create_topic("t")
            left = interrupted(
                lambda: data.partition("t", 0),
                nth,
                fs.__file__,
                claim.__file__,
                acquire.__file__,
                open_logs.__file__,
            ).left
            data.append("t", b"a", partition=0)
        with logcore.open_dir(tmp_path / str(nth)) as data:
            assert [record.value for record in data.read("t")] == [b"a"]
    assert nth > 40


@pytest.mark.long
def test_interrupted_deletion_of_a_topic_keeps_no_claim(tmp_path: Path) -> None:
    nth = left = 0
    while not left:
        nth += 3
        path = tmp_path / str(nth)
        with logcore.open_dir(path, create=True, durability="os") as data:
            data.create_topic("t", 2)
            data.append("t", b"a", partition=0)
            left = interrupted(
                lambda: data.delete_topic("t"),
                nth,
                fs.__file__,
                topic_deletion.__file__,
                open_logs.__file__,
            ).left
        with logcore.open_dir(path, durability="os") as data:
            if "t" not in data:
                data.create_topic("t", 2)
            data.append("t", b"a", partition=0)
            data.append("t", b"a", partition=1)
    assert nth > 40


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
def test_second_close_completes_an_interrupted_close(
    tmp_path: Path, shared: bool
) -> None:
    """Real files use a different lock class than the simulated disk."""
    nth = left = 0
    while not left:
        nth += 1
        path = tmp_path / str(nth)
        data = logcore.open_dir(path, create=True, durability="os", shared=shared)
        data.create_topic("t")
        data.append("t", b"a")
        log = data.partition("t", 0)
        trace = interrupted(
            lambda log=log: log.close(), nth, fs.__file__, claim.__file__
        )  # type: ignore[misc]
        log.close()
        data.host.open_again("t", 0)
        left = (
            interrupted(data.close, nth, fs.__file__, claim.__file__).left or trace.left
        )
        data.close()
        for other in (not shared, shared):
            with logcore.open_dir(path, durability="os", shared=other) as again:
                assert [record.value for record in again.read("t")] == [b"a"], (
                    trace.place
                )
    assert nth > 100


@pytest.mark.long
@pytest.mark.parametrize("how", ["poll", "poll_columns"])
def test_poll_interrupted_in_the_fetcher_skips_no_record(
    how: str,
) -> None:
    """Those lines take records, advance positions, and return the records. The same
    consumer continues.
    """
    nth = left = 0
    while not left:
        nth += 1
        case = calls.Reading() if how == "poll" else calls.ReadingColumns()
        for _ in range(2):
            case.read(case.consumer)  # joins, and has the first records
        left = interrupted(
            lambda case=case: case.read(case.consumer), nth, fetcher.__file__
        ).left  # type: ignore[misc]
        for _ in range(8):
            case.read(case.consumer)
        assert len(set(case.seen)) == 8, f"line {nth}"
        case.check()
    assert nth > 25


def test_registry_close_interrupted_at_any_line_ends_the_session() -> None:
    """An interrupt after the flag was set left the lease until the end of the process:
    a second close() did nothing.
    """
    lines = calls.count_lines(calls.Registering)
    for nth in range(lines - 25, lines + 1):
        calls.interrupt_at(calls.Registering, nth)
        gc.collect()


def test_transaction_marker_after_interrupt_applies_all_offsets() -> None:
    """The pending offsets were taken out before they were applied, so the marker that
    was written again after an interrupt applied none.
    """
    committed = {("t", number): Committed(number, -1, "", 0) for number in range(3)}
    nth = left = 0
    while not left:
        nth += 1
        group = Group("g")
        group.unstable[7] = {key: (1, row) for key, row in committed.items()}
        left = interrupted(
            lambda group=group: group.end_transaction(7, commit=True),  # type: ignore[misc]
            nth,
            classic_group.__file__,
        ).left
        group.end_transaction(7, commit=True)
        assert group.offsets == {"t": {n: committed["t", n] for n in range(3)}}
        assert not group.unstable
    assert nth > 10
