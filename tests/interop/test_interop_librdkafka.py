"""The tests of librdkafka 2.15.1 for administration and authorization, over TLS.
confluent-kafka contains a newer release. Two expectations are changed, see
tests/support/librdkafka.py. 0081 authenticates with a client certificate. With a
password, three parts of it expect a broker on which everyone may use a resource without
rules (allow.everyone.if.no.acl.found). netshim has no such setting.

Needs Java 17 or later with Maven, npm, make and a C++ compiler.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import netshim
from netshim.secured_testing import SecuredKafka, start_secured
from netshim.security.principals import MappingRules
from support import kafka_jvm, librdkafka

pytestmark = [pytest.mark.interop, pytest.mark.timeout(4_000)]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[SecuredKafka]:
    kafka = start_secured(
        tmp_path / "data",
        listeners=["SASL_SSL://127.0.0.1:0", "SSL://127.0.0.1:0"],
        security=netshim.SecuritySettings(
            super_users=("User:admin",),
            enforces_acls=True,
            principal_mapping=MappingRules.parse("RULE:.*CN=([^,]*).*/$1/,DEFAULT"),
        ),
    )
    yield kafka
    kafka.stop()


def run(number: str, settings: Mapping[str, str], kafka: SecuredKafka) -> None:
    """Run one of librdkafka's tests with settings of a client."""
    folder = kafka.ca_file.parent
    configuration = folder / "test.conf"
    configuration.write_text(
        "".join(f"{name}={value}\n" for name, value in settings.items())
    )
    admin = folder / "admin.properties"
    admin.write_text(
        "".join(
            f"{name}={value}\n"
            for name, value in kafka.client_config("admin", "java").items()
        )
    )
    tool = folder / "bin" / "kafka-acls.sh"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\n"
        f"exec java -XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        f"-cp '{kafka_jvm.tool_jars()}/*:{kafka_jvm.kafka_jars()}/*' "
        f"org.apache.kafka.tools.AclCommand --command-config '{admin}' \"$@\"\n"
    )
    tool.chmod(0o700)
    program = librdkafka.runner()
    source = program.parents[1]
    result = subprocess.run(
        # -Q omits the repetition as a consumer. -p4 doubles all time limits: 0119 starts
        # kafka-acls.sh four times.
        [str(program), "-p4", "-Q"],
        cwd=folder,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": f"{source / 'src'}:{source / 'src-cpp'}",
            "RDKAFKA_TEST_CONF": str(configuration),
            "TEST_KAFKA_VERSION": "4.1.1",
            "KAFKA_PATH": str(folder),
            "TESTS": number,
        },
        capture_output=True,
        text=True,
        errors="replace",
        timeout=900,
        check=False,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-5_000:]
    (line,) = [
        line for line in output.splitlines() if f" {number}_" in line and "|" in line
    ]
    assert "PASSED" in line, line


def test_admin_api_of_librdkafka_over_mutual_tls(broker: SecuredKafka) -> None:
    """Run 0081: administration, by a super user with a client certificate."""
    certificate = str(broker.client_certificate("admin"))
    port = broker.server.server.listeners[1].port
    settings = {
        "bootstrap.servers": f"localhost:{port}",
        "security.protocol": "SSL",
        "ssl.ca.location": str(broker.ca_file),
        "ssl.certificate.location": certificate,
        "ssl.key.location": certificate,
    }
    run("0081", settings, broker)


@pytest.mark.parametrize("number", ["0109", "0115", "0119"])
def test_librdkafka_reports_refused_users(broker: SecuredKafka, number: str) -> None:
    """Run tests of denied topics, by a user who may use everything else."""
    for resource in ("topic", "group", "transactional_id"):
        broker.allow("tester", "all", **{resource: "*"})
    broker.allow("tester", "all", cluster=True)
    run(number, broker.client_config("tester"), broker)
