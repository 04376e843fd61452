"""Fixtures: a directory with two topics and the groups on it, and a broker of an empty
directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.broker_harness import BrokerHarness
from support.group_harness import GroupHarness


@pytest.fixture
def group_harness(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[GroupHarness]:
    """Create a GroupHarness. With `@with_each_kind_of_directory` each test runs twice; see support.group_harness."""
    with GroupHarness(
        tmp_path / "data", is_shared=getattr(request, "param", False)
    ) as made:
        made.logdir.create_topic("orders", 3)
        made.logdir.create_topic("other", 1)
        yield made


@pytest.fixture
def broker_harness(tmp_path: Path) -> Iterator[BrokerHarness]:
    made = BrokerHarness(tmp_path / "data")
    yield made
    made.close()
