"""The behavior of clients under faults, compared with the table of
docs/client-faults.md. With LOGCORE_WRITE_TABLE=1 and without -n, the test replaces the
lines of the page by the observed ones.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.faulted_clients import (
    CLIENTS,
    CONSUME,
    IDEMPOTENT,
    ROWS,
    VALUES,
    FaultRow,
    Outcome,
    cell,
    line,
    observe,
    shown_lines,
    write_line,
)

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1_800)]


def check(client: str, row: FaultRow, outcome: Outcome) -> None:
    """Check that a client and the broker keep their promises."""
    text = f"{client}, {row.name}: {outcome}"
    assert outcome.stored_by_other == 1, text
    if row.job == CONSUME:
        # Records that were committed before may be read again, if the table shows it.
        assert set(outcome.read) <= set(VALUES), text
        assert len(set(outcome.read)) == len(outcome.read), text
        if outcome.result == "committed":
            assert outcome.read[-len(row.unread) :] == row.unread, text
            assert outcome.committed == len(VALUES), text
        else:
            assert outcome.committed == row.committed, text
        return
    if outcome.result == "acknowledged":
        assert outcome.stored >= 1, text
    elif not row.may_store:
        assert outcome.stored == 0, text
    if row.job == IDEMPOTENT or not row.may_store:
        assert outcome.stored <= 1, text


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_clients_behave_as_the_table_shows(tmp_path: Path, row: FaultRow) -> None:
    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        outcomes = pool.map(
            lambda client: observe(tmp_path / client, client, row), CLIENTS
        )
        outcome_by_client = dict(zip(CLIENTS, outcomes, strict=True))
    for client, outcome in outcome_by_client.items():
        check(client, row, outcome)
    observed = line(row, [cell(outcome_by_client[client], row) for client in CLIENTS])
    if os.environ.get("LOGCORE_WRITE_TABLE"):
        write_line(row, observed)
    assert shown_lines().get(row.name) == observed
