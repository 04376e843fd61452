"""The usual Produce and Fetch requests of a broker: the fields that the kernels read.

The compiled kernels create the requests; see _requests.pxi. With the plain kernels no
request is usual, and netshim.wire decodes all of them.
"""

from __future__ import annotations


class UsualRequest:
    """A request for one partition, without tagged fields."""

    version: int
    correlation_id: int
    client_id: str
    #: The name of the topic; "" if the request has its id.
    topic: str
    #: The 16 bytes of the topic's id, or None.
    topic_id: bytes | None
    partition: int


class UsualProduce(UsualRequest):
    """A Produce with one batch of magic 2 that belongs to no transaction."""

    #: 1 or -1.
    acks: int
    #: Limit of the wait for other replicas.
    timeout_ms: int
    #: The batch is frame[start:stop].
    start: int
    stop: int
    #: Number of records in the batch.
    record_count: int

    def respond(self, base_offset: int, append_time_ms: int, log_start: int) -> bytes:
        """Return the response for an appended batch, with its size.

        append_time_ms is -1 if the log keeps the timestamps of producers.
        """
        raise NotImplementedError


class UsualFetch(UsualRequest):
    """A Fetch of a consumer or a follower, without a session or with one that continues."""

    max_wait_ms: int
    #: Position of max_wait_ms in the frame, 4 bytes.
    wait_position: int
    min_bytes: int
    #: The smaller one of the limits of the request and of the partition.
    max_bytes: int
    is_committed: bool
    #: The leader epoch that the client expects, -1 for any.
    leader_epoch: int
    offset: int
    #: The leader epoch of the client's last record, -1 if unknown.
    last_epoch: int
    #: The limit of the partition alone.
    partition_max_bytes: int
    #: 0 without a session; else the epoch is positive.
    session_id: int
    session_epoch: int
    #: False if a request of a session lists no partition. The fields of the partition
    #: are valid after continue_with().
    has_partition: bool
    #: The node id of a follower and the epoch of its registration, -1 of a consumer.
    replica: int
    replica_epoch: int

    def continue_with(self, topic: str, topic_id: bytes | None, asked: object) -> None:
        """Take over the partition of the session.

        `asked` has the fields of a partition of wire.FETCH.Request. One of `topic` and
        `topic_id` is empty, depending on the version.
        """
        raise NotImplementedError

    def respond_without_news(self) -> bytes:
        """Return the response of a session without partitions, with its size."""
        raise NotImplementedError

    def respond_around(
        self, high_watermark: int, stable: int, log_start: int, size_bytes: int
    ) -> tuple[bytes, bytes]:
        """Return what precedes and follows records of this size in the response."""
        raise NotImplementedError

    def respond_empty(self, high_watermark: int, stable: int, log_start: int) -> bytes:
        """Return the response without records, with its size."""
        raise NotImplementedError
