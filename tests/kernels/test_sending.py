"""Tests that the compiled fast path of send() has the same results as the general path in
Python, and accepts only usual records.

Two producers send the same records, and one of the producers never uses the fast path.
The queues, memory, futures and logs of both producers must be equal.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logcore
from logcore.errors import ProducerClosedError
from logcore.kernels import kernel, plain
from logcore.producer import Producer, RecordFuture, bulk
from logcore.producer import producer as producer_module
from logcore.producer.partitioners import PARTITIONERS
from logcore.testing import SimulatedDisk
from support.kernels import runs_compiled

pytestmark = runs_compiled

#: The arguments of a call of send().
SENDS = st.fixed_dictionaries(
    {"value": st.one_of(st.none(), st.binary(max_size=60))},
    optional={
        "key": st.one_of(st.none(), st.binary(max_size=12)),
        "partition": st.integers(0, 2),
        "headers": st.sampled_from([(), (("h", b"1"),)]),
        "timestamp_ms": st.integers(0, 10),
        "on_delivery": st.just(lambda error, metadata: None),
    },
)
SETTINGS: dict[str, Any] = {"acks": 1, "linger_ms": 100_000, "threaded": False}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[logcore.LogDir]:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as directory:
        directory.create_topic("t", partitions=3)
        directory.create_topic("u", partitions=3)
        yield directory


@pytest.fixture
def producer(directory: logcore.LogDir) -> Iterator[Producer]:
    """Create a producer whose next plain record uses the fast path, if the record has a
    key or is for partition 0.
    """
    with directory.producer(**SETTINGS) as producer:
        for number in range(3):
            producer.send("t", b"first", partition=number)
        yield producer


def send_on_fast_path(
    producer: Producer, topic: object = "t", value: object = b"v", **arguments: object
) -> RecordFuture | None:
    """Send a record on the fast path only. Return its future, or None if the fast path
    refuses the record.
    """
    options = {"headers": (), **arguments}
    names = ("key", "partition", "headers", "timestamp_ms", "on_delivery")
    future: RecordFuture | None = producer._send_fast(
        topic, value, *(options.get(name) for name in names)
    )
    return future


def state_of(producer: Producer, topic: str) -> dict[str, Any]:
    """Return the state that a send changes, without times."""
    accumulator = producer._accumulator
    state: dict[str, Any] = {
        "used": accumulator.used_bytes,
        "records": accumulator.used_records,
    }
    assert accumulator.used_records == accumulator.queued_records
    for name, route in producer._routes_by_topic.items():
        state["sticky", name == topic] = (route.partitioner.sticky, route.sticky_bytes)
    for queue in accumulator.queues.values():
        open_batch = queue.open_batch
        sizes = [
            (batch.size_bytes, len(batch.records), batch is open_batch)
            for batch in queue.batches
        ]
        state[queue.partition] = sizes
        state["callbacks", queue.partition] = [
            len(batch.delivery.record_callbacks) for batch in queue.batches
        ]
    return state


def fields_of(future: RecordFuture) -> tuple[Any, ...]:
    return (
        future.batch.partition,
        future.index,
        future.key_size,
        future.value_size,
        future.done(),
    )


# -- accepted --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"partition": 0},
        {"partition": 2, "key": b"any"},
        {"key": b"some key"},
        {"key": b""},
        {"value": None, "key": b"k"},
        {"partition": 1, "on_delivery": print},
    ],
)
def test_plain_record_takes_the_fast_path(
    producer: Producer, arguments: dict[str, Any]
) -> None:
    assert send_on_fast_path(producer, **arguments) is not None


@pytest.mark.parametrize(
    "arguments",
    [
        {"headers": [("a", b"b")]},
        {"headers": None},
        {"timestamp_ms": 5},
        {"value": "text"},
        {"value": bytearray(b"v")},
        {"key": memoryview(b"k")},
        {"value": bytes(17_000)},
        {"partition": 3},
        {"partition": -1},
        {"partition": True},
        {"partition": 1 << 70},
        {"topic": "unknown"},
        {"topic": b"t"},
    ],
)
def test_fast_path_refuses_unusual_records_and_changes_nothing(
    producer: Producer, arguments: dict[str, Any]
) -> None:
    before = state_of(producer, "t")
    assert send_on_fast_path(producer, **{"partition": 0, **arguments}) is None
    assert state_of(producer, "t") == before


def test_producer_with_interceptors_takes_the_general_path(
    directory: logcore.LogDir,
) -> None:
    class Interceptor:
        def on_send(self, record: object) -> None:
            return None

        def on_acknowledgement(self, metadata: object, error: object) -> None:
            return None

    def serialize(data: bytes) -> bytes:
        return data

    settings: list[dict[str, Any]] = [
        {"value_serializer": serialize},
        {"key_serializer": serialize},
        {"on_delivery": print},
        {"interceptors": (Interceptor(),)},
    ]
    for extra in settings:
        with directory.producer(**SETTINGS, **extra) as producer:
            producer.send("t", b"first", partition=0)
            assert send_on_fast_path(producer, partition=0) is None
    with directory.producer(transactional_id="one") as producer, producer.transaction():
        producer.send("t", b"first", partition=0)
        assert send_on_fast_path(producer, partition=0) is None


def test_producer_with_a_simulated_clock_takes_the_general_path() -> None:
    with (
        logcore.open_dir("data", create=True, fs=SimulatedDisk()) as directory,
        directory.producer(**SETTINGS) as producer,
    ):
        directory.create_topic("t")
        producer.send("t", b"first")
        assert send_on_fast_path(producer) is None


def test_fast_path_yields_to_waiters_and_to_the_lock_holder(
    producer: Producer,
) -> None:
    with producer._lock:
        assert send_on_fast_path(producer, partition=0) is None
    ticket = object()
    producer._accumulator.waiting.append(ticket)
    assert send_on_fast_path(producer, partition=0) is None
    producer._accumulator.waiting.remove(ticket)
    assert send_on_fast_path(producer, partition=0) is not None


def test_full_memory_and_closed_producers_take_the_general_path(
    directory: logcore.LogDir,
) -> None:
    with directory.producer(
        **SETTINGS, buffer_memory=1_000, max_request_size=500
    ) as producer:
        producer.send("t", b"first", partition=0)
        while send_on_fast_path(producer, value=bytes(100), partition=0) is not None:
            pass
        assert (
            producer._accumulator.used_bytes
            <= 1_000
            < producer._accumulator.used_bytes + 100 + 64
        )
    assert send_on_fast_path(producer, partition=0) is None
    with pytest.raises(ProducerClosedError):
        producer.send("t", b"late", partition=0)
    with directory.producer(**SETTINGS, buffer_records=5) as producer:
        producer.send("t", b"first", partition=0)
        assert [send_on_fast_path(producer, partition=0) is None for _ in range(6)] == [
            False
        ] * 4 + [True] * 2
        assert producer._accumulator.used_records == 5


# -- results ---------------------------------------------------------------------------


@pytest.mark.long
@given(
    sends=st.lists(SENDS, max_size=60),
    seed=st.integers(0, 100),
    batch_size=st.sampled_from([1, 200, 400, 16_384]),
    partitioner=st.sampled_from(PARTITIONERS),
    ignores_keys=st.booleans(),
)
def test_both_paths_have_the_same_results(
    tmp_path_factory: pytest.TempPathFactory,
    sends: list[dict[str, Any]],
    seed: int,
    batch_size: int,
    partitioner: str,
    ignores_keys: bool,
) -> None:
    settings = {
        **SETTINGS,
        "partitioner": partitioner,
        "partitioner_ignore_keys": ignores_keys,
    }
    path = tmp_path_factory.mktemp("sent") / "data"
    with (
        pytest.MonkeyPatch.context() as patch,
        logcore.open_dir(path, create=True, durability="os") as directory,
    ):
        for topic in ("t", "u"):
            directory.create_topic(topic, partitions=3)
        producers: list[tuple[str, Producer]] = []
        for topic in ("t", "u"):
            patch.setattr(
                producer_module, "_random_number_below", seeded_partitioner(seed)
            )
            producers.append(
                (topic, directory.producer(**settings, batch_size=batch_size))
            )
        producers[1][1]._uses_fast_path = False
        for send in sends:
            futures = [producer.send(topic, **send) for topic, producer in producers]
            assert fields_of(futures[0]) == fields_of(futures[1])
            assert state_of(producers[0][1], "t") == state_of(producers[1][1], "u")
        for _, producer in producers:
            producer.close()
        for number in range(3):
            logs = [directory.partition(topic, number) for topic in ("t", "u")]
            batches = [
                [(batch.base_offset, batch.last_offset) for batch in log.batches(0)]
                for log in logs
            ]
            assert batches[0] == batches[1]
            records = [
                [(record.key, record.value, record.headers) for record in log.read(0)]
                for log in logs
            ]
            assert records[0] == records[1]


def seeded_partitioner(seed: int) -> Callable[[object, int], int]:
    """Return a function that chooses the same sticky partitions for each producer."""
    rng = random.Random(seed)
    return lambda fs, below: rng.randrange(below)


@pytest.mark.long
def test_records_of_each_thread_are_stored_in_order(
    directory: logcore.LogDir,
) -> None:
    count = 3_000
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with directory.producer(
            acks=1, linger_ms=0, batch_size=2_000, buffer_memory=50_000
        ) as producer:
            delivered: list[int] = []

            def send(name: int) -> None:
                for number in range(count):
                    producer.send(
                        "t",
                        b"%d %d" % (name, number),
                        partition=0,
                        on_delivery=lambda error, metadata: delivered.append(1),
                    )

            threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            producer.flush()
            assert producer._accumulator.used_bytes == 0
            assert len(delivered) == 4 * count
    finally:
        sys.setswitchinterval(before)
    values_by_thread: dict[int, list[int]] = {}
    for record in directory.partition("t", 0).read(0):
        assert record.value is not None
        name, number = map(int, record.value.split())
        values_by_thread.setdefault(name, []).append(number)
    assert values_by_thread == {name: list(range(count)) for name in range(4)}


# -- many at once ----------------------------------------------------------------------


@given(
    rows=st.lists(
        st.one_of(
            st.tuples(
                st.one_of(st.none(), st.binary(max_size=9)),
                st.one_of(st.none(), st.binary(max_size=9)),
            ),
            st.tuples(st.none(), st.binary(max_size=9), st.just((("h", b"1"),))),
            st.tuples(st.just(bytearray(b"k")), st.binary(max_size=9)),
        ),
        max_size=20,
    )
)
def test_sizes_of_plain_rows_equal_the_general_sizes(rows: list[Any]) -> None:
    measured = kernel.plain_rows(rows)
    # Tuples are measured without the kernel, and lists with it.
    keys, sizes = bulk.keys_and_sizes(tuple(rows))
    is_plain = all(len(row) == 2 and type(row[0]) is not bytearray for row in rows)
    assert (measured is not None) == is_plain
    if measured is not None:
        assert measured[0] == keys
        assert measured[1].tolist() == sizes.tolist()
    assert plain.plain_rows(rows) is None
