"""Authentication by SASL: the next step after each token of a client.

Rules:
- Passwords are stored once, as SCRAM credentials. PLAIN derives the same keys from the
  password that it receives.
- An unknown user and a wrong password have the same text, the same steps and the cost
  of an existing user.
- In a cluster, the name BROKER_USER and SCRAM-SHA-512 belong to the brokers. Their
  password is in the registry, so that no client can change or delete it.
- Work that takes milliseconds, such as the derivation of keys or the download of
  signing keys, is returned as Work. The caller runs it in a worker thread.

This module contains no frames and no sockets; see handlers/authentication.py.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from typing import Final, Protocol

import attrs

from netshim.security import scram
from netshim.security.scram import (
    BROKER_MECHANISM,
    Credential,
    CredentialForm,
    ScramError,
)
from netshim.security.stored import SecuritySnapshot
from netshim.session import BROKER_PRINCIPAL, BROKER_USER

PLAIN: Final = "PLAIN"
OAUTHBEARER: Final = "OAUTHBEARER"
MECHANISMS: Final = (PLAIN, *scram.HASHES, OAUTHBEARER)
#: How long a correct password of PLAIN is cached.
_REMEMBER_MS: Final = 60_000
#: Maximum number of cached passwords. At this number, the cache is emptied.
_MAX_CACHED_PASSWORDS: Final = 10_000
#: The next two are below the largest frame before authentication, which is 512 KiB.
MAX_PASSWORD_BYTES: Final = 1_024

_MAX_TOKEN_BYTES: Final = 64 << 10


@attrs.frozen
class Challenge:
    """Send a token, and continue with the client's next one."""

    token: bytes


@attrs.frozen
class Accepted:
    """The client is authenticated."""

    user: str
    #: The last token for the client.
    token: bytes = b""
    #: Wall clock at which the authentication expires; None if it never does.
    expires_ms: int | None = None
    #: Whether the client is a broker of the cluster.
    is_broker: bool = False

    @property
    def principal(self) -> str:
        """The principal of the client."""
        return BROKER_PRINCIPAL if self.is_broker else f"User:{self.user}"


@attrs.frozen
class Rejected:
    """The client is not authenticated."""

    #: For the log. The client gets one text for all reasons.
    reason: str
    user: str = ""
    #: The text for the client, if the mechanism defines a text.
    text: str | None = None


@attrs.frozen
class Work:
    """Run a function in a worker thread. It returns the next step."""

    run: Callable[[], Step]


Step = Challenge | Accepted | Rejected | Work


class Exchange(Protocol):
    """The exchange of one authentication."""

    mechanism: str

    def step(self, token: bytes, now_ms: int) -> Step:
        """Return the step after a token of the client. `now_ms` is the wall clock."""
        ...


class TokenVerifier(Protocol):
    """Verifies bearer tokens; tokens.py implements it."""

    def verify(self, token: str, now_ms: int) -> Accepted | Rejected:
        """Verify a token. May block on the network for some seconds."""
        ...


@attrs.define(eq=False)
class PasswordCache:
    """Passwords of PLAIN that were correct a short time ago, as keyed hashes."""

    #: The key of the hashes.
    _secret: bytes
    #: Until when each hash is accepted.
    _until_ms: dict[bytes, int] = attrs.Factory(dict)

    def contains(
        self, user: str, password: str, credential: Credential, now_ms: int
    ) -> bool:
        """Return whether the password was correct within the last minute."""
        until_ms = self._until_ms.get(self._key(user, password, credential))
        return until_ms is not None and now_ms < until_ms

    def add(
        self, user: str, password: str, credential: Credential, now_ms: int
    ) -> None:
        """Cache a correct password."""
        if len(self._until_ms) >= _MAX_CACHED_PASSWORDS:
            self._until_ms.clear()
        self._until_ms[self._key(user, password, credential)] = now_ms + _REMEMBER_MS

    def _key(self, user: str, password: str, credential: Credential) -> bytes:
        # The stored key differs for each password, and an admin client may use one
        # salt for two passwords.
        parts = [
            part.hex()
            for part in (user.encode(), password.encode(), credential.stored_key)
        ]
        return hmac.digest(self._secret, ":".join(parts).encode(), "sha256")


@attrs.frozen
class Authenticator:
    """Creates the exchanges of a broker."""

    #: Returns the stored users that are in effect. They change during exchanges.
    snapshot: Callable[[], SecuritySnapshot]
    #: Returns that many random bytes.
    random: Callable[[int], bytes]
    passwords: PasswordCache
    #: Iterations of mock credentials while no user exists.
    iterations: int
    #: Verifies tokens of OAUTHBEARER. None if the mechanism is not served.
    tokens: TokenVerifier | None = None

    def is_broker(self, user: str, mechanism: str | None) -> bool:
        """Return whether a login belongs to a broker of the cluster."""
        is_broker_login = user == BROKER_USER and mechanism == BROKER_MECHANISM
        return is_broker_login and self.snapshot().brokers is not None

    def begin(self, mechanism: str) -> Exchange:
        """Return a new exchange for a mechanism that is served."""
        if mechanism == PLAIN:
            return _Plain(self)
        if mechanism == OAUTHBEARER:
            assert self.tokens is not None, "OAUTHBEARER is served without a verifier"
            return _Bearer(self.tokens)
        return _Scram(self, mechanism)

    def credential(
        self, user: str, mechanism: str | None = None
    ) -> tuple[str, Credential, bool]:
        """Return the mechanism and the credential of a user, and whether it is stored.

        Without a mechanism, it is the first mechanism of the user.
        """
        snapshot = self.snapshot()
        if self.is_broker(user, mechanism):
            assert snapshot.brokers is not None
            return BROKER_MECHANISM, snapshot.brokers.credential, True
        secret = snapshot.salt_secret or b"no users"
        mechanisms = tuple(scram.HASHES)
        if mechanism is not None:
            mechanisms = (mechanism,)
        # Computed for existing users too, so that the time does not reveal which exist.
        form = scram.chosen_form(
            secret,
            user,
            snapshot.forms.get(mechanism or "")
            or (CredentialForm(mechanisms[0], self.iterations),),
        )
        mock = scram.mock_credential(secret, user, form)
        stored = snapshot.users.get(user, {})
        for offered in mechanisms:
            if offered in stored:
                return offered, stored[offered], True
        return form.mechanism, mock, False


