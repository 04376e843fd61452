"""Producers in an event loop: futures of the loop, full memory, transactions, and loops
that end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from logcore import aio
from logcore.errors import (
    BufferFullError,
    InvalidConfigError,
    InvalidRecordError,
    ProducerClosedError,
    ProducerStateError,
    RecordTooLargeError,
    TopicNotFoundError,
    WrongLoopError,
)
from logcore.producer import ProducerInterceptor, ProducerRecord, RecordMetadata


def with_producer(
    path: Path,
    main: Callable[[aio.LogDir, aio.Producer], Awaitable[None]],
    **settings: Any,
) -> None:
    async def run() -> None:
        async with aio.open_dir(path / "d", create=True, durability="os") as data:
            await data.create_topic("t", 2)
            async with data.producer(**{"linger_ms": 0, **settings}) as producer:
                await main(data, producer)

    asyncio.run(run())


async def values(data: aio.LogDir, **options: Any) -> list[bytes | None]:
    return [record.value async for record in data.read("t", **options)]


def test_futures_contain_the_metadata_of_records(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        futures = [
            await producer.send("t", b"%d" % number, partition=number % 2)
            for number in range(1_000)
        ]
        metadata = await asyncio.gather(*futures)
        assert [
            (record_metadata.partition, record_metadata.offset)
            for record_metadata in metadata
        ] == [(number % 2, number // 2) for number in range(1_000)]
        assert all(
            isinstance(record_metadata, RecordMetadata) for record_metadata in metadata
        )
        assert (
            await producer.send_and_wait("t", b"last", key=b"k")
        ).serialized_key_size == 1
        assert producer.metrics().records == 1_001
        assert producer.partitions_for("t") == (0, 1)
        with pytest.raises(TopicNotFoundError):
            await producer.send("other", b"v")
        with pytest.raises(InvalidRecordError):
            await producer.send("t", 5)

    with_producer(tmp_path, main)


def test_batch_is_delivered_to_the_loop_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        reported = []
        report = producer._loop_thread.post_to_loop
        monkeypatch.setattr(
            producer._loop_thread,
            "post_to_loop",
            lambda function: reported.append(function) or report(function),
        )
        futures = [await producer.send("t", b"v", partition=0) for _ in range(1_000)]
        await producer.flush()
        await asyncio.gather(*futures)
        batch_reports = [
            function for function in reported if function.func == producer._complete
        ]
        assert len(batch_reports) == producer.metrics().batches == 1

    with_producer(
        tmp_path, main, linger_ms=60_000, batch_size=100_000, delivery_timeout_ms=60_000
    )


def test_split_batch_completes_all_its_futures(tmp_path: Path) -> None:
    """One record of the batch is too large for the topic, which is detected only when the
    batch is written.
    """

    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        await data.alter_topic("t", {"max.message.bytes": 1_000})
        sizes = [10, 10, 2_000, 10, 10]
        futures = [await producer.send("t", b"x" * size, partition=0) for size in sizes]
        flushing = asyncio.ensure_future(producer.flush())
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        outcome_types = [type(outcome) for outcome in outcomes]
        assert outcome_types == [
            RecordMetadata,
            RecordMetadata,
            RecordTooLargeError,
            RecordMetadata,
            RecordMetadata,
        ]
        assert [
            outcome.offset
            for outcome in outcomes
            if isinstance(outcome, RecordMetadata)
        ] == [
            0,
            1,
            2,
            3,
        ]
        await flushing

    with_producer(tmp_path, main, linger_ms=60_000, delivery_timeout_ms=60_000)


def test_first_half_of_a_batch_is_completed_before_the_second_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing thread waits until the loop has completed the first half. The second
    half has no outcome then.
    """
    post_completed = aio.Producer._post_completed

    def wait_for_the_loop(producer: aio.Producer, first: Any) -> None:
        post_completed(producer, first)
        reports_have_run = threading.Event()
        producer._loop_thread.post_to_loop(reports_have_run.set)
        assert reports_have_run.wait(60)

    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        await data.alter_topic("t", {"max.message.bytes": 1_000})
        sizes = [10, 10, 2_000, 10, 10]  # the second half is split again
        futures = [await producer.send("t", b"x" * size, partition=0) for size in sizes]
        flushing = asyncio.ensure_future(producer.flush())
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert [
            outcome.offset
            for outcome in outcomes
            if isinstance(outcome, RecordMetadata)
        ] == [
            0,
            1,
            2,
            3,
        ]
        assert isinstance(outcomes[2], RecordTooLargeError)
        await flushing

    monkeypatch.setattr(aio.Producer, "_post_completed", wait_for_the_loop)
    with_producer(tmp_path, main, linger_ms=60_000, delivery_timeout_ms=60_000)


