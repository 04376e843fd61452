"""Brokers of a simulated cluster: their processes, files and connections.

A broker runs the code of `netshim serve`: ClusterNode, Broker, the threads of the member
and of the fetchers, the files of logs and of the registry. The simulation replaces threads
(simulated_threads.py), disks (a SimulatedDisk for each broker and one for the registry)
and connections, which carry frames of Kafka's protocol. Clients and faults are in
simulated_cluster.py.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from logcore import LogcoreError, LogDir
from logcore.config import Durability
from logcore.errors import RemoteUnavailableError
from logcore.fs import FS, Boot
from logcore.testing import SimulatedDisk
from logcore.testing.faults import FaultPlan
from logcore.testing.processes import SimulatedKill
from netshim import wire
from netshim.broker import Broker
from netshim.cluster.broker_connections import BrokerListener
from netshim.cluster.node import ClusterNode, ClusterSettings
from netshim.cluster.view import ClusterView
from netshim.listeners import Listener
from netshim.scheduling import CloseConnection, PendingResponse
from netshim.session import ClientSession
from netshim.settings import Settings
from support.simulated_threads import SimulatedProcess

if TYPE_CHECKING:
    from support.simulated_cluster import World

BROKERS: Final = (1, 2, 3)
PORT: Final = 9092
REGISTRY: Final = "/registry/cluster"
SESSION_MS: Final = 1_000
LAG_MS: Final = 2_000
#: How often a broker runs the maintenance of its directory.
_TICK_MS: Final = 1_000
#: Added to handles of the registry's disk, so that they differ from handles of brokers.
_REGISTRY_HANDLES: Final = 1 << 20
#: The operations of the registry after which its watches report.
_REPORTED_OPERATIONS: Final = frozenset(
    {"pwrite", "rename", "unlink", "mkdir", "rmdir"}
)
_SYNCS: Final = frozenset({"fdatasync", "fsync", "sync_dir"})
#: The possible durations of a sync, in milliseconds.
_SYNC_MS: Final = (0, 0, 0, 1, 2, 10)
#: The possible delays of a task, in milliseconds.
_DELAY_MS: Final = (0, 0, 0, 0, 1, 20)
#: The probability that another thread runs before an operation of the registry.
_SWITCH_PROBABILITY: Final = 0.02


class BrokerFiles:
    """The file system of one process: the disk of its broker, and the registry's disk.

    It implements fs.SharedFS.
    """

    def __init__(self, world: World, process: SimulatedProcess, disk: SimulatedDisk):
        self.forks = 0
        self._world = world
        self._process = process
        self._disk = disk
        self._registry = world.registry_disk
        #: Open handles of the registry, and whether they can write.
        self._handles: dict[int, tuple[str, bool]] = {}
        self.watches: list[RegistryWatch] = []
        #: If not 0, the process is paused this long before its next proposal of the state
        #: of a partition.
        self.pause_before_change_ms = 0

    def __getattr__(self, name: str) -> Any:
        own, shared = getattr(self._disk, name), getattr(self._registry, name)
        threads = self._world.threads

        def call(*arguments: Any, **named: Any) -> Any:
            if self._process.is_killed:
                raise SimulatedKill
            target = arguments[0] if arguments else ""
            if name in _SYNCS:
                threads.sleep_ms(self._world.rng.choice(_SYNC_MS))
            if isinstance(target, int) and target >= _REGISTRY_HANDLES:
                threads.maybe_switch(_SWITCH_PROBABILITY)
                result = shared(target - _REGISTRY_HANDLES, *arguments[1:], **named)
                if name in _REPORTED_OPERATIONS:
                    self._world.report(name, self._handles[target][0])
                return result
            if isinstance(target, str) and target.startswith("/registry"):
                threads.maybe_switch(_SWITCH_PROBABILITY)
                result = shared(*arguments, **named)
                if name in _REPORTED_OPERATIONS:
                    for path in arguments:
                        self._world.report(name, path)
                return result
            return own(*arguments, **named)

        self.__dict__[name] = call
        return call

    def open(self, path: str, **named: Any) -> int:
        if self._process.is_killed:
            raise SimulatedKill
        if not path.startswith("/registry"):
            named.pop("permissions", None)
            return self._disk.open(path, **named)
        is_new = named.get("create") and not self._registry.exists(path)
        handle = _REGISTRY_HANDLES + self._registry.open(path, **named)
        self._handles[handle] = path, bool(named.get("write"))
        if is_new:
            self._world.report("create", path)
        return handle

    def close(self, handle: int) -> None:
        if self._process.is_killed:
            return
        if handle < _REGISTRY_HANDLES:
            self._disk.close(handle)
        elif handle in self._handles:
            self._close(handle)

    def _close(self, handle: int) -> None:
        path, is_writable = self._handles.pop(handle)
        self._registry.close(handle - _REGISTRY_HANDLES)
        if is_writable:
            self._world.report("close", path)

    def end(self) -> None:
        """Close the files of a killed process, which releases its locks."""
        self._disk.kill()
        for handle in list(self._handles):
            self._close(handle)
        self.watches.clear()

    def random_bytes(self, size: int) -> bytes:
        """Return random bytes. Two disks with one seed would return equal bytes."""
        return self._world.rng.randbytes(size)

    def boot(self) -> Boot:
        """Return the boot of the machine on which all brokers run."""
        return self._registry.boot()

    def lock_byte(
        self, handle: int, byte: int, *, timeout_ms: int = 0, shared: bool = False
    ) -> bool:
        threads = self._world.threads
        disk = self._disk
        if handle >= _REGISTRY_HANDLES:
            disk, handle = self._registry, handle - _REGISTRY_HANDLES
            # Only workers write proposals. Other threads also lock bytes, for example to
            # renew the session.
            if self.pause_before_change_ms and threads.name.startswith("worker"):
                end_ms = threads.now_ms + self.pause_before_change_ms
                self._process.paused_until_ms = end_ms
                self.pause_before_change_ms = 0
                threads.maybe_switch(1)
            threads.maybe_switch(_SWITCH_PROBABILITY)
        deadline_ms = threads.now_ms + timeout_ms
        while not disk.lock_byte(handle, byte, shared=shared):
            if threads.now_ms >= deadline_ms:
                return False
            threads.sleep_ms(1)
        return True

    def watch(self, *directories: str, closing: Sequence[str] = ()) -> RegistryWatch:
        for directory in (*directories, *closing):
            self._registry.identity(directory)
        watch = RegistryWatch(self, self._world, directories, closing)
        self.watches.append(watch)
        return watch


class RegistryWatch:
    """A watch like inotify's. Its reports may be late or lost."""

    def __init__(
        self,
        files: BrokerFiles,
        world: World,
        directories: Sequence[str],
        closing: Sequence[str],
    ) -> None:
        self.saw_close = False
        self.saw_removal = False
        self._files = files
        self._world = world
        self._directories = set(directories)
        self._closing = set(closing)
        self._has_report = False

    def wake(self) -> None:
        self._has_report = True

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        if self in self._files.watches:
            self._files.watches.remove(self)

    def report(self, operation: str, path: str) -> None:
        """Report an operation on a path if this watch covers it."""
        directory = path.rpartition("/")[0]
        if operation == "rmdir" and path in self._directories | self._closing:
            self._directories.discard(path)
            self._closing.discard(path)
            self.saw_removal = True
        elif operation == "close" and directory in self._closing:
            self.saw_close = True
        elif operation in ("rename", "unlink") and directory in self._closing:
            pass
        elif operation == "close" or directory not in self._directories:
            return
        rng, threads = self._world.rng, self._world.threads
        if rng.random() >= self._world.report_loss:
            threads.at(threads.now_ms + rng.choice([0, 0, 1, 5, 20]), self.wake)

    def wait(self, timeout: float | None) -> bool:
        threads = self._world.threads
        deadline_ms = None
        if timeout is not None:
            deadline_ms = threads.now_ms + round(timeout * 1_000)
        found = threads.wait(lambda: self._has_report, deadline_ms)
        self._has_report = False
        return found


