"""logcore for asyncio: the same names. A method that may wait is a coroutine.

    from logcore import aio

    async with aio.open("data/orders-0", create=True) as log:
        receipt = await log.append(b"4 apples", key=b"anna")
        async for record in log.tail(receipt.offset, timeout=0):
            print(record.offset, record.key, record.value)

See docs/aio.md.
"""

from logcore.aio.awaitable_open import Opening
from logcore.aio.consumer import Consumer, Listener, RebalanceListener
from logcore.aio.ending import end_on_signals, end_waits
from logcore.aio.log import Log, open
from logcore.aio.logdir import LogDir, open_dir
from logcore.aio.notify import RecordLists
from logcore.aio.producer import Producer, TransactionalProducer

__all__ = [
    "Consumer",
    "Listener",
    "RecordLists",
    "Log",
    "LogDir",
    "Opening",
    "Producer",
    "RebalanceListener",
    "TransactionalProducer",
    "end_on_signals",
    "end_waits",
    "open",
    "open_dir",
]
