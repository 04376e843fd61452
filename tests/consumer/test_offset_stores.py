"""Offsets stored in the log, in the registry, and in both while a group moves from one
to the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import logcore
from logcore import LogDir
from logcore.consumer import TopicPartition
from logcore.errors import CommitFailedError, ConsumerStateError, InvalidConfigError
from logcore.registry import offsets, open_registry
from logcore.testing import SimulatedDisk

T0 = TopicPartition("t", 0)
LOG_ONLY: dict[str, Any] = {}
DUAL: dict[str, Any] = {"dual_commit": True}
REGISTRY: dict[str, Any] = {"offsets_storage": "registry"}
REGISTRY_DUAL: dict[str, Any] = {"offsets_storage": "registry", "dual_commit": True}


@pytest.fixture(params=["alone", "shared"])
def data(request: pytest.FixtureRequest) -> Iterator[LogDir]:
    disk = SimulatedDisk({"data": None})
    with logcore.open_dir(
        "data", create=True, shared=request.param == "shared", fs=disk
    ) as data:
        data.create_topic("t")
        for number in range(20):
            data.append("t", b"%d" % number)
        yield data


def commit(data: LogDir, offset: int, **settings: Any) -> None:
    with data.consumer(group_id="g", enable_auto_commit=False, **settings) as consumer:
        consumer.commit({T0: offset})


def committed(data: LogDir, **settings: Any) -> int | None:
    with data.consumer(group_id="g", enable_auto_commit=False, **settings) as consumer:
        offset = consumer.committed([T0])[T0]
        return None if offset is None else offset.offset


def offsets_of_both_stores(data: LogDir) -> tuple[int | None, int | None]:
    """Return the committed offsets in the log and in the registry."""
    with open_registry("data", fs=data._fs) as registry:  # type: ignore[arg-type]
        return data.committed_offsets("t", 0).get("g"), offsets.committed(
            registry, "g"
        ).get(T0)


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        (LOG_ONLY, (5, None)),
        (DUAL, (5, 5)),
        (REGISTRY, (None, 5)),
        (REGISTRY_DUAL, (5, 5)),
    ],
    ids=["log", "log-dual", "registry", "registry-dual"],
)
def test_commit_is_stored_in_the_configured_stores(
    data: LogDir, settings: dict[str, Any], stored: tuple[int | None, int | None]
) -> None:
    with data.consumer(
        group_id="g", auto_offset_reset="earliest", **settings
    ) as consumer:
        consumer.subscribe(["t"])
        assert consumer.poll(0, 5).count == 5
        consumer.commit()
        assert offsets_of_both_stores(data) == stored
        consumer.poll(0, 3)
    with data.consumer(
        group_id="g", auto_offset_reset="earliest", **settings
    ) as consumer:
        consumer.subscribe(["t"])
        assert consumer.poll(0, 1)[T0][0].offset == 8


@pytest.mark.parametrize(
    ("log_offset", "registry_offset"), [(3, 7), (7, 3), (None, 4), (4, None)]
)
def test_larger_offset_of_both_stores_is_read(
    data: LogDir, log_offset: int | None, registry_offset: int | None
) -> None:
    if log_offset is not None:
        commit(data, log_offset)
    if registry_offset is not None:
        commit(data, registry_offset, **REGISTRY)
    assert committed(data) == log_offset
    assert committed(data, **REGISTRY) == registry_offset
    assert (
        committed(data, **DUAL)
        == committed(data, **REGISTRY_DUAL)
        == max(log_offset or 0, registry_offset or 0)
    )


def test_group_moves_to_the_log_and_back_while_it_runs(data: LogDir) -> None:
    """All consumers are restarted twice. During a restart, consumers with old and with
    new settings commit in turn.
    """
    offsets: list[int] = []
    for settings in (
        REGISTRY,
        DUAL,
        REGISTRY,
        DUAL,
        LOG_ONLY,
        DUAL,
        LOG_ONLY,
        REGISTRY_DUAL,
        LOG_ONLY,
        REGISTRY_DUAL,
        REGISTRY,
        REGISTRY_DUAL,
        REGISTRY,
    ):
        with data.consumer(
            group_id="g", auto_offset_reset="earliest", **settings
        ) as consumer:
            consumer.subscribe(["t"])
            offsets += [record.offset for record in consumer.poll(0, 1).records()]
        # The registry is stale now, so that the move back must begin with dual commits.
        if settings is LOG_ONLY:
            break
    assert offsets == list(range(len(offsets)))
    for settings in (REGISTRY_DUAL, LOG_ONLY, REGISTRY_DUAL):
        with data.consumer(group_id="g", **settings) as consumer:
            consumer.subscribe(["t"])
            offsets += [record.offset for record in consumer.poll(0, 1).records()]
    for settings in (REGISTRY_DUAL, REGISTRY, REGISTRY):
        with data.consumer(group_id="g", **settings) as consumer:
            consumer.subscribe(["t"])
            offsets += [record.offset for record in consumer.poll(0, 1).records()]
    assert offsets == list(range(len(offsets)))


@pytest.mark.parametrize(
    "settings",
    [DUAL, REGISTRY, REGISTRY_DUAL],
    ids=["log-dual", "registry", "registry-dual"],
)
def test_removed_member_changes_neither_store(
    data: LogDir, settings: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        "group_id": "g", "auto_offset_reset": "earliest", "enable_auto_commit": False, "max_poll_interval_ms": 1_000,
        "assignors": ("range",), **settings,
    }  # fmt: skip
    with data.consumer(**options) as removed_member, data.consumer(**options) as other:
        removed_member.subscribe(["t"])
        assert removed_member.poll(0, 5).count == 5
        data._fs.advance(600)  # type: ignore[attr-defined]
        other.subscribe(["t"])
        for _ in range(12):
            other.poll(0, 10)
            data._fs.advance(100)  # type: ignore[attr-defined]
        assert other.assignment() == {T0}
        other.commit()
        before = offsets_of_both_stores(data)
        with pytest.raises(CommitFailedError):
            removed_member.commit()
        assert offsets_of_both_stores(data) == before
        assert max(offset or 0 for offset in before) >= 10


def test_offsets_are_reset_in_both_stores(data: LogDir) -> None:
    commit(data, 9, **DUAL)
    data.alter_group_offsets("g", {("t", 0): 2})
    assert offsets_of_both_stores(data) == (2, 2)
    assert committed(data, **DUAL) == 2


def test_group_without_offsets_in_the_registry_gets_none(data: LogDir) -> None:
    commit(data, 9)
    data.alter_group_offsets("g", {("t", 0): 2})
    assert offsets_of_both_stores(data) == (2, None)


def test_offsets_of_a_group_with_members_are_set_only_by_force(data: LogDir) -> None:
    with data.consumer(
        group_id="g", auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        consumer.subscribe(["t"])
        consumer.poll(0, 5)
        with pytest.raises(ConsumerStateError, match="UNKNOWN_MEMBER_ID"):
            data.alter_group_offsets("g", {("t", 0): 2})
        data.alter_group_offsets("g", {("t", 0): 2}, force=True)
        with pytest.raises(CommitFailedError):
            consumer.commit()
        assert offsets_of_both_stores(data)[0] == 2
        offsets = [
            record.offset for _ in range(2) for record in consumer.poll(0, 3).records()
        ]
        assert offsets == [2, 3, 4, 5, 6, 7], (
            "the member joined again, and began at the new offset"
        )
        consumer.commit()
        assert offsets_of_both_stores(data)[0] == 8
    with pytest.raises(InvalidConfigError, match="a committed offset"):
        data.alter_group_offsets("g", {("t", 0): -1})


def test_deletion_removes_offsets_from_both_stores(data: LogDir) -> None:
    commit(data, 9, **DUAL)
    data.delete_topic("t")
    data.create_topic("t")
    assert offsets_of_both_stores(data) == (None, None)
    commit(data, 0, **REGISTRY)
    data.delete_group("g")
    assert offsets_of_both_stores(data) == (None, None)
    with pytest.raises(ConsumerStateError, match="GROUP_ID_NOT_FOUND"):
        data.delete_group("g")


@pytest.mark.parametrize(
    "settings", [{"offsets_storage": "disk", "group_id": "g"}, DUAL, REGISTRY]
)
def test_contradictory_settings_are_refused(
    data: LogDir, settings: dict[str, Any]
) -> None:
    with pytest.raises(InvalidConfigError):
        data.consumer(**settings)
