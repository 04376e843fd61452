"""Answers of our broker to raw requests of every API and version, compared with answers
of a Kafka broker.

Kafka's answers are in tests/data/kafka/answers.json.gz;
tests/interop/test_interop_conformance.py requests them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from netshim.testing import start
from netshim.wire.codec import Api
from support.conformance import report


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    kafka = start(tmp_path_factory.mktemp("ours"), **report.SETTINGS)
    yield int(kafka.bootstrap_servers.rpartition(":")[2])
    kafka.stop()


@pytest.mark.parametrize("api", report.served(), ids=lambda api: api.name)
def test_answers_equal_those_of_kafka_or_differ_for_a_reason(
    port: int, api: Api[Any, Any]
) -> None:
    ours = report.ask_all(port, [api])
    differing = report.differences(ours, report.load())
    assert [
        each for each in differing if report.reason_of(each[0], each[2]) is None
    ] == []
    used = {report.reason_of(name, step) for name, _, step, _ in differing}
    assert used == {key for key in report.REASONS if key[0] == api.name}


def test_each_served_api_has_a_script() -> None:
    assert set(report.served()) <= set(report.SCRIPTS)


def test_conformance_page_matches_the_answers() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    for api in report.served():
        assert (
            f"| {api.key} {api.name} | {api.min_version}-{api.max_version} |" in page
        ), "make interop writes the page"
    for reason in (*report.REASONS.values(), *report.NOT_SERVED.values()):
        assert reason in page
