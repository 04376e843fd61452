"""A simulated process that reads a node whenever its watch reports a change, while two
other processes change the node.
"""

from __future__ import annotations

import random

from logcore.errors import LogcoreError
from logcore.fs import SharedFS
from logcore.registry import FileRegistry, open_registry
from logcore.registry.protocol import Watch
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine, SimulatedProcess

CHECK_SECONDS = 1.0


class WatchSimulation:
    """The three processes; see the description of the module. With
    `reads_without_report`, the watching process also reads when nothing was reported.
    """

    def __init__(
        self, seed: int, chances: Chances, *, reads_without_report: bool = False
    ) -> None:
        self.reads_without_report = reads_without_report
        self.disk = SimulatedDisk({"data": None}, seed=seed)
        self.machine = Machine(self.disk, seed=seed, chances=chances)
        self.rng = random.Random(seed)
        self.seen: object = None
        self.missed = 0
        #: The killed processes whose locks are released.
        self.freed: set[SimulatedProcess] = set()
        self.machine.on_locks_released = self.freed.add
        self.writers = [self.machine.start(self.write) for _ in range(2)]
        self.watcher = self.machine.start(self.watch_nodes)

    def write(self, fs: SharedFS) -> None:
        with open_registry("/data", fs=fs, lock_timeout_ms=1_000) as registry:
            for _ in range(6):
                try:
                    self.change(registry)
                except LogcoreError:
                    pass

    def change(self, registry: FileRegistry) -> None:
        path = self.rng.choice(["/t/a", "/t/b", "/t/deep/c"])
        kind = self.rng.randrange(5)
        if kind == 0:
            registry.create(path, ephemeral=True)
        elif kind == 1:
            registry.update(path, lambda value: (value or b"") + b"x")
        elif kind == 2:
            registry.set(path, b"y" * self.rng.choice([1, 5_000]))
        elif kind == 3:
            registry.delete(path)
        else:
            registry.delete(self.rng.choice(["/t/deep", "/t"]))

    def state(self, registry: FileRegistry) -> object:
        nodes = []
        for path in ("/t/a", "/t/deep/c"):
            try:
                nodes.append(registry.get(path))
            except LogcoreError as error:
                nodes.append(type(error).__name__)
        return nodes, registry.children("/t")

    def watch_nodes(self, fs: SharedFS) -> None:
        with open_registry("/data", fs=fs) as registry:
            watch = registry.watch(["/t/a", "/t/deep/c"], children=["/t"])
            while True:
                # After a report, and with a new watch, the nodes are read.
                if self.rng.random() < 0.5:
                    watch.close()
                    watch = registry.watch(["/t/a", "/t/deep/c"], children=["/t"])
                is_last = self.are_done()
                self.seen = self.state(registry)
                if is_last:
                    break
                while (
                    not self.is_reported(watch)
                    and not self.reads_without_report
                    and not self.are_done()
                ):
                    pass
            # Wait for reports that are not delivered yet, and for later reports of the
            # same death.
            for _ in range(20):
                if watch.wait(CHECK_SECONDS):
                    self.seen = self.state(registry)
            if self.reads_without_report:
                self.seen = self.state(registry)
            watch.close()
            assert self.seen == self.state(registry), (
                f"stale: {self.seen}, now {self.state(registry)}"
            )

    def is_reported(self, watch: Watch) -> bool:
        """Wait until a change is reported, or must have been reported. Return whether one
        was reported. No process runs during a call of now(), because its reads are not
        steps of the schedule.
        """
        before = self.now()
        if watch.wait(CHECK_SECONDS):
            return True
        # The end of a killed process is reported when its file is closed. Its locks may
        # be released later.
        if (
            self.now() == before
            and not self.reads_without_report
            and not self.machine.killed
        ):
            assert self.seen == before, (
                f"armed first: nothing was reported, {self.seen} is {before}"
            )
        return False

    def now(self) -> object:
        with open_registry("/data", read_only=True, fs=self.disk) as registry:
            return self.state(registry)

    def are_done(self) -> bool:
        """Return whether the writers have ended. The nodes of a killed writer exist until
        its locks are released.
        """
        return all(
            writer in self.freed or (writer.has_ended and not writer.is_killed)
            for writer in self.writers
        )
