"""hypothesis generates values for types of logcore, and the library does not import
hypothesis.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given

import logcore
from logcore.testing import hypothesis_plugin

SOURCES = Path(logcore.__file__).resolve().parents[1]

# For an installed package that does not declare the entry point.
hypothesis_plugin.register()


@given(record=..., batch=...)
def test_annotations_generate_records_and_batches(
    record: logcore.Record, batch: logcore.RecordBatch
) -> None:
    assert type(record) is logcore.Record
    assert record.offset >= 0
    assert record.value is None or isinstance(record.value, bytes)
    assert all(isinstance(name, str) for name, _ in record.headers)
    batch.verify()
    found = batch.records()
    assert [record.offset for record in found] == list(
        range(batch.base_offset, batch.last_offset + 1)
    )
    assert len(found) == batch.record_count


def python(code: str) -> str:
    found = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": found}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_entry_point_registers_the_types() -> None:
    """If logcore.testing.strategies is imported first, hypothesis loads the plugin while
    that module is only partially imported.
    """
    for first in (
        "import logcore",
        "import hypothesis",
        "import logcore.testing.strategies",
    ):
        code = (
            f"{first}\n"
            "from hypothesis import strategies as st\n"
            "import logcore\n"
            "print(st.from_type(logcore.RecordBatch), st.from_type(logcore.Record))\n"
        )
        found = python(code)
        assert "zstd" in found, first
        assert "row.at(offset)" in found, first


def test_the_library_does_not_import_hypothesis() -> None:
    code = "import sys, logcore, logcore.testing, netshim\nprint('hypothesis' in sys.modules)"
    assert python(code) == "False\n"
