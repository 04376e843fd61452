"""A thread that holds the write lock of a shared log cannot acquire it again.

A signal handler or a finalizer can run between any two instructions of an append. If it
appends to the same log, the second change must not begin inside the first one.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.errors import LogLockedError
from logcore.fs import OsFS
from logcore.partition.rewriting import adopting
from logcore.partition.shared_writer import SharedLock


class Interrupted(OsFS):
    """A file system that calls `handler` once, in the next write to a log."""

    handler: Callable[[], object] | None = None

    def pwrite(self, handle: int, data: Any, position: int) -> None:
        handler = self.handler
        self.handler = None
        if handler is not None:
            handler()
        super().pwrite(handle, data, position)


@pytest.fixture
def fs() -> Interrupted:
    return Interrupted()


@pytest.fixture
def log(tmp_path: Path, fs: Interrupted) -> Iterator[logcore.Log]:
    with logcore.open(tmp_path / "t-0", create=True, shared=True, fs=fs) as log:
        log.append(b"first")
        yield log


def values(log: logcore.Log) -> list[bytes | None]:
    return [record.value for record in log.read(0)]


def refusal(append: Callable[[], object]) -> str:
    """Return the text of the LogLockedError that append() raises.

    The error is not kept: its traceback refers to views of the written bytes.
    """
    try:
        append()
    except LogLockedError as error:
        return str(error)
    return "no error"


def test_append_inside_append_of_same_thread_raises(
    log: logcore.Log, fs: Interrupted
) -> None:
    errors: list[str] = []
    fs.handler = lambda: errors.append(refusal(lambda: log.append(b"inside")))
    assert log.append(b"second").offset == 1
    assert len(errors) == 1 and "signal handler" in errors[0]
    assert log.append(b"third").offset == 2
    assert values(log) == [b"first", b"second", b"third"]


def test_append_of_signal_handler_inside_append_raises(
    log: logcore.Log, fs: Interrupted
) -> None:
    def handle(number: int, frame: object) -> None:
        log.append(b"inside")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        fs.handler = lambda: signal.raise_signal(signal.SIGUSR1)
        assert "signal handler" in refusal(lambda: log.append(b"second"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    log.append(b"third")
    assert values(log) == [b"first", b"third"]


def test_append_while_generator_holds_lock_raises(log: logcore.Log) -> None:
    with adopting(log.host.writer):
        assert "signal handler" in refusal(lambda: log.append(b"inside"))
    assert log.append(b"second").offset == 1
    assert values(log) == [b"first", b"second"]


def test_append_after_interrupted_exit_of_generator_succeeds(
    log: logcore.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: SharedLock) -> None:
        raise KeyboardInterrupt

    def adopt() -> None:
        with adopting(log.host.writer):
            monkeypatch.setattr(SharedLock, "release", interrupt)

    with pytest.raises(KeyboardInterrupt):
        adopt()
    monkeypatch.undo()
    assert log.append(b"second").offset == 1
    assert values(log) == [b"first", b"second"]


def test_append_leaves_no_reference_cycle(log: logcore.Log) -> None:
    """A cycle of frames kept the writer and its views until a full collection."""
    log.append(b"second")
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            log.append(b"more")
        assert gc.collect() == 0
    finally:
        gc.enable()
