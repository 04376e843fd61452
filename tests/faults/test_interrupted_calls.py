"""Tests of Ctrl-C at any line of any public call. Each record is returned or not
committed, no lock remains acquired, and no member remains in a group.

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
    calls.ReadingAfterInterrupt,
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
    calls.SharingAfterInterrupt,
    calls.Producing,
    calls.Transacting,
    calls.ManagingTopics,
    calls.Opening,
    calls.OpeningFiles,
    calls.SharingFiles,
    calls.Registering,
)


@pytest.mark.long
@pytest.mark.parametrize(
    "max_lines",
    [FEW, pytest.param(1 << 60, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_interrupted_call_loses_no_record_and_releases_its_locks(
    case: type[calls.Case], max_lines: int
) -> None:
    lines = calls.count_lines(case)
    line_count = min(lines, max_lines)
    interrupt_count = sum(
        calls.interrupt_at(case, 1 + number * lines // line_count)
        for number in range(line_count)
    )
    assert interrupt_count >= line_count * 9 // 10, (
        "the calls execute other lines each time"
    )
    print(f"{case.__name__}: interrupted at {interrupt_count} of {lines} lines")


@pytest.mark.long
def test_interrupted_opening_of_a_partition_releases_its_claim(tmp_path: Path) -> None:
    """After an interrupted first use, a partition could not be opened again in the same
    process: its claim was acquired, and no object could release it.
    """
    nth = completed = 0
    while not completed:
        nth += 5
        with logcore.open_dir(
            tmp_path / str(nth), create=True, durability="os"
        ) as data:
            data.create_topic("t")
            completed = interrupted(
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
def test_interrupted_deletion_of_a_topic_releases_its_claims(tmp_path: Path) -> None:
    nth = completed = 0
    while not completed:
        nth += 3
        path = tmp_path / str(nth)
        with logcore.open_dir(path, create=True, durability="os") as data:
            data.create_topic("t", 2)
            data.append("t", b"a", partition=0)
            completed = interrupted(
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
    """Real files use another lock class than the simulated disk."""
    nth = completed = 0
    while not completed:
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
        completed = (
            interrupted(data.close, nth, fs.__file__, claim.__file__).left or trace.left
        )
        data.close()
        for is_shared in (not shared, shared):
            with logcore.open_dir(path, durability="os", shared=is_shared) as reopened:
                assert [record.value for record in reopened.read("t")] == [b"a"], (
                    trace.place
                )
    assert nth > 100


@pytest.mark.long
@pytest.mark.parametrize("method", ["poll", "poll_columns"])
def test_poll_interrupted_in_the_fetcher_skips_no_record(
    method: str,
) -> None:
    """Lines of the fetcher take records, advance positions, and return the records. The
    same consumer continues after the interrupt.
    """
    nth = completed = 0
    while not completed:
        nth += 1
        case = calls.Reading() if method == "poll" else calls.ReadingColumns()
        for _ in range(2):
            case.read(case.consumer)  # joins the group, and returns the first records
        completed = interrupted(
            lambda case=case: case.read(case.consumer), nth, fetcher.__file__
        ).left  # type: ignore[misc]
        for _ in range(8):
            case.read(case.consumer)
        assert len(set(case.seen)) == 8, f"line {nth}"
        case.check()
    assert nth > 25


def test_registry_close_interrupted_at_any_line_ends_the_session() -> None:
    """After an interrupt that followed the closed flag, a second close() did nothing,
    so that the lease remained until the end of the process.
    """
    lines = calls.count_lines(calls.Registering)
    for nth in range(lines - 25, lines + 1):
        calls.interrupt_at(calls.Registering, nth)
        gc.collect()


def test_transaction_marker_after_interrupt_applies_all_offsets() -> None:
    """The pending offsets were removed before they were applied. After an interrupt,
    the second marker applied no offset.
    """
    committed = {("t", number): Committed(number, -1, "", 0) for number in range(3)}
    nth = completed = 0
    while not completed:
        nth += 1
        group = Group("g")
        group.unstable[7] = {key: (1, row) for key, row in committed.items()}
        completed = interrupted(
            lambda group=group: group.end_transaction(7, commit=True),  # type: ignore[misc]
            nth,
            classic_group.__file__,
        ).left
        group.end_transaction(7, commit=True)
        assert group.offsets == {
            "t": {partition: committed["t", partition] for partition in range(3)}
        }
        assert not group.unstable
    assert nth > 10
