"""Members of a cluster in one process: sessions, views, the lease, the controller."""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from logcore import InvalidConfigError
from logcore.config import Durability
from logcore.errors import (
    CorruptRegistryError,
    NodeExistsError,
    RegistryClosedError,
    RegistryUnavailableError,
    StorageReadError,
)
from logcore.fs import OS
from logcore.registry import FileRegistry, paths
from netshim.cluster import member as member_module
from netshim.cluster import registry_nodes
from netshim.cluster.broker_connections import BrokerListener
from netshim.cluster.member import ClusterMember, MemberSettings
from netshim.cluster.node import ClusterNode, ClusterSettings
from netshim.cluster.registry_nodes import WHOLE_TOPIC, TopicNode
from netshim.cluster.view import ClusterView
from netshim.listeners import Listener
from netshim.settings import Settings
from support.clusters import LIMIT_S, until

Join = Callable[..., ClusterMember]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    members: list[ClusterMember] = []

    def begin(
        number: int,
        *,
        disk: str = "",
        timeout_ms: int = 60_000,
        turns: Iterator[int] | None = None,
    ) -> ClusterMember:
        turns = turns or itertools.count()
        member = ClusterMember(
            OS,
            MemberSettings(
                registry=str(tmp_path / "cluster"),
                node_id=number,
                session_timeout_ms=timeout_ms,
                defaults={},
            ),
            lambda view: None,
            lambda: next(turns),
        )
        members.append(member)
        member.open()
        member.join(
            "127.0.0.1", 9000 + number, disk or f"disk-{number}", was_clean=True
        )
        return member

    yield begin
    for member in members:
        member.close()


def create(member: ClusterMember, name: str, *replicas: tuple[int, ...]) -> None:
    node = TopicNode(uuid.uuid4(), dict(enumerate(replicas)))
    member.registry.create(paths.topic(name), registry_nodes.pack_topic(node))
    member.publish_changes([(name, WHOLE_TOPIC)])


def expire(other: ClusterMember, member: ClusterMember) -> None:
    """Let a member end the session of another member."""
    registry = other.registry
    assert isinstance(registry, FileRegistry)
    registry.expire(member.registry.session.id)


def wait(member: ClusterMember, condition: Callable[[ClusterView], bool]) -> None:
    assert member.wait_for(condition, LIMIT_S), member.view


def wait_for_brokers(members: Iterable[ClusterMember], numbers: set[int]) -> None:
    """Wait until the view of each member has these brokers. The controller puts only
    replicas on brokers of its view into the ISR of a new topic.
    """
    for member in members:
        wait(member, lambda view: set(view.brokers) == numbers)


def test_each_view_has_all_brokers_and_one_controller(join: Join) -> None:
    members = [join(number) for number in (1, 2, 3)]
    for member in members:
        wait(member, lambda view: set(view.brokers) == {1, 2, 3})
        wait(member, lambda view: view.controller in (1, 2, 3))
    assert len({member.view.controller for member in members}) == 1
    create(members[2], "t", (2, 3), (3, 1))
    for member in members:
        wait(member, lambda view: view.leader_of(("t", 1)) == 3)
        assert member.view.topics["t"].node.replicas == {0: (2, 3), 1: (3, 1)}


def test_a_member_that_ends_is_replaced(join: Join) -> None:
    first, second, third = (join(number) for number in (1, 2, 3))
    wait_for_brokers((first, second, third), {1, 2, 3})
    create(first, "t", (1, 2, 3))
    wait(second, lambda view: view.leader_of(("t", 0)) == 1)
    first.close()
    for member in (second, third):
        wait(member, lambda view: view.leader_of(("t", 0)) == 2)
        wait(member, lambda view: view.controller in (2, 3))
        assert set(member.view.states["t", 0].state.isr) == {2, 3}


@pytest.mark.long
def test_an_expired_member_registers_again(join: Join) -> None:
    first, second = join(1), join(2)
    before = first.epoch
    assert before is not None
    expire(second, first)
    until(lambda: first.epoch not in (None, before), "a new epoch")
    assert first.epoch == before + 1
    wait(
        second,
        lambda view: 1 in view.brokers and view.brokers[1].epoch == before + 1,
    )
    until(lambda: first.has_lease, "the lease")


