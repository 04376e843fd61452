"""Requests about transactions and their producers."""

from __future__ import annotations

from typing import Any

from netshim import wire
from netshim.wire import codes
from support.conformance import Asker, Script
from support.conformance.data import batch
from support.conformance.groups import coordinator, stable

_TIMEOUT_MS = 60_000


def begun(asker: Asker, suffix: str = "") -> dict[str, Any]:
    """Return the ids of a transactional producer without an open transaction."""
    transactional_id = f"{asker.name}{suffix}"
    asker.other(
        wire.FIND_COORDINATOR, 4, coordinator_keys=[transactional_id], key_type=1
    )

    def ask() -> tuple[int, Any]:
        fields = {
            "transactional_id": transactional_id,
            "transaction_timeout_ms": _TIMEOUT_MS,
            "producer_id": -1,
        }
        answer = asker.other(wire.INIT_PRODUCER_ID, 3, **fields, producer_epoch=-1)
        code = (
            codes.COORDINATOR_NOT_AVAILABLE
            if answer.error_code == codes.CONCURRENT_TRANSACTIONS
            else answer.error_code
        )
        return code, answer

    answer = asker.until_ready(ask)
    assert answer.error_code == 0, answer
    return {
        "transactional_id": transactional_id,
        "producer_id": answer.producer_id,
        "producer_epoch": answer.producer_epoch,
    }


def _added(asker: Asker, ids: dict[str, Any], topic: str) -> None:
    """Add a partition to the transaction."""

    def ask() -> tuple[int, Any]:
        fields = {f"v3_and_below_{key}": value for key, value in ids.items()}
        topics = [{"name": topic, "partitions": [0]}]
        answer = asker.other(
            wire.ADD_PARTITIONS_TO_TXN, 3, **fields, v3_and_below_topics=topics
        )
        code = _added_code(answer)
        return (
            codes.COORDINATOR_NOT_AVAILABLE
            if code == codes.CONCURRENT_TRANSACTIONS
            else code
        ), code

    assert asker.until_ready(ask) == 0


def _added_code(answer: Any) -> int:
    code: int = (
        answer.results_by_topic_v3_and_below[0]
        .results_by_partition[0]
        .partition_error_code
    )
    return code


def _records(ids: dict[str, Any], sequence: int = 0) -> bytes:
    return batch(
        b"t",
        transactional=True,
        base_sequence=sequence,
        producer_id=ids["producer_id"],
        producer_epoch=ids["producer_epoch"],
    )


def init_producer_id(asker: Asker) -> None:
    ids = begun(asker, "-first")
    asker.ask(
        "without a transactional id",
        transactional_id=None,
        transaction_timeout_ms=_TIMEOUT_MS,
    )
    asker.ask(
        "an empty transactional id",
        transactional_id="",
        transaction_timeout_ms=_TIMEOUT_MS,
    )
    for step, timeout_ms in (
        ("no timeout", 0),
        ("a timeout below zero", -1),
        ("a long timeout", 2_000_000_000),
    ):
        asker.ask(step, transactional_id=asker.name, transaction_timeout_ms=timeout_ms)
    asker.ask(
        "a new one", transactional_id=asker.name, transaction_timeout_ms=_TIMEOUT_MS
    )
    asker.ask(
        "the same again",
        transactional_id=asker.name,
        transaction_timeout_ms=_TIMEOUT_MS,
    )
    if asker.version >= 3:
        same = {**ids, "transaction_timeout_ms": _TIMEOUT_MS}
        asker.ask("with its epoch", **same)
        asker.ask("with its former epoch", **same)
        asker.ask("with an epoch to come", **{**same, "producer_epoch": 9})
        asker.ask(
            "with another id", **{**same, "producer_id": ids["producer_id"] + 1_000}
        )
        asker.ask("an id without an epoch", **{**same, "producer_epoch": -1})
        asker.ask("an epoch without an id", **{**same, "producer_id": -1})


