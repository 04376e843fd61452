"""Power cuts, failed syncs and full disks of real file systems: ext4 and xfs on loop
devices, and a small tmpfs. A power cut is FS_IOC_SHUTDOWN, which drops all data of a
mounted file system that is not on its device, then SIGKILL, umount and mount. A failed
sync is one that the device refuses: the test punches the blocks that the sync would
write out of the image. Because the tmpfs under the image is full, no block can be
allocated. Then the test frees space and restores the punched blocks. The sync fails
once, as on a device with a temporary fault, and the page cache continues to show the
data.

If root, loop devices, mkfs.ext4, mkfs.xfs or unshare are missing, tests are skipped
with that reason.

    LOGCORE_POWER_CUTS    number of power cuts
    LOGCORE_TEST_SEED      to repeat
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import fcntl
import functools
import io
import itertools
import mmap
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.errors import LogcoreError, StorageWriteError
from logcore.fs import OsFS
from logcore.log import open_log
from logcore.partition import recovery
from support import real_faults
from support.real_faults import (
    POLICIES,
    WORKLOADS,
    LogWorker,
    Outcome,
    PlannedFault,
    Site,
    Workload,
    fork,
    read_messages,
    run_forked,
)
from support.seeded_recovery_bug import recover_from_memory

SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or 20_261_121

FS_IOC_SHUTDOWN = 0x8004587D  # XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN
# the data that the shutdown writes first: the journal, or nothing
LOG_FLUSHED = 1
NOTHING_FLUSHED = 2
FITRIM = 0xC0185879
FS_IOC_FIEMAP = 0xC020660B
KEEP_SIZE_AND_PUNCH = 3
CLONE_NEWNS = 0x20000
MS_REC_SLAVE = 0x84000
#: Size of the image and of its tmpfs, and the command that creates the file system.
SYSTEMS = {
    "ext4": (
        48 << 20,
        ["mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "nodiscard,lazy_itable_init=0"],
    ),
    "xfs": (320 << 20, ["mkfs.xfs", "-q", "-f", "-K"]),
}
#: The policies under which acknowledged records survive a power cut.
DURABLE_POLICIES = ("always", "group", "every(3)")


@functools.cache
def use_private_mounts() -> None:
    """Give this process a private set of mounts. Otherwise a mount namespace that
    another process creates while the test runs, as for a container, would copy the
    mounts, so that file systems that the test unmounts would remain mounted there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC_SLAVE, None):
        pytest.skip(
            f"no private mounts for this process: {os.strerror(ctypes.get_errno())}"
        )


