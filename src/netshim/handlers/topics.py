"""Creates, extends and deletes topics for admin clients.

LogDir performs the changes. This module checks for errors that only a request can have,
such as a topic that is named twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from logcore import LogConfig, LogcoreError
from logcore.config import CONFIGS, config_text
from logcore.errors import CommitTimeoutError
from logcore.metadata.filenames import INTERNAL_TOPICS, METADATA_LOG, TRANSACTIONS_TOPIC
from netshim import wire
from netshim.handlers.configs import source_of
from netshim.handlers.failures import code_of, message_of
from netshim.scheduling import PendingResponse
from netshim.state import BrokerState, Call
from netshim.topic_ids import NO_ID
from netshim.topology import Placement
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        CreatePartitionsRequest,
        CreatePartitionsResponse,
        CreateTopicsRequest,
        CreateTopicsResponse,
        DeleteTopicsRequest,
        DeleteTopicsResponse,
    )

#: Maximum number of topics that are created under one lock of the directory. Other work
#: on the directory runs between two such groups.
_TOPICS_AT_ONCE: Final = 50


def create_topics(
    request: CreateTopicsRequest, call: Call, state: BrokerState
) -> CreateTopicsResponse | PendingResponse:
    response_type = wire.CREATE_TOPICS.Response
    logdir = state.logdir
    times = Counter(topic.name for topic in request.topics)

    total = sum(max(0, _partition_count(topic, state)) for topic in request.topics)
    excess = _excess(total, state)
    if excess is not None:
        refused = [
            response_type.Topic(
                name=name, error_code=codes.POLICY_VIOLATION, error_message=excess
            )
            for name in times
        ]
        return response_type(topics=refused)

    def work() -> CreateTopicsResponse:
        results: dict[str, CreateTopicsResponse.Topic] = {}
        accepted: dict[str, tuple[int, dict[str, object]]] = {}
        # 1. Check each topic alone, so that a refused topic does not prevent the
        # others.
        for topic in request.topics:
            result = results[topic.name] = response_type.Topic(name=topic.name)
            result.error_code, result.error_message = _check_new_topic(
                topic, times[topic.name], state
            )
            if result.error_code:
                continue
            count = _partition_count(topic, state)
            config: dict[str, object] = {
                entry.name: entry.value for entry in topic.configs
            }
            try:
                logdir.create_topics({topic.name: (count, config)}, check_only=True)
                accepted[topic.name] = count, config
            except LogcoreError as error:
                result.error_code = code_of(error)
                result.error_message = message_of(error)
        # 2. Create the topics in groups: one write of the file of topics serves a
        # group.
        names = list(accepted)
        placements = {topic.name: _placement(topic) for topic in request.topics}
        for first in range(0, len(names), _TOPICS_AT_ONCE):
            _create(
                names[first : first + _TOPICS_AT_ONCE],
                accepted,
                placements,
                results,
                request,
                state,
            )
        # 3. Describe the new topics. Since KIP-525, clients read it from this
        # response.
        accepted = {
            name: accepted[name] for name in names if not results[name].error_code
        }
        for name, (count, config_overrides) in accepted.items():
            result = results[name]
            result.num_partitions = count
            result.replication_factor = state.topology.factor_of(placements[name])
            overrides: Iterable[str] = config_overrides
            if request.validate_only:
                # The topic does not exist: its settings would be these.
                settings = LogConfig.parse({**logdir.given_config, **config_overrides})
            else:
                described = logdir.describe_topic(name)
                overrides = described.overrides
                settings = described.config
                result.topic_id = described.topic_id.bytes
                state.journal.log_change(call, name, f"created with {count} partitions")
            result.configs = [
                response_type.Topic.Config(
                    name=key,
                    value=config_text(value),
                    config_source=source_of(key, overrides, logdir.given_config),
                )
                for key, value in settings.as_mapping().items()
                if not CONFIGS[key].metadata.get("is_extension")
            ]
        return response_type(topics=list(results.values()))

    return state.in_background(work)


def _create(
    names: list[str],
    accepted: dict[str, tuple[int, dict[str, object]]],
    placements: Mapping[str, Placement],
    results: dict[str, CreateTopicsResponse.Topic],
    request: CreateTopicsRequest,
    state: BrokerState,
) -> None:
    """Create topics together, with one write of the topics file, or one by one if one of
    them is refused.
    """
    try:
        state.topology.create_topics(
            {name: accepted[name] for name in names},
            placements,
            timeout_ms=request.timeout_ms,
            check_only=request.validate_only,
        )
    except LogcoreError as error:
        # After a timeout the topics exist, so a repetition would find a conflict.
        if len(names) > 1 and not isinstance(error, CommitTimeoutError):
            for name in names:
                _create([name], accepted, placements, results, request, state)
            return
        for name in names:
            results[name].error_code = code_of(error)
            results[name].error_message = message_of(error)


def _excess(count: int, state: BrokerState) -> str | None:
    """Return why a request for this many new partitions is refused, None if it is not.

    Each partition takes several syncs of one thread, and no other request creates topics
    during that time.
    """
    maximum = state.settings.max_partitions_per_request
    if count <= maximum:
        return None
    return f"{count} new partitions in one request; expected {maximum} at most"


def _partition_count(topic: CreateTopicsRequest.Topic, state: BrokerState) -> int:
    if topic.assignments:
        return len(topic.assignments)
    count: int = topic.num_partitions
    # -1 requests the default of the broker (KIP-464).
    if count == -1:
        return state.settings.num_partitions
    return count


def _placement(topic: CreateTopicsRequest.Topic) -> Placement:
    """Return the replicas that a request specifies."""
    if topic.assignments:
        return Placement(
            assignments={
                assignment.partition_index: assignment.broker_ids
                for assignment in topic.assignments
            }
        )
    return Placement(topic.replication_factor)


def _check_new_topic(
    topic: CreateTopicsRequest.Topic, times: int, state: BrokerState
) -> tuple[int, str | None]:
    """Return the errors that depend on the request alone, as (code, message)."""
    if times > 1:
        return codes.INVALID_REQUEST, "the topic is named twice in this request"
    if topic.name == METADATA_LOG:
        return (
            codes.INVALID_REQUEST,
            f"creation of internal topic {METADATA_LOG} is prohibited",
        )
    if topic.assignments:
        # The assignment determines both numbers, and the request could contradict it.
        if topic.num_partitions != -1 or topic.replication_factor != -1:
            return (
                codes.INVALID_REQUEST,
                "a manual assignment excludes a number of partitions and replicas",
            )
        # A gap would be a partition that no broker stores.
        if sorted(
            assignment.partition_index for assignment in topic.assignments
        ) != list(range(len(topic.assignments))):
            return codes.INVALID_REPLICA_ASSIGNMENT, "expected partitions 0, 1, 2, ..."
    elif topic.num_partitions == 0 or topic.num_partitions < -1:
        return (
            codes.INVALID_PARTITIONS,
            f"expected 1 or more partitions, found {topic.num_partitions}",
        )
    refused = state.topology.check_placement(_placement(topic))
    if refused[0]:
        return refused
    if any(assignment.value is None for assignment in topic.configs):
        return codes.INVALID_CONFIG, "a config without a value"
    if len({assignment.name for assignment in topic.configs}) < len(topic.configs):
        return codes.INVALID_REQUEST, "a config is set twice"
    return codes.NONE, None


def create_partitions(
    request: CreatePartitionsRequest, call: Call, state: BrokerState
) -> PendingResponse:
    response_type = wire.CREATE_PARTITIONS.Response

    def work() -> CreatePartitionsResponse:
        results = []
        total = 0
        times = Counter(topic.name for topic in request.topics)
        for topic in {entry.name: entry for entry in request.topics}.values():
            result = response_type.Topic(name=topic.name)
            results.append(result)
            if times[topic.name] > 1:
                result.error_code = codes.INVALID_REQUEST
                result.error_message = "the topic is named twice in this request"
                continue
            try:
                # The limit concerns only partitions that are new.
                current_count = len(state.logdir.partitions(topic.name))
                total += max(0, topic.count - current_count)
                excess = _excess(total, state)
                # With another number of partitions, the broker would read a group from
                # the wrong partition.
                if topic.name in INTERNAL_TOPICS:
                    result.error_code = codes.INVALID_REQUEST
                    result.error_message = (
                        "the number of partitions of an internal topic does not change"
                    )
                # Partitions cannot be removed: records, and the keys that hash to them,
                # would be lost.
                elif topic.count <= current_count:
                    result.error_code = codes.INVALID_PARTITIONS
                    result.error_message = (
                        f"the topic has {current_count} partitions; expected more, "
                        f"found {topic.count}"
                    )
                elif excess is not None:
                    result.error_code = codes.POLICY_VIOLATION
                    result.error_message = excess
                elif topic.assignments is not None and (
                    len(topic.assignments) != topic.count - current_count
                ):
                    result.error_code = codes.INVALID_REPLICA_ASSIGNMENT
                    result.error_message = (
                        f"expected {topic.count - current_count} assignments"
                    )
                else:
                    # The broker chooses the replicas.
                    placement = Placement()
                    if topic.assignments is not None:
                        brokers = [entry.broker_ids for entry in topic.assignments]
                        placement = Placement(
                            assignments=dict(enumerate(brokers, current_count))
                        )
                    refused = state.topology.check_placement(placement)
                    if refused[0]:
                        result.error_code, result.error_message = refused
                        continue
                    state.topology.add_partitions(
                        topic.name,
                        topic.count,
                        placement,
                        check_only=request.validate_only,
                    )
                    if not request.validate_only:
                        state.journal.log_change(
                            call, topic.name, f"grown to {topic.count} partitions"
                        )
            except LogcoreError as error:
                code = code_of(error)
                # The library reports a wrong count as an invalid setting. Kafka has a
                # code for it.
                if code == codes.INVALID_CONFIG:
                    result.error_code = codes.INVALID_PARTITIONS
                else:
                    result.error_code = code
                result.error_message = message_of(error)
        return response_type(results=results)

    return state.in_background(work)


def _refuse_twice(result: DeleteTopicsResponse.Topic, times: int) -> bool:
    """Set the error of a topic that a request names more than once. Return whether it does."""
    if times > 1:
        result.error_code = codes.INVALID_REQUEST
        result.error_message = "the topic is named twice in this request"
    return times > 1


def delete_topics(
    request: DeleteTopicsRequest, call: Call, state: BrokerState
) -> PendingResponse:
    """Delete topics. A topic that is named twice, by its name or its id, is not deleted."""
    response_type = wire.DELETE_TOPICS.Response
    results = []
    to_delete = []
    if call.version < 6:
        for name, times in Counter(request.topic_names).items():
            result = response_type.Topic(name=name)
            results.append(result)
            if not _refuse_twice(result, times):
                to_delete.append((name, result))
    if call.version >= 6:
        counts = Counter((topic.name, topic.topic_id) for topic in request.topics)
    else:
        counts = Counter()
    # A request that contains the name and the id of one topic names it twice.
    name_counts = Counter(
        name if name is not None else state.topic_ids.name_of(topic_id)
        for name, topic_id in counts.elements()
    )
    for topic in {
        (entry.name, entry.topic_id): entry
        for entry in request.topics
        if call.version >= 6
    }.values():
        result = response_type.Topic(name=topic.name, topic_id=topic.topic_id)
        results.append(result)
        # The name may belong to a newer topic than the id.
        if (topic.name is None) == (topic.topic_id == NO_ID):
            result.error_code = codes.INVALID_REQUEST
            result.error_message = "expected a name or an id, and not both"
            continue
        if topic.name is None:
            result.name = state.topic_ids.name_of(topic.topic_id)
        if result.name is None:
            result.error_code = codes.UNKNOWN_TOPIC_ID
        elif not _refuse_twice(result, name_counts[result.name]):
            to_delete.append((result.name, result))

    # Runs in a thread, because deletions rename directories and sync.
    def work() -> None:
        for name, result in to_delete:
            # Open transactions would remain open, and block read_committed readers
            # permanently.
            if name == TRANSACTIONS_TOPIC:
                result.error_code = codes.POLICY_VIOLATION
                result.error_message = (
                    f"{name} contains the transactions that must be ended"
                )
                continue
            try:
                result.topic_id = state.logdir.topic_id(name).bytes
                if state.is_shared:
                    state.logdir.delete_topic(name)
                else:
                    # Two phases: a crash between them leaves the topic in deletion, and
                    # the next start completes it.
                    state.logdir.host.start_deletion(name)
                state.journal.log_change(call, name, "deleted")
            except LogcoreError as error:
                result.error_code = code_of(error)
                result.error_message = message_of(error)

    pending = PendingResponse()

    def finish(error: object) -> None:
        deleted = {name for name, result in to_delete if not result.error_code}
        # Fetches that wait for records of these topics are answered now.
        state.fetches.wake(
            [key for key in state.fetches.awaited_keys() if key[0] in deleted],
            call.now_ms,
        )
        response = (
            error if isinstance(error, Exception) else response_type(responses=results)
        )
        if state.is_shared or not deleted:
            pending.set(response)
            return

        def end_deletion(failure: object) -> None:
            def end() -> None:
                state.logdir.host.end_deletion(deleted, is_forgotten=failure is None)

            state.submit(end, lambda _: pending.set(response))

        # A name can be used again once no group has an offset of the topic. Otherwise,
        # a new topic of that name would inherit the offsets after a crash.
        state.groups.topics_deleted(deleted, call.now_ms, end_deletion)

    state.submit(work, finish)
    return pending
