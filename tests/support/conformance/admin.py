"""Requests about topics, settings, the cluster and access."""

from __future__ import annotations

from typing import Any

from netshim import wire
from support.conformance import Asker, Script
from support.conformance.data import batch
from support.conformance.groups import commit, coordinator

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


def api_versions(asker: Asker) -> None:
    """report.py compares the served versions in a table of its own; this script checks
    how they are reported.
    """
    named = {"client_software_name": "tests", "client_software_version": "1.0"}
    steps: list[tuple[str, dict[str, Any]]] = [("asked", named)]
    if asker.version >= 3:
        steps += [
            ("a name with a space", {**named, "client_software_name": "a b"}),
            ("an empty name", {**named, "client_software_name": ""}),
            ("an empty version", {**named, "client_software_version": ""}),
        ]
    for step, fields in steps:
        asker.ask(step, **fields)
        _, recorded = asker.recorded.pop()
        if isinstance(recorded, dict):
            recorded = {
                "error_code": recorded["error_code"],
                "has_keys": bool(recorded["api_keys"]),
            }
        asker.recorded.append((step, recorded))


def create_topics(asker: Asker) -> None:
    there = asker.topic("-there")
    name = asker.name

    def ask(step: str, *topics: dict[str, Any], **more: Any) -> None:
        full = [
            {"num_partitions": 1, "replication_factor": 1, **topic} for topic in topics
        ]
        asker.ask(step, topics=full, timeout_ms=30_000, **more)
        step, recorded = asker.recorded.pop()
        # Compare only settings that both brokers have: DescribeConfigs compares the
        # lists.
        for topic in recorded["topics"]:
            topic["configs"] = [
                each for each in topic.get("configs") or () if each["name"] in KNOWN
            ]
        asker.recorded.append((step, recorded))

    def config(key: str, value: str | None) -> list[dict[str, Any]]:
        return [{"name": key, "value": value}]

    ask("one that is there", {"name": there})
    ask("an empty name", {"name": ""})
    ask("an impossible name", {"name": "a b"})
    ask("a dot", {"name": "."})
    ask("two dots", {"name": ".."})
    ask("a name of 250 characters", {"name": "x" * 250})
    ask("no partitions", {"name": name, "num_partitions": 0})
    ask("partitions below -1", {"name": name, "num_partitions": -2})
    ask(
        "more partitions than one request makes",
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
        "a number that is none",
        {"name": name, "configs": config("retention.ms", "long")},
    )
    ask(
        "a number below its range",
        {"name": name, "configs": config("segment.bytes", "1")},
    )
    ask(
        "a policy that is not there",
        {"name": name, "configs": config("cleanup.policy", "keep")},
    )
    # The first commit creates the topic.
    coordinator(asker, f"{asker.name}-group")
    commit(asker, f"{asker.name}-group", there)
    ask("an internal name", {"name": "__consumer_offsets"})
    ask("one twice", {"name": f"{name}-twice"}, {"name": f"{name}-twice"})
    assigned = [{"partition_index": 0, "broker_ids": [1]}]
    ask("assigned and counted", {"name": name, "assignments": assigned})
    ask(
        "a gap in what is assigned",
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
    ask("only checked", {"name": name}, validate_only=True)
    ask(
        "only checked, and wrong",
        {"name": name, "num_partitions": 0},
        validate_only=True,
    )
    ask("made", {"name": name, "configs": config("retention.ms", "5000")})
    ask("assigned", _assigned(f"{name}-assigned", assigned))
    if asker.version >= 4:
        ask(
            "by default",
            {"name": f"{name}-d", "num_partitions": -1, "replication_factor": -1},
        )
    ask("a dot where an underscore is", {"name": f"{name}.collides"})
    ask("an underscore where a dot is", {"name": f"{name}_collides"})
    asker.ask("none", topics=[], timeout_ms=30_000)


def _assigned(name: str, assignments: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "num_partitions": -1,
        "replication_factor": -1,
        "assignments": assignments,
    }


def delete_topics(asker: Asker) -> None:
    name = asker.topic()
    other = asker.topic("-other")
    other_id = asker.wait_for(other, 2)

    def ask(step: str, *names: str) -> None:
        if asker.version >= 6:
            asker.ask(
                step, topics=[{"name": each} for each in names], timeout_ms=30_000
            )
        else:
            asker.ask(step, topic_names=[*names], timeout_ms=30_000)

    ask("no such topic", f"{name}-none")
    ask("an impossible name", "a b")
    ask("one twice", name, name)
    ask("one and one that is not there", name, f"{name}-none")
    ask("none")
    if asker.version >= 6:
        asker.ask(
            "by no id",
            topics=[{"name": None, "topic_id": b"\1" * 16}],
            timeout_ms=30_000,
        )
        asker.ask("by neither", topics=[{"name": None}], timeout_ms=30_000)
        asker.ask(
            "by both", topics=[{"name": other, "topic_id": other_id}], timeout_ms=30_000
        )
        asker.ask(
            "by its id",
            topics=[{"name": None, "topic_id": other_id}],
            timeout_ms=30_000,
        )


def create_partitions(asker: Asker) -> None:
    name = asker.topic()

    def ask(step: str, topic: str, count: int, **more: Any) -> None:
        asker.ask(
            step,
            topics=[{"name": topic, "count": count, "assignments": None, **more}],
            timeout_ms=30_000,
        )

    ask("no such topic", f"{name}-none", 3)
    ask("as many as there are", name, 2)
    ask("fewer", name, 1)
    ask("none", name, 0)
    ask("below zero", name, -1)
    ask("too few assigned", name, 4, assignments=[{"broker_ids": [1]}])
    ask("assigned to another broker", name, 3, assignments=[{"broker_ids": [99]}])
    asker.ask(
        "only checked",
        topics=[{"name": name, "count": 3, "assignments": None}],
        timeout_ms=1,
        validate_only=True,
    )
    ask("more", name, 3)
    ask("assigned", name, 4, assignments=[{"broker_ids": [1]}])
    twice = {"name": name, "count": 9, "assignments": None}
    asker.ask("a topic twice", topics=[twice, twice], timeout_ms=30_000)


def describe_configs(asker: Asker) -> None:
    name = asker.topic(retention_ms="5000")
    keys = [key for key in KNOWN if key != "segment.bytes"]

    def ask(
        step: str, kind: int, resource: str, keys: list[str] | None = keys, **more: Any
    ) -> None:
        asked = {
            "resource_type": kind,
            "resource_name": resource,
            "configuration_keys": keys,
        }
        asker.ask(step, resources=[asked], **more)

    ask("a topic", TOPIC, name)
    ask("no setting", TOPIC, name, [])
    step, recorded = asker.recorded.pop()
    asker.recorded.append((step, bool(recorded["results"][0]["configs"])))
    ask("a setting that is not there", TOPIC, name, ["no.such"])
    ask("no such topic", TOPIC, f"{name}-none")
    ask("an impossible name", TOPIC, "a b")
    ask("another broker", BROKER, "99", ["log.retention.ms"])
    ask("a broker that is no number", BROKER, "x", ["log.retention.ms"])
    ask("a kind that is not there", 77, name)
    asker.ask("none", resources=[])
    if asker.version >= 1:
        ask("with synonyms", TOPIC, name, ["retention.ms"], include_synonyms=True)
    ask("a group that is not there", GROUP, asker.name, [_SESSION, _INTERVAL])
    ask("a group without a name", GROUP, "", [_SESSION])
    asker.ask(
        "all of a topic",
        resources=[
            {"resource_type": TOPIC, "resource_name": name, "configuration_keys": None}
        ],
    )
    step, recorded = asker.recorded.pop()
    recorded["results"] = [
        sorted(each["name"] for each in result["configs"])
        for result in recorded["results"]
    ]
    asker.recorded.append((step, recorded))


def alter_configs(asker: Asker) -> None:
    name = asker.topic(retention_ms="5000")

    def ask(
        step: str,
        resource: str,
        *settings: tuple[str, str | None],
        kind: int = TOPIC,
        **more: Any,
    ) -> None:
        configs = [{"name": key, "value": value} for key, value in settings]
        asked = {"resource_type": kind, "resource_name": resource, "configs": configs}
        asker.ask(step, resources=[asked], **more)

    ask("no such topic", f"{name}-none", ("retention.ms", "1000"))
    ask("an unknown setting", name, ("no.such", "1"))
    ask("a number that is none", name, ("retention.ms", "long"))
    ask("a setting without a value", name, ("retention.ms", None))
    ask("one twice", name, ("retention.ms", "1"), ("retention.ms", "2"))
    ask("a kind that is not there", name, ("retention.ms", "1"), kind=77)
    ask("only checked", name, ("retention.ms", "7000"), validate_only=True)
    ask("one for all that were set", name, ("segment.ms", "90000"))
    asker.ask("none", resources=[])
    twice = {"resource_type": TOPIC, "resource_name": name, "configs": []}
    asker.ask("a topic twice", resources=[twice, twice])
    _shown(asker, name)
    ask("a group", asker.name, (_SESSION, "50000"), kind=GROUP)
    ask(
        "a group: one for all that were set",
        asker.name,
        (_INTERVAL, "6000"),
        kind=GROUP,
    )
    ask("a group: an unknown setting", asker.name, ("retention.ms", "1000"), kind=GROUP)
    ask("a group: a number that is none", asker.name, (_SESSION, "long"), kind=GROUP)
    ask("a group without a name", "", (_SESSION, "50000"), kind=GROUP)
    _shown_group(asker)


def incremental_alter_configs(asker: Asker) -> None:
    name = asker.topic(cleanup_policy="delete")

    def ask(
        step: str,
        resource: str,
        key: str,
        operation: int,
        value: str | None,
        kind: int = TOPIC,
    ) -> None:
        configs = [{"name": key, "config_operation": operation, "value": value}]
        asker.ask(
            step,
            resources=[
                {"resource_type": kind, "resource_name": resource, "configs": configs}
            ],
        )

    ask("no such topic", f"{name}-none", "retention.ms", 0, "1000")
    ask("set", name, "retention.ms", 0, "6000")
    ask("set to nothing", name, "retention.ms", 0, None)
    ask("delete", name, "retention.ms", 1, None)
    ask("delete what was not set", name, "segment.ms", 1, None)
    ask("append", name, "cleanup.policy", 2, "compact")
    ask("append what is there", name, "cleanup.policy", 2, "compact")
    ask("subtract", name, "cleanup.policy", 3, "delete")
    ask("append to what is no list", name, "retention.ms", 2, "1")
    ask("an operation that is not there", name, "retention.ms", 9, "1")
    ask("an unknown setting", name, "no.such", 0, "1")
    ask("a number that is none", name, "retention.ms", 0, "long")
    ask("a kind that is not there", name, "retention.ms", 0, "1", kind=77)
    config = {"name": "retention.ms", "config_operation": 0, "value": "1"}
    asker.ask(
        "one twice",
        resources=[
            {"resource_type": TOPIC, "resource_name": name, "configs": [config, config]}
        ],
    )
    _shown(asker, name)
    ask("a group: set", asker.name, _SESSION, 0, "50000", kind=GROUP)
    ask("a group: set another", asker.name, _INTERVAL, 0, "6000", kind=GROUP)
    ask("a group: delete", asker.name, _SESSION, 1, "", kind=GROUP)
    ask("a group: delete what was not set", asker.name, _SESSION, 1, "", kind=GROUP)
    ask("a group: append", asker.name, _SESSION, 2, "1", kind=GROUP)
    ask("a group: an unknown setting", asker.name, "no.such", 0, "1", kind=GROUP)
    ask("a group: delete an unknown setting", asker.name, "no.such", 1, "", kind=GROUP)
    ask("a group: a number that is none", asker.name, _SESSION, 0, "long", kind=GROUP)
    ask("a group: too small", asker.name, _SESSION, 0, "10", kind=GROUP)
    ask("a group: to nothing", asker.name, _SESSION, 0, None, kind=GROUP)
    ask("a group without a name", "", _SESSION, 0, "50000", kind=GROUP)
    _shown_group(asker)


def _shown(asker: Asker, name: str) -> None:
    """Record the final settings of a topic."""
    asked = {
        "resource_type": TOPIC,
        "resource_name": name,
        "configuration_keys": [*KNOWN, "segment.ms"],
    }
    answer = asker.other(wire.DESCRIBE_CONFIGS, 4, resources=[asked])
    settings = {
        config.name: config.value
        for config in answer.results[0].configs
        if config.config_source == 1
    }
    asker.recorded.append(("how it is set in the end", settings))


def _shown_group(asker: Asker) -> None:
    """Record the final settings of the group with the asker's name."""
    asked = {
        "resource_type": GROUP,
        "resource_name": asker.name,
        "configuration_keys": [_SESSION, _INTERVAL],
    }
    answer = asker.other(wire.DESCRIBE_CONFIGS, 4, resources=[asked])
    settings = {
        config.name: [config.value, config.config_source]
        for config in answer.results[0].configs
    }
    asker.recorded.append(("how the group is set in the end", settings))


def describe_log_dirs(asker: Asker) -> None:
    name = asker.topic()
    asker.produce(name, batch(b"a"))
    asker.ask("a topic", topics=[{"topic": name, "partitions": [0, 1]}])
    asker.ask("no such topic", topics=[{"topic": f"{name}-none", "partitions": [0]}])
    asker.ask("no topic", topics=[])


def describe_cluster(asker: Asker) -> None:
    asker.ask("asked")
    asker.ask("with operations", include_cluster_authorized_operations=True)
    if asker.version >= 1:
        asker.ask("the controllers", endpoint_type=2)
        asker.ask("an endpoint that is not there", endpoint_type=7)


def elect_leaders(asker: Asker) -> None:
    name = asker.topic()

    def ask(step: str, topic: str, partition: int, kind: int = 0) -> None:
        fields = {"election_type": kind} if asker.version >= 1 else {}
        asker.ask(
            step,
            timeout_ms=30_000,
            topic_partitions=[{"topic": topic, "partitions": [partition]}],
            **fields,
        )

    ask("a leader that leads", name, 0)
    ask("no such partition", name, 7)
    ask("no such topic", f"{name}-none", 0)
    if asker.version >= 1:
        ask("an unclean one that is not needed", name, 0, kind=1)
        ask("a kind that is not there", name, 0, kind=5)
    asker.ask("none", timeout_ms=30_000, topic_partitions=[])


def alter_reassignments(asker: Asker) -> None:
    name = asker.topic()

    def ask(
        step: str, replicas: list[int] | None, topic: str = name, partition: int = 0
    ) -> None:
        moved = {"partition_index": partition, "replicas": replicas}
        asker.ask(
            step, timeout_ms=30_000, topics=[{"name": topic, "partitions": [moved]}]
        )

    ask("the present replica", [1])
    ask("an unknown broker", [7])
    ask("a broker twice", [1, 1])
    ask("a negative broker", [-1])
    ask("no replica", [])
    ask("nothing to cancel", None)
    ask("no such partition", [1], partition=7)
    ask("no such topic", [1], f"{name}-none")
    asker.ask("no topics", timeout_ms=30_000, topics=[])
    if asker.version >= 1:
        asker.ask(
            "another replication factor that is not allowed",
            timeout_ms=30_000,
            allow_replication_factor_change=False,
            topics=[
                {
                    "name": name,
                    "partitions": [{"partition_index": 0, "replicas": [1, 2]}],
                }
            ],
        )


def list_reassignments(asker: Asker) -> None:
    name = asker.topic()
    asker.ask(
        "a topic", timeout_ms=30_000, topics=[{"name": name, "partition_indexes": [0]}]
    )
    asker.ask(
        "no such topic",
        timeout_ms=30_000,
        topics=[{"name": f"{name}-none", "partition_indexes": [0]}],
    )
    asker.ask("all", timeout_ms=30_000, topics=None)


_ANY_ACL = {
    "resource_type_filter": 1, "resource_name_filter": None, "pattern_type_filter": 1, "principal_filter": None,
    "host_filter": None, "operation": 1, "permission_type": 1,
}  # fmt: skip


def describe_acls(asker: Asker) -> None:
    asker.ask("all", **_ANY_ACL)
    asker.ask("an operation that is not there", **{**_ANY_ACL, "operation": 99})


def create_acls(asker: Asker) -> None:
    made = {
        "resource_type": 2, "resource_name": "t", "resource_pattern_type": 3, "principal": "User:a", "host": "*",
        "operation": 3, "permission_type": 3,
    }  # fmt: skip
    asker.ask("one", creations=[made])
    asker.ask("none", creations=[])


def delete_acls(asker: Asker) -> None:
    asker.ask("all", filters=[_ANY_ACL])
    asker.ask("none", filters=[])


def describe_quotas(asker: Asker) -> None:
    asker.ask(
        "of a user",
        components=[{"entity_type": "user", "match_type": 0, "match": asker.name}],
        strict=True,
    )
    asker.ask("all", components=[])
    asker.ask(
        "of a kind that is not there",
        components=[{"entity_type": "x", "match_type": 0, "match": "a"}],
    )


def alter_quotas(asker: Asker) -> None:
    def ask(step: str, kind: str, key: str, value: float, **more: Any) -> None:
        entry = {
            "entity": [{"entity_type": kind, "entity_name": asker.name}],
            "ops": [{"key": key, "value": value}],
        }
        asker.ask(step, entries=[entry], **more)

    ask("only checked", "user", "producer_byte_rate", 1000.0, validate_only=True)
    ask("a key that is not there", "user", "no_such", 1.0)
    ask("a kind that is not there", "x", "producer_byte_rate", 1.0)
    ask("set", "user", "producer_byte_rate", 1000.0)


def describe_scram(asker: Asker) -> None:
    asker.ask("a user that is not there", users=[{"name": asker.name}])
    asker.ask("one twice", users=[{"name": asker.name}, {"name": asker.name}])
    asker.ask("all", users=[])


def alter_scram(asker: Asker) -> None:
    user = {
        "name": asker.name,
        "mechanism": 1,
        "iterations": 4096,
        "salt": b"salt",
        "salted_password": b"p" * 32,
    }
    asker.ask(
        "deletes one that is not there",
        deletions=[{"name": asker.name, "mechanism": 1}],
        upsertions=[],
    )
    asker.ask("too few rounds", deletions=[], upsertions=[{**user, "iterations": 10}])
    asker.ask(
        "a mechanism that is not there",
        deletions=[],
        upsertions=[{**user, "mechanism": 9}],
    )


def sasl_handshake(asker: Asker) -> None:
    asker.ask("on a listener without SASL", mechanism="PLAIN")


def sasl_authenticate(asker: Asker) -> None:
    asker.ask("on a listener without SASL", auth_bytes=b"\0a\0b")


def list_config_resources(asker: Asker) -> None:
    name = asker.topic()
    kinds: list[tuple[str, dict[str, Any]]] = [("all", {})]
    if asker.version >= 1:
        kinds += [
            (f"kind {kind}", {"resource_types": [kind]})
            for kind in (2, 4, 8, 16, 32, 77)
        ]
    for step, fields in kinds:
        asker.ask(step, **fields)
        _, recorded = asker.recorded.pop()
        known = [
            each
            for each in recorded["config_resources"]
            if each["resource_name"] in (name, "1")
        ]
        asker.recorded.append((step, {**recorded, "config_resources": known}))


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
