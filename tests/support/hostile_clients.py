"""A whole broker without sockets, malicious clients that send changed frames to it, and
one honest client.

With `is_secured`, users log in, and access control lists and quotas are enforced. Some
malicious clients have not logged in. The other malicious clients have logged in as one
user without access to the resources of the honest client. Therefore they also send
changed copies of the honest client's requests.

The disk and the time are simulated. The scripts of support/conformance/ send requests of
every API in every version that is served, with topics, groups, members and transactions
that exist. Malicious clients then send changed copies of each of these frames. Most of a
changed frame is still valid for the broker. Malicious clients may disturb a script, which
then ends early.

Invariants, for any frame:
    answers     a frame gets a response of its API and version, or waits, or ends its connection
    errors      a handler raises only CloseConnection, and no internal error is logged
    others      the honest client gets each response at once, with the expected content
    memory      connections free their memory, and a broker's memory does not grow with the number of frames
    hang        the handling of each frame ends: the caller of this module sets a time limit

Tested elsewhere: sockets and their limits (tests/netshim/test_hostile.py), decoders
alone (tests/faults/test_fuzz.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import resource
import struct
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import logcore
from logcore import recordbatch
from logcore.testing import SimulatedDisk
from netshim import wire
from netshim.broker import Broker
from netshim.connection import Connection, ConnectionMemory, Workload
from netshim.handlers.authentication import SaslAuthentication
from netshim.scheduling import CloseConnection
from netshim.security import scram
from netshim.security.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Acl,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.security.quotas import CLIENT_KEYS
from netshim.security.service import Security, SecuritySettings
from netshim.security.stored import DEFAULT, SecurityStore
from netshim.session import MAX_UNAUTHENTICATED_BYTES, ClientSession
from netshim.settings import Settings
from netshim.wire.codec import Api
from support.conformance import RecordingClient, Script, build
from support.conformance.report import SCRIPTS, served
from support.hostile_frames import Variants, mutate

PATH = "/data"
#: The time for which a script waits for a response, and the steps in which this time
#: passes.
_RESPONSE_TIMEOUT_MS = 6_000
_STEP_MS = 500
#: The time that passes in each round.
_ROUND_MS = 2_000
#: The longest time between two rounds of the honest client, whose session lasts 30 s.
_HONEST_MS = 10_000
#: The number of changed frames between two rounds of the honest client.
_ROUND_FRAMES = 400
#: The memory that one frame of at most 1 MiB may allocate at once.
_FRAME_BYTES = 64 << 20
#: The greatest number of connections with a waiting request. If there are more, the
#: oldest connections are closed.
_MAX_PARKED = 40
#: The initial time. The batches of the scripts have timestamps of that day.
_T0_MS = 1_767_225_600_000
#: The users of a broker with security, and their password.
_HONEST = "honest"
_STRANGER = "stranger"
_PASSWORD = "a password"
#: All names of the honest client's resources end with this.
_HONEST_NAME = "of-the-honest-client"
#: One in this number of malicious clients has not logged in.
_UNAUTHENTICATED_SHARE = 5
#: Operations on the cluster by which a malicious client could reach all resources, or
#: slow down all clients.
_POWERFUL = (
    AclOperation.ALTER,
    AclOperation.ALTER_CONFIGS,
    AclOperation.CLUSTER_ACTION,
)


class InvariantViolated(AssertionError):
    """An invariant does not hold."""


class LoggedErrors(logging.Handler):
    """Collects log records that report an internal error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


def _acls() -> list[Acl]:
    """Return rules that allow everything to malicious clients, except for the resources
    of the honest client.
    """

    def rule(
        kind: ResourceType,
        pattern: Pattern,
        name: str,
        operation: AclOperation,
        permission: Permission,
    ) -> Acl:
        return Acl(
            kind, pattern, name, f"User:{_STRANGER}", WILDCARD, operation, permission
        )

    rules = [
        rule(
            ResourceType.CLUSTER,
            Pattern.LITERAL,
            CLUSTER_NAME,
            operation,
            Permission.ALLOW,
        )
        for operation in AclOperation
        if operation > AclOperation.ALL and operation not in _POWERFUL
    ]
    for kind, prefix in (
        (ResourceType.TOPIC, ""),
        (ResourceType.GROUP, "group-"),
        (ResourceType.TRANSACTIONAL_ID, "id-"),
    ):
        everything = AclOperation.ALL
        rules.append(
            rule(kind, Pattern.LITERAL, WILDCARD, everything, Permission.ALLOW)
        )
        rules.append(
            rule(
                kind,
                Pattern.PREFIXED,
                prefix + _HONEST_NAME,
                everything,
                Permission.DENY,
            )
        )
    return rules


