"""Tests of reads through a broker. The rows equal the rows of its directory. Changes of
the broker or of its topics between plan and task are errors.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
pytest.importorskip("kafka.net.manager")

import logcore
from logcore import recordbatch
from logcore.errors import InvalidConfigError, TopicNotFoundError
from netshim.testing import Kafka, start
from pyspark_logcore import brokers
from pyspark_logcore.brokers import BrokerError, OtherClusterError
from pyspark_logcore.options import parse_read, parse_write
from pyspark_logcore.ranges import DataLossError
from pyspark_logcore.reader import RangePartition
from pyspark_logcore.source import LogcoreDataSource

KAFKA = Path(__file__).parents[2] / "examples" / "data" / "kafka"
T0 = 1_700_000_000_000
KEPT = {"retention.ms": -1}


@pytest.fixture(autouse=True)
def forbid_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGCORE_PATH", raising=False)


def source_through(servers: Kafka | str, **given: object) -> LogcoreDataSource:
    # Spark passes names in lower case, and values as text.
    texts = {name.lower(): str(value) for name, value in given.items()}
    address = servers if isinstance(servers, str) else servers.bootstrap_servers
    return LogcoreDataSource({"kafka.bootstrap.servers": address, **texts})


def rows_of(data_source: LogcoreDataSource) -> list[tuple[Any, ...]]:
    """Return the rows of a read. The plan and the tasks are pickled, as in Spark."""
    reader = data_source.reader(data_source.schema())
    rows: list[tuple[Any, ...]] = []
    for input_partition in reader.partitions():
        task = pickle.loads(pickle.dumps((reader, input_partition)))
        for batch in task[0].read(task[1]):
            rows += [tuple(row.values()) for row in batch.to_pylist()]
    return rows


def transaction(
    log: logcore.Log, producer_id: int, values: list[bytes], *, commit: bool
) -> None:
    records = [(None, value, (), T0) for value in values]
    producer = {"producer_id": producer_id, "producer_epoch": 0}
    log.append_batch(
        recordbatch.encode(
            records, transactional=True, base_sequence=0, now_ms=T0, **producer
        )
    )
    log.end_transaction(**producer, commit=commit)


@pytest.fixture(scope="module")
def source_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a topic with three codecs, null keys and values, and headers; a topic with
    log append times; and an empty topic.
    """
    path = tmp_path_factory.mktemp("brokers") / "data"
    rng = random.Random(7)
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("plain", partitions=3, config=KEPT)
        for number, codec in enumerate(("none", "zstd", "gzip")):
            log = directory.partition("plain", number)
            for first in range(0, 3_000, 100):
                records = [
                    (
                        None if rng.random() < 0.1 else b"k%d" % row,
                        None
                        if rng.random() < 0.1
                        else rng.randbytes(rng.randrange(200)),
                        [("h", b"1"), ("n", None)] if rng.random() < 0.2 else [],
                        T0 + row,
                    )
                    for row in range(first, first + 100)
                ]
                log.append_batch(recordbatch.encode(records, codec=codec, now_ms=T0))
        directory.create_topic(
            "stamped", config={"message.timestamp.type": "LogAppendTime"}
        )
        directory.partition("stamped", 0).append_many([(None, b"x")] * 10)
        directory.create_topic("empty")
    return path


@pytest.fixture
def data(source_directory: Path, tmp_path: Path) -> Path:
    """Return a copy of the directory that the test may change."""
    return Path(shutil.copytree(source_directory, tmp_path / "data"))


@pytest.fixture
def kafka(data: Path) -> Iterator[Kafka]:
    broker = start(data)
    yield broker
    broker.stop()


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
@pytest.mark.parametrize("topic", ["plain", "stamped", "empty"])
def test_rows_equal_the_rows_of_the_directory(
    kafka: Kafka, data: Path, topic: str, isolation: str
) -> None:
    options = {
        "subscribe": topic,
        "includeHeaders": "true",
        "kafka.isolation.level": isolation,
    }
    assert rows_of(source_through(kafka, **options)) == rows_of(
        LogcoreDataSource({"path": str(data), **options})
    )


