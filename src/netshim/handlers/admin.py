"""Metadata, topics and their settings, the cluster: what admin clients ask, and every client before anything else.

Rules (wire protocol section 6):
- There is one broker, this one: it leads every partition, and is controller and coordinator.
- The address that is told to a client is the one by which it reached us.
- Topics are made and deleted by LogDir; here requests are checked for what only the protocol can get wrong.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from logcore import InvalidNameError, LogConfig, LogcoreError, TopicExistsError
from logcore.config import CONFIGS, config_text
from logcore.format.grouprecords import OFFSETS_TOPIC
from logcore.names import check_topic_name
from netshim import wire
from netshim.handlers.data import INTERNAL_TOPICS
from netshim.handlers.failures import code_of, message_of
from netshim.journal import shown
from netshim.offsets import OFFSETS_CONFIG
from netshim.state import Answer, Call, State, answer_with
from netshim.wire import codes

_NO_ID: Final = bytes(16)
#: Lines about topics that are made, changed or deleted in a minute.
_CHANGES_SAID: Final = 200
#: CreateTopics makes so many at once: others come to the directory in between.
_TOPICS_AT_ONCE: Final = 50
#: Bits of the operations that everybody may do, since nothing is forbidden: 1 << Kafka's AclOperation code.
_TOPIC_OPERATIONS: Final = sum(1 << code for code in (3, 4, 5, 6, 7, 8, 10, 11))
_CLUSTER_OPERATIONS: Final = sum(1 << code for code in (5, 7, 8, 9, 10, 11, 12))
_TOPIC_RESOURCE: Final = 2
_BROKER_RESOURCE: Final = 4
_CONFIG_TYPES: Final = {"boolean": 1, "string": 2, "int": 3, "long": 5, "double": 6, "list": 7}
_FROM_TOPIC: Final = 1
_FROM_BROKER: Final = 4
_FROM_DEFAULT: Final = 5
_SET: Final = 0
_DELETE: Final = 1
_APPEND: Final = 2
_SUBTRACT: Final = 3


# -- metadata ------------------------------------------------------------------------------------------------------


def metadata(request: Any, call: Call, state: State) -> Any:
    """Brokers and topics. Topics that are asked for by name and not there are made first, if that is allowed."""
    every = request.topics is None or (call.version == 0 and not request.topics)
    missing = []
    if not every and request.allow_auto_topic_creation and state.settings.auto_create_topics:
        names = {each.name for each in request.topics or () if call.version < 12 or each.topic_id == _NO_ID}
        missing = sorted(name for name in names if name and name not in state.logdir)
    if not missing:
        return _metadata_when_known(request, call, state, every, {})
    answer = Answer()

    def done(failures: Any) -> None:
        if isinstance(failures, Exception):
            answer.set(failures)
        else:
            answer_with(lambda: _metadata_when_known(request, call, state, every, failures), answer)

    state.submit(lambda: _make_topics(missing, state, call), done)
    return answer


def _metadata_when_known(request: Any, call: Call, state: State, every: bool, failures: dict[str, LogcoreError]) -> Any:
    if every:
        names: Iterable[str] = state.logdir.topics()
    else:
        names = [asked.name or state.topic_of(asked.topic_id) or "" for asked in request.topics or ()]
    return _when_epochs_are_known(names, lambda: _metadata(request, call, state, every, failures), state)


def _when_epochs_are_known(names: Iterable[str], handle: Callable[[], Any], state: State) -> Any:
    """handle(), once the leader epochs of all partitions of these topics are known; an Answer when they are to be read.

    Each stands in a file of its partition until the log is open.
    """
    logdir = state.logdir
    unread = [
        (name, number)
        for name in names
        if name in logdir
        for number in logdir.partitions(name)
        if not logdir.knows_leader_epoch(name, number)
    ]
    if not unread:
        return handle()

    def read() -> None:
        for name, number in unread:
            with contextlib.suppress(LogcoreError, OSError):  # the request itself will say so
                logdir.leader_epoch(name, number)

    answer = Answer()
    state.submit(read, lambda _: answer_with(handle, answer))
    return answer


def _make_topics(names: list[str], state: State, call: Call) -> dict[str, LogcoreError]:
    """Makes topics that clients asked for; which of them could not be made."""
    failures = {}
    for name in names:
        try:
            if name == OFFSETS_TOPIC:
                state.logdir.create_topic(name, state.settings.offsets_partitions, OFFSETS_CONFIG)
            else:
                state.logdir.create_topic(name, state.settings.num_partitions)
            _say_changed(name, "created since it was asked for", call, state)
        except TopicExistsError:  # another client was faster
            pass
        except LogcoreError as error:
            failures[name] = error
    return failures


def _metadata(request: Any, call: Call, state: State, every: bool, failures: dict[str, LogcoreError]) -> Any:
    response_type = wire.METADATA.Response
    results = []
    if every:
        results = [_topic_metadata(name, request, state) for name in state.logdir.topics()]
    for asked in () if every else request.topics or ():
        name = asked.name or ""
        if call.version >= 12 and asked.topic_id != _NO_ID:
            known = state.topic_of(asked.topic_id)
            if known is None:
                unknown = codes.UNKNOWN_TOPIC_ID
                results.append(response_type.Topic(error_code=unknown, name=None, topic_id=asked.topic_id))
            else:
                results.append(_topic_metadata(known, request, state))
        elif name in state.logdir:
            results.append(_topic_metadata(name, request, state))
        else:
            code = codes.UNKNOWN_TOPIC_OR_PARTITION
            try:
                check_topic_name(name)
            except InvalidNameError:
                code = codes.INVALID_TOPIC_EXCEPTION
            if name in failures:
                code = code_of(failures[name])
            results.append(response_type.Topic(error_code=code, name=name))
    return response_type(
        brokers=[response_type.Broker(node_id=state.node_id, host=call.session.host, port=call.session.port)],
        cluster_id=state.logdir.cluster_id,
        controller_id=state.node_id,
        topics=results,
        cluster_authorized_operations=_asked(request.include_cluster_authorized_operations, _CLUSTER_OPERATIONS),
    )


def _asked(wanted: bool, operations: int) -> int:
    return operations if wanted else -(2**31)


def _topic_metadata(name: str, request: Any, state: State) -> Any:
    topic_type = wire.METADATA.Response.Topic
    partition_type = topic_type.Partition
    node = [state.node_id]
    try:
        numbers, topic_id = state.logdir.partitions(name), state.topic_id(name)
    except LogcoreError as error:
        return topic_type(error_code=code_of(error), name=name)
    partitions = []
    for number in numbers:
        partitions.append(
            partition_type(
                partition_index=number,
                leader_id=node[0],
                leader_epoch=state.logdir.leader_epoch(name, number),
                replica_nodes=node,
                isr_nodes=node,
                offline_replicas=[],
            )
        )
    return topic_type(
        name=name,
        topic_id=topic_id,
        is_internal=name in INTERNAL_TOPICS,
        partitions=partitions,
        topic_authorized_operations=_asked(request.include_topic_authorized_operations, _TOPIC_OPERATIONS),
    )


def describe_cluster(request: Any, call: Call, state: State) -> Any:
    response_type = wire.DESCRIBE_CLUSTER.Response
    if request.endpoint_type != 1:
        mismatched = request.endpoint_type == 2
        return response_type(
            error_code=codes.MISMATCHED_ENDPOINT_TYPE if mismatched else codes.UNSUPPORTED_ENDPOINT_TYPE,
            error_message="this is a broker, not a controller" if mismatched else "unknown endpoint type",
            endpoint_type=request.endpoint_type,
        )
    return response_type(
        cluster_id=state.logdir.cluster_id,
        controller_id=state.node_id,
        endpoint_type=1,
        brokers=[response_type.Broker(broker_id=state.node_id, host=call.session.host, port=call.session.port)],
        cluster_authorized_operations=_asked(request.include_cluster_authorized_operations, _CLUSTER_OPERATIONS),
    )


def describe_topic_partitions(request: Any, call: Call, state: State) -> Any:
    """What newer admin clients ask instead of Metadata; empty lists where Kafka would name other replicas."""
    names = sorted({topic.name for topic in request.topics}) or state.logdir.topics()
    return _when_epochs_are_known(names, lambda: _describe_topic_partitions(names, request, state), state)


def _describe_topic_partitions(names: Iterable[str], request: Any, state: State) -> Any:
    response_type = wire.DESCRIBE_TOPIC_PARTITIONS.Response
    topic_type = response_type.Topic
    cursor = request.cursor
    left = max(1, min(request.response_partition_limit, 2_000))
    topics: list[Any] = []
    next_cursor = None
    for name in names:
        if cursor is not None and name < cursor.topic_name:
            continue
        if name not in state.logdir:
            code = codes.UNKNOWN_TOPIC_OR_PARTITION
            try:
                check_topic_name(name)
            except InvalidNameError:
                code = codes.INVALID_TOPIC_EXCEPTION
            topics.append(topic_type(error_code=code, name=name))
            continue
        first = cursor.partition_index if cursor is not None and name == cursor.topic_name else 0
        described = _topic_metadata(name, _NOTHING_ASKED, state)
        partitions = [partition for partition in described.partitions if partition.partition_index >= first]
        if left <= 0 or len(partitions) > left:
            next_cursor = response_type.Cursor(
                topic_name=name, partition_index=partitions[left].partition_index if left > 0 else first
            )
        if left > 0:
            topics.append(
                topic_type(
                    name=name,
                    topic_id=described.topic_id,
                    is_internal=described.is_internal,
                    topic_authorized_operations=_TOPIC_OPERATIONS,
                    partitions=[
                        topic_type.Partition(
                            partition_index=partition.partition_index,
                            leader_id=partition.leader_id,
                            leader_epoch=partition.leader_epoch,
                            replica_nodes=partition.replica_nodes,
                            isr_nodes=partition.isr_nodes,
                            eligible_leader_replicas=[],  # null makes the Java admin client fail
                            last_known_elr=[],
                            offline_replicas=[],
                        )
                        for partition in partitions[:left]
                    ],
                )
            )
        left -= len(partitions)
        if next_cursor is not None:
            break
    return response_type(topics=topics, next_cursor=next_cursor)


class _NothingAsked:
    include_topic_authorized_operations = False


_NOTHING_ASKED: Final = _NothingAsked()


def describe_log_dirs(request: Any, call: Call, state: State) -> Answer:
    return _in_background(state, lambda: _log_dirs(request, state))


def _log_dirs(request: Any, state: State) -> Any:
    response_type = wire.DESCRIBE_LOG_DIRS.Response
    wanted = (
        {name: state.logdir.partitions(name) for name in state.logdir.topics()}
        if request.topics is None
        else {topic.topic: topic.partitions for topic in request.topics}
    )
    dir_type = response_type.LogDir
    topics = []
    for name, numbers in wanted.items():
        partitions = []
        for number in numbers:
            try:
                size = state.logdir.size_bytes(name, number)
            except LogcoreError:
                continue
            partitions.append(dir_type.Topic.Partition(partition_index=number, partition_size=size))
        topics.append(dir_type.Topic(name=name, partitions=partitions))
    total_bytes, free_bytes = state.logdir.space()
    return response_type(
        results=[dir_type(log_dir=state.logdir.path, topics=topics, total_bytes=total_bytes, usable_bytes=free_bytes)]
    )


# -- topics --------------------------------------------------------------------------------------------------------


def _say_changed(name: str | None, what: str, call: Call, state: State) -> None:
    state.journal.say(
        logging.INFO,
        "topic",
        call.now_ms,
        "topic %s %s, by client %s at %s",
        name,
        what,
        shown(call.client_id),
        call.session.peer,
        most=_CHANGES_SAID,
    )


def _in_background(state: State, work: Callable[[], Any]) -> Answer:
    """Work that syncs files, off the broker's thread; an error of it becomes the answer's."""
    answer = Answer()
    state.submit(work, answer.set)
    return answer


def create_topics(request: Any, call: Call, state: State) -> Answer:
    response_type = wire.CREATE_TOPICS.Response
    logdir = state.logdir
    times = Counter(topic.name for topic in request.topics)

    def work() -> Any:
        results: dict[str, Any] = {}
        wanted: dict[str, tuple[int, dict[str, object]]] = {}
        for topic in request.topics:
            result = results[topic.name] = response_type.Topic(name=topic.name)
            result.error_code, result.error_message = _check_new_topic(topic, times[topic.name], state)
            if result.error_code:
                continue
            count = _partition_count(topic, state)
            config = {each.name: each.value for each in topic.configs}
            try:
                logdir.create_topics({topic.name: (count, config)}, check_only=True)
                wanted[topic.name] = count, config
            except LogcoreError as error:
                result.error_code, result.error_message = code_of(error), message_of(error)
        names = list(wanted)
        for first in range(0, len(names), _TOPICS_AT_ONCE):
            _create(names[first : first + _TOPICS_AT_ONCE], wanted, results, request.validate_only, state)
        wanted = {name: wanted[name] for name in names if not results[name].error_code}
        for name, (count, config) in wanted.items():
            result = results[name]
            result.num_partitions, result.replication_factor = count, 1
            overrides: Iterable[str] = config
            if request.validate_only:
                settings = LogConfig.parse({**logdir.given_config, **config})
            else:
                described = logdir.describe_topic(name)
                overrides, settings = described.overrides, described.config
                result.topic_id = described.topic_id.bytes
                _say_changed(name, f"created with {count} partitions", call, state)
            result.configs = [
                response_type.Topic.Config(
                    name=key,
                    value=config_text(value),
                    config_source=_source(key, overrides, logdir.given_config),
                )
                for key, value in settings.as_mapping().items()
                if not CONFIGS[key].metadata.get("ours")
            ]
        return response_type(topics=list(results.values()))

    return _in_background(state, work)


def _create(names: list[str], wanted: Any, results: Any, check_only: bool, state: State) -> None:
    """Makes topics together, which costs one writing of the file of topics, or one by one when some are at odds."""
    try:
        state.logdir.create_topics({name: wanted[name] for name in names}, check_only=check_only)
    except LogcoreError as error:
        if len(names) == 1:
            results[names[0]].error_code, results[names[0]].error_message = code_of(error), message_of(error)
        else:
            for name in names:
                _create([name], wanted, results, check_only, state)


def _partition_count(topic: Any, state: State) -> int:
    if topic.assignments:
        return len(topic.assignments)
    count: int = topic.num_partitions
    return state.settings.num_partitions if count == -1 else count


def _check_new_topic(topic: Any, times: int, state: State) -> tuple[int, str | None]:
    """What only the request can get wrong: (code, message)."""
    if times > 1:
        return codes.INVALID_REQUEST, "the topic is named twice in this request"
    if topic.assignments:
        if topic.num_partitions != -1 or topic.replication_factor != -1:
            return codes.INVALID_REQUEST, "a manual assignment excludes a number of partitions and replicas"
        if sorted(each.partition_index for each in topic.assignments) != list(range(len(topic.assignments))):
            return codes.INVALID_REPLICA_ASSIGNMENT, "expected partitions 0, 1, 2, ..."
        if any(set(each.broker_ids) != {state.node_id} for each in topic.assignments):
            return codes.INVALID_REPLICA_ASSIGNMENT, f"the only broker is {state.node_id}"
    else:
        if topic.num_partitions == 0 or topic.num_partitions < -1:
            return codes.INVALID_PARTITIONS, f"expected 1 or more partitions, found {topic.num_partitions}"
        factor = topic.replication_factor
        if factor == 0 or factor < -1 or factor > state.settings.max_replication_factor:
            most = state.settings.max_replication_factor
            return codes.INVALID_REPLICATION_FACTOR, f"expected a replication factor of 1 to {most}, found {factor}"
    if any(each.value is None for each in topic.configs):
        return codes.INVALID_CONFIG, "a config without a value"
    if len({each.name for each in topic.configs}) < len(topic.configs):
        return codes.INVALID_REQUEST, "a config is set twice"
    return codes.NONE, None


def create_partitions(request: Any, call: Call, state: State) -> Answer:
    response_type = wire.CREATE_PARTITIONS.Response

    def work() -> Any:
        results = []
        for topic in request.topics:
            result = response_type.Topic(name=topic.name)
            results.append(result)
            try:
                present = len(state.logdir.partitions(topic.name))
                if topic.name in INTERNAL_TOPICS:  # groups would be looked for in other partitions than theirs
                    result.error_code = codes.INVALID_REQUEST
                    result.error_message = "the number of partitions of an internal topic does not change"
                elif topic.count <= present:
                    result.error_code = codes.INVALID_PARTITIONS
                    result.error_message = f"the topic has {present} partitions; expected more, found {topic.count}"
                elif topic.assignments is not None and (
                    len(topic.assignments) != topic.count - present
                    or any(set(each.broker_ids) != {state.node_id} for each in topic.assignments)
                ):
                    result.error_code = codes.INVALID_REPLICA_ASSIGNMENT
                    result.error_message = f"expected {topic.count - present} assignments to broker {state.node_id}"
                else:
                    state.logdir.add_partitions(topic.name, topic.count, check_only=request.validate_only)
                    if not request.validate_only:
                        _say_changed(topic.name, f"grown to {topic.count} partitions", call, state)
            except LogcoreError as error:
                code = code_of(error)
                result.error_code = codes.INVALID_PARTITIONS if code == codes.INVALID_CONFIG else code
                result.error_message = message_of(error)
        return response_type(results=results)

    return _in_background(state, work)


def _refuse_twice(result: Any, times: int) -> bool:
    """A topic that is named twice, by its name or its id, is not deleted."""
    if times > 1:
        result.error_code = codes.INVALID_REQUEST
        result.error_message = "the topic is named twice in this request"
    return times > 1


def delete_topics(request: Any, call: Call, state: State) -> Answer:
    response_type = wire.DELETE_TOPICS.Response
    results, doomed = [], []
    if call.version < 6:
        times = Counter(request.topic_names)
        results = [response_type.Topic(name=name) for name in times]
        doomed = [result for result in results if not _refuse_twice(result, times[result.name])]
    wanted = Counter((topic.name, topic.topic_id) for topic in request.topics) if call.version >= 6 else Counter()
    named = Counter(name if name is not None else state.topic_of(topic_id) for name, topic_id in wanted.elements())
    for topic in {(each.name, each.topic_id): each for each in request.topics if call.version >= 6}.values():
        result = response_type.Topic(name=topic.name, topic_id=topic.topic_id)
        results.append(result)
        if (topic.name is None) == (topic.topic_id == _NO_ID):
            result.error_code = codes.INVALID_REQUEST
            result.error_message = "expected a name or an id, and not both"
            continue
        if topic.name is None:
            result.name = state.topic_of(topic.topic_id)
        if result.name is None:
            result.error_code = codes.UNKNOWN_TOPIC_ID
        elif not _refuse_twice(result, named[result.name]):
            doomed.append(result)

    def work() -> None:
        for result in doomed:
            try:
                result.topic_id = state.logdir.topic_id(result.name).bytes
                state.logdir.delete_topic(result.name)
                _say_changed(result.name, "deleted", call, state)
            except LogcoreError as error:
                result.error_code, result.error_message = code_of(error), message_of(error)

    answer = Answer()

    def done(error: Any) -> None:
        gone = {result.name for result in doomed if not result.error_code}
        # Those who wait for its records are told that it is gone.
        state.fetches.wake([key for key in state.fetches.waited_for() if key[0] in gone], call.now_ms)
        if gone:
            state.groups.topics_deleted(gone, call.now_ms)
        answer.set(error if isinstance(error, Exception) else response_type(responses=results))

    state.submit(work, done)
    return answer


# -- settings ------------------------------------------------------------------------------------------------------


def _source(name: str, overrides: Iterable[str], given: Iterable[str]) -> int:
    return _FROM_TOPIC if name in overrides else _FROM_BROKER if name in given else _FROM_DEFAULT


def describe_configs(request: Any, call: Call, state: State) -> Answer:
    return _in_background(state, lambda: _describe_configs(request, state))  # the directory's lock may be taken


def _describe_configs(request: Any, state: State) -> Any:
    response_type = wire.DESCRIBE_CONFIGS.Response
    results = []
    for asked in request.resources:
        result = response_type.Resource(
            resource_type=asked.resource_type, resource_name=asked.resource_name, configs=[]
        )
        results.append(result)
        try:
            if asked.resource_type == _TOPIC_RESOURCE:
                check_topic_name(asked.resource_name)
                described = state.logdir.describe_topic(asked.resource_name)
                result.configs = list(_topic_configs(asked, request, described, state))
            elif asked.resource_type == _BROKER_RESOURCE and asked.resource_name in ("", str(state.node_id)):
                result.configs = list(_broker_configs(asked, state))
            elif asked.resource_type == _BROKER_RESOURCE:
                result.error_code = codes.INVALID_REQUEST
                result.error_message = f"the only broker is {state.node_id}"
            else:
                result.error_code = codes.INVALID_REQUEST
                result.error_message = f"resources of type {asked.resource_type} have no settings here"
        except LogcoreError as error:
            result.error_code, result.error_message = code_of(error), message_of(error)
    return response_type(results=results)


def _topic_configs(asked: Any, request: Any, described: Any, state: State) -> Iterable[Any]:
    config_type = wire.DESCRIBE_CONFIGS.Response.Resource.Config
    given = state.logdir.given_config
    for name, value in described.config.as_mapping().items():
        facts = CONFIGS[name].metadata
        if facts.get("ours") or (asked.configuration_keys and name not in asked.configuration_keys):
            continue
        synonyms = []
        if request.include_synonyms:
            chain: list[tuple[Any, int]] = [
                (described.overrides.get(name), _FROM_TOPIC),
                (given.get(name), _FROM_BROKER),
                (CONFIGS[name].default, _FROM_DEFAULT),
            ]
            synonyms = [
                config_type.Synonym(name=name, value=config_text(of), source=source)
                for of, source in chain
                if of is not None
            ]
        yield config_type(
            name=name,
            value=config_text(value),
            config_source=_source(name, described.overrides, given),
            synonyms=synonyms,
            config_type=_CONFIG_TYPES[facts["type"]],
            documentation=facts["doc"] if request.include_documentation else None,
        )


def _broker_configs(asked: Any, state: State) -> Iterable[Any]:
    """The settings that tools look for, by Kafka's names; they are set when the broker is started."""
    config_type = wire.DESCRIBE_CONFIGS.Response.Resource.Config
    settings, defaults = state.settings, state.logdir.config
    known: dict[str, tuple[float | bool | str, str]] = {
        "node.id": (state.node_id, "int"),
        "broker.id": (state.node_id, "int"),
        "log.dirs": (state.logdir.path, "string"),
        "auto.create.topics.enable": (settings.auto_create_topics, "boolean"),
        "delete.topic.enable": (True, "boolean"),
        "num.partitions": (settings.num_partitions, "int"),
        "default.replication.factor": (1, "int"),
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
    for name, (value, kind) in known.items():
        if not asked.configuration_keys or name in asked.configuration_keys:
            yield config_type(
                name=name,
                value=config_text(value),
                read_only=True,
                config_source=_FROM_BROKER,
                synonyms=[],
                config_type=_CONFIG_TYPES[kind],
            )


def incremental_alter_configs(request: Any, call: Call, state: State) -> Any:
    def changes(asked: Any) -> dict[str, object | None]:
        described = state.logdir.describe_topic(asked.resource_name)
        present = described.config.as_mapping()
        result: dict[str, object | None] = {}
        for each in asked.configs:
            operation = each.config_operation
            if operation == _SET:
                result[each.name] = each.value
            elif operation == _DELETE:
                result[each.name] = None
            elif CONFIGS.get(each.name) is None or CONFIGS[each.name].metadata["type"] != "list":
                raise _Refused(codes.INVALID_CONFIG, f"{each.name} is no list to append to or to subtract from")
            else:
                parts = str(present[each.name]).split(",")
                given = each.value.split(",")
                kept = [part for part in parts if part not in given]
                result[each.name] = ",".join(kept if operation == _SUBTRACT else [*kept, *given])
        return result

    def refuse(asked: Any) -> str | None:
        if any(each.config_operation not in (_SET, _DELETE, _APPEND, _SUBTRACT) for each in asked.configs):
            return "unknown operation"
        if any(each.value is None and each.config_operation != _DELETE for each in asked.configs):
            return "a config without a value"
        return None

    return _in_background(
        state, lambda: _alter(wire.INCREMENTAL_ALTER_CONFIGS.Response, request, call, state, changes, refuse)
    )


def alter_configs(request: Any, call: Call, state: State) -> Any:
    """The older form: what is given replaces all that was set before."""

    def changes(asked: Any) -> dict[str, object | None]:
        before = state.logdir.describe_topic(asked.resource_name).overrides
        return {**dict.fromkeys(before), **{each.name: each.value for each in asked.configs}}

    def refuse(asked: Any) -> str | None:
        return "a config without a value" if any(each.value is None for each in asked.configs) else None

    return _in_background(state, lambda: _alter(wire.ALTER_CONFIGS.Response, request, call, state, changes, refuse))


class _Refused(Exception):
    """A change that the protocol forbids: code, message."""


def _alter(
    response_type: Any,
    request: Any,
    call: Call,
    state: State,
    changes: Callable[[Any], dict[str, object | None]],
    refuse: Callable[[Any], str | None],
) -> Any:
    """Each resource is changed wholly or not at all."""
    times = Counter((each.resource_type, each.resource_name) for each in request.resources)
    results = []
    for asked in request.resources:
        result = response_type.Resource(resource_type=asked.resource_type, resource_name=asked.resource_name)
        results.append(result)
        names = [each.name for each in asked.configs]
        reason = "the resource is named twice" if times[asked.resource_type, asked.resource_name] > 1 else None
        reason = reason or ("a config is named twice" if len(set(names)) < len(names) else refuse(asked))
        if asked.resource_type != _TOPIC_RESOURCE:
            reason = reason or "only settings of topics can be altered; the broker's are given when it is started"
        if reason is not None:
            result.error_code, result.error_message = codes.INVALID_REQUEST, reason
            continue
        try:
            check_topic_name(asked.resource_name)
            wanted = changes(asked)
            state.logdir.alter_topic(asked.resource_name, wanted, check_only=request.validate_only)
            if not request.validate_only:
                _say_changed(asked.resource_name, f"set to {shown(wanted)}", call, state)
        except _Refused as refused:
            result.error_code, result.error_message = refused.args
        except LogcoreError as error:
            result.error_code, result.error_message = code_of(error), message_of(error)
    return response_type(responses=results)
