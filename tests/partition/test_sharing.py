"""Two writers of one partition, each with its own log object and file handles, like two
processes.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import logcore
from logcore import recordbatch
from logcore.coordinators.durable_queue import sync_present
from logcore.fs import OsFS
from logcore.index import TXN_ENTRY
from logcore.log import rewriting_of
from logcore.metadata.checkpoint import LOCK_RECORD
from logcore.partition import shared_lock
from logcore.testing import Fault, FaultPlan, SimulatedDisk

CONFIG = {"segment.bytes": 2_000, "index.interval.bytes": 100}


def open_shared(path: Path, **options: Any) -> logcore.Log:
    return logcore.open(
        path, create=True, shared=True, fs=OsFS(), **{"config": CONFIG, **options}
    )


class HookedFS(OsFS):
    """A file system that calls `during` once, after the next fdatasync of a log has
    finished and before the log continues.
    """

    during: Callable[[], object] = staticmethod(lambda: None)

    def fdatasync(self, handle: int) -> None:
        super().fdatasync(handle)
        during = self.during
        self.during = lambda: None
        during()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "t-0"


@pytest.fixture
def both(path: Path) -> Iterator[tuple[logcore.Log, logcore.Log]]:
    with open_shared(path) as first, open_shared(path) as other:
        yield first, other


def batch(
    value: bytes, producer_id: int, sequence: int, *, transactional: bool = False
) -> bytes:
    return recordbatch.encode(
        [(None, value)],
        now_ms=time.time_ns()
        // 1_000_000,  # the state of producers of old batches expires
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        transactional=transactional,
    )


def test_transactions_of_another_writer_are_seen_after_an_earlier_read(
    both: tuple[logcore.Log, logcore.Log],
) -> None:
    first, other = both
    first.append(b"plain")
    for number, commit in enumerate((False, True)):
        assert first.last_stable_offset == first.log_end_offset
        other.append_batch(batch(b"%d" % commit, 7, number, transactional=True))
        first.append(b"between")
        assert first.last_stable_offset == first.log_end_offset - 2
        other.end_transaction(7, 0, commit=commit)
        first.refresh()
        assert first.last_stable_offset == first.log_end_offset
    values = [record.value for record in first.read(0, isolation="read_committed")]
    assert values == [b"plain", b"between", b"1", b"between"]


def test_offsets_continue_after_those_of_another_writer(
    both: tuple[logcore.Log, logcore.Log], path: Path
) -> None:
    for number in range(200):
        assert both[number % 2].append(b"%d" % number).offset == number
    for log in both:
        log.refresh()
        assert [record.value for record in log.read(0)] == [
            b"%d" % number for number in range(200)
        ]
    assert both[0].statistics().segments > 3
    with logcore.open(path, read_only=True) as reader:
        assert reader.high_watermark == 200


def test_flush_skips_bytes_synced_by_another_writer(
    both: tuple[logcore.Log, logcore.Log],
) -> None:
    first, other = both
    first.append(b"1", durability="os")
    receipt = other.append(b"2")
    assert receipt.durability == "disk"
    assert first.refresh()
    assert first.durable_end_offset == first.high_watermark == 2
    syncs = first.statistics().syncs
    first.flush()
    assert first.statistics().syncs == syncs


def test_batch_stored_by_another_writer_is_a_duplicate(
    both: tuple[logcore.Log, logcore.Log],
) -> None:
    log, other = both
    for sequence in range(6):
        first = log.append_batch(batch(b"%d" % sequence, 7, sequence))
        assert (
            other.append_batch(batch(b"%d" % sequence, 7, sequence)).offset
            == first.offset
        )
    with pytest.raises(logcore.OutOfOrderSequenceError):
        other.append_batch(batch(b"gap", 7, 9))
    assert log.log_end_offset == 6


def test_transaction_index_contains_aborts_of_both_writers(
    both: tuple[logcore.Log, logcore.Log], path: Path
) -> None:
    for number in range(24):
        log = both[number // 2 % 2]
        producer_id = 1 + number % 3
        log.append_batch(
            batch(b"%d" % number, producer_id, number // 3, transactional=True)
        )
        both[number % 2].end_transaction(producer_id, 0, commit=number % 4 == 0)
    both[0].roll()
    both[1].refresh()
    for log in both:
        values = [record.value for record in log.read(0, isolation="read_committed")]
        assert values == [b"%d" % number for number in range(0, 24, 4)]
    indexes = [
        Path(segment.file(".txnindex"))
        for segment in both[0].host.writer.state.segments[:-1]
    ]
    entries = [
        np.frombuffer(index.read_bytes(), TXN_ENTRY)["last_offset"]
        for index in indexes
        if index.exists()
    ]
    aborted_offsets = sorted(np.concatenate(entries).tolist())
    assert aborted_offsets == [2 * number + 1 for number in range(24) if number % 4]


def test_abort_is_in_the_transaction_index_at_once(path: Path) -> None:
    """Kafka may read the files after a kill. This also holds if no other process has
    appended a marker.
    """
    with open_shared(path) as log:
        log.append_batch(batch(b"0", 7, 0, transactional=True))
        log.end_transaction(7, 0, commit=False)
        entries = np.frombuffer((path / f"{0:020d}.txnindex").read_bytes(), TXN_ENTRY)
        assert entries.tolist() == [(0, 7, 0, 1, 2)]


def test_no_txnindex_when_other_writer_only_committed(
    path: Path,
) -> None:
    index = path / f"{0:020d}.txnindex"
    with open_shared(path) as other:
        with open_shared(path) as first:
            # In the first round, `one` opens the partition again.
            for number in range(2):
                other.append_batch(batch(b"%d" % number, 7, number, transactional=True))
                other.end_transaction(7, 0, commit=True)
                first.append(b"plain")
            assert first.host.writer.transactions.lacks_entries
            index.write_bytes(np.array([(0, 7, 0, 1, 1)], TXN_ENTRY).tobytes())
        assert not index.exists()
    with open_shared(path) as log:
        values = [record.value for record in log.read(0, isolation="read_committed")]
        assert values == [b"0", b"plain", b"1", b"plain"]


def test_txnindex_with_extra_entries_is_truncated(path: Path) -> None:
    index = path / f"{0:020d}.txnindex"
    with open_shared(path) as log:
        log.append_batch(batch(b"0", 7, 0, transactional=True))
        index.write_bytes(np.array([(0, 7, 0, 1, 2)] * 3, TXN_ENTRY).tobytes())
        log.end_transaction(7, 0, commit=False)
        assert np.frombuffer(index.read_bytes(), TXN_ENTRY).tolist() == [
            (0, 7, 0, 1, 2)
        ]


def test_tail_is_woken_by_another_writer(both: tuple[logcore.Log, logcore.Log]) -> None:
    first, other = both
    values: list[bytes | None] = []

    def follow() -> None:
        values.extend(record.value for record in first.tail(0, timeout=300))

    thread = threading.Thread(target=follow)
    thread.start()
    for number in range(5):
        other.append(b"%d" % number)
    deadline = time.monotonic() + 300
    while len(values) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    first.close()
    thread.join()
    assert values == [b"0", b"1", b"2", b"3", b"4"]


def test_truncations_deletions_and_epochs_reach_other_writers(
    both: tuple[logcore.Log, logcore.Log],
) -> None:
    first, other = both
    first.append_many([(None, b"%d" % number) for number in range(100)])
    first.roll()
    other.append_many([(None, b"%d" % number) for number in range(100, 200)])
    other.truncate(150)
    assert first.append(b"new").offset == 150
    other.delete_records(120)
    first.refresh()
    assert first.log_start_offset == 120
    first.begin_epoch(4)
    first.append(b"of epoch 4")
    assert other.append(b"of epoch 4 too").offset == 152
    assert other.leader_epoch == 4
    assert other.end_of_epoch(0) == (0, 151)


def test_lock_record_of_an_earlier_run_is_ignored(path: Path) -> None:
    """A program that does not use lock records may have truncated the log after all
    writers closed it.
    """
    with open_shared(path, config={}) as log:
        log.append(b"1")
        size = log.statistics().size_bytes
        log.append(b"2")
    os.truncate(path / "00000000000000000000.log", size)
    (path.parent / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 1\n")
    with open_shared(path, config={}) as log:
        assert log.append(b"3").offset == 1


def test_lock_timeout_names_the_process_that_holds_the_lock(
    both: tuple[logcore.Log, logcore.Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = both
    monkeypatch.setattr(shared_lock, "LOCK_WAIT_SECONDS", 0.01)
    first.append(b"1")
    with (
        first.host.writer.state.lock,
        pytest.raises(logcore.LogLockedError, match=f"process {os.getpid()}") as caught,
    ):
        other.append(b"2")
    assert caught.value.retriable
    assert other.append(b"2").offset == 1


def test_waiting_continues_while_other_writers_make_progress(path: Path) -> None:
    """Locks are not granted in the order of the requests."""

    class Starving(OsFS):
        waits = 0

        def lock_byte(
            self, handle: int, byte: int, *, timeout_ms: int = 0, shared: bool = False
        ) -> bool:
            if self.waits and timeout_ms:
                self.waits -= 1
                other.append(b"again")
                return False
            return not self.waits and super().lock_byte(
                handle, byte, timeout_ms=timeout_ms, shared=shared
            )

    starving = Starving()
    with (
        logcore.open(
            path, create=True, shared=True, config=CONFIG, fs=starving
        ) as first,
        open_shared(path) as other,
    ):
        starving.waits = 3
        assert first.append(b"1").offset == 3
        assert starving.waits == 0


def tear_next(log: logcore.Log, written_bytes: int) -> None:
    """Write the first `written_bytes` bytes of the next durable end, as a kill during
    that write would leave them.
    """
    lock: Any = log.host.writer.sharing._write_lock  # type: ignore[union-attr]
    with open(Path(log.path) / LOCK_RECORD, "r+b") as file:
        file.seek(shared_lock._SYNCED_AT)
        newest = lock._newest_slot(file.read(shared_lock._SYNCED_BYTES))
        file.seek(shared_lock._SYNCED_AT + shared_lock._SYNCED.size - newest.at)
        file.write(b"\xa5" * written_bytes)


@pytest.mark.parametrize("written_bytes", [1, 40, 111])
def test_kill_while_writing_the_durable_end_does_not_affect_others(
    path: Path, written_bytes: int
) -> None:
    with open_shared(path) as first, open_shared(path) as other:
        following = first.tail(0)
        for value in (b"0", b"1", b"2"):
            first.append(value)
            tear_next(first, written_bytes)
            other.append(value + b"'")
            tear_next(first, written_bytes)
        assert [next(following).value for _ in range(6)] == [
            b"0",
            b"0'",
            b"1",
            b"1'",
            b"2",
            b"2'",
        ]
        with open_shared(path) as third:
            assert third.durable_end_offset == 6
        tear_next(first, written_bytes)
        assert first.append(b"3").offset == 6
        assert next(following).value == b"3"
        assert first.times_truncated == 0


def test_durable_end_with_the_newer_number_is_used(path: Path) -> None:
    with open_shared(path) as shared:
        lock: Any = shared.host.writer.sharing._write_lock  # type: ignore[union-attr]
        with lock.publishing.held():
            for end in range(5):
                lock.write_durable_end(shared_lock.DurableEnd(end, 7))
                assert lock.read_durable_end() == shared_lock.DurableEnd(end, 7)
                assert lock.read_records()[1] == shared_lock.DurableEnd(end, 7)


def test_many_recoveries_are_not_a_truncation(path: Path) -> None:
    """More recoveries than the lock record stores happen between two reads of a tail."""
    with open_shared(path) as first, open_shared(path) as other:
        for number in range(5):
            first.append(b"%d" % number)
        following = first.tail(0)
        assert [next(following).value for _ in range(5)] == [
            b"0",
            b"1",
            b"2",
            b"3",
            b"4",
        ]
        for _ in range(2 * shared_lock._MAX_TRUNCATIONS):
            lock: Any = other.host.writer.sharing._write_lock  # type: ignore[union-attr]
            lock.acquire()
            lock.mark_busy()  # and dies
            lock.release()
            other.append(b"again")
        assert next(following).value == b"again"


@pytest.mark.parametrize("offsets", [[5, 9, 3, *range(20, 29)], [*range(20, 40)]])
def test_oldest_stored_truncation_covers_all_earlier_ones(offsets: list[int]) -> None:
    synced = shared_lock.DurableEnd(100, 1 << 60)
    known = [synced]
    for offset in offsets:
        synced = synced.truncated(offset)
        known.append(synced)
    for number, before in enumerate(known[:-1]):
        lowest = synced.lowest_truncation_since(before.truncations, 0)
        assert lowest is not None
        assert lowest <= min(offsets[number:])
        if len(offsets) - number < shared_lock._MAX_TRUNCATIONS:
            assert lowest == min(offsets[number:])
    assert synced.lowest_truncation_since(synced.truncations, 0) is None
    assert synced.lowest_truncation_since(12345, 2) == 2, "counted from another start"
    assert synced.lowest_truncation_since(synced.truncations + 1, 2) == 2


def test_record_truncated_before_its_thread_waits_is_not_acknowledged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refresh in the same process has already processed the truncation, so that the
    waiting thread sees no new one.
    """
    with open_shared(path) as first, open_shared(path) as other:
        for number in range(5):
            first.append(b"%d" % number)
        acknowledge = first.host.writer.acknowledge

        def cut_first(*given: Any) -> Any:
            other.truncate(3)
            first.refresh()
            return acknowledge(*given)

        monkeypatch.setattr(first.host.writer, "acknowledge", cut_first)
        with pytest.raises(logcore.DurabilityUnknownError):
            first.append(b"own")


