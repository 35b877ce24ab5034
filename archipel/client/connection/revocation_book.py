"""The last list of revocations that this device has seen, which is on disk before the device acts on it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from archipel.client.connection.session import DeviceSession
from archipel.client.memory.stored import read_limited
from archipel.durable import write_durably
from archipel.errors import CertificateError, ClientError, MessageError
from archipel.protocol.messages import MAX_REVOCATION_BYTES, Digest, Revocations
from archipel.protocol.revocations import Revoked, check_successor
from archipel.protocol.sealed import Sealed, decode, unseal


class RevocationBook:
    """The list in the file `path`, as the server sealed it with `server_key` for the devices of `population`."""

    def __init__(self, path: Path, server_key: bytes, population: str) -> None:
        self._path = path
        self._server_key = server_key
        self._population = population

    def fetch_named(self, digest: Digest | None, session: DeviceSession) -> Revoked:
        """The revoked devices and tokens in the list with this digest, which a plan names; None: no list.

        The list is fetched, unless it is the one on disk. Raises CertificateError or MessageError if it must not follow
        that one (it is older, or has lost an entry), ClientError if the file is damaged, RefusedError,
        UnreachableError.
        """
        data = self._stored()
        seen = None if data is None else self._read(data)
        if data is not None and hashlib.sha256(data).hexdigest() == digest:
            return Revoked.of(seen)
        if digest is None:
            # A plan without a list claims that nobody was ever revoked, which contradicts any list that was seen.
            check_successor(seen, None, self._population)
            return Revoked.of(None)
        fetched = self._fetch(digest, session)
        newer = self._read(fetched)
        # On disk before the device acts on it: so the server cannot return to an older list after a restart.
        check_successor(seen, newer, self._population)
        write_durably(self._path, fetched)
        return Revoked.of(newer)

    def _fetch(self, digest: str, session: DeviceSession) -> bytes:
        part = self._path.with_name(f"{self._path.name}.part")
        # A part that a killed process left may be of another list; the lists are small enough to begin anew.
        part.unlink(missing_ok=True)
        try:
            session.download(f"/v1/blobs/{digest}", part, MAX_REVOCATION_BYTES)
            data = part.read_bytes()
        finally:
            part.unlink(missing_ok=True)
        if hashlib.sha256(data).hexdigest() != digest:
            raise CertificateError(f"revocations: the plan names {digest}, the server sent another list")
        return data

    def _read(self, data: bytes) -> Revocations:
        sealed = decode("revocations", data, Sealed)
        return unseal("revocations", sealed, self._server_key, Revocations)

    def _stored(self) -> bytes | None:
        try:
            data = read_limited(self._path, MAX_REVOCATION_BYTES)
            if data is not None:
                self._read(data)
        except (CertificateError, MessageError) as error:
            raise ClientError(
                f"{self._path}: damaged ({error}); remove it, and the device forgets whom the server has revoked"
            ) from None
        return data
