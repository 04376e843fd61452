"""Settings of single groups: changes, descriptions, effects and storage. The settings
file may come from any source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.directory.group_settings import GroupSettings
from logcore.errors import CorruptLogError, InvalidConfigError, StorageWriteError
from logcore.format.group_settings import HEARTBEAT_INTERVAL, SESSION_TIMEOUT
from logcore.inspect.dump import dump
from logcore.inspect.salvage import salvage
from logcore.inspect.verify import verify
from logcore.metadata import checkpoint
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from netshim import wire
from netshim.wire import codes
from support.group_harness import GroupHarness

SET = 0
DELETE = 1
APPEND = 2
GROUP = 32
TOPIC = 2
HEARTBEAT = wire.CONSUMER_GROUP_HEARTBEAT
DEFAULTS = {SESSION_TIMEOUT: 45_000, HEARTBEAT_INTERVAL: 5_000}


def change(
    group_harness: GroupHarness,
    group: str,
    *changes: tuple[str, str | None, int],
    only_check: bool = False,
) -> tuple[int, str]:
    """Send an incremental change. Return its error code and message."""
    request = wire.INCREMENTAL_ALTER_CONFIGS.Request
    configs = [
        request.Resource.Config(name=n, value=v, config_operation=operation)
        for n, v, operation in changes
    ]
    asked = request.Resource(resource_type=GROUP, resource_name=group, configs=configs)
    response = group_harness.ask(
        wire.INCREMENTAL_ALTER_CONFIGS, 1, resources=[asked], validate_only=only_check
    )
    return response.responses[0].error_code, response.responses[0].error_message or ""


def described(group_harness: GroupHarness, group: str) -> dict[str, tuple[str, int]]:
    """Return name -> (value, source)."""
    request = wire.DESCRIBE_CONFIGS.Request
    asked = request.Resource(
        resource_type=GROUP, resource_name=group, configuration_keys=None
    )
    (result,) = group_harness.ask(wire.DESCRIBE_CONFIGS, 4, resources=[asked]).results
    assert result.error_code == 0
    return {each.name: (each.value, each.config_source) for each in result.configs}


def put(settings: GroupSettings, group: str, changes: dict[str, object]) -> None:
    draft = settings.draft(DEFAULTS)
    draft.alter(group, changes)
    settings.write(draft)


def listed(group_harness: GroupHarness) -> list[str]:
    response = group_harness.ask(wire.LIST_CONFIG_RESOURCES, 1, resource_types=[GROUP])
    return [each.resource_name for each in response.config_resources]


def heartbeat(group_harness: GroupHarness, group: str) -> Any:
    return group_harness.ask(
        HEARTBEAT,
        1,
        group_id=group,
        member_id="A",
        member_epoch=0,
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=["orders"],
        topic_partitions=[],
    )


def test_group_settings_are_changed_described_and_reset(
    group_harness: GroupHarness,
) -> None:
    defaults = {SESSION_TIMEOUT: ("45000", 5), HEARTBEAT_INTERVAL: ("5000", 5)}
    assert described(group_harness, "g") == defaults
    assert (
        change(
            group_harness,
            "g",
            (SESSION_TIMEOUT, "50000", SET),
            (HEARTBEAT_INTERVAL, "6000", SET),
        )[0]
        == 0
    )
    for _ in range(2):
        assert described(group_harness, "g") == {
            SESSION_TIMEOUT: ("50000", 8),
            HEARTBEAT_INTERVAL: ("6000", 8),
        }
        assert described(group_harness, "other") == defaults
        assert listed(group_harness) == ["g"]
        group_harness.restart()
    assert change(group_harness, "g", (SESSION_TIMEOUT, "", DELETE))[0] == 0
    assert described(group_harness, "g") == {
        SESSION_TIMEOUT: ("45000", 5),
        HEARTBEAT_INTERVAL: ("6000", 8),
    }
    assert (
        change(
            group_harness,
            "g",
            (HEARTBEAT_INTERVAL, None, DELETE),
            ("no.such", None, DELETE),
        )[0]
        == 0
    )
    assert described(group_harness, "g") == defaults and listed(group_harness) == []


def test_alter_configs_replaces_earlier_settings(group_harness: GroupHarness) -> None:
    change(group_harness, "g", (SESSION_TIMEOUT, "50000", SET))
    request = wire.ALTER_CONFIGS.Request
    asked = request.Resource(
        resource_type=GROUP,
        resource_name="g",
        configs=[request.Resource.Config(name=HEARTBEAT_INTERVAL, value="7000")],
    )
    assert (
        group_harness.ask(wire.ALTER_CONFIGS, 2, resources=[asked])
        .responses[0]
        .error_code
        == 0
    )
    assert described(group_harness, "g") == {
        SESSION_TIMEOUT: ("45000", 5),
        HEARTBEAT_INTERVAL: ("7000", 8),
    }


def test_members_use_the_settings_of_their_group(group_harness: GroupHarness) -> None:
    change(
        group_harness,
        "quick",
        (SESSION_TIMEOUT, "1000", SET),
        (HEARTBEAT_INTERVAL, "200", SET),
    )
    assert heartbeat(group_harness, "quick").heartbeat_interval_ms == 200
    assert heartbeat(group_harness, "usual").heartbeat_interval_ms == 5_000
    group_harness.sleep(1_500)
    states = {
        group.group_id: group.group_state
        for group in group_harness.ask(wire.LIST_GROUPS, 5).groups
    }
    assert states == {"quick": "Empty", "usual": "Stable"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ([("no.such", "1", SET)], codes.INVALID_CONFIG),
        ([(SESSION_TIMEOUT, "299", SET)], codes.INVALID_CONFIG),
        ([(SESSION_TIMEOUT, "2147483648", SET)], codes.INVALID_CONFIG),
        ([(SESSION_TIMEOUT, "-1", SET)], codes.INVALID_CONFIG),
        ([(SESSION_TIMEOUT, "5e3", SET)], codes.INVALID_CONFIG),
        ([(SESSION_TIMEOUT, "9" * 40_000, SET)], codes.INVALID_CONFIG),
        ([(SESSION_TIMEOUT, "\u0663\u0663\u0663\u0663", SET)], codes.INVALID_CONFIG),
        ([(SESSION_TIMEOUT, "50000", APPEND)], codes.INVALID_CONFIG),
        # The session timeout would not exceed the default interval.
        (
            [(SESSION_TIMEOUT, "5000", SET)],
            codes.INVALID_CONFIG,
        ),
        ([(HEARTBEAT_INTERVAL, "45000", SET)], codes.INVALID_CONFIG),
        (
            [(HEARTBEAT_INTERVAL, "6000", SET), ("no.such", "1", SET)],
            codes.INVALID_CONFIG,
        ),
        ([(SESSION_TIMEOUT, None, SET)], codes.INVALID_REQUEST),
        (
            [(SESSION_TIMEOUT, "50000", SET), (SESSION_TIMEOUT, "50000", SET)],
            codes.INVALID_REQUEST,
        ),
    ],
)
def test_request_with_an_invalid_setting_is_refused_as_a_whole(
    group_harness: GroupHarness, changes: list[Any], code: int
) -> None:
    error_code, message = change(group_harness, "g", *changes)
    assert error_code == code and 0 < len(message) < 500
    assert listed(group_harness) == []


def test_group_name_must_fit_into_a_record(group_harness: GroupHarness) -> None:
    assert (
        change(group_harness, "", (SESSION_TIMEOUT, "50000", SET))[0]
        == codes.INVALID_REQUEST
    )
    assert (
        change(group_harness, "x" * 5_000_000, (SESSION_TIMEOUT, "50000", SET))[0]
        == codes.INVALID_CONFIG
    )


def test_validation_changes_no_setting(group_harness: GroupHarness) -> None:
    assert (
        change(group_harness, "g", (SESSION_TIMEOUT, "50000", SET), only_check=True)[0]
        == 0
    )
    assert (
        change(group_harness, "g", (SESSION_TIMEOUT, "5", SET), only_check=True)[0]
        == codes.INVALID_CONFIG
    )
    assert listed(group_harness) == []


def test_settings_of_several_groups_are_written_together(
    group_harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One write per group occupied the disk threads for half a minute, and no records
    were synced during this time.
    """
    written = []
    write = checkpoint.write
    monkeypatch.setattr(
        checkpoint,
        "write",
        lambda *args, **more: (written.append(args[2]), write(*args, **more)),
    )
    request = wire.INCREMENTAL_ALTER_CONFIGS.Request
    config = request.Resource.Config(
        name=SESSION_TIMEOUT, value="50000", config_operation=SET
    )
    wrong = request.Resource.Config(
        name=SESSION_TIMEOUT, value="5", config_operation=SET
    )
    asked = [
        request.Resource(
            resource_type=GROUP,
            resource_name=f"g{number}",
            configs=[wrong if number == 7 else config],
        )
        for number in range(300)
    ]
    responses = group_harness.ask(
        wire.INCREMENTAL_ALTER_CONFIGS, 1, resources=asked, validate_only=False
    ).responses
    assert [each.error_code for each in responses] == [
        codes.INVALID_CONFIG if number == 7 else 0 for number in range(300)
    ]
    assert len(listed(group_harness)) == 299 and written.count(checkpoint.GROUPS) == 1


