"""Each coroutine is cancelled at each of its awaits. Then all objects must be usable,
and no record may be lost or duplicated.

A scenario gets a new directory, runs one call that is cancelled at its n-th await, and
checks the result. n rises until the call ends before it is cancelled. Each scenario runs
twice: the call is cancelled when it begins to wait, or after the awaited future is done
and before the call resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from logcore import aio
from logcore.errors import CommitFailedError, LogLockedError, ProducerStateError
from support.cancelling import at_each_await, cancelled

#: A scenario with a directory. It checks the result, and returns whether the call was
#: cancelled.
Scenario = Callable[
    [aio.LogDir, Callable[[Callable[[], Awaitable[Any]]], Awaitable[bool]]],
    Awaitable[bool],
]
ALL = [b"%d" % number for number in range(10)]
STEPS = ["init_transactions", "begin_transaction", "commit_transaction"]


@asynccontextmanager
async def directory(path: Path) -> AsyncIterator[aio.LogDir]:
    async with aio.open_dir(path, create=True, durability="os") as data:
        await data.create_topic("t")
        yield data


def explore(path: Path, scenario: Scenario) -> int:
    """Run a scenario, and return the number of awaits at which its call was cancelled."""

    async def trial_at(nth: int, after_the_future: bool) -> bool:
        async with directory(path / f"{nth}-{after_the_future}") as data:

            async def cancel_at_await(make: Callable[[], Awaitable[Any]]) -> bool:
                was_cancelled, _ = await cancelled(make, nth, late=after_the_future)
                return was_cancelled

            return await scenario(data, cancel_at_await)

    awaits = asyncio.run(at_each_await(trial_at))
    print(f"{path.name}: cancelled at {awaits} awaits, each in two ways")
    return awaits


async def values(data: aio.LogDir) -> list[bytes | None]:
    return [record.value async for record in data.read("t")]


# -- logs and directories --------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["append", "append_many", "append_columns", "append_batch"]
)
def test_cancelled_append_is_stored_completely_or_not_at_all(
    tmp_path: Path, method: str
) -> None:
    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        log = await data.partition("t", 0)
        await log.append(b"0")
        batch = b"".join(log.sync.stored(0, max_bytes=1))
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "append": lambda: log.append(b"0"),
            "append_many": lambda: log.append_many([(None, b"0")]),
            "append_columns": lambda: log.append_columns(values=(b"0", [0, 1])),
            "append_batch": lambda: log.append_batch(batch),
        }
        was_cancelled = await cancel_at_await(calls[method])
        await log.append(b"1")
        stored = await values(data)
        assert stored in ([b"0", b"0", b"1"], [b"0", b"1"][: 2 * was_cancelled])
        return bool(was_cancelled)

    assert explore(tmp_path, scenario) >= 1


def test_cancelled_queued_append_stores_nothing(tmp_path: Path) -> None:
    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        log = await data.partition("t", 0)
        # The thread waits for the lock of the log with the first record. The other records
        # are still queued.
        with log.sync._state.lock:
            first = asyncio.ensure_future(log.append(b"first"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            while log._appending._waiting:
                await asyncio.sleep(0)
            second = asyncio.ensure_future(log.append(b"second"))
            third = asyncio.ensure_future(log.append(b"third"))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
        await asyncio.gather(first, third)
        assert await values(data) == [b"first", b"third"]
        return False

    explore(tmp_path, scenario)


@pytest.mark.parametrize(
    "method",
    [
        "flush",
        "tick",
        "roll",
        "truncate",
        "delete_records",
        "statistics",
        "newest",
        "get",
        "refresh",
        "offset_for_timestamp",
    ],
)
def test_log_continues_after_any_cancelled_call(tmp_path: Path, method: str) -> None:
    arguments = {
        "truncate": (9,),
        "delete_records": (0,),
        "get": (0,),
        "offset_for_timestamp": (0,),
    }

    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        log = await data.partition("t", 0)
        await log.append_many([(None, value) for value in ALL[:9]])
        was_cancelled = await cancel_at_await(
            lambda: getattr(log, method)(*arguments.get(method, ()))
        )
        await log.append(ALL[9])
        assert await values(data) == ALL
        return bool(was_cancelled)

    explore(tmp_path, scenario)


@pytest.mark.parametrize("method", ["read", "tail", "read_topic", "tail_topic"])
def test_reading_continues_at_the_cancelled_position(
    tmp_path: Path, method: str
) -> None:
    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        log = await data.partition("t", 0)
        for value in ALL:
            await log.append(value)
        iterators: dict[str, Callable[[], Any]] = {
            "read": lambda: log.read(0),
            "tail": lambda: log.tail(0, timeout=0),
            "read_topic": lambda: data.read("t"),
        }
        iterator = (
            iterators[method]()
            if method in iterators
            else await data.tail("t", {0: 0}, timeout=0)
        )
        returned: list[bytes] = []

        async def read() -> None:
            async for record in iterator:
                returned.append(record.value)

        was_cancelled = await cancel_at_await(read)
        await read()
        assert returned == ALL
        return bool(was_cancelled)

    assert explore(tmp_path, scenario) >= 1


def test_waiting_tail_continues_after_cancellation(tmp_path: Path) -> None:
    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        log = await data.partition("t", 0)
        tail = log.tail(0)
        returned: list[bytes | None] = []

        async def read() -> None:
            while len(returned) < 3:
                returned.append((await anext(tail)).value)

        async def write() -> None:
            for value in ALL[:3]:
                await log.append(value)

        writing = asyncio.ensure_future(write())
        was_cancelled = await cancel_at_await(read)
        await read()
        await writing
        assert returned == ALL[:3]
        return bool(was_cancelled)

    assert explore(tmp_path, scenario) >= 2


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        "create_topic", "add_partitions", "alter_topic", "partition", "append", "delete_topic", "refresh", "tick",
        "delete_group",
    ],
)  # fmt: skip
def test_directory_continues_after_any_cancelled_call(
    tmp_path: Path, method: str
) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "create_topic": ("u",),
        "add_partitions": ("t", 2),
        "alter_topic": ("t", {"retention.ms": 5}),
        "partition": ("t", 0),
        "append": ("t", b"0"),
        "delete_topic": ("t",),
        "refresh": (),
        "tick": (),
        "delete_group": ("g",),
    }

    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        async with data.consumer(group_id="g") as consumer:
            await consumer.commit({("t", 0): 0})
        was_cancelled = await cancel_at_await(
            lambda: getattr(data, method)(*arguments[method])
        )
        await data.create_topic("v")
        await data.append("v", b"1")
        assert set(data.topics()) <= {"t", "u", "v", "__consumer_offsets"}
        assert [record.value async for record in data.read("v")] == [b"1"]
        return bool(was_cancelled)

    assert explore(tmp_path, scenario) >= 1


@pytest.mark.parametrize("object_type", ["log", "directory"])
def test_object_whose_opening_was_cancelled_is_closed(
    tmp_path: Path, object_type: str
) -> None:
    """A cancelled close is completed: the lock is free at the end."""
    path = tmp_path / "t-0" if object_type == "log" else tmp_path / "d"

    def opening() -> aio.Opening[Any]:
        return (
            aio.open(path, create=True)
            if object_type == "log"
            else aio.open_dir(path, create=True)
        )

    async def open_again() -> Any:
        for _ in range(2_000):
            try:
                return await opening()
            except LogLockedError:  # the object is not closed yet
                await asyncio.sleep(0)
        return await opening()

    async def use_block() -> None:
        while True:
            try:
                async with opening():
                    return
            except LogLockedError:
                # The thread of the previous scenario was still opening the object.
                await asyncio.sleep(0)

    async def scenario(nth: int, after_the_future: bool) -> bool:
        was_cancelled, _ = await cancelled(use_block, nth, late=after_the_future)
        await (await open_again()).close()
        return was_cancelled

    assert asyncio.run(at_each_await(scenario)) >= 2


# -- producers -------------------------------------------------------------------------


def test_cancelled_send_that_waits_for_memory_sends_nothing(tmp_path: Path) -> None:
    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        async with data.producer(linger_ms=0, buffer_memory=700) as producer:
            sent: list[asyncio.Future[Any]] = []

            async def send() -> None:
                for value in ALL:
                    sent.append(await producer.send("t", value * 300))

            was_cancelled = await cancel_at_await(send)
            await producer.flush()
            assert await values(data) == [value * 300 for value in ALL[: len(sent)]]
            assert len(sent) == 10 or was_cancelled
            assert not producer._memory_waiters
            assert not producer._sync._accumulator.waiting
            await producer.send_and_wait("t", b"last")
        return bool(was_cancelled)

    assert explore(tmp_path, scenario) >= 1


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    ["send", "send_and_wait", "send_many", "send_columns", "flush", "close", "open"],
)
def test_producer_continues_after_any_cancelled_call(
    tmp_path: Path, method: str
) -> None:
    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        async def use_block() -> None:
            async with data.producer(linger_ms=0):
                pass

        async with data.producer(linger_ms=0) as producer:
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "send": lambda: producer.send("t", b"0"),
                "send_and_wait": lambda: producer.send_and_wait("t", b"0"),
                "send_many": lambda: producer.send_many("t", [(None, b"0")]),
                "send_columns": lambda: producer.send_columns(
                    "t", values=(b"0", [0, 1])
                ),
                "flush": producer.flush,
                "close": producer.close,
                "open": use_block,
            }
            was_cancelled = await cancel_at_await(calls[method])
            if method != "close":
                await producer.flush()
                await producer.send_and_wait("t", b"1")
        async with data.producer() as another:
            await another.send_and_wait("t", b"2")
        stored = await values(data)
        assert stored[-1:] == [b"2"]
        assert stored.count(b"0") == (method.startswith("send"))
        return bool(was_cancelled)

    # send() waits only for memory.
    assert explore(tmp_path, scenario) >= (method != "send")


def test_cancelled_transaction_is_committed_or_not_and_the_next_begins(
    tmp_path: Path,
) -> None:
    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        async def use_block() -> None:
            async with producer.transaction():
                await (await producer.send("t", b"a"))
                await producer.send("t", b"b")
                await producer.send_offsets_to_transaction({("t", 0): 7}, "g")

        async with data.producer(transactional_id="x") as producer:
            was_cancelled = await cancel_at_await(use_block)
            async with producer.transaction():
                await producer.send("t", b"c")
        log = await data.partition("t", 0)
        committed = [
            record.value async for record in log.read(0, isolation="read_committed")
        ]
        assert committed == [b"a", b"b", b"c"] or (
            was_cancelled and committed == [b"c"]
        )
        async with data.consumer(group_id="g") as consumer:
            stored = await consumer.committed([("t", 0)])
            assert [offset and offset.offset for offset in stored.values()] == [
                7 if b"a" in committed else None
            ]
        return bool(was_cancelled)

    assert explore(tmp_path, scenario) >= 4


@pytest.mark.parametrize("step", [*STEPS, "abort_transaction"])
def test_cancelled_step_of_a_transaction_is_completed(
    tmp_path: Path, step: str
) -> None:
    before = STEPS[: STEPS.index(step)] if step in STEPS else STEPS[:2]

    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        async with data.producer(transactional_id="x") as producer:
            for name in before:
                await getattr(producer, name)()
            was_cancelled = await cancel_at_await(getattr(producer, step))
            # The first call has completed, or completes before this one.
            with pytest.raises(ProducerStateError):
                await getattr(producer, step)()
        return bool(was_cancelled)

    assert explore(tmp_path, scenario) >= 1


@pytest.mark.parametrize("outcome", ["prepare_transaction", "complete_transaction"])
def test_prepared_transaction_is_completed_after_any_cancellation(
    tmp_path: Path, outcome: str
) -> None:
    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        async with data.producer(transactional_id="x") as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send("t", b"a")
            if outcome == "prepare_transaction":
                was_cancelled = await cancel_at_await(producer.prepare_transaction)
                await producer.complete_transaction(
                    await producer.prepare_transaction()
                )
            else:
                prepared = await producer.prepare_transaction()
                was_cancelled = await cancel_at_await(
                    lambda: producer.complete_transaction(prepared)
                )
            await producer.begin_transaction()
            await producer.commit_transaction()
        log = await data.partition("t", 0)
        assert [
            record.value async for record in log.read(0, isolation="read_committed")
        ] == [b"a"]
        return bool(was_cancelled)

    assert explore(tmp_path, scenario) >= 1


# -- consumers -------------------------------------------------------------------------


async def read_remaining(
    consumer: aio.Consumer, returned: list[bytes | None], count: int = 10
) -> None:
    while len(returned) < count:
        returned += [
            record.value
            for record in (await consumer.getmany(timeout=1, max_records=3)).records()
        ]


@pytest.mark.long
@pytest.mark.parametrize("group_id", [None, "g"])
@pytest.mark.parametrize("method", ["getmany", "iteration", "columns", "arrow"])
def test_consumer_returns_each_record_once(
    tmp_path: Path, method: str, group_id: str | None
) -> None:
    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        log = await data.partition("t", 0)
        await log.append_many([(None, value) for value in ALL[:5]])
        returned: list[bytes | None] = []

        async def by_lists() -> None:
            while len(returned) < 10:
                records = await consumer.getmany(timeout=1, max_records=2)
                returned.extend(record.value for record in records.records())

        async def one_by_one() -> None:
            while len(returned) < 10:
                returned.append((await anext(consumer)).value)

        async def by_columns() -> None:
            while len(returned) < 10:
                columns = await consumer.poll_columns(timeout=1)
                returned.extend(
                    record.value
                    for lists in columns.values()
                    for record_list in lists
                    for record in record_list.records()
                )

        async def by_tables() -> None:
            while len(returned) < 10:
                returned.extend(
                    (await consumer.poll_arrow(timeout=1))["value"].to_pylist()
                )

        async def write() -> None:
            for value in ALL[5:]:
                await log.append(value)

        readers = {
            "getmany": by_lists,
            "iteration": one_by_one,
            "columns": by_columns,
            "arrow": by_tables,
        }
        async with data.consumer(
            group_id=group_id, auto_offset_reset="earliest"
        ) as consumer:
            consumer.subscribe(["t"])
            writing = asyncio.ensure_future(write())
            was_cancelled = await cancel_at_await(readers[method])
            await writing
            await read_remaining(consumer, returned)
            assert returned == ALL
            assert consumer.position(("t", 0)) == 10
            assert not (await consumer.getmany()).count
        return bool(was_cancelled)

    assert explore(tmp_path, scenario) >= 3


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        "commit", "committed", "assign", "unsubscribe", "seek_to_beginning", "seek_to_end", "lag", "beginning_offsets",
        "end_offsets", "offsets_for_times", "close", "open",
    ],
)  # fmt: skip
def test_consumer_continues_after_any_cancelled_call(
    tmp_path: Path, method: str
) -> None:
    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        log = await data.partition("t", 0)
        await log.append_many([(None, value) for value in ALL])

        async def use_block() -> None:
            async with data.consumer(group_id="other") as other:
                other.subscribe(["t"])

        async with data.consumer(
            group_id="g", auto_offset_reset="earliest", enable_auto_commit=False
        ) as consumer:
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "commit": consumer.commit,
                "committed": lambda: consumer.committed([("t", 0)]),
                "assign": lambda: consumer.assign([("t", 0)]),
                "unsubscribe": consumer.unsubscribe,
                "seek_to_beginning": lambda: consumer.seek_to_beginning(("t", 0)),
                "seek_to_end": lambda: consumer.seek_to_end(("t", 0)),
                "beginning_offsets": lambda: consumer.beginning_offsets([("t", 0)]),
                "offsets_for_times": lambda: consumer.offsets_for_times({("t", 0): 0}),
                "lag": consumer.lag,
                "end_offsets": lambda: consumer.end_offsets([("t", 0)]),
                "close": consumer.close,
                "open": use_block,
            }
            if method != "assign":
                consumer.subscribe(["t"])
                assert (await consumer.getmany(timeout=1, max_records=4)).count == 4
            was_cancelled = await cancel_at_await(calls[method])
            if method in ("unsubscribe", "assign"):
                await consumer.unsubscribe()
                consumer.subscribe(["t"])
                assert (await consumer.getmany(timeout=1)).count == 10
            elif method.startswith("seek"):
                consumer.seek(("t", 0), 5)  # after the cancelled call
                assert (await consumer.getmany(timeout=1)).count == 5
            elif method != "close":
                assert (await consumer.getmany(timeout=1)).count == 6
                await consumer.commit()
        async with data.consumer(
            group_id="g", auto_offset_reset="earliest"
        ) as consumer:
            consumer.subscribe(["t"])
            await log.append(b"last")
            assert (await consumer.getmany(timeout=1)).count in (1, 11)
        return bool(was_cancelled)

    assert explore(tmp_path, scenario) >= 1


@pytest.mark.long
def test_rebalance_with_a_listener_continues_after_cancellation(tmp_path: Path) -> None:
    """Commits of the listener for a revoked partition are stored, and no record is
    returned twice.
    """

    async def scenario(data: aio.LogDir, cancel_at_await: Any) -> bool:
        await data.add_partitions("t", 2)
        for value in ALL:
            await data.append("t", value, partition=int(value) % 2)
        returned: list[bytes | None] = []

        class Listener(aio.RebalanceListener):
            async def on_partitions_assigned(self, partitions: Any) -> None:
                await asyncio.sleep(0)

            async def on_partitions_revoked(self, partitions: Any) -> None:
                # CommitFailedError: at the end, the other consumer has left the group.
                with contextlib.suppress(CommitFailedError):
                    await first.commit()

        async with data.consumer(
            group_id="g", auto_offset_reset="earliest", enable_auto_commit=False
        ) as first:
            first.subscribe(["t"], listener=Listener())

            async def read(consumer: aio.Consumer) -> None:
                records = await consumer.getmany(max_records=1)
                returned.extend(record.value for record in records.records())

            async def both() -> None:
                while len(second.assignment()) < 1:
                    await read(first)
                    await read(second)

            async with data.consumer(
                group_id="g", auto_offset_reset="earliest", enable_auto_commit=False
            ) as second:
                await read(first)
                second.subscribe(["t"])
                was_cancelled = await cancel_at_await(both)
                while len(returned) < 10:
                    await read(first)
                    await read(second)
        assert sorted(returned) == ALL
        return bool(was_cancelled)

    assert explore(tmp_path, scenario) >= 5


def test_harness_detects_lost_records(tmp_path: Path) -> None:
    """A read that removes a record before its last await loses the record."""
    returned: list[int] = []
    remaining = [1, 2, 3]

    async def read_before_last_await() -> int:
        record = remaining.pop(0)
        await asyncio.sleep(0)
        return record

    async def scenario(nth: int, after_the_future: bool) -> bool:
        remaining[:] = [1, 2, 3]
        returned.clear()
        was_cancelled, record = await cancelled(
            read_before_last_await, nth, late=after_the_future
        )
        returned.extend([] if was_cancelled else [record])
        return was_cancelled and sorted(returned + remaining) == [1, 2, 3]

    assert asyncio.run(at_each_await(scenario)) == 0
    assert sorted(returned + remaining) == [2, 3]
