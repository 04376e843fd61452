"""Tests of logcore.coordination.transactions alone: tables of the effect of each
request in each state, and random histories.

Goal: every answer of the reference's tables, and no transaction that is split, hanging
or lost after any crash. Method: support/transaction_simulation.py. The same search must also
detect coordinators with a deliberate mistake.
"""

from __future__ import annotations

from typing import Any

import pytest

from logcore.coordination import transactions
from logcore.coordination.transaction_effects import (
    AbortOrphan,
    AddPartitions,
    AllocateProducerId,
    CancelTransactionTimer,
    Effect,
    End,
    Initialize,
    ProducerIdAndEpoch,
    SetTransactionTimer,
    StoreTransaction,
    TimedOut,
    TransactionError,
    TransactionReply,
    WriteMarkers,
)
from logcore.coordination.transactions import (
    EXPIRATION_MS,
    RETRY_MS,
    TransactionMachine,
)
from logcore.format.transaction_records import Status, StoredTransaction
from support.transaction_simulation import (
    TIMEOUT_MS,
    InvariantViolated,
    TransactionSimulation,
    with_mistakes,
)

T0 = 1_700_000_000_000
P = frozenset({("t", 0)})
E = TransactionError


class TransactionHarness:
    """A coordinator whose writes finish at once, unless they are held. Producer ids
    count from 100.
    """

    def __init__(
        self,
        found: dict[str, StoredTransaction] | None = None,
        *,
        fails_markers: bool = False,
    ) -> None:
        self.coordinator = TransactionMachine()
        self.now_ms = T0
        self.next_id = 100
        self.holds = False
        self.held: list[StoreTransaction] = []
        self.fails_markers = fails_markers
        self.records: list[StoredTransaction | None] = []
        self.markers: list[WriteMarkers] = []
        self.timers: dict[str, int] = {}
        self.replies: dict[Any, Any] = {}
        self.waiters = 0
        self.act(self.coordinator.load(found or {}, self.now_ms))

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case TransactionReply(waiter, result):
                    assert waiter not in self.replies, "answered twice"
                    self.replies[waiter] = result
                case StoreTransaction():
                    self.records.append(effect.stored)
                    if self.holds:
                        self.held.append(effect)
                    else:
                        self.act(self.coordinator.stored(effect, self.now_ms))
                case WriteMarkers():
                    self.markers.append(effect)
                    left = effect.partitions if self.fails_markers else frozenset()
                    self.act(
                        self.coordinator.markers_written(effect, left, self.now_ms)
                    )
                case AllocateProducerId():
                    self.next_id += 1
                    self.act(
                        self.coordinator.producer_id_allocated(
                            effect, self.next_id, self.now_ms
                        )
                    )
                case SetTransactionTimer(name, at_ms):
                    self.timers[name] = at_ms
                case CancelTransactionTimer(name):
                    self.timers.pop(name, None)
                case TimedOut():
                    pass

    def ask(self, request: Any) -> Any:
        """Send a request. Return its result, or "waits" if it has none yet."""
        self.waiters += 1
        self.act(self.coordinator.handle(request, self.waiters, self.now_ms))
        return self.replies.get(self.waiters, "waits")

    def release(self) -> None:
        self.holds = False
        while self.held:
            self.act(self.coordinator.stored(self.held.pop(0), self.now_ms))

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        for name, at_ms in list(self.timers.items()):
            if at_ms <= self.now_ms:
                del self.timers[name]
                self.act(self.coordinator.timed_out(name, self.now_ms))

    @property
    def status(self) -> Status:
        stored = self.coordinator.get("x")
        assert stored is not None
        return stored.status

    def init(self, producer_id: int = -1, epoch: int = -1, **more: Any) -> Any:
        fields = {"transactional_id": "x", "timeout_ms": TIMEOUT_MS, **more}
        return self.ask(
            Initialize(producer_id=producer_id, producer_epoch=epoch, **fields)
        )

    def add(
        self, id_and_epoch: ProducerIdAndEpoch, partitions: Any = P, version: int = 0
    ) -> Any:
        return self.ask(
            AddPartitions(
                transactional_id="x",
                producer_id=id_and_epoch.producer_id,
                producer_epoch=id_and_epoch.producer_epoch,
                partitions=frozenset(partitions),
                client_version=version,
            )
        )

    def end(
        self, id_and_epoch: ProducerIdAndEpoch, commit: bool = True, version: int = 0
    ) -> Any:
        return self.ask(
            End(
                transactional_id="x",
                producer_id=id_and_epoch.producer_id,
                producer_epoch=id_and_epoch.producer_epoch,
                commit=commit,
                client_version=version,
            )
        )


