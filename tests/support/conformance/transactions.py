"""Scripts of requests about transactions and their producers."""

from __future__ import annotations

from typing import Any

from netshim import wire
from netshim.wire import codes
from support.conformance import RecordingClient, Script
from support.conformance.data import batch
from support.conformance.groups import create_stable_group, wait_for_coordinator

_TIMEOUT_MS = 60_000


def start_producer(client: RecordingClient, suffix: str = "") -> dict[str, Any]:
    """Return the ids of a transactional producer without an open transaction."""
    transactional_id = f"{client.name}{suffix}"
    client.ask_unrecorded(
        wire.FIND_COORDINATOR, 4, coordinator_keys=[transactional_id], key_type=1
    )

    def ask() -> tuple[int, Any]:
        fields = {
            "transactional_id": transactional_id,
            "transaction_timeout_ms": _TIMEOUT_MS,
            "producer_id": -1,
        }
        response = client.ask_unrecorded(
            wire.INIT_PRODUCER_ID, 3, **fields, producer_epoch=-1
        )
        code = (
            codes.COORDINATOR_NOT_AVAILABLE
            if response.error_code == codes.CONCURRENT_TRANSACTIONS
            else response.error_code
        )
        return code, response

    response = client.until_ready(ask)
    assert response.error_code == 0, response
    return {
        "transactional_id": transactional_id,
        "producer_id": response.producer_id,
        "producer_epoch": response.producer_epoch,
    }


def _add_partition(client: RecordingClient, ids: dict[str, Any], topic: str) -> None:
    """Add a partition to the transaction."""

    def ask() -> tuple[int, Any]:
        fields = {f"v3_and_below_{key}": value for key, value in ids.items()}
        topics = [{"name": topic, "partitions": [0]}]
        response = client.ask_unrecorded(
            wire.ADD_PARTITIONS_TO_TXN, 3, **fields, v3_and_below_topics=topics
        )
        code = _partition_code(response)
        return (
            codes.COORDINATOR_NOT_AVAILABLE
            if code == codes.CONCURRENT_TRANSACTIONS
            else code
        ), code

    assert client.until_ready(ask) == 0


