"""The settings of a server whose dashboard lets people log in at a provider of identities (OpenID Connect)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from archipel.server.callers import Role

Values = Annotated[tuple[str, ...], Meta(max_length=64)]
_LOCAL = ("localhost", "127.0.0.1", "::1")


class OpenId(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [openid]: who may log in at the dashboard with which role (docs/dashboard.md). Relative paths start in the
    data folder."""

    issuer: str
    """The provider's URL, as its ID tokens name it."""
    client_id: str
    """This server's name at the provider."""
    address: str
    """The URL under which browsers reach this server; the provider sends them back to
    ADDRESS/dashboard/login/openid/callback."""
    secret_file: str = "openid.secret"
    """File of this server's password at the provider."""
    scopes: Values = ("openid", "profile")
    """What the provider is asked for."""
    claim: str = "groups"
    """The claim of the ID token that the roles follow from: a text or a list of texts."""
    admins: Values = ()
    """Whoever has one of these in the claim is an admin."""
    operators: Values = ()
    """The same for operators, who are no admins."""
    analysts: Values = ()
    auditors: Values = ()
    populations_claim: str = ""
    """A claim with the populations that somebody may see; empty: all of them."""
    ca_file: str = ""
    """PEM file of the authorities that may certify the provider's TLS certificate; empty: those of the `certifi`
    package."""

    def __post_init__(self) -> None:
        for name, url in (("issuer", self.issuer), ("address", self.address)):
            parts = urlsplit(url)
            if not parts.hostname or parts.query or parts.fragment or parts.username is not None:
                raise ValueError(f"{name}: expected such as https://login.example, got {url[:100]!r}")
            if parts.scheme != "https" and (parts.scheme, parts.hostname in _LOCAL) != ("http", True):
                raise ValueError(f"{name}: expected https://; only this machine may be reached by http://")
        if self.address.endswith("/") or urlsplit(self.address).path:
            raise ValueError("address: expected a URL without a path, such as https://federation.example")
        if "openid" not in self.scopes:
            raise ValueError("scopes: 'openid' is missing, without which a provider sends no ID token")
        if not (self.admins or self.operators or self.analysts or self.auditors):
            raise ValueError(
                "admins, operators, analysts, auditors: name in one of them a value of the claim, or nobody can log in"
            )

    def role_of(self, values: Iterable[str]) -> Role | None:
        """The role with the most rights that one of the claim's values gives; None: no role at all."""
        found = set(values)
        given: dict[Role, Values] = {
            "admin": self.admins,
            "operator": self.operators,
            "analyst": self.analysts,
            "auditor": self.auditors,
        }
        return next((role for role, values in given.items() if not found.isdisjoint(values)), None)
