"""pytest fixtures for a Kafka broker: records without a client, waits that are woken,
and names that no other test uses.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import netshim
from logcore import TopicExistsError
from logcore.recordbatch import encode
from logcore.testing import SimulatedDisk
from netshim.testing import Kafka, UnsyncedFiles, start
from support.pages import blocks
from support.pytesters import ALONE

confluent_kafka = pytest.importorskip("confluent_kafka")

pytest_plugins = ["pytester"]
DEADLINE_S = 60  # time limit for events that must happen; no test depends on how soon


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    started = start(tmp_path_factory.mktemp("kafka"), num_partitions=3)
    yield started
    started.stop()


@pytest.fixture
def shared(broker: Kafka, request: pytest.FixtureRequest) -> Iterator[Kafka]:
    with broker.namespace(request.node.name) as namespace:
        yield namespace


def producer(kafka: Kafka, **options: Any) -> Any:
    return confluent_kafka.Producer(
        {"bootstrap.servers": kafka.bootstrap, "linger.ms": 1, **options}
    )


# -- records ---------------------------------------------------------------------------


def test_records_returns_all_partitions_with_all_fields(shared: Kafka) -> None:
    client = producer(shared)
    for at, partition in enumerate([2, 0, 2, 1]):
        client.produce(
            shared.topic("orders"),
            b"%d" % at,
            key=b"k",
            partition=partition,
            headers=[("h", b"1")],
            timestamp=1000 + at,
        )
    assert client.flush(DEADLINE_S) == 0
    records = shared.records("orders")
    assert [(record.partition, record.offset, record.value) for record in records] == [
        (0, 0, b"1"),
        (1, 0, b"3"),
        (2, 0, b"0"),
        (2, 1, b"2"),
    ]
    assert records[0] == (
        shared.topic("orders"),
        0,
        0,
        1001,
        b"k",
        b"1",
        (("h", b"1"),),
    )
    assert [record.value for record in shared.records("orders", order="time")] == [
        b"0",
        b"1",
        b"2",
        b"3",
    ]
    assert shared.records(shared.topic("orders")) == records, (
        "the full name is accepted too"
    )
    assert shared.records("nothing was ever sent there") == []


def test_uncommitted_records_are_omitted_on_request(shared: Kafka) -> None:
    shared.create_topic("orders")
    log = shared.logdir.partition(shared.topic("orders"), 0)

    for value, is_committed in ((b"aborted", False), (b"committed", True)):
        batch = encode(
            [(None, value, (), 0)],
            producer_id=7,
            producer_epoch=0,
            base_sequence=0,
            transactional=True,
        )
        log.append_batch(batch, check_sequence=False)
        log.end_transaction(7, 0, commit=is_committed)
    assert [record.value for record in shared.records("orders")] == [
        b"aborted",
        b"committed",
    ]
    assert [
        record.value for record in shared.records("orders", isolation="read_committed")
    ] == [b"committed"]
    with pytest.raises(AssertionError, match="1 of 2 records came") as met:
        shared.wait_for("orders", 2, timeout=0, isolation="read_committed")
    assert "transactions that are open or aborted" in str(met.value)


def test_appended_records_reach_consumers(shared: Kafka) -> None:
    assert shared.append("orders", b"4 apples", key=b"anna").offset == 0
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": shared.bootstrap_servers,
            "group.id": shared.group("billing"),
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([shared.topic("orders")])
    message = consumer.poll(DEADLINE_S)
    assert (message.key(), message.value()) == (b"anna", b"4 apples")
    consumer.close()
    assert len(shared.logdir.partitions(shared.topic("orders"))) == 3


# -- waiting ---------------------------------------------------------------------------


def test_wait_for_ends_once_the_records_exist(shared: Kafka) -> None:
    def produce() -> None:
        client = producer(shared)
        for at in range(10):
            client.produce(shared.topic("orders"), b"%d" % at, partition=at % 3)
            client.flush(DEADLINE_S)

    thread = threading.Thread(target=produce)
    thread.start()
    records = shared.wait_for("orders", 10, timeout=DEADLINE_S)
    thread.join()
    assert sorted(record.value or b"" for record in records) == [
        b"%d" % at for at in range(10)
    ]
    assert shared.wait_for("orders", 3, timeout=0) == records, (
        "all existing records, even beyond the requested count"
    )


def test_wait_for_is_woken_by_the_broker(
    shared: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait does not depend on polling: it ends even if the polling interval is
    extremely long.
    """
    monkeypatch.setattr(netshim.testing, "_POLL_S", DEADLINE_S * 10)
    monkeypatch.setattr(netshim.testing, "_POLL_PARTITIONS_S", DEADLINE_S * 10)
    for number in range(2):  # the first record creates the topic
        thread = threading.Thread(
            target=lambda: (
                (client := producer(shared)).produce(shared.topic("orders"), b"x")
                or client.flush(DEADLINE_S)
            )
        )
        thread.start()
        assert (
            len(shared.wait_for("orders", number + 1, timeout=DEADLINE_S)) == number + 1
        )
        thread.join()
    waiting = shared.server.call(shared.server.server.broker.state.fetches.awaited_keys)
    assert not [key for key in waiting if key[0] == shared.topic("orders")], (
        "no request is waiting any more"
    )


