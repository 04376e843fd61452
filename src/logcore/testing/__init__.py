"""Tools to test programs that use a log: a disk that crashes, and an explorer.

    from logcore.testing import SimulatedDisk, explore

    disk = SimulatedDisk()
    with logcore.open("orders-0", create=True, fs=disk) as log: ...
    for after in disk.after_crash(): ...     # every disk that a crash at this moment may leave

docs/testing.md is the introduction. `strategies` and `LogStateMachine` need hypothesis,
and the fixtures need pytest; both are in the extra `testing`. The other tools need only
the library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from logcore.distribution import install_command
from logcore.errors import MissingDependencyError
from logcore.testing.disk import CrashState, SimulatedCrash, SimulatedDisk
from logcore.testing.explore import CrashTestError, Explorer, Report, explore
from logcore.testing.faults import Fault, FaultPlan, Operation
from logcore.testing.oracle import FoundLog, LogHistory, recover_log

if TYPE_CHECKING:
    from logcore.testing import strategies
    from logcore.testing.state_machine import LogStateMachine

__all__ = [
    "CrashState",
    "CrashTestError",
    "Explorer",
    "Fault",
    "FaultPlan",
    "FoundLog",
    "LogHistory",
    "LogStateMachine",
    "Operation",
    "Report",
    "SimulatedCrash",
    "SimulatedDisk",
    "explore",
    "recover_log",
    "strategies",
]


if not TYPE_CHECKING:
    # A type checker would assume that a module with __getattr__() has every name.
    def __getattr__(name: str) -> Any:
        """Import the names that need hypothesis when they are first used."""
        if name not in ("LogStateMachine", "strategies"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            if name == "strategies":
                return importlib.import_module("logcore.testing.strategies")
            return importlib.import_module(
                "logcore.testing.state_machine"
            ).LogStateMachine
        except ModuleNotFoundError as error:
            if error.name != "hypothesis":
                raise
            raise MissingDependencyError(
                f"logcore.testing.{name} needs hypothesis: {install_command('testing')}"
            ) from error