def add_partitions(asker: Asker) -> None:
    name = asker.topic()
    ids = begun(asker)

    def ask(
        step: str,
        topic: str = name,
        partitions: tuple[int, ...] = (0,),
        verifies: bool = False,
        **more: Any,
    ) -> None:
        producer_fields = {**ids, **more}
        topics = [{"name": topic, "partitions": [*partitions]}]
        if asker.version >= 4:
            transaction = {**producer_fields, "verify_only": verifies, "topics": topics}
            asker.ask(step, transactions=[transaction])
        else:
            fields = {
                f"v3_and_below_{key}": value for key, value in producer_fields.items()
            }
            asker.ask(step, **fields, v3_and_below_topics=topics)

    if asker.version >= 4:
        ask("verified before it is added", verifies=True)
    ask("a partition")
    ask("the same again")
    if asker.version >= 4:
        ask("verified", verifies=True)
        ask("one of two verified", partitions=(0, 1), verifies=True)
        ask("an epoch to come verified", verifies=True, producer_epoch=99)
    ask("both", partitions=(0, 1))
    ask("no such topic", f"{name}-none")
    ask("no such partition", partitions=(0, 7))
    ask("an older epoch", producer_epoch=ids["producer_epoch"] - 1)
    ask("an epoch to come", producer_epoch=ids["producer_epoch"] + 5)
    ask("another producer", producer_id=ids["producer_id"] + 1_000)
    ask("an unknown transactional id", transactional_id=f"{asker.name}-none")
    ask("an empty transactional id", transactional_id="")


def add_offsets(asker: Asker) -> None:
    ids = begun(asker)
    group_id = f"{asker.name}-group"
    coordinator(asker, group_id)
    asker.ask("a group", **ids, group_id=group_id)
    asker.ask("the same again", **ids, group_id=group_id)
    asker.ask("an empty group id", **ids, group_id="")
    asker.ask(
        "an epoch to come",
        **{**ids, "producer_epoch": ids["producer_epoch"] + 5},
        group_id=group_id,
    )
    asker.ask(
        "another producer",
        **{**ids, "producer_id": ids["producer_id"] + 1_000},
        group_id=group_id,
    )
    asker.ask(
        "an unknown transactional id",
        **{**ids, "transactional_id": f"{asker.name}-none"},
        group_id=group_id,
    )


def end_txn(asker: Asker) -> None:
    name = asker.topic()
    ids = begun(asker)
    asker.ask("nothing to commit", **ids, committed=True)
    asker.ask("nothing to abort", **ids, committed=False)
    for committed in (True, False):
        kind = "commit" if committed else "abort"
        ids = begun(asker, f"-{kind}")
        _added(asker, ids, name)
        part = {"index": 0, "records": _records(ids)}
        done = asker.other(
            wire.PRODUCE, 9,
            transactional_id=ids["transactional_id"], acks=-1, timeout_ms=30_000,
            topic_data=[{"name": name, "partition_data": [part]}],
        )  # fmt: skip
        assert done.responses[0].partition_responses[0].error_code == 0, done
        asker.ask(
            f"{kind}: an epoch to come",
            **{**ids, "producer_epoch": 9},
            committed=committed,
        )
        asker.ask(
            f"{kind}: another producer",
            **{**ids, "producer_id": ids["producer_id"] + 999},
            committed=committed,
        )
        asker.ask(kind, **ids, committed=committed)
        _ended(asker, ids)
        asker.ask(f"{kind} again", **ids, committed=committed)
        asker.ask(f"{kind}, then the other", **ids, committed=not committed)
    asker.ask(
        "an unknown transactional id",
        **{**ids, "transactional_id": f"{asker.name}-none"},
        committed=True,
    )
    asker.ask(
        "an empty transactional id", **{**ids, "transactional_id": ""}, committed=True
    )


def _ended(asker: Asker, ids: dict[str, Any]) -> None:
    """Wait until the markers are written."""

    def ask() -> tuple[int, Any]:
        answer = asker.other(
            wire.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[ids["transactional_id"]]
        )
        is_over = not answer.transaction_states[0].transaction_state.startswith(
            "Prepare"
        )
        return (0 if is_over else codes.COORDINATOR_NOT_AVAILABLE), None

    asker.until_ready(ask)