def test_wait_for_async_does_not_block_the_event_loop(shared: Kafka) -> None:
    aiokafka = pytest.importorskip("aiokafka")

    async def produce() -> None:
        client = aiokafka.AIOKafkaProducer(bootstrap_servers=shared.bootstrap_servers)
        await client.start()
        for at in range(5):
            await client.send_and_wait(shared.topic("orders"), b"%d" % at)
        await client.stop()

    async def test() -> list[Any]:
        task = asyncio.create_task(produce())
        records = await shared.wait_for_async("orders", 5, timeout=DEADLINE_S)
        await task
        return records

    assert len(asyncio.run(test())) == 5
    with pytest.raises(
        AssertionError, match=r"wait_for_async\('orders', 6\): 5 of 6 records came"
    ):
        asyncio.run(shared.wait_for_async("orders", 6, timeout=0))


def test_failed_wait_for_reports_the_existing_records(shared: Kafka) -> None:
    shared.create_topic("payments")
    for at in range(7):
        shared.append(
            "orders",
            b"%d apples" % at,
            partition=at % 2,
            timestamp_ms=1_700_000_000_000 + at,
        )
    with pytest.raises(AssertionError) as met:
        shared.wait_for("orders", 10, timeout=0.01)
    text = str(met.value)
    assert "7 of 10 records came within 0.01 s, 3 did not" in text
    assert "offsets by partition {0: 4, 1: 3, 2: 0}" in text
    assert (
        "partition 0, offset 3, 2023-11-14T22:13:20.006+00:00, key=None, value=b'6 apples'"
        in text
    )
    assert "1 apples" not in text, "only the newest record"
    assert "other topics: payments: 0 offsets" in text
    with pytest.raises(
        AssertionError,
        match=f"there is no topic {shared.topic('ordres')}\n.*orders: 7 offsets",
    ):
        shared.wait_for("ordres", 1, timeout=0)


@pytest.mark.long
def test_stopped_broker_can_be_read_and_ends_waits(
    kafka: Kafka,
) -> None:
    kafka.append("orders", b"4 apples")
    stopping = threading.Thread(target=kafka.stop)
    with pytest.raises(
        AssertionError,
        match="1 of 2 records came within 60 s, 1 did not\n  the broker has stopped",
    ):
        stopping.start()
        kafka.wait_for("orders", 2, timeout=DEADLINE_S)
    stopping.join()
    assert [record.value for record in kafka.records("orders")] == [b"4 apples"]
    assert len(kafka.wait_for("orders", 1, timeout=0)) == 1
    with pytest.raises(AssertionError, match="the broker has stopped"):
        asyncio.run(kafka.wait_for_async("orders", 2, timeout=DEADLINE_S))


# -- namespaces ------------------------------------------------------------------------


def test_namespaces_are_separate_and_leave_no_topics_or_groups(broker: Kafka) -> None:
    with (
        broker.namespace("test_one[a/b]") as first,
        broker.namespace("test_two") as two,
    ):
        names = first.create_topic("orders"), two.create_topic("orders")
        assert len(set(names)) == 2
        assert all(
            re.fullmatch(r"t\d+-test_(one_a_b|two)-orders", name) for name in names
        )
        assert first.topic(names[0]) == first.topic("orders") == names[0]
        first.append("orders", b"x")
        assert (
            first.topics(),
            len(first.records("orders")),
            len(two.records("orders")),
        ) == (["orders"], 1, 0)
        with pytest.raises(TopicExistsError):
            first.create_topic("orders")
        with pytest.raises(RuntimeError, match="shared"):
            first.stop()
        for each in (first, two):
            consumer = confluent_kafka.Consumer(
                {
                    "bootstrap.servers": each.bootstrap,
                    "group.id": each.group("g"),
                    "auto.offset.reset": "earliest",
                }
            )
            offset = confluent_kafka.TopicPartition(each.topic("orders"), 0, 1)
            consumer.commit(offsets=[offset], asynchronous=False)
            consumer.close()
        groups = {first.group("g"), two.group("g")}
        assert groups == {name for name in group_names(broker) if name in groups}
    assert not groups & set(group_names(broker))
    assert not [name for name in broker.topics() if name in names]


