"""Random histories of producers on a simulated disk that fills up, fails and loses
power, compared with a ledger of sent records and reported outcomes.

The invariants are listed at the top of tests/support/producer_histories.py.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from support.producer_histories import ProducerHistory

SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or 20_261_123


@pytest.mark.long
@pytest.mark.parametrize(
    "count",
    [30, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_random_histories(count: int) -> None:
    outcome_counts: Counter[str] = Counter()
    for number in range(count):
        history = ProducerHistory(SEED + number)
        try:
            for _ in range(80):
                history.step()
            history.finish()
        except BaseException:
            print(
                f"LOGCORE_TEST_SEED={SEED + number}, {history.policy}",
                history.outcome_counts,
            )
            raise
        outcome_counts += history.outcome_counts
    assert {"NoneType", "unknown", "DeliveryTimeoutError"} <= set(outcome_counts), (
        outcome_counts
    )
