"""A process is killed or stopped at each step of a change, while two others have the log
open.

After a kill, the second process recovers the log, and the third one must not continue
with the files and the ends that it loaded before.

The phases of a run:
1. The third process has appended ten records. The process to be killed opens the log.
2. The second process opens the log.
3. The third process loads the changes.
4. The change begins, and its process is killed or stopped at a step.
5. The second process appends. Then a stopped process completes its change.
6. The third process appends and reads.
7. All close the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

import logcore
from logcore.errors import CompactionAbandonedError, LogLockedError
from logcore.fs import SharedFS
from logcore.testing import SimulatedDisk
from logcore.testing.processes import SimulatedProcess
from support.stepping import SteppedMachine

PATH = "data/t-0"
CHANGES: dict[str, Callable[[logcore.Log], object]] = {
    "append": lambda log: log.append_many([(b"k", b"a"), (b"k", b"b")]),
    "roll": lambda log: log.roll(),
    "full segment": lambda log: log.append(b"x" * 600, key=b"k"),
    "truncation": lambda log: log.truncate(4),
    "deletion": lambda log: log.delete_records(6),
    "compaction": lambda log: logcore.clean(log, force=True),
}


def opened(fs: SharedFS) -> logcore.Log:
    return logcore.open(
        PATH,
        create=True,
        shared=True,
        durability="group",
        config={
            "segment.bytes": 700,
            "index.interval.bytes": 90,
            "cleanup.policy": "compact",
        },
        fs=fs,
    )


def interrupt_at(
    step: int, change: Callable[[logcore.Log], object], *, is_kill: bool
) -> bool:
    """Return whether the process was killed or stopped before its change ended."""
    stored: dict[int, bytes | None] = {}
    was_interrupted = has_changed = False

    def interrupt(process: SimulatedProcess) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        if is_kill:
            machine.kill(process)
        else:
            process.stopped_until = 1 << 62
        machine.reach(5)

    machine = SteppedMachine(SimulatedDisk({"data": None}), step, interrupt)

    def append_first_and_last(fs: SharedFS) -> None:
        with opened(fs) as log:
            for number in range(10):
                log.append(b"%d" % number, key=b"%d" % (number % 3))
            machine.reach(1)
            machine.wait_for(third, 3)
            # Since then, the logs of all processes have the same structure.
            log.refresh()
            machine.reach(4)
            machine.wait_for(third, 6)
            append_two(log, b"third")
            seen = {
                record.offset: record.value for record in log.read(log.log_start_offset)
            }
            machine.reach(7)
        assert stored.items() <= seen.items()

    def change_log(fs: SharedFS) -> None:
        nonlocal has_changed
        machine.wait_for(first, 1)
        with opened(fs) as log:
            machine.reach(2)
            machine.wait_for(first, 4)
            log.refresh()
            machine.victim = first
            # Another process has changed the log while this one was stopped.
            with contextlib.suppress(CompactionAbandonedError):
                change(log)
            machine.victim = None
            has_changed = True
            machine.reach(5)
            machine.wait_for(first, 7)

    def append_next(fs: SharedFS) -> None:
        machine.wait_for(second, 2)
        with opened(fs) as log:
            machine.reach(3)
            machine.wait_for(second, 5)
            # The stopped process may hold the lock.
            with contextlib.suppress(LogLockedError):
                append_two(log, b"second")
            first.stopped_until = 0
            while not (has_changed or first.is_killed or first.error):
                machine.idle(second)
            machine.reach(6)
            machine.wait_for(second, 7)

    def append_two(log: logcore.Log, value: bytes) -> None:
        for _ in range(2):
            offset = log.append(value, key=value).offset
            assert offset not in stored
            stored[offset] = value

    third = machine.start(append_first_and_last)
    first = machine.start(change_log)
    second = machine.start(append_next)
    machine.run()
    with logcore.open(PATH, create=True, fs=machine.disk) as log:
        found = {
            record.offset: record.value for record in log.read(log.log_start_offset)
        }
        assert stored.items() <= found.items()
    return was_interrupted


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_kill_at_each_step_does_not_mislead_other_processes(
    change: Callable[[logcore.Log], object],
) -> None:
    step = 1
    while interrupt_at(step, change, is_kill=True):
        step += 1
    assert step > 5


# The other changes hold the write lock, so the second process only waits.
@pytest.mark.long
@pytest.mark.parametrize("name", ["compaction", "deletion"])
def test_stop_at_each_step_loses_no_record(name: str) -> None:
    step = 1
    while interrupt_at(step, CHANGES[name], is_kill=False):
        step += 1
    assert step > 5
