"""Copies topics of a Kafka cluster byte for byte, and takes over from it.

    with logcore.open_dir("copy", create=True) as data, Source("kafka:9092") as source:
        Follower(data, source, topics=["orders*"]).run()

The copies have the offsets, leader epochs, transactions and control batches of the
source. `logcore mirror` stores the records of committed transactions only.
"""

from netshim.follow.follower import Follower, FollowMetrics, promote
from netshim.follow.source import Source

__all__ = ["FollowMetrics", "Follower", "Source", "promote"]
