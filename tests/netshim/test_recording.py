"""Recordings of traffic: the frames, the file, secrets, and disks that fail."""

from __future__ import annotations

import base64
import contextlib
import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import InvalidConfigError
from logcore.fs import Data, OsFS
from netshim import wire
from netshim.follow.connection import ClientSettings, SourceConnection
from netshim.listeners import Listener
from netshim.recording import secrets
from netshim.recording.recorder import TrafficRecorder
from netshim.recording.traffic_file import (
    RecordingError,
    TrafficFile,
    TrafficKind,
    TrafficRecord,
)
from netshim.security import scram
from netshim.security.service import SecuritySettings
from netshim.session import ClientSession
from netshim.testing import Kafka
from support.client import Client

confluent_kafka = pytest.importorskip("confluent_kafka")

PASSWORD = "correct horse battery"


def read(path: str | Path) -> list[TrafficRecord]:
    with TrafficFile(path) as file:
        return list(file)


def frames(records: list[TrafficRecord], kind: TrafficKind) -> list[bytes]:
    return [record.payload for record in records if record.kind is kind]


class SpyingClient(Client):
    """A client that keeps the bytes of its requests and responses."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.sent: list[bytes] = []
        self.received: list[bytes] = []

    def send(self, api: Any, version: int, request: Any) -> None:
        following = self.correlation_id + 1
        self.sent.append(wire.encode_request(api, version, following, "test", request))
        super().send(api, version, request)

    def read_frame(self) -> bytes:
        frame = super().read_frame()
        self.received.append(len(frame).to_bytes(4, "big") + frame)
        return frame


def test_frames_are_recorded_as_sent(kafka: Kafka, tmp_path: Path) -> None:
    with kafka.record(tmp_path / "t.ksh") as recording:
        client = SpyingClient(kafka.port)
        client.create()
        client.produce([b"4 apples", b"x" * 100_000])
        client.produce([b"no answer"], acks=0)
        client.fetch(0)
        client.close()
    records = read(recording.path)
    assert frames(records, TrafficKind.REQUEST) == client.sent
    assert frames(records, TrafficKind.RESPONSE) == client.received
    assert {record.connection for record in records[:-1]} == {1}
    times = [record.time_ns for record in records]
    assert times == sorted(times) and times[0] >= 0
    assert records[0].fields()["listener"] == "PLAINTEXT"
    assert records[0].fields()["peer"].startswith("127.0.0.1:")
    assert not any(record.is_redacted for record in records)
    with TrafficFile(recording.path) as file:
        assert not file.is_complete
        list(file)
        assert file.is_complete and file.incomplete_bytes == 0
        assert file.start_ms > 1_700_000_000_000


def test_recording_begins_and_ends_between_requests(
    kafka: Kafka, tmp_path: Path
) -> None:
    client = SpyingClient(kafka.port)
    client.create()
    with kafka.record(tmp_path / "first.ksh"):
        client.produce([b"4 apples"])
    client.produce([b"unseen"])
    with kafka.record(tmp_path / "second.ksh"):
        client.produce([b"2 pears"])
    kafka.record(tmp_path / "third.ksh")
    client.produce([b"3 plums"])
    kafka.stop()
    recorded = [
        frames(read(tmp_path / f"{name}.ksh"), TrafficKind.REQUEST)
        for name in ("first", "second", "third")
    ]
    assert recorded == [client.sent[1:2], client.sent[3:4], client.sent[4:5]]
    client.close()


def test_file_must_be_new_and_one_recording_at_a_time(
    kafka: Kafka, tmp_path: Path
) -> None:
    (tmp_path / "old.ksh").write_bytes(b"x")
    with pytest.raises(InvalidConfigError, match="expected a new file"):
        kafka.record(tmp_path / "old.ksh")
    with pytest.raises(InvalidConfigError, match="in a directory that exists"):
        kafka.record(tmp_path / "missing" / "new.ksh")
    twice = pytest.raises(logcore.errors.ResourceError, match="one recording at a")
    with kafka.record(tmp_path / "first.ksh"), twice:
        kafka.record(tmp_path / "second.ksh")
    assert not (tmp_path / "second.ksh").exists()
    with kafka.namespace() as inner, pytest.raises(RuntimeError, match="shared"):
        inner.record(tmp_path / "third.ksh")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such modes")
def test_only_the_owner_reads_a_recording(kafka: Kafka, tmp_path: Path) -> None:
    with kafka.record(tmp_path / "traffic.ksh"):
        assert (tmp_path / "traffic.ksh").stat().st_mode & 0o777 == 0o600


def test_file_system_without_permissions_is_refused(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, mode: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)

    monkeypatch.setattr(os, "chmod", refuse)
    with pytest.raises(InvalidConfigError, match="a file system with permissions"):
        kafka.record(tmp_path / "traffic.ksh")


@pytest.mark.long
def test_nothing_is_loaded_without_a_recording(tmp_path: Path) -> None:
    script = (
        "import sys, threading, netshim\n"
        "with netshim.serve(sys.argv[1]):\n"
        "    found = [one for one in sys.modules if 'netshim.re' in one]\n"
        "    assert not any('recording' in one or 'replay' in one for one in found)\n"
        "    names = [one.name for one in threading.enumerate()]\n"
        "    assert 'netshim-recorder' not in names, names\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "data")], check=True, timeout=60
    )


@pytest.mark.long
def test_serve_records_until_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "netshim", "serve", str(tmp_path / "data")]
    command += ["--port", "0", "--record", str(tmp_path / "t.ksh")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        client = SpyingClient(port)
        client.create()
        client.close()
        process.terminate()
        assert process.wait(60) == 0
    assert frames(read(tmp_path / "t.ksh"), TrafficKind.REQUEST) == client.sent
    again = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60
    )
    assert again.returncode == 2 and "expected a new file" in again.stderr


# -- disks -----------------------------------------------------------------------------


def test_full_disk_ends_the_recording_and_not_the_broker(
    kafka: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "netshim")
    recording = kafka.record(Path(kafka.logdir.path) / "t.ksh")
    client = Client(kafka.port)
    client.create()
    with kafka.faults() as faults:
        full = faults.disk("pwrite", "ENOSPC", path="*.ksh")
        for _ in range(20):
            assert client.produce([b"x" * 100_000]).error_code == 0
        full.wait()
        with pytest.raises(logcore.errors.DiskFullError):
            recording.close()
    assert client.produce([b"after it"]).error_code == 0
    errors = [message for message in caplog.messages if "recording" in message]
    assert len(errors) == 1 and "has stopped; the broker continues" in errors[0]
    client.close()


class StalledFiles(OsFS):
    """Files whose writes wait for an event, after the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.writes = 0

    def pwrite(self, handle: int, data: Data, position: int) -> None:
        self.writes += 1
        if self.writes > 1:
            assert self.may_write.wait(60)
        super().pwrite(handle, data, position)


