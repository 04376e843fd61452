"""Quotas: rates of bytes, of broker time, of changes and of connections, and the delays
for a client that exceeds one.

Rules (as Apache Kafka 4.1.1):
- The bound of the first of these entities that has one applies: (user, client id),
  (user, default client), (user), (default user, client id), (default user, default
  client), (default user), (client id), (default client). Without a bound, nothing is
  measured.
- A rate is the sum of 11 samples of one second, divided by the time since the start of
  the oldest one, but by at least 10 s.
- A client over its bound is delayed for the time after which the rate is the bound.
- Changes of topics take tokens from a bucket, which may be overdrawn once.

Pure: the time is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import attrs

from netshim.security.acls import canonical_address
from netshim.security.stored import DEFAULT, Entity

#: Keys of quotas, as in Kafka.
PRODUCE: Final = "producer_byte_rate"
FETCH: Final = "consumer_byte_rate"
REQUEST: Final = "request_percentage"
MUTATION: Final = "controller_mutation_rate"
CONNECTION: Final = "connection_creation_rate"
#: Keys of quotas of users and client ids.
CLIENT_KEYS: Final = (PRODUCE, FETCH, REQUEST, MUTATION)

#: Number of samples in the window of a rate, as in Kafka.
_SAMPLES: Final = 11
#: Length of one sample.
_SAMPLE_MS: Final = 1_000
_MIN_WINDOW_MS: Final = (_SAMPLES - 1) * _SAMPLE_MS
#: Maximum delay for the use of broker time.
_MAX_REQUEST_DELAY_MS: Final = 1_000
#: Maximum number of measured entities. At this number, idle entities are forgotten. If
#: no entity is idle, further clients share a rate, because a client may use many ids.
_MAX_SENSORS: Final = 10_000
#: Maximum number of characters that distinguish client ids. Quotas cannot name more.
_MAX_NAME_CHARS: Final = 1_024


@attrs.define(eq=False)
class Rate:
    """The rate of one entity."""

    #: (start, sum) of the samples, the oldest first.
    _samples: list[tuple[int, float]] = attrs.Factory(list)
    #: The sum of the samples.
    _total: float = 0.0

    def record(self, value: float, now_ms: int) -> None:
        """Add a value. A negative value undoes an earlier one."""
        samples = self._samples
        self._total += value
        if samples and now_ms - samples[-1][0] < _SAMPLE_MS:
            start_ms, total = samples[-1]
            samples[-1] = start_ms, total + value
        else:
            samples.append((now_ms, value))
            if len(samples) > _SAMPLES:
                self._drop_first()

    def delay_ms(self, bound: float, now_ms: int) -> int:
        """Return for how long the client must wait, so that the rate is `bound`."""
        self._drop_old(now_ms)
        if not self._samples:
            return 0
        # As in Kafka's Rate, a window that has just begun counts as almost full. A
        # short burst would otherwise be a high rate.
        elapsed_ms = now_ms - self._samples[0][0]
        missing_samples = max(0, _SAMPLES - 1 - elapsed_ms // _SAMPLE_MS)
        window_ms = elapsed_ms + missing_samples * _SAMPLE_MS
        return max(0, round(self._total / bound * 1000 - window_ms))

    def is_idle(self, now_ms: int) -> bool:
        """Return whether all samples have expired."""
        self._drop_old(now_ms)
        return not self._samples

    def _drop_old(self, now_ms: int) -> None:
        limit_ms = now_ms - _SAMPLES * _SAMPLE_MS
        while self._samples and self._samples[0][0] <= limit_ms:
            self._drop_first()

    def _drop_first(self) -> None:
        _, value = self._samples.pop(0)
        self._total -= value
        if not self._samples:
            self._total = 0.0  # without the rounding errors of many subtractions


@attrs.define(eq=False)
class Bucket:
    """Tokens for changes of topics. It is full at first, and may be overdrawn once."""

    #: The remaining tokens, below 0 if the bucket is overdrawn.
    _tokens: float
    #: When the tokens were last counted.
    _since_ms: int

    def delay_ms(self, bound: float, now_ms: int) -> int:
        """Return the time until the bucket is no longer overdrawn."""
        elapsed_s = (now_ms - self._since_ms) / 1000
        self._tokens = min(bound * _SAMPLES, self._tokens + elapsed_s * bound)
        self._since_ms = now_ms
        return max(0, round(-self._tokens / bound * 1000))

    def spend(self, count: float) -> None:
        """Remove tokens. The bucket may become negative, which delays the next request."""
        self._tokens -= count

    def is_idle(self, now_ms: int) -> bool:
        """Return whether the bucket was last used a long time ago."""
        return now_ms - self._since_ms > 3_600_000


#: An entity with the key of its quota.
_Sensor = tuple[str, Entity]


class Quotas:
    """The bounds of all entities, and the rates of the measured ones.

    Used by the broker's thread.
    """

    def __init__(self) -> None:
        """Create quotas without bounds."""
        #: By entity and key.
        self._bounds: Mapping[Entity, Mapping[str, float]] = {}
        #: Only entities with a bound are measured.
        self._rates: dict[_Sensor, Rate] = {}
        self._buckets: dict[_Sensor, Bucket] = {}
        #: (key, user, client id) -> sensor and bound.
        self._sensor_cache: dict[
            tuple[str, str, str], tuple[_Sensor, float] | None
        ] = {}
        #: Requests that exceeded a quota, by its key.
        self.throttled: Counter[str] = Counter()
        #: When idle entities were last searched.
        self._searched_ms: int | None = None
        #: Keys for which any entity has a bound.
        self.keys: frozenset[str] = frozenset()

    def set_bounds(self, bounds: Mapping[Entity, Mapping[str, float]]) -> None:
        """Replace all bounds. Measured rates are kept."""
        self._bounds = {
            (user, client_id, address and canonical_address(address)): values
            for (user, client_id, address), values in bounds.items()
        }
        self._sensor_cache.clear()
        self.keys = frozenset(key for values in bounds.values() for key in values)

    def record(
        self, key: str, user: str, client_id: str, value: float, now_ms: int
    ) -> int:
        """Measure a value, and return for how many ms the client must wait."""
        sensor_and_bound = self._find(key, user, client_id)
        if sensor_and_bound is None:
            return 0
        sensor, bound = sensor_and_bound
        rate = self._rate(sensor, now_ms)
        rate.record(value, now_ms)
        delay_ms = rate.delay_ms(bound, now_ms)
        if key == REQUEST:
            return min(delay_ms, _MAX_REQUEST_DELAY_MS)
        return delay_ms

    def take_out(
        self, key: str, user: str, client_id: str, value: float, now_ms: int
    ) -> None:
        """Undo record() for a response that is not sent."""
        sensor_and_bound = self._find(key, user, client_id)
        if sensor_and_bound is not None:
            self._rate(sensor_and_bound[0], now_ms).record(-value, now_ms)

    def max_fetch_bytes(self, user: str, client_id: str) -> int | None:
        """Return the largest response that a fetch may request: the bytes of ten
        seconds.
        """
        sensor_and_bound = self._find(FETCH, user, client_id)
        if sensor_and_bound is None:
            return None
        return max(1, int(sensor_and_bound[1] * _MIN_WINDOW_MS / 1000))

    def mutate(
        self, user: str, client_id: str, count: int, now_ms: int, *, is_strict: bool
    ) -> int:
        """Count changed partitions, and return for how many ms the client must wait.

        With is_strict, nothing is counted while the bucket is overdrawn: the request is
        refused.
        """
        sensor_and_bound = self._find(MUTATION, user, client_id)
        if sensor_and_bound is None or not count:
            return 0
        sensor, bound = sensor_and_bound
        if sensor not in self._buckets:
            sensor = self._admitted(sensor, now_ms)
        bucket = self._buckets.setdefault(sensor, Bucket(bound * _SAMPLES, now_ms))
        delay_ms = bucket.delay_ms(bound, now_ms)
        if is_strict and delay_ms:
            return delay_ms
        bucket.spend(count)
        if is_strict:
            return 0
        return bucket.delay_ms(bound, now_ms)

    def connect(self, address: str, now_ms: int) -> int:
        """Count a connection of an IP address, and return how long it must wait in ms."""
        for name in (address, DEFAULT):
            entity: Entity = (None, None, name)
            bound = self._bounds.get(entity, {}).get(CONNECTION)
            if bound is not None:
                sensor = CONNECTION, (None, None, address)
                rate = self._rate(sensor, now_ms)
                rate.record(1, now_ms)
                delay_ms = rate.delay_ms(bound, now_ms)
                if delay_ms:  # the connection is refused, and does not count
                    rate.record(-1, now_ms)
                return delay_ms
        return 0

    def _find(
        self, key: str, user: str, client_id: str
    ) -> tuple[_Sensor, float] | None:
        """Return the sensor and the bound for a user and a client id."""
        if key not in self.keys:
            return None
        cache_key = key, user, client_id[:_MAX_NAME_CHARS]
        if cache_key not in self._sensor_cache:
            if len(self._sensor_cache) >= _MAX_SENSORS:
                self._sensor_cache.clear()
            self._sensor_cache[cache_key] = self._resolve(*cache_key)
        return self._sensor_cache[cache_key]

    def _resolve(
        self, key: str, user: str, client_id: str
    ) -> tuple[_Sensor, float] | None:
        user_and_client: Entity = (user, client_id, None)
        of_user: Entity = (user, None, None)
        of_client: Entity = (None, client_id, None)
        # Pairs of the entity that has the bound and the entity that is measured.
        order: tuple[tuple[Entity, Entity], ...] = (
            (user_and_client, user_and_client),
            ((user, DEFAULT, None), user_and_client),
            (of_user, of_user),
            ((DEFAULT, client_id, None), user_and_client),
            ((DEFAULT, DEFAULT, None), user_and_client),
            ((DEFAULT, None, None), of_user),
            (of_client, of_client),
            ((None, DEFAULT, None), of_client),
        )
        for entity, measured in order:
            bound = self._bounds.get(entity, {}).get(key)
            if bound is not None:
                return (key, measured), bound
        return None

    def _rate(self, sensor: _Sensor, now_ms: int) -> Rate:
        rate = self._rates.get(sensor)
        if rate is None:
            rate = self._rates.setdefault(self._admitted(sensor, now_ms), Rate())
        return rate

    def _admitted(self, sensor: _Sensor, now_ms: int) -> _Sensor:
        """Return a new sensor, or the shared one if too many are in use."""
        if self._is_full:
            self._forget_idle(now_ms)
        if not self._is_full:
            return sensor
        key, (user, client_id, address) = sensor
        return key, (user, client_id and DEFAULT, address and DEFAULT)

    @property
    def _is_full(self) -> bool:
        return len(self._rates) + len(self._buckets) >= _MAX_SENSORS

    def _forget_idle(self, now_ms: int) -> None:
        """Forget idle entities, at most once for each sample."""
        if self._searched_ms is not None and now_ms - self._searched_ms < _SAMPLE_MS:
            return
        self._searched_ms = now_ms
        self._rates = {
            sensor: rate
            for sensor, rate in self._rates.items()
            if not rate.is_idle(now_ms)
        }
        self._buckets = {
            sensor: bucket
            for sensor, bucket in self._buckets.items()
            if not bucket.is_idle(now_ms)
        }
