"""Python file objects on the simulated disk: they behave like files of open(), except
after a crash.
"""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from logcore.testing import (
    CrashTestError,
    Fault,
    FaultPlan,
    SimulatedCrash,
    SimulatedDisk,
    explore,
)

# -- comparison with open() ------------------------------------------------------------


def call_at_random(file: Any, rng: random.Random, is_text: bool) -> Any:
    """Make one random call; return its result, or the type of its error."""
    data: Any = "".join(rng.choice("aä\n") for _ in range(rng.randrange(20)))
    if not is_text:
        data = data.encode()
    size = rng.randrange(30)
    calls: list[Any] = [
        lambda: file.write(data),
        lambda: file.read(size),
        file.read,
        file.readline,
        lambda: file.seek(0),
        lambda: file.seek(0, os.SEEK_END),
        file.flush,
        lambda: file.truncate(0),
        lambda: (file.readable(), file.writable(), file.closed, file.isatty()),
        file.truncate,
    ]
    if not is_text:
        calls += [
            lambda: file.seek(size),
            lambda: file.seek(-1, os.SEEK_CUR),
            file.tell,
            lambda: file.truncate(size),
            lambda: file.readinto(bytearray(size)),
            lambda: file.seek(-50, os.SEEK_END),
        ]
    try:
        return rng.choice(calls)()
    except (OSError, ValueError) as error:
        return type(error).__name__


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", [kind + rest for kind in "rwax" for rest in ("", "b", "+", "b+")]
)
@pytest.mark.parametrize("buffering", [-1, 0, 7])
def test_file_objects_behave_like_open(
    mode: str, buffering: int, tmp_path: Path
) -> None:
    if buffering == 0 and "b" not in mode:
        return
    for seed in range(8):
        real = tmp_path / f"{seed}"
        disk = SimulatedDisk()
        if "x" not in mode:
            real.write_bytes(b"old\nlines\n")
            disk.put("f", b"old\nlines\n")
        options: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8"}
        first = random.Random(seed)
        other = random.Random(seed)
        with (
            open(real, mode, buffering, **options) as theirs,
            disk.open(Path("f"), mode, buffering, **options) as mine,
        ):  # type: ignore[call-overload]
            for _ in range(40):
                assert call_at_random(mine, first, "b" not in mode) == call_at_random(
                    theirs, other, "b" not in mode
                )
        assert disk.content("f") == real.read_bytes()
        assert disk.open_handles == []


def test_errors_equal_those_of_open() -> None:
    disk = SimulatedDisk({"a": b"x", "d": None})
    with pytest.raises(FileNotFoundError):
        disk.open("missing", "rb")
    with pytest.raises(FileNotFoundError):
        disk.open("missing/a", "w")
    with pytest.raises(FileExistsError):
        disk.open("a", "x")
    with pytest.raises(IsADirectoryError):
        disk.open("d", "rb")
    with pytest.raises(ValueError, match="invalid mode: 'rw'"):
        disk.open("a", "rw")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="unbuffered text"):
        disk.open("a", "r", 0)
    with pytest.raises(ValueError, match="binary mode"):
        disk.open("a", "rb", encoding="utf-8")  # type: ignore[call-overload]
    file = disk.open("a", "rb")
    file.close()
    for call in (file.read, file.sync):
        with pytest.raises(ValueError, match="closed file"):
            call()


def test_errors_for_fileno_and_missing_mode_name_the_right_call() -> None:
    disk = SimulatedDisk({"a": b"x"})
    with (
        disk.open("a", "r+") as file,
        pytest.raises(io.UnsupportedOperation, match=r"disk.fsync\(file\)"),
    ):
        os.fsync(file.fileno())
    with pytest.raises(TypeError, match=r'disk.open\(path, "r"\)'), disk.open("a"):  # type: ignore[attr-defined]
        pass
    with pytest.raises(AttributeError, match=r"a handle has no 'read'"):
        disk.open("a").read()  # type: ignore[attr-defined]


