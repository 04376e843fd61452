"""Groups of the consumer protocol (KIP-848) of Kafka's Java client through the broker, and Kafka's dump tool on what
the broker wrote of them. Needs Java 17 or later and Maven. Run by `make interop`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from netshim.testing import start
from support import kafka_jvm
from support.kafka_jvm import Storage
from support.vectors import DATA

pytestmark = pytest.mark.interop
re2 = pytest.importorskip("re2")


def test_kafkas_java_client_and_dump_tool(tmp_path: Path) -> None:
    source = DATA / "kafka" / "ConsumerGroups.java"
    kafka = start(tmp_path / "data", group_consumer_session_timeout_ms=10_000)
    try:
        command = ["java", "-cp", f"{kafka_jvm.classes()}/*", str(source), kafka.bootstrap_servers]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    finally:
        kafka.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "feature 1",
        "read 8",
        "committed 2",
        "shared 4",
        "described Stable Consumer 2 range",
        "listed Optional[Consumer]",
        "grown",
        "came back to its own true",
        "alone",
        "pattern refused",
        "deleted 0",
    ]
    with Storage() as storage:
        (path,) = (tmp_path / "data" / "__consumer_offsets-0").glob("*.log")
        text = storage.dump(path, "--offsets-decoder")
    print(text)
    for kind in (3, 5, 6, 7, 8, 16):
        found = re.findall(rf'"type":"?{kind}"?.*', text)
        assert found, (kind, text[:3000])
