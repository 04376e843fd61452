"""Groups as a whole: requests of admin tools, and the invariants in any order of
requests.

The tests run without sockets: time is a number, and the disk finishes when the test
requests it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from logcore.coordination import classic_group as machine
from netshim import wire
from netshim.scheduling import PendingResponse
from netshim.wire import codes
from support.group_harness import GroupHarness, code_of, with_each_kind_of_directory

# -- requests of admin tools
# -------------------------------------------------------------


@with_each_kind_of_directory
def test_find_coordinator_returns_this_broker(group_harness: GroupHarness) -> None:
    def find_coordinator(
        version: int, key: str, key_type: int
    ) -> tuple[int, int, str, int]:
        if version < 4:
            coordinator = group_harness.ask(
                wire.FIND_COORDINATOR, version, key=key, key_type=key_type
            )
        else:
            response = group_harness.ask(
                wire.FIND_COORDINATOR,
                version,
                coordinator_keys=[key],
                key_type=key_type,
            )
            (coordinator,) = response.coordinators
            assert coordinator.key == key
        return (
            coordinator.error_code,
            coordinator.node_id,
            coordinator.host,
            coordinator.port,
        )

    for version in range(7):
        assert find_coordinator(version, "g", 0) == (
            0,
            group_harness.logdir.node_id,
            "broker",
            9092,
        )
        # As in Kafka. Later requests for such a group are refused.
        assert find_coordinator(version, "", 0)[0] == 0
        if version:
            assert find_coordinator(version, "t", 1)[0] == 0
            assert find_coordinator(version, "s", 2)[0] == codes.INVALID_REQUEST


@with_each_kind_of_directory
def test_groups_are_listed_and_described(group_harness: GroupHarness) -> None:
    group_harness.form(1)
    group_harness.commit({("orders", 0): 1}, group="simple")

    def listed(version: int, **filters: Any) -> list[Any]:
        return [
            (group.group_id, group.protocol_type, group.group_state, group.group_type)
            for group in group_harness.ask(wire.LIST_GROUPS, version, **filters).groups
        ]

    stable = ("g", "consumer", "Stable", "classic")
    simple = ("simple", "", "Empty", "classic")
    assert listed(5) == [stable, simple]
    assert listed(5, states_filter=["stable"]) == [stable]
    assert listed(5, states_filter=["EMPTY", "Dead"], types_filter=["Classic"]) == [
        simple
    ]
    assert listed(5, types_filter=["consumer"]) == []
    assert [row[0] for row in listed(0)] == ["g", "simple"]
    (described,) = group_harness.ask(
        wire.DESCRIBE_GROUPS, 5, groups=["no"], include_authorized_operations=True
    ).groups
    assert (
        described.error_code,
        described.group_state,
        described.authorized_operations,
    ) == (0, "Dead", 0b110101001000)
    parked = group_harness.join()
    described = group_harness.describe()
    assert described.group_state == machine.PREPARING and described.protocol_data == ""
    assert all(
        not member.member_metadata and not member.member_assignment
        for member in described.members
    )
    group_harness.groups.stop(group_harness.now_ms)
    assert code_of(parked) == codes.NOT_COORDINATOR


# -- any order of requests
# --------------------------------------------------------------


class Client:
    """A consumer whose steps happen at random times."""

    def __init__(
        self,
        group_harness: GroupHarness,
        chance: random.Random,
        owners: dict[int, dict[int, str]],
    ) -> None:
        self.group_harness = group_harness
        self.chance = chance
        self.owners = owners
        self.instance = f"s{chance.randrange(2)}" if chance.random() < 0.3 else None
        self.member_id = ""
        self.generation = -1
        self.waiting: PendingResponse | None = None
        self.all: list[PendingResponse] = []
        self.step: Callable[[], None] = self.join

    def join(self) -> None:
        version = self.chance.choice([3, 5, 9]) if self.instance is None else 5
        protocols = {"range": bytes([self.chance.randrange(2)])}
        self._ask(
            self.group_harness.join(
                self.member_id,
                instance=self.instance,
                version=version,
                protocols=protocols,
            )
        )
        self.step = self.joined

    def joined(self) -> None:
        assert self.waiting is not None
        if not self.waiting.is_set:
            return
        response = self.waiting.value
        self.waiting = None
        self.step = self.join
        if response.error_code:
            self.member_id = (
                response.member_id
                if response.error_code == codes.MEMBER_ID_REQUIRED
                else ""
            )
            return
        self.member_id = response.member_id
        self.generation = response.generation_id
        assignments: dict[str, bytes] = {}
        if response.leader == self.member_id and not response.skip_assignment:
            names = [member.member_id for member in response.members]
            assert self.member_id in names and len(set(names)) == len(names)
            for partition in range(6):
                name = names[partition % len(names)]
                assignments[name] = assignments.get(name, b"") + bytes([partition])
        self._ask(self.group_harness.sync(self.member_id, self.generation, assignments))
        self.step = self.synced

    def synced(self) -> None:
        assert self.waiting is not None
        if not self.waiting.is_set:
            return
        response = self.waiting.value
        self.waiting = None
        if response.error_code:
            self._fail(response.error_code)
            return
        owners = self.owners.setdefault(self.generation, {})
        for partition in response.assignment:
            # A static member that returned keeps its partitions: the part of the id
            # before the last dash is the same.
            owner = self.instance or self.member_id
            assert owners.setdefault(partition, owner) == owner, (
                self.generation,
                partition,
            )
        self.step = self.work

    def work(self) -> None:
        choice = self.chance.random()
        if choice < 0.6:
            code = self.group_harness.heartbeat(
                self.member_id, self.generation, instance=self.instance
            )
        elif choice < 0.85:
            pending = self.group_harness.commit(
                {("orders", 0): self.chance.randrange(100)},
                member_id=self.member_id,
                generation=self.generation,
            )
            self.all.append(pending)
            code = code_of(pending) if pending.is_set else 0
        elif choice < 0.95:
            self.group_harness.leave((self.member_id, self.instance))
            self.member_id = ""
            code = codes.UNKNOWN_MEMBER_ID
        else:
            # A crashed member loses its id and sends no request.
            self.member_id = ""
            code = codes.UNKNOWN_MEMBER_ID
        if code:
            self._fail(code)

    def _fail(self, code: int) -> None:
        known = (
            codes.REBALANCE_IN_PROGRESS,
            codes.ILLEGAL_GENERATION,
            codes.UNKNOWN_MEMBER_ID,
        )
        assert code in (*known, codes.FENCED_INSTANCE_ID), code
        if code in (codes.UNKNOWN_MEMBER_ID, codes.FENCED_INSTANCE_ID):
            self.member_id = ""
        self.step = self.join

    def _ask(self, pending: PendingResponse) -> None:
        self.waiting = pending
        self.all.append(pending)


@pytest.mark.parametrize("seed", range(24))
def test_P58_P61_partitions_have_one_owner_and_all_requests_are_answered(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    with GroupHarness(
        tmp_path, rebalance_delay_ms=chance.choice([0, 500])
    ) as group_harness:
        group_harness.logdir.create_topic("orders")
        owners: dict[int, dict[int, str]] = {}
        clients = [Client(group_harness, chance, owners) for _ in range(5)]
        for _ in range(250):
            choice = chance.random()
            if choice < 0.8:
                chance.choice(clients).step()
            elif choice < 0.9:
                group_harness.sleep(chance.choice([1, 300, 3_000, 11_000]))
            elif choice < 0.95:
                group_harness.holds_disk = True
            else:
                group_harness.finish_disk()
            group = group_harness.groups.get("g")
            if group is not None:
                check_group(group)
        group_harness.finish_disk()
        group_harness.sleep(400_000)
        assert all(pending.is_set for client in clients for pending in client.all)
        described = group_harness.describe()
        committed = group_harness.committed()
        assert described.group_state in (machine.EMPTY, machine.DEAD)
        generation = getattr(group_harness.groups.get("g"), "generation", 0)
        group_harness.restart()
        assert group_harness.committed() == committed
        assert getattr(group_harness.groups.get("g"), "generation", 0) == generation


def check_group(group: machine.Group) -> None:
    """Check the invariants of a group."""
    assert (group.leader is None) == (not group.members) and (
        group.leader is None or group.leader in group.members
    )
    assert set(group.static.values()) == {
        m.member_id for m in group.members.values() if m.instance_id is not None
    }
    assert group.unsynced <= set(group.members)
    for member_id, member in group.members.items():
        assert member.member_id == member_id
        assert member.syncing is None or group.state == machine.COMPLETING
        assert member.joining is None or group.state in (
            machine.PREPARING,
            machine.STABLE,
        )
        assert member.timer_ms is not None or member.is_waiting
    if group.state == machine.EMPTY:
        assert not group.members
    if group.state in (machine.COMPLETING, machine.STABLE):
        assert group.protocol in group.common_protocols() and group.generation > 0
        assert group.join_timer is None
    if group.state == machine.PREPARING:
        assert group.join_timer is not None and group.sync_timer is None


NAMES = st.sampled_from(
    ["", "g", "h", "orders", "nothing", "cli-0001", "cli-0002", "a-0001", "é" * 20_000]
)
NUMBERS = st.sampled_from([-(2**31), -1, 0, 1, 2, 2**31 - 1])
LONGS = st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1])


@pytest.mark.long
@hypothesis_settings(max_examples=40)
@given(data=st.data())
def test_every_odd_request_is_answered(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    with GroupHarness(tmp_path_factory.mktemp("odd")) as group_harness:
        group_harness.logdir.create_topic("orders", 2)
        replies = []
        for _ in range(data.draw(st.integers(1, 12))):
            api, version, request = data.draw(odd_requests())
            try:
                replies.append(group_harness.send(api, version, request))
            except ValueError as error:  # this version cannot encode the request, so that no client can send it
                assert "Request" in str(error) or "request" in str(error), error
            group_harness.sleep(data.draw(st.sampled_from([0, 0, 100, 60_000])))
        group_harness.sleep(3 * 2**31)
        assert all(reply.is_set for reply in replies)
        group_harness.restart()
        group_harness.describe()


@st.composite
def odd_requests(draw: Any) -> Any:
    text = lambda: draw(NAMES)  # noqa: E731
    number = lambda: draw(NUMBERS)  # noqa: E731
    maybe = lambda: draw(st.sampled_from([None, "a", "", "cli"]))  # noqa: E731
    kind = draw(st.integers(0, 10))
    if kind == 0:
        request_type = wire.JOIN_GROUP.Request
        protocols = [
            request_type.Protocol(
                name=name,
                metadata=draw(
                    st.sampled_from([b"", b"\0\0\0\0\0\1\0\6orders", b"\0\3?"])
                ),
            )
            for name in draw(st.lists(st.sampled_from(["range", "", "x"]), max_size=3))
        ]
        return (
            wire.JOIN_GROUP,
            draw(st.integers(0, 9)),
            request_type(
                group_id=text(),
                session_timeout_ms=draw(st.sampled_from([100, 10_000, 1_800_000, -1])),
                rebalance_timeout_ms=number(),
                member_id=text(),
                group_instance_id=maybe(),
                protocol_type=draw(st.sampled_from(["consumer", "connect", ""])),
                protocols=protocols,
            ),
        )
    if kind == 1:
        request_type = wire.SYNC_GROUP.Request
        return (
            wire.SYNC_GROUP,
            draw(st.integers(0, 5)),
            request_type(
                group_id=text(),
                generation_id=number(),
                member_id=text(),
                group_instance_id=maybe(),
                protocol_type=maybe(),
                protocol_name=maybe(),
                assignments=[
                    request_type.Assignment(member_id=text(), assignment=b"?")
                ],
            ),
        )
    if kind == 2:
        return (
            wire.HEARTBEAT,
            draw(st.integers(0, 4)),
            wire.HEARTBEAT.Request(
                group_id=text(),
                generation_id=number(),
                member_id=text(),
                group_instance_id=maybe(),
            ),
        )
    if kind == 3:
        member_type = wire.LEAVE_GROUP.Request.Member
        members = [
            member_type(member_id=text(), group_instance_id=maybe())
            for _ in range(draw(st.integers(0, 3)))
        ]
        return (
            wire.LEAVE_GROUP,
            draw(st.integers(0, 5)),
            wire.LEAVE_GROUP.Request(
                group_id=text(), member_id=text(), members=members
            ),
        )
    if kind == 4:
        topic_type = wire.OFFSET_COMMIT.Request.Topic
        partition = topic_type.Partition(
            partition_index=number(),
            committed_offset=draw(LONGS),
            committed_leader_epoch=number(),
            committed_metadata=draw(
                st.sampled_from(
                    [None, "", "é" * 4_096, "\U0001f600" * 4_096, "x" * 40_000]
                )
            ),
        )
        return (
            wire.OFFSET_COMMIT,
            draw(st.integers(2, 9)),
            wire.OFFSET_COMMIT.Request(
                group_id=text(),
                generation_id_or_member_epoch=number(),
                member_id=text(),
                group_instance_id=maybe(),
                retention_time_ms=draw(LONGS),
                topics=[topic_type(name=text(), partitions=[partition, partition])],
            ),
        )
    if kind == 5:
        request_type = wire.OFFSET_FETCH.Request
        topics = draw(
            st.sampled_from(
                [
                    None,
                    [request_type.Topic(name="orders", partition_indexes=[0, 0, -1])],
                ]
            )
        )
        grouped = (
            None
            if topics is None
            else [
                request_type.Group.Topic(
                    name="orders", partition_indexes=[0, 2**31 - 1]
                )
            ]
        )
        return (
            wire.OFFSET_FETCH,
            draw(st.integers(1, 9)),
            request_type(
                group_id=text(),
                topics=topics,
                groups=[request_type.Group(group_id=text(), topics=grouped)],
            ),
        )
    if kind == 6:
        return (
            wire.FIND_COORDINATOR,
            draw(st.integers(0, 5)),
            wire.FIND_COORDINATOR.Request(
                key=text(),
                key_type=draw(st.integers(-128, 127)),
                coordinator_keys=[text()],
            ),
        )
    if kind == 7:
        return (
            wire.DESCRIBE_GROUPS,
            draw(st.integers(0, 5)),
            wire.DESCRIBE_GROUPS.Request(groups=[text(), text()]),
        )
    if kind == 8:
        return (
            wire.LIST_GROUPS,
            draw(st.integers(0, 5)),
            wire.LIST_GROUPS.Request(
                states_filter=draw(st.lists(NAMES, max_size=2)),
                types_filter=draw(st.lists(NAMES, max_size=1)),
            ),
        )
    if kind == 9:
        return (
            wire.DELETE_GROUPS,
            draw(st.integers(0, 2)),
            wire.DELETE_GROUPS.Request(groups_names=[text(), text()]),
        )
    topic_type = wire.OFFSET_DELETE.Request.Topic
    return (
        wire.OFFSET_DELETE,
        0,
        wire.OFFSET_DELETE.Request(
            group_id=text(),
            topics=[
                topic_type(
                    name=text(),
                    partitions=[topic_type.Partition(partition_index=number())],
                )
            ],
        ),
    )
