"""Two writers of one partition, each with an opening of its own of all files, as two
processes have.
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
from logcore.metadata.checkpoint import TURN
from logcore.partition import shared_lock
from logcore.testing import Fault, FaultPlan, SimulatedDisk

CONFIG = {"segment.bytes": 2_000, "index.interval.bytes": 100}


def opened(path: Path, **options: Any) -> logcore.Log:
    return logcore.open(
        path, create=True, shared=True, fs=OsFS(), **{"config": CONFIG, **options}
    )


class Hooked(OsFS):
    """during: called once, by the next sync of a log, when it is over for the disk and
    not for the log.
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
    with opened(path) as one, opened(path) as other:
        yield one, other


def batch(
    value: bytes, producer_id: int, sequence: int, *, transactional: bool = False
) -> bytes:
    return recordbatch.encode(
        [(None, value)],
        now_ms=time.time_ns()
        // 1_000_000,  # the producers of old batches are forgotten
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        transactional=transactional,
    )


def test_transactions_of_the_other_are_seen_by_who_has_looked_before(
    both: tuple[logcore.Log, logcore.Log],
) -> None:
    one, other = both
    one.append(b"plain")
    for number, commit in enumerate((False, True)):
        assert one.last_stable_offset == one.log_end_offset
        other.append_batch(batch(b"%d" % commit, 7, number, transactional=True))
        one.append(b"between")
        assert one.last_stable_offset == one.log_end_offset - 2
        other.end_transaction(7, 0, commit=commit)
        one.refresh()
        assert one.last_stable_offset == one.log_end_offset
    values = [record.value for record in one.read(0, isolation="read_committed")]
    assert values == [b"plain", b"between", b"1", b"between"]


