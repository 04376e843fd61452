"""A broker that serves only the API versions of an older release of Kafka."""

from __future__ import annotations

from typing import Any

import pytest

from logcore import InvalidConfigError
from netshim import wire
from netshim.handlers import HANDLERS
from netshim.kafka_releases import release_named
from netshim.testing import Kafka
from netshim.wire import codes
from support.client import Client
from support.confluent import consumer, produce, producer, read

RELEASES = ("0.11", "1.1", "2.4", "2.8", "3.0", "3.6", "3.9", "4.0", "4.1")


def served(kafka: Kafka, version: int = 0) -> dict[int, tuple[int, int]]:
    client = Client(kafka.port)
    request = wire.API_VERSIONS.Request(
        client_software_name="test", client_software_version="1"
    )
    response = client.ask(wire.API_VERSIONS, version, request)
    client.close()
    return {
        key.api_key: (key.min_version, key.max_version) for key in response.api_keys
    }


@pytest.mark.parametrize("name", RELEASES)
def test_release_serves_the_apis_of_kafka_and_netshim(kafka: Kafka, name: str) -> None:
    every = served(kafka)
    kafka.as_version(name)
    versions = served(kafka)
    ranges = release_named(name).ranges
    assert versions == {
        key: (max(least, ranges[key][0]), min(most, ranges[key][1]))
        for key, (least, most) in every.items()
        if key in ranges and max(least, ranges[key][0]) <= min(most, ranges[key][1])
    }
    assert versions.keys() <= HANDLERS.keys()
    kafka.as_version(None)
    assert served(kafka) == every


@pytest.mark.long
@pytest.mark.parametrize("name", RELEASES)
def test_clients_work_with_each_release(kafka: Kafka, name: str) -> None:
    """librdkafka needs Produce 3, which all of these releases have."""
    kafka.create_topic("t")
    kafka.as_version(name)
    ranges = release_named(name).ranges
    requests = kafka.requests()
    assert requests == []
    produce(producer(kafka, **{"enable.idempotence": True}), "t", b"a", b"b")
    reader = consumer(kafka, "g")
    reader.subscribe(["t"])
    assert read(reader, 2) == [b"a", b"b"]
    reader.commit(asynchronous=False)
    reader.close()
    used = {(request.api, request.version) for request in kafka.requests()}
    keys = {api.name: api.key for api in wire.APIS.values()}
    for api, version in used:
        least, most = ranges[keys[api]]
        assert least <= version <= most, api


@pytest.mark.parametrize(("name", "known"), [("1.1", []), ("2.8", [(0, 3)])])
def test_an_unknown_version_of_api_versions(
    kafka: Kafka, name: str, known: list[Any]
) -> None:
    """Kafka names the versions of ApiVersions from 2.4 on."""
    kafka.as_version(name)
    client = Client(kafka.port)
    request = wire.API_VERSIONS.Request(
        client_software_name="test", client_software_version="1"
    )
    client.send(wire.API_VERSIONS, 4, request)
    response = client.receive(wire.API_VERSIONS, 0)
    assert response.error_code == codes.UNSUPPORTED_VERSION
    version_ranges = [(key.min_version, key.max_version) for key in response.api_keys]
    assert version_ranges == known
    client.close()


def test_a_newer_version_ends_the_connection(kafka: Kafka) -> None:
    kafka.as_version("2.8")
    request = wire.METADATA.Request(topics=[])
    client = Client(kafka.port)
    client.ask(wire.METADATA, 11, request)
    client.send(wire.METADATA, 12, request)
    assert client.is_closed_by_broker()
    client.close()


def test_an_api_that_the_release_does_not_have_ends_the_connection(
    kafka: Kafka,
) -> None:
    kafka.as_version("3.9")
    client = Client(kafka.port)
    request = wire.CONSUMER_GROUP_HEARTBEAT.Request(group_id="g", member_epoch=0)
    client.send(wire.CONSUMER_GROUP_HEARTBEAT, 0, request)
    assert client.is_closed_by_broker()
    client.close()


def test_an_unknown_release_is_refused(kafka: Kafka) -> None:
    with pytest.raises(InvalidConfigError, match=r"0\.11, 1\.1.*found '2\.7'"):
        kafka.as_version("2.7")
