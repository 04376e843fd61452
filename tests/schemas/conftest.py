"""A broker with a schema registry."""

from __future__ import annotations

import pytest

from netshim.testing import Kafka
from support.registry_calls import RegistryClient


@pytest.fixture
def registry(kafka: Kafka) -> RegistryClient:
    """A client of the registry of the broker `kafka`."""
    return RegistryClient(kafka.schema_registry_url)