def test_offsets_go_on_where_the_other_ended(
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


def test_what_one_has_synced_the_other_need_not(
    both: tuple[logcore.Log, logcore.Log],
) -> None:
    one, other = both
    one.append(b"1", durability="os")
    receipt = other.append(b"2")
    assert receipt.durability == "disk"
    assert one.refresh()
    assert one.durable_end_offset == one.high_watermark == 2
    syncs = one.statistics().syncs
    one.flush()
    assert one.statistics().syncs == syncs


def test_a_batch_that_the_other_has_stored_is_not_stored_again(
    both: tuple[logcore.Log, logcore.Log],
) -> None:
    one, other = both
    for sequence in range(6):
        first = one.append_batch(batch(b"%d" % sequence, 7, sequence))
        assert (
            other.append_batch(batch(b"%d" % sequence, 7, sequence)).offset
            == first.offset
        )
    with pytest.raises(logcore.OutOfOrderSequenceError):
        other.append_batch(batch(b"gap", 7, 9))
    assert one.log_end_offset == 6


def test_the_index_names_what_either_has_aborted(
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
        for segment in both[0].writer.state.segments[:-1]
    ]
    entries = [
        np.frombuffer(index.read_bytes(), TXN_ENTRY)["last_offset"]
        for index in indexes
        if index.exists()
    ]
    found = sorted(np.concatenate(entries).tolist())
    assert found == [2 * number + 1 for number in range(24) if number % 4]


def test_an_abort_is_in_the_index_at_once(path: Path) -> None:
    """For a Kafka that reads the files after a kill. Also where no other process has
    appended a marker.
    """
    with opened(path) as log:
        log.append_batch(batch(b"0", 7, 0, transactional=True))
        log.end_transaction(7, 0, commit=False)
        entries = np.frombuffer((path / f"{0:020d}.txnindex").read_bytes(), TXN_ENTRY)
        assert entries.tolist() == [(0, 7, 0, 1, 2)]


def test_where_the_other_has_committed_alone_there_is_no_index_of_what_was_aborted(
    path: Path,
) -> None:
    index = path / f"{0:020d}.txnindex"
    with opened(path) as other:
        with opened(path) as one:
            for number in range(2):  # the first time, one opens the partition again
                other.append_batch(batch(b"%d" % number, 7, number, transactional=True))
                other.end_transaction(7, 0, commit=True)
                one.append(b"plain")
            assert one.writer.transactions.lacks_entries
            index.write_bytes(np.array([(0, 7, 0, 1, 1)], TXN_ENTRY).tobytes())
        assert not index.exists()
    with opened(path) as log:
        values = [record.value for record in log.read(0, isolation="read_committed")]
        assert values == [b"0", b"plain", b"1", b"plain"]


def test_an_index_that_names_more_than_was_aborted_is_made_shorter(path: Path) -> None:
    index = path / f"{0:020d}.txnindex"
    with opened(path) as log:
        log.append_batch(batch(b"0", 7, 0, transactional=True))
        index.write_bytes(np.array([(0, 7, 0, 1, 2)] * 3, TXN_ENTRY).tobytes())
        log.end_transaction(7, 0, commit=False)
        assert np.frombuffer(index.read_bytes(), TXN_ENTRY).tolist() == [
            (0, 7, 0, 1, 2)
        ]


def test_a_tail_is_woken_by_the_other(both: tuple[logcore.Log, logcore.Log]) -> None:
    one, other = both
    found: list[bytes | None] = []

    def follow() -> None:
        found.extend(record.value for record in one.tail(0, timeout=300))

    thread = threading.Thread(target=follow)
    thread.start()
    for number in range(5):
        other.append(b"%d" % number)
    deadline = time.monotonic() + 300
    while len(found) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    one.close()
    thread.join()
    assert found == [b"0", b"1", b"2", b"3", b"4"]


def test_truncations_deletions_and_settings_reach_the_other(
    both: tuple[logcore.Log, logcore.Log],
) -> None:
    one, other = both
    one.append_many([(None, b"%d" % number) for number in range(100)])
    one.roll()
    other.append_many([(None, b"%d" % number) for number in range(100, 200)])
    other.truncate(150)
    assert one.append(b"new").offset == 150
    other.delete_records(120)
    one.refresh()
    assert one.log_start_offset == 120
    one.begin_epoch(4)
    one.append(b"of epoch 4")
    assert other.append(b"of epoch 4 too").offset == 152
    assert other.leader_epoch == 4
    assert other.end_of_epoch(0) == (0, 151)


def test_a_note_of_an_earlier_life_says_nothing(path: Path) -> None:
    """Another program, which knows nothing of the note, may have cut the log since all
    processes left it.
    """
    with opened(path, config={}) as log:
        log.append(b"1")
        size = log.statistics().size_bytes
        log.append(b"2")
    os.truncate(path / "00000000000000000000.log", size)
    (path.parent / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 1\n")
    with opened(path, config={}) as log:
        assert log.append(b"3").offset == 1


def test_who_waits_too_long_learns_whose_turn_it_is(
    both: tuple[logcore.Log, logcore.Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = both
    monkeypatch.setattr(shared_lock, "TURN_SECONDS", 0.01)
    one.append(b"1")
    with (
        one.writer.state.lock,
        pytest.raises(logcore.LogLockedError, match=f"process {os.getpid()}") as met,
    ):
        other.append(b"2")
    assert met.value.retriable
    assert other.append(b"2").offset == 1


def test_who_finds_others_taking_turns_waits_on(path: Path) -> None:
    """Locks are not given in the order in which they were asked for."""

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
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=starving) as one,
        opened(path) as other,
    ):
        starving.waits = 3
        assert one.append(b"1").offset == 3
        assert starving.waits == 0


def tear_next(log: logcore.Log, left: int) -> None:
    """What a kill in the middle of the next note of what is on disk leaves: `left` of
    its first bytes.
    """
    turn: Any = log.writer.sharing._turn  # type: ignore[union-attr]
    with open(Path(log.path) / TURN, "r+b") as file:
        file.seek(shared_lock._SYNCED_AT)
        newest = turn._newest(file.read(shared_lock._SYNCED_BYTES))
        file.seek(shared_lock._SYNCED_AT + shared_lock._SYNCED.size - newest.at)
        file.write(b"\xa5" * left)


@pytest.mark.parametrize("left", [1, 40, 111])
def test_a_kill_in_the_middle_of_noting_what_is_on_disk_costs_the_others_nothing(
    path: Path, left: int
) -> None:
    with opened(path) as one, opened(path) as other:
        following = one.tail(0)
        for value in (b"0", b"1", b"2"):
            one.append(value)
            tear_next(one, left)
            other.append(value + b"'")
            tear_next(one, left)
        assert [next(following).value for _ in range(6)] == [
            b"0",
            b"0'",
            b"1",
            b"1'",
            b"2",
            b"2'",
        ]
        with opened(path) as third:
            assert third.durable_end_offset == 6
        tear_next(one, left)
        assert one.append(b"3").offset == 6
        assert next(following).value == b"3"
        assert one.times_truncated == 0


def test_what_is_on_disk_has_the_newer_number_of_two(path: Path) -> None:
    with opened(path) as one:
        turn: Any = one.writer.sharing._turn  # type: ignore[union-attr]
        with turn.publishing.held():
            for end in range(5):
                turn.note_synced(shared_lock.DurableEnd(end, 7))
                assert turn.synced() == shared_lock.DurableEnd(end, 7)
                assert turn.look()[1] == shared_lock.DurableEnd(end, 7)


def test_many_recoveries_are_no_truncation(path: Path) -> None:
    """More than are remembered one by one, while a reader looks away."""
    with opened(path) as one, opened(path) as other:
        for number in range(5):
            one.append(b"%d" % number)
        following = one.tail(0)
        assert [next(following).value for _ in range(5)] == [
            b"0",
            b"1",
            b"2",
            b"3",
            b"4",
        ]
        for _ in range(2 * shared_lock._CUTS):
            turn: Any = other.writer.sharing._turn  # type: ignore[union-attr]
            turn.take()
            turn.begin()  # and dies
            turn.give()
            other.append(b"again")
        assert next(following).value == b"again"


@pytest.mark.parametrize("offsets", [[5, 9, 3, *range(20, 29)], [*range(20, 40)]])
def test_the_oldest_cut_stands_for_all_before_it(offsets: list[int]) -> None:
    synced = shared_lock.DurableEnd(100, 1 << 60)
    known = [synced]
    for offset in offsets:
        synced = synced.cut(offset)
        known.append(synced)
    for number, before in enumerate(known[:-1]):
        found = synced.lowest_cut_since(before.cuts, 0)
        assert found is not None
        assert found <= min(offsets[number:])
        if len(offsets) - number < shared_lock._CUTS:
            assert found == min(offsets[number:])
    assert synced.lowest_cut_since(synced.cuts, 0) is None
    assert synced.lowest_cut_since(12345, 2) == 2, "counted from another beginning"
    assert synced.lowest_cut_since(synced.cuts + 1, 2) == 2


def test_a_record_that_was_cut_before_its_thread_waits_is_not_acknowledged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread of its process has taken in the cut, so that no cut comes while it
    waits.
    """
    with opened(path) as one, opened(path) as other:
        for number in range(5):
            one.append(b"%d" % number)
        acknowledge = one.writer.acknowledge

        def cut_first(*given: Any) -> Any:
            other.truncate(3)
            one.refresh()
            return acknowledge(*given)

        monkeypatch.setattr(one.writer, "acknowledge", cut_first)
        with pytest.raises(logcore.DurabilityUnknownError):
            one.append(b"mine")


@pytest.mark.parametrize("policy", ["group", "always"])
def test_an_error_behind_the_write_invites_no_second_one(
    path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other is stopped while it notes what is on disk."""
    monkeypatch.setattr("logcore.fs.byte_lock.TURN_SECONDS", 0.01)
    with (
        opened(path, durability=policy) as one,
        opened(path, durability=policy) as other,
    ):
        one.append(b"0")
        turn: Any = other.writer.sharing._turn  # type: ignore[union-attr]
        with (
            turn.publishing.held(),
            pytest.raises(logcore.DurabilityUnknownError) as met,
        ):
            one.append(b"1")
        assert isinstance(met.value.__cause__, logcore.LogLockedError)
        one.flush()
        assert [record.value for record in one.read(0)] == [b"0", b"1"]


def test_another_durability_is_refused_each_time(path: Path) -> None:
    with opened(path, durability="group") as one:
        one.append(b"0")
        for _ in range(3):
            with pytest.raises(logcore.InvalidConfigError, match="another durability"):
                opened(path, durability="os")
        assert one.append(b"1").offset == 1
        assert one.times_truncated == 0, "nothing was recovered"


def test_a_sync_that_fails_stops_the_other_until_it_is_opened_again(path: Path) -> None:
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
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=failing) as one,
        opened(path) as other,
    ):
        other.append(b"1")
        failing.fails = True
        with pytest.raises(logcore.DurabilityUnknownError):
            one.append(b"2")
        failing.fails = False
        with pytest.raises(logcore.LogFailedError):
            other.append(b"3")
        other.close()
        with opened(path) as again:
            again.append(b"4")
            values = [record.value for record in again.read(0)]
            assert values in ([b"1", b"4"], [b"1", b"2", b"4"])


