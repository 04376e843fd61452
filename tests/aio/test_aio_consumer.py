"""Consumers in an event loop: steps and reads, listeners that are coroutines, groups, and
writes of other processes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import aio
from logcore.consumer import OffsetAndMetadata, RebalanceListener, TopicPartition
from logcore.errors import (
    ConsumerStateError,
    InvalidConfigError,
    NoOffsetError,
    ReadOnlyLogError,
    WakeupError,
    WrongLoopError,
)

ONE = TopicPartition("t", 0)


def with_consumer(
    path: Path,
    main: Callable[[aio.LogDir, aio.Consumer], Awaitable[None]],
    **settings: Any,
) -> None:
    async def run() -> None:
        async with aio.open_dir(path / "d", create=True, durability="os") as data:
            await data.create_topic("t", 2)
            async with data.consumer(
                **{"auto_offset_reset": "earliest", **settings}
            ) as consumer:
                await main(data, consumer)

    asyncio.run(run())


async def fill(data: aio.LogDir, partition: int, count: int) -> None:
    for number in range(count):
        await data.append("t", b"%d" % number, partition=partition)


def offsets(records: Any) -> list[tuple[int, int]]:
    return [(record.partition, record.offset) for record in records.records()]


async def read_offsets(consumer: aio.Consumer, count: int) -> list[tuple[int, int]]:
    returned: list[tuple[int, int]] = []
    while len(returned) < count:
        returned += offsets(await consumer.getmany(timeout=60))
    return returned


def test_group_reads_commits_and_continues(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 5)
        consumer.subscribe(["t"])
        assert offsets(await consumer.getmany(max_records=3)) == [
            (0, 0),
            (0, 1),
            (0, 2),
        ]
        assert consumer.assignment() == {ONE, TopicPartition("t", 1)}
        assert consumer.subscription() == {"t"}
        assert consumer.position(ONE) == 3
        await consumer.commit()
        assert offsets(await consumer.getmany()) == [(0, 3), (0, 4)]
        assert (await consumer.committed([ONE]))[ONE] == OffsetAndMetadata(3)
        await consumer.commit({ONE: OffsetAndMetadata(4, "note")})
        assert (await consumer.committed([ONE]))[ONE] == OffsetAndMetadata(4, "note")
        assert consumer.group_metadata().group_id == "g"
        await consumer.unsubscribe()
        assert consumer.assignment() == frozenset()
        consumer.subscribe(pattern="t.*")
        assert await read_offsets(consumer, 1) == [(0, 4)]

    with_consumer(tmp_path, main, group_id="g", enable_auto_commit=False)


def test_positions_are_set_and_returned(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 5)
        await consumer.assign([ONE])
        await consumer.seek_to_end()
        assert consumer.position(ONE) == 5
        assert await consumer.lag() == 0
        await consumer.seek_to_beginning(ONE)
        assert await consumer.lag(ONE) == 5
        consumer.seek(ONE, 3)
        assert offsets(await consumer.getmany()) == [(0, 3), (0, 4)]
        assert await consumer.beginning_offsets([ONE]) == {ONE: 0}
        assert await consumer.end_offsets([ONE]) == {ONE: 5}
        assert await consumer.offsets_for_times({ONE: 0}) == {ONE: 0}
        consumer.pause(ONE)
        assert consumer.paused() == {ONE}
        consumer.seek(ONE, 0)
        assert not await consumer.getmany()
        consumer.resume(ONE)
        assert offsets(await consumer.getmany()) == [(0, number) for number in range(5)]
        with pytest.raises(ConsumerStateError):
            consumer.seek(("t", 1), 0)
        with pytest.raises(InvalidConfigError):
            consumer.seek(ONE, -1)
        with pytest.raises(InvalidConfigError):
            await consumer.getmany(timeout=-1)

    with_consumer(tmp_path, main)


def test_iteration_waits_for_records_and_ends_with_wakeup(
    tmp_path: Path,
) -> None:
    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 300)
        consumer.subscribe(["t"])
        returned = []

        async def read() -> None:
            async for record in consumer:
                returned.append(record.offset)
                assert consumer.position(ONE) == record.offset + 1

        reading_task = asyncio.ensure_future(read())
        while len(returned) < 300:
            await asyncio.sleep(0)
        await fill(data, 0, 2)
        while len(returned) < 302:
            await asyncio.sleep(0)
        await asyncio.to_thread(consumer.wakeup)
        await reading_task
        assert returned == list(range(302))
        consumer.wakeup()
        with pytest.raises(WakeupError):
            await consumer.getmany(timeout=60)

    with_consumer(tmp_path, main)


def test_lists_and_the_iteration_alternate(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 300)
        await consumer.assign([ONE])
        assert [(await anext(consumer)).offset for _ in range(2)] == [0, 1]
        assert offsets(await consumer.getmany(max_records=2)) == [(0, 2), (0, 3)]
        assert (await anext(consumer)).offset == 4
        columns = await consumer.poll_columns()
        assert sum(len(chunk) for chunk in columns[ONE]) == 295
        assert consumer.position(ONE) == 300

    with_consumer(tmp_path, main)


def test_finished_records_are_committed_at_the_end(tmp_path: Path) -> None:
    """If an exception ends the block, the last returned list is not committed."""

    async def run() -> None:
        async with aio.open_dir(tmp_path / "d", create=True, durability="os") as data:
            await data.create_topic("t")
            await fill(data, 0, 4)

            async def read(count: int, *, fails: bool = False) -> list[tuple[int, int]]:
                async with data.consumer(
                    group_id="g", auto_offset_reset="earliest"
                ) as consumer:
                    consumer.subscribe(["t"])
                    returned = offsets(await consumer.getmany(max_records=count))
                    if fails:
                        raise ZeroDivisionError
                    return returned

            assert await read(1) == [(0, 0)]
            with pytest.raises(ZeroDivisionError):
                await read(1, fails=True)
            assert await read(2) == [(0, 1), (0, 2)]
            assert await read(2) == [(0, 3)]

    asyncio.run(run())


class RecordingListener(aio.RebalanceListener):
    def __init__(self) -> None:
        self.events: list[tuple[str, list[int]]] = []
        self.consumer: aio.Consumer | None = None

    async def on_partitions_assigned(
        self, partitions: frozenset[TopicPartition]
    ) -> None:
        assert self.consumer is not None
        self.events.append(
            ("assigned", sorted(partition.partition for partition in partitions))
        )
        for partition in sorted(partitions):
            self.consumer.seek(partition, 1)
        with pytest.raises(ConsumerStateError):
            await self.consumer.getmany()
        with pytest.raises(ConsumerStateError):
            await self.consumer.close()
        with pytest.raises(ConsumerStateError):
            self.consumer.subscribe(["t"])

    async def on_partitions_revoked(
        self, partitions: frozenset[TopicPartition]
    ) -> None:
        assert self.consumer is not None
        await asyncio.sleep(0)
        await self.consumer.commit(dict.fromkeys(partitions, 2))
        self.events.append(
            ("revoked", sorted(partition.partition for partition in partitions))
        )


def test_listeners_may_be_coroutines_that_seek_and_commit(tmp_path: Path) -> None:
    listener = RecordingListener()

    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 3)
        listener.consumer = consumer
        consumer.subscribe(["t"], listener=listener)
        assert offsets(await consumer.getmany()) == [(0, 1), (0, 2)]
        await consumer.unsubscribe()
        assert listener.events == [("assigned", [0, 1]), ("revoked", [0, 1])]
        assert (await consumer.committed([ONE]))[ONE] == OffsetAndMetadata(2)

    with_consumer(tmp_path, main, group_id="g", enable_auto_commit=False)


def test_task_of_a_listener_may_outlive_it(tmp_path: Path) -> None:
    tasks: list[asyncio.Task[None]] = []
    is_over = []

    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        async def seek_later() -> None:
            while not is_over:
                await asyncio.sleep(0)
            await consumer.commit({ONE: 7})

        class TaskStartingListener(aio.RebalanceListener):
            async def on_partitions_assigned(
                self, partitions: frozenset[TopicPartition]
            ) -> None:
                tasks.append(asyncio.create_task(seek_later()))

        consumer.subscribe(["t"], listener=TaskStartingListener())
        await consumer.getmany()
        is_over.append(True)
        await tasks[0]
        assert (await consumer.committed([ONE]))[ONE] == OffsetAndMetadata(7)

    with_consumer(tmp_path, main, group_id="g", enable_auto_commit=False)


def test_listeners_of_the_synchronous_consumer_are_accepted(tmp_path: Path) -> None:
    events: list[str] = []
    loop_thread = threading.get_ident()

    class SynchronousListener(RebalanceListener):
        def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
            assert threading.get_ident() == loop_thread
            events.append("assigned")

        def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
            events.append("revoked")
            if len(events) == 2:
                raise ZeroDivisionError

    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        consumer.subscribe(["t"], listener=SynchronousListener())
        await consumer.getmany()
        assert events == ["assigned"]
        with pytest.raises(ZeroDivisionError):
            await consumer.unsubscribe()

    with_consumer(tmp_path, main, group_id="g")


def test_two_tasks_divide_the_partitions_of_a_group(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 50)
        await fill(data, 1, 50)
        returned: list[tuple[int, int]] = []

        async def consume(member: aio.Consumer) -> None:
            member.subscribe(["t"])
            while len(returned) < 100:
                for record in (
                    await member.getmany(timeout=0.05, max_records=1)
                ).records():
                    returned.append((record.partition, record.offset))

        async with data.consumer(group_id="g", auto_offset_reset="earliest") as other:
            await asyncio.gather(consume(consumer), consume(other))
            assert sorted(returned) == [
                (partition, offset) for partition in (0, 1) for offset in range(50)
            ]

    with_consumer(tmp_path, main, group_id="g")


def test_one_task_at_a_time_reads(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await consumer.assign([ONE])
        waiting = asyncio.ensure_future(consumer.getmany(timeout=60))
        await asyncio.sleep(0)
        with pytest.raises(ConsumerStateError):
            await consumer.getmany()
        with pytest.raises(ConsumerStateError):
            await anext(consumer)
        await fill(data, 0, 1)
        assert offsets(await waiting) == [(0, 0)]

    with_consumer(tmp_path, main)


def test_seek_wakes_the_task_that_reads(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 3)
        await consumer.assign([ONE])
        assert await read_offsets(consumer, 3) == [(0, 0), (0, 1), (0, 2)]
        waiting = asyncio.ensure_future(consumer.getmany(timeout=60))
        for _ in range(5):
            await asyncio.sleep(0)
        consumer.seek(ONE, 2)
        assert offsets(await waiting) == [(0, 2)]

    with_consumer(tmp_path, main)


def test_seek_after_a_cancelled_step_takes_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step sets the initial position of the partition. It is completed before seek()
    takes effect, although its task was cancelled.
    """

    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 5)
        await consumer.assign([ONE])
        groups = consumer._sync._groups
        assert groups is not None
        committed = groups.committed
        has_begun = threading.Event()
        may_continue = threading.Event()

        def slowly(group_id: str) -> Any:
            has_begun.set()
            may_continue.wait()
            return committed(group_id)

        monkeypatch.setattr(groups, "committed", slowly)
        reading_task = asyncio.ensure_future(consumer.getmany())
        while not has_begun.is_set():
            await asyncio.sleep(0)
        reading_task.cancel()
        await asyncio.gather(reading_task, return_exceptions=True)
        consumer.seek(ONE, 3)
        consumer.pause(ONE)
        may_continue.set()
        consumer.resume(ONE)
        assert await read_offsets(consumer, 2) == [(0, 3), (0, 4)]

    with_consumer(tmp_path, main, group_id="g")


