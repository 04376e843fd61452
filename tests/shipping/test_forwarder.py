"""Tests of forwarding to a modelled cluster. Every record arrives once and in order, even
if the forwarder or the connection fails at any step.

LOGCORE_SHIPPING_ROUNDS=n tries n schedules of each kind instead of 20; `make slow`
tries 2,000.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import pytest

import logcore
from logcore.errors import (
    DivergedError,
    InvalidConfigError,
    ProducerFencedError,
    RecordRefusedError,
    RemoteTopicError,
    ShippingError,
    ShippingGapError,
    TopicNotFoundError,
)
from logcore.shipping import Forwarder
from logcore.shipping.cluster import OutgoingBatch, ShippedProgress
from logcore.shipping.progress import ProgressStore, RecordedProgress
from logcore.testing import SimulatedDisk
from support.model_cluster import Faults, Killed, ModelCluster, ModelSender

PATH = "edge/data"
ROUNDS = int(os.environ.get("LOGCORE_SHIPPING_ROUNDS", "20"))
MANY = int(os.environ.get("LOGCORE_SHIPPING_ROUNDS", "2000"))
LONG = pytest.param(
    MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many"
)
ORDERS = ("orders", 0)


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk({"edge": None})


@pytest.fixture
def data(disk: SimulatedDisk) -> Iterator[logcore.LogDir]:
    with logcore.open_dir(PATH, create=True, durability="os", fs=disk) as opened:
        opened.create_topic("orders")
        yield opened


@pytest.fixture
def cluster(disk: SimulatedDisk) -> ModelCluster:
    return ModelCluster(random.Random(1), disk, {"orders": 1})


def fill(
    data: logcore.LogDir, count: int, topic: str = "orders", partition: int = 0
) -> None:
    log = data.partition(topic, partition)
    first = log.log_end_offset
    log.append_many([(None, b"%d" % (first + at)) for at in range(count)])


def numbers(start: int, stop: int) -> list[bytes | None]:
    return [b"%d" % at for at in range(start, stop)]


# -- shipped records -------------------------------------------------------------------


@pytest.mark.parametrize("at_least_once", [False, True])
def test_records_arrive_in_order_and_a_later_forwarder_continues(
    data: logcore.LogDir,
    cluster: ModelCluster,
    disk: SimulatedDisk,
    at_least_once: bool,
) -> None:
    for stop in (5, 10):
        fill(data, 5)
        with Forwarder(
            data, cluster.client(), at_least_once=at_least_once, fs=disk
        ) as forwarder:
            forwarder.run(until_end=True)
            assert forwarder.metrics().record_count == 5
        assert cluster.values(ORDERS) == numbers(0, stop)


def test_record_is_shipped_unchanged(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    data.append(
        "orders", None, key=b"k", headers=[("a", b"1"), ("a", None)], timestamp_ms=-1
    )
    with Forwarder(data, cluster.client(), fs=disk) as forwarder:
        forwarder.run(until_end=True)
    assert cluster.visible[ORDERS] == list(data.partition(*ORDERS).read(0))


def test_uncommitted_records_are_not_shipped(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    with data.producer(transactional_id="local", threaded=False) as producer:
        producer.init_transactions()
        for commit in (True, False, True):
            producer.begin_transaction()
            producer.send("orders", b"committed" if commit else b"aborted")
            if commit:
                producer.commit_transaction()
            else:
                producer.flush()
                producer.abort_transaction()
        producer.begin_transaction()
        producer.send("orders", b"open")
        producer.flush()
        with Forwarder(data, cluster.client(), fs=disk) as forwarder:
            forwarder.run(until_end=True)
            assert cluster.values(ORDERS) == [b"committed"] * 2
            producer.commit_transaction()
            forwarder.run(until_end=True)
            assert cluster.values(ORDERS) == [b"committed", b"committed", b"open"]
            forwarder.step()
            assert forwarder.metrics().lag_records == 0, (
                "markers do not count as waiting records"
            )


def test_transactions_keep_within_the_limits(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    fill(data, 10)
    with Forwarder(data, cluster.client(), max_records=4, fs=disk) as forwarder:
        forwarder.run(until_end=True)
        assert forwarder.metrics().batch_count == 3
    fill(data, 10)
    with Forwarder(data, cluster.client(), buffer_memory=200, fs=disk) as forwarder:
        most = 0
        while cluster.values(ORDERS) != numbers(0, 20):
            forwarder.step()
            most = max(most, forwarder.metrics().buffered_bytes)
        assert forwarder.metrics().batch_count == 4, "a batch has three records"
        assert most <= 200
    data.append("orders", b"x" * 1000)
    with Forwarder(data, cluster.client(), buffer_memory=200, fs=disk) as forwarder:
        # A record that is larger than the memory is shipped alone.
        forwarder.run(until_end=True)
    assert cluster.values(ORDERS)[-1] == b"x" * 1000


def test_topics_are_renamed_if_requested(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    fill(data, 3)
    cluster.counts = {"edge.orders": 1}
    with Forwarder(
        data, cluster.client(), rename=lambda name: f"edge.{name}", fs=disk
    ) as forwarder:
        forwarder.run(until_end=True)
        assert cluster.offsets() == {(forwarder.group_id, ("edge.orders", 0)): 3}
    assert cluster.values(("edge.orders", 0)) == numbers(0, 3)
    data.create_topic("other")
    with pytest.raises(
        InvalidConfigError,
        match=r"two topics would be shipped to the same remote topic.*orders and other to one",
    ):
        Forwarder(data, cluster.client(), rename=lambda name: "one", fs=disk)


def test_topics_created_later_are_shipped_too(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    with Forwarder(data, cluster.client(), create_topics=True, fs=disk) as forwarder:
        forwarder.run(until_end=True)
        data.create_topic("more", 2)
        fill(data, 2, "more", 1)
        disk.advance(2_000)
        forwarder.step()
        forwarder.run(until_end=True)
    assert cluster.values(("more", 1)) == numbers(0, 2)
    assert cluster.counts == {"orders": 1, "more": 2}


# -- errors ----------------------------------------------------------------------------


def test_error_for_missing_topic_contains_the_command_to_create_it(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    data.create_topic("wide", 3)
    cluster.counts = {"wide": 2}
    with (
        Forwarder(data, cluster.client(), fs=disk) as forwarder,
        pytest.raises(RemoteTopicError) as found,
    ):
        forwarder.run()
    text = str(found.value)
    assert "kafka-topics --create --topic orders --partitions 1" in text
    assert "kafka-topics --alter --topic wide --partitions 3" in text
    assert "wide: 2 of 3 partitions" in text
    with Forwarder(data, cluster.client(), create_topics=True, fs=disk) as forwarder:
        forwarder.run(until_end=True)
    assert cluster.counts == {"wide": 3, "orders": 1}
    with pytest.raises(TopicNotFoundError, match="'nothing' is not in the directory"):
        Forwarder(data, cluster.client(), topics=["nothing"], fs=disk)


def test_second_forwarder_fences_the_first(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    fill(data, 1)
    with Forwarder(data, cluster.client(), fs=disk) as first:
        first.run(until_end=True)
        with Forwarder(data, cluster.client(), fs=disk) as second:
            second.run(until_end=True)
            fill(data, 1)
            with pytest.raises(
                ProducerFencedError,
                match="another forwarder of the name 'default' ships",
            ):
                first.run(until_end=True)
            second.run(until_end=True)
    assert cluster.values(ORDERS) == numbers(0, 2)


def test_late_commit_of_an_older_forwarder_is_counted_or_aborted(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    """The older forwarder stopped in the middle of a batch. It resumes while the new
    forwarder reads the committed progress.
    """
    fill(data, 5)
    with Forwarder(data, cluster.client(), fs=disk) as older:
        cluster.faults = Faults(wait=1)
        older.step()
        cluster.faults = Faults()
        fenced: list[bool] = []

        def wake() -> None:
            if not fenced:
                fenced.append(True)
                with contextlib.suppress(ProducerFencedError):
                    older.step()

        cluster.after_progress = wake
        with Forwarder(data, cluster.client(), fs=disk) as newer:
            newer.run(until_end=True)
    assert fenced
    assert cluster.values(ORDERS) == numbers(0, 5)


@pytest.mark.parametrize("at_least_once", [False, True])
def test_interrupted_batch_is_sent_again(
    data: logcore.LogDir,
    cluster: ModelCluster,
    disk: SimulatedDisk,
    monkeypatch: pytest.MonkeyPatch,
    at_least_once: bool,
) -> None:
    fill(data, 6)
    begun = ModelSender.start

    def send_half(sender: ModelSender, batch: OutgoingBatch) -> None:
        begun(sender, batch)
        del sender.left[3:]
        raise KeyboardInterrupt

    with Forwarder(
        data, cluster.client(), at_least_once=at_least_once, fs=disk
    ) as forwarder:
        monkeypatch.setattr(ModelSender, "start", send_half)
        with pytest.raises(KeyboardInterrupt):
            forwarder.run()
        monkeypatch.undo()
        forwarder.run(until_end=True)
    assert set(cluster.values(ORDERS)) == set(numbers(0, 6))


def test_second_forwarder_without_transactions_is_refused(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    with Forwarder(data, cluster.client(), at_least_once=True, fs=disk):
        with pytest.raises(
            ShippingError,
            match="another forwarder with the name 'default' is running in process",
        ):
            Forwarder(data, cluster.client(), at_least_once=True, fs=disk)
        Forwarder(
            data, cluster.client(), at_least_once=True, name="other", fs=disk
        ).close()
    Forwarder(data, cluster.client(), at_least_once=True, fs=disk).close()


def test_transaction_timeout_is_not_reported_as_a_takeover(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    """The machine was suspended during the transaction: the cluster has aborted it, and
    fenced its producer.
    """
    fill(data, 3)
    with Forwarder(data, cluster.client(), fs=disk) as forwarder:
        cluster.faults = Faults(wait=1)
        forwarder.step()
        disk.set_wall_clock(disk.now_ms() + 61_000)
        cluster.begin(forwarder.transactional_id)
        cluster.faults = Faults()
        forwarder.step()
        assert forwarder.metrics().state == "waiting"
        forwarder.run(until_end=True)
    assert cluster.values(ORDERS) == numbers(0, 3)


def test_shipper_waits_for_an_unavailable_cluster(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    fill(data, 3)
    with Forwarder(data, cluster.client(), fs=disk) as forwarder:
        cluster.is_unavailable = True
        attempts = []
        for _ in range(1_000):
            forwarder.step()
            attempts.append(forwarder.metrics().retry_count)
        found = forwarder.metrics()
        assert (found.state, found.reason) == ("waiting", "the model is unavailable")
        assert attempts[10] >= 3, "the first retries have short intervals"
        assert attempts[-1] - attempts[500] in (4, 5, 6), (
            "later retries are ten seconds apart"
        )
        cluster.is_unavailable = False
        forwarder.run(until_end=True)
        assert forwarder.metrics().state == "shipping"
    assert cluster.values(ORDERS) == numbers(0, 3)


def test_forwarder_waits_for_a_cluster_that_stops_answering(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    fill(data, 3)
    with Forwarder(data, cluster.client(), fs=disk) as forwarder:
        cluster.faults = Faults(wait=1)
        for _ in range(30):
            forwarder.step()
        found = forwarder.metrics()
        assert (found.state, found.lag_records, found.retry_count) == ("waiting", 3, 0)
        assert found.reason == "the cluster has not responded for 3 s"
        cluster.faults = Faults()
        forwarder.step()
        assert forwarder.metrics().state == "shipping"
    assert cluster.values(ORDERS) == numbers(0, 3)


@pytest.mark.parametrize("at_least_once", [False, True])
@pytest.mark.parametrize("bad", [0, 5, 9])
def test_refused_record_stops_only_its_partition(
    data: logcore.LogDir,
    cluster: ModelCluster,
    disk: SimulatedDisk,
    bad: int,
    at_least_once: bool,
) -> None:
    data.create_topic("other")
    cluster.counts["other"] = 1
    fill(data, bad)
    data.append("orders", b"bad")
    fill(data, 3)
    fill(data, 10, "other")
    cluster.refuses = lambda record: record.value == b"bad"
    with Forwarder(
        data, cluster.client(), at_least_once=at_least_once, fs=disk
    ) as forwarder:
        for _ in range(100):
            forwarder.step()
        failures = forwarder.metrics().failures
        assert list(failures) == [ORDERS]
    assert (
        f"offset {bad}: the cluster refuses a record of orders-0: the model refuses it"
        in failures[ORDERS]
    )
    assert cluster.values(ORDERS) == numbers(0, bad)
    assert cluster.values(("other", 0)) == numbers(0, 10)


@pytest.mark.parametrize("at_least_once", [False, True])
def test_refused_record_is_quarantined_with_its_origin(
    data: logcore.LogDir,
    cluster: ModelCluster,
    disk: SimulatedDisk,
    at_least_once: bool,
) -> None:
    fill(data, 20)
    cluster.refuses = lambda record: record.value in (b"7", b"8", b"19")
    options = {"at_least_once": at_least_once, "fs": disk}
    with Forwarder(
        data, cluster.client(), on_error="quarantine", **options
    ) as forwarder:  # type: ignore[arg-type]
        forwarder.run(until_end=True)
        assert forwarder.metrics().quarantined_count == 3
    notes = ProgressStore(disk, data.path, "default")
    note = notes.read()
    notes.close()
    assert note is not None
    assert note.progress[ORDERS].offset == 20, (
        "the position also passes the last record, which was quarantined"
    )
    if not at_least_once:
        assert list(cluster.offsets().values()) == [20]
    assert cluster.values(ORDERS) == [
        value for value in numbers(0, 20) if value not in (b"7", b"8", b"19")
    ]
    kept = list(data.read("orders.dlq"))
    assert [record.value for record in kept] == [b"7", b"8", b"19"]
    assert kept[0].headers == (
        ("logcore.shipper", b"forward-default"),
        ("logcore.topic", b"orders"),
        ("logcore.partition", b"0"),
        ("logcore.offset", b"7"),
        ("logcore.error", b"the model refuses it"),
    )
    with Forwarder(
        data, cluster.client(), on_error="quarantine", **options
    ) as forwarder:  # type: ignore[arg-type]
        forwarder.run(until_end=True)
    assert len(list(data.read("orders.dlq"))) == 3, (
        "a record in quarantine is stored there again"
    )
    assert "orders.dlq" not in cluster.counts, "a refused record is shipped"


def test_refused_record_fails_a_run_after_the_others_are_shipped(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    data.create_topic("other")
    cluster.counts["other"] = 1
    fill(data, 3)
    data.append("orders", b"bad")
    fill(data, 5, "other")
    cluster.refuses = lambda record: record.value == b"bad"
    with (
        Forwarder(data, cluster.client(), max_records=3, fs=disk) as forwarder,
        pytest.raises(RecordRefusedError, match="offset 3"),
    ):
        forwarder.run(until_end=True)
    assert cluster.values(("other", 0)) == numbers(0, 5)
    assert cluster.values(ORDERS) == numbers(0, 3)


# -- start positions -------------------------------------------------------------------


def test_records_deleted_before_they_were_shipped_stop_the_partition(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    fill(data, 10)
    with Forwarder(data, cluster.client(), fs=disk) as forwarder:
        forwarder.run(until_end=True)
    fill(data, 10)
    data.partition(*ORDERS).delete_records(15)
    with (
        Forwarder(data, cluster.client(), fs=disk) as forwarder,
        pytest.raises(
            ShippingGapError,
            match="offsets 10 to 14 were deleted before they were shipped",
        ),
    ):
        forwarder.run(until_end=True)
    with Forwarder(data, cluster.client(), on_gap="skip", fs=disk) as forwarder:
        forwarder.run(until_end=True)
        assert forwarder.metrics().skipped_offsets == 5
    assert cluster.values(ORDERS) == numbers(0, 10) + numbers(15, 20)


def test_recreated_topic_stops_the_partition(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    """The forwarder continued at its position in the old topic, and skipped the first
    records of the new topic.
    """
    fill(data, 10)
    with Forwarder(data, cluster.client(), fs=disk) as forwarder:
        forwarder.run(until_end=True)
        data.delete_topic(ORDERS[0])
        data.create_topic(ORDERS[0])
        fill(data, 20)
        with pytest.raises(DivergedError, match="deleted and created again"):
            forwarder.run(until_end=True)
    assert cluster.values(ORDERS) == numbers(0, 10)


def test_truncated_log_stops_the_partition(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    fill(data, 10)
    with Forwarder(data, cluster.client(), fs=disk) as forwarder:
        forwarder.run(until_end=True)
    data.partition(*ORDERS).truncate(5)
    with (
        Forwarder(data, cluster.client(), fs=disk) as forwarder,
        pytest.raises(
            DivergedError,
            match=r"ends before its shipped records.*expected offset 10.*found 5",
        ),
    ):
        forwarder.run(until_end=True)


@pytest.mark.parametrize("at_least_once", [False, True])
def test_truncated_log_that_grew_again_stops_the_partition(
    data: logcore.LogDir,
    cluster: ModelCluster,
    disk: SimulatedDisk,
    at_least_once: bool,
) -> None:
    """If appends do not wait for the disk, a power cut may leave other records at
    offsets that were shipped. The forwarder would skip these records without an error.
    """
    fill(data, 10)
    with Forwarder(
        data, cluster.client(), at_least_once=at_least_once, fs=disk
    ) as forwarder:
        forwarder.run(until_end=True)
    data.partition(*ORDERS).truncate(8)
    data.partition(*ORDERS).append_many([(None, b"other %d" % at) for at in range(8)])
    with (
        Forwarder(
            data, cluster.client(), at_least_once=at_least_once, fs=disk
        ) as forwarder,
        pytest.raises(
            DivergedError,
            match="offset 9: the last shipped record is not in the local log",
        ),
    ):
        forwarder.run(until_end=True)
    assert cluster.values(ORDERS) == numbers(0, 10)


def test_forwarder_continues_after_shipped_records_are_deleted(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    fill(data, 10)
    with Forwarder(data, cluster.client(), fs=disk) as forwarder:
        forwarder.run(until_end=True)
    data.partition(*ORDERS).delete_records(10)
    fill(data, 5)
    with Forwarder(data, cluster.client(), fs=disk) as forwarder:
        forwarder.run(until_end=True)
    assert cluster.values(ORDERS) == numbers(0, 15)


@pytest.mark.parametrize("at_least_once", [False, True])
def test_progress_of_another_cluster_is_refused(
    data: logcore.LogDir,
    cluster: ModelCluster,
    disk: SimulatedDisk,
    at_least_once: bool,
) -> None:
    fill(data, 10)
    with Forwarder(
        data, cluster.client(), at_least_once=at_least_once, fs=disk
    ) as forwarder:
        forwarder.run(until_end=True)
    other = ModelCluster(random.Random(1), disk, {"orders": 1}, name="another")
    with (
        Forwarder(
            data, other.client(), at_least_once=at_least_once, fs=disk
        ) as forwarder,
        pytest.raises(
            ShippingError,
            match="has shipped to another cluster before",
        ),
    ):
        forwarder.run(until_end=True)
    with Forwarder(
        data, other.client(), at_least_once=at_least_once, name="other", fs=disk
    ) as forwarder:
        forwarder.run(until_end=True)
    assert other.values(ORDERS) == numbers(0, 10)


@pytest.mark.parametrize(
    ("on_lost", "values"),
    [("noted", numbers(0, 5)), ("start", numbers(0, 10) + numbers(10, 15))],
)
def test_progress_that_the_cluster_has_lost_stops_the_partition(
    data: logcore.LogDir,
    cluster: ModelCluster,
    disk: SimulatedDisk,
    on_lost: str,
    values: list[bytes | None],
) -> None:
    fill(data, 10)
    with Forwarder(data, cluster.client(), fs=disk) as forwarder:
        forwarder.run(until_end=True)
    cluster.visible.clear()
    cluster.progress.clear()
    fill(data, 5)
    with (
        Forwarder(data, cluster.client(), fs=disk) as forwarder,
        pytest.raises(
            DivergedError,
            match=r"the remote cluster has lost progress.*offset 10 or above, found none",
        ),
    ):
        forwarder.run(until_end=True)
    with Forwarder(data, cluster.client(), on_lost=on_lost, fs=disk) as forwarder:  # type: ignore[arg-type]
        forwarder.run(until_end=True)
    assert cluster.values(ORDERS) == (numbers(10, 15) if on_lost == "noted" else values)


def test_progress_is_moved_between_directory_and_cluster(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    for turn, at_least_once in enumerate([True, False, True, False]):
        fill(data, 5)
        with Forwarder(
            data, cluster.client(), at_least_once=at_least_once, fs=disk
        ) as forwarder:
            forwarder.run(until_end=True)
        assert cluster.values(ORDERS) == numbers(0, 5 * turn + 5)


def test_idle_forwarder_commits_again_before_its_offsets_expire(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    fill(data, 5)
    with Forwarder(data, cluster.client(), fs=disk) as forwarder:
        forwarder.run(until_end=True)
        cluster.progress.clear()
        disk.advance(3_600_000)
        forwarder.step()
        assert cluster.offsets() == {(forwarder.group_id, ORDERS): 5}
    assert cluster.values(ORDERS) == numbers(0, 5)


def test_local_retention_waits_for_unshipped_records(
    data: logcore.LogDir, cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    fill(data, 10)
    with Forwarder(data, cluster.client(), name="edge", fs=disk) as forwarder:
        forwarder.run(until_end=True)
    assert data.committed_offsets(*ORDERS) == {"forward-edge": 10}


def test_forwarder_on_a_read_only_directory_stores_nothing(
    cluster: ModelCluster, disk: SimulatedDisk
) -> None:
    with logcore.open_dir(PATH, create=True, durability="os", fs=disk) as data:
        data.create_topic("orders")
        fill(data, 5)
        with logcore.open_dir(PATH, read_only=True, fs=disk) as beside:
            with Forwarder(beside, cluster.client(), fs=disk) as forwarder:
                forwarder.run(until_end=True)
                fill(data, 5)
                forwarder.run(until_end=True)
            with pytest.raises(InvalidConfigError, match="opened with read_only=True"):
                Forwarder(beside, cluster.client(), on_error="quarantine", fs=disk)
    assert cluster.values(ORDERS) == numbers(0, 10)


# -- kills and lost connections --------------------------------------------------------


def ship_despite_interruptions(seed: int, at_least_once: bool) -> None:
    """Run forwarders that are killed or disconnected at any step, until all records are
    shipped.
    """
    chance = random.Random(seed)
    disk = SimulatedDisk({"edge": None}, seed=seed)
    cluster = ModelCluster(
        chance, disk, {"orders": 2}, faults=Faults(kill=0.02, lose=0.02, wait=0.2)
    )
    with logcore.open_dir(PATH, create=True, durability="os", fs=disk) as data:
        data.create_topic("orders", 2)
        deaths = 0
        for _ in range(4):
            for number in range(2):
                fill(data, chance.randrange(8), partition=number)
            forwarder: Forwarder | None = None
            try:
                client = cluster.client()
                options = {
                    "max_records": chance.randrange(1, 6),
                    "at_least_once": at_least_once,
                }
                forwarder = Forwarder(data, client, fs=disk, **options)  # type: ignore[arg-type]
                for _ in range(chance.randrange(1, 20)):
                    forwarder.step()
                forwarder.close()
            except Killed:
                deaths += 1
                assert forwarder is not None
                # The operating system releases the locks of a killed process.
                forwarder._progress_store.close()
        cluster.faults = Faults()
        with Forwarder(
            data, cluster.client(), at_least_once=at_least_once, fs=disk
        ) as last:
            last.run(until_end=True)
        for number in range(2):
            wanted = numbers(0, data.partition("orders", number).log_end_offset)
            found = cluster.values(("orders", number))
            if not at_least_once:
                assert found == wanted
            else:
                assert count_repetitions(found) == len(wanted)


def count_repetitions(found: list[bytes | None]) -> int:
    """Return how often records were sent again.

    Each repetition must start at an earlier record, and continue without a gap.
    """
    reached = 0
    before = -1
    for value in found:
        number = int(value or b"")
        assert number <= before + 1, (
            "no record arrives before the records that precede it"
        )
        before = number
        reached = max(reached, number + 1)
    return reached


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize(
    "at_least_once", [False, True], ids=["exactly-once", "at-least-once"]
)
def test_every_record_arrives_despite_kills_and_lost_connections(
    at_least_once: bool, rounds: int
) -> None:
    for seed in range(rounds):
        try:
            ship_despite_interruptions(seed, at_least_once)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def test_stored_progress_equals_the_saved_progress(
    data: logcore.LogDir, disk: SimulatedDisk
) -> None:
    notes = ProgressStore(disk, data.path, "edge")
    assert notes.read() is None
    notes.acquire_lock()
    assert notes.read() is None
    note = RecordedProgress(
        "cluster",
        "id",
        {("a", 3): ShippedProgress(7, "6:01234567"), ("a", 0): ShippedProgress(1)},
    )
    notes.write(note)
    assert notes.read() == note
    notes.close()
