"""The end of tails and polls on request, and on signals."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import logcore
from logcore import aio
from logcore.errors import WakeupError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 120.0


async def values(records: AsyncIterator[logcore.Record]) -> list[bytes | None]:
    return [record.value async for record in records]


def test_tails_end_on_request_and_later_ones_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open_dir(tmp_path / "data", create=True) as data:
            await data.create_topic("t", 2)
            log = await data.partition("t", 0)
            await log.append(b"a")
            of_log = asyncio.create_task(values(log.tail(0)))
            of_topic = asyncio.create_task(values(await data.tail("t", {0: 0, 1: 0})))
            await asyncio.sleep(0.05)
            assert not of_log.done() and not of_topic.done()
            aio.end_waits()
            assert await of_log == await of_topic == [b"a"]
            await log.append(b"b")
            assert await values(log.tail(0)) == []

    asyncio.run(main())


def test_consumers_wake_and_remain_open(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open_dir(tmp_path / "data", create=True) as data:
            await data.create_topic("t")
            async with data.consumer() as consumer, data.consumer() as other:
                await consumer.assign([("t", 0)])
                await other.assign([("t", 0)])
                poll = asyncio.create_task(consumer.getmany(timeout=100))
                iteration = asyncio.create_task(values(other))
                await asyncio.sleep(0.05)
                aio.end_waits()
                with pytest.raises(WakeupError):
                    await poll
                assert await iteration == []
                async with data.producer() as producer:
                    await producer.send_and_wait("t", b"a")
                consumer.seek(("t", 0), 0)
                polled = await consumer.getmany(timeout=100)
                assert [record.value for record in polled.records()] == [b"a"]

    asyncio.run(main())


def test_consumer_that_is_opened_later_wakes_too(tmp_path: Path) -> None:
    """A service received SIGTERM while it opened a consumer, and then waited in its
    poll.
    """

    async def main() -> None:
        async with aio.open_dir(tmp_path / "data", create=True) as data:
            await data.create_topic("t")
            with aio.end_on_signals():
                aio.end_waits()
                async with data.consumer() as consumer:
                    await consumer.assign([("t", 0)])
                    with pytest.raises(WakeupError):
                        await consumer.getmany(timeout=100)

    asyncio.run(main())


@pytest.mark.long
def test_signal_ends_a_tail_of_a_program(tmp_path: Path) -> None:
    """The program continues after the tail, and exits with 0."""
    program = (
        "import asyncio, sys\n"
        "from logcore import aio\n"
        "async def main():\n"
        "    async with aio.open(sys.argv[1], create=True) as log:\n"
        "        with aio.end_on_signals():\n"
        "            print('ready', flush=True)\n"
        "            async for record in log.tail():\n"
        "                pass\n"
        "            print('ended', flush=True)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "t-0")],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "ended\n"
    assert process.returncode == 0


@pytest.mark.long
def test_second_signal_has_its_usual_effect(tmp_path: Path) -> None:
    program = (
        "import asyncio, signal, time\n"
        "from logcore import aio\n"
        "async def main():\n"
        "    with aio.end_on_signals():\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(600)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None:
            assert time.monotonic() < deadline
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
    assert process.returncode == -signal.SIGTERM


def test_several_blocks_end_together(tmp_path: Path) -> None:
    """After the first tail had ended, the other tails waited again."""

    async def follow(log: aio.Log) -> str:
        with aio.end_on_signals((signal.SIGTERM,)):
            assert await values(log.tail(0)) == []
        return "ended"

    async def main() -> None:
        async with aio.open(tmp_path / "t-0", create=True) as log:
            tails = [asyncio.create_task(follow(log)) for _ in range(3)]
            await asyncio.sleep(0.05)
            signal.raise_signal(signal.SIGTERM)
            assert await asyncio.gather(*tails) == ["ended"] * 3

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) is before


def test_unknown_signal_is_refused_and_no_handler_remains() -> None:
    async def main() -> None:
        with aio.end_on_signals((signal.SIGTERM, 9_999)):
            raise AssertionError("the block must not begin")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="signal number"):
        asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) is before


def test_handlers_are_restored_and_other_threads_have_none() -> None:
    async def main() -> None:
        with aio.end_on_signals():
            pass

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) is before
    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.long
def test_service_with_followers_stops(tmp_path: Path) -> None:
    """uvicorn waits for open responses, so that the service did not stop while a client
    was connected.
    """
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES)]
    with subprocess.Popen(
        [*command, "orders_service:app", "--port", str(port), "--log-level", "error"],
        env={"PATH": "", "ORDERS": str(tmp_path / "orders-0")},
    ) as service:
        offset = place_order(port, b"4 apples")
        followers = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(3)]
        responses = []
        for follower in followers:
            follower.request(
                "GET", "/orders", headers={"Last-Event-ID": str(offset - 1)}
            )
            responses.append(follower.getresponse())
        for response in responses:
            assert response.readline() == b"id: 0\n"
        service.send_signal(signal.SIGTERM)
        for response in responses:  # each response is complete
            assert response.read() == b"data: 4 apples\n\n"
        service.wait(LIMIT_S)
        for follower in followers:
            follower.close()
    with logcore.open(tmp_path / "orders-0", read_only=True) as log:
        assert [record.value for record in log.read(0)] == [b"4 apples"]


def place_order(port: int, order: bytes) -> int:
    """Place an order, once the service accepts connections."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.request("POST", "/orders", order)
            return int(json.load(connection.getresponse())["offset"])
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        finally:
            connection.close()
