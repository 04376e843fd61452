"""What does a transaction cost, and how long does a broker with many transactional ids
take to serve them?

Method: records of 100 bytes, durability="os", the best of several turns of both sides.
- In process: a transaction of one record, and one of 100, beside as many pwrite and
  fdatasync of 200 bytes as it has syncs: four. The limit is the disk.
- The coordinator alone, as a state machine: AddPartitions and EndTxn of one id, beside
  a target of 2,000 a second.
- The time from an open directory until 100,000 ids are loaded, beside reading their
  records as columns.
- The same transaction through a broker: confluent-kafka to a netshim in a process of
  its own, beside an acknowledged record of the same producer without transactions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import common
from common import Result, Settings

import logcore
from logcore.coordination.transaction_effects import (
    AddPartitions,
    Effect,
    End,
    Initialize,
    ProducerIdAndEpoch,
    Request,
    StoreTransaction,
    TakeProducerId,
    TransactionReply,
    WriteMarkers,
)
from logcore.coordination.transactions import TransactionMachine
from logcore.format.transaction_records import (
    Status,
    StoredTransaction,
    transaction_key,
    transaction_value,
)

VALUE = b"x" * common.VALUE_SIZE
IDS = 100_000
#: Syncs of a transaction: partitions, records, decision and markers.
SYNCS = 4


def run(settings: Settings) -> Iterator[Result]:
    with common.scratch(settings, "transactions") as path:
        yield from in_process(
            str(path / "data"),
            100 if settings.quick else 500,
            3 if settings.quick else 5,
        )
        yield coordinator_alone(2_000 if settings.quick else 20_000)
        yield loading(str(path / "many"), IDS // 10 if settings.quick else IDS)
        if common.peer("confluent_kafka", "confluent-kafka") is not None:
            yield through_a_broker(str(path / "served"), 50 if settings.quick else 300)


def in_process(path: str, count: int, repeats: int) -> Iterator[Result]:
    with (
        logcore.open_dir(path, create=True, durability="os") as data,
        data.producer(transactional_id="x", linger_ms=0, threaded=False) as producer,
    ):
        data.create_topic("t")
        producer.init_transactions()
        handle = os.open(f"{path}/bare", os.O_CREAT | os.O_WRONLY)

        def transact(records: int) -> None:
            producer.begin_transaction()
            producer.send_many("t", [(None, VALUE)] * records, partition=0)
            producer.commit_transaction()

        def bare() -> None:
            for _ in range(SYNCS):
                os.write(handle, VALUE * 2)
                os.fdatasync(handle)

        calls: dict[str, Callable[[], None]] = {
            "1 record": lambda: transact(1),
            "100 records": lambda: transact(100),
            "bare": bare,
        }
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                started = time.perf_counter()
                for _ in range(count):
                    call()
                spent[name].append(time.perf_counter() - started)
        os.close(handle)
    best = {name: min(times) for name, times in spent.items()}
    for name in ("1 record", "100 records"):
        yield Result(
            question=f"transaction of {name}, in process",
            unit="us",
            ours=best[name] / count * 1e6,
            peer_name=f"{SYNCS} writes and fdatasync",
            peer=best["bare"] / count * 1e6,
            ratio=best[name] / best["bare"],
            turns=common.ratios(spent[name], spent["bare"]),
            method="Wall time; the ratio is the cost, so that less is better.",
        )


def coordinator_alone(count: int) -> Result:
    machine = TransactionMachine()
    found = answered(machine, Initialize(transactional_id="x", timeout_ms=60_000))
    started = time.perf_counter()
    for _ in range(count):
        assert isinstance(found, ProducerIdAndEpoch)
        who = (found.producer_id, found.producer_epoch)
        added = AddPartitions(
            transactional_id="x",
            producer_id=who[0],
            producer_epoch=who[1],
            partitions=frozenset({("t", 0)}),
            client_version=2,
        )
        answered(machine, added)
        ended = End(
            transactional_id="x",
            producer_id=who[0],
            producer_epoch=who[1],
            commit=True,
            client_version=2,
        )
        found = answered(machine, ended)
    seconds = time.perf_counter() - started
    return Result(
        question="the coordinator alone",
        unit="transactions/s",
        ours=count / seconds,
        peer_name="target",
        peer=2_000,
        ratio=count / seconds / 2_000,
        target=1.0,
        method="AddPartitions and EndTxn, with every effect carried out at once and nothing stored.",
    )


def answered(machine: TransactionMachine, request: Request) -> object:
    """Return the result of a request whose effects are all carried out at once."""
    result: object = None
    effects: list[Effect] = machine.handle(request, "waiter", 0)
    while effects:
        effect = effects.pop(0)
        match effect:
            case TransactionReply(_, result):
                pass
            case StoreTransaction():
                effects = [*machine.stored(effect, 0), *effects]
            case WriteMarkers():
                effects = [*machine.markers_written(effect, frozenset(), 0), *effects]
            case TakeProducerId():
                effects = [*machine.producer_id_allocated(effect, 1, 0), *effects]
    return result


def loading(path: str, ids: int) -> Result:
    value = transaction_value(
        StoredTransaction(
            producer_id=1,
            producer_epoch=3,
            timeout_ms=60_000,
            status=Status.COMPLETE_COMMIT,
        )
    )
    with logcore.open_dir(path, create=True, durability="os") as data:
        data.create_topic("__transaction_state", 1, {"cleanup.policy": "compact"})
        log = data.partition("__transaction_state", 0)
        log.append_many(
            [(transaction_key(f"id-{number}"), value) for number in range(ids)]
        )
        started = time.perf_counter()
        TransactionMachine().load(data.transactions(), 0)
        ours = time.perf_counter() - started
        started = time.perf_counter()
        for columns in log.scan(0):
            dict(zip(columns.keys(), columns.values(), strict=True))
        peer = time.perf_counter() - started
    method = f"Wall time; reading keys and values alone took {peer * 1e3:.0f} ms."
    return common.in_time(
        f"{ids:,} transactional ids are known",
        "ms",
        ours * 1e3,
        2_000 * ids / IDS,
        method,
    )


def through_a_broker(path: str, count: int) -> Result:
    import confluent_kafka

    command = [
        sys.executable,
        "-m",
        "netshim",
        "serve",
        path,
        "--port",
        "0",
        "--durability",
        "os",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as broker:
        try:
            assert broker.stdout is not None
            servers = broker.stdout.readline().split()[-1]
            common_settings = {
                "bootstrap.servers": servers,
                "linger.ms": 0,
                "log_level": 0,
            }
            transactional = confluent_kafka.Producer(
                {**common_settings, "transactional.id": "x"}
            )
            transactional.init_transactions(30)
            plain = confluent_kafka.Producer(
                {**common_settings, "enable.idempotence": True}
            )

            def transact() -> None:
                transactional.begin_transaction()
                transactional.produce("t", VALUE)
                transactional.commit_transaction(30)

            def send() -> None:
                plain.produce("t", VALUE)
                plain.flush(30)

            best = {}
            for name, call in (("ours", transact), ("peer", send)):
                call()
                times = []
                for _ in range(count):
                    started = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - started)
                best[name] = sorted(times)[count // 2]
        finally:
            broker.terminate()
    return Result(
        question="transaction of 1 record through a broker, p50",
        unit="us",
        ours=best["ours"] * 1e6,
        peer_name="an acknowledged record",
        peer=best["peer"] * 1e6,
        ratio=best["ours"] / best["peer"],
        method="Wall time at the client; the ratio is the cost, so that less is better.",
    )