def txn_offset_commit(asker: Asker) -> None:
    name = asker.topic()
    ids = begun(asker)
    group_id, member_id = stable(asker, "-group")
    asker.other(wire.ADD_OFFSETS_TO_TXN, 3, **ids, group_id=group_id)

    def ask(
        step: str,
        topic: str = name,
        partition: int = 0,
        text: str | None = "m",
        **more: Any,
    ) -> None:
        part = {
            "partition_index": partition,
            "committed_offset": 5,
            "committed_metadata": text,
        }
        fields = {**ids, "group_id": group_id, **more}
        if asker.version >= 3:
            fields = {"generation_id": -1, "member_id": "", **fields}
        asker.ask(step, topics=[{"name": topic, "partitions": [part]}], **fields)

    ask("an offset")
    ask("a long text", text="x" * 5_000)
    ask("no such topic", f"{name}-none")
    ask("no such partition", partition=7)
    ask("an epoch to come", producer_epoch=ids["producer_epoch"] + 5)
    ask("another producer", producer_id=ids["producer_id"] + 1_000)
    ask("an empty group id", group_id="")
    if asker.version >= 3:
        ask("a member", generation_id=1, member_id=member_id)
        ask("another generation", generation_id=7, member_id=member_id)
        ask("an unknown member", generation_id=1, member_id="nobody")


def describe_producers(asker: Asker) -> None:
    name = asker.topic()
    ids = begun(asker)
    _added(asker, ids, name)
    part = {"index": 0, "records": _records(ids)}
    topics = [{"name": name, "partition_data": [part]}]
    asker.other(
        wire.PRODUCE,
        9,
        transactional_id=ids["transactional_id"],
        acks=-1,
        timeout_ms=30_000,
        topic_data=topics,
    )
    asker.ask(
        "a transaction that is open", topics=[{"name": name, "partition_indexes": [0]}]
    )
    asker.ask("no producer", topics=[{"name": name, "partition_indexes": [1]}])
    asker.ask("no such partition", topics=[{"name": name, "partition_indexes": [7]}])
    asker.ask(
        "no such topic", topics=[{"name": f"{name}-none", "partition_indexes": [0]}]
    )


def describe_transactions(asker: Asker) -> None:
    name = asker.topic()
    ids = begun(asker)
    mine = [ids["transactional_id"]]
    asker.ask("nothing open", transactional_ids=mine)
    _added(asker, ids, name)
    asker.ask("one that is open", transactional_ids=mine)
    asker.ask("an unknown transactional id", transactional_ids=[f"{asker.name}-none"])
    asker.ask("an empty transactional id", transactional_ids=[""])
    asker.ask("none", transactional_ids=[])


def list_transactions(asker: Asker) -> None:
    name = asker.topic()
    ids = begun(asker)
    _added(asker, ids, name)
    filters: list[tuple[str, dict[str, Any]]] = [
        ("one that is open", {"state_filters": ["Ongoing"]}),
        ("of a producer", {"producer_id_filters": [ids["producer_id"]]}),
        ("of a producer without transactions", {"producer_id_filters": [123_456_789]}),
        ("a state that is not there", {"state_filters": ["Sleeping"]}),
    ]
    if asker.version >= 1:
        filters.append(("those that are old", {"duration_filter": 600_000}))
    if asker.version >= 2:
        filters += [
            (f"by {pattern}", {"transactional_id_pattern": pattern})
            for pattern in ("List.*-2", "(")
        ]
    for step, fields in filters:
        answer = asker.ask(step, **fields)
        _, recorded = asker.recorded.pop()
        if answer is not None:
            states = recorded["transaction_states"]
            recorded["transaction_states"] = [
                each for each in states if each["transactional_id"] == asker.name
            ]
        asker.recorded.append((step, recorded))


SCRIPTS: dict[Any, list[Script]] = {
    wire.INIT_PRODUCER_ID: [init_producer_id],
    wire.ADD_PARTITIONS_TO_TXN: [add_partitions],
    wire.ADD_OFFSETS_TO_TXN: [add_offsets],
    wire.END_TXN: [end_txn],
    wire.TXN_OFFSET_COMMIT: [txn_offset_commit],
    wire.DESCRIBE_PRODUCERS: [describe_producers],
    wire.DESCRIBE_TRANSACTIONS: [describe_transactions],
    wire.LIST_TRANSACTIONS: [list_transactions],
}
