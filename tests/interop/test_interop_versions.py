"""The table of clients and frameworks in docs/netshim.md names the versions that the
tests run. Run by `make interop`.

A version is asked of what is installed: the package itself, or the jar that Maven
fetched. After an update of a client the table, and the sentence of the README that
repeats it, follow.
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


def rows() -> dict[str, str]:
    """Client -> version, as the page says."""
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


def in_environment(name: str, *packages: str) -> str:
    """Of the package `name` in the environment that the tests of it make."""
    python = environment(name, *packages)
    ask = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return subprocess.run(
        [python, "-c", ask], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def of_jar(folder: Path, name: str) -> str:
    """Of the one jar `name` in a folder."""
    matches = [
        re.fullmatch(rf"{re.escape(name)}-(\d[\d.]*)\.jar", path.name)
        for path in folder.iterdir()
    ]
    (number,) = [match[1] for match in matches if match is not None]
    return number


def frameworks() -> Path:
    return kafka_jvm.jars("streams.xml", "frameworks", "kafka-streams")


def connector() -> Path:
    return kafka_jvm.jars("connector.xml", "connector", "spark-sql-kafka-0-10_2.13")


RUNS: dict[str, Callable[[], str]] = {
    "confluent-kafka (librdkafka)": lambda: version("confluent-kafka"),
    "kafka-python": lambda: version("kafka-python"),
    "aiokafka": lambda: version("aiokafka"),
    "Kafka's Java clients and admin tools": lambda: of_jar(
        kafka_jvm.classes(), "kafka-clients"
    ),
    "Kafka Streams": lambda: of_jar(frameworks(), "kafka-streams"),
    "Kafka Connect": lambda: of_jar(frameworks(), "connect-runtime"),
    "Quix Streams": lambda: in_environment("quixstreams", "quixstreams"),
    "FastStream": lambda: in_environment("faststream", "faststream[confluent,kafka]"),
    "Spark's Kafka connector": lambda: of_jar(connector(), "spark-sql-kafka-0-10_2.13"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_table_names_the_version_that_runs(name: str) -> None:
    assert rows()[name] == RUNS[name]()


def test_each_row_of_the_table_is_requested() -> None:
    assert rows().keys() == RUNS.keys()


def test_the_readme_names_the_same_versions() -> None:
    """In one sentence, with shorter names."""
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    for name, number in rows().items():
        if name == "Spark's Kafka connector":  # the README has a paragraph on Spark
            continue
        client = name.removesuffix(" (librdkafka)").removesuffix(" and admin tools")
        assert f"{client} {number}" in text, (
            f"expected '{client} {number}' in the README"
        )
