"""Random histories of producers on a simulated disk that fills up, fails and loses
power, compared with a ledger of sent records and reported outcomes.

The invariants are listed at the top of tests/support/producerlives.py.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from support.producerlives import Life

SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or 20_261_123


@pytest.mark.long
@pytest.mark.parametrize(
    "lives",
    [30, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_random_histories(lives: int) -> None:
    reached: Counter[str] = Counter()
    for number in range(lives):
        life = Life(SEED + number)
        try:
            for _ in range(80):
                life.step()
            life.finish()
        except BaseException:
            print(f"LOGCORE_TEST_SEED={SEED + number}, {life.policy}", life.reached)
            raise
        reached += life.reached
    assert {"NoneType", "unknown", "DeliveryTimeoutError"} <= set(reached), reached