def _login_frames() -> list[bytes]:
    """Return requests of clients that try to log in without the password."""
    frames = []
    tokens = [
        f"\0{_HONEST}\0wrong".encode(),
        f"n,,n={_HONEST},r={'r' * 24}".encode(),
        b"c=biws,r=" + b"r" * 48 + b",p=" + b"A" * 43 + b"=",
    ]
    for mechanism in ("PLAIN", *scram.HASHES):
        chosen = wire.SASL_HANDSHAKE.Request(mechanism=mechanism)
        frames += [
            wire.encode_request(wire.SASL_HANDSHAKE, version, 7, "test", chosen)[4:]
            for version in (0, 1)
        ]
    for token in tokens:
        passed = wire.SASL_AUTHENTICATE.Request(auth_bytes=token)
        frames += [
            wire.encode_request(wire.SASL_AUTHENTICATE, version, 7, "test", passed)[4:]
            for version in (0, 1, 2)
        ]
    return [*frames, *tokens]


def _security(disk: SimulatedDisk) -> Security:
    """Return security with two users, the rules of the malicious clients, and quotas
    above all use.
    """
    settings = SecuritySettings(
        mechanisms=("PLAIN", *scram.HASHES),
        super_users=(f"User:{_HONEST}",),
        enforces_acls=True,
    )
    security = Security(
        settings,
        open_store=lambda: SecurityStore(PATH, disk),
        random=disk.random_bytes,
        wall_ms=disk.now_ms,
    )
    store = security.store()
    credentials = scram.credentials_of(
        _PASSWORD, scram.MIN_ITERATIONS, disk.random_bytes
    )
    for user in (_HONEST, _STRANGER):
        store.set_credentials(user, credentials)
    store.add_acls(_acls())
    store.set_quotas((DEFAULT, None, None), dict.fromkeys(CLIENT_KEYS, 1e12))
    security.publish(store.load())
    return security


def _gets_response(frame: bytes) -> bool:
    """Return whether a request gets a response. Produce with acks=0 gets none."""
    view = memoryview(frame)
    try:
        header = wire.decode_header(view)
        if header.api_key != wire.PRODUCE.key:
            return True
        return wire.decode_request(header, view).acks != 0
    except wire.ProtocolError:
        return True