def test_rows_equal_the_records_of_a_kafka_broker(tmp_path: Path) -> None:
    data = tmp_path / "kafka"
    shutil.copytree(KAFKA, data)
    expected = rows_of(LogcoreDataSource({"path": str(data), "subscribe": "orders"}))
    broker = start(data, config=KEPT)
    try:
        assert rows_of(source_through(broker, subscribe="orders")) == expected
    finally:
        broker.stop()
    assert len(expected) > 100


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_isolation_option_selects_committed_records(
    tmp_path: Path, isolation: str
) -> None:
    data = tmp_path / "data"
    with logcore.open_dir(data, create=True) as directory:
        directory.create_topic("t", config=KEPT)
        log = directory.partition("t", 0)
        transaction(log, 1, [b"kept"], commit=True)
        transaction(log, 2, [b"dropped", b"too"], commit=False)
        log.append(b"plain")
        log.append(b"end")
    broker = start(data)
    try:
        values = [
            row[1]
            for row in rows_of(
                source_through(
                    broker, subscribe="t", **{"kafka.isolation.level": isolation}
                )
            )
        ]
    finally:
        broker.stop()
    committed = [b"kept", b"plain", b"end"]
    assert values == (
        committed
        if isolation == "read_committed"
        else [b"kept", b"dropped", b"too", b"plain", b"end"]
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"startingOffsets": json.dumps({"plain": {"0": 17, "1": -2, "2": 2_999}})},
        {"endingOffsets": json.dumps({"plain": {"0": 170, "1": -1, "2": 1}})},
        {"startingTimestamp": T0 + 1_234},
        {
            "startingTimestamp": T0 + 10**9,
            "startingOffsetsByTimestampStrategy": "latest",
        },
        {
            "startingOffsetsByTimestamp": json.dumps(
                {"plain": {"0": T0, "1": T0 + 5, "2": T0 + 2_999}}
            )
        },
        {"endingTimestamp": T0 + 50},
        {"minPartitions": 7},
        {"maxRecordsPerPartition": 1_000},
    ],
)
def test_offsets_times_and_tasks_equal_those_of_a_directory(
    kafka: Kafka, data: Path, options: dict[str, object]
) -> None:
    texts = {name.lower(): str(value) for name, value in options.items()}
    expected = rows_of(
        LogcoreDataSource({"path": str(data), "subscribe": "plain", **texts})
    )
    assert sorted(
        rows_of(source_through(kafka, subscribe="plain", **options)), key=str
    ) == sorted(expected, key=str)


def test_pattern_and_assignment_select_topics_and_partitions(kafka: Kafka) -> None:
    assert {
        row[2]
        for row in rows_of(source_through(kafka, subscribePattern="(plain|stamp.*)"))
    } == {"plain", "stamped"}
    assert {
        row[3]
        for row in rows_of(source_through(kafka, assign=json.dumps({"plain": [2]})))
    } == {2}


def test_unknown_topic_is_reported_by_name(kafka: Kafka) -> None:
    with pytest.raises(TopicNotFoundError, match="there is no topic 'nothing'"):
        rows_of(source_through(kafka, subscribe="nothing"))