def test_failed_write_fails_only_the_groups_of_the_request(
    group_harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageWriteError("the disk gives an error")

    assert group_harness.state.group_settings is not None
    monkeypatch.setattr(group_harness.state.group_settings, "write", refuse)
    request = wire.INCREMENTAL_ALTER_CONFIGS.Request
    group = request.Resource.Config(
        name=SESSION_TIMEOUT, value="50000", config_operation=SET
    )
    topic = request.Resource.Config(
        name="retention.ms", value="5000", config_operation=SET
    )
    asked = [
        request.Resource(resource_type=GROUP, resource_name="g", configs=[group]),
        request.Resource(resource_type=TOPIC, resource_name="orders", configs=[topic]),
    ]
    responses = group_harness.ask(
        wire.INCREMENTAL_ALTER_CONFIGS, 1, resources=asked, validate_only=False
    ).responses
    assert [each.error_code for each in responses] == [codes.KAFKA_STORAGE_ERROR, 0]
    assert group_harness.logdir.describe_topic("orders").overrides == {
        "retention.ms": "5000"
    }


def test_heartbeat_interval_is_shortened_to_fit_a_new_session_timeout(
    tmp_path: Path,
) -> None:
    """The interval was valid with the session timeout that the broker had before."""
    with GroupHarness(tmp_path / "data") as group_harness:
        group_harness.logdir.create_topic("orders")
        change(group_harness, "g", (HEARTBEAT_INTERVAL, "40000", SET))
    with GroupHarness(
        tmp_path / "data", group_consumer_session_timeout_ms=9_000
    ) as group_harness:
        assert heartbeat(group_harness, "g").heartbeat_interval_ms == 3_000


@pytest.mark.parametrize("group_harness", [True], indirect=True)
def test_group_settings_are_refused_in_a_shared_directory(
    group_harness: GroupHarness,
) -> None:
    code, message = change(group_harness, "g", (SESSION_TIMEOUT, "50000", SET))
    assert code == codes.INVALID_REQUEST and "shared" in message


# -- settings file --------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation", ["create", "pwrite", "fsync", "rename", "sync_dir"]
)
def test_failed_change_has_the_effect_that_is_on_disk(operation: str) -> None:
    disk = SimulatedDisk({"/d": None})
    settings = GroupSettings(disk, "/d")
    put(settings, "g", {SESSION_TIMEOUT: 50_000})
    disk.faults = FaultPlan(Fault(operation))
    with pytest.raises(StorageWriteError):
        put(settings, "g", {SESSION_TIMEOUT: 60_000})
    assert disk.faults.hits
    expected = 60_000 if operation == "sync_dir" else 50_000
    assert (
        settings.of("g")
        == {SESSION_TIMEOUT: expected}
        == GroupSettings(disk, "/d").of("g")
    )


