"""A broker for tests: its records, waits for records, and separate names for each test.

    def test_my_service(kafka):
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
        producer.produce("orders", b"4 apples")
        (order,) = kafka.wait_for("orders", 1)
        assert order.value == b"4 apples"

Rules:
- Reads use the broker's own directory, and need no client and no group.
- Waits block until the broker reports that a partition has grown. If no report is
  possible, for example for a topic that does not exist yet, they poll.
- A namespace is a prefix of the names of topics and groups. The broker does not enforce
  it: a client that uses other names sees everything.
- The brokers of the fixtures do not wait for the disk. No test cuts their power, and a
  killed process loses none of its writes.

The fixtures are in pytest_plugin.py. This module does not depend on pytest.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from logcore import (
    InvalidConfigError,
    LogClosedError,
    LogcoreError,
    LogDir,
    Receipt,
    TopicNotFoundError,
    open_dir,
)
from logcore.closeable import Closeable
from logcore.coordination.classic_group import DEAD
from logcore.fs import OS, Lock
from logcore.kernels import TopicRecord
from logcore.metadata.checkpoint import Key
from logcore.reader import Isolation
from logcore.testing.faults import FaultFS
from logcore.topic import Order
from netshim import server_nodes
from netshim.faults.control import FaultControl, observed_requests
from netshim.faults.requests import ObservedRequest
from netshim.kafka_releases import release_named
from netshim.rollback import DirectorySnapshot
from netshim.server import Server
from netshim.server_thread import ServerHandle, serve

if TYPE_CHECKING:  # imported only if it is used
    from netshim.recording.recorder import TrafficRecorder

#: pytest hides the frames of this module in the traceback of a failure.
__tracebackhide__ = True

#: Interval of polls for a topic that does not exist yet.
_POLL_S: Final = 0.05
#: Interval of polls for partitions that were added to an existing topic.
_POLL_PARTITIONS_S: Final = 1.0
#: Time within which a broker that has closed its directory must end.
_STOP_TIMEOUT_S: Final = 10.0
#: Number of characters of a test's name in the names of its topics. Kafka allows 249
#: characters for the whole name.
_MAX_TEST_NAME: Final = 60
#: Number of records in the message of a wait that failed.
_MAX_NEWEST: Final = 5
#: Number of characters of a key, a value or headers in that message.
_MAX_RECORD_CHARS: Final = 60
#: Longest time that advance() skips: timestamps remain far below their limit.
_MAX_SKIPPED_MS: Final = 10_000 * 86_400_000


class UnsyncedFiles(FaultFS):
    """The operating system's files. Syncs return immediately, or fail as planned."""

    def fdatasync(self, handle: int) -> None:
        self.check_sync("fdatasync", self.path_of(handle))

    def fsync(self, handle: int) -> None:
        self.check_sync("fsync", self.path_of(handle))

    def sync_dir(self, path: str) -> None:
        self.check_sync("sync_dir", path)

    def lock(self, directory: str, member: str, *, shared: bool = False) -> Lock:
        """Lock a directory with the locks of OS, which the whole process shares."""
        return OS.lock(directory, member, shared=shared)


class VirtualFiles(FaultFS):
    """The operating system's files with a clock that a test moves forward.

    See BrokerClock.
    """

    def __init__(self) -> None:
        super().__init__()
        #: The test's thread changes this number, and the broker's threads read it.
        self._skipped_ms = 0

    def skip(self, skipped_ms: int) -> None:
        """Move the clock forward."""
        # Only forwards: a monotonic clock must not move backwards.
        self._skipped_ms += skipped_ms

    def now_ms(self) -> int:
        return super().now_ms() + self._skipped_ms

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self._skipped_ms


class UnsyncedVirtualFiles(VirtualFiles, UnsyncedFiles):
    """Files with a clock that a test moves forward, and with the syncs of UnsyncedFiles."""