def test_a_sync_that_began_before_a_cut_says_nothing_of_what_came_behind_it(
    path: Path,
) -> None:
    hooked = Hooked()
    with (
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=hooked) as one,
        opened(path) as other,
        logcore.open(path, read_only=True) as reader,
    ):
        one.append(b"0")
        one.append_many([(None, b"1"), (None, b"2")], durability="os")

        def cut() -> None:
            other.truncate(1)
            other.append_many([(None, b"one"), (None, b"two")], durability="os")

        hooked.during = cut
        with pytest.raises(logcore.DurabilityUnknownError):
            one.flush()
        reader.refresh()
        assert reader.high_watermark == 1, "what the other appended was not synced"
        one.flush()
        reader.refresh()
        assert [record.value for record in reader.read(0)] == [b"0", b"one", b"two"]


def test_decisions_wait_for_what_the_log_holds_after_a_cut(path: Path) -> None:
    """The other also cuts its own log while this one tries again: what is waited for is
    what there is in the end.
    """
    hooked = Hooked()
    with (
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=hooked) as one,
        opened(path) as other,
    ):
        one.append(b"0")
        one.append_many([(None, b"1"), (None, b"2")], durability="os")
        cuts = 0

        def cut() -> None:
            nonlocal cuts
            cuts += 1
            other.truncate(1)
            other.append_many([(None, b"one"), (None, b"two")], durability="os")
            if cuts < 3:
                hooked.during = cut

        hooked.during = cut
        sync_present(one)
        assert cuts == 3
        assert one.durable_end_offset == one.log_end_offset == 3
        assert [record.value for record in one.read(0)] == [b"0", b"one", b"two"]