def stored(status: Status, epoch: int = 5, **more: Any) -> dict[str, StoredTransaction]:
    fields: dict[str, Any] = {
        "producer_id": 7,
        "producer_epoch": epoch,
        "timeout_ms": TIMEOUT_MS,
        "start_ms": T0,
    }
    if status in (Status.ONGOING, Status.PREPARE_ABORT, Status.PREPARE_COMMIT):
        fields["partitions"] = P
    return {"x": StoredTransaction(status=status, update_ms=T0, **{**fields, **more})}


def test_transaction_from_beginning_to_end() -> None:
    harness = TransactionHarness()
    id_and_epoch = harness.init()
    assert id_and_epoch == ProducerIdAndEpoch(101, 0)
    assert harness.add(id_and_epoch) is None
    assert harness.coordinator.verify("x", 101, 0, ("t", 0)) is None
    assert harness.coordinator.verify("x", 101, 0, ("t", 1)) is E.TRANSACTION_ABORTABLE
    assert harness.end(id_and_epoch) == id_and_epoch
    assert [
        (each.commit, each.producer_epoch, each.partitions) for each in harness.markers
    ] == [(True, 0, P)]
    names = [each and each.status.label for each in harness.records]
    assert names == ["Empty", "Ongoing", "PrepareCommit", "CompleteCommit"]
    assert harness.records[2] is not None and harness.records[2].partitions == P
    assert harness.end(id_and_epoch) == id_and_epoch, "a repeated request"
    assert len(harness.records) == 4
    assert not harness.timers


def test_second_protocol_raises_the_epoch_with_each_end() -> None:
    harness = TransactionHarness()
    id_and_epoch = harness.init()
    harness.add(id_and_epoch, version=2)
    after = harness.end(id_and_epoch, version=2)
    assert after == ProducerIdAndEpoch(101, 1)
    assert harness.markers[-1].producer_epoch == 1
    assert harness.end(id_and_epoch, version=2) == after, "a retry"
    assert harness.end(after, commit=False, version=2) == ProducerIdAndEpoch(101, 2), (
        "an abort of an empty transaction"
    )
    assert len(harness.markers) == 1


def test_exhausted_epochs_lead_to_a_new_producer_id() -> None:
    harness = TransactionHarness(stored(Status.ONGOING, 32_766))
    id_and_epoch = ProducerIdAndEpoch(7, 32_766)
    after = harness.end(id_and_epoch, version=2)
    assert after == ProducerIdAndEpoch(101, 0)
    assert harness.markers[-1].producer_epoch == 32_767
    assert harness.records[0] is not None and harness.records[0].next_producer_id == 101
    assert (
        harness.records[1] is not None and harness.records[1].previous_producer_id == 7
    )
    assert harness.end(id_and_epoch, version=2) == after
    harness = TransactionHarness(stored(Status.COMPLETE_COMMIT, 32_766))
    assert harness.init(7, 32_766) == ProducerIdAndEpoch(101, 0)
    assert harness.init(7, 32_766) == ProducerIdAndEpoch(101, 0), "a retry"