class BrokerClock:
    """The clock of a broker that was started with clock="virtual"."""

    def __init__(self, server: ServerHandle, files: VirtualFiles) -> None:
        """Create an instance. Tests use Kafka.clock."""
        self._server = server
        self._files = files

    @property
    def now_ms(self) -> int:
        """The wall clock of the broker, in milliseconds since 1970."""
        return self._files.now_ms()

    def advance(
        self,
        *,
        milliseconds: float = 0,
        seconds: float = 0,
        minutes: float = 0,
        hours: float = 0,
        days: float = 0,
    ) -> None:
        """Skip time, and return when the broker has completed the work that became due.

        Sessions, transactions, retention, compaction, and the expiry of offsets and
        producers follow this clock. Connections remain open, and requests that wait for
        records are answered.

        Raises:
            InvalidConfigError: the time is not between 1 ms and 10,000 days.
        """
        try:
            skip = timedelta(
                milliseconds=milliseconds,
                seconds=seconds,
                minutes=minutes,
                hours=hours,
                days=days,
            )
            skipped_ms = skip // timedelta(milliseconds=1)
        except (ValueError, OverflowError):  # not a number, or more than 1e9 days
            skipped_ms = -1
        if not 1 <= skipped_ms <= _MAX_SKIPPED_MS:
            raise InvalidConfigError(
                "advance()",
                expected="1 ms to 10,000 days in all",
                found=f"{days} d, {hours} h, {minutes} min, {seconds} s, {milliseconds} ms",
            )
        self._server.run(lambda server: server.advance(self._files.skip, skipped_ms))


@functools.cache
def unsynced_files() -> UnsyncedFiles:
    """Return the one instance of the process.

    Each instance registers for forks permanently.
    """
    return UnsyncedFiles()


def start(path: Any, **options: Any) -> Kafka:
    """Start a broker for tests.

    `options` are those of netshim.serve(). Some defaults differ: compaction is checked
    ten times a second, and syncs return immediately. Members of the consumer protocol
    send heartbeats ten times a second, and their sessions are short. With
    clock="virtual", the test moves the time of the broker by Kafka.clock. Another clock
    is an object with the methods of netshim.server.Clock.

    Raises:
        InvalidConfigError: `clock` is another text. Other errors are those of serve().
    """
    # With 15 s, the default, a test of compaction would wait that long.
    options.setdefault("cleaner_backoff_ms", 100)
    options.setdefault("group_consumer_heartbeat_interval_ms", 100)
    options.setdefault("group_consumer_session_timeout_ms", 3_000)
    clock = options.get("clock")
    if clock == "virtual":
        del options["clock"]
        # A clock belongs to one broker, so these files are not shared.
        files = options.setdefault("fs", UnsyncedVirtualFiles())
        server = serve(path, **options)
        return Kafka(server, clock=BrokerClock(server, files))
    if isinstance(clock, str):
        raise InvalidConfigError(
            "clock", expected='"virtual" or a netshim.server.Clock', found=repr(clock)
        )
    # Tests do not survive a power cut, so they need not wait for the disk.
    options.setdefault("fs", unsynced_files())
    return Kafka(serve(path, **options))