def test_a_stopped_member_is_replaced_in_an_idle_cluster(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stopped process still holds the lock of its session, and reports nothing."""
    first, second = join(1, timeout_ms=600), join(2, timeout_ms=600)
    wait_for_brokers((first, second), {1, 2})
    create(first, "t", (2, 1))
    wait(first, lambda view: view.leader_of(("t", 0)) == 2)
    resumed = threading.Event()
    monkeypatch.setattr(second, "_wait", lambda _: resumed.wait())
    try:
        wait(first, lambda view: view.leader_of(("t", 0)) == 1)
        assert set(first.view.brokers) == {1}
    finally:
        resumed.set()


def test_the_session_is_renewed_during_long_work(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The creation of 1,000 states took longer than a session on a busy machine."""
    member = join(1)
    polls: list[int] = []
    poll = member.registry.poll

    def count_poll() -> None:
        polls.append(1)
        poll()

    monkeypatch.setattr(member.registry, "poll", count_poll)
    renewed: list[bool] = []

    def work_for_long(*_: object, **options: object) -> Iterator[tuple[str, int]]:
        for _ in range(3):
            member._renewed_ms -= member.settings.session_timeout_ms
            before = len(polls)
            yield "t", WHOLE_TOPIC
            renewed.append(len(polls) > before)

    monkeypatch.setattr("netshim.cluster.member.review_cluster", work_for_long)

    def is_done() -> bool:
        # The controller may have reviewed its view before the function was replaced.
        member._reviewed_view = None
        member.publish_changes([])
        return len(renewed) >= 3

    until(is_done, "the work is done")
    assert all(renewed[:3])


@pytest.mark.long
def test_a_member_that_cannot_read_loses_its_lease(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of the member is alive, but the leaders of its partitions may have
    moved.
    """
    member = join(1, timeout_ms=900)
    until(lambda: member.has_lease, "the lease")

    def failing() -> dict[int, Any]:
        raise StorageReadError("no answer")

    monkeypatch.setattr(member, "_read_brokers", failing)
    until(lambda: not member.has_lease, "the end of the lease")
    assert member.registry.session.state == "alive"
    monkeypatch.undo()
    until(lambda: member.has_lease, "the lease")


@pytest.mark.long
def test_broker_number_and_directory_are_unique(join: Join) -> None:
    join(1)
    with pytest.raises(NodeExistsError, match=r"has the number 1.*127\.0\.0\.1:9001"):
        join(1, disk="other", timeout_ms=100)
    with pytest.raises(InvalidConfigError, match=r"same directory\.id"):
        join(2, disk="disk-1")


def test_unpublished_change_is_read_when_the_brokers_change(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = join(1), join(2)
    wait(second, lambda view: set(view.brokers) == {1, 2})
    with monkeypatch.context() as patch:
        patch.setattr(first, "publish_changes", lambda changes: None)
        create(first, "t", (1,))
    assert "t" not in second.view.topics
    join(3)  # a change of the brokers makes each member read everything
    wait(second, lambda view: "t" in view.topics)


@pytest.mark.long
def test_change_that_could_not_be_read_is_read_again(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change counts as read only after its topic was read."""
    first, second = join(1), join(2)
    wait(second, lambda view: set(view.brokers) == {1, 2})
    read = second.registry.get_many
    failed: list[str] = []

    def fail_once(paths_to_read: Iterable[str]) -> Any:
        path_list = list(paths_to_read)
        if paths.topic("t") in path_list and not failed:
            failed.append("t")
            raise RegistryUnavailableError("no answer")
        return read(path_list)

    monkeypatch.setattr(second.registry, "get_many", fail_once)
    create(first, "t", (1,))
    wait(second, lambda view: "t" in view.topics)
    assert failed == ["t"]


@pytest.mark.long
def test_number_in_use_is_refused_while_the_event_loop_is_blocked(
    join: Join,
) -> None:
    """The wait for the end of a former session is longer than the session timeout."""
    join(1)
    blocked = itertools.repeat(0)
    with pytest.raises(NodeExistsError, match="another broker has the number 1"):
        join(1, disk="other", timeout_ms=300, turns=blocked)


@pytest.mark.long
def test_stopping_controller_resigns(join: Join) -> None:
    members = {number: join(number) for number in (1, 2)}
    wait_for_brokers(members.values(), {1, 2})
    wait(members[1], lambda view: view.controller in members)
    old = members[1].view.controller
    other = 3 - old
    create(members[1], "t", (old, other))
    wait(members[other], lambda view: view.leader_of(("t", 0)) == old)
    members[old].set_leaving()
    wait(members[other], lambda view: view.controller == other)
    wait(members[other], lambda view: view.leader_of(("t", 0)) == other)


def test_controller_without_an_epoch_resigns(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An election that was interrupted between the node and the epoch must not block
    the next election.
    """
    first = join(1)
    wait(first, lambda view: view.controller == 1)
    first._controller_epoch = None
    until(lambda: first._controller_epoch is not None, "another election")
    create(first, "t", (1,))
    wait(first, lambda view: view.leader_of(("t", 0)) == 1)


@pytest.mark.long
def test_a_damaged_topic_is_offline_and_others_continue(
    join: Join, tmp_path: Path
) -> None:
    first = join(1)
    for name in ("good", "bad"):
        create(first, name, (1,))
    wait(first, lambda view: len(view.states) == 2)
    path = first.view.states["bad", 0].path
    (node,) = (tmp_path / "cluster.registry").rglob("bad/partitions/0/*.node")
    data = node.read_bytes()
    node.write_bytes(data[:100] + bytes(len(data) - 100))
    with pytest.raises(CorruptRegistryError):
        first.registry.get(path)
    first.publish_changes([("bad", 0)])
    wait(first, lambda view: ("bad", 0) in view.damaged)
    assert ("bad", 0) not in first.view.states
    assert ("good", 0) in first.view.states
    node.write_bytes(data)
    first.publish_changes([("bad", 0)])
    wait(first, lambda view: ("bad", 0) in view.states and not view.damaged)


def test_the_lag_time_is_longer_than_the_session(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="broker_session_timeout_ms"):
        ClusterNode(
            ClusterSettings(registry=str(tmp_path / "c"), node_id=1),
            BrokerListener(Listener.parse("PLAINTEXT://127.0.0.1:0"), None, None),
            Settings(broker_session_timeout_ms=6_000, replica_lag_time_max_ms=6_000),
            str(tmp_path / "1"),
            OS,
            durability=Durability.parse("group"),
            config={},
            new_id=str,
            broker_login=lambda: None,
            call_in_loop=lambda step: None,
            loop_iterations=lambda: 0,
            on_failure=lambda error: None,
        )


# -- a registry that does not answer ---------------------------------------------------


class Outage:
    """A registry that does not answer the next calls of an open, or does not answer at
    all.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self.refused = 0
        self._open = member_module.open_cluster_registry
        monkeypatch.setattr(member_module, "open_cluster_registry", self._open_if_up)

    def _open_if_up(self, *given: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            self.refused += 1
            raise RegistryUnavailableError("no server answers at zoo:2181")
        return self._open(*given, **options)


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    return Outage(monkeypatch)


def test_a_start_waits_for_the_registry(join: Join, outage: Outage) -> None:
    outage.left = 2
    member = join(1)
    assert outage.refused == 2
    assert member.has_lease


def test_failed_start_names_the_registry_that_does_not_answer(
    join: Join, outage: Outage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(member_module, "_START_MS", 300)
    outage.left = 1_000
    with pytest.raises(RegistryUnavailableError, match="does not answer") as raised:
        join(1)
    assert str(tmp_path / "cluster") in str(raised.value)
    assert "zoo:2181" in str(raised.value)


@pytest.mark.long
def test_a_member_registers_again_after_attempts_that_failed(
    join: Join, outage: Outage
) -> None:
    """A member whose session had expired tried only once to open the registry."""
    first, second = join(1), join(2)
    before = first.epoch
    outage.left = 3
    expire(second, first)
    until(lambda: outage.refused == 3, "the attempts that fail")
    until(lambda: first.epoch not in (None, before), "a new epoch")
    until(lambda: first.has_lease, "the lease")


@pytest.mark.long
def test_a_member_registers_again_after_its_number_was_in_use(
    join: Join,
) -> None:
    first, second = join(1), join(2)
    before = first.epoch
    path = paths.broker(1)
    taken = registry_nodes.BrokerNode(99, "other", "127.0.0.1", 9999)
    # Between the end of the session and the next registration.
    expire(second, first)
    with contextlib.suppress(NodeExistsError):
        second.registry.create(path, registry_nodes.pack_broker(taken), ephemeral=True)
        until(lambda: first.epoch is None, "the end of the registration")
        second.registry.delete(path)
    until(lambda: first.epoch not in (None, before), "a new epoch")


@pytest.mark.long
def test_a_registry_that_was_emptied_is_not_joined(join: Join) -> None:
    """All topics would be missing there, as if they had been deleted."""
    first, second = join(1), join(2)
    create(second, "t", (1, 2))
    wait(first, lambda view: "t" in view.topics)
    before = first.epoch
    id_node = second.registry.get(paths.CLUSTER_ID).value
    second.registry.delete(paths.CLUSTER_ID)
    expire(second, first)
    until(lambda: first.epoch is None, "the end of the registration")
    until(
        lambda: first._warned and first._warned[0] is InvalidConfigError, "the report"
    )
    assert first.epoch is None and "t" in first.view.topics
    second.registry.create(paths.CLUSTER_ID, id_node)
    until(lambda: first.epoch not in (None, before), "a new epoch")


@pytest.mark.long
def test_a_member_without_answers_keeps_its_registration_and_its_view(
    join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member = join(1, timeout_ms=900)
    create(member, "t", (1,))
    wait(member, lambda view: view.leader_of(("t", 0)) == 1)
    epoch = member.epoch
    failed = []

    def failing() -> None:
        failed.append(1)
        raise RegistryUnavailableError("no connection")

    monkeypatch.setattr(member.registry, "sync", failing)
    until(lambda: len(failed) > 3 and not member.has_lease, "the end of the lease")
    assert member.epoch == epoch and member.view.leader_of(("t", 0)) == 1
    lines = [message for message in caplog.messages if "no connection" in message]
    assert len(lines) == 1, "one line a minute"
    monkeypatch.undo()
    until(lambda: member.has_lease, "the lease")
    assert member.epoch == epoch


@pytest.mark.long
def test_a_member_without_a_lease_reads_the_views_of_others(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = join(1, timeout_ms=900)
    create(member, "t", (1, 2))
    wait(member, lambda view: view.leader_of(("t", 0)) == 1)
    leases: list[bool] = []

    def newer_view(view: ClusterView) -> ClusterView:
        leases.append(member.has_lease)
        stored = view.states["t", 0]
        state = attrs.evolve(stored.state, leader=2, leader_epoch=9)
        newer = attrs.evolve(stored, state=state)
        return attrs.evolve(view, states={("t", 0): newer})

    def failing() -> None:
        raise RegistryUnavailableError("no connection")

    monkeypatch.setattr(member, "_newer_view", newer_view)
    monkeypatch.setattr(member.registry, "sync", failing)
    wait(member, lambda view: view.leader_of(("t", 0)) == 2)
    assert not any(leases)
    monkeypatch.undo()
    # The views of the registry are used again as soon as it answers.
    wait(member, lambda view: view.leader_of(("t", 0)) == 1)


@pytest.mark.long
def test_a_blocked_event_loop_ends_the_session(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """ZooKeeper's client keeps the session of such a process alive."""
    turns = itertools.count()
    is_blocked = threading.Event()
    last = [0]

    def loop_iterations() -> int:
        if not is_blocked.is_set():
            last[0] = next(turns)
        return last[0]

    member = ClusterMember(
        OS,
        MemberSettings(
            registry=str(tmp_path / "cluster"),
            node_id=1,
            session_timeout_ms=600,
            defaults={},
        ),
        lambda view: None,
        loop_iterations,
    )
    request.addfinalizer(member.close)
    member.open()
    member.join("127.0.0.1", 9001, "disk", was_clean=True)
    before = member.epoch
    is_blocked.set()
    until(lambda: member.epoch is None, "the end of the registration")
    is_blocked.clear()
    until(lambda: member.epoch not in (None, before), "a new epoch")


# -- deletions -------------------------------------------------------------------------


@pytest.mark.long
def test_deletion_is_recorded_before_the_topic_is_missing(join: Join) -> None:
    views: list[ClusterView] = []
    first = join(1)
    create(first, "t", (1,))
    wait(first, lambda view: ("t", 0) in view.states)
    topic_id = str(first.view.topics["t"].node.topic_id)
    first._on_view = views.append
    first.registry.create(paths.deletion("t"))
    first.publish_changes([("t", WHOLE_TOPIC)])
    wait(first, lambda view: "t" not in view.topics)
    until(lambda: views and "t" not in views[-1].topics, "the last view")
    assert all(topic_id in view.deleted_ids for view in views if "t" not in view.topics)


def test_topic_that_is_replaced_while_it_is_read_has_no_former_state(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may be stopped between the reads of a topic and of its states. It must
    not lead the former topic with the state of the next topic.
    """
    first = join(1)
    wait_for_brokers((first,), {1})
    create(first, "t", (1,))
    wait(first, lambda view: view.leader_of(("t", 0)) == 1)
    former = first.view.topics["t"].node
    former_path = first.view.states["t", 0].path
    state = first.registry.get(former_path).value
    other = TopicNode(uuid.uuid4(), dict(former.replicas))
    read = ClusterMember._read_nodes
    replaced: list[uuid.UUID] = []

    views: list[ClusterView] = []
    first._on_view = views.append

    def read_late(member: ClusterMember, paths_to_read: Any) -> Any:
        nodes = read(member, paths_to_read)
        if not replaced and paths.topic("t") in paths_to_read:
            replaced.append(other.topic_id)
            registry = member.registry
            registry.set(paths.topic("t"), registry_nodes.pack_topic(other))
            registry.delete(former_path)
            registry.create(registry_nodes.state_path("t", 0, other.topic_id), state)
            member.publish_changes([("t", WHOLE_TOPIC)])
        return nodes

    monkeypatch.setattr(ClusterMember, "_read_nodes", read_late)
    first.publish_changes([("t", WHOLE_TOPIC)])
    until(lambda: replaced, "the topic was read")
    until(
        lambda: views and views[-1].topics["t"].node.topic_id == other.topic_id,
        "the next topic is read",
    )
    assert not any(
        view.topics["t"].node.topic_id == former.topic_id and ("t", 0) in view.states
        for view in views
    )


def test_idle_registry_is_read_three_times_in_a_session(join: Join) -> None:
    first = join(1, timeout_ms=30 * 60_000)
    wait(first, lambda view: view.controller == 1)
    assert first._is_refresh_due(True)
    assert not first._is_refresh_due(False)
    first._read_at_ms -= 10 * 60_000
    assert first._is_refresh_due(False)


@pytest.mark.long
def test_a_topic_that_the_registry_has_lost_is_not_deleted(join: Join) -> None:
    first = join(1)
    create(first, "t", (1,))
    wait(first, lambda view: ("t", 0) in view.states)
    registry = first.registry
    partition = f"{registry_nodes.partitions_path('t')}/0"
    state = first.view.states["t", 0].path
    for path in (state, partition, registry_nodes.partitions_path("t")):
        registry.delete(path)
    registry.delete(paths.topic("t"))
    first.publish_changes([("t", WHOLE_TOPIC)])
    wait(first, lambda view: "t" not in view.topics)
    assert not first.view.deleted_ids


def test_a_member_whose_node_is_missing_registers_again(join: Join) -> None:
    first = join(1)
    before = first.epoch
    first.registry.delete(paths.broker(1))
    # The member may have noticed it already, and be between two sessions.
    with contextlib.suppress(RegistryClosedError):
        first.publish_changes([])
    until(lambda: first.epoch not in (None, before), "a new epoch")


def test_closing_member_ends_a_wait_for_a_view(join: Join) -> None:
    """A broker that created a topic while it stopped waited 20 s for its own views."""
    member = join(1)
    results: list[bool] = []
    waiting = threading.Event()

    def is_met(view: ClusterView) -> bool:
        waiting.set()
        return False

    thread = threading.Thread(
        target=lambda: results.append(member.wait_for(is_met, 10 * LIMIT_S))
    )
    thread.start()
    assert waiting.wait(LIMIT_S)
    member.close()
    thread.join(LIMIT_S)
    assert results == [False]
