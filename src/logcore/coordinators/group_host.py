"""The requests to groups that every host of the group coordinator accepts.

A host executes the effects of logcore.coordination: it answers requests, appends
records and sets timers. The hosts are
    local_groups: the threads of one process;
    shared_groups: several processes, with the state of each group in the registry;
    netshim.groups: the event loop of a broker;
    netshim.sharing: a broker that uses the groups of shared_groups.

This module does not implement the transitions of a group (logcore.coordination does).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from logcore.coordination.coordinator import Coordinator
from logcore.coordination.effects import Effect
from logcore.coordination.group_requests import (
    Committer,
    GroupError,
    Join,
    OffsetKey,
    Sync,
    Waiter,
)
from logcore.format.group_records import Committed

#: A transition, given the coordinator and the time.
GroupStep = Callable[[Coordinator, int], Iterable[Effect]]
#: A transition that replies to a waiter, given the coordinator, the waiter and the time.
GroupRequest = Callable[[Coordinator, Waiter, int], Iterable[Effect]]
#: How a host delivers the result of a request.
DoneT = TypeVar("DoneT")


def commit_request(
    committer: Committer,
    offsets: Mapping[OffsetKey, Committed],
    producer: tuple[int, int] | None,
) -> GroupRequest:
    """Return the transition of GroupHost.request_commit().

    The check and the append are one transition, so that no rebalance happens between
    them.
    """

    def commit(
        coordinator: Coordinator, waiter: Waiter, now_ms: int
    ) -> Iterable[Effect]:
        if producer is None:
            return coordinator.commit_as(committer, offsets, waiter, now_ms)
        return coordinator.commit_in_transaction_as(
            committer, producer, offsets, waiter
        )

    return commit


class GroupHost(ABC, Generic[DoneT]):
    """All groups of a host.

    The result of a request is delivered to `done`, possibly before the method returns.
    """

    @abstractmethod
    def request(self, group_id: str, request: GroupRequest, done: DoneT) -> None:
        """Run a transition of a group that replies, and deliver the reply to `done`."""

    @abstractmethod
    def step(self, group_id: str, step: GroupStep) -> None:
        """Run a transition of a group."""

    # -- members

    def join(self, request: Join, done: DoneT) -> None:
        """Add a member to a group.

        The result is available when all members have joined: Joined or JoinRefused.
        """
        self.request(
            request.group_id, lambda groups, *at: groups.join(request, *at), done
        )

    def sync(self, request: Sync, done: DoneT) -> None:
        """Send an assignment, or wait for it.

        The result is available when the leader has assigned: SyncResult or GroupError.
        """
        self.request(
            request.group_id, lambda groups, *at: groups.sync(request, *at), done
        )

    def heartbeat(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError | None:
        """Renew a session. Return None, or the error for the member."""
        found: list[GroupError | None] = []

        def heartbeat(coordinator: Coordinator, now_ms: int) -> list[Effect]:
            error, effects = coordinator.heartbeat(
                group_id, member_id, instance_id, generation, now_ms
            )
            found.append(error)
            return effects

        self.step(group_id, heartbeat)
        return found[-1]

    def leave(
        self, group_id: str, members: Sequence[tuple[str, str | None]]
    ) -> list[GroupError | None]:
        """Remove members, each a member id and an instance id. Return their errors."""
        results: list[GroupError | None] = []

        def leave(coordinator: Coordinator, now_ms: int) -> list[Effect]:
            results[:], effects = coordinator.leave(group_id, members, now_ms)
            return effects

        self.step(group_id, leave)
        return results

    # -- offsets; the result is None, or a GroupError

    def request_commit(
        self,
        committer: Committer,
        offsets: Mapping[OffsetKey, Committed],
        done: DoneT,
        producer: tuple[int, int] | None = None,
    ) -> None:
        """Commit offsets if the sender may. The result is available once they are durable.

        `producer` is the id and epoch of the producer whose open transaction the offsets
        belong to. Such offsets become valid when the transaction commits. Their
        committer need not be a member.
        """
        self.request(
            committer.group_id, commit_request(committer, offsets, producer), done
        )

    def request_delete(self, group_id: str, done: DoneT) -> None:
        """Delete a group without members, with its offsets."""
        self.request(
            group_id,
            lambda coordinator, waiter, _: coordinator.delete(group_id, waiter),
            done,
        )

    def request_delete_offsets(
        self, group_id: str, keys: Sequence[OffsetKey], done: DoneT
    ) -> None:
        """Delete committed offsets of a group."""
        self.request(
            group_id,
            lambda coordinator, waiter, _: coordinator.delete_offsets(
                group_id, keys, waiter
            ),
            done,
        )
