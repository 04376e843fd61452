"""The parts of a broker in a cluster, in the order in which a server needs them.

    node = ClusterNode(settings, ...)
    logdir = node.open()          # the registry, the identity, the directory
    broker = Broker(node.directory, ..., services=node.install)
    node.join(addresses)          # clients may connect
    node.leave()                  # leaders move to other brokers
    node.close()

Methods that block are for another thread than the broker's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, cast

import attrs

import logcore
from logcore import Log, LogcoreError, LogDir
from logcore.config import Durability, LogConfig
from logcore.directory.identity import claim_for_cluster
from logcore.directory.maintenance import MaintenanceConfig
from logcore.errors import InvalidConfigError, RegistryError
from logcore.fs import FS, SharedFS
from logcore.metadata.checkpoint import Key, ensure_directory
from logcore.registry.cluster_address import check_cluster_address
from netshim.cluster.broker_connections import BrokerConnections, BrokerListener
from netshim.cluster.directory import ClusterDirectory
from netshim.cluster.member import ClusterMember, MemberSettings
from netshim.cluster.peer_views import PeerViews
from netshim.cluster.replicas import ClusterReplicas, RoleCallbacks
from netshim.cluster.shards import GroupShards
from netshim.cluster.topology import ClusterTopology
from netshim.cluster.transaction_shards import TransactionPeers, TransactionShards
from netshim.cluster.view import ClusterView
from netshim.follow.connection import SourceConnection
from netshim.security.stored import BrokerLogin, SecurityStore
from netshim.settings import Settings
from netshim.state import BrokerState

_log = logging.getLogger("netshim")

#: Longest time of a controlled shutdown: Kafka's three attempts of five seconds.
_LEAVE_S: Final = 15.0


def _check_registry(settings: object, field: object, address: str) -> None:
    check_cluster_address(address)


@attrs.frozen(kw_only=True)
class ClusterSettings:
    """The settings of one broker for its cluster."""

    #: `zk://HOST:PORT,.../PATH`, or the path of files. All brokers have the same one.
    registry: str = attrs.field(validator=_check_registry)
    #: The number of this broker, which no other broker has.
    node_id: int
    rack: str | None = None
    #: Name of the listener that the other brokers use. None: the first one.
    inter_broker_listener: str | None = None
    #: PEM file of the authorities of the brokers' certificates. None: the file of this
    #: broker's certificate.
    tls_ca: str | None = None


class ClusterNode:
    """See the description of the module.

    `broker_login` returns the password of the brokers, None before it is read.
    """

    directory: ClusterDirectory
    _groups: GroupShards
    _replicas: ClusterReplicas
    _peers: TransactionPeers

    def __init__(
        self,
        place: ClusterSettings,
        brokers: BrokerListener,
        settings: Settings,
        path: str,
        fs: FS,
        *,
        durability: Durability,
        config: Mapping[str, object],
        new_id: Callable[[], str],
        broker_login: Callable[[], BrokerLogin | None],
        call_in_loop: Callable[[Callable[[], None]], object],
        loop_iterations: Callable[[], int],
        on_failure: Callable[[LogcoreError], None],
    ) -> None:
        self._settings = settings
        self._path = path
        self._fs = fs
        self._durability = durability
        self._config = config
        #: Returns the unique part of a new member id.
        self._new_id = new_id
        #: Runs a function in the broker's thread.
        self._call_in_loop = call_in_loop
        #: Called, in any thread, if a log has failed: the broker must end.
        self._on_failure = on_failure
        #: The listener for the other brokers.
        self._brokers = brokers
        #: The id of the directory, by which brokers recognize a lost or copied disk.
        self._disk = ""
        LogConfig.parse(config)
        if settings.replica_lag_time_max_ms <= settings.broker_session_timeout_ms:
            # Otherwise, a new leader could commit records while a former one, whose
            # session has not expired, still returns older committed offsets.
            raise InvalidConfigError(
                "replica_lag_time_max_ms",
                expected="more than broker_session_timeout_ms, "
                f"{settings.broker_session_timeout_ms}",
                found=settings.replica_lag_time_max_ms,
            )
        self.member = ClusterMember(
            cast(SharedFS, fs),
            MemberSettings(
                registry=place.registry,
                node_id=place.node_id,
                rack=place.rack,
                session_timeout_ms=settings.broker_session_timeout_ms,
                defaults=config,
                waits_for_disk=durability.waits,
            ),
            self._on_view,
            loop_iterations,
            PeerViews(place.node_id, self._connect).newer_view,
        )
        self._connections = BrokerConnections(
            brokers, self.member.address_of, broker_login
        )

    def _connect(self, broker: int) -> SourceConnection:
        return self._connections.connect(broker)

    def open(self) -> LogDir:
        """Open the registry and the directory of this broker. Blocks.

        Raises:
            LogcoreError: one of them cannot be opened, or they do not belong together.
        """
        # Step 1: open the registry, which has the id of the cluster.
        cluster_id = self.member.open()
        # Step 2: claim the directory. One of another cluster or node is refused.
        real = self._fs.real_path(self._path)
        ensure_directory(self._fs, real)
        self._disk = claim_for_cluster(
            self._fs, real, cluster_id, self.member.settings.node_id
        )
        # Step 3: open the directory. The view of the cluster places its topics.
        local = logcore.open_dir(
            self._path,
            create=True,
            durability=self._durability,
            config=self._config,
            maintenance=MaintenanceConfig(
                compaction_backoff_ms=self._settings.cleaner_backoff_ms
            ),
            replicated=True,
            fs=self._fs,
        )
        self.directory = ClusterDirectory(
            local,
            self.member,
            self._settings.default_replication_factor,
            self._on_failure,
        )
        return local

    def install(self, state: BrokerState) -> None:
        """Give a broker the leadership, topology and coordinators of the cluster."""
        groups = self._groups = GroupShards(state, self.member, self._new_id)
        transactions = TransactionShards(
            state, self.member, self._connect, self._call_in_loop
        )
        self._peers = transactions.peers
        # The roles below need the coordinators, so these are set first.
        state.groups = groups
        state.transactions = transactions

        def lead(key: Key, log: Log) -> None:
            groups.shards.lead(key)
            transactions.lead(key, log)

        def resign(key: Key) -> None:
            groups.shards.resign(key)
            transactions.resign(key)

        self._replicas = ClusterReplicas(
            state,
            self.directory.local,
            self.member,
            self._connect,
            RoleCallbacks(
                on_lead=lead,
                on_resign=resign,
                on_failure=self._on_failure,
            ),
        )
        # From here on, handlers use the cluster's leaders and topology.
        state.leadership = self._replicas
        state.topology = ClusterTopology(self.member, self.directory)
        state.logs.check_leader = self._replicas.check_leader

    def security_store(self) -> SecurityStore:
        """Return the users, rules and quotas of the cluster. For use after join()."""
        return SecurityStore.of_cluster(lambda: self.member.registry)

    def join(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Register the broker with the addresses of its listeners. Blocks.

        See ClusterMember.join().
        """
        host, port = addresses[self._brokers.listener.name]
        self.member.join(
            host,
            port,
            self._disk,
            was_clean=self.directory.local.host.was_clean,
            endpoints=addresses,
        )
        self._call_in_loop(self._replicas.report_strays)

    def _on_view(self, view: ClusterView) -> None:
        def apply_view() -> None:
            self._groups.apply_view(view)
            self._replicas.apply_view(view)
            self._peers.apply_view(view)

        # Views arrive in a thread of the member.
        self._call_in_loop(apply_view)

    def leave(self) -> None:
        """Let other brokers lead the partitions of this one. Blocks for at most 15 s."""
        try:
            self.member.set_leaving()
        except RegistryError as error:
            _log.warning("the shutdown could not be announced: %s", error)
            return
        deadline_s = time.monotonic() + _LEAVE_S
        # A partition whose other replicas are offline keeps this leader until the end.
        while self._leads_others() and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def _leads_others(self) -> bool:
        """Return whether a partition that this broker leads has another live replica."""
        view, node_id = self.member.view, self.member.settings.node_id
        live = {number for number, node in view.brokers.items() if not node.is_leaving}
        return any(
            stored.state.leader == node_id and live & stored.state.isr.keys()
            for stored in view.states.values()
        )

    def close(self) -> None:
        """End the copying and the session. Blocks."""
        # open() may have failed before the broker was installed.
        if hasattr(self, "_replicas"):
            self._replicas.close()
            self._peers.close()
        self.member.close()
