"""Settings of a consumer: keywords, and configurations of Kafka clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.consumer.settings import consumer_settings, duration_ms
from logcore.errors import InvalidConfigError
from logcore.fs import OsFS
from logcore.logdir import LogDir
from logcore.metadata.filenames import INTERNAL_TOPICS


@pytest.fixture
def data(tmp_path: Path) -> Iterator[LogDir]:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as directory:
        directory.create_topic("t")
        yield directory


def test_configuration_uses_dotted_names_and_text_values() -> None:
    with pytest.warns(
        UserWarning, match=r"ignored: bootstrap.servers, fetch.min.bytes"
    ):
        settings = consumer_settings(
            {
                "bootstrap.servers": "localhost:9092",
                "fetch.min.bytes": 1,
                "group.id": "billing",
                "enable.auto.commit": "false",
                "max.poll.records": "50",
                "auto.offset.reset": "smallest",
                "partition.assignment.strategy": "org.apache.kafka.clients.consumer.RangeAssignor, roundrobin",
            },
            {"max_poll_records": 70},
        )
    assert (
        settings.group_id,
        settings.enable_auto_commit,
        settings.auto_offset_reset,
    ) == (
        "billing",
        False,
        "earliest",
    )
    assert [assignor.name for assignor in settings.assignors] == ["range", "roundrobin"]
    assert settings.max_poll_records == 70, "keywords take precedence"


def test_warning_contains_the_line_that_opened_the_consumer(data: LogDir) -> None:
    with pytest.warns(UserWarning, match="are ignored") as warned:
        data.consumer(config={"client.rack": "a", "group.id": "g"}).close()
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({"group.idd": "g"}, {}, r"unknown setting 'group.idd'.*group.id"),
        (
            {},
            {"max_pol_records": 1},
            r"unknown setting 'max_pol_records'.*max_poll_records",
        ),
        ({}, {"bootstrap_servers": "a"}, "needs a network"),
        ({"max.poll.records": "many"}, {}, "max_poll_records.*a whole number"),
        ({"enable.auto.commit": "no"}, {}, "enable_auto_commit.*true or false"),
        ({"partition.assignment.strategy": "com.acme.Mine"}, {}, "unknown assignor"),
        ({}, {"max_poll_records": True}, "max_poll_records"),
        ({}, {"enable_auto_commit": 1}, "enable_auto_commit.*True or False"),
        (
            {},
            {"exclude_internal_topics": "no"},
            "exclude_internal_topics.*True or False",
        ),
        ({}, {"consumer_timeout_ms": -1}, "consumer_timeout_ms"),
        ({}, {"heartbeat_interval_ms": 0}, "heartbeat_interval_ms"),
        (
            {},
            {"session_timeout_ms": 8_999},
            "a third of session_timeout_ms.*at most 2999.*3000",
        ),
        ({}, {"auto_offset_reset": "first"}, "auto_offset_reset.*by_duration"),
        ({}, {"auto_offset_reset": "by_duration"}, "auto_offset_reset.*by_duration"),
        ({}, {"auto_offset_reset": 5}, "auto_offset_reset.*by_duration"),
        ({}, {"auto_offset_reset": "by_duration:1h"}, "a duration.*PT1H.*'1h'"),
    ],
)
def test_invalid_setting_error_contains_the_setting(
    config: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        consumer_settings(config, settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PT1H", 3_600_000),
        ("P2DT30M", 174_600_000),
        ("PT0.25S", 250),
        ("P1D", 86_400_000),
        ("PT1M1S", 61_000),
    ],
)
def test_durations_use_the_format_of_java(text: str, expected: int) -> None:
    assert duration_ms(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "P", "PT", "P1DT", "PT1", "1H", "PT-1H", "PT1H ", "P9999999999D", "PT1S1M"],
)
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="a duration"):
        duration_ms(text)


@pytest.mark.parametrize(("age_ms", "expected"), [(3_600_000, 0), (2_000, 1), (500, 2)])
def test_reading_begins_at_the_given_age(
    data: LogDir, age_ms: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock does not advance. If all records are older, reading begins at the end."""
    now_ms = 1_790_000_000_000
    monkeypatch.setattr(OsFS, "now_ms", lambda _: now_ms)
    data.append("t", b"old", timestamp_ms=now_ms - 5_000)
    data.append("t", b"new", timestamp_ms=now_ms - 1_000)
    with data.consumer(auto_offset_reset=f"by_duration:PT{age_ms / 1000}S") as consumer:
        consumer.assign([("t", 0)])
        assert consumer.position(("t", 0)) == expected


def test_iteration_ends_after_consumer_timeout(data: LogDir) -> None:
    data.append("t", b"one")
    with data.consumer(auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        consumer.subscribe(["t"])
        assert [record.value for record in consumer] == [b"one"]
        data.append("t", b"two")
        assert [record.value for record in consumer] == [b"two"], (
            "another iteration continues"
        )


def test_pattern_excludes_internal_topics(data: LogDir) -> None:
    for name in sorted(INTERNAL_TOPICS):
        data.create_topic(name)
    with data.consumer() as consumer:
        consumer.subscribe(pattern=".*")
        assert consumer.subscription() == {"t"}
    with data.consumer(exclude_internal_topics=False) as consumer:
        consumer.subscribe(pattern=".*")
        assert consumer.subscription() == {"t", *INTERNAL_TOPICS}
