"""Bearer tokens: valid tokens are accepted, and invalid or forged tokens are refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from logcore import InvalidConfigError
from netshim.security.sasl import (
    Accepted,
    Authenticator,
    Challenge,
    PasswordCache,
    Rejected,
    Work,
)
from netshim.security.service import SecuritySettings
from netshim.security.stored import SecuritySnapshot
from netshim.security.tokens import JwtVerifier

NOW_MS = 1_700_000_000_000
NOW_S = NOW_MS // 1_000
KEY = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
OTHER = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
PUBLIC_PEM = KEY.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)


def jwks(key: Any = KEY, kid: str = "k1") -> str:
    entry = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
    return json.dumps({"keys": [{**entry, "kid": kid}, {"kty": "unknown", "kid": "x"}]})


def token(
    claims: dict[str, Any] | None = None,
    key: Any = KEY,
    algorithm: str = "RS256",
    **header: Any,
) -> str:
    all_claims = {"sub": "alice", "exp": NOW_S + 60, "aud": "logs", "iss": "me"}
    all_claims.update(claims or {})
    return jwt.encode(
        {name: value for name, value in all_claims.items() if value is not None},
        key,
        algorithm=algorithm,
        headers={"kid": "k1", **header},
    )


@pytest.fixture
def verifier(tmp_path: Path) -> JwtVerifier:
    file = tmp_path / "jwks.json"
    file.write_text(jwks())
    return JwtVerifier(str(file), audience="logs", issuer="me")


def test_signed_token_is_accepted_until_it_expires(verifier: JwtVerifier) -> None:
    result = verifier.verify(token(), NOW_MS)
    assert result == Accepted("alice", expires_ms=NOW_MS + 60_000)


@pytest.mark.parametrize(
    "given",
    [
        token({"exp": NOW_S - 31}),
        token({"exp": None}),
        token({"exp": "soon"}),
        token({"nbf": NOW_S + 31}),
        token({"iat": NOW_S + 31}),
        token({"exp": float("nan")}),
        token({"nbf": float("nan")}),
        token({"aud": "other"}),
        token({"aud": None}),
        token({"iss": "other"}),
        token({"sub": None}),
        token({"sub": ""}),
        token({"sub": 7}),
        token({"sub": "x" * 2_000}),
        token(key=OTHER),
        token(kid="k2"),
        token(kid="../../etc/passwd"),
        token(key=None, algorithm="none"),
        "",
        "a.b.c",
        "x" * (1 << 20),
        "e30." + "A" * 1_000 + ".",
    ],
)
def test_token_is_refused(verifier: JwtVerifier, given: str) -> None:
    assert isinstance(verifier.verify(given, NOW_MS), Rejected)


def test_public_key_as_hmac_secret_is_refused(verifier: JwtVerifier) -> None:
    """An attacker signs a token by HMAC, and uses the public key as the secret."""
    import hashlib
    import hmac

    head = jwt.utils.base64url_encode(b'{"alg":"HS256","kid":"k1"}')
    body = jwt.utils.base64url_encode(
        json.dumps({"sub": "alice", "exp": NOW_S + 60}).encode()
    )
    signed = head + b"." + body
    signature = hmac.digest(PUBLIC_PEM, signed, hashlib.sha256)
    forged = signed + b"." + jwt.utils.base64url_encode(signature)
    assert isinstance(verifier.verify(forged.decode(), NOW_MS), Rejected)


def test_clocks_may_differ_by_half_a_minute(verifier: JwtVerifier) -> None:
    late = verifier.verify(token({"exp": NOW_S - 29}), NOW_MS)
    early = verifier.verify(token({"nbf": NOW_S + 29}), NOW_MS)
    assert isinstance(late, Accepted) and isinstance(early, Accepted)


def test_keys_are_downloaded_once_for_unknown_key_ids() -> None:
    calls: list[str] = []

    def download(url: str) -> bytes:
        calls.append(url)
        return jwks().encode()

    verifier = JwtVerifier("https://example.com/keys", download=download)
    for _ in range(20):
        assert isinstance(verifier.verify(token(kid="unknown"), NOW_MS), Rejected)
    assert isinstance(verifier.verify(token({"aud": None}), NOW_MS), Accepted)
    assert calls == ["https://example.com/keys"]


def test_failing_download_is_not_repeated_at_each_login() -> None:
    calls: list[str] = []

    def download(url: str) -> bytes:
        calls.append(url)
        raise OSError("no route")

    verifier = JwtVerifier("https://example.com/keys", download=download)
    began_s = time.monotonic()
    for _ in range(20):
        assert isinstance(verifier.verify(token(), NOW_MS), Rejected)
    assert len(calls) == 1 or time.monotonic() - began_s > 10


def test_former_keys_remain_in_use_if_they_cannot_be_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    responses = [jwks().encode(), b'{"other": 1}']
    verifier = JwtVerifier(
        "https://example.com/keys", download=lambda _: responses.pop(0)
    )
    assert isinstance(verifier.verify(token({"aud": None}), NOW_MS), Accepted)
    later_s = time.monotonic() + 4_000
    monkeypatch.setattr("netshim.security.tokens.time.monotonic", lambda: later_s)
    assert isinstance(verifier.verify(token({"aud": None}), NOW_MS), Accepted)
    assert responses == []


@pytest.mark.parametrize("source", ["http://example.com/keys", "ftp://x/y"])
def test_keys_come_by_https_or_from_a_file(source: str) -> None:
    with pytest.raises(InvalidConfigError):
        JwtVerifier(source)


def test_oauthbearer_needs_keys() -> None:
    with pytest.raises(InvalidConfigError, match="oauth-jwks"):
        SecuritySettings(mechanisms=("OAUTHBEARER",))


def exchange(verifier: JwtVerifier) -> Any:
    authenticator = Authenticator(
        SecuritySnapshot, bytes, PasswordCache(b"s"), 4_096, verifier
    )
    return authenticator.begin("OAUTHBEARER")


def step(entry: Any, message: bytes) -> Any:
    result = entry.step(message, NOW_MS)
    while isinstance(result, Work):
        result = result.run()
    return result


def test_exchange_accepts_a_token(verifier: JwtVerifier) -> None:
    for scheme in ("Bearer", "bearer"):
        message = f"n,,\x01auth={scheme} {token()}\x01\x01".encode()
        assert step(exchange(verifier), message).user == "alice"


@pytest.mark.parametrize(
    "message",
    [
        b"n,,\x01auth=Bearer bad\x01\x01",
        b"n,,\x01auth=Basic abc\x01\x01",
        b"n,,\x01\x01",
        b"y,,\x01auth=Bearer abc\x01\x01",
        b"auth=Bearer abc",
        b"\xff",
        b"",
        b"x" * (1 << 17),
    ],
)
def test_refusal_is_sent_before_the_exchange_fails(
    verifier: JwtVerifier, message: bytes
) -> None:
    """RFC 7628: the client answers the error message, and then the exchange fails."""
    entry = exchange(verifier)
    assert step(entry, message) == Challenge(b'{"status":"invalid_token"}')
    failed = step(entry, b"\x01")
    assert isinstance(failed, Rejected)
    assert failed.text == '{"status":"invalid_token"}'
