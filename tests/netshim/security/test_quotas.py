"""Delays for clients above a quota, with the figures that Apache Kafka 4.1.1 showed."""

from __future__ import annotations

import itertools

import pytest

from netshim.security import quotas
from netshim.security.quotas import Quotas, Rate
from netshim.security.stored import DEFAULT, Entity


def limited(bounds: dict[Entity, dict[str, float]]) -> Quotas:
    quotas_with_bounds = Quotas()
    quotas_with_bounds.set_bounds(bounds)
    return quotas_with_bounds


def test_ten_requests_are_free_and_later_requests_are_delayed() -> None:
    """A bound of 1,000,000 bytes a second, and requests of 999,920 bytes."""
    bounds = limited({("u", None, None): {quotas.PRODUCE: 1_000_000}})
    now_ms = 1_000_000
    delays = []
    for number in range(14):
        if number:
            now_ms += 15 + delays[-1]
        delays.append(bounds.record(quotas.PRODUCE, "u", "c", 999_920, now_ms))
    assert delays[:10] == [0] * 10
    # Kafka: 850, 1,994, 2,998, 3,998 ms, with its own times between the requests.
    assert 800 <= delays[10] <= 1_000
    assert all(later > earlier for earlier, later in itertools.pairwise(delays[10:]))


def test_delay_brings_the_rate_to_its_bound() -> None:
    rate = Rate()
    for _ in range(5):
        rate.record(1_000, 0)
    # 5,000 bytes at 100 a second take 50 s, of which a window of 10 s is over.
    assert rate.delay_ms(100, 0) == 40_000
    assert rate.delay_ms(100, 5_000) == 40_000
    assert rate.delay_ms(100, 11_000) == 0


def test_samples_expire_after_eleven_seconds() -> None:
    rate = Rate()
    rate.record(1_000_000, 0)
    assert not rate.is_idle(10_999)
    assert rate.is_idle(11_000)


def test_removed_value_is_not_counted() -> None:
    bounds = limited({("u", None, None): {quotas.FETCH: 10}})
    assert bounds.record(quotas.FETCH, "u", "c", 200, 0) == 10_000
    bounds.take_out(quotas.FETCH, "u", "c", 200, 0)
    assert bounds.record(quotas.FETCH, "u", "c", 100, 0) == 0


@pytest.mark.parametrize("count", range(8))
def test_first_entity_with_a_bound_decides(count: int) -> None:
    order: list[Entity] = [
        ("u", "c", None),
        ("u", DEFAULT, None),
        ("u", None, None),
        (DEFAULT, "c", None),
        (DEFAULT, DEFAULT, None),
        (DEFAULT, None, None),
        (None, "c", None),
        (None, DEFAULT, None),
    ]
    bounds = {
        entity: {quotas.PRODUCE: float(10 + number)}
        for number, entity in enumerate(order)
        if number >= count
    }
    limits = limited(bounds)
    # 1,000 bytes at a bound of b are delayed for 1,000 / b s less the window of 10 s.
    expected_ms = round(1_000 / (10 + count) * 1_000 - 10_000)
    assert limits.record(quotas.PRODUCE, "u", "c", 1_000, 0) == expected_ms


@pytest.mark.parametrize(
    ("entity", "shares"),
    [
        (("u", None, None), True),
        ((DEFAULT, None, None), True),
        ((None, "c", None), False),
        (("u", DEFAULT, None), False),
    ],
)
def test_clients_of_a_user_share_the_rate_of_the_user(
    entity: Entity, shares: bool
) -> None:
    bounds = limited({entity: {quotas.PRODUCE: 10}})
    bounds.record(quotas.PRODUCE, "u", "c", 100, 0)
    assert bool(bounds.record(quotas.PRODUCE, "u", "other", 100, 0)) is shares


