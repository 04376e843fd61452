"""Guarantees of a transactional producer, one per test. Random schedules are in
test_transaction_exploration.py.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.consumer import TopicPartition
from logcore.consumer.settings import GroupMetadata
from logcore.coordination.transaction_effects import (
    NO_TIMEOUT,
    Initialize,
    TransactionError,
    TransactionReply,
)
from logcore.coordination.transactions import TransactionMachine
from logcore.coordinators import durable_queue
from logcore.coordinators import transactions as producer_coordinator
from logcore.coordinators.local_groups import LocalGroups
from logcore.coordinators.transactions import TransactionCoordinator
from logcore.errors import (
    CommitFailedError,
    InvalidConfigError,
    LogcoreError,
    LogLockedError,
    ProducerFencedError,
    ProducerStateError,
    RecordTooLargeError,
    ResourceError,
    TransactionAbortedError,
)
from logcore.format.group_records import Committed, commit_key, commit_value
from logcore.format.transaction_records import Status
from logcore.logdir import LogDir
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.partition.coordinator_append import append_to_transaction
from logcore.producer.transaction_manager import (
    ALLOWED_TRANSITIONS,
    TransactionManager,
    TransactionState,
)
from logcore.producer.transactional_producer import TransactionalProducer
from logcore.recordbatch import encode
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from support.interrupting import interrupted


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def data(disk: SimulatedDisk) -> Iterator[LogDir]:
    with logcore.open_dir("/data", create=True, fs=disk) as directory:
        directory.create_topic("t", 3)
        yield directory


def unthreaded(data: LogDir, name: str = "id", **given: Any) -> TransactionalProducer:
    """Create a producer without a thread. Its retries wait for the simulated clock."""
    return data.producer(
        transactional_id=name,
        threaded=False,
        retry_backoff_ms=1,
        retry_backoff_max_ms=1,
        **{"linger_ms": 0, **given},
    )


def begin(data: LogDir, name: str = "id", **given: Any) -> TransactionalProducer:
    producer = unthreaded(data, name, **given)
    producer.init_transactions()
    producer.begin_transaction()
    return producer


def committed(data: LogDir, partition: int = 0) -> list[bytes | None]:
    log = data.partition("t", partition)
    return [
        record.value
        for record in log.read(log.log_start_offset, isolation="read_committed")
    ]


def status(data: LogDir, name: str = "id") -> Status:
    return data.host.coordinators.transactions(data).all()[name].status


def offsets(data: LogDir, group: str = "g") -> dict[Any, int]:
    found = data.host.coordinators.groups(data).committed(group)
    return {tuple(key): each.offset for key, each in found.items()}


# -- atomicity ------------------------------------------------------------------------


def test_records_are_visible_once_their_transaction_is_committed(data: LogDir) -> None:
    with begin(data) as producer:
        for partition in range(3):
            producer.send("t", b"v%d" % partition, partition=partition)
        producer.flush()
        assert [committed(data, partition) for partition in range(3)] == [[], [], []]
        producer.commit_transaction()
        assert [committed(data, partition) for partition in range(3)] == [
            [b"v0"],
            [b"v1"],
            [b"v2"],
        ]
        assert status(data) is Status.COMPLETE_COMMIT


def test_records_of_an_aborted_transaction_are_never_visible(data: LogDir) -> None:
    with begin(data) as producer:
        stored = producer.send("t", b"stored", partition=0)
        producer.flush()
        waiting = producer.send("t", b"waiting", partition=1)
        producer.abort_transaction()
        assert stored.result(0).offset == 0
        with pytest.raises(TransactionAbortedError):
            waiting.result(0)
        producer.begin_transaction()
        producer.send("t", b"next", partition=0)
        producer.commit_transaction()
    assert [committed(data, partition) for partition in range(2)] == [[b"next"], []]


def test_each_transaction_has_its_own_epoch(data: LogDir) -> None:
    with unthreaded(data) as producer:
        for number in range(3):
            with producer.transaction():
                producer.send("t", b"%d" % number, partition=0)
    log = data.partition("t", 0)
    heads = [
        (batch.producer_epoch, batch.base_sequence)
        for batch in log.batches(0)
        if not batch.is_control
    ]
    assert heads == [(0, 0), (1, 0), (2, 0)]
    assert committed(data) == [b"0", b"1", b"2"]


def test_block_that_raises_is_aborted(data: LogDir) -> None:
    with unthreaded(data) as producer:
        with pytest.raises(KeyError), producer.transaction():
            producer.send("t", b"v", partition=0)
            producer.flush()
            raise KeyError("mine")
        assert status(data) is Status.COMPLETE_ABORT
        with producer.transaction():
            producer.send("t", b"w", partition=0)
    assert committed(data) == [b"w"]


def test_empty_transaction_writes_nothing(data: LogDir) -> None:
    with begin(data) as producer:
        log = data.partition("__transaction_state", 0)
        end = log.log_end_offset
        producer.commit_transaction()
        producer.begin_transaction()
        producer.abort_transaction()
        assert log.log_end_offset == end


def test_close_aborts_the_open_transaction(data: LogDir) -> None:
    with begin(data) as producer:
        producer.send("t", b"v", partition=0)
        producer.flush()
    assert status(data) is Status.COMPLETE_ABORT
    assert committed(data) == []
    assert (
        data.partition("t", 0).last_stable_offset
        == data.partition("t", 0).high_watermark
    )


def test_close_logs_a_transaction_that_it_cannot_abort(
    disk: SimulatedDisk, data: LogDir, caplog: pytest.LogCaptureFixture
) -> None:
    producer = begin(data)
    producer.send("t", b"v", partition=0)
    producer.flush()
    disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.log", times=None))
    producer.close(timeout=0)
    disk.faults = FaultPlan()
    logged = [
        record.getMessage()
        for record in caplog.records
        if record.name == "logcore.transactions"
    ]
    assert any(
        "the open transaction of 'id' was not aborted" in text for text in logged
    ), logged


def test_committed_transaction_is_durable(disk: SimulatedDisk, data: LogDir) -> None:
    with begin(data) as producer:
        producer.send("t", b"v", partition=0)
        producer.commit_transaction()
        for crashed in disk.crash_states(limit=50):
            with logcore.open_dir("/data", fs=crashed.disk()) as again:
                log = again.partition("t", 0)
                again.tick()
                assert [
                    record.value for record in log.read(0, isolation="read_committed")
                ] == [b"v"]


# -- offsets ---------------------------------------------------------------------------


def test_offsets_are_committed_with_their_transaction(data: LogDir) -> None:
    with begin(data) as producer:
        producer.send_offsets_to_transaction({("t", 0): 5}, "g")
        assert offsets(data) == {}
        producer.commit_transaction()
        assert offsets(data) == {("t", 0): 5}
        producer.begin_transaction()
        producer.send_offsets_to_transaction({("t", 0): 9}, "g")
        producer.abort_transaction()
        assert offsets(data) == {("t", 0): 5}


def test_offsets_of_a_replaced_member_are_refused(data: LogDir) -> None:
    data.append("t", b"v", partition=0)
    with (
        data.consumer(group_id="g", enable_auto_commit=False) as consumer,
        begin(data) as producer,
    ):
        consumer.subscribe(["t"])
        consumer.poll(0)
        known = consumer.group_metadata()
        stale = GroupMetadata(
            known.group_id, known.generation - 1, known.member_id, None
        )
        with pytest.raises(CommitFailedError, match="'g'"):
            producer.send_offsets_to_transaction({("t", 0): 1}, stale)
        with pytest.raises(TransactionAbortedError):
            producer.commit_transaction()
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send_offsets_to_transaction({("t", 0): 1}, known)
        producer.commit_transaction()
        assert consumer.committed([("t", 0)])[TopicPartition("t", 0)].offset == 1  # type: ignore[union-attr]


def test_consumer_waits_for_offsets_of_an_open_transaction(
    data: LogDir,
) -> None:
    for number in range(4):
        data.append("t", b"%d" % number, partition=0)
    with begin(data) as producer:
        producer.send_offsets_to_transaction({("t", 0): 3}, "g")
        with data.consumer(
            group_id="g", isolation_level="read_committed", auto_offset_reset="earliest"
        ) as consumer:
            consumer.assign([("t", 0)])
            assert consumer.poll(0).count == 0
            producer.commit_transaction()
            assert [record.offset for record in consumer.poll(0).records()] == [3]


def test_transaction_that_ends_during_a_query_of_offsets_counts(
    data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        data.append("t", b"%d" % number, partition=0)
    with begin(data) as producer:
        producer.send_offsets_to_transaction({("t", 0): 3}, "g")
        groups = data.host.coordinators.groups(data)
        known = groups.committed

        def committed_before(group_id: str) -> Any:
            found = known(group_id)
            monkeypatch.undo()
            producer.commit_transaction()
            return found

        monkeypatch.setattr(groups, "committed", committed_before)
        with data.consumer(
            group_id="g", isolation_level="read_committed", auto_offset_reset="earliest"
        ) as consumer:
            consumer.assign([("t", 0)])
            found = [*consumer.poll(0).records(), *consumer.poll(0).records()]
            assert [record.offset for record in found] == [3]


def test_negative_offset_is_refused(data: LogDir) -> None:
    with (
        begin(data) as producer,
        pytest.raises(InvalidConfigError, match="of at least 0"),
    ):
        producer.send_offsets_to_transaction({("t", 0): -1}, "g")


# -- fencing and timeouts -------------------------------------------------------------


def test_init_of_an_id_aborts_and_fences_the_old_producer(data: LogDir) -> None:
    with begin(data) as old, unthreaded(data) as new:
        old.send("t", b"old", partition=0)
        old.flush()
        new.init_transactions()
        assert status(data) is Status.EMPTY
        lost = old.send("t", b"late", partition=0)
        with pytest.raises((ProducerFencedError, TransactionAbortedError)):
            old.commit_transaction()
        assert lost.exception(0) is not None
        with pytest.raises(ProducerFencedError):
            old.abort_transaction()
        with pytest.raises(ProducerFencedError):
            old.begin_transaction()
        new.begin_transaction()
        new.send("t", b"new", partition=0)
        new.commit_transaction()
    assert committed(data) == [b"new"]


def test_transaction_is_aborted_after_its_timeout_by_tick(
    disk: SimulatedDisk, data: LogDir
) -> None:
    with begin(data, transaction_timeout_ms=5_000) as producer:
        producer.send("t", b"v", partition=0)
        producer.flush()
        disk.advance(4_000)
        data.tick()
        assert status(data) is Status.ONGOING
        disk.advance(2_000)
        data.tick()
        assert status(data) is Status.COMPLETE_ABORT
        with pytest.raises(TransactionAbortedError):
            producer.commit_transaction()
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send("t", b"w", partition=0)
        producer.commit_transaction()
    assert committed(data) == [b"w"]


def test_next_opening_aborts_an_expired_transaction(
    disk: SimulatedDisk,
) -> None:
    with logcore.open_dir("/data", create=True, fs=disk) as data:
        data.create_topic("t")
        producer = begin(data, transaction_timeout_ms=5_000)
        producer.send("t", b"v", partition=0)
        producer.flush()
        crashed = next(iter(disk.crash_states(limit=1))).disk()
        producer.close()
    with logcore.open_dir("/data", fs=crashed) as data:
        data.tick()
        assert status(data) is Status.ONGOING
        crashed.advance(6_000)
        data.tick()
        assert status(data) is Status.COMPLETE_ABORT


@pytest.mark.parametrize(
    ("before", "wanted"), list(itertools.product(TransactionState, TransactionState))
)
def test_state_transitions_follow_the_table(
    data: LogDir, before: TransactionState, wanted: TransactionState
) -> None:
    with unthreaded(data) as producer:
        transaction_manager: TransactionManager = producer._transaction_manager
        transaction_manager.state = before
        is_allowed = wanted in ALLOWED_TRANSITIONS[before]
        with producer._lock:
            if is_allowed:
                transaction_manager.enter(wanted)
            else:
                with pytest.raises(ProducerStateError, match=f"from {before.name}"):
                    transaction_manager.enter(wanted)
            assert transaction_manager.state is (wanted if is_allowed else before)
            transaction_manager.state = TransactionState.UNINITIALIZED


def test_calls_in_the_wrong_state_are_refused(data: LogDir) -> None:
    with unthreaded(data) as producer:
        with pytest.raises(ProducerStateError, match="UNINITIALIZED"):
            producer.begin_transaction()
        producer.init_transactions()
        with pytest.raises(ProducerStateError, match="begin_transaction"):
            producer.send("t", b"v")
        with pytest.raises(ProducerStateError, match="begin_transaction"):
            producer.send_many("t", [(b"k", b"v")])
        with pytest.raises(ProducerStateError, match="begin_transaction"):
            producer.send_columns("t", values=[b"v"])
        with pytest.raises(ProducerStateError):
            producer.commit_transaction()
        with pytest.raises(ProducerStateError):
            producer.send_offsets_to_transaction({("t", 0): 1}, "g")
        producer.begin_transaction()
        with pytest.raises(ProducerStateError):
            producer.begin_transaction()
        producer.send("t", b"v", partition=0)
        producer.commit_transaction()
    assert committed(data) == [b"v"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"transactional_id": ""}, "a text"),
        ({"transactional_id": "x", "acks": 1}, "acks='all'"),
        ({"transactional_id": "x", "enable_idempotence": False}, "enable_idempotence"),
        (
            {"transactional_id": "x", "transaction_timeout_ms": 900_001},
            "at most 900000",
        ),
        ({"transactional_id": "x", "transaction_timeout_ms": 0}, "at least 1"),
    ],
)
def test_contradictory_settings_are_refused(
    data: LogDir, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        data.producer(**given)


def test_configuration_with_an_id_creates_a_transactional_producer(
    data: LogDir,
) -> None:
    config = {"transactional.id": "x", "transaction.timeout.ms": "1000"}
    with data.producer(config=config, threaded=False) as producer:
        assert isinstance(producer, TransactionalProducer)


def test_directory_served_by_a_broker_refuses_its_own_producers(
    data: LogDir,
) -> None:
    producer = unthreaded(data)
    data.host.has_coordinator = True
    with pytest.raises(ProducerStateError, match="Kafka client"):
        producer.init_transactions()
    data.host.has_coordinator = False
    producer.close()


def test_open_transaction_without_a_record_is_aborted(
    disk: SimulatedDisk,
) -> None:
    """A broker under a policy that does not wait for syncs may leave this state."""
    with logcore.open_dir("/data", create=True, fs=disk) as data:
        data.create_topic("t")
        with data.producer(transactional_id="id", threaded=False) as producer:
            producer.init_transactions()
        producer_fields = {"producer_id": 77, "producer_epoch": 3, "base_sequence": 0}
        data.partition("t", 0).append_batch(
            encode([(None, b"v")], transactional=True, **producer_fields)
        )
        crashed = next(iter(disk.crash_states(limit=1))).disk()
    with logcore.open_dir("/data", fs=crashed) as data:
        log = data.partition("t", 0)
        assert log.last_stable_offset == 0
        data.tick()
        assert log.last_stable_offset == log.log_end_offset == 2
        assert committed(data) == []


def test_offsets_left_open_by_a_power_cut_are_released(
    disk: SimulatedDisk,
) -> None:
    """This holds even if the groups were loaded before the transaction was aborted."""
    with logcore.open_dir("/data", create=True, fs=disk) as data:
        data.create_topic("t")
        with data.producer(transactional_id="id", threaded=False) as producer:
            producer.init_transactions()
        with data.consumer(group_id="g", enable_auto_commit=False) as consumer:
            consumer.assign([("t", 0)])
            consumer.commit({("t", 0): 1})
        record = (
            commit_key("g", "t", 0),
            commit_value(Committed(5, -1, "", disk.now_ms())),
        )
        append_to_transaction(
            data.partition(OFFSETS_TOPIC, 0).host.writer,
            [record],
            77,
            3,
            durability="disk",
        )
        crashed = next(iter(disk.crash_states(limit=1))).disk()
    with logcore.open_dir("/data", fs=crashed) as data:
        groups = data.host.coordinators.groups(data)
        assert groups.unstable("g") == {("t", 0)}
        data.tick()
        assert groups.unstable("g") == set()


def test_markers_are_accepted_after_markers_of_kafka(disk: SimulatedDisk) -> None:
    """Kafka's leader epochs, and therefore its coordinator epochs, are above 0."""
    with logcore.open_dir("/data", create=True, fs=disk) as data:
        data.create_topic("t", 2)
        with begin(data) as producer:
            producer.send("t", b"v", partition=0)
            producer.commit_transaction()
            (known,) = data.transactions().values()
            log = data.partition("t", 0)
            log.end_transaction(
                known.producer_id,
                known.producer_epoch,
                commit=True,
                coordinator_epoch=7,
            )
            producer.begin_transaction()
            producer.send("t", b"w", partition=0)
            producer.commit_transaction()
        assert log.last_stable_offset == log.log_end_offset == 5
        data.partition("t", 1).end_transaction(77, 3, commit=True, coordinator_epoch=7)
        producer_fields = {"producer_id": 77, "producer_epoch": 3, "base_sequence": 0}
        data.partition("t", 1).append_batch(
            encode([(None, b"v")], transactional=True, **producer_fields),
            durability="disk",
        )
        crashed = next(iter(disk.crash_states(limit=1))).disk()
    with logcore.open_dir("/data", fs=crashed) as data:
        log = data.partition("t", 1)
        assert log.last_stable_offset == 1
        data.tick()
        assert log.last_stable_offset == log.log_end_offset == 3


