"""Seeded mistakes of a transaction coordinator, T1 to T12. Each is found, and without a
mistake nothing is found.

The simulations: random runs of the coordinator alone
(support/transaction_simulation.py), a broker without sockets with a power cut at every
change, a producer that loses responses, commits of group offsets, and a clock that
jumps. A plain model checks the producer and the offsets. docs/crashes.md has the table.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest

import logcore
from logcore.coordination import offsets as group_offsets
from logcore.coordination import transactions
from logcore.coordination.classic_group import Group
from logcore.coordinators.transactions import TransactionCoordinator
from logcore.format.transaction_records import Status
from logcore.recordbatch import encode
from logcore.testing import SimulatedDisk, explore
from netshim import wire
from netshim.handlers import produce
from netshim.wire import codes
from support.simulated_disk_broker import SimulatedDiskBroker
from support.transaction_simulation import TransactionSimulation, with_mistakes

#: Runs of the coordinator. A mistake is found in one of the first few.
RUNS = 300


def find_in_runs(module: Any, **more: Any) -> str:
    """Return the first violated invariant. The test fails if there is none."""
    for seed in range(RUNS):
        try:
            TransactionSimulation(seed, module, **more).run(300)
        except AssertionError as error:  # an invariant of the simulation, or an assertion of the coordinator
            return str(error)
    pytest.fail(f"not found in {RUNS} runs")


@pytest.mark.slow  # `make check` finds similar mistakes
def test_T1_marker_is_written_before_its_decision_is_durable() -> None:
    find_in_runs(transactions, marks_early=True)


def test_T2_transaction_is_complete_before_its_markers_are_durable() -> None:
    find_in_runs(
        with_mistakes(
            (
                "        transaction.remaining_partitions = left\n        if not left:",
                "        transaction.remaining_partitions = left = frozenset()\n        if not left:",
            )
        )
    )


def test_T3_records_are_accepted_before_their_partition_is_durable() -> None:
    find_in_runs(
        with_mistakes(
            (
                "        return self._store(\n"
                "            transaction, ongoing, waiter=waiter, last_epoch=transaction.last_epoch\n"
                "        )\n",
                "        transaction.stored = ongoing\n"
                "        effects = self._store(transaction, ongoing, last_epoch=transaction.last_epoch)\n"
                "        return [*_reply(waiter, None), *effects]\n",
            )
        )
    )


def test_T4_end_is_acknowledged_before_its_decision_is_durable() -> None:
    violation = find_in_runs(
        with_mistakes(
            (
                "        transaction.ending = (waiter, identity)\n        return self._store(transaction, prepared,",
                "        return [*_reply(waiter, identity)] + self._store(transaction, prepared,",
            )
        )
    )
    assert "response" in violation


def test_T7_epoch_counts_although_its_record_was_not_written() -> None:
    """KAFKA-9666: each failure raised the epoch in memory, until there was none left."""
    violation = find_in_runs(
        with_mistakes(
            (
                "        if failed:\n            return self.end()\n",
                "        if failed:\n"
                "            transaction.storing = None\n"
                "            if transaction.stored is not None and effect.stored is not None:\n"
                "                epoch = effect.stored.producer_epoch\n"
                "                transaction.stored = attrs.evolve(transaction.stored, producer_epoch=epoch)\n"
                "            return self._resume_waiting(transaction, now_ms)\n",
            )
        )
    )
    assert "the state of" in violation


def test_T8_loaded_coordinator_skips_markers_that_were_sent_before() -> None:
    """Markers that an earlier coordinator had sent counted as written for the next
    coordinator.
    """
    violation = find_in_runs(
        with_mistakes(
            (
                "_TOP_EPOCH: Final = 32_767\n",
                "_TOP_EPOCH: Final = 32_767\n_LEFT: dict = {}\n",
            ),
            (
                "            commit = stored.status is Status.PREPARE_COMMIT\n            return [",
                "            commit = stored.status is Status.PREPARE_COMMIT\n"
                "            _LEFT[transaction.transactional_id, stored.update_ms] = frozenset()\n            return [",
            ),
            (
                "                transaction.remaining_partitions = stored.partitions\n"
                "                effects += self._mark",
                "                transaction.remaining_partitions = _LEFT.get(\n"
                "                    (name, stored.update_ms), stored.partitions\n"
                "                )\n"
                "                effects += self._mark",
            ),
        )
    )
    assert "open transaction" in violation or "is committed in" in violation


@pytest.mark.slow  # `make check` finds similar mistakes
def test_T12_repeated_end_raises_the_epoch_again() -> None:
    violation = find_in_runs(
        with_mistakes(
            (
                "    if is_current:\n        if request.commit:",
                "    if is_retry and request.commit == (stored.status is Status.COMPLETE_COMMIT):\n"
                "        return True\n    if is_current:\n        if request.commit:",
            )
        )
    )
    assert "and was" in violation


def test_nothing_is_found_without_a_mistake() -> None:
    for seed in range(20):
        TransactionSimulation(seed).run(300)


# -- T5: transactions that a power cut leaves open -------------------------------------


class Interrupted:
    """A producer whose broker loses power under "os" during its first transaction. The
    producer continues.
    """

    def __init__(self) -> None:
        self.id_and_epoch = (-1, -1)

    def run(self, disk: SimulatedDisk, promise: Callable[[Any], None]) -> None:
        broker_harness = SimulatedDiskBroker(disk, disk.now_ms(), "os")
        broker_harness.logdir.create_topic("t", 2)
        initialized = broker_harness.ask(
            wire.INIT_PRODUCER_ID,
            4,
            transactional_id="x",
            transaction_timeout_ms=60_000,
        )
        self.id_and_epoch = (initialized.producer_id, initialized.producer_epoch)
        assert self.write(broker_harness) == {0}
        promise("written")
        broker_harness.stop()

    def write(self, broker_harness: SimulatedDiskBroker) -> set[int]:
        """Add both partitions and send the batch. Return the error codes of the
        responses.
        """
        topic_type = wire.ADD_PARTITIONS_TO_TXN.Request.Topic
        added = broker_harness.ask(
            wire.ADD_PARTITIONS_TO_TXN,
            3,
            v3_and_below_transactional_id="x",
            v3_and_below_producer_id=self.id_and_epoch[0],
            v3_and_below_producer_epoch=self.id_and_epoch[1],
            v3_and_below_topics=[topic_type(name="t", partitions=[0, 1])],
        )
        error_codes = {
            part.partition_error_code
            for topic in added.results_by_topic_v3_and_below
            for part in topic.results_by_partition
        }
        batch = encode(
            [(None, b"v", (), broker_harness.now_ms)],
            transactional=True,
            producer_id=self.id_and_epoch[0],
            producer_epoch=self.id_and_epoch[1],
            base_sequence=0,
        )
        request = wire.PRODUCE.Request
        parts = [
            request.Topic.Partition(index=number, records=batch) for number in (0, 1)
        ]
        topics = [request.Topic(name="t", partition_data=parts)]
        produced = broker_harness.ask(
            wire.PRODUCE,
            9,
            transactional_id="x",
            acks=-1,
            timeout_ms=1_000,
            topic_data=topics,
        )
        return error_codes | {
            part.error_code for part in produced.responses[0].partition_responses
        }

    def continue_after(self, disk: SimulatedDisk) -> tuple[bool, list[int]]:
        """Return whether the broker reported a commit to the producer, and the number
        of visible records of each partition.
        """
        broker_harness = SimulatedDiskBroker(disk, disk.now_ms())
        if "t" not in broker_harness.logdir:
            broker_harness.stop()
            return False, []
        is_committed = self.write(broker_harness) == {0}
        if is_committed:
            end = broker_harness.ask(
                wire.END_TXN,
                3,
                transactional_id="x",
                producer_id=self.id_and_epoch[0],
                producer_epoch=self.id_and_epoch[1],
                committed=True,
            )
            is_committed = end.error_code == 0
        visible_counts = [
            len(
                list(
                    broker_harness.logdir.partition("t", number).read(
                        0, isolation="read_committed"
                    )
                )
            )
            for number in (0, 1)
        ]
        broker_harness.stop()
        return is_committed, visible_counts


def explore_orphans(limit: int) -> list[list[int]]:
    """Return the visible records of each partition for each run in which the broker
    reports a commit, and records of the transaction are missing.
    """
    producer = Interrupted()
    broken: list[list[int]] = []

    def check(_promised: list[Any], outcome: tuple[bool, list[int]]) -> None:
        is_committed, visible_counts = outcome
        if is_committed and visible_counts != [1, 1]:
            # An error here would count as an error of the broker's disk.
            broken.append(visible_counts)

    assert (
        explore(
            producer.run, producer.continue_after, check, limit=limit, again_every=0
        ).states
        > 50
    )
    return broken


@pytest.mark.slow  # `make check` finds similar mistakes
def test_T5_orphan_is_aborted_with_the_epoch_of_its_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With this mistake, the batch that the producer repeats is a duplicate of an
    aborted batch, and the committed transaction does not contain it.
    """
    assert explore_orphans(4) == []
    module = with_mistakes(
        (
            "epoch = min(epochs[producer_id] + 1, _TOP_EPOCH)",
            "epoch = epochs[producer_id]",
        )
    )
    fence = transactions.TransactionMachine._fence

    def fence_with_the_same_epoch(
        self: Any, transaction: Any, now_ms: int, *orphans: Any
    ) -> Any:
        effects = fence(self, transaction, now_ms, *orphans)
        if not orphans:
            return effects
        (store,) = effects
        same = attrs.evolve(
            store.stored, producer_epoch=transaction.stored.producer_epoch
        )
        return self._store(transaction, same)

    monkeypatch.setattr(
        transactions.TransactionMachine, "adopt", module.TransactionMachine.adopt
    )
    monkeypatch.setattr(
        transactions.TransactionMachine, "_fence", fence_with_the_same_epoch
    )
    assert explore_orphans(4)


