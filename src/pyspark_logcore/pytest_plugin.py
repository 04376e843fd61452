"""The fixtures of tests that need Spark. pytest discovers them once the package is
installed.

    def test_my_job(spark_session, tmp_path):
        spark_session.read.format("logcore")...

This module is loaded in every pytest run, so it imports pyspark only when a fixture is
used.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark_settings() -> dict[str, Any]:
    """Return settings that spark_session uses instead of its own.

    Override it in conftest.py.
    """
    return {}


@pytest.fixture(scope="session")
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which Spark's processes run.

    Relative paths begin in this directory, and Spark writes its own files to it.
    """
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="session")
def spark_session(
    spark_home: Path, spark_settings: dict[str, Any]
) -> Iterator[SparkSession]:
    """Return the Spark session of the whole run, because a start takes seconds.

    It is local, with two slots, three attempts of a task, no web page and two shuffle
    partitions. If pyspark or Java is missing, the test is skipped.
    """
    pytest.importorskip("pyspark")
    pytest.importorskip("pyarrow")
    import pyspark_logcore

    try:
        pyspark_logcore.ensure_java()
    except pyspark_logcore.JavaNotFoundError as error:
        pytest.skip(str(error))
    from pyspark.sql import SparkSession

    settings = {
        "spark.master": "local[2,3]",
        "spark.app.name": "tests",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(spark_home / "warehouse"),
        **spark_settings,
    }
    with pytest.MonkeyPatch.context() as patch:
        # Functions of tests are pickled by the names of their modules, which workers
        # have to find.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        if "SPARK_LOCAL_IP" not in os.environ:
            patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        builder = SparkSession.builder
        for name, value in settings.items():
            builder = builder.config(name, value)
        with contextlib.chdir(spark_home):
            session = pyspark_logcore.tune(builder).getOrCreate()
        yield session
        session.stop()