def rows(*groups: Any) -> bytes:
    return checkpoint.pack_groups(groups)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no rows\n",
        rows({"group": "g", "config": {SESSION_TIMEOUT: 50_000}})[:-4],
        checkpoint.pack_topics([{"group": "g", "config": {}}]),
        rows({"config": {}}),
        rows(["g"]),
        rows({"group": "g", "config": [1]}),
        rows({"group": "g", "config": {"no.such": 5_000}}),
        rows({"group": "g", "config": {SESSION_TIMEOUT: "soon"}}),
        rows({"group": "g" * 5_000_000, "config": {}}),
        rows({"group": "g", "config": {}}, {"group": "g", "config": {}}),
    ],
)
def test_invalid_settings_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / checkpoint.GROUPS).write_bytes(content)
    with pytest.raises(CorruptLogError, match="settings"):
        GroupSettings(logcore.fs.OS, str(tmp_path))


def test_settings_file_is_copied_and_dumped(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t")
        settings = logdir.host.coordinators.group_settings(logdir)
        put(settings, "g\n", {SESSION_TIMEOUT: 50_000})
        logdir.snapshot(tmp_path / "backup")
    logcore.restore(tmp_path / "backup", tmp_path / "copy")
    assert [*dump(tmp_path / "copy" / checkpoint.GROUPS)] == [
        {"type": "group", "group": "g\n", "config": {SESSION_TIMEOUT: 50_000}}
    ]
    salvage(tmp_path / "data", tmp_path / "saved")
    for name in ("copy", "saved"):
        with logcore.open_dir(tmp_path / name) as logdir:
            assert logdir.host.coordinators.group_settings(logdir).of("g\n") == {
                SESSION_TIMEOUT: 50_000
            }


def test_settings_file_with_invalid_values_is_reported_and_not_copied(
    tmp_path: Path,
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t")
    (tmp_path / "data" / checkpoint.GROUPS).write_bytes(
        rows({"group": "g", "config": {SESSION_TIMEOUT: 5}})
    )
    (verdict,) = [
        each for each in verify(tmp_path / "data") if each.kind == checkpoint.GROUPS
    ]
    assert verdict.status == "damaged"
    report = salvage(tmp_path / "data", tmp_path / "saved")
    assert [Path(part.path).name for part in report.lost] == [checkpoint.GROUPS]
    assert not (tmp_path / "saved" / checkpoint.GROUPS).exists()


def test_number_of_groups_with_settings_is_limited() -> None:
    disk = SimulatedDisk({"/d": None})
    many = [
        {"group": str(number), "config": {SESSION_TIMEOUT: 50_000}}
        for number in range(10_000)
    ]
    checkpoint.write(disk, "/d", checkpoint.GROUPS, rows(*many))
    settings = GroupSettings(disk, "/d")
    with pytest.raises(InvalidConfigError, match="groups with settings"):
        put(settings, "one more", {SESSION_TIMEOUT: 50_000})
    put(settings, "7", {SESSION_TIMEOUT: None})
    put(settings, "one more", {SESSION_TIMEOUT: 50_000})
    assert len(GroupSettings(disk, "/d").names()) == 10_000
