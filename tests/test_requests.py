"""What each request is answered, by tables: a broker without sockets, asked one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from netshim import wire
from netshim.broker import Broker
from netshim.state import Answer, Settings
from netshim.wire import codes


class Bench:
    """A broker and what it has been asked. What is submitted waits until it is told to run(), or is done at once."""

    def __init__(self, path: Path, *, at_once: bool = True, durability: str = "os", **settings: Any) -> None:
        self.logdir = logcore.open_dir(path, create=True, durability=durability)
        self.now_ms = 1_000_000
        self.at_once = at_once
        self.submitted: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.broker = Broker(self.logdir, Settings(**settings), self._submit)
        self._handle = self.broker.handler("127.0.0.1", 9092, "127.0.0.1")

    def _submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.submitted.append((work, done))
        if self.at_once:
            self.run()

    def run(self) -> None:
        while self.submitted:
            work, done = self.submitted.pop(0)
            try:
                result = work()
            except Exception as error:
                result = error
            done(result)

    def send(self, api: Any, version: int, request: Any, client_id: str = "test") -> Any:
        """The pieces of the response, or the Answer that will hold them."""
        frame = wire.encode_request(api, version, 1, client_id, request)
        return self._handle(memoryview(frame)[4:], self.now_ms)

    def ask(self, api: Any, version: int, request: Any, client_id: str = "test") -> Any:
        """The response; what it waits for has to be there."""
        return self.read(api, version, self.send(api, version, request, client_id))

    @staticmethod
    def read(api: Any, version: int, reply: Any) -> Any:
        if isinstance(reply, Answer):
            assert reply.is_set, "the answer waits"
            reply = reply.value
        return wire.decode_response(api, version, b"".join(reply)[4:])[1]

    def fetch(self, offset: int, topic: str = "t", version: int = 12, **more: Any) -> Any:
        request = wire.FETCH.Request
        part = request.Topic.Partition(partition=0, fetch_offset=offset, partition_max_bytes=1 << 20, **more)
        answer = self.ask(wire.FETCH, version, request(topics=[request.Topic(topic=topic, partitions=[part])]))
        return answer.responses[0].partitions[0]

    def epochs(self, topic: str = "t") -> set[int]:
        """The leader epochs that the partition is told to have; how a client that knows one of them gets on."""
        metadata = wire.METADATA.Request
        told = self.ask(wire.METADATA, 9, metadata(topics=[metadata.Topic(name=topic)])).topics[0].partitions[0]
        epoch = told.leader_epoch
        assert self.fetch(0, topic, current_leader_epoch=epoch).error_code == 0
        offsets = wire.LIST_OFFSETS.Request
        part = offsets.Topic.Partition(partition_index=0, timestamp=-1, current_leader_epoch=epoch)
        body = offsets(topics=[offsets.Topic(name=topic, partitions=[part])])
        listed = self.ask(wire.LIST_OFFSETS, 5, body).topics[0].partitions[0]
        ends = wire.OFFSET_FOR_LEADER_EPOCH.Request
        one = ends.Topic.Partition(partition=0, leader_epoch=epoch, current_leader_epoch=epoch)
        body = ends(topics=[ends.Topic(topic=topic, partitions=[one])])
        ended = self.ask(wire.OFFSET_FOR_LEADER_EPOCH, 4, body).topics[0].partitions[0]
        assert (listed.error_code, ended.error_code) == (0, 0)
        assert (listed.offset, ended.end_offset) == (self.logdir.partition(topic, 0).log_end_offset,) * 2
        return {epoch, listed.leader_epoch, ended.leader_epoch}

    def close(self) -> None:
        self.broker.stop(self.now_ms)
        self.run()
        self.logdir.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "data")
    yield made
    made.close()


# -- leader epochs -------------------------------------------------------------------------------------------------


def _cut(log: Any) -> None:
    log.append(b"lost")
    log.truncate(1)


EPOCHS: dict[str, Callable[[Any], object]] = {
    "begins at the end": lambda log: None,
    "the second without records": lambda log: log.begin_epoch(6),
    "begins above what a truncation left": _cut,
}


@pytest.mark.parametrize("case", EPOCHS)
@pytest.mark.parametrize("records", [0, 3])
def test_every_api_tells_the_leader_epoch_that_clients_were_told_before(
    tmp_path: Path, case: str, records: int
) -> None:
    """Clients believe no smaller epoch than they know: one that fell shut them out for as long as they lived."""
    if "truncation" in case and not records:
        records = 2
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as logdir:
        logdir.create_topic("t")
        log = logdir.partition("t", 0)
        if records:
            log.append_many([(None, b"v")] * records)
        log.begin_epoch(4)
        EPOCHS[case](log)
        known = log.leader_epoch
        assert known >= 4
    for _ in range(2):
        bench = Bench(path)
        assert bench.logdir.leader_epoch("t", 0) == known, "before the log is opened"
        assert bench.epochs() == {known}
        bench.logdir.partition("t", 0).begin_epoch(known + 1)
        known += 1
        assert bench.epochs() == {known}
        bench.logdir.partition("t", 0).close()
        assert bench.logdir.leader_epoch("t", 0) == known, "when it is closed again"
        assert bench.epochs() == {known}
        bench.logdir.partition("t", 0).append(b"v")
        bench.close()


@pytest.mark.parametrize(
    ("offset", "last_epoch", "expected"),
    [
        (3, 0, "records"),
        (5, 0, "records"),
        (6, 0, (0, 5)),  # epoch 0 ended before that
        (3, 1, (0, 5)),  # there are no records of epoch 1
        (5, 1, (0, 5)),
        (7, 2, "records"),
        (10, 2, "nothing"),
        (11, 2, (2, 10)),
        (3, 3, codes.OFFSET_OUT_OF_RANGE),  # an epoch that this log has not come to
        (11, 3, codes.OFFSET_OUT_OF_RANGE),
        (1, 0, codes.OFFSET_OUT_OF_RANGE),  # below the log start
        (1, 1, codes.OFFSET_OUT_OF_RANGE),
        (11, -1, codes.OFFSET_OUT_OF_RANGE),
        (3, -1, "records"),
    ],
)
def test_a_fetch_with_the_epoch_of_its_last_record_is_told_where_they_diverge(
    bench: Bench, offset: int, last_epoch: int, expected: Any
) -> None:
    """Kafka's rule, with epochs 0 at [0, 5) and 2 at [5, 10), the log start at 2."""
    bench.logdir.create_topic("t")
    log = bench.logdir.partition("t", 0)
    log.append_many([(None, b"v")] * 5)
    log.begin_epoch(2)
    log.append_many([(None, b"v")] * 5)
    log.delete_records(2)
    found = bench.fetch(offset, last_fetched_epoch=last_epoch)
    diverging = (found.diverging_epoch.epoch, found.diverging_epoch.end_offset)
    if isinstance(expected, int):
        assert (found.error_code, diverging, found.records) == (expected, (-1, -1), b"")
        assert found.high_watermark == -1
        return
    assert found.error_code == 0 and found.high_watermark == 10
    assert diverging == (expected if isinstance(expected, tuple) else (-1, -1))
    assert bool(found.records) == (expected == "records")
