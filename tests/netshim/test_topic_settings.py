"""Topic settings are accepted and refused as by Kafka, whose verdicts are in
tests/data/kafka/topic_settings.json.

A setting that is accepted here and refused by Kafka is worse than the reverse: a test
passes here, and the same call fails in production.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import logcore
import netshim
from logcore import InvalidConfigError
from logcore.config import CONFIGS, LogConfig
from logcore.directory.topic_file import TopicEntry, write_topics
from logcore.fs import OS
from support import topic_settings

#: (setting, value) -> the reason for a verdict that differs from Kafka's.
SMALL = "tests roll small segments; Kafka accepted them until version 4"
DELIBERATE: dict[tuple[str, str], str] = {
    (
        "min.cleanable.dirty.ratio",
        "NaN",
    ): "Kafka's range check accepts it",
    ("min.cleanable.dirty.ratio", "0x1p-1"): "an unusual notation",
}
DELIBERATE |= {
    ("segment.bytes", value): SMALL
    for value in ("14", "15", "16", "17", "18", "21", "22", "23", "1048575")
}


def is_accepted(name: str, value: str) -> bool:
    try:
        LogConfig.parse({name: value})
    except InvalidConfigError:
        return False
    return True


@pytest.mark.parametrize("name", topic_settings.values_by_setting())
def test_each_value_of_a_setting_has_the_verdict_of_kafka(name: str) -> None:
    verdicts = topic_settings.load_verdicts()[name]
    assert list(verdicts) == topic_settings.values_by_setting()[name], (
        "make interop asks Kafka again"
    )
    differing = {
        (name, value)
        for value, taken in verdicts.items()
        if is_accepted(name, value) != taken
    }
    assert differing == {key for key in DELIBERATE if key[0] == name}


def test_create_topics_has_the_verdicts_of_kafka(tmp_path: Path) -> None:
    with netshim.serve(tmp_path / "data") as server:
        answers = topic_settings.query_broker(server.port)
    stored = topic_settings.load_verdicts()
    differing = {
        (name, value)
        for name, each in answers.items()
        for value in each
        if each[value] != stored[name][value]
    }
    assert differing == {*DELIBERATE}


def test_topics_with_settings_of_older_versions_can_be_opened(tmp_path: Path) -> None:
    """Kafka accepted `message.downconversion.enable` until version 4 removed it."""
    with logcore.open_dir(tmp_path, create=True) as directory:
        directory.create_topic("t")
    overrides = {"message.downconversion.enable": "false", "retention.ms": "5"}
    write_topics(OS, str(tmp_path), [TopicEntry("t", count=1, overrides=overrides)])
    with logcore.open_dir(tmp_path) as directory:
        assert directory.describe_topic("t").overrides == {"retention.ms": "5"}


def test_topic_without_a_cleanup_policy_keeps_all_records(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path, create=True) as directory:
        directory.create_topic(
            "t",
            config={"cleanup.policy": "", "retention.ms": 1, "segment.index.bytes": 4},
        )
        log = directory.partition("t", 0)
        for number in range(3):
            log.append(b"v", timestamp_ms=number)
            log.roll()
        directory.tick(10**12)
        assert [record.offset for record in log.read(0)] == [0, 1, 2]


def test_all_settings_of_kafka_are_known() -> None:
    known = {
        name
        for name, verdicts in topic_settings.load_verdicts().items()
        if any(verdicts.values())
    }
    assert known == {
        name
        for name, field in CONFIGS.items()
        if not field.metadata.get("is_extension")
    }