def group_names(kafka: Kafka) -> list[str]:
    return kafka.server.call(
        lambda: [
            group.group_id for group in kafka.server.server.broker.state.groups.all()
        ]
    )


def test_repr_of_brokers_and_namespaces(shared: Kafka, kafka: Kafka) -> None:
    shared.append("orders", b"x")
    shared.create_topic("payments")
    assert (
        f"{shared.bootstrap_servers}, topics {shared.prefix}*; orders: 1 offset, payments: 0 offsets"
        in repr(shared)
    )
    kafka.create_topic("orders")
    assert repr(kafka) == f"<Kafka {kafka.bootstrap_servers}; orders: 0 offsets>"
    assert f"<Server {kafka.bootstrap_servers} over {kafka.logdir.path}>" in repr(
        kafka.server
    )
    kafka.stop()
    assert (
        repr(kafka)
        == f"<Kafka stopped, was at {kafka.bootstrap_servers}; orders: 0 offsets>"
    )
    with pytest.raises(RuntimeError, match="has stopped"):
        kafka.server.call(lambda: None)


def test_exception_in_the_thread_of_the_broker_reaches_the_caller(
    shared: Kafka,
) -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        shared.server.call(fail)


def test_broker_of_a_fixture_does_not_sync(
    kafka_factory: Callable[..., Kafka],
) -> None:
    from logcore.fs import OS

    assert isinstance(kafka_factory().server.server._fs, UnsyncedFiles)
    assert kafka_factory(fs=OS).server.server._fs is OS


# -- the fixtures ----------------------------------------------------------------------


def test_session_fixture_uses_one_broker(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture(scope="session")
        def kafka_options():
            return {"num_partitions": 2}

        @pytest.fixture(scope="session")
        def application(kafka_session_broker):
            return kafka_session_broker.bootstrap_servers
        """
    )
    pytester.makepyfile(
        """
        import pytest

        seen = set()

        @pytest.mark.parametrize("number", range(3))
        def test_shared(kafka_session, application, number):
            assert kafka_session.bootstrap == application
            assert kafka_session.topics() == []
            kafka_session.create_topic("orders")
            kafka_session.append("audit", b"x")
            assert len(kafka_session.logdir.partitions(kafka_session.topic("audit"))) == 2
            seen.add((kafka_session.bootstrap, kafka_session.topic("orders")))

        def test_after(kafka_session_broker):
            assert kafka_session_broker.topics() == []
            assert len({bootstrap for bootstrap, _ in seen}) == 1
            assert len(seen) == 3

        def test_alone(kafka, application):
            assert kafka.bootstrap != application
            kafka.create_topic("orders")
            assert kafka.topics() == ["orders"]
        """
    )
    pytester.runpytest(*ALONE).assert_outcomes(passed=5)


@pytest.mark.long
def test_examples_of_the_testing_page_pass(pytester: pytest.Pytester) -> None:
    page = blocks(Path(__file__).resolve().parents[2] / "docs" / "testing.md")
    pytester.makepyfile(
        "\n".join(block.text for block in page if "pytest" in block.words)
    )
    pytester.runpytest(*ALONE).assert_outcomes(passed=10)


def test_failed_wait_for_shows_the_test_and_no_library_frames(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        def test_it(kafka):
            kafka.append("orders", b"4 apples")
            kafka.wait_for("orders", 2, timeout=0)
        """
    )
    result = pytester.runpytest(*ALONE)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "1 of 2 records came" in text
    assert "value=b'4 apples'" in text
    assert "netshim/testing.py" not in text


def test_real_clients_write_to_a_simulated_disk(
    kafka_factory: Callable[..., Kafka],
) -> None:
    """The clock of the disk began in 2023, so the timestamp of each record was in its
    future.
    """
    disk = SimulatedDisk()
    kafka = kafka_factory("/data", fs=disk)
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers})
    errors: list[Any] = []
    producer.produce("t", b"v", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(60) == 0
    assert errors == [None]
