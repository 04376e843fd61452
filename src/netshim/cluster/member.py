"""This broker in the registry of its cluster: its session, its epoch, its view.

Rules:
- The member has one thread, which reads the registry, renews the session, and is the
  controller if this broker was elected.
- The valid epoch is the one in the broker's own node. If the answer to a create()
  was lost, it is read back; the counter may be higher.
- If the session expires, the member registers again with a new epoch, and repeats that
  until it succeeds. Until then it proposes nothing, and coordinators do not answer.
- While the registry does not answer, the session does not end. The member tries again,
  and the broker continues all work that needs no change of the registry.
- A registry that was emptied or replaced, and has another cluster id, is not joined.
  Otherwise, the broker would delete the topics that the registry lacks.
- A writer publishes the list of its changes after they are written. Readers then read the
  listed nodes, and at intervals all nodes, because a list may be lost.
- The session is renewed only while the event loop runs. If the loop is blocked for the
  session timeout, other brokers or the member itself end the session.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import attrs

from logcore.config import LogConfig
from logcore.directory.topic_file import id_text, new_id
from logcore.errors import (
    CorruptRegistryError,
    InvalidConfigError,
    LogcoreError,
    NodeExistsError,
    NodeNotFoundError,
    RegistryUnavailableError,
    SessionExpiredError,
)
from logcore.fs import SharedFS
from logcore.metadata.checkpoint import Key
from logcore.registry import paths
from logcore.registry.cluster_address import open_cluster_registry
from logcore.registry.protocol import Node, Registry, Watch
from logcore.replication.state import unpack_state
from netshim.cluster import registry_nodes
from netshim.cluster.controller import review_cluster, write_state
from netshim.cluster.registry_nodes import (
    DELETED,
    WHOLE_TOPIC,
    BrokerNode,
    Change,
    PublishedChanges,
)
from netshim.cluster.view import ClusterView, StoredState, TopicOfCluster
from netshim.topology import NO_NODE

_log = logging.getLogger("netshim")

_T = TypeVar("_T")
_K = TypeVar("_K")
#: A node, or the error if it is damaged.
_Read = Node | CorruptRegistryError
#: The number of nodes that are requested together. With files, 500 take 5 ms.
_NODES_AT_ONCE: Final = 500
#: Time after which all topics are read again. A list of changes is lost only if its
#: writer ends, and all topics are read when a broker registers or disappears. So this
#: is only a precaution. With 1,000 partitions and every 30 s, it took 0.6 % of a core
#: of each broker.
_READ_ALL_MS: Final = 300_000
#: Maximum time for one change of the registry.
_LOCK_TIMEOUT_MS: Final = 2_000
#: Interval and total time of the attempts to open a registry that does not answer.
_OPEN_RETRY_S: Final = 0.2
_START_MS: Final = 30_000
#: How often a registry that does not answer is reported.
_WARNING_MS: Final = 60_000


@attrs.frozen(kw_only=True)
class MemberSettings:
    """Settings of one broker of a cluster."""

    #: See logcore.registry.cluster_address.
    registry: str
    node_id: int
    rack: str | None = None
    session_timeout_ms: int = 6_000
    #: Effective settings of topics that do not set them.
    defaults: Mapping[str, object]
    #: Whether the durability policy waits for the disk.
    waits_for_disk: bool = True


class ClusterMember:
    """One broker in the registry. open() and join() begin; close() ends."""

    def __init__(
        self,
        fs: SharedFS,
        settings: MemberSettings,
        on_view: Callable[[ClusterView], None],
        loop_iterations: Callable[[], int],
        newer_view: Callable[[ClusterView], ClusterView] = lambda view: view,
    ) -> None:
        self._fs = fs
        self.settings = settings
        #: Called with each new view, in the thread of the member.
        self._on_view = on_view
        #: Returns a number that changes while the event loop runs.
        self._loop_iterations = loop_iterations
        #: Adds the reports of other brokers to a view. Called while the registry does
        #: not answer.
        self._newer_view = newer_view
        self._last_iteration = -1
        self._renewed_ms = 0
        #: The latest view. Other threads may read it.
        self.view = ClusterView()
        self._changed = threading.Condition()  # guards the view for wait_for()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._registry: Registry | None = None
        self._is_open = False
        #: The id in the registry, which must not change until the broker ends.
        self._cluster_id = ""
        #: The kind of the error that was reported last, and when.
        self._warned: tuple[type[Exception], int] | None = None
        self._watch: Watch | None = None
        self._node: BrokerNode | None = None
        #: The epoch of the registration; None while there is none.
        self._epoch: int | None = None
        #: Set while this broker is the controller.
        self._controller_epoch: int | None = None
        #: The last view in which the controller found nothing to change.
        self._reviewed_view: ClusterView | None = None
        #: The last change that was read, by the number of its writer.
        self._last_change_numbers: dict[int, int] = {}
        self._read_all_at_ms = 0
        #: The time before the last reading that succeeded.
        self._read_at_ms = -settings.session_timeout_ms
        self._is_leaving = False
        self._changes_lock = threading.Lock()
        self._unpublished_changes: list[
            Change
        ] = []  # changes that are not in the registry yet

    # -- life --------------------------------------------------------------------------

    def open(self) -> str:
        """Return the cluster's id, and create the registry if it does not exist.

        Raises:
            LogcoreError: the registry cannot be opened.
        """
        # Of several brokers that start a new cluster, one sets the id.
        new_value = paths.pack_cluster_id(id_text(new_id(self._fs)))

        def read_id() -> str:
            # This session would expire while logs are recovered, so join() opens another.
            with contextlib.closing(self._open()) as registry:
                node = registry.update(
                    paths.CLUSTER_ID, lambda value: value or new_value
                )
            assert node is not None
            return paths.unpack_cluster_id(node.value)

        self._cluster_id = self._retry_at_start(read_id)
        return self._cluster_id

    def _open(self) -> Registry:
        return open_cluster_registry(
            self.settings.registry,
            session_timeout_ms=self.settings.session_timeout_ms,
            lock_timeout_ms=_LOCK_TIMEOUT_MS,
            fs=self._fs,
        )

    def _retry_at_start(self, step: Callable[[], _T]) -> _T:
        """Repeat a step while the registry does not answer, for at most 30 s."""
        deadline_ms = self._fs.monotonic_ms() + _START_MS
        while True:
            try:
                return step()
            except RegistryUnavailableError as error:
                remaining_ms = deadline_ms - self._fs.monotonic_ms()
                if remaining_ms <= 0 or self._is_closing.is_set():
                    raise RegistryUnavailableError(
                        f"the registry {self.settings.registry} does not answer: {error}"
                    ) from error
                self._warn(error)
                self._is_closing.wait(_OPEN_RETRY_S)

    def join(
        self,
        host: str,
        port: int,
        disk: str,
        *,
        was_clean: bool,
        endpoints: Mapping[str, tuple[str, int]] | None = None,
    ) -> None:
        """Register the broker, read the first view, and start the thread.

        Raises:
            NodeExistsError: another broker has this node id.
            InvalidConfigError: another broker has a copy of this directory.
            RegistryError: the registry does not answer.
        """
        self._node = BrokerNode(
            0,
            disk,
            host,
            port,
            self.settings.rack,
            was_clean=was_clean,
            endpoints=dict(endpoints or {}),
        )

        def begin() -> None:
            if not self._is_open:
                self._begin_session()
            try:
                self._await_registration()
                self._refresh()
            except SessionExpiredError as error:
                self._give_up_session(error)
                raise RegistryUnavailableError(
                    "the session ended during the registration"
                ) from error

        self._retry_at_start(begin)
        self._thread = threading.Thread(
            target=self._run, name="netshim-cluster", daemon=True
        )
        self._thread.start()

    def _begin_session(self) -> None:
        self._registry = self._open()
        self._is_open = True
        timeout_ms = self._registry.session.timeout_ms
        if timeout_ms != self.settings.session_timeout_ms:
            _log.warning(
                "the servers of the registry change the session timeout from %d ms to "
                "%d ms: a broker that fails is replaced after that time",
                self.settings.session_timeout_ms,
                timeout_ms,
            )

    def _await_registration(self) -> None:
        """Register, and wait until a former session of this broker has ended."""
        timeout_ms = self.registry.session.timeout_ms
        deadline_ms = self._fs.monotonic_ms() + timeout_ms + 1_000
        while True:
            try:
                self._register()
                return
            except NodeExistsError:
                # The node may belong to a former session of this broker, which another
                # broker must end.
                if self._fs.monotonic_ms() > deadline_ms:
                    raise
                self.registry.poll()
                self._end_stuck_sessions()
                self._is_closing.wait(_OPEN_RETRY_S)

    def _register(self) -> None:
        registry = self.registry
        number = self.settings.node_id
        assert self._node is not None
        self._check_cluster_id()
        # Each registration has a higher epoch, so requests of an earlier one are
        # refused.
        counter = registry.update(registry_nodes.broker_epoch(number), _next)
        assert counter is not None
        epoch = paths.unpack_number(counter.value, registry_nodes.broker_epoch(number))
        for other, node in self._read_brokers().items():
            # Two brokers with one disk would count as two replicas.
            if other != number and node.disk == self._node.disk:
                raise InvalidConfigError(
                    f"broker {other} has a directory with the same directory.id: one of "
                    "the two is a copy; remove meta.properties from the copy",
                    expected="a directory for each broker",
                    found=self._node.disk,
                )
        node = attrs.evolve(self._node, epoch=epoch, is_leaving=self._is_leaving)
        path = paths.broker(number)
        try:
            registry.create(path, registry_nodes.pack_broker(node), ephemeral=True)
        except NodeExistsError:
            registered = registry.get(path)
            # The number belongs to the session of a broker that is alive, or was just
            # killed.
            if registered.session != registry.session.id:
                live_broker = registry_nodes.unpack_broker(registered.value, path)
                raise NodeExistsError(
                    f"another broker has the number {number}; give this broker another "
                    "number, or stop the other broker",
                    path=path,
                    found=f"a broker at {live_broker.host}:{live_broker.port}",
                ) from None
            # The answer to an earlier create() was lost.
            epoch = registry_nodes.unpack_broker(registered.value, path).epoch
        self._epoch = epoch
        self._controller_epoch = None
        self._read_all_at_ms = 0
        _log.info("broker %d registered with epoch %d", number, epoch)

    def _check_cluster_id(self) -> None:
        """Raise InvalidConfigError if the registry belongs to another cluster."""
        registry_id = "none"
        with contextlib.suppress(NodeNotFoundError):
            registry_id = paths.unpack_cluster_id(
                self.registry.get(paths.CLUSTER_ID).value
            )
        # The logs of this broker belong to the topics of its former cluster.
        if registry_id != self._cluster_id:
            raise InvalidConfigError(
                f"the registry {self.settings.registry} was emptied, or replaced by that "
                "of another cluster: restore it, or start the brokers again",
                path=paths.CLUSTER_ID,
                expected=self._cluster_id,
                found=registry_id,
            )

    def set_leaving(self) -> None:
        """Announce the shutdown of this broker: the controller moves its leaders."""

        def change(value: bytes | None) -> bytes | None:
            if value is None:
                return None
            node = registry_nodes.unpack_broker(value, path)
            return registry_nodes.pack_broker(attrs.evolve(node, is_leaving=True))

        path = paths.broker(self.settings.node_id)
        self._is_leaving = True
        self.registry.update(path, change)
        # A controller that leaves would not move its own leaders.
        with contextlib.suppress(NodeNotFoundError):
            if self._is_controller():
                self.registry.delete(paths.CONTROLLER)
        self.publish_changes([])

    def _is_controller(self) -> bool:
        """Return whether this session is the controller. Raises NodeNotFoundError."""
        owner = self.registry.get(paths.CONTROLLER).session
        return owner == self.registry.session.id

    def close(self) -> None:
        """End the session. The broker's node disappears."""
        self._is_closing.set()
        with self._changed:
            # A wait_for() ends now, because no further view follows.
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._watch is not None:
            self._watch.close()
        if self._registry is not None:
            with contextlib.suppress(LogcoreError):
                self._registry.close()

    # -- for other threads -------------------------------------------------------------

    @property
    def registry(self) -> Registry:
        assert self._registry is not None
        return self._registry

    @property
    def epoch(self) -> int | None:
        """The epoch of this registration, None while there is none."""
        return self._epoch

    @property
    def has_lease(self) -> bool:
        """Whether no other broker may have taken over the coordinators of this one.

        The session is alive, and the states were read within the session timeout. A live
        session alone is not enough, because a leader can move while it lives.
        Coordinators check it before each answer. Costs two system calls.
        """
        age_ms = self._fs.monotonic_ms() - self._read_at_ms
        if self._epoch is None or age_ms >= self.settings.session_timeout_ms:
            return False
        try:
            return self.registry.session.has_lease
        except LogcoreError:
            return False

    def address_of(self, broker: int) -> tuple[str, int] | None:
        """Return the host and port of a broker, None while it is not registered."""
        node = self.view.brokers.get(broker)
        return None if node is None else (node.host, node.port)

    def read_racks(self) -> dict[int, str | None]:
        """Return the rack of each broker that has ever registered.

        Read from the registry, because a view may lack a broker that has just joined.
        """
        # A broker that is stopped can still get replicas.
        numbers = registry_nodes.broker_numbers(
            self.registry.children(registry_nodes.EPOCHS)
        )
        racks: dict[int, str | None] = dict.fromkeys(numbers)
        return racks | {n: node.rack for n, node in self._read_brokers().items()}

    def wait_for(
        self, condition: Callable[[ClusterView], bool], timeout_s: float
    ) -> bool:
        """Wait for a view that meets a condition.

        Returns False after the timeout, and when the member is closed: it then gets no
        more views.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: condition(self.view) or self._is_closing.is_set(), timeout_s
            )
            return condition(self.view)

    def propose(self, key: Key, stored: StoredState) -> int:
        """Write the state that a leader proposes, and return the version.

        Raises:
            BadVersionError, NodeNotFoundError: another broker has changed the state.
            SessionExpiredError: the session is over.
            RegistryError: the outcome is unknown.
        """
        version = write_state(self.registry, stored)
        self.publish_changes([key])
        return version

    def publish_changes(self, changes: list[Change]) -> None:
        """Report changes of topics and states to the other brokers, and to this one.

        The write alone makes every broker read the registered brokers again. If it fails,
        the changes are published with the next ones.
        """
        path = registry_nodes.changes_of(self.settings.node_id)
        unpublished: list[Change] = []

        def add(value: bytes | None) -> bytes:
            published = PublishedChanges()
            if value is not None:
                published = registry_nodes.unpack_changes(value, path)
            return registry_nodes.pack_changes(published.with_changes(unpublished))

        with self._changes_lock:
            # A write that fails leaves them for the next call.
            self._unpublished_changes += changes
            unpublished = self._unpublished_changes
            self.registry.update(path, add)
            self._unpublished_changes = []

    # -- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = min(1.0, self.settings.session_timeout_ms / 6_000)
        has_changed = True
        while not self._is_closing.is_set():
            try:
                is_due = self._is_refresh_due(has_changed)
                has_changed = True  # until this pass is complete
                if self._epoch is None and not self._reregister():
                    self._is_closing.wait(_OPEN_RETRY_S)
                    continue
                self._renew()
                if self._unpublished_changes:
                    self.publish_changes([])
                # More often than a refresh: a session counts as stuck only if it is
                # checked several times within its timeout.
                self._end_stuck_sessions()
                if is_due:
                    self._refresh()
                self._control()
                if self._warned is not None:
                    self._warned = None
                    _log.info("the registry of the cluster answers again")
                has_changed = self._wait(pause_s)
            except SessionExpiredError as error:
                self._give_up_session(error)
            except (LogcoreError, OSError) as error:
                self._warn(error)
                self._read_peers()
                self._is_closing.wait(pause_s)
            except Exception:
                _log.exception("an internal error in the thread of the cluster")
                self._is_closing.wait(pause_s)

    def _warn(self, error: Exception) -> None:
        """Report an error of the registry, once a minute if it is of the same kind."""
        now_ms = self._fs.monotonic_ms()
        error_type, warned_ms = self._warned or (None, 0)
        if error_type is not type(error) or now_ms - warned_ms >= _WARNING_MS:
            self._warned = type(error), now_ms
            _log.warning(
                "the registry of the cluster, %s: %s", self.settings.registry, error
            )

    def _read_peers(self) -> None:
        """Publish leaders that other brokers report, once the lease is over."""
        if self._epoch is None or self.has_lease:
            return
        view = self._newer_view(self.view)
        if view is not self.view:
            self._read_all_at_ms = 0
            self._publish(view)

    def _is_refresh_due(self, has_changed: bool) -> bool:
        """Return whether to read the registry.

        Without a report of the watch, it is read three times in a session timeout,
        because the report may be lost, and because the lease ends otherwise.
        """
        age_ms = self._fs.monotonic_ms() - self._read_at_ms
        return has_changed or age_ms >= self.settings.session_timeout_ms // 3

    def _wait(self, pause_s: float) -> bool:
        """Wait until the registry may have changed, and return whether it may."""
        if self._watch is None:
            writers = {*self.view.known_brokers, self.settings.node_id}
            self._watch = self.registry.watch(
                [paths.CONTROLLER, *map(registry_nodes.changes_of, sorted(writers))],
                children=[paths.BROKERS, registry_nodes.DELETIONS],
            )
            return True
        return self._watch.wait(pause_s)

    def _renew(self) -> None:
        """Renew the session if the event loop has run since the last call.

        Raises:
            SessionExpiredError: the session is over, or the loop is blocked.
        """
        iteration = self._loop_iterations()
        now_ms = self._fs.monotonic_ms()
        # A broker whose loop is blocked serves no client, so another one must lead.
        if iteration != self._last_iteration:
            self.registry.poll()
            self._last_iteration = iteration
            self._renewed_ms = now_ms
        elif now_ms - self._renewed_ms > self.settings.session_timeout_ms:
            raise SessionExpiredError(
                "the event loop is blocked",
                expected=f"less than {self.settings.session_timeout_ms} ms",
                found=f"{now_ms - self._renewed_ms} ms",
            )

    def _renew_if_due(self) -> None:
        """Renew the session during long work, such as the creation of many states."""
        age_ms = self._fs.monotonic_ms() - self._renewed_ms
        if age_ms >= self.settings.session_timeout_ms // 3:
            self._renew()

    def _end_stuck_sessions(self) -> None:
        for session in self.registry.end_stuck_sessions():
            _log.warning("the session %s is stuck, and is declared over", session)

    def _give_up_session(self, error: SessionExpiredError) -> None:
        """End the current registration. _reregister() begins another one."""
        _log.warning(
            "the session of this broker is over; it registers again: %s", error
        )
        self._epoch = None
        self._controller_epoch = None
        self._publish(self.view)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._is_open = False
        with contextlib.suppress(LogcoreError):
            self.registry.close()

    def _reregister(self) -> bool:
        """Register in a new session; return False while the event loop is blocked.

        Raises:
            LogcoreError: the registry does not answer, or refuses the registration.
        """
        # A broker that is still blocked would lose the next session too.
        if self._loop_iterations() == self._last_iteration:
            return False
        if not self._is_open:
            self._begin_session()
            self._renewed_ms = self._fs.monotonic_ms()
        self.registry.poll()
        self._end_stuck_sessions()
        self._register()
        return True

    def _control(self) -> None:
        """Become the controller if there is none, and do its work."""
        if self._epoch is None or self._is_leaving:
            return
        registry = self.registry
        if self.view.controller == NO_NODE:
            self._controller_epoch = paths.elect(
                registry, self.settings.node_id, self._fs.now_ms()
            )
            if self._controller_epoch is not None:
                _log.info("this broker is the controller of the cluster")
                self._refresh()
        if self.view.controller != self.settings.node_id:
            self._controller_epoch = None
            return
        if self._controller_epoch is None:
            # An earlier election ended before the epoch was raised.
            if self._is_controller():
                registry.delete(paths.CONTROLLER)
            return
        view = self.view
        if view is self._reviewed_view:
            return  # the decisions depend on the view alone
        changes: list[Change] = []
        try:
            for change in review_cluster(
                registry,
                view,
                self._controller_epoch,
                waits_for_disk=self.settings.waits_for_disk,
            ):
                # The id of a deleted topic must be known before the name is used again.
                if change[1] == DELETED:
                    self.publish_changes([change])
                else:
                    # One list contains them all, so that the other brokers read once.
                    changes.append(change)
                self._renew_if_due()
        finally:
            if changes:
                self.publish_changes(changes)
                self._refresh()
        if not changes:
            self._reviewed_view = view

    @property
    def controller_epoch(self) -> int:
        """The epoch of this broker as the controller, or else the stored epoch."""
        if self._controller_epoch is not None:
            return self._controller_epoch
        try:
            value = self.registry.get(paths.CONTROLLER_EPOCH).value
        except NodeNotFoundError:
            return 0
        return paths.unpack_number(value, paths.CONTROLLER_EPOCH)

    # -- reading -----------------------------------------------------------------------

    def _refresh(self) -> None:
        """Read the changes since the last view, and publish a new one."""
        registry = self.registry
        began_ms = self._fs.monotonic_ms()
        registry.sync()
        previous = self.view
        brokers = self._read_brokers()
        own_broker = brokers.get(self.settings.node_id)
        if own_broker is None or own_broker.epoch != self._epoch:
            raise SessionExpiredError(
                "the node of this broker is missing, or belongs to another registration",
                path=paths.broker(self.settings.node_id),
            )
        known_numbers = registry_nodes.broker_numbers(
            registry.children(registry_nodes.EPOCHS)
        )
        deletions = frozenset(
            registry_nodes.topic_names(registry.children(registry_nodes.DELETIONS))
        )
        view = attrs.evolve(
            previous,
            brokers=brokers,
            known_brokers=frozenset(known_numbers),
            controller=self._read_controller(),
            deletions=deletions,
        )
        published = self._read_changes(known_numbers)
        changes, deleted_ids = self._changes_since(published)
        if not deleted_ids <= previous.deleted_ids:
            view = attrs.evolve(view, deleted_ids=previous.deleted_ids | deleted_ids)
        if brokers != previous.brokers:
            # A broker may have ended between a change and its publication.
            changes = None
        now_ms = self._fs.monotonic_ms()
        reads_all = changes is None or now_ms >= self._read_all_at_ms
        if reads_all:
            # Without the previous topics, so that those whose deletion was not
            # published disappear too.
            view = self._with_topics(attrs.evolve(view, topics={}, states={}), None)
        elif changes:
            view = self._with_topics(view, changes)
        # Only now: if a change could not be read, it is read again with the next call.
        self._last_change_numbers = {
            number: changes_of_writer.last
            for number, changes_of_writer in published.items()
        }
        if reads_all:
            self._read_all_at_ms = now_ms + _READ_ALL_MS
        if view.topics != previous.topics:
            view = attrs.evolve(view, topics_version=previous.topics_version + 1)
        if view.known_brokers != previous.known_brokers and self._watch is not None:
            self._watch.close()  # the next one includes the lists of new brokers
            self._watch = None
        if view != previous:
            self._publish(view)
        self._read_at_ms = began_ms

    def _publish(self, view: ClusterView) -> None:
        with self._changed:
            self.view = view
            self._changed.notify_all()
        self._on_view(view)

    def _read_brokers(self) -> dict[int, BrokerNode]:
        numbers = registry_nodes.broker_numbers(self.registry.children(paths.BROKERS))
        read = self._read_nodes({paths.broker(number): number for number in numbers})
        return {
            number: registry_nodes.unpack_broker(
                _intact(node).value, paths.broker(number)
            )
            for number, node in read.items()
        }

    def _read_controller(self) -> int:
        try:
            return paths.unpack_controller(self.registry.get(paths.CONTROLLER).value)
        except NodeNotFoundError:
            return NO_NODE

    def _read_changes(self, writers: list[int]) -> dict[int, PublishedChanges]:
        """Return the published changes of brokers by their numbers."""
        nodes_read = self._read_nodes(
            {registry_nodes.changes_of(number): number for number in writers}
        )
        return {
            number: registry_nodes.unpack_changes(
                _intact(node).value, registry_nodes.changes_of(number)
            )
            for number, node in nodes_read.items()
        }

    def _changes_since(
        self, published: Mapping[int, PublishedChanges]
    ) -> tuple[set[Change] | None, set[str]]:
        """Return the changes since the last refresh, None if some are unknown.

        The second value contains the ids of topics that were deleted, as far as listed.
        """
        changes: set[Change] = set()
        deleted_ids: set[str] = set()
        is_complete = True
        for number, changes_of_writer in published.items():
            deleted_ids |= changes_of_writer.deleted_ids
            unread = changes_of_writer.since(self._last_change_numbers.get(number, 0))
            if unread is None:
                # The writer has dropped changes from its list that this broker did not
                # read yet.
                is_complete = False
            else:
                changes |= {change for change in unread if change[1] != DELETED}
        return changes if is_complete else None, deleted_ids

    def _with_topics(
        self, view: ClusterView, changes: set[Change] | None
    ) -> ClusterView:
        """Return the view with the topics and states read again; None means all."""
        topics, states = dict(view.topics), dict(view.states)
        damaged = set(view.damaged)
        if changes is None:
            # All nodes are read again, and those still damaged are added again.
            damaged.clear()
            elements = self.registry.children(paths.TOPICS)
            changes = {
                (name, WHOLE_TOPIC) for name in registry_nodes.topic_names(elements)
            }
        # Sorted, so that a simulation of the same changes repeats exactly.
        whole_topics = sorted(
            {name for name, number in changes if number == WHOLE_TOPIC}
        )
        keys = {key for key in changes if key[0] not in whole_topics}
        topic_nodes = self._read_nodes(
            {paths.topic(name): name for name in whole_topics}
        )
        configs = self._read_nodes(
            {paths.topic_config(name): name for name in whole_topics}
        )
        for name in whole_topics:
            try:
                topic = self._unpack_topic(
                    name, topic_nodes.get(name), configs.get(name)
                )
            except (CorruptRegistryError, InvalidConfigError) as error:
                # Its replicas are kept, and its partitions have no leader here.
                _log.error("topic %s is offline: %s", name, error)
                topic = None
                damaged.add((name, WHOLE_TOPIC))
            for key in [key for key in states if key[0] == name]:
                # A topic of this name may be another one now, with other partitions.
                del states[key]
            topics.pop(name, None)
            if topic is not None:
                topics[name] = topic
                damaged.discard((name, WHOLE_TOPIC))
                keys |= {(name, number) for number in topic.node.replicas}
        state_paths = {
            registry_nodes.state_path(*key, topics[key[0]].node.topic_id): key
            for key in sorted(keys)
            if key[0] in topics
        }
        state_nodes = self._read_nodes(state_paths)
        for key in keys:
            states.pop(key, None)
            damaged.discard(key)
        missing: set[str] = set()
        for path, key in state_paths.items():
            node = state_nodes.get(key)
            if node is None:
                missing.add(key[0])
                continue
            try:
                states[key] = _unpack_state(node, path)
            except CorruptRegistryError as error:
                _log.error("%s-%d is offline: %s", *key, error)
                damaged.add(key)
        view = attrs.evolve(
            view, topics=topics, states=states, damaged=frozenset(damaged)
        )
        replaced = missing.difference(whole_topics)
        if replaced:
            # These topics were deleted, and may have been created again.
            return self._with_topics(view, {(name, WHOLE_TOPIC) for name in replaced})
        return view

    def _unpack_topic(
        self, name: str, topic_node: _Read | None, config_node: _Read | None
    ) -> TopicOfCluster | None:
        """Return a topic from its node and the node of its settings.

        Raises CorruptRegistryError and InvalidConfigError.
        """
        if topic_node is None:
            return None
        overrides: dict[str, str] = {}
        if config_node is not None:
            path = paths.topic_config(name)
            overrides = paths.unpack_config(_intact(config_node).value, path)
        settings = LogConfig.parse({**self.settings.defaults, **overrides})
        node = registry_nodes.unpack_topic(_intact(topic_node).value, paths.topic(name))
        return TopicOfCluster(node, overrides, settings)

    def _read_nodes(self, key_by_path: Mapping[str, _K]) -> dict[_K, _Read]:
        """Return the nodes that exist, by the values of `key_by_path`.

        The session is renewed between parts of many nodes.
        """
        nodes_by_key: dict[_K, _Read] = {}
        all_paths = list(key_by_path)
        for first in range(0, len(all_paths), _NODES_AT_ONCE):
            if first:
                self._renew_if_due()
            chunk = self.registry.get_many(all_paths[first : first + _NODES_AT_ONCE])
            nodes_by_key |= {key_by_path[path]: node for path, node in chunk.items()}
        return nodes_by_key


def _intact(read: _Read) -> Node:
    """Return a node, or raise the error of one that is damaged."""
    if isinstance(read, CorruptRegistryError):
        raise read
    return read


def _unpack_state(read: _Read, path: str) -> StoredState:
    node = _intact(read)
    return StoredState(unpack_state(node.value, path), node.version, path)


def _next(value: bytes | None) -> bytes:
    number = 0 if value is None else paths.unpack_number(value, registry_nodes.EPOCHS)
    return paths.pack_number(number + 1)
