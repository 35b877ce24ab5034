"""The way of a browser to a provider of identities and back, and who is logged in at the end of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from archipel.server.openid_settings import OpenId
from tests.support.openid_provider import SECRET, LyingProvider
from tests.support.visitors import HERE, Visitor


def openid(provider: LyingProvider, folder: Path, **changes: Any) -> OpenId:
    secret = folder / "openid.secret"
    secret.write_text(f"{SECRET}\n")
    given = {"admins": ("ml-admins",), "operators": ("ml",), "auditors": ("audit",), **changes}
    return OpenId(issuer=provider.address, client_id="archipel", address=HERE, secret_file=str(secret), **given)


def begin(visitor: Visitor, wanted: str = "/dashboard/tasks") -> dict[str, str]:
    """Ask to be sent to the provider; returns what it is asked."""
    answer = visitor.get(f"/dashboard/login/openid?next={wanted}")
    assert answer.status_code == 303, answer.get_data(as_text=True)
    return {name: values[0] for name, values in parse_qs(urlsplit(answer.headers["Location"]).query).items()}


def come_back(visitor: Visitor, provider: LyingProvider, **changes: str) -> str:
    """The whole way; returns the page at the end of it."""
    provider.clock = visitor.world.clock
    asked = begin(visitor)
    provider.nonce = asked["nonce"]
    query = {"code": "c", "state": asked["state"], **changes}
    answer = visitor.client.get("/dashboard/login/openid/callback", base_url=visitor.base, query_string=query)
    return answer.get_data(as_text=True)


def role_of(visitor: Visitor) -> str | None:
    answer = visitor.get("/dashboard/")
    if answer.status_code == 303:
        return None
    found = re.search(r'<div class="person">\s*<p>([^<]+)</p>', answer.get_data(as_text=True))
    assert found is not None
    return found[1]
