"""Run programs of calls on a log: with an explorer of crashes, or on a disk on which one
operation fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import logcore
from logcore.testing import (
    Fault,
    FaultPlan,
    Report,
    SimulatedDisk,
)
from support.programs import (
    CONFIG,
    Program,
    Recoveries,
)

#: Actions of random programs. A repeated action is chosen more often.
PLAIN_ACTIONS = (
    *("append",) * 4, "append_two", *("append_big",) * 2, "append_os", "append_os", "append_disk", "flush", "roll",
    "delete", "delete_all", "truncate", "truncate_all", "tick", "reopen", "kill", "append_in_sync", "write_back",
)  # fmt: skip


#: Actions of programs with transactions, compaction, kills and reopenings.
TRANSACTION_ACTIONS = (
    "append", "append_big", "transact", "commit", "abort", "compact", "retain", "idempotent", "again", "truncate",
    "reopen", "kill",
)  # fmt: skip


def explore_program(actions: Sequence[str], durability: str, **options: Any) -> Report:
    program = Program(durability, **options)
    try:
        return program.run(actions)
    except BaseException as error:
        program.disk.crash()  # objects that were not closed emit no warnings
        error.add_note(
            f"program: durability {durability!r}, {options.get('config', CONFIG)}, {list(actions)}"
        )
        raise


#: The actions of run_with_fault().
SCRIPT = (
    "append",
    "append_big",
    "flush",
    "append_os",
    "roll",
    "delete",
    "append",
    "truncate",
    "append",
    "reopen",
)


def run_with_fault(fault: Fault, durability: str, recoveries: Recoveries) -> bool:
    """Run SCRIPT on a disk with one fault. Then check the log, with crashes and kills, on
    a disk without faults. Return whether the fault occurred.
    """
    plan = FaultPlan(fault)
    program = Program(durability, explore=False, disk=SimulatedDisk(faults=plan))
    history = program.history
    try:
        for action in ["open", *SCRIPT, "close"]:
            try:
                getattr(program, action)()
            except logcore.LogcoreError:
                log = program.log
                if (
                    log is not None
                    and log.host.writer.commit.failure is None
                    and not log.is_closed
                ):
                    history.continue_at_end(log.log_end_offset)
        program.disk.faults = None
        for state in program.disk.crash_states(limit=2):
            history.check(recoveries.find(state.disk()), state.kind)
        if program.log is not None:
            with contextlib.suppress(logcore.LogcoreError):
                program.log.close()
        program.disk.kill()
        found = recoveries.run(program.disk)
        history.check(found, "kill")
        for after in program.disk.after_crash(limit=2, kind="power"):
            again = recoveries.find(after)
            assert again.records[: len(found.records)] == found.records, (
                "records that were served after an opening are lost"
            )
    except BaseException as error:
        program.disk.crash()
        error.add_note(f"repeat with run_with_fault({fault!r}, {durability!r})")
        raise
    return bool(plan.hits)


def is_log(path: str) -> bool:
    return path.endswith(".log")
