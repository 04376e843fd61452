"""Settings of topics, groups and the broker: describes them, and changes settings of
topics and groups.

The directory stores the settings. This module checks only rules of the protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from logcore import LogcoreError
from logcore.config import CONFIGS, config_text
from logcore.directory.group_settings import Draft
from logcore.format.group_settings import HEARTBEAT_INTERVAL, SESSION_TIMEOUT
from logcore.logdir import TopicDescription
from logcore.metadata.filenames import check_topic_name
from netshim import wire
from netshim.groups import group_rules
from netshim.handlers.failures import code_of, message_of
from netshim.request_log import quoted
from netshim.scheduling import PendingResponse, without_tracebacks
from netshim.settings import TOPIC_DEFAULTS
from netshim.state import BrokerState, Call
from netshim.topology import Placement
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        AlterConfigsRequest,
        DescribeConfigsRequest,
        DescribeConfigsResponse,
        IncrementalAlterConfigsRequest,
        ListConfigResourcesRequest,
        ListConfigResourcesResponse,
    )

#: Kafka's numbers of the kinds of resources.
_TOPIC_RESOURCE: Final = 2
_BROKER_RESOURCE: Final = 4
_LOGGERS_RESOURCE: Final = 8
_GROUP_RESOURCE: Final = 32
#: Kafka's kinds of resources. Loggers (8) and subscriptions to client metrics (16) have no
#: settings here.
_RESOURCES: Final = frozenset(
    (_TOPIC_RESOURCE, _BROKER_RESOURCE, _LOGGERS_RESOURCE, 16, _GROUP_RESOURCE)
)
#: The key of the work queue in which changes of settings run one at a time.
_SETTINGS: Final = "settings"
#: Documentation of the settings of groups.
_GROUP_DOCS: Final = {
    SESSION_TIMEOUT: "how long a member may be silent",
    HEARTBEAT_INTERVAL: "how often members send heartbeats",
}
#: Kafka's numbers of the types of values.
_CONFIG_TYPES: Final = {
    "boolean": 1,
    "string": 2,
    "int": 3,
    "long": 5,
    "double": 6,
    "list": 7,
}
#: Kafka's numbers of the sources of values.
_FROM_TOPIC: Final = 1
_FROM_CLUSTER: Final = 3
_FROM_BROKER: Final = 4
_FROM_DEFAULT: Final = 5
_FROM_GROUP: Final = 8
#: Operations of IncrementalAlterConfigs.
_SET: Final = 0
_DELETE: Final = 1
_APPEND: Final = 2
_SUBTRACT: Final = 3


def source_of(
    name: str, overrides: Iterable[str], defaults: Mapping[str, object]
) -> int:
    """Return the source of a setting. `defaults` contains the settings with which the
    broker was started.
    """
    # In the order of precedence: the topic, the broker, the default.
    if name in overrides:
        return _FROM_TOPIC
    if name in defaults and defaults[name] != _default(name):
        return _FROM_BROKER
    return _FROM_DEFAULT


def _default(name: str) -> Any:
    """Return Kafka's default of a topic's setting."""
    return TOPIC_DEFAULTS.get(name, CONFIGS[name].default)


def describe_configs(
    request: DescribeConfigsRequest, call: Call, state: BrokerState
) -> PendingResponse:
    # In a worker thread, because another thread may hold the lock of the directory.
    return state.in_background(lambda: _describe_configs(request, state))


def _describe_configs(
    request: DescribeConfigsRequest, state: BrokerState
) -> DescribeConfigsResponse:
    response_type = wire.DESCRIBE_CONFIGS.Response
    results = []
    for resource in request.resources:
        result = response_type.Resource(
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
            configs=[],
        )
        results.append(result)
        try:
            if resource.resource_type == _TOPIC_RESOURCE:
                check_topic_name(resource.resource_name)
                described = state.logdir.describe_topic(resource.resource_name)
                result.configs = list(
                    _topic_configs(resource, request, described, state)
                )
            elif (
                resource.resource_type == _BROKER_RESOURCE
                and resource.resource_name == str(state.node_id)
            ):
                result.configs = list(_broker_configs(resource, state))
            # An empty name means all brokers of the cluster.
            elif (
                resource.resource_type == _BROKER_RESOURCE
                and not resource.resource_name
            ):
                result.configs = list(_cluster_configs(resource, request, state))
            elif resource.resource_type == _BROKER_RESOURCE:
                result.error_code = codes.INVALID_REQUEST
                # Each broker describes only itself, as in Kafka.
                result.error_message = (
                    f"expected {state.node_id}, the id of this broker, or an empty name"
                )
            elif resource.resource_type == _GROUP_RESOURCE and resource.resource_name:
                result.configs = list(_group_configs(resource, request, state))
            elif resource.resource_type == _GROUP_RESOURCE:
                result.error_code = codes.INVALID_REQUEST
                result.error_message = "the name of the group is empty"
            else:
                result.error_code = codes.INVALID_REQUEST
                result.error_message = (
                    f"resources of type {resource.resource_type} have no settings here"
                )
        except LogcoreError as error:
            result.error_code = code_of(error)
            result.error_message = message_of(error)
    return response_type(results=results)


def _topic_configs(
    resource: DescribeConfigsRequest.Resource,
    request: DescribeConfigsRequest,
    described: TopicDescription,
    state: BrokerState,
) -> Iterable[DescribeConfigsResponse.Resource.Config]:
    config_type = wire.DESCRIBE_CONFIGS.Response.Resource.Config
    defaults = state.logdir.given_config
    for name, value in described.config.as_mapping().items():
        metadata = CONFIGS[name].metadata
        # Kafka does not have logcore's own settings. A tool that copies a topic would
        # send them to a cluster, which refuses them.
        if metadata.get("is_extension") or (
            resource.configuration_keys and name not in resource.configuration_keys
        ):
            continue
        synonyms = []
        if request.include_synonyms:
            chain: list[tuple[Any, int]] = [
                (described.overrides.get(name), _FROM_TOPIC),
                (defaults.get(name), _FROM_BROKER),
                (_default(name), _FROM_DEFAULT),
            ]
            # The broker's value is Kafka's default, which would be listed twice.
            if source_of(name, (), defaults) == _FROM_DEFAULT:
                del chain[1]
            synonyms = [
                config_type.Synonym(name=name, value=config_text(of), source=source)
                for of, source in chain
                if of is not None
            ]
        yield config_type(
            name=name,
            value=config_text(value),
            config_source=source_of(name, described.overrides, defaults),
            synonyms=synonyms,
            config_type=_CONFIG_TYPES[metadata["type"]],
            documentation=metadata["doc"] if request.include_documentation else None,
        )


def _broker_configs(
    resource: DescribeConfigsRequest.Resource, state: BrokerState
) -> Iterable[DescribeConfigsResponse.Resource.Config]:
    """Return the settings that tools read, by Kafka's names. They are set when the
    broker is started.
    """
    config_type = wire.DESCRIBE_CONFIGS.Response.Resource.Config
    settings = state.settings
    defaults = state.logdir.config
    values: dict[str, tuple[float | bool | str, str]] = {
        # Kafka 4 has only node.id; older tools read broker.id.
        "node.id": (state.node_id, "int"),
        "broker.id": (state.node_id, "int"),
        "log.dirs": (state.logdir.path, "string"),
        "auto.create.topics.enable": (settings.auto_create_topics, "boolean"),
        # Kafka can forbid deletions. This broker cannot.
        "delete.topic.enable": (True, "boolean"),
        "num.partitions": (settings.num_partitions, "int"),
        # Always 1 without a cluster.
        "default.replication.factor": (state.topology.factor_of(Placement()), "int"),
        "offsets.topic.num.partitions": (settings.offsets_partitions, "int"),
        "offset.metadata.max.bytes": (settings.offset_metadata_max_bytes, "int"),
        "group.initial.rebalance.delay.ms": (settings.rebalance_delay_ms, "int"),
        "group.min.session.timeout.ms": (settings.min_session_timeout_ms, "int"),
        "group.max.session.timeout.ms": (settings.max_session_timeout_ms, "int"),
        "group.max.size": (settings.group_max_size, "int"),
        "socket.request.max.bytes": (settings.max_request_bytes, "int"),
        "fetch.max.bytes": (settings.fetch_max_bytes, "int"),
        "connections.max.idle.ms": (settings.idle_timeout_ms, "long"),
        "message.max.bytes": (defaults.max_message_bytes, "int"),
        "compression.type": (defaults.compression_type, "string"),
        "log.cleanup.policy": (defaults.cleanup_policy, "list"),
        "log.retention.ms": (defaults.retention_ms, "long"),
        "log.retention.bytes": (defaults.retention_bytes, "long"),
        "log.segment.bytes": (defaults.segment_bytes, "int"),
        "log.roll.ms": (defaults.segment_ms, "long"),
        "min.insync.replicas": (defaults.min_insync_replicas, "int"),
    }
    for name, (value, type_name) in values.items():
        if not resource.configuration_keys or name in resource.configuration_keys:
            yield config_type(
                name=name,
                value=config_text(value),
                read_only=True,
                config_source=_FROM_BROKER,
                synonyms=[],
                config_type=_CONFIG_TYPES[type_name],
            )


def _cluster_configs(
    resource: DescribeConfigsRequest.Resource,
    request: DescribeConfigsRequest,
    state: BrokerState,
) -> Iterable[DescribeConfigsResponse.Resource.Config]:
    """Return the settings of all brokers of the cluster.

    The only such setting is min.insync.replicas, which Kafka 4 sets when a cluster is
    created.
    """
    config_type = wire.DESCRIBE_CONFIGS.Response.Resource.Config
    name = "min.insync.replicas"
    value = config_text(state.logdir.config.min_insync_replicas)
    if not resource.configuration_keys or name in resource.configuration_keys:
        synonyms = [config_type.Synonym(name=name, value=value, source=_FROM_CLUSTER)]
        yield config_type(
            name=name,
            value=value,
            read_only=True,
            config_source=_FROM_CLUSTER,
            synonyms=synonyms if request.include_synonyms else [],
            config_type=_CONFIG_TYPES["int"],
        )


def _group_configs(
    resource: DescribeConfigsRequest.Resource,
    request: DescribeConfigsRequest,
    state: BrokerState,
) -> Iterable[DescribeConfigsResponse.Resource.Config]:
    """Return the limits of members of the consumer protocol. As in Kafka, a group need
    not exist to be described.

    If a group has not set a value, Kafka names the default as its source, even if the
    value is from a setting of the broker.
    """
    config_type = wire.DESCRIBE_CONFIGS.Response.Resource.Config
    # A shared directory has no settings of groups.
    overrides: Mapping[str, int] = {}
    if state.group_settings is not None:
        overrides = state.group_settings.of(resource.resource_name)
    for name, default in _group_defaults(state).items():
        if resource.configuration_keys and name not in resource.configuration_keys:
            continue
        chain = [(overrides[name], _FROM_GROUP)] if name in overrides else []
        # The first entry is the value in use.
        chain.append((default, _FROM_DEFAULT))
        synonyms = []
        if request.include_synonyms:
            synonyms = [
                config_type.Synonym(name=name, value=str(entry_value), source=source)
                for entry_value, source in chain
            ]
        value, source = chain[0]
        yield config_type(
            name=name,
            value=str(value),
            read_only=state.group_settings is None,
            config_source=source,
            synonyms=synonyms,
            config_type=_CONFIG_TYPES["int"],
            documentation=_GROUP_DOCS[name] if request.include_documentation else None,
        )


def _group_defaults(state: BrokerState) -> dict[str, int]:
    """Return the settings of groups that have none of their own."""
    rules = group_rules(state.settings)
    return {
        SESSION_TIMEOUT: rules.consumer_session_timeout_ms,
        HEARTBEAT_INTERVAL: rules.consumer_heartbeat_interval_ms,
    }


class _Topics:
    """Topics as resources with settings."""

    def __init__(self, state: BrokerState) -> None:
        self._logdir = state.logdir

    def overrides(self, name: str) -> Iterable[str]:
        """Return the names of the settings that a topic sets itself. Raises
        InvalidNameError and TopicNotFoundError, like the other methods.
        """
        check_topic_name(name)
        return self._logdir.describe_topic(name).overrides

    def list_elements(self, name: str, key: str) -> list[str] | None:
        """Return the current value of a list, or None for a setting that is not a list."""
        check_topic_name(name)
        # APPEND and SUBTRACT are defined for lists only.
        if CONFIGS.get(key) is None or CONFIGS[key].metadata["type"] != "list":
            return None
        value = str(self._logdir.describe_topic(name).config.as_mapping()[key])
        return value.split(",") if value else []

    def alter(
        self, name: str, changes: dict[str, object | None], *, check_only: bool
    ) -> None:
        check_topic_name(name)
        # An unknown setting is not set, so there is nothing to delete.
        changes = {
            key: value
            for key, value in changes.items()
            if value is not None or key in CONFIGS
        }
        self._logdir.alter_topic(name, changes, check_only=check_only)


class _Groups:
    """Groups of the consumer protocol as resources with settings. They need not exist.
    save() writes the changes.
    """

    def __init__(self, state: BrokerState) -> None:
        self._settings = state.group_settings
        self._draft: Draft | None = None
        if self._settings is not None:
            # Changes of all groups of a request are collected, and written by one
            # save().
            self._draft = self._settings.draft(_group_defaults(state))

    def overrides(self, name: str) -> Iterable[str]:
        return self._group_draft(name).settings.get(name, ())

    def list_elements(self, name: str, key: str) -> list[str] | None:
        return None

    def alter(
        self, name: str, changes: dict[str, object | None], *, check_only: bool
    ) -> None:
        self._group_draft(name).alter(name, changes)

    def save(self) -> None:
        if self._settings is not None and self._draft is not None:
            self._settings.write(self._draft)

    def _group_draft(self, name: str) -> Draft:
        """Return the settings to change. Raises _Refused if a group has no settings."""
        if not name:
            raise _Refused(codes.INVALID_REQUEST, "the name of the group is empty")
        if self._draft is None:
            reason = "groups of the consumer protocol are not served in a directory that is shared"
            raise _Refused(codes.INVALID_REQUEST, reason)
        return self._draft


def incremental_alter_configs(
    request: IncrementalAlterConfigsRequest, call: Call, state: BrokerState
) -> PendingResponse:
    def changes(
        resource: IncrementalAlterConfigsRequest.Resource, resources: _Topics | _Groups
    ) -> dict[str, object | None]:
        # The error of a missing topic precedes errors of its settings.
        resources.overrides(resource.resource_name)
        result: dict[str, object | None] = {}
        for config in resource.configs:
            operation = config.config_operation
            if operation == _SET:
                result[config.name] = config.value
                continue
            if operation == _DELETE:
                result[config.name] = None
                continue
            parts = resources.list_elements(resource.resource_name, config.name)
            if parts is None:
                raise _Refused(
                    codes.INVALID_CONFIG,
                    f"{config.name} is not a list to append to or to subtract from",
                )
            # reason_against() has refused operations without a value.
            elements = (config.value or "").split(",")
            # An appended element that the list contains already is not repeated.
            remaining = [part for part in parts if part not in elements]
            result[config.name] = ",".join(
                remaining if operation == _SUBTRACT else [*remaining, *elements]
            )
        return result

    def reason_against(resource: IncrementalAlterConfigsRequest.Resource) -> str | None:
        if any(
            config.config_operation not in (_SET, _DELETE, _APPEND, _SUBTRACT)
            for config in resource.configs
        ):
            return "unknown operation"
        if any(
            config.value is None and config.config_operation != _DELETE
            for config in resource.configs
        ):
            return "a config without a value"
        return None

    response_type = wire.INCREMENTAL_ALTER_CONFIGS.Response
    return _submit_change(
        state,
        lambda: _alter(response_type, request, call, state, changes, reason_against),
    )


def alter_configs(
    request: AlterConfigsRequest, call: Call, state: BrokerState
) -> PendingResponse:
    """Handle the older request, which replaces all settings of a resource."""

    def changes(
        resource: AlterConfigsRequest.Resource, resources: _Topics | _Groups
    ) -> dict[str, object | None]:
        # The request replaces all settings: those that it does not name return to their
        # defaults.
        before = resources.overrides(resource.resource_name)
        return {
            **dict.fromkeys(before),
            **{config.name: config.value for config in resource.configs},
        }

    def reason_against(resource: AlterConfigsRequest.Resource) -> str | None:
        if any(config.value is None for config in resource.configs):
            return "a config without a value"
        return None

    return _submit_change(
        state,
        lambda: _alter(
            wire.ALTER_CONFIGS.Response, request, call, state, changes, reason_against
        ),
    )


def _submit_change(state: BrokerState, work: Callable[[], Any]) -> PendingResponse:
    """Run work() after earlier changes, and return the response that receives its result.

    Changes run one at a time, because a change of one group writes all groups.
    """
    pending = PendingResponse()
    state.work.submit(_SETTINGS, work, pending.set)
    return pending


def _only_deletes_of_a_broker(resource: Any) -> bool:
    """Return whether a change deletes settings of brokers and sets none.

    No broker has such a setting, so the change is done. kafka-reassign-partitions
    --verify deletes throttles in any case.
    """
    return resource.resource_type == _BROKER_RESOURCE and all(
        getattr(config, "config_operation", None) == _DELETE
        for config in resource.configs
    )


class _Refused(Exception):
    """A change that the protocol forbids, with code and message."""


def _alter(
    response_type: Any,
    request: Any,
    call: Call,
    state: BrokerState,
    changes: Callable[[Any, _Topics | _Groups], dict[str, object | None]],
    reason_against: Callable[[Any], str | None],
) -> Any:
    """Change resources. Each one is changed wholly or not at all, and groups are
    written together.
    """
    # Kafka refuses a resource that is named twice, because the result would depend on
    # the order.
    times = Counter(
        (entry.resource_type, entry.resource_name) for entry in request.resources
    )
    # Step 1: check and apply each resource. Topics are written at once, and groups only
    # in a draft.
    kinds: dict[int, _Topics | _Groups] = {_TOPIC_RESOURCE: _Topics(state)}
    groups = None
    if any(entry.resource_type == _GROUP_RESOURCE for entry in request.resources):
        groups = kinds[_GROUP_RESOURCE] = _Groups(state)
    results = []
    changed = []
    for resource in request.resources:
        result = response_type.Resource(
            resource_type=resource.resource_type, resource_name=resource.resource_name
        )
        results.append(result)
        names = [entry.name for entry in resource.configs]
        resources = kinds.get(resource.resource_type)
        reason = None
        if times[resource.resource_type, resource.resource_name] > 1:
            reason = "the resource is named twice"
        reason = reason or (
            "a config is named twice"
            if len(set(names)) < len(names)
            else reason_against(resource)
        )
        if reason is None and _only_deletes_of_a_broker(resource):
            continue
        if resources is None:
            reason = (
                reason
                or "only settings of topics and groups can be changed; others are set when the broker starts"
            )
        if reason is not None or resources is None:
            result.error_code = codes.INVALID_REQUEST
            result.error_message = reason
            continue
        try:
            config_changes = changes(resource, resources)
            resources.alter(
                resource.resource_name, config_changes, check_only=request.validate_only
            )
            changed.append((result, config_changes))
        except _Refused as refused:
            result.error_code, result.error_message = refused.args
        except LogcoreError as error:
            result.error_code = code_of(error)
            result.error_message = message_of(error)
    # A draft that is not saved has no effect.
    if request.validate_only:
        return response_type(responses=results)
    # Step 2: write all groups together.
    failure = None
    if groups is not None:
        try:
            groups.save()
        except LogcoreError as error:
            failure = without_tracebacks(error)
    # Step 3: log the changes, or report the failure of all groups.
    for result, config_changes in changed:
        if failure is not None and result.resource_type == _GROUP_RESOURCE:
            result.error_code = code_of(failure)
            result.error_message = message_of(failure)
        elif result.resource_type == _GROUP_RESOURCE:
            # The name of a group may be any text, even one with line breaks.
            name = quoted(result.resource_name)
            state.journal.log_change(
                call, name, f"set to {quoted(config_changes)}", kind="group"
            )
        else:
            state.journal.log_change(
                call, result.resource_name, f"set to {quoted(config_changes)}"
            )
    return response_type(responses=results)


def list_config_resources(
    request: ListConfigResourcesRequest, call: Call, state: BrokerState
) -> ListConfigResourcesResponse:
    """List the resources with settings. Version 0 requests only subscriptions to
    metrics, which do not exist here.
    """
    response_type = wire.LIST_CONFIG_RESOURCES.Response
    if call.version == 0:
        return response_type()
    requested_types = request.resource_types or sorted(_RESOURCES)
    # As in KafkaApis.handleListConfigResources (KIP-1142).
    if not _RESOURCES.issuperset(requested_types):
        return response_type(error_code=codes.UNSUPPORTED_VERSION)
    brokers = [str(broker.node_id) for broker in state.topology.brokers(call.session)]
    names: dict[int, list[str]] = {
        _TOPIC_RESOURCE: state.logdir.topics(),
        _BROKER_RESOURCE: brokers,
        _LOGGERS_RESOURCE: brokers,
    }
    if state.group_settings is not None:
        names[_GROUP_RESOURCE] = state.group_settings.names()
    entries = [
        response_type.Resource(resource_name=name, resource_type=resource_type)
        # Without duplicates, in the order of the request.
        for resource_type in dict.fromkeys(requested_types)
        for name in names.get(resource_type, ())
    ]
    return response_type(config_resources=entries)
