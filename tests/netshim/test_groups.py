"""netshim.groups and its handlers, without sockets: time is a number, the disk is done when the test says so.

Requests and responses pass through their wire forms in the version that a client would use, so what a version cannot
say fails here too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crc32c
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import logcore
from logcore import LogDir
from logcore.coordination import group as machine
from logcore.format.grouprecords import (
    OFFSETS_TOPIC,
    Committed,
    StoredGroup,
    StoredMember,
    commit_key,
    commit_value,
    group_key,
    group_value,
)
from netshim import wire
from netshim.groups import Groups
from netshim.handlers import HANDLERS
from netshim.session import Session
from netshim.settings import Settings
from netshim.state import Call, State
from netshim.waiting import Answer
from netshim.wire import codes
from support import group_messages

T0 = 1_700_000_000_000
SESSION_MS = 10_000
REBALANCE_MS = 20_000
DAY_MS = 24 * 3_600_000


class Rig:
    """A broker's groups over a directory. With holds_disk set, syncs are done when finish_disk() is called."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path, self.settings = path, settings
        self.now_ms = T0
        self.session = Session("broker", 9092, "10.0.0.1")
        self.holds_disk = False
        self.held: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.ids = 0
        self.start()

    def start(self) -> None:
        self.logdir: LogDir = logcore.open_dir(self.path, create=True)
        self.state = State(self.logdir, Settings(**self.settings), self._submit)
        self.groups = self.state.groups = Groups(self.state, self._new_id)

    def __enter__(self) -> Rig:
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

    @staticmethod
    def _run(work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            result = work()
        except Exception as error:
            result = error
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

    def send(self, api: Any, version: int, request: Any, *, client_id: str = "cli") -> Answer:
        """The answer to a request, both in the form that the wire gives them."""
        frame = memoryview(wire.encode_request(api, version, 7, client_id, request))[4:]
        header = wire.decode_header(frame)
        call = Call(self.session, api.key, version, header.client_id, self.now_ms)
        result = HANDLERS[api.key](wire.decode_request(header, frame), call, self.state)
        reply = Answer()

        def told(response: Any) -> None:
            if isinstance(response, BaseException):
                raise response
            pieces = b"".join(bytes(piece) for piece in wire.encode_response(api, version, 7, response))
            reply.set(wire.decode_response(api, version, pieces[4:])[1])

        if isinstance(result, Answer):
            result.then(told)
        else:
            told(result)
        return reply

    def ask(self, api: Any, version: int, **fields: Any) -> Any:
        """The response to a request that does not have to wait."""
        answer = self.send(api, version, api.Request(**fields))
        assert answer.is_set, f"{api.name} waits"
        return answer.value

    # -- what clients send

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
    ) -> Answer:
        request_type = wire.JOIN_GROUP.Request
        offered = {"range": b"x"} if protocols is None else protocols
        request = request_type(
            group_id=group,
            session_timeout_ms=session_ms,
            rebalance_timeout_ms=rebalance_ms,
            member_id=member_id,
            group_instance_id=instance,
            protocol_type=kind,
            protocols=[request_type.Protocol(name=name, metadata=data) for name, data in offered.items()],
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
    ) -> Answer:
        request_type = wire.SYNC_GROUP.Request
        request = request_type(
            group_id=group,
            generation_id=generation,
            member_id=member_id,
            assignments=[
                request_type.Assignment(member_id=name, assignment=data) for name, data in (assignments or {}).items()
            ],
            **more,
        )
        return self.send(wire.SYNC_GROUP, version, request)

    def beat(self, member_id: str, generation: int, *, group: str = "g", instance: str | None = None) -> int:
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
        asked = [member_type(member_id=member_id, group_instance_id=instance) for member_id, instance in members]
        return [member.error_code for member in self.ask(wire.LEAVE_GROUP, 3, group_id=group, members=asked).members]

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
    ) -> Answer:
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

    def form(self, count: int = 1, *, group: str = "g", **more: Any) -> tuple[list[str], int]:
        """A Stable group of so many members, the first of them its leader: (ids, generation)."""
        first = self.join(group=group, **more).value
        ids = [first.member_id]
        while len(ids) < count:
            newcomer = self.join(group=group, **more)
            others = [self.join(member_id, group=group, **more) for member_id in ids]
            assert newcomer.is_set and all(other.is_set for other in others)
            ids.append(newcomer.value.member_id)
            first = others[0].value
        generation = first.generation_id
        parked = [self.sync(member_id, generation, group=group) for member_id in ids[1:]]
        lead = self.sync(ids[0], generation, {name: name.encode() for name in ids}, group=group)
        assert [answer.value.assignment for answer in (lead, *parked)] == [name.encode() for name in ids]
        return ids, generation

    def records(self, partition: int = 0) -> list[tuple[bytes | None, bytes | None]]:
        return [(record.key, record.value) for record in self.logdir.partition(OFFSETS_TOPIC, partition).read(0)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path / "data") as made:
        made.logdir.create_topic("orders", 3)
        made.logdir.create_topic("other", 1)
        yield made


def code_of(answer: Answer) -> int:
    assert answer.is_set
    if hasattr(answer.value, "error_code"):
        return int(answer.value.error_code)
    (code,) = {partition.error_code for topic in answer.value.topics for partition in topic.partitions}
    return int(code)


def subscription(*topics: str) -> bytes:
    value = wire.CONSUMER_PROTOCOL_SUBSCRIPTION.Value(topics=list(topics))
    return wire.encode_versioned(wire.CONSUMER_PROTOCOL_SUBSCRIPTION, 0, value)


# -- joining -------------------------------------------------------------------------------------------------------


def test_one_member_old_style(rig: Rig) -> None:
    joined = rig.join(version=0).value
    assert joined.member_id == "cli-0001" == joined.leader
    assert joined.generation_id == 1 and joined.protocol_name == "range"
    assert [(member.member_id, member.metadata) for member in joined.members] == [("cli-0001", b"x")]
    assert rig.describe().group_state == machine.COMPLETING
    assert rig.sync("cli-0001", 1, {"cli-0001": b"mine"}).value.assignment == b"mine"
    described = rig.describe()
    assert described.group_state == machine.STABLE and described.protocol_data == "range"
    (member,) = described.members
    assert (member.client_id, member.client_host, member.member_metadata, member.member_assignment) == (
        "cli",
        "/10.0.0.1",
        b"x",
        b"mine",
    )
    assert rig.beat("cli-0001", 1) == 0


def test_a_new_member_is_told_its_id_first(rig: Rig) -> None:
    answer = rig.join(version=4)
    assert code_of(answer) == codes.MEMBER_ID_REQUIRED
    member_id = answer.value.member_id
    assert rig.describe().group_state == machine.EMPTY
    joined = rig.join(member_id, version=9).value
    assert (joined.error_code, joined.member_id, joined.protocol_type) == (0, member_id, "consumer")
    assert rig.join(member_id, version=9).is_set  # asked again before it synced: told again
    assert rig.describe().group_state == machine.COMPLETING


def test_an_id_that_nobody_comes_back_with_is_forgotten(rig: Rig) -> None:
    member_id = rig.join(version=5).value.member_id
    assert code_of(rig.join(member_id, version=5, instance="i")) == codes.UNKNOWN_MEMBER_ID
    rig.sleep(SESSION_MS)
    assert code_of(rig.join(member_id, version=5)) == codes.UNKNOWN_MEMBER_ID
    assert rig.groups.get("g") is None
    assert rig.beat(member_id, 1, group="") == codes.INVALID_GROUP_ID


def test_a_pending_member_holds_up_a_rebalance_until_its_time_is_over(rig: Rig) -> None:
    ids, generation = rig.form(1)
    rig.join(version=5)
    newcomer = rig.join(version=3)
    again = rig.join(ids[0])
    assert not newcomer.is_set and not again.is_set
    rig.sleep(SESSION_MS)
    assert newcomer.value.generation_id == again.value.generation_id == generation + 1


