"""Scripts of requests to groups of both protocols, and about their offsets."""

from __future__ import annotations

from typing import Any

from netshim import wire
from netshim.wire import codes
from support.conformance import RecordingClient, Script

#: A subscription to a topic "t", version 0, in the form in which members exchange it.
SUBSCRIPTION = b"\0\0\0\0\0\1\0\1t\0\0\0\0"
_SESSION = {
    "session_timeout_ms": 30_000,
    "rebalance_timeout_ms": 30_000,
    "protocol_type": "consumer",
}
_BASIC_JOIN = 5


def wait_for_coordinator(client: RecordingClient, group_id: str) -> None:
    """Wait until the broker coordinates a group."""

    def ask() -> tuple[int, Any]:
        response = client.ask_unrecorded(
            wire.HEARTBEAT, 4, group_id=group_id, generation_id=1, member_id="nobody"
        )
        return response.error_code, response

    client.ask_unrecorded(
        wire.FIND_COORDINATOR, 4, coordinator_keys=[group_id], key_type=0
    )
    client.until_ready(ask)


def join(client: RecordingClient, group_id: str, **more: Any) -> Any:
    """Let a member join by the classic protocol. In a group without other members, the
    member is the leader.
    """
    fields = {
        **_SESSION,
        "protocols": [{"name": "range", "metadata": SUBSCRIPTION}],
        "group_id": group_id,
        **more,
    }
    first = client.ask_unrecorded(wire.JOIN_GROUP, _BASIC_JOIN, **fields)
    if first.error_code != codes.MEMBER_ID_REQUIRED:
        return first
    return client.ask_unrecorded(
        wire.JOIN_GROUP, _BASIC_JOIN, **{**fields, "member_id": first.member_id}
    )


def create_stable_group(client: RecordingClient, suffix: str = "") -> tuple[str, str]:
    """Create a group with one member that has its assignment, and return the group id
    and the member id.
    """
    group_id = f"{client.name}{suffix}"
    wait_for_coordinator(client, group_id)
    joined = join(client, group_id)
    assignment = {"member_id": joined.member_id, "assignment": b"mine"}
    done = client.ask_unrecorded(
        wire.SYNC_GROUP, 3,
        group_id=group_id, generation_id=joined.generation_id, member_id=joined.member_id, assignments=[assignment],
    )  # fmt: skip
    assert done.error_code == 0, done
    return group_id, joined.member_id


def find_coordinator(client: RecordingClient) -> None:
    wait_for_coordinator(client, client.name)
    has_list = client.version >= 4

    def ask(step: str, key: str, key_type: int) -> None:
        keys = {"coordinator_keys": [key]} if has_list else {"key": key}
        client.ask(step, key_type=key_type, **keys)

    ask("of a group", client.name, 0)
    ask("of an empty group id", "", 0)
    if client.version >= 1:
        ask("of an unknown type", client.name, 9)
        ask("of share groups", client.name, 2)
    if has_list:
        client.ask(
            "of two", key_type=0, coordinator_keys=[client.name, f"{client.name}-other"]
        )
        client.ask("of none", key_type=0, coordinator_keys=[])


def join_group(client: RecordingClient) -> None:
    group_id = client.name
    wait_for_coordinator(client, group_id)
    fields = {
        **_SESSION,
        "protocols": [{"name": "range", "metadata": SUBSCRIPTION}],
        "group_id": group_id,
    }
    client.ask("an empty group id", **{**fields, "group_id": ""})
    client.ask("a session that is too short", **{**fields, "session_timeout_ms": 1})
    client.ask(
        "a session that is too long", **{**fields, "session_timeout_ms": 2_000_000_000}
    )
    client.ask("no protocols", **{**fields, "protocols": []})
    client.ask("no type of protocol", **{**fields, "protocol_type": ""})
    client.ask("an unknown member", **{**fields, "member_id": "nobody"})
    first = client.ask("the first member", **fields)
    member_id = first.member_id
    if first.error_code == codes.MEMBER_ID_REQUIRED:
        client.ask("the first member, by its id", **{**fields, "member_id": member_id})
    client.ask("another type of protocol", **{**fields, "protocol_type": "connect"})
    other = [{"name": "roundrobin", "metadata": b""}]
    client.ask("no protocol in common", **{**fields, "protocols": other})
    client.ask("the first member again", **{**fields, "member_id": member_id})
    if client.version >= 5:
        static = {**fields, "group_id": f"{group_id}-static", "group_instance_id": "i"}
        made = client.ask("a static member", **static)
        client.ask(
            "a static member by its id", **{**static, "member_id": made.member_id}
        )
        client.ask("a static member by another id", **{**static, "member_id": "nobody"})


