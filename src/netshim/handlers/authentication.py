"""SASL on a connection: the frames before authentication, and users over the wire.

Rules (all observed on Apache Kafka 4.1.1):
- A new connection may send ApiVersions once and SaslHandshake. Any other request closes
  it without a response.
- After SaslHandshake 1, only SaslAuthenticate is accepted. Another request is answered
  with ILLEGAL_SASL_STATE and closes the connection. After version 0, tokens are frames
  without a header.
- A failed authentication is answered after a delay, and closes the connection.
- With re-authentication, an expired connection is closed at its next request. A client
  may authenticate again at any time, as the same user with the same mechanism.

The mechanisms are in netshim/security/sasl.py.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from logcore import LogcoreError
from netshim import wire
from netshim.handlers.failures import fail_results
from netshim.scheduling import CloseConnection, PendingResponse
from netshim.security import scram
from netshim.security.sasl import (
    Accepted,
    Challenge,
    Exchange,
    Rejected,
    Step,
    Work,
)
from netshim.session import BROKER_USER, ClientSession
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        AlterUserScramCredentialsRequest,
        AlterUserScramCredentialsResponse,
        DescribeUserScramCredentialsRequest,
        DescribeUserScramCredentialsResponse,
        SaslAuthenticateRequest,
        SaslAuthenticateResponse,
        SaslHandshakeRequest,
        SaslHandshakeResponse,
    )

Buffer = wire.Buffer
#: The result of a frame; see Connection.
Reply = list[Buffer] | PendingResponse | None
#: Limits of AlterUserScramCredentials. A salted password has the size of its hash: 32
#: or 64 bytes.
_MAX_SALTED_BYTES: Final = 64
_MAX_NAME_CHARS: Final = 1_024
_MAX_SALT_BYTES: Final = 1_024


class _Stage(enum.Enum):
    """The progress of a connection's authentication."""

    NEW = enum.auto()
    #: A mechanism was chosen; SaslAuthenticate requests follow.
    CHOSEN = enum.auto()
    #: A mechanism was chosen with SaslHandshake 0; bare tokens follow.
    BARE = enum.auto()
    DONE = enum.auto()