def test_slow_disk_stops_the_recording_before_memory_is_used_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = StalledFiles()
    recorder = TrafficRecorder(
        tmp_path / "t.ksh", fs=files, max_pending_bytes=2_000_000
    )
    count = 0
    while recorder.is_recording:  # no append waits for the disk
        recorder.append(TrafficKind.REQUEST, 1, (b"x" * 100_000,))
        count += 1
        assert count < 100
    assert count == 21
    assert isinstance(recorder.failure, logcore.errors.ResourceError)
    files.may_write.set()
    recorder.close()
    (line,) = [message for message in caplog.messages if "recording" in message]
    assert "the disk is slower than the traffic" in line
    # The block that was being written is whole.
    assert len(read(tmp_path / "t.ksh")) in (0, 6)


# -- the file --------------------------------------------------------------------------


def small_recording(path: Path) -> list[TrafficRecord]:
    """Write a recording of three blocks."""
    files = StalledFiles()
    files.may_write.set()
    recorder = TrafficRecorder(path, fs=files)
    for number in range(3):
        size = 550_000 if number < 2 else 100
        recorder.append(TrafficKind.REQUEST, number, (bytes([number]) * size,))
    recorder.close()
    return read(path)


def test_file_that_was_cut_off_is_read_up_to_its_last_block(tmp_path: Path) -> None:
    whole = small_recording(tmp_path / "t.ksh")
    assert [record.kind for record in whole] == [TrafficKind.REQUEST] * 3 + [
        TrafficKind.END
    ]
    data = (tmp_path / "t.ksh").read_bytes()
    counts = set()
    for size in range(len(data)):
        (tmp_path / "cut.ksh").write_bytes(data[:size])
        if size < 20:
            with pytest.raises(RecordingError, match="not a recording"):
                read(tmp_path / "cut.ksh")
            continue
        with TrafficFile(tmp_path / "cut.ksh") as file:
            records = list(file)
            assert records == whole[: len(records)] and not file.is_complete
        counts.add(len(records))
    assert counts == {0, 1, 2}


