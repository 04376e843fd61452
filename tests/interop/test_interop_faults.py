"""What clients do under faults, as the table of docs/client-faults.md.

With LOGCORE_WRITE_TABLE=1, the table of the page is replaced by the observed one.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from support.faulted_clients import (
    CLIENTS,
    CONSUME,
    IDEMPOTENT,
    PAGE,
    ROWS,
    VALUES,
    FaultRow,
    Outcome,
    cell,
    observe,
    table,
)

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1_800)]


def check(client: str, row: FaultRow, outcome: Outcome) -> None:
    """Check that a client and the broker keep their promises."""
    text = f"{client}, {row.name}: {outcome}"
    if row.job == CONSUME:
        assert set(outcome.read) <= set(VALUES), text
        if outcome.result == "committed":
            assert set(outcome.read) == set(VALUES), text
        return
    if outcome.result == "acknowledged":
        assert outcome.stored >= 1, text
    if row.job == IDEMPOTENT:
        assert outcome.stored <= 1, text


def test_table_is_what_clients_do(tmp_path: Path) -> None:
    cells = {}
    for number, (row, client) in enumerate(itertools.product(ROWS, CLIENTS)):
        outcome = observe(tmp_path / str(number), client, row)
        check(client, row, outcome)
        cells[row.name, client] = cell(outcome, row.job)
    found = table(cells)
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition("| fault |")
    end = rest.index("\n\n")
    if os.environ.get("LOGCORE_WRITE_TABLE"):
        PAGE.write_text(before + found + rest[end:], "utf-8")
    assert found in PAGE.read_text("utf-8")