def heartbeat(client: RecordingClient) -> None:
    group_id, member_id = create_stable_group(client)
    fields = {"group_id": group_id, "member_id": member_id, "generation_id": 1}
    client.ask("a member", **fields)
    client.ask("another generation", **{**fields, "generation_id": 7})
    client.ask("an unknown member", **{**fields, "member_id": "nobody"})
    client.ask("an unknown group", **{**fields, "group_id": f"{group_id}-none"})
    client.ask("an empty group id", **{**fields, "group_id": ""})
    if client.version >= 3:
        client.ask("an unknown static member", **fields, group_instance_id="i")


def sync_group(client: RecordingClient) -> None:
    group_id = client.name
    wait_for_coordinator(client, group_id)
    joined = join(client, group_id)
    member_id = joined.member_id
    fields = {
        "group_id": group_id,
        "member_id": member_id,
        "generation_id": joined.generation_id,
    }
    assignments = [{"member_id": member_id, "assignment": b"mine"}]
    if client.version >= 5:
        fields |= {"protocol_type": "consumer", "protocol_name": "range"}
        client.ask(
            "another protocol",
            **{**fields, "protocol_name": "roundrobin"},
            assignments=assignments,
        )
        client.ask(
            "another type of protocol",
            **{**fields, "protocol_type": "connect"},
            assignments=assignments,
        )
    client.ask(
        "another generation", **{**fields, "generation_id": 7}, assignments=assignments
    )
    client.ask(
        "an unknown member",
        **{**fields, "member_id": "nobody"},
        assignments=assignments,
    )
    client.ask(
        "an unknown group",
        **{**fields, "group_id": f"{group_id}-none"},
        assignments=assignments,
    )
    client.ask(
        "an empty group id", **{**fields, "group_id": ""}, assignments=assignments
    )
    client.ask("the leader", **fields, assignments=assignments)
    client.ask("the leader again", **fields, assignments=[])


def leave_group(client: RecordingClient) -> None:
    group_id, member_id = create_stable_group(client)

    def ask(step: str, group_id: str, member_id: str) -> None:
        if client.version >= 3:
            client.ask(step, group_id=group_id, members=[{"member_id": member_id}])
        else:
            client.ask(step, group_id=group_id, member_id=member_id)

    ask("an unknown member", group_id, "nobody")
    ask("an unknown group", f"{group_id}-none", "nobody")
    ask("an empty group id", "", "nobody")
    if client.version >= 3:
        unknown = {"member_id": "", "group_instance_id": "i"}
        client.ask("an unknown static member", group_id=group_id, members=[unknown])
        client.ask("nobody", group_id=group_id, members=[])
    ask("a member", group_id, member_id)
    ask("the same again", group_id, member_id)


def describe_groups(client: RecordingClient) -> None:
    name = client.create_topic()
    group_id, _ = create_stable_group(client)
    # Otherwise, other scripts would decide whether a group with an empty name exists.
    commit(client, "", name)
    client.ask("a group", groups=[group_id])
    client.ask("an unknown group", groups=[f"{group_id}-none"])
    client.ask("an empty group id", groups=[""])
    client.ask("no group", groups=[])
    if client.version >= 3:
        client.ask(
            "with operations", groups=[group_id], include_authorized_operations=True
        )


def list_groups(client: RecordingClient) -> None:
    group_id, _ = create_stable_group(client)
    filters: list[tuple[str, dict[str, Any]]] = [("all", {})]
    if client.version >= 4:
        filters += [
            (state, {"states_filter": [state]})
            for state in ("Stable", "stable", "Dead", "no state")
        ]
    if client.version >= 5:
        filters += [
            (kind, {"types_filter": [kind]})
            for kind in ("classic", "Consumer", "no type")
        ]
    for step, fields in filters:
        response = client.ask(step, **fields)
        _, recorded = client.recorded.pop()
        if response is not None:
            recorded["groups"] = [
                each for each in recorded["groups"] if each["group_id"] == group_id
            ]
        client.recorded.append((step, recorded))


