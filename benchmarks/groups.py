"""What do groups of the consumer protocol (KIP-848) cost the broker?

Method: a broker without sockets over a directory under policy os. Requests are bytes,
from the frame of the request to the frame of the response. CPU time of this process,
without the time for building the requests.
- A heartbeat without changes, in a group of 1,000 members and 1,000 partitions; the best
  of several rounds.
- 100 members join a topic of 100 partitions, and send heartbeats until each has its
  partition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
from common import Result, Settings

import logcore
from netshim import wire
from netshim.broker import Broker
from netshim.scheduling import PendingResponse
from netshim.session import ClientSession
from netshim.settings import Settings as BrokerSettings

HEARTBEAT = wire.CONSUMER_GROUP_HEARTBEAT
#: From the broker reference, section 11.
HEARTBEAT_TARGET_US = 100.0
FORMING_TARGET_S = 1.0


def run(settings: Settings) -> Iterator[Result]:
    with common.scratch(settings, "groups") as path:
        yield heartbeat(
            path / "heartbeat",
            200 if settings.quick else 1_000,
            3 if settings.quick else 7,
        )
        yield forming(path / "forming")


class Group:
    """The members of one group, which send heartbeats as clients do.

    `seconds` is the CPU time in the broker.
    """

    def __init__(self, logdir: logcore.LogDir, members: int) -> None:
        logdir.create_topic("t", members)
        self.broker = Broker(logdir, BrokerSettings(), at_once)
        self.session = ClientSession("127.0.0.1", 9092, "127.0.0.1")
        self.topic_id = logdir.topic_id("t").bytes
        self.epochs = {f"member-{number:04}": 0 for number in range(members)}
        self.owned: dict[str, list[int]] = {name: [] for name in self.epochs}
        self.seconds = 0.0

    def heartbeat(self, name: str, **fields: Any) -> Any:
        request = HEARTBEAT.Request(
            group_id="g", member_id=name, member_epoch=self.epochs[name], **fields
        )
        frame = memoryview(wire.encode_request(HEARTBEAT, 1, 1, "bench", request))[4:]
        started = time.process_time()
        reply = self.broker.handle(self.session, frame, common.NOW_MS)
        self.seconds += time.process_time() - started
        pieces = reply.value if isinstance(reply, PendingResponse) else reply
        answer = wire.decode_response(HEARTBEAT, 1, b"".join(pieces)[4:])[1]
        assert not answer.error_code, answer
        self.epochs[name] = answer.member_epoch
        if answer.assignment is not None:
            topics = answer.assignment.topic_partitions
            self.owned[name] = [
                number for topic in topics for number in topic.partitions
            ]
        return answer

    def form(self) -> None:
        for name in self.epochs:
            self.heartbeat(
                name,
                rebalance_timeout_ms=60_000,
                subscribed_topic_names=["t"],
                topic_partitions=[],
            )
        while any(len(numbers) != 1 for numbers in self.owned.values()):
            for name, numbers in self.owned.items():
                topic = HEARTBEAT.Request.Topic(
                    topic_id=self.topic_id, partitions=numbers
                )
                self.heartbeat(name, topic_partitions=[topic] if numbers else [])


def at_once(work: Callable[[], Any], done: Callable[[Any], None]) -> None:
    try:
        result = work()
    except Exception as error:
        result = error
    done(result)


def heartbeat(path: Path, members: int, rounds: int) -> Result:
    with logcore.open_dir(path, create=True, durability="os") as logdir:
        group = Group(logdir, members)
        group.form()
        best = float("inf")
        for _ in range(rounds):
            group.seconds = 0.0
            for name in group.epochs:
                group.heartbeat(name)
            best = min(best, group.seconds / members * 1e6)
    question = f"a heartbeat in a group of {members:,} members"
    method = "CPU of the broker, from the request's bytes to the answer's."
    return common.in_time(question, "us", best, HEARTBEAT_TARGET_US, method)


def forming(path: Path) -> Result:
    with logcore.open_dir(path, create=True, durability="os") as logdir:
        group = Group(logdir, 100)
        group.form()
    question = "100 members form a group of the consumer protocol"
    method = "CPU of the broker until each member has its partition of 100."
    return common.in_time(question, "s", group.seconds, FORMING_TARGET_S, method)
