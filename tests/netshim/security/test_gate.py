"""The states of authentication, frame by frame, as Apache Kafka 4.1.1 answers them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from netshim import wire
from netshim.broker import Broker
from netshim.handlers.authentication import SaslAuthentication
from netshim.scheduling import CloseConnection, PendingResponse
from netshim.security import scram
from netshim.security.service import Security, SecuritySettings
from netshim.security.stored import SecurityStore
from netshim.session import MAX_UNAUTHENTICATED_BYTES, ClientSession
from netshim.settings import Settings
from netshim.wire import codes

PASSWORD = "secret"


class Client:
    """A connection to a broker without sockets, with a clock of its own."""

    def __init__(self, path: Path, **settings: Any) -> None:
        options = {"mechanisms": ("PLAIN", "SCRAM-SHA-256"), **settings}
        self.logdir = logcore.open_dir(path, create=True, durability="os")
        self.security = Security(
            SecuritySettings(**options),
            open_store=lambda: SecurityStore(path),
            random=lambda size: b"r" * size,
            wall_ms=lambda: self.now_ms,
        )
        self.now_ms = 1_000_000
        salt = b"s" * 16
        salted = scram.salted_password("SCRAM-SHA-256", PASSWORD, salt, 4_096)
        credential = scram.credential_of("SCRAM-SHA-256", salted, salt, 4_096)
        for name in ("alice", "bob"):
            self.security.store().set_credentials(name, {"SCRAM-SHA-256": credential})
        self.security.publish(self.security.store().load())
        self.broker = Broker(
            self.logdir, Settings(), self._submit, security=self.security
        )
        self.broker.state.submit_login = self._submit
        self.connect()

    def connect(self) -> None:
        self.session = ClientSession("127.0.0.1", 9092, "127.0.0.1")
        self.session.authentication = SaslAuthentication(
            self.session, self.broker.state
        )
        self.session.frame_limit_bytes = MAX_UNAUTHENTICATED_BYTES

    def _submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            result = work()
        except Exception as error:
            result = error
        self.broker.state.advance_clock(self.now_ms)
        done(result)

    def raw(self, frame: bytes) -> Any:
        """Return the bytes of a response. The clock advances while the response is
        delayed.
        """
        reply = self.broker.handle(self.session, memoryview(frame), self.now_ms)
        if isinstance(reply, PendingResponse):
            for _ in range(200):
                if reply.is_set:
                    break
                self.now_ms += 1
                self.broker.tick(self.now_ms)
            reply = reply.value
        if isinstance(reply, CloseConnection):
            raise reply
        return b"".join(reply)

    def ask(self, api: Any, version: int, request: Any) -> Any:
        frame = wire.encode_request(api, version, 1, "test", request)[4:]
        return wire.decode_response(api, version, self.raw(bytes(frame))[4:])[1]

    def handshake(self, mechanism: str = "PLAIN", version: int = 1) -> Any:
        request = wire.SASL_HANDSHAKE.Request(mechanism=mechanism)
        return self.ask(wire.SASL_HANDSHAKE, version, request)

    def token(self, token: bytes, version: int = 2) -> Any:
        request = wire.SASL_AUTHENTICATE.Request(auth_bytes=token)
        return self.ask(wire.SASL_AUTHENTICATE, version, request)

    def log_in(self, user: str = "alice") -> Any:
        self.handshake()
        return self.token(f"\0{user}\0{PASSWORD}".encode())

    def metadata(self) -> Any:
        return self.ask(wire.METADATA, 12, wire.METADATA.Request(topics=[]))

    def close(self) -> None:
        self.security.close()
        self.logdir.close()


@pytest.fixture
def open_client(tmp_path: Path) -> Iterator[Callable[..., Client]]:
    opened: list[Client] = []

    def open_one(**settings: Any) -> Client:
        opened.append(Client(tmp_path / "data", **settings))
        return opened[-1]

    yield open_one
    for client in opened:
        client.close()


@pytest.fixture
def client(open_client: Callable[..., Client]) -> Client:
    return open_client()


def test_no_handler_is_entered_before_authentication(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test sends every API in every version, and keys that no API has."""
    entered: list[int] = []

    def note(key: int) -> Callable[..., Any]:
        return lambda *_: entered.append(key)

    handlers = {key: note(key) for key in wire.APIS}
    monkeypatch.setattr("netshim.broker.HANDLERS", handlers)
    answered = set()
    for key in range(94):
        for version in range(20):
            client.connect()
            frame = (
                key.to_bytes(2, "big") + version.to_bytes(2, "big") + bytes(4) + b"\0\0"
            )
            try:
                client.raw(frame + bytes(40))
            except CloseConnection:
                continue
            except TypeError:  # the handler of ApiVersions is replaced
                pass
            answered.add(key)
    assert entered == [wire.API_VERSIONS.key] * len(entered)
    assert answered <= {wire.API_VERSIONS.key, wire.SASL_HANDSHAKE.key}


