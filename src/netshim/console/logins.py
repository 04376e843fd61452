"""Logins of a console: passwords, sessions, and limits for failed logins.

Rules:
- The users of the broker may log in. Passwords are verified as for SASL PLAIN: an
  unknown user gets the same error as a wrong password, after the same time.
- A session ends with the process, after SESSION_MS, at a logout, and when the user's
  password is changed or the user is removed.
- The console keeps a hash of the cookie of a session, and never the cookie.
- Failed logins are limited by address, and by user and address. An attacker therefore
  cannot lock out a user who logs in from another address.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Mapping
from typing import Final

import attrs

from logcore.errors import LogcoreError
from logcore.fs import FS, OS
from netshim.console.access import ConsoleAccess
from netshim.security import scram
from netshim.security.sasl import PLAIN, Accepted, Authenticator, PasswordCache, Work
from netshim.security.scram import Credential

SESSION_MS: Final = 8 * 3_600_000
#: Maximum number of sessions. The oldest one ends if there are more.
_MAX_SESSIONS: Final = 1_000
#: Length of the window in which failed logins are counted.
_WINDOW_MS: Final = 60_000
#: Maximum number of failed logins from one address in a window.
_MAX_OF_ADDRESS: Final = 20
#: Maximum number for each pair of a user and an address.
_MAX_OF_USER: Final = 5
#: Maximum number of counters. If there are more, all of them are reset.
_MAX_COUNTERS: Final = 10_000
#: Maximum number of passwords that are verified at the same time: each occupies a core
#: for at least 5 ms.
_MAX_AT_ONCE: Final = 2


class LoginRefusedError(LogcoreError):
    """A login that failed. The text is for the user."""

    def __init__(self, reason: str, *, is_limited: bool = False) -> None:
        super().__init__(reason)
        #: Whether there were too many failed logins.
        self.is_limited = is_limited


@attrs.frozen
class LoginSession:
    """A user who has logged in."""

    user: str
    #: The credentials at the login. If they change, the session ends.
    credentials: Mapping[str, Credential] = attrs.field(repr=False)
    expires_ms: int

    @property
    def principal(self) -> str:
        return f"User:{self.user}"


class ConsoleLogins:
    """The sessions of one console. Threads of pages may use it at the same time."""

    def __init__(self, access: ConsoleAccess, fs: FS = OS) -> None:
        self._access = access
        self._fs = fs
        #: Protects the sessions and the failures.
        self._lock = threading.Lock()
        #: Held while a password is verified.
        self._slots = threading.BoundedSemaphore(_MAX_AT_ONCE)
        #: By the hash of the cookie, oldest first.
        self._sessions: dict[bytes, LoginSession] = {}
        #: Key -> time of the first failure in the window, and number of failures.
        self._failures: dict[tuple[str, ...], tuple[int, int]] = {}
        #: The key of the tokens in forms.
        self._secret = secrets.token_bytes(32)
        self._authenticator = Authenticator(
            snapshot=access.read_snapshot,
            random=secrets.token_bytes,
            passwords=PasswordCache(secrets.token_bytes(32)),
            iterations=scram.MIN_ITERATIONS,
        )

    def log_in(self, user: str, password: str, address: str) -> str:
        """Verify a password and return the cookie of a new session. Takes milliseconds.

        Raises:
            LoginRefusedError: the password is wrong, or too many logins have failed.
            LogcoreError: the users cannot be read.
        """
        now_ms = self._fs.monotonic_ms()
        keys = {
            (address,): _MAX_OF_ADDRESS,
            (address, user[:256]): _MAX_OF_USER,
        }
        # Counted before the verification, so that many logins at once are limited too.
        for key, maximum in keys.items():
            if self._count(key, now_ms) > maximum:
                raise LoginRefusedError(
                    "Too many logins have failed. Try again in a minute.",
                    is_limited=True,
                )
        credentials = self._access.read_snapshot().users.get(user, {})
        if not self._is_right(user, password, now_ms):
            raise LoginRefusedError("The user or the password is wrong.")
        cookie = secrets.token_urlsafe(32)
        with self._lock:
            # Other failures of the address remain counted: a user may guess the
            # passwords of others.
            for key in keys:
                if key in self._failures:
                    since_ms, count = self._failures[key]
                    self._failures[key] = since_ms, count - 1
            while len(self._sessions) >= _MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[_hashed(cookie)] = LoginSession(
                user, credentials, now_ms + SESSION_MS
            )
        return cookie

    def _count(self, key: tuple[str, ...], now_ms: int) -> int:
        """Count a login as failed, and return the failures in its window.

        log_in() subtracts it again if the login succeeds.
        """
        with self._lock:
            if len(self._failures) >= _MAX_COUNTERS:
                self._failures.clear()
            since_ms, count = self._failures.get(key, (now_ms, 0))
            if now_ms - since_ms >= _WINDOW_MS:
                since_ms, count = now_ms, 0
            self._failures[key] = since_ms, count + 1
            return count + 1

    def _is_right(self, user: str, password: str, now_ms: int) -> bool:
        token = f"\0{user}\0{password}".encode("utf-8", "replace")
        with self._slots:
            step = self._authenticator.begin(PLAIN).step(token, now_ms)
            if isinstance(step, Work):
                step = step.run()
        return isinstance(step, Accepted)

    def session(self, cookie: str) -> LoginSession | None:
        """Return the session of a cookie, or None if it has ended. May block.

        Raises:
            LogcoreError: the users cannot be read.
        """
        if not cookie:
            return None
        key = _hashed(cookie)
        with self._lock:
            session = self._sessions.get(key)
        if session is None:
            return None
        users = self._access.read_snapshot().users
        is_valid = (
            self._fs.monotonic_ms() < session.expires_ms
            and users.get(session.user) == session.credentials
        )
        if not is_valid:
            self.log_out(cookie)
            return None
        return session

    def log_out(self, cookie: str) -> None:
        """End the session of a cookie, if there is one."""
        with self._lock:
            self._sessions.pop(_hashed(cookie), None)

    def form_token(self, cookie: str) -> str:
        """Return the token of the forms of a session. Without a login, `cookie` is "".

        Pages of other origins cannot read it.
        """
        return hmac.new(self._secret, cookie.encode(), "sha256").hexdigest()

    def is_form_token(self, cookie: str, token: str) -> bool:
        """Return whether a token belongs to the session of a cookie."""
        return hmac.compare_digest(self.form_token(cookie).encode(), token.encode())


def _hashed(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()
