"""Scripts of requests about topics, settings, the cluster and access."""

from __future__ import annotations

from typing import Any

from netshim import wire
from support.conformance import RecordingClient, Script
from support.conformance.data import batch
from support.conformance.groups import commit, wait_for_coordinator

#: Kinds of resources in requests about settings.
TOPIC = 2
BROKER = 4
GROUP = 32
_SESSION = "consumer.session.timeout.ms"
_INTERVAL = "consumer.heartbeat.interval.ms"
#: Settings that both brokers have, with the same default.
KNOWN = [
    "cleanup.policy",
    "retention.ms",
    "segment.bytes",
    "compression.type",
    "max.message.bytes",
]


def api_versions(client: RecordingClient) -> None:
    """Check only whether versions are reported. The table in docs/conformance.md lists the
    versions.
    """
    named = {"client_software_name": "tests", "client_software_version": "1.0"}
    steps: list[tuple[str, dict[str, Any]]] = [("a request", named)]
    if client.version >= 3:
        steps += [
            ("a name with a space", {**named, "client_software_name": "a b"}),
            ("an empty name", {**named, "client_software_name": ""}),
            ("an empty version", {**named, "client_software_version": ""}),
        ]
    for step, fields in steps:
        client.ask(step, **fields)
        _, recorded = client.recorded.pop()
        if isinstance(recorded, dict):
            recorded = {
                "error_code": recorded["error_code"],
                "has_keys": bool(recorded["api_keys"]),
            }
        client.recorded.append((step, recorded))


def create_topics(client: RecordingClient) -> None:
    existing = client.create_topic("-there")
    name = client.name

    def ask(step: str, *topics: dict[str, Any], **more: Any) -> None:
        full = [
            {"num_partitions": 1, "replication_factor": 1, **topic} for topic in topics
        ]
        client.ask(step, topics=full, timeout_ms=30_000, **more)
        step, recorded = client.recorded.pop()
        # Compare only settings that both brokers have: DescribeConfigs compares the
        # lists.
        for topic in recorded["topics"]:
            topic["configs"] = [
                each for each in topic.get("configs") or () if each["name"] in KNOWN
            ]
        client.recorded.append((step, recorded))

    def config(key: str, value: str | None) -> list[dict[str, Any]]:
        return [{"name": key, "value": value}]

    ask("an existing topic", {"name": existing})
    ask("an empty name", {"name": ""})
    ask("an impossible name", {"name": "a b"})
    ask("a dot", {"name": "."})
    ask("two dots", {"name": ".."})
    ask("a name of 250 characters", {"name": "x" * 250})
    ask("no partitions", {"name": name, "num_partitions": 0})
    ask("partitions below -1", {"name": name, "num_partitions": -2})
    ask(
        "too many partitions for one request",
        {"name": name, "num_partitions": 10_001},
        {"name": f"{name}-other"},
    )
    ask("no replicas", {"name": name, "replication_factor": 0})
    ask("an unknown setting", {"name": name, "configs": config("no.such", "1")})
    ask(
        "a setting without a value",
        {"name": name, "configs": config("retention.ms", None)},
    )
    ask(
        "a value that is not a number",
        {"name": name, "configs": config("retention.ms", "long")},
    )
    ask(
        "a value below its range",
        {"name": name, "configs": config("segment.bytes", "1")},
    )
    ask(
        "an unknown policy",
        {"name": name, "configs": config("cleanup.policy", "keep")},
    )
    # The first commit creates the topic.
    wait_for_coordinator(client, f"{client.name}-group")
    commit(client, f"{client.name}-group", existing)
    ask("an internal name", {"name": "__consumer_offsets"})
    ask("the same entry twice", {"name": f"{name}-twice"}, {"name": f"{name}-twice"})
    assigned = [{"partition_index": 0, "broker_ids": [1]}]
    ask("both assignments and a count", {"name": name, "assignments": assigned})
    ask(
        "a gap in the assignments",
        _assigned(name, [{"partition_index": 1, "broker_ids": [1]}]),
    )
    ask(
        "assigned to no broker",
        _assigned(name, [{"partition_index": 0, "broker_ids": []}]),
    )
    ask(
        "assigned to another broker",
        _assigned(name, [{"partition_index": 0, "broker_ids": [99]}]),
    )
    ask(
        "assigned to a broker twice",
        _assigned(name, [{"partition_index": 0, "broker_ids": [1, 1]}]),
    )
    ask("only validated", {"name": name}, validate_only=True)
    ask(
        "only validated, with an error",
        {"name": name, "num_partitions": 0},
        validate_only=True,
    )
    ask("created", {"name": name, "configs": config("retention.ms", "5000")})
    ask("assigned", _assigned(f"{name}-assigned", assigned))
    if client.version >= 4:
        ask(
            "with default counts",
            {"name": f"{name}-d", "num_partitions": -1, "replication_factor": -1},
        )
    ask("a dot instead of an underscore", {"name": f"{name}.collides"})
    ask("an underscore instead of a dot", {"name": f"{name}_collides"})
    client.ask("none", topics=[], timeout_ms=30_000)


