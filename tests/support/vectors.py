"""Files that Kafka and its clients have written, and their content.
tests/data/vectors/README.md describes each file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
VECTORS = DATA / "vectors"
EXPECTED: dict[str, Any] = json.loads((VECTORS / "expected.json").read_text())
