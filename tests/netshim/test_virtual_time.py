"""A whole broker with its directory on a simulated disk, whose clock the test moves:
days pass in a second.

The sockets and the event loop are real, on loopback. Time is not: sessions, retention,
rolls and the expiry of offsets use only the clock of the disk.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import netshim
from logcore.recordbatch import encode
from logcore.testing import SimulatedDisk
from netshim import wire
from netshim.wire import codes

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
SESSION_MS = 15 * MINUTE_MS
NO_TIMEOUT_MS = 2**31 - 1


class Client:
    """One connection that sends a request and reads its response."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, server: netshim.Server) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", server.port))

    async def ask(self, api: Any, version: int, **fields: Any) -> Any:
        self.writer.write(
            wire.encode_request(api, version, 1, "me", api.Request(**fields))
        )
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        return wire.decode_response(api, version, await self.reader.readexactly(size))[
            1
        ]

    async def produce(self, timestamp_ms: int) -> int:
        topic_type = wire.PRODUCE.Request.Topic
        part = topic_type.Partition(
            index=0, records=encode([(b"k", bytes(500), (), timestamp_ms)])
        )
        topic = topic_type(name="orders", partition_data=[part])
        response = await self.ask(
            wire.PRODUCE, 9, acks=-1, timeout_ms=1_000, topic_data=[topic]
        )
        (result,) = response.responses[0].partition_responses
        assert result.error_code == 0
        return int(result.base_offset)

    async def earliest(self) -> int:
        topic_type = wire.LIST_OFFSETS.Request.Topic
        part = topic_type.Partition(
            partition_index=0, timestamp=-2, current_leader_epoch=-1
        )
        response = await self.ask(
            wire.LIST_OFFSETS, 5, topics=[topic_type(name="orders", partitions=[part])]
        )
        return int(response.topics[0].partitions[0].offset)

    async def join(self, member_id: str = "") -> Any:
        protocol = wire.JOIN_GROUP.Request.Protocol(name="range", metadata=b"")
        return await self.ask(
            wire.JOIN_GROUP,
            3,
            group_id="g",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=SESSION_MS,
            member_id=member_id,
            protocol_type="consumer",
            protocols=[protocol],
        )

    async def sync(self, joined: Any) -> int:
        assignment_type = wire.SYNC_GROUP.Request.Assignment
        assignments = [
            assignment_type(member_id=member.member_id, assignment=b"")
            for member in joined.members
        ]
        response = await self.ask(
            wire.SYNC_GROUP,
            3,
            group_id="g",
            generation_id=joined.generation_id,
            member_id=joined.member_id,
            assignments=assignments,
        )
        return int(response.error_code)

    async def heartbeat(self, joined: Any) -> int:
        response = await self.ask(
            wire.HEARTBEAT,
            3,
            group_id="g",
            generation_id=joined.generation_id,
            member_id=joined.member_id,
        )
        return int(response.error_code)

    async def commit(self, joined: Any, offset: int) -> int:
        topic_type = wire.OFFSET_COMMIT.Request.Topic
        part = topic_type.Partition(
            partition_index=0, committed_offset=offset, committed_metadata=""
        )
        response = await self.ask(
            wire.OFFSET_COMMIT,
            7,
            group_id="g",
            generation_id_or_member_epoch=joined.generation_id,
            member_id=joined.member_id,
            topics=[topic_type(name="orders", partitions=[part])],
        )
        return int(response.topics[0].partitions[0].error_code)

    async def committed(self) -> dict[int, int]:
        response = await self.ask(wire.OFFSET_FETCH, 5, group_id="g", topics=None)
        return {
            part.partition_index: part.committed_offset
            for topic in response.topics
            for part in topic.partitions
        }

    async def describe(self) -> tuple[str, int]:
        (group,) = (await self.ask(wire.DESCRIBE_GROUPS, 4, groups=["g"])).groups
        return group.group_state, len(group.members)


async def pass_time(disk: SimulatedDisk, server: netshim.Server, ms: int) -> None:
    disk.advance(ms)
    for _ in range(3):  # the work of one tick is bounded
        await server.tick()


def serve(disk: SimulatedDisk) -> netshim.Server:
    config = {
        "retention.ms": 2 * HOUR_MS,
        "segment.bytes": 3_000,
        "file.delete.delay.ms": 0,
    }
    return netshim.Server(
        "/data", fs=disk, config=config, idle_timeout_ms=NO_TIMEOUT_MS
    )


async def live_a_day(disk: SimulatedDisk) -> int:
    """Run two consumers and a producer for a day, and return the last committed offset.

    In the first night one consumer stops sending heartbeats.
    """
    async with serve(disk) as server:
        steady = await Client.connect(server)
        silent = await Client.connect(server)
        await steady.ask(
            wire.METADATA, 9, topics=[wire.METADATA.Request.Topic(name="orders")]
        )
        await steady.join()  # alone; the answer makes it the leader of generation 1
        first = asyncio.ensure_future(silent.join())
        while (await steady.describe())[0] != "PreparingRebalance":
            await asyncio.sleep(0)
        (member,) = [
            member
            for member in server.broker.state.groups.get("g").members.values()
            if member.joining is None
        ]
        joined = await steady.join(member.member_id)
        other = await first
        assert joined.generation_id == other.generation_id == 2
        waiting = asyncio.ensure_future(silent.sync(other))
        assert await steady.sync(joined) == 0
        assert await waiting == 0

        ends = {}
        for ten_minutes in range(24 * 6):
            await pass_time(disk, server, 10 * MINUTE_MS)
            offset = await steady.produce(disk.now_ms())
            ends[ten_minutes] = offset
            if await steady.heartbeat(joined) == codes.REBALANCE_IN_PROGRESS:
                joined = await steady.join(joined.member_id)
                assert await steady.sync(joined) == 0
            assert await steady.commit(joined, offset + 1) == 0
            is_silent = ten_minutes >= 72
            if not is_silent:
                assert await silent.heartbeat(other) == 0
            if ten_minutes == 71:
                assert await steady.describe() == ("Stable", 2)
        assert await steady.describe() == ("Stable", 1), (
            "the session of the silent consumer ended"
        )
        assert await silent.heartbeat(other) == codes.UNKNOWN_MEMBER_ID

        earliest = await steady.earliest()
        oldest_kept = min(at for at, offset in ends.items() if offset >= earliest)
        assert 24 * 6 - 12 - 6 <= oldest_kept <= 24 * 6 - 12, (
            "two hours are kept, and all records that share a segment with them"
        )
        steady.writer.close()
        silent.writer.close()
        return offset + 1


async def live_a_week(disk: SimulatedDisk, committed: int) -> None:
    """Run another process on the same disk for a week.

    No member returns, so the session ends, and the offsets expire a week later.
    """
    async with serve(disk) as server:
        client = await Client.connect(server)
        assert await client.committed() == {0: committed}
        assert await client.describe() == ("Stable", 1)
        await pass_time(disk, server, SESSION_MS)
        assert await client.describe() == ("Empty", 0)
        for _ in range(7 * 24 - 1):
            await pass_time(disk, server, HOUR_MS)
        assert await client.committed() == {0: committed}
        await pass_time(disk, server, HOUR_MS)
        await pass_time(disk, server, HOUR_MS)
        assert await client.committed() == {}
        client.writer.close()


@pytest.mark.long
def test_retention_and_sessions_last_a_day_and_offsets_a_week() -> None:
    disk = SimulatedDisk()
    committed = asyncio.run(live_a_day(disk))
    asyncio.run(live_a_week(disk, committed))
    assert not disk.open_handles