def test_responses_of_one_record_are_read_completely(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rows_of(source_through(kafka, subscribe="plain"))
    monkeypatch.setattr(brokers, "_FETCH_BYTES", 1)
    assert rows_of(source_through(kafka, subscribe="plain")) == expected


@pytest.mark.parametrize("fails", ["true", "false"])
def test_records_deleted_between_plan_and_task_are_reported(
    kafka: Kafka, fails: str
) -> None:
    data_source = source_through(kafka, subscribe="stamped", failOnDataLoss=fails)
    reader = data_source.reader(data_source.schema())
    input_partitions = reader.partitions()
    kafka.logdir.partition("stamped", 0).delete_records(4)
    if fails == "true":
        with pytest.raises(
            DataLossError, match="offset 0 was planned, and the log begins at 4"
        ):
            list(reader.read(input_partitions[0]))
    else:
        with pytest.warns(UserWarning, match="begins at 4"):
            assert [
                row["offset"]
                for batch in reader.read(input_partitions[0])
                for row in batch.to_pylist()
            ] == [4, 5, 6, 7, 8, 9]


def test_log_that_ends_before_the_plan_is_a_loss(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "_CATCH_UP_SECONDS", 0.0)
    data_source = source_through(kafka, subscribe="stamped")
    reader = data_source.reader(data_source.schema())
    (input_partition,) = reader.partitions()
    assert isinstance(input_partition, RangePartition)
    kafka.logdir.partition("stamped", 0).truncate(6)
    with pytest.raises(DataLossError, match="topic stamped partition 0"):
        list(reader.read(input_partition))


def test_recreated_topic_is_a_loss(kafka: Kafka) -> None:
    data_source = source_through(kafka, subscribe="stamped")
    reader = data_source.reader(data_source.schema())
    input_partitions = reader.partitions()
    kafka.logdir.delete_topic("stamped")
    with pytest.raises(DataLossError, match="there is no topic"):
        list(reader.read(input_partitions[0]))
    kafka.logdir.create_topic("stamped")
    with pytest.raises(DataLossError, match="deleted and made again"):
        list(reader.read(input_partitions[0]))


def test_another_cluster_at_the_address_is_always_an_error(
    kafka: Kafka, tmp_path: Path
) -> None:
    data_source = source_through(kafka, subscribe="stamped", failOnDataLoss="false")
    reader = data_source.reader(data_source.schema())
    input_partitions = reader.partitions()
    other = start(tmp_path / "other")
    try:
        other.logdir.create_topic("stamped")
        reader.options = options_of_broker(other.bootstrap_servers)
        with pytest.raises(OtherClusterError, match="another cluster"):
            list(reader.read(input_partitions[0]))
    finally:
        other.stop()


def options_of_broker(servers: str, **given: str) -> Any:
    return parse_read(
        {"kafka.bootstrap.servers": servers, "subscribe": "stamped", **given}
    )


def test_error_contains_the_address_if_no_broker_responds() -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound_socket.getsockname()[1]}"
    data_source = source_through(
        address, subscribe="t", **{"kafkaConsumer.pollTimeoutMs": "300"}
    )
    with pytest.raises(BrokerError) as caught:
        data_source.reader(data_source.schema()).partitions()
    assert address in str(caught.value)


@pytest.mark.long
def test_request_is_repeated_until_a_broker_responds(data: Path) -> None:
    broker = start(data)
    port = broker.port
    data_source = source_through(broker, subscribe="plain")
    reader = data_source.reader(data_source.schema())
    input_partitions = reader.partitions()
    expected = sum(batch.num_rows for batch in reader.read(input_partitions[0]))
    tasks = reader.read(input_partitions[0])
    broker.stop()
    restarted: list[Kafka] = []
    timer = threading.Timer(0.3, lambda: restarted.append(start(data, port=port)))
    timer.start()
    try:
        assert sum(batch.num_rows for batch in tasks) == expected
    finally:
        timer.join()
        restarted[0].stop()


# -- settings --------------------------------------------------------------------------


def settings(**given: str) -> Any:
    parsed = options_of_broker(
        "broker:9093",
        **{f"kafka.{name.replace('_', '.')}": text for name, text in given.items()},
    )
    return parsed.brokers.settings


def test_security_settings_have_the_names_of_kafka_clients() -> None:
    login = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="ann" password="p w";'
    assert settings(
        security_protocol="SASL_SSL", sasl_mechanism="PLAIN", sasl_jaas_config=login
    ) == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "ann",
        "sasl_plain_password": "p w",
    }
    assert settings(ssl_truststore_location="/ca.pem", ssl_truststore_type="PEM") == {
        "ssl_cafile": "/ca.pem"
    }
    assert settings(ssl_endpoint_identification_algorithm="") == {
        "ssl_check_hostname": False
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ssl_truststore_location", "/trust.jks"),
        ("sasl_jaas_config", "com.sun.security.auth.module.Krb5LoginModule required;"),
        ("ssl_provider", "Conscrypt"),
        ("sasl_oauthbearer_token_endpoint_url", "https://x"),
    ],
)
def test_unsupported_security_settings_are_errors(name: str, value: str) -> None:
    with pytest.raises(InvalidConfigError):
        settings(**{name: value})


def test_errors_contain_no_password() -> None:
    login = 'x.PlainLoginModule required username="ann" password="secret" bad'
    with pytest.raises(InvalidConfigError) as caught:
        settings(sasl_jaas_config=login)
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(
        options_of_broker("broker:9093", **{"kafka.sasl.password": "secret"})
    )


def test_security_options_with_a_directory_are_errors(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidConfigError, match="files, protected only by their permissions"
    ):
        parse_read(
            {"path": str(tmp_path), "subscribe": "t", "kafka.security.protocol": "SSL"}
        )


def test_write_through_a_broker_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="the log directory is missing"):
        parse_write({"kafka.bootstrap.servers": "broker:9092", "topic": "t"})