# -- T6: repeated batches --------------------------------------------------------------


class Sender:
    """A transactional producer that loses responses, and repeats its requests, also
    after the broker was killed.

    A model contains the visible records of committed transactions in each partition.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = SimulatedDisk(seed=seed)
        self.broker_harness = SimulatedDiskBroker(self.disk, self.disk.now_ms())
        self.broker_harness.logdir.create_topic("t", 2)
        initialized = self.broker_harness.ask(
            wire.INIT_PRODUCER_ID,
            4,
            transactional_id="x",
            transaction_timeout_ms=600_000,
        )
        assert initialized.error_code == 0, initialized
        self.id_and_epoch = (initialized.producer_id, initialized.producer_epoch)
        self.sequences = [0, 0]
        self.pending: list[tuple[int, bytes]] = []
        self.visible: list[list[bytes]] = [[], []]

    def run(self, events: int) -> None:
        try:
            for _ in range(events):
                self.chance.choices([self.send, self.end], [3, 1])[0]()
        except AssertionError:
            self.disk.crash()  # open objects are dropped without a warning
            raise
        self.broker_harness.stop()

    def send(self) -> None:
        number = self.chance.randrange(2)
        sequence = self.sequences[number]
        value = b"%d of %d" % (sequence, number)
        self.add(number)
        while True:
            code = self.produce(number, sequence, value)
            assert code == 0, (
                f"batch {sequence} of partition {number} gets the code {code}"
            )
            if self.chance.random() < 0.6:
                break
            # The response was lost, and the broker may have been killed.
            if self.chance.random() < 0.3:
                self.disk.kill()
                self.broker_harness.start()
        self.sequences[number] += 1
        self.pending.append((number, value))

    def add(self, number: int) -> None:
        topic_type = wire.ADD_PARTITIONS_TO_TXN.Request.Topic
        added = self.broker_harness.ask(
            wire.ADD_PARTITIONS_TO_TXN,
            3,
            v3_and_below_transactional_id="x",
            v3_and_below_producer_id=self.id_and_epoch[0],
            v3_and_below_producer_epoch=self.id_and_epoch[1],
            v3_and_below_topics=[topic_type(name="t", partitions=[number])],
        )
        (topic,) = added.results_by_topic_v3_and_below
        assert topic.results_by_partition[0].partition_error_code == 0, added

    def produce(self, number: int, sequence: int, value: bytes) -> int:
        batch = encode(
            [(None, value, (), self.broker_harness.now_ms)],
            transactional=True,
            producer_id=self.id_and_epoch[0],
            producer_epoch=self.id_and_epoch[1],
            base_sequence=sequence,
        )
        request = wire.PRODUCE.Request
        topics = [
            request.Topic(
                name="t",
                partition_data=[request.Topic.Partition(index=number, records=batch)],
            )
        ]
        told = self.broker_harness.ask(
            wire.PRODUCE,
            9,
            transactional_id="x",
            acks=-1,
            timeout_ms=1_000,
            topic_data=topics,
        )
        return int(told.responses[0].partition_responses[0].error_code)

    def end(self) -> None:
        if not self.pending:
            return
        commit = self.chance.random() < 0.7
        told = self.broker_harness.ask(
            wire.END_TXN,
            3,
            transactional_id="x",
            producer_id=self.id_and_epoch[0],
            producer_epoch=self.id_and_epoch[1],
            committed=commit,
        )
        assert told.error_code == 0, told
        for number, value in self.pending if commit else ():
            self.visible[number].append(value)
        self.pending.clear()
        for number in (0, 1):
            records = self.broker_harness.logdir.partition("t", number).read(
                0, isolation="read_committed"
            )
            assert [record.value for record in records] == self.visible[number], (
                "each record of a commit is visible once"
            )


def test_repeated_batches_get_the_same_response_and_count_once() -> None:
    for seed in range(5):
        Sender(seed).run(60)


def test_T6_repeated_batch_is_checked_as_a_new_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its open transaction, a repeated batch gets the same response again. After the
    end of the transaction, the coordinator is queried first, as in Kafka.
    """
    append = produce._append

    def append_once(log: Any, records: Any) -> Any:
        batch_ends = log.log_end_offset
        receipt = append(log, records)
        if log.log_end_offset == batch_ends:  # the log contained the batch already
            return logcore.OutOfOrderSequenceError("a batch came twice")
        return receipt

    monkeypatch.setattr(produce, "_append", append_once)
    with pytest.raises(
        AssertionError, match=f"gets the code {codes.OUT_OF_ORDER_SEQUENCE_NUMBER}"
    ):
        for seed in range(10):
            Sender(seed).run(60)


