"""Tests of a failing disk. Acknowledged records remain, failed appends leave no byte,
and the log then reports its state correctly.

The last tests let each operation of the disk fail at each of its calls, in a script of
producers, transactions, compaction and retention. tests/faults/test_crash_explorer.py does
the same with plain appends.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.cleaner import clean
from logcore.index import TXN_ENTRY
from logcore.log import open_log
from logcore.partition import writer as writer_module
from logcore.recordbatch import encode
from logcore.testing import Fault, FaultPlan, FoundLog, SimulatedCrash, SimulatedDisk
from support.programs import COMPACTED, ERRNOS, FAILING_OPERATIONS, Program, Recoveries

#: The path of a partition on a simulated disk, and of its first segment.
PARTITION = "/t-0"
LOG_NAME = f"{0:020d}.log"
LOG = f"{PARTITION}/{LOG_NAME}"


def values(path: Path) -> list[bytes | None]:
    with logcore.open(path, read_only=True) as log:
        return [record.value for record in log.read(log.log_start_offset)]


def stored(disk: SimulatedDisk) -> list[bytes | None]:
    """Return the values in PARTITION."""
    with logcore.open(PARTITION, read_only=True, fs=disk) as log:
        return [record.value for record in log.read(log.log_start_offset)]


def calls(disk: SimulatedDisk, name: str) -> int:
    return sum(operation.name == name for operation in disk.operations)


def always_failing(operation: str, code: int = errno.EIO, path: str = "*") -> FaultPlan:
    return FaultPlan(Fault(operation, code, path=path, times=None))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("policy", ["always", "group", "os"])
def test_full_disk_undoes_the_append_and_a_retry_succeeds(
    code: int, policy: str
) -> None:
    disk = SimulatedDisk()
    with open_log(PARTITION, create=True, durability=policy, fs=disk) as log:
        log.append(b"first")
        size = len(disk.content(LOG))
        disk.faults = always_failing("pwrite", code, "*.log")
        for call in (
            lambda: log.append(b"second"),
            lambda: log.append_many([(None, b"x" * 1000)] * 50),
            lambda: log.append_columns(values=(b"abc", [0, 1, 3])),
        ):
            with pytest.raises(logcore.DiskFullError) as caught:
                call()
            assert caught.value.retriable
            assert isinstance(caught.value.__cause__, OSError)
            assert len(disk.content(LOG)) == size, "no byte of the append remains"
            assert log.log_end_offset == 1
        disk.faults = None
        assert log.append(b"second").offset == 1
    assert stored(disk) == [b"first", b"second"]


def test_disk_full_inside_large_append_undoes_the_whole_append() -> None:
    disk = SimulatedDisk()
    with open_log(PARTITION, create=True, durability="group", fs=disk) as log:
        log.append(b"first")
        size = len(disk.content(LOG))
        disk.faults = FaultPlan(
            Fault("pwrite", errno.ENOSPC, path="*.log", at=3, times=None)
        )
        with pytest.raises(logcore.DiskFullError):
            log.append_many([(None, b"x" * 100_000)] * 60)  # 6 MB, in chunks of 1 MiB
        if log.log_end_offset == 1:
            assert len(disk.content(LOG)) == size
        disk.faults = None
        end = log.log_end_offset
        log.append(b"last")
        assert next(log.read(end)).value == b"last"


def test_write_that_cannot_be_truncated_fails_the_log() -> None:
    disk = SimulatedDisk()
    log = open_log(PARTITION, create=True, fs=disk)
    log.append(b"first")
    refused = [
        Fault(name, errno.ENOSPC, path="*.log", times=None)
        for name in ("pwrite", "truncate")
    ]
    disk.faults = FaultPlan(*refused)
    with pytest.raises(logcore.StorageWriteError):
        log.append(b"second")
    disk.faults = None
    with pytest.raises(logcore.LogFailedError) as caught:
        log.append(b"third")
    assert isinstance(caught.value.__cause__, logcore.LogFailedError)
    assert [record.value for record in log.read(0)] == [b"first"], (
        "the log can still be read"
    )
    log.close()
    with logcore.open(PARTITION, fs=disk) as reopened:
        assert reopened.append(b"third").offset == 1
    assert stored(disk) == [b"first", b"third"]


@pytest.mark.parametrize("is_sound", [True, False])
def test_interrupted_append_is_undone_or_log_refuses_writes(
    monkeypatch: pytest.MonkeyPatch, is_sound: bool
) -> None:
    """Otherwise the next append would get the offset of a record that is in the file."""

    def interrupt(*arguments: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    disk = SimulatedDisk()
    log = open_log(PARTITION, create=True, fs=disk)
    log.append(b"first")
    if not is_sound:
        disk.faults = always_failing("truncate", path="*.log")
    # record_batch() is called after the batch was written.
    monkeypatch.setattr(log.host.writer.active, "record_batch", interrupt)
    with pytest.raises(KeyboardInterrupt if is_sound else logcore.StorageWriteError):
        log.append(b"second")
    disk.faults = None
    if is_sound:
        assert log.append(b"third").offset == 1
    else:
        with pytest.raises(logcore.LogFailedError):
            log.append(b"third")
    log.close()
    with logcore.open(PARTITION, fs=disk) as reopened:
        stored_values = [record.value for record in reopened.read(0)]
        assert stored_values in (
            [[b"first", b"third"]] if is_sound else [[b"first"], [b"first", b"second"]]
        )
        assert reopened.append(b"last").offset == len(stored_values)


def test_undo_without_memory_fails_the_log() -> None:
    """Otherwise the indexes of the segment would be overwritten from incomplete memory,
    and Kafka trusts the index of aborted transactions.
    """

    def no_memory(*arguments: object) -> None:
        raise MemoryError

    disk = SimulatedDisk()
    log = open_log("t-0", create=True, fs=disk)
    for sequence in range(2):
        log.append_batch(
            encode(
                [(b"k", b"v")],
                producer_id=7,
                producer_epoch=0,
                base_sequence=sequence,
                transactional=True,
            )
        )
        log.end_transaction(7, 0, commit=False)
    before = disk.content(f"t-0/{0:020d}.txnindex")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(log.host.writer.active, "record_batch", no_memory)
        log.append(b"x")
    with pytest.raises(logcore.LogFailedError):
        log.append(b"x")
    log.close()
    with open_log("t-0", fs=disk) as log:
        log.roll()
    assert disk.content(f"t-0/{0:020d}.txnindex") == before


def test_device_error_fails_the_log() -> None:
    disk = SimulatedDisk()
    log = open_log(PARTITION, create=True, durability="os", fs=disk)
    log.append(b"first")
    disk.faults = FaultPlan(Fault("pwrite", errno.EIO, path="*.log"))
    with pytest.raises(logcore.StorageWriteError):
        log.append(b"second")
    for call in (
        lambda: log.append(b"third"),
        log.flush,
        log.roll,
        lambda: log.truncate(0),
        lambda: log.delete_records(0),
    ):
        with pytest.raises(logcore.LogFailedError):
            call()
    log.close()


@pytest.mark.parametrize("policy", ["always", "group", "every(1)", "interval(1)", "os"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failed_sync_is_never_retried(policy: str, code: int) -> None:
    disk = SimulatedDisk()
    log = open_log(PARTITION, create=True, durability=policy, fs=disk)
    log.append(b"first")
    log.flush()
    end = log.durable_end_offset
    syncs = calls(disk, "fdatasync")
    disk.faults = FaultPlan(Fault("fdatasync", code))
    with pytest.raises(logcore.DurabilityUnknownError) as caught:
        log.append(b"second")
        log.flush()
    assert caught.value.__cause__ is not None
    assert log.durable_end_offset == end
    for _ in range(2):
        with pytest.raises(logcore.LogFailedError):
            log.append(b"third")
    log.close()
    assert calls(disk, "fdatasync") == syncs + 1, (
        "a second sync would succeed without the data"
    )
    with logcore.open(PARTITION, fs=disk) as reopened:
        assert next(reopened.read(0)).value == b"first"


def test_durability_always_leaves_at_most_one_unsynced_batch() -> None:
    disk = SimulatedDisk()
    with open_log(PARTITION, create=True, durability="always", fs=disk) as log:
        for number in range(5):
            log.append(b"written", durability="os")
            assert log.log_end_offset - log.durable_end_offset == 1, number
        log.append_many([(None, b"x" * 9_000)] * 5)
        assert log.durable_end_offset == log.log_end_offset


def test_stored_exception_does_not_block_later_appends() -> None:
    """The traceback of the error holds views of the buffer of the encoder. The buffer
    must still be able to grow.
    """
    disk = SimulatedDisk()
    with open_log(PARTITION, create=True, fs=disk) as log:
        disk.faults = always_failing("pwrite", errno.ENOSPC, "*.log")
        with pytest.raises(logcore.DiskFullError) as caught:
            log.append_many([(None, b"x")] * 100)
        disk.faults = None
        log.append_many([(None, b"x" * 1000)] * 5_000)
        assert caught.value.retriable
    assert len(stored(disk)) == 5_000


def test_failed_sync_raises_in_every_waiting_thread() -> None:
    def append_and_record(number: int) -> None:
        try:
            log.append(b"%d" % number)
            results.append("acknowledged")
        except logcore.LogFailedError:
            results.append("refused")

    disk = SimulatedDisk(faults=always_failing("fdatasync"))
    log = open_log(PARTITION, create=True, fs=disk)
    results: list[str] = []
    threads = [
        threading.Thread(target=append_and_record, args=(number,))
        for number in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["refused"] * 16
    assert calls(disk, "fdatasync") == 1
    assert log.high_watermark == 0, "no unsynced record was visible"
    log.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "operation", ["fsync", "pwrite", "truncate", "pread", "fdatasync"]
)
def test_error_in_any_call_loses_no_acknowledged_record(operation: str) -> None:
    """The nth call fails, for each n that a workload reaches. Then the disk works
    again, and the log is opened.
    """
    config = {"segment.bytes": 400, "index.interval.bytes": 60}

    def workload(disk: SimulatedDisk) -> list[bytes]:
        acknowledged: list[bytes] = []
        try:
            with open_log(PARTITION, create=True, config=config, fs=disk) as log:
                for number in range(6):
                    log.append(b"%d" % number * 20)
                    acknowledged.append(b"%d" % number * 20)
                rows = [b"many %d" % number * 5 for number in range(6)]
                log.append_many([(None, row) for row in rows])
                acknowledged += rows
                log.truncate(11)
                del acknowledged[11:]
                log.append(b"last")
                acknowledged.append(b"last")
        except logcore.LogcoreError:
            pass
        return acknowledged

    def is_reached(nth: int, code: int) -> bool:
        plan = FaultPlan(Fault(operation, code, at=nth))
        disk = SimulatedDisk(faults=plan)
        acknowledged = workload(disk)
        disk.faults = None
        with logcore.open(PARTITION, create=True, fs=disk) as log:
            stored_values = [record.value for record in log.read(0)]
            # A record that was not acknowledged may be in the log, in the order of the
            # appends.
            assert (
                stored_values[: len(acknowledged)] == acknowledged
                or stored_values == acknowledged[:11]
            ), (nth, code)
            assert log.append(b"after").offset == len(stored_values)
        return bool(plan.hits)

    for code in (errno.EIO, errno.ENOSPC):
        nth = 1
        while is_reached(nth, code):
            nth += 1
        assert nth > 4


def test_failed_read_at_opening_changes_no_file() -> None:
    def files_of_the_partition() -> dict[str, bytes]:
        return {
            path: content
            for path, content in disk.files().items()
            if path.startswith(PARTITION)
        }

    disk = SimulatedDisk()
    with logcore.open(PARTITION, create=True, fs=disk) as log:
        log.append_many([(None, b"x" * 100)] * 20)
    disk.put("/recovery-point-offset-checkpoint", None)
    before = files_of_the_partition()
    disk.faults = always_failing("pread", path="*.log")
    with pytest.raises(logcore.StorageReadError):
        open_log(PARTITION, fs=disk)
    disk.faults = None
    assert files_of_the_partition() == before
    with logcore.open(PARTITION, fs=disk) as log:
        assert log.log_end_offset == 20


def test_append_succeeds_after_a_lack_of_file_descriptors(partition: Path) -> None:
    with logcore.open(partition, create=True) as log:
        log.append(b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    handles: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        with pytest.raises(OSError):
            while True:
                handles.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(logcore.ResourceError) as caught:
            logcore.open(partition)
        assert caught.value.retriable
    finally:
        for handle in handles:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert values(partition) == [b"x"]


def test_file_size_limit_at_any_byte_undoes_the_append(tmp_path: Path) -> None:
    """With RLIMIT_FSIZE, the kernel shortens a write and then refuses writes."""
    limits = (0, 1, 30, 60, 61, 100, 200)
    program = f"""
