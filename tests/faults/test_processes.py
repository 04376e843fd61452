"""Several processes with one log: one writer, many readers, crashes, forks, and a lock
that excludes a Java broker.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import fs as fs_module
from logcore.fs import OsFS
from logcore.fs.lock_holders import lock_holders
from logcore.fs.watch import Inotify, Polling
from logcore.log import open_log


def run(program: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


HOLD_LOCK = """
import sys, logcore
with logcore.open(sys.argv[1], create=True) as log:
    log.append(b"first")
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_second_writer_error_names_the_lock_holder(partition: Path) -> None:
    holder = run(HOLD_LOCK, partition)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    for name in ("orders-0", "orders-1"):  # one lock for the directory, as in Kafka
        with pytest.raises(logcore.LogLockedError) as caught:
            logcore.open(partition.parent / name, create=True)
        assert (caught.value.pid, caught.value.host) == (
            holder.pid,
            os.uname().nodename,
        )
        assert str(holder.pid) in str(caught.value)
        assert caught.value.retriable
    with logcore.open(partition, read_only=True) as log:
        assert [record.value for record in log.read(0)] == [b"first"]
    holder.communicate("\n")
    with logcore.open(partition) as log:
        assert log.append(b"second").offset == 1


def test_lock_of_a_killed_writer_is_released(partition: Path) -> None:
    holder = run(HOLD_LOCK, partition)
    assert holder.stdout is not None
    holder.stdout.readline()
    holder.kill()
    holder.communicate()
    with logcore.open(partition) as log:
        assert [record.value for record in log.read(0)] == [b"first"]


def test_process_opens_each_of_several_partitions_for_writing_once(
    partition: Path,
) -> None:
    with (
        logcore.open(partition, create=True) as first,
        logcore.open(partition.parent / "orders-1", create=True) as second,
    ):
        first.append(b"1")
        second.append(b"2")
        with pytest.raises(logcore.LogLockedError) as caught:
            logcore.open(partition)
        assert caught.value.pid == os.getpid()
    recovery_points = (
        partition.parent / "recovery-point-offset-checkpoint"
    ).read_text()
    assert recovery_points == "0\n2\norders 0 1\norders 1 1\n"
    with logcore.open(partition):
        pass


def test_lock_remains_after_its_file_was_opened_and_closed(partition: Path) -> None:
    with logcore.open(partition, create=True):
        # Opening and closing the file releases a POSIX record lock, but not this lock.
        (partition.parent / ".lock").read_bytes()
        command = [
            sys.executable,
            "-c",
            "import sys, logcore; logcore.open(sys.argv[1])",
            str(partition),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "LogLockedError" in result.stderr


def test_forked_child_cannot_append(partition: Path) -> None:
    with logcore.open(partition, create=True) as log:
        log.append(b"parent")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                log.append(b"child")
            except logcore.ForkedWriterError:
                log.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert log.append(b"parent again").offset == 1
        with pytest.raises(logcore.LogLockedError):
            open_log(partition, fs=OsFS())


def test_B37_append_in_a_forked_child_is_detected(
    partition: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_forked_child_cannot_append(partition)
    monkeypatch.setattr(
        OsFS, "forks", property(lambda self: 0, lambda self, count: None), raising=False
    )
    with pytest.raises(AssertionError):
        test_forked_child_cannot_append(partition.with_name("other-0"))


@pytest.mark.long
def test_B38_lock_that_another_close_releases_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_lock_remains_after_its_file_was_opened_and_closed(tmp_path / "a" / "t-0")
    monkeypatch.setattr(
        fs_module,
        "_lock_file",
        lambda handle: fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB),
    )
    with pytest.raises(AssertionError):
        test_lock_remains_after_its_file_was_opened_and_closed(tmp_path / "b" / "t-0")


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [
        "group",
        "os",
        *(
            pytest.param(policy, marks=pytest.mark.slow)
            for policy in ("always", "every(10)")
        ),
    ],
)
def test_killed_writer_loses_no_acknowledged_record(
    partition: Path, policy: str
) -> None:
    """A writer is killed by SIGKILL while it appends. Each record that it reported
    through a pipe must be in the log, and no other record.
    """
    program = """
import sys, logcore
with logcore.open(sys.argv[1], create=True, durability=sys.argv[2], config={"segment.bytes": 20_000}) as log:
    at = log.log_end_offset
    while True:
        count = at % 7 + 1
        receipt = log.append_many([(b"%d" % (at + step), b"value %d" % (at + step)) for step in range(count)])
        at = receipt.last_offset + 1
        print(at, flush=True)
"""
    for round_ in range(2):
        writer = run(program, partition, policy)
        assert writer.stdout is not None
        acknowledged = 0
        for _ in range(200 + 100 * round_):
            acknowledged = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        remaining_lines = writer.communicate()[0].split("\n")
        acknowledged = max(
            [acknowledged, *(int(line) for line in remaining_lines[:-1] if line)]
        )
        with logcore.open(partition, read_only=True) as reader:
            values = [record.value for record in reader.read(0)]
            assert len(values) >= acknowledged
        with logcore.open(partition, config={"segment.bytes": 20_000}) as log:
            records = list(log.read(0))
            assert len(records) >= acknowledged
            assert [record.value for record in records] == [
                b"value %d" % number for number in range(len(records))
            ]
            assert [record.value for record in records[: len(values)]] == values, (
                "visible records remain visible"
            )


