"""Runs a coordinator in the broker's event loop: its effects, loading and expiry.

Rules:
- Effects are executed in the order of their transitions, even if one effect causes the
  next transition.
- The stored records are read once, in another thread, before any request is executed. If
  they cannot be read, the next request reads them again.
- In a cluster, they are read once all records of the partition are committed. Readers do
  not see uncommitted records, so the coordinator would lack them when they become
  committed. It also must not act on a record that another leader may truncate.

This module does not execute single effects (groups.py and transactions.py do).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from logcore import NotLeaderError
from netshim.internal_topics import InternalTopic
from netshim.scheduling import guarded
from netshim.state import BrokerState

_log = logging.getLogger("netshim")

EffectT = TypeVar("EffectT")


class LoopHost(ABC, Generic[EffectT]):
    """A coordinator in the event loop."""

    def __init__(
        self, state: BrokerState, topic: InternalTopic, expiry_ms: int
    ) -> None:
        self._state = state
        #: Contains the records of the coordinator.
        self._topic = topic
        #: Interval at which unused state is deleted.
        self._expiry_ms = expiry_ms
        #: Effects to execute, in order.
        self._effects: deque[EffectT] = deque()
        #: Effects are being executed. A nested call of _act() only queues its effects.
        self._is_acting = False
        #: The coordinator contains all stored records. Until then, requests wait.
        self._is_loaded = False
        #: Waiting callers of load(). None unless the records are being read.
        self._loading: list[Callable[[bool], None]] | None = None

    def _act(self, effects: Iterable[EffectT]) -> None:
        """Execute effects after the earlier ones."""
        self._effects.extend(effects)
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while self._effects:
                self._execute(self._effects.popleft())
        finally:
            self._is_acting = False

    @abstractmethod
    def _execute(self, effect: EffectT) -> None:
        """Execute one effect."""

    # -- loading

    @property
    def is_loaded(self) -> bool:
        return self._is_loaded

    def load(self, now_ms: int, callback: Callable[[bool], None]) -> None:
        """Read the stored records once.

        Call callback(True), or callback(False) if that failed.
        """
        self._state.advance_clock(now_ms)
        if self._is_loaded:
            callback(True)
        elif self._loading is not None:
            self._loading.append(callback)
        else:
            self._loading = [callback]
            if self._topic.exists:
                self._topic.when_committed(self._read_committed)
            else:
                self._on_loaded([])

    def _read_committed(self, error: Exception | None) -> None:
        if error is not None:
            self._on_loaded(error)
        else:
            self._state.work.submit(self._topic.name, self._read, self._on_loaded)

    @abstractmethod
    def _read(self) -> list[EffectT]:
        """Load the stored records into the coordinator, and return the first effects.

        This runs in another thread, because a million records would block the event
        loop for a long time. The coordinator gets no other calls while it runs.

        Raises:
            LogcoreError: the topic cannot be read, or a record cannot be decoded.
        """

    def _begin(self, effects: list[EffectT]) -> Iterable[EffectT]:
        """Begin to serve after _read(), and return the effects to execute."""
        return effects

    def _on_loaded(self, result: list[EffectT] | Exception) -> None:
        waiting = self._loading or []
        self._loading = None
        if isinstance(result, NotLeaderError):
            # Another broker leads the partition now, which is no failure.
            pass
        elif isinstance(result, Exception):
            _log.error(
                "%s cannot be read, so nothing that it stores can be served: %s",
                self._topic.name,
                result,
            )
        else:
            self._is_loaded = True
            self._act(self._begin(result))
            self._check_later()
        for callback in waiting:
            guarded(callback, self._is_loaded)

    # -- expiry

    def _check_later(self) -> None:
        self._state.timers.set(
            self, self._state.now_ms + self._expiry_ms, self._check_expiry
        )

    def _stop_expiry(self) -> None:
        self._state.timers.cancel(self)

    def _check_expiry(self, now_ms: int) -> None:
        self._state.advance_clock(now_ms)
        self._check_later()
        self._act(self._expire(self._state.logdir.host.trusted_ms(now_ms)))

    @abstractmethod
    def _expire(self, trusted_ms: int) -> Iterable[EffectT]:
        """Delete state that was unused for long. See LogDir.trusted_ms()."""
