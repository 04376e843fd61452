"""An authorization server on loopback: bearer tokens, their keys, and HTTP."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs
import jwt
from cryptography.hazmat.primitives.asymmetric import rsa


def _new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65_537, key_size=2_048)


@attrs.define(eq=False)
class TokenIssuer:
    """Issues RS256 tokens for one audience."""

    audience: str = "logs"
    #: The user of the tokens that the server issues.
    user: str = "alice"
    #: The lifetime of the tokens that the server issues.
    lifetime_s: float = 300
    #: The number of tokens that were issued.
    issued: int = 0
    key: rsa.RSAPrivateKey = attrs.Factory(_new_key)
    #: The clock of the times in the tokens, in seconds.
    now_s: Callable[[], float] = time.time

    def jwks(self) -> str:
        """Return the public key as a JWKS."""
        jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        return json.dumps({"keys": [{**jwk, "kid": "k1"}]})

    def token(self, user: str | None = None, lifetime_s: float | None = None) -> str:
        """Issue a token for a user."""
        self.issued += 1
        now_s = self.now_s()
        lifetime_s = self.lifetime_s if lifetime_s is None else lifetime_s
        claims = {
            "sub": user or self.user,
            "aud": self.audience,
            "iss": "tests",
            "iat": now_s,
            "exp": now_s + lifetime_s,
        }
        return jwt.encode(claims, self.key, algorithm="RS256", headers={"kid": "k1"})

    @contextmanager
    def serve(self, tls: ssl.SSLContext | None = None) -> Iterator[str]:
        """Serve /token and /keys, with TLS if a context is given; yield the URL."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        scheme = "http"
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
            scheme = "https"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"{scheme}://localhost:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(issuer.jwks())

            def do_POST(self) -> None:
                """Answer the client credentials grant of RFC 6749."""
                self.rfile.read(int(self.headers["Content-Length"]))
                answer = {
                    "access_token": issuer.token(),
                    "token_type": "bearer",
                    "expires_in": int(issuer.lifetime_s),
                }
                self._answer(json.dumps(answer))

            def _answer(self, text: str) -> None:
                data = text.encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *given: Any) -> None:
                pass

        return Handler
