"""Power cuts, failed syncs and full disks of real file systems: ext4 and xfs on loop
devices, a small tmpfs.

A cut is FS_IOC_SHUTDOWN, which makes a mounted file system forget all data that is not
on its device, then SIGKILL, umount and mount. A failed sync is one that the device
refuses: the test punches the blocks that the sync would write out of the image. The
tmpfs under the image is full, so the blocks have no place. Afterwards there is room, and
the test restores the punched blocks. So the sync fails once, as on a device with a
temporary fault, and the page cache continues to show the data.

If something that the tests need is missing (root, loop devices, mkfs.ext4, mkfs.xfs,
unshare), they are skipped and name it.

    LOGCORE_POWER_CUTS     how many
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
    Site,
    Strike,
    Workload,
    fork,
    read_messages,
    run_forked,
)
from support.seeded_recovery_bug import recover_from_memory

SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or 20_261_121

FS_IOC_SHUTDOWN = 0x8004587D  # XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN
# the data that it writes first: the journal, or nothing
LOG_FLUSHED = 1
NOTHING_FLUSHED = 2
FITRIM = 0xC0185879
FS_IOC_FIEMAP = 0xC020660B
KEEP_SIZE_AND_PUNCH = 3
CLONE_NEWNS = 0x20000
MS_REC_SLAVE = 0x84000
#: Size of the image, and of its tmpfs; how it is made.
SYSTEMS = {
    "ext4": (
        48 << 20,
        ["mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "nodiscard,lazy_itable_init=0"],
    ),
    "xfs": (320 << 20, ["mkfs.xfs", "-q", "-f", "-K"]),
}
#: The policies that promise something when the power fails.
PROMISING = ("always", "group", "every(3)")


@functools.cache
def own_mounts() -> None:
    """Give this process a private set of mounts. Otherwise a namespace that another
    process creates while the test runs, as any container does, would copy the mounts,
    and file systems that were unmounted here would remain mounted there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC_SLAVE, None):
        pytest.skip(
            f"no mounts of its own for this process: {os.strerror(ctypes.get_errno())}"
        )


class LoopDisk:
    """A file system in an image in memory. `at` is its mount point."""

    def __init__(self, root: Path, system: str) -> None:
        self.system = system
        self.count = 0
        self.size, self.make = SYSTEMS[system]
        self.memory, self.at = root / "memory", root / "disk"
        self.image, self.ballast = self.memory / "image", self.memory / "ballast"
        # Shared with child processes: whether the device has refused a sync.
        self.refused = mmap.mmap(-1, 1)
        self.memory.mkdir()
        self.at.mkdir()

    def __enter__(self) -> LoopDisk:
        if os.geteuid():
            pytest.skip("power cuts need root, to mount file systems")
        for tool in ("mount", "umount", self.make[0]):
            if shutil.which(tool) is None:
                pytest.skip(
                    f"needs {tool} (Debian: apt install mount e2fsprogs xfsprogs)"
                )
        own_mounts()
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
            self.at,
            self.memory,
        ):
            self._call("umount", "-l", mounted)

    @staticmethod
    def _call(*command: str | Path) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            what = f"{' '.join(map(str, command))}: {done.stderr.strip().partition(chr(10))[0]}"
            if command[0] == "mount":
                pytest.skip(f"no file systems can be mounted here: {what}")
            raise AssertionError(what)

    def mount(self) -> None:
        self._call("mount", "-o", "loop", self.image, self.at)

    def umount(self) -> None:
        self._call("umount", self.at)

    def restart(self) -> None:
        """Restart the file system: everything that was only in memory is lost."""
        self.umount()
        self.mount()

    def directory(self) -> Path:
        """A new one, durable."""
        self.count += 1
        path = self.at / str(self.count)
        path.mkdir()
        for each in (path, self.at):
            handle = os.open(each, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        return path

    def shut_down(self, mode: int = NOTHING_FLUSHED) -> None:
        handle = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, FS_IOC_SHUTDOWN, struct.pack("I", mode))
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def cut(self, mode: int, operation: str, file: int | str) -> Iterator[None]:
        """Cut the power, which also ends the process."""
        self.shut_down(mode)
        os.kill(os.getpid(), signal.SIGKILL)
        yield

    @contextlib.contextmanager
    def fail(self, operation: str, file: int | str) -> Iterator[None]:
        """From here on each call fails."""
        self.shut_down()
        self.refused[0] = 1
        yield

    @contextlib.contextmanager
    def fail_once(self, operation: str, file: int | str) -> Iterator[None]:
        """No data block can be written: not a free one, and none that the file has."""
        assert isinstance(file, int)
        handle = os.open(self.at, os.O_RDONLY)
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
                while full < 3:  # trimmed space becomes free bit by bit
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
    """(position on the device, size) of the blocks of a file that have a place."""
    room = 32
    answer = bytearray(
        struct.pack("QQIIII", 0, (1 << 64) - 1, 0, 0, room, 0) + bytes(room * 56)
    )
    fcntl.ioctl(handle, FS_IOC_FIEMAP, answer)
    count = struct.unpack_from("I", answer, 20)[0]
    found = []
    for number in range(count):
        _, physical, size, _, _, flags = struct.unpack_from(
            "QQQQQI", answer, 32 + number * 56
        )
        if not flags & 0x6:  # unknown, delayed
            found.append((physical, size))
    return found


def punch(handle: int, position: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_longlong(position), ctypes.c_longlong(size)
    if libc.fallocate(handle, KEEP_SIZE_AND_PUNCH, *where):
        raise OSError(ctypes.get_errno(), "punching a hole")


@pytest.fixture(params=sorted(SYSTEMS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopDisk]:
    with LoopDisk(tmp_path, request.param) as made:
        yield made


def checked_witness(
    workload: Workload, policy: str, outcome: Outcome, before: Any = None
) -> Any:
    """Check the disk against an outcome, and return the witness with its content."""
    witness = before or workload.witness(policy, "power")
    for message in outcome.messages:
        witness.receive(*message)
    witness.check(thorough=True)
    return witness


def cut_at(disk: LoopDisk, workload: Workload, policy: str, rng: random.Random) -> None:
    """Cut the power in the middle of a workload, at one of its changes or inside one of
    its writes.
    """
    seed = rng.randrange(1 << 30)
    mode = rng.choice([LOG_FLUSHED, NOTHING_FLUSHED, NOTHING_FLUSHED])
    strike = Strike(
        rng.randrange(rng.choice([30, 150])),
        rng.choice([0, 0, 0.5]),
        functools.partial(disk.cut, mode),
    )
    place = disk.directory()
    try:
        with contextlib.chdir(place):
            outcome = run_forked(workload, policy, seed, strike)
        if not outcome.was_killed:
            disk.shut_down(mode)
        disk.restart()
        with contextlib.chdir(place):
            checked_witness(workload, policy, outcome)
    except BaseException as error:
        error.add_note(
            f"{workload.name} under {policy!r}, seed {seed}, {strike}, {disk.system}"
        )
        raise
    shutil.rmtree(place)


def waiting(pipe: int) -> int:
    """Bytes that can be read without waiting."""
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0])


def endless(w: LogWorker) -> None:
    """Runs until it is killed."""
    while True:
        choice = w.rng.random()
        if choice < 0.8:
            w.append(
                w.rng.choice([1, 1, 2, 9]), w.rng.choice([None, None, "os", "disk"])
            )
        elif choice < 0.87:
            w.flush()
        elif choice < 0.92:
            w.tick()
        elif choice < 0.97:
            w.roll()
        else:
            w.delete(0.5)


def cut_from_outside(disk: LoopDisk, policy: str, rng: random.Random) -> int:
    """Cut the power at any point of a running process; return how many answers the
    process had received.
    """
    seed = rng.randrange(1 << 30)
    after = rng.randrange(1, 120)
    place = disk.directory()
    with contextlib.chdir(place):
        workload = Workload(endless)
        fs = real_faults.RealDisk
        child, pipe = fork(
            lambda out: real_faults.conduct(
                workload, policy, seed, fs(), out, may_fail=True
            )
        )
    with pipe:
        witness = workload.witness(policy, "power")
        output = b""
        while (answered := len(list(read_messages(io.BytesIO(output))))) < after:
            more = os.read(pipe.fileno(), 1 << 16)
            assert more, "the process has ended early"
            output += more
        # Messages that are in the pipe by now were sent before the cut. A sync that runs
        # during the cut may report a false success.
        output += os.read(pipe.fileno(), waiting(pipe.fileno()))
        disk.shut_down(rng.choice([LOG_FLUSHED, NOTHING_FLUSHED, NOTHING_FLUSHED]))
        os.kill(child, signal.SIGKILL)
        answered = len(list(read_messages(io.BytesIO(output))))
        for index, message in enumerate(
            read_messages(io.BytesIO(output + pipe.read()))
        ):
            (witness.receive if index < answered else witness.receive_late)(*message)
    os.waitpid(child, 0)
    disk.restart()
    with contextlib.chdir(place):
        witness.check(thorough=True)
    shutil.rmtree(place)
    return answered


def cuts(disk: LoopDisk, count: int) -> str:
    rng = random.Random(f"{SEED}-{disk.system}")
    answered = 0
    for number in range(count):
        policy = POLICIES[number % len(POLICIES)]
        if number % 2:
            answered += cut_from_outside(disk, policy, rng)
        else:
            cut_at(disk, rng.choice(list(WORKLOADS.values())), policy, rng)
    return (
        f"{count} power cuts on {disk.system}, {count // 2} of them from outside after {answered} answers: "
        f"0 acknowledged records lost; LOGCORE_TEST_SEED={SEED}"
    )


