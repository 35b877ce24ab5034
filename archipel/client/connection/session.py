"""Authorized requests: a signed challenge gives a bearer token, which the session renews before it expires."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.client.connection.identity import DeviceRecord
from archipel.client.connection.transport import MAX_MESSAGE_BYTES, Transport
from archipel.errors import RefusedError, SessionRefusedError, UnreachableError
from archipel.protocol.messages import Challenge, ChallengeRequest, SessionProof, SessionRequest, SessionResponse
from archipel.protocol.sealed import encode, seal

T = TypeVar("T")

_RENEW_AT = 0.8
"""The share of a token's lifetime after which it is renewed."""


class DeviceSession:
    """Adds `Authorization` to every request. It never compares the server's clock with the device's, which may be
    wrong: a token's lifetime is the difference of two times of the server."""

    def __init__(self, transport: Transport, record: DeviceRecord, key: Ed25519PrivateKey) -> None:
        self._transport = transport
        self._record = record
        self._key = key
        self._token = ""
        self._renew_at = 0.0

    def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = MAX_MESSAGE_BYTES,
        retry: bool = True,
    ) -> T:
        """Transport.call with a token; after a 401 once more with a new one. Raises RefusedError, UnreachableError."""
        return self._authorized(
            lambda bearer: self._transport.call(
                method, path, kind, body=body, headers={**(headers or {}), **bearer}, limit=limit, retry=retry
            )
        )

    def server_time(self) -> float | None:
        """The server's clock now, Unix seconds; None while it is not known."""
        return self._transport.server_time()

    def silence(self) -> float:
        """For how many seconds the server has not answered; 0 before its first answer."""
        return self._transport.silence()

    def download(self, path: str, target: Path, limit: int, *, stop: int | None = None) -> None:
        """Transport.download with a token; after a 401 once more with a new one."""
        self._authorized(lambda bearer: self._transport.download(path, target, limit, bearer, stop=stop))

    def _authorized(self, request: Callable[[Mapping[str, str]], T]) -> T:
        if not self._token or time.monotonic() >= self._renew_at:
            self._open()
        try:
            return request(self._bearer())
        except RefusedError as error:
            if error.status != 401:
                raise
        # Once: the server may have lost its sessions in a restart. A second 401 is for the caller.
        self._open()
        return request(self._bearer())

    def _bearer(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self._token}"}

    def _open(self) -> None:
        response = self._shaken()
        now = self._transport.server_time()
        lifetime = 0.0 if now is None else response.expires - now
        # Without the server's clock the token is used until a 401 says that it has expired.
        self._renew_at = time.monotonic() + _RENEW_AT * lifetime if lifetime > 0 else math.inf
        self._token = response.token

    def _shaken(self) -> SessionResponse:
        # The server accepts a nonce once, so each attempt needs a new challenge.
        away: UnreachableError | None = None
        try:
            for attempt in range(1, self._transport.attempts + 1):
                try:
                    return self._handshake()
                except UnreachableError as error:
                    away = error
                    if attempt == self._transport.attempts:
                        raise
                except RefusedError as error:
                    # 403 can also mean that the nonce was too old, or that the network delivered the proof twice. So it
                    # means that the server refuses this device only if it came at every attempt.
                    if error.status not in (403, 404):
                        raise
                    if attempt == self._transport.attempts or error.status == 404:
                        raise away or SessionRefusedError(
                            error.status, error.kind, error.message, error.retry_after, error.request_id
                        ) from None
                self._transport.wait(attempt)
        finally:
            # It refers to this frame, and the frame to it: the connection that broke off would stay open until both
            # are collected.
            away = None
        raise AssertionError("unreachable")

    def _handshake(self) -> SessionResponse:
        # The proof names the server's key: another server cannot pass on the challenge and use the answer. It is sent
        # once, because the server would refuse the same nonce again.
        device_id = self._record.device_id
        challenge = self._transport.call(
            "POST", "/v1/challenges", Challenge, body=encode(ChallengeRequest(device_id=device_id))
        )
        proof = seal("session", SessionProof(nonce=challenge.nonce, server_key=self._record.server_key), self._key)
        request = SessionRequest(device_id=device_id, proof=proof)
        return self._transport.call("POST", "/v1/sessions", SessionResponse, body=encode(request), retry=False)
