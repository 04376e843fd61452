"""A coordinator of consumer groups (KIP-848) with a simulated clock, disk and topics.

Records are durable at once. With `holds_writes`, they wait until finish_write() is called, as on a slow
disk. The durable records are kept batch by batch, so a power cut leaves a prefix of the
batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from logcore.coordination.classic_group import Group
from logcore.coordination.consumer_group import ConsumerGroup
from logcore.coordination.coordinator import Coordinator
from logcore.coordination.effects import (
    AppendRecords,
    CancelTimer,
    Effect,
    Reply,
    SetTimer,
)
from logcore.coordination.group_requests import (
    ConsumerHeartbeat,
    GroupError,
    HeartbeatAccepted,
    HeartbeatRefused,
    Join,
    Rules,
    Sync,
    Timeout,
)
from logcore.coordinators.stored_offsets import StoredGroups
from logcore.deadlines import Deadlines
from logcore.format.consumer_group_records import (
    Partitions,
    RecordKind,
    read_consumer_key,
    read_consumer_value,
)
from logcore.format.group_records import GroupRecord

T0 = 1_700_000_000_000
SESSION_MS = 45_000
REBALANCE_MS = 60_000


def topic_id(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def partitions_of(name: str, *numbers: int) -> Partitions:
    return frozenset((topic_id(name), number) for number in numbers)


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"no expression: {error}") from error
    return lambda name: compiled.fullmatch(name) is not None


class CoordinatorSimulation:
    """One coordinator; restart() starts it again from its durable records."""

    def __init__(self, **rules: Any) -> None:
        self.version = 1
        self.counts: dict[str, int] = {"t": 4}
        self.now_ms = T0
        self.holds_writes = False
        self.disk_error: GroupError | None = None
        self.batches: list[tuple[GroupRecord, ...]] = []
        self.waiters = 0
        self.ids = 0
        self.rules = Rules(
            min_session_timeout_ms=1, max_session_timeout_ms=1_800_000, **rules
        )
        self.start()

    def start(self) -> None:
        self.coordinator = Coordinator(self.rules, self._new_id, self, compile_pattern)
        self.timers: Deadlines[tuple[str, Timeout]] = Deadlines()
        self.stores: list[AppendRecords] = []
        self.replies: dict[int, Any] = {}
        self.events: list[Effect] = []

    def _new_id(self) -> str:
        self.ids += 1
        return f"{self.ids:03}"

    # -- topics

    def names(self) -> Iterable[str]:
        return sorted(self.counts)

    def id_and_count(self, name: str) -> tuple[bytes, int] | None:
        count = self.counts.get(name)
        return None if count is None else (topic_id(name), count)

    def set_topic(self, name: str, count: int) -> None:
        """Set the number of partitions of a topic. With 0, the topic is deleted."""
        self.counts[name] = count
        if not count:
            del self.counts[name]
        self.version += 1

    # -- effects

    def act(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(waiter, result):
                    assert waiter not in self.replies, "answered twice"
                    self.replies[waiter] = result  # type: ignore[index]
                case AppendRecords():
                    self.stores.append(effect)
                case SetTimer(group_id, timeout, at_ms):
                    self.timers.at(at_ms, (group_id, timeout))
                case CancelTimer(group_id, timeout):
                    assert (group_id, timeout) in self.timers, (
                        "the cancelled timer does not exist"
                    )
                    self.timers.cancel((group_id, timeout))
                case _:
                    self.events.append(effect)
        while self.stores and not self.holds_writes:
            self.finish_write()

    def finish_write(self) -> None:
        """Finish the write of the first waiting records, or fail it with `disk_error`."""
        effect = self.stores.pop(0)
        if self.disk_error is None:
            self.batches.append(effect.records)
        self.act(self.coordinator.stored(effect, self.disk_error, self.now_ms))

    def sleep(self, ms: int) -> None:
        end_ms = self.now_ms + ms
        while True:
            next_ms = self.timers.next_ms
            if next_ms is None or next_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, next_ms)
            for group_id, timeout in self.timers.due(self.now_ms):
                self.act(self.coordinator.timed_out(group_id, timeout, self.now_ms))
        self.now_ms = end_ms

    def restart(self) -> None:
        """End the process, and start another one from the durable records."""
        latest: dict[bytes, bytes | None] = {}
        for batch in self.batches:
            latest.update(batch)
        self.start()
        found = StoredGroups()
        found.add_records(latest)
        assert not found.skipped_count
        load = self.coordinator.load
        self.act(
            load(
                found.groups,
                found.offsets,
                self.now_ms,
                found.unstable,
                found.consumers,
            )
        )

    # -- requests

    def send(
        self,
        member_id: str,
        epoch: int,
        *,
        group: str = "g",
        may_omit_member_id: bool = False,
        **more: Any,
    ) -> int:
        """Send a heartbeat, and return its waiter. With epoch 0, the heartbeat contains
        the fields that a joining member must send.
        """
        if epoch == 0:
            more.setdefault("rebalance_timeout_ms", REBALANCE_MS)
            more.setdefault("owned", frozenset())
            if "pattern" not in more:
                more.setdefault("topic_names", ("t",))
        if isinstance(more.get("topic_names"), list):
            more["topic_names"] = tuple(more["topic_names"])
        self.waiters += 1
        waiter = self.waiters
        heartbeat = ConsumerHeartbeat(
            group_id=group, member_id=member_id, member_epoch=epoch, **more
        )
        self.act(
            self.coordinator.consumer_heartbeat(
                heartbeat, waiter, self.now_ms, may_omit_member_id=may_omit_member_id
            )
        )
        return waiter

    def join(self, member_id: str = "", **more: Any) -> int:
        """Send the request of a member that joins by the classic protocol, and return
        its waiter.
        """
        fields: dict[str, Any] = {
            "instance_id": None,
            "client_id": "c",
            "client_host": "/h",
            "protocol_type": "consumer",
            "protocols": (("range", b""),),
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 10_000,
            "requires_member_id": False,
            "may_skip_assignment": False,
        }
        fields |= {"group_id": "g", "member_id": member_id, **more}
        return self._ask(self.coordinator.join, Join(**fields))

    def sync(self, member_id: str, generation: int, **more: Any) -> int:
        """Send the SyncGroup request of a member of the classic protocol, and return
        its waiter.
        """
        fields: dict[str, Any] = {"instance_id": None, **more}
        return self._ask(
            self.coordinator.sync,
            Sync(group_id="g", member_id=member_id, generation=generation, **fields),
        )

    def _ask(
        self,
        transition: Callable[[Any, int, int], Iterable[Effect]],
        request: Join | Sync,
    ) -> int:
        self.waiters += 1
        waiter = self.waiters
        self.act(transition(request, waiter, self.now_ms))
        return waiter

    def heartbeat(
        self, member_id: str, epoch: int, **more: Any
    ) -> tuple[int, list[int] | None]:
        """Send a heartbeat. Return the member epoch in the response, and the numbers of
        the assigned partitions of topic t, or None if the response has no assignment.
        """
        result = self.replies[self.send(member_id, epoch, **more)]
        assert isinstance(result, HeartbeatAccepted), result
        assert result.member_id == member_id
        numbers = (
            None
            if result.assigned is None
            else sorted(number for _, number in result.assigned)
        )
        return result.member_epoch, numbers

    def refused(self, member_id: str, epoch: int, **more: Any) -> str:
        """Send a heartbeat, and return the name of the error in the response."""
        result = self.replies[self.send(member_id, epoch, **more)]
        assert isinstance(result, HeartbeatRefused), result
        assert result.text
        return result.error.name

    # -- observation

    def group(self, group_id: str = "g") -> Group:
        found = self.coordinator.get(group_id)
        assert found is not None
        return found

    def consumers(self, group_id: str = "g") -> ConsumerGroup:
        found = self.group(group_id).consumers
        assert found is not None
        return found

    def last_batch(self) -> list[tuple[Any, ...]]:
        """Return the records of the last batch: kind, name, value."""
        found: list[tuple[Any, ...]] = []
        for key, value in self.batches[-1]:
            record_key = read_consumer_key(key)
            if record_key is None:
                found.append((RecordKind.CLASSIC, "", value))
                continue
            found.append(
                (
                    record_key.kind,
                    record_key.name,
                    None
                    if value is None
                    else read_consumer_value(record_key.kind, value),
                )
            )
        return found