def test_fenced_marker_is_written_later(
    disk: SimulatedDisk, data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begin(data) as producer:
        producer.send("t", b"v", partition=0)
        producer.flush()
        (known,) = data.transactions().values()
        log = data.partition("t", 0)
        # Another coordinator has written a marker in between.
        monkeypatch.setattr(producer_coordinator, "marker_epoch", lambda *_: 0)
        log.end_transaction(
            known.producer_id, known.producer_epoch, commit=True, coordinator_epoch=7
        )
        producer.commit_transaction()
        assert status(data) is Status.PREPARE_COMMIT
        monkeypatch.undo()
        disk.advance(2_000)
        data.tick()
        assert status(data) is Status.COMPLETE_COMMIT


# -- two-phase commit with another store ----------------------------------------------


def test_prepared_transaction_is_decided_by_the_other_store(data: LogDir) -> None:
    with unthreaded(data, two_phase=True) as producer:
        producer.init_transactions()
        for is_kept in (True, False):
            producer.begin_transaction()
            producer.send("t", b"%d" % is_kept, partition=0)
            text = producer.prepare_transaction()
            with pytest.raises(ProducerStateError):
                producer.send("t", b"more", partition=0)
            assert producer.complete_transaction(text if is_kept else "7:7") is is_kept
    assert committed(data) == [b"1"]


def test_empty_transaction_is_prepared_as_an_empty_text(data: LogDir) -> None:
    with begin(data, two_phase=True) as producer:
        assert producer.prepare_transaction() == ""
        assert producer.complete_transaction("")
        producer.begin_transaction()


@pytest.mark.parametrize("is_kept", [True, False])
def test_prepared_transaction_survives_its_process(
    disk: SimulatedDisk, is_kept: bool
) -> None:
    """It survives twice: the second process also dies before it has read the other
    store.
    """
    with logcore.open_dir("/data", create=True, fs=disk) as data:
        data.create_topic("t", 1, {"retention.ms": -1})
        producer = begin(data, two_phase=True)
        producer.send("t", b"v", partition=0)
        text = producer.prepare_transaction()
        crashed = next(iter(disk.crash_states(limit=1, kind="power"))).disk()
        producer.close()
    with logcore.open_dir("/data", fs=crashed) as data:
        data.tick()
        crashed.advance(30 * 86_400_000)  # longer than a timeout of 2^31 - 1 ms
        data.tick()
        with unthreaded(data, two_phase=True) as producer:
            producer.init_transactions(keep_prepared=True)
            assert status(data) is Status.ONGOING
            with pytest.raises(ProducerStateError):
                producer.begin_transaction()
        crashed = next(iter(crashed.crash_states(limit=1, kind="power"))).disk()
    with (
        logcore.open_dir("/data", fs=crashed) as data,
        unthreaded(data, two_phase=True) as producer,
    ):
        producer.init_transactions(keep_prepared=True)
        assert producer.complete_transaction(text if is_kept else "") is is_kept
        assert committed(data) == [b"v"] * is_kept
        with producer.transaction():
            producer.send("t", b"next", partition=0)
        assert committed(data) == [*[b"v"] * is_kept, b"next"]


def test_producer_that_completes_for_another_fences_it(data: LogDir) -> None:
    with begin(data, two_phase=True) as old, unthreaded(data, two_phase=True) as new:
        old.send("t", b"v", partition=0)
        text = old.prepare_transaction()
        new.init_transactions(keep_prepared=True)
        assert new.complete_transaction(text)
        with pytest.raises(ProducerFencedError):
            old.complete_transaction(text)
        with new.transaction():
            new.send("t", b"w", partition=0)
    assert committed(data) == [b"v", b"w"]


def test_complete_without_prepare_is_refused(data: LogDir) -> None:
    with begin(data, two_phase=True) as producer:
        producer.send("t", b"v", partition=0)
        producer.flush()
        with pytest.raises(ProducerStateError, match="prepared"):
            producer.complete_transaction("0:0")
        producer.commit_transaction()
    assert committed(data) == [b"v"]


def test_failure_during_prepare_aborts_the_transaction(data: LogDir) -> None:
    data.create_topic("small", 1, {"max.message.bytes": 200})
    with begin(data, two_phase=True, batch_size=1 << 20) as producer:
        producer.send("small", bytes(500))
        with pytest.raises(TransactionAbortedError):
            producer.prepare_transaction()
        with pytest.raises(TransactionAbortedError):
            producer.complete_transaction("0:0")
        producer.abort_transaction()
        producer.begin_transaction()


def test_init_without_a_timeout_is_refused_by_default(data: LogDir) -> None:
    effects = TransactionMachine().handle(
        Initialize(transactional_id="id", timeout_ms=NO_TIMEOUT), "waiter", 0
    )
    assert effects == [
        TransactionReply("waiter", TransactionError.INVALID_TRANSACTION_TIMEOUT)
    ]


# -- failures --------------------------------------------------------------------------


def test_failed_transaction_can_only_be_aborted(
    disk: SimulatedDisk, data: LogDir
) -> None:
    with begin(data, delivery_timeout_ms=50) as producer:
        producer.send("t", b"first", partition=0)
        producer.flush()
        disk.faults = FaultPlan(
            Fault("pwrite", errno.EIO, path="/data/t-1/*.log", times=None)
        )
        failed = producer.send("t", b"fails", partition=1)
        for _ in range(10):
            producer.poll()
            disk.advance(10)
        producer.poll()
        assert failed.exception(0) is not None
        with pytest.raises(TransactionAbortedError, match="aborted"):
            producer.send("t", b"more", partition=0)
        with pytest.raises(TransactionAbortedError):
            producer.commit_transaction()
        disk.faults = None
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send("t", b"second", partition=0)
        producer.commit_transaction()
    assert committed(data) == [b"second"]
    assert committed(data, 1) == []


def test_record_that_fails_during_a_commit_fails_the_commit(
    data: LogDir,
) -> None:
    data.create_topic("small", 1, {"max.message.bytes": 200})
    with begin(data, batch_size=1 << 20) as producer:
        producer.send("t", b"v", partition=0)
        failed = producer.send("small", bytes(500))
        with pytest.raises(TransactionAbortedError, match="larger"):
            producer.commit_transaction()
        assert isinstance(failed.exception(0), RecordTooLargeError)
        producer.abort_transaction()
    assert committed(data) == []


def test_failed_transaction_writes_no_more_records(data: LogDir) -> None:
    data.create_topic("small", 1, {"max.message.bytes": 200})
    with begin(data, linger_ms=1_000, batch_size=100) as producer:
        waiting = producer.send("t", b"v", partition=0)
        producer.send("small", bytes(500))
        # This record fills the previous batch, which is written at once.
        producer.send("small", bytes(500))
        producer.poll()
        assert isinstance(waiting.exception(0), TransactionAbortedError)
    assert data.partition("t", 0).log_end_offset == 0


@pytest.mark.parametrize("operation", ["pwrite", "fdatasync"])
def test_commit_whose_decision_was_not_stored_can_be_repeated(
    disk: SimulatedDisk, data: LogDir, operation: str
) -> None:
    with begin(data) as producer:
        producer.send("t", b"v", partition=0)
        producer.flush()
        disk.faults = FaultPlan(
            Fault(operation, errno.EIO, path="/data/__transaction_state-0/*.log")
        )
        with pytest.raises(ResourceError):
            producer.commit_transaction(timeout=0)
        with pytest.raises(ProducerStateError):
            producer.begin_transaction()
        disk.faults = None
        producer.commit_transaction()
        producer.begin_transaction()
        producer.send("t", b"w", partition=0)
        producer.commit_transaction()
    assert committed(data) == [b"v", b"w"]


@pytest.mark.parametrize("operation", ["pwrite", "fdatasync"])
def test_marker_that_was_not_stored_is_written_later(
    disk: SimulatedDisk, data: LogDir, operation: str
) -> None:
    with begin(data) as producer:
        producer.send("t", b"v", partition=0)
        producer.send("t", b"w", partition=1)
        producer.flush()
        disk.faults = FaultPlan(Fault(operation, errno.EIO, path="/data/t-1/*.log"))
        producer.commit_transaction()  # the decision is stored, so that the commit will complete
        assert status(data) is Status.PREPARE_COMMIT
        disk.faults = None
        disk.advance(2_000)
        data.tick()
        assert status(data) is Status.COMPLETE_COMMIT
    assert (committed(data, 0), committed(data, 1)) == ([b"v"], [b"w"])


def test_failed_check_of_overdue_transactions_delays_no_record(
    disk: SimulatedDisk, data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_coordinator: TransactionCoordinator) -> None:
        raise LogLockedError("another process holds this lock")

    with begin(data) as producer:
        monkeypatch.setattr(TransactionCoordinator, "end_overdue", failing)
        disk.advance(5_000)
        future = producer.send("t", b"v", partition=0)
        producer.poll()
        assert future.result(0).offset == 0
        producer.commit_transaction()
    assert committed(data) == [b"v"]


def test_directory_can_be_closed_while_groups_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading needs the lock of the directory from time to time, and holds another
    lock, for which close() must not wait.
    """
    reading = threading.Event()
    is_closed = threading.Event()
    failures: list[BaseException] = []
    load = LocalGroups._load

    def slow(groups: LocalGroups) -> None:
        reading.set()
        is_closed.wait(30)
        load(groups)

    monkeypatch.setattr(LocalGroups, "_load", slow)
    data = logcore.open_dir(tmp_path / "data", create=True)
    data.create_topic("t")

    def consume() -> None:
        try:
            data.consumer(group_id="g")
        except LogcoreError as error:
            failures.append(error)

    consuming = threading.Thread(target=consume)
    consuming.start()
    assert reading.wait(30)
    closing = threading.Thread(target=data.close)
    closing.start()
    closing.join(300)
    assert not closing.is_alive()
    is_closed.set()
    consuming.join(30)
    assert not consuming.is_alive()


def test_deleted_topic_does_not_block_a_commit(data: LogDir) -> None:
    data.create_topic("gone")
    with begin(data) as producer:
        producer.send("gone", b"v", partition=0)
        producer.send("t", b"v", partition=0)
        producer.flush()
        data.delete_topic("gone")
        producer.commit_transaction()
        assert status(data) is Status.COMPLETE_COMMIT
    assert committed(data) == [b"v"]


def test_damaged_transaction_record_is_an_error(data: LogDir) -> None:
    data.create_topic("__transaction_state", 1, {"cleanup.policy": "compact"})
    data.append(
        "__transaction_state", b"\x00\x09junk", key=b"\x00\x00\x00\x02id", partition=0
    )
    with unthreaded(data) as producer, pytest.raises(LogcoreError):
        producer.init_transactions()


@pytest.mark.long
def test_interrupt_at_any_line_leaves_no_transaction_open(data: LogDir) -> None:
    """The program catches the interrupt and commits again. Whatever that returns, the
    next producer of the id can begin.
    """
    nth = 0
    is_met = True
    while is_met:
        nth += 1
        producer = begin(data, f"id{nth}")
        producer.send("t", b"%d" % nth, partition=0)
        producer.flush()
        trace = interrupted(
            producer.commit_transaction,
            nth,
            producer_coordinator.__file__,
            durable_queue.__file__,
        )
        is_met = trace.left == 0
        with contextlib.suppress(LogcoreError):
            producer.commit_transaction()
        producer.close()
        following = unthreaded(data, f"id{nth}")
        following.init_transactions()
        following.close()
        log = data.partition("t", 0)
        assert log.last_stable_offset == log.high_watermark, f"line {nth}"
    assert nth > 100
