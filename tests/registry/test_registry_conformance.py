"""One protocol, and a suite that every implementation of it passes: files on a real
disk, files on a simulated one, files of a cluster.

The tests are in tests/support/registries.py. ZooKeeper passes the same in
tests/interop/test_interop_zookeeper.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from logcore.fs import OS
from logcore.registry import Registry, open_registry
from logcore.registry.files import TopicNodes
from logcore.testing import SimulatedDisk
from support.registries import *  # noqa: F403
from support.registries import Registries


class PatientDisk(SimulatedDisk):
    """Waits for a byte that another thread of this process holds."""

    def lock_byte(self, handle: int, byte: int, *, timeout_ms: int = 0) -> bool:
        for _ in range(timeout_ms):
            if super().lock_byte(handle, byte):
                return True
            time.sleep(0.001)
        return super().lock_byte(handle, byte)


@pytest.fixture(params=["files", "simulated", "cluster"])
def registries(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registries]:
    made = []
    fs = PatientDisk({"data": None}) if request.param == "simulated" else OS
    directory = "/data" if request.param == "simulated" else f"{tmp_path}/data"
    topics: TopicNodes = "truth" if request.param == "cluster" else "view"

    def make() -> Registry:
        registry = open_registry(
            directory, topics=topics, fs=fs, lock_timeout_ms=10_000
        )
        made.append(registry)
        return registry

    yield make
    for registry in made:
        registry.close()