def _assigned(name: str, assignments: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "num_partitions": -1,
        "replication_factor": -1,
        "assignments": assignments,
    }


def delete_topics(client: RecordingClient) -> None:
    name = client.create_topic()
    other = client.create_topic("-other")
    other_id = client.wait_for_topic(other, 2)

    def ask(step: str, *names: str) -> None:
        if client.version >= 6:
            client.ask(
                step, topics=[{"name": each} for each in names], timeout_ms=30_000
            )
        else:
            client.ask(step, topic_names=[*names], timeout_ms=30_000)

    ask("no such topic", f"{name}-none")
    ask("an impossible name", "a b")
    ask("the same entry twice", name, name)
    ask("an existing and a missing topic", name, f"{name}-none")
    ask("none")
    if client.version >= 6:
        client.ask(
            "by an unknown id",
            topics=[{"name": None, "topic_id": b"\1" * 16}],
            timeout_ms=30_000,
        )
        client.ask("without name and id", topics=[{"name": None}], timeout_ms=30_000)
        client.ask(
            "by name and id",
            topics=[{"name": other, "topic_id": other_id}],
            timeout_ms=30_000,
        )
        client.ask(
            "by its id",
            topics=[{"name": None, "topic_id": other_id}],
            timeout_ms=30_000,
        )


def create_partitions(client: RecordingClient) -> None:
    name = client.create_topic()

    def ask(step: str, topic: str, count: int, **more: Any) -> None:
        client.ask(
            step,
            topics=[{"name": topic, "count": count, "assignments": None, **more}],
            timeout_ms=30_000,
        )

    ask("no such topic", f"{name}-none", 3)
    ask("the current count", name, 2)
    ask("fewer", name, 1)
    ask("none", name, 0)
    ask("below zero", name, -1)
    ask("too few assigned", name, 4, assignments=[{"broker_ids": [1]}])
    ask("assigned to another broker", name, 3, assignments=[{"broker_ids": [99]}])
    client.ask(
        "only validated",
        topics=[{"name": name, "count": 3, "assignments": None}],
        timeout_ms=1,
        validate_only=True,
    )
    ask("more", name, 3)
    ask("assigned", name, 4, assignments=[{"broker_ids": [1]}])
    duplicate = {"name": name, "count": 9, "assignments": None}
    client.ask("a topic twice", topics=[duplicate, duplicate], timeout_ms=30_000)


def describe_configs(client: RecordingClient) -> None:
    name = client.create_topic(retention_ms="5000")
    keys = [key for key in KNOWN if key != "segment.bytes"]

    def ask(
        step: str, kind: int, resource: str, keys: list[str] | None = keys, **more: Any
    ) -> None:
        entry = {
            "resource_type": kind,
            "resource_name": resource,
            "configuration_keys": keys,
        }
        client.ask(step, resources=[entry], **more)

    ask("a topic", TOPIC, name)
    ask("no setting", TOPIC, name, [])
    step, recorded = client.recorded.pop()
    client.recorded.append((step, bool(recorded["results"][0]["configs"])))
    ask("an unknown setting", TOPIC, name, ["no.such"])
    ask("no such topic", TOPIC, f"{name}-none")
    ask("an impossible name", TOPIC, "a b")
    ask("another broker", BROKER, "99", ["log.retention.ms"])
    ask("a broker id that is not a number", BROKER, "x", ["log.retention.ms"])
    ask("an unknown type", 77, name)
    client.ask("none", resources=[])
    if client.version >= 1:
        ask("with synonyms", TOPIC, name, ["retention.ms"], include_synonyms=True)
    ask("an unknown group", GROUP, client.name, [_SESSION, _INTERVAL])
    ask("a group without a name", GROUP, "", [_SESSION])
    client.ask(
        "all of a topic",
        resources=[
            {"resource_type": TOPIC, "resource_name": name, "configuration_keys": None}
        ],
    )
    step, recorded = client.recorded.pop()
    recorded["results"] = [
        sorted(each["name"] for each in result["configs"])
        for result in recorded["results"]
    ]
    client.recorded.append((step, recorded))


