"""A process is killed at each step of a change of topics in a shared directory.

Another process opens the directory then, and a third one has had it open since before
the change. For both, the change has happened as a whole or not at all, and the names can
be used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import logcore
from logcore import LogDir
from logcore.consumer import OffsetAndMetadata, TopicPartition
from logcore.errors import LogFailedError
from logcore.fs import SharedFS
from logcore.testing import SimulatedDisk
from support.stepping import SteppedMachine

PATH = "data"
PARTITIONS = [TopicPartition("t", 0), TopicPartition("t", 1)]
RECORDS = [b"0", b"1", b"2", b"3"]


def recreate(data: LogDir) -> None:
    data.delete_topic("t")
    data.create_topic("t", 2)


CHANGES: dict[str, Callable[[LogDir], object]] = {
    "creation": lambda data: data.create_topic("u", 2),
    "deletion": lambda data: data.delete_topic("t"),
    "recreation": recreate,
    "partitions": lambda data: data.add_partitions("t", 4),
}


def new_directory() -> SimulatedDisk:
    disk = SimulatedDisk({PATH: None})
    with logcore.open_dir(PATH, create=True, fs=disk) as data:
        data.create_topic("t", 2)
        for number, value in enumerate(RECORDS):
            data.append("t", value, partition=number % 2)
        with data.consumer(group_id="g", enable_auto_commit=False) as consumer:
            consumer.assign(PARTITIONS)
            consumer.commit(dict.fromkeys(PARTITIONS, OffsetAndMetadata(2)))
    return disk


def committed(data: LogDir) -> set[int | None]:
    with data.consumer(group_id="g", enable_auto_commit=False) as consumer:
        return {
            None if commit is None else commit.offset
            for commit in consumer.committed(PARTITIONS).values()
        }


def values_of(data: LogDir, topic: str) -> set[bytes | None]:
    return {record.value for record in data.read(topic)}


def kill_at(step: int, change: Callable[[LogDir], object]) -> bool:
    """Return whether the process was killed before its change ended."""
    machine = SteppedMachine(new_directory(), step)

    def change_topics(fs: SharedFS) -> None:
        machine.wait_for(killed, 1)
        with logcore.open_dir(PATH, shared=True, fs=fs) as data:
            machine.victim = killed
            change(data)
            machine.victim = None
            machine.reach(2)
            machine.wait_for(killed, 4)

    def use_topics(fs: SharedFS) -> None:
        while not (killed.is_killed or machine.phase == 2):
            machine.idle(second)
        with logcore.open_dir(PATH, shared=True, fs=fs) as data:
            # Without the topic, its offsets may still be in deletion.
            is_new = data.create_topic("t", 2, exist_ok=True)
            is_former = not is_new and bool(values_of(data, "t"))
            assert committed(data) == ({2} if is_former else {None})
            data.create_topic("u", 2, exist_ok=True)
            for topic in ("t", "u"):
                data.append(topic, b"second", partition=1)
            expected = {b"second", *(RECORDS if is_former else ())}
            assert values_of(data, "t") == expected
            machine.reach(3)
            machine.wait_for(second, 4)

    def continue_with_topics(fs: SharedFS) -> None:
        with logcore.open_dir(PATH, shared=True, fs=fs) as data:
            log = data.partition("t", 0)
            machine.reach(1)
            machine.wait_for(third, 3)
            is_deleted = False
            try:
                log.append(b"third")
            except LogFailedError:
                is_deleted = True
            assert is_deleted == (b"0" not in values_of(data, "t"))
            assert values_of(data, "u") == {b"second"}
            machine.reach(4)

    third = machine.start(continue_with_topics)
    killed = machine.start(change_topics)
    second = machine.start(use_topics)
    machine.run()
    with logcore.open_dir(PATH, create=True, fs=machine.disk) as data:
        assert values_of(data, "t") >= {b"second"}
        assert data.topics() == ["__consumer_offsets", "t", "u"]
    return killed.is_killed


def steps_of(change: Callable[[LogDir], object]) -> Iterator[int]:
    step = 1
    while kill_at(step, change):
        yield step
        step += 1


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_killed_change_of_topics_happens_as_a_whole_or_not_at_all(
    change: Callable[[LogDir], object],
) -> None:
    assert len([*steps_of(change)]) > 20
