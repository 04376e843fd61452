"""The leader of a partition asks the coordinator of a transaction: order and validity."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from logcore import LogcoreError
from logcore.coordination.transaction_effects import TransactionError
from netshim.cluster.transaction_shards import TransactionShards

P0, P1 = ("t", 0), ("t", 1)
PRODUCER = ("tx", 7, 3)
OTHER_BROKER = 2


class QueriedCoordinator:
    """A coordinator on another broker. The test sets its responses."""

    own_node_id = 1

    def __init__(self) -> None:
        self.queries: list[Any] = []
        self._callbacks: list[Callable[[Any], None]] = []

    def leader_of(self, partition: tuple[str, int]) -> int:
        return OTHER_BROKER

    def request(self, broker: int, query: Any, done: Callable[[Any], None]) -> None:
        assert broker == OTHER_BROKER
        self.queries.append(query)
        self._callbacks.append(done)

    def respond(self, errors: Any) -> None:
        self._callbacks.pop(0)(errors)


@pytest.fixture
def led() -> set[tuple[str, int]]:
    return {P0, P1}


@pytest.fixture
def shards(led: set[tuple[str, int]]) -> Any:
    state = SimpleNamespace(
        leadership=SimpleNamespace(is_leader=lambda key: key in led),
        logs=SimpleNamespace(numbers_of=lambda topic: range(1)),
        now_ms=0,
    )
    opened: Any = TransactionShards(
        state,  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        Any,
        lambda action: None,
    )
    opened.peers = QueriedCoordinator()
    return opened


def prepare(
    shards: Any, *partitions: tuple[str, int], id_and_epoch: Any = PRODUCER
) -> list[Any]:
    """Prepare a request, and return the list that gets its errors."""
    errors: list[Any] = []
    shards.prepare(id_and_epoch, partitions, 0, errors.append, adds=False)
    return errors


def write(
    shards: Any, partition: tuple[str, int] = P0, id_and_epoch: Any = PRODUCER
) -> Any:
    return shards.verified(id_and_epoch, partition, lambda: "written")


def test_coordinator_is_queried_once_in_a_transaction(shards: Any) -> None:
    errors = prepare(shards, P0)
    assert (errors, len(shards.peers.queries)) == ([], 1)
    shards.peers.respond({})
    assert (errors, write(shards)) == ([{}], "written")
    assert shards.is_prepared(PRODUCER, {P0}, adds=True)
    assert not shards.is_prepared(PRODUCER, {P0, P1}, adds=True)
    assert prepare(shards, P0) == [{}]
    assert len(shards.peers.queries) == 1


def test_error_of_one_partition_leaves_the_other_usable(shards: Any) -> None:
    errors = prepare(shards, P0, P1)
    shards.peers.respond({P1: TransactionError.TRANSACTION_ABORTABLE})
    assert errors == [{P1: TransactionError.TRANSACTION_ABORTABLE}]
    assert write(shards) == "written"
    assert write(shards, P1) is TransactionError.CONCURRENT_TRANSACTIONS


def test_lost_answer_is_an_error_of_all_partitions(shards: Any) -> None:
    errors = prepare(shards, P0, P1)
    shards.peers.respond(LogcoreError("no connection"))
    error = TransactionError.COORDINATOR_NOT_AVAILABLE
    assert errors == [{P0: error, P1: error}]
    assert prepare(shards, P0) == []
    assert len(shards.peers.queries) == 2


def test_marker_ends_a_verification(shards: Any) -> None:
    prepare(shards, P0)
    shards.peers.respond({})
    shards.marker_follows(7, P0)
    assert write(shards) is TransactionError.CONCURRENT_TRANSACTIONS
    assert not shards.is_prepared(PRODUCER, {P0}, adds=False)


def test_marker_during_a_query_invalidates_its_answer(shards: Any) -> None:
    """The answer was given for the transaction that the marker has ended."""
    errors = prepare(shards, P0)
    shards.marker_follows(7, P0)
    shards.peers.respond({})
    assert errors == []
    assert write(shards) is TransactionError.CONCURRENT_TRANSACTIONS
    shards.peers.respond({P0: TransactionError.TRANSACTION_ABORTABLE})
    assert errors == [{P0: TransactionError.TRANSACTION_ABORTABLE}]


def test_marker_of_another_producer_changes_nothing(shards: Any) -> None:
    errors = prepare(shards, P0)
    shards.marker_follows(8, P0)
    shards.peers.respond({})
    assert (errors, write(shards)) == ([{}], "written")


def test_new_leadership_queries_the_coordinator_again(shards: Any) -> None:
    """Another leader may have written markers between the two leaderships."""
    prepare(shards, P0)
    shards.peers.respond({})
    shards.resign(P0)
    assert write(shards) is TransactionError.CONCURRENT_TRANSACTIONS
    errors = prepare(shards, P0)
    shards.resign(P0)
    shards.peers.respond({})
    assert errors == []
    assert len(shards.peers.queries) == 3


def test_another_epoch_of_a_producer_is_queried_separately(shards: Any) -> None:
    prepare(shards, P0)
    shards.peers.respond({})
    newer = ("tx", 7, 4)
    assert write(shards, id_and_epoch=newer) is TransactionError.CONCURRENT_TRANSACTIONS
    prepare(shards, P0, id_and_epoch=newer)
    assert shards.peers.queries[1].producer == newer


def test_requests_of_a_producer_continue_in_their_order(shards: Any) -> None:
    """The second request needs no answer, but its batches must follow the first ones."""
    prepare(shards, P0)
    shards.peers.respond({})
    order: list[str] = []
    shards.prepare(PRODUCER, {P0, P1}, 0, lambda _: order.append("first"), adds=False)
    assert not shards.is_prepared(PRODUCER, {P0}, adds=False)
    shards.prepare(PRODUCER, {P0}, 0, lambda _: order.append("second"), adds=False)
    assert order == []
    shards.peers.respond({})
    assert order == ["first", "second"]
    assert shards.is_prepared(PRODUCER, {P0, P1}, adds=False)


def test_many_requests_without_coordinator_are_answered(shards: Any) -> None:
    """Immediate answers must not nest: 2,000 nested answers would exceed the stack."""
    errors = [prepare(shards, P0) for _ in range(2_000)]
    shards.peers.leader_of = lambda partition: -1
    shards.peers.respond(LogcoreError("no connection"))
    error = {P0: TransactionError.COORDINATOR_NOT_AVAILABLE}
    assert errors == [[error]] * 2_000


def test_partition_with_another_leader_is_not_stored(
    shards: Any, led: set[tuple[str, int]]
) -> None:
    """No marker and no end of a leadership would remove the entry."""
    led.discard(P1)
    assert prepare(shards, P1) == [{}]
    assert shards.peers.queries == []
    assert write(shards, P1) is TransactionError.CONCURRENT_TRANSACTIONS