class Kafka:
    """A running broker, or a namespace on a broker that other tests use too.

    Topics may be named with or without the prefix. All methods may be called from
    several threads.
    """

    def __init__(
        self,
        server: ServerHandle,
        prefix: str = "",
        clock: BrokerClock | None = None,
    ) -> None:
        """Create an instance. Tests use one of the fixtures."""
        #: The broker.
        self.server = server
        #: The clock that the test moves, None if the broker uses the clock of the system.
        self._clock = clock
        #: Prefix of the names of topics and groups, empty if no other test uses the
        #: broker.
        self.prefix = prefix
        #: Numbers of namespaces.
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        stopped = "stopped, was at "
        if self.server.is_running:
            stopped = ""
        try:
            # Offsets, because the number of records is known only after a read:
            # transactions add markers.
            counts = [
                f"{name}: {_with_noun(self.count_offsets(name), 'offset')}"
                for name in self.topics()
            ]
        except (LogcoreError, OSError) as error:
            counts = [f"topics cannot be read: {error}"]
        address_text = ""
        if self.prefix:
            address_text = f", topics {self.prefix}*"
        return f"<Kafka {stopped}{self.bootstrap_servers}{address_text}; {', '.join(counts) or 'no topics'}>"

    # -- the broker --------------------------------------------------------------------

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients, such as "127.0.0.1:53211"."""
        return self.server.bootstrap_servers

    @property
    def bootstrap(self) -> str:
        """The same address, under a shorter name."""
        return self.server.bootstrap_servers

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def schema_registry_url(self) -> str:
        """URL of a schema registry beside the broker. The first use starts it.

        Its schemas are in the topic `_schemas`; rollback() restores them too. Errors are
        those of ServerThread.schema_registry_url.
        """
        return self.server.schema_registry_url

    @property
    def logdir(self) -> LogDir:
        """The served directory, with the real names of its topics.

        Clients may use it too.
        """
        return self.server.logdir

    @property
    def clock(self) -> BrokerClock:
        """The clock of the broker. Raises RuntimeError if the system's clock is used."""
        if self._clock is None:
            raise RuntimeError(
                'the broker has the clock of the system; start it by kafka_factory(clock="virtual")'
            )
        return self._clock

    def stop(self) -> None:
        """Stop the broker. Raises RuntimeError if other tests use it too."""
        # The other tests would lose their broker.
        if self.prefix:
            raise RuntimeError(
                "this broker is shared by the tests of the session; for one to stop take the fixture kafka"
            )
        self.server.stop()

    def snapshot(self) -> DirectorySnapshot:
        """Return a snapshot of all topics, groups and settings, for rollback().

        Raises RuntimeError if other tests use the broker too. Other errors are those of
        Server.snapshot().
        """
        # The topics of the other tests would be part of it.
        self._check_owner()
        return self.server.run(Server.snapshot)

    def rollback(self, snapshot: DirectorySnapshot) -> None:
        """Restore a snapshot, while clients remain connected.

        This restores topics, records, groups, transactions, users and settings. The
        former `logdir` and its logs are closed: use the attribute again.

        Raises RuntimeError if other tests use the broker too. Other errors are those of
        Server.rollback().
        """
        self._check_owner()
        self.server.run(lambda server: server.rollback(snapshot))

    def _check_owner(self) -> None:
        if self.prefix:
            raise RuntimeError(
                "this broker is shared by the tests of the session; take the fixture "
                "kafka or kafka_module"
            )

    def as_version(self, release: str | None) -> None:
        """Serve only the API versions of a release of Kafka, such as "2.8".

        None serves all again. Use new clients afterwards: connected clients continue to
        use the versions of the former release.

        Raises RuntimeError if other tests use the broker too, and InvalidConfigError for
        a release that is not in netshim/kafka_releases.py.
        """
        self._check_owner()
        kafka_release = release_named(release) if release is not None else None
        self.server.call(lambda: self.server.server.use_release(kafka_release))

    def as_node_count(self, count: int) -> None:
        """Advertise several nodes. Each is this broker on a port of its own.

        Clients can then be tested with leaders that move and nodes that stop; see
        move_leader() and stop_node(). In a new directory, the node ids begin with 1.
        With a count of 1, the broker advertises only itself again.

        Raises RuntimeError if other tests use the broker too. Other errors are those of
        server_nodes.set_node_count().
        """
        self._check_owner()
        self.server.run(lambda server: server_nodes.set_node_count(server, count))

    def move_leader(self, topic: str, partition: int, node: int) -> None:
        """Let another node lead a partition.

        With a partition of "__consumer_offsets" or "__transaction_state", this moves the
        coordinator of its groups or transactions. Errors are those of
        server_nodes.move_leader().
        """
        key = (self.topic(topic), partition)
        self.server.run(lambda server: server_nodes.move_leader(server, key, node))

    def stop_node(self, node: int) -> None:
        """Close the port and the connections of a node. Others lead its partitions.

        Errors are those of server_nodes.stop_node().
        """
        self._check_owner()
        self.server.run(lambda server: server_nodes.stop_node(server, node))

    def start_node(self, node: int) -> None:
        """Start a stopped node on its former port. It leads its partitions again.

        Errors are those of server_nodes.start_node().
        """
        self._check_owner()
        self.server.run(lambda server: server_nodes.start_node(server, node))

    def faults(self) -> FaultControl:
        """Return a control that adds fault rules to the broker; use it in a `with`.

        For example: `faults.answer("Produce", "NOT_LEADER_OR_FOLLOWER", times=2)`. The
        broker may be shared by other tests: then filter by `topic` or `client_id`.
        """
        server = self.server.server
        return FaultControl(self.server, server.broker, self.logdir)

    def requests(self, api: str = "*") -> list[ObservedRequest]:
        """Return the latest requests of clients, at most 1,000, oldest first.

        The broker stores requests from the first call of requests() or faults() on.
        """
        broker = self.server.server.broker
        return self.server.call(lambda: observed_requests(broker, api))

    def record(self, path: str | os.PathLike[str]) -> TrafficRecording:
        """Record requests and responses to a new file, until close() or the block ends.

        Passwords and tokens of logins are removed. Records of topics are included. The
        command `netshim replay` reads the file.

        Raises RuntimeError if other tests use the broker too, InvalidConfigError if the
        file exists, and ResourceError if the broker has another recording.
        """
        self._check_owner()
        from netshim.recording.recorder import TrafficRecorder

        server = self.server.server
        recorder = TrafficRecorder(path, fs=server.files)
        recording = TrafficRecording(self.server, recorder)
        try:
            self.server.call(lambda: server.record(recorder))
        except BaseException:
            # An interrupted call may have begun to record.
            recording.close()
            os.unlink(path)
            raise
        return recording

    # -- names -------------------------------------------------------------------------

    def topic(self, name: str) -> str:
        """Return the real name of a topic, for clients."""
        if name.startswith(self.prefix):
            return name
        return self.prefix + name

    def group(self, name: str) -> str:
        """Return the real name of a consumer group, for `group.id`."""
        if name.startswith(self.prefix):
            return name
        return self.prefix + name

    def topics(self) -> list[str]:
        """Return the topics of the namespace, sorted and without the prefix.

        Kafka's internal topics are not included.
        """
        with self._directory() as logdir:
            return [
                name.removeprefix(self.prefix)
                for name in logdir.topics()
                if name.startswith(self.prefix) and not name.startswith("__")
            ]

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None
    ) -> str:
        """Create a topic and return its real name.

        Errors are those of LogDir.create_topic().
        """
        full_name = self.topic(name)
        self.logdir.create_topic(full_name, partitions, config)
        return full_name

    @contextlib.contextmanager
    def namespace(self, name: str = "") -> Generator[Kafka, None, None]:
        """Return a namespace of topics and groups. They are removed after the `with`.

        `name` is included in the names, so that log lines show it. A group that still
        has members remains until their sessions end. Its name is never used again.
        """
        readable = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")[:_MAX_TEST_NAME]
        inner = Kafka(
            self.server,
            f"{self.prefix}t{next(self._numbers)}-{readable}{'-' if readable else ''}",
            self._clock,
        )
        try:
            yield inner
        finally:
            if self.server.is_running:
                inner._remove()

    def _remove(self) -> None:
        """Delete the topics and groups of the namespace, like an admin client."""
        for name in self.logdir.topics():
            if name.startswith(self.prefix):
                # A client deleted it first.
                with contextlib.suppress(TopicNotFoundError):
                    self.logdir.delete_topic(name)

        def forget() -> None:
            server = self.server.server
            state = server.broker.state
            state.advance_clock(server.now_ms())
            if not state.groups.is_loaded:  # no group was ever used
                return
            for group in list(state.groups.all()):
                if group.group_id.startswith(self.prefix):
                    state.groups.request_delete(group.group_id, lambda _: None)

        self.server.call(forget)

    def wait_for_group(
        self,
        group: str,
        *,
        state: str = "Stable",
        members: int | None = None,
        timeout: float = 10.0,
    ) -> None:
        """Wait until a consumer group has a state and, if given, a number of members.

        `state` is a name of Kafka, such as "Stable", "Empty" or "Dead". `timeout` is in
        seconds.

        Raises:
            AssertionError: the time has passed. The message describes the group.
        """
        full_name = self.group(group)
        deadline = time.monotonic() + timeout
        while True:
            state_and_members = self.server.call(lambda: self._group(full_name))
            if state_and_members[0] == state and members in (
                None,
                state_and_members[1],
            ):
                return
            if time.monotonic() >= deadline:
                raise AssertionError(
                    f"kafka.wait_for_group({group!r}): expected {state} with "
                    f"{'any number of' if members is None else members} members "
                    f"within {timeout:g} s, found {state_and_members[0]} with {state_and_members[1]}"
                )
            # Groups report no changes, so this wait polls.
            time.sleep(_POLL_S)

    def _group(self, full_name: str) -> tuple[str, int]:
        """Return the state of a group and its number of members."""
        groups = self.server.server.broker.state.groups
        group = None
        if groups.is_loaded:
            group = groups.get(full_name)
        else:  # a later call can use them
            groups.load(self.server.server.now_ms(), lambda _: None)
        if group is None:
            return DEAD, 0
        if group.consumers is not None:
            return group.state, len(group.consumers.members)
        return group.state, len(group.members)

    # -- records -----------------------------------------------------------------------

    def append(self, topic: str, value: bytes | None, **options: Any) -> Receipt:
        """Append a record like LogDir.append(). Consumers receive it immediately.

        A missing topic is created with the broker's default number of partitions.
        """
        full_name = self.topic(topic)
        self.logdir.create_topic(
            full_name, self.server.server.settings.num_partitions, exist_ok=True
        )
        receipt = self.logdir.append(full_name, value, **options)

        def wake() -> None:
            server = self.server.server
            server.broker.state.fetches.wake_readers(server.now_ms())

        # Otherwise, consumers would wait for the next poll of the broker.
        self.server.call(wake)
        return receipt

    @contextlib.contextmanager
    def _directory(self) -> Generator[LogDir, None, None]:
        """Return the served directory, or the files of a stopped broker."""
        if self.server.is_running:
            yield self.logdir
        else:
            with open_dir(self.server.server.path, read_only=True) as logdir:
                yield logdir

    def records(
        self,
        topic: str,
        *,
        isolation: Isolation = "read_uncommitted",
        order: Order = "partition",
    ) -> list[TopicRecord]:
        """Return the records of a topic now, also of a stopped broker.

        A missing topic has none.

        `order` is "partition" for one partition after another, each by offset, or
        "time" for a merge by timestamps. With the `isolation` "read_committed", aborted
        and undecided records are omitted.
        """
        with self._directory() as logdir:
            try:
                return list(
                    logdir.read(self.topic(topic), isolation=isolation, order=order)
                )
            except TopicNotFoundError:
                return []

    def wait_for(
        self,
        topic: str,
        count: int,
        *,
        timeout: float = 10.0,
        isolation: Isolation = "read_uncommitted",
        order: Order = "partition",
    ) -> list[TopicRecord]:
        """Wait for at least `count` records, and return all of them like records().

        `timeout` is in seconds. In a test that runs in an event loop, use
        wait_for_async(), because this call blocks the loop.

        Raises:
            AssertionError: The timeout has passed. The message lists the records found.
        """
        wakeup = threading.Event()
        deadline = time.monotonic() + timeout
        find = functools.partial(self._find, topic, count, isolation, order)
        with _Listening(self, topic, wakeup.set) as listening:
            while True:
                wakeup.clear()
                poll_s, records = listening.read_or_listen(find)
                remaining_s = deadline - time.monotonic()
                if records is not None:
                    return records
                if remaining_s <= 0 or not self.server.is_running:
                    raise AssertionError(
                        self._describe_missing(
                            "wait_for", topic, count, timeout, isolation
                        )
                    )
                wakeup.wait(min(remaining_s, poll_s))

    async def wait_for_async(
        self,
        topic: str,
        count: int,
        *,
        timeout: float = 10.0,
        isolation: Isolation = "read_uncommitted",
        order: Order = "partition",
    ) -> list[TopicRecord]:
        """Wait like wait_for(), while the event loop of the test runs."""
        loop = asyncio.get_running_loop()
        wakeup = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(wakeup.set)

        deadline = time.monotonic() + timeout
        find = functools.partial(self._find, topic, count, isolation, order)
        with _Listening(self, topic, wake) as listening:
            while True:
                wakeup.clear()
                poll_s, records = listening.read_or_listen(find)
                remaining_s = deadline - time.monotonic()
                if records is not None:
                    return records
                if remaining_s <= 0 or not self.server.is_running:
                    raise AssertionError(
                        self._describe_missing(
                            "wait_for_async", topic, count, timeout, isolation
                        )
                    )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(wakeup.wait(), min(remaining_s, poll_s))

    def _find(
        self, topic: str, count: int, isolation: Isolation, order: Order
    ) -> list[TopicRecord] | None:
        """Return the records if there are enough.

        They are read only if that is possible.
        """
        if self.count_offsets(topic) < count:
            return None
        records = self.records(topic, isolation=isolation, order=order)
        if len(records) >= count:
            return records
        return None

    def _counts(self, topic: str) -> dict[int, int]:
        """Return the number of offsets of each partition.

        Compaction and markers leave gaps, so there may be fewer records.
        """
        full_name = self.topic(topic)
        with self._directory() as logdir:
            try:
                logs = {
                    number: logdir.partition(full_name, number)
                    for number in logdir.partitions(full_name)
                }
            except TopicNotFoundError:
                return {}
            return {
                number: log.high_watermark - log.log_start_offset
                for number, log in logs.items()
            }

    def count_offsets(self, topic: str) -> int:
        """Return the number of offsets of a topic, at least its number of records."""
        return sum(self._counts(topic).values())

    def _describe_missing(
        self, call: str, topic: str, count: int, timeout: float, isolation: Isolation
    ) -> str:
        """Return the message of a wait that failed."""
        records = self.records(topic, isolation=isolation)
        counts = self._counts(topic)
        text = [
            f"kafka.{call}({topic!r}, {count}): {len(records)} of {_records(count)} came within {timeout:g} s, "
            f"{count - len(records)} did not"
        ]
        if not self.server.is_running:
            text.append("  the broker has stopped")
        full_name = self.topic(topic)
        if not counts:
            text.append(f"  there is no topic {full_name}")
        else:
            by_partition = ", ".join(
                f"{number}: {amount}" for number, amount in counts.items()
            )
            text.append(
                f"  {full_name} has {_records(len(records))}; offsets by partition {{{by_partition}}}"
            )
            hidden = sum(counts.values()) - len(records)
            if hidden and isolation == "read_committed":
                text.append(
                    f"  {hidden} offsets are of transactions that are open or aborted, or of their markers"
                )
        newest = sorted(records, key=lambda record: record.timestamp_ms)[-_MAX_NEWEST:]
        if newest:
            text.append("  the newest:")
            text.extend(f"    {_record_text(record)}" for record in newest)
        other_topics = [
            name
            for name in self.topics()
            if name != full_name.removeprefix(self.prefix)
        ]
        latest = ", ".join(
            f"{name}: {_with_noun(self.count_offsets(name), 'offset')}"
            for name in other_topics
        )
        text.append(f"  other topics: {latest or 'none'}")
        return "\n".join(text)


