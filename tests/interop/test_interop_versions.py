"""The table of clients and frameworks in docs/netshim.md contains the versions that the
tests use. Run by `make interop`. The tests read each version from the installed
package, or from the name of the jar that Maven fetched. After an update of a client,
the table and a sentence of the README must be updated.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from support import kafka_jvm
from support.environments import ROOT, environment

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1_800)]


def documented_versions() -> dict[str, str]:
    """Return the version of each client in the table of the page."""
    page = (ROOT / "docs" / "netshim.md").read_text("utf-8")
    table = page.split("## Clients and frameworks that run unmodified", 1)[1].split(
        "\n## ", 1
    )[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line[:1] == "|"
    ]
    return {name: number for name, number, *_ in cells[2:]}


def version_in_environment(name: str, *packages: str) -> str:
    """Return the version of a package in the environment of its tests."""
    python = environment(name, *packages)
    program = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def version_of_jar(folder: Path, name: str) -> str:
    """Return the version of the only jar with a name in a directory."""
    matches = [
        re.fullmatch(rf"{re.escape(name)}-(\d[\d.]*)\.jar", path.name)
        for path in folder.iterdir()
    ]
    (number,) = [match[1] for match in matches if match is not None]
    return number


def frameworks() -> Path:
    return kafka_jvm.fetch_jars("streams.xml", "frameworks", "kafka-streams")


def connector() -> Path:
    return kafka_jvm.fetch_jars(
        "connector.xml", "connector", "spark-sql-kafka-0-10_2.13"
    )


INSTALLED_VERSIONS: dict[str, Callable[[], str]] = {
    "confluent-kafka (librdkafka)": lambda: version("confluent-kafka"),
    "kafka-python": lambda: version("kafka-python"),
    "aiokafka": lambda: version("aiokafka"),
    "Kafka's Java clients and admin tools": lambda: version_of_jar(
        kafka_jvm.kafka_jars(), "kafka-clients"
    ),
    "Kafka Streams": lambda: version_of_jar(frameworks(), "kafka-streams"),
    "Kafka Connect": lambda: version_of_jar(frameworks(), "connect-runtime"),
    "Quix Streams": lambda: version_in_environment("quixstreams", "quixstreams"),
    "FastStream": lambda: version_in_environment(
        "faststream", "faststream[confluent,kafka]"
    ),
    "Spark's Kafka connector": lambda: version_of_jar(
        connector(), "spark-sql-kafka-0-10_2.13"
    ),
}


@pytest.mark.parametrize("name", INSTALLED_VERSIONS)
def test_documented_version_is_installed(name: str) -> None:
    assert documented_versions()[name] == INSTALLED_VERSIONS[name]()


def test_each_documented_version_has_a_test() -> None:
    assert documented_versions().keys() == INSTALLED_VERSIONS.keys()


def test_readme_contains_the_same_versions() -> None:
    """The README has the versions in one sentence, with shorter names."""
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    for name, number in documented_versions().items():
        if name == "Spark's Kafka connector":  # the README has a paragraph on Spark
            continue
        client = name.removesuffix(" (librdkafka)").removesuffix(" and admin tools")
        assert f"{client} {number}" in text, (
            f"expected '{client} {number}' in the README"
        )