def test_decisions_are_not_made_from_what_a_failed_sync_left(path: Path) -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, durability="os", fs=disk) as log:
        log.append(b"0")
        disk.faults = FaultPlan(Fault("fdatasync", errno.EIO))
        with pytest.raises(logcore.DurabilityUnknownError):
            sync_present(log)


def test_a_sync_covers_what_was_written_before_it_began(path: Path) -> None:
    hooked = Hooked()
    with (
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=hooked) as one,
        opened(path) as other,
    ):
        one.append(b"0", durability="os")
        hooked.during = lambda: one.append(b"1", durability="os")
        one.flush()
        assert one.log_end_offset == 2
        assert one.durable_end_offset == 1
        other.refresh()
        assert other.high_watermark == 1


def test_a_read_that_fails_once_leaves_nothing_half_known(path: Path) -> None:
    class Flaky(OsFS):
        fails = False

        def pread(self, handle: int, size: int, position: int) -> bytes:
            if self.fails and self.path_of(handle).endswith(".log"):
                self.fails = False
                raise logcore.StorageReadError("read failed", path="x")
            return super().pread(handle, size, position)

    flaky = Flaky()
    with (
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=flaky) as one,
        opened(path) as other,
    ):
        one.append(b"0")
        other.append_many([(None, b"1"), (None, b"2")])
        flaky.fails = True
        with pytest.raises(logcore.StorageReadError):
            one.append(b"not stored")
        assert one.append(b"3").offset == 3
        assert [record.value for record in one.read(0)] == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_producers_are_not_half_known_after_a_marker_that_could_not_be_read(
    path: Path, nth: int
) -> None:
    class Flaky(OsFS):
        left = 0

        def pread(self, handle: int, size: int, position: int) -> bytes:
            if self.left and self.path_of(handle).endswith(".log"):
                self.left -= 1
                if not self.left:
                    raise logcore.StorageReadError("read failed", path="x")
            return super().pread(handle, size, position)

    flaky = Flaky()
    with (
        logcore.open(path, create=True, shared=True, config=CONFIG, fs=flaky) as one,
        opened(path) as other,
    ):
        one.append_batch(batch(b"0", 7, 0, transactional=True))
        other.append_batch(batch(b"1", 7, 1, transactional=True))
        other.end_transaction(7, 0, commit=True)
        other.append_batch(batch(b"3", 8, 0))
        flaky.left = nth
        with pytest.raises(logcore.StorageReadError):
            one.append(b"not stored")
        assert nth == 1 or not one.writer.producers.is_known
        assert one.append_batch(batch(b"3", 8, 0)).offset == 3
        assert one.append_batch(batch(b"1", 7, 1, transactional=True)).offset == 1
        assert one.append_batch(batch(b"4", 7, 2, transactional=True)).offset == 4


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_what_the_other_appended_is_taken_in_whatever_is_read_at_once(
    both: tuple[logcore.Log, logcore.Log], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("logcore.segment._WALK_BYTES", at_once)
    one, other = both
    one.append(b"first")
    for number in range(8):
        other.append_batch(batch(b"%d" % number * 20, 7, number))
    assert one.append_batch(batch(b"7" * 20, 7, 7)).offset == 8
    assert one.append(b"last").offset == 9
    assert [one.get(offset).offset for offset in range(10)] == list(range(10))
    indexes = [log.writer.active.offset_index for log in both]
    other.refresh()
    assert bytes(indexes[0].data) == bytes(indexes[1].data)


def test_what_is_not_synced_is_not_shown_elsewhere(
    both: tuple[logcore.Log, logcore.Log],
) -> None:
    one, other = both
    one.append(b"0", durability="os")
    other.refresh()
    assert (other.log_end_offset, other.high_watermark) == (1, 0)
    one.flush()
    assert other.refresh()
    assert other.high_watermark == 1


def test_a_cut_lowers_the_recovery_point_that_another_has_noted(path: Path) -> None:
    with opened(path) as other:
        with opened(path) as one:
            one.append_many([(None, b"%d" % number) for number in range(10)])
        other.truncate(5)
        noted = (path.parent / "recovery-point-offset-checkpoint").read_text()
        assert noted == "0\n1\nt 0 5\n"


def test_a_compaction_goes_on_with_the_files_it_began_with(path: Path) -> None:
    compacted = {**CONFIG, "cleanup.policy": "compact"}
    with opened(path, config=compacted) as one, opened(path, config=compacted) as other:
        for number in range(60):
            one.append(b"x" * 50, key=b"%d" % (number % 3))
        other.refresh()
        first = (path / "00000000000000000000.log").read_bytes()
        with rewriting_of(one) as view:
            assert logcore.clean(other, force=True) is not None
            assert bytes(view.sealed[0].view()) == first
            assert (path / "00000000000000000000.log").read_bytes() != first


def test_a_log_with_one_writer_stays_so(path: Path) -> None:
    with logcore.open(path, create=True) as log:
        log.append(b"1")
        with pytest.raises(logcore.LogLockedError):
            opened(path)
    with opened(path) as log:
        with pytest.raises(logcore.LogLockedError):
            logcore.open(path, fs=OsFS())
        assert log.append(b"2").offset == 1
    with pytest.raises(logcore.InvalidConfigError):
        opened(path, replicated=True)


def test_partitions_whose_names_have_nearly_the_same_hash_have_turns_of_their_own(
    tmp_path: Path,
) -> None:
    """The first 40 bits of theirs are the same. Whoever gives a byte back gives back
    all turns that it stands for.
    """
    fs = OsFS()
    keys = [("orders", 882_895), ("orders", 1_311_289)]
    here = fs.open(str(tmp_path / "lock"), write=True, create=True)
    elsewhere = fs.open(str(tmp_path / "lock"), write=True)
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    first, second = [
        shared_lock.Turn(fs, here, key, str(tmp_path / str(n)))
        for n, key in enumerate(keys)
    ]
    assert first.take() and second.take()
    first.give()
    others = [
        shared_lock.Turn(fs, elsewhere, key, str(tmp_path / str(n)))
        for n, key in enumerate(keys)
    ]
    assert [one.take(waits=False) for one in others] == [True, False]
    fs.close(elsewhere)
    fs.close(here)