def test_plain_password_is_accepted(client: Client) -> None:
    response = client.handshake()
    assert response.mechanisms == ["PLAIN", "SCRAM-SHA-256"]
    accepted = client.token(b"\0alice\0secret")
    assert (accepted.error_code, accepted.session_lifetime_ms) == (0, 0)
    assert client.session.principal == "User:alice"
    assert client.session.frame_limit_bytes is None
    assert client.metadata().cluster_id is not None


@pytest.mark.parametrize(
    "token",
    [
        b"\0alice\0wrong",
        b"\0nobody\0secret",
        b"bob\0alice\0secret",
        b"\0\0secret",
        b"\0alice\0",
        b"alice",
        b"\0alice\0secret\0more",
        b"\xff\0alice\0secret",
        b"\0alice\0" + b"x" * 5_000,
        b"",
    ],
)
def test_bad_plain_token_is_answered_late_and_closes_the_connection(
    client: Client, token: bytes
) -> None:
    client.handshake()
    began_ms = client.now_ms
    response = client.token(token)
    assert response.error_code == codes.SASL_AUTHENTICATION_FAILED
    assert response.error_message == "Authentication failed with PLAIN"
    assert client.now_ms - began_ms == 100
    assert client.session.is_closing and client.session.principal == "User:ANONYMOUS"


def scram_messages(client: Client, password: str, user: str = "alice") -> Any:
    """Return the response to the final message of a whole exchange."""
    client.handshake("SCRAM-SHA-256")
    bare = f"n={user},r=abcdef"
    server_first = bytes(client.token(b"n,," + bare.encode()).auth_bytes)
    fields = dict(part.split("=", 1) for part in server_first.decode().split(","))
    salted = hashlib.pbkdf2_hmac(
        "sha256", password.encode(), base64.b64decode(fields["s"]), int(fields["i"])
    )
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    stored_key = hashlib.sha256(client_key).digest()
    without_proof = f"c=biws,r={fields['r']}".encode()
    signed = b",".join((bare.encode(), server_first, without_proof))
    signature = hmac.digest(stored_key, signed, "sha256")
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    return client.token(without_proof + b",p=" + base64.b64encode(proof))


def test_scram_proof_is_accepted(client: Client) -> None:
    response = scram_messages(client, PASSWORD)
    assert response.error_code == 0
    assert bytes(response.auth_bytes).startswith(b"v=")
    assert client.session.principal == "User:alice"


@pytest.mark.parametrize(("user", "password"), [("alice", "no"), ("nobody", PASSWORD)])
def test_wrong_scram_proof_and_unknown_user_get_the_same_answer(
    client: Client, user: str, password: str
) -> None:
    response = scram_messages(client, password, user)
    assert response.error_code == codes.SASL_AUTHENTICATION_FAILED
    assert response.error_message == "Authentication failed with SCRAM-SHA-256"


