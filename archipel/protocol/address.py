"""Checks the address of a server that devices and operators give."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from archipel.errors import ClientError


def check_url(url: str, name: str = "server", *, allow_http: bool = False, setting: str = "allow_http") -> None:
    """Raises ClientError, which begins with `name`, unless `url` is such as https://federation.example:8443.

    Plain http:// is for servers on this machine. For others it needs `allow_http`, as everybody on the way can read
    tokens and sessions. `setting` is the name of `allow_http` where the address was given, for the error.
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
        # The address is not shown: somebody may have put credentials into it.
        raise ClientError(f"{name}: expected a host and maybe a port, such as https://federation.example:8443")
    if url.startswith("http://") and not allow_http and not _is_loopback(host):
        raise ClientError(
            f"{name}: plain http:// to {host}, where everybody on the way can read tokens; use https://, or set "
            f"{setting} where the way is protected otherwise"
        )


def _is_loopback(host: str) -> bool:
    """Whether `host` is this machine on every system: RFC 6761 reserves `localhost` for that."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
