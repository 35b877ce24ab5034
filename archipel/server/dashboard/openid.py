"""Asks a provider of identities who somebody is: OpenID Connect's code flow, with PKCE, `state` and `nonce`.

Sources: OpenID Connect Core 1.0 (sections 3.1.2 and 3.1.3.7), Discovery 1.0, RFC 7636 (PKCE), RFC 9207 (`iss` of an
answer). Authlib speaks to the provider and checks claims, joserfc checks signatures.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from archipel.errors import MissingExtraError, ServerError
from archipel.server.callers import Identity
from archipel.server.openid_settings import OpenId
from archipel.server.settings import Settings

CALLBACK = "/dashboard/login/openid/callback"
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
"""Of ID tokens' signatures: with a key that the provider alone has."""
SECONDS = 10.0
"""Within which the provider must answer each request."""
LEEWAY = 60
"""Seconds by which the provider's clock and this one may differ."""
MOST_BYTES = 1 << 20
KEPT_SECONDS = 3600.0
"""How long what the provider says of itself is believed, and its keys, unless a token has an unknown one."""
_AGAIN_SECONDS = 30.0
_MOST_POPULATIONS = 1000
_PLAIN_SUBJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,39}")


class OpenIdError(ServerError):
    """Nobody is logged in: the provider is away, or it or the browser has said something that cannot be believed."""


class NoRoleError(OpenIdError):
    """Somebody is who they are, and may not see anything here."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One way to the provider and back, as the browser keeps it in a cookie that this server has signed."""

    state: Annotated[str, Meta(max_length=64)]
    nonce: Annotated[str, Meta(max_length=64)]
    verifier: Annotated[str, Meta(max_length=128)]
    next: Annotated[str, Meta(max_length=2048)]
    expires: float