def _partition_code(response: Any) -> int:
    code: int = (
        response.results_by_topic_v3_and_below[0]
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


def init_producer_id(client: RecordingClient) -> None:
    ids = start_producer(client, "-first")
    client.ask(
        "without a transactional id",
        transactional_id=None,
        transaction_timeout_ms=_TIMEOUT_MS,
    )
    client.ask(
        "an empty transactional id",
        transactional_id="",
        transaction_timeout_ms=_TIMEOUT_MS,
    )
    for step, timeout_ms in (
        ("no timeout", 0),
        ("a timeout below zero", -1),
        ("a long timeout", 2_000_000_000),
    ):
        client.ask(
            step, transactional_id=client.name, transaction_timeout_ms=timeout_ms
        )
    client.ask(
        "a new transactional id",
        transactional_id=client.name,
        transaction_timeout_ms=_TIMEOUT_MS,
    )
    client.ask(
        "the same again",
        transactional_id=client.name,
        transaction_timeout_ms=_TIMEOUT_MS,
    )
    if client.version >= 3:
        same = {**ids, "transaction_timeout_ms": _TIMEOUT_MS}
        client.ask("with its epoch", **same)
        client.ask("with its previous epoch", **same)
        client.ask("with a future epoch", **{**same, "producer_epoch": 9})
        client.ask(
            "with another id", **{**same, "producer_id": ids["producer_id"] + 1_000}
        )
        client.ask("an id without an epoch", **{**same, "producer_epoch": -1})
        client.ask("an epoch without an id", **{**same, "producer_id": -1})


def add_partitions(client: RecordingClient) -> None:
    name = client.create_topic()
    ids = start_producer(client)

    def ask(
        step: str,
        topic: str = name,
        partitions: tuple[int, ...] = (0,),
        verifies: bool = False,
        **more: Any,
    ) -> None:
        producer_fields = {**ids, **more}
        topics = [{"name": topic, "partitions": [*partitions]}]
        if client.version >= 4:
            transaction = {**producer_fields, "verify_only": verifies, "topics": topics}
            client.ask(step, transactions=[transaction])
        else:
            fields = {
                f"v3_and_below_{key}": value for key, value in producer_fields.items()
            }
            client.ask(step, **fields, v3_and_below_topics=topics)

    if client.version >= 4:
        ask("verified before it is added", verifies=True)
    ask("a partition")
    ask("the same again")
    if client.version >= 4:
        ask("verified", verifies=True)
        ask("one of two verified", partitions=(0, 1), verifies=True)
        ask("a future epoch verified", verifies=True, producer_epoch=99)
    ask("both", partitions=(0, 1))
    ask("no such topic", f"{name}-none")
    ask("no such partition", partitions=(0, 7))
    ask("an older epoch", producer_epoch=ids["producer_epoch"] - 1)
    ask("a future epoch", producer_epoch=ids["producer_epoch"] + 5)
    ask("another producer", producer_id=ids["producer_id"] + 1_000)
    ask("an unknown transactional id", transactional_id=f"{client.name}-none")
    ask("an empty transactional id", transactional_id="")


def add_offsets(client: RecordingClient) -> None:
    ids = start_producer(client)
    group_id = f"{client.name}-group"
    wait_for_coordinator(client, group_id)
    client.ask("a group", **ids, group_id=group_id)
    client.ask("the same again", **ids, group_id=group_id)
    client.ask("an empty group id", **ids, group_id="")
    client.ask(
        "a future epoch",
        **{**ids, "producer_epoch": ids["producer_epoch"] + 5},
        group_id=group_id,
    )
    client.ask(
        "another producer",
        **{**ids, "producer_id": ids["producer_id"] + 1_000},
        group_id=group_id,
    )
    client.ask(
        "an unknown transactional id",
        **{**ids, "transactional_id": f"{client.name}-none"},
        group_id=group_id,
    )


def end_txn(client: RecordingClient) -> None:
    name = client.create_topic()
    ids = start_producer(client)
    client.ask("nothing to commit", **ids, committed=True)
    client.ask("nothing to abort", **ids, committed=False)
    for committed in (True, False):
        kind = "commit" if committed else "abort"
        ids = start_producer(client, f"-{kind}")
        _add_partition(client, ids, name)
        part = {"index": 0, "records": _records(ids)}
        done = client.ask_unrecorded(
            wire.PRODUCE, 9,
            transactional_id=ids["transactional_id"], acks=-1, timeout_ms=30_000,
            topic_data=[{"name": name, "partition_data": [part]}],
        )  # fmt: skip
        assert done.responses[0].partition_responses[0].error_code == 0, done
        client.ask(
            f"{kind}: a future epoch",
            **{**ids, "producer_epoch": 9},
            committed=committed,
        )
        client.ask(
            f"{kind}: another producer",
            **{**ids, "producer_id": ids["producer_id"] + 999},
            committed=committed,
        )
        client.ask(kind, **ids, committed=committed)
        _wait_for_markers(client, ids)
        client.ask(f"{kind} again", **ids, committed=committed)
        client.ask(f"{kind}, then the opposite", **ids, committed=not committed)
    client.ask(
        "an unknown transactional id",
        **{**ids, "transactional_id": f"{client.name}-none"},
        committed=True,
    )
    client.ask(
        "an empty transactional id", **{**ids, "transactional_id": ""}, committed=True
    )


def _wait_for_markers(client: RecordingClient, ids: dict[str, Any]) -> None:
    """Wait until the markers are written."""

    def ask() -> tuple[int, Any]:
        response = client.ask_unrecorded(
            wire.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[ids["transactional_id"]]
        )
        is_over = not response.transaction_states[0].transaction_state.startswith(
            "Prepare"
        )
        return (0 if is_over else codes.COORDINATOR_NOT_AVAILABLE), None

    client.until_ready(ask)


def txn_offset_commit(client: RecordingClient) -> None:
    name = client.create_topic()
    ids = start_producer(client)
    group_id, member_id = create_stable_group(client, "-group")
    client.ask_unrecorded(wire.ADD_OFFSETS_TO_TXN, 3, **ids, group_id=group_id)

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
        if client.version >= 3:
            fields = {"generation_id": -1, "member_id": "", **fields}
        client.ask(step, topics=[{"name": topic, "partitions": [part]}], **fields)

    ask("an offset")
    ask("a long text", text="x" * 5_000)
    ask("no such topic", f"{name}-none")
    ask("no such partition", partition=7)
    ask("a future epoch", producer_epoch=ids["producer_epoch"] + 5)
    ask("another producer", producer_id=ids["producer_id"] + 1_000)
    ask("an empty group id", group_id="")
    if client.version >= 3:
        ask("a member", generation_id=1, member_id=member_id)
        ask("another generation", generation_id=7, member_id=member_id)
        ask("an unknown member", generation_id=1, member_id="nobody")


def describe_producers(client: RecordingClient) -> None:
    name = client.create_topic()
    ids = start_producer(client)
    _add_partition(client, ids, name)
    part = {"index": 0, "records": _records(ids)}
    topics = [{"name": name, "partition_data": [part]}]
    client.ask_unrecorded(
        wire.PRODUCE,
        9,
        transactional_id=ids["transactional_id"],
        acks=-1,
        timeout_ms=30_000,
        topic_data=topics,
    )
    client.ask("an open transaction", topics=[{"name": name, "partition_indexes": [0]}])
    client.ask("no producer", topics=[{"name": name, "partition_indexes": [1]}])
    client.ask("no such partition", topics=[{"name": name, "partition_indexes": [7]}])
    client.ask(
        "no such topic", topics=[{"name": f"{name}-none", "partition_indexes": [0]}]
    )


def describe_transactions(client: RecordingClient) -> None:
    name = client.create_topic()
    ids = start_producer(client)
    mine = [ids["transactional_id"]]
    client.ask("nothing open", transactional_ids=mine)
    _add_partition(client, ids, name)
    client.ask("an open transaction", transactional_ids=mine)
    client.ask("an unknown transactional id", transactional_ids=[f"{client.name}-none"])
    client.ask("an empty transactional id", transactional_ids=[""])
    client.ask("none", transactional_ids=[])


def list_transactions(client: RecordingClient) -> None:
    name = client.create_topic()
    ids = start_producer(client)
    _add_partition(client, ids, name)
    filters: list[tuple[str, dict[str, Any]]] = [
        ("an open transaction", {"state_filters": ["Ongoing"]}),
        ("of a producer", {"producer_id_filters": [ids["producer_id"]]}),
        ("of a producer without transactions", {"producer_id_filters": [123_456_789]}),
        ("an unknown state", {"state_filters": ["Sleeping"]}),
    ]
    if client.version >= 1:
        filters.append(("old transactions", {"duration_filter": 600_000}))
    if client.version >= 2:
        filters += [
            (f"by {pattern}", {"transactional_id_pattern": pattern})
            for pattern in ("List.*-2", "(")
        ]
    for step, fields in filters:
        response = client.ask(step, **fields)
        _, recorded = client.recorded.pop()
        if response is not None:
            states = recorded["transaction_states"]
            recorded["transaction_states"] = [
                each for each in states if each["transactional_id"] == client.name
            ]
        client.recorded.append((step, recorded))


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
