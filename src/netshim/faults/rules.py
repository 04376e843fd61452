"""Fault rules: the requests that each one matches, and its action."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Final

import attrs

from logcore.errors import InvalidConfigError
from netshim.faults.requests import ANY_API, ObservedRequest, check_filters, find_api
from netshim.state import Call

#: Number of latest requests that a plan and each rule store.
MAX_OBSERVED: Final = 1_000
#: The field of a request that each filter compares. A tuple has several values.
_FIELDS: Final = {
    "client_id": "client_id",
    "principal": "principal",
    "version": "version",
    "node": "node",
    "group": "groups",
    "transactional_id": "transactional_ids",
}
_WILDCARDS: Final = re.compile(r"[*?\[]")


@attrs.frozen
class Answer:
    """Answer with an error code."""

    code: int


@attrs.frozen
class Delay:
    """Serve the request later. Without a time, serve it when the rule is released."""

    delay_ms: int | None


@attrs.frozen
class LoseResponse:
    """Serve the request, and send no response."""

    #: Whether the connection is closed, instead of remaining silent.
    closes: bool


@attrs.frozen
class Disconnect:
    """Close the connection after this number of bytes of the response.

    With 0 bytes, the request is not served.
    """

    after_bytes: int


@attrs.frozen
class Observe:
    """Count the request."""


@attrs.frozen
class Intercept:
    """Call function(request, call). Its result is the response, unless it is None."""

    function: Callable[[Any, Call], Any]


Action = Answer | Delay | LoseResponse | Disconnect | Observe | Intercept


class FaultRule:
    """One rule of a plan."""

    def __init__(
        self,
        api: str | int,
        action: Action,
        *,
        times: int | None = None,
        after: int = 0,
        every: int = 1,
        probability: float = 1.0,
        seed: int = 0,
        **filters: object,
    ) -> None:
        """Create a rule.

        The first `after` requests that match the filters pass. After that, the rule acts
        on every `every`-th matching request with this probability, at most `times` times.
        Filters are patterns as in file names, and all of them must match.

        Raises:
            InvalidConfigError: an API, a filter or a number is invalid.
        """
        numbers = (("times", times, 1), ("after", after, 0), ("every", every, 1))
        for name, value, minimum in numbers:
            if value is not None and (type(value) is not int or value < minimum):
                raise InvalidConfigError(
                    name, expected=f"at least {minimum}", found=value
                )
        if not 0 < probability <= 1:
            raise InvalidConfigError(
                "probability", expected="above 0, at most 1", found=probability
            )
        self.api = find_api(api)
        self.action = action
        self.filters = check_filters(self.api, filters)
        #: The topic of the rule, None if its filter is a pattern, or missing.
        self.only_topic = self.filters.get("topic")
        if self.only_topic is not None and _WILDCARDS.search(self.only_topic):
            self.only_topic = None
        #: How often the rule acts at most. None for no limit.
        self._times = times
        #: Matching requests that pass before the rule acts for the first time.
        self._after = after
        self._every = every
        self._probability = probability
        #: Not shared with other rules, so that the choice repeats with the seed.
        self._random = random.Random(seed)
        #: Number of requests that match the filters.
        self._matched = 0
        #: The latest requests on which the rule acted.
        self.requests: deque[ObservedRequest] = deque(maxlen=MAX_OBSERVED)
        #: Number of requests on which the rule acted.
        self.hits = 0
        #: Notified when the rule has acted.
        self._changed = threading.Condition()
        #: One call for each request that waits: it serves the request, or closes the
        #: connection if the response was lost.
        self.waiting: list[Callable[[], object]] = []
        #: The latest requests of the broker, which wait() lists if it fails.
        self.recent: deque[ObservedRequest] = deque()

    def __repr__(self) -> str:
        return f"<FaultRule {self.api} {self.filters} {self.action}: {self.hits} hits>"

    def matches(self, observed: ObservedRequest) -> bool:
        """Return whether the filters match a request."""
        if self.api not in (ANY_API, observed.api):
            return False
        for name, pattern in self.filters.items():
            field = _FIELDS.get(name)
            if field is None:  # the filter is compared with each partition below
                continue
            value = getattr(observed, field)
            values = value if isinstance(value, tuple) else (str(value),)
            if not any(fnmatchcase(value, pattern) for value in values):
                return False
        if not self.selects_partitions:
            return True
        return any(self.selects(*partition) for partition in observed.partitions)

    @property
    def selects_partitions(self) -> bool:
        """Whether the rule concerns some topics or partitions of a request."""
        return "topic" in self.filters or "partition" in self.filters

    def selects(self, topic: str | None, number: int | None) -> bool:
        """Return whether the filters match a partition."""
        pattern = self.filters.get("topic")
        if pattern is not None and not fnmatchcase(topic or "", pattern):
            return False
        pattern = self.filters.get("partition")
        return pattern is None or number is None or fnmatchcase(str(number), pattern)

    def acts(self) -> bool:
        """Count a request that matches, and return whether the rule acts on it."""
        # A rule that has ended counts no more requests.
        if self._times is not None and self.hits >= self._times:
            return False
        self._matched += 1
        position = self._matched - self._after
        if position <= 0 or position % self._every:
            return False
        return self._probability == 1 or self._random.random() < self._probability

    def hit(self, observed: ObservedRequest) -> None:
        """Record a request on which the rule acts."""
        with self._changed:
            self.requests.append(observed)
            self.hits += 1
            self._changed.notify_all()

    def release(self) -> None:
        """Serve the requests that are delayed, and close silent connections."""
        # Removed before its call, so that a timer of the rule does not serve the
        # request again.
        while self.waiting:
            self.waiting.pop(0)()

    def forget(self, release: Callable[[], object]) -> bool:
        """Remove the call of a request that no longer waits; return whether it waited."""
        if release not in self.waiting:
            return False
        self.waiting.remove(release)
        return True

    def wait(self, hits: int = 1, timeout: float = 10.0) -> None:
        """Wait until the rule has acted on a number of requests.

        `timeout` is in seconds.

        Raises:
            AssertionError: the time has passed. The text lists the latest requests.
        """
        deadline_s = time.monotonic() + timeout
        with self._changed:
            while self.hits < hits:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise AssertionError(self._describe_requests(hits, timeout))
                self._changed.wait(remaining_s)

    def _describe_requests(self, hits: int, timeout: float) -> str:
        latest = "\n".join(f"  {request}" for request in list(self.recent)[-10:])
        return (
            f"{self!r}: {hits} expected within {timeout:g} s; "
            f"the latest requests:\n{latest or '  none'}"
        )