def test_errors_of_joining_in_their_order(rig: Rig) -> None:
    assert code_of(rig.join("m", group="", session_ms=1)) == codes.INVALID_GROUP_ID
    assert code_of(rig.join("m", session_ms=99, kind="")) == codes.INVALID_SESSION_TIMEOUT
    assert code_of(rig.join("m", session_ms=1_800_001)) == codes.INVALID_SESSION_TIMEOUT
    assert code_of(rig.join("m", kind="")) == codes.UNKNOWN_MEMBER_ID  # no such group
    assert code_of(rig.join(kind="")) == codes.INCONSISTENT_GROUP_PROTOCOL
    assert code_of(rig.join(protocols={})) == codes.INCONSISTENT_GROUP_PROTOCOL
    assert rig.groups.get("g") is None
    rig.form(1)
    assert code_of(rig.join(kind="connect")) == codes.INCONSISTENT_GROUP_PROTOCOL
    assert code_of(rig.join(protocols={"other": b""})) == codes.INCONSISTENT_GROUP_PROTOCOL
    assert code_of(rig.join("nobody")) == codes.UNKNOWN_MEMBER_ID
    assert rig.join(protocols={"other": b""}, version=7).value.protocol_name is None
    assert rig.join(protocols={"other": b""}, version=6).value.protocol_name == ""
    assert code_of(rig.join(group="g" * 40_000, version=6)) == codes.INVALID_GROUP_ID
    assert code_of(rig.join(instance="i" * 40_000, version=6)) == codes.INVALID_REQUEST


def test_a_group_has_no_more_members_than_allowed(tmp_path: Path) -> None:
    with Rig(tmp_path, group_max_size=2) as rig:
        ids, generation = rig.form(2)
        refused = rig.join()
        assert code_of(refused) == codes.GROUP_MAX_SIZE_REACHED and refused.value.member_id == ""
        assert rig.beat(ids[0], generation) == 0
        assert rig.leave((ids[1], None)) == [0]
        newcomer = rig.join()
        third = rig.join()  # one place is taken by the newcomer, one by the member that has yet to rejoin
        assert not newcomer.is_set and not third.is_set
        assert code_of(rig.join(ids[0])) == codes.GROUP_MAX_SIZE_REACHED
        assert len(rig.describe().members) == 2


def test_members_vote_for_the_protocol(rig: Rig) -> None:
    first = rig.join(protocols={"a": b"1", "b": b"2", "c": b"3"}).value.member_id
    second = rig.join(protocols={"c": b"6", "b": b"5", "z": b""})
    rig.join(first, protocols={"a": b"1", "b": b"2", "c": b"3"})
    third = rig.join(protocols={"c": b"9", "b": b"8"})
    rig.join(second.value.member_id, protocols={"c": b"6", "b": b"5"})
    told = rig.join(first, protocols={"a": b"1", "b": b"2", "c": b"3"}).value
    assert told.protocol_name == third.value.protocol_name == "c"
    assert [member.metadata for member in told.members] == [b"3", b"6", b"9"]


def test_followers_are_not_told_of_the_others_and_wait_for_the_leader(rig: Rig) -> None:
    first = rig.join().value.member_id
    newcomer = rig.join()
    assert not newcomer.is_set
    assert rig.beat(first, 1) == codes.REBALANCE_IN_PROGRESS
    leader = rig.join(first).value
    assert leader.generation_id == newcomer.value.generation_id == 2
    assert leader.leader == newcomer.value.leader == first
    assert len(leader.members) == 2 and not newcomer.value.members
    second = newcomer.value.member_id
    follower = rig.sync(second, 2)
    assert not follower.is_set
    assert rig.sync(first, 2, {first: b"1", "stranger": b"?"}).value.assignment == b"1"
    assert follower.value.assignment == b""  # the leader forgot it


def test_syncs_are_checked(rig: Rig) -> None:
    ids, generation = rig.form(1)
    assert code_of(rig.sync(ids[0], 1, group="")) == codes.INVALID_GROUP_ID
    assert code_of(rig.sync(ids[0], 1, group="h")) == codes.UNKNOWN_MEMBER_ID
    assert code_of(rig.sync("nobody", generation)) == codes.UNKNOWN_MEMBER_ID
    assert code_of(rig.sync(ids[0], generation + 1)) == codes.ILLEGAL_GENERATION
    for wrong in ({"protocol_type": "connect"}, {"protocol_name": "other"}):
        assert code_of(rig.sync(ids[0], generation, version=5, **wrong)) == codes.INCONSISTENT_GROUP_PROTOCOL
    again = rig.sync(ids[0], generation, version=5, protocol_type="consumer", protocol_name="range").value
    assert (again.assignment, again.protocol_name) == (ids[0].encode(), "range")
    rig.join()
    assert code_of(rig.sync(ids[0], generation)) == codes.REBALANCE_IN_PROGRESS


def test_a_newcomer_ends_the_syncs_that_wait(rig: Rig) -> None:
    first = rig.join().value.member_id
    second = rig.join()
    rig.join(first)
    waiting = rig.sync(second.value.member_id, 2)
    third = rig.join()
    assert code_of(waiting) == codes.REBALANCE_IN_PROGRESS
    assert not third.is_set


def test_a_second_request_of_the_same_kind_takes_the_place_of_the_first(rig: Rig) -> None:
    first = rig.join().value.member_id
    newcomer = rig.join()
    rig.join(first)
    second = newcomer.value.member_id
    syncs = [rig.sync(second, 2), rig.sync(second, 2)]
    assert code_of(syncs[0]) == codes.REBALANCE_IN_PROGRESS and not syncs[1].is_set
    rig.sync(first, 2, {second: b"yes"})
    assert syncs[1].value.assignment == b"yes"
    joins = [rig.join(first), rig.join(first)]
    assert code_of(joins[0]) == codes.REBALANCE_IN_PROGRESS and not joins[1].is_set


