"""The checker of Prometheus reads the metrics of a broker."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.confluent import consumer, produce, producer, read
from support.debian import program
from support.metrics_broker import CountedBroker

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]


def test_promtool_finds_no_error(tmp_path: Path) -> None:
    promtool = program("promtool", "prometheus")
    with CountedBroker(tmp_path / "data") as broker:
        produce(producer(broker), "t", b"a", b"b")
        reader = consumer(broker, 'a "group"')
        reader.subscribe(["t"])
        assert read(reader, 2) == [b"a", b"b"]
        reader.commit(asynchronous=False)
        reader.close()
        status, text = broker.get("/metrics")
    assert status == 200 and "netshim_group_lag{" in text
    result = subprocess.run(
        [*promtool, "check", "metrics"],
        input=text.encode(),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
