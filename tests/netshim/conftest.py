"""Fixtures: a directory with two topics and the groups on it, and a broker of an empty
directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.bench import Bench
from support.rig import Rig


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Create a Rig. With `@in_both_homes` each test runs twice; see support.rig."""
    with Rig(tmp_path / "data", is_shared=getattr(request, "param", False)) as made:
        made.logdir.create_topic("orders", 3)
        made.logdir.create_topic("other", 1)
        yield made


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "data")
    yield made
    made.close()