def test_damage_is_found_with_its_position(tmp_path: Path) -> None:
    whole = small_recording(tmp_path / "t.ksh")
    data = (tmp_path / "t.ksh").read_bytes()
    messages = set()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        (tmp_path / "bad.ksh").write_bytes(damaged)
        records: list[TrafficRecord] = []
        try:
            with TrafficFile(tmp_path / "bad.ksh") as file:
                records.extend(file)
        except RecordingError as error:
            assert error.position is not None and error.path is not None
            assert error.position <= position
            messages.add(error.reason.split(":")[0])
        else:
            # The wall clock at the start, or a size that reaches after the end.
            assert 12 <= position < 20 or file.incomplete_bytes
        assert records == whole[: len(records)]
    assert {"not a recording", "a damaged block"} < messages
    assert "a recording of another version" in messages


def test_malformed_records_are_refused(tmp_path: Path) -> None:
    from netshim.recording.traffic_file import RECORD_HEADER, encode_block, file_header

    def check(content: bytes, words: str) -> None:
        (tmp_path / "t.ksh").write_bytes(file_header(0) + encode_block(content))
        with pytest.raises(RecordingError, match=words):
            read(tmp_path / "t.ksh")

    check(b"short", "its header is incomplete")
    check(RECORD_HEADER.pack(5, 2, 0, 1, 0) + b"1234", "longer than its block")
    check(RECORD_HEADER.pack(0, 9, 0, 1, 0), "unknown kind 9")
    check(RECORD_HEADER.pack(2, 1, 0, 1, 0) + b"[]", "malformed JSON")
    check(RECORD_HEADER.pack(2, 1, 0, 1, 0) + b"{]", "malformed JSON")


# -- secrets ---------------------------------------------------------------------------


class SpyingSource(SourceConnection):
    """A connection that keeps the tokens of its login."""

    def __init__(self, *arguments: Any) -> None:
        self.tokens: list[bytes] = []
        super().__init__(*arguments)

    def _authenticate(self, token: bytes) -> bytes:
        challenge = super()._authenticate(token)
        self.tokens += [token, challenge]
        return challenge


@pytest.fixture
def secured(
    kafka_factory: Callable[..., Kafka], tmp_path: Path
) -> Iterator[tuple[Kafka, Any]]:
    """A broker with SASL and without TLS, and the issuer of its bearer tokens."""
    tokens = pytest.importorskip("support.tokens")
    issuer = tokens.TokenIssuer()
    keys = tmp_path / "keys.json"
    keys.write_text(issuer.jwks())
    kafka = kafka_factory(
        listeners=[Listener("SASL_PLAINTEXT", "127.0.0.1", 0, "SASL_PLAINTEXT")],
        security=SecuritySettings(
            mechanisms=("PLAIN", *scram.HASHES, "OAUTHBEARER"),
            oauth_jwks=str(keys),
            oauth_audience="logs",
            oauth_issuer="tests",
        ),
    )
    security = kafka.server.server.security
    salts: list[bytes] = []

    def random(size: int) -> bytes:
        salts.append(b"s" * size)
        return salts[-1]

    credentials = scram.credentials_of(PASSWORD, scram.MIN_ITERATIONS, random)
    security.store().set_credentials("alice", credentials)
    kafka.server.call(lambda: security.publish(security.store().load()))
    yield kafka, issuer


def content(path: str | Path) -> bytes:
    """Return all payloads of a recording."""
    return b"".join(record.payload for record in read(path))


def assert_absent(path: str | Path, hidden: list[bytes]) -> None:
    data = content(path)
    assert b"in the clear" in data  # the search finds recorded bytes
    for value in hidden:
        assert len(value) > 3 and value not in data, value
        assert base64.b64encode(value) not in data
    raw = Path(path).read_bytes()
    assert not any(data in raw for data in hidden)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_recording_has_no_password_and_no_proof(
    secured: tuple[Kafka, Any], tmp_path: Path, mechanism: str
) -> None:
    kafka, _ = secured
    login = ClientSettings(
        protocol="SASL_PLAINTEXT",
        mechanism=mechanism,
        username="alice",
        password=PASSWORD,
    )
    with kafka.record(tmp_path / "t.ksh") as recording:
        source = SpyingSource("127.0.0.1", kafka.port, login)
        topics = [wire.METADATA.Request.Topic(name="in the clear")]
        source.request(wire.METADATA, wire.METADATA.Request(topics=topics))
        source.close()
    parts = [part for token in source.tokens for part in token.split(b",")]
    hidden = [PASSWORD.encode(), *filter(None, source.tokens), *parts]
    assert_absent(recording.path, [data for data in hidden if len(data) > 8])
    cut = [record for record in read(recording.path) if record.is_redacted]
    # SaslHandshake, and each token with its response
    assert len(cut) == 1 + len(source.tokens)


