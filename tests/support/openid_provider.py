"""A provider of identities that says whatever a test wants, also what no honest provider would say."""

from __future__ import annotations

import base64
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

SECRET = "between these two"


@cache
def make_key(whose: str) -> RSAKey:
    """One for all tests, as it takes a while; `whose` makes it another one."""
    return RSAKey.generate_key(2048, {"kid": "one"})


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@dataclass
class LyingProvider:
    """`claims` are laid over those of an honest ID token (None: left out), `metadata` over what it says of itself.

    `signed_by`: "own", "another" key, "nobody" (algorithm none), or "the public key" as if it were a shared secret.
    """

    address: str
    claims: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    signed_by: str = "own"
    answer: dict[str, Any] | None = None
    asked: list[dict[str, str]] = field(default_factory=list)
    nonce: str = ""
    clock: Callable[[], float] = time.time
    key: RSAKey = field(default_factory=lambda: make_key("own"))

    def token(self) -> str:
        now = int(self.clock())
        honest = {
            "iss": self.address, "sub": "olga", "aud": "archipel", "nonce": self.nonce, "iat": now, "exp": now + 300,
            "groups": ["ml"],
        }  # fmt: skip
        claims = {name: each for name, each in {**honest, **self.claims}.items() if each is not None}
        if self.signed_by in ("nobody", "the public key"):
            # By hand, as joserfc refuses both.
            header = {"alg": "none" if self.signed_by == "nobody" else "HS256", "kid": "one"}
            signed = ".".join(encode(json.dumps(part).encode()) for part in (header, claims))
            mac = hmac.digest(self.key.as_pem(private=False), signed.encode(), "sha256")
            return f"{signed}.{encode(mac) if header['alg'] == 'HS256' else ''}"
        return jwt.encode({"alg": "RS256", "kid": "one"}, claims, make_key(self.signed_by))

    def describe(self) -> dict[str, Any]:
        return {
            "issuer": self.address, "authorization_endpoint": f"{self.address}/auth",
            "token_endpoint": f"{self.address}/token", "jwks_uri": f"{self.address}/keys", **self.metadata,
        }  # fmt: skip


@contextmanager
def lying_provider() -> Iterator[LyingProvider]:
    """It listens on this machine until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys = KeySet([provider.key]).as_dict(private=False)
            self.reply({"/.well-known/openid-configuration": provider.describe(), "/keys": keys}[self.path])

        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            provider.asked.append({name: values[0] for name, values in form.items()})
            if provider.answer is not None:
                self.reply(provider.answer, 400)
                return
            self.reply({"access_token": "a", "token_type": "Bearer", "id_token": provider.token()})

        def reply(self, body: object, status: int = 200) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider = LyingProvider(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