class LoopDisk:
    """A file system in an image in memory."""

    def __init__(self, root: Path, system: str) -> None:
        self.system = system
        self.count = 0
        self.size, self.make = SYSTEMS[system]
        self.memory, self.mount_point = root / "memory", root / "disk"
        self.image, self.ballast = self.memory / "image", self.memory / "ballast"
        # Shared with child processes: whether the device has refused a sync.
        self.refused = mmap.mmap(-1, 1)
        self.memory.mkdir()
        self.mount_point.mkdir()

    def __enter__(self) -> LoopDisk:
        if os.geteuid():
            pytest.skip("power cuts need root, to mount file systems")
        for tool in ("mount", "umount", self.make[0]):
            if shutil.which(tool) is None:
                pytest.skip(
                    f"needs {tool} (Debian: apt install mount e2fsprogs xfsprogs)"
                )
        use_private_mounts()
        self._call(
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={self.size + (8 << 20)}",
            "logcore-test",
            self.memory,
        )
        try:
            with self.image.open("wb") as image:
                os.truncate(image.fileno(), self.size)
                self._call(*self.make, self.image)
                # Allocate the whole image, because mkfs leaves holes in the journal.
                os.posix_fallocate(image.fileno(), 0, self.size)
            self.mount()
        except BaseException:
            self._call("umount", "-l", self.memory)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Unmount lazily, because a failed test may hold a file open.
        for mounted in (
            self.mount_point,
            self.memory,
        ):
            self._call("umount", "-l", mounted)

    @staticmethod
    def _call(*command: str | Path) -> None:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            failure = f"{' '.join(map(str, command))}: {result.stderr.strip().partition(chr(10))[0]}"
            if command[0] == "mount":
                pytest.skip(f"no file systems can be mounted here: {failure}")
            raise AssertionError(failure)

    def mount(self) -> None:
        self._call("mount", "-o", "loop", self.image, self.mount_point)

    def umount(self) -> None:
        self._call("umount", self.mount_point)

    def restart(self) -> None:
        """Unmount and mount the file system, so that data that is only in memory is
        lost.
        """
        self.umount()
        self.mount()

    def directory(self) -> Path:
        """Create a directory whose name is durable."""
        self.count += 1
        path = self.mount_point / str(self.count)
        path.mkdir()
        for path_to_sync in (path, self.mount_point):
            handle = os.open(path_to_sync, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        return path

    def shut_down(self, mode: int = NOTHING_FLUSHED) -> None:
        handle = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, FS_IOC_SHUTDOWN, struct.pack("I", mode))
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def cut_power(self, mode: int, operation: str, file: int | str) -> Iterator[None]:
        """Cut the power, which also ends the process."""
        self.shut_down(mode)
        os.kill(os.getpid(), signal.SIGKILL)
        yield

    @contextlib.contextmanager
    def fail(self, operation: str, file: int | str) -> Iterator[None]:
        """Make all later calls of the disk fail."""
        self.shut_down()
        self.refused[0] = 1
        yield

    @contextlib.contextmanager
    def fail_once(self, operation: str, file: int | str) -> Iterator[None]:
        """Make writes of all data blocks fail: of free blocks, and of blocks of the
        file.
        """
        assert isinstance(file, int)
        handle = os.open(self.mount_point, os.O_RDONLY)
        image = os.open(self.image, os.O_RDWR)
        saved = []
        try:
            # xfs frees the blocks of deleted files a moment later, and would reuse
            # them.
            time.sleep(0.05)
            fcntl.ioctl(handle, FITRIM, struct.pack("QQQ", 0, (1 << 64) - 1, 0))
            for position, size in extents(file):
                saved.append((position, os.pread(image, size, position)))
                punch(image, position, size)
            with self.ballast.open("wb") as ballast:
                full = 0
                while full < 3:  # trimmed space becomes free gradually
                    free = os.statvfs(self.memory)
                    if free.f_bavail:
                        os.posix_fallocate(
                            ballast.fileno(),
                            ballast.tell(),
                            free.f_bavail * free.f_bsize,
                        )
                        ballast.seek(0, os.SEEK_END)
                    full = 0 if free.f_bavail else full + 1
                    time.sleep(0.005)
            try:
                yield
            except LogcoreError:
                self.refused[0] = 1
                raise
            finally:
                self.ballast.unlink()
                for position, data in saved:
                    os.pwrite(image, data, position)
        finally:
            os.close(image)
            os.close(handle)


def extents(handle: int) -> list[tuple[int, int]]:
    """Return (position on the device, size) of the allocated blocks of a file."""
    max_extents = 32
    buffer = bytearray(
        struct.pack("QQIIII", 0, (1 << 64) - 1, 0, 0, max_extents, 0)
        + bytes(max_extents * 56)
    )
    fcntl.ioctl(handle, FS_IOC_FIEMAP, buffer)
    count = struct.unpack_from("I", buffer, 20)[0]
    blocks = []
    for number in range(count):
        _, physical, size, _, _, flags = struct.unpack_from(
            "QQQQQI", buffer, 32 + number * 56
        )
        if not flags & 0x6:  # an unknown position, or not allocated yet
            blocks.append((physical, size))
    return blocks