class TrafficRecording(Closeable):
    """A recording of a broker's traffic. Kafka.record() returns it; use it in a `with`."""

    def __init__(self, server: ServerHandle, recorder: TrafficRecorder) -> None:
        """Create an instance. Users call Kafka.record()."""
        self._server = server
        self._recorder = recorder

    @property
    def path(self) -> str:
        """The file."""
        return self._recorder.path

    def close(self) -> None:
        """End the recording and write its last bytes. A second call has no effect.

        Raises:
            LogcoreError: the recording has stopped early, for example on a full disk.
        """
        server = self._server.server

        def end() -> None:
            if server.recorder is self._recorder:
                server.record(None)

        with contextlib.suppress(RuntimeError):  # the broker has stopped
            self._server.call(end)
        # In the thread of the test, because it waits for the disk.
        self._recorder.close()
        if self._recorder.failure is not None:
            raise self._recorder.failure


class _Listening:
    """Calls wake() in the broker's thread when the topic may have grown."""

    def __init__(self, kafka: Kafka, topic: str, wake: Callable[[], None]) -> None:
        self._kafka = kafka
        self._topic = kafka.topic(topic)
        self._wake = wake
        self._keys: list[Key] = []

    def __enter__(self) -> _Listening:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the broker has stopped
            self._exchange([])

    def read_or_listen(
        self, find: Callable[[], list[TopicRecord] | None]
    ) -> tuple[float, list[TopicRecord] | None]:
        """Register wake() for the current partitions, and return the result of find().

        Also returns the number of seconds after which this must be called again, because
        appends to partitions that are added later call no wake().
        """
        server = self._kafka.server
        try:
            poll_s = self._listen()
            return poll_s, find()
        except (LogClosedError, RuntimeError):  # the broker stops, or has stopped
            if not server.has_ended(_STOP_TIMEOUT_S):
                raise
            return _POLL_S, find()

    def _listen(self) -> float:
        """Register wake() for the current partitions of the topic.

        Returns the number of seconds after which that must be repeated.
        """
        logdir = self._kafka.logdir
        exists = self._topic in logdir
        numbers: Iterable[int] = range(
            self._kafka.server.server.settings.num_partitions
        )
        if exists:
            numbers = logdir.partitions(self._topic)
        keys = [(self._topic, number) for number in numbers]
        if keys != self._keys:
            self._exchange(keys)
        if exists:
            return _POLL_PARTITIONS_S
        return _POLL_S

    def _exchange(self, keys: list[Key]) -> None:
        """Register wake() for these partitions instead of the former ones."""

        def exchange() -> None:
            waiting = self._kafka.server.server.broker.state.fetches
            waiting.remove(self._keys, self._on_append)
            waiting.add(keys, self._on_append)

        self._kafka.server.call(exchange)
        self._keys = keys

    def _on_append(self, now_ms: int) -> None:
        self._wake()


def _records(count: int) -> str:
    return _with_noun(count, "record")


def _with_noun(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _record_text(record: TopicRecord) -> str:
    """Return a record as one line."""
    when = "no time"
    if record.timestamp_ms >= 0:
        # The calendar of datetime ends before the largest timestamp.
        with contextlib.suppress(OverflowError, ValueError, OSError):
            when = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC).isoformat(
                timespec="milliseconds"
            )
    headers = ""
    if record.headers:
        headers = f", headers={_shorten(repr(record.headers))}"
    text = f"key={_shorten(repr(record.key))}, value={_shorten(repr(record.value))}{headers}"
    return f"partition {record.partition}, offset {record.offset}, {when}, {text}"


def _shorten(text: str) -> str:
    if len(text) <= _MAX_RECORD_CHARS:
        return text
    return f"{text[: _MAX_RECORD_CHARS - 3]}..."