def test_changes_may_overdraw_the_bucket_once() -> None:
    """With a bound of 1, Kafka accepted 30 partitions, and refused the next 30 for
    18,847 ms.
    """
    bounds = limited({("u", None, None): {quotas.MUTATION: 1}})
    assert bounds.mutate("u", "c", 30, 0, is_strict=True) == 0
    assert bounds.mutate("u", "c", 30, 153, is_strict=True) == 18_847
    assert bounds.mutate("u", "c", 1, 19_000, is_strict=True) == 0


def test_old_versions_are_delayed_and_not_refused() -> None:
    bounds = limited({("u", None, None): {quotas.MUTATION: 1}})
    assert bounds.mutate("u", "c", 30, 0, is_strict=False) == 19_000
    assert bounds.mutate("u", "c", 30, 0, is_strict=False) == 49_000


def test_request_time_is_delayed_for_a_second_at_most() -> None:
    bounds = limited({("u", None, None): {quotas.REQUEST: 0.01}})
    assert bounds.record(quotas.REQUEST, "u", "c", 50, 0) == 1_000


def test_connections_of_an_address_are_limited() -> None:
    bounds = limited(
        {
            (None, None, "10.0.0.1"): {quotas.CONNECTION: 2},
            (None, None, DEFAULT): {quotas.CONNECTION: 100},
        }
    )
    free = [bounds.connect("10.0.0.1", 0) for _ in range(30)].count(0)
    assert free == 20
    assert bounds.connect("10.0.0.2", 0) == 0


def test_quota_applies_to_an_address_in_each_of_its_forms() -> None:
    bounds = limited({(None, None, "0:0:0:0:0:0:0:1"): {quotas.CONNECTION: 1}})
    assert [bounds.connect("::1", 0) for _ in range(12)][-1] > 0


def test_without_bounds_nothing_is_measured() -> None:
    bounds = limited({})
    assert bounds.keys == frozenset()
    assert bounds.record(quotas.PRODUCE, "u", "c", 1 << 40, 0) == 0


def test_idle_entities_are_removed() -> None:
    bounds = limited({(None, DEFAULT, None): {quotas.PRODUCE: 10}})
    for number in range(25_000):
        bounds.record(quotas.PRODUCE, "u", str(number), 1, number * 20)
    assert len(bounds._rates) <= 10_001


@pytest.mark.long
@pytest.mark.parametrize(
    "entity", [("u", DEFAULT, None), (DEFAULT, DEFAULT, None), (None, DEFAULT, None)]
)
def test_many_client_ids_at_once_share_a_rate(entity: Entity) -> None:
    """A client with a new id for each request took memory without a limit."""
    bounds = limited({entity: {quotas.PRODUCE: 10, quotas.MUTATION: 1}})
    for number in range(12_000):
        bounds.record(quotas.PRODUCE, "u", str(number), 1, 0)
        bounds.mutate("u", str(number), 1, 0, is_strict=True)
    assert len(bounds._rates) + len(bounds._buckets) <= 10_002
    assert bounds.record(quotas.PRODUCE, "u", "another", 1, 0) > 10_000
    assert bounds.mutate("u", "another", 1, 0, is_strict=True) > 0
    # The first clients keep their rates.
    assert bounds.record(quotas.PRODUCE, "u", "0", 1, 0) == 0
    # Idle clients are removed later.
    assert bounds.record(quotas.PRODUCE, "u", "another", 1, 20_000) == 0


def test_many_addresses_at_once_share_a_rate() -> None:
    bounds = limited({(None, None, DEFAULT): {quotas.CONNECTION: 1}})
    for number in range(12_000):
        bounds.connect(f"2001:db8::{number:x}", 0)
    assert len(bounds._rates) <= 10_001


def test_long_client_id_is_measured_by_its_start() -> None:
    bounds = limited({(None, DEFAULT, None): {quotas.PRODUCE: 10}})
    bounds.record(quotas.PRODUCE, "u", "c" * 30_000, 1, 0)
    ((_, (_, client_id, _)),) = bounds._rates
    assert client_id == "c" * 1_024
