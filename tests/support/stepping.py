"""A machine on which one process is killed or stopped at a given step.

A test repeats a scenario with each step until the process ends before that step. The
processes take turns by phases, so that each run is the same up to that step.
"""

from __future__ import annotations

from collections.abc import Callable

from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine, SimulatedProcess


class SteppedMachine(Machine):
    """Calls `interrupt` before a step of `victim`, counted since it was set. The default
    kills the process.

    No other event occurs, and processes switch only while they wait.
    """

    def __init__(
        self,
        disk: SimulatedDisk,
        step: int,
        interrupt: Callable[[SimulatedProcess], None] | None = None,
    ) -> None:
        super().__init__(disk, chances=Chances(switch=0, pass_time=0))
        self._steps_left = step
        self._interrupt = interrupt or self.kill
        self.victim: SimulatedProcess | None = None
        #: The phase of the scenario.
        self.phase = 0

    def step(self, process: SimulatedProcess, *, danger: int = 1) -> None:
        if process is self.victim:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._interrupt(process)
        super().step(process, danger=danger)

    def reach(self, phase: int) -> None:
        """Begin a phase, unless a later one has begun."""
        self.phase = max(self.phase, phase)

    def wait_for(self, process: SimulatedProcess, phase: int) -> None:
        """Run other processes until the phase is reached, or one of them has failed."""
        while self.phase < phase and not any(other.error for other in self.processes):
            self.idle(process)
