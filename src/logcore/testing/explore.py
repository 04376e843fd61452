"""Crash explorer: crashes a program at every moment, and checks each resulting disk.

    def run(disk, promise): ...      # the program; calls promise(x) after it has reported x as done
    def recover(disk): ...           # the restart of the program; returns its findings
    def check(promised, found): ...  # asserts that the findings are right

    explore(run, recover, check)

Rules:
- Each distinct disk is opened once. A disk is also skipped if it differs only in
  content that recovery never read, for example in a file that recovery deletes unread
  (result_cache.ResultCache).
- A finding is checked again after the program has made another promise.
- On some of the disks, the power fails again, at sampled moments of the recovery.
- A failure contains the moment, the disk and the calls before the crash.

`LogHistory` checks one log: it records calls and acknowledgments, and derives from them
the states that a crash may leave. disk.py defines which data a crash may lose.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import attrs

from logcore.testing.crash_states import Kind, Names
from logcore.testing.disk import CrashState, SimulatedDisk
from logcore.testing.faults import SYNCS, Operation
from logcore.testing.result_cache import ResultCache

#: pytest hides the frames of this module in the traceback of a failure.
__tracebackhide__ = True

#: Frames of these packages are removed from the traceback of a failure, so that it ends
#: at the line of the program.
_HIDDEN_PACKAGES = ("logcore", "contextlib")

Found = TypeVar("Found")
Promise = TypeVar("Promise")


class Promiser(Protocol):
    """The callback with which run() records its promises."""

    def __call__(self, value: Any, *, survives: Kind = "power") -> None:
        """Record a promise.

        `survives` is "power" if every crash must preserve the value, and "kill" if a
        power cut may undo it.
        """
        ...


@attrs.define(kw_only=True)
class Report:
    """Counters of an exploration."""

    #: Changes and syncs of the program.
    operations: int = 0
    #: Moments at which the power was cut.
    moments: int = 0
    #: Distinct disks that were left by a crash and checked.
    states: int = 0
    #: Disks left by a second crash, during recovery.
    again: int = 0
    #: Number of calls of check().
    checked: int = 0
    #: Number of disks in `states` and `again` on which recovery ran. Every other disk
    #: differs from one of these only in bytes that recovery does not read.
    opened: int = 0

    def __add__(self, other: Report) -> Report:
        values = attrs.astuple(self)
        other_values = attrs.astuple(other)
        return Report(
            **{
                field.name: a + b
                for field, a, b in zip(
                    attrs.fields(Report), values, other_values, strict=True
                )
            }
        )


class CrashTestError(AssertionError):
    """A crash may leave a disk on which recovery or its findings are wrong.

    Attributes:
        state: That disk; state.disk() opens it.
        operations: The operations before the crash. The last one may be incomplete.
        seed: With this seed, the same program reproduces the disk.
        moment: The number of the moment at which the crash happened.
    """

    def __init__(
        self,
        reason: str,
        state: CrashState,
        operations: Sequence[Operation],
        *,
        seed: int = 0,
        moment: int = 0,
    ) -> None:
        self.state = state
        self.operations = list(operations)
        self.seed = seed
        self.moment = moment
        last = "\n".join(
            f"    {at}: {operation}"
            for at, operation in list(enumerate(operations))[-12:]
        )
        super().__init__(
            f"{reason}\n"
            f"  after a crash ({state.kind}): {state.what}\n"
            f"  the last operations:\n{last or '    none'}\n"
            f"  to replay: the same program with seed={seed} reaches this disk again, at moment {moment}; in\n"
            "    `except CrashTestError as error:` recover(error.state.disk()) starts on it, and\n"
            '    error.state.disk().save("broken") writes it to a directory'
        )


@attrs.define
class Seen(Generic[Found]):
    """Results shared by explorations whose checks have the same result for equal disks."""

    #: Key of a crash state to the findings of recovery.
    states: dict[int, list[Found]] = attrs.field(factory=dict)
    #: Findings of recovery by the content that it read.
    results: ResultCache[Found] = attrs.field(factory=ResultCache)
    #: Findings of the thorough recovery, by the content that it read.
    thorough_results: ResultCache[Found] = attrs.field(factory=ResultCache)
    #: Number of disks for which recovery was requested.
    recovered: int = 0


class Explorer(Generic[Found]):
    """Explores the crashes of programs that run on the disks it is attached to.

    Args:
        recover: See explore().
        check: check(found, kind) raises AssertionError for a finding that is not
            allowed.
        same: Compares the findings of a recovery and of an interrupted recovery of the
            same disk.
        restart: The recovery to interrupt, if `recover` also does other work.
        again_every: One of `again_every` recoveries is interrupted by a crash. 0
            disables this.
        thorough: Replaces `recover` on one of `thorough_every` disks.
        limit: Maximum number of states explored at one moment.
    """

    def __init__(
        self,
        recover: Callable[[SimulatedDisk], Found],
        check: Callable[[Found, Kind], None],
        *,
        same: Callable[[Found, Found], bool] | None = None,
        restart: Callable[[SimulatedDisk], object] | None = None,
        again_every: int = 10,
        thorough: Callable[[SimulatedDisk], Found] | None = None,
        thorough_every: int = 10,
        limit: int | None = None,
        seed: int = 0,
        seen: Seen[Found] | None = None,
    ) -> None:
        self.recover = recover
        self.check = check
        self.same = same
        self.restart: Callable[[SimulatedDisk], object] = recover
        if restart is not None:
            self.restart = restart
        self.again_every = again_every
        self.limit = limit
        self.seed = seed
        self.thorough = thorough
        self.thorough_every = thorough_every
        self.report = Report()
        self._shared: Seen[Found] = Seen() if seen is None else seen
        self._findings_by_key = self._shared.states
        self._disk: SimulatedDisk | None = None
        #: The states that a crash at the current moment may leave.
        self._current_states: dict[int, CrashState] | None = None
        self._complete = 0  # key of the current state that has lost no write
        self._needs_check = False

    def attach(self, disk: SimulatedDisk) -> None:
        """Explore each moment of this disk from now on, until finish()."""
        self._disk = disk
        self._current_states = None
        self._needs_check = True
        disk.observer = self._observe

    def check_promises(self) -> None:
        """Check the current states again, after the program has made a promise."""
        self._needs_check = True

    def finish(self) -> Report:
        """Explore the last moment and detach from the disk."""
        assert self._disk is not None
        self._explore_again()
        self._disk.observer = None
        self.report.operations += len(self._disk.operations)
        self._disk = None
        return self.report

    def _observe(self, operation: str, is_done: bool) -> None:
        try:
            self._check_state(operation, is_done)
        except BaseException:
            assert self._disk is not None
            # The program's reaction to this error is not explored.
            self._disk.observer = None
            raise

    def _check_state(self, operation: str, is_done: bool) -> None:
        if not is_done:
            if self._needs_check:
                self._explore_again()
        elif operation in SYNCS:
            # After a sync, fewer states are possible. They are explored before the next
            # change.
            self._current_states = None
        elif self._current_states is None:
            self._explore(newest=False)
        else:
            self._explore(newest=True)

    def _explore_again(self) -> None:
        self._needs_check = False
        if self._current_states is None:
            self._explore(newest=False)
            return
        self.report.moments += 1
        self._require_power_cut(self._complete)
        for key, state in self._current_states.items():
            for found in self._findings_by_key[key]:
                self._check(found, state)

    def _explore(self, *, newest: bool) -> None:
        assert self._disk is not None
        self.report.moments += 1
        current_states = self._current_states = self._current_states or {}
        self._require_power_cut(None)
        first = True
        for state in self._disk.crash_states(
            limit=self.limit, seed=self.seed, newest=newest
        ):
            key = state.key
            if key not in self._findings_by_key:
                self._findings_by_key[key] = self._open(state)
            if state.kind == "kill" or key not in current_states:
                current_states[key] = state
            if first:
                self._complete = key
                first = False
            for found in self._findings_by_key[key]:
                self._check(found, state)

    def _require_power_cut(self, except_key: int | None) -> None:
        """Change the kind of the current "kill" states to "power", with one exception.

        A kill cannot leave a state of the previous moment any more, but a power cut can.
        """
        for key, state in (self._current_states or {}).items():
            if state.kind == "kill" and key != except_key:
                state.kind = "power"

    def _open(self, state: CrashState) -> list[Found]:
        """Return the findings of recovery on a disk. An interrupted recovery may add
        another finding.
        """
        self.report.states += 1
        finding = self._recover(state)
        findings = [finding]
        if self.again_every and len(self._findings_by_key) % self.again_every == 0:
            for second in self._crash_again(state):
                self.report.again += 1
                other = self._recover(second)
                if self.same is not None and not self.same(finding, other):
                    raise self._error(
                        f"a crash during recovery changes the result: {finding} without, {other} with it",
                        second,
                    )
                if self.same is None:
                    findings.append(other)
        return findings

    def _crash_again(self, state: CrashState) -> list[CrashState]:
        """Return some of the disks that a crash during recovery may leave."""
        disk = state.disk()
        rng = random.Random(self.seed * 1_000_003 + len(self._findings_by_key))
        disks: list[CrashState] = []

        def observe(operation: str, is_done: bool) -> None:
            if is_done and operation not in SYNCS and rng.random() < 0.25:
                states = list(disk.crash_states(limit=40, seed=self.seed, newest=True))
                disks.append(rng.choice(states))

        disk.observer = observe
        self.restart(disk)
        return disks

    def _recover(self, state: CrashState) -> Found:
        recover = self.recover
        results = self._shared.results
        self._shared.recovered += 1
        if (
            self.thorough is not None
            and self._shared.recovered % self.thorough_every == 0
        ):
            recover = self.thorough
            results = self._shared.thorough_results
        found = results.get(state.files, state.now_ms)
        if found is not None:
            return found
        self.report.opened += 1
        disk = state.disk()
        try:
            return results.run(disk, recover)
        except Exception as error:
            disk.crash()  # so that logs that are still open print no warnings
            raise self._error(
                f"recovery fails: {type(error).__name__}: {error}", state
            ) from error

    def _check(self, found: Found, state: CrashState) -> None:
        self.report.checked += 1
        try:
            self.check(found, state.kind)
        except AssertionError as error:
            raise self._error(str(error), state) from error

    def _error(self, reason: str, state: CrashState) -> CrashTestError:
        if self._disk is not None:
            operations = self._disk.operations
        else:
            operations = []
        return CrashTestError(
            reason, state, operations, seed=self.seed, moment=self.report.moments
        )


def explore(
    run: Callable[[SimulatedDisk, Promiser], object],
    recover: Callable[[SimulatedDisk], Found],
    check: Callable[[list[Any], Found], object],
    *,
    files: dict[str, bytes | None] | None = None,
    again_every: int = 10,
    limit: int | None = 500,
    names: Names = "posix",
    seed: int = 0,
) -> Report:
    """Test a program against crashes at every moment of run().

    Args:
        run: run(disk, promise) works on the disk. It calls promise(value) as soon as a
            user may rely on the value.
        recover: recover(disk) restarts the program on a disk left by a crash, and
            returns its findings. It is called once for each disk, so the findings must
            depend on the disk alone.
        check: check(promised, found) asserts that the findings include all values
            promised so far, and no value that is not allowed.
        files: The initial content of the disk.
        again_every: One of `again_every` recoveries is interrupted by a crash. 0
            disables this. Effects of that recovery outside the disk are lost.
        limit: Maximum number of disks explored for one moment, None for all.
        names: See SimulatedDisk.
        seed: Seed of all random choices.

    Raises:
        CrashTestError: Recovery fails on a disk, or its findings are wrong.
    """
    promises: list[tuple[Any, Kind]] = []

    def check_findings(found: Found, kind: Kind) -> None:
        check(
            [
                value
                for value, survives in promises
                if survives == "power" or kind == "kill"
            ],
            found,
        )

    def promise(value: Any, *, survives: Kind = "power") -> None:
        promises.append((value, survives))
        explorer.check_promises()

    explorer = Explorer(
        recover, check_findings, again_every=again_every, limit=limit, seed=seed
    )
    disk = SimulatedDisk(files, seed=seed, names=names)
    explorer.attach(disk)
    try:
        with _without_logging():
            run(disk, promise)
            return explorer.finish()
    except CrashTestError as error:
        disk.crash()
        raise error.with_traceback(
            _without_library_frames(error.__traceback__)
        ) from error.__cause__
    except BaseException:
        disk.crash()
        raise


@contextlib.contextmanager
def _without_logging() -> Generator[None, None, None]:
    """Suppress the log lines of logcore, because each of thousands of recoveries reports
    the bytes that it truncates.
    """
    logger = logging.getLogger("logcore")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _without_library_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of logcore."""
    frames: list[TracebackType] = []
    while trace is not None:
        if (
            str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
            not in _HIDDEN_PACKAGES
        ):
            frames.append(trace)
        trace = trace.tb_next
    result = None
    for frame in reversed(frames):
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result
