"""Random runs of groups of the consumer protocol: realistic members, and events that
happen to them and to a coordinator that loses power.

A random generator chooses the next event. A Client handles responses as real clients
do. After each step, the partitions that clients use are compared with each other and
with the state of the coordinator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from logcore.coordination.consumer_group import ConsumerGroup
from logcore.coordination.effects import ConsumersChanged
from logcore.coordination.group_requests import (
    Beaten,
    Committer,
    GroupError,
)
from logcore.format.consumer_group_records import Partitions
from support.consumerworld import World

NOTHING: Partitions = frozenset()
SESSION_MS = 1_000
REBALANCE_MS = 700
STEPS = 250
MOST_CLIENTS = 5


class Client:
    """One member with the behavior of a client. It stops using a partition that is no
    longer assigned before it reports that, and uses new partitions only afterwards.
    """

    def __init__(self, life: Life, number: int, instance_id: str | None) -> None:
        self.life = life
        self.member_id = f"m{number}"
        self.instance_id = instance_id
        self.wish = life.any_wish()
        self.epoch = 0
        self.owned = NOTHING
        #: The assignment. None while it waits for a complete response.
        self.told: Partitions | None = NOTHING
        self.says_owned = False
        self.said_all = False
        self.is_over = False
        #: The waiter of the unanswered heartbeat.
        self.waiter: int | None = None
        self.is_passed_over = False

    def __repr__(self) -> str:
        return f"{self.member_id} at {self.epoch} owns {sorted(self.owned)}"

    # -- its actions

    def beat(self) -> None:
        """Send a heartbeat. If the response to an earlier heartbeat is lost, the
        heartbeat is complete.
        """
        fields: dict[str, Any] = {"instance_id": self.instance_id}
        if self.waiter is not None or self.told is None:
            self.told = None
        self.said_all = self.epoch == 0 or self.told is None
        if self.said_all:
            self.told = None
            fields.update(
                self.wish, rebalance_timeout_ms=REBALANCE_MS, owned=self.owned
            )
        elif self.says_owned:
            fields.update(owned=self.owned)
        self.says_owned = False
        self.waiter = self.life.world.send(self.member_id, self.epoch, **fields)

    def hear(self) -> None:
        """Handle the response, if it has arrived."""
        result = self.life.world.replies.get(self.waiter)  # type: ignore[arg-type]
        if self.waiter is None or result is None:
            return
        self.waiter = None
        if isinstance(result, Beaten):
            self.epoch = result.member_epoch
            if result.assigned is not None:
                self.told = result.assigned
            assert result.assigned is not None or not self.said_all, (
                "a complete heartbeat gets a complete answer"
            )
            if self.told is not None and self.owned <= self.told:
                self.settle()
            return
        match result.error:
            case GroupError.COORDINATOR_NOT_AVAILABLE:
                self.told = None
            case GroupError.FENCED_MEMBER_EPOCH | GroupError.UNKNOWN_MEMBER_ID:
                self.drop_all()
            case (
                GroupError.GROUP_ID_NOT_FOUND
            ):  # the group has changed to the classic protocol
                self.drop_all()
            case GroupError.UNRELEASED_INSTANCE_ID:
                assert self.epoch == 0
            case GroupError.FENCED_INSTANCE_ID:
                self.end()
            case error:
                raise AssertionError(f"{self}: {error}")

    def settle(self) -> None:
        """Stop using partitions that are no longer assigned, then use the new ones."""
        if self.told is not None and self.told != self.owned:
            self.owned = self.told
            self.says_owned = True

    def drop_all(self) -> None:
        self.owned = NOTHING
        self.told = None
        self.epoch = 0

    def want_others(self) -> None:
        self.wish = self.life.any_wish()
        self.told = None

    def leave(self, epoch: int) -> None:
        if self.epoch > 0:
            self.owned = NOTHING
            self.life.world.send(self.member_id, epoch, instance_id=self.instance_id)
        self.end()

    def end(self) -> None:
        self.owned = NOTHING
        self.is_over = True

    @property
    def is_member(self) -> bool:
        """Whether the coordinator would accept the requests of the client."""
        group = self.life.group
        if group is None or self.member_id not in group.members:
            return False
        return (
            self.instance_id is None
            or group.static.get(self.instance_id) == self.member_id
        )


class Life:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = World(consumer_session_timeout_ms=SESSION_MS)
        self.world.holds = True
        self.clients: list[Client] = []
        self.number = 0

    @property
    def group(self) -> ConsumerGroup | None:
        found = self.world.coordinator.get("g")
        return None if found is None else found.consumers

    def any_wish(self) -> dict[str, Any]:
        names = self.chance.choice([("t",), ("t",), ("u",), ("t", "u")])
        if self.chance.random() < 0.2:
            return {"pattern": self.chance.choice(["t|u", "t"]), "topic_names": ()}
        assignor = self.chance.choice([None, "uniform", "range"])
        return {"pattern": "", "topic_names": names, "assignor": assignor}

    # -- what happens

    def step(self) -> None:
        happens = self.chance.choices(
            [
                self.beats,
                self.hears,
                self.settles,
                self.disk,
                self.newcomer,
                self.sleeps,
                self.leaves,
                self.topics,
                self.disk_fails,
                self.power_cut,
                self.wants_others,
                self.classic_member,
                self.classic_members_leave,
            ],
            [30, 30, 10, 25, 5, 6, 3, 2, 5, 3, 1, 1, 4],
        )[0]
        happens()
        self.check()

    def anybody(self, act: Callable[[Client], None]) -> None:
        if self.clients:
            act(self.chance.choice(self.clients))
        self.clients = [client for client in self.clients if not client.is_over]

    def beats(self) -> None:
        self.anybody(lambda client: client.beat())

    def hears(self) -> None:
        self.anybody(lambda client: client.hear())

    def settles(self) -> None:
        self.anybody(lambda client: client.settle())

    def wants_others(self) -> None:
        self.anybody(lambda client: client.want_others())

    def leaves(self) -> None:
        def leave(client: Client) -> None:
            away = client.instance_id is not None and self.chance.random() < 0.7
            client.leave(-2 if away else -1)

        self.anybody(leave)

    def newcomer(self) -> None:
        if len(self.clients) < MOST_CLIENTS:
            self.number += 1
            used = {client.instance_id for client in self.clients}
            free = [name for name in ("s0", "s1") if name not in used]
            instance_id = self.chance.choice([None, None, *free])
            self.clients.append(Client(self, self.number, instance_id))

    def disk(self) -> None:
        if self.world.stores:
            self.world.disk()

    def disk_fails(self) -> None:
        """Let the store of the records fail. They may be on disk nevertheless."""
        if self.world.stores:
            records = self.world.stores[0].records
            self.world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
            self.world.disk()
            self.world.disk_error = None
            if self.chance.random() < 0.7:
                self.world.batches.append(records)

    def power_cut(self) -> None:
        """Cut the power. Records that are being written may be lost or not. No client
        gets a response.
        """
        if self.world.stores and self.chance.random() < 0.5:
            self.world.batches.append(self.world.stores[0].records)
        self.world.restart()
        for client in self.clients:
            if client.waiter is not None:
                client.waiter = None
                client.told = None

    def sleeps(self) -> None:
        self.world.sleep(self.chance.choice([10, 100, 400]))

    def topics(self) -> None:
        self.world.set_topic(self.chance.choice("tu"), self.chance.randrange(7))

    def classic_member(self) -> None:
        """Let a member join by the classic protocol. Only an empty group accepts it."""
        members = 0 if self.group is None else len(self.group.members)
        self.number += 1
        self.world.join(
            client_id=f"classic{self.number}",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
        )
        assert not members or (
            self.group is not None and len(self.group.members) == members
        )

    def classic_members_leave(self) -> None:
        found = self.world.coordinator.get("g")
        if found is not None and found.members:
            leaving = [(member_id, None) for member_id in found.members]
            self.world.act(
                self.world.coordinator.leave("g", leaving, self.world.now_ms)[1]
            )

    # -- invariants

    def check(self) -> None:
        group = self.group
        users: dict[Any, str] = {}
        for client in self.clients:
            if client.is_passed_over:
                continue
            if not client.is_member:
                assert not self.is_in(client) or not self.may_commit(client), (
                    f"{client} is no member, and commits"
                )
                continue
            assert group is not None
            for partition in client.owned:
                assert partition not in users, (
                    f"{client} and {users[partition]} use one"
                )
                users[partition] = client.member_id
                assert group.owners.get(partition) == client.member_id, (
                    f"{client} uses partitions that it does not own"
                )
        if group is not None:
            ours = [
                store
                for store in self.world.stores
                if isinstance(store.then, ConsumersChanged)
            ]
            assert len(ours) <= 1, "one batch on its way at a time"
            held = [
                part
                for current in group.currents.values()
                for part in current.assigned | current.revoking
            ]
            assert sorted(held) == sorted(group.owners), (
                "an owner for each partition, and one"
            )
            assert (
                group.timers_ms.keys()
                == group.members.keys()
                == group.deadlines_ms.keys()
            )
            assert group.revocations == {
                name for name, one in group.currents.items() if one.revoking
            }

    def is_in(self, client: Client) -> bool:
        """Whether the client considers itself a member."""
        return client.epoch != 0

    def may_commit(self, client: Client) -> bool:
        who = Committer(
            "g", client.epoch, client.member_id, client.instance_id, knows_epochs=True
        )
        error, _ = self.world.coordinator.check_commit(who, self.world.now_ms)
        return error is None

    def live(self) -> None:
        """Run all steps, and then the quiet end."""
        for _ in range(STEPS):
            self.step()
        self.calm_down()

    def calm_down(self) -> None:
        """Let no more failures happen. The group detects lost members, and assigns
        every subscribed partition.
        """
        self.classic_members_leave()
        self.world.set_topic("t", 5)
        self.world.set_topic("u", 3)
        for _ in range(60):
            self.world.sleep(SESSION_MS // 10)
            while self.world.stores:
                self.world.disk()
            for client in [*self.clients]:
                if client.waiter is None:
                    client.beat()
                while self.world.stores:
                    self.world.disk()
                client.hear()
                client.settle()
                self.check()
            self.clients = [client for client in self.clients if not client.is_over]
        self.check_calm()

    def check_calm(self) -> None:
        group = self.group
        if not self.clients:
            assert group is None or not group.members
            return
        assert group is not None
        assert self.world.group().state == "Stable"
        assert group.members.keys() == {client.member_id for client in self.clients}
        wanted = {
            topic for name in group.subscribed() if (topic := self.world.facts(name))
        }
        everything = sorted(
            (topic, number) for topic, count in wanted for number in range(count)
        )
        assert (
            sorted(part for client in self.clients for part in client.owned)
            == everything
        )
        for client in self.clients:
            assert client.owned == group.targets[client.member_id]
        before = len(self.world.batches)
        for client in self.clients:
            client.beat()
        assert len(self.world.batches) == before and not self.world.stores, (
            "nothing changes any more"
        )


def live(seed: int) -> None:
    Life(seed).live()
