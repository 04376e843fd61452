"""Random histories of groups of the consumer protocol, with members like real clients and
a coordinator that may lose power.

A random generator chooses the next event. A Client handles responses like a real client.
After each step, the partitions that clients use are compared with each other and with the
state of the coordinator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from logcore.coordination.consumer_group import ConsumerGroup
from logcore.coordination.effects import ConsumersChanged
from logcore.coordination.group_requests import (
    Committer,
    GroupError,
    HeartbeatAccepted,
)
from logcore.format.consumer_group_records import Partitions
from support.coordinator_simulation import CoordinatorSimulation

NO_PARTITIONS: Partitions = frozenset()
SESSION_MS = 1_000
REBALANCE_MS = 700
STEPS = 250
MAX_CLIENTS = 5


class Client:
    """One member with the behavior of a client.

    The member stops using a partition before it reports that the partition is released.
    It uses new partitions only after this report.
    """

    def __init__(
        self, history: RandomHistory, number: int, instance_id: str | None
    ) -> None:
        self.history = history
        self.member_id = f"m{number}"
        self.instance_id = instance_id
        self.subscription = history.random_subscription()
        self.epoch = 0
        self.owned = NO_PARTITIONS
        #: The assignment, or None until a response to a complete heartbeat arrives.
        self.assignment: Partitions | None = NO_PARTITIONS
        self.must_report_owned = False
        self.is_complete = False
        self.has_ended = False
        #: The waiter of the heartbeat that has no response yet.
        self.waiter: int | None = None
        #: True for a static member that uses partitions of an earlier generation.
        self.is_abandoned = False

    def __repr__(self) -> str:
        return f"{self.member_id} at {self.epoch} owns {sorted(self.owned)}"

    # -- actions of a client

    def take_next_step(self) -> None:
        """Send a heartbeat. If the response to an earlier heartbeat is lost, send all fields."""
        fields: dict[str, Any] = {"instance_id": self.instance_id}
        if self.waiter is not None or self.assignment is None:
            self.assignment = None
        self.is_complete = self.epoch == 0 or self.assignment is None
        if self.is_complete:
            self.assignment = None
            fields.update(
                self.subscription, rebalance_timeout_ms=REBALANCE_MS, owned=self.owned
            )
        elif self.must_report_owned:
            fields.update(owned=self.owned)
        self.must_report_owned = False
        self.waiter = self.history.simulation.send(self.member_id, self.epoch, **fields)

    def handle_response(self) -> None:
        """Handle the response, if it has arrived."""
        result = self.history.simulation.replies.get(self.waiter)  # type: ignore[arg-type]
        if self.waiter is None or result is None:
            return
        self.waiter = None
        if isinstance(result, HeartbeatAccepted):
            self.epoch = result.member_epoch
            if result.assigned is not None:
                self.assignment = result.assigned
            assert result.assigned is not None or not self.is_complete, (
                "the response to a complete heartbeat has no assignment"
            )
            if self.assignment is not None and self.owned <= self.assignment:
                self.use_assignment()
            return
        match result.error:
            case GroupError.COORDINATOR_NOT_AVAILABLE:
                self.assignment = None
            case GroupError.FENCED_MEMBER_EPOCH | GroupError.UNKNOWN_MEMBER_ID:
                self.drop_all()
            case GroupError.GROUP_ID_NOT_FOUND:
                # The group has changed to the classic protocol.
                self.drop_all()
            case GroupError.UNRELEASED_INSTANCE_ID:
                assert self.epoch == 0
            case GroupError.FENCED_INSTANCE_ID:
                self.end()
            case error:
                raise AssertionError(f"{self}: {error}")

    def use_assignment(self) -> None:
        """Stop using partitions that are no longer assigned, then use the new partitions."""
        if self.assignment is not None and self.assignment != self.owned:
            self.owned = self.assignment
            self.must_report_owned = True

    def drop_all(self) -> None:
        self.owned = NO_PARTITIONS
        self.assignment = None
        self.epoch = 0

    def change_subscription(self) -> None:
        self.subscription = self.history.random_subscription()
        self.assignment = None

    def leave(self, epoch: int) -> None:
        if self.epoch > 0:
            self.owned = NO_PARTITIONS
            self.history.simulation.send(
                self.member_id, epoch, instance_id=self.instance_id
            )
        self.end()

    def end(self) -> None:
        self.owned = NO_PARTITIONS
        self.has_ended = True

    @property
    def is_member(self) -> bool:
        """True if the coordinator would accept the requests of the client."""
        group = self.history.group
        if group is None or self.member_id not in group.members:
            return False
        return (
            self.instance_id is None
            or group.static.get(self.instance_id) == self.member_id
        )


class RandomHistory:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.simulation = CoordinatorSimulation(consumer_session_timeout_ms=SESSION_MS)
        self.simulation.holds_writes = True
        self.clients: list[Client] = []
        self.number = 0

    @property
    def group(self) -> ConsumerGroup | None:
        found = self.simulation.coordinator.get("g")
        return None if found is None else found.consumers

    def random_subscription(self) -> dict[str, Any]:
        names = self.rng.choice([("t",), ("t",), ("u",), ("t", "u")])
        if self.rng.random() < 0.2:
            return {"pattern": self.rng.choice(["t|u", "t"]), "topic_names": ()}
        assignor = self.rng.choice([None, "uniform", "range"])
        return {"pattern": "", "topic_names": names, "assignor": assignor}

    # -- events

    def step(self) -> None:
        event = self.rng.choices(
            [
                self.send_heartbeat,
                self.receive_response,
                self.use_assignments,
                self.finish_write,
                self.add_client,
                self.pass_time,
                self.remove_client,
                self.change_topics,
                self.fail_write,
                self.cut_power,
                self.change_subscriptions,
                self.join_classic_member,
                self.remove_classic_members,
            ],
            [30, 30, 10, 25, 5, 6, 3, 2, 5, 3, 1, 1, 4],
        )[0]
        event()
        self.check()

    def with_random_client(self, act: Callable[[Client], None]) -> None:
        if self.clients:
            act(self.rng.choice(self.clients))
        self.clients = [client for client in self.clients if not client.has_ended]

    def send_heartbeat(self) -> None:
        self.with_random_client(lambda client: client.take_next_step())

    def receive_response(self) -> None:
        self.with_random_client(lambda client: client.handle_response())

    def use_assignments(self) -> None:
        self.with_random_client(lambda client: client.use_assignment())

    def change_subscriptions(self) -> None:
        self.with_random_client(lambda client: client.change_subscription())

    def remove_client(self) -> None:
        def leave(client: Client) -> None:
            away = client.instance_id is not None and self.rng.random() < 0.7
            client.leave(-2 if away else -1)

        self.with_random_client(leave)

    def add_client(self) -> None:
        if len(self.clients) < MAX_CLIENTS:
            self.number += 1
            used = {client.instance_id for client in self.clients}
            free = [name for name in ("s0", "s1") if name not in used]
            instance_id = self.rng.choice([None, None, *free])
            self.clients.append(Client(self, self.number, instance_id))

    def finish_write(self) -> None:
        if self.simulation.stores:
            self.simulation.finish_write()

    def fail_write(self) -> None:
        """Fail the first waiting write. Its records may be on disk nevertheless."""
        if self.simulation.stores:
            records = self.simulation.stores[0].records
            self.simulation.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
            self.simulation.finish_write()
            self.simulation.disk_error = None
            if self.rng.random() < 0.7:
                self.simulation.batches.append(records)

    def cut_power(self) -> None:
        """Cut the power. The records of the first waiting write may be lost or not. No
        client gets a response.
        """
        if self.simulation.stores and self.rng.random() < 0.5:
            self.simulation.batches.append(self.simulation.stores[0].records)
        self.simulation.restart()
        for client in self.clients:
            if client.waiter is not None:
                client.waiter = None
                client.assignment = None

    def pass_time(self) -> None:
        self.simulation.sleep(self.rng.choice([10, 100, 400]))

    def change_topics(self) -> None:
        self.simulation.set_topic(self.rng.choice("tu"), self.rng.randrange(7))

    def join_classic_member(self) -> None:
        """Let a member join by the classic protocol. Only an empty group accepts it."""
        members = 0 if self.group is None else len(self.group.members)
        self.number += 1
        self.simulation.join(
            client_id=f"classic{self.number}",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
        )
        assert not members or (
            self.group is not None and len(self.group.members) == members
        )

    def remove_classic_members(self) -> None:
        found = self.simulation.coordinator.get("g")
        if found is not None and found.members:
            leaving = [(member_id, None) for member_id in found.members]
            self.simulation.act(
                self.simulation.coordinator.leave("g", leaving, self.simulation.now_ms)[
                    1
                ]
            )

    # -- invariants

    def check(self) -> None:
        group = self.group
        users: dict[Any, str] = {}
        for client in self.clients:
            if client.is_abandoned:
                continue
            if not client.is_member:
                assert not self.acts_as_member(client) or not self.may_commit(client), (
                    f"{client} is not a member, and commits"
                )
                continue
            assert group is not None
            for partition in client.owned:
                assert partition not in users, (
                    f"{client} and {users[partition]} use the same partition"
                )
                users[partition] = client.member_id
                assert group.owners.get(partition) == client.member_id, (
                    f"{client} uses partitions that it does not own"
                )
        if group is not None:
            ours = [
                store
                for store in self.simulation.stores
                if isinstance(store.then, ConsumersChanged)
            ]
            assert len(ours) <= 1, "two batches are written at the same time"
            held = [
                part
                for current in group.currents.values()
                for part in current.assigned | current.revoking
            ]
            assert sorted(held) == sorted(group.owners), (
                "the owners differ from the assignments"
            )
            assert (
                group.timers_ms.keys()
                == group.members.keys()
                == group.deadlines_ms.keys()
            )
            assert group.revocations == {
                name for name, current in group.currents.items() if current.revoking
            }

    def acts_as_member(self, client: Client) -> bool:
        """Return whether the client has an epoch of a member."""
        return client.epoch != 0

    def may_commit(self, client: Client) -> bool:
        committer = Committer(
            "g",
            client.epoch,
            client.member_id,
            client.instance_id,
            can_contain_epoch=True,
        )
        error, _ = self.simulation.coordinator.check_commit(
            committer, self.simulation.now_ms
        )
        return error is None

    def run(self) -> None:
        """Run random steps, then run without faults until the group is stable."""
        for _ in range(STEPS):
            self.step()
        self.end_faults()

    def end_faults(self) -> None:
        """Run without faults for some time. Check that the group has removed lost members
        and assigned every subscribed partition.
        """
        self.remove_classic_members()
        self.simulation.set_topic("t", 5)
        self.simulation.set_topic("u", 3)
        for _ in range(60):
            self.simulation.sleep(SESSION_MS // 10)
            while self.simulation.stores:
                self.simulation.finish_write()
            for client in [*self.clients]:
                if client.waiter is None:
                    client.take_next_step()
                while self.simulation.stores:
                    self.simulation.finish_write()
                client.handle_response()
                client.use_assignment()
                self.check()
            self.clients = [client for client in self.clients if not client.has_ended]
        self.check_stable()

    def check_stable(self) -> None:
        group = self.group
        if not self.clients:
            assert group is None or not group.members
            return
        assert group is not None
        assert self.simulation.group().state == "Stable"
        assert group.members.keys() == {client.member_id for client in self.clients}
        wanted = {
            topic
            for name in group.subscribed()
            if (topic := self.simulation.id_and_count(name))
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
        before = len(self.simulation.batches)
        for client in self.clients:
            client.take_next_step()
        assert len(self.simulation.batches) == before and not self.simulation.stores, (
            "a heartbeat has changed a stable group"
        )


def run_history(seed: int) -> None:
    RandomHistory(seed).run()
