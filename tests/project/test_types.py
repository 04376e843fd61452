"""Programs that use logcore pass strict type checkers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.environments import ROOT

#: Mappings that the API returns are accepted by its other methods.
PROGRAM = """\
import logcore
from logcore import aio
from logcore.consumer import TopicPartition


def synchronous(data: logcore.LogDir) -> None:
    by_topic_partition: dict[TopicPartition, int] = {TopicPartition("t", 0): 3}
    by_pair: dict[tuple[str, int], int] = {("t", 0): 3}
    with data.consumer(group_id="g") as consumer:
        consumer.commit(by_topic_partition)
        consumer.commit(by_pair)
        consumer.commit({("t", 0): 3})
        consumer.commit_async(by_topic_partition)
        consumer.commit_async(by_pair)
        consumer.commit(consumer.end_offsets([("t", 0)]))
        consumer.offsets_for_times(by_topic_partition)
        with data.producer(transactional_id="x") as producer:
            producer.send_offsets_to_transaction(by_topic_partition, consumer.group_metadata())
            producer.send_offsets_to_transaction(by_pair, "g")


async def asynchronous(data: aio.LogDir) -> None:
    by_topic_partition: dict[TopicPartition, int] = {TopicPartition("t", 0): 3}
    async with data.consumer(group_id="g") as consumer:
        await consumer.commit(by_topic_partition)
        await consumer.commit(await consumer.end_offsets([("t", 0)]))
        consumer.commit_async(by_topic_partition)
        async with data.producer(transactional_id="x") as producer:
            await producer.send_offsets_to_transaction(by_topic_partition, "g")
"""


@pytest.mark.slow
@pytest.mark.parametrize("checker", [["mypy", "--strict"], ["pyright"]])
def test_mappings_by_partition_are_accepted(tmp_path: Path, checker: list[str]) -> None:
    pytest.importorskip(checker[0])
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "-m", *checker, str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
