"""A TLS handshake without a network, between a server's certificate and a client that trusts a private authority."""

from __future__ import annotations

import ssl
from pathlib import Path

from archipel.protocol.tls import client_context, server_context


def handshake(folder: Path, name: str, certificate: Path | None = None) -> str:
    """What a client that trusts the folder's authority says of the server; "" if all is well."""
    file = certificate or folder / "tls/server.pem"
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context(file, file).wrap_bio(incoming, outgoing, server_side=True)
    client = client_context(folder / "tls/ca.pem").wrap_bio(outgoing, incoming, server_hostname=name)
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    assert client.version() == "TLSv1.3"
    return ""
