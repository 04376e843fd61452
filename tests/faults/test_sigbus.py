"""Mapped files with lost pages, because another program shortened the file or the disk
cannot read it. Access to such a page raises a signal that ends the process. The library
must raise StorageReadError instead, and a broker must serve all other partitions. Each
case runs in a child process, because a failure ends the process.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import fs
from support.kernels import runs_compiled

pytestmark = pytest.mark.skipif(
    fs._guard is None, reason="only the compiled module can catch the signal"
)

T0 = 1_700_000_000_000


def create_log(path: Path) -> Path:
    """Create a log with sealed segments of some pages each, and return the file of the
    first segment.
    """
    with logcore.open(
        path, create=True, config={"segment.bytes": 1 << 16}, durability="os"
    ) as log:
        for number in range(300):
            log.append(b"%d" % number * 300, key=b"k", timestamp_ms=T0 + number)
    return min(path.glob("*.log"))


READS: dict[str, Callable[[logcore.Log], Any]] = {
    "read": lambda log: list(log.read(0)),
    "committed": lambda log: list(log.read(0, isolation="read_committed")),
    "columns": lambda log: [len(columns) for columns in log.scan()],
    "get": lambda log: [log.get(offset) for offset in range(60)],
    "batches": lambda log: [batch.size_bytes for batch in log.batches(0)],
    "time": lambda log: [log.offset_for_timestamp(T0 + at) for at in range(60)],
    "stored": lambda log: [
        bytes(batch_bytes) for batch_bytes in log.stored(0, max_bytes=1 << 20)
    ],
    "stable": lambda log: log.last_stable_offset,
}


def outcome(child: Callable[[], int]) -> int:
    """Return the result of a forked child, or the negative number of the signal that
    ended it.
    """
    pid = os.fork()
    if not pid:
        code = 99
        try:
            code = child()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.long
@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("name", READS)
def test_read_of_a_shortened_file_raises(
    tmp_path: Path, name: str, read_only: bool
) -> None:
    first = create_log(tmp_path / "t-0")

    def child() -> int:
        with logcore.open(tmp_path / "t-0", read_only=read_only) as log:
            list(log.read(0))  # the whole file is mapped now
            READS["get"](log)  # each batch was checked once
            os.truncate(first, 4096)
            with pytest.raises(logcore.StorageReadError) as caught:
                READS[name](log)
            assert caught.value.path == str(first)
        return 0

    assert outcome(child) == 0


def test_borrowed_memory_of_lost_pages_reads_as_zeros(tmp_path: Path) -> None:
    """Borrowed memory belongs to the file. Its lost pages cannot be read, but the
    process survives.
    """
    first = create_log(tmp_path / "t-0")

    def child() -> int:
        with logcore.open(tmp_path / "t-0", read_only=True) as log:
            columns = list(log.scan())[1]  # the first segment has one batch
            os.truncate(first, 4096)
            assert columns.values()[30] == bytes(600)
            with pytest.raises(logcore.StorageReadError):
                list(log.scan())
        with logcore.open(tmp_path / "t-0", read_only=True) as log:
            assert [record.offset for record in log.read(200)] == list(
                range(200, 300)
            ), "other segments are readable"
        return 0

    assert outcome(child) == 0


def test_sigbus_in_foreign_file_still_ends_the_process(tmp_path: Path) -> None:
    """Only mappings of logs are guarded, so that other libraries can rely on the
    signal.
    """
    create_log(tmp_path / "t-0")
    other = tmp_path / "other"
    other.write_bytes(bytes(1 << 16))

    def child() -> int:
        faulthandler.enable(open(os.devnull, "w"))  # noqa: SIM115  # Python's report of the signal
        with logcore.open(tmp_path / "t-0", read_only=True) as log:
            list(log.read(0))
            with open(other, "r+b") as file:
                mapped = mmap.mmap(file.fileno(), 1 << 16, access=mmap.ACCESS_READ)
                file.truncate(100)
                return mapped[1 << 15]

    assert outcome(child) == -signal.SIGBUS


def test_closed_mapping_is_not_guarded(tmp_path: Path) -> None:
    guard = fs._guard
    handle = fs.OS.open(str(tmp_path / "file"), write=True, create=True)
    fs.OS.pwrite(handle, bytes(1 << 16), 0)
    view = fs.OS.map(handle, 1 << 16)
    assert fs.OS.is_readable(view, touch=True)
    fs.OS.truncate(handle, 4096)
    assert fs.OS.is_readable(view), "no code has touched a lost page yet"
    assert not fs.OS.is_readable(view, touch=True)
    assert guard.unreadable_pages(view) == 15
    assert bytes(view) == bytes(1 << 16)
    second_view = fs.OS.map(handle, 4096)
    assert fs.OS.is_readable(second_view, touch=True), "each mapping has its own count"
    fs.OS.close(handle)


SERVE = """
import json, os, sys, socket, struct
import logcore, netshim
from netshim import wire

