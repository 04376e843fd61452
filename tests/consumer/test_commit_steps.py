"""A member of a group stops at each step of a commit, while another member replaces it."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import logcore
from logcore.consumer import Consumer, OffsetAndMetadata
from logcore.consumer.topic_partition import TopicPartition
from logcore.errors import CommitFailedError, LogLockedError, RegistryLockedError
from logcore.fs import SharedFS
from logcore.testing import SimulatedDisk
from logcore.testing.processes import SimulatedProcess
from support.stepping import SteppedMachine

PATH = "data"
PARTITION = TopicPartition("t", 0)
SETTINGS: dict[str, Any] = {
    "group_id": "g",
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
    "max_poll_interval_ms": 300,
}


def commit(consumer: Consumer, offset: int) -> None:
    consumer.commit({PARTITION: OffsetAndMetadata(offset)})


def stop_at(step: int) -> tuple[bool, bool]:
    """Return whether the first member was stopped during its commit, and whether the
    second member then replaced it.
    """
    disk = SimulatedDisk({"data": None})
    with logcore.open_dir(PATH, create=True, fs=disk) as data:
        data.create_topic("t", 1)
        for number in range(10):
            data.append("t", b"%d" % number)
    was_stopped = False
    has_replaced = False

    def stop(process: SimulatedProcess) -> None:
        nonlocal was_stopped
        was_stopped = True
        process.stopped_until = 1 << 62
        machine.reach(1)

    machine = SteppedMachine(disk, step, stop)

    def commit_first(fs: SharedFS) -> None:
        with (
            # The other member has the partition, or it holds the lock.
            contextlib.suppress(CommitFailedError, RegistryLockedError, LogLockedError),
            logcore.open_dir(PATH, shared=True, fs=fs) as data,
            data.consumer(**SETTINGS) as consumer,
        ):
            consumer.subscribe(["t"])
            while PARTITION not in consumer.assignment():
                consumer.poll(0.1, 1)
            machine.victim = first
            commit(consumer, 3)
            machine.victim = None
            machine.reach(1)
            machine.wait_for(first, 2)
        machine.reach(3)

    def replace(fs: SharedFS) -> None:
        nonlocal has_replaced
        machine.wait_for(second, 1)
        with (
            # The first member may have stopped while it holds a lock.
            contextlib.suppress(RegistryLockedError, LogLockedError),
            logcore.open_dir(PATH, shared=True, fs=fs) as data,
            data.consumer(**SETTINGS) as consumer,
        ):
            consumer.subscribe(["t"])
            while PARTITION not in consumer.assignment():
                consumer.poll(0.1, 1)
            commit(consumer, 7)
            has_replaced = True
            first.stopped_until = 0
            machine.reach(2)
            machine.wait_for(second, 3)
        first.stopped_until = 0
        machine.reach(2)

    first = machine.start(commit_first)
    second = machine.start(replace)
    machine.run()
    with (
        logcore.open_dir(PATH, create=True, fs=disk) as data,
        data.consumer(**SETTINGS) as consumer,
    ):
        committed = consumer.committed([PARTITION])[PARTITION]
    if has_replaced:
        assert committed is not None and committed.offset == 7
    return was_stopped, was_stopped and has_replaced


def test_stopped_member_does_not_overwrite_the_offset_of_its_successor() -> None:
    """A commit that checks its generation before it acquires the group's lock would
    set the offset back.
    """
    outcomes = [
        *itertools.takewhile(
            lambda outcome: outcome[0], map(stop_at, itertools.count(1))
        )
    ]
    # At other steps, the first member holds a lock.
    assert any(was_replaced for _, was_replaced in outcomes)
