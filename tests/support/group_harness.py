"""A broker's groups without sockets. The test sets the time, and decides when a sync of
the disk ends.

Each request and response is encoded and decoded in a version of the protocol, so a value
that this version cannot represent fails the test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import LogDir
from logcore.fs import OS
from logcore.metadata.filenames import OFFSETS_TOPIC
from netshim import wire
from netshim.groups import BrokerGroups
from netshim.handlers import HANDLERS
from netshim.scheduling import PendingResponse
from netshim.session import ClientSession
from netshim.settings import Settings
from netshim.sharing import SharedDirectoryGroups, SharedDirectoryTransactions
from netshim.state import BrokerState, Call
from netshim.transactions import TransactionHost

T0 = 1_700_000_000_000
SESSION_MS = 10_000
REBALANCE_MS = 20_000


#: Runs a test with an exclusive directory, and with a directory that other processes may
#: write.
with_each_kind_of_directory = pytest.mark.parametrize(
    "group_harness", [False, True], ids=["alone", "shared"], indirect=True
)


class _ClockedFS:
    """The real disk, with the clock of a group_harness."""

    def __init__(self, group_harness: GroupHarness) -> None:
        self._group_harness = group_harness

    def __getattr__(self, name: str) -> Any:
        return getattr(OS, name)

    def now_ms(self) -> int:
        return self._group_harness.now_ms

    def monotonic_ms(self) -> int:
        return self._group_harness.now_ms - T0


class GroupHarness:
    """A broker's groups over a directory.

    With holds_disk set, syncs complete when finish_disk() is called. With `is_shared`,
    other processes may write the directory too. In that case a session may expire up to
    `max_expiry_delay_ms` late, because inactivity is measured from one check to another.
    """

    def __init__(self, path: Path, *, is_shared: bool = False, **settings: Any) -> None:
        self.path = path
        self.is_shared = is_shared
        self.max_expiry_delay_ms = 100 if is_shared else 0
        self.settings = settings
        self.now_ms = T0
        self.session = ClientSession("broker", 9092, "10.0.0.1")
        self.holds_disk = False
        self.held: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.ids = 0
        self.start()

    def start(self) -> None:
        fs: Any = _ClockedFS(self) if self.is_shared else OS
        self.logdir: LogDir = logcore.open_dir(
            self.path, create=True, shared=self.is_shared, fs=fs
        )
        self.state = BrokerState(self.logdir, Settings(**self.settings), self._submit)
        self.groups: Any = (
            SharedDirectoryGroups(self.state)
            if self.is_shared
            else BrokerGroups(self.state, self._new_id)
        )
        self.state.groups = self.groups
        self.state.transactions = (
            SharedDirectoryTransactions(self.state)
            if self.is_shared
            else TransactionHost(self.state)
        )

    def __enter__(self) -> GroupHarness:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.finish_disk()
        self.groups.stop(self.now_ms)
        self.logdir.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def _new_id(self) -> str:
        self.ids += 1
        return f"{self.ids:04}"

    def _submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        if self.holds_disk:
            self.held.append((work, done))
        else:
            self._run(work, done)

    def _run(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            result = work()
        except Exception as error:
            result = error
        self.state.advance_clock(self.now_ms)
        done(result)

    def finish_disk(self) -> None:
        self.holds_disk = False
        while self.held:
            self._run(*self.held.pop(0))

    def sleep(self, ms: int) -> None:
        end = self.now_ms + ms
        while True:
            next_ms = self.state.timers.next_ms
            if next_ms is None or next_ms > end:
                break
            self.now_ms = max(self.now_ms, next_ms)
            self.state.timers.run(self.now_ms)
        self.now_ms = end

    def send(
        self, api: Any, version: int, request: Any, *, client_id: str = "cli"
    ) -> PendingResponse:
        """Send a request, and return its PendingResponse. Both are encoded and decoded."""
        frame = memoryview(wire.encode_request(api, version, 7, client_id, request))[4:]
        header = wire.decode_header(frame)
        call = Call(self.session, api.key, version, header.client_id, self.now_ms)
        result = HANDLERS[api.key](wire.decode_request(header, frame), call, self.state)
        reply = PendingResponse()

        def deliver(response: Any) -> None:
            if isinstance(response, BaseException):
                raise response
            pieces = b"".join(
                bytes(piece)
                for piece in wire.encode_response(api, version, 7, response)
            )
            reply.set(wire.decode_response(api, version, pieces[4:])[1])

        if isinstance(result, PendingResponse):
            result.then(deliver)
        else:
            deliver(result)
        return reply

    def ask(self, api: Any, version: int, **fields: Any) -> Any:
        """Return the response to a request. It must be available at once."""
        answer = self.send(api, version, api.Request(**fields))
        assert answer.is_set, f"{api.name} has no response yet"
        return answer.value

    # -- requests of clients

    def join(
        self,
        member_id: str = "",
        *,
        group: str = "g",
        version: int = 3,
        instance: str | None = None,
        protocols: dict[str, bytes] | None = None,
        kind: str = "consumer",
        session_ms: int = SESSION_MS,
        rebalance_ms: int = REBALANCE_MS,
    ) -> PendingResponse:
        request_type = wire.JOIN_GROUP.Request
        offered = {"range": b"x"} if protocols is None else protocols
        request = request_type(
            group_id=group,
            session_timeout_ms=session_ms,
            rebalance_timeout_ms=rebalance_ms,
            member_id=member_id,
            group_instance_id=instance,
            protocol_type=kind,
            protocols=[
                request_type.Protocol(name=name, metadata=data)
                for name, data in offered.items()
            ],
        )
        return self.send(wire.JOIN_GROUP, version, request)

    def sync(
        self,
        member_id: str,
        generation: int,
        assignments: dict[str, bytes] | None = None,
        *,
        group: str = "g",
        version: int = 3,
        **more: Any,
    ) -> PendingResponse:
        request_type = wire.SYNC_GROUP.Request
        request = request_type(
            group_id=group,
            generation_id=generation,
            member_id=member_id,
            assignments=[
                request_type.Assignment(member_id=name, assignment=data)
                for name, data in (assignments or {}).items()
            ],
            **more,
        )
        return self.send(wire.SYNC_GROUP, version, request)

    def heartbeat(
        self,
        member_id: str,
        generation: int,
        *,
        group: str = "g",
        instance: str | None = None,
    ) -> int:
        response = self.ask(
            wire.HEARTBEAT,
            3,
            group_id=group,
            generation_id=generation,
            member_id=member_id,
            group_instance_id=instance,
        )
        return int(response.error_code)

    def leave(self, *members: tuple[str, str | None], group: str = "g") -> list[int]:
        member_type = wire.LEAVE_GROUP.Request.Member
        leaving_members = [
            member_type(member_id=member_id, group_instance_id=instance)
            for member_id, instance in members
        ]
        return [
            member.error_code
            for member in self.ask(
                wire.LEAVE_GROUP, 3, group_id=group, members=leaving_members
            ).members
        ]

    def commit(
        self,
        offsets: dict[tuple[str, int], int],
        *,
        member_id: str = "",
        generation: int = -1,
        group: str = "g",
        version: int = 7,
        metadata: str | None = "",
        epoch: int = -1,
        **more: Any,
    ) -> PendingResponse:
        topic_type = wire.OFFSET_COMMIT.Request.Topic
        request = wire.OFFSET_COMMIT.Request(
            group_id=group,
            generation_id_or_member_epoch=generation,
            member_id=member_id,
            topics=[
                topic_type(
                    name=topic,
                    partitions=[
                        topic_type.Partition(
                            partition_index=partition,
                            committed_offset=offset,
                            committed_leader_epoch=epoch,
                            committed_metadata=metadata,
                        )
                    ],
                )
                for (topic, partition), offset in offsets.items()
            ],
            **more,
        )
        return self.send(wire.OFFSET_COMMIT, version, request)

    def committed(self, group: str = "g") -> dict[tuple[str, int], int]:
        response = self.ask(wire.OFFSET_FETCH, 5, group_id=group, topics=None)
        assert response.error_code == 0
        return {
            (topic.name, partition.partition_index): partition.committed_offset
            for topic in response.topics
            for partition in topic.partitions
        }

    def describe(self, group: str = "g") -> Any:
        (described,) = self.ask(wire.DESCRIBE_GROUPS, 4, groups=[group]).groups
        assert described.error_code == 0
        return described

    def form(
        self, count: int = 1, *, group: str = "g", **more: Any
    ) -> tuple[list[str], int]:
        """Form a stable group with this number of members, the first of which is the
        leader. Return the member ids and the generation.
        """
        first = self.join(group=group, **more).value
        ids = [first.member_id]
        while len(ids) < count:
            newcomer = self.join(group=group, **more)
            others = [self.join(member_id, group=group, **more) for member_id in ids]
            assert newcomer.is_set and all(other.is_set for other in others)
            ids.append(newcomer.value.member_id)
            first = others[0].value
        generation = first.generation_id
        follower_syncs = [
            self.sync(member_id, generation, group=group) for member_id in ids[1:]
        ]
        leader_sync = self.sync(
            ids[0], generation, {name: name.encode() for name in ids}, group=group
        )
        assert [
            answer.value.assignment for answer in (leader_sync, *follower_syncs)
        ] == [name.encode() for name in ids]
        return ids, generation

    def records(self, partition: int = 0) -> list[tuple[bytes | None, bytes | None]]:
        return [
            (record.key, record.value)
            for record in self.logdir.partition(OFFSETS_TOPIC, partition).read(0)
        ]


def code_of(answer: PendingResponse) -> int:
    assert answer.is_set
    if hasattr(answer.value, "error_code"):
        return int(answer.value.error_code)
    (code,) = {
        partition.error_code
        for topic in answer.value.topics
        for partition in topic.partitions
    }
    return int(code)


def form_static(
    group_harness: GroupHarness, version: int = 5, **more: Any
) -> tuple[str, str]:
    """Form a stable group of two static members in generation 2. Return the member ids
    of the leader and the follower.
    """
    first = group_harness.join(instance="a", version=version, **more).value.member_id
    second = group_harness.join(instance="b", version=version, **more)
    assert (
        len(
            group_harness.join(
                first, instance="a", version=version, **more
            ).value.members
        )
        == 2
    )
    follower = group_harness.sync(second.value.member_id, 2)
    group_harness.sync(first, 2, {first: b"1", second.value.member_id: b"2"})
    assert follower.value.assignment == b"2"
    return first, second.value.member_id