def test_seek_while_columns_are_read_takes_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 5)
        await consumer.assign([ONE])
        find = consumer._sync.fetcher.find_columns
        has_begun = threading.Event()
        may_continue = threading.Event()

        def slowly(max_bytes: int) -> Any:
            columns = find(max_bytes)
            has_begun.set()
            may_continue.wait()
            return columns

        monkeypatch.setattr(consumer._sync.fetcher, "find_columns", slowly)
        reading_task = asyncio.ensure_future(consumer.poll_columns(timeout=60))
        while not has_begun.is_set():
            await asyncio.sleep(0)
        consumer.seek(ONE, 3)
        may_continue.set()
        assert [
            offset
            for chunk in (await reading_task)[ONE]
            for offset in chunk.offsets.tolist()
        ] == [3, 4]
        assert consumer.position(ONE) == 5

    with_consumer(tmp_path, main)


def test_large_records_are_read_in_chunks(tmp_path: Path) -> None:
    """A call of getmany() returns about 1 MiB, even if max_records allows more. Other
    tasks run between two calls.
    """

    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        log = await data.partition("t", 0)
        for _ in range(10):
            await log.append_many([(None, b"x" * 100_000)] * 10)
        await consumer.assign([ONE])
        counts = []
        while sum(counts) < 100:
            counts.append((await consumer.getmany(max_records=1_000)).count)
        assert max(counts) <= 16

    with_consumer(tmp_path, main)


