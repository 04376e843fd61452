"""Produce: the fast path for most requests, compared with the general path, and appends
that wait for others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from logcore import recordbatch
from netshim import wire
from netshim.handlers import produce as handler
from netshim.scheduling import PendingResponse
from netshim.wire import codes
from support.conformance import build
from support.group_harness import T0, GroupHarness

TOPICS: dict[str, dict[str, object]] = {"t": {}, "small": {"max.message.bytes": 200}}


def _batch(count: int, producer: tuple[int, int] | None, wrong: str | None) -> bytes:
    """Encode a batch. `wrong` selects a defect."""
    ids: dict[str, Any] = {}
    if producer is not None:
        ids = {
            "producer_id": 5,
            "producer_epoch": producer[0],
            "base_sequence": producer[1],
        }
    records = recordbatch.encode([(b"k", b"v" * 40, (), T0)] * count, **ids)
    match wrong:
        case "crc":
            return records[:-1] + b"\xff"
        case "cut":
            return records[:-2]
        case "offset":
            return b"\1" + records[1:]
        case "two":
            return records + records
        case "empty":
            return b""
    return records


batches = st.builds(
    _batch,
    st.integers(1, 4),
    st.none() | st.tuples(st.integers(0, 1), st.integers(0, 3)),
    st.sampled_from([None] * 8 + ["crc", "cut", "offset", "two", "empty"]),
)
#: (topic, partition, acks, records)
requests = st.tuples(
    st.sampled_from([*TOPICS, "none"]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([-1, -1, 1, 2]),
    st.none() | batches,
)


def _send(
    group_harness: GroupHarness,
    topic: str,
    number: int,
    acks: int,
    records: bytes | None,
) -> PendingResponse:
    part = {"index": number, "records": records}
    asked = {
        "acks": acks,
        "timeout_ms": 1_000,
        "topic_data": [{"name": topic, "partition_data": [part]}],
    }
    return group_harness.send(
        wire.PRODUCE, 9, build(wire.PRODUCE.request.schema, asked)
    )


def _partition_result(pending: PendingResponse) -> Any:
    return pending.value.responses[0].partition_responses[0]


def _responses_and_logs(path: Path, requests: list[Any]) -> list[Any]:
    """Return the responses of a broker, followed by the bytes of its logs."""
    with GroupHarness(path) as group_harness:
        for name, config in TOPICS.items():
            group_harness.logdir.create_topic(name, 1, config)
        responses: list[Any] = []
        for each in requests:
            result = _partition_result(_send(group_harness, *each))
            text = (result.error_message or "").replace(path.name, "")
            responses.append(
                (
                    result.error_code,
                    result.base_offset,
                    result.log_start_offset,
                    result.record_errors,
                    text,
                )
            )
        for name in TOPICS:
            log = group_harness.logdir.partition(name, 0)
            log.flush()
            responses.append(
                b"".join(
                    map(bytes, log.stored(0, log.high_watermark, max_bytes=1 << 20))
                )
            )
    return responses


@pytest.mark.long
@hypothesis.settings(max_examples=30)
@hypothesis.given(asked=st.lists(requests, min_size=3, max_size=10))
def test_fast_path_answers_and_stores_like_the_general_path(
    asked: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    short = _responses_and_logs(tmp_path_factory.mktemp("short"), asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "_produce_single_partition", lambda *_: None)
        long = _responses_and_logs(tmp_path_factory.mktemp("long"), asked)
    assert short == long


def test_waiting_appends_are_executed_in_order_and_together(
    group_harness: GroupHarness,
) -> None:
    """If appends were executed one by one, a client that pipelines its requests would
    pay for a thread switch with each request.
    """
    group_harness.logdir.create_topic("t")
    log = group_harness.logdir.partition("t", 0)
    batches = [_batch(1, (0, number), None) for number in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "_may_wait", lambda *_: True)
        group_harness.holds_disk = True
        replies = [_send(group_harness, "t", 0, 1, records) for records in batches[:3]]
        assert len(group_harness.held) == 1  # the first append; the others wait for it
        replies.append(
            _send(group_harness, "t", 0, 1, batches[0])
        )  # the same batch again
        replies.append(_send(group_harness, "t", 0, 1, batches[4]))  # out of order
        work, done = group_harness.held.pop()
        done(work())
        assert len(group_harness.held) == 2  # a sync, and all appends that were waiting
        assert log.log_end_offset == 1
        group_harness.finish_disk()
    results = [_partition_result(reply) for reply in replies]
    assert [each.base_offset for each in results] == [0, 1, 2, 0, -1]
    assert [each.error_code for each in results] == [
        0,
        0,
        0,
        0,
        codes.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ]
    assert log.log_end_offset == 3


def test_append_does_not_overtake_waiting_appends(group_harness: GroupHarness) -> None:
    group_harness.logdir.create_topic("t")
    log = group_harness.logdir.partition("t", 0)
    group_harness.holds_disk = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "_may_wait", lambda *_: True)
        first = _send(group_harness, "t", 0, 1, _batch(2, None, None))
    second = _send(group_harness, "t", 0, 1, _batch(1, None, None))
    assert not second.is_set
    assert log.log_end_offset == 0
    group_harness.finish_disk()
    assert [
        _partition_result(first).base_offset,
        _partition_result(second).base_offset,
    ] == [0, 2]


def test_only_acks_all_waits_for_the_disk(group_harness: GroupHarness) -> None:
    group_harness.logdir.create_topic("t")
    group_harness.logdir.partition("t", 0)
    group_harness.holds_disk = True
    pending = _send(group_harness, "t", 0, 1, _batch(1, None, None))
    waits = _send(group_harness, "t", 0, -1, _batch(1, None, None))
    assert pending.is_set
    assert not waits.is_set
    group_harness.finish_disk()
    assert [
        _partition_result(pending).base_offset,
        _partition_result(waits).base_offset,
    ] == [0, 1]