path = sys.argv[2]
Request = wire.FETCH.Request

def fetch(port):
    partition = Request.Topic.Partition(partition=0, fetch_offset=0, partition_max_bytes=1 << 25)
    topics = [Request.Topic(topic=name, partitions=[partition]) for name in ("bad", "good")]
    request = Request(replica_id=-1, max_wait_ms=100, min_bytes=1, max_bytes=1 << 25, topics=topics)
    with socket.create_connection(("127.0.0.1", port)) as s:
        s.sendall(wire.encode_request(wire.FETCH, 11, 1, "c", request))
        size = struct.unpack(">i", s.recv(4, socket.MSG_WAITALL))[0]
        response = wire.decode_response(wire.FETCH, 11, s.recv(size, socket.MSG_WAITALL))[1]
    partitions = {topic.topic: topic.partitions[0] for topic in response.responses}
    return {name: [partition.error_code, len(partition.records or b"")] for name, partition in partitions.items()}

with netshim.serve(sys.argv[1]) as server:
    port = int(server.bootstrap_servers.split(":")[1])
    before = fetch(port)
    os.truncate(path, 4096)
    print(json.dumps([before, fetch(port), fetch(port)]))
"""


def test_broker_serves_all_other_partitions(tmp_path: Path) -> None:
    segment_path = create_log(tmp_path / "data" / "bad-0")
    create_log(tmp_path / "data" / "good-0")
    command = [sys.executable, "-c", SERVE, str(tmp_path / "data"), str(segment_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    before, *later_responses = json.loads(result.stdout)
    storage_error = 56
    assert before["bad"][0] == before["good"][0] == 0
    assert len(later_responses) == 2
    for response in later_responses:
        assert response == {"bad": [storage_error, 0], "good": before["good"]}


@runs_compiled
def test_lost_page_of_checked_batch_raises(tmp_path: Path) -> None:
    """A read of a record does not check its batch again. Records in lost pages must not
    be returned as zeros.
    """
    rows = [(b"%d" % number, b"v" * 120) for number in range(100)]
    with logcore.open(tmp_path / "t-0", create=True, durability="os") as log:
        log.append_many(rows)
        log.roll()
    (segment_path,) = (
        path for path in (tmp_path / "t-0").glob("*.log") if path.stat().st_size
    )
    content = segment_path.read_bytes()
    starts = [content.index(key + b"\xf0\1" + value) for key, value in rows]
    (torn_number,) = (
        number for number, index in enumerate(starts) if index + 10 < 4096 < index + 120
    )

    def child() -> int:
        with logcore.open(tmp_path / "t-0") as log:
            assert [log.get(offset).key for offset in range(100)] == [
                key for key, _ in rows
            ]
            os.truncate(segment_path, 4096)
            assert log.get(5).key == rows[5][0], (
                "the pages exist, and the batch was checked before"
            )
            for offset in (torn_number, 5):
                with pytest.raises(logcore.StorageReadError):
                    log.get(offset)
        return 0

    assert outcome(child) == 0
