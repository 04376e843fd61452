"""Fixtures for tests against a Kafka broker. pytest discovers them once the package is
installed.

    def test_my_service(kafka):                     # a broker and a directory of its own
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})

    def test_another(kafka_session):                # topics and groups of its own, on one broker for all tests
        producer.produce(kafka_session.topic("orders"), b"4 apples")

The fixtures return `netshim.testing.Kafka`. This module is loaded in every pytest run,
so it imports the broker only when a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from netshim.secured_testing import SecuredKafka
    from netshim.testing import Kafka


@pytest.fixture(scope="session")
def kafka_options() -> dict[str, Any]:
    """Return options of netshim.serve() for the brokers of all these fixtures.

    Override it in conftest.py.
    """
    return {}


@pytest.fixture
def kafka_factory(
    tmp_path_factory: pytest.TempPathFactory, kafka_options: dict[str, Any]
) -> Iterator[Callable[..., Kafka]]:
    """Start brokers: kafka_factory(path=None, **options of netshim.serve).

    If a path is given, a broker can be stopped and started again with the same data. All
    brokers are stopped when the test ends.
    """
    from netshim import testing

    running: list[Kafka] = []

    def start(path: Any = None, **options: Any) -> Kafka:
        broker = testing.start(
            tmp_path_factory.mktemp("kafka") if path is None else path,
            # Options of the call have priority over kafka_options.
            **{**kafka_options, **options},
        )
        running.append(broker)
        return broker

    yield start
    # In the reverse order, because a later broker may depend on an earlier one.
    for broker in reversed(running):
        broker.stop()


@pytest.fixture
def kafka(kafka_factory: Callable[..., Kafka]) -> Kafka:
    """A running broker for one test, with a temporary directory."""
    return kafka_factory()


@pytest.fixture(scope="module")
def kafka_module(
    tmp_path_factory: pytest.TempPathFactory, kafka_options: dict[str, Any]
) -> Iterator[Kafka]:
    """A running broker for all tests of a module.

    A fixture of the module may prepare topics and records. With kafka_clean, each test
    begins with them.
    """
    from netshim import testing

    broker = testing.start(tmp_path_factory.mktemp("kafka"), **kafka_options)
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def _kafka_module_snapshots() -> dict[str, Any]:
    """The snapshot that the first test with kafka_clean has made."""
    return {}


@pytest.fixture
def kafka_clean(
    kafka_module: Kafka, _kafka_module_snapshots: dict[str, Any]
) -> Iterator[Kafka]:
    """The broker kafka_module, in the state before the first test with this fixture.

    It is rolled back to that state after each test.
    """
    # Fixtures of the module have prepared their topics by now.
    if "first" not in _kafka_module_snapshots:
        _kafka_module_snapshots["first"] = kafka_module.snapshot()
    yield kafka_module
    kafka_module.rollback(_kafka_module_snapshots["first"])


@pytest.fixture(scope="session")
def kafka_session_broker(
    tmp_path_factory: pytest.TempPathFactory, kafka_options: dict[str, Any]
) -> Iterator[Kafka]:
    """The broker of kafka_session, for fixtures that live longer than a test.

    Its names have no prefix. Each process of pytest-xdist has one.
    """
    from netshim import testing

    broker = testing.start(tmp_path_factory.mktemp("kafka"), **kafka_options)
    yield broker
    broker.stop()


@pytest.fixture
def kafka_session(
    kafka_session_broker: Kafka, request: pytest.FixtureRequest
) -> Iterator[Kafka]:
    """Topics and groups of one test, on one broker for the whole session.

    They are removed when the test ends.
    """
    with kafka_session_broker.namespace(request.node.name) as namespace:
        yield namespace


@pytest.fixture
def kafka_secured(
    tmp_path_factory: pytest.TempPathFactory, kafka_options: dict[str, Any]
) -> Iterator[SecuredKafka]:
    """A running broker with TLS, users and access control lists.

    For example: Producer(kafka_secured.client_config("alice")) after
    kafka_secured.allow("alice", "write", topic="orders").
    """
    from netshim.secured_testing import start_secured

    broker = start_secured(tmp_path_factory.mktemp("kafka") / "data", **kafka_options)
    yield broker
    broker.stop()