def test_who_does_not_rejoin_in_time_is_dropped(rig: Rig) -> None:
    ids, generation = rig.form(3)
    newcomer = rig.join()
    again = rig.join(ids[1])
    for _ in range(4):  # the others only send heartbeats, which keeps their sessions and does not keep their places
        rig.sleep(REBALANCE_MS // 4)
        for member_id in (ids[0], ids[2]):
            expected = codes.REBALANCE_IN_PROGRESS if not again.is_set else codes.UNKNOWN_MEMBER_ID
            assert rig.beat(member_id, generation) == expected
    assert again.value.generation_id == generation + 1
    assert again.value.leader == ids[1]  # the leader did not come
    assert {member.member_id for member in again.value.members} == {ids[1], newcomer.value.member_id}


def test_who_never_syncs_is_dropped(rig: Rig) -> None:
    first = rig.join().value.member_id
    second = rig.join()
    rig.join(first)
    rig.sync(first, 2, {first: b"1"})
    for _ in range(5):
        rig.beat(first, 2), rig.beat(second.value.member_id, 2)
        rig.sleep(REBALANCE_MS // 5)
    assert rig.beat(second.value.member_id, 2) == codes.UNKNOWN_MEMBER_ID
    assert rig.beat(first, 2) == codes.REBALANCE_IN_PROGRESS


def test_a_silent_member_expires_and_the_others_rebalance(rig: Rig) -> None:
    ids, generation = rig.form(2)
    rig.sleep(SESSION_MS - 1)
    assert rig.beat(ids[0], generation) == 0
    rig.sleep(1)
    assert rig.beat(ids[1], generation) == codes.UNKNOWN_MEMBER_ID
    assert rig.beat(ids[0], generation) == codes.REBALANCE_IN_PROGRESS
    assert [member.member_id for member in rig.join(ids[0]).value.members] == [ids[0]]
    rig.sleep(SESSION_MS)
    described = rig.describe()
    assert described.group_state == machine.EMPTY and not described.members


def test_waiting_suspends_a_session(rig: Rig) -> None:
    ids, _ = rig.form(2)
    newcomer = rig.join()
    waiting = rig.join(ids[0], session_ms=200)
    for _ in range(2):  # the member that does not join again keeps its session, so that the rebalance waits for it
        rig.sleep(REBALANCE_MS // 2 - 1)
        assert rig.beat(ids[1], 2) == codes.REBALANCE_IN_PROGRESS
    rig.sleep(1)
    assert not waiting.is_set and not newcomer.is_set
    rig.sleep(1)
    assert waiting.value.error_code == 0 and newcomer.value.error_code == 0
    rig.sleep(200)  # its session began again with the answer
    assert rig.beat(ids[0], 3) == codes.UNKNOWN_MEMBER_ID


def test_new_members_are_not_waited_for_without_end(rig: Rig) -> None:
    rig.form(1, session_ms=1_800_000, rebalance_ms=1_800_000)
    newcomer = rig.join(rebalance_ms=1_800_000)
    rig.sleep(299_999)
    assert not newcomer.is_set
    rig.sleep(1)
    assert code_of(newcomer) == codes.UNKNOWN_MEMBER_ID


def test_a_leader_that_rejoins_begins_a_rebalance_and_a_follower_only_with_something_new(rig: Rig) -> None:
    ids, generation = rig.form(2)
    told = rig.join(ids[1]).value
    assert told.generation_id == generation and not told.members
    assert rig.beat(ids[0], generation) == 0
    changed = rig.join(ids[1], protocols={"range": b"new"})
    assert not changed.is_set
    assert rig.join(ids[0]).value.members[1].metadata == b"new"
    rig.sync(ids[0], generation + 1)
    leading = rig.join(ids[0])
    assert not leading.is_set and rig.beat(ids[1], generation + 1) == codes.REBALANCE_IN_PROGRESS


def test_the_first_members_of_a_group_wait_for_one_another(tmp_path: Path) -> None:
    with Rig(tmp_path, rebalance_delay_ms=3_000) as rig:
        first = rig.join()
        rig.sleep(2_000)
        second = rig.join()
        rig.sleep(2_999)
        assert not first.is_set and not second.is_set  # the newcomer extended the wait
        rig.sleep(1_001)
        assert first.value.generation_id == second.value.generation_id == 1
        late = [rig.join(group="h", rebalance_ms=5_000)]
        for _ in range(4):
            rig.sleep(1_900)
            late.append(rig.join(group="h", rebalance_ms=5_000))
        rig.sleep(1_000)
        assert late[0].value.generation_id == 1  # but not beyond the rebalance timeout


# -- leaving -------------------------------------------------------------------------------------------------------


def test_leaving(rig: Rig) -> None:
    ids, generation = rig.form(3)
    old = rig.ask(wire.LEAVE_GROUP, 1, group_id="g", member_id=ids[2])
    assert old.error_code == 0
    assert rig.beat(ids[0], generation) == codes.REBALANCE_IN_PROGRESS
    assert rig.leave((ids[2], None), (ids[1], None)) == [codes.UNKNOWN_MEMBER_ID, 0]
    assert rig.ask(wire.LEAVE_GROUP, 1, group_id="g", member_id="nobody").error_code == codes.UNKNOWN_MEMBER_ID
    assert rig.ask(wire.LEAVE_GROUP, 3, group_id="", members=[]).error_code == codes.INVALID_GROUP_ID
    assert rig.leave((ids[0], None), group="h") == [codes.UNKNOWN_MEMBER_ID]
    assert rig.leave((ids[0], None)) == [0]
    assert rig.describe().group_state == machine.EMPTY
    assert rig.records()[-1][0] == group_key("g")
    pending = rig.join(version=4).value.member_id
    assert rig.leave((pending, None)) == [0]
    assert code_of(rig.join(pending, version=4)) == codes.UNKNOWN_MEMBER_ID


def test_a_member_that_waits_is_told_that_it_left(rig: Rig) -> None:
    ids, _ = rig.form(2)
    waiting = rig.join(ids[0])
    assert rig.leave((ids[0], None)) == [0]
    assert code_of(waiting) == codes.UNKNOWN_MEMBER_ID


# -- static members ------------------------------------------------------------------------------------------------


def form_static(rig: Rig, version: int = 5, **more: Any) -> tuple[str, str]:
    """A Stable group of two static members in generation 2: ids of leader and follower."""
    first = rig.join(instance="a", version=version, **more).value.member_id
    second = rig.join(instance="b", version=version, **more)
    assert len(rig.join(first, instance="a", version=version, **more).value.members) == 2
    follower = rig.sync(second.value.member_id, 2)
    rig.sync(first, 2, {first: b"1", second.value.member_id: b"2"})
    assert follower.value.assignment == b"2"
    return first, second.value.member_id


def test_a_static_member_that_comes_back_takes_its_place_without_a_rebalance(rig: Rig) -> None:
    leader, follower = form_static(rig)
    back = rig.join(instance="b", version=5).value
    assert (back.error_code, back.generation_id, back.leader, back.members) == (0, 2, leader, [])
    assert back.member_id != follower and back.member_id.startswith("b-")
    assert rig.beat(leader, 2) == 0
    assert rig.beat(follower, 2, instance="b") == codes.FENCED_INSTANCE_ID
    assert code_of(rig.sync(follower, 2, group_instance_id="b")) == codes.FENCED_INSTANCE_ID
    assert code_of(rig.join(follower, instance="b", version=5)) == codes.FENCED_INSTANCE_ID
    assert rig.leave((follower, "b")) == [codes.FENCED_INSTANCE_ID]
    assert rig.sync(back.member_id, 2, group_instance_id="b").value.assignment == b"2"
    rig.restart()
    assert rig.beat(back.member_id, 2, instance="b") == 0


@pytest.mark.parametrize("version", [5, 8, 9])
def test_a_static_leader_that_comes_back_does_not_assign(rig: Rig, version: int) -> None:
    leader, _ = form_static(rig)
    back = rig.join(instance="a", version=version).value
    assert back.generation_id == 2
    if version < 9:
        assert back.leader == leader != back.member_id and not back.members
    else:
        assert back.skip_assignment and back.leader == back.member_id and len(back.members) == 2


def test_a_static_member_that_comes_back_with_another_protocol_rebalances(rig: Rig) -> None:
    more = {"protocols": {"range": b"", "sticky": b""}}
    leader, _ = form_static(rig, **more)
    back = rig.join(instance="b", version=5, protocols={"sticky": b""})
    assert not back.is_set
    assert rig.join(leader, instance="a", version=5, **more).value.protocol_name == "sticky"
    assert back.is_set


def test_a_static_member_that_comes_back_fences_the_one_that_waits(rig: Rig) -> None:
    leader, follower = form_static(rig)
    newcomer = rig.join()
    waiting = rig.join(follower, instance="b", version=5)
    back = rig.join(instance="b", version=5)
    assert code_of(waiting) == codes.FENCED_INSTANCE_ID
    rig.join(leader, instance="a", version=5)
    assert newcomer.value.generation_id == back.value.generation_id == 3
    parked = rig.sync(back.value.member_id, 3)
    again = rig.join(instance="b", version=5)
    assert code_of(parked) == codes.FENCED_INSTANCE_ID and not again.is_set


def test_a_static_member_stays_until_its_session_ends(rig: Rig) -> None:
    _, follower = form_static(rig, session_ms=60_000)
    newcomer = rig.join()
    rig.sleep(REBALANCE_MS - 1)
    waiting = rig.join(follower, instance="b", version=5, session_ms=60_000)
    rig.sleep(1)
    assert waiting.value.leader == follower
    assert {member.group_instance_id for member in waiting.value.members} == {"a", "b", None}
    assert newcomer.is_set


def test_a_group_of_static_members_waits_until_one_of_them_comes_back(rig: Rig) -> None:
    leader, follower = form_static(rig, session_ms=60_000, rebalance_ms=0)
    rig.join(rebalance_ms=2_000, version=3)
    rig.leave(("cli-0003", None))
    rig.sleep(5_000)
    assert rig.describe().group_state == machine.PREPARING
    assert {member.member_id for member in rig.describe().members} == {leader, follower}
    back = rig.join(follower, instance="b", version=5, session_ms=60_000, rebalance_ms=0)
    rig.sleep(1_000)
    assert back.value.leader == follower


def test_an_admin_removes_static_members(rig: Rig) -> None:
    leader, _ = form_static(rig)
    assert rig.leave(("", "b"), ("", "z"), ("", None)) == [0, codes.UNKNOWN_MEMBER_ID, codes.UNKNOWN_MEMBER_ID]
    assert [m.group_instance_id for m in rig.join(leader, instance="a", version=5).value.members] == ["a"]


def test_a_static_member_finds_its_place_in_a_full_group(tmp_path: Path) -> None:
    with Rig(tmp_path, group_max_size=2) as rig:
        form_static(rig)
        assert rig.join(instance="b", version=5).value.error_code == 0
        assert code_of(rig.join(instance="c", version=5)) == codes.GROUP_MAX_SIZE_REACHED


# -- committing ----------------------------------------------------------------------------------------------------


def test_commits_come_back_as_they_were_given(rig: Rig) -> None:
    assert code_of(rig.commit({("orders", 0): 5}, metadata="é\U0001f600", epoch=3)) == 0
    assert code_of(rig.commit({("orders", 2): 0}, metadata=None)) == 0
    topic_type = wire.OFFSET_FETCH.Request.Topic
    asked = [topic_type(name="orders", partition_indexes=[0, 1, 2, 9]), topic_type(name="none", partition_indexes=[0])]
    expected = [
        [(0, 5, 3, "é\U0001f600", 0), (1, -1, -1, "", 0), (2, 0, -1, "", 0), (9, -1, -1, "", 0)],
        [(0, -1, -1, "", 0)],
    ]

    def facts(topics: Any) -> Any:
        return [
            [
                (p.partition_index, p.committed_offset, p.committed_leader_epoch, p.metadata, p.error_code)
                for p in topic.partitions
            ]
            for topic in topics
        ]

    assert facts(rig.ask(wire.OFFSET_FETCH, 5, group_id="g", topics=asked).topics) == expected
    group_type = wire.OFFSET_FETCH.Request.Group
    asked8 = [group_type.Topic(name=topic.name, partition_indexes=topic.partition_indexes) for topic in asked]
    response = rig.ask(
        wire.OFFSET_FETCH,
        9,
        groups=[
            group_type(group_id="g", topics=asked8),
            group_type(group_id="nobody", topics=None),
            group_type(group_id="g", topics=None),
        ],
        require_stable=True,
    )
    assert [group.group_id for group in response.groups] == ["g", "nobody", "g"]
    assert facts(response.groups[0].topics) == expected
    assert response.groups[1].topics == []
    assert [len(partitions) for partitions in facts(response.groups[2].topics)] == [2]
    assert rig.committed("nobody") == {}


def test_P59_errors_of_commits(rig: Rig) -> None:
    assert code_of(rig.commit({("orders", 0): 1}, group="x" * 32_760)) == codes.INVALID_GROUP_ID
    assert code_of(rig.commit({("orders", 0): 1}, generation=1)) == codes.ILLEGAL_GENERATION
    assert code_of(rig.commit({("orders", 0): 1}, generation=1, version=9)) == codes.GROUP_ID_NOT_FOUND
    assert code_of(rig.commit({("orders", 3): 1}, group="")) == codes.UNKNOWN_TOPIC_OR_PARTITION
    assert code_of(rig.commit({("nothing", 0): 1})) == codes.UNKNOWN_TOPIC_OR_PARTITION
    assert code_of(rig.commit({("orders", 0): 1}, metadata="x" * 4_097)) == codes.OFFSET_METADATA_TOO_LARGE
    assert code_of(rig.commit({("orders", 0): 1}, metadata="x" * 4_096)) == 0
    ids, generation = rig.form(1)
    assert code_of(rig.commit({("orders", 0): 1})) == codes.UNKNOWN_MEMBER_ID  # only while nobody is in the group
    assert code_of(rig.commit({("orders", 0): 1}, member_id="x", generation=1)) == codes.UNKNOWN_MEMBER_ID
    wrong = rig.commit({("orders", 0): 1}, member_id=ids[0], generation=generation + 1)
    assert code_of(wrong) == codes.ILLEGAL_GENERATION
    fenced = rig.commit({("orders", 0): 1}, member_id=ids[0], generation=generation, group_instance_id="i")
    assert code_of(fenced) == codes.UNKNOWN_MEMBER_ID
    mixed = rig.commit({("orders", 1): 7, ("nothing", 0): 1}, member_id=ids[0], generation=generation).value
    assert [topic.partitions[0].error_code for topic in mixed.topics] == [0, codes.UNKNOWN_TOPIC_OR_PARTITION]
    newcomer = rig.join()
    during = rig.commit({("orders", 1): 8}, member_id=ids[0], generation=generation)
    assert code_of(during) == 0  # what it has done before it rejoins
    rig.join(ids[0])
    late = rig.commit({("orders", 1): 9}, member_id=newcomer.value.member_id, generation=generation + 1)
    assert code_of(late) == codes.REBALANCE_IN_PROGRESS
    assert rig.committed() == {("orders", 0): 1, ("orders", 1): 8}


def test_a_commit_renews_the_session(rig: Rig) -> None:
    ids, generation = rig.form(1)
    for _ in range(5):
        rig.sleep(SESSION_MS - 1)
        assert code_of(rig.commit({("orders", 0): 1}, member_id=ids[0], generation=generation)) == 0
    assert rig.beat(ids[0], generation) == 0


def test_P60_a_commit_is_answered_and_seen_when_it_is_on_disk(rig: Rig) -> None:
    rig.commit({("orders", 0): 1})
    rig.holds_disk = True
    second = rig.commit({("orders", 0): 2})
    third = rig.commit({("orders", 0): 3})
    assert not second.is_set and not third.is_set
    assert rig.committed() == {("orders", 0): 1}
    rig.finish_disk()
    assert code_of(second) == code_of(third) == 0
    assert rig.committed() == {("orders", 0): 3}


def test_an_assignment_is_given_out_when_it_is_on_disk(rig: Rig) -> None:
    first = rig.join().value.member_id
    rig.join(group="h")  # makes the topic
    rig.sync("cli-0002", 1, group="h")
    rig.holds_disk = True
    answer = rig.sync(first, 1, {first: b"1"})
    assert not answer.is_set and rig.describe().group_state == machine.COMPLETING
    newcomer = rig.join()  # comes first, so the assignment is of no use any more
    assert code_of(answer) == codes.REBALANCE_IN_PROGRESS
    rig.finish_disk()
    assert rig.describe().group_state == machine.PREPARING and not newcomer.is_set


def test_an_assignment_of_an_older_generation_is_not_given_out(rig: Rig) -> None:
    """It comes to the disk when others have joined since, and a newer assignment is being made."""
    leader = rig.join().value.member_id
    rig.holds_disk = True
    first = rig.sync(leader, 1, {leader: b"all"})
    newcomer = rig.join()
    assert code_of(first) == codes.REBALANCE_IN_PROGRESS
    assert rig.join(leader).value.generation_id == newcomer.value.generation_id == 2
    follower = rig.sync(newcomer.value.member_id, 2)
    rig.finish_disk()
    assert not follower.is_set
    rig.sync(leader, 2, {leader: b"half", newcomer.value.member_id: b"other half"})
    assert follower.value.assignment == b"other half"


def test_a_disk_that_fails_is_told_as_something_to_try_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.form(1)
    rig.commit({("orders", 0): 1}, group="h")
    log = rig.logdir.partition(OFFSETS_TOPIC, 0)

    def full(*_: Any, **__: Any) -> Any:
        raise logcore.DiskFullError("no space left", path="x")

    with monkeypatch.context() as patch:
        patch.setattr(type(log), "append_many", full)
        assert code_of(rig.commit({("orders", 0): 2}, group="h")) == codes.COORDINATOR_NOT_AVAILABLE
        assert code_of(rig.commit({("orders", 0): 2}, group="new")) == codes.COORDINATOR_NOT_AVAILABLE
        assert rig.groups.get("new") is None
        member_id = rig.join(group="j").value.member_id
        assert code_of(rig.sync(member_id, 1, group="j")) == codes.COORDINATOR_NOT_AVAILABLE
        assert rig.describe("j").group_state == machine.PREPARING
    assert rig.committed("h") == {("orders", 0): 1}
    assert rig.join(member_id, group="j").value.generation_id == 2
    assert code_of(rig.sync(member_id, 2, group="j")) == 0

    with monkeypatch.context() as patch:
        patch.setattr(type(log), "flush", full)
        assert code_of(rig.commit({("orders", 0): 3}, group="h")) == codes.COORDINATOR_NOT_AVAILABLE
        assert rig.committed("h") == {("orders", 0): 1}


def test_a_static_member_is_put_back_when_its_return_cannot_be_stored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, follower = form_static(rig)
    log = rig.logdir.partition(OFFSETS_TOPIC, 0)

    def full(*_: Any, **__: Any) -> Any:
        raise logcore.DiskFullError("no space left", path="x")

    with monkeypatch.context() as patch:
        patch.setattr(type(log), "append_many", full)
        assert code_of(rig.join(instance="b", version=5)) == codes.COORDINATOR_NOT_AVAILABLE
    assert rig.beat(follower, 2, instance="b") == 0


# -- what is stored ------------------------------------------------------------------------------------------------


def test_a_restart_is_not_noticed_by_who_comes_back_in_time(rig: Rig) -> None:
    ids, generation = rig.form(2)
    rig.commit({("orders", 1): 7}, member_id=ids[0], generation=generation, metadata="m", epoch=2)
    rig.commit({("orders", 0): 9}, group="simple")
    before = rig.describe()
    rig.restart()
    assert rig.describe() == before
    assert rig.committed() == {("orders", 1): 7}
    assert rig.committed("simple") == {("orders", 0): 9}
    assert rig.beat(ids[0], generation) == rig.beat(ids[1], generation) == 0
    assert rig.sync(ids[1], generation).value.assignment == ids[1].encode()
    assert code_of(rig.commit({("orders", 1): 8}, member_id=ids[1], generation=generation)) == 0
    rig.sleep(SESSION_MS)
    assert rig.describe().group_state == machine.EMPTY
    rig.restart()
    assert rig.describe().group_state == machine.EMPTY
    assert rig.join().value.generation_id == generation + 2
    assert rig.committed() == {("orders", 1): 8}


def test_a_member_that_does_not_come_back_after_a_restart_expires(rig: Rig) -> None:
    rig.form()
    rig.restart()
    assert rig.describe().group_state == "Stable"
    rig.sleep(SESSION_MS)
    assert rig.describe().group_state == "Empty"


def test_requests_wait_while_what_is_stored_is_read(rig: Rig) -> None:
    ids, generation = rig.form(1)
    rig.restart()
    rig.holds_disk = True
    answers = [
        rig.send(wire.HEARTBEAT, 3, wire.HEARTBEAT.Request(group_id="g", generation_id=generation, member_id=ids[0])),
        rig.commit({("orders", 0): 1}, member_id=ids[0], generation=generation),
        rig.send(wire.LIST_GROUPS, 4, wire.LIST_GROUPS.Request()),
    ]
    assert not any(answer.is_set for answer in answers) and len(rig.held) == 1
    rig.finish_disk()
    assert code_of(answers[0]) == code_of(answers[1]) == 0
    assert [group.group_id for group in answers[2].value.groups] == ["g"]


def test_what_cannot_be_read_is_told_as_something_to_try_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.form(1)
    rig.restart()

    def damaged(*_: Any, **__: Any) -> Any:
        raise logcore.CorruptLogError("damaged", path="x")

    with monkeypatch.context() as patch:
        patch.setattr(LogDir, "partition", damaged)
        topic = wire.OFFSET_FETCH.Request.Topic(name="orders", partition_indexes=[0])
        group_type = wire.OFFSET_FETCH.Request.Group
        assert code_of(rig.join(version=7)) == codes.COORDINATOR_NOT_AVAILABLE
        assert code_of(rig.sync("m", 1)) == codes.COORDINATOR_NOT_AVAILABLE
        assert rig.beat("m", 1) == codes.COORDINATOR_NOT_AVAILABLE
        assert code_of(rig.commit({("orders", 0): 1})) == codes.COORDINATOR_NOT_AVAILABLE
        old = rig.send(wire.OFFSET_FETCH, 1, wire.OFFSET_FETCH.Request(group_id="g", topics=[topic]))
        assert old.value.topics[0].partitions[0].error_code == codes.COORDINATOR_NOT_AVAILABLE
        asked = group_type(group_id="g", topics=None)
        for answer in (
            rig.ask(wire.OFFSET_FETCH, 7, group_id="g", topics=[topic]),
            rig.ask(wire.OFFSET_FETCH, 8, groups=[asked]).groups[0],
            rig.ask(wire.LEAVE_GROUP, 3, group_id="g", members=[]),
            rig.ask(wire.DESCRIBE_GROUPS, 5, groups=["g"]).groups[0],
            rig.ask(wire.LIST_GROUPS, 5),
            rig.ask(wire.DELETE_GROUPS, 2, groups_names=["g"]).results[0],
            rig.ask(wire.OFFSET_DELETE, 0, group_id="g", topics=[]),
        ):
            assert answer.error_code == codes.COORDINATOR_NOT_AVAILABLE
    assert rig.describe().group_state == machine.STABLE


def test_records_of_other_kinds_and_versions_are_passed_over(rig: Rig) -> None:
    rig.commit({("orders", 0): 1})
    log = rig.logdir.partition(OFFSETS_TOPIC, 0)
    v4 = bytes.fromhex("0004000000000000001d00000004026d0000018bcfe5680000")
    log.append_many(
        [
            (b"\0\3\0\1g", b"\0\0\0\0\0\1\0"),
            (b"\0\x63new", b"?"),
            (b"", b""),
            (b"\0\1\0\1g\0\6orders\0\0\0\1", b"\0\x09future"),
            (b"\0\1\0\1g\0\6or", b"cut"),
            (b"\0\2\0\1h", b"\0\3cut"),
            (commit_key("v4", "orders", 0), v4),
            (b"\0\0" + commit_key("v0", "orders", 0)[2:], b"\0\0" + bytes(7) + b"\5\0\1m" + bytes(8)),
            (b"\0\0" + commit_key("g", "orders", 0)[2:], b"\0\0" + bytes(7) + b"\5\0\1m" + bytes(8)),
        ]
    )
    before = rig.records()
    rig.restart()
    assert rig.committed() == {("orders", 0): 1}
    assert rig.committed("v4") == {("orders", 0): 29}
    assert rig.committed("v0") == {("orders", 0): 5}
    assert rig.records() == before


def test_a_group_record_without_a_rebalance_timeout(rig: Rig) -> None:
    value_type = group_messages.GROUP_METADATA_VALUE.Value
    member = value_type.Member(
        member_id="m", client_id="c", client_host="/h", session_timeout=777, subscription=b"s", assignment=b"a"
    )
    value = value_type(protocol_type="consumer", generation=4, protocol="range", leader="m", members=[member])
    rig.logdir.create_topic(OFFSETS_TOPIC)
    log = rig.logdir.partition(OFFSETS_TOPIC, 0)
    log.append(wire.encode_versioned(group_messages.GROUP_METADATA_VALUE, 0, value), key=group_key("old"))
    assert rig.beat("m", 4, group="old") == 0
    group = rig.groups.get("old")
    assert group is not None and group.members["m"].rebalance_timeout_ms == 777
    rig.sleep(777)
    assert rig.describe("old").group_state == machine.EMPTY


def test_a_stored_leader_that_is_no_member(rig: Rig) -> None:
    member = StoredMember(
        member_id="m", client_id="c", client_host="/h", session_timeout_ms=777, rebalance_timeout_ms=1
    )
    value = StoredGroup(protocol_type="consumer", generation=4, protocol=None, leader="x", members=(member,))
    rig.logdir.create_topic(OFFSETS_TOPIC)
    rig.logdir.partition(OFFSETS_TOPIC, 0).append(group_value(value), key=group_key("g"))
    assert rig.beat("m", 4) == 0
    assert code_of(rig.join("m")) == codes.INCONSISTENT_GROUP_PROTOCOL
    group = rig.groups.get("g")
    assert group is not None and group.leader == "m"


def test_a_group_that_no_record_can_hold(rig: Rig) -> None:
    """As Kafka says it: an error that is not worth repeating; a commit cannot be that large."""
    member_id = rig.join(protocols={"range": b"x" * 2_000_000}).value.member_id
    assert code_of(rig.sync(member_id, 1, {member_id: b"1"})) == codes.UNKNOWN_SERVER_ERROR
    assert rig.beat(member_id, 1) == codes.REBALANCE_IN_PROGRESS


def test_transactional_commits_of_others_count_when_they_are_committed(tmp_path: Path) -> None:
    """As Kafka loads them: a commit counts from where it stands, an aborted or open one not at all."""

    def commit(producer_id: int, partition: int, offset: int) -> bytes:
        record = commit_key("g", "orders", partition), commit_value(Committed(offset, -1, "", T0))
        return batch_of(record, producer_id, 0 if producer_id < 0 else TRANSACTIONAL)

    def marker(producer_id: int, kind: int) -> bytes:
        return batch_of((b"\0\0" + kind.to_bytes(2, "big"), bytes(6)), producer_id, TRANSACTIONAL | CONTROL)

    batches = [
        *(commit(-1, 0, 1), commit(-1, 1, 1), commit(-1, 2, 1)),
        *(commit(1, 0, 10), commit(2, 1, 11), commit(3, 2, 12)),
        commit(-1, 0, 20),
        *(marker(1, 1), marker(2, 0)),
        *(commit(4, 2, 14), marker(4, 1)),
        *(commit(5, 1, 15), commit(-1, 3, 30)),
    ]
    directory = tmp_path / f"{OFFSETS_TOPIC}-0"
    directory.mkdir()
    stored = b"".join(offset.to_bytes(8, "big") + batch[8:] for offset, batch in enumerate(batches))
    (directory / f"{0:020}.log").write_bytes(stored)
    with Rig(tmp_path) as rig:
        expected = {("orders", 0): 20, ("orders", 1): 1, ("orders", 2): 14, ("orders", 3): 30}
        assert rig.committed() == expected
        for (topic, partition), offset in expected.items():
            assert rig.logdir.committed_offsets(topic, partition) == {"g": offset}, "retention gets the same answer"


TRANSACTIONAL, CONTROL = 0x10, 0x20


def batch_of(record: tuple[bytes, bytes], producer_id: int, attributes: int) -> bytes:
    key, value = record
    body = b"\0" + zigzag(0) + zigzag(0) + zigzag(len(key)) + key + zigzag(len(value)) + value + zigzag(0)
    tail = (
        attributes.to_bytes(2, "big")
        + bytes(4)
        + T0.to_bytes(8, "big") * 2
        + producer_id.to_bytes(8, "big", signed=True)
        + (0 if producer_id >= 0 else -1).to_bytes(2, "big", signed=True)
        + (-1 if producer_id < 0 or attributes & CONTROL else 0).to_bytes(4, "big", signed=True)
        + (1).to_bytes(4, "big")
        + zigzag(len(body))
        + body
    )
    head = bytes(8) + (len(tail) + 9).to_bytes(4, "big") + bytes(4) + b"\2"
    return head + crc32c.crc32c(tail).to_bytes(4, "big") + tail


def zigzag(number: int) -> bytes:
    value = number << 1 if number >= 0 else (-number << 1) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def test_groups_are_spread_over_the_partitions_that_there_are(tmp_path: Path) -> None:
    with Rig(tmp_path, offsets_partitions=50) as rig:
        rig.logdir.create_topic("orders")
        rig.commit({("orders", 0): 3}, group="my-group")
        assert rig.records(12)[0][0] == commit_key("my-group", "orders", 0)
        rig.settings["offsets_partitions"] = 1
        rig.restart()
        rig.commit({("orders", 0): 4}, group="my-group")
        assert len(rig.records(12)) == 2
        assert rig.logdir.describe_topic(OFFSETS_TOPIC).overrides == {
            "cleanup.policy": "compact",
            "segment.bytes": "104857600",
            "compression.type": "producer",
        }


# -- deleting and expiring -----------------------------------------------------------------------------------------


def test_deleting_groups(rig: Rig) -> None:
    ids, _ = rig.form(1)
    rig.commit({("orders", 0): 1}, member_id=ids[0], generation=1)
    rig.commit({("orders", 0): 2}, group="other")

    def delete(*names: str) -> list[tuple[str, int]]:
        results = rig.ask(wire.DELETE_GROUPS, 2, groups_names=list(names)).results
        return [(result.group_id, result.error_code) for result in results]

    assert delete("g", "nobody") == [("g", codes.NON_EMPTY_GROUP), ("nobody", codes.GROUP_ID_NOT_FOUND)]
    assert delete() == []
    rig.leave((ids[0], None))
    rig.join(version=4)  # somebody who was told an id does not keep it
    assert delete("g") == [("g", 0)]
    assert rig.records()[-2:] == [(commit_key("g", "orders", 0), None), (group_key("g"), None)]
    for _ in range(2):
        assert rig.committed() == {}
        assert rig.describe().group_state == machine.DEAD
        assert [group.group_id for group in rig.ask(wire.LIST_GROUPS, 0).groups] == ["other"]
        rig.restart()
    assert rig.join().value.generation_id == 1


def test_what_is_committed_while_a_group_is_deleted_goes_with_it(rig: Rig) -> None:
    rig.commit({("orders", 0): 1})
    rig.holds_disk = True
    commit = rig.commit({("orders", 1): 1})
    deleted = rig.send(wire.DELETE_GROUPS, 2, wire.DELETE_GROUPS.Request(groups_names=["g"]))
    again = rig.commit({("orders", 2): 5})
    rig.finish_disk()
    assert code_of(commit) == code_of(again) == 0 and deleted.value.results[0].error_code == 0
    for _ in range(2):
        assert rig.committed() == {("orders", 2): 5}
        rig.restart()


def delete_offsets(rig: Rig, **topics: list[int]) -> Any:
    topic_type = wire.OFFSET_DELETE.Request.Topic
    response = rig.ask(
        wire.OFFSET_DELETE,
        0,
        group_id="g",
        topics=[
            topic_type(name=name, partitions=[topic_type.Partition(partition_index=number) for number in numbers])
            for name, numbers in topics.items()
        ],
    )
    if response.error_code:
        return response.error_code
    return [partition.error_code for topic in response.topics for partition in topic.partitions]


def test_deleting_offsets(rig: Rig) -> None:
    assert delete_offsets(rig, orders=[0]) == codes.GROUP_ID_NOT_FOUND
    rig.commit({("orders", 0): 1, ("orders", 1): 2, ("other", 0): 3})
    assert delete_offsets(rig, orders=[0, 2, 9], nothing=[0]) == [0, 0, 3, 3]
    assert rig.committed() == {("orders", 1): 2, ("other", 0): 3}
    rig.form(1, protocols={"range": subscription("other")})
    assert delete_offsets(rig, orders=[1], other=[0]) == [0, codes.GROUP_SUBSCRIBED_TO_TOPIC]
    for _ in range(2):
        assert rig.committed() == {("other", 0): 3}
        rig.restart()


def test_offsets_of_a_group_that_does_not_tell_its_topics_stay(rig: Rig) -> None:
    rig.commit({("orders", 0): 1})
    rig.form(1, protocols={"range": b"no subscription"})
    assert delete_offsets(rig, orders=[0]) == [codes.GROUP_SUBSCRIBED_TO_TOPIC]
    rig.leave(("cli-0001", None))
    rig.form(1, kind="connect")
    assert delete_offsets(rig, orders=[0]) == codes.NON_EMPTY_GROUP


def test_deleting_a_topic_deletes_what_was_committed_for_it(rig: Rig) -> None:
    rig.commit({("orders", 0): 1, ("other", 0): 3})
    rig.restart()  # also when nothing was asked of groups before
    rig.holds_disk = True
    rig.groups.topics_deleted({"orders", "third"}, rig.now_ms)
    rig.finish_disk()
    assert rig.committed() == {("other", 0): 3}
    rig.holds_disk = True
    rig.commit({("orders", 1): 1})
    rig.groups.topics_deleted({"orders"}, rig.now_ms)
    late = rig.commit({("orders", 2): 1})
    rig.finish_disk()
    assert code_of(late) == 0
    for _ in range(2):
        assert rig.committed() == {("other", 0): 3, ("orders", 2): 1}
        rig.restart()


def test_deleting_the_topic_of_offsets_forgets_all_groups(rig: Rig) -> None:
    rig.form(1)
    parked = rig.join()
    rig.logdir.delete_topic(OFFSETS_TOPIC)
    rig.groups.topics_deleted({OFFSETS_TOPIC}, rig.now_ms)
    assert code_of(parked) == codes.NOT_COORDINATOR
    assert rig.describe().group_state == machine.DEAD
    assert code_of(rig.commit({("orders", 0): 1})) == 0
    assert rig.committed() == {("orders", 0): 1}
    rig.sleep(10 * REBALANCE_MS)


def test_offsets_expire_a_week_after_the_last_member_left(rig: Rig) -> None:
    ids, generation = rig.form(1, session_ms=1_800_000)
    rig.commit({("orders", 0): 1}, member_id=ids[0], generation=generation)
    for _ in range(8 * 48):
        rig.sleep(1_800_000)
        rig.beat(ids[0], generation)
        if rig.describe().group_state != machine.STABLE:
            break
        rig.beat(ids[0], generation)
    assert rig.committed() == {("orders", 0): 1}
    rig.leave((ids[0], None))
    rig.sleep(7 * DAY_MS - 600_000)
    assert rig.committed() == {("orders", 0): 1}
    rig.sleep(1_200_000)
    assert rig.committed() == {} and rig.describe().group_state == machine.DEAD
    rig.restart()
    assert rig.committed() == {} and rig.describe().group_state == machine.DEAD


def test_what_else_expires(rig: Rig) -> None:
    """Simple commits by their own time, with a retention asked for by that, topics nobody subscribes to any more."""
    rig.commit({("orders", 0): 1}, group="simple")
    rig.commit({("orders", 0): 1}, group="brief", version=2, retention_time_ms=DAY_MS)
    rig.commit({("orders", 0): 1, ("other", 0): 1}, group="mixed")
    rig.restart()
    rig.join(group="mixed", protocols={"range": subscription("other")}, session_ms=1_800_000)
    rig.sync("cli-0001", 1, group="mixed")

    def pass_days(days: int) -> None:
        for _ in range(days * 72):
            rig.sleep(1_200_000)
            rig.beat("cli-0001", 1, group="mixed")

    pass_days(2)
    assert rig.committed("simple") and not rig.committed("brief")
    rig.commit({("orders", 1): 1}, group="simple")
    pass_days(6)
    assert rig.committed("simple") == {("orders", 1): 1}
    assert rig.committed("mixed") == {("other", 0): 1}
    rig.join(group="mixed", protocols={"range": b"?"})
    assert rig.committed("mixed") == {("other", 0): 1}


# -- what admin tools ask ------------------------------------------------------------------------------------------


def test_find_coordinator(rig: Rig) -> None:
    def one(version: int, key: str, key_type: int) -> tuple[int, int, str, int]:
        if version < 4:
            found = rig.ask(wire.FIND_COORDINATOR, version, key=key, key_type=key_type)
        else:
            response = rig.ask(wire.FIND_COORDINATOR, version, coordinator_keys=[key], key_type=key_type)
            (found,) = response.coordinators
            assert found.key == key
        return found.error_code, found.node_id, found.host, found.port

    for version in range(6):
        assert one(version, "g", 0) == (0, rig.logdir.node_id, "broker", 9092)
        assert one(version, "", 0)[0] == codes.INVALID_GROUP_ID
        if version:
            assert one(version, "t", 1)[0] == 0
            assert one(version, "s", 2)[0] == codes.INVALID_REQUEST


def test_listing_and_describing(rig: Rig) -> None:
    rig.form(1)
    rig.commit({("orders", 0): 1}, group="simple")

    def listed(version: int, **filters: Any) -> list[Any]:
        return [
            (group.group_id, group.protocol_type, group.group_state, group.group_type)
            for group in rig.ask(wire.LIST_GROUPS, version, **filters).groups
        ]

    stable, simple = ("g", "consumer", "Stable", "classic"), ("simple", "", "Empty", "classic")
    assert listed(5) == [stable, simple]
    assert listed(5, states_filter=["stable"]) == [stable]
    assert listed(5, states_filter=["EMPTY", "Dead"], types_filter=["Classic"]) == [simple]
    assert listed(5, types_filter=["consumer"]) == []
    assert [row[0] for row in listed(0)] == ["g", "simple"]
    (described,) = rig.ask(wire.DESCRIBE_GROUPS, 5, groups=["no"], include_authorized_operations=True).groups
    assert (described.error_code, described.group_state, described.authorized_operations) == (0, "Dead", 0b101001000)
    parked = rig.join()
    described = rig.describe()
    assert described.group_state == machine.PREPARING and described.protocol_data == ""
    assert all(not member.member_metadata and not member.member_assignment for member in described.members)
    rig.groups.stop(rig.now_ms)
    assert code_of(parked) == codes.NOT_COORDINATOR


# -- any order of things -------------------------------------------------------------------------------------------


class Client:
    """A consumer that does what consumers do, with chance deciding when."""

    def __init__(self, rig: Rig, chance: random.Random, owners: dict[int, dict[int, str]]) -> None:
        self.rig, self.chance, self.owners = rig, chance, owners
        self.instance = f"s{chance.randrange(2)}" if chance.random() < 0.3 else None
        self.member_id, self.generation = "", -1
        self.waiting: Answer | None = None
        self.all: list[Answer] = []
        self.step: Callable[[], None] = self.join

    def join(self) -> None:
        version = self.chance.choice([3, 5, 9]) if self.instance is None else 5
        protocols = {"range": bytes([self.chance.randrange(2)])}
        self._ask(self.rig.join(self.member_id, instance=self.instance, version=version, protocols=protocols))
        self.step = self.joined

    def joined(self) -> None:
        assert self.waiting is not None
        if not self.waiting.is_set:
            return
        response, self.waiting = self.waiting.value, None
        self.step = self.join
        if response.error_code:
            self.member_id = response.member_id if response.error_code == codes.MEMBER_ID_REQUIRED else ""
            return
        self.member_id, self.generation = response.member_id, response.generation_id
        assignments: dict[str, bytes] = {}
        if response.leader == self.member_id and not response.skip_assignment:
            names = [member.member_id for member in response.members]
            assert self.member_id in names and len(set(names)) == len(names)
            for partition in range(6):
                name = names[partition % len(names)]
                assignments[name] = assignments.get(name, b"") + bytes([partition])
        self._ask(self.rig.sync(self.member_id, self.generation, assignments))
        self.step = self.synced

    def synced(self) -> None:
        assert self.waiting is not None
        if not self.waiting.is_set:
            return
        response, self.waiting = self.waiting.value, None
        if response.error_code:
            self._fail(response.error_code)
            return
        owners = self.owners.setdefault(self.generation, {})
        for partition in response.assignment:
            # A static member that came back goes on with what it had: the part of the id before the last is the same.
            owner = self.instance or self.member_id
            assert owners.setdefault(partition, owner) == owner, (self.generation, partition)
        self.step = self.work

    def work(self) -> None:
        what = self.chance.random()
        if what < 0.6:
            code = self.rig.beat(self.member_id, self.generation, instance=self.instance)
        elif what < 0.85:
            answer = self.rig.commit(
                {("orders", 0): self.chance.randrange(100)}, member_id=self.member_id, generation=self.generation
            )
            self.all.append(answer)
            code = code_of(answer) if answer.is_set else 0
        elif what < 0.95:
            self.rig.leave((self.member_id, self.instance))
            self.member_id, code = "", codes.UNKNOWN_MEMBER_ID
        else:
            self.member_id, code = "", codes.UNKNOWN_MEMBER_ID  # crashed: forgets its id and says nothing
        if code:
            self._fail(code)

    def _fail(self, code: int) -> None:
        known = (codes.REBALANCE_IN_PROGRESS, codes.ILLEGAL_GENERATION, codes.UNKNOWN_MEMBER_ID)
        assert code in (*known, codes.FENCED_INSTANCE_ID), code
        if code in (codes.UNKNOWN_MEMBER_ID, codes.FENCED_INSTANCE_ID):
            self.member_id = ""
        self.step = self.join

    def _ask(self, answer: Answer) -> None:
        self.waiting = answer
        self.all.append(answer)


@pytest.mark.parametrize("seed", range(24))
def test_P58_P61_in_any_order_nothing_has_two_owners_and_nobody_waits_for_ever(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with Rig(tmp_path, rebalance_delay_ms=chance.choice([0, 500])) as rig:
        rig.logdir.create_topic("orders")
        owners: dict[int, dict[int, str]] = {}
        clients = [Client(rig, chance, owners) for _ in range(5)]
        for _ in range(250):
            what = chance.random()
            if what < 0.8:
                chance.choice(clients).step()
            elif what < 0.9:
                rig.sleep(chance.choice([1, 300, 3_000, 11_000]))
            elif what < 0.95:
                rig.holds_disk = True
            else:
                rig.finish_disk()
            group = rig.groups.get("g")
            if group is not None:
                check_group(group)
        rig.finish_disk()
        rig.sleep(400_000)
        assert all(answer.is_set for client in clients for answer in client.all)
        described, committed = rig.describe(), rig.committed()
        assert described.group_state in (machine.EMPTY, machine.DEAD)
        generation = getattr(rig.groups.get("g"), "generation", 0)
        rig.restart()
        assert rig.committed() == committed
        assert getattr(rig.groups.get("g"), "generation", 0) == generation


def check_group(group: machine.Group) -> None:
    """What is true of every group at any time."""
    assert (group.leader is None) == (not group.members) and (group.leader is None or group.leader in group.members)
    assert set(group.static.values()) == {m.member_id for m in group.members.values() if m.instance_id is not None}
    assert group.unsynced <= set(group.members)
    for member_id, member in group.members.items():
        assert member.member_id == member_id
        assert member.syncing is None or group.state == machine.COMPLETING
        assert member.joining is None or group.state in (machine.PREPARING, machine.STABLE)
        assert member.timer_ms is not None or member.is_waiting
    if group.state == machine.EMPTY:
        assert not group.members
    if group.state in (machine.COMPLETING, machine.STABLE):
        assert group.protocol in group.common_protocols() and group.generation > 0
        assert group.join_timer is None
    if group.state == machine.PREPARING:
        assert group.join_timer is not None and group.sync_timer is None


NAMES = st.sampled_from(["", "g", "h", "orders", "nothing", "cli-0001", "cli-0002", "a-0001", "é" * 20_000])
NUMBERS = st.sampled_from([-(2**31), -1, 0, 1, 2, 2**31 - 1])
LONGS = st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1])


@hypothesis_settings(max_examples=40)
@given(data=st.data())
def test_no_request_is_too_odd_to_be_answered(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    with Rig(tmp_path_factory.mktemp("odd")) as rig:
        rig.logdir.create_topic("orders", 2)
        answers = []
        for _ in range(data.draw(st.integers(1, 12))):
            api, version, request = data.draw(odd_requests())
            try:
                answers.append(rig.send(api, version, request))
            except ValueError as error:  # this version cannot say it, so no client can
                assert "Request" in str(error) or "request" in str(error), error
            rig.sleep(data.draw(st.sampled_from([0, 0, 100, 60_000])))
        rig.sleep(3 * 2**31)
        assert all(answer.is_set for answer in answers)
        rig.restart()
        rig.describe()


@st.composite
def odd_requests(draw: Any) -> Any:
    text = lambda: draw(NAMES)  # noqa: E731
    number = lambda: draw(NUMBERS)  # noqa: E731
    maybe = lambda: draw(st.sampled_from([None, "a", "", "cli"]))  # noqa: E731
    kind = draw(st.integers(0, 10))
    if kind == 0:
        request_type = wire.JOIN_GROUP.Request
        protocols = [
            request_type.Protocol(name=name, metadata=draw(st.sampled_from([b"", b"\0\0\0\0\0\1\0\6orders", b"\0\3?"])))
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
                assignments=[request_type.Assignment(member_id=text(), assignment=b"?")],
            ),
        )
    if kind == 2:
        return (
            wire.HEARTBEAT,
            draw(st.integers(0, 4)),
            wire.HEARTBEAT.Request(
                group_id=text(), generation_id=number(), member_id=text(), group_instance_id=maybe()
            ),
        )
    if kind == 3:
        member_type = wire.LEAVE_GROUP.Request.Member
        members = [member_type(member_id=text(), group_instance_id=maybe()) for _ in range(draw(st.integers(0, 3)))]
        return (
            wire.LEAVE_GROUP,
            draw(st.integers(0, 5)),
            wire.LEAVE_GROUP.Request(group_id=text(), member_id=text(), members=members),
        )
    if kind == 4:
        topic_type = wire.OFFSET_COMMIT.Request.Topic
        partition = topic_type.Partition(
            partition_index=number(),
            committed_offset=draw(LONGS),
            committed_leader_epoch=number(),
            committed_metadata=draw(st.sampled_from([None, "", "é" * 4_096, "\U0001f600" * 4_096, "x" * 40_000])),
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
        topics = draw(st.sampled_from([None, [request_type.Topic(name="orders", partition_indexes=[0, 0, -1])]]))
        grouped = (
            None if topics is None else [request_type.Group.Topic(name="orders", partition_indexes=[0, 2**31 - 1])]
        )
        return (
            wire.OFFSET_FETCH,
            draw(st.integers(1, 9)),
            request_type(group_id=text(), topics=topics, groups=[request_type.Group(group_id=text(), topics=grouped)]),
        )
    if kind == 6:
        return (
            wire.FIND_COORDINATOR,
            draw(st.integers(0, 5)),
            wire.FIND_COORDINATOR.Request(key=text(), key_type=draw(st.integers(-128, 127)), coordinator_keys=[text()]),
        )
    if kind == 7:
        return wire.DESCRIBE_GROUPS, draw(st.integers(0, 5)), wire.DESCRIBE_GROUPS.Request(groups=[text(), text()])
    if kind == 8:
        return (
            wire.LIST_GROUPS,
            draw(st.integers(0, 5)),
            wire.LIST_GROUPS.Request(
                states_filter=draw(st.lists(NAMES, max_size=2)), types_filter=draw(st.lists(NAMES, max_size=1))
            ),
        )
    if kind == 9:
        return wire.DELETE_GROUPS, draw(st.integers(0, 2)), wire.DELETE_GROUPS.Request(groups_names=[text(), text()])
    topic_type = wire.OFFSET_DELETE.Request.Topic
    return (
        wire.OFFSET_DELETE,
        0,
        wire.OFFSET_DELETE.Request(
            group_id=text(),
            topics=[topic_type(name=text(), partitions=[topic_type.Partition(partition_index=number())])],
        ),
    )
