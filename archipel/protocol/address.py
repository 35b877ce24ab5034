"""The address of a server, as devices and operators give it."""

from __future__ import annotations

from urllib.parse import urlsplit

from archipel.errors import ClientError


def check_url(url: str, name: str = "server") -> None:
    """Raises ClientError, which begins with `name`, unless `url` is such as https://federation.example:8443."""
    if not url.startswith(("http://", "https://")):
        raise ClientError(f"{name}: expected a URL that starts with https:// or http://, got {url[:100]!r}")
    try:
        parts = urlsplit(url)
        right = bool(parts.hostname) and parts.port != 0 and not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        right = False
    if not right or not url.isprintable() or " " in url:
        # What was given is not shown: somebody may have put credentials into it.
        raise ClientError(f"{name}: expected a host and maybe a port, such as https://federation.example:8443")