def test_recording_has_no_bearer_token(
    secured: tuple[Kafka, Any], tmp_path: Path
) -> None:
    kafka, issuer = secured
    token = issuer.token("alice")
    with kafka.record(tmp_path / "t.ksh") as recording:
        client = Client(kafka.port)
        request = wire.SASL_HANDSHAKE.Request(mechanism="OAUTHBEARER")
        assert not client.ask(wire.SASL_HANDSHAKE, 1, request).error_code
        data = f"n,,\x01auth=Bearer {token}\x01\x01".encode()
        request = wire.SASL_AUTHENTICATE.Request(auth_bytes=data)
        assert not client.ask(wire.SASL_AUTHENTICATE, 2, request).error_code
        topics = [wire.METADATA.Request.Topic(name="in the clear")]
        client.ask(wire.METADATA, 9, wire.METADATA.Request(topics=topics))
        client.close()
    assert_absent(recording.path, [data, *map(str.encode, token.split("."))])


def test_recording_has_no_bare_token(
    secured: tuple[Kafka, Any], tmp_path: Path
) -> None:
    """After SaslHandshake 0, tokens are frames without a header."""
    kafka, _ = secured
    with kafka.record(tmp_path / "t.ksh") as recording:
        client = Client(kafka.port)
        request = wire.SASL_HANDSHAKE.Request(mechanism="PLAIN")
        assert not client.ask(wire.SASL_HANDSHAKE, 0, request).error_code
        token = f"\0alice\0{PASSWORD}".encode()
        client.sock.sendall(len(token).to_bytes(4, "big") + token)
        assert client.read_frame() == b""
        topics = [wire.METADATA.Request.Topic(name="in the clear")]
        client.ask(wire.METADATA, 9, wire.METADATA.Request(topics=topics))
        client.close()
    assert_absent(recording.path, [token, PASSWORD.encode(), b"alice"])


def test_recording_has_no_failed_login(
    secured: tuple[Kafka, Any], tmp_path: Path
) -> None:
    kafka, _ = secured
    token = b"\0alice\0almost " + PASSWORD.encode()
    with kafka.record(tmp_path / "t.ksh") as recording:
        client = Client(kafka.port)
        request = wire.SASL_HANDSHAKE.Request(mechanism="PLAIN")
        client.ask(wire.SASL_HANDSHAKE, 1, request)
        request = wire.SASL_AUTHENTICATE.Request(auth_bytes=token)
        assert client.ask(wire.SASL_AUTHENTICATE, 2, request).error_code == 58
        client.close()
        # A token without a handshake, and a frame that is no request.
        for frame in (token, b"\0\x03\0\x09\0\0\0\1\0\4in t" + token):
            client = Client(kafka.port)
            client.sock.sendall(len(frame).to_bytes(4, "big") + frame)
            assert client.is_closed_by_broker()
            client.close()
        client = Client(kafka.port)
        client.ask(wire.API_VERSIONS, 3, versions_of("in the clear"))
        client.close()
    assert_absent(recording.path, [token, PASSWORD.encode()])
    response = [record for record in read(recording.path) if record.is_redacted][2]
    assert response.kind is TrafficKind.RESPONSE
    assert response.payload[9:11] == (58).to_bytes(2, "big")  # the error code is kept


def versions_of(name: str) -> Any:
    return wire.API_VERSIONS.Request(
        client_software_name=name, client_software_version="1"
    )


def test_recording_has_no_stored_credentials(kafka: Kafka, tmp_path: Path) -> None:
    with kafka.record(tmp_path / "t.ksh") as recording:
        client = Client(kafka.port)
        kind = wire.ALTER_USER_SCRAM_CREDENTIALS.Request
        upsertion = kind.Upsertion(
            name="alice", mechanism=1, iterations=4_096, salt=b"the salt",
            salted_password=b"the salted password",
        )  # fmt: skip
        client.ask(wire.ALTER_USER_SCRAM_CREDENTIALS, 0, kind(upsertions=[upsertion]))
        change = wire.INCREMENTAL_ALTER_CONFIGS.Request
        config = change.Resource.Config(name="ssl.key.password", value=PASSWORD)
        resource = change.Resource(resource_type=4, resource_name="0", configs=[config])
        client.ask(wire.INCREMENTAL_ALTER_CONFIGS, 1, change(resources=[resource]))
        client.ask(wire.API_VERSIONS, 3, versions_of("in the clear"))
        client.close()
    hidden = [b"the salt", b"the salted password", PASSWORD.encode()]
    assert_absent(recording.path, hidden)


