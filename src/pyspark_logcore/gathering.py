"""Gathers the files that write_local() left on many disks into one log directory.

Rules:
- A batch of a job is one write: all of its tasks appear at once, or none. It is named
  by job, topics and batch. The state of that name beside the directory records which
  batches are done. A repeated gather, or one that was killed at any step, therefore
  adds nothing twice and loses nothing.
- The batches of a job are gathered in their order. Only the last completed one is
  recorded, so a batch that arrives after a later one would be skipped.
- Segments are copied unchanged, and their bytes are compared with the checksums of
  their tasks. No record is decoded.

This module moves no files; logcore.staging does. It uses only paths that this machine
can access.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import attrs

import logcore
from logcore.errors import (
    CorruptLogError,
    InvalidConfigError,
    LogcoreError,
    LogNotFoundError,
)
from logcore.fs import FS, OS
from logcore.metadata.filenames import check_topic_name, partition_name
from logcore.staging.manifest import Carried, Manifest, StagedFile, read_state
from logcore.staging.publishing import Staging
from logcore.staging.shipping import Shipment
from pyspark_logcore.local import (
    TaskReport,
    WriteReceipt,
    checksum_of,
    read_report,
    remove_directory,
)
from pyspark_logcore.staged import carry_out

#: Depth of the directories of tasks below a given path:
#: <path>/<job>@<batch>/<topic>/<task>.
_MAX_DEPTH: Final = 3


class MissingReceiptsError(LogcoreError):
    """The input of gather() lacks part of a batch, or mixes two runs."""


@attrs.frozen(kw_only=True)
class GatherResult:
    """The result for one batch. `is_new` is False if an earlier gather had added it."""

    job: str
    batch: int
    topic: str
    records: int
    bytes: int
    is_new: bool


def gather(
    receipts: Any,
    into: str,
    *,
    topic: str | None = None,
    tasks: int | None = None,
    located: Callable[[WriteReceipt], str] | None = None,
    remove: bool = False,
    publish_timeout: float = 60.0,
) -> list[GatherResult]:
    """Gather the files of write_local() into a log directory, each batch once and
    whole.

    Args:
        receipts: The DataFrame that write_local() returned, or its rows, of one or more
            batches. Or paths, each of which is the directory of a task or is above such
            directories.
        topic: The topic for the records, by default the topic to which they were
            written. A missing topic is created.
        tasks: With paths, the number of tasks of each write, because directories do not
            show that one is missing.
        located: Returns the path of a receipt's directory on this machine, by default
            the path in the receipt.
        remove: Remove the directories of tasks once their records are in place.
        publish_timeout: Seconds to wait for the process that holds `into`.

    Returns the result for each batch, in order. A gather may be repeated.

    Raises:
        MissingReceiptsError: A batch is not complete.
        LogNotFoundError: A directory cannot be found here. The error names host and
            path.
        CorruptLogError: A directory differs from the one that its task wrote.
        LogcoreError: The errors of a batch write.
    """
    return Gathering(OS, into, topic, located, publish_timeout).run(
        receipts, tasks, remove
    )


@attrs.frozen
class _Batch:
    """All receipts of one batch of one topic, in the order of tasks and partitions."""

    job: str
    number: int
    topic: str
    receipts: list[WriteReceipt]

    @property
    def records(self) -> int:
        return sum(receipt.records for receipt in self.receipts)


@attrs.frozen
class Gathering:
    """Steps of gather()."""

    fs: FS
    into: str
    topic: str | None
    located: Callable[[WriteReceipt], str] | None
    publish_timeout: float

    def run(
        self, given: Any, tasks: int | None = None, remove: bool = False
    ) -> list[GatherResult]:
        batches = _batches_of(list(self._receipts(given, tasks)))
        if self.topic is not None:
            check_topic_name(self.topic)
        if not self.fs.is_directory(self.into):
            with logcore.open_dir(self.into, create=True, fs=self.fs):
                pass
        done = []
        for batch in batches:
            done.append(self._gather(batch))
            if remove:
                for receipt in batch.receipts:
                    self._remove(receipt)
        return done

    def _receipts(self, given: Any, tasks: int | None) -> Iterator[WriteReceipt]:
        if isinstance(given, str | os.PathLike):
            given = [given]
        if hasattr(given, "collect"):
            rows = given.collect()
        else:
            rows = given
        for row in rows:
            if isinstance(row, str | os.PathLike):
                if tasks is None:
                    raise InvalidConfigError(
                        "with paths, give tasks: missing directories cannot be detected otherwise"
                    )
                yield from self._found(
                    os.path.abspath(os.fspath(row)), tasks, _MAX_DEPTH
                )
            elif isinstance(row, WriteReceipt):
                yield row
            else:
                if hasattr(row, "asDict"):
                    facts = row.asDict()
                else:
                    facts = dict(row)
                yield WriteReceipt(
                    **{
                        field.name: facts[field.name]
                        for field in attrs.fields(WriteReceipt)
                    }
                )

    def _found(self, path: str, tasks: int, depth: int) -> Iterator[WriteReceipt]:
        """Return the receipts of the directories of tasks in a path.

        At least one directory must exist.
        """
        report = read_report(self.fs, path)
        if report is not None:
            yield from report.receipts(path, tasks)
            return
        found = False
        if depth and self.fs.is_directory(path):
            for name in sorted(self.fs.listdir(path)):
                child = os.path.join(path, name)
                # The name of an unfinished directory is not a plain number.
                if self.fs.is_directory(child) and (depth > 1 or name.isdecimal()):
                    for receipt in self._found(child, tasks, depth - 1):
                        found = True
                        yield receipt
        if not found and depth == _MAX_DEPTH:
            raise LogNotFoundError(
                f"this directory contains no files of write_local(), as {os.uname().nodename} sees it",
                path=path,
            )

    def _gather(self, batch: _Batch) -> GatherResult:
        staging = Staging(self.fs, self.into)
        topic = self.topic or batch.topic
        app_id = f"write_local {batch.job} {batch.topic} {topic}"
        size = sum(receipt.bytes for receipt in batch.receipts)
        outcome = GatherResult(
            job=batch.job,
            batch=batch.number,
            topic=topic,
            records=batch.records,
            bytes=size,
            is_new=True,
        )
        if staging.is_done(app_id, batch.number):
            return attrs.evolve(outcome, is_new=False)
        state = read_state(self.fs, staging.path, app_id)
        expected = 0
        if state is not None:
            expected = state["version"] + 1
        if batch.number != expected:
            raise MissingReceiptsError(
                f"the batches of job {batch.job!r} are gathered in their order, and one before this is missing; give "
                "its receipts too",
                path=self.into,
                expected=f"batch {expected}",
                found=f"batch {batch.number}",
            )
        txid = uuid.uuid4().hex
        staging.begin(txid)
        try:
            files, partitions = self._stage(staging, batch, topic, txid)
            manifest = Manifest(
                app_id=app_id,
                version=batch.number,
                txid=txid,
                files=files,
                topics=self._new_topic(topic, partitions) if files else {},
                query=None,
            )
            try:
                staging.publish(manifest)
            except BaseException:
                # The name may exist; the write must not run after this failure.
                staging.withdraw(app_id, batch.number, txid)
                raise
            carry_out(
                self.fs, staging, app_id, batch.number, txid, self.publish_timeout
            )
        except BaseException:
            staging.abort(app_id, batch.number, txid)
            raise
        return outcome

    def _new_topic(self, topic: str, partitions: int) -> dict[str, int]:
        """Return the topic to create, with its partitions; {} if it exists.

        Raises:
            InvalidConfigError: The topic has fewer partitions than the batch.
        """
        with logcore.open_dir(self.into, read_only=True, fs=self.fs) as directory:
            if topic not in directory:
                return {topic: partitions}
            existing = len(directory.partitions(topic))
        if existing < partitions:
            raise InvalidConfigError(
                f"topic {topic!r} has fewer partitions than the gathered batch",
                path=self.into,
                expected=f"at least {partitions}",
                found=existing,
            )
        return {}

    def _stage(
        self, staging: Staging, batch: _Batch, topic: str, txid: str
    ) -> tuple[list[StagedFile], int]:
        """Copy the segments of a batch.

        Returns the staged files in the order of tasks, and the number of partitions.
        """
        needs_keys = self._needs_keys(topic)
        shipment = Shipment(self.fs, self.into, txid)
        shipped: list[StagedFile | Carried] = []
        partitions = 1
        for receipt in batch.receipts:
            if not receipt.records:
                continue
            path, report = self._report_of(receipt)
            if needs_keys and not report.is_compacted:
                raise InvalidConfigError(
                    f"topic {topic!r} is compacted, so that each record needs a key, which was not asked of these; "
                    "write_local() takes config={'cleanup.policy': 'compact'}",
                    path=path,
                )
            where = os.path.join(path, partition_name(receipt.topic, receipt.partition))
            shipped += shipment.add(
                where,
                report.partitions[receipt.partition],
                topic,
                receipt.partition,
                str(receipt.task),
            )
            partitions = max(partitions, len(report.partitions))
        shipment.close()
        stored = iter(
            staging.store(
                txid, [carried for carried in shipped if isinstance(carried, Carried)]
            )
        )
        return [
            next(stored) if isinstance(staged_file, Carried) else staged_file
            for staged_file in shipped
        ], partitions

    def _needs_keys(self, topic: str) -> bool:
        with logcore.open_dir(self.into, read_only=True, fs=self.fs) as directory:
            return (
                topic in directory
                and directory.describe_topic(topic).config.is_compacted
            )

    def _report_of(self, receipt: WriteReceipt) -> tuple[str, TaskReport]:
        """Return the local directory of a receipt, and its metadata.

        They must agree.
        """
        if self.located is None:
            path = receipt.path
        else:
            path = self.located(receipt)
        report = None
        if self.fs.is_directory(path):
            report = read_report(self.fs, path)
        if report is None:
            raise LogNotFoundError(
                f"the machine {os.uname().nodename} does not see what task {receipt.task} wrote on {receipt.host} at "
                f"{receipt.path}; copy that directory here, and pass its path in located",
                path=path,
            )
        if (report.job, report.batch, report.topic, report.task) != (
            receipt.job,
            receipt.batch,
            receipt.topic,
            receipt.task,
        ):
            raise CorruptLogError(
                "another task's directory is here",
                path=path,
                expected=f"task {receipt.task} of batch {receipt.batch} of job {receipt.job!r}",
                found=f"task {report.task} of batch {report.batch} of job {report.job!r}",
            )
        if report.run != receipt.run:
            raise MissingReceiptsError(
                f"batch {receipt.batch} of job {receipt.job!r} was written again since;"
                " gather with the receipts of that run",
                path=path,
                expected=f"run {receipt.run}",
                found=f"run {report.run}",
            )
        sealed = report.partitions.get(receipt.partition, ())
        if (
            checksum_of(sealed) != receipt.checksum
            or sum(piece.count for piece in sealed) != receipt.records
        ):
            raise CorruptLogError(
                "a receipt differs from the report in its directory", path=path
            )
        return path, report

    def _remove(self, receipt: WriteReceipt) -> None:
        """Remove the directory of a task, if it still belongs to that run."""
        if self.located is None:
            path = receipt.path
        else:
            path = self.located(receipt)
        if receipt.path and self.fs.is_directory(path):
            report = read_report(self.fs, path)
            if report is not None and report.run == receipt.run:
                remove_directory(self.fs, path)


def _batches_of(receipts: Iterable[WriteReceipt]) -> list[_Batch]:
    """Return receipts by batch. Each batch must be whole and of one run.

    Raises:
        MissingReceiptsError: A batch is incomplete, or mixes two runs.
    """
    found: dict[tuple[str, str, int], dict[tuple[int, int], WriteReceipt]] = {}
    paths: dict[tuple[str, str, int, str, int], str] = {}
    for receipt in receipts:
        # Paths may hold the output of two attempts of a task on two machines. Each is
        # whole, so one of them is used.
        if (
            paths.setdefault(
                (receipt.job, receipt.topic, receipt.batch, receipt.run, receipt.task),
                receipt.path,
            )
            != receipt.path
        ):
            continue
        mine = found.setdefault((receipt.job, receipt.topic, receipt.batch), {})
        before = mine.setdefault((receipt.task, receipt.partition), receipt)
        if before.run != receipt.run:
            raise MissingReceiptsError(
                f"batch {receipt.batch} of job {receipt.job!r} has receipts of two runs; pass the receipts of one run",
                path=receipt.path,
                expected=f"run {before.run}",
                found=f"run {receipt.run}",
            )
    batches = []
    for (job, topic, number), mine in sorted(found.items()):
        ordered = [receipt for _, receipt in sorted(mine.items())]
        numbers = {receipt.task for receipt in ordered}
        wanted = {receipt.tasks for receipt in ordered}
        runs = {receipt.run for receipt in ordered}
        if len(runs) > 1 or len(wanted) > 1 or numbers != set(range(wanted.pop())):
            raise MissingReceiptsError(
                f"these are not the receipts of all tasks of one run of batch {number} of job {job!r}",
                path=ordered[0].path,
                expected=f"{ordered[0].tasks} tasks of one run",
                found=f"tasks {sorted(numbers)} of {len(runs)} runs",
            )
        batches.append(_Batch(job, number, topic, ordered))
    return batches