@pytest.mark.parametrize(
    ("producer_id", "epoch", "found"),
    [
        (7, 5, ProducerIdAndEpoch(7, 6)),
        (-1, -1, ProducerIdAndEpoch(7, 6)),
        (7, 4, E.PRODUCER_FENCED),
        (8, 5, E.PRODUCER_FENCED),
    ],
)
def test_init_with_the_current_epoch_gets_a_new_epoch(
    producer_id: int, epoch: int, found: Any
) -> None:
    harness = TransactionHarness(stored(Status.COMPLETE_ABORT))
    assert harness.init(producer_id, epoch) == found
    if epoch == 5 and producer_id == 7:
        assert harness.init(7, 5) == ProducerIdAndEpoch(7, 6), (
            "a retry gets the same answer"
        )


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"producer_id": 3}, E.INVALID_REQUEST),
        ({"transactional_id": ""}, E.INVALID_REQUEST),
        ({"transactional_id": "é" * 16_384}, E.INVALID_REQUEST),
        ({"timeout_ms": 0}, E.INVALID_TRANSACTION_TIMEOUT),
        ({"timeout_ms": 900_001}, E.INVALID_TRANSACTION_TIMEOUT),
    ],
)
def test_invalid_init_is_refused(fields: dict[str, Any], found: Any) -> None:
    request = Initialize(**{"transactional_id": "x", "timeout_ms": 1_000, **fields})
    assert TransactionHarness().ask(request) is found


def test_init_of_another_producer_aborts_the_open_transaction() -> None:
    harness = TransactionHarness()
    first = harness.init()
    harness.add(first)
    assert harness.init() == ProducerIdAndEpoch(101, 2), (
        "no producer gets the epoch of the fence"
    )
    assert [(each.commit, each.producer_epoch) for each in harness.markers] == [
        (False, 1)
    ]
    assert harness.add(first) is E.PRODUCER_FENCED
    assert harness.end(first) is E.PRODUCER_FENCED


def test_replaced_producer_does_not_abort_its_successor() -> None:
    harness = TransactionHarness()
    first = harness.init()
    second = harness.init()
    harness.add(second)
    assert harness.init(first.producer_id, first.producer_epoch) is E.PRODUCER_FENCED
    assert harness.status is Status.ONGOING


C, A, O = Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT, Status.ONGOING  # noqa: E741
FIRST = [  # state, commits, error (section 3.8)
    (Status.EMPTY, True, E.INVALID_TXN_STATE),
    (Status.EMPTY, False, E.INVALID_TXN_STATE),
    (C, True, None),
    (C, False, E.INVALID_TXN_STATE),
    (A, True, E.INVALID_TXN_STATE),
    (A, False, None),
    (O, True, None),
    (O, False, None),
    (Status.PREPARE_COMMIT, True, E.CONCURRENT_TRANSACTIONS),
    (Status.PREPARE_COMMIT, False, E.INVALID_TXN_STATE),
    (Status.PREPARE_ABORT, True, E.INVALID_TXN_STATE),
    (Status.PREPARE_ABORT, False, E.CONCURRENT_TRANSACTIONS),
]


@pytest.mark.parametrize(("status", "commit", "error"), FIRST)
def test_end_of_a_transaction_in_each_state(
    status: Status, commit: bool, error: TransactionError | None
) -> None:
    harness = TransactionHarness(stored(status), fails_markers=True)
    assert harness.end(ProducerIdAndEpoch(7, 5), commit) == (
        error or ProducerIdAndEpoch(7, 5)
    )
    assert harness.end(ProducerIdAndEpoch(7, 4), commit) is E.PRODUCER_FENCED
    assert (
        harness.end(ProducerIdAndEpoch(8, 5), commit) is E.INVALID_PRODUCER_ID_MAPPING
    )