def test_unknown_mechanism_is_answered_with_the_list(client: Client) -> None:
    response = client.handshake("GSSAPI")
    assert response.error_code == codes.UNSUPPORTED_SASL_MECHANISM
    assert response.mechanisms == ["PLAIN", "SCRAM-SHA-256"]
    assert client.session.is_closing


@pytest.mark.parametrize("mechanism", ["plain", "", "x" * 30_000])
def test_mechanism_names_are_exact(client: Client, mechanism: str) -> None:
    response = client.handshake(mechanism)
    assert response.error_code == codes.UNSUPPORTED_SASL_MECHANISM


def test_second_api_versions_closes_the_connection(client: Client) -> None:
    request = wire.API_VERSIONS.Request(
        client_software_name="t", client_software_version="1"
    )
    assert client.ask(wire.API_VERSIONS, 3, request).error_code == 0
    with pytest.raises(CloseConnection):
        client.ask(wire.API_VERSIONS, 3, request)


def test_refused_api_versions_may_be_repeated(client: Client) -> None:
    bad = wire.API_VERSIONS.Request(
        client_software_name="-", client_software_version="1"
    )
    assert client.ask(wire.API_VERSIONS, 3, bad).error_code == codes.INVALID_REQUEST
    assert client.ask(wire.API_VERSIONS, 0, wire.API_VERSIONS.Request()).error_code == 0


@pytest.mark.parametrize(
    ("api", "version", "request_"),
    [
        (wire.SASL_HANDSHAKE, 1, wire.SASL_HANDSHAKE.Request(mechanism="PLAIN")),
        (wire.API_VERSIONS, 0, wire.API_VERSIONS.Request()),
        (wire.LIST_GROUPS, 2, wire.LIST_GROUPS.Request()),
    ],
)
def test_other_request_after_handshake_is_answered_and_closes_the_connection(
    client: Client, api: Any, version: int, request_: Any
) -> None:
    client.handshake()
    response = client.ask(api, version, request_)
    assert response.error_code == codes.ILLEGAL_SASL_STATE
    assert client.session.is_closing


@pytest.mark.parametrize("version", [-1, 99])
def test_unserved_api_versions_after_handshake_closes_the_connection(
    client: Client, version: int
) -> None:
    """The header of such a request is decoded in every version, but no response can be
    encoded.
    """
    client.handshake()
    key = wire.API_VERSIONS.key.to_bytes(2, "big")
    with pytest.raises(CloseConnection):
        client.raw(key + version.to_bytes(2, "big", signed=True) + bytes(6))


def test_tokens_after_handshake_0_are_bare_frames(client: Client) -> None:
    assert client.handshake(version=0).error_code == 0
    assert client.raw(b"\0alice\0secret") == bytes(4)
    assert client.metadata().cluster_id is not None


def test_bad_bare_token_closes_without_an_answer(client: Client) -> None:
    client.handshake(version=0)
    with pytest.raises(CloseConnection):
        client.raw(b"\0alice\0wrong")


def test_sasl_after_authentication_is_refused(
    client: Client,
) -> None:
    client.log_in()
    assert client.handshake().error_code == codes.ILLEGAL_SASL_STATE
    assert client.token(b"\0bob\0secret").error_code == codes.ILLEGAL_SASL_STATE
    assert client.metadata().cluster_id is not None
    assert client.session.principal == "User:alice"


def test_expired_authentication_closes_at_the_next_request(
    open_client: Callable[..., Client],
) -> None:
    client = open_client(connections_max_reauth_ms=3_000)
    assert client.log_in().session_lifetime_ms == 3_000
    client.now_ms += 2_999
    assert client.metadata().cluster_id is not None
    client.now_ms += 1
    with pytest.raises(CloseConnection, match="expired"):
        client.metadata()


def test_client_may_authenticate_again_as_the_same_user(
    open_client: Callable[..., Client],
) -> None:
    client = open_client(connections_max_reauth_ms=3_000)
    client.log_in()
    for _ in range(10):
        client.now_ms += 5_000
        assert client.log_in().session_lifetime_ms == 3_000
        assert client.metadata().cluster_id is not None


