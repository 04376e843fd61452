"""Fault rules of a running broker, set by the thread of a test.

    with kafka.faults() as faults:
        rule = faults.answer("Produce", "NOT_LEADER_OR_FOLLOWER", times=2)
        ...
        rule.wait(hits=2)

The rules end with the block.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol, Self, TypeVar

from logcore import LogDir
from logcore.errors import InvalidConfigError
from logcore.testing.faults import Fault, FaultFS, FaultPlan, Slow
from netshim.faults.plan import RequestFaultPlan
from netshim.faults.requests import ANY_API, ObservedRequest, error_code, find_api
from netshim.faults.rules import (
    Action,
    Answer,
    Delay,
    Disconnect,
    FaultRule,
    Intercept,
    LoseResponse,
    Observe,
)
from netshim.state import Call

_T = TypeVar("_T")
#: Longest delay of a rule: a day.
_MAX_DELAY_MS = 86_400_000
#: Seconds between two checks of DiskRule.wait().
_CHECK_S = 0.01


class FaultyBroker(Protocol):
    """A broker that may have a fault plan. Broker is an implementation."""

    faults: RequestFaultPlan | None


class BrokerThread(Protocol):
    """Calls functions in the broker's thread. ServerThread is an implementation."""

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function and return its result."""
        ...


class ActiveRule:
    """A rule of a running broker. Any thread may use it."""

    def __init__(
        self, thread: BrokerThread, broker: FaultyBroker, rule: FaultRule
    ) -> None:
        """Create an instance. Users call the methods of FaultControl."""
        self._thread = thread
        self._broker = broker
        self._rule = rule

    def __repr__(self) -> str:
        return repr(self._rule)

    @property
    def hits(self) -> int:
        """Number of requests on which the rule has acted."""
        # Written by the broker's thread. A reader sees the number before or after a
        # hit.
        return self._rule.hits

    @property
    def requests(self) -> list[ObservedRequest]:
        """The latest requests on which the rule has acted, at most 1,000."""
        # Copied by the broker's thread, which appends requests to it.
        return self._thread.call(lambda: list(self._rule.requests))

    def wait(self, hits: int = 1, timeout: float = 10.0) -> None:
        """Wait until the rule has acted on this number of requests.

        `timeout` is in seconds.

        Raises:
            AssertionError: the time has passed. The text lists the latest requests.
        """
        self._rule.wait(hits, timeout)

    def release(self) -> None:
        """Serve the requests that the rule delays, and close silent connections."""
        self._thread.call(self._rule.release)

    def remove(self) -> None:
        """End the rule, and release its requests."""

        def remove() -> None:
            if self._broker.faults is not None:
                self._broker.faults.remove(self._rule)

        # A broker that has stopped has ended its rules.
        with contextlib.suppress(RuntimeError):
            self._thread.call(remove)


class DiskRule:
    """Planned failures of the files of a broker. Any thread may use it."""

    def __init__(self, fs: FaultFS, plan: FaultPlan) -> None:
        """Create an instance. Users call FaultControl.disk()."""
        self._fs = fs
        self._plan = plan

    def __repr__(self) -> str:
        return repr(self._plan)

    @property
    def hits(self) -> int:
        """Number of calls that have failed."""
        return len(self._plan.hits)

    @property
    def requests(self) -> list[ObservedRequest]:
        """No requests: the rule acts on calls of the disk."""
        return []

    def wait(self, hits: int = 1, timeout: float = 10.0) -> None:
        """Wait until this number of calls has failed.

        `timeout` is in seconds.

        Raises:
            AssertionError: the time has passed.
        """
        deadline = time.monotonic() + timeout
        while self.hits < hits:
            if time.monotonic() >= deadline:
                raise AssertionError(
                    f"{self!r}: expected {hits} failed calls within {timeout:g} s, "
                    f"found {self.hits}"
                )
            time.sleep(_CHECK_S)

    def remove(self) -> None:
        """End the rule."""
        # Calls that are being delayed continue to wait.
        self._fs.remove_faults(self._plan)


class FaultControl:
    """Adds rules to a running broker. A `with` block removes them at its end.

    All methods accept the same options. Filters are `client_id`, `principal`, `topic`,
    `partition`, `group`, `transactional_id`, `version` and `node`; they are patterns
    such as "orders-*", and all must match. The first `after` matching requests pass.
    After that, the rule acts on each `every`-th matching request with a `probability`,
    at most `times` times. `seed` makes the probability repeatable.

    Each method raises InvalidConfigError for an unknown API, error or filter.
    """

    def __init__(
        self, thread: BrokerThread, broker: FaultyBroker, logdir: LogDir | None = None
    ) -> None:
        """Create an instance. Users call Kafka.faults()."""
        # The broker stores requests from now on, even without a rule.
        thread.call(lambda: plan_of(broker))
        self._thread = thread
        self._broker = broker
        self._logdir = logdir
        #: The rules that this control has added.
        self._rules: list[ActiveRule | DiskRule] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove the rules of this object."""
        # An interrupted removal is repeated by the next call.
        while self._rules:
            self._rules[-1].remove()
            self._rules.pop()

    # -- rules -------------------------------------------------------------------------

    def answer(self, api: str | int, error: str | int, **options: Any) -> ActiveRule:
        """Answer an error, by its name or code, and store nothing.

        With a filter for topics or partitions, only the matching partitions of a
        request fail, and the others are served.
        """
        return self._add(api, Answer(error_code(error)), options)

    def delay(self, api: str | int, delay_ms: int, **options: Any) -> ActiveRule:
        """Serve requests later. Their connections start no other request until then."""
        return self._add(api, Delay(_checked_delay(delay_ms)), options)

    def hold(self, api: str | int, **options: Any) -> ActiveRule:
        """Serve requests when release() is called, or when the rule ends."""
        return self._add(api, Delay(None), options)

    def lose_answer(
        self,
        api: str | int,
        *,
        then: Literal["silence", "close"] = "silence",
        **options: Any,
    ) -> ActiveRule:
        """Serve requests without a response.

        With "silence", the connection remains open and sends nothing until the rule ends.
        With "close", it is closed.
        """
        if then not in ("silence", "close"):
            raise InvalidConfigError(
                "then", expected="'silence' or 'close'", found=repr(then)
            )
        return self._add(api, LoseResponse(then == "close"), options)

    def disconnect(
        self, api: str | int, *, after_bytes: int = 0, **options: Any
    ) -> ActiveRule:
        """Close the connection after this number of bytes of the response.

        With 0 bytes, the request is not served.
        """
        if type(after_bytes) is not int or after_bytes < 0:
            raise InvalidConfigError(
                "after_bytes", expected="a number from 0", found=after_bytes
            )
        return self._add(api, Disconnect(after_bytes), options)

    def observe(self, api: str | int = ANY_API, **options: Any) -> ActiveRule:
        """Count requests, without any effect on them."""
        return self._add(api, Observe(), options)

    def call(
        self,
        api: str | int,
        function: Callable[[Any, Call], Any],
        **options: Any,
    ) -> ActiveRule:
        """Call function(request, call) in the broker's thread before each request.

        Its result is the response, or None for the broker's own. The function must not
        block.
        """
        return self._add(api, Intercept(function), options)

    def disk(
        self,
        operation: str,
        error: str | None = None,
        *,
        delay_ms: int | None = None,
        path: str = "*",
        at: int = 1,
        times: int | None = None,
    ) -> DiskRule:
        """Make calls on the broker's files fail or take longer.

        The operations are "pwrite", "truncate", "fdatasync", "fsync" and "sync_dir".
        `error` is the name of an errno, such as "ENOSPC". With `delay_ms` instead, the
        calls succeed after this time. `path` is a pattern for the whole path. Call
        number `at`, counted from 1, is the first one that is affected. `times` is the
        maximum number of affected calls.

        Raises InvalidConfigError for an unknown operation or error, and if the broker
        was started with files of another kind.
        """
        # An unknown name of an error gives None, which is refused below.
        action: int | Slow | None = getattr(errno, error or "", None)
        if error is None and delay_ms is not None:
            action = Slow(_checked_delay(delay_ms))
            # Both arguments together are refused, so a delay must not remain.
            delay_ms = None
        if not isinstance(action, int | Slow) or delay_ms is not None:
            raise InvalidConfigError(
                "a disk fault",
                expected="the name of an errno, such as 'ENOSPC', or delay_ms",
                found=repr(error),
            )
        fs = None if self._logdir is None else self._logdir.host.fs
        if self._logdir is None or not isinstance(fs, FaultFS):
            raise InvalidConfigError(
                "fs of the broker", expected="a FaultFS", found=type(fs).__name__
            )
        try:
            plan = FaultPlan(Fault(operation, action, path=path, at=at, times=times))
        except ValueError as unknown:
            raise InvalidConfigError(str(unknown)) from None
        rule = DiskRule(fs, plan)
        # Listed first, as in _add().
        self._rules.append(rule)
        fs.add_faults(plan, self._logdir.path)
        return rule

    def _add(
        self, api: str | int, action: Action, options: dict[str, Any]
    ) -> ActiveRule:
        rule = FaultRule(api, action, **options)
        active = ActiveRule(self._thread, self._broker, rule)
        # Listed first, so that an interrupted call leaves no rule after the block.
        self._rules.append(active)
        self._thread.call(lambda: plan_of(self._broker).add(rule))
        return active


def _checked_delay(delay_ms: int) -> int:
    """Return a delay.

    Raises:
        InvalidConfigError: it is not a number of ms, or longer than a day.
    """
    # A bool is an int, too.
    if type(delay_ms) is not int or not 0 <= delay_ms <= _MAX_DELAY_MS:
        raise InvalidConfigError(
            "a delay in ms", expected=f"0 to {_MAX_DELAY_MS}", found=repr(delay_ms)
        )
    return delay_ms


def plan_of(broker: FaultyBroker) -> RequestFaultPlan:
    """Return the plan of a broker. It is created by the first call."""
    if broker.faults is None:
        broker.faults = RequestFaultPlan()
    return broker.faults


def observed_requests(
    broker: FaultyBroker, api: str | int = ANY_API
) -> list[ObservedRequest]:
    """Return the latest requests of an API since the plan was created."""
    name = find_api(api)
    return [
        request
        for request in plan_of(broker).requests
        if name in (ANY_API, request.api)
    ]
