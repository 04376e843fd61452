"""Steps of several threads under one lock: one thread takes those of the others too, and waits for the disk for all.

Where each thread takes the lock for its own step and writes to a file in it, each write gives the interpreter to
another thread, which finds the lock taken. So 64 threads changed places 18 times for each commit.

Rules:
- One thread leads. It takes the steps that were asked for so far, in their order, and then waits for the disk.
- Of those who ask meanwhile, the first waits for its turn to lead. The others sleep until their step is on disk.
- An error of a step is raised in the thread that asked for it.
- A signal handler may ask for a step in the thread that leads. That step is taken at once.
- An interrupt may come anywhere. A step that has not begun is left out when its own thread is interrupted. Those whose
  step the leader had begun when it was interrupted get DurabilityUnknownError, a second later at most.

Not here: what a step does, and how the disk is waited for (settling.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from logcore.errors import DurabilityUnknownError

#: After so long a thread that sleeps asks whether anybody leads: whom an interrupt has stopped may not have woken it.
_LOOK_SECONDS: Final = 1.0
_CUT_OFF: Final = "the thread that worked for several was interrupted: what this one asked for may be done or not"


class _Asked:
    """What one thread has asked for. gate: closed until it is to look again. is_gone: it was interrupted, and waits no
    longer.

    The rest is written by who leads: error: of the step; is_settled: the disk was waited for; is_told: written last.
    """

    __slots__ = ("error", "gate", "is_gone", "is_settled", "is_told", "step")

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step
        self.gate = threading.Lock()
        self.gate.acquire()
        self.is_gone = False
        self.is_told = False
        self.is_settled = False
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.step()
        except Exception as error:
            self.error = error

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is open
            self.gate.release()


class Combined:
    """The steps that threads ask for.

    lock: held while steps are taken. finish: called under it behind the last of several steps. settle: waits for the
    disk, without it; where who leads is interrupted in that, the others call it too.
    """

    def __init__(
        self, lock: AbstractContextManager[object], finish: Callable[[], object], settle: Callable[[], object]
    ) -> None:
        self._lock = lock
        self._finish = finish
        self._settle = settle
        self._leading = threading.Lock()
        # The thread that leads. An interrupt may leave its name here: what it asks for next is taken alone.
        self._leader: int | None = None
        # Each thread adds its own at the end; who leads takes them from the beginning.
        self._asked: deque[_Asked] = deque()

    def take(self, step: Callable[[], object]) -> None:
        """Returns when the step was taken, and what it has led to is on disk. Raises what the step raises."""
        if self._leader == threading.get_ident():
            self._take_alone(step)
            return
        mine = _Asked(step)
        try:
            self._asked.append(mine)
            may_lead = self._is_first(mine)
            while not mine.is_told:
                if may_lead:
                    self._lead(mine)
                else:
                    is_woken = mine.gate.acquire(timeout=_LOOK_SECONDS)
                    may_lead = not is_woken or self._is_first(mine)
        except BaseException:
            mine.is_gone = True
            with contextlib.suppress(ValueError):  # who leads has taken it out
                self._asked.remove(mine)
            with contextlib.suppress(IndexError):
                self._asked[0].wake()  # it is its turn to lead now
            raise
        if not mine.is_settled:
            self._settle()
        if mine.error is not None:
            raise mine.error

    def _take_alone(self, step: Callable[[], object]) -> None:
        with self._lock:
            try:
                step()
            finally:
                self._finish()
        self._settle()

    def _is_first(self, mine: _Asked) -> bool:
        try:
            return self._asked[0] is mine
        except IndexError:  # who leads has taken all
            return False

    def _lead(self, mine: _Asked) -> None:
        with self._leading:
            if not mine.is_told:
                try:
                    self._leader = threading.get_ident()
                    self._take_all()
                finally:
                    self._leader = None
            if not mine.is_told:  # an earlier leader had taken it, and was interrupted
                mine.error = DurabilityUnknownError(_CUT_OFF)
                mine.is_told = True

    def _take_all(self) -> None:
        taken: list[_Asked] = []
        is_whole = False
        is_settled = False
        try:
            with self._lock:
                while self._asked:
                    taken.append(self._asked.popleft())
                    if not taken[-1].is_gone:
                        taken[-1].run()
                self._finish()
                is_whole = True
            self._settle()
            is_settled = True
        finally:
            for one in taken:
                if not is_whole and one.error is None:
                    one.error = DurabilityUnknownError(_CUT_OFF)
                one.is_settled = is_settled
                one.is_told = True
            for one in taken:
                one.wake()