def test_failure_of_the_disk_is_an_os_error() -> None:
    disk = SimulatedDisk(
        faults=FaultPlan(Fault("pwrite", errno.ENOSPC), Fault("fsync", errno.EIO))
    )
    with disk.open("a", "wb", 0) as file:
        with pytest.raises(OSError, match="No space") as met:
            file.write(b"1234")
        assert met.value.errno == errno.ENOSPC
        file.write(b"1234")
        with pytest.raises(OSError, match="Input/output"):
            disk.fsync(file)
        disk.fsync(file)
    assert disk.files() == {"/a": b"1234"}


def test_syncs_keep_exactly_the_flushed_bytes() -> None:
    disk = SimulatedDisk()
    with disk.open("a", "w") as file:
        file.write("flushed")
        file.flush()
        file.write(" and not")
        file.sync()
        disk.sync_dir("/")
        assert {state.files["/a"] for state in disk.crash_states()} == {b"flushed"}
    assert disk.files() == {"/a": b"flushed and not"}


def test_dropped_file_is_flushed_unless_its_process_is_dead() -> None:
    disk = SimulatedDisk()
    for path, end in (("a", lambda: None), ("b", disk.kill), ("c", disk.crash)):
        file = disk.open(path, "w")
        file.write("x")
        end()
        del file
        gc.collect()
    assert disk.files() == {"/a": b"x", "/b": b"", "/c": b""}
    disk = SimulatedDisk()
    disk.crash_in(1)
    with pytest.raises(SimulatedCrash), disk.open("a", "w") as text:
        text.write("x")
    gc.collect()


# -- crashes ---------------------------------------------------------------------------


def save(
    disk: SimulatedDisk, state: dict[str, int], *, sync: bool = True, flush: bool = True
) -> None:
    """Replace a file in the usual way: write a new file, sync it, rename it, and sync
    the directory.
    """
    with disk.open("state.json.tmp", "w") as file:
        json.dump(state, file)
        if flush:
            file.flush()
        if sync:
            disk.fsync(file)
    disk.replace("state.json.tmp", "state.json")
    disk.sync_dir("/")


def recover(disk: SimulatedDisk) -> Any:
    if not disk.exists("state.json"):
        return None
    with disk.open("state.json", "r") as file:
        return json.load(file)


def check(promised: list[Any], found: Any) -> None:
    assert found == (promised[-1] if promised else None) or found in (
        {"apples": 4},
        {"apples": 3},
    ), found
    if promised:
        assert found is not None and found["apples"] <= promised[-1]["apples"], (
            "an acknowledged state is lost"
        )


def run_with(**options: bool) -> Any:
    def run(disk: SimulatedDisk, promise: Any) -> None:
        for apples in (4, 3):
            save(disk, {"apples": apples}, **options)
            promise({"apples": apples})

    return run


@pytest.mark.parametrize("names", ["posix", "journal"])
def test_file_replaced_with_syncs_survives_every_crash(names: Any) -> None:
    assert explore(run_with(), recover, check, names=names).states > 20


@pytest.mark.parametrize("forgotten", ["sync", "flush"])
def test_a_rename_without_a_sync_is_found(forgotten: str) -> None:
    with pytest.raises(CrashTestError, match="recovery fails: JSONDecodeError") as met:
        explore(run_with(**{forgotten: False}), recover, check)
    left = met.value.state.files["/state.json"]
    assert left is not None and not left.endswith(b"}")


def test_a_torn_write_in_place_is_found() -> None:
    def run(disk: SimulatedDisk, promise: Any) -> None:
        for apples in (4, 3):
            with disk.open("state.json", "w") as file:
                json.dump({"apples": apples}, file)
                file.flush()
                file.sync()
            disk.sync_dir("/")
            promise({"apples": apples})

    with pytest.raises(CrashTestError):
        explore(run, recover, check)