class SaslAuthentication:
    """Handles the frames of one connection until it is authenticated.

    This object remains if the authentication of the connection can expire.
    """

    def __init__(self, session: ClientSession, state: BrokerState) -> None:
        """Start the authentication of a new connection."""
        self._session = session
        self._state = state
        self._stage = _Stage.NEW
        #: Whether the client has sent ApiVersions, which it may do once.
        self._has_versions = False
        #: The mechanism of the last SaslHandshake.
        self._mechanism = ""
        #: The authentication in progress; None before a handshake and after a success.
        self._exchange: Exchange | None = None
        #: Principal and mechanism of the first authentication.
        self._first: tuple[str, str] | None = None
        #: Broker time at which the authentication expires.
        self._expires_ms: int | None = None

    def use_state(self, state: BrokerState) -> None:
        """Use the state of another broker for the next requests."""
        self._state = state

    @property
    def is_authenticated(self) -> bool:
        """Whether the connection has been authenticated."""
        return self._first is not None

    @property
    def expects_token(self) -> bool:
        """Whether the next frame is a token without a header."""
        return self._stage is _Stage.BARE

    def record_versions(self) -> None:
        """Record a successful ApiVersions request. Another one closes the connection."""
        self._has_versions = True

    def close(self) -> None:
        """Detach from the session, so that a late result of a login changes nothing.

        A session and its authentication refer to each other.
        """
        self._session = ClientSession("", 0, self._session.client_address)

    def passes_requests(self, now_ms: int) -> bool:
        """Return whether handle() passes a Produce or a Fetch to its handler."""
        return self._stage is _Stage.DONE and not self._has_expired(now_ms)

    def handle(self, frame: memoryview, now_ms: int) -> Reply | bool:
        """Return the response to a frame, or True if the handler of its API must create
        the response.

        Raises:
            CloseConnection: the connection must be closed without a response.
        """
        if self._stage is _Stage.BARE:
            # Clients before KIP-152 send the tokens of SASL without a header of Kafka.
            return self._authenticate(bytes(frame), now_ms, self._bare)
        try:
            header = wire.decode_header(frame)
        except wire.ProtocolError as error:
            raise CloseConnection(str(error)) from error
        key = header.api_key
        if self._stage is _Stage.DONE:
            return self._handle_done(header, frame, now_ms)
        if self._stage is _Stage.CHOSEN:
            if key != wire.SASL_AUTHENTICATE.key:
                return self._refuse(header, "only SaslAuthenticate may follow")
            return self._handle_token(header, frame, now_ms)
        # A client needs the versions before it can authenticate.
        if key == wire.API_VERSIONS.key and not self._has_versions:
            return True
        if key != wire.SASL_HANDSHAKE.key:
            raise CloseConnection("a request before authentication")
        return self._handshake(header, frame)

    def _handle_done(
        self, header: wire.Header, frame: memoryview, now_ms: int
    ) -> Reply | bool:
        """Handle a frame of an authenticated connection."""
        key = header.api_key
        if key == wire.SASL_HANDSHAKE.key:
            return self._handshake(header, frame)
        # A client authenticates again on the same connection before its session expires
        # (KIP-368).
        if self._exchange is not None and key == wire.SASL_AUTHENTICATE.key:
            return self._handle_token(header, frame, now_ms)
        if self._has_expired(now_ms):
            raise CloseConnection("the authentication has expired")
        return True

    def _has_expired(self, now_ms: int) -> bool:
        return self._expires_ms is not None and now_ms >= self._expires_ms

    def _handshake(self, header: wire.Header, frame: memoryview) -> Reply:
        request: SaslHandshakeRequest = _decoded(header, frame)
        # A refusal lists the mechanisms too, so that the client can choose another one.
        mechanisms = list(self._state.security.mechanisms)
        response = wire.SASL_HANDSHAKE.Response(mechanisms=mechanisms)
        mechanism = request.mechanism
        if mechanism not in mechanisms:
            response.error_code = codes.UNSUPPORTED_SASL_MECHANISM
            self._session.is_closing = True
            self._log_failure("the mechanism is not served", "", mechanism)
            return _encoded(header, response)
        # As in Kafka: the connection keeps its mechanism and its user for its whole
        # life.
        if self._first is not None and self._first[1] != mechanism:
            raise CloseConnection("another mechanism than at the first authentication")
        self._mechanism = mechanism
        self._exchange = self._state.security.authenticator.begin(mechanism)
        if self._stage is _Stage.NEW:
            is_bare = header.api_version == 0
            self._stage = _Stage.BARE if is_bare else _Stage.CHOSEN
        return _encoded(header, response)

    def _handle_token(
        self, header: wire.Header, frame: memoryview, now_ms: int
    ) -> Reply:
        request: SaslAuthenticateRequest = _decoded(header, frame)
        respond = partial(self._framed, header)
        return self._authenticate(bytes(request.auth_bytes), now_ms, respond)

    def _refuse(self, header: wire.Header, reason: str) -> Reply:
        """Answer with ILLEGAL_SASL_STATE in the form of the request's API, and close.

        Raises:
            CloseConnection: the version is not served, so there is no such form.
        """
        self._session.is_closing = True
        self._log_failure(reason, "", self._mechanism)
        api = wire.APIS[header.api_key]
        if not api.min_version <= header.api_version <= api.max_version:
            raise CloseConnection(reason)
        response = api.Response()
        if hasattr(response, "error_code"):
            response.error_code = codes.ILLEGAL_SASL_STATE
        return _encoded(header, response)

    # -- tokens ------------------------------------------------------------------------

    def _authenticate(
        self, token: bytes, now_ms: int, respond: Callable[[Step, int], list[Buffer]]
    ) -> Reply:
        """Pass a token to the exchange, and return the response or a PendingResponse."""
        assert self._exchange is not None, "no mechanism was chosen"
        # Tokens contain times of the wall clock.
        step = self._exchange.step(token, self._state.wall_ms())
        if isinstance(step, Challenge):
            return respond(step, now_ms)
        if isinstance(step, Accepted):
            return self._accept(step, now_ms, respond)
        # Until the response is set, no other frame of this connection is handled.
        pending = PendingResponse(runs_in_steps=True)
        if isinstance(step, Rejected):
            self._reject(step, now_ms, respond, pending)
            return pending

        def finished(outcome: object) -> None:
            finished_ms = self._state.now_ms
            if isinstance(outcome, Challenge):
                pending.set(respond(outcome, finished_ms))
            elif isinstance(outcome, Accepted):
                try:
                    pending.set(self._accept(outcome, finished_ms, respond))
                except CloseConnection as closing:
                    pending.set(closing)
            elif isinstance(outcome, Rejected):
                self._reject(outcome, finished_ms, respond, pending)
            else:
                pending.set(CloseConnection(f"authentication failed: {outcome!r}"))

        assert isinstance(step, Work), step
        # Key derivation takes milliseconds of processor time. In a thread of its own,
        # logins cannot delay other clients.
        self._state.submit_login(step.run, finished)
        return pending

    def _accept(
        self,
        step: Accepted,
        now_ms: int,
        respond: Callable[[Step, int], list[Buffer]],
    ) -> list[Buffer]:
        principal = step.principal
        if self._first is not None and self._first[0] != principal:
            self._log_failure("another user than before", step.user, self._mechanism)
            raise CloseConnection("another user than at the first authentication")
        # Both must remain the same when the client authenticates again.
        self._first = principal, self._mechanism
        self._stage = _Stage.DONE
        self._exchange = None
        session = self._session
        # From here on, requests have the rights of this user.
        session.principal = principal
        # Only a client without authentication has this limit. Otherwise it could make
        # the broker reserve memory for a large frame.
        session.frame_limit_bytes = None
        lifetime_ms = self._lifetime_ms(step, now_ms)
        self._expires_ms = None
        if lifetime_ms:
            self._expires_ms = now_ms + lifetime_ms
        # The object is no longer needed, because the authentication cannot expire.
        elif not self._state.security.reauthenticates:
            session.authentication = None
        return respond(step, now_ms)

    def _lifetime_ms(self, step: Accepted, now_ms: int) -> int:
        """Return the lifetime of an authentication; 0 if it does not expire."""
        # A broker's password is in the registry and is valid as long as the cluster
        # exists.
        if step.is_broker:
            return 0
        # KIP-368: the shorter one of the broker's limit and of the lifetime of a token.
        max_ms = self._state.security.connections_max_reauth_ms
        limits = []
        if max_ms:
            limits.append(max_ms)
        if step.expires_ms is not None:
            # At least 1, because 0 means that the session never expires.
            limits.append(max(1, step.expires_ms - self._state.wall_ms()))
        return min(limits, default=0)

    def _reject(
        self,
        step: Rejected,
        now_ms: int,
        respond: Callable[[Step, int], list[Buffer]],
        pending: PendingResponse,
    ) -> None:
        """Answer a failed authentication after a delay, which slows down guessing."""
        self._log_failure(step.reason, step.user, self._mechanism)

        def send(finished_ms: int) -> None:
            if self._stage is _Stage.BARE:
                # Without a header, the protocol has no form for an error.
                pending.set(CloseConnection("authentication failed"))
                return
            self._session.is_closing = True
            pending.set(respond(step, finished_ms))

        delay_ms = self._state.security.failed_delay_ms
        self._state.timers.at(now_ms + delay_ms, send)

    def _bare(self, step: Step, now_ms: int) -> list[Buffer]:
        """Return a token as a frame without a header."""
        assert isinstance(step, Challenge | Accepted), step
        return [len(step.token).to_bytes(4, "big") + step.token]

    def _framed(self, header: wire.Header, step: Step, now_ms: int) -> list[Buffer]:
        """Return a step as the response of SaslAuthenticate."""
        response = wire.SASL_AUTHENTICATE.Response(auth_bytes=b"")
        if isinstance(step, Rejected):
            response.error_code = codes.SASL_AUTHENTICATION_FAILED
            response.error_message = (
                step.text or f"Authentication failed with {self._mechanism}"
            )
        else:
            assert isinstance(step, Challenge | Accepted), step
            response.auth_bytes = step.token
        if isinstance(step, Accepted) and self._expires_ms is not None:
            response.session_lifetime_ms = self._expires_ms - now_ms
        return _encoded(header, response)

    def _log_failure(self, reason: str, user: str, mechanism: str) -> None:
        security = self._state.security
        # A client chooses the text, and each label of a metric costs memory.
        is_known = mechanism in security.mechanisms
        security.failures[mechanism if is_known else "other"] += 1
        self._state.journal.log(
            logging.WARNING,
            f"authentication failed {self._session.client_address}",
            self._state.now_ms,
            "a connection from %s is not authenticated: %s (mechanism %.100r, user %.100r)",
            self._session.client_address,
            reason,
            mechanism,
            user,
            max_lines=1,
        )


