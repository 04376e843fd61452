"""Tests of power cuts during local writes and gather(), with every possible state of the
disk. Each batch is stored once and completely.

Tasks and gather() run on one simulated disk. The rows of a returned receipt are durable
on that disk. After a power cut, the next process opens and reads the log, and gathers the
receipts again.
"""

from __future__ import annotations

import itertools
import uuid

import attrs
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import logcore
from logcore.inspect.verify import verify
from logcore.testing import Explorer, Report, SimulatedDisk
from logcore.testing.crash_states import Kind, Names
from pyspark_logcore import gathering, local
from pyspark_logcore.gathering import Gathering
from pyspark_logcore.local import WriteReceipt
from support.simulated_local_writes import rows, values, write
from support.simulated_spark import frame

BATCHES = 2
#: The number of rows of each task, and their size: the first task sends its rows in a
#: message, and the second task leaves a segment that gather() moves.
SHARES = ((4, 20), (12, 60))
COMPLETE_STATES = [
    [
        value
        for batch in range(end)
        for task, share in enumerate(SHARES)
        for value in rows(batch, task, *share)
    ]
    for end in range(BATCHES + 1)
]


@pytest.fixture(autouse=True)
def same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make generated names repeatable, and limit carry_bytes so that rows are sent both
    in messages and as files.
    """
    names = itertools.count()
    for module in (gathering, local):
        monkeypatch.setattr(module.uuid, "uuid4", lambda: uuid.UUID(int=next(names)))
    plain = gathering.Shipment
    monkeypatch.setattr(
        gathering,
        "Shipment",
        lambda fs, into, txid: plain(fs, into, txid, carry_bytes=300),
    )


def gather_all(
    disk: SimulatedDisk, receipts: list[WriteReceipt], *, remove: bool = False
) -> None:
    Gathering(disk, "/into", None, None, 1.0).run(receipts, remove=remove)


def reopen(disk: SimulatedDisk) -> None:
    """Open the log for writing, if it exists, as the next process does."""
    if disk.is_directory("/into"):
        with logcore.open_dir("/into", fs=disk) as directory:
            if "t" in directory:
                directory.partition("t", 0)


@attrs.frozen
class RecoveredLog:
    """The content of the log before and after the repeated gather, of `batches` batches
    with receipts.
    """

    before: list[bytes | None]
    after: list[bytes | None]
    batches: int


def explore_power_cuts(*, names: Names, remove: bool, limit: int) -> Report:
    receipts: list[WriteReceipt] = []
    returned = [0]

    def recover(disk: SimulatedDisk) -> RecoveredLog:
        visible = values("/into", fs=disk).get(0, [])
        assert visible in COMPLETE_STATES, (
            f"a part of a batch is visible: {len(visible)}"
        )
        reopen(disk)
        before = values("/into", fs=disk).get(0, [])
        for receipt in receipts:
            if receipt.batch >= COMPLETE_STATES.index(before) or not remove:
                assert values(receipt.path, fs=disk)[0] == rows(
                    receipt.batch, receipt.task, *SHARES[receipt.task]
                ), "rows of a returned receipt are lost"
        gather_all(disk, receipts, remove=remove)
        reopen(disk)
        after = values("/into", fs=disk).get(0, [])
        assert not disk.open_handles, f"still open: {disk.open_handles}"
        assert not [
            verdict
            for verdict in verify("/into", fs=disk)
            if verdict.status == "damaged"
        ]
        return RecoveredLog(before, after, len(receipts) // len(SHARES))

    def check(recovered: RecoveredLog, kind: Kind) -> None:
        assert recovered.before in COMPLETE_STATES, (
            f"a part of a batch is stored: {len(recovered.before)}"
        )
        assert COMPLETE_STATES.index(recovered.before) >= returned[0], (
            f"batch {returned[0] - 1} was gathered and is lost"
        )
        assert recovered.after == COMPLETE_STATES[recovered.batches], (
            f"after the repeated gather: {len(recovered.after)}"
        )

    run = SimulatedDisk(names=names)
    explorer = Explorer(recover, check, limit=limit, again_every=50, restart=reopen)
    explorer.attach(run)
    try:
        for batch in range(BATCHES):
            shares = [
                frame(value=rows(batch, task, *share))
                for task, share in enumerate(SHARES)
            ]
            receipts += write("/local", batch, shares, fs=run)
            explorer.check_promises()
            gather_all(run, receipts[-len(SHARES) :], remove=remove)
            returned[0] = batch + 1
            explorer.check_promises()
        return explorer.finish()
    except BaseException:
        run.crash()
        raise


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "limit", "remove"),
    [
        ("posix", 1, True),
        *(
            pytest.param(
                names, 200, remove, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]
            )
            for names in ("posix", "journal")
            for remove in (False, True)
        ),
    ],
)
def test_gather_is_repeated_after_a_power_cut_at_any_step(
    names: Names, limit: int, remove: bool
) -> None:
    report = explore_power_cuts(names=names, remove=remove, limit=limit)
    print(report)
    assert report.states > 100
