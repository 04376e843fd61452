"""Groups of the consumer protocol in a broker that loses power at each change that they
make to its directory.

Goal: after every crash the group is in the state after one of the heartbeats, either
the last answered one or a later one. No heartbeat is lost, and none is stored in part.
Method: logcore.testing.explore runs on the directory of a broker without sockets, whose
requests are encoded and decoded in their wire format.
"""

from __future__ import annotations

import contextlib
import errno
from typing import Any

import pytest

from logcore import LogcoreError
from logcore.testing import SimulatedDisk, explore
from logcore.testing.faults import Fault, FaultPlan
from netshim import wire
from netshim.groups import BrokerGroups
from netshim.wire import codes
from support.simulated_disk_broker import SimulatedDiskBroker

HEARTBEAT = wire.CONSUMER_GROUP_HEARTBEAT

#: (member, epoch, instance, numbers of the owned partitions, or None if the request has
#: no such list)
STEPS: tuple[tuple[str, int, str | None, list[int] | None], ...] = (
    ("A", 0, None, []),
    ("B", 0, "i", []),
    ("A", 1, None, [0, 1, 2, 3]),
    ("A", 1, None, [0, 1]),
    ("B", 2, "i", None),
    ("B", -2, "i", None),
    ("C", 0, "i", []),
    ("A", -1, None, None),
    ("C", 2, "i", [2, 3]),
)


def heartbeat(
    broker_harness: SimulatedDiskBroker,
    member_id: str,
    epoch: int,
    instance_id: str | None,
    owned: list[int] | None,
) -> int:
    fields: dict[str, Any] = {"instance_id": instance_id}
    if epoch == 0:
        fields.update(rebalance_timeout_ms=60_000, subscribed_topic_names=["t"])
    if owned is not None:
        topics = (
            [
                HEARTBEAT.Request.Topic(
                    topic_id=broker_harness.broker.state.topic_ids.id_of("t"),
                    partitions=owned,
                )
            ]
            if owned
            else []
        )
        fields["topic_partitions"] = topics
    response = broker_harness.ask(
        HEARTBEAT, 1, group_id="g", member_id=member_id, member_epoch=epoch, **fields
    )
    return int(response.error_code)


def facts(broker_harness: SimulatedDiskBroker) -> Any:
    """Return the state of the group, as far as its records determine it."""
    groups: BrokerGroups = broker_harness.broker.state.groups
    group = groups.get("g")
    if group is None or group.consumers is None or not group.consumers.epoch:
        return None
    consumers = group.consumers

    def numbers(partitions: Any) -> list[int]:
        return sorted(number for _, number in partitions)

    return (
        (
            consumers.epoch,
            consumers.target_epoch,
            sorted(consumers.members),
            dict(consumers.static),
        ),
        {name: numbers(target) for name, target in consumers.targets.items()},
        {
            name: (
                current.member_epoch,
                current.previous_epoch,
                current.state,
                numbers(current.assigned),
                numbers(current.revoking),
            )
            for name, current in consumers.currents.items()
        },
    )


def begin(disk: SimulatedDisk) -> SimulatedDiskBroker:
    broker_harness = SimulatedDiskBroker(disk, disk.now_ms())
    if "t" not in broker_harness.logdir:
        broker_harness.logdir.create_topic("t", 4)
    return broker_harness


def live(disk: SimulatedDisk, promise: Any) -> None:
    broker_harness = begin(disk)
    for number, step in enumerate(STEPS, 1):
        promise(("asked", number))
        assert heartbeat(broker_harness, *step) == 0
        promise(("acknowledged", number))
    broker_harness.stop()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Return the state of the group before the first step, and after each step."""
    broker_harness = begin(SimulatedDisk())
    states = [None]
    for step in STEPS:
        assert heartbeat(broker_harness, *step) == 0
        states.append(facts(broker_harness))
    broker_harness.stop()
    assert len({repr(entry) for entry in states}) == len(STEPS) + 1, (
        "each step changes something"
    )
    return states


def recover(disk: SimulatedDisk) -> Any:
    broker_harness = SimulatedDiskBroker(disk, disk.now_ms())
    broker_harness.ask(wire.LIST_GROUPS, 5)
    recovered = facts(broker_harness)
    broker_harness.logdir.close()
    return recovered


def check(expected: list[Any], promised: list[Any], recovered: Any) -> None:
    acknowledged = max(
        [number for event, number in promised if event == "acknowledged"], default=0
    )
    asked = max([number for event, number in promised if event == "asked"], default=0)
    assert recovered in expected[acknowledged : asked + 1], (
        acknowledged,
        asked,
        recovered,
    )


@pytest.mark.long
def test_crash_neither_splits_nor_loses_a_heartbeat(expected: list[Any]) -> None:
    report = explore(
        live,
        recover,
        lambda promised, recovered: check(expected, promised, recovered),
        limit=20,
        again_every=0,
    )
    assert report.states > 50


@pytest.mark.slow
def test_crash_with_any_disk_state_neither_splits_nor_loses_a_heartbeat(
    expected: list[Any],
) -> None:
    explore(
        live,
        recover,
        lambda promised, recovered: check(expected, promised, recovered),
        limit=3_000,
        again_every=10,
    )


@pytest.mark.parametrize("operation", ["fdatasync", "pwrite"])
def test_heartbeat_repeated_after_a_disk_error_counts_once(
    operation: str, expected: list[Any]
) -> None:
    at = 0
    has_failed = True
    while has_failed:
        at += 1
        disk = SimulatedDisk()
        broker_harness = begin(disk)
        disk.faults = FaultPlan(
            Fault(operation, errno.EIO, path="*__consumer_offsets*.log", at=at, times=1)
        )
        for number, step in enumerate(STEPS, 1):
            code = heartbeat(broker_harness, *step)
            if code:
                assert code == codes.COORDINATOR_NOT_AVAILABLE
                assert facts(broker_harness) == expected[number - 1]
                assert heartbeat(broker_harness, *step) == 0
            assert facts(broker_harness) == expected[number]
        has_failed = bool(disk.faults.hits)
        disk.faults = FaultPlan()
        with contextlib.suppress(LogcoreError):
            broker_harness.stop()
        assert recover(disk) == expected[-1]
    assert at > 5
