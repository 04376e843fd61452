"""A user attacks the open transaction of another user by its producer id.

The attacker may write to the topic, commit offsets of the group, and use a
transactional id of its own. Producer ids are no secret: each batch contains one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from logcore.recordbatch import Marker, encode, transaction_marker
from netshim import wire
from netshim.security.acls import (
    Acl,
    AclIndex,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.session import ANONYMOUS
from netshim.wire import codes
from support.broker_harness import BrokerHarness

VICTIM = "hers"
OWN = "mine"
GROUP = "g"


class Attack:
    """The requests of one user, with the producer id of another user."""

    def __init__(self, path: Path) -> None:
        self.broker_harness = BrokerHarness(path)
        self.broker_harness.logdir.create_topic("t", 2)
        self.victim = self.begin(VICTIM)
        assert self.add(VICTIM, self.victim) == 0
        assert self.produce(VICTIM) == 0
        self.allow()
        self.own = self.begin(OWN)

    def allow(self) -> None:
        rules = (
            (ResourceType.TOPIC, "t", AclOperation.WRITE),
            (ResourceType.TOPIC, "t", AclOperation.READ),
            (ResourceType.GROUP, GROUP, AclOperation.READ),
            (ResourceType.TRANSACTIONAL_ID, OWN, AclOperation.WRITE),
        )
        self.broker_harness.broker.state.security.acls = AclIndex(
            Acl(kind, Pattern.LITERAL, name, ANONYMOUS, "*", action, Permission.ALLOW)
            for kind, name, action in rules
        )

    def ask(self, api: Any, version: int, **fields: Any) -> Any:
        return self.broker_harness.ask(api, version, api.Request(**fields))

    def producer(self) -> dict[str, int]:
        producer_id, epoch = self.victim
        return {"producer_id": producer_id, "producer_epoch": epoch}

    def begin(self, name: str, **more: Any) -> tuple[int, int]:
        response = self.ask(
            wire.INIT_PRODUCER_ID,
            4,
            transactional_id=name,
            transaction_timeout_ms=60_000,
            **more,
        )
        assert response.error_code == 0
        return response.producer_id, response.producer_epoch

    def take_over(self, name: str) -> int:
        response = self.ask(
            wire.INIT_PRODUCER_ID,
            4,
            transactional_id=name,
            transaction_timeout_ms=60_000,
            **self.producer(),
        )
        return int(response.error_code)

    def add(self, name: str, id_and_epoch: tuple[int, int]) -> int:
        response = self.ask(
            wire.ADD_PARTITIONS_TO_TXN,
            3,
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=id_and_epoch[0],
            v3_and_below_producer_epoch=id_and_epoch[1],
            v3_and_below_topics=[
                wire.ADD_PARTITIONS_TO_TXN.Request.Topic(name="t", partitions=[0])
            ],
        )
        topic = response.results_by_topic_v3_and_below[0]
        return int(topic.results_by_partition[0].partition_error_code)

    def send(self, name: str | None, records: bytes, version: int) -> int:
        topic_type = wire.PRODUCE.Request.Topic
        part = topic_type.Partition(index=0, records=records)
        response = self.ask(
            wire.PRODUCE,
            version,
            transactional_id=name,
            acks=-1,
            timeout_ms=1_000,
            topic_data=[topic_type(name="t", partition_data=[part])],
        )
        return int(response.responses[0].partition_responses[0].error_code)

    def produce(self, name: str | None, *, sequence: int = 0, version: int = 9) -> int:
        batch = encode(
            [(None, b"v", (), self.broker_harness.now_ms)],
            transactional=True,
            base_sequence=sequence,
            **self.producer(),
        )
        return self.send(name, batch, version)

    def mark(self, name: str | None) -> int:
        marker = transaction_marker(
            0,
            0,
            self.broker_harness.now_ms,
            producer=self.victim,
            marker=Marker("ABORT", 0),
        )
        return self.send(name, marker, 9)

    def control(self) -> int:
        """Send a control batch that has no transaction."""
        batch = encode(
            [(b"\0\0\0\0", b"\0\0\0\0\0\0", (), self.broker_harness.now_ms)],
            control=True,
            base_sequence=1,
            **self.producer(),
        )
        return self.send(None, batch, 9)

    def end(self, name: str) -> int:
        response = self.ask(
            wire.END_TXN, 3, transactional_id=name, committed=False, **self.producer()
        )
        return int(response.error_code)

    def add_group(self, name: str) -> int:
        response = self.ask(
            wire.ADD_OFFSETS_TO_TXN,
            3,
            transactional_id=name,
            group_id=GROUP,
            **self.producer(),
        )
        return int(response.error_code)

    def commit(self, name: str) -> int:
        topic_type = wire.TXN_OFFSET_COMMIT.Request.Topic
        part = topic_type.Partition(
            partition_index=0, committed_offset=1, committed_metadata=""
        )
        response = self.ask(
            wire.TXN_OFFSET_COMMIT,
            3,
            transactional_id=name,
            group_id=GROUP,
            generation_id=-1,
            topics=[topic_type(name="t", partitions=[part])],
            **self.producer(),
        )
        return int(response.topics[0].partitions[0].error_code)

    def write_marker(self) -> int:
        marker = wire.WRITE_TXN_MARKERS.Request.Marker
        response = self.ask(
            wire.WRITE_TXN_MARKERS,
            1,
            markers=[
                marker(
                    transaction_result=False,
                    coordinator_epoch=0,
                    topics=[marker.Topic(name="t", partition_indexes=[0])],
                    **self.producer(),
                )
            ],
        )
        return int(response.markers[0].topics[0].partitions[0].error_code)


FORBIDDEN = codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
NO_MAPPING = codes.INVALID_PRODUCER_ID_MAPPING


@pytest.fixture
def attack(tmp_path: Path) -> Iterator[Attack]:
    opened = Attack(tmp_path / "data")
    yield opened
    opened.broker_harness.close()


@pytest.mark.parametrize(
    ("request_of", "code"),
    [
        (lambda entry: entry.produce(VICTIM, sequence=1), FORBIDDEN),
        (lambda entry: entry.produce(None, sequence=1), FORBIDDEN),
        (lambda entry: entry.produce(OWN, sequence=1), NO_MAPPING),
        (lambda entry: entry.produce(OWN, sequence=1, version=12), NO_MAPPING),
        (lambda entry: entry.mark(VICTIM), FORBIDDEN),
        (lambda entry: entry.mark(None), FORBIDDEN),
        (lambda entry: entry.mark(OWN), NO_MAPPING),
        (lambda entry: entry.control(), codes.INVALID_RECORD),
        (lambda entry: entry.add(VICTIM, entry.victim), FORBIDDEN),
        (lambda entry: entry.add(OWN, entry.victim), NO_MAPPING),
        (lambda entry: entry.end(VICTIM), FORBIDDEN),
        (lambda entry: entry.end(OWN), NO_MAPPING),
        (lambda entry: entry.take_over(VICTIM), FORBIDDEN),
        (lambda entry: entry.take_over(OWN), codes.PRODUCER_FENCED),
        (lambda entry: entry.add_group(VICTIM), FORBIDDEN),
        (lambda entry: entry.add_group(OWN), NO_MAPPING),
        (lambda entry: entry.commit(VICTIM), FORBIDDEN),
        (lambda entry: entry.commit(OWN), NO_MAPPING),
        (lambda entry: entry.write_marker(), codes.CLUSTER_AUTHORIZATION_FAILED),
    ],
)
def test_request_with_a_foreign_producer_is_refused(
    attack: Attack, request_of: Callable[[Attack], int], code: int
) -> None:
    log = attack.broker_harness.logdir.partition("t", 0)
    before = log.log_end_offset
    assert request_of(attack) == code
    assert log.log_end_offset == before
    # The transaction of the victim continues.
    attack.broker_harness.broker.state.security.acls = None
    assert attack.produce(VICTIM, sequence=1) == 0
    assert attack.end(VICTIM) == 0
