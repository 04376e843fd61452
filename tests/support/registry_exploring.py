"""Simulated processes that use one registry on a simulated disk. They run in random
order, and are killed and stopped at random steps. Then the result is checked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import attrs

from logcore.errors import (
    CorruptRegistryError,
    LogcoreError,
    NodeNotFoundError,
    RegistryLockedError,
    SessionExpiredError,
)
from logcore.fs import SharedFS
from logcore.registry import FileRegistry, open_registry
from logcore.registry.files import Layout
from logcore.registry.node_file import SUFFIX, NodeKind, read_header, read_slot
from logcore.registry.protocol import split
from logcore.testing import SimulatedDisk
from logcore.testing.disk import CrashState
from logcore.testing.processes import Chances, Machine, SimulatedKill, SimulatedProcess
from support.registry_histories import UNKNOWN, Call, check

DIRECTORY = "/data"
#: Two nodes of one domain, a node of another domain, and two nodes of a group, of which
#: one is never synced.
PATHS = ("/a/p", "/a/q", "/b", "/consumers/g/ids/c", "/consumers/g/group")
LOCK_TIMEOUT_MS = 400
#: The sizes of values. A value of 6,000 bytes does not fit a slot.
SIZES = (8, 8, 8, 300, 6_000)


@attrs.define
class SessionRun:
    """A session and its process."""

    session: str
    process: int
    #: The step at which the process was killed.
    killed_step: int | None = None


class RegistrySimulation:
    """One schedule: a machine, the programs of its processes, and their calls."""

    def __init__(
        self,
        seed: int,
        *,
        processes: int = 3,
        operations: int = 6,
        chances: Chances | None = None,
        disk: SimulatedDisk | None = None,
        paths: tuple[str, ...] = PATHS,
        ephemerals: bool = True,
    ) -> None:
        self.ephemerals = ephemerals
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk({"data": None}, seed=seed) if disk is None else disk
        self.machine = Machine(self.disk, seed=seed, chances=chances)
        self.machine.on_kill = self._on_kill
        self.machine.on_locks_released = self._on_locks_released
        self.operations = operations
        self.paths = paths
        self.calls: list[Call] = []
        self.sessions: dict[str, SessionRun] = {}
        #: For each session whose end was requested: its id, the first and the last step
        #: at which it may have ended, and whether it certainly ended.
        self.endings: list[list[Any]] = []
        self.sessions_of: dict[int, list[str]] = {}
        self.problems: list[str] = []
        #: Sessions that clean() has ended.
        self.ended_by_clean: list[str] = []
        self.tag = 0
        for _ in range(processes):
            self.start()

    @property
    def now(self) -> int:
        return self.machine.steps

    def start(self) -> None:
        number = len(self.machine.processes)
        self.machine.start(lambda fs: self.run_process(number, fs))

    def run(self) -> None:
        self.machine.run()

    # -- actions of a process -----------------------------------------------------------

    def run_process(self, number: int, fs: SharedFS) -> None:
        registry = self.open(number, fs)
        left = self.operations
        while left:
            left -= 1
            if registry is None:
                registry = self.open(number, fs)
                continue
            try:
                self.act(number, registry)
            except SessionExpiredError:
                registry.close()
                registry = self.open(number, fs)
        if registry is not None:
            self.close(registry)
        if self.rng.random() < 0.3 and len(self.machine.processes) < 5:
            self.start()

    def open(self, number: int, fs: SharedFS) -> FileRegistry | None:
        try:
            registry = open_registry(
                DIRECTORY,
                fs=fs,
                lock_timeout_ms=LOCK_TIMEOUT_MS,
                max_poll_interval_ms=1_000,
            )
        except SimulatedKill:
            raise
        session = registry.session.id
        self.sessions[session] = SessionRun(session, number)
        self.sessions_of.setdefault(number, []).append(session)
        return registry

    def close(self, registry: FileRegistry) -> None:
        ending = [registry.session.id, self.now, math.inf, False]
        self.endings.append(ending)
        registry.close()
        ending[2:] = [self.now, True]

    def act(self, number: int, registry: FileRegistry) -> None:
        rng = self.rng
        path = rng.choice(self.paths)
        kind = rng.choices(
            ["create", "ephemeral", "get", "set", "cas", "delete", "update", "children", "expire", "clean", "stuck",
             "parent"],
            [4, 4 if self.ephemerals else 0, 5, 4, 3, 2, 4, 2, 2, 1, 1, 1],
        )[0]  # fmt: skip
        self.tag += 1
        value = f"{number}.{self.tag};".encode().ljust(rng.choice(SIZES), b".")
        if kind == "create":
            self.record_call(
                number,
                registry,
                "create",
                path,
                (value, False),
                lambda: registry.create(path, value),
            )
        elif kind == "ephemeral":
            self.record_call(
                number, registry, "create", path, (value, True),
                lambda: registry.create(path, value, ephemeral=True),
            )  # fmt: skip
        elif kind == "get":
            self.get(number, registry, path)
        elif kind == "set":
            self.record_call(
                number,
                registry,
                "set",
                path,
                (value, -1),
                lambda: registry.set(path, value),
            )
        elif kind == "cas":
            known = self.get(number, registry, path)
            version = known[1] if isinstance(known, tuple) else 0
            self.record_call(
                number,
                registry,
                "set",
                path,
                (value, version),
                lambda: registry.set(path, value, version=version),
            )
        elif kind == "delete":
            self.record_call(
                number, registry, "delete", path, (-1,), lambda: registry.delete(path)
            )
        elif kind == "update":
            self.record_call(
                number, registry, "update", path, (value,),
                lambda: attrs.astuple(registry.update(path, lambda before: (before or b"") + value)),  # type: ignore[arg-type]
            )  # fmt: skip
        elif kind == "children":
            self.children(number, registry)
        elif kind == "parent":
            self.ignore_errors(lambda: registry.delete("/a"))
        elif kind == "clean":
            self.ignore_errors(lambda: self.ended_by_clean.extend(registry.clean()))
        elif kind == "stuck":
            self.ignore_errors(registry.poll)
            self.ignore_errors(registry.stuck)
        else:
            others = [
                session_run
                for session_run in self.sessions.values()
                if session_run.session != registry.session.id
            ]
            if others:
                self.expire(registry, rng.choice(others).session)

    def ignore_errors(self, act: Callable[[], object]) -> None:
        try:
            act()
        except SessionExpiredError:
            raise
        except LogcoreError as error:
            if isinstance(error, CorruptRegistryError):
                self.problems.append(f"corrupt: {error}")

    def get(self, number: int, registry: FileRegistry, path: str) -> Any:
        return self.record_call(
            number, registry, "get", path, (), lambda: attrs.astuple(registry.get(path))
        )

    def children(self, number: int, registry: FileRegistry) -> None:
        invoked = self.now
        try:
            found = registry.children("/a")
        except CorruptRegistryError as error:
            self.problems.append(f"corrupt: {error}")
            return
        for name in ("p", "q"):
            path = f"/a/{name}"
            self.calls.append(
                Call(
                    "exists",
                    path,
                    (),
                    registry.session.id,
                    number,
                    invoked,
                    self.now,
                    name in found,
                )
            )

    def record_call(
        self, number: int, registry: FileRegistry, kind: str, path: str, arguments: tuple[Any, ...],
        act: Callable[[], Any],
    ) -> Any:  # fmt: skip
        call = Call(
            kind, path, arguments, self.sessions_of[number][-1], number, self.now
        )
        self.calls.append(call)
        try:
            call.result = act()
        except SimulatedKill:
            # The call may have had its effect, but not after the kill.
            call.returned = self.now
            raise
        except LogcoreError as error:
            call.result = type(error).__name__
            call.returned = self.now
            if isinstance(error, CorruptRegistryError):
                self.problems.append(f"corrupt: {error}")
            if isinstance(error, SessionExpiredError):
                raise
        call.returned = self.now
        return call.result

    def expire(self, registry: FileRegistry, session: str) -> None:
        ending = [session, self.now, math.inf, False]
        self.endings.append(ending)
        try:
            registry.expire(session)
        except SessionExpiredError:
            raise
        except RegistryLockedError:
            return
        ending[2:] = [self.now, True]
        for path, content in self.disk.files().items():
            if (
                path.endswith(SUFFIX)
                and (head := read_header(content, path)) is not None
            ):
                slot = read_slot(head, content)
                if slot is not None and slot.session == session:
                    self.problems.append(f"clean: {path} outlives its session's end")

    def _on_kill(self, process: SimulatedProcess) -> None:
        for call in self.calls:
            if (
                call.process == process.number
                and call.result is UNKNOWN
                and call.returned > self.now
            ):
                call.returned = self.now
        for session in self.sessions_of.get(process.number, ())[-1:]:
            self.sessions[session].killed_step = self.now

    def _on_locks_released(self, process: SimulatedProcess) -> None:
        for session in self.sessions_of.get(process.number, ())[-1:]:
            session_run = self.sessions[session]
            assert session_run.killed_step is not None
            self.endings.append([session, session_run.killed_step, self.now, True])

    # -- checks of the result ----------------------------------------------------------

    def history(self, calls: list[Call] | None = None) -> list[Call]:
        """Return the calls, together with the ends of sessions as calls on each node."""
        history = list(self.calls if calls is None else calls)
        for session, invoked, returned, is_sure in self.endings:
            result = None if is_sure else UNKNOWN
            for path in self.paths:
                history.append(
                    Call("expire", path, (), session, -1, invoked, returned, result)
                )
                history.append(
                    Call("fence", path, (), session, -1, invoked, returned, result)
                )
        return history

    def check_outcome(self) -> None:
        assert not self.problems, self.problems
        check(self.history())
        ended = {ending[0] for ending in self.endings}
        for session in self.ended_by_clean:
            assert session in ended or session not in self.sessions, (
                f"lease: clean() ended {session}, whose process was running"
            )
        self.check_garbage()

    def check_garbage(self) -> None:
        """Check that clean() removes the nodes of ended sessions, and no other nodes."""
        with open_registry(DIRECTORY, fs=self.disk) as registry:
            self.disk.advance(120_000)
            before = {path: self.node_at(registry, path) for path in self.paths}
            registry.clean()
            assert before == {
                path: self.node_at(registry, path) for path in self.paths
            }, "clean: a node of a running session was removed"
            nodes = [
                path for path in self.disk.files() if path.endswith((".node", ".tmp"))
            ]
            for path in nodes:
                assert path.endswith(".node"), f"clean: {path} is left"
                found = registry._read(path)
                assert found is None or found[1].session is None, (
                    f"clean: {path} of an ended session is left"
                )
            left = [
                info for info in registry.sessions() if info.id != registry.session.id
            ]
            assert not left, f"clean: {left} are left"

    @staticmethod
    def node_at(registry: FileRegistry, path: str) -> Any:
        try:
            return registry.get(path)
        except NodeNotFoundError:
            return None

    def check_after_power(self, state: CrashState) -> None:
        """Check that after a power cut every acknowledged change of synced files
        exists, and no other change.
        """
        disk = state.disk()
        disk.seed += 1_000_003  # other random decisions than before the power cut
        end = self.now + 10
        calls = [
            attrs.evolve(call, returned=min(call.returned, self.now))
            for call in self.calls
            if Layout().kind_of(split(call.path)) is NodeKind.PERSISTENT
            and (call.result is UNKNOWN or not isinstance(call.result, str))
            and call.kind not in ("get", "exists")
        ]
        with open_registry(DIRECTORY, fs=disk) as registry:
            for path in self.paths:
                ephemerals = any(
                    call.path == path and call.kind == "create" and call.arguments[1]
                    for call in calls
                )
                try:
                    found: Any = attrs.astuple(registry.get(path))
                except CorruptRegistryError:
                    # Garbage in a file that was never synced is indistinguishable from damage.
                    assert (
                        ephemerals
                        or Layout().kind_of(split(path)) is not NodeKind.PERSISTENT
                    ), f"damaged: {path}"
                    continue
                except LogcoreError as error:
                    found = type(error).__name__
                if Layout().kind_of(split(path)) is NodeKind.PERSISTENT:
                    calls.append(Call("get", path, (), None, 99, end, end, found))
            check([*self.session_ends(end), *calls])
            for path in self.paths:
                self.use_after_power_cut(registry, path)

    def session_ends(self, end: int) -> list[Call]:
        """Return the ends of all sessions as calls on each node. Calls of `fence` are not
        needed, because no session writes after the power cut.
        """
        return [
            Call(
                "expire",
                path,
                (),
                session,
                -1,
                self.earliest_end(session_run),
                end - 1,
                None,
            )
            for session, session_run in self.sessions.items()
            for path in self.paths
        ]

    def earliest_end(self, session_run: SessionRun) -> int:
        begun = [
            ending[1] for ending in self.endings if ending[0] == session_run.session
        ]
        return min(
            begun
            if session_run.killed_step is None
            else [*begun, session_run.killed_step],
            default=0,
        )

    def use_after_power_cut(self, registry: FileRegistry, path: str) -> None:
        try:
            before = registry.update(path, lambda value: value or b"made")
            assert before is not None
            assert registry.set(path, before.value + b"+") == before.version + 1
            assert registry.get(path).value == before.value + b"+"
            registry.delete(path)
        except CorruptRegistryError:
            pass