APPEND = """
import sys, logcore
with logcore.open(sys.argv[1], create=True, durability=sys.argv[2], config={"segment.bytes": 700}) as log:
    print("open", flush=True)
    for line in sys.stdin:
        log.append(line.rstrip().encode())
"""


@pytest.mark.long
@pytest.mark.parametrize("policy", ["group", "os"])
@pytest.mark.parametrize("watch", [Inotify, Polling])
def test_tail_returns_each_record_of_another_process_once(
    partition: Path, policy: str, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OsFS, "watch", lambda self, *directories: watch(directories))
    writer = run(APPEND, partition, policy)
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdout.readline()
    with logcore.open(partition, read_only=True) as log:
        tail = log.tail(0, timeout=30)
        for number in range(60):
            print(f"line {number}", file=writer.stdin, flush=True)
            record = next(tail)
            assert (record.offset, record.value) == (number, b"line %d" % number)
        tail.close()
        writer.communicate()
        assert list(log.tail(58, timeout=0.05)) == list(log.read(58))
    assert len(list(partition.glob("*.log"))) > 3


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is a part of Linux")
@pytest.mark.parametrize("missing", ["eventfd", "directory"])
def test_watch_that_cannot_be_created_leaves_no_open_file(
    tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    path = tmp_path
    if missing == "eventfd":
        monkeypatch.setattr(os, "eventfd", fail)
    else:
        path = tmp_path / "missing"
    before = open_files()
    watch = OsFS().watch(str(path))
    assert isinstance(watch, Polling)
    assert open_files() == before
    assert watch.saw_removal is (missing == "directory")


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is a part of Linux")
def test_unclosed_watch_leaves_no_open_file(tmp_path: Path) -> None:
    before = open_files()
    watch = OsFS().watch(str(tmp_path))
    assert isinstance(watch, Inotify)
    assert len(open_files() - before) == 2
    del watch
    assert open_files() == before


def test_tail_wakes_in_its_own_process(partition: Path) -> None:
    with logcore.open(partition, create=True) as log:
        thread = threading.Thread(
            target=lambda: [log.append(b"%d" % number) for number in range(20)]
        )
        tail = log.tail(0, timeout=30)
        thread.start()
        assert [next(tail).value for _ in range(20)] == [
            b"%d" % number for number in range(20)
        ]
        thread.join()
        assert list(log.tail(timeout=0.01)) == []
        waiting_thread = threading.Thread(target=lambda: list(log.tail(20)))
        waiting_thread.start()
    waiting_thread.join(30)
    assert not waiting_thread.is_alive(), "closing the log ends the tail"


def test_readers_in_another_process_see_only_durable_records(partition: Path) -> None:
    with logcore.open(partition, create=True, durability="group") as log:
        log.append(b"on disk")
        log.append(b"only written", durability="os")
        with logcore.open(partition, read_only=True) as reader:
            assert (reader.high_watermark, reader.log_end_offset) == (1, 2)
            assert log.high_watermark == 1
            log.flush()
            assert reader.refresh()
            assert [record.value for record in reader.read(0)] == [
                b"on disk",
                b"only written",
            ]
            assert not reader.refresh()


def test_reader_follows_log_with_deleted_segments(partition: Path) -> None:
    config = {"segment.bytes": 250, "file.delete.delay.ms": 0}
    with logcore.open(partition, create=True, config=config) as log:
        for number in range(8):
            log.append(b"%d" % number * 32)
        with (
            logcore.open(partition, read_only=True) as reader,
            logcore.open(partition, read_only=True) as late_reader,
        ):
            log.delete_records(5)
            assert [record.offset for record in reader.read(0)] == list(range(8)), (
                "a reader can still read deleted segments"
            )
            log.tick()
            with pytest.raises(logcore.OffsetOutOfRangeError):
                list(late_reader.read(0))
            reader.refresh()
            assert reader.log_start_offset == 5
            assert [record.offset for record in reader.read(5)] == [5, 6, 7]


@pytest.mark.interop
def test_lock_excludes_a_java_broker_in_both_directions(
    partition: Path, tmp_path: Path
) -> None:
    """Kafka locks .lock with FileChannel.tryLock(), as this Java program does."""
    if shutil.which("javac") is None:
        pytest.skip("needs a JDK: apt-get install default-jdk-headless")
    (tmp_path / "Lock.java").write_text(
        """
import java.io.*; import java.nio.channels.*;
public class Lock {
  public static void main(String[] a) throws Exception {
    FileLock lock = new RandomAccessFile(a[0], "rw").getChannel().tryLock();
    System.out.println(lock == null ? "refused" : "locked");
    System.out.flush();
    System.in.read();
  }
}
"""
    )
    subprocess.run(["javac", "Lock.java"], cwd=tmp_path, check=True)
    java = ["java", "-cp", str(tmp_path), "Lock", str(partition.parent / ".lock")]
    with logcore.open(partition, create=True):
        result = subprocess.run(
            java, input="\n", capture_output=True, text=True, check=True
        )
        assert result.stdout == "refused\n"
    broker = subprocess.Popen(
        java, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert broker.stdout is not None
    assert broker.stdout.readline() == "locked\n"
    with pytest.raises(logcore.LogLockedError) as caught:
        logcore.open(partition)
    assert caught.value.pid == broker.pid
    broker.communicate("\n")
    with logcore.open(partition):
        pass


def test_lock_file_content_is_only_informative(partition: Path) -> None:
    with logcore.open(partition, create=True):
        owner_file = partition.parent / "logcore.owner"
        assert json.loads(owner_file.read_text())["pid"] == os.getpid()
        for content in (b"", b"{", b"[]", b'{"pid": "x"}', b"\xff"):
            owner_file.write_bytes(content)
            with pytest.raises(logcore.LogLockedError, match=f"process {os.getpid()} "):
                open_log(partition, fs=OsFS())
    assert not owner_file.exists()


@pytest.mark.long
def test_errors_and_info_list_all_processes_that_share_a_directory(
    tmp_path: Path,
) -> None:
    program = """
import sys, logcore
with logcore.open_dir(sys.argv[1], create=True, shared=True) as logdir:
    logdir.create_topic("orders", exist_ok=True)
    print("open", flush=True)
    sys.stdin.readline()
"""
    holders = [run(program, tmp_path) for _ in range(2)]
    for holder in holders:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
    pids = sorted(holder.pid for holder in holders)
    holders_found = lock_holders(str(tmp_path))
    assert [
        (lock_holder.pid, lock_holder.is_shared) for lock_holder in holders_found
    ] == [(pid, True) for pid in pids]
    with pytest.raises(logcore.LogLockedError) as caught:
        logcore.open_dir(tmp_path)
    assert all(f"process {pid} " in str(caught.value) for pid in pids)
    command = [sys.executable, "-m", "logcore", "info", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["writers"] == pids
    for holder in holders:
        holder.communicate("\n")
    assert lock_holders(str(tmp_path)) == ()
    with logcore.open_dir(tmp_path):
        (holder_found,) = lock_holders(str(tmp_path))
        assert (holder_found.pid, holder_found.is_shared) == (os.getpid(), False)


def test_reader_follows_truncated_log_that_continues(partition: Path) -> None:
    with logcore.open(partition, create=True, config={"segment.bytes": 400}) as log:
        log.append_many([(None, b"old %d" % number) for number in range(30)])
        with logcore.open(partition, read_only=True) as reader:
            assert len(list(reader.read(0))) == 30
            log.truncate(11)
            reader.refresh()
            assert [record.value for record in reader.read(0)] == [
                b"old %d" % number for number in range(11)
            ]
            log.append_many([(None, b"new %d" % number) for number in range(11, 60)])
            reader.refresh()
            expected = [b"old %d" % number for number in range(11)] + [
                b"new %d" % number for number in range(11, 60)
            ]
            assert [record.value for record in reader.read(0)] == expected


CALLS: dict[str, Callable[[logcore.LogDir, logcore.Log], object]] = {
    "append": lambda logdir, log: log.append(b"child"),
    "append_many": lambda logdir, log: log.append_many([(None, b"child")]),
    "flush": lambda logdir, log: log.flush(),
    "tick": lambda logdir, log: log.tick(),
    "roll": lambda logdir, log: log.roll(),
    "delete_records": lambda logdir, log: log.delete_records(1),
    "truncate": lambda logdir, log: log.truncate(1),
    "end_transaction": lambda logdir, log: log.end_transaction(1, 0, commit=True),
    "read": lambda logdir, log: list(log.read(0)),
    "read_committed": lambda logdir, log: list(log.read(0, isolation="read_committed")),
    "table": lambda logdir, log: log.table().snapshot(),
    "scrub": lambda logdir, log: log.scrub(),
    "close": lambda logdir, log: log.close(),
    "partition": lambda logdir, log: logdir.partition("t", 1),
    "create_topic": lambda logdir, log: logdir.create_topic("u"),
    "logdir.tick": lambda logdir, log: logdir.tick(),
    "logdir.incidents": lambda logdir, log: logdir.incidents(),
    "logdir.close": lambda logdir, log: logdir.close(),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_forked_child_does_not_wait_for_locks_of_its_parent(
    tmp_path: Path, name: str
) -> None:
    """A thread that holds a lock during a fork does not exist in the child, so that it
    cannot release the lock there.
    """
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t", 2)
        log = logdir.partition("t", 0)
        log.append(b"parent", key=b"k")
        table = log.table()
        locks = [
            log._state.lock,
            log._state.listening,
            log._state.scanning,
            log.host.writer.commit._mutex,
            table._lock,
        ]
        locks += [
            logdir.host.lock,
            logdir._maintenance._visits_lock,
            logdir._incidents._lock,
        ]
        locks += [log.host.writer.claim._mutex, log.host.writer.claim.checkpoints._lock]
        is_held = threading.Barrier(len(locks) + 1)
        may_release = threading.Event()

        def hold_lock(lock: Any) -> None:
            with lock:
                is_held.wait()
                may_release.wait()

        threads = [threading.Thread(target=hold_lock, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        is_held.wait()
        child = os.fork()
        if not child:
            signal.alarm(20)
            with contextlib.suppress(logcore.LogcoreError):
                CALLS[name](logdir, log)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        may_release.set()
        for thread in threads:
            thread.join()
        assert os.waitstatus_to_exitcode(status) == 0
        assert log.append(b"parent").offset == 1


FORK_AND_WAIT = """
import os, signal, sys, time
import logcore
log = logcore.open(sys.argv[1], create=True)
log.append(b"parent")
child = os.fork()
if not child:
    print(os.getpid(), flush=True)
    time.sleep(600)
os.waitpid(child, 0)
"""


def test_forked_child_does_not_hold_the_lock_of_a_killed_parent(
    partition: Path,
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", FORK_AND_WAIT, str(partition)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        with pytest.raises(logcore.LogLockedError):
            logcore.open(partition)
        parent.kill()
        parent.wait()
        os.kill(child, 0)  # the child still exists
        with logcore.open(partition) as log:
            assert [record.value for record in log.read(0)] == [b"parent"]
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()
