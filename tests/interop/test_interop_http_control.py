"""The examples of docs/testing.md for other languages control a broker over HTTP."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import kafka_jvm
from support.environments import ROOT
from support.vectors import DATA

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1_800)]


def example(language: str) -> str:
    """Return the example of the page in a language."""
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    (program,) = re.findall(rf"^```{language}\n(.*?)^```", page, re.S | re.M)
    return str(program)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Serve a directory with a control API, and return the variables of the examples."""
    command = [sys.executable, "-m", "netshim", "serve", str(tmp_path / "data")]
    with subprocess.Popen(
        [*command, "--port", "0", "--control", "0"], stdout=subprocess.PIPE, text=True
    ) as broker:
        assert broker.stdout is not None
        address = broker.stdout.readline().split()[-1]
        *_, url, _, token = broker.stdout.readline().split()
        yield {**os.environ, "BROKER": address, "CONTROL": url, "TOKEN": token}
        broker.terminate()
    assert broker.returncode == 0


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3_000:]


def test_java_example_controls_a_broker(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "BadDay.java").write_text(example("java"))
    jars = f"{kafka_jvm.kafka_jars()}/*"
    run(["java", "-cp", jars, "BadDay.java"], tmp_path, environment)


def test_go_example_controls_a_broker(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    if shutil.which("go") is None:
        pytest.skip("needs go: apt-get install golang-go")
    folder = tmp_path / "shop"
    folder.mkdir()
    for name in ("go.mod", "go.sum"):
        shutil.copy(DATA / "franz" / name, folder)
    (folder / "bad_day_test.go").write_text(example("go"))
    run(["go", "test", "-count=1", "./..."], folder, environment)


def test_node_example_controls_a_broker(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    if shutil.which("node") is None:
        pytest.skip("needs node: apt-get install nodejs")
    (tmp_path / "orders.mjs").write_text(example("js"))
    run(["node", "orders.mjs"], tmp_path, environment)
