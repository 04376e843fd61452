"""Count the records of topic "text" by key with Quix, exactly once, into topic
"counts", until the process is killed.

    python quix_job.py ADDRESS STATE_FOLDER

The job runs in an environment with quixstreams.
"""

import sys

from quixstreams import Application
from quixstreams.models import TopicConfig

address, folder = sys.argv[1:]
app = Application(
    broker_address=address,
    consumer_group="words",
    auto_offset_reset="earliest",
    processing_guarantee="exactly-once",
    state_dir=folder,
    commit_interval=0.2,
    consumer_extra_config={"session.timeout.ms": 6000, "heartbeat.interval.ms": 500},
    producer_extra_config={"transaction.timeout.ms": 5000},
)
two = TopicConfig(num_partitions=2, replication_factor=1)
text = app.topic("text", value_deserializer="str", config=two)
counts = app.topic("counts", value_serializer="json", config=two)


def count(_value, state):
    number = state.get("count", 0) + 1
    state.set("count", number)
    return number


app.dataframe(text).apply(count, stateful=True).to_topic(counts)
app.run()
