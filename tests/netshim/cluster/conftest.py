"""Clusters of three processes: one for all tests of a module, and one for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clusters import Cluster


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a cluster whose brokers are not stopped by a test."""
    with Cluster(tmp_path_factory.mktemp("calm") / "cluster") as made:
        yield made


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Return a cluster whose brokers a test may stop."""
    with Cluster(tmp_path / "cluster") as made:
        yield made