def _decoded(header: wire.Header, frame: memoryview) -> Any:
    try:
        return wire.decode_request(header, frame)
    except wire.ProtocolError as error:
        raise CloseConnection(str(error)) from error


def _encoded(header: wire.Header, response: object) -> list[Buffer]:
    api = wire.APIS[header.api_key]
    return wire.encode_response(
        api, header.api_version, header.correlation_id, response
    )


# -- handlers of authenticated connections ---------------------------------------------


def sasl_handshake(
    request: SaslHandshakeRequest, call: Call, state: BrokerState
) -> SaslHandshakeResponse:
    """Refuse: the connection needs no authentication. It remains open."""
    return wire.SASL_HANDSHAKE.Response(error_code=codes.ILLEGAL_SASL_STATE)


def sasl_authenticate(
    request: SaslAuthenticateRequest, call: Call, state: BrokerState
) -> SaslAuthenticateResponse:
    """Refuse: no SaslHandshake came first. The connection remains open."""
    return wire.SASL_AUTHENTICATE.Response(
        error_code=codes.ILLEGAL_SASL_STATE,
        error_message="SaslAuthenticate without a SaslHandshake",
        auth_bytes=b"",
    )


def describe_user_scram_credentials(
    request: DescribeUserScramCredentialsRequest, call: Call, state: BrokerState
) -> DescribeUserScramCredentialsResponse:
    """Return the mechanisms and iterations of users, never their keys."""
    response_type = wire.DESCRIBE_USER_SCRAM_CREDENTIALS.Response
    users = state.security.snapshot.users
    if request.users:
        names = [user.name for user in request.users]
    else:
        names = sorted(users)
    results = []
    for name, count in Counter(names).items():
        result = response_type.User(user=name)
        # The response has one entry for each user.
        if count > 1:
            result.error_code = codes.DUPLICATE_RESOURCE
            result.error_message = "the user is named twice"
        elif name not in users:
            result.error_code = codes.RESOURCE_NOT_FOUND
            result.error_message = "no such user"
        else:
            result.credential_infos = [
                response_type.User.CredentialInfo(
                    mechanism=scram.NUMBERS[mechanism], iterations=user.iterations
                )
                for mechanism, user in sorted(users[name].items())
            ]
        results.append(result)
    return response_type(results=results)


