"""Tests of mirroring from a modelled cluster, with kept or with new offsets. Each record
arrives once, even if the mirror or the connection fails at any step.

LOGCORE_SHIPPING_ROUNDS=n tries n schedules of each kind instead of 20; `make slow`
tries 2,000.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

import logcore
from logcore.errors import (
    DivergedError,
    InvalidConfigError,
    LogcoreError,
    ReadOnlyLogError,
    RecordRefusedError,
    RemoteTopicError,
    ShippingGapError,
)
from logcore.kernels import Record
from logcore.shipping import Mirror
from logcore.shipping.cluster import RemoteRecord
from logcore.shipping.mirror_rules import common_end
from logcore.testing import SimulatedDisk
from support.model_cluster import Faults, Killed, ModelSource

PATH = "copy/data"
ROUNDS = int(os.environ.get("LOGCORE_SHIPPING_ROUNDS", "20"))
MANY = int(os.environ.get("LOGCORE_SHIPPING_ROUNDS", "2000"))
LONG = pytest.param(
    MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many"
)
ORDERS = ("orders", 0)


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk({"copy": None})


@pytest.fixture
def data(disk: SimulatedDisk) -> Iterator[logcore.LogDir]:
    with logcore.open_dir(PATH, create=True, durability="os", fs=disk) as opened:
        yield opened


@pytest.fixture
def source(disk: SimulatedDisk) -> ModelSource:
    made = ModelSource(random.Random(1), disk)
    made.create_topic("orders")
    fill(made, 10)
    return made


def fill(source: ModelSource, count: int) -> None:
    log = source.logs[ORDERS]
    for _ in range(count):
        log.append(b"%d in epoch %d" % (log.end, log.epoch))


def run_mirror(data: logcore.LogDir, source: ModelSource, **options: Any) -> Any:
    """Run a mirror to the end, and return its metrics."""
    fs = source.disk
    with Mirror(data, source, topics=["orders"], fs=fs, **options) as mirror:
        mirror.run(until_end=True)
        return mirror.metrics()


def local_records(data: logcore.LogDir, topic: str = "orders") -> list[Record]:
    log = data.partition(topic, 0)
    return list(log.read(log.log_start_offset, isolation="read_committed"))


def remote_records(source: ModelSource) -> list[Record]:
    return [record.record for record in source.logs[ORDERS].records]


def epochs(data: logcore.LogDir) -> list[int]:
    log = data.partition(*ORDERS)
    return [batch.partition_leader_epoch for batch in log.batches(log.log_start_offset)]


# -- the same offsets ------------------------------------------------------------------


def test_offsets_gaps_and_epochs_are_kept(
    data: logcore.LogDir, source: ModelSource
) -> None:
    log = source.logs[ORDERS]
    log.append_marker()
    log.append(b"behind a marker")
    log.epoch = 4
    log.append(b"behind a gap, of another leader", gap=3)
    log.append(b"last")
    assert run_mirror(data, source).record_count == 13
    assert local_records(data) == remote_records(source)
    assert epochs(data)[-1] == 4
    assert data.partition(*ORDERS).leader_epoch == 4
    fill(source, 3)
    log.append_marker()
    found = run_mirror(data, source)
    assert (found.record_count, found.lag_records) == (3, 0), (
        "a marker at the end does not count as a waiting record"
    )
    assert local_records(data) == remote_records(source)


def test_empty_log_begins_at_the_start_of_the_remote_log(
    data: logcore.LogDir, source: ModelSource
) -> None:
    source.logs[ORDERS].delete_below(6)
    run_mirror(data, source)
    log = data.partition(*ORDERS)
    assert (log.log_start_offset, log.log_end_offset) == (6, 10)
    assert local_records(data) == remote_records(source)


def test_mirrored_topic_refuses_other_writers(
    data: logcore.LogDir, source: ModelSource
) -> None:
    run_mirror(data, source)
    log = data.partition(*ORDERS)
    writes = [
        lambda: log.append(b"x"),
        lambda: log.append_many([(None, b"x")]),
        lambda: log.append_columns(values=(b"x", [0, 1])),
        lambda: log.append_batch(logcore.recordbatch.encode([(None, b"x")])),  # type: ignore[attr-defined]
        lambda: data.append("orders", b"x"),
    ]
    for write in writes:
        with pytest.raises(
            ReadOnlyLogError,
            match="the topic is a mirror, which `logcore mirror` alone writes",
        ):
            write()
    assert local_records(data) == remote_records(source)


def test_mirror_writes_only_to_mirrored_topics(
    data: logcore.LogDir, source: ModelSource
) -> None:
    data.create_topic("orders")
    with pytest.raises(DivergedError, match="exists already and is not a mirror"):
        run_mirror(data, source)
    run_mirror(data, source, rename=lambda name: f"copy-of-{name}")
    assert local_records(data, "copy-of-orders") == remote_records(source)


def test_added_partitions_are_mirrored(
    data: logcore.LogDir, source: ModelSource
) -> None:
    run_mirror(data, source)
    log = source.logs["orders", 1] = type(source.logs[ORDERS])()
    log.append(b"in another partition")
    run_mirror(data, source)
    assert [record.value for record in data.partition("orders", 1).read(0)] == [
        b"in another partition"
    ]


def test_remote_retention_beyond_the_mirror_stops_the_partition(
    data: logcore.LogDir, source: ModelSource
) -> None:
    run_mirror(data, source)
    fill(source, 10)
    source.logs[ORDERS].delete_below(15)
    with pytest.raises(
        ShippingGapError,
        match="the cluster deleted offsets 10 to 14 before they were mirrored",
    ):
        run_mirror(data, source)
    before = local_records(data)
    assert run_mirror(data, source, on_gap="skip").skipped_offsets == 5
    assert local_records(data) == before + remote_records(source)
    log = data.partition(*ORDERS)
    log.close()
    assert local_records(data) == before + remote_records(source), (
        "the gap is stored, so opening does not report it as damage"
    )


@pytest.mark.parametrize("regrown", [0, 1, 2, 9])
def test_remote_log_without_its_last_records_stops_the_partition(
    data: logcore.LogDir, source: ModelSource, regrown: int
) -> None:
    """The last local records are compared, even if the remote log has grown to the local
    end again, or beyond it.
    """
    run_mirror(data, source)
    before = local_records(data)
    source.logs[ORDERS].lose_records_from(8)
    fill(source, regrown)
    with pytest.raises(DivergedError, match="on_divergence='truncate'"):
        run_mirror(data, source)
    assert local_records(data) == before
    asked: list[str] = []
    with pytest.raises(DivergedError):
        run_mirror(
            data,
            source,
            on_divergence="truncate",
            confirm=lambda text: bool(asked.append(text)),
        )
    assert asked == ["truncate orders-0 from offset 10 to 8?"]
    assert local_records(data) == before, "a refused truncation must not change the log"
    run_mirror(data, source, on_divergence="truncate")
    assert local_records(data) == remote_records(source)
    assert epochs(data)[-1] == (1 if regrown else 0)


def test_lost_record_with_a_marker_at_its_offset_is_detected(
    data: logcore.LogDir, source: ModelSource
) -> None:
    run_mirror(data, source)
    log = source.logs[ORDERS]
    log.lose_records_from(9)
    log.append_marker()
    fill(source, 3)
    with pytest.raises(DivergedError, match="the two logs differ at offset 9"):
        run_mirror(data, source)


def test_local_log_is_emptied_on_request_if_the_remote_log_is_empty(
    data: logcore.LogDir, source: ModelSource
) -> None:
    run_mirror(data, source)
    source.logs[ORDERS].lose_records_from(0)
    run_mirror(data, source, on_divergence="truncate")
    assert local_records(data) == []
    fill(source, 4)
    run_mirror(data, source)
    assert local_records(data) == remote_records(source)


def test_divergence_is_detected_while_the_mirror_runs(
    data: logcore.LogDir, source: ModelSource
) -> None:
    with Mirror(data, source, topics=["orders"], fs=source.disk) as mirror:
        mirror.run(until_end=True)
        source.logs[ORDERS].lose_records_from(5)
        with pytest.raises(
            DivergedError, match="the remote log ends below the local log"
        ):
            mirror.run()


def test_log_that_begins_after_the_remote_end_is_not_truncated(
    data: logcore.LogDir, source: ModelSource
) -> None:
    source.logs[ORDERS].delete_below(8)
    run_mirror(data, source)
    source.logs[ORDERS] = type(source.logs[ORDERS])()
    with pytest.raises(DivergedError, match="the remote log ends below the local log"):
        run_mirror(data, source, on_divergence="truncate")


def test_recreated_topic_stops_the_mirror(
    data: logcore.LogDir, source: ModelSource
) -> None:
    run_mirror(data, source)
    source.create_topic("orders")
    fill(source, 20)
    with pytest.raises(DivergedError, match="deleted and created again"):
        run_mirror(data, source, on_divergence="truncate")


def test_remote_compaction_is_not_a_divergence(
    data: logcore.LogDir, source: ModelSource
) -> None:
    run_mirror(data, source)
    before = local_records(data)
    source.compacted.add("orders")
    source.logs[ORDERS].compact(lambda record: record.offset % 3 == 0)
    fill(source, 5)
    run_mirror(data, source)
    assert local_records(data) == before + remote_records(source)[-5:]


def test_groups_are_mirrored_with_their_offsets(
    data: logcore.LogDir, source: ModelSource
) -> None:
    source.groups["billing"] = {ORDERS: 7}
    run_mirror(data, source, groups=["billing"])
    assert data.committed_offsets(*ORDERS) == {"billing": 7}
    consumer = data.consumer(group_id="billing", enable_auto_commit=False)
    consumer.subscribe(["orders"])
    assert [record.offset for record in consumer.poll().records()] == [7, 8, 9]
    consumer.close()


# -- new offsets -----------------------------------------------------------------------


def test_records_and_progress_are_one_transaction(
    data: logcore.LogDir, source: ModelSource
) -> None:
    source.logs[ORDERS].delete_below(4)
    assert run_mirror(data, source, offsets="new").record_count == 6
    fill(source, 5)
    assert run_mirror(data, source, offsets="new").record_count == 5
    found = [(record.value, record.timestamp_ms) for record in local_records(data)]
    assert found == [
        (record.value, record.timestamp_ms) for record in remote_records(source)
    ]
    assert data.committed_offsets(*ORDERS) == {"logcore-mirror-model-default": 15}
    source.create_topic("orders")
    with pytest.raises(DivergedError, match="was deleted and created again"):
        run_mirror(data, source, offsets="new")


def test_several_topics_are_mirrored_to_one(
    data: logcore.LogDir, source: ModelSource
) -> None:
    source.create_topic("more")
    source.logs["more", 0].append(b"more")
    options: dict[str, Any] = {
        "topics": ["orders", "more"],
        "rename": lambda name: "all",
        "fs": source.disk,
    }
    with Mirror(data, source, offsets="new", **options) as mirror:
        mirror.run(until_end=True)
    assert len(local_records(data, "all")) == 11
    with pytest.raises(InvalidConfigError, match="which needs offsets='new'"):
        Mirror(data, source, offsets="keep", **options)


# -- errors ----------------------------------------------------------------------------


def test_shipper_waits_for_an_unavailable_cluster(
    data: logcore.LogDir, source: ModelSource
) -> None:
    with Mirror(data, source, topics=["orders"], fs=source.disk) as mirror:
        source.is_unavailable = True
        for _ in range(200):
            mirror.step()
        found = mirror.metrics()
        assert (found.state, found.reason) == ("waiting", "the model is unavailable")
        assert 5 < found.retry_count < 20
        source.is_unavailable = False
        mirror.run(until_end=True)
    assert local_records(data) == remote_records(source)


def test_missing_topic_is_an_error(data: logcore.LogDir, source: ModelSource) -> None:
    with (
        Mirror(data, source, topics=["nothing"], fs=source.disk) as mirror,
        pytest.raises(RemoteTopicError),
    ):
        mirror.run()


def test_unstorable_record_stops_its_partition_or_is_quarantined(
    disk: SimulatedDisk, source: ModelSource
) -> None:
    offsets = "new"
    source.logs[ORDERS].append(b"x" * 2_000)
    fill(source, 5)
    config = {"max.message.bytes": 1_000, "segment.bytes": 1_000}
    with logcore.open_dir(
        PATH, create=True, durability="os", config=config, fs=disk
    ) as data:
        with pytest.raises(
            RecordRefusedError,
            match="offset 10: a record of orders-0 cannot be stored here",
        ):
            run_mirror(data, source, offsets=offsets)
        assert [record.value for record in local_records(data)] == [
            record.value for record in remote_records(source)[:10]
        ]
        assert (
            run_mirror(
                data, source, offsets=offsets, on_error="quarantine"
            ).quarantined_count
            == 1
        )
        wanted = [record for record in remote_records(source) if record.offset != 10]
        assert [record.value for record in local_records(data)] == [
            record.value for record in wanted
        ]
        (kept,) = data.read("orders.dlq")
        assert dict(kept.headers)["logcore.offset"] == b"10"
        assert (
            run_mirror(
                data, source, offsets=offsets, on_error="quarantine"
            ).quarantined_count
            == 0
        )


def test_fetched_records_that_were_not_stored_are_fetched_again(
    data: logcore.LogDir, source: ModelSource
) -> None:
    """An error that ends step() during a store, such as Ctrl-C, must leave no gap."""
    with Mirror(data, source, topics=["orders"], fs=source.disk) as mirror:
        mirror.step()
        stored = data.partition(*ORDERS).append_as_follower
        data.partition(*ORDERS).append_as_follower = _interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            for _ in range(10):
                mirror.step()
        data.partition(*ORDERS).append_as_follower = stored  # type: ignore[method-assign]
        mirror.run(until_end=True)
    assert local_records(data) == remote_records(source)


def _interrupted(_: object) -> Any:
    raise KeyboardInterrupt


def test_invalid_settings_are_refused(
    data: logcore.LogDir, source: ModelSource
) -> None:
    bad: list[dict[str, Any]] = [
        {"topics": []},
        {"topics": "orders"},
        {"offsets": "both"},
        {"name": "a/b"},
        {"offsets": "keep", "on_error": "quarantine"},
        {"offsets": "new", "groups": ["g"]},
        {"offsets": "new", "on_divergence": "truncate"},
    ]
    for options in bad:
        with pytest.raises(InvalidConfigError):
            Mirror(data, source, **{"topics": ["orders"], **options})


def test_common_end_is_found_at_every_offset() -> None:
    for end in range(12):
        for common in range(end + 1):
            assert (
                common_end(0, end, lambda offset, common=common: offset < common)
                == common
            )  # type: ignore[misc]


# -- kills and lost connections --------------------------------------------------------


def mirror_despite_interruptions(seed: int, offsets: str) -> None:
    """Run mirrors that are killed or disconnected at any step, while the log grows,
    until all records are mirrored.
    """
    chance = random.Random(seed)
    disk = SimulatedDisk({"copy": None}, seed=seed)
    source = ModelSource(chance, disk, faults=Faults(kill=0.03, lose=0.03))
    source.create_topic("orders", 2)
    options: dict[str, Any] = {"topics": ["orders"], "offsets": offsets, "fs": disk}
    with logcore.open_dir(PATH, create=True, durability="os", fs=disk) as data:
        for _ in range(5):
            for log in source.logs.values():
                for _ in range(chance.randrange(8)):
                    log.append(
                        b"%d" % chance.randrange(1000), gap=chance.choice([0, 0, 0, 2])
                    )
                if chance.random() < 0.3:
                    log.append_marker()
            mirror = Mirror(data, source, **options)
            try:
                for _ in range(chance.randrange(1, 12)):
                    mirror.step()
                mirror.close()
            except Killed:
                pass  # the next mirror fences the producer of the killed mirror
        source.faults = Faults()
        with Mirror(data, source, **options) as last:
            last.run(until_end=True)
        for partition, log in source.logs.items():
            wanted = [record.record for record in log.records]
            kept = data.partition(*partition)
            assert kept.log_start_offset == 0
            found = list(kept.read(0, isolation="read_committed"))
            if offsets == "keep":
                assert found == wanted
            else:
                assert [record.value for record in found] == [
                    record.value for record in wanted
                ]


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("offsets", ["keep", "new"])
def test_every_record_is_mirrored_once_despite_interruptions(
    offsets: str, rounds: int
) -> None:
    for seed in range(rounds):
        try:
            mirror_despite_interruptions(seed, offsets)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def mirror_a_log_that_loses_records(seed: int) -> None:
    """Truncate, extend and compact remote logs, and delete their first records.

    A mirror with on_divergence="truncate" removes the records that the remote log lost. A
    mirror without that option never has records that the remote log lacks.
    """
    chance = random.Random(seed)
    disk = SimulatedDisk({"copy": None}, seed=seed)
    source = ModelSource(chance, disk, faults=Faults(kill=0.01, lose=0.03))
    source.create_topic("orders")
    log = source.logs[ORDERS]
    options: dict[str, Any] = {
        "topics": ["orders"],
        "on_divergence": "truncate",
        "on_gap": "skip",
        "fs": disk,
    }
    with logcore.open_dir(PATH, create=True, durability="os", fs=disk) as data:
        seen: set[Record] = set()
        for _ in range(6):
            for _ in range(chance.randrange(6)):
                log.append(
                    b"%d" % chance.randrange(10**9), gap=chance.choice([0, 0, 1])
                )
            seen.update(record.record for record in log.records)
            mirror = Mirror(data, source, **options)
            try:
                for _ in range(chance.randrange(1, 12)):
                    mirror.step()
                mirror.close()
            except Killed:
                pass
            happens = chance.randrange(4)
            if happens == 0:
                log.lose_records_from(chance.randrange(log.start, log.end + 1))
            elif happens == 1:
                log.delete_below(chance.randrange(log.start, log.end + 1))
        source.faults = Faults()
        for _ in range(
            data.partition(*ORDERS).log_start_offset if "orders" in data else 0
        ):
            log.append(b"a log cannot be truncated below its start")
        seen.update(record.record for record in log.records)
        with Mirror(data, source, **options) as last:
            last.run(until_end=True)
        found = local_records(data)
        assert set(found) <= seen, "every mirrored record exists in the remote log"
        start = max(log.start, data.partition(*ORDERS).log_start_offset)
        assert [record for record in found if record.offset >= start] == [
            record for record in remote_records(source) if record.offset >= start
        ]


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
def test_mirror_follows_a_remote_log_that_loses_records(rounds: int) -> None:
    for seed in range(rounds):
        try:
            mirror_a_log_that_loses_records(seed)
        except (LogcoreError, AssertionError, StopIteration) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def test_records_without_an_epoch_get_the_last_known_epoch(
    data: logcore.LogDir, source: ModelSource
) -> None:
    log = source.logs[ORDERS]
    log.records = [RemoteRecord(record.record, -1) for record in log.records]
    run_mirror(data, source)
    assert local_records(data) == remote_records(source)
