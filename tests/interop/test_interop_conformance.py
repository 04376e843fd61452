"""Raw requests of every API and version to our broker and to one of Kafka's: the
answers are compared.

Needs Java 17 or later and Maven. Run by `make interop`; writes docs/conformance.md, and
Kafka's answers, with which tests/netshim/test_conformance.py compares where there is no
Java.
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
    kafka = start(tmp_path / "ours", **report.SETTINGS)
    try:
        ours = report.ask_all(
            int(kafka.bootstrap_servers.rpartition(":")[2]), report.served()
        )
    finally:
        kafka.stop()
    differing = report.differences(ours, kafka_responses)
    assert [
        each for each in differing if report.reason_of(each[0], each[2]) is None
    ] == []
    used = {report.reason_of(api, step) for api, _, step, _ in differing}
    assert used == set(report.REASONS)
    report.save(kafka_responses)
    report.PAGE.write_text(report.page(ours, kafka_responses), encoding="utf-8")


def test_kafka_validates_settings_of_topics_as_it_did(tmp_path: Path) -> None:
    """tests/netshim/test_topic_settings.py compares with what is written here."""
    before = topic_settings.stored()
    with kafka_jvm.Broker(tmp_path) as broker:
        verdicts = topic_settings.ask(int(broker.address.rpartition(":")[2]))
    topic_settings.store(verdicts)
    assert verdicts == before
