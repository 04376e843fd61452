"""Produce: the short way of most requests beside the long way of all, and appends that
wait for others.
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
from support.rig import T0, Rig

TOPICS: dict[str, dict[str, object]] = {"t": {}, "small": {"max.message.bytes": 200}}


def _batch(count: int, producer: tuple[int, int] | None, wrong: str | None) -> bytes:
    """wrong: what is changed in it."""
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
    rig: Rig, topic: str, number: int, acks: int, records: bytes | None
) -> PendingResponse:
    part = {"index": number, "records": records}
    asked = {
        "acks": acks,
        "timeout_ms": 1_000,
        "topic_data": [{"name": topic, "partition_data": [part]}],
    }
    return rig.send(wire.PRODUCE, 9, build(wire.PRODUCE.request.shape, asked))


def _told(answer: PendingResponse) -> Any:
    return answer.value.responses[0].partition_responses[0]


def _answers(path: Path, asked: list[Any]) -> list[Any]:
    """What a broker answers, and in the end the bytes of its logs."""
    with Rig(path) as rig:
        for name, config in TOPICS.items():
            rig.logdir.create_topic(name, 1, config)
        answers: list[Any] = []
        for each in asked:
            told = _told(_send(rig, *each))
            text = (told.error_message or "").replace(path.name, "")
            answers.append(
                (
                    told.error_code,
                    told.base_offset,
                    told.log_start_offset,
                    told.record_errors,
                    text,
                )
            )
        for name in TOPICS:
            log = rig.logdir.partition(name, 0)
            log.flush()
            answers.append(
                b"".join(
                    map(bytes, log.stored(0, log.high_watermark, max_bytes=1 << 20))
                )
            )
    return answers


@hypothesis.settings(max_examples=30)
@hypothesis.given(asked=st.lists(requests, min_size=3, max_size=10))
def test_the_short_way_answers_and_stores_as_the_long_way(
    asked: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    short = _answers(tmp_path_factory.mktemp("short"), asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "_produce_one", lambda *_: None)
        long = _answers(tmp_path_factory.mktemp("long"), asked)
    assert short == long


def test_appends_that_wait_are_done_in_order_and_in_one_go(rig: Rig) -> None:
    """A client that pipelines its requests would else pay for a change of threads with
    each of them.
    """
    rig.logdir.create_topic("t")
    log = rig.logdir.partition("t", 0)
    batches = [_batch(1, (0, number), None) for number in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "_may_wait", lambda *_: True)
        rig.holds_disk = True
        answers = [_send(rig, "t", 0, 1, records) for records in batches[:3]]
        assert len(rig.held) == 1  # the first append; the others wait for its end
        answers.append(_send(rig, "t", 0, 1, batches[0]))  # the same again
        answers.append(_send(rig, "t", 0, 1, batches[4]))  # out of order
        work, done = rig.held.pop()
        done(work())
        assert len(rig.held) == 2  # a sync, and all that have gathered
        assert log.log_end_offset == 1
        rig.finish_disk()
    told = [_told(answer) for answer in answers]
    assert [each.base_offset for each in told] == [0, 1, 2, 0, -1]
    assert [each.error_code for each in told] == [
        0,
        0,
        0,
        0,
        codes.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ]
    assert log.log_end_offset == 3


def test_an_append_does_not_overtake_those_that_wait(rig: Rig) -> None:
    rig.logdir.create_topic("t")
    log = rig.logdir.partition("t", 0)
    rig.holds_disk = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "_may_wait", lambda *_: True)
        first = _send(rig, "t", 0, 1, _batch(2, None, None))
    second = _send(rig, "t", 0, 1, _batch(1, None, None))
    assert not second.is_set
    assert log.log_end_offset == 0
    rig.finish_disk()
    assert [_told(first).base_offset, _told(second).base_offset] == [0, 2]


def test_only_who_asks_for_the_disk_waits_for_it(rig: Rig) -> None:
    rig.logdir.create_topic("t")
    rig.logdir.partition("t", 0)
    rig.holds_disk = True
    told = _send(rig, "t", 0, 1, _batch(1, None, None))
    waits = _send(rig, "t", 0, -1, _batch(1, None, None))
    assert told.is_set
    assert not waits.is_set
    rig.finish_disk()
    assert [_told(told).base_offset, _told(waits).base_offset] == [0, 1]
