"""A follower of a running broker: equal bytes, restarts, gaps, and promotion."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from click.testing import CliRunner

import logcore
from logcore import InvalidConfigError, ReadOnlyLogError
from logcore.errors import (
    DivergedError,
    RemoteTopicError,
    RemoteUnavailableError,
    ShippingError,
    ShippingGapError,
)
from logcore.logdir import LogDir
from netshim import wire
from netshim.command import main
from netshim.follow import Follower, Source, promote
from netshim.follow.connection import (
    ClientSettings,
    LoginError,
    SourceConnection,
)
from netshim.secured_testing import SecuredKafka
from netshim.testing import Kafka


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[LogDir]:
    with logcore.open_dir(tmp_path / "copy", create=True) as logdir:
        yield logdir


@pytest.fixture
def source(kafka: Kafka) -> Iterator[Source]:
    with Source(kafka.bootstrap_servers) as source:
        yield source


def stored(logdir: LogDir, topic: str, number: int = 0) -> bytes:
    """Return the bytes of all segments of a partition, in order."""
    folder = Path(logdir.path, f"{topic}-{number}")
    files = sorted(folder.glob("*.log"))
    end = logdir.partition(topic, number).log_end_offset
    assert end >= 0
    return b"".join(file.read_bytes() for file in files)


def follow(logdir: LogDir, source: Source, *topics: str, **options: object) -> Follower:
    follower = Follower(logdir, source, topics=topics or ("*",), **options)  # type: ignore[arg-type]
    follower.run(until_end=True)
    return follower


def fill(kafka: Kafka, topic: str, count: int = 100, partition: int = 0) -> None:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 1}
    )
    for number in range(count):
        producer.produce(topic, b"value %d" % number, partition=partition)
    assert not producer.flush(30)


def transact(kafka: Kafka, topic: str, *, commits: bool) -> None:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": "t"}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"in a transaction", partition=0)
    producer.flush(30)
    if commits:
        producer.commit_transaction(30)
    else:
        producer.abort_transaction(30)


@pytest.mark.long
def test_copy_has_the_bytes_of_the_source(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    """The copy includes transactions, their markers, settings and all partitions."""
    kafka.create_topic("orders", 2, {"max.message.bytes": "2000000"})
    kafka.create_topic("other", 1)
    for partition in range(2):
        fill(kafka, "orders", partition=partition)
    transact(kafka, "orders", commits=True)
    transact(kafka, "orders", commits=False)
    follower = follow(copy, source, "ord*")
    assert copy.topics() == ["orders"]
    for partition in range(2):
        assert stored(copy, "orders", partition) == stored(
            kafka.logdir, "orders", partition
        )
    assert copy.settings("orders").max_message_bytes == 2_000_000
    assert follower.metrics().state == "idle"
    assert follower.metrics().lag_records == 0
    committed = [
        record.value
        for record in copy.partition("orders", 0).read(0, isolation="read_committed")
    ]
    assert committed.count(b"in a transaction") == 1


def test_follower_continues_after_a_restart_of_both_sides(
    kafka_factory: Callable[..., Kafka], tmp_path: Path
) -> None:
    path = tmp_path / "source"
    for run in range(3):
        kafka = kafka_factory(path)
        if not run:
            kafka.create_topic("t", 1)
        fill(kafka, "t", 50)
        with (
            logcore.open_dir(tmp_path / "copy", create=True) as copy,
            Source(kafka.bootstrap_servers) as source,
        ):
            follow(copy, source, "t")
            assert stored(copy, "t") == stored(kafka.logdir, "t")
        kafka.stop()


@pytest.mark.long
def test_new_partitions_topics_and_settings_are_copied(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    kafka.create_topic("t1", 1)
    follow(copy, source, "t*")
    kafka.logdir.add_partitions("t1", 3)
    kafka.logdir.alter_topic("t1", {"retention.ms": "5000"})
    kafka.create_topic("t2", 1)
    fill(kafka, "t1", partition=2)
    follow(copy, source, "t*")
    assert copy.topics() == ["t1", "t2"]
    assert stored(copy, "t1", 2) == stored(kafka.logdir, "t1", 2)
    assert copy.settings("t1").retention_ms == 5_000


def test_copies_cannot_be_written(kafka: Kafka, copy: LogDir, source: Source) -> None:
    kafka.create_topic("t", 1)
    follow(copy, source, "t")
    with pytest.raises(ReadOnlyLogError):
        copy.append("t", b"local")


def test_deleted_records_are_deleted_in_the_copy(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    kafka.create_topic("t", 1)
    fill(kafka, "t")
    follow(copy, source, "t")
    kafka.logdir.partition("t", 0).delete_records(60)
    follow(copy, source, "t")
    assert copy.partition("t", 0).log_start_offset == 60


def test_empty_copy_begins_at_the_start_of_the_source(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    """The first batch begins below the log start offset, and is copied completely."""
    kafka.create_topic("t", 1)
    fill(kafka, "t")
    kafka.logdir.partition("t", 0).delete_records(60)
    follow(copy, source, "t")
    copied = copy.partition("t", 0)
    assert (copied.log_start_offset, copied.log_end_offset) == (60, 100)
    assert [record.offset for record in copied.read(60)] == list(range(60, 100))


def test_gap_stops_the_follower_unless_gaps_are_skipped(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    kafka.create_topic("t", 1, {"segment.bytes": "1048576"})
    fill(kafka, "t", 10)
    follow(copy, source, "t")
    log = kafka.logdir.partition("t", 0)
    log.roll()
    fill(kafka, "t", 10)
    log.roll()
    fill(kafka, "t", 10)
    log.delete_records(20)
    with pytest.raises(ShippingGapError, match="offsets 10 to 19"):
        follow(copy, source, "t")
    follower = follow(copy, source, "t", on_gap="skip")
    assert follower.metrics().skipped_offsets == 10
    copied = copy.partition("t", 0)
    assert [record.offset for record in copied.read(copied.log_start_offset)] == list(
        range(20, 30)
    )


@pytest.mark.parametrize("on_divergence", ["truncate", "stop"])
def test_follower_truncates_or_stops_after_an_unclean_election_in_the_source(
    kafka: Kafka, copy: LogDir, source: Source, on_divergence: str
) -> None:
    """The source loses copied records, and writes other records in a new epoch."""
    kafka.create_topic("t", 1)
    fill(kafka, "t", 20)
    follow(copy, source, "t")
    log = kafka.logdir.partition("t", 0)
    log.truncate(0)
    log.begin_epoch(log.leader_epoch + 1)
    fill(kafka, "t", 5)
    if on_divergence == "stop":
        with pytest.raises(DivergedError):
            follow(copy, source, "t", on_divergence="stop")
        return
    follower = follow(copy, source, "t")
    assert follower.metrics().truncation_count == 1
    assert stored(copy, "t") == stored(kafka.logdir, "t")


def test_topic_that_was_created_again_stops_the_follower(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    kafka.create_topic("t", 1)
    fill(kafka, "t")
    follow(copy, source, "t")
    kafka.logdir.delete_topic("t")
    kafka.create_topic("t", 1)
    with pytest.raises(DivergedError, match="not a copy"):
        follow(copy, source, "t")


def test_copy_of_a_deleted_topic_is_kept(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    for topic in ("t1", "t2"):
        kafka.create_topic(topic, 1)
        fill(kafka, topic)
    follower = follow(copy, source, "t*")
    kafka.logdir.delete_topic("t1")
    follower._refresh()
    fill(kafka, "t2")
    while copy.partition("t2", 0).log_end_offset < 200:
        follower.step()
    assert list(follower.metrics().failures) == [("t1", 0)]
    assert copy.partition("t1", 0).log_end_offset == 100
    assert copy.partition("t2", 0).log_end_offset == 200


def test_topic_of_the_directory_is_not_overwritten(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    kafka.create_topic("t", 1)
    copy.create_topic("t")
    with pytest.raises(DivergedError):
        follow(copy, source, "t")


def test_missing_topic_is_an_error(copy: LogDir, source: Source) -> None:
    with pytest.raises(RemoteTopicError, match="nothing"):
        follow(copy, source, "nothing")


def test_follower_waits_for_an_unreachable_source(copy: LogDir) -> None:
    with Source("127.0.0.1:1") as source:
        follower = Follower(copy, source, topics=["t"])
        follower.step()
        assert follower.metrics().state == "waiting"
        assert "127.0.0.1:1" in follower.metrics().reason


@pytest.mark.parametrize(
    ("addresses", "settings"),
    [
        ("localhost", {}),
        ("localhost:0", {}),
        ("", {}),
        ("localhost:1", {"security.protocol": "TLS"}),
        ("localhost:1", {"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI"}),
        ("localhost:1", {"compression.type": "zstd"}),
    ],
)
def test_invalid_settings_of_a_source_are_refused(
    addresses: str, settings: dict[str, str]
) -> None:
    with pytest.raises(InvalidConfigError):
        Source(addresses, settings)


@pytest.mark.long
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_secured_source_is_followed(
    kafka_secured: SecuredKafka, copy: LogDir, mechanism: str
) -> None:
    kafka_secured.create_topic("t", 1)
    kafka_secured.allow("alice", "read", "describe_configs", topic="t")
    config = kafka_secured.client_config("alice", mechanism=mechanism)  # type: ignore[arg-type]
    kafka_secured.logdir.append("t", b"value", partition=0)
    addresses = config.pop("bootstrap.servers")
    with Source(addresses, config) as source:
        follow(copy, source, "t")
    assert stored(copy, "t") == stored(kafka_secured.logdir, "t")
    with (
        Source(addresses, {**config, "sasl.password": "wrong"}) as source,
        pytest.raises(LoginError),
    ):
        follow(copy, source, "t")


def test_unknown_authority_of_a_source_is_refused(
    kafka_secured: SecuredKafka, copy: LogDir
) -> None:
    config = kafka_secured.client_config("alice")
    del config["ssl.ca.location"]
    addresses = config.pop("bootstrap.servers")
    with Source(addresses, config) as source, pytest.raises(LoginError):
        follow(copy, source, "t")


# -- promotion -------------------------------------------------------------------------


def test_promoted_copy_appends_in_a_new_epoch(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    kafka.create_topic("t", 2)
    fill(kafka, "t")
    follow(copy, source, "t")
    copied_epoch = copy.partition("t", 0).leader_epoch
    assert promote(copy, source) == ["t"]
    copy.append("t", b"local", partition=0)
    log = copy.partition("t", 0)
    assert log.end_of_epoch(copied_epoch + 1) == (copied_epoch + 1, 101)
    assert log.end_of_epoch(copied_epoch) == (copied_epoch, 100)
    with pytest.raises(DivergedError, match="promoted"):
        follow(copy, source, "t")


def test_copy_that_lags_is_not_promoted_without_anyway(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    kafka.create_topic("t", 1)
    follow(copy, source, "t")
    fill(kafka, "t")
    with pytest.raises(ShippingError, match="t-0"):
        promote(copy, source)
    with pytest.raises(ShippingError, match="source"):
        promote(copy, None)
    assert promote(copy, None, anyway=True) == ["t"]


def test_partial_copy_is_not_promoted(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    kafka.create_topic("t", 1)
    fill(kafka, "t", 10)
    follower = Follower(copy, source, topics=["t"])
    follower._refresh()
    with pytest.raises(ShippingError, match="never caught up"):
        promote(copy, source)


def test_directory_without_copies_is_not_promoted(copy: LogDir) -> None:
    with pytest.raises(InvalidConfigError):
        promote(copy, None)


# -- faults and commands ---------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_lost_connections_cause_no_loss_and_no_duplicates(
    kafka: Kafka,
    copy: LogDir,
    source: Source,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """One read in 20 fails. The follower fetches again and skips no record."""
    kafka.create_topic("t", 3)
    for partition in range(3):
        fill(kafka, "t", 200, partition=partition)
    monkeypatch.setattr("netshim.follow.follower._FIRST_RETRY_S", 0.001)
    random_source = random.Random(seed)
    receive_exactly = SourceConnection._receive_exactly

    def unreliable(connection: SourceConnection, size: int) -> memoryview:
        if not random_source.randrange(20):
            raise ConnectionError("a lost connection")
        return receive_exactly(connection, size)

    monkeypatch.setattr(SourceConnection, "_receive_exactly", unreliable)
    monkeypatch.setattr("netshim.follow.source._PARTITION_BYTES", 2_000)
    follower = follow(copy, source, "t")
    assert follower.metrics().lag_records == 0
    for partition in range(3):
        assert stored(copy, "t", partition) == stored(kafka.logdir, "t", partition)


@pytest.mark.parametrize(
    "response",
    [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\1x", b"", b"HTTP/1.1"],
)
def test_follower_waits_if_the_peer_is_not_a_broker(
    copy: LogDir, response: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1_000)
                peer.sendall(response)

        thread = threading.Thread(target=serve)
        thread.start()
        with Source(f"127.0.0.1:{server.getsockname()[1]}") as source:
            follower = Follower(copy, source, topics=["t"])
            follower.step()
            assert follower.metrics().state == "waiting"
        thread.join()


def test_request_without_a_response_is_not_sent_after_the_close() -> None:
    """The broker would execute the request after the caller has given up."""
    # The buffers of both sockets hold less than this request.
    topics = [wire.METADATA.Request.Topic(name="t" * 30_000)] * 1_000

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ThreadPoolExecutor() as pool,
    ):
        port = server.getsockname()[1]
        connecting = pool.submit(SourceConnection, "127.0.0.1", port, ClientSettings())
        peer, _ = server.accept()
        with peer:
            peer.recv(1_000)
            versions = wire.API_VERSIONS.Response(
                api_keys=[
                    wire.API_VERSIONS.Response.ApiKey(
                        api_key=wire.METADATA.key, min_version=0, max_version=13
                    )
                ]
            )
            frame = wire.encode_response(wire.API_VERSIONS, 0, 1, versions)
            peer.sendall(b"".join(frame))
            connection = connecting.result()
            request = wire.METADATA.Request(topics=topics)
            requesting = pool.submit(connection.request, wire.METADATA, request)
            assert peer.recv(1)
            connection.interrupt()
            assert isinstance(requesting.exception(), RemoteUnavailableError)
            with pytest.raises(ConnectionResetError):
                while peer.recv(1 << 16):
                    pass


def test_commands_follow_and_promote(kafka: Kafka, tmp_path: Path) -> None:
    kafka.create_topic("t", 1)
    fill(kafka, "t", 10)
    data = str(tmp_path / "copy")
    options = ["--from", kafka.bootstrap_servers]
    result = CliRunner().invoke(
        main, ["follow", data, *options, "--topic", "t", "--until-end", "--json"]
    )
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout.splitlines()[-1])
    assert metrics["lags"] == {"t-0": 0} and metrics["state"] == "idle"
    result = CliRunner().invoke(main, ["promote", data, *options])
    assert (result.exit_code, result.stdout) == (0, "promoted t\n")
    result = CliRunner().invoke(main, ["promote", data, *options])
    assert result.exit_code != 0
    assert "nothing to promote" in str(result.exception) + result.output


# -- losses without an error -----------------------------------------------------------


def test_retention_of_the_brokers_of_the_source_is_copied(
    kafka_factory: Callable[..., Kafka], copy: LogDir
) -> None:
    """With Kafka's default of seven days, the copy would delete older records."""
    kafka = kafka_factory(config={"retention.ms": "-1"})
    kafka.create_topic("t", 1)
    kafka.logdir.append("t", b"old", partition=0, timestamp_ms=1_000)
    with Source(kafka.bootstrap_servers) as source:
        follow(copy, source, "t")
    assert copy.settings("t").retention_ms == -1
    copy.tick()
    assert copy.partition("t", 0).log_start_offset == 0


