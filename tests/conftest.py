"""Shared set-up: hypothesis profiles, and the vectors that other people's encoders wrote.

HYPOTHESIS_PROFILE=thorough looks for minutes instead of seconds; every run prints how to repeat what it found.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("quick", max_examples=60, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", max_examples=5_000, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

VECTORS = Path(__file__).parent / "data" / "vectors"
EXPECTED: dict[str, Any] = json.loads((VECTORS / "expected.json").read_text())


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    """A path where a partition directory may be made."""
    return tmp_path / "data" / "orders-0"