class _Metadata(msgspec.Struct, frozen=True):
    """What a provider says of itself."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    authorization_response_iss_parameter_supported: bool = False


class Provider:
    """The provider of one web process. Any number of threads may use it."""

    def __init__(self, settings: Settings, openid: OpenId) -> None:
        """Raises ServerError where the password's file cannot be read, MissingExtraError without Authlib."""
        try:
            import authlib.integrations.requests_client
            import joserfc.jwt
            import requests
        except ModuleNotFoundError as error:
            raise MissingExtraError((error.name or "authlib").partition(".")[0], "oidc") from error
        del authlib, joserfc, requests
        self._openid = openid
        self._secret = _read_secret(settings.path(openid.secret_file))
        self._verify: str | bool = str(settings.path(openid.ca_file)) if openid.ca_file else True
        self._lock = threading.Lock()
        self._metadata: tuple[float, _Metadata] | None = None
        self._keys: tuple[float, Any] | None = None

    @property
    def name(self) -> str:
        """The provider's host, for people."""
        return urlsplit(self._openid.issuer).hostname or ""

    def begin(self, *, wanted: str, now: float, seconds: float) -> tuple[str, Attempt]:
        """Where to send the browser, and what it has to bring back. Raises OpenIdError."""
        attempt = Attempt(
            state=secrets.token_urlsafe(32), nonce=secrets.token_urlsafe(32), verifier=secrets.token_urlsafe(48),
            next=wanted, expires=now + seconds,
        )  # fmt: skip
        with self._session() as session:
            url, _ = session.create_authorization_url(
                self._described(now).authorization_endpoint, state=attempt.state, nonce=attempt.nonce,
                code_verifier=attempt.verifier,
            )  # fmt: skip
        return url, attempt

    def finish(self, attempt: Attempt, answer: Mapping[str, str], *, now: float) -> Identity:
        """Who has come back with the provider's answer, which are the parameters of the callback.

        Raises OpenIdError for anything that cannot be believed, NoRoleError for somebody without a role here.
        """
        if now > attempt.expires:
            raise OpenIdError("logging in took too long; try again")
        if not secrets.compare_digest(answer.get("state", "").encode(), attempt.state.encode()):
            raise OpenIdError("the answer belongs to another attempt to log in; try again")
        if "error" in answer:
            said = answer.get("error_description") or answer["error"]
            raise OpenIdError(f"{self.name} says: {said[:200]!r}")
        described = self._described(now)
        if answer.get("iss", described.issuer) != described.issuer or (
            described.authorization_response_iss_parameter_supported and "iss" not in answer
        ):
            raise OpenIdError("the answer is of another provider")
        if not answer.get("code"):
            raise OpenIdError(f"{self.name} sent the browser back without a code")
        token = self._exchange(described, answer["code"], attempt)
        return self._identity(self._claims(described, token, attempt, now))

    def _exchange(self, described: _Metadata, code: str, attempt: Attempt) -> str:
        """The ID token for a code."""
        from authlib.common.errors import AuthlibBaseError
        from requests import RequestException

        with self._session() as session:
            try:
                given = session.fetch_token(
                    described.token_endpoint, code=code, code_verifier=attempt.verifier, timeout=SECONDS,
                    grant_type="authorization_code", allow_redirects=False,
                )  # fmt: skip
            except AuthlibBaseError as error:
                said = (error.description or error.error)[:200]
                raise OpenIdError(f"{self.name} refuses the code: {said!r}") from None
            except (RequestException, ValueError) as error:
                raise self._away(error) from None
        token = given.get("id_token")
        if not isinstance(token, str) or len(token) > MOST_BYTES:
            raise OpenIdError(f"{self.name} sent no ID token")
        return token

    def _claims(self, described: _Metadata, token: str, attempt: Attempt, now: float) -> Mapping[str, Any]:
        """What a signed ID token says, once all of it is checked."""
        from authlib.common.errors import AuthlibBaseError
        from authlib.oidc.core import CodeIDToken
        from joserfc import jwt
        from joserfc.errors import JoseError

        def decode(again: bool) -> Any:
            return jwt.decode(token, self._keys_of(described, now, again=again), algorithms=list(ALGORITHMS))

        try:
            try:
                decoded = decode(False)
            except (JoseError, ValueError):
                # A provider changes its keys now and then.
                decoded = decode(True)
            claims = CodeIDToken(
                decoded.claims, decoded.header,
                {
                    "iss": {"essential": True, "value": described.issuer},
                    "aud": {"essential": True, "value": self._openid.client_id},
                    "nonce": {"essential": True, "value": attempt.nonce},
                    **{name: {"essential": True} for name in ("sub", "exp", "iat")},
                },
                {"client_id": self._openid.client_id, "nonce": attempt.nonce},
            )  # fmt: skip
            claims.validate(now=int(now), leeway=LEEWAY)
        except (JoseError, AuthlibBaseError, ValueError, TypeError, KeyError) as error:
            raise OpenIdError(f"the ID token of {self.name} cannot be believed ({type(error).__name__})") from None
        return dict(claims)

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        openid = self._openid
        role = openid.role_of(_texts(claims.get(openid.claim)))
        if role is None:
            raise NoRoleError(
                f"{self.name} knows you, and nothing in your claim {openid.claim!r} has a role at this server; ask "
                "whoever runs it"
            )
        populations = None
        if openid.populations_claim:
            named = _texts(claims.get(openid.populations_claim))
            if not named or len(named) > _MOST_POPULATIONS:
                raise NoRoleError(
                    f"{self.name} knows you, and your claim {openid.populations_claim!r} has no populations"
                )
            populations = frozenset(named)
        return Identity(role, subject_id(openid.issuer, claims["sub"]), populations)

    def _described(self, now: float) -> _Metadata:
        """What the provider says of itself."""
        with self._lock:
            kept = self._metadata
        if kept is not None and now - kept[0] < KEPT_SECONDS:
            return kept[1]
        issuer = self._openid.issuer
        data = self._fetch(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        try:
            found = msgspec.json.decode(data, type=_Metadata)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OpenIdError(
                f"{self.name} does not describe itself as a provider of OpenID Connect: {error}"
            ) from None
        if found.issuer != issuer:
            raise OpenIdError(f"the provider's name is {found.issuer[:100]!r}, and openid.issuer is {issuer!r}")
        for url in (found.authorization_endpoint, found.token_endpoint, found.jwks_uri):
            # As private as the issuer itself.
            if urlsplit(url).scheme not in ("https", urlsplit(issuer).scheme):
                raise OpenIdError(f"{self.name} names {url[:100]!r}, which is not https://")
        with self._lock:
            self._metadata = (now, found)
        return found

    def _keys_of(self, described: _Metadata, now: float, *, again: bool) -> Any:
        from joserfc.jwk import KeySet

        with self._lock:
            kept = self._keys
        # Not for each token with an unknown key, which anybody could send.
        if kept is not None and now - kept[0] < (_AGAIN_SECONDS if again else KEPT_SECONDS):
            return kept[1]
        keys = KeySet.import_key_set(msgspec.json.decode(self._fetch(described.jwks_uri)))
        with self._lock:
            self._keys = (now, keys)
        return keys

    def _fetch(self, url: str) -> bytes:
        """A small document of the provider's."""
        import requests

        try:
            with requests.get(
                url, timeout=SECONDS, verify=self._verify, allow_redirects=False, stream=True,
                headers={"Accept": "application/json"},
            ) as answer:  # fmt: skip
                if answer.status_code != 200:
                    raise OpenIdError(f"{self.name} answers {answer.status_code} to {url[:200]}")
                data = b"".join(_bounded(answer.iter_content(1 << 16)))
        except requests.RequestException as error:
            raise self._away(error) from None
        if len(data) > MOST_BYTES:
            raise OpenIdError(f"{url[:200]} has more than {MOST_BYTES} bytes")
        return data

    def _away(self, error: Exception) -> OpenIdError:
        return OpenIdError(f"{self.name} cannot be reached ({type(error).__name__}); try again, or use an access token")

    def _session(self) -> Any:
        from authlib.integrations.requests_client import OAuth2Session

        session = OAuth2Session(
            self._openid.client_id, self._secret, scope=" ".join(self._openid.scopes), code_challenge_method="S256",
            redirect_uri=self._openid.address + CALLBACK,
        )  # fmt: skip
        session.verify = self._verify
        return session


def subject_id(issuer: str, subject: object) -> str:
    """Somebody's name in sessions and the audit log: `openid:` and the provider's name for them, or its digest.

    It has at most 48 characters and belongs to one person of the provider. Raises OpenIdError for no name.
    """
    if not isinstance(subject, str) or not 0 < len(subject) <= 255:
        raise OpenIdError("the ID token names nobody")
    if _PLAIN_SUBJECT.fullmatch(subject):
        return f"openid:{subject}"
    return "openid:" + hashlib.sha256(f"{issuer} {subject}".encode()).hexdigest()[:40]


def _bounded(parts: Any) -> Any:
    size = 0
    for part in parts:
        yield part
        size += len(part)
        if size > MOST_BYTES:
            return


def _texts(value: object) -> list[str]:
    """The texts of a claim, which is one of them or a list."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def _read_secret(path: Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            secret = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise ServerError(
            f"openid.secret_file: {path} cannot be read ({why}); put this server's password at the provider into it"
        ) from None
    if not secret:
        raise ServerError(f"openid.secret_file: {path} is empty")
    return secret
