"""SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677): credentials and proofs.

Rules:
- A stored credential contains no password: salt, StoredKey, ServerKey, iterations.
- There is no channel binding, and no SASLprep, like in Kafka.
- An exchange with an unknown user continues with a mock credential and fails at the
  proof, with the text and the cost of a wrong password. The mock credential has the
  form of a stored one, because iterations and salts differ between the tools that
  create users.

Pure functions of bytes: no clock, no store.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable
from typing import Final

import attrs

#: Name of a mechanism -> name of its hash in hashlib.
HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
#: Numbers of the mechanisms in AlterUserScramCredentials.
NUMBERS: Final = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
#: The mechanism with which brokers of a cluster log in to each other.
BROKER_MECHANISM: Final = "SCRAM-SHA-512"
#: The limits of Kafka for AlterUserScramCredentials.
MIN_ITERATIONS: Final = 4_096
MAX_ITERATIONS: Final = 16_384
#: Maximum size of a message.
MAX_TOKEN_BYTES: Final = 8_192
#: Size of the salts that this package creates.
SALT_BYTES: Final = 24
_NONCE_BYTES: Final = 24
#: Bits of the number that is a salt of Kafka's tools in base 36.
_KAFKA_SALT_BITS: Final = 130
#: The form of salts that Kafka's tools create.
_KAFKA_SALT: Final = re.compile(rb"[0-9a-z]{20,26}")
_BASE36: Final = b"0123456789abcdefghijklmnopqrstuvwxyz"


class ScramError(Exception):
    """A message that RFC 5802 does not allow, or a wrong proof. The text is the reason."""


@attrs.frozen
class Credential:
    """The stored data of one user and mechanism."""

    salt: bytes
    #: The hash of the client key, with which the broker verifies the proof.
    stored_key: bytes = attrs.field(repr=False)
    #: The key with which the broker signs its last message.
    server_key: bytes = attrs.field(repr=False)
    iterations: int


def salted_password(
    mechanism: str, password: str, salt: bytes, iterations: int
) -> bytes:
    """Return SaltedPassword. Takes some milliseconds: call it in a worker thread."""
    return hashlib.pbkdf2_hmac(HASHES[mechanism], password.encode(), salt, iterations)


def credential_of(
    mechanism: str, salted: bytes, salt: bytes, iterations: int
) -> Credential:
    """Return the credential for a salted password."""
    name = HASHES[mechanism]
    client_key = hmac.digest(salted, b"Client Key", name)
    return Credential(
        salt=salt,
        stored_key=hashlib.new(name, client_key).digest(),
        server_key=hmac.digest(salted, b"Server Key", name),
        iterations=iterations,
    )


def credentials_of(
    password: str, iterations: int, random: Callable[[int], bytes]
) -> dict[str, Credential]:
    """Return credentials for a password, one for each mechanism.

    `random` returns that many random bytes, for the salts.
    """
    credentials = {}
    for mechanism in HASHES:
        salt = random(SALT_BYTES)
        salted = salted_password(mechanism, password, salt, iterations)
        credentials[mechanism] = credential_of(mechanism, salted, salt, iterations)
    return credentials


@attrs.frozen(order=True)
class CredentialForm:
    """The properties of a credential that the broker sends or spends time on."""

    mechanism: str
    iterations: int
    #: 0 for a salt like those of Kafka's tools: 130 random bits in base 36.
    salt_bytes: int = SALT_BYTES

    @classmethod
    def of(cls, mechanism: str, credential: Credential) -> CredentialForm:
        """Return the form of a stored credential."""
        size = 0 if _KAFKA_SALT.fullmatch(credential.salt) else len(credential.salt)
        return cls(mechanism, credential.iterations, size)


def chosen_form(
    secret: bytes, user: str, forms: Iterable[CredentialForm]
) -> CredentialForm:
    """Choose one of several forms, always the same for a name.

    Further forms change the choice for few names.
    """
    return max(
        forms,
        key=lambda form: hmac.digest(secret, f"{form}\0{user}".encode(), "sha256"),
    )


def mock_credential(secret: bytes, user: str, form: CredentialForm) -> Credential:
    """Return a credential for a user without one, always the same for a name.

    No proof matches it. Only the servers of a directory have `secret`, so that
    a client cannot distinguish the salt from a stored one.
    """
    name = HASHES[form.mechanism]
    seed = f"{form.mechanism}\0{user}".encode()
    size = hashlib.new(name).digest_size
    # The key is not the hash of a known value, so no proof matches it.
    key = hmac.digest(secret, b"key" + seed, "sha512")[:size]
    salt = hashlib.pbkdf2_hmac(
        "sha512", secret, b"salt" + seed, 1, form.salt_bytes or SALT_BYTES
    )
    # An unknown user must not be recognizable by a salt of another form.
    if not form.salt_bytes:
        salt = _base36(int.from_bytes(salt, "big") % (1 << _KAFKA_SALT_BITS))
    return Credential(salt, key, key, form.iterations)


def _base36(number: int) -> bytes:
    digits = []
    while number:
        number, digit = divmod(number, 36)
        digits.append(_BASE36[digit])
    return bytes(reversed(digits))


def parse_credential(text: str) -> Credential:
    """Read a credential in the form of Kafka's ZooKeeper nodes.

    Raises:
        ValueError: a field is missing or malformed.
    """
    fields = dict(part.strip().split("=", 1) for part in text.split(","))
    return Credential(
        salt=base64.b64decode(fields["salt"], validate=True),
        stored_key=base64.b64decode(fields["stored_key"], validate=True),
        server_key=base64.b64decode(fields["server_key"], validate=True),
        iterations=int(fields["iterations"]),
    )


def format_credential(credential: Credential) -> str:
    """Return a credential in the form that parse_credential() reads."""
    salt, stored, server = (
        base64.b64encode(part).decode()
        for part in (credential.salt, credential.stored_key, credential.server_key)
    )
    return f"salt={salt},stored_key={stored},server_key={server},iterations={credential.iterations}"


@attrs.frozen
class ClientFirst:
    """The first message of a client."""

    user: str
    nonce: str
    #: The message without its header, which is part of the signed text.
    bare: str
    #: The part of the message before `bare`.
    header: str


def parse_first(token: bytes) -> ClientFirst:
    """Read the client's first message.

    Raises:
        ScramError: the message is malformed, requests channel binding or an extension.
    """
    text = _text(token)
    parts = text.split(",")
    if len(parts) < 4 or parts[0] != "n":
        raise ScramError("the first message requests channel binding or is malformed")
    user = _user(_value(parts[2], "n"))
    # Kafka does not let a user act as another one.
    if parts[1] and _user(_value(parts[1], "a")) != user:
        raise ScramError("the authorization id is not the user name")
    nonce = _value(parts[3], "r")
    if not nonce or any(not "!" <= character <= "~" for character in nonce):
        raise ScramError("the nonce is empty or not printable")
    # Extensions such as Kafka's tokenauth=true follow. An `m=` is in the place of the
    # user name, and is refused there.
    header = f"{parts[0]},{parts[1]},"
    return ClientFirst(user, nonce, text[len(header) :], header)


@attrs.frozen
class ScramState:
    """An exchange after the client's first message."""

    mechanism: str
    first: ClientFirst
    credential: Credential
    nonce: str
    #: The message to send to the client.
    challenge: bytes