def test_group_is_refused_in_a_read_only_directory(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open_dir(tmp_path / "d", read_only=True) as data:
            with pytest.raises(ReadOnlyLogError):
                await data.consumer(group_id="g")

    with logcore.open_dir(tmp_path / "d", create=True):
        asyncio.run(main())


def test_reader_wakes_for_another_writer(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            aio.open_dir(tmp_path / "d", read_only=True) as data,
            data.consumer() as consumer,
        ):
            await consumer.assign([ONE])
            assert not await consumer.getmany()
            reading_task = asyncio.ensure_future(consumer.getmany(timeout=60))
            while not consumer._directory_watch._watched[0]:
                await asyncio.sleep(0)
            writer.append("t", b"v")
            assert offsets(await reading_task) == [(0, 0)]

    with logcore.open_dir(tmp_path / "d", create=True) as writer:
        writer.create_topic("t")
        asyncio.run(main())


def test_group_works_in_a_shared_directory(tmp_path: Path) -> None:
    """A check may wait for the lock of another process, so that it runs in the
    thread.
    """

    async def main() -> None:
        async with aio.open_dir(
            tmp_path / "d", create=True, shared=True, durability="os"
        ) as data:
            await data.create_topic("t")
            await fill(data, 0, 10)
            async with data.consumer(
                group_id="g", auto_offset_reset="earliest"
            ) as consumer:
                consumer.subscribe(["t"])
                reading_task = asyncio.ensure_future(read_offsets(consumer, 20))
                log = await data.partition("t", 0)
                tail = log.tail(0)
                await fill(data, 0, 10)
                assert [(await anext(tail)).offset for _ in range(20)] == list(
                    range(20)
                )
                assert await reading_task == [(0, offset) for offset in range(20)]

    asyncio.run(main())


def test_idle_consumer_of_a_shared_directory_waits_for_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle consumer checked its group every 50 ms."""

    async def main() -> None:
        async with (
            aio.open_dir(tmp_path / "d", create=True, shared=True) as data,
            data.consumer(group_id="g", auto_offset_reset="earliest") as consumer,
        ):
            await data.create_topic("t")
            await fill(data, 0, 1)
            consumer.subscribe(["t"])
            await read_offsets(consumer, 1)
            wait_for_wakeup = consumer._wakeups.wait

            async def end_at_a_long_wait(seconds: float | None) -> bool:
                if seconds is None or seconds > 0.1:
                    consumer.wakeup()
                return await wait_for_wakeup(seconds)

            monkeypatch.setattr(consumer._wakeups, "wait", end_at_a_long_wait)
            with pytest.raises(WakeupError):
                await consumer.getmany(timeout=60)

    asyncio.run(main())


def test_change_during_a_check_causes_another_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No task waits for events while a check runs in the thread."""
    calls: list[str] = []

    async def main() -> None:
        async with (
            aio.open_dir(tmp_path / "d", create=True, shared=True) as data,
            data.consumer() as consumer,
        ):
            await data.create_topic("t")
            await consumer.assign([ONE])
            await consumer.getmany()
            step = consumer._sync.step
            wait_for_wakeup = consumer._wakeups.wait

            def step_with_change() -> None:
                step()
                calls.append("check")
                if len(calls) == 2:  # the first check starts the watch
                    consumer._loop.call_soon_threadsafe(consumer._wakeups.wake)

            async def wait_or_end(seconds: float | None) -> bool:
                calls.append("wait")
                consumer.wakeup()
                return await wait_for_wakeup(seconds)

            monkeypatch.setattr(consumer._sync, "step", step_with_change)
            monkeypatch.setattr(consumer._wakeups, "wait", wait_or_end)
            with pytest.raises(WakeupError):
                await consumer.getmany(timeout=60)

    asyncio.run(main())
    assert calls[:4] == ["check", "check", "check", "wait"]


def test_records_are_copied_between_topics_exactly_once(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await data.create_topic("doubled")
        await fill(data, 0, 10)
        consumer.subscribe(["t"])
        async with data.producer(transactional_id="doubler") as producer:
            count = 0
            while count < 10:
                records = await consumer.getmany(timeout=60, max_records=4)
                async with producer.transaction():
                    for record in records.records():
                        await producer.send("doubled", record.value * 2)
                    await producer.send_offsets_to_transaction(
                        records.next_offsets(), consumer.group_metadata()
                    )
                count += records.count
        values = [record.value async for record in data.read("doubled")]
        assert values == [b"%d" % number * 2 for number in range(10)]
        assert (await consumer.committed([ONE]))[ONE] == OffsetAndMetadata(10)

    with_consumer(
        tmp_path,
        main,
        group_id="g",
        enable_auto_commit=False,
        isolation_level="read_committed",
    )


def test_errors_of_a_consumer_are_raised_in_the_task(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        with pytest.raises(ConsumerStateError):
            await consumer.getmany()
        with pytest.raises(ConsumerStateError):
            await consumer.commit({ONE: 0})
        await consumer.assign([ONE])
        with pytest.raises(NoOffsetError):
            await consumer.getmany()
        with pytest.raises(InvalidConfigError):
            data.consumer(group="g")  # type: ignore[call-arg]
        waiting = asyncio.ensure_future(consumer.getmany(timeout=60))
        consumer.seek(ONE, 0)
        for _ in range(3):
            await asyncio.sleep(0)
        await consumer.close()
        with pytest.raises(ConsumerStateError):
            await waiting
        with pytest.raises(ConsumerStateError):
            await consumer.getmany()

    with_consumer(tmp_path, main, auto_offset_reset="none")


def test_another_loop_is_refused(tmp_path: Path) -> None:
    async def use(consumer: aio.Consumer) -> None:
        for call in (
            consumer.getmany(),
            consumer.commit(),
            anext(consumer),
            consumer.close(),
        ):
            with pytest.raises(WrongLoopError):
                await call
        with pytest.raises(WrongLoopError):
            consumer.assignment()

    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await asyncio.to_thread(asyncio.run, use(consumer))

    with_consumer(tmp_path, main)


def test_iteration_ends_after_consumer_timeout(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 3)
        consumer.subscribe(["t"])
        assert [record.offset async for record in consumer] == [0, 1, 2]

    with_consumer(tmp_path, main, consumer_timeout_ms=0)


def test_offsets_in_the_registry_are_committed_and_found(tmp_path: Path) -> None:
    """A consumer of an event loop was created without the registry, so that its first
    commit failed with an AssertionError.
    """

    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 3)
        consumer.subscribe(["t"])
        assert await read_offsets(consumer, 3) == [(0, 0), (0, 1), (0, 2)]
        await consumer.commit()
        assert (await consumer.committed([ONE]))[ONE] == OffsetAndMetadata(3)

    with_consumer(
        tmp_path,
        main,
        config={"group.id": "g"},
        offsets_storage="registry",
        enable_auto_commit=False,
    )


def test_queued_commits_are_stored_by_the_next_step(tmp_path: Path) -> None:
    completions: list[tuple[Exception | None, dict[TopicPartition, int], bool]] = []

    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        loop = asyncio.get_running_loop()

        def record_commit(error: Exception | None, offsets: Any) -> None:
            is_in_loop = asyncio.get_running_loop() is loop
            completions.append(
                (
                    error,
                    {partition: offset.offset for partition, offset in offsets.items()},
                    is_in_loop,
                )
            )

        await fill(data, 0, 3)
        consumer.subscribe(["t"])
        assert await read_offsets(consumer, 3) == [(0, 0), (0, 1), (0, 2)]
        consumer.commit_async({ONE: 1}, record_commit)
        consumer.commit_async({ONE: 2}, record_commit)
        assert completions == []
        await consumer.commit({TopicPartition("t", 1): 0}, timeout=1)
        await asyncio.sleep(0)
        assert completions == [(None, {ONE: 1}, True), (None, {ONE: 2}, True)]
        assert (await consumer.committed([ONE]))[ONE] == OffsetAndMetadata(2)
        consumer.commit_async(callback=record_commit)
        await consumer.close()
        while len(completions) < 3:
            await asyncio.sleep(0)
        assert completions[2][:2] == (None, {ONE: 3, TopicPartition("t", 1): 0})

    with_consumer(tmp_path, main, group_id="g", enable_auto_commit=False)


def test_poll_arrow_returns_a_table(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")

    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 3)
        consumer.subscribe(["t"])
        table = await consumer.poll_arrow()
        assert table.column("offset").to_pylist() == [0, 1, 2]
        assert consumer.metrics().records == 3
        assert consumer.topics() == ["t"]
        assert consumer.partitions_for("t") == (0, 1)

    with_consumer(tmp_path, main)


def test_commit_stores_the_positions_at_its_call(tmp_path: Path) -> None:
    """The loop may read more records before the thread executes the commit."""

    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 3)
        await consumer.assign([ONE])
        assert (await consumer.getmany(max_records=1)).count == 1
        gate = threading.Event()
        consumer._loop_thread.submit(gate.wait)
        # The thread is blocked, and reads must not need it.
        consumer._next_step_s = float("inf")
        committing = asyncio.ensure_future(consumer.commit())
        await asyncio.sleep(0)
        assert (await consumer.getmany(max_records=1)).count == 1
        gate.set()
        await committing
        assert (await consumer.committed([ONE]))[ONE] == OffsetAndMetadata(1)

    with_consumer(tmp_path, main, group_id="g", enable_auto_commit=False)


@pytest.mark.parametrize("method", ["getmany", "poll_columns"])
def test_read_finishes_the_records_of_the_previous_call(
    tmp_path: Path, method: str
) -> None:
    """If an exception ends the block, the finished records are committed, and the records
    returned last are not.
    """

    async def main(data: aio.LogDir, consumer: aio.Consumer) -> None:
        await fill(data, 0, 2)
        arguments = {"max_records": 1} if method == "getmany" else {"max_bytes": 1}
        with pytest.raises(ZeroDivisionError):
            async with consumer:
                await consumer.assign([ONE])
                await getattr(consumer, method)(**arguments)
                reached = consumer.position(ONE)
                await data.append("t", b"2", partition=0)
                await getattr(consumer, method)(**arguments)
                raise ZeroDivisionError
        async with data.consumer(group_id="g") as other:
            assert (await other.committed([ONE]))[ONE] == OffsetAndMetadata(reached)

    with_consumer(tmp_path, main, group_id="g")