def offset_commit(client: RecordingClient) -> None:
    name = client.create_topic()
    group_id, member_id = create_stable_group(client, "-group")
    simple = f"{client.name}-simple"

    def ask(
        step: str, group_id: str, topic: str = name, partition: int = 0, **more: Any
    ) -> None:
        fields = {
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "retention_time_ms": -1,
        }
        part = {
            "partition_index": partition,
            "committed_offset": 5,
            "committed_metadata": "m",
        }
        for key, value in more.items():
            (part if key.startswith("committed") else fields)[key] = value
        if client.version > 4:
            fields.pop("retention_time_ms")
        client.ask(
            step,
            group_id=group_id,
            topics=[{"name": topic, "partitions": [part]}],
            **fields,
        )

    ask("without a member", simple)
    ask("no text", simple, committed_metadata=None)
    ask("a long text", simple, committed_metadata="x" * 5_000)
    ask("an offset below zero", simple, committed_offset=-1)
    ask("no such topic", simple, f"{name}-none")
    ask("no such partition", simple, partition=7)
    ask("an empty group id", "")
    ask(
        "a generation without a group",
        f"{simple}-none",
        generation_id_or_member_epoch=3,
        member_id="nobody",
    )
    ask("a member", group_id, generation_id_or_member_epoch=1, member_id=member_id)
    ask(
        "another generation",
        group_id,
        generation_id_or_member_epoch=7,
        member_id=member_id,
    )
    ask(
        "an unknown member",
        group_id,
        generation_id_or_member_epoch=1,
        member_id="nobody",
    )
    ask("without a member, in a group with members", group_id)
    client.ask(
        "no topics", group_id=simple, generation_id_or_member_epoch=-1, topics=[]
    )


def commit(client: RecordingClient, group_id: str, topic: str, offset: int = 5) -> None:
    part = {
        "partition_index": 0,
        "committed_offset": offset,
        "committed_leader_epoch": 0,
        "committed_metadata": "m",
    }
    response = client.ask_unrecorded(
        wire.OFFSET_COMMIT, 8,
        group_id=group_id, generation_id_or_member_epoch=-1, topics=[{"name": topic, "partitions": [part]}],
    )  # fmt: skip
    assert response.topics[0].partitions[0].error_code == 0, response


def offset_fetch(client: RecordingClient) -> None:
    name = client.create_topic()
    group_id = f"{client.name}-simple"
    wait_for_coordinator(client, group_id)
    commit(client, group_id, name)
    has_groups = client.version >= 8

    def ask(
        step: str, group_id: str, topics: list[dict[str, Any]] | None, **more: Any
    ) -> None:
        if has_groups:
            client.ask(step, groups=[{"group_id": group_id, "topics": topics}], **more)
        else:
            client.ask(step, group_id=group_id, topics=topics, **more)

    both = [{"name": name, "partition_indexes": [0, 1]}]
    ask("a committed and an uncommitted partition", group_id, both)
    ask("no such topic", group_id, [{"name": f"{name}-none", "partition_indexes": [0]}])
    ask("no such partition", group_id, [{"name": name, "partition_indexes": [7]}])
    ask("an unknown group", f"{group_id}-none", both)
    ask("an empty group id", "", both)
    ask("no topics", group_id, [])
    if client.version >= 2:
        ask("all topics", group_id, None)
        ask("all topics of an unknown group", f"{group_id}-none", None)
    if client.version >= 7:
        ask("only stable offsets", group_id, both, require_stable=True)
    if client.version >= 9:
        group = {
            "group_id": group_id,
            "topics": both,
            "member_id": "nobody",
            "member_epoch": 1,
        }
        client.ask("an unknown member", groups=[group])
    if has_groups:
        groups = [
            {"group_id": group_id, "topics": both},
            {"group_id": f"{group_id}-none", "topics": None},
        ]
        client.ask("two groups", groups=groups)


def delete_groups(client: RecordingClient) -> None:
    name = client.create_topic()
    group_id = f"{client.name}-simple"
    wait_for_coordinator(client, group_id)
    commit(client, group_id, name)
    commit(client, "", name)
    full, _ = create_stable_group(client, "-full")
    client.ask("a group with members", groups_names=[full])
    client.ask("a group", groups_names=[group_id])
    client.ask("the same again", groups_names=[group_id])
    client.ask("an empty group id", groups_names=[""])
    client.ask("no group", groups_names=[])


