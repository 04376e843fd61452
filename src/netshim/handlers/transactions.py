"""Requests of transactions: add partitions and offsets, end a transaction, and requests of
admin tools.

Rules (broker reference, sections 3.4 to 3.12):
- This module builds responses and chooses codes by version. logcore.coordination
  decides about transactions.
- The first request waits until the stored transactions have been read.
- Batches of a producer are verified when they are appended (produce.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logcore import (
    CoordinatorFencedError,
    InvalidProducerEpochError,
    LogcoreError,
    NotLeaderError,
)
from logcore.coordination.classic_transitions import is_too_long
from logcore.coordination.group_requests import (
    Committer,
    GroupError,
)
from logcore.coordination.transaction_effects import (
    AddPartitions,
    End,
    Initialize,
    ProducerIdAndEpoch,
    Result,
    TransactionError,
    WriteMarkers,
)
from logcore.format.group_records import partition_of
from logcore.format.transaction_records import Partition, Status, StoredTransaction
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.partition.coordinator_append import producers_of
from netshim import wire
from netshim.coordinators import TransactionErrors
from netshim.handlers.failures import code_of, message_of
from netshim.handlers.group import code_of_group, offsets_in
from netshim.scheduling import ChunkCounter, PendingResponse, Steps, resolve_with
from netshim.state import BrokerState, Call
from netshim.topic_patterns import compile_pattern
from netshim.transactions import Markers, add_or_verify
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        AddOffsetsToTxnRequest,
        AddPartitionsToTxnRequest,
        AddPartitionsToTxnResponse,
        DescribeProducersRequest,
        DescribeProducersResponse,
        DescribeTransactionsRequest,
        DescribeTransactionsResponse,
        EndTxnRequest,
        InitProducerIdRequest,
        InitProducerIdResponse,
        ListTransactionsRequest,
        ListTransactionsResponse,
        TxnOffsetCommitRequest,
        TxnOffsetCommitResponse,
        WriteTxnMarkersRequest,
        WriteTxnMarkersResponse,
    )

#: First version of an API with PRODUCER_FENCED. Earlier ones have
#: INVALID_PRODUCER_EPOCH.
_FENCED_SINCE: Final = {
    wire.INIT_PRODUCER_ID.key: 4,
    wire.ADD_PARTITIONS_TO_TXN.key: 2,
    wire.ADD_OFFSETS_TO_TXN.key: 2,
    wire.END_TXN.key: 2,
}
#: First versions of EndTxn and TxnOffsetCommit in the second transaction protocol
#: (KIP-890).
_SECOND_END: Final = 5
_SECOND_OFFSETS: Final = 5
#: First version of AddPartitionsToTxn that brokers send, for many transactions at once.
_BATCHED_SINCE: Final = 4
#: First version of TxnOffsetCommit with TRANSACTION_ABORTABLE.
_ABORTABLE_OFFSETS: Final = 4
#: The errors of a coordinator that is not available now.
COORDINATOR_ERRORS: Final = frozenset(
    (
        TransactionError.COORDINATOR_NOT_AVAILABLE,
        TransactionError.COORDINATOR_LOAD_IN_PROGRESS,
        TransactionError.NOT_COORDINATOR,
    )
)
ResponseT = TypeVar("ResponseT")


def _code(error: TransactionError, call: Call) -> int:
    if error is TransactionError.PRODUCER_FENCED and call.version < _FENCED_SINCE.get(
        call.api_key, 0
    ):
        return codes.INVALID_PRODUCER_EPOCH
    return int(getattr(codes, error.name))


def code_for_writer(error: TransactionError, version: int, abortable_since: int) -> int:
    """Return the code for a producer that writes records or offsets (sections 3.6 and
    3.7). `abortable_since` is the first version of the API with TRANSACTION_ABORTABLE.
    """
    # Since KIP-588, a producer can recover from this code by an abort. PRODUCER_FENCED
    # is fatal, and the newer epoch may be one that the coordinator gave to this
    # producer.
    if error is TransactionError.PRODUCER_FENCED:
        return codes.INVALID_PRODUCER_EPOCH
    if error is TransactionError.TRANSACTION_ABORTABLE and version < abortable_since:
        return codes.INVALID_TXN_STATE
    return int(getattr(codes, error.name))


def when_transactions_are_loaded(
    call: Call,
    state: BrokerState,
    handle: Callable[[], ResponseT | PendingResponse],
    refuse: Callable[[int], ResponseT],
) -> ResponseT | PendingResponse:
    """Call handle() once the stored transactions have been read, or refuse(code) if
    they cannot be read.
    """
    if state.transactions.is_loaded:
        return handle()
    pending = PendingResponse()

    def when_loaded(is_loaded: bool) -> None:
        if is_loaded:
            resolve_with(handle, pending)
        else:
            # The client retries. Each attempt reads the transactions again.
            pending.set(refuse(codes.COORDINATOR_NOT_AVAILABLE))

    state.transactions.load(call.now_ms, when_loaded)
    return pending


def _with_stored_transactions(
    names: Collection[str] | None,
    call: Call,
    state: BrokerState,
    respond: Callable[[Mapping[str, StoredTransaction]], Steps[ResponseT]],
    refuse: Callable[[int], ResponseT],
) -> ResponseT | PendingResponse:
    """Call respond() with the stored transactions of these ids, or with all if `names` is
    None. Call refuse(code) if they cannot be read now.
    """

    def handle() -> PendingResponse:
        pending = PendingResponse()

        def finish(stored: dict[str, StoredTransaction] | Exception) -> None:
            # After NOT_COORDINATOR, the client finds the new coordinator. After the other
            # code, it sends the request to this broker again.
            if isinstance(stored, NotLeaderError):
                pending.set(refuse(codes.NOT_COORDINATOR))
            elif isinstance(stored, Exception):
                pending.set(refuse(codes.COORDINATOR_NOT_AVAILABLE))
            else:
                resolve_with(lambda: state.run_in_steps(respond(stored)), pending)

        state.transactions.find_stored(names, finish)
        return pending

    return when_transactions_are_loaded(call, state, handle, refuse)


def init_transactional_id(
    request: InitProducerIdRequest, call: Call, state: BrokerState
) -> InitProducerIdResponse | PendingResponse:
    response_type = wire.INIT_PRODUCER_ID.Response
    requested = Initialize(
        transactional_id=request.transactional_id or "",
        timeout_ms=request.transaction_timeout_ms,
        producer_id=request.producer_id,
        producer_epoch=request.producer_epoch,
    )

    def handle() -> PendingResponse:
        pending = PendingResponse()

        def finish(result: Result) -> None:
            if isinstance(result, ProducerIdAndEpoch):
                pending.set(
                    response_type(
                        producer_id=result.producer_id,
                        producer_epoch=result.producer_epoch,
                    )
                )
            else:
                # The third result, Unended, is for producers of this process that keep
                # their transaction open (KIP-939).
                assert isinstance(result, TransactionError), result
                pending.set(
                    response_type(error_code=_code(result, call), producer_epoch=-1)
                )

        state.transactions.request(requested, call.now_ms, finish)
        return pending

    return when_transactions_are_loaded(
        call, state, handle, lambda code: response_type(error_code=code)
    )


def add_partitions_to_txn(
    request: AddPartitionsToTxnRequest, call: Call, state: BrokerState
) -> AddPartitionsToTxnResponse | PendingResponse:
    """Add partitions to a transaction. If one partition is unknown, none is added, and
    the others have an error of their own (section 3.5).
    """
    if call.version >= _BATCHED_SINCE:
        return _add_for_brokers(request, call, state)
    partitions = {
        (topic.name, number)
        for topic in request.v3_and_below_topics
        for number in topic.partitions
    }
    existing = _existing_partitions(partitions, state)

    def response(code_of_existing: int) -> AddPartitionsToTxnResponse:
        topic_type = wire.ADD_PARTITIONS_TO_TXN.Response.Topic
        unknown = codes.UNKNOWN_TOPIC_OR_PARTITION
        return wire.ADD_PARTITIONS_TO_TXN.Response(
            results_by_topic_v3_and_below=[
                topic_type(
                    name=topic.name,
                    results_by_partition=[
                        topic_type.Partition(
                            partition_index=number,
                            partition_error_code=code_of_existing
                            if (topic.name, number) in existing
                            else unknown,
                        )
                        for number in topic.partitions
                    ],
                )
                for topic in request.v3_and_below_topics
            ]
        )

    if existing != partitions:
        return response(codes.OPERATION_NOT_ATTEMPTED)
    requested = AddPartitions(
        transactional_id=request.v3_and_below_transactional_id,
        producer_id=request.v3_and_below_producer_id,
        producer_epoch=request.v3_and_below_producer_epoch,
        partitions=frozenset(partitions),
    )
    return when_transactions_are_loaded(
        call,
        state,
        lambda: _respond_with_code(requested, call, state, response),
        response,
    )


def _existing_partitions(
    requested: Collection[Partition], state: BrokerState
) -> set[Partition]:
    """Return the partitions that exist."""
    return {
        (name, number)
        for name, number in requested
        if number in state.logs.numbers_of(name)
    }


def _add_for_brokers(
    request: AddPartitionsToTxnRequest, call: Call, state: BrokerState
) -> AddPartitionsToTxnResponse | PendingResponse:
    """Add or verify partitions for another broker, which leads them.

    The results have the order of the transactions in the request.
    """
    response_type = wire.ADD_PARTITIONS_TO_TXN.Response
    topic_type = response_type.Transaction.Topic
    response = response_type(results_by_transaction=[])
    # The number of transactions without a result, plus one until all are requested: a
    # result that is available at once must not finish the response.
    remaining = 1
    pending = PendingResponse()

    def finish() -> None:
        nonlocal remaining
        remaining -= 1
        if not remaining:
            pending.set(response)

    def complete(
        result: AddPartitionsToTxnResponse.Transaction,
        partitions: list[Partition],
        code_of: Callable[[Partition], int],
    ) -> None:
        topics: dict[str, AddPartitionsToTxnResponse.Transaction.Topic] = {}
        for name, number in partitions:
            topic = topics.setdefault(
                name, topic_type(name=name, results_by_partition=[])
            )
            topic.results_by_partition.append(
                topic_type.Partition(
                    partition_index=number, partition_error_code=code_of((name, number))
                )
            )
        result.topic_results = list(topics.values())
        finish()

    def decided(
        result: AddPartitionsToTxnResponse.Transaction,
        partitions: list[Partition],
        errors: TransactionErrors,
    ) -> None:
        codes_by_partition = {key: _code(error, call) for key, error in errors.items()}
        complete(
            result, partitions, lambda key: codes_by_partition.get(key, codes.NONE)
        )

    for requested in request.transactions:
        partitions = [
            (topic.name, number)
            for topic in requested.topics
            for number in topic.partitions
        ]
        result = response_type.Transaction(transactional_id=requested.transactional_id)
        response.results_by_transaction.append(result)
        remaining += 1
        existing = _existing_partitions(partitions, state)
        # The transactions of one request are independent: an unknown partition refuses
        # only the transaction that names it.
        if len(existing) < len(set(partitions)):
            complete(result, partitions, partial(_code_of_missing_partition, existing))
            continue
        add_or_verify(
            state.transactions,
            (
                requested.transactional_id,
                requested.producer_id,
                requested.producer_epoch,
            ),
            partitions,
            call.now_ms,
            partial(decided, result, partitions),
            adds=not requested.verify_only,
        )
    finish()
    # If all results came from memory, the connection need not wait.
    if pending.is_set:
        return response
    return pending


def _code_of_missing_partition(existing: set[Partition], partition: Partition) -> int:
    """Return the code of a partition in a request with partitions that do not exist."""
    if partition in existing:
        return codes.OPERATION_NOT_ATTEMPTED
    return codes.UNKNOWN_TOPIC_OR_PARTITION


def _respond_with_code(
    requested: Any, call: Call, state: BrokerState, response: Callable[[int], Any]
) -> PendingResponse:
    """Send a request to the coordinator, and return its code as a response."""
    pending = PendingResponse()

    def finish(result: Result) -> None:
        pending.set(
            response(
                _code(result, call)
                if isinstance(result, TransactionError)
                else codes.NONE
            )
        )

    state.transactions.request(requested, call.now_ms, finish)
    return pending


def add_offsets_to_txn(
    request: AddOffsetsToTxnRequest, call: Call, state: BrokerState
) -> Any:
    """Add the group's partition of `__consumer_offsets`, which is created if it does
    not exist.
    """

    def response(code: int) -> Any:
        return wire.ADD_OFFSETS_TO_TXN.Response(error_code=code)

    if not request.group_id or is_too_long(request.group_id):
        return response(codes.INVALID_GROUP_ID)

    def add() -> Any:
        requested = AddPartitions(
            transactional_id=request.transactional_id,
            producer_id=request.producer_id,
            producer_epoch=request.producer_epoch,
            partitions=frozenset({_home_of(request.group_id, state)}),
        )
        return when_transactions_are_loaded(
            call,
            state,
            lambda: _respond_with_code(requested, call, state, response),
            response,
        )

    return _with_offsets_topic(state, response, add)


def _with_offsets_topic(
    state: BrokerState, response: Callable[[int], Any], handle: Callable[[], Any]
) -> Any:
    """Call handle() once `__consumer_offsets` exists."""
    # A transaction may be the first to commit offsets.
    if OFFSETS_TOPIC in state.logdir:
        return handle()
    pending = PendingResponse()

    def finish(result: Any) -> None:
        if isinstance(result, Exception):
            pending.set(response(codes.COORDINATOR_NOT_AVAILABLE))
        else:
            resolve_with(handle, pending)

    state.submit(state.groups.create_topic, finish)
    return pending


def _home_of(group_id: str, state: BrokerState) -> tuple[str, int]:
    return OFFSETS_TOPIC, partition_of(
        group_id, state.logdir.partitions(OFFSETS_TOPIC)[-1] + 1
    )


def end_txn(request: EndTxnRequest, call: Call, state: BrokerState) -> Any:
    response_type = wire.END_TXN.Response
    # In the second protocol (KIP-890), each end raises the epoch, so that a late batch
    # of this transaction cannot enter the next one.
    is_second = call.version >= _SECOND_END
    requested = End(
        transactional_id=request.transactional_id,
        producer_id=request.producer_id,
        producer_epoch=request.producer_epoch,
        commit=request.committed,
        client_version=2 if is_second else 0,
    )

    def handle() -> PendingResponse:
        pending = PendingResponse()

        def finish(result: Result) -> None:
            if isinstance(result, TransactionError):
                pending.set(response_type(error_code=_code(result, call)))
            # The client continues with this id and epoch. The id is new after an epoch
            # of 32,767.
            elif isinstance(result, ProducerIdAndEpoch) and is_second:
                pending.set(
                    response_type(
                        producer_id=result.producer_id,
                        producer_epoch=result.producer_epoch,
                    )
                )
            else:
                pending.set(response_type())

        state.transactions.request(requested, call.now_ms, finish)
        return pending

    return when_transactions_are_loaded(
        call, state, handle, lambda code: response_type(error_code=code)
    )


# -- offsets in a transaction ----------------------------------------------------------


def txn_offset_commit(
    request: TxnOffsetCommitRequest, call: Call, state: BrokerState
) -> TxnOffsetCommitResponse | PendingResponse:
    topic_type = wire.TXN_OFFSET_COMMIT.Response.Topic

    def response(code: int) -> TxnOffsetCommitResponse:
        return wire.TXN_OFFSET_COMMIT.Response(
            topics=[
                topic_type(
                    name=topic.name,
                    partitions=[
                        topic_type.Partition(
                            partition_index=partition.partition_index, error_code=code
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    def refuse(code: int) -> TxnOffsetCommitResponse:
        # Clients of these versions fail after COORDINATOR_LOAD_IN_PROGRESS. They retry
        # after COORDINATOR_NOT_AVAILABLE.
        is_old = code == codes.COORDINATOR_LOAD_IN_PROGRESS and call.version < 2
        return response(codes.COORDINATOR_NOT_AVAILABLE if is_old else code)

    if not request.group_id or is_too_long(request.group_id):
        return response(codes.INVALID_GROUP_ID)

    def commit() -> TxnOffsetCommitResponse | PendingResponse:
        # The last of three steps: create the topic, add its partition, commit the
        # offsets.
        steps = _commit_offsets(request, call, state, response(codes.NONE))
        return state.groups.run_in_steps(steps)

    def when_groups_are_known() -> PendingResponse | TxnOffsetCommitResponse:
        return state.groups.when_groups_loaded(
            commit, lambda error: refuse(code_of_group(error, call)), call.now_ms
        )

    def when_added() -> PendingResponse | TxnOffsetCommitResponse:
        producer = request.transactional_id, request.producer_id, request.producer_epoch
        home = {_home_of(request.group_id, state)}
        # In the second protocol, the client sends no AddOffsetsToTxn: the commit itself
        # adds the partition.
        adds = call.version >= _SECOND_OFFSETS
        # The usual case: the coordinator is in this process and already has the
        # partition.
        if state.transactions.is_prepared(producer, home, adds=adds):
            return when_groups_are_known()
        pending = PendingResponse()

        def prepared(errors: TransactionErrors) -> None:
            if errors:
                # A commit of offsets is about one partition of `__consumer_offsets`.
                (error,) = errors.values()
                pending.set(refuse(_code_of_offsets(error, call)))
            else:
                resolve_with(when_groups_are_known, pending)

        state.transactions.prepare(producer, home, call.now_ms, prepared, adds=adds)
        return pending

    outcome: TxnOffsetCommitResponse | PendingResponse = _with_offsets_topic(
        state, response, when_added
    )
    return outcome


def _code_of_offsets(error: TransactionError, call: Call) -> int:
    # The client sent this request to the coordinator of the group. After NOT_COORDINATOR,
    # it would look up that coordinator again, although the transaction's is unavailable.
    if error in COORDINATOR_ERRORS:
        return codes.COORDINATOR_NOT_AVAILABLE
    return code_for_writer(error, call.version, _ABORTABLE_OFFSETS)


def _commit_offsets(
    request: TxnOffsetCommitRequest,
    call: Call,
    state: BrokerState,
    response: TxnOffsetCommitResponse,
) -> Steps[TxnOffsetCommitResponse | PendingResponse]:
    """Commit offsets in a transaction. The last step checks the transaction and appends the
    commit, so that no marker comes between.
    """
    # In chunks, because a commit may list 100,000 partitions.
    offsets, results = yield from offsets_in(
        request.topics, response.topics, call, state
    )
    # No partition of the request exists.
    if not results:
        return response
    pending = PendingResponse()

    def refuse_all(code: int) -> None:
        for result in results:
            # A code of a partition remains if the commit succeeds.
            result.error_code = code or result.error_code

    def finish(error: GroupError | None) -> None:
        refuse_all(code_of_group(error, call))
        pending.set(response)

    committer = Committer(
        request.group_id,
        request.generation_id,
        request.member_id,
        request.group_instance_id,
    )
    # The check and the append are one step. If the transaction ended between them, the
    # offsets would belong to the next transaction of the producer, or to none.
    producer = request.producer_id, request.producer_epoch
    error = state.transactions.verified(
        (request.transactional_id, *producer),
        _home_of(request.group_id, state),
        lambda: state.groups.request_commit(committer, offsets, finish, producer),
    )
    if error is not None:
        refuse_all(_code_of_offsets(error, call))
        return response
    return pending


# -- requests of admin tools -----------------------------------------------------------


def write_txn_markers(
    request: WriteTxnMarkersRequest, call: Call, state: BrokerState
) -> WriteTxnMarkersResponse | PendingResponse:
    response_type = wire.WRITE_TXN_MARKERS.Response
    # Step 1: create a result for each partition.
    marker_type = response_type.Marker
    results = []
    work = []
    for marker in request.markers:
        topics = []
        partition_results: dict[Partition, Any] = {}
        for topic in marker.topics:
            partitions = [
                marker_type.Topic.Partition(partition_index=number)
                for number in topic.partition_indexes
            ]
            partition_results.update(
                {(topic.name, entry.partition_index): entry for entry in partitions}
            )
            topics.append(marker_type.Topic(name=topic.name, partitions=partitions))
        results.append(marker_type(producer_id=marker.producer_id, topics=topics))
        work.append((marker, partition_results))
    response = response_type(markers=results)
    # The response waits for the markers of all partitions, because the coordinator then
    # completes the transaction.
    remaining = sum(len(partition_results) for _, partition_results in work)
    if not remaining:
        return response
    pending = PendingResponse()

    def count_down(
        partition_results: dict[Partition, Any],
        partition: Partition,
        error: Exception | None,
    ) -> None:
        nonlocal remaining
        result = partition_results[partition]
        # After these two codes, a coordinator does not send the marker again. After all
        # others, it retries.
        if isinstance(error, InvalidProducerEpochError):
            result.error_code = codes.INVALID_PRODUCER_EPOCH
        elif isinstance(error, CoordinatorFencedError):
            result.error_code = codes.TRANSACTION_COORDINATOR_FENCED
        elif error is not None:
            result.error_code = code_of(error)
        remaining -= 1
        if not remaining:
            pending.set(response)

    # Step 2: append the markers. Each partition completes its own result.
    for marker, partition_results in work:
        effect = WriteMarkers(
            "",
            marker.producer_id,
            marker.producer_epoch,
            marker.transaction_result,
            frozenset(partition_results),
        )
        Markers(
            state,
            None,
            effect,
            call.now_ms,
            # If an earlier marker has a higher epoch, the log refuses this one
            # (CoordinatorFencedError).
            coordinator_epoch=marker.coordinator_epoch,
            on_marker=partial(count_down, partition_results),
        ).write()
    return pending


def describe_transactions(
    request: DescribeTransactionsRequest, call: Call, state: BrokerState
) -> DescribeTransactionsResponse | PendingResponse:
    response_type = wire.DESCRIBE_TRANSACTIONS.Response
    state_type = response_type.TransactionState

    def describe_one(name: str, stored: StoredTransaction | None) -> Any:
        if stored is None:
            # No transaction can have an empty id, so the request is invalid.
            unknown_transaction = (
                codes.TRANSACTIONAL_ID_NOT_FOUND if name else codes.INVALID_REQUEST
            )
            return state_type(error_code=unknown_transaction, transactional_id=name)
        by_topic: dict[str, list[int]] = {}
        for topic, number in sorted(stored.partitions):
            by_topic.setdefault(topic, []).append(number)
        return state_type(
            transactional_id=name,
            transaction_state=stored.status.label,
            transaction_timeout_ms=stored.timeout_ms,
            transaction_start_time_ms=stored.start_ms,
            producer_id=stored.producer_id,
            producer_epoch=stored.producer_epoch,
            topics=[
                state_type.Topic(topic=topic, partitions=numbers)
                for topic, numbers in by_topic.items()
            ],
        )

    def respond(
        all_stored: Mapping[str, StoredTransaction],
    ) -> Steps[DescribeTransactionsResponse]:
        states = []
        chunk_counter = ChunkCounter()
        for name in request.transactional_ids:
            if chunk_counter.is_over():
                yield
            states.append(describe_one(name, all_stored.get(name)))
        return response_type(transaction_states=states)

    def refuse(code: int) -> DescribeTransactionsResponse:
        return response_type(
            transaction_states=[
                state_type(error_code=code, transactional_id=name)
                for name in request.transactional_ids
            ]
        )

    return _with_stored_transactions(
        request.transactional_ids, call, state, respond, refuse
    )


def list_transactions(
    request: ListTransactionsRequest, call: Call, state: BrokerState
) -> ListTransactionsResponse | PendingResponse:
    response_type = wire.LIST_TRANSACTIONS.Response
    # A client may filter by a state of a newer Kafka, which the response lists.
    labels = {status.label for status in Status}
    matches = None
    if request.transactional_id_pattern:
        try:
            matches = compile_pattern(request.transactional_id_pattern)
        except ValueError:
            return response_type(error_code=codes.INVALID_REGULAR_EXPRESSION)
    states = set(request.state_filters)
    producer_ids = set(request.producer_id_filters)

    def is_selected(name: str, stored: StoredTransaction) -> bool:
        # An empty filter selects all, as in Kafka.
        if states and stored.status.label not in states:
            return False
        if producer_ids and stored.producer_id not in producer_ids:
            return False
        if request.duration_filter >= 0:
            # A transaction that has ended has no duration.
            is_open = stored.status is Status.ONGOING or stored.status.label.startswith(
                "Prepare"
            )
            if not is_open or call.now_ms - stored.start_ms <= request.duration_filter:
                return False
        return matches is None or matches(name)

    def respond(
        all_stored: Mapping[str, StoredTransaction],
    ) -> Steps[ListTransactionsResponse]:
        entries = []
        chunk_counter = ChunkCounter()
        # A copy, because other requests change the transactions between two chunks.
        for name, stored in list(all_stored.items()):
            if chunk_counter.is_over():
                yield
            if is_selected(name, stored):
                entries.append(
                    response_type.TransactionState(
                        transactional_id=name,
                        producer_id=stored.producer_id,
                        transaction_state=stored.status.label,
                    )
                )
        return response_type(
            unknown_state_filters=sorted(states - labels), transaction_states=entries
        )

    return _with_stored_transactions(
        None, call, state, respond, lambda code: response_type(error_code=code)
    )


def describe_producers(
    request: DescribeProducersRequest, call: Call, state: BrokerState
) -> DescribeProducersResponse | PendingResponse:
    requested = [
        (topic.name, number)
        for topic in request.topics
        for number in topic.partition_indexes
    ]
    return state.logs.when_open(
        requested,
        lambda: state.in_background(lambda: _describe_producers(request, state)),
    )


def _describe_producers(
    request: DescribeProducersRequest, state: BrokerState
) -> DescribeProducersResponse:
    """Read the known producers, which may read files. Runs outside the broker's thread."""
    topic_type = wire.DESCRIBE_PRODUCERS.Response.Topic
    partition_type = topic_type.Partition
    topics = []
    for topic in request.topics:
        results = []
        for number in topic.partition_indexes:
            result = partition_type(partition_index=number)
            results.append(result)
            try:
                # A partition that another broker leads has an error.
                producers = producers_of(state.logs.log(topic.name, number).host.writer)
            except LogcoreError as error:
                result.error_code = code_of(error)
                result.error_message = message_of(error)
                continue
            result.active_producers = [
                partition_type.ActiveProducer(
                    producer_id=producer.producer_id,
                    producer_epoch=producer.epoch,
                    last_sequence=producer.last_sequence,
                    last_timestamp=producer.timestamp_ms,
                    coordinator_epoch=producer.coordinator_epoch,
                    current_txn_start_offset=producer.open_offset,
                )
                for producer in producers
            ]
        topics.append(topic_type(name=topic.name, partitions=results))
    return wire.DESCRIBE_PRODUCERS.Response(topics=topics)
