"""Bearer tokens of OAUTHBEARER: JSON Web Tokens, verified with PyJWT.

Rules:
- The signature is verified with a key of a JWKS (a file, or an https URL). Algorithms
  are asymmetric ones only: `none`, and HMAC with a public key as its secret, are refused.
- `exp` is required; `nbf`, `iat`, `aud` and `iss` are checked, with 30 s for clocks that
  differ.
- A JWKS from a URL is kept for an hour. It is downloaded again for an unknown key id, at
  most every 10 s. Each wait of a download takes at most 5 s. The content has at most
  1 MiB, and no part of it is read after 5 s. Redirects are refused.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from logcore.errors import InvalidConfigError
from netshim.security.sasl import Accepted, Rejected

_log = logging.getLogger("netshim")
#: The accepted algorithms. All are asymmetric. With a shared secret, each holder of the
#: secret could sign tokens.
_ALGORITHMS: Final = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512",
    "EdDSA",
)  # fmt: skip
#: Tolerated difference between the clocks of the broker and of the issuer.
_SKEW_S: Final = 30
#: Time after which the keys are read again.
_KEEP_S: Final = 3_600
#: Minimum time between two reads, after an unknown key or an error.
_RETRY_S: Final = 10
#: Limit of each wait for the server. No content is read after this time.
_DOWNLOAD_S: Final = 5
#: Maximum size of the keys.
_MAX_JWKS_BYTES: Final = 1 << 20
#: Maximum length of a token.
_MAX_TOKEN_CHARS: Final = 32 << 10
#: Maximum length of a user name.
_MAX_NAME_CHARS: Final = 1_024


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: another host could supply the keys."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


def _download(url: str) -> bytes:
    opener = urllib.request.build_opener(_NoRedirect)
    deadline = time.monotonic() + _DOWNLOAD_S
    data = b""
    with opener.open(url, timeout=_DOWNLOAD_S) as response:
        while len(data) <= _MAX_JWKS_BYTES and time.monotonic() < deadline:
            chunk = response.read1(1 << 16)
            if not chunk:
                return data
            data += chunk
    raise OSError(f"the JWKS at {url} is larger than 1 MiB, or takes longer than 5 s")


@attrs.define(eq=False)
class JwtVerifier:
    """Verifies tokens against one source of keys. Used by several threads."""

    #: Path of a file, or an https URL.
    jwks: str
    #: Expected `aud` and `iss`. None if the claim is not checked.
    audience: str | None = None
    issuer: str | None = None
    #: The claim that contains the user name.
    claim: str = "sub"
    download: Callable[[str], bytes] = _download
    #: Held during a download, so that several logins cause only one.
    _lock: threading.Lock = attrs.Factory(threading.Lock)
    #: The keys by their ids.
    _keys: dict[str | None, Any] = attrs.Factory(dict)
    #: When the keys were read, and when a read was last attempted.
    _read_s: float | None = None
    _last_attempt_s: float | None = None

    def __attrs_post_init__(self) -> None:
        try:
            import jwt  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError:
            raise InvalidConfigError(
                "OAUTHBEARER needs the package PyJWT",
                expected="pip install 'logcore-db[oauth]'",
                found="no module jwt",
            ) from None
        scheme, separator, _ = self.jwks.partition("://")
        if separator and scheme not in ("https", "file"):
            raise InvalidConfigError(
                "the JWKS", expected="a file or an https URL", found=repr(self.jwks)
            )

    def verify(self, token: str, now_ms: int) -> Accepted | Rejected:
        """Verify a token. May block for the time of a download."""
        import jwt

        if len(token) > _MAX_TOKEN_CHARS:
            return Rejected(f"a token of {len(token)} characters")
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in _ALGORITHMS:
                return Rejected(f"the algorithm {header.get('alg')!r}")
            key = self._key(header.get("kid"))
            if key is None:
                return Rejected(f"unknown key id {header.get('kid')!r}")
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[header["alg"]],
                audience=self.audience,
                issuer=self.issuer,
                options={
                    "require": ["exp"],
                    "verify_aud": self.audience is not None,
                    # Checked below with the broker's clock.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except (
            jwt.PyJWTError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            return Rejected(f"{type(error).__name__}: {error}")
        return self._checked(claims, now_ms / 1000)

    def _checked(self, claims: dict[str, Any], now_s: float) -> Accepted | Rejected:
        for name in ("exp", "nbf", "iat"):
            value = claims.get(name, now_s)
            # NaN is a number in Python's JSON, and differs from itself.
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or value != value
            ):
                return Rejected(f"the claim {name} is not a number")
            if name == "exp":
                if value + _SKEW_S <= now_s:
                    return Rejected("the token has expired")
            elif value - _SKEW_S > now_s:
                return Rejected(f"the claim {name} is in the future")
        user = claims.get(self.claim)
        if not isinstance(user, str) or not 0 < len(user) <= _MAX_NAME_CHARS:
            return Rejected(f"the claim {self.claim} is not a name")
        return Accepted(user, expires_ms=int(min(claims["exp"], 1 << 40) * 1000))

    def _key(self, key_id: str | None) -> Any:
        with self._lock:
            now_s = time.monotonic()
            is_old = self._read_s is None or now_s - self._read_s > _KEEP_S
            may_try = (
                self._last_attempt_s is None or now_s - self._last_attempt_s > _RETRY_S
            )
            if may_try and (is_old or key_id not in self._keys):
                self._last_attempt_s = now_s
                try:
                    self._read()
                    self._read_s = now_s
                except (OSError, ValueError, KeyError, TypeError, AttributeError):
                    if not self._keys:
                        raise
                    _log.exception("the former keys of %s remain in use", self.jwks)
            if key_id is None and len(self._keys) == 1:
                return next(iter(self._keys.values()))
            return self._keys.get(key_id)

    def _read(self) -> None:
        import jwt

        if self.jwks.startswith("https://"):
            data = self.download(self.jwks)
        else:
            data = Path(self.jwks.removeprefix("file://")).read_bytes()
        if len(data) > _MAX_JWKS_BYTES:
            raise OSError("the JWKS is larger than 1 MiB")
        keys: dict[str | None, Any] = {}
        for key in json.loads(data)["keys"]:
            # A key of an unknown type does not hide the others.
            try:
                keys[key.get("kid")] = jwt.PyJWK(key)
            except jwt.PyJWTError:
                continue
        self._keys = keys