SECOND = [  # state, commits, with the present epoch, answer
    (Status.EMPTY, False, False, E.PRODUCER_FENCED),
    (Status.EMPTY, False, True, 6),
    (Status.EMPTY, True, False, E.PRODUCER_FENCED),
    (Status.EMPTY, True, True, E.INVALID_TXN_STATE),
    (O, False, False, E.PRODUCER_FENCED),
    (O, False, True, 6),
    (O, True, False, E.PRODUCER_FENCED),
    (O, True, True, 6),
    (Status.PREPARE_ABORT, False, False, E.CONCURRENT_TRANSACTIONS),
    (Status.PREPARE_ABORT, False, True, E.PRODUCER_FENCED),
    (Status.PREPARE_ABORT, True, False, E.INVALID_TXN_STATE),
    (Status.PREPARE_ABORT, True, True, E.PRODUCER_FENCED),
    (Status.PREPARE_COMMIT, False, False, E.INVALID_TXN_STATE),
    (Status.PREPARE_COMMIT, False, True, E.PRODUCER_FENCED),
    (Status.PREPARE_COMMIT, True, False, E.CONCURRENT_TRANSACTIONS),
    (Status.PREPARE_COMMIT, True, True, E.PRODUCER_FENCED),
    (A, False, False, 5),
    (A, False, True, 6),
    (A, True, False, E.INVALID_TXN_STATE),
    (A, True, True, E.INVALID_TXN_STATE),
    (C, False, False, E.INVALID_TXN_STATE),
    (C, False, True, 6),
    (C, True, False, 5),
    (C, True, True, E.INVALID_TXN_STATE),
]


@pytest.mark.parametrize(("status", "commit", "is_current", "answer"), SECOND)
def test_end_of_a_transaction_by_the_second_protocol_in_each_state(
    status: Status, commit: bool, is_current: bool, answer: Any
) -> None:
    harness = TransactionHarness(stored(status), fails_markers=True)
    expected = ProducerIdAndEpoch(7, answer) if isinstance(answer, int) else answer
    assert (
        harness.end(ProducerIdAndEpoch(7, 5 if is_current else 4), commit, version=2)
        == expected
    )


def test_requests_wait_for_a_record_being_written() -> None:
    harness = TransactionHarness()
    id_and_epoch = harness.init()
    harness.holds = True
    assert harness.add(id_and_epoch) == "waits"
    assert (
        harness.coordinator.verify("x", 101, 0, ("t", 0)) is E.TRANSACTION_ABORTABLE
    ), "only after it is on disk"
    assert harness.end(id_and_epoch) == "waits"
    assert not harness.markers
    harness.release()
    assert harness.replies[2] is None
    assert harness.replies[3] == id_and_epoch


def test_no_marker_before_the_prepare_record_is_on_disk() -> None:
    harness = TransactionHarness()
    id_and_epoch = harness.init()
    harness.add(id_and_epoch)
    harness.holds = True
    assert harness.end(id_and_epoch) == "waits"
    assert not harness.markers
    harness.act(harness.coordinator.stored(harness.held.pop(), harness.now_ms))
    assert len(harness.markers) == 1
    assert harness.replies.get(3) is None, "answered after all markers are written"
    harness.release()
    assert harness.replies[3] == id_and_epoch


def test_failed_markers_are_retried() -> None:
    harness = TransactionHarness(fails_markers=True)
    id_and_epoch = harness.init()
    harness.add(id_and_epoch)
    assert harness.end(id_and_epoch) == id_and_epoch, (
        "a prepared transaction will be completed"
    )
    assert harness.status is Status.PREPARE_COMMIT
    assert harness.add(id_and_epoch) is E.CONCURRENT_TRANSACTIONS
    assert (
        harness.coordinator.verify("x", 101, 0, ("t", 0)) is E.CONCURRENT_TRANSACTIONS
    )
    assert harness.init() is E.CONCURRENT_TRANSACTIONS
    harness.fails_markers = False
    harness.pass_time(RETRY_MS)
    assert harness.status is Status.COMPLETE_COMMIT
    assert harness.add(id_and_epoch) is None