@pytest.mark.parametrize("policy", ["group", "always"])
def test_lock_timeout_after_the_write_leaves_durability_unknown(
    path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process is paused while it writes the durable end."""
    monkeypatch.setattr("logcore.fs.byte_lock.LOCK_WAIT_SECONDS", 0.01)
    with (
        open_shared(path, durability=policy) as first,
        open_shared(path, durability=policy) as other,
    ):
        first.append(b"0")
        lock: Any = other.host.writer.sharing._write_lock  # type: ignore[union-attr]
        with (
            lock.publishing.held(),
            pytest.raises(logcore.DurabilityUnknownError) as caught,
        ):
            first.append(b"1")
        assert isinstance(caught.value.__cause__, logcore.LogLockedError)
        first.flush()
        assert [record.value for record in first.read(0)] == [b"0", b"1"]


def test_open_with_another_durability_is_refused_each_time(path: Path) -> None:
    with open_shared(path, durability="group") as writer:
        writer.append(b"0")
        for _ in range(3):
            with pytest.raises(logcore.InvalidConfigError, match="another durability"):
                open_shared(path, durability="os")
        assert writer.append(b"1").offset == 1
        assert writer.times_truncated == 0, "no recovery has run"


def test_failed_sync_stops_other_writers_until_they_reopen(path: Path) -> None:
    class Failing(OsFS):
        fails = False

        def fdatasync(self, handle: int) -> None:
            if self.fails:
                raise logcore.StorageWriteError("sync failed", path="x") from OSError(
                    errno.EIO, "error"
                )
            super().fdatasync(handle)

    failing = Failing()
    with (
        logcore.open(
            path, create=True, shared=True, config=CONFIG, fs=failing
        ) as first,
        open_shared(path) as other,
    ):
        other.append(b"1")
        failing.fails = True
        with pytest.raises(logcore.DurabilityUnknownError):
            first.append(b"2")
        failing.fails = False
        with pytest.raises(logcore.LogFailedError):
            other.append(b"3")
        other.close()
        with open_shared(path) as reopened:
            reopened.append(b"4")
            values = [record.value for record in reopened.read(0)]
            assert values in ([b"1", b"4"], [b"1", b"2", b"4"])


def test_sync_begun_before_a_truncation_does_not_cover_later_records(
    path: Path,
) -> None:
    hooked = HookedFS()
    with (
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=hooked) as first,
        open_shared(path) as other,
        logcore.open(path, read_only=True) as reader,
    ):
        first.append(b"0")
        first.append_many([(None, b"1"), (None, b"2")], durability="os")

        def cut() -> None:
            other.truncate(1)
            other.append_many([(None, b"one"), (None, b"two")], durability="os")

        hooked.during = cut
        with pytest.raises(logcore.DurabilityUnknownError):
            first.flush()
        reader.refresh()
        assert reader.high_watermark == 1, (
            "the records of the other writer were not synced"
        )
        first.flush()
        reader.refresh()
        assert [record.value for record in reader.read(0)] == [b"0", b"one", b"two"]


def test_sync_present_waits_for_the_records_after_a_truncation(path: Path) -> None:
    """The other writer truncates the log again while this one retries. The final
    contents of the log are synced.
    """
    hooked = HookedFS()
    with (
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=hooked) as first,
        open_shared(path) as other,
    ):
        first.append(b"0")
        first.append_many([(None, b"1"), (None, b"2")], durability="os")
        cuts = 0

        def cut() -> None:
            nonlocal cuts
            cuts += 1
            other.truncate(1)
            other.append_many([(None, b"one"), (None, b"two")], durability="os")
            if cuts < 3:
                hooked.during = cut

        hooked.during = cut
        sync_present(first)
        assert cuts == 3
        assert first.durable_end_offset == first.log_end_offset == 3
        assert [record.value for record in first.read(0)] == [b"0", b"one", b"two"]


def test_sync_present_raises_after_a_failed_sync(path: Path) -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, durability="os", fs=disk) as log:
        log.append(b"0")
        disk.faults = FaultPlan(Fault("fdatasync", errno.EIO))
        with pytest.raises(logcore.DurabilityUnknownError):
            sync_present(log)


def test_sync_covers_only_records_written_before_it_began(path: Path) -> None:
    hooked = HookedFS()
    with (
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=hooked) as first,
        open_shared(path) as other,
    ):
        first.append(b"0", durability="os")
        hooked.during = lambda: first.append(b"1", durability="os")
        first.flush()
        assert first.log_end_offset == 2
        assert first.durable_end_offset == 1
        other.refresh()
        assert other.high_watermark == 1


def test_append_after_a_failed_read_continues_at_the_right_offset(path: Path) -> None:
    class Flaky(OsFS):
        fails = False

        def pread(self, handle: int, size: int, position: int) -> bytes:
            if self.fails and self.path_of(handle).endswith(".log"):
                self.fails = False
                raise logcore.StorageReadError("read failed", path="x")
            return super().pread(handle, size, position)

    flaky = Flaky()
    with (
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=flaky) as first,
        open_shared(path) as other,
    ):
        first.append(b"0")
        other.append_many([(None, b"1"), (None, b"2")])
        flaky.fails = True
        with pytest.raises(logcore.StorageReadError):
            first.append(b"not stored")
        assert first.append(b"3").offset == 3
        assert [record.value for record in first.read(0)] == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_producer_state_is_correct_after_a_failed_read_of_a_marker(
    path: Path, nth: int
) -> None:
    class Flaky(OsFS):
        reads_until_failure = 0

        def pread(self, handle: int, size: int, position: int) -> bytes:
            if self.reads_until_failure and self.path_of(handle).endswith(".log"):
                self.reads_until_failure -= 1
                if not self.reads_until_failure:
                    raise logcore.StorageReadError("read failed", path="x")
            return super().pread(handle, size, position)

    flaky = Flaky()
    with (
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=flaky) as first,
        open_shared(path) as other,
    ):
        first.append_batch(batch(b"0", 7, 0, transactional=True))
        other.append_batch(batch(b"1", 7, 1, transactional=True))
        other.end_transaction(7, 0, commit=True)
        other.append_batch(batch(b"3", 8, 0))
        flaky.reads_until_failure = nth
        with pytest.raises(logcore.StorageReadError):
            first.append(b"not stored")
        assert nth == 1 or not first.host.writer.producers.is_known
        assert first.append_batch(batch(b"3", 8, 0)).offset == 3
        assert first.append_batch(batch(b"1", 7, 1, transactional=True)).offset == 1
        assert first.append_batch(batch(b"4", 7, 2, transactional=True)).offset == 4


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_batches_of_another_writer_are_indexed_for_any_read_size(
    both: tuple[logcore.Log, logcore.Log], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("logcore.segment._WALK_BYTES", at_once)
    first, other = both
    first.append(b"first")
    for number in range(8):
        other.append_batch(batch(b"%d" % number * 20, 7, number))
    assert first.append_batch(batch(b"7" * 20, 7, 7)).offset == 8
    assert first.append(b"last").offset == 9
    assert [first.get(offset).offset for offset in range(10)] == list(range(10))
    indexes = [log.host.writer.active.offset_index for log in both]
    other.refresh()
    assert bytes(indexes[0].data) == bytes(indexes[1].data)


def test_unsynced_records_are_not_visible_to_other_writers(
    both: tuple[logcore.Log, logcore.Log],
) -> None:
    first, other = both
    first.append(b"0", durability="os")
    other.refresh()
    assert (other.log_end_offset, other.high_watermark) == (1, 0)
    first.flush()
    assert other.refresh()
    assert other.high_watermark == 1


def test_truncation_lowers_the_recovery_point_saved_by_another_writer(
    path: Path,
) -> None:
    with open_shared(path) as other:
        with open_shared(path) as first:
            first.append_many([(None, b"%d" % number) for number in range(10)])
        other.truncate(5)
        recorded = (path.parent / "recovery-point-offset-checkpoint").read_text()
        assert recorded == "0\n1\nt 0 5\n"


def test_compaction_keeps_its_files_when_another_writer_compacts(path: Path) -> None:
    compacted = {**CONFIG, "cleanup.policy": "compact"}
    with (
        open_shared(path, config=compacted) as shared,
        open_shared(path, config=compacted) as other,
    ):
        for number in range(60):
            shared.append(b"x" * 50, key=b"%d" % (number % 3))
        other.refresh()
        first = (path / "00000000000000000000.log").read_bytes()
        with rewriting_of(shared) as view:
            assert logcore.clean(other, force=True) is not None
            assert bytes(view.sealed[0].view()) == first
            assert (path / "00000000000000000000.log").read_bytes() != first


def test_shared_and_exclusive_writers_exclude_each_other(path: Path) -> None:
    with logcore.open(path, create=True) as log:
        log.append(b"1")
        with pytest.raises(logcore.LogLockedError):
            open_shared(path)
    with open_shared(path) as log:
        with pytest.raises(logcore.LogLockedError):
            logcore.open(path, fs=OsFS())
        assert log.append(b"2").offset == 1
    with pytest.raises(logcore.InvalidConfigError):
        open_shared(path, replicated=True)


def test_partitions_with_nearly_equal_hashes_have_separate_locks(
    tmp_path: Path,
) -> None:
    """The first 40 bits of the two hashes are equal. Releasing a byte releases every
    lock that uses this byte.
    """
    fs = OsFS()
    keys = [("orders", 882_895), ("orders", 1_311_289)]
    handle = fs.open(str(tmp_path / "lock"), write=True, create=True)
    other_handle = fs.open(str(tmp_path / "lock"), write=True)
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    first, second = [
        shared_lock.WriteLock(fs, handle, key, str(tmp_path / str(number)))
        for number, key in enumerate(keys)
    ]
    assert first.acquire() and second.acquire()
    first.release()
    others = [
        shared_lock.WriteLock(fs, other_handle, key, str(tmp_path / str(number)))
        for number, key in enumerate(keys)
    ]
    assert [write_lock.acquire(waits=False) for write_lock in others] == [True, False]
    fs.close(other_handle)
    fs.close(handle)
