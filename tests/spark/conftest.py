"""Fixtures: one Spark session for all tests that need a JVM, and one S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from support.s3 import serving

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark_settings() -> dict[str, Any]:
    return {"spark.log.level": "OFF"}


@pytest.fixture(scope="session")
def spark(spark_session: SparkSession) -> SparkSession:
    return spark_session


@pytest.fixture(scope="session")
def s3_server() -> Iterator[dict[str, str]]:
    """Start an S3 server for all tests, and return its options."""
    with serving() as options:
        yield options
