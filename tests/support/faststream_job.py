"""Send twenty messages to a topic with FastStream, and write the results of a handler
to another topic.

    python faststream_job.py ADDRESS confluent|aiokafka

The job runs in an environment with faststream.
"""

import asyncio
import sys

from faststream import FastStream

address, client = sys.argv[1:]
if client == "confluent":
    from faststream.confluent import KafkaBroker
else:
    from faststream.kafka import KafkaBroker

MESSAGES = 20
broker = KafkaBroker(address)
app = FastStream(broker)
seen: list[str] = []


@broker.subscriber(f"{client}-in", group_id="g", auto_offset_reset="earliest")
@broker.publisher(f"{client}-out")
async def handle(message: str) -> str:
    seen.append(message)
    if len(seen) == MESSAGES:
        app.exit()
    return message.upper()


@app.after_startup
async def send() -> None:
    for number in range(MESSAGES):
        await broker.publish(f"message {number}", f"{client}-in")


asyncio.run(app.run())
