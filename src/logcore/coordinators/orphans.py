"""Finds open transactions and used producer ids in the logs of a directory.

A coordinator that starts without stored state uses them. It ends transactions that an
earlier process left open, and allocates no producer id twice.
"""

from __future__ import annotations

import contextlib
from typing import Final, Protocol

from logcore.coordinators.stored_transactions import stored_transactions
from logcore.errors import LogcoreError
from logcore.format.transaction_records import Partition
from logcore.log import Log
from logcore.metadata.filenames import TRANSACTIONS_TOPIC
from logcore.partition.coordinator_append import producers_of
from logcore.reporting import WARNING, log_line

_UNKNOWN_PRODUCERS: Final = (
    "%s-%d cannot be read: a new producer may get the id of an earlier producer: %s"
)
#: A producer id at or above this was chosen by a client: allocated ids count up from 0.
_INVENTED_IDS: Final = 1 << 62


class Partitions(Protocol):
    """The methods of a LogDir that find_orphans() and first_free_producer_id() use."""

    def topics(self) -> list[str]: ...
    def partitions(self, name: str) -> tuple[int, ...]: ...
    def partition(self, topic: str, number: int) -> Log: ...


def find_orphans(directory: Partitions) -> dict[Partition, list[tuple[int, int]]]:
    """Return the producer id and epoch of each open transaction, by (topic, partition).

    Opens all logs. A log that cannot be read is skipped, because its readers get the
    error.
    """
    found: dict[Partition, list[tuple[int, int]]] = {}
    for topic in directory.topics():
        for number in directory.partitions(topic):
            with contextlib.suppress(LogcoreError, OSError):
                log = directory.partition(topic, number)
                # The producers of a log are read only if a transaction is open in it.
                if log.last_stable_offset == log.log_end_offset:
                    continue
                facts = producers_of(log.host.writer)
                found[topic, number] = [
                    (each.producer_id, each.epoch)
                    for each in facts
                    if each.open_offset >= 0
                ]
    return found


def first_free_producer_id(directory: Partitions) -> int:
    """Return the first number above all producer ids of transactions and logs.

    Opens all logs. Logs that cannot be read are skipped with a warning, because the ids of
    their producers may be allocated a second time.
    """
    found = {-1}
    for topic in directory.topics():
        for number in directory.partitions(topic):
            try:
                found.update(
                    each.producer_id
                    for each in producers_of(
                        directory.partition(topic, number).host.writer
                    )
                )
            except (LogcoreError, OSError) as error:
                log_line("producer", WARNING, _UNKNOWN_PRODUCERS, topic, number, error)
    if TRANSACTIONS_TOPIC in directory.topics():
        try:
            logs = [
                directory.partition(TRANSACTIONS_TOPIC, n)
                for n in directory.partitions(TRANSACTIONS_TOPIC)
            ]
            for stored in stored_transactions(logs).values():
                # The ids before and after a change of the producer id are in use too.
                found |= {
                    stored.producer_id,
                    stored.previous_producer_id,
                    stored.next_producer_id,
                }
        except (LogcoreError, OSError) as error:
            log_line(
                "producer", WARNING, _UNKNOWN_PRODUCERS, TRANSACTIONS_TOPIC, 0, error
            )
    return 1 + max(each for each in found if each < _INVENTED_IDS)