def punch(handle: int, position: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    bounds = ctypes.c_longlong(position), ctypes.c_longlong(size)
    if libc.fallocate(handle, KEEP_SIZE_AND_PUNCH, *bounds):
        raise OSError(ctypes.get_errno(), "punching a hole")


@pytest.fixture(params=sorted(SYSTEMS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopDisk]:
    with LoopDisk(tmp_path, request.param) as mounted:
        yield mounted


def check_outcome(
    workload: Workload, policy: str, outcome: Outcome, before: Any = None
) -> Any:
    """Check the disk against an outcome, and return the checker of its content."""
    checker = before or workload.checker(policy, "power")
    for message in outcome.messages:
        checker.receive(*message)
    checker.check(thorough=True)
    return checker


def cut_at(disk: LoopDisk, workload: Workload, policy: str, rng: random.Random) -> None:
    """Cut the power in the middle of a workload, at one of its changes or inside one of
    its writes.
    """
    seed = rng.randrange(1 << 30)
    mode = rng.choice([LOG_FLUSHED, NOTHING_FLUSHED, NOTHING_FLUSHED])
    planned_fault = PlannedFault(
        rng.randrange(rng.choice([30, 150])),
        rng.choice([0, 0, 0.5]),
        functools.partial(disk.cut_power, mode),
    )
    directory = disk.directory()
    try:
        with contextlib.chdir(directory):
            outcome = run_forked(workload, policy, seed, planned_fault)
        if not outcome.was_killed:
            disk.shut_down(mode)
        disk.restart()
        with contextlib.chdir(directory):
            check_outcome(workload, policy, outcome)
    except BaseException as error:
        error.add_note(
            f"{workload.name} under {policy!r}, seed {seed}, {planned_fault}, {disk.system}"
        )
        raise
    shutil.rmtree(directory)


def readable_bytes(pipe: int) -> int:
    """Return the number of bytes that can be read without waiting."""
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0])


def run_workload_forever(worker: LogWorker) -> None:
    """Run random operations until the process is killed."""
    while True:
        fraction = worker.rng.random()
        if fraction < 0.8:
            worker.append(
                worker.rng.choice([1, 1, 2, 9]),
                worker.rng.choice([None, None, "os", "disk"]),
            )
        elif fraction < 0.87:
            worker.flush()
        elif fraction < 0.92:
            worker.tick()
        elif fraction < 0.97:
            worker.roll()
        else:
            worker.delete(0.5)


def cut_from_outside(disk: LoopDisk, policy: str, rng: random.Random) -> int:
    """Cut the power at any point of a running process. Return the number of operations
    that were acknowledged before.
    """
    seed = rng.randrange(1 << 30)
    min_acknowledged = rng.randrange(1, 120)
    directory = disk.directory()
    with contextlib.chdir(directory):
        workload = Workload(run_workload_forever)
        fs = real_faults.RealDisk
        child, pipe = fork(
            lambda out: real_faults.run_workload(
                workload, policy, seed, fs(), out, may_fail=True
            )
        )
    with pipe:
        checker = workload.checker(policy, "power")
        output = b""
        while (
            acknowledged_count := len(list(read_messages(io.BytesIO(output))))
        ) < min_acknowledged:
            data = os.read(pipe.fileno(), 1 << 16)
            assert data, "the process has ended early"
            output += data
        # Messages that are in the pipe at this point were sent before the cut. A sync
        # that runs during the cut may report a false success.
        output += os.read(pipe.fileno(), readable_bytes(pipe.fileno()))
        disk.shut_down(rng.choice([LOG_FLUSHED, NOTHING_FLUSHED, NOTHING_FLUSHED]))
        os.kill(child, signal.SIGKILL)
        acknowledged_count = len(list(read_messages(io.BytesIO(output))))
        for index, message in enumerate(
            read_messages(io.BytesIO(output + pipe.read()))
        ):
            (checker.receive if index < acknowledged_count else checker.receive_late)(
                *message
            )
    os.waitpid(child, 0)
    disk.restart()
    with contextlib.chdir(directory):
        checker.check(thorough=True)
    shutil.rmtree(directory)
    return acknowledged_count


def cut_power_repeatedly(disk: LoopDisk, count: int) -> str:
    rng = random.Random(f"{SEED}-{disk.system}")
    acknowledged_count = 0
    for number in range(count):
        policy = POLICIES[number % len(POLICIES)]
        if number % 2:
            acknowledged_count += cut_from_outside(disk, policy, rng)
        else:
            cut_at(disk, rng.choice(list(WORKLOADS.values())), policy, rng)
    return (
        f"{count} power cuts on {disk.system}, {count // 2} of them from outside after {acknowledged_count} "
        f"acknowledgements: 0 acknowledged records lost; LOGCORE_TEST_SEED={SEED}"
    )