def offset_delete(client: RecordingClient) -> None:
    name = client.create_topic()
    group_id = f"{client.name}-simple"
    wait_for_coordinator(client, group_id)
    commit(client, group_id, name)
    full, _ = create_stable_group(client, "-full")

    def ask(step: str, group_id: str, topic: str = name, partition: int = 0) -> None:
        topics = [{"name": topic, "partitions": [{"partition_index": partition}]}]
        client.ask(step, group_id=group_id, topics=topics)

    ask("of an unknown group", f"{group_id}-none")
    ask("of an empty group id", "")
    ask("no such topic", group_id, f"{name}-none")
    ask("no such partition", group_id, partition=7)
    ask("an uncommitted partition", group_id, partition=1)
    ask("of a group with members", full)
    ask("committed", group_id)
    ask("the same again", group_id)


def _wait_for_group(client: RecordingClient, group_id: str) -> None:
    def ask() -> tuple[int, Any]:
        response = client.ask_unrecorded(
            wire.CONSUMER_GROUP_HEARTBEAT,
            1,
            group_id=group_id,
            member_id="nobody",
            member_epoch=1,
        )
        return response.error_code, response

    client.ask_unrecorded(
        wire.FIND_COORDINATOR, 4, coordinator_keys=[group_id], key_type=0
    )
    client.until_ready(ask)


def consumer_group_heartbeat(client: RecordingClient) -> None:
    """test_interop_consumer_groups.py tests the steps of this protocol; this script
    covers both versions, and refused requests.
    """
    group_id = client.name
    _wait_for_group(client, group_id)
    joining = {
        "rebalance_timeout_ms": 30_000,
        "subscribed_topic_names": ["t"],
        "topic_partitions": [],
    }
    client.ask("an empty group id", **joining, group_id="", member_id="A")
    client.ask("an unknown member", group_id=group_id, member_id="A", member_epoch=3)
    client.ask("no id", **joining, group_id=group_id, member_id="")
    client.ask(
        "no subscription",
        group_id=group_id,
        member_id="A",
        rebalance_timeout_ms=30_000,
        topic_partitions=[],
    )
    client.ask(
        "another assignor",
        **joining,
        group_id=group_id,
        member_id="A",
        server_assignor="sticky",
    )
    client.ask("a join", **joining, group_id=group_id, member_id="A")
    client.ask("a heartbeat", group_id=group_id, member_id="A", member_epoch=1)
    client.ask("a future epoch", group_id=group_id, member_id="A", member_epoch=8)
    classic, _ = create_stable_group(client, "-classic")
    client.ask("a join of a classic group", **joining, group_id=classic, member_id="A")
    client.ask("a leave", group_id=group_id, member_id="A", member_epoch=-1)


def consumer_group_describe(client: RecordingClient) -> None:
    group_id = client.name
    _wait_for_group(client, group_id)
    joining = {
        "rebalance_timeout_ms": 30_000,
        "subscribed_topic_names": ["t"],
        "topic_partitions": [],
    }
    made = client.ask_unrecorded(
        wire.CONSUMER_GROUP_HEARTBEAT, 1, **joining, group_id=group_id, member_id="A"
    )
    assert made.error_code == 0, made
    client.ask("a group", group_ids=[group_id])
    client.ask("an unknown group", group_ids=[f"{group_id}-none"])
    client.ask("an empty group id", group_ids=[""])
    classic, _ = create_stable_group(client, "-classic")
    client.ask("a classic group", group_ids=[classic])
    client.ask(
        "with operations", group_ids=[group_id], include_authorized_operations=True
    )


SCRIPTS: dict[Any, list[Script]] = {
    wire.FIND_COORDINATOR: [find_coordinator],
    wire.JOIN_GROUP: [join_group],
    wire.HEARTBEAT: [heartbeat],
    wire.SYNC_GROUP: [sync_group],
    wire.LEAVE_GROUP: [leave_group],
    wire.DESCRIBE_GROUPS: [describe_groups],
    wire.LIST_GROUPS: [list_groups],
    wire.OFFSET_COMMIT: [offset_commit],
    wire.OFFSET_FETCH: [offset_fetch],
    wire.DELETE_GROUPS: [delete_groups],
    wire.OFFSET_DELETE: [offset_delete],
    wire.CONSUMER_GROUP_HEARTBEAT: [consumer_group_heartbeat],
    wire.CONSUMER_GROUP_DESCRIBE: [consumer_group_describe],
}