# -- T9 and T10: offsets of groups -----------------------------------------------------


class Offsets:
    """Commits of one partition's offset, plain and in transactions, in random order,
    with restarts and power cuts.

    In the model, the record that was written last counts among the committed ones.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = SimulatedDisk(seed=seed)
        self.broker_harness = SimulatedDiskBroker(self.disk, self.disk.now_ms())
        self.broker_harness.logdir.create_topic("in")
        self.written = 0
        #: The order of the record that counts, and its offset.
        self.counting = (0, -1)
        self.pending: dict[str, tuple[int, int]] = {}
        self.id_and_epoch = {name: self.begin(name) for name in ("x", "y")}

    def begin(self, name: str) -> tuple[int, int]:
        initialized = self.broker_harness.ask(
            wire.INIT_PRODUCER_ID,
            4,
            transactional_id=name,
            transaction_timeout_ms=600_000,
        )
        assert initialized.error_code == 0, initialized
        return initialized.producer_id, initialized.producer_epoch

    def run(self, events: int) -> None:
        steps = [
            self.commit,
            self.commit_in_transaction,
            self.commit_in_transaction,
            self.end,
            self.restart,
        ]
        try:
            for _ in range(events):
                self.chance.choice(steps)()
                self.check()
        except AssertionError:
            self.disk.crash()  # open objects are dropped without a warning
            raise
        self.broker_harness.stop()

    def commit(self) -> None:
        self.written += 1
        topic_type = wire.OFFSET_COMMIT.Request.Topic
        part = topic_type.Partition(
            partition_index=0, committed_offset=self.written, committed_metadata=""
        )
        response = self.broker_harness.ask(
            wire.OFFSET_COMMIT,
            7,
            group_id="g",
            generation_id_or_member_epoch=-1,
            topics=[topic_type(name="in", partitions=[part])],
        )
        assert response.topics[0].partitions[0].error_code == 0, response
        self.counting = (self.written, self.written)

    def commit_in_transaction(self, name: str = "") -> None:
        name = name or self.chance.choice("xy")
        self.written += 1
        topic_type = wire.TXN_OFFSET_COMMIT.Request.Topic
        part = topic_type.Partition(
            partition_index=0, committed_offset=self.written, committed_metadata=""
        )
        response = self.broker_harness.ask(
            wire.TXN_OFFSET_COMMIT,
            5,
            group_id="g",
            generation_id=-1,
            transactional_id=name,
            producer_id=self.id_and_epoch[name][0],
            producer_epoch=self.id_and_epoch[name][1],
            topics=[topic_type(name="in", partitions=[part])],
        )
        assert response.topics[0].partitions[0].error_code == 0, response
        self.pending[name] = (self.written, self.written)

    def end(self) -> None:
        if self.pending:
            self.end_one(
                self.chance.choice(sorted(self.pending)),
                commit=self.chance.random() < 0.6,
            )

    def end_one(self, name: str, *, commit: bool = True) -> None:
        producer_id, epoch = self.id_and_epoch[name]
        end = self.broker_harness.ask(
            wire.END_TXN,
            5,
            transactional_id=name,
            producer_id=producer_id,
            producer_epoch=epoch,
            committed=commit,
        )
        assert end.error_code == 0, end
        self.id_and_epoch[name] = (end.producer_id, end.producer_epoch)
        pending_commit = self.pending.pop(name)
        if commit:
            self.counting = max(self.counting, pending_commit)

    def restart(self) -> None:
        kind = self.chance.randrange(3)
        if kind == 0:
            self.broker_harness.restart()
            return
        if kind == 1:
            self.disk.kill()
        else:
            left = list(self.disk.after_crash(limit=8, kind="power"))
            self.disk.crash()
            self.disk = self.broker_harness.disk = self.chance.choice(left)
        self.broker_harness.start()

    def check(self) -> None:
        group = wire.OFFSET_FETCH.Request.Group
        groups = [
            group(group_id="g", topics=[group.Topic(name="in", partition_indexes=[0])])
        ]
        for is_strict in (False, True):
            response = self.broker_harness.ask(
                wire.OFFSET_FETCH, 8, require_stable=is_strict, groups=groups
            )
            (fetched,) = response.groups[0].topics[0].partitions
            if fetched.error_code:
                assert is_strict, fetched
                assert fetched.error_code == codes.UNSTABLE_OFFSET_COMMIT
                assert self.pending, "nothing is open"
            else:
                assert fetched.committed_offset == self.counting[1], (
                    f"{fetched.committed_offset} counts, not {self.counting}"
                )


@pytest.mark.long
def test_latest_offset_record_is_the_committed_offset() -> None:
    for seed in range(6):
        Offsets(seed).run(60)


def test_later_of_two_transactional_commits_counts_after_a_restart() -> None:
    """After a restart, the transaction that ended last counted, although its record was
    older.
    """
    simulation = Offsets(0)
    simulation.commit_in_transaction("x")
    simulation.commit_in_transaction("y")
    simulation.broker_harness.restart()
    simulation.end_one("y")
    simulation.end_one("x")
    simulation.check()
    simulation.broker_harness.stop()


def find_in_offsets() -> None:
    with pytest.raises(AssertionError, match="counts, not"):
        for seed in range(50):
            Offsets(seed).run(60)


def test_T9_offsets_are_visible_before_their_transaction_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pending = group_offsets.pending

    def visible(group: Group, done: Any, error: Any) -> Any:
        for key, each in done.offsets.items():
            group.apply_record(key, each, done.order)
        return pending(group, done, error)

    monkeypatch.setattr(group_offsets, "pending", visible)
    find_in_offsets()


def test_T10_older_commit_of_a_transaction_replaces_a_newer_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apply_record(
        self: Group, key: tuple[str, int], committed: Any, _order: int
    ) -> None:
        self.offsets.setdefault(key[0], {})[key[1]] = committed

    monkeypatch.setattr(Group, "apply_record", apply_record)
    find_in_offsets()


# -- T11: clocks -----------------------------------------------------------------------


def run_with_clock_jumps(seed: int) -> None:
    """Let the wall clock jump while a transaction is open. It ends after its timeout,
    not before.
    """
    chance = random.Random(seed)
    disk = SimulatedDisk({"data": None}, seed=seed)
    with logcore.open_dir("data", create=True, fs=disk) as data:
        data.create_topic("t")
        with data.producer(
            transactional_id="x", transaction_timeout_ms=60_000, threaded=False
        ) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            producer.send("t", b"v")
            producer.flush()
            open_ms = 0
            while open_ms < 60_000:
                data.tick()
                assert state_of(data) is Status.ONGOING, f"ended after {open_ms} ms"
                if chance.random() < 0.5:
                    disk.set_wall_clock(
                        disk.now_ms() + chance.choice((-1, 1)) * 3_600_000
                    )
                passed_ms = chance.randrange(1_000, 20_000)
                disk.advance(passed_ms)
                open_ms += passed_ms
            for _ in range(3):
                data.tick()
                disk.advance(2_000)
            assert state_of(data) is Status.COMPLETE_ABORT, (
                f"still open after {open_ms} ms"
            )


def state_of(data: logcore.LogDir) -> Status:
    return data.transactions()["x"].status


def test_T11_transaction_timeout_uses_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(4):
        run_with_clock_jumps(seed)
    monkeypatch.setattr(
        TransactionCoordinator, "now_ms", lambda self: self._fs.now_ms()
    )
    with pytest.raises(AssertionError, match=r"ended after|still open"):
        for seed in range(10):
            run_with_clock_jumps(seed)
