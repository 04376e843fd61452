"""A coordinator of a cluster reads its partition once the records are committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logcore import LogcoreError, NotLeaderError
from logcore.metadata.filenames import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from netshim.groups import BrokerGroups
from netshim.leadership import SoleLeadership
from netshim.transactions import TransactionHost
from support.broker_harness import BrokerHarness


class HeldLeadership(SoleLeadership):
    """A leader whose records are committed by the test."""

    def __init__(self, state: Any) -> None:
        super().__init__(state.fetches, state.syncs)
        self.waiting: list[tuple[int, Callable[[LogcoreError | None], None]]] = []

    def when_committed(
        self, key: Any, log: Any, end: int, done: Any, _: Any = None
    ) -> None:
        self.waiting.append((end, done))


@pytest.fixture(params=["groups", "transactions"])
def loading(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a coordinator, its leadership, and the list of its reads."""
    broker_harness = BrokerHarness(tmp_path / "data")
    topic = OFFSETS_TOPIC if request.param == "groups" else TRANSACTIONS_TOPIC
    broker_harness.logdir.create_topic(topic)
    broker_harness.logdir.append(topic, b"1", partition=0)
    state = broker_harness.broker.state
    held = HeldLeadership(state)
    state.leadership = held
    host: Any = (
        BrokerGroups(state, only=0)
        if request.param == "groups"
        else TransactionHost(state, only=0)
    )
    reads: list[int] = []
    host._read = lambda: reads.append(1) or []
    yield host, held, reads
    broker_harness.logdir.close()


def test_partition_is_read_once_its_records_are_committed(loading: Any) -> None:
    """A coordinator that read its partition too early did not see the records that were
    not committed yet, and reported an older offset than the acknowledged offset.
    """
    host, held, reads = loading
    found: list[bool] = []
    host.load(0, found.append)
    ((end, committed),) = held.waiting
    assert (end, reads, found) == (1, [], [])
    assert not host.is_loaded
    committed(None)
    assert (reads, found, host.is_loaded) == ([1], [True], True)


def test_partition_that_is_led_elsewhere_is_not_read(loading: Any) -> None:
    host, held, reads = loading
    found: list[bool] = []
    host.load(0, found.append)
    held.waiting[0][1](NotLeaderError("another broker leads"))
    assert (reads, found, host.is_loaded) == ([], [False], False)