def test_gap_after_an_emptied_copy_is_not_skipped(
    kafka: Kafka, copy: LogDir, source: Source
) -> None:
    kafka.create_topic("t", 1)
    fill(kafka, "t", 10)
    log = kafka.logdir.partition("t", 0)
    follow(copy, source, "t")
    log.delete_records(10)
    follow(copy, source, "t")
    fill(kafka, "t", 10)
    log.delete_records(15)
    with pytest.raises(ShippingGapError, match="offsets 10 to 14"):
        follow(copy, source, "t")


@pytest.mark.parametrize("seed", range(3))
def test_interrupts_cause_no_loss_and_no_duplicates(
    kafka: Kafka,
    copy: LogDir,
    source: Source,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """One read in 10 and one append in 10 are interrupted. The follower continues."""
    kafka.create_topic("t", 3)
    for partition in range(3):
        fill(kafka, "t", 200, partition=partition)
    random_source = random.Random(seed)
    receive_exactly = SourceConnection._receive_exactly
    apply = Follower._apply

    def interrupted_read(connection: SourceConnection, size: int) -> memoryview:
        if not random_source.randrange(10):
            raise KeyboardInterrupt
        return receive_exactly(connection, size)

    def interrupted_apply(follower: Follower, *arguments: Any) -> int:
        if not random_source.randrange(10):
            raise KeyboardInterrupt
        return apply(follower, *arguments)

    monkeypatch.setattr(SourceConnection, "_receive_exactly", interrupted_read)
    monkeypatch.setattr(Follower, "_apply", interrupted_apply)
    monkeypatch.setattr("netshim.follow.follower._FIRST_RETRY_S", 0.001)
    monkeypatch.setattr("netshim.follow.source._PARTITION_BYTES", 2_000)
    follower = Follower(copy, source, topics=["t"])
    # Interrupts are kept because the frames of an error keep the iterator alive.
    interrupts: list[BaseException] = []
    for _ in range(1_000):
        try:
            follower.run(until_end=True)
            break
        except KeyboardInterrupt as error:
            interrupts.append(error)
    assert interrupts and not follower.metrics().failures
    for partition in range(3):
        assert stored(copy, "t", partition) == stored(kafka.logdir, "t", partition)


def test_promotion_refuses_another_source(
    kafka_factory: Callable[..., Kafka], kafka: Kafka, copy: LogDir, source: Source
) -> None:
    kafka.create_topic("t", 1)
    follow(copy, source, "t")
    other = kafka_factory()
    other.create_topic("t", 1)
    with (
        Source(other.bootstrap_servers) as other_source,
        pytest.raises(ShippingError, match="another topic or cluster"),
    ):
        promote(copy, other_source)
    assert promote(copy, source) == ["t"]


def test_pattern_without_a_topic_is_an_error(copy: LogDir, source: Source) -> None:
    with pytest.raises(RemoteTopicError, match="matches"):
        follow(copy, source, "x*")