def test_transaction_is_aborted_after_its_timeout() -> None:
    harness = TransactionHarness()
    id_and_epoch = harness.init()
    harness.add(id_and_epoch)
    harness.pass_time(TIMEOUT_MS - 1)
    harness.add(id_and_epoch, [("t", 1)])
    assert harness.status is Status.ONGOING
    harness.pass_time(1)
    assert harness.status is Status.COMPLETE_ABORT
    assert harness.markers[-1].producer_epoch == 1
    assert harness.end(id_and_epoch) is E.PRODUCER_FENCED


@pytest.mark.parametrize("ahead_ms", [0, 3_600_000])
def test_timeout_continues_after_a_restart_and_a_clock_change(
    ahead_ms: int,
) -> None:
    harness = TransactionHarness(stored(Status.ONGOING, start_ms=T0 + ahead_ms))
    harness.pass_time(TIMEOUT_MS)
    assert harness.status is Status.COMPLETE_ABORT


@pytest.mark.parametrize("status", [Status.PREPARE_COMMIT, Status.PREPARE_ABORT])
def test_prepared_transaction_is_completed_after_a_restart(status: Status) -> None:
    harness = TransactionHarness(stored(status))
    assert [(each.commit, each.partitions) for each in harness.markers] == [
        (status is Status.PREPARE_COMMIT, P)
    ]
    assert harness.status in (C, A)


Q = ("t", 9)


def adopt_open_transactions(
    found: dict[tuple[str, int], list[tuple[int, int]]],
    known: dict[str, StoredTransaction],
) -> TransactionHarness:
    harness = TransactionHarness(known)
    harness.act(harness.coordinator.adopt(found, T0))
    return harness


@pytest.mark.parametrize(
    "status",
    [Status.EMPTY, Status.ONGOING, Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT],
)
def test_open_transaction_without_a_record_is_aborted(status: Status) -> None:
    """A power cut lost the record. The abort uses a later epoch, which fences the
    producer, so that batches that it sends again are no duplicates of the aborted ones.
    """
    harness = adopt_open_transactions({Q: [(7, 5)]}, stored(status))
    ended = {Q, *P} if status is Status.ONGOING else {Q}
    assert [
        (each.commit, each.producer_epoch, each.partitions) for each in harness.markers
    ] == [(False, 6, ended)]
    assert harness.status is A
    assert harness.add(ProducerIdAndEpoch(7, 5)) is E.PRODUCER_FENCED


def test_lost_record_may_have_raised_the_epoch() -> None:
    (partition,) = P
    harness = adopt_open_transactions({partition: [(7, 8)]}, stored(Status.ONGOING))
    assert [
        (each.commit, each.producer_epoch, each.partitions) for each in harness.markers
    ] == [(False, 9, P)]


def test_transaction_that_is_open_in_the_record_remains_open() -> None:
    (partition,) = P
    harness = adopt_open_transactions({partition: [(7, 5)]}, stored(Status.ONGOING))
    assert not harness.markers
    assert harness.status is Status.ONGOING


def test_open_transaction_of_an_unknown_producer_is_aborted() -> None:
    effects = TransactionMachine().adopt({Q: [(8, 3)], ("u", 0): [(8, 2)]}, T0)
    assert effects == [AbortOrphan(8, 4, frozenset({Q, ("u", 0)}))]


def test_open_partition_outside_a_prepared_transaction_is_aborted_alone() -> None:
    coordinator = TransactionMachine()
    coordinator.load(stored(Status.PREPARE_COMMIT), T0)
    assert coordinator.adopt({Q: [(7, 5)]}, T0) == [AbortOrphan(7, 6, frozenset({Q}))]


def test_transactional_ids_expire_after_a_week() -> None:
    harness = TransactionHarness(stored(Status.COMPLETE_COMMIT))
    harness.act(harness.coordinator.expire(T0 + EXPIRATION_MS - 1))
    assert harness.coordinator.get("x") is not None
    harness.act(harness.coordinator.expire(T0 + EXPIRATION_MS))
    assert harness.coordinator.get("x") is None
    assert harness.records == [None]
    assert harness.init() == ProducerIdAndEpoch(101, 0)


