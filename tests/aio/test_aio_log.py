"""Logs and directories in an event loop: appends that share a batch, followers, and the
loop of each call.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import aio
from logcore.errors import (
    InvalidRecordError,
    LogClosedError,
    LogNotFoundError,
    OffsetConflictError,
    OffsetOutOfRangeError,
    WrongLoopError,
)
from logcore.testing import Fault, FaultPlan, SimulatedDisk


def in_loop(
    path: Path, main: Callable[[aio.Log], Awaitable[None]], **options: object
) -> None:
    async def run() -> None:
        async with aio.open(path / "t-0", create=True, **options) as log:  # type: ignore[arg-type]
            await main(log)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop until the condition is true."""
    while not condition():
        await asyncio.sleep(0)


def test_tasks_that_append_share_batches_and_syncs(tmp_path: Path) -> None:
    async def main(log: aio.Log) -> None:
        receipts = await asyncio.gather(
            *(log.append(b"%d" % number) for number in range(100))
        )
        assert [receipt.offset for receipt in receipts] == list(range(100))
        assert {receipt.last_offset - receipt.offset for receipt in receipts} == {0}
        assert {receipt.durability for receipt in receipts} == {"disk"}
        assert [record.value async for record in log.read(0)] == [
            b"%d" % number for number in range(100)
        ]
        statistics = await log.statistics()
        assert (statistics.appends, statistics.syncs) == (1, 1)

    in_loop(tmp_path, main)


def test_refused_record_does_not_fail_its_batch(
    tmp_path: Path,
) -> None:
    async def main(log: aio.Log) -> None:
        values = [b"0", "text", b"2", b"x" * 2_000_000, b"4"]
        outcomes = await asyncio.gather(
            *(log.append(value) for value in values),  # type: ignore[arg-type]
            return_exceptions=True,
        )
        assert [
            outcome.offset
            if isinstance(outcome, logcore.Receipt)
            else type(outcome).__name__
            for outcome in outcomes
        ] == [0, "InvalidRecordError", 1, "RecordTooLargeError", 2]
        assert [record.value async for record in log.read(0)] == [b"0", b"2", b"4"]

    in_loop(tmp_path, main)


@pytest.mark.parametrize("failing_write", [1, 2, 3])
@pytest.mark.parametrize(
    ("durability", "unit"), [("group", 100_000), ("always", 1_500)]
)
@pytest.mark.parametrize(
    "method", ["value", "bytearray", "memoryview", "key", "headers"]
)
def test_full_disk_refuses_only_unstored_records(
    method: str, durability: str, unit: int, failing_write: int
) -> None:
    """Records that are written together are stored together or not at all, whatever
    type of buffer contains their bytes.
    """
    disk = SimulatedDisk({"data": None})
    rows: list[dict[str, Any]] = []
    for number, units in enumerate((3, 10, 1, 1, 1)):
        data = b"x" * (units * unit)
        row: dict[str, Any] = {
            "value": {"value": data},
            "bytearray": {"value": bytearray(data)},
            "memoryview": {"value": memoryview(data)},
            "key": {"value": None, "key": data},
            "headers": {"value": None, "headers": [("h", data)]},
        }[method]
        rows.append({**row, "timestamp_ms": number})

    async def main() -> None:
        async with aio.open(
            "data/t-0", create=True, fs=disk, durability=durability
        ) as log:
            disk.faults = FaultPlan(
                Fault("pwrite", errno.ENOSPC, path="*.log", at=failing_write)
            )
            outcomes = await asyncio.gather(
                *(log.append(**row) for row in rows), return_exceptions=True
            )
            disk.faults = None
            accepted = [
                number
                for number, outcome in enumerate(outcomes)
                if isinstance(outcome, logcore.Receipt)
            ]
            assert [record.timestamp_ms async for record in log.read(0)] == accepted
            assert len(accepted) < len(rows), "a write failed"

    asyncio.run(main())


def test_appends_keep_their_own_options(tmp_path: Path) -> None:
    async def main(log: aio.Log) -> None:
        receipts = await asyncio.gather(
            log.append(b"a", key=b"k", headers=iter([("h", b"1")]), timestamp_ms=5),
            log.append(b"b", durability="os"),
            log.append(b"c", expected_offset=2),
            log.append(None, expected_offset=2),
            log.append(b"e"),
            return_exceptions=True,
        )
        assert isinstance(receipts[3], OffsetConflictError)
        records = [record async for record in log.read(0)]
        assert [record.value for record in records] == [b"a", b"b", b"c", b"e"]
        assert (records[0].key, records[0].headers, records[0].timestamp_ms) == (
            b"k",
            (("h", b"1"),),
            5,
        )
        assert [getattr(receipt, "durability", None) for receipt in receipts] == [
            "disk",
            "os",
            "disk",
            None,
            "disk",
        ]

    in_loop(tmp_path, main)


