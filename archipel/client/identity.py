"""The device's own key and who it is enrolled with, in its folder.

Replacing the key: the next one is on disk before the server hears of it, and the old one until the server has taken the
next. So whichever of them the server answers to is there, wherever the process is killed. Which one the record is for
says its chain; a record that was written for the next key is the sign to put that in the old one's place.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import generate_key, load_private_key, save_private_key
from archipel.errors import ClientError, MessageError, ProtocolError
from archipel.lite_runtime.durable import sync_folder, write_durably
from archipel.protocol.identity import EnrolmentToken, extend_chain, verify_chain
from archipel.protocol.messages import Chain, DeviceId, Key, Name
from archipel.protocol.sealed import Sealed, decode, encode, public_bytes

KEY_FILE = "device.key"
NEXT_KEY_FILE = "device.key.next"
RECORD_FILE = "device.json"
_MAX_RECORD_BYTES = 64 << 10


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """device.json: what enrolment left. All keys are pinned: no later answer of the server can change them."""

    device_id: DeviceId
    server: str
    server_key: Key
    enrolment_key: Key
    publisher_keys: list[Key]
    population: Name
    chain: Chain


class IdentityStore:
    """The files KEY_FILE (PEM, mode 0600) and RECORD_FILE in `folder`, and NEXT_KEY_FILE while the key is replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def key(self, make: Callable[[], Ed25519PrivateKey] = generate_key) -> Ed25519PrivateKey:
        """The device's private key, made on the first call. It appears in its file whole or not at all.

        Raises SignatureError when the file is damaged, ClientError when others may read it.
        """
        return self._kept(KEY_FILE, make)

    def next_key(self, make: Callable[[], Ed25519PrivateKey] = generate_key) -> Ed25519PrivateKey:
        """The key that is to replace it, made on the first call and then the same until `rotated`. Raises as `key`."""
        return self._kept(NEXT_KEY_FILE, make)

    @property
    def rotating(self) -> bool:
        """Whether there is a next key: the server may answer to it already."""
        return (self._folder / NEXT_KEY_FILE).exists()

    def _kept(self, name: str, make: Callable[[], Ed25519PrivateKey]) -> Ed25519PrivateKey:
        path = self._folder / name
        if not path.exists():
            temporary = self._folder / f".{name}.{secrets.token_hex(8)}.tmp"
            try:
                save_private_key(make(), temporary)
                os.rename(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            sync_folder(self._folder)
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise ClientError(f"{path}: mode {mode:o} lets others read the device's key; run: chmod 600 {path}")
        return load_private_key(path)

    def record(self) -> DeviceRecord | None:
        """None before enrolment. Finishes `rotated` where that was interrupted.

        Raises ClientError when the file is damaged or not this key's.
        """
        found = self._read_record()
        if found is not None:
            self._settle(found)
        return found

    def rotated(self, record: DeviceRecord, certificate: Sealed) -> DeviceRecord:
        """The server answers to the next key: write RECORD_FILE with the certificate at the end of its chain, and put
        the next key in the old one's place. Raises CertificateError when the certificate is not for that."""
        chain = extend_chain(record.chain, certificate)
        device = verify_chain(chain, record.enrolment_key, population=record.population)
        if device.device_key != public_bytes(self.next_key()):
            raise ClientError("rotation: the certificate is for another key")
        changed = msgspec.structs.replace(record, chain=chain)
        write_durably(self._folder / RECORD_FILE, encode(changed))
        self._settle(changed)
        return changed

    def _settle(self, record: DeviceRecord) -> None:
        try:
            newest = verify_chain(record.chain, record.enrolment_key, population=record.population).device_key
        except ProtocolError as error:
            raise ClientError(
                f"{self._folder / RECORD_FILE}: damaged ({error}); enrol again with a new token"
            ) from None
        if public_bytes(self.key()) == newest:
            return
        if not self.rotating or public_bytes(self.next_key()) != newest:
            raise ClientError(
                f"{self._folder}: {KEY_FILE} is not the key in {RECORD_FILE}; enrol again with a new token"
            )
        os.rename(self._folder / NEXT_KEY_FILE, self._folder / KEY_FILE)
        sync_folder(self._folder)

    def _read_record(self) -> DeviceRecord | None:
        path = self._folder / RECORD_FILE
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ClientError(f"{path}: cannot be read ({error.strerror})") from None
        try:
            if len(data) > _MAX_RECORD_BYTES:
                raise MessageError(f"{len(data)} bytes, the limit is {_MAX_RECORD_BYTES}")
            return decode("device record", data, DeviceRecord)
        except MessageError as error:
            raise ClientError(f"{path}: damaged ({error}); enrol again with a new token") from None

    def enrolled(self, token: EnrolmentToken, chain: Chain, server: str) -> DeviceRecord:
        """Write RECORD_FILE. Raises CertificateError when the chain is not this key's."""
        device = verify_chain(chain, token.enrolment_key, population=token.population)
        if device.device_key != public_bytes(self.key()):
            raise ClientError("enrolment: the chain is for another device's key")
        record = DeviceRecord(
            device_id=device.device_id,
            server=server,
            server_key=token.server_key,
            enrolment_key=token.enrolment_key,
            publisher_keys=token.publisher_keys,
            population=token.population,
            chain=chain,
        )
        write_durably(self._folder / RECORD_FILE, encode(record))
        return record