def test_repeated_correlation_id_hides_no_token(tmp_path: Path) -> None:
    """A client that uses an id twice must not get its token into the file."""
    recorder = TrafficRecorder(tmp_path / "t.ksh")
    tap = recorder.connection(ClientSession("", 0, "peer"), 1)
    metadata = b"\0\x03\0\x09\0\0\0\x05\0\0\0"
    login = b"\0\x24\0\x02\0\0\0\x05\0\0\0token"
    tap.request(memoryview(metadata), is_only_pending=True)
    tap.request(memoryview(login), is_only_pending=False)
    tap.response([b"\0\0\0\x0d\0\0\0\x05\0\0\0", b"names"])
    tap.response([b"\0\0\0\x0d\0\0\0\x05\0\0\0", b"token"])
    tap.response([b"\0\0\0\x0d\0\0\0\x06\0\0\0", b"later"])
    recorder.close()
    data = content(tmp_path / "t.ksh")
    assert b"token" not in data and b"later" in data


class FixedGate:
    """A gate in a given state."""

    def __init__(
        self, *, is_authenticated: bool = False, expects_token: bool = False
    ) -> None:
        self.is_authenticated = is_authenticated
        self.expects_token = expects_token


@pytest.mark.parametrize(
    ("key", "gate", "kept"),
    [
        (0, None, 20),
        (18, FixedGate(), 20),
        (18, FixedGate(expects_token=True), 0),
        (3, FixedGate(), 0),
        (3, FixedGate(is_authenticated=True), 20),
        (17, FixedGate(), 14),
        (36, FixedGate(), 14),
        (36, FixedGate(is_authenticated=True), 14),
        (36, None, 14),
        (38, None, 14),
        (39, None, 14),
        (40, None, 14),
        (41, None, 14),
        (51, None, 14),
        (999, None, 0),
    ],
)
def test_kept_bytes_of_a_request(key: int, gate: Any, kept: int) -> None:
    frame = key.to_bytes(2, "big") + b"\0\x01\0\0\0\x07\0\x04test" + b"secret"
    assert len(frame) == 20
    assert secrets.bytes_to_keep(memoryview(frame), gate) == kept
    assert secrets.redacted(frame, 14) == frame[:14] + bytes(6)


def test_malformed_header_of_a_secret_request_is_removed() -> None:
    for frame in (b"\0\x24", b"\0\x24\0\x01\0\0\0\x07\0\x50token", b""):
        assert secrets.bytes_to_keep(memoryview(frame), None) == 0


def test_recording_during_a_load_of_clients(kafka: Kafka, tmp_path: Path) -> None:
    """Every request of several busy connections is recorded with its response."""
    kafka.create_topic("orders", 3)
    with kafka.record(tmp_path / "t.ksh") as recording:
        producers = [
            confluent_kafka.Producer(
                {"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 0}
            )
            for _ in range(3)
        ]
        for number in range(3_000):
            producers[number % 3].produce("orders", b"x" * 200, partition=number % 3)
        assert all(producer.flush(60) == 0 for producer in producers)
    produced = 0
    waiting: dict[tuple[int, bytes], int] = {}
    for record in read(recording.path):
        key = record.connection, bytes(record.payload[4:8])
        if record.kind is TrafficKind.REQUEST:
            header = wire.decode_header(record.frame)
            waiting[record.connection, bytes(record.payload[8:12])] = header.api_key
        elif record.kind is TrafficKind.RESPONSE:
            produced += waiting.pop(key) == wire.PRODUCE.key
    assert produced >= 3
    assert wire.PRODUCE.key not in waiting.values()


def test_closed_recorder_accepts_no_more(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "t.ksh")
    recorder.close()
    recorder.close()
    recorder.append(TrafficKind.REQUEST, 1, (b"late",))
    with contextlib.closing(recorder):
        assert [record.kind for record in read(tmp_path / "t.ksh")] == [TrafficKind.END]
