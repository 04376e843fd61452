"""The versions of APIs in netshim/kafka_releases.py equal those in the jars of
Kafka.
"""

from __future__ import annotations

import subprocess

import pytest

from netshim import wire
from netshim.handlers import HANDLERS
from netshim.kafka_releases import release_named
from support import kafka_jvm

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]
#: The latest version of each release.
JARS = {
    "0.11": "0.11.0.3",
    "1.1": "1.1.1",
    "2.4": "2.4.1",
    "2.8": "2.8.2",
    "3.0": "3.0.2",
    "3.6": "3.6.2",
    "3.9": "3.9.1",
    "4.0": "4.0.2",
    "4.1": "4.1.1",
}
#: APIs in the jar of 3.9 that a broker serves only if a setting allows it.
DISABLED_APIS = {
    "3.9": {wire.CONSUMER_GROUP_HEARTBEAT.key, wire.CONSUMER_GROUP_DESCRIBE.key},
}


@pytest.mark.parametrize("name", JARS)
def test_table_of_api_versions_equals_the_jar(name: str) -> None:
    program = str(kafka_jvm.SOURCES / "ApiRanges.java")
    output = subprocess.run(
        ["java", "-cp", f"{kafka_jvm.client_jars(JARS[name])}/*", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    ranges = {}
    for line in output.splitlines():
        key, oldest, latest = map(int, line.split())
        is_served = oldest <= latest and key not in DISABLED_APIS.get(name, ())
        if key in HANDLERS and is_served:
            ranges[key] = oldest, latest
    assert release_named(name).ranges == ranges
