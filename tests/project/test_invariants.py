"""The checks of logcore.debug_checks, which `make test` enables, detect violations."""

from __future__ import annotations

import pytest

import logcore
from logcore.debug_checks import VERIFIES
from logcore.testing import SimulatedDisk


@pytest.mark.skipif(not VERIFIES, reason="needs LOGCORE_VERIFY=1, as in make test")
def test_roll_without_the_lock_of_the_log_is_detected() -> None:
    with logcore.open("t-0", create=True, fs=SimulatedDisk()) as log:
        with pytest.raises(AssertionError, match="without the lock"):
            log.host.writer.roll_locked()
        log.roll()


@pytest.mark.parametrize(
    ("field", "value"),
    [("log_start", 9), ("visible", 9), ("end", 1)],
    ids=["log start", "high watermark", "log end"],
)
def test_contradictory_fields_are_detected(field: str, value: int) -> None:
    with logcore.open("t-0", create=True, durability="os", fs=SimulatedDisk()) as log:
        log.append(b"a")
        log.append(b"b")
        state = log.host.writer.state
        state.check(log.host.writer.active)
        before = getattr(state, field)
        setattr(state, field, value)
        with pytest.raises(AssertionError):
            state.check(log.host.writer.active)
        setattr(state, field, before)


def test_segments_out_of_order_are_detected() -> None:
    with logcore.open("t-0", create=True, durability="os", fs=SimulatedDisk()) as log:
        log.append(b"a")
        log.roll()
        state = log.host.writer.state
        segments = state.segments
        for invalid_segments in (segments[:1], [*segments, segments[1]]):
            state.segments = invalid_segments
            with pytest.raises(AssertionError):
                state.check(log.host.writer.active)
        state.segments = segments