class WireClient:
    """A connection to the broker, and its responses.

    With security, `user` logs in. With None, the client does not log in.
    """

    def __init__(
        self, simulation: HostileSimulation, user: str | None = _STRANGER
    ) -> None:
        self.simulation = simulation
        self.session = ClientSession("127.0.0.1", 9092, "127.0.0.1")
        self.is_unauthenticated = simulation.is_secured and user is None
        if simulation.is_secured:
            self.session.authentication = SaslAuthentication(
                self.session, simulation.broker.state
            )
            self.session.frame_limit_bytes = MAX_UNAUTHENTICATED_BYTES
        #: API key, version and correlation id of requests without a response so far.
        self.unanswered: deque[tuple[int, int, int]] = deque()
        self.connection = Connection(
            partial(simulation.broker.handle, self.session),
            simulation.broker.state.settings,
            simulation.budget,
            simulation.workload,
            simulation.now_ms,
            lambda: None,
            session=self.session,
        )
        if simulation.is_secured and user is not None:
            self.log_in(user)

    def log_in(self, user: str) -> None:
        self.ask(wire.SASL_HANDSHAKE, 1, wire.SASL_HANDSHAKE.Request(mechanism="PLAIN"))
        token = f"\0{user}\0{_PASSWORD}".encode()
        response = self.ask(
            wire.SASL_AUTHENTICATE, 1, wire.SASL_AUTHENTICATE.Request(auth_bytes=token)
        )
        assert not response.error_code, response

    def feed(self, frame: bytes) -> None:
        """Send one frame.

        Raises:
            CloseConnection: the broker closes the connection.
        """
        simulation = self.simulation
        if len(frame) >= 8:
            if _gets_response(frame):
                self.unanswered.append(struct.unpack_from(">hhi", frame))
        else:
            self.unanswered.append((-1, -1, -1))
        data = len(frame).to_bytes(4, "big") + frame
        connection = self.connection
        while data:
            room = connection.get_buffer()
            size = min(len(room), len(data))
            room[:size] = data[:size]
            connection.received(size, simulation.now_ms)
            data = data[size:]
        simulation.run()

    def responses(self) -> Iterator[tuple[int, Any]]:
        """Yield the correlation id and the response of each new response frame, decoded
        by the API and version of its request.
        """
        received = bytearray()
        while (piece := self.connection.next_buffer()) is not None:
            received += piece
        at = 0
        while at < len(received):
            size = int.from_bytes(received[at : at + 4], "big")
            frame = memoryview(bytes(received[at + 4 : at + 4 + size]))
            at += 4 + size
            yield self._decoded(frame)

    def _decoded(self, frame: memoryview) -> tuple[int, Any]:
        correlation_id = int.from_bytes(frame[:4], "big", signed=True)
        if not self.unanswered:
            raise InvariantViolated(
                f"a response to {correlation_id}, which was not requested"
            )
        key, version, expected = self.unanswered.popleft()
        api = wire.APIS[key]
        if expected != correlation_id:
            raise InvariantViolated(
                f"a response to {correlation_id} before that to {api.name} {expected}"
            )
        if (
            key == wire.API_VERSIONS.key
            and not api.min_version <= version <= api.max_version
        ):
            version = 0
        return wire.decode_response(api, version, frame)

    def ask(
        self,
        api: Api[Any, Any],
        version: int,
        request: Any,
        *,
        response_timeout_ms: int = 0,
    ) -> Any:
        """Send a request, and return its response.

        Raises:
            EOFError: the broker closes the connection.
            TimeoutError: there is no response in time.
        """
        simulation = self.simulation
        simulation.correlation_id += 1
        frame = wire.encode_request(
            api, version, simulation.correlation_id, "test", request
        )[4:]
        try:
            self.feed(frame)
            while True:
                for _, response in self.responses():
                    return response
                if response_timeout_ms <= 0:
                    raise TimeoutError(api.name)
                response_timeout_ms -= _STEP_MS
                simulation.pass_time(_STEP_MS)
        except CloseConnection as reason:
            raise EOFError(str(reason)) from reason

    def close(self) -> None:
        self.connection.close()


class ScriptRun(RecordingClient):
    """Runs a script of support/conformance/ over a WireClient. Malicious clients first send
    changed copies of its requests.
    """

    def __init__(
        self,
        simulation: HostileSimulation,
        api: Api[Any, Any],
        version: int,
        number: int,
    ) -> None:
        self.simulation = simulation
        super().__init__(0, api, version)
        self.name = f"{api.name}-{version}-{number}"

    def _open_connection(self) -> Any:
        return ScriptedClient(self.simulation)

    def until_ready(self, ask: Callable[[], tuple[int, Any]]) -> Any:
        for _ in range(3):
            code, response = ask()
            if not code:
                break
            self.simulation.pass_time(100)
        return response

    def wait_for_topic(self, name: str, partitions: int) -> bytes:
        known = self.ask_unrecorded(
            wire.METADATA, 12, topics=[{"name": name}], allow_auto_topic_creation=False
        )
        found: bytes = known.topics[0].topic_id
        return found


class ScriptedClient(WireClient):
    """The connection of a script."""

    def ask(
        self,
        api: Api[Any, Any],
        version: int,
        request: Any,
        *,
        response_timeout_ms: int = _RESPONSE_TIMEOUT_MS,
    ) -> Any:
        try:
            return super().ask(
                api, version, request, response_timeout_ms=response_timeout_ms
            )
        finally:
            # A copy of a login with the right password would log in.
            if api is not wire.SASL_AUTHENTICATE:
                self.simulation.send_changed_copies(
                    wire.encode_request(api, version, 7, "test", request)[4:]
                )