class SimulatedNetwork:
    """Carries frames between brokers and clients. A cut link holds them back."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cut_links: set[tuple[int, int]] = set()
        self._held: list[tuple[tuple[int, int], Callable[[], None]]] = []

    def send(self, source: int, target: int, arrive: Callable[[], None]) -> None:
        threads = self._world.threads
        delay_ms = self._world.rng.choice([0, 0, 0, 1, 1, 3, 20])

        def deliver() -> None:
            if (source, target) in self.cut_links:
                self._held.append(((source, target), arrive))
            else:
                arrive()

        threads.at(threads.now_ms + delay_ms, deliver)

    def heal(self) -> None:
        self.cut_links.clear()
        held, self._held = self._held, []
        for _, arrive in held:
            arrive()


class SimulatedConnection:
    """A connection to a broker. It has the methods of SourceConnection."""

    def __init__(self, world: World, source: int, target: int) -> None:
        """Connect. Raises RemoteUnavailableError if the broker does not listen."""
        instance = world.brokers[target].instance
        if instance is None or not instance.is_listening:
            raise RemoteUnavailableError(f"broker {target} does not listen")
        self._world = world
        self._source = source
        self._target = target
        self._instance = instance
        self.session = ClientSession(f"broker-{target}", PORT, f"10.0.0.{source}")
        self.is_closed = False
        #: The response that the broker has not completed yet.
        self.pending: PendingResponse | None = None
        self._response: bytes | None = None
        self._numbers = itertools.count(1)
        instance.connections[self] = None

    def request(
        self,
        api: Any,
        request: Any,
        *,
        max_version: int = 99,
        limit_ms: int = 30_000,
    ) -> Any:
        version = min(api.max_version, max_version)
        frame = wire.encode_request(api, version, next(self._numbers), "sim", request)
        network, threads = self._world.network, self._world.threads
        self._response = None
        copy = memoryview(bytes(frame))[4:]
        network.send(
            self._source, self._target, lambda: self._instance.receive(self, copy)
        )
        threads.wait(
            lambda: self._response is not None or self.is_closed,
            threads.now_ms + limit_ms,
        )
        response = self._response
        if response is None:
            self.close()
            raise RemoteUnavailableError(f"broker {self._target} does not answer")
        return wire.decode_response(api, version, memoryview(response)[4:])[1]

    def respond(self, pieces: Any) -> None:
        """Send the response. The broker calls this."""
        self.pending = None
        if isinstance(pieces, CloseConnection):
            self.reset()
        elif pieces is not None and not self.is_closed:
            data = b"".join(pieces)

            def arrive() -> None:
                self._response = data

            self._world.network.send(self._target, self._source, arrive)

    def interrupt(self) -> None:
        self.is_closed = True

    def reset(self) -> None:
        """Close the connection because the broker has closed it, or has ended."""
        self.is_closed = True
        self._instance.connections.pop(self, None)

    def close(self) -> None:
        self.reset()
        self._instance.call(self._cancel)

    def _cancel(self) -> None:
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None


class BrokerInstance:
    """One process of a broker, with its event loop and its workers."""

    def __init__(self, world: World, broker: SimulatedBroker) -> None:
        self._world = world
        self._threads = world.threads
        self.number = broker.number
        self.process = SimulatedProcess(f"broker-{broker.number}")
        self.files = BrokerFiles(world, self.process, broker.disk)
        self.connections: dict[SimulatedConnection, None] = {}
        self.is_listening = False
        self._inbox: deque[Callable[[], None]] = deque()
        self._tasks: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self._loop_iterations = 0
        self._is_ticking = False
        self.has_stopped = False
        self.has_failed = False
        #: The number of workers that are busy.
        self._busy_workers = 0
        self.logdir: LogDir
        self.node: ClusterNode
        self._broker: Broker
        self._threads.spawn(self._run, f"loop-{self.number}", self.process)

    @property
    def view(self) -> ClusterView:
        """The cluster as this broker has read it."""
        node = getattr(self, "node", None)
        return ClusterView() if node is None else node.member.view

    def call(self, step: Callable[[], None]) -> None:
        """Run a function in the loop."""
        self._inbox.append(step)

    def receive(self, connection: SimulatedConnection, frame: memoryview) -> None:
        self.call(lambda: self._handle(connection, frame))

    def _run(self) -> None:
        settings = Settings(
            broker_session_timeout_ms=SESSION_MS,
            replica_lag_time_max_ms=LAG_MS,
            default_replication_factor=3,
        )
        self.node = ClusterNode(
            ClusterSettings(registry=REGISTRY, node_id=self.number),
            BrokerListener(
                Listener("PLAINTEXT", f"broker-{self.number}", PORT, "PLAINTEXT", None),
                None,
                None,
            ),
            settings,
            f"/broker-{self.number}",
            cast(FS, self.files),
            durability=Durability.parse("group"),
            config={"min.insync.replicas": 2},
            new_id=lambda: self.files.random_bytes(8).hex(),
            broker_login=lambda: None,
            call_in_loop=self.call,
            loop_iterations=lambda: self._loop_iterations,
            on_failure=self._fail,
        )
        self.logdir = self.node.open()
        for topic in self.logdir.topics():
            for number in self.logdir.partitions(topic):
                with contextlib.suppress(LogcoreError):
                    self.logdir.partition(topic, number)
        self._broker = Broker(
            self.node.directory,
            settings,
            lambda work, done: self._tasks.append((work, done)),
            lambda: self.files.random_bytes(8).hex(),
            self.call,
            services=self.node.install,
        )
        for number in range(2):
            self._threads.spawn(self._work, f"worker-{number}", self.process)
        self._threads.spawn(self._join, f"join-{self.number}", self.process)
        self._loop()

    def _join(self) -> None:
        address = f"broker-{self.number}", PORT
        try:
            self.node.join({"PLAINTEXT": address})
        except LogcoreError as error:
            self._world.report_violation(f"broker {self.number} cannot join: {error!r}")
            return
        self.is_listening = True

    def _fail(self, error: LogcoreError) -> None:
        """End the broker, because a log has failed."""
        if self._world.brokers[self.number].has_bad_disk:
            self.has_failed = True
        else:
            self._world.report_violation(f"broker {self.number} ends: {error!r}")

    def _loop(self) -> None:
        tick_ms = 0
        while True:
            now_ms = self.files.now_ms()
            next_ms = self._broker.next_ms
            delay_ms = 100 if next_ms is None else min(100, next_ms - now_ms)
            has_work = self._threads.wait(
                lambda: bool(self._inbox), self._threads.now_ms + max(1, delay_ms)
            )
            step = self._inbox.popleft() if has_work else self._tick
            self._loop_iterations += 1
            self._guard(step)
            if self._threads.now_ms >= tick_ms and not self._is_ticking:
                tick_ms = self._threads.now_ms + _TICK_MS
                self._is_ticking = True
                self._tasks.append((self._maintain, self._maintained))

    def _tick(self) -> None:
        self._broker.tick(self.files.now_ms())

    def _maintain(self) -> None:
        self.logdir.tick(self.files.now_ms())

    def _maintained(self, result: Any) -> None:
        self._is_ticking = False
        if isinstance(result, Exception) and not isinstance(result, LogcoreError):
            self._world.report_violation(
                f"maintenance of broker {self.number}: {result!r}"
            )

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            self._world.report_violation(f"broker {self.number}: {text}")

    def _work(self) -> None:
        while True:
            self._threads.wait(lambda: bool(self._tasks))
            work, done = self._tasks.popleft()
            self._busy_workers += 1
            self._threads.sleep_ms(self._world.rng.choice(_DELAY_MS))
            result: Any
            try:
                result = work()
            except Exception as error:
                result = error
            self._busy_workers -= 1
            self.call(lambda done=done, result=result: self._deliver(done, result))  # type: ignore[misc]
            del work, done, result

    def _deliver(self, done: Callable[[Any], None], result: Any) -> None:
        self._broker.state.advance_clock(self.files.now_ms())
        done(result)

    def _handle(self, connection: SimulatedConnection, frame: memoryview) -> None:
        if connection.is_closed:
            return
        try:
            reply = self._broker.handle(connection.session, frame, self.files.now_ms())
        except CloseConnection:
            connection.reset()
            return
        if isinstance(reply, PendingResponse):
            connection.pending = reply
            reply.then(connection.respond)
        else:
            connection.respond(reply)

    def stop(self) -> None:
        """Begin to stop like Server.stop(). `has_stopped` is set at the end."""
        self._threads.spawn(self._stop, f"stop-{self.number}", self.process)

    def _stop(self) -> None:
        self.node.leave()
        is_over: list[bool] = []

        def stop_broker() -> None:
            self._broker.stop(self.files.now_ms())
            is_over.append(True)

        self.call(stop_broker)
        self._threads.wait(lambda: bool(is_over))
        self.node.close()
        # The tasks of the broker end before its logs are closed.
        self._threads.wait(lambda: not self._tasks and not self._busy_workers)
        self.logdir.close()
        self.has_stopped = True

    def end(self) -> None:
        """Kill the process."""
        self.files.forks += 1  # so that objects of the process are not closed
        self._threads.kill(self.process)
        self.files.end()
        self.is_listening = False
        for connection in list(self.connections):
            connection.reset()


class SimulatedBroker:
    """A broker with its disk. `instance` is its process while one runs."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.number = number
        self.disk = SimulatedDisk(seed=world.rng.getrandbits(32))
        self.instance: BrokerInstance | None = None
        #: True if operations of the disk may fail, until the broker is restarted.
        self.has_bad_disk = False

    def start(self) -> None:
        if self.instance is None:
            self.instance = BrokerInstance(self._world, self)

    def kill(self) -> None:
        if self.instance is not None:
            self.instance.end()
            self.instance = None
        self.disk.faults = None
        self.has_bad_disk = False

    def fail_disk(self, plan: FaultPlan) -> None:
        """Let operations on the disk fail until the broker is started again."""
        if self.instance is not None:
            self.disk.faults = plan
            self.has_bad_disk = True

    def cut_power(self) -> None:
        self.kill()
        self.disk = self.disk.after_power_cut(self._world.rng)

    def wipe(self) -> None:
        """Replace the disk by an empty one."""
        self.kill()
        now_ms = self.disk.now_ms()
        self.disk = SimulatedDisk(seed=self._world.rng.getrandbits(32), now_ms=now_ms)