def alter_configs(client: RecordingClient) -> None:
    name = client.create_topic(retention_ms="5000")

    def ask(
        step: str,
        resource: str,
        *settings: tuple[str, str | None],
        kind: int = TOPIC,
        **more: Any,
    ) -> None:
        configs = [{"name": key, "value": value} for key, value in settings]
        entry = {"resource_type": kind, "resource_name": resource, "configs": configs}
        client.ask(step, resources=[entry], **more)

    ask("no such topic", f"{name}-none", ("retention.ms", "1000"))
    ask("an unknown setting", name, ("no.such", "1"))
    ask("a value that is not a number", name, ("retention.ms", "long"))
    ask("a setting without a value", name, ("retention.ms", None))
    ask("the same entry twice", name, ("retention.ms", "1"), ("retention.ms", "2"))
    ask("an unknown type", name, ("retention.ms", "1"), kind=77)
    ask("only validated", name, ("retention.ms", "7000"), validate_only=True)
    ask("a setting that replaces all others", name, ("segment.ms", "90000"))
    client.ask("none", resources=[])
    duplicate = {"resource_type": TOPIC, "resource_name": name, "configs": []}
    client.ask("a topic twice", resources=[duplicate, duplicate])
    _record_topic_settings(client, name)
    ask("a group", client.name, (_SESSION, "50000"), kind=GROUP)
    ask(
        "a group: a setting that replaces all others",
        client.name,
        (_INTERVAL, "6000"),
        kind=GROUP,
    )
    ask(
        "a group: an unknown setting", client.name, ("retention.ms", "1000"), kind=GROUP
    )
    ask(
        "a group: a value that is not a number",
        client.name,
        (_SESSION, "long"),
        kind=GROUP,
    )
    ask("a group without a name", "", (_SESSION, "50000"), kind=GROUP)
    _record_group_settings(client)


def incremental_alter_configs(client: RecordingClient) -> None:
    name = client.create_topic(cleanup_policy="delete")

    def ask(
        step: str,
        resource: str,
        key: str,
        operation: int,
        value: str | None,
        kind: int = TOPIC,
    ) -> None:
        configs = [{"name": key, "config_operation": operation, "value": value}]
        client.ask(
            step,
            resources=[
                {"resource_type": kind, "resource_name": resource, "configs": configs}
            ],
        )

    ask("no such topic", f"{name}-none", "retention.ms", 0, "1000")
    ask("set", name, "retention.ms", 0, "6000")
    ask("set to null", name, "retention.ms", 0, None)
    ask("delete", name, "retention.ms", 1, None)
    ask("delete an unset setting", name, "segment.ms", 1, None)
    ask("append", name, "cleanup.policy", 2, "compact")
    ask("append a present entry", name, "cleanup.policy", 2, "compact")
    ask("subtract", name, "cleanup.policy", 3, "delete")
    ask("append to a setting that is not a list", name, "retention.ms", 2, "1")
    ask("an unknown operation", name, "retention.ms", 9, "1")
    ask("an unknown setting", name, "no.such", 0, "1")
    ask("a value that is not a number", name, "retention.ms", 0, "long")
    ask("an unknown type", name, "retention.ms", 0, "1", kind=77)
    config = {"name": "retention.ms", "config_operation": 0, "value": "1"}
    client.ask(
        "the same entry twice",
        resources=[
            {"resource_type": TOPIC, "resource_name": name, "configs": [config, config]}
        ],
    )
    _record_topic_settings(client, name)
    ask("a group: set", client.name, _SESSION, 0, "50000", kind=GROUP)
    ask("a group: set another", client.name, _INTERVAL, 0, "6000", kind=GROUP)
    ask("a group: delete", client.name, _SESSION, 1, "", kind=GROUP)
    ask("a group: delete an unset setting", client.name, _SESSION, 1, "", kind=GROUP)
    ask("a group: append", client.name, _SESSION, 2, "1", kind=GROUP)
    ask("a group: an unknown setting", client.name, "no.such", 0, "1", kind=GROUP)
    ask("a group: delete an unknown setting", client.name, "no.such", 1, "", kind=GROUP)
    ask(
        "a group: a value that is not a number",
        client.name,
        _SESSION,
        0,
        "long",
        kind=GROUP,
    )
    ask("a group: too small", client.name, _SESSION, 0, "10", kind=GROUP)
    ask("a group: set to null", client.name, _SESSION, 0, None, kind=GROUP)
    ask("a group without a name", "", _SESSION, 0, "50000", kind=GROUP)
    _record_group_settings(client)