class HonestClient:
    """A client that produces, reads, commits, remains in its group, and ends
    transactions. Each call must succeed.
    """

    def __init__(self, simulation: HostileSimulation) -> None:
        self.simulation = simulation
        self.client = WireClient(simulation, _HONEST)
        self.topic = _HONEST_NAME
        self.group = f"group-{_HONEST_NAME}"
        self.written: list[bytes] = []
        self.committed_values: list[bytes] = []
        self.rounds = 0
        #: The latest requests.
        self.sent: deque[bytes] = deque(maxlen=30)
        self.seen_ms = simulation.now_ms
        topic_fields = {
            "name": self.topic,
            "num_partitions": 2,
            "replication_factor": 1,
        }
        topic_fields["configs"] = [{"name": "retention.ms", "value": "-1"}]
        response = self.ask(
            wire.CREATE_TOPICS, 7, topics=[topic_fields], timeout_ms=1_000
        )
        assert not response.topics[0].error_code, response
        join = {
            "group_id": self.group,
            "session_timeout_ms": 30_000,
            "rebalance_timeout_ms": 30_000,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b"mine"}],
        }
        first = self.ask(wire.JOIN_GROUP, 5, **join)
        joined = self.ask(wire.JOIN_GROUP, 5, member_id=first.member_id, **join)
        self.member_fields = {
            "group_id": self.group,
            "generation_id": joined.generation_id,
            "member_id": joined.member_id,
        }
        mine = [{"member_id": joined.member_id, "assignment": b"all"}]
        assert not self.ask(
            wire.SYNC_GROUP, 3, assignments=mine, **self.member_fields
        ).error_code
        self.producer = self.ask(
            wire.INIT_PRODUCER_ID,
            4,
            transactional_id="id-of-the-honest-client",
            transaction_timeout_ms=600_000,
        )

    def ask(self, api: Api[Any, Any], version: int, **fields: Any) -> Any:
        request = build(api.request.schema, fields)
        self.sent.append(wire.encode_request(api, version, 7, "test", request)[4:])
        return self.client.ask(api, version, request)

    def round(self) -> None:
        """Send each request, and check that its response arrives at once with the
        expected content.
        """
        self.rounds += 1
        self.seen_ms = self.simulation.now_ms
        try:
            self._write()
            self._transact()
            self._read(0, self.written)
            self._read(1, self.committed_values)
            self._commit()
            response = self.ask(wire.HEARTBEAT, 3, **self.member_fields)
            assert not response.error_code, response
        except InvariantViolated:
            raise
        except Exception as error:
            raise InvariantViolated(
                f"the honest client is refused: {error!r}"
            ) from error

    def _write(self) -> None:
        value = b"%d" % self.rounds
        records = recordbatch.encode([(None, value, (), self.simulation.now_ms)])
        part = {"index": 0, "records": records}
        fields = {
            "acks": -1,
            "timeout_ms": 1_000,
            "topic_data": [{"name": self.topic, "partition_data": [part]}],
        }
        (partition_response,) = (
            self.ask(wire.PRODUCE, 9, **fields).responses[0].partition_responses
        )
        assert (partition_response.error_code, partition_response.base_offset) == (
            0,
            len(self.written),
        ), partition_response
        self.written.append(value)

    def _transact(self) -> None:
        value = b"%d" % self.rounds
        producer_fields = {
            "producer_id": self.producer.producer_id,
            "producer_epoch": self.producer.producer_epoch,
        }
        records = recordbatch.encode(
            [(None, value, (), self.simulation.now_ms)],
            transactional=True,
            base_sequence=0,
            **producer_fields,
        )
        part = {"index": 1, "records": records}
        topic = {"name": self.topic, "partition_data": [part]}
        fields = {
            "transactional_id": "id-of-the-honest-client",
            "acks": -1,
            "timeout_ms": 1_000,
            "topic_data": [topic],
        }
        (partition_response,) = (
            self.ask(wire.PRODUCE, 12, **fields).responses[0].partition_responses
        )
        assert not partition_response.error_code, partition_response
        commits = self.rounds % 3 != 0
        self.producer = self.ask(
            wire.END_TXN,
            5,
            transactional_id="id-of-the-honest-client",
            committed=commits,
            **producer_fields,
        )
        assert not self.producer.error_code, self.producer
        if commits:
            self.committed_values.append(value)

    def _read(self, partition: int, expected: list[bytes]) -> None:
        """Read the last few records. Earlier rounds have read the earlier ones."""
        start = max(0, 2 * self.rounds - 20) if partition else max(0, self.rounds - 10)
        requested = {
            "partition": partition,
            "fetch_offset": start,
            "partition_max_bytes": 1 << 20,
        }
        response = self.ask(
            wire.FETCH,
            11,
            max_bytes=1 << 20,
            isolation_level=1,
            topics=[{"topic": self.topic, "partitions": [requested]}],
        )
        part = response.responses[0].partitions[0]
        assert not part.error_code, part
        aborted = {
            (transaction.producer_id, transaction.first_offset)
            for transaction in part.aborted_transactions or ()
        }
        found: list[bytes] = []
        for batch in recordbatch.read_batches(part.records):
            is_dropped = (batch.producer_id, batch.base_offset) in aborted
            if batch.base_offset >= start and not batch.is_control and not is_dropped:
                found += [bytes(record.value or b"") for record in batch.records()]
        assert found == expected[len(expected) - len(found) :], (found, expected[-20:])
        assert found, "no record was read"

    def _commit(self) -> None:
        part = {
            "partition_index": 0,
            "committed_offset": self.rounds,
            "committed_metadata": "",
        }
        topics = [{"name": self.topic, "partitions": [part]}]
        member_fields = {
            **self.member_fields,
            "generation_id_or_member_epoch": self.member_fields["generation_id"],
        }
        del member_fields["generation_id"]
        (partition_response,) = (
            self.ask(wire.OFFSET_COMMIT, 7, topics=topics, **member_fields)
            .topics[0]
            .partitions
        )
        assert not partition_response.error_code, partition_response
        requested = [{"name": self.topic, "partition_indexes": [0]}]
        (found,) = (
            self.ask(wire.OFFSET_FETCH, 5, group_id=self.group, topics=requested)
            .topics[0]
            .partitions
        )
        assert found.committed_offset == self.rounds, found