def challenge(
    mechanism: str, first: ClientFirst, credential: Credential, random: bytes
) -> ScramState:
    """Answer the client's first message. `random` has 24 bytes for the nonce."""
    assert len(random) == _NONCE_BYTES, len(random)
    # The client's part is new in each login, so an old challenge cannot be sent again.
    # The server's part prevents the same for an old proof.
    nonce = first.nonce + base64.urlsafe_b64encode(random).decode()
    salt = base64.b64encode(credential.salt).decode()
    message = f"r={nonce},s={salt},i={credential.iterations}".encode()
    return ScramState(mechanism, first, credential, nonce, message)


def verify(exchange: ScramState, token: bytes) -> bytes:
    """Check the client's final message, and return the server's final message.

    Raises:
        ScramError: the message is malformed or the proof is wrong.
    """
    text = _text(token)
    without_proof, separator, proof_text = text.rpartition(",p=")
    if not separator:
        raise ScramError("the final message has no proof")
    parts = without_proof.split(",")
    if len(parts) < 2 or _decoded(_value(parts[0], "c")) != (
        exchange.first.header.encode()
    ):
        raise ScramError("the channel binding differs from the first message")
    # librdkafka before 2.6.1 repeats its own nonce in front. Kafka 3 accepts that, and
    # Kafka 4 does not. This is safe, because the server's part is new in each
    # exchange.
    if _value(parts[1], "r") not in (
        exchange.nonce,
        exchange.first.nonce + exchange.nonce,
    ):
        raise ScramError("the nonce differs from the challenge")
    name = HASHES[exchange.mechanism]
    proof = _decoded(proof_text)
    # AuthMessage of RFC 5802: all three messages, so that none can be changed on the
    # way.
    signed = b",".join(
        (exchange.first.bare.encode(), exchange.challenge, without_proof.encode())
    )
    credential = exchange.credential
    signature = hmac.digest(credential.stored_key, signed, name)
    if len(proof) != len(signature):
        raise ScramError("the proof has the wrong length")
    client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
    digest = hashlib.new(name, client_key).digest()
    if not hmac.compare_digest(digest, credential.stored_key):
        raise ScramError("the proof is wrong")
    server = hmac.digest(credential.server_key, signed, name)
    return b"v=" + base64.b64encode(server)


def _text(token: bytes) -> str:
    if len(token) > MAX_TOKEN_BYTES:
        raise ScramError(f"a message of {len(token)} bytes")
    try:
        text = token.decode()
    except UnicodeDecodeError:
        raise ScramError("the message is not UTF-8") from None
    if "\0" in text:
        raise ScramError("the message contains NUL")
    return text


def _value(part: str, key: str) -> str:
    if not part.startswith(key + "="):
        raise ScramError(f"expected {key}=, found {part[:1]!r}")
    return part[2:]


def _user(text: str) -> str:
    """Return a user name without its escapes."""
    name = text.replace("=2C", ",").replace("=3D", "=")
    if not name or text.count("=") != text.count("=2C") + text.count("=3D"):
        raise ScramError("the user name is empty or wrongly escaped")
    return name


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, ValueError):
        raise ScramError("the message contains invalid base64") from None