def _record_topic_settings(client: RecordingClient, name: str) -> None:
    """Record the final settings of a topic."""
    resource = {
        "resource_type": TOPIC,
        "resource_name": name,
        "configuration_keys": [*KNOWN, "segment.ms"],
    }
    response = client.ask_unrecorded(wire.DESCRIBE_CONFIGS, 4, resources=[resource])
    settings = {
        config.name: config.value
        for config in response.results[0].configs
        if config.config_source == 1
    }
    client.recorded.append(("the final settings", settings))


def _record_group_settings(client: RecordingClient) -> None:
    """Record the final settings of the group with the client's name."""
    resource = {
        "resource_type": GROUP,
        "resource_name": client.name,
        "configuration_keys": [_SESSION, _INTERVAL],
    }
    response = client.ask_unrecorded(wire.DESCRIBE_CONFIGS, 4, resources=[resource])
    settings = {
        config.name: [config.value, config.config_source]
        for config in response.results[0].configs
    }
    client.recorded.append(("the final settings of the group", settings))


def describe_log_dirs(client: RecordingClient) -> None:
    name = client.create_topic()
    client.produce(name, batch(b"a"))
    client.ask("a topic", topics=[{"topic": name, "partitions": [0, 1]}])
    client.ask("no such topic", topics=[{"topic": f"{name}-none", "partitions": [0]}])
    client.ask("no topic", topics=[])


def describe_cluster(client: RecordingClient) -> None:
    client.ask("a request")
    client.ask("with operations", include_cluster_authorized_operations=True)
    if client.version >= 1:
        client.ask("the controllers", endpoint_type=2)
        client.ask("an unknown endpoint type", endpoint_type=7)


def elect_leaders(client: RecordingClient) -> None:
    name = client.create_topic()

    def ask(step: str, topic: str, partition: int, kind: int = 0) -> None:
        fields = {"election_type": kind} if client.version >= 1 else {}
        client.ask(
            step,
            timeout_ms=30_000,
            topic_partitions=[{"topic": topic, "partitions": [partition]}],
            **fields,
        )

    ask("a partition with its preferred leader", name, 0)
    ask("no such partition", name, 7)
    ask("no such topic", f"{name}-none", 0)
    if client.version >= 1:
        ask("an unclean election that is not needed", name, 0, kind=1)
        ask("an unknown type", name, 0, kind=5)
    client.ask("none", timeout_ms=30_000, topic_partitions=[])


def alter_reassignments(client: RecordingClient) -> None:
    name = client.create_topic()

    def ask(
        step: str, replicas: list[int] | None, topic: str = name, partition: int = 0
    ) -> None:
        moved = {"partition_index": partition, "replicas": replicas}
        client.ask(
            step, timeout_ms=30_000, topics=[{"name": topic, "partitions": [moved]}]
        )

    ask("the current replica", [1])
    ask("an unknown broker", [7])
    ask("a broker twice", [1, 1])
    ask("a negative broker", [-1])
    ask("no replica", [])
    ask("nothing to cancel", None)
    ask("no such partition", [1], partition=7)
    ask("no such topic", [1], f"{name}-none")
    client.ask("no topics", timeout_ms=30_000, topics=[])
    if client.version >= 1:
        client.ask(
            "another replication factor, not allowed",
            timeout_ms=30_000,
            allow_replication_factor_change=False,
            topics=[
                {
                    "name": name,
                    "partitions": [{"partition_index": 0, "replicas": [1, 2]}],
                }
            ],
        )


def list_reassignments(client: RecordingClient) -> None:
    name = client.create_topic()
    client.ask(
        "a topic", timeout_ms=30_000, topics=[{"name": name, "partition_indexes": [0]}]
    )
    client.ask(
        "no such topic",
        timeout_ms=30_000,
        topics=[{"name": f"{name}-none", "partition_indexes": [0]}],
    )
    client.ask("all", timeout_ms=30_000, topics=None)


_ANY_ACL = {
    "resource_type_filter": 1, "resource_name_filter": None, "pattern_type_filter": 1, "principal_filter": None,
    "host_filter": None, "operation": 1, "permission_type": 1,
}  # fmt: skip


def describe_acls(client: RecordingClient) -> None:
    client.ask("all", **_ANY_ACL)
    client.ask("an unknown operation", **{**_ANY_ACL, "operation": 99})


def create_acls(client: RecordingClient) -> None:
    made = {
        "resource_type": 2, "resource_name": "t", "resource_pattern_type": 3, "principal": "User:a", "host": "*",
        "operation": 3, "permission_type": 3,
    }  # fmt: skip
    client.ask("one", creations=[made])
    client.ask("none", creations=[])