class HostileSimulation:
    """One broker and its clients. `changes_per_frame` is the number of changed copies of
    each frame of a script.
    """

    def __init__(
        self,
        seed: int,
        changes_per_frame: int,
        errors: LoggedErrors,
        durability: str = "os",
        *,
        is_secured: bool = False,
    ) -> None:
        self.is_secured = is_secured
        self.rng = random.Random(seed)
        self.changes_per_frame = changes_per_frame
        self.errors = errors
        self.now_ms = _T0_MS
        self.submitted: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self.correlation_id = 1_000_000_000
        self.login_frames = _login_frames()
        self.outcomes: Counter[str] = Counter()
        self.frames = 0
        self.most_bytes = 0
        #: Frames that scripts have sent.
        self.seen: deque[bytes] = deque([bytes(20)], maxlen=200)
        #: Connections with a waiting request.
        self.parked: deque[WireClient] = deque()
        disk = SimulatedDisk({PATH: None}, seed=seed)
        self.logdir = logcore.open_dir(PATH, fs=disk, durability=durability)
        settings = Settings(
            max_request_bytes=1 << 20,
            auto_create_topics=False,
            max_partitions_per_request=20,
        )
        ids = itertools.count()
        self.broker = Broker(
            self.logdir,
            settings,
            self.submit,
            lambda: f"id-{next(ids)}",
            security=_security(disk) if is_secured else None,
        )
        if not is_secured:
            # Without access control, every client may set quotas for all clients. Quotas
            # are stored here, and not enforced, so that the honest client is not slowed
            # down.
            quotas = self.broker.state.security.quotas
            quotas.set_bounds = lambda _: None  # type: ignore[method-assign]
        self.budget = ConnectionMemory(64 << 20)
        self.workload = Workload(8, self.budget)
        self.broker.tick(self.now_ms)
        self.run()
        self.honest = HonestClient(self)
        self.client = self.new_client()

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.submitted.append((work, done))

    def run(self) -> None:
        """Run the submitted work."""
        while self.submitted:
            work, done = self.submitted.popleft()
            try:
                result = work()
            except Exception as error:
                result = error
            done(result)

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        self.broker.tick(self.now_ms)
        self.run()
        if self.now_ms - self.honest.seen_ms >= _HONEST_MS:
            self.honest.round()

    # -- malicious clients

    def new_client(self) -> WireClient:
        if self.is_secured and not self.rng.randrange(_UNAUTHENTICATED_SHARE):
            return self.unauthenticated_client()
        return WireClient(self)

    def unauthenticated_client(self) -> WireClient:
        """Return a client that has sent up to two requests of a login, and has not logged
        in.
        """
        while True:
            client = WireClient(self, None)
            try:
                for _ in range(self.rng.randrange(3)):
                    self.send_unauthenticated(
                        client, self.rng.choice(self.login_frames)
                    )
                return client
            except CloseConnection:
                client.close()

    def send_changed_copies(self, frame: bytes) -> None:
        sources = [Variants(frame, self.seen, self.rng)]
        if self.is_secured and self.honest.sent:
            honest = self.rng.choice(self.honest.sent)
            sources.append(Variants(honest, self.seen, self.rng))
        self.seen.append(frame)
        for number in range(self.changes_per_frame):
            sent = sources[number % len(sources)].draw()
            if self.client.is_unauthenticated and self.rng.randrange(4):
                login = self.rng.choice(self.login_frames)
                sent = mutate(login, self.login_frames, self.rng)
            self.frames += 1
            most_before = most_resident_bytes()
            try:
                self.outcomes[self.send(sent)] += 1
                grown = most_resident_bytes() - most_before
                if grown > _FRAME_BYTES:
                    raise InvariantViolated(
                        f"a frame of {len(sent)} bytes took {grown} bytes of memory"
                    )
            except Exception as error:
                error.add_note(f"frame {self.frames}: {sent.hex()}")
                raise
            if self.errors.found:
                raise InvariantViolated(
                    f"frame {self.frames}: {sent.hex()}: {self.errors.found}"
                )
            if self.frames % _ROUND_FRAMES == 0:
                self.round()

    def send(self, frame: bytes) -> str:
        """Send a frame, and return its outcome."""
        client = self.client
        try:
            if client.is_unauthenticated:
                self.send_unauthenticated(client, frame)
                return "unknown"
            client.feed(frame)
            answered = sum(1 for _ in client.responses())
        except CloseConnection:
            self._end(client)
            return "unknown, closed" if client.is_unauthenticated else "closed"
        if client.connection.overdue(self.now_ms) is not None:
            self._end(client)
            return "closed later"
        if not client.connection.is_idle:
            self.parked.append(client)
            self.client = self.new_client()
            return "waiting"
        return "answered" if answered else "silent"

    def send_unauthenticated(self, client: WireClient, frame: bytes) -> None:
        """Send a frame of a client that has not logged in. It reaches no handler.

        The responses are not decoded, because some of them are tokens without a header.

        Raises:
            CloseConnection: the broker closes the connection.
        """
        self.broker.last_api = "none"
        try:
            client.feed(frame)
        finally:
            if self.broker.last_api not in ("none", "ApiVersions"):
                raise InvariantViolated(
                    f"a request reached {self.broker.last_api} without login"
                )
        authentication = client.session.authentication
        if authentication is None or authentication.is_authenticated:
            raise InvariantViolated("a client without a password is logged in")
        while client.connection.next_buffer() is not None:
            pass
        # A failed login gets its response after a delay. Then the connection ends.
        if client.session.is_closing or not client.connection.is_idle:
            raise CloseConnection("the login has failed")

    def _end(self, client: WireClient) -> None:
        client.close()
        if client is self.client:
            self.client = self.new_client()

    def round(self) -> None:
        self.pass_time(_ROUND_MS)
        self.honest.round()
        for client in list(self.parked):
            for _ in client.responses():
                pass
            if client.connection.is_idle:
                self.parked.remove(client)
                client.close()
        while len(self.parked) > _MAX_PARKED:
            self.parked.popleft().close()
        self.most_bytes = max(self.most_bytes, resident_bytes())

    # -- a run

    def run_scripts(self) -> None:
        """Run all scripts once, in random order."""
        scripts: list[tuple[Api[Any, Any], int, Script]] = []
        for api in served():
            for version in range(api.min_version, api.max_version + 1):
                scripts += [(api, version, script) for script in SCRIPTS[api]]
        self.rng.shuffle(scripts)
        for number, (api, version, script) in enumerate(scripts):
            self.run_script(api, version, script, number)
        self.end()

    def run_script(
        self, api: Api[Any, Any], version: int, script: Script, number: int
    ) -> None:
        scripted = ScriptRun(self, api, version, number)
        try:
            script(scripted)
        except InvariantViolated:
            raise
        except Exception as error:  # malicious clients have disturbed the script
            self.outcomes[f"disturbed {type(error).__name__}"] += 1
        finally:
            scripted.close()

    def end(self) -> None:
        self.round()
        for client in [*self.parked, self.client]:
            client.close()
        self.broker.stop(self.now_ms)
        self.run()
        self.honest.client.close()
        self.broker.state.security.close()
        self.logdir.close()
        if self.budget.used_bytes:
            raise InvariantViolated(f"{self.budget.used_bytes} bytes are not released")
        if self.workload.count:
            raise InvariantViolated(
                f"{self.workload.count} finished requests count as running"
            )
        if self.errors.found:
            raise InvariantViolated(f"{self.errors.found}")


def most_resident_bytes() -> int:
    """Return the largest memory of this process so far, or 0 if the system does not
    report it in a known unit.
    """
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if sys.platform == "linux"
        else 0
    )


def resident_bytes() -> int:
    """Return the memory of this process, or 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
