"""Simulated processes that consume, transform and produce in transactions, and the
invariants of every schedule.

Each process reads records of topic "in" as a member of group "g", and sends the results
to topic "out" in one transaction with the offsets of the records. A ledger, which is not
lost if a process is killed, records which transactions were acknowledged and aborted.

Invariants, by name:
- once: at the end, readers of committed records see the result of each input once, and
  no other result.
- whole: readers see all results of a transaction, or none.
- kept: readers see the results of an acknowledged transaction.
- dropped: readers do not see the results of an aborted transaction.
- ended: no transaction is open after the transaction timeouts.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any, Final

import logcore
from logcore.consumer.topic_partition import TopicPartition
from logcore.errors import (
    CommitFailedError,
    DeliveryTimeoutError,
    LogLockedError,
    ProducerFencedError,
    RebalanceInProgressError,
    RegistryLockedError,
    ResourceError,
    TransactionAbortedError,
)
from logcore.fs import SharedFS
from logcore.logdir import LogDir
from logcore.producer.transaction_manager import TransactionState
from logcore.producer.transactional_producer import TransactionalProducer
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine, SimulatedProcess

PATH: Final = "data"
OUT_PARTITIONS: Final = 2
CONSUMING: Final[dict[str, Any]] = {
    "group_id": "g",
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
    "isolation_level": "read_committed",
    "max_poll_interval_ms": 3_000,
}
#: After these errors, the transaction is aborted, or its outcome is determined when the
#: next producer initializes with the transactional id.
_ENDING_ERRORS: Final = (
    CommitFailedError,
    DeliveryTimeoutError,
    LogLockedError,
    RebalanceInProgressError,
    RegistryLockedError,
    ResourceError,
    TransactionAbortedError,
)


class PipelineSimulation:
    """The processes and the ledger; see the description of the module.

    With `shared`, several processes have the directory open at the same time.
    Otherwise, they open it one after the other.
    """

    def __init__(
        self,
        seed: int,
        *,
        chances: Chances,
        processes: int = 2,
        ids: int = 2,
        records: int = 8,
        shared: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk({"data": None}, seed=seed)
        self.machine = Machine(self.disk, seed=seed, chances=chances)
        self.machine.on_locks_released = self._replace_killed
        self.shared = shared
        self.ids = ids
        self.records = records
        self.transaction_count = 0
        #: The results of each transaction.
        self.sent: dict[bytes, Counter[bytes]] = {}
        self.acked: set[bytes] = set()
        self.aborted: set[bytes] = set()
        with logcore.open_dir(PATH, create=True, fs=self.disk) as data:
            data.create_topic("in", 2)
            data.create_topic("out", OUT_PARTITIONS)
            for number in range(records):
                data.append("in", b"%d" % number, partition=number % 2)
        self.started = 0
        self.members: set[SimulatedProcess] = set()
        for _ in range(processes - 1):
            self._start_process()
        self.machine.protected = self.machine.start(self._finish)

    def run(self) -> None:
        self.machine.run()

    def _start_process(self) -> None:
        self.started += 1
        number = self.started
        self.members.add(self.machine.start(lambda fs: self._run_process(fs, number)))

    def _replace_killed(self, process: SimulatedProcess) -> None:
        if (
            process in self.members
            and self.started < 6
            and not self.machine.is_powered_off
        ):
            self._start_process()

    # -- actions of processes ----------------------------------------------------------

    def _run_process(self, fs: SharedFS, number: int) -> None:
        with (
            logcore.open_dir(PATH, shared=True, fs=fs) as data,
            data.consumer(**CONSUMING) as consumer,
        ):
            consumer.subscribe(["in"])
            with self._producer(data, number % self.ids) as producer:
                for _ in range(self.rng.randrange(2, 6)):
                    if not self._transact_once(data, consumer, producer):
                        return

    def _finish(self, fs: SharedFS) -> None:
        """Continue until all inputs are processed, and no transaction is open."""
        with (
            logcore.open_dir(PATH, shared=self.shared, fs=fs) as data,
            data.consumer(**CONSUMING) as consumer,
        ):
            consumer.subscribe(["in"])
            last_step = self.machine.steps + 60_000
            has_input = True
            while has_input:
                with self._producer(data, self.ids) as producer:
                    while has_input and self._transact_once(data, consumer, producer):
                        has_input = not self._is_done(data)
                        assert self.machine.steps < last_step, (
                            f"once: not done, {consumer.assignment()}"
                        )

    def _is_done(self, data: LogDir) -> bool:
        seen: Counter[bytes] = Counter()
        for number in range(OUT_PARTITIONS):
            log = data.partition("out", number)
            if self.shared:
                log.refresh()
            if log.last_stable_offset != log.high_watermark:
                return False
            seen.update(_values(log))
        return sum(seen.values()) >= self.records

    def _producer(self, data: LogDir, number: int) -> TransactionalProducer:
        return data.producer(
            transactional_id=f"id-{number}",
            threaded=False,
            transaction_timeout_ms=2_000,
            linger_ms=0,
            max_block_ms=5,
        )

    def _transact_once(
        self, data: LogDir, consumer: logcore.Consumer, producer: TransactionalProducer
    ) -> bool:
        """Make one transaction, if there is input. Return False if another producer uses
        the same transactional id.
        """
        transacting = producer._transaction_manager
        with contextlib.suppress(LogLockedError, ResourceError):
            data.tick()
        try:
            if transacting.state in (
                TransactionState.UNINITIALIZED,
                TransactionState.INITIALIZING,
            ):
                producer.init_transactions()
            if transacting.state is not TransactionState.READY:
                producer.abort_transaction()
            found = consumer.poll(0.1, 3)
            if not found:
                return True
        except ProducerFencedError:
            return False
        except _ENDING_ERRORS:
            return True
        return self._process(consumer, producer, found)

    def _process(
        self, consumer: logcore.Consumer, producer: TransactionalProducer, found: Any
    ) -> bool:
        self.transaction_count += 1
        name = b"%d" % self.transaction_count
        expected = self.sent[name] = Counter()
        try:
            producer.begin_transaction()
            for record in found.records():
                value = name + b":" + record.value
                expected[value] += 1
                producer.send(
                    "out", value, partition=self.rng.randrange(OUT_PARTITIONS)
                )
                if self.rng.random() < 0.3:
                    producer.flush(0)
            offsets = {
                entry: records[-1].offset + 1 for entry, records in found.items()
            }
            producer.send_offsets_to_transaction(
                dict(offsets), consumer.group_metadata()
            )
            if self.rng.random() < 0.2:
                producer.abort_transaction()
                self.aborted.add(name)
                self._seek_to_committed(consumer)
                return True
            producer.commit_transaction()
            self.acked.add(name)
        except ProducerFencedError:
            self._seek_to_committed(consumer)
            return False
        except _ENDING_ERRORS:
            self._give_up(name, producer)
            self._seek_to_committed(consumer)
        return True

    def _give_up(self, name: bytes, producer: TransactionalProducer) -> None:
        with contextlib.suppress(ProducerFencedError, *_ENDING_ERRORS):
            if producer._transaction_manager.state is TransactionState.COMMITTING:
                producer.commit_transaction()
                self.acked.add(name)
                return
            producer.abort_transaction()
            self.aborted.add(name)

    def _seek_to_committed(self, consumer: logcore.Consumer) -> None:
        """Seek to the committed offsets of the group. After an abort, the positions are
        ahead of them.
        """
        with contextlib.suppress(*_ENDING_ERRORS):
            stored = consumer.committed(consumer.assignment())
            for entry, found in stored.items():
                consumer.seek(entry, 0 if found is None else found.offset)

    # -- invariants --------------------------------------------------------------------

    def check_disk(self, disk: SimulatedDisk, *, after_power: bool) -> None:
        with logcore.open_dir(PATH, fs=disk) as data:
            for _ in range(4):
                data.tick()
                disk.advance(3_000)
            data.tick()
            seen: Counter[bytes] = Counter()
            for number in range(OUT_PARTITIONS):
                log = data.partition("out", number)
                assert log.last_stable_offset == log.high_watermark, (
                    f"ended: out-{number}"
                )
                seen.update(_values(log))
            self._check_transactions(seen)
            inputs = Counter(value.partition(b":")[2] for value in seen)
            self._check_offsets(data, inputs)
            if not after_power and not self.machine.is_powered_off:
                assert inputs == Counter(
                    b"%d" % number for number in range(self.records)
                ), f"once: {inputs}"

    def _check_transactions(self, seen: Counter[bytes]) -> None:
        assert all(count == 1 for count in seen.values()), f"once: {seen}"
        by_name: dict[bytes, Counter[bytes]] = {}
        for value in seen:
            by_name.setdefault(value.partition(b":")[0], Counter())[value] += 1
        for name, results in by_name.items():
            assert results == self.sent[name], (
                f"whole: {name!r}: {results} of {self.sent[name]}"
            )
            assert name not in self.aborted, f"dropped: {name!r}"
        for name in self.acked:
            assert name in by_name, f"kept: {name!r}"

    def _check_offsets(self, data: LogDir, inputs: Counter[bytes]) -> None:
        """Check that the group has committed the inputs with results, and no others."""
        assert all(count == 1 for count in inputs.values()), f"once: {inputs}"
        with data.consumer(**CONSUMING) as consumer:
            for number in range(2):
                topic_partition = TopicPartition("in", number)
                found = consumer.committed([topic_partition])[topic_partition]
                offset = 0 if found is None else found.offset
                results = sum(1 for value in inputs if int(value) % 2 == number)
                assert offset == results, (
                    f"whole: {topic_partition}: {offset} committed, {results} results"
                )


def _values(log: logcore.Log) -> list[bytes]:
    return [
        bytes(record.value or b"")
        for record in log.read(log.log_start_offset, isolation="read_committed")
    ]
