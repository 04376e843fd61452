"""The data source `slowcore`: logcore with a pause at each step at which a kill is
tested.

If LOGCORE_TEST_STEPS contains a file `wanted.<topic>.<step>`, the source reports the
step by creating `<topic>.<step>.<pid>`. It continues when that file is removed, or
after 1.5 seconds.

| step | |
|---|---|
| task | a task has staged its rows, and has not reported them |
| staged | all tasks have staged their rows; the commit begins |
| manifest | the manifest is published; none of its rows is in the log |
| done | the log has the batch; Spark has not recorded the commit |
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from pyspark_logcore import staged
from pyspark_logcore.source import LogcoreDataSource
from pyspark_logcore.stream_writer import LogcoreStreamWriter
from pyspark_logcore.writer import LogcoreWriter

STEPS = ("task", "staged", "manifest", "done")
_SECONDS = 1.5


def pause_at(topic: str, step: str) -> None:
    steps = os.environ["LOGCORE_TEST_STEPS"]
    if not os.path.exists(os.path.join(steps, f"wanted.{topic}.{step}")):
        return
    mine = os.path.join(steps, f"{topic}.{step}.{os.getpid()}")
    with open(mine, "w"):
        pass
    deadline = time.monotonic() + _SECONDS
    while os.path.exists(mine) and time.monotonic() < deadline:
        time.sleep(0.005)


class SlowStreamWriter(LogcoreStreamWriter):
    def write(self, iterator: Iterator[Any]) -> Any:
        message = super().write(iterator)
        pause_at(str(self.planned.options.topic), "task")
        return message

    def commit(self, messages: list[Any], batchId: int) -> None:
        commit_with_pauses(
            self.planned,
            lambda: super(SlowStreamWriter, self).commit(messages, batchId),
        )


class SlowWriter(LogcoreWriter):
    def write(self, iterator: Iterator[Any]) -> Any:
        message = super().write(iterator)
        pause_at(str(self.planned.options.topic), "task")
        return message

    def commit(self, messages: list[Any]) -> None:
        commit_with_pauses(
            self.planned, lambda: super(SlowWriter, self).commit(messages)
        )


def commit_with_pauses(planned: staged.StagedWrite, commit: Any) -> None:
    topic = str(planned.options.topic)
    pause_at(topic, "staged")
    carry_out = staged.carry_out

    def carry_out_after_pause(*args: Any) -> None:
        pause_at(topic, "manifest")
        carry_out(*args)

    staged.carry_out = carry_out_after_pause
    try:
        commit()
    finally:
        staged.carry_out = carry_out
    pause_at(topic, "done")


class SlowDataSource(LogcoreDataSource):
    @classmethod
    def name(cls) -> str:
        return "slowcore"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return SlowStreamWriter.of(self.options, schema)

    def writer(self, schema: Any, overwrite: bool) -> Any:
        return SlowWriter.of(self.options, schema, overwrite)