def test_another_user_or_mechanism_closes_the_connection(
    open_client: Callable[..., Client],
) -> None:
    client = open_client(connections_max_reauth_ms=3_000)
    client.log_in("alice")
    with pytest.raises(CloseConnection, match="another user"):
        client.log_in("bob")
    client.connect()
    client.log_in("alice")
    with pytest.raises(CloseConnection, match="another mechanism"):
        client.handshake("SCRAM-SHA-256")


def test_deleted_user_cannot_log_in_again(client: Client) -> None:
    client.log_in()
    client.security.store().set_credentials("alice", {"SCRAM-SHA-256": None})
    client.security.publish(client.security.store().load())
    client.connect()
    assert client.log_in().error_code == codes.SASL_AUTHENTICATION_FAILED


def test_credential_changed_during_an_exchange_is_refused(client: Client) -> None:
    client.handshake("SCRAM-SHA-256")
    client.token(b"n,,n=alice,r=abc")
    exchange = client.session.authentication._exchange  # type: ignore[union-attr]
    salted = scram.salted_password("SCRAM-SHA-256", "new", b"n" * 16, 4_096)
    changed = scram.credential_of("SCRAM-SHA-256", salted, b"n" * 16, 4_096)
    client.security.store().set_credentials("alice", {"SCRAM-SHA-256": changed})
    client.security.publish(client.security.store().load())
    assert exchange._exchange.credential != changed
    response = client.token(b"c=biws,r=abc,p=AAAA")
    assert response.error_code == codes.SASL_AUTHENTICATION_FAILED


def store_alice(client: Client, mechanism: str, password: str, **fields: Any) -> None:
    """Replace the only credential of alice, and delete bob."""
    salt = fields.get("salt", b"s" * 16)
    iterations = fields.get("iterations", 4_096)
    salted = scram.salted_password(mechanism, password, salt, iterations)
    credential = scram.credential_of(mechanism, salted, salt, iterations)
    store = client.security.store()
    store.set_credentials("bob", {"SCRAM-SHA-256": None})
    store.set_credentials("alice", {"SCRAM-SHA-256": None})
    store.set_credentials("alice", {mechanism: credential})
    client.security.publish(store.load())


def test_former_password_with_the_new_salt_is_refused(
    client: Client,
) -> None:
    """Correct passwords are cached for a minute, and the cache was searched by salt."""
    assert client.log_in().error_code == 0
    store_alice(client, "SCRAM-SHA-256", "new")
    client.connect()
    assert client.log_in().error_code == codes.SASL_AUTHENTICATION_FAILED


def test_password_changed_during_a_login_is_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The login waits for a thread while the password is changed."""
    submit = client.broker.state.submit_login

    def submit_after_change(work: Any, done: Any) -> None:
        store_alice(client, "SCRAM-SHA-256", "new")
        submit(work, done)

    monkeypatch.setattr(client.broker.state, "submit_login", submit_after_change)
    assert client.log_in().error_code == codes.SASL_AUTHENTICATION_FAILED


def challenged(client: Client, user: str, mechanism: str) -> tuple[int, int, bool]:
    """Return the iterations, the size of the salt, and whether the salt is text."""
    client.connect()
    client.handshake(mechanism)
    message = bytes(client.token(f"n,,n={user},r=abc".encode()).auth_bytes)
    fields = dict(part.split("=", 1) for part in message.decode().split(","))
    salt = base64.b64decode(fields["s"])
    return int(fields["i"]), len(salt), salt.isalnum()


@pytest.mark.parametrize("salt", [b"s" * 64, b"\xff" * 24, b"1" + b"z" * 25])
def test_challenge_of_an_unknown_user_has_the_form_of_a_stored_credential(
    open_client: Callable[..., Client], salt: bytes
) -> None:
    """Salts of Kafka's tools are text, and their iterations may be given."""
    client = open_client(mechanisms=("SCRAM-SHA-512",))
    store_alice(client, "SCRAM-SHA-512", PASSWORD, salt=salt, iterations=8_192)
    iterations, size, is_text = challenged(client, "alice", "SCRAM-SHA-512")
    for number in range(30):
        challenge = challenged(client, f"nobody{number}", "SCRAM-SHA-512")
        assert challenge[0] == iterations == 8_192
        if len(salt) == 26:
            # 130 random bits in base 36. Each digit less is 36 times as rare: 23 digits
            # occurred once in some hundred runs.
            assert 18 <= challenge[1] <= 26
            assert challenge[2] is is_text
        else:
            assert challenge[1] == size


