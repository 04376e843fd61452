"""Tests of power cuts after successful calls. The name of a new file may be lost, and a
removed file may exist again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

import logcore
from logcore.errors import LogcoreError
from logcore.staging.publishing import Staging
from logcore.testing import Fault, FaultPlan, SimulatedDisk


def test_reader_after_clean_close_and_power_cut_returns_every_record() -> None:
    """close() removes logcore.durable without a sync. A power cut restored the file as
    of its last sync, so that readers returned only 0, 8 or 9 of 10 records, in a
    directory that was marked as clean.
    """
    disk = SimulatedDisk()
    with logcore.open_dir(
        "/data", create=True, durability="group", fs=disk
    ) as directory:
        directory.create_topic("t")
        for number in range(10):
            directory.append("t", b"%d" % number, partition=0)
    clean_count = 0
    for crashed_disk in disk.after_crash(limit=50):
        if crashed_disk.exists("/data/.kafka_cleanshutdown"):
            clean_count += 1
            with logcore.open_dir(
                "/data", read_only=True, fs=crashed_disk
            ) as directory:
                assert len(list(directory.partition("t", 0).read(0))) == 10, (
                    crashed_disk
                )
    assert clean_count > 5


def append_to_directory(disk: SimulatedDisk) -> None:
    with logcore.open_dir("/srv/more/data", create=True, fs=disk) as directory:
        directory.create_topic("t")
        directory.append("t", b"acknowledged", partition=0)


def append_to_log(disk: SimulatedDisk) -> None:
    with logcore.open("/srv/more/data/t-0", create=True, fs=disk) as log:
        log.append(b"acknowledged")


@pytest.mark.parametrize("program", [append_to_directory, append_to_log])
def test_append_after_failed_opening_survives_power_cut(
    program: Callable[[SimulatedDisk], None],
) -> None:
    """The first opening created the directory, and the sync of its parent failed or
    never ran. The second opening found the directory and did not sync its parent, so
    that a power cut removed the directory with all acknowledged records.
    """
    counter = SimulatedDisk({"srv": None})
    program(counter)
    first_write = next(
        number
        for number, operation in enumerate(counter.operations)
        if operation.path.endswith(".log")
    )
    assert first_write > 4
    for number in range(1, first_write + 1):
        disk = SimulatedDisk(
            {"srv": None}, faults=FaultPlan(Fault("*", errno.EMFILE, at=number))
        )
        for _ in range(2):
            try:
                program(disk)
                break
            except LogcoreError:
                continue
        for crashed_disk in disk.after_crash(limit=20):
            with logcore.open(
                "/srv/more/data/t-0", create=True, fs=crashed_disk
            ) as log:
                assert [record.value for record in log.read(0)] == [b"acknowledged"], (
                    f"call {number}: {crashed_disk}"
                )


def test_next_driver_syncs_the_staging_directory_after_a_failed_sync() -> None:
    disk = SimulatedDisk({"srv": None, "srv/data": None})
    staging = Staging(disk, "/srv/data")
    disk.faults = FaultPlan(Fault("sync_dir", errno.EIO, path="/srv"))
    with pytest.raises(LogcoreError):
        staging.begin("one")
    staging.begin("two")
    assert all(
        crashed_disk.is_directory("/srv/data.staging")
        for crashed_disk in disk.after_crash(limit=10)
    )