def test_power_cuts(disk: LoopDisk) -> None:
    print(cuts(disk, int(os.environ.get("LOGCORE_POWER_CUTS", "16")) // 2))


@pytest.mark.slow
def test_thousands_of_power_cuts(disk: LoopDisk) -> None:
    print(cuts(disk, int(os.environ.get("LOGCORE_POWER_CUTS", "5000")) // 2))


@pytest.mark.parametrize("disk", ["ext4"], indirect=True)
def test_power_cuts_reveal_syncs_that_do_nothing(
    disk: LoopDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary: a cut loses unsynced data, and the check fails."""
    monkeypatch.setattr(OsFS, "fdatasync", lambda *_: None)
    rng = random.Random(SEED)
    with pytest.raises((AssertionError, LogcoreError)) as met:
        for _ in range(20):
            cut_from_outside(disk, "group", rng)
    print(f"{met.value!r}"[:200])


# -- syncs that fail -------------------------------------------------------------------

SYNCS = ("fdatasync", "fsync", "sync_dir")


def torn_starts(
    disk: LoopDisk, workload: Workload, policy: str
) -> Iterator[tuple[Workload, Path | None, Any, int]]:
    """Yield (workload, directory it starts from, witness of its content, seed): an
    empty directory, and openings of files that a kill left.
    """
    yield workload, None, None, SEED
    with contextlib.chdir(disk.directory()):
        sites = run_forked(workload, policy, SEED).sites
    # Half a batch at the end; a segment that nothing was written to; one sealed above
    # the recovery point.
    point = "recovery-point-offset-checkpoint.tmp"
    for operation, file in (
        ("pwrite", "N.log"),
        ("create", "N.log"),
        ("create", point),
    ):
        places = [
            index
            for index, site in enumerate(sites)
            if (site.operation, site.file) == (operation, file)
        ]
        if not places:
            continue
        torn = disk.directory()
        with contextlib.chdir(torn):
            outcome = run_forked(workload, policy, SEED, Strike(places[-1], 0.5))
        witness = workload.witness(policy, "power")
        for message in outcome.messages:
            witness.receive(*message)
        yield WORKLOADS[workload.then.__name__], torn, witness, SEED + 1


def fail_syncs(disk: LoopDisk, way: str) -> tuple[int, set[str]]:
    """Fail each sync site of the workloads once, then open the remaining files, restart,
    and open them again.

    Return the number of failed sites, and the sites that had nothing to write whenever
    their sync should have failed.
    """
    failed: set[Site] = set()
    idle: set[Site] = set()
    poisoned = 0
    for workload, policy in itertools.product(WORKLOADS.values(), PROMISING):
        for then, torn, before, seed in list(torn_starts(disk, workload, policy)):
            for index, site in enumerate(calm(disk, then, policy, seed, torn)):
                if (
                    site.operation not in SYNCS
                    or site in failed
                    or (way, site.operation) == ("fail_once", "sync_dir")
                ):
                    continue
                place = disk.directory()
                if torn is not None:
                    shutil.copytree(torn, place, dirs_exist_ok=True)
                    os.sync()
                disk.refused[0] = 0
                try:
                    with contextlib.chdir(place):
                        outcome = run_forked(
                            then,
                            policy,
                            seed,
                            Strike(index, trouble=getattr(disk, way)),
                        )
                        if not disk.refused[0]:
                            idle.add(site)
                            continue
                        failed.add(site)
                        # The page cache still shows data that the device lacks.
                        if way == "fail_once":
                            witness = checked_witness(
                                then, policy, outcome, copy.deepcopy(before)
                            )
                    disk.restart()
                    with contextlib.chdir(place):
                        if way == "fail":
                            witness = checked_witness(
                                then, policy, outcome, copy.deepcopy(before)
                            )
                        # Records that were served still exist.
                        witness.check(thorough=True)
                        if site.file == "N.log" and site.caller.startswith(
                            ("log", "segment.seal")
                        ):
                            assert witness.failed[1], "not poisoned"
                except BaseException as error:
                    error.add_note(
                        f"{then.name} under {policy!r}, seed {seed}, at {index}: {site} on {disk.system}"
                    )
                    raise
                poisoned += witness.failed is not None and witness.failed[1]
    idle -= failed
    print(
        f"{len(failed)} sync sites failed on {disk.system} ({way}), {poisoned} times the log was poisoned; "
        f"{len(idle)} had nothing to write: 0 acknowledged records lost, 0 invented"
    )
    return len(failed), {site.caller.split(":")[0] for site in idle}


def calm(
    disk: LoopDisk, workload: Workload, policy: str, seed: int, torn: Path | None
) -> list[Site]:
    place = disk.directory()
    if torn is not None:
        shutil.copytree(torn, place, dirs_exist_ok=True)
    with contextlib.chdir(place):
        sites = run_forked(workload, policy, seed).sites
    shutil.rmtree(place)
    return sites


@pytest.mark.slow
def test_each_sync_fails_forever(disk: LoopDisk) -> None:
    assert fail_syncs(disk, "fail")[0] > 30


@pytest.mark.slow
def test_each_sync_of_a_file_fails_once(disk: LoopDisk) -> None:
    failed, idle = fail_syncs(disk, "fail_once")
    assert failed > 15
    # The files were copied and synced before this sync.
    assert idle <= {"recovery._sync_and_reread"}


def test_a_sync_that_failed_once_then_succeeds_without_the_data(disk: LoopDisk) -> None:
    """The reason why a failed sync is not retried: the tests above rely on this behavior
    of real file systems.
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


class RefusingFS(OsFS):
    """Its disk refuses the next fdatasync."""

    refusing: LoopDisk | None = None

    def fdatasync(self, handle: int) -> None:
        refusing = self.refusing
        self.refusing = None
        with (
            refusing.fail_once("fdatasync", handle)
            if refusing
            else contextlib.nullcontext()
        ):
            super().fdatasync(handle)


def fail_under_an_append(disk: LoopDisk) -> None:
    """A sync over several pages fails once; the log is opened again from the page
    cache, and continues.
    """
    path = disk.directory() / "t-0"
    fs = RefusingFS()
    log = open_log(path, create=True, fs=fs)
    log.append(b"acknowledged" * 500)
    fs.refusing = disk
    with pytest.raises(logcore.DurabilityUnknownError):
        log.append(b"perhaps" * 5_000)
    with pytest.raises(logcore.LogFailedError):
        log.append(b"refused")
    log.close()
    with logcore.open(path) as again:
        found = [record.value for record in again.read(0)]
        assert found in (
            [b"acknowledged" * 500],
            [b"acknowledged" * 500, b"perhaps" * 5_000],
        )
        again.append(b"next")
    disk.restart()
    with logcore.open(path) as again:
        assert [record.value for record in again.read(0)] == [*found, b"next"]


def test_records_served_after_failed_sync_are_durable(disk: LoopDisk) -> None:
    fail_under_an_append(disk)


def test_power_cut_reveals_a_recovery_that_trusts_the_page_cache(
    disk: LoopDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of the tests: the recovery syncs the old file, and trusts the content in
    memory.
    """
    monkeypatch.setattr(recovery, "_sync_and_reread", recover_from_memory)
    with pytest.raises((AssertionError, LogcoreError)) as met:
        fail_under_an_append(disk)
    print(f"{met.value!r}"[:200])


# -- full disks ------------------------------------------------------------------------


def on_small_disk(path: Path, options: str, *arguments: str) -> str:
    """Run real_faults.py on its own tmpfs, in its own mount namespace; return its
    output.
    """
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (Debian: apt install util-linux)")
    enter = (
        ["unshare", "--mount"]
        if os.geteuid() == 0
        else ["unshare", "--user", "--map-root-user", "--mount"]
    )
    mount = [
        "sh",
        "-c",
        'mount -t tmpfs -o "$1" logcore-test "$2" && cd "$2" || exit 77; shift 2; exec "$@"',
        "sh",
    ]
    program = [sys.executable, real_faults.__file__, *arguments]
    done = subprocess.run(
        [*enter, *mount, options, path, *program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(
            f"no tmpfs can be mounted here: {done.stderr.strip().partition(chr(10))[0]}"
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
def test_a_disk_that_is_full_to_the_brim(
    tmp_path: Path, policy: str, options: str
) -> None:
    """The disk is filled, emptied by deleting, and filled again; by bytes, and by names."""
    print(policy, options, on_small_disk(tmp_path, options, "fill", policy, str(SEED)))


@pytest.mark.parametrize("policy", ["always", "group", "os"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_file_size_limit_at_every_byte_of_an_append(
    tmp_path: Path, policy: str, count: int
) -> None:
    """RLIMIT_FSIZE: the kernel writes up to the limit and then refuses. No byte remains,
    and once there is room the log is as if the append had never been tried.
    """

    def run(pipe: int) -> int:
        # "always" writes batch by batch, and keeps the first batches.
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
        for room in itertools.count():
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
            try:
                log.append_many(rows)
                break
            except logcore.DiskFullError as error:
                assert error.retriable
                assert log.log_end_offset == end
                assert file.stat().st_size == size
        grown = file.stat().st_size - size
        assert room == grown, "it fits to the byte"
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        log.append(b"last")
        log.close()
        os.write(pipe, pickle.dumps(("room", room)))
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