def test_expected_offset_is_checked_among_appends_of_other_tasks(
    tmp_path: Path,
) -> None:
    """An append with an expected offset must not share a batch with earlier or later
    appends.
    """

    async def main(log: aio.Log) -> None:
        results = await asyncio.gather(
            log.append(b"a"),
            log.append(b"b", expected_offset=0),
            return_exceptions=True,
        )
        assert isinstance(results[1], OffsetConflictError)
        results = await asyncio.gather(
            log.append(b"c", expected_offset=0), log.append(b"d"), log.append(b"e", expected_offset=2),
            return_exceptions=True,
        )  # fmt: skip
        assert [isinstance(result, OffsetConflictError) for result in results] == [
            True,
            False,
            False,
        ]
        assert [record.value async for record in log.read(0)] == [b"a", b"d", b"e"]

    in_loop(tmp_path, main)


def test_calls_run_after_earlier_appends(tmp_path: Path) -> None:
    async def main(log: aio.Log) -> None:
        appending = [
            asyncio.ensure_future(log.append(b"v", durability="os")) for _ in range(3)
        ]
        await asyncio.sleep(0)
        await log.flush()
        assert log.durable_end_offset == 3
        assert [receipt.offset for receipt in await asyncio.gather(*appending)] == [
            0,
            1,
            2,
        ]
        closing = asyncio.ensure_future(log.append(b"last"))
        await asyncio.sleep(0)
        await log.close()
        assert (await closing).offset == 3
        with pytest.raises(LogClosedError):
            await log.append(b"late")

    in_loop(tmp_path, main)


def test_append_does_not_overtake_an_earlier_call(tmp_path: Path) -> None:
    async def main(log: aio.Log) -> None:
        with log.sync._state.lock:  # the first append waits in the thread
            appending = [asyncio.ensure_future(log.append(b"0"))]
            await asyncio.sleep(0)
            await until(lambda: not log._appending._waiting)
            appending.append(asyncio.ensure_future(log.append_many([(None, b"1")])))
            await asyncio.sleep(0)
            appending.append(asyncio.ensure_future(log.append(b"2")))
            await asyncio.sleep(0)
        await asyncio.gather(*appending)
        assert [record.value async for record in log.read(0)] == [b"0", b"1", b"2"]

    in_loop(tmp_path, main)


def test_other_methods_of_a_log_run_in_the_loop(tmp_path: Path) -> None:
    async def main(log: aio.Log) -> None:
        assert (
            await log.append_many((None, b"%d" % number) for number in range(3))
        ).last_offset == 2
        assert (await log.append_columns(values=(b"ab", [0, 1, 2]))).last_offset == 4
        assert (
            await log.append_batch(b"".join(log.sync.stored(0, max_bytes=1 << 20)))
        ).last_offset == 9
        assert (await log.get(7)).value == b"2"
        assert await log.offset_for_timestamp(0) == 0
        newest = await log.newest()
        assert newest is not None
        await log.roll()
        assert await log.delete_records(5) == 5
        await log.truncate(8)
        assert (log.log_start_offset, log.log_end_offset, log.high_watermark) == (
            5,
            8,
            8,
        )
        assert await log.tick() in (True, False)
        assert not log.has_failed
        assert not log.is_closed
        assert log.path == str(tmp_path / "t-0")
        assert log.config.segment_bytes > 0
        with pytest.raises(InvalidRecordError):
            await log.append_many(5)  # type: ignore[arg-type]

    in_loop(tmp_path, main)


def test_tail_returns_existing_and_later_records(tmp_path: Path) -> None:
    async def main(log: aio.Log) -> None:
        await log.append_many([(None, b"0"), (None, b"1")])
        tail = log.tail(1)
        assert (await anext(tail)).value == b"1"
        waiting = asyncio.ensure_future(anext(tail))
        await asyncio.sleep(0)
        await log.append(b"2")
        assert (await waiting).value == b"2"
        assert [record.value async for record in log.tail(0, timeout=0)] == [
            b"0",
            b"1",
            b"2",
        ]
        assert [record async for record in log.tail(timeout=0)] == []
        with pytest.raises(OffsetOutOfRangeError):
            log.tail(9)

    in_loop(tmp_path, main)


def test_tail_wakes_for_appends_in_other_threads_and_for_close(
    tmp_path: Path,
) -> None:
    async def main(log: aio.Log) -> None:
        values: list[bytes | None] = []

        async def follow() -> None:
            async for record in log.tail(0):
                values.append(record.value)

        tasks = [asyncio.create_task(follow()) for _ in range(3)]
        for number in range(5):
            await asyncio.to_thread(log.sync.append, b"%d" % number)
        await until(lambda: len(values) == 15)
        assert sorted(values) == sorted(3 * [b"%d" % number for number in range(5)])
        await log.close()
        await asyncio.gather(*tasks)

    in_loop(tmp_path, main)