def delete_acls(client: RecordingClient) -> None:
    client.ask("all", filters=[_ANY_ACL])
    client.ask("none", filters=[])


def describe_quotas(client: RecordingClient) -> None:
    client.ask(
        "of a user",
        components=[{"entity_type": "user", "match_type": 0, "match": client.name}],
        strict=True,
    )
    client.ask("all", components=[])
    client.ask(
        "of an unknown entity type",
        components=[{"entity_type": "x", "match_type": 0, "match": "a"}],
    )


def alter_quotas(client: RecordingClient) -> None:
    def ask(step: str, kind: str, key: str, value: float, **more: Any) -> None:
        entry = {
            "entity": [{"entity_type": kind, "entity_name": client.name}],
            "ops": [{"key": key, "value": value}],
        }
        client.ask(step, entries=[entry], **more)

    ask("only validated", "user", "producer_byte_rate", 1000.0, validate_only=True)
    ask("an unknown key", "user", "no_such", 1.0)
    ask("an unknown type", "x", "producer_byte_rate", 1.0)
    ask("set", "user", "producer_byte_rate", 1000.0)


def describe_scram(client: RecordingClient) -> None:
    client.ask("an unknown user", users=[{"name": client.name}])
    client.ask(
        "the same entry twice", users=[{"name": client.name}, {"name": client.name}]
    )
    client.ask("all", users=[])


def alter_scram(client: RecordingClient) -> None:
    user = {
        "name": client.name,
        "mechanism": 1,
        "iterations": 4096,
        "salt": b"salt",
        "salted_password": b"p" * 32,
    }
    client.ask(
        "delete an unknown user",
        deletions=[{"name": client.name, "mechanism": 1}],
        upsertions=[],
    )
    client.ask(
        "too few iterations", deletions=[], upsertions=[{**user, "iterations": 10}]
    )
    client.ask(
        "an unknown mechanism",
        deletions=[],
        upsertions=[{**user, "mechanism": 9}],
    )


def sasl_handshake(client: RecordingClient) -> None:
    client.ask("on a listener without SASL", mechanism="PLAIN")


def sasl_authenticate(client: RecordingClient) -> None:
    client.ask("on a listener without SASL", auth_bytes=b"\0a\0b")


def list_config_resources(client: RecordingClient) -> None:
    name = client.create_topic()
    kinds: list[tuple[str, dict[str, Any]]] = [("all", {})]
    if client.version >= 1:
        kinds += [
            (f"kind {kind}", {"resource_types": [kind]})
            for kind in (2, 4, 8, 16, 32, 77)
        ]
    for step, fields in kinds:
        client.ask(step, **fields)
        _, recorded = client.recorded.pop()
        known = [
            each
            for each in recorded["config_resources"]
            if each["resource_name"] in (name, "1")
        ]
        client.recorded.append((step, {**recorded, "config_resources": known}))


SCRIPTS: dict[Any, list[Script]] = {
    wire.LIST_CONFIG_RESOURCES: [list_config_resources],
    wire.API_VERSIONS: [api_versions],
    wire.CREATE_TOPICS: [create_topics],
    wire.DELETE_TOPICS: [delete_topics],
    wire.CREATE_PARTITIONS: [create_partitions],
    wire.DESCRIBE_CONFIGS: [describe_configs],
    wire.ALTER_CONFIGS: [alter_configs],
    wire.INCREMENTAL_ALTER_CONFIGS: [incremental_alter_configs],
    wire.DESCRIBE_LOG_DIRS: [describe_log_dirs],
    wire.DESCRIBE_CLUSTER: [describe_cluster],
    wire.ELECT_LEADERS: [elect_leaders],
    wire.ALTER_PARTITION_REASSIGNMENTS: [alter_reassignments],
    wire.LIST_PARTITION_REASSIGNMENTS: [list_reassignments],
    wire.DESCRIBE_ACLS: [describe_acls],
    wire.CREATE_ACLS: [create_acls],
    wire.DELETE_ACLS: [delete_acls],
    wire.DESCRIBE_CLIENT_QUOTAS: [describe_quotas],
    wire.ALTER_CLIENT_QUOTAS: [alter_quotas],
    wire.DESCRIBE_USER_SCRAM_CREDENTIALS: [describe_scram],
    wire.ALTER_USER_SCRAM_CREDENTIALS: [alter_scram],
    wire.SASL_HANDSHAKE: [sasl_handshake],
    wire.SASL_AUTHENTICATE: [sasl_authenticate],
}
