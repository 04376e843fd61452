"""Fixtures for tests of programs that use a log. pytest discovers them in the package.

    def test_my_service(logcore_dir):        # a directory of topics on the real disk
    def test_my_crashes(simulated_disk):     # a disk in memory, to be passed as fs=

The directory is closed when the test ends; see disk.after_crash() for crashes of the
disk. pytest loads this module in every run, so a fixture imports the library on first
use.
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
    """An open LogDir in a temporary directory.

    Its attribute `.path` is that directory.
    """
    from logcore.logdir import open_dir

    with open_dir(tmp_path_factory.mktemp("logcore"), create=True) as logdir:
        yield logdir


@pytest.fixture
def simulated_disk() -> SimulatedDisk:
    """An empty SimulatedDisk."""
    from logcore.testing.disk import SimulatedDisk

    return SimulatedDisk()
