"""With TLS, a login, rules and quotas, the broker gives the same answers as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from netshim.secured_testing import ADMIN, SecuredKafka, start_secured
from netshim.wire.codec import Api
from support.client import Client
from support.conformance import RecordingClient, report


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    path = tmp_path_factory.mktemp("secured") / "data"
    started = start_secured(path, **report.SETTINGS)
    started.logdir.host.next_producer_id()  # 0 could not be distinguished from none
    state = started.server.server.broker.state
    bounds = {
        (ADMIN, None, None): {
            "producer_byte_rate": 1e12,
            "consumer_byte_rate": 1e12,
            "request_percentage": 1e9,
            "controller_mutation_rate": 1e9,
        }
    }
    started.server.call(lambda: state.security.quotas.set_bounds(bounds))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def connect(kafka: SecuredKafka) -> Callable[[], Client]:
    password = kafka.add_user(ADMIN)

    def connected() -> Client:
        client = Client(kafka.port)
        client.use_tls(kafka.ca_file)
        client.log_in(ADMIN, password)
        return client

    return connected


@pytest.mark.parametrize("api", report.served(), ids=lambda api: api.name)
def test_answers_are_the_same_as_without_security(
    kafka: SecuredKafka, connect: Callable[[], Client], api: Api[Any, Any]
) -> None:
    """The test compares the oldest and the newest version of each API."""
    ours = {}
    for version in sorted({api.min_version, api.max_version}):
        recording_client = RecordingClient(kafka.port, api, version, connect=connect)
        try:
            for script in report.SCRIPTS[api]:
                script(recording_client)
        finally:
            recording_client.close()
        ours[recording_client.name] = recording_client.recorded
    differing = report.differences(ours, report.load())
    # Kafka answered without an authorizer, and without users.
    unexplained = [
        row
        for row in differing
        if report.reason_of(row[0], row[2]) is None
        and not row[0].endswith("Acls")
        and (row[0], row[2]) != ("DescribeUserScramCredentials", "all")
    ]
    assert unexplained == []