def test_power_cuts_lose_no_acknowledged_record(disk: LoopDisk) -> None:
    print(
        cut_power_repeatedly(disk, int(os.environ.get("LOGCORE_POWER_CUTS", "16")) // 2)
    )


@pytest.mark.slow
def test_thousands_of_power_cuts_lose_no_acknowledged_record(disk: LoopDisk) -> None:
    print(
        cut_power_repeatedly(
            disk, int(os.environ.get("LOGCORE_POWER_CUTS", "5000")) // 2
        )
    )


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_power_cut_reveals_syncs_without_effect(
    disk: LoopDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of the tests: if no sync writes data, a power cut loses acknowledged
    records.
    """
    monkeypatch.setattr(OsFS, "fdatasync", lambda *_: None)
    rng = random.Random(SEED)
    with pytest.raises((AssertionError, LogcoreError)) as caught:
        for _ in range(20):
            cut_from_outside(disk, "group", rng)
    print(f"{caught.value!r}"[:200])


# -- syncs that fail -------------------------------------------------------------------

SYNCS = ("fdatasync", "fsync", "sync_dir")


def starting_points(
    disk: LoopDisk, workload: Workload, policy: str
) -> Iterator[tuple[Workload, Path | None, Any, int]]:
    """Yield (workload, files at its start, checker of their content, seed): first no
    files, and then files that a kill left.
    """
    yield workload, None, None, SEED
    with contextlib.chdir(disk.directory()):
        sites = run_forked(workload, policy, SEED).sites
    # A kill leaves half a batch at the end, an empty segment, or a sealed segment above
    # the recovery point.
    recovery_point_file = "recovery-point-offset-checkpoint.tmp"
    for operation, file in (
        ("pwrite", "N.log"),
        ("create", "N.log"),
        ("create", recovery_point_file),
    ):
        site_indexes = [
            index
            for index, site in enumerate(sites)
            if (site.operation, site.file) == (operation, file)
        ]
        if not site_indexes:
            continue
        torn_files = disk.directory()
        with contextlib.chdir(torn_files):
            outcome = run_forked(
                workload, policy, SEED, PlannedFault(site_indexes[-1], 0.5)
            )
        checker = workload.checker(policy, "power")
        for message in outcome.messages:
            checker.receive(*message)
        yield WORKLOADS[workload.next_run.__name__], torn_files, checker, SEED + 1


def fail_syncs(disk: LoopDisk, failure: str) -> tuple[int, set[str]]:
    """Fail each sync site of the workloads once, then open the remaining files, restart,
    and open them again.

    Return the number of failed sites, and the sites that had no data to write when
    their sync should fail.
    """
    failed: set[Site] = set()
    unneeded: set[Site] = set()
    failed_log_count = 0
    for workload, policy in itertools.product(WORKLOADS.values(), DURABLE_POLICIES):
        for workload_of_start, torn_files, witness_of_start, seed in list(
            starting_points(disk, workload, policy)
        ):
            for index, site in enumerate(
                sites_without_faults(disk, workload_of_start, policy, seed, torn_files)
            ):
                if (
                    site.operation not in SYNCS
                    or site in failed
                    or (failure, site.operation) == ("fail_once", "sync_dir")
                ):
                    continue
                directory = disk.directory()
                if torn_files is not None:
                    shutil.copytree(torn_files, directory, dirs_exist_ok=True)
                    os.sync()
                disk.refused[0] = 0
                try:
                    with contextlib.chdir(directory):
                        outcome = run_forked(
                            workload_of_start,
                            policy,
                            seed,
                            PlannedFault(index, action=getattr(disk, failure)),
                        )
                        if not disk.refused[0]:
                            unneeded.add(site)
                            continue
                        failed.add(site)
                        # The page cache still shows data that the device lacks.
                        if failure == "fail_once":
                            checker = check_outcome(
                                workload_of_start,
                                policy,
                                outcome,
                                copy.deepcopy(witness_of_start),
                            )
                    disk.restart()
                    with contextlib.chdir(directory):
                        if failure == "fail":
                            checker = check_outcome(
                                workload_of_start,
                                policy,
                                outcome,
                                copy.deepcopy(witness_of_start),
                            )
                        # Records that readers got still exist.
                        checker.check(thorough=True)
                        if site.file == "N.log" and site.caller.startswith(
                            ("log", "segment.seal")
                        ):
                            assert checker.failed[1], "the log did not fail"
                except BaseException as error:
                    error.add_note(
                        f"{workload_of_start.name} under {policy!r}, seed {seed}, at {index}: {site} on {disk.system}"
                    )
                    raise
                failed_log_count += checker.failed is not None and checker.failed[1]
    unneeded -= failed
    print(
        f"{len(failed)} sync sites failed on {disk.system} ({failure}), {failed_log_count} logs failed; "
        f"{len(unneeded)} had no data to write: 0 acknowledged records lost, 0 invented"
    )
    return len(failed), {site.caller.split(":")[0] for site in unneeded}


def sites_without_faults(
    disk: LoopDisk, workload: Workload, policy: str, seed: int, torn_files: Path | None
) -> list[Site]:
    directory = disk.directory()
    if torn_files is not None:
        shutil.copytree(torn_files, directory, dirs_exist_ok=True)
    with contextlib.chdir(directory):
        sites = run_forked(workload, policy, seed).sites
    shutil.rmtree(directory)
    return sites


@pytest.mark.slow
def test_permanently_failing_sync_loses_no_acknowledged_record(disk: LoopDisk) -> None:
    assert fail_syncs(disk, "fail")[0] > 30


@pytest.mark.slow
def test_sync_that_fails_once_loses_no_acknowledged_record(disk: LoopDisk) -> None:
    failed, unneeded = fail_syncs(disk, "fail_once")
    assert failed > 15
    # The files were copied and synced before this sync.
    assert unneeded <= {"recovery._sync_and_reread"}


def test_second_sync_after_a_failed_one_succeeds_without_the_data(
    disk: LoopDisk,
) -> None:
    """This behavior of real file systems is the reason why a failed sync is not
    retried.
    """
    path = disk.directory() / "file"
    fs = OsFS()
    handle = fs.open(str(path), write=True, create=True)
    fs.pwrite(handle, b"old", 0)
    fs.fsync(handle)
    fs.pwrite(handle, b"new", 3)
    with pytest.raises(StorageWriteError), disk.fail_once("fsync", handle):
        fs.fsync(handle)
    fs.fsync(handle)
    assert path.read_bytes() == b"oldnew"
    fs.close(handle)
    disk.restart()
    assert path.read_bytes() in (b"old", b"old\0\0\0")


class FailingSyncFS(OsFS):
    """A file system that fails the next fdatasync."""

    failing_disk: LoopDisk | None = None

    def fdatasync(self, handle: int) -> None:
        failing_disk = self.failing_disk
        self.failing_disk = None
        with (
            failing_disk.fail_once("fdatasync", handle)
            if failing_disk
            else contextlib.nullcontext()
        ):
            super().fdatasync(handle)


def fail_under_an_append(disk: LoopDisk) -> None:
    """Fail a sync of several pages once, and open the log again, which reads the page
    cache. Check the records after a power cut.
    """
    path = disk.directory() / "t-0"
    fs = FailingSyncFS()
    log = open_log(path, create=True, fs=fs)
    log.append(b"acknowledged" * 500)
    fs.failing_disk = disk
    with pytest.raises(logcore.DurabilityUnknownError):
        log.append(b"perhaps" * 5_000)
    with pytest.raises(logcore.LogFailedError):
        log.append(b"refused")
    log.close()
    with logcore.open(path) as reopened:
        served = [record.value for record in reopened.read(0)]
        assert served in (
            [b"acknowledged" * 500],
            [b"acknowledged" * 500, b"perhaps" * 5_000],
        )
        reopened.append(b"next")
    disk.restart()
    with logcore.open(path) as reopened:
        assert [record.value for record in reopened.read(0)] == [*served, b"next"]


def test_records_served_after_failed_sync_are_durable(disk: LoopDisk) -> None:
    fail_under_an_append(disk)


def test_power_cut_reveals_a_recovery_that_trusts_the_page_cache(
    disk: LoopDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of the tests: this recovery syncs the old file, and trusts its content in
    memory.
    """
    monkeypatch.setattr(recovery, "_sync_and_reread", recover_from_memory)
    with pytest.raises((AssertionError, LogcoreError)) as caught:
        fail_under_an_append(disk)
    print(f"{caught.value!r}"[:200])


# -- full disks ------------------------------------------------------------------------


def on_small_disk(path: Path, options: str, *arguments: str) -> str:
    """Run real_faults.py on a new tmpfs in a new mount namespace. Return its output."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (Debian: apt install util-linux)")
    unshare_command = (
        ["unshare", "--mount"]
        if os.geteuid() == 0
        else ["unshare", "--user", "--map-root-user", "--mount"]
    )
    mount_command = [
        "sh",
        "-c",
        'mount -t tmpfs -o "$1" logcore-test "$2" && cd "$2" || exit 77; shift 2; exec "$@"',
        "sh",
    ]
    program = [sys.executable, real_faults.__file__, *arguments]
    result = subprocess.run(
        [*unshare_command, *mount_command, options, path, *program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if result.returncode == 77 or "unshare failed" in result.stderr:
        pytest.skip(
            f"no tmpfs can be mounted here: {result.stderr.strip().partition(chr(10))[0]}"
        )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


BYTES = "size=1m"
NAMES = "size=1m,nr_inodes=40"


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("group", BYTES),
        ("os", NAMES),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("group", NAMES), ("os", BYTES))
        ),
        *(
            pytest.param("always", name, marks=pytest.mark.slow)
            for name in (BYTES, NAMES)
        ),
    ],
)
def test_full_disk_loses_no_acknowledged_record(
    tmp_path: Path, policy: str, options: str
) -> None:
    """The disk is filled, emptied by deletions, and filled again, with bytes or with
    file names.
    """
    print(policy, options, on_small_disk(tmp_path, options, "fill", policy, str(SEED)))


@pytest.mark.parametrize("policy", ["always", "group", "os"])
@pytest.mark.parametrize("count", [1, 3])
def test_file_size_limit_at_every_byte_of_an_append_undoes_it(
    tmp_path: Path, policy: str, count: int
) -> None:
    """With RLIMIT_FSIZE, the kernel writes up to the limit and then refuses writes. No
    byte of the append remains, and a later append succeeds.
    """

    def run(pipe: int) -> int:
        # "always" writes each batch alone, and keeps the first batches.
        config = {} if policy == "always" else {"batch.size": 80}
        log = logcore.open(
            tmp_path / "t-0", create=True, durability=policy, config=config
        )
        file = tmp_path / "t-0" / f"{0:020d}.log"
        log.append(b"first" * 100)
        rows = [(b"k", b"value %d" % number * 4) for number in range(count)]
        size = file.stat().st_size
        end = log.log_end_offset
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for limit in itertools.count():
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + limit, hard))
            try:
                log.append_many(rows)
                break
            except logcore.DiskFullError as error:
                assert error.retriable
                assert log.log_end_offset == end
                assert file.stat().st_size == size
        grown = file.stat().st_size - size
        assert limit == grown, "the append must succeed once exactly its bytes fit"
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        log.append(b"last")
        log.close()
        os.write(pipe, pickle.dumps(("limit", limit)))
        return 0

    child, pipe = fork(run)
    with pipe:
        messages = list(read_messages(pipe))
    assert os.waitpid(child, 0)[1] == 0, messages
    rows = [b"value %d" % number * 4 for number in range(count)]
    with logcore.open(tmp_path / "t-0", read_only=True) as log:
        assert [record.value for record in log.read(0)] == [
            b"first" * 100,
            *rows,
            b"last",
        ]
    print(f"{messages[0][1]} limits under {policy!r}")
