"""Raw requests of every API and version to netshim and to Apache Kafka, whose responses
are compared. Needs Java 17 or later and Maven. Run by `make interop`. Writes
docs/conformance.md, and the responses of Kafka, with which
tests/netshim/test_conformance.py compares without Java.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from netshim.testing import start
from support import kafka_jvm, topic_settings
from support.conformance import report

pytestmark = pytest.mark.interop


def test_each_difference_from_kafka_has_a_reason(tmp_path: Path) -> None:
    with kafka_jvm.Broker(tmp_path) as broker:
        kafka_responses = report.ask_all(
            int(broker.address.rpartition(":")[2]), report.served()
        )
    kafka = start(tmp_path / "netshim", **report.SETTINGS)
    try:
        own_responses = report.ask_all(
            int(kafka.bootstrap_servers.rpartition(":")[2]), report.served()
        )
    finally:
        kafka.stop()
    differing = report.differences(own_responses, kafka_responses)
    assert [
        difference
        for difference in differing
        if report.reason_of(difference[0], difference[2]) is None
    ] == []
    used_reasons = {report.reason_of(api, step) for api, _, step, _ in differing}
    assert used_reasons == set(report.REASONS)
    report.save(kafka_responses)
    report.PAGE.write_text(
        report.page(own_responses, kafka_responses), encoding="utf-8"
    )


def test_recorded_validation_of_topic_settings_is_current(tmp_path: Path) -> None:
    """tests/netshim/test_topic_settings.py compares with the file that this test
    writes.
    """
    before = topic_settings.load_verdicts()
    with kafka_jvm.Broker(tmp_path) as broker:
        verdicts = topic_settings.query_broker(int(broker.address.rpartition(":")[2]))
    topic_settings.save_verdicts(verdicts)
    assert verdicts == before
