"""Flat combining: one thread, the leader, runs queued steps of all threads.

It holds one lock for all of them, and waits for the fsync on behalf of all.

If each thread acquired the lock for its own step, every file write would release the
GIL, and the next thread would block on the lock. With 64 threads, this took 18 context
switches for each commit in a measurement.

Rules:
- The leader runs the steps that are queued so far, in their order, and then waits for the
  fsync.
- The first thread that queues a step while the leader runs waits to become the next
  leader. Later threads sleep until their steps are durable.
- An error of a step is raised in the thread that queued the step.
- A signal handler may request a step in the thread that leads. That step runs at once.
- A thread can be interrupted at any point. If its step has not started, the step is
  cancelled. If the leader is interrupted after it started steps, their threads get
  DurabilityUnknownError, at most one second later.

This module does not define the steps, nor how to wait for the fsync (durable_queue.py does).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from logcore.errors import DurabilityUnknownError

#: After this time, a sleeping thread checks whether a leader exists. A leader that was
#: interrupted may not have woken it.
_CHECK_SECONDS: Final = 1.0
_CUT_OFF: Final = (
    "the thread that ran the requests of several threads was interrupted: this request "
    "may have been executed"
)


class _Request:
    """A step that one thread has queued.

    The leader writes the fields is_done, is_settled and error. The thread that queued the
    step writes is_abandoned.
    """

    __slots__ = ("error", "gate", "is_abandoned", "is_done", "is_settled", "step")

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step
        # Locked until the thread must check again.
        self.gate = threading.Lock()
        self.gate.acquire()
        #: Whether the thread was interrupted and no longer waits.
        self.is_abandoned = False
        #: Whether the result is complete. Written last.
        self.is_done = False
        #: Whether the leader has waited for the fsync.
        self.is_settled = False
        #: The error of the step.
        self.error: Exception | None = None

    def run(self) -> None:
        """Run the step and keep its error."""
        try:
            self.step()
        except Exception as error:
            self.error = error

    def wake(self) -> None:
        """Wake the thread that queued the step."""
        # Not contextlib.suppress(), which takes 0.7 us for each step.
        try:
            self.gate.release()
        except RuntimeError:
            pass  # the gate is already open


class FlatCombiner:
    """A queue of steps that threads run for each other."""

    def __init__(
        self,
        lock: AbstractContextManager[object],
        finish: Callable[[], object],
        settle: Callable[[], object],
    ) -> None:
        """Create an empty queue.

        `lock` is held while steps run. `finish` is called with the lock held, after the
        last of several steps. `settle` waits for the fsync, without the lock. If the
        leader is interrupted in `settle`, the other threads call it too.
        """
        self._lock = lock
        self._finish = finish
        self._wait_until_durable = settle
        self._leading = threading.Lock()
        #: The id of the leading thread. An interrupt may leave an id here; the next
        #: step of that thread then runs alone.
        self._leader: int | None = None
        #: Each thread appends its step at the end. The leader takes steps from the
        #: front.
        self._requests: deque[_Request] = deque()

    def take(self, step: Callable[[], object]) -> None:
        """Run a step, and return when its results are durable.

        Raises the error of the step, if there is one.
        """
        # A signal handler in the leading thread. It must not wait for itself.
        if self._leader == threading.get_ident():
            self._run_alone(step)
            return
        mine = _Request(step)
        try:
            self._requests.append(mine)
            may_lead = self._is_first(mine)
            while not mine.is_done:
                if may_lead:
                    self._lead(mine)
                else:
                    is_woken = mine.gate.acquire(timeout=_CHECK_SECONDS)
                    may_lead = not is_woken or self._is_first(mine)
        except BaseException:
            mine.is_abandoned = True
            with contextlib.suppress(ValueError):  # the leader has taken it out
                self._requests.remove(mine)
            with contextlib.suppress(IndexError):
                self._requests[0].wake()  # that thread may lead now
            raise
        if not mine.is_settled:
            self._wait_until_durable()
        if mine.error is not None:
            raise mine.error

    def _run_alone(self, step: Callable[[], object]) -> None:
        with self._lock:
            try:
                step()
            finally:
                self._finish()
        self._wait_until_durable()

    def _is_first(self, mine: _Request) -> bool:
        try:
            return self._requests[0] is mine
        except IndexError:  # the leader has taken all steps
            return False

    def _lead(self, mine: _Request) -> None:
        with self._leading:
            if not mine.is_done:
                try:
                    self._leader = threading.get_ident()
                    self._take_all()
                finally:
                    self._leader = None
            # An earlier leader had taken the step, and was interrupted.
            if not mine.is_done:
                mine.error = DurabilityUnknownError(_CUT_OFF)
                mine.is_done = True

    def _take_all(self) -> None:
        taken: list[_Request] = []
        is_whole = False
        is_settled = False
        try:
            with self._lock:
                while self._requests:
                    taken.append(self._requests.popleft())
                    if not taken[-1].is_abandoned:
                        taken[-1].run()
                self._finish()
                is_whole = True
            self._wait_until_durable()
            is_settled = True
        finally:
            for request in taken:
                if not is_whole and request.error is None:
                    request.error = DurabilityUnknownError(_CUT_OFF)
                request.is_settled = is_settled
                request.is_done = True
            for request in taken:
                request.wake()
