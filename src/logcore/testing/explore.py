"""Runs a program on a simulated disk, cuts the power at every moment, and asks each disk that may be left.

    def run(disk, promise): ...      # the program; promise(x) when it has reported that x is done
    def recover(disk): ...           # what it does when it starts again; returns what it finds
    def judge(promised, found): ...  # asserts that this is right

    explore(run, recover, judge)

Rules:
- Each disk is opened once: equal ones are the same disk. One that differs only in what recovery never read, as the
  content of a file that it removes unread, is not opened either: the same would be found (known.Known).
- What was found is judged again when more was promised.
- For some of the disks the power goes again, at every moment of their recovery.
- A failure says which moment, which disk and which calls led there, and carries that disk.

`LogHistory` is the judge of one log: what was asked of it, what was acknowledged, and so what a crash may leave.
This module does not know how a disk loses data; disk.py does.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import attrs

from logcore.testing.crashstates import Kind, Names
from logcore.testing.disk import CrashState, SimulatedDisk
from logcore.testing.faults import SYNCS, Operation
from logcore.testing.known import Known

#: pytest leaves frames of this module out of what it shows of a failure.
__tracebackhide__ = True

#: Frames of these are not shown of a finding: it is about the program, at the line where that stood.
_OURS = ("logcore", "contextlib")

Found = TypeVar("Found")
Promise = TypeVar("Promise")


class Promiser(Protocol):
    """What run() gets to say what it has promised."""

    def __call__(self, value: Any, *, survives: Kind = "power") -> None:
        """survives: "power" for what no crash may undo, "kill" for what only the loss of power may."""
        ...


@attrs.define(kw_only=True)
class Report:
    """What an exploration did.

    operations: changes and syncs of the program. moments: at which the power was cut. states: distinct disks that were
    left and judged. again: disks left by a second crash, during recovery. judged: verdicts on a disk at a moment.
    opened: how many of states and again recovery ran on; the others differ from one of these in what it does not read.
    """

    operations: int = 0
    moments: int = 0
    states: int = 0
    again: int = 0
    judged: int = 0
    opened: int = 0

    def __add__(self, other: Report) -> Report:
        mine = attrs.astuple(self)
        theirs = attrs.astuple(other)
        return Report(**{field.name: a + b for field, a, b in zip(attrs.fields(Report), mine, theirs, strict=True)})


class CrashTestError(AssertionError):
    """A disk that a crash may leave and that is not right. state: that disk; state.disk() opens it. operations: what
    was done on it before, the last one perhaps half. seed, moment: the same program with this seed comes to this disk
    at this moment again.
    """

    def __init__(
        self, reason: str, state: CrashState, operations: Sequence[Operation], *, seed: int = 0, moment: int = 0
    ) -> None:
        self.state = state
        self.operations = list(operations)
        self.seed = seed
        self.moment = moment
        last = "\n".join(f"    {at}: {operation}" for at, operation in list(enumerate(operations))[-12:])
        super().__init__(
            f"{reason}\n"
            f"  after a crash ({state.kind}): {state.what}\n"
            f"  the last operations:\n{last or '    none'}\n"
            f"  to replay: the same program with seed={seed} comes to this disk again, at moment {moment}; in\n"
            "    `except CrashTestError as error:` recover(error.state.disk()) starts on it, and\n"
            '    error.state.disk().save("broken") writes it to a directory'
        )


@attrs.define
class Seen(Generic[Found]):
    """What explorations know of disks, to be shared by those in which equal disks have the same meaning.

    states: key of a state -> what recovery finds. known, thoroughly: the same, by what it reads. recovered: how many
    disks recovery was asked about.
    """

    states: dict[int, list[Found]] = attrs.field(factory=dict)
    known: Known[Found] = attrs.field(factory=Known)
    thoroughly: Known[Found] = attrs.field(factory=Known)
    recovered: int = 0


class Explorer(Generic[Found]):
    """Explores what runs on the disks it is attached to.

    recover, judge(found, kind): as for explore(); judge raises AssertionError for what must not be. same: compares what
    two recoveries of the same disk found, one of which was interrupted. restart: the recovery to interrupt, if recover
    does more than that. again_every: of how many disks the recovery of one is crashed. thorough: what to do instead of
    recover on one of thorough_every disks. limit: of states at one moment.
    """

    def __init__(
        self,
        recover: Callable[[SimulatedDisk], Found],
        judge: Callable[[Found, Kind], None],
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
        self.judge = judge
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
        self._known: Seen[Found] = Seen() if seen is None else seen
        self._seen = self._known.states
        self._disk: SimulatedDisk | None = None
        self._live: dict[int, CrashState] | None = None  # what a crash now may leave
        self._complete = 0  # of these the one with nothing missing
        self._is_stale = False

    def attach(self, disk: SimulatedDisk) -> None:
        """From now on, and until finish(), each moment of this disk is explored."""
        self._disk = disk
        self._live = None
        self._is_stale = True
        disk.observer = self._observe

    def promised(self) -> None:
        """More must survive than before: what may be left now is to be judged again."""
        self._is_stale = True

    def finish(self) -> Report:
        """Looks at the last moment and lets go of the disk."""
        assert self._disk is not None
        self._look_again()
        self._disk.observer = None
        self.report.operations += len(self._disk.operations)
        self._disk = None
        return self.report

    def _observe(self, operation: str, is_done: bool) -> None:
        try:
            self._look_at(operation, is_done)
        except BaseException:
            assert self._disk is not None
            self._disk.observer = None  # what the program does about this error is not explored any more
            raise

    def _look_at(self, operation: str, is_done: bool) -> None:
        if not is_done:
            if self._is_stale:
                self._look_again()
        elif operation in SYNCS:
            self._live = None  # less may be lost than before; explored when it matters
        elif self._live is None:
            self._look(newest=False)
        else:
            self._look(newest=True)

    def _look_again(self) -> None:
        self._is_stale = False
        if self._live is None:
            self._look(newest=False)
            return
        self.report.moments += 1
        self._call_power(self._complete)
        for key, state in self._live.items():
            for found in self._seen[key]:
                self._check(found, state)

    def _look(self, *, newest: bool) -> None:
        assert self._disk is not None
        self.report.moments += 1
        live = self._live = self._live or {}
        self._call_power(None)
        first = True
        for state in self._disk.crash_states(limit=self.limit, seed=self.seed, newest=newest):
            key = state.key
            if key not in self._seen:
                self._seen[key] = self._open(state)
            if state.kind == "kill" or key not in live:
                live[key] = state
            if first:
                self._complete = key
                first = False
            for found in self._seen[key]:
                self._check(found, state)

    def _call_power(self, but: int | None) -> None:
        """What a kill could leave a moment ago takes a loss of power now, but for the state with nothing missing."""
        for key, state in (self._live or {}).items():
            if state.kind == "kill" and key != but:
                state.kind = "power"

    def _open(self, state: CrashState) -> list[Found]:
        """What recovery finds on a disk; more than one thing when being interrupted makes a difference."""
        self.report.states += 1
        found = self._recover(state)
        founds = [found]
        if self.again_every and len(self._seen) % self.again_every == 0:
            for second in self._crash_again(state):
                self.report.again += 1
                other = self._recover(second)
                if self.same is not None and not self.same(found, other):
                    raise self._finding(
                        f"a crash during recovery changes what is found: {found} without, {other} with it", second
                    )
                if self.same is None:
                    founds.append(other)
        return founds

    def _crash_again(self, state: CrashState) -> list[CrashState]:
        """Some of the disks that a crash during recovery may leave."""
        disk = state.disk()
        rng = random.Random(self.seed * 1_000_003 + len(self._seen))
        left: list[CrashState] = []

        def observe(operation: str, is_done: bool) -> None:
            if is_done and operation not in SYNCS and rng.random() < 0.25:
                states = list(disk.crash_states(limit=40, seed=self.seed, newest=True))
                left.append(rng.choice(states))

        disk.observer = observe
        self.restart(disk)
        return left

    def _recover(self, state: CrashState) -> Found:
        recover = self.recover
        known = self._known.known
        self._known.recovered += 1
        if self.thorough is not None and self._known.recovered % self.thorough_every == 0:
            recover = self.thorough
            known = self._known.thoroughly
        found = known.get(state.files, state.now_ms)
        if found is not None:
            return found
        self.report.opened += 1
        disk = state.disk()
        try:
            return known.run(disk, recover)
        except Exception as error:
            disk.crash()  # so that logs it left open stay silent
            raise self._finding(f"recovery fails: {type(error).__name__}: {error}", state) from error

    def _check(self, found: Found, state: CrashState) -> None:
        self.report.judged += 1
        try:
            self.judge(found, state.kind)
        except AssertionError as error:
            raise self._finding(str(error), state) from error

    def _finding(self, reason: str, state: CrashState) -> CrashTestError:
        if self._disk is not None:
            operations = self._disk.operations
        else:
            operations = []
        return CrashTestError(reason, state, operations, seed=self.seed, moment=self.report.moments)


def explore(
    run: Callable[[SimulatedDisk, Promiser], object],
    recover: Callable[[SimulatedDisk], Found],
    judge: Callable[[list[Any], Found], object],
    *,
    files: dict[str, bytes | None] | None = None,
    again_every: int = 10,
    limit: int | None = 500,
    names: Names = "posix",
    seed: int = 0,
) -> Report:
    """Tests a program against crashes at every moment of run(); raises CrashTestError for the first wrong disk.

    run(disk, promise): works on the disk, and calls promise(value) as soon as a user may rely on something.
    recover(disk): starts again on what a crash left, and returns what it finds; called once for each disk, so what it
    finds must come from the disk alone. judge(promised, found): asserts that what had been promised by then is in what
    was found, and nothing that must not be. files: what is on the disk at first. limit: disks explored for one moment,
    None for all. again_every: one in so many recoveries is crashed too, and what it did outside the disk is then
    forgotten; 0 for none. names: see SimulatedDisk. seed: of what is random.
    """
    promised: list[tuple[Any, Kind]] = []

    def verdict(found: Found, kind: Kind) -> None:
        judge([value for value, survives in promised if survives == "power" or kind == "kill"], found)

    def promise(value: Any, *, survives: Kind = "power") -> None:
        promised.append((value, survives))
        explorer.promised()

    explorer = Explorer(recover, verdict, again_every=again_every, limit=limit, seed=seed)
    disk = SimulatedDisk(files, seed=seed, names=names)
    explorer.attach(disk)
    try:
        with _quiet():
            run(disk, promise)
            return explorer.finish()
    except CrashTestError as error:
        disk.crash()
        raise error.with_traceback(_without_ours(error.__traceback__)) from error.__cause__
    except BaseException:
        disk.crash()
        raise


@contextlib.contextmanager
def _quiet() -> Generator[None, None, None]:
    """Without the log lines of logcore: of thousands of recoveries each tells what it cut off."""
    logger = logging.getLogger("logcore")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The frames of the program in a traceback."""
    kept: list[TracebackType] = []
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0] not in _OURS:
            kept.append(trace)
        trace = trace.tb_next
    shown = None
    for each in reversed(kept):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown
