"""Members of groups: they join, leave and fail, and are static or not.

Without sockets: time is a number, the disk is done when the test says so.
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
from support.rig import (
    REBALANCE_MS,
    SESSION_MS,
    Rig,
    code_of,
    form_static,
    in_both_homes,
)

# -- joining ---------------------------------------------------------------------------


def test_one_member_old_style(rig: Rig) -> None:
    joined = rig.join(version=0).value
    assert joined.member_id == "cli-0001" == joined.leader
    assert joined.generation_id == 1 and joined.protocol_name == "range"
    assert [(member.member_id, member.metadata) for member in joined.members] == [
        ("cli-0001", b"x")
    ]
    assert rig.describe().group_state == machine.COMPLETING
    assert rig.sync("cli-0001", 1, {"cli-0001": b"mine"}).value.assignment == b"mine"
    described = rig.describe()
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
    assert rig.beat("cli-0001", 1) == 0


@in_both_homes
def test_a_new_member_is_told_its_id_first(rig: Rig) -> None:
    answer = rig.join(version=4)
    assert code_of(answer) == codes.MEMBER_ID_REQUIRED
    member_id = answer.value.member_id
    assert rig.describe().group_state == machine.EMPTY
    joined = rig.join(member_id, version=9).value
    assert (joined.error_code, joined.member_id, joined.protocol_type) == (
        0,
        member_id,
        "consumer",
    )
    assert rig.join(
        member_id, version=9
    ).is_set  # asked again before it synced: told again
    assert rig.describe().group_state == machine.COMPLETING


@in_both_homes
def test_an_id_that_nobody_comes_back_with_is_forgotten(rig: Rig) -> None:
    member_id = rig.join(version=5).value.member_id
    assert (
        code_of(rig.join(member_id, version=5, instance="i")) == codes.UNKNOWN_MEMBER_ID
    )
    rig.sleep(SESSION_MS)
    assert code_of(rig.join(member_id, version=5)) == codes.UNKNOWN_MEMBER_ID
    assert rig.groups.get("g") is None
    assert rig.beat(member_id, 1, group="") == codes.INVALID_GROUP_ID


@in_both_homes
def test_a_pending_member_holds_up_a_rebalance_until_its_time_is_over(rig: Rig) -> None:
    ids, generation = rig.form(1)
    rig.join(version=5)
    newcomer = rig.join(version=3)
    again = rig.join(ids[0])
    assert not newcomer.is_set and not again.is_set
    rig.sleep(SESSION_MS)
    assert newcomer.value.generation_id == again.value.generation_id == generation + 1


@in_both_homes
def test_errors_of_joining_in_their_order(rig: Rig) -> None:
    assert code_of(rig.join("m", group="", session_ms=1)) == codes.INVALID_GROUP_ID
    assert (
        code_of(rig.join("m", session_ms=99, kind="")) == codes.INVALID_SESSION_TIMEOUT
    )
    assert code_of(rig.join("m", session_ms=1_800_001)) == codes.INVALID_SESSION_TIMEOUT
    assert code_of(rig.join("m", kind="")) == codes.UNKNOWN_MEMBER_ID  # no such group
    assert code_of(rig.join(kind="")) == codes.INCONSISTENT_GROUP_PROTOCOL
    assert code_of(rig.join(protocols={})) == codes.INCONSISTENT_GROUP_PROTOCOL
    assert rig.groups.get("g") is None
    rig.form(1)
    assert code_of(rig.join(kind="connect")) == codes.INCONSISTENT_GROUP_PROTOCOL
    assert (
        code_of(rig.join(protocols={"other": b""})) == codes.INCONSISTENT_GROUP_PROTOCOL
    )
    assert code_of(rig.join("nobody")) == codes.UNKNOWN_MEMBER_ID
    assert rig.join(protocols={"other": b""}, version=7).value.protocol_name is None
    assert rig.join(protocols={"other": b""}, version=6).value.protocol_name == ""
    assert code_of(rig.join(group="g" * 40_000, version=6)) == codes.INVALID_GROUP_ID
    assert code_of(rig.join(instance="i" * 40_000, version=6)) == codes.INVALID_REQUEST


def test_a_group_has_no_more_members_than_allowed(tmp_path: Path) -> None:
    with Rig(tmp_path, group_max_size=2) as rig:
        ids, generation = rig.form(2)
        refused = rig.join()
        assert (
            code_of(refused) == codes.GROUP_MAX_SIZE_REACHED
            and refused.value.member_id == ""
        )
        assert rig.beat(ids[0], generation) == 0
        assert rig.leave((ids[1], None)) == [0]
        newcomer = rig.join()
        third = rig.join()  # one place is taken by the newcomer, one by the member that has yet to rejoin
        assert not newcomer.is_set and not third.is_set
        assert code_of(rig.join(ids[0])) == codes.GROUP_MAX_SIZE_REACHED
        assert len(rig.describe().members) == 2


@in_both_homes
def test_members_vote_for_the_protocol(rig: Rig) -> None:
    first = rig.join(protocols={"a": b"1", "b": b"2", "c": b"3"}).value.member_id
    second = rig.join(protocols={"c": b"6", "b": b"5", "z": b""})
    rig.join(first, protocols={"a": b"1", "b": b"2", "c": b"3"})
    third = rig.join(protocols={"c": b"9", "b": b"8"})
    rig.join(second.value.member_id, protocols={"c": b"6", "b": b"5"})
    told = rig.join(first, protocols={"a": b"1", "b": b"2", "c": b"3"}).value
    assert told.protocol_name == third.value.protocol_name == "c"
    assert [member.metadata for member in told.members] == [b"3", b"6", b"9"]


@in_both_homes
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


@in_both_homes
def test_syncs_are_checked(rig: Rig) -> None:
    ids, generation = rig.form(1)
    assert code_of(rig.sync(ids[0], 1, group="")) == codes.INVALID_GROUP_ID
    assert code_of(rig.sync(ids[0], 1, group="h")) == codes.UNKNOWN_MEMBER_ID
    assert code_of(rig.sync("nobody", generation)) == codes.UNKNOWN_MEMBER_ID
    assert code_of(rig.sync(ids[0], generation + 1)) == codes.ILLEGAL_GENERATION
    for wrong in ({"protocol_type": "connect"}, {"protocol_name": "other"}):
        assert (
            code_of(rig.sync(ids[0], generation, version=5, **wrong))
            == codes.INCONSISTENT_GROUP_PROTOCOL
        )
    again = rig.sync(
        ids[0], generation, version=5, protocol_type="consumer", protocol_name="range"
    ).value
    assert (again.assignment, again.protocol_name) == (ids[0].encode(), "range")
    rig.join()
    assert code_of(rig.sync(ids[0], generation)) == codes.REBALANCE_IN_PROGRESS


@in_both_homes
def test_a_newcomer_ends_the_syncs_that_wait(rig: Rig) -> None:
    first = rig.join().value.member_id
    second = rig.join()
    rig.join(first)
    waiting = rig.sync(second.value.member_id, 2)
    third = rig.join()
    assert code_of(waiting) == codes.REBALANCE_IN_PROGRESS
    assert not third.is_set


@in_both_homes
def test_a_second_request_of_the_same_kind_takes_the_place_of_the_first(
    rig: Rig,
) -> None:
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


@in_both_homes
def test_who_does_not_rejoin_in_time_is_dropped(rig: Rig) -> None:
    ids, generation = rig.form(3)
    newcomer = rig.join()
    again = rig.join(ids[1])
    for _ in range(
        4
    ):  # the others only send heartbeats, which keeps their sessions and does not keep their places
        rig.sleep(REBALANCE_MS // 4)
        for member_id in (ids[0], ids[2]):
            expected = (
                codes.REBALANCE_IN_PROGRESS
                if not again.is_set
                else codes.UNKNOWN_MEMBER_ID
            )
            assert rig.beat(member_id, generation) == expected
    assert again.value.generation_id == generation + 1
    assert again.value.leader == ids[1]  # the leader did not come
    assert {member.member_id for member in again.value.members} == {
        ids[1],
        newcomer.value.member_id,
    }


@in_both_homes
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


def test_a_session_begins_when_a_disk_that_stalled_is_done(rig: Rig) -> None:
    member_id = rig.join().value.member_id
    rig.holds_disk = True
    synced = rig.sync(member_id, 1, {member_id: b"x"})
    rig.sleep(2 * SESSION_MS - 100)
    assert not synced.is_set
    rig.finish_disk()
    assert code_of(synced) == 0
    rig.sleep(SESSION_MS - 1)
    assert rig.beat(member_id, 1) == 0


@in_both_homes
def test_a_silent_member_expires_and_the_others_rebalance(rig: Rig) -> None:
    ids, generation = rig.form(2)
    rig.sleep(SESSION_MS - 1)
    assert rig.beat(ids[0], generation) == 0
    rig.sleep(1 + rig.late_ms)
    assert rig.beat(ids[1], generation) == codes.UNKNOWN_MEMBER_ID
    assert rig.beat(ids[0], generation) == codes.REBALANCE_IN_PROGRESS
    assert [member.member_id for member in rig.join(ids[0]).value.members] == [ids[0]]
    rig.sleep(SESSION_MS + rig.late_ms)
    described = rig.describe()
    assert described.group_state == machine.EMPTY and not described.members


@in_both_homes
def test_waiting_suspends_a_session(rig: Rig) -> None:
    ids, _ = rig.form(2)
    newcomer = rig.join()
    waiting = rig.join(ids[0], session_ms=200)
    for _ in range(
        2
    ):  # the member that does not join again keeps its session, so that the rebalance waits for it
        rig.sleep(REBALANCE_MS // 2 - 1)
        assert rig.beat(ids[1], 2) == codes.REBALANCE_IN_PROGRESS
    rig.sleep(1)
    assert not waiting.is_set and not newcomer.is_set
    rig.sleep(1)
    assert waiting.value.error_code == 0 and newcomer.value.error_code == 0
    rig.sleep(200 + rig.late_ms)  # its session began again with the answer
    assert rig.beat(ids[0], 3) == codes.UNKNOWN_MEMBER_ID


@in_both_homes
def test_new_members_are_not_waited_for_without_end(rig: Rig) -> None:
    rig.form(1, session_ms=1_800_000, rebalance_ms=1_800_000)
    newcomer = rig.join(rebalance_ms=1_800_000)
    rig.sleep(299_999)
    assert not newcomer.is_set
    rig.sleep(1)
    assert code_of(newcomer) == codes.UNKNOWN_MEMBER_ID


@in_both_homes
def test_a_leader_that_rejoins_begins_a_rebalance_and_a_follower_only_with_something_new(
    rig: Rig,
) -> None:
    ids, generation = rig.form(2)
    told = rig.join(ids[1]).value
    assert told.generation_id == generation and not told.members
    assert rig.beat(ids[0], generation) == 0
    changed = rig.join(ids[1], protocols={"range": b"new"})
    assert not changed.is_set
    assert rig.join(ids[0]).value.members[1].metadata == b"new"
    rig.sync(ids[0], generation + 1)
    leading = rig.join(ids[0])
    assert (
        not leading.is_set
        and rig.beat(ids[1], generation + 1) == codes.REBALANCE_IN_PROGRESS
    )


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


# -- leaving ---------------------------------------------------------------------------


@in_both_homes
def test_leaving(rig: Rig) -> None:
    ids, generation = rig.form(3)
    old = rig.ask(wire.LEAVE_GROUP, 1, group_id="g", member_id=ids[2])
    assert old.error_code == 0
    assert rig.beat(ids[0], generation) == codes.REBALANCE_IN_PROGRESS
    assert rig.leave((ids[2], None), (ids[1], None)) == [codes.UNKNOWN_MEMBER_ID, 0]
    assert (
        rig.ask(wire.LEAVE_GROUP, 1, group_id="g", member_id="nobody").error_code
        == codes.UNKNOWN_MEMBER_ID
    )
    assert (
        rig.ask(wire.LEAVE_GROUP, 3, group_id="", members=[]).error_code
        == codes.INVALID_GROUP_ID
    )
    assert rig.leave((ids[0], None), group="h") == [codes.UNKNOWN_MEMBER_ID]
    assert rig.leave((ids[0], None)) == [0]
    assert rig.describe().group_state == machine.EMPTY
    assert rig.records()[-1][0] == group_key("g")
    pending = rig.join(version=4).value.member_id
    assert rig.leave((pending, None)) == [0]
    assert code_of(rig.join(pending, version=4)) == codes.UNKNOWN_MEMBER_ID


@in_both_homes
def test_a_member_that_waits_is_told_that_it_left(rig: Rig) -> None:
    ids, _ = rig.form(2)
    waiting = rig.join(ids[0])
    assert rig.leave((ids[0], None)) == [0]
    assert code_of(waiting) == codes.UNKNOWN_MEMBER_ID


# -- static members --------------------------------------------------------------------


@in_both_homes
def test_a_static_member_that_comes_back_takes_its_place_without_a_rebalance(
    rig: Rig,
) -> None:
    leader, follower = form_static(rig)
    back = rig.join(instance="b", version=5).value
    assert (back.error_code, back.generation_id, back.leader, back.members) == (
        0,
        2,
        leader,
        [],
    )
    assert back.member_id != follower and back.member_id.startswith("b-")
    assert rig.beat(leader, 2) == 0
    assert rig.beat(follower, 2, instance="b") == codes.FENCED_INSTANCE_ID
    assert (
        code_of(rig.sync(follower, 2, group_instance_id="b"))
        == codes.FENCED_INSTANCE_ID
    )
    assert (
        code_of(rig.join(follower, instance="b", version=5)) == codes.FENCED_INSTANCE_ID
    )
    assert rig.leave((follower, "b")) == [codes.FENCED_INSTANCE_ID]
    assert rig.sync(back.member_id, 2, group_instance_id="b").value.assignment == b"2"
    rig.restart()
    assert rig.beat(back.member_id, 2, instance="b") == 0


@in_both_homes
@pytest.mark.parametrize("version", [5, 8, 9])
def test_a_static_leader_that_comes_back_does_not_assign(
    rig: Rig, version: int
) -> None:
    leader, _ = form_static(rig)
    back = rig.join(instance="a", version=version).value
    assert back.generation_id == 2
    if version < 9:
        assert back.leader == leader != back.member_id and not back.members
    else:
        assert (
            back.skip_assignment
            and back.leader == back.member_id
            and len(back.members) == 2
        )


@in_both_homes
def test_a_static_member_that_comes_back_with_another_protocol_rebalances(
    rig: Rig,
) -> None:
    more = {"protocols": {"range": b"", "sticky": b""}}
    leader, _ = form_static(rig, **more)
    back = rig.join(instance="b", version=5, protocols={"sticky": b""})
    assert not back.is_set
    assert (
        rig.join(leader, instance="a", version=5, **more).value.protocol_name
        == "sticky"
    )
    assert back.is_set


@in_both_homes
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


@in_both_homes
def test_a_static_member_stays_until_its_session_ends(rig: Rig) -> None:
    _, follower = form_static(rig, session_ms=60_000)
    newcomer = rig.join()
    rig.sleep(REBALANCE_MS - 1)
    waiting = rig.join(follower, instance="b", version=5, session_ms=60_000)
    rig.sleep(1)
    assert waiting.value.leader == follower
    assert {member.group_instance_id for member in waiting.value.members} == {
        "a",
        "b",
        None,
    }
    assert newcomer.is_set


def test_a_group_of_static_members_waits_until_one_of_them_comes_back(rig: Rig) -> None:
    leader, follower = form_static(rig, session_ms=60_000, rebalance_ms=0)
    rig.join(rebalance_ms=2_000, version=3)
    rig.leave(("cli-0003", None))
    rig.sleep(5_000)
    assert rig.describe().group_state == machine.PREPARING
    assert {member.member_id for member in rig.describe().members} == {leader, follower}
    back = rig.join(
        follower, instance="b", version=5, session_ms=60_000, rebalance_ms=0
    )
    rig.sleep(1_000)
    assert back.value.leader == follower


@in_both_homes
def test_an_admin_removes_static_members(rig: Rig) -> None:
    leader, _ = form_static(rig)
    assert rig.leave(("", "b"), ("", "z"), ("", None)) == [
        0,
        codes.UNKNOWN_MEMBER_ID,
        codes.UNKNOWN_MEMBER_ID,
    ]
    assert [
        m.group_instance_id
        for m in rig.join(leader, instance="a", version=5).value.members
    ] == ["a"]


def test_a_static_member_finds_its_place_in_a_full_group(tmp_path: Path) -> None:
    with Rig(tmp_path, group_max_size=2) as rig:
        form_static(rig)
        assert rig.join(instance="b", version=5).value.error_code == 0
        assert (
            code_of(rig.join(instance="c", version=5)) == codes.GROUP_MAX_SIZE_REACHED
        )