def test_flush_returns_when_the_futures_are_done(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        futures = [await producer.send("t", b"v") for _ in range(100)]
        await producer.flush()
        assert all(future.done() for future in futures)

    with_producer(tmp_path, main, linger_ms=60_000, delivery_timeout_ms=60_000)


def test_callbacks_run_in_the_loop_before_the_future_is_done(tmp_path: Path) -> None:
    events: list[tuple[str, int, bool]] = []

    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        future: asyncio.Future[RecordMetadata]
        loop_thread = threading.get_ident()

        def check_thread(error: Exception | None, metadata: RecordMetadata) -> None:
            assert threading.get_ident() == loop_thread
            events.append(("own", metadata.offset, future.done()))

        future = await producer.send("t", b"v", partition=0, on_delivery=check_thread)
        await future
        assert events == [("own", 0, False), ("all", 0, False)]

    with_producer(
        tmp_path,
        main,
        on_delivery=lambda error, metadata: events.append(
            ("all", metadata.offset, False)
        ),
    )


def test_record_of_a_cancelled_future_is_stored(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        first = await producer.send("t", b"a", partition=0)
        first.cancel()
        assert (await producer.send_and_wait("t", b"b", partition=0)).offset == 1
        receipts = await producer.send_many("t", [(None, b"c")], partition=0)
        receipts.cancel()
        await producer.flush()
        assert await values(data) == [b"a", b"b", b"c"]

    with_producer(tmp_path, main)


def test_send_many_and_send_columns_return_receipts(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        receipts = await producer.send_many(
            "t", ((None, b"%d" % number) for number in range(10)), partition=0
        )
        assert [
            (receipt.offset, receipt.last_offset) for receipt in await receipts
        ] == [(0, 9)]
        columns = await producer.send_columns(
            "t", values=(b"ab", [0, 1, 2]), partition=0
        )
        assert [(column.offset, column.last_offset) for column in await columns] == [
            (10, 11)
        ]
        await (await producer.send_many("t", [(None, b"x" * 900_000)], partition=0))
        await data.alter_topic("t", {"max.message.bytes": 1_000})
        large_receipt = await producer.send_many(
            "t", [(None, b"x" * 2_000)], partition=0
        )
        with pytest.raises(RecordTooLargeError):
            await large_receipt

    with_producer(tmp_path, main)


class RecordingInterceptor(ProducerInterceptor):
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        self.sent.append(record.value)
        return record


def test_full_memory_blocks_tasks_in_their_order(tmp_path: Path) -> None:
    """Interceptors and serializers process each record once, despite retries."""
    interceptor = RecordingInterceptor()

    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        async def send(number: int) -> RecordMetadata:
            return await (await producer.send("t", str(number), partition=0))

        metadata = await asyncio.gather(*(send(number) for number in range(200)))
        assert [record_metadata.offset for record_metadata in metadata] == list(
            range(200)
        )
        assert interceptor.sent == [str(number) for number in range(200)]
        assert await values(data) == [b"%d" % number for number in range(200)]
        assert not producer._sync._accumulator.waiting

    with_producer(
        tmp_path,
        main,
        buffer_memory=1_000,
        batch_size=500,
        interceptors=[interceptor],
        value_serializer=str.encode,
    )


def test_small_record_does_not_overtake_a_record_that_waits_for_memory(
    tmp_path: Path,
) -> None:
    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        with (
            producer._sync._thread_state.round_lock
        ):  # no batch is written in this block
            await producer.send("t", b"x" * 400, partition=0)
            large = asyncio.ensure_future(producer.send("t", b"x" * 400, partition=0))
            await asyncio.sleep(0)
            small = asyncio.ensure_future(producer.send("t", b"y", partition=0))
            for _ in range(3):
                await asyncio.sleep(0)
            assert not small.done()
        assert [(await (await task)).offset for task in (large, small)] == [1, 2]

    with_producer(tmp_path, main, buffer_memory=700)


@pytest.mark.parametrize(
    "memory_settings",
    [{"buffer_memory": 700}, {"buffer_records": 1}],
    ids=["bytes", "records"],
)
def test_full_memory_is_an_error_after_the_timeout(
    tmp_path: Path, memory_settings: dict[str, int]
) -> None:
    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        with (
            producer._sync._thread_state.round_lock
        ):  # no batch is written in this block
            await producer.send("t", b"x" * 400, partition=0)
            with pytest.raises(BufferFullError):
                await producer.send("t", b"x" * 400, partition=0)
            closing = asyncio.ensure_future(producer.send("t", b"x" * 400, partition=0))
            await asyncio.sleep(0)
            assert not closing.done()
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            assert not producer._sync._accumulator.waiting
        await producer.flush()
        assert len(await values(data)) == 1

    with_producer(tmp_path, main, max_block_ms=20, **memory_settings)


def test_closing_wakes_tasks_that_wait_for_memory(tmp_path: Path) -> None:
    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        with producer._sync._thread_state.round_lock:
            first = await producer.send("t", b"x" * 400, partition=0)
            waiting = asyncio.ensure_future(producer.send("t", b"x" * 400, partition=0))
            await asyncio.sleep(0)
            closing = asyncio.ensure_future(producer.close())
            with pytest.raises(ProducerClosedError):
                await waiting
        await closing
        assert first.done()
        with pytest.raises(ProducerClosedError):
            await producer.send("t", b"late")
        await producer.close()

    with_producer(tmp_path, main, buffer_memory=700)


def test_transaction_is_committed_completely_or_aborted(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open_dir(tmp_path / "d", create=True, durability="os") as data:
            await data.create_topic("t")
            log = await data.partition("t", 0)
            async with data.producer(transactional_id="x") as producer:
                async with producer.transaction():
                    await producer.send("t", b"a")
                    await producer.send_offsets_to_transaction({("t", 0): 7}, "g")
                with pytest.raises(ZeroDivisionError):
                    async with producer.transaction():
                        await producer.send("t", b"b")
                        raise ZeroDivisionError
                with pytest.raises(ProducerStateError):
                    await producer.send("t", b"outside")
                await producer.begin_transaction()
                await producer.send("t", b"c")
                text = await producer.prepare_transaction()
                assert producer.is_prepared
                assert await producer.complete_transaction(text)
                await producer.begin_transaction()
                await producer.send("t", b"d")
                await producer.abort_transaction()
                await producer.begin_transaction()
                await producer.commit_transaction()
            async with data.producer(transactional_id="y") as producer:
                await producer.init_transactions()
                await producer.begin_transaction()
                await producer.send("t", b"e")
            committed = [
                record.value async for record in log.read(0, isolation="read_committed")
            ]
            assert committed == [b"a", b"c"]
            async with data.consumer(group_id="g") as consumer:
                stored = await consumer.committed([("t", 0)])
                assert [offset and offset.offset for offset in stored.values()] == [7]

    asyncio.run(main())


def test_task_that_is_cancelled_in_a_transaction_aborts_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open_dir(tmp_path / "d", create=True, durability="os") as data:
            await data.create_topic("t")
            async with data.producer(transactional_id="x") as producer:
                is_inside = asyncio.Event()

                async def send_in_transaction() -> None:
                    async with producer.transaction():
                        await producer.send("t", b"a")
                        is_inside.set()
                        await asyncio.Event().wait()

                task = asyncio.create_task(send_in_transaction())
                await is_inside.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                async with producer.transaction():
                    await producer.send("t", b"b")
            log = await data.partition("t", 0)
            assert [
                record.value async for record in log.read(0, isolation="read_committed")
            ] == [b"b"]

    asyncio.run(main())


def test_end_of_a_loop_warns_about_an_open_producer_and_writes_its_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    references = []

    async def main() -> None:
        data = await aio.open_dir(tmp_path / "d", create=True, durability="os")
        await data.create_topic("t")
        producer = await data.producer(linger_ms=60_000, delivery_timeout_ms=60_000)
        await producer.send("t", b"v")
        references.extend([data, producer])

    with pytest.warns(ResourceWarning, match="not closed before its event loop"):
        asyncio.run(main())
    data, producer = references
    assert data.sync.partition("t", 0).get(0).value == b"v"
    assert producer._sync._thread_state.must_stop
    data.sync.close()
    assert not [
        record for record in caplog.records if record.levelno >= logging.WARNING
    ]


def test_closed_producer_causes_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_producer(tmp_path, lambda data, producer: producer.send("t", b"v"))


def test_another_loop_and_other_settings_are_refused(tmp_path: Path) -> None:
    async def use(producer: aio.Producer) -> None:
        for call in (producer.send("t", b"v"), producer.flush(), producer.close()):
            with pytest.raises(WrongLoopError):
                await call

    async def main(data: aio.LogDir, producer: aio.Producer) -> None:
        await asyncio.to_thread(asyncio.run, use(producer))
        with pytest.raises(InvalidConfigError):
            await data.producer(threaded=False)
        with pytest.raises(InvalidConfigError):
            data.producer(linger=5)  # type: ignore[call-overload]

    with_producer(tmp_path, main)
