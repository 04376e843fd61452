"""One Spark for all tests that need a JVM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark_settings() -> dict[str, Any]:
    return {"spark.log.level": "OFF"}


@pytest.fixture(scope="session")
def spark(spark_session: SparkSession) -> SparkSession:
    return spark_session