import resource, signal, sys, logcore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in {limits}:
    with logcore.open(f"t-{{limit}}", create=True) as log:
        log.append(b"first")
        size = log.statistics().size_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(size + limit, 300), hard))
        stored = 1
        try:
            for _ in range(20):
                log.append(b"x" * 30)
                stored += 1
        except logcore.DiskFullError as error:
            print("full", limit, stored)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert log.append(b"last").offset == stored
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [int(limit) for _, limit, _ in lines] == list(limits)
    for _, limit, stored in lines:
        assert values(tmp_path / f"t-{limit}") == [
            b"first",
            *[b"x" * 30] * (int(stored) - 1),
            b"last",
        ], limit


def test_partitions_of_one_directory_share_their_checkpoints_safely(
    tmp_path: Path,
) -> None:
    def append_and_sync(log: logcore.Log) -> None:
        for _ in range(20):
            log.append(b"x")
            log.roll()

    logs = [
        logcore.open(tmp_path / f"t-{number}", create=True, durability="os")
        for number in range(4)
    ]
    threads = [threading.Thread(target=append_and_sync, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        assert log.log_end_offset == 20
        log.close()
    checkpoint = (tmp_path / "recovery-point-offset-checkpoint").read_text().split("\n")
    assert checkpoint == ["0", "4", *(f"t {number} 20" for number in range(4)), ""]


@pytest.mark.parametrize("operation", ["pwrite", "fsync"])
def test_failed_metadata_write_does_not_fail_an_append(operation: str) -> None:
    """The writes of the durable end and of the recovery point fail. The record itself
    is durable.
    """
    disk = SimulatedDisk()
    with open_log(
        PARTITION, create=True, config={"segment.bytes": 200}, fs=disk
    ) as log:
        # Other files than *.log and *index.
        disk.faults = always_failing(operation, errno.ENOSPC, "*[!gx]")
        for number in range(6):
            receipt = log.append(b"%d" % number * 10)
            assert (receipt.offset, receipt.durability) == (number, "disk")
        assert log.high_watermark == 6
        assert disk.faults.hits
        disk.faults = None
    assert len(stored(disk)) == 6


def test_recovery_writes_kept_records_to_a_new_file() -> None:
    """After a failed sync, the system may mark pages as clean that never reached the
    disk. A new file has no such pages.
    """
    disk = SimulatedDisk(faults=always_failing("fdatasync"))
    log = open_log(PARTITION, create=True, fs=disk)
    with pytest.raises(logcore.DurabilityUnknownError):
        log.append(b"perhaps on disk")
    log.close()
    disk.faults = None
    before = disk.identity(LOG)
    with logcore.open(PARTITION, fs=disk) as reopened:
        assert reopened.log_end_offset == 1
        assert disk.identity(LOG) != before
        assert reopened.append(b"next").offset == 1
    identity_of_new_file = disk.identity(LOG)
    with logcore.open(PARTITION, fs=disk):
        assert disk.identity(LOG) == identity_of_new_file, (
            "an opening after a clean close rewrites no file"
        )
    assert stored(disk) == [b"perhaps on disk", b"next"]


def test_failed_sync_in_recovery_is_recorded_for_the_next_opening() -> None:
    """After the failure, the page cache may contain data that is not on disk, and may
    be marked as clean.
    """
    disk = SimulatedDisk()
    log = open_log(PARTITION, create=True, durability="os", fs=disk)
    log.append(b"perhaps on disk")
    disk.kill()
    before = disk.identity(LOG)
    disk.faults = always_failing("fsync", path="*.log")
    with pytest.raises(logcore.StorageWriteError):
        open_log(PARTITION, fs=disk)
    disk.faults = None
    assert disk.identity(LOG) == before
    with open_log(PARTITION, fs=disk) as reopened:
        assert disk.identity(LOG) != before, "the valid records are in a new file"
        assert reopened.append(b"next").offset == 1
    assert stored(disk) == [b"perhaps on disk", b"next"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_transaction_can_be_ended_after_a_failed_marker(code: int) -> None:
    """If the marker is not written, the transaction remains open and can be ended once
    the disk has space. If the marker is written, but missing in the index that Kafka
    trusts, the log refuses appends until an opening has rebuilt the index.
    """
    disk = SimulatedDisk()
    log = open_log("t-0", create=True, fs=disk)
    batch = encode(
        [(b"k", b"v")],
        producer_id=7,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )
    log.append_batch(batch)
    disk.faults = FaultPlan(Fault("pwrite", code, path="*.log"))
    with pytest.raises(logcore.LogcoreError):
        log.end_transaction(7, 0, commit=False)
    disk.faults = None
    assert log.log_end_offset == 1
    if code == errno.ENOSPC:
        assert log.append_batch(batch).offset == 0, "the batch is still a duplicate"
        disk.faults = FaultPlan(Fault("pwrite", code, path="*.txnindex"))
        with pytest.raises(logcore.DiskFullError):
            log.end_transaction(7, 0, commit=False)
        disk.faults = None
    with pytest.raises(logcore.LogFailedError):
        log.append(b"more")
    log.close()
    with open_log("t-0", fs=disk) as log:
        if code == errno.EIO:
            assert log.log_end_offset == 1
            log.end_transaction(7, 0, commit=False)
        assert list(log.read(0, isolation="read_committed")) == []
        assert log.log_end_offset == log.last_stable_offset == 2
    assert len(disk.content(f"t-0/{0:020d}.txnindex")) == TXN_ENTRY.itemsize


def test_recovery_succeeds_on_a_full_disk() -> None:
    disk = SimulatedDisk(faults=always_failing("fdatasync"))
    log = open_log(PARTITION, create=True, fs=disk)
    with pytest.raises(logcore.DurabilityUnknownError):
        log.append(b"perhaps on disk")
    log.close()
    disk.put(LOG, disk.content(LOG) + bytes(100))
    disk.faults = always_failing("pwrite", errno.ENOSPC, "*.log.tmp")
    with open_log(PARTITION, fs=disk) as reopened:
        assert reopened.log_end_offset == 1
        assert reopened.append(b"next").offset == 1
        assert disk.faults.hits
    assert stored(disk) == [b"perhaps on disk", b"next"]
    assert not [path for path in disk.files() if path.endswith(".tmp")]


def test_close_during_appends_harms_no_other_file(tmp_path: Path) -> None:
    """If a sync in another thread used a closed handle, it could sync the next file
    with that handle number.
    """
    for round_ in range(10):
        log = logcore.open(tmp_path / f"t-{round_}", create=True)

        def append_until_closed(log: logcore.Log = log) -> None:
            try:
                while True:
                    log.append(b"x" * 50)
            except (logcore.LogClosedError, logcore.LogFailedError):
                pass

        threads = [threading.Thread(target=append_until_closed) for _ in range(4)]
        for thread in threads:
            thread.start()
        while log.log_end_offset < 50:
            threading.Event().wait(0.001)
        log.close()
        other_files = [
            (tmp_path / f"v-{round_}-{number}").open("w+b") for number in range(8)
        ]
        for thread in threads:
            thread.join()
        for other_file in other_files:
            assert other_file.read() == b""
            other_file.close()
        stored_values = values(tmp_path / f"t-{round_}")
        assert set(stored_values) == {b"x" * 50}


# -- each operation of the disk, in programs with later changes ------------------------

SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
LATER = (
    "idempotent", "append", "transact", "again", "commit", "roll", "transact", "append", "abort", "compact",
    "idempotent", "append_os", "transact", "reopen", "again", "commit", "compact", "append", "retain", "idempotent",
)  # fmt: skip


class LaterProgram(Program):
    """A program whose calls may fail. After a failure the outcome of the batch is
    unknown, and the program continues with a new producer. Opening aborts the open
    transactions of the old producer, as Kafka's coordinator does.
    """

    is_unsure = False

    def open(self) -> None:
        super().open()
        log = self.log
        if (
            self.is_unsure
            and log is not None
            and log.host.writer.commit.failure is None
        ):
            for producer_id in self.history.open_transactions(log.log_end_offset):
                self.history.issue_marker(producer_id, commit=False)
                self.history.acknowledge(
                    log.end_transaction(producer_id, 0, commit=False).last_offset + 1
                )
            self.producers = {
                role: producer_id + 1 for role, producer_id in self.producers.items()
            }
            self.is_unsure = False

    def failed(self) -> None:
        """Record the state of the log after a failed call. The disk does not fail while
        the log is read.
        """
        self.is_unsure = True
        log = self.log
        if log is None or log.is_closed or log.host.writer.commit.failure is not None:
            return
        faults, self.disk.faults = self.disk.faults, None
        self.history.continue_at_end(log.log_end_offset)
        if self.history.may_be_removed and log.high_watermark == log.log_end_offset:
            self.history.check_failed_call(FoundLog.of(log))
        self.disk.faults = faults


def failing_later(fault: Fault, durability: str, recoveries: Recoveries) -> bool:
    """Run the script with a fault on a disk that then works again. Return whether the
    fault occurred.
    """
    plan = FaultPlan(fault)
    program = LaterProgram(
        durability, config=COMPACTED, explore=False, disk=SimulatedDisk(faults=plan)
    )
    history = program.history
    disk = program.disk
    try:
        for action in ["open", *LATER, "close"]:
            try:
                getattr(program, action)()
            except logcore.LogcoreError:
                program.failed()
        disk.faults = None
        for state in disk.crash_states(limit=3):
            history.check(recoveries.find(state.disk()), state.kind)
        if program.log is not None:
            with contextlib.suppress(logcore.LogcoreError):
                program.log.close()
        disk.kill()
        recovered = recoveries.run(disk, thorough=True)
        history.check(recovered, "kill")
        for crashed_disk in disk.after_crash(limit=3, kind="power"):
            reopened = recoveries.find(crashed_disk)
            assert reopened.records[: len(recovered.records)] == recovered.records, (
                "records that readers got after an opening are lost"
            )
    except BaseException as error:
        disk.crash()
        error.add_note(f"repeat with failing_later({fault!r}, {durability!r})")
        raise
    return bool(plan.hits)


@pytest.mark.long
@pytest.mark.parametrize(
    ("durability", "step", "error_count"),
    [
        ("group", 180, 1),
        *(
            pytest.param(name, 1, len(ERRNOS), marks=SLOW)
            for name in ("group", "os", "always", "every(3)")
        ),
    ],
)
def test_failing_operation_in_later_changes_loses_no_acknowledged_record(
    durability: str, step: int, error_count: int
) -> None:
    """The call that fails is the n-th, for each multiple n of `step`, with
    `error_count` errors.
    """
    cases = 0
    recoveries = Recoveries(durability, COMPACTED)
    for operation, times in itertools.product(FAILING_OPERATIONS, (1, None)):
        for number in itertools.count(1, step):
            codes = [
                ERRNOS[(number + shift) % len(ERRNOS)] for shift in range(error_count)
            ]
            faults = [Fault(operation, code, at=number, times=times) for code in codes]
            hits = [failing_later(fault, durability, recoveries) for fault in faults]
            cases += sum(hits)
            if not any(hits):
                break
    print(f"{cases} failures of single operations in programs with later changes")
    assert cases >= 1_600 * error_count // step


@pytest.mark.long
def test_failed_compaction_is_completed_in_durable_order() -> None:
    """When the compaction failed, the new file names were not durable. The next opening
    treated them as durable and removed the replaced files. After a power cut, neither
    the new nor the old files existed.
    """
    config = {"segment.bytes": 300, "cleanup.policy": "compact"}
    for syncs, changes in itertools.product(range(1, 12, 2), range(0, 40, 8)):
        disk = SimulatedDisk()
        log = logcore.open("t-0", create=True, config=config, fs=disk)
        for number in range(7):
            log.append(b"%d" % number * 15, key=b"k%d" % (number % 3))
        log.roll()
        disk.faults = FaultPlan(Fault("sync_dir", at=syncs, times=None))
        try:
            clean(log, force=True)
        except logcore.LogcoreError:
            pass
        disk.faults = None
        disk.kill()
        disk.crash_in(changes)
        try:
            logcore.open("t-0", config=config, fs=disk).close()
        except SimulatedCrash:
            pass
        for crashed_disk in disk.after_crash(limit=20, kind="power"):
            with logcore.open("t-0", config=config, fs=crashed_disk) as reopened:
                newest = {
                    record.key: record.offset
                    for record in reopened.read(reopened.log_start_offset)
                }
                assert newest == {b"k0": 6, b"k1": 4, b"k2": 5}, crashed_disk
        if not disk.is_dead:
            disk.crash()


@pytest.mark.parametrize("durability", ["group", "os"])
def test_failed_append_is_still_undone_after_clean_close(
    durability: str,
) -> None:
    """Kafka checks no file in a directory that is marked as clean."""
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk, durability=durability) as log:
        log.append(b"first")
        log.flush()
        disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.log"))
        with pytest.raises(logcore.DiskFullError):
            log.append(b"second" * 100)
    for state in disk.crash_states():
        with logcore.open("t-0", fs=state.disk()) as log:
            assert (
                log.recovery_report is not None
                and log.recovery_report.cut_position is None
            ), state.what


def test_close_with_failed_sync_raises_and_marks_nothing_clean() -> None:
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, fs=disk, durability="os")
    log.append(b"perhaps")
    disk.faults = FaultPlan(Fault("fdatasync", errno.EIO, path="*.log"))
    with pytest.raises(logcore.DurabilityUnknownError):
        log.close()
    assert log.is_closed
    assert (
        "/.kafka_cleanshutdown" not in disk.files()
        and "/t-0/logcore.unsynced" in disk.files()
    )


@pytest.mark.parametrize("policy", ["os", "every(100)", "interval(1000000)", "always"])
def test_records_stored_before_disk_full_are_visible(policy: str) -> None:
    disk = SimulatedDisk(
        faults=FaultPlan(Fault("pwrite", errno.ENOSPC, path="*[1-9].log"))
    )
    with logcore.open(
        "t-0",
        create=True,
        durability=policy,
        config={"segment.bytes": 600, "batch.size": 100},
        fs=disk,
    ) as log:
        with pytest.raises(logcore.DiskFullError, match="were stored"):
            log.append_many([(None, b"%d" % number * 60) for number in range(12)])
        end = log.log_end_offset
        assert end > 0
        assert [record.value for record in log.read(0)] == [
            b"%d" % number * 60 for number in range(end)
        ]


def test_data_only_in_memory_after_failed_sync_is_kept() -> None:
    """The records were acknowledged with durability "os", so a kill must not lose them.
    Because the failed sync was recorded, recovery copies the page cache. Another sync
    would succeed without the data, and dropping the pages would lose the data.
    """
    disk = SimulatedDisk(faults=FaultPlan(Fault("fdatasync", errno.EIO, path="*.log")))
    log = logcore.open("t-0", create=True, durability="os", fs=disk)
    log.append(b"one")
    with pytest.raises(logcore.DurabilityUnknownError):
        log.flush()
    disk.kill()
    with logcore.open("t-0", durability="os", fs=disk) as log:
        assert [record.value for record in log.read(0)] == [b"one"]
        log.append(b"two")
        log.flush()
        for crashed_disk in disk.after_crash(kind="power"):
            with logcore.open("t-0", durability="os", fs=crashed_disk) as reopened:
                assert [record.value for record in reopened.read(0)] == [b"one", b"two"]


@pytest.mark.parametrize("failing_call", ["exists", "poison"])
def test_roll_with_unknown_outcome_fails_the_log(
    monkeypatch: pytest.MonkeyPatch, failing_call: str
) -> None:
    """The new file existed, but the check whether it exists failed for lack of memory.
    The next append would have assigned an offset of the new file in the old segment.
    """
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, fs=disk, durability="os")
    log.append(b"one")
    original = disk.open

    def open_without_descriptors(path: str, **options: Any) -> int:
        disk.close(original(path, **options))
        raise logcore.ResourceError("no descriptors", path=path)

    def exists_without_memory(path: str) -> bool:
        raise MemoryError

    def without_memory(cause: BaseException) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        if failing_call == "poison":
            patch.setattr(log.host.writer.commit, "poison", without_memory)
        patch.setattr(writer_module.ActiveSegment, "seal", lambda self: self)
        patch.setattr(disk, "open", open_without_descriptors)
        patch.setattr(disk, "exists", exists_without_memory)
        with pytest.raises(MemoryError):
            log.roll()
    assert disk.exists("/t-0/00000000000000000001.log")
    with pytest.raises(logcore.LogFailedError):
        log.truncate(0)
    with pytest.raises(logcore.LogFailedError):
        log.append(b"two")
    log.close()
    with logcore.open("t-0", fs=disk) as log:
        assert log.append(b"two").offset == 1
        assert [record.value for record in log.read(0)] == [b"one", b"two"]


def test_write_that_cannot_be_undone_fails_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record was in the file, and there was no memory to record or to undo the
    write. The next record got the same offset.
    """
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, fs=disk, durability="os")
    log.append(b"one")
    original = writer_module.ActiveSegment.append

    def append(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        raise MemoryError

    def without_memory(self: Any, *arguments: Any) -> bool:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(writer_module.ActiveSegment, "append", append)
        patch.setattr(writer_module.Writer, "roll_back_append_locked", without_memory)
        with pytest.raises(MemoryError):
            log.append(b"two")
    with pytest.raises(logcore.LogFailedError):
        log.append(b"three")
    log.close()
    with logcore.open("t-0", fs=disk) as log:
        assert [(record.offset, record.value) for record in log.read(0)] in (
            [(0, b"one")],
            [(0, b"one"), (1, b"two")],
        )
        assert log.append(b"three").offset == log.log_end_offset - 1
