"""Fixtures for tests against a Kafka broker: pytest finds them by itself once the package is installed.

    def test_my_service(kafka):
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})

Each test has a broker and a directory of its own, up in milliseconds; the broker's `logdir` shows what has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from netshim.server import ServerThread


@pytest.fixture
def kafka_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServerThread]]:
    """Starts brokers: kafka_factory(path=None, **options of netshim.serve). A path that is given is kept, so that a
    broker can be stopped and started again over the same data. All are stopped when the test ends.
    """
    from netshim.server import serve  # not before a test wants it: pytest loads this module in every run

    running: list[ServerThread] = []

    def start(path: Any = None, **options: Any) -> ServerThread:
        options.setdefault("cleaner_backoff_ms", 100)  # a test does not wait for compaction
        server = serve(tmp_path_factory.mktemp("kafka") if path is None else path, **options)
        running.append(server)
        return server

    yield start
    for server in reversed(running):
        server.stop()


@pytest.fixture
def kafka(kafka_factory: Callable[..., ServerThread]) -> ServerThread:
    """A running broker over a temporary directory: `.bootstrap_servers`, `.logdir`, `.stop()`."""
    return kafka_factory()
