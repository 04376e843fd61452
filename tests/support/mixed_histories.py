"""Random histories of groups whose clients are replaced while they run: members of both
protocols with the behavior of real clients.

ClassicClient is a client of the classic protocol, eager or cooperative. As the leader,
it assigns like the cooperative assignors: no member gets a partition before its current
owner has released it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from logcore.coordination.group_requests import (
    Committer,
    GroupError,
    Join,
    Joined,
    JoinRefused,
    Sync,
    SyncResult,
)
from logcore.format.consumer_group_records import Partitions
from logcore.format.group_records import (
    Subscription,
    assignment_value,
    read_assignment,
    read_subscription,
    subscription_value,
)
from support.coordinator_simulation import topic_id
from support.group_histories import (
    MAX_CLIENTS,
    NO_PARTITIONS,
    REBALANCE_MS,
    SESSION_MS,
    Client,
    RandomHistory,
)

#: Errors after which a member of the classic protocol must join again without
#: partitions.
MEMBERSHIP_LOST = (GroupError.UNKNOWN_MEMBER_ID, GroupError.ILLEGAL_GENERATION)
#: Errors after which the client sends the request again.
RETRIABLE = (GroupError.REBALANCE_IN_PROGRESS, GroupError.COORDINATOR_NOT_AVAILABLE)


class ClassicClient(Client):
    """A client of the classic protocol.

    A cooperative client keeps its partitions while it joins. An eager client releases all
    of its partitions before it joins.
    """

    def __init__(
        self,
        history: RandomHistory,
        number: int,
        instance_id: str | None,
        is_cooperative: bool,
    ) -> None:
        super().__init__(history, number, instance_id)
        self.member_id = ""
        self.is_cooperative = is_cooperative
        self.requires_member_id = history.rng.random() < 0.7
        self.topics: tuple[str, ...] = history.rng.choice([("t",), ("t", "u")])
        self.reported_topics: tuple[str, ...] = ()
        self.generation = -1
        #: The response to JoinGroup, until the assignment has been requested.
        self.joined: Joined | None = None
        self.awaited_response = ""
        self.is_stable = False
        #: The version of the topics that this client has assigned as the leader. A leader
        #: joins again if the topics change. None for other members.
        self.led_topics_version: int | None = None

    def __repr__(self) -> str:
        return f"{self.member_id} at {self.generation} owns {sorted(self.owned)}"

    # -- actions of a client

    def take_next_step(self) -> None:
        """Send the next request, unless the client waits for a response."""
        if self.waiter is not None:
            return
        if self.joined is not None:
            self.sync(self.joined)
        elif self.is_stable and self.led_topics_version in (
            None,
            self.history.simulation.version,
        ):
            self.heartbeat()
        else:
            self.join()

    def join(self) -> None:
        if not self.is_cooperative:
            self.owned = NO_PARTITIONS
        simulation = self.history.simulation
        names = {topic_id(name): name for name in ("t", "u")}
        owned = tuple(sorted((names[topic], number) for topic, number in self.owned))
        request = Join(
            group_id="g",
            member_id=self.member_id,
            instance_id=self.instance_id,
            client_id="classic",
            client_host="/h",
            protocol_type="consumer",
            protocols=(
                (
                    "some",
                    subscription_value(
                        Subscription(self.topics, None, owned, self.generation)
                    ),
                ),
            ),
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            requires_member_id=self.requires_member_id,
            may_skip_assignment=True,
        )
        simulation.waiters += 1
        self.waiter = simulation.waiters
        self.awaited_response = "join"
        self.reported_topics = self.topics
        simulation.act(
            simulation.coordinator.join(request, self.waiter, simulation.now_ms)
        )

    def sync(self, joined: Joined) -> None:
        simulation = self.history.simulation
        assignments: dict[str, bytes] = {}
        # A repeated request may get the assignment of the first one, so the version of
        # the first request is kept.
        if joined.leader == joined.member_id and self.led_topics_version is None:
            self.led_topics_version = simulation.version
            if joined.skip_assignment:
                # The leader rejoined as a static member. Other members may have
                # partitions of topics that the leader has not read.
                self.led_topics_version = -1
        if joined.leader == joined.member_id and not joined.skip_assignment:
            assignments = self.assign_partitions(joined)
        request = Sync(
            group_id="g",
            member_id=self.member_id,
            instance_id=self.instance_id,
            generation=joined.generation,
            protocol_type=joined.protocol_type,
            protocol=joined.protocol,
            assignments=assignments,
        )
        simulation.waiters += 1
        self.waiter = simulation.waiters
        self.awaited_response = "sync"
        simulation.act(
            simulation.coordinator.sync(request, self.waiter, simulation.now_ms)
        )

    def assign_partitions(self, joined: Joined) -> dict[str, bytes]:
        claims: dict[tuple[str, int], str] = {}
        topics_of_members: dict[str, tuple[str, ...]] = {}
        for member in joined.members:
            subscription = read_subscription(member.metadata)
            assert subscription is not None
            topics_of_members[member.member_id] = subscription.topics
            claims.update(
                (partition, member.member_id) for partition in subscription.owned
            )
        shares: dict[str, list[tuple[str, int]]] = {
            member_id: [] for member_id in topics_of_members
        }
        for name, count in sorted(self.history.simulation.counts.items()):
            receivers = sorted(
                member_id
                for member_id, topics in topics_of_members.items()
                if name in topics
            )
            for number in range(count if receivers else 0):
                receiver = receivers[number % len(receivers)]
                if claims.get((name, number), receiver) == receiver:
                    shares[receiver].append((name, number))
        return {
            member_id: assignment_value(share) for member_id, share in shares.items()
        }

    def heartbeat(self) -> None:
        simulation = self.history.simulation
        coordinator = simulation.coordinator
        error, effects = coordinator.heartbeat(
            "g", self.member_id, self.instance_id, self.generation, simulation.now_ms
        )
        simulation.act(effects)
        self.handle_error(error)

    def handle_error(self, error: GroupError | None) -> None:
        if error is None or error is GroupError.COORDINATOR_NOT_AVAILABLE:
            return
        self.joined = None
        self.is_stable = False
        if error is GroupError.FENCED_INSTANCE_ID:
            self.end()
        elif error in MEMBERSHIP_LOST:
            self.owned = NO_PARTITIONS
            self.generation = -1
            if error is GroupError.UNKNOWN_MEMBER_ID:
                self.member_id = ""
        else:
            assert error is GroupError.REBALANCE_IN_PROGRESS, f"{self}: {error}"

    # -- responses

    def handle_response(self) -> None:
        result = self.history.simulation.replies.get(self.waiter)  # type: ignore[arg-type]
        awaited_response = self.awaited_response
        if self.waiter is None or (
            result is None and self.waiter not in self.history.simulation.replies
        ):
            return
        self.waiter = None
        match result:
            case Joined():
                assert awaited_response == "join"
                self.member_id = result.member_id
                self.generation = result.generation
                self.joined = result
                self.led_topics_version = None
                self.is_abandoned = False
            case JoinRefused(GroupError.MEMBER_ID_REQUIRED, member_id):
                self.member_id = member_id
            case JoinRefused(error, _) if error in RETRIABLE:
                pass
            case JoinRefused(error, _):
                self.handle_error(error)
            case SyncResult():
                self.apply_assignment(result)
            case GroupError():
                self.handle_error(result)
            case _:
                raise AssertionError(f"{self}: {result}")

    def apply_assignment(self, result: SyncResult) -> None:
        """Use an assignment. A cooperative member that must release partitions joins again
        afterwards, so that other members get them.
        """
        partitions = read_assignment(result.assignment)
        assert partitions is not None
        assignment: Partitions = frozenset(
            (topic_id(name), number) for name, number in partitions
        )
        revoked = self.owned - assignment
        self.owned = assignment
        self.joined = None
        self.is_stable = not revoked and self.reported_topics == self.topics

    def use_assignment(self) -> None:
        pass

    def change_subscription(self) -> None:
        self.topics = self.history.rng.choice([("t",), ("t", "u")])
        self.is_stable = False

    def leave(self, epoch: int) -> None:
        """End the client. A static member sends no request, because it may join again."""
        simulation = self.history.simulation
        if self.member_id and self.instance_id is None:
            simulation.act(
                simulation.coordinator.leave(
                    "g", [(self.member_id, None)], simulation.now_ms
                )[1]
            )
        self.end()

    @property
    def is_member(self) -> bool:
        found = self.history.simulation.coordinator.get("g")
        if found is None or not self.member_id:
            return False
        if found.consumers is not None:
            return super().is_member
        return found.check_member(self.member_id, self.instance_id) is None


class MixedHistory(RandomHistory):
    """A group with clients of both protocols. `remaining` is the protocol of the clients
    that remain at the end: "both", "consumer" or "classic".
    """

    def __init__(self, seed: int, remaining: str = "both") -> None:
        super().__init__(seed)
        self.simulation = type(self.simulation)(
            consumer_session_timeout_ms=SESSION_MS, may_upgrade=True, may_downgrade=True
        )
        self.simulation.holds_writes = True
        self.simulation.set_topic("u", 3)
        self.remaining = remaining
        self.classic_share = self.rng.choice([0.5, 1.0])

    def step(self) -> None:
        """Take a step. Sometimes the group is migrated: members of the other protocol
        leave one after the other.
        """
        if self.rng.random() < 1 / 50:
            self.classic_share = self.rng.choice([0.0, 0.5, 1.0])
        super().step()

    def with_random_client(self, act: Callable[[Client], None]) -> None:
        unwanted = [client for client in self.clients if self.is_unwanted(client)]
        if unwanted and self.rng.random() < 0.05:
            self.rng.choice(unwanted).leave(-1)
        super().with_random_client(act)

    def is_unwanted(self, client: Client) -> bool:
        return self.classic_share == (0.0 if isinstance(client, ClassicClient) else 1.0)

    def add_client(self) -> None:
        if self.rng.random() >= self.classic_share:
            super().add_client()
            return
        if len(self.clients) >= MAX_CLIENTS:
            return
        self.number += 1
        used = {client.instance_id for client in self.clients}
        free = [name for name in ("s0", "s1") if name not in used]
        instance_id = self.rng.choice([None, None, *free])
        self.clients.append(
            ClassicClient(self, self.number, instance_id, self.rng.random() < 0.5)
        )

    def change_topics(self) -> None:
        """Change topics, but delete none. The classic protocol has no topic ids, so its
        members would continue to use a deleted topic after it was created again.
        """
        self.simulation.set_topic(self.rng.choice("tu"), self.rng.randrange(1, 7))

    def join_classic_member(self) -> None:
        """Do nothing, because members of the classic protocol are ordinary clients
        here.
        """

    def remove_classic_members(self) -> None:
        pass

    def cut_power(self) -> None:
        super().cut_power()
        for client in self.clients:
            if isinstance(client, ClassicClient):
                client.assignment = NO_PARTITIONS

    def end_faults(self) -> None:
        for client in self.clients:
            is_classic = isinstance(client, ClassicClient)
            if (self.remaining == "consumer" and is_classic) or (
                self.remaining == "classic" and not is_classic
            ):
                client.end()
        self.clients = [client for client in self.clients if not client.has_ended]
        super().end_faults()

    def may_commit(self, client: Client) -> bool:
        if isinstance(client, ClassicClient):
            committer = Committer(
                "g", client.generation, client.member_id, client.instance_id
            )
            error, _ = self.simulation.coordinator.check_commit(
                committer, self.simulation.now_ms
            )
            return error is None
        return super().may_commit(client)

    def check(self) -> None:
        found = self.simulation.coordinator.get("g")
        group = self.group
        if group is not None:
            super().check()
            assert found is not None and not found.members
            assert found.join_timer is None and found.sync_timer is None
            assert group.rejoins | group.syncs <= {
                name for name in group.members if group.is_classic(name)
            }
            return
        users: dict[Any, Client] = {}
        for client in self.clients:
            if (
                found is not None
                and found.state != "PreparingRebalance"
                and isinstance(client, ClassicClient)
            ):
                # A rebalance does not wait for a static member, and keeps it in the
                # group. Until its next response, the member uses its old partitions: a
                # weakness of the classic protocol.
                client.is_abandoned |= (
                    client.instance_id is not None
                    and client.generation != found.generation
                )
            if client.is_abandoned:
                continue
            if not client.is_member:
                assert not self.acts_as_member(client) or not self.may_commit(client), (
                    f"{client} is not a member, and commits"
                )
                continue
            for partition in client.owned:
                assert partition not in users, (
                    f"{client} and {users[partition]} use the same partition"
                )
                users[partition] = client

    def acts_as_member(self, client: Client) -> bool:
        if isinstance(client, ClassicClient):
            return client.generation >= 0
        return super().acts_as_member(client)

    def check_stable(self) -> None:
        if self.group is not None:
            super().check_stable()
            return
        found = self.simulation.coordinator.get("g")
        if not self.clients:
            assert found is None or not found.members
            return
        assert found is not None and found.state == "Stable"
        assert all(isinstance(client, ClassicClient) for client in self.clients)
        assert found.members.keys() == {client.member_id for client in self.clients}
        subscribed_topics = {
            name
            for client in self.clients
            if isinstance(client, ClassicClient)
            for name in client.topics
        }
        everything = sorted(
            (topic_id(name), number)
            for name in subscribed_topics
            for number in range(self.simulation.counts[name])
        )
        assert (
            sorted(part for client in self.clients for part in client.owned)
            == everything
        )
