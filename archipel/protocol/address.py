"""The address of a server, as devices and operators give it."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from archipel.errors import ClientError


def check_url(url: str, name: str = "server", *, allow_http: bool = False, setting: str = "allow_http") -> None:
    """Raises ClientError, which begins with `name`, unless `url` is such as https://federation.example:8443.

    Plain http:// is for servers on this very machine, elsewhere only with `allow_http`: tokens and sessions would be
    there to read for everybody on the way. `setting` is what `allow_http` is called where the address was given.
    """
    if not url.startswith(("http://", "https://")):
        raise ClientError(f"{name}: expected a URL that starts with https:// or http://, got {url[:100]!r}")
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        right = bool(host) and parts.port != 0 and not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        host, right = "", False
    if not right or not url.isprintable() or " " in url:
        # What was given is not shown: somebody may have put credentials into it.
        raise ClientError(f"{name}: expected a host and maybe a port, such as https://federation.example:8443")
    if url.startswith("http://") and not allow_http and not _is_loopback(host):
        raise ClientError(
            f"{name}: plain http:// to {host}, where everybody on the way can read tokens; use https://, or set "
            f"{setting} where the way is protected otherwise"
        )


def _is_loopback(host: str) -> bool:
    """Whether that is this machine, whatever resolves names: RFC 6761 keeps `localhost` for it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