def test_record_with_unknown_durability_stops_the_coordinator() -> None:
    harness = TransactionHarness()
    id_and_epoch = harness.init()
    harness.holds = True
    harness.add(id_and_epoch)
    harness.end(id_and_epoch)
    harness.act(
        harness.coordinator.stored(harness.held.pop(), harness.now_ms, failed=True)
    )
    assert harness.replies[2] is harness.replies[3] is E.COORDINATOR_NOT_AVAILABLE
    assert harness.coordinator.is_over
    assert harness.init() is E.COORDINATOR_NOT_AVAILABLE


# -- random histories -----------------------------------------------------------------


def test_random_histories() -> None:
    for seed in range(40):
        TransactionSimulation(seed).run(300)


@pytest.mark.slow
def test_many_random_histories() -> None:
    for seed in range(1_000, 6_000):
        TransactionSimulation(seed).run(400)


MISTAKES = {
    "complete_before_all_markers": (
        "        transaction.remaining_partitions = left\n        if not left:",
        "        transaction.remaining_partitions = left = frozenset()\n        if not left:",
    ),
    "no_markers_after_a_restart": (
        "                transaction.remaining_partitions = stored.partitions\n                effects += self._mark",
        "                transaction.remaining_partitions = frozenset()\n                effects += self._mark",
    ),
    "other_result_after_a_restart": (
        "                transaction.remaining_partitions = stored.partitions\n                effects += self._mark",
        "                transaction.stored = attrs.evolve(stored, status=Status.PREPARE_ABORT)\n"
        "                transaction.remaining_partitions = stored.partitions\n                effects += self._mark",
    ),
    "fence_without_a_new_epoch": (
        "min(stored.producer_epoch + 1, _TOP_EPOCH)",
        "stored.producer_epoch",
    ),
    "takeover_without_a_new_epoch": (
        "epoch = stored.producer_epoch + 1\n",
        "epoch = stored.producer_epoch\n",
    ),
    "partitions_replace_each_other": (
        "stored.partitions | request.partitions",
        "request.partitions",
    ),
    "old_epochs_are_taken": (
        "    if stored.producer_epoch != producer_epoch:",
        "    if stored.producer_epoch < producer_epoch:",
    ),
    "second_protocol_keeps_its_epoch": (
        "            epoch += 1\n",
        "            epoch += 0\n",
    ),
    "either_end_is_answered_as_done": (
        "    if stored.status is complete:",
        "    if stored.status in (Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT):",
    ),
    "failed_record_counts": ("        if failed:\n            return self.end()\n", ""),
    "no_timeouts": (
        "return [\n"
        "            TimedOut(transaction.transactional_id),\n"
        "            *self._fence(transaction, now_ms),\n"
        "        ]\n",
        "return []\n",
    ),
    "retried_markers_are_forgotten": (
        "        effects.append(\n"
        "            SetTransactionTimer(transaction.transactional_id, now_ms + RETRY_MS)\n"
        "        )\n",
        "",
    ),
}


def is_found(module: Any, **more: Any) -> bool:
    for seed in range(300):
        try:
            TransactionSimulation(seed, module, **more).run(300)
        except AssertionError:  # Broken, or an assertion of the coordinator
            return True
    return False


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.slow] * name.startswith("second_protocol_keeps")
        )
        for name in MISTAKES
    ],
)
def test_random_histories_detect_a_coordinator_with_a_mistake(name: str) -> None:
    assert is_found(with_mistakes(MISTAKES[name]))


@pytest.mark.slow  # `make check` detects similar mistakes
def test_random_histories_detect_markers_before_the_prepare_record() -> None:
    assert is_found(transactions, marks_early=True)


def test_broken_is_an_assertion_error() -> None:
    assert issubclass(InvariantViolated, AssertionError)