def test_plain_derives_the_same_keys_for_an_unknown_user(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another hash or iteration count, the response time would reveal which users
    exist.
    """
    store_alice(client, "SCRAM-SHA-512", PASSWORD, iterations=8_192)
    derived = []

    def derive(mechanism: str, password: str, salt: bytes, iterations: int) -> bytes:
        derived.append((mechanism, iterations))
        return b""

    monkeypatch.setattr(scram, "salted_password", derive)
    for user in ("alice", "nobody", "somebody"):
        client.connect()
        client.handshake()
        client.token(f"\0{user}\0wrong".encode())
    assert derived == [("SCRAM-SHA-512", 8_192)] * 3


@pytest.mark.parametrize("cut", range(0, 60, 3))
def test_cut_frames_close_the_connection(client: Client, cut: int) -> None:
    client.handshake()
    request = wire.SASL_AUTHENTICATE.Request(auth_bytes=b"\0alice\0secret" + b"x" * 40)
    frame = bytes(wire.encode_request(wire.SASL_AUTHENTICATE, 2, 1, "test", request))[
        4:
    ]
    with pytest.raises(CloseConnection):
        client.raw(frame[:cut])


def test_failures_are_logged_once_a_minute(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        client.connect()
        client.handshake()
        client.token(b"\0alice\0forged\n2026-01-01 admin logged in")
    lines = [
        record.getMessage() for record in caplog.records if record.name == "netshim"
    ]
    failures = [line for line in lines if "is not authenticated" in line]
    assert len(failures) == 1
    assert "forged" not in "".join(lines)


@pytest.mark.parametrize("seed", range(4))
def test_changed_frames_close_or_are_answered(
    client: Client, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """No frame of an unauthenticated client reaches a handler or raises an unexpected
    exception.
    """
    chance = random.Random(seed)
    token = wire.SASL_AUTHENTICATE.Request(auth_bytes=b"\0alice\0wrong")
    handshake = wire.SASL_HANDSHAKE.Request(mechanism="SCRAM-SHA-256")
    frames = [
        bytes(wire.encode_request(wire.SASL_HANDSHAKE, 1, 1, "t", handshake))[4:],
        bytes(wire.encode_request(wire.SASL_AUTHENTICATE, 2, 1, "t", token))[4:],
        bytes(wire.encode_request(wire.SASL_AUTHENTICATE, 0, 1, "t", token))[4:],
        bytes(
            wire.encode_request(
                wire.API_VERSIONS, 0, 1, "t", wire.API_VERSIONS.Request()
            )
        )[4:],
        b"n,,n=alice,r=abc",
    ]
    for _ in range(400):
        client.connect()
        try:
            stage = chance.randrange(3)
            if stage:
                client.handshake(
                    chance.choice(("PLAIN", "SCRAM-SHA-256")), version=stage - 1
                )
            for _ in range(3):
                frame = bytearray(chance.choice(frames))
                for _ in range(chance.randrange(4)):
                    frame[chance.randrange(len(frame))] = chance.randrange(256)
                client.raw(bytes(frame[: chance.randrange(len(frame)) + 1]))
        except CloseConnection:
            continue
        assert client.session.principal == "User:ANONYMOUS"
    assert "Traceback" not in caplog.text
