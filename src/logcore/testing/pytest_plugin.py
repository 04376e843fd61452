"""Fixtures for tests of programs that use a log: pytest discovers them once the package is installed.

    def test_my_service(logcore_dir):        # a directory of topics on the real disk, closed when the test ends
    def test_my_crashes(simulated_disk):     # a disk in memory: give it as fs=, and see disk.after_crash()

This module is loaded in every pytest run, so it imports the library only when a fixture is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from logcore.logdir import LogDir
    from logcore.testing.disk import SimulatedDisk


@pytest.fixture
def logcore_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogDir]:
    """An open LogDir in a temporary directory; `.path` says where."""
    from logcore.logdir import open_dir

    with open_dir(tmp_path_factory.mktemp("logcore"), create=True) as logdir:
        yield logdir


@pytest.fixture
def simulated_disk() -> SimulatedDisk:
    """An empty SimulatedDisk."""
    from logcore.testing.disk import SimulatedDisk

    return SimulatedDisk()
