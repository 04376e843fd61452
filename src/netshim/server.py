"""The broker on a network: sockets, one event loop, and threads that block on the disk.

Rules:
- One event loop runs the broker. Only work that may block on the disk runs in other
  threads; its results are delivered in the event loop.
- Stored bytes are passed to the transport as views of the files.
- The cost of a client is bounded: connections, request bytes, unread responses, time
  (docs/netshim.md).
- A step that occupies the event loop for long is logged, because all other clients wait
  for it.
- After TERM, no new request is accepted, the accepted ones are answered, and the log
  directory is closed cleanly.

This is the only module with sockets. It decodes no request and makes no decision about
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

import attrs

import logcore
from logcore import Durability, LogDir
from logcore.directory.maintenance import MaintenanceConfig
from logcore.errors import ConsumerStateError
from logcore.fs import FS, OS, OsFS
from logcore.registry import registry_path
from logcore.registry.views import register_broker
from netshim.broker import Broker
from netshim.client_sockets import ClientSocket, ListeningSockets, TlsListening
from netshim.connection import ConnectionMemory, Workload
from netshim.listeners import Listener, TlsSettings, check_exposure, check_listeners
from netshim.open_connections import OpenConnections
from netshim.request_counts import RequestCounts
from netshim.request_log import LINES
from netshim.rollback import DirectorySnapshot, ReplacedBroker
from netshim.security.service import Security, SecuritySettings
from netshim.security.stored import SecuritySnapshot, SecurityStore
from netshim.security_loading import SecurityLoader
from netshim.session import ANONYMOUS
from netshim.settings import TOPIC_DEFAULTS, Settings
from netshim.workers import Workers

if TYPE_CHECKING:  # imported only if they are used
    from netshim.cluster.broker_connections import BrokerListener
    from netshim.cluster.node import ClusterNode, ClusterSettings
    from netshim.faults.nodes import AdvertisedNode, AdvertisedNodes
    from netshim.kafka_releases import KafkaRelease
    from netshim.recording.recorder import TrafficRecorder

_log = logging.getLogger("netshim")

_T = TypeVar("_T")

#: Threads for the broker's work that may block on the disk, such as syncs.
_SYNC_THREADS: Final = 4
#: Threads for the server's own steps, such as the maintenance of the directory.
_POOL_THREADS: Final = 2
#: Interval of checks for appends by other code of this process, and of the maintenance
#: of the directory.
_TICK_S: Final = 0.05
#: The same while no request arrives, and none waits for records.
_IDLE_TICK_S: Final = 0.1
#: A step that occupies the event loop for longer is logged.
_SLOW_STEP_S: Final = 0.05
#: Maximum time that stop() waits for clients.
_DRAIN_S: Final = 10.0
#: Maximum time that LogDir.delete_topic() waits for the broker's groups.
_FORGET_S: Final = 30.0
#: Maximum number of bytes that group commit leaves unsynced. Above it, an append syncs
#: first, in a thread. With the library's own 1 MiB, producers with acks=1 would wait
#: for a sync every 2 ms at 500 MB/s. The stored durability policy of a partition
#: contains this number too. Recovery accepts damage as the result of a crash only in
#: bytes that may have been unsynced. With a smaller number, recovery would refuse to
#: open a log whose last 64 MiB a crash has damaged.
_UNSYNCED_BYTES: Final = 64 << 20


#: Minimum time that stop() leaves clients to confirm that their connection is closed.
#: Clients that read their socket do so in a millisecond.
_LINGER_S: Final = 0.25
#: Maximum number of steps in which advance() skips time.
_MAX_STEPS: Final = 200

#: Maximum time that a connection above a quota is held before it is closed.
_MAX_CLOSE_DELAY_S: Final = 1.0
#: Threads that verify passwords and tokens.
_LOGIN_THREADS: Final = 2


class Clock(Protocol):
    """The clock of a server.

    A simulated disk is also a clock, so it has a time of its own.
    """

    def now_ms(self) -> int:
        """Return the wall clock, which is compared with the timestamps of records."""
        ...

    def monotonic_ms(self) -> int:
        """Return a clock that never moves backwards, for waits and sessions."""
        ...


class Server:
    """A broker on a port, in the running event loop.

    Use it as `async with Server("data") as server: ...`. Arguments:
    - path: the log directory, which is created if it does not exist.
    - port: 0 for a free port.
    - host: the address to listen on, by default loopback.
    - advertised: (host, port) for clients to connect to. By default, each client gets
      the address that it has used.
    - listeners: several addresses instead of host, port and advertised, each a Listener
      or a text such as "SASL_SSL://127.0.0.1:9093".
    - tls: the TlsSettings of listeners that use TLS.
    - security: the SecuritySettings.
    - insecure: allow listeners outside loopback that authenticate no client.
    - durability, config, shared, fs: the arguments of logcore.open_dir.
    - cluster: the ClusterSettings of a broker in a cluster.
    - settings: a Settings. Its fields may also be given as keyword arguments.
    - clock: the source of time, by default fs. A test that advances a clock manually
      awaits tick() after each change.
    """

    broker: Broker
    loop: asyncio.AbstractEventLoop
    budget: ConnectionMemory
    workload: Workload
    security: Security
    tls_context: ssl.SSLContext
    #: When a running stop() no longer waits for clients, by the clock of the event
    #: loop.
    _deadline: float
    #: When _run_due_work() is called again, by the clock of the event loop.
    _due_work_s: float

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised: tuple[str, int] | None = None,
        listeners: Sequence[Listener | str] = (),
        tls: TlsSettings | None = None,
        security: SecuritySettings | None = None,
        insecure: bool = False,
        durability: str | Durability = "group",
        config: Mapping[str, object] | None = None,
        shared: bool = False,
        cluster: ClusterSettings | None = None,
        settings: Settings | None = None,
        fs: FS = OS,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(port, int) or not 0 <= port <= 65_535:
            raise logcore.InvalidConfigError(
                "port", expected="0 to 65535", found=repr(port)
            )
        self.path = os.fspath(path)
        # An empty host may come from an empty shell variable, and never means all
        # networks.
        if not host:
            raise logcore.InvalidConfigError(
                "host", expected="an address; 0.0.0.0 for all", found=repr(host)
            )
        parsed_listeners = [
            Listener.parse(listener) if isinstance(listener, str) else listener
            for listener in listeners
        ]
        if not parsed_listeners:
            parsed_listeners = [
                Listener("PLAINTEXT", host, port, "PLAINTEXT", advertised)
            ]
        security = security or SecuritySettings()
        check_listeners(parsed_listeners, tls)
        if not insecure:
            check_exposure(parsed_listeners, tls, security.mechanisms)
        #: The listeners. After start(), each has the port that it listens on.
        self.listeners = parsed_listeners
        self.tls_settings = tls
        self._security_settings = security
        #: The principal of a client that has not logged in.
        self.default_principal = ANONYMOUS
        self.settings = attrs.evolve(settings or Settings(), **options)
        #: Whether other processes may write to the directory.
        self._shared = shared
        self._cluster_settings = cluster
        #: The broker's part in its cluster. None without a cluster, and before start().
        self._cluster: ClusterNode | None = None
        #: The listener that other brokers of the cluster use.
        self._brokers: BrokerListener | None = None
        if cluster is not None:
            self._brokers = self._listener_of_brokers(cluster, security)
        #: Counts the iterations of the event loop's timer.
        self.loop_iterations = 0
        #: The release of Kafka and the nodes that a test has chosen.
        self.release: KafkaRelease | None = None
        self.nodes: AdvertisedNodes | None = None
        #: Counts of requests, if metrics are served. Set before start().
        self.counts: RequestCounts | None = None
        #: Records the traffic; see record().
        self.recorder: TrafficRecorder | None = None
        #: When the timer last ran, by time.monotonic().
        self._last_iteration_s = 0.0
        #: The longest step since the last pop_longest_step_s().
        self._longest_step_s = 0.0
        #: A snapshot is made or restored, and requests wait until it is done.
        self.is_replacing = False
        #: Number of submitted calls whose results were not delivered yet.
        self._outstanding = 0
        #: Made by snapshot(). stop() deletes their files.
        self._snapshots: list[DirectorySnapshot] = []
        #: Set if the broker cannot continue, so that the server must be stopped: a log has
        #: failed in a cluster, or a snapshot could not be restored.
        self.failed = asyncio.Event()
        #: The reason why `failed` is set.
        self.failure: logcore.LogcoreError | None = None
        self._durability = Durability.parse(durability)
        # In a shared directory, all processes must use the same policy, so it is not
        # changed.
        if not shared:
            max_bytes = max(self._durability.max_bytes, _UNSYNCED_BYTES)
            self._durability = attrs.evolve(self._durability, max_bytes=max_bytes)
        self._config = config
        self._fs = fs
        self._clock: Clock = fs
        if clock is not None:
            self._clock = clock
        #: The wall clock at the moment when the monotonic clock was 0; see now_ms().
        self._epoch_ms = self._clock.now_ms() - self._clock.monotonic_ms()
        #: Number of requests that the broker had handled at the last tick.
        self._last_request_count = 0
        #: Calls _tick(). None before start() and after stop().
        self._timer: asyncio.TimerHandle | None = None
        #: The maintenance of the directory that runs in a thread.
        self._ticking: asyncio.Future[Any] | None = None
        # Descriptors of one open log: the active segment; the high watermark, if appends
        # wait for a sync or for replicas; the record of the lock of a shared log.
        files_per_log = 1
        files_per_log += self._durability.waits or cluster is not None
        files_per_log += shared
        self._connections = OpenConnections(files_per_log, self.log)
        #: The sockets by host and port.
        self._listening: dict[tuple[str, int], ListeningSockets] = {}

    def __repr__(self) -> str:
        state = "not serving"
        if self._timer is not None:
            state = self.bootstrap_servers
        return f"<Server {state} over {self.path}>"

    @property
    def is_clustered(self) -> bool:
        """Whether the broker is one of a cluster."""
        return self._cluster_settings is not None

    def _listener_of_brokers(
        self, cluster: ClusterSettings, security: SecuritySettings
    ) -> BrokerListener:
        from netshim.cluster.broker_connections import BrokerListener

        if self._shared:
            raise logcore.InvalidConfigError(
                "a broker in a cluster does not share its directory",
                expected="no --shared, or no --registry",
                found="both",
            )
        return BrokerListener.choose(
            self.listeners,
            cluster.inter_broker_listener,
            self.tls_settings,
            cluster.tls_ca,
            security,
        )

    # -- life --------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Open the directory and listen on the port.

        Raises:
            LogcoreError: logcore.open_dir failed.
            OSError: the address is not available.
            NodeExistsError: another process serves the same shared directory.
        """
        # Step 1: open the directory, and recover logs after a crash.
        self.loop = asyncio.get_running_loop()
        self.budget = ConnectionMemory(self.settings.max_buffered_bytes)
        self.workload = Workload(self.settings.max_requests_in_work, self.budget)
        if self.tls_settings is not None:
            self.tls_context = self.tls_settings.context()
        self.security = self._new_security()
        # Steps of the server itself, such as the maintenance of the directory.
        self._pool = ThreadPoolExecutor(
            _POOL_THREADS, thread_name_prefix="netshim-disk-maintenance"
        )
        # Work of the broker, such as syncs.
        call_soon = self.loop.call_soon_threadsafe
        self._workers = Workers(call_soon, "netshim-disk", _SYNC_THREADS, self._deliver)
        self._logins = Workers(
            call_soon, "netshim-login", _LOGIN_THREADS, self._deliver
        )
        try:
            self.logdir: LogDir = await self.loop.run_in_executor(
                self._pool, self._open
            )
        except BaseException:
            self._pool.shutdown()
            raise
        try:
            if self._cluster is None:
                await self._load_security()
            await self.loop.run_in_executor(self._pool, self._read_ids)
            if not self.logdir.host.was_clean:
                await self.loop.run_in_executor(self._pool, self._recover)
            # Step 2: start the broker and listen.
            self._thread_id = threading.get_ident()
            self.broker = self._new_broker()
            await self._listen()
            # Step 3: publish the address for the other processes of a shared directory.
            if self._shared:
                try:
                    await self.loop.run_in_executor(self._pool, self._register)
                except BaseException:
                    await self._close_listeners()
                    raise
            if self._cluster is not None:
                addresses = {
                    listener.name: listener.address for listener in self.listeners
                }
                try:
                    await self.loop.run_in_executor(
                        self._pool, self._cluster.join, addresses
                    )
                    await self._load_security()
                    for sockets in self._listening.values():
                        await sockets.start_serving()
                except BaseException:
                    await self._close_listeners()
                    raise
        except BaseException:
            await self.loop.run_in_executor(self._pool, self.security.close)
            if self._cluster is not None:
                await self.loop.run_in_executor(self._pool, self._cluster.close)
            self._logins.shutdown()
            self._workers.shutdown()
            self._pool.shutdown()
            self.logdir.close()
            raise
        self._due_work_s = self.loop.time() + _TICK_S
        self._last_iteration_s = time.monotonic()
        self._timer = self.loop.call_later(_TICK_S, self._tick)
        _log.info(
            "listening on %s, log directory %s",
            self.bootstrap_servers,
            self.logdir.path,
        )

    def _new_broker(self) -> Broker:
        broker = self._broker_of_directory()
        if self.counts is not None:
            broker.counts = self.counts
            broker.state.syncs.on_sync = self.counts.sync_seconds.add
        broker.state.submit_login = self._submit_login
        broker.state.release = self.release
        if self.nodes is not None:
            broker.advertise(self.nodes)
        return broker

    def _broker_of_directory(self) -> Broker:
        arguments = (
            self.settings,
            self._submit,
            self._new_id,
            self._call_later,
            self.security,
        )
        if self._cluster is not None:
            # Logs are not closed to make room, because replicas use them all the time.
            return Broker(
                self._cluster.directory, *arguments, services=self._cluster.install
            )
        broker = Broker(self.logdir, *arguments)
        broker.state.logs.max_open_logs = self._connections.max_open_logs
        if not self._shared:
            self.logdir.host.forget_topic = self._forget_topic
        return broker

    def check(self) -> None:
        """Check the TLS files, and that the addresses of the listeners are free.

        Raises:
            InvalidConfigError: the TLS files are unusable.
            OSError: an address is not available.
        """
        if self.tls_settings is not None:
            self.tls_settings.context()
        for listener in self.listeners:
            family = socket.AF_INET6 if ":" in listener.host else socket.AF_INET
            socket.create_server((listener.host, listener.port), family=family).close()

    async def _listen(self) -> None:
        """Open the sockets of all listeners."""
        self.listeners = await self.listen_on_all(self.listeners)

    async def listen_on(self, listener: Listener) -> Listener:
        """Open the socket of a listener, and return the listener with its port.

        Raises:
            OSError: the address is not available.
        """
        sockets: ListeningSockets
        # In a cluster, clients wait until the topics and the users are known.
        start_serving = self._cluster is None
        if listener.uses_tls:
            sockets = TlsListening(self, listener, start_serving=start_serving)
        else:
            sockets = await self.loop.create_server(
                partial(ClientSocket, self, listener),
                listener.host,
                listener.port,
                backlog=512,
                start_serving=start_serving,
            )
        port = sockets.sockets[0].getsockname()[1]
        self._listening[listener.host, port] = sockets
        return attrs.evolve(listener, port=port)

    async def listen_on_all(self, listeners: Iterable[Listener]) -> list[Listener]:
        """Open the sockets of several listeners; see listen_on().

        If one address is not available, none of them remains open.
        """
        new_listeners: list[Listener] = []
        try:
            for listener in listeners:
                new_listeners.append(await self.listen_on(listener))
        except BaseException:
            await self._close_sockets(
                [(listener.host, listener.port) for listener in new_listeners]
            )
            raise
        return new_listeners

    async def _close_sockets(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Close the sockets that listen on these addresses, but no connection.

        asyncio makes the transport of an accepted connection one iteration of the event
        loop later. If the socket of the listener is closed by then, asyncio leaves the
        connection open, without an owner. So the sockets accept nothing during the last
        iteration.
        """
        closing = [self._listening.pop(address) for address in addresses]
        for sockets in closing:
            for sock in sockets.sockets:
                self.loop.remove_reader(sock)
        try:
            await asyncio.sleep(0)
        finally:
            for sockets in closing:
                sockets.close()

    async def close_node(self, node: AdvertisedNode) -> None:
        """Close the sockets of a node, and its connections."""
        await self._close_sockets(
            [(listener.host, listener.port) for listener in node.listeners]
        )
        topology = self.broker.state.topology
        for client in list(self._connections.clients):
            session = client.session
            if session is None or topology.node_of(session) == node.node_id:
                client.abort()

    async def forget_nodes(self) -> None:
        """Advertise this broker alone again.

        Raises:
            OSError: the port of a stopped node is not available.
        """
        if self.nodes is None:
            return
        first, *other_nodes = self.nodes.all.values()
        for node in other_nodes:
            if node.is_running:
                await self.close_node(node)
        if not first.is_running:
            await self.listen_on_all(first.listeners)
        self.nodes = None
        self.broker.advertise(None)

    async def _close_listeners(self) -> None:
        await self._close_sockets(list(self._listening))

    @property
    def files(self) -> FS:
        """The files that the server uses."""
        return self._fs

    @property
    def port(self) -> int:
        """The port of the first listener."""
        return self.listeners[0].port

    def reload_certificates(self) -> None:
        """Read the TLS certificate and its key again, for new connections.

        Raises:
            InvalidConfigError: the files are unusable. The former ones remain in use.
        """
        if self.tls_settings is not None:
            self.tls_settings.load_into(self.tls_context)
            _log.info("the TLS certificate was renewed from %s", self.tls_settings.cert)

    def use_release(self, release: KafkaRelease | None) -> None:
        """Serve the API versions of a release of Kafka, or all versions."""
        self.release = release
        self.broker.state.release = release

    def use_settings(self, changes: Mapping[str, Any]) -> None:
        """Change settings of reloading.LIVE, for new connections and requests."""
        self.settings = attrs.evolve(self.settings, **changes)
        self.broker.state.settings = self.settings

    def record(self, recorder: TrafficRecorder | None) -> None:
        """Record the traffic of all connections from now on; None ends it.

        stop() closes the recorder. record() does not.

        Raises:
            ResourceError: another recording is in progress.
        """
        if recorder is not None and self.recorder is not None:
            raise logcore.ResourceError(
                "the traffic is already recorded",
                expected="one recording at a time",
                found=self.recorder.path,
            )
        self.recorder = recorder
        for client in self._connections.clients:
            if client.is_open:
                client.record(recorder)

    # -- stored users, rules and quotas ------------------------------------------------

    def _new_security(self) -> Security:
        security = Security(
            self._security_settings,
            open_store=self._open_store,
            random=self._fs.random_bytes,
            wall_ms=self._clock.now_ms,
        )
        self._loader = SecurityLoader(
            security, self.listeners, self._has_quotas, self._prepare_security
        )
        return security

    def _open_store(self) -> SecurityStore:
        if self._cluster is None:
            return SecurityStore(self.path, self._fs)
        return self._cluster.security_store()

    def _has_quotas(self) -> bool:
        if self._cluster is None:
            return self._fs.exists(registry_path(self.logdir.path))
        return self._cluster.security_store().has_quotas

    def _prepare_security(self) -> None:
        if self._brokers is not None and self._brokers.listener.uses_sasl:
            self.security.store().ensure_broker_login()

    def _read_security(self) -> SecuritySnapshot | None:
        return self._loader.read(self._clock.monotonic_ms())

    async def _load_security(self) -> None:
        """Use the stored users and rules, and warn of settings that are probably wrong."""
        snapshot = await self.loop.run_in_executor(self._pool, self._read_security)
        if snapshot is not None:
            self.security.publish(snapshot)
        cluster = self._cluster_settings
        location = self.path if cluster is None else cluster.registry
        self._loader.warn(f"netshim user add {location} NAME")

    def _open(self) -> LogDir:
        if self._cluster_settings is not None:
            return self._open_in_cluster(self._cluster_settings)
        return logcore.open_dir(
            self.path,
            create=True,
            durability=self._durability,
            config={**TOPIC_DEFAULTS, **(self._config or {})},
            maintenance=MaintenanceConfig(
                compaction_backoff_ms=self.settings.cleaner_backoff_ms
            ),
            shared=self._shared,
            fs=self._fs,
        )

    def _open_in_cluster(self, cluster: ClusterSettings) -> LogDir:
        from netshim.cluster.node import ClusterNode

        assert self._brokers is not None
        self._brokers.check(self._security_settings)
        self._cluster = ClusterNode(
            cluster,
            self._brokers,
            self.settings,
            self.path,
            self._fs,
            durability=self._durability,
            config={**TOPIC_DEFAULTS, **(self._config or {})},
            new_id=self._new_id,
            broker_login=lambda: self.security.snapshot.brokers,
            call_in_loop=self._call_in_loop,
            loop_iterations=lambda: self.loop_iterations,
            on_failure=self._fail,
        )
        try:
            return self._cluster.open()
        except BaseException:
            self._cluster.close()
            raise

    def _call_in_loop(self, step: Callable[[], None]) -> None:
        # After the end of the loop there is nothing to do.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(
                self.run_step, "a change of the cluster", step
            )

    def _fail(self, error: logcore.LogcoreError) -> None:
        """Report that the broker must end. Any thread may call this."""

        def fail() -> None:
            if self.failure is None:
                self.failure = error
                _log.error("a log has failed, so this broker ends: %s", error)
                self.failed.set()

        self._call_in_loop(fail)

    def _register(self) -> None:
        """Write the address of this broker to the registry.

        Raises:
            NodeExistsError: another broker serves the directory.
        """
        registry = self.logdir.host.coordinators.registry(self.logdir)
        host, port = self.listeners[0].address
        register_broker(
            registry, self.logdir.node_id, host, port, timestamp_ms=self._clock.now_ms()
        )

    def _read_ids(self) -> None:
        """Read the ids of all topics from files of their partitions.

        Without this, a later request would block on the disk.
        """
        for topic in self.logdir.topics():
            # A client that requests the topic gets the error.
            with contextlib.suppress(logcore.LogcoreError, OSError):
                self.logdir.topic_id(topic)

    def _recover(self) -> None:
        """Recover all logs after a crash, before clients connect.

        Without this, a request would wait for the recovery. Logs above the limit of
        open logs are closed again, because no client could connect without a free
        descriptor. In a cluster, replicas use all logs.
        """
        max_logs = self._connections.max_open_logs()
        if self._cluster is not None:
            max_logs = sys.maxsize
        open_count = 0
        for topic in self.logdir.topics():
            for number in self.logdir.partitions(topic):
                # A client that requests the partition gets the error.
                with contextlib.suppress(logcore.LogcoreError):
                    log = self.logdir.partition(topic, number)
                    if open_count < max_logs:
                        open_count += 1
                    else:
                        log.close()

    @property
    def bootstrap_servers(self) -> str:
        """Return the address for clients of the first listener: "127.0.0.1:53211".

        If the broker advertises several nodes, the addresses of the running ones.
        """
        if self.nodes is None:
            return _client_address(self.listeners[0])
        return ",".join(
            _client_address(node.listeners[0]) for node in self.nodes.running
        )

    async def stop(self, drain_s: float = _DRAIN_S) -> None:
        """Answer pending requests for at most drain_s seconds, then close everything.

        Raises:
            LogcoreError: the directory could not be closed cleanly.
        """
        if self._timer is None:
            return
        while self.is_replacing:  # it would open the directory again
            await asyncio.sleep(0.005)
        if self._cluster is not None and self.failure is None:
            await self.loop.run_in_executor(None, self._cluster.leave)
        # Step 1: accept no more work, and answer the requests that wait.
        self._timer.cancel()
        self._timer = None
        await self._close_listeners()
        self.broker.stop(self.now_ms())
        for client in list(self._connections.clients):
            client.drain()
        # Step 2: wait until the responses are sent.
        began_s = self.loop.time()
        self._deadline = began_s + drain_s
        count = unanswered = self._unanswered()
        while unanswered and self.loop.time() < self._deadline:
            await asyncio.sleep(0.005)
            unanswered = self._unanswered()
        if count:
            _log.info(
                "drained in %.1f s: %d connections were answered, %d were given up",
                self.loop.time() - began_s,
                count - unanswered,
                unanswered,
            )
        # Step 3: close the connections, the threads and the directory.
        for client in list(self._connections.clients):
            client.close()
        await asyncio.sleep(0)
        linger_until_s = self.loop.time() + _LINGER_S
        while self._connections.clients and self.loop.time() < self._deadline:
            has_unread = any(client.has_unread for client in self._connections.clients)
            if not has_unread and self.loop.time() >= linger_until_s:
                break
            await asyncio.sleep(0.005)
        for client in list(self._connections.clients):
            client.abort()
        if self._ticking is not None:
            with contextlib.suppress(Exception):
                await self._ticking
        if self._cluster is not None:
            await self.loop.run_in_executor(None, self._cluster.close)
        for step in (
            self._logins.shutdown,
            self._workers.shutdown,
            self._pool.shutdown,
            self.security.close,
            self.logdir.close,
            self._close_recorder,
        ):
            try:
                closing = self.loop.run_in_executor(None, step)
            except RuntimeError:
                # The interpreter is shutting down and starts no thread.
                step()
            else:
                await closing
        for snapshot in self._snapshots:
            snapshot.delete()
        _log.info("stopped")

    def _close_recorder(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def _unanswered(self) -> int:
        """Return the number of connections with requests that are not answered yet."""
        return sum(client.has_unanswered for client in self._connections.clients)

    def _end_at_once(self) -> None:
        """Close the server because its threads accept no work.

        The interpreter is shutting down while it waits for the thread of this event
        loop.
        """
        if self._timer is None:
            return
        _log.error(
            "the interpreter is shutting down: the broker ends, with all its connections"
        )
        self._timer.cancel()
        self._timer = None
        for sockets in self._listening.values():
            sockets.close()
        self._listening.clear()
        for client in list(self._connections.clients):
            client.abort()
        self._logins.shutdown()
        self._workers.shutdown()
        self._pool.shutdown()
        try:
            self.logdir.close()
        except (logcore.LogcoreError, OSError):
            _log.exception("%s could not be closed", self.logdir.path)

    # -- snapshots ---------------------------------------------------------------------

    async def snapshot(self) -> DirectorySnapshot:
        """Return a snapshot of the directory, for rollback().

        Clients notice it like a restart of the broker without an end of their
        connections: requests that wait for records or members are answered, and groups
        and transactions are loaded again. The copy is removed by stop().

        Raises:
            InvalidConfigError: the broker has a shared or simulated directory, or is one
                of a cluster.
            ResourceError: the broker starts, stops, or makes or restores a snapshot.
            LogcoreError, OSError: the directory cannot be copied or opened.
        """
        roots = [self.path, registry_path(self.path)]
        snapshot = await self._replace_broker(lambda: DirectorySnapshot(roots))
        self._snapshots.append(snapshot)
        return snapshot

    async def rollback(self, snapshot: DirectorySnapshot) -> None:
        """Restore the directory from a snapshot, while clients remain connected.

        The leader epoch of each partition that is changed rises, so that clients notice
        that records are missing. Fault rules, remembered requests, advertised nodes and
        the release are dropped. Logs and LogDir objects from before are closed.

        Raises:
            LogNotFoundError: the snapshot was made by another broker.
        """
        if snapshot not in self._snapshots:
            raise logcore.LogNotFoundError(
                "not a snapshot of this broker", path=self.path
            )
        before = ReplacedBroker.of(self.broker)
        await self._replace_broker(
            snapshot.restore,
            lambda changed: before.continue_with(self.broker, changed, self.now_ms()),
        )
        # Not before: a rollback that is refused changes nothing.
        self.use_release(None)
        await self.forget_nodes()

    async def _replace_broker(
        self, change: Callable[[], _T], begin: Callable[[_T], None] | None = None
    ) -> _T:
        """Close the directory, change it, and serve it by a new broker.

        Returns the result of change(), after begin() was called with it.
        """
        if self._shared or self._cluster is not None or not isinstance(self._fs, OsFS):
            raise logcore.InvalidConfigError(
                "snapshots",
                expected="a broker alone over a directory of real files",
                found="a cluster, a shared directory or a simulated disk",
            )
        if self._timer is None or self.is_replacing:
            raise logcore.ResourceError(
                "no snapshot is made or restored now",
                expected="a broker that runs, and one such call at a time",
                found="another call" if self.is_replacing else "a stopped broker",
            )
        self.is_replacing = True
        try:
            # Step 1: take no requests, and answer those that wait.
            for client in self._connections.clients:
                client.pause()
            self.broker.stop(self.now_ms())
            deadline_s = self.loop.time() + _DRAIN_S
            while self._unanswered() and self.loop.time() < deadline_s:
                await asyncio.sleep(0.0005)
            for client in list(self._connections.clients):
                if client.has_unanswered:
                    client.abort()
            if self._ticking is not None:
                await asyncio.wait([self._ticking])
            while self._outstanding:  # its results may submit more work
                await asyncio.sleep(0.0005)
            # Step 2: change the closed directory.
            result = await self.loop.run_in_executor(None, self._change_closed, change)
            # Step 3: serve it to the same connections.
            self.broker = self._new_broker()
            if begin is not None:
                begin(result)
        except BaseException as error:
            # The directory is closed, so no request can be answered.
            self.failure = logcore.LogcoreError(f"the broker cannot continue: {error}")
            self.failed.set()
            raise
        finally:
            self.is_replacing = False
        for client in list(self._connections.clients):
            client.resume()
        return result

    def _change_closed(self, change: Callable[[], _T]) -> _T:
        """Close the directory, change it, and open it again. Blocks."""
        self.security.close()
        self.logdir.close()
        try:
            return change()
        finally:
            self.logdir = self._open()
            self.security = self._new_security()
            snapshot = self._read_security()
            if snapshot is not None:
                self.security.publish(snapshot)
            self._read_ids()

    def stop_draining(self) -> None:
        """End the wait of a running stop() for its clients."""
        self._deadline = 0.0

    # -- time --------------------------------------------------------------------------

    def now_ms(self) -> int:
        """Return the wall clock at the start, plus the monotonic time since then.

        A later correction of the wall clock does not change it, so it ends no session
        and no wait.
        """
        return self._epoch_ms + self._clock.monotonic_ms()

    async def advance(self, skip: Callable[[int], None], skipped_ms: int) -> None:
        """Let the clock of this server skip time, and run what becomes due, in order.

        `skip` moves the clock. Connections do not count the skipped time. Returns when
        no work is running.
        """
        remaining_ms = skipped_ms
        min_step_ms = max(1, skipped_ms // _MAX_STEPS)
        while remaining_ms > 0:
            step_ms = remaining_ms
            if self.broker.next_ms is not None:
                due_ms = self.broker.next_ms - self.now_ms()
                step_ms = min(remaining_ms, max(due_ms, min_step_ms))
            skip(step_ms)
            for client in self._connections.clients:
                client.skip(step_ms)
            remaining_ms -= step_ms
            await self.tick()
            while self._outstanding:
                await asyncio.sleep(0.0005)

    async def tick(self) -> None:
        """Run the work that is due now, including the directory's part of it.

        The server runs the same work many times a second. A test that advances a clock
        manually calls this after each change.
        """
        if self._ticking is not None:
            await asyncio.wait([self._ticking])
        self._run_due_work()
        if self._ticking is not None:
            await asyncio.wait([self._ticking])

    def _tick(self) -> None:
        if self._timer is None:
            return
        self.loop_iterations += 1
        self._last_iteration_s = time.monotonic()
        if self.is_replacing:
            self._timer = self.loop.call_later(_TICK_S, self._tick)
            return
        if self.loop.time() >= self._due_work_s:
            self._due_work_s = self.loop.time() + _TICK_S
            self._run_due_work()
        else:
            self._tick_broker()
        self._tick_later()

    def _tick_later(self) -> None:
        if self._timer is None:  # the server has stopped
            return
        next_ms = self.broker.next_ms
        request_count = self.broker.request_count
        fetches = self.broker.state.fetches
        is_idle = request_count == self._last_request_count and (
            not fetches.by_key or not fetches.has_other_writers
        )
        self._last_request_count = request_count
        delay_s = _IDLE_TICK_S if is_idle else _TICK_S
        if next_ms is not None:
            delay_s = min(delay_s, max(0.001, (next_ms - self.now_ms()) / 1000))
        self._timer = self.loop.call_later(delay_s, self._tick)

    def _tick_broker(self) -> None:
        """Run the broker's timers, which may be due more often than the other work."""
        try:
            self.run_step("timers", lambda: self.broker.tick(self.now_ms()))
        except Exception:
            self.log(
                logging.ERROR, "tick", "an internal error in a due task", error=True
            )

    def _run_due_work(self) -> None:
        self._tick_broker()
        now_ms = self.now_ms()
        try:
            for connection, reason in self.budget.select_slow_connections(
                now_ms, self.settings.request_timeout_ms
            ).items():
                connection.fail(reason)
            for client in self._connections.next_checked():
                client.check(now_ms)
            self._loader.refresh(
                self.broker.state, self._clock.monotonic_ms(), self.log
            )
            if self._ticking is None or self._ticking.done():
                self._ticking = self._begin_tick()
        except Exception:
            self.log(
                logging.ERROR, "tick", "an internal error in a due task", error=True
            )

    def _begin_tick(self) -> asyncio.Future[Any] | None:
        try:
            return self.loop.run_in_executor(self._pool, self._tick_logdir)
        except RuntimeError:
            self._end_at_once()
            return None

    def _tick_logdir(self) -> None:
        """Run the maintenance of the directory.

        It compares the time with timestamps of records, so it gets the corrected wall
        clock.
        """
        try:
            self.logdir.tick(self._clock.now_ms())
        except logcore.LogcoreError as error:
            self.log(
                logging.ERROR, "log directory", "the log directory's work: %s", error
            )

    # -- the broker's host -------------------------------------------------------------

    def _submit_login(
        self, work: Callable[[], Any], callback: Callable[[Any], None]
    ) -> None:
        self._submit_to(self._logins, work, callback)

    def _submit(self, work: Callable[[], Any], callback: Callable[[Any], None]) -> None:
        self._submit_to(self._workers, work, callback)

    def _submit_to(
        self, workers: Workers, work: Callable[[], Any], callback: Callable[[Any], None]
    ) -> None:
        try:
            workers.submit(work, callback)
        except RuntimeError:
            self._end_at_once()  # no request waits for the result any more
        else:
            self._outstanding += 1

    def _deliver(self, callback: Callable[[Any], None], outcome: Any) -> None:
        """Pass the result of submitted work to the broker."""
        self._outstanding -= 1
        self.broker.state.advance_clock(self.now_ms())
        try:
            self.run_step("the result of work in a thread", partial(callback, outcome))
        except Exception:
            self.log(
                logging.ERROR, "work", "an internal error after some work", error=True
            )

    def _call_later(self, action: Callable[[], None]) -> None:
        self.loop.call_soon(self.run_step, "a chunk of a large request", action)

    def run_step(
        self, name: str, step: Callable[..., object], *arguments: object
    ) -> None:
        """Run a step in the event loop, and log it if it takes long.

        Exceptions are passed on.
        """
        began = time.perf_counter()
        try:
            step(*arguments)
        finally:
            step_s = time.perf_counter() - began
            self._longest_step_s = max(self._longest_step_s, step_s)
            if step_s > _SLOW_STEP_S:
                step_ms = round(step_s * 1000)
                last = self.broker.last_api
                text = "the loop was held for %d ms by %s; the last request was %s"
                self.log(logging.INFO, "the loop was held", text, step_ms, name, last)

    # -- for metrics -------------------------------------------------------------------

    @property
    def stalled_s(self) -> float | None:
        """Seconds since the timer last ran, or None before start() and after stop().

        Any thread may use this.
        """
        if self._timer is None:
            return None
        return time.monotonic() - self._last_iteration_s

    @property
    def is_serving(self) -> bool:
        """Whether clients are served. Any thread may use this."""
        return self._timer is not None

    def pop_longest_step_s(self) -> float:
        """Return the longest step of the event loop since the last call, in seconds."""
        longest_s, self._longest_step_s = self._longest_step_s, 0.0
        return longest_s

    def connections(self) -> Counter[str]:
        """Return the number of connections by the name of their listener."""
        return self._connections.by_listener()

    def clients(self) -> Counter[tuple[str, str, str]]:
        """Return the number of connections by client library, address and user."""
        return self._connections.by_client()

    def _forget_topic(self, name: str) -> None:
        """Remove a topic from the groups.

        LogDir.delete_topic() calls this as LogDir.forget_topic. In the broker's thread,
        it cannot block on the disk. Requests of clients do not use this function,
        because they would block the threads that sync.

        Raises:
            ConsumerStateError: the groups did not remove the topic.
        """
        forgotten: Future[object] = Future()

        def forget() -> None:
            state = self.broker.state
            state.fetches.wake(
                [key for key in state.fetches.awaited_keys() if key[0] == name],
                self.now_ms(),
            )
            state.groups.topics_deleted({name}, self.now_ms(), forgotten.set_result)

        if threading.get_ident() == self._thread_id:
            forget()
            return
        try:
            self.loop.call_soon_threadsafe(forget)
            failure = forgotten.result(_FORGET_S)
        except (RuntimeError, TimeoutError) as error:
            # The broker is stopping, or its disk has stalled.
            raise ConsumerStateError(
                "the groups did not forget a deleted topic", found=repr(name)
            ) from error
        if failure is not None:
            raise ConsumerStateError(
                "the groups could not forget a deleted topic", found=str(failure)
            )

    def _new_id(self) -> str:
        return str(uuid.UUID(bytes=self._fs.random_bytes(16), version=4))

    def log(
        self,
        level: int,
        kind: str,
        text: str,
        *values: object,
        error: bool = False,
        max_lines: int = LINES,
    ) -> None:
        """Log a line that may be frequent, see Journal.

        `error` adds the traceback of the exception that is being handled.
        """
        self.broker.state.journal.log(
            level, kind, self.now_ms(), text, *values, error=error, max_lines=max_lines
        )

    # -- connections -------------------------------------------------------------------

    def admit(self, client: ClientSocket) -> float | None:
        """Register a connection and return None, or return when to close it, in seconds.

        A connection above a quota is held before it is closed, so that its client does
        not reconnect at once.
        """
        reason: str | None = "stopping"
        if self._timer is not None:
            reason = self._connections.refusal(client, self.settings)
        if reason is None:
            self._connections.add(client)
            self.broker.state.logs.close_unused_logs()
            delay_ms = self.security.quotas.connect(client.address, self.now_ms())
            if delay_ms:
                return min(_MAX_CLOSE_DELAY_S, delay_ms / 1000)
            return None
        self.log(
            logging.WARNING,
            "connection refused",
            "connection from %s refused: %s",
            client.address,
            reason,
        )
        return 0

    def dismiss(self, client: ClientSocket) -> None:
        """Remove a connection that admit() has registered."""
        self._connections.remove(client)


def _client_address(listener: Listener) -> str:
    """Return the address of a listener, for clients on this machine."""
    host, port = listener.address
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory, or None if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