@attrs.define(eq=False)
class _Scram:
    """An exchange of SCRAM-SHA-256 or SCRAM-SHA-512."""

    _owner: Authenticator
    mechanism: str
    _exchange: scram.ScramState | None = None
    #: Whether the user exists. Otherwise, the credential is a mock one.
    _is_known: bool = False

    def step(self, token: bytes, now_ms: int) -> Step:
        user = ""
        if self._exchange is not None:
            user = self._exchange.first.user
        try:
            if self._exchange is None:
                first = scram.parse_first(token)
                user = first.user
                _, credential, self._is_known = self._owner.credential(
                    user, self.mechanism
                )
                self._exchange = scram.challenge(
                    self.mechanism, first, credential, self._owner.random(24)
                )
                return Challenge(self._exchange.challenge)
            # The second message contains the proof.
            final = scram.verify(self._exchange, token)
        except ScramError as error:
            return Rejected(str(error), user)
        if not self._is_known:  # no proof matches a mock credential
            return Rejected("unknown user", user)
        # The user may have been deleted, or the password changed, since the challenge.
        _, current, _ = self._owner.credential(user, self.mechanism)
        if current != self._exchange.credential:
            return Rejected("the credential was changed during the exchange", user)
        is_broker = self._owner.is_broker(user, self.mechanism)
        return Accepted(user, final, is_broker=is_broker)


@attrs.define(eq=False)
class _Plain:
    """An exchange of PLAIN (RFC 4616)."""

    _owner: Authenticator
    mechanism: str = PLAIN

    def step(self, token: bytes, now_ms: int) -> Step:
        # Limits the work of decoding. The password itself is checked below.
        if len(token) > 4 * MAX_PASSWORD_BYTES:
            return Rejected(f"a token of {len(token)} bytes")
        try:
            authorization_id, user, password = token.decode().split("\0")
        except ValueError:
            return Rejected("the token does not have the form of RFC 4616")
        if not user or not password or authorization_id not in ("", user):
            return Rejected("an empty name or password, or another authorization id")
        if len(password.encode()) > MAX_PASSWORD_BYTES:
            return Rejected("a password that is too long", user)
        mechanism, credential, is_known = self._owner.credential(user)
        if is_known and self._owner.passwords.contains(
            user, password, credential, now_ms
        ):
            return Accepted(user)

        def derive() -> Step:
            salted = scram.salted_password(
                mechanism, password, credential.salt, credential.iterations
            )
            derived = scram.credential_of(
                mechanism, salted, credential.salt, credential.iterations
            )
            # Both conditions are evaluated, so that the time does not depend on the
            # user.
            is_right = hmac.compare_digest(derived.stored_key, credential.stored_key)
            if not (is_right and is_known):
                return Rejected("unknown user or wrong password", user)
            # As in SCRAM: the login may have waited for a thread.
            _, current, _ = self._owner.credential(user, mechanism)
            if current != credential:
                return Rejected("the credential was changed during the login", user)
            self._owner.passwords.add(user, password, credential, now_ms)
            return Accepted(user)

        return Work(derive)


@attrs.define(eq=False)
class _Bearer:
    """An exchange of OAUTHBEARER (RFC 7628)."""

    _tokens: TokenVerifier
    mechanism: str = OAUTHBEARER
    _rejected: Rejected | None = None

    def step(self, token: bytes, now_ms: int) -> Step:
        if self._rejected is not None:
            # The client's token after the error message.
            return self._rejected
        try:
            bearer = _bearer_of(token)
        except ValueError as error:
            return self._reject(Rejected(str(error)))

        def verify() -> Step:
            accepted = self._tokens.verify(bearer, now_ms)
            if isinstance(accepted, Rejected):
                return self._reject(accepted)
            return accepted

        return Work(verify)

    def _reject(self, rejected: Rejected) -> Step:
        """Send the error as a challenge first, as RFC 7628 demands."""
        text = json.dumps({"status": "invalid_token"}, separators=(",", ":"))
        self._rejected = attrs.evolve(rejected, text=text)
        return Challenge(text.encode())


def _bearer_of(token: bytes) -> str:
    """Return the token in a client's message.

    Raises:
        ValueError: the message is malformed.
    """
    if len(token) > _MAX_TOKEN_BYTES:
        raise ValueError(f"a message of {len(token)} bytes")
    parts = token.decode().split("\x01")
    # The message is "n,,", then key=value pairs, each followed by 0x01, and a final
    # 0x01.
    if len(parts) < 4 or not parts[0].startswith("n,") or parts[-1] or parts[-2]:
        raise ValueError("the message does not have the form of RFC 7628")
    for part in parts[1:-2]:
        key, _, value = part.partition("=")
        scheme, _, bearer = value.partition(" ")
        if key == "auth" and scheme.lower() == "bearer" and bearer.strip():
            return bearer.strip()
    raise ValueError("the message has no bearer token")
