"""Members of groups: they join, leave and fail, and may be static.

The tests run without sockets: time is a number, and the disk finishes when the test
requests it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from logcore.coordination import classic_group as machine
from logcore.format.group_records import (
    group_key,
)
from netshim import wire
from netshim.wire import codes
from support.group_harness import (
    REBALANCE_MS,
    SESSION_MS,
    GroupHarness,
    code_of,
    form_static,
    with_each_kind_of_directory,
)

# -- joining ---------------------------------------------------------------------------


def test_one_member_joins_with_version_zero(group_harness: GroupHarness) -> None:
    joined = group_harness.join(version=0).value
    assert joined.member_id == "cli-0001" == joined.leader
    assert joined.generation_id == 1 and joined.protocol_name == "range"
    assert [(member.member_id, member.metadata) for member in joined.members] == [
        ("cli-0001", b"x")
    ]
    assert group_harness.describe().group_state == machine.COMPLETING
    assert (
        group_harness.sync("cli-0001", 1, {"cli-0001": b"mine"}).value.assignment
        == b"mine"
    )
    described = group_harness.describe()
    assert (
        described.group_state == machine.STABLE and described.protocol_data == "range"
    )
    (member,) = described.members
    assert (
        member.client_id,
        member.client_host,
        member.member_metadata,
        member.member_assignment,
    ) == (
        "cli",
        "/10.0.0.1",
        b"x",
        b"mine",
    )
    assert group_harness.heartbeat("cli-0001", 1) == 0


@with_each_kind_of_directory
def test_new_member_gets_its_id_first(group_harness: GroupHarness) -> None:
    pending = group_harness.join(version=4)
    assert code_of(pending) == codes.MEMBER_ID_REQUIRED
    member_id = pending.value.member_id
    assert group_harness.describe().group_state == machine.EMPTY
    joined = group_harness.join(member_id, version=9).value
    assert (joined.error_code, joined.member_id, joined.protocol_type) == (
        0,
        member_id,
        "consumer",
    )
    # A repeated join before the sync is answered again.
    assert group_harness.join(member_id, version=9).is_set
    assert group_harness.describe().group_state == machine.COMPLETING


@with_each_kind_of_directory
def test_member_id_without_a_second_join_expires(group_harness: GroupHarness) -> None:
    member_id = group_harness.join(version=5).value.member_id
    assert (
        code_of(group_harness.join(member_id, version=5, instance="i"))
        == codes.UNKNOWN_MEMBER_ID
    )
    group_harness.sleep(SESSION_MS)
    assert code_of(group_harness.join(member_id, version=5)) == codes.UNKNOWN_MEMBER_ID
    assert group_harness.groups.get("g") is None
    assert group_harness.heartbeat(member_id, 1, group="") == codes.INVALID_GROUP_ID


@with_each_kind_of_directory
def test_pending_member_delays_a_rebalance_until_its_timeout(
    group_harness: GroupHarness,
) -> None:
    ids, generation = group_harness.form(1)
    group_harness.join(version=5)
    newcomer = group_harness.join(version=3)
    again = group_harness.join(ids[0])
    assert not newcomer.is_set and not again.is_set
    group_harness.sleep(SESSION_MS)
    assert newcomer.value.generation_id == again.value.generation_id == generation + 1


@with_each_kind_of_directory
def test_join_errors_are_checked_in_order(group_harness: GroupHarness) -> None:
    assert (
        code_of(group_harness.join("m", group="", session_ms=1))
        == codes.INVALID_GROUP_ID
    )
    assert (
        code_of(group_harness.join("m", session_ms=99, kind=""))
        == codes.INVALID_SESSION_TIMEOUT
    )
    assert (
        code_of(group_harness.join("m", session_ms=1_800_001))
        == codes.INVALID_SESSION_TIMEOUT
    )
    assert (
        code_of(group_harness.join("m", kind="")) == codes.UNKNOWN_MEMBER_ID
    )  # no such group
    assert code_of(group_harness.join(kind="")) == codes.INCONSISTENT_GROUP_PROTOCOL
    assert (
        code_of(group_harness.join(protocols={})) == codes.INCONSISTENT_GROUP_PROTOCOL
    )
    assert group_harness.groups.get("g") is None
    group_harness.form(1)
    assert (
        code_of(group_harness.join(kind="connect")) == codes.INCONSISTENT_GROUP_PROTOCOL
    )
    assert (
        code_of(group_harness.join(protocols={"other": b""}))
        == codes.INCONSISTENT_GROUP_PROTOCOL
    )
    assert code_of(group_harness.join("nobody")) == codes.UNKNOWN_MEMBER_ID
    assert (
        group_harness.join(protocols={"other": b""}, version=7).value.protocol_name
        is None
    )
    assert (
        group_harness.join(protocols={"other": b""}, version=6).value.protocol_name
        == ""
    )
    assert (
        code_of(group_harness.join(group="g" * 40_000, version=6))
        == codes.INVALID_GROUP_ID
    )
    assert (
        code_of(group_harness.join(instance="i" * 40_000, version=6))
        == codes.INVALID_REQUEST
    )


def test_group_size_is_limited(tmp_path: Path) -> None:
    with GroupHarness(tmp_path, group_max_size=2) as group_harness:
        ids, generation = group_harness.form(2)
        refused = group_harness.join()
        assert (
            code_of(refused) == codes.GROUP_MAX_SIZE_REACHED
            and refused.value.member_id == ""
        )
        assert group_harness.heartbeat(ids[0], generation) == 0
        assert group_harness.leave((ids[1], None)) == [0]
        # The new member has one place, and the member that has not rejoined yet has the
        # other.
        newcomer = group_harness.join()
        third = group_harness.join()
        assert not newcomer.is_set and not third.is_set
        assert code_of(group_harness.join(ids[0])) == codes.GROUP_MAX_SIZE_REACHED
        assert len(group_harness.describe().members) == 2


@with_each_kind_of_directory
def test_members_vote_for_the_protocol(group_harness: GroupHarness) -> None:
    first = group_harness.join(
        protocols={"a": b"1", "b": b"2", "c": b"3"}
    ).value.member_id
    second = group_harness.join(protocols={"c": b"6", "b": b"5", "z": b""})
    group_harness.join(first, protocols={"a": b"1", "b": b"2", "c": b"3"})
    third = group_harness.join(protocols={"c": b"9", "b": b"8"})
    group_harness.join(second.value.member_id, protocols={"c": b"6", "b": b"5"})
    joined = group_harness.join(
        first, protocols={"a": b"1", "b": b"2", "c": b"3"}
    ).value
    assert joined.protocol_name == third.value.protocol_name == "c"
    assert [member.metadata for member in joined.members] == [b"3", b"6", b"9"]


@with_each_kind_of_directory
def test_followers_get_no_member_list_and_wait_for_the_leader(
    group_harness: GroupHarness,
) -> None:
    first = group_harness.join().value.member_id
    newcomer = group_harness.join()
    assert not newcomer.is_set
    assert group_harness.heartbeat(first, 1) == codes.REBALANCE_IN_PROGRESS
    leader = group_harness.join(first).value
    assert leader.generation_id == newcomer.value.generation_id == 2
    assert leader.leader == newcomer.value.leader == first
    assert len(leader.members) == 2 and not newcomer.value.members
    second = newcomer.value.member_id
    follower = group_harness.sync(second, 2)
    assert not follower.is_set
    assert (
        group_harness.sync(first, 2, {first: b"1", "stranger": b"?"}).value.assignment
        == b"1"
    )
    assert follower.value.assignment == b""  # the leader assigned nothing to it


@with_each_kind_of_directory
def test_sync_requests_are_checked(group_harness: GroupHarness) -> None:
    ids, generation = group_harness.form(1)
    assert code_of(group_harness.sync(ids[0], 1, group="")) == codes.INVALID_GROUP_ID
    assert code_of(group_harness.sync(ids[0], 1, group="h")) == codes.UNKNOWN_MEMBER_ID
    assert code_of(group_harness.sync("nobody", generation)) == codes.UNKNOWN_MEMBER_ID
    assert (
        code_of(group_harness.sync(ids[0], generation + 1)) == codes.ILLEGAL_GENERATION
    )
    for wrong in ({"protocol_type": "connect"}, {"protocol_name": "other"}):
        assert (
            code_of(group_harness.sync(ids[0], generation, version=5, **wrong))
            == codes.INCONSISTENT_GROUP_PROTOCOL
        )
    again = group_harness.sync(
        ids[0], generation, version=5, protocol_type="consumer", protocol_name="range"
    ).value
    assert (again.assignment, again.protocol_name) == (ids[0].encode(), "range")
    group_harness.join()
    assert (
        code_of(group_harness.sync(ids[0], generation)) == codes.REBALANCE_IN_PROGRESS
    )


@with_each_kind_of_directory
def test_new_member_ends_waiting_syncs(group_harness: GroupHarness) -> None:
    first = group_harness.join().value.member_id
    second = group_harness.join()
    group_harness.join(first)
    waiting = group_harness.sync(second.value.member_id, 2)
    third = group_harness.join()
    assert code_of(waiting) == codes.REBALANCE_IN_PROGRESS
    assert not third.is_set


@with_each_kind_of_directory
def test_second_request_of_a_kind_replaces_the_first(
    group_harness: GroupHarness,
) -> None:
    first = group_harness.join().value.member_id
    newcomer = group_harness.join()
    group_harness.join(first)
    second = newcomer.value.member_id
    syncs = [group_harness.sync(second, 2), group_harness.sync(second, 2)]
    assert code_of(syncs[0]) == codes.REBALANCE_IN_PROGRESS and not syncs[1].is_set
    group_harness.sync(first, 2, {second: b"yes"})
    assert syncs[1].value.assignment == b"yes"
    joins = [group_harness.join(first), group_harness.join(first)]
    assert code_of(joins[0]) == codes.REBALANCE_IN_PROGRESS and not joins[1].is_set


@with_each_kind_of_directory
def test_member_that_does_not_rejoin_in_time_is_removed(
    group_harness: GroupHarness,
) -> None:
    ids, generation = group_harness.form(3)
    newcomer = group_harness.join()
    again = group_harness.join(ids[1])
    # The others only send heartbeats, which keep their sessions but not their
    # membership.
    for _ in range(4):
        group_harness.sleep(REBALANCE_MS // 4)
        for member_id in (ids[0], ids[2]):
            expected = (
                codes.REBALANCE_IN_PROGRESS
                if not again.is_set
                else codes.UNKNOWN_MEMBER_ID
            )
            assert group_harness.heartbeat(member_id, generation) == expected
    assert again.value.generation_id == generation + 1
    assert again.value.leader == ids[1]  # the leader did not rejoin
    assert {member.member_id for member in again.value.members} == {
        ids[1],
        newcomer.value.member_id,
    }


@with_each_kind_of_directory
def test_member_that_never_syncs_is_removed(group_harness: GroupHarness) -> None:
    first = group_harness.join().value.member_id
    second = group_harness.join()
    group_harness.join(first)
    group_harness.sync(first, 2, {first: b"1"})
    for _ in range(5):
        (
            group_harness.heartbeat(first, 2),
            group_harness.heartbeat(second.value.member_id, 2),
        )
        group_harness.sleep(REBALANCE_MS // 5)
    assert group_harness.heartbeat(second.value.member_id, 2) == codes.UNKNOWN_MEMBER_ID
    assert group_harness.heartbeat(first, 2) == codes.REBALANCE_IN_PROGRESS


def test_session_begins_after_a_stalled_write(group_harness: GroupHarness) -> None:
    member_id = group_harness.join().value.member_id
    group_harness.holds_disk = True
    synced = group_harness.sync(member_id, 1, {member_id: b"x"})
    group_harness.sleep(2 * SESSION_MS - 100)
    assert not synced.is_set
    group_harness.finish_disk()
    assert code_of(synced) == 0
    group_harness.sleep(SESSION_MS - 1)
    assert group_harness.heartbeat(member_id, 1) == 0


@with_each_kind_of_directory
def test_silent_member_expires_and_the_others_rebalance(
    group_harness: GroupHarness,
) -> None:
    ids, generation = group_harness.form(2)
    group_harness.sleep(SESSION_MS - 1)
    assert group_harness.heartbeat(ids[0], generation) == 0
    group_harness.sleep(1 + group_harness.max_expiry_delay_ms)
    assert group_harness.heartbeat(ids[1], generation) == codes.UNKNOWN_MEMBER_ID
    assert group_harness.heartbeat(ids[0], generation) == codes.REBALANCE_IN_PROGRESS
    assert [
        member.member_id for member in group_harness.join(ids[0]).value.members
    ] == [ids[0]]
    group_harness.sleep(SESSION_MS + group_harness.max_expiry_delay_ms)
    described = group_harness.describe()
    assert described.group_state == machine.EMPTY and not described.members


@with_each_kind_of_directory
def test_session_is_suspended_while_a_join_waits(group_harness: GroupHarness) -> None:
    ids, _ = group_harness.form(2)
    newcomer = group_harness.join()
    waiting = group_harness.join(ids[0], session_ms=200)
    # The member that does not rejoin keeps its session, so that the rebalance waits for
    # it.
    for _ in range(2):
        group_harness.sleep(REBALANCE_MS // 2 - 1)
        assert group_harness.heartbeat(ids[1], 2) == codes.REBALANCE_IN_PROGRESS
    group_harness.sleep(1)
    assert not waiting.is_set and not newcomer.is_set
    group_harness.sleep(1)
    assert waiting.value.error_code == 0 and newcomer.value.error_code == 0
    group_harness.sleep(
        200 + group_harness.max_expiry_delay_ms
    )  # its session began again with the answer
    assert group_harness.heartbeat(ids[0], 3) == codes.UNKNOWN_MEMBER_ID


@pytest.mark.long
@with_each_kind_of_directory
def test_rebalance_does_not_wait_forever_for_new_members(
    group_harness: GroupHarness,
) -> None:
    group_harness.form(1, session_ms=1_800_000, rebalance_ms=1_800_000)
    newcomer = group_harness.join(rebalance_ms=1_800_000)
    group_harness.sleep(299_999)
    assert not newcomer.is_set
    group_harness.sleep(1)
    assert code_of(newcomer) == codes.UNKNOWN_MEMBER_ID


@with_each_kind_of_directory
def test_rejoin_of_a_leader_or_a_changed_follower_begins_a_rebalance(
    group_harness: GroupHarness,
) -> None:
    ids, generation = group_harness.form(2)
    joined = group_harness.join(ids[1]).value
    assert joined.generation_id == generation and not joined.members
    assert group_harness.heartbeat(ids[0], generation) == 0
    changed = group_harness.join(ids[1], protocols={"range": b"new"})
    assert not changed.is_set
    assert group_harness.join(ids[0]).value.members[1].metadata == b"new"
    group_harness.sync(ids[0], generation + 1)
    leading = group_harness.join(ids[0])
    assert (
        not leading.is_set
        and group_harness.heartbeat(ids[1], generation + 1)
        == codes.REBALANCE_IN_PROGRESS
    )


def test_first_members_of_a_group_wait_for_one_another(tmp_path: Path) -> None:
    with GroupHarness(tmp_path, rebalance_delay_ms=3_000) as group_harness:
        first = group_harness.join()
        group_harness.sleep(2_000)
        second = group_harness.join()
        group_harness.sleep(2_999)
        # The second member extended the wait.
        assert not first.is_set and not second.is_set
        group_harness.sleep(1_001)
        assert first.value.generation_id == second.value.generation_id == 1
        late = [group_harness.join(group="h", rebalance_ms=5_000)]
        for _ in range(4):
            group_harness.sleep(1_900)
            late.append(group_harness.join(group="h", rebalance_ms=5_000))
        group_harness.sleep(1_000)
        assert late[0].value.generation_id == 1  # but not beyond the rebalance timeout


# -- leaving ---------------------------------------------------------------------------


@with_each_kind_of_directory
def test_leave_removes_members_and_pending_ids(group_harness: GroupHarness) -> None:
    ids, generation = group_harness.form(3)
    old = group_harness.ask(wire.LEAVE_GROUP, 1, group_id="g", member_id=ids[2])
    assert old.error_code == 0
    assert group_harness.heartbeat(ids[0], generation) == codes.REBALANCE_IN_PROGRESS
    assert group_harness.leave((ids[2], None), (ids[1], None)) == [
        codes.UNKNOWN_MEMBER_ID,
        0,
    ]
    assert (
        group_harness.ask(
            wire.LEAVE_GROUP, 1, group_id="g", member_id="nobody"
        ).error_code
        == codes.UNKNOWN_MEMBER_ID
    )
    assert (
        group_harness.ask(wire.LEAVE_GROUP, 3, group_id="", members=[]).error_code
        == codes.INVALID_GROUP_ID
    )
    assert group_harness.leave((ids[0], None), group="h") == [codes.UNKNOWN_MEMBER_ID]
    assert group_harness.leave((ids[0], None)) == [0]
    assert group_harness.describe().group_state == machine.EMPTY
    assert group_harness.records()[-1][0] == group_key("g")
    pending = group_harness.join(version=4).value.member_id
    assert group_harness.leave((pending, None)) == [0]
    assert code_of(group_harness.join(pending, version=4)) == codes.UNKNOWN_MEMBER_ID


@with_each_kind_of_directory
def test_waiting_join_of_a_member_that_left_is_refused(
    group_harness: GroupHarness,
) -> None:
    ids, _ = group_harness.form(2)
    waiting = group_harness.join(ids[0])
    assert group_harness.leave((ids[0], None)) == [0]
    assert code_of(waiting) == codes.UNKNOWN_MEMBER_ID


# -- static members --------------------------------------------------------------------


@with_each_kind_of_directory
def test_returning_static_member_keeps_its_assignment_without_a_rebalance(
    group_harness: GroupHarness,
) -> None:
    leader, follower = form_static(group_harness)
    back = group_harness.join(instance="b", version=5).value
    assert (back.error_code, back.generation_id, back.leader, back.members) == (
        0,
        2,
        leader,
        [],
    )
    assert back.member_id != follower and back.member_id.startswith("b-")
    assert group_harness.heartbeat(leader, 2) == 0
    assert (
        group_harness.heartbeat(follower, 2, instance="b") == codes.FENCED_INSTANCE_ID
    )
    assert (
        code_of(group_harness.sync(follower, 2, group_instance_id="b"))
        == codes.FENCED_INSTANCE_ID
    )
    assert (
        code_of(group_harness.join(follower, instance="b", version=5))
        == codes.FENCED_INSTANCE_ID
    )
    assert group_harness.leave((follower, "b")) == [codes.FENCED_INSTANCE_ID]
    assert (
        group_harness.sync(back.member_id, 2, group_instance_id="b").value.assignment
        == b"2"
    )
    group_harness.restart()
    assert group_harness.heartbeat(back.member_id, 2, instance="b") == 0


@with_each_kind_of_directory
@pytest.mark.parametrize("version", [5, 8, 9])
def test_returning_static_leader_does_not_assign(
    group_harness: GroupHarness, version: int
) -> None:
    leader, _ = form_static(group_harness)
    back = group_harness.join(instance="a", version=version).value
    assert back.generation_id == 2
    if version < 9:
        assert back.leader == leader != back.member_id and not back.members
    else:
        assert (
            back.skip_assignment
            and back.leader == back.member_id
            and len(back.members) == 2
        )


@with_each_kind_of_directory
def test_returning_static_member_with_another_protocol_rebalances(
    group_harness: GroupHarness,
) -> None:
    more = {"protocols": {"range": b"", "sticky": b""}}
    leader, _ = form_static(group_harness, **more)
    back = group_harness.join(instance="b", version=5, protocols={"sticky": b""})
    assert not back.is_set
    assert (
        group_harness.join(leader, instance="a", version=5, **more).value.protocol_name
        == "sticky"
    )
    assert back.is_set


@with_each_kind_of_directory
def test_returning_static_member_fences_the_waiting_member(
    group_harness: GroupHarness,
) -> None:
    leader, follower = form_static(group_harness)
    newcomer = group_harness.join()
    waiting = group_harness.join(follower, instance="b", version=5)
    back = group_harness.join(instance="b", version=5)
    assert code_of(waiting) == codes.FENCED_INSTANCE_ID
    group_harness.join(leader, instance="a", version=5)
    assert newcomer.value.generation_id == back.value.generation_id == 3
    parked = group_harness.sync(back.value.member_id, 3)
    again = group_harness.join(instance="b", version=5)
    assert code_of(parked) == codes.FENCED_INSTANCE_ID and not again.is_set


@with_each_kind_of_directory
def test_static_member_is_kept_until_its_session_ends(
    group_harness: GroupHarness,
) -> None:
    _, follower = form_static(group_harness, session_ms=60_000)
    newcomer = group_harness.join()
    group_harness.sleep(REBALANCE_MS - 1)
    waiting = group_harness.join(follower, instance="b", version=5, session_ms=60_000)
    group_harness.sleep(1)
    assert waiting.value.leader == follower
    assert {member.group_instance_id for member in waiting.value.members} == {
        "a",
        "b",
        None,
    }
    assert newcomer.is_set


def test_group_of_static_members_waits_until_one_returns(
    group_harness: GroupHarness,
) -> None:
    leader, follower = form_static(group_harness, session_ms=60_000, rebalance_ms=0)
    group_harness.join(rebalance_ms=2_000, version=3)
    group_harness.leave(("cli-0003", None))
    group_harness.sleep(5_000)
    assert group_harness.describe().group_state == machine.PREPARING
    assert {member.member_id for member in group_harness.describe().members} == {
        leader,
        follower,
    }
    back = group_harness.join(
        follower, instance="b", version=5, session_ms=60_000, rebalance_ms=0
    )
    group_harness.sleep(1_000)
    assert back.value.leader == follower


@with_each_kind_of_directory
def test_admin_removes_static_members(group_harness: GroupHarness) -> None:
    leader, _ = form_static(group_harness)
    assert group_harness.leave(("", "b"), ("", "z"), ("", None)) == [
        0,
        codes.UNKNOWN_MEMBER_ID,
        codes.UNKNOWN_MEMBER_ID,
    ]
    assert [
        m.group_instance_id
        for m in group_harness.join(leader, instance="a", version=5).value.members
    ] == ["a"]


def test_static_member_rejoins_a_full_group(tmp_path: Path) -> None:
    with GroupHarness(tmp_path, group_max_size=2) as group_harness:
        form_static(group_harness)
        assert group_harness.join(instance="b", version=5).value.error_code == 0
        assert (
            code_of(group_harness.join(instance="c", version=5))
            == codes.GROUP_MAX_SIZE_REACHED
        )