def test_tails_of_one_log_share_one_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tails have no thread."""
    watched = []
    watch = logcore.fs.OS.watch
    monkeypatch.setattr(
        logcore.fs.OS, "watch", lambda *paths: watched.append(paths) or watch(*paths)
    )

    async def main() -> None:
        async with aio.open(tmp_path / "t-0", read_only=True) as log:
            tails = [asyncio.ensure_future(anext(log.tail())) for _ in range(20)]
            before = threading.active_count()
            await until(lambda: bool(watched))
            writer.append(b"v")
            records = await asyncio.gather(*tails)
            assert [record.value for record in records] == [b"v"] * 20
            assert threading.active_count() == before

    with logcore.open(tmp_path / "t-0", create=True) as writer:
        asyncio.run(main())
    assert len(watched) == 1


def test_tail_polls_without_a_file_handle() -> None:
    disk = SimulatedDisk()

    async def main() -> None:
        async with aio.open("d/t-0", read_only=True, fs=disk) as log:
            waiting = asyncio.ensure_future(anext(log.tail()))
            await asyncio.sleep(0)
            writer.append(b"v")
            assert (await waiting).value == b"v"

    with logcore.open("d/t-0", create=True, fs=disk) as writer:
        asyncio.run(main())


def test_abandoned_tail_has_no_listener(tmp_path: Path) -> None:
    async def main(log: aio.Log) -> None:
        waiting = asyncio.ensure_future(anext(log.tail()))
        await until(lambda: bool(log.sync._state.listeners))
        waiting.cancel()
        for _ in range(3):
            await log.append(b"v")
            await asyncio.sleep(0)
        assert log.sync._state.listeners == ()

    in_loop(tmp_path, main)


def test_truncation_ends_a_tail_with_an_error(tmp_path: Path) -> None:
    async def main(log: aio.Log) -> None:
        await log.append_many([(None, b"v")] * 4)
        tail = log.tail(0)
        for _ in range(4):
            await anext(tail)
        waiting = asyncio.ensure_future(anext(tail))
        await asyncio.sleep(0)
        await log.truncate(2)
        with pytest.raises(OffsetOutOfRangeError):
            await waiting
        with pytest.raises(StopAsyncIteration):
            await anext(tail)

    in_loop(tmp_path, main)


def test_other_tasks_run_while_a_log_is_read(tmp_path: Path) -> None:
    async def main(log: aio.Log) -> None:
        await log.append_many([(None, b"x" * 1_000)] * 5_000)
        run_count = 0

        async def count() -> None:
            nonlocal run_count
            while True:
                await asyncio.sleep(0)
                run_count += 1

        counting = asyncio.create_task(count())
        assert len([record async for record in log.read(0)]) == 5_000
        counting.cancel()
        assert run_count >= 10

    in_loop(tmp_path, main)


def test_committed_records_are_read_in_an_event_loop(tmp_path: Path) -> None:
    async def main(log: aio.Log) -> None:
        await log.append(b"v")
        assert [
            record.value async for record in log.read(0, isolation="read_committed")
        ] == [b"v"]
        with pytest.raises(OffsetOutOfRangeError):
            log.read(7)
        with pytest.raises(OffsetOutOfRangeError):
            await anext(log.read(7, isolation="read_committed"))

    in_loop(tmp_path, main)


def test_another_loop_is_refused(tmp_path: Path) -> None:
    async def make() -> aio.Log:
        return await aio.open(tmp_path / "t-0", create=True)

    async def use(log: aio.Log) -> None:
        for call in (log.append(b"v"), log.flush(), log.get(0), log.close()):
            with pytest.raises(WrongLoopError):
                await call
        with pytest.raises(WrongLoopError):
            log.tail()
        with pytest.raises(WrongLoopError):
            log.read(0)

    log = asyncio.run(make())
    asyncio.run(use(log))
    with pytest.raises(WrongLoopError):
        log.tail()
    log.sync.close()


def test_errors_of_opening_are_raised_in_the_task(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(LogNotFoundError):
            await aio.open(tmp_path / "t-0")
        with pytest.raises(LogNotFoundError):
            async with aio.open_dir(tmp_path / "d"):
                pass

    asyncio.run(main())


def test_directory_methods_work_in_a_loop(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open_dir(tmp_path / "d", create=True) as data:
            await data.create_topic("t", 2)
            assert data.topics() == ["t"]
            assert data.partitions("t") == (0, 1)
            assert "t" in data
            receipts = await asyncio.gather(
                *(data.append("t", b"v", partition=1) for _ in range(10))
            )
            assert [receipt.offset for receipt in receipts] == list(range(10))
            log = await data.partition("t", 1)
            assert log is await data.partition("t", 1)
            await data.append("t", b"a", key=b"k")
            tail = await data.tail("t")
            waiting = asyncio.ensure_future(anext(tail))
            await asyncio.sleep(0)
            await data.append("t", b"new", partition=0)
            assert (await waiting).value == b"new"
            records = [
                (record.partition, record.value) async for record in data.read("t")
            ]
            assert len(records) == 12
            await data.add_partitions("t", 3)
            await data.alter_topic("t", {"retention.ms": 5})
            await data.tick()
            await data.refresh()
            assert data.incidents() == ()
            assert data.path == str(tmp_path / "d")
            await data.delete_topic("t")
            assert data.topics() == []
        with pytest.raises(LogClosedError):
            await log.append(b"late")
        with pytest.raises(LogClosedError):
            data.topics()
        await data.close()

    asyncio.run(main())