def alter_user_scram_credentials(
    request: AlterUserScramCredentialsRequest, call: Call, state: BrokerState
) -> PendingResponse | AlterUserScramCredentialsResponse:
    """Set or remove credentials. All changes of one user are made, or none."""
    response_type = wire.ALTER_USER_SCRAM_CREDENTIALS.Response
    mechanisms = {number: name for name, number in scram.NUMBERS.items()}
    changes: dict[str, dict[str, scram.Credential | None]] = {}
    errors: dict[str, tuple[int, str]] = {}
    accepted: list[tuple[str, int, Any]] = [
        *((deletion.name, deletion.mechanism, None) for deletion in request.deletions),
        *(
            (upsertion.name, upsertion.mechanism, upsertion)
            for upsertion in request.upsertions
        ),
    ]
    for name, number, change in accepted:
        mechanism = mechanisms.get(number)
        # A user without a valid change has an entry, too, and therefore a result.
        of_user = changes.setdefault(name, {})
        error = _error_of(name, mechanism, change)
        if error is None and mechanism in of_user:
            error = codes.DUPLICATE_RESOURCE, "the same mechanism is named twice"
        if error is not None:
            # The first error refuses all changes of the user.
            errors.setdefault(name, error)
            continue
        assert mechanism is not None
        credential = None
        if change is not None:
            credential = scram.credential_of(
                mechanism,
                bytes(change.salted_password),
                bytes(change.salt),
                change.iterations,
            )
        of_user[mechanism] = credential

    def store() -> Mapping[str, tuple[int, str]]:
        unknown = {}
        for name, of_user in changes.items():
            if name not in errors and not state.security.store().set_credentials(
                name, of_user
            ):
                unknown[name] = codes.RESOURCE_NOT_FOUND, "no such credential"
        return unknown

    def response(unknown: Mapping[str, tuple[int, str]]) -> Any:
        all_errors = {**errors, **unknown}
        return response_type(
            results=[
                response_type.User(
                    user=name,
                    error_code=all_errors.get(name, (codes.NONE, None))[0],
                    error_message=all_errors.get(name, (codes.NONE, None))[1],
                )
                for name in changes
            ]
        )

    def refuse(error: LogcoreError) -> Any:
        refused = response({})
        fail_results(refused.results, error)
        return refused

    return state.change_security(store, response, refuse)


def _error_of(name: str, mechanism: str | None, change: Any) -> tuple[int, str] | None:
    """Return the error of one change, if any."""
    unacceptable = codes.UNACCEPTABLE_CREDENTIAL
    if not name or len(name) > _MAX_NAME_CHARS or "\0" in name:
        return unacceptable, "the user name is empty, too long or contains NUL"
    if name == BROKER_USER:
        return unacceptable, "the name belongs to the brokers of a cluster"
    if mechanism is None:
        return codes.UNSUPPORTED_SASL_MECHANISM, "unknown mechanism"
    if change is None:
        return None
    if not scram.MIN_ITERATIONS <= change.iterations <= scram.MAX_ITERATIONS:
        return (
            unacceptable,
            f"iterations: expected {scram.MIN_ITERATIONS} to "
            f"{scram.MAX_ITERATIONS}, found {change.iterations}",
        )
    if len(change.salt) > _MAX_SALT_BYTES:
        return unacceptable, "the salt is too long"
    if not 0 < len(change.salted_password) <= _MAX_SALTED_BYTES:
        return unacceptable, "the salted password is empty or too long"
    return None
